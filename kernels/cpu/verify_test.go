package cpu_test

import (
	"testing"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cpu"
	"github.com/xpyd/xpyd/kernels/kerneltest"
)

// TestVerify: drafts change no bit of what is drawn, of the rows that count, and of their digests, whatever
// the family and the size of blocks.
func TestVerify(t *testing.T) {
	for name, a := range families() {
		w := randomWeights(a, kernels.F32, 3)
		for _, opt := range []cpu.Options{{BlockTokens: 16, Threads: 2}, {BlockTokens: 5, Threads: 1}} {
			t.Run(name, func(t *testing.T) {
				opt.Blocks = 3 * 14
				kerneltest.Verify(t, open(t, a, w, opt))
			})
		}
	}
}

// TestVerifyRefuses what does not go with drafts.
func TestVerifyRefuses(t *testing.T) {
	a := families()["llama gqa2 8"]
	b := open(t, a, randomWeights(a, kernels.F32, 3), cpu.Options{Blocks: 4})
	draw := kernels.Sample{TopP: 1, Repetition: 1, Logprobs: -1}
	for what, q := range map[string]kernels.Seq{
		"a draw too few":  {Tokens: []int32{1, 2}, Samples: []kernels.Sample{draw}},
		"a draw too many": {Tokens: []int32{1}, Samples: []kernels.Sample{draw, draw}},
		"targets":         {Tokens: []int32{1}, Samples: []kernels.Sample{draw}, Targets: []int32{1}},
		"logits":          {Tokens: []int32{1}, Samples: []kernels.Sample{draw}, WantLogits: true},
	} {
		q.Blocks, q.Verify = []int32{0}, true
		if _, err := b.Step(&kernels.Step{Seqs: []kernels.Seq{q}}); err == nil {
			t.Errorf("%s: taken", what)
		}
	}
}
