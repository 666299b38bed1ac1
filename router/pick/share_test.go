package pick_test

import (
	"container/heap"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router/pick"
)

// TestOthersLoad: other routers' load on a worker counts like the router's own, until
// they say that it is over.
func TestOthersLoad(t *testing.T) {
	for _, policy := range []string{pick.Prefix, pick.LeastLoaded, pick.LeastTokens, pick.PowerOfTwo, pick.ConsistentHash} {
		p, s := newPicker(policy), fleetOf(2, 2)
		req := pick.Request{Tokens: 1000, Session: "s"}
		home := mustPick(t, p, s, req)
		end(home)
		list := []pick.WorkerLoad{
			{ID: home.Prefill.ID, Epoch: 1, Loads: pick.Loads{Legs: 4, Tokens: 40_000}},
			{ID: home.Decode.ID, Epoch: 1, Loads: pick.Loads{Legs: 4, Seqs: 4, KV: 40_000}},
			{ID: "stranger", Epoch: 1, Loads: pick.Loads{Legs: 9}},
			{ID: home.Decode.ID, Epoch: 7, Loads: pick.Loads{Legs: 9, Seqs: 90}},
		}
		p.SetOthers(list)
		for range 3 {
			c := mustPick(t, p, s, req)
			end(c)
			if c.Prefill.ID == home.Prefill.ID || c.Decode.ID == home.Decode.ID {
				t.Errorf("%s: went to %s, %s, where others are", policy, c.Prefill.ID, c.Decode.ID)
			}
		}
		for i := range list {
			list[i].Loads = pick.Loads{}
		}
		p.SetOthers(list)
		if policy != pick.ConsistentHash {
			continue
		}
		if c := mustPick(t, p, s, req); c.Prefill.ID != home.Prefill.ID || c.Decode.ID != home.Decode.ID {
			t.Errorf("%s: the others left, and it went to %s, %s", policy, c.Prefill.ID, c.Decode.ID)
		}
	}
}

// TestRecent: a picker that is told another's latest prefixes chooses as that
// one does, and forgets in the same order.
func TestRecent(t *testing.T) {
	const prompts = 20
	s := fleetOf(4, 4)
	text := func(i int) []byte { return []byte(strings.Repeat(fmt.Sprintf("%04d", i), 1024)) }
	p := newPicker(pick.Prefix)
	home := map[int]*pick.Choice{}
	for i := range prompts {
		home[i] = mustPick(t, p, s, pick.Request{Tokens: 1024, Chain: pick.NewChain(text(i))})
		end(home[i])
	}
	other := newPicker(pick.Prefix)
	other.Refresh(pick.View{Snapshot: s})
	other.AddHints(p.Recent(1 << 14))
	if a, b := p.Recent(1<<14), other.Recent(1<<14); !reflect.DeepEqual(a, b) {
		t.Errorf("%d hints became %d others", len(a), len(b))
	}
	for i := range prompts {
		c := mustPick(t, other, s, pick.Request{Tokens: 1024, Chain: pick.NewChain(text(i))})
		end(c)
		if c.Prefill.ID != home[i].Prefill.ID || c.Decode.ID != home[i].Decode.ID {
			t.Errorf("prompt %d is with %s, %s and went to %s, %s", i, home[i].Prefill.ID, home[i].Decode.ID, c.Prefill.ID, c.Decode.ID)
		}
	}
	n := 0
	for _, h := range p.Recent(100) {
		n += len(h.Hashes)
	}
	if n != 100 {
		t.Errorf("%d blocks of 100", n)
	}
}

// TestNamed: engines of the configuration have another epoch in each router,
// and go by their ids.
func TestNamed(t *testing.T) {
	engine := func(m *fleet.Member) { m.Source, m.Epoch = fleet.Static, 77 }
	p := newPicker(pick.LeastLoaded)
	s := fleetOf(0, 0, member("p0", fleet.Prefill, engine), member("p1", fleet.Prefill, engine), member("d0", fleet.Decode, engine))
	p.Note(true)
	end(mustPick(t, p, s, pick.Request{Tokens: 10}))
	got := p.Changes(nil, false, 10)
	if len(got) != 2 || got[0].Epoch != 0 || got[1].Epoch != 0 {
		t.Errorf("changes %+v", got)
	}
	p.SetOthers([]pick.WorkerLoad{{ID: "p0", Loads: pick.Loads{Legs: 1, Tokens: 50}}})
	if c := mustPick(t, p, s, pick.Request{Tokens: 10}); c.Prefill.ID != "p1" {
		t.Errorf("went to the loaded %s", c.Prefill.ID)
	}
}

