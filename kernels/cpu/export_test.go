package cpu

import "github.com/xpyd/xpyd/kernels"

// Exported to the external tests.
var (
	LogSumExp   = logSumExp
	Uniform     = uniform
	Philox      = philox
	TopLogprobs = topLogprobs
)

// Draw runs the sampler alone, with the named instruction set.
func Draw(simd string, vocab int) (func(logits []float32, p *kernels.Sample) int32, error) {
	o, err := chooseOps(simd, simdOps())
	if err != nil {
		return nil, err
	}
	return newSampler(vocab, o).token, nil
}
