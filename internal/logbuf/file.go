package logbuf

import (
	"errors"
	"fmt"
	"os"
	"syscall"
)

// OpenFile opens a log, or makes one, that only this user can write, and never another file in its
// place.
func OpenFile(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0o600)
	if errors.Is(err, syscall.ELOOP) {
		return nil, fmt.Errorf("%s is a symbolic link, which is not followed", path)
	}
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil {
		switch s, ok := info.Sys().(*syscall.Stat_t); {
		case !info.Mode().IsRegular():
			err = fmt.Errorf("%s is no file", path)
		case ok && int(s.Uid) != os.Geteuid():
			err = fmt.Errorf("%s belongs to uid %d, and this is uid %d", path, s.Uid, os.Geteuid())
		case info.Mode()&0o022 != 0:
			err = fmt.Errorf("%s has mode %04o, so that others may change it: run `chmod 600 %s`", path, info.Mode().Perm(), path)
		}
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}
