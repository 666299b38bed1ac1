package prefill

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvlayout"
)

// rows is a pool of one prompt whose rows say which they are.
type rows struct {
	layout kvlayout.Layout
	first  map[int32]int // position of a block's row 0
	filled map[int32]int
	broken map[int32]bool // a bit of its first row is wrong
}

func (p *rows) fill(dst []byte, layer, firstPos, n int) {
	l := &p.layout.Resolve()[layer]
	l.Parts(dst, n, func(plane, head int, rows, scales []byte) {
		part := plane*l.Heads + head
		for i := range n {
			binary.LittleEndian.PutUint64(rows[i*l.RowBytes(plane):], uint64(layer)<<48|uint64(part)<<32|uint64(firstPos+i))
			if scales != nil {
				binary.LittleEndian.PutUint32(scales[4*i:], uint32(part)<<24|uint32(firstPos+i))
			}
		}
	})
}

func (p *rows) Gather(layer int, block int32, row, n int, dst []byte) {
	p.fill(dst, layer, p.first[block]+row, n)
	if p.broken[block] && row == 0 {
		dst[0] ^= 1
	}
}

func (p *rows) Digest(layer int, block int32, dst []uint64) {
	b := make([]byte, p.layout.Resolve()[0].PackedBytes(p.filled[block]))
	p.fill(b, layer, p.first[block], p.filled[block])
	kernels.DigestRows(&p.layout.Resolve()[layer], p.first[block], p.filled[block], b, dst)
}

func (*rows) Scatter(int, int32, int, int, []byte)      {}
func (*rows) SetDigest(int, int32, int, []uint64)       {}
func (*rows) CopyBlock(dst, src int32, firstPos, n int) {}

// prompt makes a pool that holds a prompt of n positions in blocks of size bt,
// and its block table.
func prompt(bt, n int) (*rows, []engine.Ready) {
	p := &rows{layout: kvlayout.Plain(2, 2, 2, bt, "f32"),
		first: map[int32]int{}, filled: map[int32]int{}, broken: map[int32]bool{}}
	var ready []engine.Ready
	for i := 0; i*bt < n; i++ {
		b := int32(1000 - i)
		p.first[b], p.filled[b] = i*bt, min(bt, n-i*bt)
		ready = append(ready, engine.Ready{Index: i, Block: b, FirstPos: i * bt, Rows: p.filled[b]})
	}
	return p, ready
}

// TestConvert: for any two block sizes, each of the receiver's blocks is announced once, when its rows
// are there, with the right rows and a digest that matches them.
func TestConvert(t *testing.T) {
	sizes := []int{1, 2, 3, 5, 7, 8, 13, 16, 17, 31, 32, 48, 64, 100, 128, 255, 256}
	r := rand.New(rand.NewPCG(1, 1))
	for _, from := range sizes {
		for _, to := range sizes {
			for _, n := range []int{1, from, to, from*to%512 + 1, 1 + r.IntN(600)} {
				convertAll(t, "f32", from, to, n, 1+r.IntN(4))
			}
			convertAll(t, kvlayout.F8E4M3, from, to, 1+r.IntN(300), 1+r.IntN(4)) // with scales
		}
	}
}

func convertAll(t *testing.T, dtype kvlayout.DType, from, to, n, chunk int) {
	p, ready := prompt(from, n)
	p.layout = kvlayout.Plain(2, 2, 8/(dtype.Bits()/8), from, dtype)
	s := newSource(p, p.layout.Resolve(), n, to)
	blocks := (n + to - 1) / to
	for layer := range p.layout.Layers() {
		var told []int
		for at := 0; at < len(ready); at += chunk {
			some := ready[at:min(at+chunk, len(ready))]
			for _, i := range s.ready(layer, some) {
				told = append(told, i)
				if err := loads(p, s, layer, i, to, n); err != nil {
					t.Fatalf("%d to %d, %d positions, chunk %d: layer %d block %d: %v", from, to, n, chunk, layer, i, err)
				}
			}
		}
		if len(told) != blocks || !slices.IsSorted(told) || told[len(told)-1] != blocks-1 {
			t.Fatalf("%d to %d, %d positions: told of %v, want %d blocks", from, to, n, told, blocks)
		}
		if again := s.ready(layer, ready[len(ready)-1:]); len(again) > 0 {
			t.Fatalf("%d to %d, %d positions: told of %v once more", from, to, n, again)
		}
	}
	if all := s.destBlocks(0, s.positions); len(all) != blocks {
		t.Fatalf("%d to %d, %d positions: all is %v", from, to, n, all)
	}
}

