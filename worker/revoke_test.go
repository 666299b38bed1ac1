package worker_test

import (
	"strings"
	"testing"

	"github.com/xpyd/xpyd/kvconn/ticket"
)

// TestRevoke: a revoked prefill worker is not dialled, whoever names it and however, until it
// may come back.
func TestRevoke(t *testing.T) {
	p, d := pair(t, nil)
	const body = `"prompt":"Once upon a time","temperature":0`
	want := complete(t, d, nil, "{"+body+"}")
	kept, _ := nixl(t, p, body)
	native := func(status int) {
		t.Helper()
		link := ticket.NewLink().String()
		var report chan string
		if status == 200 {
			report = leg(p, link)
		}
		resp, b := ask(t, d.URL()+"/v1/completions", linked(p, link), "{"+body+"}")
		if resp.StatusCode != status || status != 200 && (resp.Header.Get("x-xpyd-outcome") != "incompatible" || !strings.Contains(string(b), "is revoked")) {
			t.Errorf("%d %q %s", resp.StatusCode, resp.Header.Get("x-xpyd-outcome"), b)
		}
		if report != nil {
			<-report
		}
	}
	foreign := func(params string, status int) {
		t.Helper()
		if resp, b := ask(t, d.URL()+"/v1/completions", nil, "{"+body+params+"}"); resp.StatusCode != status {
			t.Errorf("%d %s", resp.StatusCode, b)
		}
	}
	mooncake := `,"kv_transfer_params":{"do_remote_prefill":true,"transfer_id":"t","remote_bootstrap_addr":"` + p.URL() + `"}`
	d.Revoke([]string{"somebody", p.Instance().ID})
	native(502)
	foreign(transfer(t, kept), 502)
	foreign(mooncake, 502)
	d.Revoke([]string{"somebody"})
	native(200)
	same(t, "later", complete(t, d, nil, "{"+body+transfer(t, kept)+"}"), want)
	empty(t, d)
	empty(t, p)
}
