package shm

import (
	"errors"
	"fmt"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/local"
)

var (
	_ kvconn.SharedConn  = (*conn)(nil)
	_ kvconn.PrivateConn = (*conn)(nil)
)

// Offer implements kvconn.SharedConn.
func (c *conn) Offer(s *kvconn.Shared) (kvconn.Hold, []byte, error) {
	if s.Device {
		return nil, nil, nil
	}
	h, err := c.Lend(s.FD)
	if err != nil {
		return nil, nil, err
	}
	return h, nil, nil
}

// Map implements kvconn.SharedConn.
func (c *conn) Map(s *kvconn.Shared, _ []byte) (kvconn.Window, error) {
	t, err := c.Take()
	if err != nil {
		return nil, err
	}
	b, err := t.Map(s.Bytes)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("shm: %w", err), t.End())
	}
	return &window{b: b, lent: t}, nil
}

// window is the peer's memory in our address space. The peer is told that the window is
// closed only after the memory is unmapped.
type window struct {
	b    []byte
	lent local.Taken
	once sync.Once
	err  error
}

var _ kvconn.MemoryWindow = (*window)(nil)

// Bytes implements kvconn.MemoryWindow.
func (w *window) Bytes() []byte { return w.b }

// Copy implements kvconn.MemoryWindow.
func (w *window) Copy(dst, src, nextDst, nextSrc []byte) { streamCopy(dst, src, nextDst, nextSrc) }

// Close implements kvconn.Window.
func (w *window) Close() error {
	w.once.Do(func() {
		if w.err = unix.Munmap(w.b); w.err == nil { // else the peer must go on assuming that we could write
			w.err = w.lent.End()
		}
	})
	return w.err
}
