package router

import (
	"time"

	"github.com/xpyd/xpyd/router/trace"
)

// phase is a part of a request's life: what a waterfall and a trace show.
type phase struct {
	name       string
	start, end time.Time // end is zero while it lasts
	attempt    int       // 1 for the first; 0 for what is before and behind
	leg        *leg      // of a phase at a worker
}

// phases are a request's so far, in order of their begin: admit; for each
// attempt pick, prefill and decode; then first_byte, from decode's request to
// its answer, and relay. What was not reached is left out.
func (q *request) phases() []phase {
	q.mu.Lock()
	defer q.mu.Unlock()
	var over time.Time
	if q.over {
		over = q.since
	}
	admitted := q.admitted
	if admitted.IsZero() {
		admitted = over
	}
	out := append(make([]phase, 0, 3*len(q.attempts)+3), phase{name: "admit", start: q.start, end: admitted})
	from := q.admitted
	var last *attempt
	for i, a := range q.attempts {
		if from.Before(a.start) {
			out = append(out, phase{name: "pick", start: from, end: a.start, attempt: i + 1})
		}
		for _, l := range []*leg{a.p, a.d} {
			begun, ended := l.times()
			if begun.IsZero() {
				continue
			}
			name := "prefill"
			if l == a.d {
				name = "decode"
			}
			out = append(out, phase{name: name, start: begun, end: ended, attempt: i + 1, leg: l})
			if ended.After(from) {
				from = ended
			}
		}
		last = a
	}
	if last == nil || q.first.IsZero() {
		return out
	}
	if begun, _ := last.d.times(); !begun.IsZero() {
		out = append(out, phase{name: "first_byte", start: begun, end: q.first})
	}
	return append(out, phase{name: "relay", start: q.first, end: over})
}

// traced takes up the client's trace, or begins one.
func (q *request) traced(parent, state string) {
	q.trace = [2]string{parent, state}
	if q.r.tracer == nil {
		return
	}
	from, ok := trace.Parse(parent, state)
	own := from.Child()
	if !ok {
		own = trace.Root(q.r.cfg.Tracing.Ratio)
	}
	q.trace = [2]string{own.Parent(), own.State}
	if own.Sampled {
		q.span = &span{Context: own, from: from.Span}
	}
}

// span is a sampled request's own, and the one that it came from.
type span struct {
	trace.Context
	from [8]byte
}

// spanOf is a leg's span; nil without one.
func (q *request) spanOf() *trace.Context {
	if q.span == nil {
		return nil
	}
	c := q.span.Child()
	return &c
}

// emit exports the request's spans.
func (q *request) emit() {
	phases := q.phases()
	q.mu.Lock()
	end := q.since
	root := trace.Span{Context: q.span.Context, Parent: q.span.from, Name: q.method + " " + q.path, Kind: trace.Server, Start: q.start, End: end,
		Attrs: []trace.Attr{
			{Key: "http.request.method", Text: q.method}, {Key: "http.route", Text: q.path},
			{Key: "http.response.status_code", Int: int64(q.status)}, {Key: "gen_ai.request.model", Text: q.model},
			{Key: "xpyd.request_id", Text: q.id}, {Key: "xpyd.attempts", Int: int64(len(q.attempts))},
		}}
	if q.status >= 500 || q.status == 200 && q.failed != "" {
		root.Error = q.failed
	}
	q.mu.Unlock()
	spans := append(make([]trace.Span, 0, len(phases)+1), root)
	for i := range phases {
		p := &phases[i]
		s := trace.Span{Context: q.span.Child(), Parent: q.span.Span, Name: p.name, Kind: trace.Internal, Start: p.start, End: p.end}
		if s.End.IsZero() {
			s.End = end
		}
		if p.leg != nil {
			if p.leg.span != nil { // a hedge may have begun before there was a trace
				s.Context = *p.leg.span
			}
			state, _ := p.leg.get()
			s.Kind = trace.Client
			s.Attrs = []trace.Attr{{Key: "xpyd.worker", Text: p.leg.inst.ID}, {Key: "server.address", Text: p.leg.inst.URL},
				{Key: "xpyd.attempt", Int: int64(p.attempt)}, {Key: "xpyd.leg.state", Text: state}}
			if state == legFailed {
				s.Error = state
			}
		}
		spans = append(spans, s)
	}
	q.r.tracer.Add(spans)
}
