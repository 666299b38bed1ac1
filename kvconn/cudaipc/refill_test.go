//go:build linux

package cudaipc_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/kvconntest"
	"github.com/xpyd/xpyd/kvconn/kvconntest/fakegpu"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/kvlayout"
)

// refilled is a pair whose sender has blocks of another size: none is a multiple of
// the other's, so that blocks are cut at every place.
var refilled = kvconntest.Factory{Shrink: 2, AtOnce: 48, Few: true, Device: func(t testing.TB) (kvconn.Transport, kvconntest.GPUs) {
	r, s := fakegpu.New(t, kvconntest.ReceiverBlocks, nil), fakegpu.New(t, kvconntest.SenderBlocks, func(l *kvlayout.Layout) { l.BlockTokens = 6 })
	s.Delay = time.Millisecond
	tr, err := open(r, s, true)
	if err != nil {
		t.Fatal(err)
	}
	return tr, kvconntest.GPUs{Receiver: r, Sender: s}
}}

// TestRefilled is the suite with blocks that the sender's device puts together
// anew.
func TestRefilled(t *testing.T) { kvconntest.Run(t, refilled) }

// shapes are pairs that differ in block size.
func shapes(f func(name string, r, s func(l *kvlayout.Layout))) {
	blocks := func(bt, heads int) func(l *kvlayout.Layout) {
		return func(l *kvlayout.Layout) { *l = kvlayout.Plain(3, heads, 8, bt, kvlayout.F32) }
	}
	for _, bt := range [][2]int{{16, 64}, {64, 16}, {1, 256}, {256, 1}, {5, 3}, {3, 5}, {7, 7}, {255, 256}, {2, 1}} {
		for _, heads := range []int{8, 1} {
			f(fmt.Sprintf("blocks of %d from %d, %d heads", bt[0], bt[1], heads), blocks(bt[0], heads), blocks(bt[1], heads))
		}
	}
}

// fetchLengths fetches prompts that end anywhere, of one of which the receiver has
// some blocks; all of them have to be pushed.
func fetchLengths(t *testing.T, w *kvconntest.World, name string) {
	t.Helper()
	bt := w.RConfig.Identity.Layout.BlockTokens
	for n, positions := range []int{1, bt, bt + 1, 67} {
		spec := w.Spec(name, int32(n), positions, 0)
		if positions == 67 && len(spec.Dest) > 2 {
			spec.Have = make([]bool, len(spec.Dest))
			for i := range spec.Have[:len(spec.Dest)-1] {
				spec.Have[i] = i%3 == 1
			}
		}
		if err := w.Fetch(t.Context(), spec); err != nil {
			t.Errorf("%d positions: %v", positions, err)
		}
		w.Pool.Reclaim(spec.Dest)
	}
	if pushed, all := w.Pool.Pushed(), w.Pool.Stores(); pushed != all || all == 0 {
		t.Errorf("%d of %d blocks were pushed", pushed, all)
	}
}

// Every shape arrives right, of prompts that end anywhere, with blocks that the
// receiver has; all of it by pushes.
func TestRefillShapes(t *testing.T) {
	shapes(func(name string, r, s func(l *kvlayout.Layout)) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			between(t, fakegpu.New(t, kvconntest.ReceiverBlocks, r), fakegpu.New(t, kvconntest.SenderBlocks, s), nil, func(w *kvconntest.World, _ fakegpu.GPU) {
				fetchLengths(t, w, name)
			})
		})
	})
}

// Where the device may not, the rows of such blocks go through the host.
func TestRefillOff(t *testing.T) {
	r, s := fakegpu.New(t, kvconntest.ReceiverBlocks, nil), fakegpu.New(t, kvconntest.SenderBlocks, func(l *kvlayout.Layout) { l.BlockTokens = 6 })
	f := kvconntest.Factory{Device: func(testing.TB) (kvconn.Transport, kvconntest.GPUs) {
		tr, err := open(r, s, false)
		if err != nil {
			t.Fatal(err)
		}
		return tr, kvconntest.GPUs{Receiver: r, Sender: s}
	}}
	w := f.World(t, nil)
	defer w.Close()
	if err := w.Fetch(t.Context(), w.Spec("off", 1, 37, 0)); err != nil {
		t.Error(err)
	}
	if pushed, all := w.Pool.Pushed(), w.Pool.Stores(); pushed != 0 || all == 0 {
		t.Errorf("%d of %d blocks were pushed", pushed, all)
	}
}

// A bit that flips in prefill's pool after the append, in a block that is cut: no
// piece of it gets a good digest, wherever the bit is.
func TestSpoiledSourceIsCut(t *testing.T) {
	for _, bt := range []int{2, 3, 12} {
		r := fakegpu.New(t, kvconntest.ReceiverBlocks, func(l *kvlayout.Layout) { l.BlockTokens = bt })
		s := fakegpu.New(t, kvconntest.SenderBlocks, func(l *kvlayout.Layout) { l.BlockTokens = 8 })
		between(t, r, s, nil, func(w *kvconntest.World, s fakegpu.GPU) {
			w.Answer = func(ctx context.Context, o *kvconn.Outgoing, src *kvconntest.Source) {
				if held, ok := src.Spans(1, 8, 8, nil); ok {
					s.Spoil(1, held[0].Block)
				}
				w.Compute(ctx, o, src)
			}
			err := w.Fetch(t.Context(), w.Spec("spoiled", 1, 37, 0))
			if kvconn.OutcomeOf(err, "") != ticket.Corrupt || !errors.Is(err, kvconn.ErrDigest) {
				t.Errorf("blocks of %d: %v, want corrupt by digest", bt, err)
			}
		})
	}
}
