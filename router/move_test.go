package router_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router"
)

// askFar is askPair with enough tokens to come for a move.
var askFar = strings.Replace(askPair, `"max_tokens":8`, `"max_tokens":64`, 1)

// told is a stream.
type told struct {
	g    *rig
	by   string // its first decode
	done chan struct{}
	text string // once done
}

// mover has all decodes of a rig tell: a stream that begins waits at its third event; one that is
// given tokens is told by next, nil for all of it.
type mover struct {
	g    *rig
	goOn chan struct{}
	at   chan string // the decode of each stream that waits
	next func(id string, r *http.Request) *teller
	half bool // streams that begin end after four events only with their leg
}

func newMover(t *testing.T, nd int) *mover {
	m := &mover{g: newRig(t, 1, nd), goOn: make(chan struct{}), at: make(chan string, 64)}
	for i := range nd {
		id := fmt.Sprintf("d%d", i)
		m.g.tells(id, func(r *http.Request) *teller {
			if r.Header.Get("x-xpyd-given") != "" {
				if m.next != nil {
					if l := m.next(id, r); l != nil {
						return l
					}
				}
				return &teller{g: m.g, cut: -1}
			}
			return &teller{g: m.g, cut: -1, at: func(n int) {
				if n == 2 {
					m.at <- id
					<-m.goOn
				}
				if n == 4 && m.half {
					<-r.Context().Done()
				}
			}}
		})
	}
	return m
}

// begin starts a stream and returns its decode once it waits.
func (m *mover) begin(body string, header ...string) *told {
	m.g.t.Helper()
	s := &told{g: m.g, done: make(chan struct{})}
	req, _ := http.NewRequest("POST", m.g.url+"/v1/completions", strings.NewReader(body))
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := m.g.client.Do(req)
	if err != nil {
		m.g.t.Fatal(err)
	}
	go func() {
		defer close(s.done)
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		if s.text = string(b); err != nil || resp.StatusCode != 200 {
			m.g.t.Errorf("%d %v", resp.StatusCode, err)
		}
	}()
	s.by = <-m.at
	return s
}

// check checks the text of a stream, with so many seams.
func (s *told) check(seams int) {
	s.g.t.Helper()
	<-s.done
	if got := strings.ReplaceAll(s.text, seam, ""); got != undisturbed(askPair) || strings.Count(s.text, seam) != seams {
		s.g.t.Errorf("%d seams wanted in\n%s", seams, s.text)
	}
}

func (g *rig) order(id, action, body string) {
	g.t.Helper()
	if got := g.adminJSON("POST", "/admin/v1/instances/"+id+"/"+action, body, nil); got != 200 {
		g.t.Errorf("%s %s %s: %d", id, action, body, got)
	}
}

// moves checks how many moves there were of each outcome, and that nothing else broke.
func (g *rig) moves(continued, failed int) {
	g.t.Helper()
	g.takeovers(map[string]int{"continued": continued, "failed": failed})
	if n := g.metric(`xpyd_router_takeovers_total{outcome="continued"}{reason="drain"}`); int(n) != continued {
		g.t.Errorf("%v moves, want %d", n, continued)
	}
}

