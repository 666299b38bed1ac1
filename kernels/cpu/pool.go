package cpu

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"unsafe"

	"github.com/xpyd/xpyd/internal/memfd"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvlayout"
)

// pool is the KV memory of any layout: one area a layer, block after block, each
// packed as its kvlayout.Rows says, and a digest with its row count for each
// (layer, block, head).
//
// Nothing here is locked. Whoever owns a block's rows decides who may touch
// them; distinct blocks share no words.
type pool struct {
	layout kvlayout.Layout
	areas  []area
	blocks int

	mem     *memfd.Memory // holds the rows; nil: they are on the Go heap
	private error         // why it is not shared
}

type area struct {
	kvlayout.Layer
	data   []byte   // [block][block bytes]
	digest []uint64 // [block][head]
	filled []uint16 // [block][head]: rows 0..filled-1 are in digest
}

// A PoolError means that the machine lacks the memory for the pool.
type PoolError struct{ Err error }

func (e *PoolError) Error() string {
	return "the KV pool: " + strings.TrimPrefix(e.Err.Error(), "memfd: ")
}
func (e *PoolError) Unwrap() error { return e.Err }

var errPrivate = errors.New("the pool was not asked to be shared")

// NewPool returns a pool without a backend, for code that only moves blocks.
func NewPool(l kvlayout.Layout, blocks int) (kernels.Pool, error) {
	if err := l.Validate(); err != nil {
		return nil, fmt.Errorf("cpu pool: %w", err)
	}
	if blocks < 1 {
		return nil, fmt.Errorf("cpu pool: %d blocks", blocks)
	}
	return newPool(l, blocks, nil, errPrivate), nil
}

// poolMemory allocates memory for a pool, shareable if share asks for it and the system
// can. private says why others cannot map it.
func poolMemory(size int, share bool) (mem *memfd.Memory, private, err error) {
	private = errPrivate
	if err := memfd.Room(int64(size)); err != nil {
		return nil, private, &PoolError{err}
	}
	if share {
		if mem, private = memfd.New("xpyd-kv", size); private == nil {
			return mem, nil, nil
		}
	}
	mem, err = memfd.Private(size)
	return mem, private, err
}

// newPool makes a pool in mem, or on the Go heap if mem is nil; private says why it is not
// shared.
func newPool(l kvlayout.Layout, blocks int, mem *memfd.Memory, private error) *pool {
	p := &pool{layout: l, blocks: blocks, areas: make([]area, l.Layers()), mem: mem, private: private}
	offsets, _ := layerOffsets(l, blocks)
	for i, layer := range l.Resolve() {
		size := blocks * layer.BlockBytes()
		pl := area{Layer: layer, digest: make([]uint64, blocks*layer.Heads), filled: make([]uint16, blocks*layer.Heads)}
		if mem != nil {
			pl.data = mem.Bytes[offsets[i]:][:size:size]
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

// Shared implements kernels.Sharer.
func (p *pool) Shared() (kernels.Shared, error) {
	if p.private != nil {
		return kernels.Shared{}, p.private
	}
	offsets, _ := layerOffsets(p.layout, p.blocks)
	return kernels.Shared{FD: p.mem.FD, Bytes: p.mem.Size, Layers: offsets, Pages: string(p.mem.Pages)}, nil
}

// Populate touches the pool's pages now, as far as the machine has them: a process that
// relied on touching them later could be killed for it. After an error, a *PoolError or
// ctx's, close the backend.
func (p *pool) Populate(ctx context.Context) error {
	if p.mem == nil {
		return nil
	}
	err := p.mem.Populate(ctx)
	if err == nil || ctx.Err() != nil {
		return ctx.Err()
	}
	return &PoolError{err}
}

// close releases the memory and ends the pool.
func (p *pool) close() error {
	if p.mem == nil {
		return nil
	}
	return p.mem.Close()
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

// Gather implements kernels.Pool.
func (p *pool) Gather(layer int, block int32, row, n int, dst []byte) {
	l, b := p.packed(layer, block, row, n, len(dst))
	l.Copy(dst, n, 0, b, l.BlockTokens, row, n)
}

// Scatter implements kernels.Pool.
func (p *pool) Scatter(layer int, block int32, row, n int, src []byte) {
	l, b := p.packed(layer, block, row, n, len(src))
	l.Copy(b, l.BlockTokens, row, src, n, 0, n)
}

// packed returns the layer and the block bytes for a move of n positions of size bytes.
func (p *pool) packed(layer int, block int32, row, n, size int) (*area, []byte) {
	l, b := &p.areas[layer], p.block(layer, block, row, n)
	if size != l.PackedBytes(n) {
		panic(fmt.Sprintf("kernels/cpu: %d packed bytes for %d rows, want %d", size, n, l.PackedBytes(n)))
	}
	return l, b
}

// View implements kernels.Viewer.
func (p *pool) View(layer int, block int32, row, n int) (run []byte, ok bool) {
	if row != 0 || n != p.layout.BlockTokens || uint(block) >= uint(p.blocks) || uint(layer) >= uint(len(p.areas)) {
		return nil, false
	}
	return p.block(layer, block, row, n), true
}

// Digest implements kernels.Pool.
func (p *pool) Digest(layer int, block int32, dst []uint64) {
	l := &p.areas[layer]
	copy(dst[:l.Heads], l.digest[int(block)*l.Heads:][:l.Heads])
}

// SetDigest implements kernels.Pool.
func (p *pool) SetDigest(layer int, block int32, filled int, digest []uint64) {
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

// CopyBlock implements kernels.Pool.
func (p *pool) CopyBlock(dst, src int32, firstPos, n int) {
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
