//go:build !linux

package supervise

import (
	"context"
	"syscall"
)

// dieWithParent has no means here; the child watches ParentGone.
func dieWithParent(*syscall.SysProcAttr) {}

// awaitExit leaves the waiting to Wait.
func (p *process) awaitExit() bool { return false }

// AwaitDying knows nothing before Wait does.
func (p *process) AwaitDying(context.Context) bool { return false }
