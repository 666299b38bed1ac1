package router_test

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net/http"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/kvevents"
	fake "github.com/xpyd/xpyd/internal/mock"
	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/router"
	"github.com/xpyd/xpyd/router/pick"
)

// idsPrompt is a request with n token ids.
func idsPrompt(first, n int, more string) string {
	ids := make([]string, n)
	for i := range ids {
		ids[i] = fmt.Sprint(first + i)
	}
	return fmt.Sprintf(`{"model":"m","prompt":[%s],"max_tokens":2%s}`, strings.Join(ids, ","), more)
}

// explained asks with x-xpyd-explain and returns the header.
func (g *rig) explained(body string) (pick.Explain, http.Header) {
	g.t.Helper()
	var ex pick.Explain
	resp, text := g.post("/v1/completions", body, "x-xpyd-explain", "1")
	if resp.StatusCode != 200 {
		g.t.Fatalf("%d %s", resp.StatusCode, text)
	}
	if err := json.Unmarshal([]byte(resp.Header.Get("x-xpyd-explain")), &ex); err != nil {
		g.t.Fatalf("%v in %q", err, resp.Header.Get("x-xpyd-explain"))
	}
	return ex, resp.Header
}

// metric is the value of a counter with its labels.
func (g *rig) metric(name string) float64 {
	g.t.Helper()
	families, err := g.reg.Gather()
	if err != nil {
		g.t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			full := f.GetName()
			for _, l := range m.GetLabel() {
				full += fmt.Sprintf("{%s=%q}", l.GetName(), l.GetValue())
			}
			if full == name {
				return m.GetCounter().GetValue()
			}
		}
	}
	g.t.Fatalf("no metric %s", name)
	return 0
}

// feed is what the admin API says of a worker's events.
type feed struct {
	Connected bool
	Blocks    int
	Resets    int
	Refused   bool
	Error     string
}

// feed returns that of one worker, if it is followed.
func (g *rig) feed(id string) (feed, bool) {
	g.t.Helper()
	var list struct {
		Instances []struct {
			ID   string
			Feed *feed `json:"kv_feed"`
		}
	}
	g.adminJSON("GET", "/admin/v1/instances", "", &list)
	for _, i := range list.Instances {
		if i.ID == id && i.Feed != nil {
			return *i.Feed, true
		}
	}
	return feed{}, false
}

// blocks is how many blocks the router knows of a worker.
func (g *rig) blocks(id string) int {
	g.t.Helper()
	if f, ok := g.feed(id); ok && f.Connected {
		return f.Blocks
	}
	return -1
}

