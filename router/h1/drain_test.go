package h1_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/router/h1"
)

// started is a server with a handler, on a listener of its own.
func started(t *testing.T, cfg h1.ServerConfig) (*h1.Server, net.Listener) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	b := h1.DefaultBounds()
	if cfg.MaxConns > 0 {
		b.MaxConns = cfg.MaxConns
	}
	cfg.Bounds, cfg.Refuse = b, func(ctx *fasthttp.RequestCtx, err error) { h1.WriteError(ctx, b.Refusal(err)) }
	s := h1.NewServer(cfg)
	s.Start(ln)
	t.Cleanup(func() {
		s.Cut()
		s.Wait()
	})
	return s, ln
}

// ask sends a GET and returns the answer's reader.
func ask(t *testing.T, conn net.Conn, version string) *bufio.Reader {
	t.Helper()
	if _, err := fmt.Fprintf(conn, "GET / HTTP/%s\r\nHost: x\r\n\r\n", version); err != nil {
		t.Fatal(err)
	}
	return bufio.NewReader(conn)
}

// TestStreamWriter: each flush is a chunk, and the connection goes on behind the
// last; HTTP/1.0 has no chunks, and the body ends with the connection.
func TestStreamWriter(t *testing.T) {
	_, ln := started(t, h1.ServerConfig{Handler: func(ctx *fasthttp.RequestCtx) {
		h1.StreamWriter(ctx, func(out *bufio.Writer) {
			for _, s := range []string{"one", "two"} {
				out.WriteString(s)
				out.Flush()
			}
			out.WriteString("!")
		})
	}})
	conn, old := dial(t, ln), dial(t, ln)
	defer conn.Close()
	defer old.Close()
	const chunks = "3\r\none\r\n3\r\ntwo\r\n1\r\n!\r\n0\r\n\r\n"
	for range 2 {
		in := ask(t, conn, "1.1")
		for line := ""; line != "\r\n"; {
			var err error
			if line, err = in.ReadString('\n'); err != nil {
				t.Fatal(err)
			}
		}
		got := make([]byte, len(chunks))
		if _, err := io.ReadFull(in, got); err != nil || string(got) != chunks {
			t.Fatalf("%q, %v", got, err)
		}
	}
	raw, err := io.ReadAll(ask(t, old, "1.0"))
	if err != nil || !strings.HasSuffix(string(raw), "\r\n\r\nonetwo!") {
		t.Errorf("1.0: %q, %v", raw, err)
	}
}

// TestDrain: what is idle is closed at once, a request is answered, and nothing
// is accepted any more.
func TestDrain(t *testing.T) {
	begun, go1 := make(chan struct{}), make(chan struct{})
	s, ln := started(t, h1.ServerConfig{Handler: func(ctx *fasthttp.RequestCtx) {
		close(begun)
		<-go1
		h1.WriteJSON(ctx, 200, []byte(`{}`))
	}})
	idle, busy := dial(t, ln), dial(t, ln)
	defer idle.Close()
	defer busy.Close()
	in := ask(t, busy, "1.1")
	<-begun
	late, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := s.Drain(late); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("it did not wait for the request: %v", err)
	}
	if _, err := idle.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("the idle connection: %v", err)
	}
	if conn, err := net.Dial("tcp", ln.Addr().String()); err == nil {
		conn.Close()
		t.Error("it still listens")
	}
	close(go1)
	resp, err := http.ReadResponse(in, nil)
	if err != nil || resp.StatusCode != 200 || !resp.Close {
		t.Fatalf("%+v, %v", resp, err)
	}
	for end := time.Now().Add(10 * time.Second); s.Count() > 0 && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
	if n := s.Count(); n != 0 {
		t.Errorf("%d connections are left", n)
	}
}

// TestLeave: nothing is accepted any more, and no client that was notices: one that idled and one
// that had said nothing yet still get an answer, which ends their connection.
func TestLeave(t *testing.T) {
	failed := make(chan error, 1)
	s, ln := started(t, h1.ServerConfig{Failed: func(err error) { failed <- err },
		Handler: func(ctx *fasthttp.RequestCtx) { h1.WriteJSON(ctx, 200, []byte(`{}`)) }})
	answer := func(conn net.Conn, last bool) {
		t.Helper()
		resp, err := http.ReadResponse(ask(t, conn, "1.1"), nil)
		if err != nil || resp.StatusCode != 200 || resp.Close != last {
			t.Fatalf("%+v, %v", resp, err)
		}
	}
	used, fresh := dial(t, ln), dial(t, ln)
	defer used.Close()
	defer fresh.Close()
	answer(used, false)
	for s.Count() < 2 {
		time.Sleep(time.Millisecond)
	}
	if err := s.Leave(); err != nil {
		t.Fatal(err)
	}
	if conn, err := net.Dial("tcp", ln.Addr().String()); err == nil {
		conn.Close()
		t.Error("it still listens")
	}
	answer(used, true)
	answer(fresh, true)
	if err := s.Drain(t.Context()); err != nil {
		t.Errorf("what is left: %v", err)
	}
	select {
	case err := <-failed:
		t.Errorf("leaving is a failure: %v", err)
	default:
	}
}

