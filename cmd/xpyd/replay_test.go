package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const logHead = `{"request_log":1,"xpyd":"1.2","start":"2026-11-01T10:00:00Z","models":["m"],"policy":"prefix","grain":[{"from":0,"bytes":256}]}` + "\n"

// writeLog writes a request log with these lines behind its header.
func writeLog(t *testing.T, head string, lines ...string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "requests.jsonl")
	if err := os.WriteFile(path, []byte(head+strings.Join(append(lines, ""), "\n")), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// Lines of a log of 1P2D: two prompts that begin alike, one answer in one piece, and one that failed.
const (
	lineOne    = `{"at_ms":-500,"path":"/v1/completions","model":"m","stream":true,"status":200,"prompt_tokens":200,"output_tokens":11,"ttft_ms":30,"took_ms":50,"longest_gap_ms":4,"prefill":"p","decode":"d0","attempts":1,"prompt_bytes":600,"prefix":["0000000000000001","0000000000000002"]}`
	lineTwo    = `{"at_ms":500,"path":"/v1/completions","model":"m","stream":true,"status":200,"prompt_tokens":200,"output_tokens":11,"ttft_ms":900,"took_ms":920,"longest_gap_ms":4,"prefill":"p","decode":"d1","attempts":1,"prompt_bytes":600,"prefix":["0000000000000001","0000000000000002"]}`
	lineWhole  = `{"at_ms":250,"path":"/v1/completions","model":"m","status":200,"prompt_tokens":20,"estimated":true,"output_tokens":11,"ttft_ms":40,"took_ms":41,"prefill":"p","decode":"d1","attempts":1}`
	lineFailed = `{"at_ms":250,"path":"/v1/completions","status":503,"took_ms":41}`
)

// TestReplay: the fleet of the log and others, as text and as JSON, with what is left out.
func TestReplay(t *testing.T) {
	log := writeLog(t, logHead, lineOne, lineFailed, lineWhole, lineTwo,
		`{"dropped":3}`,
		`{"at_ms":1,"model":"other","status":200,"prompt_tokens":9,"output_tokens":2,"choices":2,"took_ms":1}`,
		`{"at_ms":1,"model":"other","status":200,"prompt_tokens":999,"output_tokens":2,"took_ms":1}`)
	args := []string{"replay", log, "--table", writeTable(t)}
	out, errs, code := xpyd(t, append(args, "--slo", "ttft=500ms")...)
	for _, want := range []string{"3 requests in 1s from 2026-11-01 10:00:00, by xpyd 1.2; tiny on test", "log     prefix   0        900, 900", "1P2D    prefix   0", "66.7 %", "100.0 %", `differ most from "log"`,
		"\n5      0.500    200      11       900.0   ", "\n4      0.250    20       11       41.0*"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q", want)
		}
	}
	for _, want := range []string{"1 of 6 requests are left out: no token of", "1 of 6 requests are left out: they have several choices", "1 of 6 requests are left out: they have more than 512 tokens, the table's max_context",
		"1 of 6 requests have prompts of an estimated length", "3 more requests are not in the log"} {
		if !strings.Contains(errs, want) {
			t.Errorf("no %q", want)
		}
	}
	if code != exitDone || t.Failed() {
		t.Fatalf("exit %d\n%s%s", code, out, errs)
	}

	file := filepath.Join(t.TempDir(), "replay.json")
	for _, to := range []string{"-", file} {
		out, errs, code = xpyd(t, append(args, "--fleet", "1p1d", "--fleet", "2", "--policy", "prefix,random", "--model", "m", "--json", to)...)
		text := []byte(out)
		if to == file {
			var err error
			if text, err = os.ReadFile(file); err != nil {
				t.Fatal(err)
			}
			if !strings.Contains(out, "2 whole random") {
				t.Errorf("%s", out)
			}
		}
		var r replayed
		if err := json.Unmarshal(text, &r); err != nil || code != exitDone || len(r.Runs) != 5 || len(r.Requests) != 3 {
			t.Fatalf("%v, exit %d\n%s%s", err, code, text, errs)
		}
		for i, want := range []string{"log prefix", "1P1D prefix", "1P1D random", "2 whole prefix", "2 whole random"} {
			if got := r.Runs[i].Fleet + " " + r.Runs[i].Policy; got != want || r.Runs[i].Good != 1 {
				t.Errorf("run %d: %+v, want %s", i, r.Runs[i], want)
			}
		}
		one, two := r.Requests[0], r.Requests[2]
		if one.Line != 2 || two.Line != 5 || two.Runs[0].TTFT != 900 || two.Runs[0].Took != 920 || two.Runs[0].Gap != 2 || two.Runs[0].Worst != 4 || r.Requests[1].Runs[0].TTFT != 0 {
			t.Errorf("%+v\n%+v", one, two)
		}
		if cold, warm := one.Runs[1].TTFT, two.Runs[1].TTFT; cold < 20 || warm > cold/2 { // 200 tokens take 21 ms, and what they share is there
			t.Errorf("TTFT %v, and %v with what it shares", cold, warm)
		}
		if strings.Contains(errs, "choices") {
			t.Errorf("other models: %s", errs)
		}
	}

	out, errs, code = xpyd(t, append(args, "--workers", "2", "--speed", "10")...)
	if code != exitDone || strings.Contains(out, "log  ") || !strings.Contains(out, "in 100ms") || !strings.Contains(out, "10 times as fast") || !strings.Contains(out, `from "2 whole"`) {
		t.Errorf("exit %d\n%s%s", code, out, errs)
	}
}

