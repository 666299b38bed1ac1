package h1

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/iotest"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/trust/trusttest"
)

// TestBodies: a body is what its framing says, up to the limit, in whatever pieces it comes.
func TestBodies(t *testing.T) {
	const limit = 8 << 10
	long := strings.Repeat("x", limit)
	chunk := func(s string) string { return fmt.Sprintf("%x\r\n%s\r\n", len(s), s) }
	large := errors.New("more than the limit")
	for _, c := range []struct {
		in     string
		length int // -1: chunked, -2: to the end
		want   string
		err    error
	}{
		{"", 0, "", nil}, {"abcX", 3, "abc", nil}, {"ab", 3, "", io.ErrUnexpectedEOF}, {long + "y", limit, long, nil}, {long + "y", limit + 1, "", large},
		{"", -2, "", nil}, {"abc", -2, "abc", nil}, {long, -2, long, nil}, {long + "y", -2, "", large}, {strings.Repeat("ab", 2048) + "c", -2, strings.Repeat("ab", 2048) + "c", nil},
		{chunk("abc") + "0\r\n\r\n", -1, "abc", nil}, {chunk("abc") + chunk("de") + "0\r\nT: x\r\n\r\n", -1, "abcde", nil}, {"0\r\n\r\n", -1, "", nil},
		{"A\r\n0123456789\r\n0\r\n\r\n", -1, "0123456789", nil}, {"a\r\n0123456789\r\n0\r\n\r\n", -1, "0123456789", nil}, {"F ;x=y\r\n" + long[:15] + "\r\n0\r\n\r\n", -1, long[:15], nil}, {"1F\r\n" + long[:31] + "\r\n0\r\n\r\n", -1, long[:31], nil},
		{chunk(long) + "0\r\n\r\n", -1, long, nil}, {chunk(long) + chunk("y") + "0\r\n\r\n", -1, "", large}, {chunk(long+"y") + "0\r\n\r\n", -1, "", large},
		{"", -1, "", io.ErrUnexpectedEOF}, {"3", -1, "", io.ErrUnexpectedEOF}, {chunk("abc"), -1, "", io.ErrUnexpectedEOF}, {"3\r\nab", -1, "", io.ErrUnexpectedEOF}, {"3\r\nabc", -1, "", io.ErrUnexpectedEOF}, {"3\r\nabc\r", -1, "", io.ErrUnexpectedEOF}, {"0\r\n", -1, "", io.ErrUnexpectedEOF},
		{"\r\n", -1, "", errChunk}, {"x\r\n", -1, "", errChunk}, {"3x\r\nabc\r\n0\r\n\r\n", -1, "", errChunk}, {"3\nabc\r\n0\r\n\r\n", -1, "", errChunk}, {"3;\rx\r\nabc\r\n0\r\n\r\n", -1, "", errChunk}, {"3\r\nabcd\r\n0\r\n\r\n", -1, "", errChunk}, {"3\r\nabc\rx0\r\n\r\n", -1, "", errChunk},
		{"10000000001\r\n", -1, "", errChunk}, {"fffffffffffffffffff\r\n", -1, "", errChunk}, {"0\r\nT: x\n\r\n", -1, "", errChunk},
		{"0\r\n" + strings.Repeat("T: x\r\n", 63) + "\r\n", -1, "", nil}, {"0\r\n" + strings.Repeat("T: x\r\n", 64) + "\r\n", -1, "", errChunk},
	} {
		for i, r := range []io.Reader{strings.NewReader(c.in), iotest.OneByteReader(strings.NewReader(c.in)), iotest.DataErrReader(strings.NewReader(c.in))} {
			b := bodyOf(r, false, int64(c.length))
			b.httpBody = newBody(b.in, c.length)
			got, err := b.All(limit)
			same := errors.Is(err, c.err)
			if e, ok := errors.AsType[*LargeError](err); ok {
				same = c.err == large && e.Limit == limit
			}
			if string(got) != c.want || !same || (err == nil) == b.done {
				t.Errorf("%.40q of length %d, reader %d: %d bytes %.20q, %v, want %d, %v", c.in, c.length, i, len(got), got, err, len(c.want), c.err)
			}
			if want := max(c.length, -1); newBodyLength(c.length) != want {
				t.Errorf("length %d is announced as %d", c.length, newBodyLength(c.length))
			}
		}
	}
}

