#include "textflag.h"

// See digest_amd64.go for what these functions compute.

DATA iota<>+0(SB)/8, $0
DATA iota<>+8(SB)/8, $1
DATA iota<>+16(SB)/8, $2
DATA iota<>+24(SB)/8, $3
DATA iota<>+32(SB)/8, $4
DATA iota<>+40(SB)/8, $5
DATA iota<>+48(SB)/8, $6
DATA iota<>+56(SB)/8, $7
GLOBL iota<>(SB), RODATA|NOPTR, $64

// One 64-byte chunk of one row: the lanes' sums go to LIN as 32-bit halves,
// their keyed products to ACC. Z16 has the keys.
#define CHUNK(ADDR, ACC, LIN, D, S) \
	VMOVDQU64 ADDR, D      \
	VPADDD    D, LIN, LIN  \
	VPXORQ    Z16, D, D    \
	VPSRLQ    $32, D, S    \
	VPMULUDQ  D, S, S      \
	VPADDQ    S, ACC, ACC

// ACC += (sum of both halves of LIN) << 32. Z27 masks the high half.
#define FOLD(ACC, LIN, T) \
	VPSLLQ $32, LIN, T     \
	VPANDQ Z27, LIN, LIN   \
	VPADDQ T, ACC, ACC     \
	VPADDQ LIN, ACC, ACC

// A = [sum over lane pairs of A, of B] in each 128 bits.
#define PAIRS(A, B, T) \
	VPUNPCKLQDQ B, A, T    \
	VPUNPCKHQDQ B, A, A    \
	VPADDQ      T, A, A

// A = [sum over halves of A's 256-bit pairs, of B's].
#define HALVES(A, B, T) \
	VSHUFI64X2 $0x88, B, A, T \
	VSHUFI64X2 $0xdd, B, A, A \
	VPADDQ     T, A, A

// The splitmix64 finaliser. Z28, Z29 have its factors.
#define MIX(X, T) \
	VPSRLQ  $30, X, T      \
	VPXORQ  T, X, X        \
	VPMULLQ Z28, X, X      \
	VPSRLQ  $27, X, T      \
	VPXORQ  T, X, X        \
	VPMULLQ Z29, X, X      \
	VPSRLQ  $31, X, T      \
	VPXORQ  T, X, X

#define AHEAD 4096

// func hashRowsAVX512(rows *byte, eights, rowBytes int, keys *uint64, coord uint64) uint64
TEXT ·hashRowsAVX512(SB), NOSPLIT, $0-48
	MOVQ rows+0(FP), SI
	MOVQ eights+8(FP), CX
	MOVQ rowBytes+16(FP), R8
	MOVQ keys+24(FP), DX
	VPBROADCASTQ coord+32(FP), Z30
	VPADDQ       iota<>(SB), Z30, Z30 // coordinates of eight rows
	VPXORQ       Z31, Z31, Z31        // sum of hashes
	VPTERNLOGQ   $0xff, Z27, Z27, Z27
	VPSLLQ       $32, Z27, Z27
	MOVQ         $0xbf58476d1ce4e5b9, AX
	VPBROADCASTQ AX, Z28
	MOVQ         $0x94d049bb133111eb, AX
	VPBROADCASTQ AX, Z29
	MOVQ         $8, AX
	VPBROADCASTQ AX, Z26
	LEAQ (R8)(R8*2), R9

eight:
	LEAQ (SI)(R8*4), R10
	VPXORQ Z0, Z0, Z0
	VPXORQ Z1, Z1, Z1
	VPXORQ Z2, Z2, Z2
	VPXORQ Z3, Z3, Z3
	VPXORQ Z4, Z4, Z4
	VPXORQ Z5, Z5, Z5
	VPXORQ Z6, Z6, Z6
	VPXORQ Z7, Z7, Z7
	VPXORQ Z8, Z8, Z8
	VPXORQ Z9, Z9, Z9
	VPXORQ Z10, Z10, Z10
	VPXORQ Z11, Z11, Z11
	VPXORQ Z12, Z12, Z12
	VPXORQ Z13, Z13, Z13
	VPXORQ Z14, Z14, Z14
	VPXORQ Z15, Z15, Z15
	XORQ R11, R11
	MOVQ SI, R12

