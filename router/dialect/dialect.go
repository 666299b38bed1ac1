// Package dialect knows the engines' protocols, one file each: the rules for splitting a
// request between two engines, the requests of the two legs, and how to read prefill's answer.
// It sends nothing. Dispatch obeys a dialect's Rules without knowing whose they are.
package dialect

import (
	"maps"
	"slices"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

const headerDPRank = "x-data-parallel-rank" // vLLM's and SGLang's

// Order is how the two legs follow each other.
type Order uint8

// Orders.
const (
	Together     Order = iota // both at once
	PrefillFirst              // prefill's whole answer, then decode
	Alone                     // one leg: decode does both phases
)

func (o Order) String() string { return [...]string{"together", "prefill first", "alone"}[o] }

// Shape is a kind of request that a dialect may be unable to split.
type Shape string

// Shapes, which headers and metrics show as reasons of a fall-back.
const (
	Choices        Shape = "n"
	Batch          Shape = "batch"
	Echo           Shape = "echo"
	Logprobs       Shape = "logprobs"
	PromptLogprobs Shape = "prompt_logprobs"
	Chat           Shape = "chat"
	Twice          Shape = "duplicate_field" // one that the split would have to change
)

// Shapes lists all of them.
var Shapes = []Shape{Choices, Batch, Echo, Logprobs, PromptLogprobs, Chat, Twice}

// Rules tell the router how to treat the legs of one dialect.
type Rules struct {
	Order Order

	// Typed: failures carry an outcome, and decode sends its header with the first token. Of
	// other engines only the status counts, and the first event is the first sign of success.
	Typed bool

	// Splits are the shapes that can be split, beside one prompt with one choice. With Falls,
	// decode alone may serve the others; without, they are refused.
	Splits []Shape
	Falls  bool

	// Linger is how long a useless prefill leg may go on before its connection is closed,
	// because these engines strand blocks if that interrupts a transfer; 0: not at all.
	Linger time.Duration
	// Hedges: a request may go to a second pair, as cancelling the slower one strands nothing.
	Hedges bool
	// Hold is how long prefill keeps what decode does not collect, Gap how long decode may take
	// to get its request after prefill's answer.
	Hold, Gap time.Duration
	// Watched: decode can wait in vain after prefill's answer, so until decode's first event
	// the router watches the clock and whether prefill lives.
	Watched bool
	// Hint explains a decode that stays silent.
	Hint string
	// Usage: prefill counts the prompt's part of the usage.
	Usage bool
	// Peers: the workers fetch what they lack of a prompt from others.
	Peers bool
	// MaxAnswer: decode obeys ticket.HeaderMaxAnswer.
	MaxAnswer bool
	// TakesOver: decode says which tokens it sent, and goes on from those that another sent.
	TakesOver bool
	// Promises: decode obeys ticket.HeaderPromise, and tells prefill.
	Promises bool
	// Salts: decode obeys ticket.HeaderCacheSalt, and tells prefill.
	Salts bool
	// Replays: the engine says which tokens it sent if a request asks for them (return_token_ids), in
	// streams of both APIs, sends whole characters, and takes tokens as a completion's prompt.
	Replays bool
}

// Cannot returns the first shape of the request that cannot be split, or "".
func (r *Rules) Cannot(top *openai.Top) Shape {
	for _, s := range [...]struct {
		is    bool
		shape Shape
	}{
		{top.N > 1, Choices}, {top.Prompts > 1, Batch}, {top.Echo, Echo}, {top.Logprobs, Logprobs},
		{top.PromptLogprobs, PromptLogprobs}, {top.Messages, Chat}, {top.Twice != "", Twice},
	} {
		if s.is && !slices.Contains(r.Splits, s.shape) {
			return s.shape
		}
	}
	return ""
}

// Exchange is one attempt at one request.
type Exchange struct {
	RequestID string
	Link      ticket.Link
	Path      string // as the client sent it
	Body      []byte // as the client sent it
	Top       *openai.Top
	Seed      int64 // for a body without one
	Prefill   *fleet.Instance
	Decode    *fleet.Instance
	// PrefillRank and DecodeRank are data-parallel ranks from 1; 0 lets the dialect choose.
	PrefillRank, DecodeRank int

	Left  time.Duration // until the request's deadline
	Probe bool
	// Trace is what the client sent as traceparent and tracestate.
	Trace [2]string
	// Authorization is the client's header, if engines may see it.
	Authorization string

	// Promise is ticket.HeaderPromise, if Promises; "": what the workers promise.
	Promise string

	// CacheSalt is ticket.HeaderCacheSalt, if Salts; "": none.
	CacheSalt string

	// Peer is one of our own workers that has more of the prompt than the pair; or nil.
	Peer *Peer

	// Tokens has decode say which tokens each event stands for, if TakesOver. Given is what
	// another decode said so far, as JSON; nil at a stream's beginning.
	Tokens bool
	Given  []byte
	// Brought: decode has brought the KV of the prompt, and of what was given, from Peer. Without
	// it decode refuses.
	Brought bool

	// Facts is what Dialect.Learn read.
	Facts Facts
	// Kept is Result.Kept of a prefill that goes first.
	Kept Kept
}

// Peer is a worker that has the first tokens of a prompt.
type Peer struct {
	Instance *fleet.Instance
	Tokens   int
}

// Brought is what decode has brought of a stream that is to go on there.
type Brought struct {
	Prompt bool // all of the prompt is there
	Tokens int  // whose KV has come
}

// Reply is the whole answer of a leg that does not carry the response.
type Reply struct {
	Status      int
	ContentType string
	Outcome     string // ticket.HeaderOutcome
	Body        []byte
}

// Kept is what prefill's answer hands to decode's request. It aliases the answer.
type Kept struct {
	Params []byte // raw JSON
	Tokens []byte // raw JSON list of the prompt's ids, if decode need not tokenise
	Usage  []byte // raw JSON
}

// Result is what prefill's answer says.
type Result struct {
	Outcome ticket.Outcome
	Message string
	Kept    Kept
	// Prompt is prefill's count, if Counted.
	Prompt  openai.PromptUsage
	Counted bool
	// Final is the response to the client if prefill left nothing for decode to do, else nil.
	Final []byte
}

// Dialect is one engine protocol.
type Dialect struct {
	Rules
	// Prefill and Decode set the method, path and headers of a leg and return its body in
	// pieces, which may alias the client's.
	Prefill, Decode func(h *fasthttp.RequestHeader, x *Exchange) [][]byte
	// Bring is a request that decode bring what Peer has of a stream; Brought reads the answer. Nil:
	// it cannot.
	Bring   func(h *fasthttp.RequestHeader, x *Exchange) [][]byte
	Brought func(Reply) (Brought, error)
	// Result reads how the prefill leg ended. It and Prefill are nil for engines Alone.
	Result func(Reply) Result
	// Ask returns a URL at which prefill tells more than the configuration, and Learn reads
	// the answer, which holds until an attempt fails. Nil: nothing is asked.
	Ask   func(p *fleet.Instance) string
	Learn func(body []byte) (Facts, error)
}

// Facts is what a prefill engine says about itself: its id by data-parallel rank.
type Facts struct {
	Engines map[int]string
}

var dialects = map[string]*Dialect{
	fleet.Native:              &native,
	"openai":                  &openAI,
	"vllm-nixl":               &nixlPull,
	"vllm-nixl-push":          &nixlPush,
	"vllm-mooncake":           &mooncake,
	"vllm-offloading":         &offloading,
	"vllm-p2pnccl":            &p2pNccl,
	"storage":                 &storage,
	"sglang":                  &sglang,
	"trtllm":                  &trtContextFirst,
	"trtllm-generation-first": &trtGenerationFirst,
}

// For returns the dialect of that name, or nil.
func For(name string) *Dialect { return dialects[name] }

// Names lists all dialects, in alphabetical order.
func Names() []string { return slices.Sorted(maps.Keys(dialects)) }
