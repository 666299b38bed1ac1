package cluster

import (
	"testing"

	"github.com/xpyd/xpyd/internal/trust"
)

// MemberToken is the header that the fleet's member m requires.
func (r *Router) MemberToken(t testing.TB, m *Instance) (name, value string) {
	t.Helper()
	s, _ := r.Ring(t).Shared(m.Secrets)
	return trust.Header, s.Token(trust.HTTP, trust.Member(m.ID, m.Epoch))
}

// Secrets is everything that nobody else may see, by name.
func (r *Router) Secrets(t testing.TB) map[string]string {
	t.Helper()
	s := r.JoinLine(t).Secrets[0]
	return map[string]string{"the fleet's secret": s.Reveal(), "the admin token": r.Token, "the scrape token": s.Token(trust.Scrape, "")}
}
