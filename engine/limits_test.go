package engine_test

import (
	"errors"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/enginetest"
	"github.com/xpyd/xpyd/kernels"
)

// TestStepTooLarge: a step that is too large for the backend is split, and every request
// has its turn. Only a request too large for any step fails, and that does not count
// against the backend's health.
func TestStepTooLarge(t *testing.T) {
	const layers = 2
	cfg := config()
	cfg.MaxFailures = 1
	p := &enginetest.Pipelined{Backend: enginetest.New(enginetest.Config{Layers: layers, Blocks: 512}), MostDraws: 5}
	r := newRigOn(t, cfg, p)
	random := rng()
	var list []*engine.Request
	var handles []*engine.Handle
	for i := range 24 {
		req := request(prompt(random, 3+random.IntN(40)), 12)
		req.Seed, req.IgnoreEOS = uint64(i), i%2 == 0
		switch i % 4 {
		case 1:
			req.N = 5
		case 2:
			req.Repetition = 1.1
		}
		if i == 11 {
			req.N = 6
		}
		list = append(list, req)
		handles = append(handles, r.submit(req))
	}
	told := make([]atomic.Int32, 3)
	only := request(prompt(random, 40), 1)
	only.PrefillOnly, only.OnBlocks = true, func(_ int, ready []engine.Ready) {
		for _, b := range ready {
			told[b.Index].Add(1)
		}
	}
	pushed := r.submit(only)
	if _, _, err := collect(pushed, 1); err != nil {
		t.Error(err)
	}
	pushed.Release()
	for i := range told {
		if n := told[i].Load(); n != layers {
			t.Errorf("block %d was told of %d times in %d layers", i, n, layers)
		}
	}
	for i, h := range handles {
		got, _, err := collect(h, max(list[i].N, 1))
		var bad *engine.RequestError
		switch {
		case list[i].N > p.MostDraws:
			if !errors.As(err, &bad) || bad.Field != "n" {
				t.Errorf("request %d ended with %v", i, err)
			}
		case err != nil:
			t.Errorf("request %d: %v", i, err)
		default:
			same(t, "in parts", got, alone(t, 0, list[i]), false)
		}
	}
	if err := r.Health(); err != nil {
		t.Error(err)
	}
}

// TestStepTooLargeIsFair: a sequence that a step has no room for waits only until the
// others have had their turn.
func TestStepTooLargeIsFair(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const tick = time.Millisecond
		p := &enginetest.Pipelined{Backend: enginetest.New(enginetest.Config{Blocks: 512}), MostDraws: 4}
		p.OnStep = func(*kernels.Step) error { time.Sleep(tick); return nil }
		r := newRigOn(t, config(), p)
		random, done := rng(), make(chan time.Duration)
		for range 16 {
			req := request(prompt(random, 10), 50)
			req.IgnoreEOS = true
			go func() { done <- worstGap(t, r.submit(req)) }()
		}
		for range 16 {
			if gap := <-done; gap > 10*tick {
				t.Errorf("a gap of %v between tokens, where all have a turn in some five steps of %v", gap, tick)
			}
		}
		r.close()
	})
}

// worstGap reads a request to its end.
func worstGap(t *testing.T, h *engine.Handle) (gap time.Duration) {
	last := time.Time{}
	for {
		events, err := h.Next(t.Context())
		if err != nil {
			return gap
		}
		if now := time.Now(); len(events) > 0 {
			if !last.IsZero() {
				gap = max(gap, now.Sub(last))
			}
			last = now
		}
	}
}

