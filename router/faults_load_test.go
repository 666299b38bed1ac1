package router_test

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	fake "github.com/xpyd/xpyd/internal/mock"
	"github.com/xpyd/xpyd/router"
)

// TestFaultC09_CountsReturnToZero: clients leave at any moment while engines
// fail in every way; the rig's end finds a count, a leg or a goroutine that is
// left. C10, that nothing sweeps live counts, is in package pick.
func TestFaultC09_CountsReturnToZero(t *testing.T) {
	g, ps, ds := pairRig(t, "vllm-mooncake", 2, 2)
	faults := []fake.Fault{{}, {Status: 500}, {Refuse: true}, {Event: true}, {Cut: 2}, {Freeze: 1}, {Status: 429}}
	var wg sync.WaitGroup
	for worker := range 4 {
		rnd := rand.New(rand.NewPCG(9, uint64(worker)))
		wg.Go(func() {
			for range 25 {
				e := append(append([]*fake.Engine{}, ps...), ds...)[rnd.IntN(4)]
				e.SetFault(faults[rnd.IntN(len(faults))])
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(rnd.IntN(8)+1)*time.Millisecond)
				req, _ := http.NewRequestWithContext(ctx, "POST", g.url+"/v1/completions", strings.NewReader(askLive))
				if resp, err := g.client.Do(req); err == nil {
					_, _ = io.Copy(io.Discard, resp.Body)
					resp.Body.Close()
				}
				cancel()
			}
		})
	}
	wg.Wait()
	g.until("nothing left", g.idle)
}

// TestFaultC11_ChurnAfterSelection: workers come and go while requests are on
// their way to them. Each ends, well or with an error, before its deadline.
func TestFaultC11_ChurnAfterSelection(t *testing.T) {
	t.Parallel()
	g := newRig(t, 3, 3)
	stop := make(chan struct{})
	var churn, load sync.WaitGroup
	churn.Go(func() {
		for n := uint64(2); ; n++ {
			for _, id := range []string{"p2", "d2", "p1", "d1"} {
				select {
				case <-stop:
					return
				default:
				}
				g.watcher.Remove(id, "churn")
				inst := g.workers[id].inst
				inst.Epoch = n
				if err := g.watcher.AddStatic(inst, fleet.Static); err != nil {
					t.Error(err)
				}
			}
		}
	})
	for range 6 {
		load.Go(func() {
			for range 25 {
				resp, text := g.post("/v1/completions", askStream, "x-request-timeout-ms", "60000")
				if resp.StatusCode == 504 || resp.StatusCode == 200 && !strings.HasSuffix(text, "\n\n") {
					t.Errorf("%d %s", resp.StatusCode, text)
				}
			}
		})
	}
	load.Wait()
	close(stop)
	churn.Wait()
}

