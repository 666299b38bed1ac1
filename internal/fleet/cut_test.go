package fleet_test

import (
	"io"
	"net"
	"net/url"
	"sync"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
)

// cable carries TCP connections to addr until it is cut: then, as when a
// network dies, bytes vanish and nobody is told.
type cable struct {
	listener net.Listener
	wg       sync.WaitGroup
	mu       sync.Mutex
	cut      bool
	conns    []net.Conn
}

func newCable(t *testing.T, addr string) *cable {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c := &cable{listener: l}
	c.wg.Go(func() {
		for {
			near, err := l.Accept()
			if err != nil {
				return
			}
			far, err := net.Dial("tcp", addr)
			if err != nil {
				near.Close()
				continue
			}
			c.mu.Lock()
			c.conns = append(c.conns, near, far)
			c.mu.Unlock()
			c.wg.Go(func() { c.carry(near, far) })
			c.wg.Go(func() { c.carry(far, near) })
		}
	})
	t.Cleanup(c.close)
	return c
}

func (c *cable) carry(from, to net.Conn) {
	defer from.Close()
	defer to.Close()
	buf := make([]byte, 4096)
	for {
		n, err := from.Read(buf)
		if err != nil {
			return
		}
		if c.isCut() {
			continue
		}
		if _, err := to.Write(buf[:n]); err != nil && err != io.EOF {
			return
		}
	}
}

func (c *cable) isCut() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.cut
}

func (c *cable) set(cut bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cut = cut
}

func (c *cable) close() {
	c.listener.Close()
	c.mu.Lock()
	for _, conn := range c.conns {
		conn.Close()
	}
	c.mu.Unlock()
	c.wg.Wait()
}

// cutLinkKillsNobody: the watcher's link dies without a word, and until
// that is noticed everybody seems silent. Nobody even becomes suspect.
func cutLinkKillsNobody(t *testing.T) {
	s := startServer(t, fleet.ServerConfig{})
	u, err := url.Parse(s.ClientURL())
	if err != nil {
		t.Fatal(err)
	}
	c := newCable(t, u.Host)
	announce(t, connect(t, s.ClientURL()), instance("p", fleet.Prefill))
	u.Host = c.listener.Addr().String()
	w := watch(t, fleet.WatcherConfig{Conn: connect(t, u.String()), Grace: time.Millisecond})
	joined := eventually(t, w, "join", is("p", fleet.Live)).Get("p").Since
	within(t, "the grace does not end", func() bool { _, since := w.Connected(); return time.Since(since) > 100*time.Millisecond })

	c.set(true)
	cut := time.Now()
	eventually(t, w, "the cut is not noticed", linked(false))
	if d := time.Since(cut); d > 2900*time.Millisecond {
		t.Errorf("noticed after %v", d)
	}
	within(t, "", func() bool { return time.Since(cut) > 4*time.Second })
	c.set(false)
	eventually(t, w, "link up", linked(true))
	heard := w.Snapshot().Get("p").Heard
	within(t, "no heartbeat", func() bool { return w.Snapshot().Get("p").Heard.After(heard) })
	if m := w.Snapshot().Get("p"); m.State != fleet.Live || !m.Since.Equal(joined) {
		t.Fatalf("%+v", m)
	}
}
