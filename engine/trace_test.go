package engine_test

import (
	"slices"
	"testing"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/enginetest"
)

// The newest steps are remembered with what they carried, those with a piece of a
// prompt and those without apart, so that neither pushes the others out.
func TestSteps(t *testing.T) {
	cfg := config()
	cfg.StepTokens, cfg.MaxStepTime = 16, 0
	r, _ := overlapping(t, cfg, enginetest.Config{}, nil)
	req := request(prompt(rng(), 160), 0)
	req.PrefillOnly = true
	req.OnBlocks = func(int, []engine.Ready) {}
	h := r.submit(req)
	if _, _, err := collect(h, 1); err != nil {
		t.Fatal(err)
	}
	h.Release()
	steps := r.Steps()
	if len(steps) != 10 {
		t.Fatalf("%d steps are remembered, want the prompt's 10", len(steps))
	}
	for i, s := range steps {
		if s.Tokens != 16 || s.Seqs != 1 || !s.Layers || s.Took <= 0 || i > 0 && s.Began.Before(steps[i-1].Began) {
			t.Errorf("step %d: %+v", i, s)
		}
	}
	words := rng()
	for range 30 {
		r.generate(request(prompt(words, 160), 20))
	}
	steps = r.Steps()
	prompts := slices.IndexFunc(steps, func(s engine.StepRecord) bool { return s.Tokens == 1 })
	if prompts != 256 || len(steps) != 2*256 {
		t.Errorf("%d steps are remembered, %d of them with prompts; want 256 of either kind", len(steps), prompts)
	}
}
