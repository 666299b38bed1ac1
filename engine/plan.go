package engine

import (
	"cmp"
	"slices"
	"time"
)

// plan fills the batch of the next step: with what the last step was too large for, or else from
// all sequences. It reports whether there is anything to do.
func (e *Engine) plan() bool {
	e.retract()
	e.listsPrompt = slices.ContainsFunc(e.running, (*sequence).wantsPrompt)
	e.tpot, e.longest = e.strictest(), e.untilGap()
	cut := e.cut
	e.cut = nil
	return len(cut) > 0 && e.fill(cut) || e.fill(e.running)
}

// fill plans a step of some of the running sequences, oldest first: each decoding one gets its
// token, and the rest of the token budget goes to prefill chunks. Where nothing decodes the budget
// is larger, for the oldest prompt.
func (e *Engine) fill(from []*sequence) bool {
	prefills := e.turns.begin(e.byPromise(e.gather(from)))
	if len(prefills) == 0 {
		return len(e.batch) > 0
	}
	l := limits{total: e.cfg.StepTokens, target: e.target(), drain: e.cfg.QueueTime, decodes: len(e.batch)}
	takeovers := !e.turns.prompts && prefills[0].takesOver()
	idle := (takeovers || e.cfg.PrefillTokens >= l.total) && !e.decoding()
	alone, brief := idle && !takeovers, idle && takeovers
	switch { // only who comes meanwhile waits
	case alone:
		l.total, l.target, l.drain = e.cfg.PrefillTokens, aloneTime*l.target, 0
	case brief:
		l.total, l.drain = e.briefly(l.total), 0
	}
	for _, q := range prefills {
		l.queued += q.missing()
	}
	if !alone {
		l.patience, l.room = e.room(prefills)
		e.withinGap(&l)
	}
	l.at = prefills[0].next()
	budget, room := e.pace.budget(l)
	if back := e.turns.back(prefills); back > 0 && !brief {
		if n := e.catchUp(back, l.target); n > 0 && l.decodes > 0 && e.apart(back+l.decodes) {
			for _, q := range e.batch {
				q.chunk = 0
			}
			e.batch = e.batch[:0]
			prefills = slices.DeleteFunc(prefills, func(q *sequence) bool { return len(q.output()) == 0 })
			shortestFirst(prefills)
			budget, room = n, n
			if e.longest > 0 { // what decodes needs a step after this one
				e.longest = max(e.longest-e.pace.decodes, 1)
			}
		} else {
			room = max(room, e.pace.besides(e.most(l.target)))
			if e.longest > 0 {
				room = min(room, e.pace.within(l.total, l.at, l.longest))
			}
			budget = max(budget, min(back, room))
		}
	}
	if e.cfg.MaxStepTime > 0 && !e.pace.measured() && e.prefilling() {
		budget = 0 // the step under way will show how fast prefill is
	}
	if alone || brief {
		room = l.total - l.decodes
	}
	e.chunks(prefills, budget, room, alone)
	return len(e.batch) > 0
}

