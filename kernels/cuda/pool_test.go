//go:build cuda && cgo && linux

package cuda_test

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cuda"
	"github.com/xpyd/xpyd/kernels/kerneltest"
)

func TestDigestFollowsOverwrites(t *testing.T) {
	a := families()["llama gqa2 8"]
	b := open(t, a, randomWeights(a, 1), cuda.Options{Blocks: 4, BlockTokens: 8})
	r := rand.New(rand.NewPCG(1, 2))
	blocks := []int32{2, 0}
	step := func(pos, n int) {
		t.Helper()
		mustStep(t, b, kernels.Seq{Tokens: randomTokens(r, n, a.Vocab), Pos: pos, Blocks: blocks})
		for i, block := range blocks {
			if rows := min(pos+n-8*i, 8); rows > 0 {
				digestsMatch(t, b, block, 8*i, rows)
			}
		}
	}
	step(0, 5)
	step(5, 1)
	step(5, 1) // the last position again
	step(6, 7)
	step(3, 2) // a block cut back
	step(5, 9)
	step(0, 1)
}

func TestPoolMovesRows(t *testing.T) {
	for _, name := range []string{"llama gqa2 8", "llama gqa4 128", "qwen3 gqa2 80"} {
		a := families()[name]
		b := open(t, a, randomWeights(a, 1), cuda.Options{Blocks: 8, BlockTokens: 16})
		l := b.Layout()
		r := rand.New(rand.NewPCG(1, 2))
		mustStep(t, b, kernels.Seq{Tokens: randomTokens(r, 16, a.Vocab), Blocks: []int32{3}})
		whole, part, back := make([]byte, l.Resolve()[0].BlockBytes()), make([]byte, l.Resolve()[0].PackedBytes(5)), make([]byte, l.Resolve()[0].BlockBytes())
		d := make([]uint64, l.Resolve()[0].Heads)
		for layer := range l.Layers() {
			b.Gather(layer, 3, 0, 16, whole)
			b.Scatter(layer, 6, 0, 16, whole)
			b.Gather(layer, 3, 4, 5, part)
			b.Scatter(layer, 6, 4, 5, part)
			b.Digest(layer, 3, d)
			b.SetDigest(layer, 6, 16, d)
			if b.Gather(layer, 6, 0, 16, back); !slices.Equal(back, whole) {
				t.Fatalf("%s layer %d: rows changed on the way", name, layer)
			}
			for h := range 2 * l.Resolve()[0].Heads { // packed rows of heads
				if !slices.Equal(part[h*5*l.Resolve()[0].RowBytes(0):(h+1)*5*l.Resolve()[0].RowBytes(0)], whole[(h*16+4)*l.Resolve()[0].RowBytes(0):(h*16+9)*l.Resolve()[0].RowBytes(0)]) {
					t.Fatalf("%s layer %d: rows 4..8 of half-head %d differ", name, layer, h)
				}
			}
		}
		digestsMatch(t, b, 6, 0, 16)
		b.CopyBlock(1, 6, 0, 16)
		b.CopyBlock(2, 6, 0, 7)
		digestsMatch(t, b, 1, 0, 16)
		digestsMatch(t, b, 2, 0, 7)
		mustStep(t, b, kernels.Seq{Tokens: randomTokens(r, 3, a.Vocab), Pos: 7, Blocks: []int32{2}})
		digestsMatch(t, b, 2, 0, 10)
	}
}

// Other goroutines move blocks that no step writes while steps run.
func TestPoolBesideSteps(t *testing.T) {
	a := families()["llama gqa4 128"]
	b := open(t, a, randomWeights(a, 1), cuda.Options{Blocks: 16})
	kerneltest.PoolBesideSteps(t, b)
}

func TestPoolRefusesBadRanges(t *testing.T) {
	a := families()["llama gqa2 8"]
	b := open(t, a, randomWeights(a, 1), cuda.Options{Blocks: 2, BlockTokens: 4})
	buf := make([]byte, b.Layout().Resolve()[0].PackedBytes(2))
	f := func(name string, call func()) {
		t.Helper()
		defer func() {
			if recover() == nil {
				t.Errorf("%s: no panic", name)
			}
		}()
		call()
	}
	f("past the block", func() { b.Gather(0, 0, 3, 2, buf) })
	f("past the pool", func() { b.Gather(0, 2, 0, 2, buf) })
	f("negative block", func() { b.Scatter(0, -1, 0, 2, buf) })
	f("short buffer", func() { b.Scatter(0, 0, 0, 2, buf[1:]) })
	f("digest of too many rows", func() { b.SetDigest(0, 0, 5, make([]uint64, 4)) })
	f("digest past the pool", func() { b.Digest(0, 2, make([]uint64, 4)) })
}
