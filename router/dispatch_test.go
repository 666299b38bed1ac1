package router_test

import (
	"fmt"
	"net"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router"
	"github.com/xpyd/xpyd/router/apikey"
)

// TestRetries: whatever goes wrong with one member of a pair before the first byte is
// sent, the client gets the story from another pair.
func TestRetries(t *testing.T) {
	t.Parallel()
	cut := func(w http.ResponseWriter, r *http.Request) { // a header, and half an answer
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Content-Length", "1000")
		fmt.Fprint(w, `{"half":`)
		w.(http.Flusher).Flush()
		reset(w, r)
	}
	for name, c := range map[string]struct {
		bad  string // the worker that fails
		fail http.HandlerFunc
	}{
		"prefill resets":                {"p0", reset},
		"prefill has no space":          {"p0", outcome(503, "no_space")},
		"prefill is late":               {"p0", outcome(504, "late")},
		"decode resets":                 {"d0", reset},
		"decode has no space":           {"d0", outcome(503, "no_space")},
		"decode says corrupt":           {"d0", outcome(502, "corrupt")},
		"decode is cut before an event": {"d0", cut},
		"decode answers with a page": {"d0", func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(503)
			fmt.Fprint(w, "<html>busy</html>")
		}},
	} {
		for _, body := range []string{ask, askStream} {
			t.Run(fmt.Sprintf("%s, %d", name, len(body)), func(t *testing.T) {
				g := newRig(t, 2, 2, func(c *router.Config) { c.Pick.Policy = "round_robin" })
				bad := g.workers[c.bad]
				bad.on(&bad.prefill, c.fail)
				bad.on(&bad.decode, c.fail)
				if bad.id == "p0" { // decode waits for prefill, as a real one does
					for _, id := range []string{"d0", "d1"} {
						d := g.workers[id]
						d.on(&d.decode, func(w http.ResponseWriter, r *http.Request) {
							if r.Header.Get("x-xpyd-prefill") == "p0" {
								<-r.Context().Done()
								return
							}
							story(w, r)
						})
					}
				}
				// The bad one is chosen at least once; later, if it was not probed yet.
				for n, late := 0, time.Now().Add(time.Minute); n < 4 || bad.calls.Load() == 0 && time.Now().Before(late); n++ {
					resp, text := g.post("/v1/completions", body)
					if resp.StatusCode != 200 || text != storyText {
						t.Fatalf("%d %q", resp.StatusCode, text)
					}
				}
				if bad.calls.Load() == 0 {
					t.Error("the bad worker was never asked")
				}
			})
		}
	}
}

// TestHearsay: decode reports that its partner is dead or gave up; the
// partner's own word decides who is avoided.
func TestHearsay(t *testing.T) {
	g := newRig(t, 1, 2)
	p := g.workers["p0"]
	p.on(&p.prefill, outcome(503, "cancelled"))
	g.workers["d0"].on(&g.workers["d0"].decode, outcome(503, "no_space"))
	d1 := g.workers["d1"]
	d1.on(&d1.decode, func(w http.ResponseWriter, r *http.Request) {
		p.on(&p.prefill, prefillDone)
		story(w, r)
	})
	for range 2 {
		p.on(&p.prefill, func(w http.ResponseWriter, r *http.Request) {
			var l [256]byte
			r.Body.Read(l[:])
			p.mu.Lock()
			toBad := strings.Contains(string(p.body), `"d0"`)
			p.mu.Unlock()
			if toBad {
				outcome(503, "cancelled")(w, r)
				return
			}
			prefillDone(w, r)
		})
		if resp, text := g.post("/v1/completions", ask); resp.StatusCode != 200 || text != storyText {
			t.Errorf("%d %q", resp.StatusCode, text)
		}
	}
}

func TestExhausted(t *testing.T) {
	g := newRig(t, 1, 1)
	d := g.workers["d0"]
	f := func(h http.HandlerFunc, status int, calls int64) {
		t.Helper()
		d.on(&d.decode, h)
		before := d.calls.Load()
		resp, body := g.post("/v1/completions", ask)
		if resp.StatusCode != status || d.calls.Load()-before != calls {
			t.Errorf("%d after %d calls: %q", resp.StatusCode, d.calls.Load()-before, body)
		}
		apiError(t, body)
	}
	f(outcome(503, "no_space"), 503, 3)
	f(outcome(504, "late"), 504, 3)
	f(outcome(502, "refused"), 502, 1) // relayed
	f(outcome(400, ""), 400, 1)        // the client's
	f(outcome(500, ""), 500, 1)        // decode's own words
}

