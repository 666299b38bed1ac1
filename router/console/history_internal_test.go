package console

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router/flight"
)

// TestHistory: points are what has changed between readings, and only the last ones are kept.
func TestHistory(t *testing.T) {
	if len(columns) != len(point{}) {
		t.Fatalf("%d columns of %d values", len(columns), len(point{}))
	}
	at := func(name string, p point) float64 {
		for i, c := range columns {
			if c == name {
				return p[i]
			}
		}
		t.Fatalf("no column %s", name)
		return 0
	}
	edges := []float64{1, 2, math.Inf(1)}
	var h history
	now := time.UnixMilli(1000)
	h.add(flight.Reading{OutputTokens: 100}, now)
	if list, next := h.after(0); len(list) != 0 || next != 0 {
		t.Fatalf("one reading makes a point: %v", list)
	}
	h.add(flight.Reading{Running: 2, Waiting: 1, OutputTokens: 300, PromptTokens: 50, Failed: 3, TTFT: flight.Spread{Edges: edges, Counts: []uint64{2, 4, 4}}}, now.Add(2*time.Second))
	list, next := h.after(0)
	if len(list) != 1 || next != 1 {
		t.Fatalf("%v, %d", list, next)
	}
	for name, want := range map[string]float64{"seq": 0, "at_ms": 3000, "running": 2, "waiting": 1, "output_tokens": 100, "prompt_tokens": 25, "failed": 3, "ttft_p50": 1, "ttft_p95": 1.9, "tpot_p50": 0} {
		if got := at(name, list[0]); math.Abs(got-want) > 1e-9 {
			t.Errorf("%s is %v, want %v", name, got, want)
		}
	}
	for i := range historyPoints + 5 { // the time to the first token is forgotten after 10 points
		h.add(flight.Reading{TTFT: flight.Spread{Edges: edges, Counts: []uint64{2, 4, 4}}}, now.Add(time.Duration(3+i)*time.Second))
	}
	list, next = h.after(0)
	if len(list) != historyPoints || next != historyPoints+6 || at("seq", list[0]) != 6 || at("seq", list[historyPoints-1]) != float64(next-1) || at("ttft_p95", list[historyPoints-1]) != 0 {
		t.Errorf("%d points to %d, from %v to %v", len(list), next, list[0], list[historyPoints-1])
	}
	if list, _ := h.after(next - 2); len(list) != 2 {
		t.Errorf("%d of the last 2", len(list))
	}
	if list, _ := h.after(next + 1); len(list) != historyPoints {
		t.Errorf("%d after a restart", len(list))
	}
}

// TestEvents: what changes in the fleet and in the counts is said once, and what is there at first is not.
func TestEvents(t *testing.T) {
	c := bareConsole(t, "e0")
	ready := true
	c.Ready = func() bool { return ready }
	c.watchFleet(time.Now())
	said := func() (out []string) {
		list, next := c.events.after(0)
		for _, e := range list {
			out = append(out, strings.Join(strings.Fields(e.Level+" "+e.Who+" "+e.Text), " "))
		}
		if next != len(list) {
			t.Fatalf("next is %d of %d", next, len(list))
		}
		return out
	}
	if got := said(); len(got) != 0 {
		t.Fatalf("%q", got)
	}
	if err := c.Fleet.AddStatic(fleet.Instance{ID: "e1", Epoch: 2, Role: fleet.Decode, URL: "http://10.0.0.2:80", Dialect: "openai", Model: "m"}, fleet.Admin); err != nil {
		t.Fatal(err)
	}
	c.watchFleet(time.Now())
	m := c.Fleet.Snapshot().Get("e1")
	c.Members.Mark(m.ID, m.Epoch, false)
	c.watchFleet(time.Now())
	c.Members.Unmark(m.ID)
	ready = false
	c.watchFleet(time.Now())
	c.watchFleet(time.Now())
	c.Fleet.Remove("e1", "removed")
	c.watchFleet(time.Now())
	c.watchCounts(flight.Reading{Failed: 5, TakenOver: 1}, time.Now())
	c.watchCounts(flight.Reading{Failed: 5, TakenOver: 2, Shed: 3}, time.Now())
	c.noteOrder(&Audited{Action: "POST /x", By: "admin", Status: 409})
	c.noteOrder(&Audited{Action: "flip", By: "planner", Is: "decode"})
	want := []string{"good e1 joined as decode at http://10.0.0.2:80", "info e1 drained: it gets no new work", "bad not ready: no live, probed, compatible pair is left", "info e1 gets new work again",
		"info e1 gone, was live: removed", "warn 1 stream went on at another pair", "bad 3 requests got no place in the queue: the fleet is too small", "warn admin POST /x: refused with 409", "info planner flip (– → decode)"}
	got := said()
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	for range 2 * maxEvents {
		c.events.add(event{Text: "x"})
	}
	list, next := c.events.after(0)
	if len(list) != maxEvents || next != 2*maxEvents+len(want) || list[0].Seq != next-maxEvents || list[maxEvents-1].Seq != next-1 {
		t.Errorf("%d events to %d, from %d", len(list), next, list[0].Seq)
	}
}
