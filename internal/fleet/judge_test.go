package fleet

import (
	"fmt"
	"slices"
	"testing"
	"time"
)

// TestJudge: when silence makes a member unheard, suspect and dead: by what NATS hears, and by
// probes unless it owes a word over NATS.
func TestJudge(t *testing.T) {
	const tick = time.Nanosecond
	for _, c := range []struct {
		heard, proof time.Duration // ago; proof 0 is none
		owes         bool
		want         State
	}{
		{0, 0, false, Live}, {suspectAfter, 0, false, Live}, {suspectAfter + tick, 0, false, Suspect}, {deadAfter, 0, false, Suspect}, {deadAfter + tick, 0, false, Dead},
		{suspectAfter, suspectAfter / 2, false, Live}, {suspectAfter + tick, suspectAfter / 2, false, Unheard}, {10 * deadAfter, tick, false, Unheard},
		{10 * deadAfter, suspectAfter + answerTime, false, Unheard}, {10 * deadAfter, suspectAfter + answerTime + tick, false, Suspect}, {10 * deadAfter, deadAfter, false, Suspect}, {10 * deadAfter, deadAfter + tick, false, Dead},
		{suspectAfter + tick, 2 * suspectAfter, false, Suspect}, // an older proof says nothing
		{suspectAfter + tick, suspectAfter + tick, false, Suspect}, {suspectAfter + tick, suspectAfter, false, Unheard}, {suspectAfter + 2*tick, suspectAfter + tick, false, Unheard},
		{suspectAfter + tick, tick, true, Suspect}, {10 * deadAfter, tick, true, Dead}, {suspectAfter, tick, true, Live},
	} {
		now := time.Unix(1e6, 0)
		r := newRegistry(0, 9, now)
		r.announce(worker("a", 1), NATS, now)
		rec := r.members["a"]
		r.witnessed = time.Hour
		if rec.heard, rec.owes = r.witnessed-c.heard, c.owes; c.proof > 0 {
			rec.proof = r.witnessed - c.proof
		}
		version := r.version
		r.judge(rec, now)
		if rec.State != c.want || (r.version != version) != (c.want != Live) {
			t.Errorf("%+v: %s (%s), changed %t", c, rec.State, rec.Reason, r.version != version)
		}
	}
}

// TestDeafness: after each reported death signs of life are ignored for twice as long, up to eight
// times, and the first time again after a quiet while.
func TestDeafness(t *testing.T) {
	now := time.Unix(1e6, 0)
	r := newRegistry(0, 9, now)
	r.announce(worker("a", 1), NATS, now)
	for i, want := range []time.Duration{1, 2, 4, 8, 8, 8, -1, 1, 2} {
		if want < 0 { // it lives without a report
			now = now.Add(forgetAfter + time.Millisecond)
			continue
		}
		r.reportDead("a", 1, "EOF", now)
		r.reportDead("a", 1, "again", now) // it is dead already
		now = now.Add(want*suspectAfter - 1)
		if r.reportAlive("a", 1, now) || r.members["a"].State != Dead || r.members["a"].Reason != "EOF" {
			t.Errorf("report %d: %s (%s) before its time", i, r.members["a"].State, r.members["a"].Reason)
		}
		now = now.Add(1)
		if r.reportAlive("a", 2, now) || r.reportAlive("b", 1, now) || !r.reportAlive("a", 1, now) || r.members["a"].State != Live {
			t.Errorf("report %d: %s after %v", i, r.members["a"].State, want*suspectAfter)
		}
	}
}

// TestOlderEpochs: what a process of an older epoch sends is no sign of life of the younger one.
func TestOlderEpochs(t *testing.T) {
	for _, older := range []uint64{1, 6, 7} {
		c := newClock(t, 10)
		young, old := worker("a", 8), worker("a", older)
		c.announce(young)
		for range 20 {
			c.run(100 * time.Millisecond)
			if ask := c.beat(old); ask != "" {
				t.Errorf("epoch %d: asks %q", older, ask)
			}
			c.bye(old)
			c.announce(old)
		}
		c.want("a", Suspect)
		if c.r.members["a"].Epoch != 8 {
			t.Errorf("epoch %d took its place", c.r.members["a"].Epoch)
		}
	}
}

