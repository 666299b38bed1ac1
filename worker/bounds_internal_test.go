package worker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/engine/tier"
	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/kvevents"
	"github.com/xpyd/xpyd/internal/model"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cpu"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/prefill"
)

// withEngine is a worker with the test model and an engine of so many blocks of 16 tokens, as
// far as requests are looked at.
func withEngine(t *testing.T, blocks int) *Worker {
	t.Helper()
	w := renderer(t)
	w.served, w.cfg.BlockTokens, w.cfg.MaxAnswer, w.log = "m", 16, 1<<20, slog.New(slog.DiscardHandler)
	var err error
	a := w.model.Config
	a.MaxPositions = 1 << 13
	if w.backend, err = cpu.New(a, w.model.Weights(false), cpu.Options{Blocks: blocks, BlockTokens: 16, Threads: 1}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = w.backend.Close() })
	if w.cache, err = kvcache.New(kvcache.Config{Blocks: blocks, BlockTokens: 16}); err != nil {
		t.Fatal(err)
	}
	if w.engine, err = engine.New(engine.DefaultConfig(), w.backend, w.cache, w.log, prometheus.NewRegistry()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = w.engine.Close(context.Background()) })
	w.longest = 8
	w.sizes = openai.MeasureTokens(w.tok, w.tok.VocabSize())
	return w
}

// refused is the field of an error that refuses a request, "-" without an error.
func refused(err error) string {
	var api *openai.Error
	switch {
	case err == nil:
		return "-"
	case errors.As(err, &api) && api.Param != "":
		return api.Param
	}
	return err.Error()
}

func p[T any](v T) *T { return &v }

// TestJobBounds: what a request may ask for of this model and pool, and the field that is named
// when it is more.
func TestJobBounds(t *testing.T) {
	w := withEngine(t, 8) // 128 tokens
	vocab := int32(w.vocab())
	prompt := func(n int) []item { return []item{{tokens: make([]int32, n)}} }
	for i, c := range []struct {
		change func(*job)
		want   string
	}{
		{nil, "-"},
		{func(j *job) { j.Model = "m" }, "-"},
		{func(j *job) { j.Model = "another" }, "model"},
		{func(j *job) { j.CacheSalt = strings.Repeat("s", maxSalt) }, "-"},
		{func(j *job) { j.CacheSalt = strings.Repeat("s", maxSalt+1) }, "cache_salt"},
		{func(j *job) { j.N = maxChoices }, "-"},
		{func(j *job) { j.N = maxChoices + 1 }, "n"},
		{func(j *job) { j.N, j.items = maxChoices/2, append(j.items, j.items[0]) }, "-"},
		{func(j *job) { j.N, j.items = maxChoices/2+1, append(j.items, j.items[0]) }, "n"},
		{func(j *job) { j.items = prompt(127) }, "-"},
		{func(j *job) { j.items = prompt(128) }, "prompt"},
		{func(j *job) { j.items, j.chat = prompt(128), true }, "messages"},
		{func(j *job) { j.items = append(prompt(5), prompt(128)...) }, "prompt"},
		{func(j *job) { j.items, j.MaxTokens = prompt(100), p(28) }, "-"},
		{func(j *job) { j.items, j.MaxTokens = prompt(100), p(29) }, "-"},
		{func(j *job) { j.items[0].tokens = []int32{vocab - 1, 0} }, "-"},
		{func(j *job) { j.items[0].tokens = []int32{0, vocab} }, "prompt"},
		{func(j *job) { j.items[0].tokens = []int32{-1} }, "prompt"},
		{func(j *job) { j.PromptLogprobs = p(maxListed) }, "prompt_logprobs"},
	} {
		j := newTestJob(c.change)
		if got := refused(w.checkJob(j)); got != c.want {
			t.Errorf("%d: %s, want %s", i, got, c.want)
		}
		if j.MaxTokens != nil && *j.MaxTokens > 28 {
			t.Errorf("%d: max_tokens is %d where there is room for 28", i, *j.MaxTokens)
		}
	}
	most := shrink * 8 * 128
	for _, c := range []struct {
		n, least int
		want     string
	}{{most, 0, "-"}, {most + 1, 0, "f"}, {most + 1, most, "f"}, {most + 1, most + 1, "-"}} {
		if got := refused(w.checkText("f", strings.Repeat("x", c.n), c.least)); got != c.want {
			t.Errorf("%d bytes, at least %d: %s", c.n, c.least, got)
		}
	}
}

