package chart

import (
	"encoding/xml"
	"errors"
	"io"
	"math"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// TestTicks: about five round values, or powers of ten.
func TestTicks(t *testing.T) {
	t.Parallel()
	f := func(have []float64, want ...float64) {
		t.Helper()
		if !slices.Equal(have, want) {
			t.Errorf("have %v, want %v", have, want)
		}
	}
	f(steps(9, false), 0, 2, 4, 6, 8, 10)
	f(steps(1, false), 0, 0.2, 0.4, 0.6000000000000001, 0.8, 1)
	f(steps(5e-324, false), 0, 0.2, 0.4, 0.6000000000000001, 0.8, 1)
	f(steps(3, true), 0, 1, 2, 3)
	f(steps(12, true), 0, 5, 10, 15)
	f(decades(30, 2000), 10, 100, 1000, 10000)
	f(decades(100, 100), 100)
}

// TestRow: what is drawn is XML, has each name, and each point within its chart.
func TestRow(t *testing.T) {
	t.Parallel()
	a := Chart{Title: `a <b> & "c"`, X: "clients", Y: "ms", LogX: true, Lines: []Line{
		{Name: "ours", Points: []Point{{1, 20}, {16, 34}, {128, 133}}}, {Name: "theirs", Points: []Point{{1, 32}, {128, 314}}, Color: 1, Dashed: true}}}
	b := Chart{Title: "share", X: "requests a second", Y: "%", Top: 100, Lines: []Line{{Name: "one", Points: []Point{{18, 100}}}, {Name: "none"}}}
	out := string(Row(a, b, Chart{Title: "empty"}))
	d := xml.NewDecoder(strings.NewReader(out))
	marks, texts := 0, ""
	for {
		tok, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		switch e := tok.(type) {
		case xml.StartElement:
			if slices.ContainsFunc(e.Attr, func(a xml.Attr) bool { return a.Name.Local == "class" && a.Value == "mark" }) {
				marks++
			}
		case xml.CharData:
			texts += "|" + string(e)
		}
	}
	for _, want := range []string{`|a <b> & "c"|`, "|ours|", "|theirs|", "|one|", "|none|", "|128|", "|100|", "|requests a second|", "|empty|"} {
		if !strings.Contains(texts, want) {
			t.Errorf("no %s in %s", want, texts)
		}
	}
	if marks != 6 || strings.Contains(out, "NaN") || strings.Contains(out, "Inf") {
		t.Errorf("%d points:\n%s", marks, out)
	}
	xs, ys := a.axes()
	if xs.high != 128 || ys.high < 314 || ys.low != 0 {
		t.Errorf("axes %+v and %+v", xs, ys)
	}
	if p := xs.part(16); math.Abs(p-4.0/7) > 1e-12 {
		t.Errorf("16 of 128 at %v", p)
	}
	if xs, ys := b.axes(); xs.high != 20 || ys.high != 100 {
		t.Errorf("axes %+v and %+v", xs, ys)
	}
}

// TestLimits: a limit is drawn with its name, and the axis reaches it; of one far beyond only the name is there.
func TestLimits(t *testing.T) {
	t.Parallel()
	c := Chart{Title: "t", Lines: []Line{{Points: []Point{{1, 10}, {3, 20}}}}, WholeX: true}
	f := func(at, high float64, lines int, said string) {
		t.Helper()
		c.Limits = []Limit{{Name: "SLO", At: at}}
		out := string(Row(c))
		if _, ys := c.axes(); ys.high != high || strings.Count(out, `class="limit"`) != lines || !strings.Contains(out, ">"+said+"</text>") {
			t.Errorf("%v: up to %v\n%s", at, ys.high, out)
		}
	}
	f(15, 20, 1, "SLO")
	f(45, 50, 1, "SLO")
	f(500, 20, 0, "SLO: beyond")
	c.Limits = []Limit{{Name: "bound", At: 7, Upright: true}}
	if xs, _ := c.axes(); xs.high != 8 || strings.Contains(string(Row(c)), ">0.5<") {
		t.Errorf("%+v", xs)
	}
	c.Limits[0].At = 70
	if xs, _ := c.axes(); xs.high != 3 || !strings.Contains(string(Row(c)), ">bound: beyond</text>") {
		t.Errorf("%+v", xs)
	}
}

// TestLegend: names that do not fit beside each other get lines of their own, above the drawing.
func TestLegend(t *testing.T) {
	t.Parallel()
	c := Chart{Lines: []Line{{Name: strings.Repeat("a", 40)}, {Name: strings.Repeat("b", 40)}, {Name: "c"}}}
	at, lines := c.places(narrow)
	if lines != 2 || at[1].Y <= at[0].Y || at[2].Y != at[1].Y || c.height(narrow) != height+legendLine {
		t.Errorf("%d lines, %v", lines, at)
	}
}

// TestColors: every line stands out from its page by 3 to 1, light and dark; the first five, which most charts need, differ
// for those who see no red or no green; and no two share a shape.
func TestColors(t *testing.T) {
	t.Parallel()
	linear := func(hex string) (c [3]float64) {
		for i := range c {
			v, err := strconv.ParseUint(hex[1+2*i:3+2*i], 16, 8)
			if err != nil {
				t.Fatal(err)
			}
			if f := float64(v) / 255; f <= 0.04045 {
				c[i] = f / 12.92
			} else {
				c[i] = math.Pow((f+0.055)/1.055, 2.4)
			}
		}
		return c
	}
	bright := func(c [3]float64) float64 { return 0.2126*c[0] + 0.7152*c[1] + 0.0722*c[2] }
	lab := func(c [3]float64) (out [3]float64) {
		f := func(v float64) float64 {
			if v > 216.0/24389 {
				return math.Cbrt(v)
			}
			return (24389.0/27*v + 16) / 116
		}
		x, y, z := f((0.4124*c[0]+0.3576*c[1]+0.1805*c[2])/0.9505), f(bright(c)), f((0.0193*c[0]+0.1192*c[1]+0.9505*c[2])/1.089)
		return [3]float64{116*y - 16, 500 * (x - y), 200 * (y - z)}
	}
	// Of Machado, Oliveira and Fernandes (2009), in full.
	blind := map[string][3][3]float64{
		"protan": {{0.152286, 1.052583, -0.204868}, {0.114503, 0.786281, 0.099216}, {-0.003882, -0.048116, 1.051998}},
		"deutan": {{0.367322, 0.860646, -0.227968}, {0.280085, 0.672501, 0.047413}, {-0.011820, 0.042940, 0.968881}},
	}
	for name, of := range map[string]func(paint) string{"light": func(p paint) string { return p.light }, "dark": func(p paint) string { return p.dark }} {
		page := bright(linear(of(around[0].paint)))
		for i, c := range colors {
			b := bright(linear(of(c)))
			if ratio := (max(b, page) + 0.05) / (min(b, page) + 0.05); ratio < 3 {
				t.Errorf("%s %s: %.2f to 1", name, of(c), ratio)
			}
			for j := range i {
				if shape(i, 0, 0) == shape(j, 0, 0) {
					t.Errorf("shapes %d and %d", i, j)
				}
				for who, m := range blind {
					seen := func(hex string) [3]float64 {
						in := linear(hex)
						var out [3]float64
						for k := range out {
							out[k] = min(1, max(0, m[k][0]*in[0]+m[k][1]*in[1]+m[k][2]*in[2]))
						}
						return lab(out)
					}
					x, y := seen(of(c)), seen(of(colors[j]))
					if d := math.Hypot(math.Hypot(x[0]-y[0], x[1]-y[1]), x[2]-y[2]); d < 10 && i < 5 {
						t.Errorf("%s, %s: %s and %s differ by %.1f", name, who, of(c), of(colors[j]), d)
					}
				}
			}
		}
	}
}

// TestPageColors: a page's colors are the dashboard's.
func TestPageColors(t *testing.T) {
	t.Parallel()
	b, err := os.ReadFile("../../router/console/dashboard/app.css")
	if err != nil {
		t.Fatal(err)
	}
	light, dark, ok := strings.Cut(string(b), `:root[data-theme="dark"]`)
	dark, _, _ = strings.Cut(dark, "}")
	all := regexp.MustCompile(`(--[a-z]+): light-dark\((#[0-9a-f]+), (#[0-9a-f]+)\)`).FindAllStringSubmatch(pageStyle, -1)
	if !ok || len(all) < 8 {
		t.Fatalf("%d colors", len(all))
	}
	for _, c := range all {
		if !strings.Contains(light, c[1]+": "+c[2]+";") || !strings.Contains(dark, c[1]+": "+c[3]+";") {
			t.Errorf("%v is not the dashboard's", c[1:])
		}
	}
}
