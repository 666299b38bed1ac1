package redistest

import (
	"os/exec"
	"syscall"
)

// endWithUs has the kernel end a process when the thread that starts it ends.
func endWithUs(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} }
