package main

import (
	"path/filepath"
	"strings"
	"testing"
)

// TestBenchKVUsage: what `bench kv` refuses before it starts anything.
func TestBenchKVUsage(t *testing.T) {
	f := func(want int, message string, args ...string) {
		t.Helper()
		_, errs, code := xpyd(t, append([]string{"bench", "kv"}, args...)...)
		if code != want || !strings.Contains(errs, message) {
			t.Errorf("%v: exit code %d, want %d: %q lacks %q", args, code, want, errs, message)
		}
	}
	f(exitDone, "", "--help")
	f(exitUsage, "exclude each other", "--listen", ":0", "--connect", "x:1")
	f(exitUsage, `--size: size "much"`, "--size", "much")
	f(exitUsage, `--latency-size: size "0"`, "--latency-size", "0")
	f(exitUsage, `transport: "rdma"`, "--transport", "rdma")
	f(exitUsage, "is not a multiple of", "--size", "1KiB")
	f(exitUsage, "ends neither in .svg", "--plot", filepath.Join(t.TempDir(), "kv.png"))
	f(exitUsage, "--sweep", "--plot", "kv.svg", "--sweep", "1MiB,x")
	f(exitFailed, "no sender at 127.0.0.1:1", "--connect", "127.0.0.1:1")
	f(exitFailed, "bench kv", "--listen", "nowhere.invalid:0")
}
