package pick_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router/pick"
)

// TestRoundRobin: in any stretch of time, members of a role that were there
// all along got the same number of requests, or one more; whatever joins,
// leaves or drains, with any numbers of the two roles.
func TestRoundRobin(t *testing.T) {
	for _, xy := range [][2]int{{1, 1}, {3, 5}, {40, 7}, {2, 60}} {
		p := newPicker(pick.RoundRobin)
		rnd := rand.New(rand.NewPCG(uint64(xy[0]), 9))
		joined := map[string]int{}     // request before which a member joined for good
		got := map[string][]int{}      // requests that it got
		drained := map[string]uint64{} // until this version
		epochs := map[string]uint64{}
		n := 0
		for version := uint64(1); version < 60; version++ {
			var members []fleet.Member
			for i := range xy[0] + xy[1] {
				role := fleet.Prefill
				if i >= xy[0] {
					role = fleet.Decode
				}
				id := fmt.Sprintf("%s%d", role, i)
				stable := i == 0 || i == xy[0] || i%3 == 0
				if !stable && rnd.IntN(6) == 0 {
					epochs[id]++
				}
				if !stable && rnd.IntN(8) == 0 {
					drained[id] = version + 2
				}
				m := member(id, role, func(m *fleet.Member) {
					m.Epoch, m.Draining = 1+epochs[id], version < drained[id]
				})
				members = append(members, m)
				if !stable {
					delete(joined, id)
				} else if _, ok := joined[id]; !ok {
					joined[id] = n
				}
			}
			s := fleet.NewSnapshot(version, time.Time{}, members)
			for range rnd.IntN(200) {
				c := mustPick(t, p, s, pick.Request{Tokens: rnd.IntN(1000)})
				for _, id := range []string{c.Prefill.ID, c.Decode.ID} {
					if _, ok := joined[id]; ok {
						got[id] = append(got[id], n)
					}
				}
				if n++; rnd.IntN(2) == 0 {
					end(c)
				}
			}
		}
		for _, role := range []fleet.Role{fleet.Prefill, fleet.Decode} {
			least, most := 1<<30, 0
			for id := range joined {
				if strings.HasPrefix(id, string(role)) {
					least, most = min(least, len(got[id])), max(most, len(got[id]))
				}
			}
			if most-least > 1 {
				t.Errorf("%v: %s: from %d to %d", xy, role, least, most)
			}
		}
	}
}

// TestPowerOfTwo: of two drawn of ten workers the less loaded is taken, so that the only idle one
// gets a fifth of the requests.
func TestPowerOfTwo(t *testing.T) {
	p, s := newPicker(pick.PowerOfTwo), fleetOf(1, 10)
	for i := range s.Members {
		if m := &s.Members[i]; m.Role == fleet.Decode && m.ID != "d3" {
			m.Load.Running = 5
		}
	}
	idle := 0
	for range 10_000 {
		c := mustPick(t, p, s, pick.Request{})
		if c.Decode.ID == "d3" {
			idle++
		}
		end(c)
	}
	if idle < 1900 || idle > 2100 {
		t.Errorf("the idle one got %d of 10000", idle)
	}
}

// TestWarmInLargeClass: of many workers those that had the prefix are looked at, though others have
// been idle for longer and few are drawn.
func TestWarmInLargeClass(t *testing.T) {
	p, s := newPicker(pick.Prefix), fleetOf(200, 200)
	chain := func(i int) pick.Chain { return pick.NewChain([]byte(strings.Repeat(fmt.Sprintf("%4d", i), 512))) }
	first := map[int]*pick.Choice{}
	for i := range 100 {
		first[i] = mustPick(t, p, s, pick.Request{Tokens: 500, Chain: chain(i)})
		end(first[i])
	}
	for i, was := range first {
		c := mustPick(t, p, s, pick.Request{Tokens: 500, Chain: chain(i)})
		if end(c); c.Prefill.ID != was.Prefill.ID || c.Decode.ID != was.Decode.ID {
			t.Errorf("%d: %s and %s, warm are %s and %s", i, c.Prefill.ID, c.Decode.ID, was.Prefill.ID, was.Decode.ID)
		}
	}
}

