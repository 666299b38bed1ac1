//go:build linux

package fakegpu

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/xpyd/xpyd/kernels/kerneltest"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/kvconntest"
	"github.com/xpyd/xpyd/kvlayout"
)

// Ranks is one end's pool, divided among several GPUs. It implements kvconntest.GPU.
type Ranks struct {
	List   []*kerneltest.FakeGPU
	Joined *kerneltest.FakeRanks // of all heads
	layout kvlayout.Layout
	layers []kvlayout.Layer   // of all heads
	parts  [][]kvlayout.Layer // of each rank
	shared *kvconn.Shared
}

// NewRanks is New for so many ranks, whose pushes take that long.
func NewRanks(t testing.TB, ranks, blocks int, delay time.Duration, change func(l *kvlayout.Layout)) *Ranks {
	l := kvconntest.Plain()
	if change != nil {
		change(&l)
	}
	list, err := kerneltest.NewFakeRanks(l, ranks, blocks)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, g := range slices.Backward(list) {
			err = errors.Join(err, g.Close())
		}
		if err != nil {
			t.Error(err)
		}
	})
	r := &Ranks{List: list, layout: l, layers: l.Resolve()}
	if r.shared, err = kvconn.DeviceRanks(l, ranks, blocks); err != nil {
		t.Fatal(err)
	}
	if r.Joined, err = kerneltest.JoinFakeRanks(l, list); err != nil {
		t.Fatal(err)
	}
	layouts, _ := l.Ranks(ranks) // as above
	for i, part := range layouts {
		list[i].Delay = delay
		r.parts = append(r.parts, part.Resolve())
	}
	return r
}

// Layout implements kvconntest.GPU.
func (r *Ranks) Layout() kvlayout.Layout {
	l := r.layout
	l.Groups = slices.Clone(l.Groups)
	return l
}

// Shared implements kvconntest.GPU.
func (r *Ranks) Shared() *kvconn.Shared {
	s := *r.shared
	return &s
}

// RankRows implements kvconntest.GPU.
func (r *Ranks) RankRows(rank int) []byte { return r.List[rank].Rows() }

// Append implements kvconntest.GPU.
func (r *Ranks) Append(layer int, block int32, firstPos, rows int, packed []byte) {
	for i, g := range r.List {
		l := &r.parts[i][layer]
		own := make([]byte, l.PackedBytes(rows))
		kvlayout.CopyHeads(l, own, rows, 0, &r.layers[layer], packed, rows, 0, rows)
		g.Append(layer, block, firstPos, rows, own)
	}
}

// VerifyPushed implements kvconntest.GPU.
func (r *Ranks) VerifyPushed(ctx context.Context, layer int, blocks []kvconn.PushedBlock) (good []bool, err error) {
	for _, g := range r.List {
		own, err := g.Verify(ctx, landedOf(layer, blocks))
		if err != nil {
			return nil, err
		}
		if good == nil {
			good = own
		}
		for i := range good {
			good[i] = good[i] && own[i]
		}
	}
	return good, nil
}

// Busy implements kvconntest.GPU.
func (r *Ranks) Busy(block int32) bool {
	return slices.ContainsFunc(r.List, func(g *kerneltest.FakeGPU) bool { return g.Busy(block) })
}

// Spoil implements kvconntest.GPU: it flips a bit of the last rank's.
func (r *Ranks) Spoil(layer int, block int32) { r.List[len(r.List)-1].Spoil(layer, block) }

var _ kvconntest.GPU = (*Ranks)(nil)
