package engine_test

import (
	"errors"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/enginetest"
	"github.com/xpyd/xpyd/kernels"
)

// TestSpoiltOutput: a request for which the model computes no number fails with the
// model's name; requests that share its steps get the tokens that they get alone, and the
// log has one line.
func TestSpoiltOutput(t *testing.T) {
	const mark = 40 // first token of the prompts whose output is spoilt
	spoilt := func(length int, edit func(*engine.Request)) *engine.Request {
		p := make([]int32, length)
		p[0] = mark
		req := request(p, 12)
		req.IgnoreEOS = true
		if edit != nil {
			edit(req)
		}
		return req
	}
	lengths := map[int]bool{} // positions of marked prompts without a token, or a number
	fake := enginetest.New(enginetest.Config{Blocks: 512})
	first := map[int32]bool{} // blocks that marked prompts begin with
	fake.Spoil = func(q *kernels.Seq, r *kernels.Result) {
		if q.Pos == 0 {
			first[q.Blocks[0]] = q.Tokens[0] == mark
		}
		if !first[q.Blocks[0]] {
			return
		}
		for i := range r.Prompt {
			if q.Targets[i] >= 0 && lengths[q.Pos+i+1] {
				r.Prompt[i].Self.Logprob = float32(math.NaN())
			}
		}
		for i := range r.Samples {
			if lengths[q.Pos+len(q.Tokens)] {
				r.Samples[i] = kernels.Sampled{Token: kernels.NoToken}
			}
		}
	}
	lengths[33], lengths[45], lengths[70] = true, true, true
	cfg := config()
	cfg.Model = "broken"
	r := newRigOn(t, cfg, fake)

	var wg sync.WaitGroup
	for i := range 6 {
		req := request([]int32{int32(i), 5, 9, 2}, 24)
		req.IgnoreEOS, req.Seed, req.Temperature = true, uint64(i), 0.8
		want := alone(t, 512, req)
		wg.Go(func() {
			if got := r.generate(req); !slices.Equal(got[0].tokens, want[0].tokens) {
				t.Errorf("a bystander got %v, want %v", got[0].tokens, want[0].tokens)
			}
		})
	}
	f := func(what string, req *engine.Request, at, before int) {
		h := r.submit(req)
		wg.Go(func() {
			out, _, err := collect(h, max(req.N, 1))
			var bad *engine.OutputError
			if !errors.As(err, &bad) || bad.Model != "broken" || bad.Position != at || !strings.Contains(err.Error(), `"broken"`) {
				t.Errorf("%s: %v, want one at %d", what, err, at)
			}
			if n := len(out[0].tokens); n != before || slices.Contains(out[0].tokens, kernels.NoToken) {
				t.Errorf("%s: %d tokens before, want %d", what, n, before)
			}
			if req.PrefillOnly {
				h.Release()
			}
			r.done(h)
		})
	}
	f("the first token", spoilt(33, nil), 33, 0)
	f("a later token", spoilt(40, nil), 45, 5)
	f("of several choices", spoilt(33, func(req *engine.Request) { req.N = 3 }), 33, 0)
	f("prefill only", spoilt(33, func(req *engine.Request) { req.PrefillOnly = true }), 33, 0)
	f("a log probability of the prompt", spoilt(64, func(req *engine.Request) { req.PromptLogprobs = 0 }), 33, 0)
	wg.Wait()
	r.close()
	if n, err := testutil.GatherAndCount(r.reg, "xpyd_engine_invalid_outputs_total"); err != nil || n != 1 {
		t.Error(n, err)
	}
	if err := testutil.GatherAndCompare(r.reg, strings.NewReader(`
# HELP xpyd_engine_invalid_outputs_total Requests that failed because the model computed no number for them: look at its weights, its dtype and the device.
# TYPE xpyd_engine_invalid_outputs_total counter
xpyd_engine_invalid_outputs_total 5
`), "xpyd_engine_invalid_outputs_total"); err != nil {
		t.Error(err)
	}
	if n := strings.Count(r.log.String(), "is not a number"); n != 1 || !strings.Contains(r.log.String(), "model=broken") {
		t.Errorf("%d lines of log: %s", n, r.log.String())
	}
	if err := r.Health(); err != nil {
		t.Errorf("the engine is not well: %v", err)
	}
}