func newBodyLength(n int) int { return (&Response{httpBody: newBody(nil, n)}).Length() }

// TestFinish: a connection is kept for the next leg only if nothing of this answer is left.
func TestFinish(t *testing.T) {
	for name, c := range map[string]struct {
		in   string
		edit func(*Response)
		kept bool
	}{
		"read":            {"", func(*Response) {}, true},
		"not read":        {"", func(b *Response) { b.eof = false }, false},
		"to its end":      {"", func(b *Response) { b.toEnd = true }, false},
		"spoilt":          {"", func(b *Response) { b.spoilt = true }, false},
		"closes":          {"", func(b *Response) { b.Header.SetConnectionClose() }, false},
		"more than that":  {"x", func(b *Response) { _ = b.in.await() }, false},
		"cut":             {"", func(b *Response) { b.life.End(io.EOF) }, false},
		"aborted":         {"", func(b *Response) { b.Abort() }, false},
		"finished before": {"", func(b *Response) { b.Finish() }, true},
	} {
		b := bodyOf(strings.NewReader(c.in), false, 0)
		b.Header = &b.conn.header
		u := b.conn.u
		u.open[b.conn] = struct{}{}
		b.life.hold(b.conn)
		c.edit(b)
		b.Finish()
		b.Finish()
		b.Abort()
		busy, idle := u.Counts()
		if b.Header != nil || (idle == 1) != c.kept || (idle == 0) == c.kept || busy != 0 {
			t.Errorf("%s: %d busy, %d idle", name, busy, idle)
		}
	}
}

// TestIdle: the newest idle connection goes first, few are kept, and none for long.
func TestIdle(t *testing.T) {
	cfg := DefaultTimeouts()
	cfg.IdleConns = 3
	u := NewClient(cfg, Upstream{}, nil)
	var list []*workerConn
	for i := range 5 {
		c := &workerConn{Conn: deadConn{}, u: u, addr: fmt.Sprint("a", i/4)}
		u.open[c] = struct{}{}
		u.put(c)
		list = append(list, c)
	}
	counts := func(want int) {
		t.Helper()
		if busy, idle := u.Counts(); busy != 0 || idle != want || len(u.open) != want {
			t.Errorf("%d busy, %d idle, want %d", busy, idle, want)
		}
	}
	counts(4)
	list[0].since = list[0].since.Add(-upIdle)
	list[1].since = list[1].since.Add(-upIdle)
	list[4].since = list[4].since.Add(-upIdle)
	u.Prune()
	counts(1)
	if u.pop("a1") != nil || len(u.idle) != 1 {
		t.Errorf("%v", u.idle)
	}
	if u.pop("a0") != list[2] || u.pop("a0") != nil || len(u.idle) != 0 {
		t.Errorf("%v", u.idle)
	}
	another := &workerConn{Conn: deadConn{}, u: u, addr: "a0"}
	u.open[another] = struct{}{}
	u.put(list[2])
	u.put(another)
	if counts(2); u.pop("a0") != another || u.pop("a0") != list[2] || u.pop("a0") != nil {
		t.Error("one of two is given twice, or the older one first")
	}
	u.put(list[2])
	u.put(another)
	counts(2)
	u.Close()
	if counts(0); u.pop("a0") != nil {
		t.Error("one that was closed")
	}
	u.put(list[2])
	counts(0)
}

// stuck is a connection whose deadlines or writes fail, as when it was closed just now.
type stuck struct {
	deadConn
	read, write, sends error
}

func (s stuck) SetReadDeadline(time.Time) error  { return s.read }
func (s stuck) SetWriteDeadline(time.Time) error { return s.write }
func (s stuck) Write(p []byte) (int, error)      { return len(p), s.sends }

