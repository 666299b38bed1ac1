package flight

import (
	"errors"
	"io"
	"math/rand/v2"
	"time"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/router/h1"
	"github.com/xpyd/xpyd/router/pick"
)

// stream relays decode's events to the client on the goroutine of the client's connection:
// a client that does not read stops the reading from decode, so nothing piles up in
// between.
type stream struct {
	q *request
	*answer
	pace  *pacer
	pulse pulse

	ahead   *ahead    // KV on its way to the next decode; mostly nil
	direct  bool      // it moves without
	tries   int       // moves that failed since the answer began
	moveDue time.Time // for the next try
	leave   leave     // why it is to move; of the latest look
	placed  func()    // gives back its place among optional moves; nil: it has none
	rests   time.Time // since its latest optional move
	done    bool      // nothing more is to be read
	failed  string
}

// next returns the next bytes for the client, io.EOF after the last. A stream that broke
// is taken over by another pair, or ends with an error event.
func (s *stream) next() ([]byte, error) {
	if run := s.first; run != nil {
		s.first = nil
		return s.counted(run), nil
	}
	if s.done {
		return nil, io.EOF
	}
	for end := s.leaves(); end != nil; end = s.leaves() {
		if run := s.move(end); run != nil {
			return run, nil
		}
		if s.q.seam.short != shortNow { // else nothing may come that wakes it
			break
		}
	}
	run, err := s.await()
	if err == nil {
		return s.counted(run), nil
	}
	if err == io.EOF {
		if s.forwarded || s.events.ended() {
			s.done = true
			s.events.body.Finish()
			return nil, io.EOF
		}
		err = errors.New("the stream ended early")
	}
	if s.q.seam != nil && s.q.seam.fault != "" {
		err = s.q.seam.fault
	}
	s.events.body.Abort()
	if !s.events.raw && s.events.ended() { // only the body's own end is missing
		s.done = true
		return nil, io.EOF
	}
	e, f := s.q.streamError(err)
	if f != nil && s.q.seam != nil {
		s.stop()
		var run []byte
		if run, e = s.takeOver(f, e); e == nil {
			return run, nil
		}
	}
	s.done = true
	s.failed = e.Message
	if e.Status == statusClientGone {
		return nil, errClientGone
	}
	if s.events.raw { // it cannot be said, so the body is cut
		s.status = e.Status
		return nil, errCut
	}
	return openai.AppendErrorEvent(nil, e), nil
}

// await returns the next run of decode's events. Meanwhile its silence matters, if another pair
// could go on.
func (s *stream) await() ([]byte, error) {
	if !s.q.seam.movable() {
		return s.pace.next(s.events)
	}
	d := s.q.attempts[len(s.q.attempts)-1].d
	d.waits.Add(1)
	defer d.waits.Add(1)
	return s.pace.next(s.events)
}

// counted merges the prompt's usage into a run and notes what the run reports.
func (s *stream) counted(run []byte) []byte {
	if s.q.seam != nil {
		if run, s.events.n = s.q.seam.strip(run, s.events.n); s.q.seam.re != nil {
			s.reread()
		}
		if len(run) == 0 {
			return run
		}
	}
	if s.merge != nil && openai.HasUsage(run) {
		if u, ok := s.merge(); ok {
			u = s.q.seam.firstPrompt(u)
			run = openai.MergeUsageEvents(run, u)
		}
	}
	if s.events.raw {
		s.q.usage.skimmed(run)
		return run
	}
	n := s.events.tokens()
	s.q.usage.tally(run, n)
	if s.q.trial > 0 {
		s.q.proceeds(n)
	}
	if !s.forwarded {
		at := time.Since(s.q.start)
		s.q.tally.beat(s.pulse.first == 0, at-s.pulse.last, n, s.q.top.N)
		s.pulse.beat(at, n, s.q.top.N)
	}
	return run
}

// Stream implements h1.Streamer: it writes the answer to its end and ends the request.
func (s *stream) Stream(c *h1.Conn) error { return s.relay(c) }

// sink is what a stream is relayed to; see h1.Conn.Send.
type sink interface {
	Send(run []byte, last bool) error
}

