package main

import (
	"fmt"
	"io"
	"math"
	"slices"
	"text/tabwriter"

	"github.com/xpyd/xpyd/internal/figures"
	"github.com/xpyd/xpyd/internal/loadgen/report"
	"github.com/xpyd/xpyd/internal/sim"
	"github.com/xpyd/xpyd/internal/steptable"
)

// plan is the result, as JSON. Times are in seconds, rates in requests a second.
type plan struct {
	Table   steptable.About   `json:"table"`
	HeldOut steptable.HeldOut `json:"held_out"` // of the table: by how much it misses steps
	Noise   float64           `json:"noise"`    // and by how much runs of one step differ
	Command string            `json:"command"`
	Load    string            `json:"load"`
	Promise string            `json:"promise"`
	Limits  *report.SLO       `json:"limits,omitempty"` // of the promise that are the same for each request
	Share   float64           `json:"share"`            // of the requests that are to be good
	Window  float64           `json:"window_s"`
	Took    float64           `json:"took_s"`
	Workers int               `json:"workers"`
	Price   float64           `json:"price,omitempty"` // of a worker and hour
	Need    *planNeed         `json:"need,omitempty"`  // nil: nobody asked
	// Bound is a rate that no fleet keeps up: see sim.Case.Highest.
	Bound  float64   `json:"bound"`
	Fleets []planned `json:"fleets"` // the best first
	Sure   *sureness `json:"sure,omitempty"`
	Run    []string  `json:"run,omitempty"` // what starts the best one
}

// planned is a fleet.
type planned struct {
	sim.Goodput
	OfBound float64   `json:"of_bound,omitempty"` // the part of it that is reached
	Cost    *planCost `json:"cost,omitempty"`
}

// planCost is at the fleet's goodput.
type planCost struct {
	Requests float64 `json:"per_1000_good_requests"`
	Tokens   float64 `json:"per_million_good_tokens"` // of output
}

// planNeed is how many workers a load needs that comes as it is described.
type planNeed struct {
	Rate    float64 `json:"rate"`
	From    int     `json:"from"`
	To      int     `json:"to"`
	Workers int     `json:"workers"` // 0: none of these suffice
	// Requests is how many of them a window has.
	Requests int `json:"requests"`
}

// sureness is the goodput of the best two fleets, or the best one, with several seeds.
type sureness struct {
	Fleets []planSeeds `json:"fleets"`
	Traced bool        `json:"traced"` // each begins a trace elsewhere, in place of drawing another load
	Lead   *planLead   `json:"lead,omitempty"`
}

// planSeeds is a fleet.
type planSeeds struct {
	Fleet  string    `json:"fleet"`
	Rates  []float64 `json:"rates"`
	Median float64   `json:"median"`
	Low    float64   `json:"low"`
	High   float64   `json:"high"`
}

// planLead is by which part of the other one's goodput a fleet is ahead.
type planLead struct {
	Fleet  string  `json:"fleet"`
	Median float64 `json:"median"`
	Low    float64 `json:"low"`
	High   float64 `json:"high"`
	Clear  bool    `json:"clear"` // it is with every seed, by more than a search may be off
}

func newSeeds(fleet string, rates []float64) planSeeds {
	return planSeeds{fleet, rates, figures.Median(rates), slices.Min(rates), slices.Max(rates)}
}

// newLead compares two fleets seed by seed: with a seed both get the same load.
func newLead(a, b planSeeds) *planLead {
	var parts []float64
	for i := range a.Rates {
		parts = append(parts, a.Rates[i]/b.Rates[i]-1)
	}
	if figures.Median(parts) < 0 {
		return newLead(b, a)
	}
	l := &planLead{Fleet: a.Fleet, Low: slices.Min(parts), Median: figures.Median(parts), High: slices.Max(parts)}
	l.Clear = l.Low > sim.DefaultResolution
	return l
}

// planned adds what the plan knows of a fleet.
func (r *plan) planned(g sim.Goodput) planned {
	out := planned{Goodput: g}
	if r.Bound > 0 {
		out.OfBound = g.Rate / r.Bound
	}
	if r.Price > 0 && g.Tokens > 0 {
		second := r.Price * float64(r.Workers) / 3600
		out.Cost = &planCost{Requests: 1e3 * second / (g.Rate * g.Good), Tokens: 1e6 * second / g.Tokens}
	}
	return out
}

// best is the fleet that is ahead with most seeds, or else the first.
func (r *plan) best() *planned {
	if r.Sure != nil && r.Sure.Lead != nil && r.Sure.Lead.Fleet == r.Fleets[1].Fleet {
		return &r.Fleets[1]
	}
	return &r.Fleets[0]
}

func (r *plan) writeJSON(w io.Writer) error { return encodeJSON(w, r) }

// writeText prints what people want to know.
func (r *plan) writeText(w io.Writer) error {
	fmt.Fprintf(w, "%s; computed in %.1f s\n\n", r.title(), r.Took)
	tab := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	head, rows := r.rows()
	for _, row := range append([][]string{head}, rows...) {
		for i, cell := range row {
			if i > 0 {
				fmt.Fprint(tab, "\t")
			}
			fmt.Fprint(tab, cell)
		}
		fmt.Fprintln(tab)
	}
	if err := tab.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(w)
	for _, s := range r.says() {
		fmt.Fprintln(w, s)
	}
	if len(r.Run) > 0 {
		fmt.Fprintf(w, "\nTo start %s:\n\n", r.best().Fleet)
		for _, line := range r.Run {
			fmt.Fprintln(w, "  "+line)
		}
	}
	return nil
}

// title says what was planned.
func (r *plan) title() string {
	price := ""
	if r.Price > 0 {
		price = fmt.Sprintf(" for %s an hour", digits(r.Price*float64(r.Workers)))
	}
	return fmt.Sprintf("%s on %s, %s%s; %g %% of requests within %s", r.Table.Model, r.Table.Device, counted(r.Workers), price, 100*r.Share, r.Promise)
}

func counted(workers int) string {
	if workers == 1 {
		return "1 worker"
	}
	return fmt.Sprintf("%d workers", workers)
}

// rows are the table of fleets.
func (r *plan) rows() (head []string, rows [][]string) {
	head = []string{"fleet", "requests/s", "of the best", "of the bound", "good", "TTFT p50, p99, ms", "TPOT p50, p99, ms", "longest ITL p50, p99, ms"}
	if r.Price > 0 {
		head = append(head, "cost of 1,000 good", "of 1M good tokens")
	}
	for _, g := range r.Fleets {
		if g.Speed == 0 {
			rows = append(rows, []string{g.Fleet, "-"})
			continue
		}
		rate := digits(g.Rate)
		if g.AtLeast {
			rate = "at least " + rate
		}
		ms := func(s sim.Spread) string { return digits(1e3*s.P50) + ", " + digits(1e3*s.P99) }
		row := []string{g.Fleet, rate, fmt.Sprintf("%.2f", g.Rate/r.Fleets[0].Rate), fmt.Sprintf("%.2f", g.OfBound), fmt.Sprintf("%.1f %%", 100*g.Good),
			ms(g.TTFT), ms(g.Gap), ms(g.Worst)}
		if g.Cost != nil {
			row = append(row, digits(g.Cost.Requests), digits(g.Cost.Tokens))
		}
		rows = append(rows, row)
	}
	return head, rows
}

// digits writes a number with three digits that count.
func digits(v float64) string {
	if math.Abs(v) >= 1000 {
		return fmt.Sprintf("%.0f", v)
	}
	return fmt.Sprintf("%.3g", v)
}
