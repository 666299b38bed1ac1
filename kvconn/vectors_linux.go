package kvconn

import (
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// vectors does scatter/gather I/O on a connection that is a socket of this kernel. read
// and write never wait: on errAgain nothing could be moved, and waitRead and waitWrite
// wait under the connection's deadlines. One goroutine reads and one writes.
type vectors struct {
	rc          syscall.RawConn
	input, outp direction
}

// direction is one half's state, kept so that no call allocates.
type direction struct {
	iov   []unix.Iovec
	n     int
	errno unix.Errno
	fd    func(uintptr)      // moves bytes
	ready func(uintptr) bool // waits
	woken bool
}

var errAgain = errors.New("would wait")

// vectorsOf returns nil for connections without a descriptor of their own.
func vectorsOf(c net.Conn) *vectors {
	var sc syscall.Conn
	switch c := c.(type) {
	case *net.TCPConn:
		sc = c
	case *net.UnixConn:
		sc = c
	default:
		return nil
	}
	rc, err := sc.SyscallConn()
	if err != nil {
		return nil
	}
	v := &vectors{rc: rc}
	v.input.init(unix.SYS_READV, unix.POLLIN)
	v.outp.init(unix.SYS_WRITEV, unix.POLLOUT)
	return v
}

func (d *direction) init(trap uintptr, event int16) {
	d.fd = func(fd uintptr) {
		for {
			n, _, errno := unix.Syscall(trap, fd, uintptr(unsafe.Pointer(&d.iov[0])), uintptr(len(d.iov)))
			if d.n, d.errno = int(n), errno; errno != unix.EINTR {
				return
			}
		}
	}
	// The poller forgets what it saw before the wait began, so the socket is
	// asked once more after that.
	d.ready = func(fd uintptr) bool {
		if d.woken {
			return true
		}
		d.woken = true
		p := [1]unix.PollFd{{Fd: int32(fd), Events: event}}
		n, err := unix.Poll(p[:], 0)
		return n > 0 || err != nil
	}
}

// move passes bufs to the kernel; at least one must not be empty.
func (v *vectors) move(d *direction, bufs [][]byte) (int, error) {
	d.iov = d.iov[:0]
	for _, b := range bufs[:min(len(bufs), maxVectors)] {
		if len(b) > 0 {
			d.iov = append(d.iov, unix.Iovec{Base: &b[0]})
			d.iov[len(d.iov)-1].SetLen(len(b))
		}
	}
	err := v.rc.Control(d.fd)
	clear(d.iov) // the blocks are not ours to keep alive
	switch {
	case err != nil:
		return 0, err
	case d.errno == unix.EAGAIN:
		return 0, errAgain
	case d.errno != 0:
		return 0, os.NewSyscallError("socket", d.errno)
	}
	return d.n, nil
}

// maxVectors is the kernel's bound (UIO_MAXIOV).
const maxVectors = 1024

func (v *vectors) read(bufs [][]byte) (int, error) {
	n, err := v.move(&v.input, bufs)
	if n == 0 && err == nil {
		err = io.EOF
	}
	return n, err
}

func (v *vectors) write(bufs [][]byte) (int, error) { return v.move(&v.outp, bufs) }

func (v *vectors) waitRead() error {
	v.input.woken = false
	return v.rc.Read(v.input.ready)
}

func (v *vectors) waitWrite() error {
	v.outp.woken = false
	return v.rc.Write(v.outp.ready)
}
