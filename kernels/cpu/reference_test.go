package cpu_test

import (
	"cmp"
	"encoding/binary"
	"math"
	"slices"
	"testing"

	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kernels"
)

// value reads one weight, independently of the package under test.
func value(t kernels.Tensor, i int) float64 {
	switch t.DType {
	case kernels.BF16:
		return float64(math.Float32frombits(uint32(binary.LittleEndian.Uint16(t.Data[2*i:])) << 16))
	case kernels.F16:
		h := binary.LittleEndian.Uint16(t.Data[2*i:])
		v := math.Ldexp(1024+float64(h&1023), int(h>>10&31)-25)
		if h>>10&31 == 0 {
			v = math.Ldexp(float64(h&1023), -24)
		}
		if h>>15 == 1 {
			v = -v
		}
		return v
	}
	return float64(math.Float32frombits(binary.LittleEndian.Uint32(t.Data[4*i:])))
}

func naiveMul(t kernels.Tensor, rows int, x []float64) []float64 {
	out := make([]float64, rows)
	for r := range out {
		for k, v := range x {
			out[r] += value(t, r*len(x)+k) * v
		}
	}
	return out
}

func naiveNorm(a arch.Config, w kernels.Tensor, x []float64) []float64 {
	eps, one := float64(a.NormEps), 0.0
	if a.NormsFromOne {
		one = 1
	}
	var ss float64
	for _, v := range x {
		ss += v * v
	}
	out := make([]float64, len(x))
	for i, v := range x {
		out[i] = v / math.Sqrt(ss/float64(len(x))+eps) * (one + value(w, i))
	}
	return out
}

// naiveFeed is the feed-forward, or an expert's, at a place.
func naiveFeed(w kernels.Weights, at arch.Place, gelu bool, hidden, width int, x []float64) []float64 {
	of := func(r arch.Role) kernels.Tensor { return w[r.Of(at.Layer, at.Expert)] }
	g, u := naiveMul(of(arch.Gate), width, x), naiveMul(of(arch.Up), width, x)
	for i, v := range g {
		if g[i] = v / (1 + math.Exp(-v)) * u[i]; gelu {
			g[i] = v / 2 * (1 + math.Tanh(math.Sqrt(2/math.Pi)*(v+0.044715*v*v*v))) * u[i]
		}
	}
	return naiveMul(of(arch.Down), hidden, g)
}

// naiveRoute is the part of each chosen expert, with bias that of a shared mixture's choice.
func naiveRoute(a arch.Config, logits []float64, bias kernels.Tensor) map[int]float64 {
	if a.Routing != "" {
		return naiveGroups(a, logits, bias)
	}
	order := make([]int, len(logits))
	total, chosen := 0.0, 0.0
	for i, v := range logits {
		order[i] = i
		total += math.Exp(v)
	}
	slices.SortStableFunc(order, func(x, y int) int { return cmp.Compare(logits[y], logits[x]) })
	parts := map[int]float64{}
	for _, e := range order[:a.ExpertsPerToken] {
		parts[e] = math.Exp(logits[e]) / total
		chosen += parts[e]
	}
	for e := range parts {
		if a.NormExperts {
			parts[e] /= chosen
		}
	}
	return parts
}

// naiveGroups is naiveRoute of experts that are chosen from groups of them.
func naiveGroups(a arch.Config, logits []float64, bias kernels.Tensor) map[int]float64 {
	scores, choice := make([]float64, len(logits)), make([]float64, len(logits))
	total := 0.0
	for _, v := range logits {
		total += math.Exp(v)
	}
	for i, v := range logits {
		if scores[i] = math.Exp(v) / total; a.Routing == arch.SigmoidBias {
			scores[i] = 1 / (1 + math.Exp(-v))
			choice[i] = value(bias, i)
		}
		choice[i] += scores[i]
	}
	best := func(v []float64, n int) []int {
		order := make([]int, len(v))
		for i := range order {
			order[i] = i
		}
		slices.SortStableFunc(order, func(x, y int) int { return cmp.Compare(v[y], v[x]) })
		return order[:n]
	}
	allowed := map[int]bool{}
	groups := max(1, a.ExpertGroups)
	worth, size := make([]float64, groups), len(logits)/groups
	for g := range groups {
		of := choice[g*size:][:size]
		if worth[g] = of[best(of, 1)[0]]; a.Routing == arch.SigmoidBias && size > 1 {
			worth[g] += of[best(of, 2)[1]]
		}
	}
	for _, g := range best(worth, max(1, a.TopGroups)) {
		allowed[g] = true
	}
	for i := range choice {
		if !allowed[i/size] {
			choice[i] = math.Inf(-1)
		}
	}
	parts, sum := map[int]float64{}, 0.0
	for _, e := range best(choice, a.ExpertsPerToken) {
		parts[e] = scores[e] * a.RoutedScale
		sum += scores[e]
	}
	for e := range parts {
		if a.NormExperts {
			parts[e] /= sum
		}
	}
	return parts
}

