// Package client posts requests to OpenAI-compatible servers and records what arrives when. It
// is made for load: one goroutine per request, its own HTTP/1.1 connections, no allocation
// per event. It does no HTTP/2, proxies, compression or redirects.
package client

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/valyala/fasthttp"
)

// Config says where and how to post.
type Config struct {
	// URLs are the servers, with or without a final /v1. Requests go to them in turn.
	URLs []string
	// Path is where to post, below /v1: chat/completions or completions.
	Path    string
	Header  [][2]string
	Stream  bool          // the answers are event streams
	Timeout time.Duration // of a whole request
	// Insecure accepts any certificate of an https server.
	Insecure bool
}

// Client is safe for any number of goroutines.
type Client struct {
	cfg     Config
	servers []*server
	turn    atomic.Uint64
	scratch sync.Pool // *scratch
}

// server is one of the URLs.
type server struct {
	pool *pool
	head []byte // of a request, up to the value of Content-Length
}

// scratch is the memory of a running request.
type scratch struct {
	header fasthttp.ResponseHeader
	out    []byte
	whole  []byte
	body   body
	sse    sse
	event  event
}

// New checks cfg; it does not connect.
func New(cfg Config) (*Client, error) {
	if len(cfg.URLs) == 0 {
		return nil, errors.New("no URL")
	}
	if cfg.Timeout <= 0 {
		return nil, errors.New("the timeout is not positive")
	}
	c := &Client{cfg: cfg, scratch: sync.Pool{New: func() any { return new(scratch) }}}
	for _, raw := range cfg.URLs {
		s, err := newServer(raw, &cfg)
		if err != nil {
			return nil, err
		}
		c.servers = append(c.servers, s)
	}
	return c, nil
}

func newServer(raw string, cfg *Config) (*server, error) {
	u, err := url.Parse(raw)
	if err != nil {
		return nil, err
	}
	if (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" {
		return nil, fmt.Errorf("URL %q: want http://HOST or https://HOST", raw)
	}
	if u.User != nil { // reports show addresses
		return nil, fmt.Errorf("URL %q has a user: say it as --header 'Authorization: …' or --api-key", u.Redacted())
	}
	var config *tls.Config
	addr, port := u.Host, "80"
	if u.Scheme == "https" {
		port = "443"
		config = &tls.Config{ServerName: u.Hostname(), InsecureSkipVerify: cfg.Insecure, MinVersion: tls.VersionTLS12}
	}
	if u.Port() == "" {
		addr = net.JoinHostPort(u.Hostname(), port)
	}
	base := strings.TrimSuffix(u.EscapedPath(), "/")
	if !strings.HasSuffix(base, "/v1") {
		base += "/v1"
	}
	accept := "application/json"
	if cfg.Stream {
		accept = "text/event-stream"
	}
	head := fmt.Sprintf("POST %s/%s HTTP/1.1\r\nHost: %s\r\nUser-Agent: xpyd-bench\r\nContent-Type: application/json\r\nAccept: %s\r\n", base, cfg.Path, u.Host, accept)
	for _, h := range cfg.Header {
		if strings.ContainsAny(h[0]+h[1], "\r\n") || h[0] == "" {
			return nil, fmt.Errorf("header %q", h[0])
		}
		head += h[0] + ": " + h[1] + "\r\n"
	}
	return &server{pool: &pool{addr: addr, tls: config, open: map[*conn]struct{}{}}, head: []byte(head + "Content-Length: ")}, nil
}

// Abort breaks off running requests, which end as Cancelled, and closes idle connections. It
// ends a Client.
func (c *Client) Abort() {
	for _, s := range c.servers {
		s.pool.abort()
	}
}

// Do posts req, reads the answer to its end or to the deadline, and records in res what came
// when. It does not start after the end of ctx, but only Abort ends a running request: call
// that after ending ctx.
func (c *Client) Do(ctx context.Context, req *Request, res *Result) {
	res.reset()
	s := c.servers[int(c.turn.Add(1)-1)%len(c.servers)]
	sc := c.scratch.Get().(*scratch)
	defer c.scratch.Put(sc)
	res.Sent = len(req.Body)
	res.Start = time.Now()
	if c.try(ctx, s, sc, req, res, false) {
		res.Retried = true
		c.try(ctx, s, sc, req, res, true)
	}
	res.End = time.Since(res.Start)
}

