package router_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/xpyd/xpyd/router"
)

// askLong is askFar with a prompt whose KV is worth to be brought.
var askLong = strings.Replace(askFar, "Once upon a time", strings.Repeat("Once upon a time ", 32), 1)

// stepper has all decodes of a rig tell streams whose events are let go one by one, and bring
// streams as a test says.
type stepper struct {
	g     *rig
	at    chan string   // who begins a stream
	step  chan struct{} // lets an event of it go, from the second on
	asked chan string   // who is to bring one
	legs  chan http.Header
	auth  string                                                       // of streams
	says  map[int]string                                               // see teller
	next  func(id string, w http.ResponseWriter, r *http.Request) bool // answers who is to go on; false: it tells
}

func newStepper(t *testing.T, decodes int, bring http.HandlerFunc, edit ...func(*router.Config)) *stepper {
	s := &stepper{g: newRig(t, 1, decodes, edit...), at: make(chan string, 1), step: make(chan struct{}), asked: make(chan string, 8), legs: make(chan http.Header, 8)}
	for i := range decodes {
		id := fmt.Sprintf("d%d", i)
		d := s.g.workers[id]
		d.on(&d.decode, func(w http.ResponseWriter, r *http.Request) {
			d.mu.Lock()
			body := d.body
			d.mu.Unlock()
			l := &teller{g: s.g, cut: -1}
			if r.Header.Get("x-xpyd-given") == "" {
				l.says = s.says
				s.at <- id
				l.at = func(n int) {
					if n == 0 {
						return
					}
					select {
					case <-s.step:
					case <-r.Context().Done():
					}
				}
			} else {
				s.legs <- r.Header
				if s.next != nil && s.next(id, w, r) {
					return
				}
			}
			l.ServeHTTP(w, r, body)
		})
		d.on(&d.other, func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path != "/xpyd/v1/bring" {
				whole(w, r)
				return
			}
			s.asked <- id
			if r.Header.Get("x-xpyd-given") == "" || r.Header.Get("x-xpyd-deadline-ms") == "" || !strings.HasPrefix(r.Header.Get("x-xpyd-kv-peer"), "d") {
				t.Errorf("it was to bring something: %v", r.Header)
			}
			bring(w, r)
		})
	}
	return s
}

// begin starts a stream, has its decode drained, and waits until another is to bring it.
func (s *stepper) begin(ctx context.Context) (by, next string, done chan string) {
	s.g.t.Helper()
	by, done = s.stream(ctx)
	s.g.order(by, "drain", "")
	s.let(done)
	return by, <-s.asked, done
}

// let lets the next event go. Where a starved machine made its decode look silent, the stream has gone
// on without.
func (s *stepper) let(done chan string) {
	s.g.t.Helper()
	select {
	case s.step <- struct{}{}:
	case text := <-done:
		s.g.t.Fatalf("the stream did not wait: %s", text)
	}
}

// stream starts one, whose second event is on its way.
func (s *stepper) stream(ctx context.Context) (by string, done chan string) {
	g := s.g
	g.t.Helper()
	req, _ := http.NewRequestWithContext(ctx, "POST", g.url+"/v1/completions", strings.NewReader(askLong))
	req.Header.Set("x-request-id", "r1")
	req.Header.Set("Authorization", s.auth)
	done = make(chan string, 1)
	go func() {
		resp, err := g.client.Do(req)
		if err != nil {
			done <- err.Error()
			return
		}
		defer resp.Body.Close()
		b, _ := io.ReadAll(resp.Body) // fails where the client leaves
		done <- string(b)
	}()
	by = <-s.at
	s.let(done)
	return by, done
}

// rest lets all other events go.
func (s *stepper) rest(done chan string) string {
	for {
		select {
		case s.step <- struct{}{}:
		case text := <-done:
			return text
		}
	}
}

func (s *stepper) ends(text string, seams int) {
	s.g.t.Helper()
	if strings.ReplaceAll(text, seam, "") != undisturbed(askPair) || strings.Count(text, seam) != seams {
		s.g.t.Errorf("%d seams wanted in\n%s", seams, text)
	}
	s.g.until("the ledger to be empty", s.g.idle)
}

// came checks how many moved streams' KV came from where.
func (s *stepper) came(brought, prefill, tokens int) {
	s.g.t.Helper()
	for name, want := range map[string]int{`xpyd_router_moves_total{kv="brought"}`: brought, `xpyd_router_moves_total{kv="prefill"}`: prefill, "xpyd_router_moved_kv_tokens_total": tokens} {
		if n := s.g.metric(name); int(n) != want {
			s.g.t.Errorf("%s is %v, want %d", name, n, want)
		}
	}
}

// brought waits until the stream's second attempt has brought, or failed to.
func (s *stepper) brought() {
	s.g.t.Helper()
	s.g.until("it to be brought", func() bool { return s.attempts()[1].Decode.State != "bring" })
}

type moveAttempt struct {
	Error  string
	Decode struct{ ID, State string }
}

func (s *stepper) attempts() []moveAttempt {
	var rec struct{ Attempts []moveAttempt }
	s.g.adminJSON("GET", "/debug/requests/r1", "", &rec)
	return rec.Attempts
}

func bringing(prompt bool, tokens int) string {
	return fmt.Sprintf(`{"prompt":%t,"tokens":%d}`, prompt, tokens)
}

