package router_test

import (
	"bufio"
	"context"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	fake "github.com/xpyd/xpyd/internal/mock"
	"github.com/xpyd/xpyd/router"
	"github.com/xpyd/xpyd/router/pick"
	"github.com/xpyd/xpyd/router/sense"
)

// TestFaultC19_StalledClientCostsLittle: a client that does not read stops
// decode, instead of filling the router.
func TestFaultC19_StalledClientCostsLittle(t *testing.T) {
	g := newRig(t, 1, 1, func(c *router.Config) { c.StallTimeout = 300 * time.Millisecond })
	d := g.workers["d0"]
	var sent atomic.Int64
	over := make(chan struct{})
	d.on(&d.decode, func(w http.ResponseWriter, r *http.Request) {
		defer close(over)
		flood("data: "+strings.Repeat("x", 16<<10)+"\n\n", &sent)(w, r)
	})
	conn := g.dial()
	defer conn.Close()
	sendRaw(t, conn, askStream)
	<-over
	if n := sent.Load(); n > 64<<20 { // the sockets' buffers, nothing more
		t.Errorf("%d bytes went somewhere", n)
	}
	g.until("the client to be let go", g.idle)
	g.until("a 499 in the log", func() bool { return strings.Contains(g.logs.String(), "stopped reading") })
}

// publishing is a pair that publishes KV events, behind a router that uses them.
func publishing(t *testing.T) (p *fake.Engine, list []sense.Static) {
	t.Helper()
	kv := func(c *fake.Config) {
		c.KV = fake.KVEvents{Listen: "127.0.0.1:0", Replay: "127.0.0.1:0", Blocks: 64}
	}
	ps, list := engines(t, "vllm-nixl", fleet.Prefill, 1, kv)
	_, more := engines(t, "vllm-nixl", fleet.Decode, 1)
	list[0].KVEvents, list[0].KVReplay = ps[0].KVAddrs()
	return ps[0], append(list, more...)
}

func byEvents(list []sense.Static) func(*router.Config) {
	return func(c *router.Config) { c.Static, c.Pick.Policy = list, pick.KVEvents }
}

// warm lets the engine compute a prompt, and waits for its events.
func (g *rig) warm() {
	g.t.Helper()
	if resp, text := g.post("/v1/completions", idsPrompt(1, 160, "")); resp.StatusCode != 200 {
		g.t.Fatalf("%d %s", resp.StatusCode, text)
	}
	g.until("its blocks", func() bool { return g.blocks("vllm-nixl-p0") >= 10 })
}

// TestFaultC20_NothingOfTheDead: what an engine had before a restart is forgotten. A lost
// batch of events is noticed and leaves no blocks behind.
func TestFaultC20_NothingOfTheDead(t *testing.T) {
	t.Parallel()
	p, list := publishing(t)
	g := newRig(t, 0, 0, byEvents(list))
	g.allProbed(2)
	g.warm()
	p.LoseKV() // and the next batch shows the gap
	g.post("/v1/completions", idsPrompt(1000, 160, ""))
	g.until("the new blocks", func() bool { return g.blocks("vllm-nixl-p0") >= 10 })
	for _, m := range g.watcher.Snapshot().Members {
		if m.Role == fleet.Prefill {
			g.watcher.ReportDead(m.ID, m.Epoch, "test")
		}
	}
	g.until("nothing to be known of the dead", func() bool { return g.blocks("vllm-nixl-p0") <= 0 })
}

// TestFaultC21_NewRouterLearnsByReplay: a second router knows what the engines
// have before it has sent them anything.
func TestFaultC21_NewRouterLearnsByReplay(t *testing.T) {
	t.Parallel()
	_, list := publishing(t)
	old := newRig(t, 0, 0, byEvents(list))
	old.allProbed(2)
	old.warm()
	old.until("the ledger to be empty", old.idle)
	old.shutdown()
	g := newRig(t, 0, 0, byEvents(list))
	g.allProbed(2)
	g.until("the replay", func() bool { return g.blocks("vllm-nixl-p0") >= 10 })
	if ex, _ := g.explained(idsPrompt(1, 160, "")); ex.Prefill[0].Match < 0.9 {
		t.Errorf("%+v", ex)
	}
}

