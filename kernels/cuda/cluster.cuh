// Clusters of CTAs that share what they read, bulk stores, and the widest wgmma.
// PTX ISA 8.0, chapters "cp.async.bulk.tensor", "mapa", "barrier.cluster".
#pragma once

#include "hopper.cuh"

__device__ __forceinline__ int cluster_rank() {
  uint32_t r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return int(r);
}
// Waits for all threads of the cluster; orders no memory but barriers made before
// a fence.mbarrier_init.
__device__ __forceinline__ void cluster_meet() {
  asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;" ::: "memory");
}
// The address of what lies at p in the CTA of that rank.
__device__ __forceinline__ uint32_t peer_addr(const void *p, int rank) {
  uint32_t a;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(a) : "r"(smem_addr(p)), "r"(rank));
  return a;
}
// Arrives at a barrier of that CTA. Without .cluster in its release there is no
// fence over the GPU, which would cost a microsecond: enough to say that
// something has been read.
__device__ __forceinline__ void peer_arrive(uint64_t *b, int rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(peer_addr(b, rank)) : "memory");
}
// Stores a value in that CTA and arrives there; mbar_wait_cluster sees it. Atomic, as
// is to be who reads it: racecheck does not follow mbarriers, and calls the plain form a race.
__device__ __forceinline__ void peer_send(int *p, uint64_t *b, int rank, int value) {
  asm volatile("{\n.reg .b32 before;\natom.relaxed.cluster.shared::cluster.exch.b32 before, [%0], %1;\n}" ::"r"(peer_addr(p, rank)), "r"(value) : "memory");
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(peer_addr(b, rank)) : "memory");
}
__device__ __forceinline__ void mbar_wait_cluster(uint64_t *b, int parity) {
  uint32_t done;
  do {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}"
                 : "=r"(done) : "r"(smem_addr(b)), "r"(parity) : "memory");
  } while (!done);
}

// Copies the box to the same place in each CTA of the mask, and completes on
// the same barrier in each.
__device__ __forceinline__ void tma_share(void *dst, const CUtensorMap *map, uint64_t *bar, int column, int row, uint16_t mask) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;"
               ::"r"(smem_addr(dst)), "l"(map), "r"(smem_addr(bar)), "r"(column), "r"(row), "h"(mask) : "memory");
}
// Stores the box; what lies outside the tensor is left out.
__device__ __forceinline__ void tma_store(const CUtensorMap *map, const void *src, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(smem_addr(src)), "r"(column), "r"(row) : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until this thread's stores have read their shared memory, or are done.
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Stores four 8x8 matrices; lane 8i+r has the address of row r of matrix i.
__device__ __forceinline__ void stmatrix4(uint32_t addr, const uint32_t v[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(addr), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}

// d[64][256] = or += a[64][16] b[256][16]; both in shared memory, K-major.
template <typename T> __device__ __forceinline__ void wgmma_ss(float (&d)[128], uint64_t a, uint64_t b, int add) {
#define WGMMA(type)                                                                                                         \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\nwgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " {" \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                     \
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                           \
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                           \
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "                           \
               "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                           \
               "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "                           \
               "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "               \
               "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"             \
               "}, %128, %129, p, 1, 1, 0, 0;\n}"                                                                           \
               : XK_R64(d, 0), XK_R64(d, 64) : "l"(a), "l"(b), "r"(add))
  XK_OF_TYPE(T, WGMMA);
#undef WGMMA
}
