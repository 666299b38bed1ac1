package report

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/xpyd/xpyd/internal/chart"
)

// WriteHTML writes a page that needs nothing else: what happened over the phases, then each of them.
func (r *Report) WriteHTML(w io.Writer) error {
	page := chart.Page{Title: "xpyd bench", About: fmt.Sprintf("%s, %s", r.about(), r.Started.Format("2006-01-02 15:04 MST"))}
	var measured []*Phase
	for i := range r.Phases {
		if p := &r.Phases[i]; p.Measured {
			measured = append(measured, p)
		}
	}
	if len(measured) > 1 {
		page.Sections = append(page.Sections, r.sweep(measured))
	}
	for _, p := range measured {
		s := p.section(r.SLO)
		s.Folded = len(measured) > 1
		page.Sections = append(page.Sections, s)
	}
	page.Sections = append(page.Sections, chart.Section{Title: "How", Text: append(slices.Clone(r.Notes), "xpyd "+r.Version), Code: strings.Join(r.Command, " ")})
	return page.WriteHTML(w)
}

// about is the model, where it is served and what it was sent.
func (r *Report) about() string {
	streamed := ""
	if r.Target.Stream {
		streamed = ", streamed"
	}
	return fmt.Sprintf("%s at %s (%s%s), %s", r.Target.Model, strings.Join(r.Target.URLs, ", "), r.Target.Endpoint, streamed, r.Load.Kind)
}

// latency is a time that is drawn: what it is, its distribution and its limit.
type latency struct {
	name, long string
	of         func(*Latency) *Values
	limit      func(*SLO) float64
}

var latencies = []latency{
	{"TTFT", "Time to the first token", func(l *Latency) *Values { return &l.TTFT }, func(s *SLO) float64 { return s.TTFT }},
	{"ITL", "Between chunks", func(l *Latency) *Values { return &l.ITL }, func(s *SLO) float64 { return s.ITL }},
	{"TPOT", "Time per output token", func(l *Latency) *Values { return &l.TPOT }, func(s *SLO) float64 { return s.TPOT }},
	{"E2E", "Whole request", func(l *Latency) *Values { return &l.E2E }, func(s *SLO) float64 { return s.E2E }},
}

// limits are the time's limits of an SLO, across or upright; none without one.
func (l *latency) limits(s *SLO, upright bool) []chart.Limit {
	if s == nil || l.limit(s) == 0 {
		return nil
	}
	name := fmt.Sprintf("SLO %g ms", l.limit(s))
	if l.name == "ITL" {
		name += ", the longest of a request"
	}
	return []chart.Limit{{Name: name, At: l.limit(s), Upright: upright}}
}

// level is where phases stand beside each other: the rate or concurrency asked for, or else the rate that was reached.
func level(phases []*Phase) (name string, whole bool, of func(*Phase) float64) {
	all := func(is func(*Phase) bool) bool {
		return !slices.ContainsFunc(phases, func(p *Phase) bool { return !is(p) })
	}
	switch {
	case all(func(p *Phase) bool { return p.Mode == "closed" && p.Concurrency > 0 }):
		return "requests in flight", true, func(p *Phase) float64 { return float64(p.Concurrency) }
	case all(func(p *Phase) bool { return p.RateAsked > 0 }):
		return "requests/s asked for", false, func(p *Phase) float64 { return p.RateAsked }
	}
	return "requests/s reached", false, func(p *Phase) float64 { return p.Throughput.Requests }
}

// percentiles are those that are drawn over a level.
var percentiles = []struct {
	name string
	of   func(*Values) float64
}{
	{"p50", func(v *Values) float64 { return v.P50 }}, {"p90", func(v *Values) float64 { return v.P90 }}, {"p99", func(v *Values) float64 { return v.P99 }},
}

// sweep is the phases beside each other.
func (r *Report) sweep(phases []*Phase) chart.Section {
	name, whole, at := level(phases)
	phases = slices.Clone(phases)
	slices.SortStableFunc(phases, func(a, b *Phase) int {
		switch x, y := at(a), at(b); {
		case x < y:
			return -1
		case x > y:
			return 1
		}
		return 0
	})
	s := chart.Section{Title: "Over " + name}
	table := chart.Table{Head: []string{"phase", "requests/s", "output tokens/s", "TTFT p50", "p99", "ITL p50", "p99", "TPOT p50", "p99", "E2E p50", "p99, ms", "goodput", "failed"}}
	rate := chart.Chart{Title: "Output", X: name, Y: "tokens/s", WholeX: whole, Lines: []chart.Line{{Name: "output tokens/s"}}}
	good := chart.Chart{Title: "Goodput", X: name, Y: "% of the requests", Top: 100, WholeX: whole, Lines: []chart.Line{{Name: "kept the SLO", Color: 2}}}
	for _, p := range phases {
		rate.Add(at(p), p.Throughput.OutputTokens)
		row := []string{p.Name, short(p.Throughput.Requests), short(p.Throughput.OutputTokens)}
		for _, l := range latencies {
			v := l.of(&p.Latency)
			row = append(row, short(v.P50), short(v.P99))
		}
		share := "-"
		if p.Goodput != nil {
			good.Add(at(p), 100*p.Goodput.Fraction)
			share = fmt.Sprintf("%.1f %%", 100*p.Goodput.Fraction)
		}
		table.Rows = append(table.Rows, append(row, share, fmt.Sprint(p.Requests.Failed)))
	}
	s.Tables = []chart.Table{table}
	for _, l := range latencies {
		c := chart.Chart{Title: l.long + ", " + l.name, X: name, Y: "ms", WholeX: whole, Limits: l.limits(r.SLO, false)}
		for i, q := range percentiles {
			line := chart.Line{Name: q.name, Color: i}
			for _, p := range phases {
				if v := l.of(&p.Latency); v.Count > 0 {
					line.Points = append(line.Points, chart.Point{X: at(p), Y: q.of(v)})
				}
			}
			if len(line.Points) > 0 {
				c.Lines = append(c.Lines, line)
			}
		}
		if len(c.Lines) > 0 {
			s.Charts = append(s.Charts, c)
		}
	}
	s.Charts = append(s.Charts, rate)
	if len(good.Lines[0].Points) > 0 {
		s.Charts = append(s.Charts, good)
	}
	return s
}

