//go:build ignore

// Gen writes gemm_amd64.s and gemm_amd64.go: one matrix function a (instruction
// set, weight type, token tile) and one attention function a (set, row width,
// query rows). Run it with `go generate ./kernels/cpu`.
//
// Every matrix function has the signature
//
//	func(w, x unsafe.Pointer, xs uintptr, out unsafe.Pointer, os uintptr, k, n int)
//
// and computes, for n panels of 32 rows that lie one after the other in w as
// [panel][k][32], and for its fixed number of tokens t,
//
//	out[t][panel*32+r] = sum over k ascending, by FMA from zero, of w[panel][k][r]*x[t][k]
//
// xs and os are the strides of x and out from token to token, in bytes. Each
// (row, token) keeps to one SIMD lane: that is the whole determinism argument.
package main

import (
	"bytes"
	"fmt"
	"os"
)

const (
	maxTile512 = 12 // 24 accumulators of 32 registers
	maxTile256 = 3  // 12 accumulators of 16 registers
)

var (
	asm   bytes.Buffer
	decls bytes.Buffer
	label int
)

func p(format string, a ...any) { fmt.Fprintf(&asm, format+"\n", a...) }

// isa describes a register width.
type isa struct {
	name    string // "AVX512"
	reg     string // "Z"
	perRow  int    // registers a panel of 32 lanes
	bytes   int    // of a register
	xor     string
	maxTile int
	wide    int // most panels the one-token kernel takes at once
}

var isas = []isa{
	{"AVX512", "Z", 2, 64, "VPXORQ", maxTile512, 4},
	{"AVX2", "Y", 4, 32, "VPXOR", maxTile256, 2},
}

type dtype struct {
	name string
	size int
}

var dtypes = []dtype{{"F32", 4}, {"F16", 2}, {"BF16", 2}}

// load puts the widened register j of the panel row at addr into reg.
func (d dtype) load(addr, reg string) {
	switch d.name {
	case "F32":
		p("\tVMOVUPS %s, %s", addr, reg)
	case "F16":
		p("\tVCVTPH2PS %s, %s", addr, reg)
	case "BF16":
		p("\tVPMOVZXWD %s, %s", addr, reg)
		p("\tVPSLLD $16, %s, %s", reg, reg)
	}
}

// at is an address of stream i (0..3) from base with stride and 3*stride regs.
func at(off int, base, s1, s3 string, i int) string {
	switch i {
	case 0:
		return fmt.Sprintf("%d(%s)", off, base)
	case 1:
		return fmt.Sprintf("%d(%s)(%s*1)", off, base, s1)
	case 2:
		return fmt.Sprintf("%d(%s)(%s*2)", off, base, s1)
	}
	return fmt.Sprintf("%d(%s)(%s*1)", off, base, s3)
}

func header(name string) {
	p("// func %s(w, x unsafe.Pointer, xs uintptr, out unsafe.Pointer, os uintptr, k, n int)", name)
	p("TEXT ·%s(SB), NOSPLIT, $0-56", name)
	fmt.Fprintf(&decls, "func %s(w, x unsafe.Pointer, xs uintptr, out unsafe.Pointer, os uintptr, k, n int)\n", name)
}

// kLoop emits body(u) unrolled over k, advancing x pointers by 4 bytes and the
// weight pointer by row bytes a step.
func kLoop(unroll, row int, xregs []string, body func(u int)) {
	label++
	l := label
	p("\tMOVQ k+40(FP), CX")
	if unroll > 1 {
		p("\tSUBQ $%d, CX", unroll)
		p("\tJLT  tail%d", l)
		p("loop%d:", l)
		for u := range unroll {
			body(u)
		}
		for _, r := range xregs {
			p("\tADDQ $%d, %s", 4*unroll, r)
		}
		p("\tADDQ $%d, SI", row*unroll)
		p("\tSUBQ $%d, CX", unroll)
		p("\tJGE  loop%d", l)
		p("tail%d:", l)
		p("\tADDQ $%d, CX", unroll)
	}
	p("\tTESTQ CX, CX")
	p("\tJZ   done%d", l)
	p("one%d:", l)
	body(0)
	for _, r := range xregs {
		p("\tADDQ $4, %s", r)
	}
	p("\tADDQ $%d, SI", row)
	p("\tDECQ CX")
	p("\tJNZ  one%d", l)
	p("done%d:", l)
}

