package kerneltest

import (
	"sync"
	"testing"

	"github.com/xpyd/xpyd/kernels"
)

// PoolBesideSteps moves blocks that no step writes from other goroutines while
// steps run. The pool has 16 blocks of 16 positions.
func PoolBesideSteps(t *testing.T, b kernels.Backend) {
	t.Helper()
	Step(t, b, kernels.Seq{Tokens: make([]int32, 16), Blocks: []int32{9}})
	var wg sync.WaitGroup
	for g := range int32(3) {
		wg.Go(func() {
			layers := b.Layout().Resolve()
			for i := range 200 {
				layer := i % len(layers)
				buf, d := make([]byte, layers[layer].BlockBytes()), make([]uint64, layers[layer].Heads)
				b.Gather(layer, 9, 0, 16, buf)
				b.Digest(layer, 9, d)
				b.Scatter(layer, 10+g, 0, 16, buf)
				b.SetDigest(layer, 10+g, 16, d)
				b.CopyBlock(13+g, 9, 0, 16)
			}
		})
	}
	for i := range 40 {
		Step(t, b, kernels.Seq{Tokens: make([]int32, 30), Pos: i, Blocks: []int32{0, 1, 2, 3, 4}},
			kernels.Seq{Tokens: []int32{5}, Pos: 16 + i%16, Blocks: []int32{9, 8}})
	}
	wg.Wait()
	for _, block := range []int32{9, 10, 11, 12, 13, 14, 15} {
		DigestsMatch(t, b, block, 0, 16)
	}
}
