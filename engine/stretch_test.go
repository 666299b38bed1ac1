package engine_test

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/enginetest"
	"github.com/xpyd/xpyd/kernels"
)

// TestStretch: a step beside a stream takes up to a quarter more than MaxStepTime, which has room
// for 2,500 tokens here, if that spares a prompt a step, and up to twice as long if others wait
// behind one that has waited for long.
func TestStretch(t *testing.T) {
	if pipelined {
		return // device is a Launcher: the first pass was the same
	}
	for _, c := range []struct {
		prompts, tokens, steps int
		longest                time.Duration
	}{
		{1, 2400, 1, 48 * time.Millisecond},
		{1, 2900, 1, 58 * time.Millisecond},
		{1, 3300, 2, 49 * time.Millisecond}, // too much for one
		{1, 4900, 2, 52 * time.Millisecond},
		{1, 7900, 3, 55 * time.Millisecond},
		{1, 16000, 6, 56 * time.Millisecond},
		{1, 50000, 20, 54 * time.Millisecond},
		{2, 2400, 2, 50 * time.Millisecond},
		{12, 8000, 0, 100 * time.Millisecond},
	} {
		synctest.Test(t, func(t *testing.T) { // ends the test where it fails
			cfg := config()
			cfg.StepTokens, cfg.PrefillTokens, cfg.MaxRunning, cfg.QueueTime = 8192, 8192, 256, 0
			var mu sync.Mutex // the engine's loop counts
			var longest time.Duration
			steps := 0
			d := newDevice(enginetest.Config{Layers: 1, Blocks: 20000, BlockTokens: 16, MaxPositions: 60000}, func(s *kernels.Step) time.Duration {
				took := gpuTime(s)
				for _, q := range s.Seqs {
					if len(q.Tokens) > 1 {
						mu.Lock()
						steps++
						longest = max(longest, took)
						mu.Unlock()
						break
					}
				}
				return took
			})
			r := newRigOn(t, cfg, d)
			stream := request(prompt(rng(), 16), 100000)
			stream.IgnoreEOS = true
			h := r.submit(stream)
			random := rng()
			run := func(prompts, tokens int) {
				var all []*engine.Handle
				for range prompts {
					all = append(all, r.submit(request(prompt(random, tokens), 1)))
				}
				for _, h := range all {
					if _, err := readAll(h); err != nil {
						t.Error(err)
					}
				}
			}
			for range 4 { // the pacer learns
				run(1, 4000)
			}
			mu.Lock()
			steps, longest = 0, 0
			mu.Unlock()
			run(c.prompts, c.tokens)
			mu.Lock()
			if c.steps > 0 && steps != c.steps || longest > c.longest+c.longest/20 || longest < c.longest*4/5 {
				t.Errorf("%d of %d tokens: %d steps, the longest %v; want %d, about %v", c.prompts, c.tokens, steps, longest, c.steps, c.longest)
			}
			mu.Unlock()
			h.Cancel()
			r.close()
		})
	}
}
