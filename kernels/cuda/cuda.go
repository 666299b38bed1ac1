// Package cuda runs models on an NVIDIA GPU (Hopper or later) through
// libxpyd_cuda.so, which scripts/build-cuda makes from this folder and which is
// opened at run time: building xpyd needs no CUDA. Builds without cgo, and
// machines without the library or a GPU, get ErrUnavailable from New.
//
// Weights and KV rows are bf16, sums are fp32. One Step is one call: Go fills a
// pinned descriptor, the library copies it once and launches everything,
// padded decode steps as one CUDA graph; tokens are drawn on the device.
//
// Non-goals: the same bits whatever the batch (the number of attention splits
// and the projections' kernels depend on it). Results of one and the same step
// are the same on every run and in every process with the same device and
// library, unless Options.Tune is set.
package cuda

import (
	"errors"
	"fmt"

	"github.com/xpyd/xpyd/kernels"
)

// Numerics names the arithmetic; see kernels.Info.
const Numerics = "cuda-bf16-1"

// ErrUnavailable says that this process cannot use a GPU: a build without cgo,
// no library, or no device. Errors of New wrap it together with the reason.
var ErrUnavailable = errors.New("CUDA is not available")

// LibraryEnv names the environment variable with the library's path.
const LibraryEnv = "XPYD_CUDA_LIB"

// Options size a Backend.
type Options struct {
	Library     string // path; "" is $XPYD_CUDA_LIB, next to the program, or the loader's path
	Device      int
	Blocks      int     // KV blocks; 0 fills MemoryPart of what is free after the weights
	MemoryPart  float64 // 0 is 0.9
	BlockTokens int     // positions a block, 1..256; 0 is 16
	MaxTokens   int     // tokens a step; 0 is 2048
	MaxSeqs     int     // sequences a step that are answered at once; 0 is 256
	NoGraphs    bool    // launch kernels one by one
	NoPDL       bool    // no programmatic dependent launch
	Tune        bool    // choose projections by timing: other bits in each process
}

func (o *Options) fill() error {
	def := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	def(&o.BlockTokens, 16)
	def(&o.MaxTokens, 2048)
	def(&o.MaxSeqs, 256)
	if o.MemoryPart == 0 {
		o.MemoryPart = 0.9
	}
	if o.Blocks < 0 || o.BlockTokens < 1 || o.BlockTokens > 256 || o.MaxTokens < 1 || o.MaxSeqs < 1 || o.MemoryPart < 0 || o.MemoryPart > 1 {
		return fmt.Errorf("bad options %+v", *o)
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

func checkArch(a *kernels.Arch) error {
	if a.HeadDim%8 != 0 || a.HeadDim > 256 || a.Hidden%8 != 0 {
		return fmt.Errorf("head_dim %d and hidden %d: want multiples of 8, head_dim at most 256", a.HeadDim, a.Hidden)
	}
	if a.Layers < 1 || a.Layers >= 1<<16 || a.KVHeads < 1 || a.KVHeads >= 1<<15 || a.Heads%a.KVHeads != 0 {
		return fmt.Errorf("bad architecture %+v", *a)
	}
	return nil
}
