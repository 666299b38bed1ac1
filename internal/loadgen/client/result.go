package client

import (
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"time"
)

// Kind is how a request ended; "" is a whole answer.
type Kind string

// The kinds of failure. HTTP statuses are their own kinds, http_503 and so on.
const (
	Connect    Kind = "connect"     // no connection
	Timeout    Kind = "timeout"     // the deadline passed
	Connection Kind = "connection"  // the connection broke before an answer
	Truncated  Kind = "truncated"   // the answer just stopped
	ErrorEvent Kind = "error_event" // the stream reported an error
	Malformed  Kind = "malformed"   // not HTTP, not an event stream, or not JSON
	Empty      Kind = "empty"       // a whole answer without a token
	Cancelled  Kind = "cancelled"   // broken off at the end of the run; not a failure
)

// Request is one body to post.
type Request struct {
	Body []byte
	// WantAnswer keeps the text of the answer.
	WantAnswer bool
}

// Result is the outcome of a request. Durations count from Start. The zero value is ready to
// use; a reused one keeps its memory.
type Result struct {
	Start      time.Time     // before connecting
	Connected  time.Duration // 0: used an idle connection
	Header     time.Duration // the answer's header was read
	FirstToken time.Duration // the first event with text, reasoning or a tool call
	LastToken  time.Duration // the last one, or the end of an answer that is not streamed
	End        time.Duration // nothing more to read

	// Gaps are the times between events with tokens. An event may hold several tokens.
	Gaps     []time.Duration
	Chunks   int // events with tokens
	HasUsage bool
	Usage    Usage
	Answer   []byte // with WantAnswer: the text as in JSON, with its escapes

	Status  int // HTTP status, 0 without an answer
	Kind    Kind
	Message string // of a failure
	Retried bool   // the idle connection turned out to be closed
	Sent    int    // bytes of the body
}

// reset clears everything but keeps the memory.
func (r *Result) reset() { *r = Result{Gaps: r.Gaps[:0], Answer: r.Answer[:0]} }

// OK reports whether a whole answer came.
func (r *Result) OK() bool { return r.Kind == "" }

// Tokens is the answer's length as the server reports it, or else the number of events with
// tokens.
func (r *Result) Tokens() int {
	if r.HasUsage {
		return r.Usage.Completion
	}
	return r.Chunks
}

// TPOT is the time per output token after the first; false without a stream or with fewer
// than two tokens.
func (r *Result) TPOT() (time.Duration, bool) {
	n := r.Tokens()
	if n < 2 || r.Chunks < 2 {
		return 0, false
	}
	return (r.LastToken - r.FirstToken) / time.Duration(n-1), true
}

// maxGaps bounds the events of one answer.
const maxGaps = 1 << 20

func (r *Result) fail(kind Kind, err error) {
	r.Kind = kind
	r.Message = clip(err.Error())
}

// broke classifies an error of the connection.
func (r *Result) broke(err error, otherwise Kind) {
	var n net.Error
	switch {
	case errors.As(err, &n) && n.Timeout():
		r.Kind, r.Message = Timeout, "the deadline passed "+r.phase()
	case errors.Is(err, net.ErrClosed):
		r.Kind, r.Message = Cancelled, "broken off "+r.phase()
	case errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF):
		r.Kind, r.Message = otherwise, "the connection ended "+r.phase()
	default:
		r.fail(otherwise, err)
	}
}

// phase says how far the request got.
func (r *Result) phase() string {
	switch {
	case r.Chunks > 0:
		return fmt.Sprintf("after %d chunks", r.Chunks)
	case r.Status != 0:
		return "before the first token"
	}
	return "before an answer"
}

// clip bounds a server's error text.
func clip(s string) string {
	const most = 300
	if len(s) > most {
		return strings.ToValidUTF8(s[:most], "") + "…"
	}
	return s
}
