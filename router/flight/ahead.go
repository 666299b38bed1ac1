package flight

import (
	"errors"
	"fmt"
	"time"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/router/dialect"
	"github.com/xpyd/xpyd/router/h1"
)

// Before a stream moves, the next decode brings the KV that the old one has, while the client is
// still served by that. So when it moves, neither prefill nor the next decode has to compute what
// is there.

const (
	aheadWithin = 5 * time.Second // to bring; the worker keeps to it, and is given aheadGrace more
	aheadGrace  = time.Second
	aheadLeast  = 64      // tokens, about; fewer are computed as soon
	maxAhead    = 4 << 10 // of the answer
	mostTokens  = 1 << 22 // that a peer may be said to have
)

var errLateAhead = fmt.Errorf("no answer within %v", aheadWithin+aheadGrace)

// ahead is KV on its way to where a stream is to go on.
type ahead struct {
	a    *attempt
	done chan struct{} // closed when the rest is known
	kv   dialect.Brought
	f    *failure
}

// over reports whether nothing is on its way; also of nil.
func (w *ahead) over() bool {
	if w == nil {
		return true
	}
	select {
	case <-w.done:
		return true
	default:
		return false
	}
}

// bring has a's decode bring the stream's KV. It returns false if there is nothing to be gained, or
// nobody to bring it. Else the stream is read on in the meantime, and end is called when that is over.
func (s *stream) bring(a *attempt, end func()) bool {
	q := s.q
	if s.direct || a.speak == nil || a.speak.Bring == nil || a.peer == nil || q.top.PromptTokens()+q.seam.longest() < aheadLeast {
		return false
	}
	x := &dialect.Exchange{RequestID: q.id, Path: q.asks, Body: q.seam.body, Top: &openai.Top{Messages: q.top.Messages}, Given: q.seam.given(),
		Left: min(aheadWithin, time.Until(q.end)), Trace: q.trace, Authorization: q.auth, CacheSalt: q.cacheSalt(), Peer: a.peer}
	w := &ahead{a: a, done: make(chan struct{})}
	a.registerLeg(a.d)
	a.d.setState(legBring)
	if !q.s.Spawn(func() {
		defer close(w.done)
		defer end()
		w.kv, w.f = a.bring(x)
		a.d.brought()
	}) {
		a.d.setState(legOpen)
		return false
	}
	s.ahead = w
	return true
}

// bring asks decode for it.
func (a *attempt) bring(x *dialect.Exchange) (kv dialect.Brought, f *failure) {
	timer := time.AfterFunc(aheadWithin+aheadGrace, func() { a.d.End(errLateAhead) })
	defer timer.Stop()
	h := a.q.s.Client.Header()
	defer a.q.s.Client.Recycle(h)
	b, err := a.q.s.send(a.d, h, a.speak.Bring(h, x), nil)
	if err != nil {
		return kv, a.broken(a.d, err)
	}
	said := dialect.Reply{Status: b.Header.StatusCode()}
	said.Body, err = b.All(maxAhead)
	if large := (*h1.LargeError)(nil); err != nil && !errors.As(err, &large) {
		return kv, a.broken(a.d, err)
	}
	b.Finish()
	if err == nil {
		kv, err = a.speak.Brought(said)
	}
	if err != nil {
		f = &failure{by: a.d, outcome: ticket.Refused, reason: reasonStatus, status: said.Status, err: fmt.Errorf("bring KV: %w", err)}
	}
	return kv, f
}

// landed returns the attempt whose decode has brought what there was; nil if that failed, and then
// the stream moves without.
func (s *stream) landed() *attempt {
	w := s.ahead
	s.ahead = nil
	if w == nil {
		return nil
	}
	if w.f != nil {
		s.q.s.Log.Warn("the KV of a stream that is to move was not brought", "request_id", s.q.id, "decode", w.a.d.inst.ID, "err", w.f.Error())
		s.direct = true
		w.a.fail(w.f)
		w.leave()
		return nil
	}
	s.q.s.metrics.brought.Add(float64(w.kv.Tokens))
	w.a.alone = w.a.alone || w.kv.Prompt
	w.a.brought = w.kv.Prompt
	return w.a
}

// stop gives up what is on its way, and a place for it.
func (s *stream) stop() {
	if s.placed != nil {
		s.placed()
		s.placed = nil
	}
	w := s.ahead
	if w == nil {
		return
	}
	s.ahead = nil
	w.a.d.End(errOver)
	<-w.done
	w.leave()
}

// leave ends an attempt whose legs are not asked.
func (w *ahead) leave() {
	w.a.p.setState(legUnused)
	if w.f == nil || errors.Is(w.f.err, errOver) {
		w.a.d.setState(legUnused)
	} else {
		w.a.d.fail()
	}
	close(w.a.pDone)
	w.a.close()
}
