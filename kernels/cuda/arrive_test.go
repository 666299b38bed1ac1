//go:build cuda && cgo && linux

package cuda_test

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/xpyd/xpyd/internal/memfd"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cuda"
)

// Arrivals under way at once, of one block and of hundreds, some or all layers, that
// end in any order: each has the rows and digests of host memory, says of exactly
// the spoilt blocks that they are, and leaves all others alone.
func TestArrivalsBeside(t *testing.T) {
	const units = 24
	rounds := 60
	if testing.Short() {
		rounds = 12
	}
	for _, blockTokens := range []int{1, 16, 256} {
		blocks := 400
		if blockTokens == 256 {
			blocks = 150
		}
		a := shape(11, 64, 64, 4, 2, 64, 99)
		a.MaxPositions = 256 * units
		b := open(t, a, randomWeights(a, 1), cuda.Options{Blocks: blocks, BlockTokens: blockTokens, MaxTokens: 256 * units, NoGraphs: true})
		l := b.Layout()
		r := rand.New(rand.NewPCG(1, uint64(blockTokens)))
		table := make([]int32, units)
		for i := range table {
			table[i] = int32(i)
		}
		mustStep(t, b, kernels.Seq{Tokens: randomTokens(r, units*blockTokens, a.Vocab), Blocks: table})
		// Each unit twice, the second time with a bit that is wrong.
		run, sums := l.Resolve()[0].BlockBytes(), 8*l.Resolve()[0].Heads
		unit := (l.Layers()*(run+sums)+15)/16*16 + 64
		mem, err := memfd.Private((2*units*unit + 4095) / 4096 * 4096)
		if err != nil {
			t.Fatal(err)
		}
		host, err := b.RegisterHost(mem.Bytes)
		if err != nil {
			t.Fatal(err)
		}
		place := func(u int, block int32) kernels.HostBlock {
			at := int64(u*unit + 64)
			return kernels.HostBlock{Block: block, Rows: at, Digests: at + int64(l.Layers()*run), Filled: blockTokens, FirstPos: u % units * blockTokens}
		}
		move := func(first, layers int, list []kernels.HostBlock) *kernels.HostMove {
			return &kernels.HostMove{Memory: host, FirstLayer: first, Layers: layers, Blocks: list, LayerStride: int64(run), DigestStride: int64(sums)}
		}
		var all []kernels.HostBlock
		for u := range 2 * units {
			all = append(all, place(u, int32(u%units)))
		}
		out, err := b.GatherBlocks(move(0, l.Layers(), all))
		if err == nil {
			err = out.Wait(soon(t))
		}
		if err != nil {
			t.Fatal(err)
		}
		spoilt := make([]int, units) // layer
		for u := range units {
			spoilt[u] = r.IntN(l.Layers())
			at := (units+u)*unit + 64
			if u%4 == 0 { // in a digest
				at += l.Layers()*run + spoilt[u]*sums + r.IntN(sums)
			} else {
				at += spoilt[u]*run + r.IntN(run)
			}
			mem.Bytes[at] ^= 1 << r.IntN(8)
		}
		want := imageOf(b)

		type load struct {
			m       *kernels.HostMove
			arrival kernels.HostArrival
			bad     []bool
		}
		var under []load
		taken := map[int32]bool{}
		rowsAt := func(layer int, p kernels.HostBlock, m *kernels.HostMove) []byte {
			return mem.Bytes[int(p.Rows)+(layer-m.FirstLayer)*run:][:run]
		}
		finish := func() {
			i := r.IntN(len(under))
			v := under[i]
			under = slices.Delete(under, i, i+1)
			if err := v.arrival.Wait(soon(t)); err != nil {
				t.Fatal(err)
			}
			good, err := v.arrival.Good()
			if err != nil || v.arrival.Layers() != l.Layers() {
				t.Fatalf("after the wait: %d layers, %v", v.arrival.Layers(), err)
			}
			for k, p := range v.m.Blocks {
				if good[k] == v.bad[k] {
					t.Errorf("blocks of %d: place %d, block %d: good %t, spoilt %t", blockTokens, k, p.Block, good[k], v.bad[k])
				}
				for layer := v.m.FirstLayer; layer < v.m.FirstLayer+v.m.Layers; layer++ {
					at := layer*blocks + int(p.Block)
					want.rows[at] = slices.Clone(rowsAt(layer, p, v.m))
					sum := make([]uint64, l.Resolve()[0].Heads)
					for h := range sum {
						for s := range 8 {
							sum[h] |= uint64(mem.Bytes[int(p.Digests)+(layer-v.m.FirstLayer)*sums+8*h+s]) << (8 * s)
						}
					}
					want.digests[at] = sum
				}
				delete(taken, p.Block)
			}
		}
		for round := range rounds {
			first, n := 0, l.Layers()
			if round%3 == 2 {
				first = r.IntN(l.Layers())
				n = 1 + r.IntN(l.Layers()-first)
			}
			v := load{}
			var list []kernels.HostBlock
			most := 1 + r.IntN(1+round%2*250)
			for _, block := range r.Perm(blocks) {
				if len(list) == most {
					break
				}
				if block < units || taken[int32(block)] {
					continue
				}
				taken[int32(block)] = true
				u := r.IntN(units)
				bad := r.IntN(8) == 0
				p := place(u, int32(block))
				if bad {
					p = place(units+u, int32(block))
				}
				p.Rows += int64(first * run)
				p.Digests += int64(first * sums)
				list = append(list, p)
				v.bad = append(v.bad, bad && spoilt[u] >= first && spoilt[u] < first+n)
			}
			if len(list) == 0 {
				finish()
				continue
			}
			v.m = move(first, n, list)
			v.m.CTAs = []int{0, 1, 2, 8}[r.IntN(4)]
			v.arrival, err = b.ArriveBlocks(v.m)
			if err != nil && len(under) > 0 { // behind one that is still open there may be no room
				for len(under) > 0 {
					finish()
				}
				v.arrival, err = b.ArriveBlocks(v.m)
			}
			if err != nil {
				t.Fatal(err)
			}
			under = append(under, v)
			if len(under) == 4 {
				finish()
			}
		}
		for len(under) > 0 {
			finish()
		}
		want.same(t, "arrivals", b)

		// More than the pool has blocks cannot be on their way; and that is no end.
		tooMany := make([]kernels.HostBlock, 1100)
		for i := range tooMany {
			tooMany[i] = place(0, int32(units))
		}
		var e *kernels.Error
		if _, err := b.ArriveBlocks(move(0, l.Layers(), tooMany)); !errors.As(err, &e) {
			t.Errorf("1100 places of a pool of %d blocks: %v", blocks, err)
		}
		v, err := b.ArriveBlocks(move(0, l.Layers(), tooMany[:1]))
		if err == nil {
			err = v.Wait(soon(t))
		}
		if err != nil {
			t.Error(err)
		}
		if err := errors.Join(host.Close(), mem.Close()); err != nil {
			t.Error(err)
		}
	}
}
