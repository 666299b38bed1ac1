// Package h1 is HTTP/1.1: the server of the router's listeners and of workers, and the
// client for legs. A waiting connection holds no buffers; DESIGN.md says why fasthttp's
// server is not used.
package h1

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/openai"
)

// ServerConfig configures a Server.
type ServerConfig struct {
	Bounds
	// Handler answers a request. Its body is not read yet; see Conn.ReadBody.
	Handler func(*fasthttp.RequestCtx)
	// Refuse answers malformed requests; see Bounds.Refusal.
	Refuse func(*fasthttp.RequestCtx, error)
	TLS    *tls.Config // nil: plain HTTP
	Log    *slog.Logger
	// Failed is told why nothing more is accepted, unless Drain or Cut did it; nil: it is
	// logged.
	Failed func(error)
	// LastWords is how long after Drain answers may still be written; 0: as long as they
	// take.
	LastWords time.Duration
	Who       string // named when there are too many connections: "the router"
}

// Server serves HTTP/1.1 and 1.0, one goroutine per connection. fasthttp parses requests
// and formats answers. Its own server keeps a reader, a writer and a request, 20 KiB and
// more, while a connection is open; here all three are borrowed only while bytes come and
// go.
type Server struct {
	cfg      ServerConfig
	ln       net.Listener
	in       *lender
	outs     outs
	pieces   pieces
	ctxs     sync.Pool // of *fasthttp.RequestCtx
	stopping atomic.Bool
	left     atomic.Bool               // others accept by now; see Leave
	end      atomic.Pointer[time.Time] // of all writes; nil: none
	running  sync.WaitGroup

	mu    sync.Mutex
	conns map[*Conn]struct{}
}

// NewServer makes a server; Start begins to serve.
func NewServer(cfg ServerConfig) *Server {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Failed == nil {
		cfg.Failed = func(err error) { cfg.Log.Error("accept", "err", err) }
	}
	return &Server{cfg: cfg, in: newLender(cfg.MaxHeaderBytes), conns: map[*Conn]struct{}{}}
}

// Start serves until the listener is closed.
func (s *Server) Start(ln net.Listener) {
	s.ln = ln
	s.running.Go(s.accept)
}

func (s *Server) accept() {
	for {
		raw, err := s.ln.Accept()
		if err != nil {
			if !s.stopping.Load() && !s.left.Load() {
				s.cfg.Failed(err)
			}
			return
		}
		c := s.register(raw)
		if c == nil {
			continue
		}
		conn := net.Conn(c)
		if s.cfg.TLS != nil { // the handshake runs with the first read, within ReadTimeout
			conn = tls.Server(c, s.cfg.TLS)
		}
		s.running.Go(func() { s.serveConn(conn, c) })
	}
}

