package flight

import (
	"errors"
	"fmt"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/internal/scarce"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/router/h1"
)

// Tokenize serves /tokenize and /detokenize. Any live worker of the model that is not
// draining can answer; if the first one's connection breaks, a second is tried.
func (s *Service) Tokenize(ctx *fasthttp.RequestCtx, id string) {
	q := s.clientRequest(ctx, id)
	q.body = ctx.PostBody()
	q.deadline(min(s.gate.get().RequestTimeout, s.AskTimeout))
	ans, err := q.ask(ctx)
	if err != nil {
		q.refuse(ctx, err)
		return
	}
	ans.Write(ctx)
	q.bytes = int64(len(ans.Body))
	q.finish(ans.Status, "")
}

// TokenizerInfo serves GET /tokenizer_info, of the model that the query names. Any live worker of it can
// answer.
func (s *Service) TokenizerInfo(ctx *fasthttp.RequestCtx, id string) {
	s.Tokenize(ctx, id)
}

// topOf reads what is asked of a worker; a GET says the model in its query.
func (q *request) topOf(ctx *fasthttp.RequestCtx) (openai.Top, *openai.Error) {
	if q.method == "POST" {
		return openai.Scan(q.body)
	}
	q.method = "GET" // workers need not know HEAD
	return openai.Top{Model: string(ctx.QueryArgs().Peek("model")), N: 1}, nil
}

// ask sends the request to one worker, and if that fails to another.
func (q *request) ask(ctx *fasthttp.RequestCtx) (*Reply, *openai.Error) {
	top, err := q.topOf(ctx)
	if err != nil {
		return nil, err
	}
	if top.Link != "" {
		return nil, linked(top.Link)
	}
	q.setModel(openai.Clip(top.Model), false)
	if err := q.admit(ctx, &top); err != nil {
		return nil, err
	}
	now := q.s.fleet.Snapshot()
	known, last := len(now.Members) == 0, errors.New("no worker is live")
	tries := 0
	for _, role := range []fleet.Role{fleet.Decode, fleet.Prefill} {
		for i := range now.Members {
			m := &now.Members[i]
			if m.Role != role || top.Model != "" && m.Model != top.Model {
				continue
			}
			known = true
			switch {
			case !m.Serves() || tries == 2:
				continue
			case m.Draining || q.s.Members.Drained(m):
				if tries == 0 {
					last = errors.New("every live worker is draining")
				}
				continue
			}
			tries++
			ans, err := q.askOne(m, now.Version, q.s.MaxResponseBytes)
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

// Question is the router's own request to one worker.
type Question struct {
	ID           string // "": a new one
	Method, Path string
	Body         []byte
	Timeout      time.Duration
	Limit        int // most bytes of the answer
}

// Reply is a worker's answer to a Question.
type Reply struct {
	Status      int
	ContentType string
	Body        []byte
}

// Write answers the client with r.
func (r *Reply) Write(ctx *fasthttp.RequestCtx) {
	ctx.SetStatusCode(r.Status)
	ctx.SetContentType(r.ContentType)
	ctx.Response.SetBodyRaw(r.Body)
}

// Ask sends a question to a worker.
func (s *Service) Ask(m *fleet.Member, x Question) (*Reply, error) {
	q := s.newRequest(h1.RequestID([]byte(x.ID)), x.Method, x.Path, true)
	q.body = x.Body
	q.deadline(x.Timeout)
	defer q.finish(200, "")
	return q.askOne(m, s.fleet.Snapshot().Version, x.Limit)
}

func (q *request) askOne(m *fleet.Member, version uint64, limit int) (*Reply, error) {
	l := newLeg(m.Role, &m.Instance, version)
	defer l.End(errOver)
	defer l.Within(&q.ctx)()
	q.s.legs.add(l)
	defer q.s.legs.remove(l)
	var h fasthttp.RequestHeader
	h.SetMethod(q.method)
	h.SetRequestURI(q.asks)
	h.SetContentType("application/json")
	h.Set(ticket.HeaderRequestID, q.id)
	if q.auth != "" {
		h.Set("Authorization", q.auth)
	}
	b, err := q.s.send(l, &h, [][]byte{q.body}, nil)
	if err != nil {
		if cause := l.Cause(); cause != nil { // its connection was closed from here
			err = cause
		} else {
			q.s.Members.Suspect(&m.Instance, err)
		}
		return nil, fmt.Errorf("worker %s: %w", m.ID, err)
	}
	body, err := b.All(limit)
	if err != nil {
		return nil, fmt.Errorf("worker %s: %w", m.ID, err)
	}
	r := &Reply{b.Header.StatusCode(), string(b.Header.ContentType()), body}
	b.Finish()
	return r, nil
}
