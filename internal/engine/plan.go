package engine

// plan fills the batch of the next step, oldest sequences first: each
// decoding one gets its token, what is left of the token budget goes to
// prefill chunks. It reports whether there is anything to do.
func (e *Engine) plan() bool {
	e.batch = e.batch[:0]
	var prefills []*sequence
	// grow may preempt, which changes e.running, but only sequences that are
	// younger or paused: what the walk has picked stays.
	e.step.walk = append(e.step.walk[:0], e.running...)
	for _, q := range e.step.walk {
		if len(e.batch)+len(prefills) == e.cfg.MaxRunning {
			break
		}
		switch {
		case !q.running || q.h.paused(q.choice):
		case q.missing() > 1:
			prefills = append(prefills, q)
		default:
			ok, err := e.grow(q)
			if err != nil {
				e.finish(q.h, err)
			} else if ok {
				q.chunk = 1
				e.batch = append(e.batch, q)
			}
		}
	}
	// A failed copy has ended a request; none of it may be stepped.
	e.batch = keepRunning(e.batch)
	budget := e.pace.budget(e.cfg.StepTokens, e.cfg.MaxStepTime, len(e.batch))
	for _, q := range keepRunning(prefills) {
		if budget == 0 {
			break
		}
		q.chunk = e.chunk(q, budget)
		budget -= q.chunk
		e.batch = append(e.batch, q)
	}
	return len(e.batch) > 0
}

// chunk is how many of at most budget tokens q computes next. An inner chunk
// ends with a block where possible, so that a push finds whole blocks.
func (e *Engine) chunk(q *sequence, budget int) int {
	n := min(q.missing(), budget)
	if end := q.computed + n; n < q.missing() && n > e.blockToks {
		n -= end % e.blockToks
	}
	return n
}

func keepRunning(list []*sequence) []*sequence {
	kept := list[:0]
	for _, q := range list {
		if q.running {
			kept = append(kept, q)
		}
	}
	return kept
}
