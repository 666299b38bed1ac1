package record

import "time"

const (
	maxBins  = 512                   // longer runs merge bins
	firstBin = 50 * time.Millisecond // width of the bins of a short run
)

// Bin is what happened in one stretch of time.
type Bin struct {
	Started, Done, Failed int
	Tokens                float64 // of answers, spread evenly from first to last token
}

// timeline counts by time since the phase began.
type timeline struct {
	width time.Duration
	bins  []Bin
}

// at returns the bin of t, which it makes if need be.
func (l *timeline) at(t time.Duration) *Bin {
	if l.width == 0 {
		l.width = firstBin
	}
	i := int(max(t, 0) / l.width)
	for i >= maxBins {
		half := make([]Bin, (len(l.bins)+1)/2, maxBins)
		for j, b := range l.bins {
			h := &half[j/2]
			h.Started += b.Started
			h.Done += b.Done
			h.Failed += b.Failed
			h.Tokens += b.Tokens
		}
		l.bins, l.width = half, l.width*2
		i = int(t / l.width)
	}
	for i >= len(l.bins) {
		l.bins = append(l.bins, Bin{})
	}
	return &l.bins[i]
}

// tokens spreads n tokens over a time; the first is at from.
func (l *timeline) tokens(from, to time.Duration, n int) {
	from, to = max(from, 0), max(to, 0)
	if n == 0 {
		return
	}
	if to <= from || n == 1 {
		l.at(to).Tokens += float64(n)
		return
	}
	l.at(to) // may change the width
	l.at(from).Tokens++
	perSecond := float64(n-1) / (to - from).Seconds()
	for t := from; t < to; {
		next := min(to, (t/l.width+1)*l.width)
		l.bins[min(int(t/l.width), len(l.bins)-1)].Tokens += perSecond * (next - t).Seconds()
		t = next
	}
}
