//go:build unix

package supervise

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
)

// prepare gives the command its own process group, and the pipe whose end
// tells it that the parent is gone.
func (l *launcher) prepare(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	dieWithParent(cmd.SysProcAttr)
	const first = 3 // descriptor of ExtraFiles[0] in the child
	cmd.ExtraFiles = []*os.File{l.pipe[0]}
	cmd.Env = append(cmd.Env, fmt.Sprintf("%s=%d", parentFD, first))
}

func terminate(p *os.Process) error {
	if err := p.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	return nil
}

func killGroup(p *os.Process) error {
	if err := syscall.Kill(-p.Pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
		return err
	}
	return nil
}