// TestBudget: retries of overload are budgeted over all requests; what a lost
// worker had in flight is repeated without one.
func TestBudget(t *testing.T) {
	f := func(fail http.HandlerFunc, want int) {
		t.Helper()
		g := newRig(t, 1, 2, func(c *router.Config) { c.RetryRatio, c.RetryBurst, c.RetryMin = 0, 0, 0 })
		for _, id := range []string{"d0", "d1"} { // the first decode that is asked
			d := g.workers[id]
			d.on(&d.decode, func(w http.ResponseWriter, r *http.Request) {
				for _, w := range g.workers {
					w.on(&w.decode, story)
				}
				fail(w, r)
			})
		}
		if resp, body := g.post("/v1/completions", ask); resp.StatusCode != want {
			t.Errorf("%d, want %d: %s", resp.StatusCode, want, body)
		}
	}
	f(outcome(503, "no_space"), 503)
	f(reset, 200)
}

// TestPrefillFailureAfterCommit: once decode answers, prefill's fate does not
// matter.
func TestPrefillFailureAfterCommit(t *testing.T) {
	g := newRig(t, 1, 1)
	p, d := g.workers["p0"], g.workers["d0"]
	answered := make(chan struct{})
	p.on(&p.prefill, func(w http.ResponseWriter, r *http.Request) {
		<-answered
		reset(w, r)
	})
	d.on(&d.decode, streamed(3, func(i int) {
		if i == 1 {
			<-answered
			g.until("prefill to fail", func() bool { return p.active.Load() == 0 })
			time.Sleep(20 * time.Millisecond) // room for the wrong reaction
		}
	}))
	status, text := g.stream(askStream, func() { close(answered) })
	if status != 200 || text != storyText {
		t.Errorf("%d %q", status, text)
	}
}

// TestDecodeRejects: a 4xx of decode is relayed and ends prefill's leg.
func TestDecodeRejects(t *testing.T) {
	g := newRig(t, 1, 1)
	p, d := g.workers["p0"], g.workers["d0"]
	started, ended := make(chan time.Time, 1), make(chan time.Time, 1)
	p.on(&p.prefill, hold(started, ended))
	d.on(&d.decode, func(w http.ResponseWriter, r *http.Request) {
		<-started
		outcome(400, "")(w, r)
	})
	resp, body := g.post("/v1/completions", ask)
	if resp.StatusCode != 400 || apiError(t, body).Message != "says the mock" {
		t.Errorf("%d %q", resp.StatusCode, body)
	}
	g.until("prefill's leg to end", func() bool { return len(ended) == 1 })
}

// TestDeathEndsStream: a stream whose decode worker dies ends with an error
// event after the last whole event, never in silence.
func TestDeathEndsStream(t *testing.T) {
	for name, die := range map[string]func(g *rig, w http.ResponseWriter, r *http.Request){
		"reset": func(_ *rig, w http.ResponseWriter, r *http.Request) {
			fmt.Fprint(w, "data: {\"half")
			w.(http.Flusher).Flush()
			reset(w, r)
		},
		"declared dead": func(g *rig, _ http.ResponseWriter, r *http.Request) { <-r.Context().Done() },
		"ends early":    func(*rig, http.ResponseWriter, *http.Request) {},
	} {
		t.Run(name, func(t *testing.T) {
			g := newRig(t, 1, 1)
			d := g.workers["d0"]
			d.on(&d.decode, func(w http.ResponseWriter, r *http.Request) {
				begin(w)
				die(g, w, r)
			})
			start := time.Now()
			status, text := g.stream(askStream, func() {
				if name == "declared dead" {
					g.watcher.ReportDead("d0", 1, "test")
				}
			})
			first, rest, _ := strings.Cut(text, "\n\n")
			if status != 200 || first != `data: {"n":0}` || !strings.HasSuffix(rest, "\n\n") {
				t.Fatalf("%d %q", status, text)
			}
			apiError(t, strings.TrimPrefix(rest, "data: "))
			if took := time.Since(start); took > patience {
				t.Errorf("took %v", took)
			}
		})
	}
}

