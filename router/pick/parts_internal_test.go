package pick

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
)

// TestFit: a line goes through what was seen, lately seen points weigh more, and neither its base
// nor its rate is below zero.
func TestFit(t *testing.T) {
	f := func(what string, points [][2]float64, a, b float64) {
		t.Helper()
		var l line
		for _, p := range points {
			l.add(p[0], p[1])
		}
		gotA, gotB := l.fit()
		if math.Abs(gotA-a) > 1e-9 || math.Abs(gotB-b) > 1e-9 || math.Abs(l.at(7)-(a+7*b)) > 1e-9 || l.n != len(points) {
			t.Errorf("%s: %v + %v·x, want %v + %v·x", what, gotA, gotB, a, b)
		}
	}
	f("nothing", nil, guessBase, guessRate)
	f("a line", [][2]float64{{0, 3}, {10, 5}, {20, 7}, {5, 4}}, 3, 0.2)
	f("one point", [][2]float64{{10, 5}}, 0, 0.5)
	f("one place", [][2]float64{{10, 5}, {10, 5}, {10, 5}}, 0, 0.5)
	f("no work", [][2]float64{{0, 5}, {0, 5}}, 5, 0)
	f("falls", [][2]float64{{0, 4}, {10, 4}, {20, 4}, {0, 4}}, 4, 0)
	f("through less than nothing", [][2]float64{{10, 1}, {20, 12}}, 0, (10*forget+240)/(100*forget+400))
	var falling, fading line
	falling.add(0, 9)
	falling.add(10, 1)
	if a, b := falling.fit(); b != 0 || math.Abs(a-(9*forget+1)/(forget+1)) > 1e-9 {
		t.Errorf("more work takes less time: %v + %v·x", a, b)
	}
	for range 100 {
		fading.add(1, 8)
	}
	for range 100 {
		fading.add(1, 2)
	}
	if y := fading.at(1); y < 2 || y > 3 {
		t.Errorf("after 100 points at 2: %v", y)
	}
}

// TestTook: a time to the first token is compared once the class's line is known well enough.
func TestTook(t *testing.T) {
	for _, c := range []struct {
		points int
		usual  float64
		took   time.Duration
		n      int
	}{{0, 2, 4 * time.Second, 0}, {enough - 1, 2, 4 * time.Second, 0}, {enough, 2, 4 * time.Second, 1}, {enough + 1, 2, time.Second, 1}, {enough, 0.01, time.Second, 1}, {enough, 2, 1, 1}, {enough, 2, 0, 0}, {enough, 2, -1, 0}, {enough, 0, time.Second, 0}} {
		var l line
		for range c.points {
			l.add(1, c.usual)
		}
		n := &node{}
		n.took(&l, 1, c.took)
		want := measure{n: c.n}
		if c.n > 0 {
			want.sum = math.Log(c.took.Seconds() / c.usual)
		}
		if got := n.guard.measures[measureLate]; got.n != want.n || math.Abs(got.sum-want.sum) > 1e-9 {
			t.Errorf("%+v: %+v, want %+v", c, got, want)
		}
	}
}

// TestRoll: a window closes with the mean of what is in it, once there is enough.
func TestRoll(t *testing.T) {
	now := time.Unix(1, 0)
	for n, closed := range map[int]bool{0: false, fewest - 1: false, fewest: true, fewest + 1: true} {
		var m measure
		for range n {
			m.add(3)
		}
		m.roll(now)
		want := measure{sum: 3 * float64(n), n: n}
		if closed {
			want = measure{value: 3, at: now}
		}
		if m != want {
			t.Errorf("%d: %+v, want %+v", n, m, want)
		}
	}
}

// TestMember: a node's member is found also where the fleet's order is another by now, and no
// other process is taken for it.
func TestMember(t *testing.T) {
	s := &scorer{snap: fleet.NewSnapshot(1, time.Time{}, []fleet.Member{{Instance: fleet.Instance{ID: "a", Epoch: 1}}, {Instance: fleet.Instance{ID: "b", Epoch: 1}}})}
	for _, key := range []nodeKey{{"a", 1}, {"b", 1}, {"a", 2}, {"c", 1}} {
		for at := range 4 {
			n := &node{key: key}
			n.at.Store(int32(at))
			m := s.member(n)
			if known := key.epoch == 1 && key.id != "c"; (m != nil) != known || known && m.ID != key.id {
				t.Errorf("%+v at %d: %+v", key, at, m)
			}
		}
	}
}

