package e2e

import (
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/worker"
)

// TestDifferentialShared: 16 clients at a time keep 2 + 2 workers busy whose
// prefills write into decode's memory, in small pools that evict and preempt.
// Every answer is that of a single worker, byte for byte. XPYD_SOAK_REQUESTS
// sets how many (60).
func TestDifferentialShared(t *testing.T) {
	n := soakRequests(t, 60)
	alone := startWorker(t, fleet.Decode, nil)
	url := startCluster(t, 2, 2, func(c *worker.Config) {
		c.KV.Transport = "shm" // no other way is taken
		c.Blocks = 96
	})
	sameAsAlone(t, alone.URL(), url, randomBodies(rand.New(rand.NewPCG(3, 4)), n))
}

// randomBodies are n requests.
func randomBodies(r *rand.Rand, n int) []string {
	bodies := make([]string, n)
	for i := range bodies {
		bodies[i] = randomBody(r, i)
	}
	return bodies
}

// atOnce calls do for each of n requests, as 16 clients.
func atOnce(n int, do func(i int)) {
	var clients sync.WaitGroup
	next := make(chan int)
	for range 16 {
		clients.Go(func() {
			for i := range next {
				do(i)
			}
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	clients.Wait()
}

// sameAsAlone checks that a cluster answers requests as a worker alone does.
func sameAsAlone(t *testing.T, alone, url string, bodies []string) {
	t.Helper()
	atOnce(len(bodies), func(i int) {
		_, want := post(t, alone+"/v1/completions", nil, bodies[i])
		status, got := post(t, url+"/v1/completions", nil, bodies[i])
		for tries := 0; status >= 500 && tries < 20; tries++ { // full, or the machine was too slow: typed, and nothing of it was told
			status, got = post(t, url+"/v1/completions", nil, bodies[i])
		}
		if g, w := comparable(t, got), comparable(t, want); status != 200 || g != w {
			t.Errorf("request %d: %s\n got %d %s\nwant %s", i, bodies[i], status, g, w)
		}
	})
}
