package ssd

import (
	"errors"
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/xpyd/xpyd/engine/tier/level"
)

// openDirect opens a file that bypasses the page cache, where its file system can: units in host
// memory need no second copy there.
func openDirect(path string, flag int) (*os.File, error) {
	f, err := os.OpenFile(path, flag|unix.O_DIRECT, 0o600)
	if errors.Is(err, unix.EINVAL) {
		f, err = os.OpenFile(path, flag&^os.O_EXCL, 0o600)
	}
	return f, err
}

// lockDir locks the folder for this process. The lock ends with the file.
func lockDir(f *os.File) error { return unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) }

// unlockDir ends the lock now. Closing the file is not enough while a process that was just
// forked, and has yet to execute its program, has a copy of it.
func unlockDir(f *os.File) error { return unix.Flock(int(f.Fd()), unix.LOCK_UN) }

// cpuTime is the processor time that this process has used.
func cpuTime() time.Duration {
	var u unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// aligned allocates n bytes, aligned for O_DIRECT.
func aligned(n int) []byte {
	b := make([]byte, n+level.Page)
	off := -int(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) & (level.Page - 1)
	return b[off : off+n : off+n]
}
