package kerneltest

import (
	"bytes"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"

	"github.com/xpyd/xpyd/kernels"
)

// Verify checks that steps with drafts, right and wrong, beside others, draw what steps without draw, and
// leave the same rows with the same digests. The backend's rows must have the same bits in any chunk.
func Verify(t testing.TB, b kernels.Backend) {
	t.Helper()
	const length, prompt = 70, 13
	vocab, size := b.Arch().Vocab, b.Layout().BlockTokens
	blocks := (length + size - 1) / size
	table := func(first int) (ids []int32) {
		for i := range blocks {
			ids = append(ids, int32(first+i))
		}
		return ids
	}
	for seed := range uint64(4) {
		rng := rand.New(rand.NewPCG(seed, 9))
		tokens := Tokens(rng, prompt, vocab)
		sample := func(output []int32) kernels.Sample {
			s := kernels.Sample{Seed: seed, Position: prompt + len(output), Temperature: float32(seed%2) * 0.8, TopP: 0.95, Repetition: 1, Logprobs: 2}
			if seed >= 2 {
				s.Repetition, s.Frequency, s.Prompt, s.Output = 1.2, 0.5, tokens[:prompt], slices.Clone(output)
				s.Mask = make([]uint32, kernels.MaskWords(vocab))
				for i := range s.Mask {
					s.Mask[i] = 0x7fffffff << (len(output) % 3)
				}
				if n := vocab % 32; n > 0 {
					s.Mask[len(s.Mask)-1] &= 1<<n - 1
				}
			}
			return s
		}
		// Without drafts.
		want := slices.Clone(tokens)
		var drawn []kernels.Sampled
		pos := 0
		for len(want) < length {
			r := Step(t, b, kernels.Seq{Tokens: want[pos:], Pos: pos, Blocks: table(0), Samples: []kernels.Sample{sample(want[prompt:])}})[0].Samples[0]
			pos = len(want)
			r.Top = slices.Clone(r.Top)
			drawn, want = append(drawn, r), append(want, r.Token)
		}
		// With some.
		got := slices.Clone(tokens)
		var again []kernels.Sampled
		first := Step(t, b, kernels.Seq{Tokens: got, Blocks: table(blocks), Samples: []kernels.Sample{sample(nil)}})[0].Samples[0]
		first.Top = slices.Clone(first.Top)
		again, got = append(again, first), append(got, first.Token)
		wrong, right := 0, 0
		for len(got) < length {
			n := min(rng.IntN(6), length-len(got)-1)
			q := kernels.Seq{Tokens: []int32{got[len(got)-1]}, Pos: len(got) - 1, Blocks: table(blocks), Verify: true}
			for i := range n {
				id := want[len(got)+i]
				if rng.IntN(4) == 0 {
					id = rng.Int32N(int32(vocab))
				}
				q.Tokens = append(q.Tokens, id)
			}
			for i := range q.Tokens {
				q.Samples = append(q.Samples, sample(append(slices.Clone(got[prompt:]), q.Tokens[1:1+i]...)))
			}
			beside := kernels.Seq{Tokens: Tokens(rng, 1+rng.IntN(3), vocab), Blocks: table(2 * blocks)}
			for i, r := range Step(t, b, beside, q)[1].Samples {
				r.Top = slices.Clone(r.Top)
				again, got = append(again, r), append(got, r.Token)
				if i == n {
					break
				}
				if q.Tokens[i+1] != r.Token {
					wrong++
					break
				}
				right++
			}
		}
		if !slices.Equal(got, want) || !reflect.DeepEqual(again, drawn) {
			t.Errorf("seed %d: with drafts\n%v, without\n%v", seed, got, want)
		}
		if wrong == 0 || right == 0 {
			t.Errorf("%d drafts were wrong, %d right: nothing was tested", wrong, right)
		}
		for i := range blocks { // the last token has no row
			n := min(size, length-1-i*size)
			DigestsMatch(t, b, int32(blocks+i), i*size, n)
			for layer, l := range b.Layout().Resolve() {
				a, c := make([]byte, l.PackedBytes(n)), make([]byte, l.PackedBytes(n))
				b.Gather(layer, int32(i), 0, n, a)
				if b.Gather(layer, int32(blocks+i), 0, n, c); !bytes.Equal(a, c) {
					t.Errorf("seed %d: layer %d, block %d: other rows with drafts", seed, layer, i)
				}
			}
		}
	}
}
