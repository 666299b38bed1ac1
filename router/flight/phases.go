package flight

import (
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router/trace"
)

// phase is a part of a request's life, as a waterfall and a trace show it.
type phase struct {
	name       string
	start, end time.Time // end is zero while it lasts
	attempt    int       // from 1; 0 for what belongs to none
	role       fleet.Role
	leg        *legRecord // of a phase at a worker
}

// phases are the request's so far, in order of their start: admit; for each attempt pick,
// bring, prefill and decode; then first_byte, from decode's request to its answer, and relay.
func (rec *record) phases() []phase {
	var over time.Time
	if rec.over {
		over = rec.since
	}
	admitted := rec.admitted
	if admitted.IsZero() {
		admitted = over
	}
	out := append(make([]phase, 0, 3*rec.n+3), phase{name: "admit", start: rec.start, end: admitted})
	from := rec.admitted
	for i := range rec.n {
		a := rec.at(i)
		if from.Before(a.Start) {
			out = append(out, phase{name: "pick", start: from, end: a.Start, attempt: i + 1})
		}
		for _, role := range []fleet.Role{fleet.Prefill, fleet.Decode} {
			l := &a.Prefill
			if role == fleet.Decode {
				l = &a.Decode
			}
			if !l.ahead.from.IsZero() {
				out = append(out, phase{name: "bring", start: l.ahead.from, end: l.ahead.to, attempt: i + 1, leg: l})
			}
			if l.begun.IsZero() || !l.ended.IsZero() && l.ended.Before(l.begun) { // it was over before it was sent
				continue
			}
			out = append(out, phase{name: string(role), start: l.begun, end: l.ended, attempt: i + 1, role: role, leg: l})
			if l.ended.After(from) {
				from = l.ended
			}
		}
	}
	if rec.n == 0 || rec.first.IsZero() {
		return out
	}
	for i := rec.n - 1; i >= 0; i-- { // those begun later have taken over
		if begun := rec.at(i).Decode.begun; !begun.IsZero() && !begun.After(rec.first) {
			out = append(out, phase{name: "first_byte", start: begun, end: rec.first})
			break
		}
	}
	return append(out, phase{name: "relay", start: rec.first, end: over})
}

// traced continues the client's trace, or begins one.
func (q *request) traced(parent, state string) {
	q.trace = [2]string{parent, state}
	if q.s.Tracer == nil {
		return
	}
	from, ok := trace.Parse(parent, state)
	own := from.Child()
	if !ok {
		own = trace.Root(q.s.Tracing.Ratio)
	}
	q.trace = [2]string{own.Parent(), own.State}
	if own.Sampled {
		q.span = &span{Context: own, from: from.Span}
	}
}

// span is a sampled request's own, and the one it came from.
type span struct {
	trace.Context
	from [8]byte
}

// spanOf is a new span for a leg; nil without a trace.
func (q *request) spanOf() *trace.Context {
	if q.span == nil {
		return nil
	}
	c := q.span.Child()
	return &c
}
