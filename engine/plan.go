package engine

import "slices"

// plan fills the batch of the next step: with what the last step was too large for, or else from
// all sequences. It reports whether there is anything to do.
func (e *Engine) plan() bool {
	e.retract()
	cut := e.cut
	e.cut = nil
	return len(cut) > 0 && e.fill(cut) || e.fill(e.running)
}

// fill plans a step of some of the running sequences, oldest first: each decoding one gets its
// token, and the rest of the token budget goes to prefill chunks. Where nothing decodes the budget
// is larger, for the oldest prompt.
func (e *Engine) fill(from []*sequence) bool {
	e.batch = e.batch[:0]
	var prefills []*sequence
	// grow may preempt, which changes e.running, but only sequences that are
	// younger or paused: what the walk has picked stays.
	e.walk = append(e.walk[:0], from...)
	for _, q := range e.walk {
		if len(e.batch)+len(prefills) == e.cfg.MaxRunning {
			break
		}
		e.look(q)
		switch {
		case !q.running || q.paused() || q.sitsOut() || q.draw > 0 && !e.foreseen(q):
		default:
			ok, err := e.grow(q)
			switch {
			case err != nil:
				e.finish(q.h, err)
			case !ok:
			case q.missing() > 1 || q.arriving != nil:
				prefills = append(prefills, q)
			default:
				q.chunk = 1
				e.batch = append(e.batch, q)
			}
		}
	}
	// A failed copy has ended a request; none of it may be stepped.
	e.batch = keepRunning(e.batch)
	prefills = keepRunning(prefills)
	l := limits{total: e.cfg.StepTokens, target: e.cfg.MaxStepTime, drain: e.cfg.QueueTime, decodes: len(e.batch)}
	alone := e.cfg.PrefillTokens >= l.total && !e.decoding()
	if alone { // only who comes meanwhile waits
		l.total, l.target, l.drain = e.cfg.PrefillTokens, aloneTime*l.target, 0
	}
	for _, q := range prefills {
		l.queued += q.missing()
	}
	if len(prefills) > 0 {
		l.at = prefills[0].next()
	}
	budget, room := e.pace.budget(l)
	if e.cfg.MaxStepTime > 0 && !e.pace.measured() && e.prefilling() {
		budget = 0 // the step under way will show how fast prefill is
	}
	shared := sharedTokens
	if alone {
		room = l.total - l.decodes
	}
	held := 0 // of the budget, for short prompts behind long ones
	for i, q := range prefills {
		short := shortOnes(prefills[i+1:], q, max(min(budget, shared)/2, min(budget, held)))
		if alone && (i > 0 || short > 0) {
			budget = min(budget, shared)
		}
		if budget <= 0 {
			break
		}
		n := e.chunk(q, budget-short)
		last := i == len(prefills)-1 || alone && i == 0
		if all := q.missing(); last && all-n <= n/smallRest && all <= room {
			n = all
		}
		held = short
		if n <= 0 || i > 0 && n < min(leastChunk, q.missing()) || e.holdsUp(q, n) { // no crumbs for those behind
			continue
		}
		q.chunk = n
		budget -= q.chunk
		room -= q.chunk
		shared -= q.chunk
		e.batch = append(e.batch, q)
	}
	return len(e.batch) > 0
}

const (
	// aloneTime is how many times MaxStepTime a step may take in which nothing decodes: only
	// requests that come meanwhile wait for it.
	aloneTime = 4
	// sharedTokens is the size beyond which a step gets faster only for one long prompt, by its
	// attention. Other prompts get their first token sooner in smaller steps.
	sharedTokens = 2048
	// smallRest: the last prompt's last tokens go with its chunk, beyond its budget, if they are
	// at most the chunk over smallRest. A small step of their own would take longer.
	smallRest = 8
)

// shortOnes returns how many tokens, of at most so many, finish prompts younger than q, which
// needs more than these itself: they go with it, so that no short prompt waits for a long one.
func shortOnes(younger []*sequence, q *sequence, most int) (tokens int) {
	if q.missing() <= 2*most {
		return 0
	}
	for _, y := range younger {
		if n := y.missing(); tokens+n <= most {
			tokens += n
		}
	}
	return tokens
}

// decoding reports whether some sequence gets a token from its next step.
func (e *Engine) decoding() bool {
	for _, q := range e.running {
		if q.missing() <= 1 && !q.h.req.PrefillOnly && !q.paused() {
			return true
		}
	}
	return false
}

// prefilling reports whether a step under way carries prefill.
func (e *Engine) prefilling() bool {
	for _, f := range e.flights {
		for _, m := range f.members {
			if m.chunk > 1 {
				return true
			}
		}
	}
	return false
}

// chunk is how many tokens, at most budget, q computes next. An inner chunk ends with a block
// where possible, so that a push finds whole blocks.
func (e *Engine) chunk(q *sequence, budget int) int {
	n := min(q.missing(), budget)
	if end := q.next() + n; n < q.missing() && n > e.blockToks {
		n -= end % e.blockToks
	}
	return n
}

// foreseen reports whether a sequence whose next token is being drawn can be stepped without
// knowing the token. It must not be certain to be the last one.
func (e *Engine) foreseen(q *sequence) bool {
	r := q.h.req
	return q.h.prompted && r.Repetition == 1 && r.Presence == 0 && r.Frequency == 0 && !e.full(r, len(q.output())+1)
}

func keepRunning(list []*sequence) []*sequence {
	return slices.DeleteFunc(list, func(q *sequence) bool { return !q.running })
}
