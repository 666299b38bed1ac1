package engine_test

import (
	"context"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/enginetest"
	"github.com/xpyd/xpyd/kernels"
)

// TestUrgentGoesBeforeWhatWaits: a short urgent prompt behind a queue of long
// ones is in the next step, whole, and still gets its own tokens.
func TestUrgentGoesBeforeWhatWaits(t *testing.T) {
	var first []int // tokens of the first sequence, step by step
	cfg := config()
	cfg.StepTokens, cfg.MaxStepTime, cfg.MaxRunning = 32, 0, 4
	synctest.Test(t, func(t *testing.T) {
		gate := make(chan struct{})
		r := newRig(t, cfg, enginetest.Config{}, func(s *kernels.Step) error {
			<-gate
			for _, q := range s.Seqs {
				first = append(first, len(q.Tokens))
			}
			return nil
		})
		for range 3 {
			r.submit(request(prompt(rng(), 100), 1))
		}
		synctest.Wait() // the first long prompt is in its first step
		urgent := request(prompt(rng(), 3), 1)
		urgent.Urgent = true
		h := r.submit(urgent)
		close(gate)
		if _, _, err := collect(h, 1); err != nil {
			t.Error(err)
		}
		r.close()
	})
	if at := slices.Index(first, 3); at < 0 || at > 2 {
		t.Errorf("chunks %v: the urgent prompt of 3 tokens is not in the second step", first)
	}
}

// perToken is a device that takes so long for each token.
func perToken(d time.Duration) func(*kernels.Step) time.Duration {
	return func(s *kernels.Step) (took time.Duration) {
		for _, q := range s.Seqs {
			took += time.Duration(len(q.Tokens)) * d
		}
		return took
	}
}

// TestStreamsThatStandStill: streams that other workers have begun go before prompts that wait, and
// as many into one step, which those that decode sit out, as does not keep these waiting for long.
func TestStreamsThatStandStill(t *testing.T) {
	if pipelined {
		return // device is a Launcher: the first pass was the same
	}
	for _, c := range []struct{ token, began, step time.Duration }{
		{time.Millisecond, 230 * time.Millisecond, 110 * time.Millisecond},      // those that decode take 40 ms
		{4 * time.Millisecond, 1200 * time.Millisecond, 490 * time.Millisecond}, // 160 ms, longer than max_step_time: the step under way and two more
	} {
		t.Run(c.token.String(), func(t *testing.T) { standStill(t, c.token, c.began, c.step) })
	}
}

// standStill has streams go on beside others on a device that takes so long for a token: all within
// some time, in steps that are not longer than that.
func standStill(t *testing.T, token, within, step time.Duration) {
	synctest.Test(t, func(t *testing.T) {
		cfg := config()
		cfg.StepTokens = 512
		longest := time.Duration(0)
		d := newDevice(enginetest.Config{Blocks: 1024}, func(s *kernels.Step) time.Duration {
			took := perToken(token)(s)
			longest = max(longest, took)
			return took
		})
		r := newRigOn(t, cfg, d)
		var all []*engine.Handle
		for range 40 {
			q := request(prompt(rng(), 8), 400)
			q.IgnoreEOS = true
			all = append(all, r.submit(q))
		}
		time.Sleep(2000 * token) // they decode
		for range 8 {
			all = append(all, r.submit(request(prompt(rng(), 100), 1)))
		}
		longest = 0
		began := time.Now()
		for range 4 {
			q := request(prompt(rng(), 4), 400)
			q.IgnoreEOS, q.Given = true, []engine.Given{{Tokens: prompt(rng(), 18)}}
			for i := range q.Given[0].Tokens {
				q.Given[0].Tokens[i] = 9
			}
			all = append(all, r.submit(q))
		}
		for i, h := range all[48:] {
			if _, err := h.Next(t.Context()); err != nil {
				t.Error(err)
			}
			if took := time.Since(began); took > within || longest > step {
				t.Errorf("stream %d goes on after %v, the longest step took %v", i, took, longest)
			}
		}
		for _, h := range all {
			h.Cancel()
		}
		r.close()
	})
}

