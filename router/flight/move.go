package flight

import (
	"errors"
	"fmt"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/router/dialect"
)

// A move is a takeover of a stream whose decode is well, but is to be left, or could do with less
// (relief.go). The next decode brings
// its KV first (ahead.go). The old leg stays open, unread, until the next pair's first event is
// here; if there is none, the old leg is read on as if nothing had been.

const (
	moveTries  = 3                      // of a stream that fail, then it stays
	moveAgain  = 250 * time.Millisecond // between tries, doubling
	moveWithin = 5 * time.Second        // for the next pair's first event: the client waits
	moveLeast  = 8                      // tokens to come; with fewer a stream stays
)

var errSlowMove = fmt.Errorf("no event within %v", moveWithin)

// leaves returns the end of a move, if the stream is to go on elsewhere and now is the time: there
// are a few places for those that have others bring or compute something.
func (s *stream) leaves() (end func()) {
	if s.q.seam == nil || s.q.seam.re != nil {
		return nil
	}
	d := s.q.attempts[len(s.q.attempts)-1].d
	order := s.q.s.Members.Leaving(d.inst)
	why, least := leave{why: reasonDrain}, moveLeast
	if order == nil {
		if why, least = s.relief(d), reliefLeast; why.why == "" { // mostly
			s.stop()
			return nil
		}
	}
	// The next pair's first event says that one prompt is there, not that all are.
	if s.tries >= moveTries || s.q.top.Prompts > 1 || !s.q.seam.whole() || !s.q.seam.far(least) {
		s.stop()
		s.q.seam.short = ""
		if order != nil {
			d.movable.Store(false)
		}
		return nil
	}
	s.leave = why
	if !s.ahead.over() && s.q.seam.short == shortNow {
		s.standBy()
	}
	switch {
	case !s.ahead.over() || time.Now().Before(s.moveDue):
		return nil
	case s.placed != nil, s.ahead != nil && s.ahead.kv.Prompt:
		return func() {}
	case order == nil:
		return s.place(d)
	case order.Begin():
		return order.End
	}
	return nil
}

// far reports whether some choice has so many tokens to come, as far as is known.
func (s *seam) far(least int) bool {
	for i := range s.choices {
		if c := &s.choices[i]; !c.done && (s.most == 0 || s.most-c.n >= least) {
			return true
		}
	}
	return false
}

// longest is how many tokens a choice has at most.
func (s *seam) longest() (n int) {
	for i := range s.choices {
		n = max(n, s.choices[i].n)
	}
	return n
}

// move has another pair go on with the stream, once it has brought its KV, and returns what the
// client gets next; nil while the stream stays where it is.
func (s *stream) move(end func()) []byte {
	q, began, why := s.q, time.Now(), s.leave
	old := q.attempts[len(q.attempts)-1]
	if q.remember() != nil { // it was read before
		s.tries = moveTries
		s.settle()
		end()
		return nil
	}
	given := s.ahead != nil && why.optional() // up, if that was in vain
	a := s.landed()
	if a == nil && !given {
		if a = s.nextPair(old); a != nil && s.bring(a, end) {
			q.moveLast(old)
			q.slim()
			q.setState(stateRelay)
			return nil
		}
	}
	defer end()
	defer s.settle()
	if a == nil {
		q.slim()
		if !why.optional() {
			old.d.movable.Store(false) // until there is a pair
		}
		s.moveDue = time.Now().Add(moveAgain)
		return nil
	}
	q.moveLast(a)
	count := func(outcome string) { q.s.metrics.takeovers.WithLabelValues(why.why, outcome).Inc() }
	ans, f := a.goOnWithin(moveWithin)
	if f != nil {
		a.fail(f)
		a.close()
		q.moveLast(old)
		q.slim()
		if q.ctx.Err() != nil {
			count(takeoverEnded)
			return nil
		}
		q.setState(stateRelay)
		count(takeoverFailed)
		s.moveDue = time.Now().Add(moveAgain << s.tries)
		s.direct = s.direct || a.brought || why.optional()
		if why.optional() {
			s.rests = time.Now()
		} else if s.tries++; f.outcome == ticket.Late || f.outcome == ticket.Refused { // it would be so again
			s.tries = moveTries
		}
		q.s.Log.Warn("a stream that was to move stays", "why", why.why, "request_id", q.id, "decode", old.d.inst.ID, "tried", a.d.inst.ID, "err", f.Error())
		return nil
	}
	old.d.moved(why.why)
	s.events.body.Abort()
	old.close()
	count(takeoverContinued)
	if why.optional() {
		s.rests = time.Now()
		q.s.reliefs.count(keyOf(old.d.inst), why.why)
	}
	kv := kvPrefill
	if a.brought {
		kv = kvBrought
	}
	q.s.metrics.moves.WithLabelValues(kv).Inc()
	return s.goesOn(ans, began)
}

// Where the KV of a stream's prompt came from: the label of the metric of moves.
const (
	kvBrought = "brought"
	kvPrefill = "prefill"
)

// nextPair is where the stream could go on; nil if there is none. What it lacks it may have from
// the old decode.
func (s *stream) nextPair(old *attempt) *attempt {
	q := s.q
	view := q.s.Members.View()
	req := q.pickRequest([]string{old.d.inst.ID}, nil, "")
	q.seam.by = old.d.inst
	req.Exclude, req.Avoid = q.unfit(view.Snapshot, req.Exclude, nil)
	req.Exclude = append(req.Exclude, old.d.inst.ID) // also where it would do for want of another
	if s.leave.optional() {
		req.Room = q.room()
	}
	if to := s.leave.to; to != nil {
		for i := range view.Snapshot.Members {
			if m := &view.Snapshot.Members[i]; q.s.Picker.Does(&m.Instance, fleet.Decode) && m.ID != to.to {
				req.Exclude = append(req.Exclude, m.ID)
			}
		}
	}
	choice, err := q.s.Picker.Pick(view, req)
	if err != nil {
		return nil
	}
	a := q.newAttempt(choice, view.Snapshot.Version)
	if m := view.Snapshot.Get(old.d.inst.ID); m != nil && m.Epoch == old.d.inst.Epoch && gives(m, a.d.inst) {
		a.peer = &dialect.Peer{Instance: &m.Instance, Tokens: mostTokens}
	}
	return a
}

// goOnWithin is goOn of a pair whose first event must come soon, and not be an error.
func (a *attempt) goOnWithin(d time.Duration) (*answer, *failure) {
	timer := time.AfterFunc(d, func() { a.end(errSlowMove) })
	ans, f := a.goOn()
	switch inTime := timer.Stop(); {
	case !inTime:
		f = &failure{by: a.d, outcome: ticket.Late, reason: reasonTimeout, err: errSlowMove}
	case f == nil && isError(skipComments(ans.first)):
		f = &failure{by: a.d, outcome: ticket.Refused, reason: reasonStatus, err: errors.New("it begins with an error")}
	}
	if f != nil && ans != nil && ans.events != nil {
		ans.events.body.Abort()
	}
	return ans, f
}

// ToMove is how many streams of a worker are to go on at another.
func (s *Service) ToMove(m *fleet.Member) (n int) {
	if s.Members.Leaving(&m.Instance) == nil {
		return 0
	}
	s.legs.mu.Lock()
	defer s.legs.mu.Unlock()
	for l := range s.legs.open {
		if l.movable.Load() && l.inst.ID == m.ID && l.inst.Epoch == m.Epoch {
			n++
		}
	}
	return n
}
