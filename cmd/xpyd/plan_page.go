package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/xpyd/xpyd/internal/chart"
	"github.com/xpyd/xpyd/internal/loadgen/report"
	"github.com/xpyd/xpyd/internal/sim"
)

// writePage writes a page that needs nothing else.
func (r *plan) writePage(w io.Writer) error {
	head, rows := r.rows()
	page := chart.Page{Title: "xpyd plan", About: r.title(), Sections: []chart.Section{{Title: "Fleets", Tables: []chart.Table{{Head: head, Rows: rows}}, Text: r.says()}}}
	if len(r.Run) > 0 {
		page.Sections = append(page.Sections, chart.Section{Title: "To start " + r.best().Fleet, Code: strings.Join(r.Run, "\n")})
	}
	if charts := r.charts(); len(charts) > 0 {
		s := chart.Section{Title: "Over the rate", Charts: charts}
		if len(r.Fleets) > chart.Colors {
			s.Text = []string{fmt.Sprintf("The plots are of the best %d of %d fleets.", chart.Colors, len(r.Fleets))}
		}
		page.Sections = append(page.Sections, s)
	}
	inputs := [][]string{{"load", r.Load}, {"window of load, for each try", fmt.Sprintf("%g s", r.Window)}, {"good", fmt.Sprintf("%g %% of the requests within %s", 100*r.Share, r.Promise)},
		{"a worker", fmt.Sprintf("%s, %d KV blocks of %d tokens, %d sequences and %d tokens a step", r.Table.Backend, r.Table.Blocks, r.Table.BlockTokens, r.Table.MaxBatch, r.Table.StepTokens)},
		{"step table", fmt.Sprintf("%s, %s, by %s", r.Table.Date, r.Table.Build, r.Table.Command)}, {"command", r.Command}}
	if r.Price > 0 {
		inputs = append(inputs, []string{"a worker's price", digits(r.Price) + " an hour"})
	}
	page.Sections = append(page.Sections, chart.Section{Title: "Inputs", Tables: []chart.Table{{Head: []string{"what", "is"}, Rows: inputs, Words: []int{1}}}})
	return page.WriteHTML(w)
}

// charts are the fleets' curves over the rate that is offered: of as many fleets as can be told apart, with the
// limits that make a request good.
func (r *plan) charts() (out []chart.Chart) {
	limits := report.SLO{}
	if r.Limits != nil {
		limits = *r.Limits
	}
	list := []struct {
		title string
		of    func(*sim.Point) float64
		limit float64 // milliseconds; 0: none
	}{
		{"TTFT, p50", func(p *sim.Point) float64 { return 1e3 * p.TTFT.P50 }, limits.TTFT},
		{"TTFT, p99", func(p *sim.Point) float64 { return 1e3 * p.TTFT.P99 }, limits.TTFT},
		{"TPOT, p99", func(p *sim.Point) float64 { return 1e3 * p.Gap.P99 }, limits.TPOT},
		{"Longest ITL, p99", func(p *sim.Point) float64 { return 1e3 * p.Worst.P99 }, limits.ITL},
	}
	good := chart.Chart{Title: "Good requests", Y: "% of the requests", Top: 100,
		Limits: []chart.Limit{{Name: "to be good", At: 100 * r.Share}, {Name: "bound: no fleet keeps it up", At: r.Bound, Upright: true}}}
	out = r.curves(out, good, func(p *sim.Point) float64 { return 100 * p.Good })
	for i := range list {
		c := chart.Chart{Title: list[i].title, Y: "ms", LogY: true}
		if list[i].limit > 0 {
			c.Limits = []chart.Limit{{Name: fmt.Sprintf("SLO %g ms", list[i].limit), At: list[i].limit}}
		}
		out = r.curves(out, c, list[i].of)
	}
	return out
}

// curves adds a chart with a line for each fleet, unless there is nothing to draw.
func (r *plan) curves(to []chart.Chart, c chart.Chart, of func(*sim.Point) float64) []chart.Chart {
	c.X, c.Tick = "requests/s", digits
	any := false
	for n, g := range r.Fleets[:min(len(r.Fleets), chart.Colors)] {
		l := chart.Line{Name: g.Fleet, Color: n}
		for _, p := range g.Curve {
			if y := of(&p); y > 0 || !c.LogY {
				l.Points = append(l.Points, chart.Point{X: p.Rate, Y: y})
			}
		}
		any = any || len(l.Points) > 0
		c.Lines = append(c.Lines, l)
	}
	if !any {
		return to
	}
	return append(to, c)
}
