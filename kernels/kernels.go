// Package kernels is the compute layer: a Backend holds one model's weights and one paged
// KV pool on one device, and executes whole steps on them.
//
// A step carries every sequence of the batch, prefill chunks and decode tokens together,
// and comes back with sampled tokens. So a GPU backend can turn it into one graph launch;
// callers never ask for a single operation.
//
// Scheduling, block allocation and tokenising are not its business. Callers (the engine)
// own the block ids; a Backend only reads and writes the rows they name. DESIGN.md defines
// KV layout and digests to the bit.
package kernels

import (
	"errors"
	"fmt"

	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kvlayout"
)

// DType is the element type of a weight tensor as it lies in memory.
type DType uint8

// Element types. Quantised GGUF tensors are dequantised to F32 by the reader.
const (
	F32 DType = iota
	F16
	BF16
	F8 // E4M3, no infinities, with Tensor.Scale
)

// Bytes returns the size of one element in bytes.
func (d DType) Bytes() int {
	switch d {
	case F32:
		return 4
	case F8:
		return 1
	}
	return 2
}

func (d DType) String() string {
	switch d {
	case F32:
		return "f32"
	case F16:
		return "f16"
	case BF16:
		return "bf16"
	case F8:
		return string(kvlayout.F8E4M3)
	}
	return fmt.Sprintf("dtype(%d)", uint8(d))
}

// Tensor is a row-major, little-endian weight. Projections are [out, in].
// Data begins at a multiple of the element size; an absent tensor has none.
type Tensor struct {
	DType DType
	Shape []int
	Data  []byte
	Scale []float32 // F8: factor of the elements, one a row or one for all
}

// Weights are a model's tensors: those of its arch.Config's Tensors, by place. A backend
// copies what it needs: the caller may unmap them after New returns.
type Weights map[arch.Place]Tensor

// Info describes a backend.
type Info struct {
	Name     string // "cpu", "cuda"
	Numerics string // blocks are shared only between equal strings; "cpu-f32-1"
	SIMD     string // "avx512", "avx2", "portable": shown, never compared
	Threads  int
	Ranks    int    // tensor-parallel ranks, of one process; 0 is 1
	Device   string // human readable
	Hidden   bool   // takes Seq.Hidden
	Verify   bool   // takes Seq.Verify
}

// Step is one forward pass over a batch. All slices stay owned by the caller
// and must not change until Step returns.
type Step struct {
	Seqs []Seq
	// OnLayer, when set, is called for each layer in order, once the layer's K and V rows
	// of every Seq lie in the pool with their digests. It runs on the stepping goroutine
	// and must not block: a push starts there before the next layer is computed.
	OnLayer func(layer int)
	// Arrivals are blocks that Seqs may read and that are still on their way, from an
	// Arriver or from gates. A layer is computed, and OnLayer called for it, once each of
	// them has delivered it or given up. The caller checks the verdict (as
	// HostArrival.Good) after the step: what a Seq computed from a bad block is worthless;
	// other Seqs are unaffected.
	Arrivals []Arrival
	// Hold, of a Holder, has the draws wait for its Draw: what Sample.Mask holds is not known yet.
	// No Seq then has Targets.
	Hold bool
}

// Seq is one sequence's part of a step: n = len(Tokens) new positions.
type Seq struct {
	Tokens []int32 // token ids at positions Pos .. Pos+n-1
	Pos    int     // absolute position of Tokens[0]; rows below Pos are in Blocks already
	Blocks []int32 // block table; covers at least Pos+n positions
	// After, when not 0, says that Tokens has one entry whose value is not known yet: the
	// result of draw After-1 of the previously launched step, counted over the Samples of
	// all its Seqs. Only a Launcher takes it.
	After int

	// Samples lists draws from the logits after the last token; usually none
	// (an inner prefill chunk), one, or n for the first token of n choices.
	Samples []Sample
	// Verify has Samples[i] drawn from the logits after Tokens[i]: there are as many. The tokens
	// behind the first are drafts: which of their rows count is the caller's business. It goes without
	// After, Targets, WantLogits and Hidden, and only a Backend whose Info says so takes it.
	Verify bool
	// Targets, when set, has len(Tokens) ids: Result.Prompt[i] is the log probability of
	// Targets[i] after Tokens[i] (prompt logprobs). A target of -1 is skipped and yields a
	// zero entry.
	Targets        []int32
	TargetLogprobs int  // how many top entries each Targets result lists
	WantLogits     bool // copy the last position's raw logits into Result.Logits
	Hidden         Hidden
}

