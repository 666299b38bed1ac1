package router_test

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/kvlayout"
	"github.com/xpyd/xpyd/router"
)

// pools gives all workers a pool, of so many tokens a decode.
func (g *rig) pools(tokens map[string]int) {
	g.t.Helper()
	for id, w := range g.workers {
		w.inst.Layout, w.inst.Blocks = kvlayout.Form{BlockTokens: 16}, max(tokens[id], 16)/16
		if err := g.watcher.AddStatic(w.inst, fleet.Static); err != nil {
			g.t.Fatal(err)
		}
	}
	g.until("the pair", func() bool { return g.r.Ready() })
}

// optional checks how many streams moved, and how many were to and did not, for a reason.
func (g *rig) optional(reason string, continued, failed int) {
	g.t.Helper()
	g.takeovers(map[string]int{"continued": continued, "failed": failed})
	for outcome, want := range map[string]int{"continued": continued, "failed": failed} {
		if n := g.metric(`xpyd_router_takeovers_total{outcome="` + outcome + `"}{reason="` + reason + `"}`); int(n) != want {
			g.t.Errorf("%s, %s: %v, want %d", reason, outcome, n, want)
		}
	}
}

// moved is how many streams the admin API says a worker has lost to others, by why.
func (g *rig) moved(id string) (shortage, balance int) {
	g.t.Helper()
	var info struct {
		Instances []struct {
			ID    string
			Moved struct{ Shortage, Balance int }
		}
	}
	g.adminJSON("GET", "/admin/v1/instances", "", &info)
	for _, i := range info.Instances {
		if i.ID == id {
			return i.Moved.Shortage, i.Moved.Balance
		}
	}
	g.t.Errorf("no %s", id)
	return 0, 0
}

const roomy = 16000

var all = map[string]int{"d0": roomy, "d1": roomy, "d2": roomy}

// TestShortage: a stream whose worker is short of blocks is served on while another brings its KV,
// and goes on there; the status, the metrics and the waterfall say why.
func TestShortage(t *testing.T) {
	t.Parallel()
	answer := make(chan struct{})
	s := newStepper(t, 2, func(w http.ResponseWriter, _ *http.Request) {
		<-answer
		io.WriteString(w, bringing(true, 112))
	})
	s.g.pools(all)
	s.says = map[int]string{1: ":s soon\n\n"}
	by, done := s.stream(t.Context())
	next := <-s.asked
	if next == by {
		t.Errorf("%s is to bring what it has", by)
	}
	s.step <- struct{}{} // meanwhile
	close(answer)
	s.brought()
	s.ends(s.rest(done), 1)
	s.g.optional("shortage", 1, 0)
	s.came(1, 0, 112)
	if n, _ := s.g.moved(by); n != 1 {
		t.Errorf("%d have moved", n)
	}
	if n, _ := s.g.moved(next); n != 0 {
		t.Errorf("%d have moved from where it went", n)
	}
	if _, text := s.g.as("Bearer secret", "GET", "/debug/requests/r1?format=text", ""); !strings.Contains(text, by+" moved, attempt 1: shortage\n") {
		t.Errorf("no reason in\n%s", text)
	}
}

// TestShortageStands: a stream that has lost its blocks sends nothing that could wake the router, and
// moves all the same.
func TestShortageStands(t *testing.T) {
	t.Parallel()
	for name, says := range map[string]map[int]string{
		"at once":              {1: ":s now\n\n"},
		"after it was offered": {1: ":s soon\n\n", 2: ":s now\n\n"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			lost := make(chan struct{})
			s := newStepper(t, 2, func(w http.ResponseWriter, _ *http.Request) {
				<-lost
				io.WriteString(w, bringing(true, 112))
			})
			s.g.pools(all)
			s.says = says
			_, done := s.stream(t.Context())
			<-s.asked
			if len(says) > 1 {
				s.step <- struct{}{}
			}
			close(lost)
			s.ends(<-done, 1) // nothing is stepped any more
			s.g.optional("shortage", 1, 0)
		})
	}
}

