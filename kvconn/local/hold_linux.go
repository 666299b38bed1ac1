package local

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Lend hands the peer fd and the writing end of a pipe, which the peer keeps for as
// long as it can write to what fd refers to. They go with the next bytes that are
// written, so the caller must have finished the handshake.
func (c *Conn) Lend(fd int) (*Hold, error) {
	if !c.dialed || c.lent {
		return nil, fmt.Errorf("%s: memory is offered once, by the one who dials", c.name)
	}
	c.lent = true
	fd, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0) // the caller's may be closed before it goes
	if err != nil {
		return nil, fmt.Errorf("%s: offer: %w", c.name, err)
	}
	var pipe [2]int
	if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		return nil, errors.Join(fmt.Errorf("%s: pipe: %w", c.name, err), unix.Close(fd))
	}
	h, err := c.newHold(pipe[0])
	if err != nil {
		return nil, errors.Join(err, unix.Close(fd), unix.Close(pipe[1]))
	}
	if !c.keep([]int{fd, pipe[1]}) { // given back
		return nil, errors.Join(net.ErrClosed, h.Close())
	}
	return h, nil
}

// Hold waits until the peer can no longer write to what it was lent: it has said
// so in the pipe, or its process has ended (pidfd). It implements kvconn.Hold.
//
// The pipe's bare end proves nothing: a dying process's descriptors are closed
// in no known order, and those of a device, which stop its writes, may come
// later. The kernel reports a process's end when all are closed.
type Hold struct {
	set  *os.File // an epoll of both
	fds  [2]int   // pipe's reading end, pidfd
	over bool     // proven; used by the waiter only
}

func (c *Conn) newHold(pipe int) (_ *Hold, err error) {
	fds := [2]int{pipe, -1}
	epoll := -1
	defer func() {
		if err != nil {
			for _, fd := range []int{fds[0], fds[1], epoll} {
				if fd >= 0 {
					unix.Close(fd)
				}
			}
		}
	}()
	if fds[1], err = c.pidfd(); err != nil {
		return nil, err
	}
	if epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return nil, fmt.Errorf("epoll: %w", err)
	}
	for _, fd := range fds {
		if err = unix.EpollCtl(epoll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd)}); err != nil {
			return nil, fmt.Errorf("epoll: %w", err)
		}
	}
	if err = unix.SetNonblock(epoll, true); err != nil { // so that the runtime waits for it without a thread
		return nil, fmt.Errorf("epoll: %w", err)
	}
	return &Hold{set: os.NewFile(uintptr(epoll), "peer"), fds: fds}, nil
}

// pidfd refers to the process at the other end, even if its number is reused. Kernels
// before 6.5 need the number: if it already belongs to another process, the peer is
// dead, and watching the wrong process only delays the proof.
func (c *Conn) pidfd() (fd int, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return -1, err
	}
	if e := raw.Control(func(s uintptr) { fd, err = unix.GetsockoptInt(int(s), unix.SOL_SOCKET, unix.SO_PEERPIDFD) }); e != nil {
		return -1, e
	}
	if errors.Is(err, unix.ENOPROTOOPT) {
		cred, e := c.peer()
		if e != nil {
			return -1, fmt.Errorf("ask who the peer is: %w", e)
		}
		fd, err = unix.PidfdOpen(int(cred.Pid), 0)
	}
	if err != nil {
		return -1, fmt.Errorf("pidfd of the peer: %w", err)
	}
	return fd, nil
}

// Wait implements kvconn.Hold; for one caller at a time.
func (h *Hold) Wait(ctx context.Context) error {
	if h.over {
		return nil
	}
	if err := h.set.SetReadDeadline(time.Time{}); err != nil { // of a former Wait
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = h.set.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	raw, err := h.set.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Read(func(fd uintptr) bool {
		h.over, failed = h.look(int(fd))
		return h.over || failed != nil
	})
	switch {
	case h.over:
		return nil
	case err == nil:
		err = failed
	}
	if ctx.Err() != nil && err != nil {
		return ctx.Err()
	}
	return err
}

// look reports whether there is proof, without waiting.
func (h *Hold) look(epoll int) (proof bool, err error) {
	for {
		var events [2]unix.EpollEvent
		n, err := unix.EpollWait(epoll, events[:], 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if n <= 0 || err != nil {
			return false, err
		}
		for _, e := range events[:n] {
			if int(e.Fd) != h.fds[0] {
				return true, nil
			}
			var word [1]byte
			if n, _ := unix.Read(h.fds[0], word[:]); n == 1 {
				return true, nil
			}
			if err := unix.EpollCtl(epoll, unix.EPOLL_CTL_DEL, h.fds[0], nil); err != nil {
				return false, fmt.Errorf("epoll: %w", err)
			}
		}
	}
}

// Close implements kvconn.Hold.
func (h *Hold) Close() error {
	return errors.Join(h.set.Close(), unix.Close(h.fds[0]), unix.Close(h.fds[1]))
}
