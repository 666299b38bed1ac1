package router

import (
	"errors"
	"fmt"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/internal/scarce"
	"github.com/xpyd/xpyd/router/dialect"
)

// proxy serves /tokenize and /detokenize: any live worker of the model can
// answer, but those that drain get this no more than other work; a second is
// tried if the first's connection breaks.
func (r *Router) proxy(ctx *fasthttp.RequestCtx, id string) {
	q := r.newRequest(id, string(ctx.Method()), string(ctx.Path()))
	q.watch(ctx.Conn())
	q.body = ctx.PostBody()
	q.deadline(min(r.gate.get().RequestTimeout, r.cfg.FirstByteTimeout))
	ans, err := q.ask(ctx)
	if err != nil {
		writeError(ctx, err)
		q.finish(err.Status, err.Message)
		return
	}
	ctx.SetStatusCode(ans.status)
	ctx.SetContentType(ans.contentType)
	ctx.Response.SetBodyRaw(ans.body)
	q.bytes = int64(len(ans.body))
	q.finish(ans.status, "")
}

// ask sends the request to one worker, then to another.
func (q *request) ask(ctx *fasthttp.RequestCtx) (*answer, *openai.Error) {
	r := q.r
	top, err := openai.Scan(q.body, openai.Limits{})
	if err != nil {
		return nil, err
	}
	if top.Link != "" {
		return nil, linked(top.Link)
	}
	q.shown(clip(top.Model), false)
	if err := q.admit(ctx, &top); err != nil {
		return nil, err
	}
	s := r.fleet.Snapshot()
	known, last := len(s.Members) == 0, errors.New("no worker is live")
	tries := 0
	for _, role := range []fleet.Role{fleet.Decode, fleet.Prefill} {
		for i := range s.Members {
			m := &s.Members[i]
			if m.Role != role || top.Model != "" && m.Model != top.Model {
				continue
			}
			known = true
			switch {
			case !m.Serves() || tries == 2:
				continue
			case m.Draining || r.drained(m):
				if tries == 0 {
					last = errors.New("every worker that is live drains")
				}
				continue
			}
			tries++
			ans, err := q.askOne(m, s.Version)
			if err == nil {
				return ans, nil
			}
			if q.ctx.Err() != nil {
				return nil, contextError(&q.ctx)
			}
			last = err
		}
	}
	if !known {
		return nil, openai.ModelNotFound(top.Model)
	}
	if tries == 0 || scarce.Ours(last) {
		return nil, openai.Unavailable("%v", last)
	}
	return nil, openai.Upstream("%v", last)
}

func (q *request) askOne(m *fleet.Member, version uint64) (*answer, error) {
	l := newLeg(m.Role, &m.Instance, version)
	defer l.end(errOver)
	defer l.within(&q.ctx)()
	q.r.legs.add(l)
	defer q.r.legs.remove(l)
	var h fasthttp.RequestHeader
	h.SetMethod(fasthttp.MethodPost)
	h.SetRequestURI(q.path)
	h.SetContentType("application/json")
	h.Set(dialect.HeaderRequestID, q.id)
	if q.auth != "" {
		h.Set("Authorization", q.auth)
	}
	b, err := q.r.send(l, &h, [][]byte{q.body})
	if err != nil {
		if l.cause() == nil {
			q.r.suspect(&m.Instance, err)
		}
		return nil, fmt.Errorf("worker %s: %w", m.ID, err)
	}
	body, err := b.all(q.r.cfg.MaxResponseBytes)
	if err != nil {
		b.abort()
		return nil, fmt.Errorf("worker %s: %w", m.ID, err)
	}
	ans := &answer{status: b.header.StatusCode(), contentType: string(b.header.ContentType()), body: body}
	b.finish()
	return ans, nil
}
