package flight

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
	"github.com/xpyd/xpyd/router/h1"
	"github.com/xpyd/xpyd/router/limit"
)

// ForwardedPaths are the paths that one engine answers by itself: the rest of the OpenAI
// API that engines have, and what vLLM and SGLang add. Paths that name what only one engine
// knows, such as a file, are not among them.
var ForwardedPaths = []string{
	embeddings, cohereEmbed, "/v1/moderations",
	"/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/speech",
	"/v1/images/generations", "/v1/images/edits", "/v1/images/variations",
	"/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score",
	"/v1/classify", "/classify", "/pooling",
}

// The ones of them that native workers have: OpenAI's and Cohere's.
const embeddings, cohereEmbed = "/v1/embeddings", "/v2/embed"

// forwardHead is how much of a body is read before an engine is chosen. A body that ends
// within it can be sent again; the model must be named within it.
const forwardHead = 256 << 10

// upload is a request's body on its way to an engine.
type upload struct {
	h1.Upload
	kind  string // content type
	form  *form  // nil for other bodies
	skim  skim   // of other bodies: engines may read them as JSON, whatever their type
	hosts hosts  // from where engines may fetch
}

// rest is what follows an upload's head, at most left bytes. More is an error, and so is
// what a client may not send.
type rest struct {
	up   *upload
	from io.Reader
	left int
}