// TestShortageStays: a stream goes on where it is if nobody has room for it or the move fails, and it
// is not tried again.
func TestShortageStays(t *testing.T) {
	t.Parallel()
	few, cannot := map[string]int{"d0": 256, "d1": 256}, outcome(503, "no_space")
	for name, c := range map[string]struct {
		tokens      map[string]int // nil: nobody says
		says        string
		bring, next http.HandlerFunc
		asked       bool // somebody is to bring it
		failed      int
	}{
		"nobody has room":           {tokens: few, says: "soon"},
		"nobody has room, it stood": {tokens: few, says: "now"},
		"nobody says":               {says: "soon"},
		"nobody can bring":          {tokens: all, says: "soon", bring: cannot, asked: true},
		"nobody can, it stood":      {tokens: all, says: "now", bring: cannot, asked: true},
		"it refuses":                {tokens: all, says: "soon", next: outcome(409, "refused"), asked: true, failed: 1},
		"it breaks":                 {tokens: all, says: "soon", next: reset, asked: true, failed: 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStepper(t, 2, func(w http.ResponseWriter, r *http.Request) {
				if c.bring != nil {
					c.bring(w, r)
					return
				}
				io.WriteString(w, bringing(true, 112))
			})
			if c.tokens != nil {
				s.g.pools(c.tokens)
			}
			if c.next != nil {
				s.next = func(_ string, w http.ResponseWriter, r *http.Request) bool {
					c.next(w, r)
					return true
				}
			}
			s.says = map[int]string{1: ":s " + c.says + "\n\n", 3: ":s soon\n\n", 4: ":s now\n\n"}
			_, done := s.stream(t.Context())
			if c.asked {
				<-s.asked
				s.brought()
			}
			s.ends(s.rest(done), 0)
			s.g.optional("shortage", 0, c.failed)
			if n := len(s.asked); n != 0 {
				t.Errorf("%d more were to bring it", n)
			}
		})
	}
}

// TestShortageRests: a stream that has moved for want of blocks stays where it is for a while,
// whatever is said there; a drain moves it.
func TestShortageRests(t *testing.T) {
	t.Parallel()
	s := newStepper(t, 3, func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, bringing(true, 112)) })
	s.g.pools(all)
	at := make(chan string)
	hold := []chan struct{}{make(chan struct{}), make(chan struct{})}
	var legs atomic.Int32
	s.next = func(id string, w http.ResponseWriter, r *http.Request) bool {
		if legs.Add(1) > 1 {
			return false
		}
		d := s.g.workers[id]
		d.mu.Lock()
		body := d.body
		d.mu.Unlock()
		l := &teller{g: s.g, cut: -1, says: map[int]string{0: ":s soon\n\n", 1: ":s now\n\n"}, at: func(n int) {
			if n == 1 {
				at <- id
			}
			if n == 1 || n == 2 {
				select {
				case <-hold[n-1]:
				case <-r.Context().Done():
				}
			}
		}}
		l.ServeHTTP(w, r, body)
		return true
	}
	s.says = map[int]string{1: ":s soon\n\n"}
	by, done := s.stream(t.Context())
	<-s.asked
	s.brought()
	s.step <- struct{}{}
	id := <-at
	if id == by {
		t.Errorf("it is at %s again", id)
	}
	if n := len(s.asked); n != 0 {
		t.Errorf("%d more were to bring it", n)
	}
	s.g.order(id, "drain", "")
	close(hold[0])
	<-s.asked
	s.g.until("it to be brought", func() bool { a := s.attempts(); return len(a) == 3 && a[2].Decode.State != "bring" })
	close(hold[1])
	s.ends(<-done, 2)
	for reason, want := range map[string]int{"shortage": 1, "drain": 1} {
		if n := s.g.metric(`xpyd_router_takeovers_total{outcome="continued"}{reason="` + reason + `"}`); int(n) != want {
			t.Errorf("%s: %v", reason, n)
		}
	}
}

