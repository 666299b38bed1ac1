package input

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/e2e/cluster"
)

const head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\n"

// dial connects as a client that does what no HTTP library lets it do.
func (s *system) dial(t *testing.T) *net.TCPConn {
	t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(s.URL, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	conn.SetDeadline(time.Now().Add(time.Minute))
	return conn.(*net.TCPConn)
}

// text sends a string.
func text(s string) func(io.Writer) { return func(w io.Writer) { _, _ = io.WriteString(w, s) } }

// endless sends a start and then up to 100 MB more, for as long as it may.
func endless(start string) func(io.Writer) {
	return func(w io.Writer) {
		_, _ = io.WriteString(w, start)
		buf := []byte(strings.Repeat("x", 64<<10))
		for range 100 << 20 / len(buf) {
			if _, err := w.Write(buf); err != nil {
				return
			}
		}
	}
}

// drip sends a start and then a byte at a time, until it is cut off.
func drip(start, rest string) func(io.Writer) {
	return func(w io.Writer) {
		_, err := io.WriteString(w, start)
		for i := 0; err == nil; i++ {
			time.Sleep(50 * time.Millisecond) // the slow client itself
			_, err = io.WriteString(w, rest[i%len(rest):i%len(rest)+1])
		}
	}
}

// TestWire: what only raw bytes can do. Every one is answered, or closed
// without an answer where status is 0, in bounded time.
func TestWire(t *testing.T) {
	t.Parallel()
	s := start(t)
	f := func(name string, send func(io.Writer), status int) {
		t.Helper()
		t.Run(name, func(t *testing.T) {
			if status == http.StatusRequestTimeout { // waits, beside the others
				t.Parallel()
			}
			conn := s.dial(t)
			wrote := make(chan struct{})
			go func() { defer close(wrote); send(conn) }()
			resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
			switch {
			case status == 0 && err == nil:
				t.Errorf("answered %d", resp.StatusCode)
			case status == 0 && os.IsTimeout(err):
				t.Error("left hanging")
			case status > 0 && err != nil:
				t.Errorf("no answer: %v", err)
			case status > 0:
				check(t, resp, status, "")
			}
			conn.Close()
			<-wrote
			s.undisturbed(t)
		})
	}
	length := func(n int) string { return head + "Content-Length: " + strconv.Itoa(n) + "\r\n\r\n" }
	const chunked = head + "Transfer-Encoding: chunked\r\n\r\n"
	chunks := func(body string, size int) string {
		var b strings.Builder
		for len(body) > 0 {
			n := min(size, len(body))
			fmt.Fprintf(&b, "%x;note=1\r\n%s\r\n", n, body[:n])
			body = body[n:]
		}
		return b.String() + "0\r\n\r\n"
	}

	f("no HTTP", text("hello\r\n\r\n"), 400)
	f("TLS on a plain port", text("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"), 400)
	f("HTTP/2 preface", text("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), 505)
	f("unknown version", text("GET /health HTTP/9.9\r\n\r\n"), 505)
	f("no version", text("POST /v1/completions\r\n\r\n"), 400)
	f("header without colon", text(head+"nonsense\r\nContent-Length: 2\r\n\r\n{}"), 400)
	f("space before the colon", text(head+"Content-Length : 2\r\n\r\n{}"), 400)
	f("space in a header's name", text(head+"x a: 1\r\n"+"Content-Length: 2\r\n\r\n{}"), 400)
	f("zero byte in a header", text(head+"x-a: \x00\r\nContent-Length: 2\r\n\r\n{}"), 400)

	f("length is text", text(head+"Content-Length: x\r\n\r\n"), 400)
	f("length is negative", text(head+"Content-Length: -1\r\n\r\n"), 400)
	f("length has a sign", text(head+"Content-Length: +2\r\n\r\n{}"), 400)
	f("two lengths", text(head+"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}"), 400)
	f("length and chunks", text(head+"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"), 400)
	f("unknown transfer encoding", text(head+"Transfer-Encoding: gzip\r\n\r\n"), 400)
	f("length above int64", text(head+"Content-Length: 99999999999999999999\r\n\r\n"), 400)
	f("length of exabytes", endless(length(1<<62)), 413)
	f("length of exabytes, and nothing", text(length(1<<62)), 413)
	f("announced 100 MB", endless(length(100<<20)), 413)
	f("chunked 100 MB", endless(chunked+"6400000\r\n"), 413)
	f("no body", text(head+"Content-Length: 0\r\n\r\n"), 400)
	f("no length", text(head+"\r\n"), 400)

	f("chunks", text(chunked+chunks(valid, 7)), 200)
	f("one byte a chunk", text(chunked+chunks(valid, 1)), 200)
	f("chunk size is no number", text(chunked+"zz\r\n"+valid), 400)
	f("chunk size is negative", text(chunked+"-5\r\n"+valid), 400)
	f("chunk size overflows", text(chunked+"ffffffffffffffffff\r\n"+valid), 400)
	f("chunk without its end", text(chunked+"2\r\n{}{}\r\n0\r\n\r\n"), 400)
	f("endless chunk size", endless(chunked+strings.Repeat("0", 1<<16)), 400)

	f("too many headers", text(head+strings.Repeat("x-a: b\r\n", 10_000)+"Content-Length: 2\r\n\r\n{}"), 431)
	f("one huge header", text(head+"x-a: "+strings.Repeat("b", 100_000)+"\r\nContent-Length: 2\r\n\r\n{}"), 431)
	f("endless header", endless(head+"x-a: "), 431)
	f("endless request line", endless("GET /"), 431)
	f("header flood", func(w io.Writer) {
		_, err := io.WriteString(w, head)
		for i := 0; err == nil && i < 1<<20; i++ {
			_, err = fmt.Fprintf(w, "x-%d: %d\r\n", i, i)
		}
	}, 431)

	f("slow header", text("POST /v1/comp"), 408)
	f("slow header, drop by drop", drip(head+"x-a: ", "b"), 408)
	f("slow body", text(length(len(valid))+valid[:10]), 408)
	f("slow body, drop by drop", drip(length(1000), " "), 408)
	f("slow chunk", text(chunked+"5\r\n{"), 408)
	f("slow chunks, drop by drop", drip(chunked, "1\r\n \r\n"), 408)
	f("nothing at all", text(""), 408)

	f("half-closed at once", half(""), 0)
	f("half-closed within the header", half(head), 400)
	f("half-closed within the body", half(length(len(valid))+valid[:10]), 400)
	f("half-closed within a chunk", half(chunked+"5\r\n{"), 400)
	f("reset within the body", func(w io.Writer) {
		_, _ = io.WriteString(w, length(len(valid))+valid[:10])
		_ = w.(*net.TCPConn).SetLinger(0)
		w.(*net.TCPConn).Close()
	}, 0)

	f("unknown path", text("GET /v2/nothing HTTP/1.1\r\nHost: x\r\n\r\n"), 404)
	f("traversal", text("GET /v1/../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n"), 404)
	f("the workers' own path", text("POST /xpyd/v1/prefill HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"), 404)
	f("the admin listener's path", text("GET /debug/ledger HTTP/1.1\r\nHost: x\r\n\r\n"), 404)
	f("GET", text("GET /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n"), 405)
	f("DELETE", text("DELETE /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n"), 405)
	f("a method of its own", text("FROB /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n"), 405)
	f("POST of models", text("POST /v1/models HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"), 405)
	f("gzip", text(head+"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}"), 415)

	// As with nginx, a client that says that it is done has left: before its
	// answer begins it gets a 499, and later the stream is cut.
	t.Run("half-closed while it should listen", func(t *testing.T) {
		conn := s.dial(t)
		half(length(len(long)) + long)(conn)
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			t.Fatal(err)
		}
		if resp.StatusCode != http.StatusOK {
			check(t, resp, 499, "")
		} else if body, err := io.ReadAll(resp.Body); !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("a whole answer of %d bytes, %v", len(body), err)
		}
		conn.Close()
		s.undisturbed(t)
	})

	t.Run("gone after the request", func(t *testing.T) { // the answer may have begun
		conn := s.dial(t)
		text(length(len(long)) + long)(conn)
		conn.Close()
		s.undisturbed(t)
	})

	t.Run("expects to be told to go on", func(t *testing.T) {
		conn := s.dial(t)
		text(fmt.Sprintf("%sExpect: 100-continue\r\nContent-Length: %d\r\n\r\n", head, len(valid)))(conn)
		in := bufio.NewReader(conn)
		if line, err := in.ReadString('\n'); err != nil || line != "HTTP/1.1 100 Continue\r\n" {
			t.Fatalf("%q %v", line, err)
		}
		_, _ = in.ReadString('\n')
		text(valid)(conn)
		resp, err := http.ReadResponse(in, nil)
		if err != nil {
			t.Fatal(err)
		}
		check(t, resp, 200, "")
	})
}

// half sends a text and closes the sending side only.
func half(s string) func(io.Writer) {
	return func(w io.Writer) {
		_, _ = io.WriteString(w, s)
		_ = w.(*net.TCPConn).CloseWrite()
	}
}

// TestHeaders: headers of ours that a client may set wrongly, or not at all.
func TestHeaders(t *testing.T) {
	s := start(t)
	f := func(key, value string, status int, param string) {
		t.Helper()
		t.Run(key+" "+fmt.Sprintf("%.20q", value), func(t *testing.T) {
			req, err := http.NewRequestWithContext(t.Context(), "POST", s.URL+completions, strings.NewReader(valid))
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set(key, value)
			resp, err := s.client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			check(t, resp, status, param)
			if id := resp.Header.Get("X-Request-Id"); key == "x-request-id" && id == value {
				t.Errorf("the id %q was taken", id)
			}
			s.undisturbed(t)
		})
	}
	f("x-request-timeout-ms", "soon", 400, "x-request-timeout-ms")
	f("x-request-timeout-ms", "0", 400, "x-request-timeout-ms")
	f("x-request-timeout-ms", "-1", 400, "x-request-timeout-ms")
	f("x-request-timeout-ms", "99999999999999999999", 400, "x-request-timeout-ms")
	f("x-request-id", "a b", 200, "")
	f("x-request-id", strings.Repeat("a", 129), 200, "")
	f("x-request-id", "ä", 200, "")
	f("x-request-id", `"><script>`, 200, "")
	f("Authorization", "Bearer "+strings.Repeat("x", 8000), 200, "")
	f("Content-Type", "text/plain", 200, "")
	// What links legs inside the fleet is not believed from outside.
	f("x-xpyd-link", "00000000000000000000000000000000", 200, "")
	f("x-xpyd-prefill-kv", "10.255.255.1:1", 200, "")
	f("x-xpyd-probe", "1", 200, "")
	f("x-xpyd-seed", "x", 200, "")
	f("x-xpyd-deadline-ms", "1", 200, "")
}

// TestPipelining: answers come in the order of the requests, and a bad one
// does not spoil the next.
func TestPipelining(t *testing.T) {
	s := start(t)
	conn := s.dial(t)
	request := func(body string) string {
		return fmt.Sprintf("%sContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", head, len(body), body)
	}
	go text(request(valid) + request(`{"n":0}`) + request(`nonsense`) + request(valid) + "GET /health HTTP/1.1\r\nHost: x\r\n\r\n")(conn)
	in := bufio.NewReader(conn)
	for i, want := range []int{200, 400, 400, 200, 200} {
		resp, err := http.ReadResponse(in, nil)
		if err != nil {
			t.Fatalf("answer %d: %v", i, err)
		}
		body, err := io.ReadAll(resp.Body)
		if err != nil || resp.StatusCode != want || i%3 == 0 && !strings.Contains(string(body), validText) {
			t.Errorf("answer %d: %d %s %v", i, resp.StatusCode, body, err)
		}
	}
}

// TestManySlow: clients that never finish what they began cost a connection
// each until they are told 408, and nobody else anything.
func TestManySlow(t *testing.T) {
	t.Parallel()
	s := start(t)
	before := s.resident(t)
	var conns []*net.TCPConn
	for range 200 {
		conn := s.dial(t)
		text(head + "Content-Length: 33000000\r\n\r\n{")(conn)
		conns = append(conns, conn)
	}
	s.undisturbed(t)
	for _, conn := range conns {
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			t.Fatal(err)
		}
		check(t, resp, 408, "")
		conn.Close()
	}
	s.undisturbed(t)
	if grown := s.resident(t) - before; grown > 64<<20 {
		t.Errorf("announcing 200 times 33 MB cost the router %d MiB", grown>>20)
	}
}

