package main

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/xpyd/xpyd/scripts/bench/harness"
)

// buildForGPU builds what was not given: libxpyd_cuda.so, and the xpyd under test with cgo.
func buildForGPU(ctx context.Context, b *harness.Bench, library *string) (err error) {
	if *library == "" {
		*library = filepath.Join(b.Dir, "libxpyd_cuda.so")
		if _, err := harness.Run(ctx, nil, "scripts/build-cuda", *library); err != nil {
			return err
		}
	}
	if *library, err = filepath.Abs(*library); err != nil || b.XPYD != "" {
		return err
	}
	b.XPYD = filepath.Join(b.Dir, "xpyd")
	return harness.Build(ctx, ".", b.XPYD, "1")
}

// gpuName is the name of the first GPU.
func gpuName(ctx context.Context) string {
	raw, err := harness.Run(ctx, nil, "nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
	name, _, _ := strings.Cut(raw, "\n")
	if err != nil || name == "" {
		return "GPU"
	}
	return strings.TrimSpace(name)
}

// plainEnv is this process's environment without settings of xpyd.
func plainEnv() []string {
	return slices.DeleteFunc(os.Environ(), func(e string) bool { return strings.HasPrefix(e, "XPYD_") && !strings.HasPrefix(e, "XPYD_CUDA_") })
}
