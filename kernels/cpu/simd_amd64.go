package cpu

import "golang.org/x/sys/cpu"

//go:generate go run gen.go

// Called through ops alone, so that go:noescape would say nothing.
func softmaxAVX2(s *float32, n8 int) float32
func siluMulAVX2(out, gu *float32, panels int)
func sumSqAVX2(x *float32, n int) float32
func addSumSqAVX2(x, d *float32, n int) float32
func scaleMulAVX2(out, x, w *float32, r float32, n int)
func argmaxAVX2(x *float32, n int) int
func scoresAVX2(a *scoreArgs)

// pause executes n PAUSE instructions.
func pause(n int)

// simdOps lists the implementations that this machine can run, best first.
func simdOps() []*ops {
	var all []*ops
	if cpu.X86.HasAVX2 && cpu.X86.HasFMA && cpu.X86.HasF16C {
		o := &ops{
			name:     "avx2",
			gemm:     gemmAVX2(),
			scores:   scoresAVX2,
			softmax:  softmaxAVX2,
			sumSq:    sumSqAVX2,
			addSumSq: addSumSqAVX2,
			scaleMul: scaleMulAVX2,
			siluMul:  siluMulAVX2,
			argmax:   argmaxAVX2,
			pv:       pvAVX2(),
			lanes:    8,
			pvRows:   2,
		}
		if cpu.X86.HasAVX512F && cpu.X86.HasAVX512DQ && cpu.X86.HasAVX512VL && cpu.X86.HasAVX512BW {
			w := *o
			w.name, w.gemm, w.pv, w.lanes, w.pvRows = "avx512", gemmAVX512(), pvAVX512(), 16, 4
			w.narrow = o
			all = append(all, &w)
		}
		all = append(all, o)
	}
	return append(all, portableOps())
}
