package local

import (
	"context"
	"fmt"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// New makes a transport of that name, whose connections dress makes of ours. It
// fails where this process could not prove that a peer has ended (pidfd, Linux
// 5.3): without that proof, what a dead peer was lent could never be used again.
func New(name string, dress func(*Conn) net.Conn) (*Transport, error) {
	fd, err := unix.PidfdOpen(os.Getpid(), unix.PIDFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("%s: %w: pidfd_open: %v", name, ErrUnsupported, err)
	}
	unix.Close(fd)
	return &Transport{name, dress}, nil
}

// Dial connects to a listener's address. A listener of another user is
// refused: anybody may bind an abstract name.
func (t *Transport) Dial(ctx context.Context, addr string) (net.Conn, error) {
	name, err := t.socketName(addr)
	if err != nil {
		return nil, err
	}
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", name)
	if err != nil {
		return nil, err
	}
	conn := &Conn{UnixConn: c.(*net.UnixConn), name: t.name, dialed: true}
	if err := conn.sameUser(); err != nil {
		c.Close()
		return nil, err
	}
	return t.dress(conn), nil
}

// Listen binds "NAME-OF-THE-TRANSPORT:NAME"; "" picks a free name.
func (t *Transport) Listen(addr string) (net.Listener, error) {
	if addr == "" {
		addr = t.freeName()
	}
	name, err := t.socketName(addr)
	if err != nil {
		return nil, err
	}
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: name, Net: "unix"})
	if err != nil {
		return nil, err
	}
	return &listener{ln, t, Addr{t.name, addr}}, nil
}

type listener struct {
	*net.UnixListener
	t    *Transport
	addr Addr
}

func (l *listener) Addr() net.Addr { return l.addr }

// Accept returns every caller; one that may not speak finds its first read and
// write refused, so that it fails alone and is logged as a handshake.
func (l *listener) Accept() (net.Conn, error) {
	c, err := l.AcceptUnix()
	if err != nil {
		return nil, err
	}
	conn := &Conn{UnixConn: c, name: l.t.name}
	conn.refused = conn.sameUser()
	conn.stranger = conn.refused != nil
	return l.t.dress(conn), nil
}
