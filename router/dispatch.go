package router

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/router/dialect"
	"github.com/xpyd/xpyd/router/pick"
)

// answer is what decode said, once nothing more can be repeated: a whole
// body, or a stream whose first events are here.
type answer struct {
	status      int
	contentType string
	timing      string // decode's Server-Timing
	body        []byte
	stream      *events // nil for a whole body
	first       []byte
	// merge is where the prompt's usage is found, nil if decode knows it.
	merge func() (openai.PromptUsage, bool)
}

// attempt is one exchange of a request with one pair. Its link is fresh.
type attempt struct {
	q      *request
	choice *pick.Choice
	speak  dialect.Dialect
	rules  *dialect.Rules
	link   ticket.Link
	start  time.Time
	p, d   *leg
	alone  bool          // decode does it all, and p is not used,
	falls  dialect.Shape // because of this; "" for engines without a partner
	asked  bool          // for the usage; the handler's own

	pDone chan struct{} // prefill's goroutine is over
	dDone chan struct{} // decode has answered or failed

	mu        sync.Mutex
	committed bool // decode answers: prefill's fate matters no more
	outcome   ticket.Outcome
	failed    *failure
	usage     openai.PromptUsage // prefill's, if counted
	counted   bool
	unwatch   func() // see watch; nil when nothing is watched
	unlinger  func() bool
	closed    bool
}

// dispatch tries pairs until one answers or nothing is left to try.
func (q *request) dispatch() (*answer, *openai.Error) {
	var exclude, avoid []string
	prefer := ""
	var last *failure
	for n := 1; ; n++ {
		choice, version, oerr := q.choose(exclude, avoid, prefer, last != nil)
		if oerr != nil {
			if last != nil && q.ctx.Err() == nil {
				oerr.Message += "; " + last.Error()
			}
			return nil, oerr
		}
		again := slices.Contains(avoid, choice.Prefill.ID) || slices.Contains(avoid, choice.Decode.ID)
		if again && !q.pause(n) {
			choice.EndPrefill()
			choice.EndDecode()
			return nil, contextError(q.ctx)
		}
		a := q.newAttempt(choice, version)
		ans, f := a.run()
		if f == nil {
			return ans, nil
		}
		a.close()
		if q.ctx.Err() != nil {
			return nil, contextError(q.ctx)
		}
		if f.relay != nil { // the client's own fault, in an engine's words
			q.firstByte()
			return f.relay, nil
		}
		q.r.facts.forget(a.p.inst)
		q.r.log.Warn("attempt failed", "request_id", q.id, "link", a.link.String(), "prefill", a.p.inst.ID, "decode", a.d.inst.ID,
			"attempt", n, "err", f.Error())
		if !f.retry || q.probe || n >= q.r.cfg.Attempts || f.budgeted() && !q.r.budget.spend() {
			return nil, f.httpError()
		}
		q.r.metrics.retries.WithLabelValues(f.reason).Inc()
		last = f
		exclude, avoid = append(exclude, f.exclude...), append(avoid, f.avoid...)
		if f.holds != "" && f.holds == prefer { // it lost two in a row: perhaps it is the one
			avoid, f.holds = append(avoid, f.holds), ""
		}
		prefer = f.holds
	}
}

// pause lets a worker that had no room find some before the next attempt; it
// is short, because another pair may be free now.
func (q *request) pause(n int) bool {
	timer := time.NewTimer(time.Duration(n) * 10 * time.Millisecond)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-q.ctx.Done():
		return false
	}
}

// retryPairWait bounds a retry's wait for another pair.
const retryPairWait = 500 * time.Millisecond

// choose picks a pair, waiting up to PairWait for one to come.
func (q *request) choose(exclude, avoid []string, prefer string, again bool) (*pick.Choice, uint64, *openai.Error) {
	r := q.r
	if q.ctx.Err() != nil {
		return nil, 0, contextError(q.ctx)
	}
	req := &pick.Request{Model: q.top.Model, Chain: q.chain, Tokens: q.top.PromptTokens(), Output: q.output(), Seqs: q.top.N,
		Exclude: exclude, Avoid: avoid, Prefer: prefer, Explain: q.ex}
	q.enrich(req)
	var timeout <-chan time.Time
	for {
		changed, probed := r.fleet.Changed(), r.probes.changed()
		view := r.view()
		choice, err := r.picker.Pick(view, req)
		if err == nil {
			return choice, view.Snapshot.Version, nil
		}
		wait := r.gate.get().PairWait
		if again { // it has a failure to report
			wait = min(wait, retryPairWait)
		}
		if !errors.Is(err, pick.ErrNoPair) && len(view.Snapshot.Members) > 0 {
			wait = 0 // an unknown model will not come
		}
		if len(view.Snapshot.Members) == 0 {
			err = fmt.Errorf("%w: there are no workers", pick.ErrNoPair)
		}
		if wait == 0 {
			return nil, 0, pickError(err, q.top.Model)
		}
		if timeout == nil {
			timer := time.NewTimer(wait)
			defer timer.Stop()
			timeout = timer.C
			q.set(statePicking)
		}
		select {
		case <-changed:
		case <-probed:
		case <-timeout:
			return nil, 0, pickError(err, q.top.Model)
		case <-q.ctx.Done():
			return nil, 0, contextError(q.ctx)
		}
	}
}

