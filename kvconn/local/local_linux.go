package local

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// New makes a transport of that name, whose sockets are in folder, or abstract if that is
// ""; dress wraps its connections. It fails where this
// process could not prove that a peer has ended (pidfd, Linux 5.3): without that proof,
// memory lent to a dead peer could never be reused.
func New(name, folder string, dress func(*Conn) net.Conn) (*Transport, error) {
	fd, err := unix.PidfdOpen(os.Getpid(), unix.PIDFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("%s: %w: pidfd_open: %v", name, ErrUnsupported, err)
	}
	unix.Close(fd)
	return &Transport{name, folder, dress}, nil
}

// Dial connects to a listener's address. It refuses another user's listener: any user
// may bind an abstract name.
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
	l := &listener{t: t, addr: &net.UnixAddr{Name: addr, Net: t.name}}
	if t.folder != "" {
		sweep(t.folder)
		if l.lock, err = take(t.folder, filepath.Base(name)); err != nil {
			return nil, fmt.Errorf("%s: %w", t.name, err)
		}
	}
	if l.UnixListener, err = net.ListenUnix("unix", &net.UnixAddr{Name: name, Net: "unix"}); err != nil {
		return nil, errors.Join(err, l.lock.release())
	}
	return l, nil
}

type listener struct {
	*net.UnixListener
	t    *Transport
	addr *net.UnixAddr // as Dial takes it
	lock *lock         // nil for an abstract name
}

// Close removes the socket from its folder, too.
func (l *listener) Close() error { return errors.Join(l.UnixListener.Close(), l.lock.release()) }

func (l *listener) Addr() net.Addr { return l.addr }

// Accept returns every caller. For one of another user the first read and write fail,
// so that it fails alone and is logged as a handshake.
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
