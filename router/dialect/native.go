package dialect

import (
	"encoding/json"
	"fmt"
	"strconv"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// Native is the exchange between our own workers. Prefill is told to expect a
// link, and decode gets the client's body unchanged with the link and prefill's
// address in headers; the two then talk to each other over kvconn.
type Native struct{}

// Prefill is POST /xpyd/v1/prefill with {"link","request_id","decode_id",
// "deadline_ms"}. It is answered when prefill's part is over.
func (Native) Prefill(h *fasthttp.RequestHeader, x *Exchange) []byte {
	h.SetRequestURI("/xpyd/v1/prefill")
	common(h, x)
	b := append([]byte(nil), `{"link":"`...)
	b = append(b, x.Link.String()...)
	b = append(b, `","request_id":`...)
	b = openai.AppendString(b, x.RequestID)
	b = append(b, `,"decode_id":`...)
	b = openai.AppendString(b, x.Decode.ID)
	b = append(b, `,"deadline_ms":`...)
	b = strconv.AppendInt(b, leftMS(x), 10)
	return append(b, '}')
}

// Decode is the client's request with the exchange in headers.
func (Native) Decode(h *fasthttp.RequestHeader, x *Exchange) []byte {
	h.SetRequestURI(x.Path)
	common(h, x)
	h.Set(HeaderLink, x.Link.String())
	h.Set(HeaderPrefill, x.Prefill.ID)
	h.Set(HeaderPrefillEpoch, strconv.FormatUint(x.Prefill.Epoch, 10))
	h.Set(HeaderPrefillKV, x.Prefill.KVAddr)
	h.Set(HeaderSeed, strconv.FormatInt(x.Seed, 10))
	return x.Body
}

func common(h *fasthttp.RequestHeader, x *Exchange) {
	h.SetMethod(fasthttp.MethodPost)
	h.SetContentType("application/json")
	h.Set(HeaderRequestID, x.RequestID)
	h.Set(HeaderDeadline, strconv.FormatInt(leftMS(x), 10))
	if x.Probe {
		h.Set(HeaderProbe, "1")
	}
	if x.Trace[0] != "" {
		h.Set("traceparent", x.Trace[0])
		if x.Trace[1] != "" {
			h.Set("tracestate", x.Trace[1])
		}
	}
}

func leftMS(x *Exchange) int64 { return max(x.Left.Milliseconds(), 1) }

// Result reads {"outcome","message"}.
func (Native) Result(a Answer) (ticket.Outcome, string) {
	var body struct {
		Outcome ticket.Outcome `json:"outcome"`
		Message string         `json:"message"`
		Error   struct {
			Message string `json:"message"`
		} `json:"error"`
	}
	err := json.Unmarshal(a.Body, &body)
	switch {
	case a.Status == 200 && err == nil && body.Outcome == ticket.Done:
		return ticket.Done, ""
	case err == nil && body.Outcome != "" && body.Outcome != ticket.Done:
		return body.Outcome, body.Message
	case a.Outcome != "":
		return ticket.Outcome(a.Outcome), body.Error.Message
	}
	return ticket.Refused, fmt.Sprintf("status %d without an outcome", a.Status)
}
