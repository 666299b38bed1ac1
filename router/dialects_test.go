package router_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/xpyd/xpyd/internal/fleet"
	fake "github.com/xpyd/xpyd/internal/mock"
	"github.com/xpyd/xpyd/router"
	"github.com/xpyd/xpyd/router/dialect"
	"github.com/xpyd/xpyd/router/sense"
)

// split is every dialect with two legs.
var split = []string{"vllm-nixl", "vllm-nixl-push", "vllm-mooncake", "vllm-offloading", "vllm-p2pnccl", "storage", "sglang", "trtllm", "trtllm-generation-first"}

// TestDialectLists: every list of dialects has those of router/dialect.
func TestDialectLists(t *testing.T) {
	foreign := slices.DeleteFunc(dialect.Names(), func(name string) bool { return name == fleet.Native })
	names := func(has func(r *dialect.Rules) bool) []string {
		return slices.DeleteFunc(slices.Clone(foreign), func(name string) bool { return !has(&dialect.For(name).Rules) })
	}
	is := func(what string, got, want []string) {
		t.Helper()
		if got = slices.Sorted(slices.Values(got)); !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", what, got, want)
		}
	}
	text := func(path string) string {
		b, err := os.ReadFile("../" + path)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	rows := func(path, row string) (out []string) {
		for _, m := range regexp.MustCompile(row).FindAllStringSubmatch(text(path), -1) {
			out = append(out, m[1])
		}
		return out
	}
	is("split", split, names(func(r *dialect.Rules) bool { return r.Order != dialect.Alone }))
	is("together", together, names(func(r *dialect.Rules) bool { return r.Order == dialect.Together }))
	is("lingering", lingering, names(func(r *dialect.Rules) bool { return r.Linger > 0 }))
	for _, name := range dialect.Names() {
		if i, r := (fleet.Instance{Dialect: name}), &dialect.For(name).Rules; i.Alone() != (r.Order == dialect.Alone) {
			t.Errorf("%s is %v, but fleet's Instance.Alone is %t", name, r.Order, i.Alone())
		} else if fake.Alone(name) != i.Alone() {
			t.Errorf("%s is %v, but the mock's Alone is %t", name, r.Order, fake.Alone(name))
		}
	}
	is("mocks", fake.Dialects, foreign)
	var clients map[string]any
	if err := json.Unmarshal([]byte(text("e2e/clients/dialects.json")), &clients); err != nil {
		t.Fatal(err)
	}
	is("clients", slices.Collect(maps.Keys(clients)), foreign)
	is("DESIGN.md", rows("router/DESIGN.md", "(?m)^\\| `([a-z0-9-]+)`[^|]*\\| (?:together|P, then D|D only) \\|"), dialect.Names())
	is("docs", rows("docs/in-front-of-engines.md", "(?m)^\\|[^|]*\\| `([a-z0-9-]+)` \\|"), foreign)
	is("replaying", replaying, names(func(r *dialect.Rules) bool { return r.Replays }))
	for _, path := range []string{"docs/in-front-of-engines.md", "docs/reference/cli.md", "configs/samples/router.yaml", "configs/samples/up.yaml"} {
		if all := strings.Join(strings.Fields(strings.ReplaceAll(text(path), "#", "")), " "); !strings.Contains(all, strings.Join(replaying, ", ")) {
			t.Errorf("%s does not say which dialects' streams outlive their engine", path)
		}
	}
	hedged := ": native, " + strings.Join(names(func(r *dialect.Rules) bool { return r.Hedges }), ", ") + "."
	for _, path := range []string{"router/DESIGN.md", "configs/samples/router.yaml", "configs/samples/up.yaml"} {
		if plain := strings.NewReplacer("`", "", "#", "").Replace(text(path)); !strings.Contains(strings.Join(strings.Fields(plain), " "), hedged) {
			t.Errorf("%s does not say which dialects are hedged%s", path, hedged)
		}
	}
}

