//go:build cuda && cgo && linux

package cuda_test

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/memfd"
	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cuda"
)

// image is all of a pool that moves: rows and digests of each layer and block.
type image struct {
	rows    [][]byte // [layer*blocks+block]
	digests [][]uint64
}

func imageOf(b kernels.Backend) image {
	l := b.Layout()
	m := image{make([][]byte, l.Layers()*b.Blocks()), make([][]uint64, l.Layers()*b.Blocks())}
	for layer := range l.Layers() {
		for block := range b.Blocks() {
			i := layer*b.Blocks() + block
			m.rows[i], m.digests[i] = make([]byte, l.Resolve()[0].BlockBytes()), make([]uint64, l.Resolve()[0].Heads)
			b.Gather(layer, int32(block), 0, l.BlockTokens, m.rows[i])
			b.Digest(layer, int32(block), m.digests[i])
		}
	}
	return m
}

// noise fills every block of a pool with bytes and digests that tell it from
// every other.
func noise(b kernels.Backend, seed uint64) {
	r := rand.New(rand.NewPCG(seed, 5))
	l := b.Layout()
	rows, sums := make([]byte, l.Resolve()[0].BlockBytes()), make([]uint64, l.Resolve()[0].Heads)
	for layer := range l.Layers() {
		for block := range b.Blocks() {
			for i := range rows {
				rows[i] = byte(r.Uint32())
			}
			for i := range sums {
				sums[i] = r.Uint64()
			}
			b.Scatter(layer, int32(block), 0, l.BlockTokens, rows)
			b.SetDigest(layer, int32(block), r.IntN(l.BlockTokens+1), sums)
		}
	}
}

// same compares a pool with what it should be, block by block.
func (m image) same(t *testing.T, what string, b kernels.Backend) {
	t.Helper()
	now := imageOf(b)
	for i := range m.rows {
		if !bytes.Equal(now.rows[i], m.rows[i]) || !slices.Equal(now.digests[i], m.digests[i]) {
			t.Fatalf("%s: layer %d block %d is not what it should be", what, i/b.Blocks(), i%b.Blocks())
		}
	}
}

// moved is dst with pairs copied from src.
func (m image) moved(src image, blocks, srcBlocks, first, layers int, pairs []kernels.BlockPair) image {
	m.rows, m.digests = slices.Clone(m.rows), slices.Clone(m.digests)
	for layer := first; layer < first+layers; layer++ {
		for _, p := range pairs {
			to, from := layer*blocks+int(p.Dst), layer*srcBlocks+int(p.Src)
			m.rows[to], m.digests[to] = src.rows[from], src.digests[from]
		}
	}
	return m
}