// TestDeathBeforeFirstByte: legs on a worker that the fleet declares dead end
// at once, and the request moves on, also while decode is silent.
func TestDeathBeforeFirstByte(t *testing.T) {
	for _, dead := range []string{"p0", "d0"} {
		g := newRig(t, 2, 2)
		var once sync.Once
		for _, id := range []string{"d0", "d1"} {
			d := g.workers[id]
			d.on(&d.decode, func(w http.ResponseWriter, r *http.Request) {
				if d.id == "d0" && dead == "d0" || r.Header.Get("x-xpyd-prefill") == dead {
					once.Do(func() { g.watcher.ReportDead(dead, 1, "test") })
					<-r.Context().Done()
					return
				}
				story(w, r)
			})
		}
		p0 := g.workers["p0"]
		p0.on(&p0.prefill, func(w http.ResponseWriter, r *http.Request) {
			if dead == "p0" {
				<-r.Context().Done()
				return
			}
			prefillDone(w, r)
		})
		for range 4 {
			if resp, text := g.post("/v1/completions", askStream); resp.StatusCode != 200 || text != storyText {
				t.Errorf("%s: %d %q", dead, resp.StatusCode, text)
			}
		}
	}
}

// TestRefusedConnectionIsDeath: a worker whose port is closed is reported.
func TestRefusedConnectionIsDeath(t *testing.T) { // not beside others, whose servers might get its port
	g := newRig(t, 2, 1)
	g.workers["p0"].srv.CloseClientConnections()
	g.workers["p0"].srv.Close()
	for range 4 {
		if resp, text := g.post("/v1/completions", ask); resp.StatusCode != 200 {
			t.Errorf("%d %q", resp.StatusCode, text)
		}
	}
	if m := g.watcher.Snapshot().Get("p0"); m.State != fleet.Dead {
		t.Errorf("state %s", m.State)
	}
	// A static member that takes connections again is probed and used again.
	old := g.workers["p0"]
	ln, err := net.Listen("tcp", strings.TrimPrefix(old.srv.URL, "http://"))
	if err != nil {
		t.Skip("its port was taken meanwhile")
	}
	probes := old.probes.Load()
	back := &http.Server{Handler: old}
	go back.Serve(ln)
	defer back.Close()
	g.until("p0 to be back", func() bool {
		return g.watcher.Snapshot().Get("p0").State == fleet.Live && old.probes.Load() > probes
	})
}

func TestAdmission(t *testing.T) {
	g := newRig(t, 1, 1, func(c *router.Config) {
		c.Limits.MaxInFlight, c.Limits.MaxQueue, c.Limits.QueueWait = 1, 1, 50*time.Millisecond
	})
	d := g.workers["d0"]
	running, free := make(chan struct{}, 4), make(chan struct{})
	d.on(&d.decode, func(w http.ResponseWriter, r *http.Request) {
		running <- struct{}{}
		<-free
		story(w, r)
	})
	var wg sync.WaitGroup
	status := make(chan int, 2)
	send := func() { resp, _ := g.post("/v1/completions", ask); status <- resp.StatusCode }
	wg.Go(send)
	<-running
	if resp, body := g.post("/v1/completions", ask); resp.StatusCode != 503 { // it waited too long
		t.Errorf("%d %q", resp.StatusCode, body)
	}
	lim := router.DefaultConfig().Limits
	lim.MaxInFlight, lim.MaxQueue, lim.QueueWait = 1, 1, time.Hour
	if err := g.r.Reload(lim, "round_robin"); err != nil {
		t.Fatal(err)
	}
	wg.Go(send)
	g.until("one to wait", func() bool {
		var l struct{ Waiting int }
		g.adminJSON("GET", "/debug/ledger", "", &l)
		return l.Waiting == 1
	})
	resp, body := g.post("/v1/completions", ask)
	if resp.StatusCode != 429 || resp.Header.Get("Retry-After") == "" {
		t.Errorf("%d %q", resp.StatusCode, body)
	}
	apiError(t, body)
	lim.MaxInFlight = 2
	if err := g.r.Reload(lim, "round_robin"); err != nil {
		t.Fatal(err)
	}
	<-running // more room: the waiting one runs
	close(free)
	wg.Wait()
	if a, b := <-status, <-status; a != 200 || b != 200 {
		t.Errorf("%d, %d", a, b)
	}
	lim.QueueWait = 0
	if err := g.r.Reload(lim, "prefix"); err == nil || !strings.HasPrefix(err.Error(), "limits.queue_wait") {
		t.Errorf("%v", err)
	}
}

