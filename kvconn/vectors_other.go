//go:build !linux

package kvconn

import (
	"errors"
	"net"
)

// vectors is scatter/gather I/O; elsewhere than on Linux connections are read
// and written through buffers.
type vectors struct{}

var errAgain = errors.New("would wait")

func vectorsOf(net.Conn) *vectors { return nil }

func (*vectors) read([][]byte) (int, error)  { return 0, errors.ErrUnsupported }
func (*vectors) write([][]byte) (int, error) { return 0, errors.ErrUnsupported }
func (*vectors) waitRead() error             { return errors.ErrUnsupported }
func (*vectors) waitWrite() error            { return errors.ErrUnsupported }
