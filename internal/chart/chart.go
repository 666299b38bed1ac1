// Package chart draws charts as SVG, and pages of charts and tables as HTML: for documents and reports, in the
// dashboard's style, light and dark. A page has no script and loads nothing. It knows nothing of what it draws;
// whatever text it is given stays text.
package chart

import (
	"fmt"
	"html"
	"strconv"
	"strings"
)

// Chart is lines, dots or bars over one pair of axes. An axis begins at 0, or is logarithmic: then all values are
// greater.
type Chart struct {
	Title, X, Y    string
	LogX, LogY     bool
	WholeX, WholeY bool                 // a count: no mark between two whole numbers
	Mark, Tick     func(float64) string // write places and values; nil: as numbers
	Top            float64              // of the axis of y; 0: what is drawn needs
	Lines          []Line
	Dots           []Dots
	Bars           *Bars
	Limits         []Limit
}

// Line is the points of one thing, each joined to the next.
type Line struct {
	Name   string
	Points []Point
	Spread [][2]float64 // of each point, the least and the most; may be nil
	Dashed bool
	Bare   bool // without marks at its points: there are many
	Filled bool // down to the axis
	Color  int  // of colors, and of the marks' shapes
}

// Dots are many points that nothing joins.
type Dots struct {
	Name   string
	Points []Point
	Color  int
}

// Bars are counts in bins of equal width.
type Bars struct {
	From, To float64
	Counts   []float64
}

// Limit is a line across, at a value; or upright, at a place.
type Limit struct {
	Name    string
	At      float64
	Upright bool
}

// Point is a value at a place.
type Point struct{ X, Y float64 }

// Pixels.
const (
	height, narrow, wide     = 300, 440, 760 // of a chart in a row, and in a column
	left, right, top, bottom = 70, 30, 50, 44
	heading                  = 26 // of a column
	legendLine, letter       = 18, 6.5
)

// Add adds a point to each line, at one place.
func (c *Chart) Add(x float64, y ...float64) {
	for i := range c.Lines {
		c.Lines[i].Points = append(c.Lines[i].Points, Point{x, y[i]})
	}
}

// Row draws charts side by side.
func Row(charts ...Chart) []byte {
	tall := 0
	for i := range charts {
		tall = max(tall, charts[i].height(narrow))
	}
	return document(narrow*len(charts), tall, func(b *strings.Builder) {
		for i := range charts {
			charts[i].draw(b, narrow*i, 0, narrow)
		}
	})
}

// Column draws charts below each other, under a title.
func Column(title string, charts ...Chart) []byte {
	tall := heading
	for i := range charts {
		tall += charts[i].height(wide)
	}
	return document(wide, tall, func(b *strings.Builder) {
		fmt.Fprintf(b, `<text x="%d" y="20" class="ink" font-size="14">%s</text>`+"\n", left, html.EscapeString(title))
		y := heading
		for i := range charts {
			charts[i].draw(b, 0, y, wide)
			y += charts[i].height(wide)
		}
	})
}

// document is an SVG that stands alone: it has its colors, and a page below it.
func document(width, height int, draw func(*strings.Builder)) []byte {
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %[1]d %[2]d" width="%[1]d" height="%[2]d" font-family="sans-serif" font-size="12">`+"\n", width, height)
	fmt.Fprintf(&b, "<style>%s</style>\n"+`<rect width="100%%" height="100%%" class="card"/>`+"\n", alone())
	draw(&b)
	b.WriteString("</svg>\n")
	return []byte(b.String())
}

// inPage draws a chart as an element of a page, which has the colors.
func (c *Chart) inPage(b *strings.Builder, width int) {
	fmt.Fprintf(b, `<svg viewBox="0 0 %d %d" role="img" aria-label="%s" font-size="12">`+"\n", width, c.height(width),
		html.EscapeString(strings.Trim(c.Title+": "+c.Y+" over "+c.X, ": ")))
	c.draw(b, 0, 0, width)
	b.WriteString("</svg>\n")
}

