package router_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/router"
)

const (
	askPair = `{"model":"m","prompt":"Once upon a time","max_tokens":8,"n":2,"stream":true,"stream_options":{"include_usage":true}}`
	seam    = ": xpyd seam\n\n"
	madeAt  = 1732550000
	hashed  = "0123456789abcdef"
)

// lengths are the tokens of each choice of a teller's story.
var lengths = []int{2, 5}

// given is what a decode is told of a stream that it takes over.
type given struct {
	Created int64
	Prompt  string
	Choices []struct {
		IDs  []int
		Done bool
	}
}

// teller is a decode that says which tokens it sends, and goes on from those of another.
type teller struct {
	g    *rig
	once int            // events in one write; 0: one
	cut  int            // events of each stream before it breaks; -1: none breaks
	says map[int]string // comments, sent before the n-th event
	at   func(n int)    // called before the n-th event, from 0; nil: nobody is
	how  func(w http.ResponseWriter, r *http.Request)
}

// event is one token of a choice; the last has the finish.
func (l *teller) event(first bool, i, at, n int) string {
	mark, who, end := ":t", "", "null"
	if first {
		who = fmt.Sprintf(" %d %s", madeAt, hashed)
	}
	if at == n-1 {
		mark, end = ":f", `"length"`
	}
	id := openai.AppendIDs(nil, []int32{int32(100*i + at)})
	return fmt.Sprintf("%s %d %s%s\ndata: {\"created\":%d,\"choices\":[{\"index\":%d,\"text\":\"<%d.%d>\",\"finish_reason\":%s}]}\n\n", mark, i, id, who, madeAt, i, i, at, end)
}

const usageEvent = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":4,\"completion_tokens\":7,\"total_tokens\":11}}\n\n"

func (l *teller) ServeHTTP(w http.ResponseWriter, r *http.Request, body []byte) {
	top := struct {
		N     int
		Usage any `json:"stream_options"`
	}{N: 1}
	var told given
	if at := r.Header.Get("x-xpyd-given"); at != "" {
		n, err := strconv.Atoi(at)
		if err == nil && n <= len(body) {
			err = json.Unmarshal(body[n:], &told)
			body = body[:min(n, len(body))]
		}
		if err != nil || told.Created != madeAt || told.Prompt != hashed {
			l.g.t.Errorf("given %q: %v, %+v", at, err, told)
		}
	}
	if err := json.Unmarshal(body, &top); err != nil {
		l.g.t.Errorf("decode got %q: %v", body, err)
	}
	if told.Created != 0 && len(told.Choices) != top.N {
		l.g.t.Errorf("given %+v", told)
	}
	if r.Header.Get("x-xpyd-tokens") != "1" || r.Header.Get("x-xpyd-takeover") != "" {
		l.g.t.Errorf("it was not asked for its tokens: %v", r.Header)
	}
	var events []string
	for at := range lengths[len(lengths)-1] {
		for i := range top.N {
			n := lengths[len(lengths)-top.N+i]
			if at < n && (told.Created == 0 || at >= len(told.Choices[i].IDs)) {
				events = append(events, l.event(len(events) == 0, i, at, n))
			}
		}
	}
	for i, c := range told.Choices {
		for at, id := range c.IDs {
			if id != 100*i+at {
				l.g.t.Errorf("choice %d was given %v", i, c.IDs)
			}
		}
		if n := lengths[len(lengths)-top.N+i]; c.Done != (len(c.IDs) == n) {
			l.g.t.Errorf("choice %d, of %d, was given %+v", i, n, c)
		}
	}
	if top.Usage != nil {
		events = append(events, usageEvent)
	}
	events = append(events, "data: [DONE]\n\n")
	broken := l.cut >= 0 && l.cut <= len(events)
	if broken {
		events = events[:l.cut]
	}
	w.Header().Set("Content-Type", "text/event-stream")
	for i := 0; i < len(events); i += max(l.once, 1) {
		if text := l.says[i]; text != "" {
			io.WriteString(w, text)
			w.(http.Flusher).Flush()
		}
		if l.at != nil {
			l.at(i)
		}
		io.WriteString(w, strings.Join(events[i:min(i+max(l.once, 1), len(events))], ""))
		w.(http.Flusher).Flush()
	}
	if broken {
		l.how(w, r)
	}
}

