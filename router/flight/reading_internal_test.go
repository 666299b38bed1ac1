package flight

import (
	"math"
	"testing"
	"time"
)

// TestSpread: quantiles are interpolated within a bucket, never infinite, 0 of nothing.
func TestSpread(t *testing.T) {
	inf := math.Inf(1)
	for _, x := range []struct {
		edges  []float64
		counts []uint64
		q      float64
		want   float64
	}{
		{nil, nil, .5, 0},
		{[]float64{1, 2, inf}, []uint64{0, 0, 0}, .5, 0},
		{[]float64{1, 2, inf}, []uint64{4, 4, 4}, .5, .5},
		{[]float64{1, 2, inf}, []uint64{0, 4, 4}, .5, 1.5},
		{[]float64{1, 2, inf}, []uint64{2, 4, 4}, .5, 1},
		{[]float64{1, 2, inf}, []uint64{0, 0, 4}, .5, 2},
		{[]float64{1, 2, inf}, []uint64{0, 0, 4}, 1, 2},
		{[]float64{1, 2, inf}, []uint64{4, 4, 4}, 1, 1},
	} {
		if got := (Spread{x.edges, x.counts}).Quantile(x.q); got != x.want {
			t.Errorf("%v %v at %v: %v, want %v", x.edges, x.counts, x.q, got, x.want)
		}
	}
	old, now := Spread{[]float64{1, inf}, []uint64{1, 3}}, Spread{[]float64{1, inf}, []uint64{2, 7}}
	if d := now.Since(old); d.Counts[0] != 1 || d.Counts[1] != 4 {
		t.Errorf("%v", d)
	}
	if d := now.Since(Spread{}); d.Counts[1] != 7 {
		t.Errorf("since nothing: %v", d)
	}
}

// TestBriefs: those that ended after a moment, the newest first, and no more than are asked for.
func TestBriefs(t *testing.T) {
	h, at := history{ring: make([]record, 4)}, time.Unix(100, 0)
	for i := range 6 {
		rec := record{summary: summary{id: string(rune('a' + i)), start: at.Add(time.Duration(i) * time.Second), since: at.Add(time.Duration(i+1) * time.Second), over: true, status: 200}}
		h.add(&rec)
	}
	names := func(after time.Time, most int) (out string) {
		for _, b := range h.briefs(after, most) {
			if b.TookMS != 1000 || b.Over.IsZero() {
				t.Errorf("%+v", b)
			}
			out += b.ID
		}
		return out
	}
	for _, x := range []struct {
		after time.Time
		most  int
		want  string
	}{{time.Time{}, 10, "fedc"}, {time.Time{}, 2, "fe"}, {at.Add(4 * time.Second), 10, "fe"}, {at.Add(6 * time.Second), 10, ""}, {time.Time{}, 0, ""}} {
		if got := names(x.after, x.most); got != x.want {
			t.Errorf("after %v at most %d: %q, want %q", x.after, x.most, got, x.want)
		}
	}
}