// TestFaultC22_StreamDoesNotWaitForPrefill: decode's first event reaches the
// client though prefill's answer never comes.
func TestFaultC22_StreamDoesNotWaitForPrefill(t *testing.T) {
	t.Parallel()
	g := newRig(t, 1, 1)
	p := g.workers["p0"]
	seen := make(chan struct{})
	p.on(&p.prefill, func(w http.ResponseWriter, r *http.Request) {
		<-seen
		prefillDone(w, r)
	})
	if status, text := g.stream(askStream, func() { close(seen) }); status != 200 || text != storyText {
		t.Errorf("%d %s", status, text)
	}
	for _, dialect := range together {
		if dialect == "sglang" || dialect == "trtllm-generation-first" {
			continue // theirs ends with the transfer, and a mute one would linger
		}
		g, ps, _ := pairRig(t, dialect, 1, 1)
		ps[0].SetFault(fake.Fault{Mute: true})
		resp, text := g.post("/v1/completions", strings.Replace(askLive, `,"stream_options":{"include_usage":true}`, "", 1))
		if got, _ := read(t, text); resp.StatusCode != 200 || got != wantText(`"Once upon"`) {
			t.Errorf("%s: %d %s", dialect, resp.StatusCode, text)
		}
	}
}

// TestFaultC23_SameAsPlain: whatever the dialect, the answer has the text, the
// choices and the counts that one engine alone gives.
func TestFaultC23_SameAsPlain(t *testing.T) {
	t.Parallel()
	plain, _, alone := pairRig(t, "openai", 0, 1)
	bodies := []struct{ path, body string }{
		{"/v1/completions", askText}, {"/v1/completions", askLive}, {"/v1/chat/completions", askChat},
		{"/v1/chat/completions", `{"model":"m","messages":[{"role":"system","content":"S"},{"role":"user","content":"U"}],"max_tokens":4,"stream":true}`},
		{"/v1/completions", `{"model":"m","prompt":"x","n":2,"max_tokens":3}`},
		{"/v1/completions", `{"model":"m","prompt":["x","y"],"max_tokens":3}`},
		{"/v1/completions", `{"model":"m","prompt":[1,2,3],"max_tokens":3}`},
	}
	type said struct {
		text string
		r    reply
	}
	want := make([]said, len(bodies))
	for i, b := range bodies {
		_, text := plain.post(b.path, b.body)
		want[i].text, want[i].r = read(t, text)
	}
	if n := len(alone[0].Records()); n != len(bodies) {
		t.Fatalf("%d", n)
	}
	for _, dialect := range split {
		g, _, _ := pairRig(t, dialect, 1, 1)
		for i, b := range bodies {
			resp, body := g.post(b.path, b.body)
			if resp.StatusCode == 400 && strings.Contains(body, "cannot split") {
				continue // refused by name, not wrong
			}
			text, r := read(t, body)
			w := want[i]
			if resp.StatusCode != 200 || text != w.text || (r.Usage == nil) != (w.r.Usage == nil) || r.Usage != nil && (r.Usage.Prompt != w.r.Usage.Prompt || r.Usage.Completion != w.r.Usage.Completion || r.Usage.Total != w.r.Usage.Total) {
				t.Errorf("%s %s: %d %s", dialect, b.body, resp.StatusCode, body)
			}
		}
	}
}

// TestFaultC25_FirstEventAtOnce: an event is relayed when it comes, not when the
// answer is whole, and prefill is asked in words that it takes.
func TestFaultC25_FirstEventAtOnce(t *testing.T) {
	t.Parallel()
	for _, dialect := range append([]string{"openai"}, split...) {
		t.Run(dialect, func(t *testing.T) {
			prefills := 1
			if dialect == "openai" {
				prefills = 0
			}
			g, ps, ds := pairRig(t, dialect, prefills, 1)
			ds[0].SetFault(fake.Fault{Freeze: 1}) // the second event never comes
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			req, _ := http.NewRequestWithContext(ctx, "POST", g.url+"/v1/completions", strings.NewReader(askLive))
			resp, err := g.client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			line, err := bufio.NewReader(resp.Body).ReadString('\n')
			if err != nil || resp.StatusCode != 200 || !strings.HasPrefix(line, "data: {") {
				t.Errorf("%d %q %v", resp.StatusCode, line, err)
			}
			for _, p := range ps {
				for _, r := range p.Records() {
					if strings.HasPrefix(dialect, "vllm") && dialect != "vllm-p2pnccl" && strings.Contains(r.Body, "stream_options") || r.Status >= 400 {
						t.Errorf("prefill answered %d to %s", r.Status, r.Body)
					}
				}
			}
			cancel()
		})
	}
}
