package flight

import (
	"sync"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
)

// A stream may also move although its worker is not to be left: because that is short of blocks,
// and says so in the stream, or slower than its peers (balance.go). It goes where there is room for
// all that may come, or not at all, and stays there for a while.

const (
	reliefLeast  = 32                    // tokens to come; fewer are drawn as soon
	reliefMost   = 2                     // such moves out of a worker at a time
	reliefEvery  = 50 * time.Millisecond // between their beginnings
	reliefRest   = 10 * time.Second      // that a stream stays where it has moved to
	reliefStands = time.Second           // that a stream which stands still waits for its KV
)

// short is what decode says of its blocks in a comment, shortMark and one of these words.
type short string

const (
	shortSoon short = "soon" // the stream is the next to lose its KV
	shortNow  short = "now"  // it has lost it, and stands still
)

func shortOf(word []byte) short {
	switch s := short(word); s {
	case shortSoon, shortNow:
		return s
	}
	return "" // of a worker that knows more words
}

// leave is why a stream is to go on elsewhere, and where.
type leave struct {
	why string // the label of its metric; "": it stays
	to  *order // nil: anywhere
}

// optional reports whether the stream may as well stay.
func (l leave) optional() bool { return l.why != reasonDrain }

// reliefs counts optional moves by the worker that they leave.
type reliefs struct {
	mu sync.Mutex
	by map[workerKey]*relief
}

type relief struct {
	under int
	began time.Time // the latest
	moved Moved
}

// Moved is how many streams have moved away from a worker that was not to be left.
type Moved struct {
	Shortage int `json:"shortage,omitempty"`
	Balance  int `json:"balance,omitempty"`
}

func keyOf(i *fleet.Instance) workerKey { return workerKey{i.ID, i.Epoch} }

// begin takes a place for a move out of a worker, if there is one now; end gives it back.
func (r *reliefs) begin(k workerKey, now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	w := r.by[k]
	if w == nil {
		w = &relief{}
		r.by[k] = w
	}
	if w.under == reliefMost || now.Sub(w.began) < reliefEvery {
		return false
	}
	w.under++
	w.began = now
	return true
}

func (r *reliefs) end(k workerKey) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if w := r.by[k]; w != nil {
		w.under--
	}
}

// count counts a stream that has moved.
func (r *reliefs) count(k workerKey, why string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch w := r.by[k]; {
	case w == nil:
	case why == reasonBlocks:
		w.moved.Shortage++
	default:
		w.moved.Balance++
	}
}

// prune forgets workers that are gone.
func (r *reliefs) prune(s *fleet.Snapshot) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for k := range r.by {
		if m := s.Get(k.id); m == nil || m.Epoch != k.epoch {
			delete(r.by, k)
		}
	}
}

// Moved returns how many streams have moved away from a worker that was not to be left.
func (s *Service) Moved(m *fleet.Member) Moved {
	s.reliefs.mu.Lock()
	defer s.reliefs.mu.Unlock()
	if w := s.reliefs.by[keyOf(&m.Instance)]; w != nil {
		return w.moved
	}
	return Moved{}
}

// relief is why a stream that could stay is to go now; mostly it is not.
func (s *stream) relief(d *leg) leave {
	q := s.q
	if s.placed != nil { // it is about to
		return s.leave
	}
	l := leave{why: reasonBlocks}
	if q.seam.short == "" {
		if l = (leave{reasonBalance, q.s.balance.order(d.inst)}); l.to == nil {
			return leave{}
		}
	}
	if s.direct || q.trial > 0 || time.Since(s.rests) < reliefRest {
		q.seam.short = ""
		return leave{}
	}
	return l
}

// place takes a place for an optional move; nil if there is none now. The worker's word is not kept:
// without a place all is as it would be without it.
func (s *stream) place(d *leg) (end func()) {
	k := keyOf(d.inst)
	if to := s.leave.to; to != nil && !to.take() || !s.q.s.reliefs.begin(k, time.Now()) {
		s.q.seam.short = ""
		return nil
	}
	s.placed = func() { s.q.s.reliefs.end(k) }
	return func() {}
}

// settle ends an optional move, whatever came of it.
func (s *stream) settle() {
	if s.placed != nil {
		s.placed()
		s.placed = nil
	}
	s.q.seam.short = ""
}

// standBy has a stream that stands still wait until its KV has come, for a while.
func (s *stream) standBy() {
	timer := time.NewTimer(reliefStands)
	defer timer.Stop()
	select {
	case <-s.ahead.done:
	case <-timer.C:
		s.q.seam.short = shortSoon // perhaps it goes on where it is
	case <-s.q.ctx.Done():
	}
}

// room is how many tokens a stream may come to have, as far as is known.
func (q *request) room() int {
	out := q.output()
	if q.seam.most == 0 {
		out = max(out, 2*q.seam.longest()*q.top.N)
	}
	return q.top.PromptTokens() + out
}
