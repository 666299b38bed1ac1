package chart

import (
	"math"
	"slices"
)

// axis is from low to high.
type axis struct {
	low, high float64
	log       bool
	ticks     []float64
}

// far is how many times what is drawn a limit may be for the axis to reach it: a linear one, and a logarithmic one.
const far, farLog = 2.5, 30

// extent is every place and value that is drawn, but for the limits.
func (c *Chart) extent() (xs, ys []float64) {
	add := func(points []Point) {
		for _, p := range points {
			xs, ys = append(xs, p.X), append(ys, p.Y)
		}
	}
	for _, l := range c.Lines {
		add(l.Points)
		for _, s := range l.Spread {
			ys = append(ys, s[0], s[1])
		}
	}
	for _, d := range c.Dots {
		add(d.Points)
	}
	if c.Bars != nil {
		xs, ys = append(xs, c.Bars.From, c.Bars.To), append(ys, c.Bars.Counts...)
	}
	if len(xs) == 0 {
		xs = []float64{1}
	}
	if len(ys) == 0 {
		ys = []float64{1}
	}
	return xs, ys
}

// axes are those that what is drawn needs. A logarithmic x has a tick at each place.
func (c *Chart) axes() (x, y axis) {
	xs, ys := c.extent()
	low, high, widest, reach := slices.Min(ys), slices.Max(ys), slices.Max(xs), far
	if c.LogY {
		reach = farLog
	}
	for _, l := range c.Limits {
		switch {
		case l.Upright && !c.LogX && l.At <= far*widest:
			xs = append(xs, l.At)
		case l.Upright:
		case l.At <= reach*high:
			low, high = min(low, l.At), max(high, l.At)
		}
	}
	if c.Top > 0 {
		high = c.Top
	}
	slices.Sort(xs)
	if xs = slices.Compact(xs); c.LogX {
		x = axis{xs[0], xs[len(xs)-1], true, sparse(xs)}
	} else {
		x = upTo(xs[len(xs)-1], c.WholeX)
	}
	if !c.LogY {
		return x, upTo(high, c.WholeY)
	}
	ticks := decades(low, high)
	return x, axis{min(low, ticks[0]), max(high, ticks[len(ticks)-1]), true, ticks}
}

// sparse leaves out places that would stand on another, on a logarithmic axis.
func sparse(sorted []float64) (out []float64) {
	gap := math.Log(sorted[len(sorted)-1]/sorted[0]) / 14
	for _, v := range sorted {
		if len(out) == 0 || math.Log(v/out[len(out)-1]) >= gap {
			out = append(out, v)
		}
	}
	return out
}

func upTo(high float64, whole bool) axis {
	ticks := steps(high, whole)
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

// least is what an axis reaches at least: of less, a fifth would be 0.
const least = 1e-300

// steps are about five round values from 0 to at least high; of a count, whole ones.
func steps(high float64, whole bool) (out []float64) {
	if high < least {
		high = 1
	}
	unit := math.Pow(10, math.Floor(math.Log10(high/5)))
	for _, m := range []float64{1, 2, 5, 10} {
		if unit*m >= high/5 {
			unit *= m
			break
		}
	}
	if whole {
		unit = max(1, math.Round(unit))
	}
	for v := 0.0; ; v = unit * float64(len(out)) {
		if out = append(out, v); v >= high {
			return out
		}
	}
}
