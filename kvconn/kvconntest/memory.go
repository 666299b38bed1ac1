package kvconntest

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"sync"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvlayout"
)

// Row fills dst with the row (layer, plane, head, position) of the sequence seed. Every
// byte depends on all of them.
func Row(dst []byte, seed uint64, layer, plane, head, pos int) {
	x := mix(seed ^ uint64(layer)<<48 ^ uint64(plane)<<40 ^ uint64(head)<<24 ^ uint64(pos))
	for i := range dst {
		if i%8 == 0 {
			x = mix(x + uint64(i))
		}
		dst[i] = byte(x >> (8 * (i % 8)))
	}
}

// RowHash is the test's keyed hash of a row and its coordinates. Like the real
// one it makes a block's digest a sum.
func RowHash(layer, plane, head, pos int, row []byte) uint64 {
	h := mix(uint64(layer)<<48 ^ uint64(plane)<<40 ^ uint64(head)<<24 ^ uint64(pos) ^ 0x9e3779b97f4a7c15)
	for ; len(row) >= 8; row = row[8:] {
		h = mix(h ^ binary.LittleEndian.Uint64(row))
	}
	for _, b := range row {
		h = mix(h ^ uint64(b))
	}
	return h
}

// layerOf is one layer of a layout.
func layerOf(l kvlayout.Layout, layer int) *kvlayout.Layer { return &l.Resolve()[layer] }

// eachRow calls f for every row among n packed positions, with its scale, which is
// empty where rows have none.
func eachRow(l *kvlayout.Layer, packed []byte, n int, f func(plane, head, at int, row, scale []byte)) {
	l.Parts(packed, n, func(plane, head int, rows, scales []byte) {
		size, scale := l.RowBytes(plane), l.ScaleBytes()
		for at := range n {
			f(plane, head, at, rows[at*size:][:size], scales[at*scale:][:scale])
		}
	})
}

func mix(x uint64) uint64 {
	x ^= x >> 30
	x *= 0xbf58476d1ce4e5b9
	x ^= x >> 27
	x *= 0x94d049bb133111eb
	return x ^ x>>31
}

// Pool is a receiver's block pool.
type Pool struct {
	layout kvlayout.Layout
	rows   []kvlayout.Layer // its layers

	// Expect, when set, makes the rows that Check wants of a sequence: those of a
	// sender whose own are of another dtype. Set it before the first ticket.
	Expect func(seed uint64, layer, first, rows int) ([]byte, error)

	mu     sync.Mutex
	stored map[poolKey]bool // and not given up since
	gens   []uint32
	stores int
	pushed int // of them
	errs   []string

	mem    []byte             // of all blocks
	ranks  [][]kvlayout.Layer // each rank's layers, with its heads
	layers []kvconn.Span      // where they lie in mem, rank after rank
	idle   map[poolKey]bool   // blocks given up, which must not change any more
	shared bool               // a peer may write into mem
	gpu    GPU                // whose memory the blocks are in, and not mem; nil: none
}

type poolKey struct {
	layer int
	block int32
}

// NewPool makes a pool of empty blocks.
func NewPool(layout kvlayout.Layout, blocks int) *Pool {
	d := kvconn.DevicePool(layout, blocks)
	return &Pool{layout: layout, rows: layout.Resolve(), ranks: [][]kvlayout.Layer{layout.Resolve()}, stored: map[poolKey]bool{}, gens: make([]uint32, blocks),
		mem: make([]byte, d.Bytes), layers: d.Layers, idle: map[poolKey]bool{}}
}

// Divide divides the pool, which is empty, among so many ranks.
func (p *Pool) Divide(ranks int) error {
	_, err := p.divide(ranks, func(size int) (int, []byte) { return -1, make([]byte, size) })
	return err
}

// Share puts the pool into memory from alloc, divided among so many ranks, and describes it.
func (p *Pool) Share(ranks int, alloc func(size int) (fd int, mem []byte)) (*kvconn.Shared, error) {
	p.shared = true
	return p.divide(ranks, alloc)
}

