package flight

import (
	"cmp"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/internal/config"
)

// Hedge configures second requests: when a pair has not begun to answer after a
// delay, another pair gets the request too, under a link of its own, and the
// first to begin answers. The loser is cancelled. Nothing is ever mixed from
// both, so the two need not give the same tokens.
type Hedge struct {
	Enabled bool `key:"enabled"`
	// Delay is when the second pair is asked; 0: when 95 % of the latest
	// requests had begun to answer.
	Delay time.Duration `key:"delay"`
	// Ratio is how many second requests each request earns for all, and Burst
	// how many can be saved up.
	Ratio float64 `key:"ratio"`
	Burst int     `key:"burst"`
}

// DefaultHedge is off: a second request costs a whole prefill, which only a
// fleet with room to spare should pay for its slowest requests.
func DefaultHedge() Hedge { return Hedge{Ratio: 0.05, Burst: 16} }

// Validate returns a *config.KeyError.
func (h Hedge) Validate() error {
	return cmp.Or(config.AtLeast("delay", h.Delay, 0), config.Portion("ratio", h.Ratio), config.AtLeast("burst", h.Burst, 0))
}

// What became of a second request: the label of its metric.
const (
	hedgeWon      = "won"
	hedgeLost     = "lost"
	hedgeFailed   = "failed"
	hedgeNoBudget = "no_budget" // it was not sent: too many were
	hedgeNoPair   = "no_pair"   // nor this: no other pair is free of both first workers
)

// hedger is the hedging of one router.
type hedger struct {
	budget *budget
	first  quantile
	count  *prometheus.CounterVec // result
}

func newHedger(c Hedge) *hedger {
	h := &hedger{budget: newBudget(c.Ratio, c.Burst, 0), count: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "xpyd_router_hedges_total",
		Help: "Requests that a second pair was asked for because the first was slow to begin, by what became of that: of those that won, the first pair was slower by more than it cost."}, []string{"result"})}
	for _, result := range []string{hedgeWon, hedgeLost, hedgeFailed, hedgeNoBudget, hedgeNoPair} {
		h.count.WithLabelValues(result)
	}
	return h
}

// errLost is why the legs of an attempt end when another was first.
var errLost = errors.New("another pair answered first")

// hedge is two attempts at one request, of which one may answer.
type hedge struct {
	q     *request
	first *attempt

	mu  sync.Mutex
	won *attempt
	two *attempt // nil until it is sent

	done chan struct{} // nothing more comes of the second
	ans  *answer       // its own, as run returns them
	f    *failure
}

// hedged makes the attempt, with a second one beside it if that is configured, the
// dialect's legs are cheap to cancel, and the first is slow.
func (q *request) hedged(a *attempt) (*answer, *failure) {
	c := &q.s.Hedge
	if !c.Enabled || q.probe || a.rules == nil || !a.rules.Hedges {
		return a.generate()
	}
	q.s.hedges.budget.earn()
	delay := c.Delay
	if delay == 0 {
		if delay = q.s.hedges.first.get(); delay == 0 {
			return a.generate()
		}
	}
	h := &hedge{q: q, first: a, done: make(chan struct{})}
	a.hedge = h
	timer := time.AfterFunc(delay, func() {
		if !q.s.Spawn(h.second) {
			close(h.done)
		}
	})
	ans, f := a.generate()
	if f == nil && h.win(a) {
		h.endLoser(a)
	} else if f == nil { // it is not one that commits
		ans, f = nil, &failure{role: a.d.role, id: a.d.inst.ID, err: errLost}
	}
	if timer.Stop() {
		return ans, f
	}
	if f != nil && !f.retry && !f.lastResort() && h.win(a) { // final, but not for who won already
		h.endLoser(a)
	}
	<-h.done
	switch two := h.two; {
	case two == nil:
	case f == nil || h.won == a:
		q.last(a)
	case h.won == two, h.f.lastResort() && f.retry: // as if it were the retry
		a.close()
		return h.ans, h.f
	default: // both failed
		f.exclude, f.avoid = append(f.exclude, h.f.exclude...), append(f.avoid, h.f.avoid...)
		q.last(a)
	}
	return ans, f
}

// second asks another pair.
func (h *hedge) second() {
	defer close(h.done)
	q := h.q
	result := func(s string) { q.s.hedges.count.WithLabelValues(s).Inc() }
	if q.ctx.Err() != nil || h.winner() != nil {
		return
	}
	if !q.s.hedges.budget.spend(time.Now()) {
		result(hedgeNoBudget)
		return
	}
	view := q.s.Members.View()
	choice, err := q.s.Picker.Pick(view, q.pickRequest([]string{h.first.p.inst.ID, h.first.d.inst.ID}, nil, ""))
	if err != nil {
		result(hedgeNoPair)
		return
	}
	a := q.newAttempt(choice, view.Snapshot.Version)
	a.hedge = h
	h.mu.Lock()
	h.two = a
	late := h.won != nil
	h.mu.Unlock()
	if late {
		a.end(errLost)
	}
	ans, f := a.generate()
	if f == nil && !h.win(a) {
		f = &failure{role: a.d.role, id: a.d.inst.ID, err: errLost}
	}
	won := h.winner() == a
	switch {
	case f == nil:
		result(hedgeWon)
		h.endLoser(a)
		h.ans = ans
		return
	case won || h.winner() == nil:
		result(hedgeFailed)
	default:
		result(hedgeLost)
	}
	a.close()
	h.f = f
	if !won && f.cause() != errLost && q.ctx.Err() == nil {
		q.s.Log.Warn("second attempt failed", "request_id", q.id, "link", a.link.String(), "prefill", a.p.inst.ID, "decode", a.d.inst.ID, "err", f.Error())
	}
}

// win makes a the winner, unless there is another. Without a hedge everybody
// wins.
func (h *hedge) win(a *attempt) bool {
	if h == nil {
		return true
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.won == nil {
		h.won = a
	}
	return h.won == a
}

func (h *hedge) winner() *attempt {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.won
}

// endLoser ends the legs of the other attempt.
func (h *hedge) endLoser(won *attempt) {
	if h == nil {
		return
	}
	h.mu.Lock()
	other := h.two
	if other == won {
		other = h.first
	}
	h.mu.Unlock()
	if other != nil {
		other.end(errLost)
	}
}

// last makes a the attempt that counts as the latest: it answers, or says why not.
func (q *request) last(a *attempt) {
	q.mu.Lock()
	defer q.mu.Unlock()
	i := slices.Index(q.attempts, a)
	q.attempts = append(slices.Delete(q.attempts, i, i+1), a)
}

// quantile is the time within which 95 % of the latest requests begin to
// answer; 0 while too few have.
type quantile struct {
	now atomic.Int64 // nanoseconds

	mu   sync.Mutex
	ring [256]time.Duration
	n    int // ever added
}

// quantileEvery is how many new values change what is returned.
const quantileEvery = 16

func (e *quantile) get() time.Duration { return time.Duration(e.now.Load()) }

func (e *quantile) add(d time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.ring[e.n%len(e.ring)] = d
	e.n++
	if e.n%quantileEvery != 0 || e.n < 2*quantileEvery {
		return
	}
	sorted := e.ring
	seen := sorted[:min(e.n, len(sorted))]
	slices.Sort(seen)
	e.now.Store(int64(max(seen[len(seen)*95/100], 1)))
}
