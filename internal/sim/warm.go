package sim

import (
	"context"
	"math"
)

// warmTokens is how many tokens of its answer a request before the load gets, at most: as many as tell how long a step without prompts takes.
const warmTokens = 8

// warm has each worker serve Config.Warm requests by itself, one after the other: as long as some of the load,
// evenly chosen, with other tokens. In lanes workers do so side by side, each by its own clock. The load begins when all have ended.
func (r *run) warm(ctx context.Context) error {
	n := min(r.cfg.Warm, len(r.load.Requests))
	if n < 1 {
		return nil
	}
	left := len(r.workers)
	for i, w := range r.workers {
		var serve func(nth int)
		serve = func(nth int) {
			if nth == n {
				if r.lanes == nil {
					left--
				}
				return
			}
			q := &r.load.Requests[nth*len(r.load.Requests)/n]
			prompt := Prompt{tokens: q.Prompt.Tokens(), nth: 1<<62 | uint64(i*n+nth)}
			req := ask(prompt.IDs())
			req.MaxTokens = min(q.Output, warmTokens)
			next := func() { w.clock.after(0, func() { serve(nth + 1) }) }
			if err := w.submit(req, &call{token: func() {}, lost: func() {}, done: func(bool) { next() }}); err != nil {
				next() // what it refuses the load will see, too
			}
		}
		serve(0)
	}
	if r.lanes != nil {
		r.lanes.run(math.MaxInt64)
		for _, w := range r.workers {
			r.clock.now = max(r.clock.now, w.clock.now)
		}
		for _, w := range r.workers {
			w.clock.now = r.clock.now
		}
	} else {
		for n := 0; left > 0 && r.clock.next(); n++ {
			if n%looks == 0 && ctx.Err() != nil {
				break
			}
		}
	}
	r.load.Until += r.clock.now
	return ctx.Err()
}
