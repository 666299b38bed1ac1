//go:build !linux && !darwin

package model

import (
	"io"
	"os"
)

// mapBytes reads the first size bytes of f: this system has no mmap here.
func mapBytes(f *os.File, size int) ([]byte, func() error, error) {
	b := make([]byte, size)
	if _, err := io.ReadFull(f, b); err != nil {
		return nil, nil, err
	}
	return b, nil, nil
}