// Hidden says which rows' hidden states a Seq asks for: behind the final norm, where the logits
// would be computed from. It then has no Samples, Targets or WantLogits.
type Hidden uint8

// What there is to ask for.
const (
	HiddenNone Hidden = iota
	HiddenLast        // the last row's
	HiddenAll         // every row's
)

// Rows is how many rows of n are asked for.
func (h Hidden) Rows(n int) int {
	switch h {
	case HiddenLast:
		return 1
	case HiddenAll:
		return n
	}
	return 0
}

// Bias adds Value to the logit of token ID.
type Bias struct {
	ID    int32
	Value float32
}

// Sample holds one draw's parameters, validated by the caller. The order is: raw logits ->
// Bias, Ban -> repetition, presence, frequency penalties -> Mask -> temperature -> top-k ->
// top-p -> min-p -> draw. Temperature 0 is argmax after bias, penalties and mask; the lowest id
// wins ties.
type Sample struct {
	Seed        uint64
	Choice      uint32 // choice index in 0..n-1
	Position    int    // absolute position of the token being drawn
	Temperature float32
	TopK        int     // <= 0: off
	TopP        float32 // 1: off
	MinP        float32 // 0: off
	Repetition  float32 // 1: off; over prompt and output tokens
	Presence    float32 // over output tokens
	Frequency   float32 // over output tokens
	Prompt      []int32 // read only when Repetition is on
	Output      []int32 // tokens so far; read only when a penalty is on
	Bias        []Bias
	Ban         []int32 // ids that must not be drawn (min_tokens)
	// Mask, when set, has a bit for each token, id i at bit i%32 of word i/32, in MaskWords words:
	// no token without its bit is drawn. Samples of a Seq may share it.
	Mask     []uint32
	Logprobs int // -1: none; else how many top entries to list
}

// MaskWords is the length of a mask over a vocabulary.
func MaskWords(vocab int) int { return (vocab + 31) / 32 }

// TokenLogprob is a token with its natural-log probability under the raw
// logits (before bias, penalties, mask, temperature), as vLLM's "raw_logprobs".
type TokenLogprob struct {
	ID      int32   `json:"id"`
	Logprob float32 `json:"logprob"`
	Rank    int32   `json:"rank"` // 1 is the most likely; 0 when not computed
}

// NoToken is drawn from logits that are all NaN: the model has no output, or none that the mask allows.
const NoToken = -1

// Sampled is one drawn token. If it is NoToken, nothing else is set.
type Sampled struct {
	Token int32          `json:"token"`
	Self  TokenLogprob   `json:"self"`          // set when Logprobs >= 0
	Top   []TokenLogprob `json:"top,omitempty"` // most likely first, len = Logprobs
}

// PromptLogprob answers one Targets entry.
type PromptLogprob struct {
	Self TokenLogprob   `json:"self"`
	Top  []TokenLogprob `json:"top,omitempty"`
}

// Result is one Seq's outcome.
type Result struct {
	Samples []Sampled       // one for each Seq.Samples entry
	Prompt  []PromptLogprob // one for each Seq.Targets entry
	Logits  []float32       // [vocab], when WantLogits
	Hidden  [][]float32     // [row][width], as Seq.Hidden asks
}

// Layout is how a model's KV lies in a pool of dtype: all of its heads, and its layers all alike.
func Layout(a *arch.Config, blockTokens int, dtype kvlayout.DType) kvlayout.Layout {
	if a.KVRank > 0 {
		return kvlayout.OfLatent(a.Layers, a.KVRank, a.RopeDim, blockTokens, dtype)
	}
	return kvlayout.Plain(a.Layers, a.KVHeads, a.HeadDim, blockTokens, dtype)
}

// Backend executes steps of one model over one KV pool. One goroutine calls Step; others
// may call the pool methods meanwhile for blocks that no running step writes.
type Backend interface {
	Info() Info
	Arch() arch.Config
	Layout() kvlayout.Layout
	Blocks() int // blocks in the pool
	// Step runs the batch and returns one Result for each Seq, valid until the next call of
	// Step. On ErrStepTooLarge it did nothing.
	Step(*Step) ([]Result, error)
	Pool
	Close() error
}

// Launcher is a Backend that takes a step while the one before it runs, so that the device
// need not wait for the host in between. Steps run in launch order. Step may be called when
// none is under way.
type Launcher interface {
	// Launch begins a step and returns; two may be under way. What the step refers to must
	// not change before Await has returned its results. On ErrStepTooLarge it did nothing,
	// and there is nothing to await.
	Launch(*Step) error
	// Await waits for the oldest step under way, calls its OnLayer meanwhile, and
	// returns what Step would. The results are valid until the next Launch. Each
	// successful Launch needs one Await.
	Await() ([]Result, error)
}

