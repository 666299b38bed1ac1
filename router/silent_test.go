package router_test

import (
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
)

// sleeper is a worker that stops and may wake up: until then it neither sends nor answers.
type sleeper struct {
	m     *mock
	asked atomic.Int64 // whether it is there
	wakes chan struct{}
	once  sync.Once
}

// sleeper has a worker stop at once. It answers whether it is there unless it is deaf.
func (g *rig) sleeper(id string, deaf bool) *sleeper {
	s := &sleeper{m: g.workers[id], wakes: make(chan struct{})}
	g.t.Cleanup(s.wake)
	s.m.on(&s.m.health, func(_ http.ResponseWriter, r *http.Request) {
		if s.asked.Add(1); deaf {
			s.sleep(r)
		}
	})
	return s
}

func (s *sleeper) sleep(r *http.Request) {
	select {
	case <-s.wakes:
	case <-r.Context().Done():
	}
}

func (s *sleeper) wake() { s.once.Do(func() { close(s.wakes) }) }

// rest sends the rest of a stream once it wakes up.
func (s *sleeper) rest(cut int) func(http.ResponseWriter, *http.Request) {
	return func(w http.ResponseWriter, r *http.Request) {
		if s.sleep(r); r.Context().Err() == nil {
			io.WriteString(w, strings.Join(toldBehind(r, cut), ""))
		}
	}
}

// toldBehind are the events of askPair behind the first cut.
func toldBehind(r *http.Request, cut int) []string {
	var events []string
	l := &teller{}
	for at := range lengths[1] {
		for i, n := range lengths {
			if at < n {
				events = append(events, l.event(len(events) == 0, i, at, n))
			}
		}
	}
	return append(events, usageEvent, "data: [DONE]\n\n")[cut:]
}

// whole checks a stream that was not to be broken.
func (g *rig) whole(text string, seams int) {
	g.t.Helper()
	if got := strings.ReplaceAll(text, seam, ""); got != undisturbed(askPair) || strings.Count(text, seam) != seams {
		g.t.Errorf("%d seams, want %d: %s", strings.Count(text, seam), seams, text)
	}
	g.until("the ledger to be empty", g.idle)
}

// TestSilent: a decode that stops loses its streams to another pair, though the fleet has nothing
// against it, and what it says when it wakes up reaches nobody.
func TestSilent(t *testing.T) {
	t.Parallel()
	g := newRig(t, 1, 2)
	var s atomic.Pointer[sleeper]
	for _, id := range []string{"d0", "d1"} { // the first that is asked stops
		g.tells(id, func(r *http.Request) *teller {
			if r.Header.Get("x-xpyd-given") != "" {
				return &teller{g: g, cut: -1}
			}
			s.Store(g.sleeper(id, true))
			return &teller{g: g, cut: 3, how: s.Load().rest(3)}
		})
	}
	var from time.Time
	_, text := g.stream(askPair, func() { from = time.Now() })
	t.Logf("whole after %v", time.Since(from))
	s.Load().wake()
	g.whole(text, 1)
	g.takeovers(map[string]int{"continued": 1})
	if n := g.metric(`xpyd_router_takeovers_total{outcome="continued"}{reason="silent"}`); n != 1 {
		t.Errorf("%v streams of silent workers went on", n)
	}
	if m := g.watcher.Snapshot().Get(s.Load().m.id); m.State != fleet.Live {
		t.Errorf("it is %s", m.State)
	}
}

// TestSilentNot: a silent stream goes on waiting if its worker answers, or nobody else could go on.
func TestSilentNot(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		deaf  bool
		other func(*fleet.Instance) // nil: none
	}{
		"it answers":     {false, func(*fleet.Instance) {}},
		"it is alone":    {true, nil},
		"other numerics": {true, func(i *fleet.Instance) { i.Numerics = "other" }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := newRig(t, 1, 1)
			s := g.sleeper("d0", c.deaf)
			g.tell("d0", 3, s.rest(3))
			resp, err := g.client.Post(g.url+"/v1/completions", "application/json", strings.NewReader(askPair))
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			if c.other != nil {
				g.add("p1", fleet.Prefill, c.other)
				d := g.add("d1", fleet.Decode, c.other)
				d.on(&d.decode, func(http.ResponseWriter, *http.Request) { t.Error("it was asked") })
			}
			g.until("questions", func() bool { return s.asked.Load() >= 8 }) // after the third at the latest it would be over
			s.wake()
			text, err := io.ReadAll(resp.Body)
			if err != nil {
				t.Fatal(err)
			}
			g.whole(string(text), 0)
			g.takeovers(nil)
		})
	}
}

// TestSilentRefuses: a silent decode that takes no connection is dead.
func TestSilentRefuses(t *testing.T) {
	t.Parallel()
	g := newRig(t, 1, 2)
	for _, id := range []string{"d0", "d1"} {
		g.tells(id, func(r *http.Request) *teller {
			if r.Header.Get("x-xpyd-given") != "" {
				return &teller{g: g, cut: -1}
			}
			return &teller{g: g, cut: 3, how: func(_ http.ResponseWriter, r *http.Request) {
				g.workers[id].srv.Listener.Close()
				<-r.Context().Done()
			}}
		})
	}
	_, text := g.post("/v1/completions", askPair)
	g.whole(text, 1)
	if n := g.metric(`xpyd_router_takeovers_total{outcome="continued"}{reason="dead"}`); n != 1 {
		t.Errorf("%v streams of dead workers went on", n)
	}
}

