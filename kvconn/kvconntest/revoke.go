package kvconntest

import (
	"testing"
	"time"
)

// RevokeWaits revokes tickets while stop holds the device half-way through copying
// their rows: a revoke returns when the copy has ended. The blocks then get other rows;
// Close finds what is written there after it.
func (w *World) RevokeWaits(t testing.TB, stop func() (begun <-chan struct{}, on func())) {
	t.Helper()
	w.Answer = firstBlocks
	for n := range 3 {
		w.open() // before the device is stopped
		begun, on := stop()
		defer on()
		spec := w.Spec("revoked", int32(n), 12, 4*n)
		in := w.request(spec)
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
