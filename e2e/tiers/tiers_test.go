package tiers

import (
	"testing"

	"github.com/xpyd/xpyd/engine/tier/redis/redistest"
	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/internal/model/modeltest"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/worker"
)

// TestSameTokens is SameTokens on the CPU.
func TestSameTokens(t *testing.T) {
	SameTokens(t, Bed{Store: func(t *testing.T) string { return redistest.Start(t).URL() }, Prompt: 320, Tokens: 8, Temperature: 0.8, SSD: 32 << 20}, 16, 1, 64, 256)
}

// TestSameTokensLatent is SameTokens of a model with latent attention.
func TestSameTokensLatent(t *testing.T) {
	dir := RandomModel(t, kernels.BF16, func(c *arch.Config) {
		vocab, bos, eos := c.Vocab, c.BOS, c.EOS
		*c = modeltest.Tiny("deepseek_v3")
		c.Vocab, c.BOS, c.EOS, c.MaxPositions = vocab, bos, eos, 2048
	})
	SameTokens(t, Bed{Change: func(c *worker.Config) { c.Model = dir }, Store: func(t *testing.T) string { return redistest.StartFake(t).URL() },
		Prompt: 500, Tokens: 16, Temperature: 2, SSD: 64 << 20}, 16)
}

// TestSameTokensAsOnGPU is what worker's TestGPUSameTokens does, with a
// smaller model.
func TestSameTokensAsOnGPU(t *testing.T) {
	dir := RandomModel(t, kernels.BF16, func(c *arch.Config) {
		c.Layers, c.Hidden, c.Intermediate, c.Heads, c.KVHeads, c.HeadDim, c.MaxPositions = 2, 64, 128, 4, 2, 16, 2048
	})
	SameTokens(t, Bed{Change: func(c *worker.Config) { c.Model = dir }, Store: func(t *testing.T) string { return redistest.StartFake(t).URL() },
		Prompt: 500, Tokens: 16, Temperature: 2, SSD: 64 << 20}, 16)
}
