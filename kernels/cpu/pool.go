package cpu

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"unsafe"

	"github.com/xpyd/xpyd/internal/memfd"
	"github.com/xpyd/xpyd/kernels"
)

// pool is the KV memory: one area a layer, laid out as kernels/DESIGN.md says,
// and a digest with its row count for each (layer, block, head).
//
// Nothing here is locked. Whoever owns a block's rows decides who may touch
// them; distinct blocks share no words.
type pool struct {
	layout kernels.Layout
	blocks int
	data   [][]float32 // [layer] of [block][2][kv_head][block_tokens][head_dim]
	digest []uint64    // [layer][block][kv_head]
	filled []uint16    // [layer][block][kv_head]: rows 0..filled-1 are in digest

	mem     *memfd.Memory // holds data; nil: the Go heap does
	private error         // why it is not shared
}

// A PoolError says that the machine has not the memory for the pool.
type PoolError struct{ Err error }

func (e *PoolError) Error() string {
	return "the KV pool: " + strings.TrimPrefix(e.Err.Error(), "memfd: ")
}
func (e *PoolError) Unwrap() error { return e.Err }

var errPrivate = errors.New("the pool was not asked to be shared")

// NewPool is a pool without a backend, for who only moves blocks.
func NewPool(l kernels.Layout, blocks int) (kernels.Pool, error) {
	if l.DType != kernels.F32.String() || l.RowBytes != 4*l.HeadDim || l.Layers < 1 || l.KVHeads < 1 || l.BlockTokens < 1 || blocks < 1 {
		return nil, fmt.Errorf("cpu pool: %d blocks of layout %+v: want f32", blocks, l)
	}
	return newPool(l, blocks, nil, errPrivate), nil
}

// poolMemory is memory for a pool, for others to map if share asks for it and the
// system has such. Private says why others cannot; memory is nil where the system has
// only the Go heap.
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
	if mem, err = memfd.Private(size); errors.Is(err, memfd.ErrUnsupported) {
		err = nil
	}
	return mem, private, err
}

// newPool makes a pool in mem, or on the Go heap; private says why that is not shared.
func newPool(l kernels.Layout, blocks int, mem *memfd.Memory, private error) *pool {
	p := &pool{
		layout: l,
		blocks: blocks,
		data:   make([][]float32, l.Layers),
		digest: make([]uint64, l.Layers*blocks*l.KVHeads),
		filled: make([]uint16, l.Layers*blocks*l.KVHeads),
		mem:    mem, private: private,
	}
	for i := range p.data {
		if p.mem != nil {
			at := i * layerBytes(l, blocks)
			p.data[i] = floatsOf(p.mem.Bytes[at : at+blocks*l.BlockBytes()])
		} else {
			p.data[i] = allocFloats(blocks * l.BlockBytes() / 4)
		}
	}
	return p
}

// layerBytes is the distance between two layers of a pool that is not on the heap:
// whole pages, so that no two layers share one.
func layerBytes(l kernels.Layout, blocks int) int { return roundUp(blocks*l.BlockBytes(), 4096) }

// Shared implements kernels.Sharer.
func (p *pool) Shared() (kernels.Shared, error) {
	if p.private != nil {
		return kernels.Shared{}, p.private
	}
	s := kernels.Shared{FD: p.mem.FD, Bytes: p.mem.Size, Stride: int64(p.layout.BlockBytes()),
		Layers: make([]int64, p.layout.Layers), Pages: string(p.mem.Pages)}
	for i := range s.Layers {
		s.Layers[i] = int64(i * layerBytes(p.layout, p.blocks))
	}
	return s, nil
}

// Populate gives the pool its pages now, as far as the machine has them: a process
// that counts on pages which it touches later could be killed for them. After an error,
// a *PoolError or ctx's, the backend is to be closed.
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

// close gives the memory back; the pool is gone then.
func (p *pool) close() error {
	if p.mem == nil {
		return nil
	}
	return p.mem.Close()
}

// rows returns rows row..row+n-1 of one head's K (kv 0) or V (kv 1).
func (p *pool) rows(layer int, block int32, kv, head, row, n int) []float32 {
	l := &p.layout
	if row < 0 || n < 0 || row+n > l.BlockTokens || uint(block) >= uint(p.blocks) {
		panic(fmt.Sprintf("kernels/cpu: rows %d+%d of block %d, pool has %d blocks of %d", row, n, block, p.blocks, l.BlockTokens))
	}
	at := (((int(block)*2+kv)*l.KVHeads+head)*l.BlockTokens + row) * l.HeadDim
	return p.data[layer][at : at+n*l.HeadDim]
}

