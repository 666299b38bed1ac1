//go:build cuda && cgo && linux

package cuda_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cuda"
)

// uniform is Philox4x32-10 under (seed), at (position, choice).
func uniform(p *kernels.Sample) float64 {
	c := [4]uint32{uint32(p.Position), uint32(uint64(p.Position) >> 32), p.Choice, 0}
	k := [2]uint32{uint32(p.Seed), uint32(p.Seed >> 32)}
	for range 10 {
		a, b := uint64(c[0])*0xd2511f53, uint64(c[2])*0xcd9e8d57
		c = [4]uint32{uint32(b>>32) ^ c[1] ^ k[0], uint32(b), uint32(a>>32) ^ c[3] ^ k[1], uint32(a)}
		k[0] += 0x9e3779b9
		k[1] += 0xbb67ae85
	}
	return float64((uint64(c[1])<<32|uint64(c[0]))>>11) / (1 << 53)
}

// draw is the sampler of kernels/DESIGN.md, section 5, by sorting, in float64.
func draw(raw []float32, p *kernels.Sample) (token int32, probs []float64) {
	x := make([]float64, len(raw))
	count, seen := map[int32]float64{}, map[int32]bool{}
	for i, v := range raw {
		x[i] = float64(v)
	}
	for _, b := range p.Bias {
		x[b.ID] += float64(b.Value)
	}
	for _, id := range p.Ban {
		x[id] = math.Inf(-1)
	}
	for _, id := range slices.Concat(p.Prompt, p.Output) {
		if seen[id] || p.Repetition == 1 {
			continue
		}
		seen[id] = true
		if x[id] > 0 {
			x[id] /= float64(p.Repetition)
		} else {
			x[id] *= float64(p.Repetition)
		}
	}
	for _, id := range p.Output {
		count[id]++
	}
	for id, n := range count {
		if p.Presence != 0 || p.Frequency != 0 {
			x[id] -= float64(p.Frequency)*n + float64(p.Presence)
		}
	}
	for i := range x {
		if p.Mask != nil && p.Mask[i/32]>>(i%32)&1 == 0 {
			x[i] = math.Inf(-1)
		}
	}
	best := 0
	for i, v := range x {
		if v > x[best] {
			best = i
		}
	}
	if p.Temperature == 0 || p.TopK == 1 {
		return int32(best), nil
	}
	w, order := make([]float64, len(x)), make([]int, len(x))
	for i, v := range x {
		w[i], order[i] = math.Exp((v-x[best])/float64(p.Temperature)), i
	}
	slices.SortStableFunc(order, func(a, b int) int {
		switch {
		case w[a] > w[b]:
			return -1
		case w[a] < w[b]:
			return 1
		}
		return a - b
	})
	if p.TopK > 0 && p.TopK < len(order) {
		order = order[:p.TopK]
	}
	sum := func() (s float64) {
		for _, i := range order {
			s += w[i]
		}
		return s
	}
	if p.TopP < 1 {
		need, have := float64(p.TopP)*sum(), 0.0
		for n, i := range order {
			if have += w[i]; have >= need {
				order = order[:n+1]
				break
			}
		}
	}
	for n, i := range order {
		if w[i] < float64(p.MinP) {
			order = order[:n]
			break
		}
	}
	total := sum()
	probs = make([]float64, len(x))
	for _, i := range order {
		probs[i] = w[i] / total
	}
	target, have := uniform(p), 0.0
	for i, v := range probs {
		if have += v; v > 0 && have > target {
			return int32(i), probs
		}
	}
	return int32(best), probs
}

