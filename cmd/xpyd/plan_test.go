package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xpyd/xpyd/internal/loadgen/record"
	"github.com/xpyd/xpyd/internal/sim"
	"github.com/xpyd/xpyd/internal/steptable"
)

// writeTable writes a table of a device on which a step takes 1 ms, 0.1 ms more for each token of a
// prompt, and 0.01 ms for each sequence.
func writeTable(t *testing.T) string {
	t.Helper()
	at := func(ms float64) steptable.Time { return steptable.Time{Seconds: ms / 1e3, Runs: 5} }
	tab := &steptable.Table{Version: steptable.Version,
		About: steptable.About{Model: "tiny", Device: "test", Backend: "cpu", BlockTokens: 16, Blocks: 500, MaxBatch: 16, StepTokens: 256, MaxContext: 512,
			Shape: steptable.Shape{Layers: 2}},
		KV: steptable.KV{BytesPerToken: 100, Bandwidth: 1e9, Latency: 1e-4}}
	for _, n := range []int{1, 16, 256} {
		tab.Prefill = append(tab.Prefill, steptable.Prefill{Tokens: n, Time: at(1 + 0.1*float64(n))})
	}
	for _, b := range []int{1, 16} {
		for _, c := range []int{16, 512} {
			tab.Decode = append(tab.Decode, steptable.Decode{Batch: b, Context: c, Time: at(1 + 0.01*float64(b))})
		}
	}
	path := filepath.Join(t.TempDir(), "table.json")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := tab.Write(f); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestPlan: the fleets of two workers, as text and as JSON, of a described load and of a trace.
func TestPlan(t *testing.T) {
	table := writeTable(t)
	args := []string{"plan", "--table", table, "--workers", "2", "--slo", "ttft=500ms,tpot=10ms", "--window", "3s", "--seeds", "2"}
	out, errs, code := xpyd(t, append(args, "--input", "50-100", "--output", "20")...)
	if code != 0 || !strings.Contains(out, "2 whole") || !strings.Contains(out, "1P1D") || !strings.Contains(out, "take") || !strings.Contains(errs, "tries") {
		t.Fatalf("exit %d\n%s%s", code, out, errs)
	}
	trace := filepath.Join(t.TempDir(), "trace.jsonl")
	if err := os.WriteFile(trace, []byte(`{"timestamp": 0, "input_length": 100, "output_length": 5, "hash_ids": [1]}
{"timestamp": 900, "input_length": 100, "output_length": 5, "hash_ids": [1]}
{"timestamp": 1000, "input_length": 100000, "output_length": 5, "hash_ids": []}
`), 0o600); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "plan.json")
	for _, to := range []string{"-", file} {
		out, errs, code = xpyd(t, append(args, "--trace", trace, "--json", to)...)
		if !strings.Contains(errs, "--trace: 33 % of the requests are left out, as they have more than 512 tokens, the table's max_context") {
			t.Errorf("%s", errs)
		}
		text := []byte(out)
		if to == file {
			var err error
			if text, err = os.ReadFile(file); err != nil {
				t.Fatal(err)
			}
		}
		var p plan
		if err := json.Unmarshal(text, &p); err != nil || code != 0 || len(p.Fleets) != 3 || p.Fleets[0].Rate < p.Fleets[1].Rate || p.Table.Model != "tiny" {
			t.Errorf("%v, exit %d\n%s%s", err, code, text, errs)
		}
	}
}

