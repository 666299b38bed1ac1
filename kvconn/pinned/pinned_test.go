//go:build linux

package pinned_test

import (
	"testing"
	"time"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/kvconntest"
	"github.com/xpyd/xpyd/kvconn/kvconntest/fakegpu"
	"github.com/xpyd/xpyd/kvconn/pinned"
	"github.com/xpyd/xpyd/kvconn/stage"
)

func TestMain(m *testing.M) { kvconntest.Main(m, factory, 48) }

// small is enough for the suite's blocks.
var small = stage.Ring{Slots: 16, SlotBytes: 16 << 10}

var factory = kvconntest.Factory{Device: pair, Shrink: 2, AtOnce: 48}

// pair is a transport between two fake GPUs whose copies take a while.
func pair(t testing.TB) (kvconn.Transport, kvconntest.GPUs) {
	r, s := fakegpu.Pair(t)
	r.Delay, s.Delay = 200*time.Microsecond, 200*time.Microsecond
	tr, err := pinned.New(r, s, fakegpu.Kernels(kvconntest.Layout()), small)
	if err != nil {
		t.Fatal(err)
	}
	return tr, kvconntest.GPUs{Receiver: r, Sender: s}
}

// TestPushed is the suite with rows that the sender's device pushes.
func TestPushed(t *testing.T) { kvconntest.Run(t, factory) }

// TestProcesses kills and stops real processes at every step. A fake GPU's
// pushes stop with its process.
func TestProcesses(t *testing.T) {
	t.Parallel()
	kvconntest.Processes(t, factory)
}