// TestRequestOf: what the engine is asked for.
func TestRequestOf(t *testing.T) {
	w := renderer(t)
	j := newTestJob(func(j *job) {
		j.items = append(j.items, item{tokens: []int32{4, 5}})
		j.MinTokens, j.StopTokenIDs, j.IgnoreEOS, j.CacheSalt, j.CachePriority, j.urgent = 3, []int32{9}, true, "s", 7, true
		j.promise = engine.Promise{TTFT: time.Second, TPOT: time.Millisecond}
	})
	a, b := w.request(j, 0, "id", 11), w.request(j, 1, "id", 11)
	if a.Seed != 11 || b.Seed == 11 || b.Owner != "id/1" || len(b.Prompt) != 2 || b.MaxTokens != 0 || b.N != 1 || b.Logprobs != -1 || b.PromptLogprobs != -1 ||
		b.MinTokens != 3 || len(b.StopTokens) != 1 || !b.IgnoreEOS || b.Salt != "s" || b.Priority != 7 || !b.Urgent || b.Promise != j.promise {
		t.Errorf("%+v\n%+v", a, b)
	}
	if o := (&origin{}).claim(a, nil, 0, 2).Order; o.TTFT != time.Second || !o.Urgent {
		t.Errorf("prefill is asked %+v", o)
	}
	j.Seed = p(int64(11))
	if w.request(j, 1, "id", 11).Seed != 11 {
		t.Error("a list's prompts have the client's seed")
	}
	for _, c := range []struct{ set, want int }{{0, 1}, {1, 1}, {2, 2}} { // one is drawn for an echo alone
		if j.MaxTokens = &c.set; w.request(j, 0, "id", 1).MaxTokens != c.want {
			t.Errorf("max_tokens %d: %d", c.set, w.request(j, 0, "id", 1).MaxTokens)
		}
	}
	for i, c := range []struct {
		echo           bool
		logprobs, want int
		prompt         *int
	}{{false, 2, -1, nil}, {true, 2, 2, nil}, {true, -1, -1, nil}, {true, 0, 0, nil}, {true, 2, 3, p(3)}, {true, 3, 3, p(2)}, {false, 3, 2, p(2)}, {false, -1, 0, p(0)}} {
		j.echo, j.logprobs, j.PromptLogprobs = c.echo, c.logprobs, c.prompt
		if r := w.request(j, 0, "id", 1); r.PromptLogprobs != c.want || r.Logprobs != c.logprobs {
			t.Errorf("%d: %d and %d, want %d", i, r.Logprobs, r.PromptLogprobs, c.want)
		}
	}
	gen := &w.model.Generation
	before := *gen
	t.Cleanup(func() { *gen = before })
	*gen = model.GenerationConfig{Temperature: p(float32(0.5)), TopP: p(float32(0.6)), TopK: p(7), MinP: p(float32(0.1)), RepetitionPenalty: p(float32(1.1))}
	own := openai.Sampling{Temperature: 1, TopP: 1, TopK: 1, MinP: 1, Repetition: 1, Presence: 2, Frequency: 3, LogitBias: []openai.Bias{{ID: 4, Value: 5}}}
	if s := w.sampling(&own, 1); s.Temperature != 0.5 || s.TopP != 0.6 || s.TopK != 7 || s.MinP != 0.1 || s.Repetition != 1.1 ||
		s.Presence != 2 || s.Frequency != 3 || len(s.Bias) != 1 || s.Bias[0].ID != 4 || s.Bias[0].Value != 5 {
		t.Errorf("what the model says: %+v", s)
	}
	own.Given = openai.GivenTemperature | openai.GivenTopP | openai.GivenTopK | openai.GivenMinP | openai.GivenRepetition
	if s := w.sampling(&own, 1); s.Temperature != 1 || s.TopP != 1 || s.TopK != 1 || s.MinP != 1 || s.Repetition != 1 {
		t.Errorf("what the client says: %+v", s)
	}
}

