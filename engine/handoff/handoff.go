// Package handoff is what the workers of a pair tell each other inside a ticket: decode's order
// (how to draw the first tokens) and prefill's draft (the tokens drawn). kvconn carries both
// without reading them.
//
// Both are JSON: they are small, and an older release ignores a newer one's fields. A draft's
// prompt log probabilities, of which there can be many, are packed.
package handoff

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// Bounds of what a peer may ask for or send.
const (
	maxTickets  = 4096    // of one link
	maxPeers    = 4       // of one order
	maxLogprobs = 1 << 18 // entries a position: any vocabulary
	maxList     = 1 << 16
	maxOrder    = 4 << 20 // bytes
	maxTTFT     = time.Hour
	entryBytes  = 128 // of one log probability in JSON, with room to spare
	// MaxGrammar bounds Guide.Text in bytes: an order of it must be one, however JSON writes it.
	MaxGrammar = 512 << 10
	maxMark    = 256 // bytes of a kind or a mark
)

// Order is decode's side: everything but the prompt that decides the first token of each choice.
type Order struct {
	Sampling       engine.Sampling `json:"sampling"`
	N              int             `json:"n"`
	MinTokens      int             `json:"min_tokens,omitempty"`
	StopTokens     []int32         `json:"stop_tokens,omitempty"`
	IgnoreEOS      bool            `json:"ignore_eos,omitempty"`
	Logprobs       int             `json:"logprobs"`        // -1: none
	PromptLogprobs int             `json:"prompt_logprobs"` // -1: none
	LogprobIDs     []int32         `json:"logprob_ids,omitempty"`
	Salt           string          `json:"salt,omitempty"`
	Priority       int8            `json:"priority,omitempty"` // of its KV: kvcache.Chain
	Urgent         bool            `json:"urgent,omitempty"`   // a router's probe: before waiting requests
	TTFT           time.Duration   `json:"ttft,omitempty"`     // that the request is promised; 0: what prefill promises
	// MayShed: decode knows ticket.Shed, and nothing of the request has begun. An older decode does not
	// say so, and would lose its session by that outcome.
	MayShed bool `json:"may_shed,omitempty"`

	// Peers have some of the prompt, and prefill may fetch from them what it lacks: decode itself,
	// which holds its part until the ticket is over, and workers that the router knows.
	Peers []ticket.Peer `json:"peers,omitempty"`
	// Cached asks for cached tokens, all or none; nothing is computed. Of the other fields only
	// Salt counts then; N is 0.
	Cached bool `json:"cached,omitempty"`

	// Rows asks for the prompt's rows alone: all choices have been begun, by another decode.
	Rows bool `json:"rows,omitempty"`

	// Guide binds the output; nil: nothing does. A prefill that cannot follow it draws nothing, and one
	// of an older release, which does not know it, does not say Draft.Guided: decode draws then.
	Guide *Guide `json:"guide,omitempty"`

	// Index and Of number the tickets of one link: a list of prompts needs one each. The link is
	// over when all Of are.
	Index int `json:"index"`
	Of    int `json:"of"`
}

// Guide is what binds a request's output, from which any worker with the same tokenizer makes the same
// engine.Guide.
type Guide struct {
	Kind string `json:"kind"` // of grammar
	Text string `json:"text"`
	// Compact JSON has no white space.
	Compact bool `json:"compact,omitempty"`
	// Begin is a mark that comes before what the grammar describes.
	Begin string `json:"begin,omitempty"`
	// Thinks is where the prompt leaves a model's reasoning, behind which the grammar begins.
	Thinks Thinks `json:"thinks,omitempty"`
}

// Thinks says whether reasoning comes before the answer.
type Thinks string

// Values of Thinks.
const (
	ThinksNot Thinks = ""     // the answer comes at once
	ThinksMay Thinks = "may"  // the model decides whether it thinks first
	ThinksNow Thinks = "does" // the prompt has begun the reasoning
)

func (g *Guide) check() error {
	switch {
	case g == nil:
	case len(g.Text) > MaxGrammar || len(g.Kind) > maxMark || len(g.Begin) > maxMark:
		return fmt.Errorf("read order: a grammar of %d bytes, of kind %.20q, behind a mark of %d bytes", len(g.Text), g.Kind, len(g.Begin))
	case g.Thinks != ThinksNot && g.Thinks != ThinksMay && g.Thinks != ThinksNow:
		return fmt.Errorf("read order: thinks is %.20q", g.Thinks)
	}
	return nil
}

// Encode renders the order for a ticket.
func (o *Order) Encode() ([]byte, error) { return encode("order", o) }

func encode(what string, v any) ([]byte, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("encode %s: %w", what, err)
	}
	return b, nil
}

