package main

import (
	_ "embed"
	"fmt"
	"html"
	"io"
	"strings"

	"github.com/xpyd/xpyd/internal/chart"
	"github.com/xpyd/xpyd/internal/loadgen/report"
	"github.com/xpyd/xpyd/internal/sim"
)

//go:embed plan.html
var planPage string

// writePage writes a page that needs nothing else.
func (r *plan) writePage(w io.Writer) error {
	var notes, table strings.Builder
	for _, s := range r.says() {
		fmt.Fprintf(&notes, "%s\n", html.EscapeString(s))
	}
	head, rows := r.rows()
	row := func(cell string, cells []string) {
		table.WriteString("<tr>")
		for i := range head { // a fleet without a goodput has fewer cells
			text := ""
			if i < len(cells) {
				text = html.EscapeString(cells[i])
			}
			fmt.Fprintf(&table, "<%[1]s>%[2]s</%[1]s>", cell, text)
		}
		table.WriteString("</tr>\n")
	}
	row("th", head)
	for _, cells := range rows {
		row("td", cells)
	}
	var run strings.Builder
	if len(r.Run) > 0 {
		fmt.Fprintf(&run, "<section class=\"wide\"><h2>To start %s</h2><pre>%s</pre></section>", html.EscapeString(r.best().Fleet), html.EscapeString(strings.Join(r.Run, "\n")))
	}
	about := [][2]string{{"load", r.Load}, {"window of load, for each try", fmt.Sprintf("%g s", r.Window)}, {"good", fmt.Sprintf("%g %% of the requests within %s", 100*r.Share, r.Promise)},
		{"a worker", fmt.Sprintf("%s, %d KV blocks of %d tokens, %d sequences and %d tokens a step", r.Table.Backend, r.Table.Blocks, r.Table.BlockTokens, r.Table.MaxBatch, r.Table.StepTokens)},
		{"step table", fmt.Sprintf("%s, %s, by %s", r.Table.Date, r.Table.Build, r.Table.Command)}, {"command", r.Command}}
	if r.Price > 0 {
		about = append(about, [2]string{"a worker's price", digits(r.Price) + " an hour"})
	}
	var inputs strings.Builder
	for _, a := range about {
		fmt.Fprintf(&inputs, "<tr><td>%s</td><td class=\"text\">%s</td></tr>\n", a[0], html.EscapeString(a[1]))
	}
	return report.Page(w, planPage, "{{TITLE}}", html.EscapeString(r.title()), "{{NOTES}}", notes.String(), "{{TABLE}}", table.String(),
		"{{RUN}}", run.String(), "{{PLOTS}}", r.plots(), "{{INPUTS}}", inputs.String())
}

// plots are the fleets' curves over the rate that is offered: of as many fleets as colors tell apart.
func (r *plan) plots() string {
	list := []struct {
		chart.Chart
		of    func(*sim.Point) float64
		limit float64 // a line across; 0: none
	}{
		{chart.Chart{Title: "Good requests, and the rate that no fleet keeps up", Y: "% of the requests", Top: 100}, func(p *sim.Point) float64 { return 100 * p.Good }, 100 * r.Share},
		{chart.Chart{Title: "TTFT, p50", Y: "ms", LogY: true}, func(p *sim.Point) float64 { return 1e3 * p.TTFT.P50 }, 0},
		{chart.Chart{Title: "TTFT, p99", Y: "ms", LogY: true}, func(p *sim.Point) float64 { return 1e3 * p.TTFT.P99 }, 0},
		{chart.Chart{Title: "TPOT, p99", Y: "ms", LogY: true}, func(p *sim.Point) float64 { return 1e3 * p.Gap.P99 }, 0},
		{chart.Chart{Title: "Longest ITL, p99", Y: "ms", LogY: true}, func(p *sim.Point) float64 { return 1e3 * p.Worst.P99 }, 0},
	}
	var out strings.Builder
	drawn := r.Fleets
	if most := chart.Colors - 1; len(drawn) > most {
		drawn = drawn[:most]
		fmt.Fprintf(&out, "<p class=\"note\">The plots are of the best %d of %d fleets.</p>\n", most, len(r.Fleets))
	}
	for i := range list {
		c, most := &list[i].Chart, 0.0
		c.X, c.Tick = "requests/s", digits
		for n, g := range drawn {
			l := chart.Line{Name: g.Fleet, Color: n}
			for _, p := range g.Curve {
				if y := list[i].of(&p); y > 0 || !c.LogY {
					l.Points = append(l.Points, chart.Point{X: p.Rate, Y: y})
					most = max(most, p.Rate)
				}
			}
			c.Lines = append(c.Lines, l)
		}
		if most == 0 {
			continue
		}
		if limit := list[i].limit; limit > 0 {
			c.Lines = append(c.Lines, chart.Line{Name: "to be good", Dashed: true, Bare: true, Color: chart.Colors - 1, Points: []chart.Point{{X: 0, Y: limit}, {X: most, Y: limit}}},
				chart.Line{Name: "bound", Bare: true, Color: chart.Colors - 1, Points: []chart.Point{{X: r.Bound, Y: 0}, {X: r.Bound, Y: 100}}})
		}
		fmt.Fprintf(&out, "<section class=\"wide\">%s</section>\n", chart.Column("", *c))
	}
	return out.String()
}