// TestAnswerBounds: the largest answer that is accepted is as large as the limit; a chat that says
// nothing gets what fits, if that is much.
func TestAnswerBounds(t *testing.T) {
	w := withEngine(t, 512)
	around := openai.MaxHead + 6*len(w.served)
	one := newTestJob(func(j *job) { j.MaxTokens = p(100) })
	shape := w.answerShape(one, &one.items[0])
	size := shape.Size(&w.sizes)
	for _, stops := range [][]string{{"."}, {"ab", "abc", "a"}} { // the longest counts
		j := newTestJob(func(j *job) { j.Stop = stops })
		if got := w.answerShape(j, &j.items[0]).Stop; len(got) != len(slices.MaxFunc(stops, func(a, b string) int { return len(a) - len(b) })) {
			t.Errorf("of stops %q it counts on %q", stops, got)
		}
	}
	for i, c := range []struct {
		change func(*job)
		limit  int
		want   string
	}{
		{func(*job) {}, around + size, "-"},
		{func(*job) {}, around + size - 1, "max_tokens"},
		{func(j *job) { j.N = 2 }, around + 2*size, "-"},
		{func(j *job) { j.N = 2 }, around + 2*size - 1, "n"},
		{func(j *job) { j.items = append(j.items, j.items[0]) }, around + 2*size, "-"},
		{func(j *job) { j.items = append(j.items, j.items[0]) }, around + 2*size - 1, "prompt"},
		{func(j *job) { j.Stream = true }, 1, "-"}, // its events have a bound of their own
		{func(j *job) { j.Stream, j.Stop = true, []string{"x", strings.Repeat("x", openai.MaxEvent)} }, 1, "max_tokens"},
	} {
		j := newTestJob(func(j *job) { j.MaxTokens = p(100); c.change(j) })
		if got := refused(w.checkAnswer(j, c.limit)); got != c.want {
			t.Errorf("%d: %s, want %s", i, got, c.want)
		}
	}
	shape.Tokens = leastAnswer
	least := around + shape.Size(&w.sizes)
	for i, c := range []struct {
		n, limit, min, want int
	}{
		{1, least, 0, leastAnswer}, {1, least - 1, 0, -1}, {2, 2*(least-around) + around, 0, leastAnswer}, {2, 2*(least-around) + around - 2, 0, -1},
		{1, least, leastAnswer, leastAnswer}, {1, least, leastAnswer + 1, -1}, {1, 1 << 30, 0, 0},
	} {
		j := newTestJob(func(j *job) { j.N, j.MinTokens, j.chat = c.n, c.min, true })
		err := w.checkAnswer(j, c.limit)
		switch {
		case c.want < 0 && err == nil, c.want >= 0 && err != nil, c.want == 0 && j.MaxTokens != nil, c.want > 0 && (j.MaxTokens == nil || *j.MaxTokens != c.want):
			t.Errorf("chat %d: %v, %v", i, j.MaxTokens, err)
		}
	}
	for header, want := range map[string]int{"": 1 << 20, "x": 1 << 20, "-1": 1 << 20, "0": 1 << 20, "1": 1, "1048575": 1<<20 - 1, "1048577": 1 << 20} {
		if got := w.answerLimit([]byte(header)); got != want {
			t.Errorf("limit %q: %d", header, got)
		}
	}
}

