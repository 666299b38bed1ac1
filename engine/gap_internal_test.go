package engine

import (
	"math"
	"testing"
	"time"
)

// TestGapPrediction: what the pacer knows besides where each gap is promised.
func TestGapPrediction(t *testing.T) {
	p := pacer{gaps: gaps{reading: true, tiles: true}}
	near := func(what string, got, want float64) {
		t.Helper()
		if math.Abs(got-want) > want/100 {
			t.Errorf("%s: %v, want %v", what, got, want)
		}
	}
	decodes := func(at int) []member { return []member{{chunk: 1, at: at}, {chunk: 1, at: at}} }
	for i := range 40 { // 5 ms, and 50 ns for each position
		at := i % 8 * 5000
		p.step(5*time.Millisecond+time.Duration(2*at)*50*time.Nanosecond, decodes(at))
	}
	near("reads", p.reads(decodes(10000)).Seconds(), 1e-3)

	// A part of a tile takes as long as all of it, and the reads of what decodes beside it are not its.
	p.step(8*time.Millisecond, append(decodes(10000), member{chunk: 30}))
	near("a tile", p.seconds(128, 0), 7e-3)
	near("a part of it", p.seconds(5, 0), 7e-3)
	near("two, which nobody measured", p.seconds(256, 0), 1.5*7e-3)
	near("beside what decodes", p.takes(append(decodes(20000), member{chunk: 90})).Seconds(), 9e-3)
	if n := p.fits(500, 6*time.Millisecond); n != 0 {
		t.Errorf("%d tokens fit where no tile does", n)
	}
	if n := p.fits(500, 11*time.Millisecond); n != 256 {
		t.Errorf("%d tokens fit, want two tiles", n)
	}

	// Steps that take longer than predicted make room for such; those that do not take it back slowly.
	if p.longer() != 1 {
		t.Errorf("at first nothing is allowed for: %v", p.longer())
	}
	piece := []member{{chunk: 1}, {chunk: 100}}
	for range 3 {
		p.step(9*time.Millisecond, piece)
	}
	grown := p.longer()
	p.step(5*time.Millisecond, piece)
	if now := p.longer(); grown < 1.01 || now >= grown || now < grown-0.001 {
		t.Errorf("%v after steps that took longer, %v after one that did not", grown, now)
	}

	// A size that was once much too slow is hoped to be faster, after a while.
	p.rates = []float64{128 / 7e-3, 256 / 40e-3}
	for range 2 * (1 << 14) {
		p.observe(128, 7*time.Millisecond)
	}
	if took := p.seconds(256, 0); took > 14e-3 || took < 1.5*7e-3 {
		t.Errorf("two tiles are said to take %v s", took)
	}
}
