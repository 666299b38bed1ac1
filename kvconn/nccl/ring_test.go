//go:build linux

package nccl_test

import (
	"testing"
	"time"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/kvconntest"
	"github.com/xpyd/xpyd/kvconn/stage"
)

// The sender fills a slot anew when it has been sent, and does not know when it has
// been copied: what comes for it waits until then. Digests would tell.
func TestSlotsAreReused(t *testing.T) {
	r, s := newFake(t, kvconntest.ReceiverBlocks), newFake(t, kvconntest.SenderBlocks)
	r.Delay = 4 * time.Millisecond
	f := kvconntest.Factory{Device: func(testing.TB) (kvconn.Transport, kvconntest.GPUs) {
		return over(t, r, s, stage.Ring{Slots: 2, SlotBytes: 4 << 10}), kvconntest.GPUs{Receiver: r, Sender: s}
	}}
	w := f.World(t, func(r, s *kvconn.Config) { r.BulkConns, s.BulkConns = 8, 8 })
	for n := range 4 {
		if err := w.Fetch(t.Context(), w.Spec("reused", int32(n), 18, 8*n)); err != nil {
			t.Fatal(err)
		}
	}
	if n := w.Value(w.RMetrics, "xpyd_kvconn_corrupt_units_total", ""); n > 0 {
		t.Errorf("%v blocks were not those that were sent", n)
	}
	w.Close()
}
