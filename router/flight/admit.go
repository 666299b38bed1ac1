package flight

import (
	"errors"
	"math"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/jsonscan"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/router/limit"
)

// gate admits requests: a fixed number run, a bounded number wait by priority and tenant,
// the rest are refused.
type gate struct {
	*limit.Gate
	limits atomic.Pointer[Limits]
}

func newGate(l Limits) *gate {
	g := &gate{Gate: limit.NewGate(l.gate())}
	g.limits.Store(&l)
	return g
}

func (l *Limits) gate() limit.Limits {
	w := l.PriorityWeights
	return limit.Limits{InFlight: l.MaxInFlight, Wait: l.QueueWait, Bounds: limit.Bounds{Items: l.MaxQueue, Bytes: l.MaxQueueBytes,
		Weights: [limit.Classes]float64{w.High, w.Normal, w.Low}}}
}

// set changes the limits; new places are given out at once.
func (g *gate) set(l Limits) {
	g.limits.Store(&l)
	g.Set(l.gate())
}

// get returns the limits in force, which are read only.
func (g *gate) get() *Limits { return g.limits.Load() }

// admission is what a request holds if it waited or its tenant is known. Without keys most
// requests have none.
type admission struct {
	item   *limit.Item // nil if it did not wait
	since  time.Time   // when it got its place, if it waited
	tokens float64     // estimate
	taken  bool        // from the tenant's account
	prompt int         // prompt tokens of the estimate

	size    int // of the body, in bytes
	prompts int
	seqs    int // choices, over all prompts
	asked   int // most tokens to generate, over all choices; 0: the engine decides
}

// admit takes the request through its tenant's limits and takes a place for it, waiting if
// need be. finish gives both back.
func (q *request) admit(ctx *fasthttp.RequestCtx, top *openai.Top) *openai.Error {
	class, err := q.present(ctx, top)
	if err != nil {
		return err
	}
	return q.takePlace(class, top)
}

// present takes the request through its tenant's limits. takePlace, or settle, is to follow.
func (q *request) present(ctx *fasthttp.RequestCtx, top *openai.Top) (limit.Class, *openai.Error) {
	s := q.s
	if err := s.hosts.check("messages", top.URLs...); err != nil {
		return 0, err
	}
	if s.PassAuthorization {
		q.auth = string(ctx.Request.Header.Peek("Authorization"))
	}
	class, err := q.priority(ctx, top)
	if err != nil {
		return 0, err
	}
	if t := q.tenant; t != nil {
		if open := top == &q.top && top.Model == ""; !open && !t.key.May(top.Model) {
			return 0, openai.ModelNotFound(top.Model)
		}
		q.adm = &admission{size: ctx.Request.Header.ContentLength()}
		if q.forwarded && q.adm.size == -1 { // chunked, and not read yet
			q.adm.size = s.MaxBodyBytes
		}
		q.estimate(top)
		if err := q.charge(ctx); err != nil {
			return 0, err
		}
	}
	return class, nil
}

// takePlace takes a place for the request, waiting if need be.
func (q *request) takePlace(class limit.Class, top *openai.Top) *openai.Error {
	s := q.s
	s.budget.earn()
	if !s.gate.TryEnter() {
		if err := q.queue(class, top); err != nil {
			q.settle(false)
			return err
		}
	}
	q.placed = true
	q.mu.Lock()
	q.admitted = time.Now()
	q.mu.Unlock()
	return nil
}

// estimate sets what the request will cost, as far as can be told now.
func (q *request) estimate(top *openai.Top) {
	a := q.adm
	if a.tokens > 0 {
		return
	}
	a.prompt, a.tokens = 0, 1 // tokenizing and the like
	if top == &q.top {
		a.prompt = top.PromptTokens()
		a.tokens = float64(a.prompt + q.output())
		a.size = max(a.size, len(q.body), len(top.Prompt))
		a.prompts, a.seqs = max(top.Prompts, 1), max(top.Prompts, 1)*top.N
		a.asked = top.MaxTokens * a.seqs
	}
}

// charge takes the estimate from the tenant's account, if it has one, and tells the client
// what is left there.
func (q *request) charge(ctx *fasthttp.RequestCtx) *openai.Error {
	a, t := q.adm, q.tenant
	if t.account == nil {
		return nil
	}
	now := time.Now()
	over := t.account.Take(now, a.tokens)
	t.headers(&ctx.Response.Header, now)
	if over == nil {
		a.taken = true
		return nil
	}
	t.stats.limited(over.What)
	return t.over(over, a.tokens)
}