// drawing is a chart on its way into a text.
type drawing struct {
	*Chart
	b        *strings.Builder
	xs, ys   axis
	width    int
	top, end float64 // of the area between the axes
}

func (d *drawing) px(v float64) float64 { return left + float64(d.width-left-right)*d.xs.part(v) }
func (d *drawing) py(v float64) float64 { return d.end - (d.end-d.top)*d.ys.part(v) }

func (d *drawing) text(x, y float64, how, s string) {
	fmt.Fprintf(d.b, `<text x="%.1f" y="%.1f" %s>%s</text>`+"\n", x, y, how, html.EscapeString(s))
}

const middle, end = ` text-anchor="middle"`, ` text-anchor="end"`

func (c *Chart) draw(b *strings.Builder, atX, atY, width int) {
	d := &drawing{Chart: c, b: b, width: width, top: float64(top + legendLine*(c.legendLines(width)-1))}
	d.xs, d.ys = c.axes()
	d.end = float64(c.height(width) - bottom)
	fmt.Fprintf(b, `<g transform="translate(%d %d)">`+"\n", atX, atY)
	d.text(left, 18, `class="ink" font-weight="bold"`, c.Title)
	for _, v := range d.ys.ticks {
		fmt.Fprintf(b, `<path class="grid" d="M%d %.1fH%d"/>`+"\n", left, d.py(v), width-right)
		d.text(left-8, d.py(v)+4, `class="soft"`+end, c.tick(v))
	}
	for _, v := range d.xs.ticks {
		fmt.Fprintf(b, `<path class="grid" d="M%.1f %.1fV%.1f"/>`+"\n", d.px(v), d.top, d.end)
		d.text(d.px(v), d.end+16, `class="soft"`+middle, c.mark(v))
	}
	d.text(float64(left+width-right)/2, d.end+36, `class="soft"`+middle, c.X)
	fmt.Fprintf(b, `<g transform="translate(14 %.0f) rotate(-90)">`, (d.top+d.end)/2)
	d.text(0, 0, `class="soft"`+middle, c.Y)
	b.WriteString("</g>\n")
	d.bars()
	for i := range c.Dots {
		d.dots(&c.Dots[i])
	}
	for i := range c.Lines {
		d.line(&c.Lines[i])
	}
	d.limits()
	d.legend()
	b.WriteString("</g>\n")
}

// entries are what the legend tells apart.
func (c *Chart) entries() (out []Line) {
	for _, l := range c.Lines {
		if l.Name != "" {
			out = append(out, l)
		}
	}
	for _, p := range c.Dots {
		if p.Name != "" {
			out = append(out, Line{Name: p.Name, Color: p.Color})
		}
	}
	return out
}

// places are where the legend's entries begin, so that none runs over the edge; lines is at least 1.
func (c *Chart) places(width int) (at []Point, lines int) {
	x, y := float64(left), 34.0
	for _, l := range c.entries() {
		w := 42 + letter*float64(len(l.Name))
		if x > left && x+w > float64(width) {
			x, y = left, y+legendLine
		}
		at = append(at, Point{x, y})
		x += w
	}
	return at, 1 + int(y-34)/legendLine
}

func (c *Chart) legendLines(width int) int {
	_, n := c.places(width)
	return n
}

func (c *Chart) height(width int) int { return height + legendLine*(c.legendLines(width)-1) }

func (d *drawing) legend() {
	at, _ := d.places(d.width)
	for i, l := range d.entries() {
		fmt.Fprintf(d.b, `<g class="%s"><path d="M%.1f %.0fh18" %s/>%s</g>`+"\n", series(l.Color), at[i].X, at[i].Y, l.stroke(), shape(l.Color, at[i].X+9, at[i].Y))
		d.text(at[i].X+23, at[i].Y+4, `class="ink"`, l.Name)
	}
}

