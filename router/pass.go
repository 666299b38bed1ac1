package router

import (
	"errors"
	"fmt"
	"io"
	"math"
	"slices"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/router/dialect"
	"github.com/xpyd/xpyd/router/limit"
)

// passedPaths are what one engine answers by itself: the rest of the OpenAI
// API that engines have, and what vLLM and SGLang add to it. What names a thing
// that only one engine knows, such as GET /v1/responses/ID or a file, is not
// among them.
var passedPaths = []string{
	"/v1/embeddings", "/v1/responses", "/v1/moderations",
	"/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/speech",
	"/v1/images/generations", "/v1/images/edits", "/v1/images/variations",
	"/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score",
	"/v1/classify", "/classify", "/pooling", "/v1/messages",
}

// passHead is how much of a body is read before an engine is chosen: a body
// that ends within can be sent again, and the model has to be named within.
const passHead = 256 << 10

// upload is a request's body on its way to an engine.
type upload struct {
	kind   string // content type
	head   []byte
	length int       // of all; -1 is not known
	rest   io.Reader // what comes behind head, nil if nothing does
	form   *form     // nil for other bodies
	skim   skim      // of other bodies: whatever they are called, engines may read JSON
	broken error     // why rest could not be read
	hosts  hosts     // from where engines may fetch
}

// Read reads rest, noting whose fault an error is, and looks at what passes.
func (u *upload) Read(p []byte) (int, error) {
	n, err := u.rest.Read(p)
	if no := u.look(p[:n]); no != nil {
		err = no
	}
	if err != nil && err != io.EOF {
		u.broken = err
	}
	return n, err
}

// look refuses what a client may not send, as far as p, the next bytes, shows it.
func (u *upload) look(p []byte) *openai.Error {
	if f := u.form; f != nil {
		f.read(p)
		return f.refusal(u.hosts)
	}
	s := &u.skim
	s.read(p)
	urls := s.urls
	s.urls = urls[:0]
	u.demote(p)
	switch err := s.scan.Err(); {
	case s.link != "":
		return linked(s.link)
	case s.twice:
		return twice()
	case s.worded && s.best != limit.High:
		return openai.BadRequest("priority", "priority must be an integer, not a string")
	case err != nil:
		return openai.BadRequest("", "the body is not valid JSON: %v", err)
	}
	return u.hosts.check("messages", urls...)
}

// demote writes the best priority that may be asked for over better ones in p, as
// long as they were: the body's length may have been told.
func (u *upload) demote(p []byte) {
	for _, at := range u.skim.better {
		for i := at.from; i < at.to; i++ {
			p[i] = ' '
			if i == at.digit {
				p[i] = "-01"[u.skim.best]
			}
		}
	}
}

func twice() *openai.Error {
	return openai.BadRequest("model", "model may be there once, within the first %d bytes", passHead)
}

// pass serves what one engine answers by itself.
func (r *Router) pass(ctx *fasthttp.RequestCtx, id string) {
	q := r.newRequest(id, string(ctx.Method()), string(ctx.Path()))
	q.passes = true
	q.watch(ctx.Conn())
	up, err := q.receive(ctx)
	var ans *answer
	if err == nil {
		ans, err = q.passOn(ctx, up)
	}
	if err != nil {
		q.refuse(ctx, err)
		return
	}
	q.reply(ctx, ans)
}

