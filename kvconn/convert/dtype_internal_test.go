package convert

import (
	"encoding/binary"
	"math"
	"slices"
	"sort"
	"testing"

	"github.com/xpyd/xpyd/kvlayout"
)

// format is a small float given by its parts: the reference that the fast
// forms are held against. It is slow and exact.
type format struct {
	name      string
	man, bias int
	inf       bool // has infinities above its largest finite value
	encode    func(float32) uint32
	decode    func(uint32) float32
	bits      int
}

var formats = []format{
	{"f16", 10, 15, true, func(v float32) uint32 { return uint32(toF16(v)) }, func(b uint32) float32 { return fromF16(uint16(b)) }, 16},
	{"bf16", 7, 127, true, func(v float32) uint32 { return uint32(toBF16(v)) }, func(b uint32) float32 { return math.Float32frombits(b << 16) }, 16},
	{"f8e4m3", 3, 7, false, func(v float32) uint32 { return uint32(toE4M3(v)) }, func(b uint32) float32 { return fromE4M3(byte(b)) }, 8},
}

// finite lists the non-negative finite values in order; the index is the code.
func (f *format) finite() []float64 {
	top := 1<<(f.bits-1) - 1 // E4M3: all but its NaN
	if f.inf {
		top = (1<<(f.bits-1-f.man) - 1) << f.man
	}
	out := make([]float64, top)
	for code := range out {
		exp, frac := code>>f.man, code&(1<<f.man-1)
		if exp == 0 {
			out[code] = math.Ldexp(float64(frac), 1-f.bias-f.man)
		} else {
			out[code] = math.Ldexp(float64(frac|1<<f.man), exp-f.bias-f.man)
		}
	}
	return out
}

// nearest is the code of v's magnitude by comparing distances, ties to even.
func (f *format) nearest(values []float64, v float64) uint32 {
	n := len(values)
	next := 2*values[n-1] - values[n-2] // where the next value would be
	if v >= (values[n-1]+next)/2 {      // the top code is odd in each format with infinities
		if f.inf {
			return uint32(n)
		}
		return uint32(n - 1)
	}
	i := sort.SearchFloat64s(values, v) // the least value >= v
	switch {
	case i == n:
		return uint32(n - 1)
	case values[i] == v:
		return uint32(i)
	}
	below, above := v-values[i-1], values[i]-v
	if below < above || below == above && (i-1)%2 == 0 {
		return uint32(i - 1)
	}
	return uint32(i)
}

func (f *format) check(t *testing.T, values []float64, v float32) {
	t.Helper()
	got := f.encode(v)
	sign := uint32(0)
	if math.Signbit(float64(v)) {
		sign = 1 << (f.bits - 1)
	}
	if math.IsNaN(float64(v)) || !f.inf && math.IsInf(float64(v), 0) {
		if back := f.decode(got); !math.IsNaN(float64(back)) || got&(1<<(f.bits-1)) != sign {
			t.Fatalf("%s: %x became %x, %v", f.name, math.Float32bits(v), got, back)
		}
		return
	}
	want := sign | uint32(len(values)) // infinity
	if !math.IsInf(float64(v), 0) {
		want = sign | f.nearest(values, math.Abs(float64(v)))
	}
	if got != want {
		t.Fatalf("%s: %v (%x) became %x, want %x", f.name, v, math.Float32bits(v), got, want)
	}
}

// interesting are float32 values at and around every value and every midpoint
// of the format.
func (f *format) interesting(values []float64) []float32 {
	var out []float32
	around := func(v float64) {
		b := math.Float32bits(float32(v))
		for d := -2; d <= 2; d++ {
			if x := int64(b) + int64(d); x >= 0 && x < infinity {
				out = append(out, math.Float32frombits(uint32(x)), -math.Float32frombits(uint32(x)))
			}
		}
	}
	for i, v := range values {
		around(v)
		if i > 0 {
			around((v + values[i-1]) / 2)
		}
	}
	n := len(values)
	around((3*values[n-1] - values[n-2]) / 2)
	around(math.MaxFloat32)
	around(math.SmallestNonzeroFloat32)
	around(0x1p-126)
	inf := float32(math.Inf(1))
	for _, b := range []uint32{infinity + 1, 0x7fc00000, 0x7fffffff, 0xff800001, 0xffc12345, signBit} {
		out = append(out, math.Float32frombits(b))
	}
	return append(out, inf, -inf)
}