// TestMove: the streams of a decode that is drained go on with another, whoever says that it is
// drained.
func TestMove(t *testing.T) {
	t.Parallel()
	for name, drain := range map[string]func(g *rig, id string){
		"asked for here": func(g *rig, id string) { g.order(id, "drain", "") },
		"announced": func(g *rig, id string) {
			inst := g.workers[id].inst
			inst.Draining = true
			if err := g.watcher.AddStatic(inst, fleet.Static); err != nil {
				t.Error(err)
			}
			g.until("the router to know", func() bool { return g.r.Members.Leaving(&inst) != nil })
		},
		"when it is a prefill worker": func(g *rig, id string) {
			inst := g.workers[id].inst
			inst.Role = fleet.Prefill
			if err := g.watcher.AddStatic(inst, fleet.Static); err != nil {
				t.Error(err)
			}
			g.order(id, "drain", "")
		},
		"after it was to wait only": func(g *rig, id string) {
			g.order(id, "drain", `{"wait_only":true}`)
			g.order(id, "drain", `{}`)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newMover(t, 2)
			g := m.g
			s := m.begin(askFar, "x-request-id", "r1")
			drain(g, s.by)
			close(m.goOn)
			s.check(1)
			g.until("the ledger to be empty", g.idle)
			g.moves(1, 0)
			var rec struct {
				Status   int
				Error    string
				Attempts []struct {
					Error  string
					Decode struct{ ID, State string }
				}
			}
			g.adminJSON("GET", "/debug/requests/r1", "", &rec)
			if a := rec.Attempts; rec.Status != 200 || rec.Error != "" || len(a) != 2 || a[0].Error != "" || a[0].Decode.ID != s.by ||
				a[0].Decode.State != "moved" || a[1].Decode.ID == s.by || a[1].Decode.State != "done" {
				t.Errorf("%+v", rec)
			}
			for id, guard := range g.breakers() {
				if guard != "" && guard != "closed" {
					t.Errorf("%s: %s", id, guard)
				}
			}
		})
	}
}

// TestMoveNot: streams stay where they may not or need not move, or where nobody takes them.
func TestMoveNot(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, body, order string
		decodes           int
		header            []string
		edit              func(*router.Config)
		drain             func(g *rig, id string)
	}{
		{name: "wait only", order: `{"wait_only":true}`},
		{name: "wait only, announced", drain: func(g *rig, id string) {
			inst := g.workers[id].inst
			inst.Draining, inst.WaitOnly = true, true
			if err := g.watcher.AddStatic(inst, fleet.Static); err != nil {
				t.Error(err)
			}
			g.until("the router to know", func() bool { return !g.r.Members.Serves(g.watcher.Snapshot().Get(id)) })
		}},
		{name: "the client wants none", header: []string{"x-xpyd-takeover", "0"}},
		{name: "it is off", edit: func(c *router.Config) { c.Takeover = false }},
		{name: "near its end", body: askPair},
		{name: "several prompts", body: strings.Replace(strings.Replace(askFar, `"prompt":"Once upon a time"`, `"prompt":["Once","upon"]`, 1), `"n":2`, `"n":1`, 1)},
		{name: "the last", decodes: 1, order: `{"force":true}`},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			if c.decodes == 0 {
				c.decodes = 2
			}
			if c.body == "" {
				c.body = askFar
			}
			if c.edit == nil {
				c.edit = func(*router.Config) {}
			}
			g := newRig(t, 1, c.decodes, c.edit)
			at, goOn := make(chan string), make(chan struct{})
			var legs atomic.Int32
			for i := range c.decodes {
				id := fmt.Sprintf("d%d", i)
				d := g.workers[id]
				l := &teller{g: g}
				d.on(&d.decode, func(w http.ResponseWriter, r *http.Request) {
					legs.Add(1)
					w.Header().Set("Content-Type", "text/event-stream")
					tokens := r.Header.Get("x-xpyd-tokens") == "1"
					for n := range 5 {
						if n == 2 {
							at <- id
							<-goOn
						}
						event := l.event(n == 0, 0, n, 5) + l.event(false, 1, n, 5)
						if !tokens {
							event = unframed(event)
						}
						io.WriteString(w, event)
						w.(http.Flusher).Flush()
					}
					io.WriteString(w, usageEvent+"data: [DONE]\n\n")
				})
			}
			done := make(chan string)
			go func() {
				_, text := g.post("/v1/completions", c.body, c.header...)
				done <- text
			}()
			id := <-at
			if c.drain == nil {
				g.order(id, "drain", c.order)
			} else {
				c.drain(g, id)
			}
			close(goOn)
			if text := <-done; strings.Contains(text, seam) || !strings.HasSuffix(text, "<1.4>\",\"finish_reason\":\"length\"}]}\n\n"+usageEvent+"data: [DONE]\n\n") {
				t.Errorf("%s", text)
			}
			if n := legs.Load(); n != 1 {
				t.Errorf("%d legs", n)
			}
			g.until("the ledger to be empty", g.idle)
			g.moves(0, 0)
		})
	}
}

