package router_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	fake "github.com/xpyd/xpyd/internal/mock"
	"github.com/xpyd/xpyd/router"
)

// Tests named TestFaultCnn are the rows of FAULTS.md: what users of other
// routers complain of.

// together is the dialects that send both legs at once.
var together = []string{"vllm-nixl-push", "vllm-mooncake", "vllm-offloading", "sglang", "trtllm-generation-first"}

// lingering is the dialects whose prefill leg may not be cut in the middle of a
// transfer.
var lingering = []string{"sglang", "trtllm-generation-first"}

// patience bounds what takes milliseconds on an idle machine. Anything else that could
// end a wait takes a minute or more.
const patience = 20 * time.Second

func once(c *router.Config) { c.Attempts = 1 }

// over reports whether all of an engine's requests have ended.
func over(list ...*fake.Engine) func() bool {
	return func() bool {
		for _, e := range list {
			for _, r := range e.Records() {
				if !r.Over {
					return false
				}
			}
		}
		return true
	}
}

// legsOf is how many legs the router counts on a worker.
func (g *rig) legsOf(id string) int {
	var list struct {
		Instances []struct {
			ID       string
			InFlight struct{ Legs int } `json:"in_flight"`
		}
	}
	g.adminJSON("GET", "/admin/v1/instances", "", &list)
	for _, i := range list.Instances {
		if i.ID == id {
			return i.InFlight.Legs
		}
	}
	return -1
}

// breakers is the state of every breaker that is not closed.
func (g *rig) breakers() map[string]string {
	var list struct {
		Instances []struct {
			ID      string
			Breaker struct{ State string }
		}
	}
	g.adminJSON("GET", "/admin/v1/instances", "", &list)
	out := map[string]string{}
	for _, i := range list.Instances {
		if i.Breaker.State != "closed" {
			out[i.ID] = i.Breaker.State
		}
	}
	return out
}

// TestFaultC01_AbortedPrefillEndsDecode: prefill fails while decode waits for
// its blocks, which it would do for minutes.
func TestFaultC01_AbortedPrefillEndsDecode(t *testing.T) {
	t.Parallel()
	for _, dialect := range together {
		for name, fault := range map[string]fake.Fault{"500": {Status: 500}, "reset": {Refuse: true}} {
			t.Run(dialect+" "+name, func(t *testing.T) {
				g, ps, ds := pairRig(t, dialect, 1, 1, once)
				ps[0].SetFault(fault)
				ds[0].SetFault(fake.Fault{Hang: true})
				start := time.Now()
				resp, text := g.post("/v1/completions", askLive)
				if resp.StatusCode != 502 || !strings.Contains(text, "prefill worker") || time.Since(start) > patience {
					t.Errorf("%d %s after %v", resp.StatusCode, text, time.Since(start))
				}
				g.until("decode's leg to end", over(ds[0]))
			})
		}
	}
}

// TestFaultC02_DoomedLegIsNotWaitedFor: whichever leg fails first ends the
// other, and the client hears of it at once.
func TestFaultC02_DoomedLegIsNotWaitedFor(t *testing.T) {
	for _, first := range []string{"p0", "d0"} {
		g := newRig(t, 1, 1, once)
		started, ended := make(chan time.Time, 2), make(chan time.Time, 2)
		for _, m := range g.workers {
			h := hold(started, ended)
			if m.id == first {
				h = func(w http.ResponseWriter, r *http.Request) {
					<-started
					outcome(502, "corrupt")(w, r)
				}
			}
			m.on(&m.prefill, h)
			m.on(&m.decode, h)
		}
		if resp, text := g.post("/v1/completions", ask); resp.StatusCode != 502 || !strings.Contains(text, "corrupt") {
			t.Errorf("%s: %d %s", first, resp.StatusCode, text)
		}
		<-ended
	}
}

// leave posts a body and closes the connection once ready says so.
func (g *rig) leave(body string, ready func() bool) {
	g.t.Helper()
	ctx, cancel := context.WithCancel(g.t.Context())
	defer cancel()
	req, _ := http.NewRequestWithContext(ctx, "POST", g.url+"/v1/completions", strings.NewReader(body))
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		if resp, err := g.client.Do(req); err == nil {
			_, _ = io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
		}
	}()
	g.until("the moment to leave", ready)
	cancel()
	<-gone
}

// got says that every engine has a request that is not over.
func got(list ...*fake.Engine) func() bool {
	return func() bool {
		for _, e := range list {
			if r := e.Records(); len(r) == 0 || r[len(r)-1].Over {
				return false
			}
		}
		return true
	}
}

