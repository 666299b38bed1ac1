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

// The dialler's first bytes are a preamble: "xpyd" and the transport's name. Everything
// of kvconn's follows it. After the handshake, lent descriptors travel with kvconn's
// bytes as ancillary data.
const (
	preamble = "xpyd"
	offered  = 2 // descriptors: the one lent, and the pipe that proves the end of the loan
)

// Conn is one end of a connection. Like any of kvconn's connections it is read by one
// goroutine, written by one and closed by any.
type Conn struct {
	*net.UnixConn
	name     string // of the transport
	dialed   bool
	stranger bool // the dialler is of another user; its bytes are not looked at
	refused  error
	greeted  bool // by the dialler's writer, or the listener's reader

	mu     sync.Mutex
	closed bool
	lent   bool  // something was offered on this connection; it is once
	fds    []int // by the dialler: to go with the next bytes; by its peer: not taken yet
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

// Write sends b, with descriptors to be lent if there are any. A dialler's first write
// sends the preamble before.
func (c *Conn) Write(b []byte) (int, error) {
	if c.refused != nil {
		return 0, c.refused
	}
	if !c.dialed {
		return c.UnixConn.Write(b)
	}
	if !c.greeted {
		c.greeted = true
		if _, err := c.UnixConn.Write([]byte(preamble + c.name)); err != nil {
			return 0, fmt.Errorf("%s: preamble: %w", c.name, err)
		}
	}
	fds := c.take()
	if len(fds) == 0 || len(b) == 0 {
		c.keep(fds)
		return c.UnixConn.Write(b)
	}
	n, _, err := c.WriteMsgUnix(b, unix.UnixRights(fds...), nil)
	if n == 0 {
		c.keep(fds) // they have not gone
		return 0, err
	}
	for _, fd := range fds {
		unix.Close(fd)
	}
	if err == nil && n < len(b) { // the descriptors went with the first byte
		m, e := c.UnixConn.Write(b[n:])
		n, err = n+m, e
	}
	return n, err
}

// Read reads into b; a listener's first read takes the preamble off.
func (c *Conn) Read(b []byte) (int, error) {
	if c.refused != nil {
		return 0, c.refused
	}
	if c.dialed {
		return c.UnixConn.Read(b)
	}
	if !c.greeted {
		if err := c.welcome(); err != nil {
			c.refused = err
			return 0, err
		}
	}
	return c.receive(b)
}

var (
	errPreamble = errors.New("peer does not begin with this transport's preamble")
	errOffer    = errors.New("peer offers what it should not")
)

// welcome reads the preamble under the connection's deadline.
func (c *Conn) welcome() error {
	c.greeted = true
	want := preamble + c.name
	msg := make([]byte, len(want))
	for n := 0; n < len(msg); {
		m, err := c.receive(msg[n:])
		if err != nil {
			return err
		}
		n += m
	}
	if string(msg) != want {
		return errPreamble
	}
	return nil
}

// receive reads bytes, and keeps the descriptors that come with them until Take. They
// are not looked at before: the caller of Take has finished the handshake.
func (c *Conn) receive(b []byte) (int, error) {
	oob := make([]byte, unix.CmsgSpace(4*offered))
	n, oobn, flags, _, err := c.ReadMsgUnix(b, oob)
	if err != nil {
		return 0, err
	}
	c.received()
	if oobn > 0 {
		fds, err := rights(oob[:oobn])
		if c.lent {
			giveBack(fds)
			return 0, errOffer
		}
		c.lent = true
		switch {
		case !c.keep(fds):
			return 0, net.ErrClosed
		case err != nil:
			return 0, err
		case flags&unix.MSG_CTRUNC != 0 || len(fds) != offered:
			return 0, errOffer
		}
	}
	if n == 0 && len(b) > 0 {
		return 0, io.EOF
	}
	return n, nil
}

// rights returns the descriptors in a control message, even in a malformed one: they
// are ours to close.
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

// Taken is what the peer has lent. The caller releases what it made of it, then calls
// End.
type Taken struct {
	FD   int // what was lent
	pipe int
}

// End tells the peer that we have let go. It never waits, whatever the peer passed as a
// pipe.
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

// Map maps the memory file that was lent, if it has exactly this size and is sealed
// against shrinking: else its owner could cause SIGBUS here. The descriptor is closed
// in any case; the caller unmaps with unix.Munmap.
func (t Taken) Map(bytes int64) ([]byte, error) {
	all, err := t.MapTimes(bytes, 1)
	if err != nil {
		return nil, err
	}
	return all[0], nil
}

// MapTimes is Map at n places.
func (t Taken) MapTimes(bytes int64, n int) (all [][]byte, err error) {
	defer unix.Close(t.FD)
	seals, err := unix.FcntlInt(uintptr(t.FD), unix.F_GET_SEALS, 0)
	if err != nil {
		return nil, fmt.Errorf("offered descriptor is no memory file: %w", err)
	}
	if seals&unix.F_SEAL_SHRINK == 0 {
		return nil, errors.New("offered memory is not sealed against shrinking")
	}
	var st unix.Stat_t
	if err := unix.Fstat(t.FD, &st); err != nil {
		return nil, fmt.Errorf("offered memory: %w", err)
	}
	if bytes < 1 || st.Size != bytes || int64(int(bytes)) != bytes {
		return nil, fmt.Errorf("offered memory is of %d bytes, the peer says %d", st.Size, bytes)
	}
	for range n {
		b, err := unix.Mmap(t.FD, 0, int(bytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err != nil {
			err = fmt.Errorf("map: %w", err)
			for _, b := range all {
				err = errors.Join(err, unix.Munmap(b))
			}
			return nil, err
		}
		all = append(all, b)
	}
	return all, nil
}

// Take hands over what the peer has lent; once.
func (c *Conn) Take() (Taken, error) {
	fds := c.take()
	if len(fds) != offered {
		return Taken{}, fmt.Errorf("%s: the peer offered no memory", c.name)
	}
	return Taken{fds[0], fds[1]}, nil
}

// Close closes the connection, and gives back descriptors that were offered on it and
// not taken, or never sent.
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

// unread returns descriptors that have arrived but were not read: the kernel would
// close them with the connection, and the lender would never learn of it. No more come
// later.
func (c *Conn) unread() (fds []int) {
	raw, err := c.SyscallConn()
	if err != nil || c.CloseRead() != nil {
		return nil
	}
	_ = raw.Control(func(fd uintptr) { // fails if closed by another
		b, oob := make([]byte, 4096), make([]byte, unix.CmsgSpace(4*offered))
		for len(fds) == 0 { // to the end of the socket's buffer
			n, oobn, _, _, err := unix.Recvmsg(int(fd), b, oob, unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
			if err != nil || n == 0 {
				return
			}
			fds, _ = rights(oob[:oobn])
		}
	})
	return fds
}

// giveBack ends a loan that was not taken. Nothing of it was mapped, so the lender may
// know at once; the bare end of the pipe would not tell it.
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