// output estimates how many tokens may be generated.
func (q *request) output() int {
	n := q.top.MaxTokens
	if n == 0 {
		if n = 16; q.top.Messages {
			n = 256
		}
	}
	return n * q.top.N
}

func (q *request) newAttempt(c *pick.Choice, version uint64) *attempt {
	a := &attempt{q: q, choice: c, speak: dialect.For(c.Decode.Dialect), link: ticket.NewLink(), start: time.Now(), pDone: make(chan struct{}), dDone: make(chan struct{})}
	if a.speak != nil {
		a.rules = a.speak.Rules()
		if a.rules.Order == dialect.Alone {
			a.alone = true
		} else if c.Local != "" {
			a.alone = true
		} else if a.falls = a.rules.Cannot(&q.top); a.falls != "" {
			a.alone = true
		}
	}
	a.p = newLeg(fleet.Prefill, &c.Prefill.Instance, version)
	a.d = newLeg(fleet.Decode, &c.Decode.Instance, version)
	q.mu.Lock()
	q.attempts = append(q.attempts, a)
	q.state, q.since = stateWaiting, a.start
	if q.dispatched.IsZero() {
		q.dispatched = a.start
	}
	q.mu.Unlock()
	if a.lingers() {
		a.unlinger = a.p.within(q.r.ctx)
	}
	if cause := context.Cause(q.ctx); cause != nil { // its end may have missed this attempt
		a.end(cause)
	}
	return a
}

// lingers says whether prefill's leg may outlive the request.
func (a *attempt) lingers() bool { return a.rules != nil && a.rules.Linger > 0 }

// end ends the legs, because the request is over.
func (a *attempt) end(cause error) {
	a.d.end(cause)
	if !a.lingers() {
		a.p.end(cause)
	}
}

// endLegs ends the legs of all attempts with the request.
func (q *request) endLegs() {
	q.mu.Lock()
	attempts := slices.Clone(q.attempts)
	q.mu.Unlock()
	for _, a := range attempts {
		a.end(context.Cause(q.ctx))
	}
}

// run makes the attempt, up to decode's first event or a failure.
func (a *attempt) run() (*answer, *failure) {
	r := a.q.r
	if a.speak == nil {
		close(a.pDone)
		return nil, &failure{role: fleet.Decode, id: a.d.inst.ID, outcome: ticket.Incompatible, reason: reasonOutcome + string(ticket.Incompatible),
			err: fmt.Errorf("its dialect %q is unknown", a.d.inst.Dialect)}
	}
	x := &dialect.Exchange{RequestID: a.q.id, Link: a.link, Path: a.q.path, Body: a.q.body, Top: &a.q.top, Seed: a.q.seed,
		Prefill: a.p.inst, Decode: a.d.inst, Left: time.Until(a.q.end), Probe: a.q.probe, Trace: a.q.trace}
	r.legs.add(a.d)
	if !a.alone {
		r.legs.add(a.p)
	}
	now := r.fleet.Snapshot() // a death between the choice and add
	for _, l := range []*leg{a.p, a.d} {
		if err := lost(now.Get(l.inst.ID), l.inst); err != nil && l.version <= now.Version {
			l.end(err)
		}
	}
	var ans *answer
	f := a.ask(x)
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

// runTogether sends both legs at once: prefill's on its own goroutine, which
// close waits for, decode's here. Whichever fails first, before decode has
// committed itself, ends the other.
func (a *attempt) runTogether(x *dialect.Exchange) (*answer, *failure) {
	started := a.q.r.spawn(func() {
		defer close(a.pDone)
		a.prefill(x)
	})
	if !started {
		close(a.pDone)
		a.d.end(errShutdown)
	}
	return a.decode(x)
}

// grace is how long one leg's hearsay about the other waits for the other's
// own word.
const grace = 50 * time.Millisecond

// prefill sends prefill's leg and waits for its outcome, however long decode
// takes to stream; it is over when prefill's part is.
func (a *attempt) prefill(x *dialect.Exchange) {
	res, f := a.askPrefill(x)
	a.choice.EndPrefill()
	if f == nil {
		a.p.set(legDone)
		a.heard(res)
		return
	}
	a.q.r.legs.remove(a.p)
	a.p.fail()
	if f.hearsay() {
		await(a.dDone)
	}
	a.mu.Lock()
	a.outcome = res.Outcome
	a.mu.Unlock()
	a.give(f)
}

// heard notes prefill's good word. If decode can wait in vain from here on,
// prefill is still watched until decode's first event, and so is the clock.
func (a *attempt) heard(res dialect.Result) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.outcome, a.usage, a.counted = res.Outcome, res.Prompt, res.Counted
	if !a.rules.Watched || a.committed || a.failed != nil || a.closed {
		a.q.r.legs.remove(a.p)
		return
	}
	a.unwatch = a.watch()
}

