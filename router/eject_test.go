package router_test

import (
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	fake "github.com/xpyd/xpyd/internal/mock"
	"github.com/xpyd/xpyd/router"
	"github.com/xpyd/xpyd/router/pick"
)

// TestEjection: a worker that answers half of its requests with an error, or whose tokens
// come slowly, gets no more requests for a while. The log, the metrics and the list of
// instances say so.
func TestEjection(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		slow bool
		why  string
	}{"errors": {false, "fail"}, "slow": {true, "take"}} {
		t.Run(name, func(t *testing.T) {
			itl, crowd := time.Duration(0), 8
			if c.slow { // one stream in eight is measured, if its events came one by one on a starved machine too
				itl, crowd = 5*time.Millisecond, 48
			}
			_, list := engines(t, "vllm-nixl", fleet.Prefill, 1)
			ds, more := engines(t, "vllm-nixl", fleet.Decode, 3, func(c *fake.Config) { c.ITL = itl })
			if c.slow { // the last is another machine
				bad, one := engines(t, "vllm-nixl", fleet.Decode, 1, func(c *fake.Config) { c.ITL = 60 * time.Millisecond })
				one[0].ID = more[2].ID
				ds[2], more[2] = bad[0], one[0]
			} else {
				ds[2].SetFault(fake.Fault{Status: 500})
			}
			g := newRig(t, 0, 0, func(cfg *router.Config) {
				cfg.Static = append(list, more...)
				cfg.Pick.Policy = pick.RoundRobin
				cfg.Pick.Breaker.Failures = 0
				if c.slow {
					cfg.Pick.Ejection.Windows, cfg.Pick.Ejection.Deviations = 1, 1
				}
				cfg.Pick.Ejection.Mode, cfg.Pick.Ejection.Interval = pick.EjectAll, 20*time.Millisecond
				cfg.Pick.Ejection.Time, cfg.Pick.Ejection.MaxTime = 100*time.Millisecond, 100*time.Millisecond
			})
			g.allProbed(4)
			ejected := `xpyd_router_ejections_total{role="decode"}`
			g.until("the ejection", func() bool {
				var wg sync.WaitGroup
				for range crowd {
					wg.Go(func() {
						resp, text := g.post("/v1/completions", strings.Replace(askLive, ":5", ":6", 1))
						if got, _ := read(t, text); resp.StatusCode != 200 || got != strings.Join(fake.Words(`"Once upon"`, 0, 6), "") {
							t.Errorf("%d %s", resp.StatusCode, text)
						}
					})
				}
				wg.Wait()
				return strings.Contains(g.logs.String(), `msg="worker ejected" worker=vllm-nixl-d2`) && g.metric(ejected) > 0
			})
			if !strings.Contains(g.logs.String(), c.why) {
				t.Errorf("%s", g.logs)
			}
			ds[2].SetFault(fake.Fault{})
			g.until("its return", func() bool {
				g.post("/v1/completions", askLive)
				return strings.Contains(g.logs.String(), "worker gets requests again")
			})
		})
	}
}
