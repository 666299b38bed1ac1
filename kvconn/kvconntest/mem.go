// Package kvconntest tests kvconn and its transports: an in-memory transport that works
// under testing/synctest, a fault layer over any transport, a fake KV memory, and the
// conformance suite Run.
package kvconntest

import (
	"cmp"
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
		for { // connections that nobody accepted
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
	mu      sync.Mutex
	change  chan struct{} // closed and replaced at every change
	data    []byte
	limit   int
	eof     bool // the writer has closed
	broken  bool // the reader has closed
	readBy  time.Time
	writeBy time.Time
}

func newHalf(limit int) *half { return &half{limit: limit, change: make(chan struct{})} }

// update applies f and wakes all that wait.
func (h *half) update(f func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	f()
	close(h.change)
	h.change = make(chan struct{})
}

// await repeats step after each change until it succeeds, or until the deadline *by.
func (h *half) await(by *time.Time, step func() bool) error {
	for {
		h.mu.Lock()
		done, change, late := step(), h.change, after(*by)
		if done {
			close(h.change)
			h.change = make(chan struct{})
		}
		h.mu.Unlock()
		if done {
			return nil
		}
		select {
		case <-change:
		case <-late:
			return os.ErrDeadlineExceeded
		}
	}
}

// after fires at a deadline; the zero time is none.
func after(by time.Time) <-chan time.Time {
	if by.IsZero() {
		return nil
	}
	return time.After(time.Until(by))
}

func (h *half) read(b []byte) (n int, err error) {
	late := h.await(&h.readBy, func() bool {
		switch {
		case h.broken:
			err = net.ErrClosed
		case len(h.data) > 0:
			n = copy(b, h.data)
			h.data = h.data[n:]
		case h.eof:
			err = io.EOF
		default:
			return false
		}
		return true
	})
	return n, cmp.Or(err, late)
}

func (h *half) write(b []byte) (n int, err error) {
	for len(b) > 0 && err == nil {
		late := h.await(&h.writeBy, func() bool {
			room := min(h.limit-len(h.data), len(b))
			switch {
			case h.eof:
				err = net.ErrClosed
			case h.broken:
				err = io.ErrClosedPipe
			case room > 0:
				h.data = append(h.data, b[:room]...)
				b, n = b[room:], n+room
			default:
				return false
			}
			return true
		})
		err = cmp.Or(err, late)
	}
	return n, err
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
