package kerneltest

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/links"
)

// fakeNCCL is NCCL on a FakeGPU, as links.Group uses it: a socket in place of each
// communicator. Like NCCL
//
//   - it notices nothing of a peer that has died or stopped, nor of two ends that are
//     out of step: transfers then hang until they are aborted;
//   - an abort frees memory, which waits for every other transfer of this device, and
//     nothing can be launched meanwhile;
//
// It panics where NCCL would read freed memory or race with itself: a call for a
// communicator that is being aborted, or beside another call; memory that is freed while
// an abort still uses it.
type fakeNCCL struct {
	g      *FakeGPU
	calls  atomic.Int32 // under way
	driver sync.RWMutex // its lock, as the driver's: written by who waits for the device

	mu     sync.Mutex
	flying map[*fakeComm]int // transfers on the device
	landed *sync.Cond        // of flying
}

func newFakeNCCL(g *FakeGPU) *fakeNCCL {
	n := &fakeNCCL{g: g, flying: map[*fakeComm]int{}}
	n.landed = sync.NewCond(&n.mu)
	return n
}

// call is around each call that NCCL wants to come one after the other.
func (n *fakeNCCL) call(c *fakeComm) (done func()) {
	if n.calls.Add(1) > 1 {
		panic("fake NCCL: a call beside another, for communicators of one device")
	}
	if c != nil && c.aborted.Load() {
		panic("fake NCCL: a call for a communicator that is freed")
	}
	return func() { n.calls.Add(-1) }
}

// fakeComm is one end of a communicator.
type fakeComm struct {
	n       *fakeNCCL
	memory  *fakeMemory
	sends   bool
	ctx     context.Context // ends with the abort
	cancel  context.CancelFunc
	ready   chan struct{}
	queue   chan fakeTransfer
	stream  sync.WaitGroup
	listen  *net.UnixListener // the receiver's, until the sender is there
	address *net.UnixAddr
	aborted atomic.Bool // or being aborted
	over    atomic.Bool // the abort has returned
	freed   atomic.Bool

	pending kernels.Pending // what Resume returns; the caller's thread alone
	count   int             // transfers, likewise
}

type fakeTransfer struct {
	at, bytes int64
	after     kernels.Pending
	done      chan struct{}
	first     bool // which warms the link
}

// linkQueue bounds the transfers of a fake link that are under way.
const linkQueue = 256

// NewLink implements kernels.Linker.
func (g *FakeGPU) NewLink() ([]byte, error) {
	if g.NoLinks != nil {
		return nil, g.NoLinks
	}
	var b [12]byte
	rand.Read(b[:]) // never fails (crypto/rand)
	return []byte(hex.EncodeToString(b[:])), nil
}

// OpenLink implements kernels.Linker.
func (g *FakeGPU) OpenLink(id []byte, end kernels.LinkEnd, bytes int64) (kernels.Link, error) {
	if g.NoLinks != nil {
		return nil, g.NoLinks
	}
	return g.links.Open(id, end, bytes)
}

// Links are those of this device.
func (g *FakeGPU) Links() *links.Group { return g.links }

// Open implements links.Library.
func (n *fakeNCCL) Open(id []byte, end kernels.LinkEnd, bytes int64) (links.Comm, error) {
	defer n.call(nil)()
	if len(id) != 24 || bytes < 1 || bytes > 1<<30 {
		return nil, fmt.Errorf("fake NCCL: a link of %d bytes named %q", bytes, id)
	}
	n.driver.RLock()
	defer n.driver.RUnlock()
	c := &fakeComm{n: n, memory: &fakeMemory{n.g, make([]byte, bytes)}, sends: end == kernels.LinkSender, ready: make(chan struct{}),
		queue: make(chan fakeTransfer, linkQueue), address: &net.UnixAddr{Name: "@fake-nccl-" + string(id), Net: "unix"}}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	if !c.sends {
		var err error
		if c.listen, err = net.ListenUnix("unix", c.address); err != nil {
			return nil, fmt.Errorf("fake NCCL: %w", err)
		}
	}
	c.stream.Go(c.transferAll)
	return c, nil
}

