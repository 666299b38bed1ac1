// Package cudaipc is kvconn's transport between processes of one user on one
// machine whose block pools lie in the memory of GPUs that reach each other:
// unix sockets for what is said (kvconn/local), CUDA IPC for the rows.
//
// A receiver offers its pool on the first connection of a session: the device's
// handle goes with the description of the pool, a memory file with flags as a
// descriptor. The sender opens both, and its GPU then pushes the blocks of a
// layer at once, with their digests, into the receiver's blocks. The last thing
// that a push writes is its number, on the session's line of the flags: so the
// receiver knows what has landed without a word from the sender's host, and
// verifies it on its own GPU. What kvconn guarantees on top, and how its fence
// holds over a mapping that cannot be taken back, is in its DESIGN.md, "Device
// memory".
//
// GPUs are behind the interfaces of package kernels; the tests use
// kerneltest.FakeGPU, whose pushes are slow copies on another goroutine.
package cudaipc

import (
	"fmt"
	"net"
	"sync"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/local"
	"github.com/xpyd/xpyd/kvconn/way"
)

// Name is the transport's name and the scheme of its addresses.
const Name = "cudaipc"

// New makes a transport that offers the pool of ours and opens peers' pools with
// opener; a worker passes its backend for both. With refill a device also assembles
// blocks of another size or dtype; else their rows go through this host.
func New(ours kernels.Exporter, opener kernels.PeerOpener, refill bool) (kvconn.Transport, error) {
	d := &device{ours: ours, opener: opener, refill: refill}
	return local.New(Name, func(c *local.Conn) net.Conn { return &conn{c, d} })
}

// Way describes the transport to a worker: it serves pools in a GPU's memory, of one rank.
func Way(refill bool) way.Kind {
	type gpu interface {
		kernels.Exporter
		kernels.PeerOpener
	}
	return way.Kind{Name: Name, Local: true, PoolIn: "a GPU's memory",
		Suits: func(b kernels.Backend) bool { _, ok := b.(kernels.HostMover); return ok },
		Open: func(p way.Pool) (kvconn.Transport, *kvconn.Shared, error) {
			b, ok := p.Backend.(gpu)
			if !ok {
				return nil, nil, fmt.Errorf("the pool is in the memory of %d ranks", p.Backend.Info().Ranks)
			}
			if _, err := b.Export(); err != nil {
				return nil, nil, err
			}
			t, err := New(b, b, refill)
			return t, p.OnDevice(), err
		}}
}

// device is both halves of this process's GPU.
type device struct {
	ours   kernels.Exporter
	opener kernels.PeerOpener
	refill bool

	mu    sync.Mutex
	taken [kernels.FlagLines]bool // lines of the flags that a peer may set
}

// line reserves a flag line for a peer; false: all are taken.
func (d *device) line() (int, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for n := range d.taken {
		if !d.taken[n] {
			d.taken[n] = true
			return n, true
		}
	}
	return 0, false
}

// free returns a line that no peer can set any more. A line that cannot be cleared
// stays taken: the next peer's pushes would seem to have landed.
func (d *device) free(n int) error {
	if err := d.ours.ClearFlag(n); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.taken[n] = false
	return nil
}

// conn is one end of a connection.
type conn struct {
	*local.Conn
	d *device
}

// Refills implements kvconn.DeviceConn.
func (c *conn) Refills() bool { return c.d.refill }

// Staged implements kvconn.DeviceConn.
func (c *conn) Staged() bool { return false }