// loads compares one of the receiver's blocks with what it must be.
func loads(p *rows, s *source, layer, index, to, n int) error {
	first := index * to
	count := min(to, n-first)
	got, want := make([]byte, p.layout.Resolve()[0].PackedBytes(count)), make([]byte, p.layout.Resolve()[0].PackedBytes(count))
	sums, wantSums := make([]uint64, p.layout.Resolve()[0].Heads), make([]uint64, p.layout.Resolve()[0].Heads)
	for i := range got {
		got[i] = 0xff
	}
	if err := s.Load(layer, index, first, count, got, sums); err != nil {
		return err
	}
	p.fill(want, layer, first, count)
	kernels.DigestRows(&p.layout.Resolve()[layer], first, count, want, wantSums)
	if !slices.Equal(got, want) {
		return errors.New("wrong rows")
	}
	if !slices.Equal(sums, wantSums) {
		return fmt.Errorf("digests %x, want %x", sums, wantSums)
	}
	return spans(p, s, layer, first, count)
}

// spans checks what a device would be told for one of the receiver's blocks: our
// blocks with all that their digests cover, in order, and no others.
func spans(p *rows, s *source, layer, first, count int) error {
	held, ok := s.Spans(layer, first, count, nil)
	if !ok || len(held) == 0 {
		return fmt.Errorf("spans of positions %d+%d: %v, %t", first, count, held, ok)
	}
	at := held[0].FirstPos
	for _, h := range held {
		if h.FirstPos != at || p.first[h.Block] != at || p.filled[h.Block] != h.Rows || at >= first+count || at+h.Rows <= first {
			return fmt.Errorf("spans of positions %d+%d: %v", first, count, held)
		}
		at += h.Rows
	}
	if at < first+count {
		return fmt.Errorf("spans of positions %d+%d end at %d", first, count, at)
	}
	if upto := s.upto[layer]; upto < s.positions {
		if held, ok := s.Spans(layer, upto-1, 2, nil); ok {
			return fmt.Errorf("positions past %d, which are not computed, are in %v", upto, held)
		}
	}
	return nil
}

// TestSpansRefused: what is not of the prompt is in no block.
func TestSpansRefused(t *testing.T) {
	p, ready := prompt(4, 10)
	s := newSource(p, p.layout.Resolve(), 10, 4)
	for layer := range p.layout.Layers() {
		s.ready(layer, ready)
	}
	if held, ok := s.Spans(0, 0, 10, nil); !ok || len(held) == 0 {
		t.Fatalf("the whole prompt: %v, %t", held, ok)
	}
	for _, c := range [][3]int{{-1, 0, 1}, {p.layout.Layers(), 0, 1}, {0, -1, 1}, {0, 4, 0}, {0, 4, -1}, {0, 9, 2}, {0, 10, 1}, {0, 0, 11}} {
		if held, ok := s.Spans(c[0], c[1], c[2], nil); ok || len(held) > 0 {
			t.Errorf("layer %d, positions %d+%d: %v", c[0], c[1], c[2], held)
		}
	}
	if id, ok := s.Block(0, 2, 8, 2); !ok || id != s.table[2] {
		t.Errorf("the last block: %d, %t", id, ok)
	}
	for _, c := range [][4]int{{-1, 0, 0, 4}, {p.layout.Layers(), 0, 0, 4}, {0, -1, -4, 4}, {0, 3, 12, 0}, {0, 3, 12, -2}, {0, 2, 8, 4}, {0, 1, 8, 4}, {0, 1, 4, 3}} {
		if id, ok := s.Block(c[0], c[1], c[2], c[3]); ok {
			t.Errorf("block %v: %d", c, id)
		}
	}
}

// TestBrokenRow: a row that no longer agrees with its digest gets no good
// digest by being cut; moved whole, it keeps the digest that gives it away.
func TestBrokenRow(t *testing.T) {
	for _, to := range []int{1, 3, 4, 5, 8, 32} {
		p, ready := prompt(4, 30)
		p.broken[ready[2].Block] = true // positions 8 to 11; the bit is in 8
		s := newSource(p, p.layout.Resolve(), 30, to)
		for layer := range p.layout.Layers() {
			s.ready(layer, ready)
			for _, i := range s.destBlocks(0, s.positions) {
				touches := i*to < 12 && (i+1)*to > 8
				err := loads(p, s, layer, i, to, 30)
				switch {
				case !touches && err != nil:
					t.Errorf("to %d, block %d: %v", to, i, err)
				case touches && err == nil:
					t.Errorf("to %d, block %d: a broken row went out", to, i)
				case touches && to != 4 && !errors.Is(err, kvconn.ErrDigest):
					t.Errorf("to %d, block %d: %v, want %v", to, i, err, kvconn.ErrDigest)
				}
			}
		}
	}
	p, ready := prompt(4, 8)
	p.broken[ready[1].Block] = true
	s := newSource(p, p.layout.Resolve(), 8, 4)
	s.ready(0, ready)
	got, sums, again := make([]byte, p.layout.Resolve()[0].PackedBytes(4)), make([]uint64, 2), make([]uint64, 2)
	if err := s.Load(0, 1, 4, 4, got, sums); err != nil {
		t.Fatal(err)
	}
	if kernels.DigestRows(&p.layout.Resolve()[0], 4, 4, got, again); slices.Equal(sums, again) {
		t.Error("a broken block went out with a digest that holds")
	}
}

