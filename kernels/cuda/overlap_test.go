//go:build cuda && cgo && linux

package cuda_test

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cuda"
)

// Steps that overlap, each drawing on what the one before it drew, give the
// tokens and log probabilities of steps that wait for each other: as graphs and
// launched one by one, with a sequence that leaves and one that joins.
func TestOverlapEqualsSteps(t *testing.T) {
	a := families()["llama gqa4 128"]
	w := randomWeights(a, 3)
	for _, opt := range []cuda.Options{{}, {NoGraphs: true}} {
		overlapEqualsSteps(t, open(t, a, w, opt), fmt.Sprintf("%+v", opt))
	}
}

func overlapEqualsSteps(t *testing.T, b launcher, label string) {
	const steps = 40
	a := b.Arch()
	r := rand.New(rand.NewPCG(1, 1))
	perm := table(r, b, b.Blocks())
	prompts := make([][]int32, 5)
	for i := range prompts {
		prompts[i] = randomTokens(r, 3+17*i%40, a.Vocab)
	}
	// seq is sequence i at the given step; the first of them leaves at 20, the
	// last joins at 10.
	in := func(i, step int) bool { return !(i == 0 && step >= 20) && !(i == 4 && step < 10) }
	seq := func(i, step int) kernels.Seq {
		pos := len(prompts[i]) + step
		return kernels.Seq{Pos: pos, Blocks: perm[8*i : 8*i+8], Samples: []kernels.Sample{
			{Seed: uint64(i), Position: pos + 1, Temperature: float32(i % 2), TopP: 0.9, Repetition: 1, Logprobs: 2 * (i % 3)}}}
	}
	fill := func() {
		for i, p := range prompts {
			mustStep(t, b, kernels.Seq{Tokens: p, Blocks: perm[8*i : 8*i+8]})
		}
	}
	type drawn struct {
		token int32
		top   []kernels.TokenLogprob
	}
	keep := func(list []drawn, s kernels.Sampled) []drawn {
		return append(list, drawn{s.Token, append(slices.Clone(s.Top), s.Self)})
	}
	var want, got [5][]drawn
	fill()
	for step := range steps {
		var seqs []kernels.Seq
		var who []int
		for i := range prompts {
			if !in(i, step) {
				continue
			}
			q := seq(i, step)
			q.Tokens = []int32{int32(i)}
			if n := len(want[i]); n > 0 {
				q.Tokens[0] = want[i][n-1].token
			}
			seqs, who = append(seqs, q), append(who, i)
		}
		for j, res := range mustStep(t, b, seqs...) {
			want[who[j]] = keep(want[who[j]], res.Samples[0])
		}
	}
	fill()
	var who, before []int
	for step := range steps + 1 {
		var seqs []kernels.Seq
		before, who = who, nil
		for i := range prompts {
			if step == steps || !in(i, step) {
				continue
			}
			q := seq(i, step)
			q.Tokens = []int32{int32(i)}
			if j := slices.Index(before, i); j >= 0 {
				q.Tokens[0], q.After = 0, j+1
			}
			seqs, who = append(seqs, q), append(who, i)
		}
		if step < steps {
			mustLaunch(t, b, seqs...)
		}
		if step > 0 {
			for j, res := range mustAwait(t, b) {
				got[before[j]] = keep(got[before[j]], res.Samples[0])
			}
		}
	}
	for i := range want {
		if !slices.EqualFunc(got[i], want[i], func(x, y drawn) bool { return x.token == y.token && slices.Equal(x.top, y.top) }) {
			t.Errorf("%s: sequence %d drew\n%v overlapping,\n%v one by one", label, i, got[i], want[i])
		}
	}
}

// Chunks of a prompt that overlap, with OnLayer, leave the same rows and digests as
// chunks that do not; each layer is reported when it is complete.
func TestOverlappingChunks(t *testing.T) {
	a := families()["llama gqa4 128"]
	overlappingChunks(t, open(t, a, randomWeights(a, 3), cuda.Options{}))
}