// TestChanges: changed counts are told once each, and come back to zero.
func TestChanges(t *testing.T) {
	p, s := newPicker(pick.RoundRobin), fleetOf(1, 2)
	end(mustPick(t, p, s, pick.Request{Tokens: 10})) // nobody listens yet
	p.Note(true)
	if got := p.Changes(nil, false, 10); len(got) != 0 {
		t.Errorf("nothing was noted: %v", got)
	}
	c := mustPick(t, p, s, pick.Request{Tokens: 10, Output: 5, Seqs: 2})
	want := []pick.WorkerLoad{{ID: "p0", Epoch: 1, Loads: pick.Loads{Legs: 1, Tokens: 10}}, {ID: c.Decode.ID, Epoch: 1, Loads: pick.Loads{Legs: 1, Seqs: 2, KV: 15}}}
	for most, want := range []int{0, 1, 2, 2} {
		if got := p.Changes(nil, true, most); len(got) != want {
			t.Errorf("at most %d of all: %v", most, got)
		}
	}
	got := append(p.Changes(nil, false, 1), p.Changes(nil, false, 10)...)
	if !slices.Equal(got, want) {
		t.Errorf("changes %+v\nwant %+v", got, want)
	}
	end(c)
	end(c)
	got = p.Changes(nil, false, 10)
	if len(got) != 2 || got[0].Loads != (pick.Loads{}) || got[1].Loads != (pick.Loads{}) {
		t.Errorf("after the end: %+v", got)
	}
	if got := p.Changes(nil, false, 10); len(got) != 0 {
		t.Errorf("told twice: %+v", got)
	}
}

// TestHints: where one router sent a prefix, another finds it warm; only what
// is new is told, within a bound.
func TestHints(t *testing.T) {
	a, b, s := newPicker(pick.Prefix), newPicker(pick.Prefix), fleetOf(4, 4)
	a.Note(true)
	b.Note(true)
	b.Refresh(pick.View{Snapshot: s})
	text := strings.Repeat("All happy families are alike. ", 100)
	chain := pick.NewChain([]byte(text), "m")
	first := mustPick(t, a, s, pick.Request{Tokens: 750, Chain: chain})
	end(first)
	hints, lost := a.Hints()
	if len(hints) != 1 || len(hints[0].Hashes) != len(text)/256 || lost != 0 {
		t.Fatalf("hints %+v, %d lost", hints, lost)
	}
	b.AddHints(append(hints, pick.Hint{Prefill: "stranger", Decode: "d0", DecodeEpoch: 1, Hashes: []uint64{1}}))
	c := mustPick(t, b, s, pick.Request{Tokens: 750, Chain: chain, Explain: true})
	if c.Prefill.ID != first.Prefill.ID || c.Decode.ID != first.Decode.ID || c.Explain.Prefill[0].Match < 0.8 {
		t.Errorf("went to %s, %s, want %s, %s: %+v", c.Prefill.ID, c.Decode.ID, first.Prefill.ID, first.Decode.ID, c.Explain)
	}
	if hints, _ := b.Hints(); len(hints) != 0 {
		t.Errorf("what it was told comes back: %+v", hints)
	}
	end(mustPick(t, a, s, pick.Request{Tokens: 750, Chain: chain}))
	if hints, _ := a.Hints(); len(hints) != 0 {
		t.Errorf("told twice: %+v", hints)
	}
	longer := pick.NewChain([]byte(text+strings.Repeat("x", 600)), "m")
	end(mustPick(t, a, s, pick.Request{Tokens: 900, Chain: longer}))
	if hints, _ := a.Hints(); len(hints) != 1 || len(hints[0].Hashes) != 3 {
		t.Errorf("the new end: %+v", hints)
	}
	for i := range 3000 {
		end(mustPick(t, a, s, pick.Request{Tokens: 750, Chain: pick.NewChain([]byte(fmt.Sprint(i, text)), "m")}))
	}
	hints, lost = a.Hints()
	n := 0
	for _, h := range hints {
		n += len(h.Hashes)
	}
	if n > 1<<12 || lost == 0 {
		t.Errorf("%d hashes waited, %d lost", n, lost)
	}
}

// TestResumeAtHome: a retry whose decode holds a part of the prompt goes there
// again, also by policies that hash.
func TestResumeAtHome(t *testing.T) {
	for _, policy := range []string{pick.ConsistentHash, pick.Session} {
		p, s := newPicker(policy), fleetOf(2, 8)
		home := mustPick(t, p, s, pick.Request{Tokens: 10, Session: "s"})
		end(home)
		for i := range 8 {
			id := fmt.Sprintf("d%d", i)
			c := mustPick(t, p, s, pick.Request{Tokens: 10, Session: "s", Prefer: id})
			end(c)
			if c.Decode.ID != id {
				t.Errorf("%s: %s holds a part, and it went to %s", policy, id, c.Decode.ID)
			}
		}
	}
}