// tell makes a decode a teller that breaks in some way after so many events of a stream.
func (g *rig) tell(id string, cut int, how func(http.ResponseWriter, *http.Request)) {
	l := &teller{g: g, cut: cut, how: how}
	if how == nil {
		l.how = reset
	}
	g.tells(id, func(*http.Request) *teller { return l })
}

// tells makes a decode the teller that by returns for each request.
func (g *rig) tells(id string, by func(*http.Request) *teller) {
	d := g.workers[id]
	d.on(&d.decode, func(w http.ResponseWriter, r *http.Request) {
		l := by(r)
		d.mu.Lock()
		body := d.body
		d.mu.Unlock()
		l.ServeHTTP(w, r, body)
	})
}

// undisturbed is the answer to askPair, or to askStream.
func undisturbed(body string) string {
	l := &teller{}
	var b strings.Builder
	for at := range lengths[1] {
		if body == askPair && at < lengths[0] {
			b.WriteString(l.event(false, 0, at, lengths[0]))
			b.WriteString(l.event(false, 1, at, lengths[1]))
		} else if body == askPair {
			b.WriteString(l.event(false, 1, at, lengths[1]))
		} else {
			b.WriteString(l.event(false, 0, at, lengths[1]))
		}
	}
	out := unframed(b.String())
	if body == askPair {
		out += usageEvent
	}
	return out + "data: [DONE]\n\n"
}

// unframed is text without its frames.
func unframed(text string) string {
	var out strings.Builder
	for _, line := range strings.SplitAfter(text, "\n") {
		if !strings.HasPrefix(line, ":t ") && !strings.HasPrefix(line, ":f ") {
			out.WriteString(line)
		}
	}
	return out.String()
}

// takeovers checks how many there were of each outcome.
func (g *rig) takeovers(want map[string]int) {
	g.t.Helper()
	for _, outcome := range []string{"continued", "failed", "unkept", "ended"} {
		n := 0.0
		for _, reason := range []string{"transport", "timeout", "dead", "silent", "error", "drain", "shortage", "balance"} {
			n += g.metric(fmt.Sprintf("xpyd_router_takeovers_total{outcome=%q}{reason=%q}", outcome, reason))
		}
		if int(n) != want[outcome] {
			g.t.Errorf("%s: %v, want %d", outcome, n, want[outcome])
		}
	}
}

// TestTakeover: a stream whose decode is lost goes on with another pair, wherever it broke, and
// is what it would have been.
func TestTakeover(t *testing.T) {
	t.Parallel()
	half := func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, ":t 1 001U\ndata: {\"choi")
		w.(http.Flusher).Flush()
		reset(w, r)
	}
	split := func(w http.ResponseWriter, r *http.Request) { // in the frame
		io.WriteString(w, ":t 1 00")
		w.(http.Flusher).Flush()
		reset(w, r)
	}
	ends := func(http.ResponseWriter, *http.Request) {} // properly, but early
	silent := func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }
	for _, c := range []struct {
		name  string
		body  string
		cut   int
		once  int
		how   func(http.ResponseWriter, *http.Request)
		seams int
		legs  int // of the decodes
	}{
		{name: "before the first event", body: askPair, cut: 0, legs: 2},
		{name: "after the first", body: askPair, cut: 1, seams: 1, legs: 2},
		{name: "in the middle", body: askPair, cut: 3, seams: 1, legs: 2},
		{name: "one choice done", body: askPair, cut: 5, seams: 1, legs: 2},
		{name: "both done", body: askPair, cut: 7, seams: 1, legs: 2},
		{name: "all but the end", body: askPair, cut: 8, legs: 1},
		{name: "all but the end, without usage", body: askStream, cut: 5, legs: 1},
		{name: "one choice", body: askStream, cut: 2, seams: 1, legs: 2},
		{name: "several events at once", body: askPair, cut: 4, once: 3, seams: 1, legs: 2},
		{name: "in the middle of an event", body: askPair, cut: 3, how: half, seams: 1, legs: 2},
		{name: "in the middle of a frame", body: askPair, cut: 3, how: split, seams: 1, legs: 2},
		{name: "it ends early", body: askPair, cut: 2, how: ends, seams: 1, legs: 2},
		{name: "it falls silent", body: askPair, cut: 2, how: silent, seams: 1, legs: 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			g := newRig(t, 1, 2, func(cfg *router.Config) {
				if c.name == "it falls silent" {
					cfg.ChunkTimeout = 200 * time.Millisecond
				}
			})
			if c.how == nil {
				c.how = reset
			}
			var broke atomic.Bool
			for _, id := range []string{"d0", "d1"} { // the first that is asked breaks
				g.tells(id, func(*http.Request) *teller {
					if broke.Swap(true) {
						return &teller{g: g, cut: -1}
					}
					return &teller{g: g, once: c.once, cut: c.cut, how: c.how}
				})
			}
			resp, text := g.post("/v1/completions", c.body, "x-request-id", "r1")
			if got, want := strings.ReplaceAll(text, seam, ""), undisturbed(c.body); resp.StatusCode != 200 || got != want {
				t.Errorf("%d\n%s\nwant\n%s", resp.StatusCode, got, want)
			}
			if got := strings.Count(text, seam); got != c.seams {
				t.Errorf("%d seams in %s", got, text)
			}
			if n := g.workers["d0"].calls.Load() + g.workers["d1"].calls.Load(); int(n) != c.legs {
				t.Errorf("%d legs", n)
			}
			g.until("the ledger to be empty", g.idle)
			want := map[string]int{"continued": 1}
			if c.cut == 0 {
				want = nil
			}
			g.takeovers(want)
			var rec struct {
				Status   int
				Error    string
				Attempts []struct {
					Error  string
					Decode struct{ ID, State string }
				}
				Phases []struct {
					Name    string
					StartMS float64 `json:"start_ms"`
					EndMS   float64 `json:"end_ms"`
				}
			}
			g.adminJSON("GET", "/debug/requests/r1", "", &rec)
			if rec.Status != 200 || rec.Error != "" || len(rec.Attempts) != c.legs {
				t.Fatalf("%+v", rec)
			}
			if a := rec.Attempts; a[0].Error == "" || a[0].Decode.State != "failed" || c.legs > 1 && (a[1].Decode.ID == a[0].Decode.ID || a[1].Decode.State != "done" || a[1].Error != "") {
				t.Errorf("%+v", a)
			}
			byte1 := 0
			for i, p := range rec.Phases {
				if p.Name == "first_byte" {
					if byte1++; p.EndMS <= p.StartMS || p.EndMS > rec.Phases[i+1].StartMS+0.01 {
						t.Errorf("%+v", rec.Phases)
					}
				}
			}
			if byte1 != 1 {
				t.Errorf("%+v", rec.Phases)
			}
		})
	}
}

