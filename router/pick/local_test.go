package pick_test

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router/pick"
)

// byCost is a picker that weighs whether to split.
func byCost(policy string, most int) *pick.Picker {
	cfg := pick.DefaultConfig()
	cfg.Policy, cfg.Disaggregate, cfg.LocalMaxTokens = policy, pick.ByCost, most
	return pick.New(cfg, rand.New(rand.NewPCG(1, 2)))
}

func native(dialect string) bool { return dialect == "native" }

// teach has pairs take split, and decode alone take local, for requests of so many tokens.
func teach(t *testing.T, p *pick.Picker, s *fleet.Snapshot, tokens, times int, split, local time.Duration) {
	t.Helper()
	for seen := 0; seen < times; {
		c := mustPick(t, p, s, pick.Request{Tokens: tokens, Local: native})
		if c.Local != "" {
			seen++
			c.Answered(0, local)
		} else {
			c.Answered(split*9/10, split)
		}
		end(c)
	}
}

// TestLocalByCost: a request goes to decode alone once that is known to be faster, and only if it
// may; what is not known is tried now and then.
func TestLocalByCost(t *testing.T) {
	s := fleetOf(2, 2)
	for _, policy := range []string{pick.Prefix, pick.LeastLoaded, pick.PredictedTTFT, pick.RoundRobin} {
		p := byCost(policy, 100)
		var tried []int // which requests were
		for i := 1; i <= 48; i++ {
			c := mustPick(t, p, s, pick.Request{Tokens: 100, Local: native, Explain: true})
			split := c.Explain.Split
			switch {
			case split == nil || split.PairMS <= 0 || split.LocalMS <= 0 || split.Why != c.Local:
				t.Fatalf("%s: explained as %+v", policy, split)
			case c.Local == pick.LocalExplore:
				tried = append(tried, i)
				if c.Prefill.ID != c.Decode.ID || c.Explain.Reason != "decode alone, to learn how long that takes" {
					t.Errorf("%s: %s and %s, %s", policy, c.Prefill.ID, c.Decode.ID, c.Explain.Reason)
				}
			case c.Local != "" || c.Prefill.ID[0] != 'p':
				t.Errorf("%s: %q on %s", policy, c.Local, c.Prefill.ID)
			}
			end(c)
		}
		if !slices.Equal(tried, []int{16, 32, 48}) {
			t.Errorf("%s: tried %v", policy, tried)
		}
		teach(t, p, s, 100, 8, 50*time.Millisecond, 10*time.Millisecond)
		c := mustPick(t, p, s, pick.Request{Tokens: 100, Local: native, Explain: true})
		if split := c.Explain.Split; c.Local != pick.LocalCost || c.Prefill.ID != c.Decode.ID || c.Prefill.Role != fleet.Decode || split.LocalMS >= split.PairMS ||
			c.Explain.Reason != "decode alone is predicted to be faster than the best pair" {
			t.Errorf("%s: %q on %s, %+v", policy, c.Local, c.Prefill.ID, c.Explain)
		}
		if l := p.Loads(c.Decode.ID, 1); l != (pick.Loads{Legs: 2, Tokens: 100, Seqs: 1, KV: 100}) {
			t.Errorf("%s: it counts as %+v", policy, l)
		}
		end(c)
		for name, req := range map[string]pick.Request{
			"too long":        {Tokens: 101, Local: native},
			"nobody may":      {Tokens: 100},
			"not its dialect": {Tokens: 100, Local: func(d string) bool { return d != "native" }},
			"a second try":    {Tokens: 100, Local: native, Avoid: []string{"p0"}},
		} {
			req.Explain = true
			if c := mustPick(t, p, s, req); c.Local != "" || c.Prefill.ID[0] != 'p' || c.Explain.Split != nil {
				t.Errorf("%s, %s: %q on %s, %+v", policy, name, c.Local, c.Prefill.ID, c.Explain.Split)
			} else {
				end(c)
			}
		}
	}
	p := pick.New(pick.DefaultConfig(), rand.New(rand.NewPCG(1, 2))) // always split
	for range 20 {
		if c := mustPick(t, p, s, pick.Request{Tokens: 1, Local: native}); c.Local != "" {
			t.Errorf("%q", c.Local)
		}
	}
	p, s = byCost(pick.Prefix, 100), fleetOf(0, 0, member("e0", fleet.Decode, func(m *fleet.Member) { m.Dialect = "openai" }))
	for range 40 { // nothing to split, nothing to learn
		if c := mustPick(t, p, s, pick.Request{Tokens: 1, Local: func(string) bool { return true }}); c.Local != "" {
			t.Errorf("an engine that does both: %q", c.Local)
		}
	}
	for np, nd := range []int{1, 0} {
		if _, err := byCost(pick.Prefix, 100).Pick(pick.View{Snapshot: fleetOf(np, nd)}, &pick.Request{Model: "m", Tokens: 1, Local: native}); !errors.Is(err, pick.ErrNoPair) {
			t.Errorf("%d prefill and %d decode workers: %v", np, nd, err)
		}
	}
}

