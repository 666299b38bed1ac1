//go:build cgo && linux

package cuda

import (
	"context"

	"github.com/xpyd/xpyd/kernels"
)

var _ kernels.Divided = (*Ranks)(nil)

// RankPools implements kernels.Divided.
func (g *Ranks) RankPools() (list []kernels.RankPool) {
	for _, b := range g.ranks {
		list = append(list, &rankPool{b, g})
	}
	return list
}

// rankPool is one rank's pool to peers. What may wait for a device holds the driver.
type rankPool struct {
	*Backend
	g *Ranks
}

// Export implements kernels.Exporter.
func (r *rankPool) Export() (kernels.Export, error) {
	r.g.driver.Lock()
	defer r.g.driver.Unlock()
	return r.Backend.Export()
}

// ClearFlag implements kernels.Exporter.
func (r *rankPool) ClearFlag(line int) error {
	r.g.driver.Lock()
	defer r.g.driver.Unlock()
	return r.Backend.ClearFlag(line)
}

// OpenPeer implements kernels.PeerOpener.
func (r *rankPool) OpenPeer(handle, flags []byte) (kernels.Peer, error) {
	r.g.driver.Lock()
	defer r.g.driver.Unlock()
	p, err := r.Backend.OpenPeer(handle, flags)
	if err != nil {
		return nil, err
	}
	return &rankPeer{p.(*peer), r.g}, nil
}

// rankPeer is a peer of one rank.
type rankPeer struct {
	*peer
	g *Ranks
}

// Close implements kernels.Peer. It drains before it holds the driver: steps go on meanwhile.
func (p *rankPeer) Close(ctx context.Context) error {
	p.refuse()
	if err := p.Drain(ctx); err != nil {
		return err
	}
	p.g.driver.Lock()
	defer p.g.driver.Unlock()
	return p.peer.Close(ctx)
}
