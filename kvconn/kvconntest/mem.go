// Package kvconntest holds what kvconn and its transports are tested with: an
// in-memory transport that works under testing/synctest, a fault layer over
// any transport, a fake KV memory, and the conformance suite Run.
package kvconntest

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"
)

// Memory is a transport of bounded pipes inside one process.
type Memory struct {
	limit int

	mu        sync.Mutex
	listeners map[string]*memListener
	next      int
}

// NewMemory makes a transport whose pipes hold limit bytes a direction.
func NewMemory(limit int) *Memory {
	return &Memory{limit: limit, listeners: map[string]*memListener{}}
}

// Name returns "memory".
func (m *Memory) Name() string { return "memory" }

// Listen binds a name; "" picks a free one.
func (m *Memory) Listen(addr string) (net.Listener, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if addr == "" {
		m.next++
		addr = fmt.Sprintf("mem-%d", m.next)
	}
	if m.listeners[addr] != nil {
		return nil, fmt.Errorf("listen %s: address in use", addr)
	}
	l := &memListener{m: m, addr: memAddr(addr), queue: make(chan net.Conn, 128), closed: make(chan struct{})}
	m.listeners[addr] = l
	return l, nil
}

// Dial connects to a listener of the same Memory.
func (m *Memory) Dial(ctx context.Context, addr string) (net.Conn, error) {
	m.mu.Lock()
	l := m.listeners[addr]
	m.mu.Unlock()
	if l == nil {
		return nil, fmt.Errorf("dial %s: connection refused", addr)
	}
	up, down := newHalf(m.limit), newHalf(m.limit)
	select {
	case l.queue <- &memConn{r: up, w: down, local: l.addr, remote: "dialer"}:
		return &memConn{r: down, w: up, local: "dialer", remote: l.addr}, nil
	case <-l.closed:
		return nil, fmt.Errorf("dial %s: connection refused", addr)
	case <-ctx.Done():
		return nil, fmt.Errorf("dial %s: %w", addr, ctx.Err())
	}
}

type memAddr string

func (a memAddr) Network() string { return "memory" }
func (a memAddr) String() string  { return string(a) }

type memListener struct {
	m      *Memory
	addr   memAddr
	queue  chan net.Conn
	once   sync.Once
	closed chan struct{}
}

func (l *memListener) Addr() net.Addr { return l.addr }

func (l *memListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.queue:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *memListener) Close() error {
	l.once.Do(func() {
		l.m.mu.Lock()
		delete(l.m.listeners, string(l.addr))
		l.m.mu.Unlock()
		close(l.closed)
		for { // those that nobody accepted
			select {
			case c := <-l.queue:
				c.Close()
			default:
				return
			}
		}
	})
	return nil
}

// half is one direction of a connection.
type half struct {
	mu       sync.Mutex
	change   chan struct{} // closed and replaced at every change
	data     []byte
	limit    int
	eof      bool // the writer has closed
	broken   bool // the reader has closed
	readBy   time.Time
	writeBy  time.Time
	consumed int // bytes at the front of data already read
}

func newHalf(limit int) *half { return &half{limit: limit, change: make(chan struct{})} }

// update applies f and tells everybody who waits.
func (h *half) update(f func()) {
	h.mu.Lock()
	f()
	close(h.change)
	h.change = make(chan struct{})
	h.mu.Unlock()
}

// await waits for a change after the one seen, or for the deadline.
func await(change chan struct{}, by time.Time) error {
	if by.IsZero() {
		<-change
		return nil
	}
	left := time.Until(by)
	if left <= 0 {
		return os.ErrDeadlineExceeded
	}
	t := time.NewTimer(left)
	defer t.Stop()
	select {
	case <-change:
		return nil
	case <-t.C:
		return os.ErrDeadlineExceeded
	}
}

func (h *half) read(b []byte) (int, error) {
	for {
		n, done := 0, false
		var change chan struct{}
		var by time.Time
		h.mu.Lock()
		switch {
		case h.broken:
			h.mu.Unlock()
			return 0, net.ErrClosed
		case len(h.data) > h.consumed:
			n = copy(b, h.data[h.consumed:])
			h.consumed += n
			if h.consumed == len(h.data) {
				h.data, h.consumed = h.data[:0], 0
			}
			close(h.change)
			h.change = make(chan struct{})
			done = true
		case h.eof:
			h.mu.Unlock()
			return 0, io.EOF
		default:
			change, by = h.change, h.readBy
		}
		h.mu.Unlock()
		if done {
			return n, nil
		}
		if err := await(change, by); err != nil {
			return 0, err
		}
	}
}

func (h *half) write(b []byte) (n int, err error) {
	for len(b) > 0 {
		h.mu.Lock()
		room := h.limit - (len(h.data) - h.consumed)
		switch {
		case h.eof:
			h.mu.Unlock()
			return n, net.ErrClosed
		case h.broken:
			h.mu.Unlock()
			return n, io.ErrClosedPipe
		case room > 0:
			m := min(room, len(b))
			h.data = append(h.data, b[:m]...)
			b, n = b[m:], n+m
			close(h.change)
			h.change = make(chan struct{})
			h.mu.Unlock()
			continue
		}
		change, by := h.change, h.writeBy
		h.mu.Unlock()
		if err := await(change, by); err != nil {
			return n, err
		}
	}
	return n, nil
}

// memConn is one end of a connection.
type memConn struct {
	r, w          *half
	local, remote memAddr
}

func (c *memConn) Read(b []byte) (int, error)  { return c.r.read(b) }
func (c *memConn) Write(b []byte) (int, error) { return c.w.write(b) }
func (c *memConn) LocalAddr() net.Addr         { return c.local }
func (c *memConn) RemoteAddr() net.Addr        { return c.remote }

func (c *memConn) Close() error {
	c.w.update(func() { c.w.eof = true })
	c.r.update(func() { c.r.broken = true })
	return nil
}

func (c *memConn) SetDeadline(t time.Time) error {
	c.SetReadDeadline(t)
	return c.SetWriteDeadline(t)
}

func (c *memConn) SetReadDeadline(t time.Time) error {
	c.r.update(func() { c.r.readBy = t })
	return nil
}

func (c *memConn) SetWriteDeadline(t time.Time) error {
	c.w.update(func() { c.w.writeBy = t })
	return nil
}
