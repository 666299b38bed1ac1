//go:build cuda && cgo && linux

package cuda_test

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cuda"
)

// ends runs tokens through b in chunks, with others beside them, and returns
// the logits by the position after which they came.
func ends(t *testing.T, b kernels.Backend, tokens []int32, chunks []int, beside int) map[int][]float32 {
	t.Helper()
	at := map[int][]float32{}
	pos := 0
	for i, l := range forced(t, b, tokens, chunks, beside) {
		pos = min(pos+chunks[i%len(chunks)], len(tokens))
		at[pos] = l
	}
	return at
}

// With BatchInvariant the logits after a position have the same bits whatever
// the batch, the chunks and the phase, as graphs and launched one by one, by the
// kernels of each head_dim; and they are as near to the CPU's as others.
func TestBatchInvariant(t *testing.T) {
	const n = 2100
	decode := append([]int{1985}, slices.Repeat([]int{1}, n)...) // a prompt, and then one by one
	for _, name := range []string{"llama gqa4 128", "llama gqa8 128", "qwen2 gqa7 64", "qwen3 gqa2 128", "llama mha 64", "qwen3 gqa2 80", "gqa3 96", "llama gqa4 256x", "gqa17 64", "moe 4 of 4"} {
		t.Run(name, func(t *testing.T) {
			a := families()[name]
			w := randomWeights(a, 7)
			tokens := randomTokens(rand.New(rand.NewPCG(11, 1)), n, a.Vocab)
			opt := cuda.Options{Blocks: 340, MaxSeqs: 80, MaxTokens: 2300, BatchInvariant: true}
			b := open(t, a, w, opt)
			t.Log(b.Info().Numerics, "slow:", b.SlowProjections())
			want := ends(t, b, tokens, []int{16}, 0)
			compared := 0
			check := func(label string, b kernels.Backend, chunks []int, beside int) {
				t.Helper()
				same := 0
				for pos, l := range ends(t, b, tokens, chunks, beside) {
					if w, ok := want[pos]; ok {
						if same++; !sameBits(l, w) {
							t.Errorf("%s, %d beside: logits after %d tokens differ, by %.5f of their norm", label, beside, pos, relative(l, w))
							return
						}
					}
				}
				if same == 0 {
					t.Errorf("%s: nothing was compared", label)
				}
				compared += same
			}
			for _, beside := range []int{0, 6, 63} {
				check("chunks of 512", b, []int{512}, beside)
				check("chunks of 2048", b, []int{2048}, beside)
				check("decoding", b, decode, beside)
			}
			check("chunks of 16 in a batch", b, []int{16}, 63)
			check("odd chunks", b, []int{3, 29, 128, 127, 1, 64, 700}, 2)
			opt.NoGraphs, opt.NoPDL = true, true
			check("launched one by one", open(t, a, w, opt), []int{1008, 16, 1, 15}, 6)
			opt.BlockTokens, opt.Blocks = 64, 240
			check("blocks of 64", open(t, a, w, opt), []int{512}, 1)

			cached := make([]int32, 132) // the first 1024 rows are another sequence's, made in other chunks
			for i := range cached {
				cached[i] = int32(i)
			}
			for pos := 0; pos < 1024; pos += 256 {
				mustStep(t, b, kernels.Seq{Tokens: tokens[pos : pos+256], Pos: pos, Blocks: cached})
			}
			own := slices.Concat(cached[:64], []int32{200, 150, 201, 151})
			r := mustStep(t, b, kernels.Seq{Tokens: tokens[1024:1088], Pos: 1024, Blocks: own, WantLogits: true})
			if !sameBits(r[0].Logits, want[1088]) {
				t.Error("logits after a cached prefix differ")
			}

			short := tokens[:301]
			c := ends(t, openCPU(t, a, w, 64, 16), short, []int{16}, 0)
			worst := 0.0
			for pos := range c {
				if l, ok := want[pos]; ok {
					worst = max(worst, relative(l, c[pos]))
				}
			}
			if !(worst <= tolerance()) {
				t.Errorf("off by %.4f from the CPU's", worst)
			}
			t.Logf("%d logits equal to the bit; %.5f from the CPU's", compared, worst)
		})
	}
}