// TestSilentAgain: a worker that is to go on with a stream may have stopped, too. The last that the
// stream may lose is waited for.
func TestSilentAgain(t *testing.T) {
	t.Parallel()
	for lost, retries := range map[int64]int{1: 1, 2: 0} {
		t.Run(strconv.FormatInt(lost, 10), func(t *testing.T) {
			t.Parallel()
			g := newRig(t, 1, 4)
			var asked atomic.Int64
			stopped := make(chan *sleeper, 1)
			for _, id := range []string{"d0", "d1", "d2", "d3"} {
				g.tells(id, func(r *http.Request) *teller {
					switch n := asked.Add(1); {
					case n <= lost:
						return &teller{g: g, cut: 3, how: reset}
					case n == lost+1:
						s := g.sleeper(id, true)
						stopped <- s
						s.sleep(r)
					}
					return &teller{g: g, cut: -1}
				})
			}
			resp, err := g.client.Post(g.url+"/v1/completions", "application/json", strings.NewReader(askPair))
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			s := <-stopped
			if retries == 0 {
				time.Sleep(1500 * time.Millisecond) // it is not even asked
				s.wake()
			}
			text, err := io.ReadAll(resp.Body)
			if err != nil {
				t.Fatal(err)
			}
			s.wake()
			g.whole(string(text), int(lost))
			if n := g.metric(`xpyd_router_retries_total{reason="silent"}`); int(n) != retries {
				t.Errorf("%v attempts ended by silence", n)
			}
		})
	}
}

// TestSilentWakes: a stream whose next pair is lost too waits for the worker that has stopped, which
// may go on with it when it wakes up.
func TestSilentWakes(t *testing.T) {
	t.Parallel()
	g := newRig(t, 1, 2)
	var s atomic.Pointer[sleeper]
	for _, id := range []string{"d0", "d1"} {
		g.tells(id, func(r *http.Request) *teller {
			switch stopped := s.Load(); {
			case stopped == nil:
				s.Store(g.sleeper(id, true))
				return &teller{g: g, cut: 3, how: s.Load().rest(3)}
			case stopped.m.id != id:
				return &teller{g: g, cut: 0, how: func(w http.ResponseWriter, r *http.Request) {
					g.workers[id].srv.Listener.Close()
					reset(w, r)
				}}
			}
			return &teller{g: g, cut: -1}
		})
	}
	resp, err := g.client.Post(g.url+"/v1/completions", "application/json", strings.NewReader(askPair))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	stopped, asked := s.Load(), int64(0)
	g.until("the stream to wait", func() bool {
		var l struct{ Requests []struct{ State string } }
		g.adminJSON("GET", "/debug/ledger", "", &l)
		asked = stopped.asked.Load()
		return len(l.Requests) == 1 && l.Requests[0].State == "picking"
	})
	g.until("another question", func() bool { return stopped.asked.Load() > asked+1 }) // a retry waits less
	stopped.wake()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	g.whole(string(text), 1)
	g.takeovers(map[string]int{"continued": 1})
}

// TestTakeoverSame: where there is no other, a stream whose connection broke, or whose worker said
// that it failed, goes on with the same worker.
func TestTakeoverSame(t *testing.T) {
	t.Parallel()
	for reason, how := range map[string]http.HandlerFunc{
		"transport": reset,
		"error": func(w http.ResponseWriter, _ *http.Request) {
			io.WriteString(w, ":e {\"error\":{\"message\":\"step: no memory\",\"type\":\"server_error\",\"param\":null,\"code\":null}}\n\n")
		},
	} {
		for _, fails := range []int64{1, 3} {
			t.Run(fmt.Sprintf("%s/%d", reason, fails), func(t *testing.T) {
				t.Parallel()
				g := newRig(t, 1, 1)
				var asked atomic.Int64
				g.tells("d0", func(*http.Request) *teller {
					if asked.Add(1) <= fails {
						return &teller{g: g, cut: 2, how: how}
					}
					return &teller{g: g, cut: -1}
				})
				_, text := g.post("/v1/completions", askPair)
				if strings.Contains(text, ":e ") {
					t.Errorf("%s", text)
				}
				want := map[string]int{"continued": 1}
				if fails == 1 {
					g.whole(text, 1)
				} else if want = map[string]int{"continued": 2, "failed": 1}; !strings.Contains(text, "lost 3 workers") ||
					reason == "error" && !strings.Contains(text, "step: no memory") {
					t.Errorf("%s", text)
				}
				g.until("the ledger to be empty", g.idle)
				g.takeovers(want)
				if n := g.metric(fmt.Sprintf(`xpyd_router_takeovers_total{outcome="continued"}{reason=%q}`, reason)); int(n) != want["continued"] {
					t.Errorf("%v went on", n)
				}
			})
		}
	}
}
