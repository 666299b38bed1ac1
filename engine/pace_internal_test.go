package engine

import (
	"math"
	"testing"
	"time"
)

// TestBudget: a step's prefill tokens fit the step, the target by the measured rate,
// and beside whatever decodes; a few are let through however slow it is.
func TestBudget(t *testing.T) {
	for _, c := range []struct {
		rate    float64
		total   int
		target  time.Duration
		decodes int
		want    int
	}{
		{0, 500, 0, 10, 490},
		{0, 1000, 0, 10, 7*tile - 10}, // whole tiles
		{0, efficient, 0, 0, efficient},
		{0, efficient - 1, 0, 0, efficient - 1},
		{0, 500, time.Second, 10, firstChunk - 10}, // not measured
		{0, 500, 1, 10, firstChunk - 10},
		{1000, 500, 100 * time.Millisecond, 10, 90},
		{1000, 500, time.Second, 10, 490},
		{1000, 500, 1, 10, leastChunk},
		{1000, 8, 1, 0, 8},
		{1000, 500, 100 * time.Millisecond, 90, leastChunk},
		{1e300, 500, time.Hour, 0, 500},
	} {
		var p pacer
		if c.rate > 0 {
			p.rates = []float64{c.rate}
		}
		if got, _ := p.budget(limits{total: c.total, target: c.target, decodes: c.decodes}); got != c.want {
			t.Errorf("%+v: %d tokens", c, got)
		}
	}
}

// TestDrain: beside decodes a step is as small as is efficient, unless more wait than such
// steps would compute in time; then it grows by tiles, as far as the target allows.
func TestDrain(t *testing.T) {
	p := pacer{rates: make([]float64, 64)}
	for i := range p.rates { // 20 us a token, small steps 5 ms
		n := (i + 1) * tile
		p.rates[i] = float64(n) / max(5*time.Millisecond, time.Duration(n)*20*time.Microsecond).Seconds()
	}
	for _, c := range []struct{ decodes, queued, want int }{
		{60, 100, efficient - 60},
		{60, 4000, efficient - 60},      // 9 steps of 10.2 ms
		{60, 4410, efficient - 60},      // just
		{60, 4440, 5*tile - 60},         // 4440/580 steps of 12.8 ms
		{60, 4700, 8*tile - 60},         // 4700/964 of 20.5
		{200, 4000, 8*tile - 200},       // 4000/824 of 20.5
		{60, 100_000, 19*tile - 60},     // 50 ms
		{600, 100, 5*tile - 600},        // decodes alone are more than is efficient
		{2600, 100, min(leastChunk, 1)}, // they alone take longer than the target: a few
		{3000, 100, min(leastChunk, 1)},
	} {
		want, room := max(c.want, leastChunk), 39*tile // 100 ms
		if c.decodes >= 2600 {
			room = min(3*c.decodes, 8192)
		}
		if got, most := p.budget(limits{total: 8192, target: 50 * time.Millisecond, drain: 100 * time.Millisecond, decodes: c.decodes, queued: c.queued}); got != want || most != room-c.decodes {
			t.Errorf("%+v: %d tokens of %d, want %d of %d", c, got, most, want, room-c.decodes)
		}
	}
}

// TestRates: the time of a size that was not measured is between its neighbours', or a little less a
// tile than theirs beyond them; part of a tile tells nothing of it, and a size that was slow once
// does not count as slow for ever.
func TestRates(t *testing.T) {
	var p pacer
	if p.measured() || p.rate(1) != 0 {
		t.Error("measured nothing")
	}
	p.observe(3*tile, 3*tile*10*time.Millisecond) // 100/s
	p.observe(leastChunk-1, time.Second)
	p.observe(300, 0)
	for n, want := range map[int]float64{1: 100, 128: 100, 300: 100, 3 * tile: 100, 3*tile + 1: 400 / 3.75, 6 * tile: 600 / 5.25} {
		if got := p.rate(n); math.Abs(got-want) > 1e-9 {
			t.Errorf("rate(%d) = %v, want %v", n, got, want)
		}
	}
	p.observe(3*tile+1, 6*time.Second)
	p.observe(4*tile*8/9-1, 6*time.Second)
	if len(p.rates) != 3 || p.rates[2] != 100 {
		t.Error(p.rates)
	}
	p.observe(8*tile, 8*tile*time.Millisecond) // 1,000/s
	if between := 6 / (3./100 + (8./1000-3./100)*3/5); math.Abs(p.rate(700)-between) > 20 || p.rate(897) != 1000 || p.rate(1) >= 200 {
		t.Error(p.rates, p.rate(700), between)
	}
	slow := p.rate(300)
	if slow <= 100 { // slower than others: it drifts
		t.Error(p.rates)
	}
	p.observe(3*tile, 3*tile*10*time.Millisecond) // and they do not for it
	if p.rate(897) != 1000 || p.rate(300) >= slow {
		t.Error(p.rates)
	}
	for range 3 * forget {
		p.observe(8*tile, 8*tile*time.Millisecond)
	}
	if p.rate(300) < 900 {
		t.Error(p.rates)
	}
	var first pacer
	first.observe(tile+16, time.Second)
	if len(first.rates) != 1 || first.rates[0] != tile+16 { // the smaller size is tried, and corrected
		t.Error(first.rates)
	}
	first.observe(tile+16, time.Second/2) // faster than thought: of its own size
	if len(first.rates) != 2 || first.rates[1] != 2*(tile+16) {
		t.Error(first.rates)
	}
}
