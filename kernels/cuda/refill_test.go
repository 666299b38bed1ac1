//go:build cuda && cgo && linux

package cuda_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cuda"
	"github.com/xpyd/xpyd/kernels/kerneltest"
	"github.com/xpyd/xpyd/kvlayout"
)

// sequence fills blocks of a pool with rows and right digests of n positions from
// first on; blocks are in shuffled order. It returns them as sources.
func sequence(r *rand.Rand, b *cuda.Backend, first, n int) (held []kvlayout.Held) {
	l := b.Layout()
	sums := make([]uint64, l.Resolve()[0].Heads)
	for i, block := range table(r, b, (n+l.BlockTokens-1)/l.BlockTokens) {
		h := kvlayout.Held{Block: block, FirstPos: first + i*l.BlockTokens, Rows: min(l.BlockTokens, n-i*l.BlockTokens)}
		rows := make([]byte, l.Resolve()[0].PackedBytes(h.Rows))
		for k := 0; k < len(rows); k += 2 {
			v := r.Uint32()
			rows[k], rows[k+1] = byte(v), byte(v>>8)
		}
		for layer := range l.Layers() {
			rows[0] ^= byte(layer)
			kernels.DigestRows(&l.Resolve()[layer], h.FirstPos, h.Rows, rows, sums)
			b.Scatter(layer, block, 0, h.Rows, rows)
			b.SetDigest(layer, block, h.Rows, sums)
		}
		held = append(held, h)
	}
	return held
}

// refills puts the positions of held into blocks of bt, as kvconn does; skip says
// which of them stay away. Sources that nothing needs are left out.
func refills(held []kvlayout.Held, blocks []int32, bt int, skip func(i int) bool) (sources []kvlayout.Held, list []kvlayout.Refill) {
	first := held[0].FirstPos
	end := held[len(held)-1].FirstPos + held[len(held)-1].Rows
	for i := range blocks {
		f := kvlayout.Refill{Block: blocks[i], FirstPos: first + i*bt, First: len(sources)}
		f.Rows = min(bt, end-f.FirstPos)
		if skip != nil && skip(i) {
			continue
		}
		for _, h := range held {
			if h.FirstPos+h.Rows <= f.FirstPos || h.FirstPos >= f.FirstPos+f.Rows {
				continue
			}
			if n := len(sources); n > 0 && sources[n-1] == h {
				f.First, f.Count = n-1, f.Count+1
				continue
			}
			sources, f.Count = append(sources, h), f.Count+1
		}
		list = append(list, f)
	}
	return sources, list
}

// rowOf is one row among n packed positions, and its scale, which may be none.
func rowOf(layout kvlayout.Layout, packed []byte, n, kv, head, at int) (row, scale []byte) {
	l := layout.Resolve()[0]
	rows, scales := l.Part(packed, n, kv, head)
	return rows[at*l.RowBytes(kv):][:l.RowBytes(kv)], scales[at*l.ScaleBytes():][:l.ScaleBytes()]
}

func checkRefills(a *kernels.Push, src, dst *cuda.Backend) error {
	from, to := src.Layout().Resolve(), dst.Layout().Resolve()
	return kerneltest.CheckRefills(a, from[0].Rows, to[0].Rows, len(from), src.Blocks(), dst.Blocks())
}

// refilled is dst after the refills, with new digests.
func (m image) refilled(src image, from, to *cuda.Backend, a *kernels.Push) image {
	m.rows, m.digests = slices.Clone(m.rows), slices.Clone(m.digests)
	fl, tl := from.Layout(), to.Layout()
	heads := tl.Resolve()[0].Heads
	for _, f := range a.Refills {
		at := a.FirstLayer*to.Blocks() + int(f.Block)
		rows, sums := slices.Clone(m.rows[at]), make([]uint64, heads)
		for _, s := range a.Sources[f.First : f.First+f.Count] {
			block := src.rows[a.FirstLayer*from.Blocks()+int(s.Block)]
			for pos := max(s.FirstPos, f.FirstPos); pos < min(s.FirstPos+s.Rows, f.FirstPos+f.Rows); pos++ {
				for kv := range 2 {
					for n := range heads {
						row, scale := rowOf(fl, block, fl.BlockTokens, kv, n, pos-s.FirstPos)
						to, toScale := rowOf(tl, rows, tl.BlockTokens, kv, n, pos-f.FirstPos)
						copy(to, row)
						copy(toScale, scale)
						sums[n] += kernels.RowHash(a.FirstLayer, kv, n, pos, slices.Concat(row, scale))
					}
				}
			}
		}
		m.rows[at], m.digests[at] = rows, sums
	}
	return m
}

