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

// A chunk of a block's run: where it lies in the block of the pool, and in that of the host.
struct Bit {
  int64_t pool, host;
  int bytes;
};

// How a block's run is cut, and the slots that a ring has for it. Blocks of the host have all
// of the model's heads. Of a rank that has some of them, the rows of K, those of V, and their
// scales are parts that lie apart there.
struct Cut {
  int chunk, chunks, slots;
  int each, scales_each = 0;              // chunks of a part of the rows, and of the scales
  int64_t part, host_part = 0, host = 0;  // bytes of a part; from K's to V's on the host, and K's place
  int64_t scales = 0, host_scales_part = 0, host_scales = 0;
  explicit Cut(const xk_config &g) : part(xk_block_run(g)) {
    const int64_t head = int64_t(g.block_tokens) * g.head_dim * (g.kv_fp8 ? 1 : 2), scale = int64_t(g.block_tokens) * 4; // of one
    const bool whole = g.kv_heads == g.all_kv_heads;
    if (!whole) part = g.kv_heads * head, host_part = g.all_kv_heads * head, host = g.first_kv_head * head;
    if (!whole && g.kv_fp8) scales = g.kv_heads * scale, host_scales_part = g.all_kv_heads * scale, host_scales = 2 * host_part + g.first_kv_head * scale;
    chunk = int(std::min<int64_t>(part, 8 << 10)), slots = std::min(RING_BYTES / chunk, RING_SLOTS);
    each = div_up(part, chunk), scales_each = div_up(scales, chunk);
    chunks = whole ? each : 2 * (each + scales_each);
  }
  __device__ Bit bit(int n) const {
    const bool rows = n < 2 * each;
    if (!rows) n -= 2 * each;
    const bool v = n >= (rows ? each : scales_each);
    const int64_t at = int64_t(v ? n - (rows ? each : scales_each) : n) * chunk, size = rows ? part : scales;
    Bit b;
    b.pool = (rows ? 0 : 2 * part) + (v ? size : 0) + at;
    b.host = (rows ? host : host_scales) + (v ? (rows ? host_part : host_scales_part) : 0) + at;
    b.bytes = int(min(int64_t(chunk), size - at));
    return b;
  }
};