// join connects the two ends.
func (c *fakeComm) join() (conn net.Conn, err error) {
	if !c.sends {
		stop := context.AfterFunc(c.ctx, func() { c.listen.Close() })
		defer stop()
		defer c.listen.Close()
		return c.listen.Accept()
	}
	for {
		var d net.Dialer
		if conn, err = d.DialContext(c.ctx, "unix", c.address.Name); err == nil || c.ctx.Err() != nil {
			return conn, err
		}
		select {
		case <-c.ctx.Done():
		case <-time.After(time.Millisecond):
		}
	}
}

// transferAll carries transfers out, one after the other.
func (c *fakeComm) transferAll() {
	conn, err := c.join()
	if err == nil {
		defer conn.Close()
		stop := context.AfterFunc(c.ctx, func() { conn.Close() })
		defer stop()
		one := []byte{1}
		if _, err = conn.Write(one); err == nil {
			_, err = io.ReadFull(conn, one)
		}
	}
	if err == nil {
		close(c.ready)
	}
	for {
		select {
		case t := <-c.queue:
			if err == nil {
				err = c.carry(conn, t)
			}
			if err != nil { // hangs
				<-c.ctx.Done()
			}
			c.n.land(c)
			close(t.done)
		case <-c.ctx.Done():
			for { // those that were begun before
				select {
				case t := <-c.queue:
					c.n.land(c)
					close(t.done)
				default:
					return
				}
			}
		}
	}
}

// land counts a transfer that is over.
func (n *fakeNCCL) land(c *fakeComm) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.flying[c]--; n.flying[c] == 0 {
		delete(n.flying, c)
	}
	n.landed.Broadcast()
}

func (c *fakeComm) carry(conn net.Conn, t fakeTransfer) error {
	if t.after != nil {
		if err := t.after.Wait(c.ctx); err != nil {
			return err
		}
	}
	if gate := c.n.g.stall.Load(); gate != nil {
		select {
		case <-*gate:
		case <-c.ctx.Done():
			return c.ctx.Err()
		}
	}
	mem, size := c.memory.mem[t.at:t.at+t.bytes], make([]byte, 8)
	if c.sends {
		binary.LittleEndian.PutUint64(size, uint64(t.bytes))
		if _, err := conn.Write(size); err != nil {
			return err
		}
		time.Sleep(c.n.g.Delay / 2)
		_, err := conn.Write(mem)
		return err
	}
	if _, err := io.ReadFull(conn, size); err != nil {
		return err
	}
	if n := binary.LittleEndian.Uint64(size); n != uint64(t.bytes) {
		return fmt.Errorf("fake NCCL: %d bytes are sent, %d received", n, t.bytes)
	}
	come := len(mem)
	if !t.first && c.n.g.tears.Swap(false) {
		come /= 2
	}
	if _, err := io.ReadFull(conn, mem[:come]); err != nil {
		return err
	}
	_, err := io.CopyN(io.Discard, conn, int64(len(mem)-come))
	return err
}

// Tear makes the next transfer to this device end with half of its bytes and no error,
// as one that a killed peer's GPU has begun may.
func (g *FakeGPU) Tear() { g.tears.Store(true) }

// Memory implements links.Comm.
func (c *fakeComm) Memory() kernels.HostMemory { return c.memory }

// Taken implements links.Comm.
func (c *fakeComm) Taken() int64 { return 0 }

// Settle implements links.Comm.
func (c *fakeComm) Settle(d time.Duration) error {
	defer c.n.call(c)()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	if err := (&fakePending{c.ready}).Wait(ctx); err != nil {
		return fmt.Errorf("fake NCCL: %w", err)
	}
	return nil
}

