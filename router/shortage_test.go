package router_test

import (
	"fmt"
	"net/http"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router"
)

// TestOwnLackBlamesNobody: a router that cannot open a socket says so, and does not hold
// it against the workers it wanted to reach.
func TestOwnLackBlamesNobody(t *testing.T) {
	t.Parallel()
	for _, lack := range []error{syscall.EMFILE, syscall.ENFILE, syscall.EADDRNOTAVAIL, syscall.ENOBUFS, syscall.ENOMEM} {
		g := newRig(t, 1, 2, func(c *router.Config) {
			c.IdleConns = 0 // each leg dials
		})
		wrapped := error(os.NewSyscallError("socket", lack))
		g.lack.Store(&wrapped)
		for range 20 {
			resp, text := g.post("/v1/completions", ask)
			if resp.StatusCode != 503 || resp.Header.Get("Retry-After") == "" || !strings.Contains(text, lack.Error()) {
				t.Fatalf("%v: %d %s", lack, resp.StatusCode, text)
			}
		}
		if resp, text := g.post("/tokenize", `{"model":"m","prompt":"x"}`); resp.StatusCode != 503 {
			t.Errorf("%v: tokenize: %d %s", lack, resp.StatusCode, text)
		}
		for _, m := range g.watcher.Snapshot().Members {
			if m.State != fleet.Live {
				t.Errorf("%v: %s is %s: %s", lack, m.ID, m.State, m.Reason)
			}
		}
		if open := g.breakers(); len(open) > 0 {
			t.Errorf("%v: breakers %v", lack, open)
		}
		g.lack.Store(nil)
		for range 6 { // both decode workers, at once
			if resp, text := g.post("/v1/completions", ask); resp.StatusCode != 200 {
				t.Errorf("%v is over: %d %s", lack, resp.StatusCode, text)
			}
		}
	}
}

// TestOwnLackAfterABreak: a connection that breaks while the router cannot dial says
// nothing against the worker. Once the router can dial, a dead worker is found out as
// usual.
func TestOwnLackAfterABreak(t *testing.T) {
	t.Parallel()
	g := newRig(t, 1, 1, once)
	p, d := g.workers["p0"], g.workers["d0"]
	started, ended := make(chan time.Time, 1), make(chan time.Time, 1)
	d.on(&d.decode, hold(started, ended))
	wrapped := error(os.NewSyscallError("socket", syscall.EMFILE))
	p.on(&p.prefill, func(w http.ResponseWriter, r *http.Request) {
		<-started
		g.lack.Store(&wrapped)
		reset(w, r)
	})
	if resp, text := g.post("/v1/completions", ask); resp.StatusCode != 502 {
		t.Fatalf("%d %s", resp.StatusCode, text)
	}
	g.until("the knock to be over", func() bool { return !g.r.Knocking() })
	if m := g.watcher.Snapshot().Get("p0"); m.State != fleet.Live {
		t.Fatalf("p0 is %s: %s", m.State, m.Reason)
	}
	g.lack.Store(nil)
	p.srv.Listener.Close()
	d.on(&d.decode, hold(make(chan time.Time, 8), make(chan time.Time, 8)))
	g.post("/v1/completions", ask)
	g.until("p0 to be dead", func() bool { return g.watcher.Snapshot().Get("p0").State == fleet.Dead })
}

// TestOwnLackFailsNoProbe: a newcomer that cannot be dialled yet has not failed.
func TestOwnLackFailsNoProbe(t *testing.T) {
	t.Parallel()
	g := newRig(t, 1, 1)
	wrapped := error(os.NewSyscallError("socket", syscall.EMFILE))
	g.lack.Store(&wrapped)
	g.add("d1", fleet.Decode)
	probes := func(result string) bool {
		return g.labelled("xpyd_router_probes_total", result) > 0
	}
	g.until("a probe that could not be sent", func() bool { return probes("shortage") })
	for _, i := range g.list().Instances {
		if i.ProbeError != "" {
			t.Errorf("%s: %s", i.ID, i.ProbeError)
		}
	}
	if probes("failed") {
		t.Error("the newcomer failed a probe")
	}
	g.lack.Store(nil)
	g.allProbed(3)
}

// labelled is a counter's value for the one label's value.
func (g *rig) labelled(name, value string) float64 {
	families, err := g.reg.Gather()
	if err != nil {
		g.t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == name && m.GetLabel()[0].GetValue() == value {
				return m.GetCounter().GetValue()
			}
		}
	}
	return 0
}

// TestConnectionsFitTheLimit: whatever may be open, clients leave room for what
// the router opens for them.
func TestConnectionsFitTheLimit(t *testing.T) {
	const own = 18 + 2*5 + 8 // `xpyd up`'s, for each of a pair's workers, and of strangers at the port of NATS
	cfg := router.DefaultConfig()
	for _, files := range []int{64, 128, 256, 1024, 4096, 65536, 1 << 20} {
		public, admin := cfg.FitConns(files)
		legs := 2 * min(public, cfg.Limits.MaxInFlight)
		if public < 4 || admin < 4 || public+admin+legs+max(own, min(1024, files/4)) > files || public > cfg.MaxConns {
			t.Errorf("%d files: %d and %d connections, %d legs", files, public, admin, legs)
		}
		if files >= 1<<16 && public != cfg.MaxConns {
			t.Error(fmt.Sprint("cut at ", files, " files to ", public))
		}
	}
}
