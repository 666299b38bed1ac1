// Package chart draws line charts as SVG, for documents and reports. It knows nothing of what it draws.
package chart

import (
	"fmt"
	"html"
	"math"
	"slices"
	"strconv"
	"strings"
)

// Chart is lines over one pair of axes. An axis begins at 0, or is logarithmic: then all values are greater.
type Chart struct {
	Title, X, Y string
	LogX, LogY  bool
	Mark, Tick  func(float64) string // write places and values; nil: as numbers
	Top         float64              // of the axis of y; 0: what the lines need
	Lines       []Line
}

// Line is the points of one thing, each joined to the next.
type Line struct {
	Name   string
	Points []Point
	Dashed bool
	Bare   bool // without marks at its points, such as a limit
	Color  int  // of colors: 0: blue, 1: red, 2: green
}

// Point is a value at a place.
type Point struct{ X, Y float64 }

// Pixels.
const (
	height, narrow, wide     = 300, 440, 760 // of a chart in a row, and in a column
	left, right, top, bottom = 70, 30, 50, 44
	heading                  = 26 // of a column
)

// colors stand out from white and from a dark page.
var colors = [...]string{"#1f6fb4", "#c0392b", "#2e8b57", "#b8860b", "#8e5bb5", "#0e8f9c", "#c2478f", "#7a7a7a"}

// Colors is how many lines can be told apart.
const Colors = len(colors)

// Add adds a point to each line, at one place.
func (c *Chart) Add(x float64, y ...float64) {
	for i := range c.Lines {
		c.Lines[i].Points = append(c.Lines[i].Points, Point{x, y[i]})
	}
}

// Row draws charts side by side.
func Row(charts ...Chart) []byte {
	return document(narrow*len(charts), height, func(b *strings.Builder) {
		for i := range charts {
			charts[i].draw(b, narrow*i, 0, narrow)
		}
	})
}

// Column draws charts below each other, under a title.
func Column(title string, charts ...Chart) []byte {
	return document(wide, heading+height*len(charts), func(b *strings.Builder) {
		fmt.Fprintf(b, `<text x="%d" y="20" font-size="14">%s</text>`+"\n", left, html.EscapeString(title))
		for i := range charts {
			charts[i].draw(b, 0, heading+height*i, wide)
		}
	})
}

func document(width, height int, draw func(*strings.Builder)) []byte {
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %[1]d %[2]d" width="%[1]d" height="%[2]d" font-family="sans-serif" font-size="12">`+"\n", width, height)
	b.WriteString(`<rect width="100%" height="100%" fill="white"/>` + "\n")
	draw(&b)
	b.WriteString("</svg>\n")
	return []byte(b.String())
}

func (c *Chart) draw(b *strings.Builder, atX, atY, width int) {
	xs, ys := c.axes()
	px := func(v float64) float64 { return left + float64(width-left-right)*xs.part(v) }
	py := func(v float64) float64 { return height - bottom - (height-top-bottom)*ys.part(v) }
	text := func(x, y float64, how, s string) {
		fmt.Fprintf(b, `<text x="%.1f" y="%.1f"%s>%s</text>`+"\n", x, y, how, html.EscapeString(s))
	}
	const middle, end = ` text-anchor="middle"`, ` text-anchor="end"`
	fmt.Fprintf(b, `<g transform="translate(%d %d)">`+"\n", atX, atY)
	text(left, 18, ` font-weight="bold"`, c.Title)
	for _, v := range ys.ticks {
		fmt.Fprintf(b, `<path d="M%d %.1fH%d" stroke="#ddd"/>`+"\n", left, py(v), width-right)
		text(left-8, py(v)+4, end, c.tick(v))
	}
	for _, v := range xs.ticks {
		fmt.Fprintf(b, `<path d="M%.1f %dV%d" stroke="#eee"/>`+"\n", px(v), top, height-bottom)
		text(px(v), height-bottom+16, middle, c.mark(v))
	}
	text(float64(left+width-right)/2, height-8, middle, c.X)
	fmt.Fprintf(b, `<g transform="translate(14 %d) rotate(-90)">`, (top+height-bottom)/2)
	text(0, 0, middle, c.Y)
	b.WriteString("</g>\n")
	at := float64(left)
	for i := range c.Lines {
		l := &c.Lines[i]
		c.line(b, l, px, py)
		fmt.Fprintf(b, `<path d="M%.1f 34h18" %s/>`+"\n", at, l.stroke())
		text(at+23, 38, "", l.Name)
		at += 42 + 6.5*float64(len(l.Name))
	}
	b.WriteString("</g>\n")
}

func (c *Chart) line(b *strings.Builder, l *Line, px, py func(float64) float64) {
	var points []string
	for _, p := range l.Points {
		points = append(points, fmt.Sprintf("%.1f,%.1f", px(p.X), py(p.Y)))
		if l.Bare {
			continue
		}
		fmt.Fprintf(b, `<circle cx="%.1f" cy="%.1f" r="3.5" fill="%s"><title>%s %s: %.4g</title></circle>`+"\n",
			px(p.X), py(p.Y), l.color(), html.EscapeString(l.Name), html.EscapeString(c.mark(p.X)), p.Y)
	}
	fmt.Fprintf(b, `<polyline points="%s" %s/>`+"\n", strings.Join(points, " "), l.stroke())
}

func (l *Line) color() string { return colors[l.Color%len(colors)] }

func (l *Line) stroke() string {
	s := fmt.Sprintf(`stroke="%s" fill="none" stroke-width="2"`, l.color())
	if l.Dashed {
		s += ` stroke-dasharray="5 4"`
	}
	return s
}

func (c *Chart) mark(x float64) string { return written(c.Mark, x) }
func (c *Chart) tick(y float64) string { return written(c.Tick, y) }

func written(how func(float64) string, v float64) string {
	if how != nil {
		return how(v)
	}
	return strconv.FormatFloat(v, 'g', 6, 64)
}

// axis is from low to high.
type axis struct {
	low, high float64
	log       bool
	ticks     []float64
}

// axes are those that the points need. A logarithmic x has a tick at each place.
func (c *Chart) axes() (x, y axis) {
	var xs, ys []float64
	for _, l := range c.Lines {
		for _, p := range l.Points {
			xs, ys = append(xs, p.X), append(ys, p.Y)
		}
	}
	if len(xs) == 0 {
		xs, ys = []float64{1}, []float64{1}
	}
	slices.Sort(xs)
	if xs = slices.Compact(xs); c.LogX {
		x = axis{xs[0], xs[len(xs)-1], true, xs}
	} else {
		x = upTo(xs[len(xs)-1])
	}
	low, high := slices.Min(ys), slices.Max(ys)
	if c.Top > 0 {
		high = c.Top
	}
	if !c.LogY {
		return x, upTo(high)
	}
	ticks := decades(low, high)
	return x, axis{min(low, ticks[0]), max(high, ticks[len(ticks)-1]), true, ticks}
}

func upTo(high float64) axis {
	ticks := steps(high)
	return axis{0, max(high, ticks[len(ticks)-1]), false, ticks}
}

// part is how far along the axis a value is, 0 to 1.
func (a axis) part(v float64) float64 {
	low, high := a.low, a.high
	if a.log {
		v, low, high = math.Log(v), math.Log(low), math.Log(high)
	}
	if high == low {
		return 0.5
	}
	return (v - low) / (high - low)
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
	if high <= 0 {
		high = 1
	}
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