func (r *rest) Read(p []byte) (int, error) {
	n, err := r.from.Read(p)
	if r.left -= n; r.left < 0 {
		return 0, fasthttp.ErrBodyTooLarge
	}
	if no := r.up.look(p[:n]); no != nil {
		err = no
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

// demote overwrites better priorities in p with the best that may be asked for, at the same
// length, as the body's may have been announced.
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
	return openai.BadRequest("model", "model may be there once, within the first %d bytes", forwardHead)
}

// Forward serves what one engine answers by itself.
func (s *Service) Forward(ctx *fasthttp.RequestCtx, id string) {
	q := s.clientRequest(ctx, id)
	q.forwarded = true
	up, err := q.receive(ctx)
	var ans *answer
	if err == nil {
		err = q.admit(ctx, &q.top)
	}
	if err == nil {
		ans, err = q.dispatch(func(a *attempt) (*answer, *failure) { return a.forward(ctx, up) }, nil)
	}
	q.reply(ctx, ans, err)
}

// receive reads the body's head, and the model's name in it.
func (q *request) receive(ctx *fasthttp.RequestCtx) (*upload, *openai.Error) {
	if err := q.readHeader(ctx); err != nil {
		return nil, err
	}
	s, c, h := q.s, h1.ConnOf(ctx.Conn()), &ctx.Request.Header
	up := &upload{kind: string(h.ContentType()), Upload: h1.Upload{Length: h.ContentLength()}, hosts: s.hosts}
	switch {
	case up.Length > s.MaxBodyBytes:
		return nil, openai.TooLarge("the body is larger than %d bytes", s.MaxBodyBytes)
	case up.Length == -2:
		up.Length = 0
	}
	err := c.Invite()
	for size := 4 << 10; err == nil && len(up.Head) < forwardHead && !c.BodyOver(); size = forwardHead {
		up.Head = slices.Grow(up.Head, size-len(up.Head))
		var n int
		n, err = c.Body().Read(up.Head[len(up.Head):cap(up.Head)])
		up.Head = up.Head[:len(up.Head)+n]
	}
	if err != nil && err != io.EOF {
		return nil, q.unread(err)
	}
	if c.BodyOver() {
		up.Length = len(up.Head)
	} else {
		up.Rest = &rest{up, c.Body(), s.MaxBodyBytes - len(up.Head)}
	}
	if q.tenant != nil {
		up.skim.best = q.tenant.key.Class()
	}
	if up.form = newForm(up.kind); up.form == nil && mayBeForm(up.kind) {
		up.kind = "application/json" // that is how it is checked
	}
	if err := up.look(up.Head); err != nil {
		return nil, err
	}
	model := &up.skim.model
	if up.form != nil {
		model = &up.form.model
	}
	// The length stands for the engine's work.
	q.top = openai.Top{Model: *model, N: 1, Prompts: 1, Prompt: up.Head}
	num := up.skim.num
	for _, name := range []string{"max_tokens", "max_completion_tokens", "max_output_tokens"} {
		q.top.MaxTokens = max(q.top.MaxTokens, int(min(num[name], math.MaxInt32)))
	}
	if n, ok := num["priority"]; ok {
		q.top.Priority, q.top.HasPriority = int64(max(min(n, 1), -1)), true
	}
	if err := q.resolveModel(); err != nil {
		return nil, err
	}
	if q.top.Model == "" && up.Rest != nil { // nothing is served now, and the rest may have a name
		return nil, openai.BadRequest("model", "model is required, within the first %d bytes", forwardHead)
	}
	*model = q.top.Model // it may be the only one served: later names must equal it
	return up, nil
}

// linked refuses a field that links legs.
func linked(field string) *openai.Error {
	return openai.BadRequest(field, "%s links prefill and decode inside the fleet; a client may not set it", field)
}

// unread is the answer to a client whose body could not be read.
func (q *request) unread(err error) *openai.Error {
	if said, ok := errors.AsType[*openai.Error](err); ok {
		return said
	}
	if q.ctx.Err() != nil && !errors.Is(err, fasthttp.ErrBodyTooLarge) && !h1.TimedOut(err) {
		return contextError(&q.ctx)
	}
	return q.s.Refusal(err)
}

// forward sends the body to decode or the engine that does both phases, or for embeddings by native workers
// to prefill, and reads the answer's header.
func (a *attempt) forward(ctx *fasthttp.RequestCtx, up *upload) (*answer, *failure) {
	close(a.pDone)
	defer close(a.dDone)
	a.alone, a.falls = true, ""
	a.p.setState(legUnused)
	if a.p.role == fleet.Decode {
		a.choice.EndDecode()
	} else {
		a.choice.EndPrefill()
	}
	a.register()
	h := a.q.s.Client.Header()
	defer a.q.s.Client.Recycle(h)
	h.SetMethod(fasthttp.MethodPost)
	h.SetRequestURIBytes(ctx.RequestURI())
	h.SetContentType(up.kind)
	h.SetNoDefaultContentType(true)
	if accept := ctx.Request.Header.Peek("Accept"); len(accept) > 0 {
		h.SetBytesV("Accept", accept)
	}
	h.Set(ticket.HeaderRequestID, a.q.id+"-"+a.link.String())
	dialect.SetClient(h, a.q.auth, a.q.trace)
	if salt := a.q.cacheSalt(); salt != "" && a.rules != nil && a.rules.Salts {
		h.Set(ticket.HeaderCacheSalt, salt)
	}
	b, err := a.q.s.send(a.d, h, nil, &up.Upload)
	if err != nil {
		a.d.fail()
		if up.Broken != nil { // the client's fault, not the engine's
			return nil, &failure{by: a.d, err: up.Broken, api: a.q.unread(up.Broken)}
		}
		f := a.broken(a.d, err)
		f.retry = f.retry && up.Rest == nil
		return nil, f
	}
	status := b.Header.StatusCode()
	a.countStatus(a.d, status)
	if (status == 429 || status == 503) && up.Rest == nil {
		text, err := b.All(a.q.s.MaxResponseBytes)
		if err != nil {
			return nil, a.broken(a.d, err)
		}
		b.Finish()
		return nil, &failure{by: a.d, outcome: ticket.NoSpace, reason: reasonStatus, retry: true,
			avoid: []string{a.d.inst.ID}, err: fmt.Errorf("status %d: %s", status, openai.ErrorMessage(text))}
	}
	a.commit()
	a.d.setState(legAnswer)
	a.q.firstByte()
	ans := &answer{status: status, contentType: string(b.Header.ContentType()), forwarded: true, length: b.Length()}
	ans.events = &events{body: b, raw: !isEventStream(ans.contentType)}
	if isJSON(ans.contentType) {
		a.q.skims()
	}
	for _, name := range []string{"Content-Encoding", "Content-Disposition", "Retry-After"} {
		if v := b.Header.Peek(name); len(v) > 0 {
			ctx.Response.Header.SetBytesV(name, v)
		}
	}
	return ans, nil
}
