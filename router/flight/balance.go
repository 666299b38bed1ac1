package flight

import (
	"cmp"
	"slices"
	"sync/atomic"
	"time"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router/pick"
)

// Balance configures the moves of streams from decode workers whose gaps between tokens are longer
// than their peers': those that could go on with these streams, token for token.
type Balance struct {
	Enabled bool `key:"enabled"`
	// Interval is how often gaps are compared. A worker loses one stream in each at most.
	Interval time.Duration `key:"interval"`
	// Windows is how many comparisons in a row a worker must lose before it loses a stream.
	Windows int `key:"windows"`
	// Above and Below are the times of its peers' median gap: a worker is slow once it is above the
	// first, until it is below the second.
	Above float64 `key:"above"`
	Below float64 `key:"below"`
	// MaxShare is the part of its streams that it may lose within balanceRenews comparisons.
	MaxShare float64 `key:"max_share"`
}

// DefaultBalance moves little, and late: what comes anew goes where there is least already.
func DefaultBalance() Balance {
	return Balance{Enabled: true, Interval: 5 * time.Second, Windows: 3, Above: 1.3, Below: 1.1, MaxShare: 0.25}
}

// Validate returns a *config.KeyError.
func (c Balance) Validate() error {
	switch {
	case !(c.Below >= 1 && c.Below <= 100):
		return config.Bad("below", "%v is not within 1 and 100", c.Below)
	case !(c.Above > c.Below && c.Above <= 100):
		return config.Bad("above", "%v is not within below, %v, and 100", c.Above, c.Below)
	case !(c.MaxShare > 0 && c.MaxShare <= 1):
		return config.Bad("max_share", "%v is not within 0 and 1", c.MaxShare)
	case c.Interval < time.Second:
		return config.Bad("interval", "%v is less than 1s", c.Interval)
	}
	return config.AtLeast("windows", c.Windows, 1)
}

const (
	balanceRenews = 12                   // comparisons after which a share may be lost again
	leastExcess   = 2 * time.Millisecond // of a gap over its peers': nobody notices less
)

// balance has streams move from slow workers. judge is called by one goroutine.
type balance struct {
	cfg    Balance
	orders atomic.Pointer[map[string]*order] // by worker; nil if nobody is slow
	paces  map[workerKey]*pace
}

// order is for one stream of a worker to move to another.
type order struct {
	epoch uint64
	to    string
	taken atomic.Bool
}

// take reports whether the order is the caller's.
func (o *order) take() bool { return o.taken.CompareAndSwap(false, true) }

// order is the one of a worker that nobody has taken; nil if there is none.
func (b *balance) order(i *fleet.Instance) *order {
	all := b.orders.Load()
	if all == nil { // mostly
		return nil
	}
	if o := (*all)[i.ID]; o != nil && o.epoch == i.Epoch && !o.taken.Load() {
		return o
	}
	return nil
}

// gap is a worker's gaps in an interval.
type gap struct {
	inst    *fleet.Instance
	median  time.Duration // over its streams
	streams int
	takes   bool // it may get more of them
}

// pace is what is remembered of a worker.
type pace struct {
	slow    bool
	lost    int    // comparisons in a row
	left    int    // streams that it may lose
	renews  int    // comparisons until it is so many again
	pending *order // the latest
}

// judge compares workers and says who is to lose a stream.
func (b *balance) judge(gaps []gap) {
	was := b.paces
	b.paces = make(map[workerKey]*pace, len(gaps))
	var orders map[string]*order
	for i := range gaps {
		g := &gaps[i]
		others, fastest := peers(gaps, g)
		if fastest == nil {
			continue
		}
		k := keyOf(g.inst)
		p := was[k]
		if p == nil {
			p = &pace{}
		}
		b.paces[k] = p
		p.compare(&b.cfg, g, others)
		if !p.slow || p.left == 0 || g.streams < 2 || float64(g.median) < b.cfg.Above*float64(fastest.median) {
			continue
		}
		fastest.takes = false // one at a time
		p.pending = &order{epoch: g.inst.Epoch, to: fastest.inst.ID}
		if orders == nil {
			orders = map[string]*order{}
		}
		orders[g.inst.ID] = p.pending
	}
	if orders == nil {
		b.orders.Store(nil)
		return
	}
	b.orders.Store(&orders)
}