// TestNotReady: nothing is loaded before it is computed, in its own layer, nor
// outside the prompt.
func TestNotReady(t *testing.T) {
	p, ready := prompt(4, 10)
	s := newSource(p, p.layout.Resolve(), 10, 4)
	s.ready(0, ready[:2])
	f := func(layer, first, n int, ok bool) {
		t.Helper()
		buf, sums := make([]byte, p.layout.Resolve()[0].PackedBytes(max(n, 0))), make([]uint64, 2)
		if err := s.Load(layer, first/4, first, n, buf, sums); (err == nil) != ok {
			t.Errorf("layer %d positions %d+%d: %v", layer, first, n, err)
		}
	}
	f(0, 4, 4, true)
	f(1, 4, 4, false) // the other layer
	f(0, 8, 2, false)
	f(0, 8, 4, false) // past the end
	f(-1, 0, 4, false)
	f(2, 0, 4, false)
	f(0, -4, 4, false)
	f(0, 0, 0, false)
	if err := s.Load(0, 0, 0, 4, make([]byte, 3), make([]uint64, 2)); err == nil {
		t.Error("a short buffer was filled")
	}
	s.fill([]int32{1000, 999, 998})
	f(1, 8, 2, true)

	s = newSource(p, p.layout.Resolve(), 10, 4) // a row short
	s.ready(0, []engine.Ready{ready[0], {Index: 1, Block: 999, FirstPos: 4, Rows: 3}})
	f(0, 0, 4, true)
	f(0, 4, 4, false)
	if _, ok := s.Block(0, 1, 4, 4); ok {
		t.Error("a block is shown whose last row is not computed")
	}
	if _, ok := s.Spans(0, 0, 8, nil); ok {
		t.Error("spans are shown whose last row is not computed")
	}
	s.ready(0, []engine.Ready{{Index: 1, Block: 999, FirstPos: 7, Rows: 1}})
	f(0, 4, 4, true)
	if b, ok := s.Block(0, 1, 4, 4); b != 999 || !ok {
		t.Errorf("block %d, %t", b, ok)
	}
}

// viewed is a pool whose blocks can be seen in place.
type viewed struct{ *rows }

func (p viewed) View(layer int, block int32, row, n int) ([]byte, bool) {
	b := make([]byte, p.layout.Resolve()[0].PackedBytes(n))
	p.Gather(layer, block, row, n, b)
	return b, row == 0
}

// Whole blocks of one size at both ends are shown; what is not computed, not
// whole or of another size is left to Load.
func TestView(t *testing.T) {
	p, ready := prompt(4, 10)
	s := newSource(viewed{p}, p.layout.Resolve(), 10, 4)
	digests := make([]uint64, 2)
	if _, ok := s.View(1, 0, 0, 4, digests); ok {
		t.Error("shown before it was computed")
	}
	s.ready(1, ready)
	if _, ok := s.View(1, 0, 0, 4, digests); !ok {
		t.Error("the first block is not shown")
	}
	run, ok := s.View(1, 1, 4, 4, digests)
	sums := make([]uint64, 2)
	if ok {
		kernels.DigestRows(&p.layout.Resolve()[1], 4, 4, run, sums)
	}
	if !ok || !slices.Equal(sums, digests) {
		t.Errorf("view of a whole block: %v, digests %x, want %x", ok, digests, sums)
	}
	for _, c := range [][4]int{{1, 2, 8, 2}, {1, 2, 8, 4}, {1, 3, 12, 4}, {2, 0, 0, 4}, {1, 1, 3, 4}, {1, -1, -4, 4}} {
		if _, ok := s.View(c[0], c[1], c[2], c[3], digests); ok {
			t.Errorf("view of %v", c)
		}
	}
	other := newSource(viewed{p}, p.layout.Resolve(), 10, 8)
	other.ready(1, ready)
	if _, ok := other.View(1, 0, 0, 4, digests); ok {
		t.Error("shown to a receiver with other blocks")
	}
}
