package flight

import (
	"errors"
	"fmt"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/router/dialect"
)

// A move is a takeover of a stream whose decode is well, but is to be left. The next decode brings
// its KV first (ahead.go). The old leg stays open, unread, until the next pair's first event is
// here; if there is none, the old leg is read on as if nothing had been.

const (
	moveTries  = 3                      // of a stream that fail, then it stays
	moveAgain  = 250 * time.Millisecond // between tries, doubling
	moveWithin = 5 * time.Second        // for the next pair's first event: the client waits
	moveLeast  = 8                      // tokens to come; with fewer a stream stays
)

var errSlowMove = fmt.Errorf("no event within %v", moveWithin)

// leaves returns the end of a move, if the stream's decode is to be left and now is the time: there
// are a few places for those that have others bring or compute something.
func (s *stream) leaves() (end func()) {
	if s.q.seam == nil || s.q.seam.re != nil {
		return nil
	}
	d := s.q.attempts[len(s.q.attempts)-1].d
	l := s.q.s.Members.Leaving(d.inst)
	if l == nil { // mostly
		s.stop()
		return nil
	}
	// The next pair's first event says that one prompt is there, not that all are.
	if s.tries >= moveTries || s.q.top.Prompts > 1 || !s.q.seam.whole() || !s.q.seam.far() {
		s.stop()
		d.movable.Store(false)
		return nil
	}
	switch {
	case !s.ahead.over() || time.Now().Before(s.moveDue):
		return nil
	case s.ahead != nil && s.ahead.kv.Prompt:
		return func() {}
	case l.Begin():
		return l.End
	}
	return nil
}

// far reports whether some choice has more than a few tokens to come, as far as is known.
func (s *seam) far() bool {
	for i := range s.choices {
		if c := &s.choices[i]; !c.done && (s.most == 0 || s.most-c.n >= moveLeast) {
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
	q, began := s.q, time.Now()
	old := q.attempts[len(q.attempts)-1]
	if q.remember() != nil { // it was read before
		s.tries = moveTries
		end()
		return nil
	}
	a := s.landed()
	if a == nil {
		if a = s.nextPair(old); a == nil {
			q.slim()
			old.d.movable.Store(false) // until there is a pair
			s.moveDue = time.Now().Add(moveAgain)
			end()
			return nil
		}
		if s.bring(a, end) {
			q.moveLast(old)
			q.slim()
			q.setState(stateRelay)
			return nil
		}
	}
	defer end()
	q.moveLast(a)
	count := func(outcome string) { q.s.metrics.takeovers.WithLabelValues(reasonDrain, outcome).Inc() }
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
		s.direct = s.direct || a.brought
		if s.tries++; f.outcome == ticket.Late || f.outcome == ticket.Refused { // it would be so again
			s.tries = moveTries
		}
		q.s.Log.Warn("a stream stays at a worker that is to be left", "request_id", q.id, "decode", old.d.inst.ID, "tried", a.d.inst.ID, "err", f.Error())
		return nil
	}
	old.d.setState(legMoved)
	s.events.body.Abort()
	old.close()
	count(takeoverContinued)
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