// TestNoModelNamed: a request that names no model waits like any other for the only
// decode to come back, and then means the model that it serves. It never gets "unknown
// model".
func TestNoModelNamed(t *testing.T) {
	paths := map[string]string{
		"/v1/completions":      `{"prompt":"x"}`,
		"/v1/chat/completions": `{"model":"","messages":[{"role":"user","content":"x"}]}`,
		"/v1/embeddings":       `{"input":"x"}`,
	}
	drain := func(g *rig, on bool) {
		inst := g.workers["d0"].inst
		if inst.Draining = on; !on {
			inst.Epoch++
		}
		if err := g.watcher.AddStatic(inst, fleet.Static); err != nil {
			t.Fatal(err)
		}
	}
	keys := newKeyFile(t, apikey.Key{Name: "some", Models: []string{"m"}})
	for path, ask := range paths {
		t.Run(path, func(t *testing.T) {
			g := newRig(t, 1, 1, keys.config)
			drain(g, true)
			resp, body := g.post(path, ask, keys.of("some")...)
			if resp.StatusCode != 503 || resp.Header.Get("Retry-After") == "" {
				t.Errorf("%d %s", resp.StatusCode, body)
			}
		})
		t.Run(path+" waits", func(t *testing.T) {
			g := newRig(t, 1, 1, keys.config, func(c *router.Config) { c.Limits.PairWait = time.Minute })
			d := g.workers["d0"]
			d.on(&d.decode, whole)
			drain(g, true)
			answer := make(chan int, 1)
			go func() {
				resp, _ := g.post(path, ask, keys.of("some")...)
				answer <- resp.StatusCode
			}()
			g.until("a request that waits for a pair", func() bool {
				var l struct{ Requests []struct{ State string } }
				g.adminJSON("GET", "/debug/ledger", "", &l)
				return len(answer) == 1 || len(l.Requests) == 1 && l.Requests[0].State == "picking"
			})
			drain(g, false)
			if status := <-answer; status != 200 {
				t.Errorf("%d", status)
			}
		})
	}
}

// TestManyAtOnce: concurrent requests while workers fail now and then; all are
// answered, and the ledger is empty after (newRig checks).
func TestManyAtOnce(t *testing.T) {
	g := newRig(t, 3, 3, func(c *router.Config) { c.Attempts = 10 }) // a starved machine fails some connects too
	for _, id := range []string{"p2", "d2"} {
		m := g.workers[id]
		m.on(&m.prefill, reset)
		m.on(&m.decode, reset)
	}
	for _, id := range []string{"d0", "d1", "d2"} {
		d := g.workers[id]
		healthy := *d.decode.Load()
		d.on(&d.decode, func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("x-xpyd-prefill") == "p2" {
				<-r.Context().Done()
				return
			}
			healthy(w, r)
		})
	}
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			for range 20 {
				body := []string{ask, askStream}[i%2]
				if resp, text := g.post("/v1/completions", body); resp.StatusCode != 200 || text != storyText {
					t.Errorf("%d %q", resp.StatusCode, text)
				}
			}
		})
	}
	wg.Wait()
}

func TestMetricNames(t *testing.T) {
	g := newRig(t, 1, 1)
	g.post("/v1/completions", askStream)
	g.until("idle", g.idle)
	problems, err := testutil.GatherAndLint(g.reg)
	if err != nil || len(problems) > 0 {
		t.Errorf("%v, %v", problems, err)
	}
	families, _ := g.reg.Gather()
	name := regexp.MustCompile(`^xpyd_[a-z0-9_]+$`)
	for _, f := range families {
		if !name.MatchString(f.GetName()) || !strings.Contains(f.GetHelp(), " ") {
			t.Errorf("%q is no name, or %q no sentence", f.GetName(), f.GetHelp())
		}
		if f.GetName() == "xpyd_router_requests_total" {
			for _, m := range f.GetMetric() {
				if m.GetLabel()[1].GetValue() == "/v1/completions" && m.GetCounter().GetValue() != 1 {
					t.Errorf("the probe counts as a user's request: %v", m)
				}
			}
		}
	}
}

