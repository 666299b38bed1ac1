package dialect

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// native is the protocol of our own workers. Prefill is told to expect a link; decode gets the
// client's body unchanged, with the link and prefill's address in headers. The two then talk
// to each other over kvconn.
var native = Dialect{
	Rules: Rules{
		Order: Together,
		Typed: true, Hedges: true,
		Splits: Shapes, // decode gets the client's bytes
		Usage:  false,  // the commit tells decode
		Peers:  true, MaxAnswer: true, TakesOver: true, Promises: true, Salts: true,
	},
	// POST /xpyd/v1/prefill is answered when prefill's part is over.
	Prefill: func(h *fasthttp.RequestHeader, x *Exchange) [][]byte {
		common(h, x)
		h.Set(ticket.HeaderRequestID, x.RequestID)
		h.SetRequestURI("/xpyd/v1/prefill")
		b := append([]byte(nil), `{"link":"`...)
		b = append(b, x.Link.String()...)
		b = append(b, `","request_id":`...)
		b = openai.AppendString(b, x.RequestID)
		b = append(b, `,"deadline_ms":`...)
		b = strconv.AppendInt(b, leftMS(x), 10)
		return [][]byte{append(b, '}')}
	},
	Decode: func(h *fasthttp.RequestHeader, x *Exchange) [][]byte {
		common(h, x)
		h.Set(ticket.HeaderRequestID, x.RequestID)
		h.Set(ticket.HeaderLink, x.Link.String())
		h.Set(ticket.HeaderPrefill, x.Prefill.ID)
		h.Set(ticket.HeaderPrefillEpoch, strconv.FormatUint(x.Prefill.Epoch, 10))
		h.Set(ticket.HeaderPrefillKV, x.Prefill.KVAddr)
		h.Set(ticket.HeaderSeed, strconv.FormatInt(x.Seed, 10))
		peered(h, x)
		promised(h, x)
		salted(h, x)
		return continued(h, x)
	},
	// POST /xpyd/v1/bring is answered when what the peer has is there.
	Bring: func(h *fasthttp.RequestHeader, x *Exchange) [][]byte {
		common(h, x)
		h.Set(ticket.HeaderRequestID, x.RequestID)
		h.SetRequestURI("/xpyd/v1/bring?chat=" + strconv.FormatBool(x.Top.Messages))
		peered(h, x)
		salted(h, x)
		return continued(h, x)
	},
	Brought: nativeBrought,
	Result:  nativeResult,
}

// nativeBrought reads {"prompt","tokens"}.
func nativeBrought(a Reply) (b Brought, err error) {
	if a.Status != 200 {
		return b, errors.New(message(a))
	}
	var body struct {
		Prompt *bool `json:"prompt"`
		Tokens *int  `json:"tokens"`
	}
	if err = json.Unmarshal(a.Body, &body); err != nil {
		return b, err
	}
	if body.Prompt == nil || body.Tokens == nil || *body.Tokens < 0 {
		return b, errors.New("it does not say what is there")
	}
	return Brought{Prompt: *body.Prompt, Tokens: *body.Tokens}, nil
}

// continued returns the body of decode's leg, with what another decode has sent of the stream.
func continued(h *fasthttp.RequestHeader, x *Exchange) [][]byte {
	if x.Tokens {
		h.Set(ticket.HeaderTokens, "1")
		h.Set(ticket.HeaderRequestID, x.RequestID) // the answer's id, which stays
	}
	if x.Given == nil {
		return [][]byte{x.Body}
	}
	if x.Brought {
		h.Set(ticket.HeaderBrought, "1")
	}
	h.Set(ticket.HeaderGiven, strconv.Itoa(len(x.Body)))
	return [][]byte{x.Body, x.Given}
}

// peered names the worker that has more of the prompt.
func peered(h *fasthttp.RequestHeader, x *Exchange) {
	if p := x.Peer; p != nil {
		i := p.Instance
		named := ticket.Peer{ID: i.ID, Epoch: i.Epoch, URL: i.URL, KV: i.KVAddr, Tokens: p.Tokens}
		h.Set(ticket.HeaderPeer, named.String())
	}
}

// promised says what the request is promised. Prefill hears of it with decode's ticket, which may
// be there before its leg.
func promised(h *fasthttp.RequestHeader, x *Exchange) {
	if x.Promise != "" {
		h.Set(ticket.HeaderPromise, x.Promise)
	}
}

// salted says whose cache the KV is in. Prefill hears of it with decode's ticket.
func salted(h *fasthttp.RequestHeader, x *Exchange) {
	if x.CacheSalt != "" {
		h.Set(ticket.HeaderCacheSalt, x.CacheSalt)
	}
}

// nativeResult reads {"outcome","message"}.
func nativeResult(a Reply) Result {
	var body struct {
		Outcome ticket.Outcome `json:"outcome"`
		Message string         `json:"message"`
	}
	err := json.Unmarshal(a.Body, &body)
	switch {
	case a.Status == 200 && err == nil && body.Outcome == ticket.Done:
		return Result{Outcome: ticket.Done}
	case err == nil && body.Outcome != "" && body.Outcome != ticket.Done:
		return Result{Outcome: body.Outcome, Message: body.Message}
	case a.Outcome != "":
		return Result{Outcome: ticket.Outcome(a.Outcome), Message: openai.ErrorMessage(a.Body)}
	}
	return Result{Outcome: ticket.Refused, Message: fmt.Sprintf("status %d without an outcome", a.Status)}
}
