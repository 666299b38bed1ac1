package sense

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/kvevents"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/router/index"
	"github.com/xpyd/xpyd/router/pick"
)

// TestTokenIDs: a list of ids, or the first of several; nothing else is one.
func TestTokenIDs(t *testing.T) {
	for raw, want := range map[string][]uint32{
		`[1]`: {1}, `[1,2,3]`: {1, 2, 3}, "[ 1 ,\n2\t, 3\r]": {1, 2, 3}, `[[1,2],[3]]`: {1, 2}, ` [ [ 7 ] ]`: {7}, `[0]`: {0}, `[4294967295]`: {4294967295},
		`[4294967296]`: nil, `[99999999999]`: nil, `[-1]`: nil, `[1.5]`: nil, `[1e2]`: nil, `["1"]`: nil, `[1,"2"]`: nil, `[]`: nil, `[[]]`: nil, `[[[1]]]`: nil, `"x"`: nil, `1`: nil, ``: nil, `[`: nil, `[1`: nil, `[1,`: nil, `[1,]`: nil, `null`: nil,
	} {
		if got := tokenIDs([]byte(raw)); !slices.Equal(got, want) || (got == nil) != (want == nil) {
			t.Errorf("%q: %v, want %v", raw, got, want)
		}
	}
}

// TestTokens: a prompt's tokens are as sent, or as a configured tokenizer makes them, unless the
// model's workers have another one.
func TestTokens(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("tokenizer.json", `{"model":{"type":"BPE","vocab":{"a":0,"b":1,"ab":2,"<s>":3,"f":4},"merges":["a b"]},"decoder":{"type":"Fuse"},`+
		`"post_processor":{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<s>"}},{"Sequence":{"id":"A"}}],"special_tokens":{"<s>":{"ids":[3]}}}}`)
	write("chat_template.jinja", `{% for m in messages %}{{ m.content }}{% endfor %}{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% if add_generation_prompt %}b{% endif %}{% if bad %}{{ raise_exception('no') }}{% endif %}`)
	e, err := NewFeeds(FeedsDeps{Events: Events{IndexBytes: 1 << 20, Tokenizers: []Tokenizer{{"m", dir}, {"alien", dir}}}})
	if err != nil {
		t.Fatal(err)
	}
	e.alien["alien"] = true
	f := func(body string, want ...uint32) {
		t.Helper()
		top, serr := openai.Scan([]byte(body))
		if serr != nil {
			t.Fatal(serr)
		}
		if got := e.tokens(t.Context(), &Prompt{Top: &top, Body: []byte(body)}); !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", body, got, want)
		}
	}
	f(`{"model":"x","prompt":[5,6]}`, 5, 6)
	f(`{"model":"m","prompt":[[5,6],[7]]}`, 5, 6)
	f(`{"model":"m","prompt":"ab"}`, 3, 2)
	f(`{"model":"m","prompt":["ab","b"]}`, 3, 2)
	f(`{"model":"m","prompt":"ab","add_special_tokens":false}`, 2)
	f(`{"model":"x","prompt":"ab"}`)
	f(`{"model":"alien","prompt":"ab"}`)
	f(`{"model":"alien","prompt":[5]}`, 5)
	f(`{"model":"m","prompt":"ab","n":1,"top_p":7}`) // the worker will say what is wrong
	const messages = `"messages":[{"role":"user","content":"a"}]`
	const tools = `"tools":[{"type":"function","function":{"name":"f"}}]`
	f(`{"model":"m",`+messages+`}`, 2)
	f(`{"model":"m",`+messages+`,"add_generation_prompt":false}`, 0)
	f(`{"model":"m",`+messages+`,"add_special_tokens":true}`, 3, 2)
	f(`{"model":"m",`+messages+`,`+tools+`}`, 0, 4, 1)
	f(`{"model":"m",`+messages+`,`+tools+`,"tool_choice":"auto"}`, 0, 4, 1)
	f(`{"model":"m",`+messages+`,`+tools+`,"tool_choice":"none"}`, 2)
	f(`{"model":"m",` + messages + `,"chat_template_kwargs":{"bad":true}}`)
	f(`{"model":"m","messages":[{"role":"user"}]}`)
	f(`{"model":"alien",` + messages + `}`)
	if _, err := NewFeeds(FeedsDeps{Events: Events{IndexBytes: 1 << 20, Tokenizers: []Tokenizer{{"m", dir + "/nowhere"}}}}); err == nil || !strings.Contains(err.Error(), "kv_events.tokenizers: m") {
		t.Errorf("a tokenizer that is not there: %v", err)
	}
}