// engines starts mocks that end after the test, and what a configuration says
// of them.
func engines(t *testing.T, dialect string, role fleet.Role, n int, change ...func(*fake.Config)) (out []*fake.Engine, list []sense.Static) {
	t.Helper()
	label(t)
	for i := range n {
		cfg := fake.Config{Listen: "127.0.0.1:0", Dialect: dialect, Role: string(role), Model: "m", Version: "1.0"}
		for _, c := range change {
			c(&cfg)
		}
		e, err := fake.Start(cfg)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := e.Close(); err != nil {
				t.Error(err)
			}
		})
		s := sense.Static{ID: fmt.Sprintf("%s-%s%d", dialect, role[:1], i), Role: role, URL: e.URL(), Dialect: dialect, Model: "m"}
		if role == fleet.Prefill || dialect == "vllm-p2pnccl" {
			s.Bootstrap, s.EngineID = e.Addr(), e.ID()
		}
		out, list = append(out, e), append(list, s)
	}
	return out, list
}

// pairRig is x prefill and y decode mocks of a dialect behind a router.
func pairRig(t *testing.T, dialect string, x, y int, change ...func(*router.Config)) (*rig, []*fake.Engine, []*fake.Engine) {
	t.Helper()
	ps, list := engines(t, dialect, fleet.Prefill, x)
	ds, more := engines(t, dialect, fleet.Decode, y)
	edit := append([]func(*router.Config){func(c *router.Config) { c.Static = append(list, more...) }}, change...)
	g := newRig(t, 0, 0, edit...)
	g.allProbed(x + y)
	return g, ps, ds
}

// allProbed waits until n members are.
func (g *rig) allProbed(n int) {
	g.t.Helper()
	g.until("all engines probed", func() bool {
		var list struct {
			Instances []struct{ Probed bool }
		}
		g.adminJSON("GET", "/admin/v1/instances", "", &list)
		probed := 0
		for _, i := range list.Instances {
			if i.Probed {
				probed++
			}
		}
		return probed == n && g.idle()
	})
}

const (
	askText = `{ "model":"m", "prompt":"Once upon", "max_tokens":5, "temperature":0.50, "x":{"y":[1, 2]} }`
	askLive = `{"model":"m","prompt":"Once upon","max_tokens":5,"stream":true,"stream_options":{"include_usage":true}}`
	askChat = `{"model":"m","messages":[{"role":"user","content":"Hi"}],"max_completion_tokens":5}`
)

func wantText(prompt string) string { return strings.Join(fake.Words(prompt, 0, 5), "") }