// refillPair opens two pools that may differ in block size and heads, on two GPUs where
// there are two.
func refillPair(t testing.TB, fp8 bool, layers, dim int, from, to [2]int, srcBlocks, dstBlocks int) (src, dst *cuda.Backend, p kernels.Peer) {
	t.Helper()
	model := func(kv int) arch.Config { return shape(layers, 128, 64, 2*kv, kv, dim, 64) }
	a, b := model(from[1]), model(to[1])
	opt := cuda.Options{MaxTokens: 256, MaxSeqs: 4, NoGraphs: true, KVFP8: fp8}
	opt.BlockTokens, opt.Blocks = from[0], srcBlocks
	src = open(t, a, randomWeights(a, 1), opt)
	opt.BlockTokens, opt.Blocks, opt.Device = to[0], dstBlocks, 1
	dst, err := cuda.New(b, randomWeights(b, 1), opt)
	if err != nil { // one GPU
		opt.Device = 0
		dst, err = cuda.New(b, randomWeights(b, 1), opt)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { dst.Close() })
	if p, err = src.OpenLocal(dst); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return src, dst, p
}

// Every shape: rows, digests and row counts are right where they were named, and
// nothing else is written, whatever is left out and however few CTAs there are.
func TestRefill(t *testing.T) {
	type geometry struct {
		from, to [2]int // tokens a block, KV heads
		fp8      bool
	}
	for _, dim := range []int{8, 80, 128, 256} {
		for _, g := range []geometry{
			{from: [2]int{16, 4}, to: [2]int{64, 4}}, {from: [2]int{64, 4}, to: [2]int{16, 4}},
			{from: [2]int{1, 2}, to: [2]int{256, 2}}, {from: [2]int{256, 2}, to: [2]int{1, 2}},
			{from: [2]int{5, 1}, to: [2]int{3, 1}}, {from: [2]int{24, 3}, to: [2]int{16, 3}},
			{from: [2]int{16, 6}, to: [2]int{24, 6}}, {from: [2]int{7, 5}, to: [2]int{16, 5}},
			{from: [2]int{16, 4}, to: [2]int{48, 4}, fp8: true}, {from: [2]int{48, 3}, to: [2]int{32, 3}, fp8: true},
		} {
			if g.fp8 && dim%16 != 0 {
				continue
			}
			const n = 256 + 77
			src, dst, p := refillPair(t, g.fp8, 2, dim, g.from, g.to, n/g.from[0]+9, n/g.to[0]+9)
			name := fmt.Sprintf("head_dim %d, FP8 %t, %v to %v", dim, g.fp8, g.from, g.to)
			r := rand.New(rand.NewPCG(uint64(dim), uint64(g.from[0])))
			noise(src, 1)
			noise(dst, 2)
			held := sequence(r, src, 48, n)
			from, want := imageOf(src), imageOf(dst)
			for round, ctas := range []int{0, 1, 3, 16} {
				blocks := table(r, dst, (n+g.to[0]-1)/g.to[0])
				a := kernels.Push{FirstLayer: round % 2, Layers: 1, CTAs: ctas, Line: 5}
				a.Sources, a.Refills = refills(held, blocks, g.to[0], func(i int) bool { return round > 0 && i%(round+2) == 0 && len(blocks) > 2 })
				if err := checkRefills(&a, src, dst); err != nil {
					t.Fatalf("%s: %v", name, err)
				}
				a.Value = 1
				if err := p.Push(&a); err != nil {
					t.Fatalf("%s: %v", name, err)
				}
				if err := dst.AwaitFlag(soon(t), 5, 1); err != nil {
					t.Fatalf("%s: %v", name, err)
				}
				if err := p.Drain(soon(t)); err != nil {
					t.Fatal(err)
				}
				if err := dst.ClearFlag(5); err != nil {
					t.Fatal(err)
				}
				want = want.refilled(from, src, dst, &a)
				want.same(t, fmt.Sprintf("%s, round %d", name, round), dst)
				var landed []kernels.Landed
				for _, f := range a.Refills {
					landed = append(landed, kernels.Landed{Layer: a.FirstLayer, Block: f.Block, FirstPos: f.FirstPos, Rows: f.Rows})
				}
				if good, err := dst.Verify(soon(t), landed); err != nil || slices.Contains(good, false) {
					t.Fatalf("%s: %v, %v", name, good, err)
				}
			}
			from.same(t, name+": source", src)
			if err := p.Close(soon(t)); err != nil {
				t.Fatal(err)
			}
			src.Close()
			dst.Close()
		}
	}
}

