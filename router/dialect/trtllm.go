package dialect

import (
	"encoding/json"
	"strconv"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// trtSplits: single prompts and one choice.
var trtSplits = []Shape{Chat, Logprobs}

// disaggID is unlike any other orchestrator's and above the engines' own ids.
func disaggID(x *Exchange) uint64 { return room(x, 0) | 1<<62 }

type trtParams struct {
	Type      string  `json:"request_type"`
	CtxID     *uint64 `json:"ctx_request_id,omitempty"`
	DisaggID  uint64  `json:"disagg_request_id"`
	Schedule  string  `json:"schedule_style"`
	InfoAddr  string  `json:"ctx_info_endpoint,omitempty"`
	CtxDPRank *int    `json:"ctx_dp_rank,omitempty"`
}

func trtPrefill(h *fasthttp.RequestHeader, x *Exchange, style string) [][]byte {
	foreign(h, x)
	e := openai.NewEdit(x.Body, x.Top)
	e.Set(openai.Stream, "false") // max_tokens stays: the engine stops by itself
	e.Remove(openai.StreamOptions)
	e.Add("disaggregated_params", string(encode(trtParams{Type: "context_only", DisaggID: disaggID(x), Schedule: style})))
	return e.Parts()
}

// TRTContextFirst is TensorRT-LLM's context_first: prefill's answer holds an
// opaque state that decode starts from.
type TRTContextFirst struct{}

var trtContextRules = Rules{
	Order: PrefillFirst, Link: "disagg_request_id and prefill's opaque state",
	Splits: trtSplits, Falls: true,
	Hold: 180 * time.Second, Gap: 10 * time.Second,
	Watched: true, Usage: true,
}

// Rules of context_first. Prefill's leg is over before there is a transfer, so
// it can always be closed.
func (TRTContextFirst) Rules() *Rules { return &trtContextRules }

// Prefill asks for the context only.
func (TRTContextFirst) Prefill(h *fasthttp.RequestHeader, x *Exchange) [][]byte {
	return trtPrefill(h, x, "context_first")
}

// Decode gets prefill's state, its usage, and its token ids for the prompt.
func (TRTContextFirst) Decode(h *fasthttp.RequestHeader, x *Exchange) [][]byte {
	foreign(h, x)
	e := openai.NewEdit(x.Body, x.Top)
	set := [][2]string{{"request_type", `"generation_only"`}}
	if x.Kept.Usage != nil {
		set = append(set, [2]string{"ctx_usage", string(x.Kept.Usage)})
	}
	e.Add("disaggregated_params", string(openai.With(x.Kept.Params, set...)))
	if x.Kept.Tokens != nil {
		field := openai.PromptField
		if x.Top.Messages {
			field = openai.PromptTokenIDs
		}
		e.Set(field, string(x.Kept.Tokens))
	}
	return e.Parts()
}

// Result wants exactly one choice with its disaggregated_params. One that did
// not end for its length has nothing left to generate: it is the answer.
func (TRTContextFirst) Result(_ *Exchange, a Answer) Result {
	r := status(a)
	if r.Outcome != ticket.Done {
		return r
	}
	var body struct {
		Choices []struct {
			Finish *string         `json:"finish_reason"`
			Params json.RawMessage `json:"disaggregated_params"`
		} `json:"choices"`
	}
	if err := json.Unmarshal(a.Body, &body); err != nil || len(body.Choices) != 1 {
		return Result{Outcome: ticket.Refused, Message: "prefill answered with " + strconv.Itoa(len(body.Choices)) + " choices, not with one"}
	}
	c := body.Choices[0]
	if c.Finish != nil && *c.Finish != "length" && *c.Finish != "not_finished" {
		r.Final = trtFinal(a.Body)
		return r
	}
	if openai.Member(c.Params, "ctx_request_id") == nil || openai.Member(c.Params, "disagg_request_id") == nil {
		return Result{Outcome: ticket.Incompatible, Message: "prefill answered without ctx_request_id or disagg_request_id"}
	}
	r.Kept = Kept{Params: c.Params, Tokens: openai.Member(a.Body, "prompt_token_ids"), Usage: openai.Member(a.Body, "usage")}
	return r
}

// trtFinal is prefill's answer without what only the exchange needs.
func trtFinal(body []byte) []byte {
	var all map[string]json.RawMessage
	var choices []map[string]json.RawMessage
	if json.Unmarshal(body, &all) != nil || json.Unmarshal(all["choices"], &choices) != nil {
		return body
	}
	delete(all, "prompt_token_ids")
	for _, c := range choices {
		delete(c, "disaggregated_params")
	}
	all["choices"] = encode(choices)
	return encode(all)
}

// TRTGenerationFirst is TensorRT-LLM's generation_first: both legs at once,
// decode looks for the context at Bootstrap, prefill's ctx_info_endpoint.
type TRTGenerationFirst struct{}

var trtGenerationRules = Rules{
	Order: Together, Link: "disagg_request_id",
	Splits: trtSplits, Falls: true,
	// Cancelling prefill in the middle of a transfer strands it.
	Linger: 2 * time.Second,
	Hold:   180 * time.Second, Watched: true, Usage: true,
}

// Rules of generation_first.
func (TRTGenerationFirst) Rules() *Rules { return &trtGenerationRules }

// Prefill asks for the context only.
func (TRTGenerationFirst) Prefill(h *fasthttp.RequestHeader, x *Exchange) [][]byte {
	return trtPrefill(h, x, "generation_first")
}

// Decode waits for the context of the same id.
func (TRTGenerationFirst) Decode(h *fasthttp.RequestHeader, x *Exchange) [][]byte {
	foreign(h, x)
	id := disaggID(x)
	p := trtParams{Type: "generation_only", CtxID: &id, DisaggID: id, Schedule: "generation_first", InfoAddr: x.Prefill.Bootstrap}
	if x.Prefill.DPRanks > 1 {
		n := rank(x, x.Prefill)
		p.CtxDPRank = &n
	}
	e := openai.NewEdit(x.Body, x.Top)
	e.Add("disaggregated_params", string(encode(p)))
	return e.Parts()
}

// Result needs nothing of prefill's answer but that it is one.
func (TRTGenerationFirst) Result(_ *Exchange, a Answer) Result { return status(a) }
