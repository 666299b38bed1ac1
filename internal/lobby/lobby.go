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

// Lobby is a listener's connections that have not proved yet to be of the fleet. Their
// places are their own, so that strangers take none of a member's. There is always room
// for one more: of whoever has most of them, the one that has been there longest goes. A
// member needs its place for one round trip, so who says nothing keeps none out.
type Lobby struct {
	most int

	mu     sync.Mutex
	guests []*Guest // by their coming
}

// New makes a lobby with so many places, one at least.
func New(most int) *Lobby { return &Lobby{most: max(1, most)} }

// stay is how long a guest is left alone at least. What a member says comes with its
// connection, but who serves it must get a turn to read that. Crowds that come faster
// wait where the kernel queues them.
const stay = 10 * time.Millisecond

// Guest is one connection in a lobby.
type Guest struct {
	conn   net.Conn
	source netip.Prefix // of a host; the zero value: this machine, over no network
	since  time.Time
}

// Enter lets a connection in, and may close another one, for which it may wait (stay).
// The caller sees to it that it leaves.
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

// Leave is for one that has proved itself, or has failed. False: it was put out before.
func (l *Lobby) Leave(g *Guest) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	at := slices.Index(l.guests, g)
	if at >= 0 {
		l.guests = slices.Delete(l.guests, at, at+1)
	}
	return at >= 0
}

// longest is the oldest guest of the source that has most; needs mu.
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

// sourceOf is the host of an address: of IPv6 its network, of which a host has all.
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