// TestEventSettings: each setting of the workers' events, within its bounds and outside, and which
// policies look at them.
func TestEventSettings(t *testing.T) {
	f := func(key string, change func(*Events)) {
		t.Helper()
		e := DefaultEvents()
		change(&e)
		err := e.Validate()
		var k *config.KeyError
		if (err == nil) != (key == "") || err != nil && (!errors.As(err, &k) || k.Key != key) {
			t.Errorf("%v, want %q refused", err, key)
		}
	}
	f("", func(*Events) {})
	f("", func(e *Events) {
		e.IndexBytes, e.HostWeight, e.DiskWeight, e.PeerWeight, e.PeerTokens = 1<<20, 0, 1, 1, 0
	})
	f("index_bytes", func(e *Events) { e.IndexBytes = 1<<20 - 1 })
	f("host_weight", func(e *Events) { e.HostWeight = 1.1 })
	f("disk_weight", func(e *Events) { e.DiskWeight = -0.1 })
	f("peer_weight", func(e *Events) { e.PeerWeight = math.NaN() })
	f("peer_tokens", func(e *Events) { e.PeerTokens = -1 })
	f("", func(e *Events) { e.Tokenizers = []Tokenizer{{"a", "x"}, {"b", "x"}} })
	f("tokenizers", func(e *Events) { e.Tokenizers = []Tokenizer{{"a", "x"}, {"a", "y"}} })
	f("tokenizers", func(e *Events) { e.Tokenizers = []Tokenizer{{"", "x"}} })
	f("tokenizers", func(e *Events) { e.Tokenizers = []Tokenizer{{"a", ""}} })
	for _, p := range pick.Policies {
		if usesEvents(p) != (p == pick.KVEvents || p == pick.PredictedTTFT) {
			t.Errorf("%s looks at events: %t", p, usesEvents(p))
		}
	}
}

// TestFollowed: where a worker's events are, for which legs they count, and who asks for a secret.
func TestFollowed(t *testing.T) {
	for _, c := range []struct {
		addr string
		n    int
		want string
		ok   bool
	}{
		{"", 3, "", true}, {"h:1", 0, "h:1", true}, {"h:1", 3, "h:4", true}, {"[::1]:9", 1, "[::1]:10", true}, {"h:65535", 0, "h:65535", true}, {"h:65535", 1, "", false}, {"h:65534", 1, "h:65535", true}, {"h", 0, "", false}, {"h:x", 0, "", false},
	} {
		if got, ok := portAfter(c.addr, c.n); got != c.want || ok != c.ok {
			t.Errorf("%q and %d: %q, %t", c.addr, c.n, got, ok)
		}
	}
	for _, c := range []struct {
		i    fleet.Instance
		legs index.Role
		asks bool
	}{
		{fleet.Instance{Role: fleet.Prefill, Dialect: fleet.Native, Secrets: "a"}, index.Prefill, true},
		{fleet.Instance{Role: fleet.Decode, Dialect: fleet.Native, Secrets: "a", KVEventsOpen: true}, index.Decode, false},
		{fleet.Instance{Role: fleet.Decode, Dialect: fleet.Native}, index.Decode, false},
		{fleet.Instance{Role: fleet.Decode, Dialect: "openai", Secrets: "a"}, index.Prefill | index.Decode, false},
	} {
		if got := legOf(&fleet.Member{Instance: c.i}); got != c.legs || asks(&c.i) != c.asks {
			t.Errorf("%+v: legs %v, asks %t", c.i, got, asks(&c.i))
		}
	}
}

