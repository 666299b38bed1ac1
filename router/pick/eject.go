package pick

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/xpyd/xpyd/internal/config"
)

// Ways to eject.
const (
	EjectOff    = "off"
	EjectErrors = "errors" // workers that fail more than their peers
	EjectAll    = "all"    // also workers slower than their peers
)

// Ejection configures the ejection of outliers: workers that do worse than their peers, those
// alike in all that compatibility compares. It catches what breakers do not: a worker that fails
// every third request, or answers late.
type Ejection struct {
	Mode     string        `key:"mode"`     // EjectOff, EjectErrors or EjectAll
	Interval time.Duration `key:"interval"` // between two comparisons
	Windows  int           `key:"windows"`  // comparisons that a worker must lose in a row
	// Deviations is how far off a worker must be: times the median absolute deviation of its
	// peers, scaled to a normal's standard deviation.
	Deviations float64 `key:"deviations"`
	// MaxShare is the part of the peers that may be out. One always may, if another stays.
	MaxShare float64 `key:"max_share"`
	// Time is how long the first ejection lasts; each soon after it lasts twice as long, up to
	// MaxTime.
	Time    time.Duration `key:"time"`
	MaxTime time.Duration `key:"max_time"`
}

// DefaultEjection looks at errors only: of unequal machines the slower would be ejected for what
// they are, though policies that look at load give them less already.
func DefaultEjection() Ejection {
	return Ejection{Mode: EjectErrors, Interval: 5 * time.Second, Windows: 3, Deviations: 5, MaxShare: 0.34,
		Time: 15 * time.Second, MaxTime: 5 * time.Minute}
}

func (e *Ejection) validate() error {
	switch {
	case !(e.Deviations > 0):
		return config.Bad("deviations", "%v is not above 0", e.Deviations)
	case !(e.MaxShare > 0 && e.MaxShare < 1):
		return config.Bad("max_share", "%v is not within 0 and 1", e.MaxShare)
	}
	return cmp.Or(config.OneOf("mode", e.Mode, EjectOff, EjectErrors, EjectAll), config.Positive("interval", e.Interval),
		config.AtLeast("windows", e.Windows, 1), config.Positive("time", e.Time), config.AtLeast("max_time", e.MaxTime, e.Time))
}

// Least differences that count, however alike the peers are.
const (
	fewest    = 8                // results that make a window
	leastRate = 0.2              // of errors
	leastSlow = 0.47             // of the logarithm of time: 1.6 times
	scaled    = 1.4826           // times the median absolute deviation is a normal's standard deviation
	oldest    = 12 * time.Minute // a window that is older compares with nothing
)

// measure is one thing in which workers are compared: the window being filled, and the value of
// the last full one.
type measure struct {
	sum     float64
	n       int
	value   float64
	at      time.Time // of value; zero: none
	strikes int       // comparisons lost in a row
}

func (m *measure) add(v float64) { m.sum, m.n = m.sum+v, m.n+1 }

// roll closes the window if it has enough in it.
func (m *measure) roll(now time.Time) {
	if m.n >= fewest {
		m.value, m.at, m.sum, m.n = m.sum/float64(m.n), now, 0, 0
	}
}

// health is how a worker has done.
type health struct {
	good, bad int // since the last comparison
	measures  [3]measure
	ejected   int // times, for the doubling
}

// The measures.
const (
	measureErrors = iota // 1 for each failure
	measureLate          // logarithm of the time to the first token over what its peers would take
	measureSlow          // logarithm of the time between pieces of an answer
)

// outliers says, for each measure, the least difference that counts and why it ejects.
var outliers = [3]struct {
	least float64
	why   func(value, median float64) string
}{
	{leastRate, func(v, m float64) string {
		return fmt.Sprintf("%.0f%% of its requests fail, of its peers' %.0f%%", 100*v, 100*m)
	}},
	{leastSlow, func(v, m float64) string {
		return fmt.Sprintf("its first tokens take %.1f times as long as its peers'", math.Exp(v-m))
	}},
	{leastSlow, func(v, m float64) string {
		return fmt.Sprintf("its tokens take %.1f times as long as its peers'", math.Exp(v-m))
	}},
}

// reset forgets what led to an ejection, but not that there was one.
func (h *health) reset() { *h = health{ejected: h.ejected} }

// times reports whether workers are compared by time.
func (p *Picker) times() bool { return p.cfg.Ejection.Mode == EjectAll }

// took notes a time to the first token beside the class's line.
func (n *node) took(l *line, x float64, took time.Duration) {
	if l.n >= enough && took > 0 {
		if want := l.at(x); want > 0 {
			n.guard.measures[measureLate].add(math.Log(took.Seconds() / want))
		}
	}
}

