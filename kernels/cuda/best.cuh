// The greatest of values, the lowest id first among equals.
#pragma once

#include <climits>

#include "common.cuh"

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

