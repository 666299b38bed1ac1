package main

import (
	"bytes"
	"os"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/figures"
)

const root = "../.."

// TestResults: what the figures of bench/ name is there, and the page is current.
func TestResults(t *testing.T) {
	var page bytes.Buffer
	if err := writeReport(root, &page); err != nil {
		t.Fatal(err)
	}
	committed, err := os.ReadFile(root + "/bench/README.md")
	if err != nil || !bytes.Equal(committed, page.Bytes()) {
		t.Errorf("bench/README.md is not what make bench-report makes: %v", err)
	}
	if strings.Contains(page.String(), "\n## Other\n") {
		t.Error("a figure belongs to no topic")
	}
}

// TestCheckCommand: what a figure's command may name.
func TestCheckCommand(t *testing.T) {
	for line, want := range map[string]string{
		"go run ./scripts/bench kv":                                    "",
		"go run ./scripts/bench kv -rounds 3 -only shm":                "",
		"go run ./scripts/bench kv -only gone":                         "no part",
		"go run ./scripts/bench kv -gone 1":                            "not defined: -gone",
		"go run ./scripts/bench gone":                                  `no command "gone"`,
		"go run ./scripts/bench":                                       "names no benchmark",
		"go run ./scripts/mutate -own -seed 1":                         "",
		"go run ./scripts/mutate -gone":                                "gone",
		"go run ./scripts/gone":                                        "scripts/gone",
		"scripts/push-test --shape 8b --no-faults":                     "",
		"scripts/push-test --gone":                                     "gone",
		"scripts/gone":                                                 "scripts/gone",
		"scripts/cuda-test kernels peers":                              "",
		"scripts/cuda-test gone":                                       "gone",
		"XPYD_CUDA_KV8=1 XPYD_CUDA_BENCH=8k cuda.test -test.run Speed": "",
		"XPYD_CUDA_KV8=1 cuda.test -test.run TestSpeed":                "",
		"XPYD_CUDA_KV8=1 cuda.test -test.run Gone":                     "Gone",
		"XPYD_" + "GONE=1 make edge-soak":                              "nothing reads",
		"make edge-soak":                                               "",
		"make gone":                                                    "gone",
		"probe bench gemm 2048":                                        "",
		"probe bench gone":                                             "gone",
		"a communicator of two ranks":                                  "program a",
		"":                                                             "is no command",
	} {
		err := checkCommand(root, line)
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", line, err, want)
		}
	}
}

// TestCheck: a figure of an unknown commit or command is named with its reason.
func TestCheck(t *testing.T) {
	if err := checkCommit(root, "HEAD"); err != nil {
		t.Error(err)
	}
	err := check(root, []figures.Figure{{Name: "a", Command: "make test", Commit: "HEAD"}, {Name: "b", Command: "make gone", Commit: "HEAD"}})
	if err == nil || strings.Contains(err.Error(), "a:") || !strings.Contains(err.Error(), `b: "make gone"`) {
		t.Error(err)
	}
}

// TestLine: the command of a figure repeats it elsewhere.
func TestLine(t *testing.T) {
	for args, want := range map[string]string{
		"kv": "go run ./scripts/bench kv",
		"kv -out /tmp/x -xpyd bin/xpyd -rounds 3": "go run ./scripts/bench kv -rounds 3",
		"cpu -run /tmp/llama2.c/run":              "go run ./scripts/bench cpu -run RUN",
	} {
		c, err := find(strings.Fields(args)[0])
		if err != nil {
			t.Fatal(err)
		}
		b, _, err := c.parse(strings.Fields(args)[1:])
		if err != nil || b.Command != want {
			t.Errorf("%q: %q, %v", args, b.Command, err)
		}
	}
	c := commands[0]
	for _, args := range []string{"-rounds 0", "-only gone", "word"} {
		if _, _, err := c.parse(strings.Fields(args)); err == nil {
			t.Errorf("%q is taken", args)
		}
	}
}

// TestReport: a table shows a figure's fields.
func TestReport(t *testing.T) {
	f := figures.Figure{Name: "kv.x", Unit: "GB/s", Peer: "peer", Model: "load", Command: "make x", Was: "another", Device: "a CPU", Date: "2026-01-01", Raw: "bench/raw/x.log"}.Ratios([]float64{1, 3}, []float64{2, 2})
	var b bytes.Buffer
	table(&b, []figures.Figure{f})
	for _, want := range []string{"On: a CPU.", "| `kv.x` † | 2 GB/s | 2, peer | 1 | 0.500..1.500 | [2026-01-01](../bench/raw/x.log) |", "- `make x` (†: measured by another)\n  - `kv.x`: load"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("%q is not in\n%s", want, b.String())
		}
	}
	b.Reset()
	if err := retirees(&b, []byte(`{"name":"kv.y","reason":"no GPU"}`)); err != nil || !strings.Contains(b.String(), "- no GPU: `kv.y`") {
		t.Errorf("%s, %v", b.String(), err)
	}
	if err := retirees(&b, []byte("x")); err == nil {
		t.Error("a line that is no object is taken")
	}
}
