package kerneltest

import (
	"encoding/binary"
	"maps"
	"math"
	"sort"

	"github.com/xpyd/xpyd/kernels"
)

// e4m3 are the finite magnitudes of E4M3 by code.
var e4m3 = func() (t [127]float64) {
	for i := range t {
		exp, man := i>>3, float64(i&7)/8
		if t[i] = math.Ldexp(man, -6); exp > 0 {
			t[i] = math.Ldexp(1+man, exp-7)
		}
	}
	return t
}()

// ToE4M3 rounds v to the nearest code, ties to even; beyond 448 is 448.
func ToE4M3(v float32) byte {
	m := math.Abs(float64(v))
	i := min(sort.SearchFloat64s(e4m3[:], m), len(e4m3)-1)
	if i > 0 {
		if low, high := m-e4m3[i-1], e4m3[i]-m; low < high || low == high && i%2 == 1 {
			i--
		}
	}
	if math.Signbit(float64(v)) {
		i |= 0x80
	}
	return byte(i)
}

// FromE4M3 is the value of a code that is not NaN.
func FromE4M3(q byte) float32 {
	v := e4m3[q&0x7f]
	if q >= 0x80 {
		v = -v
	}
	return float32(v)
}

// F8Tensor rounds a matrix to FP8 as backends do, each row by its greatest
// magnitude over 448, and returns also what it stands for, in f32.
func F8Tensor(t kernels.Tensor) (f8, widened kernels.Tensor) {
	rows, cols := t.Shape[0], t.Shape[1]
	f8 = kernels.Tensor{DType: kernels.F8, Shape: t.Shape, Data: make([]byte, rows*cols), Scale: make([]float32, rows)}
	widened = kernels.Tensor{DType: kernels.F32, Shape: t.Shape, Data: make([]byte, 4*rows*cols)}
	at := func(i int) float32 { return kernels.Widen(t.DType, t.Data, i) }
	for r := range rows {
		top := float32(0)
		for c := range cols {
			top = max(top, float32(math.Abs(float64(at(r*cols+c)))))
		}
		s := max(top/448, 0x1p-126)
		if top == 0 {
			s = 1
		}
		f8.Scale[r] = s
		for c := range cols {
			q := ToE4M3(at(r*cols+c) / s)
			f8.Data[r*cols+c] = q
			binary.LittleEndian.PutUint32(widened.Data[4*(r*cols+c):], math.Float32bits(FromE4M3(q)*s))
		}
	}
	return f8, widened
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
