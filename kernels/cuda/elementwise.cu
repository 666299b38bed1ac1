// Embedding, RMSNorm and SiLU-mul: bandwidth kernels, 16 bytes a thread.
// RMSNorm has no residual add: projections add to the residual stream in
// their epilogue. Oracle: the logits and layers of kernels/cpu.
#include "eight.cuh"

// A token below 0 is not known to the host yet: drawn[-1-token].
template <typename T> static __global__ void embed_kernel(const element *embed, const int32_t *tokens, const int32_t *drawn, residual<T> *x, int hidden) {
  pdl_wait();
  pdl_next();
  int token = tokens[blockIdx.x];
  if (token < 0) token = drawn[-1 - token];
  const uint4 *src = reinterpret_cast<const uint4 *>(embed + int64_t(token) * hidden);
  Eight<T> *dst = reinterpret_cast<Eight<T> *>(x + int64_t(blockIdx.x) * hidden);
  for (int i = threadIdx.x; i < hidden / 8; i += blockDim.x) dst[i] = eight<T>(src[i]);
}

// One CTA a row; up to KEEP vectors a thread stay in registers.
template <typename T, int KEEP>
static __global__ void rmsnorm_kernel(const residual<T> *x, const int32_t *index, const float *w, element *out, int hidden, float eps) {
  __shared__ float sums[32];
  pdl_wait();
  pdl_next();
  int row = index ? index[blockIdx.x] : int(blockIdx.x);
  int n = hidden / 8;
  const Eight<T> *src = reinterpret_cast<const Eight<T> *>(x + int64_t(row) * hidden);
  Eight<T> kept[KEEP];
  float sum = 0;
#pragma unroll
  for (int i = 0; i < KEEP; i++) {
    int at = threadIdx.x + i * blockDim.x;
    if (at < n) {
      kept[i] = src[at];
      sum += sum_squares(kept[i]);
    }
  }
  for (int at = threadIdx.x + KEEP * blockDim.x; at < n; at += blockDim.x) sum += sum_squares(src[at]);
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0;
  for (int i = 0; i < int(blockDim.x) / 32; i++) sum += sums[i];
  float r = rsqrtf(sum / float(hidden) + eps);
  uint4 *dst = reinterpret_cast<uint4 *>(out + int64_t(blockIdx.x) * hidden);
  const float4 *w4 = reinterpret_cast<const float4 *>(w);
  auto put = [&](int at, const Eight<T> &v) {
    float4 a = w4[2 * at], b = w4[2 * at + 1];
    float2 f[4];
    v.pairs(f);
    auto scaled = [&](float2 x, float w0, float w1) { return pack<T>(x.x * r * w0, x.y * r * w1); };
    dst[at] = make_uint4(scaled(f[0], a.x, a.y), scaled(f[1], a.z, a.w), scaled(f[2], b.x, b.y), scaled(f[3], b.z, b.w));
  };
#pragma unroll
  for (int i = 0; i < KEEP; i++) {
    int at = threadIdx.x + i * blockDim.x;
    if (at < n) put(at, kept[i]);
  }
  for (int at = threadIdx.x + KEEP * blockDim.x; at < n; at += blockDim.x) put(at, src[at]);
}

template <typename T> static __global__ void silu_kernel(const element *in, element *out, int64_t vectors) {
  pdl_wait();
  pdl_next();
  int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < vectors; i += step) {
    const uint4 *src = reinterpret_cast<const uint4 *>(in) + 2 * i;
    uint4 g = src[0], u = src[1];
    reinterpret_cast<uint4 *>(out)[i] = make_uint4(silu_mul<T>(g.x, u.x), silu_mul<T>(g.y, u.y), silu_mul<T>(g.z, u.z), silu_mul<T>(g.w, u.w));
  }
}

// A thread has its columns of all rows, in ascending order: none is written before
// it has been read.
static __global__ void keep_rows_kernel(uint4 *x, const int32_t *index, int n, int vectors) {
  constexpr int AT_ONCE = 8;
  pdl_wait();
  pdl_next();
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= vectors) return;
  uint4 *to = x + at;
  for (int i = 0; i < n; i += AT_ONCE) {
    uint4 v[AT_ONCE];
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) v[j] = to[int64_t(index[min(i + j, n - 1)]) * vectors];
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++)
      if (i + j < n) to[int64_t(i + j) * vectors] = v[j];
  }
}

// ---------------------------------------------------------------- launchers

int32_t xk_embed(const Launch &l, const element *embed, const int32_t *tokens, const int32_t *drawn, void *x, int rows, int hidden) {
  return xk_each_type(l.type, [&](auto t) {
    using T = decltype(t);
    return launch(l, embed_kernel<T>, rows, 128, 0, embed, tokens, drawn, static_cast<residual<T> *>(x), hidden);
  });
}

int32_t xk_rmsnorm(const Launch &l, const void *x, const int32_t *index, const float *w, element *out, int rows, int hidden, float eps) {
  return xk_each_type(l.type, [&](auto t) {
    using T = decltype(t);
    auto *from = static_cast<const residual<T> *>(x);
    int n = hidden / 8;
    if (n <= 256) return launch(l, rmsnorm_kernel<T, 1>, rows, int(round_up(n, 32)), 0, from, index, w, out, hidden, eps);
    if (n <= 512) return launch(l, rmsnorm_kernel<T, 2>, rows, 256, 0, from, index, w, out, hidden, eps);
    return launch(l, rmsnorm_kernel<T, 4>, rows, 512, 0, from, index, w, out, hidden, eps);
  });
}

int32_t xk_keep_rows(const Launch &l, void *x, const int32_t *index, int n, int64_t row_bytes) {
  const int vectors = int(row_bytes / 16);
  return launch(l, keep_rows_kernel, div_up(vectors, 32), 32, 0, static_cast<uint4 *>(x), index, n, vectors);
}

int32_t xk_silu(const Launch &l, const element *in, element *out, int rows, int width) {
  int64_t vectors = int64_t(rows) * width / 8;
  int grid = div_up(vectors, 256);
  return xk_each_type(l.type, [&](auto t) { return launch(l, silu_kernel<decltype(t)>, grid < 132 * 16 ? grid : 132 * 16, 256, 0, in, out, vectors); });
}
