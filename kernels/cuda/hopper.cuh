// What sm_90a adds: mbarriers, bulk tensor copies, wgmma, register hand-over.
// PTX ISA 8.0, chapters "mbarrier", "cp.async.bulk.tensor", "wgmma".
#pragma once

#include <cuda.h>

#include "common.cuh"

__device__ __forceinline__ void mbar_init(uint64_t *b, int count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_addr(b)), "r"(count)); }
__device__ __forceinline__ void mbar_arrive(uint64_t *b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_addr(b)) : "memory"); }
// Arrives, and expects so many bytes of bulk copies.
__device__ __forceinline__ void mbar_expect(uint64_t *b, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_addr(b)), "r"(bytes) : "memory");
}
// Waits for the end of the phase of this parity.
__device__ __forceinline__ void mbar_wait(uint64_t *b, int parity) {
  uint32_t done;
  do {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}"
                 : "=r"(done) : "r"(smem_addr(b)), "r"(parity) : "memory");
  } while (!done);
}

// Copies the box at the coordinates; what lies outside the tensor is zero.
__device__ __forceinline__ void tma_load(void *dst, const CUtensorMap *map, uint64_t *bar, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
               ::"r"(smem_addr(dst)), "l"(map), "r"(smem_addr(bar)), "r"(column), "r"(row) : "memory");
}
__device__ __forceinline__ void tma_load(void *dst, const CUtensorMap *map, uint64_t *bar, int c0, int c1, int c2) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
               ::"r"(smem_addr(dst)), "l"(map), "r"(smem_addr(bar)), "r"(c0), "r"(c1), "r"(c2) : "memory");
}
__device__ __forceinline__ void tma_load(void *dst, const CUtensorMap *map, uint64_t *bar, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
               ::"r"(smem_addr(dst)), "l"(map), "r"(smem_addr(bar)), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}
__device__ __forceinline__ void tma_load(void *dst, const CUtensorMap *map, uint64_t *bar, int c0, int c1, int c2, int c3, int c4) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
               ::"r"(smem_addr(dst)), "l"(map), "r"(smem_addr(bar)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4) : "memory");
}
// Orders this thread's shared memory accesses before later bulk copies and
// wgmma; fence_async_global the same for global memory.
__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

template <int N> __device__ __forceinline__ void regs_take() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> __device__ __forceinline__ void regs_give() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }

__device__ __forceinline__ void named_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
__device__ __forceinline__ void named_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// Descriptor of an operand in shared memory that consists of atoms of eight
// rows of 128 bytes with 128-byte swizzle (1024 bytes, aligned so). down is the
// distance in bytes of atoms with further rows, across of those with further
// columns. Rows of K elements (K-major): a step of 16 in k is 32 bytes on,
// across is not used.
__device__ __forceinline__ uint64_t wgmma_desc(uint32_t addr, uint32_t down, uint32_t across) {
  return uint64_t((addr & 0x3ffff) >> 4) | uint64_t(across >> 4) << 16 | uint64_t(down >> 4) << 32 | uint64_t(1) << 62;
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

// Tells the compiler that registers change here: asynchronous results must not
// be moved across a wait.
template <int N> __device__ __forceinline__ void pin(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

#define XK_R4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define XK_R16(d, i) XK_R4(d, i), XK_R4(d, i + 4), XK_R4(d, i + 8), XK_R4(d, i + 12)
#define XK_R32(d, i) XK_R16(d, i), XK_R16(d, i + 16)
#define XK_R64(d, i) XK_R32(d, i), XK_R32(d, i + 32)
#define XK_R8(d, i) XK_R4(d, i), XK_R4(d, i + 4)

// d[64][N] = or += a[64][16] b[16][N], N twice the registers of d; a in
// registers, b in shared memory, its rows of N or (MN_MAJOR 0) of K elements.
template <typename T, int MN_MAJOR = 1> __device__ __forceinline__ void wgmma_rs(float (&d)[32], const uint32_t *a, uint64_t b, int add) {
#define WGMMA(type)                                                                                                       \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                   \
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"                           \
               "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}"                                                           \
               : XK_R32(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(MN_MAJOR))
  XK_OF_TYPE(T, WGMMA);
#undef WGMMA
}
template <typename T, int MN_MAJOR = 1> __device__ __forceinline__ void wgmma_rs(float (&d)[40], const uint32_t *a, uint64_t b, int add) {
#define WGMMA(type)                                                                                                        \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %45, 0;\nwgmma.mma_async.sync.aligned.m64n80k16.f32." type "." type " {"  \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                    \
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                          \
               "%32, %33, %34, %35, %36, %37, %38, %39"                                                                    \
               "}, {%40, %41, %42, %43}, %44, p, 1, 1, %46;\n}"                                                            \
               : XK_R32(d, 0), XK_R8(d, 32) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(MN_MAJOR))
  XK_OF_TYPE(T, WGMMA);
#undef WGMMA
}
template <typename T, int MN_MAJOR = 1> __device__ __forceinline__ void wgmma_rs(float (&d)[48], const uint32_t *a, uint64_t b, int add) {
#define WGMMA(type)                                                                                                         \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %53, 0;\nwgmma.mma_async.sync.aligned.m64n96k16.f32." type "." type " {"   \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                     \
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                           \
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"                             \
               "}, {%48, %49, %50, %51}, %52, p, 1, 1, %54;\n}"                                                             \
               : XK_R32(d, 0), XK_R16(d, 32) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(MN_MAJOR))
  XK_OF_TYPE(T, WGMMA);
#undef WGMMA
}
template <typename T, int MN_MAJOR = 1> __device__ __forceinline__ void wgmma_rs(float (&d)[64], const uint32_t *a, uint64_t b, int add) {
#define WGMMA(type)                                                                                                        \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                    \
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                          \
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                          \
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"                            \
               "}, {%64, %65, %66, %67}, %68, p, 1, 1, %70;\n}"                                                            \
               : XK_R64(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(MN_MAJOR))
  XK_OF_TYPE(T, WGMMA);
#undef WGMMA
}
template <typename T, int MN_MAJOR = 1> __device__ __forceinline__ void wgmma_rs(float (&d)[128], const uint32_t *a, uint64_t b, int add) {
#define WGMMA(type)                                                                                                         \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %133, 0;\nwgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " {" \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                     \
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                           \
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                           \
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "                           \
               "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                           \
               "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "                           \
               "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "               \
               "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"             \
               "}, {%128, %129, %130, %131}, %132, p, 1, 1, %134;\n}"                                                       \
               : XK_R64(d, 0), XK_R64(d, 64) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(MN_MAJOR))
  XK_OF_TYPE(T, WGMMA);
#undef WGMMA
}
// The same with both in shared memory, rows of K elements.
template <typename T> __device__ __forceinline__ void wgmma_ss(float (&d)[32], uint64_t a, uint64_t b, int add) {
#define WGMMA(type)                                                                                                       \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                   \
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"                           \
               "}, %32, %33, p, 1, 1, 0, 0;\n}"                                                                           \
               : XK_R32(d, 0) : "l"(a), "l"(b), "r"(add))
  XK_OF_TYPE(T, WGMMA);
#undef WGMMA
}
template <typename T> __device__ __forceinline__ void wgmma_ss(float (&d)[64], uint64_t a, uint64_t b, int add) {
#define WGMMA(type)                                                                                                        \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63" \
               "}, %64, %65, p, 1, 1, 0, 0;\n}" \
               : XK_R64(d, 0) : "l"(a), "l"(b), "r"(add))
  XK_OF_TYPE(T, WGMMA);
#undef WGMMA
}