// TestFaultC03_LeaverEndsBothLegs: the client leaves, before the first token and
// in the middle of the answer, in every dialect that allows it, and each leg is
// cut. Nothing else would end them; BenchmarkClientLeaves says how soon.
func TestFaultC03_LeaverEndsBothLegs(t *testing.T) {
	t.Parallel()
	for _, dialect := range split {
		t.Run(dialect, func(t *testing.T) {
			g, ps, ds := pairRig(t, dialect, 1, 1)
			all := []*fake.Engine{ps[0], ds[0]}
			cut := func(name string, body string, ready func() bool, of ...*fake.Engine) {
				t.Helper()
				g.leave(body, ready)
				g.until(name+": the legs to end", over(of...))
				for _, e := range of {
					if r := e.Records(); !r[len(r)-1].Left {
						t.Errorf("%s: %s leg was not cut, but ended", name, r[len(r)-1].Leg)
					}
				}
				g.until("the request to be over", over(all...))
			}
			ps[0].SetFault(fake.Fault{Hang: true})
			ds[0].SetFault(fake.Fault{Hang: true})
			switch {
			case slices.Contains(lingering, dialect): // prefill: see C04
				cut("both wait", askLive, got(all...), ds[0])
			case slices.Contains(together, dialect):
				cut("both wait", askLive, got(all...), all...)
			default:
				cut("prefill computes", askLive, got(ps[0]), ps[0])
				ps[0].SetFault(fake.Fault{})
				cut("decode waits", askLive, got(ds[0]), ds[0])
			}
			ps[0].SetFault(fake.Fault{})
			ds[0].SetFault(fake.Fault{Freeze: 2})
			cut("decode streams", strings.Replace(askLive, ":5", ":500", 1), got(ds[0]), ds[0])
		})
	}
}

// TestFaultC04_TransferIsNotCut: some engines strand blocks when prefill's leg
// is cut in the middle of a transfer. It may go on for a while, and counts as
// load until it ends; decode's is cut at once.
func TestFaultC04_TransferIsNotCut(t *testing.T) {
	t.Parallel()
	for _, dialect := range lingering {
		t.Run(dialect, func(t *testing.T) {
			t.Parallel()
			g, ps, ds := pairRig(t, dialect, 1, 1)
			ps[0].SetFault(fake.Fault{Hang: true})
			ds[0].SetFault(fake.Fault{Hang: true})
			left := time.Now() // at the earliest
			g.leave(askLive, got(ps[0], ds[0]))
			g.until("decode to be cut", over(ds[0]))
			g.until("prefill's leg to end", over(ps[0]))
			if d := time.Since(left); d < time.Second { // no machine is too slow for that
				t.Errorf("prefill's leg was cut after %v", d)
			}
			g.until("its load to be given back", func() bool { return g.legsOf(dialect+"-p0") == 0 })
		})
	}
}

// TestFaultC05_DecodeDeathFreesPrefill: decode dies while prefill works for it. Prefill's
// leg ends, which frees its blocks. The request goes to another decode under a fresh link
// with a prefill of its own: what was made for the dead decode is never handed on.
func TestFaultC05_DecodeDeathFreesPrefill(t *testing.T) {
	t.Parallel()
	for _, dialect := range split {
		t.Run(dialect, func(t *testing.T) {
			g, ps, ds := pairRig(t, dialect, 1, 2)
			ds[0].SetFault(fake.Fault{Refuse: true})
			asked := 0
			for ; asked < 3 || asked < 100 && len(ds[0].Records()) == 0; asked++ {
				resp, text := g.post("/v1/completions", askLive)
				if got, _ := read(t, text); resp.StatusCode != 200 || got != wantText(`"Once upon"`) || resp.Header.Get("x-xpyd-decode") != dialect+"-d1" {
					t.Fatalf("%d %v %s", resp.StatusCode, resp.Header, text)
				}
			}
			g.until("the legs to end", over(ps[0], ds[1]))
			p, lost, good := len(ps[0].Records()), len(ds[0].Records()), len(ds[1].Records())
			least := lost + good
			if slices.Contains(together, dialect) { // decode may be lost before prefill is asked
				least = good
			}
			if lost == 0 || good != asked || p < least || p > lost+good {
				t.Errorf("%d requests: %d prefills for %d decodes that were lost and %d that were not", asked, p, lost, good)
			}
		})
	}
	g := newRig(t, 1, 2)
	p := g.workers["p0"]
	started, ended := make(chan time.Time, 4), make(chan time.Time, 4)
	links := make(chan string, 4)
	p.on(&p.prefill, hold(started, ended))
	g.first(func(w http.ResponseWriter, r *http.Request) {
		<-started
		links <- r.Header.Get("x-xpyd-link")
		p.on(&p.prefill, prefillDone)
		reset(w, r)
	}, func(w http.ResponseWriter, r *http.Request) {
		links <- r.Header.Get("x-xpyd-link")
		<-ended // the old leg, before the client hears anything
		story(w, r)
	})
	if resp, text := g.post("/v1/completions", ask); resp.StatusCode != 200 || text != storyText {
		t.Fatalf("%d %s", resp.StatusCode, text)
	}
	if a, b := <-links, <-links; a == b {
		t.Errorf("both attempts have the link %s", a)
	}
}

