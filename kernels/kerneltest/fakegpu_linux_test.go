package kerneltest_test

import (
	"context"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/kerneltest"
	"github.com/xpyd/xpyd/kvlayout"
)

// Blocks of FP8 move with their scales: gathered, scattered in parts, copied,
// pushed and verified.
func TestFakeGPUMovesScales(t *testing.T) {
	l := kvlayout.Plain(2, 3, 16, 16, kvlayout.F8E4M3)
	open := func() *kerneltest.FakeGPU {
		g, err := kerneltest.NewFakeGPU(l, 4)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { g.Close() })
		return g
	}
	src, dst := open(), open()
	r := rand.New(rand.NewPCG(1, 2))
	rows := make([]byte, l.Resolve()[0].BlockBytes())
	for i := range rows {
		rows[i] = byte(r.Uint32())
	}
	for layer := range l.Layers() {
		src.Append(layer, 1, 32, 16, rows)
	}
	part, back := make([]byte, l.Resolve()[0].PackedBytes(5)), make([]byte, l.Resolve()[0].BlockBytes())
	src.Gather(0, 1, 3, 5, part)
	for kv := range 2 {
		for h := range l.Resolve()[0].Heads {
			whole, scales := l.Resolve()[0].Part(rows, 16, kv, h)
			some, few := l.Resolve()[0].Part(part, 5, kv, h)
			if !slices.Equal(some, whole[3*16:8*16]) || !slices.Equal(few, scales[3*4:8*4]) {
				t.Fatalf("rows 3..7 of (%d,%d) are not those that were written", kv, h)
			}
		}
	}
	export, err := dst.Export()
	if err != nil {
		t.Fatal(err)
	}
	flags := make([]byte, export.Bytes)
	peer, err := src.OpenPeer(export.Handle, flags)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := peer.Push(&kernels.Push{Layers: l.Layers(), Blocks: []kernels.BlockPair{{Src: 1, Dst: 2}}, Value: 1}); err != nil {
		t.Fatal(err)
	}
	if err := peer.Close(ctx); err != nil {
		t.Fatal(err)
	}
	if dst.Gather(1, 2, 0, 16, back); !slices.Equal(back, rows) {
		t.Error("a pushed block is not what was written")
	}
	landed := []kernels.Landed{{Layer: 0, Block: 2, FirstPos: 32, Rows: 16}}
	if good, err := dst.Verify(ctx, landed); err != nil || !good[0] {
		t.Errorf("a pushed block does not verify: %v", err)
	}
	back[len(back)-1] ^= 1 // a scale
	dst.Scatter(0, 2, 0, 16, back)
	if good, err := dst.Verify(ctx, landed); err != nil || good[0] {
		t.Errorf("a block with a wrong scale verifies (%v)", err)
	}
}
