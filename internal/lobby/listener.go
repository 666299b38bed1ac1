package lobby

import (
	"net"
	"sync"
	"sync/atomic"
	"time"
)

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