// TestForgotten: members that have ended are kept for a minute, counted from the last that was seen
// of them, and who was asked for as long as it may answer.
func TestForgotten(t *testing.T) {
	now := time.Unix(1e6, 0)
	r := newRegistry(0, 9, now)
	for _, id := range []string{"dead", "gone", "live"} {
		r.announce(worker(id, 1), NATS, now)
	}
	r.announce(worker("static", 1), Static, now)
	r.reportDead("dead", 1, "EOF", now)
	r.reportDead("static", 1, "EOF", now)
	r.bye(&beat{ID: "gone", Epoch: 1}, now)
	r.unknown("asked", now)
	f := func(after time.Duration, asked bool, want ...string) {
		t.Helper()
		r.tick(now.Add(after))
		var have []string
		for id := range r.members {
			have = append(have, id)
		}
		slices.Sort(have)
		if _, ok := r.asked["asked"]; !slices.Equal(have, want) || ok != asked {
			t.Errorf("after %v: %v, asked %t", after, have, ok)
		}
	}
	f(deadAfter, true, "dead", "gone", "live", "static")
	f(deadAfter+1, false, "dead", "gone", "live", "static")
	f(forgetAfter, false, "dead", "gone", "live", "static")
	r.members["gone"].seen = now.Add(1)
	f(forgetAfter+1, false, "gone", "live", "static")
	f(forgetAfter+2, false, "live", "static")
	r.unknown("x", now)
	if r.unknown("x", now.Add(suspectAfter-1)) != "" || r.unknown("x", now.Add(suspectAfter)) != "x" {
		t.Error("asked at another time")
	}
}

// TestWhoLeft: whether a reported death was a proper exit, and from when on that is settled.
func TestWhoLeft(t *testing.T) {
	now := time.Unix(1e6, 0)
	for name, c := range map[string]struct {
		change        func(r *registry, rec *record)
		draining      bool
		after         time.Duration
		left, settled bool
	}{
		"draining":           {func(*registry, *record) {}, true, 0, true, true},
		"said goodbye":       {func(_ *registry, rec *record) { rec.State = Gone }, false, 0, true, true},
		"another's goodbye":  {func(_ *registry, rec *record) { rec.State, rec.Epoch = Gone, 2 }, false, 0, false, false},
		"not yet":            {func(*registry, *record) {}, false, echoPatience - 1, false, false},
		"no longer":          {func(*registry, *record) {}, false, echoPatience, false, true},
		"an echo came later": {func(r *registry, _ *record) { r.proved = now.Add(1) }, false, 0, false, true},
		"an echo came then":  {func(r *registry, _ *record) { r.proved = now }, false, 0, false, false},
		"no link":            {func(r *registry, _ *record) { r.link.Up = false }, false, 0, false, true},
		"static":             {func(_ *registry, rec *record) { rec.Source = Static }, false, 0, false, true},
		"forgotten":          {func(r *registry, rec *record) { r.forget(rec) }, false, 0, false, true},
	} {
		r := newRegistry(0, 9, now.Add(-time.Second))
		r.link.Up = true
		r.announce(worker("a", 1), NATS, now)
		c.change(r, r.members["a"])
		if left, settled := r.left(&event{id: "a", epoch: 1, draining: c.draining}, now, now.Add(c.after)); left != c.left || settled != c.settled {
			t.Errorf("%s: left %t, settled %t", name, left, settled)
		}
	}
}

// TestDoubtsBounds: who is probed, how often and how many at a time.
func TestDoubtsBounds(t *testing.T) {
	now := time.Unix(1e6, 0)
	r := newRegistry(0, 9, now)
	r.link.Up = true
	for _, id := range []string{"a", "b", "c"} {
		r.announce(worker(id, 1), NATS, now)
	}
	r.announce(worker("static", 1), Static, now)
	r.witnessed = suspectAfter / 2
	if got := r.doubts(now, 9); len(got) != 0 {
		t.Errorf("%d are probed before anybody is late", len(got))
	}
	r.witnessed++
	r.link.Up = false
	if got := r.doubts(now, 9); len(got) != 0 {
		t.Errorf("%d are probed without a link", len(got))
	}
	r.link.Up = true
	first := r.doubts(now, 2)
	second := r.doubts(now, 9)
	if len(first) != 2 || len(second) != 1 || len(r.doubts(now, 9)) != 0 {
		t.Errorf("%d and %d are probed", len(first), len(second))
	}
	r.settle(&first[0], true, now)
	other := first[1]
	other.inst.Epoch = 2
	r.settle(&other, true, now)
	r.witnessed += suspectAfter
	if got := r.doubts(now.Add(suspectAfter-1), 9); len(got) != 0 {
		t.Errorf("%d are probed again too soon", len(got))
	}
	if got := r.doubts(now.Add(suspectAfter), 9); len(got) != 1 || got[0].inst.ID != first[0].inst.ID || got[0].at != r.witnessed || r.members[got[0].inst.ID].proof != first[0].at {
		t.Errorf("%+v are probed again", got)
	}
}

