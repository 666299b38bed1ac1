package dialect

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net"
	"net/url"
	"strconv"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// common sets what every leg carries, but for the request's id.
func common(h *fasthttp.RequestHeader, x *Exchange) {
	h.SetMethod(fasthttp.MethodPost)
	h.SetRequestURI(x.Path)
	h.SetContentType("application/json")
	var digits [20]byte
	h.SetBytesV(ticket.HeaderDeadline, strconv.AppendInt(digits[:0], leftMS(x), 10))
	if x.Probe {
		h.Set(ticket.HeaderProbe, "1")
	}
	SetClient(h, x.Authorization, x.Trace)
}

// SetClient sets what a leg carries on of the client's request: its credentials for the
// engine, and traceparent and tracestate; "" sets none.
func SetClient(h *fasthttp.RequestHeader, authorization string, trace [2]string) {
	if authorization != "" {
		h.Set("Authorization", authorization)
	}
	if trace[0] != "" {
		h.Set("traceparent", trace[0])
		if trace[1] != "" {
			h.Set("tracestate", trace[1])
		}
	}
}

func leftMS(x *Exchange) int64 { return max(x.Left.Milliseconds(), 1) }

// foreign is common for engines that link or log by the request's id, which is therefore
// unique, even if a client repeats its ids or the router tries again.
func foreign(h *fasthttp.RequestHeader, x *Exchange) {
	common(h, x)
	var space [192]byte
	h.SetBytesV(ticket.HeaderRequestID, appendEngineRequest(space[:0], x))
	h.SetBytesV(ticket.HeaderSeed, strconv.AppendInt(space[:0], x.Seed, 10))
}

func engineRequest(x *Exchange) string { return string(appendEngineRequest(nil, x)) }

func appendEngineRequest(b []byte, x *Exchange) []byte {
	b = append(append(b, x.RequestID...), '-')
	return hex.AppendEncode(b, x.Link[:])
}

// rank returns the data-parallel rank that was chosen; if none was, the room modulo the number
// of ranks, as SGLang's engines spread requests by default.
func rank(x *Exchange, i *fleet.Instance) int {
	chosen := x.DecodeRank
	if i == x.Prefill {
		chosen = x.PrefillRank
	}
	if chosen > 0 && chosen <= i.DPRanks {
		return chosen - 1
	}
	return int(room(x, 0) % uint64(max(i.DPRanks, 1)))
}

// room returns a number in [0, 2^63-1] made of the link, different for each item of a batch.
func room(x *Exchange, item int) uint64 {
	return (binary.BigEndian.Uint64(x.Link[:8]) + uint64(item)*0x9e3779b97f4a7c15) >> 1
}

// onlyPrefill edits a request so that vLLM computes the prompt and one token and does not stream.
func onlyPrefill(x *Exchange) *openai.Edit {
	e := openai.NewEdit(x.Body, x.Top)
	e.Set(openai.Stream, "false")
	e.Remove(openai.StreamOptions)
	e.Set(openai.MaxTokens, "1")
	e.Replace(openai.MaxCompletionTokens, "1")
	e.Remove(openai.MinTokens)
	e.Remove(openai.MinCompletionTokens)
	e.Remove(openai.ReturnTokenIDs)
	return e
}

// params appends kv_transfer_params to the client's body.
func params(x *Exchange, v any) [][]byte {
	return withParams(openai.NewEdit(x.Body, x.Top), v)
}

func withParams(e *openai.Edit, v any) [][]byte {
	e.Add("kv_transfer_params", string(encode(v)))
	return e.Parts()
}

func encode(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // strings, numbers and raw JSON that was checked
	}
	return b
}

// bootstrap returns where decode finds prefill: as configured, else the URL's host with the
// engine's default port.
func bootstrap(p *fleet.Instance, port int) (string, int) {
	if host, text, err := net.SplitHostPort(p.Bootstrap); err == nil {
		if n, err := strconv.Atoi(text); err == nil {
			return host, n
		}
	}
	if u, err := url.Parse(p.URL); err == nil {
		return u.Hostname(), port
	}
	return "", port
}

// status reads the outcome from the HTTP status; what foreign engines say is for people.
func status(a Reply) Result { return statusAnd(a, "") }

// statusAnd also keeps a member of a good answer as Kept.Params.
func statusAnd(a Reply, params string) Result {
	switch {
	case a.Status >= 200 && a.Status < 300:
		if data, ok := bytes.CutPrefix(a.Body, []byte("data: ")); ok && openai.IsError(data) { // an event stream that only fails
			return Result{Outcome: ticket.Refused, Message: openai.Clip(string(a.Body))}
		}
		r := Result{Outcome: ticket.Done}
		r.Prompt, r.Counted, r.Kept.Params = openai.ReadUsage(a.Body, params)
		return r
	case a.Status == 429 || a.Status == 503:
		return Result{Outcome: ticket.NoSpace, Message: message(a)}
	}
	return Result{Outcome: ticket.Refused, Message: message(a)}
}

func message(a Reply) string {
	return fmt.Sprintf("status %d: %s", a.Status, openai.ErrorMessage(a.Body))
}