// naiveLatent is latent attention with keys and values as the paper forms them, which the CPU never does. It adds the
// position to rows: latents, and rotated keys behind them.
func naiveLatent(a arch.Config, l func(arch.Role) kernels.Tensor, n []float64, rows *[][]float64, pos int, freq []float64, factor, scale float64) []float64 {
	eps := a
	eps.NormEps = arch.LatentEps
	turn := func(v []float64) {
		for i := range len(v) / 2 {
			s, c := math.Sincos(freq[i] * float64(pos))
			s, c = s*factor, c*factor
			v[2*i], v[2*i+1] = v[2*i]*c-v[2*i+1]*s, v[2*i+1]*c+v[2*i]*s
		}
	}
	q, width := []float64(nil), a.Heads*a.HeadDim
	if a.QRank > 0 {
		q = naiveMul(l(arch.QB), width, naiveNorm(eps, l(arch.QANorm), naiveMul(l(arch.QA), a.QRank, n)))
	} else {
		q = naiveMul(l(arch.Q), width, n)
	}
	row := naiveMul(l(arch.KVA), a.KVRank+a.RopeDim, n)
	copy(row, naiveNorm(eps, l(arch.KVANorm), row[:a.KVRank]))
	turn(row[a.KVRank:])
	*rows = append(*rows, row)
	out := make([]float64, a.Heads*a.ValueDim)
	each := a.NopeDim + a.ValueDim
	formed := make([][]float64, len(*rows))
	for t, r := range *rows {
		formed[t] = naiveMul(l(arch.KVB), a.Heads*each, r[:a.KVRank])
	}
	for h := range a.Heads {
		qh := q[h*a.HeadDim:][:a.HeadDim]
		turn(qh[a.NopeDim:])
		p, sum := make([]float64, len(*rows)), 0.0
		for t, r := range *rows {
			key := append(slices.Clone(formed[t][h*each:][:a.NopeDim]), r[a.KVRank:]...)
			dot := 0.0
			for i := range key {
				dot += qh[i] * key[i]
			}
			p[t] = math.Exp(dot * scale)
			sum += p[t]
		}
		for t := range p {
			for i := range a.ValueDim {
				out[h*a.ValueDim+i] += p[t] / sum * formed[t][h*each+a.NopeDim+i]
			}
		}
	}
	return out
}

