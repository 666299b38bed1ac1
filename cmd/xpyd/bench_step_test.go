package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/steptable"
)

// TestBenchStep: `bench step` times the built-in model, says so, and leaves a table that can be
// read, and nothing beside it.
func TestBenchStep(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "t.json")
	out, errs, code := xpyd(t, "bench", "step", "--threads", "1", "--device", "cpu", "--max-batch", "8", "--step-tokens", "32", "--max-context", "64",
		"--time", "1s", "--held-out", "8", "--out", file)
	if code != exitDone {
		t.Fatalf("exit code %d, %q", code, errs)
	}
	for _, want := range []string{"stories260k on ", "decode, ms by batch   context 16   context 64", "\n4 ", "\n32 ", "8 random steps that", "KV: 1280 bytes a token, "} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	table, err := steptable.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	if a := table.About; a.Threads != 1 || a.Backend != "cpu" || a.Model != "stories260k" || a.Shape.Layers != 5 || a.MaxBatch != 8 || a.StepTokens != 32 ||
		a.MaxContext != 64 || a.Date == "" || a.Layout == "" {
		t.Errorf("%+v", a)
	}
	if k := table.KV; k.Bandwidth <= 0 || !strings.Contains(k.How, "between two processes") {
		t.Errorf("%+v", k)
	}
	if mean, _ := table.Step(steptable.Load{Decodes: 3, Context: 99}); mean <= 0 || table.HeldOut.Steps != 8 {
		t.Errorf("%v, %+v", mean, table.HeldOut)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 1 {
		t.Errorf("%v, %v", left, err)
	}
}

// TestBenchStepUsage: what `bench step` refuses, before it has measured or written anything.
func TestBenchStepUsage(t *testing.T) {
	dir := t.TempDir()
	f := func(want int, message string, args ...string) {
		t.Helper()
		_, errs, code := xpyd(t, append([]string{"bench", "step", "--out", filepath.Join(dir, "t.json")}, args...)...)
		if code != want || !strings.Contains(errs, message) {
			t.Errorf("%v: exit code %d, want %d: %q lacks %q", args, code, want, errs, message)
		}
		if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
			t.Fatalf("%v: %v is left, %v", args, left, err)
		}
	}
	f(exitUsage, "--time 0s: want", "--time", "0s")
	f(exitUsage, "--held-out -1: want", "--held-out", "-1")
	f(exitUsage, "--max-context -1: want", "--max-context", "-1")
	f(exitUsage, "--kv-latency 1h0m0s: want", "--kv-latency", "1h")
	f(exitUsage, `--kv-transport "rdma": want`, "--kv-transport", "rdma")
	f(exitUsage, "--kv-latency needs --kv-bandwidth", "--kv-latency", "1ms")
	f(exitUsage, `--kv-bandwidth "much": want`, "--kv-bandwidth", "much")
	f(exitUsage, `--kv-bandwidth "0": want`, "--kv-bandwidth", "0")
	f(exitUsage, "exclude each other", "--kv-bandwidth", "1GB", "--kv-transport", "tcp")
	f(exitUsage, "--threads", "--threads", "-1")
	f(exitUsage, "--kv-cache-dtype", "--kv-cache-dtype", "fp8", "--device", "cpu")
	f(exitUsage, "--kv-memory", "--kv-memory", "1KiB", "--device", "cpu", "--kv-bandwidth", "1GB")
	f(exitFailed, "nowhere", "--model", "./nowhere")
	given := []string{"--device", "cpu", "--kv-bandwidth", "1GB/s", "--kv-latency", "1ms"}
	f(exitUsage, "--max-context 1000: the model's longest is 512", append(given, "--max-context", "1000")...)
	f(exitUsage, "--max-context 200: the KV pool has room for 160 tokens; kv-memory or blocks give it more", append(given, "--blocks", "10", "--max-context", "200")...)
	f(exitUsage, "--max-context 31: want 32 at least", append(given, "--max-context", "31")...)
	f(exitFailed, "no such file", "--out", filepath.Join(dir, "none", "t.json"))
}
