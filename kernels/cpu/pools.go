package cpu

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/xpyd/xpyd/internal/memfd"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvlayout"
)

// pools are those of all ranks, which have the same blocks. They implement kernels.Pool in terms
// of the whole model's heads: a head that several ranks keep is read from the first of them, and
// written to all.
type pools struct {
	layout kvlayout.Layout
	layers []kvlayout.Layer // of layout
	ranks  []*pool
	blocks int

	mem     *memfd.Memory // holds the rows; nil: they are on the Go heap
	private error         // why it is not shared
}

// A PoolError means that the machine lacks the memory for the pool.
type PoolError struct{ Err error }

func (e *PoolError) Error() string {
	return "the KV pool: " + strings.TrimPrefix(e.Err.Error(), "memfd: ")
}
func (e *PoolError) Unwrap() error { return e.Err }

var errPrivate = errors.New("the pool was not asked to be shared")

// NewPool returns a pool without a backend, for code that only moves blocks.
func NewPool(l kvlayout.Layout, blocks int) (kernels.Pool, error) { return NewRankedPool(l, blocks, 1) }

// NewRankedPool is NewPool for a number of ranks.
func NewRankedPool(l kvlayout.Layout, blocks, ranks int) (kernels.Pool, error) {
	if err := l.Validate(); err != nil {
		return nil, fmt.Errorf("cpu pool: %w", err)
	}
	if blocks < 1 {
		return nil, fmt.Errorf("cpu pool: %d blocks", blocks)
	}
	p, err := newPools(l, blocks, ranks)
	if err != nil {
		return nil, fmt.Errorf("cpu pool: %w", err)
	}
	p.fill(nil)
	p.private = errPrivate
	return p, nil
}

// newPools describes pools; fill makes them.
func newPools(l kvlayout.Layout, blocks, ranks int) (*pools, error) {
	layouts, err := l.Ranks(ranks)
	if err != nil {
		return nil, err
	}
	p := &pools{layout: l, layers: l.Resolve(), blocks: blocks}
	for i := range layouts {
		p.ranks = append(p.ranks, &pool{layout: layouts[i]})
	}
	return p, nil
}

// size is how many bytes the rows take outside the heap.
func (p *pools) size() (size int) {
	for _, r := range p.ranks {
		_, n := layerOffsets(r.layout, p.blocks)
		size += n
	}
	return size
}

// fill makes the ranks' pools in mem, one behind the other, or on the Go heap if mem is nil.
func (p *pools) fill(mem *memfd.Memory) {
	p.mem = mem
	var at int
	for i, r := range p.ranks {
		var part []byte
		if mem != nil {
			_, n := layerOffsets(r.layout, p.blocks)
			part, at = mem.Bytes[at:at+n], at+n
		}
		p.ranks[i] = newPool(r.layout, p.blocks, part)
	}
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

// Shared implements kernels.Sharer.
func (p *pools) Shared() (kernels.Shared, error) {
	if p.private != nil {
		return kernels.Shared{}, p.private
	}
	s := kernels.Shared{FD: p.mem.FD, Bytes: p.mem.Size, Ranks: len(p.ranks), Pages: string(p.mem.Pages)}
	var at int64
	for _, r := range p.ranks {
		offsets, size := layerOffsets(r.layout, p.blocks)
		for _, offset := range offsets {
			s.Layers = append(s.Layers, at+offset)
		}
		at += int64(size)
	}
	return s, nil
}

// Populate touches the pool's pages now, as far as the machine has them: a process that
// relied on touching them later could be killed for it. After an error, a *PoolError or
// ctx's, close the backend.
func (p *pools) Populate(ctx context.Context) error {
	if p.mem == nil {
		return nil
	}
	err := p.mem.Populate(ctx)
	if err == nil || ctx.Err() != nil {
		return ctx.Err()
	}
	return &PoolError{err}
}

// close releases the memory and ends the pools.
func (p *pools) close() error {
	if p.mem == nil {
		return nil
	}
	return p.mem.Close()
}

// alone is the pool of all heads where there is one rank; else nil.
func (p *pools) alone() *pool {
	if len(p.ranks) == 1 {
		return p.ranks[0]
	}
	return nil
}

// sized panics unless n positions of a layer, packed, have this size.
func (p *pools) sized(layer, n, size int) *kvlayout.Layer {
	l := &p.layers[layer]
	if size != l.PackedBytes(n) {
		panic(fmt.Sprintf("kernels/cpu: %d packed bytes for %d rows, want %d", size, n, l.PackedBytes(n)))
	}
	return l
}

// Gather implements kernels.Pool.
func (p *pools) Gather(layer int, block int32, row, n int, dst []byte) {
	whole, bt := p.sized(layer, n, len(dst)), p.layout.BlockTokens
	if one := p.alone(); one != nil {
		whole.Copy(dst, n, 0, one.block(layer, block, row, n), bt, row, n)
		return
	}
	for i, r := range p.ranks {
		if p.first(i, layer) {
			kvlayout.CopyHeads(whole, dst, n, 0, &r.areas[layer].Layer, r.block(layer, block, row, n), bt, row, n)
		}
	}
}

// first reports whether no rank before this one keeps its heads of a layer.
func (p *pools) first(rank, layer int) bool {
	return rank == 0 || p.ranks[rank].areas[layer].FirstHead != p.ranks[rank-1].areas[layer].FirstHead
}

// Scatter implements kernels.Pool.
func (p *pools) Scatter(layer int, block int32, row, n int, src []byte) {
	whole, bt := p.sized(layer, n, len(src)), p.layout.BlockTokens
	if one := p.alone(); one != nil {
		whole.Copy(one.block(layer, block, row, n), bt, row, src, n, 0, n)
		return
	}
	for _, r := range p.ranks {
		kvlayout.CopyHeads(&r.areas[layer].Layer, r.block(layer, block, row, n), bt, row, whole, src, n, 0, n)
	}
}

// View implements kernels.Viewer: the rows of several ranks are no one run.
func (p *pools) View(layer int, block int32, row, n int) (run []byte, ok bool) {
	one := p.alone()
	if one == nil || row != 0 || n != p.layout.BlockTokens || uint(block) >= uint(p.blocks) || uint(layer) >= uint(len(one.areas)) {
		return nil, false
	}
	return one.block(layer, block, row, n), true
}

// Parts implements kernels.PartViewer.
func (p *pools) Parts(parts []kernels.Part, layer int, block int32) []kernels.Part {
	for _, r := range p.ranks {
		parts = append(parts, kernels.Part{Layer: &r.areas[layer].Layer, Run: r.block(layer, block, 0, p.layout.BlockTokens)})
	}
	return parts
}

// Digest implements kernels.Pool.
func (p *pools) Digest(layer int, block int32, dst []uint64) {
	whole := &p.layers[layer]
	for _, r := range p.ranks {
		r.digestOf(layer, block, dst[r.areas[layer].FirstHead-whole.FirstHead:])
	}
}

// SetDigest implements kernels.Pool.
func (p *pools) SetDigest(layer int, block int32, filled int, digest []uint64) {
	whole := &p.layers[layer]
	for _, r := range p.ranks {
		r.setDigest(layer, block, filled, digest[r.areas[layer].FirstHead-whole.FirstHead:])
	}
}

// CopyBlock implements kernels.Pool.
func (p *pools) CopyBlock(dst, src int32, firstPos, n int) {
	for _, r := range p.ranks {
		r.copyBlock(dst, src, firstPos, n)
	}
}
