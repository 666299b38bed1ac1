// Package lobby keeps a port's strangers apart from its members, so that no
// number of them keeps a member out.
package lobby

import (
	"net"
	"net/netip"
	"slices"
	"sync"
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
