package router_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router"
)

// TestRetries: whatever one member of a pair does wrong before a byte went
// out, the client gets the story from another pair.
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
				g := newRig(t, 2, 2)
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
				for range 4 { // the bad one is chosen at least once
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
	select {
	case <-ended:
	case <-time.After(time.Second):
		t.Error("prefill's leg goes on")
	}
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
				w.Header().Set("Content-Type", "text/event-stream")
				fmt.Fprint(w, "data: {\"n\":0}\n\n")
				w.(http.Flusher).Flush()
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
			if took := time.Since(start); took > 2*time.Second {
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
func TestRefusedConnectionIsDeath(t *testing.T) {
	t.Parallel()
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

// TestClientLeaves: both legs are closed within 100 ms, whatever is going on.
func TestClientLeaves(t *testing.T) {
	for _, secure := range []bool{false, true} {
		for _, body := range []string{ask, askStream} {
			for _, streaming := range []bool{false, true} {
				if streaming && body == ask {
					continue
				}
				t.Run(fmt.Sprintf("tls %v, stream %v, started %v", secure, body == askStream, streaming), func(t *testing.T) {
					clientLeaves(t, secure, body, streaming)
				})
			}
		}
	}
}

func clientLeaves(t *testing.T, secure bool, body string, streaming bool) {
	var edit []func(*router.Config)
	if secure {
		cert, key := certificate(t)
		edit = append(edit, func(c *router.Config) { c.TLSCert, c.TLSKey = cert, key })
	}
	g := newRig(t, 1, 1, edit...)
	started, ended := make(chan time.Time, 2), make(chan time.Time, 2)
	p, d := g.workers["p0"], g.workers["d0"]
	p.on(&p.prefill, hold(started, ended))
	d.on(&d.decode, func(w http.ResponseWriter, r *http.Request) {
		if streaming {
			w.Header().Set("Content-Type", "text/event-stream")
			fmt.Fprint(w, "data: {}\n\n")
			w.(http.Flusher).Flush()
		}
		hold(started, ended)(w, r)
	})
	var conn net.Conn
	var err error
	if secure {
		conn, err = tls.Dial("tcp", g.r.Addr().String(), &tls.Config{InsecureSkipVerify: true})
	} else {
		conn, err = net.Dial("tcp", g.r.Addr().String())
	}
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprintf(conn, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
	<-started
	<-started
	if streaming {
		if _, err := io.ReadAtLeast(conn, make([]byte, 4096), 100); err != nil {
			t.Fatal(err)
		}
	}
	left := time.Now()
	conn.Close()
	for range 2 {
		select {
		case at := <-ended:
			if took := at.Sub(left); took > 100*time.Millisecond {
				t.Errorf("a leg ended after %v", took)
			}
		case <-time.After(5 * time.Second):
			t.Fatal("a leg goes on")
		}
	}
	g.until("a 499 in the log", func() bool { return strings.Contains(g.logs.String(), "status=499") })
}

// certificate writes a self-signed pair for loopback.
func certificate(t *testing.T) (cert, key string) {
	t.Helper()
	priv, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &priv.PublicKey, priv)
	if err != nil {
		t.Fatal(err)
	}
	pk, err := x509.MarshalECPrivateKey(priv)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	write := func(name, kind string, b []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: b}), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	return write("cert.pem", "CERTIFICATE", der), write("key.pem", "EC PRIVATE KEY", pk)
}

// TestDeadline: the header shortens a request's life; before the first byte it
// is a 504, after it an error event.
func TestDeadline(t *testing.T) {
	g := newRig(t, 1, 1)
	p, d := g.workers["p0"], g.workers["d0"]
	started, ended := make(chan time.Time, 4), make(chan time.Time, 4)
	p.on(&p.prefill, hold(started, ended))
	d.on(&d.decode, hold(started, ended))
	resp, body := g.post("/v1/completions", ask, "x-request-timeout-ms", "50")
	if resp.StatusCode != 504 {
		t.Errorf("%d %q", resp.StatusCode, body)
	}
	apiError(t, body)
	<-ended
	<-ended
	d.on(&d.decode, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprint(w, "data: {\"n\":0}\n\n")
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	})
	_, body = g.post("/v1/completions", askStream, "x-request-timeout-ms", "80")
	if !strings.Contains(body, `"code":"deadline_exceeded"`) {
		t.Errorf("%q", body)
	}
	if resp, _ := g.post("/v1/completions", ask, "x-request-timeout-ms", "-1"); resp.StatusCode != 400 {
		t.Errorf("%d", resp.StatusCode)
	}
}

// TestSlowClient: a client that does not read stops decode instead of filling
// the router, and is let go after StallTimeout.
func TestSlowClient(t *testing.T) {
	g := newRig(t, 1, 1, func(c *router.Config) { c.StallTimeout = 300 * time.Millisecond })
	d := g.workers["d0"]
	sent := make(chan int, 1)
	event := "data: " + strings.Repeat("x", 16<<10) + "\n\n"
	d.on(&d.decode, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		n := 0
		for ; n < 1<<30; n += len(event) {
			if _, err := io.WriteString(w, event); err != nil || r.Context().Err() != nil {
				break
			}
		}
		sent <- n
	})
	conn, err := net.Dial("tcp", g.r.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprintf(conn, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", len(askStream), askStream)
	select {
	case n := <-sent:
		if n > 64<<20 { // socket buffers, nothing more
			t.Errorf("%d bytes went somewhere", n)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("decode still sends")
	}
	g.until("a 499 in the log", func() bool { return strings.Contains(g.logs.String(), "stopped reading") })
}

func TestAdmission(t *testing.T) {
	g := newRig(t, 1, 1, func(c *router.Config) {
		c.Limits.MaxInFlight, c.Limits.MaxQueue, c.Limits.QueueWait = 1, 1, 100*time.Millisecond
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
	wg.Go(func() { resp, _ := g.post("/v1/completions", ask); status <- resp.StatusCode })
	<-running
	wg.Go(func() { resp, _ := g.post("/v1/completions", ask); status <- resp.StatusCode })
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
	if got := <-status; got != 503 { // it waited too long
		t.Errorf("%d", got)
	}
	wg.Go(func() { resp, _ := g.post("/v1/completions", ask); status <- resp.StatusCode })
	lim := router.DefaultConfig().Limits
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

// TestShutdown: running streams go on to their end, idle connections do not
// delay it; past the deadline streams end with an error event.
func TestShutdown(t *testing.T) {
	for _, patient := range []bool{true, false} {
		g := newRig(t, 1, 1)
		d := g.workers["d0"]
		free := make(chan struct{})
		d.on(&d.decode, func(w http.ResponseWriter, r *http.Request) {
			streamed(3, func(i int) {
				if i == 1 {
					select {
					case <-free:
					case <-r.Context().Done():
					}
				}
			})(w, r)
		})
		got := make(chan string, 1)
		go func() {
			_, body := g.post("/v1/completions", askStream)
			got <- body
		}()
		g.until("the stream", func() bool { return d.calls.Load() == 1 && !g.idle() })
		g.stopped = true
		timeout := 10 * time.Second
		if !patient {
			timeout = 150 * time.Millisecond
		}
		ctx, cancel := context.WithTimeout(context.Background(), timeout)
		done := make(chan error, 1)
		go func() { done <- g.r.Shutdown(ctx) }()
		g.until("not ready", func() bool { return !g.r.Ready() })
		if patient {
			close(free)
		}
		err := <-done
		body := <-got
		cancel()
		if patient && (err != nil || body != storyText) {
			t.Errorf("%v, %q", err, body)
		}
		if !patient && (err == nil || !strings.Contains(body, "shutting down")) {
			t.Errorf("%v, %q", err, body)
		}
	}
}

// TestManyAtOnce: concurrent requests while workers fail now and then; all are
// answered, and the ledger is empty after (newRig checks).
func TestManyAtOnce(t *testing.T) {
	g := newRig(t, 3, 3)
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
	for _, f := range families {
		if f.GetName() == "xpyd_router_requests_total" {
			for _, m := range f.GetMetric() {
				if m.GetLabel()[1].GetValue() == "/v1/completions" && m.GetCounter().GetValue() != 1 {
					t.Errorf("the probe counts as a user's request: %v", m)
				}
			}
		}
	}
}

// The fleet's watcher is all that the router can use of a fleet.
var (
	_ router.Fleet   = (*fleet.Watcher)(nil)
	_ router.Editor  = (*fleet.Watcher)(nil)
	_ router.Reviver = (*fleet.Watcher)(nil)
)
