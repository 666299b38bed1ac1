package supervise

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// parentFD is the variable with the descriptor of the parent's pipe.
const parentFD = "XPYD_PARENT_FD"

// ParentGone is for children: the channel is closed when the supervising parent has ended.
// Without a parent it is nil. Its goroutine ends with ctx. Call it once, early: it also keeps
// the descriptor from processes that the child starts.
func ParentGone(ctx context.Context) (<-chan struct{}, error) {
	text := os.Getenv(parentFD)
	if text == "" {
		return nil, nil
	}
	fd, err := strconv.Atoi(text)
	if err != nil || fd < 3 {
		return nil, fmt.Errorf("%s=%q: not a descriptor", parentFD, text)
	}
	pipe, err := adopt(fd)
	if err != nil {
		return nil, fmt.Errorf("%s=%d: %w", parentFD, fd, err)
	}
	gone := make(chan struct{})
	stop := context.AfterFunc(ctx, func() { pipe.Close() })
	go func() {
		defer stop()
		defer pipe.Close()
		var b [1]byte
		for {
			if _, err := pipe.Read(b[:]); errors.Is(err, io.EOF) {
				close(gone)
				return
			} else if err != nil {
				return
			}
		}
	}()
	return gone, nil
}

// adopt takes over an inherited pipe, and makes it non-blocking so that Close ends Read.
func adopt(fd int) (*os.File, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFIFO {
		return nil, errors.New("not a pipe")
	}
	unix.CloseOnExec(fd)
	if err := unix.SetNonblock(fd, true); err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), "parent"), nil
}
