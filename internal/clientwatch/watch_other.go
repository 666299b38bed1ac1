//go:build !linux

package clientwatch

import "net"

// Watcher watches nothing on this system.
type Watcher struct{}

// New returns a watcher that never calls back.
func New() (*Watcher, error) { return &Watcher{}, nil }

// Watch does nothing.
func (*Watcher) Watch(conn net.Conn, gone func()) (stop func()) {
	_ = raw
	return func() {}
}

// Close does nothing.
func (*Watcher) Close() error { return nil }