func (q *request) queue(class limit.Class, top *openai.Top) *openai.Error {
	if q.adm == nil {
		q.adm = &admission{}
	}
	a, t := q.adm, q.tenant
	q.estimate(top)
	a.item = &limit.Item{Class: class, Cost: a.tokens, Bytes: int64(max(len(q.body), len(top.Prompt)))}
	if t != nil {
		a.item.Tenant, a.item.Weight = t.name, t.key.Weight
	}
	err := q.s.gate.Wait(&q.ctx, a.item, q.end)
	if err == nil {
		a.since = time.Now()
		return nil
	}
	no, ok := errors.AsType[*limit.Refusal](err)
	if !ok {
		return contextError(&q.ctx)
	}
	if t != nil {
		t.stats.limited("queue")
	}
	return shedError(no)
}

func (q *request) leave() {
	since := q.start
	if q.adm != nil && !q.adm.since.IsZero() {
		since = q.adm.since
	}
	q.s.gate.Leave(since, q.status == 200)
	q.settle(true)
}

// settle corrects the estimate to what the request really used: nothing, if it failed
// before an answer, unless it forfeits the estimate.
func (q *request) settle(ran bool) {
	a := q.adm
	if a == nil {
		return
	}
	used, generated := 0, 0
	if ran {
		used, generated = q.used()
	}
	more := float64(used) - a.tokens
	if ran && used == 0 && q.forfeits() {
		more = 0
	}
	if a.item != nil && ran {
		q.s.gate.Settle(a.item, more)
	}
	if q.tenant == nil {
		return
	}
	if a.taken {
		q.tenant.account.Release(time.Now(), more, time.Since(q.start))
	}
	if ran {
		q.tenant.stats.count(q.status, used-generated, generated)
	}
}

