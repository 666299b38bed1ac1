// Bulk copies between memory and a warp's ring in shared memory, of hostmove.cu and
// arrive.cu. Four warps of a CTA have a ring each: one lane starts copies into its
// slots and, as they land, copies out of them, so that 192 KiB are under way and no
// register holds a row; PCIe is full with 2 to 4 CTAs. Four more warps take the
// digests.
#pragma once

#include <algorithm>

#include "hopper.cuh"
#include "move.cuh"

constexpr int RINGS = 4, RING_THREADS = 2 * RINGS * 32;
constexpr int RING_BYTES = 48 << 10, RING_SLOTS = 64; // slots: at most

__device__ __forceinline__ void bulk_in(void *dst, const void *src, int bytes, uint64_t *bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem_addr(dst)), "l"(src), "r"(bytes), "r"(smem_addr(bar)) : "memory");
}
__device__ __forceinline__ void bulk_out(void *dst, const void *src, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\ncp.async.bulk.commit_group;" ::"l"(dst), "r"(smem_addr(src)), "r"(bytes) : "memory");
}
// All copies out but the last N have read their slots.
template <int N> __device__ __forceinline__ void bulk_read_wait() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory"); }
// All copies out have been written.
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// How a block's run is cut, and the slots that a ring has for it.
struct Cut {
  int chunk, chunks, slots;
  explicit Cut(int64_t run) : chunk(int(std::min<int64_t>(run, 8 << 10))), chunks(div_up(run, chunk)), slots(std::min(RING_BYTES / chunk, RING_SLOTS)) {}
};
