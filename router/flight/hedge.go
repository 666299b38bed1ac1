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

// Hedge configures second requests: when a pair has not begun to answer after a delay,
// another pair gets the request too, under a link of its own, and the first to begin
// answers. The loser is cancelled. The two are never mixed, so they need not give the same
// tokens.
type Hedge struct {
	Enabled bool `key:"enabled"`
	// Delay is how long to wait for the first pair; 0: until 95 % of the latest requests
	// had begun to answer.
	Delay time.Duration `key:"delay"`
	// Ratio is how many second requests each request earns, and Burst how many can be saved
	// up.
	Ratio float64 `key:"ratio"`
	Burst int     `key:"burst"`
}

// DefaultHedge is off: a second request costs a whole prefill, so only a fleet with room to
// spare should use it.
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
	hedgeNoBudget = "no_budget" // not sent: too many were
	hedgeNoPair   = "no_pair"   // not sent: no other pair is without the first pair's workers
)

type hedger struct {
	budget *budget
	first  quantile
	count  *prometheus.CounterVec // result
}

func newHedger(c Hedge) *hedger {
	h := &hedger{budget: newBudget(c.Ratio, c.Burst, 0), count: counters("xpyd_router_hedges_total",
		"Requests whose first pair was slow to begin, by what became of a second attempt beside it. won: the second pair answered first. no_budget, no_pair: there was no second attempt.", "result")}
	for _, result := range []string{hedgeWon, hedgeLost, hedgeFailed, hedgeNoBudget, hedgeNoPair} {
		h.count.WithLabelValues(result)
	}
	return h
}

// errLost ends the legs of an attempt when the other one answered first.
var errLost = errors.New("another pair answered first")

// hedge is two attempts at one request, of which one may answer.
type hedge struct {
	q     *request
	first *attempt

	mu  sync.Mutex
	won *attempt
	two *attempt // the second; nil until it is sent

	done chan struct{} // closed when the second is over
	ans  *answer       // the second's, as generate returned it
	f    *failure
}

// hedged makes the attempt, with a second one beside it if hedging is on, the dialect's
// legs are cheap to cancel, and the first is slow.
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
	} else if f == nil { // it does not commit by itself
		ans, f = nil, &failure{by: a.d, err: errLost}
	}
	if timer.Stop() {
		return ans, f
	}
	if f != nil && !f.retry && !f.lastResort() && h.win(a) { // final, unless the other has won
		h.endLoser(a)
	}
	<-h.done
	switch two := h.two; {
	case two == nil:
	case f == nil || h.won == a:
		q.moveLast(a)
	case h.won == two, h.f.lastResort() && f.retry: // the second counts as the retry
		a.close()
		return h.ans, h.f
	default: // both failed
		f.exclude, f.avoid = append(f.exclude, h.f.exclude...), append(f.avoid, h.f.avoid...)
		q.moveLast(a)
	}
	return ans, f
}

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
		f = &failure{by: a.d, err: errLost}
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
	if !won && f.err != errLost && q.ctx.Err() == nil {
		q.s.Log.Warn("second attempt failed", "request_id", q.id, "link", a.link.String(), "prefill", a.p.inst.ID, "decode", a.d.inst.ID, "err", f.Error())
	}
}

// win makes a the winner, unless there is another. Without a hedge every attempt wins.
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

// moveLast makes a the latest attempt: the one that answers, or says why not.
func (q *request) moveLast(a *attempt) {
	q.mu.Lock()
	defer q.mu.Unlock()
	i := slices.Index(q.attempts, a)
	q.attempts = append(slices.Delete(q.attempts, i, i+1), a)
}

// quantile is the time within which 95 % of the latest requests began to answer; 0 while
// there are too few.
type quantile struct {
	now atomic.Int64 // nanoseconds

	mu   sync.Mutex
	ring [256]time.Duration
	n    int // ever added
}

// quantileEvery is how many new values it takes to change the result.
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
