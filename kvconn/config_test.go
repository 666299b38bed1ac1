package kvconn_test

import (
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/kvconntest"
)

func TestConfigValidate(t *testing.T) {
	f := func(change func(c *kvconn.Config), want string) {
		t.Helper()
		c := kvconntest.Config("x", 1)
		change(&c)
		err := c.Validate()
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("want %q, have %v", want, err)
		}
	}
	f(func(c *kvconn.Config) {}, "")
	f(func(c *kvconn.Config) { c.Identity.ID = "" }, "id is empty")
	f(func(c *kvconn.Config) { c.Identity.Layout.BlockTokens = 257 }, "block_tokens")
	f(func(c *kvconn.Config) { c.Identity.Layout.Groups = nil }, "groups")
	f(func(c *kvconn.Config) { c.Identity.Layout.Groups[0].Planes[0].Dim = 0 }, "out of range")
	f(func(c *kvconn.Config) { c.Identity.Layout.Groups[0].Heads.Count = 1 << 30 }, "out of range")
	f(func(c *kvconn.Config) { c.ProtocolMin = kvconn.ProtocolMax + 1 }, "protocol range")
	f(func(c *kvconn.Config) { c.BulkConns = 0 }, "bulk_conns")
	f(func(c *kvconn.Config) { c.PeerSilence = c.KeepAlive }, "keep_alives")
	f(func(c *kvconn.Config) { c.AcceptTimeout = 0 }, "accept_timeout")
	f(func(c *kvconn.Config) { c.MaxTickets = 0 }, "max_tickets")
}

// Names follow xpyd_<part>_<noun>_<unit>; a second registration is an error.
func TestMetricNames(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	if _, err := kvconn.NewMetrics(reg); err != nil {
		t.Fatal(err)
	}
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if !strings.HasPrefix(f.GetName(), "xpyd_kvconn_") && !strings.HasPrefix(f.GetName(), "xpyd_kv_") || f.GetHelp() == "" {
			t.Errorf("%s: %q", f.GetName(), f.GetHelp())
		}
	}
	if _, err := kvconn.NewMetrics(reg); err == nil {
		t.Error("registered twice")
	}
}
