package flight

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/router/apikey"
	"github.com/xpyd/xpyd/router/dialect"
	"github.com/xpyd/xpyd/router/limit"
	"github.com/xpyd/xpyd/router/pick"
)

// pairOf chooses the one pair of a fleet that speaks a dialect.
func pairOf(t *testing.T, speaks string) *pick.Choice {
	t.Helper()
	var list []fleet.Member
	for role, id := range map[fleet.Role]string{fleet.Prefill: "p0", fleet.Decode: "d0"} {
		list = append(list, fleet.Member{State: fleet.Live, Instance: fleet.Instance{ID: id, Epoch: 1, Role: role, Dialect: speaks, Model: "m"}})
	}
	c, err := pick.New(pick.Config{}, nil).Pick(pick.View{Snapshot: fleet.NewSnapshot(1, time.Time{}, list)}, &pick.Request{Model: "m"})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func bareService(t *testing.T) *Service {
	return &Service{Deps: Deps{Ctx: t.Context(), Log: slog.New(slog.DiscardHandler), Spawn: func(func()) bool { return false },
		Picker: pick.New(pick.DefaultConfig(), rand.New(rand.NewPCG(1, 2)))},
		legs: legs{open: map[*leg]struct{}{}}, requests: map[*request]struct{}{}}
}

// TestLegFinish: how a leg ends that is not read to its end.
func TestLegFinish(t *testing.T) {
	for _, c := range []struct {
		state     string
		cut       bool
		want      string
		cancelled bool
	}{
		{legOpen, false, legCancelled, true}, {legOpen, true, legCancelled, true},
		{legAnswer, false, legDone, false}, {legAnswer, true, legCancelled, true},
		{legDone, true, legDone, false}, {legMoved, true, legMoved, false}, {legFailed, true, legFailed, false},
		{legCancelled, true, legCancelled, false}, {legUnused, true, legUnused, false},
	} {
		l := newLeg(fleet.Decode, &fleet.Instance{}, 1)
		l.setState(c.state)
		if got := l.finish(c.cut); got != c.cancelled || l.record().State != c.want {
			t.Errorf("%s, cut %t: %s, cancelled %t", c.state, c.cut, l.record().State, got)
		}
		if over := !l.record().ended.IsZero(); over != (c.state != legUnused && (c.state != legCancelled)) {
			t.Errorf("%s has an end: %t", c.state, over)
		}
	}
}

// TestAttemptOfEndedRequest: a request that ended before its attempt knew ends the legs, except one
// that must not be cut.
func TestAttemptOfEndedRequest(t *testing.T) {
	lingering := 0
	for _, name := range dialect.Names() {
		q := &request{s: bareService(t)}
		q.ctx.End(errClientGone)
		a := q.newAttempt(pairOf(t, name), 1)
		lingers := dialect.For(name).Linger > 0
		if lingers {
			lingering++
			defer a.unlinger()
		}
		if !errors.Is(a.d.Cause(), errClientGone) || (a.p.Cause() == nil) != lingers {
			t.Errorf("%s: decode %v, prefill %v", name, a.d.Cause(), a.p.Cause())
		}
	}
	if lingering == 0 || lingering == len(dialect.Names()) {
		t.Errorf("%d dialects linger", lingering)
	}
}

// TestCancel: the legs of a request that is cancelled end, by whoever may run what ends them.
func TestCancel(t *testing.T) {
	for _, late := range []bool{false, true} {
		s, ends := bareService(t), []func(){}
		s.Spawn = func(f func()) bool {
			if !late {
				ends = append(ends, f)
			}
			return !late
		}
		q := &request{s: s}
		a := q.newAttempt(pairOf(t, "native"), 1)
		q.cancel(errClientGone)
		q.cancel(errDeadline)
		if ended := a.d.Cause() != nil; ended != late {
			t.Errorf("too late to spawn %t: the leg has ended %t", late, ended)
		}
		for _, end := range ends {
			end()
		}
		if !errors.Is(a.d.Cause(), errClientGone) || !errors.Is(a.p.Cause(), errClientGone) || late == (len(ends) == 1) {
			t.Errorf("too late to spawn %t: decode %v, prefill %v, %d spawned", late, a.d.Cause(), a.p.Cause(), len(ends))
		}
	}
}

// TestUnknownDialect: an attempt at a pair of an unknown dialect fails, and waits for nobody.
func TestUnknownDialect(t *testing.T) {
	a := (&request{s: bareService(t)}).newAttempt(pairOf(t, "gibberish"), 1)
	ans, f := a.generate()
	if ans != nil || f == nil || f.outcome != ticket.Incompatible || a.prefillOpen() {
		t.Errorf("%+v, %+v, prefill is waited for: %t", ans, f, a.prefillOpen())
	}
}

// TestBeaten: decode whose attempt has failed meanwhile does not begin to answer.
func TestBeaten(t *testing.T) {
	a := (&request{s: bareService(t)}).newAttempt(pairOf(t, "vllm"), 1)
	f := &failure{by: a.p, err: errors.New("broke")}
	if !a.failDecode(f) || a.failDecode(&failure{by: a.p}) {
		t.Error("the first failure counts")
	}
	for _, stream := range []bool{false, true} {
		a.q.top.Stream = stream
		if ans, got := a.final([]byte(`{}`)); ans != nil || got != f {
			t.Errorf("%+v, %+v", ans, got)
		}
	}
	if err := a.opening([]byte("data: {}\n\n")); !errors.Is(err, f) {
		t.Errorf("%v", err)
	}
	b := (&request{s: bareService(t)}).newAttempt(pairOf(t, "vllm"), 1)
	if err := b.opening([]byte("data: {}\n\n")); err != nil {
		t.Error(err)
	}
	if b.failDecode(f) {
		t.Error("it has begun to answer")
	}
}

// TestFinal: what prefill alone answers, as the client asked for it.
func TestFinal(t *testing.T) {
	for _, stream := range []bool{false, true} {
		a := (&request{s: bareService(t), top: openai.Top{Stream: stream}}).newAttempt(pairOf(t, "vllm"), 1)
		ans, f := a.final([]byte(`{"x":1}`))
		if f != nil || ans.status != 200 {
			t.Fatalf("%+v, %+v", ans, f)
		}
		if kind, body := "application/json", `{"x":1}`; !stream && (ans.contentType != kind || string(ans.body) != body) {
			t.Errorf("%s %s", ans.contentType, ans.body)
		}
		if kind, body := "text/event-stream", "data: {\"x\":1}\n\ndata: [DONE]\n\n"; stream && (ans.contentType != kind || string(ans.body) != body) {
			t.Errorf("%s %q", ans.contentType, ans.body)
		}
		if a.d.record().State != legUnused || a.q.first.IsZero() || a.q.state != stateRelay {
			t.Errorf("decode is %s, the request %s", a.d.record().State, a.q.state)
		}
	}
}

// TestRefused: an engine's status, or the outcome that it names, says where to try next.
func TestRefused(t *testing.T) {
	for _, c := range []struct {
		said    dialect.Reply
		outcome ticket.Outcome
		retry   bool
		relayed string
	}{
		{dialect.Reply{Status: 500, Body: []byte("x")}, "", true, ""},
		{dialect.Reply{Status: 404}, "", true, ""},
		{dialect.Reply{Status: 429}, ticket.NoSpace, true, ""},
		{dialect.Reply{Status: 503}, ticket.NoSpace, true, ""},
		{dialect.Reply{Status: 503, Outcome: "late"}, ticket.Late, true, ""},
		{dialect.Reply{Status: 500, Outcome: "refused"}, "", true, ""},
		{dialect.Reply{Status: 400, Body: []byte(`{"error":{"message":"m","code":7}}`)}, "", false, `{"error":{"message":"m","code":7}}`},
		{dialect.Reply{Status: 413, Body: []byte("too long")}, "", false, `"message":"too long"`},
		{dialect.Reply{Status: 422, Body: []byte(`{"error":"x"}`)}, "", false, `"type":"invalid_request_error"`},
	} {
		a := (&request{s: bareService(t)}).newAttempt(pairOf(t, "vllm"), 1)
		f := a.refused(a.d, a.p, c.said)
		if f.by != a.d || f.outcome != c.outcome || f.retry != c.retry || (f.relay != nil) != (c.relayed != "") {
			t.Errorf("%+v: %+v", c.said, f)
		}
		if f.relay != nil && (f.relay.status != c.said.Status || f.relay.contentType != "application/json" || !strings.Contains(string(f.relay.body), c.relayed)) {
			t.Errorf("%+v: %d %s", c.said, f.relay.status, f.relay.body)
		}
	}
}

// TestTokens: what a request cost, told or counted.
func TestTokens(t *testing.T) {
	counted := &attempt{counted: true, usage: openai.PromptUsage{Prompt: 7}}
	for _, c := range []struct {
		u                 usage
		forwarded         bool
		a                 *attempt
		prompt, generated int
	}{
		{usage{guess: 5}, false, counted, 0, 0},
		{usage{guess: 5, events: 1}, false, counted, 7, 1},
		{usage{guess: 5, events: 2}, false, &attempt{}, 5, 2},
		{usage{guess: 5, events: 2, told: true, prompt: 3, generated: 1}, false, counted, 3, 1},
		{usage{guess: 5, events: 2}, true, counted, 0, 0},
	} {
		q := &request{usage: c.u, forwarded: c.forwarded, attempts: []*attempt{{}, c.a}}
		if p, g := q.tokens(); p != c.prompt || g != c.generated {
			t.Errorf("%+v: %d and %d, want %d and %d", c.u, p, g, c.prompt, c.generated)
		}
	}
}

// TestForfeits: a request pays its estimate if it was sent, has no answer, and its client is why.
func TestForfeits(t *testing.T) {
	for _, c := range []struct {
		status                  int
		hurried, tooLarge, sent bool
		u                       usage
		want                    int64 // that is left of 1000, of which 500 were taken
	}{
		{499, false, false, true, usage{}, 500},
		{499, false, false, false, usage{}, 1000},
		{499, false, false, true, usage{events: 9}, 1000 - 100 - 9},
		{499, false, false, true, usage{events: 9, told: true, prompt: 50, generated: 1}, 1000 - 50 - 9},
		{504, true, false, true, usage{}, 500},
		{504, true, false, false, usage{}, 1000},
		{504, false, false, true, usage{}, 1000},
		{400, false, true, true, usage{}, 500},
		{400, false, true, false, usage{}, 1000},
		{400, false, false, true, usage{}, 1000},
		{503, true, false, true, usage{}, 1000},
		{200, false, false, true, usage{told: true, prompt: 90, generated: 10}, 900},
	} {
		now := time.Now().Add(time.Hour) // nothing flows in
		account := limit.NewAccount(now, limit.Rates{Tokens: 1000})
		if over := account.Take(now, 500); over != nil {
			t.Fatal(over)
		}
		a := &attempt{p: newLeg(fleet.Prefill, &fleet.Instance{}, 1), d: newLeg(fleet.Decode, &fleet.Instance{}, 1)}
		a.p.sent.Store(c.sent)
		q := &request{s: bareService(t), hurried: c.hurried, tooLarge: c.tooLarge, usage: c.u, attempts: []*attempt{a},
			tenant:  &tenant{name: "a", key: &apikey.Key{}, account: account, stats: newStatsByName().of("a")},
			adm:     &admission{taken: true, tokens: 500, prompt: 100, size: 500},
			summary: summary{status: c.status}}
		if c.status != 200 {
			q.failed = "it did"
		}
		q.settle(true)
		if _, tokens := account.Levels(now); tokens.Left != c.want {
			t.Errorf("%+v: %d are left, want %d", c, tokens.Left, c.want)
		}
	}
}

// TestTenantStats: what a tenant used is counted under its name.
func TestTenantStats(t *testing.T) {
	by := newStatsByName()
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(by.requests, by.tokens, by.refused)
	q := &request{s: bareService(t), tenant: &tenant{name: "a", key: &apikey.Key{}, stats: by.of("a")}, adm: &admission{}, summary: summary{status: 200}}
	q.top.MaxTokens, q.top.N, q.top.Prompts = 9, 1, 1
	q.attempts = []*attempt{{d: newLeg(fleet.Decode, &fleet.Instance{}, 1)}}
	q.estimate(&q.top)
	q.usage.tell(5, 3)
	q.settle(true)
	q.settle(false)
	q.tenant.stats.limited("queue")
	for labels, want := range map[[2]string]float64{{"prompt"}: 5, {"generated"}: 3} {
		if got := testutil.ToFloat64(by.tokens.WithLabelValues("a", labels[0])); got != want {
			t.Errorf("%s: %v tokens, want %v", labels[0], got, want)
		}
	}
	if testutil.ToFloat64(by.requests.WithLabelValues("a", "2xx")) != 1 || testutil.ToFloat64(by.refused.WithLabelValues("a", "queue")) != 1 {
		t.Error("not counted once")
	}
	if n, err := testutil.GatherAndCount(reg); n != 4 || err != nil {
		t.Errorf("%d series, %v", n, err)
	}
}

// TestCredentials: what follows the scheme, in any case.
func TestCredentials(t *testing.T) {
	for header, want := range map[string]string{"Bearer x": "x", "bearer x": "x", "BEARER  abc ": "abc", "Bearer ": "none", "Bearer": "none", "": "none", "Basic x": "none", "Bearerx": "none"} {
		var h fasthttp.RequestHeader
		h.Set("Authorization", header)
		got, ok := Credentials(&h, "bearer ")
		if !ok {
			got = []byte("none")
		}
		if string(got) != want {
			t.Errorf("%q: %q, want %q", header, got, want)
		}
	}
}

// TestIdentify: whose a request is, by its key and by a header that a gateway sets.
func TestIdentify(t *testing.T) {
	list := []apikey.Key{apikey.Plain("plain", "k1"), apikey.Plain("gate", "k2"), apikey.Plain("old", "k3")}
	list[1].NamesTenants = true
	list[2].Expires = time.Unix(1, 0)
	ring := func(header string) *keyring {
		k := &keyring{header: header, stats: newStatsByName()}
		n := &keys{ring: apikey.NewRing(list), tenants: map[string]*tenant{}}
		for i := range list {
			n.tenants[list[i].Name] = &tenant{name: list[i].Name, key: &list[i], account: limit.NewAccount(time.Now(), limit.Rates{InFlight: 1})}
		}
		k.now.Store(n)
		return k
	}
	open := &keyring{header: "x-tenant", stats: newStatsByName()}
	for _, c := range []struct {
		k           *keyring
		secret, say string
		want        string // "-": refused
		limits      string // whose
	}{
		{ring(""), "k1", "t", "plain", "plain"}, {ring(""), "k2", "t", "gate", "gate"}, {ring(""), "k3", "", "-", ""}, {ring(""), "", "", "-", ""}, {ring(""), "k9", "", "-", ""},
		{ring("x-tenant"), "k1", "t", "plain", "plain"}, {ring("x-tenant"), "k2", "t", "t", "gate"}, {ring("x-tenant"), "k2", "", "gate", "gate"}, {ring("x-tenant"), "k2", "a b", "gate", "gate"},
		{open, "", "t", "t", ""}, {open, "", "", "", ""}, {open, "k9", "t", "t", ""},
	} {
		var h fasthttp.RequestHeader
		if c.secret != "" {
			h.Set("Authorization", "Bearer "+c.secret)
		}
		h.Set("x-tenant", c.say)
		got, limits := "-", ""
		who, ok := c.k.identify(&h)
		if ok {
			got = ""
		}
		if who != nil {
			got = who.name
			for _, known := range []string{"plain", "gate", "old"} {
				if n := c.k.now.Load(); n != nil && n.tenants[known].account == who.account {
					limits = known
				}
			}
		}
		if got != c.want || limits != c.limits {
			t.Errorf("key %q for %q: %q with the limits of %q, want %q with %q", c.secret, c.say, got, limits, c.want, c.limits)
		}
	}
}

// TestPriority: the header counts before the body's priority, that before its tier, and a key caps
// all, in the body too.
func TestPriority(t *testing.T) {
	for _, c := range []struct {
		header, body string
		best         string // of the key; "": there is none
		class        limit.Class
		answered     string
		sent         string // the body that goes on; "": as it came
	}{
		{"", `{"prompt":"x"}`, "", limit.Normal, "", ""},
		{"high", `{"prompt":"x","priority":5}`, "", limit.High, "high", ""},
		{"LOW", `{"prompt":"x"}`, "", limit.Low, "low", ""},
		{"", `{"prompt":"x","priority":-2}`, "", limit.High, "high", ""},
		{"", `{"prompt":"x","priority":2,"service_tier":"priority"}`, "", limit.Low, "low", ""},
		{"", `{"prompt":"x","service_tier":"priority"}`, "", limit.High, "high", ""},
		{"", `{"prompt":"x","service_tier":"flex"}`, "", limit.Low, "low", ""},
		{"", `{"prompt":"x","service_tier":"auto"}`, "", limit.Normal, "", ""},
		{"high", `{"prompt":"x"}`, "normal", limit.Normal, "normal", ""},
		{"low", `{"prompt":"x"}`, "normal", limit.Low, "low", ""},
		{"", `{"prompt":"x"}`, "low", limit.Low, "", ""},
		{"", `{"prompt":"x","priority":-2}`, "normal", limit.Normal, "normal", `{"prompt":"x","priority":0}`},
		{"", `{"prompt":"x","priority":0}`, "low", limit.Low, "low", `{"prompt":"x","priority":1}`},
		{"", `{"prompt":"x","priority":7}`, "normal", limit.Low, "low", ""},
		{"", `{"prompt":"x","priority":-2}`, "high", limit.High, "high", ""},
	} {
		q := &request{body: []byte(c.body)}
		if c.best != "" {
			q.tenant = &tenant{key: &apikey.Key{Priority: c.best}}
		}
		var err *openai.Error
		if q.top, err = openai.Scan(q.body); err != nil {
			t.Fatal(err)
		}
		q.top.Model = "only"
		var ctx fasthttp.RequestCtx
		ctx.Request.Header.Set(headerPriority, c.header)
		class, err := q.priority(&ctx, &q.top)
		if c.sent == "" {
			c.sent = c.body
		}
		if err != nil || class != c.class || string(ctx.Response.Header.Peek(headerPriority)) != c.answered || string(q.body) != c.sent || q.top.Model != "only" {
			t.Errorf("%+v: %v, answered %q, sent %s, %v", c, class, ctx.Response.Header.Peek(headerPriority), q.body, err)
		}
	}
	for _, body := range []string{`{"prompt":"x","priority":-1,"priority":3}`, `{"prompt":"x","priority":3,"priority":-1}`} {
		q := &request{body: []byte(body), tenant: &tenant{key: &apikey.Key{Priority: "normal"}}}
		q.top, _ = openai.Scan(q.body)
		q.top.Priority, q.top.HasPriority = -1, true
		if _, err := q.priority(&fasthttp.RequestCtx{}, &q.top); err == nil || err.Param != "priority" {
			t.Errorf("%s: %v", body, err)
		}
	}
	var ctx fasthttp.RequestCtx
	ctx.Request.Header.Set(headerPriority, "urgent")
	if _, err := (&request{}).priority(&ctx, &openai.Top{}); err == nil || err.Status != 400 || err.Param != headerPriority || strings.Contains(err.Message, "%!") {
		t.Errorf("%v", err)
	}
}

// TestRest: what follows a body's head is bounded, and read for what no client may send.
func TestRest(t *testing.T) {
	f := func(left int, text string, want error) {
		t.Helper()
		r := &rest{&upload{}, strings.NewReader(text), left}
		if b, err := io.ReadAll(r); !errors.Is(err, want) || err == nil && string(b) != text {
			t.Errorf("%s with room for %d: %s, %v", text, left, b, err)
		}
	}
	f(7, `{"a":1}`, nil)
	f(8, `{"a":1}`, nil)
	f(6, `{"a":1}`, fasthttp.ErrBodyTooLarge)
	r := &rest{&upload{}, strings.NewReader(`{"bootstrap_room":1}`), 100}
	if _, err := io.ReadAll(r); err == nil || !strings.Contains(err.Error(), "bootstrap_room") {
		t.Error(err)
	}
}

// TestIsAddress: what in a form's field begins like an address.
func TestIsAddress(t *testing.T) {
	for text, want := range map[string]bool{"http://x": true, " \t\nhttp://x": true, "h2:/x": true, "a+b-c.d:/x": true, "0z9Z:/x": true, "file:///x": true, "/x": false, ":/x": false, "http:x": false, "http": false, "": false,
		"a b:/x": false, "a/b:/x": false, "a@b:/x": false, "a[b:/x": false, "a`b:/x": false, "a{b:/x": false, "a_b:/x": false, "é:/x": false, "data:x": false} {
		if isAddress(text) != want {
			t.Errorf("%q is an address: %t", text, !want)
		}
	}
}

// TestSkimLongKey: a name that is cut is no name.
func TestSkimLongKey(t *testing.T) {
	for key, want := range map[string]int{"url": 1, strings.Repeat("a", maxToken-5) + "_url": 1, strings.Repeat("a", maxToken-4) + "_url": 0, strings.Repeat("a", maxToken-4) + "_urls": 0} {
		s := &skim{}
		if s.read([]byte(`{"` + key + `":"http://x"}`)); len(s.urls) != want {
			t.Errorf("a key of %d bytes: %q", len(key), s.urls)
		}
	}
}

// TestRecent: running requests and those of the history, the newest first, without probes.
func TestRecent(t *testing.T) {
	at := time.Unix(100, 0)
	s := bareService(t)
	for id, start := range map[string]int{"r1": 1, "r4": 4, "r6": 6, "probe": 5} {
		q := &request{s: s, summary: summary{id: id, start: at.Add(time.Duration(start)), probe: id == "probe"}}
		q.setModel("m", true)
		s.requests[q] = struct{}{}
	}
	s.history.add(&record{summary: summary{id: "none", start: at}}) // it keeps none
	s.history.ring = make([]record, 2)
	for _, id := range []string{"forgotten", "o3", "o2"} {
		s.history.add(&record{summary: summary{id: id, start: at.Add(time.Duration(id[1] - '0'))}})
	}
	ids := func(most int) string {
		var list []string
		for _, i := range s.Recent(most) {
			list = append(list, i.ID)
		}
		return strings.Join(list, " ")
	}
	if got := ids(9); got != "r6 r4 o3 o2 r1" || ids(2) != "r6 r4" || ids(0) != "" {
		t.Errorf("%s; %s", got, ids(2))
	}
	for id, known := range map[string]bool{"r4": true, "o2": true, "probe": true, "forgotten": false, "none": false} {
		if i := s.Find(id); (i != nil) != known || known && i.ID != id {
			t.Errorf("%s: %+v", id, i)
		}
	}
	if i := s.Find("r4"); i.Model != "m" || !i.Stream {
		t.Errorf("%+v", i)
	}
}

// TestInfoText: the waterfall says what failed, and ends its last line.
func TestInfoText(t *testing.T) {
	i := &Info{ID: "r", Status: 502, Error: "all \"broke\"", TookMS: 10, Phases: []phaseInfo{{Name: "queue", EndMS: 5}, {Name: "decode", StartMS: 5, Worker: "d0", State: "failed", Attempt: 1}},
		Attempts: []attemptRecord{{}, {Error: "broke"}}}
	text := string(i.Text())
	for _, want := range []string{`error="all \"broke\""`, "\nattempt 2 failed: broke\n", "10.000 ms", "queue      |=========================                         |", "decode     |                         =========================|", "  d0 failed, attempt 1\n", "+       ... ms"} {
		if !strings.Contains(text, want) {
			t.Errorf("without %q:\n%s", want, text)
		}
	}
	if strings.Contains(text, "attempt 1 failed") || strings.HasSuffix(text, "\n\n") || !strings.HasSuffix(text, "\n") {
		t.Errorf("%s", text)
	}
	if text := string((&Info{ID: "r"}).Text()); strings.Contains(text, "error=") || !strings.HasSuffix(text, "\n") {
		t.Errorf("%s", text)
	}
}

// TestMovable: a stream may be moved while all is known of it and it has not lost too many.
func TestMovable(t *testing.T) {
	var none *seam
	if none.movable() {
		t.Error("without a seam")
	}
	for breaks := range maxTakeovers + 2 {
		s, _ := seamOf(t, 1, 3)
		if s.breaks = breaks; s.movable() {
			t.Error("before its first frame")
		}
		stripped(s, ":t 0 000100020003 1 0123456789abcdef\n"+event0) // as many tokens as may be drawn
		if s.movable() != (breaks < maxTakeovers) || !s.whole() {
			t.Errorf("after %d: %t", breaks, s.movable())
		}
		if s.release(); s.movable() {
			t.Error("after its release")
		}
	}
}

// TestUnfit: who cannot go on with a stream stays excluded; who was lost may, once started again.
func TestUnfit(t *testing.T) {
	s := bareService(t)
	s.silence = silence{s: s, asked: map[workerKey]*question{}}
	q := &request{s: s}
	a := q.newAttempt(pairOf(t, "native"), 1)
	q.seam = &seam{by: a.d.inst}
	now := func(epoch uint64) *fleet.Snapshot {
		d, other := *a.d.inst, *a.d.inst
		d.Epoch, other.ID = epoch, "d1"
		embeds := other
		embeds.ID = "e0"
		return fleet.NewSnapshot(2, time.Time{}, []fleet.Member{{Instance: d, State: fleet.Live}, {Instance: other, State: fleet.Live}, {Instance: embeds, State: fleet.Live}, {Instance: *a.p.inst, State: fleet.Live}})
	}
	barred := []string{"d0", "e0", "unknown"}
	for _, c := range []struct {
		epoch             uint64
		reason            string
		excluded, avoided string
	}{
		{1, reasonDead, "d0 e0 unknown", "x"}, {2, reasonDead, "e0 unknown", "x"},
		{1, reasonTransport, "e0 unknown", "x d0"}, {1, reasonError, "e0 unknown", "x d0"}, {1, reasonSilent, "e0 unknown", "x d0"},
	} {
		a.fail(&failure{by: a.d, reason: c.reason, err: context.Canceled})
		exclude, avoid := q.unfit(now(c.epoch), q.still(now(c.epoch), barred), q.still(now(c.epoch), []string{"x"}))
		if strings.Join(exclude, " ") != c.excluded || strings.Join(avoid, " ") != c.avoided {
			t.Errorf("%s, epoch %d: %v, avoided %v", c.reason, c.epoch, exclude, avoid)
		}
	}
}
