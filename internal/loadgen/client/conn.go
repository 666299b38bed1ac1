package client

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"net"
	"sync"
	"time"
)

// idleFor is how long a connection may wait for its next request: less than
// uvicorn's keep-alive of 5 s, which closes without a word.
const idleFor = 4 * time.Second

// readBuffer also bounds the header of an answer.
const readBuffer = 8 << 10

// pool is the connections to one server. A request owns a connection from its
// first byte to the answer's last, so that breaking off is closing.
type pool struct {
	addr   string
	tls    *tls.Config // nil: none
	ctx    context.Context
	cancel context.CancelFunc

	mu   sync.Mutex
	idle []*conn // newest last
	open map[*conn]struct{}
}

type conn struct {
	net.Conn
	br    *bufio.Reader
	since time.Time // idle since
}

func newPool(addr string, config *tls.Config) *pool {
	p := &pool{addr: addr, tls: config, open: map[*conn]struct{}{}}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	return p
}

// get takes the newest idle connection, unless fresh asks for a new one.
// reused says that it may turn out to be closed.
func (p *pool) get(timeout time.Duration, fresh bool) (c *conn, reused bool, err error) {
	for !fresh {
		p.mu.Lock()
		n := len(p.idle)
		if n == 0 {
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
	ctx, cancel := context.WithTimeout(p.ctx, timeout)
	defer cancel()
	nc, err := (&net.Dialer{}).DialContext(ctx, "tcp", p.addr)
	if err != nil {
		return nil, false, p.cancelled(err)
	}
	if p.tls != nil {
		t := tls.Client(nc, p.tls)
		if err := t.HandshakeContext(ctx); err != nil {
			nc.Close()
			return nil, false, p.cancelled(err)
		}
		nc = t
	}
	c = &conn{Conn: nc, br: bufio.NewReaderSize(nc, readBuffer)}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ctx.Err() != nil {
		nc.Close()
		return nil, false, net.ErrClosed
	}
	p.open[c] = struct{}{}
	return c, false, nil
}

// cancelled makes an error of dialling net.ErrClosed when it was us.
func (p *pool) cancelled(err error) error {
	if p.ctx.Err() != nil && errors.Is(err, context.Canceled) {
		return net.ErrClosed
	}
	return err
}

// put takes back a connection whose answer was read to its end.
func (p *pool) put(c *conn) {
	c.since = time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ctx.Err() == nil {
		p.idle = append(p.idle, c)
	}
}

func (p *pool) drop(c *conn) {
	c.Close()
	p.mu.Lock()
	delete(p.open, c)
	p.mu.Unlock()
}

// close breaks off what runs.
func (p *pool) close() {
	p.cancel()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.idle = nil
	for c := range p.open {
		c.Close()
	}
}
