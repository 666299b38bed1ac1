package level

import (
	"encoding/binary"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvlayout"
)

// Shape is what a unit of the pool looks like; NewShape makes one.
type Shape struct {
	kvlayout.Layout
	Blocks  int // of a unit
	ByLayer []Layer
	Heads   int // the most that a layer has
	end     Layer
}

// Layer is one layer of a unit, and where its rows and digests lie in a record.
type Layer struct {
	kvlayout.Layer
	RowsAt, DigestsAt int
}

// NewShape resolves a layout for units of so many blocks.
func NewShape(l kvlayout.Layout, blocks int) Shape {
	s := Shape{Layout: l, Blocks: blocks, end: Layer{RowsAt: HeaderSize}}
	s.end.DigestsAt = HeaderSize + blocks*l.BlockBytes()
	for _, layer := range l.Resolve() {
		s.end.Layer = layer
		s.ByLayer = append(s.ByLayer, s.end)
		s.Heads = max(s.Heads, layer.Heads)
		s.end.RowsAt += blocks * layer.BlockBytes()
		s.end.DigestsAt += blocks * layer.DigestBytes()
	}
	return s
}

// Payload is the bytes of a unit's rows and their digests.
func (s *Shape) Payload() int { return s.end.DigestsAt - HeaderSize }

// Record is the bytes of a whole record, whole pages.
func (s *Shape) Record() int { return (s.end.DigestsAt + Page - 1) / Page * Page }

// Tokens is how many tokens a unit has.
func (s *Shape) Tokens() int { return s.Blocks * s.BlockTokens }

// block returns the rows and the digests of one layer of the unit's i-th block.
func (s *Shape) block(rec []byte, layer, i int) (rows, digests []byte) {
	l := &s.ByLayer[layer]
	size, sums := l.BlockBytes(), l.DigestBytes()
	return rec[l.RowsAt+i*size:][:size], rec[l.DigestsAt+i*sums:][:sums]
}

// Gather copies a unit out of the pool.
func (s *Shape) Gather(pool kernels.Pool, blocks []int32, rec []byte) {
	sums := make([]uint64, s.Heads)
	for layer := range s.ByLayer {
		for i, id := range blocks {
			rows, digests := s.block(rec, layer, i)
			pool.Gather(layer, id, 0, s.BlockTokens, rows)
			pool.Digest(layer, id, sums[:len(digests)/8])
			for h := range len(digests) / 8 {
				binary.LittleEndian.PutUint64(digests[8*h:], sums[h])
			}
		}
	}
}

// Scatter copies a unit, whose first token has position pos, into blocks that nobody reads. It
// returns false if the rows do not agree with the digests.
func (s *Shape) Scatter(pool kernels.Pool, blocks []int32, pos int, rec []byte) bool {
	sums := make([]uint64, s.Heads)
	for layer := range s.ByLayer {
		for i, id := range blocks {
			rows, made, good := s.verify(pos, rec, layer, i, sums)
			if !good {
				return false
			}
			pool.Scatter(layer, id, 0, s.BlockTokens, rows)
			pool.SetDigest(layer, id, s.BlockTokens, made)
		}
	}
	return true
}

// verify computes the digests of one layer of the unit's i-th block, in sums, and reports whether
// they are those in the record.
func (s *Shape) verify(pos int, rec []byte, layer, i int, sums []uint64) (rows []byte, made []uint64, good bool) {
	l := &s.ByLayer[layer]
	rows, digests := s.block(rec, layer, i)
	made = sums[:l.Heads]
	kernels.DigestRows(&l.Layer, pos+i*s.BlockTokens, s.BlockTokens, rows, made)
	for h, d := range made {
		if d != binary.LittleEndian.Uint64(digests[8*h:]) {
			return rows, made, false
		}
	}
	return rows, made, true
}

// Right reports whether all rows of a unit agree with its digests.
func (s *Shape) Right(pos int, rec []byte) bool {
	sums := make([]uint64, s.Heads)
	for layer := range s.ByLayer {
		for i := range s.Blocks {
			if _, _, good := s.verify(pos, rec, layer, i, sums); !good {
				return false
			}
		}
	}
	return true
}
