package engine_test

import (
	"errors"
	"io"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/enginetest"
	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/kernels"
)

// shedder is an H100-like engine that sheds, or does not. Slower makes its steps so many times longer.
func shedder(t *testing.T, ttft time.Duration, shed bool, change func(*engine.Config), slower func() float64) *rig {
	t.Helper()
	cfg := config()
	cfg.StepTokens, cfg.PrefillTokens, cfg.ShedLate = 8192, 8192, shed
	cfg.Promise.TTFT = ttft
	if change != nil {
		change(&cfg)
	}
	return newRigOn(t, cfg, newDevice(enginetest.Config{Blocks: 8000, BlockTokens: 16, MaxPositions: 40000}, func(s *kernels.Step) time.Duration {
		if slower != nil {
			return slowerTime(slower())(s)
		}
		return h100Time(s)
	}))
}

// plain is a request for so many tokens that no stop token ends.
func plain(random *rand.Rand, in, out int) *engine.Request {
	q := request(prompt(random, in), out)
	q.IgnoreEOS = true
	return q
}

// endings is how many requests ended with an outcome.
func (r *rig) endings(outcome string) int {
	r.t.Helper()
	families, err := r.reg.Gather()
	if err != nil {
		r.t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if l := m.GetLabel(); f.GetName() == "xpyd_engine_requests_total" && l[0].GetValue() == outcome {
				return int(m.GetCounter().GetValue())
			}
		}
	}
	return 0
}

// TestShedLate: of more prompts than the device computes, more are in time if the others are shed, and
// nothing is computed of those.
func TestShedLate(t *testing.T) {
	if pipelined {
		return // device is a Launcher: the first pass was the same
	}
	const ttft, in, out = 300 * time.Millisecond, 1000, 20
	load := func(shed bool, came []time.Duration) (good, late, ended int) {
		synctest.Test(t, func(t *testing.T) {
			computed := 0
			r := shedder(t, ttft, shed, func(c *engine.Config) { c.Stepped = func(n int) { computed += n } }, nil)
			random, began := rng(), time.Now()
			var wg sync.WaitGroup
			var mu sync.Mutex
			for _, at := range came {
				q := plain(random, in, out)
				time.Sleep(time.Until(began.Add(at)))
				asked := time.Now()
				h := r.submit(q)
				wg.Go(func() {
					_, err := h.Next(t.Context())
					took := time.Since(asked)
					if err == nil {
						_, err = readAll(h)
					}
					mu.Lock()
					defer mu.Unlock()
					switch {
					case errors.Is(err, engine.ErrLate):
						if ended++; took > ttft+60*time.Millisecond { // a step
							t.Errorf("shed after %v", took)
						}
					case err != nil:
						t.Error(err)
					case took <= ttft:
						good++
					default:
						late++
					}
				})
			}
			wg.Wait()
			if want := (good + late) * (in + out - 1); computed != want {
				t.Errorf("%d positions were computed, want %d: of %d requests", computed, want, good+late)
			}
			if n := r.endings("shed"); n != ended {
				t.Errorf("%d are counted as shed, want %d", n, ended)
			}
			r.close()
		})
		return good, late, ended
	}
	for _, c := range []struct {
		rate float64
		more float64 // so many times as many are in time
	}{{60, 1.5}, {40, 1.04}, {28, 1}} { // of 33 that it computes
		came := poisson(c.rate, 4*time.Second)
		with, tooLate, shed := load(true, came)
		without, behind, none := load(false, came)
		t.Logf("%v requests a second: %d in time, %d late, %d shed; else %d in time, %d late", c.rate, with, tooLate, shed, without, behind)
		if float64(with) < c.more*float64(without) || tooLate > with/20 || shed == 0 || none > 0 {
			t.Errorf("%v requests a second: %d in time, %d late, %d shed; else %d in time, %d late, %d shed", c.rate, with, tooLate, shed, without, behind, none)
		}
	}
}

