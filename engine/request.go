package engine

import (
	"time"

	"github.com/xpyd/xpyd/kernels"
)

// Request is one generation: a prompt and N choices that continue it. Slices
// must not change after Submit.
type Request struct {
	ID string // for logs
	// Owner labels the request's blocks in the ledger, and must be unlike
	// any other live request's. Empty means one made from ID. A Prefilled
	// request names the label its blocks were reserved under.
	Owner string

	// Urgent puts the request before all others that wait: for a router's
	// probe, which must not queue behind what it is to make room for.
	Urgent bool

	Prompt []int32
	N      int // choices; 0 means 1
	Sampling
	MaxTokens  int // output tokens a choice; 0 means up to the context length
	MinTokens  int // EOS and StopTokens are banned before that many
	StopTokens []int32
	IgnoreEOS  bool
	Salt       string // of the prefix index: tenant, LoRA
	Priority   int8   // of its KV in the prefix index: kvcache.Chain

	// Logprobs and PromptLogprobs say how many top entries to list with each
	// token's own log probability; negative means none at all. Prompt
	// logprobs make the engine compute the whole prompt, cached or not.
	Logprobs       int
	PromptLogprobs int

	// PrefillOnly runs the prompt and draws one token for each choice, then
	// holds the blocks until Handle.Release.
	PrefillOnly bool
	// OnBlocks tells of prompt blocks whose rows of one layer are in the
	// pool, for PrefillOnly. Blocks found in the prefix cache come first,
	// for all layers; then, step by step, layer after layer, the blocks that
	// the step completed, and with the prompt's last step a partial last
	// block. It runs on the engine's goroutine, inside a step: it must not
	// block. Ready is read only and may be kept. Calls can come until
	// Handle.Done.
	OnBlocks func(layer int, ready []Ready)

	// Source may have KV rows of Prompt that the pool has not; nil: nobody has.
	Source Source

	// Prefilled starts from KV rows that another worker computed.
	Prefilled *Prefilled
}

// Sampling holds the parameters of every draw; kernels.Sample explains them.
type Sampling struct {
	Seed        uint64
	Temperature float32
	TopK        int     // <= 0: off
	TopP        float32 // 0 or 1: off
	MinP        float32
	Repetition  float32 // 0 or 1: off
	Presence    float32
	Frequency   float32
	Bias        []kernels.Bias
}

// Ready is a block whose rows of a layer lie in the pool.
type Ready struct {
	Index    int   // in the request's block table
	Block    int32 // pool id
	FirstPos int   // absolute position of row 0
	Rows     int   // filled rows
}

// Prefilled is a prompt whose KV rows are in place.
type Prefilled struct {
	// Blocks is the block table of exactly the prompt, held under
	// Request.Owner with one reference each. Once Submit has succeeded they
	// are the engine's to release; when it fails they stay the caller's.
	Blocks []int32
	// First are the N choices' first tokens, drawn by the other worker; they
	// are delivered as if drawn here. Empty means that the engine computes
	// the prompt's last position again and draws them itself.
	First []kernels.Sampled
	// CachedTokens and PromptLogprobs are handed on in PromptInfo. Unless it
	// computes the last position itself, the engine has no others.
	CachedTokens   int
	PromptLogprobs []kernels.PromptLogprob
}

// Finish says why a choice ended.
type Finish string

// Reasons. A failed or cancelled request has none: Handle.Next returns an
// error instead.
const (
	FinishNone   Finish = ""
	FinishStop   Finish = "stop"   // EOS or a stop token, which is the event's token
	FinishLength Finish = "length" // MaxTokens, or the context length; PrefillOnly's one token
)

// Event is one token of one choice.
type Event struct {
	Choice  int
	Index   int // of the token in the choice's output, from 0
	Sampled kernels.Sampled
	Finish  Finish
	Prompt  *PromptInfo // with the request's first event only
}

// PromptInfo is what became known by computing the prompt.
type PromptInfo struct {
	Tokens       int
	CachedTokens int // found in the prefix cache
	// Logprobs[i] is of prompt token i+1 after tokens 0..i; empty unless
	// asked for.
	Logprobs []kernels.PromptLogprob
	Queued   time.Duration // from Submit to the first step
	Prefill  time.Duration // from the first step to the first token
}

// Stats is the engine's load, for heartbeats.
type Stats struct {
	Running      int     // sequences in the batch
	Waiting      int     // sequences not started
	QueuedTokens int     // prompt tokens not yet computed
	KVUsed       float64 // 0..1 of the pool, held or in quarantine
}
