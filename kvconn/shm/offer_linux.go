package shm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xpyd/xpyd/kvconn"
)

// Offer implements kvconn.SharedConn: it hands the peer the memory behind fd,
// together with the writing end of a pipe that the peer keeps for as long as
// it has the memory mapped.
func (c *conn) Offer(fd int) (kvconn.Hold, error) {
	if !c.dialed || c.greeted {
		return nil, errors.New("shm: memory is offered first, by the one who dials")
	}
	var pipe [2]int
	if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		return nil, fmt.Errorf("shm: pipe: %w", err)
	}
	defer unix.Close(pipe[1])
	h, err := c.newHold(pipe[0])
	if err != nil {
		return nil, err
	}
	if err := c.greet([]int{fd, pipe[1]}); err != nil {
		return nil, errors.Join(err, h.Close())
	}
	return h, nil
}

// hold knows when the peer can no longer write to the memory it was offered:
// its process has ended (pidfd), or it has unmapped the memory and closed the
// pipe behind it. The kernel closes a dying process's descriptors after it has
// taken its memory away, so the pipe's end too proves that.
type hold struct {
	set *os.File // an epoll of both
	fds [2]int   // pipe's reading end, pidfd
}

func (c *conn) newHold(pipe int) (_ *hold, err error) {
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
		return nil, fmt.Errorf("shm: epoll: %w", err)
	}
	for _, fd := range fds {
		if err = unix.EpollCtl(epoll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd)}); err != nil {
			return nil, fmt.Errorf("shm: epoll: %w", err)
		}
	}
	if err = unix.SetNonblock(epoll, true); err != nil { // so that the runtime waits for it without a thread
		return nil, fmt.Errorf("shm: epoll: %w", err)
	}
	return &hold{set: os.NewFile(uintptr(epoll), "peer"), fds: fds}, nil
}

// pidfd refers to the process at the other end, and to no other that may get
// its number. Kernels before 6.5 need the number: should it be another's
// already, then the peer is dead, and the wrong process only delays the proof.
func (c *conn) pidfd() (fd int, err error) {
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
			return -1, fmt.Errorf("shm: ask who the peer is: %w", e)
		}
		fd, err = unix.PidfdOpen(int(cred.Pid), 0)
	}
	if err != nil {
		return -1, fmt.Errorf("shm: pidfd of the peer: %w", err)
	}
	return fd, nil
}

// Wait implements kvconn.Hold.
func (h *hold) Wait(ctx context.Context) error {
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
		var events [2]unix.EpollEvent
		n, err := unix.EpollWait(int(fd), events[:], 0)
		failed = err
		return n > 0 || err != nil && !errors.Is(err, unix.EINTR)
	})
	if err == nil {
		err = failed
	}
	if ctx.Err() != nil && err != nil {
		return ctx.Err()
	}
	return err
}

// Close implements kvconn.Hold.
func (h *hold) Close() error {
	return errors.Join(h.set.Close(), unix.Close(h.fds[0]), unix.Close(h.fds[1]))
}
