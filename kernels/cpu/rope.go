package cpu

import (
	"math"

	"github.com/xpyd/xpyd/internal/model/arch"
)

// rotation is how layers of a kind rotate: frequencies, half as many as are rotated, in radians a position, and
// a factor on cos and sin.
type rotation struct {
	freq  []float64
	scale float64
}

func rotationOf(a *arch.Config) (r rotation, err error) {
	r.freq, r.scale, err = a.RopeFrequencies()
	return r, err
}

// row writes cos and sin, half of the rotated dimensions of each, of one position.
func (r *rotation) row(dst []float32, pos int) {
	half := len(r.freq)
	for i, f := range r.freq {
		sin, cos := math.Sincos(f * float64(pos))
		dst[i] = float32(cos * r.scale)
		dst[half+i] = float32(sin * r.scale)
	}
}

// rotatePairs is rotate where the two that turn together lie side by side.
func rotatePairs(x, cosSin []float32) {
	half := len(x) / 2
	cos, sin := cosSin[:half], cosSin[half:2*half]
	for i, c := range cos {
		a, b := x[2*i], x[2*i+1]
		x[2*i] = float32(a*c) - float32(b*sin[i])
		x[2*i+1] = float32(b*c) + float32(a*sin[i])
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
