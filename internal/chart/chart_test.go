package chart

import (
	"encoding/xml"
	"errors"
	"io"
	"math"
	"strings"
	"testing"
)

// TestStep: at most so many ticks, at round numbers.
func TestStep(t *testing.T) {
	t.Parallel()
	for end, want := range map[float64]float64{1: 0.2, 6: 1, 6.1: 2, 100: 20, 128: 50, 4020: 1000, 0.03: 0.005} {
		if got := step(end); math.Abs(got-want) > 1e-12 {
			t.Errorf("%v: %v, want %v", end, got, want)
		}
	}
}

// TestRow: what is drawn is XML, has each name, and each point within its chart.
func TestRow(t *testing.T) {
	t.Parallel()
	a := Chart{Title: `a <b> & "c"`, X: "clients", Y: "ms", Log: true, Lines: []Line{
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
	xs, ys := a.extent()
	if xs != 128 || ys != 314 {
		t.Errorf("axes to %v and %v", xs, ys)
	}
	if p := a.part(16, 128); math.Abs(p-4.0/7) > 1e-12 {
		t.Errorf("16 of 128 at %v", p)
	}
	if xs, ys := b.extent(); xs != 20 || ys != 100 {
		t.Errorf("axes to %v and %v", xs, ys)
	}
}
