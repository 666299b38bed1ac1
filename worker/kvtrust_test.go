package worker_test

import (
	"fmt"
	"maps"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/worker"
)

// TestKVOfTheFleet: KV is taken from and given to workers with a secret of the fleet,
// whoever names them, and to none that is revoked.
func TestKVOfTheFleet(t *testing.T) {
	ring, secret := newRing(t)
	other, _ := newRing(t)
	with := func(role fleet.Role, r *trust.Ring) *worker.Worker {
		return start(t, func(c *worker.Config) { c.Role = string(role) }, func(d *worker.Deps) { d.Ring = r })
	}
	p, d := with(fleet.Prefill, ring), with(fleet.Decode, ring)
	const body = `{"prompt":"Once upon a time","max_tokens":4,"temperature":0}`
	refusal := func(p, d *worker.Worker, shown map[string]string, want ...string) error {
		h := linked(p, ticket.NewLink().String())
		maps.Copy(h, shown)
		resp, b := ask(t, d.URL()+"/v1/completions", h, body)
		ok := resp.StatusCode == 502 && resp.Header.Get("x-xpyd-outcome") == "incompatible"
		for _, s := range want {
			ok = ok && strings.Contains(string(b), s)
		}
		if !ok || strings.Contains(string(b), secret.Reveal()) {
			return fmt.Errorf("%d %q %s; want 502 incompatible %v", resp.StatusCode, resp.Header.Get("x-xpyd-outcome"), b, want)
		}
		return nil
	}
	refused := func(p, d *worker.Worker, shown map[string]string, want ...string) {
		t.Helper()
		if err := refusal(p, d, shown, want...); err != nil {
			t.Error(err)
		}
	}
	works := func() {
		t.Helper()
		link := ticket.NewLink().String()
		report := make(chan int, 1)
		go func() {
			resp, _ := ask(t, p.URL()+"/xpyd/v1/prefill", token(p, secret), `{"link":"`+link+`","request_id":"req-1","deadline_ms":120000}`)
			report <- resp.StatusCode
		}()
		h := linked(p, link)
		maps.Copy(h, token(d, secret))
		if resp, b := ask(t, d.URL()+"/v1/completions", h, body); resp.StatusCode != 200 {
			t.Errorf("%d %s", resp.StatusCode, b)
		}
		if got := <-report; got != 200 {
			t.Errorf("the leg got %d", got)
		}
	}
	works()
	refused(with(fleet.Prefill, other), d, token(d, secret), "fleet_secret", secret.ID(), other.IDs())
	refused(with(fleet.Prefill, nil), d, token(d, secret), "fleet_secret", secret.ID(), "(none)")
	refused(p, with(fleet.Decode, nil), nil, "fleet_secret", secret.ID(), "(none)")

	p.Revoke([]string{"x", d.ID()})
	soon(t, slack, func() error { return refusal(p, d, token(d, secret), "revoked") }) // decode has to hear that the session is over
	p.Revoke(nil)
	works()
	d.Revoke([]string{p.ID()})
	refused(p, d, token(d, secret), "revoked")
	d.Revoke([]string{"x"})
	works()
	empty(t, p)
	empty(t, d)
}