// Paced tells how long decode took between two pieces of its answer, on average over a stream.
// Only EjectAll uses it.
func (c *Choice) Paced(gap time.Duration) {
	if !c.p.times() || gap <= 0 {
		return
	}
	c.p.mu.Lock()
	defer c.p.mu.Unlock()
	c.decode.n.guard.measures[measureSlow].add(math.Log(gap.Seconds()))
}

// Judge compares the workers of each class and ejects outliers. The caller calls it each
// Ejection.Interval.
func (p *Picker) Judge(now time.Time) {
	if m := p.cfg.Ejection.Mode; m == "" || m == EjectOff {
		return
	}
	p.build.Lock() // classes stay
	defer p.build.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.classes {
		p.judge(c, now)
	}
}

func (p *Picker) judge(c *class, now time.Time) {
	out := 0
	for _, n := range c.nodes {
		g := &n.guard
		errors := &g.measures[measureErrors]
		errors.sum, errors.n = errors.sum+float64(g.bad), errors.n+g.good+g.bad
		g.good, g.bad = 0, 0
		for i := range g.measures {
			g.measures[i].roll(now)
		}
		if g.state == Ejected && !now.Before(g.until) {
			p.recover(n, now)
		}
		if g.state != Closed {
			out++
		}
	}
	n := len(c.nodes)
	if n < 2 {
		return
	}
	worst := verdict{}
	for measure := range outliers {
		if measure == measureErrors || p.times() {
			p.compare(c, now, &worst, measure)
		}
	}
	// The worst alone: without it the others may look better in the next comparison.
	if allowed := max(int(p.cfg.Ejection.MaxShare*float64(n)), 1); worst.n != nil && out < allowed && out+1 < n {
		p.eject(worst.n, worst.why, now)
	}
}

// verdict is the worst outlier so far.
type verdict struct {
	n   *node
	far float64 // beyond its limit, in least differences
	why string
}

// compare looks for outliers in one measure. Of few workers each is compared with the others, of
// many with all.
func (p *Picker) compare(c *class, now time.Time, worst *verdict, measure int) {
	const few = 16
	var median, limit float64
	known, o := false, &outliers[measure]
	for _, n := range c.nodes {
		m := &n.guard.measures[measure]
		if m.at != now { // no new window
			continue
		}
		if len(c.nodes) <= few {
			median, limit, known = p.peers(c, n, measure, now)
		} else if !known {
			median, limit, known = p.peers(c, nil, measure, now)
		}
		if !known || m.value <= limit {
			m.strikes = 0
			continue
		}
		m.strikes++
		if far := (m.value - limit) / o.least; m.strikes >= p.cfg.Ejection.Windows && n.guard.admits(now) && (worst.n == nil || far > worst.far) {
			*worst = verdict{n, far, o.why(m.value, median)}
		}
	}
}

// peers returns the median of the others' values and the limit beyond it.
func (p *Picker) peers(c *class, not *node, measure int, now time.Time) (median, limit float64, ok bool) {
	values := p.values[:0]
	for _, n := range c.nodes {
		if m := &n.guard.measures[measure]; n != not && n.guard.state == Closed && !m.at.IsZero() && now.Sub(m.at) < oldest {
			values = append(values, m.value)
		}
	}
	p.values = values
	if len(values) == 0 {
		return 0, 0, false
	}
	median = middle(values)
	for i, v := range values {
		values[i] = math.Abs(v - median)
	}
	return median, median + max(outliers[measure].least, p.cfg.Ejection.Deviations*scaled*middle(values)), true
}

// middle is the median; it sorts.
func middle(v []float64) float64 {
	slices.Sort(v)
	h := len(v) / 2
	if len(v)%2 == 0 {
		return (v[h-1] + v[h]) / 2
	}
	return v[h]
}

func (p *Picker) eject(n *node, why string, now time.Time) {
	e, g := &p.cfg.Ejection, &n.guard
	if now.Sub(g.closed) > e.MaxTime {
		g.ejected = 0
	}
	d := doubled(e.Time, g.ejected, e.MaxTime)
	g.ejected++
	p.guardTo(n, Ejected, now.Add(d), why)
}

// amnesty takes back the ejections of a model that has no pair without those workers: an outlier
// is better than nobody. p.mu is held.
func (p *Picker) amnesty(m *model, now time.Time) (any bool) {
	for n := range m.nodes {
		if n.guard.state == Ejected && now.Before(n.guard.until) {
			p.recover(n, now)
			any = true
		}
	}
	return any
}
