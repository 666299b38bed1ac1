package engine

import (
	"fmt"
	"testing"
	"time"
)

// measured is a depth that has seen steps of each number of rows, which take base and each row.
func measured(base, row time.Duration, rows int) *depth {
	d := &depth{}
	for n := 1; n <= rows; n++ {
		d.measure(n, base+time.Duration(n)*row)
	}
	return d
}

// TestDepths: drafts go where they bring tokens faster: many where rows are cheap and guesses good, none
// where a row costs what a token of the batch does, or what is promised of gaps leaves no time.
func TestDepths(t *testing.T) {
	ms := time.Millisecond
	for _, c := range []struct {
		name      string
		base, row time.Duration
		batch     int
		right     []float64
		longest   time.Duration
		want      []int
		worth     bool
	}{
		{"alone, weights cost all", 20 * ms, ms / 10, 1, []float64{0.9}, 0, []int{4}, true},
		{"alone, unsure", 20 * ms, 8 * ms, 1, []float64{0.3}, 0, []int{0}, true},
		{"alone, fairly sure", 20 * ms, 8 * ms, 1, []float64{0.6}, 0, []int{2}, true},
		{"rows cost all", ms, 20 * ms, 16, []float64{0.95, 0.9}, 0, []int{0, 0}, false},
		{"the surest of several", 20 * ms, 5 * ms, 4, []float64{0.9, 0.5, 0.1, 0.8}, 0, []int{4, 0, 0, 2}, true},
		{"no time", 20 * ms, ms, 1, []float64{0.9}, 21 * ms, []int{0}, false},
		{"time for two", 20 * ms, ms, 1, []float64{0.9}, 23 * ms, []int{2}, true},
	} {
		d := measured(c.base, c.row, 40)
		if got := d.worth(c.batch, 4, c.longest); got != c.worth {
			t.Errorf("%s: worth it: %t", c.name, got)
		}
		var list []chance
		for _, p := range c.right {
			list = append(list, chance{right: p, most: 4})
		}
		if got := d.deepen(c.batch, c.batch, list, c.longest); fmt.Sprint(got) != fmt.Sprint(c.want) {
			t.Errorf("%s: depths %v, want %v", c.name, got, c.want)
		}
	}
	if (&depth{}).worth(1, 4, 0) {
		t.Error("drafts before any step was measured")
	}
}

// TestDepthTries: a size that nobody measured is thought to be cheap, so that it is tried; and one that was slow
// once is so again after a while.
func TestDepthTries(t *testing.T) {
	d := &depth{}
	d.measure(1, 20*time.Millisecond)
	if !d.worth(1, 4, 0) {
		t.Error("a second row is not tried")
	}
	d.measure(2, 200*time.Millisecond)
	if d.worth(1, 1, 0) {
		t.Error("a row that costs ten times the step")
	}
	n := 0
	for ; n < 10000 && !d.worth(1, 1, 0); n++ {
		d.measure(1, 20*time.Millisecond)
	}
	if n < 100 || n == 10000 {
		t.Errorf("tried again after %d steps", n)
	}
}

// TestChance: guesses that were wrong are trusted less, and after a while without any tried again.
func TestChance(t *testing.T) {
	var d depth
	var q drafting
	begin := d.chance(&q, 0)
	for range 20 {
		d.verified(&q, 4, 0)
	}
	low := d.chance(&q, 0)
	for range 40 {
		d.verified(&q, 4, 4)
	}
	high := d.chance(&q, 0)
	if !(low < begin/3 && high > 0.9) {
		t.Errorf("%.2f at first, %.2f after wrong guesses, %.2f after right ones", begin, low, high)
	}
	var wrong drafting
	for range 20 {
		wrong.score.add(4, 0, fadeOwn)
	}
	was := d.chance(&wrong, 0)
	for range 1000 {
		d.chance(&wrong, 0)
	}
	if now := d.chance(&wrong, 0); !(was < 0.3 && now > 0.8) {
		t.Errorf("a sequence whose guesses were wrong: %.2f, %.2f a thousand steps later", was, now)
	}
}

func TestLookUp(t *testing.T) {
	for _, c := range []struct {
		tokens, want []int32
		most, class  int
	}{
		{nil, nil, 4, 0},
		{[]int32{1}, nil, 4, 0},
		{[]int32{1, 2}, nil, 4, 0},
		{[]int32{1, 2, 3, 4, 5}, nil, 4, 0},
		{[]int32{9, 2, 3, 4, 5, 6, 8, 2, 3}, []int32{4, 5, 6, 8}, 4, 0},
		{[]int32{9, 2, 3, 4, 5, 6, 8, 2, 3}, []int32{4}, 1, 0},
		{[]int32{1, 2, 3, 4, 7, 2, 3, 5, 1, 2, 3}, []int32{4, 7}, 2, 1}, // the longest match
		{[]int32{7, 2, 3, 4, 8, 2, 3, 5, 9, 2, 3}, []int32{5, 9}, 2, 0}, // of equal ones the latest
		{[]int32{5, 5, 5}, []int32{5, 5, 5, 5}, 4, 0},                   // it repeats itself
		{[]int32{1, 2, 1, 2, 1, 2}, []int32{1, 2, 1, 2, 1}, 5, 2},
	} {
		if got, class := lookUp(nil, c.tokens, c.most); fmt.Sprint(got) != fmt.Sprint(c.want) || class != c.class {
			t.Errorf("%v: %v of class %d, want %v of class %d", c.tokens, got, class, c.want, c.class)
		}
	}
}
