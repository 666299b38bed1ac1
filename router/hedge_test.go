package router_test

import (
	"context"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	fake "github.com/xpyd/xpyd/internal/mock"
	"github.com/xpyd/xpyd/router"
)

func hedged(c *router.Config) {
	c.Hedge.Enabled, c.Hedge.Delay = true, time.Second // the first pair must have been asked by then
}

// hedges checks the counts of second requests: won, lost, failed, no_budget and
// no_pair.
func (g *rig) hedges(won, lost, failed, noBudget, noPair int) {
	g.t.Helper()
	fams, err := g.reg.Gather()
	if err != nil {
		g.t.Fatal(err)
	}
	got := map[string]int{}
	for _, f := range fams {
		if f.GetName() == "xpyd_router_hedges_total" {
			for _, m := range f.GetMetric() {
				got[m.GetLabel()[0].GetValue()] = int(m.GetCounter().GetValue())
			}
		}
	}
	want := map[string]int{"won": won, "lost": lost, "failed": failed, "no_budget": noBudget, "no_pair": noPair}
	for k, n := range want {
		if got[k] != n {
			g.t.Errorf("hedges %v, want %v", got, want)
			return
		}
	}
}

// first gives the first pair that is asked one behaviour, and the other pairs another.
func (g *rig) first(slow, fast http.HandlerFunc) (links func() []string) {
	var mu sync.Mutex
	var list []string
	for _, m := range g.workers {
		m.on(&m.decode, func(w http.ResponseWriter, r *http.Request) {
			mu.Lock()
			list = append(list, r.Header.Get("x-xpyd-link"))
			n := len(list)
			mu.Unlock()
			if n == 1 {
				slow(w, r)
			} else {
				fast(w, r)
			}
		})
	}
	return func() []string { mu.Lock(); defer mu.Unlock(); return list }
}

// TestHedgeWins: the first pair is silent, the second answers, and both legs of
// the first end.
func TestHedgeWins(t *testing.T) {
	t.Parallel()
	for _, body := range []string{ask, askStream} {
		g := newRig(t, 2, 2, hedged)
		started, ended := make(chan time.Time, 4), make(chan time.Time, 4)
		links := g.first(hold(started, ended), story)
		for _, id := range []string{"p0", "p1"} {
			p := g.workers[id]
			p.on(&p.prefill, func(w http.ResponseWriter, r *http.Request) {
				p.mu.Lock()
				link := strings.Contains(string(p.body), `"link"`)
				p.mu.Unlock()
				if !link {
					t.Error("no link")
				}
				prefillDone(w, r)
			})
		}
		resp, text := g.post("/v1/completions", body)
		if resp.StatusCode != 200 || text != storyText {
			t.Fatalf("%d %q", resp.StatusCode, text)
		}
		<-ended
		l := links()
		if len(l) != 2 || l[0] == l[1] {
			t.Errorf("links %v", l)
		}
		for _, m := range g.workers {
			m.mu.Lock()
			last := m.last.Get("x-xpyd-link")
			m.mu.Unlock()
			if m.id[0] == 'd' && last == l[1] && resp.Header.Get("x-xpyd-decode") != m.id {
				t.Errorf("%s answered, but the headers name %s", m.id, resp.Header.Get("x-xpyd-decode"))
			}
		}
		g.hedges(1, 0, 0, 0, 0)
	}
}

// TestHedgeLoses: the first pair answers while the second is out.
func TestHedgeLoses(t *testing.T) {
	t.Parallel()
	g := newRig(t, 2, 2, hedged)
	started, ended := make(chan time.Time, 4), make(chan time.Time, 4)
	g.first(func(w http.ResponseWriter, r *http.Request) {
		<-started
		story(w, r)
	}, hold(started, ended))
	resp, text := g.post("/v1/completions", askStream)
	if resp.StatusCode != 200 || text != storyText {
		t.Fatalf("%d %q", resp.StatusCode, text)
	}
	<-ended
	g.until("the second to be over", g.idle)
	g.hedges(0, 1, 0, 0, 0)
	if strings.Contains(g.logs.String(), "second attempt failed") {
		t.Error("that it was not needed is a warning")
	}
}

// TestHedgeSaves: the first pair fails while the second is out: that one is the
// retry, and needs none of its own.
func TestHedgeSaves(t *testing.T) {
	t.Parallel()
	g := newRig(t, 2, 2, hedged, func(c *router.Config) { c.Attempts = 1 })
	second, failed := make(chan struct{}), make(chan struct{})
	g.first(func(w http.ResponseWriter, r *http.Request) {
		<-second
		close(failed)
		outcome(503, "no_space")(w, r)
	}, func(w http.ResponseWriter, r *http.Request) {
		close(second)
		<-failed
		story(w, r)
	})
	if resp, text := g.post("/v1/completions", ask); resp.StatusCode != 200 || text != storyText {
		t.Fatalf("%d %q", resp.StatusCode, text)
	}
	g.hedges(1, 0, 0, 0, 0)
}

