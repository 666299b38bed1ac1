//go:build cuda && cgo && linux

package worker_test

import (
	"testing"

	"github.com/xpyd/xpyd/e2e/tiers"
	"github.com/xpyd/xpyd/engine/tier/redis/redistest"
	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/worker"
)

// TestGPUSameTokens: e2e/tiers' SameTokens with workers on a GPU in batch-invariant
// mode, whose prompts take several chunks, and a store inside this process. On the device:
//
//	go test -tags cuda ./worker -run GPUSameTokens
func TestGPUSameTokens(t *testing.T) {
	dir := tiers.RandomModel(t, kernels.BF16, func(c *arch.Config) {
		c.Layers, c.Hidden, c.Intermediate, c.Heads, c.KVHeads, c.HeadDim, c.MaxPositions = 4, 512, 1024, 8, 4, 64, 2048
	})
	tiers.SameTokens(t, tiers.Bed{
		Change: func(c *worker.Config) {
			c.Model, c.Device, c.GPUMemory, c.BatchInvariant = dir, "cuda", 0.2, true
			c.StepTokens = 1024
		},
		Store:  func(t *testing.T) string { return redistest.StartFake(t).URL() },
		Prompt: 1500, Tokens: 16, Temperature: 2, SSD: 512 << 20,
		Apart: []int{1}, // any_kernel: kernels/DESIGN.md, section 7
	}, 16, 1, 64, 256)
}
