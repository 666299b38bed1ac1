// Package dialect knows the engines' protocols, one file each: the rules by
// which a request is split between two engines, the requests of the two legs,
// and how prefill's answer is read. It sends nothing.
//
// A dialect is mostly data (Rules), which router's dispatch obeys without
// knowing whose they are.
package dialect

import (
	"slices"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/openai"
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
	HeaderMaxAnswer    = "x-xpyd-max-answer"    // bytes that the router takes of an answer that does not stream
	HeaderKVPeer       = "x-xpyd-kv-peer"       // ID EPOCH URL KV TOKENS of a worker that has more of the prompt
	HeaderDPRank       = "x-data-parallel-rank" // vLLM's and SGLang's
)

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

// Shapes; also the reasons of a fall-back, as headers and metrics show them.
const (
	Choices        Shape = "n"
	Batch          Shape = "batch"
	Echo           Shape = "echo"
	Logprobs       Shape = "logprobs"
	PromptLogprobs Shape = "prompt_logprobs"
	Chat           Shape = "chat"
	Twice          Shape = "duplicate_field" // one that the split would have to change
)

// Shapes is all of them.
var Shapes = []Shape{Choices, Batch, Echo, Logprobs, PromptLogprobs, Chat, Twice}

// Rules is how the legs of one dialect are treated.
type Rules struct {
	Order Order
	Link  string // what links the legs, for people

	// Typed says that failures carry an outcome, and that decode's header
	// waits for its first token. Of other engines only the status counts, and
	// the first event is the first sign of success.
	Typed bool

	// Splits is the shapes, beside a single prompt with one choice, that can
	// be split. Falls says that others may be given to decode alone; without
	// it they are refused.
	Splits []Shape
	Falls  bool

	// Linger is how long a prefill leg that lost its purpose may go on until
	// its connection is closed, because these engines strand blocks when that
	// happens in the middle of a transfer; 0 closes it at once.
	Linger time.Duration
	// Hedges says that a request may go to a second pair, because cancelling the
	// slower one strands nothing.
	Hedges bool
	// Hold is how long prefill keeps what decode does not collect, and Gap
	// what may pass from prefill's answer until decode has its request.
	Hold, Gap time.Duration
	// Watched says that decode can wait in vain after prefill's answer, so
	// that the router has to look at the clock and at prefill's life until
	// decode's first event.
	Watched bool
	// Hint is what is known about a decode that stays silent.
	Hint string
	// Usage says that the prompt's part of the usage is prefill's to know.
	Usage bool
}

// Cannot returns the first shape of the request that cannot be split, "" when
// it can.
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
	// PrefillRank and DecodeRank are data-parallel ranks from 1; 0 leaves the
	// choice to the dialect.
	PrefillRank, DecodeRank int

	Left  time.Duration // until the request's deadline
	Probe bool
	// Trace is what the client sent as traceparent and tracestate.
	Trace [2]string
	// Authorization is the client's header, if engines are to see it.
	Authorization string

	// Peer has more of the prompt than the pair; nil: nobody is known to. Of our
	// own workers only.
	Peer *Peer

	// Facts is what was asked of prefill; see Asker.
	Facts Facts
	// Kept is Result.Kept of a prefill that goes first.
	Kept Kept
}

// Peer is a worker that has the first tokens of a prompt.
type Peer struct {
	Instance *fleet.Instance
	Tokens   int
}

// Answer is the whole answer of a leg that does not carry the response.
type Answer struct {
	Status      int
	ContentType string
	Outcome     string // HeaderOutcome
	Body        []byte
}

// Kept is what prefill's answer hands to decode's request; it aliases the
// answer.
type Kept struct {
	Params []byte // raw JSON
	Tokens []byte // raw JSON list of the prompt's ids, if decode shall not tokenise
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
	// Final is the response to the client, of a prefill that left nothing for
	// decode to do; nil otherwise.
	Final []byte
}

// Dialect is one engine protocol. Prefill and Decode set the method, path and
// headers of a leg and return its body in pieces, which may alias the
// client's.
type Dialect interface {
	Rules() *Rules
	Prefill(h *fasthttp.RequestHeader, x *Exchange) [][]byte
	Decode(h *fasthttp.RequestHeader, x *Exchange) [][]byte
	// Result reads how the prefill leg ended. It does not look at x.Body.
	Result(x *Exchange, a Answer) Result
}

// Facts is what a prefill engine says about itself: its id by data-parallel
// rank.
type Facts struct {
	Engines map[int]string
}

// Asker is a dialect whose exchanges need to know more of prefill than the
// configuration says. The answer holds until an exchange with it fails.
type Asker interface {
	// Ask is the URL to GET.
	Ask(p *fleet.Instance) string
	// Learn reads the answer.
	Learn(body []byte) (Facts, error)
}

var dialects = map[string]Dialect{
	"native":                  Native{},
	"openai":                  OpenAI{},
	"vllm-nixl":               NIXLPull{},
	"vllm-nixl-push":          NIXLPush{},
	"vllm-mooncake":           Mooncake{},
	"vllm-offloading":         Offloading{},
	"vllm-p2pnccl":            P2pNccl{},
	"storage":                 Storage{},
	"sglang":                  SGLang{},
	"trtllm":                  TRTContextFirst{},
	"trtllm-generation-first": TRTGenerationFirst{},
}

// For returns the dialect of that name, nil when there is none.
func For(name string) Dialect { return dialects[name] }

// Names is all dialects, in alphabetical order.
func Names() []string {
	names := make([]string, 0, len(dialects))
	for n := range dialects {
		names = append(names, n)
	}
	slices.Sort(names)
	return names
}
