package fleet

import (
	"fmt"
	"slices"
	"testing"
	"time"
)

// clock drives a registry through time as a watcher would: one echo and one
// tick every 100 ms while the link works.
type clock struct {
	t   *testing.T
	r   *registry
	now time.Time
	cut bool // echoes do not come back

	answers map[string]bool // of a probe, 100 ms later; nil: there are no probes
	asked   []doubt         // since the last tick
	probes  map[string]int
}

func newClock(t *testing.T, maxMembers int) *clock {
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	r := newRegistry(3*time.Second, maxMembers, start)
	c := &clock{t: t, r: r, now: start, probes: map[string]int{}}
	r.setLink(Link{Up: true, Since: start}, start)
	c.run(3 * time.Second) // past the grace
	return c
}

// run passes d; the workers in beating send a heartbeat every 200 ms.
func (c *clock) run(d time.Duration, beating ...*Instance) {
	for end := c.now.Add(d); c.now.Before(end); {
		sent := c.now
		c.now = c.now.Add(100 * time.Millisecond)
		if c.now.Nanosecond()%int(200*time.Millisecond) == 0 {
			for _, i := range beating {
				c.beat(i)
			}
		}
		if !c.cut {
			c.r.echo(sent)
		}
		for i := range c.asked {
			if d := &c.asked[i]; c.answers[d.inst.ID] || c.now.Sub(c.r.members[d.inst.ID].probed) >= answerTime {
				c.r.settle(d, c.answers[d.inst.ID], c.now)
				c.asked[i].inst.ID = ""
			}
		}
		c.asked = slices.DeleteFunc(c.asked, func(d doubt) bool { return d.inst.ID == "" })
		c.r.tick(c.now)
		if c.answers != nil {
			asked := c.r.doubts(c.now, 10)
			for i := range asked {
				c.probes[asked[i].inst.ID]++
			}
			c.asked = append(c.asked, asked...)
		}
	}
}

func (c *clock) announce(i *Instance) { c.r.apply(&message{kind: kindAnnounce, inst: *i}, c.now) }
func (c *clock) beat(i *Instance) string {
	return c.r.apply(&message{kind: kindBeat, beat: beat{ID: i.ID, Epoch: i.Epoch, Role: i.Role, Draining: i.Draining, WaitOnly: i.WaitOnly, Load: i.Load}}, c.now)
}
func (c *clock) bye(i *Instance) {
	c.r.apply(&message{kind: kindBye, beat: beat{ID: i.ID, Epoch: i.Epoch, Role: i.Role}}, c.now)
}
func (c *clock) link(up bool) {
	c.cut = !up
	c.r.setLink(Link{Up: up, Since: c.now}, c.now)
}

func (c *clock) want(id string, s State) {
	c.t.Helper()
	m := c.r.snapshot(c.now).Get(id)
	switch {
	case m == nil && s != "":
		c.t.Fatalf("%s is unknown, want %s", id, s)
	case m != nil && m.State != s:
		c.t.Fatalf("%s is %s (%s), want %q", id, m.State, m.Reason, s)
	}
}

func worker(id string, epoch uint64) *Instance {
	return &Instance{ID: id, Epoch: epoch, Role: Prefill, URL: "http://127.0.0.1:1", Dialect: "native"}
}

func TestSilence(t *testing.T) {
	c := newClock(t, 10)
	a, b := worker("a", 1), worker("b", 1)
	c.announce(a)
	c.announce(b)
	c.run(5*time.Second, a, b)
	c.want("a", Live)
	c.run(900*time.Millisecond, b)
	c.want("a", Live)
	c.run(400*time.Millisecond, b)
	c.want("a", Suspect)
	c.run(1500*time.Millisecond, b)
	c.want("a", Suspect)
	c.run(500*time.Millisecond, b)
	c.want("a", Dead)
	c.want("b", Live)
	c.beat(a)
	c.want("a", Live) // it was stopped, and goes on
	c.run(70*time.Second, b)
	c.want("a", "")
	if len(c.r.members) != 1 {
		t.Fatalf("%d members", len(c.r.members))
	}
}

