//go:build linux

package stage_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/kerneltest"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/stage"
	"github.com/xpyd/xpyd/kvlayout"
)

// open is a lane on which everything up to landed is there.
type open struct{ landed, freed uint64 }

func (o *open) Receive(context.Context, uint64, int64, int64) error { return nil }
func (o *open) Landed() uint64                                      { return o.landed }
func (o *open) Free(number uint64)                                  { o.freed = number }
func (o *open) Close(context.Context) error                         { return nil }

// A push is received once and only if its slot is the ring's; slots are free in the
// order of their numbers, also those of pushes that nobody was told of.
func TestHold(t *testing.T) {
	l := kvlayout.Plain(1, 2, 8, 4, "f32")
	g, err := kerneltest.NewFakeGPU(l, 8)
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	geo := stage.NewGeometry(l, stage.Ring{Slots: 4, SlotBytes: 4 << 10})
	mem, err := g.RegisterHost(make([]byte, geo.Bytes()))
	if err != nil {
		t.Fatal(err)
	}
	lane := &open{landed: 6}
	h := stage.NewHold(g, mem, geo, lane)
	receive := func(number uint64) error { return h.Receive(t.Context(), number, 1) }
	want := func(what string, got, want error) {
		t.Helper()
		if !errors.Is(got, want) || want == nil && got != nil {
			t.Errorf("%s: %v, want %v", what, got, want)
		}
	}
	freed := func(want uint64) {
		t.Helper()
		if lane.freed != want {
			t.Errorf("slots up to %d are free, want %d", lane.freed, want)
		}
	}
	want("without a number", receive(0), kvconn.ErrForgotten)
	want("2 before 1", receive(2), nil)
	want("2 again", receive(2), kvconn.ErrForgotten)
	late, cancel := context.WithCancel(t.Context())
	cancel()
	want("5, of a ring of 4 of which nothing is free", h.Receive(late, 5, 1), context.Canceled)
	h.Free(2)
	freed(0)
	want("2 once more", receive(2), kvconn.ErrForgotten)
	want("1", receive(1), nil)
	if h.Place(t.Context(), 1, 0, []kvconn.Placement{{At: 1, Block: 0, Rows: 4}}) == nil {
		t.Error("placed block 1 of a push of 1")
	}
	want("place", h.Place(t.Context(), 1, 0, []kvconn.Placement{{At: 0, Block: 3, Rows: 4}}), nil)
	h.Free(1)
	freed(2)
	want("4", receive(4), nil)
	h.Forget() // 3, 5 and 6 have come and nobody was told
	freed(3)
	want("3, forgotten", receive(3), kvconn.ErrForgotten)
	h.Free(4)
	freed(6)
	if h.Place(t.Context(), 4, 0, []kvconn.Placement{{At: 0, Block: 3, Rows: 4}}) == nil {
		t.Error("placed a push that is freed")
	}
	if err := h.Close(); err != nil {
		t.Error(err)
	}
	if receive(7) == nil {
		t.Error("received into a closed ring")
	}
}

// What comes for a slot that is in use waits until it is free.
func TestHoldWaitsForTheSlot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		geo := stage.NewGeometry(kvlayout.Plain(1, 2, 8, 4, "f32"), stage.Ring{Slots: 2, SlotBytes: 4 << 10})
		h := stage.NewHold(nil, nil, geo, &open{})
		for n := range uint64(2) {
			if err := h.Receive(t.Context(), n+1, 1); err != nil {
				t.Fatal(err)
			}
		}
		third := make(chan error, 1)
		go func() { third <- h.Receive(t.Context(), 3, 1) }()
		h.Free(2)
		synctest.Wait()
		if len(third) > 0 {
			t.Error("received into a slot that is in use:", <-third)
		}
		h.Free(1)
		if err := <-third; err != nil {
			t.Error(err)
		}
	})
}

// stuck is a lane whose end hangs until it is let go.
type stuck struct {
	open
	gate chan struct{}
}

func (s *stuck) Close(context.Context) error { <-s.gate; return nil }
func (s *stuck) Room(context.Context, uint64) error {
	return nil
}
func (s *stuck) Send(uint64, int64, int64, kernels.Pending) error { return nil }

// Neither end of a ring is waited for without end where the device does not let go.
func TestStuck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		geo := stage.NewGeometry(kvlayout.Plain(1, 2, 8, 4, "f32"), stage.Ring{Slots: 2, SlotBytes: 4 << 10})
		lane := &stuck{gate: make(chan struct{})}
		defer close(lane.gate)
		for _, end := range []kvconn.Window{stage.NewHold(nil, nil, geo, lane), stage.NewWindow(nil, nil, geo, lane, kernels.Kernel)} {
			began := time.Now()
			if err := end.Close(); !errors.Is(err, kvconn.ErrStuck) || time.Since(began) != 10*time.Second {
				t.Errorf("%T: %v after %v", end, err, time.Since(began))
			}
		}
	})
}

// gathers is a device that gathers when it is told to.
type gathers struct {
	kernels.HostMover
	all []*gather
}

type gather struct{ end chan error }

func (g *gathers) GatherBlocks(*kernels.HostMove) (kernels.Pending, error) {
	g.all = append(g.all, &gather{make(chan error, 1)})
	return g.all[len(g.all)-1], nil
}

func (g *gather) Wait(ctx context.Context) error {
	select {
	case err := <-g.end:
		g.end <- err
		return err
	case <-ctx.Done():
		return kernels.ErrLate
	}
}

// A push is awaited until its own rows have been read, whatever has become of one before
// it that is awaited later: bulk writers push in one order and tell of it in another.
func TestAwaitIsOfItsOwnPush(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		geo := stage.NewGeometry(kvlayout.Plain(1, 2, 8, 4, "f32"), stage.Ring{Slots: 2, SlotBytes: 4 << 10})
		g := &gathers{}
		w := stage.NewWindow(g, nil, geo, &stuck{}, kernels.Kernel)
		for range 2 {
			if _, err := w.Push(0, []kvconn.Move{{Rows: 4}}); err != nil {
				t.Fatal(err)
			}
		}
		broken := errors.New("the device fails")
		g.all[0].end <- broken
		second := make(chan error, 1)
		go func() { second <- w.Await(2) }()
		synctest.Wait()
		if len(second) > 0 {
			t.Error("awaited while its rows are read:", <-second)
		}
		g.all[1].end <- nil
		if err := <-second; err != nil {
			t.Errorf("push 2 was gathered: %v", err)
		}
		if err := w.Await(1); err != broken {
			t.Errorf("push 1 failed: %v", err)
		}
	})
}
