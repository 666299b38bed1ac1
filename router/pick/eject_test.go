package pick_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router/pick"
)

// window sends a request after the other for one interval; fate tells how each
// goes at its decode worker: whether it fails, and its time to the first token.
func (l *lab) window(requests int, fate func(id string) (fails bool, took time.Duration)) (used map[string]int) {
	l.t.Helper()
	used = map[string]int{}
	for range requests {
		c := l.pick()
		used[c.Decode.ID]++
		fails, took := fate(c.Decode.ID)
		if fails {
			l.bad(c, fleet.Decode)
			continue
		}
		c.DonePrefill()
		c.Answered(time.Millisecond, time.Millisecond+took)
		c.Paced(took / 10)
		c.EndDecode()
	}
	l.now = l.now.Add(5 * time.Second)
	l.p.Judge(l.now)
	return used
}

// ejecting has no breakers, which would be faster.
func ejecting(mode string) func(*pick.Config) {
	return func(c *pick.Config) { c.Breaker.Failures, c.Ejection.Mode = 0, mode }
}

// TestEjectErrors: a worker that fails more than its peers for three windows is ejected,
// twice as long the next time, and comes back slowly.
func TestEjectErrors(t *testing.T) {
	rnd := rand.New(rand.NewPCG(3, 4))
	l := newLab(t, fleetOf(2, 4), ejecting(pick.EjectErrors))
	sick := true
	fate := func(id string) (bool, time.Duration) {
		if id == "d2" && sick {
			return rnd.IntN(2) == 0, time.Millisecond
		}
		return rnd.IntN(20) == 0, time.Millisecond
	}
	for w := range 3 {
		l.want("d2", pick.Closed)
		if used := l.window(400, fate); used["d2"] < 50 {
			t.Fatalf("window %d: %v", w, used)
		}
	}
	l.want("d2", pick.Ejected)
	if used := l.window(100, fate); used["d2"] != 0 {
		t.Errorf("the ejected got %v", used)
	}
	first := l.p.Guard("d2", 1)
	var fails, peers int
	if n, err := fmt.Sscanf(first.Why, "%d%% of its requests fail, of its peers' %d%%", &fails, &peers); n != 2 || fails < 30 || peers > 20 {
		t.Errorf("it is out because %s, %v", first.Why, err)
	}
	l.now = *first.Until
	for range 3 {
		l.window(400, fate)
	}
	if second := l.p.Guard("d2", 1); second.State != pick.Ejected || second.Until.Sub(l.now) != 2*15*time.Second {
		t.Errorf("%+v", second)
	}
	sick = false
	l.now = l.now.Add(time.Minute)
	for range 6 {
		l.window(400, fate)
	}
	for i := range 4 {
		l.want(fmt.Sprintf("d%d", i), pick.Closed)
	}
}

// TestEjectStrikes: only bad windows in a row count. A good one resets the count, and so
// does coming back; a worker that has been well for the longest time is out for the
// shortest again.
func TestEjectStrikes(t *testing.T) {
	l := newLab(t, fleetOf(1, 3), ejecting(pick.EjectErrors))
	window := func(sick bool) {
		l.t.Helper()
		l.window(60, func(id string) (bool, time.Duration) { return sick && id == "d1", time.Millisecond })
	}
	cfg := pick.DefaultEjection()
	out := func(want time.Duration) {
		t.Helper()
		for range 4 {
			window(true)
			window(true)
			l.want("d1", pick.Closed)
			window(false)
			l.want("d1", pick.Closed)
		}
		window(true)
		window(true)
		l.want("d1", pick.Closed)
		window(true)
		l.want("d1", pick.Ejected)
		g := l.p.Guard("d1", 1)
		if g.Until == nil || g.Until.Sub(l.now) != want {
			t.Fatalf("out for %+v, want %v", g, want)
		}
		l.now = *g.Until
		window(false)
		l.want("d1", pick.Closed)
	}
	out(cfg.Time)
	out(2 * cfg.Time)
	l.now = l.now.Add(cfg.MaxTime)
	out(cfg.Time)
}

// TestEjectSlow: slow workers are ejected only if the configuration says so, and by how
// far they are from their peers.
func TestEjectSlow(t *testing.T) {
	run := func(mode string, times ...time.Duration) *lab {
		rnd := rand.New(rand.NewPCG(5, 6))
		l := newLab(t, fleetOf(1, len(times)), ejecting(mode))
		for range 5 {
			l.window(100*len(times), func(id string) (bool, time.Duration) {
				var i int
				fmt.Sscanf(id, "d%d", &i)
				return false, time.Duration(float64(times[i]) * (0.9 + 0.2*rnd.Float64()))
			})
		}
		return l
	}
	const ms = time.Millisecond
	run(pick.EjectErrors, 10*ms, 10*ms, 10*ms, 90*ms).want("d3", pick.Closed)
	run(pick.EjectAll, 10*ms, 10*ms, 10*ms, 90*ms).want("d0", pick.Closed, "d3", pick.Ejected)
	run(pick.EjectAll, 10*ms, 11*ms, 12*ms, 13*ms).want("d3", pick.Closed)
	run(pick.EjectAll, 10*ms, 10*ms, 10*ms, 13*ms).want("d3", pick.Closed) // not by enough to matter
	run(pick.EjectAll, 10*ms, 20*ms, 40*ms, 80*ms).want("d3", pick.Closed) // a mixed fleet
}