// TestHedgeFails: the second pair fails, and the first goes on.
func TestHedgeFails(t *testing.T) {
	t.Parallel()
	g := newRig(t, 2, 2, hedged)
	failed := make(chan struct{})
	var once sync.Once
	g.first(func(w http.ResponseWriter, r *http.Request) {
		<-failed
		g.until("the second to be over", func() bool {
			var l struct{ Legs int }
			g.adminJSON("GET", "/debug/ledger", "", &l)
			return l.Legs <= 1
		})
		story(w, r)
	}, func(w http.ResponseWriter, r *http.Request) {
		outcome(502, "corrupt")(w, r)
		once.Do(func() { close(failed) })
	})
	if resp, text := g.post("/v1/completions", ask); resp.StatusCode != 200 || text != storyText {
		t.Fatalf("%d %q", resp.StatusCode, text)
	}
	g.hedges(0, 0, 1, 0, 0)
	if !strings.Contains(g.logs.String(), "second attempt failed") {
		t.Error("that it failed is no warning")
	}
}

// TestHedgeLastResort: a 5xx that would be relayed is no answer while the other
// pair may give a better one, whichever of the two it comes from.
func TestHedgeLastResort(t *testing.T) {
	t.Parallel()
	broken := outcome(500, "")
	f := func(first, second http.HandlerFunc, secondFirst bool, status int, text string, won, lost, failed int) {
		t.Helper()
		g := newRig(t, 2, 2, hedged, once)
		both := make(chan struct{})
		otherFailed := func() bool { // the other's failure has been seen
			var l struct {
				Requests []struct {
					State    string
					Attempts []struct{ Decode struct{ State string } }
				}
			}
			g.adminJSON("GET", "/debug/ledger", "", &l)
			if len(l.Requests) != 1 {
				return true
			}
			q := l.Requests[0]
			if q.State != "waiting" {
				t.Errorf("the state is %q", q.State)
			}
			return len(q.Attempts) == 2 && (q.Attempts[0].Decode.State == "failed" || q.Attempts[1].Decode.State == "failed")
		}
		turn := func(h http.HandlerFunc, waits bool, arrived func()) http.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request) {
				arrived()
				<-both
				if waits {
					g.until("the other to be over", otherFailed)
				}
				h(w, r)
			}
		}
		g.first(turn(first, secondFirst, func() {}), turn(second, !secondFirst, func() { close(both) }))
		if resp, body := g.post("/v1/completions", ask); resp.StatusCode != status || !strings.Contains(body, text) {
			t.Errorf("%d %q, want %d %q", resp.StatusCode, body, status, text)
		}
		g.until("nothing left", g.idle)
		g.hedges(won, lost, failed, 0, 0)
	}
	f(story, broken, true, 200, storyText, 0, 0, 1)
	f(broken, story, false, 200, storyText, 1, 0, 0)
	f(broken, broken, true, 500, "says the mock", 0, 0, 1)
	f(broken, broken, false, 500, "says the mock", 0, 0, 1)
	f(outcome(503, "no_space"), broken, false, 500, "says the mock", 0, 0, 1)
}

// TestHedgeBothFail: then it is an attempt that failed, and others follow.
func TestHedgeBothFail(t *testing.T) {
	t.Parallel()
	g := newRig(t, 3, 3, hedged)
	var mu sync.Mutex
	n, both := 0, make(chan struct{})
	for _, id := range []string{"d0", "d1", "d2"} {
		d := g.workers[id]
		d.on(&d.decode, func(w http.ResponseWriter, r *http.Request) {
			mu.Lock()
			n++
			if n == 2 {
				close(both)
			}
			third := n > 2
			mu.Unlock()
			if third {
				story(w, r)
				return
			}
			<-both
			outcome(502, "corrupt")(w, r)
		})
	}
	if resp, text := g.post("/v1/completions", ask); resp.StatusCode != 200 || text != storyText {
		t.Fatalf("%d %q", resp.StatusCode, text)
	}
	g.hedges(0, 0, 1, 0, 0)
}