// TestShortestFirst: of streams that go on beside others the shortest come first, and one that lacks
// much is not passed for ever by those that keep coming.
func TestShortestFirst(t *testing.T) {
	if pipelined {
		return // device is a Launcher: the first pass was the same
	}
	synctest.Test(t, func(t *testing.T) {
		cfg := config()
		cfg.StepTokens, cfg.MaxRunning, cfg.MaxWaiting = 512, 256, 1024
		r := newRigOn(t, cfg, newDevice(enginetest.Config{Blocks: 4096}, perToken(time.Millisecond)))
		var all []*engine.Handle
		draw := rng()
		// stream submits one of so many given tokens, or none, and returns its handle.
		stream := func(given int) *engine.Handle {
			q := request(prompt(draw, 8), 400)
			q.IgnoreEOS = true
			if given > 0 {
				q.Given = []engine.Given{{Tokens: slices.Repeat([]int32{9}, given)}}
			}
			h := r.submit(q)
			all = append(all, h)
			return h
		}
		for range 40 {
			stream(0)
		}
		time.Sleep(2 * time.Second) // they decode
		for range 8 {               // a prompt's token has its price
			h := r.submit(request(prompt(draw, 100), 1))
			if _, _, err := collect(h, 1); err != nil {
				t.Error(err)
			}
		}
		var wait sync.WaitGroup
		// ends has when each of some streams went on.
		ends := func(streams ...*engine.Handle) []time.Duration {
			began, took := time.Now(), make([]time.Duration, len(streams))
			for i, h := range streams {
				wait.Go(func() {
					if _, err := h.Next(t.Context()); err != nil {
						t.Error(err)
					}
					took[i] = time.Since(began)
				})
			}
			wait.Wait()
			return took
		}
		took := ends(stream(190), stream(12), stream(12), stream(12))
		t.Log("streams of 190, 12, 12 and 12 tokens go on after", took)
		for _, short := range took[1:] {
			if short*2 > took[0] {
				t.Errorf("one of 12 tokens goes on after %v, one of 190 after %v", short, took[0])
			}
		}
		long := stream(190)
		stop := make(chan struct{})
		for c := range uint64(32) {
			wait.Go(func() { // one after another
				draw := rand.New(rand.NewPCG(c, 7))
				for {
					select {
					case <-stop:
						return
					default:
					}
					q := request(prompt(draw, 8), 400)
					q.IgnoreEOS, q.Given = true, []engine.Given{{Tokens: slices.Repeat([]int32{9}, 10)}}
					h := r.submit(q)
					if _, err := h.Next(t.Context()); err != nil {
						t.Error(err)
					}
					h.Cancel()
				}
			})
		}
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		if _, err := long.Next(ctx); err != nil {
			t.Errorf("one of 190 tokens, beside others of 10 that keep coming: %v", err)
		}
		close(stop)
		wait.Wait()
		for _, h := range all {
			h.Cancel()
		}
		r.close()
	})
}

// TestNewcomersBesideTakeovers: at a prefill worker a prompt that comes while takeovers are computed, and no other prompt waits,
// takes half as long again, at most: it waits for a short step.
func TestNewcomersBesideTakeovers(t *testing.T) {
	if pipelined {
		return // device is a Launcher: the first pass was the same
	}
	const tokens, token = 200, 100 * time.Microsecond
	// slowest returns the longest wait of prompts that come one at a time.
	slowest := func(takeovers int) (most, last time.Duration) {
		synctest.Test(t, func(t *testing.T) {
			cfg := config()
			cfg.StepTokens, cfg.MaxRunning, cfg.MaxWaiting = 512, 256, 1024
			r := newRigOn(t, cfg, newDevice(enginetest.Config{Blocks: 8192}, perToken(token)))
			draw := rng()
			wait := func() time.Duration {
				began := time.Now()
				q := request(prompt(draw, tokens), 1)
				q.PrefillOnly = true
				h := r.submit(q)
				if _, _, err := collect(h, 1); err != nil {
					t.Error(err)
				}
				h.Release()
				return time.Since(began)
			}
			for range 20 {
				wait()
			}
			began := time.Now()
			var all sync.WaitGroup
			var mu sync.Mutex
			for range takeovers {
				q := request(prompt(draw, tokens), 1)
				q.PrefillOnly, q.RowsOnly = true, true
				h := r.submit(q)
				all.Go(func() {
					if _, _, err := collect(h, 1); err != nil {
						t.Error(err)
					}
					h.Release()
					mu.Lock()
					defer mu.Unlock()
					last = max(last, time.Since(began))
				})
			}
			for range 20 {
				time.Sleep(43 * time.Millisecond)
				most = max(most, wait())
			}
			all.Wait()
			r.close()
		})
		return most, last
	}
	alone, _ := slowest(0)
	beside, last := slowest(100)
	t.Logf("prompts take %v, beside takeovers %v; these end after %v", alone, beside, last)
	if beside > alone*3/2 {
		t.Errorf("a prompt takes %v, and %v beside takeovers", alone, beside)
	}
	if least := 100 * tokens * token; last > least*2 { // the prompts have the rest of the time
		t.Errorf("takeovers of %v are over after %v", least, last)
	}
}