// one emits the single-token kernel: up to wide panels at once, each a stream
// of its own, so that enough independent accumulators hide the FMA latency.
// There is no software prefetch: measured on Zen 4 (31.8 GB/s a core from
// memory), it only takes load slots from the hardware's own.
func one(m isa, d dtype) {
	name := fmt.Sprintf("gemm%s%sx1", m.name, d.name)
	header(name)
	row := 32 * d.size
	p("\tMOVQ w+0(FP), DI")
	p("\tMOVQ out+24(FP), DX")
	p("\tMOVQ n+48(FP), BX")
	p("\tMOVQ k+40(FP), R9")
	shift := 6
	if d.size == 4 {
		shift = 7
	}
	p("\tSHLQ $%d, R9", shift) // bytes of a panel
	p("\tLEAQ (R9)(R9*2), R10")
	for q := m.wide; q >= 1; q /= 2 {
		p("%s_%d:", name, q)
		p("\tCMPQ BX, $%d", q)
		if q > 1 {
			p("\tJLT  %s_%d", name, q/2)
		} else {
			p("\tJLT  %s_end", name)
		}
		p("\tMOVQ DI, SI")
		p("\tMOVQ x+8(FP), R8")
		for i := range q * m.perRow {
			p("\t%s %s%d, %s%d, %s%d", m.xor, m.reg, i, m.reg, i, m.reg, i)
		}
		bc := fmt.Sprintf("%s%d", m.reg, m.wide*m.perRow)
		kLoop(4, row, []string{"R8"}, func(u int) {
			p("\tVBROADCASTSS %d(R8), %s", 4*u, bc)
			for i := range q {
				for j := range m.perRow {
					addr := at(u*row+j*m.bytes*d.size/4, "SI", "R9", "R10", i)
					acc := fmt.Sprintf("%s%d", m.reg, i*m.perRow+j)
					if d.size == 4 {
						p("\tVFMADD231PS %s, %s, %s", addr, bc, acc)
						continue
					}
					tmp := fmt.Sprintf("%s%d", m.reg, m.wide*m.perRow+1+(i*m.perRow+j)%4)
					d.load(addr, tmp)
					p("\tVFMADD231PS %s, %s, %s", tmp, bc, acc)
				}
			}
		})
		for i := range q * m.perRow {
			p("\tVMOVUPS %s%d, %d(DX)", m.reg, i, i*m.bytes)
		}
		p("\tADDQ $%d, DX", 128*q)
		switch q {
		case 4:
			p("\tLEAQ (DI)(R9*4), DI")
		case 2:
			p("\tLEAQ (DI)(R9*2), DI")
		case 1:
			p("\tADDQ R9, DI")
		}
		p("\tSUBQ $%d, BX", q)
		p("\tJMP  %s_%d", name, q)
	}
	p("%s_end:", name)
	p("\tVZEROUPPER")
	p("\tRET\n")
}

// tile emits the kernel of t tokens over one panel at a time.
func tile(m isa, d dtype, t int) {
	name := fmt.Sprintf("gemm%s%sx%d", m.name, d.name, t)
	header(name)
	row := 32 * d.size
	p("\tMOVQ w+0(FP), SI")
	p("\tMOVQ out+24(FP), DX")
	p("\tMOVQ n+48(FP), BX")
	p("\tMOVQ xs+16(FP), R9")
	p("\tLEAQ (R9)(R9*2), R10")
	p("\tTESTQ BX, BX")
	p("\tJZ   %s_end", name)
	p("%s_panel:", name)
	bases := []string{"R8", "R11", "R12"}[:(t+3)/4]
	p("\tMOVQ x+8(FP), R8")
	for i := 1; i < len(bases); i++ {
		p("\tLEAQ (%s)(R9*4), %s", bases[i-1], bases[i])
	}
	for i := range t * m.perRow {
		p("\t%s %s%d, %s%d, %s%d", m.xor, m.reg, i, m.reg, i, m.reg, i)
	}
	unroll := 2
	if t <= 4 {
		unroll = 4
	}
	acc := t * m.perRow
	kLoop(unroll, row, bases, func(u int) {
		x := func(i int) string { return at(4*u, bases[i/4], "R9", "R10", i%4) }
		if m.perRow == 2 {
			w0, w1 := fmt.Sprintf("Z%d", 24+2*(u%2)), fmt.Sprintf("Z%d", 25+2*(u%2))
			d.load(fmt.Sprintf("%d(SI)", u*row), w0)
			d.load(fmt.Sprintf("%d(SI)", u*row+row/2), w1)
			for i := range t {
				b := fmt.Sprintf("Z%d", 28+i%4)
				p("\tVBROADCASTSS %s, %s", x(i), b)
				p("\tVFMADD231PS %s, %s, Z%d", w0, b, 2*i)
				p("\tVFMADD231PS %s, %s, Z%d", w1, b, 2*i+1)
			}
			return
		}
		for i := range t {
			p("\tVBROADCASTSS %s, Y%d", x(i), acc+1+i)
		}
		for j := range m.perRow {
			w := fmt.Sprintf("Y%d", acc)
			d.load(fmt.Sprintf("%d(SI)", u*row+j*row/4), w)
			for i := range t {
				p("\tVFMADD231PS %s, Y%d, Y%d", w, acc+1+i, i*m.perRow+j)
			}
		}
	})
	p("\tMOVQ DX, DI")
	p("\tMOVQ os+32(FP), R13")
	for i := range t {
		for j := range m.perRow {
			p("\tVMOVUPS %s%d, %d(DI)", m.reg, i*m.perRow+j, j*m.bytes)
		}
		if i < t-1 {
			p("\tADDQ R13, DI")
		}
	}
	p("\tADDQ $128, DX")
	p("\tDECQ BX")
	p("\tJNZ  %s_panel", name)
	p("%s_end:", name)
	p("\tVZEROUPPER")
	p("\tRET\n")
}

