//go:build linux

package cudaipc_test

import (
	"context"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/kerneltest"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/cudaipc"
	"github.com/xpyd/xpyd/kvconn/kvconntest"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// TestMain lets more cases run at once than there are cores: the suite's cases
// wait for deadlines, they do not compute.
func TestMain(m *testing.M) {
	if kvconntest.Child(factory) {
		return
	}
	flag.Parse()
	flag.Set("test.parallel", "48")
	os.Exit(m.Run())
}

var factory = kvconntest.Factory{Device: pair, Shrink: 2, AtOnce: 48}

// fake is a device as the suite knows one.
type fake struct {
	*kerneltest.FakeGPU
	layout kvconn.Layout
	blocks int
}

func (g fake) Layout() kvconn.Layout {
	l := g.layout
	l.Groups = slices.Clone(l.Groups)
	return l
}

func (g fake) Shared() *kvconn.Shared { return kvconn.DevicePool(g.layout, g.blocks) }

func (g fake) VerifyPushed(ctx context.Context, layer int, blocks []kvconn.PushedBlock) ([]bool, error) {
	landed := make([]kernels.Landed, len(blocks))
	for i, b := range blocks {
		landed[i] = kernels.Landed{Layer: layer, Block: b.Block, FirstPos: b.FirstPos, Rows: b.Rows}
	}
	return g.Verify(ctx, landed)
}

// newFake makes a pool of the suite's layout, changed.
func newFake(t testing.TB, blocks int, change func(l *kvconn.Layout)) fake {
	l := kvconntest.Layout()
	if change != nil {
		change(&l)
	}
	k := l.Groups[0]
	g, err := kerneltest.NewFakeGPU(kernels.Layout{Layers: k.Layers, KVHeads: k.KVHeads, HeadDim: k.HeadDim,
		BlockTokens: l.BlockTokens, DType: k.DType, RowBytes: k.RowBytes}, blocks)
	if err != nil {
		t.Fatal(err)
	}
	g.FirstHead = k.HeadFirst
	t.Cleanup(func() {
		if err := g.Close(); err != nil {
			t.Error(err)
		}
	})
	return fake{g, l, blocks}
}

// pair is a transport between two fake GPUs whose pushes take a while.
func pair(t testing.TB) (kvconn.Transport, kvconntest.GPUs) {
	r, s := newFake(t, kvconntest.ReceiverBlocks, nil), newFake(t, kvconntest.SenderBlocks, nil)
	s.Delay = time.Millisecond
	tr, err := cudaipc.New(r, s, true)
	if err != nil {
		t.Fatal(err)
	}
	return tr, kvconntest.GPUs{Receiver: r, Sender: s}
}

// TestPushed is the suite with rows that the sender's device pushes.
func TestPushed(t *testing.T) { kvconntest.Run(t, factory) }

// TestProcesses kills and stops real processes at every step. A fake GPU's
// pushes stop with its process.
func TestProcesses(t *testing.T) {
	t.Parallel()
	kvconntest.Processes(t, factory)
}

// once is a ticket's whole life between two fakes; spoil may change them.
func once(t *testing.T, spoil func(r, s fake), tune func(r, s *kvconn.Config), do func(w *kvconntest.World, s fake)) {
	r, s := newFake(t, kvconntest.ReceiverBlocks, nil), newFake(t, kvconntest.SenderBlocks, nil)
	between(t, r, s, spoil, tune, do)
}

// between is once with other devices.
func between(t *testing.T, r, s fake, spoil func(r, s fake), tune func(r, s *kvconn.Config), do func(w *kvconntest.World, s fake)) {
	if spoil != nil {
		spoil(r, s)
	}
	f := kvconntest.Factory{Device: func(testing.TB) (kvconn.Transport, kvconntest.GPUs) {
		tr, err := cudaipc.New(r, s, true)
		if err != nil {
			t.Fatal(err)
		}
		return tr, kvconntest.GPUs{Receiver: r, Sender: s}
	}}
	w := f.World(t, tune)
	do(w, s)
	w.Close()
}

// A peer whose device cannot reach ours refuses the session and says why, so
// that another way is taken.
func TestNoAccess(t *testing.T) {
	once(t, func(_, s fake) {
		s.Refuse = fmt.Errorf("%w: GPU 0 and 1", kernels.ErrNoPeerAccess)
	}, nil, func(w *kvconntest.World, _ fake) {
		_, err := w.Receiver.Open(t.Context(), w.Addr, kvconn.PeerID{})
		if kvconn.OutcomeOf(err, "") != ticket.Refused || !strings.Contains(err.Error(), "GPU 0 and 1") {
			t.Errorf("opened: %v", err)
		}
	})
}

// The fence: a revoke that comes while the peer's device writes returns when it
// has stopped. The blocks then get other rows, and keep them.
func TestRevokeWaitsForThePush(t *testing.T) {
	once(t, nil, nil, func(w *kvconntest.World, s fake) { w.RevokeWaits(t, s.Stop) })
}

// A block is looked at when its push has landed, also by a peer that has another
// one's line of the flags: no digest is ever wrong.
func TestNothingIsBelievedBeforeItLands(t *testing.T) {
	slow := func(_, s fake) { s.Delay = 60 * time.Millisecond }
	idle := func(r, _ *kvconn.Config) { r.IdleTimeout = r.KeepAlive }
	once(t, slow, idle, func(w *kvconntest.World, _ fake) {
		for n := range 3 {
			if err := w.Fetch(t.Context(), w.Spec("again", int32(n), 18, 8*n)); err != nil {
				t.Fatal(err)
			}
			for w.Value(w.RMetrics, "xpyd_kvconn_mapped_pools", "") > 0 { // the session ends
				time.Sleep(time.Millisecond)
			}
		}
		if n := w.Value(w.RMetrics, "xpyd_kvconn_corrupt_units_total", ""); n > 0 {
			t.Errorf("%v blocks were looked at too early", n)
		}
	})
}

// A bit that flips in prefill's pool after the append, when the digests are
// made, is found in decode's: the digests have come along.
func TestSpoiledSource(t *testing.T) {
	once(t, nil, nil, func(w *kvconntest.World, s fake) {
		w.Answer = func(ctx context.Context, o *kvconn.Outgoing, src *kvconntest.Source) {
			if block, ok := src.Block(1, 2, 8, 4); ok {
				s.Spoil(1, block)
			}
			w.Compute(ctx, o, src)
		}
		if err := w.Fetch(t.Context(), w.Spec("spoiled", 1, 18, 0)); err != nil { // the next append makes it good again
			t.Error(err)
		}
		if n := w.Value(w.RMetrics, "xpyd_kvconn_corrupt_units_total", ""); n != 1 {
			t.Errorf("%v corrupt blocks were found, want 1", n)
		}
	})
}