// TestLocalLoad: each sequence that runs on decode makes serving alone dearer there, and a prefill
// with a queue makes it cheaper by comparison.
func TestLocalLoad(t *testing.T) {
	at := func(running, queued int) *fleet.Snapshot {
		return fleet.NewSnapshot(uint64(10+running+queued), time.Time{}, []fleet.Member{
			member("p0", fleet.Prefill, func(m *fleet.Member) { m.Load.QueuedTokens = queued }),
			member("d0", fleet.Decode, func(m *fleet.Member) { m.Load.Running = running }),
			member("d1", fleet.Decode, func(m *fleet.Member) { m.Load.Running = running + 1 })})
	}
	for _, c := range []struct {
		running, queued int
		local           time.Duration
		want            string
	}{
		{0, 0, 30 * time.Millisecond, pick.LocalCost},
		{7, 0, 30 * time.Millisecond, pick.LocalCost}, // 30 ms · 1.35
		{30, 0, 30 * time.Millisecond, ""},            // 30 ms · 2.5
		{30, 1000, 30 * time.Millisecond, pick.LocalCost},
		{0, 0, 60 * time.Millisecond, ""},
		{0, 1000, 60 * time.Millisecond, pick.LocalCost},
	} {
		p := byCost(pick.LeastLoaded, 2048)
		teach(t, p, at(0, 0), 100, 8, 50*time.Millisecond, c.local)
		got := mustPick(t, p, at(c.running, c.queued), pick.Request{Tokens: 100, Local: native})
		if got.Local != c.want || got.Decode.ID != "d0" {
			t.Errorf("%+v: %q on %s", c, got.Local, got.Decode.ID)
		}
	}
}

// TestLocalStale: where the pair is the faster one, alone is tried again only after many chances.
func TestLocalStale(t *testing.T) {
	p, s := byCost(pick.LeastLoaded, 2048), fleetOf(1, 1)
	teach(t, p, s, 100, 8, 10*time.Millisecond, 50*time.Millisecond)
	var tried []int
	for i := 1; i <= 1100; i++ {
		c := mustPick(t, p, s, pick.Request{Tokens: 100, Local: native})
		if c.Local != "" {
			tried = append(tried, i)
		}
		c.Answered(9*time.Millisecond, 10*time.Millisecond)
		end(c)
	}
	if !slices.Equal(tried, []int{512, 1024}) {
		t.Errorf("tried again at %v", tried)
	}
}

// TestAnswered: what a leg took is prefill's and the rest decode's; a time of prefill that cannot be
// is not believed.
func TestAnswered(t *testing.T) {
	s := fleetOf(1, 1)
	predicted := func(prefill, first time.Duration) float64 {
		p := byCost(pick.LeastLoaded, 2048)
		for range 20 {
			c := mustPick(t, p, s, pick.Request{Tokens: 100})
			c.Answered(prefill, first)
			end(c)
		}
		c := mustPick(t, p, s, pick.Request{Tokens: 100, Local: native, Explain: true})
		return c.Explain.Split.PairMS
	}
	for _, prefill := range []time.Duration{0, 15, 40, 41, -1} { // of 40
		if got := predicted(prefill*time.Millisecond, 40*time.Millisecond); got < 39.9 || got > 40.1 {
			t.Errorf("prefill took %d of 40 ms, and %v ms are predicted", prefill, got)
		}
	}
}

// TestWhy: who has no pair is told why.
func TestWhy(t *testing.T) {
	far := func(at string) func(*fleet.Member) { return func(m *fleet.Member) { m.Topology = at } }
	off := func(m *fleet.Member) { m.State = fleet.Dead }
	drains := func(m *fleet.Member) { m.Draining = true }
	f := func(want string, members ...fleet.Member) {
		t.Helper()
		cfg := pick.DefaultConfig()
		cfg.TopologyLevel = 1
		p := pick.New(cfg, rand.New(rand.NewPCG(1, 2)))
		_, err := p.Pick(pick.View{Snapshot: fleet.NewSnapshot(1, time.Time{}, members)}, &pick.Request{Model: "m"})
		if !errors.Is(err, pick.ErrNoPair) || !strings.HasSuffix(err.Error(), want) {
			t.Errorf("have %v, want %s", err, want)
		}
	}
	f("there is no prefill worker", member("d", fleet.Decode))
	f("there is no decode worker", member("p", fleet.Prefill))
	f("no prefill worker is live and probed", member("p", fleet.Prefill, off), member("d", fleet.Decode))
	f("no decode worker is live and probed", member("p", fleet.Prefill), member("d", fleet.Decode, off))
	f("no decode worker is live and probed and takes new work: d drains", member("p", fleet.Prefill), member("d", fleet.Decode, drains))
	f("no decode worker is live and probed", member("p", fleet.Prefill), member("d", fleet.Decode, drains, off))
	f("no prefill worker is live and probed and takes new work: e drains", member("p", fleet.Prefill, off), member("d", fleet.Decode),
		member("e", fleet.Decode, drains, func(m *fleet.Member) { m.Dialect = "openai" }))
	f(`p and d are too far apart: topology "a/1" and "b/1"`, member("p", fleet.Prefill, far("a/1")), member("d", fleet.Decode, far("b/1")))
}

