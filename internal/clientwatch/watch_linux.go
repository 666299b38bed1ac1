package clientwatch

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// Watcher watches connections. It is safe for concurrent use.
//
// A descriptor may be closed and its number reused at any time, so each Watch has a key of its own,
// which the kernel hands back with the event, and touches the descriptor only inside
// RawConn.Control, which fails once the connection is closed. The kernel drops a closed descriptor
// from the set by itself.
type Watcher struct {
	epfd, wakefd int
	done         chan struct{}

	mu     sync.Mutex
	begun  bool // with the first connection that can be watched, its goroutine
	closed bool
	next   uint64
	gone   map[uint64]func() // by key
}

// New starts a watcher; Close ends it.
func New() (*Watcher, error) {
	epfd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("create epoll set: %w", err)
	}
	wakefd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("create eventfd: %w", err), unix.Close(epfd))
	}
	w := &Watcher{epfd: epfd, wakefd: wakefd, done: make(chan struct{}), gone: map[uint64]func(){}}
	if err := unix.EpollCtl(epfd, unix.EPOLL_CTL_ADD, wakefd, event(unix.EPOLLIN, 0)); err != nil {
		return nil, errors.Join(fmt.Errorf("watch eventfd: %w", err), unix.Close(epfd), unix.Close(wakefd))
	}
	return w, nil
}

// Watch calls gone once, on the watcher's goroutine, when conn's peer has closed or reset it, at
// once if that has happened already. gone must not block, and may still be running when stop, which
// ends the watch, returns. A second watch of a connection replaces the first. A connection without a
// descriptor is watched if it is a Teller.
func (w *Watcher) Watch(conn net.Conn, gone func()) (stop func()) {
	rc, teller := raw(conn)
	if teller != nil {
		return teller.OnPeerClose(gone)
	}
	if rc == nil {
		return func() {}
	}
	key, err := w.start(rc, gone)
	if err != nil {
		gone() // the connection is closed already
	}
	if key == 0 {
		return func() {}
	}
	// Stopping does not disarm, which saves a system call for every request on a kept-alive
	// connection: an event with a forgotten key is ignored.
	return func() { w.forget(key) }
}

// start registers gone and arms rc; key is 0 when nothing is watched. It holds the lock across the
// system call so that Close cannot take the set away.
func (w *Watcher) start(rc syscall.RawConn, gone func()) (key uint64, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return 0, nil
	}
	if !w.begun {
		w.begun = true
		go w.loop()
	}
	w.next++
	if err := w.arm(rc, w.next); err != nil {
		return 0, err
	}
	w.gone[w.next] = gone
	return w.next, nil
}

// arm makes the kernel report conn's end once, under key.
func (w *Watcher) arm(rc syscall.RawConn, key uint64) error {
	var err error
	cerr := rc.Control(func(fd uintptr) {
		ev := event(unix.EPOLLRDHUP|unix.EPOLLONESHOT, key)
		err = unix.EpollCtl(w.epfd, unix.EPOLL_CTL_MOD, int(fd), ev)
		if errors.Is(err, unix.ENOENT) { // this descriptor's first watch
			err = unix.EpollCtl(w.epfd, unix.EPOLL_CTL_ADD, int(fd), ev)
		}
	})
	if cerr != nil {
		return cerr
	}
	return err
}

// forget drops key and returns its function, nil if it is forgotten already.
func (w *Watcher) forget(key uint64) func() {
	w.mu.Lock()
	defer w.mu.Unlock()
	f := w.gone[key]
	delete(w.gone, key)
	return f
}

func (w *Watcher) loop() {
	defer close(w.done)
	events := make([]unix.EpollEvent, 64)
	for {
		n, err := unix.EpollWait(w.epfd, events, -1)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return // only a programming error gets here: the set outlives the loop
		}
		for i := range max(n, 0) {
			key := eventKey(&events[i])
			if key == 0 {
				return // Close
			}
			if f := w.forget(key); f != nil {
				f()
			}
		}
	}
}

// Close ends all watches without calling back, and waits for the watcher's goroutine.
func (w *Watcher) Close() error {
	w.mu.Lock()
	if w.closed {
		w.mu.Unlock()
		<-w.done
		return nil
	}
	w.closed = true
	clear(w.gone)
	if !w.begun {
		close(w.done)
	}
	w.mu.Unlock()
	var one [8]byte
	binary.NativeEndian.PutUint64(one[:], 1)
	if _, err := unix.Write(w.wakefd, one[:]); err != nil {
		return fmt.Errorf("wake watcher: %w", err)
	}
	<-w.done
	return errors.Join(unix.Close(w.epfd), unix.Close(w.wakefd))
}

// event carries key in the 64 bits of user data, which x/sys calls Fd and Pad.
func event(mask uint32, key uint64) *unix.EpollEvent {
	return &unix.EpollEvent{Events: mask, Fd: int32(uint32(key)), Pad: int32(uint32(key >> 32))}
}

func eventKey(e *unix.EpollEvent) uint64 {
	return uint64(uint32(e.Fd)) | uint64(uint32(e.Pad))<<32
}
