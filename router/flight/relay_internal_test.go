package flight

import (
	"bytes"
	"io"
	"testing"
	"testing/iotest"
)

// bytesOf is a source of what r has.
type bytesOf struct{ io.Reader }

func (bytesOf) Await() error     { return nil }
func (bytesOf) Over() bool       { return false }
func (bytesOf) Lend() *[]byte    { b := make([]byte, 0, 4<<10); return &b }
func (bytesOf) GiveBack(*[]byte) {}
func (bytesOf) Finish()          {}
func (bytesOf) Abort()           {}

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
			e := &events{body: bytesOf{r}, mute: i%2 == 1}
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
				if len(out) == 0 && i%2 == 1 && len(skipComments(run)) == 0 {
					t.Fatalf("it began with %q of %q", run, in)
				}
				out = append(out, run...)
			}
			if run, again := e.next(); len(run) > 0 || again != err {
				t.Fatalf("after %v of %q: %q, %v", err, in, run, again)
			}
			rest, whole := bytes.CutPrefix(in, out)
			switch {
			case !whole: // it was completed
				if err != io.EOF || !e.ended() || !bytes.HasPrefix(in, bytes.TrimRight(out, "\r\n")) {
					t.Fatalf("%q became %q, %v", in, out, err)
				}
			case (err == errHalf) != (len(skipComments(rest)) > 0) || err != errHalf && err != io.EOF:
				t.Fatalf("%q became %q and %q, %v", in, out, rest, err)
			}
		}
	})
}

// TestRelayAllocations: an event costs no allocation once the buffer is there.
func TestRelayAllocations(t *testing.T) {
	event := []byte("data: {\"text\":\" word\"}\n\n")
	in := bytes.Repeat(event, 20000)
	e := &events{body: &lasting{bytesOf: bytesOf{&steps{in, len(event)}}}}
	if n := testing.AllocsPerRun(10000, func() {
		if run, err := e.next(); err != nil || len(run) == 0 {
			t.Fatal(err)
		}
	}); n != 0 {
		t.Errorf("%v allocations an event", n)
	}
}

// lasting lends the same memory each time.
type lasting struct {
	bytesOf
	b []byte
}

func (k *lasting) Lend() *[]byte {
	if k.b == nil {
		k.b = make([]byte, 0, 4<<10)
	}
	return &k.b
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

// TestAwait: each wait for a worker whose silence matters has an end, and others do not count.
func TestAwait(t *testing.T) {
	for _, lost := range []bool{false, true} {
		s, _ := seamOf(t, 1, 0)
		stripped(s, frame0+event0)
		if lost {
			s.release()
		}
		q := &request{s: bareService(t), seam: s}
		a := q.newAttempt(pairOf(t, "native"), 1)
		relay := &stream{q: q, answer: &answer{events: &events{body: bytesOf{bytes.NewReader([]byte(event0))}}}}
		for _, want := range []error{nil, io.EOF} {
			if _, err := relay.await(); err != want {
				t.Errorf("%v, want %v", err, want)
			}
		}
		if n := a.d.waits.Load(); n != 4 && !lost || n != 0 && lost {
			t.Errorf("lost %t: %d beginnings and ends of waits", lost, n)
		}
	}
}

// TestAsEvents: an engine's answer may be anything.
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
