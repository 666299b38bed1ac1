//go:build !linux

package memfd

import "context"

// New returns ErrUnsupported.
func New(name string, size int) (*Memory, error) { return nil, ErrUnsupported }

// Private returns ErrUnsupported.
func Private(size int) (*Memory, error) { return nil, ErrUnsupported }

// Available knows nothing.
func Available() int64 { return 0 }

// Room knows nothing.
func Room(int64) error { return nil }

// Populate does nothing.
func (m *Memory) Populate(context.Context) error { return nil }

// Close does nothing.
func (m *Memory) Close() error { return nil }
