package prefill

import (
	"fmt"
	"slices"
	"sync"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvlayout"
)

// source reads a prompt's rows from the pool for a receiver whose blocks may have another size. It
// implements kvconn.Source.
type source struct {
	pool      kernels.Pool
	layers    []kvlayout.Layer
	tokens    int // of our blocks
	positions int // of the prompt
	destBlock int // receiver's block size, tokens

	mu    sync.Mutex
	table []int32 // our blocks, -1 until known
	upto  []int   // by layer: positions ready so far
	last  *checked
}

func newSource(pool kernels.Pool, layers []kvlayout.Layer, positions, destBlock int) *source {
	tokens := layers[0].BlockTokens
	s := &source{pool: pool, layers: layers, tokens: tokens, positions: positions, destBlock: destBlock,
		table: make([]int32, (positions+tokens-1)/tokens), upto: make([]int, len(layers))}
	for i := range s.table {
		s.table[i] = -1
	}
	return s
}

// fill gives the source a whole prompt's blocks at once.
func (s *source) fill(blocks []int32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	copy(s.table, blocks)
	for l := range s.upto {
		s.upto[l] = s.positions
	}
}

// ready adds blocks that the engine completed, in order, and returns the receiver's blocks that are
// now complete.
func (s *source) ready(layer int, blocks []engine.Ready) []int {
	s.mu.Lock()
	defer s.mu.Unlock()
	from := s.upto[layer]
	for _, b := range blocks {
		s.table[b.Index] = b.Block
		s.upto[layer] = max(s.upto[layer], b.FirstPos+b.Rows)
	}
	return s.destBlocks(from, s.upto[layer])
}

// destBlocks lists the receiver's blocks that end in (from, upto].
func (s *source) destBlocks(from, upto int) []int {
	first, end := from/s.destBlock, upto/s.destBlock
	if upto == s.positions && upto%s.destBlock != 0 && from < upto {
		end++
	}
	out := make([]int, 0, end-first)
	for i := first; i < end; i++ {
		out = append(out, i)
	}
	return out
}

// Load implements kvconn.Source.
func (s *source) Load(layer, index, firstPos, rows int, dst []byte, digests []uint64) error {
	bt := s.tokens
	if layer < 0 || layer >= len(s.layers) || firstPos < 0 || rows < 1 || firstPos+rows > s.positions {
		return fmt.Errorf("load layer %d positions %d+%d of %d: out of range", layer, firstPos, rows, s.positions)
	}
	if l := &s.layers[layer]; len(dst) != l.PackedBytes(rows) || len(digests) != l.Heads {
		return fmt.Errorf("load: buffer of %d bytes and %d digests for %d rows", len(dst), len(digests), rows)
	}
	first, last := firstPos/bt, (firstPos+rows-1)/bt
	s.mu.Lock()
	blocks, upto := slices.Clone(s.table[first:last+1]), s.upto[layer]
	s.mu.Unlock()
	if firstPos+rows > upto { // the pool may still have another prompt's rows there
		return fmt.Errorf("load layer %d positions %d+%d: computed up to %d", layer, firstPos, rows, upto)
	}
	if first == last && firstPos == first*bt && rows == s.filled(first) {
		s.pool.Gather(layer, blocks[0], 0, rows, dst)
		s.pool.Digest(layer, blocks[0], digests)
		return nil
	}
	return s.cut(layer, first, blocks, firstPos, rows, dst, digests)
}

// View implements kvconn.ViewSource: whole blocks of the same size at both ends are sent from the
// pool itself.
func (s *source) View(layer, index, firstPos, rows int, digests []uint64) ([]byte, bool) {
	viewer, ok := s.pool.(kernels.Viewer)
	if !ok || rows != s.tokens {
		return nil, false
	}
	block, ok := s.Block(layer, index, firstPos, rows)
	if !ok || len(digests) != s.layers[layer].Heads {
		return nil, false
	}
	run, ok := viewer.View(layer, block, 0, rows)
	if ok {
		s.pool.Digest(layer, block, digests)
	}
	return run, ok
}

