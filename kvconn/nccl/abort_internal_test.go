//go:build linux

package nccl

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/kerneltest"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvlayout"
)

// TestAbortHangs: an abort that hangs is an outcome of its own, at both ends, and the
// link ends once NCCL lets go.
func TestAbortHangs(t *testing.T) {
	g, err := kerneltest.NewFakeGPU(kvlayout.Plain(1, 2, 8, 4, "f32"), 8)
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	id, err := g.NewLink()
	if err != nil {
		t.Fatal(err)
	}
	receiver, err := g.OpenLink(id, kernels.LinkReceiver, 4096)
	if err != nil {
		t.Fatal(err)
	}
	sender, err := g.OpenLink(id, kernels.LinkSender, 4096)
	if err != nil {
		t.Fatal(err)
	}
	in, out := newInlet(receiver, 2), &outlet{sender, make([]kernels.Pending, 2)}
	if err := in.join(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := sender.Ready(t.Context()); err != nil {
		t.Fatal(err)
	}
	under, err := in.begin(t.Context(), 1, 0, 64) // nobody sends it
	if err != nil {
		t.Fatal(err)
	}
	for g.Flying() == 0 { // what is only queued ends with the link, at once
		time.Sleep(time.Millisecond)
	}
	release := g.HangAborts()
	defer release()
	over, cancel := context.WithCancel(t.Context())
	cancel()
	for _, end := range []interface{ Close(context.Context) error }{in, out} {
		if err := end.Close(over); !errors.Is(err, kvconn.ErrStuck) {
			t.Errorf("%T: %v", end, err)
		}
	}
	if err := under.Wait(over); !errors.Is(err, kernels.ErrLate) {
		t.Errorf("the transfer: %v", err)
	}
	release()
	for _, end := range []interface{ Close(context.Context) error }{in, out} {
		if err := end.Close(t.Context()); err != nil {
			t.Errorf("%T: %v", end, err)
		}
	}
}