// TestUnheard: whoever answers probes is not dead and keeps its work, however
// long NATS does not hear it; who stops answering dies as any other.
func TestUnheard(t *testing.T) {
	c := newClock(t, 10)
	c.answers = map[string]bool{"a": true, "b": true}
	a, b, d := worker("a", 1), worker("b", 1), worker("d", 1)
	a.Draining, a.WaitOnly, a.Load.Running = true, true, 3
	for _, i := range []*Instance{a, b, d} {
		c.announce(i)
	}
	c.run(5*time.Second, a, b, d)
	if len(c.probes) > 0 {
		t.Errorf("members that are heard were probed: %v", c.probes)
	}
	for range 12 { // it never looks worse in between
		c.run(100*time.Millisecond, b)
		if m := c.r.members["a"]; m.State != Live && m.State != Unheard {
			t.Fatalf("a is %s (%s)", m.State, m.Reason)
		}
	}
	c.want("d", Suspect)
	for range 600 {
		c.run(100*time.Millisecond, b)
		c.want("a", Unheard)
	}
	c.want("b", Live)
	c.want("d", Dead) // it did not answer
	if m := c.r.snapshot(c.now).Get("a"); !m.Draining || !m.WaitOnly || m.Load.Running != 3 || c.now.Sub(m.Heard) > 1100*time.Millisecond {
		t.Errorf("%+v", m)
	}
	if n := c.probes["a"]; n < 50 || n > 62 || c.probes["b"] > 0 {
		t.Errorf("in 61 s: %v", c.probes)
	}

	c.answers["a"] = false // it is stopped
	c.run(2*time.Second, b)
	c.want("a", Suspect)
	c.run(1200*time.Millisecond, b)
	c.want("a", Dead)
	n := c.probes["a"]
	c.run(5*time.Second, b)
	if c.probes["a"] != n {
		t.Error("a dead member is probed")
	}
	c.answers["a"] = true
	c.run(2*time.Second, b)
	c.want("a", Dead) // its heartbeats alone bring it back
	c.beat(a)
	c.want("a", Live)

	c.run(2*time.Second, b)
	c.want("a", Unheard)
	c.beat(a)
	c.want("a", Live)
	c.run(1500*time.Millisecond, b)
	c.r.reportDead("a", 1, "connection reset", c.now)
	c.run(5*time.Second, b)
	c.want("a", Dead) // the data path knows better
}

// TestDoubts: an answer counts for the run that was asked, from when it was asked.
func TestDoubts(t *testing.T) {
	c := newClock(t, 10)
	a := worker("a", 1)
	c.announce(a)
	c.run(700 * time.Millisecond)
	asked := c.r.doubts(c.now, 10)
	if len(asked) != 1 || len(c.r.doubts(c.now.Add(time.Hour), 10)) > 0 {
		t.Fatal("want one probe at a time")
	}
	next := worker("a", 2)
	c.announce(next)
	c.run(700 * time.Millisecond)
	c.r.settle(&asked[0], true, c.now) // the old one
	c.run(800 * time.Millisecond)
	c.want("a", Suspect)
	asked = c.r.doubts(c.now, 10)
	c.run(2 * time.Second)
	c.want("a", Dead)
	c.r.settle(&asked[0], true, c.now)
	c.want("a", Dead) // too late
	c.link(false)
	if c.announce(next); len(c.r.doubts(c.now.Add(time.Hour), 10)) > 0 {
		t.Error("nobody is silent while the link is down")
	}
}

func TestSuspectRecovers(t *testing.T) {
	c := newClock(t, 10)
	a := worker("a", 1)
	c.announce(a)
	c.run(2 * time.Second)
	c.want("a", Suspect)
	c.r.reportAlive("a", 1, c.now)
	c.want("a", Live)
	c.run(2 * time.Second)
	c.want("a", Suspect)
	c.beat(a)
	c.want("a", Live)
}