// TestModels: each model of the fleet, and whether it can take work.
func TestModels(t *testing.T) {
	model := func(name string) func(*fleet.Member) { return func(m *fleet.Member) { m.Model = name } }
	alone := func(m *fleet.Member) { m.Dialect = "openai" }
	p := newPicker(pick.Prefix)
	got := p.Models(pick.View{Snapshot: fleetOf(1, 1, member("a", fleet.Prefill, model("half")), member("b", fleet.Decode, model("alone"), alone),
		member("c", fleet.Decode, model("gone"), alone, func(m *fleet.Member) { m.State = fleet.Dead }))})
	if want := map[string]bool{"m": true, "half": false, "alone": true, "gone": false}; !maps.Equal(got, want) {
		t.Errorf("have %v, want %v", got, want)
	}
	if p.Policy() != pick.Prefix {
		t.Errorf("policy %s", p.Policy())
	}
	p.SetPolicy(pick.Random)
	c := mustPick(t, p, fleetOf(2, 2), pick.Request{Explain: true})
	if p.Policy() != pick.Random || c.Explain.Policy != pick.Random || c.Explain.Reason != "drawn at random" {
		t.Errorf("policy %s, explained as %+v", p.Policy(), c.Explain)
	}
}

// TestReasons: the explanation names what decided.
func TestReasons(t *testing.T) {
	chain := pick.NewChain([]byte(strings.Repeat("x", 1000)))
	for policy, want := range map[string]string{
		pick.Prefix: "least cost, with a part of the prompt cached", pick.KVEvents: "least cost, with a part of the prompt cached",
		pick.PredictedTTFT: "earliest predicted first token", pick.LeastLoaded: "least cost; of equals the least recently used",
		pick.LeastTokens: "least cost; of equals the least recently used", pick.RoundRobin: "least recently used",
		pick.Random: "drawn at random", pick.PowerOfTwo: "drawn at random", pick.ConsistentHash: "by its hash", pick.Session: "by its hash",
	} {
		p, s := newPicker(policy), fleetOf(12, 12)
		end(mustPick(t, p, s, pick.Request{Chain: chain, Session: "s", Tokens: 250}))
		c := mustPick(t, p, s, pick.Request{Chain: chain, Session: "s", Tokens: 250, Explain: true})
		if c.Explain.Reason != want {
			t.Errorf("%s: %q, want %q", policy, c.Explain.Reason, want)
		}
		for _, list := range [][]pick.Candidate{c.Explain.Prefill, c.Explain.Decode} {
			if len(list) == 0 || len(list) > 8 || !slices.IsSortedFunc(list, func(a, b pick.Candidate) int {
				if a.Cost < b.Cost {
					return -1
				}
				if a.Cost > b.Cost {
					return 1
				}
				return 0
			}) {
				t.Errorf("%s: candidates %+v", policy, list)
			}
		}
		if policy != pick.PowerOfTwo && (c.Explain.Prefill[0].ID != c.Prefill.ID || c.Explain.Decode[0].ID != c.Decode.ID) && policy != pick.Random {
			t.Errorf("%s: chose %s and %s of %+v", policy, c.Prefill.ID, c.Decode.ID, c.Explain)
		}
	}
	if c := mustPick(t, newPicker(pick.LeastLoaded), fleetOf(1, 1), pick.Request{Explain: true}); c.Explain.Reason != "the only pair" {
		t.Errorf("%q", c.Explain.Reason)
	}
}