func TestRounding(t *testing.T) {
	for _, f := range formats {
		values := f.finite()
		for _, v := range f.interesting(values) {
			f.check(t, values, v)
		}
	}
}

// Every code is decoded to its value, and encoded to itself.
func TestEveryCode(t *testing.T) {
	for _, f := range formats {
		values := f.finite()
		for code := range uint32(1) << f.bits {
			m, v := code&(1<<(f.bits-1)-1), float64(f.decode(code))
			switch {
			case int(m) < len(values):
				want := values[m]
				if code != m {
					want = -want
				}
				if v != want || math.Signbit(v) != (code != m) {
					t.Fatalf("%s: %x is %v, want %v", f.name, code, v, want)
				}
			case f.inf && int(m) == len(values):
				if !math.IsInf(v, 1-2*int(code>>(f.bits-1))) {
					t.Fatalf("%s: %x is %v", f.name, code, v)
				}
			default:
				if !math.IsNaN(v) || !math.IsNaN(float64(f.decode(f.encode(f.decode(code))))) {
					t.Fatalf("%s: %x is %v", f.name, code, v)
				}
				continue
			}
			if again := f.encode(float32(v)); again != code {
				t.Fatalf("%s: %x became %x", f.name, code, again)
			}
		}
	}
}

func FuzzRounding(f *testing.F) {
	var values [3][]float64
	for i := range formats {
		values[i] = formats[i].finite()
	}
	for _, b := range []uint32{0, signBit, 1, 0x3f800000, 0x477fefff, 0x477ff000, 0x33000000, 0x33000001, infinity, 0x7fc00000, 0x43e80000, 0xc3e00001} {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b uint32) {
		for i := range formats {
			formats[i].check(t, values[i], math.Float32frombits(b))
		}
	})
}

func TestScale(t *testing.T) {
	inf, nan := float32(math.Inf(1)), float32(math.NaN())
	f := func(want float32, row ...float32) {
		t.Helper()
		if got := e4m3Scale(row); got != want {
			t.Errorf("%v: %v, want %v", row, got, want)
		}
	}
	f(1)
	f(1, 0, 0)
	f(1, 448, -3)
	f(2, -896, 1)
	f(1, inf, nan)
	f(0.5, inf, 224, nan)
	f(0x1p-126, math.SmallestNonzeroFloat32)
}

// What is encoded and decoded again is what the definition says, whatever the
// bytes; a second time changes nothing.
func FuzzRow(f *testing.F) {
	row := make([]byte, 0, 64)
	for _, v := range []float32{0, 1, -1, 448, 1e-40, 65520, 3e38, float32(math.Inf(-1)), float32(math.NaN()), 0.1} {
		row = binary.LittleEndian.AppendUint32(row, math.Float32bits(v))
	}
	f.Add(row)
	f.Fuzz(func(t *testing.T, b []byte) {
		src := make([]float32, len(b)/4)
		decode(src, "f32", b, nil)
		for _, to := range []kvlayout.DType{kvlayout.F16, kvlayout.BF16, kvlayout.F8E4M3} {
			out, scale := make([]byte, to.Bytes(len(src))), make([]byte, 4)
			encode(out, scale, to, src)
			got := make([]float32, len(src))
			decode(got, to, out, scale)
			if to == kvlayout.F8E4M3 {
				s := float64(math.Float32frombits(binary.LittleEndian.Uint32(scale)))
				for i, v := range src {
					// Half a step of 3 mantissa bits, or of a subnormal, and the
					// roundings of the quotient and the product.
					if err := math.Abs(float64(v) - float64(got[i])); !math.IsInf(float64(v), 0) && err > math.Max(math.Abs(float64(v))/15.9, 1.01*s*0x1p-10) {
						t.Errorf("%v became %v by scale %v", v, got[i], s)
					}
				}
				continue
			}
			again := make([]byte, len(out))
			encode(again, nil, to, got)
			if !slices.Equal(again, out) {
				t.Errorf("%s: %x became %x", to, out, again)
			}
		}
	})
}
