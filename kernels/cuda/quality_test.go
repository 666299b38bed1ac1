//go:build cuda && cgo && linux

package cuda_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cuda"
)

// quality prints how far logits of Llama-3-8B's shape with random weights are
// from those of bf16 weights and KV, teacher-forced: after prompts of many lengths,
// and after each of some tokens decoded behind them. A random model's logits are
// nearly flat, so that equal first tokens are rarer than in a trained one.
func quality(t *testing.T, opt cuda.Options) {
	a := llama8B()
	opt.Blocks, opt.MaxSeqs = 1600, 64
	run := func(opt cuda.Options) (all [][]float32) {
		b, err := cuda.NewRandom(a, 1, opt)
		if err != nil {
			t.Fatal(err)
		}
		defer b.Close()
		r := rand.New(rand.NewPCG(5, 6))
		free := table(r, b, b.Blocks())
		var seqs []kernels.Seq
		for i := range 48 {
			n := 16 + i*9
			q := kernels.Seq{Tokens: randomTokens(r, n, a.Vocab), Blocks: free[:(n+31)/16], WantLogits: true}
			free = free[len(q.Blocks):]
			all = append(all, slices.Clone(mustStep(t, b, q)[0].Logits))
			q.Pos = n
			seqs = append(seqs, q)
		}
		for range 8 {
			for i := range seqs {
				seqs[i].Tokens = randomTokens(r, 1, a.Vocab)
			}
			for _, res := range mustStep(t, b, seqs...) {
				all = append(all, slices.Clone(res.Logits))
			}
			for i := range seqs {
				seqs[i].Pos++
			}
		}
		return all
	}
	plain := opt
	plain.KVFP8, plain.WeightsFP8 = false, false
	want, got := run(plain), run(opt)
	var errs []float64
	equal, in5 := 0, 0
	for i := range want {
		errs = append(errs, relative(got[i], want[i]))
		best := argmax(want[i])
		if argmax(got[i]) == best {
			equal++
		}
		higher := 0
		for _, v := range got[i] {
			if v > got[i][best] {
				higher++
			}
		}
		if higher < 5 {
			in5++
		}
	}
	slices.Sort(errs)
	result(prefix+"logits_error", "relative 2-norm", errs[len(errs)/2], errs, nil)
	share := float64(equal) / float64(len(want))
	result(prefix+"top1_agreement", "share", share, []float64{share}, nil)
	fmt.Printf("QUALITY %d logit vectors, worst error %.4f, top-1 equal %d, bf16's top-1 among the first five %d\n", len(want), errs[len(errs)-1], equal, in5)
}
