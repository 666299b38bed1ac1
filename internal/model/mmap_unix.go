//go:build linux || darwin

package model

import (
	"os"

	"golang.org/x/sys/unix"
)

// mapBytes maps the first size bytes of f, shared and read-only.
func mapBytes(f *os.File, size int) ([]byte, func() error, error) {
	b, err := unix.Mmap(int(f.Fd()), 0, size, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, nil, err
	}
	return b, func() error { return unix.Munmap(b) }, nil
}
