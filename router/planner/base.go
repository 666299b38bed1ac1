package planner

import (
	"math"
	"time"
)

// A worker that has to compute x a second besides streams one token after another, with the rest of its time: so
// the inverse of a gap falls with x on a line. Where the line meets x = 0 is the gap of a worker with
// nothing else to do, which a fleet that is always in use never shows.
type line struct {
	n, x, y, xx, xy float64 // fading sums
	part            part    // of a minute
}

// lineLasts is for how long points count.
const lineLasts = time.Hour

// add adds what has been seen in some time.
func (f *line) add(x *part) {
	p := &f.part
	p.took += x.took
	p.streaming += x.streaming
	p.gaps += x.gaps
	p.served += x.served
	p.workers += x.workers
	if p.took < time.Minute {
		return
	}
	if p.workers > 0 && p.streaming > 0 {
		at, rate := p.served/p.workers, float64(p.gaps)/p.streaming.Seconds()
		keep := math.Exp(-p.took.Seconds() / lineLasts.Seconds())
		f.n, f.x, f.y = f.n*keep+1, f.x*keep+at, f.y*keep+rate
		f.xx, f.xy = f.xx*keep+at*at, f.xy*keep+at*rate
	}
	f.part = part{}
}

// base is the gap at x = 0, in seconds; 0 if the points are too few or too close to say.
func (f *line) base() float64 {
	if f.n < 4 {
		return 0
	}
	mx, my := f.x/f.n, f.y/f.n
	vary := f.xx/f.n - mx*mx
	if vary < 0.02*mx*mx {
		return 0
	}
	slope := (f.xy/f.n - mx*my) / vary
	if at := my - slope*mx; slope < 0 && at > 0 {
		return 1 / at
	}
	return 0
}