func (p *Pool) divide(ranks int, alloc func(size int) (fd int, mem []byte)) (*kvconn.Shared, error) {
	layouts, err := p.layout.Ranks(ranks)
	if err != nil {
		return nil, err
	}
	p.ranks = nil
	d := &kvconn.Shared{Blocks: len(p.gens), Ranks: ranks}
	for _, l := range layouts {
		p.ranks = append(p.ranks, l.Resolve())
		part := kvconn.DevicePool(l, len(p.gens)) // but of no device
		for _, span := range part.Layers {
			span.Offset += d.Bytes
			d.Layers = append(d.Layers, span)
		}
		d.Bytes += part.Bytes
	}
	p.layers = d.Layers
	d.FD, p.mem = alloc(int(d.Bytes+4095) / 4096 * 4096)
	d.Bytes = int64(len(p.mem))
	return d, nil
}

// part is the memory of one block as one rank keeps it.
func (p *Pool) part(rank int, k poolKey) []byte {
	l := p.layers[rank*len(p.rows)+k.layer]
	if p.gpu != nil {
		l.Offset -= p.layers[rank*len(p.rows)].Offset
		return p.gpu.RankRows(rank)[l.Offset+int64(k.block)*l.Stride:][:l.Stride]
	}
	return p.mem[l.Offset+int64(k.block)*l.Stride:][:l.Stride]
}

// abandoned is what a block is filled with when it is given up.
const abandoned = 0xee

// untouched notes every block that was written after it was given up.
func (p *Pool) untouched() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for k := range p.idle {
		p.unchanged(k)
	}
}

// unchanged needs mu.
func (p *Pool) unchanged(k poolKey) {
	for r := range p.ranks {
		if slices.ContainsFunc(p.part(r, k), func(b byte) bool { return b != abandoned }) {
			p.errs = append(p.errs, fmt.Sprintf("layer %d block %d was written after the fence", k.layer, k.block))
		}
	}
}

// flip changes one bit of the rows that a placed frame speaks of, or of the
// first block of a pushed one.
func (p *Pool) flip(frame []byte) {
	if Step(frame[1]) == Pushed {
		p.gpu.Spoil(int(binary.LittleEndian.Uint32(frame[16+24:])), int32(binary.LittleEndian.Uint32(frame[16+36:])))
		return
	}
	layer, block := binary.LittleEndian.Uint32(frame[16+16:]), binary.LittleEndian.Uint32(frame[16+24:])
	p.part(len(p.ranks)-1, poolKey{int(layer), int32(block)})[0] ^= 1
}

// Dest lists n blocks from first on under their present generations.
func (p *Pool) Dest(first, n int) []kvconn.Dest {
	p.mu.Lock()
	defer p.mu.Unlock()
	d := make([]kvconn.Dest, n)
	for i := range d {
		d[i] = kvconn.Dest{Block: int32(first + i), Generation: p.gens[first+i]}
		for l := range p.layers {
			if k := (poolKey{l, int32(first + i)}); p.idle[k] {
				p.unchanged(k)
				delete(p.idle, k)
			}
		}
	}
	return d
}

// Reclaim gives blocks a new generation and empties them: what a receiver does
// after Revoke. Later stores under the old generation are errors.
func (p *Pool) Reclaim(dest []kvconn.Dest) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, d := range dest {
		p.gens[d.Block]++
		for l := range p.rows {
			k := poolKey{l, d.Block}
			delete(p.stored, k)
			for r := range p.ranks {
				copy(p.part(r, k), bytes.Repeat([]byte{abandoned}, len(p.part(r, k))))
			}
			p.idle[k] = true
		}
	}
}

// Stores counts the blocks of a layer stored so far.
func (p *Pool) Stores() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.stores
}

