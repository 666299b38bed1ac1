package router_test

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime"
	"runtime/pprof"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router"
)

// TestMain lets more tests run side by side than there are processors: those
// that may, wait.
func TestMain(m *testing.M) {
	flag.Parse()
	if f := flag.Lookup("test.parallel"); f.Value.String() == strconv.Itoa(runtime.GOMAXPROCS(0)) {
		_ = f.Value.Set("8") // a number, which it takes
	}
	os.Exit(m.Run())
}

// mock is a fake worker on a real loopback listener. Its handlers can be
// replaced; the defaults answer at once.
type mock struct {
	id      string
	srv     *httptest.Server
	inst    fleet.Instance
	prefill atomic.Pointer[http.HandlerFunc]
	decode  atomic.Pointer[http.HandlerFunc]
	other   atomic.Pointer[http.HandlerFunc] // all other paths
	health  atomic.Pointer[http.HandlerFunc] // which is no leg; nil answers
	raw     atomic.Pointer[rawHandler]       // asked first; nil asks nobody
	calls   atomic.Int64                     // legs, without probes
	probes  atomic.Int64
	active  atomic.Int64

	mu   sync.Mutex
	last http.Header // of the last leg
	body []byte
}

// rawHandler handles a request whose body was not read, or says that it does
// not want it.
type rawHandler struct {
	serve func(http.ResponseWriter, *http.Request) bool
}

func (m *mock) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if raw := m.raw.Load(); raw != nil && raw.serve(w, r) {
		return
	}
	if health := m.health.Load(); r.URL.Path == "/health" {
		if health != nil {
			(*health)(w, r)
		}
		return
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	m.active.Add(1)
	defer m.active.Add(-1)
	h := m.other.Load()
	switch r.URL.Path {
	case "/xpyd/v1/prefill":
		h = m.prefill.Load()
	case "/v1/completions", "/v1/chat/completions":
		h = m.decode.Load()
	}
	if r.Header.Get("x-xpyd-probe") != "" { // probes always succeed, unless the test says otherwise
		m.probes.Add(1)
		if r.Header.Get("x-xpyd-link") == "" {
			prefillDone(w, r)
		} else {
			w.Header().Set("Content-Type", "application/json")
			fmt.Fprint(w, `{"choices":[]}`)
		}
		return
	}
	m.calls.Add(1)
	m.mu.Lock()
	m.last, m.body = r.Header, body
	m.mu.Unlock()
	(*h)(w, r)
}

func (m *mock) on(slot *atomic.Pointer[http.HandlerFunc], h http.HandlerFunc) { slot.Store(&h) }

func prefillDone(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	fmt.Fprint(w, `{"outcome":"done"}`)
}

// outcome fails a leg in words.
func outcome(status int, o string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("x-xpyd-outcome", o)
		w.WriteHeader(status)
		if r.URL.Path == "/xpyd/v1/prefill" {
			fmt.Fprintf(w, `{"outcome":%q,"message":"says the mock"}`, o)
			return
		}
		fmt.Fprint(w, `{"error":{"message":"says the mock","type":"server_error","param":null,"code":null}}`)
	}
}

// reset breaks the connection without an answer.
func reset(w http.ResponseWriter, _ *http.Request) {
	conn, _, _ := w.(http.Hijacker).Hijack()
	conn.(*net.TCPConn).SetLinger(0)
	conn.Close()
}

// hold waits until the router closes the leg, and says when.
func hold(started, ended chan<- time.Time) http.HandlerFunc {
	return func(_ http.ResponseWriter, r *http.Request) {
		started <- time.Now()
		<-r.Context().Done()
		ended <- time.Now()
	}
}

// story answers with three events, or whole if the request does not stream.
func story(w http.ResponseWriter, _ *http.Request) { tell(w, 3, nil) }

func streamed(n int, pause func(i int)) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { tell(w, n, pause) }
}

// begin sends the first event of a stream.
func begin(w http.ResponseWriter) {
	w.Header().Set("Content-Type", "text/event-stream")
	fmt.Fprint(w, "data: {\"n\":0}\n\n")
	w.(http.Flusher).Flush()
}

// flood streams events for as long as they are taken, and counts their bytes.
func flood(event string, sent *atomic.Int64) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for r.Context().Err() == nil && sent.Load() < 1<<30 {
			if _, err := io.WriteString(w, event); err != nil {
				return
			}
			sent.Add(int64(len(event)))
		}
	}
}

