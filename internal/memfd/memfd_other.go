//go:build !linux

package memfd

import (
	"context"
	"fmt"
)

// New returns ErrUnsupported.
func New(name string, size int) (*Memory, error) { return nil, ErrUnsupported }

// Private allocates size bytes.
func Private(size int) (*Memory, error) {
	if size < 1 {
		return nil, fmt.Errorf("memfd: %d bytes", size)
	}
	return &Memory{Bytes: make([]byte, size), FD: -1, Size: int64(size), Pages: Small}, nil
}

// Available knows nothing.
func Available() int64 { return 0 }

// Room knows nothing.
func Room(int64) error { return nil }

// Populate does nothing.
func (m *Memory) Populate(context.Context) error { return nil }

// Close does nothing.
func (m *Memory) Close() error { return nil }
