package level

import (
	"encoding/binary"

	"github.com/xpyd/xpyd/kernels"
)

// Shape is what a unit of the pool looks like.
type Shape struct {
	kernels.Layout
	Blocks int // of a unit
}

// Rows is the bytes of a unit's rows.
func (s Shape) Rows() int { return s.Layers * s.Blocks * s.BlockBytes() }

// Payload is the bytes of a unit's rows and their digests.
func (s Shape) Payload() int { return s.Rows() + s.Layers*s.Blocks*s.KVHeads*8 }

// Record is the bytes of a whole record, whole pages.
func (s Shape) Record() int { return (HeaderSize + s.Payload() + Page - 1) / Page * Page }

// Tokens is how many tokens a unit has.
func (s Shape) Tokens() int { return s.Blocks * s.BlockTokens }

// block returns the rows and the digests of one layer of the unit's i-th block.
func (s Shape) block(rec []byte, layer, i int) (rows, digests []byte) {
	n := layer*s.Blocks + i
	rows = rec[HeaderSize+n*s.BlockBytes():][:s.BlockBytes()]
	return rows, rec[HeaderSize+s.Rows()+n*s.KVHeads*8:][:s.KVHeads*8]
}

// Gather copies a unit out of the pool.
func (s Shape) Gather(pool kernels.Pool, blocks []int32, rec []byte) {
	sums := make([]uint64, s.KVHeads)
	for layer := range s.Layers {
		for i, id := range blocks {
			rows, digests := s.block(rec, layer, i)
			pool.Gather(layer, id, 0, s.BlockTokens, rows)
			pool.Digest(layer, id, sums)
			for h, d := range sums {
				binary.LittleEndian.PutUint64(digests[8*h:], d)
			}
		}
	}
}

// Scatter puts a unit, whose first token has position pos, into blocks that
// nobody reads. False: its rows are not what the digests were made of.
func (s Shape) Scatter(pool kernels.Pool, blocks []int32, pos int, rec []byte) bool {
	made := make([]uint64, s.KVHeads)
	for layer := range s.Layers {
		for i, id := range blocks {
			rows, good := s.verify(pos, rec, layer, i, made)
			if !good {
				return false
			}
			pool.Scatter(layer, id, 0, s.BlockTokens, rows)
			pool.SetDigest(layer, id, s.BlockTokens, made)
		}
	}
	return true
}

// verify makes the digests of one layer of the unit's i-th block from its rows,
// and reports whether they are those that came with them.
func (s Shape) verify(pos int, rec []byte, layer, i int, made []uint64) (rows []byte, good bool) {
	rows, digests := s.block(rec, layer, i)
	kernels.DigestRows(s.Layout, layer, pos+i*s.BlockTokens, s.BlockTokens, rows, made)
	for h, d := range made {
		if d != binary.LittleEndian.Uint64(digests[8*h:]) {
			return rows, false
		}
	}
	return rows, true
}

// Right reports whether all rows of a unit are what its digests were made of.
func (s Shape) Right(pos int, rec []byte) bool {
	made := make([]uint64, s.KVHeads)
	for layer := range s.Layers {
		for i := range s.Blocks {
			if _, good := s.verify(pos, rec, layer, i, made); !good {
				return false
			}
		}
	}
	return true
}