// TestEjectShare: never more than the share, never all, never the last one, and nobody if
// all are equally bad.
func TestEjectShare(t *testing.T) {
	for size := 1; size <= 6; size++ {
		l := newLab(t, fleetOf(1, size), ejecting(pick.EjectErrors))
		for range 30 {
			l.window(40*size, func(id string) (bool, time.Duration) { return id != "d0", time.Millisecond })
			_, out := l.p.Guarded()
			if most := max(int(0.34*float64(size)), 1); out > most || out >= size {
				t.Fatalf("%d of %d are out", out, size)
			}
		}
		l = newLab(t, fleetOf(1, size), ejecting(pick.EjectErrors))
		for range 10 {
			l.window(40*size, func(string) (bool, time.Duration) { return true, time.Millisecond })
		}
		if _, out := l.p.Guarded(); out != 0 {
			t.Errorf("%d of %d equals are out", out, size)
		}
	}
}

// TestEjectWorst: of two outliers the worse goes, whichever comes first.
func TestEjectWorst(t *testing.T) {
	for worse, other := range map[string]string{"d1": "d6", "d6": "d1"} {
		l, n := newLab(t, fleetOf(1, 8), ejecting(pick.EjectErrors)), 0
		for range 3 {
			l.window(800, func(id string) (bool, time.Duration) {
				if id == other {
					n++
				}
				return id == worse || id == other && n%2 == 0, time.Millisecond
			})
		}
		l.want(worse, pick.Ejected, other, pick.Closed)
	}
}

// TestEjectLast: when the others are gone the ejected one serves.
func TestEjectLast(t *testing.T) {
	l := newLab(t, fleetOf(1, 2), ejecting(pick.EjectErrors))
	for range 3 {
		l.window(100, func(id string) (bool, time.Duration) { return id == "d1", time.Millisecond })
	}
	l.want("d1", pick.Ejected)
	l.s = fleet.NewSnapshot(2, time.Time{}, []fleet.Member{member("p0", fleet.Prefill), member("d1", fleet.Decode)})
	if c := l.pick(); c.Decode.ID != "d1" {
		t.Errorf("%s", c.Decode.ID)
	}
	l.want("d1", pick.Closed)
}

// TestEjectUnknownPeers: a worker whose peers had too few requests is compared with nobody.
func TestEjectUnknownPeers(t *testing.T) {
	l := newLab(t, fleetOf(1, 3), ejecting(pick.EjectErrors))
	for range 5 {
		for range 100 {
			l.bad(l.pick(func(r *pick.Request) { r.Exclude = []string{"d0", "d2"} }), fleet.Decode)
		}
		l.now = l.now.Add(5 * time.Second)
		l.p.Judge(l.now)
	}
	l.want("d1", pick.Closed)
}

// TestEjectOff: nothing is compared.
func TestEjectOff(t *testing.T) {
	l := newLab(t, fleetOf(1, 3), ejecting(pick.EjectOff))
	for range 10 {
		l.window(100, func(id string) (bool, time.Duration) { return id == "d1", time.Millisecond })
	}
	l.want("d1", pick.Closed)
}

// TestEjectMany: a large class is compared as a whole, and the one bad worker is ejected.
func TestEjectMany(t *testing.T) {
	l := newLab(t, fleetOf(1, 60), ejecting(pick.EjectErrors))
	for range 4 {
		l.window(60*10, func(id string) (bool, time.Duration) { return id == "d17", time.Millisecond })
	}
	l.want("d17", pick.Ejected, "d16", pick.Closed)
	if _, out := l.p.Guarded(); out != 1 {
		t.Errorf("%d are out", out)
	}
}

func TestGuardConfig(t *testing.T) {
	for want, edit := range map[string]func(*pick.Config){
		"breaker.failures":    func(c *pick.Config) { c.Breaker.Failures = -1 },
		"breaker.open":        func(c *pick.Config) { c.Breaker.Open = 0 },
		"breaker.max_open":    func(c *pick.Config) { c.Breaker.MaxOpen = time.Millisecond },
		"ejection.mode":       func(c *pick.Config) { c.Ejection.Mode = "some" },
		"ejection.interval":   func(c *pick.Config) { c.Ejection.Interval = 0 },
		"ejection.windows":    func(c *pick.Config) { c.Ejection.Windows = 0 },
		"ejection.deviations": func(c *pick.Config) { c.Ejection.Deviations = 0 },
		"ejection.max_share":  func(c *pick.Config) { c.Ejection.MaxShare = 1 },
		"ejection.time":       func(c *pick.Config) { c.Ejection.Time = 0 },
		"ejection.max_time":   func(c *pick.Config) { c.Ejection.MaxTime = time.Millisecond },
	} {
		c := pick.DefaultConfig()
		edit(&c)
		keyed, ok := c.Validate().(interface{ ConfigKey() string })
		if !ok || keyed.ConfigKey() != want {
			t.Errorf("%s: %v", want, c.Validate())
		}
	}
}
