// Package fakenet is a network inside one process, for tests: hosts that listen and dial, with a
// delay between them, and that crash, stop and go on. All waits are on channels and timers, so that
// time in a testing/synctest bubble passes.
package fakenet

import (
	"context"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"
)

// Net is a network. Its hosts find each other by IP address.
type Net struct {
	delay time.Duration
	limit int

	mu    sync.Mutex
	swift map[uint16]bool
	hosts map[netip.Addr]*Host
}

// New makes a network in which bytes take delay to arrive, and a connection holds at most limit
// bytes each way.
func New(delay time.Duration, limit int) *Net {
	return &Net{delay: delay, limit: limit, hosts: map[netip.Addr]*Host{}, swift: map[uint16]bool{}}
}

// Swift makes connections to a port take no time. It is for clients that hold a lock until they are
// connected: while somebody waits for a lock, time in a bubble does not pass.
func (n *Net) Swift(port uint16) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.swift[port] = true
}

// delayOf is how long bytes take to arrive, over connections to a port.
func (n *Net) delayOf(port uint16) time.Duration {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.swift[port] {
		return 0
	}
	return n.delay
}

// Host is one process's share of a network: when it has crashed, another takes its address.
type Host struct {
	n    *Net
	addr netip.Addr

	mu        sync.Mutex
	down      bool
	goesOn    chan struct{} // closed when a stopped host goes on; nil: it runs
	listeners map[uint16]*listener
	conns     map[*Conn]struct{}
	next      uint16
}

// Host makes a host, in the place of a crashed one. The address is used once at a time.
func (n *Net) Host(ip string) *Host {
	addr := netip.MustParseAddr(ip)
	n.mu.Lock()
	defer n.mu.Unlock()
	if h := n.hosts[addr]; h != nil && !h.isDown() {
		panic("fakenet: " + ip + " is in use")
	}
	h := &Host{n: n, addr: addr, listeners: map[uint16]*listener{}, conns: map[*Conn]struct{}{}, next: 10_000}
	n.hosts[addr] = h
	return h
}

func (n *Net) host(addr netip.Addr) *Host {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.hosts[addr]
}

func (h *Host) isDown() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.down
}

// Stopped returns what is closed when the stopped host goes on; nil if it runs.
func (h *Host) Stopped() <-chan struct{} {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.goesOn
}

// Listen is net.Listen of this host. Port 0 is any; the address is the host's own.
func (h *Host) Listen(_, addr string) (net.Listener, error) {
	to, err := netip.ParseAddrPort(addr)
	if err != nil || to.Addr() != h.addr {
		return nil, fmt.Errorf("listen %s on %v: %w", addr, h.addr, syscall.EADDRNOTAVAIL)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	port := to.Port()
	if port == 0 {
		h.next++
		port = h.next
	}
	if h.down || h.listeners[port] != nil {
		return nil, fmt.Errorf("listen %s: %w", addr, syscall.EADDRINUSE)
	}
	l := &listener{h: h, at: netip.AddrPortFrom(h.addr, port), queue: make(chan *Conn, backlog), closed: make(chan struct{})}
	h.listeners[port] = l
	return l, nil
}

// DialContext is net.Dialer.DialContext of this host. A stopped host dials nobody, but like a kernel
// it takes connections.
func (h *Host) DialContext(ctx context.Context, _, addr string) (net.Conn, error) {
	refused := func(err error) error {
		return &net.OpError{Op: "dial", Net: "tcp", Err: fmt.Errorf("%s: %w", addr, err)}
	}
	to, err := netip.ParseAddrPort(addr)
	if err != nil {
		return nil, refused(err)
	}
	delay := h.n.delayOf(to.Port())
	if delay > 0 {
		select {
		case <-time.After(2 * delay):
		case <-ctx.Done():
			return nil, refused(ctx.Err())
		}
	}
	peer := h.n.host(to.Addr())
	if peer == nil || h.isDown() {
		return nil, refused(syscall.EHOSTUNREACH)
	}
	peer.mu.Lock()
	l := peer.listeners[to.Port()]
	peer.mu.Unlock()
	if l == nil {
		return nil, refused(syscall.ECONNREFUSED)
	}
	h.mu.Lock()
	h.next++
	from := netip.AddrPortFrom(h.addr, h.next)
	h.mu.Unlock()
	up, down := newHalf(h.n.limit, delay), newHalf(h.n.limit, delay)
	now := time.Now()
	here, there := &Conn{h: h, r: down, w: up, local: from, remote: to, port: to.Port(), since: now}, &Conn{h: peer, r: up, w: down, local: to, remote: from, port: to.Port(), since: now}
	if !h.keep(here) || h.Stopped() != nil || !peer.keep(there) {
		here.Close()
		return nil, refused(syscall.ECONNREFUSED)
	}
	select {
	case l.queue <- there:
		return here, nil
	case <-l.closed:
		err = syscall.ECONNREFUSED
	case <-ctx.Done():
		err = ctx.Err()
	}
	here.Close()
	there.Close()
	return nil, refused(err)
}

func (h *Host) keep(c *Conn) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.down {
		h.conns[c] = struct{}{}
	}
	return !h.down
}

func (h *Host) forget(c *Conn) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.conns, c)
}

// Crash ends the host, as the end of a process does: nothing that its code does is seen any more.
// Peers get what it had sent, unless reset.
func (h *Host) Crash(reset bool) {
	h.mu.Lock()
	h.down = true
	listeners, conns := h.listeners, h.conns
	h.listeners, h.conns = nil, map[*Conn]struct{}{}
	h.mu.Unlock()
	for _, l := range listeners {
		l.Close()
	}
	for c := range conns {
		c.release(true)
		if reset {
			c.reset()
		}
		c.Close()
	}
	h.Continue()
}

// Cut resets some of the host's connections, whoever dialled.
func (h *Host) Cut(which func(*Conn) bool) {
	h.mu.Lock()
	conns := slices.DeleteFunc(slices.Collect(maps.Keys(h.conns)), func(c *Conn) bool { return !which(c) })
	h.mu.Unlock()
	for _, c := range conns {
		c.reset()
	}
}

// Stop has the host do nothing until Continue, as far as others see: it neither accepts nor reads,
// and what it writes is sent when it goes on.
func (h *Host) Stop() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.goesOn == nil && !h.down {
		h.goesOn = make(chan struct{})
	}
}

// Continue ends Stop.
func (h *Host) Continue() {
	h.mu.Lock()
	if h.goesOn != nil {
		close(h.goesOn)
		h.goesOn = nil
	}
	conns := slices.Collect(maps.Keys(h.conns))
	h.mu.Unlock()
	for _, c := range conns {
		c.release(false)
	}
}

const backlog = 128

type listener struct {
	h      *Host
	at     netip.AddrPort
	queue  chan *Conn
	once   sync.Once
	closed chan struct{}
}

func (l *listener) Addr() net.Addr { return net.TCPAddrFromAddrPort(l.at) }

func (l *listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.queue:
		if goesOn := l.h.Stopped(); goesOn != nil {
			<-goesOn
		}
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *listener) Close() error {
	l.once.Do(func() {
		l.h.mu.Lock()
		delete(l.h.listeners, l.at.Port())
		l.h.mu.Unlock()
		close(l.closed)
		for { // nobody accepts these any more
			select {
			case c := <-l.queue:
				c.Close()
			default:
				return
			}
		}
	})
	return nil
}
