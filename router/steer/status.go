package steer

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/router/planner"
)

// Status is what GET /admin/v1/planner says.
type Status struct {
	Mode string `json:"mode"` // in force
	// Leads: this router plans. Otherwise another one does, and this one only watches.
	Leads  bool                      `json:"leads"`
	At     time.Time                 `json:"at"`
	Models map[string]planner.Status `json:"models"`
}

// Status is what the planner thinks. It must not be changed.
func (s *Steer) Status() *Status { return s.seen.Load() }

func (s *Steer) publish(now time.Time, leads bool) {
	st := &Status{Mode: s.mode(), Leads: leads, At: now, Models: map[string]planner.Status{}}
	for name, m := range s.planners {
		st.Models[name] = m.Status()
	}
	s.seen.Store(st)
}

// Line is the status in a line; "" without a planner.
func (s *Steer) Line() string {
	st := s.Status()
	switch {
	case st.Mode == Off || st.At.IsZero():
		return ""
	case !st.Leads:
		return "planner: another router plans"
	}
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(st.Models)) {
		for _, r := range st.Models[name].Roles {
			part := fmt.Sprintf("%s %d (wanted %d", r.Role, r.Have, r.Wanted)
			if len(st.Models) > 1 {
				part = name + " " + part
			}
			if r.PerWorker > 0 {
				part += fmt.Sprintf(", needs %.1f", r.Need)
			}
			parts = append(parts, part+")")
		}
	}
	return "planner (" + st.Mode + "): " + strings.Join(parts, ", ")
}

// counts are of decisions.
type counts struct {
	mu sync.Mutex
	by map[planner.Kind]int
}

func (c *counts) add(k planner.Kind) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.by == nil {
		c.by = map[planner.Kind]int{}
	}
	c.by[k]++
}

var (
	byRole    = []string{"model", "role"}
	wanted    = prometheus.NewDesc("xpyd_planner_wanted_workers", "Workers that the planner wants, within bounds and budget; only the router that plans has it. What HPA and KEDA scale by.", byRole, nil)
	here      = prometheus.NewDesc("xpyd_planner_workers", "Workers that serve or start, as the planner counts them.", byRole, nil)
	needed    = prometheus.NewDesc("xpyd_planner_needed_workers", "Workers that the expected load takes at the utilisation aimed at, without bounds and budget.", byRole, nil)
	load      = prometheus.NewDesc("xpyd_planner_load_tokens_per_second", "Load of the last two minutes in prompt tokens a second; an answer's token counts as four of whole workers, and decode workers have only those.", byRole, nil)
	used      = prometheus.NewDesc("xpyd_planner_utilisation_ratio", "Part of what the workers can compute that the load of the last minute took, as the planner has learned it.", byRole, nil)
	leading   = prometheus.NewDesc("xpyd_planner_leads", "1 on the router that plans, 0 on those that only watch.", nil, nil)
	decisions = prometheus.NewDesc("xpyd_planner_decisions_total", "Decisions of the planner. In mode advise nobody has carried them out.", []string{"kind"}, nil)
)

// Describe implements prometheus.Collector.
func (s *Steer) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{wanted, here, needed, load, used, leading, decisions} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (s *Steer) Collect(ch chan<- prometheus.Metric) {
	st := s.Status()
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	lead := 0.0
	if st.Leads {
		lead = 1
		for name, m := range st.Models {
			for _, r := range m.Roles {
				gauge(wanted, float64(r.Wanted), name, string(r.Role))
				gauge(here, float64(r.Have), name, string(r.Role))
				gauge(needed, r.Need, name, string(r.Role))
				gauge(load, r.Now.Load, name, string(r.Role))
				gauge(used, r.Now.Utilisation, name, string(r.Role))
			}
		}
	}
	gauge(leading, lead)
	s.counted.mu.Lock()
	defer s.counted.mu.Unlock()
	for _, k := range []planner.Kind{planner.Start, planner.Stop, planner.Flip} {
		ch <- prometheus.MustNewConstMetric(decisions, prometheus.CounterValue, float64(s.counted.by[k]), string(k))
	}
}
