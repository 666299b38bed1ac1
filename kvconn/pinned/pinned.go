// Package pinned is kvconn's transport between processes of one user on one machine
// whose GPUs do not reach each other's memory: unix sockets for frames (kvconn/local),
// a ring of pinned host memory that both map for rows.
//
// A receiver offers a ring of its own to each peer on the first connection of a
// session. The sender's GPU gathers blocks into it, the receiver's scatters them
// into its pool and verifies them there (kvconn/stage); pushes follow each other, so
// that both directions of PCIe are busy at once. Only the receiver writes its pool, so
// a silent peer causes no quarantine.
//
// Non-goals: pools in host memory, which kvconn/shm shares as they are.
package pinned

import (
	"net"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/local"
	"github.com/xpyd/xpyd/kvconn/stage"
	"github.com/xpyd/xpyd/kvconn/way"
	"github.com/xpyd/xpyd/kvlayout"
)

// Name is the transport's name and the scheme of its addresses.
const Name = "pinned"

// DefaultRing is the memory of a pair: 64 MiB, pinned on the receiver's account.
func DefaultRing() stage.Ring { return stage.Ring{Slots: 8, SlotBytes: 8 << 20} }

// New makes a transport that receives into the pool of ours and sends from that of
// theirs, both of layout l; a worker passes its backend for both. sockets: local.New.
func New(ours, theirs kernels.HostMover, l kvlayout.Layout, r stage.Ring, sockets string) (kvconn.Transport, error) {
	d := &device{ours: ours, theirs: theirs, geo: stage.NewGeometry(l, r)}
	return local.New(Name, sockets, func(c *local.Conn) net.Conn { return &conn{c, d} })
}

// Way describes the transport to a worker: it serves pools in a GPU's memory. sockets is the folder
// of its sockets, or "": local.New.
func Way(sockets string) way.Kind {
	return way.Kind{Name: Name, Local: true, PoolIn: "a GPU's memory",
		Suits: func(b kernels.Backend) bool { _, ok := b.(kernels.HostMover); return ok },
		Open: func(p way.Pool) (kvconn.Transport, *kvconn.Shared, error) {
			m := p.Backend.(kernels.HostMover)
			shared, err := p.OnDevice()
			if err != nil {
				return nil, nil, err
			}
			t, err := New(m, m, p.Backend.Layout(), DefaultRing(), sockets)
			return t, shared, err
		}}
}

// device is both halves of this process's GPU.
type device struct {
	ours, theirs kernels.HostMover
	geo          stage.Geometry
}

// conn is one end of a connection.
type conn struct {
	*local.Conn
	d *device
}

// Refills implements kvconn.DeviceConn: slots are for whole blocks.
func (c *conn) Refills() bool { return false }

// Staged implements kvconn.DeviceConn.
func (c *conn) Staged() bool { return true }
