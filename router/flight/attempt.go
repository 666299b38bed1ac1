package flight

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/router/dialect"
	"github.com/xpyd/xpyd/router/pick"
)

// attempt asks one pair, under a link of its own.
type attempt struct {
	q      *request
	choice *pick.Choice
	speak  *dialect.Dialect
	rules  *dialect.Rules
	link   ticket.Link
	start  time.Time
	p, d   *leg          // d answers; of native workers asked for embeddings it is the pair's prefill
	alone  bool          // decode does both phases and p is not used,
	falls  dialect.Shape // because of this; "" for engines without a partner
	asked  bool          // whether prefill's usage was awaited; only the handler uses it
	hedge  *hedge        // whose other attempt may answer first; mostly nil
	peer   *dialect.Peer // a worker that has more of the prompt than the pair; mostly nil
	// brought: decode has brought the prompt's KV from where the stream is, and goes on alone.
	brought bool

	pDone chan struct{} // closed when prefill's leg is over
	dDone chan struct{} // closed when decode has answered or failed

	mu        sync.Mutex
	committed bool // decode answers: prefill no longer matters
	outcome   ticket.Outcome
	failed    *failure
	usage     openai.PromptUsage // prefill's, or decode's where that knows it, if counted
	counted   bool
	unwatch   func() // see watchDecode; nil when nothing is watched
	unlinger  func() bool
	closed    bool
}

func (q *request) newAttempt(c *pick.Choice, version uint64) *attempt {
	a := &attempt{q: q, choice: c, speak: dialect.For(c.Decode.Dialect), link: ticket.NewLink(), start: time.Now(), pDone: make(chan struct{}), dDone: make(chan struct{})}
	if a.speak != nil {
		a.rules = &a.speak.Rules
		if a.rules.Order != dialect.Alone && c.Local == "" {
			a.falls = a.rules.Cannot(&q.top)
		}
		a.alone = a.rules.Order == dialect.Alone || c.Local != "" || a.falls != ""
	}
	a.p = newLeg(fleet.Prefill, &c.Prefill.Instance, version)
	a.d = newLeg(fleet.Decode, &c.Decode.Instance, version)
	if q.forwarded && (q.path == embeddings || q.path == cohereEmbed) && a.d.inst.Dialect == fleet.Native {
		a.p, a.d = a.d, a.p // a prompt is all there is to compute
	}
	a.p.span, a.d.span = q.spanOf(), q.spanOf()
	a.peer = a.findPeer()
	q.mu.Lock()
	q.attempts = append(q.attempts, a)
	q.state, q.since = stateWaiting, a.start
	if q.dispatched.IsZero() {
		q.dispatched = a.start
	}
	q.mu.Unlock()
	if a.lingers() {
		a.unlinger = a.p.Within(q.s.Ctx)
	}
	if cause := q.ctx.Cause(); cause != nil { // its end may have missed this attempt
		a.end(cause)
	}
	return a
}

// lingers reports whether prefill's leg may outlive the request.
func (a *attempt) lingers() bool { return a.rules != nil && a.rules.Linger > 0 }

func (a *attempt) leg(role fleet.Role) *leg {
	if role == a.p.role {
		return a.p
	}
	return a.d
}

// end ends the legs because the request is over. A lingering prefill leg goes on.
func (a *attempt) end(cause error) {
	a.d.End(cause)
	if !a.lingers() {
		a.p.End(cause)
	}
}

func (q *request) endLegs() {
	q.mu.Lock()
	attempts := slices.Clone(q.attempts)
	q.mu.Unlock()
	for _, a := range attempts {
		a.end(q.ctx.Cause())
	}
}

