package harness

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/figures"
)

func open(t *testing.T) (*Bench, string) {
	t.Helper()
	out := t.TempDir()
	b := &Bench{Options: Options{Out: out}, Command: "make x"}
	if err := b.Open("unit"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(b.Dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the temporary folder is left: %v", err)
		}
	})
	return b, out
}

func shell(script string) Spec { return Spec{Name: "sh", Argv: []string{"sh", "-c", script}} }

func TestProcess(t *testing.T) {
	b, _ := open(t)
	p, rest, took, err := b.Saying(t.Context(), "ready ", shell("trap 'exit 0' TERM; sleep 60 & echo first; echo ready http://x; wait"))
	if err != nil || rest != "http://x" || took <= 0 || took > ready {
		t.Fatalf("%q after %v: %v", rest, took, err)
	}
	if n := len(p.tree()); n != 2 || p.RSS() == 0 {
		t.Errorf("%d processes, want the shell and sleep; %d bytes", n, p.RSS())
	}
	if err := p.Stop(); err != nil {
		t.Error(err)
	}
	p.Kill() // twice is once

	if _, _, _, err := b.Saying(t.Context(), "ready ", shell("echo why >&2; exit 3")); err == nil || !strings.Contains(err.Error(), "has ended") || !strings.Contains(err.Error(), "why") {
		t.Errorf("a process that ended: %v", err)
	}
	failed, err := b.Start(shell("exit 3"))
	if err != nil {
		t.Fatal(err)
	}
	<-failed.done
	if err := failed.Stop(); err == nil || !strings.Contains(err.Error(), "exit status 3") {
		t.Errorf("a process that failed: %v", err)
	}
	busy, err := b.Start(shell("while :; do :; done"))
	if err != nil {
		t.Fatal(err)
	}
	if err := busy.Until(t.Context(), 20*time.Second, func() error {
		if busy.CPU() < 20*time.Millisecond {
			return errors.New("it has used nothing yet")
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
	never := errors.New("never")
	if err := busy.Until(t.Context(), 10*time.Millisecond, func() error { return never }); !errors.Is(err, never) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a wait that is over: %v", err)
	}
	busy.Kill()
	if busy.Used() == 0 {
		t.Error("what it used is not known")
	}
}

func TestAdd(t *testing.T) {
	b, out := open(t)
	if err := b.Add(figures.Figure{Name: "unit.x", Unit: "s"}.Ratios([]float64{1}, []float64{2})); err != nil {
		t.Fatal(err)
	}
	line, err := os.ReadFile(filepath.Join(out, "results", "unit.jsonl"))
	if err != nil || !strings.Contains(string(line), `"ratio":0.5`) || !strings.Contains(string(line), `"command":"make x"`) || !strings.Contains(string(line), figures.Device()) {
		t.Errorf("%s, %v", line, err)
	}
}

func TestOutput(t *testing.T) {
	b, _ := open(t)
	var got struct{ A int }
	if _, err := b.Output(t.Context(), time.Minute, &got, []string{"N=7"}, "sh", "-c", `echo "{\"a\":$N}"`); err != nil || got.A != 7 {
		t.Errorf("%+v, %v", got, err)
	}
	if _, err := b.Output(t.Context(), time.Minute, &got, nil, "sh", "-c", "echo one >&2; echo two >&2; exit 1"); err == nil || !strings.HasSuffix(err.Error(), "exit status 1: two") {
		t.Error(err)
	}
	if _, err := b.Output(t.Context(), 50*time.Millisecond, &got, nil, "sleep", "60"); err == nil {
		t.Error("nothing ends it")
	}
}

func TestWants(t *testing.T) {
	o := Options{}
	if !o.Wants("anything") {
		t.Error("without -only")
	}
	if o.Only = "shm,tcp"; !o.Wants("xpyd tcp") || !o.Wants("nixl shm posix") || o.Wants("iperf3") {
		t.Error(o.Only)
	}
}