// TestTakeoverShare: takeovers keep prompts waiting by half as much again, at most, however many they
// are; where no prompt waits they have all of the device.
func TestTakeoverShare(t *testing.T) {
	if pipelined {
		return // device is a Launcher: the first pass was the same
	}
	const prompts, tokens = 16, 250
	// run returns how long each of so many prompts waited, always as many at once, and when the last
	// of some takeovers had its rows.
	run := func(total, takeovers int) (waits []time.Duration, last time.Duration) {
		synctest.Test(t, func(t *testing.T) {
			cfg := config()
			cfg.StepTokens, cfg.MaxRunning, cfg.MaxWaiting = 512, 256, 1024
			r := newRigOn(t, cfg, newDevice(enginetest.Config{Blocks: 8192}, gpuTime))
			var all sync.WaitGroup
			var mu sync.Mutex
			left := total
			for c := range min(prompts, total) {
				all.Go(func() {
					rng := rand.New(rand.NewPCG(uint64(c), 3))
					for {
						mu.Lock()
						left--
						more := left >= 0
						mu.Unlock()
						if !more {
							return
						}
						began := time.Now()
						if _, _, err := collect(r.submit(request(prompt(rng, tokens), 1)), 1); err != nil {
							t.Error(err)
						}
						mu.Lock()
						waits = append(waits, time.Since(began))
						mu.Unlock()
					}
				})
			}
			time.Sleep(time.Second) // all wait their turn
			began := time.Now()
			for c := range takeovers {
				q := request(prompt(rand.New(rand.NewPCG(uint64(c), 4)), tokens), 1)
				q.PrefillOnly, q.RowsOnly = true, true
				h := r.submit(q)
				all.Go(func() {
					if _, _, err := collect(h, 1); err != nil {
						t.Error(err)
					}
					h.Release()
					mu.Lock()
					defer mu.Unlock()
					last = max(last, time.Since(began))
				})
			}
			all.Wait()
			r.close()
		})
		slices.Sort(waits)
		return waits, last
	}
	p99 := func(d []time.Duration) time.Duration { return d[len(d)*99/100] }
	before, _ := run(3000, 0)
	beside, shared := run(3000, 300)
	_, alone := run(0, 300)
	t.Logf("the prompts' p99 is %v, beside takeovers %v; these take %v, alone %v", p99(before), p99(beside), shared, alone)
	if p99(beside) > p99(before)*3/2 {
		t.Errorf("a prompt waits %v, %v beside takeovers", p99(before), p99(beside))
	}
	if shared < 3*alone || shared > 4*alone {
		t.Errorf("takeovers take %v, %v alone: they have another share than 30 %%", shared, alone)
	}
}

// TestTakeoverAlone: a prompt that comes while takeovers have the device to themselves waits for the step
// under way, and is in the next, beside a small part of them.
func TestTakeoverAlone(t *testing.T) {
	if pipelined {
		return // device is a Launcher: the first pass was the same
	}
	synctest.Test(t, func(t *testing.T) {
		cfg := config()
		cfg.StepTokens, cfg.MaxRunning, cfg.MaxWaiting = 512, 256, 1024
		r := newRigOn(t, cfg, newDevice(enginetest.Config{Blocks: 8192}, perToken(200*time.Microsecond)))
		var takeovers []*engine.Handle
		for c := range 40 {
			q := request(prompt(rand.New(rand.NewPCG(uint64(c), 4)), 250), 1)
			q.PrefillOnly, q.RowsOnly = true, true
			takeovers = append(takeovers, r.submit(q))
		}
		time.Sleep(300 * time.Millisecond)
		for i := range 20 {
			began := time.Now()
			if _, _, err := collect(r.submit(request(prompt(rand.New(rand.NewPCG(uint64(i), 5)), 64), 1)), 1); err != nil {
				t.Error(err)
			}
			if took := time.Since(began); took > 75*time.Millisecond { // 50 of a takeover's, 13 of its own, 12 of takeovers beside it
				t.Errorf("prompt %d waited %v", i, took)
			}
			time.Sleep(50*time.Millisecond + 300*time.Microsecond)
		}
		for _, h := range takeovers {
			h.Release()
		}
		r.close()
	})
}
