// Sums over the ranks of rows of the residual stream, and the norm behind them: what the
// all-reduce over peer memory (ranks.cu) and the one through NCCL (ranks_nccl.cu) share, so that
// both make the same bits.
#pragma once

#include "eight.cuh"
#include "ranks.cuh"

namespace {

constexpr int THREADS = 512; // of a kernel that adds up

__device__ __forceinline__ void store_relaxed(uint64_t *p, uint64_t v) { asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }

// What another rank has written since this kernel began, or before: from where it lies.
__device__ __forceinline__ void load_shared(uint4 *v, const uint4 *p) { asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v->x), "=r"(v->y), "=r"(v->z), "=r"(v->w) : "l"(p)); }
template <typename T> __device__ __forceinline__ Eight<T> shared_eight(const void *rows, int64_t at) {
  Eight<T> v;
  const uint4 *p = reinterpret_cast<const uint4 *>(static_cast<const Eight<T> *>(rows) + at);
  uint4 *to = reinterpret_cast<uint4 *>(&v);
#pragma unroll
  for (int i = 0; i < int(sizeof v / sizeof *p); i++) load_shared(to + i, p + i);
  return v;
}

// x plus the sum of so many ranks' values, from the first rank's up.
template <typename T, int RANKS> struct Partials {
  Eight<T> x, part[RANKS];
  __device__ __forceinline__ void load(const Ranks &k, int which, const residual<T> *stream, int64_t at) {
    x = reinterpret_cast<const Eight<T> *>(stream)[at];
#pragma unroll
    for (int r = 0; r < RANKS; r++)
      if (r < k.ranks) part[r] = shared_eight<T>(k.sums[which][r], at);
  }
  __device__ __forceinline__ Eight<T> sum(const Ranks &k) const {
    float2 all[4] = {}, f[4];
#pragma unroll
    for (int r = 0; r < RANKS; r++) {
      if (r >= k.ranks) break;
      part[r].pairs(f);
#pragma unroll
      for (int i = 0; i < 4; i++) all[i].x = r ? all[i].x + f[i].x : f[i].x, all[i].y = r ? all[i].y + f[i].y : f[i].y;
    }
    x.pairs(f);
#pragma unroll
    for (int i = 0; i < 4; i++) all[i].x += f[i].x, all[i].y += f[i].y;
    return rounded<T>(all);
  }
};

// One row by one CTA. KEEP: vectors of a thread.
template <typename T, int KEEP> struct Row {
  Eight<T> kept[KEEP];

  // value(at) of each vector, stored by store(at, value).
  template <typename V, typename S> __device__ __forceinline__ void fill(int n, V value, S store) {
#pragma unroll
    for (int i = 0; i < KEEP; i++) {
      const int at = threadIdx.x + i * THREADS;
      if (at < n) kept[i] = value(i, at);
    }
#pragma unroll
    for (int i = 0; i < KEEP; i++) {
      const int at = threadIdx.x + i * THREADS;
      if (at < n) store(at, kept[i]);
    }
  }
  __device__ __forceinline__ void norm(const float *w, uint4 *to, int hidden, float eps, float *sums) {
    const int n = hidden / 8;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < KEEP; i++)
      if (int(threadIdx.x) + i * THREADS < n) sum += sum_squares(kept[i]);
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0;
#pragma unroll
    for (int i = 0; i < THREADS / 32; i++) sum += sums[i];
    const float r = rsqrtf(sum / float(hidden) + eps);
    const float4 *w4 = reinterpret_cast<const float4 *>(w);
#pragma unroll
    for (int i = 0; i < KEEP; i++) {
      const int at = threadIdx.x + i * THREADS;
      if (at >= n) break;
      float4 a = w4[2 * at], b = w4[2 * at + 1];
      float2 f[4];
      kept[i].pairs(f);
      auto scaled = [&](float2 x, float w0, float w1) { return pack<T>(x.x * r * w0, x.y * r * w1); };
      to[at] = make_uint4(scaled(f[0], a.x, a.y), scaled(f[1], a.z, a.w), scaled(f[2], b.x, b.y), scaled(f[3], b.z, b.w));
    }
  }
};

struct Reduce {
  Ranks ranks;
  int which;
  void *x;
  const float *w; // null: no norm
  element *xn;
  int rows, hidden;
  float eps;
};

} // namespace