// TestStuck: a leg on a connection that was closed just now fails, in the phase that it met it in.
func TestStuck(t *testing.T) {
	for _, c := range []struct {
		conn  stuck
		phase string
	}{{stuck{read: net.ErrClosed}, "answer"}, {stuck{write: net.ErrClosed}, "send"}, {stuck{sends: net.ErrClosed}, "send"}, {stuck{}, "answer"}} {
		c.conn.r = strings.NewReader("")
		u := NewClient(DefaultTimeouts(), Upstream{}, nil)
		b := &Response{conn: &workerConn{Conn: c.conn, u: u}, life: &Life{}}
		b.conn.in.init(c.conn, u.bufs)
		h := u.Header()
		h.SetRequestURI("/")
		var sent atomic.Bool
		var e *Error
		if err := b.do("h:1", h, [][]byte{[]byte("x")}, &sent); !errors.As(err, &e) || e.Phase != c.phase || sent.Load() != (c.conn == stuck{deadConn: c.conn.deadConn}) {
			t.Errorf("%+v: %v, sent %t", c.conn, err, sent.Load())
		}
	}
	b := bodyOf(nil, false, 5)
	b.in.conn = stuck{read: net.ErrClosed}
	if err := b.Await(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("a body is awaited: %v", err)
	}
}

// TestReused: a connection is used again while it is fresh, or is quiet and has not idled for long.
func TestReused(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	addr := ln.Addr().String()
	for _, c := range []struct {
		idle          time.Duration
		ended, reused bool
	}{{0, false, true}, {upIdle / 2, false, true}, {upIdle / 2, true, false}, {upIdle, false, false}} {
		u := NewClient(DefaultTimeouts(), Upstream{}, nil)
		old, err := u.get(&Life{}, addr)
		if err != nil {
			t.Fatal(err)
		}
		theirs, err := ln.Accept()
		if err != nil {
			t.Fatal(err)
		}
		if c.ended {
			theirs.Close()
			raw, _ := old.Conn.(*net.TCPConn).SyscallConn()
			_ = raw.Read(func(fd uintptr) bool { return sysPeek(int(fd)) == 0 })
		}
		u.put(old)
		old.since = old.since.Add(-c.idle)
		again, err := u.get(&Life{}, addr)
		if err != nil {
			t.Fatal(err)
		}
		if (again == old) != c.reused {
			t.Errorf("%+v: used again %t", c, again == old)
		}
		if again != old {
			more, err := ln.Accept()
			if err != nil {
				t.Fatal(err)
			}
			more.Close()
		}
		u.Close()
		theirs.Close()
	}
}

// TestWaitingHoldsNothing: a connection that has nothing to read has no buffer.
func TestWaitingHoldsNothing(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	conn, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	theirs, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer theirs.Close()
	var b inbuf
	b.init(conn, newLender(upHeader))
	ready := func() (done bool) {
		if err := b.raw.Control(func(fd uintptr) { done = b.readable(fd) }); err != nil {
			t.Fatal(err)
		}
		return done
	}
	if ready() || b.br != nil {
		t.Errorf("a buffer is held for nothing: %t", b.br != nil)
	}
	if err := conn.SetReadDeadline(time.Unix(1, 0)); err != nil {
		t.Fatal(err)
	}
	b.err = nil
	if err := b.await(); !TimedOut(err) || b.br != nil {
		t.Errorf("too late: %v, a buffer is held: %t", err, b.br != nil)
	}
	if _, err := b.ask([]byte("x"), nil); !TimedOut(err) || b.br != nil {
		t.Errorf("too late for an answer: %v, a buffer is held: %t", err, b.br != nil)
	}
	if err := conn.SetReadDeadline(time.Time{}); err != nil {
		t.Fatal(err)
	}
	fmt.Fprint(theirs, "x")
	if err := b.await(); err != nil || b.buffered() != 1 {
		t.Errorf("%v, %d bytes", err, b.buffered())
	}
}