// register makes raw one of the connections; nil if there are too many.
func (s *Server) register(raw net.Conn) *Conn {
	boundUnsent(raw)
	c := &Conn{Conn: raw, server: s}
	s.mu.Lock()
	full := len(s.conns) >= s.cfg.MaxConns
	if !full {
		s.conns[c] = struct{}{}
	}
	s.mu.Unlock()
	if !full {
		return c
	}
	if s.cfg.TLS == nil {
		raw.SetWriteDeadline(time.Now().Add(100 * time.Millisecond)) // a new socket has room for this
		body := openai.Unavailable("%s has its %d connections", s.cfg.Who, s.cfg.MaxConns).Append(nil)
		_, _ = fmt.Fprintf(raw, "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"+
			"Connection: close\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
	}
	raw.Close()
	return nil
}

// drainLook is how often Drain looks for idle connections.
const drainLook = 10 * time.Millisecond

// Drain closes the listener and idle connections and waits for the others, which end after
// their current request.
func (s *Server) Drain(ctx context.Context) error {
	if s.cfg.LastWords > 0 {
		end := time.Now().Add(s.cfg.LastWords)
		s.end.Store(&end)
	}
	err := s.stop()
	tick := time.NewTicker(drainLook)
	defer tick.Stop()
	for {
		for _, c := range s.list() {
			if !c.begun.Load() { // no request will come on it
				_ = c.Close()
			} else if end := s.end.Load(); end != nil {
				_ = c.Conn.SetWriteDeadline(*end) // fails only on a closed one
			}
		}
		if s.Count() == 0 {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Leave closes the listener because another process accepts on its socket from now on. No client
// may notice: a connection is still served, and ends with its next answer, or as one that idles.
func (s *Server) Leave() error {
	s.left.Store(true)
	return s.ln.Close()
}

// stop closes the listener, if there is one yet.
func (s *Server) stop() error {
	if s.stopping.Store(true); s.ln == nil || s.left.Load() {
		return nil
	}
	return s.ln.Close()
}

// Cut closes the listener and all connections.
func (s *Server) Cut() {
	_ = s.stop() // mostly closed already
	for _, c := range s.list() {
		c.linger.Store(false)
		_ = c.Close()
	}
}

// Wait waits for all requests; Cut or Drain comes first.
func (s *Server) Wait() { s.running.Wait() }

// Count is how many connections there are.
func (s *Server) Count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.conns)
}

func (s *Server) list() []*Conn {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Keys(s.conns))
}

func (s *Server) serveConn(conn net.Conn, c *Conn) {
	defer conn.Close()
	below := conn
	if s.cfg.TLS == nil { // conn is c
		below = c.Conn
	}
	c.in.init(below, s.in)
	defer c.in.drop()
	defer func() {
		if c.unwatch != nil {
			c.unwatch()
		}
	}()
	wait := s.cfg.ReadTimeout
	for first := true; !s.stopping.Load(); first = false {
		c.in.begun = 0 // nothing has: the last request may have come whole
		if c.in.within(wait) != nil {
			return
		}
		if err := c.in.await(); err != nil {
			if first && errors.Is(err, os.ErrDeadlineExceeded) { // the client sent nothing
				s.refuse(conn, c, err)
			}
			return
		}
		c.begun.Store(true)
		if !s.serveRequest(conn, c) {
			return
		}
		c.begun.Store(false)
		wait = s.cfg.IdleTimeout
	}
}

func (s *Server) refuse(conn net.Conn, c *Conn, why error) {
	var ctx fasthttp.RequestCtx
	ctx.Init2(conn, logAdapter{s.cfg.Log}, true)
	c.linger.Store(true)
	s.cfg.Refuse(&ctx, why)
	ctx.SetConnectionClose()
	s.write(&ctx, c)
}

// serveRequest answers one request, whose first bytes are there; false ends the connection.
// A stream is written from here, where the stack is shallow and the request's memory has
// been given back.
func (s *Server) serveRequest(conn net.Conn, c *Conn) bool {
	ctx, _ := s.ctxs.Get().(*fasthttp.RequestCtx)
	if ctx == nil {
		ctx = &fasthttp.RequestCtx{}
	}
	ctx.Init2(conn, logAdapter{s.cfg.Log}, true)
	ctx.Response.Header.SetNoDefaultContentType(true)
	ctx.Request.Header.SetNoDefaultContentType(true)
	c.in.begun = s.cfg.ReadTimeout
	out, again := s.respond(ctx, c)
	ctx.Request.Reset()
	ctx.Response.Reset()
	s.ctxs.Put(ctx)
	if out != nil {
		return out.Stream(c) == nil && again
	}
	return again
}

// respond reads the request, has it handled, and writes the answer, except a stream, which
// it returns.
func (s *Server) respond(ctx *fasthttp.RequestCtx, c *Conn) (out Streamer, again bool) {
	req, resp := &ctx.Request, &ctx.Response
	c.body = httpBody{}
	err := req.Header.Read(c.in.br)
	if nothing := (fasthttp.ErrNothingRead{}); err == io.EOF || errors.As(err, &nothing) {
		return nil, false
	}
	if err == nil {
		err = framed(&req.Header)
	}
	again = err == nil
	if err == nil {
		c.body = newBody(&c.in, max(req.Header.ContentLength(), -1))
		if req.Header.ContentLength() == -2 { // no body was announced
			c.body.eof = true
		}
		c.awaited = !req.MayContinue()
		if !c.body.here() { // the deadline may still be that of an idle connection
			err = c.in.within(s.cfg.ReadTimeout)
		}
	}
	if err == nil {
		s.cfg.Handler(ctx)
	} else {
		c.linger.Store(true)
		s.cfg.Refuse(ctx, err)
	}
	if !c.body.eof { // the client may still be sending
		again = false
		c.linger.Store(true)
	}
	c.in.rest()
	again = again && !req.Header.ConnectionClose() && !resp.ConnectionClose() && !s.stopping.Load() && !s.left.Load()
	if !again {
		resp.SetConnectionClose()
	} else if !req.Header.IsHTTP11() {
		resp.Header.Set("Connection", "keep-alive")
	}
	if out = c.out; out != nil {
		c.out = nil
		switch c.chunked = c.length < 0 && req.Header.IsHTTP11(); {
		case c.chunked:
			resp.Header.SetContentLength(-1)
		case c.length >= 0:
			resp.Header.SetContentLength(c.length)
		default:
			resp.SetConnectionClose() // the end of the body
			again = false
		}
		c.head, c.ended = append([]byte(nil), resp.Header.Header()...), false
		return out, again
	}
	return nil, s.write(ctx, c) && again
}

func (s *Server) write(ctx *fasthttp.RequestCtx, c *Conn) bool {
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
func (s *Server) send(c *Conn, out ...[]byte) error {
	next, renew := prolong(c.until, s.cfg.StallTimeout)
	if end := s.end.Load(); end != nil { // Drain may not have come to this connection yet
		next, renew = *end, !c.until.Equal(*end)
	}
	if renew {
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

// Invite tells a client that waits for 100 Continue to send the body.
func (c *Conn) Invite() error {
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

func appendChunk(out, run []byte) []byte {
	out = append(strconv.AppendInt(out, int64(len(run)), 16), "\r\n"...)
	return append(append(out, run...), "\r\n"...)
}
