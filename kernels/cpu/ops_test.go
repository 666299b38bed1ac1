package cpu

import (
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/xpyd/xpyd/kernels"
)

// interesting are float32 with corners: zeros, subnormals, extremes, NaN.
func interesting(r *rand.Rand) float32 {
	switch r.IntN(12) {
	case 0:
		return float32(math.Copysign(0, r.Float64()-0.5))
	case 1:
		return math.Float32frombits(r.Uint32() & 0x807fffff) // subnormal
	case 2:
		return math.Float32frombits(r.Uint32()) // anything
	case 3:
		return math.Float32frombits(r.Uint32()&0x80ffffff | 0x7e000000) // huge
	case 4:
		return float32(math.Inf(r.IntN(2)*2 - 1))
	case 5:
		return math.Float32frombits(r.Uint32()&0x80ffffff | 0x1f000000) // products are subnormal
	}
	return float32(r.NormFloat64())
}

func same(a, b float32) bool {
	return math.Float32bits(a) == math.Float32bits(b) || a != a && b != b
}

// The emulated FMA against exact arithmetic, and against the hardware where
// there is one: gemm with k = 2 computes fma(a, b, fma(c, 1, 0)).
func TestFMA(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	var hw *ops
	if o := simdOps()[0]; o.name != "portable" {
		hw = o
	}
	w, x, out := make([]float32, 64), make([]float32, 2), make([]float32, 32)
	for i := range 200000 {
		a, b, c := interesting(r), interesting(r), interesting(r)
		switch i % 4 {
		case 1: // near cancellation
			c = -float32(a * b)
		case 2: // halfway cases: c's ulp is about twice the product
			c = float32(math.Ldexp(float64(r.Uint32()>>8|1<<23), r.IntN(20)-10))
			a = float32(math.Ldexp(float64(r.Uint32()>>8), r.IntN(40)-50))
			b = float32(math.Ldexp(1, r.IntN(30)-15))
		}
		got := fma32(a, b, c)
		if finite(a) && finite(b) && finite(c) {
			p := new(big.Float).SetPrec(2000).Mul(big.NewFloat(float64(a)), big.NewFloat(float64(b)))
			p.SetPrec(2000).Add(p, new(big.Float).SetPrec(2000).SetFloat64(float64(c)))
			if want, _ := p.Float32(); !same(got, want) && !(want == 0 && got == 0) {
				t.Fatalf("fma(%g, %g, %g) = %g, exactly %g", a, b, c, got, want)
			}
		}
		if hw != nil {
			for l := range 32 {
				w[l], w[32+l] = c, a
			}
			x[0], x[1] = 1, b
			hw.gemm[0][0](unsafe.Pointer(&w[0]), unsafe.Pointer(&x[0]), 0, unsafe.Pointer(&out[0]), 0, 2, 1)
			if c == 0 {
				c, got = 0, fma32(a, b, 0) // fma(-0, 1, +0) is +0
			}
			if !same(got, out[7]) {
				t.Fatalf("fma(%g, %g, %g) = %g, hardware %g", a, b, c, got, out[7])
			}
		}
	}
}

func finite(x float32) bool { return x-x == 0 }

func TestExp(t *testing.T) {
	worst := 0.0
	for x := -87.0; x < 88; x += 0.00137 {
		got, want := float64(exp32(float32(x))), math.Exp(float64(float32(x)))
		worst = max(worst, math.Abs(got-want)/want)
	}
	if worst > 1.5e-7 {
		t.Errorf("relative error %g", worst)
	}
	inf := float32(math.Inf(1))
	for _, c := range []struct{ x, want float32 }{{0, 1}, {-inf, 0}, {-100, 0}, {float32(math.Copysign(0, -1)), 1}} {
		if got := exp32(c.x); got != c.want {
			t.Errorf("exp(%g) = %g, want %g", c.x, got, c.want)
		}
	}
	if got := exp32(float32(math.NaN())); got == got {
		t.Errorf("exp(NaN) = %g", got)
	}
	if got := exp32(1000); got < 1e38 || got > math.MaxFloat32 {
		t.Errorf("exp(1000) = %g, want the clamped value", got)
	}
}