// watch ends decode's leg when prefill dies with the blocks that decode has to
// collect, and when the dialect's budgets of time are used up. It returns how
// to end that.
func (a *attempt) watch() func() {
	late := func(err error) *failure {
		return &failure{role: fleet.Decode, id: a.d.inst.ID, outcome: ticket.Late, reason: reasonTimeout, err: err, retry: true,
			avoid: []string{a.p.inst.ID, a.d.inst.ID, a.d.inst.ID}}
	}
	start, silence, gap := time.Now(), a.q.r.cfg.DecodeSilence, a.rules.Gap
	if gap <= 0 || a.rules.Order != dialect.PrefillFirst {
		gap = silence
	}
	var timer *time.Timer
	timer = time.AfterFunc(min(gap, silence), func() {
		left := silence - time.Since(start)
		switch {
		case left <= 0:
			err := fmt.Errorf("it is silent for %v after prefill's answer", silence)
			if a.rules.Hint != "" {
				err = fmt.Errorf("%w; %s", err, a.rules.Hint)
			}
			a.give(late(err))
		case !a.d.sent.Load():
			a.give(late(fmt.Errorf("it did not take its request within %v of prefill's answer", gap)))
		default:
			a.mu.Lock() // unwatch may have stopped the timer just now
			if a.unwatch != nil {
				timer.Reset(left)
			}
			a.mu.Unlock()
		}
	})
	stop := a.p.onEnd(func() {
		if cause := a.p.cause(); errors.Is(cause, errInstanceDead) {
			a.give(&failure{role: fleet.Prefill, id: a.p.inst.ID, outcome: ticket.Dead, reason: reasonDead, err: cause, retry: true,
				exclude: []string{a.p.inst.ID}, holds: a.d.inst.ID})
		}
	})
	return func() {
		timer.Stop()
		stop()
		a.q.r.legs.remove(a.p)
	}
}

// give ends decode's leg with the failure, unless decode has committed itself
// or something else failed before.
func (a *attempt) give(f *failure) {
	a.mu.Lock()
	matters := !a.committed && a.failed == nil && !a.closed
	if matters {
		a.failed = f
	}
	a.mu.Unlock()
	if matters {
		a.d.end(f)
	}
}

func await(done <-chan struct{}) {
	select {
	case <-done: // mostly
		return
	default:
	}
	timer := time.NewTimer(grace)
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C:
	}
}

// maxPrefillAnswer bounds prefill's answer: block ids, token ids, a state.
const maxPrefillAnswer = 16 << 20

func (a *attempt) askPrefill(x *dialect.Exchange) (dialect.Result, *failure) {
	h := a.q.r.up.request()
	defer a.q.r.up.requests.Put(h)
	body := a.speak.Prefill(h, x)
	b, err := a.q.r.send(a.p, h, body)
	if err != nil {
		return dialect.Result{}, a.broken(a.p, err)
	}
	a.p.set(legAnswer)
	text, err := b.all(maxPrefillAnswer)
	if err != nil {
		b.abort()
		return dialect.Result{}, a.broken(a.p, err)
	}
	said := dialect.Answer{Status: b.header.StatusCode(), ContentType: string(b.header.ContentType()),
		Outcome: string(b.header.Peek(dialect.HeaderOutcome)), Body: text}
	b.finish()
	res := a.speak.Result(x, said)
	switch {
	case res.Outcome == ticket.Done:
		return res, nil
	case !a.rules.Typed && (said.Status < 200 || said.Status > 299):
		return res, a.refused(a.p, a.d, said)
	}
	return res, a.told(a.p, a.d, res.Outcome, res.Message)
}