// TestQuiet: an idle connection is used again unless it has ended or has bytes that nobody asked for.
func TestQuiet(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	for name, then := range map[string]func(net.Conn){"quiet": nil, "speaks": func(c net.Conn) { fmt.Fprint(c, "x") }, "ended": func(c net.Conn) { c.Close() }} {
		ours, err := net.Dial("tcp", ln.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		theirs, err := ln.Accept()
		if err != nil {
			t.Fatal(err)
		}
		if then != nil {
			then(theirs)
			_ = ours.SetReadDeadline(time.Now().Add(10 * time.Second))
			raw, _ := ours.(*net.TCPConn).SyscallConn()
			_ = raw.Read(func(fd uintptr) bool { return sysPeek(int(fd)) == 0 })
		}
		if quiet(ours) != (then == nil) {
			t.Errorf("%s: quiet %t", name, then != nil)
		}
		ours.Close()
		theirs.Close()
	}
	if !quiet(deadConn{}) {
		t.Error("what cannot tell is used again")
	}
}

// TestUpload: a body that is still coming arrives as announced, and an engine that has gone ends it.
func TestUpload(t *testing.T) {
	type heard struct {
		length  int64
		body    string
		host    string
		key     string
		chunked bool
	}
	got := make(chan heard, 1)
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/leaves" {
			conn, _, _ := w.(http.Hijacker).Hijack()
			conn.Close()
			return
		}
		b, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		got <- heard{r.ContentLength, string(b), r.Host, r.Header.Get("Authorization"), len(r.TransferEncoding) > 0}
		fmt.Fprint(w, "ok")
	}))
	defer srv.Close()
	addr := srv.Listener.Addr().String()
	u := NewClient(DefaultTimeouts(), Upstream{APIKey: "k"}, nil)
	defer u.Close()
	do := func(path string, up *Upload) (string, bool, error) {
		h := u.Header()
		defer u.Recycle(h)
		h.SetMethod("POST")
		h.SetRequestURI(path)
		var sent atomic.Bool
		b, err := u.Upload(&Life{}, addr, h, up, &sent)
		if err != nil {
			return "", sent.Load(), err
		}
		text, err := b.All(100)
		b.Finish()
		return string(text), sent.Load(), err
	}
	for _, c := range []struct {
		head, rest string
		length     int
	}{{"ab", "cd", 4}, {"ab", "cd", -1}, {"", "cd", -1}, {"", "cd", 2}, {"ab", "", -1}, {"ab", "", 2}, {"", "", -1}, {"a", strings.Repeat("x", 100_000), 100_001}, {"a", strings.Repeat("x", 100_000), -1}} {
		text, sent, err := do("/", &Upload{Head: []byte(c.head), Length: c.length, Rest: strings.NewReader(c.rest)})
		if err != nil || text != "ok" || !sent {
			t.Errorf("%+.20v: %q, sent %t, %v", c, text, sent, err)
			continue
		}
		if h := <-got; h != (heard{int64(c.length), c.head + c.rest, addr, "Bearer k", c.length < 0}) {
			t.Errorf("%+.20v: heard %d bytes, %.20q, %q, %q", c, h.length, h.body, h.host, h.key)
		}
	}
	if text, sent, err := do("/", &Upload{Head: []byte("whole")}); text != "ok" || !sent || err != nil || (<-got).body != "whole" {
		t.Errorf("without a rest: %q, %v", text, err)
	}
	broke := errors.New("broke")
	up := &Upload{Length: -1, Rest: io.MultiReader(strings.NewReader("x"), iotest.ErrReader(broke))}
	if _, sent, err := do("/", up); !errors.Is(err, broke) || !errors.Is(up.Broken, broke) || sent {
		t.Errorf("a client that breaks off: %v, %v", err, up.Broken)
	}
	endless := &counted{most: 1 << 30}
	var e *Error
	if _, _, err := do("/leaves", &Upload{Length: 1 << 30, Rest: endless}); !errors.As(err, &e) || e.Phase != "send" || endless.n >= endless.most {
		t.Errorf("an engine that leaves: %v after %d bytes", err, endless.n)
	}
	if busy, _ := u.Counts(); busy != 0 {
		t.Errorf("%d busy", busy)
	}
}

// counted has so many bytes and counts those read.
type counted struct{ n, most int }

func (c *counted) Read(p []byte) (int, error) {
	n := min(len(p), c.most-c.n)
	if c.n += n; n == 0 {
		return 0, io.EOF
	}
	return n, nil
}