// TestKVEventsSecrets: the router shows its secrets to the native workers that ask
// for them and to no others, takes nothing from one that does not ask though it
// said so, says who refuses it, and follows changes of secrets under way.
func TestKVEventsSecrets(t *testing.T) {
	one, two := trust.NewSecret(), trust.NewSecret()
	ring := func(list ...trust.Secret) *trust.Ring {
		r, err := trust.NewRing(list...)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	publish := func(listen, replay string, r *trust.Ring) *kvevents.Publisher {
		t.Helper()
		p, err := kvevents.Publish(kvevents.PublisherConfig{Listen: listen, Replay: replay, Ring: r})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { p.Close() })
		p.Send(&kvevents.Batch{Events: []kvevents.Event{{Hashes: []uint64{1}, BlockSize: 16, Tokens: make([]uint32, 16)}}})
		return p
	}
	set := func(r *trust.Ring, list ...trust.Secret) {
		if err := r.Set(list...); err != nil {
			t.Fatal(err)
		}
	}
	ours, theirs := ring(two), ring(one)
	g := newRigOf(t, func(d *router.Deps) { d.Ring = ours }, 0, 0, func(c *router.Config) { c.Pick.Policy = pick.KVEvents })
	worker := func(id string, p *kvevents.Publisher, edit func(*fleet.Instance)) *mock {
		return g.add(id, fleet.Prefill, func(i *fleet.Instance) {
			i.KVEvents, i.KVReplay = p.Addr().String(), p.ReplayAddr().String()
			edit(i)
		})
	}
	knows := func(id string) {
		t.Helper()
		g.until(id+" is followed", func() bool { return g.blocks(id) == 1 })
	}
	refused := func(id, why string) {
		t.Helper()
		g.until(id+" is refused", func() bool {
			f, _ := g.feed(id)
			return f.Refused && !f.Connected && strings.Contains(f.Error, why)
		})
	}
	asks := publish("127.0.0.1:0", "127.0.0.1:0", theirs)
	m := worker("asks", asks, func(i *fleet.Instance) { i.Secrets = theirs.IDs() })
	open := publish("127.0.0.1:0", "127.0.0.1:0", nil)
	worker("open", open, func(i *fleet.Instance) { i.Secrets, i.KVEventsOpen = ours.IDs(), true })
	worker("trusting", open, func(i *fleet.Instance) {})
	worker("foreign", open, func(i *fleet.Instance) { i.Dialect, i.Secrets = "vllm-nixl", ours.IDs() })
	worker("feigned", open, func(i *fleet.Instance) { i.Secrets = ours.IDs() })
	knows("open")
	knows("trusting")
	knows("foreign")
	refused("feigned", "mechanism")
	refused("asks", "secret")
	set(ours, two, one)
	knows("asks")
	if n := strings.Count(g.logs.String(), `msg="kv events refused`); n != 2 {
		t.Errorf("two refusals are said %d times", n)
	}

	// The worker gets the newer secret as well, and then that alone.
	set(theirs, two, one)
	m.inst.Secrets = theirs.IDs()
	if err := g.watcher.AddStatic(m.inst, fleet.Static); err != nil {
		t.Fatal(err)
	}
	set(theirs, two)
	if f, _ := g.feed("asks"); !f.Connected || f.Resets != 0 {
		t.Errorf("followed anew: %+v", f)
	}
	m.inst.Secrets = theirs.IDs()
	if err := g.watcher.AddStatic(m.inst, fleet.Static); err != nil {
		t.Fatal(err)
	}
	if err := asks.Close(); err != nil {
		t.Fatal(err)
	}
	g.until("not connected", func() bool { f, _ := g.feed("asks"); return !f.Connected })
	publish(asks.Addr().String(), asks.ReplayAddr().String(), theirs)
	knows("asks")
}

