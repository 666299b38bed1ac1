package kvconntest

import (
	"context"
	"runtime"
	"testing"

	"github.com/xpyd/xpyd/kvconn"
)

// RevokeWaits revokes tickets while a device copies, which busy tells: a revoke
// returns when that has ended. The blocks then get other rows; Close finds what is
// written there after it.
func (w *World) RevokeWaits(t testing.TB, busy func() bool) {
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
		spec := w.Spec("revoked", int32(n), 12, 4*n)
		in, err := session.Request(t.Context(), spec)
		if err != nil {
			t.Fatal(err)
		}
		for !busy() { // the device has begun
			runtime.Gosched()
		}
		if err := in.Revoke(t.Context()); err != nil {
			t.Error(err)
		}
		if busy() {
			t.Error("revoked, and the device writes")
		}
		w.Pool.Reclaim(spec.Dest)
	}
}
