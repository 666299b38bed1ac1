package trace

import (
	"strconv"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
)

// Kinds of spans, as OTLP numbers them.
const (
	Internal = 1
	Server   = 2
	Client   = 3
)

// Span is a span that is over.
type Span struct {
	Context
	Parent     [8]byte // zero for the first of a trace
	Name       string
	Kind       int
	Start, End time.Time
	Attrs      []Attr
	Error      string // what failed; "": nothing
}

// Attr is an attribute: a string, or an int if Text is "".
type Attr struct {
	Key  string
	Text string
	Int  int64
}

// encode makes an ExportTraceServiceRequest with one resource and one scope, by
// opentelemetry/proto/{collector/trace,trace,resource,common}/v1.
func encode(service, version string, spans []Span) []byte {
	attr := func(b []byte, a Attr) []byte { // KeyValue
		b = text(b, 1, a.Key)
		return message(b, 2, func(b []byte) []byte { // AnyValue
			if a.Text != "" {
				return text(b, 1, a.Text)
			}
			return number(b, 3, uint64(a.Int))
		})
	}
	span := func(b []byte, s *Span) []byte {
		b = text(b, 1, string(s.Trace[:]))
		b = text(b, 2, string(s.Span[:]))
		if s.State != "" {
			b = text(b, 3, s.State)
		}
		if s.Parent != [8]byte{} {
			b = text(b, 4, string(s.Parent[:]))
		}
		b = text(b, 5, s.Name)
		b = number(b, 6, uint64(s.Kind))
		b = fixed(b, 7, s.Start)
		b = fixed(b, 8, s.End)
		for _, a := range s.Attrs {
			b = message(b, 9, func(b []byte) []byte { return attr(b, a) })
		}
		if s.Error != "" {
			b = message(b, 15, func(b []byte) []byte { return number(text(b, 2, s.Error), 3, 2) })
		}
		return b
	}
	return message(nil, 1, func(b []byte) []byte { // ResourceSpans
		b = message(b, 1, func(b []byte) []byte { // Resource
			b = message(b, 1, func(b []byte) []byte { return attr(b, Attr{Key: "service.name", Text: service}) })
			return message(b, 1, func(b []byte) []byte { return attr(b, Attr{Key: "service.version", Text: version}) })
		})
		return message(b, 2, func(b []byte) []byte { // ScopeSpans
			b = message(b, 1, func(b []byte) []byte { return text(b, 1, "github.com/xpyd/xpyd/router") })
			for i := range spans {
				b = message(b, 2, func(b []byte) []byte { return span(b, &spans[i]) })
			}
			return b
		})
	})
}

func text(b []byte, field protowire.Number, s string) []byte {
	return protowire.AppendString(protowire.AppendTag(b, field, protowire.BytesType), s)
}

func number(b []byte, field protowire.Number, v uint64) []byte {
	return protowire.AppendVarint(protowire.AppendTag(b, field, protowire.VarintType), v)
}

func fixed(b []byte, field protowire.Number, t time.Time) []byte {
	return protowire.AppendFixed64(protowire.AppendTag(b, field, protowire.Fixed64Type), uint64(t.UnixNano()))
}

func message(b []byte, field protowire.Number, fill func([]byte) []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(b, field, protowire.BytesType), fill(nil))
}

// retryAfter reads a Retry-After header, in seconds.
func retryAfter(header string, otherwise time.Duration) time.Duration {
	if s, err := strconv.Atoi(header); err == nil && s >= 0 && s <= 60 {
		return time.Duration(s) * time.Second
	}
	return otherwise
}