// TestFailed: a listener that fails is told, or logged where nobody wants to hear it.
func TestFailed(t *testing.T) {
	for _, told := range []bool{false, true} {
		var log bytes.Buffer
		var heard error
		cfg := h1.ServerConfig{Log: slog.New(slog.NewTextHandler(&log, nil))}
		if told {
			cfg.Failed = func(err error) { heard = err }
		}
		s, ln := started(t, cfg)
		ln.Close()
		s.Wait()
		if strings.Contains(log.String(), net.ErrClosed.Error()) == told || errors.Is(heard, net.ErrClosed) != told {
			t.Errorf("told %t: heard %v, logged %q", told, heard, log.String())
		}
	}
}

// TestLastWords: after Drain a client that reads nothing delays nobody.
func TestLastWords(t *testing.T) {
	begun := make(chan struct{})
	s, ln := started(t, h1.ServerConfig{LastWords: 100 * time.Millisecond, Handler: func(ctx *fasthttp.RequestCtx) {
		h1.StreamWriter(ctx, func(out *bufio.Writer) {
			close(begun)
			for piece := strings.Repeat("x", 1<<20); ; {
				if _, err := out.WriteString(piece); err != nil {
					return
				}
			}
		})
	}})
	conn := dial(t, ln)
	defer conn.Close()
	ask(t, conn, "1.1")
	<-begun
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := s.Drain(ctx); err != nil {
		t.Errorf("the stream goes on: %v", err)
	}
}

// TestFull: a connection beyond the bound is told that there are too many.
func TestFull(t *testing.T) {
	_, ln := started(t, h1.ServerConfig{Bounds: h1.Bounds{MaxConns: 1}, Who: "it", Handler: func(ctx *fasthttp.RequestCtx) { h1.WriteJSON(ctx, 200, []byte(`{}`)) }})
	first, second := dial(t, ln), dial(t, ln)
	defer first.Close()
	defer second.Close()
	resp, err := http.ReadResponse(bufio.NewReader(second), nil)
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != 503 || !resp.Close || !strings.Contains(string(body), "it has its 1 connections") {
		t.Errorf("%d %s, %v", resp.StatusCode, body, err)
	}
	if resp, err := http.ReadResponse(ask(t, first, "1.1"), nil); err != nil || resp.StatusCode != 200 {
		t.Errorf("the first: %+v, %v", resp, err)
	}
}

// piece streams a text in two.
type piece string

func (p piece) Stream(c *h1.Conn) error {
	if err := c.Send([]byte(p[:len(p)/2]), false); err != nil {
		return err
	}
	return c.Send([]byte(p[len(p)/2:]), true)
}

// TestAnswers: whole answers and streams of every size are framed as the client can read, and the
// connection goes on where it can.
func TestAnswers(t *testing.T) {
	_, ln := started(t, h1.ServerConfig{Handler: func(ctx *fasthttp.RequestCtx) {
		args := ctx.QueryArgs()
		text := strings.Repeat("x", args.GetUintOrZero("n"))
		switch string(args.Peek("as")) {
		case "whole":
			ctx.SetStatusCode(args.GetUintOrZero("status"))
			ctx.SetBodyString(text)
		case "stream":
			h1.ConnOf(ctx.Conn()).Stream(-1, piece(text))
		case "sized":
			h1.ConnOf(ctx.Conn()).Stream(len(text), piece(text))
		}
	}})
	for _, c := range []struct {
		verb, version, query string
		n                    int
		length               int64 // -1: not announced
		chunked, closes      bool
	}{
		{"GET", "1.1", "as=whole&status=200", 0, 0, false, false}, {"GET", "1.1", "as=whole&status=200", 10, 10, false, false}, {"GET", "1.1", "as=whole&status=500", 300_000, 300_000, false, false},
		{"HEAD", "1.1", "as=whole&status=200", 10, 10, false, false}, {"HEAD", "1.1", "as=whole&status=200", 300_000, 300_000, false, false}, {"GET", "1.0", "as=whole&status=200", 10, 10, false, false},
		{"GET", "1.1", "as=stream", 0, -1, true, false}, {"GET", "1.1", "as=stream", 100_000, -1, true, false}, {"GET", "1.0", "as=stream", 10, -1, false, true},
		{"GET", "1.1", "as=sized", 0, 0, false, false}, {"GET", "1.1", "as=sized", 100_000, 100_000, false, false}, {"GET", "1.0", "as=sized", 0, 0, false, false}, {"GET", "1.0", "as=sized", 10, 10, false, false},
	} {
		conn := dial(t, ln)
		in := bufio.NewReader(conn)
		for again := range 2 {
			fmt.Fprintf(conn, "%s /?n=%d&%s HTTP/%s\r\nHost: x\r\nConnection: keep-alive\r\n\r\n", c.verb, c.n, c.query, c.version)
			resp, err := http.ReadResponse(in, &http.Request{Method: c.verb})
			if err != nil {
				t.Fatalf("%+v: %v", c, err)
			}
			body, err := io.ReadAll(resp.Body)
			want := c.n
			if c.verb == "HEAD" {
				want = 0
			}
			if err != nil || string(body) != strings.Repeat("x", want) || resp.ContentLength != c.length || (len(resp.TransferEncoding) > 0) != c.chunked || resp.Close != c.closes {
				t.Errorf("%+v: %d bytes, %v, length %d, %v, closes %t", c, len(body), err, resp.ContentLength, resp.TransferEncoding, resp.Close)
			}
			if c.closes || again == 1 {
				break
			}
		}
		conn.Close()
	}
}
