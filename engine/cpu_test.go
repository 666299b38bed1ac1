package engine_test

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cpu"
)

// TestSameTokensOnCPU is TestSameTokensInAnyCompany on the real CPU backend,
// with a small random model: its sums have one order, so the promise holds to
// the bit.
func TestSameTokensOnCPU(t *testing.T) {
	rounds := 8
	if testing.Short() {
		rounds = 2
	}
	open := onCPU(t)
	for seed := range uint64(rounds) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			company(t, rand.New(rand.NewPCG(seed, 4)), open)
		})
	}
}

// onCPU makes CPU backends with a small random model.
func onCPU(t *testing.T) backends {
	shape := arch.Config{
		ModelType: "llama", Layers: 2, Hidden: 32, Intermediate: 48, Heads: 4, KVHeads: 2, HeadDim: 8,
		Vocab: 48, MaxPositions: 512, NormEps: 1e-5, RopeTheta: 10000,
	}
	weights := randomWeights(shape)
	return func(blocks, blockTokens int) kernels.Backend {
		b, err := cpu.New(shape, weights, cpu.Options{Blocks: blocks, BlockTokens: blockTokens, Threads: 1})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { b.Close() })
		return b
	}
}

func randomWeights(a arch.Config) kernels.Weights {
	rng := rand.New(rand.NewPCG(5, 6))
	random := func(shape ...int) kernels.Tensor {
		n := 1
		for _, d := range shape {
			n *= d
		}
		var data []byte
		for range n {
			v := float32(rng.NormFloat64()) * 0.3
			if len(shape) == 1 {
				v++ // a norm's weight
			}
			data = binary.LittleEndian.AppendUint32(data, math.Float32bits(v))
		}
		return kernels.Tensor{DType: kernels.F32, Shape: shape, Data: data}
	}
	w := kernels.Weights{}
	for _, t := range a.Tensors() {
		w[t.Place] = random(t.Shape...)
	}
	return w
}
