package shm

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/xpyd/xpyd/kvconn"
)

// The dialler's first bytes: a preamble that carries the offered descriptors,
// if any, as ancillary data. It comes before all that kvconn says.
const (
	preamble      = "xpydshm"
	preambleBytes = len(preamble) + 1 // and how many descriptors follow: 0 or 2
	offered       = 2                 // the memory, and the pipe that proves its end
)

// conn is one end of a connection. As any of kvconn's connections it is read
// by one goroutine, written by one and closed by any.
type conn struct {
	*net.UnixConn
	dialed  bool
	refused error
	greeted bool // by the dialler's writer, or the listener's reader

	mu     sync.Mutex
	closed bool
	fds    []int // offered by the peer and not mapped yet
}

var (
	_ kvconn.SharedConn  = (*conn)(nil)
	_ kvconn.PrivateConn = (*conn)(nil)
)

// Private implements kvconn.PrivateConn: both ends talk to their own user only.
func (c *conn) Private() bool { return true }

// peer asks the kernel who is at the other end.
func (c *conn) peer() (cred *unix.Ucred, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	if e := raw.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); e != nil {
		return nil, e
	}
	return cred, err
}

func (c *conn) sameUser() error {
	cred, err := c.peer()
	if err != nil {
		return fmt.Errorf("shm: ask who the peer is: %w", err)
	}
	if int(cred.Uid) != os.Geteuid() {
		return fmt.Errorf("shm: peer is of user %d, this process of %d", cred.Uid, os.Geteuid())
	}
	return nil
}

// Write sends b; the first one of a dialler says before it that nothing is
// offered.
func (c *conn) Write(b []byte) (int, error) {
	if c.refused != nil {
		return 0, c.refused
	}
	if c.dialed && !c.greeted {
		if err := c.greet(nil); err != nil {
			return 0, err
		}
	}
	return c.UnixConn.Write(b)
}

// greet sends the preamble.
func (c *conn) greet(fds []int) error {
	c.greeted = true
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	msg := append([]byte(preamble), byte('0'+len(fds)))
	n, _, err := c.WriteMsgUnix(msg, rights, nil)
	if err == nil && n < len(msg) { // the descriptors went with the first byte
		_, err = c.UnixConn.Write(msg[n:])
	}
	if err != nil {
		return fmt.Errorf("shm: preamble: %w", err)
	}
	return nil
}

// Read reads into b; the first one of a listener's end takes the preamble.
func (c *conn) Read(b []byte) (int, error) {
	if c.refused != nil {
		return 0, c.refused
	}
	if !c.dialed && !c.greeted {
		if err := c.welcome(); err != nil {
			c.refused = err
			return 0, err
		}
	}
	return c.UnixConn.Read(b)
}

var errPreamble = errors.New("shm: peer does not begin with this transport's preamble")

// welcome reads the preamble under the connection's deadline.
func (c *conn) welcome() error {
	c.greeted = true
	msg := make([]byte, preambleBytes)
	oob := make([]byte, unix.CmsgSpace(4*offered))
	n, oobn, flags, _, err := c.ReadMsgUnix(msg, oob)
	if err != nil {
		return err
	}
	if n == 0 {
		return io.EOF
	}
	fds, err := rights(oob[:oobn])
	if !c.keep(fds) {
		return net.ErrClosed
	}
	if err != nil {
		return err
	}
	if flags&unix.MSG_CTRUNC != 0 {
		return errPreamble
	}
	if n < len(msg) {
		if _, err := io.ReadFull(c.UnixConn, msg[n:]); err != nil {
			return err
		}
	}
	if string(msg[:len(preamble)]) != preamble || int(msg[len(preamble)])-'0' != len(fds) || len(fds) != 0 && len(fds) != offered {
		return errPreamble
	}
	return nil
}

// rights returns the descriptors in a control message, those of a bad one too:
// they are ours to close.
func rights(oob []byte) (fds []int, err error) {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, fmt.Errorf("shm: control message: %w", err)
	}
	for i := range msgs {
		if cut := len(msgs[i].Data) % 4; cut != 0 { // the library reads whole ones only
			msgs[i].Data = msgs[i].Data[:len(msgs[i].Data)-cut]
		}
		more, err := unix.ParseUnixRights(&msgs[i])
		if err != nil {
			return fds, fmt.Errorf("shm: control message: %w", err)
		}
		fds = append(fds, more...)
	}
	return fds, nil
}

// keep takes descriptors on, unless the connection was closed meanwhile.
func (c *conn) keep(fds []int) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		closeAll(fds)
		return false
	}
	c.fds = fds
	return true
}

// take hands the offered descriptors over to the caller.
func (c *conn) take() []int {
	c.mu.Lock()
	defer c.mu.Unlock()
	fds := c.fds
	c.fds = nil
	return fds
}

// Close closes the connection and what it was offered. Memory that was mapped
// stays mapped until its Window is closed.
func (c *conn) Close() error {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	closeAll(c.take())
	return c.UnixConn.Close()
}

func closeAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}
