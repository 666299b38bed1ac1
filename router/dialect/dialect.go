// Package dialect builds the requests of the two legs of an exchange, one
// file per engine protocol, and reads how a leg ended. It sends nothing.
package dialect

import (
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// Header names of the exchange.
const (
	HeaderRequestID    = "x-request-id"
	HeaderLink         = "x-xpyd-link"          // 32 hex digits, one exchange
	HeaderPrefill      = "x-xpyd-prefill"       // the prefill worker's id
	HeaderPrefillEpoch = "x-xpyd-prefill-epoch" // decimal
	HeaderPrefillKV    = "x-xpyd-prefill-kv"    // host:port of its kvconn
	HeaderSeed         = "x-xpyd-seed"          // decimal int64; used when the body has none
	HeaderDeadline     = "x-xpyd-deadline-ms"   // milliseconds left, so that clocks need not agree
	HeaderProbe        = "x-xpyd-probe"         // "1": the router's own probe, not user traffic
	HeaderOutcome      = "x-xpyd-outcome"       // a ticket.Outcome, on failures
)

// Exchange is one attempt at one request.
type Exchange struct {
	RequestID string
	Link      ticket.Link
	Path      string // as the client sent it
	Body      []byte // as the client sent it
	Seed      int64  // for a body without one
	Prefill   *fleet.Instance
	Decode    *fleet.Instance
	Left      time.Duration // until the request's deadline
	Probe     bool
	// Trace is what the client sent as traceparent and tracestate.
	Trace [2]string
}

// Answer is the whole answer of a leg that does not carry the response.
type Answer struct {
	Status  int
	Outcome string // HeaderOutcome
	Body    []byte
}

// Dialect is one engine protocol whose legs go out at once. Prefill and Decode
// set the method, path and headers of a leg and return its body.
type Dialect interface {
	Prefill(h *fasthttp.RequestHeader, x *Exchange) (body []byte)
	Decode(h *fasthttp.RequestHeader, x *Exchange) (body []byte)
	// Result reads how the prefill leg ended.
	Result(a Answer) (ticket.Outcome, string)
}

// For returns the dialect of that name, nil when there is none.
func For(name string) Dialect {
	if name == "native" {
		return Native{}
	}
	return nil
}