// A source that is not what its digest says: whatever is cut from it is bad, what
// comes from others good.
func TestRefillSpoiled(t *testing.T) {
	for _, bt := range []int{3, 4, 12, 32} {
		src, dst, p := refillPair(t, false, 1, 128, [2]int{8, 4}, [2]int{bt, 4}, 20, 60)
		r := rand.New(rand.NewPCG(1, 2))
		const n = 64
		held := sequence(r, src, 0, n)
		row, l := make([]byte, src.Layout().Resolve()[0].PackedBytes(1)), src.Layout()
		for _, spoil := range []func(){
			func() { // one bit of the last head's V in source 3
				src.Gather(0, held[3].Block, 5, 1, row)
				row[len(row)-1] ^= 0x80
				src.Scatter(0, held[3].Block, 5, 1, row)
			},
			func() { // mended, and a digest of fewer rows
				row[len(row)-1] ^= 0x80
				src.Scatter(0, held[3].Block, 5, 1, row)
				sums := make([]uint64, l.Resolve()[0].Heads)
				src.Digest(0, held[3].Block, sums)
				src.SetDigest(0, held[3].Block, 7, sums)
			},
		} {
			spoil()
			a := kernels.Push{Layers: 1, Line: 1, Value: 1}
			a.Sources, a.Refills = refills(held, table(r, dst, (n+bt-1)/bt), bt, nil)
			if err := p.Push(&a); err != nil {
				t.Fatal(err)
			}
			if err := p.Drain(soon(t)); err != nil {
				t.Fatal(err)
			}
			var landed []kernels.Landed
			for _, f := range a.Refills {
				landed = append(landed, kernels.Landed{Block: f.Block, FirstPos: f.FirstPos, Rows: f.Rows})
			}
			good, err := dst.Verify(soon(t), landed)
			if err != nil {
				t.Fatal(err)
			}
			for i, f := range a.Refills {
				touched := f.FirstPos < 32 && f.FirstPos+f.Rows > 24 // source 3's positions
				if good[i] == touched {
					t.Errorf("blocks of %d: positions %d+%d: good is %t", bt, f.FirstPos, f.Rows, good[i])
				}
			}
		}
	}
}

