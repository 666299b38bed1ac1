package kvconn

import (
	"cmp"
	"slices"
	"unsafe"
)

const (
	// placeTurns is how many batches a ticket may place at a turn, so that
	// there is something to put in order.
	placeTurns = 64
	// streamFrom is the size of a turn, in bytes, from which rows bypass the caches:
	// faster for much memory, while less is still in the cache that the receiver
	// shares.
	streamFrom = 2 << 20
	// streamNotify is how many batches are placed before the receiver is told, when the
	// rows bypass the caches anyway.
	streamNotify = 4
)

// spot is one unit that is copied straight into the receiver's block.
type spot struct {
	unitHead
	dst   []byte // there; of several ranks, where the first one keeps it
	src   []byte // our block; nil: Load makes it
	bytes int    // of the block, with all heads
	sums  int    // where its digests begin
}

// place copies units straight into the receiver's blocks and sends the frames that say
// so. It returns the rest, which have to be sent: units that are not whole blocks
// there. The caller is inside the ticket's fence. place leaves the fence while it
// writes frames, so that a stalled link cannot hold up a revoke; inside reports whether
// it re-entered (false: the ticket has ended).
func (w *bulkWriter) place(g *Outgoing, units []uint32) (rest []uint32, inside bool, err error) {
	rest, size := units[:0], 0
	w.spots, w.sums = w.spots[:0], w.sums[:0]
	for _, u := range units {
		if s, ok := w.spot(g, u); ok {
			w.spots = append(w.spots, s)
			size += s.bytes
		} else {
			rest = append(rest, u)
		}
	}
	defer func() { clear(w.spots) }() // the blocks are not ours to keep alive
	stream, notify := size >= streamFrom, w.p.cfg.BatchBytes
	if stream {
		notify *= streamNotify
		// In the receiver's memory order: the receiver verifies blocks as they
		// come, and saves more than we would with ours (DESIGN.md).
		slices.SortFunc(w.spots, func(a, b spot) int { return cmp.Compare(addressOf(a.dst), addressOf(b.dst)) })
	}
	for at := 0; at < len(w.spots); {
		first, bytes := at, 0
		w.buf = w.buf[:0]
		for ; at < len(w.spots) && bytes < notify; at++ {
			if err := w.fill(g, at, stream); err != nil {
				return nil, true, &loadError{err}
			}
			bytes += w.spots[at].bytes
		}
		g.fence.leave()
		err := w.f.write(w.buf)
		inside := g.fence.enter()
		if err != nil || !inside {
			return nil, inside, err
		}
		w.p.side.units.Add(float64(at - first))
		w.p.side.bytes.Add(float64(bytes))
	}
	return rest, true, nil
}

// fill copies the rows of spot n and appends its frame.
func (w *bulkWriter) fill(g *Outgoing, n int, stream bool) error {
	s := &w.spots[n]
	sums := w.sums[s.sums : s.sums+int(s.Heads)]
	ranked := w.p.pool.seg.ranks() > 1
	if s.src == nil {
		to := s.dst
		if ranked { // there is no one run to load to
			w.whole = slices.Grow(w.whole[:0], s.bytes)[:s.bytes]
			to = w.whole
		}
		if err := g.src.Load(int(s.Layer), int(s.Index), int(s.Index)*g.layout.BlockTokens, int(s.Rows), to, sums); err != nil {
			return err
		}
	}
	switch {
	case ranked && s.src == nil:
		w.p.pool.spread(int(s.Layer), s.Block, w.whole)
	case ranked:
		w.p.pool.spread(int(s.Layer), s.Block, s.src)
	case s.src == nil: // loaded to where it belongs
	case stream:
		next := &w.spots[min(n+1, len(w.spots)-1)]
		w.p.pool.memory.Copy(s.dst, s.src, next.dst, next.src)
	default:
		copy(s.dst, s.src)
	}
	w.buf = w.f.frame(w.buf, &placed{unitHead: s.unitHead, Digests: sums})
	return nil
}

// spot finds both ends of a unit that is a whole block in the receiver's pool, and its
// digests if it can be copied in place.
func (w *bulkWriter) spot(g *Outgoing, u uint32) (s spot, ok bool) {
	d := w.describe(g, u)
	if int(d.Rows) != g.layout.BlockTokens {
		return spot{}, false
	}
	s = spot{unitHead: d.unitHead, bytes: d.bytes, sums: len(w.sums)}
	if s.dst, ok = w.p.pool.block(int(d.Layer), 0, d.Block); !ok {
		return spot{}, false
	}
	w.sums = slices.Grow(w.sums, int(d.Heads))[:s.sums+int(d.Heads)]
	if v, ok := g.src.(ViewSource); ok && d.same {
		first := int(d.Index) * g.layout.BlockTokens
		if run, ok := v.View(int(d.Layer), int(d.Index), first, int(d.Rows), w.sums[s.sums:]); ok && len(run) == d.bytes {
			s.src = run
		}
	}
	return s, true
}

// addressOf is the address of b, for sorting.
func addressOf(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }
