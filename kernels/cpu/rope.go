package cpu

import "math"

// ropeRow writes cos and sin, head_dim/2 of each, of one position.
func (b *Backend) ropeRow(dst []float32, pos int) {
	half := len(b.freq)
	for i, f := range b.freq {
		sin, cos := math.Sincos(f * float64(pos))
		dst[i] = float32(cos * b.freqScale)
		dst[half+i] = float32(sin * b.freqScale)
	}
}

// rotate applies RoPE in the rotate-half convention to one head in place.
// Products are rounded before they are added: no compiler may fuse them.
func rotate(x, cosSin []float32) {
	half := len(x) / 2
	lo, hi := x[:half], x[half:2*half]
	cos, sin := cosSin[:half], cosSin[half:2*half]
	for i, a := range lo {
		b := hi[i]
		lo[i] = float32(a*cos[i]) - float32(b*sin[i])
		hi[i] = float32(b*cos[i]) + float32(a*sin[i])
	}
}
