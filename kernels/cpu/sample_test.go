package cpu_test

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cpu"
)

// Known answers of Philox4x32-10, from the Random123 distribution's kat_vectors.
func TestPhilox(t *testing.T) {
	f := func(c [4]uint32, k [2]uint32, want [4]uint32) {
		t.Helper()
		if got := cpu.Philox(c, k); got != want {
			t.Errorf("%08x: %08x, want %08x", c, got, want)
		}
	}
	f([4]uint32{}, [2]uint32{}, [4]uint32{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8})
	m := ^uint32(0)
	f([4]uint32{m, m, m, m}, [2]uint32{m, m}, [4]uint32{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd})
	f([4]uint32{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, [2]uint32{0xa4093822, 0x299f31d0},
		[4]uint32{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1})
}

func TestUniform(t *testing.T) {
	var bins [64]float64
	const n = 64000
	for i := range n {
		u := cpu.Uniform(uint64(i%7), uint32(i%5), i)
		if u < 0 || u >= 1 {
			t.Fatal(u)
		}
		bins[int(u*64)]++
	}
	if x := chi2(bins[:], slices.Repeat([]float64{1.0 / 64}, 64), n); x > 120 { // 63 degrees of freedom
		t.Errorf("chi-square %v", x)
	}
	if cpu.Uniform(1, 0, 5) == cpu.Uniform(1, 1, 5) || cpu.Uniform(1, 0, 5) == cpu.Uniform(1, 0, 6) || cpu.Uniform(1, 0, 5) == cpu.Uniform(1<<40|1, 0, 5) {
		t.Error("seed, choice or position is not used")
	}
	for i, seed := range []uint64{0, 1, 0xfedcba9876543210} {
		for j, at := range []int{0, 7, 1<<40 | 3} {
			choice := uint32(i + 3*j)
			r := cpu.Philox([4]uint32{uint32(at), uint32(at >> 32), choice, 0}, [2]uint32{uint32(seed), uint32(seed >> 32)})
			want := math.Ldexp(float64((uint64(r[1])<<32|uint64(r[0]))>>11), -53)
			if got := cpu.Uniform(seed, choice, at); got != want {
				t.Errorf("seed %x, choice %d, position %x: %v, want %v", seed, choice, at, got, want)
			}
		}
	}
}

func chi2(seen, p []float64, n float64) (x float64) {
	for i, o := range seen {
		if e := p[i] * n; e > 0 {
			x += (o - e) * (o - e) / e
		} else if o > 0 {
			return math.Inf(1)
		}
	}
	return x
}

func draw(t *testing.T, vocab int) func([]float32, *kernels.Sample) int32 {
	t.Helper()
	d, err := cpu.Draw("", vocab)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// naive is the sampler's definition, written the slow way: it returns the
// probability of each token.
func naive(raw []float32, p *kernels.Sample) []float64 {
	x := make([]float64, len(raw))
	for i, v := range raw {
		x[i] = float64(v)
	}
	for _, b := range p.Bias {
		x[b.ID] += float64(b.Value)
	}
	for _, id := range p.Ban {
		x[id] = math.Inf(-1)
	}
	for i := range x {
		id := int32(i)
		if p.Repetition != 1 && (slices.Contains(p.Prompt, id) || slices.Contains(p.Output, id)) {
			if x[i] > 0 {
				x[i] /= float64(p.Repetition)
			} else {
				x[i] *= float64(p.Repetition)
			}
		}
		n := 0
		for _, o := range p.Output {
			if o == id {
				n++
			}
		}
		if n > 0 {
			x[i] -= float64(p.Frequency)*float64(n) + float64(p.Presence)
		}
	}
	for i := range x {
		if p.Mask != nil && p.Mask[i/32]>>(i%32)&1 == 0 {
			x[i] = math.Inf(-1)
		}
	}
	order := make([]int, len(x))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int {
		switch {
		case x[a] > x[b]:
			return -1
		case x[a] < x[b]:
			return 1
		}
		return 0
	})
	prob := make([]float64, len(x))
	if p.Temperature == 0 {
		prob[order[0]] = 1
		return prob
	}
	w := func(i int) float64 { return math.Exp((x[i] - x[order[0]]) / float64(p.Temperature)) }
	if p.TopK > 0 {
		order = order[:min(p.TopK, len(order))]
	}
	total := 0.0
	for _, i := range order {
		total += w(i)
	}
	kept, sum := 0, 0.0
	for kept < len(order) && sum < float64(p.TopP)*total {
		sum += w(order[kept])
		kept++
	}
	order = order[:max(kept, 1)]
	total = 0
	for _, i := range order {
		if w(i) >= float64(p.MinP) {
			prob[i] = w(i)
			total += w(i)
		}
	}
	for i := range prob {
		prob[i] /= total
	}
	return prob
}

// mask allows some ids.
func mask(vocab int, ids ...int32) []uint32 {
	m := make([]uint32, kernels.MaskWords(vocab))
	for _, id := range ids {
		m[id/32] |= 1 << (id % 32)
	}
	return m
}

func randomLogits(r *rand.Rand, n int, quantum float64) []float32 {
	x := make([]float32, n)
	for i := range x {
		v := r.NormFloat64() * 3
		if quantum > 0 {
			v = math.Round(v/quantum) * quantum // ties
		}
		x[i] = float32(v)
	}
	return x
}

// Random parameters: the frequencies of the drawn tokens follow the naive
// probabilities, and no token outside the naive set is ever drawn.
func TestSampleDistribution(t *testing.T) {
	r := rand.New(rand.NewPCG(21, 1))
	const n = 3000
	for trial := range 60 {
		vocab := 3 + r.IntN(60)
		d := draw(t, vocab)
		logits := randomLogits(r, vocab, []float64{0, 0.5, 2}[r.IntN(3)])
		p := kernels.Sample{Seed: r.Uint64(), Temperature: float32(0.3 + 1.5*r.Float64()), TopP: 1, Repetition: 1, Logprobs: -1}
		if r.IntN(2) == 0 {
			p.TopK = 1 + r.IntN(vocab+3)
		}
		if r.IntN(2) == 0 {
			p.TopP = float32(0.05 + 0.95*r.Float64())
		}
		if r.IntN(2) == 0 {
			p.MinP = float32(0.5 * r.Float64())
		}
		if r.IntN(2) == 0 {
			p.Repetition, p.Presence, p.Frequency = float32(0.5+r.Float64()), float32(r.NormFloat64()), float32(r.NormFloat64())
			p.Prompt, p.Output = randomTokens(r, 5, vocab), randomTokens(r, 9, vocab)
			p.Bias = []kernels.Bias{{ID: int32(r.IntN(vocab)), Value: 2}}
			p.Ban = []int32{int32(r.IntN(vocab))}
		}
		if r.IntN(2) == 0 {
			p.Mask = mask(vocab, int32(vocab-1), int32(r.IntN(vocab)), int32(r.IntN(vocab)), int32(r.IntN(vocab)))
		}
		want := naive(logits, &p)
		seen := make([]float64, vocab)
		for i := range n {
			p.Position = i
			seen[d(logits, &p)]++
		}
		df := -1.0
		for i, w := range want {
			if w == 0 && seen[i] > 0 {
				t.Fatalf("trial %d: token %d drawn %v times outside the set: %+v", trial, i, seen[i], p)
			}
			if w > 0 {
				df++
			}
		}
		// Six sigma: small expected counts make the tail heavier than normal.
		if x := chi2(seen, want, n); x > df+8*math.Sqrt(2*df+1)+30 {
			t.Errorf("trial %d: chi-square %v with %v degrees of freedom: %+v", trial, x, df, p)
		}
	}
}

// With a vocabulary of real size the kept set is exactly the naive one.
func TestSampleSets(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 8))
	const vocab = 2000
	d := draw(t, vocab)
	for range 24 {
		logits := randomLogits(r, vocab, []float64{0, 0.25}[r.IntN(2)])
		p := kernels.Sample{Temperature: 0.5, TopP: 1, Repetition: 1}
		switch r.IntN(3) {
		case 0:
			p.TopK = 1 + r.IntN(8)
		case 1:
			p.TopP = 0.02 + 0.05*r.Float32()
		case 2:
			p.MinP = 0.3 + 0.6*r.Float32()
		}
		want := naive(logits, &p)
		got := map[int32]bool{}
		for i := range 2000 {
			p.Position = i
			got[d(logits, &p)] = true
		}
		for id := range got {
			if want[id] == 0 {
				t.Fatalf("token %d drawn outside the set: %+v", id, p)
			}
		}
		for id, w := range want {
			if w > 0.015 && !got[int32(id)] {
				t.Fatalf("token %d of probability %v never drawn: %+v", id, w, p)
			}
		}
	}
}

