#include "textflag.h"

// AVX2 and FMA versions of the vector operations; portable.go defines them,
// fma.go the exponential. Go's operand order is Intel's reversed.

DATA expHi<>+0(SB)/4, $0x42b00000
GLOBL expHi<>(SB), RODATA|NOPTR, $4
DATA expLo<>+0(SB)/4, $0xc2ae0000
GLOBL expLo<>(SB), RODATA|NOPTR, $4
DATA expLog2e<>+0(SB)/4, $0x3fb8aa3b
GLOBL expLog2e<>(SB), RODATA|NOPTR, $4
DATA expMagic<>+0(SB)/4, $0x4b400000
GLOBL expMagic<>(SB), RODATA|NOPTR, $4
DATA expC1<>+0(SB)/4, $0xbf318000
GLOBL expC1<>(SB), RODATA|NOPTR, $4
DATA expC2<>+0(SB)/4, $0x395e8083
GLOBL expC2<>(SB), RODATA|NOPTR, $4
DATA expP0<>+0(SB)/4, $0x39506967
GLOBL expP0<>(SB), RODATA|NOPTR, $4
DATA expP1<>+0(SB)/4, $0x3ab743ce
GLOBL expP1<>(SB), RODATA|NOPTR, $4
DATA expP2<>+0(SB)/4, $0x3c088908
GLOBL expP2<>(SB), RODATA|NOPTR, $4
DATA expP3<>+0(SB)/4, $0x3d2aa9c1
GLOBL expP3<>(SB), RODATA|NOPTR, $4
DATA expP4<>+0(SB)/4, $0x3e2aaaaa
GLOBL expP4<>(SB), RODATA|NOPTR, $4
DATA expP5<>+0(SB)/4, $0x3f000000
GLOBL expP5<>(SB), RODATA|NOPTR, $4
DATA one<>+0(SB)/4, $0x3f800000
GLOBL one<>(SB), RODATA|NOPTR, $4
DATA negInf<>+0(SB)/4, $0xff800000
GLOBL negInf<>(SB), RODATA|NOPTR, $4
DATA signBit<>+0(SB)/4, $0x80000000
GLOBL signBit<>(SB), RODATA|NOPTR, $4

// EXPCONST loads what EXP needs into Y7..Y15.
#define EXPCONST \
	VBROADCASTSS expHi<>(SB), Y15 \
	VBROADCASTSS expLo<>(SB), Y14 \
	VBROADCASTSS expLog2e<>(SB), Y13 \
	VBROADCASTSS expMagic<>(SB), Y12 \
	VBROADCASTSS expC1<>(SB), Y11 \
	VBROADCASTSS expC2<>(SB), Y10 \
	VBROADCASTSS one<>(SB), Y9 \
	VBROADCASTSS expP5<>(SB), Y8 \
	VBROADCASTSS expP4<>(SB), Y7

// EXP replaces X by exp32(X); K, N, R and P are scratch. The first two lines
// are 88 < x ? 88 : x and -87 > r ? -87 : r, which let a NaN through; the last
// two zero the lanes with x < -87.
#define EXP(X, K, N, R, P) \
	VMINPS X, Y15, R \
	VMAXPS R, Y14, R \
	VMOVAPS Y12, K \
	VFMADD231PS Y13, R, K \
	VSUBPS Y12, K, N \
	VFMADD231PS Y11, N, R \
	VFMADD231PS Y10, N, R \
	VBROADCASTSS expP0<>(SB), P \
	VBROADCASTSS expP1<>(SB), N \
	VFMADD213PS N, R, P \
	VBROADCASTSS expP2<>(SB), N \
	VFMADD213PS N, R, P \
	VBROADCASTSS expP3<>(SB), N \
	VFMADD213PS N, R, P \
	VFMADD213PS Y7, R, P \
	VFMADD213PS Y8, R, P \
	VMULPS R, R, N \
	VFMADD213PS R, N, P \
	VADDPS Y9, P, P \
	VPSLLD $23, K, K \
	VPADDD Y9, K, K \
	VMULPS K, P, P \
	VCMPPS $1, Y14, X, K \
	VANDNPS P, K, X

// TREE leaves the eight lanes of Y0, added in tree8's order, in X0. Uses Y1.
#define TREE \
	VHADDPS Y0, Y0, Y0 \
	VHADDPS Y0, Y0, Y0 \
	VEXTRACTF128 $1, Y0, X1 \
	VADDSS X1, X0, X0

// func softmaxAVX2(s *float32, n8 int) float32
TEXT ·softmaxAVX2(SB), NOSPLIT, $0-20
	MOVQ s+0(FP), SI
	MOVQ n8+8(FP), CX
	MOVQ SI, DI
	MOVQ CX, DX
	VBROADCASTSS negInf<>(SB), Y0
max:
	VMOVUPS (DI), Y1
	VMAXPS Y0, Y1, Y0
	ADDQ $32, DI
	SUBQ $8, DX
	JNZ  max
	VEXTRACTF128 $1, Y0, X1
	VMAXPS X1, X0, X0
	VSHUFPS $0x4e, X0, X0, X1
	VMAXPS X1, X0, X0
	VSHUFPS $0xb1, X0, X0, X1
	VMAXPS X1, X0, X0
	VBROADCASTSS X0, Y6
	EXPCONST
	VXORPS Y0, Y0, Y0
