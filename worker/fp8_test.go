package worker_test

import (
	"log/slog"
	"path/filepath"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/kernels/cuda"
	"github.com/xpyd/xpyd/worker"
)

// A worker that was told to compute in what only a GPU has does not fall back to
// the CPU.
func TestNeedsGPU(t *testing.T) {
	t.Setenv(cuda.LibraryEnv, filepath.Join(t.TempDir(), "none.so"))
	f := func(want string, change func(*worker.Config)) {
		t.Helper()
		cfg := worker.DefaultConfig(fleet.Decode)
		cfg.Threads, cfg.KVMemory = 1, 8<<20
		change(&cfg)
		w, err := worker.Start(t.Context(), cfg, worker.Deps{Log: slog.New(slog.DiscardHandler), Registry: prometheus.NewRegistry(), Build: "test"})
		if err == nil {
			w.Close(t.Context())
			t.Fatal("started")
		}
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not in %q", want, err)
		}
	}
	f("kv_cache_dtype: fp8 needs a GPU: ", func(c *worker.Config) { c.KVCacheDType = "fp8" })
	f("dtype: fp16 needs a GPU: ", func(c *worker.Config) { c.DType = "fp16" })
	f("quantization: fp8 needs a GPU: ", func(c *worker.Config) { c.Quantization = "fp8" })
}
