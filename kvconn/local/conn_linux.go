package local

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// The dialler's first bytes are a preamble that carries the offered
// descriptors, if any, as ancillary data: "xpyd", the transport's name, and how
// many descriptors there are, 0 or 2. It comes before all that kvconn says.
const (
	preamble = "xpyd"
	offered  = 2 // what is lent, and the pipe that proves its end
)

// Conn is one end of a connection. As any of kvconn's connections it is read
// by one goroutine, written by one and closed by any.
type Conn struct {
	*net.UnixConn
	name     string // of the transport
	dialed   bool
	stranger bool // the dialler is of another user; nothing of its is looked at
	refused  error
	greeted  bool // by the dialler's writer, or the listener's reader

	mu     sync.Mutex
	closed bool
	fds    []int // offered by the peer and not taken yet
}

// Private implements kvconn.PrivateConn: both ends talk to their own user only.
func (c *Conn) Private() bool { return true }

// peer asks the kernel who is at the other end.
func (c *Conn) peer() (cred *unix.Ucred, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	if e := raw.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); e != nil {
		return nil, e
	}
	return cred, err
}

func (c *Conn) sameUser() error {
	cred, err := c.peer()
	if err != nil {
		return fmt.Errorf("%s: ask who the peer is: %w", c.name, err)
	}
	if int(cred.Uid) != os.Geteuid() {
		return fmt.Errorf("%s: peer is of user %d, this process of %d", c.name, cred.Uid, os.Geteuid())
	}
	return nil
}

// Write sends b; the first one of a dialler says before it that nothing is
// offered.
func (c *Conn) Write(b []byte) (int, error) {
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
func (c *Conn) greet(fds []int) error {
	c.greeted = true
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	msg := append([]byte(preamble+c.name), byte('0'+len(fds)))
	n, _, err := c.WriteMsgUnix(msg, rights, nil)
	if err == nil && n < len(msg) { // the descriptors went with the first byte
		_, err = c.UnixConn.Write(msg[n:])
	}
	if err != nil {
		return fmt.Errorf("%s: preamble: %w", c.name, err)
	}
	return nil
}

// Read reads into b; the first one of a listener's end takes the preamble.
func (c *Conn) Read(b []byte) (int, error) {
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

var errPreamble = errors.New("peer does not begin with this transport's preamble")

// welcome reads the preamble under the connection's deadline.
func (c *Conn) welcome() error {
	c.greeted = true
	want := preamble + c.name
	msg := make([]byte, len(want)+1)
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
	if string(msg[:len(want)]) != want || int(msg[len(want)])-'0' != len(fds) || len(fds) != 0 && len(fds) != offered {
		return errPreamble
	}
	return nil
}

// rights returns the descriptors in a control message, those of a bad one too:
// they are ours to close.
func rights(oob []byte) (fds []int, err error) {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, fmt.Errorf("control message: %w", err)
	}
	for i := range msgs {
		if cut := len(msgs[i].Data) % 4; cut != 0 { // the library reads whole ones only
			msgs[i].Data = msgs[i].Data[:len(msgs[i].Data)-cut]
		}
		more, err := unix.ParseUnixRights(&msgs[i])
		if err != nil {
			return fds, fmt.Errorf("control message: %w", err)
		}
		fds = append(fds, more...)
	}
	return fds, nil
}

// keep takes descriptors on, unless the connection was closed meanwhile.
func (c *Conn) keep(fds []int) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		giveBack(fds)
		return false
	}
	c.fds = fds
	return true
}

// take hands the offered descriptors over to the caller.
func (c *Conn) take() []int {
	c.mu.Lock()
	defer c.mu.Unlock()
	fds := c.fds
	c.fds = nil
	return fds
}

// Taken is what the peer has lent, for the caller to close: what has been made
// of it first, then End.
type Taken struct {
	FD   int // what was lent
	pipe int
}

// End tells the peer that we have let go. It does not wait, whatever the peer calls a pipe.
func (t Taken) End() error {
	err := unix.SetNonblock(t.pipe, true)
	if err == nil {
		_, err = unix.Write(t.pipe, []byte{1})
	}
	if errors.Is(err, unix.EPIPE) { // nobody listens any more
		err = nil
	}
	return errors.Join(err, unix.Close(t.pipe))
}

// Take hands over what the peer has lent; once.
func (c *Conn) Take() (Taken, error) {
	fds := c.take()
	if len(fds) != offered {
		return Taken{}, fmt.Errorf("%s: the peer offered no memory", c.name)
	}
	return Taken{fds[0], fds[1]}, nil
}

// Close closes the connection, and gives back what was offered on it and not taken.
func (c *Conn) Close() error {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	giveBack(c.take())
	if !c.dialed && !c.stranger {
		giveBack(c.unread())
	}
	return c.UnixConn.Close()
}

// unread is what a preamble offers that has come and that nobody has read: the kernel would
// close it with the connection, and the lender never hear of it. None comes later.
func (c *Conn) unread() (fds []int) {
	raw, err := c.SyscallConn()
	if err != nil || c.CloseRead() != nil {
		return nil
	}
	_ = raw.Control(func(fd uintptr) { // fails if closed by another
		oob := make([]byte, unix.CmsgSpace(4*offered))
		if _, n, _, _, err := unix.Recvmsg(int(fd), make([]byte, 1), oob, unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC); err == nil {
			fds, _ = rights(oob[:n])
		}
	})
	return fds
}

// giveBack ends a loan that nobody took: nothing of it was mapped, so the lender may know at
// once. The bare end of the pipe would not tell it.
func giveBack(fds []int) {
	if len(fds) == offered {
		unix.Close(fds[0])
		_ = Taken{pipe: fds[1]}.End() // no pipe of ours: it has its process's end
		return
	}
	for _, fd := range fds {
		unix.Close(fd)
	}
}
