//go:build linux || darwin

package model

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// tryLock takes an flock on path, as Python's filelock does, or returns
// errLocked. The file stays: removing it would let two holders in.
func tryLock(path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nil, err
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if err == nil {
		return func() {
			_ = unix.Flock(int(f.Fd()), unix.LOCK_UN) // also for a child that was just forked and has a copy of f
			f.Close()
		}, nil
	}
	f.Close()
	if err == unix.EWOULDBLOCK || err == unix.EINTR {
		return nil, errLocked
	}
	return nil, fmt.Errorf("lock %s: %w", path, err)
}