// Where cuBLASLt has no algorithm, gemm_any.cu serves: here for all projections. The
// same bits whatever the batch, the chunks and the phase, near to the CPU's, and one
// name however large steps may be.
func TestInvariantWithoutCuBLAS(t *testing.T) {
	const n = 1100
	for _, name := range []string{"llama gqa4 128", "qwen2 gqa7 64", "qwen3 gqa2 80"} {
		a := families()[name]
		w := randomWeights(a, 7)
		tokens := randomTokens(rand.New(rand.NewPCG(11, 1)), n, a.Vocab)
		opt := cuda.Options{Blocks: 220, MaxSeqs: 40, MaxTokens: 1100, BatchInvariant: true}.AnyGEMM()
		b := open(t, a, w, opt)
		if slow := b.SlowProjections(); len(slow) != 5 {
			t.Errorf("%s: only %v by gemm_any.cu", name, slow)
		}
		want := ends(t, b, tokens, []int{1}, 0)
		if len(want) != n {
			t.Fatalf("%s: logits at %d of %d positions", name, len(want), n)
		}
		for _, run := range []struct {
			chunks []int
			beside int
		}{{[]int{1024, 1, 1}, 6}, {[]int{3, 29, 128, 127, 1, 64, 300}, 2}, {[]int{65, 1, 7}, 30}, {[]int{n}, 0}} {
			for pos, l := range ends(t, b, tokens, run.chunks, run.beside) {
				if !sameBits(l, want[pos]) {
					t.Errorf("%s, chunks of %v, %d beside: logits after %d tokens differ, by %.5f of their norm", name, run.chunks, run.beside, pos, relative(l, want[pos]))
					break
				}
			}
		}
		for pos, l := range ends(t, openCPU(t, a, w, 64, 16), tokens[:200], []int{20}, 0) {
			if e := relative(want[pos], l); !(e <= tolerance()) {
				t.Errorf("%s: logits after %d tokens are off by %.4f", name, pos, e)
			}
		}
		opt.MaxSeqs, opt.MaxTokens = 3, 50
		if small := open(t, a, w, opt); small.Info().Numerics != b.Info().Numerics {
			t.Errorf("%s: %s with small steps, %s with large ones", name, small.Info().Numerics, b.Info().Numerics)
		}
	}
}

// A model of an 8B's widths with a small vocabulary, for whose head cuBLASLt splits K
// in every algorithm, starts and keeps its promise.
func TestInvariantSmallVocabulary(t *testing.T) {
	a := shape(2, 4096, 14336, 32, 8, 128, 512)
	tokens := randomTokens(rand.New(rand.NewPCG(11, 1)), 200, a.Vocab)
	b, err := cuda.NewRandom(a, 5, cuda.Options{Blocks: 64, MaxSeqs: 16, BatchInvariant: true, FP16: inFP16()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Close() })
	t.Log(b.Info().Numerics, "slow:", b.SlowProjections())
	want := ends(t, b, tokens, []int{1}, 0)
	for _, run := range []struct {
		chunks []int
		beside int
	}{{[]int{1}, 7}, {[]int{16}, 3}, {[]int{100, 1, 50}, 7}, {[]int{200}, 0}} {
		for pos, l := range ends(t, b, tokens, run.chunks, run.beside) {
			if !sameBits(l, want[pos]) {
				t.Errorf("chunks of %v, %d beside: logits after %d tokens differ, by %.5f of their norm", run.chunks, run.beside, pos, relative(l, want[pos]))
				break
			}
		}
	}
}

func TestInvariantRefused(t *testing.T) {
	a := families()["llama gqa4 128"]
	if _, err := cuda.New(a, randomWeights(a, 1), cuda.Options{Blocks: 4, BatchInvariant: true, Tune: true}); err == nil || !strings.Contains(err.Error(), "exclude") {
		t.Error(err)
	}
}

// Draws are the same, too: tokens of greedy and of seeded sequences, alone and in
// a batch.
func TestInvariantDraws(t *testing.T) {
	a := families()["llama gqa4 128"]
	b := open(t, a, randomWeights(a, 3), cuda.Options{Blocks: 300, MaxSeqs: 64, BatchInvariant: true})
	r := rand.New(rand.NewPCG(2, 2))
	prompts := make([][]int32, 64)
	for i := range prompts {
		prompts[i] = randomTokens(r, 5+i%30, a.Vocab)
	}
	run := func(who []int) (drawn [][]int32) {
		var seqs []kernels.Seq
		for slot, i := range who {
			s := kernels.Sample{Seed: uint64(i), Temperature: float32(i%2) * 0.9, TopP: 0.95, Repetition: 1, Logprobs: -1}
			q := kernels.Seq{Tokens: prompts[i], Samples: []kernels.Sample{s}}
			for j := range int32(4) {
				q.Blocks = append(q.Blocks, int32(slot)*4+j)
			}
			seqs = append(seqs, q)
		}
		drawn = make([][]int32, len(who))
		for range 20 {
			for j := range seqs {
				seqs[j].Samples[0].Position = seqs[j].Pos + len(seqs[j].Tokens)
			}
			for j, res := range mustStep(t, b, seqs...) {
				drawn[j] = append(drawn[j], res.Samples[0].Token)
				seqs[j].Pos += len(seqs[j].Tokens)
				seqs[j].Tokens = []int32{res.Samples[0].Token}
			}
		}
		return drawn
	}
	var all []int
	for i := range prompts {
		all = append(all, i)
	}
	together := run(all)
	for _, i := range []int{0, 1, 6, 31, 63} {
		if alone := run([]int{i})[0]; !slices.Equal(alone, together[i]) {
			t.Errorf("sequence %d drew\n%v alone,\n%v in a batch", i, alone, together[i])
		}
	}
}