// naiveForward is a whole forward pass in float64, written from the papers:
// it returns the logits after every token, and the hidden states that they are computed from. rope gives a
// position's rotation.
func naiveForward(a arch.Config, w kernels.Weights, tokens []int32, freq []float64, factor float64) (all, states [][]float64) {
	d, group := a.HeadDim, a.Heads/a.KVHeads
	keys, vals := make([][][]float64, a.Layers), make([][][]float64, a.Layers)
	latents := make([][][]float64, a.Layers)
	for pos, id := range tokens {
		x := make([]float64, a.Hidden)
		for i := range x {
			if x[i] = value(w[arch.Embed.At(0)], int(id)*a.Hidden+i); a.EmbedScale > 0 {
				x[i] *= float64(a.EmbedScale)
			}
		}
		turns, factor := freq, factor
		finish := func(v []float64, bias, norm kernels.Tensor, turn bool) []float64 {
			for i := range v {
				if a.QKVBias {
					v[i] += value(bias, i)
				}
			}
			for h := 0; turn && h < len(v); h += d {
				head := v[h : h+d]
				if a.QKNorm {
					copy(head, naiveNorm(a, norm, head))
				}
				for i := range d / 2 {
					s, c := math.Sincos(turns[i] * float64(pos))
					s, c = s*factor, c*factor
					p, q := head[i], head[i+d/2]
					head[i], head[i+d/2] = p*c-q*s, q*c+p*s
				}
			}
			return v
		}
		for li := range a.Layers {
			l := func(r arch.Role) kernels.Tensor { return w[r.At(li)] }
			attention, feed := a.Layer(li)
			first, scale := 0, 1/math.Sqrt(float64(d))
			if a.ScoreScale > 0 {
				scale = a.ScoreScale
			}
			if turns = freq; attention == arch.WindowGQA {
				first = max(0, pos+1-a.Window)
				turns = make([]float64, d/2)
				for i := range turns {
					turns[i] = math.Pow(a.WindowTheta, -float64(2*i)/float64(d))
				}
			}
			add := func(post arch.Role, delta []float64) {
				if a.PostNorms {
					delta = naiveNorm(a, l(post), delta)
				}
				for i, v := range delta {
					x[i] += v
				}
			}
			n := naiveNorm(a, l(arch.AttnNorm), x)
			feedAndAdd := func() {
				n = naiveNorm(a, l(arch.MLPNorm), x)
				if feed == arch.SwiGLU || feed == arch.GeGLU {
					add(arch.MLPPostNorm, naiveFeed(w, arch.Place{Layer: li}, feed == arch.GeGLU, a.Hidden, a.Intermediate, n))
					return
				}
				for e, part := range naiveRoute(a, naiveMul(l(arch.Router), a.Experts, n), l(arch.RouterBias)) {
					for i, v := range naiveFeed(w, arch.Place{Layer: li, Expert: e}, false, a.Hidden, a.ExpertWidth, n) {
						x[i] += part * v
					}
				}
				if width := a.SharedExperts * a.ExpertWidth; width > 0 {
					shared := kernels.Weights{arch.Gate.At(0): l(arch.SharedGate), arch.Up.At(0): l(arch.SharedUp), arch.Down.At(0): l(arch.SharedDown)}
					add(arch.MLPPostNorm, naiveFeed(shared, arch.Place{}, false, a.Hidden, width, n))
				}
			}
			if attention == arch.MLA {
				out := naiveLatent(a, l, n, &latents[li], pos, freq, factor, scale)
				add(arch.AttnPostNorm, naiveMul(l(arch.O), a.Hidden, out))
				feedAndAdd()
				continue
			}
			q := finish(naiveMul(l(arch.Q), a.Heads*d, n), l(arch.QBias), l(arch.QNorm), true)
			keys[li] = append(keys[li], finish(naiveMul(l(arch.K), a.KVHeads*d, n), l(arch.KBias), l(arch.KNorm), true))
			vals[li] = append(vals[li], finish(naiveMul(l(arch.V), a.KVHeads*d, n), l(arch.VBias), kernels.Tensor{}, false))
			out := make([]float64, a.Heads*d)
			for h := range a.Heads {
				at := h / group * d
				p := make([]float64, pos+1)
				var sum float64
				for t := first; t <= pos; t++ {
					var dot float64
					for i := range d {
						dot += q[h*d+i] * keys[li][t][at+i]
					}
					p[t] = math.Exp(dot * scale)
					sum += p[t]
				}
				for t := range p {
					for i := range d {
						out[h*d+i] += p[t] / sum * vals[li][t][at+i]
					}
				}
			}
			add(arch.AttnPostNorm, naiveMul(l(arch.O), a.Hidden, out))
			feedAndAdd()
		}
		head := w[arch.Head.At(0)]
		if a.TiedHead {
			head = w[arch.Embed.At(0)]
		}
		states = append(states, naiveNorm(a, w[arch.Norm.At(0)], x))
		all = append(all, naiveMul(head, a.Vocab, states[pos]))
	}
	return all, states
}

// reference compares logits with the naive forward.
func reference(t *testing.T, a arch.Config, w kernels.Weights, tokens []int32, got [][]float32) {
	t.Helper()
	logits, _ := forward(t, a, w, tokens)
	closeTo(t, "logits", got, logits)
}

func forward(t *testing.T, a arch.Config, w kernels.Weights, tokens []int32) (logits, states [][]float64) {
	t.Helper()
	freq, factor, err := a.RopeFrequencies()
	if err != nil {
		t.Fatal(err)
	}
	return naiveForward(a, w, tokens, freq, factor)
}

func closeTo(t *testing.T, what string, got [][]float32, want [][]float64) {
	t.Helper()
	worst := 0.0
	for i := range want {
		for j, v := range want[i] {
			worst = max(worst, math.Abs(v-float64(got[i][j])))
		}
	}
	if worst > 2e-4 {
		t.Errorf("%s differ from float64 by up to %g", what, worst)
	}
}
