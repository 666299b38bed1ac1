package cpu_test

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cpu"
	"github.com/xpyd/xpyd/kernels/kerneltest"
)

// TestRanksSameBits: any number of ranks has the logits, the rows and the digests of one, whatever
// the threads, the chunks and the batch, and also where several keep the same head.
func TestRanksSameBits(t *testing.T) {
	for name, a := range families() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := randomWeights(a, kernels.F32, 7)
			tokens := randomTokens(rand.New(rand.NewPCG(11, 0)), 37, a.Vocab)
			chunks := [][]int{{37}, {3, 14, 1, 7}, {1}}
			ran := 0
			for _, size := range []int{16, 5} {
				var want [][][]float32
				var wantKV []byte
				var wantSums []uint64
				for _, ranks := range []int{1, 2, 3, 4, 8} {
					if cpu.CheckRanks(&a, ranks) != nil {
						continue
					}
					for _, threads := range []int{ranks, 2*ranks + 1} {
						b := open(t, a, w, cpu.Options{Blocks: 64, BlockTokens: size, Threads: threads, Ranks: ranks})
						for i, c := range chunks {
							logits, kv, sums := run(t, b, tokens, c, i, uint64(i))
							if len(want) <= i {
								want, wantKV, wantSums = append(want, logits), kv, sums
								continue
							}
							if !slices.EqualFunc(logits, want[i], sameBits) || !slices.Equal(kv, wantKV) || !slices.Equal(sums, wantSums) {
								t.Fatalf("%d ranks, %d threads, chunks %v, blocks of %d: other bits", ranks, threads, c, size)
							}
							if ranks > 1 {
								ran++
							}
						}
					}
				}
			}
			if ran == 0 && a.Heads > 1 {
				t.Errorf("%d heads were never divided", a.Heads)
			}
		})
	}
}

// TestRanksOnLayer: when a step tells of a layer, all ranks have their rows of it.
func TestRanksOnLayer(t *testing.T) {
	a := shape(3, 64, 172, 8, 2, 8, 64)
	w := randomWeights(a, kernels.F32, 1)
	one := open(t, a, w, cpu.Options{Blocks: 4})
	four := open(t, a, w, cpu.Options{Blocks: 4, Threads: 4, Ranks: 4}) // a head with two ranks
	seqs := []kernels.Seq{{Tokens: randomTokens(rand.New(rand.NewPCG(1, 1)), 40, a.Vocab), Blocks: []int32{3, 0, 2}}}
	mustStep(t, one, seqs...)
	layer := one.Layout().Resolve()[0]
	told := 0
	step := &kernels.Step{Seqs: seqs, OnLayer: func(l int) {
		told++
		for _, block := range seqs[0].Blocks[:2] {
			want, got := make([]byte, layer.BlockBytes()), make([]byte, layer.BlockBytes())
			one.Gather(l, block, 0, 16, want)
			if four.Gather(l, block, 0, 16, got); !slices.Equal(got, want) {
				t.Errorf("layer %d block %d differs when it is told of", l, block)
			}
			for _, p := range four.Parts(nil, l, block) {
				sums, stored := make([]uint64, p.Layer.Heads), make([]uint64, layer.Heads)
				kernels.DigestRows(p.Layer, map[int32]int{3: 0, 0: 16}[block], 16, p.Run, sums)
				if four.Digest(l, block, stored); sums[0] != stored[p.Layer.FirstHead] {
					t.Errorf("layer %d block %d: another digest than that of its rows", l, block)
				}
			}
		}
	}}
	if _, err := four.Step(step); err != nil || told != 3 {
		t.Errorf("told of %d layers, %v", told, err)
	}
}

// TestRanksBesideSteps: blocks that no step writes may be moved meanwhile.
func TestRanksBesideSteps(t *testing.T) {
	a := shape(2, 64, 96, 4, 2, 16, 64)
	kerneltest.PoolBesideSteps(t, open(t, a, randomWeights(a, kernels.F32, 1), cpu.Options{Blocks: 16, Threads: 4, Ranks: 4}))
}

func TestCheckRanks(t *testing.T) {
	f := func(heads, kv, ranks int, part string) {
		t.Helper()
		a := shape(1, 16, 16, heads, kv, 8, 8)
		err := cpu.CheckRanks(&a, ranks)
		if (err == nil) != (part == "") || err != nil && !strings.Contains(err.Error(), part) {
			t.Errorf("%d ranks of %d and %d heads: %v, want %q", ranks, heads, kv, err, part)
		}
		_, err = cpu.New(a, randomWeights(a, kernels.F32, 1), cpu.Options{Blocks: 1, Ranks: ranks, Threads: 1})
		if (err == nil) != (part == "") {
			t.Errorf("%d ranks of %d and %d heads: a backend says %v", ranks, heads, kv, err)
		}
	}
	f(8, 4, 1, "")
	f(8, 4, 2, "")
	f(8, 4, 8, "") // two for each KV head
	f(8, 1, 8, "")
	f(8, 4, 3, "query heads")
	f(8, 4, 16, "query heads")
	f(6, 2, 3, "KV heads")
	f(12, 6, 4, "KV heads")
	f(8, 4, -1, "1..64")
	f(128, 1, 128, "1..64")
}