// TestHash: a key stays with its worker, moves only if that one goes, and
// goes elsewhere only while that one has a quarter more than the mean.
func TestHash(t *testing.T) {
	const workers, keys = 20, 2000
	where := func(p *pick.Picker, s *fleet.Snapshot) map[string]string {
		out := map[string]string{}
		for k := range keys {
			key := fmt.Sprint("session-", k)
			c := mustPick(t, p, s, pick.Request{Session: key})
			out[key] = c.Decode.ID
			end(c)
		}
		return out
	}
	p := newPicker(pick.Session)
	all := fleetOf(1, workers)
	before := where(p, all)
	count := map[string]int{}
	for _, id := range before {
		count[id]++
	}
	for id, n := range count {
		if n < keys/workers/2 || n > keys/workers*2 {
			t.Errorf("%s has %d keys", id, n)
		}
	}
	less := fleet.NewSnapshot(2, time.Time{}, append([]fleet.Member{}, all.Members[1:]...)) // without d0
	after := where(p, less)
	for key, id := range before {
		if id != "d0" && after[key] != id {
			t.Fatalf("%s moved from %s to %s", key, id, after[key])
		}
	}
	if other := where(newPicker(pick.Session), less); fmt.Sprint(other) != fmt.Sprint(after) {
		t.Error("another router disagrees")
	}
	// Everybody has the same session: the load is bounded all the same.
	held := map[string]int{}
	for range 200 {
		held[mustPick(t, p, less, pick.Request{Session: "one"}).Decode.ID]++
	}
	for id, n := range held {
		if n > 14 { // 1.25 × 201/19, rounded up
			t.Errorf("%s has %d of 200 in flight", id, n)
		}
	}
}

// TestHashKeys: without a session the prompt's beginning counts, or nothing.
func TestHashKeys(t *testing.T) {
	s := fleetOf(9, 9)
	p := newPicker(pick.ConsistentHash)
	got := map[string]bool{}
	for i := range 30 {
		a := mustPick(t, p, s, pick.Request{Head: []byte(fmt.Sprint("prompt ", i))})
		end(a)
		b := mustPick(t, p, s, pick.Request{Head: []byte(fmt.Sprint("prompt ", i)), Explain: true})
		end(b)
		if a.Prefill.ID != b.Prefill.ID || a.Decode.ID != b.Decode.ID || b.Explain.Reason != "by its hash" {
			t.Fatalf("%s/%s, then %s/%s", a.Prefill.ID, a.Decode.ID, b.Prefill.ID, b.Decode.ID)
		}
		got[a.Prefill.ID] = true
	}
	if len(got) < 6 {
		t.Errorf("all went to %v", got)
	}
	c := mustPick(t, p, s, pick.Request{Head: []byte("x"), Exclude: []string{"p0", "p1", "p2", "p3", "p4", "p5", "p6", "p7"}})
	if c.Prefill.ID != "p8" {
		t.Errorf("chose %s", c.Prefill.ID)
	}
	p = newPicker(pick.Session) // no session: by load
	a, b := mustPick(t, p, s, pick.Request{Head: []byte("x"), Tokens: 500}), mustPick(t, p, s, pick.Request{Head: []byte("x"), Tokens: 500})
	if a.Prefill.ID == b.Prefill.ID {
		t.Error("both went to the same worker")
	}
}

func TestLeastTokens(t *testing.T) {
	p, s := newPicker(pick.LeastTokens), fleetOf(1, 2)
	a := mustPick(t, p, s, pick.Request{Tokens: 10, Output: 5000})
	for range 3 { // three small ones beside one large
		if c := mustPick(t, p, s, pick.Request{Tokens: 10, Output: 100}); c.Decode.ID == a.Decode.ID {
			t.Error("counted sequences")
		}
	}
}

// TestPredictedTTFT: workers of one class are told apart by their own times, of
// prefill and of what follows it.
func TestPredictedTTFT(t *testing.T) {
	p, s := newPicker(pick.PredictedTTFT), fleetOf(3, 3)
	ask := func(exclude ...string) *pick.Choice {
		c := mustPick(t, p, s, pick.Request{Tokens: 1000, Exclude: exclude})
		prefill, rest := 20*time.Millisecond, 10*time.Millisecond
		if c.Prefill.ID == "p1" {
			prefill *= 10
		}
		if c.Decode.ID == "d1" {
			rest *= 10
		}
		c.Answered(prefill, prefill+rest)
		end(c)
		return c
	}
	for range 10 { // each has been seen
		ask("p0", "p1", "d0", "d1")
		ask("p1", "p2", "d1", "d2")
		ask("p0", "p2", "d0", "d2")
	}
	for range 30 {
		if c := ask(); c.Prefill.ID == "p1" || c.Decode.ID == "d1" {
			t.Fatalf("picked %s and %s, and p1 and d1 are slow", c.Prefill.ID, c.Decode.ID)
		}
	}
	if c := ask("p0", "p2"); c.Prefill.ID != "p1" { // no worker is given up for being slow
		t.Errorf("picked %s", c.Prefill.ID)
	}
}

