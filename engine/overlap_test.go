package engine_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/enginetest"
	"github.com/xpyd/xpyd/kernels"
)

func overlapping(t *testing.T, cfg engine.Config, shape enginetest.Config, onStep func(*kernels.Step) error) (*rig, *enginetest.Pipelined) {
	fake := enginetest.New(shape)
	fake.OnStep = onStep
	p := &enginetest.Pipelined{Backend: fake}
	return newRigOn(t, cfg, p), p
}

// TestDecodeOverlaps: while a request decodes, each step is launched before the
// one before it has ended; penalties, which need the token, make it wait.
func TestDecodeOverlaps(t *testing.T) {
	r, p := overlapping(t, config(), enginetest.Config{}, nil)
	req := request(prompt(rng(), 5), 50)
	req.IgnoreEOS = true
	r.generate(req)
	n, _ := p.Steps()
	if n != 50 || p.Overlapped() != 49 { // all but the first
		t.Errorf("%d steps, %d launched while one was under way; want 50 and 49", n, p.Overlapped())
	}
	before := p.Overlapped()
	req.Frequency = 0.5
	r.generate(req)
	if p.Overlapped() != before {
		t.Errorf("%d steps were launched without the token that they were to penalise", p.Overlapped()-before)
	}
}

// TestChunksOverlap: so do the chunks of a long prompt.
func TestChunksOverlap(t *testing.T) {
	cfg := config()
	cfg.StepTokens, cfg.MaxStepTime = 16, 0
	r, p := overlapping(t, cfg, enginetest.Config{}, nil)
	r.generate(request(prompt(rng(), 160), 1))
	if n, _ := p.Steps(); n != 10 || p.Overlapped() != 9 {
		t.Errorf("%d steps, %d overlapping; want 10 and 9", n, p.Overlapped())
	}
}

// TestBlocksOfAStepUnderWay: a request that is cancelled while steps carry it
// has its blocks until the last of them has ended.
func TestBlocksOfAStepUnderWay(t *testing.T) {
	for _, prefillOnly := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			gate := make(chan struct{})
			cfg := config()
			cfg.StepTokens, cfg.MaxStepTime = 16, 0
			r, _ := overlapping(t, cfg, enginetest.Config{}, func(*kernels.Step) error { <-gate; return nil })
			defer r.close()
			req := request(prompt(rng(), 160), 50)
			req.PrefillOnly = prefillOnly
			h := r.submit(req)
			gate <- struct{}{} // the first chunk has been computed
			synctest.Wait()    // the second runs, the third is launched behind it
			h.Release()
			for left := 2; left > 0; left-- {
				synctest.Wait()
				if held := r.cache.Stats().Held; held == 0 {
					t.Errorf("prefill only %t: nothing is held with %d steps under way", prefillOnly, left)
				}
				select {
				case <-h.Done():
					t.Errorf("prefill only %t: done with %d steps under way", prefillOnly, left)
				default:
				}
				gate <- struct{}{}
			}
			r.done(h)
			if held := r.cache.Stats().Held; held != 0 {
				t.Errorf("prefill only %t: %d blocks held at the end", prefillOnly, held)
			}
		})
	}
}

// TestEndInAStepUnderWay: a token that ends a request when its next step has
// been launched already is the last one that the reader gets.
func TestEndInAStepUnderWay(t *testing.T) {
	r, p := overlapping(t, config(), enginetest.Config{}, nil)
	req := request(prompt(rng(), 5), 50)
	req.IgnoreEOS = true
	free := r.generate(req)[0].tokens
	stop := free[10]
	req.StopTokens = []int32{stop}
	want := free[:slices.Index(free, stop)+1]
	before, _ := p.Steps()
	h, err := r.Submit(context.Background(), req)
	if err != nil {
		t.Fatal(err)
	}
	out, _, err := collect(h, 1)
	if err != nil || !slices.Equal(out[0].tokens, want) || out[0].finish != engine.FinishStop {
		t.Errorf("%v, %v: want %v", out, err, want)
	}
	r.done(h)
	if n, _ := p.Steps(); n-before != len(want)+1 {
		t.Errorf("%d steps for %d tokens; want one more, launched in vain", n-before, len(want))
	}
}