// TestBreakBehindTheEnd: a connection that breaks behind [DONE] is no error: the client has all.
func TestBreakBehindTheEnd(t *testing.T) {
	t.Parallel()
	g := newRig(t, 1, 1)
	g.tells("d0", func(*http.Request) *teller {
		return &teller{g: g, cut: 9, how: func(w http.ResponseWriter, r *http.Request) {
			w.(http.Flusher).Flush()
			reset(w, r)
		}}
	})
	resp, text := g.post("/v1/completions", askPair, "x-request-id", "r1")
	if want := undisturbed(askPair); resp.StatusCode != 200 || text != want {
		t.Errorf("%d\n%s\nwant\n%s", resp.StatusCode, text, want)
	}
	g.until("the ledger to be empty", g.idle)
	var rec struct {
		Status int
		Error  string
	}
	if g.adminJSON("GET", "/debug/requests/r1", "", &rec); rec.Status != 200 || rec.Error != "" {
		t.Errorf("%+v", rec)
	}
}

// TestTakeoverNot: where there is no takeover, a stream ends as it did before there were any.
func TestTakeoverNot(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name    string
		edit    func(*router.Config)
		header  []string
		asked   bool // for tokens
		outcome string
	}{
		{name: "the client wants none", header: []string{"x-xpyd-takeover", "0"}},
		{name: "it is off", edit: func(c *router.Config) { c.Takeover = false }},
		{name: "no frames", asked: true, outcome: "unkept"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			g := newRig(t, 1, 2, func(cfg *router.Config) {
				if c.edit != nil {
					c.edit(cfg)
				}
			})
			for _, id := range []string{"d0", "d1"} {
				d := g.workers[id]
				d.on(&d.decode, func(w http.ResponseWriter, r *http.Request) {
					if (r.Header.Get("x-xpyd-tokens") != "") != c.asked || r.Header.Get("x-xpyd-given") != "" {
						t.Errorf("%v", r.Header)
					}
					begin(w)
					reset(w, r)
				})
			}
			_, text := g.post("/v1/completions", askStream, c.header...)
			first, rest, _ := strings.Cut(text, "\n\n")
			if e := apiError(t, strings.TrimPrefix(rest, "data: ")); first != `data: {"n":0}` || strings.Contains(e.Message, "no other pair") != (c.outcome != "") {
				t.Errorf("%q", text)
			}
			if n := g.workers["d0"].calls.Load() + g.workers["d1"].calls.Load(); n != 1 {
				t.Errorf("%d legs", n)
			}
			want := map[string]int{}
			if c.outcome != "" {
				want[c.outcome] = 1
			}
			g.until("the ledger to be empty", g.idle)
			g.takeovers(want)
		})
	}
	t.Run("not a stream", func(t *testing.T) {
		g := newRig(t, 1, 1)
		d := g.workers["d0"]
		d.on(&d.decode, func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("x-xpyd-tokens") != "" {
				t.Errorf("%v", r.Header)
			}
			whole(w, r)
		})
		g.post("/v1/completions", ask)
	})
	t.Run("after the end", func(t *testing.T) {
		g := newRig(t, 1, 2)
		for _, id := range []string{"d0", "d1"} {
			g.tell(id, 9, nil)
		}
		_, text := g.post("/v1/completions", askPair)
		if !strings.HasPrefix(text, undisturbed(askPair)) || strings.Contains(text, seam) {
			t.Errorf("%q", text)
		}
		if n := g.workers["d0"].calls.Load() + g.workers["d1"].calls.Load(); n != 1 {
			t.Errorf("%d legs", n)
		}
		g.takeovers(nil)
	})
}

