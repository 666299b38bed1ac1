package router

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/reqbody"
)

// server serves the public listener: HTTP/1.1 and 1.0, one goroutine a
// connection. fasthttp parses requests and formats answers. Its own server
// keeps a reader, a writer and a request for as long as a connection is open,
// 20 KiB and more; here all three are borrowed, for as long as bytes come and
// go.
type server struct {
	r        *Router
	in       *lender
	outs     outs
	pieces   pieces
	ctxs     sync.Pool // of *fasthttp.RequestCtx
	stopping atomic.Bool
	conns    sync.WaitGroup
}

func newServer(r *Router) *server {
	return &server{r: r, in: newLender(r.cfg.MaxHeaderBytes)}
}

// start serves until the listener is closed.
func (s *server) start(ln net.Listener) { s.conns.Go(func() { s.accept(ln) }) }

func (s *server) accept(ln net.Listener) {
	for {
		conn, err := ln.Accept()
		if err != nil { // it is closed
			return
		}
		s.conns.Go(func() { s.converse(conn) })
	}
}

// drain closes the listener and waits for the connections; each ends after the
// request that it is in.
func (s *server) drain(ctx context.Context, ln net.Listener) error {
	s.stopping.Store(true)
	err := ln.Close()
	over := make(chan struct{})
	s.r.spawn(func() { s.conns.Wait(); close(over) })
	select {
	case <-over:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// converse answers the requests of one connection, one after the other.
func (s *server) converse(conn net.Conn) {
	defer conn.Close()
	c := clientOf(conn)
	c.in.init(c.under(conn), s.in)
	defer c.in.drop()
	defer c.forget()
	wait := s.r.cfg.ReadTimeout
	for first := true; !s.stopping.Load(); first = false {
		if c.in.within(wait) != nil {
			return
		}
		if err := c.in.await(); err != nil {
			if first && errors.Is(err, os.ErrDeadlineExceeded) { // a client without a request
				s.refuse(conn, c, err)
			}
			return
		}
		c.begun.Store(true)
		if !s.exchange(conn, c) {
			return
		}
		c.begun.Store(false)
		wait = s.r.cfg.IdleTimeout
	}
}

// refuse answers what is no request.
func (s *server) refuse(conn net.Conn, c *clientConn, why error) {
	var ctx fasthttp.RequestCtx
	ctx.Init2(conn, logAdapter{s.r.log}, true)
	s.r.httpError(&ctx, why)
	ctx.SetConnectionClose()
	s.write(&ctx, c)
}

// exchange answers one request, the first bytes of which are there; false ends
// the connection. A stream is relayed from here, where the stack is shallow
// and the request's memory has been given back.
func (s *server) exchange(conn net.Conn, c *clientConn) bool {
	ctx, _ := s.ctxs.Get().(*fasthttp.RequestCtx)
	if ctx == nil {
		ctx = &fasthttp.RequestCtx{}
	}
	ctx.Init2(conn, logAdapter{s.r.log}, true)
	ctx.Response.Header.SetNoDefaultContentType(true)
	ctx.Request.Header.SetNoDefaultContentType(true)
	c.in.begun = s.r.cfg.ReadTimeout
	out, again := s.answer(ctx, c)
	ctx.Request.Reset()
	ctx.Response.Reset()
	s.ctxs.Put(ctx)
	if out != nil {
		return out.relay() && again
	}
	return again
}

// answer reads the request, lets it be handled, and writes the answer, but
// for a stream, which it returns.
func (s *server) answer(ctx *fasthttp.RequestCtx, c *clientConn) (out *stream, again bool) {
	req, resp := &ctx.Request, &ctx.Response
	c.body = httpBody{}
	err := req.Header.Read(c.in.br)
	if nothing := (fasthttp.ErrNothingRead{}); err == io.EOF || errors.As(err, &nothing) {
		return nil, false
	}
	if err == nil {
		err = reqbody.Framed(&req.Header)
	}
	again = err == nil
	if err == nil {
		c.body = newBody(&c.in, max(req.Header.ContentLength(), -1))
		if req.Header.ContentLength() == -2 { // none was announced
			c.body.eof = true
		}
		c.awaited = !req.MayContinue()
		if !c.body.here() { // the deadline in force may be an idle connection's
			err = c.in.within(s.r.cfg.ReadTimeout)
		}
	}
	if err == nil {
		s.r.servePublic(ctx)
	} else {
		s.r.httpError(ctx, err)
	}
	if !c.body.eof { // the client may still be sending
		again = false
		c.linger.Store(true)
	}
	c.in.rest()
	again = again && !req.Header.ConnectionClose() && !resp.ConnectionClose() && !s.stopping.Load()
	if !again {
		resp.SetConnectionClose()
	} else if !req.Header.IsHTTP11() {
		resp.Header.Set("Connection", "keep-alive")
	}
	if out = c.out; out != nil {
		c.out, out.server = nil, s
		switch out.chunked = out.length < 0 && req.Header.IsHTTP11(); {
		case out.chunked:
			resp.Header.SetContentLength(-1)
		case out.length >= 0:
			resp.Header.SetContentLength(out.length)
		default:
			resp.SetConnectionClose() // which is the body's end
			again = false
		}
		out.head = append([]byte(nil), resp.Header.Header()...)
		return out, again
	}
	return nil, s.write(ctx, c) && again
}

// write sends an answer that is whole.
func (s *server) write(ctx *fasthttp.RequestCtx, c *clientConn) bool {
	resp := &ctx.Response
	body := resp.Body()
	if status := resp.StatusCode(); status >= 200 && status != 204 && status != 304 {
		resp.Header.SetContentLength(len(body))
	}
	if ctx.IsHead() {
		body = nil
	}
	head := resp.Header.Header()
	if len(head)+len(body) > maxOut {
		return s.send(c, head, body) == nil
	}
	out := s.outs.get()
	defer s.outs.put(out)
	*out = append(append(*out, head...), body...)
	return s.send(c, *out) == nil
}

// send writes out within StallTimeout.
func (s *server) send(c *clientConn, out ...[]byte) error {
	if next, renew := prolong(c.until, s.r.cfg.StallTimeout); renew {
		if err := c.in.conn.SetWriteDeadline(next); err != nil {
			return err
		}
		c.until = next
	}
	if len(out) == 1 {
		return c.in.write(out[0])
	}
	bufs := net.Buffers(out)
	_, err := bufs.WriteTo(c.in.conn)
	return err
}

// readBody reads the request's body into memory that grows with what has come,
// so that clients who announce much and send nothing take none.
func (r *Router) readBody(ctx *fasthttp.RequestCtx) ([]byte, error) {
	c := clientOf(ctx.Conn())
	most, limit := ctx.Request.Header.ContentLength(), r.cfg.MaxBodyBytes
	if c.body.eof {
		c.in.rest()
		return nil, nil
	}
	defer c.in.rest()
	if most > limit {
		return nil, fasthttp.ErrBodyTooLarge
	}
	if most < 0 { // it comes in chunks
		most = limit + 1
	}
	if err := c.invite(); err != nil {
		return nil, err
	}
	var whole [][]byte // pieces that are full
	defer func() { r.public.pieces.put(whole) }()
	got, body := 0, make([]byte, 0, min(most, firstBody))
	for {
		switch {
		case len(body) < cap(body):
		case len(body) < pieceBytes:
			body = append(make([]byte, 0, min(most-got, 2*cap(body), pieceBytes)), body...)
		default:
			whole, got = append(whole, body), got+len(body)
			body = r.public.pieces.get()
		}
		n, err := c.body.Read(body[len(body):cap(body)])
		body = body[:len(body)+n]
		switch {
		case got+len(body) > limit:
			whole = append(whole, body)
			return nil, fasthttp.ErrBodyTooLarge
		case err == io.EOF || err == nil && c.body.over():
			if len(whole) == 0 {
				return body, nil
			}
			whole = append(whole, body)
			return slices.Concat(whole...), nil
		case err != nil:
			whole = append(whole, body)
			return nil, err
		}
	}
}

const (
	firstBody  = 64 << 10 // the memory that a body gets before more has come
	pieceBytes = 1 << 20  // large bodies are read in pieces of so much
)

// pieces lends the memory of large bodies while they come, so that those that
// turn out too large leave nothing behind.
type pieces struct{ pool sync.Pool }

func (p *pieces) get() []byte {
	if b, _ := p.pool.Get().(*[]byte); b != nil {
		return (*b)[:0]
	}
	return make([]byte, 0, pieceBytes)
}

func (p *pieces) put(all [][]byte) {
	for _, b := range all {
		if cap(b) == pieceBytes {
			p.pool.Put(&b)
		}
	}
}

// invite tells a client that waits for it to send the body.
func (c *clientConn) invite() error {
	if c.awaited {
		return nil
	}
	c.awaited = true
	if err := c.in.conn.SetWriteDeadline(time.Now().Add(time.Second)); err != nil {
		return err
	}
	c.until = time.Time{}
	_, err := io.WriteString(c.in.conn, "HTTP/1.1 100 Continue\r\n\r\n")
	return err
}

// appendChunk writes run as a chunk.
func appendChunk(out, run []byte) []byte {
	out = append(strconv.AppendInt(out, int64(len(run)), 16), "\r\n"...)
	return append(append(out, run...), "\r\n"...)
}