chunk:
	VMOVDQU64 (DX)(R11*1), Z16
	PREFETCHT0 AHEAD(R12)
	PREFETCHT0 (AHEAD+64)(R12)
	PREFETCHT0 (AHEAD+128)(R12)
	PREFETCHT0 (AHEAD+192)(R12)
	PREFETCHT0 (AHEAD+256)(R12)
	PREFETCHT0 (AHEAD+320)(R12)
	PREFETCHT0 (AHEAD+384)(R12)
	PREFETCHT0 (AHEAD+448)(R12)
	ADDQ $512, R12
	CHUNK((SI), Z0, Z8, Z17, Z18)
	CHUNK((SI)(R8*1), Z1, Z9, Z19, Z20)
	CHUNK((SI)(R8*2), Z2, Z10, Z21, Z22)
	CHUNK((SI)(R9*1), Z3, Z11, Z23, Z24)
	CHUNK((R10), Z4, Z12, Z17, Z18)
	CHUNK((R10)(R8*1), Z5, Z13, Z19, Z20)
	CHUNK((R10)(R8*2), Z6, Z14, Z21, Z22)
	CHUNK((R10)(R9*1), Z7, Z15, Z23, Z24)
	ADDQ $64, SI
	ADDQ $64, R10
	ADDQ $64, R11
	CMPQ R11, R8
	JB   chunk

	FOLD(Z0, Z8, Z17)
	FOLD(Z1, Z9, Z18)
	FOLD(Z2, Z10, Z19)
	FOLD(Z3, Z11, Z20)
	FOLD(Z4, Z12, Z21)
	FOLD(Z5, Z13, Z22)
	FOLD(Z6, Z14, Z23)
	FOLD(Z7, Z15, Z24)
	PAIRS(Z0, Z1, Z17)
	PAIRS(Z2, Z3, Z18)
	PAIRS(Z4, Z5, Z19)
	PAIRS(Z6, Z7, Z20)
	HALVES(Z0, Z2, Z17)
	HALVES(Z4, Z6, Z18)
	HALVES(Z0, Z4, Z17)  // one row's sum a lane, in order
	VMOVDQA64 Z30, Z1
	MIX(Z1, Z17)
	VPXORQ Z1, Z0, Z0
	MIX(Z0, Z17)
	VPADDQ Z0, Z31, Z31
	VPADDQ Z26, Z30, Z30
	LEAQ (R8)(R8*4), AX // seven rows on: the chunks have gone through the first
	LEAQ (AX)(R8*2), AX
	ADDQ AX, SI
	DECQ CX
	JNZ  eight

	VEXTRACTI64X4 $1, Z31, Y0
	VPADDQ        Y0, Y31, Y0
	VEXTRACTI128  $1, Y0, X1
	VPADDQ        X1, X0, X0
	VPUNPCKHQDQ   X0, X0, X1
	VPADDQ        X1, X0, X0
	VMOVQ         X0, ret+40(FP)
	VZEROUPPER
	RET

// func sumRowsAVX2(rows *byte, n, rowBytes int, keys, sums *uint64)
TEXT ·sumRowsAVX2(SB), NOSPLIT, $0-40
	MOVQ rows+0(FP), SI
	MOVQ n+8(FP), CX
	MOVQ rowBytes+16(FP), R8
	MOVQ keys+24(FP), DX
	MOVQ sums+32(FP), DI
	VPCMPEQD Y7, Y7, Y7
	VPSLLQ   $32, Y7, Y7

row:
	VPXOR Y0, Y0, Y0
	VPXOR Y1, Y1, Y1
	XORQ  R11, R11

half:
	VMOVDQU  (SI)(R11*1), Y2
	VPADDD   Y2, Y1, Y1
	VPXOR    (DX)(R11*1), Y2, Y2
	VPSRLQ   $32, Y2, Y3
	VPMULUDQ Y2, Y3, Y3
	VPADDQ   Y3, Y0, Y0
	ADDQ $32, R11
	CMPQ R11, R8
	JB   half

	VPSLLQ $32, Y1, Y2
	VPAND  Y7, Y1, Y1
	VPADDQ Y2, Y0, Y0
	VPADDQ Y1, Y0, Y0
	VEXTRACTI128 $1, Y0, X1
	VPADDQ       X1, X0, X0
	VPUNPCKHQDQ  X0, X0, X1
	VPADDQ       X1, X0, X0
	VMOVQ        X0, (DI)
	ADDQ R8, SI
	ADDQ $8, DI
	DECQ CX
	JNZ  row
	VZEROUPPER
	RET
