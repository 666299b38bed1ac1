package faults

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/e2e/cluster"
	"github.com/xpyd/xpyd/router/planner"
	"github.com/xpyd/xpyd/router/steer"
)

// TestPlannerActs: a planner that acts gives a worker another role and later starts one, while requests run, and
// none of them fails or differs.
func TestPlannerActs(t *testing.T) {
	t.Parallel()
	config := filepath.Join(t.TempDir(), "up.yaml")
	// Two decode workers and one of prefill are as many as the budget has, but prefill is to have two.
	if err := os.WriteFile(config, []byte("planner: {mode: act, budget: 3, cool_down: 1m, prefill: {min: 2}}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	r := cluster.Up(t, "--prefill", "1", "--decode", "2", "--threads", "1", "--config", config)
	l := startLoad(t, r, recorded(t, r, 8), 4)
	r.WaitServing(t, time.Minute, 2, 1)
	l.answered(t, len(l.soFar())+20, nil)

	var st steer.Status
	var flip *planner.Decision
	cluster.Wait(t, 20*time.Second, "the decision", func() error {
		st = planned(t, r)
		for i, d := range st.Models["stories260k"].Decisions {
			if d.Kind == planner.Flip {
				flip = &st.Models["stories260k"].Decisions[i]
				return nil
			}
		}
		return fmt.Errorf("%+v", st)
	})
	if st.Mode != steer.Act || !st.Leads || flip == nil || flip.From != planner.Decode || flip.Role != planner.Prefill || flip.Reason == "" || flip.Predicted.At.IsZero() {
		t.Errorf("%+v", st)
	}
	cluster.Wait(t, 20*time.Second, "the status says so", func() error {
		out, errs, code := r.CLI(t, "status")
		if code != 0 || !strings.Contains(out, "planner (act): decode 1 (wanted 1") || !strings.Contains(out, "prefill 2 (wanted 2") {
			return fmt.Errorf("status: %d %s%s", code, out, errs)
		}
		return nil
	})
	if n, err := r.Metric(`xpyd_planner_wanted_workers{model="stories260k",role="prefill"}`); err != nil || n != 2 {
		t.Errorf("wanted: %v %v", n, err)
	}

	// One that is ended by hand is missed.
	if out, errs, code := r.CLI(t, "scale", "prefill=1"); code != 0 {
		t.Fatalf("scale: %d %s%s", code, out, errs)
	}
	cluster.Wait(t, time.Minute, "a start", func() error {
		for _, d := range planned(t, r).Models["stories260k"].Decisions {
			if d.Kind == planner.Start && d.Role == planner.Prefill && strings.Contains(d.Reason, "are there") {
				return nil
			}
		}
		return fmt.Errorf("no decision to start: %+v", planned(t, r))
	})
	r.WaitServing(t, time.Minute, 2, 1)
	l.answered(t, len(l.soFar())+20, nil)
	for _, got := range l.stop() {
		if !got.Good() || got.Text != got.want {
			t.Errorf("%v", got.Reply)
		}
	}
}

func (l *load) soFar() []result {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.results
}

// planned is what the planner says.
func planned(t *testing.T, r *cluster.Router) (st steer.Status) {
	t.Helper()
	if err := r.Call("GET", "/admin/v1/planner", nil, &st); err != nil {
		t.Fatal(err)
	}
	return st
}
