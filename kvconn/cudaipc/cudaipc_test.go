//go:build linux

package cudaipc_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/cudaipc"
	"github.com/xpyd/xpyd/kvconn/kvconntest"
	"github.com/xpyd/xpyd/kvconn/kvconntest/fakegpu"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/kvlayout"
)

func TestMain(m *testing.M) { kvconntest.Main(m, factory, 48) }

var factory = kvconntest.Factory{Device: pair, Shrink: 2, AtOnce: 48}

// pair is a transport between two fake GPUs whose pushes take a while.
func pair(t testing.TB) (kvconn.Transport, kvconntest.GPUs) {
	r, s := fakegpu.Pair(t)
	s.Delay = time.Millisecond
	tr, err := open(r, s, true)
	if err != nil {
		t.Fatal(err)
	}
	return tr, kvconntest.GPUs{Receiver: r, Sender: s}
}

// open is a transport between two GPUs.
func open[R interface {
	kernels.Exporter
	Layout() kvlayout.Layout
}, S kernels.PeerOpener](r R, s S, refill bool) (kvconn.Transport, error) {
	rows, _ := r.Layout().Uniform()
	return cudaipc.New([]R{r}, []S{s}, rows.Heads, refill, "")
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
func once(t *testing.T, spoil func(r, s fakegpu.GPU), tune func(r, s *kvconn.Config), do func(w *kvconntest.World, s fakegpu.GPU)) {
	r, s := fakegpu.Pair(t)
	if spoil != nil {
		spoil(r, s)
	}
	between(t, r, s, tune, do)
}

// between is once with other devices.
func between(t *testing.T, r, s fakegpu.GPU, tune func(r, s *kvconn.Config), do func(w *kvconntest.World, s fakegpu.GPU)) {
	tr, err := open(r, s, true)
	if err != nil {
		t.Fatal(err)
	}
	fakegpu.Run(t, r, s, tr, tune, func(w *kvconntest.World) { do(w, s) })
}

// A peer whose device cannot reach ours refuses the session and says why, so
// that another way is taken.
func TestNoAccess(t *testing.T) {
	once(t, func(_, s fakegpu.GPU) {
		s.Refuse = fmt.Errorf("%w: GPU 0 and 1", kernels.ErrNoPeerAccess)
	}, nil, func(w *kvconntest.World, _ fakegpu.GPU) {
		_, err := w.Receiver.Open(t.Context(), w.Addr, kvconn.PeerID{})
		if kvconn.OutcomeOf(err, "") != ticket.Refused || !strings.Contains(err.Error(), "GPU 0 and 1") {
			t.Errorf("opened: %v", err)
		}
	})
}

// The fence: a revoke that comes while the peer's device writes returns when it
// has stopped. The blocks then get other rows, and keep them.
func TestRevokeWaitsForThePush(t *testing.T) {
	once(t, nil, nil, func(w *kvconntest.World, s fakegpu.GPU) { w.RevokeWaits(t, s.Stop) })
}

// A block is looked at when its push has landed, also by a peer that has another
// one's line of the flags: no digest is ever wrong.
func TestNothingIsBelievedBeforeItLands(t *testing.T) {
	slow := func(_, s fakegpu.GPU) { s.Delay = 60 * time.Millisecond }
	idle := func(r, _ *kvconn.Config) { r.IdleTimeout = r.KeepAlive }
	once(t, slow, idle, func(w *kvconntest.World, _ fakegpu.GPU) {
		for n := range 3 {
			if err := w.Fetch(t.Context(), w.Spec("again", int32(n), 18, 8*n)); err != nil {
				t.Fatal(err)
			}
			w.Until("the session ends", func() bool { return w.Value(w.RMetrics, "xpyd_kvconn_mapped_pools", "") == 0 })
		}
		if n := w.Value(w.RMetrics, "xpyd_kvconn_corrupt_units_total", ""); n > 0 {
			t.Errorf("%v blocks were looked at too early", n)
		}
	})
}

// stained is a device whose flags cannot be cleared.
type stained struct{ fakegpu.GPU }

func (stained) ClearFlag(int) error { return errors.New("no such address") }

// A peer that has let go has let go, whatever becomes of its line: a revoke that waits for
// that goes on. The line is nobody's any more.
func TestLetGoOfALineThatStays(t *testing.T) {
	r, s := fakegpu.Pair(t)
	tr, err := open(stained{r}, s, true)
	if err != nil {
		t.Fatal(err)
	}
	ln, err := tr.Listen("")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	shared := r.Shared()
	lines := map[string]bool{}
	for range 2 {
		c, err := tr.Dial(t.Context(), ln.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		peer, err := ln.Accept()
		if err != nil {
			t.Fatal(err)
		}
		h, grant, err := c.(kvconn.SharedConn).Offer(shared)
		if err != nil {
			t.Fatal(err)
		}
		lines[string(grant[4:8])] = true
		if _, err := c.Write([]byte("x")); err != nil { // which takes the offer along
			t.Fatal(err)
		}
		peer.Close()
		if err := h.Wait(t.Context()); err != nil {
			t.Errorf("the peer has let go: %v", err)
		}
		if err := h.Close(); err == nil || !strings.Contains(err.Error(), "no such address") {
			t.Errorf("closed: %v", err)
		}
	}
	if len(lines) != 2 {
		t.Error("a line with a former peer's number is another's")
	}
}

// A bit that flips in prefill's pool after the append, when the digests are
// made, is found in decode's: the digests have come along.
func TestSpoiledSource(t *testing.T) {
	once(t, nil, nil, func(w *kvconntest.World, s fakegpu.GPU) {
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
