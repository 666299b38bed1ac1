package h1

import (
	"crypto/tls"
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/xpyd/xpyd/internal/clientwatch"
)

// Conn is a client's connection.
type Conn struct {
	net.Conn
	server *Server
	begun  atomic.Bool // bytes of a request came, and its answer is not written
	linger atomic.Bool // an answer went out while the client was sending
	once   sync.Once

	// What follows is of the goroutine that serves it.
	in      inbuf
	body    httpBody  // of the request
	awaited bool      // the client sends the body without being told to
	until   time.Time // the write deadline in force
	out     Streamer  // the answer, if it is streamed
	length  int       // of its body; -1: not known
	head    []byte    // of a streamed answer, not yet written
	chunked bool      // its body
	ended   bool      // its last chunk is written
	unwatch func()    // of its watch, from the first request on

	wmu  sync.Mutex
	asks Leaver // what ends when the client leaves
	gone bool   // it left
}

// Leaver is told when the client of its request has left. It must not block.
type Leaver interface{ Left() }

// Watch has q told when the client leaves. The connection is watched once, from
// here to its end, so that requests need no system call for it.
func (c *Conn) Watch(w *clientwatch.Watcher, q Leaver) {
	c.wmu.Lock()
	gone := c.gone
	c.asks = q
	c.wmu.Unlock()
	if c.unwatch == nil {
		c.unwatch = w.Watch(c, c.left)
	}
	if gone {
		q.Left()
	}
}

// Unwatch ends Watch for q.
func (c *Conn) Unwatch(q Leaver) {
	c.wmu.Lock()
	defer c.wmu.Unlock()
	if c.asks == q {
		c.asks = nil
	}
}

// Body is the request's body as it comes.
func (c *Conn) Body() io.Reader { return &c.body }

// BodyOver reports whether the request's body has ended, as far as that is known
// without waiting.
func (c *Conn) BodyOver() bool {
	over := c.body.Over()
	if over {
		c.in.rest()
	}
	return over
}

// left is the watcher's.
func (c *Conn) left() {
	c.wmu.Lock()
	q := c.asks
	c.gone = true
	c.wmu.Unlock()
	if q != nil {
		q.Left()
	}
}

// forget ends the watch.
func (c *Conn) forget() {
	if c.unwatch != nil {
		c.unwatch()
	}
}

// under is what conn, which is c or TLS over it, reads and writes by.
func (c *Conn) under(conn net.Conn) net.Conn {
	if conn == net.Conn(c) {
		return c.Conn
	}
	return conn
}

// NetConn lets the client watcher find the descriptor.
func (c *Conn) NetConn() net.Conn { return c.Conn }

const (
	lingerFor  = 2 * time.Second
	lingerMost = 256 << 20 // bytes thrown away
)

// Close of a connection that still has bytes to read would reset it, and the
// client would lose the answer that it has not read. So what it sends is
// thrown away for a while first.
func (c *Conn) Close() error {
	var err error
	c.once.Do(func() {
		if tc, ok := c.Conn.(interface{ CloseWrite() error }); ok && c.linger.Load() {
			err := errors.Join(tc.CloseWrite(), c.Conn.SetReadDeadline(time.Now().Add(lingerFor)))
			var buf [16 << 10]byte
			for total := 0; err == nil && total < lingerMost; {
				n, rerr := c.Conn.Read(buf[:])
				if total += n; rerr != nil {
					break
				}
			}
		}
		c.server.mu.Lock()
		delete(c.server.conns, c)
		c.server.mu.Unlock()
		err = c.Conn.Close()
	})
	return err
}

// ConnOf finds our connection under the server's.
func ConnOf(conn net.Conn) *Conn {
	if t, ok := conn.(*tls.Conn); ok {
		conn = t.NetConn()
	}
	c, _ := conn.(*Conn)
	return c
}