func TestSilenceWhileLinkIsDown(t *testing.T) {
	c := newClock(t, 10)
	a, b := worker("a", 1), worker("b", 1)
	c.announce(a)
	c.announce(b)
	c.link(false)
	c.run(time.Hour / 10)
	c.want("a", Live)
	c.r.reportDead("b", 1, "connection reset", c.now)
	c.want("b", Dead) // the data path still kills
	c.link(true)
	c.run(2900 * time.Millisecond)
	c.want("a", Live) // grace
	c.run(400 * time.Millisecond)
	c.want("a", Dead)

	// A link that is cut without notice kills nobody either.
	a.Epoch = 2
	c.announce(a)
	c.cut = true
	c.run(time.Minute)
	c.want("a", Live)
	c.link(false)
	c.run(time.Minute)
	c.link(true)
	c.run(10*time.Second, a)
	c.want("a", Live)
}

// TestOwnPause models a watcher that was itself stopped: on its return, the
// clock has jumped, and the first messages were sent long ago.
func TestOwnPause(t *testing.T) {
	c := newClock(t, 10)
	a := worker("a", 1)
	c.announce(a)
	c.run(time.Second, a)
	sent := c.now
	c.now = c.now.Add(time.Minute)
	c.r.tick(c.now)
	c.r.echo(sent)
	c.r.tick(c.now)
	c.r.echo(c.now)
	c.r.tick(c.now)
	c.want("a", Live)
	c.run(5*time.Second, a)
	c.want("a", Live)
}

func TestReportDead(t *testing.T) {
	c := newClock(t, 10)
	a := worker("a", 7)
	c.announce(a)
	c.r.reportDead("a", 6, "older epoch", c.now)
	c.want("a", Live)
	c.r.reportDead("a", 7, "EOF", c.now)
	c.want("a", Dead)
	c.beat(a) // was under way
	c.announce(a)
	c.r.reportAlive("a", 7, c.now)
	c.want("a", Dead)
	c.run(900*time.Millisecond, a)
	c.want("a", Dead)
	c.run(300*time.Millisecond, a)
	c.want("a", Live)
	c.r.reportDead("a", 7, "EOF", c.now) // the second time it takes longer
	c.run(1900*time.Millisecond, a)
	c.want("a", Dead)
	c.run(300*time.Millisecond, a)
	c.want("a", Live)
	c.r.reportDead("a", 7, "EOF", c.now)
	a.Epoch = 8 // a new start needs no patience
	c.announce(a)
	c.want("a", Live)
}

func TestEpochs(t *testing.T) {
	c := newClock(t, 10)
	old, young := worker("a", 1), worker("a", 2)
	c.announce(old)
	if ask := c.beat(young); ask != "a" {
		t.Fatalf("a newer epoch's beat asks %q", ask)
	}
	c.want("a", Dead)
	c.announce(young)
	c.want("a", Live)
	c.announce(old)
	c.beat(old)
	c.bye(old)
	c.r.reportDead("a", 1, "late", c.now)
	c.want("a", Live)
	if m := c.r.members["a"]; m.Epoch != 2 {
		t.Fatalf("epoch %d", m.Epoch)
	}
	c.bye(young)
	c.want("a", Gone)
	c.beat(young)
	c.announce(young)
	c.want("a", Gone)
}

func TestUnknownIsAskedOncePerSecond(t *testing.T) {
	c := newClock(t, 3)
	for i := range 5 {
		want := ""
		if i < 3 {
			want = fmt.Sprint("w", i)
		}
		if got := c.beat(worker(fmt.Sprint("w", i), 1)); got != want {
			t.Fatalf("beat %d asks %q, want %q", i, got, want)
		}
	}
	if got := c.beat(worker("w0", 1)); got != "" {
		t.Fatalf("asks %q again", got)
	}
	c.run(1100 * time.Millisecond)
	if got := c.beat(worker("w0", 1)); got != "w0" {
		t.Fatalf("asks %q", got)
	}
	c.run(5 * time.Second)
	if len(c.r.asked) != 0 {
		t.Fatalf("%d asked are kept", len(c.r.asked))
	}
}

