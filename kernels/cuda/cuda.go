// Package cuda runs models on an NVIDIA GPU (Hopper or later) through libxpyd_cuda.so,
// which scripts/build-cuda builds from this folder. The library is opened at run time:
// building xpyd needs no CUDA. Without cgo, the library or a GPU, New returns
// ErrUnavailable.
//
// Weights and KV rows are bf16, or fp16 (Options.FP16), or FP8 (Options.WeightsFP8, KVFP8);
// sums are fp32. A Step is one call: Go fills a pinned descriptor, the library copies it
// once and launches everything, padded decode steps as one CUDA graph. Tokens are drawn on
// the device. Open puts a model on several devices (Ranks).
//
// The same step gives the same results on every run and in every process with the same
// device and library, and with Options.Tune the same choices. Options.BatchInvariant makes a row's bits
// independent of the rest of the step and of how its prompt was cut, which costs speed.
package cuda

import (
	"cmp"
	"errors"
	"fmt"
	"strings"

	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvlayout"
)

// Numerics names the arithmetic of bf16 weights and KV; see kernels.Info. With
// Options.BatchInvariant it is InvariantNumerics and a digest of what the projections make
// of given rows: where the digest differs, tokens could. Options.FP16 has its own two,
// KVFP8 and WeightsFP8 have theirs.
const (
	Numerics          = "cuda-bf16-1"
	InvariantNumerics = "cuda-bf16-invariant-2-"
)

// ErrUnavailable means that this process cannot use a GPU: a build without cgo, no library,
// or no device. Errors of New wrap it together with the reason.
var ErrUnavailable = errors.New("CUDA is not available")

// ErrUnserved means that the kernels do not compute such a model.
var ErrUnserved = errors.New("no such model is served on a GPU")

// ErrAbsent accompanies ErrUnavailable where there was nothing to try: a build without cgo,
// or no library where none was asked for.
var ErrAbsent = errors.New("no library")

// LibraryEnv names the environment variable with the library's path.
const LibraryEnv = "XPYD_CUDA_LIB"

// Options size a Backend.
type Options struct {
	Library     string // path; "" is $XPYD_CUDA_LIB, next to the program, or the loader's path
	Device      int
	Devices     []int   // one rank each, for Open: instead of Device, which New takes
	Blocks      int     // KV blocks; 0 fills what MemoryPart leaves, at most MaxBlocks
	MemoryPart  float64 // part of the device's memory that this backend takes in all; 0 is 0.9
	BlockTokens int     // positions a block, 1..kvlayout.MaxBlockTokens; 0 is 16
	MaxTokens   int     // tokens a step; 0 is 2048
	MaxSeqs     int     // sequences with results in one step; 0 is 256
	NoGraphs    bool    // launch kernels one by one
	NoPDL       bool    // no programmatic dependent launch
	// Tune measures at start which kernel computes each projection fastest, by number of
	// rows. Choices is the folder in which that is kept for other processes, which then
	// compute the same bits; "": each process measures for itself. Not with BatchInvariant.
	Tune    bool
	Choices string
	// BatchInvariant makes a row's results a function of its sequence alone: not of the
	// batch, the chunks, the prefix hit or the phase. See kernels/DESIGN.md, section
	// 7; bench/README.md has the cost.
	BatchInvariant bool
	// FP16 keeps weights, activations and KV rows as fp16, not bf16: three more bits of
	// mantissa, and a range up to 65504, so the residual stream is fp32. F16 weights are
	// taken as they are, others rounded. Not with KVFP8 or WeightsFP8.
	FP16 bool
	// KVFP8 keeps KV rows as E4M3 with an f32 scale each: about half the bytes.
	// block_tokens must be a multiple of 16. Not with BatchInvariant.
	KVFP8 bool
	// WeightsFP8 keeps the layers' projections as E4M3 with a scale for each row: F8
	// weights are taken as they are, others rounded. Steps of more than 16 rows round their
	// activations too. Not with BatchInvariant.
	WeightsFP8 bool

	// Loaded, if set, is told how many bytes of the model have gone to the device, or to the first rank's; by one
	// goroutine.
	Loaded func(done, total int64)

	alone   bool // ranks never compute together, for tests
	part    int  // multiprocessors that steps have, as in xk.h, for tests
	anyGEMM bool // BatchInvariant: all projections by gemm_any.cu, for tests
}

