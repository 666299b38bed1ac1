package worker

import (
	"slices"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// Revoke shuts out the workers of these ids, and only these: their sessions end, and no new
// one is made, whoever names them. See kvconn.Server.Revoke.
func (w *Worker) Revoke(ids []string) {
	w.shutOut.Store(&ids)
	w.recv.Revoke(ids)
	w.server.Revoke(ids)
	if w.ring.Retire(ids) { // a secret is among them, which our join line names still
		if err := w.renew(); err != nil {
			w.log.Error("announce the secrets in force", "error", err)
		}
	}
	if slices.Contains(ids, w.identity.ID) {
		w.log.Warn("this worker is revoked: the fleet does not hear it and gives it nothing; `xpyd unrevoke` takes that back", "id", w.identity.ID)
	} else {
		w.log.Info("revoked", "ids", ids)
	}
}

// revoked reports whether a worker is shut out.
func (w *Worker) revoked(id string) bool {
	ids := w.shutOut.Load()
	return ids != nil && slices.Contains(*ids, id)
}

// refuseRevoked refuses a worker that is shut out; nil: it is not.
func (w *Worker) refuseRevoked(id string) *failure {
	if !w.revoked(id) {
		return nil
	}
	return &failure{openai.Upstream("%s is revoked", id), ticket.Incompatible}
}