// TestTakeoverAgain: a pair that took a stream over may be lost too, but one that loses too many
// workers may be the reason and ends.
func TestTakeoverAgain(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		cuts  []int // of those asked one after the other
		seams int
		text  string // of the error
	}{
		"twice":                   {[]int{2, 2, -1}, 2, ""},
		"without an event":        {[]int{2, 0, -1}, 1, ""},
		"three times":             {[]int{2, 1, 1, -1}, 2, "lost 3 workers"},
		"twice without any event": {[]int{2, 0, 0, -1}, 0, "lost 3 workers"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := newRig(t, 1, 4)
			var asked atomic.Int32
			for _, id := range []string{"d0", "d1", "d2", "d3"} {
				g.tells(id, func(*http.Request) *teller { return &teller{g: g, cut: c.cuts[asked.Add(1)-1], how: reset} })
			}
			_, text := g.post("/v1/completions", askPair)
			if got := strings.Count(text, seam); got != c.seams {
				t.Errorf("%d seams in %s", got, text)
			}
			plain := strings.ReplaceAll(text, seam, "")
			if c.text == "" {
				if plain != undisturbed(askPair) {
					t.Errorf("%s", text)
				}
				return
			}
			at := strings.LastIndex(plain, "data: ")
			if !strings.HasPrefix(undisturbed(askPair), plain[:at]) {
				t.Errorf("%s", text)
			}
			if e := apiError(t, strings.TrimPrefix(plain[at:], "data: ")); !strings.Contains(e.Message, c.text) {
				t.Errorf("%+v", e)
			}
			if n := asked.Load(); n != 3 {
				t.Errorf("%d were asked", n)
			}
			g.until("the ledger to be empty", g.idle)
			g.takeovers(map[string]int{"continued": c.seams, "failed": 1})
		})
	}
}

// TestTakeoverRefused: a pair that cannot go on says why, and the client is told.
func TestTakeoverRefused(t *testing.T) {
	t.Parallel()
	f := func(name string, edit func(*fleet.Instance), want string, asked bool) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := newRig(t, 1, 1)
			g.tell("d0", 2, func(w http.ResponseWriter, r *http.Request) { // it dies, else it would go on itself
				g.workers["d0"].srv.Listener.Close()
				reset(w, r)
			})
			if name != "another dialect" {
				g.add("p1", fleet.Prefill, edit)
			}
			d := g.add("d1", fleet.Decode, edit)
			g.allProbed(len(g.workers))
			d.on(&d.decode, outcome(409, "refused"))
			text := ""
			for g.workers["d0"].calls.Load() == 0 { // it may not be the first
				_, text = g.post("/v1/completions", askPair)
			}
			plain, rest, _ := strings.Cut(text, "data: {\"error\"")
			if !strings.HasPrefix(undisturbed(askPair), plain) || plain == "" {
				t.Errorf("%q", text)
			}
			if e := apiError(t, "{\"error\""+rest); !strings.Contains(e.Message, want) {
				t.Errorf("%+v", e)
			}
			g.until("the ledger to be empty", g.idle)
			g.takeovers(map[string]int{"failed": 1})
			d.mu.Lock()
			defer d.mu.Unlock()
			if d.last.Get("x-xpyd-given") == "" == asked {
				t.Errorf("asked last: %v", d.last)
			}
		})
	}
	f("another prompt", func(*fleet.Instance) {}, "says the mock", true)
	f("another dialect", func(i *fleet.Instance) { i.Dialect = "openai" }, "no pair", false)
	f("other weights", func(i *fleet.Instance) { i.ModelFingerprint = "other" }, "no pair", false)
	f("other numerics", func(i *fleet.Instance) { i.Numerics = "other" }, "no pair", false)
}

