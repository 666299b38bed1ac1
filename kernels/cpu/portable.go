package cpu

import (
	"math"
	"unsafe"

	"github.com/xpyd/xpyd/kernels"
)

// This file defines every operation: the assembly must give the same bits
// (TestSIMDEqualsPortable). It is slow, because it is exact without an FMA instruction, and
// runs where there is no assembly.

const (
	panelRows = 32 // output rows of a weight panel
	guRows    = 16 // gate rows, then up rows, of a gate/up panel
)

// gemmFunc multiplies n panels with a fixed number of tokens; see gen.go.
type gemmFunc func(w, x unsafe.Pointer, xs uintptr, out unsafe.Pointer, os uintptr, k, n int)

// gemmTable has one slice a kernels.DType; entry t-1 takes t tokens.
type gemmTable [3][]gemmFunc

// pvArgs are the operands of the value half of attention. The assembly reads
// the fields by offset: their order is fixed.
type pvArgs struct {
	p, v        unsafe.Pointer // p: [rows][n] f32; v: the head's V rows in block 0
	blocks      *int32         // block table
	out         unsafe.Pointer // [rows][head_dim] f32
	blockStride int            // bytes from block to block
	rowBytes    int            // bytes of a row of the pool
	blockTokens int
	n           int // positions
	pStride     int // bytes from row to row of p
	inv         *float32
	outStride   int // bytes
}

// pvTable is indexed by query rows, then by registers of a row.
type pvTable [5][5]func(*pvArgs)

// scoreArgs are the operands of the score half of attention for one query row.
// out has room for n rounded up to 8. The field order is fixed.
type scoreArgs struct {
	q, k        unsafe.Pointer
	blocks      *int32
	out         *float32
	blockStride int
	rowBytes    int
	blockTokens int
	n           int
	scale       float32
}

// ops is one implementation of the operations.
type ops struct {
	name     string
	gemm     gemmTable
	scores   func(a *scoreArgs)
	softmax  func(s *float32, n8 int) float32           // in place: exp(s-max); returns the sum
	sumSq    func(x *float32, n int) float32            // 16 lanes
	addSumSq func(x, d *float32, n int) float32         // x += d first
	scaleMul func(out, x, w *float32, r float32, n int) // out = (x*r)*w
	siluMul  func(out, gu *float32, panels int)         // [16 gate, 16 up] -> 16 silu(gate)*up
	argmax   func(x *float32, n int) int                // lowest index of the maximum; NaN ignored
	pv       pvTable                                    // registers of lanes floats
	lanes    int                                        // floats of a register of pv
	pvRows   int                                        // most rows pv takes at once
	narrow   *ops                                       // for a head_dim that lanes does not divide
}

func portableOps() *ops {
	o := &ops{
		name:     "portable",
		scores:   scoresPortable,
		softmax:  softmaxPortable,
		sumSq:    sumSqPortable,
		addSumSq: addSumSqPortable,
		scaleMul: scaleMulPortable,
		siluMul:  siluMulPortable,
		argmax:   argmaxPortable,
		pvRows:   1,
	}
	for d := range o.gemm {
		o.gemm[d] = []gemmFunc{gemmPortable(kernels.DType(d))}
	}
	return o
}

func floats(p unsafe.Pointer, n int) []float32 { return unsafe.Slice((*float32)(p), n) }

func gemmPortable(d kernels.DType) gemmFunc {
	return func(w, x unsafe.Pointer, _ uintptr, out unsafe.Pointer, _ uintptr, k, n int) {
		ws := unsafe.Slice((*byte)(w), n*k*panelRows*d.Bytes())
		xs, o := floats(x, k), floats(out, n*panelRows)
		clear(o)
		for p := range n {
			acc := o[p*panelRows : (p+1)*panelRows]
			for i, xv := range xs {
				base := (p*k + i) * panelRows
				for r := range acc {
					acc[r] = fma32(widenNative(d, ws, base+r), xv, acc[r])
				}
			}
		}
	}
}

// poolRow returns the pool row of position t.
func poolRow(base unsafe.Pointer, blocks *int32, blockStride, rowBytes, blockTokens, t int) []float32 {
	b := *(*int32)(unsafe.Add(unsafe.Pointer(blocks), 4*(t/blockTokens)))
	p := unsafe.Add(base, int(b)*blockStride+t%blockTokens*rowBytes)
	return floats(p, rowBytes/4)
}

func scoresPortable(a *scoreArgs) {
	q := floats(a.q, a.rowBytes/4)
	out := unsafe.Slice(a.out, a.n)
	for t := range out {
		var l [8]float32
		for d, k := range poolRow(a.k, a.blocks, a.blockStride, a.rowBytes, a.blockTokens, t) {
			l[d&7] = fma32(k, q[d], l[d&7])
		}
		out[t] = tree8(&l) * a.scale
	}
}

func pvPortable(a *pvArgs, headDim int) {
	p, out := floats(a.p, a.n), floats(a.out, headDim)
	clear(out)
	for t, pt := range p {
		for d, v := range poolRow(a.v, a.blocks, a.blockStride, a.rowBytes, a.blockTokens, t) {
			out[d] = fma32(v, pt, out[d])
		}
	}
	for d := range out {
		out[d] *= *a.inv
	}
}

func softmaxPortable(s *float32, n8 int) float32 {
	x := unsafe.Slice(s, n8)
	m := float32(math.Inf(-1))
	for _, v := range x {
		if v > m {
			m = v
		}
	}
	var l [8]float32
	for i, v := range x {
		x[i] = exp32(v - m)
		l[i&7] += x[i]
	}
	return tree8(&l)
}

func sumSqPortable(x *float32, n int) float32 {
	var l [16]float32
	for i, v := range unsafe.Slice(x, n) {
		l[i&15] = fma32(v, v, l[i&15])
	}
	var h [8]float32
	for i := range h {
		h[i] = l[i] + l[i+8]
	}
	return tree8(&h)
}

func addSumSqPortable(x, d *float32, n int) float32 {
	xs := unsafe.Slice(x, n)
	for i, v := range unsafe.Slice(d, n) {
		xs[i] += v
	}
	return sumSqPortable(x, n)
}

func scaleMulPortable(out, x, w *float32, r float32, n int) {
	o, ws := unsafe.Slice(out, n), unsafe.Slice(w, n)
	for i, v := range unsafe.Slice(x, n) {
		o[i] = float32(v*r) * ws[i]
	}
}

func siluMulPortable(out, gu *float32, panels int) {
	o, in := unsafe.Slice(out, panels*guRows), unsafe.Slice(gu, panels*panelRows)
	for i := range o {
		g, u := in[i/guRows*panelRows+i%guRows], in[i/guRows*panelRows+guRows+i%guRows]
		o[i] = float32(g/(1+exp32(-g))) * u
	}
}

func argmaxPortable(x *float32, n int) int {
	best, m := 0, float32(math.Inf(-1))
	for i, v := range unsafe.Slice(x, n) {
		if v > m {
			best, m = i, v
		}
	}
	return best
}