// gather puts what decodes into the batch, and returns what has more than a token to compute.
func (e *Engine) gather(from []*sequence) (prefills []*sequence) {
	e.batch = e.batch[:0]
	// grow may preempt, which changes e.running, but only sequences that are
	// younger or paused: what the walk has picked stays.
	e.walk = append(e.walk[:0], from...)
	for _, q := range e.walk {
		if len(e.batch)+len(prefills) == e.cfg.MaxRunning {
			break
		}
		e.look(q)
		switch {
		case !q.running || q.paused() || q.sitsOut() || q.missing() == 0 || q.draw > 0 && !e.foreseen(q):
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
	return keepRunning(prefills)
}

// chunks gives the prefills their parts of the budget, which may be stretched as far as there is room.
func (e *Engine) chunks(prefills []*sequence, budget, room int, alone bool) {
	shared := sharedTokens
	held := 0 // of the budget, for short prompts behind long ones
	for i, q := range prefills {
		short := shortOnes(prefills[i+1:], q, max(min(budget, shared)/2, min(budget, held)))
		if alone && (i > 0 || short > 0) {
			budget = min(budget, shared)
		}
		if budget <= 0 {
			break
		}
		if e.turns.over(q) {
			continue
		}
		n := e.chunk(q, e.turns.most(q, budget-short))
		if (i == 0 || i == len(prefills)-1) && (alone || e.tpot == 0) {
			n = e.stretch(q, n, room-short, !alone && i == 0 && len(prefills) > 1)
			budget = max(budget, n+short)
		}
		held = short
		if n <= 0 || i > 0 && n < min(leastChunk, q.missing()) || e.holdsUp(q, n) { // no crumbs for those behind
			continue
		}
		if n = e.cutToGap(q, n); n <= 0 {
			break
		}
		q.chunk = n
		e.turns.count(q, n)
		budget -= q.chunk
		room -= q.chunk
		shared -= q.chunk
		e.batch = append(e.batch, q)
	}
}

// most is how long streams that decode may wait for a token: twice what a step should take or, on a
// slow device, what one takes that only decodes.
func (e *Engine) most(target time.Duration) time.Duration {
	return mostStretch * max(target, e.pace.decodes)
}

// catchUp is how many of the tokens that streams which stand still have to compute go into a step
// of their own, if that is worth a step: those that decode sit it out, and wait for their next token
// no longer than beside these tokens.
func (e *Engine) catchUp(back int, target time.Duration) int {
	left := e.most(target)
	if !slices.ContainsFunc(e.flights, (*flight).decodes) {
		left -= e.now().Sub(e.decoded)
	}
	if e.longest > 0 {
		left = min(left, e.longest)
		if back = e.pace.fits(back, left-e.pace.decodes); back == 0 {
			return 0
		}
	}
	n := min(back, e.pace.besides(left))
	if n < min(back, tile/4) { // too little for what any step takes
		return 0
	}
	return n
}

// shortestFirst orders streams that stand still by what they lack: so most of them go on with the
// first step. One that lacks much has its turn in the steps between, which go by age.
func shortestFirst(streams []*sequence) {
	slices.SortStableFunc(streams, func(a, b *sequence) int { return cmp.Compare(a.missing(), b.missing()) })
}

// briefly is as turns have it, but that a GPU takes as long for any part of a tile.
func (e *Engine) briefly(most int) int {
	n := e.turns.briefly(most)
	if e.timed() {
		n = max(n, min(tile, most))
	}
	return n
}

// apart reports whether a step of so many tokens is longer than one without those that decode. A GPU
// takes as long for any part of a tile.
func (e *Engine) apart(tokens int) bool {
	return !e.timed() || tokens >= tile
}

const (
	// aloneTime is how many times MaxStepTime a step may take in which nothing decodes: only
	// requests that come meanwhile wait for it.
	aloneTime = 4
	// sharedTokens is the size beyond which a step gets faster only for one long prompt, by its
	// attention. Other prompts get their first token sooner in smaller steps.
	sharedTokens = 2048
	// leastStretch and mostStretch are how many times its budget a chunk may be: the latter where
	// others wait behind a prompt that has waited for patience times MaxStepTime.
	leastStretch, mostStretch, patience = 1.25, 2, 4
)

// stretch lengthens a chunk of n tokens, up to room, where that spares its prompt steps: a first
// token comes at the end of a step, and a small rest would wait for one of its own.
func (e *Engine) stretch(q *sequence, n, room int, queued bool) int {
	all := q.missing()
	if all <= n || n <= 0 {
		return n
	}
	steps, most := (all-1)/n, int(leastStretch*float64(n)) // one less than without
	if limit := patience * e.cfg.MaxStepTime; queued && limit > 0 {
		if f := float64(e.now().Sub(q.h.arrived)) / float64(limit); f > leastStretch {
			most = int(min(f, mostStretch) * float64(n))
			steps = (all + most - 1) / most
		}
	}
	even := (all + steps - 1) / steps
	if steps > 1 { // to the end of a block
		even += e.blockToks - 1
		even -= (q.next() + even) % e.blockToks
	}
	if even > min(most, room) {
		return n
	}
	return max(even, n)
}

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
// knowing the token. It must not be certain to be the last one. A draw that is bound must be able to
// wait for its mask, which takes a device that can, and no prompt whose log probabilities are asked for.
func (e *Engine) foreseen(q *sequence) bool {
	r := q.h.req
	if len(q.drafting.tokens) > 0 { // nobody knows how many it draws
		return false
	}
	if q.guide != nil && (e.holder == nil || e.listsPrompt) {
		return false
	}
	return (q.h.prompted || q.goesOn() || q.firstForeseen()) && !r.readsOutput() && !e.full(r, len(q.output())+1)
}

func keepRunning(list []*sequence) []*sequence {
	return slices.DeleteFunc(list, func(q *sequence) bool { return !q.running })
}