// pv emits the value half of attention for r query rows that share K and V and
// their number of positions, over regs registers of one V row:
//
//	out[r][d] = (sum over t ascending, by FMA from zero, of p[r][t]*v[t][d]) * inv[r]
func pv(m isa, regs, r int) {
	name := fmt.Sprintf("pv%sx%dx%d", m.name, regs, r)
	p("// func %s(a *pvArgs)", name)
	p("TEXT ·%s(SB), NOSPLIT, $0-8", name)
	fmt.Fprintf(&decls, "func %s(a *pvArgs)\n", name)
	p("\tMOVQ a+0(FP), AX")
	for i, reg := range []string{"R8", "R9", "R10", "DI", "DX", "R13", "R11", "R12", "R14"} {
		p("\tMOVQ %d(AX), %s", 8*i, reg)
	}
	p("\tLEAQ (R14)(R14*2), R15")
	for i := range r * regs {
		p("\t%s %s%d, %s%d, %s%d", m.xor, m.reg, i, m.reg, i, m.reg, i)
	}
	label++
	l := label
	p("block%d:", l)
	p("\tMOVLQSX (R10), SI")
	p("\tADDQ $4, R10")
	p("\tIMULQ DX, SI")
	p("\tADDQ R9, SI")
	p("\tMOVQ R11, CX")
	p("\tCMPQ R12, CX")
	p("\tCMOVQLT R12, CX")
	p("\tSUBQ CX, R12")
	p("row%d:", l)
	acc := r * regs
	for j := range regs {
		p("\tVMOVUPS %d(SI), %s%d", j*m.bytes, m.reg, acc+j)
	}
	for i := range r {
		p("\tVBROADCASTSS %s, %s%d", at(0, "R8", "R14", "R15", i), m.reg, acc+regs)
		for j := range regs {
			p("\tVFMADD231PS %s%d, %s%d, %s%d", m.reg, acc+j, m.reg, acc+regs, m.reg, i*regs+j)
		}
	}
	p("\tADDQ $4, R8")
	p("\tADDQ R13, SI")
	p("\tDECQ CX")
	p("\tJNZ row%d", l)
	p("\tTESTQ R12, R12")
	p("\tJNZ block%d", l)
	p("\tMOVQ 72(AX), BX")  // inv
	p("\tMOVQ 80(AX), R14") // out stride
	for i := range r {
		p("\tVBROADCASTSS %d(BX), %s%d", 4*i, m.reg, acc)
		for j := range regs {
			p("\tVMULPS %s%d, %s%d, %s%d", m.reg, acc, m.reg, i*regs+j, m.reg, i*regs+j)
			p("\tVMOVUPS %s%d, %d(DI)", m.reg, i*regs+j, j*m.bytes)
		}
		if i < r-1 {
			p("\tADDQ R14, DI")
		}
	}
	p("\tVZEROUPPER")
	p("\tRET\n")
}

func main() {
	p("// Code generated by gen.go. DO NOT EDIT.\n")
	p("#include \"textflag.h\"\n")
	decls.WriteString("// Code generated by gen.go. DO NOT EDIT.\n\npackage cpu\n\nimport \"unsafe\"\n")
	for _, m := range isas {
		fmt.Fprintf(&decls, "\nfunc gemm%s() gemmTable {\n\treturn gemmTable{", m.name)
		for _, d := range dtypes {
			decls.WriteString("\n\t{")
			for t := 1; t <= m.maxTile; t++ {
				if t > 1 {
					decls.WriteString(", ")
				}
				fmt.Fprintf(&decls, "gemm%s%sx%d", m.name, d.name, t)
			}
			decls.WriteString("},")
		}
		decls.WriteString("\n\t}\n}\n\n")
	}
	for _, m := range isas {
		for _, d := range dtypes {
			one(m, d)
			for t := 2; t <= m.maxTile; t++ {
				tile(m, d, t)
			}
		}
	}
	for _, m := range isas {
		rows := []int{1, 2, 4}
		if m.reg == "Y" {
			rows = rows[:2]
		}
		fmt.Fprintf(&decls, "\nfunc pv%s() pvTable {\n\treturn pvTable{", m.name)
		for _, r := range rows {
			fmt.Fprintf(&decls, "\n\t\t%d: {", r)
			for regs := 1; regs <= 4; regs++ {
				fmt.Fprintf(&decls, "%d: pv%sx%dx%d, ", regs, m.name, regs, r)
			}
			decls.WriteString("},")
		}
		decls.WriteString("\n\t}\n}\n\n")
		for _, r := range rows {
			for regs := 1; regs <= 4; regs++ {
				pv(m, regs, r)
			}
		}
	}
	must(os.WriteFile("gemm_amd64.s", asm.Bytes(), 0o644))
	must(os.WriteFile("gemm_amd64.go", decls.Bytes(), 0o644))
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}
