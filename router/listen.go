package router

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/xpyd/xpyd/internal/openai"
)

// clientConns are the public listener's connections: counted, bounded, and
// closable one by one at shutdown.
type clientConns struct {
	max int
	mu  sync.Mutex
	set map[*clientConn]struct{}
}

// maxAdminConns bounds the admin listener's connections. Half of them, at most, are of
// those who have not shown a token: each read of theirs takes at most guestPatience.
const maxAdminConns, guestPatience = 256, 5 * time.Second

// fitConns is how many connections the public and the admin listener may have
// where so many files may be open. Each request in flight may take two more, to
// prefill and to decode; what the router has open besides, for itself and for
// each worker, gets a share too.
func (c *Config) fitConns(files int) (public, admin int) {
	admin = max(min(maxAdminConns, files/16), 4)
	left := files - admin - min(1024, files/4)
	public = max(left/3, left-2*c.Limits.MaxInFlight)
	return min(c.MaxConns, max(public, 4)), admin
}

func (c *clientConns) count() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.set)
}

// closeIdle closes connections that are not within a request.
func (c *clientConns) closeIdle() {
	for _, conn := range c.list() {
		if !conn.begun.Load() {
			_ = conn.Close()
		}
	}
}

func (c *clientConns) closeAll() {
	for _, conn := range c.list() {
		conn.linger.Store(false)
		_ = conn.Close()
	}
}

func (c *clientConns) list() []*clientConn {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := make([]*clientConn, 0, len(c.set))
	for conn := range c.set {
		out = append(out, conn)
	}
	return out
}

// clientConn is one of them.
type clientConn struct {
	net.Conn
	all    *clientConns
	begun  atomic.Bool // bytes of a request came, and its answer is not written
	linger atomic.Bool // an answer went out while the client was sending
	once   sync.Once

	// What follows is of the goroutine that serves it.
	in      inbuf
	body    httpBody  // of the request
	awaited bool      // the client sends the body without being told to
	until   time.Time // the write deadline in force
	out     *stream   // the answer, if it is one
	unwatch func()    // of its watch, from the first request on

	asks atomic.Pointer[request] // what ends when the client leaves
	gone atomic.Bool             // it left
}

// left is the client watcher's: once for a connection, so that requests need
// no system call to be watched.
func (c *clientConn) left() {
	c.gone.Store(true)
	if q := c.asks.Load(); q != nil {
		q.cancel(errClientGone)
	}
}

// forget ends the watch.
func (c *clientConn) forget() {
	if c.unwatch != nil {
		c.unwatch()
	}
}

// under is what conn, which is c or TLS over it, reads and writes by.
func (c *clientConn) under(conn net.Conn) net.Conn {
	if conn == net.Conn(c) {
		return c.Conn
	}
	return conn
}

// NetConn lets the client watcher find the descriptor.
func (c *clientConn) NetConn() net.Conn { return c.Conn }

const (
	lingerFor  = 2 * time.Second
	lingerMost = 256 << 20 // bytes thrown away
)

// Close of a connection that still has bytes to read would reset it, and the
// client would lose the answer that it has not read. So what it sends is
// thrown away for a while first.
func (c *clientConn) Close() error {
	var err error
	c.once.Do(func() {
		if tc, ok := c.Conn.(*net.TCPConn); ok && c.linger.Load() {
			err := errors.Join(tc.CloseWrite(), tc.SetReadDeadline(time.Now().Add(lingerFor)))
			var buf [16 << 10]byte
			for total := 0; err == nil && total < lingerMost; {
				n, rerr := tc.Read(buf[:])
				if total += n; rerr != nil {
					break
				}
			}
		}
		c.all.mu.Lock()
		delete(c.all.set, c)
		c.all.mu.Unlock()
		err = c.Conn.Close()
	})
	return err
}

// clientOf finds our connection under the server's.
func clientOf(conn net.Conn) *clientConn {
	if t, ok := conn.(*tls.Conn); ok {
		conn = t.NetConn()
	}
	c, _ := conn.(*clientConn)
	return c
}

// listener wraps accepted connections and turns away those above the bound.
type listener struct {
	net.Listener
	conns *clientConns
	tls   bool
}

func (l *listener) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		boundUnsent(conn)
		c := &clientConn{Conn: conn, all: l.conns}
		l.conns.mu.Lock()
		full := len(l.conns.set) >= l.conns.max
		if !full {
			l.conns.set[c] = struct{}{}
		}
		l.conns.mu.Unlock()
		if !full {
			return c, nil
		}
		if !l.tls {
			conn.SetWriteDeadline(time.Now().Add(100 * time.Millisecond)) // a new socket has room for this
			body := openai.Unavailable("the router has its %d connections", l.conns.max).Append(nil)
			_, _ = fmt.Fprintf(conn, "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"+
				"Connection: close\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
		}
		conn.Close()
	}
}
