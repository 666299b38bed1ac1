package sim

import (
	"slices"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/loadgen/record"
)

// oneByOne is a case of workers that compute one prompt after the other, 10 ms each.
func oneByOne() *Case {
	cfg := like(Split{})
	cfg.Worker.Engine.MaxRunning = 1
	load := func(speed float64) []Request {
		return every(time.Duration(float64(time.Second)/speed), int(2*speed), 250, 1)
	}
	return &Case{Config: cfg, Load: load, Promise: Promise{SLO: record.SLO{TTFT: 100 * time.Millisecond}, Share: 0.9}, Patience: time.Minute}
}

// TestCurves: a curve has points everywhere up to where nothing is good any more, and the goodput stays.
func TestCurves(t *testing.T) {
	c := oneByOne()
	g, err := c.Search(t.Context(), Split{Whole: 1})
	if err != nil {
		t.Fatal(err)
	}
	fleets, found := []Goodput{g}, g.Point
	told := 0
	if err := c.Curves(t.Context(), fleets, 4*g.Speed, 8, func(*Goodput) { told++ }); err != nil {
		t.Fatal(err)
	}
	list := fleets[0].Curve
	if told != 1 || fleets[0].Point != found || fleets[0].Runs <= g.Runs || !slices.IsSortedFunc(list, func(a, b Point) int { return int(a.Speed - b.Speed) }) {
		t.Errorf("%d, %+v", told, fleets)
	}
	last := list[len(list)-1]
	if list[0].Good != 1 || list[0].Tokens < 0.99*list[0].Rate || last.Good > 0.5 || last.Speed < 2*g.Speed || last.TTFT.P50 < 0.1 {
		t.Errorf("from %+v to %+v", list[0], last)
	}
	for i, p := range list[1:] {
		if p.Speed-list[i].Speed > g.Speed {
			t.Errorf("nothing between %v and %v", list[i].Speed, p.Speed)
		}
	}
}

// TestRepeat: a goodput that is known is found again, also where it has moved.
func TestRepeat(t *testing.T) {
	c := oneByOne()
	g, err := c.Search(t.Context(), Split{Whole: 1})
	if err != nil {
		t.Fatal(err)
	}
	slower := *c
	slower.Load = func(speed float64) []Request { return c.Load(speed / 5) }
	told := 0
	out, err := Repeat(t.Context(), []Case{*c, slower}, []Goodput{g}, func(i int, again *Goodput) { told++ })
	if err != nil || told != 2 || len(out) != 1 || len(out[0]) != 2 {
		t.Fatalf("%d, %+v, %v", told, out, err)
	}
	for i, again := range out[0] {
		if again.Rate < 0.96*g.Rate || again.Rate > 1.04*g.Rate {
			t.Errorf("case %d: %v, at first %v", i, again.Rate, g.Rate)
		}
	}
}

// TestFewest: 2.5 times what a worker takes needs three.
func TestFewest(t *testing.T) {
	c := oneByOne()
	each := c.Load
	c.Load = func(speed float64) []Request { return each(250 * speed) }
	for most, want := range map[int]int{4: 3, 2: 0} {
		var told []int
		n, err := c.Fewest(t.Context(), 1, most, func(workers int, fits []Split) {
			if told = append(told, workers); (len(fits) > 0) != (workers == 3) {
				t.Errorf("%d workers: %v", workers, fits)
			}
		})
		if err != nil || n != want || len(told) != min(most, 3) {
			t.Errorf("1 to %d: %d, %v, %v", most, n, told, err)
		}
	}
}

// TestHighest: where the load's requests get shorter, the bound is that of those that come.
func TestHighest(t *testing.T) {
	w := like(Split{}).Worker
	load := func(speed float64) []Request { // a second of long ones, and then short ones
		list := every(time.Duration(float64(time.Second)/speed), int(100*speed), 100, 1)
		for i := range list {
			if i < 100 {
				list[i].Prompt.tokens = 1000
			}
		}
		return list
	}
	p := Promise{Share: 1}
	highest := func(load Requests) float64 {
		t.Helper()
		bound, err := (&Case{Config: Config{Worker: w}, Load: load, Promise: p}).Highest(t.Context(), 1)
		if err != nil {
			t.Fatal(err)
		}
		return bound
	}
	got := highest(load)
	at := load(got)
	if want := Bound(&w, 1, at, p); got < 0.98*want || got > 1.02*want || got < 2*Bound(&w, 1, load(1), p) {
		t.Errorf("%v; of what comes then %v, at the beginning %v", got, want, Bound(&w, 1, load(1), p))
	}
	if got := highest(func(float64) []Request { return nil }); got != 0 {
		t.Errorf("of nothing: %v", got)
	}
}