// TestAnswerNeeds: what is set aside grows with all that an answer has, and for a stream only with
// what it holds back.
func TestAnswerNeeds(t *testing.T) {
	w := withEngine(t, 512)
	needs := func(unsure bool, change func(*job)) need {
		return w.answerNeeds(newTestJob(func(j *job) { j.MaxTokens = p(100); change(j) }), unsure)
	}
	base := needs(false, func(*job) {})
	if want := (need{fixed: answerBytes + choiceBytes + 16, tokens: 100 * textBytes}); base != want {
		t.Errorf("%+v, want %+v", base, want)
	}
	for i, c := range []struct {
		change func(*job)
		want   need
	}{
		{func(j *job) { j.ReturnTokenIDs = true }, need{0, 100 * idBytes, idBytes}},
		{func(j *job) { j.logprobs = 0 }, need{0, 100 * positionBytes, positionBytes}},
		{func(j *job) { j.logprobs = 3 }, need{0, 100 * (positionBytes + 3*entryBytes), positionBytes + 3*entryBytes}},
		{func(j *job) { j.N = 3 }, need{2 * choiceBytes, 200 * textBytes, 0}},
		{func(j *job) { j.items = append(j.items, j.items[0]) }, need{choiceBytes + 16, 100 * textBytes, 0}},
		{func(j *job) { j.items[0].tokens = make([]int32, 11) }, need{160, 0, 0}},
		{func(j *job) { j.echo, j.items[0].text = true, "abc" }, need{2 * 3 * textTimes, 0, 0}},
		{func(j *job) { j.echo, j.logprobs = true, 2 }, need{promptBytes + 2*listedBytes, 100 * (positionBytes + 2*entryBytes), positionBytes + 2*entryBytes}},
		{func(j *job) { j.PromptLogprobs = p(0) }, need{promptBytes, 0, 0}},
		{func(j *job) { j.PromptLogprobs = p(4) }, need{promptBytes + 4*listedBytes, 0, 0}},
	} {
		got := needs(false, c.change)
		if got.fixed -= base.fixed; got.fixed != c.want.fixed || got.tokens-base.tokens != c.want.tokens || got.each != c.want.each {
			t.Errorf("%d: %+v more, want %+v", i, need{got.fixed, got.tokens - base.tokens, got.each}, c.want)
		}
	}
	for _, c := range []struct {
		unsure bool
		max    int
		want   int64
	}{{false, 5000, 5000}, {true, 5000, fewTokens}, {true, 50, 50}} {
		if got := needs(c.unsure, func(j *job) { j.MaxTokens = &c.max }); got.tokens != c.want*textBytes {
			t.Errorf("%+v: %+v", c, got)
		}
	}
	streams := needs(false, func(j *job) { j.Stream = true })
	s := openai.Shape{Tokens: 100, Logprobs: -1, Prompt: 1, PromptLogprobs: -1}
	if want := base.fixed + 3*int64(s.EventSize(&w.sizes, unsaid)); streams.tokens != unsaid*textBytes || streams.fixed != want {
		t.Errorf("a stream: %+v, want %d", streams, want)
	}
}

// TestGrow: a share grows by what is free, at once or not at all.
func TestGrow(t *testing.T) {
	m := newAnswerMemory(100, 4, time.Second)
	s, err := m.reserve(t.Context(), 40)
	if err != nil {
		t.Fatal(err)
	}
	if !s.grow(60) || s.grow(1) {
		t.Error("60 bytes are free, no more")
	}
	if s.release(); !(*answerShare)(nil).grow(1 << 40) {
		t.Error("who needs no share may grow")
	}
	if used, _ := m.state(); used != 0 {
		t.Errorf("%d bytes are left", used)
	}
}

// TestReserveText: text is paid from what the tokens were thought to take, then from the free.
func TestReserveText(t *testing.T) {
	m := newAnswerMemory(200<<10, 4, time.Second)
	s, err := m.reserve(t.Context(), 100<<10)
	if err != nil {
		t.Fatal(err)
	}
	g := &generation{mem: s, needs: need{tokens: 15*textTimes + 10, each: 5}}
	f := func(text int, ok bool, want int64) {
		t.Helper()
		if got := g.reserveText(text); got != ok {
			t.Errorf("%d bytes: %t", text, got)
		}
		if used, _ := m.state(); used != want {
			t.Errorf("%d bytes are used, want %d", used, want)
		}
	}
	f(10, true, 100<<10)
	f(5, true, 100<<10) // to the last byte
	f(0, true, 164<<10+5)
	f(64<<10/textTimes-2, true, 164<<10+5) // the step pays for some time
	f(1<<10, false, 164<<10+5)
}

