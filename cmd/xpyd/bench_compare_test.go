package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestBenchCompare: two runs become a table and a page; files that are no reports are refused by what they are.
func TestBenchCompare(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string) string {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	run := func(ttft string) string {
		return `{"schema": "xpyd.bench/1", "phases": [{"name": "rate 4", "measured": true, "mode": "open", "rate_asked": 4,
			"throughput": {"requests_per_s": 4}, "latency": {"ttft_ms": {"count": 9, "p50": ` + ttft + `, "p99": 80}}}]}`
	}
	before, after, page := file("before.json", run("20")), file("after.json", run("30")), filepath.Join(dir, "compare.html")
	out, errs, code := xpyd(t, "bench", "compare", before, after, "--html", page)
	if code != exitDone || !strings.Contains(out, "TTFT p50, ms     20.00   30.00  +50.0 %") {
		t.Errorf("exit code %d: %q\n%s", code, errs, out)
	}
	if b, err := os.ReadFile(page); err != nil || !strings.Contains(string(b), ">after p50</text>") {
		t.Errorf("%v: %s", err, b)
	}
	if out, _, _ = xpyd(t, "bench", "compare", "a="+before, "a="+after, "b="+after, "b="+after); !strings.Contains(out, "TTFT p50, ms     25.00  30.00  +25.0 %     +0.0 % to +50.0 %  within the spread") {
		t.Error(out)
	}
	f := func(want string, args ...string) {
		t.Helper()
		_, errs, code := xpyd(t, append([]string{"bench", "compare"}, args...)...)
		if code != exitUsage || !strings.Contains(errs, want) {
			t.Errorf("%v: exit code %d: %q lacks %q", args, code, errs, want)
		}
	}
	f("1 files: want 2 to 64", before)
	f("1 runs: want 2 to 8", "a="+before, "a="+after)
	f("no such file", before, filepath.Join(dir, "none.json"))
	f("it is there twice", before, before, before)
	f("kv.json: a result of xpyd bench kv;", before, file("kv.json", `{"config": {}, "transport": "tcp", "runs": []}`))
	f("is a folder", before, after, "--html", dir)
}
