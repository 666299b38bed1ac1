package kvconn

import "github.com/xpyd/xpyd/kvlayout"

// RefillWindow is a DeviceWindow that also fills blocks of another size or dtype than
// ours.
type RefillWindow interface {
	DeviceWindow
	// Refill is Push for such blocks. It assembles the rows of each from those of
	// sources and merges their digests. A source that is cut or converted is checked,
	// so that a bad row does not get a good digest.
	Refill(layer int, blocks []kvlayout.Refill, sources []kvlayout.Held) (number uint64, err error)
}

// SpanSource is a Source whose rows a device can push from where they lie although the
// receiver's blocks have another size or dtype.
//
// Spans appends the blocks of our pool that hold these positions of one layer, in
// order. The first and the last may hold others too. All are complete, and must keep
// their rows until the ticket's fence is quiet. When ok is false, Load is used. Calls
// may be concurrent.
type SpanSource interface {
	Source
	Spans(layer, firstPos, rows int, to []kvlayout.Held) (_ []kvlayout.Held, ok bool)
}

// refill finds what a device needs to assemble a unit at the peer. It appends the
// unit's sources to those of the units before, and may share the last of those.
func (w *bulkWriter) refill(g *Outgoing, d *departure) (kvlayout.Refill, bool) {
	src, ok := g.src.(SpanSource)
	_, can := w.p.pool.device.(RefillWindow)
	if !ok || !can || g.shapes[d.Layer].same {
		return kvlayout.Refill{}, false
	}
	n := len(w.held)
	r := kvlayout.Refill{Block: d.Block, FirstPos: int(d.Index) * g.layout.BlockTokens, Rows: int(d.Rows), First: n}
	held, ok := src.Spans(int(d.Layer), r.FirstPos, r.Rows, w.held)
	if !ok || len(held) == n {
		return kvlayout.Refill{}, false
	}
	r.Count = len(held) - n
	if n > 0 && held[n] == held[n-1] {
		held = append(held[:n], held[n+1:]...)
		r.First--
	}
	w.held = held
	return r, true
}
