// Package convert turns packed KV rows of one form into rows of another: a
// slice of their heads, or another dtype. A sender converts on the way out, in a
// kvconn.Source around its own (Source).
//
// A slice keeps its rows' digests. Rows of another dtype get new ones, after
// the old ones were checked: a bad row must not get a good digest.
//
// Non-goals: choosing the form (the handshake's and the ticket's), block sizes
// (the inner source's), and what a digest is (the caller's function).
package convert

import (
	"encoding/binary"
	"math"

	"github.com/xpyd/xpyd/kvlayout"
)

// decode widens the elements of one row to float32, exactly, except for
// kvlayout.F8E4M3, where the product with the scale is rounded once.
func decode(dst []float32, dtype kvlayout.DType, row, scale []byte) {
	switch dtype {
	case kvlayout.F32:
		for i := range dst {
			dst[i] = math.Float32frombits(binary.LittleEndian.Uint32(row[4*i:]))
		}
	case kvlayout.F16:
		for i := range dst {
			dst[i] = fromF16(binary.LittleEndian.Uint16(row[2*i:]))
		}
	case kvlayout.BF16:
		for i := range dst {
			dst[i] = math.Float32frombits(uint32(binary.LittleEndian.Uint16(row[2*i:])) << 16)
		}
	case kvlayout.F8E4M3:
		s := math.Float32frombits(binary.LittleEndian.Uint32(scale))
		for i := range dst {
			dst[i] = fromE4M3(row[i]) * s
		}
	}
}

// encode rounds the elements of one row to nearest, ties to even. Overflow of f16 and
// bf16 is infinity. kvlayout.F8E4M3 has a scale a row, the greatest finite magnitude
// over 448, at least 2^-126. It has no infinities: they become NaN.
func encode(row, scale []byte, dtype kvlayout.DType, src []float32) {
	switch dtype {
	case kvlayout.F32:
		for i, v := range src {
			binary.LittleEndian.PutUint32(row[4*i:], math.Float32bits(v))
		}
	case kvlayout.F16:
		for i, v := range src {
			binary.LittleEndian.PutUint16(row[2*i:], toF16(v))
		}
	case kvlayout.BF16:
		for i, v := range src {
			binary.LittleEndian.PutUint16(row[2*i:], toBF16(v))
		}
	case kvlayout.F8E4M3:
		s := e4m3Scale(src)
		binary.LittleEndian.PutUint32(scale, math.Float32bits(s))
		for i, v := range src {
			row[i] = toE4M3(v / s)
		}
	}
}

// Parts of a float32.
const (
	signBit  = 1 << 31
	infinity = 0x7f800000 // greater magnitudes are NaN
)

// toBF16 keeps NaN a NaN, made quiet.
func toBF16(v float32) uint16 {
	b := math.Float32bits(v)
	if b&^signBit > infinity {
		return uint16(b>>16) | 0x40
	}
	return uint16((b + 0x7fff + b>>16&1) >> 16)
}

// narrow rounds the magnitude of a finite float32 to a format with man mantissa bits
// and this exponent bias. The caller checks for a result beyond the format's largest
// exponent.
func narrow(magnitude uint32, man, bias int) uint32 {
	exp := int(magnitude>>23) - 127
	if exp < -126 { // a float32 subnormal is nothing in any narrower format
		return 0
	}
	frac := magnitude&(1<<23-1) | 1<<23
	shift, base := 23-man, uint32(0)
	if least := 1 - bias; exp < least { // subnormal there
		shift += least - exp
	} else {
		base = uint32(exp+bias-1) << man // frac's leading bit adds the last one
	}
	if shift > 25 {
		return 0
	}
	whole, rest, half := frac>>shift, frac&(1<<shift-1), uint32(1)<<(shift-1)
	if rest > half || rest == half && whole&1 == 1 {
		whole++ // may carry into the exponent, as it should
	}
	return base + whole
}

func toF16(v float32) uint16 {
	b := math.Float32bits(v)
	sign, m := uint16(b>>16)&0x8000, b&^signBit
	switch {
	case m > infinity:
		return sign | 0x7e00 | uint16(m>>13)&0x3ff
	case m == infinity:
		return sign | 0x7c00
	}
	return sign | uint16(min(narrow(m, 10, 15), 0x7c00))
}

func fromF16(h uint16) float32 {
	sign, m := uint32(h&0x8000)<<16, uint32(h&0x7fff)
	switch {
	case m >= 0x7c00: // infinity and NaN
		return math.Float32frombits(sign | infinity | m&0x3ff<<13)
	case m < 0x400: // subnormal: a multiple of 2^-24, exact
		return math.Float32frombits(math.Float32bits(float32(m)*0x1p-24) | sign)
	}
	return math.Float32frombits(sign | (m<<13 + (127-15)<<23))
}

// The largest finite value of E4M3, and its only NaN.
const (
	e4m3Max = 448
	e4m3Top = 0x7e
	e4m3NaN = 0x7f
)

// toE4M3 takes a scaled value; values beyond 448 become 448.
func toE4M3(v float32) byte {
	b := math.Float32bits(v)
	sign, m := byte(b>>24)&0x80, b&^signBit
	if m >= infinity {
		return sign | e4m3NaN
	}
	return sign | byte(min(narrow(m, 3, 7), e4m3Top))
}

func fromE4M3(q byte) float32 {
	sign, m := uint32(q&0x80)<<24, uint32(q&0x7f)
	switch {
	case m == e4m3NaN:
		return math.Float32frombits(sign | infinity | 1<<22)
	case m < 8: // subnormal: a multiple of 2^-9, exact
		return math.Float32frombits(math.Float32bits(float32(m)*0x1p-9) | sign)
	}
	return math.Float32frombits(sign | (m<<20 + (127-7)<<23))
}

// e4m3Scale maps the row's greatest finite magnitude to 448. A row without one
// has scale 1; the floor keeps the quotients finite.
func e4m3Scale(row []float32) float32 {
	top := uint32(0)
	for _, v := range row {
		if m := math.Float32bits(v) &^ signBit; m < infinity {
			top = max(top, m)
		}
	}
	if top == 0 {
		return 1
	}
	return max(math.Float32frombits(top)/e4m3Max, 0x1p-126)
}