func soon(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// geometries are pools that differ in what the kernels branch on: bytes of a
// block (32 to 256 KiB), lanes of a row, heads.
func geometries() map[string]struct {
	arch        arch.Config
	blockTokens int
	fp8         bool
} {
	type g = struct {
		arch        arch.Config
		blockTokens int
		fp8         bool
	}
	return map[string]g{
		"8 heads of 128, 64 tokens":  {shape(2, 512, 64, 8, 8, 128, 64), 64, false},
		"8 heads of 128, 1 token":    {shape(2, 512, 64, 8, 8, 128, 64), 1, false},
		"4 heads of 128, 16 tokens":  {shape(3, 512, 64, 8, 4, 128, 64), 16, false},
		"2 heads of 80, 5 tokens":    {shape(2, 72, 64, 4, 2, 80, 64), 5, false},
		"4 heads of 8, 16 tokens":    {shape(3, 64, 64, 8, 4, 8, 64), 16, false},
		"1 head of 256, 16 tokens":   {shape(1, 128, 64, 4, 1, 256, 64), 16, false},
		"1 head of 8, 1 token (32B)": {shape(2, 64, 64, 8, 1, 8, 64), 1, false},
		"4 heads of 128 in FP8":      {shape(3, 512, 64, 8, 4, 128, 64), 16, true},
		"3 heads of 80 in FP8":       {shape(2, 72, 64, 3, 3, 80, 64), 48, true},
	}
}

func openPair(t *testing.T, a arch.Config, opt cuda.Options, srcBlocks, dstBlocks int) (src, dst *cuda.Backend, p kernels.Peer) {
	t.Helper()
	w := randomWeights(a, 1)
	opt.MaxTokens, opt.MaxSeqs, opt.NoGraphs, opt.Blocks = 256, 4, true, srcBlocks
	src = open(t, a, w, opt)
	opt.Blocks = dstBlocks
	dst = open(t, a, w, opt)
	p, err := src.OpenLocal(dst)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return src, dst, p
}

// Pushes of shuffled and shared blocks leave the destination equal to the
// source where it was named, and untouched everywhere else.
func TestPush(t *testing.T) {
	for name, g := range geometries() {
		t.Run(name, func(t *testing.T) {
			src, dst, p := openPair(t, g.arch, cuda.Options{BlockTokens: g.blockTokens, KVFP8: g.fp8}, 40, 56)
			noise(src, 1)
			noise(dst, 2)
			from, want := imageOf(src), imageOf(dst)
			r := rand.New(rand.NewPCG(3, 4))
			seq := uint64(0)
			push := func(what string, a kernels.Push) {
				t.Helper()
				seq++
				a.Line, a.Value = 7, seq
				if err := p.Push(&a); err != nil {
					t.Fatalf("%s: %v", what, err)
				}
				if err := dst.AwaitFlag(soon(t), 7, seq); err != nil {
					t.Fatalf("%s: %v", what, err)
				}
				want = want.moved(from, 56, 40, a.FirstLayer, a.Layers, a.Blocks)
				want.same(t, what, dst)
			}
			pairs := func(n int) (list []kernels.BlockPair) {
				for i, to := range r.Perm(56)[:n] {
					src := r.IntN(40)
					if i%3 == 0 {
						src = 11 // one source, several destinations
					}
					list = append(list, kernels.BlockPair{Src: int32(src), Dst: int32(to)})
				}
				return list
			}
			layers := g.arch.Layers
			for _, e := range []kernels.Engine{kernels.Auto, kernels.Kernel, kernels.Copy} {
				push("one block", kernels.Push{FirstLayer: layers - 1, Layers: 1, Blocks: pairs(1), Engine: e})
				push("first layer", kernels.Push{Layers: 1, Blocks: pairs(20), Engine: e})
				push("all layers", kernels.Push{Layers: layers, Blocks: pairs(56), Engine: e})
				push("no blocks", kernels.Push{Layers: 1, Engine: e})
				run := []kernels.BlockPair{}
				for i := range int32(30) {
					run = append(run, kernels.BlockPair{Src: 4 + i, Dst: 20 + i})
				}
				push("a run", kernels.Push{Layers: layers, Blocks: run, Engine: e})
			}
			for _, ctas := range []int{1, 3, 16, 1000} {
				push("CTAs", kernels.Push{Layers: layers, Blocks: pairs(17), CTAs: ctas})
			}
			if err := p.Drain(soon(t)); err != nil {
				t.Error(err)
			}
			from.same(t, "source", src)
		})
	}
}

// Lists that do not fit one launch, and the sizes at which a push is cut in
// another way.
func TestPushLong(t *testing.T) {
	src, dst, p := openPair(t, shape(1, 128, 64, 4, 4, 64, 64), cuda.Options{BlockTokens: 16}, 9000, 9000)
	noise(src, 1)
	from, want := imageOf(src), imageOf(dst)
	r := rand.New(rand.NewPCG(3, 4))
	for i, n := range []int{128, 129, 256, 257, 2048, 2049, 4000, 4001, 8999} {
		var list []kernels.BlockPair
		perm := r.Perm(9000)
		for k, to := range r.Perm(9000)[:n] {
			list = append(list, kernels.BlockPair{Src: int32(perm[k]), Dst: int32(to)})
		}
		if err := p.Push(&kernels.Push{Layers: 1, Blocks: list, Line: 1, Value: uint64(i + 1)}); err != nil {
			t.Fatal(err)
		}
		if err := dst.AwaitFlag(soon(t), 1, uint64(i+1)); err != nil {
			t.Fatal(err)
		}
		want = want.moved(from, 9000, 9000, 0, 1, list)
	}
	want.same(t, "nine pushes", dst)
}

// What a step computed arrives layer by layer, with no host in between, and is
// found good; damaged, missing and partial blocks are found out.
func TestPushBehindStep(t *testing.T) {
	t.Run("bf16", func(t *testing.T) { pushBehindStep(t, false) })
	t.Run("fp8", func(t *testing.T) { pushBehindStep(t, true) })
}

func pushBehindStep(t *testing.T, fp8 bool) {
	a := families()["llama gqa4 128"]
	w := randomWeights(a, 1)
	src, dst := open(t, a, w, cuda.Options{Blocks: 32, KVFP8: fp8}), open(t, a, w, cuda.Options{Blocks: 48, KVFP8: fp8})
	p, err := src.OpenLocal(dst)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close(context.Background())
	noise(dst, 9)
	r := rand.New(rand.NewPCG(1, 2))
	const n = 16*7 + 5
	from, to := table(r, src, 8), table(r, dst, 8)
	var pairs []kernels.BlockPair
	for i := range from {
		pairs = append(pairs, kernels.BlockPair{Src: from[i], Dst: to[i]})
	}
	seqs := []kernels.Seq{{Tokens: randomTokens(r, n, a.Vocab), Blocks: from}}
	if err := p.Push(&kernels.Push{Layers: 1, Blocks: pairs, AfterStep: true}); err == nil {
		t.Error("pushed behind a step before there was one")
	}
	if err := src.Launch(&kernels.Step{Seqs: seqs, OnLayer: func(int) {}}); err != nil {
		t.Fatal(err)
	}
	for layer := range a.Layers {
		if err := p.Push(&kernels.Push{FirstLayer: layer, Layers: 1, Blocks: pairs, Line: 3, Value: uint64(layer + 1), AfterStep: true}); err != nil {
			t.Fatal(err)
		}
	}
	mustAwait(t, src)
	if err := dst.AwaitFlag(soon(t), 3, uint64(a.Layers)); err != nil {
		t.Fatal(err)
	}
	landed := func(layer, i int) kernels.Landed {
		return kernels.Landed{Layer: layer, Block: to[i], FirstPos: 16 * i, Rows: min(16, n-16*i)}
	}
	var list []kernels.Landed
	for layer := range a.Layers {
		for i := range to {
			list = append(list, landed(layer, i))
		}
	}
	verify := func(what string, list []kernels.Landed, bad ...int) {
		t.Helper()
		good, err := dst.Verify(soon(t), list)
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		for i, g := range good {
			if g == slices.Contains(bad, i) {
				t.Errorf("%s: block %d of %+v: good is %t", what, i, list[i], g)
			}
		}
	}
	verify("all", list)
	for i := range to {
		digestsMatch(t, dst, to[i], 16*i, min(16, n-16*i))
	}
	wrong := slices.Clone(list)
	wrong[0].FirstPos++
	wrong[3].Rows-- // fewer than the digest covers
	wrong[7].Rows++
	wrong[9].Block, wrong[10].Block = wrong[10].Block, wrong[9].Block
	verify("wrong", wrong, 0, 3, 7, 9, 10)
	many := make([]kernels.Landed, 20000) // several launches
	for i := range many {
		many[i] = list[i%len(list)]
	}
	many[77], many[19999] = wrong[0], wrong[3]
	verify("many", many, 77, 19999)

	l := dst.Layout()
	row := make([]byte, l.Resolve()[0].PackedBytes(1))
	for _, bit := range []int{0, 1, 1000, 8*len(row) - 1} {
		dst.Gather(1, to[2], 9, 1, row)
		row[bit/8] ^= 1 << (bit % 8)
		dst.Scatter(1, to[2], 9, 1, row)
		verify("a flipped bit", []kernels.Landed{landed(1, 1), landed(1, 2), landed(0, 2)}, 1)
		row[bit/8] ^= 1 << (bit % 8)
		dst.Scatter(1, to[2], 9, 1, row)
	}
	verify("mended", list)
	mustStep(t, src, seqs[0]) // records no layers
	if err := p.Push(&kernels.Push{Layers: 1, Blocks: pairs, AfterStep: true}); err == nil {
		t.Error("pushed behind a step without OnLayer")
	}
}

func TestMovesRefuse(t *testing.T) {
	src, dst, p := openPair(t, shape(2, 64, 64, 8, 4, 8, 64), cuda.Options{BlockTokens: 4}, 10, 20)
	pair := func(s, d int32) []kernels.BlockPair { return []kernels.BlockPair{{Src: 1, Dst: 1}, {Src: s, Dst: d}} }
	for name, a := range map[string]kernels.Push{
		"negative source":      {Layers: 1, Blocks: pair(-1, 0)},
		"source past the pool": {Layers: 1, Blocks: pair(10, 0)},
		"negative destination": {Layers: 1, Blocks: pair(0, -1)},
		"past the peer's pool": {Layers: 1, Blocks: pair(0, 20)},
		"more than the pool":   {Layers: 1, Blocks: make([]kernels.BlockPair, 21)},
		"no layers":            {Blocks: pair(0, 0)},
		"past the layers":      {FirstLayer: 1, Layers: 2, Blocks: pair(0, 0)},
		"layers overflow":      {FirstLayer: 1<<63 - 1, Layers: 2, Blocks: pair(0, 0)},
		"negative layer":       {FirstLayer: -1, Layers: 1, Blocks: pair(0, 0)},
		"negative line":        {Layers: 1, Blocks: pair(0, 0), Line: -1, Value: 1},
		"past the lines":       {Layers: 1, Blocks: pair(0, 0), Line: kernels.FlagLines, Value: 1},
		"engine":               {Layers: 1, Blocks: pair(0, 0), Engine: 9},
		"CTAs":                 {Layers: 1, Blocks: pair(0, 0), CTAs: -1},
	} {
		if err := p.Push(&a); err == nil {
			t.Errorf("%s: pushed", name)
		}
	}
	for name, e := range map[string]kernels.Landed{
		"layer": {Layer: 2, Rows: 1}, "negative layer": {Layer: -1, Rows: 1}, "block": {Block: 20, Rows: 1}, "negative block": {Block: -1, Rows: 1},
		"no rows": {}, "rows": {Rows: 5}, "position": {FirstPos: -1, Rows: 1}, "huge position": {FirstPos: 1<<31 - 1, Rows: 1},
	} {
		if _, err := dst.Verify(soon(t), []kernels.Landed{{Rows: 1}, e}); err == nil {
			t.Errorf("verify %s: not refused", name)
		}
	}
	for _, line := range []int{-1, kernels.FlagLines} {
		if dst.AwaitFlag(soon(t), line, 0) == nil || dst.ClearFlag(line) == nil {
			t.Errorf("line %d is taken", line)
		}
	}
	// The handle: every field that can be wrong, and its own process.
	e, err := dst.Export()
	if err != nil {
		t.Fatal(err)
	}
	again, err := dst.Export()
	if err != nil || !bytes.Equal(e.Handle, again.Handle) || again.FD != e.FD || len(e.Handle) > kernels.MaxHandle {
		t.Errorf("second export differs: %v", err)
	}
	flags, err := memfd.New("test-flags", int(e.Bytes))
	if err != nil {
		t.Fatal(err)
	}
	defer flags.Close()
	refuse := func(name string, handle, flags []byte) {
		t.Helper()
		if p, err := src.OpenPeer(handle, flags); err == nil {
			p.Close(context.Background())
			t.Errorf("%s: opened", name)
		}
	}
	refuse("own", e.Handle, flags.Bytes)
	for i := range e.Handle {
		h := bytes.Clone(e.Handle)
		h[i] ^= 0x41
		refuse("flipped byte", h, flags.Bytes)
	}
	refuse("short", e.Handle[:len(e.Handle)-1], flags.Bytes)
	refuse("long", append(bytes.Clone(e.Handle), 0), flags.Bytes)
	refuse("empty", nil, flags.Bytes)
	refuse("short flags", e.Handle, flags.Bytes[:4096])
	refuse("crooked flags", e.Handle, flags.Bytes[8:])
	if _, err := src.OpenLocal(open(t, shape(1, 64, 64, 8, 4, 8, 64), randomWeights(shape(1, 64, 64, 8, 4, 8, 64), 1), cuda.Options{BlockTokens: 4})); err == nil {
		t.Error("opened a pool of another shape")
	}
}

// A flag that does not come is late, and the wait ends; an ended context does not undo a
// flag that is set; a closed peer pushes no more.
func TestMovesLate(t *testing.T) {
	_, dst, p := openPair(t, shape(2, 64, 64, 8, 4, 8, 64), cuda.Options{BlockTokens: 4}, 10, 20)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	short, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
	defer cancel()
	if err := dst.AwaitFlag(short, 0, 1); !errors.Is(err, kernels.ErrLate) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a flag that nobody sets: %v", err)
	}
	if err := p.Push(&kernels.Push{Layers: 2, Line: 0, Value: 5}); err != nil {
		t.Fatal(err)
	}
	if err := dst.AwaitFlag(soon(t), 0, 4); err != nil || dst.Flag(0) != 5 {
		t.Errorf("flag is %d: %v", dst.Flag(0), err)
	}
	if err := dst.AwaitFlag(ended, 0, 5); err != nil {
		t.Errorf("a flag that is there: %v", err)
	}
	if err := dst.ClearFlag(0); err != nil || dst.Flag(0) != 0 {
		t.Errorf("flag is %d: %v", dst.Flag(0), err)
	}
	if _, err := dst.Verify(ended, []kernels.Landed{{Rows: 1}}); !errors.Is(err, kernels.ErrLate) {
		t.Errorf("verify: %v", err)
	}
	for range 2 {
		if err := p.Close(soon(t)); err != nil {
			t.Error(err)
		}
	}
	if err := p.Push(&kernels.Push{Layers: 1}); err == nil {
		t.Error("pushed to a closed peer")
	}
	if err := p.Drain(ended); err != nil {
		t.Errorf("drain of a closed peer: %v", err)
	}
}