// TestTakeoverElsewhere: what one worker refuses to go on with, another may take: the request was accepted once.
func TestTakeoverElsewhere(t *testing.T) {
	t.Parallel()
	refused := false
	for range 40 { // until the refusing one was asked
		g := newRig(t, 1, 1)
		g.tell("d0", 2, func(w http.ResponseWriter, r *http.Request) {
			g.workers["d0"].srv.Listener.Close()
			reset(w, r)
		})
		s := g.add("s0", fleet.Decode)
		s.on(&s.decode, outcome(400, ""))
		g.add("d1", fleet.Decode)
		g.tell("d1", -1, nil)
		g.allProbed(4)
		resp, text := g.post("/v1/completions", askPair)
		if resp.StatusCode == 400 || g.workers["d0"].calls.Load() == 0 { // it was not the first
			continue
		}
		refused = refused || s.calls.Load() > 0
		if got := strings.Replace(text, seam, "", 1); got != undisturbed(askPair) || got == text {
			t.Fatalf("refused: %t: %s", refused, text)
		}
		g.until("the ledger to be empty", g.idle)
		if refused {
			break
		}
	}
	if !refused {
		t.Error("the refusing worker was never asked")
	}
}

// TestTakeoverWaits: where the lost worker is started again, the stream waits for it: until it is
// there, the client leaves, the deadline passes or the router ends.
func TestTakeoverWaits(t *testing.T) {
	t.Parallel()
	for _, end := range []string{"it comes", "it comes, and drained before", "it comes while the router drains", "it does not come", "client", "deadline", "shutdown"} {
		t.Run(end, func(t *testing.T) {
			t.Parallel()
			g := newRig(t, 1, 1, func(c *router.Config) {
				if end == "it comes" {
					c.Limits.PairWait = 0 // a new request would not wait at all
				}
			})
			coming := func(id string) bool { return id == "d0" }
			if end != "it does not come" {
				g.coming.Store(&coming)
			}
			seen := make(chan struct{})
			g.tell("d0", 2, func(w http.ResponseWriter, r *http.Request) {
				<-seen
				if end == "it comes, and drained before" { // as a worker does that was told to end, and then killed
					inst := g.workers["d0"].inst
					inst.Draining = true
					if err := g.watcher.AddStatic(inst, fleet.Static); err != nil {
						t.Error(err)
					}
				}
				g.watcher.ReportDead("d0", 1, "test")
				reset(w, r)
			})
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			req, _ := http.NewRequestWithContext(ctx, "POST", g.url+"/v1/completions", strings.NewReader(askPair))
			if end == "deadline" {
				req.Header.Set("x-request-timeout-ms", "1500")
			}
			resp, err := g.client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			close(seen)
			waits := func() bool {
				var l struct{ Requests []struct{ State string } }
				g.adminJSON("GET", "/debug/ledger", "", &l)
				return len(l.Requests) == 1 && l.Requests[0].State == "picking"
			}
			if end != "it does not come" && end != "deadline" {
				g.until("the stream to wait", waits)
			}
			want, text := map[string]int{"ended": 1}, ""
			switch end {
			case "it comes while the router drains":
				g.stopped = true
				done := make(chan error, 1)
				go func() { done <- g.r.Shutdown(t.Context()) }()
				defer func() {
					if err := <-done; err != nil {
						t.Error(err)
					}
				}()
				g.until("it to drain", func() bool { return !g.r.Ready() })
				fallthrough
			case "it comes", "it comes, and drained before":
				time.Sleep(700 * time.Millisecond) // longer than without hope
				if !waits() {
					t.Error("it does not wait")
				}
				g.tell("d0", -1, nil)
				again := g.workers["d0"].inst
				again.Epoch = 2
				if err := g.watcher.AddStatic(again, fleet.Static); err != nil {
					t.Fatal(err)
				}
				want = map[string]int{"continued": 1}
			case "it does not come":
				want, text = map[string]int{"failed": 1}, "no other pair went on"
			case "client":
				cancel()
				g.until("a 499 in the log", func() bool { return strings.Contains(g.logs.String(), "status=499") })
				g.until("the ledger to be empty", g.idle)
				g.takeovers(want)
				return
			case "deadline":
				text = "deadline"
			case "shutdown":
				text = "shutting down"
				g.stopped = true
				ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
				defer cancel()
				_ = g.r.Shutdown(ctx)
			}
			body, err := io.ReadAll(resp.Body)
			if err != nil {
				t.Fatal(err)
			}
			if got := strings.ReplaceAll(string(body), seam, ""); text == "" && got != undisturbed(askPair) || !strings.Contains(got, text) {
				t.Errorf("%s", got)
			}
			if !g.stopped {
				g.until("the ledger to be empty", g.idle)
				g.takeovers(want)
			}
		})
	}
}

