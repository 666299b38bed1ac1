package fleet

import (
	"fmt"
	"slices"
	"testing"
	"time"
)

// TestEvents: what each message, report and order changes, and what is told of it.
func TestEvents(t *testing.T) {
	now := time.Unix(1e6, 0)
	r := newRegistry(0, 2, now)
	// f runs do, well after what was before; changed is "version", "load" for a new snapshot without
	// one, or "".
	f := func(what string, do func() bool, ok bool, changed string, events ...string) {
		t.Helper()
		now = now.Add(10 * time.Second)
		r.events = nil
		version := r.version
		got := do()
		var told []string
		for _, e := range r.events {
			line := fmt.Sprintf("%s %d %s %s %s", e.id, e.epoch, e.role, e.state, e.cause)
			if e.draining {
				line += ", draining"
			}
			if e.reason != "" {
				line += ": " + e.reason
			}
			told = append(told, line)
		}
		is := ""
		switch {
		case r.version != version:
			is = "version"
		case r.stale:
			is = "load"
		}
		if got != ok || is != changed || !slices.Equal(told, events) {
			t.Errorf("%s: %t, changed %q, told %q; want %t, %q, %q", what, got, is, told, ok, changed, events)
		}
		if r.snapshot(now); r.stale {
			t.Errorf("%s: a new snapshot is due again", what)
		}
	}
	announce := func(source Source, id string, epoch uint64, change ...func(*Instance)) func() bool {
		i := worker(id, epoch)
		for _, c := range change {
			c(i)
		}
		return func() bool { return r.announce(i, source, now) }
	}
	beats := func(id string, epoch uint64, role Role, draining bool) func() bool {
		return func() bool { return r.beat(&beat{ID: id, Epoch: epoch, Role: role, Draining: draining}, now) == id }
	}
	bye := func(id string, epoch uint64) func() bool {
		return func() bool { r.bye(&beat{ID: id, Epoch: epoch}, now); return true }
	}
	report := func(id string, epoch uint64) func() bool {
		return func() bool { r.reportDead(id, epoch, "EOF", now); return true }
	}
	alive := func(id string, epoch uint64) func() bool { return func() bool { return r.reportAlive(id, epoch, now) } }
	retire := func(secret string) func() bool { return func() bool { r.retired(secret, now); return true } }
	remove := func(id string) func() bool { return func() bool { return r.remove(id, "by hand", now) } }
	judge := func(id string) func() bool { return func() bool { r.judge(r.members[id], now); return true } }
	secret := func(i *Instance) { i.Secrets = "x" }

	f("new", announce(NATS, "a", 1), true, "version", "a 1 prefill live join")
	f("the same again", announce(NATS, "a", 1), true, "load")
	f("another load", announce(NATS, "a", 1, func(i *Instance) { i.Load.Running = 1 }), true, "load")
	f("another model", announce(NATS, "a", 1, func(i *Instance) { i.Model = "m" }), true, "version")
	f("the same beat", beats("a", 1, Prefill, false), false, "load")
	f("another role", beats("a", 1, Decode, false), false, "version")
	f("drains", beats("a", 1, Decode, true), false, "version")
	f("configured", announce(Static, "b", 1, secret), true, "version", "b 1 prefill live join")
	f("one too many", announce(NATS, "c", 1), false, "", "c 1 prefill gone full: the table of 2 members is full")
	f("older", announce(NATS, "a", 0), false, "")
	f("a secret that nobody on NATS has alone", retire("x"), true, "")
	f("its HTTP answers", alive("a", 1), false, "")
	f("NATS hears it", beats("a", 1, Decode, true), false, "load")
	f("its HTTP answers again", alive("a", 1), true, "load")
	f("another secret", retire("y"), true, "")
	f("it announces itself", announce(NATS, "a", 1, func(i *Instance) { i.Role, i.Draining = Decode, true }), true, "version")
	f("its HTTP answers once more", alive("a", 1), true, "load")
	f("a newer beat", beats("a", 2, Prefill, false), true, "version", "a 1 decode dead replaced, draining: replaced by epoch 2")
	f("and once more", beats("a", 2, Prefill, false), true, "")
	f("the newer", announce(NATS, "a", 2), true, "version", "a 2 prefill live join")
	f("a newer yet", announce(NATS, "a", 4), true, "version", "a 2 prefill dead replaced: replaced by epoch 4", "a 4 prefill live join")
	f("the configured one announces itself", announce(NATS, "b", 2, secret), true, "version", "b 2 prefill live join")
	f("reported", report("a", 4), true, "version", "a 4 prefill dead report: EOF")
	f("reported again", report("a", 4), true, "")
	f("back", beats("a", 4, Prefill, false), false, "version", "a 4 prefill live back")
	f("leaves", bye("a", 4), true, "version", "a 4 prefill gone bye: said goodbye")
	f("leaves again", bye("a", 4), true, "")
	f("is reported", report("a", 4), true, "")
	f("announced late", announce(NATS, "a", 4), false, "")
	f("beats late", beats("a", 4, Prefill, false), false, "")
	f("its HTTP answers late", alive("a", 4), false, "")
	f("takes its place", announce(NATS, "c", 1, secret), true, "version", "a 4 prefill gone forgotten", "c 1 prefill live join")
	f("nobody beats", beats("a", 4, Prefill, false), true, "")
	f("taken out", remove("c"), true, "version", "c 1 prefill gone removed: by hand")
	f("taken out again", remove("c"), false, "")
	f("nobody is taken out", remove("x"), false, "")
	f("its secret is retired", retire("x"), true, "version", "b 2 prefill dead revoked: the fleet secret that it has is retired")
	f("first ended, first forgotten", announce(NATS, "d", 1), true, "version", "c 1 prefill gone forgotten", "d 1 prefill live join")
	f("the next", announce(NATS, "e", 1), true, "version", "b 2 prefill dead forgotten", "e 1 prefill live join")
	joined := now
	r.witnessed = suspectAfter + suspectAfter/2
	r.members["e"].proof = r.witnessed
	f("silent", judge("d"), true, "version", "d 1 prefill suspect silence: silent for 1.5 s")
	f("unheard", judge("e"), true, "version", "e 1 prefill unheard silence: NATS does not hear it, its HTTP answers")
	f("heard", beats("e", 1, Prefill, false), false, "version", "e 1 prefill live back")
	if m := r.snapshot(now).Get("e"); !m.Since.Equal(joined) || m.Lapses != 1 || !m.Lapsed.Equal(now) || !m.Heard.Equal(now) {
		t.Errorf("%+v", m)
	}
	r.witnessed = deadAfter + suspectAfter/2
	f("for too long", judge("d"), true, "version", "d 1 prefill dead silence: silent for 3.5 s")
	f("no more", judge("d"), true, "")
	r.settle(&doubt{inst: *worker("x", 1)}, true, now) // of nobody
}

