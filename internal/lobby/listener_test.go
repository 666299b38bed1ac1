package lobby

import (
	"net"
	"testing"
	"testing/synctest"
	"time"
)

// pipes is a listener of net.Pipe's connections.
type pipes chan net.Conn

func (p pipes) Accept() (net.Conn, error) {
	c, ok := <-p
	if !ok {
		return nil, net.ErrClosed
	}
	return c, nil
}
func (p pipes) Close() error   { return nil }
func (p pipes) Addr() net.Addr { return &net.TCPAddr{} }

// over is a connection over another one, as TLS is.
type over struct{ net.Conn }

func (o over) NetConn() net.Conn { return o.Conn }

// TestListener: guests are put out by later ones, members never; a guest's read ends
// after the patience, a member's when it wanted.
func TestListener(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := make(pipes, 64)
		l := New(2)
		ln := l.Listener(p, 5*time.Second)
		accept := func() (here net.Conn, there net.Conn) {
			t.Helper()
			a, b := net.Pipe()
			p <- a
			c, err := ln.Accept()
			if err != nil {
				t.Fatal(err)
			}
			return c, b
		}
		open := func(c net.Conn) bool {
			if err := c.SetReadDeadline(time.Now().Add(time.Millisecond)); err != nil {
				return false
			}
			_, err := c.Read(make([]byte, 1))
			n, ok := err.(net.Error)
			return ok && n.Timeout()
		}
		member, _ := accept()
		Admit(over{over{member}})
		Admit(member)
		Admit(nil)
		Admit(over{&net.TCPConn{}})
		first, _ := accept()
		second, _ := accept()
		third, _ := accept() // first is put out
		if open(first) || !open(second) || !open(third) || !open(member) {
			t.Error("who was put out?")
		}
		// A fifth has to wait until those who were put out have ended.
		accepted := make(chan net.Conn, 1)
		fourth, _ := accept()
		go func() {
			c, _ := accept()
			accepted <- c
		}()
		synctest.Wait()
		if len(accepted) > 0 {
			t.Error("five guests at once, of two")
		}
		first.Close()
		first.Close()
		fifth := <-accepted
		for _, c := range []net.Conn{second, third, fourth} {
			c.Close()
		}
		// Patience.
		if err := fifth.SetReadDeadline(time.Now().Add(time.Hour)); err != nil {
			t.Fatal(err)
		}
		begin := time.Now()
		if _, err := fifth.Read(make([]byte, 1)); err == nil || time.Since(begin) != 5*time.Second {
			t.Errorf("a guest's read took %v: %v", time.Since(begin), err)
		}
		if err := fifth.SetDeadline(time.Now().Add(time.Hour)); err != nil {
			t.Fatal(err)
		}
		begin = time.Now()
		Admit(fifth)
		if _, err := fifth.Read(make([]byte, 1)); err == nil || time.Since(begin) != time.Hour {
			t.Errorf("a member's read took %v: %v", time.Since(begin), err)
		}
		if err := fifth.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
		begin = time.Now()
		if _, err := fifth.Read(make([]byte, 1)); err == nil || time.Since(begin) != time.Minute {
			t.Errorf("and then %v: %v", time.Since(begin), err)
		}
		// Whoever waits for a place hears of the end.
		for range 4 {
			accept()
		}
		end := make(chan error, 1)
		go func() {
			_, err := ln.Accept()
			end <- err
		}()
		synctest.Wait()
		ln.Close()
		if err := <-end; err == nil {
			t.Error("accepted after the end")
		}
	})
}
