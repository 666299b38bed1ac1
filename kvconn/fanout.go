package kvconn

import (
	"errors"
	"fmt"
	"slices"
	"sync"
)

// Fanout is one pass over a source for several receivers of the same rows: n
// choices on several decode workers, or a hedged decode. A block of a layer is
// gathered once, when the first receiver's turn comes, and kept until the
// others have had it; what would exceed the budget is dropped, oldest first,
// and loaded again for who is that far behind. So a slow receiver costs loads
// and never memory or the others' time, and a dead one nothing.
//
// Each Outgoing is committed, or failed, and waited for by itself. Only their
// shape must be equal: positions, Layout and block size.
type Fanout struct {
	src    Source
	budget int

	// mu comes before a sender's mu. No load runs inside it.
	mu    sync.Mutex
	shape Layout
	taps  []*tap
	ready []pushed // by layer
	kept  map[uint32]*gathered
	order []*gathered // of kept, oldest first
	bytes int         // of kept
}

// pushed are the blocks of a layer that were pushed so far, in order.
type pushed struct {
	has  bitmap
	list []int
}

// gathered is one unit on its way to several receivers.
type gathered struct {
	unit    uint32
	pending uint64        // taps that have not had it
	loaded  chan struct{} // closed when rows, sums and err are set
	rows    []byte
	sums    []uint64
	err     error
	size    int
}

// tap is one receiver's view of the source.
type tap struct {
	f    *Fanout
	o    *Outgoing
	bit  uint64
	had  bitmap // units that it has loaded, or does not need
	over bool
}

// maxTaps is how many receivers one Fanout may have.
const maxTaps = 64

// NewFanout makes a fan-out over src that keeps at most budget bytes of rows.
func NewFanout(src Source, budget int) *Fanout {
	return &Fanout{src: src, budget: budget, kept: map[uint32]*gathered{}}
}

var errFanout = errors.New("not of the fan-out's shape, or too many")

// Accept takes o on as one more receiver, and pushes to it what has been
// pushed so far. The error is an *Error when the ticket is over; else it is of
// another shape, and nothing has happened to it: make another Fanout.
func (f *Fanout) Accept(o *Outgoing) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	blocks, layers := len(o.t.Dest), o.layout.Layers()
	if len(f.taps) == 0 {
		f.shape, f.ready = o.layout, make([]pushed, layers)
		for l := range f.ready {
			f.ready[l].has = newBitmap(blocks)
		}
	} else if first := f.taps[0].o; first.t.Positions != o.t.Positions || f.shape.BlockTokens != o.layout.BlockTokens ||
		!slices.Equal(f.shape.Groups, o.layout.Groups) || len(f.taps) == maxTaps {
		return fmt.Errorf("ticket %d of %s: %w", o.t.ID, o.p.peer.PeerID, errFanout)
	}
	t := &tap{f: f, o: o, bit: 1 << len(f.taps), had: newBitmap(layers * blocks)}
	copy(t.had, o.have)
	if err := o.Accept(t); err != nil {
		return err
	}
	f.taps = append(f.taps, t)
	for l := range f.ready {
		o.Push(l, f.ready[l].list)
	}
	return nil
}

// Push is Outgoing.Push to every receiver, present and to come.
func (f *Fanout) Push(layer int, ready []int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.taps) == 0 || layer < 0 || layer >= len(f.ready) {
		return
	}
	blocks, r := len(f.taps[0].o.t.Dest), &f.ready[layer]
	for _, index := range ready {
		if index >= 0 && index < blocks && !r.has.has(index) {
			r.has.set(index)
			r.list = append(r.list, index)
		}
	}
	for _, t := range f.taps {
		t.o.Push(layer, ready)
	}
}

// Kept is how many bytes of rows are kept now.
func (f *Fanout) Kept() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.sweep()
	return f.bytes
}

// Load implements Source.
func (t *tap) Load(layer, index, firstPos, rows int, dst []byte, digests []uint64) error {
	g, mine := t.f.claim(t, layer, index)
	switch {
	case g == nil: // nobody else wants it
		if err := t.f.src.Load(layer, index, firstPos, rows, dst, digests); err != nil {
			return err
		}
	case mine:
		t.f.gather(g, layer, index, firstPos, rows, len(dst), len(digests))
		fallthrough
	default:
		<-g.loaded // a load is as short as a copy
		if g.err != nil {
			return g.err
		}
		copy(dst, g.rows)
		copy(digests, g.sums)
	}
	t.f.release(t, layer, index, g)
	return nil
}