exp:
	VMOVUPS (SI), Y1
	VSUBPS Y6, Y1, Y1
	EXP(Y1, Y2, Y3, Y4, Y5)
	VMOVUPS Y1, (SI)
	VADDPS Y1, Y0, Y0
	ADDQ $32, SI
	SUBQ $8, CX
	JNZ  exp
	TREE
	VMOVSS X0, ret+16(FP)
	VZEROUPPER
	RET

// func siluMulAVX2(out, gu *float32, panels int)
TEXT ·siluMulAVX2(SB), NOSPLIT, $0-24
	MOVQ out+0(FP), DI
	MOVQ gu+8(FP), SI
	MOVQ panels+16(FP), CX
	EXPCONST
	ADDQ CX, CX
half:
	VMOVUPS (SI), Y0
	VBROADCASTSS signBit<>(SB), Y1
	VXORPS Y0, Y1, Y1
	EXP(Y1, Y2, Y3, Y4, Y5)
	VADDPS Y9, Y1, Y1
	VDIVPS Y1, Y0, Y0
	VMULPS 64(SI), Y0, Y0
	VMOVUPS Y0, (DI)
	ADDQ $32, SI
	ADDQ $32, DI
	DECQ CX
	JZ   end
	TESTQ $1, CX
	JNZ  half
	ADDQ $64, SI // past the up rows
	JMP  half
end:
	VZEROUPPER
	RET

// func sumSqAVX2(x *float32, n int) float32
TEXT ·sumSqAVX2(SB), NOSPLIT, $0-20
	MOVQ x+0(FP), SI
	MOVQ n+8(FP), CX
	VXORPS Y0, Y0, Y0
	VXORPS Y1, Y1, Y1
loop:
	VMOVUPS (SI), Y2
	VMOVUPS 32(SI), Y3
	VFMADD231PS Y2, Y2, Y0
	VFMADD231PS Y3, Y3, Y1
	ADDQ $64, SI
	SUBQ $16, CX
	JNZ  loop
	VADDPS Y1, Y0, Y0
	TREE
	VMOVSS X0, ret+16(FP)
	VZEROUPPER
	RET

// func addSumSqAVX2(x, d *float32, n int) float32
TEXT ·addSumSqAVX2(SB), NOSPLIT, $0-28
	MOVQ x+0(FP), SI
	MOVQ d+8(FP), DI
	MOVQ n+16(FP), CX
	VXORPS Y0, Y0, Y0
	VXORPS Y1, Y1, Y1
loop:
	VMOVUPS (SI), Y2
	VMOVUPS 32(SI), Y3
	VADDPS (DI), Y2, Y2
	VADDPS 32(DI), Y3, Y3
	VMOVUPS Y2, (SI)
	VMOVUPS Y3, 32(SI)
	VFMADD231PS Y2, Y2, Y0
	VFMADD231PS Y3, Y3, Y1
	ADDQ $64, SI
	ADDQ $64, DI
	SUBQ $16, CX
	JNZ  loop
	VADDPS Y1, Y0, Y0
	TREE
	VMOVSS X0, ret+24(FP)
	VZEROUPPER
	RET

// func scaleMulAVX2(out, x, w *float32, r float32, n int)
TEXT ·scaleMulAVX2(SB), NOSPLIT, $0-40
	MOVQ out+0(FP), DI
	MOVQ x+8(FP), SI
	MOVQ w+16(FP), DX
	VBROADCASTSS r+24(FP), Y0
	MOVQ n+32(FP), CX
loop:
	VMULPS (SI), Y0, Y1
	VMULPS (DX), Y1, Y1
	VMOVUPS Y1, (DI)
	ADDQ $32, SI
	ADDQ $32, DX
	ADDQ $32, DI
	SUBQ $8, CX
	JNZ  loop
	VZEROUPPER
	RET

// func argmaxAVX2(x *float32, n int) int
// The maximum first, which needs no order, then its first index.
TEXT ·argmaxAVX2(SB), NOSPLIT, $0-24
	MOVQ x+0(FP), SI
	MOVQ n+8(FP), CX
	VBROADCASTSS negInf<>(SB), Y0
	VMOVAPS Y0, Y2
	MOVQ SI, DI
	MOVQ CX, DX
	SUBQ $16, DX
	JLT  tail
max:
	VMOVUPS (DI), Y1
	VMOVUPS 32(DI), Y3
	VMAXPS Y0, Y1, Y0
	VMAXPS Y2, Y3, Y2
	ADDQ $64, DI
	SUBQ $16, DX
	JGE  max
tail:
	ADDQ $16, DX
	JZ   reduce
one:
	VMOVSS (DI), X1
	VBROADCASTSS X1, Y1
	VMAXPS Y0, Y1, Y0
	ADDQ $4, DI
	DECQ DX
	JNZ  one