// Every kind of parameter, against the sorting sampler on the device's own
// logits. A draw may differ where rounding moves a boundary past the random
// number: fewer than one in 200 do.
func TestDraws(t *testing.T) {
	for _, vocab := range []int{5, 97, 512, 4099, 32003, 128256} {
		a := shape(1, 64, 64, 1, 1, 64, vocab)
		b := open(t, a, randomWeights(a, uint64(vocab)), cuda.Options{MaxSeqs: 32})
		r := rand.New(rand.NewPCG(uint64(vocab), 2))
		pick := func(v ...float32) float32 { return v[r.IntN(len(v))] }
		differ, of := 0, 0
		for round := range 12 {
			var samples []kernels.Sample
			for i := range 40 {
				p := kernels.Sample{
					Seed: r.Uint64(), Choice: uint32(i), Position: r.IntN(1 << 20), Logprobs: -1,
					Temperature: pick(0, 0.3, 1, 1, 2), TopK: int(pick(0, 0, 1, 2, 7, 40, 1e6)), TopP: pick(1, 1, 0.1, 0.5, 0.9, 0.999),
					MinP: pick(0, 0, 0.05, 0.5), Repetition: pick(1, 1, 1.3), Presence: pick(0, 0, 0.7), Frequency: pick(0, 0, -0.4),
					Prompt: randomTokens(r, 20, vocab), Output: randomTokens(r, 30, vocab),
				}
				if r.IntN(3) == 0 {
					p.Bias = []kernels.Bias{{ID: int32(r.IntN(vocab)), Value: 3}, {ID: int32(r.IntN(vocab)), Value: -100}}
					p.Ban = []int32{int32(r.IntN(vocab))}
				}
				if i%3 > 0 && len(samples) > 0 && round%3 > 0 { // of few or of most
					p.Mask = randomMask(r, vocab, i%3 == 1)
				}
				samples = append(samples, p)
			}
			seqs := []kernels.Seq{{Tokens: randomTokens(r, 1+round%3, vocab), Blocks: []int32{1}, Samples: samples, WantLogits: true}}
			if round%2 == 1 { // as a padded decode step
				seqs = nil
				for i := range 20 {
					seqs = append(seqs, kernels.Seq{Tokens: randomTokens(r, 1, vocab), Blocks: []int32{int32(i)}, Samples: samples[i : i+1], WantLogits: true})
				}
			}
			for i, res := range mustStep(t, b, seqs...) {
				for j, got := range res.Samples {
					p := &seqs[i].Samples[j]
					want, probs := draw(res.Logits, p)
					of++
					if got.Token != want {
						differ++
						if probs == nil || probs[got.Token] == 0 {
							t.Errorf("vocabulary %d: drew %d, which the filters exclude; want %d, %+v", vocab, got.Token, want, *p)
						}
					}
				}
			}
		}
		if differ*200 > of {
			t.Errorf("vocabulary %d: %d of %d draws differ", vocab, differ, of)
		}
		t.Logf("vocabulary %d: %d of %d draws differ", vocab, differ, of)
	}
}

// Equal logits everywhere: cuts fall among equals, by id.
func TestDrawsAmongEquals(t *testing.T) {
	a := shape(1, 64, 64, 1, 1, 64, 20000)
	w := randomWeights(a, 1)
	clear(w[arch.Embed.At(0)].Data) // tied head: all logits are 0
	b := open(t, a, w, cuda.Options{})
	for _, c := range []struct {
		p     kernels.Sample
		below int32
	}{
		{kernels.Sample{TopK: 100, TopP: 1}, 100},
		{kernels.Sample{TopP: 0.25}, 5000},
		{kernels.Sample{TopK: 400, TopP: 0.5}, 200},
		{kernels.Sample{TopP: 1}, 20000},
	} {
		c.p.Temperature, c.p.Repetition, c.p.Logprobs = 1, 1, -1
		var samples []kernels.Sample
		for i := range 60 {
			c.p.Seed = uint64(i)
			samples = append(samples, c.p)
		}
		most := int32(0)
		for _, s := range mustStep(t, b, kernels.Seq{Tokens: []int32{1}, Blocks: []int32{0}, Samples: samples})[0].Samples {
			most = max(most, s.Token)
		}
		if most >= c.below || most < c.below*8/10 {
			t.Errorf("top_k %d top_p %v: highest of 60 draws is %d, want just below %d", c.p.TopK, c.p.TopP, most, c.below)
		}
	}
}

