package cpu

import (
	"encoding/binary"
	"fmt"
	"math"
	"unsafe"

	"github.com/xpyd/xpyd/kernels"
)

// matrix is a projection [rows, k] repacked as [panel][k][32]: 32 output rows
// side by side for each k, so that one vector load serves one step of 32
// accumulations. Rows are padded with zeros to whole panels. Two-byte types
// stay two bytes and are widened, exactly, in the kernel.
type matrix struct {
	dtype  kernels.DType
	k      int
	rows   int
	panels int
	data   []byte
}

// source is one tensor's rows as they enter a matrix.
type source struct {
	t    kernels.Tensor
	rows int
}

// pack lays the rows of the sources one after the other. Sources of different
// types are widened to F32.
func pack(k int, src ...source) matrix {
	m := matrix{dtype: src[0].t.DType, k: k}
	for _, s := range src {
		m.rows += s.rows
		if s.t.DType != m.dtype {
			m.dtype = kernels.F32
		}
	}
	m.panels = (m.rows + panelRows - 1) / panelRows
	m.alloc()
	r := 0
	for _, s := range src {
		for i := range s.rows {
			m.putRow(r/panelRows, r%panelRows, s.t, i)
			r++
		}
	}
	return m
}

// packGated interleaves gate and up: panel i holds gate rows 16i.. and then up rows 16i..,
// so that the thread that computes a panel can apply the gate at once.
func packGated(k, rows int, gate, up kernels.Tensor) matrix {
	m := matrix{dtype: gate.DType, k: k, rows: rows, panels: (rows + guRows - 1) / guRows}
	if up.DType != m.dtype {
		m.dtype = kernels.F32
	}
	m.alloc()
	for i := range rows {
		m.putRow(i/guRows, i%guRows, gate, i)
		m.putRow(i/guRows, guRows+i%guRows, up, i)
	}
	return m
}

func (m *matrix) alloc() { m.data = alloc(m.panels * m.panelBytes()) }

func (m *matrix) panelBytes() int { return panelRows * m.k * m.dtype.Bytes() }

// outRows is the padded number of outputs.
func (m *matrix) outRows() int { return m.panels * panelRows }

func (m *matrix) putRow(panel, lane int, t kernels.Tensor, row int) {
	base := panel*m.k*panelRows + lane
	switch {
	case m.dtype != t.DType:
		for i := range m.k {
			v := math.Float32bits(kernels.Widen(t.DType, t.Data, row*m.k+i))
			binary.NativeEndian.PutUint32(m.data[4*(base+i*panelRows):], v)
		}
	case m.dtype == kernels.F32:
		src := t.Data[4*row*m.k:]
		for i := range m.k {
			binary.NativeEndian.PutUint32(m.data[4*(base+i*panelRows):], binary.LittleEndian.Uint32(src[4*i:]))
		}
	default:
		src := t.Data[2*row*m.k:]
		for i := range m.k {
			binary.NativeEndian.PutUint16(m.data[2*(base+i*panelRows):], binary.LittleEndian.Uint16(src[2*i:]))
		}
	}
}

// row widens row r into dst: the embedding of a tied head.
func (m *matrix) row(r int, dst []float32) {
	base := r/panelRows*m.k*panelRows + r%panelRows
	for i := range dst[:m.k] {
		dst[i] = widenNative(m.dtype, m.data, base+i*panelRows)
	}
}

// streamed is the matrix size, in bytes, from which it is assumed to come from memory in
// every step rather than from a cache.
const streamed = 1 << 20

// mul computes panels lo..hi-1 for t tokens. x is [t][xs] and out [t][os], in
// floats; out begins at panel lo. It tells the seat of progress at least every silentMACs.
func (m *matrix) mul(o *ops, seat *seat, x []float32, xs int, out []float32, os, t, lo, hi int) {
	if t == 0 || lo >= hi {
		return
	}
	fns := o.gemm[m.dtype]
	_, _ = x[(t-1)*xs+m.k-1], out[(t-1)*os+(hi-lo)*panelRows-1]
	xp, op := unsafe.Pointer(&x[0]), unsafe.Pointer(&out[0])
	if t == 1 && m.panels*m.panelBytes() >= streamed {
		// From memory one long run is faster than several side by side: the
		// prefetchers keep up with it, and it needs no more than one panel's
		// accumulators to stay ahead of the memory.
		for p := lo; p < hi; p++ {
			fns[0](unsafe.Pointer(&m.data[p*m.panelBytes()]), xp, 0, unsafe.Add(op, 4*(p-lo)*panelRows), 0, m.k, 1)
		}
		return
	}
	if t <= len(fns) {
		fns[t-1](unsafe.Pointer(&m.data[lo*m.panelBytes()]), xp, uintptr(4*xs), op, uintptr(4*os), m.k, hi-lo)
		return
	}
	// Token tiles of equal size, all over one panel before the next, so that
	// the panel comes from memory once.
	tiles := (t + len(fns) - 1) / len(fns)
	for p := lo; p < hi; p++ {
		w := unsafe.Pointer(&m.data[p*m.panelBytes()])
		for i := range tiles {
			a, b := i*t/tiles, (i+1)*t/tiles
			fns[b-a-1](w, unsafe.Add(xp, 4*a*xs), uintptr(4*xs), unsafe.Add(op, 4*(a*os+(p-lo)*panelRows)), uintptr(4*os), m.k, 1)
			if i%4 == 3 {
				seat.progress()
			}
		}
		seat.progress()
	}
}

// widenNative is widen for packed weights, which are in host byte order.
func widenNative(d kernels.DType, w []byte, i int) float32 {
	switch d {
	case kernels.F16:
		return kernels.FromF16(binary.NativeEndian.Uint16(w[2*i:]))
	case kernels.BF16:
		return math.Float32frombits(uint32(binary.NativeEndian.Uint16(w[2*i:])) << 16)
	}
	return math.Float32frombits(binary.NativeEndian.Uint32(w[4*i:]))
}

// vector widens a one-dimensional tensor, zero-padded to a multiple of 16.
func vector(t kernels.Tensor, n int) []float32 {
	v := make([]float32, roundUp(n, 16))
	for i := range n {
		v[i] = kernels.Widen(t.DType, t.Data, i)
	}
	return v
}

func roundUp(n, to int) int { return (n + to - 1) / to * to }

// check verifies a tensor's type and size.
func check(name string, t kernels.Tensor, shape ...int) error {
	n := 1
	for _, d := range shape {
		n *= d
	}
	if t.DType > kernels.BF16 {
		return fmt.Errorf("weight %s: unknown type %v", name, t.DType)
	}
	if len(t.Data) != n*t.DType.Bytes() {
		return fmt.Errorf("weight %s: %d bytes of %v, want shape %v", name, len(t.Data), t.DType, shape)
	}
	return nil
}