// TestDecodeCost: what makes a decode worker unwelcome, each beside one that differs in that alone.
func TestDecodeCost(t *testing.T) {
	running := func(n int) func(*fleet.Member) { return func(m *fleet.Member) { m.Load.Running = n } }
	waiting := func(n int) func(*fleet.Member) { return func(m *fleet.Member) { m.Load.Waiting = n } }
	used := func(part float64) func(*fleet.Member) { return func(m *fleet.Member) { m.Load.KVUsed = part } }
	batch := func(n int) func(*fleet.Member) { return func(m *fleet.Member) { m.MaxBatch = n } }
	for _, c := range []struct {
		what         string
		better, than []func(*fleet.Member)
		policies     []string
	}{
		{"fewer run", []func(*fleet.Member){running(3)}, []func(*fleet.Member){running(4)}, []string{pick.Prefix, pick.LeastLoaded, pick.PredictedTTFT}},
		{"fewer wait", []func(*fleet.Member){running(3)}, []func(*fleet.Member){running(3), waiting(1)}, []string{pick.Prefix, pick.LeastLoaded, pick.PredictedTTFT}},
		{"a place in the batch", []func(*fleet.Member){running(8), batch(9)}, []func(*fleet.Member){running(7), batch(7)}, []string{pick.Prefix, pick.LeastLoaded, pick.PredictedTTFT}},
		{"no bound on the batch", []func(*fleet.Member){running(8), batch(0)}, []func(*fleet.Member){running(7), batch(7)}, []string{pick.Prefix, pick.LeastLoaded, pick.PredictedTTFT}},
		{"less over the batch", []func(*fleet.Member){running(9), batch(8)}, []func(*fleet.Member){running(10), batch(8)}, []string{pick.PredictedTTFT}},
		{"a pool with room", []func(*fleet.Member){running(3), used(0.9)}, []func(*fleet.Member){running(0), used(0.91)}, []string{pick.Prefix, pick.LeastLoaded}},
		{"a full pool outweighs no more than some sequences", []func(*fleet.Member){running(0), used(0.91)}, []func(*fleet.Member){running(5), used(0.9)}, []string{pick.Prefix, pick.LeastLoaded}},
		{"fewer tokens", []func(*fleet.Member){running(7), used(0.5)}, []func(*fleet.Member){used(0.6)}, []string{pick.LeastTokens}},
	} {
		for _, policy := range c.policies {
			for _, names := range [][2]string{{"a", "b"}, {"b", "a"}} {
				s := fleetOf(1, 0, member(names[0], fleet.Decode, c.better...), member(names[1], fleet.Decode, c.than...))
				if got := mustPick(t, newPicker(policy), s, pick.Request{Tokens: 10}); got.Decode.ID != names[0] {
					t.Errorf("%s, %s: chose the other", policy, c.what)
				}
			}
		}
	}
}

// TestRestOfShare: notes are dropped when nobody wants them, and counted as lost when nobody fetches
// them.
func TestRestOfShare(t *testing.T) {
	p, s := newPicker(pick.Prefix), fleetOf(2, 2)
	ask := func(i int) {
		end(mustPick(t, p, s, pick.Request{Chain: pick.NewChain([]byte(strings.Repeat(fmt.Sprintf("%05d", i), 2000)))}))
	}
	if ask(0); len(p.Changes(nil, false, 9)) != 0 {
		t.Error("changes are noted for nobody")
	}
	p.Note(true)
	ask(1)
	if n := len(p.Changes(nil, false, 1)); n != 1 {
		t.Errorf("%d changes, want at most 1", n)
	}
	if n := len(p.Changes(nil, false, 9)); n != 1 {
		t.Errorf("%d changes, want the other one", n)
	}
	ask(2)
	p.Note(true) // as before: nothing is dropped
	if hints, lost := p.Hints(); len(hints) != 2 || lost != 0 {
		t.Errorf("%d hints, %d lost", len(hints), lost)
	}
	ask(3)
	p.Note(false)
	p.Note(true)
	if hints, lost := p.Hints(); len(hints) != 0 || lost != 0 || len(p.Changes(nil, false, 9)) != 0 {
		t.Errorf("%d hints, %d lost", len(hints), lost)
	}
	ask(4)
	if n := len(p.Changes(nil, false, 9)); n != 2 {
		t.Errorf("%d changes after notes were dropped", n)
	}
	p.Hints()
	var hints []pick.Hint
	var lost uint64
	for range 2 { // as much again once they are fetched
		before := lost
		for i := range 65 { // of 64 blocks each
			end(mustPick(t, p, s, pick.Request{Chain: pick.NewChain([]byte(strings.Repeat(fmt.Sprintf("%08d", i+int(before)), 2048)))}))
		}
		kept := 0
		hints, lost = p.Hints()
		for _, h := range hints {
			kept += len(h.Hashes)
		}
		if kept != 4096 || lost != before+64 {
			t.Errorf("of %d blocks %d are kept and %d lost", 65*64, kept, lost-before)
		}
	}
	if ask(999); len(p.Changes(nil, false, 9)) == 0 {
		t.Error("no changes")
	}
	if hints, again := p.Hints(); len(hints) != 1 || again != lost {
		t.Errorf("%d hints once they were fetched, %d lost", len(hints), again)
	}
}
