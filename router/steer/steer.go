// Package steer has a router's planner (router/planner) see its fleet, and carries out or publishes what it decides.
// There is one planner for each model. Of several routers one does it; see Deps.Leads.
package steer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router/flight"
	"github.com/xpyd/xpyd/router/planner"
)

// Process is a worker's that this machine runs or will run.
type Process struct {
	ID   string
	Role string
	Ends bool // it was asked to end
}

// Hands start and end workers: `xpyd up`.
type Hands interface {
	// Processes lists all, also those that the fleet has not heard of yet.
	Processes() []Process
	// Scale starts so many workers more of a role or, below 0, ends so many; drained ones go first. It returns the
	// IDs of those that start or end.
	Scale(role string, by int) ([]string, error)
}

// Deps is what a Steer is given.
type Deps struct {
	Config
	Log      *slog.Logger
	Snapshot func() *fleet.Snapshot
	// Serves and Drained say what this router gives a worker.
	Serves, Drained func(*fleet.Member) bool
	Tallies         func() map[string]flight.Tally
	// Legs are how many this router and the others have open: the others' requests are estimated by them.
	Legs func() (own, others int)
	// Leads reports whether this router is the one that plans.
	Leads func() bool
	// Busy reports whether somebody else changes the fleet as a whole: then nothing is decided.
	Busy  func() bool
	Hands Hands // nil: no worker can be started here
	// Mark drains a worker that is to end; Unmark takes it back. Turn gives one another role, and waits.
	Mark   func(id string, epoch uint64)
	Unmark func(id string)
	Turn   func(ctx context.Context, id string, role fleet.Role) error
	// Note writes to the audit log.
	Note func(action, is string)
}

const (
	every     = time.Second
	maxModels = 16
	turnLimit = 30 * time.Second
	// settle is how long a router looks for others before it leads.
	settle = 5 * time.Second
)

// Steer is a router's planner. Run does the work.
type Steer struct {
	Deps
	acts     bool
	planners map[string]*model
	shares   share
	seen     atomic.Pointer[Status]
	counted  counts
}

// model is a planner, and what its last sample had counted.
type model struct {
	*planner.Planner
	tally  flight.Tally
	used   int // GPUs
	absent time.Time
}

// New makes one.
func New(d Deps) *Steer {
	s := &Steer{Deps: d, acts: d.Mode == Act && d.Hands != nil, planners: map[string]*model{}}
	s.seen.Store(&Status{Mode: s.mode(), Models: map[string]planner.Status{}})
	return s
}

func (s *Steer) mode() string {
	if s.Mode == Act && !s.acts {
		return Advise
	}
	return s.Mode
}

// Run samples, decides and acts until ctx ends.
func (s *Steer) Run(ctx context.Context) {
	if s.Mode == Off {
		return
	}
	if s.Mode == Act && !s.acts {
		s.Log.Warn("planner.mode act: this router was not started by `xpyd up` and starts no workers; it advises")
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	began := time.Now()
	for {
		select {
		case now := <-tick.C:
			s.tick(ctx, now, now.Sub(began) > settle)
		case <-ctx.Done():
			return
		}
	}
}

// tick looks once.
func (s *Steer) tick(ctx context.Context, now time.Time, settled bool) {
	s.shares.add(s.Legs())
	snapshot, tallies := s.Snapshot(), s.Tallies()
	samples := s.samples(now, snapshot, tallies)
	leads := settled && s.Leads()
	decides := leads && !s.Busy()
	for _, name := range slices.Sorted(maps.Keys(s.planners)) {
		m := s.planners[name]
		m.SetBudget(s.Budget - s.others(name))
		sample := samples[name]
		m.Observe(sample)
		if !decides {
			continue
		}
		for _, d := range m.Decide(now) {
			s.counted.add(d.Kind)
			s.Log.Info("planner", "mode", s.mode(), "model", name, "decision", string(d.Kind), "role", string(d.Role), "n", d.N, "worker", d.Worker, "wanted", d.Wanted,
				"reason", d.Reason, "predicted_utilisation", d.Predicted.Utilisation, "predicted_load", d.Predicted.Load)
			if s.acts {
				s.act(ctx, snapshot, &d)
			}
		}
	}
	if settled {
		s.publish(now, leads)
	}
}

// others are the GPUs that workers of other models have.
func (s *Steer) others(name string) (n int) {
	for other, m := range s.planners {
		if other != name {
			n += m.used
		}
	}
	return n
}

// act carries out a decision. What fails is decided again when its order counts as lost.
func (s *Steer) act(ctx context.Context, snapshot *fleet.Snapshot, d *planner.Decision) {
	is, err := "", error(nil)
	switch d.Kind {
	case planner.Start:
		var ids []string
		ids, err = s.Hands.Scale(string(d.Role), d.N)
		is = "started " + strings.Join(ids, " ")
	case planner.Stop:
		is = "ends " + d.Worker
		err = s.stop(snapshot, d)
	case planner.Flip:
		is = fmt.Sprintf("%s: %s to %s", d.Worker, d.From, d.Role)
		turn, cancel := context.WithTimeout(ctx, turnLimit)
		err = s.Turn(turn, d.Worker, fleet.Role(d.Role))
		cancel()
	}
	if err != nil {
		s.Log.Warn("planner: a decision was not carried out", "decision", string(d.Kind), "role", string(d.Role), "worker", d.Worker, "err", err)
		return
	}
	s.Note("planner", is+": "+d.Reason)
}

// stop drains a worker and ends it.
func (s *Steer) stop(snapshot *fleet.Snapshot, d *planner.Decision) error {
	m := snapshot.Get(d.Worker)
	if m != nil {
		s.Mark(m.ID, m.Epoch)
	}
	ids, err := s.Hands.Scale(string(d.Role), -1)
	if err == nil && len(ids) == 0 {
		err = errors.New("there is none to end")
	}
	if m != nil && !slices.Contains(ids, d.Worker) { // one that was drained before has gone in its place
		s.Unmark(m.ID)
	}
	return err
}