// Chi-square of many draws against the renormalised distribution.
func TestDrawDistribution(t *testing.T) {
	a := shape(1, 64, 64, 1, 1, 64, 300)
	b := open(t, a, randomWeights(a, 9), cuda.Options{MaxSeqs: 256})
	p := kernels.Sample{Temperature: 0.8, TopK: 50, TopP: 0.95, Repetition: 1, Logprobs: -1}
	counts, of := make([]float64, a.Vocab), 0.0
	var probs []float64
	for round := range 100 {
		samples := make([]kernels.Sample, 500)
		for i := range samples {
			p.Seed, p.Choice = uint64(round), uint32(i)
			samples[i] = p
		}
		res := mustStep(t, b, kernels.Seq{Tokens: []int32{7}, Blocks: []int32{0}, Samples: samples, WantLogits: true})[0]
		_, probs = draw(res.Logits, &p)
		for _, s := range res.Samples {
			counts[s.Token]++
			of++
		}
	}
	chi, bins := 0.0, 0.0
	for i, q := range probs {
		if q == 0 && counts[i] > 0 {
			t.Errorf("token %d was drawn %v times and has no weight", i, counts[i])
		}
		if q > 0 {
			bins++
			chi += (counts[i] - q*of) * (counts[i] - q*of) / (q * of)
		}
	}
	// Mean bins-1, variance 2(bins-1): five standard deviations.
	if limit := bins - 1 + 5*math.Sqrt(2*(bins-1)); chi > limit {
		t.Errorf("chi-square %.1f over %v bins, limit %.1f", chi, bins, limit)
	}
}

func TestLogprobs(t *testing.T) {
	for _, vocab := range []int{50, 32003, 128256} {
		t.Run(fmt.Sprint(vocab), func(t *testing.T) {
			a := shape(1, 64, 64, 1, 1, 64, vocab)
			b := open(t, a, randomWeights(a, 5), cuda.Options{})
			r := rand.New(rand.NewPCG(5, 2))
			tokens, targets := randomTokens(r, 40, vocab), randomTokens(r, 40, vocab)
			targets[7], targets[39] = -1, -1
			s := kernels.Sample{Seed: 1, Position: 40, Temperature: 1, TopP: 1, Repetition: 1, Logprobs: 20}
			res := mustStep(t, b, kernels.Seq{Tokens: tokens, Blocks: []int32{3, 4, 5}, Samples: []kernels.Sample{s}, Targets: targets, TargetLogprobs: 5, WantLogits: true})[0]
			check := func(self kernels.TokenLogprob, top []kernels.TokenLogprob, n int) {
				t.Helper()
				if len(top) != n {
					t.Fatalf("%d listed, want %d", len(top), n)
				}
				for i := range top {
					if top[i].Rank != int32(i+1) || i > 0 && top[i].Logprob > top[i-1].Logprob {
						t.Errorf("listed %+v", top)
					}
				}
				if self.Rank >= 1 && int(self.Rank) <= n && top[self.Rank-1].Logprob != self.Logprob {
					t.Errorf("self %+v, listed %+v", self, top)
				}
			}
			sum := 0.0
			m := float64(slices.Max(res.Logits))
			for _, v := range res.Logits {
				sum += math.Exp(float64(v) - m)
			}
			got := res.Samples[0]
			check(got.Self, got.Top, 20)
			if want := float64(res.Logits[got.Token]) - m - math.Log(sum); got.Self.ID != got.Token || math.Abs(want-float64(got.Self.Logprob)) > 1e-5 {
				t.Errorf("self %+v, want %v", got.Self, want)
			}
			if top := argmax(res.Logits); got.Top[0].ID != int32(top) {
				t.Errorf("most likely is %d, want %d", got.Top[0].ID, top)
			}
			for i, p := range res.Prompt {
				if targets[i] < 0 {
					if p.Top != nil || p.Self != (kernels.TokenLogprob{}) {
						t.Errorf("skipped target %d: %+v", i, p)
					}
					continue
				}
				if check(p.Self, p.Top, 5); p.Self.ID != targets[i] {
					t.Errorf("target %d is %d, want %d", i, p.Self.ID, targets[i])
				}
			}
			// The same position alone gives the same logits within the tolerance.
			last := mustStep(t, b, kernels.Seq{Tokens: tokens[:11], Blocks: []int32{6}, WantLogits: true})[0].Logits
			m, sum = float64(slices.Max(last)), 0
			for _, v := range last {
				sum += math.Exp(float64(v) - m)
			}
			if want := float64(last[targets[10]]) - m - math.Log(sum); math.Abs(want-float64(res.Prompt[10].Self.Logprob)) > 0.05 {
				t.Errorf("target 10: %v, alone %v", res.Prompt[10].Self.Logprob, want)
			}
		})
	}
}

