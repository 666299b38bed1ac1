package pick

import (
	"math"
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
