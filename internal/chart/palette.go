package chart

import (
	"fmt"
	"strings"
)

// paint is a color on a light page and on a dark one.
type paint struct{ light, dark string }

// colors are Okabe and Ito's, which the colour-blind tell apart, darker on a light page so that they stand out from
// it. Each comes with a shape of its own: none means something by its color alone.
var colors = [...]paint{
	{"#0072b2", "#4ba9e2"}, // blue
	{"#d55e00", "#f07b38"}, // vermilion
	{"#009e73", "#2fbf93"}, // green
	{"#8f3f76", "#dd97c3"}, // purple
	{"#15202b", "#e7edf3"}, // black
	{"#b57800", "#f2c94c"}, // amber
	{"#3d97cc", "#a9dcfb"}, // sky
	{"#6b7885", "#8496a6"}, // grey
}

// Colors is how many lines can be told apart.
const Colors = len(colors)

// around are the colors of what is no line, by the classes that have them.
var around = []struct {
	class, property string
	paint
}{
	{"card", "fill", paint{"#ffffff", "#182029"}},
	{"ink", "fill", paint{"#15202b", "#e7edf3"}},
	{"soft", "fill", paint{"#526070", "#9fb0c0"}},
	{"grid", "stroke", paint{"#e8edf3", "#222c37"}},
	{"limit", "stroke", paint{"#a63c00", "#ff9a66"}},
	{"limited", "fill", paint{"#a63c00", "#ff9a66"}},
}

func series(color int) string { return fmt.Sprintf("s%d", color%Colors) }

// rules is the style of charts, with each color written by write.
func rules(write func(paint) string) string {
	var b strings.Builder
	for i, c := range colors {
		fmt.Fprintf(&b, ".%s{color:%s}", series(i), write(c))
	}
	for _, a := range around {
		fmt.Fprintf(&b, ".%s{%s:%s}", a.class, a.property, write(a.paint))
	}
	return b.String()
}

// alone is the style of an SVG that stands alone: in its reader's choice of light and dark.
func alone() string {
	return fixed + rules(func(p paint) string { return p.light }) + "@media (prefers-color-scheme: dark){" + rules(func(p paint) string { return p.dark }) + "}"
}

// within is the style of charts in a page, which chooses.
func within() string {
	return fixed + rules(func(p paint) string { return "light-dark(" + p.light + "," + p.dark + ")" })
}

const fixed = ".limit{stroke-width:1.5;stroke-dasharray:7 4;fill:none}.spread{stroke:currentColor;fill:none;stroke-width:1.2}"

// shape is a color's mark around a point.
func shape(color int, x, y float64) string {
	const fill = ` fill="currentColor"/>`
	switch color % Colors {
	case 1:
		return fmt.Sprintf(`<path d="M%.1f %.1fh7v7h-7z"`, x-3.5, y-3.5) + fill
	case 2:
		return fmt.Sprintf(`<path d="M%.1f %.1fl4.5 8h-9z"`, x, y-5) + fill
	case 3:
		return fmt.Sprintf(`<path d="M%.1f %.1fl4.8 4.8l-4.8 4.8l-4.8-4.8z"`, x, y-4.8) + fill
	case 4:
		return fmt.Sprintf(`<path d="M%.1f %.1fl4.5-8h-9z"`, x, y+5) + fill
	case 5:
		return fmt.Sprintf(`<path d="M%.1f %.1fl8 8m0-8l-8 8" stroke="currentColor" stroke-width="2.2"/>`, x-4, y-4)
	case 6:
		return fmt.Sprintf(`<path d="M%.1f %.1fh10m-5-5v10" stroke="currentColor" stroke-width="2.2"/>`, x-5, y)
	case 7:
		return fmt.Sprintf(`<circle cx="%.1f" cy="%.1f" r="3.5" fill="none" stroke="currentColor" stroke-width="2"/>`, x, y)
	}
	return fmt.Sprintf(`<circle cx="%.1f" cy="%.1f" r="3.5"`, x, y) + fill
}
