package h1

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"strings"
	"sync/atomic"
	"testing"
	"testing/iotest"
	"time"

	"github.com/valyala/fasthttp"
)

// deadConn reads from r.
type deadConn struct {
	net.Conn
	r io.Reader
}

func (deadConn) SetReadDeadline(time.Time) error { return nil }

func (deadConn) Close() error { return nil }

func (c deadConn) Read(p []byte) (int, error) { return c.r.Read(p) }

func bodyOf(r io.Reader, chunked bool, length int64) *Response {
	c := &workerConn{Conn: deadConn{r: r}, u: NewClient(DefaultTimeouts(), Upstream{}, nil)}
	c.in.init(c.Conn, c.u.bufs)
	if chunked {
		length = -1
	}
	return &Response{conn: c, life: &Life{}, httpBody: newBody(&c.in, int(length))}
}

// FuzzChunked: what our chunk reader accepts, the standard library's accepts
// and reads the same.
func FuzzChunked(f *testing.F) {
	f.Add([]byte("3\r\nabc\r\n0\r\n\r\n"))
	f.Add([]byte("A;x=y\r\n0123456789\r\n0\r\nT: x\r\n\r\n"))
	f.Add([]byte("ffffffffffffffff\r\n"))
	f.Add([]byte("1\r\nab\r\n0\r\n\r\n"))
	f.Fuzz(func(t *testing.T, in []byte) {
		got, err := bodyOf(bytes.NewReader(in), true, 0).All(1 << 20)
		slow, serr := bodyOf(iotest.OneByteReader(bytes.NewReader(in)), true, 0).All(1 << 20)
		if (err == nil) != (serr == nil) || !bytes.Equal(got, slow) {
			t.Fatalf("%q: %v and %v", in, err, serr)
		}
		if err != nil {
			return
		}
		want, werr := io.ReadAll(httputil.NewChunkedReader(bytes.NewReader(in)))
		if werr == nil && !bytes.Equal(got, want) {
			t.Fatalf("%q: %q, want %q", in, got, want)
		}
	})
}

// TestChunkLine: a chunk's line is no longer than the buffer, and never read in parts.
func TestChunkLine(t *testing.T) {
	in := "3;" + strings.Repeat("0", upHeader-2) + "\r\n0\r\n\r\n"
	if got, err := bodyOf(strings.NewReader(in), true, 0).All(1 << 20); !errors.Is(err, errChunk) {
		t.Errorf("%q, %v", got, err)
	}
}

// TestUnwatched: a connection is not watched any more once it is over.
func TestUnwatched(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var ends atomic.Int32
	s := NewServer(ServerConfig{Bounds: DefaultBounds(), Handler: func(ctx *fasthttp.RequestCtx) {
		ConnOf(ctx.Conn()).unwatch = func() { ends.Add(1) }
		ctx.SetConnectionClose()
	}})
	s.Start(ln)
	resp, err := http.Get("http://" + ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	s.Cut()
	if s.Wait(); ends.Load() != 1 {
		t.Errorf("%d times", ends.Load())
	}
}

// TestAwaitCut: who waits for more of a body learns that it was cut, or that it has ended.
func TestAwaitCut(t *testing.T) {
	for length, want := range map[int]error{0: nil, 3: io.ErrUnexpectedEOF, -1: io.ErrUnexpectedEOF, -2: io.EOF} {
		b := bodyOf(strings.NewReader(""), false, 0)
		b.httpBody = newBody(b.in, length)
		if err := b.Await(); err != want {
			t.Errorf("of length %d: %v, want %v", length, err, want)
		}
	}
}

// TestReadHoldsNothing: while a request is worked on whose body is read, its connection has no buffer.
func TestReadHoldsNothing(t *testing.T) {
	s := NewServer(ServerConfig{Bounds: DefaultBounds(), Handler: func(ctx *fasthttp.RequestCtx) {
		c := ConnOf(ctx.Conn())
		if body, err := c.ReadBody(); err != nil || string(body) != "abc" || c.in.br != nil {
			t.Errorf("%q, %v, a buffer is held: %t", body, err, c.in.br != nil)
		}
	}})
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s.Start(ln)
	defer s.Wait()
	defer s.Cut()
	for _, body := range []io.Reader{strings.NewReader("abc"), io.MultiReader(strings.NewReader("abc"))} { // the second is chunked
		resp, err := http.Post("http://"+ln.Addr().String(), "text/plain", body)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
	}
}

// TestStreamBroken: nothing follows what could not be written of a stream: the client would take a
// part for the whole.
func TestStreamBroken(t *testing.T) {
	for _, flushes := range []bool{true, false} {
		conn := &flaky{deadConn: deadConn{r: strings.NewReader("")}}
		s := NewServer(ServerConfig{Bounds: DefaultBounds()})
		c := &Conn{Conn: conn, server: s, chunked: true}
		c.in.init(conn, s.in)
		if err := writerStream(func(out *bufio.Writer) {
			_, _ = out.WriteString("abc")
			if flushes {
				_ = out.Flush()
			}
		}).Stream(c); err != io.ErrClosedPipe || conn.writes != 1 {
			t.Errorf("%v, %d writes", err, conn.writes)
		}
	}
}

// flaky fails the first write.
type flaky struct {
	deadConn
	writes int
}

func (*flaky) SetWriteDeadline(time.Time) error { return nil }

func (c *flaky) Write(p []byte) (int, error) {
	if c.writes++; c.writes == 1 {
		return 0, io.ErrClosedPipe
	}
	return len(p), nil
}

// TestBodyAllocations: a read costs no allocation.
func TestBodyAllocations(t *testing.T) {
	b, p := bodyOf(bytes.NewReader(make([]byte, 1<<20)), false, 1<<20), make([]byte, 64)
	if n := testing.AllocsPerRun(10000, func() {
		if err := b.Await(); err != nil {
			t.Fatal(err)
		}
		if n, err := b.Read(p); err != nil || n != len(p) {
			t.Fatal(n, err)
		}
	}); n != 0 {
		t.Errorf("%v allocations a read", n)
	}
}
