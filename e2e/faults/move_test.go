package faults

import (
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/xpyd/xpyd/e2e/cluster"
	"github.com/xpyd/xpyd/e2e/unbroken"
)

// movedStreams are told at once: each of takenOver about twice, but for the one of several prompts,
// which stays.
const movedStreams, ofSeveral = 16, 2

// which is what the i-th of movedStreams asks, in takenOver.
func which(i int) int {
	if i %= len(takenOver) - 1; i >= ofSeveral {
		i++
	}
	return i
}

// moving are streams during which a command ran.
type moving struct {
	took  time.Duration // by the command
	late  bool          // that was more than the limit
	over  time.Time
	seams int
	last  time.Time // the end of the last stream
}

// during tells the streams, all at one of two decode workers, and once all have begun gives an order,
// if there is one, and runs a command. Each must be as an undisturbed one.
func during(t *testing.T, r *cluster.Router, want []*unbroken.Answer, limit time.Duration, worker string, first []string, args ...string) *moving {
	t.Helper()
	client := cluster.NewClient(t)
	other := map[string]string{"decode-0": "decode-1", "decode-1": "decode-0"}[worker]
	order(t, r, "drain", other)
	m := &moving{}
	got, ends := make([]*unbroken.Answer, movedStreams), make([]time.Time, movedStreams)
	var wg, begun sync.WaitGroup
	begun.Add(movedStreams)
	for i := range got {
		wg.Go(func() {
			once := sync.OnceFunc(begun.Done)
			defer once()
			got[i] = tellOf(t, client, r.URL, which(i), func(_ string, n int) {
				if n == 6 {
					once()
				}
			})
			ends[i] = time.Now()
		})
	}
	begun.Wait()
	order(t, r, "undrain", other)
	if len(first) > 0 {
		order(t, r, first...)
	}
	start := time.Now()
	out, errs, code := r.CLI(t, args...)
	m.over = time.Now()
	m.took = m.over.Sub(start)
	m.late = cluster.Late(m.took, limit) // while the streams go on
	wg.Wait()
	if code != 0 {
		t.Fatalf("%v: %d %s%s", args, code, out, errs)
	}
	for i, s := range got {
		what := takenOver[which(i)].fields
		if s.Err != nil {
			t.Errorf("%v: %s: %v", args, what, s.Err)
			continue
		}
		if s.Decode != worker || s.Seams > 1 {
			t.Errorf("%v: %d seams in a stream of %s", args, s.Seams, s.Decode)
		}
		if ends[i].After(m.last) {
			m.last = ends[i]
		}
		m.seams += s.Seams
		if bad := s.Differs(want[which(i)]); bad != "" {
			t.Errorf("%v: %s: %s", args, what, bad)
		}
	}
	t.Logf("%v: %v; %d streams moved, the last ended %v after it: %s", args, m.took, m.seams, m.last.Sub(m.over), strings.TrimSpace(errs))
	cluster.Wait(t, afterKnown+slack, "ledgers empty", r.Idle)
	return m
}

func order(t *testing.T, r *cluster.Router, args ...string) {
	t.Helper()
	if out, errs, code := r.CLI(t, args...); code != 0 {
		t.Fatalf("%v: %d %s%s", args, code, out, errs)
	}
}

// TestMoves: a decode worker that is drained, gets another role or is scaled away is rid of its
// streams within moments, and each event is what it would have been: also once it is a prefill worker
// that still decodes. With --wait-only the streams end where they are.
func TestMoves(t *testing.T) {
	t.Parallel()
	r := cluster.Up(t, "--prefill", "1", "--decode", "2", "--config", config(t), "--model", mediumModel(t))
	want := all(t, cluster.NewClient(t), r.URL, func(string, int) {})
	for i, s := range want {
		if s.Err != nil || s.Seams != 0 {
			t.Fatalf("undisturbed: %v, %d seams in %s", s.Err, s.Seams, takenOver[i].fields)
		}
	}
	run := func(args ...string) {
		t.Helper()
		order(t, r, args...)
		r.WaitServing(t, 20*time.Second, 1, 2)
	}
	var first []string
	moves := func(limit time.Duration, worker string, args ...string) {
		t.Helper()
		m := during(t, r, want, limit, worker, first, args...)
		if m.seams != movedStreams || m.late || m.last.Before(m.over) {
			t.Errorf("%v: %v, %d streams moved", args, m.took, m.seams)
		}
	}
	stays := func(worker string, args ...string) {
		t.Helper()
		m := during(t, r, want, 0, worker, nil, args...)
		if m.seams > 0 || m.last.After(m.over) {
			t.Errorf("%v: %d streams moved, the last ended %v after it", args, m.seams, m.last.Sub(m.over))
		}
	}
	moves(2*time.Second, "decode-0", "drain", "decode-0", "--wait")
	run("undrain", "decode-0")
	stays("decode-0", "drain", "decode-0", "--wait", "--wait-only")
	run("undrain", "decode-0")
	moves(2*time.Second, "decode-0", "role", "decode-0", "prefill")
	run("role", "decode-0", "decode")
	first = []string{"role", "decode-0", "prefill", "--wait-only"} // a prefill worker then, which still decodes
	moves(2*time.Second, "decode-0", "drain", "decode-0", "--wait")
	first = nil
	order(t, r, "undrain", "decode-0")
	run("role", "decode-0", "decode")
	moves(3*time.Second, "decode-1", "scale", "decode=1", "--wait")
	if n, err := r.Metric(`xpyd_router_moves_total{kv="brought"}`); n < 4 || err != nil { // the long prompts, but for who found no place in time
		t.Errorf("the KV of %v moved streams was brought, %v", n, err)
	}
	run("scale", "decode=2", "--wait")
	stays("decode-1", "scale", "decode=1", "--wait", "--wait-only")
}
