//go:build unix

package h1

import (
	"io"
	"os"
	"syscall"
)

// readNow reads what there is without waiting: errAgain if there is nothing.
func readNow(fd int, p []byte) (int, error) {
	for {
		n, err := sysRead(fd, p)
		switch {
		case err == syscall.EINTR:
		case err == syscall.EAGAIN:
			return 0, errAgain
		case err != nil:
			return 0, os.NewSyscallError("read", err)
		case n == 0 && len(p) > 0:
			return 0, io.EOF
		default:
			return n, nil
		}
	}
}

// writeNow writes what is taken without waiting.
func writeNow(fd int, p []byte) (int, error) {
	for {
		n, err := sysWrite(fd, p)
		switch {
		case err == syscall.EINTR:
		case err == syscall.EAGAIN:
			return 0, nil
		case err != nil:
			return 0, os.NewSyscallError("write", err)
		default:
			return n, nil
		}
	}
}
