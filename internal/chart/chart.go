// Package chart draws line charts as SVG, for documents and reports. It knows nothing of what it draws.
package chart

import (
	"fmt"
	"html"
	"math"
	"strconv"
	"strings"
)

// Chart is lines over one pair of axes, which begin at 0; a Log axis of x has powers of two, from 1 on.
type Chart struct {
	Title, X, Y string
	Log         bool
	Top         float64 // of the axis of y; 0: what the lines need
	Lines       []Line
}

// Line is the points of one thing, each joined to the next.
type Line struct {
	Name   string
	Points []Point
	Dashed bool
	Color  int // lines of one thing have one; it is an index of colors
}

// Point is a value at a place.
type Point struct{ X, Y float64 }

const (
	width, height            = 440.0, 300.0 // of a chart, in pixels
	left, right, top, bottom = 62.0, 14.0, 50.0, 44.0
	maxTicks                 = 6
)

var colors = [...]string{"#1f6feb", "#d1501f", "#2e8b57", "#8250df"}

// Row draws charts side by side.
func Row(charts ...Chart) []byte {
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%g" height="%g" font-family="sans-serif" font-size="11">`+"\n", width*float64(len(charts)), height)
	fmt.Fprintf(&b, `<rect width="100%%" height="100%%" fill="white"/>`+"\n")
	for i := range charts {
		fmt.Fprintf(&b, `<g transform="translate(%g 0)">`+"\n", width*float64(i))
		charts[i].draw(&b)
		b.WriteString("</g>\n")
	}
	b.WriteString("</svg>\n")
	return []byte(b.String())
}

func (c *Chart) draw(b *strings.Builder) {
	xs, ys := c.extent()
	x := func(v float64) float64 { return left + (width-left-right)*c.part(v, xs) }
	y := func(v float64) float64 { return height - bottom - (height-top-bottom)*v/ys }
	text := func(x, y float64, anchor, s string) {
		fmt.Fprintf(b, `<text x="%.1f" y="%.1f" text-anchor="%s">%s</text>`+"\n", x, y, anchor, html.EscapeString(s))
	}
	fmt.Fprintf(b, `<g font-weight="bold">`)
	text(left, 18, "start", c.Title)
	b.WriteString("</g>\n")
	for v := 0.0; v <= ys*1.001; v += step(ys) {
		fmt.Fprintf(b, `<path d="M%.1f %.1fH%.1f" stroke="#ddd"/>`+"\n", left, y(v), width-right)
		text(left-6, y(v)+4, "end", number(v))
	}
	for _, v := range c.xTicks(xs) {
		text(x(v), height-bottom+16, "middle", number(v))
	}
	text((left+width-right)/2, height-8, "middle", c.X)
	fmt.Fprintf(b, `<g transform="translate(14 %.1f) rotate(-90)">`, (top+height-bottom)/2)
	text(0, 0, "middle", c.Y)
	b.WriteString("</g>\n")
	at := left
	for i := range c.Lines {
		l := &c.Lines[i]
		l.draw(b, x, y)
		fmt.Fprintf(b, `<path d="M%.1f %.1fh18" %s/>`+"\n", at, 34.0, l.stroke())
		text(at+23, 38, "start", l.Name)
		at += 40 + 6*float64(len(l.Name))
	}
}

func (l *Line) stroke() string {
	s := fmt.Sprintf(`stroke="%s" fill="none" stroke-width="2"`, colors[l.Color%len(colors)])
	if l.Dashed {
		s += ` stroke-dasharray="5 4"`
	}
	return s
}

func (l *Line) draw(b *strings.Builder, x, y func(float64) float64) {
	var path strings.Builder
	for i, p := range l.Points {
		path.WriteString(map[bool]string{true: "M", false: "L"}[i == 0])
		fmt.Fprintf(&path, "%.1f %.1f", x(p.X), y(p.Y))
		fmt.Fprintf(b, `<circle cx="%.1f" cy="%.1f" r="3" fill="%s"/>`+"\n", x(p.X), y(p.Y), colors[l.Color%len(colors)])
	}
	if len(l.Points) > 1 {
		fmt.Fprintf(b, `<path d="%s" %s/>`+"\n", path.String(), l.stroke())
	}
}

// extent is where the axes end.
func (c *Chart) extent() (x, y float64) {
	for _, l := range c.Lines {
		for _, p := range l.Points {
			x, y = max(x, p.X), max(y, p.Y)
		}
	}
	if c.Top > 0 {
		y = c.Top
	}
	if x <= 0 {
		x = 1
	}
	if y <= 0 {
		y = 1
	}
	if c.Log {
		return max(x, 2), y
	}
	return math.Ceil(x/step(x)) * step(x), math.Ceil(y/step(y)) * step(y)
}

// part is how far along the axis of x a value is, 0 to 1.
func (c *Chart) part(v, end float64) float64 {
	if c.Log {
		return math.Log2(max(v, 1)) / math.Log2(end)
	}
	return v / end
}

func (c *Chart) xTicks(end float64) (list []float64) {
	if c.Log {
		for v := 1.0; v <= end; v *= 2 {
			list = append(list, v)
		}
		return list
	}
	for v := 0.0; v <= end*1.001; v += step(end) {
		list = append(list, v)
	}
	return list
}

// step is the distance of ticks: 1, 2 or 5 of some power of ten.
func step(end float64) float64 {
	least := end / maxTicks
	power := math.Pow(10, math.Floor(math.Log10(least)))
	for _, f := range []float64{1, 2, 5} {
		if f*power >= least {
			return f * power
		}
	}
	return 10 * power
}

func number(v float64) string { return strconv.FormatFloat(v, 'g', 6, 64) }