// TestTime: a node's own line counts once it knows enough, or no less than its class's.
func TestTime(t *testing.T) {
	c := &class{}
	a, b := &node{class: c}, &node{class: c}
	for i := 1; i <= 20; i++ {
		b.learn(lineDecode, 1, 2*time.Second, false)
		if i < enough {
			a.learn(lineDecode, 1, 6*time.Second, false)
			if got := a.time(lineDecode, 1); got <= 2 || got >= 6 {
				t.Errorf("%d points of its own: %v", i, got)
			}
		}
	}
	a.learn(lineDecode, 1, 6*time.Second, false)
	if got := a.time(lineDecode, 1); math.Abs(got-6) > 1e-9 {
		t.Errorf("with enough of its own: %v", got)
	}
	a.learn(lineDecode, 1, -1, false)
	(&node{}).learn(lineDecode, 1, 1, false) // it has left: nobody learns
	if a.lines[lineDecode].n != enough || c.lines[lineDecode].n != 20+enough || a.lines[linePrefill].n != 0 {
		t.Errorf("%d points of %d", a.lines[lineDecode].n, c.lines[lineDecode].n)
	}
	first := &node{class: &class{}}
	first.learn(lineLocal, 2, 4*time.Second, false)
	if got := first.time(lineLocal, 1); math.Abs(got-2) > 1e-9 {
		t.Errorf("all that its class knows is its own: %v", got)
	}
	moved := &node{class: c} // from another class, with its line
	for range 3 {
		moved.lines[lineDecode].add(1, 6)
		first.class.lines[lineDecode].add(1, 2)
	}
	moved.class = first.class
	if got := moved.time(lineDecode, 1); math.Abs(got-6) > 1e-9 {
		t.Errorf("its class knows no more than it does: %v", got)
	}
}

// TestPlaces: zones, labels and distances of topologies.
func TestPlaces(t *testing.T) {
	for _, c := range []struct {
		at   string
		n    int
		want string
	}{
		{"a/b/c", 0, ""}, {"a/b/c", 1, "a"}, {"a/b/c", 2, "a/b"}, {"a/b/c", 3, "a/b/c"}, {"a/b/c", 4, "a/b/c"}, {"", 2, ""}, {"a", 1, "a"},
	} {
		if got := zone(c.at, c.n); got != c.want {
			t.Errorf("zone %d of %q: %q, want %q", c.n, c.at, got, c.want)
		}
	}
	long := "1/2/3/4/5/6/7/8"
	for _, c := range []struct {
		a, b string
		want int
	}{
		{"", "", 0}, {"a", "", 0}, {"", "a", 0}, {"a", "a", 0}, {"a", "b", 1}, {"a/b", "a/b", 0}, {"a/b", "a/c", 1}, {"a/b", "c/b", 2}, {"a", "a/b", 0},
		{"a/b/c", "x", 3}, {"x", "a/b/c", 3}, {long, long, 0}, {long + "/9", long + "/10", 0}, {"x/" + long, "y/" + long, 8}, {"1/2/3/4/5/6/7/x/y", "1/2/3/4/5/6/7/z/w", 1},
	} {
		if got := distance(c.a, c.b); got != c.want {
			t.Errorf("%q to %q: %d, want %d", c.a, c.b, got, c.want)
		}
	}
}

// TestChainBlocks: blocks grow with the position, and only whole ones count.
func TestChainBlocks(t *testing.T) {
	for _, c := range [][2]int{{0, 0}, {255, 0}, {256, 1}, {511, 1}, {512, 2}, {16 << 10, 64}, {16<<10 + 1023, 64}, {17 << 10, 65}, {128 << 10, 64 + 112}, {128<<10 + 4095, 64 + 112}, {132 << 10, 64 + 113}} {
		chain := NewChain(make([]byte, c[0]))
		if len(chain.hashes) != c[1] || chain.length != c[0] {
			t.Errorf("%d bytes: %d blocks of %d, want %d", c[0], len(chain.hashes), chain.length, c[1])
		}
	}
	text := make([]byte, 512)
	was := NewChain(text).hashes
	for i := range text {
		text[i] ^= 1
		if got := NewChain(text).hashes; got[0] == was[0] != (i >= 256) || got[1] == was[1] {
			t.Errorf("of two texts that differ at %d: %x and %x", i, was, got)
		}
		text[i] ^= 1
	}
	a, b := NewChain(make([]byte, 256), "ab", "c"), NewChain(make([]byte, 256), "a", "bc")
	if a.hashes[0] == b.hashes[0] {
		t.Error("what separates chains runs together")
	}
}

