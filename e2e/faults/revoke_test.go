package faults

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/e2e/cluster"
	"github.com/xpyd/xpyd/internal/fleet"
)

// TestRevoke: a worker that is revoked gets no request, also of a router that has
// started again, until it is not revoked any more; then it is back by itself.
func TestRevoke(t *testing.T) {
	t.Parallel()
	r := cluster.Alone(t)
	bad := r.Worker(t, fleet.Prefill, "--id", "bad", "--log-level", "info")
	r.Worker(t, fleet.Prefill, "--id", "good")
	decode := r.Worker(t, fleet.Decode, "--id", "decode", "--log-level", "info")
	r.WaitServing(t, 20*time.Second, 2, 1)
	list := recorded(t, r, 8)
	by := func(r *cluster.Router) map[string]int {
		t.Helper()
		served := map[string]int{}
		for _, res := range traffic(t, r, list) {
			served[res.Prefill]++
		}
		return served
	}
	if n := by(r); n["bad"] == 0 || n["good"] == 0 {
		t.Fatalf("before: %v", n)
	}

	out, stderr, code := r.CLI(t, "revoke", "bad")
	if code != 0 || !contains(out, "bad: revoked") || !contains(out, "xpyd secret rotate") {
		t.Fatalf("%d %s%s", code, out, stderr)
	}
	says := func(p *cluster.Process, text string) {
		t.Helper()
		cluster.Wait(t, 10*time.Second, text, func() error {
			if !contains(p.Stderr.String(), text) {
				return errors.New("the log does not say so")
			}
			return nil
		})
	}
	says(decode, "ids=[bad]")
	shut := func(r *cluster.Router) {
		t.Helper()
		r.WaitServing(t, 20*time.Second, 1, 1)
		if n := by(r); n["bad"] > 0 || n["good"] == 0 {
			t.Errorf("%v", n)
		}
		if out, _, _ := r.CLI(t, "status"); !contains(out, "revoked: bad") {
			t.Errorf("status says\n%s", out)
		}
		if out, _, _ := r.CLI(t, "revoke"); strings.Count(out, "\n") != 2 || !contains(out, "\nbad ") {
			t.Errorf("revoke lists\n%s", out)
		}
	}
	shut(r)

	r.Kill()
	r.Exit(t, 10*time.Second)
	if info, err := os.Stat(filepath.Join(r.Data, "revoked")); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v %v", info, err)
	}
	r = r.Again(t)
	shut(r)
	if _, stderr, code := r.CLI(t, "unrevoke", "other"); code != 1 || !contains(stderr, "not revoked") {
		t.Errorf("%d %s", code, stderr)
	}
	if out, stderr, code := r.CLI(t, "unrevoke", "bad"); code != 0 {
		t.Fatalf("%s%s", out, stderr)
	}
	r.WaitServing(t, 30*time.Second, 2, 1)
	if n := by(r); n["bad"] == 0 {
		t.Errorf("afterwards: %v", n)
	}
	cluster.Wait(t, afterKnown+slack, "ledgers empty", r.Idle)
	select {
	case <-bad.Done():
		t.Error("it has ended")
	default:
	}
}
