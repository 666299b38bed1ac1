// Log probabilities under the raw logits: of the tokens that were drawn or asked
// for, and of the most likely. Semantics: kernels/DESIGN.md, section 5.
// Oracle: TestLogprobs in double precision, and kernels/cpu.
#include <climits>

#include "common.cuh"

static constexpr int THREADS = 1024;

struct Best {
  float v;
  int id; // INT_MAX: none
};
static __device__ __forceinline__ Best better(Best a, Best b) {
  bool second = b.id != INT_MAX && (a.id == INT_MAX || b.v > a.v || (b.v == a.v && b.id < a.id));
  return second ? b : a;
}
static __device__ __forceinline__ Best warp_best(Best b) {
#pragma unroll
  for (int o = 16; o; o >>= 1) {
    Best other = {__shfl_xor_sync(~0u, b.v, o), __shfl_xor_sync(~0u, b.id, o)};
    b = better(b, other);
  }
  return b;
}
// The best of a CTA, in every thread. scratch has room for one a warp.
static __device__ Best block_best(Best b, Best *scratch) {
  b = warp_best(b);
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = b;
  __syncthreads();
  Best all = {0, INT_MAX};
  for (int i = 0; i < int(blockDim.x) / 32; i++) all = better(all, scratch[i]);
  return all;
}

// One CTA an item: log-sum-exp, rank, and the most likely by repeated maxima.
static __global__ __launch_bounds__(THREADS, 1) void logprob_kernel(Sampling p, const xk_item *items, const int32_t *drawn, xk_logprob *out) {
  __shared__ Best scratch[32];
  __shared__ double sums[32];
  __shared__ int counts[32];
  pdl_wait();
  pdl_next();
  const xk_item it = items[blockIdx.x];
  if (it.final < 0) return;
  const float *x = p.logits + int64_t(it.final - p.first_final) * p.stride;
  int n = p.vocab, id = it.id >= 0 ? it.id : drawn[-1 - it.id];
  auto after = [&](float floor, int floor_id) { // the best that comes after (floor, floor_id)
    Best b = {0, INT_MAX};
    for (int i = threadIdx.x; i < n; i += THREADS) {
      float v = x[i];
      if (v != v || (floor_id >= 0 && !(v < floor || (v == floor && i > floor_id)))) continue;
      if (b.id == INT_MAX || v > b.v) b = {v, i};
    }
    return block_best(b, scratch);
  };
  Best first = after(0, -1);
  float m = first.id == INT_MAX ? -INFINITY : first.v, mine = x[id];
  double sum = 0;
  int rank = 0;
  for (int i = threadIdx.x; i < n; i += THREADS) {
    float v = x[i];
    if (v == v && !isinf(m)) sum += double(expf(v - m));
    rank += v >= mine;
  }
#pragma unroll
  for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o), rank += __shfl_xor_sync(~0u, rank, o);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum, counts[threadIdx.x / 32] = rank;
  __syncthreads();
  sum = 0, rank = 0;
  for (int i = 0; i < THREADS / 32; i++) sum += sums[i], rank += counts[i];
  double lse = isinf(m) ? double(m) : double(m) + log(sum);
  if (threadIdx.x == 0) out[it.out] = {id, float(double(mine) - lse), rank};
  Best b = first;
  for (int i = 0; i < it.top; i++) {
    if (threadIdx.x == 0) {
      xk_logprob e = {0, 0, 0};
      if (b.id != INT_MAX) e = {b.id, float(double(b.v) - lse), i + 1};
      out[it.out + 1 + i] = e;
    }
    if (i + 1 < it.top && b.id != INT_MAX) b = after(b.v, b.id);
  }
}

// ---------------------------------------------------------------- launchers

int32_t xk_logprobs(const Launch &l, const Sampling &s, const xk_item *items, int n, const int32_t *all_tokens, xk_logprob *out) {
  return launch(l, logprob_kernel, n, THREADS, 0, s, items, all_tokens, out);
}