// TestDrawOfNaN: where a sequence's logits are all NaN nothing is drawn, whatever
// the parameters; the others of its step are as right as ever, and so is the step
// that was launched behind it.
func TestDrawOfNaN(t *testing.T) {
	const bad = 7 // its embedding is NaN
	for _, name := range []string{"llama gqa4 128", "qwen3 gqa2 80"} {
		t.Run(name, func(t *testing.T) {
			a := families()[name]
			w := randomWeights(a, 5)
			row := w[arch.Embed.At(0)].Data[bad*a.Hidden*2 : (bad+1)*a.Hidden*2]
			for i := range row {
				row[i] = 0xff
			}
			b := open(t, a, w, cuda.Options{})
			kinds := []kernels.Sample{
				{TopP: 1, Repetition: 1, Logprobs: -1},
				{TopP: 1, Repetition: 1, Logprobs: -1, Temperature: 1},
				{TopP: 0.9, TopK: 5, MinP: 0.1, Repetition: 1, Logprobs: 2, Temperature: 0.8},
				{TopP: 1, Repetition: 1, Logprobs: -1, Ban: []int32{1, 2}},
				{TopP: 1, Repetition: 1.2, Logprobs: -1, Temperature: 1, Ban: []int32{3}, Bias: []kernels.Bias{{ID: 4, Value: 5}}, Prompt: []int32{1, 4}},
			}
			clean, spoilt := []int32{1, 2, 3, 4, 5}, []int32{1, 2, bad, 4, 5}
			seq := func(tokens, blocks []int32, samples ...kernels.Sample) kernels.Seq {
				return kernels.Seq{Tokens: tokens, Blocks: blocks, Samples: samples}
			}
			want := mustStep(t, b, seq(clean, []int32{1}, kinds[0]))[0].Samples[0].Token
			next := mustStep(t, b, kernels.Seq{Tokens: []int32{want}, Pos: len(clean), Blocks: []int32{1}, Samples: kinds[:1]})[0].Samples[0].Token

			res := mustStep(t, b, seq(clean, []int32{2}, kinds[0]), seq(spoilt, []int32{3}, kinds...))
			if got := res[0].Samples[0].Token; got != want {
				t.Errorf("beside one that is NaN: %d, want %d", got, want)
			}
			for i, s := range res[1].Samples {
				if s.Token != kernels.NoToken {
					t.Errorf("%+v: drew %d", kinds[i], s.Token)
				}
			}
			mustLaunch(t, b, seq(spoilt, []int32{4}, kinds[0]), seq(clean, []int32{5}, kinds[0]))
			after := func(draw int, blocks []int32) kernels.Seq {
				return kernels.Seq{Tokens: []int32{0}, After: draw, Pos: len(clean), Blocks: blocks, Samples: kinds[:1]}
			}
			mustLaunch(t, b, after(1, []int32{4}), after(2, []int32{5}))
			if r := mustAwait(t, b); r[0].Samples[0].Token != kernels.NoToken || r[1].Samples[0].Token != want {
				t.Errorf("%+v", r)
			}
			if r := mustAwait(t, b); r[0].Samples[0].Token != kernels.NoToken || r[1].Samples[0].Token != next {
				t.Errorf("behind it: %+v, want %d", r, next)
			}
		})
	}
}