func TestTopology(t *testing.T) {
	at := func(where string) func(*fleet.Member) { return func(m *fleet.Member) { m.Topology = where } }
	s := fleetOf(0, 0, member("p0", fleet.Prefill, at("a/1/x")), member("p1", fleet.Prefill, at("b/1/y")),
		member("d0", fleet.Decode, at("a/1/z")), member("d1", fleet.Decode, at("a/2/w")), member("d2", fleet.Decode, at("b/1/v")))
	cfg := pick.DefaultConfig()
	for _, policy := range []string{pick.PredictedTTFT, pick.LeastLoaded} {
		cfg.Policy = policy
		p := pick.New(cfg, rand.New(rand.NewPCG(1, 2)))
		for range 6 { // near pairs, as long as the load is alike
			c := mustPick(t, p, s, pick.Request{Tokens: 1})
			if c.Prefill.Topology[:3] != c.Decode.Topology[:3] {
				t.Errorf("%s: %s with %s", policy, c.Prefill.Topology, c.Decode.Topology)
			}
			end(c)
		}
	}
	cfg.TopologyLevel = 1
	p := pick.New(cfg, rand.New(rand.NewPCG(1, 2)))
	for range 30 { // whatever the load
		if c := mustPick(t, p, s, pick.Request{Tokens: 1}); c.Prefill.Topology[0] != c.Decode.Topology[0] {
			t.Errorf("%s with %s", c.Prefill.Topology, c.Decode.Topology)
		}
	}
	// One prefill's pairs are looked at all the same: the near one is taken, though it
	// is not the first of decode's.
	cfg.TopologyLevel, cfg.Policy = 0, pick.LeastLoaded
	one := fleetOf(0, 0, member("p0", fleet.Prefill, at("b/1/x")), member("d0", fleet.Decode, at("a/1/z")),
		member("d1", fleet.Decode, at("b/1/w")), member("d2", fleet.Decode, at("a/2/v")))
	p = pick.New(cfg, rand.New(rand.NewPCG(1, 2)))
	for range 10 {
		c := mustPick(t, p, one, pick.Request{Tokens: 1})
		if c.Decode.ID != "d1" {
			t.Errorf("%s of one prefill's", c.Decode.ID)
		}
		end(c)
	}
	cfg.TopologyLevel = 3
	p = pick.New(cfg, rand.New(rand.NewPCG(1, 2)))
	_, err := p.Pick(pick.View{Snapshot: s}, &pick.Request{Model: "m"})
	if err == nil || !strings.Contains(err.Error(), `too far apart: topology "a/1/x" and "a/1/z"`) {
		t.Errorf("%v", err)
	}
}

// TestWarm: events beat the text where they are known, and only there.
func TestWarm(t *testing.T) {
	s := fleetOf(0, 1, member("fed", fleet.Prefill, func(m *fleet.Member) { m.KVEvents = "h:1" }),
		member("fed2", fleet.Prefill, func(m *fleet.Member) { m.KVEvents = "h:1" }), member("mute", fleet.Prefill))
	p := newPicker(pick.KVEvents)
	chain := pick.NewChain([]byte(strings.Repeat("All happy families are alike. ", 200)), "m")
	req := pick.Request{Tokens: 1500, Chain: chain, Tokenized: true, Explain: true, Warm: []pick.Warm{{ID: "fed2", Epoch: 1, Tokens: 1200}, {ID: "fed", Epoch: 9, Tokens: 1500}}}
	c := mustPick(t, p, s, req)
	if c.Prefill.ID != "fed2" || c.Explain.Prefill[0].Match != 0.8 {
		t.Errorf("%s: %+v", c.Prefill.ID, c.Explain)
	}
	end(c)
	req.Exclude = []string{"fed", "fed2"}
	end(mustPick(t, p, s, req))
	req.Exclude, req.Warm = nil, nil
	c = mustPick(t, p, s, req) // nobody fed has it any more; mute was sent it
	if c.Prefill.ID != "mute" {
		t.Errorf("%s: %+v", c.Prefill.ID, c.Explain)
	}
}

