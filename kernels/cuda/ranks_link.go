//go:build cgo && linux

package cuda

import (
	"bytes"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/links"
)

// A link of ranks is one of rank 0's device. Its ring has blocks of all KV heads: every rank
// moves its own heads to it and from it, over the devices' links, as it does with host memory.

var (
	_ kernels.Linker = (*Ranks)(nil)
	_ links.Library  = ranksNCCL{}
	_ links.Comm     = (*ranksComm)(nil)
)

// joinLimit bounds the making of a link, during which no steps are launched.
const joinLimit = 3 * time.Second

// quiet has NCCL's calls hold the driver, several of them together: they may free memory or load
// code, for which the driver waits for devices while it lets nobody launch.
type quiet struct {
	driver *sync.Mutex
	mu     sync.Mutex
	users  int // they hold the driver
}

// try begins to hold the driver, unless that would have to wait for a step's launch.
func (q *quiet) try() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.users == 0 && !q.driver.TryLock() {
		return false
	}
	q.users++
	return true
}

// begin waits until it holds the driver.
func (q *quiet) begin() {
	if q.try() {
		return
	}
	q.driver.Lock()
	q.mu.Lock()
	defer q.mu.Unlock()
	q.users++
}

// end is called once for each begin and successful try.
func (q *quiet) end() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.users--; q.users == 0 {
		q.driver.Unlock()
	}
}

// NewLink implements kernels.Linker.
func (g *Ranks) NewLink() ([]byte, error) {
	if g.nccl {
		return nil, errors.New("the ranks' devices do not reach each other's memory, as a link's has to be")
	}
	g.quiet.begin()
	defer g.quiet.end()
	return g.lead.NewLink()
}

// OpenLink implements kernels.Linker.
func (g *Ranks) OpenLink(id []byte, end kernels.LinkEnd, size int64) (kernels.Link, error) {
	if g.nccl {
		return nil, errors.New("the ranks' devices do not reach each other's memory, as a link's has to be")
	}
	if g.lead.closed || len(id) == 0 {
		return nil, fmt.Errorf("kernels/cuda: a link named by %d bytes", len(id))
	}
	return g.links.Open(id, end, size)
}

// ranksNCCL is NCCL for the links of ranks: lib is that of rank 0's device.
type ranksNCCL struct {
	g   *Ranks
	lib func() links.Library
}

// ranksComm is our end of a communicator. While it is made, up to its first transfer's launch, it
// holds the driver. The thread that calls it waits for no step, whose launch may be waiting for
// what another link brings: until the driver is free nothing has begun.
type ranksComm struct {
	n      ranksNCCL
	id     []byte
	end    kernels.LinkEnd
	size   int64
	memory *ranksMemory

	comm  links.Comm // nil: not begun
	since time.Time  // when it began to hold the driver; zero: it does not
	first *ranksAsk  // the first transfer, until NCCL is asked for it
	made  bool       // the first transfer has been launched
}

type ranksAsk struct {
	at, bytes int64
	after     kernels.Pending
}

// Open implements links.Library.
func (n ranksNCCL) Open(id []byte, end kernels.LinkEnd, size int64) (links.Comm, error) {
	g := n.g
	m := &ranksMemory{g: g, own: &hostMemory{b: g.lead, lent: true}}
	for _, b := range g.ranks {
		m.seen = append(m.seen, &hostMemory{b: b, lent: true})
	}
	return &ranksComm{n: n, id: bytes.Clone(id), end: end, size: size, memory: m}, nil
}

// lends has a link's memory seen by all ranks, or by none.
func (m *ranksMemory) lends(own *hostMemory) {
	m.own.region = own.region
	for _, h := range m.seen {
		h.region = own.region
	}
}

// hold begins to hold the driver, or reports that it is not free.
func (c *ranksComm) hold() bool {
	if c.since.IsZero() && c.n.g.quiet.try() {
		c.since = time.Now()
	}
	return !c.since.IsZero()
}

func (c *ranksComm) release() {
	if !c.since.IsZero() {
		c.since = time.Time{}
		c.n.g.quiet.end()
	}
}

// step is what has come of a step of the link's making: in progress it holds the driver, for
// joinLimit at most. What has failed by then goes on in NCCL, and holds it until End.
func (c *ranksComm) step(err error) error {
	switch {
	case err == nil:
		c.release()
	case errors.Is(err, kernels.ErrLate) && time.Since(c.since) > joinLimit: // not as ErrLate: it is over
		return fmt.Errorf("the other end has not come within %v, for which no steps were launched", joinLimit)
	}
	return err
}

var errDriver = fmt.Errorf("%w: a step is being launched", kernels.ErrLate)

// Settle implements links.Comm.
func (c *ranksComm) Settle(d time.Duration) error {
	if c.made {
		return c.comm.Settle(d)
	}
	if !c.hold() {
		return errDriver
	}
	if c.comm == nil {
		made, err := c.n.lib().Open(c.id, c.end, c.size)
		if err != nil {
			c.release()
			return err
		}
		c.comm = made
		c.memory.lends(made.Memory().(*hostMemory))
	}
	return c.step(c.comm.Settle(d))
}

// Transfer implements links.Comm.
func (c *ranksComm) Transfer(at, bytes int64, after kernels.Pending, d time.Duration) (kernels.Pending, error) {
	if c.made {
		return c.comm.Transfer(at, bytes, after, d)
	}
	c.first = &ranksAsk{at, bytes, after}
	return c.Resume(d)
}

// Resume implements links.Comm.
func (c *ranksComm) Resume(d time.Duration) (p kernels.Pending, err error) {
	switch {
	case c.made:
		return c.comm.Resume(d)
	case !c.hold():
		return nil, errDriver
	case c.first != nil:
		a := c.first
		c.first = nil
		p, err = c.comm.Transfer(a.at, a.bytes, a.after, d)
	default:
		p, err = c.comm.Resume(d)
	}
	if err = c.step(err); err != nil {
		return nil, err
	}
	c.made = true
	return p, nil
}

// Memory implements links.Comm.
func (c *ranksComm) Memory() kernels.HostMemory { return c.memory }

// Taken implements links.Comm.
func (c *ranksComm) Taken() int64 { return c.comm.Taken() }

// End implements links.Library.
func (n ranksNCCL) End(abort, free []links.Comm) error {
	n.g.quiet.begin()
	defer n.g.quiet.end()
	begun := func(all []links.Comm) (list []links.Comm) {
		for _, c := range all {
			if c := c.(*ranksComm); c.comm != nil {
				list = append(list, c.comm)
			}
		}
		return list
	}
	for _, c := range free {
		c.(*ranksComm).memory.lends(&hostMemory{})
	}
	err := n.lib().End(begun(abort), begun(free))
	for _, c := range abort {
		c.(*ranksComm).release()
	}
	return err
}