// TestDo: what ends a leg before its answer, in which phase, and whose fault it looks like.
func TestDo(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	answer := make(chan string, 1)
	go func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			_, _ = conn.Read(make([]byte, 1000))
			_, _ = io.WriteString(conn, <-answer)
			conn.Close()
		}
	}()
	u := NewClient(DefaultTimeouts(), Upstream{}, nil)
	do := func(l *Life, addr string) (*Response, error) {
		h := u.Header()
		defer u.Recycle(h)
		h.SetRequestURI("/")
		return u.Do(l, addr, h, nil, nil)
	}
	const chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
	for _, c := range []struct {
		says   string
		status int
		body   string
		phase  string
	}{
		{"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", 200, "ok", ""},
		{"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", 200, "ok", ""},
		{"HTTP/1.1 204 No Content\r\n\r\n", 204, "", ""}, {"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n", 304, "", ""},
		{"HTTP/1.1 500 Oh\r\n\r\nto the end", 500, "to the end", ""},
		{"", 0, "", "answer"}, {"nonsense\r\n\r\n", 0, "", "answer"}, {"HTTP/1.1 103 Early Hints\r\n\r\n", 0, "", "answer"}, {"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok", 200, "", "body"},
		{"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n" + strings.Repeat("x", 100_000), 200, "", "body"},
		{chunked, 200, "", "body"}, {chunked + "3", 200, "", "body"}, {chunked + "3\r\nab", 200, "", "body"}, {chunked + "3\r\nabc", 200, "", "body"},
		{chunked + "3\r\nabc\r", 200, "", "body"}, {chunked + "3\r\nabc\r\n0\r\n", 200, "", "body"}, {chunked + "3\r\nabc\r\n0\r\n\r\n", 200, "abc", ""},
	} {
		answer <- c.says
		b, err := do(&Life{}, ln.Addr().String())
		var text []byte
		if err == nil {
			if s := b.Header.StatusCode(); s != c.status {
				t.Errorf("%q: %d", c.says, s)
			}
			text, err = b.All(1 << 20)
			b.Abort() // the other end closes it
		}
		var e *Error
		if string(text) != c.body || (err == nil) != (c.phase == "") || err != nil && (!errors.As(err, &e) || e.Phase != c.phase || !e.Gone()) {
			t.Errorf("%.100q: %.100q, %v", c.says, text, err)
		}
		if c.phase == "body" && !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("%.100q is cut: %v", c.says, err)
		}
	}
	var e *Error
	over := &Life{}
	over.End(io.EOF)
	if _, err := do(over, ln.Addr().String()); !errors.As(err, &e) || e.Phase != "connect" {
		t.Errorf("a leg that is over: %v", err)
	}
	ln2, _ := net.Listen("tcp", "127.0.0.1:0")
	ln2.Close()
	if _, err := do(&Life{}, ln2.Addr().String()); !errors.As(err, &e) || e.Phase != "connect" || !e.Gone() {
		t.Errorf("nobody is there: %v", err)
	}
	if err := u.LoadTLS(); err != nil {
		t.Fatal(err)
	}
	answer <- "no TLS at all"
	if _, err := do(&Life{}, Secure+ln.Addr().String()); !errors.As(err, &e) || e.Phase != "connect" {
		t.Errorf("it speaks no TLS: %v", err)
	}
	for err, gone := range map[error]bool{io.EOF: true, context.Canceled: false, context.DeadlineExceeded: false, os.ErrDeadlineExceeded: false} {
		if (&Error{Err: err}).Gone() != gone {
			t.Errorf("%v: gone %t", err, !gone)
		}
	}
	u.Close()
	if _, err := do(&Life{}, ln.Addr().String()); !errors.Is(err, errClosed) {
		t.Errorf("after its close: %v", err)
	}
}

