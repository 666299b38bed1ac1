package cpu_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cpu"
	"github.com/xpyd/xpyd/kernels/kerneltest"
	"github.com/xpyd/xpyd/kvlayout"
)

func TestDigestFollowsOverwrites(t *testing.T) {
	a := shape(2, 32, 48, 4, 2, 8, 50)
	b := open(t, a, randomWeights(a, kernels.F32, 1), cpu.Options{Blocks: 4, BlockTokens: 8, Threads: 1})
	blocks := []int32{2, 0}
	feed := func(pos int, tokens ...int32) {
		mustStep(t, b, kernels.Seq{Tokens: tokens, Pos: pos, Blocks: blocks})
	}
	feed(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)
	digestsMatch(t, b, 2, 0, 8)
	digestsMatch(t, b, 0, 8, 3)
	feed(10, 12) // the last position again, with another token
	digestsMatch(t, b, 0, 8, 3)
	feed(11, 13)
	digestsMatch(t, b, 0, 8, 4)
	feed(9, 14) // back into the block: what follows leaves the digest
	digestsMatch(t, b, 0, 8, 2)
	blocks = []int32{0, 2} // reuse from offset 0, at another position
	feed(0, 1, 2, 3)
	digestsMatch(t, b, 0, 0, 3)
	feed(3, 4, 5, 6, 7, 8, 9, 10)
	digestsMatch(t, b, 0, 0, 8)
	digestsMatch(t, b, 2, 8, 2)
}

// A view is the pool's own memory: what Gather copies, and where Scatter writes.
func TestView(t *testing.T) {
	a := shape(2, 32, 48, 4, 2, 8, 50)
	b := open(t, a, randomWeights(a, kernels.F32, 1), cpu.Options{Blocks: 4, BlockTokens: 8, Threads: 1})
	l := b.Layout()
	mustStep(t, b, kernels.Seq{Tokens: randomTokens(rand.New(rand.NewPCG(1, 1)), 16, 50), Blocks: []int32{3, 1}})
	packed := make([]byte, l.Resolve()[0].BlockBytes())
	for layer := range l.Layers() {
		run, ok := b.View(layer, 1, 0, l.BlockTokens)
		b.Gather(layer, 1, 0, l.BlockTokens, packed)
		if !ok || !slices.Equal(run, packed) {
			t.Fatalf("layer %d: the view is not what Gather copies", layer)
		}
		run[5]++
		b.Gather(layer, 1, 0, l.BlockTokens, packed)
		if run[5] != packed[5] {
			t.Error("the view is a copy")
		}
	}
	for _, c := range [][4]int{{0, 1, 0, 7}, {0, 1, 1, 7}, {0, 4, 0, 8}, {0, -1, 0, 8}, {2, 1, 0, 8}, {-1, 1, 0, 8}} {
		if _, ok := b.View(c[0], int32(c[1]), c[2], c[3]); ok {
			t.Errorf("view of %v", c)
		}
	}
}

func TestGatherScatterCopy(t *testing.T) {
	a := shape(2, 32, 48, 4, 2, 8, 50)
	w := randomWeights(a, kernels.F32, 1)
	src := open(t, a, w, cpu.Options{Blocks: 4, BlockTokens: 8, Threads: 1})
	dst := open(t, a, w, cpu.Options{Blocks: 6, BlockTokens: 8, Threads: 1})
	tokens := randomTokens(rand.New(rand.NewPCG(1, 1)), 13, 50)
	mustStep(t, src, kernels.Seq{Tokens: tokens, Blocks: []int32{3, 1}})
	l := src.Layout()
	d := make([]uint64, l.Resolve()[0].Heads)
	move := func(from, to int32, n int) {
		rows := make([]byte, l.Resolve()[0].PackedBytes(n))
		for layer := range l.Layers() {
			src.Gather(layer, from, 0, n, rows)
			dst.Scatter(layer, to, 0, n, rows)
			src.Digest(layer, from, d)
			dst.SetDigest(layer, to, n, d)
		}
	}
	move(3, 5, 8)
	move(1, 0, 5)
	digestsMatch(t, dst, 5, 0, 8)
	digestsMatch(t, dst, 0, 8, 5)
	next := func(b *cpu.Backend, blocks ...int32) []float32 {
		return slices.Clone(mustStep(t, b, kernels.Seq{Tokens: []int32{7}, Pos: 13, Blocks: blocks, WantLogits: true})[0].Logits)
	}
	dst.CopyBlock(4, 0, 8, 5) // a full copy takes the digest
	dst.CopyBlock(2, 0, 8, 3) // a partial one hashes its rows
	digestsMatch(t, dst, 4, 8, 5)
	digestsMatch(t, dst, 2, 8, 3)
	want := next(src, 3, 1)
	for _, block := range []int32{0, 4} {
		if !sameBits(next(dst, 5, block), want) {
			t.Errorf("block %d: moved rows give other logits", block)
		}
		digestsMatch(t, dst, block, 8, 6)
	}
	// One head's slice of a gather is where the layout says.
	all, one := make([]byte, l.Resolve()[0].PackedBytes(8)), make([]byte, l.Resolve()[0].PackedBytes(1))
	src.Gather(1, 3, 0, 8, all)
	src.Gather(1, 3, 6, 1, one)
	for i := range 2 * l.Resolve()[0].Heads {
		if !slices.Equal(one[i*l.Resolve()[0].RowBytes(0):(i+1)*l.Resolve()[0].RowBytes(0)], all[(i*8+6)*l.Resolve()[0].RowBytes(0):(i*8+7)*l.Resolve()[0].RowBytes(0)]) {
			t.Errorf("run %d of row 6 differs", i)
		}
	}
}

