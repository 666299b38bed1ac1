package flight

import (
	"net/url"
	"strconv"
	"strings"

	"github.com/xpyd/xpyd/router/trace"
)

// emit exports the spans of a sampled request that is over.
func (q *request) emit(rec *record) {
	if q.span == nil {
		return
	}
	phases := rec.phases()
	root := trace.Span{Context: q.span.Context, Parent: q.span.from, Name: q.method + " " + rec.path, Kind: trace.Server, Start: rec.start, End: rec.since,
		Attrs: q.attributes(rec)}
	if rec.status >= 500 || rec.status == 200 && rec.failed != "" {
		root.Error = rec.failed
		root.Attrs = append(root.Attrs, trace.Attr{Key: "error.type", Text: errorType(rec.status)})
	}
	q.mu.Lock()
	attempts := q.begun() // no more come
	q.mu.Unlock()
	spans := append(make([]trace.Span, 0, len(phases)+1), root)
	for _, p := range phases {
		s := trace.Span{Context: q.span.Child(), Parent: q.span.Span, Name: p.name, Kind: trace.Internal, Start: p.start, End: p.end}
		if s.End.IsZero() {
			s.End = rec.since
		}
		if p.leg != nil {
			l := attempts[p.attempt-1].leg(p.role)
			if l.span != nil && p.role != "" { // a hedge may have begun before there was a trace
				s.Context = *l.span
			}
			s.Kind = trace.Client
			s.Attrs = append([]trace.Attr{{Key: "xpyd.worker", Text: p.leg.ID}, {Key: "xpyd.attempt", Int: int64(p.attempt)}, {Key: "xpyd.leg.state", Text: p.leg.State}},
				server(l.inst.URL)...)
			if p.leg.State == legFailed {
				s.Error = p.leg.State
				s.Attrs = append(s.Attrs, trace.Attr{Key: "error.type", Text: p.leg.State})
			}
		}
		spans = append(spans, s)
	}
	q.s.Tracer.Add(spans)
}

// attributes are a request's, by OpenTelemetry's semantic conventions (http, gen_ai) where these have a name, else xpyd's own.
// There is nothing of its text in them.
func (q *request) attributes(rec *record) []trace.Attr {
	list := []trace.Attr{{Key: "http.request.method", Text: q.method}, {Key: "http.route", Text: rec.path}, {Key: "http.response.status_code", Int: int64(rec.status)},
		{Key: "gen_ai.provider.name", Text: "xpyd"}, {Key: "xpyd.request_id", Text: rec.id}, {Key: "xpyd.attempts", Int: int64(rec.n)}}
	if o := operation(rec.path); o != "" {
		list = append(list, trace.Attr{Key: "gen_ai.operation.name", Text: o})
	}
	if rec.model != "" {
		list = append(list, trace.Attr{Key: "gen_ai.request.model", Text: rec.model})
	}
	if prompt, generated := q.tokens(); prompt+generated > 0 {
		list = append(list, trace.Attr{Key: "gen_ai.usage.input_tokens", Int: int64(prompt)}, trace.Attr{Key: "gen_ai.usage.output_tokens", Int: int64(generated)})
	}
	return list
}

// operation is what the conventions call a route; "" for one that they do not know.
func operation(route string) string {
	switch {
	case strings.HasSuffix(route, "/chat/completions"), strings.HasSuffix(route, "/responses"), strings.HasSuffix(route, "/messages"):
		return "chat"
	case strings.HasSuffix(route, "/completions"):
		return "text_completion"
	case strings.HasSuffix(route, "/embeddings"):
		return "embeddings"
	}
	return ""
}

// errorType is a status, or of a stream that broke after its 200, that it did.
func errorType(status int) string {
	if status == 200 {
		return "stream_broken"
	}
	return strconv.Itoa(status)
}

// server is where a worker is.
func server(base string) (list []trace.Attr) {
	u, err := url.Parse(base)
	if err != nil || u.Hostname() == "" {
		return nil
	}
	list = append(list, trace.Attr{Key: "server.address", Text: u.Hostname()})
	if port, err := strconv.ParseUint(u.Port(), 10, 16); err == nil {
		list = append(list, trace.Attr{Key: "server.port", Int: int64(port)})
	}
	return list
}