// receive reads the beginning of the body, and the model's name in it.
func (q *request) receive(ctx *fasthttp.RequestCtx) (*upload, *openai.Error) {
	if err := q.opened(ctx); err != nil {
		return nil, err
	}
	r, c, h := q.r, clientOf(ctx.Conn()), &ctx.Request.Header
	up := &upload{kind: string(h.ContentType()), length: h.ContentLength(), hosts: r.hosts}
	switch {
	case up.length > r.cfg.MaxBodyBytes:
		return nil, openai.TooLarge("the body is larger than %d bytes", r.cfg.MaxBodyBytes)
	case up.length == -2:
		up.length = 0
	}
	err := c.invite()
	for size := 4 << 10; err == nil && len(up.head) < passHead && !c.body.eof; size = passHead {
		up.head = slices.Grow(up.head, size-len(up.head))
		var n int
		n, err = c.body.Read(up.head[len(up.head):cap(up.head)])
		up.head = up.head[:len(up.head)+n]
	}
	if err != nil && err != io.EOF {
		return nil, q.unread(err)
	}
	if c.body.over() {
		up.length = len(up.head)
		c.in.rest()
	} else {
		up.rest = &capped{from: &c.body, left: r.cfg.MaxBodyBytes - len(up.head)}
	}
	if t := tenantOf(ctx); t != nil {
		up.skim.best = t.key.Class()
	}
	if up.form = newForm(up.kind); up.form == nil && mayBeForm(up.kind) {
		up.kind = "application/json" // as it is looked at here
	}
	if err := up.look(up.head); err != nil {
		return nil, err
	}
	model := &up.skim.model
	if up.form != nil {
		model = &up.form.model
	}
	// The length stands for the work that the engine is given.
	q.top = openai.Top{Model: *model, N: 1, Prompts: 1, Prompt: up.head}
	num := up.skim.num
	for _, name := range []string{"max_tokens", "max_completion_tokens", "max_output_tokens"} {
		q.top.MaxTokens = max(q.top.MaxTokens, int(min(num[name], math.MaxInt32)))
	}
	if n, ok := num["priority"]; ok {
		q.top.Priority, q.top.HasPriority = int64(max(min(n, 1), -1)), true
	}
	q.tenant = tenantOf(ctx)
	if err := q.named(); err != nil {
		return nil, err
	}
	if q.top.Model == "" && up.rest != nil { // nothing is served now, and a name may be in the rest
		return nil, openai.BadRequest("model", "model is required, within the first %d bytes", passHead)
	}
	*model = q.top.Model // which may be the only one that is served: what comes later is held against it
	return up, nil
}

func linked(field string) *openai.Error {
	return openai.BadRequest(field, "%s links prefill and decode inside the fleet; a client may not set it", field)
}

// unread is what a client is told whose body could not be read.
func (q *request) unread(err error) *openai.Error {
	var timeout interface{ Timeout() bool }
	var said *openai.Error
	switch {
	case errors.As(err, &said):
		return said
	case errors.Is(err, fasthttp.ErrBodyTooLarge):
		return openai.TooLarge("the body is larger than %d bytes", q.r.cfg.MaxBodyBytes)
	case errors.As(err, &timeout) && timeout.Timeout():
		e := openai.BadRequest("", "the request was not complete within %v", q.r.cfg.ReadTimeout)
		e.Status, e.Code = 408, "request_timeout"
		return e
	case q.ctx.Err() != nil:
		return contextError(&q.ctx)
	}
	return openai.BadRequest("", "malformed HTTP request")
}

// capped reads at most left bytes; more is an error.
type capped struct {
	from io.Reader
	left int
}

func (c *capped) Read(p []byte) (int, error) {
	n, err := c.from.Read(p)
	if c.left -= n; c.left < 0 {
		return 0, fasthttp.ErrBodyTooLarge
	}
	return n, err
}

// passOn sends the request to one engine, and to another if nothing was
// answered and the body can be sent again.
func (q *request) passOn(ctx *fasthttp.RequestCtx, up *upload) (*answer, *openai.Error) {
	if err := q.admit(ctx, &q.top); err != nil {
		return nil, err
	}
	var exclude, avoid []string
	for n := 1; ; n++ {
		choice, version, err := q.choose(exclude, avoid, "", n > 1)
		if err != nil {
			return nil, err
		}
		if slices.Contains(avoid, choice.Decode.ID) && !q.pause(backoff(n-1)) {
			choice.EndPrefill()
			choice.EndDecode()
			return nil, contextError(&q.ctx)
		}
		a := q.newAttempt(choice, version)
		ans, f := a.pass(ctx, up)
		if f == nil {
			return ans, nil
		}
		a.close()
		switch {
		case up.broken != nil:
			return nil, q.unread(up.broken)
		case q.ctx.Err() != nil:
			return nil, contextError(&q.ctx)
		}
		q.r.log.Warn("attempt failed", "request_id", q.id, "worker", a.d.inst.ID, "attempt", n, "err", f.Error())
		if !f.retry || up.rest != nil || n >= q.r.cfg.Attempts || !q.r.affords(f) {
			return nil, f.httpError()
		}
		q.r.metrics.retries.WithLabelValues(f.reason).Inc()
		exclude, avoid = append(exclude, f.exclude...), append(avoid, f.avoid...)
	}
}