// TestMoveFails: where the next pair fails, the stream goes on where it is, and nothing is lost or
// comes twice.
func TestMoveFails(t *testing.T) {
	t.Parallel()
	for name, how := range map[string]http.HandlerFunc{
		"it breaks":                reset,
		"it refuses":               outcome(409, "refused"),
		"it is full":               outcome(503, "no_space"),
		"it begins with an error":  events("data: {\"error\":{\"message\":\"no\"}}\n\n"),
		"it breaks in an event":    func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, "data: {"); reset(w, r) },
		"it says nothing for long": func(w http.ResponseWriter, r *http.Request) { <-r.Context().Done() },
		"it is silent after its header": func(w http.ResponseWriter, r *http.Request) {
			begin0(w)
			<-r.Context().Done()
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newMover(t, 2)
			g := m.g
			s := m.begin(askFar, "x-request-id", "r1")
			for _, id := range []string{"d0", "d1"} {
				if d := g.workers[id]; id != s.by {
					d.on(&d.decode, how)
				}
			}
			g.order(s.by, "drain", "")
			close(m.goOn)
			s.check(0)
			g.until("the ledger to be empty", g.idle)
			g.moves(0, 1)
			var rec struct {
				Status   int
				Attempts []struct {
					Error  string
					Decode struct{ ID, State string }
				}
			}
			g.adminJSON("GET", "/debug/requests/r1", "", &rec)
			if a := rec.Attempts; rec.Status != 200 || len(a) != 2 || a[0].Decode.ID != s.by || a[0].Decode.State != "done" || a[0].Error != "" || a[1].Error == "" {
				t.Errorf("%+v", rec)
			}
		})
	}
}

// begin0 sends the header of a stream and no event.
func begin0(w http.ResponseWriter) {
	w.Header().Set("Content-Type", "text/event-stream")
	w.WriteHeader(200)
	w.(http.Flusher).Flush()
}

// TestMoveAgain: a move that failed is tried again, but not for ever, nor where it was refused.
func TestMoveAgain(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		fails, tries int64
		how          http.HandlerFunc
	}{
		"the third goes well": {2, 3, outcome(503, "no_space")},
		"none goes well":      {100, 3, outcome(503, "no_space")},
		"it is refused":       {100, 1, outcome(409, "refused")},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := newRig(t, 1, 2)
			var tried atomic.Int64
			first, goOn := make(chan string), make(chan struct{})
			for _, id := range []string{"d0", "d1"} {
				d := g.workers[id]
				l := &teller{g: g}
				d.on(&d.decode, func(w http.ResponseWriter, r *http.Request) {
					given := r.Header.Get("x-xpyd-given") != ""
					if given && tried.Add(1) <= c.fails {
						c.how(w, r)
						return
					}
					w.Header().Set("Content-Type", "text/event-stream")
					if given {
						io.WriteString(w, l.event(true, 0, 9, 10)+"data: [DONE]\n\n")
						return
					}
					for n, last := 0, 10000; n < last; n++ {
						if n == 1 {
							first <- id
							<-goOn
						}
						if io.WriteString(w, l.event(n == 0, 0, n, 10000)); r.Context().Err() != nil {
							return
						}
						w.(http.Flusher).Flush()
						if last == 10000 && c.fails > c.tries && tried.Load() == c.tries {
							last = n + 1200 // a further try would come sooner
						}
						if n == last-1 {
							io.WriteString(w, l.event(false, 0, n+1, n+2)+"data: [DONE]\n\n")
						}
						time.Sleep(time.Millisecond)
					}
				})
			}
			done := make(chan string)
			go func() {
				_, text := g.post("/v1/completions", strings.Replace(askStream, `"max_tokens":8`, `"max_tokens":20000`, 1))
				done <- text
			}()
			id := <-first
			g.order(id, "drain", "")
			close(goOn)
			text := <-done
			if moved := strings.Contains(text, seam); moved != (c.fails < c.tries) || !strings.HasSuffix(text, "data: [DONE]\n\n") || strings.Contains(text, "error") {
				t.Errorf("%s", text)
			}
			g.until("the ledger to be empty", g.idle)
			if n := tried.Load(); n != c.tries {
				t.Errorf("%d tries", n)
			}
			failed := min(c.fails, c.tries)
			g.moves(int(c.tries-failed), int(failed))
		})
	}
}

