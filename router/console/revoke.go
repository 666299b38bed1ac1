package console

import (
	"errors"
	"strings"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/router/h1"
)

// Revoker shuts ids out of the fleet, and keeps the list.
type Revoker interface {
	Revoke(id string) error
	Unrevoke(id string) error
	Revocations() []fleet.Revocation
}

// revocations answers GET /admin/v1/revocations.
type revocations struct {
	Revoked []revokedInfo `json:"revoked"`
	Notes   []string      `json:"notes,omitempty"` // what whoever changed it should know
}

type revokedInfo struct {
	ID    string    `json:"id"`
	Since time.Time `json:"since"`
}

// serveRevocations shuts an id out of the fleet (POST), lets it come back (DELETE),
// and says who is shut out (GET).
func (c *Console) serveRevocations(ctx *fasthttp.RequestCtx, verb, id string) {
	if c.Revoker == nil {
		h1.WriteError(ctx, openai.BadRequest("", "nobody can be revoked in this fleet"))
		return
	}
	var err error
	switch {
	case verb == "GET" && id == "":
	case verb == "POST" && strings.HasPrefix(id, trust.SecretName):
		h1.WriteError(ctx, openai.BadRequest("id", "%s is a fleet secret: `xpyd secret rotate` replaces it, and `xpyd secret retire` ends it", h1.Clip(id)))
		return
	case verb == "POST" && id != "":
		NoteChange(ctx, c.standing(id), "revoked")
		err = c.Revoker.Revoke(id)
	case verb == "DELETE" && id != "":
		NoteChange(ctx, c.standing(id), "not revoked")
		err = c.Revoker.Unrevoke(id)
	default:
		h1.WriteError(ctx, openai.NotFound("there is no %s %s", h1.Clip(verb), h1.Clip(string(ctx.Path()))))
		return
	}
	switch {
	case errors.Is(err, fleet.ErrNotRevoked):
		h1.WriteError(ctx, openai.NotFound("%s: %v", h1.Clip(id), err))
		return
	case errors.Is(err, fleet.ErrManyRevoked):
		e := openai.BadRequest("", "%v", err)
		e.Status, e.Code = 409, "too_many_revoked"
		h1.WriteError(ctx, e)
		return
	case err != nil && fleet.ValidID(id) != nil:
		h1.WriteError(ctx, openai.BadRequest("id", "%v", err))
		return
	case err != nil: // it is done, and not kept
		h1.WriteError(ctx, openai.Internal("%v", err))
		return
	}
	out := revocations{Revoked: []revokedInfo{}, Notes: c.notes(verb, id)}
	for _, x := range c.Revoker.Revocations() {
		if !x.Back {
			out.Revoked = append(out.Revoked, revokedInfo{x.ID, time.UnixMicro(x.At).UTC()})
		}
	}
	reply(ctx, 200, out)
}

// notes are for a change that does not do yet what it says.
func (c *Console) notes(verb, id string) (out []string) {
	if verb == "GET" {
		return nil
	}
	s := c.Fleet.Snapshot()
	if verb == "POST" && s.Get(id) == nil {
		out = append(out, "no worker of this name is known: it is refused if one comes")
	}
	if !s.Link.Up {
		out = append(out, "NATS is down: other routers and the workers hear of it when it is back")
	}
	return out
}

// standing is whether an id is revoked, for the audit log.
func (c *Console) standing(id string) string {
	for _, x := range c.Revoker.Revocations() {
		if x.ID == id && !x.Back {
			return "revoked"
		}
	}
	return strings.TrimSpace("not revoked " + c.state(id))
}

// state is a member's for the audit log; "" for none.
func (c *Console) state(id string) string {
	if m := c.Fleet.Snapshot().Get(id); m != nil {
		return describe(m)
	}
	return ""
}