// TestKVEvents: a prompt goes to the worker that holds most of it by the engines' own
// events, whoever served it last, until those blocks are gone.
func TestKVEvents(t *testing.T) {
	for _, arrays := range []bool{false, true} {
		publishing := func(c *fake.Config) {
			c.KV = fake.KVEvents{Listen: "127.0.0.1:0", Replay: "127.0.0.1:0", Arrays: arrays, Blocks: 64}
		}
		ps, list := engines(t, "vllm-nixl", fleet.Prefill, 4, publishing)
		ds, more := engines(t, "vllm-nixl", fleet.Decode, 2, publishing)
		list = append(list, more...)
		for i, e := range append(append([]*fake.Engine{}, ps...), ds...) {
			list[i].KVEvents, list[i].KVReplay = e.KVAddrs()
		}
		g := newRig(t, 0, 0, func(c *router.Config) { c.Static, c.Pick.Policy, c.Pick.SlowStart = list, pick.KVEvents, 0 })
		g.allProbed(6)
		// Somebody else's traffic warms p2, past the router.
		body := strings.Replace(idsPrompt(1000, 320, ""), `"max_tokens":2`, `"max_tokens":1,"stream":false,"kv_transfer_params":{"do_remote_decode":true,`+
			`"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}`, 1)
		req, _ := http.NewRequest("POST", ps[2].URL()+"/v1/completions", strings.NewReader(body))
		req.Header.Set("X-Request-Id", "other")
		resp, err := g.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		said, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if resp.StatusCode != 200 {
			t.Fatalf("status %d: %s", resp.StatusCode, said)
		}
		g.until("the blocks are known", func() bool { return g.blocks("vllm-nixl-p2") >= 20 })
		ex, h := g.explained(idsPrompt(1000, 330, ""))
		if h.Get("x-xpyd-prefill") != "vllm-nixl-p2" || ex.Policy != pick.KVEvents || !strings.Contains(ex.Reason, "cached") || ex.Prefill[0].Match < 0.96 || ex.Prefill[0].Match > 0.98 {
			t.Errorf("arrays %v: %s, %+v", arrays, h.Get("x-xpyd-prefill"), ex)
		}
		if _, h := g.explained(idsPrompt(1000, 330, `,"cache_salt":"s"`)); h.Get("x-xpyd-prefill") == "" {
			t.Error("no pair for a salted prompt")
		}
		ps[2].ClearKV()
		g.until("the blocks are forgotten", func() bool { return g.blocks("vllm-nixl-p2") == 0 })
		ex, _ = g.explained(idsPrompt(1000, 330, `,"seed":7`))
		for _, c := range ex.Prefill {
			if c.ID == "vllm-nixl-p2" && c.Match != 0 {
				t.Errorf("%+v", ex)
			}
		}
		ds[0].LoseKV()
	}
}

// TestKVEventsByTier: of two hits the one that is worth more by the tiers' weights
// decides. Where the weights were equal each of these would go to the other worker.
func TestKVEventsByTier(t *testing.T) {
	g := newRig(t, 0, 0, func(c *router.Config) { c.Pick.Policy, c.Pick.SlowStart = pick.KVEvents, 0 })
	g.add("d0", fleet.Decode)
	const size, prompt = 16, 400
	// Of each case a worker has so many tokens. Ties go to the one that was used
	// longer ago, and at first to the one that came first: to the wrong one.
	type hit struct {
		tier   kvevents.Tier
		tokens int
	}
	cases := []struct {
		name string
		has  [3]hit
		want int
	}{
		{"the same in host memory, on disk and in GPU memory", [3]hit{{kvevents.Host, 320}, {kvevents.Disk, 320}, {kvevents.GPU, 320}}, 2},
		{"320 x 0.8 in host memory are less than 288", [3]hit{{kvevents.Host, 320}, {kvevents.Disk, 336}, {kvevents.GPU, 288}}, 2},
		{"320 x 0.8 in host memory are more than 240", [3]hit{{kvevents.Host, 320}, {kvevents.Disk, 352}, {kvevents.GPU, 240}}, 0},
		{"352 x 0.4 on disk are more than 128", [3]hit{{kvevents.Host, 144}, {kvevents.Disk, 352}, {kvevents.GPU, 128}}, 1},
	}
	weight := map[kvevents.Tier]float64{kvevents.GPU: 1, kvevents.Host: 0.8, kvevents.Disk: 0.4}
	for w := range 3 {
		pub, err := kvevents.Publish(kvevents.PublisherConfig{Listen: "127.0.0.1:0", Replay: "127.0.0.1:0"})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { pub.Close() })
		g.add(fmt.Sprintf("p%d", w), fleet.Prefill, func(i *fleet.Instance) {
			i.KVEvents, i.KVReplay = pub.Addr().String(), pub.ReplayAddr().String()
		})
		blocks := 0
		for n, c := range cases {
			ev := kvevents.Event{Tier: c.has[w].tier, BlockSize: size}
			for i := range c.has[w].tokens {
				if ev.Tokens = append(ev.Tokens, uint32(1000*(n+1)+i)); i%size == 0 {
					ev.Hashes = append(ev.Hashes, uint64(1000*(n+1)+i))
					blocks++
				}
			}
			pub.Send(&kvevents.Batch{Events: []kvevents.Event{ev}})
		}
		g.until("the blocks are known", func() bool { return g.blocks(fmt.Sprintf("p%d", w)) == blocks })
	}
	g.allProbed(4)
	for n, c := range cases {
		ex, h := g.explained(idsPrompt(1000*(n+1), prompt, ""))
		if got, want := h.Get("x-xpyd-prefill"), fmt.Sprintf("p%d", c.want); got != want {
			t.Errorf("%s: %s was asked, not %s: %+v", c.name, got, want, ex.Prefill)
		}
		for _, cand := range ex.Prefill {
			has := c.has[cand.ID[1]-'0']
			if want := weight[has.tier] * float64(has.tokens) / prompt; math.Abs(cand.Match-want) > 0.01 {
				t.Errorf("%s: %s counts as %.3f of the prompt, not %.3f", c.name, cand.ID, cand.Match, want)
			}
		}
		if len(ex.Prefill) != 3 {
			t.Errorf("%s: %+v", c.name, ex.Prefill)
		}
		g.until("its legs are over", g.idle)
	}
}

