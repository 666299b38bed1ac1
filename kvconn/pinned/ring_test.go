//go:build linux

package pinned_test

import (
	"testing"
	"time"

	"github.com/xpyd/xpyd/kvconn/kvconntest"
	"github.com/xpyd/xpyd/kvconn/kvconntest/fakegpu"
	"github.com/xpyd/xpyd/kvconn/pinned"
	"github.com/xpyd/xpyd/kvconn/stage"
)

// slow is a world over a ring of two slots whose devices copy slowly.
func slow(t *testing.T, receiver, sender time.Duration, do func(w *kvconntest.World, r fakegpu.GPU)) {
	r, s := fakegpu.Pair(t)
	r.Delay, s.Delay = receiver, sender
	tr, err := pinned.New(r, s, kvconntest.Plain(), stage.Ring{Slots: 2, SlotBytes: 4 << 10}, "")
	if err != nil {
		t.Fatal(err)
	}
	fakegpu.Run(t, r, s, tr, nil, func(w *kvconntest.World) { do(w, r) })
}

// The fence: a revoke that comes while our device copies out of the ring returns
// when it has ended. The blocks then get other rows, and keep them.
func TestRevokeWaitsForTheCopy(t *testing.T) {
	slow(t, 0, 0, func(w *kvconntest.World, r fakegpu.GPU) { w.RevokeWaits(t, r.Stop) })
}

// Two slots carry many pushes: none is gathered over another that is still being
// copied, and none copied before it is there. Digests would tell.
func TestSlotsAreReused(t *testing.T) {
	reuse := func(w *kvconntest.World, _ fakegpu.GPU) {
		for n := range 4 {
			if err := w.Fetch(t.Context(), w.Spec("reused", int32(n), 18, 8*n)); err != nil {
				t.Fatal(err)
			}
		}
		if n := w.Value(w.RMetrics, "xpyd_kvconn_corrupt_units_total", ""); n > 0 {
			t.Errorf("%v blocks were not those that were sent", n)
		}
	}
	slow(t, 4*time.Millisecond, time.Millisecond, reuse)
	slow(t, 0, 8*time.Millisecond, reuse)
}