// Block implements kvconn.BlockSource, for blocks that are the same at both ends.
func (s *source) Block(layer, index, firstPos, rows int) (int32, bool) {
	bt := s.tokens
	if s.destBlock != bt || firstPos != index*bt || layer < 0 || layer >= len(s.layers) || index < 0 || index >= len(s.table) || rows != s.filled(index) {
		return 0, false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	// Before it is computed it has another prompt's rows; see Load.
	return s.table[index], firstPos+rows <= s.upto[layer]
}

// Spans implements kvconn.SpanSource: all our blocks that hold some of the positions.
func (s *source) Spans(layer, firstPos, rows int, to []kvlayout.Held) ([]kvlayout.Held, bool) {
	bt := s.tokens
	if layer < 0 || layer >= len(s.layers) || firstPos < 0 || rows < 1 || rows > s.positions-firstPos {
		return to, false
	}
	last := (firstPos + rows - 1) / bt
	s.mu.Lock()
	defer s.mu.Unlock()
	if last*bt+s.filled(last) > s.upto[layer] { // see Load
		return to, false
	}
	for i := firstPos / bt; i <= last; i++ {
		to = append(to, kvlayout.Held{Block: s.table[i], FirstPos: i * bt, Rows: s.filled(i)})
	}
	return to, true
}

// filled is how many of the prompt's rows are in block i of the table.
func (s *source) filled(i int) int { return min(s.tokens, s.positions-i*s.tokens) }

// cut joins or slices our blocks into one of the receiver's. Slicing makes new digests, so each
// source block is checked first: a bad row must not get a good digest.
func (s *source) cut(layer, first int, blocks []int32, firstPos, rows int, dst []byte, digests []uint64) error {
	l := &s.layers[layer]
	sum := make([]uint64, l.Heads)
	clear(digests)
	for i, block := range blocks {
		c, err := s.check(layer, first+i, block)
		if err != nil {
			return err
		}
		base := (first + i) * l.BlockTokens
		n := s.filled(first + i)
		lo, hi := max(firstPos, base), min(firstPos+rows, base+n)
		if lo == base && hi == base+n {
			l.Copy(dst, rows, lo-firstPos, c.rows, n, 0, n)
			copy(sum, c.sums)
		} else {
			part := make([]byte, l.PackedBytes(hi-lo))
			l.Copy(part, hi-lo, 0, c.rows, n, lo-base, hi-lo)
			kernels.DigestRows(l, lo, hi-lo, part, sum)
			l.Copy(dst, rows, lo-firstPos, part, hi-lo, 0, hi-lo)
		}
		for h := range digests {
			digests[h] += sum[h]
		}
	}
	return nil
}

// checked is a copy of one of our blocks that agrees with its digest.
type checked struct {
	layer, index int
	rows         []byte
	sums         []uint64
}

// check copies block i of the table from the pool and compares it with its digest. It keeps the
// last copy: the receiver's next block is often another piece of it.
func (s *source) check(layer, i int, block int32) (*checked, error) {
	s.mu.Lock()
	c := s.last
	s.mu.Unlock()
	if c != nil && c.layer == layer && c.index == i {
		return c, nil
	}
	l, n := &s.layers[layer], s.filled(i)
	c = &checked{layer: layer, index: i, rows: make([]byte, l.PackedBytes(n)), sums: make([]uint64, l.Heads)}
	stored := make([]uint64, l.Heads)
	s.pool.Gather(layer, block, 0, n, c.rows)
	s.pool.Digest(layer, block, stored)
	kernels.DigestRows(l, i*l.BlockTokens, n, c.rows, c.sums)
	if !slices.Equal(stored, c.sums) {
		return nil, fmt.Errorf("load layer %d block %d: %w", layer, block, kvconn.ErrDigest)
	}
	s.mu.Lock()
	s.last = c
	s.mu.Unlock()
	return c, nil
}

var (
	_ kvconn.ViewSource  = (*source)(nil)
	_ kvconn.BlockSource = (*source)(nil)
	_ kvconn.SpanSource  = (*source)(nil)
)