// TestPredictedTTFT: a slow engine gets fewer requests once it is known to be slow.
func TestPredictedTTFT(t *testing.T) {
	_, list := engines(t, "vllm-nixl", fleet.Prefill, 1, func(c *fake.Config) { c.TTFT = 30e6 })
	_, fast := engines(t, "vllm-nixl", fleet.Prefill, 2)
	fast = fast[1:] // the first one has the slow one's name
	_, more := engines(t, "vllm-nixl", fleet.Decode, 1)
	g := newRig(t, 0, 0, func(c *router.Config) {
		c.Static, c.Pick.Policy, c.Pick.SlowStart = append(append(list, fast...), more...), pick.PredictedTTFT, 0
	})
	g.allProbed(3)
	got := map[string]int{}
	for i := range 40 {
		_, h := g.explained(idsPrompt(i*1000, 64, ""))
		got[h.Get("x-xpyd-prefill")]++
	}
	if got["vllm-nixl-p1"] < 25 {
		t.Errorf("%v", got)
	}
}

// TestLocalByCost: once it is known that decode alone is faster, short prompts
// go there, visibly; long ones are split.
func TestLocalByCost(t *testing.T) {
	_, list := engines(t, "vllm-nixl", fleet.Prefill, 1, func(c *fake.Config) { c.TTFT = 20e6 })
	_, more := engines(t, "vllm-nixl", fleet.Decode, 1)
	g := newRig(t, 0, 0, func(c *router.Config) {
		c.Static, c.Pick.Disaggregate, c.Pick.LocalMaxTokens = append(list, more...), pick.ByCost, 100
	})
	g.allProbed(2)
	reasons := map[string]int{}
	for i := range 200 {
		_, h := g.explained(idsPrompt(i*1000, 64, ""))
		reasons[h.Get("x-xpyd-local")]++
		if h.Get("x-xpyd-local") == pick.LocalCost && reasons[pick.LocalCost] >= 5 {
			break
		}
	}
	if reasons[pick.LocalExplore] < 8 || reasons[pick.LocalCost] < 5 {
		t.Fatalf("%v", reasons)
	}
	ex, h := g.explained(idsPrompt(9, 64, ""))
	if h.Get("x-xpyd-local") != pick.LocalCost || h.Get("x-xpyd-prefill") != "" || ex.Split == nil || ex.Split.LocalMS >= ex.Split.PairMS {
		t.Errorf("%v %+v", h, ex.Split)
	}
	if _, h := g.explained(idsPrompt(9, 164, "")); h.Get("x-xpyd-local") != "" {
		t.Error("a long prompt was not split")
	}
	if m := g.metric(`xpyd_router_local_prefills_total{reason="cost"}`); m < 6 {
		t.Errorf("the metric says %v", m)
	}
}
