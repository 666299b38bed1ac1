package flight

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/router/h1"
	"github.com/xpyd/xpyd/router/limit"
	"github.com/xpyd/xpyd/router/pick"
)

// Where completions and chats are, one or a batch of them, and what is either.
const (
	textPath   = "/v1/completions"
	chatPath   = "/v1/chat/completions"
	batchPath  = "/v1/chat/completions/batch"
	eitherPath = "/invocations" // as SageMaker asks
)

// Generate serves completions and chats, also a batch of chats.
func (s *Service) Generate(ctx *fasthttp.RequestCtx, id string) {
	q := s.clientRequest(ctx, id)
	ans, err := q.generate(ctx)
	q.reply(ctx, ans, err)
}

func (q *request) refuse(ctx *fasthttp.RequestCtx, err *openai.Error) {
	status := WriteError(ctx, q.id, err)
	q.describe(ctx, "")
	q.finish(status, err.Message)
}

// reply answers, with an error if there is one. A whole answer ends the request; a stream
// ends it when it is over.
func (q *request) reply(ctx *fasthttp.RequestCtx, ans *answer, err *openai.Error) {
	if err == nil && q.guise != nil {
		ans, err = q.disguise(ans)
	}
	if err != nil {
		q.refuse(ctx, err)
		return
	}
	ctx.SetStatusCode(ans.status)
	ctx.SetContentType(ans.contentType)
	q.describe(ctx, ans.timing)
	if ans.events == nil {
		if s := h1.RetryAfter(ans.status); s > 0 {
			ctx.Response.Header.Set("Retry-After", strconv.Itoa(s))
		}
		q.bytes = int64(len(ans.body))
		ctx.Response.SetBodyRaw(ans.body)
		q.finish(ans.status, "")
		return
	}
	if !ans.events.raw {
		ctx.Response.Header.Set("Cache-Control", "no-cache")
		ctx.Response.Header.Set("X-Accel-Buffering", "no")
	}
	q.slim()
	h1.ConnOf(ctx.Conn()).Stream(ans.length, &stream{q: q, answer: ans, pace: q.pacer(ans)})
}

// generate takes the request through scan, admission and dispatch.
func (q *request) generate(ctx *fasthttp.RequestCtx) (*answer, *openai.Error) {
	class, err := q.prepare(ctx)
	if err != nil {
		return nil, err
	}
	if err := q.takePlace(class, &q.top); err != nil {
		return nil, err
	}
	return q.fly()
}

// prepare takes the request through scan and its tenant's limits.
func (q *request) prepare(ctx *fasthttp.RequestCtx) (limit.Class, *openai.Error) {
	if err := q.readBody(ctx); err != nil {
		return 0, err
	}
	q.stays = string(ctx.Request.Header.Peek(headerTakeover)) == "0"
	return q.present(ctx, &q.top)
}

// fly sends a request that has a place.
func (q *request) fly() (*answer, *openai.Error) {
	q.came()
	if q.top.Stream && q.s.Takeover && !q.stays {
		q.seam = newSeam(&q.s.kept, q.body, &q.top)
		if q.s.TakeoverReplay {
			held, err := openai.Replayable(q.body, &q.top)
			q.seam.replays, q.seam.held = err == nil, held
		}
	}
	ans, err := q.dispatch(q.hedged, nil)
	q.tooLarge = err != nil && err.Code == openai.CodeTooLarge
	if ans != nil && ans.events == nil {
		q.usage.tally(ans.body, 0)
	}
	q.learned(ans)
	if !q.dispatched.IsZero() {
		q.s.metrics.queued.Observe(q.dispatched.Sub(q.start).Seconds())
	}
	return ans, err
}

// readHeader reads what the header says and starts the clock.
func (q *request) readHeader(ctx *fasthttp.RequestCtx) *openai.Error {
	s, h := q.s, &ctx.Request.Header
	if enc := h.ContentEncoding(); len(enc) > 0 && string(enc) != "identity" {
		return openai.BadRequest("", "the content encoding %q is not supported", openai.Clip(string(enc))).WithStatus(415, "unsupported_encoding")
	}
	life, err := lifetime(h.Peek(headerTimeout), s.gate.get().RequestTimeout)
	if err != nil {
		return err
	}
	q.hurried = life < s.gate.get().RequestTimeout
	q.deadline(life)
	q.explain = string(h.Peek(headerExplain)) == "1"
	q.session = string(h.Peek(s.SessionHeader))
	q.traced(string(h.Peek("traceparent")), string(h.Peek("tracestate")))
	return nil
}

// readBody scans the body and checks what the router itself decides.
func (q *request) readBody(ctx *fasthttp.RequestCtx) *openai.Error {
	err := q.readHeader(ctx)
	if err != nil {
		return err
	}
	if q.body == nil { // else it was translated
		q.body = ctx.PostBody()
	}
	if q.top, err = openai.Scan(q.body); err != nil {
		return err
	}
	switch {
	case q.asks == batchPath:
		q.top.CountChats()
	case q.asks == eitherPath && q.top.Messages:
		q.asks = chatPath
	case q.asks == eitherPath:
		q.asks = textPath
	}
	switch {
	case q.top.Link != "":
		return linked(q.top.Link)
	case q.top.Messages != (promptField(q.asks) == "messages") && q.top.Prompt != nil:
		other := map[bool]string{true: "messages", false: "prompt"}[q.top.Messages]
		return openai.BadRequest(promptField(q.asks), "%s is required here, and no %s", promptField(q.asks), other)
	case q.top.Prompt == nil:
		return noPrompt(promptField(q.asks), q.body)
	}
	return q.resolveModel()
}

