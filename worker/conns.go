package worker

import (
	"crypto/tls"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// unused are the connections on which nothing was ever sent. Clients open
// them in advance; the HTTP server's shutdown, which ends idle ones, would
// wait for these until their first read times out.
type unused struct {
	mu      sync.Mutex
	closing bool
	set     map[*clientConn]struct{}
}

func (u *unused) remove(c *clientConn) {
	u.mu.Lock()
	defer u.mu.Unlock()
	delete(u.set, c)
}

// close ends them all, and those that still come.
func (u *unused) close() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.closing = true
	for c := range u.set {
		_ = c.Conn.Close()
	}
	clear(u.set)
}

// listener keeps its connections among the unused until they are used.
type listener struct {
	net.Listener
	unused *unused
	tls    *tls.Config // nil: plain HTTP
}

func (l *listener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	if l.tls != nil { // the handshake runs with the first read, within the read timeout
		conn = tls.Server(conn, l.tls)
	}
	c := &clientConn{Conn: conn, unused: l.unused}
	l.unused.mu.Lock()
	defer l.unused.mu.Unlock()
	if l.unused.closing {
		_ = conn.Close() // its first read fails
		return c, nil
	}
	l.unused.set[c] = struct{}{}
	return c, nil
}

// clientConn is one connection of the HTTP listener.
type clientConn struct {
	net.Conn
	unused *unused
	used   bool        // by its one reader only
	linger atomic.Bool // an answer went out while the client was sending
}

// NetConn lets the client watcher find the descriptor.
func (c *clientConn) NetConn() net.Conn { return c.Conn }

func (c *clientConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n > 0 && !c.used {
		c.used = true
		c.unused.remove(c)
	}
	return n, err
}

const (
	lingerFor  = time.Second
	lingerMost = 1 << 20 // bytes thrown away
)

// Close of a connection that still has bytes to read would reset it, and the
// client would lose the answer that it has not read. So some of what it sends is
// thrown away first.
func (c *clientConn) Close() error {
	c.unused.remove(c)
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok && c.linger.Swap(false) {
		err := errors.Join(half.CloseWrite(), c.Conn.SetReadDeadline(time.Now().Add(lingerFor)))
		var buf [4 << 10]byte
		for total := 0; err == nil && total < lingerMost; {
			var n int
			n, err = c.Conn.Read(buf[:])
			total += n
		}
	}
	return c.Conn.Close()
}