// TestHedgeRefusal: if either pair finds fault with the request, that is final.
func TestHedgeRefusal(t *testing.T) {
	t.Parallel()
	g := newRig(t, 2, 2, hedged)
	started, ended := make(chan time.Time, 4), make(chan time.Time, 4)
	g.first(func(w http.ResponseWriter, r *http.Request) {
		<-started
		outcome(400, "")(w, r)
	}, hold(started, ended))
	if resp, text := g.post("/v1/completions", ask); resp.StatusCode != 400 {
		t.Fatalf("%d %q", resp.StatusCode, text)
	}
	<-ended
}

// TestHedgeBounds: there is no hedge without a budget, without another pair, without
// measurements, or in dialects that strand what is cancelled.
func TestHedgeBounds(t *testing.T) {
	t.Parallel()
	slow := func(g *rig, ready func() bool) {
		t.Helper()
		g.first(func(w http.ResponseWriter, r *http.Request) {
			g.until("the delay", ready)
			story(w, r)
		}, story)
		if resp, text := g.post("/v1/completions", ask); resp.StatusCode != 200 || text != storyText {
			t.Errorf("%d %q", resp.StatusCode, text)
		}
	}
	count := func(g *rig, result string) func() bool {
		return func() bool {
			_, text := g.get("/metrics")
			return strings.Contains(text, `xpyd_router_hedges_total{result="`+result+`"} 1`)
		}
	}
	public := func(c *router.Config) { c.PublicMetrics = true }
	g := newRig(t, 2, 2, hedged, public, func(c *router.Config) { c.Hedge.Ratio, c.Hedge.Burst = 0, 0 })
	slow(g, count(g, "no_budget"))
	g.hedges(0, 0, 0, 1, 0)
	g = newRig(t, 1, 2, hedged, public)
	slow(g, count(g, "no_pair"))
	g.hedges(0, 0, 0, 0, 1)

	g = newRig(t, 2, 2, hedged, func(c *router.Config) { c.Hedge.Delay = 0 })
	g.post("/v1/completions", ask)
	g.hedges(0, 0, 0, 0, 0)

	for _, dialect := range []string{"sglang", "vllm-nixl", "trtllm"} {
		ps, list := engines(t, dialect, "prefill", 2)
		_, more := engines(t, dialect, "decode", 2)
		g := newRig(t, 0, 0, hedged, func(c *router.Config) { c.Static, c.Hedge.Delay = append(list, more...), time.Nanosecond })
		g.allProbed(4)
		for range 5 {
			if resp, text := g.post("/v1/completions", askText); resp.StatusCode != 200 {
				t.Errorf("%d %s", resp.StatusCode, text)
			}
		}
		if n := len(ps[0].Records()) + len(ps[1].Records()); n != 5 {
			t.Errorf("%s: %d prefills of 5 requests", dialect, n)
		}
		g.hedges(0, 0, 0, 0, 0)
	}
}

// TestHedgeDialects: in the foreign dialects that may be hedged the client gets one text,
// and nothing is held afterwards.
func TestHedgeDialects(t *testing.T) {
	t.Parallel()
	for _, dialect := range []string{"storage", "vllm-offloading"} {
		ps, list := engines(t, dialect, "prefill", 2)
		ds, more := engines(t, dialect, "decode", 2)
		g := newRig(t, 0, 0, hedged, func(c *router.Config) { c.Static, c.Hedge.Delay = append(list, more...), 50*time.Millisecond })
		g.allProbed(4)
		for _, bad := range []*fake.Engine{ps[0], ds[0]} {
			bad.SetFault(fake.Fault{Hang: true})
			for range 4 {
				resp, text := g.post("/v1/completions", askLive)
				if got, _ := read(t, text); resp.StatusCode != 200 || got != wantText(`"Once upon"`) {
					t.Fatalf("%s: %d %s", dialect, resp.StatusCode, text)
				}
			}
			bad.SetFault(fake.Fault{})
		}
		if n := testutil.CollectAndCount(g.reg, "xpyd_router_hedges_total"); n != 5 {
			t.Errorf("%d series", n)
		}
	}
}

// TestHedgeLeaves: the client leaves while both pairs are out.
func TestHedgeLeaves(t *testing.T) {
	t.Parallel()
	g := newRig(t, 2, 2, hedged)
	started, ended := make(chan time.Time, 4), make(chan time.Time, 4)
	g.first(hold(started, ended), hold(started, ended))
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-started
		<-started
		cancel()
	}()
	req, _ := http.NewRequestWithContext(ctx, "POST", g.url+"/v1/completions", strings.NewReader(ask))
	if resp, err := g.client.Do(req); err == nil {
		resp.Body.Close()
		t.Error("an answer")
	}
	<-ended
	<-ended
	g.until("nothing left", g.idle)
}