// TestPlanRefuses: what is wrong is named.
func TestPlanRefuses(t *testing.T) {
	table, ok := writeTable(t), "ttft=1s,tpot=10ms"
	for want, args := range map[string][]string{
		"--table is needed":                   {"--slo", ok},
		"--slo is needed":                     {"--table", table},
		"is none of":                          {"--table", table, "--slo", "x=1s"},
		"no such file":                        {"--table", table + "x", "--slo", ok},
		"--workers 3-2":                       {"--table", table, "--slo", ok, "--workers", "3-2", "--rate", "1"},
		"--workers x":                         {"--table", table, "--slo", ok, "--workers", "x"},
		"--workers 1-3 asks":                  {"--table", table, "--slo", ok, "--workers", "1-3"},
		"--rate is of drawn":                  {"--table", table, "--slo", ok, "--rate", "3", "--trace", table},
		"--rate -1":                           {"--table", table, "--slo", ok, "--rate", "-1"},
		"--rate 1e-12":                        {"--table", table, "--slo", ok, "--rate", "1e-12"},
		"--rate 0: want":                      {"--table", table, "--slo", ok, "--rate", "0"},
		"--cost 0: want":                      {"--table", table, "--slo", ok, "--cost", "0"},
		"--budget 0: want":                    {"--table", table, "--slo", ok, "--budget", "0", "--cost", "2"},
		"no request comes: give a longer one": {"--table", table, "--slo", ok, "--rate", "0.001", "--window", "1s", "--input", "100"},
		`"ttft=-1s": want a time above 0`:     {"--table", table, "--slo", "ttft=-1s"},
		"--rate 1e+300":                       {"--table", table, "--slo", ok, "--rate", "1e300"},
		"than 1e+07 requests":                 {"--table", table, "--slo", ok, "--rate", "1e5", "--window", "1h"},
		"--cost -1":                           {"--table", table, "--slo", ok, "--cost", "-1"},
		"--budget +Inf":                       {"--table", table, "--slo", ok, "--budget", "inf"},
		"--budget needs":                      {"--table", table, "--slo", ok, "--budget", "3"},
		"--budget and":                        {"--table", table, "--slo", ok, "--budget", "3", "--cost", "1", "--workers", "2"},
		"--budget 3 pays 0":                   {"--table", table, "--slo", ok, "--budget", "3", "--cost", "4"},
		"--budget 9e+08 pays more than 1000":  {"--table", table, "--slo", ok, "--budget", "9e8", "--cost", "4"},
		"--seeds 0":                           {"--table", table, "--slo", ok, "--seeds", "0"},
		"--workers 0":                         {"--table", table, "--slo", ok, "--workers", "0"},
		"--share 2":                           {"--table", table, "--slo", ok, "--share", "2"},
		"--window 1ms":                        {"--table", table, "--slo", ok, "--window", "1ms"},
		"--ttft-per-1000 -1s":                 {"--table", table, "--slo", ok, "--ttft-per-1000", "-1s"},
		"--ttft-per-1000 adds":                {"--table", table, "--slo", "tpot=1s", "--ttft-per-1000", "1s"},
		"--max-context -1":                    {"--table", table, "--slo", ok, "--max-context", "-1"},
		"--input":                             {"--table", table, "--slo", ok, "--input", "x"},
		"--input 600, --output 10: no request has at most 512 tokens, the table's max_context": {"--table", table, "--slo", ok, "--input", "600", "--output", "10"},
		"--input 500, --output 13: ": {"--table", table, "--slo", ok, "--input", "500", "--output", "13"},
		"--output":                   {"--table", table, "--slo", ok, "--output", "0"},
		"--burstiness: burst":        {"--table", table, "--slo", ok, "--burstiness", "1e-300"},
		"ttft twice":                 {"--table", table, "--slo", "ttft=1s,ttft=2s"},
		"--burstiness":               {"--table", table, "--slo", ok, "--burstiness", "0"},
		"--trace: open":              {"--table", table, "--slo", ok, "--trace", table + "x"},
		"--trace " + table:           {"--table", table, "--slo", ok, "--trace", table},
		"exp:MEAN): want whole numbers in 0..16777215\n": {"--table", table, "--slo", ok, "--input", "-5"},
	} {
		if out, errs, code := xpyd(t, append([]string{"plan"}, args...)...); code != 2 || !strings.Contains(errs, want) {
			t.Errorf("%v: exit %d, want %q\n%s%s", args, code, want, out, errs)
		}
	}
}

// TestPlanCuts: of drawn lengths, what no worker would take is cut, and its share is said.
func TestPlanCuts(t *testing.T) {
	for output, cut := range map[string]bool{"12": false, "11-14": true} {
		out, errs, code := xpyd(t, "plan", "--table", writeTable(t), "--slo", "ttft=500ms", "--window", "2s", "--seeds", "1", "--input", "500", "--output", output)
		said := strings.Contains(errs, "--input, --output: 5") || strings.Contains(errs, "--input, --output: 4")
		if code != 0 || said != cut || said && !strings.Contains(errs, " % of the requests are cut to 512 tokens, the table's max_context\n") {
			t.Errorf("--output %s: exit %d\n%s%s", output, code, out, errs)
		}
	}
}

// TestPlanAtLeast: a load that is too short to find a limit gives no verdict.
func TestPlanAtLeast(t *testing.T) {
	trace := filepath.Join(t.TempDir(), "trace.jsonl")
	if err := os.WriteFile(trace, []byte(`{"timestamp": 0, "input_length": 10, "output_length": 2, "hash_ids": []}`), 0o600); err != nil {
		t.Fatal(err)
	}
	out, errs, code := xpyd(t, "plan", "--table", writeTable(t), "--slo", "ttft=1s", "--trace", trace)
	if code != 0 || !strings.Contains(out, "at least") || !strings.Contains(out, "too short") || strings.Contains(out, "take the most") || strings.Contains(out, "To start") {
		t.Errorf("exit %d\n%s%s", code, out, errs)
	}
}

// TestPlanKeepsText: where a file cannot take the result, the text is still there.
func TestPlanKeepsText(t *testing.T) {
	for _, flag := range []string{"--json", "--html"} {
		out, errs, code := xpyd(t, "plan", "--table", writeTable(t), "--slo", "ttft=500ms", "--window", "2s", "--seeds", "1", "--workers", "1", "--input", "50", "--output", "10", flag, "/dev/full")
		if code != exitFailed || !strings.Contains(out, "Whole workers take the most.") || !strings.Contains(errs, "plan: "+flag+": ") {
			t.Errorf("%s: exit %d\n%s%s", flag, code, out, errs)
		}
	}
	missing := filepath.Join(t.TempDir(), "none", "p.html")
	if _, errs, code := xpyd(t, "plan", "--table", writeTable(t), "--slo", "ttft=500ms", "--input", "50", "--html", missing); code != exitFailed || !strings.Contains(errs, "--html: "+missing+": no such file") {
		t.Errorf("exit %d: %s", code, errs)
	}
}

