package flight

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// gapEdges are the buckets for the time between two tokens.
var gapEdges = [...]time.Duration{time.Millisecond, 2500 * time.Microsecond, 5 * time.Millisecond, 10 * time.Millisecond, 25 * time.Millisecond,
	50 * time.Millisecond, 75 * time.Millisecond, 100 * time.Millisecond, 150 * time.Millisecond, 200 * time.Millisecond, 300 * time.Millisecond,
	500 * time.Millisecond, time.Second, 2500 * time.Millisecond, 5 * time.Second, 10 * time.Second, 30 * time.Second}

// pulse is when the tokens of one stream came. A stream counts by itself, with one look at
// the clock per run of events, and adds to the histogram when it ends.
type pulse struct {
	first, last time.Duration // since the request's arrival; 0 before the first token
	gaps        [len(gapEdges) + 1]uint32
	sum         time.Duration
	longest     time.Duration // as the client sees them
	pauses      pauses
}

// pause is a wait between two tokens.
type pause struct{ from, to time.Duration } // since the request's arrival

// pauses are the longest of a stream, the longest first; the rest are zero.
type pauses [3]pause

// note keeps one if it is longer than another.
func (p *pauses) note(from, to time.Duration) {
	for i := range p {
		if to-from > p[i].to-p[i].from {
			copy(p[i+1:], p[i:])
			p[i] = pause{from, to}
			return
		}
	}
}

// beat notes a run of n tokens of a stream with several choices at a time.
func (p *pulse) beat(at time.Duration, n, choices int) {
	if n <= 0 {
		return
	}
	if p.first == 0 {
		p.first, n = at, n-1
	}
	gap := at - p.last
	if p.first != at {
		p.pauses.note(p.last, at)
	}
	if p.last = at; n == 0 {
		return
	}
	if p.first == at { // they came with the first
		gap = 0
	}
	p.longest = max(p.longest, gap)
	gap *= time.Duration(choices)
	p.sum += gap
	gap /= time.Duration(n)
	i := 0
	for i < len(gapEdges) && gap > gapEdges[i] {
		i++
	}
	p.gaps[i] += uint32(n)
}

// gaps is the histogram of all gaps, by path.
type gaps struct {
	desc *prometheus.Desc
	mu   sync.Mutex
	all  map[string]*gapCounts
}

type gapCounts struct {
	n   [len(gapEdges) + 1]atomic.Uint64
	sum atomic.Int64 // nanoseconds
}

func newGaps() *gaps {
	return &gaps{all: map[string]*gapCounts{}, desc: prometheus.NewDesc("xpyd_router_itl_seconds",
		"Time between the tokens of a stream as they are relayed. Tokens that come at once share the time equally.", []string{"path"}, nil)}
}

func (g *gaps) of(path string) *gapCounts {
	g.mu.Lock()
	defer g.mu.Unlock()
	c := g.all[path]
	if c == nil {
		c = &gapCounts{}
		g.all[path] = c
	}
	return c
}

func (c *gapCounts) add(p *pulse) {
	for i, n := range p.gaps {
		if n > 0 {
			c.n[i].Add(uint64(n))
		}
	}
	c.sum.Add(int64(p.sum))
}

// Describe implements prometheus.Collector.
func (g *gaps) Describe(ch chan<- *prometheus.Desc) { ch <- g.desc }

// Collect implements prometheus.Collector.
func (g *gaps) Collect(ch chan<- prometheus.Metric) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for path, c := range g.all {
		buckets, n := make(map[float64]uint64, len(gapEdges)), uint64(0)
		for i := range c.n {
			if n += c.n[i].Load(); i < len(gapEdges) {
				buckets[gapEdges[i].Seconds()] = n
			}
		}
		ch <- prometheus.MustNewConstHistogram(g.desc, n, time.Duration(c.sum.Load()).Seconds(), buckets, path)
	}
}
