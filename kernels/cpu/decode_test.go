package cpu_test

import (
	"fmt"
	"testing"

	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cpu"
)

// Shapes of the figures: stories260K, and random weights in the shapes of
// stories15M and stories110M (tied heads, as llama2.c has them).
func benchShape(name string) (a arch.Config, context int) {
	switch name {
	case "260k":
		return shape(5, 64, 172, 8, 4, 8, 512), 256
	case "15m":
		return shape(6, 288, 768, 6, 6, 48, 32000), 256
	}
	return shape(12, 768, 2048, 12, 12, 64, 32000), 128
}

// BenchmarkDecode measures whole greedy decode steps with paged KV and digests:
// every sequence runs from position 0 to the context and starts again. The
// llama2.c equivalent is `run MODEL.bin -t 0 -n CONTEXT`.
func BenchmarkDecode(b *testing.B) {
	for _, name := range []string{"260k", "15m", "110m"} {
		a, context := benchShape(name)
		var w kernels.Weights
		for _, dt := range []kernels.DType{kernels.F32, kernels.BF16} {
			made := false
			for _, threads := range []int{1, 2} {
				for _, batch := range []int{1, 8} {
					b.Run(fmt.Sprintf("%s/%v/threads=%d/batch=%d", name, dt, threads, batch), func(b *testing.B) {
						if !made {
							w, made = randomWeights(a, dt, 1), true
						}
						benchDecode(b, open(b, a, w, cpu.Options{Blocks: 8 * 32, Threads: threads}), batch, context)
					})
				}
			}
		}
	}
}

func benchDecode(b *testing.B, be *cpu.Backend, batch, context int) {
	step := kernels.Step{Seqs: make([]kernels.Seq, batch)}
	samples := make([]kernels.Sample, batch)
	tokens := make([]int32, batch)
	for i := range step.Seqs {
		samples[i] = kernels.Sample{TopP: 1, Repetition: 1, Logprobs: -1}
		blocks := make([]int32, (context+15)/16)
		for j := range blocks {
			blocks[j] = int32(i*len(blocks) + j)
		}
		step.Seqs[i] = kernels.Seq{Tokens: tokens[i : i+1], Blocks: blocks, Samples: samples[i : i+1]}
	}
	pos := 0
	b.ReportAllocs()
	b.ResetTimer()
	for b.Loop() {
		for i := range step.Seqs {
			step.Seqs[i].Pos, samples[i].Position = pos, pos+1
		}
		res, err := be.Step(&step)
		if err != nil {
			b.Fatal(err)
		}
		for i, r := range res {
			tokens[i] = r.Samples[0].Token
		}
		if pos++; pos == context {
			pos = 0
		}
	}
	b.ReportMetric(float64(b.N*batch)/b.Elapsed().Seconds(), "tok/s")
}

// BenchmarkPrefill measures one 256-token prompt in one step.
func BenchmarkPrefill(b *testing.B) {
	for _, name := range []string{"260k", "15m"} {
		a, _ := benchShape(name)
		w := randomWeights(a, kernels.F32, 1)
		for _, threads := range []int{1, 2} {
			b.Run(fmt.Sprintf("%s/threads=%d", name, threads), func(b *testing.B) {
				be := open(b, a, w, cpu.Options{Blocks: 16, Threads: threads})
				seq := kernels.Seq{Tokens: make([]int32, 256), Samples: []kernels.Sample{{TopP: 1, Repetition: 1, Logprobs: -1}}}
				for i := range 16 {
					seq.Blocks = append(seq.Blocks, int32(i))
				}
				step := kernels.Step{Seqs: []kernels.Seq{seq}}
				for b.Loop() {
					if _, err := be.Step(&step); err != nil {
						b.Fatal(err)
					}
				}
				b.ReportMetric(float64(b.N*256)/b.Elapsed().Seconds(), "tok/s")
			})
		}
	}
}