func tell(w http.ResponseWriter, n int, pause func(i int)) {
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Server-Timing", "prefill;dur=1.5, kv;dur=0.5")
	for i := range n {
		if pause != nil {
			pause(i)
		}
		fmt.Fprintf(w, "data: {\"n\":%d}\n\n", i)
		w.(http.Flusher).Flush()
	}
	fmt.Fprint(w, "data: [DONE]\n\n")
}

const storyText = "data: {\"n\":0}\n\ndata: {\"n\":1}\n\ndata: {\"n\":2}\n\ndata: [DONE]\n\n"

func whole(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	fmt.Fprint(w, `{"whole":true}`)
}

// rig is a router in front of mocks.
type rig struct {
	t       *testing.T
	r       *router.Router
	watcher *fleet.Watcher
	reg     *prometheus.Registry
	logs    *logs
	workers map[string]*mock
	coming  atomic.Pointer[func(id string) bool] // whether a worker is about to start; nil: none is
	url     string
	admin   string
	client  *http.Client
	stopped bool
	lack    atomic.Pointer[error] // what the router's dialling fails with, for now
}

type logs struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *logs) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *logs) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

// newRig starts np+nd mocks (p0…, d0…) and a router, and waits until it is
// ready. At the end it checks that nothing is left.
func newRig(t *testing.T, np, nd int, edit ...func(*router.Config)) *rig {
	t.Helper()
	return newRigOf(t, nil, np, nd, edit...)
}

// newRigOf is newRig with a router that is given more.
func newRigOf(t *testing.T, given func(*router.Deps), np, nd int, edit ...func(*router.Config)) *rig {
	t.Helper()
	label(t)
	before := goroutines(t)
	g := &rig{t: t, reg: prometheus.NewRegistry(), logs: &logs{}, workers: map[string]*mock{}}
	var err error
	if g.watcher, err = fleet.Watch(fleet.WatcherConfig{Log: slog.New(slog.NewTextHandler(g.logs, nil))}); err != nil {
		t.Fatal(err)
	}
	for i := range np {
		g.add(fmt.Sprintf("p%d", i), fleet.Prefill)
	}
	for i := range nd {
		g.add(fmt.Sprintf("d%d", i), fleet.Decode)
	}
	cfg := router.DefaultConfig()
	cfg.Listen, cfg.AdminListen = "127.0.0.1:0", "127.0.0.1:0"
	cfg.Limits.PairWait = 200 * time.Millisecond
	for _, e := range edit {
		e(&cfg)
	}
	deps := router.Deps{Fleet: g.watcher, Registerer: g.reg, Gatherer: g.reg, AdminToken: "secret", AdminTokenRO: "reads", Version: "1.2.3",
		Coming: func(id string) bool { coming := g.coming.Load(); return coming != nil && (*coming)(id) },
		Log:    slog.New(slog.NewTextHandler(g.logs, &slog.HandlerOptions{Level: slog.LevelDebug}))}
	if given != nil {
		given(&deps)
	}
	g.r, err = router.New(cfg, deps)
	if err != nil {
		t.Fatal(err)
	}
	g.r.OnDial(func() error {
		if err := g.lack.Load(); err != nil {
			return *err
		}
		return nil
	})
	if err := g.r.Start(); err != nil {
		t.Fatal(err)
	}
	g.url, g.admin = "http://"+g.r.Addr().String(), "http://"+g.r.AdminAddr().String()
	g.client = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64}}
	t.Cleanup(func() { g.end(before) })
	if np > 0 && nd > 0 {
		g.until("every worker probed", func() bool {
			for _, i := range g.list().Instances {
				if !i.Probed {
					return false
				}
			}
			return g.r.Ready() && g.idle()
		})
	}
	return g
}

func (g *rig) add(id string, role fleet.Role, edit ...func(*fleet.Instance)) *mock {
	g.t.Helper()
	m := &mock{id: id}
	g.workers[id] = m
	m.on(&m.prefill, prefillDone)
	m.on(&m.decode, story)
	m.on(&m.other, whole)
	m.srv = httptest.NewServer(m)
	m.inst = fleet.Instance{ID: id, Epoch: 1, Role: role, URL: m.srv.URL, KVAddr: "127.0.0.1:1", Dialect: "native", Model: "m", MaxModelLen: 512}
	for _, e := range edit {
		e(&m.inst)
	}
	if err := g.watcher.AddStatic(m.inst, fleet.Static); err != nil {
		g.t.Fatal(err)
	}
	return m
}