// TestFollowAgain: a worker's events are followed anew when what says where they are changes, and only then.
func TestFollowAgain(t *testing.T) {
	e, err := NewFeeds(FeedsDeps{Events: DefaultEvents(), Log: slog.New(slog.DiscardHandler), Ctx: t.Context()})
	if err != nil {
		t.Fatal(err)
	}
	m := fleet.Member{State: fleet.Live, Instance: fleet.Instance{ID: "d0", Epoch: 1, Role: fleet.Decode, Dialect: "vllm", Model: "m", KVEvents: "127.0.0.1:1", DPRanks: 1}}
	var last *follow
	for i, c := range []struct {
		edit  func()
		off   bool
		ranks int // feeds; 0: it is not followed
		again bool
	}{
		{func() {}, false, 1, true}, {func() {}, false, 1, false}, {func() { m.Load.Running = 3; m.Draining = true }, false, 1, false}, {func() { m.Role = fleet.Prefill }, false, 1, false}, {func() { m.State = fleet.Suspect }, false, 1, false},
		{func() { m.KVEvents = "127.0.0.1:2" }, false, 1, true}, {func() { m.KVReplay = "127.0.0.1:3" }, false, 1, true}, {func() { m.KVTopic = "x" }, false, 1, true}, {func() { m.DPRanks = 3 }, false, 3, true}, {func() { m.DPRanks = 0 }, false, 1, true},
		{func() { m.Model = "n" }, false, 1, true}, {func() { m.Dialect = fleet.Native }, false, 1, false}, {func() { m.Secrets = "a" }, false, 1, true}, {func() { m.Secrets = "b" }, false, 1, false}, {func() { m.KVEventsOpen = true }, false, 1, true},
		{func() { m.DPRanks = 1000 }, false, maxRanks, true}, {func() { m.KVEvents = "127.0.0.1:65534" }, false, 2, true}, {func() { m.Epoch = 2 }, false, 2, true},
		{func() { m.State = fleet.Dead }, false, 0, true}, {func() { m.State = fleet.Live }, false, 2, true}, {func() { m.State = fleet.Gone }, false, 0, true}, {func() { m.State = fleet.Live }, true, 0, false}, {func() { m.DPRanks = 1 }, false, 1, true}, {func() { m.KVEvents = "" }, false, 0, true},
	} {
		c.edit()
		e.sync(fleet.NewSnapshot(1, time.Now(), []fleet.Member{m}), !c.off)
		f := e.feeds[probeKey{id: "d0", epoch: m.Epoch}]
		ranks := 0
		if f != nil {
			ranks = len(f.feeds)
		}
		if feeds, connected := e.totals(); ranks != c.ranks || (f != last) != c.again || feeds != c.ranks || connected != 0 || (e.Info(&m) != nil) != (c.ranks > 0) {
			t.Errorf("step %d: %d ranks, again %t; %d feeds, %d connected", i, ranks, f != last, feeds, connected)
		}
		last = f
	}
	e.sync(fleet.NewSnapshot(0, time.Time{}, nil), false)
	if len(e.feeds) != 0 || e.index.Stats().Blocks != 0 {
		t.Errorf("%d are followed at the end", len(e.feeds))
	}
}

