package flight

import (
	"fmt"
	"slices"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// maxTakeovers is how many workers a stream may lose: one that loses another, on trial, is the reason.
const maxTakeovers = 2

// What became of a stream that broke: the label of its metric.
const (
	takeoverContinued = "continued"
	takeoverFailed    = "failed"
	takeoverUnkept    = "unkept"
	takeoverEnded     = "ended"
)

var takeoverOutcomes = []string{takeoverContinued, takeoverFailed, takeoverUnkept, takeoverEnded}

// seamComment is all that a client sees of a takeover.
const seamComment = ": xpyd seam\n\n"

// takeOver has another pair go on with a stream whose decode's leg ended with f. It returns
// what the client gets next, or broke with what prevents that.
func (s *stream) takeOver(f *failure, broke *openai.Error) ([]byte, *openai.Error) {
	q, began := s.q, time.Now()
	outcome := takeoverFailed
	defer func() { q.s.metrics.takeovers.WithLabelValues(f.reason, outcome).Inc() }()
	if !q.seam.whole() {
		outcome = takeoverUnkept
		broke.Message += "; no other pair could go on: what the client has was not kept" + q.seam.why()
		return nil, broke
	}
	q.brokenOff(f)
	q.seam.back()
	why := q.remember()
	switch {
	case why != nil:
	case q.seam.said(&q.top):
		s.done, outcome = true, takeoverContinued
		return openai.AppendDone(nil), nil
	case q.seam.re != nil && q.seam.open == 0:
		s.done, outcome = true, takeoverContinued
		return q.seam.rest(), nil
	case q.seam.breaks > maxTakeovers:
		why = openai.Upstream("%s", tooMany(q.seam.breaks))
	case !q.s.affords(f):
		why = openai.Upstream("the retry budget is used up")
	default:
		q.s.Log.Warn("a stream broke: another pair is to go on with it", "request_id", q.id, "decode", f.by.inst.ID, "err", f.err)
		var ans *answer
		q.resumes = true
		ans, why = q.dispatch(q.resume, f)
		q.resumes = false
		if why == nil {
			outcome = takeoverContinued
			return s.goesOn(ans, began), nil
		}
	}
	if q.ctx.Err() != nil {
		outcome = takeoverEnded
		return nil, contextError(&q.ctx)
	}
	broke.Message += "; no other pair went on: " + why.Message
	return nil, broke
}

func tooMany(breaks int) string {
	return fmt.Sprintf("the stream has lost %d workers and is taken to be the reason", breaks)
}

// brokenOff ends the attempt whose stream broke.
func (q *request) brokenOff(f *failure) {
	a := q.attempts[len(q.attempts)-1]
	q.lostBy(a.d.inst)
	q.acquit()
	q.seam.by, q.seam.fault = a.d.inst, ""
	a.d.setState(legFailed)
	a.fail(f)
	a.close()
}

func (a *attempt) fail(f *failure) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.failed = f
}

// remember restores what slim forgot.
func (q *request) remember() *openai.Error {
	top, err := openai.Scan(q.seam.body)
	if err != nil {
		return err
	}
	top.Model = q.top.Model
	q.body, q.top = q.seam.body, top
	return q.resolveModel()
}

// said reports whether the client has everything but [DONE].
func (s *seam) said(top *openai.Top) bool {
	return s.open == 0 && (s.usage || !top.Has(openai.StreamOptions))
}

// goesOn goes on with the next pair's answer, and returns what the client gets next.
func (s *stream) goesOn(ans *answer, began time.Time) []byte {
	s.follow(ans)
	pause := time.Since(began)
	s.q.s.metrics.pause.Observe(pause.Seconds())
	s.q.s.Log.Info("another pair goes on with a stream", "request_id", s.q.id, "decode", s.q.attempts[len(s.q.attempts)-1].d.inst.ID, "pause", pause)
	run := s.first
	s.first = nil
	return append([]byte(seamComment), s.counted(run)...)
}

// follow takes over the next pair's answer.
func (s *stream) follow(ans *answer) {
	s.events.from = len(s.events.buf)
	s.events.used()
	s.pace.tell()
	s.q.slim()
	s.answer, s.pace, s.tries, s.direct, s.q.seam.short = ans, s.q.pacer(ans), 0, false, ""
	s.q.attempts[len(s.q.attempts)-1].choice.Succeeded(fleet.Decode)
}