// Lists that are not in order are refused, and nothing moves.
func TestRefillRefuses(t *testing.T) {
	src, dst, p := refillPair(t, false, 1, 8, [2]int{8, 4}, [2]int{4, 4}, 10, 20)
	_, _, fewer := refillPair(t, false, 1, 8, [2]int{8, 4}, [2]int{4, 2}, 10, 20)
	noise(dst, 1)
	want := imageOf(dst)
	good := func() kernels.Push {
		return kernels.Push{Layers: 1,
			Sources: []kvlayout.Held{{Block: 1, Rows: 8}, {Block: 2, FirstPos: 8, Rows: 8}},
			Refills: []kvlayout.Refill{{Block: 0, Rows: 4, Count: 1}, {Block: 1, FirstPos: 6, Rows: 4, Count: 2}}}
	}
	for name, bend := range map[string]func(a *kernels.Push){
		"source block":       func(a *kernels.Push) { a.Sources[1].Block = 10 },
		"negative source":    func(a *kernels.Push) { a.Sources[0].Block = -1 },
		"source rows":        func(a *kernels.Push) { a.Sources[0].Rows = 9 },
		"no source rows":     func(a *kernels.Push) { a.Sources[0].Rows = 0 },
		"source position":    func(a *kernels.Push) { a.Sources[1].FirstPos = 9 },
		"huge position":      func(a *kernels.Push) { a.Sources[0].FirstPos = 1 << 40 },
		"unused source":      func(a *kernels.Push) { a.Sources = append(a.Sources, kvlayout.Held{Rows: 1}) },
		"block":              func(a *kernels.Push) { a.Refills[1].Block = 20 },
		"negative block":     func(a *kernels.Push) { a.Refills[1].Block = -1 },
		"rows":               func(a *kernels.Push) { a.Refills[0].Rows = 5 },
		"no rows":            func(a *kernels.Push) { a.Refills[0].Rows = 0 },
		"overlap":            func(a *kernels.Push) { a.Refills[1].FirstPos = 3 },
		"past the sources":   func(a *kernels.Push) { a.Refills[1].FirstPos, a.Refills[1].Rows = 14, 4 },
		"count":              func(a *kernels.Push) { a.Refills[1].Count = 3 },
		"no count":           func(a *kernels.Push) { a.Refills[1].Count = 0 },
		"negative count":     func(a *kernels.Push) { a.Refills[1].Count = -1 },
		"first":              func(a *kernels.Push) { a.Refills[1].First = 2 },
		"layers":             func(a *kernels.Push) { a.FirstLayer = 1 },
		"line":               func(a *kernels.Push) { a.Line = -1 },
		"behind the step":    func(a *kernels.Push) { a.AfterStep = true },
		"by the copy engine": func(a *kernels.Push) { a.Engine = kernels.Copy },
		"whole blocks":       func(a *kernels.Push) { *a = kernels.Push{Layers: 1, Blocks: []kernels.BlockPair{{}}} },
	} {
		a := good()
		bend(&a)
		if err := p.Push(&a); err == nil {
			t.Errorf("%s: pushed", name)
		}
	}
	if err := p.Drain(soon(t)); err != nil {
		t.Fatal(err)
	}
	want.same(t, "nothing moved", dst)
	a := good()
	if err := fewer.Push(&a); err == nil {
		t.Error("a pool of fewer heads: pushed")
	}
	if err := errors.Join(p.Push(&a), checkRefills(&a, src, dst)); err != nil {
		t.Error(err)
	}
}

// refillSender is the other process of TestRefillProcess: what it computes goes
// into blocks of another size.
func refillSender(handle string, bytes int64, bt int) error {
	b, p, err := openParent(handle, bytes)
	if err != nil {
		return err
	}
	defer b.Close()
	_, _, tokens := peerModel()
	in, blocks, held := bufio.NewScanner(os.Stdin), []int32{}, []kvlayout.Held{}
	for pos := 0; pos < peerPrompt; pos += 16 {
		block := int32(63 - len(blocks))
		blocks, held = append(blocks, block), append(held, kvlayout.Held{Block: block, FirstPos: pos, Rows: min(16, peerPrompt-pos)})
	}
	fmt.Println("ready")
	for value := uint64(0); in.Scan(); {
		var dst []int32
		for _, f := range strings.Fields(in.Text()) {
			var block int32
			if _, err := fmt.Sscan(f, &block); err != nil {
				return err
			}
			dst = append(dst, block)
		}
		sources, list := refills(held, dst, bt, nil)
		var failed error
		_, err := b.Step(&kernels.Step{Seqs: []kernels.Seq{{Tokens: tokens, Blocks: blocks}}, OnLayer: func(layer int) {
			value++
			failed = errors.Join(failed, p.Push(&kernels.Push{FirstLayer: layer, Layers: 1, Sources: sources, Refills: list, Line: 9, Value: value, CTAs: 16}))
		}})
		if err := errors.Join(err, failed); err != nil {
			return err
		}
		fmt.Println("pushed")
	}
	return p.Close(context.Background())
}

