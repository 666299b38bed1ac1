//go:build !unix

package supervise

import (
	"errors"
	"os"
	"os/exec"
)

// prepare has nothing to do: there are no groups, and no inherited pipe.
func (l *launcher) prepare(*exec.Cmd) {}

// awaitExit leaves the waiting to Wait.
func (p *process) awaitExit() bool { return false }

func terminate(p *os.Process) error { return killGroup(p) }

func killGroup(p *os.Process) error {
	if err := p.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	return nil
}
