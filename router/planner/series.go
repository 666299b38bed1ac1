package planner

import (
	"math"
	"time"
)

// grain is the time of a bucket, longest how far back a series goes.
const (
	grain   = 10 * time.Second
	longest = time.Hour
	slots   = int(longest / grain)
)

// series is what came in the recent hour, in buckets. Times in it only grow.
type series struct {
	ring [slots]float64 // a second, in a bucket
	n    int            // that are whole, at most slots
	at   int            // of the next one
	sum  float64        // of the bucket that fills
	took time.Duration
}

// add spreads an amount over the time in which it came.
func (s *series) add(amount float64, over time.Duration) {
	rate := amount / over.Seconds()
	if over > longest {
		over = longest
	}
	for over > 0 {
		part := min(over, grain-s.took)
		s.sum += rate * part.Seconds()
		s.took += part
		if over -= part; s.took == grain {
			s.ring[s.at] = s.sum / grain.Seconds()
			s.at, s.n = (s.at+1)%slots, min(s.n+1, slots)
			s.sum, s.took = 0, 0
		}
	}
}

// back is the bucket that many before the last one.
func (s *series) back(i int) float64 { return s.ring[(s.at-1-i+2*slots)%slots] }

// mean is that of buckets, from so long ago, for so long; 0 if there are none.
func (s *series) mean(ago, over time.Duration) float64 {
	from, to := int(ago/grain), min(int((ago+over)/grain), s.n)
	sum := 0.0
	for i := from; i < to; i++ {
		sum += s.back(i)
	}
	if to <= from {
		return 0
	}
	return sum / float64(to-from)
}

// noise is how much a bucket's rate strays, by the differences of neighbours in the last ten minutes:
// a trend is no noise.
func (s *series) noise() float64 {
	of, sum := min(s.n, 60)-1, 0.0
	for i := range of {
		d := s.back(i) - s.back(i+1)
		sum += d * d
	}
	if of < 1 {
		return 0
	}
	return math.Sqrt(sum / float64(of) / 2)
}

// strays is the standard error of a mean over some time.
func (s *series) strays(over time.Duration) float64 {
	return s.noise() / math.Sqrt(max(1, min(over.Seconds()/grain.Seconds(), float64(s.n))))
}

// fading is a weighted sum whose old parts count ever less.
type fading struct{ over, under float64 }

// add ages the ratio and adds to it.
func (f *fading) add(over, under float64, took, lasts time.Duration) {
	keep := math.Exp(-took.Seconds() / lasts.Seconds())
	f.over, f.under = f.over*keep+over, f.under*keep+under
}

// ratio is 0 while nothing is known.
func (f *fading) ratio() float64 {
	if f.under <= 0 {
		return 0
	}
	return f.over / f.under
}