// TestTopPExactly: the fewest tokens that reach top_p are enough, also where they
// reach it to the last bit: of four alike, two are half.
func TestTopPExactly(t *testing.T) {
	const vocab = 16
	logits := slices.Repeat([]float32{float32(math.Inf(-1))}, vocab)
	for _, id := range []int{2, 5, 8, 13} {
		logits[id] = 1
	}
	d, got := draw(t, vocab), map[int32]bool{}
	for i := range 500 {
		got[d(logits, &kernels.Sample{Temperature: 1, TopP: 0.5, Repetition: 1, Position: i})] = true
	}
	if len(got) != 2 || !got[2] || !got[5] {
		t.Errorf("drawn %v, want 2 and 5", got)
	}
}

// TestDrawn: tokens that are equally likely are all drawn, about as often, and no others:
// not those that are banned, not a number, or less likely without end.
func TestDrawn(t *testing.T) {
	inf, nan := float32(math.Inf(1)), float32(math.NaN())
	for what, c := range map[string]struct {
		logits []float32
		p      kernels.Sample
		want   []int
	}{
		"all":             {[]float32{2, 2, 2}, kernels.Sample{}, []int{0, 1, 2}},
		"not numbers":     {[]float32{nan, 2, nan, 2, -inf, 2}, kernels.Sample{}, []int{1, 3, 5}},
		"infinite":        {[]float32{1, inf, -inf, nan, inf}, kernels.Sample{}, []int{1, 4}},
		"the last number": {[]float32{nan, -900, 2, 2}, kernels.Sample{Ban: []int32{2}}, []int{3}},
		"top k":           {[]float32{1, 5, 5, 5, 5}, kernels.Sample{TopK: 3}, []int{1, 2, 3}},
		"top k is all":    {[]float32{5, 5, 5, 5}, kernels.Sample{TopK: 4}, []int{0, 1, 2, 3}},
		"all but one":     {[]float32{5, 5, 5, 5}, kernels.Sample{TopK: 3}, []int{0, 1, 2}},
		"off":             {[]float32{5, 5, 5, 5}, kernels.Sample{TopK: -1}, []int{0, 1, 2, 3}},
		"top k, top p":    {[]float32{5, 5, 5, 5, 5}, kernels.Sample{TopK: 4, TopP: 0.5}, []int{0, 1}},
		"min p":           {[]float32{5, 4, 5, 3}, kernels.Sample{MinP: 0.5}, []int{0, 2}},
		"min p is all":    {[]float32{5, 4, 5, 3}, kernels.Sample{MinP: 1}, []int{0, 2}},
		"masked":          {[]float32{9, 5, nan, 5, 5}, kernels.Sample{Mask: mask(5, 1, 2, 4)}, []int{1, 4}},
		"masked, top k":   {[]float32{9, 5, 4, 5, 5}, kernels.Sample{TopK: 4, Mask: mask(5, 1, 4)}, []int{1, 4}},
		"masked, top p":   {[]float32{9, 5, 5, 5, 5}, kernels.Sample{TopP: 0.6, Mask: mask(5, 1, 3, 4)}, []int{1, 3}},
		"the last word":   {slices.Concat(slices.Repeat([]float32{7}, 64), []float32{5, 5}), kernels.Sample{Mask: mask(66, 64, 65)}, []int{64, 65}},
		"top p, min p":    {[]float32{5, 5, 5, 5, 4}, kernels.Sample{TopP: 0.45, MinP: 0.1}, []int{0, 1}},
	} {
		const draws = 4000
		d, n := draw(t, len(c.logits)), make([]int, len(c.logits))
		c.p.Temperature, c.p.Repetition = 1, 1
		if c.p.TopP == 0 {
			c.p.TopP = 1
		}
		for c.p.Position = range draws {
			n[d(c.logits, &c.p)]++
		}
		for id, times := range n {
			mean := 0
			if slices.Contains(c.want, id) {
				mean = draws / len(c.want)
			}
			if times < mean*8/10 || times > mean*12/10 {
				t.Errorf("%s: of %v %v are drawn, want %v", what, c.logits, n, c.want)
				break
			}
		}
	}
}