// namesakeRig is a clock, a worker and a second one with its id.
func namesakeRig(t *testing.T) (c *clock, first, second *Instance, told func() string, is func(epoch uint64, namesake string)) {
	c, first, second = newClock(t, 10), worker("a", 1), worker("a", 2)
	first.PID, second.PID, second.Role, second.URL = 7, 9, Decode, "http://127.0.0.1:2"
	told = func() string {
		out := ""
		for _, e := range c.r.events {
			if e.cause == causeTwice {
				out += e.reason
			}
		}
		c.r.events = nil
		return out
	}
	is = func(epoch uint64, namesake string) {
		t.Helper()
		if m := c.r.snapshot(c.now).Get("a"); m.Epoch != epoch || m.State != Live || m.Namesake != namesake {
			t.Errorf("epoch %d is %s, namesake %q; want epoch %d, %q", m.Epoch, m.State, m.Namesake, epoch, namesake)
		}
	}
	c.announce(first)
	c.run(time.Second, first)
	return c, first, second, told, is
}

const (
	firstPlace, secondPlace = "prefill at http://127.0.0.1:1, pid 7", "decode at http://127.0.0.1:2, pid 9"
	bothPlaces              = "two processes have this id: %s, which is used, and %s, which is not; give one of them another --id"
)

// TestNamesake: a process with the id of one that is well gets it only until that is known. Both are named
// once, and it has to wait until the first has ended.
func TestNamesake(t *testing.T) {
	c, first, second, told, is := namesakeRig(t)
	c.announce(second)
	c.run(900*time.Millisecond, first, second) // may have been under way
	is(2, "")
	c.run(400*time.Millisecond, first, second)
	is(1, secondPlace)
	c.announce(second)
	c.run(10*time.Second, first, second)
	is(1, secondPlace)
	if got, want := told(), fmt.Sprintf(bothPlaces, firstPlace, secondPlace); got != want {
		t.Errorf("told %q, want %q", got, want)
	}
	c.run(4*time.Second, first)
	is(1, "")
	c.run(time.Second, first, second)
	if ask := c.beat(second); ask != "" {
		t.Errorf("asks %q", ask)
	}
	next := worker("a", 3) // the first, started again
	c.r.reportDead("a", 1, "EOF", c.now)
	c.announce(next)
	is(3, "")
	c.run(2*time.Second, second, next)
	is(3, "")
	c.bye(next)
	c.run(time.Second)
	c.beat(second)
	c.announce(second)
	is(2, "")
}

// TestNoNamesake: neither a predecessor that drains, nor what is under way from one that has ended, is a
// second process; one that was frozen, or that a watcher knows nothing of, is one but has lost its id.
func TestNoNamesake(t *testing.T) {
	c, first, second, told, is := namesakeRig(t)
	first.Draining = true
	c.announce(second)
	c.run(5*time.Second, first, second)
	is(2, "")
	if got := told(); got != "" {
		t.Errorf("told %q", got)
	}

	c, first, second, told, is = namesakeRig(t)
	c.announce(second)
	c.run(500*time.Millisecond, first, second)
	c.run(1500*time.Millisecond, second)
	c.run(5*time.Second, first, second)
	is(2, firstPlace)
	if got, want := told(), fmt.Sprintf(bothPlaces, secondPlace, firstPlace); got != want {
		t.Errorf("told %q, want %q", got, want)
	}
	third := worker("a", 3)
	c.announce(third)
	c.run(2*time.Second, first, third)
	is(3, firstPlace)
	c.run(5*time.Second, third)
	is(3, "")

	c, first, second, _, is = namesakeRig(t)
	c.run(2 * time.Second) // it is silent
	c.announce(second)
	c.run(2*time.Second, first, second)
	is(2, firstPlace)

	c, first, second, _, is = namesakeRig(t)
	delete(c.r.members, "a")
	c.announce(second)
	c.run(2*time.Second, first, second)
	is(2, "prefill of an older start")
}