func TestTableIsBounded(t *testing.T) {
	c := newClock(t, 2)
	c.announce(worker("a", 1))
	c.announce(worker("b", 1))
	c.announce(worker("c", 1))
	c.want("c", "")
	c.r.reportDead("b", 1, "EOF", c.now)
	c.announce(worker("c", 1))
	c.want("c", Live)
	c.want("b", "")
	c.want("a", Live)
}

func TestStaticAndRemoved(t *testing.T) {
	c := newClock(t, 10)
	s := worker("s", 0)
	c.r.announce(s, Static, c.now)
	c.run(time.Hour / 10)
	c.want("s", Live)
	c.r.reportDead("s", 0, "refused", c.now)
	c.run(2 * time.Minute)
	c.want("s", Dead) // configured, so not forgotten
	c.r.reportAlive("s", 0, c.now)
	c.want("s", Live)
	a := worker("s", 3) // it announces itself after all
	c.announce(a)
	c.run(2 * time.Second)
	c.want("s", Suspect)
	c.r.remove("s", "by admin", c.now)
	c.run(2*time.Minute, a)
	c.want("s", Gone) // it still beats, and stays removed
	c.run(2 * time.Minute)
	c.want("s", "")
}

// TestLapses: a heartbeat that is late, as under load, does not begin a member's
// life anew; a death does.
func TestLapses(t *testing.T) {
	c := newClock(t, 10)
	w := worker("w", 1)
	c.announce(w)
	joined := c.now
	get := func() *Member { return c.r.snapshot(c.now).Get("w") }
	for n := range 3 {
		c.run(1500 * time.Millisecond) // of silence
		c.want("w", Suspect)
		if m := get(); !m.Since.After(joined) || m.Lapses != n {
			t.Errorf("suspect since %v, %d lapses", m.Since.Sub(joined), m.Lapses)
		}
		c.run(2*time.Second, w)
		c.want("w", Live)
		if m := get(); !m.Since.Equal(joined) || m.Lapses != n+1 || !m.Lapsed.After(joined) || m.Reason != "" {
			t.Errorf("after lapse %d: live since %v, %d lapses", n, m.Since.Sub(joined), m.Lapses)
		}
	}
	lapsed := get().Lapsed
	c.run(1500 * time.Millisecond)
	c.r.reportDead("w", 1, "EOF", c.now)
	c.run(5*time.Second, w)
	c.want("w", Live)
	if m := get(); !m.Since.After(lapsed) || m.Lapses != 3 {
		t.Errorf("after a death: live since %v, %d lapses", m.Since.Sub(joined), m.Lapses)
	}
}

// TestRemovedStays: a member that was removed or has left stays so at its epoch,
// whatever finds it again, for as long as that goes on; a newer one is another
// member.
func TestRemovedStays(t *testing.T) {
	for _, source := range []Source{NATS, Static, Admin, ZMQ, Kube} {
		c := newClock(t, 10)
		add := func(epoch uint64, by Source, want bool) {
			t.Helper()
			if ok := c.r.announce(worker("s", epoch), by, c.now); ok != want {
				t.Errorf("of %s, by %s at epoch %d: %v", source, by, epoch, ok)
			}
		}
		add(5, source, true)
		c.r.remove("s", "by admin", c.now)
		for range 10 {
			for _, by := range []Source{NATS, Static, Admin, ZMQ, Kube} {
				add(5, by, false)
				add(4, by, false)
			}
			c.run(30 * time.Second)
			c.want("s", Gone)
		}
		add(6, source, true)
		c.want("s", Live)
		c.r.remove("s", "by admin", c.now)
		c.run(2 * time.Minute)
		c.want("s", "") // nobody has found it since
	}
}

