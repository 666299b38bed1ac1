package cpu_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cpu"
	"github.com/xpyd/xpyd/kernels/kerneltest"
)

var (
	randomWeights = kerneltest.Weights
	randomTokens  = kerneltest.Tokens
	mustStep      = kerneltest.Step
	sameBits      = kerneltest.SameBits
	digestsMatch  = kerneltest.DigestsMatch
)

// shape makes small architectures readable.
func shape(layers, hidden, ff, heads, kv, dim, vocab int) arch.Config {
	return arch.Config{
		ModelType: "llama", Layers: layers, Hidden: hidden, Intermediate: ff, Heads: heads, KVHeads: kv, HeadDim: dim,
		Vocab: vocab, MaxPositions: 640, NormEps: 1e-5, RopeTheta: 10000, TiedHead: true,
	}
}

func open(t testing.TB, a arch.Config, w kernels.Weights, opt cpu.Options) *cpu.Backend {
	t.Helper()
	b, err := cpu.New(a, w, opt)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Close() })
	return b
}

// families are architectures that together use every feature and head size.
func families() map[string]arch.Config {
	f := map[string]arch.Config{
		"llama mha 64":   shape(2, 128, 300, 2, 2, 64, 100),
		"llama gqa2 8":   shape(3, 64, 172, 8, 4, 8, 512),
		"llama gqa4 128": shape(2, 96, 200, 4, 1, 128, 77),
		"qwen2 gqa7 64":  shape(2, 112, 160, 14, 2, 64, 90),
		"qwen3 gqa2 80":  shape(2, 72, 144, 4, 2, 80, 64),
		"gqa3 96":        shape(1, 100, 90, 3, 1, 96, 65),
		"odd head 6":     shape(2, 36, 50, 6, 3, 6, 40),
		"head 20 norm":   shape(2, 40, 50, 4, 4, 20, 40),
		"mixtral 8":      shape(2, 64, 90, 4, 2, 16, 70),
		"gemma3 16":      shape(3, 64, 90, 4, 2, 16, 70),
		"gemma3 24":      shape(2, 48, 64, 4, 1, 24, 70),
		"qwen3 moe 33":   shape(2, 72, 50, 4, 2, 24, 64),
		"deepseek v2 32": shape(2, 64, 90, 6, 1, 24, 70),
		"deepseek v3 80": shape(3, 72, 50, 4, 1, 56, 64),
		"deepseek odd":   shape(2, 40, 50, 2, 1, 18, 40),
	}
	kerneltest.Features(f)
	kerneltest.Change(f, "qwen3 gqa2 80", func(a *arch.Config) { a.QKNorm, a.NormEps, a.RopeTheta = true, 1e-6, 1e6 })
	kerneltest.Change(f, "head 20 norm", func(a *arch.Config) { a.QKNorm, a.QKVBias = true, true })
	kerneltest.Change(f, "mixtral 8", func(a *arch.Config) {
		a.ModelType, a.Experts, a.ExpertsPerToken, a.ExpertWidth, a.NormExperts = "mixtral", 8, 2, 90, true
	})
	kerneltest.Change(f, "qwen3 moe 33", func(a *arch.Config) {
		a.ModelType, a.QKNorm, a.Experts, a.ExpertsPerToken, a.ExpertWidth = "qwen3_moe", true, 33, 5, 20
	})
	for name, window := range map[string]int{"gemma3 16": 9, "gemma3 24": 21} {
		kerneltest.Change(f, name, func(a *arch.Config) {
			a.ModelType, a.QKNorm, a.PostNorms, a.NormsFromOne = "gemma3_text", true, true, window == 9
			a.EmbedScale, a.Window, a.FullEvery, a.WindowTheta, a.ScoreScale = 8, window, 2, 300, 0.2
		})
	}
	kerneltest.Change(f, "deepseek v2 32", func(a *arch.Config) {
		a.ModelType, a.KVRank, a.NopeDim, a.RopeDim, a.ValueDim = "deepseek_v2", 32, 16, 8, 20
		a.DenseLayers, a.Experts, a.ExpertsPerToken, a.ExpertWidth, a.SharedExperts = 1, 12, 3, 20, 2
		a.Routing, a.ExpertGroups, a.TopGroups, a.RoutedScale = arch.SoftmaxTop, 4, 2, 4
	})
	kerneltest.Change(f, "deepseek v3 80", func(a *arch.Config) {
		a.ModelType, a.QRank, a.KVRank, a.NopeDim, a.RopeDim, a.ValueDim = "deepseek_v3", 40, 80, 40, 16, 36
		a.DenseLayers, a.Experts, a.ExpertsPerToken, a.ExpertWidth, a.SharedExperts = 1, 33, 5, 20, 1
		a.Routing, a.ExpertGroups, a.TopGroups, a.RoutedScale, a.NormExperts = arch.SigmoidBias, 3, 2, 2.5, true
		a.Rope = arch.RopeScaling{Kind: "yarn", Factor: 4, OriginalMaxPos: 64, MScale: 1, MScaleAllDim: 0.7}
		a.ScoreScale = 0.2
	})
	kerneltest.Change(f, "deepseek odd", func(a *arch.Config) { // dense, and no width fits a register
		a.ModelType, a.QRank, a.KVRank, a.NopeDim, a.RopeDim, a.ValueDim = "deepseek_v3", 13, 20, 12, 6, 10
	})
	kerneltest.Change(f, "gqa3 96", func(a *arch.Config) { a.Rope = arch.RopeScaling{Kind: "linear", Factor: 2} })
	return f
}

