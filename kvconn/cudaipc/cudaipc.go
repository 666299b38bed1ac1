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
// verifies it on its own GPU.
//
// Pools of several tensor-parallel ranks have a handle for each rank. The sender opens,
// for each of its ranks, those of the receiver's that have heads in common with it
// (kvlayout.Pairs), and every push has a part for each of these pairs, which copies the
// rows of those heads alone and sets a flag of its own. What kvconn guarantees on top, and how its fence
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
	"github.com/xpyd/xpyd/kvlayout"
)

// Name is the transport's name and the scheme of its addresses.
const Name = "cudaipc"

// New makes a transport that offers the pool of ours and opens peers' pools with theirs, each
// a rank's, or one; all of a model with so many KV heads. A worker passes its backend's
// ranks for both. With refill a device also assembles blocks of another size or dtype; else
// their rows go through this host. sockets: local.New.
func New[E kernels.Exporter, O kernels.PeerOpener](ours []E, theirs []O, heads int, refill bool, sockets string) (kvconn.Transport, error) {
	d := &device{heads: heads, refill: refill}
	for _, e := range ours {
		d.ours = append(d.ours, e)
	}
	for _, o := range theirs {
		d.openers = append(d.openers, o)
	}
	if _, err := kvlayout.Pairs(heads, len(ours), len(theirs)); err != nil {
		return nil, fmt.Errorf("cudaipc: %w", err)
	}
	d.lines = kvlayout.MostPairs(heads, maxRanks, len(ours))
	d.taken = make([]bool, kernels.FlagLines/d.lines)
	return local.New(Name, sockets, func(c *local.Conn) net.Conn { return &conn{c, d} })
}

// Way describes the transport to a worker: it serves pools in GPUs' memory. sockets is
// the folder of its sockets, or "": local.New.
func Way(refill bool, sockets string) way.Kind {
	return way.Kind{Name: Name, Local: true, PoolIn: "a GPU's memory",
		Suits: func(b kernels.Backend) bool { _, ok := b.(kernels.HostMover); return ok },
		Open: func(p way.Pool) (kvconn.Transport, *kvconn.Shared, error) {
			ranks := kernels.RankPools(p.Backend)
			rows, ok := p.Backend.Layout().Uniform()
			if len(ranks) == 0 || !ok {
				return nil, nil, fmt.Errorf("peers cannot open the pool of device %s", p.Backend.Info().Name)
			}
			for _, r := range ranks {
				if _, err := r.Export(); err != nil {
					return nil, nil, err
				}
			}
			shared, err := p.OnDevice()
			if err != nil {
				return nil, nil, err
			}
			t, err := New(ranks, ranks, rows.Heads, refill, sockets)
			return t, shared, err
		}}
}

// device is both halves of this process's GPUs.
type device struct {
	ours    []kernels.Exporter   // by rank
	openers []kernels.PeerOpener // by rank
	heads   int                  // of all ranks
	refill  bool
	lines   int // that a peer gets: enough for a peer of any number of ranks

	mu    sync.Mutex
	taken []bool // runs of lines of the flags that a peer may set
}

// reserve takes a run of lines for a peer and returns its first; false: all are taken.
func (d *device) reserve() (line int, ok bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for n := range d.taken {
		if !d.taken[n] {
			d.taken[n] = true
			return n * d.lines, true
		}
	}
	return 0, false
}

// free returns lines that no peer can set any more. Lines that cannot be cleared
// stay taken: the next peer's pushes would seem to have landed.
func (d *device) free(line int) error {
	for l := line; l < line+d.lines; l++ {
		ranks := d.ours
		if ranks[0].Flag(l) == kernels.FlagUnused {
			ranks = ranks[:1] // which has the host's half
		}
		for _, r := range ranks {
			if err := r.ClearFlag(l); err != nil {
				return err
			}
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.taken[line/d.lines] = false
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
