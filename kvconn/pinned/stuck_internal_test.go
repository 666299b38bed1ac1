//go:build linux

package pinned

import (
	"context"
	"errors"
	"io"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"golang.org/x/sys/unix"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/stage"
	"github.com/xpyd/xpyd/kvlayout"
)

// hanging is a device whose copies out of a ring hang until they are let go.
type hanging struct {
	kernels.HostMover
	gate chan struct{}
	ring *ring
}

type ring struct {
	mem    []byte
	closed chan struct{}
}

func (r *ring) Bytes() []byte { return r.mem }
func (r *ring) Close() error  { close(r.closed); return nil }

func (h *hanging) RegisterHost(mem []byte) (kernels.HostMemory, error) {
	h.ring = &ring{mem, make(chan struct{})}
	return h.ring, nil
}

func (h *hanging) ScatterBlocks(*kernels.HostMove) (kernels.Pending, error) { return h, nil }

func (h *hanging) Wait(ctx context.Context) error {
	select {
	case <-h.gate:
		return nil
	case <-ctx.Done():
		return kernels.ErrLate
	}
}

// TestStuckRing: a ring that a device does not let go of stays taken until it does, and
// no longer.
func TestStuckRing(t *testing.T) {
	l := kvlayout.Plain(1, 2, 8, 4, "f32")
	kv := kvlayout.Plain(1, 2, 8, 4, "f32")
	synctest.Test(t, func(t *testing.T) {
		h := &hanging{gate: make(chan struct{})}
		tr, err := New(h, h, l, stage.Ring{Slots: 2, SlotBytes: 4 << 10}, "")
		if err != nil {
			t.Fatal(err)
		}
		ours, theirs := ends(t, tr)
		lent, _, err := ours.Offer(kvconn.DevicePool(kv, 8))
		if err != nil {
			t.Fatal(err)
		}
		hold := lent.(kvconn.StagedHold)
		if _, err := ours.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(theirs, make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		taken, err := theirs.Take()
		if err != nil {
			t.Fatal(err)
		}
		mem, err := taken.Map(memoryBytes(theirs.d.geo))
		if err != nil {
			t.Fatal(err)
		}
		atomic.StoreUint64(word(mem, landedAt), 1)
		if err := hold.Receive(t.Context(), 1, 1); err != nil {
			t.Fatal(err)
		}
		placed := make(chan error)
		go func() { placed <- hold.Place(t.Context(), 1, 0, []kvconn.Placement{{Block: 3, Rows: 4}}) }()
		synctest.Wait()
		if err := hold.Close(); !errors.Is(err, kvconn.ErrStuck) {
			t.Errorf("closed: %v", err)
		}
		select {
		case <-h.ring.closed:
			t.Error("the ring is free while the device copies out of it")
		default:
		}
		close(h.gate)
		if err := <-placed; err != nil {
			t.Error(err)
		}
		<-h.ring.closed // else the bubble is stuck
		if err := errors.Join(unix.Munmap(mem), taken.End()); err != nil {
			t.Error(err)
		}
	})
}

// ends are those of a new connection; the first is the dialler's.
func ends(t *testing.T, tr kvconn.Transport) (dialed, accepted *conn) {
	ln, err := tr.Listen("")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	a, err := tr.Dial(t.Context(), ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	b, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close(); b.Close() })
	return a.(*conn), b.(*conn)
}