func TestGreedy(t *testing.T) {
	f := func(logits []float32, p kernels.Sample, want int32) {
		t.Helper()
		p.TopP = 1
		if p.Repetition == 0 {
			p.Repetition = 1
		}
		before := slices.Clone(logits)
		if got := draw(t, len(logits))(logits, &p); got != want {
			t.Errorf("%v %+v: %d, want %d", logits, p, got, want)
		}
		if !sameBits(before, logits) {
			t.Errorf("%v: the raw logits were changed", logits)
		}
	}
	inf, nan := float32(math.Inf(1)), float32(math.NaN())
	f([]float32{1, 3, 3, 2}, kernels.Sample{}, 1)
	f([]float32{1, 3, 3, 2}, kernels.Sample{Ban: []int32{1}}, 2)
	f([]float32{1, 3, 3, 2}, kernels.Sample{Bias: []kernels.Bias{{ID: 0, Value: 5}}}, 0)
	f([]float32{1, 4, 3, 2}, kernels.Sample{Repetition: 2, Prompt: []int32{1, 1}}, 2)
	f([]float32{-1, -4, -3, -2}, kernels.Sample{Repetition: 3, Output: []int32{0, 0}}, 3)
	f([]float32{1, 4, 3, 2}, kernels.Sample{Frequency: 0.6, Output: []int32{1, 1}}, 2)
	f([]float32{1, 4, 3, 2}, kernels.Sample{Presence: 1.5, Output: []int32{1}}, 2)
	f([]float32{nan, -inf, -5, nan}, kernels.Sample{}, 2)
	f([]float32{nan, nan}, kernels.Sample{}, kernels.NoToken)
	f([]float32{nan, nan}, kernels.Sample{Ban: []int32{1}, Bias: []kernels.Bias{{ID: 0, Value: 5}}}, kernels.NoToken)
	f([]float32{nan, 1}, kernels.Sample{Ban: []int32{1}}, 1) // banned, but there is no other
	f([]float32{0, inf, 1}, kernels.Sample{Temperature: 1}, 1)
	f([]float32{nan, 2, -inf}, kernels.Sample{Temperature: 1, Seed: 4}, 1)
	f([]float32{1, 4, 4.5, 2}, kernels.Sample{Frequency: 1, Output: []int32{2}}, 1)
	f([]float32{1, 4, 4.5, 2}, kernels.Sample{Presence: 1, Output: []int32{2}}, 1)
	f([]float32{1, 4, 4.5, 2}, kernels.Sample{Repetition: 1.25, Output: []int32{2}, Prompt: []int32{-1, 4}}, 1)
	f([]float32{1, 4, 2}, kernels.Sample{Presence: 9, Output: []int32{3, 1, -1}, Ban: []int32{3, -1}, Bias: []kernels.Bias{{ID: 3, Value: 9}, {ID: -1, Value: 9}}}, 2)
	f([]float32{1, 2}, kernels.Sample{Temperature: 1e-30}, 1)
	f([]float32{nan, nan}, kernels.Sample{Temperature: 1, TopK: 1}, kernels.NoToken)
	f([]float32{1, 2, 2}, kernels.Sample{Temperature: 9, TopK: 1}, 1)
	for _, p := range []kernels.Sample{{}, {Temperature: 1}, {Temperature: 1, TopK: 2}, {Temperature: 1, TopP: 0.5}, {Temperature: 1, MinP: 0.5}} {
		f([]float32{nan, nan, nan, nan}, p, kernels.NoToken)
		f([]float32{nan, -inf, nan, -inf}, p, 1)
	}
	f([]float32{1, 4, 3, 2}, kernels.Sample{Mask: mask(4, 0, 3)}, 3)
	f([]float32{1, 4, 3, 2}, kernels.Sample{Mask: mask(4, 0, 3), Bias: []kernels.Bias{{ID: 0, Value: 2}, {ID: 1, Value: 9}}}, 0)
	f([]float32{1, -inf, 3, -inf}, kernels.Sample{Mask: mask(4, 1, 3)}, 1)
	f([]float32{1, nan, 3, -inf}, kernels.Sample{Mask: mask(4, 1, 3)}, 3)
	f([]float32{1, nan, 3, 2}, kernels.Sample{Mask: mask(4, 1)}, kernels.NoToken)
	f([]float32{1, 4, 3, 2}, kernels.Sample{Mask: mask(4)}, kernels.NoToken)
	f([]float32{nan, nan}, kernels.Sample{Mask: mask(2, 0, 1)}, kernels.NoToken)
}