// TestSmallParts: parts with bounds.
func TestSmallParts(t *testing.T) {
	for files, want := range map[int]int{0: 8, 15: 8, 18: 9, 2 * maxConns: maxConns, 2*maxConns - 2: maxConns - 1, 1 << 30: maxConns} {
		if got := mostConns(files); got != want {
			t.Errorf("%d files: %d connections", files, got)
		}
	}
	for o, want := range map[ticket.Outcome]int{ticket.NoSpace: 503, ticket.Shed: 503, ticket.Late: 504, ticket.Cancelled: 499, ticket.Dead: 502, ticket.Refused: 502} {
		if got := legStatus(o); got != want {
			t.Errorf("%s: %d", o, got)
		}
	}
	const day = 24 * time.Hour
	for n, want := range map[int64]time.Duration{1: time.Millisecond, day.Milliseconds(): day, day.Milliseconds() + 1: day, 1 << 62: day} {
		if got := milliseconds(n); got != want {
			t.Errorf("%d ms: %v", n, got)
		}
	}
	for id, own := range map[string]bool{"": false, "a": true, "!~": true, "a b": false, "\x7f": false, "ä": false, strings.Repeat("x", 256): true, strings.Repeat("x", 257): false} {
		var h fasthttp.RequestHeader
		h.Set(ticket.HeaderRequestID, id)
		if got := requestID(&h); (got == id) != own || got == "" {
			t.Errorf("%q: %q", id, got)
		}
	}
	if got := (timing{1500 * time.Microsecond, 2 * time.Second, time.Microsecond}).header(); got != "wait;dur=1.500, prefill;dur=2000.000, kv;dur=0.001" {
		t.Error(got)
	}
	large := fmt.Errorf("x: %w", &cpu.PoolError{})
	other := errors.New("x")
	if err := poolError(&Config{}, other); err != other {
		t.Error(err)
	}
	if a, b := poolError(&Config{}, large).Error(), poolError(&Config{Blocks: 1}, large).Error(); !strings.HasPrefix(a, "kv_memory") || !strings.HasPrefix(b, "blocks") {
		t.Errorf("%s; %s", a, b)
	}
}

// TestAdvertised: others dial what is set, or what is listened at, or an address of this machine.
func TestAdvertised(t *testing.T) {
	at := func(host string) net.Addr { return &net.TCPAddr{IP: net.ParseIP(host), Port: 7} }
	w := &Worker{}
	if got, err := w.advertised(at("192.0.2.1")); got != "192.0.2.1:7" || err != nil {
		t.Error(got, err)
	}
	if got, err := w.advertised(at("127.0.0.1")); got != "127.0.0.1:7" || err != nil {
		t.Error(got, err)
	}
	if got, err := w.advertised(at("0.0.0.0")); err == nil && (strings.HasPrefix(got, "0.0.0.0") || !strings.HasSuffix(got, ":7")) {
		t.Error(got)
	} else if err != nil && !strings.HasPrefix(err.Error(), "advertise") {
		t.Error(err)
	}
	w.cfg.Advertise = "here.example"
	if got, err := w.advertised(at("0.0.0.0")); got != "here.example:7" || err != nil {
		t.Error(got, err)
	}
	if _, err := w.advertised(&net.UnixAddr{Name: "/x"}); err == nil {
		t.Error("a socket without a port")
	}
}

