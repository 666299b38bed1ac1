package shm

import (
	"errors"
	"fmt"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/xpyd/xpyd/kvconn"
)

// Map implements kvconn.SharedConn: it maps what the peer offered, if that is
// memory of exactly this size which can never become shorter.
func (c *conn) Map(bytes int64) (kvconn.Window, error) {
	fds := c.take()
	if len(fds) != offered {
		return nil, errors.New("shm: the peer offered no memory")
	}
	b, err := mapMemory(fds[0], bytes)
	unix.Close(fds[0])
	if err != nil {
		unix.Close(fds[1])
		return nil, err
	}
	return &window{b: b, pipe: fds[1]}, nil
}

func mapMemory(fd int, bytes int64) ([]byte, error) {
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil {
		return nil, fmt.Errorf("shm: offered descriptor is no memory file: %w", err)
	}
	if seals&unix.F_SEAL_SHRINK == 0 {
		return nil, errors.New("shm: offered memory is not sealed against shrinking")
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("shm: offered memory: %w", err)
	}
	if bytes < 1 || st.Size != bytes || int64(int(bytes)) != bytes {
		return nil, fmt.Errorf("shm: offered memory is of %d bytes, the peer says %d", st.Size, bytes)
	}
	b, err := unix.Mmap(fd, 0, int(bytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("shm: map: %w", err)
	}
	return b, nil
}

// window is the peer's memory in our address space. Its pipe is closed after
// the memory is unmapped, never before.
type window struct {
	b    []byte
	pipe int
	once sync.Once
	err  error
}

// Bytes implements kvconn.Window.
func (w *window) Bytes() []byte { return w.b }

// Copy implements kvconn.Window.
func (w *window) Copy(dst, src, nextDst, nextSrc []byte) { streamCopy(dst, src, nextDst, nextSrc) }

// Close implements kvconn.Window.
func (w *window) Close() error {
	w.once.Do(func() {
		if w.err = unix.Munmap(w.b); w.err == nil { // else the peer must go on believing that we could write
			w.err = unix.Close(w.pipe)
		}
	})
	return w.err
}
