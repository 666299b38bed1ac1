package pick_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/kvlayout"
	"github.com/xpyd/xpyd/router/pick"
)

func member(id string, role fleet.Role, edit ...func(*fleet.Member)) fleet.Member {
	m := fleet.Member{State: fleet.Live, Instance: fleet.Instance{ID: id, Epoch: 1, Role: role, Dialect: "native",
		Model: "m", ModelFingerprint: "f", Layout: kvlayout.Form{BlockTokens: 16}, Blocks: 1000, MaxBatch: 8}}
	for _, e := range edit {
		e(&m)
	}
	return m
}

// fleetOf makes np prefill and nd decode members, p0… and d0….
func fleetOf(np, nd int, more ...fleet.Member) *fleet.Snapshot {
	for i := range np {
		more = append(more, member(fmt.Sprintf("p%d", i), fleet.Prefill))
	}
	for i := range nd {
		more = append(more, member(fmt.Sprintf("d%d", i), fleet.Decode))
	}
	return fleet.NewSnapshot(1, time.Time{}, more)
}

func newPicker(policy string) *pick.Picker {
	return pick.New(pick.Config{Policy: policy, AffinityBytes: 1 << 20}, rand.New(rand.NewPCG(1, 2)))
}

func anyModel(string) bool { return true }

