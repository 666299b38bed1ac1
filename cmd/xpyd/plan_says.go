package main

import (
	"fmt"
	"slices"

	"github.com/xpyd/xpyd/internal/sim"
)

// says is what follows from the figures, in sentences.
func (r *plan) says() []string {
	list := append(r.saysNeed(), fmt.Sprintf("At most %s requests/s: no fleet of %s keeps up more, whatever it does. So much the devices compute by the best mix of steps,", digits(r.Bound), counted(r.Workers)),
		"where nothing is computed twice (linear programming). Times to first tokens are not in that.")
	best := r.best()
	switch {
	case r.tooShort():
		list = append(list, "The load is too short to find every limit: give a longer one.")
	case best.Speed == 0:
		list = append(list, "No fleet keeps these limits at any load that was tried.")
	case best.Split.Whole > 0:
		list = append(list, "Whole workers take the most.")
	case best.Split.Mixed > 0:
		list = append(list, "Workers of which each does any part of a request take the most.")
	default:
		list = append(list, best.Fleet+" takes the most.")
	}
	return append(list, r.saysSure()...)
}

// tooShort reports whether a fleet's limit was not found.
func (r *plan) tooShort() bool {
	return slices.ContainsFunc(r.Fleets, func(g planned) bool { return g.AtLeast })
}

// fewRequests are too few to say much of a load.
const fewRequests = 20

// saysNeed says how many workers the load needs.
func (r *plan) saysNeed() []string {
	n := r.Need
	if n == nil {
		return nil
	}
	from := fmt.Sprintf("A load of %s requests/s", digits(n.Rate))
	if n.Requests < fewRequests {
		from = fmt.Sprintf("Only %d of the load's requests come in a window: a longer --window tells more. %s", n.Requests, from)
	}
	switch {
	case n.Workers == 0 && n.From == n.To:
		return []string{fmt.Sprintf("%s is too much for %s.", from, counted(n.To))}
	case n.Workers == 0:
		return []string{fmt.Sprintf("%s needs more than %s: this is what these take.", from, counted(n.To))}
	case n.Workers == n.From:
		return []string{fmt.Sprintf("%s is kept up by %s.", from, counted(n.Workers))}
	}
	return []string{fmt.Sprintf("%s needs %s: with %d no fleet keeps it up.", from, counted(n.Workers), n.Workers-1)}
}

// saysSure says how sure the order is, and what else may be off.
func (r *plan) saysSure() (list []string) {
	if s := r.Sure; s != nil {
		line := fmt.Sprintf("Over %d seeds", len(s.Fleets[0].Rates))
		for i, f := range s.Fleets {
			line += fmt.Sprintf("%s %s takes %s to %s requests/s", []string{":", ","}[i], f.Fleet, digits(f.Low), digits(f.High))
		}
		list = append(list, line+".")
		if l := s.Lead; l != nil && l.Clear {
			list = append(list, fmt.Sprintf("With every seed %s is ahead of the other, by %.1f to %.1f %%, %.1f %% in the median.", l.Fleet, 100*l.Low, 100*l.High, 100*l.Median))
		} else if l != nil {
			list = append(list, fmt.Sprintf("Too close to call: seed by seed %s is ahead by %.1f to %.1f %%, %.1f %% in the median, and a search may be off by %.0f %%.",
				l.Fleet, 100*l.Low, 100*l.High, 100*l.Median, 100*sim.DefaultResolution))
		}
		if s.Traced {
			list = append(list, "Each seed begins the trace elsewhere.")
		}
	}
	if h := r.HeldOut; h.Steps > 0 {
		list = append(list, fmt.Sprintf("The table is off by %.1f %% (median) and %.1f %% (p90) of %d steps that it is not made of; runs of one step differ by %.1f %%.",
			100*h.Median, 100*h.P90, h.Steps, 100*r.Noise))
		if h.Bad() {
			list = append(list, "That is a bad table, and what is said here is not to be relied on: "+remeasure+".")
		}
	}
	return append(list, "How far such plans are from real fleets was measured: twin.* in bench/README.md.")
}
