package client

import (
	"bufio"
	"context"
	"crypto/tls"
	"net"
	"sync"
	"time"
)

// idleFor bounds how long a connection idles: uvicorn closes it after 5 s.
const idleFor = 4 * time.Second

// readBuffer is the size of reads, and bounds an answer's header.
const readBuffer = 8 << 10

// pool is the connections to one server. A request owns its connection until the last byte
// of the answer, so closing the connection aborts the request.
type pool struct {
	addr string
	tls  *tls.Config // nil: none

	mu   sync.Mutex
	idle []*conn // newest last
	open map[*conn]struct{}
}

type conn struct {
	net.Conn
	br    *bufio.Reader
	since time.Time // idle since
}

// get returns the newest idle connection, which may turn out to be closed (reused), or a new
// one. After the end of ctx and abort, the error is net.ErrClosed.
func (p *pool) get(ctx context.Context, timeout time.Duration, fresh bool) (c *conn, reused bool, err error) {
	for !fresh {
		p.mu.Lock()
		n := len(p.idle)
		if n == 0 || ctx.Err() != nil {
			p.mu.Unlock()
			break
		}
		c, p.idle = p.idle[n-1], p.idle[:n-1]
		p.mu.Unlock()
		if time.Since(c.since) < idleFor {
			return c, true, nil
		}
		p.drop(c)
	}
	nc, err := p.dial(ctx, timeout)
	if err != nil {
		if ctx.Err() != nil {
			err = net.ErrClosed
		}
		return nil, false, err
	}
	c = &conn{Conn: nc, br: bufio.NewReaderSize(nc, readBuffer)}
	p.mu.Lock()
	defer p.mu.Unlock()
	if ctx.Err() != nil {
		nc.Close()
		return nil, false, net.ErrClosed
	}
	p.open[c] = struct{}{}
	return c, false, nil
}

func (p *pool) dial(ctx context.Context, timeout time.Duration) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	nc, err := (&net.Dialer{}).DialContext(ctx, "tcp", p.addr)
	if err != nil || p.tls == nil {
		return nc, err
	}
	t := tls.Client(nc, p.tls)
	if err := t.HandshakeContext(ctx); err != nil {
		nc.Close()
		return nil, err
	}
	return t, nil
}

// put returns a connection whose answer was read to its end.
func (p *pool) put(c *conn) {
	c.since = time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, ok := p.open[c]; ok {
		p.idle = append(p.idle, c)
	}
}

func (p *pool) drop(c *conn) {
	c.Close()
	p.mu.Lock()
	delete(p.open, c)
	p.mu.Unlock()
}

// abort closes all connections.
func (p *pool) abort() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.idle = nil
	for c := range p.open {
		c.Close()
	}
	clear(p.open)
}