// Pushed counts those of them that a peer's device wrote.
func (p *Pool) Pushed() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.pushed
}

// Errors lists the broken promises that the pool has seen.
func (p *Pool) Errors() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.errs)
}

// Sink returns a sink for the blocks dest, held under those generations.
func (p *Pool) Sink(dest []kvconn.Dest) kvconn.Sink {
	s := &poolSink{p: p, gens: map[int32]uint32{}}
	for _, d := range dest {
		s.gens[d.Block] = d.Generation
	}
	return s
}

type poolSink struct {
	p    *Pool
	gens map[int32]uint32
}

func (s *poolSink) Store(layer int, dst int32, row, rows, firstPos int, packed []byte, digests []uint64) error {
	l := &s.p.rows[layer]
	if len(packed) != l.PackedBytes(rows) || len(digests) != l.Heads || row != 0 {
		return fmt.Errorf("layer %d: %d bytes, %d digests, row %d", layer, len(packed), len(digests), row)
	}
	sums := make([]uint64, l.Heads)
	digest(l, firstPos, rows, packed, sums)
	if !slices.Equal(sums, digests) {
		return kvconn.ErrDigest
	}
	s.p.mu.Lock()
	defer s.p.mu.Unlock()
	s.p.stores++
	s.p.held(s, dst)
	k := poolKey{layer, dst}
	if s.p.stored[k] && !s.p.shared { // a peer may have written it again
		s.p.errs = append(s.p.errs, fmt.Sprintf("second store into layer %d block %d", layer, dst))
	}
	s.p.stored[k] = true
	for r := range s.p.ranks {
		kvlayout.CopyHeads(&s.p.ranks[r][layer], s.p.part(r, k), l.BlockTokens, 0, l, packed, rows, 0, rows)
	}
	return nil
}

// View implements kvconn.ViewSink: whole blocks have memory of their own.
func (s *poolSink) View(layer int, dst int32, row, rows int) ([]byte, bool) {
	if row != 0 || rows != s.p.layout.BlockTokens || len(s.p.ranks) > 1 {
		return nil, false
	}
	s.p.mu.Lock()
	defer s.p.mu.Unlock()
	s.p.held(s, dst)
	return s.p.part(0, poolKey{layer, dst}), true
}

// Verify implements kvconn.ViewSink.
func (s *poolSink) Verify(layer int, dst int32, row, rows, firstPos int, digests []uint64) error {
	if row != 0 || rows != s.p.layout.BlockTokens || len(digests) != s.p.rows[layer].Heads {
		return fmt.Errorf("layer %d block %d: verify of rows %d+%d", layer, dst, row, rows)
	}
	all := &s.p.rows[layer]
	run := make([]byte, all.BlockBytes())
	for r := range s.p.ranks { // every copy of a head
		l, part := &s.p.ranks[r][layer], slices.Clone(s.p.part(r, poolKey{layer, dst}))
		sums, at := make([]uint64, l.Heads), l.FirstHead-all.FirstHead
		if digest(l, firstPos, rows, part, sums); !slices.Equal(sums, digests[at:at+l.Heads]) {
			return kvconn.ErrDigest
		}
		kvlayout.CopyHeads(all, run, rows, 0, l, part, rows, 0, rows)
	}
	return s.Store(layer, dst, row, rows, firstPos, run, digests)
}

// held notes a block that is written under a generation that is over; needs mu.
func (p *Pool) held(s *poolSink, dst int32) {
	if gen, ok := s.gens[dst]; !ok || gen != p.gens[dst] {
		p.errs = append(p.errs, fmt.Sprintf("store into block %d under generation %d, pool has %d", dst, gen, p.gens[dst]))
	}
}

func digest(l *kvlayout.Layer, firstPos, rows int, packed []byte, sums []uint64) {
	eachRow(l, packed, rows, func(plane, head, at int, row, scale []byte) {
		sums[head] += RowHash(l.Number, plane, l.FirstHead+head, firstPos+at, slices.Concat(row, scale))
	})
}