// Holder is a Launcher whose steps may begin before it is known what their draws may be.
type Holder interface {
	Launcher
	// Draw says that the masks of the step launched last, which has Step.Hold, are filled in. Until
	// then the only call that may come is Await of the step before it. That of the step itself returns
	// what went wrong here.
	Draw()
}

// Pool moves rows in and out of the KV pool. A layer's rows are packed as its kvlayout.Rows
// says. Digests are one uint64 a head: the sum of RowHash over the rows of all its planes.
type Pool interface {
	// Gather copies positions row .. row+n-1 (offsets inside the block) of one
	// layer into dst, packed. len(dst) must be the layer's PackedBytes(n).
	Gather(layer int, block int32, row, n int, dst []byte)
	// Scatter is the reverse. It leaves digests alone: see SetDigest.
	Scatter(layer int, block int32, row, n int, src []byte)
	// Digest writes the block's stored digest of one layer, one a head.
	Digest(layer int, block int32, dst []uint64)
	// SetDigest records the digest of rows 0 .. filled-1 of a block.
	SetDigest(layer int, block int32, filled int, digest []uint64)
	// CopyBlock copies rows 0 .. n-1 of every layer, with their digests
	// (recomputed when n is less than what src had filled). firstPos is the
	// absolute position of the block's row 0.
	CopyBlock(dst, src int32, firstPos, n int)
}

// Viewer is a Pool whose rows lie in this process's memory.
type Viewer interface {
	// View returns positions row .. row+n-1 of one layer of a block in place, packed as
	// Gather does, if they are one run of the pool, as whole blocks are. Writing to it
	// leaves digests alone: see SetDigest.
	View(layer int, block int32, row, n int) (run []byte, ok bool)
}

// PartViewer is a Pool of several ranks whose rows lie in this process's memory.
type PartViewer interface {
	// Parts appends where a block of one layer lies, a part a rank. Writing there leaves
	// digests alone: see SetDigest. A head that several ranks keep is in several parts, which
	// must be alike.
	Parts(parts []Part, layer int, block int32) []Part
}

// Part is a whole block of one layer as one rank keeps it, packed.
type Part struct {
	Layer *kvlayout.Layer // of the rank's heads
	Run   []byte
}

// Sharer is a Pool that may lie in memory that other processes can map.
type Sharer interface {
	// Shared describes that memory; the error says why there is none.
	Shared() (Shared, error)
}

// Shared is a pool as a file in memory: block b of layer l of rank r begins at byte
// Layers[r*layers+l] + b times the BlockBytes that the layer has there (Layout.Ranks).
type Shared struct {
	FD     int   // sealed against shrinking; the backend's own, valid until its Close
	Bytes  int64 // size of the file
	Ranks  int   // at least 1
	Layers []int64
	Pages  string // what backs it: "huge", "transparent" or "small"
}

// Watched is a Backend of several ranks that notices when one of them hangs.
type Watched interface {
	// Hung yields an error, at most once, when a rank has made no progress in a step for a
	// second and a half; it names the rank and wraps ErrHung. Every step fails from then on,
	// and only the end of the process frees what the rank uses. Nil: nobody watches.
	Hung() <-chan error
}

// ErrHung means that a rank hangs. Errors of Step wrap it and name the rank.
var ErrHung = errors.New("a rank hangs")

// ErrStepTooLarge means that a step exceeds what the backend takes at once in rows, draws,
// log probabilities, penalties or block tables. Nothing of it was begun; a step of fewer
// Seqs may fit. Errors of Step and Launch wrap it.
var ErrStepTooLarge = errors.New("the step has more than the backend takes at once")

// ErrNoHidden means that the backend gives no hidden states. Errors of Step and Launch wrap it.
var ErrNoHidden = errors.New("this backend gives no hidden states")

// Error is a failed backend call.
type Error struct {
	Call string // "step", "xk_step"
	Code int    // backend specific; 0 when it has none
	Err  error
}

func (e *Error) Error() string {
	if e.Code != 0 {
		return fmt.Sprintf("%s: code %d: %v", e.Call, e.Code, e.Err)
	}
	return fmt.Sprintf("%s: %v", e.Call, e.Err)
}

func (e *Error) Unwrap() error { return e.Err }
