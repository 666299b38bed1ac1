package engine_test

import (
	"errors"
	"io"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/enginetest"
	"github.com/xpyd/xpyd/kernels"
)

// device computes by itself from a step's launch on, as a GPU does: one step after the other,
// each for as long as takes says. idle is how long it had nothing to do between steps.
type device struct {
	*enginetest.Pipelined
	takes func(*kernels.Step) time.Duration
	ends  []time.Time
	tooks []time.Duration
	last  time.Time
	idle  time.Duration
	took  time.Duration // of the step awaited last
}

func newDevice(shape enginetest.Config, takes func(*kernels.Step) time.Duration) *device {
	return &device{Pipelined: &enginetest.Pipelined{Backend: enginetest.New(shape)}, takes: takes}
}

func (d *device) Launch(s *kernels.Step) error {
	if err := d.Pipelined.Launch(s); err != nil {
		return err
	}
	now := time.Now()
	if !d.last.IsZero() && now.After(d.last) {
		d.idle += now.Sub(d.last)
	} else if now.Before(d.last) {
		now = d.last
	}
	took := d.takes(s)
	d.last = now.Add(took)
	d.ends, d.tooks = append(d.ends, d.last), append(d.tooks, took)
	return nil
}

func (d *device) Await() ([]kernels.Result, error) {
	time.Sleep(time.Until(d.ends[0]))
	d.took, d.ends, d.tooks = d.tooks[0], d.ends[1:], d.tooks[1:]
	return d.Pipelined.Await()
}

func (d *device) LastStepTime() (step, idle float64, err error) {
	return float64(d.took.Microseconds()), 0, nil
}

// gpuTime is 20 us a token and 5 ms at least.
func gpuTime(s *kernels.Step) time.Duration {
	tokens := 0
	for _, q := range s.Seqs {
		tokens += len(q.Tokens)
	}
	return max(5*time.Millisecond, time.Duration(tokens)*20*time.Microsecond)
}

// TestLinger: a request that comes while a step is under way goes into the next, not into the
// one behind it, and the device has no pause between steps.
func TestLinger(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDevice(enginetest.Config{Blocks: 2000, BlockTokens: 16, MaxPositions: 16384}, func(*kernels.Step) time.Duration { return 20 * time.Millisecond })
		r := newRigOn(t, config(), d)
		long := request(prompt(rng(), 16), 200)
		long.IgnoreEOS = true
		began := time.Now()
		h := r.submit(long)
		for i := range 30 {
			at := began.Add(time.Duration(i+5) * 60 * time.Millisecond)
			time.Sleep(time.Until(at.Add(8 * time.Millisecond))) // steps begin at each 20 ms
			d.idle = 0
			q := request(prompt(rng(), 10), 1)
			asked := time.Now()
			if _, err := r.submit(q).Next(t.Context()); err != nil {
				t.Fatal(err)
			}
			if took := time.Since(asked); took > 33*time.Millisecond { // 12 of the step under way, 20 of its own
				t.Errorf("request %d: its first token after %v", i, took)
			}
			if d.idle > 0 {
				t.Errorf("request %d: the device was idle for %v", i, d.idle)
			}
		}
		h.Cancel()
		if _, err := readAll(h); !errors.Is(err, engine.ErrCancelled) && !errors.Is(err, io.EOF) {
			t.Error(err)
		}
		r.close()
	})
}

// TestLingerShrinks: where streams end together, the steps of those left are shorter: the loop
// waits too long for the first of them, and for no other.
func TestLingerShrinks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var d *device
		long, short, before := 40*time.Millisecond, 5*time.Millisecond, 0
		d = newDevice(enginetest.Config{Blocks: 2000, BlockTokens: 16, MaxPositions: 16384}, func(s *kernels.Step) time.Duration {
			n := len(s.Seqs)
			if n == 1 && before > 1 {
				d.idle = 0
			}
			if before = n; n > 1 {
				return long
			}
			return short
		})
		r := newRigOn(t, config(), d)
		var all []*engine.Handle
		for i := range 8 {
			q := request(prompt(rng(), 16), 40+i/7*100)
			q.IgnoreEOS = true
			all = append(all, r.submit(q))
		}
		for _, h := range all {
			if _, err := readAll(h); err != nil {
				t.Fatal(err)
			}
		}
		if once := long*9/10 - short; d.idle > once {
			t.Errorf("the device was idle for %v after seven of eight streams had ended, more than once for %v", d.idle, once)
		}
		r.close()
	})
}

