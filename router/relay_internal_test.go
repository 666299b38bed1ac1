package router

import (
	"bytes"
	"io"
	"net"
	"net/http/httputil"
	"testing"
	"testing/iotest"
	"time"
)

// deadConn reads from r.
type deadConn struct {
	net.Conn
	r io.Reader
}

func (deadConn) SetReadDeadline(time.Time) error { return nil }

func (c deadConn) Read(p []byte) (int, error) { return c.r.Read(p) }

func bodyOf(r io.Reader, chunked bool, length int64) *upBody {
	cfg := DefaultConfig()
	c := &upConn{Conn: deadConn{r: r}, u: newUpstream(&cfg)}
	c.in.init(c.Conn, c.u.bufs)
	if chunked {
		length = -1
	}
	return &upBody{conn: c, httpBody: newBody(&c.in, int(length))}
}

// FuzzChunked: what our chunk reader accepts, the standard library's accepts
// and reads the same.
func FuzzChunked(f *testing.F) {
	f.Add([]byte("3\r\nabc\r\n0\r\n\r\n"))
	f.Add([]byte("A;x=y\r\n0123456789\r\n0\r\nT: x\r\n\r\n"))
	f.Add([]byte("ffffffffffffffff\r\n"))
	f.Add([]byte("1\r\nab\r\n0\r\n\r\n"))
	f.Fuzz(func(t *testing.T, in []byte) {
		got, err := bodyOf(bytes.NewReader(in), true, 0).all(1 << 20)
		slow, serr := bodyOf(iotest.OneByteReader(bytes.NewReader(in)), true, 0).all(1 << 20)
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

// FuzzEvents: runs are whole events, and together they are the body.
func FuzzEvents(f *testing.F) {
	f.Add([]byte("data: a\n\ndata: b\n\ndata: [DONE]\n\n"))
	f.Add([]byte("data: a\n"))
	f.Add([]byte("data: a\r\n\r\ndata: b\r\n\r\n"))
	f.Add([]byte("\n\n\n\nx\n\n\n"))
	f.Fuzz(func(t *testing.T, in []byte) {
		for _, r := range []io.Reader{bytes.NewReader(in), iotest.OneByteReader(bytes.NewReader(in)), iotest.HalfReader(bytes.NewReader(in))} {
			e := &events{body: bodyOf(r, false, int64(len(in)))}
			var out []byte
			for {
				run, err := e.next()
				if err == io.EOF {
					break
				}
				if err != nil {
					t.Fatal(err)
				}
				if len(run) == 0 {
					t.Fatal("an empty run")
				}
				if out = append(out, run...); len(out) < len(in) && lastEnd(run) != len(run) {
					t.Fatalf("half an event: %q of %q", run, in)
				}
			}
			if !bytes.Equal(out, in) {
				t.Fatalf("%q became %q", in, out)
			}
		}
	})
}

// TestRelayAllocations: an event costs no allocation once the buffer is there.
func TestRelayAllocations(t *testing.T) {
	event := []byte("data: {\"text\":\" word\"}\n\n")
	in := bytes.Repeat(event, 20000)
	e := &events{body: bodyOf(&steps{in, len(event)}, false, int64(len(in)))}
	if n := testing.AllocsPerRun(10000, func() {
		if run, err := e.next(); err != nil || len(run) == 0 {
			t.Fatal(err)
		}
	}); n != 0 {
		t.Errorf("%v allocations an event", n)
	}
}

// steps returns n bytes a read.
type steps struct {
	b []byte
	n int
}

func (s *steps) Read(p []byte) (int, error) {
	n := copy(p, s.b[:min(s.n, len(s.b))])
	s.b = s.b[n:]
	if n == 0 {
		return 0, io.EOF
	}
	return n, nil
}