// View implements ViewSource: rows that can be sent from where they lie need
// no gathering, and what was gathered can be sent from there.
func (t *tap) View(layer, index, firstPos, rows int, digests []uint64) ([]byte, bool) {
	if src, ok := t.f.src.(ViewSource); ok {
		if run, ok := src.View(layer, index, firstPos, rows, digests); ok {
			t.f.release(t, layer, index, nil)
			return run, true
		}
	}
	g, mine := t.f.claim(t, layer, index)
	if g == nil {
		return nil, false
	}
	if mine {
		t.f.gather(g, layer, index, firstPos, rows, t.f.shape.RowsBytes(layer, rows), len(digests))
	}
	<-g.loaded
	if g.err != nil {
		return nil, false
	}
	copy(digests, g.sums)
	t.f.release(t, layer, index, g)
	return g.rows, true // never written again, and kept alive by who holds it
}

// Block implements BlockSource, and Spans SpanSource: what devices push from where
// it lies needs no gathering. Each receiver's push reads the rows by itself, which
// costs a device's memory a small part of what the links take.
func (t *tap) Block(layer, index, firstPos, rows int) (int32, bool) {
	src, ok := t.f.src.(BlockSource)
	if !ok {
		return 0, false
	}
	block, ok := src.Block(layer, index, firstPos, rows)
	if ok {
		t.f.release(t, layer, index, nil)
	}
	return block, ok
}

// Spans implements SpanSource.
func (t *tap) Spans(layer, firstPos, rows int, to []Held) ([]Held, bool) {
	src, ok := t.f.src.(SpanSource)
	if !ok {
		return to, false
	}
	held, ok := src.Spans(layer, firstPos, rows, to)
	if ok {
		t.f.release(t, layer, firstPos/t.f.shape.BlockTokens, nil)
	}
	return held, ok
}

// claim returns the unit if it is kept, or is to be kept because others want
// it too; mine says that the caller is to gather it.
func (f *Fanout) claim(t *tap, layer, index int) (g *gathered, mine bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	unit := uint32(layer*len(t.o.t.Dest) + index)
	if g := f.kept[unit]; g != nil {
		return g, false
	}
	f.sweep()
	g = &gathered{unit: unit, loaded: make(chan struct{})}
	for _, o := range f.taps {
		if o != t && !o.over && !o.had.has(int(unit)) {
			g.pending |= o.bit
		}
	}
	rows := min(f.shape.BlockTokens, t.o.t.Positions-index*f.shape.BlockTokens)
	if g.size = f.shape.RowsBytes(layer, rows); g.pending == 0 || g.size > f.budget {
		return nil, false
	}
	if !t.had.has(int(unit)) {
		g.pending |= t.bit
	}
	for f.bytes+g.size > f.budget {
		f.drop(f.order[0])
	}
	f.kept[unit] = g
	f.order = append(f.order, g)
	f.bytes += g.size
	return g, true
}

// gather loads a unit that is kept; one that fails is not.
func (f *Fanout) gather(g *gathered, layer, index, firstPos, rows, size, heads int) {
	g.rows, g.sums = make([]byte, size), make([]uint64, heads)
	g.err = f.src.Load(layer, index, firstPos, rows, g.rows, g.sums)
	close(g.loaded)
	if g.err != nil {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.drop(g)
	}
}

// release notes that t has had the unit.
func (f *Fanout) release(t *tap, layer, index int, g *gathered) {
	f.mu.Lock()
	defer f.mu.Unlock()
	unit := layer*len(t.o.t.Dest) + index
	t.had.set(unit)
	if g == nil {
		g = f.kept[uint32(unit)]
	}
	if g != nil {
		f.done(g, t.bit)
	}
}

// done takes taps off a unit and drops it behind the last; needs mu.
func (f *Fanout) done(g *gathered, bits uint64) {
	if g.pending &^= bits; g.pending == 0 {
		f.drop(g)
	}
}

// drop forgets a unit, if it is kept; needs mu.
func (f *Fanout) drop(g *gathered) {
	if f.kept[g.unit] != g {
		return
	}
	delete(f.kept, g.unit)
	i := slices.Index(f.order, g)
	f.order = slices.Delete(f.order, i, i+1)
	f.bytes -= g.size
}

// sweep takes the receivers that are over off every unit; needs mu.
func (f *Fanout) sweep() {
	var gone uint64
	for _, t := range f.taps {
		if t.over {
			continue
		}
		select {
		case <-t.o.Done():
			t.over = true
			gone |= t.bit
		default:
		}
	}
	if gone == 0 {
		return
	}
	for _, g := range slices.Clone(f.order) {
		f.done(g, gone)
	}
}