// Check compares blocks with the rows that sequence seed has, but for those that skip
// reports.
func (p *Pool) Check(seed uint64, dest []kvconn.Dest, positions int, skip func(layer, index int) bool) (err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	src := &Source{Layout: p.layout, Seed: seed}
	for l := range p.rows {
		for i, d := range dest {
			if skip != nil && skip(l, i) {
				continue
			}
			first := i * p.layout.BlockTokens
			rows := min(p.layout.BlockTokens, positions-first)
			want := make([]byte, p.rows[l].PackedBytes(rows))
			if p.Expect == nil {
				src.fill(&p.rows[l], first, rows, want)
			} else if want, err = p.Expect(seed, l, first, rows); err != nil {
				return err
			}
			k := poolKey{l, d.Block}
			for r := range p.ranks { // not as it was verified, but as it is now
				of := &p.ranks[r][l]
				got, its := make([]byte, of.PackedBytes(rows)), make([]byte, of.PackedBytes(rows))
				of.Copy(got, rows, 0, p.part(r, k), p.layout.BlockTokens, 0, rows)
				kvlayout.CopyHeads(of, its, rows, 0, &p.rows[l], want, rows, 0, rows)
				if !p.stored[k] || !bytes.Equal(got, its) {
					return fmt.Errorf("layer %d block %d (index %d), rank %d: stored %t, or its rows differ", l, d.Block, i, r, p.stored[k])
				}
			}
		}
	}
	return nil
}

// Source makes the rows of sequence Seed.
type Source struct {
	Layout kvlayout.Layout
	Seed   uint64
	Ranks  int // of the sender: the blocks of several are no one run
	// Hook, when set, runs before each load; its error is Load's.
	Hook func(layer, index int) error

	pool *gpuBlocks // where the rows lie; nil: nowhere, they are made when asked for

	mu     sync.Mutex
	loads  int
	freed  bool
	misuse int
	blocks map[int]int32    // of pool, by index
	rows   map[poolKey]bool // of pool, appended for Spans

	positions int // of the prompt; for Spans
}

// Load implements kvconn.Source.
func (s *Source) Load(layer, index, firstPos, rows int, dst []byte, digests []uint64) error {
	s.mu.Lock()
	s.loads++
	if s.freed {
		s.misuse++
	}
	s.mu.Unlock()
	if s.Hook != nil {
		if err := s.Hook(layer, index); err != nil {
			return err
		}
	}
	l := layerOf(s.Layout, layer)
	s.fill(l, firstPos, rows, dst)
	clear(digests)
	digest(l, firstPos, rows, dst, digests)
	return nil
}

// View implements kvconn.ViewSource: whole blocks of the source's size.
func (s *Source) View(layer, index, firstPos, rows int, digests []uint64) ([]byte, bool) {
	if rows != s.Layout.BlockTokens || s.Ranks > 1 {
		return nil, false
	}
	run := make([]byte, layerOf(s.Layout, layer).PackedBytes(rows))
	return run, s.Load(layer, index, firstPos, rows, run, digests) == nil
}

func (s *Source) fill(l *kvlayout.Layer, firstPos, rows int, dst []byte) {
	eachRow(l, dst, rows, func(plane, head, at int, row, scale []byte) {
		Row(row, s.Seed, l.Number, plane, head, firstPos+at)
		if len(scale) > 0 { // positive, finite and not too small: as a step makes them
			Row(scale, s.Seed, l.Number, plane+2, head, firstPos+at)
			scale[3] = 0x10 + scale[3]&0x3f
		}
	})
}

// Free marks the blocks as freed: a load after it is counted as misuse.
func (s *Source) Free() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.freed = true
	s.giveBack()
}

// Loads returns how often Load was called, and how often after Free.
func (s *Source) Loads() (loads, afterFree int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.loads, s.misuse
}