// TestLearn: what was found out about a member is noted only while that is
// what it was, and changes nothing else.
func TestLearn(t *testing.T) {
	c := newClock(t, 10)
	was := worker("s", 7)
	is := *was
	is.Version = "1.0"
	learn := func(want bool) {
		t.Helper()
		if ok := c.r.learn(was, &is); ok != want {
			t.Fatalf("learnt: %v", ok)
		}
	}
	learn(false) // nobody
	c.announce(was)
	learn(false) // it says itself what it is
	c.r.remove("s", "by admin", c.now)
	was.Epoch, is.Epoch = 8, 8
	c.r.announce(was, Static, c.now)

	draining := *was
	draining.Draining = true
	c.r.announce(&draining, Static, c.now)
	c.r.reportDead("s", 8, "refused", c.now)
	v := c.r.version
	learn(true)
	m := c.r.snapshot(c.now).Get("s")
	if m.Version != "1.0" || !m.Draining || m.State != Dead || m.Source != Static || c.r.version == v {
		t.Errorf("%+v", m)
	}
	learn(false) // that is known
	moved := *was
	moved.URL = "http://127.0.0.1:2"
	c.r.announce(&moved, Static, c.now)
	learn(false)
	c.r.announce(was, Static, c.now)
	c.r.remove("s", "by admin", c.now)
	learn(false)
	c.want("s", Gone)
	c.r.announce(worker("s", 9), Static, c.now)
	learn(false)
}

func TestRoleDrainAndLoad(t *testing.T) {
	c := newClock(t, 10)
	a := worker("a", 1)
	c.announce(a)
	v := c.r.version
	a.Load.Running = 3
	c.beat(a)
	if c.r.version != v || !c.r.stale {
		t.Fatal("load alone must not make a version, but a new snapshot")
	}
	a.Draining, a.Role = true, Decode
	c.beat(a)
	m := c.r.snapshot(c.now).Get("a")
	if c.r.version == v || m.Role != Decode || m.Usable() || m.WaitOnly || m.Load.Running != 3 {
		t.Fatalf("%+v", m)
	}
	v = c.r.version
	a.WaitOnly = true
	c.beat(a)
	if m := c.r.snapshot(c.now).Get("a"); c.r.version == v || !m.WaitOnly {
		t.Fatalf("%+v", m)
	}
}

// TestLeaveSeenFirst: the end of a process is seen before what it has published:
// whether it left or died is known when an echo comes back that was sent later.
func TestLeaveSeenFirst(t *testing.T) {
	c := newClock(t, 10)
	dies, leaves, drains, static := worker("dies", 1), worker("leaves", 1), worker("drains", 1), worker("static", 1)
	drains.Draining = true
	for _, i := range []*Instance{dies, leaves, drains} {
		c.announce(i)
	}
	c.r.announce(static, Static, c.now)
	c.r.events = nil
	at := c.now
	for _, i := range []*Instance{dies, leaves, drains, static} {
		c.r.reportDead(i.ID, 1, "lifeline ended", at)
	}
	want := func(when string, want ...string) {
		t.Helper()
		for n, e := range c.r.events[:4] {
			left, settled := c.r.left(&e, at, c.now)
			if got := fmt.Sprintf("%s %t %t", e.id, left, settled); got != want[n] {
				t.Errorf("%s: %s, want %s", when, got, want[n])
			}
		}
	}
	want("at once", "dies false false", "leaves false false", "drains true true", "static false true")
	c.run(100 * time.Millisecond) // the echo that comes back was sent no later
	want("an echo", "dies false false", "leaves false false", "drains true true", "static false true")
	c.bye(leaves)
	want("goodbye", "dies false false", "leaves true true", "drains true true", "static false true")
	c.run(100 * time.Millisecond)
	want("the next echo", "dies false true", "leaves true true", "drains true true", "static false true")
	c.link(false)
	c.announce(worker("dies", 2))
	c.r.reportDead("dies", 2, "lifeline ended", c.now)
	if left, settled := c.r.left(&c.r.events[len(c.r.events)-1], c.now, c.now); left || !settled {
		t.Errorf("without a link: left %t, settled %t", left, settled)
	}
}