// fill makes n floats; a tenth of the runs have corner values.
func fill(r *rand.Rand, n int) []float32 {
	f := make([]float32, n)
	corners := r.IntN(10) == 0
	for i := range f {
		f[i] = float32(r.NormFloat64() * 3)
		if corners {
			f[i] = interesting(r)
		}
	}
	return f
}

func clone(f []float32) []float32 { return append([]float32(nil), f...) }

// TestSIMDEqualsPortable compares every operation of every implementation with
// the definition, bit by bit (a NaN equals a NaN).
func TestSIMDEqualsPortable(t *testing.T) {
	def := portableOps()
	for _, o := range simdOps() {
		if o.name == "portable" {
			continue
		}
		t.Run(o.name, func(t *testing.T) {
			r := rand.New(rand.NewPCG(2, 3))
			eq := func(what string, got, want []float32) {
				t.Helper()
				for i := range want {
					if !same(got[i], want[i]) {
						t.Fatalf("%s: element %d is %g (%08x), want %g (%08x)", what, i, got[i], math.Float32bits(got[i]), want[i], math.Float32bits(want[i]))
					}
				}
			}
			for range 300 {
				n := 16 * (1 + r.IntN(20))
				x, d, w := fill(r, n), fill(r, n), fill(r, n)
				eq("sumSq", []float32{o.sumSq(&x[0], n)}, []float32{def.sumSq(&x[0], n)})
				a, b := clone(x), clone(x)
				eq("addSumSq", []float32{o.addSumSq(&a[0], &d[0], n)}, []float32{def.addSumSq(&b[0], &d[0], n)})
				eq("addSumSq x", a, b)
				o.scaleMul(&a[0], &x[0], &w[0], d[0], n)
				def.scaleMul(&b[0], &x[0], &w[0], d[0], n)
				eq("scaleMul", a, b)
				a, b = clone(x), clone(x)
				for i := range a {
					a[i], b[i] = 10*a[i], 10*b[i]
				}
				eq("softmax sum", []float32{o.softmax(&a[0], n)}, []float32{def.softmax(&b[0], n)})
				eq("softmax", a, b)
				gu := fill(r, 2*n)
				for i := range gu {
					gu[i] *= 20
				}
				o.siluMul(&a[0], &gu[0], n/16)
				def.siluMul(&b[0], &gu[0], n/16)
				eq("siluMul", a, b)
				m := 1 + r.IntN(n)
				for range r.IntN(3) {
					x[r.IntN(n)] = x[r.IntN(n)] // ties
				}
				if g, w := o.argmax(&x[0], m), def.argmax(&x[0], m); g != w {
					t.Fatalf("argmax of %d: %d, want %d", m, g, w)
				}
			}
			for dt := range kernels.BF16 + 1 {
				for tokens := 1; tokens <= len(o.gemm[dt]); tokens++ {
					for range 6 {
						testGemm(t, o, def, dt, tokens, r, eq)
					}
				}
			}
			for range 400 {
				testAttention(t, o, r, eq)
			}
		})
	}
}

func testGemm(t *testing.T, o, def *ops, dt kernels.DType, tokens int, r *rand.Rand, eq func(string, []float32, []float32)) {
	k, panels := 1+r.IntN(40), 1+r.IntN(11)
	wf := fill(r, panels*k*panelRows)
	w := make([]byte, len(wf)*dt.Bytes()+64)
	copy(w, bytesOf(wf))
	if dt != kernels.F32 {
		for i := range len(wf) * 2 {
			w[i] = byte(r.Uint32())
		}
	}
	xs, os := k+r.IntN(5), panels*panelRows+r.IntN(5)
	x := fill(r, tokens*xs)
	got, want := make([]float32, tokens*os), make([]float32, tokens*os)
	o.gemm[dt][tokens-1](unsafe.Pointer(&w[0]), unsafe.Pointer(&x[0]), uintptr(4*xs), unsafe.Pointer(&got[0]), uintptr(4*os), k, panels)
	for i := range tokens {
		def.gemm[dt][0](unsafe.Pointer(&w[0]), unsafe.Pointer(&x[i*xs]), 0, unsafe.Pointer(&want[i*os]), 0, k, panels)
	}
	eq(fmt.Sprintf("gemm %v tokens %d k %d panels %d", dt, tokens, k, panels), got, want)
}

