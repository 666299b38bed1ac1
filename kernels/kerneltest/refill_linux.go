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
					for i, part := range p.sent(f.FirstLayer, s, kv, h.From+n, pos) {
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
				sum += p.piece(f.FirstLayer, h.From+n, s, max(r.FirstPos, s.FirstPos), min(r.FirstPos+r.Rows, s.FirstPos+s.Rows))
			}
			binary.LittleEndian.PutUint64(note[8*(h.To+n):], sum)
		}
		binary.LittleEndian.PutUint64(note[8*p.to.l.KVHeads:], uint64(r.Rows))
	}
}

// sent is one row of a source, and its scale, as the peer keeps it.
func (p *fakePeer) sent(layer int, s kernels.Held, kv, head, pos int) [][]byte {
	row := p.g.view.row(layer, s.Block, kv, head, pos-s.FirstPos)
	if p.g.layout.DType == p.to.l.DType {
		return row
	}
	return convertRow(p.g.layout.DType, p.to.l.DType, row)
}

// piece is the digest of the positions from .. to-1 of a source's head as they were
// sent, with what the source's own digest is off by.
func (p *fakePeer) piece(layer, head int, s kernels.Held, from, to int) uint64 {
	g := p.g
	note := g.view.note(layer, s.Block)
	stored := binary.LittleEndian.Uint64(note[8*head:])
	if binary.LittleEndian.Uint64(note[8*g.layout.KVHeads:]) != uint64(s.Rows) {
		return ^stored
	}
	if from == s.FirstPos && to == s.FirstPos+s.Rows && g.layout.DType == p.to.l.DType {
		return stored
	}
	sum, end := stored, s.FirstPos+s.Rows
	for kv := range 2 {
		for pos := s.FirstPos; pos < end; pos++ {
			hash := func(row [][]byte) uint64 {
				return kernels.RowHash(layer, kv, head, pos, slices.Concat(row...))
			}
			sum -= hash(g.view.row(layer, s.Block, kv, head, pos-s.FirstPos))
			if pos >= from && pos < to {
				sum += hash(p.sent(layer, s, kv, head, pos))
			}
		}
	}
	return sum
}