// numerics returns the numerics string of these options; bits is the library's digest of
// its projections (BatchInvariant).
func (o *Options) numerics(bits uint32) string {
	weights, kv := "bf16", ""
	if o.FP16 {
		weights = "fp16"
	}
	if o.BatchInvariant {
		return fmt.Sprintf("cuda-%s-invariant-2-%08x", weights, bits)
	}
	if o.WeightsFP8 {
		weights = "fp8"
	}
	if o.KVFP8 {
		kv = "-kv8"
	}
	return "cuda-" + weights + kv + "-1"
}

// rankNumerics is numerics for several ranks, of whose digests bits is made: how many they are
// changes bits as a batch does, and counts only where a batch does not.
func (o *Options) rankNumerics(bits uint32, ranks int) string {
	name := o.numerics(bits)
	if o.BatchInvariant {
		name = strings.Replace(name, "invariant-2-", fmt.Sprintf("invariant-2-tp%d-", ranks), 1)
	}
	return name
}

// MaxBlocks bounds a pool whose size was not asked for: what the host keeps for each block
// adds up, too.
const MaxBlocks = 1 << 20

// Memory says where a backend's device memory goes, in bytes.
type Memory struct {
	Total   int64 // of the device
	Weights int64
	Scratch int64  // for steps, all taken at start
	Pool    int64  // the KV pool, digests included
	Block   int64  // one block, all layers
	Device  string // its name
	PCI     string // bus id, "0000:17:00.0"
}

const (
	// overhead is what the driver takes beside our own allocations: the context,
	// the kernels' code, graphs.
	overhead = 1 << 30
	// later of it is not taken yet when the pool is sized.
	later = 256 << 20
)

// poolBlocks returns how many blocks part of the device holds beside weights and scratch;
// or asked, if that is not 0 and free has room for it. Memory held by others is an error
// and does not shrink the pool: otherwise the order in which backends start would decide
// their sizes.
func poolBlocks(m Memory, free int64, part float64, asked int) (int, error) {
	const mib = 1 << 20
	blocks := asked
	if blocks == 0 {
		share := int64(part * float64(m.Total))
		room := share - m.Weights - m.Scratch - overhead
		if room < m.Block {
			return 0, fmt.Errorf("%.0f%% of %s's %d MiB is %d MiB: weights take %d, scratch for steps %d, the driver up to %d, and no KV block of %d KiB is left",
				100*part, m.Device, m.Total/mib, share/mib, m.Weights/mib, m.Scratch/mib, overhead/mib, m.Block>>10)
		}
		blocks = int(min(room/m.Block, MaxBlocks))
	}
	if need := int64(blocks) * m.Block; need > free-later {
		return 0, fmt.Errorf("a pool of %d blocks needs %d MiB beside weights and scratch; %d of %s's %d MiB are free: other processes, or a smaller part for each, must leave room",
			blocks, need/mib, max(free-later, 0)/mib, m.Device, m.Total/mib)
	}
	return blocks, nil
}

func (o *Options) fill() error {
	o.BlockTokens, o.MaxTokens, o.MaxSeqs = cmp.Or(o.BlockTokens, 16), cmp.Or(o.MaxTokens, 2048), cmp.Or(o.MaxSeqs, 256)
	o.MemoryPart = cmp.Or(o.MemoryPart, 0.9)
	if len(o.Devices) == 1 {
		o.Device = o.Devices[0]
	}
	if o.Blocks < 0 || o.BlockTokens < 1 || o.BlockTokens > kvlayout.MaxBlockTokens || o.MaxTokens < 1 || o.MaxSeqs < 1 || o.MemoryPart < 0 || o.MemoryPart > 1 {
		return fmt.Errorf("bad options %+v", *o)
	}
	switch {
	case o.FP16 && o.KVFP8:
		return errors.New("fp16 and an FP8 KV cache exclude each other")
	case o.FP16 && o.WeightsFP8:
		return errors.New("fp16 and FP8 weights exclude each other")
	case o.KVFP8 && o.BatchInvariant:
		return errors.New("an FP8 KV cache and batch invariance exclude each other")
	case o.WeightsFP8 && o.BatchInvariant:
		return errors.New("FP8 weights and batch invariance exclude each other")
	case o.KVFP8 && o.BlockTokens%16 != 0:
		return fmt.Errorf("an FP8 KV cache needs blocks of a multiple of 16 tokens, not %d", o.BlockTokens)
	}
	return nil
}