// Other goroutines move blocks that no step writes while steps run.
func TestPoolBesideSteps(t *testing.T) {
	a := shape(2, 64, 96, 8, 4, 8, 64)
	b := open(t, a, randomWeights(a, kernels.F32, 1), cpu.Options{Blocks: 16, Threads: 2})
	kerneltest.PoolBesideSteps(t, b)
}

func TestPoolRefusesBadRanges(t *testing.T) {
	a := shape(1, 16, 16, 1, 1, 8, 8)
	b := open(t, a, randomWeights(a, kernels.F32, 1), cpu.Options{Blocks: 2, BlockTokens: 4, Threads: 1})
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
	f("digest of too many rows", func() { b.SetDigest(0, 0, 5, make([]uint64, 1)) })
	f("digest past the pool", func() { b.Digest(0, 2, make([]uint64, 1)) })
}

// A pool of any layout keeps what it is given, wherever it is cut, with the digests of
// its rows at their coordinates; nothing else in the pool changes. So does that of any number of
// ranks, and each head lies with all that keep it.
func TestPoolOfAnyLayout(t *testing.T) {
	for name, l := range kerneltest.Layouts(8) {
		for _, ranks := range []int{1, 2, 6} {
			if _, err := l.Ranks(ranks); err == nil {
				t.Run(fmt.Sprintf("%s, %d ranks", name, ranks), func(t *testing.T) { poolKeeps(t, l, ranks) })
			} else if ranks == 6 {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
}

func poolKeeps(t *testing.T, l kvlayout.Layout, ranks int) {
	const tokens, blocks, firstPos = 8, 5, 24
	p, err := cpu.NewRankedPool(l, blocks, ranks)
	if err != nil {
		t.Fatal(err)
	}
	r := rand.New(rand.NewPCG(1, 1))
	layers := l.Resolve()
	want := make([][]byte, len(layers)) // of block 3
	for i := range layers {
		layer := &layers[i]
		want[i] = make([]byte, layer.BlockBytes())
		for at := range want[i] {
			want[i][at] = byte(r.Uint32())
		}
		for at := 0; at < tokens; { // in pieces
			n := min(1+r.IntN(3), tokens-at)
			part := make([]byte, layer.PackedBytes(n))
			layer.Copy(part, n, 0, want[i], tokens, at, n)
			p.Scatter(i, 3, at, n, part)
			at += n
		}
		p.SetDigest(i, 3, tokens, digestOf(layer, firstPos, tokens, want[i]))
	}
	p.CopyBlock(1, 3, firstPos, tokens)
	p.CopyBlock(2, 3, firstPos, 5)
	for i := range layers {
		layer := &layers[i]
		for block, n := range map[int32]int{3: tokens, 1: tokens, 2: 5} {
			got, sums := make([]byte, layer.PackedBytes(n)), make([]uint64, layer.Heads)
			p.Gather(i, block, 0, n, got)
			part := make([]byte, len(got))
			layer.Copy(part, n, 0, want[i], tokens, 0, n)
			p.Digest(i, block, sums)
			if !slices.Equal(got, part) || !slices.Equal(sums, digestOf(layer, firstPos, n, part)) {
				t.Errorf("layer %d block %d: %d rows or their digests differ", i, block, n)
			}
		}
		if run, ok := p.(kernels.Viewer).View(i, 3, 0, tokens); ok != (ranks == 1) || ok && !slices.Equal(run, want[i]) {
			t.Errorf("layer %d: the view is not the packed block", i)
		}
		parts := p.(kernels.PartViewer).Parts(nil, i, 3)
		if len(parts) != ranks {
			t.Errorf("layer %d: %d parts of %d ranks", i, len(parts), ranks)
		}
		for r, part := range parts {
			its := make([]byte, part.Layer.BlockBytes())
			if kvlayout.CopyHeads(part.Layer, its, tokens, 0, layer, want[i], tokens, 0, tokens); !slices.Equal(part.Run, its) {
				t.Errorf("layer %d: rank %d does not have its heads", i, r)
			}
		}
		for _, block := range []int32{0, 4} {
			got := make([]byte, layer.BlockBytes())
			if p.Gather(i, block, 0, tokens, got); !slices.Equal(got, make([]byte, len(got))) {
				t.Errorf("layer %d: block %d was written to", i, block)
			}
		}
	}
}

// digestOf is a digest a head by its definition, one row after the other.
func digestOf(l *kvlayout.Layer, firstPos, n int, packed []byte) []uint64 {
	sums := make([]uint64, l.Heads)
	l.Parts(packed, n, func(plane, head int, rows, scales []byte) {
		size, scale := l.RowBytes(plane), l.ScaleBytes()
		for i := range n {
			row := slices.Concat(rows[i*size:(i+1)*size], scales[i*scale:(i+1)*scale])
			sums[head] += kernels.RowHash(l.Number, plane, l.FirstHead+head, firstPos+i, row)
		}
	})
	return sums
}

func TestNewPoolRefuses(t *testing.T) {
	l := kvlayout.Plain(2, 2, 8, 16, kvlayout.F32)
	if _, err := cpu.NewPool(l, 0); err == nil {
		t.Error("a pool of no blocks")
	}
	l.Groups[0].Heads.Count = 0
	if _, err := cpu.NewPool(l, 4); err == nil {
		t.Error("a pool of no heads")
	}
}
