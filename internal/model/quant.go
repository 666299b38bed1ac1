package model

import (
	"encoding/binary"
	"math"

	"github.com/xpyd/xpyd/kernels"
)

// quant is a block format of GGUF: block values lie in size bytes. The layouts are those
// of ggml (ggml-common.h, "block_q4_0" and so on). Products are rounded to float32 before
// they are added, so that dequantised weights have the same bits on every machine.
type quant struct {
	block int // values
	size  int // bytes
	// one decodes one block: out has block values.
	one func(out []float32, b []byte)
}

// decode dequantises src into dst as little-endian F32.
func (q *quant) decode(dst, src []byte) {
	var buf [256]float32
	out := buf[:q.block]
	for len(src) > 0 {
		q.one(out, src[:q.size])
		src = src[q.size:]
		for i, v := range out {
			binary.LittleEndian.PutUint32(dst[4*i:], math.Float32bits(v))
		}
		dst = dst[4*q.block:]
	}
}

// half widens the F16 at b[0:2].
func half(b []byte) float32 { return kernels.FromF16(binary.LittleEndian.Uint16(b)) }

// f16 d, 32 x int8
func q80(out []float32, b []byte) {
	d := half(b)
	for i, v := range b[2:34] {
		out[i] = float32(int8(v)) * d
	}
}

// f16 d, 16 bytes of nibbles: value i low, value i+16 high
func q40(out []float32, b []byte) {
	d := half(b)
	for i, v := range b[2:18] {
		out[i] = d * float32(int(v&15)-8)
		out[i+16] = d * float32(int(v>>4)-8)
	}
}

// f16 d, f16 m, nibbles as in q40
func q41(out []float32, b []byte) {
	d, m := half(b), half(b[2:])
	for i, v := range b[4:20] {
		out[i] = float32(d*float32(v&15)) + m
		out[i+16] = float32(d*float32(v>>4)) + m
	}
}

// f16 d, uint32 fifth bits, nibbles as in q40
func q50(out []float32, b []byte) {
	d, high := half(b), binary.LittleEndian.Uint32(b[2:])
	for i, v := range b[6:22] {
		lo := int(v&15) | int(high>>i&1)<<4
		hi := int(v>>4) | int(high>>(i+16)&1)<<4
		out[i] = d * float32(lo-16)
		out[i+16] = d * float32(hi-16)
	}
}

// f16 d, f16 m, uint32 fifth bits, nibbles as in q40
func q51(out []float32, b []byte) {
	d, m, high := half(b), half(b[2:]), binary.LittleEndian.Uint32(b[4:])
	for i, v := range b[8:24] {
		lo := int(v&15) | int(high>>i&1)<<4
		hi := int(v>>4) | int(high>>(i+16)&1)<<4
		out[i] = float32(d*float32(lo)) + m
		out[i+16] = float32(d*float32(hi)) + m
	}
}

// subScale unpacks the 6-bit scale and minimum of sub-block j from 12 bytes:
// 0-3 are the low six bits of bytes j and j+4, 4-7 have their low four bits in
// byte j+4 and their high two on top of bytes j-4 and j.
func subScale(b []byte, j int) (scale, minimum float32) {
	if j < 4 {
		return float32(b[j] & 63), float32(b[j+4] & 63)
	}
	return float32(b[j+4]&15 | b[j-4]>>6<<4), float32(b[j+4]>>4 | b[j]>>6<<4)
}

// f16 d, f16 dmin, 12 bytes of scales, 128 bytes of nibbles: each run of 32
// bytes holds 32 values low, the next 32 high
func q4K(out []float32, b []byte) {
	d, dmin, scales, qs := half(b), half(b[2:]), b[4:16], b[16:144]
	for j := range 8 {
		sc, mn := subScale(scales, j)
		sc, mn = d*sc, dmin*mn
		shift := 4 * (j & 1)
		for i, v := range qs[32*(j/2):][:32] {
			out[32*j+i] = float32(sc*float32(v>>shift&15)) - mn
		}
	}
}

// q5K is as q4K, with 32 bytes of fifth bits before the nibbles: bit j of byte i
// belongs to value i of sub-block j
func q5K(out []float32, b []byte) {
	d, dmin, scales, high, qs := half(b), half(b[2:]), b[4:16], b[16:48], b[48:176]
	for j := range 8 {
		sc, mn := subScale(scales, j)
		sc, mn = d*sc, dmin*mn
		shift := 4 * (j & 1)
		for i, v := range qs[32*(j/2):][:32] {
			q := v>>shift&15 | high[i]>>j&1<<4
			out[32*j+i] = float32(sc*float32(q)) - mn
		}
	}
}

// 128 bytes of low nibbles, 64 bytes of high bit pairs, 16 x int8 scales,
// f16 d. Each half of 128 values uses 64 low and 32 high bytes.
func q6K(out []float32, b []byte) {
	low, high, scales, d := b[:128], b[128:192], b[192:208], half(b[208:])
	for k := range 8 { // runs of 32 values
		n, r := k/4, k%4 // half, run in the half
		ql, qh := low[64*n+32*(r&1):][:32], high[32*n:][:32]
		for i := range 32 {
			q := ql[i]>>(4*(r/2))&15 | qh[i]>>(2*r)&3<<4
			sc := d * float32(int8(scales[(32*k+i)/16]))
			out[32*k+i] = sc * float32(int(q)-32)
		}
	}
}
