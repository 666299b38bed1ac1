package steer_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router/flight"
	"github.com/xpyd/xpyd/router/planner"
	"github.com/xpyd/xpyd/router/steer"
)

// site is all that a Steer sees and does.
type site struct {
	mu      sync.Mutex
	members []fleet.Member
	procs   []steer.Process
	tallies map[string]flight.Tally
	others  int
	leads   bool
	busy    bool
	fails   bool
	marked  map[string]bool
	did     []string
}

func newSite(members ...fleet.Member) *site {
	s := &site{members: members, leads: true, tallies: map[string]flight.Tally{}, marked: map[string]bool{}}
	for _, m := range members {
		s.procs = append(s.procs, steer.Process{ID: m.ID, Role: string(m.Role)})
	}
	return s
}

func member(id, model string, role fleet.Role) fleet.Member {
	return fleet.Member{State: fleet.Live, Instance: fleet.Instance{ID: id, Epoch: 1, Model: model, Role: role, Dialect: fleet.Native}}
}

func (s *site) Processes() []steer.Process {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.procs)
}

func (s *site) Scale(role string, by int) ([]string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.did = append(s.did, fmt.Sprintf("scale %s %+d", role, by))
	if s.fails {
		return nil, errors.New("no room")
	}
	if by > 0 {
		id := fmt.Sprintf("%s-%d", role, len(s.procs))
		s.procs = append(s.procs, steer.Process{ID: id, Role: role})
		return []string{id}, nil
	}
	for i, p := range s.procs {
		if p.Role == role && s.marked[p.ID] {
			s.procs[i].Ends = true
			return []string{p.ID}, nil
		}
	}
	return nil, nil
}

// run has a Steer work for some time.
func (s *site) run(t *testing.T, cfg steer.Config, hands steer.Hands, d time.Duration) *steer.Steer {
	t.Helper()
	x := steer.New(steer.Deps{Config: cfg, Log: slog.New(slog.DiscardHandler),
		Snapshot: func() *fleet.Snapshot {
			s.mu.Lock()
			defer s.mu.Unlock()
			return fleet.NewSnapshot(1, time.Now(), slices.Clone(s.members))
		},
		Serves: func(m *fleet.Member) bool { return !m.Draining }, Drained: func(m *fleet.Member) bool { s.mu.Lock(); defer s.mu.Unlock(); return s.marked[m.ID] },
		Tallies: func() map[string]flight.Tally { s.mu.Lock(); defer s.mu.Unlock(); return s.tallies },
		Legs:    func() (int, int) { return 10, s.others }, Leads: func() bool { return s.leads }, Busy: func() bool { return s.busy }, Hands: hands,
		Mark:   func(id string, _ uint64) { s.mu.Lock(); defer s.mu.Unlock(); s.marked[id] = true },
		Unmark: func(id string) { s.mu.Lock(); defer s.mu.Unlock(); delete(s.marked, id) },
		Turn: func(_ context.Context, id string, role fleet.Role) error {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.did = append(s.did, fmt.Sprintf("turn %s %s", id, role))
			for i := range s.members {
				if s.members[i].ID == id {
					s.members[i].Role = role
				}
			}
			return nil
		},
		Note: func(_, is string) { s.mu.Lock(); defer s.mu.Unlock(); s.did = append(s.did, "note "+is) }})
	ctx, cancel := context.WithTimeout(t.Context(), d)
	defer cancel()
	x.Run(ctx)
	return x
}

// TestActs: decisions are carried out by the hands and by orders, and noted.
func TestActs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := steer.DefaultConfig()
		cfg.Mode, cfg.Budget, cfg.Prefill.Min = steer.Act, 3, 2
		s := newSite(member("p0", "m", fleet.Prefill), member("d0", "m", fleet.Decode), member("d1", "m", fleet.Decode))
		x := s.run(t, cfg, s, 10*time.Second)
		if !slices.Equal(s.did[:1], []string{"turn d1 prefill"}) || len(s.did) != 2 || !strings.HasPrefix(s.did[1], "note d1: decode to prefill: ") {
			t.Errorf("%q", s.did)
		}
		if got := x.Line(); got != "planner (act): decode 1 (wanted 1), prefill 2 (wanted 2)" {
			t.Error(got)
		}
		want := "# HELP xpyd_planner_leads 1 on the router that plans, 0 on those that only watch.\n# TYPE xpyd_planner_leads gauge\nxpyd_planner_leads 1\n"
		if err := testutil.CollectAndCompare(x, strings.NewReader(want), "xpyd_planner_leads"); err != nil {
			t.Error(err)
		}
	})
}

// TestStops: too many workers go after the cool-down, drained first.
func TestStops(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := steer.DefaultConfig()
		cfg.Mode, cfg.CoolDown = steer.Act, time.Minute
		s := newSite(member("p0", "m", fleet.Prefill), member("d0", "m", fleet.Decode), member("d1", "m", fleet.Decode))
		s.run(t, cfg, s, 3*time.Minute)
		if len(s.did) != 2 || s.did[0] != "scale decode -1" || !s.marked["d1"] || !strings.HasPrefix(s.did[1], "note ends d1: 1 decode workers have been enough") {
			t.Errorf("%q, drained %v", s.did, s.marked)
		}
	})
}