// TestFailedStepUnderWay: a failure ends the requests of its step; the step
// behind it neither delivers to them nor harms another.
func TestFailedStepUnderWay(t *testing.T) {
	fail := false
	cfg := config()
	r, p := overlapping(t, cfg, enginetest.Config{}, func(s *kernels.Step) error {
		if fail && len(s.Seqs) == 1 && s.Seqs[0].Pos == 20 {
			fail = false
			panic("device on fire")
		}
		return nil
	})
	fail = true
	req := request(prompt(rng(), 5), 50)
	req.IgnoreEOS = true
	h := r.submit(req)
	out, _, err := collect(h, 1)
	r.done(h)
	if err == nil || len(out[0].tokens) != 16 {
		t.Errorf("%d tokens, %v", len(out[0].tokens), err)
	}
	if p.Overlapped() == 0 {
		t.Error("nothing overlapped")
	}
	if got := r.generate(req); len(got[0].tokens) != 50 {
		t.Errorf("%d tokens after the failure", len(got[0].tokens))
	}
}

// TestReleaseBehindAFailedStep: blocks of a prompt whose step failed are not
// given back while the step behind it may still write them.
func TestReleaseBehindAFailedStep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gate := make(chan error)
		cfg := config()
		cfg.StepTokens, cfg.MaxStepTime = 16, 0
		r, _ := overlapping(t, cfg, enginetest.Config{}, func(*kernels.Step) error { return <-gate })
		defer r.close()
		req := request(prompt(rng(), 160), 1)
		req.PrefillOnly = true
		h := r.submit(req)
		synctest.Wait() // two steps are under way, and the other is in neither
		other := request(prompt(rng(), 5), 3)
		other.IgnoreEOS = true
		o := r.submit(other)
		gate <- nil
		synctest.Wait() // the second step is the oldest under way
		h.Release()
		gate <- errors.New("failed")
		synctest.Wait()
		if h.Blocks() == nil {
			t.Error("the blocks are free with a step under way")
		}
		go func() {
			for {
				select {
				case gate <- nil:
				case <-t.Context().Done():
					return
				}
			}
		}()
		r.done(h)
		if _, _, err := collect(o, 1); err != nil {
			t.Errorf("the other request: %v", err)
		}
	})
}

// TestOldestIsNotStarved: a sequence that needs the memory of a younger one,
// which is always in a step under way, gets it nevertheless.
func TestOldestIsNotStarved(t *testing.T) {
	const old, young, tokens = 1, 2, 20
	var drawn, without, most int // the loop's, until it is closed
	both := make(chan struct{})
	r, _ := overlapping(t, config(), enginetest.Config{Blocks: 4, BlockTokens: 16}, func(s *kernels.Step) error {
		<-both
		without++
		for _, q := range s.Seqs {
			for _, d := range q.Samples {
				if d.Seed == old {
					drawn++
					without = 0
				}
			}
		}
		if drawn > 0 && drawn < tokens {
			most = max(most, without)
		}
		return nil
	})
	a, b := request(prompt(rng(), 30), tokens), request(prompt(rng(), 15), 30)
	a.Seed, b.Seed, a.IgnoreEOS, b.IgnoreEOS = old, young, true, true
	h := r.submit(a)
	g := r.submit(b)
	close(both)
	for _, h := range []*engine.Handle{h, g} {
		if _, _, err := collect(h, 1); err != nil {
			t.Fatal(err)
		}
	}
	r.close()
	if r.metric("xpyd_engine_preemptions_total") == 0 {
		t.Error("the oldest never needed the other's memory: the test shows nothing")
	}
	if most > 2 {
		t.Errorf("%d steps in a row went by without the oldest", most)
	}
}

// TestCloseAwaitsStepsUnderWay: an engine that is closed at once leaves no step
// behind, whose backend its caller will close next.
func TestCloseAwaitsStepsUnderWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gate := make(chan struct{})
		r, p := overlapping(t, config(), enginetest.Config{}, func(*kernels.Step) error { <-gate; return nil })
		req := request(prompt(rng(), 5), 50)
		req.IgnoreEOS = true
		h := r.submit(req)
		for range 3 {
			gate <- struct{}{}
			synctest.Wait()
		}
		if p.UnderWay() == 0 {
			t.Fatal("nothing is launched behind the step that runs")
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		closed := make(chan error)
		go func() { closed <- r.Close(ctx) }()
		synctest.Wait()
		close(gate)
		if err := <-closed; !errors.Is(err, context.Canceled) {
			t.Errorf("close: %v", err)
		}
		if n := p.UnderWay(); n > 0 {
			t.Errorf("%d steps are under way after close", n)
		}
		if _, _, err := collect(h, 1); !errors.Is(err, engine.ErrClosed) {
			t.Errorf("the request ended with %v", err)
		}
	})
}
