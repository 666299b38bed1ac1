package router_test

import (
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/xpyd/xpyd/internal/fleet"
)

// TestPoison: a request that takes down each decode that goes on with it takes three, the last while
// it is apart, and is told so. The streams of bystanders end whole, though they were at all of these.
func TestPoison(t *testing.T) {
	t.Parallel()
	ids := []string{"d0", "d1", "d2", "d3"}
	g := newRig(t, 1, len(ids))
	var mu sync.Mutex
	var dead []string
	var begun atomic.Int32
	seen, over := make(chan struct{}), make(chan struct{})
	for _, id := range ids {
		g.tells(id, func(r *http.Request) *teller {
			if r.Header.Get("x-request-id") == "poison" {
				return &teller{g: g, cut: 1, how: func(_ http.ResponseWriter, r *http.Request) {
					<-seen
					mu.Lock()
					dead = append(dead, id)
					mu.Unlock()
					g.watcher.ReportDead(id, 1, "test")
					<-r.Context().Done()
				}}
			}
			l := &teller{g: g, cut: -1}
			if r.Header.Get("x-xpyd-given") == "" {
				l.at = func(n int) {
					if n == 1 { // until its decode dies, if it does
						begun.Add(1)
						select {
						case <-r.Context().Done():
						case <-over:
						}
					}
				}
			}
			return l
		})
	}
	var streams sync.WaitGroup
	for n := range 12 {
		streams.Go(func() {
			if _, text := g.post("/v1/completions", askStream, "x-request-id", fmt.Sprint("by-", n)); strings.ReplaceAll(text, seam, "") != undisturbed(askStream) {
				t.Errorf("bystander %d: %q", n, text)
			}
		})
	}
	g.until("all bystanders to have begun", func() bool { return begun.Load() == 12 })
	text := g.watched(askStream, "poison", func() { close(seen) })
	close(over)
	streams.Wait()
	at := strings.LastIndex(text, "data: ")
	if e := apiError(t, strings.TrimPrefix(text[at:], "data: ")); !strings.Contains(e.Message, "lost 3 workers") || !strings.Contains(e.Message, "taken to be the reason") {
		t.Errorf("%q", text)
	}
	mu.Lock()
	defer mu.Unlock()
	if slices.Sort(dead); len(slices.Compact(slices.Clone(dead))) != 3 || len(dead) != 3 {
		t.Errorf("%v died", dead)
	}
	g.until("the ledger to be empty", g.idle)
}

// TestTrial: one suspect at a time is on trial, where nobody else's stream is sent, until it has got
// on; the next one waits.
func TestTrial(t *testing.T) {
	t.Parallel()
	ids := []string{"d0", "d1", "d2"}
	g := newRig(t, 1, len(ids))
	var mu sync.Mutex
	tries, on := map[string]int{}, map[string]string{}
	free := make(chan struct{})
	for _, id := range ids {
		g.tells(id, func(r *http.Request) *teller {
			who := r.Header.Get("x-request-id")
			mu.Lock()
			defer mu.Unlock()
			tries[who]++
			switch n := tries[who]; {
			case !strings.HasPrefix(who, "suspect"):
				if slices.ContainsFunc([]string{"suspect-0", "suspect-1"}, func(s string) bool { return on[s] == id }) {
					t.Errorf("%s is sent to a suspect's %s", who, id)
				}
				return &teller{g: g, cut: -1}
			case n < 3:
				return &teller{g: g, cut: 1, how: reset}
			}
			on[who] = id
			return &teller{g: g, cut: -1, at: func(n int) {
				if n == 1 {
					<-free
				}
			}}
		})
	}
	var suspects sync.WaitGroup
	for n := range 2 {
		suspects.Go(func() {
			if _, text := g.post("/v1/completions", askStream, "x-request-id", fmt.Sprint("suspect-", n)); strings.ReplaceAll(text, seam, "") != undisturbed(askStream) {
				t.Errorf("suspect %d: %q", n, text)
			}
		})
	}
	trials := func() (n int) {
		mu.Lock()
		defer mu.Unlock()
		return len(on)
	}
	waiting := func() bool {
		mu.Lock()
		defer mu.Unlock()
		return tries["suspect-0"] >= 2 && tries["suspect-1"] >= 2 && len(on) == 1
	}
	g.until("one to be on trial", waiting)
	for n := range 12 {
		g.post("/v1/completions", askStream, "x-request-id", fmt.Sprint("other-", n))
	}
	if n := trials(); n != 1 {
		t.Errorf("%d on trial", n)
	}
	free <- struct{}{}
	g.until("the other to be on trial", func() bool { return trials() == 2 })
	mu.Lock()
	for who := range on { // nobody is to keep from where the first was
		if tries[who] > 3 {
			t.Errorf("%s took %d decodes", who, tries[who])
		}
	}
	mu.Unlock()
	close(free)
	suspects.Wait()
	g.until("the ledger to be empty", g.idle)
}

// TestLostTogether: decodes that die together are not a stream's fault, though it was sent to a
// second one of them: it waits until they are there again.
func TestLostTogether(t *testing.T) {
	t.Parallel()
	ids := []string{"d0", "d1", "d2"}
	g := newRig(t, 1, len(ids))
	coming := func(string) bool { return true }
	g.coming.Store(&coming)
	var lost atomic.Int32
	for _, id := range ids {
		g.tells(id, func(r *http.Request) *teller {
			cut := 2
			if r.Header.Get("x-xpyd-given") != "" {
				cut = 0
			}
			return &teller{g: g, cut: cut, how: func(w http.ResponseWriter, r *http.Request) {
				if lost.Add(1) == 2 {
					for _, id := range ids {
						g.watcher.ReportDead(id, 1, "test")
					}
				}
				reset(w, r)
			}}
		})
	}
	text := make(chan string)
	go func() {
		_, all := g.post("/v1/completions", askPair)
		text <- all
	}()
	g.until("all to be dead", func() bool { return lost.Load() == 2 })
	for _, id := range ids {
		g.tell(id, -1, nil)
		again := g.workers[id].inst
		again.Epoch = 2
		if err := g.watcher.AddStatic(again, fleet.Static); err != nil {
			t.Fatal(err)
		}
	}
	if got := strings.ReplaceAll(<-text, seam, ""); got != undisturbed(askPair) {
		t.Errorf("%s", got)
	}
	g.until("the ledger to be empty", g.idle)
}

// watched posts a body with a request id and calls first once the first event is here.
func (g *rig) watched(body, id string, first func()) string {
	g.t.Helper()
	req, _ := http.NewRequest("POST", g.url+"/v1/completions", strings.NewReader(body))
	req.Header.Set("x-request-id", id)
	resp, err := g.client.Do(req)
	if err != nil {
		g.t.Fatal(err)
	}
	defer resp.Body.Close()
	first() // with the status comes the first event
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		g.t.Fatal(err)
	}
	return string(text)
}
