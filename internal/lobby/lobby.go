// Package lobby keeps a port's strangers apart from its members, so that no
// number of them keeps a member out.
package lobby

import (
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Lobby holds a listener's connections that have not proved yet to be of the fleet. They have
// places of their own, so that strangers take none of a member's. There is always room for
// one more: of the source with the most guests, the oldest goes. A member needs its place for
// one round trip, so silent strangers keep none out.
type Lobby struct {
	most int

	mu     sync.Mutex
	guests []*Guest // in order of arrival
}

// New makes a lobby with so many places, at least one.
func New(most int) *Lobby { return &Lobby{most: max(1, most)} }

// stay is how long a guest may stay at least. A member's first bytes come with its
// connection, but its goroutine must get to run to read them. Faster crowds wait in the
// kernel's queue.
const stay = 10 * time.Millisecond

// Guest is one connection in a lobby.
type Guest struct {
	conn   net.Conn
	source netip.Prefix // of a host; zero: this machine, not over a network
	since  time.Time
}

// Enter lets a connection in. It may close another one, after waiting (stay). The caller
// makes sure that it leaves.
func (l *Lobby) Enter(c net.Conn) *Guest {
	g := &Guest{conn: c, source: sourceOf(c.RemoteAddr())}
	l.mu.Lock()
	defer l.mu.Unlock()
	for len(l.guests) >= l.most {
		at := l.longest()
		if early := stay - time.Since(l.guests[at].since); early > 0 {
			l.mu.Unlock()
			<-time.After(early)
			l.mu.Lock()
			continue // others may have left
		}
		l.guests[at].conn.Close()
		l.guests = slices.Delete(l.guests, at, at+1)
	}
	g.since = time.Now()
	l.guests = append(l.guests, g)
	return g
}

// Leave is for a guest that has proved itself or failed. False: it was put out before.
func (l *Lobby) Leave(g *Guest) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	at := slices.Index(l.guests, g)
	if at >= 0 {
		l.guests = slices.Delete(l.guests, at, at+1)
	}
	return at >= 0
}

// longest is the oldest guest of the source with the most; needs mu.
func (l *Lobby) longest() (at int) {
	count := map[netip.Prefix]int{}
	for _, g := range l.guests {
		count[g.source]++
	}
	for i, g := range l.guests {
		if count[g.source] > count[l.guests[at].source] {
			at = i
		}
	}
	return at
}

// sourceOf is the host of an address; with IPv6 its network, all of which a host has.
func sourceOf(a net.Addr) netip.Prefix {
	t, ok := a.(*net.TCPAddr)
	if !ok {
		return netip.Prefix{}
	}
	ip := t.AddrPort().Addr().Unmap()
	bits := ip.BitLen()
	if ip.Is6() {
		bits = 64
	}
	p, _ := ip.WithZone("").Prefix(bits) // of a valid address: cannot fail
	return p
}

// Listener has ln's connections enter the lobby, which they leave when Admit is called for
// them or when they end. A guest's read takes at most patience. So that guests who were put
// out do not pile up, none is accepted while as many of them as there are places have not
// ended.
func (l *Lobby) Listener(ln net.Listener, patience time.Duration) net.Listener {
	return &listener{Listener: ln, hall: l, patience: patience, places: make(chan struct{}, 2*l.most), closed: make(chan struct{})}
}

type listener struct {
	net.Listener
	hall     *Lobby
	patience time.Duration
	places   chan struct{} // of guests, including those put out and not ended
	once     sync.Once
	closed   chan struct{}
}

func (l *listener) Accept() (net.Conn, error) {
	select {
	case l.places <- struct{}{}:
	case <-l.closed:
		return nil, net.ErrClosed
	}
	raw, err := l.Listener.Accept()
	if err != nil {
		<-l.places
		return nil, err
	}
	c := &Conn{Conn: raw, from: l}
	c.guest = l.hall.Enter(raw)
	return c, nil
}

func (l *listener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return l.Listener.Close()
}

// Conn is a connection of a Listener.
type Conn struct {
	net.Conn
	from   *listener
	guest  *Guest
	left   atomic.Bool // the lobby
	member atomic.Bool
	wanted atomic.Pointer[time.Time] // the read deadline before it was cut
}

func (c *Conn) leave() {
	if !c.left.Swap(true) {
		c.from.hall.Leave(c.guest)
		<-c.from.places
	}
}

// Admit makes the connection under c, such as that of TLS, a member's for good. It does
// nothing if c is not from a Listener.
func Admit(c net.Conn) {
	for c != nil {
		switch over := c.(type) {
		case *Conn:
			over.admit()
			return
		case interface{ NetConn() net.Conn }:
			c = over.NetConn()
		default:
			return
		}
	}
}

func (c *Conn) admit() {
	if c.member.Load() || c.member.Swap(true) {
		return
	}
	if t := c.wanted.Load(); t != nil {
		_ = c.Conn.SetReadDeadline(*t) // its next read says what is wrong
	}
	c.leave()
}

// SetReadDeadline implements net.Conn.
func (c *Conn) SetReadDeadline(t time.Time) error { return c.Conn.SetReadDeadline(c.cut(t)) }

// SetDeadline implements net.Conn.
func (c *Conn) SetDeadline(t time.Time) error {
	if err := c.Conn.SetWriteDeadline(t); err != nil {
		return err
	}
	return c.SetReadDeadline(t)
}

// cut is the read deadline for a connection that asks for t.
func (c *Conn) cut(t time.Time) time.Time {
	if c.member.Load() {
		return t
	}
	c.wanted.Store(&t)
	if latest := time.Now().Add(c.from.patience); t.IsZero() || t.After(latest) {
		return latest
	}
	return t
}

// NetConn is the connection beneath.
func (c *Conn) NetConn() net.Conn { return c.Conn }

// CloseWrite closes the writing side, if the connection can.
func (c *Conn) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return nil
}

// Close implements net.Conn.
func (c *Conn) Close() error {
	err := c.Conn.Close()
	c.leave()
	return err
}