// goOn has a pair go on with the stream.
func (a *attempt) goOn() (*answer, *failure) {
	ans, f := a.generate()
	if f == nil && ans.events == nil {
		f = a.cramped(a.d, nil, ans)
	}
	re := a.q.seam.re
	if f != nil && f.relay != nil { // the client's stream has begun: what one refuses, another may take
		refused := *f // others may be reading f
		refused.relay, refused.retry = nil, true
		refused.exclude = append(slices.Clip(f.exclude), f.by.inst.ID)
		return nil, &refused
	}
	if re != nil && f == nil {
		if err := a.q.seam.agrees(ans.first); err != nil {
			ans.events.body.Abort()
			ans, f = nil, &failure{by: a.d, outcome: ticket.Refused, reason: reasonStatus, err: err}
		}
	}
	return ans, f
}

// resume is goOn for a stream that broke.
func (q *request) resume(a *attempt) (*answer, *failure) {
	ans, f := a.goOn()
	if f == nil {
		return ans, nil
	}
	f = q.lost(f)
	a.fail(f)
	return nil, f
}

// lost counts a failure if a worker was lost with it that had been sent the request. If it is one
// too many, another pair is not tried.
func (q *request) lost(f *failure) *failure {
	if q.seam == nil || !f.retry || f.reason != reasonTransport && f.reason != reasonDead && f.reason != reasonSilent || !f.by.sent.Load() {
		return f
	}
	if q.lostBy(f.by.inst); q.seam.breaks <= maxTakeovers {
		return f
	}
	last := *f // others may be reading f
	last.retry, last.err = false, fmt.Errorf("%w; %s", f.err, tooMany(q.seam.breaks))
	return &last
}

// unfit adds to barred who cannot go on with the stream. For want of another, who broke off but lives may,
// if it answers when it is asked.
func (q *request) unfit(now *fleet.Snapshot, barred, avoid []string) (exclude, avoided []string) {
	exclude = slices.DeleteFunc(slices.Clone(barred), func(id string) bool {
		m := now.Get(id)
		if m == nil || !q.tried(id, func(*fleet.Instance) bool { return true }) || !q.mayTry(id) || q.s.silence.mute(&m.Instance) {
			return false
		}
		avoid = append(avoid[:len(avoid):len(avoid)], id)
		return true
	})
	for i := range now.Members {
		m := &now.Members[i].Instance
		if !q.s.Picker.Does(m, fleet.Decode) { // it is like the decode that it pairs with
			continue
		}
		if !goesOn(m, q.seam.by) || q.s.silence.mute(m) {
			exclude = append(exclude, m.ID)
		}
	}
	return exclude, avoid
}

// mayTry reports whether the latest failure of a worker was one that another try may not meet.
func (q *request) mayTry(id string) bool {
	for _, a := range slices.Backward(q.attempts) {
		a.mu.Lock()
		f := a.failed
		a.mu.Unlock()
		if f != nil && f.by.inst.ID == id {
			return f.reason == reasonTransport || f.reason == reasonSilent || f.reason == reasonError
		}
	}
	return false
}

// tried reports whether a worker of an attempt has that id and is as asked.
func (q *request) tried(id string, is func(*fleet.Instance) bool) bool {
	return slices.ContainsFunc(q.attempts, func(a *attempt) bool {
		return a.p.inst.ID == id && is(a.p.inst) || a.d.inst.ID == id && is(a.d.inst)
	})
}

// returning reports whether a worker that the stream had is being started again, or may wake up, so
// that it is worth waiting for.
func (q *request) returning() bool {
	if !q.resumes {
		return false
	}
	now := q.s.fleet.Snapshot()
	returns := func(l *leg) bool {
		id := l.inst.ID
		m := now.Get(id)
		return q.s.silence.mute(l.inst) || q.s.Coming != nil && (m == nil || (!m.Draining || m.State == fleet.Dead) && !q.s.Members.Serves(m)) && !q.s.Members.DrainAsked(id) && q.s.Coming(id)
	}
	return slices.ContainsFunc(q.attempts, func(a *attempt) bool { return returns(a.p) || returns(a.d) })
}