// TestSent: it is known that a body is sent, and its memory free, while its answer is awaited.
func TestSent(t *testing.T) {
	var sent atomic.Bool
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		for deadline := time.Now().Add(time.Minute); !sent.Load(); time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Error("nobody says so")
				return
			}
		}
	}))
	defer s.Close()
	u := NewClient(DefaultTimeouts(), Upstream{}, nil)
	defer u.Close()
	for _, n := range []int{10, upSmall + 1} {
		h := u.Header()
		h.SetMethod("POST")
		h.SetRequestURI("/")
		sent.Store(false)
		b, err := u.Do(&Life{}, s.Listener.Addr().String(), h, [][]byte{make([]byte, n)}, &sent)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := b.All(100); err != nil || b.Header.StatusCode() != 200 {
			t.Errorf("%d bytes: %d, %v", n, b.Header.StatusCode(), err)
		}
		b.Finish()
		u.Recycle(h)
	}
}

// TestAddress: where a worker's URL leads.
func TestAddress(t *testing.T) {
	for url, want := range map[string]string{"http://h:1": "h:1", "http://h:1/": "h:1", "http://h:1/x/y": "h:1", "https://h:1": "tls:h:1", "http://[::1]:2": "[::1]:2", "http://h": "", "https://": "", "ftp://h:1": "", "h:1": "", "": ""} {
		got, err := Address(url)
		if got != want || (err == nil) != (want != "") || err != nil && !strings.Contains(err.Error(), fmt.Sprintf("%q", url)) {
			t.Errorf("%q: %q, %v", url, got, err)
		}
	}
	for addr, want := range map[string]string{"h:1": "h:1", "tls:h:1": "h:1", "member:h:1": "h:1"} {
		if Bare(addr) != want {
			t.Errorf("%s: %s", addr, Bare(addr))
		}
	}
}

// TestBadFiles: certificates that cannot be read are errors, and the old ones stay.
func TestBadFiles(t *testing.T) {
	cert, key, ca := trusttest.New(t).Member(t, "a")
	none := filepath.Join(t.TempDir(), "none")
	good := ServerTLS{Cert: cert, Key: key, ClientCA: ca}
	if err := good.Load(); err != nil {
		t.Fatal(err)
	}
	was := good.now.Load()
	for _, s := range []*ServerTLS{{Cert: none, Key: key}, {Cert: cert, Key: none}, {Cert: cert, Key: key, ClientCA: none}, {Cert: cert, Key: key, ClientCA: key}} {
		if good.Cert, good.Key, good.ClientCA = s.Cert, s.Key, s.ClientCA; good.Load() == nil || good.now.Load() != was {
			t.Errorf("%s, %s, %s are accepted", s.Cert, s.Key, s.ClientCA)
		}
	}
	for _, up := range []Upstream{{CA: none}, {CA: key}, {Cert: none, Key: key}, {Cert: cert, Key: none}} {
		u := NewClient(DefaultTimeouts(), up, nil)
		if u.LoadTLS() == nil || u.engineTLS.Load() != nil {
			t.Errorf("%+v is accepted", up)
		}
	}
}

// TestHTTPClient: what asks engines has their key, and fails as any client where nobody is.
func TestHTTPClient(t *testing.T) {
	u := NewClient(DefaultTimeouts(), Upstream{APIKey: "k", InsecureSkipVerify: true}, nil)
	if err := u.LoadTLS(); err != nil {
		t.Fatal(err)
	}
	own := &http.Client{Transport: http.NewFileTransport(http.Dir("."))}
	if u.HTTPClient(own) != own {
		t.Error("a transport of another kind is changed")
	}
	c := u.HTTPClient(&http.Client{Transport: &http.Transport{}})
	defer c.CloseIdleConnections()
	srv := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, r.Header.Get("Authorization")) }))
	resp, err := c.Get(srv.URL)
	if err != nil {
		t.Fatal(err)
	}
	if b, _ := io.ReadAll(resp.Body); string(b) != "Bearer k" {
		t.Errorf("%q", b)
	}
	resp.Body.Close()
	c.CloseIdleConnections()
	srv.Close()
	if resp, err := c.Get(srv.URL); err == nil {
		resp.Body.Close()
		t.Error("a server that is gone answers")
	}
}

