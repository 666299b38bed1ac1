package engine

import (
	"fmt"
	"slices"
	"time"

	"github.com/xpyd/xpyd/kernels"
)

// OutputError ends a request for which the model computed no number: its weights or the device
// are broken, or its numbers overflow. Other requests in the step are not affected.
type OutputError struct {
	Model    string
	Position int // of the token that was to follow
}

func (e *OutputError) Error() string {
	return fmt.Sprintf("the output of model %q is not a number at position %d", e.Model, e.Position)
}

// complainEvery is how often such output is logged.
const complainEvery = time.Minute

// spoilt reports whether a result has no token where one was to be drawn, or a prompt
// token's log probability is NaN, or a hidden state not finite; at is its position, from the first of the step's.
func (e *Engine) spoilt(s *kernels.Seq, r *kernels.Result) (at int, yes bool) {
	for i := range r.Prompt {
		if p := r.Prompt[i].Self.Logprob; p != p {
			return s.Pos + i + 1, true
		}
	}
	for _, row := range r.Hidden {
		if slices.ContainsFunc(row, func(v float32) bool { return v-v != 0 }) {
			return s.Pos + len(s.Tokens), true
		}
	}
	for i := range r.Samples {
		if t := r.Samples[i].Token; t < 0 || int(t) >= e.vocab {
			if s.Verify {
				return s.Pos + i + 1, true
			}
			return s.Pos + len(s.Tokens), true
		} else if s.Verify && i+1 < len(s.Tokens) && t != s.Tokens[i+1] {
			break // what is drawn behind a wrong draft does not matter
		}
	}
	return 0, false
}

// fail ends the request of a sequence whose output is spoilt. What the step
// computed for it is not indexed.
func (e *Engine) fail(q *sequence, at int) {
	if !q.running {
		return
	}
	e.metrics.spoilt.Inc()
	e.unsaid++
	if now := e.now(); e.said.IsZero() || now.Sub(e.said) >= complainEvery {
		e.log.Error("the model's output is not a number", "model", e.cfg.Model, "request_id", q.h.req.ID, "position", at, "requests", e.unsaid)
		e.said, e.unsaid = now, 0
	}
	e.finish(q.h, &OutputError{e.cfg.Model, at})
}
