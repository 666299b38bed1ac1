//go:build cgo && linux

package cuda

import (
	"context"
	"errors"
	"fmt"

	"github.com/xpyd/xpyd/kernels"
)

// The pool is that of all KV heads. Where several ranks have one, it is read from the first of
// them and written to all.

func (g *Ranks) packed(n, size int) {
	if n < 0 || size != g.rows.PackedBytes(n) {
		panic(fmt.Sprintf("kernels/cuda: %d packed bytes for %d rows, want %d", size, n, g.rows.PackedBytes(max(n, 0))))
	}
}

// heads calls f with the rows and scales of each of a rank's heads, among the rank's n
// packed rows and among those of all heads.
func (g *Ranks) heads(b *Backend, n int, own, all []byte, f func(own, all []byte)) {
	for plane := range g.rows.Planes {
		for h := range b.shard.kv.n {
			rows, scales := b.rows.Part(own, n, plane, h)
			allRows, allScales := g.rows.Part(all, n, plane, b.shard.kv.first+h)
			f(rows, allRows)
			f(scales, allScales)
		}
	}
}

// Gather implements kernels.Pool.
func (g *Ranks) Gather(layer int, block int32, row, n int, dst []byte) {
	g.packed(n, len(dst))
	for _, b := range g.owners {
		own := make([]byte, b.rows.PackedBytes(n))
		b.Gather(layer, block, row, n, own)
		g.heads(b, n, own, dst, func(own, all []byte) { copy(all, own) })
	}
}

// Scatter implements kernels.Pool.
func (g *Ranks) Scatter(layer int, block int32, row, n int, src []byte) {
	g.packed(n, len(src))
	for _, b := range g.ranks {
		own := make([]byte, b.rows.PackedBytes(n))
		g.heads(b, n, own, src, func(own, all []byte) { copy(own, all) })
		b.Scatter(layer, block, row, n, own)
	}
}

// Digest implements kernels.Pool.
func (g *Ranks) Digest(layer int, block int32, dst []uint64) {
	dst = dst[:g.rows.Heads]
	for _, b := range g.owners {
		b.Digest(layer, block, dst[b.shard.kv.first:])
	}
}

// SetDigest implements kernels.Pool.
func (g *Ranks) SetDigest(layer int, block int32, filled int, digest []uint64) {
	digest = digest[:g.rows.Heads]
	for _, b := range g.ranks {
		b.SetDigest(layer, block, filled, digest[b.shard.kv.first:])
	}
}

// CopyBlock implements kernels.Pool.
func (g *Ranks) CopyBlock(dst, src int32, firstPos, n int) {
	for _, b := range g.ranks {
		b.CopyBlock(dst, src, firstPos, n)
	}
}

// ranksGate implements kernels.Gate by one of each rank.
type ranksGate struct {
	g     *Ranks
	parts []kernels.Gate
}

// Gate implements kernels.Gated.
func (g *Ranks) Gate() (kernels.Gate, error) {
	all := &ranksGate{g: g}
	for _, b := range g.ranks {
		part, err := b.Gate()
		if err != nil {
			all.Open(g.lead.arch.Layers)
			return nil, err
		}
		all.parts = append(all.parts, part)
	}
	return all, nil
}

// Open implements kernels.Gate.
func (a *ranksGate) Open(layers int) {
	for _, p := range a.parts {
		p.Open(layers)
	}
}

// Layers implements kernels.Arrival.
func (a *ranksGate) Layers() int { return a.parts[len(a.parts)-1].Layers() }

// Wait implements kernels.Pending.
func (a *ranksGate) Wait(ctx context.Context) error { return a.parts[len(a.parts)-1].Wait(ctx) }

// ranksPart is an arrival of several ranks: part is rank i's, if the arrival is one of g.
type ranksPart interface {
	part(g *Ranks, i int) (kernels.Arrival, bool)
}

// part implements ranksPart.
func (a *ranksGate) part(g *Ranks, i int) (kernels.Arrival, bool) {
	if a.g != g {
		return nil, false
	}
	return a.parts[i], true
}

// arrivals are each rank's part of what a step waits for.
func (g *Ranks) arrivals(list []kernels.Arrival) ([][]kernels.Arrival, error) {
	parts := make([][]kernels.Arrival, g.lead.shard.ranks)
	for _, k := range list {
		a, ok := k.(ranksPart)
		for i := range parts {
			var own kernels.Arrival
			if ok {
				own, ok = a.part(g, i)
			}
			if !ok {
				return nil, errors.New("an arrival of another backend")
			}
			parts[i] = append(parts[i], own)
		}
	}
	return parts, nil
}