// TestMetricsTaken: a router whose metrics cannot be registered leaves none behind.
func TestMetricsTaken(t *testing.T) {
	g, reg := newRig(t, 0, 0), prometheus.NewRegistry()
	taken := prometheus.NewGauge(prometheus.GaugeOpts{Name: "xpyd_router_requests_total", Help: "Another's."})
	reg.MustRegister(taken)
	cfg := router.DefaultConfig()
	cfg.AdminListen = ""
	if _, err := router.New(cfg, router.Deps{Fleet: g.watcher, Registerer: reg}); err == nil {
		t.Error("a name is taken twice")
	}
	reg.Unregister(taken)
	if left, err := reg.Gather(); err != nil || len(left) > 0 {
		t.Errorf("%v, %v", left, err)
	}
}

// TestSmallerRefuses: where workers have room for requests of different length, each goes to one that may have
// room, and what a smaller one refuses is asked of a larger one; only what the largest refuses is the client's fault.
func TestSmallerRefuses(t *testing.T) {
	t.Parallel()
	refuse := func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusBadRequest)
		fmt.Fprint(w, `{"error":{"message":"over the limit","type":"invalid_request_error"}}`)
	}
	g := newRig(t, 1, 3, func(c *router.Config) { c.Pick.Policy = "round_robin" })
	small := []*mock{g.add("s0", fleet.Decode, func(i *fleet.Instance) { i.MaxModelLen = 100 }), g.add("s1", fleet.Decode, func(i *fleet.Instance) { i.MaxModelLen = 90 })}
	asked := func() (n int64) {
		for _, m := range small {
			m.on(&m.decode, refuse)
			n += m.calls.Load()
		}
		return n
	}
	asked()
	g.until("all to be probed", func() bool { return small[0].probes.Load() > 0 && small[1].probes.Load() > 0 })
	for range 12 {
		if resp, text := g.post("/v1/completions", `{"model":"m","prompt":"hi","max_tokens":200}`); resp.StatusCode != 200 {
			t.Fatalf("%d %s", resp.StatusCode, text)
		}
	}
	if n := asked(); n > 0 {
		t.Errorf("those that have no room for it were asked %d times", n)
	}
	for range 12 { // of which nobody can tell how long it is
		if resp, text := g.post("/v1/completions", `{"model":"m","prompt":"hi"}`); resp.StatusCode != 200 {
			t.Fatalf("%d %s", resp.StatusCode, text)
		}
	}
	if n := asked(); n == 0 {
		t.Error("they were never asked")
	}
	for _, id := range []string{"d0", "d1", "d2"} {
		m := g.workers[id]
		m.on(&m.decode, refuse)
	}
	for range 6 {
		if resp, text := g.post("/v1/completions", `{"model":"m","prompt":"hi"}`); resp.StatusCode != 400 || !strings.Contains(text, `"over the limit"`) {
			t.Errorf("%d %s", resp.StatusCode, text)
		}
	}
	g.until("the ledger to be empty", g.idle)
}

// TestStartedAgain: a worker that died with a request and was started again takes the next try, as the only one.
func TestStartedAgain(t *testing.T) {
	t.Parallel()
	for _, id := range []string{"d0", "p0"} {
		g := newRig(t, 1, 1, func(c *router.Config) { c.Limits.PairWait = 20 * time.Second })
		again := g.workers[id].inst
		again.Epoch = 2
		first := func(w http.ResponseWriter, r *http.Request) {
			if err := g.watcher.AddStatic(again, fleet.Static); err != nil {
				t.Error(err)
			}
			g.workers["d0"].on(&g.workers["d0"].decode, story)
			g.workers["p0"].on(&g.workers["p0"].prefill, prefillDone)
			reset(w, r)
		}
		g.workers[id].on(&g.workers[id].prefill, first)
		g.workers[id].on(&g.workers[id].decode, first)
		if resp, text := g.post("/v1/completions", ask); resp.StatusCode != 200 {
			t.Errorf("%s: %d %s", id, resp.StatusCode, text)
		}
	}
}
