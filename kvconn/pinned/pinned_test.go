//go:build linux

package pinned_test

import (
	"context"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/kvconntest"
	"github.com/xpyd/xpyd/kvconn/kvconntest/fakegpu"
	"github.com/xpyd/xpyd/kvconn/pinned"
	"github.com/xpyd/xpyd/kvconn/stage"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

func TestMain(m *testing.M) { kvconntest.Main(m, factory, 48) }

// small is enough for the suite's blocks.
var small = stage.Ring{Slots: 16, SlotBytes: 16 << 10}

var factory = kvconntest.Factory{Device: pair, Joined: true, Shrink: 2, AtOnce: 48}

// pair is a transport between two fake GPUs whose copies take a while.
func pair(t testing.TB) (kvconn.Transport, kvconntest.GPUs) {
	r, s := fakegpu.Pair(t)
	r.Delay, s.Delay = 200*time.Microsecond, 200*time.Microsecond
	tr, err := pinned.New(r, s, fakegpu.Kernels(kvconntest.Layout()), small)
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

// Rows of another dtype are not put through a ring, even where blocks are of the same
// size: the session is refused and says why, so that another way is taken.
func TestAnotherDType(t *testing.T) {
	for _, dtype := range []string{"f16", kvconn.F8} {
		of := func(dtype string) func(l *kvconn.Layout) {
			return func(l *kvconn.Layout) {
				l.Groups[0].DType, l.Groups[0].RowBytes = dtype, kvconn.ElementBytes(dtype)*l.Groups[0].HeadDim
			}
		}
		r, s := fakegpu.New(t, kvconntest.ReceiverBlocks, of(dtype)), fakegpu.New(t, kvconntest.SenderBlocks, of("bf16"))
		dials, err := pinned.New(r, r, fakegpu.Kernels(r.Layout()), small)
		if err != nil {
			t.Fatal(err)
		}
		listens, err := pinned.New(s, s, fakegpu.Kernels(s.Layout()), small)
		if err != nil {
			t.Fatal(err)
		}
		fakegpu.Run(t, r, s, between{listens, dials}, func(r, s *kvconn.Config) { r.Convert, s.Convert = true, true }, func(w *kvconntest.World) {
			_, err := w.Receiver.Open(t.Context(), w.Addr, kvconn.PeerID{})
			if kvconn.OutcomeOf(err, "") != ticket.Refused || !strings.Contains(err.Error(), "the peer's KV rows are "+dtype+", ours bf16") {
				t.Errorf("%s: opened: %v", dtype, err)
			}
		})
	}
}
