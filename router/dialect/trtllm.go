package dialect

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// trtSplits: single prompts with one choice.
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

// trtPrefill asks for the context only.
func trtPrefill(style string) func(*fasthttp.RequestHeader, *Exchange) [][]byte {
	return func(h *fasthttp.RequestHeader, x *Exchange) [][]byte {
		foreign(h, x)
		e := openai.NewEdit(x.Body, x.Top)
		e.Set(openai.Stream, "false") // max_tokens stays: the engine stops by itself
		e.Remove(openai.StreamOptions)
		e.Add("disaggregated_params", string(encode(trtParams{Type: "context_only", DisaggID: disaggID(x), Schedule: style})))
		return e.Parts()
	}
}

// trtContextFirst is TensorRT-LLM's context_first: prefill's answer holds an opaque state
// from which decode starts. Prefill's leg is over before any transfer, so that it can always
// be closed.
var trtContextFirst = Dialect{
	Rules: Rules{
		Order:  PrefillFirst,
		Splits: trtSplits, Falls: true,
		Hold: 180 * time.Second, Gap: 10 * time.Second,
		Watched: true, Usage: true,
	},
	Prefill: trtPrefill("context_first"),
	// Decode gets prefill's state and usage, and its token ids for the prompt.
	Decode: func(h *fasthttp.RequestHeader, x *Exchange) [][]byte {
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
	},
	Result: trtContextResult,
}

// trtContextResult wants exactly one choice with its disaggregated_params. A choice that ended
// for another reason than its length is the whole response.
func trtContextResult(a Reply) Result {
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
		return Result{Outcome: ticket.Refused, Message: fmt.Sprintf("prefill answered with %d choices, not with one", len(body.Choices))}
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

// trtFinal returns prefill's answer without what links the legs.
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

// trtGenerationFirst is TensorRT-LLM's generation_first: both legs at once; decode looks for
// the context at Bootstrap, prefill's ctx_info_endpoint.
var trtGenerationFirst = Dialect{
	Rules: Rules{
		Order:  Together,
		Splits: trtSplits, Falls: true,
		// Cancelling prefill in the middle of a transfer strands it.
		Linger: 2 * time.Second,
		Hold:   180 * time.Second, Watched: true, Usage: true,
	},
	Prefill: trtPrefill("generation_first"),
	Decode: func(h *fasthttp.RequestHeader, x *Exchange) [][]byte {
		foreign(h, x)
		id := disaggID(x)
		p := trtParams{Type: "generation_only", CtxID: &id, DisaggID: id, Schedule: "generation_first", InfoAddr: x.Prefill.Bootstrap}
		if x.Prefill.DPRanks > 1 {
			p.CtxDPRank = new(rank(x, x.Prefill))
		}
		e := openai.NewEdit(x.Body, x.Top)
		e.Add("disaggregated_params", string(encode(p)))
		return e.Parts()
	},
	Result: status,
}