// TestFaultC06_LeaseOver: prefill's lease ends before decode collects. No text comes from
// freed blocks: another prefill computes the prompt.
func TestFaultC06_LeaseOver(t *testing.T) {
	t.Parallel()
	for _, dialect := range []string{"vllm-nixl", "vllm-mooncake", "trtllm"} {
		t.Run(dialect, func(t *testing.T) {
			g, ps, ds := pairRig(t, dialect, 2, 1)
			ps[0].SetLease(time.Nanosecond)
			for range 4 {
				resp, text := g.post("/v1/completions", askLive)
				if got, _ := read(t, text); resp.StatusCode != 200 || got != wantText(`"Once upon"`) || resp.Header.Get("x-xpyd-prefill") != dialect+"-p1" {
					t.Fatalf("%d %v %s", resp.StatusCode, resp.Header, text)
				}
			}
			if n := len(ps[0].Records()); n == 0 || len(ds[0].Records()) != 4+n {
				t.Errorf("%d prefills were lost, and decode was asked %d times for 4 answers", n, len(ds[0].Records()))
			}
		})
	}
}

// TestFaultC07_RefusalFreesPrefill: what is wrong with a request is found before
// prefill hears of it, and what only decode finds out ends prefill's leg.
func TestFaultC07_RefusalFreesPrefill(t *testing.T) {
	t.Parallel()
	for _, dialect := range []string{"vllm-nixl-push", "vllm-mooncake", "vllm-offloading"} {
		t.Run(dialect, func(t *testing.T) {
			g, ps, ds := pairRig(t, dialect, 1, 1)
			for _, bad := range []string{`{`, `{"model":"m"}`, `{"model":"m","prompt":"x","kv_transfer_params":{}}`, `{"model":"m","prompt":"x","n":-1}`} {
				if resp, text := g.post("/v1/completions", bad); resp.StatusCode != 400 {
					t.Errorf("%s: %d %s", bad, resp.StatusCode, text)
				}
			}
			if n := len(ps[0].Records()) + len(ds[0].Records()); n != 0 {
				t.Errorf("%d legs of bad requests", n)
			}
			ps[0].SetFault(fake.Fault{Hang: true})
			ds[0].SetFault(fake.Fault{Status: 400})
			if resp, text := g.post("/v1/completions", askText); resp.StatusCode != 400 {
				t.Errorf("%d %s", resp.StatusCode, text)
			}
			g.until("prefill's leg to end", over(ps[0]))
			if n := len(ds[0].Records()); n != 1 {
				t.Errorf("decode was asked %d times", n)
			}
		})
	}
}

// TestFaultC08_NoStrangersBlocks: no two attempts share a link, whatever clients
// call their requests, and what an engine says is corrupt is never an answer.
func TestFaultC08_NoStrangersBlocks(t *testing.T) {
	t.Parallel()
	g := newRig(t, 2, 2, func(c *router.Config) { c.Attempts = 20 }) // every fifth answer is corrupt, whoever's it is
	var mu sync.Mutex
	seen, corrupt := map[string]int{}, 0
	for _, id := range []string{"d0", "d1"} {
		d := g.workers[id]
		d.on(&d.decode, func(w http.ResponseWriter, r *http.Request) {
			mu.Lock()
			seen[r.Header.Get("x-xpyd-link")]++
			bad := len(seen)%5 == 0
			if bad {
				corrupt++
			}
			mu.Unlock()
			if bad {
				outcome(502, "corrupt")(w, r)
				return
			}
			story(w, r)
		})
	}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 10 {
				if resp, text := g.post("/v1/completions", ask, "x-request-id", "same"); resp.StatusCode != 200 || text != storyText {
					t.Errorf("%d %s", resp.StatusCode, text)
				}
			}
		})
	}
	wg.Wait()
	for link, n := range seen {
		if n != 1 || len(link) != 32 {
			t.Errorf("link %q came %d times", link, n)
		}
	}
	if len(seen) != 80+corrupt {
		t.Errorf("%d links of 80 requests and %d repeated", len(seen), corrupt)
	}
	for _, dialect := range split {
		t.Run(dialect, func(t *testing.T) { ownBlocks(t, dialect) })
	}
}

// ownBlocks: requests that run side by side under one name, each with another
// prompt, all get what belongs to their own. The mocks hand a prompt to the
// decode whose request it is, once.
func ownBlocks(t *testing.T, dialect string) {
	const clients, each = 4, 3
	g, ps, ds := pairRig(t, dialect, 1, 1, once)
	var wg sync.WaitGroup
	for i := range clients {
		wg.Go(func() {
			for k := range each {
				prompt := fmt.Sprintf("%q", fmt.Sprintf("Story %d of %d", k, i))
				resp, text := g.post("/v1/completions", strings.Replace(askText, `"Once upon"`, prompt, 1), "x-request-id", "same")
				if got, _ := read(t, text); resp.StatusCode != 200 || got != wantText(prompt) {
					t.Errorf("%s: %d %s", prompt, resp.StatusCode, text)
				}
			}
		})
	}
	wg.Wait()
	keys := map[string]bool{}
	for _, r := range ps[0].Records() {
		keys[r.Header.Get("X-Request-Id")+fmt.Sprint(r.Header["X-Request-Id"])] = true
	}
	if p, d := len(ps[0].Records()), len(ds[0].Records()); p != clients*each || d != p || len(keys) != p {
		t.Errorf("%d prefills, %d decodes and %d request ids for %d requests", p, d, len(keys), clients*each)
	}
}
