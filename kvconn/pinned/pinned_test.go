//go:build linux

package pinned_test

import (
	"context"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/kvconntest"
	"github.com/xpyd/xpyd/kvconn/kvconntest/fakegpu"
	"github.com/xpyd/xpyd/kvconn/pinned"
	"github.com/xpyd/xpyd/kvconn/stage"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/kvlayout"
)

func TestMain(m *testing.M) { kvconntest.Main(m, factory, 48) }

// small is enough for the suite's blocks.
var small = stage.Ring{Slots: 16, SlotBytes: 16 << 10}

var factory = kvconntest.Factory{Device: pair, Joined: true, Shrink: 2, AtOnce: 48}

// pair is a transport between two fake GPUs whose copies take a while.
func pair(t testing.TB) (kvconn.Transport, kvconntest.GPUs) {
	r, s := fakegpu.Pair(t)
	r.Delay, s.Delay = 200*time.Microsecond, 200*time.Microsecond
	tr, err := pinned.New(r, s, kvconntest.Plain(), small, "")
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

// between is two workers' transports as one: the sender's listens, the receiver's dials.
type between struct {
	kvconn.Transport
	dials kvconn.Transport
}

func (b between) Dial(ctx context.Context, addr string) (net.Conn, error) {
	return b.dials.Dial(ctx, addr)
}

// unlent is a device that has nothing lent.
type unlent struct {
	fakegpu.GPU
	t *testing.T
}

func (u unlent) RegisterHost(mem []byte) (kernels.HostMemory, error) {
	u.t.Error("a ring is made")
	return u.GPU.RegisterHost(mem)
}

// Rows of another dtype are not put through a ring, even where blocks are of the same
// size, nor blocks of another size: the session is refused and says why, so that another
// way is taken. Both are known from the handshake, so that nothing is lent in vain.
func TestAnotherForm(t *testing.T) {
	of := func(dtype kvlayout.DType, bt int) func(l *kvlayout.Layout) {
		return func(l *kvlayout.Layout) {
			*l = kvlayout.Plain(3, 2, 8, bt, dtype)
		}
	}
	for _, c := range []struct {
		dtype kvlayout.DType
		bt    int
		why   string
	}{
		{"f16", 8, "the peer's KV rows are bf16, ours f16"},
		{kvlayout.F8E4M3, 8, "the peer's KV rows are bf16, ours f8e4m3"},
		{"bf16", 16, "the peer's blocks are of"},
	} {
		r, s := unlent{fakegpu.New(t, kvconntest.ReceiverBlocks, of(c.dtype, c.bt)), t}, unlent{fakegpu.New(t, kvconntest.SenderBlocks, of("bf16", 8)), t}
		dials, err := pinned.New(r, r, r.Layout(), small, "")
		if err != nil {
			t.Fatal(err)
		}
		listens, err := pinned.New(s, s, s.Layout(), small, "")
		if err != nil {
			t.Fatal(err)
		}
		fakegpu.Run(t, r.GPU, s.GPU, between{listens, dials}, func(r, s *kvconn.Config) { r.Convert, s.Convert = true, true }, func(w *kvconntest.World) {
			_, err := w.Receiver.Open(t.Context(), w.Addr, kvconn.PeerID{})
			if kvconn.OutcomeOf(err, "") != ticket.Refused || !strings.Contains(err.Error(), c.why) {
				t.Errorf("%+v: opened: %v", c, err)
			}
		})
	}
}