// decode sends decode's leg and reads its answer up to where it can still be
// repeated: the whole body, or a stream's first events.
func (a *attempt) decode(x *dialect.Exchange) (*answer, *failure) {
	h := a.q.r.up.request()
	defer a.q.r.up.requests.Put(h)
	var body [][]byte
	if a.alone {
		body = dialect.Plain(h, x)
	} else {
		body = a.speak.Decode(h, x)
	}
	b, err := a.q.r.send(a.d, h, body)
	if err != nil {
		return nil, a.broken(a.d, err)
	}
	status := b.header.StatusCode()
	if a.rules.Typed && status < 500 && !a.commit() {
		b.abort()
		return nil, a.beaten()
	}
	a.d.set(legAnswer)
	ans := &answer{status: status, contentType: string(b.header.ContentType()), timing: string(b.header.Peek("Server-Timing"))}
	if a.rules.Usage && !a.alone {
		ans.merge = a.promptUsage
	}
	if status == 200 && isEventStream(ans.contentType) {
		ans.stream = &events{body: b}
		ans.first, err = ans.stream.next()
		if err == nil && !a.rules.Typed {
			err = a.opening(ans.first)
		}
		if err != nil {
			b.abort()
			if errors.Is(err, errOpening) { // mostly of blocks that it could not get
				return nil, &failure{role: fleet.Decode, id: a.d.inst.ID, reason: reasonStatus, retry: true,
					avoid: []string{a.p.inst.ID, a.d.inst.ID}, err: err}
			}
			return nil, a.broken(a.d, err)
		}
		a.q.firstByte()
		return ans, nil
	}
	if ans.body, err = b.all(a.q.r.cfg.MaxResponseBytes); err != nil {
		b.abort()
		return nil, a.broken(a.d, err)
	}
	outcome := ticket.Outcome(b.header.Peek(dialect.HeaderOutcome))
	b.finish()
	if !a.rules.Typed {
		if status < 200 || status > 299 {
			return nil, a.refused(a.d, a.p, dialect.Answer{Status: status, ContentType: ans.contentType, Outcome: string(outcome), Body: ans.body})
		}
		if !a.commit() {
			return nil, a.beaten()
		}
		if ans.merge != nil {
			if u, ok := ans.merge(); ok {
				ans.body = openai.MergeUsage(ans.body, u)
			}
		}
	} else if status >= 500 {
		if outcome != "" && outcome != ticket.Refused {
			return nil, a.told(a.d, a.p, outcome, errorMessage(ans.body))
		}
		if !isJSON(ans.contentType) { // not our worker's own words
			return nil, &failure{role: fleet.Decode, id: a.d.inst.ID, reason: reasonStatus, retry: true, avoid: []string{a.d.inst.ID},
				err: fmt.Errorf("status %d", status)}
		}
	}
	a.q.firstByte()
	return ans, nil
}

// commit marks that decode has begun to answer, unless prefill's failure came
// first.
func (a *attempt) commit() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.failed != nil || a.d.cause() != nil {
		return false
	}
	a.committed = true
	a.endWatch()
	return true
}

// beaten is why decode could not commit.
func (a *attempt) beaten() *failure {
	a.mu.Lock()
	f := a.failed
	a.mu.Unlock()
	if f == nil {
		f = a.broken(a.d, a.d.cause())
	}
	return f
}

