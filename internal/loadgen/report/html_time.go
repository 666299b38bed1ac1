package report

import (
	"fmt"

	"github.com/xpyd/xpyd/internal/chart"
)

// drawn is the most bins of a timeline that are drawn.
const drawn = 60

// charts are what happened when.
func (t *Timeline) charts() []chart.Chart {
	n := len(t.Started)
	if n == 0 || t.Bin <= 0 {
		return nil
	}
	merge := (n + drawn - 1) / drawn
	width := t.Bin * float64(merge)
	rate := func(name string, color int, of func(i int) float64) chart.Line {
		l := chart.Line{Name: name, Color: color, Bare: true}
		for i := 0; i < n; i += merge {
			sum := 0.0
			for j := i; j < min(i+merge, n); j++ {
				sum += of(j)
			}
			l.Points = append(l.Points, chart.Point{X: t.Bin*float64(i) + width/2, Y: sum / width})
		}
		return l
	}
	requests := chart.Chart{Title: "Requests", X: "s", Y: "requests/s", Lines: []chart.Line{
		rate("started", 0, func(i int) float64 { return float64(t.Started[i]) }), rate("completed", 2, func(i int) float64 { return float64(t.Completed[i]) })}}
	requests.Lines[1].Dashed = true
	for _, failed := range t.Failed {
		if failed > 0 {
			requests.Lines = append(requests.Lines, rate("failed", 1, func(i int) float64 { return float64(t.Failed[i]) }))
			break
		}
	}
	tokens := chart.Chart{Title: "Output", X: "s", Y: "tokens/s", Lines: []chart.Line{rate("", 0, func(i int) float64 { return t.OutputTokens[i] })}}
	flight := chart.Chart{Title: "In flight", X: "s", Y: "requests", WholeY: true, Lines: []chart.Line{{Bare: true, Filled: true}}}
	tokens.Lines[0].Filled = true
	for i := merge - 1; i < n; i += merge {
		flight.Add(t.Bin*float64(i+1), float64(t.InFlight[i]))
	}
	return []chart.Chart{requests, tokens, flight}
}

// scatters are the sample: first tokens by when they were asked for, and by the prompts' lengths.
func (p *Phase) scatters(slo *SLO) (out []chart.Chart) {
	const start, ttft, e2e, input, failed = 0, 1, 2, 4, 7 // columns
	time, of := latencies[0], ttft
	if p.Latency.TTFT.Count == 0 {
		time, of = latencies[3], e2e
	}
	if len(p.Sample) == 0 {
		return nil
	}
	for _, over := range []struct {
		column int
		x      string
		whole  bool
	}{{start, "start, s", false}, {input, "input tokens", true}} {
		c := chart.Chart{Title: fmt.Sprintf("%s, %d requests", time.name, len(p.Sample)), X: over.x, Y: "ms", WholeX: over.whole, Limits: time.limits(slo, false)}
		good, bad := chart.Dots{}, chart.Dots{Name: "failed", Color: 1}
		for _, row := range p.Sample {
			at := chart.Point{X: row[over.column], Y: row[of]}
			switch {
			case row[failed] > 0:
				bad.Points = append(bad.Points, at)
			case at.Y > 0:
				good.Points = append(good.Points, at)
			}
		}
		if c.Dots = append(c.Dots, good); len(bad.Points) > 0 {
			c.Dots = append(c.Dots, bad)
		}
		out = append(out, c)
	}
	return out
}