// noPrompt is of a body without a prompt. Who sends prompt_embeds is told what vLLM would tell, or that they do
// not do here.
func noPrompt(field string, body []byte) *openai.Error {
	embeds := bytes.TrimSpace(openai.Member(body, "prompt_embeds"))
	switch {
	case embeds == nil || field != "prompt":
		return openai.BadRequest(field, "%s is required", field)
	case len(embeds) <= len(`[]`):
		return openai.BadRequest(field, "Either prompt or prompt_embeds must be provided and non-empty. Here it must be prompt")
	}
	return openai.BadRequest("prompt_embeds", "prompt_embeds is not supported: prompt is required")
}

// resolveModel settles which model is meant: without a name, the only one that is served.
// While none is served it stays open, and choose asks again.
func (q *request) resolveModel() *openai.Error {
	if q.top.Model == "" {
		models := q.s.servedTo(q.tenant)
		switch {
		case len(models) > 1 && q.forwarded:
			return openai.BadRequest("model", "model is required, within the first %d bytes: %d are served", forwardHead, len(models))
		case len(models) > 1:
			return openai.BadRequest("model", "model is required: %d are served", len(models))
		case len(models) == 1:
			q.top.Model = models[0].ID
		default:
			if all, _ := q.s.Members.Served(); len(all) > 0 {
				return openai.BadRequest("model", "model is required: what is served now is not for this API key")
			}
		}
	}
	q.setModel(openai.Clip(q.top.Model), q.top.Stream)
	if !q.forwarded {
		separate := []string{q.top.Model, string(q.top.Salt), string(q.top.Tools)}
		if salt := q.cacheSalt(); salt != "" {
			separate = append(separate, salt)
		}
		q.chain = pick.NewChain(q.top.Prompt, separate...)
		if q.s.RequestLog != nil {
			q.logged = q.chain
		}
	}
	return nil
}

func promptField(path string) string {
	if path == chatPath || path == batchPath {
		return "messages"
	}
	return "prompt"
}

// lifetime is the configured timeout, or the shorter one of the client's header.
func lifetime(header []byte, most time.Duration) (time.Duration, *openai.Error) {
	if len(header) == 0 {
		return most, nil
	}
	ms, err := strconv.ParseInt(string(header), 10, 64)
	if err != nil || ms <= 0 {
		return 0, openai.BadRequest(headerTimeout, "the header %s must be a positive number of milliseconds", headerTimeout)
	}
	if ms > most.Milliseconds() {
		return most, nil
	}
	return time.Duration(ms) * time.Millisecond, nil
}

// appendMS writes milliseconds with three decimals.
func appendMS(b []byte, d time.Duration) []byte {
	us := max(d.Microseconds(), 0)
	b = append(strconv.AppendInt(b, us/1000, 10), '.')
	return append(b, byte('0'+us/100%10), byte('0'+us/10%10), byte('0'+us%10))
}

const maxExplain = 8 << 10

// describe sets the headers that say what happened: the pair, the timings and, if asked
// for, why it was chosen.
func (q *request) describe(ctx *fasthttp.RequestCtx, timing string) {
	h := &ctx.Response.Header
	if len(q.attempts) == 0 {
		return
	}
	a := q.attempts[len(q.attempts)-1]
	if !a.alone {
		h.Set(ticket.HeaderPrefill, a.p.inst.ID)
	}
	if a.falls != "" {
		h.Set(headerFallback, string(a.falls))
	}
	if format := ctx.Request.Header.Peek(headerLoadFormat); len(format) > 0 {
		if m := q.s.fleet.Snapshot().Get(a.d.inst.ID); m != nil {
			if report := loadReport(string(format), m); report != "" {
				h.Set(headerLoad, report)
			}
		}
	}
	if a.choice.Local != "" {
		h.Set(headerLocal, a.choice.Local)
	}
	if a.d.role == fleet.Prefill {
		h.Set(ticket.HeaderPrefill, a.d.inst.ID)
	} else {
		h.Set(headerDecode, a.d.inst.ID)
	}
	var space [128]byte
	line := appendMS(append(space[:0], "queue;dur="...), q.dispatched.Sub(q.start))
	if timing != "" && len(timing) < 1024 { // decode's own: prefill and kv
		line = append(append(line, ", "...), timing...)
	} else if p := a.p.record(); !p.begun.IsZero() && !p.ended.IsZero() { // a foreign engine's, as seen from here
		line = appendMS(append(line, ", prefill;dur="...), p.ended.Sub(p.begun))
	}
	if !q.first.IsZero() {
		line = appendMS(append(line, ", ttft;dur="...), q.first.Sub(q.start))
	}
	h.SetBytesV("Server-Timing", line)
	if !q.explain {
		return
	}
	type shown struct {
		*pick.Explain
		Attempts int      `json:"attempts"`
		Failed   []string `json:"failed,omitempty"`
	}
	s := shown{Explain: a.choice.Explain, Attempts: len(q.attempts)}
	for _, old := range q.attempts {
		old.mu.Lock()
		if old.failed != nil {
			s.Failed = append(s.Failed, openai.Clip(fmt.Sprintf("%s/%s: %v", old.p.inst.ID, old.d.inst.ID, old.failed)))
		}
		old.mu.Unlock()
	}
	if b, err := json.Marshal(s); err == nil && len(b) <= maxExplain {
		h.SetBytesV(headerExplain, b)
	}
}
