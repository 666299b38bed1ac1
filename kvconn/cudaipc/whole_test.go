//go:build linux

package cudaipc_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/kvconntest"
	"github.com/xpyd/xpyd/kvconn/kvconntest/fakegpu"
)

// counted counts the pushes of a fake GPU, and the layers in them.
type counted struct {
	fakegpu.GPU
	pushes, layers *atomic.Int64
}

func (c counted) OpenPeer(handle, flags []byte) (kernels.Peer, error) {
	p, err := c.GPU.OpenPeer(handle, flags)
	return countedPeer{p, c}, err
}

type countedPeer struct {
	kernels.Peer
	c counted
}

func (p countedPeer) Push(a *kernels.Push) error {
	p.c.pushes.Add(1)
	p.c.layers.Add(int64(a.Layers))
	return p.Peer.Push(a)
}

// TestPushAll: what is there from the start comes in one push of all layers, as much of
// it as a turn may have, and is right: prompts that end anywhere, with blocks that the
// receiver has, and blocks that are asked for again.
func TestPushAll(t *testing.T) {
	for _, c := range []struct {
		name                   string
		positions, had, spoilt int // had: blocks
		batch                  int // bytes; 0: as ever, several notices a layer
		pushes, layers         int64
	}{
		{name: "whole blocks", positions: 64, pushes: 1, layers: 3},
		{name: "a partial block", positions: 61, pushes: 1, layers: 3},
		{name: "one position", positions: 1, pushes: 1, layers: 3},
		{name: "the rest", positions: 61, had: 5, pushes: 1, layers: 3},
		{name: "three are wrong", positions: 61, spoilt: 3, batch: 1 << 20, pushes: 2, layers: 4}, // one notice a layer: they are found at once
		{name: "more than a turn", positions: 90, batch: 16, pushes: 2, layers: 3},
	} {
		t.Run(c.name, func(t *testing.T) {
			r, s := fakegpu.Pair(t)
			dev := counted{s, new(atomic.Int64), new(atomic.Int64)}
			tr, err := open(r, dev, true)
			if err != nil {
				t.Fatal(err)
			}
			tune := func(_, s *kvconn.Config) {
				if c.batch > 0 {
					s.BatchBytes = c.batch
				}
			}
			fakegpu.Run(t, r, s, tr, tune, func(w *kvconntest.World) {
				w.Answer = func(_ context.Context, o *kvconn.Outgoing, src *kvconntest.Source) {
					if o.Accept(src) != nil {
						return
					}
					bt := src.Layout.BlockTokens
					for layer := range src.Layout.Layers() { // the rows are made when they are asked for
						for i := range o.Ticket().Dest {
							src.Block(layer, i, i*bt, min(bt, c.positions-i*bt))
						}
					}
					o.PushAll()
					o.Commit([]byte("commit of " + o.Ticket().RequestID))
				}
				spec := w.Spec("whole", 7, c.positions, 3)
				if c.had > 0 {
					had := w.Spec("had", 7, c.had*w.RConfig.Identity.Layout.BlockTokens, 3)
					if err := w.Fetch(t.Context(), had); err != nil {
						t.Fatal(err)
					}
					dev.pushes.Store(0)
					dev.layers.Store(0)
					spec = w.Spec("whole", 7, c.positions, 3)
					spec.Have = make([]bool, len(spec.Dest))
					for i := range c.had {
						spec.Have[i] = true
					}
				}
				for i := range c.spoilt {
					r.Spoil(1, spec.Dest[2*i].Block)
				}
				if err := w.Fetch(t.Context(), spec); err != nil {
					t.Fatal(err)
				}
				if got := fmt.Sprint(dev.pushes.Load(), dev.layers.Load()); got != fmt.Sprint(c.pushes, c.layers) {
					t.Errorf("pushes and layers in them: %s, want %d %d", got, c.pushes, c.layers)
				}
				if n := w.Value(w.RMetrics, "xpyd_kvconn_corrupt_units_total", ""); n != float64(c.spoilt) {
					t.Errorf("%v corrupt blocks, want %d", n, c.spoilt)
				}
			})
		})
	}
}