// TestArrivalHoldsNobodyUp: a request that decodes does not wait for another's prefix,
// even if its penalties keep it out of the step behind its own.
func TestArrivalHoldsNobodyUp(t *testing.T) {
	for _, repetition := range []float32{1, 1.1} {
		synctest.Test(t, func(t *testing.T) {
			const tick = 10 * time.Millisecond
			s := &peerSource{upto: 64, act: func(c *peerComing) {
				time.Sleep(5 * tick)
				c.land(0, 99)
				c.open(1)
				time.Sleep(15 * tick)
				c.land(1, 99)
				c.end(64, false)
			}}
			p := &enginetest.Pipelined{Backend: enginetest.New(enginetest.Config{})}
			r := newRigOn(t, config(), p)
			s.r = r
			behind := request(prompt(rng(), 100), 6)
			behind.IgnoreEOS = true
			want := r.generate(behind)
			ids, _ := enginetest.HoldPrefix(r.cache, behind.Prompt[:s.upto], "", "look")
			s.rows = r.gather(ids, s.upto)
			r.cache.Release(ids, "look")
			r.cache.Clear()
			p.OnStep = func(*kernels.Step) error { time.Sleep(tick); return nil }
			decoding := request(prompt(rand.New(rand.NewPCG(1, 1)), 20), 60)
			decoding.Repetition, decoding.IgnoreEOS = repetition, true
			gaps := make(chan time.Duration)
			go func() { gaps <- worstGap(t, r.submit(decoding)) }()
			time.Sleep(3 * tick)
			behind.Source = s
			got, _, err := collect(r.submit(behind), 1)
			if err != nil {
				t.Error(err)
			}
			same(t, "the prompt", got, want, false)
			if gap := <-gaps; gap > 4*tick {
				t.Errorf("repetition %v: a gap of %v between tokens, a step takes %v", repetition, gap, tick)
			}
			s.all.Wait()
			r.close()
		})
	}
}

// TestMostTokens: no step carries more tokens than the configuration says, even if the
// budget is small compared with the batch.
func TestMostTokens(t *testing.T) {
	for _, c := range []engine.Config{
		{StepTokens: 8, MaxRunning: 8}, {StepTokens: 64, MaxRunning: 64}, {StepTokens: 16, MaxRunning: 4, PrefillTokens: 40}, {StepTokens: 4, MaxRunning: 2},
	} {
		cfg := config()
		cfg.StepTokens, cfg.MaxRunning, cfg.PrefillTokens = c.StepTokens, c.MaxRunning, c.PrefillTokens
		r := newRig(t, cfg, enginetest.Config{Blocks: 512}, func(s *kernels.Step) error {
			n := 0
			for i := range s.Seqs {
				n += len(s.Seqs[i].Tokens)
			}
			if most := cfg.MostTokens(); n > most {
				t.Errorf("a step of %d tokens, at most %d for %+v", n, most, cfg)
			}
			return nil
		})
		random := rng()
		var handles []*engine.Handle
		for range 100 {
			handles = append(handles, r.submit(request(prompt(random, 1+random.IntN(80)), 1+random.IntN(30))))
		}
		for _, h := range handles {
			if _, _, err := collect(h, 1); err != nil {
				t.Error(err)
			}
		}
		r.close()
	}
}

// TestCachedOnceOnly: what a request computed itself, before it was preempted, does not
// count as cached.
func TestCachedOnceOnly(t *testing.T) {
	cfg := config()
	cfg.StepTokens, cfg.RetractEvery = 16, 7
	r := newRig(t, cfg, enginetest.Config{}, nil)
	p := prompt(rng(), 200)
	for _, cached := range []int{0, 192} {
		_, info, err := collect(r.submit(request(p, 20)), 1)
		if err != nil {
			t.Fatal(err)
		}
		if info.CachedTokens != cached {
			t.Errorf("%d tokens cached, want %d", info.CachedTokens, cached)
		}
		if hits := r.metric("xpyd_engine_prefix_hit_tokens_total"); hits != float64(cached) {
			t.Errorf("%v tokens were hits, want %d", hits, cached)
		}
	}
	if n := r.metric("xpyd_engine_preemptions_total"); n == 0 {
		t.Error("nothing was preempted: the test shows nothing")
	}
}
