package h1

import (
	"bufio"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/clientwatch"
)

// Conn is a client's connection.
type Conn struct {
	net.Conn
	server *Server
	begun  atomic.Bool // a request has begun to come and is not answered
	linger atomic.Bool // the client may still be sending when the answer is out
	once   sync.Once

	// The following belongs to the goroutine that serves the connection.
	in      inbuf
	body    httpBody  // of the request
	awaited bool      // the client needs no 100 Continue
	until   time.Time // the write deadline in force
	out     Streamer  // the answer, if it is streamed
	length  int       // of its body; -1: unknown
	head    []byte    // of a streamed answer, not yet written
	chunked bool      // its body is sent in chunks
	ended   bool      // its last chunk is written
	unwatch func()    // of its watch, from the first request on

	wmu  sync.Mutex
	asks Leaver // is told when the client leaves
	gone bool   // the client left
}

// Leaver is told when the client of its request has left. It must not block.
type Leaver interface{ Left() }

// Watch tells q when the client leaves. A connection is watched once, until its end, so
// that requests need no system call for it.
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

// BodyOver reports whether the request's body has ended, as far as is known without
// waiting.
func (c *Conn) BodyOver() bool {
	over := c.body.Over()
	if over {
		c.in.rest()
	}
	return over
}

func (c *Conn) left() {
	c.wmu.Lock()
	q := c.asks
	c.gone = true
	c.wmu.Unlock()
	if q != nil {
		q.Left()
	}
}

// NetConn lets the client watcher find the descriptor.
func (c *Conn) NetConn() net.Conn { return c.Conn }

const (
	lingerFor  = 2 * time.Second
	lingerMost = 256 << 20 // most bytes thrown away
)

// Close closes the connection. If there were still bytes to read, closing would reset it
// and the client would lose an answer that it has not read, so what it sends is thrown away
// for a while first.
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

// ConnOf is the Conn below the server's connection.
func ConnOf(conn net.Conn) *Conn {
	if t, ok := conn.(*tls.Conn); ok {
		conn = t.NetConn()
	}
	c, _ := conn.(*Conn)
	return c
}

// Streamer writes an answer's body by Conn.Send. An error ends the connection.
type Streamer interface{ Stream(c *Conn) error }

// Stream has s write the answer's body once the handler has returned. length is -1 if
// unknown.
func (c *Conn) Stream(length int, s Streamer) { c.length, c.out = length, s }

// Send writes the next bytes of a streamed body in one piece: the header before the first,
// and the end of a chunked body after the last.
func (c *Conn) Send(run []byte, last bool) error {
	p := c.server.outs.get()
	defer c.server.outs.put(p)
	out := append(*p, c.head...)
	c.head = nil
	if !c.chunked {
		out = append(out, run...)
	} else {
		if len(run) > 0 {
			out = appendChunk(out, run)
		}
		if last && !c.ended {
			out = append(out, lastChunk...)
		}
	}
	c.ended = last
	if *p = out; len(out) == 0 {
		return nil
	}
	return c.server.send(c, out)
}

type writerStream func(out *bufio.Writer)

// StreamWriter has f write the answer's body once the handler has returned. Each flush is a
// chunk.
func StreamWriter(ctx *fasthttp.RequestCtx, f func(out *bufio.Writer)) {
	ConnOf(ctx.Conn()).Stream(-1, writerStream(f))
}

type chunkWriter struct{ c *Conn }

func (w chunkWriter) Write(p []byte) (int, error) {
	if err := w.c.Send(p, false); err != nil {
		return 0, err
	}
	return len(p), nil
}

var writers = sync.Pool{New: func() any { return bufio.NewWriter(nil) }}

// Stream implements Streamer.
func (f writerStream) Stream(c *Conn) error {
	out := writers.Get().(*bufio.Writer) //nolint:forcetypeassert // the pool has no others
	out.Reset(chunkWriter{c})
	f(out)
	err := out.Flush()
	out.Reset(nil)
	writers.Put(out)
	if err != nil {
		return err
	}
	return c.Send(nil, true)
}