// try is one attempt. It returns true if an idle connection turned out to be closed before
// any byte of an answer.
func (c *Client) try(ctx context.Context, s *server, sc *scratch, req *Request, res *Result, fresh bool) (again bool) {
	deadline := res.Start.Add(c.cfg.Timeout)
	conn, reused, err := s.pool.get(ctx, time.Until(deadline), fresh)
	if err != nil {
		res.broke(err, Connect)
		return false
	}
	if !reused {
		res.Connected = time.Since(res.Start)
	}
	keep := false
	defer func() {
		if keep {
			s.pool.put(conn)
		} else {
			s.pool.drop(conn)
		}
	}()
	if err := conn.SetDeadline(deadline); err != nil {
		res.broke(err, Connection)
		return false
	}
	err = send(conn, s.head, sc, req.Body)
	if err == nil {
		_, err = conn.br.Peek(1)
	}
	if err != nil {
		if again = reused && stale(err); !again {
			res.broke(err, Connection)
		}
		return again
	}
	if err := sc.header.Read(conn.br); err != nil {
		res.broke(err, Malformed)
		return false
	}
	res.Header = time.Since(res.Start)
	res.Status = sc.header.StatusCode()
	length := sc.header.ContentLength()
	sc.body.begin(conn.br, length)
	var ok bool
	switch {
	case res.Status != fasthttp.StatusOK:
		ok = c.refused(sc, res)
	case c.cfg.Stream:
		ok = c.stream(sc, req, res)
	default:
		ok = c.whole(sc, req, res)
	}
	keep = ok && length >= -1 && !sc.header.ConnectionClose() && conn.br.Buffered() == 0
	return false
}

// stale reports whether err means that the server had closed the connection.
func stale(err error) bool {
	var n net.Error
	return !errors.Is(err, net.ErrClosed) && !(errors.As(err, &n) && n.Timeout())
}

// copyUpTo is the largest body that goes out in one write with the header.
const copyUpTo = 64 << 10

func send(conn *conn, head []byte, sc *scratch, body []byte) error {
	sc.out = append(sc.out[:0], head...)
	sc.out = strconv.AppendInt(sc.out, int64(len(body)), 10)
	sc.out = append(sc.out, "\r\n\r\n"...)
	if len(body) <= copyUpTo {
		sc.out = append(sc.out, body...)
		_, err := conn.Write(sc.out)
		return err
	}
	if _, err := conn.Write(sc.out); err != nil {
		return err
	}
	_, err := conn.Write(body)
	return err
}

// read reads the body, up to most bytes.
func (sc *scratch) read(most int) ([]byte, error) {
	sc.whole = sc.whole[:0]
	for {
		p, err := sc.body.next()
		if err == io.EOF {
			return sc.whole, nil
		}
		if err != nil {
			return sc.whole, err
		}
		if len(sc.whole)+len(p) > most {
			return sc.whole, errEventTooLong
		}
		sc.whole = append(sc.whole, p...)
	}
}

// refused reads an answer that is not 200 and takes the message of the error in it, or else its
// text. It returns true if the connection is still usable.
func (c *Client) refused(sc *scratch, res *Result) bool {
	text, err := sc.read(maxEvent)
	res.Kind, res.Message = Kind("http_"+strconv.Itoa(res.Status)), clip(string(text))
	if sc.event.parse(text, nil) == nil && sc.event.err != nil {
		res.Message = errorText(sc.event.err)
	}
	return err == nil
}

// whole reads an answer that is not streamed.
func (c *Client) whole(sc *scratch, req *Request, res *Result) bool {
	text, err := sc.read(maxEvent * 16)
	if err != nil {
		res.broke(err, Truncated)
		return false
	}
	res.LastToken = time.Since(res.Start)
	if err := sc.event.parse(text, res.answerBuf(req)); err != nil {
		res.fail(Malformed, err)
		return true
	}
	e := &sc.event
	res.HasUsage, res.Usage = e.hasUsage, e.usage
	if e.tokens {
		res.Chunks = 1
	}
	switch {
	case e.err != nil:
		res.Kind, res.Message = ErrorEvent, errorText(e.err)
	case !e.tokens && e.usage.Completion == 0:
		res.Kind, res.Message = Empty, "an answer without a token"
	}
	return true
}

// answerBuf is where an answer's text goes; nil if it is not wanted.
func (r *Result) answerBuf(req *Request) *[]byte {
	if req.WantAnswer {
		return &r.Answer
	}
	return nil
}