reduce:
	VMAXPS Y0, Y2, Y0
	VEXTRACTF128 $1, Y0, X1
	VMAXPS X1, X0, X0
	VSHUFPS $0x4e, X0, X0, X1
	VMAXPS X1, X0, X0
	VSHUFPS $0xb1, X0, X0, X1
	VMAXPS X1, X0, X0
	VBROADCASTSS X0, Y0
	MOVQ SI, DI
	MOVQ CX, DX
find:
	SUBQ $8, DX
	JLT  findTail
	VMOVUPS (DI), Y1
	VCMPPS $0, Y0, Y1, Y1
	VMOVMSKPS Y1, AX
	ADDQ $32, DI
	TESTL AX, AX
	JZ   find
	BSFL AX, AX
	SUBQ $32, DI
	SUBQ SI, DI
	SHRQ $2, DI
	ADDQ DI, AX
	MOVQ AX, ret+16(FP)
	VZEROUPPER
	RET
findTail:
	ADDQ $8, DX
	JZ   none
findOne:
	VUCOMISS (DI), X0
	JNE  next
	JPS  next
	SUBQ SI, DI
	SHRQ $2, DI
	MOVQ DI, ret+16(FP)
	VZEROUPPER
	RET
next:
	ADDQ $4, DI
	DECQ DX
	JNZ  findOne
none:
	MOVQ $0, ret+16(FP)
	VZEROUPPER
	RET

// func scoresAVX2(a *scoreArgs)
// Eight positions at a time: one accumulator each, whose eight lanes are the
// eight lanes of the definition, then the tree for all of them by VHADDPS.
TEXT ·scoresAVX2(SB), NOSPLIT, $0-8
	MOVQ a+0(FP), AX
	MOVQ 8(AX), R9   // k
	MOVQ 16(AX), R10 // blocks
	MOVQ 24(AX), R11 // out
	MOVQ 40(AX), R13 // row bytes
	MOVQ 56(AX), R12 // positions left
	VBROADCASTSS 64(AX), Y15
	LEAQ (R13)(R13*2), R14
block:
	MOVLQSX (R10), SI
	ADDQ  $4, R10
	IMULQ 32(AX), SI
	ADDQ  R9, SI
	MOVQ  48(AX), BX // rows left in the block
eight:
	CMPQ BX, $8
	JLT  singles
	MOVQ 0(AX), DI
	MOVQ R13, DX
	MOVQ SI, CX
	LEAQ (SI)(R13*4), R15
	VXORPS Y0, Y0, Y0
	VXORPS Y1, Y1, Y1
	VXORPS Y2, Y2, Y2
	VXORPS Y3, Y3, Y3
	VXORPS Y4, Y4, Y4
	VXORPS Y5, Y5, Y5
	VXORPS Y6, Y6, Y6
	VXORPS Y7, Y7, Y7
chunk:
	VMOVUPS (DI), Y8
	VFMADD231PS (CX), Y8, Y0
	VFMADD231PS (CX)(R13*1), Y8, Y1
	VFMADD231PS (CX)(R13*2), Y8, Y2
	VFMADD231PS (CX)(R14*1), Y8, Y3
	VFMADD231PS (R15), Y8, Y4
	VFMADD231PS (R15)(R13*1), Y8, Y5
	VFMADD231PS (R15)(R13*2), Y8, Y6
	VFMADD231PS (R15)(R14*1), Y8, Y7
	ADDQ $32, DI
	ADDQ $32, CX
	ADDQ $32, R15
	SUBQ $32, DX
	JNZ  chunk
	VHADDPS Y1, Y0, Y0
	VHADDPS Y3, Y2, Y2
	VHADDPS Y5, Y4, Y4
	VHADDPS Y7, Y6, Y6
	VHADDPS Y2, Y0, Y0
	VHADDPS Y6, Y4, Y4
	VPERM2F128 $0x20, Y4, Y0, Y1
	VPERM2F128 $0x31, Y4, Y0, Y2
	VADDPS Y2, Y1, Y0
	VMULPS Y15, Y0, Y0
	VMOVUPS Y0, (R11)
	SUBQ $8, R12
	JLE  end
	ADDQ $32, R11
	LEAQ (SI)(R13*8), SI
	SUBQ $8, BX
	JMP  eight
singles:
	TESTQ BX, BX
	JZ   block
	MOVQ 0(AX), DI
	MOVQ R13, DX
	VXORPS Y0, Y0, Y0
single:
	VMOVUPS (DI), Y8
	VFMADD231PS (SI), Y8, Y0
	ADDQ $32, DI
	ADDQ $32, SI
	SUBQ $32, DX
	JNZ  single
	TREE
	VMULSS X15, X0, X0
	VMOVSS X0, (R11)
	DECQ R12
	JZ   end
	ADDQ $4, R11
	DECQ BX
	JMP  singles
end:
	VZEROUPPER
	RET

// func pause(n int)
TEXT ·pause(SB), NOSPLIT, $0-8
	MOVQ n+0(FP), CX
loop:
	PAUSE
	DECQ CX
	JNZ  loop
	RET