// TestFaultC12_PairAdmittedTogether: while the breaker of the only prefill is
// open decode hears of no request; and it recovers without a restart.
func TestFaultC12_PairAdmittedTogether(t *testing.T) {
	for _, bad := range []string{"p0", "d0"} {
		g := newRig(t, 1, 1, once, func(c *router.Config) {
			c.Limits.PairWait = time.Millisecond
			c.Pick.Breaker.Open, c.Pick.Breaker.MaxOpen = time.Hour, time.Hour
		})
		m := g.workers[bad]
		m.on(&m.prefill, reset)
		m.on(&m.decode, reset)
		for _, d := range g.workers {
			if d.id != bad {
				d.on(&d.decode, func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
			}
		}
		g.until("the breaker to open", func() bool {
			g.post("/v1/completions", ask)
			return g.breakers()[bad] == "open"
		})
		for range 5 {
			resp, text := g.post("/v1/completions", ask)
			if resp.StatusCode != 503 || !strings.Contains(text, "breaker") || resp.Header.Get("Retry-After") == "" {
				t.Errorf("%d %s", resp.StatusCode, text)
			}
			if pair := resp.Header.Get("x-xpyd-prefill") + resp.Header.Get("x-xpyd-decode"); pair != "" { // of an attempt
				t.Errorf("legs to %s though the breaker of %s is open", pair, bad)
			}
		}
		g.until("the breaker to be counted and logged", func() bool {
			return g.metric(`xpyd_router_breaker_opened_total{role="`+string(m.inst.Role)+`"}`) == 1 && strings.Contains(g.logs.String(), "breaker opened")
		})
	}
	g := newRig(t, 1, 1, once, func(c *router.Config) {
		c.Limits.PairWait = time.Minute // a request waits for the breaker
		c.Pick.Breaker.Open = 50 * time.Millisecond
	})
	p := g.workers["p0"]
	p.on(&p.prefill, reset)
	for range 5 {
		g.post("/v1/completions", ask)
	}
	p.on(&p.prefill, prefillDone)
	// With traffic: decode may answer long before prefill's own word, which then is
	// not waited for, and the next request tries the breaker.
	g.until("the breaker to close", func() bool {
		if resp, text := g.post("/v1/completions", ask); resp.StatusCode != 200 || text != storyText {
			t.Errorf("%d %s", resp.StatusCode, text)
		}
		return len(g.breakers()) == 0
	})
}

// TestFaultC13_OnlyServerFaultsOpenBreakers: what a client did wrong, an engine
// that has no room, and clients that leave say nothing against a worker.
func TestFaultC13_OnlyServerFaultsOpenBreakers(t *testing.T) {
	g, ps, ds := pairRig(t, "vllm-nixl", 1, 1, once, func(c *router.Config) {
		c.Pick.Breaker.Open, c.Pick.Breaker.MaxOpen = time.Hour, time.Hour
	})
	for _, e := range []*fake.Engine{ps[0], ds[0]} {
		for _, status := range []int{400, 404, 413, 422, 429, 503} {
			e.SetFault(fake.Fault{Status: status})
			for range 8 {
				if resp, text := g.post("/v1/completions", askText); resp.StatusCode < 400 {
					t.Fatalf("%d %s", resp.StatusCode, text)
				}
			}
			if open := g.breakers(); len(open) > 0 {
				t.Fatalf("status %d: %v", status, open)
			}
		}
		e.SetFault(fake.Fault{Hang: true})
		for range 8 {
			g.leave(askText, got(e))
		}
		g.until("nothing left", g.idle)
		if open := g.breakers(); len(open) > 0 {
			t.Fatalf("clients left: %v", open)
		}
		e.SetFault(fake.Fault{})
	}
	ds[0].SetFault(fake.Fault{Status: 500})
	for range 8 {
		g.post("/v1/completions", askText)
	}
	if open := g.breakers(); len(open) != 1 || open["vllm-nixl-d0"] != "open" {
		t.Errorf("%v", open)
	}
}

// TestBreakerPassedOn: paths that are passed to one engine open and close its
// breaker too.
func TestBreakerPassedOn(t *testing.T) {
	g := newRig(t, 1, 1, once, func(c *router.Config) {
		c.Limits.PairWait, c.Pick.Breaker.Open = time.Minute, 50*time.Millisecond
	})
	d := g.workers["d0"]
	d.on(&d.other, outcome(500, ""))
	for range 5 {
		if resp, text := g.post("/v1/moderations", `{"model":"m","input":"x"}`); resp.StatusCode != 500 {
			t.Fatalf("%d %s", resp.StatusCode, text)
		}
	}
	g.until("the breaker to have opened", func() bool { // a late probe may have come between the failures
		opened := g.metric(`xpyd_router_breaker_opened_total{role="decode"}`) > 0
		if !opened {
			g.post("/v1/moderations", `{"model":"m","input":"x"}`)
		}
		return opened
	})
	d.on(&d.other, whole)
	if resp, text := g.post("/v1/moderations", `{"model":"m","input":"x"}`); resp.StatusCode != 200 {
		t.Fatalf("%d %s", resp.StatusCode, text)
	}
	g.until("the breaker to close", func() bool { return len(g.breakers()) == 0 })
}

// TestFaultC14_ReadyMeansGenerated: an engine that answers /health but cannot generate is
// not ready and gets no request. As soon as it can generate it is ready; no breaker has
// to close first.
func TestFaultC14_ReadyMeansGenerated(t *testing.T) {
	broken := func(c *fake.Config) { c.Fault = fake.Fault{Status: 500, Probes: true} }
	ps, list := engines(t, "vllm-nixl", fleet.Prefill, 1)
	ds, more := engines(t, "vllm-nixl", fleet.Decode, 1, broken)
	g := newRig(t, 0, 0, func(c *router.Config) { c.Static = append(list, more...) })
	g.until("a probe to fail", func() bool { return strings.Contains(g.logs.String(), "probe failed") })
	if status, _ := g.get("/ready"); status != 503 || g.r.Ready() {
		t.Errorf("ready: %d", status)
	}
	for range 3 {
		if resp, text := g.post("/v1/completions", askText); resp.StatusCode != 503 {
			t.Errorf("%d %s", resp.StatusCode, text)
		}
	}
	if n := len(ps[0].Records()) + len(ds[0].Records()); n != 0 {
		t.Errorf("%d legs of users", n)
	}
	ds[0].SetFault(fake.Fault{})
	g.until("readiness", func() bool { status, _ := g.get("/ready"); return status == 200 })
	if resp, text := g.post("/v1/completions", askText); resp.StatusCode != 200 || len(g.breakers()) != 0 {
		t.Errorf("%d %s, %v", resp.StatusCode, text, g.breakers())
	}
}

// TestFaultC15_NoSilentLocalPrefill: a prefill that fails, or that answers
// without what decode needs, never makes decode compute the prompt in silence.
// What cannot be split and goes to decode alone says so: see TestUnsplit.
func TestFaultC15_NoSilentLocalPrefill(t *testing.T) {
	t.Parallel()
	for _, dialect := range []string{"vllm-nixl", "trtllm"} {
		for name, fault := range map[string]fake.Fault{"500": {Status: 500}, "reset": {Refuse: true}, "no parameters": {NoParams: true}} {
			t.Run(dialect+" "+name, func(t *testing.T) {
				g, ps, ds := pairRig(t, dialect, 1, 1, func(c *router.Config) { c.Pick.Breaker.Failures = 0 })
				ps[0].SetFault(fault)
				if resp, text := g.post("/v1/completions", askText); resp.StatusCode < 500 {
					t.Errorf("%d %s", resp.StatusCode, text)
				}
				if r := ds[0].Records(); len(r) != 0 {
					t.Errorf("decode got a %s leg", r[0].Leg)
				}
			})
		}
	}
}

// TestFaultC17_SequentialTrafficSpreads: one request at a time, all with the same
// system prompt before much of their own, uses all workers. (What is nearly all
// cached stays where it is cached while that worker is idle.)
func TestFaultC17_SequentialTrafficSpreads(t *testing.T) {
	g := newRig(t, 2, 2)
	used := map[string]int{}
	prefix := strings.Repeat("You are an agent. ", 30)
	const requests = 120
	for i := range requests {
		resp, _ := g.post("/v1/completions", fmt.Sprintf(`{"model":"m","prompt":"%s%s","max_tokens":8}`, prefix, strings.Repeat(fmt.Sprintf("step %d ", i), 500)))
		used[resp.Header.Get("x-xpyd-prefill")]++
		used[resp.Header.Get("x-xpyd-decode")]++
	}
	for _, id := range []string{"p0", "p1", "d0", "d1"} {
		if used[id] < requests/5 {
			t.Errorf("%v", used)
		}
	}
}
