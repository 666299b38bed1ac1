package console

import (
	"cmp"
	"fmt"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/router/flight"
	"github.com/xpyd/xpyd/router/pick"
)

// maxEvents bounds the list of events.
const maxEvents = 1000

// event is something that happened, in words.
type event struct {
	Seq   int       `json:"seq"`
	At    time.Time `json:"at"`
	Level string    `json:"level"`         // good, info, warn, bad
	Kind  string    `json:"kind"`          // fleet, request, order
	Who   string    `json:"who,omitempty"` // the worker, or who gave the order
	Text  string    `json:"text"`
}

// events are the latest ones.
type events struct {
	ring[event]

	// Of the goroutine that watches.
	begun  bool
	link   bool
	ready  bool
	known  map[string]standing
	counts *flight.Reading
}

// standing is what of a member is compared.
type standing struct {
	epoch    uint64
	role     fleet.Role
	state    fleet.State
	draining bool
	guard    pick.GuardState
}

func (e *events) add(ev event) {
	ev.Text = openai.Clip(ev.Text)
	e.put(maxEvents, func(seq int) event {
		ev.Seq = seq
		return ev
	})
}

func (c *Console) showEvents(ctx *fasthttp.RequestCtx, _ adminCall) *openai.Error {
	n, err := after(ctx)
	if err != nil {
		return err
	}
	list, next := c.events.after(n)
	return reply(ctx, 200, struct {
		Next   int     `json:"next"` // what to ask for the next time
		Events []event `json:"events"`
	}{next, list})
}

// watchFleet notes what has changed in the fleet. What is there at first is no event.
func (c *Console) watchFleet(now time.Time) {
	e, s := &c.events, c.Fleet.Snapshot()
	note := func(level, who, format string, args ...any) {
		if e.begun {
			e.add(event{At: now, Level: level, Kind: "fleet", Who: who, Text: fmt.Sprintf(format, args...)})
		}
	}
	if s.Link.Up != e.link {
		if s.Link.Up {
			note("good", "", "NATS is reached again")
		} else {
			note("warn", "", "NATS is not reached: the fleet is what was known until now, and nobody joins")
		}
	}
	ready := c.Ready != nil && c.Ready()
	if ready != e.ready {
		if ready {
			note("good", "", "ready: a pair of workers serves")
		} else {
			note("bad", "", "not ready: no live, probed, compatible pair is left")
		}
	}
	known := make(map[string]standing, len(s.Members))
	for i := range s.Members {
		m := &s.Members[i]
		is := standing{m.Epoch, m.Role, m.State, m.Draining || c.Members.Drained(m), c.Picker.Guard(m.ID, m.Epoch).State}
		known[m.ID] = is
		was, there := e.known[m.ID]
		if !there || is != was {
			c.noteMember(note, m, was, is, there)
		}
	}
	for id := range e.known {
		if _, there := known[id]; !there {
			note("info", id, "forgotten")
		}
	}
	e.begun, e.link, e.ready, e.known = true, s.Link.Up, ready, known
}

// noteMember says what has changed of a member.
func (c *Console) noteMember(note func(level, who, format string, args ...any), m *fleet.Member, was, is standing, there bool) {
	switch {
	case !there || is.epoch != was.epoch && is.state == fleet.Live:
		note("good", m.ID, "joined as %s at %s", m.Role, m.URL)
	case is.state != was.state:
		level := map[fleet.State]string{fleet.Live: "good", fleet.Dead: "bad", fleet.Gone: "info"}[is.state]
		text := fmt.Sprintf("%s, was %s", is.state, was.state)
		if m.Reason != "" {
			text += ": " + m.Reason
		}
		note(cmp.Or(level, "warn"), m.ID, "%s", text)
	}
	if !there {
		return
	}
	if is.role != was.role {
		note("info", m.ID, "became %s, was %s", is.role, was.role)
	}
	if is.draining != was.draining && is.state != fleet.Gone {
		note("info", m.ID, "%s", map[bool]string{true: "drained: it gets no new work", false: "gets new work again"}[is.draining])
	}
	if is.guard != was.guard && is.epoch == was.epoch {
		g := c.Picker.Guard(m.ID, m.Epoch)
		level := "warn"
		if g.State == pick.Closed {
			level = "good"
		}
		note(level, m.ID, "breaker %s%s", g.State, because(g.Why))
	}
}

func because(why string) string {
	if why == "" {
		return ""
	}
	return ": " + why
}

// watchCounts notes what requests met in the last second.
func (c *Console) watchCounts(r flight.Reading, now time.Time) {
	e := &c.events
	if old := e.counts; old != nil {
		for _, x := range []struct {
			n           int
			level, text string
		}{
			{r.TakenOver - old.TakenOver, "warn", "%d stream%s went on at another pair"},
			{r.Retries - old.Retries, "warn", "%d attempt%s repeated at another pair"},
			{r.Shed - old.Shed, "bad", "%d request%s got no place in the queue: the fleet is too small"},
			{r.Failed - old.Failed, "bad", "%d request%s failed"},
		} {
			if x.n > 0 {
				e.add(event{At: now, Level: x.level, Kind: "request", Text: fmt.Sprintf(x.text, x.n, map[bool]string{true: "s"}[x.n > 1])})
			}
		}
	}
	e.counts = &r
}

// noteOrder makes an event of a line of the audit log.
func (c *Console) noteOrder(a *Audited) {
	text, level := a.Action, "info"
	if a.Status >= 400 {
		level = "warn"
		text += fmt.Sprintf(": refused with %d", a.Status)
	}
	if a.Was != "" || a.Is != "" {
		text += fmt.Sprintf(" (%s → %s)", cmp.Or(a.Was, "–"), cmp.Or(a.Is, "–"))
	}
	c.events.add(event{At: a.Time, Level: level, Kind: "order", Who: a.By, Text: text})
}
