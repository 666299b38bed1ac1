package local

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// A socket in a folder stays there when its process is killed, and to dial it in order to
// find out would disturb one that lives. So beside it is a file which its process keeps
// locked: the kernel lets go of that when the process ends, however it ends. What is not
// locked is removed by the next that listens in the folder.

// lock is a locked file; nil is none.
type lock struct {
	file *os.File
	once sync.Once
	err  error
}

// take makes and locks the file beside a socket's. The name must be new: a sweep that
// comes between the two takes it away.
func take(folder, socket string) (*lock, error) {
	path := filepath.Join(folder, lockPrefix+strings.TrimPrefix(socket, socketPrefix))
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), f.Close()) // a sweep has it
	}
	if !there(f) {
		return nil, errors.Join(fmt.Errorf("%s was removed by another process", path), f.Close())
	}
	return &lock{file: f}, nil
}

// there reports whether the open file is still the one of its name.
func there(f *os.File) bool {
	ours, err := f.Stat()
	if err != nil {
		return false
	}
	now, err := os.Lstat(f.Name())
	return err == nil && os.SameFile(ours, now)
}

// release removes the file.
func (l *lock) release() error {
	if l == nil {
		return nil
	}
	l.once.Do(func() { l.err = errors.Join(os.Remove(l.file.Name()), l.file.Close()) })
	return l.err
}

// sweep removes the sockets of processes that have ended. What it cannot remove stays: it
// is in nobody's way.
func sweep(folder string) {
	entries, err := os.ReadDir(folder)
	if err != nil {
		return // to listen there fails, too, and says why
	}
	for _, e := range entries {
		if name, ok := strings.CutPrefix(e.Name(), lockPrefix); ok && e.Type().IsRegular() {
			clear(folder, name)
		}
	}
}

func clear(folder, name string) {
	f, err := os.OpenFile(filepath.Join(folder, lockPrefix+name), os.O_RDWR|unix.O_NOFOLLOW, 0)
	if err != nil {
		return
	}
	defer f.Close()
	if unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil || !there(f) {
		return
	}
	_ = os.Remove(filepath.Join(folder, socketPrefix+name)) // not there if it was never made
	_ = os.Remove(f.Name())
}
