// Package handoff is what the two workers of a pair tell each other inside a
// ticket: decode's order (how to draw the first tokens) and prefill's draft
// (the tokens drawn). kvconn carries both without looking in.
//
// Both are JSON: they are small, and an unknown field from a newer release is
// ignored by an older one.
package handoff

import (
	"encoding/json"
	"fmt"

	"github.com/xpyd/xpyd/internal/engine"
	"github.com/xpyd/xpyd/kernels"
)

// Bounds of what a peer may ask for or send.
const (
	maxChoices  = 1024
	maxLogprobs = 1024
	maxList     = 1 << 16
)

// Order is decode's side: everything that decides the first token of each
// choice, besides the prompt.
type Order struct {
	Sampling       engine.Sampling `json:"sampling"`
	N              int             `json:"n"`
	MinTokens      int             `json:"min_tokens,omitempty"`
	StopTokens     []int32         `json:"stop_tokens,omitempty"`
	IgnoreEOS      bool            `json:"ignore_eos,omitempty"`
	Logprobs       int             `json:"logprobs"`        // -1: none
	PromptLogprobs int             `json:"prompt_logprobs"` // -1: none
	Salt           string          `json:"salt,omitempty"`

	// Index and Of number the tickets of one link: a request with a list of
	// prompts needs one each. The link is over when all Of are.
	Index int `json:"index"`
	Of    int `json:"of"`
}

// Encode renders the order for a ticket.
func (o *Order) Encode() []byte { return mustJSON(o) }

// ParseOrder reads a peer's order and checks its bounds.
func ParseOrder(b []byte) (*Order, error) {
	var o Order
	if err := json.Unmarshal(b, &o); err != nil {
		return nil, fmt.Errorf("read order: %w", err)
	}
	switch {
	case o.N < 1 || o.N > maxChoices:
		return nil, fmt.Errorf("read order: n is %d, want 1 to %d", o.N, maxChoices)
	case o.Logprobs < -1 || o.Logprobs > maxLogprobs:
		return nil, fmt.Errorf("read order: logprobs is %d", o.Logprobs)
	case o.PromptLogprobs < -1 || o.PromptLogprobs > maxLogprobs:
		return nil, fmt.Errorf("read order: prompt_logprobs is %d", o.PromptLogprobs)
	case o.MinTokens < 0:
		return nil, fmt.Errorf("read order: min_tokens is %d", o.MinTokens)
	case len(o.StopTokens) > maxList || len(o.Sampling.Bias) > maxList:
		return nil, fmt.Errorf("read order: a list is over %d entries", maxList)
	case o.Of < 1 || o.Of > maxList || o.Index < 0 || o.Index >= o.Of:
		return nil, fmt.Errorf("read order: ticket %d of %d", o.Index, o.Of)
	}
	return &o, nil
}

// Draft is prefill's side: what it drew, and what it learned by computing.
type Draft struct {
	First     []kernels.Sampled       `json:"first"` // one a choice; empty for a lease
	Prompt    []kernels.PromptLogprob `json:"prompt,omitempty"`
	Cached    int                     `json:"cached"` // prompt tokens found in prefill's cache
	QueueUS   int64                   `json:"queue_us"`
	ComputeUS int64                   `json:"compute_us"`
}

// Encode renders the draft for a commit.
func (d *Draft) Encode() []byte { return mustJSON(d) }

// ParseDraft reads a peer's draft for an order of n choices over a vocabulary
// of vocab ids; n is 0 for a lease.
func ParseDraft(b []byte, n, vocab int) (*Draft, error) {
	var d Draft
	if err := json.Unmarshal(b, &d); err != nil {
		return nil, fmt.Errorf("read draft: %w", err)
	}
	if len(d.First) != n {
		return nil, fmt.Errorf("read draft: %d first tokens, want %d", len(d.First), n)
	}
	if d.Cached < 0 {
		return nil, fmt.Errorf("read draft: cached is %d", d.Cached)
	}
	ok := func(id int32) bool { return id >= 0 && int(id) < vocab }
	for i, s := range d.First {
		if !ok(s.Token) || !allIn(s.Top, ok) {
			return nil, fmt.Errorf("read draft: choice %d has a token outside the vocabulary", i)
		}
	}
	for i, p := range d.Prompt {
		if !ok(p.Self.ID) || !allIn(p.Top, ok) {
			return nil, fmt.Errorf("read draft: prompt position %d has a token outside the vocabulary", i)
		}
	}
	return &d, nil
}

func allIn(top []kernels.TokenLogprob, ok func(int32) bool) bool {
	for _, t := range top {
		if !ok(t.ID) {
			return false
		}
	}
	return true
}

// mustJSON encodes our own plain structs, which cannot fail short of a NaN;
// the sampler never yields one.
func mustJSON(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(fmt.Sprintf("encode %T: %v", v, err))
	}
	return b
}