// TestPenaltiesOff: a repetition penalty of 0 or 1 changes nothing, whatever the tokens
// so far and the other settings.
func TestPenaltiesOff(t *testing.T) {
	token := draw(t, 4)
	for _, off := range []float32{0, 1} {
		for _, so := range [][]int32{nil, {1}, {0, 1, 2, 3}} {
			p := kernels.Sample{TopP: 1, Repetition: off, Prompt: so, Output: so, Bias: []kernels.Bias{{ID: 3, Value: 0.5}}}
			if got := token([]float32{1, 4, 3, 2}, &p); got != 1 {
				t.Errorf("repetition %v after %v: %d", off, so, got)
			}
		}
	}
}

// Draws are the same on every instruction set.
func TestSampleSIMD(t *testing.T) {
	r := rand.New(rand.NewPCG(9, 9))
	const vocab = 3001
	logits := randomLogits(r, vocab, 0)
	for i := range 500 {
		p := kernels.Sample{Seed: uint64(i), Temperature: 1, TopP: 0.9, TopK: i, Repetition: 1, Position: i}
		want := draw(t, vocab)(logits, &p)
		for _, simd := range simds {
			if d, err := cpu.Draw(simd, vocab); err == nil {
				if got := d(logits, &p); got != want {
					t.Fatalf("%s draws %d, want %d", simd, got, want)
				}
			}
		}
	}
}

