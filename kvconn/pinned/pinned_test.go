//go:build linux

package pinned_test

import (
	"context"
	"flag"
	"os"
	"testing"
	"time"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/kerneltest"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/kvconntest"
	"github.com/xpyd/xpyd/kvconn/pinned"
	"github.com/xpyd/xpyd/kvconn/stage"
)

// TestMain lets more cases run at once than there are cores: the suite's cases
// wait for deadlines, they do not compute.
func TestMain(m *testing.M) {
	if kvconntest.Child(factory) {
		return
	}
	flag.Parse()
	flag.Set("test.parallel", "48")
	os.Exit(m.Run())
}

// layout is the suite's.
var layout = kernels.Layout{Layers: 3, KVHeads: 2, HeadDim: 8, BlockTokens: 4, DType: "f32", RowBytes: 32}

// small is enough for the suite's blocks.
var small = stage.Ring{Slots: 16, SlotBytes: 16 << 10}

var factory = kvconntest.Factory{Device: pair, Shrink: 2, AtOnce: 48}

// fake is a device as the suite knows one.
type fake struct {
	*kerneltest.FakeGPU
	blocks int
}

func (g fake) Layout() kvconn.Layout { return kvconntest.Layout() }

func (g fake) Shared() *kvconn.Shared { return kvconn.DevicePool(kvconntest.Layout(), g.blocks) }

func (g fake) VerifyPushed(ctx context.Context, layer int, blocks []kvconn.PushedBlock) ([]bool, error) {
	landed := make([]kernels.Landed, len(blocks))
	for i, b := range blocks {
		landed[i] = kernels.Landed{Layer: layer, Block: b.Block, FirstPos: b.FirstPos, Rows: b.Rows}
	}
	return g.Verify(ctx, landed)
}

func newFake(t testing.TB, blocks int) fake {
	g, err := kerneltest.NewFakeGPU(layout, blocks)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := g.Close(); err != nil {
			t.Error(err)
		}
	})
	return fake{g, blocks}
}

// pair is a transport between two fake GPUs whose copies take a while.
func pair(t testing.TB) (kvconn.Transport, kvconntest.GPUs) {
	r, s := newFake(t, kvconntest.ReceiverBlocks), newFake(t, kvconntest.SenderBlocks)
	r.Delay, s.Delay = 200*time.Microsecond, 200*time.Microsecond
	tr, err := pinned.New(r, s, layout, small)
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