func (p *pool) slot(layer int, block int32, head int) int {
	return (layer*p.blocks+int(block))*p.layout.KVHeads + head
}

// base points at row 0 of one head's K or V in block 0.
func (p *pool) base(layer, kv, head int) unsafe.Pointer {
	return unsafe.Pointer(&p.data[layer][(kv*p.layout.KVHeads+head)*p.layout.BlockTokens*p.layout.HeadDim])
}

// appended brings the digest up to date after rows row..row+n-1 of one head
// were written. pos is the absolute position of the block's row 0. Rows at and
// after row+n leave the digest; rows below row are hashed again unless they
// are exactly what it holds.
func (p *pool) appended(layer int, block int32, head, pos, row, n int) {
	s := p.slot(layer, block, head)
	if int(p.filled[s]) != row {
		p.digest[s] = p.hash(layer, block, head, pos, 0, row)
	}
	p.digest[s] += p.hash(layer, block, head, pos, row, n)
	p.filled[s] = uint16(row + n)
}

func (p *pool) hash(layer int, block int32, head, pos, row, n int) (sum uint64) {
	for kv := range 2 {
		rows := bytesOf(p.rows(layer, block, kv, head, row, n))
		sum += kernels.DigestHeadRows(layer, kv, head, pos+row, n, p.layout.RowBytes, rows)
	}
	return sum
}

// Gather implements kernels.Pool.
func (p *pool) Gather(layer int, block int32, row, n int, dst []byte) {
	p.each(layer, block, row, n, len(dst), func(off int, rows []byte) { copy(dst[off:], rows) })
}

// Scatter implements kernels.Pool.
func (p *pool) Scatter(layer int, block int32, row, n int, src []byte) {
	p.each(layer, block, row, n, len(src), func(off int, rows []byte) { copy(rows, src[off:]) })
}

// View implements kernels.Viewer.
func (p *pool) View(layer int, block int32, row, n int) (run []byte, ok bool) {
	l := &p.layout
	if row != 0 || n != l.BlockTokens || uint(block) >= uint(p.blocks) || uint(layer) >= uint(l.Layers) {
		return nil, false
	}
	size := l.BlockBytes()
	at := int(block) * size
	return bytesOf(p.data[layer])[at : at+size : at+size], true
}

// each visits the packed runs of n rows with their offset in a packed buffer.
func (p *pool) each(layer int, block int32, row, n, size int, f func(off int, rows []byte)) {
	if size != p.layout.RowsBytes(n) {
		panic(fmt.Sprintf("kernels/cpu: %d packed bytes for %d rows, want %d", size, n, p.layout.RowsBytes(n)))
	}
	off := 0
	for kv := range 2 {
		for h := range p.layout.KVHeads {
			rows := bytesOf(p.rows(layer, block, kv, h, row, n))
			f(off, rows)
			off += len(rows)
		}
	}
}

// Digest implements kernels.Pool.
func (p *pool) Digest(layer int, block int32, dst []uint64) {
	s := p.slot(layer, block, 0)
	copy(dst[:p.layout.KVHeads], p.digest[s:s+p.layout.KVHeads])
}

// SetDigest implements kernels.Pool.
func (p *pool) SetDigest(layer int, block int32, filled int, digest []uint64) {
	if filled < 0 || filled > p.layout.BlockTokens {
		panic(fmt.Sprintf("kernels/cpu: digest of %d rows, a block has %d", filled, p.layout.BlockTokens))
	}
	s := p.slot(layer, block, 0)
	copy(p.digest[s:s+p.layout.KVHeads], digest[:p.layout.KVHeads])
	for h := range p.layout.KVHeads {
		p.filled[s+h] = uint16(filled)
	}
}

// CopyBlock implements kernels.Pool.
func (p *pool) CopyBlock(dst, src int32, firstPos, n int) {
	for layer := range p.layout.Layers {
		for h := range p.layout.KVHeads {
			for kv := range 2 {
				copy(p.rows(layer, dst, kv, h, 0, n), p.rows(layer, src, kv, h, 0, n))
			}
			d, s := p.slot(layer, dst, h), p.slot(layer, src, h)
			if int(p.filled[s]) == n {
				p.digest[d] = p.digest[s]
			} else {
				p.digest[d] = p.hash(layer, dst, h, firstPos, 0, n)
			}
			p.filled[d] = uint16(n)
		}
	}
}
