package kerneltest

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvlayout"
)

// The fake's refills are plain loops over positions, by kvlayout.Refill's contract.

// row is one row of a plane of a block, and its scale, if it has one.
func (d device) row(layer int, block int32, plane, head, at int) [][]byte {
	rows, scales := d.Part(d.block(layer, block), d.BlockTokens, plane, head)
	row := [][]byte{rows[at*d.RowBytes(plane):][:d.RowBytes(plane)]}
	if size := d.ScaleBytes(); size > 0 {
		row = append(row, scales[at*size:][:size])
	}
	return row
}

// refill copies the rows of a plane into the peer's blocks.
func (p *fakePeer) refill(f *fakePush, plane int) {
	for _, r := range f.Refills {
		for _, s := range f.Sources[r.First : r.First+r.Count] {
			for pos := max(r.FirstPos, s.FirstPos); pos < min(r.FirstPos+r.Rows, s.FirstPos+s.Rows); pos++ {
				c := f.Cut.Or(p.to.Heads)
				for head := range c.Count {
					dst := p.to.row(f.FirstLayer, r.Block, plane, c.To+head, pos-r.FirstPos)
					for i, part := range p.sent(f.FirstLayer, s, plane, c.From+head, pos) {
						copy(dst[i], part)
					}
				}
			}
		}
	}
}

// seal writes the digests of what was refilled, and of how many rows they are.
func (p *fakePeer) seal(f *fakePush) {
	for _, r := range f.Refills {
		note := p.to.note(f.FirstLayer, r.Block)
		c := f.Cut.Or(p.to.Heads)
		for head := range c.Count {
			sum := uint64(0)
			for _, s := range f.Sources[r.First : r.First+r.Count] {
				sum += p.piece(f.FirstLayer, c.From+head, s, max(r.FirstPos, s.FirstPos), min(r.FirstPos+r.Rows, s.FirstPos+s.Rows))
			}
			binary.LittleEndian.PutUint64(note[8*(c.To+head):], sum)
		}
		binary.LittleEndian.PutUint64(note[p.to.DigestBytes():], uint64(r.Rows))
	}
}

// sent is one row of a source, and its scale, as the peer keeps it.
func (p *fakePeer) sent(layer int, s kvlayout.Held, plane, head, pos int) [][]byte {
	row := p.g.view.row(layer, s.Block, plane, head, pos-s.FirstPos)
	if p.g.view.DType == p.to.DType {
		return row
	}
	return convertRow(p.g.view.DType, p.to.DType, row)
}

// piece is the digest of the positions from .. to-1 of a source's head as they were
// sent, with what the source's own digest is off by.
func (p *fakePeer) piece(layer, head int, s kvlayout.Held, from, to int) uint64 {
	g := p.g
	note := g.view.note(layer, s.Block)
	stored := binary.LittleEndian.Uint64(note[8*head:])
	if binary.LittleEndian.Uint64(note[g.view.DigestBytes():]) != uint64(s.Rows) {
		return ^stored
	}
	if from == s.FirstPos && to == s.FirstPos+s.Rows && g.view.DType == p.to.DType {
		return stored
	}
	sum, end := stored, s.FirstPos+s.Rows
	for plane := range g.view.Planes {
		for pos := s.FirstPos; pos < end; pos++ {
			hash := func(row [][]byte) uint64 {
				return kernels.RowHash(layer, plane, g.layers[layer].FirstHead+head, pos, slices.Concat(row...))
			}
			sum -= hash(g.view.row(layer, s.Block, plane, head, pos-s.FirstPos))
			if pos >= from && pos < to {
				sum += hash(p.sent(layer, s, plane, head, pos))
			}
		}
	}
	return sum
}

// refills reports whether a device makes blocks of theirs out of blocks of ours: all but
// the block size and the heads is alike, or the dtypes are two that GPUs keep.
func refills(ours, theirs kvlayout.Layout) bool {
	theirs.Groups = slices.Clone(theirs.Groups)
	for i := range theirs.Groups {
		if i < len(ours.Groups) && theirs.Groups[i].Heads.Total == ours.Groups[i].Heads.Total {
			theirs.Groups[i].Heads = ours.Groups[i].Heads
		}
	}
	field, _, _ := kvlayout.Compare(ours, theirs, true)
	for i := range ours.Groups {
		if field == "" && kvlayout.Differ(ours, theirs) && (ours.Groups[i].DType == kvlayout.F32 || theirs.Groups[i].DType == kvlayout.F32) {
			return false
		}
	}
	return field == ""
}

// CheckRefills returns what is wrong with the refills of a push from one pool into
// another.
func CheckRefills(p *kernels.Push, ours, theirs kvlayout.Rows, layers, blocks, theirBlocks int) error {
	if len(p.Blocks) > 0 || p.Layers != 1 || p.FirstLayer < 0 || p.FirstLayer >= layers {
		return fmt.Errorf("refill of layers %d+%d, and %d whole blocks", p.FirstLayer, p.Layers, len(p.Blocks))
	}
	for _, s := range p.Sources {
		if s.Block < 0 || int(s.Block) >= blocks || s.Rows < 1 || s.Rows > ours.BlockTokens || s.FirstPos < 0 || s.FirstPos > kvlayout.MaxPosition {
			return fmt.Errorf("source %+v: pool has %d blocks of %d", s, blocks, ours.BlockTokens)
		}
	}
	pos, used := 0, 0 // all before them is done with
	for _, r := range p.Refills {
		if r.Block < 0 || int(r.Block) >= theirBlocks || r.Rows < 1 || r.Rows > theirs.BlockTokens || r.FirstPos < pos || r.FirstPos > kvlayout.MaxPosition {
			return fmt.Errorf("refill %+v at position %d: the peer has %d blocks of %d", r, pos, theirBlocks, theirs.BlockTokens)
		}
		pos = r.FirstPos + r.Rows
		if r.Count < 1 || r.Count > r.Rows || r.First < 0 || r.First > len(p.Sources)-r.Count || r.First != used && r.First != used-1 {
			return fmt.Errorf("refill %+v: of %d sources, %d used before", r, len(p.Sources), used)
		}
		used = r.First + r.Count
		at := r.FirstPos
		for i, s := range p.Sources[r.First:used] {
			if at < s.FirstPos || at >= s.FirstPos+s.Rows || i > 0 && at != s.FirstPos {
				return fmt.Errorf("refill %+v: source %+v does not hold position %d", r, s, at)
			}
			at = min(pos, s.FirstPos+s.Rows)
		}
		if at != pos {
			return fmt.Errorf("refill %+v: its sources end at position %d", r, at)
		}
	}
	if used != len(p.Sources) {
		return fmt.Errorf("%d sources, the refills use %d", len(p.Sources), used)
	}
	return nil
}