// TestWhoIsNamed: whom a request may name, as the pair's prefill or as another who has its prompt.
func TestWhoIsNamed(t *testing.T) {
	w := &Worker{log: slog.New(slog.DiscardHandler), identity: kvconn.Identity{PeerID: kvconn.PeerID{ID: "me", Epoch: 1}}}
	w.cfg.AllowHosts = []string{"friend"}
	w.shutOut.Store(&[]string{"out"})
	for addr, ok := range map[string]bool{"127.0.0.1:1": true, "[::1]:1": true, "localhost:1": true, "friend:1": true, "foe:1": false, "192.0.2.1:1": false, "127.0.0.1": false, "": false} {
		if err := w.allowPeer(addr); (err == nil) != ok {
			t.Errorf("%q: %v", addr, err)
		}
	}
	for i, c := range []struct {
		peer ticket.Peer
		ok   bool
	}{
		{ticket.Peer{ID: "a", KV: "friend:1"}, true}, {ticket.Peer{ID: "me", KV: "friend:1"}, false}, {ticket.Peer{ID: "out", KV: "friend:1"}, false},
		{ticket.Peer{ID: "a", KV: "foe:1"}, false}, {ticket.Peer{ID: "a", KV: "friend:1", URL: "http://friend:2"}, true},
		{ticket.Peer{ID: "a", KV: "friend:1", URL: "https://friend:2"}, false}, {ticket.Peer{ID: "a", KV: "friend:1", URL: "http://foe:2"}, false},
		{ticket.Peer{ID: "a", KV: "friend:1", URL: "http://friend"}, false}, {ticket.Peer{ID: "a", KV: "friend:1", URL: ":"}, false},
	} {
		if got, ok := w.resolvePeer(&c.peer); ok != c.ok || ok && got != tier.Peer(c.peer) {
			t.Errorf("%d: %+v, %t", i, got, ok)
		}
	}

	link := ticket.NewLink().String()
	good := map[string]string{ticket.HeaderLink: link, ticket.HeaderPrefill: "a", ticket.HeaderPrefillEpoch: "5", ticket.HeaderPrefillKV: "friend:1", ticket.HeaderDeadline: "1000"}
	for i, c := range []struct{ key, value, want string }{
		{"", "", "-"}, {ticket.HeaderLink, "x", ticket.HeaderLink}, {ticket.HeaderPrefillEpoch, "", ticket.HeaderPrefillEpoch}, {ticket.HeaderPrefillEpoch, "-1", ticket.HeaderPrefillEpoch},
		{ticket.HeaderDeadline, "", "-"}, {ticket.HeaderDeadline, "1", "-"}, {ticket.HeaderDeadline, "0", ticket.HeaderDeadline}, {ticket.HeaderDeadline, "-1", ticket.HeaderDeadline}, {ticket.HeaderDeadline, "x", ticket.HeaderDeadline},
		{ticket.HeaderPrefill, "out", "incompatible"}, {ticket.HeaderPrefillKV, "foe:1", "incompatible"},
	} {
		var h fasthttp.RequestHeader
		for k, v := range good {
			h.Set(k, v)
		}
		if c.key != "" {
			h.Set(c.key, c.value)
		}
		from, err := w.originOf(t.Context(), &h, nil, nil)
		got := refused(err)
		if f := (*failure)(nil); errors.As(err, &f) {
			got = string(f.outcome)
		}
		if got != c.want || (from == nil) != (err != nil) {
			t.Errorf("%d: %s, want %s", i, got, c.want)
		}
		if i != 0 || from == nil {
			continue
		}
		if left := time.Until(from.deadline); from.addr != "friend:1" || from.peer != (kvconn.PeerID{ID: "a", Epoch: 5}) || from.link.String() != link || left > time.Second || left < 0 {
			t.Errorf("%+v", from)
		}
	}
	var none fasthttp.RequestHeader
	for _, params := range []*transferParams{nil, {}} {
		if from, err := w.originOf(t.Context(), &none, params, nil); from != nil || err != nil {
			t.Errorf("%+v, %v", from, err)
		}
	}

	none.Set(ticket.HeaderPeer, "a 1 http://friend:2 friend:1 64")
	if got := w.peerHint(&none); got != nil {
		t.Errorf("without peers: %v", got)
	}
	if _, _, err := w.givePrefix(t.Context(), prefill.Asked{}); !errors.Is(err, prefill.ErrNotCached) {
		t.Error(err)
	}
	w.peers = new(tier.Peers)
	if got := w.peerHint(&none); len(got) != 1 || got[0] != (ticket.Peer{ID: "a", Epoch: 1, URL: "http://friend:2", KV: "friend:1", Tokens: 64}) {
		t.Errorf("%v", got)
	}
	for _, bad := range []string{"", "a 1 http://friend:2 friend:1"} {
		if none.Set(ticket.HeaderPeer, bad); w.peerHint(&none) != nil {
			t.Errorf("%q is a peer", bad)
		}
	}
}

