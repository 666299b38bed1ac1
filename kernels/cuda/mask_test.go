//go:build cuda && cgo && linux

package cuda_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cuda"
)

// randomMask allows few tokens or most, one of the last word too.
func randomMask(r *rand.Rand, vocab int, few bool) []uint32 {
	m := make([]uint32, kernels.MaskWords(vocab))
	allow(m, int32(vocab-1-r.IntN(min(vocab, 20))))
	for id := range vocab {
		if few && r.IntN(vocab) < 7 || !few && r.IntN(20) > 0 {
			allow(m, int32(id))
		}
	}
	return m
}

func allow(m []uint32, ids ...int32) []uint32 {
	for _, id := range ids {
		m[id/32] |= 1 << (id % 32)
	}
	return m
}

func masked(vocab int, ids ...int32) []uint32 {
	return allow(make([]uint32, kernels.MaskWords(vocab)), ids...)
}

// What a mask forbids is never drawn, whatever the logits; what it allows is drawn as the CPU draws
// it, to the edges: one token, none, and logits that are no numbers.
func TestMaskEdges(t *testing.T) {
	for _, vocab := range []int{5, 33, 512, 32003, 128256} {
		a := shape(1, 64, 64, 1, 1, 64, vocab)
		b := open(t, a, randomWeights(a, 3), cuda.Options{})
		last := int32(vocab - 1)
		inf := float32(math.Inf(-1))
		for what, c := range map[string]struct {
			p    kernels.Sample
			want []int32
		}{
			"one":             {kernels.Sample{Temperature: 1, TopP: 1, Mask: masked(vocab, last)}, []int32{last}},
			"one, greedy":     {kernels.Sample{TopP: 1, Mask: masked(vocab, last)}, []int32{last}},
			"the first":       {kernels.Sample{Temperature: 2, TopP: 0.5, TopK: 3, Mask: masked(vocab, 0)}, []int32{0}},
			"none":            {kernels.Sample{Temperature: 1, TopP: 1, Mask: masked(vocab)}, []int32{kernels.NoToken}},
			"none, greedy":    {kernels.Sample{TopP: 1, Mask: masked(vocab)}, []int32{kernels.NoToken}},
			"banned":          {kernels.Sample{Temperature: 1, TopP: 1, Mask: masked(vocab, 2, 3), Ban: []int32{2}}, []int32{3}},
			"all of it":       {kernels.Sample{Temperature: 1, TopP: 1, Mask: masked(vocab, 2, 3), Ban: []int32{2, 3}}, []int32{2}},
			"bias beyond":     {kernels.Sample{Temperature: 1, TopP: 1, Mask: masked(vocab, 1), Bias: []kernels.Bias{{ID: 2, Value: 100}}}, []int32{1}},
			"without end":     {kernels.Sample{Temperature: 1, TopP: 1, Mask: masked(vocab, 1, last), Bias: []kernels.Bias{{ID: 1, Value: inf}}}, []int32{last}},
			"cut among equal": {kernels.Sample{Temperature: 1, TopP: 1, TopK: 1, Mask: masked(vocab, 3), Repetition: 1.5, Prompt: []int32{3}}, []int32{3}},
		} {
			if c.p.Repetition == 0 {
				c.p.Repetition = 1
			}
			c.p.Logprobs = -1
			for i := range 20 {
				c.p.Seed = uint64(i)
				free := kernels.Sample{TopP: 1, Repetition: 1, Logprobs: -1}
				res := mustStep(t, b, kernels.Seq{Tokens: []int32{1}, Blocks: []int32{0}, Samples: []kernels.Sample{free, c.p, free}, WantLogits: true})[0]
				if got := res.Samples[1].Token; !slices.Contains(c.want, got) {
					t.Errorf("vocabulary %d, %s: drew %d, want one of %v", vocab, what, got, c.want)
				}
				if best := int32(argmax(res.Logits)); res.Samples[0].Token != best || res.Samples[2].Token != best {
					t.Errorf("vocabulary %d, %s: those beside it drew %d and %d, want %d", vocab, what, res.Samples[0].Token, res.Samples[2].Token, best)
				}
			}
		}
	}
}

// Log probabilities are the raw logits', mask or not.
func TestMaskedLogprobs(t *testing.T) {
	a := shape(1, 64, 64, 1, 1, 64, 5000)
	b := open(t, a, randomWeights(a, 3), cuda.Options{})
	p := kernels.Sample{TopP: 1, Repetition: 1, Logprobs: 4}
	q := p
	q.Mask = masked(a.Vocab, 17)
	res := mustStep(t, b, kernels.Seq{Tokens: []int32{1}, Blocks: []int32{0}, Samples: []kernels.Sample{p, q}, WantLogits: true})[0]
	if free, bound := res.Samples[0], res.Samples[1]; bound.Token != 17 || !slices.Equal(free.Top, bound.Top) || free.Self.ID == 17 {
		t.Errorf("free %+v, bound %+v", free, bound)
	}
	better := 0
	for _, v := range res.Logits {
		if v >= res.Logits[17] {
			better++
		}
	}
	if got := res.Samples[1].Self; got.ID != 17 || int(got.Rank) != better {
		t.Errorf("%+v, want rank %d", got, better)
	}
}

// A step without masks has the bits of one beside which masks are used, and the kernels too: held or
// not, its draws and logits are the same.
func TestHeldEqualsSteps(t *testing.T) {
	a := families()["llama gqa4 128"]
	w := randomWeights(a, 3)
	for _, opt := range []cuda.Options{{}, {NoGraphs: true}, {BatchInvariant: true}} {
		heldEqualsSteps(t, open(t, a, w, opt), opt.NoGraphs || opt.BatchInvariant, fmt.Sprintf("%+v", opt))
	}
}