// Two processes, on two GPUs where there are two: what one computes in blocks of 16
// arrives layer by layer, while it computes on, in blocks of other sizes, and in FP8;
// its digests prove the rows.
func TestRefillProcess(t *testing.T) {
	if h := os.Getenv("XPYD_TEST_REFILL"); h != "" {
		var bytes int64
		var bt int
		fmt.Sscan(os.Getenv("XPYD_TEST_REFILL_SIZES"), &bytes, &bt)
		if err := refillSender(h, bytes, bt); err != nil {
			fmt.Println("error", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	a, w, _ := peerModel()
	for _, pool := range []struct {
		bt  int
		fp8 bool
	}{{64, false}, {1, false}, {5, false}, {24, false}, {16, true}, {48, true}} {
		bt, n := pool.bt, (peerPrompt+pool.bt-1)/pool.bt
		b := open(t, a, w, cuda.Options{Blocks: 2 * n, BlockTokens: bt, KVFP8: pool.fp8})
		e, err := b.Export()
		if err != nil {
			t.Fatal(err)
		}
		other := beget(t, "TestRefillProcess", "XPYD_TEST_REFILL", e, fmt.Sprint("XPYD_TEST_REFILL_SIZES=", e.Bytes, " ", bt))
		r := rand.New(rand.NewPCG(1, 1))
		for round := range 5 {
			dst := table(r, b, n)
			noise(b, uint64(round))
			other.push(dst)
			for layer := range a.Layers {
				if err := b.AwaitFlag(soon(t), 9, uint64(round*a.Layers+layer+1)); err != nil {
					t.Fatal(err)
				}
				var list []kernels.Landed
				for i, d := range dst {
					list = append(list, kernels.Landed{Layer: layer, Block: d, FirstPos: bt * i, Rows: min(bt, peerPrompt-bt*i)})
				}
				good, err := b.Verify(soon(t), list)
				if err != nil || slices.Contains(good, false) {
					t.Fatalf("blocks of %d, round %d layer %d: %v, %v", bt, round, layer, good, err)
				}
			}
			other.says("pushed")
			digestsMatch(t, b, dst[n-1], bt*(n-1), peerPrompt-bt*(n-1))
		}
		other.end()
	}
}

// timePushes reports the median rate of a push of so many bytes, from the call until
// dst's host has seen the flag of line 1. seq is of all pushes to dst.
func timePushes(b *testing.B, p kernels.Peer, dst *cuda.Backend, a *kernels.Push, seq *uint64, bytes int) {
	b.Helper()
	var took []time.Duration
	ctx := soon(b)
	for b.Loop() {
		*seq++
		a.Value = *seq
		began := time.Now()
		if err := p.Push(a); err != nil {
			b.Fatal(err)
		}
		if err := dst.AwaitFlag(ctx, 1, *seq); err != nil {
			b.Fatal(err)
		}
		took = append(took, time.Since(began))
	}
	slices.Sort(took)
	b.ReportMetric(float64(bytes)/float64(took[len(took)/2].Nanoseconds()), "GB/s")
}

// BenchmarkRefill times pushes from one GPU to another from the call until D's host
// has seen the flag: whole blocks, and blocks put together anew, in turn.
func BenchmarkRefill(b *testing.B) {
	const positions = 16384 // 64 MiB a layer: 8 heads of 128
	for _, bt := range [][2]int{{16, 16}, {16, 64}, {64, 16}, {16, 32}, {32, 16}, {16, 8}, {256, 16}, {24, 16}, {16, 1}, {1, 16}} {
		src, dst, p := refillPair(b, false, 1, 128, [2]int{bt[0], 8}, [2]int{bt[1], 8}, positions/bt[0]+1, positions/bt[1]+1)
		r := rand.New(rand.NewPCG(1, 2))
		held, seq := sequence(r, src, 0, positions), uint64(0)
		for _, size := range []int{1, 16, 64} { // MiB
			for _, ctas := range []int{16, 0} {
				b.Run(fmt.Sprintf("from%d/to%d/%dMiB/ctas%d", bt[0], bt[1], size, ctas), func(b *testing.B) {
					n := size * (positions / 64)
					a := kernels.Push{Layers: 1, CTAs: ctas, Line: 1, Engine: kernels.Kernel}
					part := held[:(n+bt[0]-1)/bt[0]]
					to := table(r, dst, (n+bt[1]-1)/bt[1])
					if bt[0] == bt[1] {
						for i := range to {
							a.Blocks = append(a.Blocks, kernels.BlockPair{Src: part[i].Block, Dst: to[i]})
						}
					} else {
						a.Sources, a.Refills = refills(part, to, bt[1], nil)
					}
					timePushes(b, p, dst, &a, &seq, n*4096)
				})
			}
		}
		if err := p.Close(soon(b)); err != nil {
			b.Fatal(err)
		}
		src.Close()
		dst.Close()
	}
}
