package h1

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/config"
)

// Timeouts bound the phases of a request to a worker.
type Timeouts struct {
	// ConnectTimeout, WriteTimeout and FirstByteTimeout bound the phases of a leg;
	// ChunkTimeout is decode's longest silence within a stream.
	ConnectTimeout   time.Duration `key:"connect_timeout"`
	WriteTimeout     time.Duration `key:"write_timeout"`
	FirstByteTimeout time.Duration `key:"first_byte_timeout"`
	ChunkTimeout     time.Duration `key:"chunk_timeout"`
	// IdleConns is how many idle connections are kept to each worker.
	IdleConns int `key:"idle_conns"`
}

// DefaultTimeouts are for one machine.
func DefaultTimeouts() Timeouts {
	return Timeouts{ConnectTimeout: 2 * time.Second, WriteTimeout: 10 * time.Second, FirstByteTimeout: 5 * time.Minute,
		ChunkTimeout: time.Minute, IdleConns: 256}
}

// Validate returns a *config.KeyError.
func (t *Timeouts) Validate() error {
	return cmp.Or(config.AtLeast("idle_conns", t.IdleConns, 0), config.Positive("connect_timeout", t.ConnectTimeout),
		config.Positive("write_timeout", t.WriteTimeout), config.Positive("first_byte_timeout", t.FirstByteTimeout),
		config.Positive("chunk_timeout", t.ChunkTimeout))
}

// Client is the connections to workers. Each leg owns one connection from request to
// answer: cancelling a leg closes it, which the worker notices at once.
type Client struct {
	cfg Timeouts
	// Dial opens all connections; set it before the first. By default a net.Dialer does.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)

	upstream  Upstream
	engineTLS atomic.Pointer[tls.Config] // to engines whose URL is https
	memberTLS *tls.Config                // to the fleet's own workers; nil: they have none

	mu     sync.Mutex
	closed bool
	idle   map[string][]*workerConn // by address, newest last
	open   map[*workerConn]struct{}

	requests sync.Pool // of *fasthttp.RequestHeader
	bufs     *lender   // what connections are read through
	outs     outs      // for putting small requests together
	runs     outs      // for cutting streams into events
}

const (
	upIdle   = 15 * time.Second      // a connection idle for longer is not used again
	upFresh  = 10 * time.Millisecond // one idle for less is not checked: servers close idle connections after seconds
	upHeader = 16 << 10              // most bytes of an answer's header
	upSmall  = 16 << 10              // a smaller request is put together and sent in one write
)

// NewClient makes a client. members is the TLS of the fleet's own workers; nil: they have
// none.
func NewClient(cfg Timeouts, u Upstream, members *tls.Config) *Client {
	return &Client{cfg: cfg, Dial: new(net.Dialer).DialContext, upstream: u, memberTLS: members, idle: map[string][]*workerConn{}, open: map[*workerConn]struct{}{}, bufs: newLender(upHeader)}
}

// Header returns an empty header; Recycle takes it back once it is sent.
func (u *Client) Header() *fasthttp.RequestHeader {
	h, _ := u.requests.Get().(*fasthttp.RequestHeader)
	if h == nil {
		h = &fasthttp.RequestHeader{}
	}
	h.Reset()
	h.DisableNormalizing() // the names are ours
	return h
}

// Recycle takes a header back.
func (u *Client) Recycle(h *fasthttp.RequestHeader) { u.requests.Put(h) }

type workerConn struct {
	net.Conn
	u      *Client
	addr   string
	in     inbuf
	header fasthttp.ResponseHeader // of the answer to the leg that uses it
	parts  [][]byte                // of the request while it is written
	since  time.Time               // idle since
	until  time.Time               // the write deadline in force
	once   sync.Once
}

// Close may be called by a leg's end and by its cancellation at once.
func (c *workerConn) Close() error {
	var err error
	c.once.Do(func() {
		c.u.mu.Lock()
		delete(c.u.open, c)
		c.u.mu.Unlock()
		err = c.Conn.Close()
	})
	return err
}

// Address is the address in an instance's URL, marked Secure for https.
func Address(url string) (string, error) {
	rest, ok := strings.CutPrefix(url, "http://")
	mark := ""
	if !ok {
		if rest, ok = strings.CutPrefix(url, "https://"); !ok {
			return "", fmt.Errorf("worker URL %q begins neither with http:// nor with https://", url)
		}
		mark = Secure
	}
	rest, _, _ = strings.Cut(rest, "/")
	if _, _, err := net.SplitHostPort(rest); err != nil {
		return "", fmt.Errorf("worker URL %q: %w", url, err)
	}
	return mark + rest, nil
}