// TestJoin: a worker whose description no fleet would take does not begin, and leaves no connection
// behind.
func TestJoin(t *testing.T) {
	s, err := fleet.StartServer(fleet.ServerConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	w := withEngine(t, 8)
	w.identity = kvconn.Identity{PeerID: kvconn.PeerID{ID: "me", Epoch: 1}, Layout: w.backend.Layout()}
	w.cfg.Fleet.URL, w.cfg.Role = s.ClientURL(), string(fleet.Decode)
	for _, c := range []struct {
		url string
		ok  bool
	}{{"", false}, {"http://127.0.0.1:1", true}} {
		w.url, w.registry = c.url, prometheus.NewRegistry()
		m, err := join(w, nil, nil)
		if (err == nil) != c.ok || (m != nil) != c.ok {
			t.Errorf("at %q: %+v, %v", c.url, m, err)
		}
		if m != nil {
			if i, ok := m.instance(); !ok || i.ID != "me" || i.URL != c.url || m.rejoin("") != nil {
				t.Errorf("%+v", i)
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			if err := m.close(ctx); err != nil {
				t.Error(err)
			}
			cancel()
		}
	}
}

// TestCloseInOrder: the steps run from the last to the first, whatever fails, in the time that they
// have together; memory is not freed after a failure; who closes again gets the same.
func TestCloseInOrder(t *testing.T) {
	for _, fails := range []bool{false, true} {
		ctx, cancel := context.WithCancelCause(context.Background())
		w := &Worker{log: slog.New(slog.DiscardHandler), client: new(http.Client), ctx: ctx, cancel: cancel, requests: newRequests(), fleet: &membership{}}
		if _, ok := w.requests.enter("x", "1"); !ok { // it never ends
			t.Fatal("none may enter")
		}
		var steps []string
		step := func(name string, err error) (string, func(context.Context) error) {
			return name, func(ctx context.Context) error {
				steps = append(steps, name)
				if end, ok := ctx.Deadline(); !ok || time.Until(end) > closeGrace || ctx.Err() != nil {
					t.Errorf("%s: until %v, %v", name, end, ctx.Err())
				}
				return err
			}
		}
		bad := error(nil)
		want := "d c b a"
		if fails {
			bad, want = errors.New("x"), "d c b"
		}
		w.free(step("a", nil))
		w.later(step("b", bad))
		w.later(step("c", bad))
		w.free(step("d", nil))
		over, end := context.WithCancel(t.Context())
		end()
		for range 2 {
			err := w.Close(over)
			if got := strings.Join(steps, " "); got != want || (err != nil) != fails || fails && err.Error() != "c: x\nb: x" || context.Cause(ctx) != errClosing {
				t.Errorf("%s, %v", got, err)
			}
		}
		if _, ok := w.requests.enter("x", "2"); ok {
			t.Error("a request comes in")
		}
	}
}

// TestListedOfAPrompt: of a prompt's tokens those have log probabilities that were computed here, but
// not the first.
func TestListedOfAPrompt(t *testing.T) {
	w := renderer(t)
	self := func(id int32) kernels.TokenLogprob { return kernels.TokenLogprob{ID: id, Logprob: -float32(id)} }
	for n := range 4 {
		it := item{tokens: bytesOf("abcd"), info: &engine.PromptInfo{Tokens: 4}}
		for i := range n {
			it.info.Logprobs = append(it.info.Logprobs, kernels.PromptLogprob{Self: self(it.tokens[i+1]), Top: []kernels.TokenLogprob{self(1), self(2)}})
		}
		var made []openai.TokenLogprob
		for most := range 4 {
			made = nil
			list := it.logprobs(w.tok, &made, most)
			if len(list) != 4 {
				t.Fatalf("%d of 4 tokens are listed", len(list))
			}
			for i, lp := range list {
				if has := i > 0 && i <= n; lp.ID != it.tokens[i] || lp.None == has || has && lp.Logprob != -float32(lp.ID) || has && len(lp.Top) != min(most, 2) || !has && len(lp.Top) != 0 || int(lp.Offset) != i {
					t.Errorf("%d of 3 are known, at most %d: %d is %+v", n, most, i, lp)
				}
			}
		}
		if again := it.logprobs(w.tok, &made, 0); &again[0] != &made[0] {
			t.Error("the list is made twice")
		}
	}
	it := item{tokens: bytesOf("ab")}
	var made []openai.TokenLogprob
	if list := it.logprobs(w.tok, &made, 1); len(list) != 2 || !list[0].None || !list[1].None {
		t.Errorf("%+v", list)
	}
}

// TestTokensOfAText: texts and tokens are turned into each other for this worker's model alone, and
// no answer is larger than allowed.
func TestTokensOfAText(t *testing.T) {
	w := withEngine(t, 8)
	f := func(serve handler, body, want string) {
		t.Helper()
		var ctx fasthttp.RequestCtx
		ctx.Request.SetBodyString(body)
		v, err := serve(&ctx)
		got := refused(err)
		if b, ok := v.([]byte); ok && err == nil {
			got = string(b)
		}
		if got != want {
			t.Errorf("%.60s: %.200s, want %s", body, got, want)
		}
	}
	f(w.serveTokenize, `{"prompt":"ab","add_special_tokens":false}`, `{"count":2,"max_model_len":128,"tokens":[261,430],"token_strs":null}`)
	f(w.serveTokenize, `{"model":"m","prompt":"ab","add_special_tokens":false,"return_token_strs":true}`, `{"count":2,"max_model_len":128,"tokens":[261,430],"token_strs":["▁a","b"]}`)
	f(w.serveTokenize, `{"model":"x","prompt":"ab"}`, "model")
	f(w.serveTokenize, `{"model":"x","messages":[{"role":"user","content":"a"}]}`, "model")
	f(w.serveTokenize, `{"messages":[{"role":"user","content":"a"}]}`, "messages") // there is no template
	f(w.serveTokenize, `{"prompt":"`+strings.Repeat("a", tokenizeBytes+1)+`"}`, "prompt")
	f(w.serveDetokenize, `{"tokens":[261,430]}`, `{"prompt":"ab"}`)
	f(w.serveDetokenize, `{"model":"m","tokens":[]}`, `{"prompt":""}`)
	f(w.serveDetokenize, `{"model":"x","tokens":[363]}`, "model")
	f(w.serveDetokenize, fmt.Sprintf(`{"tokens":[%d]}`, w.vocab()), "tokens")
	w.cfg.MaxAnswer = config.Size(openai.MaxHead + 2*w.sizes.Text)
	f(w.serveDetokenize, `{"tokens":[363,363]}`, `{"prompt":"veryvery"}`)
	f(w.serveDetokenize, `{"tokens":[363,363,363]}`, "tokens")
}

// TestEventsAreBounded: when readers are slow the oldest events are lost, and it is known; a unit
// is told with its parent unless it is the first; salted prefixes are not told.
func TestEventsAreBounded(t *testing.T) {
	root, salted := kvcache.Root("m", "n", ""), kvcache.Root("m", "n", "salt")
	e := &eventWriter{root: root, poke: make(chan struct{}, 1)}
	hash := kvcache.Hash{7: 1, 15: 9}
	take := func() []kvevents.Event {
		got := e.pending
		e.pending = nil
		return got
	}
	e.KVEvent(kvcache.Event{Kind: kvcache.Stored, Root: salted, Hash: hash, Tokens: []int32{1}})
	e.tierChange(tier.Change{Stored: true, Root: salted, Key: hash, Tokens: []int32{1}})
	if got := take(); len(got) != 0 {
		t.Errorf("salted: %+v", got)
	}
	parent := kvcache.Hash{15: 3}
	for pos, has := range []bool{false, true} {
		e.KVEvent(kvcache.Event{Kind: kvcache.Stored, Root: root, Hash: hash, Pos: pos, Parent: parent, Tokens: []int32{5, 6}})
		e.tierChange(tier.Change{Stored: true, Root: root, Key: hash, Pos: pos, Parent: parent, Tokens: []int32{5, 6}, Memory: true})
		for i, got := range take() {
			if got.Kind != kvevents.Stored || got.Hashes[0] != 9 || got.HasParent != has || has && got.Parent != 3 || got.BlockSize != 2 || got.Tokens[1] != 6 || (got.Tier == kvevents.Host) != (i == 1) {
				t.Errorf("at %d: %+v", pos, got)
			}
		}
	}
	e.tierChange(tier.Change{Stored: true, Root: root, Key: hash}) // its tokens are known
	e.tierChange(tier.Change{Root: salted, Key: hash, Memory: true})
	e.KVEvent(kvcache.Event{Kind: kvcache.Removed, Hash: hash})
	e.KVEvent(kvcache.Event{Kind: kvcache.Cleared})
	got := take()
	if len(got) != 4 || got[0].Kind != kvevents.Stored || got[0].Tier != kvevents.Disk || got[0].BlockSize != 0 || got[1].Kind != kvevents.Removed || got[1].Tier != kvevents.Host ||
		got[2].Kind != kvevents.Removed || got[3].Kind != kvevents.Cleared || len(got[3].Hashes) != 0 {
		t.Errorf("%+v", got)
	}
	for range maxPendingEvents {
		e.publish(kvevents.Event{})
	}
	if e.lost || len(e.pending) != maxPendingEvents {
		t.Errorf("lost %t, %d wait", e.lost, len(e.pending))
	}
	if e.publish(kvevents.Event{Kind: kvevents.Cleared}); !e.lost || len(e.pending) != 1 || e.pending[0].Kind != kvevents.Cleared {
		t.Errorf("lost %t, %d wait", e.lost, len(e.pending))
	}
}