func testAttention(t *testing.T, o *ops, r *rand.Rand, eq func(string, []float32, []float32)) {
	dim, size, blocks := 8*(1+r.IntN(20)), []int{1, 3, 4, 12, 16, 256}[r.IntN(6)], 5
	n := 1 + r.IntN(min(size*blocks, 300))
	pool := fill(r, blocks*size*dim)
	table := make([]int32, blocks)
	for i, p := range r.Perm(blocks) {
		table[i] = int32(p)
	}
	if o.lanes == 16 && dim%16 != 0 {
		o = o.narrow
	}
	q := fill(r, dim)
	got, want := make([]float32, n+16), make([]float32, n+16)
	args := scoreArgs{
		q: unsafe.Pointer(&q[0]), k: unsafe.Pointer(&pool[0]), blocks: &table[0], out: &got[0],
		blockStride: 4 * size * dim, rowBytes: 4 * dim, blockTokens: size, n: n, scale: 0.3,
	}
	o.scores(&args)
	args.out = &want[0]
	scoresPortable(&args)
	eq(fmt.Sprintf("scores dim %d block %d n %d", dim, size, n), got[:n], want[:n])

	for rows := 1; rows <= o.pvRows; rows *= 2 {
		p, inv := fill(r, rows*(n+3)), fill(r, rows)
		got, want := make([]float32, rows*dim), make([]float32, rows*dim)
		for at := 0; at < dim; {
			regs := min(1+r.IntN(4), (dim-at)/o.lanes)
			pv := pvArgs{
				p: unsafe.Pointer(&p[0]), v: unsafe.Pointer(&pool[at]), blocks: &table[0], out: unsafe.Pointer(&got[at]),
				blockStride: 4 * size * dim, rowBytes: 4 * dim, blockTokens: size, n: n,
				pStride: 4 * (n + 3), inv: &inv[0], outStride: 4 * dim,
			}
			o.pv[rows][regs](&pv)
			at += regs * o.lanes
		}
		for i := range rows {
			pv := pvArgs{
				p: unsafe.Pointer(&p[i*(n+3)]), v: unsafe.Pointer(&pool[0]), blocks: &table[0], out: unsafe.Pointer(&want[i*dim]),
				blockStride: 4 * size * dim, rowBytes: 4 * dim, blockTokens: size, n: n, inv: &inv[i],
			}
			pvPortable(&pv, dim)
		}
		eq(fmt.Sprintf("pv dim %d block %d n %d rows %d", dim, size, n, rows), got, want)
	}
}

func TestWidenF16(t *testing.T) {
	for h := range 1 << 16 {
		got := float64(kernels.FromF16(uint16(h)))
		e, m := h>>10&31, float64(h&1023)
		want := math.Ldexp(m, -24)
		if e > 0 {
			want = math.Ldexp(1024+m, e-25)
		}
		if e == 31 {
			want = math.Inf(1)
			if m != 0 {
				want = math.NaN()
			}
		}
		if h>>15 == 1 {
			want = -want
		}
		if got != want && !(got != got && want != want) {
			t.Fatalf("%04x: %g, want %g", h, got, want)
		}
	}
}

// bytesOf views float32 memory as bytes.
func bytesOf(f []float32) []byte {
	if len(f) == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(&f[0])), 4*len(f))
}