// spread runs the same traffic through a number of routers that tell each other their
// load at intervals of simulated time, 0 for never. It returns the greatest and the mean
// difference between the busiest and the idlest decode worker, in sequences, and the most
// requests that ended on one worker within one interval.
func spread(t *testing.T, policy string, routers int, interval float64, seed uint64) (most int, mean float64, turnover int) {
	t.Helper()
	const workers, rate, length, total = 8, 160.0, 0.5, 1500
	rnd := rand.New(rand.NewPCG(seed, 2))
	s := fleetOf(4, workers)
	var ps []*pick.Picker
	for i := range routers {
		p := pick.New(pick.Config{Policy: policy, AffinityBytes: 1 << 20}, rand.New(rand.NewPCG(seed, uint64(i))))
		p.Refresh(pick.View{Snapshot: s})
		p.Note(true)
		ps = append(ps, p)
	}
	var agenda events
	now := 0.0
	seqs, ended := map[string]int{}, map[string]int{}
	for i := range workers {
		seqs[fmt.Sprintf("d%d", i)] = 0
	}
	left, sum := total, 0.0
	request := func() {
		p := ps[rnd.IntN(routers)]
		c := mustPick(t, p, s, pick.Request{Tokens: 100})
		id := c.Decode.ID
		seqs[id]++
		heap.Push(&agenda, event{now + 0.01, c.EndPrefill})
		heap.Push(&agenda, event{now + rnd.ExpFloat64()*length, func() {
			c.EndDecode()
			seqs[id]--
			ended[id]++
			turnover = max(turnover, ended[id])
		}})
		lo, hi := total, 0
		for _, n := range seqs {
			lo, hi = min(lo, n), max(hi, n)
		}
		most = max(most, hi-lo)
		sum += float64(hi - lo)
		left--
	}
	at := 0.0
	for range total {
		at += rnd.ExpFloat64() / rate
		heap.Push(&agenda, event{at, request})
	}
	var tell func()
	tell = func() {
		clear(ended)
		others := map[string]pick.Loads{}
		for i, p := range ps {
			for _, w := range p.Changes(nil, false, 1000) {
				others[fmt.Sprint(i, w.ID)] = w.Loads
			}
			for j, q := range ps {
				if i == j {
					continue
				}
				var list []pick.WorkerLoad
				for k := range s.Members {
					id := s.Members[k].ID
					if l, ok := others[fmt.Sprint(i, id)]; ok {
						list = append(list, pick.WorkerLoad{ID: id, Epoch: 1, Loads: l})
					}
				}
				q.SetOthers(list) // of two routers the other is all others
			}
		}
		if left > 0 {
			heap.Push(&agenda, event{now + interval, tell})
		}
	}
	if interval > 0 {
		heap.Push(&agenda, event{interval, tell})
	}
	for agenda.Len() > 0 {
		e := heap.Pop(&agenda).(event)
		now = e.at
		e.do()
	}
	for i, p := range ps {
		for k := range s.Members {
			if l := p.Loads(s.Members[k].ID, 1); l != (pick.Loads{}) {
				t.Errorf("router %d still holds %+v on %s", i, l, s.Members[k].ID)
			}
		}
	}
	return most, sum / total, turnover
}

// TestTwoRoutersSpread: two routers that tell each other their load every 20 ms spread
// the same traffic nearly as evenly as one. Between two messages both may fill the same
// gap, which is as large as what ended there since: by so much the spread may be worse.
// At one second, sharing would be worse than none.
func TestTwoRoutersSpread(t *testing.T) {
	for _, policy := range []string{pick.Prefix, pick.LeastLoaded} {
		const seeds = 5
		var one, two, apart float64
		for seed := range uint64(seeds) {
			m1, a1, _ := spread(t, policy, 1, 0.02, seed)
			m2, a2, turnover := spread(t, policy, 2, 0.02, seed)
			_, a3, _ := spread(t, policy, 2, 0, seed)
			if m2 > m1+turnover {
				t.Errorf("%s, seed %d: two routers differ by %d at most, one by %d, and %d ended in an interval", policy, seed, m2, m1, turnover)
			}
			one, two, apart = one+a1/seeds, two+a2/seeds, apart+a3/seeds
		}
		t.Logf("%s: mean difference with one router %.2f, with two %.2f, with two that do not talk %.2f", policy, one, two, apart)
		if two > one+0.75 || two > apart {
			t.Errorf("%s: mean difference with one router %.2f, with two %.2f, with two that do not talk %.2f", policy, one, two, apart)
		}
	}
}

// TestRanks: the data-parallel rank that has most of a prompt is named, not one
// that only has what many prompts share.
func TestRanks(t *testing.T) {
	events := func(m *fleet.Member) { m.KVEvents = "h:1" }
	p, s := newPicker(pick.KVEvents), fleetOf(0, 0, member("p0", fleet.Prefill, events), member("d0", fleet.Decode, events))
	f := func(tokens float64, want int) {
		t.Helper()
		c := mustPick(t, p, s, pick.Request{Tokens: 1000, Tokenized: true, Warm: []pick.Warm{{ID: "p0", Epoch: 1, Tokens: tokens, Rank: 2}, {ID: "d0", Epoch: 9, Tokens: 1000}}})
		end(c)
		if c.PrefillRank != want || c.DecodeRank != 0 {
			t.Errorf("%g tokens: ranks %d and %d, want %d and 0", tokens, c.PrefillRank, c.DecodeRank, want)
		}
	}
	f(499, 0)
	f(500, 3)
	f(1000, 3)
}