// compare notes how a worker does beside the others' median.
func (p *pace) compare(c *Balance, g *gap, others time.Duration) {
	if p.pending != nil && p.pending.taken.Load() {
		p.left--
	}
	p.pending = nil
	ratio := float64(g.median) / float64(others)
	switch above := ratio > c.Above && g.median-others >= leastExcess; {
	case p.slow && ratio < c.Below:
		*p = pace{}
	case p.slow:
		p.renews--
	case !above:
		p.lost = 0
	default:
		p.lost++
		p.slow = p.lost >= c.Windows
	}
	if p.slow && p.renews <= 0 {
		p.left, p.renews = max(int(c.MaxShare*float64(g.streams)), 1), balanceRenews
	}
}

// peers returns the median of those that could go on with a worker's streams, and the fastest of
// them that takes some; nil if none does.
func peers(gaps []gap, of *gap) (median time.Duration, fastest *gap) {
	var all []time.Duration
	for i := range gaps {
		g := &gaps[i]
		if g == of || g.inst.Dialect != fleet.Native || !goesOn(g.inst, of.inst) {
			continue
		}
		all = append(all, g.median)
		if g.takes && (fastest == nil || g.median < fastest.median) {
			fastest = g
		}
	}
	if len(all) == 0 {
		return 0, nil
	}
	return middle(all), fastest
}

// middle is the median, of two the mean; it sorts.
func middle(v []time.Duration) time.Duration {
	slices.Sort(v)
	n := len(v)
	return (v[(n-1)/2] + v[n/2]) / 2
}

// balanced is called with each tick.
func (s *Service) balanced(tick int32) {
	every := int32(s.balance.cfg.Interval / listenEvery)
	if !s.balance.cfg.Enabled {
		return
	}
	s.legs.sample()
	if tick%every != 0 {
		return
	}
	gaps := s.legs.gaps(every)
	now := s.fleet.Snapshot()
	for i := range gaps {
		g := &gaps[i]
		m := now.Get(g.inst.ID)
		g.takes = m != nil && m.Epoch == g.inst.Epoch && s.Picker.Does(&m.Instance, fleet.Decode) && s.Members.Serves(m) && !s.silence.mute(g.inst) && s.Picker.Guard(m.ID, m.Epoch).State == pick.Closed
	}
	s.balance.judge(gaps)
}

// sample looks which legs wait for their workers, and not for their clients.
func (r *legs) sample() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for l := range r.open {
		l.samples++
		if l.waits.Load()%2 == 1 {
			l.waiting++
		}
	}
}

// gaps returns the gaps of each worker's streams that were there for the last ticks, and mostly
// waited for it: a leg waits once for each run of events.
func (r *legs) gaps(ticks int32) (out []gap) {
	by := map[workerKey][]time.Duration{}
	insts := map[workerKey]*fleet.Instance{}
	r.mu.Lock()
	for l := range r.open {
		waits := l.waits.Load()
		if l.samples >= ticks && 2*l.waiting > l.samples {
			k := keyOf(l.inst)
			by[k] = append(by[k], time.Duration(ticks)*listenEvery/time.Duration(max((waits-l.counted)/2, 1)))
			insts[k] = l.inst
		}
		l.samples, l.waiting, l.counted = 0, 0, waits
	}
	r.mu.Unlock()
	for k, list := range by {
		out = append(out, gap{inst: insts[k], median: middle(list), streams: len(list)})
	}
	slices.SortFunc(out, func(a, b gap) int { return cmp.Compare(a.inst.ID, b.inst.ID) })
	return out
}
