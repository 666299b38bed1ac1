package cpu

import "math"

// fma32 is the correctly rounded float32 a*b+c: what the hardware's FMA gives,
// on every platform.
//
// The product of two float32 is exact in float64. Its sum with c is rounded
// once to 53 bits and again to 24; rounding the first time to odd (Boldo and
// Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms
// using rounding to odd") makes the second rounding the only one that counts.
func fma32(a, b, c float32) float32 {
	p := float64(a) * float64(b)
	q := float64(c)
	s := p + q
	// TwoSum (Knuth): e is exactly p+q-s. It is NaN when s is not finite.
	t := s - p
	e := (p - (s - t)) + (q - t)
	if e == 0 || e != e {
		return float32(s)
	}
	u := math.Float64bits(s)
	if u&1 == 0 {
		if (e > 0) == (s > 0) {
			u++
		} else {
			u--
		}
	}
	return float32(math.Float64frombits(u))
}

// The exponential: one polynomial (Cephes expf, S. Moshier), one sequence of
// operations, in Go here and in assembly in vec_amd64.s. Every product that is
// not an FMA is rounded on its own: float32(x*y) keeps a compiler from fusing.
const (
	expHi    = 88.0
	expLo    = -87.0 // below: 0
	expLog2e = 1.44269504088896341
	expMagic = 12582912.0 // 1.5 * 2^23: adding it rounds to an integer
	expC1    = -0.693359375
	expC2    = 2.12194440e-4
	expP0    = 1.9875691500e-4
	expP1    = 1.3981999507e-3
	expP2    = 8.3334519073e-3
	expP3    = 4.1665795894e-2
	expP4    = 1.6666665459e-1
	expP5    = 5.0000001201e-1
)

func exp32(x float32) float32 {
	t := x
	if expHi < t {
		t = expHi
	}
	if expLo > t {
		t = expLo
	}
	k := fma32(t, expLog2e, expMagic)
	n := k - expMagic
	r := fma32(n, expC1, t)
	r = fma32(n, expC2, r)
	p := fma32(expP0, r, expP1)
	p = fma32(p, r, expP2)
	p = fma32(p, r, expP3)
	p = fma32(p, r, expP4)
	p = fma32(p, r, expP5)
	y := fma32(p, float32(r*r), r) + 1
	if x < expLo {
		return 0
	}
	return y * math.Float32frombits(math.Float32bits(k)<<23+0x3f800000)
}

// tree8 adds eight lanes in the one order used everywhere.
func tree8(l *[8]float32) float32 {
	return ((l[0] + l[1]) + (l[2] + l[3])) + ((l[4] + l[5]) + (l[6] + l[7]))
}
