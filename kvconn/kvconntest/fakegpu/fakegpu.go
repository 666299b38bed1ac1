//go:build linux

// Package fakegpu makes kernels/kerneltest's fake GPUs pools as kvconntest knows them,
// for the tests of transports between GPUs. It is apart from kvconntest so that tests
// without GPUs do not depend on kernels.
package fakegpu

import (
	"context"
	"slices"
	"testing"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/kerneltest"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/kvconntest"
	"github.com/xpyd/xpyd/kvlayout"
)

// GPU is one end's pool. It implements kvconntest.GPU.
type GPU struct {
	*kerneltest.FakeGPU
	layout kvlayout.Layout
	blocks int
}

// New makes a pool of so many blocks, of the suite's plain layout, which change may change.
// It is closed when the test ends.
func New(t testing.TB, blocks int, change func(l *kvlayout.Layout)) GPU {
	l := kvconntest.Plain()
	if change != nil {
		change(&l)
	}
	g, err := kerneltest.NewFakeGPU(l, blocks)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := g.Close(); err != nil {
			t.Error(err)
		}
	})
	return GPU{g, l, blocks}
}

// Pair is the two ends of the suite.
func Pair(t testing.TB) (receiver, sender GPU) {
	return New(t, kvconntest.ReceiverBlocks, nil), New(t, kvconntest.SenderBlocks, nil)
}

// Run has do work in a world of two devices and the transport between them.
func Run(t testing.TB, receiver, sender kvconntest.GPU, tr kvconn.Transport, tune func(r, s *kvconn.Config), do func(w *kvconntest.World)) {
	f := kvconntest.Factory{Device: func(testing.TB) (kvconn.Transport, kvconntest.GPUs) {
		return tr, kvconntest.GPUs{Receiver: receiver, Sender: sender}
	}}
	w := f.World(t, tune)
	defer w.Close()
	do(w)
}

// Layout implements kvconntest.GPU.
func (g GPU) Layout() kvlayout.Layout {
	l := g.layout
	l.Groups = slices.Clone(l.Groups)
	return l
}

// Shared implements kvconntest.GPU.
func (g GPU) Shared() *kvconn.Shared { return kvconn.DevicePool(g.layout, g.blocks) }

// VerifyPushed implements kvconntest.GPU.
func (g GPU) VerifyPushed(ctx context.Context, layer int, blocks []kvconn.PushedBlock) ([]bool, error) {
	return g.Verify(ctx, landedOf(layer, blocks))
}

func landedOf(layer int, blocks []kvconn.PushedBlock) []kernels.Landed {
	landed := make([]kernels.Landed, len(blocks))
	for i, b := range blocks {
		landed[i] = kernels.Landed{Layer: layer, Block: b.Block, FirstPos: b.FirstPos, Rows: b.Rows}
	}
	return landed
}

// RankRows implements kvconntest.GPU.
func (g GPU) RankRows(int) []byte { return g.Rows() }

var _ kvconntest.GPU = GPU{}
