package kvconn

import "github.com/xpyd/xpyd/kvlayout"

// RefillWindow is a DeviceWindow that also reaches blocks of another size than
// ours, or whose rows have another dtype.
type RefillWindow interface {
	DeviceWindow
	// Refill is Push for such blocks: the rows of each are put together out of
	// those of sources, whose digests are merged, or checked where a source is
	// cut or its rows are converted: a bad row does not get a good digest.
	Refill(layer int, blocks []kvlayout.Refill, sources []kvlayout.Held) (number uint64, err error)
}

// SpanSource is a Source whose rows a device can push from where they lie although
// the receiver's blocks look different.
//
// Spans appends the blocks of our pool that hold these positions of one layer, in
// order: the first and the last hold some of them, those between all of theirs.
// They are complete. ok == false means that Load is to be used. They must keep
// their rows until the ticket's fence is quiet. Calls may be concurrent.
type SpanSource interface {
	Source
	Spans(layer, firstPos, rows int, to []kvlayout.Held) (_ []kvlayout.Held, ok bool)
}

// refill finds what a device needs to put a unit together at the peer's. Its
// sources go behind those of the units before, whose last one it may share.
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
