//go:build !linux

package local

import (
	"context"
	"net"
)

// Conn is one end of a connection; there are none here.
type Conn struct{ net.Conn }

// New returns ErrUnsupported.
func New(name, folder string, dress func(*Conn) net.Conn) (*Transport, error) {
	return nil, ErrUnsupported
}

// Dial returns ErrUnsupported.
func (t *Transport) Dial(ctx context.Context, addr string) (net.Conn, error) {
	return nil, ErrUnsupported
}

// Listen returns ErrUnsupported.
func (t *Transport) Listen(addr string) (net.Listener, error) { return nil, ErrUnsupported }
