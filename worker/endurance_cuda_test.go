//go:build cuda && cgo && linux

package worker_test

import (
	"os"
	"slices"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kernels/cuda"
)

// TestGPUEndurance: the load of TestEndurance on a GPU in batch_invariant, for
// XPYD_CUDA_ENDURANCE (10s).
func TestGPUEndurance(t *testing.T) {
	length := 10 * time.Second
	if v := os.Getenv("XPYD_CUDA_ENDURANCE"); v != "" {
		var err error
		if length, err = time.ParseDuration(v); err != nil {
			t.Fatal(err)
		}
	}
	shape := arch.Config{ModelType: "llama", Layers: 8, Hidden: 1024, Intermediate: 2816, Heads: 8, KVHeads: 2, HeadDim: 128, Vocab: 32000, MaxPositions: 8192, NormEps: 1e-5, RopeTheta: 500000}
	b, err := cuda.NewRandom(shape, 1, cuda.Options{Blocks: 4096, MaxTokens: 2048, MaxSeqs: 256, BatchInvariant: true})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	var end time.Time
	e := endurance{backend: b, clients: 200, kinds: 100, prompt: 1500, output: 300, stepTokens: 2048, queued: 150, more: func(int) bool {
		if end.IsZero() { // the quiet run is over
			end = time.Now().Add(length)
		}
		return time.Now().Before(end)
	}}
	got := e.run(t)
	used := slices.Sorted(slices.Values(got.used))
	if len(used) == 0 {
		t.Fatal("no request ended")
	}
	held := used[len(used)/2]
	result("gpu.endurance_pool_held", "part of the pool", used, "all blocks", 1)
	t.Logf("%s, %v: %d requests whole, %d aborted, %d tokens, %d refused for length, %d for a full queue; held part of the pool: mean %.3f, median %.3f, most %.3f; %d blocks evicted",
		b.Info().Device, length, got.whole, got.aborted, got.tokens, got.refused, got.full, average(used), held, used[len(used)-1], got.evicted)
}