// TestBehindTogether: of picks that find the table outdated at once none fails for what the new one has,
// whoever makes it.
func TestBehindTogether(t *testing.T) {
	const picks = 4
	before, after := fleetOf(1, 0), fleetOf(1, 1)
	after = fleet.NewSnapshot(before.Version+1, time.Time{}, after.Members)
	for range 3000 {
		p := pick.New(pick.DefaultConfig(), nil)
		p.Refresh(pick.View{Snapshot: before})
		var all sync.WaitGroup
		start, errs := make(chan struct{}), make([]error, picks)
		for i := range picks {
			all.Go(func() {
				<-start
				_, errs[i] = p.Pick(pick.View{Snapshot: after, Behind: true}, &pick.Request{Model: "m"})
			})
		}
		close(start)
		all.Wait()
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
	}
}

// TestBehind: an outdated table never yields a worker that the view lacks, and is rebuilt
// when it yields nobody.
func TestBehind(t *testing.T) {
	p := newPicker(pick.LeastLoaded)
	old := fleetOf(3, 3)
	p.Refresh(pick.View{Snapshot: old})
	gone := fleet.NewSnapshot(2, time.Time{}, []fleet.Member{member("p0", fleet.Prefill, func(m *fleet.Member) { m.Draining = true }),
		member("p1", fleet.Prefill), member("p2", fleet.Prefill, func(m *fleet.Member) { m.Epoch = 2 }), member("d1", fleet.Decode), member("d2", fleet.Decode)})
	distrusts := func(m *fleet.Member) bool { return m.ID != "d1" }
	for range 20 {
		c, err := p.Pick(pick.View{Snapshot: gone, Behind: true, Eligible: distrusts}, &pick.Request{Model: "m"})
		if err != nil || c.Prefill.ID != "p1" || c.Decode.ID != "d2" {
			t.Fatalf("%+v, %v", c, err)
		}
		end(c)
	}
	fresh := fleet.NewSnapshot(3, time.Time{}, []fleet.Member{member("p9", fleet.Prefill), member("d9", fleet.Decode)})
	if c, err := p.Pick(pick.View{Snapshot: fresh, Behind: true}, &pick.Request{Model: "m"}); err != nil || c.Prefill.ID != "p9" {
		t.Errorf("%+v, %v", c, err)
	}
}

// TestFetch: a prefix that another worker would give is worth less than one at
// hand and more than none, from the fastest tier most; where it cannot be
// fetched it is worth nothing.
func TestFetch(t *testing.T) {
	fed := func(m *fleet.Member) { m.KVEvents = "h:1" }
	s := fleetOf(0, 0, member("p0", fleet.Prefill, fed), member("p1", fleet.Prefill, fed), member("d0", fleet.Decode, fed),
		member("other", fleet.Decode, fed, func(m *fleet.Member) { m.ModelFingerprint = "g" }))
	fetch := pick.Fetch{Dialect: "native", Weight: 0.7, Least: 32}
	for _, policy := range []string{pick.KVEvents, pick.PredictedTTFT} {
		for name, c := range map[string]struct {
			warm  []pick.Warm
			fetch pick.Fetch
			want  map[string]float64 // what each prefill's prompt counts as fetched
		}{
			"decode has it":    {[]pick.Warm{{ID: "d0", Epoch: 1, Tokens: 800}}, fetch, map[string]float64{"p0": 0.56, "p1": 0.56}},
			"a prefill has it": {[]pick.Warm{{ID: "p1", Epoch: 1, Tokens: 800}}, fetch, map[string]float64{"p0": 0.56}},
			"the best giver":   {[]pick.Warm{{ID: "p1", Epoch: 1, Tokens: 320}, {ID: "d0", Epoch: 1, Tokens: 800}}, fetch, map[string]float64{"p0": 0.56, "p1": 0.56}},
			"hardly more":      {[]pick.Warm{{ID: "p1", Epoch: 1, Tokens: 540}, {ID: "d0", Epoch: 1, Tokens: 800}}, fetch, map[string]float64{"p0": 0.56}},
			"another model's":  {[]pick.Warm{{ID: "other", Epoch: 1, Tokens: 800}}, fetch, nil},
			"another epoch's":  {[]pick.Warm{{ID: "d0", Epoch: 2, Tokens: 800}}, fetch, nil},
			"switched off":     {[]pick.Warm{{ID: "d0", Epoch: 1, Tokens: 800}}, pick.Fetch{}, nil},
			"another dialect":  {[]pick.Warm{{ID: "d0", Epoch: 1, Tokens: 800}}, pick.Fetch{Dialect: "vllm-nixl", Weight: 1}, nil},
		} {
			choice := mustPick(t, newPicker(policy), s, pick.Request{Tokens: 1000, Tokenized: true, Explain: true, Warm: c.warm, Fetch: c.fetch})
			for _, p := range choice.Explain.Prefill {
				if d := p.Fetch - c.want[p.ID]; d < -1e-9 || d > 1e-9 {
					t.Errorf("%s, %s: %s fetches %v, want %v", policy, name, p.ID, p.Fetch, c.want[p.ID])
				}
			}
			for _, d := range choice.Explain.Decode {
				if d.Fetch != 0 {
					t.Errorf("%s, %s: decode fetches: %+v", policy, name, d)
				}
			}
		}
	}
	// p1 has the prompt at hand: it is worth going there, unless so much waits
	// that fetching it elsewhere is cheaper; it would not be cheaper to compute it.
	for _, c := range []struct {
		queued int
		want   string
	}{{0, "p1"}, {200, "p1"}, {300, "p0"}} {
		busy := fleetOf(0, 0, member("p0", fleet.Prefill, fed), member("p1", fleet.Prefill, fed, func(m *fleet.Member) { m.Load.QueuedTokens = c.queued }), member("d0", fleet.Decode, fed))
		got := mustPick(t, newPicker(pick.KVEvents), busy, pick.Request{Tokens: 1000, Tokenized: true, Warm: []pick.Warm{{ID: "p1", Epoch: 1, Tokens: 800}}, Fetch: fetch})
		if got.Prefill.ID != c.want {
			t.Errorf("%d tokens wait at p1: %s", c.queued, got.Prefill.ID)
		}
	}
}

