package kvbench

import (
	"fmt"
	"html"
	"io"
	"math"
	"slices"
	"strings"
	"time"
)

// Plot writes the sweep as one self-contained SVG: throughput above, latency
// below, against the transfer size.
func (r *Report) Plot(w io.Writer) error {
	c := r.Config
	title := fmt.Sprintf("xpyd bench kv: %s, blocks of %s %s, %d layers, %s, digests %s", r.Transport, Size(c.BlockBytes), c.Scatter, c.Layers,
		count(c.Connections, "connection"), c.Digests)
	rates := chart{label: "GB/s", zero: true, mark: Size, lines: []line{{name: "throughput", colour: blue}}}
	times := chart{label: "latency, ticket to verified", mark: Size, lines: []line{{name: "p50", colour: blue}, {name: "p99", colour: red}}}
	for _, p := range r.Sweep {
		rates.add(float64(p.Bytes), p.GBs.Median)
		times.add(float64(p.Bytes), p.P50, p.P99)
	}
	return draw(w, title, rates, times)
}

// Colours of lines.
const blue, red, green = "#1f6fb4", "#c0392b", "#2e8b57"

// draw writes charts below each other as one SVG.
func draw(w io.Writer, title string, charts ...chart) error {
	var b strings.Builder
	const width, each = 760, 300
	height := 20 + each*len(charts)
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" font-family="sans-serif" font-size="12">`+"\n", width, height, width, height)
	b.WriteString(`<rect width="100%" height="100%" fill="white"/>` + "\n")
	fmt.Fprintf(&b, `<text x="%d" y="20" font-size="14">%s</text>`+"\n", left, html.EscapeString(title))
	for i, c := range charts {
		c.top = float64(50 + i*each)
		c.draw(&b)
	}
	b.WriteString("</svg>\n")
	_, err := io.WriteString(w, b.String())
	return err
}

// PlotHTML is Plot in a page with the table.
func (r *Report) PlotHTML(w io.Writer) error { return page(w, "xpyd bench kv", r) }

// chart is one pair of axes; x and, unless zero, y are logarithmic.
type chart struct {
	top   float64
	label string
	x     []float64
	lines []line
	zero  bool             // y is linear and begins at 0
	mark  func(int) string // of a value of x
}

// add adds a point to each line.
func (c *chart) add(x float64, y ...float64) {
	c.x = append(c.x, x)
	for i := range c.lines {
		c.lines[i].y = append(c.lines[i].y, y[i])
	}
}

type line struct {
	name, colour string
	y            []float64
}

// The plotting area of a chart, in pixels.
const (
	left, right = 70, 730
	tall        = 230
)

func (c chart) draw(b *strings.Builder) {
	lowX, highX := slices.Min(c.x), slices.Max(c.x)
	var all []float64
	for _, l := range c.lines {
		all = append(all, l.y...)
	}
	lowY, highY := slices.Min(all), slices.Max(all)
	ticks := decades(lowY, highY)
	if c.zero {
		lowY, ticks = 0, steps(highY)
		highY = max(highY, ticks[len(ticks)-1])
	} else {
		lowY, highY = min(lowY, ticks[0]), max(highY, ticks[len(ticks)-1])
	}
	at := func(v, low, high float64, log bool) float64 {
		if log {
			v, low, high = math.Log(v), math.Log(low), math.Log(high)
		}
		if high == low {
			return 0.5
		}
		return (v - low) / (high - low)
	}
	px := func(v float64) float64 { return left + (right-left)*at(v, lowX, highX, true) }
	py := func(v float64) float64 { return c.top + tall*(1-at(v, lowY, highY, !c.zero)) }
	fmt.Fprintf(b, `<text x="%d" y="%.0f">%s</text>`+"\n", left, c.top-8, html.EscapeString(c.label))
	for _, v := range ticks {
		fmt.Fprintf(b, `<path d="M%d %.1fH%d" stroke="#ddd"/><text x="%d" y="%.1f" text-anchor="end">%s</text>`+"\n", left, py(v), right, left-8, py(v)+4, c.tick(v))
	}
	for _, v := range c.x {
		fmt.Fprintf(b, `<path d="M%.1f %.0fV%.0f" stroke="#eee"/><text x="%.1f" y="%.0f" text-anchor="middle">%s</text>`+"\n",
			px(v), c.top, c.top+tall, px(v), c.top+tall+18, c.mark(int(v)))
	}
	for i, l := range c.lines {
		var points []string
		for k, v := range l.y {
			points = append(points, fmt.Sprintf("%.1f,%.1f", px(c.x[k]), py(v)))
		}
		fmt.Fprintf(b, `<polyline points="%s" fill="none" stroke="%s" stroke-width="2"/>`+"\n", strings.Join(points, " "), l.colour)
		for k, v := range l.y {
			fmt.Fprintf(b, `<circle cx="%.1f" cy="%.1f" r="3.5" fill="%s"><title>%s %s: %.4g</title></circle>`+"\n", px(c.x[k]), py(v), l.colour, l.name, c.mark(int(c.x[k])), v)
		}
		fmt.Fprintf(b, `<text x="%d" y="%.0f" fill="%s">%s</text>`+"\n", right-150+75*i, c.top-8, l.colour, l.name)
	}
}

// tick writes a value on the y axis: microseconds as people read them.
func (c chart) tick(v float64) string {
	if c.zero {
		return fmt.Sprintf("%.4g", v)
	}
	return time.Duration(v * 1e3).String()
}

// decades are the powers of ten around low..high.
func decades(low, high float64) (out []float64) {
	for v := math.Pow(10, math.Floor(math.Log10(low))); ; v *= 10 {
		if out = append(out, v); v >= high {
			return out
		}
	}
}

// steps are about five round values from 0 to at least high.
func steps(high float64) (out []float64) {
	unit := math.Pow(10, math.Floor(math.Log10(high/5)))
	for _, m := range []float64{1, 2, 5, 10} {
		if unit*m >= high/5 {
			unit *= m
			break
		}
	}
	for v := 0.0; ; v = unit * float64(len(out)) {
		if out = append(out, v); v >= high {
			return out
		}
	}
}