// reply is either shape of an answer.
type reply struct {
	Choices []struct {
		Index   int
		Text    string
		Message struct{ Content string }
		Delta   struct{ Content string }
	}
	Usage *struct {
		Prompt     int `json:"prompt_tokens"`
		Completion int `json:"completion_tokens"`
		Total      int `json:"total_tokens"`
		Details    *struct {
			Cached int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	}
	Error *struct{ Message string }
}

func read(t *testing.T, body string) (text string, r reply) {
	t.Helper()
	for line := range strings.SplitSeq(body, "\n") {
		data := strings.TrimPrefix(line, "data: ")
		if data == "" || data == "[DONE]" {
			continue
		}
		var one reply
		if err := json.Unmarshal([]byte(data), &one); err != nil {
			t.Fatalf("%q: %v", body, err)
		}
		for _, c := range one.Choices {
			if c.Index == 0 {
				text += c.Text + c.Message.Content + c.Delta.Content
			}
		}
		if one.Usage != nil {
			r.Usage = one.Usage
		}
		if one.Error != nil {
			r.Error = one.Error
		}
	}
	return text, r
}

func TestDialects(t *testing.T) {
	t.Parallel()
	for _, dialect := range split {
		t.Run(dialect, func(t *testing.T) {
			t.Parallel()
			g, ps, ds := pairRig(t, dialect, 1, 1)
			f := func(path, body, prompt string) {
				t.Helper()
				resp, text := g.post(path, body, "x-request-id", "twice") // not a link key
				if resp.StatusCode != 200 || resp.Header.Get("x-xpyd-fallback") != "" {
					t.Fatalf("%d %v %s", resp.StatusCode, resp.Header, text)
				}
				got, r := read(t, text)
				if got != wantText(prompt) {
					t.Errorf("%q, want %q", got, wantText(prompt))
				}
				u := r.Usage
				if u == nil || u.Prompt != 9 || u.Completion != 5 || u.Total != 14 || u.Details == nil || u.Details.Cached != 3 {
					t.Errorf("usage %+v in %s", u, text)
				}
			}
			f("/v1/completions", askText, `"Once upon"`)
			f("/v1/completions", askLive, `"Once upon"`)
			f("/v1/chat/completions", askChat, `[{"role":"user","content":"Hi"}]`)
			p, d := ps[0].Records(), ds[0].Records()
			if len(p) != 3 || len(d) != 3 {
				t.Fatalf("%d and %d legs", len(p), len(d))
			}
			for i := range p {
				if p[i].Leg != "prefill" || d[i].Leg != "decode" || p[i].Path != d[i].Path {
					t.Errorf("%s %s, %s %s", p[i].Leg, p[i].Path, d[i].Leg, d[i].Path)
				}
				if a, b := p[i].Header.Get("X-Request-Id"), d[i].Header.Get("X-Request-Id"); a != b || i > 0 && a == p[0].Header.Get("X-Request-Id") {
					t.Errorf("request ids %q and %q", a, b)
				}
			}
			for _, part := range []string{`"temperature":0.50`, `"x":{"y":[1, 2]}`} { // not re-encoded
				if !strings.Contains(p[0].Body, part) || !strings.Contains(d[0].Body, part) {
					t.Errorf("%s is not in %s or %s", part, p[0].Body, d[0].Body)
				}
			}
			if n := ps[0].Held(); n != 0 && dialect != "storage" {
				t.Errorf("prefill still holds %d prompts", n)
			}
		})
	}
}

// TestDialectFailures: whatever goes wrong before the first byte, the client
// gets the text from another pair, under a fresh link.
func TestDialectFailures(t *testing.T) {
	t.Parallel()
	for _, dialect := range split {
		for name, c := range map[string]struct {
			role  fleet.Role
			fault fake.Fault
		}{
			"prefill 500":      {fleet.Prefill, fake.Fault{Status: 500}},
			"prefill 503":      {fleet.Prefill, fake.Fault{Status: 503}},
			"prefill resets":   {fleet.Prefill, fake.Fault{Refuse: true}},
			"decode 500":       {fleet.Decode, fake.Fault{Status: 500}},
			"decode resets":    {fleet.Decode, fake.Fault{Refuse: true}},
			"decode 200, then": {fleet.Decode, fake.Fault{Event: true}},
			"decode is silent": {fleet.Decode, fake.Fault{Hang: true}},
		} {
			t.Run(dialect+", "+name, func(t *testing.T) {
				t.Parallel()
				hang := c.fault.Hang
				g, ps, ds := pairRig(t, dialect, 2, 2, func(c *router.Config) {
					c.Pick.Policy = "round_robin"
					if c.DecodeSilence = 10 * time.Second; hang {
						c.DecodeSilence, c.FirstByteTimeout = 1500*time.Millisecond, 2*time.Second
						c.Attempts = 10 // on a starved machine good engines are silent for so long too
					}
				})
				bad := ps[0]
				if c.role == fleet.Decode {
					bad = ds[0]
				}
				bad.SetFault(c.fault)
				rounds := 4
				if hang {
					rounds = 2 // each has its turn, and waits
				}
				// The bad one is chosen at least once; later, if a starved machine has it
				// suspected of being dead at first.
				for n, late := 0, time.Now().Add(time.Minute); n < rounds || len(bad.Records()) == 0 && time.Now().Before(late); n++ {
					resp, text := g.post("/v1/completions", askLive)
					if got, _ := read(t, text); resp.StatusCode != 200 || got != wantText(`"Once upon"`) {
						t.Fatalf("%d %s\n%s", resp.StatusCode, text, g.logs)
					}
				}
				if len(bad.Records()) == 0 {
					var list any
					g.adminJSON("GET", "/admin/v1/instances", "", &list)
					t.Errorf("the bad engine was never asked: %v\n%s", list, g.logs)
				}
			})
		}
	}
}

// TestDialectBroken: a stream that breaks after its first byte ends with an
// error event, and is not repeated.
func TestDialectBroken(t *testing.T) {
	t.Parallel()
	for _, dialect := range split {
		t.Run(dialect, func(t *testing.T) {
			g, _, ds := pairRig(t, dialect, 1, 1)
			ds[0].SetFault(fake.Fault{Cut: 2})
			_, text := g.post("/v1/completions", askLive)
			got, r := read(t, text)
			if want := strings.Join(fake.Words(`"Once upon"`, 0, 2), ""); got != want || r.Error == nil || len(ds[0].Records()) != 1 {
				t.Errorf("%q, error %v, %d legs", got, r.Error, len(ds[0].Records()))
			}
		})
	}
}

// TestUnsplit: what a dialect cannot split goes to decode alone, visibly, or is
// refused where decode cannot serve alone or the operator does not want it.
func TestUnsplit(t *testing.T) {
	t.Parallel()
	shapes := map[string]string{
		"n": `"prompt":"x","n":2`, "batch": `"prompt":["x","y"]`, "echo": `"prompt":"x","echo":true`,
		"prompt_logprobs": `"prompt":"x","prompt_logprobs":1`, "duplicate_field": `"prompt":"x","stream":true,"stream":false`,
	}
	g, ps, ds := pairRig(t, "vllm-nixl", 1, 1)
	for shape, fields := range shapes {
		resp, text := g.post("/v1/completions", `{"model":"m",`+fields+`}`)
		if resp.StatusCode != 200 || resp.Header.Get("x-xpyd-fallback") != shape || resp.Header.Get("x-xpyd-prefill") != "" {
			t.Errorf("%s: %d %v %s", shape, resp.StatusCode, resp.Header, text)
		}
		d := ds[0].Records()
		if last := d[len(d)-1]; last.Leg != "plain" || last.Body != `{"model":"m",`+fields+`}` {
			t.Errorf("%s: decode got %s %s", shape, last.Leg, last.Body)
		}
	}
	if n := len(ps[0].Records()); n != 0 {
		t.Errorf("prefill got %d requests", n)
	}
	if err := testutil.GatherAndCompare(g.reg, strings.NewReader(`# HELP xpyd_router_fallbacks_total Requests that decode served alone because they could not be split, by the feature that prevents it.
# TYPE xpyd_router_fallbacks_total counter
xpyd_router_fallbacks_total{reason="batch"} 1
xpyd_router_fallbacks_total{reason="chat"} 0
xpyd_router_fallbacks_total{reason="duplicate_field"} 1
xpyd_router_fallbacks_total{reason="echo"} 1
xpyd_router_fallbacks_total{reason="logprobs"} 0
xpyd_router_fallbacks_total{reason="n"} 1
xpyd_router_fallbacks_total{reason="prompt_logprobs"} 1
`), "xpyd_router_fallbacks_total"); err != nil {
		t.Error(err)
	}

	refuse := func(g *rig) {
		t.Helper()
		resp, text := g.post("/v1/completions", `{"model":"m",`+shapes["echo"]+`}`)
		if e := apiError(t, text); resp.StatusCode != 400 || e.Param == nil || *e.Param != "echo" {
			t.Errorf("%d %s", resp.StatusCode, text)
		}
	}
	strict, _, _ := pairRig(t, "vllm-nixl", 1, 1, func(c *router.Config) { c.Fallback = false })
	refuse(strict)
	sg, _, sds := pairRig(t, "sglang", 1, 1) // its decode cannot prefill, but it has batches and n
	refuse(sg)
	resp, text := sg.post("/v1/completions", `{"model":"m","prompt":["x","y","z"],"n":2,"max_tokens":3}`)
	if _, r := read(t, text); resp.StatusCode != 200 || len(r.Choices) != 0 || !strings.Contains(text, `"index":5`) {
		t.Errorf("%d %s", resp.StatusCode, text)
	}
	if n := strings.Count(sds[0].Records()[0].Body, "bootstrap_"); n != 3 {
		t.Errorf("%d bootstrap fields", n)
	}
}

// TestClientsFault: if an engine finds fault with a request, the client is told and no
// other engine is asked.
func TestClientsFault(t *testing.T) {
	for _, role := range []fleet.Role{fleet.Prefill, fleet.Decode} {
		g, ps, ds := pairRig(t, "vllm-nixl", 2, 2)
		for _, e := range map[fleet.Role][]*fake.Engine{fleet.Prefill: ps, fleet.Decode: ds}[role] {
			e.SetFault(fake.Fault{Status: 422})
		}
		resp, text := g.post("/v1/completions", askText)
		if resp.StatusCode != 422 || !strings.Contains(text, "was ordered") {
			t.Errorf("%d %s", resp.StatusCode, text)
		}
		apiError(t, text)
		if n := len(ps[0].Records()) + len(ps[1].Records()); n != 1 {
			t.Errorf("%s: %d prefill legs", role, n)
		}
	}
}

// TestMixedFleet: engines of several kinds side by side; pairs never cross.
func TestMixedFleet(t *testing.T) {
	t.Parallel()
	var list []sense.Static
	var all []*fake.Engine
	for _, dialect := range []string{"vllm-nixl", "sglang"} {
		for _, role := range []fleet.Role{fleet.Prefill, fleet.Decode} {
			e, s := engines(t, dialect, role, 1)
			all, list = append(all, e...), append(list, s...)
		}
	}
	alone, s := engines(t, "openai", fleet.Decode, 1)
	all, list = append(all, alone...), append(list, s...)
	g := newRig(t, 1, 1, func(c *router.Config) { c.Static, c.Pick.Policy = list, "least_loaded" })
	g.allProbed(7)
	seen := map[string]bool{}
	for i := range 40 {
		resp, _ := g.post("/v1/completions", fmt.Sprintf(`{"model":"m","prompt":"%d"}`, i))
		p, d := resp.Header.Get("x-xpyd-prefill"), resp.Header.Get("x-xpyd-decode")
		if resp.StatusCode != 200 || p != "" && strings.TrimRight(p, "p0123456789") != strings.TrimRight(d, "d0123456789") {
			t.Fatalf("%d: %s and %s", resp.StatusCode, p, d)
		}
		seen[d] = true
	}
	if len(seen) != 4 {
		t.Errorf("used: %v", seen)
	}
	var info struct{ Refusals []any }
	if g.adminJSON("GET", "/admin/v1/instances", "", &info); len(info.Refusals) != 0 {
		t.Errorf("refusals %v", info.Refusals)
	}
	for _, e := range all {
		if len(e.Records()) == 0 {
			t.Errorf("%s was not used", e.URL())
		}
	}
}

// TestVersions: engines of different versions are not paired, and the reason
// is shown.
func TestVersions(t *testing.T) {
	t.Parallel()
	_, list := engines(t, "vllm-nixl", fleet.Prefill, 1)
	_, more := engines(t, "vllm-nixl", fleet.Decode, 1, func(c *fake.Config) { c.Version = "2.0" })
	g := newRig(t, 0, 0, func(c *router.Config) { c.Static = append(list, more...) })
	g.until("the refusal", func() bool {
		var info struct {
			Refusals []struct {
				Mismatch struct{ Field, Prefill, Decode string }
			}
		}
		g.adminJSON("GET", "/admin/v1/instances", "", &info)
		return len(info.Refusals) == 2 && info.Refusals[0].Mismatch.Field == "version" && info.Refusals[0].Mismatch.Decode == "2.0"
	})
	if g.r.Ready() {
		t.Error("ready")
	}
	resp, text := g.post("/v1/completions", askText)
	if resp.StatusCode != 503 || !strings.Contains(text, "version differs") {
		t.Errorf("%d %s", resp.StatusCode, text)
	}
}

// TestMooncakeRestart: the engine's id is asked for again when it has changed.
func TestMooncakeRestart(t *testing.T) {
	t.Parallel()
	g, ps, _ := pairRig(t, "vllm-mooncake", 1, 1)
	ps[0].Renew()
	if resp, text := g.post("/v1/completions", askText); resp.StatusCode != 200 {
		t.Errorf("%d %s", resp.StatusCode, text)
	}
}

// TestNamedHang: the legacy connector's endless wait is ended, with a reason.
func TestNamedHang(t *testing.T) {
	t.Parallel()
	g, _, ds := pairRig(t, "vllm-p2pnccl", 1, 1, func(c *router.Config) { c.DecodeSilence, c.Attempts = 50*time.Millisecond, 1 })
	ds[0].SetFault(fake.Fault{Hang: true})
	resp, text := g.post("/v1/completions", askText)
	if resp.StatusCode != 504 || !strings.Contains(text, "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1") {
		t.Errorf("%d %s", resp.StatusCode, text)
	}
}

// TestPrefillDies: prefill's death between its answer and decode's first event
// ends the attempt at once, not at a time-out.
func TestPrefillDies(t *testing.T) {
	for _, dialect := range []string{"vllm-nixl", "vllm-mooncake"} {
		g, ps, ds := pairRig(t, dialect, 1, 1, func(c *router.Config) { c.Attempts = 1 })
		ds[0].SetFault(fake.Fault{Hang: true})
		go func() {
			g.until("decode's leg", func() bool { return len(ds[0].Records()) == 1 && len(ps[0].Records()) == 1 && ps[0].Records()[0].Over })
			for _, m := range g.watcher.Snapshot().Members {
				if m.Role == fleet.Prefill {
					g.watcher.ReportDead(m.ID, m.Epoch, "test")
				}
			}
		}()
		start := time.Now()
		resp, text := g.post("/v1/completions", askText)
		if resp.StatusCode != 502 || !strings.Contains(text, "prefill worker") || time.Since(start) > patience {
			t.Errorf("%s: %d %s after %v", dialect, resp.StatusCode, text, time.Since(start))
		}
	}
}

// TestReloadStatic: a reload adds, replaces and removes engines, and leaves the others
// alone.
func TestReloadStatic(t *testing.T) {
	t.Parallel()
	g, _, _ := pairRig(t, "vllm-nixl", 1, 1)
	_, list := engines(t, "sglang", fleet.Prefill, 1)
	_, more := engines(t, "sglang", fleet.Decode, 1)
	if err := g.r.Members.SetStatic(append(list, more...)); err != nil {
		t.Fatal(err)
	}
	g.until("the new pair", func() bool {
		resp, _ := g.post("/v1/completions", askText)
		return resp.StatusCode == 200 && resp.Header.Get("x-xpyd-decode") == "sglang-d0"
	})
	for _, m := range g.watcher.Snapshot().Members {
		if gone := m.State == fleet.Gone; gone != (m.Dialect == "vllm-nixl") {
			t.Errorf("%s is %s", m.ID, m.State)
		}
	}
	epochs := func() (out []uint64) {
		for _, m := range g.watcher.Snapshot().Members {
			out = append(out, m.Epoch)
		}
		return out
	}
	before := epochs()
	if err := g.r.Members.SetStatic(append(list, more...)); err != nil || !slices.Equal(before, epochs()) {
		t.Errorf("%v, epochs %v became %v", err, before, epochs())
	}
	list[0].URL = more[0].URL
	if err := g.r.Members.SetStatic(append(list, more...)); err != nil || slices.Equal(before, epochs()) {
		t.Errorf("%v, and the engine that moved is the one that it was", err)
	}
	if err := g.r.Members.SetStatic([]sense.Static{{ID: "x", Role: "prefill", URL: "http://h:1", Dialect: "openai", Model: "m"}}); err == nil {
		t.Error("an engine without a decode half was taken")
	}
}

// A good answer waits for nothing but its legs. The mocks answer at once, so of
// many requests the fastest has to stay under any timer of the router's own, and
// what this machine takes for as many hops.
func TestNothingToWaitFor(t *testing.T) {
	for _, dialect := range split {
		t.Run(dialect, func(t *testing.T) {
			g, _, _ := pairRig(t, dialect, 1, 1)
			g.until("a request that waits for no timer", func() bool {
				start := time.Now()
				if status, body := g.get("/version"); status != 200 {
					t.Fatal(status, body)
				}
				there := time.Now()
				if resp, body := g.post("/v1/completions", askText); resp.StatusCode != 200 {
					t.Fatal(resp.Status, body)
				}
				return time.Since(there) < 45*time.Millisecond+3*there.Sub(start)
			})
		})
	}
}
