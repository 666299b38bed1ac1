//go:build cuda && cgo && linux

package cuda_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cuda"
)

// forced runs tokens through b in chunks with other sequences beside it and
// returns the logits at each chunk's end.
func forced(t *testing.T, b kernels.Backend, tokens []int32, chunks []int, beside int) (logits [][]float32) {
	t.Helper()
	r := rand.New(rand.NewPCG(4, 5))
	size := b.Layout().BlockTokens
	per := (len(tokens) + size - 1) / size
	perm := table(r, b, b.Blocks())
	mine, free := perm[:per], perm[per:]
	for i, pos := 0, 0; pos < len(tokens); i++ {
		n := min(chunks[i%len(chunks)], len(tokens)-pos)
		seqs := []kernels.Seq{{Tokens: tokens[pos : pos+n], Pos: pos, Blocks: mine, WantLogits: true}}
		for j := range beside {
			m := min(1+r.IntN(3), size*3)
			o := kernels.Seq{Tokens: randomTokens(r, m, b.Arch().Vocab), Blocks: free[3*j : 3*j+3], WantLogits: r.IntN(2) == 0}
			seqs = slices.Insert(seqs, r.IntN(2)*len(seqs), o)
		}
		for k, res := range mustStep(t, b, seqs...) {
			if &seqs[k].Blocks[0] == &mine[0] {
				logits = append(logits, slices.Clone(res.Logits))
			}
		}
		pos += n
	}
	for i, block := range mine {
		digestsMatch(t, b, block, i*size, min(size, len(tokens)-i*size))
	}
	return logits
}

func TestLogits(t *testing.T) {
	const n = 301
	for name, a := range families() {
		t.Run(name, func(t *testing.T) {
			w := randomWeights(a, 7)
			tokens := randomTokens(rand.New(rand.NewPCG(11, 1)), n, a.Vocab)
			want := forced(t, openCPU(t, a, w, 64, 16), tokens, []int{1}, 0)
			worst, top1, of := 0.0, 0, 0
			check := func(label string, opt cuda.Options, chunks []int, beside int) {
				t.Helper()
				opt.Blocks = 3*beside + 4 + n/max(opt.BlockTokens, 1)
				got := forced(t, open(t, a, w, opt), tokens, chunks, beside)
				for i, pos := 0, 0; i < len(got); i++ {
					pos = min(pos+chunks[i%len(chunks)], n)
					e := relative(got[i], want[pos-1])
					if !(e <= tolerance()) {
						t.Fatalf("%s: logits after %d tokens are off by %.4f", label, pos, e)
					}
					worst = max(worst, e)
					of++
					if argmax(got[i]) == argmax(want[pos-1]) {
						top1++
					}
				}
			}
			for _, size := range []int{1, 4, 16, 256} {
				check(fmt.Sprintf("block %d, one by one", size), cuda.Options{BlockTokens: size}, []int{1}, 0)
				check(fmt.Sprintf("block %d, chunks", size), cuda.Options{BlockTokens: size}, []int{3, 14, 1, 7, 100, 17}, 4)
				check(fmt.Sprintf("block %d, whole", size), cuda.Options{BlockTokens: size}, []int{n}, 9)
			}
			check("eager", cuda.Options{BlockTokens: 16, NoGraphs: true, NoPDL: true}, []int{1, 2, 31}, 2)
			check("odd block", cuda.Options{BlockTokens: 7}, []int{129, 1, 1, 64}, 1)
			t.Logf("worst relative error %.5f, top-1 equal %d of %d", worst, top1, of)
		})
	}
}

func argmax(x []float32) int {
	best := 0
	for i, v := range x {
		if v > x[best] {
			best = i
		}
	}
	return best
}

// One and the same step gives the same bits, as a graph or launched one by
// one, with dependent launches or without.
func TestRunsAreEqual(t *testing.T) {
	a := families()["llama gqa4 128"]
	w := randomWeights(a, 3)
	tokens := randomTokens(rand.New(rand.NewPCG(1, 1)), 200, a.Vocab)
	var want [][]float32
	for i, opt := range []cuda.Options{{}, {}, {NoGraphs: true}, {NoPDL: true}, {NoGraphs: true, NoPDL: true}} {
		got := forced(t, open(t, a, w, opt), tokens, []int{64, 1, 1, 1, 9}, 0)
		if want == nil {
			want = got
		}
		for j := range want {
			if !sameBits(got[j], want[j]) {
				t.Fatalf("variant %d: logits of chunk %d differ", i, j)
			}
		}
	}
}