// forfeits reports whether a request without an answer pays its estimate: it was sent, and ended
// by its client's doing, who would otherwise have workers compute for nothing.
func (q *request) forfeits() bool {
	if q.status != statusClientGone && !(q.status == 504 && q.hurried) && !q.tooLarge {
		return false
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	return slices.ContainsFunc(q.attempts, func(a *attempt) bool { return a.p.sent.Load() || a.d.sent.Load() })
}

// used is how many tokens the request used, including the prompt, and how many of them it
// generated.
func (q *request) used() (all, generated int) {
	a, u := q.adm, &q.usage
	switch {
	case u.told:
		prompt, most := q.most()
		generated = u.generated
		if q.failed != "" { // perhaps before the last report
			generated = max(generated, u.events)
		}
		generated = min(generated, most)
		return min(u.prompt, prompt) + generated, generated
	case q.status == 200 || q.status == statusClientGone && u.events > 0:
		// The answer did not report. An event has about one token.
		return a.prompt + u.events, u.events
	}
	return 0, 0
}

// unseen is tokens that no byte of a request or an answer stands for: those of a chat
// template, of fetched images, of a conversation that the engine has stored, of hidden
// reasoning.
const unseen = 256 << 10

// most is how many tokens the request can have used: an engine's wrong number would
// otherwise lock its key out for years.
func (q *request) most() (prompt, generated int) {
	a := q.adm
	prompt, generated = a.size+unseen, int(q.bytes)+unseen
	if n := len(q.attempts); n > 0 && !q.forwarded {
		if context := q.attempts[n-1].d.inst.MaxModelLen; context > 0 {
			prompt, generated = context*a.prompts, context*a.seqs
		}
	}
	if a.asked > 0 {
		generated = min(generated, a.asked)
	}
	return prompt, generated
}

// skims has skimmed look for the usage in a forwarded answer, if somebody is charged for
// it, or it is logged.
func (q *request) skims() {
	if q.s.RequestLog != nil || q.tenant != nil || q.adm != nil && q.adm.item != nil {
		q.usage.answer = &skim{scan: jsonscan.Scanner{Lenient: true}}
	}
}

// shedError is the answer to a request that got no place.
func shedError(no *limit.Refusal) *openai.Error {
	l := &no.Limits
	var e *openai.Error
	switch no.Why {
	case limit.Full:
		e = openai.TooMany("%d requests are running and the queue of %d is full; try again later", l.InFlight, l.Items)
	case limit.Displaced:
		e = openai.TooMany("the queue of %d is full, and others have fewer requests in it; try again later", l.Items)
	case limit.Hopeless:
		e = openai.Unavailable("the queue is too long: about %v, more than there is time for; try again later", no.After.Round(time.Second))
	case limit.Deadline:
		return openai.Deadline("no place became free in time for the request's deadline")
	default:
		e = openai.Unavailable("no place became free within %v; try again later", l.Wait)
	}
	e.RetryAfter = seconds(no.After)
	return e
}

// seconds rounds up, to 1 at least.
func seconds(d time.Duration) int { return max(int(math.Ceil(d.Seconds())), 1) }

// headerPriority asks for a priority; the answer carries the one that counted.
const headerPriority = "x-xpyd-priority"

// priority is the class that a request asks for, capped by its key. The first that is set
// counts: the header, the body's priority as vLLM reads it (lower goes first),
// service_tier.
func (q *request) priority(ctx *fasthttp.RequestCtx, top *openai.Top) (limit.Class, *openai.Error) {
	class, asked := limit.Normal, true
	switch name := ctx.Request.Header.Peek(headerPriority); {
	case len(name) > 0:
		var ok bool
		if class, ok = limit.ParseClass(strings.ToLower(string(name))); !ok {
			return 0, openai.BadRequest(headerPriority, "the header %s must be high, normal, low or an integer, not %q", headerPriority, openai.Clip(string(name)))
		}
	case top.HasPriority:
		class = limit.ClassOf(top.Priority)
	case top.Tier == "priority":
		class = limit.High
	case top.Tier == "flex":
		class = limit.Low
	default:
		asked = false
	}
	if q.tenant != nil {
		best := q.tenant.key.Class()
		class = max(class, best)
		if !q.forwarded && top.HasPriority && limit.ClassOf(top.Priority) < best { // of forwarded ones skim has done it
			if err := q.demote(top, best); err != nil {
				return 0, err
			}
		}
	}
	if asked {
		ctx.Response.Header.Set(headerPriority, class.String())
	}
	return class, nil
}

// demote writes the best priority that the key may ask for into the body, as engines have
// queues of their own.
func (q *request) demote(top *openai.Top, best limit.Class) *openai.Error {
	if top.Twice == openai.PriorityField.String() {
		return openai.BadRequest("priority", "priority is there twice")
	}
	e := openai.NewEdit(q.body, top)
	e.Replace(openai.PriorityField, [limit.Classes]string{"-1", "0", "1"}[best])
	body := slices.Concat(e.Parts()...)
	model := top.Model
	next, err := openai.Scan(body)
	if err != nil {
		return err
	}
	q.body, *top = body, next
	top.Model = model // the body may name none
	return nil
}

// usage is what a request has used, as its answer reports.
type usage struct {
	events    int   // relayed, except the one that ends a stream
	answer    *skim // of a whole forwarded answer, else nil
	framed    int   // tokens that they stand for, if decode has said so; else 0
	told      bool  // the answer reported prompt and generated
	prompt    int   // tokens
	generated int
	guess     int // the prompt's tokens, estimated from the request
}

// maxTold bounds what an engine may report.
const maxTold = 1 << 26

// tally notes the usage that a whole answer reports, or a run of n events of a stream.
func (u *usage) tally(body []byte, n int) {
	if u.events += n; n > 0 && !openai.HasUsage(body) {
		return
	}
	if p, c, ok := openai.ReadTokens(body); ok {
		u.tell(p, c)
	}
}

// tell notes a reported usage. A stream may report several times, each from its beginning,
// and only a part.
func (u *usage) tell(prompt, completion int) {
	u.told, u.prompt, u.generated = true, max(u.prompt, min(prompt, maxTold)), max(u.generated, min(completion, maxTold))
}

// skimmed looks for the usage in the next piece of a whole forwarded answer.
func (u *usage) skimmed(piece []byte) {
	if u.answer == nil {
		return
	}
	u.answer.read(piece)
	u.answer.urls = nil
	num, told := u.answer.num, false
	most := func(names ...string) (n int) {
		for _, name := range names {
			v, ok := num[name]
			n, told = max(n, int(min(v, math.MaxInt32))), told || ok
		}
		return n
	}
	prompt, completion := most("prompt_tokens", "input_tokens"), most("completion_tokens", "output_tokens")
	if told {
		u.tell(prompt, completion)
	}
}

// tokens is what the request read and generated: as the answer reported, or else one token
// per event, and the prompt as a worker counted it or as guessed.
func (q *request) tokens() (prompt, generated int) {
	u := &q.usage
	if u.told || q.forwarded {
		return u.prompt, u.generated
	}
	if u.events == 0 {
		return 0, 0
	}
	a := q.attempts[len(q.attempts)-1]
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.counted {
		return a.usage.Prompt, u.events
	}
	return u.guess, u.events
}
