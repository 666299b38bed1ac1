package main

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// pack is pack.json, which lies beside the programs in a folder also called a pack.
type pack struct {
	Commit string `json:"commit"`
	Build  string `json:"build"` // digest of the programs; what passed is not run again for the same one
}

// goTests are the test binaries of a pack, by package.
var goTests = []struct{ name, path string }{
	{"cuda.test", "./kernels/cuda"}, {"worker.test", "./worker"}, {"stage.test", "./kvconn/stage"},
}

var (
	compiled = []string{"libxpyd_cuda.so", "probe", "moves", "cuda.test", "worker.test", "stage.test", "xpyd", "bench"}
	// texts are copied: scripts, and a tokenizer for models of random weights.
	texts = []string{"scripts/cuda-test", "scripts/cuda-hf", "scripts/cuda-peers.py", "scripts/fleet.py", "scripts/push-test", "scripts/push-faults", "scripts/ranks-test", "scripts/walls-test",
		"internal/model/stories260k/tokenizer.json", "internal/model/stories260k/tokenizer_config.json"}
)

// room is what may be sent to a machine at once, checkout included.
const room = 64 << 20

// programs returns the folder of the programs: a pack that this one lies in, or bin/cuda, into
// which they are built.
func programs(ctx context.Context, say io.Writer) (dir string, p pack, err error) {
	exe, err := os.Executable()
	if err != nil {
		return "", p, err
	}
	dir = filepath.Dir(exe)
	if _, missing := os.Stat(filepath.Join(dir, "pack.json")); missing == nil {
		err = unpack(dir)
	} else if dir, err = filepath.Abs("bin/cuda"); err == nil {
		err = build(ctx, say, dir)
	}
	if err != nil {
		return "", p, err
	}
	raw, err := os.ReadFile(filepath.Join(dir, "pack.json"))
	if err == nil {
		err = json.Unmarshal(raw, &p)
	}
	return dir, p, err
}

// build makes all programs in dir; it runs at the root of a checkout.
func build(ctx context.Context, say io.Writer, dir string) error {
	command := func(env []string, name string, args ...string) error {
		fmt.Fprintf(say, "%s %s\n", name, strings.Join(args, " "))
		cmd := exec.CommandContext(ctx, name, args...)
		cmd.Env, cmd.Stdout, cmd.Stderr = append(os.Environ(), env...), say, say
		return cmd.Run()
	}
	in := func(name string) string { return filepath.Join(dir, name) }
	sources, err := digest("scripts/build-cuda", "kernels/cuda/*.cu", "kernels/cuda/*.cuh", "kernels/cuda/*.h", "kernels/cuda/probe/*")
	if err != nil {
		return err
	}
	// nvcc's output differs from run to run, which would invalidate all that has passed.
	if last, _ := os.ReadFile(in("sources")); string(last) != sources {
		if err := command(nil, "scripts/build-cuda", in("libxpyd_cuda.so"), in("probe"), in("moves")); err != nil {
			return err
		}
		if err := os.WriteFile(in("sources"), []byte(sources), 0o644); err != nil {
			return err
		}
	}
	for _, t := range goTests {
		if err := command([]string{"CGO_ENABLED=1"}, "go", "test", "-c", "-trimpath", "-tags", "cuda", "-ldflags", "-s -w", "-o", in(t.name), t.path); err != nil {
			return err
		}
	}
	for _, p := range []struct{ cgo, name, path string }{{"1", "xpyd", "./cmd/xpyd"}, {"0", "bench", "./scripts/bench"}, {"0", "cudatest", "./scripts/cudatest"}} {
		// Without VCS stamps a program is the same for every commit that does not change it.
		if err := command([]string{"CGO_ENABLED=" + p.cgo}, "go", "build", "-trimpath", "-buildvcs=false", "-ldflags", "-s -w", "-o", in(p.name), p.path); err != nil {
			return err
		}
	}
	for _, path := range texts {
		if _, err := place(path, in(filepath.Base(path))); err != nil {
			return err
		}
	}
	var all []string
	for _, name := range compiled {
		all = append(all, in(name))
	}
	sum, err := digest(all...)
	if err != nil {
		return err
	}
	commit, err := exec.CommandContext(ctx, "git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*").Output()
	if err != nil {
		return fmt.Errorf("git describe: %w", err)
	}
	text, err := json.Marshal(pack{Commit: string(bytes.TrimSpace(commit)), Build: sum})
	return errors.Join(err, os.WriteFile(in("pack.json"), append(text, '\n'), 0o644))
}

// digest is a digest of the files that match patterns.
func digest(patterns ...string) (string, error) {
	sum := sha256.New()
	for _, p := range patterns {
		paths, err := filepath.Glob(p)
		if err != nil || len(paths) == 0 {
			return "", fmt.Errorf("no %s: %w", p, errors.Join(err, os.ErrNotExist))
		}
		for _, path := range paths {
			text, err := os.ReadFile(path)
			if err != nil {
				return "", err
			}
			fmt.Fprintf(sum, "%s %d\n%s", filepath.Base(path), len(text), text)
		}
	}
	return fmt.Sprintf("%x", sum.Sum(nil)[:6]), nil
}

// packed builds into bin/cuda, copies everything to dir, programs as .gz, and prints sizes.
func packed(ctx context.Context, say io.Writer, dir string) error {
	const from = "bin/cuda"
	if err := errors.Join(build(ctx, say, from), os.MkdirAll(dir, 0o755)); err != nil {
		return err
	}
	total := int64(0)
	names := append([]string{"cudatest", "pack.json"}, compiled...)
	for _, path := range texts {
		names = append(names, filepath.Base(path))
	}
	for _, name := range names {
		put := place
		if slices.Contains(compiled, name) {
			put = compress
		}
		size, err := put(filepath.Join(from, name), filepath.Join(dir, name))
		if err != nil {
			return err
		}
		total += size
		fmt.Fprintf(say, "%8.2f MiB  %s\n", float64(size)/(1<<20), name)
	}
	fmt.Fprintf(say, "%8.2f MiB  in %s, of %d MiB with the checkout\n", float64(total)/(1<<20), dir, room>>20)
	if total > room {
		return fmt.Errorf("%s is too large", dir)
	}
	return nil
}

// place copies a file and returns its size.
func place(from, to string) (int64, error) {
	text, err := os.ReadFile(from)
	if err != nil {
		return 0, err
	}
	return int64(len(text)), os.WriteFile(to, text, 0o755)
}

// compress writes a file as to.gz, removes an unpacked to, and returns the size of to.gz.
func compress(from, to string) (int64, error) {
	text, err := os.ReadFile(from)
	if err != nil {
		return 0, err
	}
	var z bytes.Buffer
	w := gzip.NewWriter(&z)
	_, err = w.Write(text)
	if err := errors.Join(err, w.Close(), os.RemoveAll(to)); err != nil {
		return 0, err
	}
	return int64(z.Len()), os.WriteFile(to+".gz", z.Bytes(), 0o644)
}

// unpack expands the programs of a pack unless that is done.
func unpack(dir string) error {
	for _, name := range compiled {
		to := filepath.Join(dir, name)
		if _, err := os.Stat(to); err == nil {
			continue
		}
		raw, err := os.ReadFile(to + ".gz")
		if err != nil {
			return err
		}
		z, err := gzip.NewReader(bytes.NewReader(raw))
		if err != nil {
			return err
		}
		text, err := io.ReadAll(z)
		if err == nil {
			err = os.WriteFile(to+".part", text, 0o755)
		}
		if err == nil {
			err = os.Rename(to+".part", to)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
