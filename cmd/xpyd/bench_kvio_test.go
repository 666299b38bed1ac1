package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/kvbench"
	"github.com/xpyd/xpyd/kvlayout"
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
	used := t.TempDir()
	if err := os.WriteFile(filepath.Join(used, "theirs"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	onSSD := []string{"--device", "cpu", "--ssd-dir", ssd}
	for message, args := range map[string][]string{
		"--total 1KiB: want 16MiB at least": {"--total", "1KiB"},
		"--depth 0: want 1 to 1024":         {"--depth", "0"},
		"--depth 2000: want":                {"--depth", "2000"},
		"--unit 5000: want a multiple of 4": {"--unit", "2MiB,5000"},
		"has files, such as theirs":         {"--ssd-dir", used},
		"not a directory":                   {"--ssd-dir", filepath.Join(used, "theirs")},
	} {
		args := slices.Concat(onSSD, args)
		f(message, args...)
		if _, errs, _ := xpyd(t, append([]string{"bench", "kvio"}, args...)...); strings.Count(errs, "\n") != 1 {
			t.Errorf("%v: it had begun: %q", args, errs)
		}
	}
}

// TestBenchKVIORoom: what a machine has no memory for is refused, with the flag and the
// numbers.
func TestBenchKVIORoom(t *testing.T) {
	const gib = 1 << 30
	b := benchKVIO{hostTotal: "60GiB", depth: 64}
	l := kvlayout.Plain(32, 8, 128, 16, "f32")
	for _, c := range []struct {
		total     int64
		pool      bool
		available int64
		refused   string
	}{
		{60 * gib, true, 23 * gib, "--host-total 60GiB takes 239.8 GiB for a pool and host memory, and 0.5 to spare, and this machine has 23.0 to give"},
		{60 * gib, false, 100 * gib, "takes 119.9 GiB for host memory"},
		{60 * gib, true, 0, ""},
		{60 * gib, false, 121 * gib, ""},
		{60 * gib, true, 241 * gib, ""},
		{gib, true, 4 * gib, "for a pool and host memory"},
		{gib, true, 5 * gib, ""},
	} {
		err := b.room(l, c.total, c.pool, c.available)
		if (err != nil) != (c.refused != "") || err != nil && !strings.Contains(err.Error(), c.refused) {
			t.Errorf("%d of %d: %v, want %q", c.total, c.available, err, c.refused)
		}
	}
	if err := b.checkSSD([]config.Size{1 << 20, gib}, 1<<40, 63*gib); err == nil || !strings.Contains(err.Error(), "--depth 64: so many units of 1GiB") {
		t.Error(err)
	}
	if err := b.checkSSD([]config.Size{gib}, 1<<40, 64*gib); err != nil {
		t.Error(err)
	}
}
