package kvbench

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync/atomic"

	"github.com/xpyd/xpyd/internal/memfd"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvlayout"
)

// pool is a block pool as a worker's: [layer][block] of BlockBytes, and the
// digests [layer][block][head] that came with the rows.
type pool struct {
	layers []kvlayout.Layer // all alike
	blocks int              // of each layer
	size   int              // bytes of a block
	memory *memfd.Memory
	mem    []byte // its
	digest []uint64
	shared *kvconn.Shared // for the sender to map; nil: the memory is private
}

// newPool makes a pool; one to be shared lies in a memory file, as decode's does.
func newPool(c Config, blocks int, share bool) (p *pool, err error) {
	p = &pool{layers: c.layout().Resolve(), blocks: blocks, size: c.BlockBytes, digest: make([]uint64, c.Layers*blocks*c.KVHeads)}
	bytes := c.Layers * blocks * c.BlockBytes
	if share {
		p.memory, err = memfd.New("xpyd-bench-kv", bytes)
	} else {
		p.memory, err = memfd.Private(bytes)
	}
	if err != nil {
		return nil, fmt.Errorf("pool of %s: %w", Size(bytes), err)
	}
	if p.mem = p.memory.Bytes; share {
		p.shared = &kvconn.Shared{FD: p.memory.FD, Bytes: p.memory.Size, Blocks: p.blocks}
		for layer := range p.layers {
			p.shared.Layers = append(p.shared.Layers, kvconn.Span{Offset: int64(layer * p.blocks * p.size), Stride: int64(p.size)})
		}
	}
	clear(p.mem) // so that no page is touched for the first time on the clock
	return p, nil
}

func (p *pool) run(layer int, block int32) []byte {
	at := (layer*p.blocks + int(block)) * p.size
	return p.mem[at : at+p.size : at+p.size]
}

func (p *pool) sums(layer int, block int32) []uint64 {
	heads := p.layers[layer].Heads
	at := (layer*p.blocks + int(block)) * heads
	return p.digest[at : at+heads]
}

// order is the block id of each index of a sequence.
func order(scatter string, blocks int, seed uint64) []int32 {
	o := make([]int32, blocks)
	for i := range o {
		o[i] = int32(i)
	}
	if scatter == "shuffled" {
		rand.New(rand.NewPCG(seed, 0)).Shuffle(blocks, func(i, j int) { o[i], o[j] = o[j], o[i] })
	}
	return o
}

// pattern fills run with what block index of a layer holds.
func pattern(layer, index int, run []byte) {
	r := rand.NewPCG(uint64(layer), uint64(index))
	for i := 0; i+8 <= len(run); i += 8 {
		v := r.Uint64()
		for k := range 8 {
			run[i+k] = byte(v >> (8 * k))
		}
	}
	for i := len(run) &^ 7; i < len(run); i++ {
		run[i] = byte(r.Uint64())
	}
}

// fill writes the pattern and its digests as one sequence over order.
func (p *pool) fill(order []int32) {
	for layer := range p.layers {
		for i, b := range order {
			run := p.run(layer, b)
			pattern(layer, i, run)
			kernels.DigestRows(&p.layers[layer], i*p.layers[layer].BlockTokens, p.layers[layer].BlockTokens, run, p.sums(layer, b))
		}
	}
}

// check compares the blocks of a sequence with the pattern.
func (p *pool) check(order []int32) error {
	want := make([]byte, p.size)
	for layer := range p.layers {
		for i, b := range order {
			if pattern(layer, i, want); !bytes.Equal(want, p.run(layer, b)) {
				return fmt.Errorf("block %d of layer %d is not what was sent", i, layer)
			}
		}
	}
	return nil
}

// source is a sequence in the sender's pool. It implements kvconn.ViewSource
// as prefill's does.
type source struct {
	*pool
	order []int32
}

var _ kvconn.ViewSource = source{}

// View implements kvconn.ViewSource: every block is full.
func (s source) View(layer, index, firstPos, rows int, digests []uint64) ([]byte, bool) {
	if rows != s.layers[layer].BlockTokens || index >= len(s.order) {
		return nil, false
	}
	copy(digests, s.sums(layer, s.order[index]))
	return s.run(layer, s.order[index]), true
}

// Load implements kvconn.Source.
func (s source) Load(layer, index, firstPos, rows int, dst []byte, digests []uint64) error {
	run, ok := s.View(layer, index, firstPos, rows, digests)
	if !ok {
		return fmt.Errorf("load block %d of %d, %d rows", index, len(s.order), rows)
	}
	copy(dst, run)
	return nil
}

// sink is the receiver's pool. It implements kvconn.ViewSink as decode's does, except
// that it does not check digests while unchecked is set.
type sink struct {
	*pool
	unchecked atomic.Bool
	arrived   func() // called for every block; may be nil
}

var _ kvconn.ViewSink = (*sink)(nil)

// View implements kvconn.ViewSink.
func (s *sink) View(layer int, dst int32, row, rows int) ([]byte, bool) {
	if row != 0 || rows != s.layers[layer].BlockTokens {
		return nil, false
	}
	return s.run(layer, dst), true
}

// Verify implements kvconn.ViewSink.
func (s *sink) Verify(layer int, dst int32, row, rows, firstPos int, digests []uint64) error {
	return s.accept(layer, dst, rows, firstPos, s.run(layer, dst), digests)
}

// Store implements kvconn.Sink.
func (s *sink) Store(layer int, dst int32, row, rows, firstPos int, packed []byte, digests []uint64) error {
	if err := s.accept(layer, dst, rows, firstPos, packed, digests); err != nil {
		return err
	}
	copy(s.run(layer, dst), packed)
	return nil
}

// accept checks the rows of a block and keeps their digests.
func (s *sink) accept(layer int, dst int32, rows, firstPos int, run []byte, digests []uint64) error {
	if s.arrived != nil {
		s.arrived()
	}
	if !s.unchecked.Load() {
		var few [16]uint64
		sums := few[:]
		l := &s.layers[layer]
		if l.Heads > len(few) {
			sums = make([]uint64, l.Heads)
		}
		sums = sums[:l.Heads]
		kernels.DigestRows(l, firstPos, rows, run, sums)
		if !slices.Equal(sums, digests) {
			return kvconn.ErrDigest
		}
	}
	copy(s.sums(layer, dst), digests)
	return nil
}