// The same of several ranks, of which the first draws.
func TestRanksHeldEqualsSteps(t *testing.T) {
	if inOwnProcess(t) {
		return
	}
	for _, n := range rankCounts(t, 2, 4) {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			a := shape(2, 256, 512, 8, 4, 64, 4099)
			heldEqualsSteps(t, openRanks(t, a, randomWeights(a, 3), n, cuda.Options{}), false, fmt.Sprintf("%d ranks", n))
		})
	}
}

// heldEqualsSteps draws tokens each of which decides what the next may be: first in steps that wait for
// each other, then in steps that are launched behind those that draw it, with their masks filled in later. The
// former are held too, unless plain: a step that is not has no graph if it has masks, and so not as many rows.
func heldEqualsSteps(t *testing.T, b launcher, plain bool, label string) {
	t.Helper()
	const steps, seqs = 30, 5
	h, ok := b.(kernels.Holder)
	if !ok {
		t.Fatalf("%s: no Holder", label)
	}
	a := b.Arch()
	r := rand.New(rand.NewPCG(1, 1))
	perm := table(r, b, b.Blocks())
	prompts := make([][]int32, seqs)
	for i := range prompts {
		prompts[i] = randomTokens(r, 3+17*i%40, a.Vocab)
	}
	fill := func() {
		for i, p := range prompts {
			mustStep(t, b, kernels.Seq{Tokens: p, Blocks: perm[8*i : 8*i+8]})
		}
	}
	may := func(m []uint32, before int32) { // some that depend on the token before
		clear(m)
		for id := int(before)%7 + 1; id < a.Vocab; id += 7 {
			allow(m, int32(id))
		}
	}
	describe := func(step int, masks [][]uint32) (list []kernels.Seq) {
		for i, p := range prompts {
			pos := len(p) + step
			s := kernels.Sample{Seed: uint64(i), Position: pos + 1, Temperature: float32(i % 2), TopP: 0.9, Repetition: 1, Logprobs: 2 * (i % 3)}
			if i > 0 { // one of them is free
				s.Mask = masks[i]
			}
			list = append(list, kernels.Seq{Tokens: []int32{int32(i)}, Pos: pos, Blocks: perm[8*i : 8*i+8], Samples: []kernels.Sample{s}})
		}
		return list
	}
	newMasks := func() (list [][]uint32) {
		for range seqs {
			list = append(list, make([]uint32, kernels.MaskWords(a.Vocab)))
		}
		return list
	}
	var want [steps][seqs]kernels.Sampled
	keep := func(s kernels.Sampled) kernels.Sampled {
		s.Top = slices.Clone(s.Top)
		return s
	}
	fill()
	for step := range steps {
		masks := newMasks()
		list := describe(step, masks)
		for i := range list {
			before := int32(i)
			if step > 0 {
				before = want[step-1][i].Token
				list[i].Tokens[0] = before
			}
			may(masks[i], before)
		}
		if err := h.Launch(&kernels.Step{Seqs: list, Hold: !plain}); err != nil {
			t.Fatal(err)
		}
		if !plain {
			h.Draw()
		}
		for i, res := range mustAwait(t, b) {
			want[step][i] = keep(res.Samples[0])
			if i > 0 && masks[i][want[step][i].Token/32]>>(want[step][i].Token%32)&1 == 0 {
				t.Fatalf("%s: step %d drew %d, which is not allowed", label, step, want[step][i].Token)
			}
		}
	}
	fill()
	var masks [2][][]uint32
	masks[0], masks[1] = newMasks(), newMasks()
	last := make([]int32, seqs)
	for i := range last {
		last[i] = int32(i)
	}
	take := func(step int) {
		res, err := h.Await()
		if err != nil {
			t.Fatalf("%s: step %d: %v", label, step, err)
		}
		for i := range res {
			got := keep(res[i].Samples[0])
			if last[i] = got.Token; got.Token != want[step][i].Token || !slices.Equal(got.Top, want[step][i].Top) || got.Self != want[step][i].Self {
				t.Errorf("%s: step %d, sequence %d: %+v, want %+v", label, step, i, got, want[step][i])
			}
		}
	}
	for step := range steps {
		list := describe(step, masks[step%2])
		for i := range list {
			if step > 0 {
				list[i].Tokens[0], list[i].After = 0, i+1
			}
		}
		if err := h.Launch(&kernels.Step{Seqs: list, Hold: true}); err != nil {
			t.Fatal(err)
		}
		if step > 0 {
			take(step - 1)
		} else if _, err := h.Await(); err == nil {
			t.Fatalf("%s: a step is over whose draws wait", label)
		}
		for i := range list {
			may(masks[step%2][i], last[i])
		}
		h.Draw()
	}
	take(steps - 1)
	if t.Failed() {
		return
	}
	// More masks than there is room for.
	var many []kernels.Sample
	for i := range 1000 {
		many = append(many, kernels.Sample{TopP: 1, Repetition: 1, Logprobs: -1, Choice: uint32(i), Mask: masked(a.Vocab, 1)})
	}
	err := h.Launch(&kernels.Step{Seqs: []kernels.Seq{{Tokens: []int32{1}, Blocks: []int32{0}, Samples: many}}})
	if !errors.Is(err, kernels.ErrStepTooLarge) {
		t.Errorf("%s: 1000 masks: %v", label, err)
	}
	for i := range many {
		many[i].Mask = many[0].Mask // shared
	}
	for _, s := range mustStep(t, b, kernels.Seq{Tokens: []int32{1}, Blocks: []int32{0}, Samples: many})[0].Samples {
		if s.Token != 1 {
			t.Fatalf("%s: drew %d", label, s.Token)
		}
	}
}
