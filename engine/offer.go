package engine

import "time"

// Offer says that blocks are short here, and that a request would better go on at another worker
// that has room for it. Nothing depends on whether it does.
type Offer int8

// Offers. A preempted request's rows stay in the index until others need the blocks, from the end.
const (
	OfferNone Offer = iota
	OfferSoon       // it runs on, and is the next to lose its blocks
	OfferNow        // it has lost them, and stands still until others end
)

const (
	// offerAhead is for how long blocks should suffice, or the youngest request is offered: what
	// it takes to go elsewhere. But no more than 1/offerShare of the pool is kept free for that.
	offerAhead = time.Second
	offerShare = 16
	offerEvery = 100 * time.Millisecond
	// offerWithin is how long the blocks of an offered request count as free: who takes it has
	// taken it by then.
	offerWithin = 2 * time.Second
	aheadSteps  = 64 // before it is known how long a step takes
)

// shortage is whether blocks are short.
type shortage struct {
	n       uint64 // shortages so far, the present one included
	on      bool
	offered time.Time // the latest
}

func (s *shortage) begin() {
	if !s.on {
		s.on = true
		s.n++
	}
}

// offered is what a request was offered.
type offered struct {
	soon, now uint64 // in which shortage it was last; 0: in none
	at        time.Time
}

// foresee offers the youngest request before blocks run out, as far as they will by what runs. Of
// one shortage each is offered once.
func (e *Engine) foresee() {
	s := e.cache.Stats()
	if most := max(s.Blocks/offerShare, len(e.running)); !e.shortage.on && s.Available() >= most {
		return // mostly
	}
	free, want := s.Available(), e.blocksAhead(s.Blocks)
	switch {
	case free < want:
		e.shortage.begin()
	case free >= 2*want:
		e.shortage.on = false
	}
	now := e.now()
	if !e.shortage.on || free >= want || now.Sub(e.shortage.offered) < offerEvery {
		return
	}
	var youngest *sequence
	for _, q := range e.running {
		switch h := q.h; {
		case h.offered.soon == e.shortage.n:
			if now.Sub(h.offered.at) < offerWithin {
				free += len(q.table)
			}
		case q.offerable() && q.left() >= e.blockToks:
			youngest = q
		}
	}
	if youngest == nil || free >= want || youngest.h == e.running[0].h {
		return
	}
	e.shortage.offered = now
	youngest.h.offered.soon, youngest.h.offered.at = e.shortage.n, now
	youngest.h.offer(youngest.choice, OfferSoon)
}

// blocksAhead is how many blocks running sequences need for offerAhead, within reason.
func (e *Engine) blocksAhead(pool int) (blocks int) {
	steps := aheadSteps
	if e.pace.decodes > 0 {
		steps = int(min(offerAhead/e.pace.decodes, time.Duration(e.maxLen)))
	}
	for _, q := range e.running {
		if q.h.prompted && !q.paused() {
			blocks += e.cache.BlocksFor(min(steps, q.left()))
		}
	}
	return min(blocks, max(pool/offerShare, len(e.running)))
}

// left is how many tokens a sequence is yet to draw at most.
func (q *sequence) left() int {
	n := q.h.e.maxLen - len(q.tokens)
	if most := q.h.req.MaxTokens; most > 0 {
		n = min(n, most-len(q.output()))
	}
	return n
}

// offerable reports whether somebody could go on with the request that a sequence is of.
func (q *sequence) offerable() bool { return q.h.req.Offers && q.h.prompted && !q.paused() }

// offerLost offers the request of a sequence that was preempted for others, if none of it runs.
func (e *Engine) offerLost(q *sequence) {
	for _, other := range q.h.seqs {
		if other.running {
			return
		}
	}
	e.shortage.begin()
	if o := &q.h.offered; q.offerable() && o.now != e.shortage.n {
		o.now = e.shortage.n
		q.h.offer(q.choice, OfferNow)
	}
}

// offer tells the reader, behind the events that there are. It is no token, and does not count as
// unread.
func (h *Handle) offer(choice int, o Offer) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if n := len(h.events); h.dropped[choice] || n > 0 && h.events[n-1].Offer != OfferNone {
		return
	}
	h.events = append(h.events, Event{Choice: choice, Offer: o})
	poke(h.ready)
}