// ParseOrder reads a peer's order and checks its bounds, but for token ids, which the engine
// checks.
func ParseOrder(b []byte) (*Order, error) {
	if len(b) > maxOrder {
		return nil, fmt.Errorf("read order: %d bytes, at most %d", len(b), maxOrder)
	}
	var o Order
	if err := json.Unmarshal(b, &o); err != nil {
		return nil, fmt.Errorf("read order: %w", err)
	}
	s := &o.Sampling
	for i := range o.Peers {
		if err := o.Peers[i].Validate(); err != nil {
			return nil, fmt.Errorf("read order: peer %d: %w", i, err)
		}
	}
	if err := o.Guide.check(); err != nil {
		return nil, err
	}
	switch {
	case len(o.Peers) > maxPeers:
		return nil, fmt.Errorf("read order: %d peers, at most %d", len(o.Peers), maxPeers)
	case o.Cached && (o.N != 0 || o.Of != 0 || len(o.Peers) > 0):
		return nil, fmt.Errorf("read order: a cached prefix has no choices, links and peers")
	case o.Cached:
		return &o, nil
	case o.N < 1 || o.N > engine.MaxChoices:
		return nil, fmt.Errorf("read order: n is %d, want 1 to %d", o.N, engine.MaxChoices)
	case o.Rows && o.PromptLogprobs >= 0:
		return nil, fmt.Errorf("read order: rows alone have no log probabilities")
	case o.Logprobs < -1 || o.Logprobs > maxLogprobs:
		return nil, fmt.Errorf("read order: logprobs is %d", o.Logprobs)
	case o.PromptLogprobs < -1 || o.PromptLogprobs > maxLogprobs:
		return nil, fmt.Errorf("read order: prompt_logprobs is %d", o.PromptLogprobs)
	case o.MinTokens < 0:
		return nil, fmt.Errorf("read order: min_tokens is %d", o.MinTokens)
	case len(o.StopTokens) > maxList || len(s.Bias) > maxList || len(s.BadWords) > maxList || len(o.LogprobIDs) > maxList:
		return nil, fmt.Errorf("read order: a list is over %d entries", maxList)
	case o.Priority < -50 || o.Priority > 50:
		return nil, fmt.Errorf("read order: priority is %d", o.Priority)
	case o.TTFT < 0 || o.TTFT > maxTTFT:
		return nil, fmt.Errorf("read order: ttft is %v", o.TTFT)
	case o.Of < 1 || o.Of > maxTickets || o.Index < 0 || o.Index >= o.Of:
		return nil, fmt.Errorf("read order: ticket %d of %d", o.Index, o.Of)
	case s.Temperature < 0 || s.TopP < 0 || s.TopP > 1 || s.MinP < 0 || s.MinP > 1 || s.Repetition < 0:
		return nil, fmt.Errorf("read order: temperature %v, top_p %v, min_p %v, repetition %v: out of range",
			s.Temperature, s.TopP, s.MinP, s.Repetition)
	}
	return &o, nil
}

// Draft is prefill's side: the tokens it drew, and what it learned by computing.
type Draft struct {
	First     []kernels.Sampled `json:"first"`            // one a choice; empty for a lease, for rows alone, and for a guide that prefill cannot follow
	Guided    bool              `json:"guided,omitempty"` // First was drawn as Order.Guide has it
	Prompt    PromptLogprobs    `json:"prompt,omitempty"` // [i] is of prompt token i+1
	Cached    int               `json:"cached"`           // prompt tokens found in prefill's cache
	QueueUS   int64             `json:"queue_us"`
	ComputeUS int64             `json:"compute_us"`
}

// Encode renders the draft for a commit. It fails if the model yielded NaN or infinity.
func (d *Draft) Encode() ([]byte, error) { return encode("draft", d) }

// ParseDraft reads a peer's draft for the order o of a prompt of tokens ids over a vocabulary of
// vocab ids. A lease has no first tokens, and has prompt log probabilities only if its prefill was
// asked for them.
func ParseDraft(b []byte, o *Order, lease bool, tokens, vocab int) (*Draft, error) {
	n := o.N
	if lease {
		n = 0
	}
	listed := o.Logprobs
	if ids := len(o.LogprobIDs); ids > 0 && listed >= 0 {
		listed = ids + 1 // and the token itself
	}
	if limit := 4096 + entryBytes*(n*(listed+4)+tokens*(o.PromptLogprobs+4)); len(b) > limit {
		return nil, fmt.Errorf("read draft: %d bytes, at most %d", len(b), limit)
	}
	var d Draft
	if err := json.Unmarshal(b, &d); err != nil {
		return nil, fmt.Errorf("read draft: %w", err)
	}
	prompt := 0
	if o.PromptLogprobs >= 0 && !(lease && len(d.Prompt) == 0) {
		prompt = tokens - 1
	}
	const day = int64(24 * 3600 * 1e6)
	switch {
	case len(d.First) != n && !((o.Rows || o.Guide != nil) && len(d.First) == 0):
		return nil, fmt.Errorf("read draft: %d first tokens, want %d", len(d.First), n)
	case len(d.Prompt) != prompt:
		return nil, fmt.Errorf("read draft: %d prompt log probabilities, want %d", len(d.Prompt), prompt)
	case d.Cached < 0 || d.Cached > tokens:
		return nil, fmt.Errorf("read draft: %d of %d tokens cached", d.Cached, tokens)
	case d.QueueUS < 0 || d.QueueUS > day || d.ComputeUS < 0 || d.ComputeUS > day:
		return nil, fmt.Errorf("read draft: %d us queued, %d us computed", d.QueueUS, d.ComputeUS)
	}
	known := func(id int32) bool { return id >= 0 && int(id) < vocab }
	entries := func(self kernels.TokenLogprob, top []kernels.TokenLogprob, most int) bool {
		ok := known(self.ID) && len(top) <= max(most, 0)
		for _, t := range top {
			ok = ok && known(t.ID)
		}
		return ok
	}
	for i, s := range d.First {
		if !known(s.Token) || !entries(s.Self, s.Top, listed) {
			return nil, fmt.Errorf("read draft: choice %d has a token outside the vocabulary, or too many", i)
		}
	}
	if o.Guide != nil && !d.Guided { // an older prefill's draws know nothing of it
		d.First = nil
	}
	for i, p := range d.Prompt {
		if !entries(p.Self, p.Top, o.PromptLogprobs) {
			return nil, fmt.Errorf("read draft: prompt position %d has a token outside the vocabulary, or too many", i+1)
		}
	}
	return &d, nil
}
