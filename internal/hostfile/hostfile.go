// Package hostfile has what processes of one host need to share a file: a lock, and a write
// that a reader sees whole or not at all.
package hostfile

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// lockEvery is how often a lock that is held elsewhere is tried again.
const lockEvery = 100 * time.Millisecond

// Lock takes an flock on the file at path, made if there is none, waiting for other processes
// until ctx ends. The file stays: removing it would let two holders in.
func Lock(ctx context.Context, path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nil, err
	}
	t := time.NewTicker(lockEvery)
	defer t.Stop()
	for err == nil {
		switch err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err {
		case nil:
			return func() {
				_ = unix.Flock(int(f.Fd()), unix.LOCK_UN) // also for a child that was just forked and has a copy of f
				f.Close()
			}, nil
		case unix.EWOULDBLOCK, unix.EINTR:
			select {
			case <-t.C:
				err = nil
			case <-ctx.Done():
				err = fmt.Errorf("wait for %s, which another process holds: %w", path, ctx.Err())
			}
		default:
			err = fmt.Errorf("lock %s: %w", path, err)
		}
	}
	f.Close()
	return nil, err
}

// Write puts b at path by rename, and makes the folders on the way.
func Write(path string, b []byte) (err error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".tmp-*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			os.Remove(f.Name())
		}
	}()
	_, err = f.Write(b)
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}