// TestShedOnlyNew: what was begun, here or elsewhere, and what is urgent is never shed, however late.
func TestShedOnlyNew(t *testing.T) {
	eachKind := func(t *testing.T) {
		r := shedder(t, time.Nanosecond, true, func(c *engine.Config) { c.RetractEvery, c.MaxRunning = 3, 8 }, nil)
		defer r.close()
		random := rng()
		edit := func(f func(*engine.Request)) *engine.Request {
			q := plain(random, 600, 30)
			f(q)
			return q
		}
		owned := func(q *engine.Request) *engine.Request {
			ids, err := r.reserve(38, "given")
			if err != nil {
				t.Fatal(err)
			}
			q.Owner, q.Prefilled = "given", &engine.Prefilled{Blocks: ids}
			return q
		}
		first := r.submit(edit(func(q *engine.Request) { q.Promise.TTFT = time.Hour }))
		synctest.Wait() // the others wait for its step
		list := map[string]*engine.Handle{
			"first":      first,
			"urgent":     r.submit(edit(func(q *engine.Request) { q.Urgent = true })),
			"takeover":   r.submit(edit(func(q *engine.Request) { q.Given = []engine.Given{{Tokens: []int32{1, 2}}} })),
			"unbegun":    r.submit(edit(func(q *engine.Request) { q.Given = []engine.Given{{}} })),
			"rows":       r.submit(edit(func(q *engine.Request) { q.PrefillOnly, q.RowsOnly = true, true })),
			"prefilled":  r.submit(owned(edit(func(*engine.Request) {}))),
			"kept":       r.submit(edit(func(q *engine.Request) { q.Keep = true })),
			"unpromised": r.submit(edit(func(q *engine.Request) { q.Promise.TTFT = time.Hour })),
		}
		shed := map[string]*engine.Handle{
			"new":     r.submit(edit(func(*engine.Request) {})),
			"choices": r.submit(edit(func(q *engine.Request) { q.N = 4 })),
			"split":   r.submit(edit(func(q *engine.Request) { q.PrefillOnly = true })),
		}
		for name, h := range list {
			if _, err := readAll(h); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			h.Release()
		}
		for name, h := range shed {
			if events, err := h.Next(t.Context()); !errors.Is(err, engine.ErrLate) {
				t.Errorf("%s: %d events, %v; want %v", name, len(events), err, engine.ErrLate)
			}
			h.Release()
			r.done(h)
		}
	}
	if !pipelined {
		synctest.Test(t, eachKind)
	}
}

// TestShedNothingBegun: a prompt in several steps is late for all but its first, and one that lost its
// blocks is not new again.
func TestShedNothingBegun(t *testing.T) {
	if pipelined {
		return // device is a Launcher: the first pass was the same
	}
	synctest.Test(t, func(t *testing.T) {
		r := shedder(t, 200*time.Millisecond, true, func(c *engine.Config) { c.StepTokens, c.PrefillTokens, c.RetractEvery = 512, 512, 4 }, nil)
		random := rng()
		h := r.submit(plain(random, 12000, 3)) // 0.3 s, for an idle device
		others := []*engine.Handle{h}
		for range 8 {
			time.Sleep(50 * time.Millisecond)
			others = append(others, r.submit(plain(random, 100, 3)))
		}
		for i, h := range others {
			if _, err := readAll(h); err != nil {
				t.Errorf("%d: %v", i, err)
			}
		}
		r.close()
	})
}

// TestShedWithoutMemory: a prompt that waits for blocks is shed when its time is up, though nothing else
// happens then.
func TestShedWithoutMemory(t *testing.T) {
	if pipelined {
		return // device is a Launcher: the first pass was the same
	}
	synctest.Test(t, func(t *testing.T) {
		r := shedder(t, 200*time.Millisecond, true, nil, nil)
		ids, err := r.reserve(7999, "outside")
		if err != nil {
			t.Fatal(err)
		}
		random, began := rng(), time.Now()
		h := r.submit(plain(random, 1000, 3))
		long := plain(random, 1000, 3)
		long.Promise.TTFT = time.Hour
		patient := r.submit(long)
		if _, err := h.Next(t.Context()); !errors.Is(err, engine.ErrLate) {
			t.Errorf("without memory: %v", err)
		}
		if d := time.Since(began); d < 200*time.Millisecond || d > 201*time.Millisecond {
			t.Errorf("shed after %v", d)
		}
		r.cache.Release(ids, "outside")
		if _, err := readAll(patient); err != nil {
			t.Error(err)
		}
		r.close()
	})
}