func TestLogprobs(t *testing.T) {
	a := shape(2, 64, 96, 4, 2, 16, 300)
	b := open(t, a, randomWeights(a, kernels.F32, 3), cpu.Options{Blocks: 8, Threads: 2})
	tokens := []int32{5, 9, 200, 3, 77}
	targets := []int32{9, -1, 3, 77, 299}
	res := mustStep(t, b, kernels.Seq{
		Tokens: tokens, Blocks: []int32{3}, Targets: targets, TargetLogprobs: 4, WantLogits: true,
		Samples: []kernels.Sample{
			{TopP: 1, Repetition: 1, Logprobs: 5, Ban: []int32{1}},
			{TopP: 1, Repetition: 1, Logprobs: -1},
			{TopP: 1, Repetition: 1, Logprobs: 0, Temperature: 1, Choice: 2, Seed: 8},
		},
	})[0]
	x := res.Logits
	var sum float64
	for _, v := range x {
		sum += math.Exp(float64(v))
	}
	checkOne := func(what string, l kernels.TokenLogprob) {
		t.Helper()
		rank := int32(0)
		for _, v := range x {
			if v >= x[l.ID] {
				rank++
			}
		}
		if want := float64(x[l.ID]) - math.Log(sum); math.Abs(float64(l.Logprob)-want) > 1e-5 || l.Rank != rank {
			t.Errorf("%s: %+v, want %v rank %d", what, l, want, rank)
		}
	}
	s := res.Samples
	if len(s) != 3 || len(s[0].Top) != 5 || s[1].Top != nil || s[1].Self != (kernels.TokenLogprob{}) || len(s[2].Top) != 0 {
		t.Fatalf("samples %+v", s)
	}
	checkOne("self", s[0].Self)
	checkOne("drawn", s[2].Self)
	if s[0].Token != s[0].Self.ID || s[0].Top[0].ID != s[1].Token {
		t.Errorf("tokens do not match: %+v", s)
	}
	for i, l := range s[0].Top {
		checkOne("top", l)
		if int(l.Rank) != i+1 {
			t.Errorf("top %d has rank %d", i, l.Rank)
		}
	}
	checkOne("target", res.Prompt[4].Self)
	if len(res.Prompt) != 5 || res.Prompt[1].Self != (kernels.TokenLogprob{}) || len(res.Prompt[0].Top) != 4 || res.Prompt[0].Self.ID != 9 {
		t.Errorf("prompt %+v", res.Prompt)
	}
	// Each prompt entry is what the shorter prompt gives.
	for i := range tokens {
		if targets[i] < 0 {
			continue
		}
		want := res.Prompt[i]
		top := slices.Clone(want.Top)
		got := mustStep(t, b, kernels.Seq{Tokens: tokens[i : i+1], Pos: i, Blocks: []int32{3}, Targets: targets[i : i+1], TargetLogprobs: 4})[0].Prompt[0]
		if got.Self != want.Self || !slices.Equal(got.Top, top) {
			t.Errorf("target %d alone: %+v, want %+v", i, got, want)
		}
		res = mustStep(t, b, kernels.Seq{Tokens: tokens, Blocks: []int32{3}, Targets: targets, TargetLogprobs: 4})[0]
	}
}

