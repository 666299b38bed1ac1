package console

import (
	"errors"
	"strings"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/internal/trust"
)

// Revoker shuts IDs out of the fleet, and keeps the list.
type Revoker interface {
	Revoke(id string) error
	Unrevoke(id string) error
	Revocations() []fleet.Revocation
}

// revocations answers GET /admin/v1/revocations.
type revocations struct {
	Revoked []revokedInfo `json:"revoked"`
	Notes   []string      `json:"notes,omitempty"` // for whoever changed it
}

type revokedInfo struct {
	ID    string    `json:"id"`
	Since time.Time `json:"since"`
}

// serveRevocations shuts an ID out of the fleet (POST), lets it come back (DELETE), and lists
// who is shut out (GET).
func (c *Console) serveRevocations(ctx *fasthttp.RequestCtx, a adminCall) *openai.Error {
	if c.Revoker == nil {
		return openai.BadRequest("", "nobody can be revoked in this fleet")
	}
	var err error
	switch {
	case a.verb == "POST" && strings.HasPrefix(a.part, trust.SecretName):
		return openai.BadRequest("id", "%s is a fleet secret: `xpyd secret rotate` replaces it, and `xpyd secret retire` ends it", openai.Clip(a.part))
	case a.verb == "POST":
		NoteChange(ctx, c.standing(a.part), "revoked")
		err = c.Revoker.Revoke(a.part)
	case a.verb == "DELETE":
		NoteChange(ctx, c.standing(a.part), "not revoked")
		err = c.Revoker.Unrevoke(a.part)
	}
	switch {
	case errors.Is(err, fleet.ErrNotRevoked):
		return openai.NotFound("%s: %v", openai.Clip(a.part), err)
	case errors.Is(err, fleet.ErrManyRevoked):
		return openai.BadRequest("", "%v", err).WithStatus(409, "too_many_revoked")
	case err != nil && fleet.ValidID(a.part) != nil:
		return openai.BadRequest("id", "%v", err)
	case err != nil: // it is done, but not saved
		return openai.Internal("%v", err)
	}
	out := revocations{Revoked: []revokedInfo{}, Notes: c.notes(a.verb, a.part)}
	for _, x := range c.Revoker.Revocations() {
		if !x.Back {
			out.Revoked = append(out.Revoked, revokedInfo{x.ID, time.UnixMicro(x.At).UTC()})
		}
	}
	return reply(ctx, 200, out)
}

// notes explain a change that has no effect yet.
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

// standing says for the audit log whether an ID is revoked.
func (c *Console) standing(id string) string {
	for _, x := range c.Revoker.Revocations() {
		if x.ID == id && !x.Back {
			return "revoked"
		}
	}
	return strings.TrimSpace("not revoked " + c.state(id))
}

// state is a member's for the audit log; "" if there is none.
func (c *Console) state(id string) string {
	if m := c.Fleet.Snapshot().Get(id); m != nil {
		return describe(m)
	}
	return ""
}
