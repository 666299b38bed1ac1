package e2e

import (
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/worker"
)

// TestDifferentialSpeculation: pairs whose workers speculate, by prompt lookup and by a draft model, in small
// pools that evict and preempt, with tiers below, answer as a single worker does that does not, byte for byte.
// XPYD_SOAK_REQUESTS sets how many requests (60).
func TestDifferentialSpeculation(t *testing.T) {
	n := soakRequests(t, 60)
	alone := startWorker(t, fleet.Decode, func(c *worker.Config) { c.SpeculationDepth = 0 })
	var pairs [][2]*worker.Worker
	counters := map[*worker.Worker]string{}
	registries := map[*worker.Worker]*prometheus.Registry{}
	for i, kind := range []string{"ngram", "draft"} {
		speculating := func(tokens int) func(*worker.Config) {
			return func(c *worker.Config) {
				c.BlockTokens, c.Blocks = tokens, 1100/tokens
				if c.Speculation = kind; kind == "draft" {
					c.DraftModel = "../internal/model/stories260k"
				}
				c.KV.HostMemory, c.KV.MinLoadTokens = 1<<20, 0
			}
		}
		reg := prometheus.NewRegistry()
		decode := startWorker(t, fleet.Decode, speculating([]int{4, 16}[i]), func(d *worker.Deps) { d.Registry = reg })
		registries[decode], counters[decode] = reg, []string{"accepted_tokens_total", "drafted_tokens_total"}[i]
		pairs = append(pairs, [2]*worker.Worker{startWorker(t, fleet.Prefill, speculating(16)), decode})
	}
	bodies := randomBodies(rand.New(rand.NewPCG(5, 6)), n)
	var wg sync.WaitGroup
	next := make(chan int)
	for c := range 12 {
		wg.Go(func() {
			pair := pairs[c%len(pairs)]
			for i := range next {
				_, want := post(t, alone.URL()+"/v1/completions", nil, bodies[i])
				status, got := viaPair(t, pair[0], pair[1], bodies[i])
				if g, w := comparable(t, got), comparable(t, want); status != 200 || g != w {
					t.Errorf("request %d by %s: %s\n got %d %s\nwant %s", i, pair[1].ID(), bodies[i], status, g, w)
				}
			}
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	wg.Wait()
	for w, reg := range registries {
		families, err := reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		accepted := 0.0 // or drafted: a draft model as large as the model is soon left alone
		for _, f := range families {
			if f.GetName() == "xpyd_engine_"+counters[w] {
				for _, m := range f.GetMetric() {
					accepted += m.GetCounter().GetValue()
				}
			}
		}
		if accepted < 5 {
			t.Errorf("%s: %v %s: the test tests nothing", w.ID(), accepted, counters[w])
		}
	}
}
