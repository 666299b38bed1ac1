#include "textflag.h"

// func stream(dst, src, nextDst, nextSrc *byte, n int)
//
// AVX2 loads, non-temporal stores: the destination is not read first, as it is
// for ordinary stores. n is a multiple of 128 and more than AHEAD, dst is
// aligned to 32. The next block's pages are touched first, so that their
// translations are there in time, and its first lines last.
#define AHEAD 2048

TEXT ·stream(SB), NOSPLIT, $0-40
	MOVQ dst+0(FP), DI
	MOVQ src+8(FP), SI
	MOVQ nextDst+16(FP), R8
	MOVQ nextSrc+24(FP), DX
	MOVQ n+32(FP), CX
	MOVQ DX, R9
	MOVQ CX, R10

pages:
	PREFETCHT0 (R8)
	PREFETCHT0 (R9)
	ADDQ       $4096, R8
	ADDQ       $4096, R9
	SUBQ       $4096, R10
	JG         pages
	SUBQ       $AHEAD, CX

body:
	PREFETCHT0 AHEAD(SI)
	PREFETCHT0 (AHEAD+64)(SI)
	VMOVDQU    (SI), Y0
	VMOVDQU    32(SI), Y1
	VMOVDQU    64(SI), Y2
	VMOVDQU    96(SI), Y3
	VMOVNTDQ   Y0, (DI)
	VMOVNTDQ   Y1, 32(DI)
	VMOVNTDQ   Y2, 64(DI)
	VMOVNTDQ   Y3, 96(DI)
	ADDQ       $128, SI
	ADDQ       $128, DI
	SUBQ       $128, CX
	JG         body
	MOVQ       $AHEAD, CX

tail:
	PREFETCHT0 (DX)
	PREFETCHT0 64(DX)
	VMOVDQU    (SI), Y0
	VMOVDQU    32(SI), Y1
	VMOVDQU    64(SI), Y2
	VMOVDQU    96(SI), Y3
	VMOVNTDQ   Y0, (DI)
	VMOVNTDQ   Y1, 32(DI)
	VMOVNTDQ   Y2, 64(DI)
	VMOVNTDQ   Y3, 96(DI)
	ADDQ       $128, DX
	ADDQ       $128, SI
	ADDQ       $128, DI
	SUBQ       $128, CX
	JG         tail
	SFENCE
	VZEROUPPER
	RET