// TestShortageBound: of many streams that are offered at once two move at a time, and the others
// are not kept waiting.
func TestShortageBound(t *testing.T) {
	t.Parallel()
	const streams = 10
	g := newRig(t, 1, 2)
	g.pools(map[string]int{"d0": 100 * roomy, "d1": 100 * roomy})
	g.order("d1", "drain", "")
	var under, peak, moved atomic.Int32
	begun := make(chan struct{}, streams)
	goOn, settled := make(chan struct{}), make(chan struct{})
	for _, id := range []string{"d0", "d1"} {
		g.tells(id, func(r *http.Request) *teller {
			l := &teller{g: g, cut: -1}
			if r.Header.Get("x-xpyd-given") == "" {
				l.says = map[int]string{2: ":s soon\n\n"}
				l.at = func(n int) {
					if n == 1 {
						begun <- struct{}{}
						<-goOn
					}
				}
				return l
			}
			moved.Add(1)
			n := under.Add(1)
			for p := peak.Load(); n > p && !peak.CompareAndSwap(p, n); p = peak.Load() {
			}
			l.at = func(n int) {
				if n == 0 {
					<-settled
					under.Add(-1)
				}
			}
			return l
		})
	}
	var wg sync.WaitGroup
	texts := make([]string, streams)
	for i := range texts {
		wg.Go(func() { _, texts[i] = g.post("/v1/completions", askFar) })
	}
	for range streams {
		<-begun
	}
	g.order("d1", "undrain", "")
	close(goOn)
	g.until("the others to end", func() bool {
		var l struct{ Requests []any }
		g.adminJSON("GET", "/debug/ledger", "", &l)
		return len(l.Requests) == int(under.Load())
	})
	close(settled)
	wg.Wait()
	seams := 0
	for _, text := range texts {
		seams += strings.Count(text, seam)
		if strings.ReplaceAll(text, seam, "") != undisturbed(askPair) {
			t.Errorf("%s", text)
		}
	}
	if n := int(moved.Load()); n == 0 || n > 2 || seams != n || peak.Load() > 2 {
		t.Errorf("%d moved, %d at a time, %d seams", n, peak.Load(), seams)
	}
	g.until("the ledger to be empty", g.idle)
}

// TestBalance: a worker whose gaps stay longer than the others' loses one stream, to the fastest.
func TestBalance(t *testing.T) {
	t.Parallel()
	g := newRig(t, 1, 3, func(c *router.Config) {
		c.Balance.Interval, c.Balance.Windows, c.Pick.Policy = time.Second, 2, "round_robin"
	})
	g.pools(map[string]int{"d0": 100 * roomy, "d1": 100 * roomy, "d2": 100 * roomy})
	var went [3]atomic.Int32 // where streams went on
	stop := make(chan struct{})
	for i, pace := range []time.Duration{40 * time.Millisecond, 10 * time.Millisecond, 15 * time.Millisecond} {
		d, l := g.workers[fmt.Sprintf("d%d", i)], &teller{g: g}
		d.on(&d.other, func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, bringing(true, 32)) })
		d.on(&d.decode, func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("x-xpyd-given") != "" {
				went[i].Add(1)
			}
			w.Header().Set("Content-Type", "text/event-stream")
			tick := time.NewTicker(pace)
			defer tick.Stop()
			for n := 0; ; n++ {
				io.WriteString(w, l.event(n == 0, 0, n, 1<<20))
				w.(http.Flusher).Flush()
				select {
				case <-stop:
					io.WriteString(w, l.event(false, 0, n+1, n+2)+"data: [DONE]\n\n")
					return
				case <-r.Context().Done():
					return
				case <-tick.C:
				}
			}
		})
	}
	var wg sync.WaitGroup
	for range 12 {
		wg.Go(func() {
			g.post("/v1/completions", strings.Replace(askStream, `"max_tokens":8`, `"max_tokens":20000`, 1))
		})
	}
	g.until("a stream to move", func() bool { return went[1].Load() > 0 })
	close(stop)
	wg.Wait()
	// A starved machine may hear late of the end, and make d2 look as fast as d1.
	_, n := g.moved("d0")
	if to := int(went[1].Load() + went[2].Load()); n < 1 || n > 2 || went[0].Load() != 0 || n != to {
		t.Errorf("%d moved, to d0, d1, d2: %d, %d, %d", n, went[0].Load(), went[1].Load(), went[2].Load())
	}
	g.optional("balance", n, 0)
	g.until("the ledger to be empty", g.idle)
}
