//go:build cuda && cgo && linux

package cuda_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cuda"
	"github.com/xpyd/xpyd/kvconn/convert"
)

// fp8Families are those whose rows FP8 takes.
func fp8Families() map[string]arch.Config {
	f := families()
	for name, a := range f {
		if a.HeadDim%16 != 0 {
			delete(f, name)
		}
	}
	return f
}

// inPool loads a prompt's rows out of a pool for a converter.
type inPool struct {
	b     *cuda.Backend
	table []int32
}

func (p inPool) Load(layer, index, firstPos, rows int, dst []byte, digests []uint64) error {
	p.b.Gather(layer, p.table[index], 0, rows, dst)
	p.b.Digest(layer, p.table[index], digests)
	return nil
}

// The first layer's rows of an FP8 pool are, to the bit and with their digests,
// what a bf16 pool's become when a sender converts them: however the prompt is
// cut, and when positions are computed again.
func TestKV8Rows(t *testing.T) {
	for name, a := range fp8Families() {
		for _, size := range []int{16, 64} {
			t.Run(fmt.Sprintf("%s by %d", name, size), func(t *testing.T) {
				w := randomWeights(a, 7)
				const n = 150
				tokens := randomTokens(rand.New(rand.NewPCG(11, 1)), n, a.Vocab)
				opt := cuda.Options{BlockTokens: size, Blocks: 24}
				b := open(t, a, w, opt)
				opt.KVFP8 = true
				q := open(t, a, w, opt)
				tables := [2][]int32{table(rand.New(rand.NewPCG(1, 1)), b, (n+size-1)/size), table(rand.New(rand.NewPCG(2, 1)), q, (n+size-1)/size)}
				step := func(pos, count int) {
					part := tokens[pos : pos+count]
					mustStep(t, b, kernels.Seq{Tokens: part, Pos: pos, Blocks: tables[0]})
					mustStep(t, q, kernels.Seq{Tokens: part, Pos: pos, Blocks: tables[1]})
				}
				for pos := 0; pos < n; {
					count := min([]int{1, 31, 7, 1, 60}[pos%5], n-pos)
					step(pos, count)
					pos += count
				}
				step(n-1, 1)   // again
				step(n-20, 20) // and more of it
				converted, err := convert.New(inPool{b, tables[0]}, b.Layout(), q.Layout(), kernels.DigestPart)
				if err != nil {
					t.Fatal(err)
				}
				for i, block := range tables[1] {
					rows := min(size, n-i*size)
					want, got := make([]byte, q.Layout().Resolve()[0].PackedBytes(rows)), make([]byte, q.Layout().Resolve()[0].PackedBytes(rows))
					sums, stored := make([]uint64, a.KVHeads), make([]uint64, a.KVHeads)
					if err := converted.Load(0, i, i*size, rows, want, sums); err != nil {
						t.Fatal(err)
					}
					q.Gather(0, block, 0, rows, got)
					q.Digest(0, block, stored)
					if !slices.Equal(got, want) || !slices.Equal(stored, sums) {
						t.Fatalf("block %d: rows equal %t, digests equal %t", i, slices.Equal(got, want), slices.Equal(stored, sums))
					}
					digestsMatch(t, q, block, i*size, rows)
				}
			})
		}
	}
}

// kv8Tolerance bounds what FP8 KV adds to the logits' error of these small random
// models. E4M3 rounds by up to 6 %, by 2.6 % on average.
const kv8Tolerance = 0.06

// Logits of an FP8 pool beside those of a bf16 pool and the CPU's, teacher-forced:
// token by token (attention reads FP8), whole (it reads widened blocks), in
// chunks beside other sequences, on every attention kernel.
func TestKV8Logits(t *testing.T) {
	const n = 301
	for name, a := range fp8Families() {
		t.Run(name, func(t *testing.T) {
			w := randomWeights(a, 7)
			tokens := randomTokens(rand.New(rand.NewPCG(11, 1)), n, a.Vocab)
			want := forced(t, openCPU(t, a, w, 64, 16), tokens, []int{1}, 0)
			for _, run := range []struct {
				label  string
				size   int
				chunks []int
				beside int
			}{{"one by one", 16, []int{1}, 0}, {"one by one, blocks of 256", 256, []int{1}, 0}, {"chunks", 16, []int{3, 14, 1, 7, 100, 17}, 4}, {"whole", 48, []int{n}, 5}} {
				opt := cuda.Options{BlockTokens: run.size, Blocks: 3*run.beside + 4 + n/run.size}
				plain := forced(t, open(t, a, w, opt), tokens, run.chunks, run.beside)
				opt.KVFP8 = true
				got := forced(t, open(t, a, w, opt), tokens, run.chunks, run.beside)
				var sums [3]float64
				top1 := [2]int{}
				for i, pos := 0, 0; i < len(got); i++ {
					pos = min(pos+run.chunks[i%len(run.chunks)], n)
					e := relative(got[i], plain[i])
					if !(e <= kv8Tolerance) {
						t.Fatalf("%s: logits after %d tokens are off by %.4f", run.label, pos, e)
					}
					sums[0], sums[1], sums[2] = sums[0]+e, sums[1]+relative(got[i], want[pos-1]), sums[2]+relative(plain[i], want[pos-1])
					for j, other := range [][]float32{plain[i], want[pos-1]} {
						if argmax(got[i]) == argmax(other) {
							top1[j]++
						}
					}
				}
				k := float64(len(got))
				t.Logf("%s: from bf16 KV %.5f, from the CPU %.5f (bf16 KV %.5f) on average; top-1 equal to bf16's %d, to the CPU's %d of %d", run.label, sums[0]/k, sums[1]/k, sums[2]/k, top1[0], top1[1], len(got))
			}
		})
	}
}