// TestHugeBodies: 100 MB that come, announced or not, are refused without
// being kept.
func TestHugeBodies(t *testing.T) {
	s := start(t)
	before := s.resident(t)
	for range 3 {
		conns := make(chan error)
		starts := []string{"Content-Length: 104857600\r\n\r\n", "Transfer-Encoding: chunked\r\n\r\n6400000\r\n"}
		for _, framing := range starts {
			conn := s.dial(t)
			go func() {
				go endless(head + framing)(conn)
				resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
				if err == nil && resp.StatusCode != 413 {
					err = fmt.Errorf("status %d", resp.StatusCode)
				}
				conns <- err
			}()
		}
		for range starts {
			if err := <-conns; err != nil {
				t.Error(err)
			}
		}
		s.undisturbed(t)
	}
	// The limit is 32 MiB: what comes unannounced is read so far.
	if grown := s.resident(t) - before; grown > 160<<20 {
		t.Errorf("the router took %d MiB", grown>>20)
	}
}

// resident is the most memory that the router's process had, in bytes.
func (s *system) resident(t *testing.T) int {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.PID()))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.SplitSeq(string(b), "\n") {
		if rest, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			kib, err := strconv.Atoi(strings.TrimSpace(strings.TrimSuffix(rest, "kB")))
			if err != nil {
				t.Fatal(err)
			}
			return kib << 10
		}
	}
	t.Fatal("no VmHWM")
	return 0
}

// TestStalledReader: a client that does not read its stream holds its own
// request up and no other, and leaves nothing behind.
func TestStalledReader(t *testing.T) {
	s := start(t)
	conn := s.dial(t)
	if err := conn.SetReadBuffer(4 << 10); err != nil {
		t.Fatal(err)
	}
	body := strings.Replace(long, `"max_tokens":300`, `"max_tokens":300,"n":64,"logprobs":20`, 1)
	text(fmt.Sprintf("%sContent-Length: %d\r\n\r\n%s", head, len(body), body))(conn)
	time.Sleep(300 * time.Millisecond) // the stalled client itself
	s.undisturbed(t)
	conn.Close()
	cluster.Wait(t, 2*time.Second, "valid requests go on", func() error {
		if got := cluster.Post(t.Context(), s.client, s.URL+completions, valid); !got.Good() {
			return fmt.Errorf("%v", got)
		}
		return nil
	})
}
