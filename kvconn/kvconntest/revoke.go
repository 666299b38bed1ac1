package kvconntest

import (
	"context"
	"testing"
	"time"

	"github.com/xpyd/xpyd/kvconn"
)

// RevokeWaits revokes tickets while a device has copied half of their rows, where stop
// has it wait: a revoke returns when the copy has ended. The blocks then get other
// rows; Close finds what is written there after it.
func (w *World) RevokeWaits(t testing.TB, stop func() (begun <-chan struct{}, on func())) {
	t.Helper()
	w.Answer = func(ctx context.Context, o *kvconn.Outgoing, src *Source) {
		if o.Accept(src) == nil {
			o.Push(0, []int{0, 1, 2})
			<-ctx.Done()
		}
	}
	for n := range 3 {
		session, err := w.Receiver.Open(t.Context(), w.Addr, kvconn.PeerID{})
		if err != nil {
			t.Fatal(err)
		}
		begun, on := stop()
		defer on()
		spec := w.Spec("revoked", int32(n), 12, 4*n)
		in, err := session.Request(t.Context(), spec)
		if err != nil {
			t.Fatal(err)
		}
		select {
		case <-begun:
		case <-in.Done():
			_, err := in.Wait(t.Context())
			t.Fatal("over before it was revoked:", err)
		}
		revoked := make(chan error, 1)
		go func() { revoked <- in.Revoke(t.Context()) }()
		select {
		case err := <-revoked:
			t.Fatal("revoked, and the device writes:", err)
		case <-time.After(50 * time.Millisecond): // who waits for nothing is back by then
		}
		on()
		if err := <-revoked; err != nil {
			t.Error(err)
		}
		w.Pool.Reclaim(spec.Dest)
	}
}
