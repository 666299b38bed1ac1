package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/kvbench"
)

// TestBenchKVIO: `bench kvio` measures what it is asked to, prints it as a table or as
// JSON and draws it; and what it refuses before it begins.
func TestBenchKVIO(t *testing.T) {
	dir := t.TempDir()
	plot, ssd := filepath.Join(dir, "kvio.html"), filepath.Join(dir, "ssd")
	small := []string{"bench", "kvio", "--device", "cpu", "--layers", "2", "--kv-heads", "1", "--head-dim", "16", "--host-total", "64KiB", "--rounds", "2", "--block-tokens", "1, 32"}
	out, errs, code := xpyd(t, append(small, "--ssd-dir", ssd, "--unit", "16KiB,64KiB", "--total", "2MiB", "--json", "--plot", plot)...)
	var got kvbench.Links
	if err := json.Unmarshal([]byte(out), &got); err != nil || code != exitDone {
		t.Fatalf("exit code %d, %q, %v", code, errs, err)
	}
	if got.Pool != "CPU" || len(got.Host) != 2 || got.Host[1].BlockTokens != 32 || got.Host[1].In.Median <= 0 || len(got.SSD) != 2 || got.SSD[1].Read <= 0 {
		t.Errorf("%+v", got)
	}
	if strings.Count(errs, "CPU, blocks of") != 2 || strings.Count(errs, "SSD, units of") != 2 {
		t.Errorf("progress: %q", errs)
	}
	if page, err := os.ReadFile(plot); err != nil || strings.Count(string(page), "<polyline") != 5 || !strings.Contains(string(page), ">32<") {
		t.Errorf("%v, %s", err, page)
	}
	if left, err := os.ReadDir(ssd); err == nil && len(left) > 0 {
		t.Errorf("%v are left", left)
	}
	if out, _, _ := xpyd(t, small...); !strings.Contains(out, "32 tokens") || strings.Contains(out, "SSD") {
		t.Error(out)
	}
	f := func(message string, args ...string) {
		t.Helper()
		_, errs, code := xpyd(t, append([]string{"bench", "kvio"}, args...)...)
		if code != exitUsage || !strings.Contains(errs, message) {
			t.Errorf("%v: exit code %d: %q lacks %q", args, code, errs, message)
		}
	}
	f("leaves nothing to measure", "--device", "none")
	f(`--device "tpu"`, "--device", "tpu")
	f("powers of two", "--block-tokens", "16,12")
	f("--unit", "--unit", "2MiB,", "--ssd-dir", ssd)
	f("ends neither in .svg", "--plot", "kvio.png")
	f("--layers 1 to", "--layers", "0")
	f("--rounds at least 1", "--rounds", "0", "--device", "cpu")
	f("auto, io_uring or pread", "--io", "mmap")
}