// TestShedMeasures: a device that was slow for a while is measured again, though each prompt seems late;
// and an idle one computes what is too long for the promise, as nobody else needs it.
func TestShedMeasures(t *testing.T) {
	if pipelined {
		return // device is a Launcher: the first pass was the same
	}
	synctest.Test(t, func(t *testing.T) {
		times := 1.0
		r := shedder(t, 300*time.Millisecond, true, nil, func() float64 { return times })
		random := rng()
		ask := func(in int) error {
			_, err := readAll(r.submit(plain(random, in, 2)))
			return err
		}
		for i := range 60 {
			switch i {
			case 5:
				times = 30
			case 25:
				times = 1
			}
			if err := ask(1000); err != nil {
				t.Fatalf("%d: %v", i, err)
			}
		}
		if err := ask(30000); err != nil { // 0.8 s
			t.Errorf("a long prompt on an idle device: %v", err)
		}
		first := r.submit(plain(random, 1000, 2))
		if err := ask(30000); !errors.Is(err, engine.ErrLate) {
			t.Errorf("a long prompt beside another: %v", err)
		}
		if _, err := readAll(first); err != nil && !errors.Is(err, io.EOF) {
			t.Error(err)
		}
		r.close()
	})
}

// TestShedNotCached: a prompt is not late by what the prefix cache has of it.
func TestShedNotCached(t *testing.T) {
	if pipelined {
		return // device is a Launcher: the first pass was the same
	}
	synctest.Test(t, func(t *testing.T) {
		r := shedder(t, 300*time.Millisecond, true, nil, nil)
		random := rng()
		long := plain(random, 30000, 2)
		if _, err := readAll(r.submit(long)); err != nil {
			t.Fatal(err)
		}
		again := *long
		again.Prompt = slices.Concat(long.Prompt, prompt(random, 50))
		for i, h := range []*engine.Handle{r.submit(plain(random, 1000, 2)), r.submit(&again)} {
			if _, err := readAll(h); err != nil {
				t.Errorf("%d: %v", i, err)
			}
		}
		r.close()
	})
}

// nothing is a Source that has none.
type nothing struct{}

func (nothing) Bring(kvcache.Chain, []int32, []int32, int, int, func()) (engine.Arriving, bool) {
	return nil, false
}

// TestShedBeforePlaced: a prompt that waits for a place and is late gets none, and nobody hears of what the
// cache has of it. One of which more might be elsewhere is shed when it has a place, before a step.
func TestShedBeforePlaced(t *testing.T) {
	if pipelined {
		return // device is a Launcher: the first pass was the same
	}
	for name, c := range map[string]struct {
		source engine.Source
		places int
		told   bool
	}{"plain": {nil, 2, false}, "room": {nil, 9, false}, "source": {nothing{}, 2, true}} {
		synctest.Test(t, func(t *testing.T) {
			computed, places := 0, c.places
			r := shedder(t, 300*time.Millisecond, true, func(c *engine.Config) {
				c.MaxRunning, c.Stepped = places, func(n int) { computed += n }
			}, nil)
			random := rng()
			begun := plain(random, 1000, 1)
			if _, err := readAll(r.submit(begun)); err != nil {
				t.Fatal(err)
			}
			streams := []*engine.Handle{r.submit(plain(random, 10, 60)), r.submit(plain(random, 10, 20))}
			synctest.Wait()
			told := false
			long := plain(random, 20000, 1)
			long.Prompt, long.Source = slices.Concat(begun.Prompt, long.Prompt), c.source
			long.PrefillOnly, long.OnBlocks = true, func(int, []engine.Ready) { told = true }
			h := r.submit(long)
			streams = append(streams, r.submit(plain(random, 100, 1)))
			if _, err := h.Next(t.Context()); !errors.Is(err, engine.ErrLate) {
				t.Errorf("%s: %v", name, err)
			}
			h.Release()
			for _, h := range streams {
				if _, err := readAll(h); err != nil {
					t.Errorf("%s: %v", name, err)
				}
			}
			if want := 1000 + 69 + 29 + 100; computed != want || told != c.told {
				t.Errorf("%s: %d positions computed, want %d; told of blocks: %v", name, computed, want, told)
			}
			r.close()
		})
	}
}
