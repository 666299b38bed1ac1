package fleet_test

import (
	"bytes"
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/xpyd/xpyd/internal/fleet"
)

// patience bounds each wait for what must come: long for a starved machine, and
// short of the limit of go test, which would not say what hung.
const patience = 2 * time.Minute

// noLeak fails the test if goroutines outlive it. Call it first.
func noLeak(t *testing.T) {
	before := runtime.NumGoroutine()
	t.Cleanup(func() {
		for end := time.Now().Add(patience); runtime.NumGoroutine() > before; time.Sleep(10 * time.Millisecond) {
			if time.Now().After(end) {
				buf := make([]byte, 1<<20)
				t.Fatalf("goroutines: %d before, %d after\n%s", before, runtime.NumGoroutine(), buf[:runtime.Stack(buf, true)])
			}
		}
	})
}

func startServer(t *testing.T, cfg fleet.ServerConfig) *fleet.Server {
	t.Helper()
	s, err := fleet.StartServer(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

func connect(t *testing.T, url string) *fleet.Conn {
	t.Helper()
	return join(t, fleet.ConnConfig{URL: url, Name: t.Name()})
}

func join(t *testing.T, cfg fleet.ConnConfig) *fleet.Conn {
	t.Helper()
	c, err := fleet.Connect(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := c.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	return c
}

func announce(t *testing.T, c *fleet.Conn, i fleet.Instance) *fleet.Announcer {
	t.Helper()
	a, err := fleet.Announce(fleet.AnnouncerConfig{Conn: c, Instance: i, Heartbeat: 50 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeAnnouncer(t, a) })
	return a
}

func closeAnnouncer(t *testing.T, a *fleet.Announcer) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := a.Close(ctx); err != nil {
		t.Error(err)
	}
}

func watch(t *testing.T, cfg fleet.WatcherConfig) *fleet.Watcher {
	t.Helper()
	w, err := fleet.Watch(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.Close)
	return w
}

// eventually waits for a snapshot that satisfies ok.
func eventually(t *testing.T, w *fleet.Watcher, what string, ok func(*fleet.Snapshot) bool) *fleet.Snapshot {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	s := w.Snapshot()
	for !ok(s) {
		var err error
		if s, err = w.Wait(ctx, s.Version); err != nil {
			t.Fatalf("%s: %v; %+v", what, err, s.Members)
		}
	}
	return s
}

func is(id string, state fleet.State) func(*fleet.Snapshot) bool {
	return func(s *fleet.Snapshot) bool { m := s.Get(id); return m != nil && m.State == state }
}

func linked(up bool) func(*fleet.Snapshot) bool {
	return func(s *fleet.Snapshot) bool { return s.Link.Up == up }
}

func TestJoinUpdateLeave(t *testing.T) {
	noLeak(t)
	s := startServer(t, fleet.ServerConfig{})
	worker := connect(t, s.ClientURL())
	a := announce(t, worker, instance("prefill-0", fleet.Prefill))
	announce(t, worker, instance("decode.0", fleet.Decode))

	// The watcher comes last, and sees who is there already.
	w := watch(t, fleet.WatcherConfig{Conn: connect(t, s.ClientURL())})
	eventually(t, w, "join", func(s *fleet.Snapshot) bool { return is("prefill-0", fleet.Live)(s) && is("decode.0", fleet.Live)(s) })

	if err := a.Update(func(i *fleet.Instance) { i.Role, i.Draining = fleet.Decode, true }); err != nil {
		t.Fatal(err)
	}
	eventually(t, w, "role", func(s *fleet.Snapshot) bool {
		m := s.Get("prefill-0")
		return m.Role == fleet.Decode && m.Draining
	})
	if a.Update(func(i *fleet.Instance) { i.ID = "other" }) == nil || a.Update(func(i *fleet.Instance) { i.Role = "x" }) == nil {
		t.Fatal("an update made the instance invalid")
	}
	closeAnnouncer(t, a)
	eventually(t, w, "bye", is("prefill-0", fleet.Gone))
}

func TestLoadIsRefreshedWithoutVersion(t *testing.T) {
	noLeak(t)
	s := startServer(t, fleet.ServerConfig{})
	c := connect(t, s.ClientURL())
	load := make(chan int, 1)
	load <- 0
	a, err := fleet.Announce(fleet.AnnouncerConfig{
		Conn: c, Instance: instance("p", fleet.Prefill), Heartbeat: 20 * time.Millisecond,
		Load: func() fleet.Load { n := <-load; load <- n; return fleet.Load{Running: n} },
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeAnnouncer(t, a) })
	w := watch(t, fleet.WatcherConfig{Conn: c})
	v := eventually(t, w, "join", is("p", fleet.Live)).Version
	<-load
	load <- 5
	within(t, "load is not refreshed", func() bool { return w.Snapshot().Get("p").Load.Running == 5 })
	if got := w.Snapshot().Version; got != v {
		t.Fatalf("version %d, then %d", v, got)
	}
}

func silentWorkerDiesAndReturns(t *testing.T) {
	s := startServer(t, fleet.ServerConfig{})
	w := watch(t, fleet.WatcherConfig{Conn: connect(t, s.ClientURL()), Grace: time.Millisecond})
	a := announce(t, connect(t, s.ClientURL()), instance("p", fleet.Prefill))
	eventually(t, w, "join", is("p", fleet.Live))
	a.SetPaused(true)
	silence := func(state fleet.State, least time.Duration) {
		m := eventually(t, w, string(state), is("p", state)).Get("p")
		if d := m.Since.Sub(m.Heard); d < least {
			t.Errorf("%s after %v", state, d)
		}
	}
	silence(fleet.Suspect, 800*time.Millisecond)
	silence(fleet.Dead, 2800*time.Millisecond)
	a.SetPaused(false)
	eventually(t, w, "back", is("p", fleet.Live))
}

func natsRestartKillsNobody(t *testing.T) {
	cfg := fleet.ServerConfig{User: "u", Password: "p"}
	first, err := fleet.StartServer(cfg)
	if err != nil {
		t.Fatal(err)
	}
	clientURL := first.ClientURL()
	second := first
	t.Cleanup(func() { second.Close() }) // after its clients
	w := watch(t, fleet.WatcherConfig{Conn: connect(t, clientURL)})
	announce(t, connect(t, clientURL), instance("p", fleet.Prefill))
	announce(t, connect(t, clientURL), instance("d", fleet.Decode))
	eventually(t, w, "join", func(s *fleet.Snapshot) bool { return is("p", fleet.Live)(s) && is("d", fleet.Live)(s) })

	first.Close()
	eventually(t, w, "link down", linked(false))
	if l := w.Snapshot().Link; l.Up || time.Since(l.Since) > patience {
		t.Fatal("link", l)
	}
	time.Sleep(3500 * time.Millisecond) // longer than silence may last
	for _, m := range w.Snapshot().Members {
		if m.State != fleet.Live {
			t.Fatalf("%s is %s: %s", m.ID, m.State, m.Reason)
		}
	}
	w.ReportDead("d", 1, "connection reset")
	if !is("d", fleet.Dead)(w.Snapshot()) {
		t.Fatal("the data path does not kill")
	}

	cfg.Listen = hostOf(t, clientURL)
	if second, err = fleet.StartServer(cfg); err != nil {
		t.Fatal(err)
	}
	s := eventually(t, w, "link up", linked(true))
	if s.Link.Reconnects != 1 {
		t.Errorf("%d reconnects", s.Link.Reconnects)
	}
	eventually(t, w, "d is back", is("d", fleet.Live))
	joined := w.Snapshot().Get("p").Since
	time.Sleep(3500 * time.Millisecond) // past the grace
	if m := w.Snapshot().Get("p"); m.State != fleet.Live || !m.Since.Equal(joined) {
		t.Fatalf("p: %+v", m)
	}
}

func twoServersAreOneCluster(t *testing.T) {
	cluster := fleet.ServerConfig{ClusterListen: "127.0.0.1:0", ClusterUser: "r", ClusterPassword: "s", User: "u", Password: "p"}
	a := startServer(t, cluster)
	cluster.ClusterRoutes = []string{a.ClusterURL()}
	b, err := fleet.StartServer(cluster)
	if err != nil {
		t.Fatal(err)
	}
	wa := watch(t, fleet.WatcherConfig{Conn: connect(t, a.ClientURL())})
	wb := watch(t, fleet.WatcherConfig{Conn: connect(t, b.ClientURL())})
	announce(t, connect(t, b.ClientURL()+","+a.ClientURL()), instance("p", fleet.Prefill))
	announce(t, connect(t, a.ClientURL()+","+b.ClientURL()), instance("d", fleet.Decode))
	for _, w := range []*fleet.Watcher{wa, wb} {
		eventually(t, w, "both", func(s *fleet.Snapshot) bool { return is("p", fleet.Live)(s) && is("d", fleet.Live)(s) })
	}
	// One router dies; its workers go over to the other.
	b.Close()
	eventually(t, wb, "link down", linked(false))
	time.Sleep(3500 * time.Millisecond)
	for _, m := range wa.Snapshot().Members {
		if m.State != fleet.Live {
			t.Errorf("%s is %s: %s", m.ID, m.State, m.Reason)
		}
	}
}

func TestStrangersAreRefused(t *testing.T) {
	noLeak(t)
	s := startServer(t, fleet.ServerConfig{})
	c := connect(t, s.ClientURL())
	reg := prometheus.NewRegistry()
	w := watch(t, fleet.WatcherConfig{Conn: c, Registerer: reg})
	eventually(t, w, "link", linked(true))
	// Nobody is there to answer the watcher's query; the server says so,
	// which is no stranger's doing.
	if err := c.Publish("xpyd.fleet.announce.x", []byte(`{"id":"y"}`)); err != nil {
		t.Fatal(err)
	}
	announce(t, c, instance("p", fleet.Prefill))
	eventually(t, w, "join", is("p", fleet.Live))
	if n := len(w.Snapshot().Members); n != 1 {
		t.Fatalf("%d members", n)
	}
	if problems, err := testutil.GatherAndLint(reg); err != nil || len(problems) > 0 {
		t.Fatal(problems, err)
	}
	err := testutil.GatherAndCompare(reg, strings.NewReader(`
# HELP xpyd_fleet_messages_refused_total Malformed messages on NATS. If it rises, find the sender: another version or a stranger.
# TYPE xpyd_fleet_messages_refused_total counter
xpyd_fleet_messages_refused_total 1
# HELP xpyd_fleet_nats_connected 1 while NATS is reachable. While it is 0, silence kills nobody and nobody joins.
# TYPE xpyd_fleet_nats_connected gauge
xpyd_fleet_nats_connected 1
`), "xpyd_fleet_messages_refused_total", "xpyd_fleet_nats_connected")
	if err != nil {
		t.Fatal(err)
	}
}

func TestStaticMembersNeedNoNATS(t *testing.T) {
	noLeak(t)
	w := watch(t, fleet.WatcherConfig{})
	i := instance("s", fleet.Prefill)
	i.Epoch = 0
	if err := w.AddStatic(i, fleet.Static); err != nil {
		t.Fatal(err)
	}
	if w.AddStatic(i, fleet.NATS) == nil || w.AddStatic(fleet.Instance{}, fleet.Admin) == nil {
		t.Fatal("nonsense was added")
	}
	if !is("s", fleet.Live)(w.Snapshot()) || !w.Remove("s", "test") || w.Remove("s", "test") || !is("s", fleet.Gone)(w.Snapshot()) {
		t.Fatal("add or remove")
	}
}

// TestRegistryAgain: a watcher that has closed has left its registry to the next.
func TestRegistryAgain(t *testing.T) {
	s := startServer(t, fleet.ServerConfig{})
	c := connect(t, s.ClientURL())
	reg := prometheus.NewRegistry()
	for range 2 {
		w, err := fleet.Watch(fleet.WatcherConfig{Conn: c, Registerer: reg})
		if err != nil {
			t.Fatal(err)
		}
		w.Close()
	}
	if families, err := reg.Gather(); err != nil || len(families) > 0 {
		t.Errorf("%v is left, %v", families, err)
	}
}

func TestWrongPasswordIsNotALink(t *testing.T) {
	noLeak(t)
	s := startServer(t, fleet.ServerConfig{})
	c := connect(t, "nats://xpyd:wrong@"+hostOf(t, s.ClientURL()))
	time.Sleep(300 * time.Millisecond)
	if c.Link().Up {
		t.Fatal("connected")
	}
}

func TestTakenPort(t *testing.T) {
	noLeak(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if _, err := fleet.StartServer(fleet.ServerConfig{Listen: l.Addr().String()}); err == nil || !strings.Contains(err.Error(), "in use") {
		t.Fatal(err)
	}
}

func TestOffMachineNeedsCredentials(t *testing.T) {
	f := func(ok bool, err error) {
		t.Helper()
		if (err == nil) != ok {
			t.Error(err)
		}
		if err != nil && strings.Contains(err.Error(), "secret") {
			t.Error("shows a password:", err)
		}
	}
	conn := func(c fleet.ConnConfig) error { return c.Validate() }
	f(true, conn(fleet.ConnConfig{URL: "nats://127.0.0.1:4222"}))
	f(true, conn(fleet.ConnConfig{URL: "localhost:4222, [::1]:4222"}))
	f(true, conn(fleet.ConnConfig{URL: "nats://u:p@10.0.0.1:4222"}))
	f(true, conn(fleet.ConnConfig{URL: "tls://nats.example:4222"}))
	f(true, conn(fleet.ConnConfig{URL: "nats://nats.example:4222", CredsFile: "x"}))
	f(true, conn(fleet.ConnConfig{URL: "nats://nats.example:4222", Insecure: true}))
	f(false, conn(fleet.ConnConfig{URL: "nats://127.0.0.1:4222,nats://10.0.0.1:4222"}))
	f(false, conn(fleet.ConnConfig{URL: "http://u:secret@nats.example"}))
	f(false, conn(fleet.ConnConfig{URL: "http://secret@nats.example"}))
	f(false, conn(fleet.ConnConfig{URL: "nats://u:secret@%zz"}))
	f(false, conn(fleet.ConnConfig{}))

	server := func(c fleet.ServerConfig) error { return c.Validate() }
	f(true, server(fleet.ServerConfig{}))
	f(true, server(fleet.ServerConfig{Listen: "0.0.0.0:1", User: "u", Password: "p"}))
	f(true, server(fleet.ServerConfig{Listen: "0.0.0.0:1", TLSCert: "c", TLSKey: "k"}))
	f(true, server(fleet.ServerConfig{Listen: ":1", Insecure: true}))
	f(false, server(fleet.ServerConfig{Listen: "0.0.0.0:1"}))
	f(false, server(fleet.ServerConfig{Listen: ":1"}))
	f(false, server(fleet.ServerConfig{Listen: "nowhere"}))
	f(false, server(fleet.ServerConfig{ClusterListen: "0.0.0.0:1", User: "u"}))
	f(false, server(fleet.ServerConfig{ClusterRoutes: []string{"nats://x"}}))
}

// lifelineServer is a worker's side, as the worker package writes it; it answers
// from when open is closed on.
func lifelineServer(t *testing.T, open <-chan struct{}) *httptest.Server {
	s := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/xpyd/v1/lifeline" {
			http.NotFound(rw, r)
			return
		}
		select {
		case <-open:
		case <-r.Context().Done():
			return
		}
		rw.Write(bytes.Repeat([]byte{'\n'}, 3))
		rw.(http.Flusher).Flush()
		<-r.Context().Done()
	}))
	t.Cleanup(func() { s.CloseClientConnections(); s.Close() })
	return s
}

