package steer

import (
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router/flight"
	"github.com/xpyd/xpyd/router/planner"
)

// samples makes a sample for each model. A model that is new gets its planner.
func (s *Steer) samples(now time.Time, snapshot *fleet.Snapshot, tallies map[string]flight.Tally) map[string]planner.Sample {
	out := map[string]planner.Sample{}
	ends, known := s.processes(), map[string]bool{}
	for i := range snapshot.Members {
		m := &snapshot.Members[i]
		if m.State == fleet.Dead || m.State == fleet.Gone || m.Model == "" {
			continue
		}
		if s.planners[m.Model] == nil {
			if len(s.planners) >= maxModels {
				continue
			}
			s.planners[m.Model] = &model{Planner: planner.New(s.Config.Config, s.acts), tally: tallies[m.Model]}
		}
		known[m.ID] = true
		x := out[m.Model]
		x.Workers = append(x.Workers, s.worker(m, ends[m.ID].Ends))
		out[m.Model] = x
	}
	for name, m := range s.planners {
		x := out[name]
		if len(s.planners) == 1 { // of `up`, which has one model
			for id, p := range ends {
				if known[id] {
					continue
				}
				w := planner.Worker{ID: id, Role: planner.Role(p.Role)}
				if p.Ends {
					w.State = planner.Draining
				}
				x.Workers = append(x.Workers, w)
			}
		}
		if s.forget(now, name, m, len(x.Workers) > 0) {
			continue
		}
		s.count(&x, name, m, tallies)
		x.At = now
		m.used = 0
		for i := range x.Workers {
			m.used += max(1, x.Workers[i].GPUs)
		}
		out[name] = x
	}
	return out
}

// forgetAfter is when a model without workers is forgotten.
const forgetAfter = time.Hour

func (s *Steer) forget(now time.Time, name string, m *model, present bool) bool {
	switch {
	case present:
		m.absent = time.Time{}
	case m.absent.IsZero():
		m.absent = now
	case now.Sub(m.absent) > forgetAfter:
		delete(s.planners, name)
		return true
	}
	return false
}

func (s *Steer) processes() map[string]Process {
	out := map[string]Process{}
	if s.Hands != nil {
		for _, p := range s.Hands.Processes() {
			out[p.ID] = p
		}
	}
	return out
}

func (s *Steer) worker(m *fleet.Member, ends bool) planner.Worker {
	w := planner.Worker{ID: m.ID, Role: planner.Role(m.Role), State: planner.Starting, Running: m.Load.Running, Waiting: m.Load.Waiting,
		QueuedTokens: m.Load.QueuedTokens, GPUs: max(1, m.TP) * max(1, m.PP)}
	if m.Dialect == fleet.Native && len(m.Devices) == 0 { // its ranks are threads
		w.GPUs = 1
	}
	if m.Alone() {
		w.Role = planner.Whole
	}
	switch {
	case ends || m.Draining || s.Drained(m):
		w.State = planner.Draining
	case s.Serves(m):
		w.State = planner.Serving
	}
	return w
}

// count counts what has come since the last sample. Requests of other routers are like one's own, as many more as
// they have legs open.
func (s *Steer) count(x *planner.Sample, name string, m *model, tallies map[string]flight.Tally) {
	now := tallies[name]
	if len(s.planners) == 1 { // what was asked for while none was served meant it, too
		none := tallies[""]
		now.Requests, now.PromptTokens = now.Requests+none.Requests, now.PromptTokens+none.PromptTokens
		now.Ended, now.OutputTokens = now.Ended+none.Ended, now.OutputTokens+none.OutputTokens
	}
	was := m.tally
	m.tally = now
	more := s.shares.all()
	scaled := func(n int) int { return int(float64(n)*more + 0.5) }
	x.Requests, x.PromptTokens = scaled(now.Requests-was.Requests), scaled(now.PromptTokens-was.PromptTokens)
	x.Ended, x.OutputTokens = scaled(now.Ended-was.Ended), scaled(now.OutputTokens-was.OutputTokens)
	x.Streaming, x.Gaps = now.Streaming-was.Streaming, now.Gaps-was.Gaps
	x.Good, x.Judged = now.Good-was.Good, now.Judged-was.Judged
}

// share is which part of all requests this router has.
type share struct{ own, others float64 }

// lasts is how many samples count.
const lasts = 120

func (h *share) add(own, others int) {
	const keep = 1 - 1.0/lasts
	h.own, h.others = h.own*keep+float64(own), h.others*keep+float64(others)
}

// all is how many times as many requests all routers have, at most 16 times.
func (h *share) all() float64 {
	if h.own == 0 {
		return 1
	}
	return min(16, 1+h.others/h.own)
}