func (d *drawing) line(l *Line) {
	fmt.Fprintf(d.b, `<g class="%s">`+"\n", series(l.Color))
	var points []string
	for i, p := range l.Points {
		x, y := d.px(p.X), d.py(p.Y)
		points = append(points, fmt.Sprintf("%.1f,%.1f", x, y))
		if i < len(l.Spread) {
			low, high := d.py(l.Spread[i][0]), d.py(l.Spread[i][1])
			fmt.Fprintf(d.b, `<path class="spread" d="M%.1f %.1fV%.1fM%.1f %.1fh8M%.1f %.1fh8"/>`+"\n", x, low, high, x-4, low, x-4, high)
		}
		if !l.Bare {
			fmt.Fprintf(d.b, `<g class="mark"><title>%s %s: %.4g</title>%s</g>`+"\n", html.EscapeString(l.Name), html.EscapeString(d.mark(p.X)), p.Y, shape(l.Color, x, y))
		}
	}
	if n := len(l.Points); l.Filled && n > 0 {
		fmt.Fprintf(d.b, `<polygon points="%.1f,%.1f %s %.1f,%.1f" fill="currentColor" fill-opacity=".2"/>`+"\n",
			d.px(l.Points[0].X), d.end, strings.Join(points, " "), d.px(l.Points[n-1].X), d.end)
	}
	fmt.Fprintf(d.b, `<polyline points="%s" %s/>`+"\n</g>\n", strings.Join(points, " "), l.stroke())
}

// dots are one path, whose pieces of no length have round ends: thousands of them stay small.
func (d *drawing) dots(p *Dots) {
	fmt.Fprintf(d.b, `<path class="%s dots" d="`, series(p.Color))
	for _, at := range p.Points {
		fmt.Fprintf(d.b, "M%.1f %.1fh0", d.px(at.X), d.py(at.Y))
	}
	d.b.WriteString(`" fill="none" stroke="currentColor" stroke-width="5" stroke-linecap="round" stroke-opacity=".5"/>` + "\n")
}

func (d *drawing) bars() {
	if d.Bars == nil {
		return
	}
	fmt.Fprintf(d.b, `<g class="%s">`, series(0))
	step := (d.Bars.To - d.Bars.From) / float64(len(d.Bars.Counts))
	for i, n := range d.Bars.Counts {
		from := d.Bars.From + step*float64(i)
		x, y := d.px(from), d.py(n)
		fmt.Fprintf(d.b, `<rect x="%.1f" y="%.1f" width="%.1f" height="%.1f" fill="currentColor"><title>%.4g to %.4g: %.4g</title></rect>`+"\n",
			x+0.5, y, max(0.5, d.px(from+step)-x-1), max(0, d.end-y), from, from+step, n)
	}
	d.b.WriteString("</g>\n")
}

// limits are drawn with their names; of one far beyond the axis only the name is.
func (d *drawing) limits() {
	beyond := 0.0
	for _, l := range d.Limits {
		if l.Upright && l.At <= d.xs.high {
			x := d.px(l.At)
			fmt.Fprintf(d.b, `<path class="limit" d="M%.1f %.1fV%.1f"/>`+"\n", x, d.top, d.end)
			how, at := `class="limited"`, x+4
			if x > float64(d.width)*2/3 {
				how, at = how+end, x-4
			}
			d.text(at, d.top+12, how, l.Name)
			continue
		}
		if l.Upright || l.At > d.ys.high {
			d.text(float64(d.width-right), d.top+12+14*beyond, `class="limited"`+end, l.Name+": beyond")
			beyond++
			continue
		}
		y := d.py(l.At)
		fmt.Fprintf(d.b, `<path class="limit" d="M%d %.1fH%d"/>`+"\n", left, y, d.width-right)
		d.text(float64(d.width-right), y-4, `class="limited"`+end, l.Name)
	}
}

func (l *Line) stroke() string {
	s := `stroke="currentColor" fill="none" stroke-width="2"`
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
