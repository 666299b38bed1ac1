package kernels

import (
	"encoding/binary"
	"math"
)

// Widen returns element i of little-endian F32, F16 or BF16 as float32, exactly.
func Widen(d DType, data []byte, i int) float32 {
	switch d {
	case F16:
		return FromF16(binary.LittleEndian.Uint16(data[2*i:]))
	case BF16:
		return math.Float32frombits(uint32(binary.LittleEndian.Uint16(data[2*i:])) << 16)
	}
	return math.Float32frombits(binary.LittleEndian.Uint32(data[4*i:]))
}

// FromF16 returns the value of an IEEE half, exactly.
func FromF16(h uint16) float32 {
	sign, e, m := uint32(h>>15)<<31, uint32(h>>10&31), uint32(h&1023)
	switch e {
	case 0: // zero or subnormal: m * 2^-24, exact
		return math.Float32frombits(sign | math.Float32bits(float32(m)*(1.0/(1<<24))))
	case 31:
		if m != 0 {
			m |= 512 // quiet, as VCVTPH2PS does
		}
		return math.Float32frombits(sign | 0x7f800000 | m<<13)
	}
	return math.Float32frombits(sign | (e+112)<<23 | m<<13)
}