// section is a phase's figures.
func (p *Phase) section(slo *SLO) chart.Section {
	l := &p.Latency
	s := chart.Section{Title: fmt.Sprintf("%s: %s, %s s", p.Name, p.load(), short(p.Window))}
	tile := func(value, what string) { s.Tiles = append(s.Tiles, chart.Tile{Value: value, What: what}) }
	tile(short(p.Throughput.Requests), "requests/s")
	tile(short(p.Throughput.OutputTokens), "output tokens/s")
	tile(short(p.Throughput.InputTokens), "input tokens/s")
	for _, t := range latencies {
		if v := t.of(l); v.Count > 0 {
			tile(short(v.P50), fmt.Sprintf("%s p50, ms; p99 %s", t.name, short(v.P99)))
		}
	}
	if g := p.Goodput; g != nil {
		tile(fmt.Sprintf("%.1f %%", 100*g.Fraction), "goodput, "+short(g.Rate)+" requests/s")
	}
	s.Tiles = append(s.Tiles, chart.Tile{Value: fmt.Sprint(p.Requests.Failed), What: fmt.Sprintf("failed of %d", p.Requests.Completed+p.Requests.Failed), Bad: p.Requests.Failed > 0})
	s.Tables = p.tables()
	for _, t := range latencies {
		if v := t.of(l); v.Count > 0 && len(v.Bins) > 0 {
			s.Charts = append(s.Charts, chart.Chart{Title: t.long + ", " + t.name, X: "ms", Y: "requests", WholeY: true, Bars: &chart.Bars{From: v.From, To: v.To, Counts: v.Bins},
				Limits: append(t.limits(slo, true), chart.Limit{Name: "p50", At: v.P50, Upright: true}, chart.Limit{Name: "p99", At: v.P99, Upright: true})})
			if t.name == "ITL" {
				s.Charts[len(s.Charts)-1].Y = "gaps"
			}
		}
	}
	s.Charts = append(append(s.Charts, p.Timeline.charts()...), p.scatters(slo)...)
	return s
}

// tables are the latencies, failures and turns.
func (p *Phase) tables() []chart.Table {
	l := &p.Latency
	times := chart.Table{Head: []string{"ms", "count", "mean", "stddev", "min", "p50", "p90", "p95", "p99", "max"}}
	for _, row := range []struct {
		name string
		*Values
	}{{"TTFT", &l.TTFT}, {"ITL", &l.ITL}, {"TPOT", &l.TPOT}, {"E2E", &l.E2E}, {"TTFT from schedule", l.SchedTTFT}, {"E2E from schedule", l.SchedE2E}, {"started late by", l.Late}, {"connect", l.Connect}} {
		if v := row.Values; v != nil && v.Count > 0 {
			cells := []string{row.name, fmt.Sprint(v.Count)}
			for _, x := range []float64{v.Mean, v.StdDev, v.Min, v.P50, v.P90, v.P95, v.P99, v.Max} {
				cells = append(cells, short(x))
			}
			times.Rows = append(times.Rows, cells)
		}
	}
	out := []chart.Table{times}
	if len(p.Errors) > 0 {
		t := chart.Table{Title: "Failures", Head: []string{"kind", "example", "count"}, Words: []int{1}}
		for _, e := range p.Errors {
			t.Rows = append(t.Rows, []string{string(e.Kind), e.Example, fmt.Sprint(e.Count)})
		}
		out = append(out, t)
	}
	if len(p.Turns) > 0 {
		t := chart.Table{Title: "Turns", Head: []string{"turn", "requests", "input tokens", "cached", "TTFT p50", "p99", "E2E p50", "p99, ms"}}
		for _, r := range p.Turns {
			t.Rows = append(t.Rows, []string{fmt.Sprint(r.Turn), fmt.Sprint(r.E2E.Count), fmt.Sprintf("%.0f", r.MeanInput), fmt.Sprintf("%.1f %%", 100*r.CachedFraction),
				short(r.TTFT.P50), short(r.TTFT.P99), short(r.E2E.P50), short(r.E2E.P99)})
		}
		out = append(out, t)
	}
	return out
}
