package scarce

import (
	"errors"
	"log/slog"
	"net"
	"sync"
	"time"
)

const (
	firstPause = 5 * time.Millisecond // after a failed accept, doubling
	mostPause  = time.Second
	quietFor   = 10 * time.Second // between two log lines of a listener
)

// Counter counts failed accepts; a prometheus.Counter is one.
type Counter interface{ Inc() }

// Listener returns ln with an Accept that fails only once ln is closed: it waits out other errors,
// counts them, and logs them now and then. One error stops most servers for good, and anybody with a
// few hundred connections can cause one, by a lack of file descriptors. log and failed may be nil.
func Listener(ln net.Listener, log *slog.Logger, failed Counter) net.Listener {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &listener{Listener: ln, log: log, failed: failed, closed: make(chan struct{})}
}

type listener struct {
	net.Listener
	log    *slog.Logger
	failed Counter
	once   sync.Once
	closed chan struct{}

	mu    sync.Mutex
	pause time.Duration // the last one; 0 after a success
	said  time.Time     // when the last line was logged
	more  int           // failures since
}

func (l *listener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err == nil {
			l.mu.Lock()
			l.pause = 0
			l.mu.Unlock()
			return c, nil
		}
		if errors.Is(err, net.ErrClosed) {
			return nil, err
		}
		timer := time.NewTimer(l.note(err))
		select {
		case <-timer.C:
		case <-l.closed:
			timer.Stop()
			return nil, &net.OpError{Op: "accept", Net: l.Addr().Network(), Addr: l.Addr(), Err: net.ErrClosed}
		}
	}
}

// note accounts for a failed accept, and says how long to wait.
func (l *listener) note(err error) time.Duration {
	if l.failed != nil {
		l.failed.Inc()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.pause = min(max(2*l.pause, firstPause), mostPause)
	l.more++
	if now := time.Now(); now.Sub(l.said) >= quietFor {
		l.log.Warn("accept", "addr", l.Addr().String(), "err", err, "failures", l.more)
		l.said, l.more = now, 0
	}
	return l.pause
}

func (l *listener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return l.Listener.Close()
}
