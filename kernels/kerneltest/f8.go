package kerneltest

import (
	"encoding/binary"
	"maps"
	"math"
	"sort"

	"github.com/xpyd/xpyd/kernels"
)

// form is a binary float: mantissa bits, and the least exponent.
type form struct{ man, least int }

var e4m3 = form{3, -6}

// value is the magnitude of a code, as if no code were infinite or NaN.
func (f form) value(code int) float64 {
	frac := math.Ldexp(float64(code&(1<<f.man-1)), -f.man)
	if exp := code >> f.man; exp > 0 {
		return math.Ldexp(1+frac, exp-1+f.least)
	}
	return math.Ldexp(frac, f.least)
}

// nearest is the code up to last whose value is nearest to m, ties to even.
func (f form) nearest(m float64, last int) int {
	i := sort.Search(last, func(code int) bool { return f.value(code) >= m })
	if i > 0 {
		if low, high := m-f.value(i-1), f.value(i)-m; low < high || low == high && i%2 == 1 {
			i--
		}
	}
	return i
}

// ToE4M3 rounds v to the nearest code, ties to even; beyond 448 is 448.
func ToE4M3(v float32) byte {
	return byte(math.Float32bits(v)>>24&0x80) | byte(e4m3.nearest(math.Abs(float64(v)), 0x7e))
}

// FromE4M3 is the value of a code that is not NaN.
func FromE4M3(q byte) float32 {
	sign := uint32(q&0x80) << 24
	return math.Float32frombits(math.Float32bits(float32(e4m3.value(int(q&0x7f)))) | sign)
}

// F8Tensor rounds a matrix to FP8 as backends do, each row by its greatest magnitude
// over 448, and also returns the rounded values in f32.
func F8Tensor(t kernels.Tensor) (f8, widened kernels.Tensor) {
	rows, cols := t.Shape[0], t.Shape[1]
	f8 = kernels.Tensor{DType: kernels.F8, Shape: t.Shape, Data: make([]byte, rows*cols), Scale: make([]float32, rows)}
	widened = kernels.Tensor{DType: kernels.F32, Shape: t.Shape, Data: make([]byte, 4*rows*cols)}
	for r := range rows {
		top := float32(0)
		for i := r * cols; i < (r+1)*cols; i++ {
			top = max(top, float32(math.Abs(float64(kernels.Widen(t.DType, t.Data, i)))))
		}
		s := scaleOf(top)
		f8.Scale[r] = s
		for i := r * cols; i < (r+1)*cols; i++ {
			f8.Data[i] = ToE4M3(kernels.Widen(t.DType, t.Data, i) / s)
			binary.LittleEndian.PutUint32(widened.Data[4*i:], math.Float32bits(FromE4M3(f8.Data[i])*s))
		}
	}
	return f8, widened
}

// scaleOf is the scale of a row by its greatest magnitude.
func scaleOf(top float32) float32 {
	if top == 0 {
		return 1
	}
	return max(top/448, 0x1p-126)
}

// F8Weights is w with the layers' projections in FP8, and widened.
func F8Weights(w kernels.Weights) (f8, widened kernels.Weights) {
	f8, widened = maps.Clone(w), maps.Clone(w)
	for p, t := range w {
		if p.Role.Projection() {
			f8[p], widened[p] = F8Tensor(t)
		}
	}
	return f8, widened
}