// TestQueueTime: 60 clients in a closed loop. No step that others wait for is longer than
// MaxStepTime, but for a quarter where that ends a prompt, first tokens come within a few steps of QueueTime, the device is hardly idle,
// and steps beside decodes are no larger than that takes. Who waits with whom, and so for how
// long, depends on when the clients begin: it holds for two beginnings.
func TestQueueTime(t *testing.T) {
	if pipelined {
		return // device is a Launcher: the first pass was the same
	}
	for seed := range 2 {
		queueTime(t, uint64(7+seed))
	}
}

// ends reports whether a step ends a prompt.
func ends(s *kernels.Step) bool {
	return slices.ContainsFunc(s.Seqs, func(q kernels.Seq) bool { return len(q.Tokens) > 1 && len(q.Samples) > 0 })
}

func queueTime(t *testing.T, seed uint64) {
	t.Helper()
	cfg := config()
	cfg.StepTokens, cfg.PrefillTokens, cfg.MaxStepTime, cfg.QueueTime, cfg.MaxRunning = 8192, 8192, 50*time.Millisecond, 50*time.Millisecond, 256
	const clients, in, out = 60, 1000, 64
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var first []time.Duration
		var steps, large int
		var busy time.Duration
		d := newDevice(enginetest.Config{Blocks: 8000, BlockTokens: 16, MaxPositions: 4096}, func(s *kernels.Step) time.Duration {
			took, decodes := gpuTime(s), 0
			for _, q := range s.Seqs {
				if len(q.Tokens) == 1 {
					decodes++
				}
			}
			if decodes > 0 {
				if steps++; took > 25*time.Millisecond {
					large++
				}
				if took > cfg.MaxStepTime*5/4+time.Millisecond || took > cfg.MaxStepTime+time.Millisecond && !ends(s) {
					t.Errorf("a step of %v, %d decode", took, decodes)
				}
			}
			busy += took
			return took
		})
		r := newRigOn(t, cfg, d)
		var wg sync.WaitGroup
		for c := range clients {
			wg.Go(func() {
				random := rand.New(rand.NewPCG(uint64(c), seed))
				time.Sleep(time.Duration(random.IntN(1000)) * time.Millisecond)
				for round := range 6 {
					q := request(prompt(random, in), out)
					q.IgnoreEOS = true
					began := time.Now()
					h, err := r.Submit(t.Context(), q)
					if err == nil {
						_, err = h.Next(t.Context())
					}
					if err != nil {
						t.Error(err)
						return
					}
					if round > 1 {
						mu.Lock()
						first = append(first, time.Since(began))
						mu.Unlock()
					}
					if _, err := readAll(h); err != nil {
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
		r.close()
		slices.Sort(first)
		p50, p99 := first[len(first)/2], first[len(first)*99/100]
		t.Logf("first tokens after %v, 99 of 100 within %v; %d of %d steps beside decodes take more than 25 ms; idle %v of %v", p50, p99, large, steps, d.idle, busy)
		if p50 > 3*cfg.QueueTime || p99 > 4*cfg.QueueTime || large*3 > steps || d.idle > busy/250 {
			t.Errorf("first tokens after %v, 99 of 100 within %v; %d of %d steps beside decodes take more than 25 ms; idle %v of %v", p50, p99, large, steps, d.idle, busy)
		}
	})
}

// TestGoesOnAtOnce: on a device whose small steps take one time, a stream that was expected goes on in the
// step behind the one under way, which waits for it a little, and draws a token in each from then on. Who
// decodes beside it waits for no more than that, and for a twentieth of the time at most.
func TestGoesOnAtOnce(t *testing.T) {
	if pipelined {
		return // device is a Launcher: the first pass was the same
	}
	for name, c := range map[string]struct {
		rests time.Duration // between streams
		mean  time.Duration // until the first token
	}{
		"now and then":     {300 * time.Millisecond, 23 * time.Millisecond},
		"one upon another": {0, 31 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { goesOn(t, c.rests, c.mean) })
		})
	}
}

func goesOn(t *testing.T, rests, mean time.Duration) {
	const step, held = 20 * time.Millisecond, 10 * time.Millisecond
	r := newRigOn(t, config(), newDevice(enginetest.Config{Blocks: 2000, BlockTokens: 16, MaxPositions: 16384}, func(*kernels.Step) time.Duration { return step }))
	long := request(prompt(rng(), 100), 2000)
	long.IgnoreEOS = true
	beside := r.submit(long)
	time.Sleep(10 * step)
	began := time.Now()
	var lost atomic.Int64
	var gaps sync.WaitGroup
	gaps.Go(func() {
		last := time.Now()
		for first := true; ; first = false {
			if _, err := beside.Next(t.Context()); err != nil {
				return
			}
			if gap := time.Since(last) - step; gap > 0 && !first {
				if lost.Add(int64(gap)); gap > held {
					t.Errorf("a gap of %v beside", step+gap)
				}
			}
			last = time.Now()
		}
	})
	var sum time.Duration
	const streams = 40
	for i := range streams {
		time.Sleep(rests + time.Duration(i)*time.Millisecond + 200*time.Microsecond) // at each point of a step
		r.Expect(t.Context())
		time.Sleep(time.Duration(i*7%20)*time.Millisecond + 500*time.Microsecond) // its next token where it is
		q := request(prompt(rng(), 4), 24)
		q.IgnoreEOS, q.Given = true, []engine.Given{{Tokens: []int32{9, 9, 9, 9, 9, 9}}}
		came := time.Now()
		h := r.submit(q)
		for n := range 3 {
			events, err := h.Next(t.Context())
			took := time.Since(came)
			if err != nil || len(events) != 1 || took > time.Duration(n+2)*step+3*time.Millisecond { // what was planned ahead
				t.Errorf("stream %d has token %d after %v: %v %v", i, n, took, events, err)
			}
			if n == 0 {
				sum += took
			}
		}
		h.Cancel()
	}
	time.Sleep(3 * step)
	if got := sum / streams; got > mean {
		t.Errorf("first tokens after %v on average, want %v", got, mean)
	}
	waited := time.Duration(lost.Load())
	if most := time.Since(began)/20 + held; waited > most {
		t.Errorf("who decodes beside lost %v, want %v at most", waited, most)
	}
	if idle := r.backend.(*device).idle; idle > waited+60*time.Millisecond {
		t.Errorf("the device was idle for %v, for %v of it a step waited", idle, waited)
	}
	beside.Cancel()
	gaps.Wait()
	r.close()
}

// TestExpectedBesidePrompts: a step waits for a stream that is expected also where a new prompt came before it.
func TestExpectedBesidePrompts(t *testing.T) {
	if pipelined {
		return // as above
	}
	synctest.Test(t, func(t *testing.T) {
		const step = 20 * time.Millisecond
		r := newRigOn(t, config(), newDevice(enginetest.Config{Blocks: 2000, BlockTokens: 16, MaxPositions: 16384}, func(*kernels.Step) time.Duration { return step }))
		long := request(prompt(rng(), 100), 200)
		long.IgnoreEOS = true
		beside := r.submit(long)
		time.Sleep(10*step + step/4)
		r.Expect(t.Context()) // in the middle of a step
		other := r.submit(request(prompt(rng(), 4), 24))
		time.Sleep(step/2 + 3*time.Millisecond) // its end has passed
		q := request(prompt(rng(), 4), 24)
		q.IgnoreEOS, q.Given = true, []engine.Given{{Tokens: []int32{9, 9, 9, 9, 9, 9}}}
		came := time.Now()
		h := r.submit(q)
		if _, err := h.Next(t.Context()); err != nil || time.Since(came) > step+3*time.Millisecond {
			t.Errorf("the stream goes on after %v: %v", time.Since(came), err)
		}
		for _, h := range []*engine.Handle{beside, other, h} {
			h.Cancel()
		}
		r.close()
	})
}