// Long contexts split the KV; a batch of unequal lengths shares a launch.
func TestDecodeLengths(t *testing.T) {
	a := families()["llama gqa4 128"]
	w := randomWeights(a, 3)
	b, c := open(t, a, w, cuda.Options{Blocks: 900}), openCPU(t, a, w, 900, 16)
	r := rand.New(rand.NewPCG(1, 1))
	lengths := []int{1, 15, 16, 17, 255, 256, 257, 1023, 2048, 3001}
	perm := table(r, b, b.Blocks())
	var next []kernels.Seq
	for _, n := range lengths {
		blocks := (n + 16) / 16
		var mine []int32
		mine, perm = perm[:blocks], perm[blocks:]
		tokens := randomTokens(r, n, a.Vocab)
		for pos := 0; pos < n; pos += 700 {
			s := kernels.Seq{Tokens: tokens[pos:min(pos+700, n)], Pos: pos, Blocks: mine}
			mustStep(t, b, s)
			mustStep(t, c, s)
		}
		next = append(next, kernels.Seq{Tokens: []int32{int32(n % a.Vocab)}, Pos: n, Blocks: mine, WantLogits: true})
	}
	got, want := mustStep(t, b, next...), mustStep(t, c, next...)
	for i := range next {
		if e := relative(got[i].Logits, want[i].Logits); !(e <= tolerance()) {
			t.Errorf("length %d: off by %.4f", lengths[i], e)
		}
	}
}

// Short chunks after long prefixes are done in parts, the heads of a group
// together: as the CPU has them, and the same on every run.
func TestShortChunks(t *testing.T) {
	chunks := []int{1400, 1100, 16, 3, 100, 31, 2, 64}
	for _, name := range []string{"llama gqa4 128", "qwen2 gqa7 64", "qwen3 gqa2 80", "llama gqa4 256x"} {
		t.Run(name, func(t *testing.T) {
			a := families()[name]
			w := randomWeights(a, 5)
			tokens := randomTokens(rand.New(rand.NewPCG(6, 1)), 2716, a.Vocab)
			opt := cuda.Options{Blocks: 180, MaxTokens: 1500}
			got, again := forced(t, open(t, a, w, opt), tokens, chunks, 1), forced(t, open(t, a, w, opt), tokens, chunks, 1)
			want := forced(t, openCPU(t, a, w, 180, 16), tokens, chunks, 1)
			for i := range want {
				if e := relative(got[i], want[i]); !(e <= tolerance()) {
					t.Errorf("logits of chunk %d are off by %.4f", i, e)
				}
				if !sameBits(got[i], again[i]) {
					t.Errorf("logits of chunk %d differ between runs", i)
				}
			}
		})
	}
}

// Decode attention runs beside prefill attention, and the last layer has the rows
// alone whose logits are wanted: every run has the bits of kernels that run one by one.
func TestMixedSteps(t *testing.T) {
	a := families()["llama gqa4 128"]
	w := randomWeights(a, 3)
	var want [][]float32
	for _, noPDL := range []bool{true, false} {
		b := open(t, a, w, cuda.Options{Blocks: 1200, MaxSeqs: 64, NoPDL: noPDL})
		r := rand.New(rand.NewPCG(9, 1))
		free := table(r, b, b.Blocks())
		var seqs []kernels.Seq
		add := func(pos, n int, wanted bool) {
			tokens, blocks := randomTokens(r, pos+n, a.Vocab), (pos+n+15)/16
			s := kernels.Seq{Tokens: tokens[pos:], Pos: pos, Blocks: free[:blocks], WantLogits: wanted}
			free = free[blocks:]
			mustStep(t, b, kernels.Seq{Tokens: tokens[:pos], Blocks: s.Blocks})
			seqs = append(seqs, s)
		}
		for i := range 40 {
			add(100+9*i, 1, i%5 != 0)
		}
		add(1500, 448, true)
		add(130, 70, false)
		for run := range 5 {
			for i, res := range mustStep(t, b, seqs...) {
				if len(want) < len(seqs) {
					want = append(want, slices.Clone(res.Logits))
				} else if !sameBits(res.Logits, want[i]) {
					t.Fatalf("no dependent launches %v, run %d: logits of sequence %d differ, by %.5f", noPDL, run, i, relative(res.Logits, want[i]))
				}
			}
		}
	}
}

// OnLayer comes in order, and what it promises is in the pool already while
// later layers run.
func TestOnLayer(t *testing.T) {
	a := families()["llama gqa4 128"]
	b := open(t, a, randomWeights(a, 3), cuda.Options{})
	tokens := randomTokens(rand.New(rand.NewPCG(1, 1)), 64, a.Vocab)
	l := b.Layout()
	var order []int
	var wg sync.WaitGroup
	early := make([][]byte, a.Layers)
	st := &kernels.Step{Seqs: []kernels.Seq{{Tokens: tokens, Blocks: []int32{5, 2, 9, 1}}}}
	st.OnLayer = func(layer int) {
		order = append(order, layer)
		wg.Go(func() {
			early[layer] = make([]byte, l.Resolve()[0].BlockBytes())
			b.Gather(layer, 9, 0, 16, early[layer])
		})
	}
	if _, err := b.Step(st); err != nil {
		t.Fatal(err)
	}
	wg.Wait()
	late := make([]byte, l.Resolve()[0].BlockBytes())
	for layer := range a.Layers {
		if b.Gather(layer, 9, 0, 16, late); order[layer] != layer || !slices.Equal(early[layer], late) {
			t.Errorf("layer %d: called as %d, rows differ from the final ones", layer, order[layer])
		}
	}
	for i, block := range []int32{5, 2, 9, 1} {
		digestsMatch(t, b, block, i*16, 16)
	}
}
