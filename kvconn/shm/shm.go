// Package shm is kvconn's transport between processes of one user on one
// machine: unix sockets for frames (kvconn/local), shared memory for rows.
//
// A receiver whose block pool lies in a sealed memory file (internal/memfd)
// offers it on the first connection of a session; the sender maps it and
// copies rows straight into the blocks.
//
// The two ends trust each other as far as processes of one user must: the
// kernel is asked what the offered descriptor is. What kvconn guarantees on top
// is in its DESIGN.md, "Shared memory".
package shm

import (
	"fmt"
	"net"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/local"
	"github.com/xpyd/xpyd/kvconn/way"
)

// ErrUnsupported is returned by New where the kernel lacks what is needed.
var ErrUnsupported = local.ErrUnsupported

// Name is the transport's name and the scheme of its addresses.
const Name = "shm"

// New makes a transport; see local.New.
func New(sockets string) (kvconn.Transport, error) {
	return local.New(Name, sockets, func(c *local.Conn) net.Conn { return &conn{c} })
}

// Way describes the transport to a worker: it serves pools in host memory that others can
// map. sockets is the folder of its sockets, or "": local.New.
func Way(sockets string) way.Kind {
	t, err := New(sockets)
	return way.Kind{Name: Name, Local: true, MapsPool: err == nil, PoolIn: "shared memory",
		Suits: func(b kernels.Backend) bool { _, ok := b.(kernels.Sharer); return ok },
		Open: func(p way.Pool) (kvconn.Transport, *kvconn.Shared, error) {
			if err != nil {
				return nil, nil, err
			}
			s, err := p.Backend.(kernels.Sharer).Shared()
			if err != nil {
				return nil, nil, err
			}
			ranks, err := p.Backend.Layout().Ranks(s.Ranks)
			if err != nil {
				return nil, nil, err
			}
			if len(s.Layers) > kvconn.MaxSpans {
				return nil, nil, fmt.Errorf("%d ranks of %d layers: at most %d can be described to peers", s.Ranks, len(s.Layers)/s.Ranks, kvconn.MaxSpans)
			}
			pool := &kvconn.Shared{FD: s.FD, Bytes: s.Bytes, Blocks: p.Backend.Blocks(), Ranks: s.Ranks}
			for _, rank := range ranks {
				for _, layer := range rank.Resolve() {
					pool.Layers = append(pool.Layers, kvconn.Span{Offset: s.Layers[len(pool.Layers)], Stride: int64(layer.BlockBytes())})
				}
			}
			return t, pool, nil
		}}
}

// conn is one end of a connection.
type conn struct{ *local.Conn }