// Drain is the fence: it is late while slow pushes are under way, and once it has
// returned they write nothing more, so the blocks can be reused.
func TestDrain(t *testing.T) {
	src, dst, p := openPair(t, shape(2, 512, 64, 8, 8, 128, 64), cuda.Options{BlockTokens: 64}, 40, 56)
	noise(src, 1)
	var list []kernels.BlockPair
	for i := range int32(56) {
		list = append(list, kernels.BlockPair{Src: i % 40, Dst: i})
	}
	for _, e := range []kernels.Engine{kernels.Kernel, kernels.Copy} {
		for range 100 { // by one multiprocessor: some 200 ms
			if err := p.Push(&kernels.Push{Layers: 2, Blocks: list, CTAs: 1, Engine: e}); err != nil {
				t.Fatal(err)
			}
		}
		if e == kernels.Kernel {
			ended, cancel := context.WithCancel(t.Context())
			cancel()
			if err := p.Drain(ended); !errors.Is(err, kernels.ErrLate) {
				t.Errorf("drained at once: %v", err)
			}
			if err := p.Close(ended); !errors.Is(err, kernels.ErrLate) {
				t.Errorf("closed at once: %v", err)
			}
			if err := p.Push(&kernels.Push{Layers: 1}); err == nil {
				t.Error("pushed to a peer that is closing")
			}
		}
		if err := p.Drain(soon(t)); err != nil {
			t.Fatal(err)
		}
		noise(dst, 3)
		want := imageOf(dst)
		if err := p.Close(soon(t)); err != nil {
			t.Fatal(err)
		}
		want.same(t, "after the drain", dst)
		var err error
		if p, err = src.OpenLocal(dst); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.Close(soon(t)); err != nil {
		t.Fatal(err)
	}
}