// inOrder makes d0 answer once p0 was asked, as a decode does that needs what
// prefill computes: else it may be over before prefill's leg is sent.
func (g *rig) inOrder(decode http.HandlerFunc) {
	p, d := g.workers["p0"], g.workers["d0"]
	asked := make(chan struct{}, 64)
	p.on(&p.prefill, func(w http.ResponseWriter, r *http.Request) { prefillDone(w, r); asked <- struct{}{} })
	d.on(&d.decode, func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-asked:
			decode(w, r)
		case <-r.Context().Done():
		}
	})
}

// idle reports whether the router's ledger shows nothing.
func (g *rig) idle() bool {
	var l struct {
		Requests  []any `json:"requests"`
		Legs      int   `json:"legs"`
		Running   int   `json:"running"`
		ConnsBusy int   `json:"upstream_conns_busy"`
	}
	g.adminJSON("GET", "/debug/ledger", "", &l)
	return len(l.Requests) == 0 && l.Legs == 0 && l.Running == 0 && l.ConnsBusy == 0
}

// end checks that the ledger is empty and that nothing outlives the router.
func (g *rig) end(before int) {
	if !g.stopped {
		g.until("the ledger to be empty", g.idle)
		for id := range g.workers {
			var list struct {
				Instances []struct {
					ID       string         `json:"id"`
					InFlight map[string]int `json:"in_flight"`
				} `json:"instances"`
			}
			g.adminJSON("GET", "/admin/v1/instances", "", &list)
			for _, i := range list.Instances {
				if i.ID == id && i.InFlight["legs"]+i.InFlight["tokens"]+i.InFlight["seqs"]+i.InFlight["kv"] != 0 {
					g.t.Errorf("%s still counts %v", id, i.InFlight)
				}
			}
		}
		g.shutdown()
	}
	g.client.CloseIdleConnections()
	g.watcher.Close()
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		for _, m := range g.workers {
			m.srv.CloseClientConnections()
			m.srv.Close() // waits for handlers, of which a failed test may have left one waiting
		}
	}()
	g.until("the mocks' handlers to end", func() bool {
		select {
		case <-closed:
			return true
		default:
			return false
		}
	})
	g.until("goroutines to end", func() bool {
		http.DefaultClient.CloseIdleConnections()
		return goroutines(g.t) <= before
	})
}

// label marks the test's goroutine, and with it all that is started from there.
func label(t *testing.T) {
	pprof.SetGoroutineLabels(pprof.WithLabels(t.Context(), pprof.Labels("test", t.Name())))
}

// goroutines counts the test's, which carry its name, so that tests may run side
// by side; without the HTTP library's process-wide clock and its sweeper, which
// sleeps a little past its server's end.
func goroutines(t *testing.T) (n int) {
	var text bytes.Buffer
	if err := pprof.Lookup("goroutine").WriteTo(&text, 1); err != nil {
		t.Error(err)
	}
	for alike := range strings.SplitSeq(text.String(), "\n\n") {
		if !strings.Contains(alike, fmt.Sprintf(`"test":%q`, t.Name())) ||
			strings.Contains(alike, "fasthttp.updateServerDate.func1") || strings.Contains(alike, "fasthttp.(*workerPool).Start.func2") {
			continue
		}
		count, _, _ := strings.Cut(alike, " @")
		of, err := strconv.Atoi(strings.TrimPrefix(count[strings.LastIndex(count, "\n")+1:], " "))
		if err != nil {
			t.Error(err)
		}
		n += of
	}
	return n
}

func (g *rig) shutdown() {
	g.t.Helper()
	g.stopped = true
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	g.client.CloseIdleConnections()
	if err := g.r.Shutdown(ctx); err != nil {
		g.t.Errorf("shutdown: %v", err)
	}
}

func (g *rig) until(what string, ok func() bool) {
	g.t.Helper()
	deadline := time.Now().Add(time.Minute) // for starved machines; all waits are for events
	for !ok() {
		if time.Now().After(deadline) {
			buf := make([]byte, 1<<20)
			g.t.Fatalf("waited in vain for %s\n%s\n%s", what, g.logs, buf[:runtime.Stack(buf, true)])
		}
		time.Sleep(2 * time.Millisecond)
	}
}

func (g *rig) adminJSON(method, path, body string, v any) int {
	g.t.Helper()
	req, _ := http.NewRequest(method, g.admin+path, strings.NewReader(body))
	req.Header.Set("Authorization", "Bearer secret")
	resp, err := g.client.Do(req)
	if err != nil {
		g.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(resp.Body)
	if v != nil {
		if err := json.Unmarshal(b, v); err != nil {
			g.t.Fatalf("%s %s: %v", path, b, err)
		}
	}
	return resp.StatusCode
}