// TestYields: who has ended leaves its id to an older process, unless an operator ended it, or a
// message of that process may still be under way.
func TestYields(t *testing.T) {
	now := time.Unix(1e6, 0)
	for name, c := range map[string]struct {
		change func(rec *record)
		yields bool
	}{
		"live":      {func(*record) {}, false},
		"suspect":   {func(rec *record) { rec.State = Suspect }, false},
		"dead":      {func(rec *record) { rec.State = Dead }, true},
		"gone":      {func(rec *record) { rec.State = Gone }, true},
		"static":    {func(rec *record) { rec.State, rec.Source = Dead, Static }, false},
		"removed":   {func(rec *record) { rec.State, rec.removed = Gone, true }, false},
		"revoked":   {func(rec *record) { rec.State, rec.Revoked = Gone, true }, false},
		"a moment":  {func(rec *record) { rec.State, rec.deafUntil = Gone, now.Add(1) }, false},
		"no longer": {func(rec *record) { rec.State, rec.deafUntil = Gone, now }, true},
	} {
		was := func() *registry {
			r := newRegistry(0, 9, now)
			r.announce(worker("a", 9), NATS, now)
			c.change(r.members["a"])
			return r
		}
		for _, older := range []uint64{1, 8} {
			if got := was().announce(worker("a", older), NATS, now); got != c.yields {
				t.Errorf("%s: epoch %d is taken in: %t", name, older, got)
			}
			if got := was().beat(&beat{ID: "a", Epoch: older}, now); (got == "a") != c.yields {
				t.Errorf("%s: a beat of epoch %d asks %q", name, older, got)
			}
			if was().announce(worker("a", older), Static, now) {
				t.Errorf("%s: epoch %d is taken in from a file", name, older)
			}
		}
	}
}

// TestEcho: the witnessed clock goes on by what lies between echoes, as they were sent, and not by
// much at once.
func TestEcho(t *testing.T) {
	start := time.Unix(1e6, 0)
	r := newRegistry(0, 9, start)
	for _, c := range []struct{ sent, want time.Duration }{{-1, 0}, {0, 0}, {1, 1}, {echoStep, echoStep}, {1, echoStep}, {echoStep, echoStep},
		{3*echoStep + 1, 2 * echoStep}, {3*echoStep + 2, 2*echoStep + 1}, {4*echoStep + 2, 3*echoStep + 1}} {
		if r.echo(start.Add(c.sent)); r.witnessed != c.want {
			t.Errorf("after an echo sent at %v the clock is at %v, want %v", c.sent, r.witnessed, c.want)
		}
	}
}
