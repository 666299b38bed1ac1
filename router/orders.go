package router

import (
	"bytes"
	"encoding/json"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/router/pick"
)

const (
	orderTimeout = 10 * time.Second
	comingWait   = 30 * time.Second       // for a worker that is starting
	comingLook   = 100 * time.Millisecond // whether it still is
	shownWait    = 2 * time.Second        // for the fleet to show what a worker has done
)

// mark is a drain asked for here. It holds from that moment on, before the
// worker announces it.
type mark struct {
	epoch uint64
}

// Drained says whether a drain of that worker, asked for here, is in force.
func (r *Router) Drained(id string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	_, ok := r.marked[id]
	return ok
}

// Serves says whether users' requests may go to m: it is live, has passed its
// probe and is not drained.
func (r *Router) Serves(m *fleet.Member) bool {
	return m.Usable() && r.probes.passed(m) && !r.drained(m)
}

func (r *Router) drained(m *fleet.Member) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	k, ok := r.marked[m.ID]
	return ok && k.epoch == m.Epoch
}

// setMark remembers a drain, or forgets it.
func (r *Router) setMark(id string, epoch uint64, on bool) {
	r.mu.Lock()
	if on {
		r.marked[id] = mark{epoch}
	} else {
		delete(r.marked, id)
	}
	r.marks++
	r.mu.Unlock()
	r.picker.Refresh(r.view())
}

// forgetMarks drops the drains of workers that have left, and of epochs that are
// over. One that its worker began its next epoch with goes on.
func (r *Router) forgetMarks(s *fleet.Snapshot) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for id, k := range r.marked {
		switch m := s.Get(id); {
		case m != nil && m.Epoch == k.epoch && m.State != fleet.Gone:
		case m != nil && m.Epoch > k.epoch && m.Draining:
			r.marked[id] = mark{m.Epoch}
		default:
			delete(r.marked, id)
			r.marks++
		}
	}
}

// last refuses to take m from where it is, if no pair of its model is left
// without it.
func (r *Router) last(m *fleet.Member) *openai.Error {
	without := func(id string) bool {
		v := r.view()
		eligible := v.Eligible
		v.Eligible = func(o *fleet.Member) bool { return o.ID != id && eligible(o) }
		own := pick.New(pick.Config{Policy: pick.RoundRobin, TopologyLevel: r.cfg.Pick.TopologyLevel}, nil)
		return own.Ready(v, func(model string) bool { return model == m.Model })
	}
	if without(m.ID) || !without("") {
		return nil
	}
	e := openai.BadRequest("force", "%s is the last %s worker that serves %s; requests would get 503 until another one does. "+
		"--force, or \"force\": true in the API, does it all the same", m.ID, m.Role, m.Model)
	e.Status, e.Code = 409, "last_worker"
	return e
}

// removeInstance serves DELETE; ?force=true will do for a body.
func (r *Router) removeInstance(ctx *fasthttp.RequestCtx, name string) {
	ed, ok := r.fleet.(Editor)
	if !ok {
		writeError(ctx, openai.BadRequest("", "this fleet cannot be removed from"))
		return
	}
	o, err := readOrder(ctx, "")
	if err != nil {
		writeError(ctx, err)
		return
	}
	r.orders.Lock()
	defer r.orders.Unlock()
	if m := r.fleet.Snapshot().Get(name); m != nil {
		NoteChange(ctx, describe(m), string(fleet.Gone))
		if !o.Force && !ctx.QueryArgs().GetBool("force") {
			if err := r.last(m); err != nil {
				writeError(ctx, err)
				return
			}
		}
	}
	if !ed.Remove(name, "removed by the admin API") {
		writeError(ctx, openai.NotFound("there is no instance %q", clip(name)))
		return
	}
	ctx.SetStatusCode(204)
}

// orderBody is the body of a drain, an undrain, a role or a removal; of all but
// a role it may be left out.
type orderBody struct {
	Role  fleet.Role `json:"role,omitempty"`
	Force bool       `json:"force,omitempty"`
}

