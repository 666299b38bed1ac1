package supervise

import (
	"errors"
	"syscall"

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