// generate makes the attempt, up to decode's first event or a failure.
func (a *attempt) generate() (*answer, *failure) {
	s := a.q.s
	if a.speak == nil {
		close(a.pDone)
		return nil, &failure{by: a.d, outcome: ticket.Incompatible, reason: reasonOutcome + string(ticket.Incompatible),
			err: fmt.Errorf("its dialect %q is unknown", a.d.inst.Dialect)}
	}
	if n, most := a.q.top.Surely(a.d.inst.MaxModelLen), s.MaxResponseBytes; a.rules.MaxAnswer && !a.q.top.Stream && n > most {
		close(a.pDone)
		field := largest(&a.q.top)
		return nil, &failure{by: a.d, outcome: ticket.Refused, reason: reasonOutcome + string(ticket.Refused),
			err: errLargeAnswer, api: openai.AnswerTooLarge(field, "the answer could have %d bytes and more; %d is the limit: lower %s, or ask for a stream", n, most, field)}
	}
	x := &dialect.Exchange{RequestID: a.q.id, Link: a.link, Path: a.q.asks, Body: a.q.body, Top: &a.q.top, Seed: a.q.seed,
		Prefill: a.p.inst, Decode: a.d.inst, PrefillRank: a.choice.PrefillRank, DecodeRank: a.choice.DecodeRank,
		Left: time.Until(a.q.end), Probe: a.q.probe, Trace: a.q.trace, Authorization: a.q.auth, Peer: a.peer, Brought: a.brought}
	if t := a.q.tenant; t != nil && a.rules.Promises {
		x.Promise = t.promise
	}
	if a.rules.Salts {
		x.CacheSalt = a.q.cacheSalt()
	}
	if a.rules.TakesOver && a.q.seam != nil && !a.q.seam.lost {
		x.Tokens, x.Given = true, a.q.seam.given()
	}
	if a.rules.Replays && a.q.seam != nil && a.q.seam.replays && !a.q.seam.lost {
		if err := a.replay(x); err != nil {
			close(a.pDone)
			return nil, &failure{by: a.d, outcome: ticket.Refused, reason: reasonStatus, err: err}
		}
	}
	a.register()
	var ans *answer
	f := a.learnFacts(x)
	switch {
	case f != nil:
		close(a.pDone)
	case a.alone:
		ans, f = a.runAlone(x)
	case a.rules.Order == dialect.PrefillFirst:
		ans, f = a.runInOrder(x)
	default:
		ans, f = a.runTogether(x)
	}
	close(a.dDone)
	if f == nil {
		return ans, nil
	}
	return nil, a.blame(f)
}

// register has the legs end with their workers.
func (a *attempt) register() {
	a.registerLeg(a.d)
	if !a.alone {
		a.registerLeg(a.p)
	}
}

func (a *attempt) registerLeg(l *leg) {
	s := a.q.s
	s.legs.add(l)
	if err := l.lost(s.fleet.Snapshot()); err != nil { // it died between the choice and add
		l.End(err)
	}
}

// close ends what is left of the attempt and waits for prefill's goroutine. A leg that must
// not be cut is given its time.
func (a *attempt) close() {
	a.mu.Lock()
	again := a.closed
	a.closed = true
	a.endWatch()
	a.mu.Unlock()
	if again {
		return
	}
	cut := a.q.ctx.Err() != nil
	settle := func(l *leg) {
		if l.finish(cut) {
			a.q.s.metrics.cancelled.WithLabelValues(string(l.role)).Inc()
		}
	}
	prefill := func() {
		settle(a.p)
		a.p.End(errOver)
		if a.unlinger != nil {
			a.unlinger()
		}
		<-a.pDone
		a.q.s.legs.remove(a.p)
		a.choice.EndPrefill()
	}
	settle(a.d)
	a.d.End(errOver)
	a.q.s.legs.remove(a.d)
	a.choice.EndDecode()
	if a.rules == nil || a.rules.Linger == 0 || !a.p.sent.Load() || !a.prefillOpen() ||
		!a.q.s.Spawn(func() { closedWithin(a.rules.Linger, a.pDone, a.q.s.Ctx.Done()); prefill() }) {
		prefill()
	}
}

func (a *attempt) prefillOpen() bool {
	select {
	case <-a.pDone:
		return false
	default:
		return true
	}
}