// TestOnlyPublishes: without hands, in mode advise and on a router that does not lead nothing is done.
func TestOnlyPublishes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, c := range []struct {
			mode   string
			hands  bool
			leads  bool
			says   string
			series int
		}{
			{steer.Act, false, true, "planner (advise): decode 1 (wanted 2), prefill 1 (wanted 1)", 2},
			{steer.Advise, true, true, "planner (advise): decode 1 (wanted 2), prefill 1 (wanted 1)", 2},
			{steer.Act, true, false, "planner: another router plans", 0},
			{steer.Off, true, true, "", 0},
		} {
			cfg := steer.DefaultConfig()
			cfg.Mode, cfg.Decode.Min = c.mode, 2
			s := newSite(member("p0", "m", fleet.Prefill), member("d0", "m", fleet.Decode))
			s.leads = c.leads
			var hands steer.Hands
			if c.hands {
				hands = s
			}
			x := s.run(t, cfg, hands, time.Minute)
			if got := x.Line(); got != c.says || len(s.did) > 0 {
				t.Errorf("%+v: %q, did %q", c, got, s.did)
			}
			if n := testutil.CollectAndCount(x, "xpyd_planner_wanted_workers"); n != c.series {
				t.Errorf("%+v: %d series", c, n)
			}
		}
	})
}

// TestBusy: while a fleet is upgraded it has twice as many workers, and none of them is too many.
func TestBusy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := steer.DefaultConfig()
		cfg.Mode, cfg.Budget = steer.Act, 2
		s := newSite(member("p0", "m", fleet.Prefill), member("d0", "m", fleet.Decode), member("p1", "m", fleet.Prefill), member("d1", "m", fleet.Decode))
		s.busy = true
		if s.run(t, cfg, s, time.Minute); len(s.did) > 0 {
			t.Errorf("%q", s.did)
		}
		s.busy = false
		if s.run(t, cfg, s, time.Minute); len(s.did) == 0 {
			t.Error("nothing was done afterwards")
		}
	})
}

// TestFails: what cannot be done is tried again a minute later, and is not noted.
func TestFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := steer.DefaultConfig()
		cfg.Mode, cfg.Decode.Min, cfg.StartTime = steer.Act, 2, 10*time.Second
		s := newSite(member("p0", "m", fleet.Prefill), member("d0", "m", fleet.Decode))
		s.fails = true
		s.run(t, cfg, s, 2*time.Minute+30*time.Second)
		if len(s.did) != 3 || s.did[2] != "scale decode +1" {
			t.Errorf("%q", s.did)
		}
	})
}

// TestCounts: requests of other routers count by their legs, those that came while nothing was served count for the
// only model, and a model's budget is what others leave.
func TestCounts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := steer.DefaultConfig()
		cfg.Budget = 4
		s := newSite(member("p0", "m", fleet.Prefill), member("d0", "m", fleet.Decode))
		s.others = 10
		s.tallies = map[string]flight.Tally{"m": {}}
		first := s
		go func() {
			for range 60 {
				time.Sleep(time.Second) // of the bubble's clock
				first.mu.Lock()
				a, b := first.tallies["m"], first.tallies[""]
				a.Requests, a.PromptTokens, b.PromptTokens = a.Requests+1, a.PromptTokens+100, b.PromptTokens+50
				first.tallies = map[string]flight.Tally{"m": a, "": b}
				first.mu.Unlock()
			}
		}()
		x := s.run(t, cfg, nil, 50*time.Second)
		for _, r := range x.Status().Models["m"].Roles {
			if r.Role == planner.Prefill && (r.Now.Load < 280 || r.Now.Load > 320) {
				t.Errorf("%+v, want 2 times 150 tokens a second", r)
			}
		}
		time.Sleep(time.Minute) // lets the other end

		cfg.Decode.Min = 2
		s = newSite(member("p0", "m", fleet.Prefill), member("d0", "m", fleet.Decode), member("e0", "n", fleet.Prefill), member("e1", "n", fleet.Decode))
		x = s.run(t, cfg, nil, 10*time.Second)
		for model, st := range x.Status().Models {
			for _, r := range st.Roles {
				if r.Wanted != 1 {
					t.Errorf("%s: %+v, with a budget of 4 for four workers", model, r)
				}
			}
		}
	})
}

func TestValidate(t *testing.T) {
	for key, change := range map[string]func(*steer.Config){
		"mode":   func(c *steer.Config) { c.Mode = "auto" },
		"ttft":   func(c *steer.Config) { c.TTFT = -1 },
		"tpot":   func(c *steer.Config) { c.TPOT = 2 * time.Hour },
		"budget": func(c *steer.Config) { c.Budget = 0 },
	} {
		c := steer.DefaultConfig()
		change(&c)
		if err := c.Validate(); err == nil || !strings.HasPrefix(err.Error(), key+":") {
			t.Errorf("%s: %v", key, err)
		}
	}
}