// TestReplayRefuses: what is wrong is named, in a log by its line.
func TestReplayRefuses(t *testing.T) {
	table, log := writeTable(t), writeLog(t, logHead, lineOne)
	f := func(want string, args ...string) {
		t.Helper()
		if out, errs, code := xpyd(t, append([]string{"replay"}, args...)...); code != exitUsage || !strings.Contains(errs, want) {
			t.Errorf("%v: exit %d, want %q\n%s%s", args, code, want, out, errs)
		}
	}
	f("accepts 1 arg(s)", "--table", table)
	f("--table is needed", log)
	f("no such file", log+"x", "--table", table)
	f(table+": line 1: no header of a request log", table, "--table", table)
	f("line 3: no line of a request: its status is 0", writeLog(t, logHead, lineOne, `{}`), "--table", table)
	f("line 3: another header: each file is a log of its own", writeLog(t, logHead, lineOne, strings.TrimSpace(logHead)), "--table", table)
	f("it has no request", writeLog(t, logHead), "--table", table)
	f("no request is for --model zzz; they are for m\n", log, "--table", table, "--model", "zzz")
	f("--workers 0", log, "--table", table, "--workers", "0")
	f("no request of the 1 can be replayed: of 1 no token came", writeLog(t, logHead, lineFailed), "--table", table)
	f("0 have several choices, and 1 have more than 100 tokens, of --max-context", log, "--table", table, "--max-context", "100")
	f("the log names no workers: --fleet", writeLog(t, logHead, `{"status":200,"prompt_tokens":9,"output_tokens":2}`), "--table", table)
	f(`the log's policy "best" is none`, writeLog(t, strings.Replace(logHead, `"prefix"`, `"best"`, 1), lineOne), "--table", table)
	for _, fleet := range []string{"", "0", "0P1D", "1P0D", "1P", "1D", "P", "2P2", "1001", "1P1D1", "-1", "2 wholes"} {
		f("--fleet", log, "--table", table, "--fleet", fleet)
	}
	f("--policy: ", log, "--table", table, "--policy", "best")
	f("give one of them", log, "--table", table, "--fleet", "2", "--workers", "2")
	f("--workers 1001", log, "--table", table, "--workers", "1001")
	f("--workers -1", log, "--table", table, "--workers", "-1")
	f("--speed 0", log, "--table", table, "--speed", "0")
	f("--speed NaN", log, "--table", table, "--speed", "NaN")
	f("is none of", log, "--table", table, "--slo", "x=1s")
	f("--ttft-per-1000 adds", log, "--table", table, "--ttft-per-1000", "1s")
	f("--ttft-per-1000 -1s", log, "--table", table, "--ttft-per-1000", "-1s")
	f("--max-context -1", log, "--table", table, "--max-context", "-1")
	out, errs, code := xpyd(t, "replay", log, "--table", table, "--json", "/dev/full")
	if code != exitFailed || !strings.Contains(errs, "replay: --json: ") || !strings.Contains(out, "1P1D") {
		t.Errorf("exit %d\n%s%s", code, out, errs)
	}
	if want := "the requests are for m, and the table is of tiny: "; !strings.Contains(errs, want) || strings.Contains(errs, "not whole") {
		t.Errorf("no %q, or more: %s", want, errs)
	}
	cut := filepath.Join(t.TempDir(), "cut.jsonl")
	if err := os.WriteFile(cut, []byte(logHead+lineOne+"\n"+strings.Replace(lineTwo, `"m"`, `"tiny"`, 1)+"\n"+lineTwo[:50]), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, errs, _ = xpyd(t, "replay", cut, "--table", table); !strings.Contains(errs, "the last line is not whole and does not count") || strings.Contains(errs, "unless") || !strings.Contains(out, "2 requests in") {
		t.Errorf("%s%s", out, errs)
	}
	if _, errs, code := xpyd(t, "replay", log, "--table", table, "--json", filepath.Join(log, "x")); code != exitFailed || !strings.Contains(errs, "replay: --json: ") {
		t.Errorf("exit %d: %s", code, errs)
	}
}