// get returns an idle connection that still works, or dials.
func (u *Client) get(l *Life, addr string) (*workerConn, error) {
	for c := u.pop(addr); c != nil; c = u.pop(addr) {
		if idle := time.Since(c.since); idle < upFresh || idle < upIdle && quiet(under(c.Conn)) {
			return c, nil
		}
		_ = c.Close()
	}
	ctx, cancel := context.WithTimeout(l, u.cfg.ConnectTimeout)
	defer cancel()
	conn, err := u.Dial(ctx, "tcp", Bare(addr))
	if t, ok := conn.(*net.TCPConn); ok && err == nil {
		err = t.SetReadBuffer(upBuffer)
	}
	if err == nil {
		conn, err = u.handshake(ctx, conn, addr)
	}
	if err != nil {
		if conn != nil { // its buffer could not be set
			conn.Close()
		}
		return nil, err
	}
	c := &workerConn{Conn: conn, u: u, addr: addr}
	c.in.init(conn, u.bufs)
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.closed {
		conn.Close()
		return nil, errClosed
	}
	u.open[c] = struct{}{}
	return c, nil
}

// upBuffer is how much of an answer the kernel may hold for a client that does not read; by
// default it grows to megabytes.
const upBuffer = 64 << 10

func (u *Client) pop(addr string) *workerConn {
	u.mu.Lock()
	defer u.mu.Unlock()
	list := u.idle[addr]
	if len(list) == 0 {
		return nil
	}
	c := list[len(list)-1]
	if u.idle[addr] = list[:len(list)-1]; len(list) == 1 {
		delete(u.idle, addr)
	}
	return c
}

// put takes back a connection whose answer was read to its end.
func (u *Client) put(c *workerConn) {
	c.since = time.Now()
	u.mu.Lock()
	list := u.idle[c.addr]
	if keep := !u.closed && len(list) < u.cfg.IdleConns; keep {
		u.idle[c.addr] = append(list, c)
		u.mu.Unlock()
		return
	}
	u.mu.Unlock()
	_ = c.Close()
}

// Prune closes connections that have idled too long.
func (u *Client) Prune() {
	u.mu.Lock()
	var old []*workerConn
	for addr, list := range u.idle {
		n := 0 // the oldest are first
		for n < len(list) && time.Since(list[n].since) >= upIdle {
			n++
		}
		old = append(old, list[:n]...)
		if u.idle[addr] = list[n:]; len(list) == n {
			delete(u.idle, addr)
		}
	}
	u.mu.Unlock()
	for _, c := range old {
		_ = c.Close()
	}
}

// Counts returns how many connections are in use and idle.
func (u *Client) Counts() (busy, idle int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, list := range u.idle {
		idle += len(list)
	}
	return len(u.open) - idle, idle
}

// Close closes all connections; no new ones are made.
func (u *Client) Close() {
	u.mu.Lock()
	u.closed = true
	all := slices.Collect(maps.Keys(u.open))
	clear(u.idle)
	u.mu.Unlock()
	for _, c := range all {
		_ = c.Close()
	}
}

var errClosed = errors.New("the client is closed")

// Error is a leg that broke, and in which phase. Failed dials and broken connections say
// something about the worker; timeouts do not.
type Error struct {
	Phase string // connect, send, answer, body
	Err   error
}

func (e *Error) Error() string { return e.Phase + ": " + e.Err.Error() }
func (e *Error) Unwrap() error { return e.Err }

// Gone reports whether the error shows that the worker is not there, rather than slow.
func (e *Error) Gone() bool {
	return !TimedOut(e.Err) && !errors.Is(e.Err, context.Canceled) && !errors.Is(e.Err, context.DeadlineExceeded)
}

// address sets whose the request is, and who sends it.
func (u *Client) address(req *fasthttp.RequestHeader, addr string) {
	req.SetHost(Bare(addr))
	if key := u.upstream.APIKey; key != "" && len(req.Peek("Authorization")) == 0 {
		req.Set("Authorization", "Bearer "+key)
	}
}

// Do sends one request and reads its answer's header. When l ends, the connection is
// closed, now or while the body is read. The caller ends the body. sent, if not nil, is set
// once body is written and no longer needed.
func (u *Client) Do(l *Life, addr string, req *fasthttp.RequestHeader, body [][]byte, sent *atomic.Bool) (*Response, error) {
	b, err := u.connect(l, addr)
	if err != nil {
		return nil, err
	}
	if err := b.do(addr, req, body, sent); err != nil {
		b.Abort()
		return nil, err
	}
	return b, nil
}

func (u *Client) connect(l *Life, addr string) (*Response, error) {
	c, err := u.get(l, addr)
	if err != nil {
		return nil, &Error{Phase: "connect", Err: err}
	}
	b := &Response{conn: c, life: l}
	if !l.hold(c) {
		b.Abort()
		return nil, &Error{Phase: "connect", Err: l.Cause()}
	}
	return b, nil
}