func (s *stream) relay(c sink) error {
	var err error
	for err == nil {
		var run []byte
		if run, err = s.next(); err == nil {
			err = s.write(c, run, s.last())
		}
	}
	if err == io.EOF {
		err = s.write(c, nil, true)
	}
	s.end(err)
	return err
}

func (s *stream) write(c sink, run []byte, last bool) error {
	if s.q.guise != nil {
		lent := s.q.s.lendGuise()
		defer s.q.s.guises.Put(lent)
		*lent, last = s.disguised((*lent)[:0], run, last)
		run = *lent
	}
	err := c.Send(run, last)
	if err == nil {
		s.q.bytes += int64(len(run))
		return nil
	}
	s.failed = errClientGone.Error()
	if h1.TimedOut(err) {
		s.failed = errStalled.Error()
	}
	return err
}

// last reports whether nothing follows the run that is being written, as far as is known
// without waiting.
func (s *stream) last() bool {
	return s.done || len(s.events.buf) == s.events.from && (s.forwarded || s.events.ended()) && s.events.body.Over()
}

var errCut = errors.New("the answer broke")

func (s *stream) end(err error) {
	s.stop()
	s.events.from = len(s.events.buf)
	s.events.used()
	s.events.body.Abort() // does nothing after Finish
	s.pace.tell()
	status := s.status
	if err != nil && err != errCut { //nolint:errorlint // our own, never wrapped
		status = statusClientGone
		if s.failed == "" {
			s.failed = errClientGone.Error()
		}
	}
	s.q.pulse, s.q.usage.framed = &s.pulse, s.q.seam.tokens()
	s.q.finish(status, s.failed)
}

// streamError is what the client is told of a stream that broke, and the failure of its
// attempt if another pair may do better, else nil.
func (q *request) streamError(err error) (*openai.Error, *failure) {
	if q.ctx.Err() != nil {
		return contextError(&q.ctx), nil
	}
	a := q.attempts[len(q.attempts)-1]
	if large, ok := errors.AsType[*h1.LargeError](err); ok {
		return tooLarge(large, &q.top), nil
	}
	f := &failure{by: a.d, outcome: ticket.Dead, reason: reasonTransport, exclude: []string{a.d.inst.ID}, err: err}
	switch cause := a.d.Cause(); {
	case errors.Is(cause, errSilent):
		f.reason, f.err = reasonSilent, cause
		a.fault(a.d, pick.Broken)
	case cause != nil:
		f.reason, f.err = reasonDead, cause
	case q.seam != nil && q.seam.re != nil && q.seam.re.drew:
		f.reason = reasonError
	default:
		a.brokeOff(err)
		if h1.TimedOut(err) {
			f.outcome, f.reason = ticket.Late, reasonTimeout
		} else if _, ok := errors.AsType[fault](err); ok {
			f.reason = reasonError
		}
	}
	return openai.Upstream("%s worker %s: %v", a.d.role, a.d.inst.ID, f.err), f
}

// pacer measures how long a decode worker makes a stream wait for each run of events, to
// eject slow workers. A slow client does not count: what arrived meanwhile costs no wait. A
// nil pacer measures nothing.
type pacer struct {
	choice *pick.Choice
	waited time.Duration
	runs   int
}

const (
	pacedOne  = 8 // one stream of so many is measured, as each run takes two looks at the clock
	pacedRuns = 4 // fewer tell nothing
)

// pacer returns a pacer for some streams, if workers are compared by time.
func (q *request) pacer(ans *answer) *pacer {
	if ans.forwarded || !q.s.Paced || rand.IntN(pacedOne) != 0 {
		return nil
	}
	return &pacer{choice: q.attempts[len(q.attempts)-1].choice}
}

func (p *pacer) next(e *events) ([]byte, error) {
	if p == nil {
		return e.next()
	}
	start := time.Now()
	run, err := e.next()
	if err == nil {
		p.waited += time.Since(start)
		p.runs++
	}
	return run, err
}

// tell reports what was measured, at the stream's end.
func (p *pacer) tell() {
	if p != nil && p.runs >= pacedRuns {
		p.choice.Paced(p.waited / time.Duration(p.runs))
	}
}
