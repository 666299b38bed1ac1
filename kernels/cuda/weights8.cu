// FP8 weights on their way to the device: rounded there, a scale a row (an output
// channel), or taken as a checkpoint has them. Embedding, head, norms and biases
// are not among them.
// Oracle: kernels/cpu on the widened weights of an FP8 checkpoint.
#include <algorithm>
#include <cmath>

#include "context.cuh"

namespace {

struct Place8 {
  Matrix8 to;
  int64_t first, rows, cols, stride; // rows of the tensor go to first ..
  int interleave;                    // as Place
  __device__ int64_t row(int64_t r) const { return first + (interleave < 0 ? r : r / 8 * 16 + interleave * 8 + r % 8); }
};

bool place8(xk_ctx *c, int weight, int layer, Place8 *p) {
  const xk_config &g = c->cfg;
  int64_t expert = 0;
  if (g.experts && layer >= 0 && (weight == XK_GATE || weight == XK_UP || weight == XK_DOWN)) expert = layer / g.layers, layer %= g.layers;
  if (!g.weights_fp8 || layer < 0 || layer >= g.layers || expert > std::max(g.experts - 1, 0)) return false;
  const Layer &l = c->layers[layer];
  const int64_t h = g.hidden, q = int64_t(g.heads) * g.head_dim, kv = int64_t(g.kv_heads) * g.head_dim;
  switch (weight) {
  case XK_Q: *p = {l.qkv8, 0, q, h, h, -1}; return true;
  case XK_K: *p = {l.qkv8, q, kv, h, h, -1}; return true;
  case XK_V: *p = {l.qkv8, q + kv, kv, h, h, -1}; return true;
  case XK_O: *p = {l.o8, 0, h, q, q, -1}; return true;
  case XK_GATE: *p = {l.gate_up8, expert * 2 * c->ff, g.intermediate, h, h, 0}; return true;
  case XK_UP: *p = {l.gate_up8, expert * 2 * c->ff, g.intermediate, h, h, 1}; return true;
  case XK_DOWN: *p = {l.down8, expert * h, h, g.intermediate, c->ff, -1}; return true;
  }
  return false;
}

// One CTA a row: its greatest magnitude, then its elements. value(row, column).
template <typename F> __device__ void round_row(const Place8 &p, int64_t row, F value) {
  __shared__ float tops[8];
  float most = 0;
  for (int64_t i = threadIdx.x; i < p.cols; i += 256) most = fmaxf(most, finite_magnitude(value(i)));
#pragma unroll
  for (int o = 16; o; o >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
  if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = most;
  __syncthreads();
  for (float t : tops) most = fmaxf(most, t);
  const float scale = e4m3_scale(most);
  const int64_t to = p.row(row);
  if (threadIdx.x == 0) p.to.scale[to] = scale;
  for (int64_t i = threadIdx.x; i < p.cols; i += 256) {
    float v = value(i);
    p.to.data[to * p.stride + i] = uint8_t(e4m3x2(v, v, scale));
  }
}

__global__ void round_kernel(const void *src, int dtype, Place8 p, int64_t first) {
  const int64_t at = int64_t(blockIdx.x) * p.cols;
  round_row(p, first + blockIdx.x, [&](int64_t i) { return xk_widen_weight(src, dtype, at + i); });
}

__global__ void random8_kernel(Place8 p, uint64_t seed, float scale) {
  const int64_t at = int64_t(blockIdx.x) * p.cols;
  round_row(p, blockIdx.x, [&](int64_t i) { return __bfloat162float(__float2bfloat16(xk_random_weight(seed, at + i, 0, scale))); });
}

__global__ void copy_kernel(const uint8_t *src, const float *scales, int n_scales, Place8 p, int64_t first) {
  const int64_t row = first + blockIdx.x, to = p.row(row);
  for (int64_t i = threadIdx.x; i < p.cols; i += 256) p.to.data[to * p.stride + i] = src[int64_t(blockIdx.x) * p.cols + i];
  if (threadIdx.x == 0) p.to.scale[to] = scales[n_scales == 1 ? 0 : row];
}

// Runs f(staged rows, first row, rows) over a tensor of so many bytes an element.
template <typename F> int32_t in_stages(int weight, const Place8 &p, const void *data, int64_t stride, int64_t size, F f) {
  const int64_t line = p.cols * size, most = std::min(p.rows, std::max<int64_t>(1, (int64_t(64) << 20) / line));
  void *staging;
  XK_TRY(cudaMalloc(&staging, most * line));
  cudaError_t e = cudaSuccess;
  for (int64_t row = 0; row < p.rows && e == cudaSuccess; row += most) {
    const int64_t n = std::min(most, p.rows - row);
    e = xk_stage(staging, data, row, n, p.cols, stride ? stride : p.cols, size);
    if (e != cudaSuccess) break;
    f(staging, row, int(n));
    e = cudaDeviceSynchronize();
  }
  cudaFree(staging);
  return e == cudaSuccess ? XK_OK : xk_fail(XK_CUDA, "weight %d: %s", weight, cudaGetErrorString(e));
}

} // namespace

bool xk_is8(xk_ctx *c, int weight, int layer) {
  Place8 p;
  return place8(c, weight, layer, &p);
}

int32_t xk_load_rounded(xk_ctx *c, int32_t weight, int32_t layer, int32_t dtype, const void *data, int64_t elements, int64_t stride) {
  Place8 p;
  if (!place8(c, weight, layer, &p) || elements != p.rows * p.cols || (stride && stride < p.cols) || dtype < XK_F32 || dtype > XK_BF16)
    return xk_fail(XK_INVALID, "weight %d of layer %d: %lld elements of type %d", weight, layer, (long long)elements, dtype);
  return in_stages(weight, p, data, stride, dtype == XK_F32 ? 4 : 2, [&](const void *staged, int64_t first, int n) { round_kernel<<<n, 256>>>(staged, dtype, p, first); });
}

int32_t xk_load8(xk_ctx *c, int32_t weight, int32_t layer, const void *data, int64_t elements, int64_t stride, const float *scales, int32_t n_scales) {
  XK_TRY(cudaSetDevice(c->cfg.device));
  Place8 p;
  if (!place8(c, weight, layer, &p) || elements != p.rows * p.cols || (stride && stride < p.cols) || (n_scales != 1 && n_scales != p.rows))
    return xk_fail(XK_INVALID, "weight %d of layer %d: %lld FP8 elements with %d scales", weight, layer, (long long)elements, n_scales);
  float *d;
  XK_TRY(cudaMalloc(reinterpret_cast<void **>(&d), n_scales * sizeof *d));
  cudaError_t e = cudaMemcpy(d, scales, n_scales * sizeof *d, cudaMemcpyHostToDevice);
  int32_t s = e != cudaSuccess ? xk_fail(XK_CUDA, "weight %d: %s", weight, cudaGetErrorString(e))
                               : in_stages(weight, p, data, stride, 1, [&](const void *staged, int64_t first, int n) { copy_kernel<<<n, 256>>>(static_cast<const uint8_t *>(staged), d, n_scales, p, first); });
  cudaFree(d);
  return s;
}

void xk_random8(xk_ctx *c, int32_t weight, int32_t layer, uint64_t seed) {
  Place8 p;
  if (place8(c, weight, layer, &p)) random8_kernel<<<int(p.rows), 256>>>(p, seed, 1 / std::sqrt(float(p.cols) * float(weight == XK_O || weight == XK_DOWN ? c->cfg.ranks : 1)));
}

int32_t xk_weights8_open(xk_ctx *c) {
  const xk_config &g = c->cfg;
  const int64_t h = g.hidden, att = int64_t(g.heads) * g.head_dim;
  auto alloc = [&](Matrix8 *m, int64_t rows, int64_t cols) {
    XK_OK_OR_RETURN(xk_alloc(c, &m->data, rows * cols, true));
    return xk_alloc(c, &m->scale, rows, true);
  };
  const int64_t experts = std::max(g.experts, 1);
  for (Layer &l : c->layers) {
    XK_OK_OR_RETURN(alloc(&l.qkv8, c->width, h));
    XK_OK_OR_RETURN(alloc(&l.o8, h, att));
    XK_OK_OR_RETURN(alloc(&l.gate_up8, experts * 2 * c->ff, h));
    XK_OK_OR_RETURN(alloc(&l.down8, experts * h, c->ff));
  }
  return XK_OK;
}
