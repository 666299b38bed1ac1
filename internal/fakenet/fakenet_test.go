package fakenet_test

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/internal/fakenet"
)

const delay = 10 * time.Millisecond

// pair connects b to a.
func pair(t *testing.T) (a, b *fakenet.Host, server, client net.Conn) {
	t.Helper()
	n := fakenet.New(delay, 8)
	a, b = n.Host("10.0.0.1"), n.Host("10.0.0.2")
	ln, err := a.Listen("tcp", "10.0.0.1:80")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	client = dial(t, b)
	if server, err = ln.Accept(); err != nil {
		t.Fatal(err)
	}
	return a, b, server, client
}

func dial(t *testing.T, from *fakenet.Host) net.Conn {
	t.Helper()
	c, err := from.DialContext(t.Context(), "tcp", "10.0.0.1:80")
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func read(c net.Conn) (string, error) {
	b := make([]byte, 16)
	n, err := c.Read(b)
	return string(b[:n]), err
}

// TestDelay: bytes take their time, also many at once, and what was written before a close arrives.
func TestDelay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, _, server, client := pair(t)
		if server.RemoteAddr().String() != client.LocalAddr().String() || client.RemoteAddr().String() != "10.0.0.1:80" {
			t.Errorf("%v - %v, %v - %v", client.LocalAddr(), client.RemoteAddr(), server.LocalAddr(), server.RemoteAddr())
		}
		began := time.Now()
		go func() {
			_, _ = io.WriteString(client, strings.Repeat("x", 20)) // what arrives is looked at
			client.Close()
		}()
		all, err := io.ReadAll(server)
		if err != nil || len(all) != 20 {
			t.Errorf("%q, %v", all, err)
		}
		if took := time.Since(began); took != 3*delay { // three windows of 8 bytes
			t.Errorf("took %v", took)
		}
		if _, err := server.Write([]byte("late")); !errors.Is(err, syscall.EPIPE) {
			t.Errorf("write to who has left: %v", err)
		}
	})
}

// TestSwift: connections to such a port take no time.
func TestSwift(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := fakenet.New(delay, 8)
		n.Swift(80)
		a, b := n.Host("10.0.0.1"), n.Host("10.0.0.2")
		ln, err := a.Listen("tcp", "10.0.0.1:80")
		if err != nil {
			t.Fatal(err)
		}
		defer ln.Close()
		began := time.Now()
		client := dial(t, b)
		server, err := ln.Accept()
		if err != nil {
			t.Fatal(err)
		}
		_, _ = client.Write([]byte("hello")) // what arrives is looked at
		if got, err := read(server); got != "hello" || err != nil || time.Since(began) != 0 {
			t.Errorf("%q, %v after %v", got, err, time.Since(began))
		}
	})
}

// TestDeadlines: both directions honour them.
func TestDeadlines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, _, server, client := pair(t)
		began := time.Now()
		if err := server.SetDeadline(began.Add(time.Second)); err != nil {
			t.Fatal(err)
		}
		if _, err := read(server); !errors.Is(err, os.ErrDeadlineExceeded) || time.Since(began) != time.Second {
			t.Errorf("%v after %v", err, time.Since(began))
		}
		if n, err := client.Write(make([]byte, 8)); n != 8 || err != nil {
			t.Error(n, err)
		}
		if err := client.SetWriteDeadline(time.Now().Add(time.Second)); err != nil {
			t.Fatal(err)
		}
		var late net.Error
		if n, err := client.Write(make([]byte, 8)); n != 0 || !errors.As(err, &late) || !late.Timeout() {
			t.Errorf("%d bytes beyond the limit, %v", n, err)
		}
	})
}

// TestStop: a stopped host takes connections and says nothing; when it goes on, all arrives.
func TestStop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b, server, client := pair(t)
		a.Stop()
		other := dial(t, b)
		if _, err := server.Write([]byte("held")); err != nil {
			t.Fatal(err)
		}
		if _, err := client.Write([]byte("hello")); err != nil {
			t.Fatal(err)
		}
		for _, c := range []net.Conn{client, server, other} {
			if err := c.SetReadDeadline(time.Now().Add(time.Second)); err != nil {
				t.Fatal(err)
			}
			if got, err := read(c); !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("while it is stopped: %q, %v", got, err)
			}
			_ = c.SetReadDeadline(time.Time{}) // never fails
		}
		if _, err := a.DialContext(t.Context(), "tcp", "10.0.0.1:80"); err == nil {
			t.Error("it dials")
		}
		a.Continue()
		for c, want := range map[net.Conn]string{client: "held", server: "hello"} {
			if got, err := read(c); got != want || err != nil {
				t.Errorf("when it goes on: %q, %v", got, err)
			}
		}
	})
}

// TestCrash: peers get what a host had sent before it was stopped, and then its end, or a reset; its
// address is free.
func TestCrash(t *testing.T) {
	for _, reset := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			a, b, server, client := pair(t)
			var gone atomic.Int32
			client.(*fakenet.Conn).OnPeerClose(func() { gone.Add(1) })
			_, _ = server.Write([]byte("sent"))
			a.Stop()
			_, _ = server.Write([]byte("held"))
			time.Sleep(delay)
			a.Crash(reset)
			if _, err := server.Write([]byte("x")); err == nil {
				t.Error("a crashed host writes")
			}
			all, err := io.ReadAll(client)
			if want := map[bool]string{false: "sent"}[reset]; string(all) != want || errors.Is(err, syscall.ECONNRESET) != reset {
				t.Errorf("%q, %v", all, err)
			}
			if _, err := b.DialContext(t.Context(), "tcp", "10.0.0.1:80"); !errors.Is(err, syscall.ECONNREFUSED) {
				t.Errorf("dial: %v", err)
			}
			if _, err := a.Listen("tcp", "10.0.0.1:81"); err == nil {
				t.Error("it listens")
			}
			time.Sleep(delay)
			synctest.Wait()
			if n := gone.Load(); n != 1 {
				t.Errorf("its end was told %d times", n)
			}
		})
	}
}

// TestCut: only the connections that are meant are reset.
func TestCut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b, server, client := pair(t)
		time.Sleep(time.Minute)
		other := dial(t, b)
		a.Cut(func(c *fakenet.Conn) bool { return c.Port() == 80 && time.Since(c.Since()) > time.Second })
		if _, err := read(client); !errors.Is(err, syscall.ECONNRESET) {
			t.Error(err)
		}
		if _, err := read(server); !errors.Is(err, syscall.ECONNRESET) {
			t.Error(err)
		}
		if _, err := other.Write([]byte("x")); err != nil {
			t.Error(err)
		}
	})
}

// TestNobody: who is not there cannot be reached, and dialling ends with its context.
func TestNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, b, _, _ := pair(t)
		for addr, want := range map[string]error{"10.0.0.9:80": syscall.EHOSTUNREACH, "10.0.0.1:81": syscall.ECONNREFUSED, "10.0.0.1": nil} {
			if _, err := b.DialContext(t.Context(), "tcp", addr); err == nil || want != nil && !errors.Is(err, want) {
				t.Errorf("%s: %v", addr, err)
			}
		}
		ctx, cancel := context.WithTimeout(t.Context(), delay)
		defer cancel()
		if _, err := b.DialContext(ctx, "tcp", "10.0.0.1:80"); !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
		if _, err := b.Listen("tcp", "10.0.0.1:80"); !errors.Is(err, syscall.EADDRNOTAVAIL) {
			t.Error(err)
		}
	})
}
