package chart

import (
	"encoding/xml"
	"errors"
	"io"
	"math"
	"slices"
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
	f(steps(9), 0, 2, 4, 6, 8, 10)
	f(steps(1), 0, 0.2, 0.4, 0.6000000000000001, 0.8, 1)
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
	circles, texts := 0, ""
	for {
		tok, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		switch e := tok.(type) {
		case xml.StartElement:
			if e.Name.Local == "circle" {
				circles++
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
	if circles != 6 || strings.Contains(out, "NaN") || strings.Contains(out, "Inf") {
		t.Errorf("%d points:\n%s", circles, out)
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