// TestUsed: a pool is as full as it reports, or as what was sent there; of unknown size, as it
// reports.
func TestUsed(t *testing.T) {
	m := &fleet.Member{Instance: fleet.Instance{Blocks: 10}}
	m.Layout.BlockTokens = 10
	n := &node{own: Loads{KV: 30}, others: Loads{KV: 20}}
	for reported, want := range map[float64]float64{0: 0.5, 0.4: 0.5, 0.7: 0.7} {
		m.Load.KVUsed = reported
		if got := used(n, m); got != want {
			t.Errorf("reported %v: %v, want %v", reported, got, want)
		}
	}
	m.Blocks, m.Load.KVUsed = 0, 0.3
	if got := used(n, m); got != 0.3 {
		t.Errorf("of unknown size: %v", got)
	}
}

// sound checks that what a picker counts and keeps of its workers agrees.
func sound(p *Picker) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	known := 0
	for _, c := range p.classes {
		legs, listed := 0, 0
		for i, n := range c.nodes {
			legs += n.legsAll()
			if n.class != c || n.slot != i || p.nodes[n.key] != n {
				return fmt.Errorf("%s is not where it says", n.key.id)
			}
			if n.named && p.named[n.key.id] != n {
				return fmt.Errorf("%s is not known by its name", n.key.id)
			}
		}
		for n := c.root.next; n != &c.root; n = n.next {
			if listed++; n.next.prev != n || n.class != c {
				return fmt.Errorf("the order of use is broken at %s", n.key.id)
			}
		}
		known += len(c.nodes)
		if legs != c.legs || listed != len(c.nodes) || len(c.ring) != len(c.nodes) || !slices.IsSortedFunc(c.ring, func(a, b *node) int { return cmp.Compare(a.point, b.point) }) {
			return fmt.Errorf("%d legs, counted %d; of %d members %d are in the order of use and %d on the ring", legs, c.legs, len(c.nodes), listed, len(c.ring))
		}
	}
	for id, n := range p.named {
		if n.key.id != id || p.nodes[n.key] != n {
			return fmt.Errorf("the name %s is kept of one that has gone", id)
		}
	}
	for _, n := range p.nodes {
		if n.class != nil {
			known--
		}
		if n.own.Legs < 0 || n.own.Tokens < 0 || n.own.Seqs < 0 || n.own.KV < 0 {
			return fmt.Errorf("%s has %+v", n.key.id, n.own)
		}
	}
	if known != 0 {
		return fmt.Errorf("%d members of classes are not known", known)
	}
	return nil
}

// TestSound: whatever comes, goes, is chosen, ends, and is told by other routers, what is counted
// agrees.
func TestSound(t *testing.T) {
	for seed := range uint64(len(Policies)) {
		rnd := rand.New(rand.NewPCG(seed, 8))
		p := New(Config{Policy: Policies[seed], AffinityBytes: 1 << 16}, rnd)
		var held []*Choice
		for version := range uint64(40) {
			var list []fleet.Member
			for i := range 20 {
				m := fleet.Member{State: fleet.Live, Instance: fleet.Instance{ID: fmt.Sprint("w", i), Epoch: 1 + version/10*uint64(i%2), Role: fleet.Prefill, Model: "m"}}
				if i%3 > 0 {
					m.Role = fleet.Decode
				}
				if i%5 == 0 {
					m.Source = fleet.Static
				}
				m.Draining, m.Numerics = rnd.IntN(6) == 0, []string{"a", "a", "b"}[rnd.IntN(3)]
				if rnd.IntN(8) > 0 {
					list = append(list, m)
				}
			}
			v := View{Snapshot: fleet.NewSnapshot(version+1, time.Time{}, list)}
			for range 20 {
				if c, err := p.Pick(v, &Request{Model: "m", Tokens: rnd.IntN(500), Seqs: rnd.IntN(3), Session: fmt.Sprint(rnd.IntN(9))}); err == nil {
					held = append(held, c)
				}
				if n := len(held); n > 0 && rnd.IntN(3) > 0 {
					i := rnd.IntN(n)
					held[i].EndPrefill()
					held[i].EndDecode()
					held = slices.Delete(held, i, i+1)
				}
				if rnd.IntN(4) == 0 {
					p.SetOthers([]WorkerLoad{{ID: fmt.Sprint("w", rnd.IntN(22)), Epoch: uint64(rnd.IntN(3)), Loads: Loads{Legs: rnd.IntN(9), Seqs: rnd.IntN(9)}}})
				}
				if err := sound(p); err != nil {
					t.Fatalf("%s, version %d: %v", Policies[seed], version, err)
				}
			}
		}
	}
}