// TestTakeoverLeaves: a client that leaves while the next pair is silent ends its legs.
func TestTakeoverLeaves(t *testing.T) {
	t.Parallel()
	g := newRig(t, 1, 2)
	started, ended := make(chan time.Time, 1), make(chan time.Time, 1)
	for _, id := range []string{"d0", "d1"} {
		g.tells(id, func(r *http.Request) *teller {
			if r.Header.Get("x-xpyd-given") != "" {
				return &teller{g: g, how: hold(started, ended)}
			}
			return &teller{g: g, cut: 2, how: reset}
		})
	}
	conn := g.dial()
	sendRaw(t, conn, askPair)
	<-started
	conn.Close()
	g.until("the leg to end", func() bool { return len(ended) == 1 })
	g.until("the ledger to be empty", g.idle)
	g.until("a 499 in the log", func() bool { return strings.Contains(g.logs.String(), "status=499") })
	g.takeovers(map[string]int{"ended": 1})
}

// TestTakeoverDeclared: so does a stream whose decode the fleet declares dead while it is silent.
func TestTakeoverDeclared(t *testing.T) {
	t.Parallel()
	g := newRig(t, 1, 2)
	asked, seen := make(chan string, 2), make(chan struct{})
	for _, id := range []string{"d0", "d1"} {
		g.tells(id, func(r *http.Request) *teller {
			if r.Header.Get("x-xpyd-given") != "" {
				return &teller{g: g, cut: -1}
			}
			return &teller{g: g, cut: 3, how: func(_ http.ResponseWriter, r *http.Request) {
				asked <- id
				<-r.Context().Done()
			}}
		})
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		<-seen
		g.watcher.ReportDead(<-asked, 1, "test")
	}()
	status, text := g.stream(askPair, func() { close(seen) })
	<-done
	if got := strings.ReplaceAll(text, seam, ""); status != 200 || got != undisturbed(askPair) || strings.Count(text, seam) != 1 {
		t.Errorf("%d %s", status, text)
	}
	g.until("the ledger to be empty", g.idle)
	if n := g.metric(`xpyd_router_takeovers_total{outcome="continued"}{reason="dead"}`); n != 1 {
		t.Errorf("%v streams of dead workers went on", n)
	}
}

// TestTakeoverBudget: what a dead worker had needs none of the retry budget, as with retries;
// the streams of a silent one do.
func TestTakeoverBudget(t *testing.T) {
	t.Parallel()
	for name, how := range map[string]http.HandlerFunc{
		"dead": reset, "silent": func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := newRig(t, 1, 2, func(c *router.Config) {
				c.ChunkTimeout, c.RetryRatio, c.RetryBurst, c.RetryMin = 200*time.Millisecond, 0, 0, 0
			})
			for _, id := range []string{"d0", "d1"} {
				g.tells(id, func(r *http.Request) *teller {
					if r.Header.Get("x-xpyd-given") != "" {
						return &teller{g: g, cut: -1}
					}
					return &teller{g: g, cut: 3, how: how}
				})
			}
			_, text := g.post("/v1/completions", askPair)
			if went := strings.Contains(text, seam); went != (name == "dead") || strings.Contains(text, "the retry budget is used up") == went {
				t.Errorf("%s", text)
			}
			if n := g.metric("xpyd_router_retry_budget_exhausted_total"); n > 0 == (name == "dead") {
				t.Errorf("%v want of budget", n)
			}
		})
	}
}