// TestTopLogprobs: the lower id comes first among equals, ranks count places in the list, and
// places that no token takes are empty.
func TestTopLogprobs(t *testing.T) {
	inf, nan := float32(math.Inf(1)), float32(math.NaN())
	f := func(n int, x []float32, want ...kernels.TokenLogprob) {
		t.Helper()
		got := slices.Repeat([]kernels.TokenLogprob{{ID: 7, Logprob: 7, Rank: 7}}, n)
		if cpu.TopLogprobs(x, 0.5, got); !slices.Equal(got, want) {
			t.Errorf("the %d first of %v: %+v, want %+v", n, x, got, want)
		}
	}
	l := func(id int32, p float32, rank int32) kernels.TokenLogprob {
		return kernels.TokenLogprob{ID: id, Logprob: p, Rank: rank}
	}
	var none kernels.TokenLogprob
	f(0, []float32{1})
	f(1, []float32{1, 3, 3, 2}, l(1, 2.5, 1))
	f(4, []float32{1, 3, nan, 3, 0, 3}, l(1, 2.5, 1), l(3, 2.5, 2), l(5, 2.5, 3), l(0, 0.5, 4))
	f(2, []float32{3, 3, 3, 2, 3}, l(0, 2.5, 1), l(1, 2.5, 2))
	f(3, []float32{2, 1, 2, 1, 2, 1}, l(0, 1.5, 1), l(2, 1.5, 2), l(4, 1.5, 3))
	f(3, []float32{nan, -inf, 1}, l(2, 0.5, 1), l(1, -inf, 2), none)
	f(2, []float32{nan, nan}, none, none)
}

func TestLogSumExp(t *testing.T) {
	inf, nan := float32(math.Inf(1)), float32(math.NaN())
	f := func(want float64, x ...float32) {
		t.Helper()
		if got := cpu.LogSumExp(x); got != want && !(math.Abs(got-want) < 1e-12) {
			t.Errorf("of %v: %v, want %v", x, got, want)
		}
	}
	f(0, 0)
	f(1000+math.Log(2), 1000, 1000, -1000)
	f(-1000+math.Log(3), -1000, nan, -1000, -1000, -inf)
	f(math.Log(1+math.Exp(-1)), 0, -1)
	f(math.Inf(1), 5, inf, nan, inf)
	f(math.Inf(-1), -inf, nan)
	f(math.Inf(-1))
}
