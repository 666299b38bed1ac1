// Package trace is the little of OpenTelemetry that the router needs: W3C trace context,
// spans, and their export by OTLP over HTTP. The SDK's exporters link gRPC, even the one over
// HTTP. Here a request that is not sampled costs nothing, and a sampled one only its spans,
// made once at its end.
package trace

import (
	"encoding/binary"
	"encoding/hex"
	"math/rand/v2"
	"strings"
)

// Context is a span's place in a trace, as it travels.
type Context struct {
	Trace   [16]byte
	Span    [8]byte
	Sampled bool
	State   string // tracestate, as it came
}

// maxState is the longest tracestate that is passed on; the specification asks for at least
// 512.
const maxState = 1 << 10

// Parse reads the headers traceparent and tracestate.
func Parse(parent, state string) (Context, bool) {
	var c Context
	// version "-" trace-id "-" parent-id "-" trace-flags
	if len(parent) < 55 || parent[2] != '-' || parent[35] != '-' || parent[52] != '-' || parent != strings.ToLower(parent) {
		return c, false
	}
	var version, flags [1]byte
	for _, part := range []struct {
		to   []byte
		from string
	}{{version[:], parent[:2]}, {c.Trace[:], parent[3:35]}, {c.Span[:], parent[36:52]}, {flags[:], parent[53:55]}} {
		if _, err := hex.Decode(part.to, []byte(part.from)); err != nil {
			return Context{}, false
		}
	}
	later := version[0] > 0 && len(parent) > 55 && parent[55] == '-'
	if version[0] == 0xff || len(parent) > 55 && !later || c.Trace == [16]byte{} || c.Span == [8]byte{} {
		return Context{}, false
	}
	c.Sampled = flags[0]&1 == 1
	if len(state) <= maxState {
		c.State = state
	}
	return c, true
}

// Parent formats the header traceparent.
func (c Context) Parent() string {
	var b [55]byte
	copy(b[:], "00-")
	hex.Encode(b[3:], c.Trace[:])
	b[35] = '-'
	hex.Encode(b[36:], c.Span[:])
	copy(b[52:], "-00")
	if c.Sampled {
		b[54] = '1'
	}
	return string(b[:])
}

// Child is a new span in c's trace.
func (c Context) Child() Context {
	c.Span = newSpan()
	return c
}

// Root begins a trace, sampled with the probability ratio: by its ID, so that all who use the
// same ratio agree.
func Root(ratio float64) Context {
	var c Context
	for c.Trace == [16]byte{} {
		binary.BigEndian.PutUint64(c.Trace[:8], rand.Uint64())
		binary.BigEndian.PutUint64(c.Trace[8:], rand.Uint64())
	}
	c.Span = newSpan()
	c.Sampled = float64(binary.BigEndian.Uint64(c.Trace[8:])>>11) < ratio*(1<<53)
	return c
}

func newSpan() [8]byte {
	var b [8]byte
	for b == [8]byte{} {
		binary.BigEndian.PutUint64(b[:], rand.Uint64())
	}
	return b
}