// TestReplacedUnseen: a worker's next run announces itself before anybody saw
// the end of the last one, which is told all the same.
func TestReplacedUnseen(t *testing.T) {
	c := newClock(t, 10)
	c.announce(worker("a", 1))
	c.announce(worker("a", 2))
	var got string
	for _, e := range c.r.events {
		got += fmt.Sprintf("%d %s %s, ", e.epoch, e.state, e.cause)
	}
	if want := "1 live join, 1 dead replaced, 2 live join, "; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	c.want("a", Live)
}

// TestSecretRetired: once a fleet secret is retired, who announced no other is dead, and
// everybody has to be heard by NATS again: that his HTTP answers keeps nobody.
func TestSecretRetired(t *testing.T) {
	c := newClock(t, 10)
	c.answers = map[string]bool{"out": true, "cut": true, "liar": true, "good": true}
	out, cut, liar, good := worker("out", 1), worker("cut", 1), worker("liar", 1), worker("good", 1)
	for _, i := range []*Instance{out, cut, liar, good} {
		i.Secrets = "new+old"
		if i == out || i == cut {
			i.Secrets = "old"
		}
		c.announce(i)
	}
	c.run(2*time.Second, out, liar, good)
	c.want("cut", Unheard)
	retire := &message{kind: kindRevoked, revoked: []Revocation{{ID: "fleet-secret-old", At: c.now.UnixMicro()}}}
	c.r.apply(retire, c.now)
	c.want("out", Dead)
	c.want("cut", Dead)
	c.beat(out) // was under way
	if c.r.reportAlive("out", 1, c.now) || c.r.reportAlive("liar", 1, c.now) {
		t.Error("an answer counts")
	}
	c.run(1200*time.Millisecond, good)
	c.want("out", Dead)
	c.want("liar", Suspect)
	c.want("good", Live)
	c.run(2*time.Second, good)
	c.want("liar", Dead)
	out.Secrets = "new"
	c.announce(out)
	c.want("out", Live) // it has the other now
	c.run(2*time.Second, good)
	c.want("out", Unheard)
	c.r.apply(retire, c.now) // routers repeat it
	c.run(time.Second, good)
	c.want("out", Unheard)
	for _, other := range []Revocation{{ID: "liar"}, {ID: "fleet-secret-new", Back: true}} {
		other.At = c.now.UnixMicro()
		c.r.apply(&message{kind: kindRevoked, revoked: []Revocation{other}}, c.now)
		if c.want("out", Unheard); !c.r.reportAlive("good", 1, c.now) {
			t.Errorf("%+v retires a secret", other)
		}
	}
}

// TestSecondProcess: a process that takes the id of one that is frozen replaces it, and
// when it has ended, by a goodbye or not, the first is back by its heartbeats.
func TestSecondProcess(t *testing.T) {
	for _, end := range []string{"goodbye", "silence"} {
		c := newClock(t, 10)
		first, second := worker("a", 1), worker("a", 2)
		c.announce(first)
		c.run(time.Second, first)
		c.announce(second)
		c.run(5*time.Second, second)
		c.run(5*time.Second, first, second) // goes on, too late
		epoch := func(want uint64) {
			t.Helper()
			if m := c.r.snapshot(c.now).Get("a"); m.State != Live || m.Epoch != want {
				t.Fatalf("%s: epoch %d is %s, want %d", end, m.Epoch, m.State, want)
			}
		}
		epoch(2)
		if end == "goodbye" {
			c.bye(second)
			c.beat(first) // it may have been under way
			c.announce(first)
			c.want("a", Gone)
		}
		c.run(4 * time.Second)
		if ask := c.beat(first); ask != "a" {
			t.Fatalf("%s: %q is asked to announce itself", end, ask)
		}
		c.announce(first)
		epoch(1)
		c.run(3*time.Second, first)
		epoch(1)
	}
	c := newClock(t, 10)
	c.announce(worker("a", 2))
	c.r.remove("a", "by hand", c.now)
	c.run(2*time.Second, worker("a", 1))
	c.announce(worker("a", 1))
	c.want("a", Gone) // an operator's word stays
}
