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

// FuzzEvents: runs are whole events, and together they are the body, but for the
// half event behind them, which is an error unless it says that the stream is done.
func FuzzEvents(f *testing.F) {
	f.Add([]byte("data: a\n\ndata: b\n\ndata: [DONE]\n\n"))
	f.Add([]byte("data: a\n"))
	f.Add([]byte("data: a\r\n\r\ndata: b\r\n\r\n"))
	f.Add([]byte(": ping\n\n: ping\n\ndata: a\n\ndata: [DONE]"))
	f.Add([]byte("\n\n\n\nx\n\n\n"))
	f.Fuzz(func(t *testing.T, in []byte) {
		for i := range 6 {
			r := []func() io.Reader{
				func() io.Reader { return bytes.NewReader(in) },
				func() io.Reader { return iotest.OneByteReader(bytes.NewReader(in)) },
				func() io.Reader { return iotest.HalfReader(bytes.NewReader(in)) },
			}[i/2]()
			e := &events{body: bodyOf(r, false, int64(len(in))), mute: i%2 == 1}
			var out []byte
			var err error
			for {
				var run []byte
				if run, err = e.next(); err != nil {
					break
				}
				if !bytes.HasSuffix(run, []byte("\n\n")) && !bytes.HasSuffix(run, []byte("\n\r\n")) && !bytes.HasSuffix(run, []byte("\r\r")) {
					t.Fatalf("no whole events: %q of %q", run, in)
				}
				if len(out) == 0 && i%2 == 1 && len(said(run)) == 0 {
					t.Fatalf("it began with %q of %q", run, in)
				}
				out = append(out, run...)
			}
			rest, whole := bytes.CutPrefix(in, out)
			switch {
			case !whole: // it was completed
				if err != io.EOF || !e.ended() || !bytes.HasPrefix(in, bytes.TrimRight(out, "\r\n")) {
					t.Fatalf("%q became %q, %v", in, out, err)
				}
			case (err == errHalf) != (len(said(rest)) > 0) || err != errHalf && err != io.EOF:
				t.Fatalf("%q became %q and %q, %v", in, out, rest, err)
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

// TestAsEvents: what an engine says may be anything.
func TestAsEvents(t *testing.T) {
	f := func(body, want string) {
		t.Helper()
		if got := string(asEvents([]byte(body))); got != "data: "+want+"\n\ndata: [DONE]\n\n" {
			t.Errorf("%s: %q", body, got)
		}
	}
	f(`{"object":"chat.completion","choices":[{"message":{"content":"a"}}]}`, `{"object":"chat.completion.chunk","choices":[{"delta":{"content":"a"}}]}`)
	f(`{"object":"chat.completion","choices":[null]}`, `{"object":"chat.completion.chunk","choices":[null]}`)
	f(`{"object":"chat.completion","choices":3}`, `{"object":"chat.completion","choices":3}`)
	f(`{"choices":[{"text":"a"}]}`, `{"choices":[{"text":"a"}]}`)
}
