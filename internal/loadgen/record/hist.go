// Package record gathers the results of requests, in memory that does not grow with their
// number.
package record

import (
	"math"
	"math/bits"
)

// Hist counts values, at least 0, in buckets at most 1/256 of their value wide. All but quantiles
// and bins are exact. Without values all is 0.
type Hist struct {
	Count     uint64
	Sum, Mean float64
	Min, Max  int64

	counts []uint64 // by bucket
	m2     float64  // Welford's sum of squared differences from the mean
}

const (
	subBits = 8
	sub     = 1 << subBits
)

// bucket is the index of v's bucket. Values below 2·sub have one each; above, each power of
// two is cut in sub.
func bucket(v int64) int {
	shift := max(0, bits.Len64(uint64(v))-subBits-1)
	return shift*sub + int(v>>shift)
}

// lower is the least value of a bucket.
func lower(i int) int64 {
	if i < 2*sub {
		return int64(i)
	}
	shift := i/sub - 1
	return int64(i-shift*sub) << shift
}

// Add counts v; negative values count as 0.
func (h *Hist) Add(v int64) {
	v = max(v, 0)
	i := bucket(v)
	if i >= len(h.counts) {
		h.counts = append(h.counts, make([]uint64, i+1-len(h.counts))...)
	}
	h.counts[i]++
	if h.Count == 0 || v < h.Min {
		h.Min = v
	}
	h.Max = max(h.Max, v)
	h.Count++
	h.Sum += float64(v)
	d := float64(v) - h.Mean
	h.Mean += d / float64(h.Count)
	h.m2 += d * (float64(v) - h.Mean)
}

// StdDev is the standard deviation.
func (h *Hist) StdDev() float64 {
	if h.Count == 0 {
		return 0
	}
	return math.Sqrt(h.m2 / float64(h.Count))
}

// Quantile is the value at rank ⌈q·n⌉, to within its bucket's width; 0 without values.
func (h *Hist) Quantile(q float64) float64 {
	rank := max(1, uint64(math.Ceil(q*float64(h.Count))))
	before := uint64(0)
	for i, c := range h.counts {
		if before+c >= rank {
			from, to := float64(lower(i)), float64(lower(i+1))
			if to-from <= 1 {
				return from
			}
			v := from + (to-from)*(float64(rank-before)-0.5)/float64(c)
			return min(max(v, float64(h.Min)), float64(h.Max))
		}
		before += c
	}
	return float64(h.Max)
}

// Bins cuts the values into n bins of equal width, from the minimum to the quantile top. The
// last bin also counts what is above. It returns the n+1 edges and the counts.
func (h *Hist) Bins(n int, top float64) (edges, counts []float64) {
	if h.Count == 0 {
		return nil, nil
	}
	from, to := float64(h.Min), h.Quantile(top)
	if to <= from {
		to = from + 1
	}
	edges, counts = make([]float64, n+1), make([]float64, n)
	for i := range edges {
		edges[i] = from + (to-from)*float64(i)/float64(n)
	}
	width := (to - from) / float64(n)
	at := func(v float64) float64 { return min(max((v-from)/width, 0), float64(n)) }
	for i, c := range h.counts {
		if c == 0 {
			continue
		}
		// A bucket wider than a bin is spread over those it covers.
		lo, hi := at(max(float64(lower(i)), from)), at(min(float64(lower(i+1)), float64(h.Max)))
		if hi <= lo {
			counts[min(int(lo), n-1)] += float64(c)
			continue
		}
		for b := int(lo); b < n && float64(b) < hi; b++ {
			part := min(hi, float64(b+1)) - max(lo, float64(b))
			counts[b] += float64(c) * part / (hi - lo)
		}
	}
	return edges, counts
}
