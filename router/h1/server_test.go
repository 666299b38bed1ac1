package h1_test

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/router/h1"
)

const limit = 5 << 19 // more than two of the pieces that bodies come in

// serve answers 200 with the body's length and sum, or the refusal.
func serve(t *testing.T) net.Listener {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	b := h1.DefaultBounds()
	b.MaxBodyBytes = limit
	refuse := func(ctx *fasthttp.RequestCtx, err error) { h1.WriteError(ctx, b.Refusal(err)) }
	s := h1.NewServer(h1.ServerConfig{Bounds: b, Refuse: refuse, Handler: func(ctx *fasthttp.RequestCtx) {
		body, err := h1.ConnOf(ctx.Conn()).ReadBody()
		if err != nil {
			refuse(ctx, err)
			ctx.SetConnectionClose()
			return
		}
		sum := 0
		for _, c := range body {
			sum += int(c)
		}
		fmt.Fprintf(ctx, "%d %d", len(body), sum)
	}})
	s.Start(ln)
	t.Cleanup(func() {
		s.Cut()
		s.Wait()
	})
	return ln
}

func dial(t *testing.T, ln net.Listener) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	return conn
}

// TestRead: bodies of any size, with a length or in chunks of any size.
func TestRead(t *testing.T) {
	ln := serve(t)
	conn := dial(t, ln)
	in := bufio.NewReader(conn)
	f := func(status int, body string, chunk int) {
		t.Helper()
		request := fmt.Sprintf("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
		if chunk > 0 {
			var b strings.Builder
			b.WriteString("POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
			for rest := body; rest != ""; {
				n := min(chunk, len(rest))
				fmt.Fprintf(&b, "%x\r\n%s\r\n", n, rest[:n])
				rest = rest[n:]
			}
			request = b.String() + "0\r\n\r\n"
		}
		go func() { _, _ = io.WriteString(conn, request) }()
		resp, err := http.ReadResponse(in, nil)
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(resp.Body)
		if err != nil || resp.StatusCode != status {
			t.Fatalf("%d bytes in chunks of %d: %d %s %v", len(body), chunk, resp.StatusCode, got, err)
		}
		if resp.Close != (status != 200) {
			t.Errorf("%d bytes in chunks of %d: closed %t", len(body), chunk, resp.Close)
		}
		if resp.Close {
			conn.Close()
			conn = dial(t, ln)
			in.Reset(conn)
		}
		if status != 200 {
			return
		}
		if want := fmt.Sprintf("%d %d", len(body), len(body)*'x'); string(got) != want {
			t.Errorf("%d bytes in chunks of %d: %s, want %s", len(body), chunk, got, want)
		}
	}
	for _, n := range []int{0, 1, 100, 4095, 8 << 10, 8<<10 + 1, 64 << 10, 64<<10 + 1, 100_000, 1 << 20, 1<<20 + 1, limit - 1, limit} {
		for _, chunk := range []int{0, 1000, limit} {
			f(200, strings.Repeat("x", n), chunk)
		}
	}
	f(200, strings.Repeat("x", 3000), 1)
	for _, chunk := range []int{0, 1000, limit + 1} {
		f(413, strings.Repeat("x", limit+1), chunk)
		f(413, strings.Repeat("x", 3*limit), chunk)
	}
	conn.Close()
}

// TestMemory: a thousand that announce a mebibyte each and send a byte take
// nothing like a gibibyte.
func TestMemory(t *testing.T) {
	ln := serve(t)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range 1000 {
		conn := dial(t, ln)
		defer conn.Close()
		if _, err := fmt.Fprintf(conn, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", limit, strings.Repeat("x", 9000)); err != nil {
			t.Fatal(err)
		}
	}
	time.Sleep(50 * time.Millisecond) // for the servers to read; too short a time only hides a fault
	runtime.ReadMemStats(&after)
	if grown := after.TotalAlloc - before.TotalAlloc; grown > 300<<20 {
		t.Errorf("%d MiB", grown>>20)
	}
}

// TestFraming: a request whose end is stated twice or ambiguously is refused, and what
// follows it is not read as another request.
func TestFraming(t *testing.T) {
	ln := serve(t)
	const next = "GET /next HTTP/1.1\r\nHost: x\r\n\r\n"
	f := func(name, request string) {
		t.Helper()
		conn := dial(t, ln)
		defer conn.Close()
		if err := conn.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
			t.Fatal(err)
		}
		go func() { _, _ = io.WriteString(conn, request+next) }()
		in := bufio.NewReader(conn)
		resp, err := http.ReadResponse(in, nil)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			return
		}
		body, _ := io.ReadAll(resp.Body)
		if resp.StatusCode != 400 || !resp.Close {
			t.Errorf("%s: %d %s, closed %t", name, resp.StatusCode, body, resp.Close)
		}
		if more, _ := io.ReadAll(in); len(more) > 0 {
			t.Errorf("%s: goes on with %.60q", name, more)
		}
	}
	for name, c := range map[string][2]string{ // headers, body
		"identity":                  {"Transfer-Encoding: identity\r\n", "hello"},
		"identity and a length":     {"Transfer-Encoding: identity\r\nContent-Length: 5\r\n", "hello"},
		"chunked and a length":      {"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n", "0\r\n\r\n"},
		"a length and chunked":      {"content-length: 5\r\ntransfer-encoding: chunked\r\n", "0\r\n\r\n"},
		"gzip":                      {"Transfer-Encoding: gzip\r\n", "hello"},
		"gzip, chunked":             {"Transfer-Encoding: gzip, chunked\r\n", "0\r\n\r\n"},
		"chunked, identity":         {"Transfer-Encoding: chunked, identity\r\n", "0\r\n\r\n"},
		"empty encoding":            {"Transfer-Encoding:\r\n", "hello"},
		"quoted encoding":           {"Transfer-Encoding: \"chunked\"\r\n", "0\r\n\r\n"},
		"vertical tab":              {"Transfer-Encoding: \x0bchunked\r\n", "0\r\n\r\n"},
		"two encodings":             {"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", "0\r\n\r\n"},
		"two lengths":               {"Content-Length: 5\r\nContent-Length: 5\r\n", "hello"},
		"a list of lengths":         {"Content-Length: 5, 5\r\n", "hello"},
		"length with a sign":        {"Content-Length: +5\r\n", "hello"},
		"length in hexadecimal":     {"Content-Length: 0x5\r\n", "hello"},
		"empty length":              {"Content-Length:\r\n", "hello"},
		"space before a colon":      {"Transfer-Encoding : chunked\r\n", "0\r\n\r\n"},
		"space before a name":       {" Transfer-Encoding: chunked\r\n", "0\r\n\r\n"},
		"continued line":            {"X-A: b\r\n Transfer-Encoding: chunked\r\n", "0\r\n\r\n"},
		"continued value":           {"Transfer-Encoding:\r\n chunked\r\n", "0\r\n\r\n"},
		"bare LF":                   {"X-A: b\nTransfer-Encoding: chunked\r\n", "0\r\n\r\n"},
		"bare LF at the end":        {"Content-Length: 5\r\n\n", "hello"},
		"bare CR":                   {"X-A: b\rTransfer-Encoding: chunked\r\n", "0\r\n\r\n"},
		"zero byte":                 {"X-A: b\x00\r\nTransfer-Encoding: chunked\r\n", "0\r\n\r\n"},
		"chunk ends with LF":        {"Transfer-Encoding: chunked\r\n", "1\nx\r\n0\r\n\r\n"},
		"chunk's data ends with LF": {"Transfer-Encoding: chunked\r\n", "1\r\nx\n0\r\n\r\n"},
		"LF in a chunk's extension": {"Transfer-Encoding: chunked\r\n", "1;a\nb\r\nx\r\n0\r\n\r\n"},
		"chunk size with a sign":    {"Transfer-Encoding: chunked\r\n", "+1\r\nx\r\n0\r\n\r\n"},
		"chunk size with 0x":        {"Transfer-Encoding: chunked\r\n", "0x1\r\nx\r\n0\r\n\r\n"},
		"endless chunk size":        {"Transfer-Encoding: chunked\r\n", "ffffffffffffffffff\r\nx\r\n0\r\n\r\n"},
	} {
		f(name, "POST / HTTP/1.1\r\nHost: x\r\n"+c[0]+"\r\n"+c[1])
	}
	f("version 1.0", "POST / HTTP/1.0\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
	f("two hosts", "POST / HTTP/1.1\r\nHost: x\r\nHost: y\r\nContent-Length: 0\r\n\r\n")
}

// TestUnreadBody: what a client sends as a body that nobody reads is not taken for its next request.
func TestUnreadBody(t *testing.T) {
	const next = "GET /next HTTP/1.1\r\nHost: x\r\n\r\n"
	for _, framing := range []string{fmt.Sprintf("Content-Length: %d\r\n\r\n%s", len(next), next), fmt.Sprintf("Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n", len(next), next)} {
		for _, stream := range []bool{false, true} {
			_, ln := started(t, h1.ServerConfig{Handler: func(ctx *fasthttp.RequestCtx) {
				if string(ctx.Path()) != "/" {
					t.Errorf("it serves %s", ctx.Path())
				}
				if stream {
					h1.StreamWriter(ctx, func(out *bufio.Writer) { _, _ = out.WriteString("done") })
				} else {
					ctx.SetBodyString("done")
				}
			}})
			conn := dial(t, ln)
			if err := conn.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(conn, "POST / HTTP/1.1\r\nHost: x\r\n%s", framing)
			in := bufio.NewReader(conn)
			resp, err := http.ReadResponse(in, nil)
			if err != nil {
				t.Fatal(err)
			}
			body, err := io.ReadAll(resp.Body)
			if err != nil || string(body) != "done" || !resp.Close {
				t.Errorf("%q, %v, closed %t", body, err, resp.Close)
			}
			if more, err := io.ReadAll(in); len(more) > 0 || err != nil {
				t.Errorf("it goes on with %.60q, %v", more, err)
			}
			conn.Close()
		}
	}
}

// TestCutBody: a large body that ends too early is an error, wherever it ends.
func TestCutBody(t *testing.T) {
	begun, failed := make(chan bool), make(chan error)
	_, ln := started(t, h1.ServerConfig{Handler: func(ctx *fasthttp.RequestCtx) {
		begun <- true
		_, err := h1.ConnOf(ctx.Conn()).ReadBody()
		failed <- err
	}})
	for _, n := range []int{0, 1, 100_000, 999_999} {
		conn := dial(t, ln)
		defer conn.Close()
		fmt.Fprint(conn, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
		<-begun
		if _, err := conn.Write(make([]byte, n)); err != nil {
			t.Fatal(err)
		}
		if err := conn.(*net.TCPConn).CloseWrite(); err != nil {
			t.Fatal(err)
		}
		select {
		case err := <-failed:
			if !errors.Is(err, io.ErrUnexpectedEOF) {
				t.Errorf("after %d bytes: %v", n, err)
			}
		case <-time.After(10 * time.Second):
			t.Fatalf("after %d bytes it waits for more", n)
		}
	}
}