// TestStatics: what a list of engines that do not announce themselves may have.
func TestStatics(t *testing.T) {
	good := func(id string) Static {
		return Static{ID: id, Role: fleet.Decode, URL: "http://127.0.0.1:1", Dialect: "vllm-nixl", Model: "m"}
	}
	f := func(want string, list ...Static) {
		t.Helper()
		err := validStatics(list)
		var k *config.KeyError
		if (err == nil) != (want == "") || err != nil && (!errors.As(err, &k) || k.Key != "static" || !strings.Contains(err.Error(), want)) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	one := func(change func(*Static)) Static { s := good("a"); change(&s); return s }
	f("")
	f("", good("a"), good("b"))
	f("entry 2: id", good("a"), good("a"))
	f("entry 1: dialect", one(func(s *Static) { s.Dialect = "native" }))
	f("entry 2: dialect", good("b"), one(func(s *Static) { s.Dialect = "nosuch" }))
	f("url", one(func(s *Static) { s.URL = "ftp://h" }))
	f("role", one(func(s *Static) { s.Role = "" }))
	f("", one(func(s *Static) { s.Role, s.Dialect = "", "openai" }))
	f("role", one(func(s *Static) { s.Role, s.Dialect = fleet.Prefill, "openai" }))
	f("id", one(func(s *Static) { s.ID = "a/b" }))
	f("model", one(func(s *Static) { s.Model = "" }))
}

// TestChecked: what an instance needs, and which setting its error names.
func TestChecked(t *testing.T) {
	good := fleet.Instance{ID: "a", Role: fleet.Decode, Model: "m", Dialect: "openai", URL: "http://h:1"}
	for key, edits := range map[string][]func(*fleet.Instance){
		"":        {func(*fleet.Instance) {}, func(i *fleet.Instance) { i.Role = fleet.Prefill }},
		"id":      {func(i *fleet.Instance) { i.ID = "" }, func(i *fleet.Instance) { i.ID = "a?" }, func(i *fleet.Instance) { i.ID = "a b" }},
		"role":    {func(i *fleet.Instance) { i.Role = "" }, func(i *fleet.Instance) { i.Role = "both" }},
		"model":   {func(i *fleet.Instance) { i.Model = "" }},
		"dialect": {func(i *fleet.Instance) { i.Dialect = "" }, func(i *fleet.Instance) { i.Dialect = "klingon" }},
		"url":     {func(i *fleet.Instance) { i.URL = "" }, func(i *fleet.Instance) { i.URL = "h:1" }},
	} {
		for _, edit := range edits {
			i := good
			edit(&i)
			err := CheckInstance(&i)
			var k *config.KeyError
			if (err == nil) != (key == "") || err != nil && (!errors.As(err, &k) || k.Key != key || strings.Contains(err.Error(), "%!")) {
				t.Errorf("%+v: %v, want %q refused", i, err, key)
			}
		}
	}
}

// TestAlien: a model whose workers have another tokenizer than the configured one, or one that they
// do not name.
func TestAlien(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "tokenizer.json"), []byte(`{"model":{"type":"BPE","vocab":{"a":0},"merges":[]},"decoder":{"type":"Fuse"}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	e, err := NewFeeds(FeedsDeps{Events: Events{IndexBytes: 1 << 20, Tokenizers: []Tokenizer{{"m", dir}}}})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		model, fingerprint string
		alien              bool
	}{{"m", e.toks["m"].Fingerprint(), false}, {"m", "", false}, {"m", "other", true}, {"x", "other", false}} {
		e.sync(fleet.NewSnapshot(1, time.Time{}, []fleet.Member{{Instance: fleet.Instance{ID: "d", Model: c.model, TokenizerFingerprint: c.fingerprint}}}), false)
		if e.alien[c.model] != c.alien {
			t.Errorf("%+v: alien %t", c, !c.alien)
		}
	}
}

// TestWarm: what of a prompt the workers have, in tokens and in worth, for whom it is of interest.
func TestWarm(t *testing.T) {
	const block = 16
	text := strings.Trim(strings.Join(strings.Fields(fmt.Sprint(make([]int, 2*block))), ","), "[]")
	cache := "" // of the request's key
	f := func(policy string, peers int, body string, warm []pick.Warm, reaches []Reach) {
		t.Helper()
		e, err := NewFeeds(FeedsDeps{Events: Events{IndexBytes: 1 << 20, HostWeight: 0.5, DiskWeight: 0.25, PeerTokens: peers, PeerWeight: 0.75}, Picker: pick.New(pick.Config{Policy: policy}, nil)})
		if err != nil {
			t.Fatal(err)
		}
		stored := func(id string, rank int, tier kvevents.Tier, blocks int, salt uint64) {
			ev := kvevents.Event{BlockSize: block, Tier: tier, Extra: []uint64{salt, 0}[:blocks]}
			for i := range blocks {
				ev.Hashes = append(ev.Hashes, uint64(i+1))
				ev.Tokens = append(ev.Tokens, make([]uint32, block)...)
			}
			e.index.Add(index.Key{ID: id, Epoch: 7, Rank: rank}, "m", index.Decode).Apply(&kvevents.Batch{Events: []kvevents.Event{ev}})
		}
		e.feeds[probeKey{id: "a", epoch: 7}] = &follow{inst: fleet.Instance{Dialect: fleet.Native}}
		stored("a", 0, kvevents.GPU, 1, 0)
		stored("b", 0, kvevents.Host, 1, 0)
		stored("b", 1, kvevents.Host, 2, 0)
		stored("c", 0, kvevents.GPU, 2, kvevents.SaltExtra("s"))
		top, serr := openai.Scan([]byte(body))
		if serr != nil {
			t.Fatal(serr)
		}
		req := &pick.Request{Tokens: 99}
		got := e.Warm(t.Context(), &Prompt{Top: &top, Body: []byte(body), Cache: cache}, req, nil)
		slices.SortFunc(req.Warm, func(a, b pick.Warm) int { return strings.Compare(a.ID, b.ID) })
		slices.SortFunc(got, func(a, b Reach) int { return cmp.Or(strings.Compare(a.ID, b.ID), a.Tokens-b.Tokens) })
		fetch, tokens := pick.Fetch{}, 99
		if warm != nil {
			tokens = 2 * block
		}
		if warm != nil && peers > 0 {
			fetch = pick.Fetch{Dialect: fleet.Native, Weight: 0.75, Least: peers}
		}
		if !slices.Equal(req.Warm, warm) || !slices.Equal(got, reaches) || req.Fetch != fetch || req.Tokens != tokens || req.Tokenized != (warm != nil) {
			t.Errorf("%s, peers from %d, %s: %+v, reaches %+v", policy, peers, body, req, got)
		}
	}
	ids := `{"model":"m","prompt":[` + text + `]}`
	salted := strings.Replace(ids, "}", `,"cache_salt":"s"}`, 1)
	warm := []pick.Warm{{ID: "a", Epoch: 7, Tokens: block}, {ID: "b", Epoch: 7, Tokens: block, Rank: 1}}
	reaches := []Reach{{"a", 7, block, block}, {"b", 7, block, block / 2}, {"b", 7, 2 * block, block}}
	f(pick.KVEvents, 2, ids, warm, reaches)
	f(pick.PredictedTTFT, 1, ids, warm, reaches)
	f(pick.KVEvents, 0, ids, warm, nil)
	cache = "k" // which our own workers' events say nothing of
	f(pick.KVEvents, 2, ids, warm[1:], reaches[1:])
	cache = ""
	f(pick.KVEvents, 2, salted, []pick.Warm{{ID: "c", Epoch: 7, Tokens: 2 * block}}, []Reach{{"c", 7, 2 * block, 2 * block}})
	f(pick.LeastLoaded, 2, ids, nil, nil)
	f(pick.KVEvents, 2, `{"model":"m","prompt":"text"}`, nil, nil)
}
