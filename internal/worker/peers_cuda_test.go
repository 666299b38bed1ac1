//go:build cuda && cgo && linux

package worker_test

import (
	"fmt"
	"testing"

	"github.com/xpyd/xpyd/internal/worker"
)

// TestGPUPeers: over several turns prefill fetches the answers from decode and has
// its own part in host memory, both workers on a GPU in batch-invariant mode; tokens
// are exactly those of a worker that computes everything. On the device:
//
//	go test -tags cuda ./internal/worker -run GPUPeers
func TestGPUPeers(t *testing.T) {
	for _, blockTokens := range []int{1, 16, 64, 256} {
		t.Run(fmt.Sprint(blockTokens), func(t *testing.T) {
			gpu := func(c *worker.Config) {
				patient(c)
				c.Device, c.KVMemory, c.GPUMemory, c.BatchInvariant, c.BlockTokens = "cuda", 0, 0.2, true, blockTokens
			}
			plain := start(t, gpu)
			p, d := pair(t, func(pc, dc *worker.Config) {
				gpu(pc)
				gpu(dc)
				pc.KV.MinLoadTokens, pc.KV.HostMemory = 1, 256<<20
			})
			unit := max(16, blockTokens)
			talk := []int32{1}
			for i := range int32(40) {
				talk = append(talk, 300+i)
			}
			for i := range 4 {
				want := complete(t, plain, nil, turn(talk, 70, ""))
				got := through(t, p, d, nil, turn(talk, 70, ""))
				same(t, fmt.Sprint("turn ", i), got, want)
				if least := (len(talk) - 7) / unit * unit; i > 0 && got.Usage.Details.Cached < least {
					t.Errorf("turn %d: %d of %d tokens cached, want %d", i, got.Usage.Details.Cached, len(talk), least)
				}
				talk = append(append(talk, got.Choices[0].TokenIDs...), 310, 320, 330, 340, 350)
			}
			if n := counter(t, p, `xpyd_kvtier_loaded_units_total{tier="peer"}`); n == 0 {
				t.Error("prefill has fetched nothing")
			}
			empty(t, p)
			empty(t, d)
		})
	}
}
