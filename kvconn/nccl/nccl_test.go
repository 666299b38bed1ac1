//go:build linux

package nccl_test

import (
	"cmp"
	"context"
	"errors"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/kvconntest"
	"github.com/xpyd/xpyd/kvconn/kvconntest/fakegpu"
	"github.com/xpyd/xpyd/kvconn/nccl"
	"github.com/xpyd/xpyd/kvconn/stage"
	"github.com/xpyd/xpyd/kvconn/tcp"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/kvlayout"
)

func TestMain(m *testing.M) { kvconntest.Main(m, factory, 48) }

// small is enough for the suite's blocks.
var small = stage.Ring{Slots: 16, SlotBytes: 16 << 10}

// A fake NCCL computes more than it waits: more cases at a time take longer.
var factory = kvconntest.Factory{Device: pair, InStep: true, Joined: true, Shrink: 2, AtOnce: 20}

// pair is a transport between two fake GPUs whose copies take a while.
func pair(t testing.TB) (kvconn.Transport, kvconntest.GPUs) {
	r, s := fakegpu.Pair(t)
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

// loopback is TCP inside this machine, on any free port.
type loopback struct{ kvconn.Transport }

func (l loopback) Listen(addr string) (net.Listener, error) {
	return l.Transport.Listen(cmp.Or(addr, "127.0.0.1:0"))
}

// over is the transport between two fakes, over TCP.
func over(t testing.TB, r, s fakegpu.GPU, ring stage.Ring) kvconn.Transport {
	return between(t, r, s, ring)
}

// between is over two devices that may be more than fakes.
func between(t testing.TB, r, s kernels.Linker, ring stage.Ring) kvconn.Transport {
	return nccl.New(loopback{tcp.New(nil)}, r, s, kvconntest.Plain(), ring)
}

// corrupt and lost are what the receiver has counted.
func corrupt(w *kvconntest.World) float64 {
	return w.Value(w.RMetrics, "xpyd_kvconn_corrupt_units_total", "")
}

func lost(w *kvconntest.World) float64 {
	return w.Value(w.RMetrics, "xpyd_kvconn_lost_units_total", "")
}

// A process without NCCL refuses the session and says why, so that another way is
// taken.
func TestNoNCCL(t *testing.T) {
	r, s := fakegpu.Pair(t)
	s.NoLinks = errors.New("no libnccl.so.2 here")
	fakegpu.Run(t, r, s, over(t, r, s, small), nil, func(w *kvconntest.World) {
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
		r, s := fakegpu.Pair(t)
		fakegpu.Run(t, r, s, over(t, r, s, small), nil, func(w *kvconntest.World) {
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
			if c, l := corrupt(w), lost(w); c != 1 || l != 0 {
				t.Errorf("%s: %v blocks were corrupt and %v lost, want 1 and none", where, c, l)
			}
		})
	}
}

// A sender that dies can leave a part of a transfer, which then counts as over. What
// it has left is no corrupt block but a lost one, of a session that is dead.
func TestTornByDeath(t *testing.T) {
	r, s := fakegpu.Pair(t)
	fakegpu.Run(t, r, s, over(t, r, s, small), nil, func(w *kvconntest.World) {
		w.Answer = func(ctx context.Context, o *kvconn.Outgoing, src *kvconntest.Source) {
			if o.Accept(src) == nil {
				o.Push(0, []int{0})
				<-ctx.Done()
			}
		}
		session, err := w.Receiver.Open(t.Context(), w.Addr, kvconn.PeerID{})
		if err != nil {
			t.Fatal(err)
		}
		r.Tear()
		torn, look := r.Stop()
		defer look()
		in, err := session.Request(t.Context(), w.Spec("torn", 1, 4, 0))
		if err != nil {
			t.Fatal(err)
		}
		reaches := func(step <-chan struct{}) {
			select {
			case <-step:
			case <-in.Done():
				_, err := in.Wait(t.Context())
				t.Fatal(err)
			}
		}
		reaches(torn)
		asked, again := s.Stop()
		defer again()
		look()
		reaches(asked) // to send it again; it dies of that
		w.Stop()
		if _, err := in.Wait(t.Context()); kvconn.OutcomeOf(err, "") != ticket.Dead {
			t.Errorf("%v, want dead", err)
		}
		if c, l := corrupt(w), lost(w); c != 0 || l != 1 {
			t.Errorf("%v blocks were corrupt and %v lost, want none and 1", c, l)
		}
	})
}

// unlinked is a device that has no link made.
type unlinked struct {
	fakegpu.GPU
	t *testing.T
}

func (u unlinked) NewLink() ([]byte, error) {
	u.t.Error("a link is made")
	return u.GPU.NewLink()
}

// Workers whose blocks are of two sizes know it from the handshake: no communicator is made
// to be aborted, however often they try.
func TestAnotherSize(t *testing.T) {
	half := func(l *kvlayout.Layout) { l.BlockTokens /= 2 }
	r, s := fakegpu.New(t, kvconntest.ReceiverBlocks, half), fakegpu.New(t, kvconntest.SenderBlocks, nil)
	fakegpu.Run(t, r, s, between(t, unlinked{r, t}, s, small), nil, func(w *kvconntest.World) {
		_, err := w.Receiver.Open(t.Context(), w.Addr, kvconn.PeerID{})
		if kvconn.OutcomeOf(err, "") != ticket.Refused || !strings.Contains(err.Error(), "the peer's blocks are of") {
			t.Errorf("opened: %v", err)
		}
	})
}
