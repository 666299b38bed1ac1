package console

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/router/flight"
	"github.com/xpyd/xpyd/router/pick"
)

const (
	orderTimeout = 10 * time.Second
	comingWait   = 30 * time.Second       // for a worker that is starting
	comingLook   = 100 * time.Millisecond // how often to look whether it still is
	shownWait    = 2 * time.Second        // for the fleet to show what a worker has done
	movesWait    = 5 * time.Second        // for its streams to have moved
)

// last refuses to take m away if that leaves no pair for its model.
func (c *Console) last(m *fleet.Member) *openai.Error {
	without := func(id string) bool {
		v := c.Members.View()
		eligible := v.Eligible
		v.Eligible = func(o *fleet.Member) bool { return o.ID != id && eligible(o) }
		own := pick.New(pick.Config{Policy: pick.RoundRobin, TopologyLevel: c.TopologyLevel}, nil)
		return own.Ready(v, func(model string) bool { return model == m.Model })
	}
	if without(m.ID) || !without("") {
		return nil
	}
	return openai.BadRequest("force", "%s is the last %s worker that serves %s; requests would get 503 until another one does. "+
		"--force, or \"force\": true in the API, does it all the same", m.ID, m.Role, m.Model).WithStatus(409, "last_worker")
}

// noInstance is the answer about an ID that the fleet does not know.
func noInstance(id string) *openai.Error {
	return openai.NotFound("there is no instance %q", openai.Clip(id))
}

// removeInstance takes a worker out. ?force=true does without a body.
func (c *Console) removeInstance(ctx *fasthttp.RequestCtx, a adminCall) *openai.Error {
	o, err := readOrder(ctx, "")
	if err != nil {
		return err
	}
	c.orders.Lock()
	defer c.orders.Unlock()
	if m := c.Fleet.Snapshot().Get(a.part); m != nil {
		NoteChange(ctx, describe(m), string(fleet.Gone))
		if !o.Force && !ctx.QueryArgs().GetBool("force") {
			if err := c.last(m); err != nil {
				return err
			}
		}
	}
	if !c.Fleet.Remove(a.part, "removed by the admin API") {
		return noInstance(a.part)
	}
	ctx.SetStatusCode(204)
	return nil
}

// orderBody is the body of an order or a removal. Only a change of role needs one.
type orderBody struct {
	Role     fleet.Role `json:"role,omitempty"`
	Force    bool       `json:"force,omitempty"`
	WaitOnly bool       `json:"wait_only,omitempty"` // its streams end there
}

func readOrder(ctx *fasthttp.RequestCtx, action string) (o orderBody, err *openai.Error) {
	if err := ReadBody(ctx, &o, action == "role"); err != nil {
		return o, err
	}
	if action == "role" && o.Role != fleet.Prefill && o.Role != fleet.Decode {
		return o, openai.BadRequest("role", "want prefill or decode, not %q", openai.Clip(string(o.Role)))
	}
	return o, nil
}

// order hands a drain, undrain or role to the worker.
func (c *Console) order(ctx *fasthttp.RequestCtx, a adminCall) *openai.Error {
	action := a.path[strings.LastIndexByte(a.path, '/')+1:]
	o, err := readOrder(ctx, action)
	if err != nil {
		return err
	}
	m := c.await(a.part)
	if m == nil {
		return noInstance(a.part)
	}
	native := m.Dialect == fleet.Native
	if action == "role" && !native {
		return openai.BadRequest("", "%s is an engine of dialect %s: only native workers change their role", m.ID, m.Dialect)
	}
	drained := map[bool]string{false: "not drained", true: "drained"}
	if action == "role" {
		NoteChange(ctx, string(m.Role), string(o.Role))
	} else {
		NoteChange(ctx, drained[m.Draining || c.Members.Drained(m)], drained[action == "drain"])
	}
	said, err := c.give(c.Ctx, m, a.id, action, o)
	if err != nil {
		return err
	}
	if said == nil { // an engine
		return reply(ctx, 200, m.Instance)
	}
	said.Write(ctx)
	return nil
}

