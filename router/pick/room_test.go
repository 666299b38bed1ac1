package pick_test

import (
	"errors"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router/pick"
)

// TestRoom: what could stay where it is goes only where there is room for all of it and a margin, by
// what workers say and by what was sent there, whatever the policy.
func TestRoom(t *testing.T) {
	load := func(l fleet.Load) func(*fleet.Member) { return func(m *fleet.Member) { m.Load = l } }
	for name, c := range map[string]struct {
		edit   func(*fleet.Member) // of d0, with 16,000 tokens, 14,000 of which may be filled
		before int                 // tokens sent there
		room   int
		ok     bool
	}{
		"empty":                    {load(fleet.Load{}), 0, 14000, true},
		"all but the margin":       {load(fleet.Load{}), 0, 14001, false},
		"half is held":             {load(fleet.Load{KVUsed: 0.5}), 0, 6000, true},
		"more than half":           {load(fleet.Load{KVUsed: 0.51}), 0, 6000, false},
		"what was sent may grow":   {load(fleet.Load{}), 8000, 6001, false},
		"what was sent leaves it":  {load(fleet.Load{}), 8000, 6000, true},
		"some wait":                {load(fleet.Load{Waiting: 1}), 0, 1, false},
		"the batch has a place":    {load(fleet.Load{Running: 7}), 0, 1, true},
		"the batch is full":        {load(fleet.Load{Running: 8}), 0, 1, false},
		"the pool's size unknown":  {func(m *fleet.Member) { m.Blocks = 0 }, 0, 1, false},
		"the batch's size unknown": {func(m *fleet.Member) { m.MaxBatch, m.Load.Running = 0, 999 }, 0, 1, true},
	} {
		for _, policy := range []string{pick.Prefix, pick.RoundRobin, pick.LeastLoaded, pick.PowerOfTwo, pick.Session} {
			p, s := newPicker(policy), fleetOf(1, 0, member("d0", fleet.Decode, c.edit))
			if c.before > 0 {
				mustPick(t, p, s, pick.Request{Tokens: c.before - 100, Output: 100})
			}
			got, err := p.Pick(pick.View{Snapshot: s}, &pick.Request{Model: "m", Tokens: 10, Output: 10, Room: c.room, Session: "s"})
			if (err == nil) != c.ok || err != nil && !errors.Is(err, pick.ErrNoPair) {
				t.Errorf("%s, %s: %v, %v", name, policy, got, err)
			}
			mustPick(t, p, s, pick.Request{Tokens: 99999}) // others need none
		}
	}
}

// TestRoomEjected: for what could stay where it is no ejected worker is taken back.
func TestRoomEjected(t *testing.T) {
	l := newLab(t, fleetOf(1, 2), ejecting(pick.EjectErrors))
	for range 3 {
		l.window(60, func(id string) (bool, time.Duration) { return id == "d1", time.Millisecond })
	}
	l.want("d1", pick.Ejected)
	view := pick.View{Snapshot: l.s, Now: l.now}
	if c, err := l.p.Pick(view, &pick.Request{Model: "m", Room: 1, Exclude: []string{"d0"}}); err == nil {
		t.Errorf("%s was chosen", c.Decode.ID)
	}
	l.want("d1", pick.Ejected)
	if _, err := l.p.Pick(view, &pick.Request{Model: "m", Exclude: []string{"d0"}}); err != nil {
		t.Error(err)
	}
}
