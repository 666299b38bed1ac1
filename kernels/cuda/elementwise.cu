// Embedding, RMSNorm and SiLU-mul: bandwidth kernels, 16 bytes a thread.
// RMSNorm has no residual add: projections add to the residual stream in
// their epilogue. Oracle: the logits and layers of kernels/cpu.
#include "common.cuh"

// A token below 0 is not known to the host yet: drawn[-1-token].
static __global__ void embed_kernel(const bf16 *embed, const int32_t *tokens, const int32_t *drawn, bf16 *x, int hidden) {
  pdl_wait();
  pdl_next();
  int token = tokens[blockIdx.x];
  if (token < 0) token = drawn[-1 - token];
  const uint4 *src = reinterpret_cast<const uint4 *>(embed + int64_t(token) * hidden);
  uint4 *dst = reinterpret_cast<uint4 *>(x + int64_t(blockIdx.x) * hidden);
  for (int i = threadIdx.x; i < hidden / 8; i += blockDim.x) dst[i] = src[i];
}

static __device__ __forceinline__ float sum_squares(uint4 v) {
  float2 a = unpack(v.x), b = unpack(v.y), c = unpack(v.z), d = unpack(v.w);
  return a.x * a.x + a.y * a.y + b.x * b.x + b.y * b.y + c.x * c.x + c.y * c.y + d.x * d.x + d.y * d.y;
}

static __device__ __forceinline__ uint32_t scaled(uint32_t v, float r, float w0, float w1) {
  float2 f = unpack(v);
  return pack(f.x * r * w0, f.y * r * w1);
}

// One CTA a row; up to KEEP vectors a thread stay in registers.
template <int KEEP>
static __global__ void rmsnorm_kernel(const bf16 *x, const int32_t *index, const float *w, bf16 *out, int hidden, float eps) {
  __shared__ float sums[32];
  pdl_wait();
  pdl_next();
  int row = index ? index[blockIdx.x] : int(blockIdx.x);
  int n = hidden / 8;
  const uint4 *src = reinterpret_cast<const uint4 *>(x + int64_t(row) * hidden);
  uint4 kept[KEEP];
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
  auto put = [&](int at, uint4 v) {
    float4 a = w4[2 * at], b = w4[2 * at + 1];
    dst[at] = make_uint4(scaled(v.x, r, a.x, a.y), scaled(v.y, r, a.z, a.w), scaled(v.z, r, b.x, b.y), scaled(v.w, r, b.z, b.w));
  };
#pragma unroll
  for (int i = 0; i < KEEP; i++) {
    int at = threadIdx.x + i * blockDim.x;
    if (at < n) put(at, kept[i]);
  }
  for (int at = threadIdx.x + KEEP * blockDim.x; at < n; at += blockDim.x) put(at, src[at]);
}

static __global__ void silu_kernel(const bf16 *in, bf16 *out, int64_t vectors) {
  pdl_wait();
  pdl_next();
  int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < vectors; i += step) {
    const uint4 *src = reinterpret_cast<const uint4 *>(in) + 2 * i;
    uint4 g = src[0], u = src[1];
    reinterpret_cast<uint4 *>(out)[i] = make_uint4(silu_mul(g.x, u.x), silu_mul(g.y, u.y), silu_mul(g.z, u.z), silu_mul(g.w, u.w));
  }
}

// A thread has its columns of all rows, in ascending order: none is written before
// it has been read.
static __global__ void keep_rows_kernel(bf16 *x, const int32_t *index, int n, int width) {
  constexpr int AT_ONCE = 8;
  pdl_wait();
  pdl_next();
  const int at = blockIdx.x * blockDim.x + threadIdx.x, vectors = width / 8;
  if (at >= vectors) return;
  uint4 *to = reinterpret_cast<uint4 *>(x) + at;
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

int32_t xk_embed(const Launch &l, const bf16 *embed, const int32_t *tokens, const int32_t *drawn, bf16 *x, int rows, int hidden) {
  return launch(l, embed_kernel, rows, 128, 0, embed, tokens, drawn, x, hidden);
}

int32_t xk_rmsnorm(const Launch &l, const bf16 *x, const int32_t *index, const float *w, bf16 *out, int rows, int hidden, float eps) {
  int n = hidden / 8;
  if (n <= 256) return launch(l, rmsnorm_kernel<1>, rows, int(round_up(n, 32)), 0, x, index, w, out, hidden, eps);
  if (n <= 512) return launch(l, rmsnorm_kernel<2>, rows, 256, 0, x, index, w, out, hidden, eps);
  return launch(l, rmsnorm_kernel<4>, rows, 512, 0, x, index, w, out, hidden, eps);
}

int32_t xk_keep_rows(const Launch &l, bf16 *x, const int32_t *index, int n, int width) {
  return launch(l, keep_rows_kernel, div_up(width / 8, 32), 32, 0, x, index, n, width);
}

int32_t xk_silu(const Launch &l, const bf16 *in, bf16 *out, int rows, int width) {
  int64_t vectors = int64_t(rows) * width / 8;
  int grid = div_up(vectors, 256);
  return launch(l, silu_kernel, grid < 132 * 16 ? grid : 132 * 16, 256, 0, in, out, vectors);
}
