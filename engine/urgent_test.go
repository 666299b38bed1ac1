package engine_test

import (
	"slices"
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

// TestStreamsThatStandStill: streams that other workers have begun go before prompts that wait, and
// several of them into one step, though the streams here leave little room in it.
func TestStreamsThatStandStill(t *testing.T) {
	if pipelined {
		return // device is a Launcher: the first pass was the same
	}
	for _, c := range []struct{ token, began, step time.Duration }{
		{time.Millisecond, 400 * time.Millisecond, 110 * time.Millisecond},      // those that decode take 40 ms
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
			tokens := 0
			for _, q := range s.Seqs {
				tokens += len(q.Tokens)
			}
			took := time.Duration(tokens) * token
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