func mustPick(t *testing.T, p *pick.Picker, s *fleet.Snapshot, req pick.Request) *pick.Choice {
	t.Helper()
	if req.Model == "" {
		req.Model = "m"
	}
	c, err := p.Pick(pick.View{Snapshot: s}, &req)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func end(c *pick.Choice) { c.EndPrefill(); c.EndDecode() }

func TestLoadCountsAtDispatch(t *testing.T) {
	for _, policy := range []string{pick.Prefix, pick.LeastLoaded} {
		p, s := newPicker(policy), fleetOf(2, 2)
		a := mustPick(t, p, s, pick.Request{Tokens: 32000})
		b := mustPick(t, p, s, pick.Request{Tokens: 32000})
		if a.Prefill.ID == b.Prefill.ID || a.Decode.ID == b.Decode.ID {
			t.Errorf("%s: both went to %s and %s", policy, a.Prefill.ID, a.Decode.ID)
		}
		a.EndPrefill()
		c := mustPick(t, p, s, pick.Request{Tokens: 10})
		if c.Prefill.ID != a.Prefill.ID {
			t.Errorf("%s: went to the loaded %s", policy, c.Prefill.ID)
		}
	}
}

func TestReportedLoad(t *testing.T) {
	busy := func(m *fleet.Member) { m.Load = fleet.Load{QueuedTokens: 5000, Running: 6} }
	s := fleetOf(0, 0, member("p0", fleet.Prefill, busy), member("p1", fleet.Prefill),
		member("d0", fleet.Decode, busy), member("d1", fleet.Decode))
	c := mustPick(t, newPicker(pick.Prefix), s, pick.Request{Tokens: 100})
	if c.Prefill.ID != "p1" || c.Decode.ID != "d1" {
		t.Errorf("chose %s, %s", c.Prefill.ID, c.Decode.ID)
	}
}

func TestPrefixSticksUntilLoaded(t *testing.T) {
	p, s := newPicker(pick.Prefix), fleetOf(4, 4)
	text := []byte(strings.Repeat("All happy families are alike. ", 200))
	req := pick.Request{Tokens: 1500, Chain: pick.NewChain(text, "m")}
	first := mustPick(t, p, s, req)
	end(first)
	end(mustPick(t, p, s, pick.Request{Tokens: 100})) // someone else
	longer := pick.Request{Tokens: 1600, Explain: true,
		Chain: pick.NewChain(append(text[:len(text):len(text)], strings.Repeat("x", 600)...), "m")}
	c := mustPick(t, p, s, longer)
	if c.Prefill.ID != first.Prefill.ID || c.Decode.ID != first.Decode.ID {
		t.Errorf("went to %s, %s; the prefix is on %s, %s", c.Prefill.ID, c.Decode.ID, first.Prefill.ID, first.Decode.ID)
	}
	if c.Explain.Prefill[0].Match < 0.8 {
		t.Errorf("explain %+v", c.Explain)
	}
	// While that prefill is busy with more than the prefix saves, others win.
	if c := mustPick(t, p, s, longer); c.Prefill.ID == first.Prefill.ID {
		t.Error("went to the busy worker")
	}
	other := pick.NewChain(text, "m", "salt")
	if c := mustPick(t, p, s, pick.Request{Tokens: 1500, Chain: other, Explain: true}); c.Explain.Prefill[0].Match != 0 {
		t.Error("another salt matched")
	}
}

// TestExplainForgetsTheWrong: who turned out not to be eligible is not among those that were weighed.
func TestExplainForgetsTheWrong(t *testing.T) {
	p := newPicker(pick.LeastLoaded)
	busy := func(m *fleet.Member) { m.Load = fleet.Load{QueuedTokens: 5000, Running: 6} }
	s := fleetOf(2, 2, member("p9", fleet.Prefill, busy), member("d9", fleet.Decode, busy))
	end(mustPick(t, p, s, pick.Request{}))
	v := pick.View{Snapshot: fleet.NewSnapshot(2, time.Time{}, s.Members), Behind: true,
		Eligible: func(m *fleet.Member) bool { return m.ID == "p9" || m.ID == "d9" }}
	c, err := p.Pick(v, &pick.Request{Model: "m", Explain: true})
	if err != nil {
		t.Fatal(err)
	}
	end(c)
	if x := c.Explain; len(x.Prefill) != 1 || x.Prefill[0].ID != "p9" || len(x.Decode) != 1 || x.Decode[0].ID != "d9" || x.Reason != "the only pair" {
		t.Errorf("%+v", x)
	}
}

// TestPrefixSticksToWhole: of engines that do both phases, the one that has a prompt gets what goes on
// with it, however long it is.
func TestPrefixSticksToWhole(t *testing.T) {
	whole := func(m *fleet.Member) { m.Dialect = "openai" }
	p, s := newPicker(pick.Prefix), fleetOf(0, 0, member("a", fleet.Decode, whole), member("b", fleet.Decode, whole), member("c", fleet.Decode, whole))
	req := pick.Request{Tokens: 5000, Chain: pick.NewChain([]byte(strings.Repeat("All happy families are alike. ", 700)), "m")}
	first := mustPick(t, p, s, req)
	end(first)
	for i := range 5 {
		c := mustPick(t, p, s, req)
		end(c)
		if c.Decode.ID != first.Decode.ID {
			t.Errorf("turn %d went to %s; %s has the prompt", i, c.Decode.ID, first.Decode.ID)
		}
	}
}

// TestSequentialTraffic: requests one after another that share only a small
// system prompt spread over the workers.
func TestSequentialTraffic(t *testing.T) {
	for _, policy := range pick.Policies {
		p, s := newPicker(policy), fleetOf(2, 2)
		got := map[string]int{}
		for i := range 400 {
			text := strings.Repeat("You are a helpful assistant. ", 20) + strings.Repeat(fmt.Sprintf("%d ", i), 1500)
			c := mustPick(t, p, s, pick.Request{Tokens: len(text) / 4, Chain: pick.NewChain([]byte(text))})
			got[c.Prefill.ID]++
			got[c.Decode.ID]++
			end(c)
		}
		for id, n := range got {
			if n < 120 {
				t.Errorf("%s: %s got %d of 400", policy, id, n)
			}
		}
	}
}

func TestOnlyUsable(t *testing.T) {
	set := func(f func(m *fleet.Member)) func(m *fleet.Member) { return f }
	for name, edit := range map[string]func(m *fleet.Member){
		"suspect":      set(func(m *fleet.Member) { m.State = fleet.Suspect }),
		"dead":         set(func(m *fleet.Member) { m.State = fleet.Dead }),
		"draining":     set(func(m *fleet.Member) { m.Draining = true }),
		"incompatible": set(func(m *fleet.Member) { m.ModelFingerprint = "other" }),
		"other model":  set(func(m *fleet.Member) { m.Model = "other" }),
	} {
		s := fleetOf(0, 0, member("p0", fleet.Prefill, edit), member("d0", fleet.Decode))
		p := newPicker(pick.Prefix)
		_, err := p.Pick(pick.View{Snapshot: s}, &pick.Request{Model: "m"})
		if !errors.Is(err, pick.ErrNoPair) {
			t.Errorf("%s: %v", name, err)
		}
		if name == "incompatible" && !strings.Contains(fmt.Sprint(err), `p0 and d0 are incompatible, model_fingerprint`) {
			t.Errorf("%s: %v does not say what differs", name, err)
		}
		if says := strings.HasSuffix(fmt.Sprint(err), "and takes new work: p0 drains"); says != (name == "draining") {
			t.Errorf("%s: %v", name, err)
		}
		if p.Ready(pick.View{Snapshot: s}, anyModel) {
			t.Errorf("%s: ready", name)
		}
	}
	s := fleetOf(1, 1)
	p := newPicker(pick.Prefix)
	if _, err := p.Pick(pick.View{Snapshot: s}, &pick.Request{Model: "x"}); !errors.Is(err, pick.ErrNoModel) {
		t.Errorf("unknown model: %v", err)
	}
	if _, err := p.Pick(pick.View{Snapshot: s}, &pick.Request{}); !errors.Is(err, pick.ErrNoPair) {
		t.Errorf("no model: %v", err)
	}
	no := pick.View{Snapshot: s, Eligible: func(m *fleet.Member) bool { return m.Role == fleet.Prefill }, Generation: 1}
	if _, err := p.Pick(no, &pick.Request{Model: "m"}); !errors.Is(err, pick.ErrNoPair) || p.Ready(no, anyModel) {
		t.Errorf("unprobed: %v", err)
	}
	if !p.Ready(pick.View{Snapshot: s}, anyModel) {
		t.Error("not ready")
	}
	if p.Ready(pick.View{Snapshot: s}, func(string) bool { return false }) {
		t.Error("ready with a model that does not count")
	}
	// An engine that does both phases needs no partner.
	alone := fleetOf(0, 0, member("e", fleet.Decode, func(m *fleet.Member) { m.Dialect = "openai" }))
	p = newPicker(pick.Prefix)
	if !p.Ready(pick.View{Snapshot: alone}, anyModel) {
		t.Error("not ready with an engine that serves alone")
	}
	if c := mustPick(t, p, alone, pick.Request{}); c.Decode.ID != "e" {
		t.Errorf("%+v", c.Decode)
	}
	_, err := p.Pick(pick.View{Snapshot: alone}, &pick.Request{Model: "m", Exclude: []string{"e"}})
	if !errors.Is(err, pick.ErrNoPair) || !strings.Contains(err.Error(), "failed it already") {
		t.Errorf("%v", err)
	}
}

// Members that differ only in their fleet secrets are paired by them.
func TestPairsBySecret(t *testing.T) {
	of := func(secrets string) func(m *fleet.Member) { return func(m *fleet.Member) { m.Secrets = secrets } }
	s := fleetOf(0, 0, member("p0", fleet.Prefill, of("aa")), member("p1", fleet.Prefill, of("bb")), member("p2", fleet.Prefill, of("")),
		member("d0", fleet.Decode, of("bb+cc")))
	p := newPicker(pick.RoundRobin)
	for range 20 {
		c := mustPick(t, p, s, pick.Request{})
		if c.Prefill.ID != "p1" {
			t.Fatalf("%s is paired with a decode worker that shares no secret with it", c.Prefill.ID)
		}
		end(c)
	}
}

func TestExcludeAndAvoid(t *testing.T) {
	p, s := newPicker(pick.Prefix), fleetOf(2, 1)
	for range 10 {
		if c := mustPick(t, p, s, pick.Request{Exclude: []string{"p0"}, Avoid: []string{"d0"}}); c.Prefill.ID != "p1" {
			t.Fatal("chose an excluded member")
		}
		if c := mustPick(t, p, s, pick.Request{Avoid: []string{"p1"}}); c.Prefill.ID != "p0" {
			t.Fatal("chose an avoided member")
		}
	}
	_, err := p.Pick(pick.View{Snapshot: s}, &pick.Request{Model: "m", Exclude: []string{"d0"}})
	if !errors.Is(err, pick.ErrNoPair) {
		t.Errorf("%v", err)
	}
	for _, policy := range pick.Policies {
		p, s := newPicker(policy), fleetOf(3, 3)
		for range 12 {
			avoid := pick.Request{Session: "s", Avoid: []string{"p0", "d2", "p0", "p1"}, Exclude: []string{"d1"}}
			c := mustPick(t, p, s, avoid)
			if c.Decode.ID == "d1" || policy != pick.Random && policy != pick.PowerOfTwo && (c.Prefill.ID != "p2" || c.Decode.ID != "d0") {
				t.Errorf("%s: chose %s and %s", policy, c.Prefill.ID, c.Decode.ID)
			}
			end(c)
			avoid.Exclude = []string{"p2", "d0", "d1"}
			if c = mustPick(t, p, s, avoid); c.Prefill.ID != "p1" && policy != pick.Random && policy != pick.PowerOfTwo && policy != pick.RoundRobin && policy != pick.Session && policy != pick.ConsistentHash || c.Decode.ID != "d2" {
				t.Errorf("%s: chose %s and %s for want of better", policy, c.Prefill.ID, c.Decode.ID)
			}
			end(c)
		}
	}
}

// A decode that holds a part of the prompt is worth some load, and no more.
func TestPrefer(t *testing.T) {
	load := func(running int) *fleet.Snapshot {
		return fleetOf(1, 1, member("held", fleet.Decode, func(m *fleet.Member) { m.Load.Running = running }))
	}
	for _, policy := range []string{pick.Prefix, pick.LeastLoaded} {
		f := func(want string, running int, req pick.Request) {
			t.Helper()
			p := newPicker(policy)
			if c := mustPick(t, p, load(running), req); c.Decode.ID != want {
				t.Errorf("%s: chose %s, want %s", policy, c.Decode.ID, want)
			}
		}
		f("d0", 3, pick.Request{})
		f("held", 3, pick.Request{Prefer: "held"})
		f("d0", 7, pick.Request{Prefer: "held"})
		f("d0", 0, pick.Request{Prefer: "held", Avoid: []string{"held"}})
		f("d0", 0, pick.Request{Prefer: "held", Exclude: []string{"held"}})
	}
}

// TestProperties drives random fleets with random requests: never an
// incompatible, unusable or excluded pair; counts match what is in flight, and
// return to zero.
func TestProperties(t *testing.T) {
	rnd := rand.New(rand.NewPCG(3, 4))
	policies := pick.Policies
	for round := range 60 {
		p := newPicker(policies[round%len(policies)])
		var held []*pick.Choice
		ids := map[string]uint64{}
		for version := range uint64(5) {
			s := randomFleet(rnd, version+1, ids)
			for range 40 {
				req := pick.Request{Model: "m", Tokens: rnd.IntN(5000), Output: rnd.IntN(500), Seqs: rnd.IntN(4),
					Chain:   pick.NewChain([]byte(strings.Repeat(string(rune('a'+rnd.IntN(5))), rnd.IntN(4000)))),
					Exclude: []string{fmt.Sprintf("w%d", rnd.IntN(30))}, Explain: rnd.IntN(2) == 0}
				c, err := p.Pick(pick.View{Snapshot: s}, &req)
				if err != nil {
					continue
				}
				held = append(held, c)
				for _, m := range []*fleet.Member{c.Prefill, c.Decode} {
					if !m.Usable() || m.ID == req.Exclude[0] {
						t.Fatalf("chose %+v", m)
					}
				}
				if c.Prefill.Role != fleet.Prefill || c.Decode.Role != fleet.Decode {
					t.Fatal("roles")
				}
				if diff := fleet.Compatible(&c.Prefill.Instance, &c.Decode.Instance); diff != nil {
					t.Fatal(diff)
				}
				if rnd.IntN(3) == 0 {
					i := rnd.IntN(len(held))
					held[i].EndDecode()
					held[i].EndDecode()
					if rnd.IntN(2) == 0 {
						held[i].EndPrefill()
					}
				}
			}
		}
		for _, c := range held {
			end(c)
		}
		for id, epoch := range ids {
			for e := uint64(1); e <= epoch; e++ {
				if l := p.Loads(id, e); l != (pick.Loads{}) {
					t.Fatalf("%s holds %+v", id, l)
				}
			}
		}
	}
}

func randomFleet(rnd *rand.Rand, version uint64, ids map[string]uint64) *fleet.Snapshot {
	var ms []fleet.Member
	for i := range 30 {
		id := fmt.Sprintf("w%d", i)
		if rnd.IntN(4) == 0 {
			continue
		}
		if rnd.IntN(3) == 0 {
			ids[id]++
		}
		ids[id] = max(ids[id], 1)
		role := fleet.Prefill
		if i%2 == 0 {
			role = fleet.Decode
		}
		ms = append(ms, member(id, role, func(m *fleet.Member) {
			m.Epoch = ids[id]
			m.State = []fleet.State{fleet.Live, fleet.Live, fleet.Live, fleet.Suspect, fleet.Dead}[rnd.IntN(5)]
			m.Draining = rnd.IntN(8) == 0
			m.Numerics = []string{"a", "a", "b"}[rnd.IntN(3)]
			m.ProtocolMin, m.ProtocolMax = 1, 1+rnd.IntN(2)
			m.Load.QueuedTokens = rnd.IntN(1000)
		}))
	}
	return fleet.NewSnapshot(version, time.Time{}, ms)
}

// TestIndexBudget: the prefix index stays within its budget and forgets the
// oldest first.
func TestIndexBudget(t *testing.T) {
	p, s := newPicker(pick.Prefix), fleetOf(1, 1)
	system := strings.Repeat("s", 2048)
	for i := range 3000 {
		text := system + strings.Repeat(fmt.Sprintf("%d,", i), 4000)
		end(mustPick(t, p, s, pick.Request{Chain: pick.NewChain([]byte(text))}))
		if b := p.AffinityBytes(); b > 1<<20 {
			t.Fatalf("%d bytes", b)
		}
	}
	c := mustPick(t, p, s, pick.Request{Chain: pick.NewChain([]byte(system)), Explain: true})
	if c.Explain.Prefill[0].Match != 1 {
		t.Errorf("the shared prefix was forgotten: %+v", c.Explain.Prefill)
	}
}

func TestValidate(t *testing.T) {
	f := func(want string, change func(c *pick.Config)) {
		t.Helper()
		c := pick.DefaultConfig()
		change(&c)
		err := c.Validate()
		if want == "" && err != nil || want != "" && (err == nil || !strings.HasPrefix(err.Error()+": ", want+": ")) {
			t.Errorf("%+v: %v, want %q", c, err, want)
		}
	}
	f("", func(c *pick.Config) {})
	for _, policy := range pick.Policies {
		f("", func(c *pick.Config) { c.Policy = policy })
	}
	f("policy", func(c *pick.Config) { c.Policy = "best" })
	f("", func(c *pick.Config) { c.AffinityBytes, c.SlowStart, c.LocalMaxTokens, c.TopologyLevel = 0, 0, 0, 0 })
	f("affinity_bytes", func(c *pick.Config) { c.AffinityBytes = -1 })
	f("slow_start", func(c *pick.Config) { c.SlowStart = -1 })
	f("", func(c *pick.Config) { c.TopologyLevel = 8 })
	f("topology_level: 9 is not in 0..8", func(c *pick.Config) { c.TopologyLevel = 9 })
	f("topology_level", func(c *pick.Config) { c.TopologyLevel = -1 })
	f("", func(c *pick.Config) { c.Disaggregate = pick.ByCost })
	f("disaggregate", func(c *pick.Config) { c.Disaggregate = "never" })
	f("local_max_tokens", func(c *pick.Config) { c.LocalMaxTokens = -1 })
}

func BenchmarkPick(b *testing.B) {
	for _, n := range []int{2, 16, 1000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			p, s := newPicker(pick.Prefix), fleetOf(n, n)
			text := []byte(strings.Repeat("All happy families are alike. ", 60))
			b.ReportAllocs()
			for b.Loop() {
				req := pick.Request{Model: "m", Tokens: 450, Chain: pick.NewChain(text)}
				c, err := p.Pick(pick.View{Snapshot: s}, &req)
				if err != nil {
					b.Fatal(err)
				}
				end(c)
			}
		})
	}
}