// blame returns what really ended the attempt: a leg often only reports what
// happened to the other, whose own word is about to come.
func (a *attempt) blame(f *failure) *failure {
	a.d.fail()
	if f.hearsay() {
		await(a.pDone)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.failed == nil || a.failed.hearsay() && !f.hearsay() {
		a.failed = f
	}
	return a.failed
}

// broken is the failure of a leg whose connection broke, timed out, or was
// closed because its worker is dead or the other leg failed.
func (a *attempt) broken(l *leg, err error) *failure {
	f := &failure{role: l.role, id: l.inst.ID, outcome: ticket.Dead, retry: true, exclude: []string{l.inst.ID}, err: err, reason: reasonTransport}
	cause := l.cause()
	var other *failure
	switch {
	case errors.As(cause, &other):
		return other
	case errors.Is(cause, errInstanceDead):
		f.err, f.reason = cause, reasonDead
	case cause != nil: // the request is over
		f.err, f.retry = cause, false
	default:
		var le *legError
		if errors.As(err, &le) && !le.gone() {
			f.outcome, f.reason = ticket.Late, reasonTimeout
			break
		}
		a.q.r.suspect(l.inst, err)
	}
	if l == a.p && f.outcome == ticket.Dead && f.retry && a.rules != nil && a.rules.Typed {
		f.holds = a.d.inst.ID
	}
	return f
}

// told is the failure that a worker reported in words; they are mostly about
// its partner.
func (a *attempt) told(by, partner *leg, o ticket.Outcome, message string) *failure {
	if message == "" {
		message = "no reason given"
	}
	f := &failure{role: by.role, id: by.inst.ID, outcome: o, retry: o.Retryable() || o == ticket.Cancelled, reason: reasonOutcome + string(o),
		err: fmt.Errorf("%s: %s", o, message)}
	if !slices.Contains(retryReasons, f.reason) {
		f.reason = reasonStatus
	}
	switch {
	case o == ticket.NoSpace:
		f.avoid = []string{by.inst.ID}
	case f.hearsay():
		f.avoid = []string{partner.inst.ID, partner.inst.ID, by.inst.ID}
		if by.role == fleet.Decode && o == ticket.Dead {
			f.avoid, f.holds = f.avoid[:2], by.inst.ID
		}
	default: // either may be at fault
		f.avoid = []string{partner.inst.ID, by.inst.ID}
	}
	return f
}

// close ends what is left of the attempt and waits for prefill's goroutine,
// but for a leg that must not be cut: that one is given its time.
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
			a.q.r.metrics.cancelled.WithLabelValues(string(l.role)).Inc()
		}
	}
	prefill := func() {
		settle(a.p)
		a.p.end(errOver)
		if a.unlinger != nil {
			a.unlinger()
		}
		<-a.pDone
		a.q.r.legs.remove(a.p)
		a.choice.EndPrefill()
	}
	settle(a.d)
	a.d.end(errOver)
	a.q.r.legs.remove(a.d)
	a.choice.EndDecode()
	if a.rules == nil || a.rules.Linger == 0 || !a.p.sent.Load() || !a.prefillOpen() ||
		!a.q.r.spawn(func() { a.linger(); prefill() }) {
		prefill()
	}
}

// linger waits for prefill's leg for as long as the dialect wants.
func (a *attempt) linger() {
	timer := time.NewTimer(a.rules.Linger)
	defer timer.Stop()
	select {
	case <-a.pDone:
	case <-timer.C:
	case <-a.q.r.ctx.Done():
	}
}

// prefillOpen says whether prefill's leg is still to be answered.
func (a *attempt) prefillOpen() bool {
	select {
	case <-a.pDone:
		return false
	default:
		return true
	}
}

// firstByte notes the time of the answer's first byte.
func (q *request) firstByte() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.first = time.Now()
	q.state, q.since = stateRelay, q.first
}

// send does a leg's round trip to its worker.
func (r *Router) send(l *leg, h *fasthttp.RequestHeader, body [][]byte) (*upBody, error) {
	addr, err := hostPort(l.inst.URL)
	if err != nil {
		return nil, &legError{"connect", err}
	}
	return r.up.roundTrip(&l.life, addr, h, body, &l.sent)
}

// suspect looks at a worker whose connection broke: if it takes no new one it
// is reported dead. A single broken connection does not condemn it.
func (r *Router) suspect(inst *fleet.Instance, err error) {
	if errors.Is(err, syscall.ECONNREFUSED) {
		r.fleet.ReportDead(inst.ID, inst.Epoch, err.Error())
		return
	}
	r.knock(inst, func(derr error) {
		if derr != nil {
			r.fleet.ReportDead(inst.ID, inst.Epoch, fmt.Sprintf("%v, then %v", err, derr))
		}
	})
}

// knock connects to a worker and tells then whether it took the connection;
// while one knock is out others are dropped. A slow answer is no answer.
func (r *Router) knock(inst *fleet.Instance, then func(error)) {
	addr, err := hostPort(inst.URL)
	if err != nil {
		return
	}
	key := fmt.Sprintf("%s/%d", inst.ID, inst.Epoch)
	r.mu.Lock()
	busy := r.knocks[key]
	r.knocks[key] = true
	r.mu.Unlock()
	if busy {
		return
	}
	done := func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.knocks, key)
	}
	if !r.spawn(func() {
		defer done()
		ctx, cancel := context.WithTimeout(r.ctx, 500*time.Millisecond)
		defer cancel()
		conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", addr)
		if err == nil {
			conn.Close()
		}
		if r.ctx.Err() == nil {
			then(err)
		}
	}) {
		done()
	}
}
