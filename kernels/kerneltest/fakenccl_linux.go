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
	"sync"
	"time"

	"github.com/xpyd/xpyd/kernels"
)

// FakeNCCL is one end of a link between FakeGPUs: a socket in place of NCCL's
// communicator. Like NCCL it notices nothing of a peer that has died or stopped, nor
// of two ends that are out of step: transfers then hang until Close.
type FakeNCCL struct {
	g       *FakeGPU
	memory  *fakeMemory
	sends   bool
	ctx     context.Context // ends with Close
	cancel  context.CancelFunc
	ready   chan struct{}
	queue   chan fakeTransfer
	stream  sync.WaitGroup
	listen  *net.UnixListener // the receiver's, until the sender is there
	address *net.UnixAddr

	ended chan struct{}

	mu     sync.Mutex
	closed bool
}

type fakeTransfer struct {
	at, bytes int64
	after     kernels.Pending
	done      chan struct{}
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
	if len(id) != 24 || bytes < 1 || bytes > 1<<30 {
		return nil, fmt.Errorf("fake NCCL: a link of %d bytes named %q", bytes, id)
	}
	l := &FakeNCCL{g: g, memory: &fakeMemory{g, make([]byte, bytes)}, sends: end == kernels.LinkSender, ready: make(chan struct{}), ended: make(chan struct{}),
		queue: make(chan fakeTransfer, linkQueue), address: &net.UnixAddr{Name: "@fake-nccl-" + string(id), Net: "unix"}}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	if !l.sends {
		var err error
		if l.listen, err = net.ListenUnix("unix", l.address); err != nil {
			return nil, fmt.Errorf("fake NCCL: %w", err)
		}
	}
	l.stream.Go(l.run)
	return l, nil
}

// join connects the two ends.
func (l *FakeNCCL) join() (c net.Conn, err error) {
	if !l.sends {
		stop := context.AfterFunc(l.ctx, func() { l.listen.Close() })
		defer stop()
		defer l.listen.Close()
		return l.listen.Accept()
	}
	for {
		var d net.Dialer
		if c, err = d.DialContext(l.ctx, "unix", l.address.Name); err == nil || l.ctx.Err() != nil {
			return c, err
		}
		select {
		case <-l.ctx.Done():
		case <-time.After(time.Millisecond):
		}
	}
}

// run carries transfers out, one after the other.
func (l *FakeNCCL) run() {
	c, err := l.join()
	if err == nil {
		defer c.Close()
		stop := context.AfterFunc(l.ctx, func() { c.Close() })
		defer stop()
		one := []byte{1}
		if _, err = c.Write(one); err == nil {
			_, err = io.ReadFull(c, one)
		}
	}
	if err == nil {
		close(l.ready)
	}
	for {
		select {
		case t := <-l.queue:
			if err == nil {
				err = l.carry(c, t)
			}
			if err != nil { // hangs
				<-l.ctx.Done()
			}
			close(t.done)
		case <-l.ctx.Done():
			for { // those that were begun before Close
				select {
				case t := <-l.queue:
					close(t.done)
				default:
					return
				}
			}
		}
	}
}

func (l *FakeNCCL) carry(c net.Conn, t fakeTransfer) error {
	if t.after != nil {
		if err := t.after.Wait(l.ctx); err != nil {
			return err
		}
	}
	mem, size := l.memory.mem[t.at:t.at+t.bytes], make([]byte, 8)
	if l.sends {
		binary.LittleEndian.PutUint64(size, uint64(t.bytes))
		if _, err := c.Write(size); err != nil {
			return err
		}
		time.Sleep(l.g.Delay / 2)
		_, err := c.Write(mem)
		return err
	}
	if _, err := io.ReadFull(c, size); err != nil {
		return err
	}
	if n := binary.LittleEndian.Uint64(size); n != uint64(t.bytes) {
		return fmt.Errorf("fake NCCL: %d bytes are sent, %d received", n, t.bytes)
	}
	come := len(mem)
	if l.g.tears.Swap(false) {
		come /= 2
	}
	if _, err := io.ReadFull(c, mem[:come]); err != nil {
		return err
	}
	_, err := io.CopyN(io.Discard, c, int64(len(mem)-come))
	return err
}

// Tear makes the next transfer to this device end with half of its bytes and no error,
// as one that a killed peer's GPU has begun may.
func (g *FakeGPU) Tear() { g.tears.Store(true) }

// Memory implements kernels.Link.
func (l *FakeNCCL) Memory() kernels.HostMemory { return l.memory }

// Ready implements kernels.Link.
func (l *FakeNCCL) Ready(ctx context.Context) error {
	select {
	case <-l.ready:
	case <-l.ctx.Done():
	case <-ctx.Done():
		return fmt.Errorf("%w: %w", kernels.ErrLate, ctx.Err())
	}
	if l.ctx.Err() != nil {
		return errors.New("fake NCCL: the link is closed")
	}
	return nil
}

// Transfer implements kernels.Link.
func (l *FakeNCCL) Transfer(_ context.Context, at, bytes int64, after kernels.Pending) (kernels.Pending, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || at < 0 || bytes < 1 || at+bytes > int64(len(l.memory.mem)) {
		return nil, fmt.Errorf("fake NCCL: transfer of %d bytes at %d, closed: %t", bytes, at, l.closed)
	}
	p := &fakePending{make(chan struct{})}
	l.queue <- fakeTransfer{at, bytes, after, p.done}
	return p, nil
}

// Taken implements kernels.Link.
func (l *FakeNCCL) Taken() int64 { return 0 }

// Close implements kernels.Link.
func (l *FakeNCCL) Close(ctx context.Context) error {
	l.mu.Lock()
	first := !l.closed
	l.closed = true
	l.mu.Unlock()
	if first {
		hang := l.g.aborts.Load()
		go func() { // ends with the link
			defer close(l.ended)
			if hang != nil {
				<-*hang
			}
			l.cancel()
			l.stream.Wait()
		}()
	}
	select {
	case <-l.ended:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("fake NCCL: abort: %w: %w", kernels.ErrLate, ctx.Err())
	}
}

// HangAborts keeps the links of this device that are closed from now on from ending,
// as an abort that hangs does, until release is called.
func (g *FakeGPU) HangAborts() (release func()) {
	gate := make(chan struct{})
	g.aborts.Store(&gate)
	return sync.OnceFunc(func() {
		g.aborts.Store(nil)
		close(gate)
	})
}

var _ kernels.Linker = (*FakeGPU)(nil)
