package e2e

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/xpyd/xpyd/engine/tier/redis/redistest"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/worker"
)

// manyRanks are the numbers of ranks that the tests pair: stories260k has 4 KV heads for 8 query
// heads, so that of 8 ranks two keep each.
var manyRanks = []int{1, 2, 4, 8}

// TestOracleRanks: every recorded case, token for token, by any number of ranks and any pair of
// them: cold, warm, and behind a foreign proxy, which leases the blocks.
func TestOracleRanks(t *testing.T) {
	o := readOracle(t)
	var p, d []*worker.Worker
	for i, n := range manyRanks {
		ranks := func(tokens int) func(*worker.Config) {
			return func(c *worker.Config) { c.TensorParallel, c.BlockTokens = n, tokens }
		}
		p = append(p, startWorker(t, fleet.Prefill, ranks(16)))
		d = append(d, startWorker(t, fleet.Decode, ranks([]int{16, 16, 7, 32}[i])))
	}
	for i, from := range manyRanks {
		for j, to := range manyRanks {
			for _, c := range o.Cases {
				body := fmt.Sprintf(`{"model":"stories260k","prompt":%q,"max_tokens":64,"temperature":0,"return_token_ids":true,"cache_salt":"%d-%d"}`, c.Prompt, from, to)
				check := func(how string, status int, out []byte) {
					t.Helper()
					var a answer
					if err := json.Unmarshal(out, &a); err != nil || status != 200 {
						t.Fatalf("%d to %d ranks, %s: %d %s", from, to, how, status, out)
					}
					if !equal(a.Choices[0].TokenIDs, c.Greedy) {
						t.Errorf("%d to %d ranks, %s, %q:\n got %v\nwant %v", from, to, how, c.Prompt, a.Choices[0].TokenIDs, c.Greedy)
					}
				}
				for range 2 {
					status, out := viaPair(t, p[i], d[j], body)
					check("pair", status, out)
				}
				check("foreign", 200, foreign(t, p[i], d[j], body))
				if i == j {
					status, out := post(t, d[j].URL()+"/v1/completions", nil, body)
					check("alone", status, out)
				}
			}
		}
	}
}

// TestDifferentialRanks: seeded random requests get the same answer, byte for byte, from every pair
// of numbers of ranks as from a worker of one, in small pools that evict and preempt, with tiers
// below some of them and a store for all. XPYD_SOAK_REQUESTS sets how many (64).
func TestDifferentialRanks(t *testing.T) {
	n := soakRequests(t, 64)
	alone := startWorker(t, fleet.Decode, nil)
	store := redistest.Start(t)
	var p, d []*worker.Worker
	for i, ranks := range manyRanks {
		small := func(tokens int, tiers bool) func(*worker.Config) {
			return func(c *worker.Config) {
				c.TensorParallel, c.BlockTokens, c.Blocks = ranks, tokens, 1100/tokens
				if tiers {
					c.KV.HostMemory, c.KV.SSDDir, c.KV.SSDSize, c.KV.MinLoadTokens = 1<<20, t.TempDir(), 4<<20, 0
					c.KV.Store = store.URL()
				}
			}
		}
		p = append(p, startWorker(t, fleet.Prefill, small(16, i%2 == 1)))
		d = append(d, startWorker(t, fleet.Decode, small([]int{16, 3, 16, 16}[i], i > 1)))
	}
	r := rand.New(rand.NewPCG(5, 6))
	bodies := make([]string, n)
	for i := range bodies {
		bodies[i] = randomBody(r, i)
	}
	var clients sync.WaitGroup
	next := make(chan int)
	for range 16 {
		clients.Go(func() {
			for i := range next {
				from, to := i%len(p), i/len(p)%len(d)
				status, want := post(t, alone.URL()+"/v1/completions", nil, bodies[i])
				if status != 200 {
					t.Errorf("request %d alone: %d %s\n%s", i, status, want, bodies[i])
					continue
				}
				status, got := viaPair(t, p[from], d[to], bodies[i])
				if status != 200 {
					t.Errorf("request %d, %d to %d ranks: %d %s\n%s", i, manyRanks[from], manyRanks[to], status, got, bodies[i])
					continue
				}
				if g, w := comparable(t, got), comparable(t, want); g != w {
					t.Errorf("request %d, %d to %d ranks: %s\n got %s\nwant %s", i, manyRanks[from], manyRanks[to], bodies[i], g, w)
				}
			}
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	clients.Wait()
}

// TestDifferentialRanksShared is the same where prefills of every number of ranks write into the
// memory of decodes of every other.
func TestDifferentialRanksShared(t *testing.T) {
	n := soakRequests(t, 64)
	alone := startWorker(t, fleet.Decode, nil)
	started := map[string]int{}
	url := startCluster(t, len(manyRanks), len(manyRanks), func(c *worker.Config) {
		c.KV.Transport = "shm" // no other way is taken
		c.Blocks = 96
		c.TensorParallel = manyRanks[started[c.Role]]
		started[c.Role]++
	})
	r := rand.New(rand.NewPCG(7, 8))
	bodies := make([]string, n)
	for i := range bodies {
		bodies[i] = randomBody(r, i)
	}
	var clients sync.WaitGroup
	next := make(chan int)
	for range 16 {
		clients.Go(func() {
			for i := range next {
				_, want := post(t, alone.URL()+"/v1/completions", nil, bodies[i])
				status, got := post(t, url+"/v1/completions", nil, bodies[i])
				for tries := 0; status >= 500 && tries < 20; tries++ { // full, or the machine was too slow: typed, and nothing of it was told
					status, got = post(t, url+"/v1/completions", nil, bodies[i])
				}
				if g, w := comparable(t, got), comparable(t, want); status != 200 || g != w {
					t.Errorf("request %d: %s\n got %d %s\nwant %s", i, bodies[i], status, g, w)
				}
			}
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	clients.Wait()
}
