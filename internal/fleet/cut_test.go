package fleet_test

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
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
	within(t, "the grace does not end", func() bool { since := w.Snapshot().Link.Since; return time.Since(since) > 100*time.Millisecond })

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

// unheardWorkerLives: the worker's own link is cut, and the watcher's works. The
// worker lives for as long as it answers, and no longer.
func unheardWorkerLives(t *testing.T) {
	s := startServer(t, fleet.ServerConfig{})
	u, err := url.Parse(s.ClientURL())
	if err != nil {
		t.Fatal(err)
	}
	c := newCable(t, u.Host)
	u.Host = c.listener.Addr().String()
	inst := instance("p", fleet.Prefill)
	stopped := make(chan struct{}) // the process takes connections and does nothing
	health := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		select {
		case <-stopped:
			<-q.Context().Done()
		default:
			w.Header().Set(fleet.HeaderInstance, inst.Is())
		}
	}))
	t.Cleanup(health.Close)
	inst.URL = health.URL
	a := announce(t, connect(t, u.String()), inst)
	w := watch(t, fleet.WatcherConfig{Conn: connect(t, s.ClientURL()), Grace: time.Millisecond, Probe: fleet.ProbeHealth(nil, nil)})
	eventually(t, w, "join", is("p", fleet.Live))

	c.set(true)
	unheard := eventually(t, w, "unheard", is("p", fleet.Unheard)).Get("p")
	for end := time.Now().Add(4 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if m := w.Snapshot().Get("p"); !m.Usable() || !m.Since.Equal(unheard.Since) {
			t.Fatalf("%+v", m)
		}
	}
	close(stopped)
	at := time.Now()
	m := eventually(t, w, "dead", is("p", fleet.Dead)).Get("p")
	if took := m.Since.Sub(at); took < time.Second || took > 10*time.Second { // 4 s, and a starved machine's slack
		t.Errorf("dead after %v", took)
	}
	c.set(false)
	eventually(t, w, "back", is("p", fleet.Live))
	closeAnnouncer(t, a)
}

// TestProbeHealth: what counts as an answer of a member, and what does not.
func TestProbeHealth(t *testing.T) {
	noLeak(t)
	inst := instance("p", fleet.Prefill)
	for name, c := range map[string]struct {
		serve http.HandlerFunc
		want  string // in the error; "" for none
	}{
		"well": {func(w http.ResponseWriter, _ *http.Request) { w.Header().Set(fleet.HeaderInstance, "p@1") }, ""},
		"failing": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set(fleet.HeaderInstance, "p@1")
			w.WriteHeader(503)
		}, ""},
		"another": {func(w http.ResponseWriter, _ *http.Request) { w.Header().Set(fleet.HeaderInstance, "p@2") }, `"p@2" answers`},
		"nobody":  {func(http.ResponseWriter, *http.Request) {}, `"" answers`},
		"elsewhere": {func(w http.ResponseWriter, q *http.Request) {
			if q.URL.Path == "/health" {
				http.Redirect(w, q, "/there", http.StatusFound)
			}
			w.Header().Set(fleet.HeaderInstance, "p@1") // of no use after the head
		}, `"" answers`},
		"endless": {func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("X", strings.Repeat("x", 1<<20)) }, "exceeded"},
		"hanging": {func(_ http.ResponseWriter, q *http.Request) { <-q.Context().Done() }, "deadline"},
	} {
		t.Run(name, func(t *testing.T) {
			s := httptest.NewServer(c.serve)
			defer s.Close()
			limit := patience
			if name == "hanging" {
				limit = 50 * time.Millisecond
			}
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			inst.URL = s.URL + "/"
			err := fleet.ProbeHealth(nil, nil)(ctx, &inst)
			if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want %q", err, c.want)
			}
		})
	}
	foreign := inst
	foreign.Dialect = "vllm"
	if fleet.ProbeHealth(nil, nil)(t.Context(), &foreign) == nil {
		t.Error("a foreign engine's answer says nothing")
	}
}
