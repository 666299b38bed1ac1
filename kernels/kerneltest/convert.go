package kerneltest

import (
	"encoding/binary"
	"math"

	"github.com/xpyd/xpyd/kvlayout"
)

// convertRow converts a row between bf16, f16 and FP8, with its scale if it has one. A
// device's conversion is held against it: it counts steps of a format, where that works
// on bits.
func convertRow(from, to kvlayout.DType, row [][]byte) [][]byte {
	n := len(row[0])
	if from != kvlayout.F8E4M3 {
		n /= 2
	}
	out := make([]byte, 2*n)
	if to == kvlayout.F8E4M3 {
		out = out[:n]
	}
	values, top := make([]float32, n), float32(0)
	for i := range values {
		values[i] = widen(from, row, i)
		if m := math.Abs(float64(values[i])); m <= math.MaxFloat32 {
			top = max(top, float32(m))
		}
	}
	if to != kvlayout.F8E4M3 {
		for i, v := range values {
			binary.LittleEndian.PutUint16(out[2*i:], narrow16(to, v))
		}
		return [][]byte{out}
	}
	scale := scaleOf(top)
	for i, v := range values {
		if out[i] = 0x7f | byte(math.Float32bits(v)>>24)&0x80; math.Abs(float64(v)) <= math.MaxFloat32 {
			out[i] = ToE4M3(v / scale)
		}
	}
	return [][]byte{out, binary.LittleEndian.AppendUint32(nil, math.Float32bits(scale))}
}

var forms = map[kvlayout.DType]form{kvlayout.BF16: {7, -126}, kvlayout.F16: {10, -14}}

// widen is element i of a row. NaN keeps its sign, and the bits that there are.
func widen(dtype kvlayout.DType, row [][]byte, i int) float32 {
	if dtype == kvlayout.F8E4M3 {
		q := row[0][i]
		if q&0x7f == 0x7f {
			return math.Float32frombits(uint32(q&0x80)<<24 | 0x7fc00000)
		}
		return FromE4M3(q) * math.Float32frombits(binary.LittleEndian.Uint32(row[1]))
	}
	f, h := forms[dtype], uint32(binary.LittleEndian.Uint16(row[0][2*i:]))
	sign, code := h&0x8000<<16, h&0x7fff
	if code>>f.man == 1<<(15-f.man)-1 {
		return math.Float32frombits(sign | 0x7f800000 | code&(1<<f.man-1)<<(23-f.man))
	}
	return math.Float32frombits(math.Float32bits(float32(f.value(int(code)))) | sign)
}

// narrow16 is v in a form of 16 bits: nearest, ties to even, beyond the range infinity.
func narrow16(dtype kvlayout.DType, v float32) uint16 {
	f, b := forms[dtype], math.Float32bits(v)
	sign, infinite := uint16(b>>16&0x8000), uint32(1<<(15-f.man)-1)<<f.man
	if v != v {
		return sign | uint16(infinite|1<<(f.man-1)|b&(1<<23-1)>>(23-f.man))
	}
	return sign | uint16(f.nearest(math.Abs(float64(v)), int(infinite)))
}
