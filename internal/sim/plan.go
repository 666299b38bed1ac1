package sim

import (
	"fmt"
	"slices"
	"time"

	"github.com/xpyd/xpyd/internal/loadgen/record"
	"github.com/xpyd/xpyd/router/pick"
)

// Promise is what makes a request good.
type Promise struct {
	record.SLO
	PerToken time.Duration // added to TTFT for each token of the prompt
	Share    float64       // of requests that are to be good
}

// Kept reports whether a request was good.
func (p *Promise) Kept(o *Outcome) bool {
	within := func(limit, took time.Duration) bool { return limit == 0 || took <= limit }
	return !o.Failed && within(p.TTFT+p.PerToken*time.Duration(o.Prompt), o.TTFT()) && within(p.TPOT, o.Gap()) &&
		within(p.ITL, o.Longest) && within(p.E2E, o.Last-o.At)
}

// Split is a fleet: whole workers, prefill and decode apart, or workers of which each does any part.
type Split struct{ Whole, Prefill, Decode, Mixed int }

func (s Split) String() string {
	switch {
	case s.Whole > 0:
		return fmt.Sprintf("%d whole", s.Whole)
	case s.Mixed > 0:
		return fmt.Sprintf("%d mixed", s.Mixed)
	}
	return fmt.Sprintf("%dP%dD", s.Prefill, s.Decode)
}

// Workers is how many there are.
func (s Split) Workers() int { return s.Whole + s.Prefill + s.Decode + s.Mixed }

// Of is the configuration of such a fleet.
func (s Split) Of(cfg Config) Config {
	cfg.Whole, cfg.Prefill, cfg.Decode, cfg.Mixed = s.Whole, s.Prefill, s.Decode, s.Mixed
	if s.Mixed > 0 {
		cfg.Pick.Disaggregate = pick.Mixed
	}
	return cfg
}

// Splits are all fleets of n workers: whole, mixed, and apart.
func Splits(n int) []Split {
	list := []Split{{Whole: n}}
	if n > 1 {
		list = append(list, Split{Mixed: n})
	}
	for p := 1; p < n; p++ {
		list = append(list, Split{Prefill: p, Decode: n - p})
	}
	return list
}

// Point is what a fleet makes of a load at one speed.
type Point struct {
	Speed  float64 `json:"speed"`         // of the load
	Rate   float64 `json:"rate"`          // requests that come in a second
	Good   float64 `json:"good"`          // the share of them that is good
	Tokens float64 `json:"good_tokens_s"` // output tokens of good requests, a second
	TTFT   Spread  `json:"ttft_s"`
	Gap    Spread  `json:"gap_s"`     // means of requests (TPOT)
	Worst  Spread  `json:"longest_s"` // longest gaps of requests (ITL)
}

// Goodput is the highest load of which a fleet has enough good requests. Speed is 0 if it has not at any
// that was tried.
type Goodput struct {
	Split Split  `json:"-"`
	Fleet string `json:"fleet"`
	Point
	Runs int `json:"runs"`
	// AtLeast: no load was too much. It came all at once, or was as large as is tried.
	AtLeast bool `json:"at_least,omitempty"`
	// Curve is what came of all loads that were run to their end, by speed.
	Curve []Point `json:"curve,omitempty"`
}

// Spread is percentiles, in seconds.
type Spread struct {
	P50 float64 `json:"p50"`
	P99 float64 `json:"p99"`
}

// SpreadOf is that of the requests that have not failed.
func SpreadOf(out []Outcome, of func(*Outcome) time.Duration) Spread {
	var list []time.Duration
	for i := range out {
		if !out[i].Failed {
			list = append(list, of(&out[i]))
		}
	}
	if len(list) == 0 {
		return Spread{}
	}
	slices.Sort(list)
	at := func(p int) float64 { return list[min(len(list)-1, len(list)*p/100)].Seconds() }
	return Spread{at(50), at(99)}
}