// Transfer implements links.Comm. Some launches take a while.
func (c *fakeComm) Transfer(at, bytes int64, after kernels.Pending, _ time.Duration) (kernels.Pending, error) {
	defer c.n.call(c)()
	select {
	case <-c.ready:
	default:
		panic("fake NCCL: a transfer before the communicator is there")
	}
	if c.pending != nil {
		panic("fake NCCL: a transfer while another is being launched")
	}
	if at < 0 || bytes < 1 || at+bytes > int64(len(c.memory.mem)) {
		panic(fmt.Sprintf("fake NCCL: transfer of %d bytes at %d of %d", bytes, at, len(c.memory.mem)))
	}
	if err := c.n.g.broken.Load(); err != nil && c.count > 0 {
		return nil, *err
	}
	c.n.driver.RLock()
	defer c.n.driver.RUnlock()
	c.count++
	p := &fakePending{make(chan struct{})}
	c.n.mu.Lock()
	c.n.flying[c]++
	c.n.mu.Unlock()
	c.queue <- fakeTransfer{at, bytes, after, p.done, c.count == 1}
	if c.count%5 == 0 {
		c.pending = p
		return nil, fmt.Errorf("fake NCCL: %w", kernels.ErrLate)
	}
	return p, nil
}

// Resume implements links.Comm.
func (c *fakeComm) Resume(time.Duration) (kernels.Pending, error) {
	defer c.n.call(c)()
	p := c.pending
	if p == nil {
		panic("fake NCCL: nothing is being launched")
	}
	c.pending = nil
	return p, nil
}

// End implements links.Library.
func (n *fakeNCCL) End(abort, free []links.Comm) error {
	for _, c := range free {
		if f := c.(*fakeComm); !slices.Contains(abort, c) && !f.over.Load() || f.freed.Swap(true) {
			panic("fake NCCL: memory is freed twice, or before its abort has returned")
		}
	}
	if hang := n.g.aborts.Load(); hang != nil {
		<-*hang
	}
	for _, c := range abort {
		c := c.(*fakeComm)
		if c.aborted.Swap(true) {
			panic("fake NCCL: an abort of what was aborted")
		}
		c.cancel()
	}
	for _, c := range abort {
		c.(*fakeComm).stream.Wait()
	}
	n.driver.Lock() // freeing waits for the whole device
	defer n.driver.Unlock()
	n.mu.Lock()
	defer n.mu.Unlock()
	for len(n.flying) > 0 {
		n.landed.Wait()
	}
	for _, c := range abort {
		c.(*fakeComm).over.Store(true)
	}
	return nil
}

// HangAborts keeps the links of this device that are closed from now on from ending,
// as an abort that hangs does, until release is called.
func (g *FakeGPU) HangAborts() (release func()) { return holdUp(&g.aborts) }

// Flying is how many links have transfers on this device.
func (g *FakeGPU) Flying() int {
	g.nccl.mu.Lock()
	defer g.nccl.mu.Unlock()
	return len(g.nccl.flying)
}

// StallLinks keeps transfers of this device from moving anything, as a GPU that
// others use does, until release is called.
func (g *FakeGPU) StallLinks() (release func()) { return holdUp(&g.stall) }

func holdUp(at *atomic.Pointer[chan struct{}]) (release func()) {
	gate := make(chan struct{})
	at.Store(&gate)
	return sync.OnceFunc(func() {
		at.Store(nil)
		close(gate)
	})
}

// BreakLinks makes NCCL refuse every transfer from now on, except a link's first.
func (g *FakeGPU) BreakLinks() {
	err := errors.New("fake NCCL: unhandled system error")
	g.broken.Store(&err)
}

var (
	_ kernels.Linker = (*FakeGPU)(nil)
	_ links.Library  = (*fakeNCCL)(nil)
	_ links.Comm     = (*fakeComm)(nil)
)