// TestAhead: a stream is served on while its KV is brought to where it moves; then that decode goes
// on alone, and the waterfall shows all of it.
func TestAhead(t *testing.T) {
	t.Parallel()
	answer := make(chan struct{})
	s := newStepper(t, 2, func(w http.ResponseWriter, _ *http.Request) {
		<-answer
		io.WriteString(w, bringing(true, 112))
	})
	g := s.g
	before := g.workers["p0"].calls.Load()
	by, next, done := s.begin(t.Context())
	if next == by {
		t.Errorf("%s is to bring what it has", by)
	}
	s.step <- struct{}{} // meanwhile
	if a := s.attempts(); len(a) != 2 || a[1].Decode.State != "bring" || a[1].Decode.ID != next {
		t.Errorf("%+v", a)
	}
	close(answer)
	s.brought()
	s.ends(s.rest(done), 1)
	h := <-s.legs
	inst := g.workers[by].inst
	if want := fmt.Sprintf("%s 1 %s %s ", by, inst.URL, inst.KVAddr); h.Get("x-xpyd-brought") != "1" || h.Get("x-xpyd-link") != "" || !strings.HasPrefix(h.Get("x-xpyd-kv-peer"), want) || h.Get("x-request-id") != "r1" {
		t.Errorf("the leg has %v", h)
	}
	if n := g.workers["p0"].calls.Load() - before; n != 1 {
		t.Errorf("%d legs of prefill", n)
	}
	g.moves(1, 0)
	s.came(1, 0, 112)
	_, text := g.as("Bearer secret", "GET", "/debug/requests/r1?format=text", "")
	for _, row := range []string{"bring ", "decode "} {
		if !strings.Contains(text, "\n"+row) || !strings.Contains(text, next+" done, attempt 2") || !strings.Contains(text, by+" moved, attempt 1") {
			t.Errorf("no %q in\n%s", row, text)
		}
	}
}

// TestAheadNot: what is not brought does not keep a stream from moving: prefill has the prompt.
func TestAheadNot(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		how    http.HandlerFunc
		tokens int
	}{
		"it cannot":      {how: http.NotFound},
		"it fails":       {how: outcome(503, "no_space")},
		"it breaks":      {how: reset},
		"nonsense":       {how: func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "{") }},
		"endless":        {how: func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, strings.Repeat(" ", 1<<20)) }},
		"it says little": {how: func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, `{"tokens":3}`) }},
		"not the prompt": {how: func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, bringing(false, 32)) }, tokens: 32},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStepper(t, 3, c.how) // a third, should one that breaks be left alone
			_, _, done := s.begin(t.Context())
			s.brought()
			s.ends(s.rest(done), 1)
			if h := <-s.legs; h.Get("x-xpyd-brought") != "" || h.Get("x-xpyd-link") == "" {
				t.Errorf("the leg has %v", h)
			}
			s.g.moves(1, 0)
			s.came(0, 1, c.tokens)
			if n := len(s.asked); n != 0 {
				t.Errorf("%d more were to bring it", n)
			}
		})
	}
}

// TestAheadGone: a decode that has lost what it brought refuses; the stream stays, and moves without.
func TestAheadGone(t *testing.T) {
	t.Parallel()
	s := newStepper(t, 2, func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, bringing(true, 80)) })
	refused := make(chan struct{})
	s.next = func(_ string, w http.ResponseWriter, r *http.Request) bool {
		if r.Header.Get("x-xpyd-brought") == "" {
			return false
		}
		defer close(refused)
		outcome(503, "no_space")(w, r)
		return true
	}
	_, _, done := s.begin(t.Context())
	s.brought()
	s.step <- struct{}{}
	<-refused
	s.g.until("the stream to stay", func() bool { return s.g.metric(`xpyd_router_takeovers_total{outcome="failed"}{reason="drain"}`) == 1 })
	time.Sleep(300 * time.Millisecond) // it is tried again 250 ms later
	s.ends(s.rest(done), 1)
	s.g.moves(1, 1)
	s.came(0, 1, 80)
}

// TestAheadAbandoned: whatever ends meanwhile, nothing is left, and the stream is what it would be.
func TestAheadAbandoned(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		end                   func(s *stepper, by, next string, leave func())
		leaves                bool
		seams                 int
		drained, other, ended int // takeovers
	}{
		"the client leaves": {end: func(_ *stepper, _, _ string, leave func()) { leave() }, leaves: true},
		"it is drained no more": {end: func(s *stepper, by, _ string, _ func()) {
			s.g.order(by, "undrain", "")
		}},
		"the next dies": {end: func(s *stepper, _, next string, _ func()) {
			s.g.watcher.ReportDead(next, 1, "test")
			s.brought()
		}, seams: 1, drained: 1},
		"the old one dies": {end: func(s *stepper, by, _ string, _ func()) { s.g.watcher.ReportDead(by, 1, "test") }, seams: 1, other: 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var under atomic.Int32
			ended := make(chan struct{}, 8)
			s := newStepper(t, 3, func(_ http.ResponseWriter, r *http.Request) {
				under.Add(1)
				<-r.Context().Done()
				under.Add(-1)
				ended <- struct{}{}
			})
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			by, next, done := s.begin(ctx)
			c.end(s, by, next, cancel)
			if c.leaves {
				<-done
				s.g.until("the ledger to be empty", s.g.idle)
			} else {
				s.ends(s.rest(done), c.seams)
			}
			<-ended
			if n := under.Load(); n != 0 {
				t.Errorf("%d still bring it", n)
			}
			if n := s.g.metric(`xpyd_router_takeovers_total{outcome="continued"}{reason="drain"}`); int(n) != c.drained {
				t.Errorf("%v moves", n)
			}
			if n := s.g.metric(`xpyd_router_takeovers_total{outcome="continued"}{reason="dead"}`); int(n) != c.other {
				t.Errorf("%v takeovers", n)
			}
			s.came(0, c.drained, 0)
		})
	}
}
