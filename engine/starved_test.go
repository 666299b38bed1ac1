package engine_test

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/enginetest"
	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/kernels"
)

// TestPausedGiveWay: clients that do not read hold all blocks; a reservation from outside gets
// them at once, and those clients still get every token when they read.
func TestPausedGiveWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := config()
		cfg.MaxBacklog = 20
		r := newRig(t, cfg, enginetest.Config{Blocks: 12, BlockTokens: 16, MaxPositions: 192}, nil)
		var handles []*engine.Handle
		for range 4 {
			q := request(prompt(rng(), 20), 150)
			q.IgnoreEOS = true
			handles = append(handles, r.submit(q))
		}
		synctest.Wait() // until all are paused
		if n := r.cache.Stats().Available(); n >= 4 {
			t.Fatalf("%d blocks are available", n)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		began := time.Now()
		ids, _, err := r.cache.ReserveWait(ctx, &kvcache.Chain{}, 0, 4, "outside")
		if took := time.Since(began); err != nil || len(ids) != 4 || took > time.Second {
			t.Errorf("%d blocks, %v after %v", len(ids), err, took)
		}
		r.cache.Release(ids, "outside")
		for _, h := range handles {
			if out, _, err := collect(h, 1); err != nil || len(out[0].tokens) != 150 {
				t.Errorf("%v, %d tokens", err, len(out[0].tokens))
			}
		}
		r.close()
	})
}

// TestShortBehindLongs: however many long prompts are ahead, a short one is in the first step.
func TestShortBehindLongs(t *testing.T) {
	for _, longs := range []int{1, 2, 4} {
		for _, size := range []int{60, 120, 250} {
			synctest.Test(t, func(t *testing.T) {
				cfg := config()
				cfg.StepTokens, cfg.MaxStepTime = 512, 0
				gate := make(chan struct{})
				var largest, steps int
				r := newRig(t, cfg, enginetest.Config{Blocks: 4000, BlockTokens: 16, MaxPositions: 16384}, func(s *kernels.Step) error {
					<-gate
					time.Sleep(10 * time.Millisecond)
					steps++
					for i, q := range s.Seqs {
						if n := len(q.Tokens); i == 0 {
							largest = max(largest, n)
						} else if n > 1 && n < 16 {
							t.Errorf("%d long ahead: a crumb of %d tokens in step %d", longs, n, steps)
						}
					}
					return nil
				})
				first := r.submit(request(prompt(rng(), 16), 1))
				synctest.Wait()
				handles := []*engine.Handle{first}
				for i := range longs {
					handles = append(handles, r.submit(request(prompt(rng(), 7800+200*i), 1)))
				}
				h := r.submit(request(prompt(rng(), size), 1))
				began := time.Now()
				close(gate)
				if _, _, err := collect(h, 1); err != nil {
					t.Error(err)
				}
				if took := time.Since(began); took > 20*time.Millisecond { // the step under way, and its own
					t.Errorf("%d long ahead of %d tokens: its first token after %v", longs, size, took)
				}
				for _, h := range handles {
					if _, _, err := collect(h, 1); err != nil {
						t.Error(err)
					}
				}
				if largest < 256 {
					t.Errorf("the oldest got %d tokens of a step at most", largest)
				}
				r.close()
			})
		}
	}
}

// TestLingerOutlier: after one step of 30 s the device does not wait for as long.
func TestLingerOutlier(t *testing.T) {
	for _, prompts := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			n := 0
			d := newDevice(enginetest.Config{Blocks: 2000, BlockTokens: 16, MaxPositions: 16384}, func(s *kernels.Step) time.Duration {
				if len(s.Seqs[len(s.Seqs)-1].Tokens) > 16 == prompts {
					if n++; n == 3 {
						return 30 * time.Second
					}
				}
				return gpuTime(s)
			})
			cfg := config()
			r := newRigOn(t, cfg, d)
			long := request(prompt(rng(), 16), 300)
			long.IgnoreEOS = true
			h := r.submit(long)
			if prompts {
				random := rng()
				for i := range 4 {
					began := time.Now()
					if _, _, err := collect(r.submit(request(prompt(random, 5000), 1)), 1); err != nil {
						t.Error(err)
					}
					if took := time.Since(began); i > 0 && took > 500*time.Millisecond {
						t.Errorf("prompt %d after it took %v", i, took)
					}
				}
			}
			if _, _, err := collect(h, 1); err != nil {
				t.Error(err)
			}
			if d.idle > 2*4*cfg.MaxStepTime { // linger waits for four at most, once or twice
				t.Errorf("prompts %t: the device was idle for %v", prompts, d.idle)
			}
			r.close()
		})
	}
}

// TestLongPrompt: steps beside streams take no longer than MaxStepTime however far a long prompt
// has come, and later prompts are not slower for it.
func TestLongPrompt(t *testing.T) {
	if pipelined {
		return // device is a Launcher: the first pass was the same
	}
	for _, attention := range []float64{0.0009, 0.003} { // us for each position before a token
		synctest.Test(t, func(t *testing.T) {
			cfg := config()
			cfg.StepTokens, cfg.PrefillTokens, cfg.MaxStepTime, cfg.QueueTime = 8192, 8192, 50*time.Millisecond, 50*time.Millisecond
			var mu sync.Mutex // the engine's loop counts
			var longest time.Duration
			over, steps := 0, 0
			d := newDevice(enginetest.Config{Blocks: 20000, BlockTokens: 16, MaxPositions: 200000}, func(s *kernels.Step) time.Duration {
				us, prompt := 0.0, false
				for _, q := range s.Seqs {
					us += float64(len(q.Tokens)) * (20 + attention*(float64(q.Pos)+float64(len(q.Tokens))/2))
					prompt = prompt || len(q.Tokens) > 1
				}
				took := max(5*time.Millisecond, time.Duration(us)*time.Microsecond)
				if prompt {
					mu.Lock()
					defer mu.Unlock()
					if steps++; took > cfg.MaxStepTime*11/10 {
						over++
					}
					longest = max(longest, took)
				}
				return took
			})
			r, start := newRigOn(t, cfg, d), time.Now()
			stream := request(prompt(rng(), 16), 100000)
			stream.IgnoreEOS = true
			h := r.submit(stream)
			time.Sleep(200 * time.Millisecond)
			random := rng()
			one := func(tokens int) time.Duration {
				mu.Lock()
				longest, over, steps = 0, 0, 0
				mu.Unlock()
				began := time.Now()
				if _, _, err := collect(r.submit(request(prompt(random, tokens), 1)), 1); err != nil {
					t.Error(err)
				}
				return time.Since(began)
			}
			var before time.Duration
			for range 3 {
				before = one(4000)
			}
			took := one(50000)
			mu.Lock()
			t.Logf("%v us: a prompt of 4,000 in %v; one of 50,000 in %v, %d steps, %d of them over 55 ms, longest %v", attention, before, took, steps, over, longest)
			if over > 4 || longest > 3*cfg.MaxStepTime/2 {
				t.Errorf("%d of %d steps take more than 55 ms, the longest %v", over, steps, longest)
			}
			mu.Unlock()
			for i := range 5 {
				if after := one(4000); after > before*5/4 {
					t.Errorf("prompt %d after the long one: %v, before it %v", i, after, before)
				}
			}
			if all := time.Since(start); d.idle > all/50 {
				t.Errorf("the device was idle for %v of %v", d.idle, all)
			}
			h.Cancel()
			_, _ = readAll(h) // cancelled
			r.close()
		})
	}
}
