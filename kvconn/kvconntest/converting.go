package kvconntest

import (
	"context"
	"slices"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/convert"
	"github.com/xpyd/xpyd/kvlayout"
)

// Converts has both sides allow rows of another dtype; their numerics are then others.
func Converts(r, s *kvconn.Config) {
	r.Convert, s.Convert = true, true
	s.Identity.Numerics = "test-of-another-dtype"
}

// digestPart is that of the suite's sequences.
func digestPart(l *kvlayout.Layer, plane, head, first, n int, rows, scales []byte) (sum uint64) {
	for i := range n {
		row := slices.Clone(rows[i*l.RowBytes(plane):][:l.RowBytes(plane)])
		row = append(row, scales[i*l.ScaleBytes():][:l.ScaleBytes()]...)
		sum += RowHash(l.Number, plane, l.FirstHead+head, first+i, row)
	}
	return sum
}

// Convert has the sender answer as a prefill worker does, and the receiver expect what a host
// would have made of the rows. The world is of Converts.
func (w *World) Convert() {
	ours, theirs := w.SConfig.Identity.Layout, w.RConfig.Identity.Layout
	w.Answer = func(ctx context.Context, o *kvconn.Outgoing, src *Source) {
		rows, err := convert.New(src, ours, o.Layout(), digestPart)
		if err == nil {
			err = o.Accept(rows)
		}
		if err != nil {
			w.T.Error(err)
			return
		}
		for l := range ours.Layers() {
			for i := range o.Ticket().Dest {
				o.Push(l, []int{i})
			}
		}
		o.Commit([]byte("commit of " + o.Ticket().RequestID))
	}
	w.Pool.Expect = func(seed uint64, layer, first, rows int) ([]byte, error) {
		src, err := convert.New(&Source{Layout: ours, Seed: seed}, ours, theirs, digestPart)
		if err != nil {
			return nil, err
		}
		g := theirs.Resolve()[layer]
		packed := make([]byte, g.PackedBytes(rows))
		return packed, src.Load(layer, first/theirs.BlockTokens, first, rows, packed, make([]uint64, g.Heads))
	}
}
