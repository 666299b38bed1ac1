// Activations in FP8: each row gets a scale of its own, as a KV row does, for
// cuBLASLt's FP8 multiplications. One CTA a row, which stays in registers between
// its maximum and its rounding. Bound by bandwidth. Oracle: the logits of bf16
// activations.
#include "rows.cuh"

static constexpr int THREADS = 256, KEEP = 8; // 16-byte vectors of bf16 a thread keeps

static __device__ __forceinline__ float most_of(uint4 v, float most) {
  const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float2 f = unpack<bf16>(w[i]);
    most = fmaxf(most, fmaxf(finite_magnitude(f.x), finite_magnitude(f.y)));
  }
  return most;
}
static __device__ __forceinline__ uint2 rounded(uint4 v, float scale) {
  auto two = [&](uint32_t w) {
    float2 f = unpack<bf16>(w);
    return e4m3x2(f.x, f.y, scale);
  };
  return make_uint2(two(v.x) | two(v.y) << 16, two(v.z) | two(v.w) << 16);
}

static __global__ __launch_bounds__(THREADS) void quantise_kernel(const element *x, uint8_t *out, float *scales, int k) {
  __shared__ float tops[THREADS / 32];
  pdl_wait();
  pdl_next();
  const uint4 *src = reinterpret_cast<const uint4 *>(x + int64_t(blockIdx.x) * k);
  uint2 *dst = reinterpret_cast<uint2 *>(out + int64_t(blockIdx.x) * k);
  const int n = k / 8;
  uint4 kept[KEEP];
  float most = 0;
#pragma unroll
  for (int i = 0; i < KEEP; i++) {
    int at = threadIdx.x + i * THREADS;
    if (at < n) kept[i] = src[at], most = most_of(kept[i], most);
  }
  for (int at = threadIdx.x + KEEP * THREADS; at < n; at += THREADS) most = most_of(src[at], most);
#pragma unroll
  for (int o = 16; o; o >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
  if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = most;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < THREADS / 32; i++) most = fmaxf(most, tops[i]);
  const float scale = e4m3_scale(most);
#pragma unroll
  for (int i = 0; i < KEEP; i++) {
    int at = threadIdx.x + i * THREADS;
    if (at < n) dst[at] = rounded(kept[i], scale);
  }
  for (int at = threadIdx.x + KEEP * THREADS; at < n; at += THREADS) dst[at] = rounded(src[at], scale);
  if (threadIdx.x == 0) scales[blockIdx.x] = scale;
}

// ---------------------------------------------------------------- launchers

int32_t xk_quantise(const Launch &l, const element *x, uint8_t *out, float *scale, int rows, int k) {
  return launch(l, quantise_kernel, rows, THREADS, 0, x, out, scale, k);
}
