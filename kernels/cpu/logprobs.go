package cpu

import (
	"math"
	"slices"

	"github.com/xpyd/xpyd/kernels"
)

// logSumExp is log(sum(exp(x))) in float64, in order of id. NaN is skipped.
func logSumExp(x []float32) float64 {
	m := math.Inf(-1)
	for _, v := range x {
		m = max(m, orNegInf(v))
	}
	if math.IsInf(m, 0) {
		return m
	}
	var sum float64
	for _, v := range x {
		if d := orNegInf(v) - m; d > -746 { // exp is 0 below
			sum += math.Exp(d)
		}
	}
	return m + math.Log(sum)
}

func orNegInf(v float32) float64 {
	if v != v {
		return math.Inf(-1)
	}
	return float64(v)
}

// logprob describes one token under raw logits. Its rank is the number of
// tokens at least as likely, as vLLM counts it.
func logprob(x []float32, lse float64, id int32) kernels.TokenLogprob {
	v := x[id]
	rank := int32(0)
	for _, u := range x {
		if u >= v {
			rank++
		}
	}
	return kernels.TokenLogprob{ID: id, Logprob: float32(float64(v) - lse), Rank: rank}
}

// topLogprobs fills dst with the most likely tokens, the lower id first among
// equals. Ranks count places: 1, 2, 3 ...
func topLogprobs(x []float32, lse float64, dst []kernels.TokenLogprob) {
	if len(dst) == 0 {
		return
	}
	// dst[:n] is sorted all along; most tokens fail the first comparison.
	n := 0
	for i, v := range x {
		if n == len(dst) && !(v > dst[n-1].Logprob) || v != v {
			continue
		}
		at, _ := slices.BinarySearchFunc(dst[:n], v, func(e kernels.TokenLogprob, v float32) int {
			if e.Logprob >= v {
				return -1
			}
			return 1
		})
		n = min(n+1, len(dst))
		copy(dst[at+1:n], dst[at:n-1])
		dst[at] = kernels.TokenLogprob{ID: int32(i), Logprob: v}
	}
	for i := range dst[:n] {
		dst[i].Logprob = float32(float64(dst[i].Logprob) - lse)
		dst[i].Rank = int32(i + 1)
	}
	clear(dst[n:])
}
