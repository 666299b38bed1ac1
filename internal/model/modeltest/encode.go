package modeltest

import (
	"encoding/binary"
	"math"

	"github.com/xpyd/xpyd/kernels"
)

// encode appends v to dst, little-endian, rounded to nearest even.
func encode(dst []byte, v []float32, d kernels.DType) []byte {
	for _, x := range v {
		switch d {
		case kernels.F32:
			dst = binary.LittleEndian.AppendUint32(dst, math.Float32bits(x))
		case kernels.BF16:
			b := math.Float32bits(x)
			dst = binary.LittleEndian.AppendUint16(dst, uint16((b+0x7fff+(b>>16&1))>>16))
		case kernels.F16:
			dst = binary.LittleEndian.AppendUint16(dst, half(x))
		}
	}
	return dst
}

// half rounds a finite x to F16. What is too large becomes infinity.
func half(x float32) uint16 {
	b := math.Float32bits(x)
	sign := uint16(b >> 16 & 0x8000)
	a := math.Float32frombits(b &^ (1 << 31))
	if a >= 65520 {
		return sign | 0x7c00
	}
	if a < 1.0/(1<<14) { // subnormal: count of 2^-24
		return sign | uint16(math.RoundToEven(float64(a)*(1<<24)))
	}
	b &^= 1 << 31
	b += 0xfff + (b >> 13 & 1)
	return sign | uint16(b>>13-112<<10)
}

// quantise packs v into blocks of 32 in ggml's Q8_0 or Q4_0 layout.
func quantise(v []float32, kind string) []byte {
	var out []byte
	for ; len(v) > 0; v = v[32:] {
		peak := float32(0)
		for _, x := range v[:32] {
			if math.Abs(float64(x)) > math.Abs(float64(peak)) {
				peak = x
			}
		}
		steps := float32(-8)
		if kind == "Q8_0" {
			steps, peak = 127, float32(math.Abs(float64(peak)))
		}
		d, inverse := peak/steps, float32(0)
		if d != 0 {
			inverse = 1 / d
		}
		out = binary.LittleEndian.AppendUint16(out, half(d))
		if kind == "Q8_0" {
			for _, x := range v[:32] {
				out = append(out, byte(int8(math.Round(float64(x*inverse)))))
			}
			continue
		}
		nibble := func(x float32) byte { return byte(min(15, int(x*inverse+8.5))) }
		for i := range 16 {
			out = append(out, nibble(v[i])|nibble(v[i+16])<<4)
		}
	}
	return out
}
