package cpu

import (
	"fmt"
	"unsafe"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvlayout"
)

// pool is the KV memory of one rank, in any layout: one area a layer, block after block, each
// packed as its kvlayout.Rows says, and a digest with its row count for each
// (layer, block, head). Heads are counted among the rank's own.
//
// Nothing here is locked. Whoever owns a block's rows decides who may touch
// them; distinct blocks share no words.
type pool struct {
	layout kvlayout.Layout
	areas  []area
	blocks int
}

type area struct {
	kvlayout.Layer
	data   []byte   // [block][block bytes]
	digest []uint64 // [block][head]
	filled []uint16 // [block][head]: rows 0..filled-1 are in digest
}

// newPool makes a pool in mem, or on the Go heap if mem is nil.
func newPool(l kvlayout.Layout, blocks int, mem []byte) *pool {
	p := &pool{layout: l, blocks: blocks, areas: make([]area, l.Layers())}
	offsets, _ := layerOffsets(l, blocks)
	for i, layer := range l.Resolve() {
		size := blocks * layer.BlockBytes()
		pl := area{Layer: layer, digest: make([]uint64, blocks*layer.Heads), filled: make([]uint16, blocks*layer.Heads)}
		if mem != nil {
			pl.data = mem[offsets[i]:][:size:size]
		} else {
			pl.data = alloc(size)
		}
		p.areas[i] = pl
	}
	return p
}

// layerOffsets returns where each layer begins in a pool outside the heap, and the pool's
// size. Layers are whole pages, so that no two share one.
func layerOffsets(l kvlayout.Layout, blocks int) (offsets []int64, size int) {
	for _, layer := range l.Resolve() {
		offsets = append(offsets, int64(size))
		size += roundUp(blocks*layer.BlockBytes(), 4096)
	}
	return offsets, size
}

// block returns positions row..row+n-1 of one block of one layer.
func (p *pool) block(layer int, block int32, row, n int) []byte {
	l := &p.areas[layer]
	if row < 0 || n < 0 || row+n > l.BlockTokens || uint(block) >= uint(p.blocks) {
		panic(fmt.Sprintf("kernels/cpu: rows %d+%d of block %d, pool has %d blocks of %d", row, n, block, p.blocks, l.BlockTokens))
	}
	size := l.BlockBytes()
	at := int(block) * size
	return l.data[at : at+size : at+size]
}

// floats returns rows row..row+n-1 of a plane of one head, in a pool of f32.
func (p *pool) floats(layer int, block int32, plane, head, row, n int) []float32 {
	l := &p.areas[layer]
	rows, _ := l.Part(p.block(layer, block, row, n), l.BlockTokens, plane, head)
	size := l.RowBytes(plane)
	return floatsOf(rows[row*size : (row+n)*size])
}

// base points at row 0 of a plane of one head in block 0.
func (p *pool) base(layer, plane, head int) unsafe.Pointer {
	return unsafe.Pointer(&p.floats(layer, 0, plane, head, 0, 1)[0])
}

// appended brings the digest up to date after rows row..row+n-1 of one head
// were written. pos is the absolute position of the block's row 0. Rows at and
// after row+n leave the digest; rows below row are hashed again unless they
// are exactly what it holds.
func (p *pool) appended(layer int, block int32, head, pos, row, n int) {
	l := &p.areas[layer]
	s := int(block)*l.Heads + head
	if int(l.filled[s]) != row {
		l.digest[s] = p.hash(layer, block, head, pos, 0, row)
	}
	l.digest[s] += p.hash(layer, block, head, pos, row, n)
	l.filled[s] = uint16(row + n)
}

func (p *pool) hash(layer int, block int32, head, pos, row, n int) (sum uint64) {
	l, b := &p.areas[layer], p.block(layer, block, row, n)
	for plane := range l.Planes {
		rows, scales := l.Part(b, l.BlockTokens, plane, head)
		if scales != nil {
			scales = scales[row*l.ScaleBytes():]
		}
		sum += kernels.DigestPart(&l.Layer, plane, head, pos+row, n, rows[row*l.RowBytes(plane):], scales)
	}
	return sum
}

// digestOf writes a block's digests of one layer.
func (p *pool) digestOf(layer int, block int32, dst []uint64) {
	l := &p.areas[layer]
	copy(dst[:l.Heads], l.digest[int(block)*l.Heads:][:l.Heads])
}

// setDigest records the digests of rows 0 .. filled-1.
func (p *pool) setDigest(layer int, block int32, filled int, digest []uint64) {
	l := &p.areas[layer]
	if filled < 0 || filled > l.BlockTokens {
		panic(fmt.Sprintf("kernels/cpu: digest of %d rows, a block has %d", filled, l.BlockTokens))
	}
	at := int(block) * l.Heads
	copy(l.digest[at:at+l.Heads], digest[:l.Heads])
	for h := range l.Heads {
		l.filled[at+h] = uint16(filled)
	}
}

// copyBlock copies rows 0 .. n-1 of every layer, with their digests; see kernels.Pool.
func (p *pool) copyBlock(dst, src int32, firstPos, n int) {
	for i := range p.areas {
		l := &p.areas[i]
		l.Copy(p.block(i, dst, 0, n), l.BlockTokens, 0, p.block(i, src, 0, n), l.BlockTokens, 0, n)
		for h := range l.Heads {
			d, s := int(dst)*l.Heads+h, int(src)*l.Heads+h
			if int(l.filled[s]) == n {
				l.digest[d] = l.digest[s]
			} else {
				l.digest[d] = p.hash(i, dst, h, firstPos, 0, n)
			}
			l.filled[d] = uint16(n)
		}
	}
}