// buckets are the row counts of padded decode steps.
var buckets = [...]int{1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256}

// bucketFor returns the smallest bucket of at least n rows within most, or 0.
func bucketFor(n, most int) int {
	for _, b := range buckets {
		if b >= n && b <= most {
			return b
		}
	}
	return 0
}

// KVDType is the pool's.
func (o *Options) KVDType() kvlayout.DType {
	switch {
	case o.KVFP8:
		return kvlayout.F8E4M3
	case o.FP16:
		return kvlayout.F16
	}
	return kvlayout.BF16
}

func (o *Options) layout(a *arch.Config) kvlayout.Layout {
	return kernels.Layout(a, o.BlockTokens, o.KVDType())
}

// served returns the row layout if the kernels can serve the pool: all layers alike, K and
// V of one width, all of the model's heads.
func served(l kvlayout.Layout) (kvlayout.Rows, error) {
	g := &l.Groups[0]
	r, ok := l.Uniform()
	if !ok || len(l.Groups) != 1 || g.Kind != kvlayout.Full || g.Window != 0 || g.Heads.Count != g.Heads.Total ||
		len(g.Planes) != 2 || g.Planes[0].Dim != g.Planes[1].Dim {
		return r, fmt.Errorf("a KV cache of %v: the kernels serve one full group with K and V rows of one width", l)
	}
	return r, nil
}

// Bounds on mixtures: XK_EXPERTS, a warp's lanes, and what a thread of the last kernel keeps.
const (
	maxExperts  = 512
	maxPerToken = 32
	maxMixed    = 16384 // hidden
)

func checkArch(a *arch.Config, opt *Options) error {
	if attention, _ := a.Layer(0); attention == arch.MLA { // whose widths are no heads'
		return fmt.Errorf("%w: attention %q", ErrUnserved, attention)
	}
	switch {
	case opt.WeightsFP8 && (a.Hidden%16 != 0 || a.Heads*a.HeadDim%16 != 0):
		return fmt.Errorf("FP8 weights need widths %d and %d to be multiples of 16", a.Hidden, a.Heads*a.HeadDim)
	case opt.KVFP8 && a.HeadDim%16 != 0:
		return fmt.Errorf("an FP8 KV cache needs a head_dim of a multiple of 16, not %d", a.HeadDim)
	case a.HeadDim%8 != 0 || a.HeadDim > 256 || a.Hidden%8 != 0:
		return fmt.Errorf("head_dim %d and hidden %d: want multiples of 8, head_dim at most 256", a.HeadDim, a.Hidden)
	}
	if err := a.Validate(); err != nil {
		return fmt.Errorf("bad architecture: %w", err)
	}
	for i := range a.Layers {
		switch attention, feed := a.Layer(i); {
		case attention != arch.GQA:
			return fmt.Errorf("%w: layer %d: attention %q", ErrUnserved, i, attention)
		case feed == arch.Mixture && (a.Experts > maxExperts || a.ExpertsPerToken > maxPerToken || a.Hidden > maxMixed):
			return fmt.Errorf("%w: layer %d: %d experts, %d a token, of a width of %d: at most %d, %d and %d", ErrUnserved, i, a.Experts, a.ExpertsPerToken, a.Hidden, maxExperts, maxPerToken, maxMixed)
		case feed != arch.SwiGLU && feed != arch.Mixture:
			return fmt.Errorf("%w: layer %d: feed-forward %q", ErrUnserved, i, feed)
		}
	}
	return nil
}
