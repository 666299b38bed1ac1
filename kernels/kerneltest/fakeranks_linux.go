package kerneltest

import (
	"context"
	"errors"
	"fmt"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvlayout"
)

// FakeRanks is the pool of all heads that several FakeGPUs have together, as a backend of several
// ranks is. Its links are the first's, in whose memory every rank moves its own heads. It
// implements kernels.HostMover and kernels.Linker.
type FakeRanks struct {
	list []*FakeGPU
	all  kvlayout.Rows
	kept []int // by rank: the first of its heads
}

// JoinFakeRanks joins what NewFakeRanks has made for a layout.
func JoinFakeRanks(l kvlayout.Layout, list []*FakeGPU) (*FakeRanks, error) {
	all, ok := l.Uniform()
	parts, err := l.Ranks(len(list))
	if !ok || err != nil {
		return nil, fmt.Errorf("fake GPU: ranks of %v: %w", l, err)
	}
	r := &FakeRanks{list: list, all: all}
	for _, part := range parts {
		r.kept = append(r.kept, part.Groups[0].Heads.First-l.Groups[0].Heads.First)
	}
	return r, nil
}

// heads calls f with the rows and scales of each of rank i's heads, in blocks of its own heads and
// of all, of n positions.
func (r *FakeRanks) heads(i, n int, own, all []byte, f func(own, all []byte)) {
	r.list[i].view.Parts(own, n, func(plane, head int, rows, scales []byte) {
		theirs, theirScales := r.all.Part(all, n, plane, r.kept[i]+head)
		f(rows, theirs)
		f(scales, theirScales)
	})
}

// Gather implements kernels.Pool.
func (r *FakeRanks) Gather(layer int, block int32, row, n int, dst []byte) {
	for i, g := range r.list {
		own := make([]byte, g.view.PackedBytes(n))
		g.Gather(layer, block, row, n, own)
		r.heads(i, n, own, dst, func(own, all []byte) { copy(all, own) })
	}
}

// Scatter implements kernels.Pool.
func (r *FakeRanks) Scatter(layer int, block int32, row, n int, src []byte) {
	for i, g := range r.list {
		own := make([]byte, g.view.PackedBytes(n))
		r.heads(i, n, own, src, func(own, all []byte) { copy(own, all) })
		g.Scatter(layer, block, row, n, own)
	}
}

// Digest implements kernels.Pool.
func (r *FakeRanks) Digest(layer int, block int32, dst []uint64) {
	for i, g := range r.list {
		g.Digest(layer, block, dst[r.kept[i]:])
	}
}

// SetDigest implements kernels.Pool.
func (r *FakeRanks) SetDigest(layer int, block int32, filled int, digest []uint64) {
	for i, g := range r.list {
		g.SetDigest(layer, block, filled, digest[r.kept[i]:r.kept[i]+g.view.Heads])
	}
}

// CopyBlock implements kernels.Pool.
func (r *FakeRanks) CopyBlock(dst, src int32, firstPos, n int) {
	for _, g := range r.list {
		g.CopyBlock(dst, src, firstPos, n)
	}
}

// RegisterHost implements kernels.HostMover.
func (r *FakeRanks) RegisterHost(mem []byte) (kernels.HostMemory, error) {
	return r.list[0].RegisterHost(mem)
}

// fakeParts are a move's, by rank.
type fakeParts []kernels.Pending

// Wait implements kernels.Pending.
func (p fakeParts) Wait(ctx context.Context) error {
	for _, part := range p {
		if err := part.Wait(ctx); err != nil {
			return err
		}
	}
	return nil
}

// move has each rank move its heads; of those that several keep only the first gathers them.
func (r *FakeRanks) move(m *kernels.HostMove, out bool, way func(*FakeGPU) *lane) (kernels.Pending, error) {
	h, ok := m.Memory.(*fakeMemory)
	if !ok || h.g != r.list[0] {
		return nil, errors.New("fake GPU: a move to memory of the first rank's device, please")
	}
	var parts fakeParts
	for i, g := range r.list {
		if out && i > 0 && r.kept[i] == r.kept[i-1] {
			continue
		}
		p, err := g.moveHeads(m, h.mem, r.all, r.kept[i], out, way(g))
		if err != nil {
			return nil, errors.Join(err, parts.Wait(context.Background()))
		}
		parts = append(parts, p)
	}
	return parts, nil
}

// GatherBlocks implements kernels.HostMover.
func (r *FakeRanks) GatherBlocks(m *kernels.HostMove) (kernels.Pending, error) {
	return r.move(m, true, func(g *FakeGPU) *lane { return &g.gathers })
}

// ScatterBlocks implements kernels.HostMover.
func (r *FakeRanks) ScatterBlocks(m *kernels.HostMove) (kernels.Pending, error) {
	return r.move(m, false, func(g *FakeGPU) *lane { return &g.scatters })
}

// NewLink implements kernels.Linker.
func (r *FakeRanks) NewLink() ([]byte, error) { return r.list[0].NewLink() }

// OpenLink implements kernels.Linker.
func (r *FakeRanks) OpenLink(id []byte, end kernels.LinkEnd, bytes int64) (kernels.Link, error) {
	return r.list[0].OpenLink(id, end, bytes)
}

var _ kernels.Linker = (*FakeRanks)(nil)
