package clientwatch_test

import (
	"crypto/tls"
	"fmt"
	"net"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/clientwatch"
)

func newWatcher(t *testing.T) *clientwatch.Watcher {
	t.Helper()
	w, err := clientwatch.New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := w.Close(); err != nil {
			t.Error(err)
		}
	})
	return w
}

// pair returns both ends of a loopback connection.
func pair(t testing.TB) (server net.Conn, client *net.TCPConn) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	c, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	s, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close(); c.Close() })
	return s, c.(*net.TCPConn)
}

// expect waits for a signal on ch.
func expect(t *testing.T, ch <-chan struct{}) {
	t.Helper()
	select {
	case <-ch:
	case <-time.After(time.Minute):
		t.Fatal("not noticed")
	}
}

func TestPeerLeaves(t *testing.T) {
	for name, leave := range map[string]func(c *net.TCPConn){
		"close":      func(c *net.TCPConn) { c.Close() },
		"reset":      func(c *net.TCPConn) { c.SetLinger(0); c.Close() },
		"half-close": func(c *net.TCPConn) { c.CloseWrite() },
		"close with unread data": func(c *net.TCPConn) {
			c.Write([]byte("GET / HTTP/1.1\r\n"))
			c.Close()
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWatcher(t)
			s, c := pair(t)
			gone := make(chan struct{})
			defer w.Watch(s, func() { close(gone) })()
			leave(c)
			expect(t, gone)
		})
	}
}

func TestGoneBeforeWatch(t *testing.T) {
	w := newWatcher(t)
	s, c := pair(t)
	c.Close()
	gone := make(chan struct{})
	w.Watch(s, func() { close(gone) })
	expect(t, gone)

	s, _ = pair(t)
	s.Close()
	gone = make(chan struct{})
	w.Watch(s, func() { close(gone) })
	expect(t, gone)
}

func TestDataIsNotRead(t *testing.T) {
	w := newWatcher(t)
	s, c := pair(t)
	defer w.Watch(s, func() { t.Error("gone") })()
	if _, err := c.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 5)
	if _, err := s.Read(b); err != nil || string(b) != "hello" {
		t.Errorf("%q, %v", b, err)
	}
}

// TestStop: a stopped watch does not fire, and the same connection can be
// watched again, as for the next request on it.
func TestStop(t *testing.T) {
	w := newWatcher(t)
	s, c := pair(t)
	for range 10 {
		w.Watch(s, func() { t.Error("a stopped watch fired") })()
	}
	gone := make(chan struct{})
	w.Watch(s, func() { close(gone) })
	c.Close()
	expect(t, gone)
}

func TestTLS(t *testing.T) {
	w := newWatcher(t)
	srv := httptest.NewUnstartedServer(nil) // for its certificate
	srv.StartTLS()
	defer srv.Close()
	s, c := pair(t)
	server, client := tls.Server(s, srv.TLS), tls.Client(c, &tls.Config{InsecureSkipVerify: true})
	go client.Handshake()
	if err := server.Handshake(); err != nil {
		t.Fatal(err)
	}
	gone := make(chan struct{})
	w.Watch(server, func() { close(gone) })
	client.Close()
	expect(t, gone)
}

func TestNoDescriptor(t *testing.T) {
	w := newWatcher(t)
	a, b := net.Pipe()
	defer a.Close()
	w.Watch(a, func() { t.Error("gone") })()
	b.Close()
}

// TestReuse churns connections so that descriptor numbers are reused at once,
// while watches of closed connections are stopped late: each live watch must
// fire exactly when its own client leaves.
func TestReuse(t *testing.T) {
	w := newWatcher(t)
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			for i := range 200 {
				s, c := pairErr()
				if s == nil {
					t.Error("pair")
					return
				}
				var early atomic.Bool
				early.Store(true)
				gone := make(chan string, 1)
				stop := w.Watch(s, func() {
					if early.Load() {
						gone <- fmt.Sprintf("%d/%d fired early", g, i)
						return
					}
					gone <- ""
				})
				if i%2 == 0 { // the server closes first; the late stop must not harm whoever has the number now
					s.Close()
					c.Close()
					stop()
					continue
				}
				early.Store(false)
				c.Close()
				select {
				case msg := <-gone:
					if msg != "" {
						t.Error(msg)
					}
				case <-time.After(time.Minute):
					t.Errorf("%d/%d not noticed", g, i)
				}
				stop()
				s.Close()
			}
		})
	}
	wg.Wait()
}

func pairErr() (server, client net.Conn) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, nil
	}
	defer ln.Close()
	if client, err = net.Dial("tcp", ln.Addr().String()); err != nil {
		return nil, nil
	}
	if server, err = ln.Accept(); err != nil {
		return nil, nil
	}
	return server, client
}

func TestClose(t *testing.T) {
	w, err := clientwatch.New()
	if err != nil {
		t.Fatal(err)
	}
	s, c := pair(t)
	w.Watch(s, func() { t.Error("fired after Close") })
	for range 2 {
		if err := w.Close(); err != nil {
			t.Error(err)
		}
	}
	c.Close()
	w.Watch(s, func() { t.Error("fired after Close") })()
}

func BenchmarkWatch(b *testing.B) {
	w, err := clientwatch.New()
	if err != nil {
		b.Fatal(err)
	}
	defer w.Close()
	s, _ := pair(b)
	b.ReportAllocs()
	for b.Loop() {
		w.Watch(s, func() {})()
	}
}