// Long contexts split the KV; a batch of unequal lengths shares a launch, as a
// graph and launched one by one.
func TestKV8DecodeLengths(t *testing.T) {
	for _, name := range []string{"llama gqa4 128", "qwen2 gqa7 64", "qwen3 gqa2 80"} {
		a := families()[name]
		w := randomWeights(a, 3)
		lengths := []int{1, 15, 16, 17, 255, 256, 257, 1023, 2048, 3001}
		var all [3][]kernels.Result
		for k, opt := range []cuda.Options{{Blocks: 900}, {Blocks: 900, KVFP8: true}, {Blocks: 900, KVFP8: true, NoGraphs: true}} {
			b := open(t, a, w, opt)
			r := rand.New(rand.NewPCG(1, 1))
			perm := table(r, b, b.Blocks())
			var next []kernels.Seq
			for _, n := range lengths {
				var mine []int32
				mine, perm = perm[:(n+16)/16], perm[(n+16)/16:]
				tokens := randomTokens(r, n, a.Vocab)
				for pos := 0; pos < n; pos += 700 {
					mustStep(t, b, kernels.Seq{Tokens: tokens[pos:min(pos+700, n)], Pos: pos, Blocks: mine})
				}
				next = append(next, kernels.Seq{Tokens: []int32{int32(n % a.Vocab)}, Pos: n, Blocks: mine, WantLogits: true})
			}
			for _, res := range mustStep(t, b, next...) {
				all[k] = append(all[k], kernels.Result{Logits: slices.Clone(res.Logits)})
			}
		}
		for i, n := range lengths {
			if e := relative(all[1][i].Logits, all[0][i].Logits); !(e <= kv8Tolerance) {
				t.Errorf("%s, length %d: off by %.4f", name, n, e)
			}
			if e := relative(all[2][i].Logits, all[1][i].Logits); !(e <= 0.01) { // a graph's padded batch has other splits
				t.Errorf("%s, length %d: without graphs off by %.4f", name, n, e)
			}
		}
	}
}

// Rows move with their scales: in parts, as copies, and a pool takes up where
// another left off.
func TestKV8Pool(t *testing.T) {
	a := families()["llama gqa4 128"]
	w := randomWeights(a, 1)
	b := open(t, a, w, cuda.Options{Blocks: 8, KVFP8: true})
	l := b.Layout()
	r := rand.New(rand.NewPCG(1, 2))
	tokens := randomTokens(r, 16, a.Vocab)
	mustStep(t, b, kernels.Seq{Tokens: tokens, Blocks: []int32{3}})
	whole, part, back, d := make([]byte, l.Resolve()[0].BlockBytes()), make([]byte, l.Resolve()[0].PackedBytes(5)), make([]byte, l.Resolve()[0].BlockBytes()), make([]uint64, l.Resolve()[0].Heads)
	for layer := range l.Layers() {
		b.Gather(layer, 3, 0, 16, whole)
		b.Scatter(layer, 6, 0, 16, whole)
		b.Gather(layer, 3, 4, 5, part)
		b.Scatter(layer, 6, 4, 5, part)
		b.Digest(layer, 3, d)
		b.SetDigest(layer, 6, 16, d)
		if b.Gather(layer, 6, 0, 16, back); !slices.Equal(back, whole) {
			t.Fatalf("layer %d: rows changed on the way", layer)
		}
		for kv := range 2 {
			for h := range l.Resolve()[0].Heads {
				rows, scales := l.Resolve()[0].Part(whole, 16, kv, h)
				some, few := l.Resolve()[0].Part(part, 5, kv, h)
				if !slices.Equal(some, rows[4*l.Resolve()[0].RowBytes(0):9*l.Resolve()[0].RowBytes(0)]) || !slices.Equal(few, scales[4*4:9*4]) {
					t.Fatalf("layer %d: rows 4..8 of (%d,%d) differ", layer, kv, h)
				}
			}
		}
	}
	b.CopyBlock(1, 6, 0, 16)
	b.CopyBlock(2, 6, 0, 7)
	digestsMatch(t, b, 1, 0, 16)
	digestsMatch(t, b, 2, 0, 7)
	mustStep(t, b, kernels.Seq{Tokens: tokens[7:10], Pos: 7, Blocks: []int32{2}})
	digestsMatch(t, b, 2, 0, 10)
	next := func(block int32) []float32 {
		res := mustStep(t, b, kernels.Seq{Tokens: []int32{5}, Pos: 9, Blocks: []int32{block}, WantLogits: true})
		return slices.Clone(res[0].Logits)
	}
	if x, y := next(2), next(6); relative(x, y) > 0.01 { // rows 7 and 8 were computed in another chunk
		t.Errorf("a copied prefix gives other logits: %.4f", relative(x, y))
	}
}