// give gives an order to a worker, and waits until it is carried out. Engines have no such path, and say nil: only
// the router drains them.
func (c *Console) give(ctx context.Context, m *fleet.Member, id, action string, o orderBody) (*flight.Reply, *openai.Error) {
	release, err := c.mark(m, action, o)
	if err != nil {
		return nil, err
	}
	defer release()
	if m.Dialect != fleet.Native {
		return nil, nil
	}
	x := flight.Question{ID: id, Method: "POST", Path: "/xpyd/v1/" + action, Timeout: orderTimeout, Limit: maxReply}
	switch {
	case action == "role":
		c.awaitMember(ctx, m.ID, movesWait, emptied(m, c.Flights.ToMove))
		x.Body = []byte(`{"role":"` + o.Role + `"}`)
	case action == "drain" && o.WaitOnly:
		x.Body = []byte(`{"wait_only":true}`)
	}
	said, aerr := c.Flights.Ask(m, x)
	if aerr != nil {
		yet := "; if it goes on, it may still obey"
		if action == "drain" {
			yet = "; this router sends it nothing all the same, until undrain"
		}
		return nil, openai.Upstream("%s: %v%s", action, aerr, yet)
	}
	if said.Status == 200 && action == "role" && m.Source == fleet.NATS {
		c.awaitMember(ctx, m.ID, shownWait, turned(m, o.Role))
	}
	return said, nil
}

// Turn gives a worker another role, as POST /admin/v1/instances/{id}/role does, until ctx ends at most.
func (c *Console) Turn(ctx context.Context, id string, role fleet.Role) error {
	m := c.Fleet.Snapshot().Get(id)
	if m == nil || m.Dialect != fleet.Native {
		return fmt.Errorf("there is no worker %q of xpyd's own", id)
	}
	said, err := c.give(ctx, m, "", "role", orderBody{Role: role})
	switch {
	case err != nil:
		return errors.New(err.Message)
	case said.Status != 200:
		return fmt.Errorf("%s says %d: %s", id, said.Status, openai.Clip(string(said.Body)))
	}
	return nil
}

// Leave drains a worker whose process ends soon: streams move away from it, and it tells other
// routers. Here it is drained even if it does not answer.
func (c *Console) Leave(m *fleet.Member) error {
	c.Members.Mark(m.ID, m.Epoch, false)
	said, err := c.Flights.Ask(m, flight.Question{Method: "POST", Path: "/xpyd/v1/drain", Timeout: askTimeout, Limit: maxReply})
	if err == nil && said.Status != 200 {
		err = fmt.Errorf("status %d", said.Status)
	}
	if err != nil {
		return fmt.Errorf("drain %s: %w", m.ID, err)
	}
	return nil
}

// turned returns what reports whether the fleet shows m in its new role, or never will.
func turned(m *fleet.Member, role fleet.Role) func(now *fleet.Member) bool {
	return func(now *fleet.Member) bool { return now == nil || now.Epoch != m.Epoch || now.Role == role }
}

// emptied returns what reports whether m has no streams left that are to go on elsewhere, or is gone.
func emptied(m *fleet.Member, toMove func(*fleet.Member) int) func(now *fleet.Member) bool {
	return func(now *fleet.Member) bool { return now == nil || now.Epoch != m.Epoch || toMove(m) == 0 }
}

// mark marks m as an order will leave it, or refuses the order. Until release, a worker that
// changes its role is marked as drained: it gets no requests, and no other order counts on it.
func (c *Console) mark(m *fleet.Member, action string, o orderBody) (release func(), err *openai.Error) {
	c.orders.Lock()
	defer c.orders.Unlock()
	turns := action == "role" && m.Role != o.Role
	if (turns || action == "drain") && !o.Force {
		if err := c.last(m); err != nil {
			return nil, err
		}
	}
	was := c.Members.Drained(m)
	switch {
	case turns || action == "drain":
		c.Members.Mark(m.ID, m.Epoch, o.WaitOnly)
	case action == "undrain":
		c.Members.Unmark(m.ID)
	}
	if turns && !was {
		return func() { c.Members.Unmark(m.ID) }, nil
	}
	return func() {}, nil
}

// await returns the member of that ID, nil if there is none, after waiting for one that is
// about to start.
func (c *Console) await(id string) *fleet.Member {
	there := func(m *fleet.Member) bool { return m != nil && m.State != fleet.Gone && m.State != fleet.Dead }
	m := c.awaitMember(c.Ctx, id, comingWait, func(m *fleet.Member) bool {
		return there(m) || c.Coming == nil || !c.Coming(id)
	})
	if m == nil || m.State == fleet.Gone {
		return nil
	}
	return m
}

// awaitMember returns the member of that ID, nil if there is none, once until is true of it, or
// after limit.
func (c *Console) awaitMember(ctx context.Context, id string, limit time.Duration, until func(*fleet.Member) bool) *fleet.Member {
	end := time.NewTimer(limit)
	defer end.Stop()
	look := time.NewTicker(comingLook)
	defer look.Stop()
	for {
		changed := c.Fleet.Changed()
		m := c.Fleet.Snapshot().Get(id)
		if until(m) {
			return m
		}
		select {
		case <-changed:
		case <-look.C:
		case <-end.C:
			return m
		case <-ctx.Done():
			return m
		}
	}
}