func readOrder(ctx *fasthttp.RequestCtx, action string) (o orderBody, err *openai.Error) {
	if body := bytes.TrimSpace(ctx.PostBody()); len(body) > 0 || action == "role" {
		if jerr := json.Unmarshal(body, &o); jerr != nil {
			return o, openai.BadRequest("", "read the body: %v", jerr)
		}
	}
	if action == "role" && o.Role != fleet.Prefill && o.Role != fleet.Decode {
		return o, openai.BadRequest("role", "want prefill or decode, not %q", clip(string(o.Role)))
	}
	return o, nil
}

// order hands a drain, undrain or role to the worker.
func (r *Router) order(ctx *fasthttp.RequestCtx, id, name, action string) {
	o, err := readOrder(ctx, action)
	if err != nil {
		writeError(ctx, err)
		return
	}
	m := r.await(name)
	if m == nil {
		writeError(ctx, openai.NotFound("there is no instance %q", clip(name)))
		return
	}
	if action == "role" && m.Dialect != "native" {
		writeError(ctx, openai.BadRequest("", "%s is an engine of dialect %s: only native workers change their role", m.ID, m.Dialect))
		return
	}
	drained := map[bool]string{false: "not drained", true: "drained"}
	if action == "role" {
		NoteChange(ctx, string(m.Role), string(o.Role))
	} else {
		NoteChange(ctx, drained[m.Draining || r.drained(m)], drained[action == "drain"])
	}
	release, err := r.take(m, action, o)
	if err != nil {
		writeError(ctx, err)
		return
	}
	defer release()
	if m.Dialect != "native" { // engines have no such path; the drain is the router's
		reply(ctx, 200, m.Instance)
		return
	}
	q := r.newRequest(id, "POST", "/xpyd/v1/"+action)
	q.internal()
	if action == "role" {
		q.body = []byte(`{"role":"` + o.Role + `"}`)
	}
	q.deadline(orderTimeout)
	ans, aerr := q.askOne(m, r.fleet.Snapshot().Version)
	if aerr != nil {
		e := openai.Upstream("%s: %v", action, aerr)
		writeError(ctx, e)
		q.finish(e.Status, e.Message)
		return
	}
	q.finish(ans.status, "")
	if ans.status == 200 && action == "role" && m.Source == fleet.NATS {
		r.awaitMember(m.ID, shownWait, func(now *fleet.Member) bool { return now == nil || now.Epoch != m.Epoch || now.Role == o.Role })
	}
	ctx.SetStatusCode(ans.status)
	ctx.SetContentType(ans.contentType)
	ctx.Response.SetBodyRaw(ans.body)
}

// take marks m as an order will leave it, or refuses the order. Until release a
// worker whose role changes is marked as drained: it gets no requests meanwhile,
// and another order does not count on it.
func (r *Router) take(m *fleet.Member, action string, o orderBody) (release func(), err *openai.Error) {
	r.orders.Lock()
	defer r.orders.Unlock()
	turns := action == "role" && m.Role != o.Role
	if (turns || action == "drain") && !o.Force {
		if err := r.last(m); err != nil {
			return nil, err
		}
	}
	was := r.drained(m)
	if turns || action != "role" {
		r.setMark(m.ID, m.Epoch, action != "undrain")
	}
	if turns && !was {
		return func() { r.setMark(m.ID, m.Epoch, false) }, nil
	}
	return func() {}, nil
}

// await returns the member of that id, nil if there is none. For one that is
// about to start it waits.
func (r *Router) await(id string) *fleet.Member {
	there := func(m *fleet.Member) bool { return m != nil && m.State != fleet.Gone && m.State != fleet.Dead }
	m := r.awaitMember(id, comingWait, func(m *fleet.Member) bool {
		return there(m) || r.deps.Coming == nil || !r.deps.Coming(id)
	})
	if m == nil || m.State == fleet.Gone {
		return nil
	}
	return m
}

// awaitMember returns the member of that id, nil if there is none, once until is
// true of it, and after limit at the latest.
func (r *Router) awaitMember(id string, limit time.Duration, until func(*fleet.Member) bool) *fleet.Member {
	end := time.NewTimer(limit)
	defer end.Stop()
	look := time.NewTicker(comingLook)
	defer look.Stop()
	for {
		changed := r.fleet.Changed()
		m := r.fleet.Snapshot().Get(id)
		if until(m) {
			return m
		}
		select {
		case <-changed:
		case <-look.C:
		case <-end.C:
			return m
		case <-r.ctx.Done():
			return m
		}
	}
}
