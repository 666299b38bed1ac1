package engine

import (
	"slices"
	"time"

	"github.com/xpyd/xpyd/kernels"
)

// Request is one generation: a prompt and N choices that continue it. Slices
// must not change after Submit.
type Request struct {
	ID string // for logs
	// Owner labels the request's blocks in the ledger, and must differ from any other live
	// request's. Empty: one is made from ID. A Prefilled request's is the label under which its
	// blocks were reserved.
	Owner string

	// Urgent puts the request before all others that wait. It is for a router's probe, which
	// must not wait for what it is to make room for.
	Urgent bool
	// Keep exempts the request from Config.ShedLate: what it is part of has begun.
	Keep bool

	Prompt []int32
	N      int // choices; 0 means 1
	Sampling
	// Guide binds the output of each choice; nil: nothing does. EOS then ends a choice wherever the guide
	// allows it, and there always: MinTokens, IgnoreEOS and StopTokens only have it not drawn while
	// anything else may come.
	Guide      Guide
	MaxTokens  int // output tokens a choice; 0 means up to the context length
	MinTokens  int // EOS and StopTokens are banned before that many
	StopTokens []int32
	IgnoreEOS  bool
	Promise    Promise // what it leaves out is the engine's: Config.Promise
	Salt       string  // of the prefix index: tenant, LoRA
	Priority   int8    // of its KV in the prefix index: kvcache.Chain

	// Logprobs and PromptLogprobs say how many top entries to list with each token's own log
	// probability; negative: no log probabilities. Prompt logprobs make the engine compute the
	// whole prompt, cached or not.
	Logprobs       int
	PromptLogprobs int
	// LogprobIDs are listed with each token instead of the top ones, if there are log probabilities;
	// empty: these are.
	LogprobIDs []int32

	// PrefillOnly runs the prompt, draws one token for each choice, and holds the blocks until
	// Handle.Release.
	PrefillOnly bool
	// RowsOnly has a PrefillOnly request draw nothing: whoever gets the rows goes on behind tokens
	// that were drawn before. It has no events and no prompt log probabilities.
	RowsOnly bool
	// OnBlocks is told, for PrefillOnly, of prompt blocks whose rows of one layer are in the
	// pool: first of blocks found in the prefix cache, for all layers; then, step by step and
	// layer by layer, of blocks that the step completed, and with the prompt's last step of a
	// partial last block. It runs on the engine's goroutine inside a step, so it must not block.
	// Ready is read only and may be kept. Calls can come until Handle.Done.
	OnBlocks func(layer int, ready []Ready)

	// Pooling asks for one vector of the prompt's hidden states, in Event.Pooled, and for no tokens.
	Pooling Pooling

	// Source may have KV rows of Prompt that the pool lacks; nil: nobody has.
	Source Source

	// Prefilled starts from KV rows that another worker computed.
	Prefilled *Prefilled

	// Given continues choices that another worker has begun: an entry for each; empty: none has.
	// They go on without events for these tokens. If it has drawn for all of them, nothing is drawn
	// behind the prompt, and there are no prompt logprobs.
	Given []Given
	// Offers asks for events that say when the request would better go on elsewhere.
	Offers bool
}

// Resumed is the prompt and what the first choice that goes on was given, if nothing is to be drawn
// behind the prompt and its rows are not here yet; else nil.
func (r *Request) Resumed() []int32 {
	if i := r.resumes(); i >= 0 {
		return slices.Concat(r.Prompt, r.Given[i].Tokens)
	}
	return nil
}

// resumes returns the first choice that goes on behind tokens of its own, as do all others that go
// on; -1: the prompt comes first.
func (r *Request) resumes() int {
	if r.Prefilled != nil || !r.begun() {
		return -1
	}
	return slices.IndexFunc(r.Given, func(g Given) bool { return !g.Done })
}

// Given is what another worker drew for a choice.
type Given struct {
	Tokens []int32 // none of them ends the choice
	Done   bool    // it has ended: nothing is drawn, and Tokens do not matter
}

// begun reports whether all choices have been: the prompt's logits are not needed.
func (r *Request) begun() bool {
	return len(r.Given) > 0 && !slices.ContainsFunc(r.Given, func(g Given) bool { return !g.Done && len(g.Tokens) == 0 })
}

// RowsDo reports whether the prompt's rows are all that the request needs of a prefill worker.
func (r *Request) RowsDo() bool { return r.begun() && r.PromptLogprobs < 0 }

// Pooling is how a prompt's hidden states, behind the final norm, become one vector.
type Pooling string

// The poolings.
const (
	PoolNone Pooling = ""
	PoolLast Pooling = "last" // the last token's
	PoolMean Pooling = "mean" // of all tokens: each is computed, cached or not
)

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
	Allowed     []int32   // nothing else is drawn; empty: anything is
	BadWords    [][]int32 // no choice's tokens have one of these among them
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
	// Blocks is the block table of exactly the prompt, held under Request.Owner with one
	// reference each. The engine releases them if Submit succeeds, else the caller does.
	Blocks []int32
	// First are the N choices' first tokens, drawn by the other worker and delivered as if
	// drawn here, except for a choice that is Given tokens. If empty, the engine computes the
	// prompt's last position again and draws them, unless all choices are Given theirs.
	First []kernels.Sampled
	// CachedTokens and PromptLogprobs are passed on in PromptInfo. The engine has no others,
	// unless it computes the last position.
	CachedTokens   int
	PromptLogprobs []kernels.PromptLogprob
}

// Finish says why a choice ended.
type Finish string

// Reasons. A failed or cancelled request has none: Handle.Next returns an error instead.
const (
	FinishNone   Finish = ""
	FinishStop   Finish = "stop"   // EOS or a stop token, which is the event's token
	FinishLength Finish = "length" // MaxTokens, or the context length; PrefillOnly's one token
)

// Event is one token of one choice; or an Offer, and then only Choice is set besides; or the vector that
// Request.Pooling asks for, with Prompt.
type Event struct {
	Choice  int
	Offer   Offer
	Index   int // of the token in the choice's output, from 0
	Sampled kernels.Sampled
	Finish  Finish
	Prompt  *PromptInfo // with the request's first event only
	Pooled  []float32   // [width of the model], not normalised
}

// PromptInfo is what computing the prompt yielded.
type PromptInfo struct {
	Tokens       int
	CachedTokens int // found in the prefix cache
	// Logprobs[i] is of prompt token i+1 after tokens 0..i; empty unless asked for.
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
	Steps        Steps
}

// Steps sums up the steps since the start.
type Steps struct {
	Count     int64
	Seconds   float64
	Decodes   int64   // sequences that decoded, in all steps
	Context   int64   // their tokens, summed over them
	Prompt    int64   // tokens of prompts
	Positions float64 // before each of the latter, summed over them
}

func (s *Steps) add(took time.Duration, members []member) {
	s.Count++
	s.Seconds += took.Seconds()
	for _, m := range members {
		if m.chunk == 1 {
			s.Decodes++
			s.Context += int64(m.at) + 1
			continue
		}
		s.Prompt += int64(m.chunk)
		s.Positions += positions(m.chunk, m.at)
	}
}