// TestMoveLoses: a worker that dies while its stream moves, as does the next, loses it to a third.
func TestMoveLoses(t *testing.T) {
	t.Parallel()
	m := newMover(t, 3)
	m.half = true
	g := m.g
	var asked atomic.Int32
	var by string
	m.next = func(string, *http.Request) *teller {
		if asked.Add(1) > 1 {
			return nil
		}
		return &teller{g: g, how: func(w http.ResponseWriter, r *http.Request) {
			g.watcher.ReportDead(by, 1, "test")
			reset(w, r)
		}}
	}
	s := m.begin(askFar)
	by = s.by
	g.order(by, "drain", "")
	close(m.goOn)
	s.check(1)
	g.until("the ledger to be empty", g.idle)
	g.takeovers(map[string]int{"continued": 1, "failed": 1})
	if n := g.metric(`xpyd_router_takeovers_total{outcome="failed"}{reason="drain"}`); n != 1 {
		t.Errorf("%v moves failed", n)
	}
}

// TestMoveCountsNoBreak: a stream may move as often as it likes, and lose workers all the same.
func TestMoveCountsNoBreak(t *testing.T) {
	t.Parallel()
	g := newRig(t, 1, 2, func(c *router.Config) { c.Attempts, c.RetryRatio, c.RetryBurst, c.RetryMin = 1, 0, 0, 0 })
	const most = 3 // more than a stream may lose workers
	at := make(chan string)
	goOn := make(chan struct{})
	for _, id := range []string{"d0", "d1"} {
		g.tells(id, func(r *http.Request) *teller {
			return &teller{g: g, cut: -1, at: func(n int) {
				if n == 1 {
					select {
					case at <- id:
						<-goOn
					case <-r.Context().Done():
					}
				}
			}}
		})
	}
	done := make(chan string)
	go func() {
		_, text := g.post("/v1/completions", askFar)
		done <- text
	}()
	moves := 0
	for was := ""; moves < most; moves++ {
		id := <-at
		if was != "" {
			g.order(was, "undrain", "")
		}
		g.order(id, "drain", "")
		was = id
		goOn <- struct{}{}
	}
	select {
	case <-at:
		goOn <- struct{}{}
	case text := <-done:
		t.Fatalf("%s", text)
	}
	if text := <-done; strings.ReplaceAll(text, seam, "") != undisturbed(askPair) || strings.Count(text, seam) != most {
		t.Errorf("%s", text)
	}
	g.until("the ledger to be empty", g.idle)
	g.moves(most, 0)
}

// TestMoveLeaves: a client that leaves while its stream moves ends both pairs' legs.
func TestMoveLeaves(t *testing.T) {
	t.Parallel()
	m := newMover(t, 2)
	g := m.g
	started, ended := make(chan time.Time, 1), make(chan time.Time, 1)
	m.next = func(string, *http.Request) *teller { return &teller{g: g, how: hold(started, ended)} }
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	req, _ := http.NewRequestWithContext(ctx, "POST", g.url+"/v1/completions", strings.NewReader(askFar))
	resp, err := g.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	g.order(<-m.at, "drain", "")
	close(m.goOn)
	<-started
	cancel()
	g.until("the leg to end", func() bool { return len(ended) == 1 })
	g.until("the ledger to be empty", g.idle)
	g.until("a 499 in the log", func() bool { return strings.Contains(g.logs.String(), "status=499") })
	g.takeovers(map[string]int{"ended": 1})
}

