//go:build linux

package nccl_test

import (
	"cmp"
	"errors"
	"net"
	"strings"

	"context"
	"flag"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"os"
	"testing"
	"time"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/kerneltest"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/kvconntest"
	"github.com/xpyd/xpyd/kvconn/nccl"
	"github.com/xpyd/xpyd/kvconn/stage"
	"github.com/xpyd/xpyd/kvconn/tcp"
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

// layout is the suite's.
var layout = kernels.Layout{Layers: 3, KVHeads: 2, HeadDim: 8, BlockTokens: 4, DType: "f32", RowBytes: 32}

// small is enough for the suite's blocks.
var small = stage.Ring{Slots: 16, SlotBytes: 16 << 10}

var factory = kvconntest.Factory{Device: pair, InStep: true, Shrink: 2, AtOnce: 48}

// fake is a device as the suite knows one.
type fake struct {
	*kerneltest.FakeGPU
	blocks int
}

func (g fake) Layout() kvconn.Layout { return kvconntest.Layout() }

func (g fake) Shared() *kvconn.Shared { return kvconn.DevicePool(kvconntest.Layout(), g.blocks) }

func (g fake) VerifyPushed(ctx context.Context, layer int, blocks []kvconn.PushedBlock) ([]bool, error) {
	landed := make([]kernels.Landed, len(blocks))
	for i, b := range blocks {
		landed[i] = kernels.Landed{Layer: layer, Block: b.Block, FirstPos: b.FirstPos, Rows: b.Rows}
	}
	return g.Verify(ctx, landed)
}

func newFake(t testing.TB, blocks int) fake {
	g, err := kerneltest.NewFakeGPU(layout, blocks)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := g.Close(); err != nil {
			t.Error(err)
		}
	})
	return fake{g, blocks}
}

// pair is a transport between two fake GPUs whose copies take a while.
func pair(t testing.TB) (kvconn.Transport, kvconntest.GPUs) {
	r, s := newFake(t, kvconntest.ReceiverBlocks), newFake(t, kvconntest.SenderBlocks)
	r.Delay, s.Delay = 200*time.Microsecond, 200*time.Microsecond
	tr := over(t, r, s, small)
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
	r, s := newFake(t, kvconntest.ReceiverBlocks), newFake(t, kvconntest.SenderBlocks)
	if spoil != nil {
		spoil(r, s)
	}
	f := kvconntest.Factory{Device: func(testing.TB) (kvconn.Transport, kvconntest.GPUs) {
		tr := over(t, r, s, small)
		return tr, kvconntest.GPUs{Receiver: r, Sender: s}
	}}
	w := f.World(t, tune)
	do(w, s)
	w.Close()
}

// loopback is TCP inside this machine, on any free port.
type loopback struct{ kvconn.Transport }

func (l loopback) Listen(addr string) (net.Listener, error) {
	return l.Transport.Listen(cmp.Or(addr, "127.0.0.1:0"))
}

// over is the transport between two fakes, over TCP.
func over(t testing.TB, r, s fake, ring stage.Ring) kvconn.Transport {
	base, err := tcp.New(tcp.DefaultConfig())
	if err != nil {
		t.Fatal(err)
	}
	return nccl.New(loopback{base}, r, s, layout, ring)
}

// A process without NCCL refuses the session and says why, so that another way is
// taken.
func TestNoNCCL(t *testing.T) {
	once(t, func(_, s fake) { s.NoLinks = errors.New("no libnccl.so.2 here") }, nil, func(w *kvconntest.World, _ fake) {
		_, err := w.Receiver.Open(t.Context(), w.Addr, kvconn.PeerID{})
		if kvconn.OutcomeOf(err, "") != ticket.Refused || !strings.Contains(err.Error(), "no libnccl.so.2 here") {
			t.Errorf("opened: %v", err)
		}
	})
}

// A bit that flips in prefill's pool after the append, when the digests are made,
// is found in decode's: the digests have come along. So is one that flips in
// decode's after it was copied there.
func TestSpoiled(t *testing.T) {
	for _, where := range []string{"source", "destination"} {
		var r, s fake
		once(t, func(a, b fake) { r, s = a, b }, nil, func(w *kvconntest.World, _ fake) {
			spec := w.Spec("spoiled", 1, 18, 0)
			if where == "destination" {
				r.Spoil(1, spec.Dest[2].Block)
			}
			w.Answer = func(ctx context.Context, o *kvconn.Outgoing, src *kvconntest.Source) {
				if block, ok := src.Block(1, 2, 8, 4); ok && where == "source" {
					s.Spoil(1, block)
				}
				w.Compute(ctx, o, src)
			}
			if err := w.Fetch(t.Context(), spec); err != nil { // the next append makes it good again
				t.Error(err)
			}
			if n := w.Value(w.RMetrics, "xpyd_kvconn_corrupt_units_total", ""); n != 1 {
				t.Errorf("%s: %v corrupt blocks were found, want 1", where, n)
			}
		})
	}
}
