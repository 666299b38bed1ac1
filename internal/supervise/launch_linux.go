package supervise

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

func dieWithParent(a *syscall.SysProcAttr) { a.Pdeathsig = syscall.SIGKILL }

// awaitExit returns when the process has exited, before it is reaped: its pid
// still names its group, and what is left of that is killed.
func (p *process) awaitExit() bool {
	for {
		err := unix.Waitid(unix.P_PID, p.PID(), nil, unix.WEXITED|unix.WNOWAIT, nil)
		if err == nil {
			_ = p.Kill()
			return true
		}
		if !errors.Is(err, unix.EINTR) {
			return false
		}
	}
}

// AwaitDying watches a thread that a Go program has as long as it lives: the first after the main
// one (sysmon). The kernel frees a dead process's memory before it closes its connections, and that
// takes tens of milliseconds for a large cache; its threads end before either. Only Linux since 6.9
// tells of a thread.
func (p *process) AwaitDying(ctx context.Context) (dying bool) {
	tid, err := firstThread(p.PID())
	if err != nil {
		return false
	}
	fd, err := unix.PidfdOpen(tid, unix.PIDFD_NONBLOCK|pidfdThread)
	if err != nil {
		return false
	}
	f := os.NewFile(uintptr(fd), "pidfd")
	defer f.Close()
	conn, err := f.SyscallConn()
	if err != nil {
		return false
	}
	defer context.AfterFunc(ctx, func() { _ = f.SetReadDeadline(time.Unix(1, 0)) })() // it can have one: else Read fails at once
	over := func(fd uintptr) bool {
		is := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, _ := unix.Poll(is, 0) // without a wait there is nothing to fail
		dying = n == 1
		return dying
	}
	if conn.Read(over) != nil {
		_ = conn.Control(func(fd uintptr) { over(fd) }) // the process may have ended with ctx; f is open
	}
	return dying
}

const pidfdThread = unix.O_EXCL // PIDFD_THREAD

// firstThread returns the oldest thread of a process but for the main one.
func firstThread(pid int) (int, error) {
	dir, err := os.Open(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		return 0, err
	}
	defer dir.Close()
	names, err := dir.Readdirnames(2) // the kernel lists them by age
	if err != nil {
		return 0, err
	}
	if len(names) < 2 {
		return 0, fmt.Errorf("process %d has one thread", pid)
	}
	return strconv.Atoi(names[1])
}
