package engine_test

import (
	"slices"
	"testing"
	"testing/synctest"

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
