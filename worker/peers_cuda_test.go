//go:build cuda && cgo && linux

package worker_test

import (
	"fmt"
	"testing"

	"github.com/xpyd/xpyd/worker"
)

// TestGPUPeers: over several turns prefill fetches the answers from decode and has
// its own part in host memory, both workers on a GPU in batch-invariant mode; tokens
// are exactly those of a worker that computes everything. On the device:
//
//	go test -tags cuda ./worker -run GPUPeers
func TestGPUPeers(t *testing.T) {
	for _, one := range []struct {
		blockTokens int
		bring       string
	}{{1, "off"}, {16, "off"}, {64, "off"}, {256, "off"}, {1, "on"}, {16, "on"}, {256, "on"}} {
		blockTokens, bring := one.blockTokens, one.bring
		t.Run(fmt.Sprint(blockTokens, " bring ", bring), func(t *testing.T) {
			gpu := func(c *worker.Config) {
				patient(c)
				c.Device, c.KVMemory, c.GPUMemory, c.BatchInvariant, c.BlockTokens = "cuda", 0, 0.2, true, blockTokens
			}
			plain := start(t, gpu)
			p, d := pair(t, func(pc, dc *worker.Config) {
				gpu(pc)
				gpu(dc)
				pc.KV.MinLoadTokens, pc.KV.HostMemory, pc.KV.PeerBring = 1, 256<<20, bring
			})
			turns(t, plain, p, d, max(16, blockTokens))
		})
	}
}