// pass sends the body to decode, or the engine that is both, and reads the
// answer's header.
func (a *attempt) pass(ctx *fasthttp.RequestCtx, up *upload) (*answer, *failure) {
	close(a.pDone)
	defer close(a.dDone)
	a.alone, a.falls = true, ""
	a.p.set(legUnused)
	a.choice.EndPrefill()
	a.q.r.legs.add(a.d)
	now := a.q.r.fleet.Snapshot() // a death between the choice and add
	if err := lost(now.Get(a.d.inst.ID), a.d.inst); err != nil && a.d.version <= now.Version {
		a.d.end(err)
	}
	h := a.q.r.up.request()
	defer a.q.r.up.requests.Put(h)
	h.SetMethod(fasthttp.MethodPost)
	h.SetRequestURIBytes(ctx.RequestURI())
	h.SetContentType(up.kind)
	h.SetNoDefaultContentType(true)
	if accept := ctx.Request.Header.Peek("Accept"); len(accept) > 0 {
		h.SetBytesV("Accept", accept)
	}
	h.Set(dialect.HeaderRequestID, a.q.id+"-"+a.link.String())
	if a.q.auth != "" {
		h.Set("Authorization", a.q.auth)
	}
	a.d.begin()
	if a.q.trace[0] != "" {
		h.Set("traceparent", a.q.trace[0])
		h.Set("tracestate", a.q.trace[1])
	}
	if a.d.span != nil {
		h.Set("traceparent", a.d.span.Parent())
	}
	a.q.r.introduce(h, a.d.inst)
	addr, err := a.q.r.address(a.d.inst)
	var b *upBody
	if err == nil {
		b, err = a.q.r.up.upload(&a.d.life, addr, h, up, &a.d.sent)
	}
	if err == nil {
		err = a.q.r.admitted(a.d.inst, b)
	}
	if err != nil {
		a.d.fail()
		if up.broken != nil { // the client's doing, not the engine's
			return nil, &failure{role: fleet.Decode, id: a.d.inst.ID, err: up.broken}
		}
		return nil, a.broken(a.d, err)
	}
	status := b.header.StatusCode()
	a.faultOf(a.d, status)
	if (status == 429 || status == 503) && up.rest == nil {
		text, err := b.all(a.q.r.cfg.MaxResponseBytes)
		if err != nil {
			b.abort()
			return nil, a.broken(a.d, err)
		}
		b.finish()
		return nil, &failure{role: fleet.Decode, id: a.d.inst.ID, outcome: ticket.NoSpace, reason: reasonStatus, retry: true,
			avoid: []string{a.d.inst.ID}, err: fmt.Errorf("status %d: %s", status, errorMessage(text))}
	}
	a.commit()
	a.d.set(legAnswer)
	a.q.firstByte()
	ans := &answer{status: status, contentType: string(b.header.ContentType()), passed: true, length: -1}
	ans.stream = &events{body: b, raw: !isEventStream(ans.contentType)}
	if isJSON(ans.contentType) {
		a.q.skims()
	}
	if !b.chunked && !b.toEnd {
		ans.length = int(b.left)
	}
	for _, name := range []string{"Content-Encoding", "Content-Disposition", "Retry-After"} {
		if v := b.header.Peek(name); len(v) > 0 {
			ctx.Response.Header.SetBytesV(name, v)
		}
	}
	return ans, nil
}
