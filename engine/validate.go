package engine

import (
	"fmt"

	"github.com/xpyd/xpyd/kernels"
)

// MaxChoices bounds Request.N.
const MaxChoices = 128

// normalise checks a request and returns a copy with defaults filled in.
func (e *Engine) normalise(r *Request) (*Request, error) {
	q := *r
	if q.N == 0 {
		q.N = 1
	}
	if q.TopP == 0 {
		q.TopP = 1
	}
	if q.Repetition == 0 {
		q.Repetition = 1
	}
	q.Logprobs = max(q.Logprobs, -1)
	q.PromptLogprobs = max(q.PromptLogprobs, -1)
	bad := func(field, format string, args ...any) (*Request, error) {
		return nil, &RequestError{Field: field, Msg: fmt.Sprintf(format, args...)}
	}
	switch {
	case len(q.Prompt) == 0:
		return bad("prompt", "is empty")
	case q.N < 1 || q.N > MaxChoices:
		return bad("n", "is %d, want 1 to %d", q.N, MaxChoices)
	case q.MaxTokens < 0:
		return bad("max_tokens", "is %d, want 0 or more", q.MaxTokens)
	case q.Promise.negative():
		return bad("promise", "is negative")
	case q.MinTokens < 0 || q.MaxTokens > 0 && q.MinTokens > q.MaxTokens:
		return bad("min_tokens", "is %d, want 0 to max_tokens", q.MinTokens)
	case q.Logprobs > e.vocab || q.PromptLogprobs > e.vocab:
		return bad("logprobs", "lists more entries than the vocabulary's %d", e.vocab)
	case q.RowsOnly && (!q.PrefillOnly || q.PromptLogprobs >= 0):
		return bad("rows_only", "is for prefill-only requests without log probabilities")
	case q.OnBlocks != nil && !q.PrefillOnly:
		return bad("on_blocks", "is for prefill-only requests")
	case q.Pooling == PoolNone:
	case q.N > 1 || q.PrefillOnly || q.Prefilled != nil || len(q.Given) > 0 || q.Guide != nil || q.PromptLogprobs >= 0:
		return bad("pooling", "is of a prompt alone")
	case !e.backend.Info().Hidden:
		return nil, kernels.ErrNoHidden
	}
	if id, ok := e.outside(q.Prompt); ok {
		return bad("prompt", "token %d is outside the vocabulary of %d", id, e.vocab)
	}
	if q.RowsOnly {
		q.Guide = nil
	}
	if id, ok := e.outside(q.StopTokens); ok {
		return bad("stop_token_ids", "token %d is outside the vocabulary of %d", id, e.vocab)
	}
	for _, b := range q.Bias {
		if b.ID < 0 || int(b.ID) >= e.vocab {
			return bad("logit_bias", "token %d is outside the vocabulary of %d", b.ID, e.vocab)
		}
	}
	if err := e.checkShape(&q); err != nil {
		return nil, err
	}
	most := e.maxLen - 1
	if q.Pooling != PoolNone {
		most = e.maxLen // nothing follows
	}
	if len(q.Prompt) > most {
		return nil, &TooLongError{Prompt: len(q.Prompt), Max: e.maxLen}
	}
	if err := e.checkGiven(&q); err != nil {
		return nil, err
	}
	if q.resumes() >= 0 {
		q.PromptLogprobs = -1 // they were sent
	}
	if q.Prefilled != nil {
		return e.normalisePrefilled(&q)
	}
	return &q, nil
}

// Check returns why Submit would refuse a request, whatever else there is to do.
func (e *Engine) Check(r *Request) error {
	_, err := e.normalise(r)
	return err
}

func (e *Engine) checkGiven(q *Request) error {
	bad := func(format string, args ...any) error {
		return &RequestError{Field: "given", Msg: fmt.Sprintf(format, args...)}
	}
	switch n := len(q.Given); {
	case n == 0:
		return nil
	case n != q.N:
		return bad("has %d entries for %d choices", n, q.N)
	case q.PrefillOnly:
		return bad("is not for a prefill-only request")
	}
	for i, g := range q.Given {
		if g.Done {
			continue
		}
		if id, ok := e.outside(g.Tokens); ok {
			return bad("choice %d: token %d is outside the vocabulary of %d", i, id, e.vocab)
		}
		if n := q.checkGuided(g.Tokens); n >= 0 {
			return bad("choice %d: its token %d of %d is not what the output is bound to", i, n+1, len(g.Tokens))
		}
		for n, id := range g.Tokens {
			if why := e.finishOf(q, id, n+1); why != FinishNone {
				return bad("choice %d: its token %d of %d ends it (%s)", i, n+1, len(g.Tokens), why)
			}
		}
	}
	return nil
}

func (e *Engine) normalisePrefilled(q *Request) (*Request, error) {
	bad := func(format string, args ...any) (*Request, error) {
		return nil, &RequestError{Field: "prefilled", Msg: fmt.Sprintf(format, args...)}
	}
	p := q.Prefilled
	switch want := e.cache.BlocksFor(len(q.Prompt)); {
	case q.PrefillOnly:
		return bad("a prefill-only request has no rows yet")
	case q.Owner == "":
		return bad("names no owner of its blocks")
	case len(p.Blocks) != want:
		return bad("has %d blocks, the prompt fills %d", len(p.Blocks), want)
	case len(p.First) != 0 && len(p.First) != q.N:
		return bad("has %d first tokens for %d choices", len(p.First), q.N)
	}
	for _, id := range p.Blocks {
		if id < 0 || int(id) >= e.cache.Blocks() {
			return bad("block %d is outside the pool of %d", id, e.cache.Blocks())
		}
	}
	for _, s := range p.First {
		if s.Token < 0 || int(s.Token) >= e.vocab {
			return bad("first token %d is outside the vocabulary of %d", s.Token, e.vocab)
		}
	}
	return q, nil
}

// outside finds a token id that the model does not have.
func (e *Engine) outside(ids []int32) (int32, bool) {
	for _, id := range ids {
		if id < 0 || int(id) >= e.vocab {
			return id, true
		}
	}
	return 0, false
}
