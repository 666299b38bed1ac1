package lobby

import (
	"net"
	"testing"
	"testing/synctest"
	"time"
)

// caller is a connection from somewhere.
type caller struct {
	net.Conn
	from   net.Addr
	closed bool
}

func (c *caller) RemoteAddr() net.Addr { return c.from }
func (c *caller) Close() error         { c.closed = true; return nil }

func from(addr string) *caller {
	a, err := net.ResolveTCPAddr("tcp", addr)
	if err != nil {
		panic(err)
	}
	return &caller{from: a}
}

// Whoever has most connections loses its oldest one; who has left is nobody's matter.
func TestLobby(t *testing.T) {
	l := New(4)
	friend := from("10.0.0.1:1")
	l.Enter(friend)
	var crowd []*caller
	for range 20 {
		c := from("10.0.0.2:7")
		l.Enter(c)
		crowd = append(crowd, c)
	}
	if friend.closed {
		t.Error("a crowd from one place has driven out who came from another")
	}
	for i, c := range crowd {
		if want := i < len(crowd)-3; c.closed != want {
			t.Errorf("caller %d of the crowd: closed %t", i, c.closed)
		}
	}

	l = New(4)
	a := from("10.0.0.1:1")
	g := l.Enter(a)
	l.Leave(g)
	l.Leave(g)
	for range 10 {
		l.Enter(from("10.0.0.2:7"))
	}
	if a.closed || len(l.guests) != 4 {
		t.Errorf("who has left is closed %t; %d are there", a.closed, len(l.guests))
	}

	l = New(3) // a host has as many addresses of its IPv6 network as it likes
	a = from("[2001:db8:1::1]:1")
	l.Enter(a)
	b := from("[2001:db8:2:3::1]:1")
	l.Enter(b)
	l.Enter(from("[2001:db8:2:3:ffff::2]:1"))
	l.Enter(from("[2001:db8:2:3::3]:1"))
	if a.closed || !b.closed {
		t.Error("one network counts as several")
	}

	l = New(2) // no network at all
	u := &caller{from: &net.UnixAddr{Net: "unix"}}
	l.Enter(u)
	l.Enter(&caller{from: &net.UnixAddr{Net: "unix"}})
	l.Enter(&caller{})
	if !u.closed {
		t.Error("the oldest has not made room")
	}
}

// TestStay: however fast a crowd comes, everybody has time to say who he is, and
// who has said it in that time lets the next one in at once.
func TestStay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := New(4)
		friend, start := from("10.0.0.2:1"), time.Now()
		g := l.Enter(friend)
		for range 3 {
			l.Enter(from("10.0.0.2:7"))
		}
		entered := make(chan struct{})
		go func() {
			l.Enter(from("10.0.0.2:7"))
			close(entered)
		}()
		synctest.Wait()
		if friend.closed || !l.Leave(g) {
			t.Error("it was put out before its time")
		}
		<-entered
		if took := time.Since(start); took != stay || friend.closed {
			t.Errorf("after %v, closed %t", took, friend.closed)
		}
		next := time.Now()
		for range 8 {
			l.Enter(from("10.0.0.2:7"))
		}
		if took := time.Since(next); took < stay || took > 3*stay {
			t.Errorf("eight more took %v", took)
		}
	})
}