func TestLifeline(t *testing.T) {
	noLeak(t)
	open := make(chan struct{})
	held := lifelineServer(t, open)
	var asked atomic.Int64
	absent := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		http.NotFound(rw, r)
	}))
	t.Cleanup(absent.Close)
	began := time.Now()
	w := watch(t, fleet.WatcherConfig{})
	l := fleet.WatchLifeline(w, fleet.LifelineConfig{Backoff: 5 * time.Millisecond, Most: 20 * time.Millisecond})
	t.Cleanup(l.Close)
	add := func(id, url string) {
		t.Helper()
		i := instance(id, fleet.Prefill)
		i.URL = url
		if err := w.AddStatic(i, fleet.Static); err != nil {
			t.Fatal(err)
		}
	}
	add("absent", absent.URL)
	add("refused", "http://127.0.0.1:1")
	add("held", held.URL)
	heard := w.Snapshot().Get("held").Heard
	close(open)
	within(t, "no lifeline", func() bool { return w.Snapshot().Get("held").Heard.After(heard) })
	held.CloseClientConnections()
	eventually(t, w, "death", is("held", fleet.Dead))
	// The process is back, at the same place: the lifeline finds it.
	eventually(t, w, "return", is("held", fleet.Live))
	for _, id := range []string{"absent", "refused"} {
		if !is(id, fleet.Live)(w.Snapshot()) {
			t.Errorf("%s died of having no lifeline", id)
		}
	}
	if n := asked.Load(); n > 3+int64(time.Since(began)/(5*time.Millisecond/2)) {
		t.Errorf("who has no lifeline was asked for one %d times in %v", n, time.Since(began))
	}
	w.Remove("held", "test")
}