var simds = []string{"avx512", "avx2", "portable"}

// supported skips instruction sets that this machine lacks.
func supported(simd string) bool {
	a := shape(1, 16, 16, 1, 1, 8, 8)
	b, err := cpu.New(a, randomWeights(a, kernels.F32, 1), cpu.Options{Blocks: 1, SIMD: simd})
	if err != nil {
		return false
	}
	b.Close()
	return true
}

// run feeds tokens in the given chunks with a scrambled block table, other
// sequences beside it, and returns the logits after every token, the KV rows
// in order and the digests.
func run(t *testing.T, b *cpu.Backend, tokens []int32, chunks []int, beside int, seed uint64) (logits [][]float32, kv []byte, digests []uint64) {
	t.Helper()
	r := rand.New(rand.NewPCG(seed, 5))
	size := b.Layout().BlockTokens
	per := (len(tokens) + size - 1) / size
	perm := r.Perm(b.Blocks())
	table := make([]int32, per)
	for i := range table {
		table[i] = int32(perm[i])
	}
	free := perm[per:]
	pos := 0
	for i := 0; pos < len(tokens); i++ {
		n := min(chunks[i%len(chunks)], len(tokens)-pos)
		seqs := []kernels.Seq{{Tokens: tokens[pos : pos+n], Pos: pos, Blocks: table, WantLogits: true}}
		for j := range beside {
			m := 1 + r.IntN(3)
			o := kernels.Seq{Tokens: randomTokens(r, m, b.Arch().Vocab), Blocks: []int32{int32(free[3*j]), int32(free[3*j+1]), int32(free[3*j+2])}}
			if o.WantLogits = r.IntN(2) == 0; r.IntN(2) == 0 {
				seqs = append(seqs, o)
			} else {
				seqs = append([]kernels.Seq{o}, seqs...)
			}
		}
		for k, res := range mustStep(t, b, seqs...) {
			if &seqs[k].Blocks[0] == &table[0] {
				logits = append(logits, slices.Clone(res.Logits))
			}
		}
		pos += n
	}
	l := b.Layout()
	d := make([]uint64, l.Resolve()[0].Heads)
	for layer := range l.Layers() {
		for i, block := range table {
			n := min(size, len(tokens)-i*size)
			rows := make([]byte, l.Resolve()[0].PackedBytes(n))
			b.Gather(layer, block, 0, n, rows)
			kv = append(kv, rows...)
			b.Digest(layer, block, d)
			digests = append(digests, d...)
			want := make([]uint64, l.Resolve()[0].Heads)
			kernels.DigestRows(&l.Resolve()[layer], i*size, n, rows, want)
			if !slices.Equal(d, want) {
				t.Fatalf("layer %d block %d: stored digest %x, rows have %x", layer, i, d, want)
			}
		}
	}
	return logits, kv, digests
}

// The contract: the same bits whatever the instruction set, threads, chunks,
// batch and block size; and close to a float64 forward written independently.
func TestSameBits(t *testing.T) {
	for name, a := range families() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, dt := range []kernels.DType{kernels.F32, kernels.BF16, kernels.F16} {
				w := randomWeights(a, dt, 7)
				r := rand.New(rand.NewPCG(11, uint64(dt)))
				tokens := randomTokens(r, 37, a.Vocab)
				var want [][]float32
				var wantKV []byte
				check := func(label string, opt cpu.Options, chunks []int, beside int) {
					t.Helper()
					b := open(t, a, w, opt)
					logits, kv, _ := run(t, b, tokens, chunks, beside, uint64(len(label)))
					if want == nil {
						want, wantKV = logits, kv
						return
					}
					// Compare the logits at each chunk's end with the token-by-token run.
					pos := 0
					for i, l := range logits {
						pos = min(pos+chunks[i%len(chunks)], len(tokens))
						if !sameBits(l, want[pos-1]) {
							t.Fatalf("%v %s: logits after %d tokens differ", dt, label, pos)
						}
					}
					if opt.BlockTokens == 16 && !slices.Equal(kv, wantKV) {
						t.Fatalf("%v %s: KV rows differ", dt, label)
					}
				}
				check("first", cpu.Options{Blocks: 32, BlockTokens: 16, Threads: 1}, []int{1}, 0)
				reference(t, a, w, tokens, want)
				for _, simd := range simds {
					if !supported(simd) {
						continue
					}
					if simd == "portable" && dt == kernels.BF16 {
						continue // slow, and F16 takes the same path
					}
					check(simd+" whole", cpu.Options{Blocks: 32, BlockTokens: 16, Threads: 2, SIMD: simd}, []int{37}, 0)
					if simd == "portable" {
						continue
					}
					check(simd+" chunks", cpu.Options{Blocks: 32, BlockTokens: 16, Threads: 1, SIMD: simd}, []int{3, 14, 1, 7}, 3)
				}
				if dt != kernels.F32 {
					continue
				}
				for _, size := range []int{1, 3, 4, 16, 256} {
					check(fmt.Sprintf("block %d", size), cpu.Options{Blocks: 64, BlockTokens: size, Threads: 3}, []int{5, 1, 20}, 2)
				}
			}
		})
	}
}