// TestMoveTwo: two workers drained at once lose all their streams to the third.
func TestMoveTwo(t *testing.T) {
	t.Parallel()
	m := newMover(t, 3)
	g := m.g
	var streams []*told
	moving := 0
	for range 12 {
		s := m.begin(askFar)
		streams = append(streams, s)
		if s.by != "d2" {
			moving++
		}
	}
	var wg sync.WaitGroup
	for _, id := range []string{"d0", "d1"} {
		wg.Go(func() { g.order(id, "drain", "") })
	}
	wg.Wait()
	close(m.goOn)
	for _, s := range streams {
		if s.by == "d2" {
			s.check(0)
		} else {
			s.check(1)
		}
	}
	g.until("the ledger to be empty", g.idle)
	g.moves(moving, 0)
}

// TestMoveBound: only a few streams of a worker move at once, all in the end, and the admin API
// says how many are left.
func TestMoveBound(t *testing.T) {
	t.Parallel()
	const most, all = 8, 12
	m := newMover(t, 2)
	g := m.g
	var now, peak atomic.Int32
	full, open := make(chan struct{}), make(chan struct{})
	m.next = func(string, *http.Request) *teller {
		n := now.Add(1)
		if peak.Store(max(peak.Load(), n)); n == most {
			close(full)
		}
		<-open
		now.Add(-1)
		return nil
	}
	g.order("d1", "drain", "")
	var streams []*told
	for range all {
		streams = append(streams, m.begin(askFar))
	}
	g.order("d1", "undrain", "")
	g.order("d0", "drain", "")
	toMove := func() int {
		var list struct {
			Instances []struct {
				ID     string
				ToMove int `json:"to_move"`
			}
		}
		g.adminJSON("GET", "/admin/v1/instances", "", &list)
		for _, i := range list.Instances {
			if i.ID == "d0" {
				return i.ToMove
			}
		}
		return -1
	}
	if n := toMove(); n != all {
		t.Errorf("%d to move, want %d", n, all)
	}
	close(m.goOn)
	<-full
	close(open)
	moved := 0
	for _, s := range streams {
		<-s.done
		n := strings.Count(s.text, seam)
		s.check(min(n, 1))
		moved += n
	}
	// The others found no place and were over before there was one.
	if p := peak.Load(); p != most || moved < most {
		t.Errorf("%d at once, %d in all", p, moved)
	}
	if n := toMove(); n != 0 {
		t.Errorf("%d still to move", n)
	}
	g.until("the ledger to be empty", g.idle)
	g.moves(moved, 0)
}

// TestRoleMoves: a decode's streams move before it becomes a prefill worker, unless it is to
// wait only.
func TestRoleMoves(t *testing.T) {
	t.Parallel()
	for _, waitOnly := range []bool{false, true} {
		t.Run(fmt.Sprint(waitOnly), func(t *testing.T) {
			t.Parallel()
			m := newMover(t, 2)
			g := m.g
			s := m.begin(askFar)
			turned := make(chan float64, 1)
			d := g.workers[s.by]
			d.on(&d.other, func(w http.ResponseWriter, r *http.Request) {
				if strings.HasSuffix(r.URL.Path, "/role") {
					turned <- g.metric(`xpyd_router_takeovers_total{outcome="continued"}{reason="drain"}`)
				}
				whole(w, r)
			})
			done := make(chan struct{})
			go func() {
				defer close(done)
				g.order(s.by, "role", fmt.Sprintf(`{"role":"prefill","wait_only":%v}`, waitOnly))
			}()
			if waitOnly {
				<-done
			} else {
				g.until("it to leave", func() bool { return g.r.Members.Leaving(&d.inst) != nil })
			}
			close(m.goOn)
			<-done
			if n := <-turned; n == 1 == waitOnly {
				t.Errorf("it turned after %v moves", n)
			}
			if waitOnly {
				s.check(0)
			} else {
				s.check(1)
			}
			if g.r.Members.DrainAsked(s.by) {
				t.Error("still drained")
			}
		})
	}
}
