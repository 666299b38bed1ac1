//go:build cgo && linux

package cuda

import (
	"context"
	"errors"

	"github.com/xpyd/xpyd/kernels"
)

// Host memory has blocks of all KV heads, of which each rank moves its own.

var (
	_ kernels.Arriver  = (*Ranks)(nil)
	_ kernels.Verifier = (*Ranks)(nil)
)

// ranksMemory implements kernels.HostMemory: registered once, for all devices, or a link's.
type ranksMemory struct {
	g    *Ranks
	own  *hostMemory // rank 0's
	seen []*hostMemory
}

// RegisterHost implements kernels.HostMover.
func (g *Ranks) RegisterHost(mem []byte) (kernels.HostMemory, error) {
	g.driver.Lock()
	defer g.driver.Unlock()
	m, err := g.lead.RegisterHost(mem)
	if err != nil {
		return nil, err
	}
	all := &ranksMemory{g: g, own: m.(*hostMemory)}
	for _, b := range g.ranks {
		all.seen = append(all.seen, &hostMemory{b: b, mem: mem, region: all.own.region})
	}
	return all, nil
}

// Bytes implements kernels.HostMemory.
func (m *ranksMemory) Bytes() []byte { return m.own.Bytes() }

// Close implements kernels.HostMemory.
func (m *ranksMemory) Close() error {
	if m.own.lent {
		return nil
	}
	for _, h := range m.seen {
		h.region = nil
	}
	m.g.driver.Lock()
	defer m.g.driver.Unlock()
	return m.own.Close()
}

// moves has each of some ranks do its part of a move; what has begun ends before an error is
// returned.
func moves[P kernels.Pending](g *Ranks, ranks []*Backend, m *kernels.HostMove, f func(*Backend, *kernels.HostMove) (P, error)) ([]P, error) {
	all, ok := m.Memory.(*ranksMemory)
	if !ok || all.g != g {
		return nil, errors.New("kernels/cuda: move to memory that this backend has not registered")
	}
	var parts []P
	for _, b := range ranks {
		own := *m
		own.Memory = all.seen[b.shard.rank]
		p, err := f(b, &own)
		if err != nil {
			for _, p := range parts {
				err = errors.Join(err, p.Wait(context.Background()))
			}
			return nil, err
		}
		parts = append(parts, p)
	}
	return parts, nil
}

// pendings is a move's parts.
type pendings[P kernels.Pending] []P

// Wait implements kernels.Pending.
func (list pendings[P]) Wait(ctx context.Context) (err error) {
	for _, p := range list {
		e := p.Wait(ctx)
		if errors.Is(e, kernels.ErrLate) {
			return e // and is to be called again
		}
		err = errors.Join(err, e)
	}
	return err
}

// GatherBlocks implements kernels.HostMover.
func (g *Ranks) GatherBlocks(m *kernels.HostMove) (kernels.Pending, error) {
	parts, err := moves(g, g.owners, m, (*Backend).GatherBlocks)
	return pendings[kernels.Pending](parts), err
}

// ScatterBlocks implements kernels.HostMover.
func (g *Ranks) ScatterBlocks(m *kernels.HostMove) (kernels.Pending, error) {
	parts, err := moves(g, g.ranks, m, (*Backend).ScatterBlocks)
	return pendings[kernels.Pending](parts), err
}

// Verify implements kernels.Verifier: good[i] means that all ranks' rows are right.
func (g *Ranks) Verify(ctx context.Context, landed []kernels.Landed) (good []bool, err error) {
	for _, b := range g.ranks {
		own, err := b.Verify(ctx, landed)
		if err != nil {
			return nil, err
		}
		good = also(good, own)
	}
	return good, nil
}

// also is a list of verdicts with another one of the same things; nil has none yet.
func also(good, other []bool) []bool {
	if good == nil {
		return other
	}
	for i := range good {
		good[i] = good[i] && other[i]
	}
	return good
}

// ranksArrival implements kernels.HostArrival by one of each rank.
type ranksArrival struct {
	g *Ranks
	pendings[kernels.HostArrival]
}

// ArriveBlocks implements kernels.Arriver.
func (g *Ranks) ArriveBlocks(m *kernels.HostMove) (kernels.HostArrival, error) {
	parts, err := moves(g, g.ranks, m, (*Backend).ArriveBlocks)
	if err != nil {
		return nil, err
	}
	return &ranksArrival{g, parts}, nil
}

// Layers implements kernels.Arrival.
func (a *ranksArrival) Layers() int {
	n := a.pendings[0].Layers()
	for _, p := range a.pendings[1:] {
		n = min(n, p.Layers())
	}
	return n
}

// Good implements kernels.HostArrival.
func (a *ranksArrival) Good() (good []bool, err error) {
	for _, p := range a.pendings {
		own, err := p.Good()
		if err != nil {
			return nil, err
		}
		good = also(good, own)
	}
	return good, nil
}

// part implements ranksPart.
func (a *ranksArrival) part(g *Ranks, i int) (kernels.Arrival, bool) { return a.pendings[i], a.g == g }