func overlappingChunks(t *testing.T, b launcher) {
	tokens := randomTokens(rand.New(rand.NewPCG(1, 1)), 128, b.Arch().Vocab)
	l := b.Layout()
	first, second := []int32{5, 2, 9, 1, 30, 31, 32, 33}, []int32{40, 41, 42, 43, 44, 45, 46, 47}
	for pos := 0; pos < 128; pos += 32 {
		mustStep(t, b, kernels.Seq{Tokens: tokens[pos : pos+32], Pos: pos, Blocks: first})
	}
	rows := func(layer int, block int32) []byte {
		dst := make([]byte, l.Resolve()[0].BlockBytes())
		b.Gather(layer, block, 0, 16, dst)
		return dst
	}
	for pos := 0; pos <= 128; pos += 32 {
		if pos < 128 {
			st := &kernels.Step{Seqs: []kernels.Seq{{Tokens: tokens[pos : pos+32], Pos: pos, Blocks: second}}}
			st.OnLayer = func(layer int) {
				for i := pos / 16; i < pos/16+2; i++ {
					if !slices.Equal(rows(layer, second[i]), rows(layer, first[i])) {
						t.Errorf("layer %d block %d: rows are not there when OnLayer says so", layer, i)
					}
				}
			}
			if err := b.Launch(st); err != nil {
				t.Fatal(err)
			}
		}
		if pos > 0 {
			mustAwait(t, b)
		}
	}
	for i, block := range second {
		digestsMatch(t, b, block, i*16, 16)
	}
}

// What cannot be done is refused, and nothing is launched.
func TestLaunchRefused(t *testing.T) {
	a := families()["llama mha 64"]
	b := open(t, a, randomWeights(a, 3), cuda.Options{})
	one := kernels.Seq{Tokens: []int32{1}, Blocks: []int32{3}, Samples: []kernels.Sample{{TopP: 1, Repetition: 1, Logprobs: -1}}}
	refused := func(what string, seqs ...kernels.Seq) {
		t.Helper()
		if err := b.Launch(&kernels.Step{Seqs: seqs}); err == nil {
			t.Errorf("%s: launched", what)
		}
	}
	after := one
	after.After = 1
	refused("after no step", after)
	mustLaunch(t, b, one)
	after.After = 2
	refused("after a draw that is none", after)
	after.After, after.Tokens = 1, []int32{0, 0}
	refused("two tokens after a draw", after)
	wants := one
	wants.WantLogits = true
	refused("logits beside another step", wants)
	mustLaunch(t, b, one)
	refused("a third step", one)
	if _, err := b.Step(&kernels.Step{Seqs: []kernels.Seq{one}}); err == nil {
		t.Error("Step ran with two steps under way")
	}
	mustAwait(t, b)
	mustAwait(t, b)
	if _, err := b.Await(); err == nil {
		t.Error("a step was awaited that was never launched")
	}
	mustStep(t, b, one)
}

// Appends read their segments before the kernel before them has ended: steps of ever
// other shapes, two under way, leave the rows and digests of kernels that run one by one.
func TestAppendsOfChangingSteps(t *testing.T) {
	const blocks = 96
	for _, name := range []string{"llama gqa2 8", "llama gqa4 128"} {
		a := families()[name]
		w := randomWeights(a, 3)
		var want [][]byte
		for _, noPDL := range []bool{true, false} {
			b := open(t, a, w, cuda.Options{Blocks: blocks, MaxTokens: 16 * blocks, NoPDL: noPDL})
			l, r := b.Layout(), rand.New(rand.NewPCG(3, 1))
			mustStep(t, b, kernels.Seq{Tokens: randomTokens(r, 16*blocks, a.Vocab), Blocks: table(r, b, blocks)}) // every row has a value
			for i := range 300 {
				free := table(r, b, blocks)
				var seqs []kernels.Seq
				for range 1 + r.IntN(6) {
					most := 1 + r.IntN(4)
					n := 1 + r.IntN(16*most)
					if i%3 == 0 {
						n = 1
					}
					if i%60 == 59 { // one long chunk
						most, n = blocks, 16*blocks-r.IntN(400)
					}
					seqs = append(seqs, kernels.Seq{Tokens: randomTokens(r, n, a.Vocab), Pos: r.IntN(16*most - n + 1), Blocks: free[:most]})
					if free = free[most:]; len(free) == 0 {
						break
					}
				}
				if mustLaunch(t, b, seqs...); i > 0 {
					mustAwait(t, b)
				}
			}
			mustAwait(t, b)
			for layer := range l.Layers() {
				for block := range int32(blocks) {
					rows, digests := make([]byte, l.Resolve()[0].BlockBytes()), make([]uint64, l.Resolve()[0].Heads)
					b.Gather(layer, block, 0, 16, rows)
					b.Digest(layer, block, digests)
					for _, d := range digests {
						rows = binary.LittleEndian.AppendUint64(rows, d)
					}
					if noPDL {
						want = append(want, rows)
					} else if !slices.Equal(rows, want[layer*blocks+int(block)]) {
						t.Fatalf("%s: layer %d, block %d: rows or digests differ", name, layer, block)
					}
				}
			}
		}
	}
}
