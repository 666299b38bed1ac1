package kvconn

import (
	"errors"
	"sync/atomic"

	"github.com/xpyd/xpyd/kvconn/ticket"
)

// revoked holds the ids of workers that this side refuses. The zero value is empty.
type revoked struct {
	ids atomic.Pointer[map[string]struct{}]
}

var (
	errRevokedPeer = errors.New("the worker is revoked")
	errRetired     = errors.New("the fleet secret that the session was opened with is retired")
)

// set replaces the ids.
func (r *revoked) set(ids []string) {
	all := make(map[string]struct{}, len(ids))
	for _, id := range ids {
		all[id] = struct{}{}
	}
	r.ids.Store(&all)
}

func (r *revoked) has(id string) bool {
	all := r.ids.Load()
	if all == nil {
		return false
	}
	_, ok := (*all)[id]
	return ok
}

// refuse turns a revoked peer away.
func (r *revoked) refuse(f *frameConn, h *hello) error {
	if !r.has(h.Identity.ID) {
		return nil
	}
	return f.turnAway(ticket.Incompatible, &Incompatible{Field: "revoked", Ours: errRevokedPeer.Error(), Theirs: h.Identity.ID})
}

// Revoke ends the sessions to workers with these ids, as dead, and opens no new ones.
// The ids replace those of the call before. A worker states its own id, so one that
// lies is kept out by changing the secrets (Config.Ring).
func (r *Receiver) Revoke(ids []string) {
	r.revoked.set(ids)
	for _, s := range r.sessions() {
		s.endIfRevoked(&r.revoked)
	}
}

// Renew is to be called after Config.Ring has changed: it ends, as dead, the sessions
// that a secret no longer in force has proved.
func (r *Receiver) Renew() {
	for _, s := range r.sessions() {
		s.endIfRevoked(&r.revoked)
	}
}

// endIfRevoked ends the session if its peer is revoked, or its secret is retired.
func (h *half) endIfRevoked(r *revoked) {
	switch {
	case r.has(h.peer.ID):
		h.quit(ticket.Dead, errRevokedPeer)
	case !h.ctl.proven.In(h.cfg.Ring):
		h.quit(ticket.Dead, errRetired)
	}
}

// Revoke is Receiver.Revoke for the receivers of a server.
func (s *Server) Revoke(ids []string) {
	s.revoked.set(ids)
	for _, sess := range s.all() {
		sess.endIfRevoked(&s.revoked)
	}
}

// Renew is Receiver.Renew for the receivers of a server.
func (s *Server) Renew() {
	for _, sess := range s.all() {
		sess.endIfRevoked(&s.revoked)
	}
}
