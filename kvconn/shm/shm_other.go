//go:build !linux

package shm

import (
	"context"
	"net"
)

// New returns ErrUnsupported.
func New() (*Transport, error) { return nil, ErrUnsupported }

// Dial returns ErrUnsupported.
func (t *Transport) Dial(ctx context.Context, addr string) (net.Conn, error) {
	return nil, ErrUnsupported
}

// Listen returns ErrUnsupported.
func (t *Transport) Listen(addr string) (net.Listener, error) { return nil, ErrUnsupported }
