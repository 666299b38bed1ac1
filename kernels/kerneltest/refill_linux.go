package kerneltest

import (
	"encoding/binary"
	"slices"

	"github.com/xpyd/xpyd/kernels"
)

// The fake's refills: plain loops over positions, from kernels.Refill's contract.

// row is one row of K (kv 0) or V of a block, and its scale.
func (d device) row(layer int, block int32, kv, head, at int) [][]byte {
	return rowOf(d.l, d.block(layer, block), d.l.BlockTokens, kv, head, at)
}

// refill copies the rows of K (kv 0) or V into the peer's blocks.
func (p *fakePeer) refill(f *fakePush, kv int) {
	h := f.HeadsOf(p.g.layout)
	for _, r := range f.Refills {
		for _, s := range f.Sources[r.First : r.First+r.Count] {
			for pos := max(r.FirstPos, s.FirstPos); pos < min(r.FirstPos+r.Rows, s.FirstPos+s.Rows); pos++ {
				for n := range h.Count {
					dst := p.to.row(f.FirstLayer, r.Block, kv, h.To+n, pos-r.FirstPos)
					for i, part := range p.g.view.row(f.FirstLayer, s.Block, kv, h.From+n, pos-s.FirstPos) {
						copy(dst[i], part)
					}
				}
			}
		}
	}
}

// seal writes the digests of what was refilled, and of how many rows they are.
func (p *fakePeer) seal(f *fakePush) {
	h := f.HeadsOf(p.g.layout)
	for _, r := range f.Refills {
		note := p.to.note(f.FirstLayer, r.Block)
		for n := range h.Count {
			sum := uint64(0)
			for _, s := range f.Sources[r.First : r.First+r.Count] {
				sum += p.g.piece(f.FirstLayer, h.From+n, s, max(r.FirstPos, s.FirstPos), min(r.FirstPos+r.Rows, s.FirstPos+s.Rows))
			}
			binary.LittleEndian.PutUint64(note[8*(h.To+n):], sum)
		}
		binary.LittleEndian.PutUint64(note[8*p.to.l.KVHeads:], uint64(r.Rows))
	}
}

// piece is the digest of the positions from .. to-1 of a source's head, with what
// the source's own digest is off by.
func (g *FakeGPU) piece(layer, head int, s kernels.Held, from, to int) uint64 {
	note := g.view.note(layer, s.Block)
	stored := binary.LittleEndian.Uint64(note[8*head:])
	if binary.LittleEndian.Uint64(note[8*g.layout.KVHeads:]) != uint64(s.Rows) {
		return ^stored
	}
	if from == s.FirstPos && to == s.FirstPos+s.Rows {
		return stored
	}
	rows := func(from, to int) (sum uint64) {
		for kv := range 2 {
			for pos := from; pos < to; pos++ {
				sum += kernels.RowHash(layer, kv, g.FirstHead+head, pos, slices.Concat(g.view.row(layer, s.Block, kv, head, pos-s.FirstPos)...))
			}
		}
		return sum
	}
	return rows(from, to) + stored - rows(s.FirstPos, s.FirstPos+s.Rows)
}
