//go:build !linux

package supervise

import "syscall"

// dieWithParent has no means here; the child watches ParentGone.
func dieWithParent(*syscall.SysProcAttr) {}

// awaitExit leaves the waiting to Wait.
func (p *process) awaitExit() bool { return false }