// TestMoved: a member is found wherever the view has it now, and nobody else in its place.
func TestMoved(t *testing.T) {
	p := newPicker(pick.RoundRobin)
	old := fleetOf(3, 3)
	p.Refresh(pick.View{Snapshot: old})
	for shift := 1; shift < 6; shift++ {
		members := append(append([]fleet.Member{}, old.Members[shift:]...), old.Members[:shift]...)
		s := fleet.NewSnapshot(2, time.Time{}, members)
		s.Members = members // a view may have them in any order
		c, err := p.Pick(pick.View{Snapshot: s, Behind: true}, &pick.Request{Model: "m"})
		if err != nil || c.Prefill.Role != fleet.Prefill || c.Decode.Role != fleet.Decode {
			t.Fatalf("shifted by %d: %+v, %v", shift, c, err)
		}
		end(c)
	}
}

// TestAllCompared: of sixteen alike the least loaded is found, however lately it was used.
func TestAllCompared(t *testing.T) {
	for seed := range uint64(20) {
		var list []fleet.Member
		for i := range 16 {
			list = append(list, member(fmt.Sprintf("d%d", i), fleet.Decode, func(m *fleet.Member) { m.MaxBatch, m.Load.Running = 0, 9 }))
		}
		p := pick.New(pick.Config{Policy: pick.LeastLoaded}, rand.New(rand.NewPCG(seed, 2)))
		busy := fleetOf(1, 0, slices.Clone(list)...)
		for busy.Get("d7") != nil {
			c := mustPick(t, p, busy, pick.Request{Tokens: 1})
			if end(c); c.Decode.ID == "d7" {
				break
			}
		}
		idle := slices.Clone(list)
		idle[7].Load.Running = 8
		s := fleet.NewSnapshot(2, time.Time{}, append(idle, member("p0", fleet.Prefill)))
		if c := mustPick(t, p, s, pick.Request{Tokens: 1}); c.Decode.ID != "d7" {
			t.Errorf("seed %d: %s", seed, c.Decode.ID)
		}
	}
}

// TestNoClock: without a clock nobody is a newcomer.
func TestNoClock(t *testing.T) {
	cfg := pick.DefaultConfig()
	cfg.Policy = pick.LeastLoaded
	p := pick.New(cfg, rand.New(rand.NewPCG(1, 2)))
	now := time.Unix(1e6, 0)
	before := fleetOf(1, 1)
	p.Refresh(pick.View{Snapshot: before, Now: now})
	running := func(n int) func(*fleet.Member) { return func(m *fleet.Member) { m.Load.Running = n } }
	s := fleet.NewSnapshot(2, time.Time{}, []fleet.Member{member("p0", fleet.Prefill), member("d0", fleet.Decode, running(4)), member("new", fleet.Decode, running(1))})
	p.Refresh(pick.View{Snapshot: s, Now: now.Add(time.Hour)})
	for range 2 { // the second time it has a request
		c, err := p.Pick(pick.View{Snapshot: s}, &pick.Request{Model: "m", Tokens: 1})
		if err != nil || c.Decode.ID != "new" {
			t.Errorf("%+v, %v", c, err)
		}
	}
}