// TestDoubled: a time doubled again and again, up to the most, however often.
func TestDoubled(t *testing.T) {
	for _, c := range []struct {
		d    time.Duration
		n    int
		most time.Duration
		want time.Duration
	}{
		{5, 0, 40, 5}, {5, 1, 40, 10}, {5, 3, 40, 40}, {5, 4, 40, 40}, {5, 100, 40, 40}, {5, 2, 39, 20}, {5, 3, 39, 39}, {5, 0, 5, 5}, {2, 61, 1 << 62, 1 << 62}, {2, 70, 1 << 62, 1 << 62}, {1, 62, 1 << 62, 1 << 62}, {1, 63, 1 << 62, 1 << 62}, {1, 64, 1 << 62, 1 << 62},
	} {
		if got := doubled(c.d, c.n, c.most); got != c.want {
			t.Errorf("%+v: %d", c, got)
		}
	}
	for _, c := range []struct {
		v    []float64
		want float64
	}{{[]float64{3}, 3}, {[]float64{4, 2}, 3}, {[]float64{9, 1, 5}, 5}, {[]float64{8, 1, 2, 4}, 3}} {
		if got := middle(c.v); got != c.want {
			t.Errorf("the median of %v is %v", c.v, got)
		}
	}
}

// TestOlder: a table is older than a view with a later fleet, or with another set of members that
// pass; what only lags behind makes nobody begin anew.
func TestOlder(t *testing.T) {
	var none *table
	for _, c := range []struct {
		t                   *table
		version, generation uint64
		behind, want        bool
	}{
		{none, 0, 0, false, true}, {none, 0, 0, true, true},
		{&table{version: 5, generation: 5}, 6, 4, true, true}, {&table{version: 5, generation: 5}, 4, 6, false, false},
		{&table{version: 5, generation: 5}, 5, 5, false, false}, {&table{version: 5, generation: 5}, 5, 6, true, true},
		{&table{version: 5, generation: 5}, 5, 4, true, false}, {&table{version: 5, generation: 5}, 5, 4, false, true},
	} {
		if got := c.t.older(View{Snapshot: &fleet.Snapshot{Version: c.version}, Generation: c.generation, Behind: c.behind}); got != c.want {
			t.Errorf("%+v: %t", c, got)
		}
	}
}

// TestIndex: of too many prefixes, the one whose last use is longest ago is forgotten.
func TestIndex(t *testing.T) {
	x, n := newIndex(240), &node{} // three of 80 bytes
	for i, c := range []struct {
		put   uint64
		known []uint64
	}{{1, []uint64{1}}, {2, []uint64{1, 2}}, {3, []uint64{1, 2, 3}}, {1, []uint64{1, 2, 3}}, {4, []uint64{1, 3, 4}}, {5, []uint64{1, 4, 5}},
		{4, []uint64{1, 4, 5}}, {4, []uint64{1, 4, 5}}, {6, []uint64{4, 5, 6}}, {5, []uint64{4, 5, 6}}, {7, []uint64{5, 6, 7}}} {
		x.put(Chain{hashes: []uint64{c.put}, length: 256}, n, n)
		if known := slices.Sorted(maps.Keys(x.slots)); !slices.Equal(known, c.known) {
			t.Fatalf("%d: after %d: %v, want %v", i, c.put, known, c.known)
		}
	}
}

// TestOutliers: what is said of a worker that does worse than its peers.
func TestOutliers(t *testing.T) {
	for measure, want := range map[int]string{measureErrors: "50% of its requests fail, of its peers' 20%", measureLate: "its first tokens take 1.3 times as long as its peers'", measureSlow: "its tokens take 1.3 times as long as its peers'"} {
		if got := outliers[measure].why(0.5, 0.2); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// TestEventsBounded: of changes that nobody fetches the oldest go.
func TestEventsBounded(t *testing.T) {
	p := New(Config{}, nil)
	for i := range maxEvents + 3 {
		p.guardTo(&node{key: nodeKey{id: fmt.Sprint(i)}}, Open, time.Time{}, "")
	}
	if list, _ := p.Events(); len(list) != 1024 || list[0].ID != "3" || list[1023].ID != "1026" {
		t.Errorf("%d events, from %s on", len(list), list[0].ID)
	}
	if list, _ := p.Events(); len(list) > 0 {
		t.Errorf("%d come twice", len(list))
	}
}
