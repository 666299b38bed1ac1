//go:build linux

package nccl_test

import (
	"testing"
	"time"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/kvconntest"
	"github.com/xpyd/xpyd/kvconn/kvconntest/fakegpu"
	"github.com/xpyd/xpyd/kvconn/stage"
)

// The sender fills a slot anew when it has been sent, and does not know when it has
// been copied: what comes for it waits until then. Digests would tell.
func TestSlotsAreReused(t *testing.T) {
	r, s := fakegpu.Pair(t)
	r.Delay = 4 * time.Millisecond
	many := func(r, s *kvconn.Config) { r.BulkConns, s.BulkConns = 8, 8 }
	fakegpu.Run(t, r, s, over(t, r, s, stage.Ring{Slots: 2, SlotBytes: 4 << 10}), many, func(w *kvconntest.World) {
		for n := range 4 {
			if err := w.Fetch(t.Context(), w.Spec("reused", int32(n), 18, 8*n)); err != nil {
				t.Fatal(err)
			}
		}
		if n := corrupt(w); n > 0 {
			t.Errorf("%v blocks were not those that were sent", n)
		}
	})
}
