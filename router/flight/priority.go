package flight

import (
	"slices"
	"strings"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/router/h1"
	"github.com/xpyd/xpyd/router/limit"
)

// headerPriority asks for a priority; the answer has the one that counted.
const headerPriority = "x-xpyd-priority"

// priority is the class that a request asks for, or the best that its key may:
// by x-xpyd-priority (high, normal, low, or a number), else by the body's
// priority, which vLLM reads too: the lower goes first; else by service_tier.
func (q *request) priority(ctx *fasthttp.RequestCtx, t *tenant, top *openai.Top) (limit.Class, *openai.Error) {
	class, asked := limit.Normal, true
	switch name := ctx.Request.Header.Peek(headerPriority); {
	case len(name) > 0:
		var ok bool
		if class, ok = limit.ParseClass(strings.ToLower(string(name))); !ok {
			return 0, openai.BadRequest(headerPriority, "the header %s must be high, normal, low or an integer, not %q", headerPriority, h1.Clip(string(name)))
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
	if t != nil {
		best := t.key.Class()
		class = max(class, best)
		if !q.forwarded && top.HasPriority && limit.ClassOf(top.Priority) < best { // else skim has done it
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

// demote puts what the key may ask for into the body: engines have a queue of
// their own.
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
	top.Model = model // which may be the only one served
	return nil
}