// TestPlanWithinBound: no goodput, and no number of workers, is beyond what devices compute, whether first tokens have a limit or not.
func TestPlanWithinBound(t *testing.T) {
	for _, slo := range []string{"tpot=50ms", "ttft=1000000h", "itl=30ms", "e2e=10m"} {
		out, errs, code := xpyd(t, "plan", "--table", writeTable(t), "--slo", slo, "--window", "4s", "--seeds", "1", "--workers", "1-4", "--rate", "130", "--input", "100", "--output", "3", "--json", "-")
		var p plan
		if err := json.Unmarshal([]byte(out), &p); err != nil || code != exitDone {
			t.Fatalf("%v, exit %d\n%s%s", err, code, out, errs)
		}
		if p.Need.Workers != 2 { // a prompt takes 11 ms
			t.Errorf("%s: 130 requests/s need %d workers", slo, p.Need.Workers)
		}
		for _, f := range p.Fleets {
			if f.OfBound > 1 || f.Rate == 0 {
				t.Errorf("%s: %s takes %v requests/s, the bound is %v", slo, f.Fleet, f.Rate, p.Bound)
			}
		}
	}
}

// TestPatience: how long the last requests may take follows from the limits, not from the window.
func TestPatience(t *testing.T) {
	l := &planLoad{prompt: 4000, answer: 101}
	slo := func(ttft, tpot, itl, e2e time.Duration) *sim.Promise {
		return &sim.Promise{SLO: record.SLO{TTFT: ttft, TPOT: tpot, ITL: itl, E2E: e2e}}
	}
	long := slo(2*time.Second, 20*time.Millisecond, 0, 0)
	long.PerToken = time.Millisecond
	for _, c := range []struct {
		p    *sim.Promise
		want time.Duration
	}{
		{slo(2*time.Second, 20*time.Millisecond, 0, 0), 5020 * time.Millisecond},
		{long, 9020 * time.Millisecond},
		{slo(2*time.Second, 0, 100*time.Millisecond, 0), 13100 * time.Millisecond},
		{slo(2*time.Second, 0, 0, 0), 3*time.Second + lastWait},
		{slo(0, 20*time.Millisecond, 0, 0), 63020 * time.Millisecond},
		{slo(1e6*time.Hour, 1e6*time.Hour, 0, 0), 2*lastWait + time.Second},
		{slo(0, 0, 0, 7*time.Second), 7 * time.Second},
	} {
		if got := l.patience(c.p); got != c.want {
			t.Errorf("%+v: %v, want %v", c.p, got, c.want)
		}
	}
}

// TestOutFile: a result replaces a regular file, also one behind a link, and nothing else; a place that
// cannot be written is known before there is a result.
func TestOutFile(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	write := func(path string) error {
		o, err := createOut(path)
		if err != nil {
			return err
		}
		return o.keep(func(w io.Writer) error { _, err := io.WriteString(w, "result"); return err })
	}
	if err := errors.Join(os.WriteFile(at("old"), []byte("old"), 0o600), os.Symlink("old", at("link")), unix.Mkfifo(at("fifo"), 0o600), os.Mkdir(at("folder"), 0o700)); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"new", "old", "link"} {
		err := write(at(name))
		b, rerr := os.ReadFile(at(name))
		if err != nil || rerr != nil || string(b) != "result" {
			t.Errorf("%s: %q, %v, %v", name, b, err, rerr)
		}
	}
	if info, err := os.Stat(at("old")); err != nil || info.Mode().Perm() != 0o600 { // as private as it was
		t.Errorf("%v, %v", info.Mode(), err)
	}
	if to, err := os.Readlink(at("link")); err != nil || to != "old" {
		t.Errorf("the link became %q, %v", to, err)
	}
	got := make(chan string)
	go func() {
		b, err := os.ReadFile(at("fifo"))
		got <- fmt.Sprint(string(b), err)
	}()
	if err := write(at("fifo")); err != nil {
		t.Error(err)
	}
	if s := <-got; s != "result<nil>" {
		t.Errorf("the pipe got %s", s)
	}
	for _, name := range []string{"folder", "missing/new"} {
		if o, err := createOut(at(name)); err == nil {
			t.Errorf("%s is opened", name)
			o.drop()
		}
	}
	o, err := createOut(at("dropped"))
	if err != nil {
		t.Fatal(err)
	}
	o.drop()
	list, err := os.ReadDir(dir)
	if err != nil || len(list) != 5 {
		t.Errorf("left: %v, %v", list, err)
	}
}