// TestConfigBounds: each setting, just within its bounds and just outside.
func TestConfigBounds(t *testing.T) {
	f := func(key string, err error) {
		t.Helper()
		var k *config.KeyError
		if (err == nil) != (key == "") || err != nil && (!errors.As(err, &k) || k.Key != key || strings.Contains(err.Error(), "%!")) {
			t.Errorf("%v, want %q refused", err, key)
		}
	}
	bounds := func(key string, edit func(*Bounds)) {
		t.Helper()
		b := DefaultBounds()
		edit(&b)
		f(key, b.Validate())
	}
	bounds("", func(*Bounds) {})
	bounds("", func(b *Bounds) { *b = Bounds{1, 1024, 1024, 1, 1, 1} })
	bounds("max_conns", func(b *Bounds) { b.MaxConns = 0 })
	bounds("max_body_bytes", func(b *Bounds) { b.MaxBodyBytes = 1023 })
	bounds("max_header_bytes", func(b *Bounds) { b.MaxHeaderBytes = 1023 })
	bounds("read_timeout", func(b *Bounds) { b.ReadTimeout = 0 })
	bounds("idle_timeout", func(b *Bounds) { b.IdleTimeout = 0 })
	bounds("stall_timeout", func(b *Bounds) { b.StallTimeout = 0 })
	times := func(key string, edit func(*Timeouts)) {
		t.Helper()
		c := DefaultTimeouts()
		edit(&c)
		f(key, c.Validate())
	}
	times("", func(*Timeouts) {})
	times("", func(c *Timeouts) { *c = Timeouts{1, 1, 1, 1, 0} })
	times("idle_conns", func(c *Timeouts) { c.IdleConns = -1 })
	times("connect_timeout", func(c *Timeouts) { c.ConnectTimeout = 0 })
	times("write_timeout", func(c *Timeouts) { c.WriteTimeout = 0 })
	times("first_byte_timeout", func(c *Timeouts) { c.FirstByteTimeout = 0 })
	times("chunk_timeout", func(c *Timeouts) { c.ChunkTimeout = 0 })
	for key, list := range map[string][]Upstream{
		"":                     {{}, {Cert: "a", Key: "b"}, {InsecureSkipVerify: true, APIKey: "k"}, {CA: "a", ServerName: "b"}},
		"cert":                 {{Cert: "a"}, {Key: "a"}},
		"insecure_skip_verify": {{InsecureSkipVerify: true, CA: "a"}, {InsecureSkipVerify: true, ServerName: "a"}},
		"api_key":              {{APIKey: "a\nb"}, {APIKey: "\r"}, {APIKey: "a\x00"}},
	} {
		for _, u := range list {
			f(key, u.Validate())
		}
	}
}

// TestRefusals: the status of each thing that can be wrong with a request.
func TestRefusals(t *testing.T) {
	b := DefaultBounds()
	for _, c := range []struct {
		err    error
		status int
		says   string
	}{
		{ErrTwoLengths, 400, "both Content-Length"}, {fmt.Errorf("x: %w", ErrCoding), 400, "want chunked"}, {fasthttp.ErrBodyTooLarge, 413, fmt.Sprint(b.MaxBodyBytes)},
		{&fasthttp.ErrSmallBuffer{}, 431, fmt.Sprint(b.MaxHeaderBytes)}, {os.ErrDeadlineExceeded, 408, "30s"}, {io.EOF, 400, "malformed"},
	} {
		if e := b.Refusal(c.err); e.Status != c.status || !strings.Contains(e.Message, c.says) || strings.Contains(e.Message, "%!") {
			t.Errorf("%v: %v", c.err, e)
		}
	}
	for id, kept := range map[string]bool{"a": true, "my.id-1_Z": true, strings.Repeat("a", 128): true, strings.Repeat("a", 129): false, "": false, "a b": false, "a/b": false, "é": false} {
		if got := RequestID([]byte(id)); (got == id) != kept || !kept && (!strings.HasPrefix(got, "req-") || len(got) != len("req-")+28) {
			t.Errorf("%q: %q", id, got)
		}
	}
	for status, want := range map[int]int{200: 0, 429: 1, 503: 1, 500: 0, 502: 0, math.MaxInt: 0} {
		if RetryAfter(status) != want {
			t.Errorf("%d: %d", status, RetryAfter(status))
		}
	}
}
