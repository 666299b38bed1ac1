package engine_test

import (
	"cmp"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/enginetest"
	"github.com/xpyd/xpyd/kernels"
)

// asked is a request with a promise of its own.
type asked struct {
	at      time.Duration
	promise engine.Promise
	out     int
	in      int // tokens; 0: 1,000
}

// askAll submits requests to an H100-like device, whose steps beside streams seen hears of, and
// returns what each got.
func askAll(t *testing.T, cfg engine.Promise, seen func(took time.Duration), list []asked) []served {
	t.Helper()
	got := make([]served, len(list))
	synctest.Test(t, func(t *testing.T) {
		c := config()
		c.StepTokens, c.PrefillTokens, c.MaxRunning, c.Promise = 8192, 8192, 256, cfg
		d := newDevice(enginetest.Config{Blocks: 30000, BlockTokens: 16, MaxPositions: 4096}, func(s *kernels.Step) time.Duration {
			took := h100Time(s)
			if seen != nil && slices.ContainsFunc(s.Seqs, func(q kernels.Seq) bool { return len(q.Tokens) == 1 }) {
				seen(took)
			}
			return took
		})
		r := newRigOn(t, c, d)
		random, began := rng(), time.Now()
		var wg sync.WaitGroup
		for i, a := range list {
			q := request(prompt(random, cmp.Or(a.in, 1000)), a.out)
			q.IgnoreEOS, q.Promise = true, a.promise
			time.Sleep(time.Until(began.Add(a.at)))
			came := time.Now()
			h := r.submit(q)
			wg.Go(func() {
				if _, err := h.Next(t.Context()); err != nil {
					t.Error(err)
					return
				}
				first := time.Now()
				if _, err := readAll(h); err != nil {
					t.Error(err)
				}
				got[i] = served{a.at, first.Sub(came), time.Since(first) / time.Duration(max(1, a.out-1))}
			})
		}
		wg.Wait()
		r.close()
	})
	return got
}

// TestOwnDeadlines: of prompts that wait, the one whose time is up first goes first, whoever came
// first; those promised the same go in turn, and one that is promised nothing goes last.
func TestOwnDeadlines(t *testing.T) {
	if pipelined {
		return // device is a Launcher: the first pass was the same
	}
	short, long := engine.Promise{TTFT: 400 * time.Millisecond}, engine.Promise{TTFT: time.Second}
	list := []asked{{out: 100}} // beside a stream: steps are short, and their speed is known
	for _, p := range []engine.Promise{{}, long, short} {
		for range 8 { // 0.24 s of work
			list = append(list, asked{at: 100 * time.Millisecond, promise: p, out: 1})
		}
	}
	for _, c := range []struct {
		name        string
		cfg         engine.Promise
		none, later []served
	}{{name: "the engine promises nothing"}, {name: "the engine promises more", cfg: engine.Promise{TTFT: 5 * time.Second}}} {
		got := askAll(t, c.cfg, nil, list)[1:]
		none, later, first := got[:8], got[8:16], got[16:]
		for class, list := range [][]served{none, later, first} {
			for i := range list[1:] {
				if list[i].ttft > list[i+1].ttft {
					t.Errorf("%s: class %d: %v after %v, though it came first", c.name, class, list[i].ttft, list[i+1].ttft)
				}
			}
		}
		if last := first[7].ttft; last > later[0].ttft || last > short.TTFT {
			t.Errorf("%s: the most urgent took %v, others began at %v", c.name, last, later[0].ttft)
		}
		if later[7].ttft > none[0].ttft || later[7].ttft > long.TTFT {
			t.Errorf("%s: those promised %v took %v, those promised nothing began at %v", c.name, long.TTFT, later[7].ttft, none[0].ttft)
		}
	}
}

// TestUnpromisedNotStarved: more comes with a promise than the device computes. Who is promised
// nothing waits ten times as long as that promise says, and no longer.
func TestUnpromisedNotStarved(t *testing.T) {
	if pipelined {
		return // device is a Launcher: the first pass was the same
	}
	var list []asked
	for at := time.Duration(0); at < 5*time.Second; at += 20 * time.Millisecond { // 1.4 times what it computes
		list = append(list, asked{at: at, promise: engine.Promise{TTFT: 100 * time.Millisecond}, out: 1})
		if at == 500*time.Millisecond {
			list = append(list, asked{at: at, out: 1})
		}
	}
	got := askAll(t, engine.Promise{}, nil, list)
	for i, a := range list {
		if d := got[i].ttft; a.promise == (engine.Promise{}) && (d < 500*time.Millisecond || d > 1300*time.Millisecond) {
			t.Errorf("a prompt without a promise waited %v", d)
		}
	}
}

// TestStrictestGap: steps take what is promised of who decodes in them: short ones while a stream
// runs that is promised short gaps, long ones before and after, and each keeps its mean.
func TestStrictestGap(t *testing.T) {
	if pipelined {
		return // device is a Launcher: the first pass was the same
	}
	strict, lax := engine.Promise{TPOT: 12 * time.Millisecond}, engine.Promise{TPOT: 40 * time.Millisecond}
	list := []asked{{promise: lax, out: 120}}
	for at := 200 * time.Millisecond; at < 3*time.Second; at += 33 * time.Millisecond { // as much as the device computes
		list = append(list, asked{at: at, promise: lax, out: 2})
	}
	short := len(list)
	for i := range 4 { // streams of 0.5 s, with pauses
		list = append(list, asked{at: 300*time.Millisecond + time.Duration(i)*800*time.Millisecond, promise: strict, out: 40})
	}
	order := slices.Clone(list)
	slices.SortStableFunc(order, func(a, b asked) int { return int(a.at - b.at) })
	var took []time.Duration
	got := askAll(t, engine.Promise{}, func(d time.Duration) { took = append(took, d) }, order)
	n := 0
	for i, a := range order {
		if a.out > 2 && got[i].tpot > a.promise.TPOT {
			t.Errorf("promised %v, a mean gap of %v", a.promise.TPOT, got[i].tpot)
		}
		if a.promise == strict {
			n++
		}
	}
	if n != len(list)-short {
		t.Fatalf("%d streams with short gaps", n)
	}
	if longest := slices.Max(took); longest < 25*time.Millisecond {
		t.Errorf("no step took more than %v, beside streams that are promised gaps of %v", longest, lax.TPOT)
	}
}

// TestSavedByOthers: what short steps have saved of a long gap is not spent beside a stream that was
// promised a short one and has come since.
func TestSavedByOthers(t *testing.T) {
	if pipelined {
		return // device is a Launcher: the first pass was the same
	}
	strict, lax := engine.Promise{TPOT: 12 * time.Millisecond}, engine.Promise{TPOT: 45 * time.Millisecond}
	list := []asked{{promise: lax, out: 100}, {at: 300 * time.Millisecond, promise: strict, out: 21, in: 50}}
	for range 20 {
		list = append(list, asked{at: 310 * time.Millisecond, promise: lax, out: 1})
	}
	if got := askAll(t, engine.Promise{}, nil, list)[1].tpot; got > strict.TPOT {
		t.Errorf("promised %v, a mean gap of %v", strict.TPOT, got)
	}
}