// Upload is a body of which only a part is here.
type Upload struct {
	Head   []byte
	Length int       // of all; -1: unknown
	Rest   io.Reader // what follows Head; nil: nothing
	Broken error     // why Rest could not be read
}

// Upload is Do for a body that is still coming.
func (u *Client) Upload(l *Life, addr string, req *fasthttp.RequestHeader, up *Upload, sent *atomic.Bool) (*Response, error) {
	if up.Rest == nil {
		return u.Do(l, addr, req, [][]byte{up.Head}, sent)
	}
	b, err := u.connect(l, addr)
	if err != nil {
		return nil, err
	}
	u.address(req, addr)
	req.SetContentLength(up.Length)
	if err = b.conn.pump(req, up); err == nil {
		sent.Store(true)
	} else {
		b.spoilt = true // an engine that refuses may have answered without reading on
	}
	if up.Broken == nil {
		if aerr := b.conn.in.within(u.cfg.FirstByteTimeout); aerr == nil && b.readHeader() == nil {
			return b, nil
		}
	}
	b.Abort()
	if err == nil {
		err = io.ErrUnexpectedEOF
	}
	return nil, &Error{Phase: "send", Err: err}
}

// pump writes a request whose body is still coming.
func (c *workerConn) pump(req *fasthttp.RequestHeader, up *Upload) error {
	out := c.u.outs.get()
	defer c.u.outs.put(out)
	buf := c.u.runs.get()
	defer c.u.runs.put(buf)
	*out = append(*out, req.Header()...)
	piece := up.Head
	for {
		if up.Length < 0 && len(piece) > 0 {
			*out = appendChunk(*out, piece)
		} else {
			*out = append(*out, piece...)
		}
		if len(*out) > 0 {
			if err := c.send([][]byte{*out}); err != nil {
				return err
			}
		}
		*out = (*out)[:0]
		n, err := up.Rest.Read((*buf)[:cap(*buf)])
		if piece = (*buf)[:n]; err == io.EOF && n == 0 {
			break
		}
		if err != nil && err != io.EOF {
			up.Broken = err
			return err
		}
	}
	if up.Length < 0 {
		return c.send([][]byte{lastChunk})
	}
	return nil
}

// do writes the request, in one write if it is small, and reads the answer's header.
func (b *Response) do(addr string, req *fasthttp.RequestHeader, body [][]byte, sent *atomic.Bool) error {
	c := b.conn
	size := 0
	for _, part := range body {
		size += len(part)
	}
	c.u.address(req, addr)
	req.SetContentLength(size)
	if err := c.in.within(c.u.cfg.FirstByteTimeout); err != nil {
		return &Error{Phase: "answer", Err: err}
	}
	head := req.Header()
	if c.in.raw == nil || len(head)+size > upSmall {
		c.parts = append(append(c.parts[:0], head), body...)
		if err := c.send(c.parts); err != nil {
			return &Error{Phase: "send", Err: err}
		}
	} else {
		out := c.u.outs.get()
		*out = append(*out, head...)
		for _, part := range body {
			*out = append(*out, part...)
		}
		left, err := c.in.ask(*out, sent)
		if err == nil && len(left) > 0 {
			err = c.send([][]byte{left})
		}
		c.u.outs.put(out)
		if err != nil {
			return &Error{Phase: "answer", Err: err}
		}
	}
	if sent != nil {
		sent.Store(true)
	}
	return b.readHeader()
}

// send writes parts within WriteTimeout and clears them.
func (c *workerConn) send(parts [][]byte) error {
	if next, renew := prolong(c.until, c.u.cfg.WriteTimeout); renew {
		if err := c.SetWriteDeadline(next); err != nil {
			return err
		}
		c.until = next
	}
	bufs := net.Buffers(parts)
	_, err := bufs.WriteTo(c.Conn)
	clear(parts)
	return err
}

// readHeader reads the answer's header, and skips what comes before it, such as early
// hints.
func (b *Response) readHeader() error {
	c := b.conn
	for again := true; again; again = c.header.StatusCode() < 200 {
		if err := c.in.await(); err != nil {
			return &Error{Phase: "answer", Err: err}
		}
		if err := c.header.Read(c.in.br); err != nil {
			return &Error{Phase: "answer", Err: err}
		}
	}
	b.Header = &c.header
	length := c.header.ContentLength()
	if status := c.header.StatusCode(); status == 204 || status == 304 {
		length = 0
	}
	b.httpBody = newBody(&c.in, length)
	return nil
}

// LargeError is an answer, or one event of it, larger than the router holds.
type LargeError struct {
	What  string
	Limit int
}

func (e *LargeError) Error() string { return fmt.Sprintf("%s of more than %d bytes", e.What, e.Limit) }
