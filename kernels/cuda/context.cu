// Life of a context: device, weights, buffers.
#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstring>

#include "context.cuh"

static thread_local char last_error[512];

int32_t xk_fail(int32_t status, const char *format, ...) {
  va_list args;
  va_start(args, format);
  vsnprintf(last_error, sizeof last_error, format, args);
  va_end(args);
  return status;
}

int32_t xk_abi(void) { return XK_ABI; }
const char *xk_last_error(void) { return last_error; }

int32_t xk_device_info(int32_t device, xk_device *out) {
  int n = 0;
  cudaError_t e = cudaGetDeviceCount(&n);
  if (e != cudaSuccess || n == 0) return xk_fail(XK_NO_DEVICE, "no CUDA device: %s", cudaGetErrorString(e));
  if (device < 0 || device >= n) return xk_fail(XK_NO_DEVICE, "device %d of %d", device, n);
  cudaDeviceProp p;
  XK_TRY(cudaGetDeviceProperties(&p, device));
  if (p.major < 9) return xk_fail(XK_NO_DEVICE, "%s has compute capability %d.%d: 9.0 is the least", p.name, p.major, p.minor);
  memset(out, 0, sizeof *out);
  snprintf(out->name, sizeof out->name, "%.127s", p.name);
  out->major = p.major, out->minor = p.minor, out->sms = p.multiProcessorCount;
  XK_TRY(cudaDriverGetVersion(&out->driver));
  XK_TRY(cudaDeviceGetPCIBusId(out->pci, sizeof out->pci, device));
  XK_TRY(cudaSetDevice(device));
  size_t free_bytes, total;
  XK_TRY(cudaMemGetInfo(&free_bytes, &total));
  out->free_bytes = free_bytes, out->total_bytes = total;
  return XK_OK;
}

static int32_t check(const xk_config &g) {
  if (g.layers < 1 || g.hidden < 8 || g.hidden % 8 || g.intermediate < 1 || g.heads < 1 || g.kv_heads < 1 || g.heads % g.kv_heads || g.vocab < 1 || g.max_positions < 1)
    return xk_fail(XK_INVALID, "shape: %d layers, hidden %d (a multiple of 8), %d heads, %d KV heads, vocabulary %d", g.layers, g.hidden, g.heads, g.kv_heads, g.vocab);
  if (g.head_dim < 8 || g.head_dim > 256 || g.head_dim % 8) return xk_fail(XK_INVALID, "head_dim %d: want a multiple of 8, at most 256", g.head_dim);
  if (g.vocab > 1 << 19) return xk_fail(XK_INVALID, "vocabulary of %d: at most %d", g.vocab, 1 << 19);
  if (g.block_tokens < 1 || g.block_tokens > 256) return xk_fail(XK_INVALID, "blocks of %d tokens: want 1 to 256", g.block_tokens);
  if (g.kv_fp8 && (g.head_dim % 16 || g.block_tokens % 16 || g.batch_invariant))
    return xk_fail(XK_INVALID, "an FP8 KV cache needs head_dim %d and blocks of %d to be multiples of 16, and no batch_invariant", g.head_dim, g.block_tokens);
  if (g.weights_fp8 && (g.hidden % 16 || g.heads * g.head_dim % 16 || g.batch_invariant))
    return xk_fail(XK_INVALID, "FP8 weights need widths %d and %d to be multiples of 16, and no batch_invariant", g.hidden, g.heads * g.head_dim);
  if (g.fp16 && (g.kv_fp8 || g.weights_fp8)) return xk_fail(XK_INVALID, "fp16 goes with no FP8 KV cache and no FP8 weights");
  if (g.experts < 0 || g.experts > XK_EXPERTS || (g.experts && (g.experts_per_token < 1 || g.experts_per_token > 32 || g.experts_per_token > g.experts || g.hidden > 16384)))
    return xk_fail(XK_INVALID, "%d experts, %d a token: at most %d, 32 a token, and a width of 16384", g.experts, g.experts_per_token, XK_EXPERTS);
  if (g.tune && g.batch_invariant) return xk_fail(XK_INVALID, "tune and batch_invariant exclude each other");
  if (g.ranks < 1 || g.ranks > XK_RANKS || g.rank < 0 || g.rank >= g.ranks || g.first_kv_head < 0 || g.all_kv_heads < 1 || g.first_kv_head > g.all_kv_heads - g.kv_heads || g.first_id < 0 || g.ids < 1 || g.ids > g.vocab - g.first_id)
    return xk_fail(XK_INVALID, "rank %d of %d, with %d KV heads of %d from %d on, %d ids of %d from %d on", g.rank, g.ranks, g.kv_heads, g.all_kv_heads, g.first_kv_head, g.ids, g.vocab, g.first_id);
  if (g.max_rows < 1 || g.max_seqs < 1 || g.max_positions > 1 << 24) return xk_fail(XK_INVALID, "%d rows, %d sequences, %d positions", g.max_rows, g.max_seqs, g.max_positions);
  return XK_OK;
}

// What every step needs, so that none allocates.
static int32_t buffers(xk_ctx *c) {
  const xk_config &g = c->cfg;
  int64_t r = g.max_rows, s = g.max_seqs, att = int64_t(g.heads) * g.head_dim;
  uint8_t *x;
  XK_OK_OR_RETURN(xk_alloc(c, &x, r * c->residual_row(), true));
  c->x = x;
  XK_OK_OR_RETURN(xk_alloc(c, &c->xn, r * g.hidden, true));
  XK_OK_OR_RETURN(xk_alloc(c, &c->qkv, r * c->width, true));
  XK_OK_OR_RETURN(xk_alloc(c, &c->att, r * att, true));
  c->gu_rows = int(std::min<int64_t>(r, 2048));
  if (g.experts) {
    XK_OK_OR_RETURN(xk_mix_open(c));
  } else {
    XK_OK_OR_RETURN(xk_alloc(c, &c->gu, int64_t(c->gu_rows) * 2 * c->ff, true));
    XK_OK_OR_RETURN(xk_alloc(c, &c->act, r * c->ff, true));
  }
  XK_OK_OR_RETURN(xk_alloc(c, &c->last, s * g.hidden, true));
  if (g.rank == 0) { // of several ranks, those that look for a choice write whole rows from their first id on
    XK_OK_OR_RETURN(xk_alloc(c, &c->logits, (s + (g.ranks > 1)) * c->stride, true));
    XK_OK_OR_RETURN(xk_alloc(c, &c->scratch, s * c->stride, true));
    c->buffers.max_masks = int32_t(round_up(s, 4)), c->buffers.mask_words = int32_t(div_up(g.vocab, 32)); // a half is a multiple of 16 bytes
    const int64_t words = int64_t(c->buffers.max_masks) * c->buffers.mask_words;
    XK_OK_OR_RETURN(xk_alloc_pinned(c, &c->buffers.masks, 2 * words));
    XK_OK_OR_RETURN(xk_alloc(c, &c->masks, words));
  }
  c->head_out = c->logits;
  c->buffers.more_spans = xk_more_spans(c->sms, g.kv_heads);
  int64_t partials = std::max(int64_t(2) * c->buffers.more_spans * g.heads, xk_attn_partial_rows(c->sms, g.kv_heads)); // rows
  XK_OK_OR_RETURN(xk_alloc(c, &c->partial, partials * (g.head_dim + XK_STATS)));
  XK_OK_OR_RETURN(xk_alloc(c, &c->tickets, r * g.kv_heads, true));
  XK_OK_OR_RETURN(xk_alloc(c, &c->work, 2, true));

  xk_buffers &b = c->buffers;
  b.max_samples = int32_t(std::max<int64_t>(4 * s, 1024));
  b.max_logprobs = int32_t((r + b.max_samples) * 24);
  b.max_wants = int32_t(std::max<int64_t>(s, 64));
  b.arena_bytes = round_up(r * (96 + 2 * sizeof(xk_span)) + int64_t(b.max_samples) * 128 + (int64_t(32) << 20), 256);
  uint8_t *arena;
  XK_OK_OR_RETURN(xk_alloc_pinned(c, &arena, 2 * b.arena_bytes));
  b.arena = arena;
  XK_OK_OR_RETURN(xk_alloc(c, &c->arena, b.arena_bytes));
  XK_OK_OR_RETURN(xk_alloc_pinned(c, &b.tokens, 2 * b.max_samples));
  XK_OK_OR_RETURN(xk_alloc_pinned(c, &b.logprobs, 2 * b.max_logprobs));
  b.max_states = g.max_rows;
  if (g.rank == 0) {
    XK_OK_OR_RETURN(xk_alloc_pinned(c, &b.logits, int64_t(b.max_wants) * g.vocab));
    XK_OK_OR_RETURN(xk_alloc_pinned(c, &b.states, 2 * r * g.hidden));
  }
  if (g.weights_fp8) {
    XK_OK_OR_RETURN(xk_alloc(c, &c->x8, r * std::max({int64_t(g.hidden), att, int64_t(c->ff)})));
    XK_OK_OR_RETURN(xk_alloc(c, &c->x8_scale, round_up(r, 4)));
  }
  if (g.kv_fp8) { // a whole context; a step's chunks without prefixes fit, too
    c->wide_blocks = std::max(div_up(g.max_positions, g.block_tokens), div_up(g.max_rows, g.block_tokens));
    XK_OK_OR_RETURN(xk_alloc(c, &c->wide, int64_t(c->wide_blocks) * 2 * g.kv_heads * g.block_tokens * g.head_dim, true));
    XK_OK_OR_RETURN(xk_alloc(c, &c->wide_tail, b.arena_bytes / 4));
  }
  XK_OK_OR_RETURN(xk_ranks_open(c));
  return xk_alloc(c, &c->device_tokens, b.max_samples, true);
}

// Makes the stream of steps in a green context, and counts its multiprocessors.
static int32_t open_part(xk_ctx *c) {
  decltype(&cuDeviceGetDevResource) resource;
  decltype(&cuDevSmResourceSplitByCount) split;
  decltype(&cuDevResourceGenerateDesc) describe;
  decltype(&cuGreenCtxCreate) create;
  decltype(&cuGreenCtxStreamCreate) stream;
  const unsigned since = 12050;
  XK_OK_OR_RETURN(xk_driver("cuDeviceGetDevResource", &resource, since));
  XK_OK_OR_RETURN(xk_driver("cuDevSmResourceSplitByCount", &split, since));
  XK_OK_OR_RETURN(xk_driver("cuDevResourceGenerateDesc", &describe, since));
  XK_OK_OR_RETURN(xk_driver("cuGreenCtxCreate", &create, since));
  XK_OK_OR_RETURN(xk_driver("cuGreenCtxStreamCreate", &stream, since));
  auto ok = [](CUresult r, const char *what) { return r == CUDA_SUCCESS ? XK_OK : xk_fail(XK_CUDA, "%s: driver error %d", what, int(r)); };
  XK_TRY(cudaFree(nullptr)); // the primary context
  const int n = c->cfg.part;
  CUdevResource all, first, rest;
  unsigned groups = 1;
  CUdevResourceDesc text;
  XK_OK_OR_RETURN(ok(resource(c->cfg.device, &all, CU_DEV_RESOURCE_TYPE_SM), "cuDeviceGetDevResource"));
  XK_OK_OR_RETURN(ok(split(&first, &groups, &all, &rest, 0, unsigned(std::abs(n))), "cuDevSmResourceSplitByCount"));
  if (groups != 1) return xk_fail(XK_INVALID, "%d of %d multiprocessors are no part of the device", n, c->sms);
  CUdevResource *own = n > 0 ? &first : &rest;
  if (!own->sm.smCount) return xk_fail(XK_INVALID, "no multiprocessor is left behind the first %d of %d", -n, c->sms);
  XK_OK_OR_RETURN(ok(describe(&text, own, 1), "cuDevResourceGenerateDesc"));
  XK_OK_OR_RETURN(ok(create(&c->part, text, c->cfg.device, CU_GREEN_CTX_DEFAULT_STREAM), "cuGreenCtxCreate"));
  c->sms = int(own->sm.smCount);
  return ok(stream(&c->stream, c->part, CU_STREAM_NON_BLOCKING, 0), "cuGreenCtxStreamCreate");
}

static int32_t open(xk_ctx *c) {
  const xk_config &g = c->cfg;
  xk_device d;
  XK_OK_OR_RETURN(xk_device_info(g.device, &d));
  c->sms = d.sms;
  c->hopper = d.major == 9 && d.minor == 0;
  c->width = (g.heads + 2 * g.kv_heads) * g.head_dim;
  c->ff = int(round_up(g.intermediate, 64));
  c->stride = int(round_up(g.vocab, 8));
  if (g.part) XK_OK_OR_RETURN(open_part(c));
  else XK_TRY(cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking));
  for (int i = 0; i < xk_ctx::TIMES; i++) {
    XK_TRY(cudaEventCreate(&c->began[i]));
    XK_TRY(cudaEventCreate(&c->ended[i]));
  }
  for (auto &events : c->layer_done) {
    events.resize(g.layers);
    for (cudaEvent_t &e : events) XK_TRY(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
  }
  XK_OK_OR_RETURN(xk_attn_init(c->type()));
  XK_OK_OR_RETURN(xk_sampler_init());

  XK_OK_OR_RETURN(xk_alloc(c, &c->embed, int64_t(g.vocab) * g.hidden));
  if (g.tied_head) c->head = c->embed + int64_t(g.first_id) * g.hidden;
  else XK_OK_OR_RETURN(xk_alloc(c, &c->head, int64_t(g.ids) * g.hidden));
  XK_OK_OR_RETURN(xk_alloc(c, &c->norm, g.hidden));
  XK_OK_OR_RETURN(xk_alloc(c, &c->rope, int64_t(g.max_positions) * (g.head_dim / 2)));
  c->layers.resize(g.layers);
  for (Layer &l : c->layers) {
    l = {};
    if (!g.weights_fp8) {
      XK_OK_OR_RETURN(xk_alloc(c, &l.qkv, int64_t(c->width) * g.hidden));
      XK_OK_OR_RETURN(xk_alloc(c, &l.o, int64_t(g.hidden) * g.heads * g.head_dim));
      const int64_t experts = std::max(g.experts, 1);
      XK_OK_OR_RETURN(xk_alloc(c, &l.gate_up, experts * 2 * c->ff * g.hidden, true));
      XK_OK_OR_RETURN(xk_alloc(c, &l.down, experts * g.hidden * c->ff, true));
    }
    if (g.experts) XK_OK_OR_RETURN(xk_alloc(c, &l.router, int64_t(g.experts) * g.hidden));
    XK_OK_OR_RETURN(xk_alloc(c, &l.attn_norm, g.hidden));
    XK_OK_OR_RETURN(xk_alloc(c, &l.mlp_norm, g.hidden));
    if (g.qkv_bias) XK_OK_OR_RETURN(xk_alloc(c, &l.bias, c->width));
    if (g.qk_norm) {
      XK_OK_OR_RETURN(xk_alloc(c, &l.q_norm, g.head_dim));
      XK_OK_OR_RETURN(xk_alloc(c, &l.k_norm, g.head_dim));
    }
  }
  if (g.weights_fp8) XK_OK_OR_RETURN(xk_weights8_open(c));
  c->weights = c->taken;
  XK_OK_OR_RETURN(buffers(c));
  return xk_gemm_open(c);
}

int32_t xk_open(const xk_config *cfg, xk_ctx **out) {
  *out = nullptr;
  xk_config g = *cfg;
  if (!g.ranks) g.ranks = 1, g.rank = 0, g.first_kv_head = g.first_id = 0, g.all_kv_heads = g.kv_heads, g.ids = g.vocab;
  XK_OK_OR_RETURN(check(g));
  xk_ctx *c = new xk_ctx;
  c->cfg = g, c->lead = c;
  int32_t s = open(c);
  if (s != XK_OK) {
    char kept[sizeof last_error];
    memcpy(kept, last_error, sizeof kept);
    xk_close(c);
    memcpy(last_error, kept, sizeof kept);
    return s;
  }
  *out = c;
  return XK_OK;
}

int32_t xk_close(xk_ctx *c) {
  if (!c) return XK_OK;
  cudaSetDevice(c->cfg.device);
  cudaDeviceSynchronize();
  for (auto *graphs : {&c->graphs, &c->held_graphs})
    for (auto &g : *graphs)
      if (g.second.exec) cudaGraphExecDestroy(g.second.exec);
  xk_exchange_close(c);
  xk_gemm_close(c);
  xk_pool_close(c);
  for (auto &events : c->layer_done)
    for (cudaEvent_t e : events)
      if (e) cudaEventDestroy(e);
  for (int i = 0; i < xk_ctx::TIMES; i++) {
    if (c->began[i]) cudaEventDestroy(c->began[i]);
    if (c->ended[i]) cudaEventDestroy(c->ended[i]);
  }
  if (c->stream) cudaStreamDestroy(c->stream);
  if (decltype(&cuGreenCtxDestroy) destroy; c->part && xk_driver("cuGreenCtxDestroy", &destroy, 12050) == XK_OK) destroy(c->part);
  for (void *p : c->owned) cudaFree(p);
  for (void *p : c->pinned) cudaFreeHost(p);
  delete c;
  return XK_OK;
}

// Where a tensor goes: rows of cols elements.
struct Place {
  element *matrix = nullptr; // or
  float *vector = nullptr;
  int64_t rows = 1, cols = 0, stride = 0;
  int interleave = -1; // 0 gate, 1 up: row r is (r/8)*16 + interleave*8 + r%8
};

static int32_t place(xk_ctx *c, int weight, int layer, Place *p) {
  const xk_config &g = c->cfg;
  int64_t expert = 0;
  if (g.experts && layer >= 0 && (weight == XK_GATE || weight == XK_UP || weight == XK_DOWN)) {
    expert = layer / g.layers, layer %= g.layers;
    if (expert >= g.experts) return xk_fail(XK_INVALID, "expert %d of %d", int(expert), g.experts);
  }
  if (weight > XK_HEAD && (layer < 0 || layer >= g.layers)) return xk_fail(XK_INVALID, "layer %d of %d", layer, g.layers);
  Layer none = {}, &l = weight > XK_HEAD ? c->layers[layer] : none;
  int64_t h = g.hidden, q = int64_t(g.heads) * g.head_dim, kv = int64_t(g.kv_heads) * g.head_dim;
  auto matrix = [&](element *at, int64_t rows, int64_t cols, int64_t stride, int interleave = -1) { *p = {at, nullptr, rows, cols, stride, interleave}; };
  auto vector = [&](float *at, int64_t n) { *p = {nullptr, at, 1, n, n, -1}; };
  switch (weight) {
  case XK_EMBED: matrix(c->embed, g.vocab, h, h); break;
  case XK_HEAD: matrix(g.tied_head ? nullptr : c->head, g.ids, h, h); break;
  case XK_NORM: vector(c->norm, h); break;
  case XK_ATTN_NORM: vector(l.attn_norm, h); break;
  case XK_MLP_NORM: vector(l.mlp_norm, h); break;
  case XK_Q: matrix(l.qkv, q, h, h); break;
  case XK_K: matrix(l.qkv ? l.qkv + q * h : nullptr, kv, h, h); break;
  case XK_V: matrix(l.qkv ? l.qkv + (q + kv) * h : nullptr, kv, h, h); break;
  case XK_O: matrix(l.o, h, q, q); break;
  case XK_GATE: matrix(l.gate_up ? l.gate_up + expert * 2 * c->ff * h : nullptr, g.intermediate, h, h, 0); break;
  case XK_UP: matrix(l.gate_up ? l.gate_up + expert * 2 * c->ff * h : nullptr, g.intermediate, h, h, 1); break;
  case XK_DOWN: matrix(l.down ? l.down + expert * h * c->ff : nullptr, h, g.intermediate, c->ff); break;
  case XK_ROUTER: matrix(l.router, g.experts, h, h); break;
  case XK_Q_BIAS: vector(l.bias, q); break;
  case XK_K_BIAS: vector(l.bias ? l.bias + q : nullptr, kv); break;
  case XK_V_BIAS: vector(l.bias ? l.bias + q + kv : nullptr, kv); break;
  case XK_Q_NORM: vector(l.q_norm, g.head_dim); break;
  case XK_K_NORM: vector(l.k_norm, g.head_dim); break;
  default: return xk_fail(XK_INVALID, "weight %d", weight);
  }
  if (!p->matrix && !p->vector) return xk_fail(XK_INVALID, "weight %d is none of this architecture's", weight);
  return XK_OK;
}

// src holds rows first_row .. of the tensor.
template <typename T> static __global__ void place_kernel(const void *src, int dtype, Place p, int64_t first_row, int64_t n) {
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x) {
    float v = xk_widen_weight(src, dtype, i);
    int64_t row = first_row + i / p.cols, col = i % p.cols;
    if (p.interleave >= 0) row = row / 8 * 16 + p.interleave * 8 + row % 8;
    if (p.matrix) p.matrix[row * p.stride + col] = narrow<T>(v);
    else p.vector[col] = v;
  }
}

cudaError_t xk_stage(void *staging, const void *data, int64_t first, int64_t rows, int64_t cols, int64_t stride, int64_t size) {
  const uint8_t *from = static_cast<const uint8_t *>(data) + first * stride * size;
  if (stride == cols) return cudaMemcpy(staging, from, rows * cols * size, cudaMemcpyHostToDevice);
  return cudaMemcpy2D(staging, cols * size, from, stride * size, cols * size, rows, cudaMemcpyHostToDevice);
}

int32_t xk_load(xk_ctx *c, int32_t weight, int32_t layer, int32_t dtype, const void *data, int64_t elements, int64_t stride) {
  XK_TRY(cudaSetDevice(c->cfg.device));
  if (xk_is8(c, weight, layer)) return xk_load_rounded(c, weight, layer, dtype, data, elements, stride);
  Place p;
  XK_OK_OR_RETURN(place(c, weight, layer, &p));
  if (!stride) stride = p.cols;
  if (elements != p.rows * p.cols || stride < p.cols || dtype < XK_F32 || dtype > XK_BF16)
    return xk_fail(XK_INVALID, "weight %d: %lld elements of type %d, want %lld", weight, (long long)elements, dtype, (long long)(p.rows * p.cols));
  int64_t size = dtype == XK_F32 ? 4 : 2;
  int64_t most = std::max<int64_t>(1, (int64_t(64) << 20) / (p.cols * size));
  void *staging;
  XK_TRY(cudaMalloc(&staging, std::min(most, p.rows) * p.cols * size));
  for (int64_t row = 0; row < p.rows; row += most) {
    int64_t n = std::min(most, p.rows - row) * p.cols;
    cudaError_t e = xk_stage(staging, data, row, n / p.cols, p.cols, stride, size);
    if (e == cudaSuccess) {
      xk_each_type(c->type(), [&](auto t) { return place_kernel<decltype(t)><<<1024, 256>>>(staging, dtype, p, row, n), int32_t(XK_OK); });
      e = cudaDeviceSynchronize();
    }
    if (e != cudaSuccess) {
      cudaFree(staging);
      return xk_fail(XK_CUDA, "weight %d: %s", weight, cudaGetErrorString(e));
    }
  }
  XK_TRY(cudaFree(staging));
  return XK_OK;
}

template <typename T> static __global__ void random_kernel(Place p, uint64_t seed, float mean, float scale) {
  int64_t n = p.rows * p.cols;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x) {
    float v = xk_random_weight(seed, i, mean, scale);
    int64_t row = i / p.cols, col = i % p.cols;
    if (p.interleave >= 0) row = row / 8 * 16 + p.interleave * 8 + row % 8;
    if (p.matrix) p.matrix[row * p.stride + col] = narrow<T>(v);
    else p.vector[col] = v;
  }
}

int32_t xk_fill_random(xk_ctx *c, uint64_t seed) {
  XK_TRY(cudaSetDevice(c->cfg.device));
  for (int w = 0; w < XK_WEIGHTS; w++) {
    const int experts = w == XK_GATE || w == XK_UP || w == XK_DOWN ? std::max(c->cfg.experts, 1) : 1;
    for (int l = 0; l < (w > XK_HEAD ? c->cfg.layers * experts : 1); l++) {
      uint64_t own = mix64(seed * 1000 + w) + uint64_t(l) << 40;
      const bool shared = w == XK_EMBED || w == XK_NORM || w == XK_ATTN_NORM || w == XK_MLP_NORM || w == XK_Q_NORM || w == XK_K_NORM || w == XK_ROUTER;
      if (c->cfg.rank && !shared) own ^= mix64(c->cfg.rank); // a part of its own, not that of rank 0
      xk_random8(c, w, l, own);
      Place p;
      if (place(c, w, l, &p) != XK_OK) continue; // not in this architecture, or FP8
      bool norm = p.vector && w != XK_Q_BIAS && w != XK_K_BIAS && w != XK_V_BIAS;
      float scale = w == XK_EMBED ? 0.7f : p.matrix ? 1 / std::sqrt(float(p.cols) * float(w == XK_O || w == XK_DOWN ? c->cfg.ranks : 1)) : norm ? 0.1f : 0.3f;
      xk_each_type(c->type(), [&](auto t) { return random_kernel<decltype(t)><<<1024, 256>>>(p, own, norm ? 1.0f : 0.0f, scale), int32_t(XK_OK); });
    }
  }
  XK_TRY(cudaDeviceSynchronize());
  return XK_OK;
}

static __global__ void rope_kernel(const double *freq, double scale, int half, int64_t n, float2 *out) {
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x) {
    double s, c;
    sincos(freq[i % half] * double(i / half), &s, &c);
    out[i] = make_float2(float(c * scale), float(s * scale));
  }
}

int32_t xk_rope(xk_ctx *c, const double *freq, double scale) {
  XK_TRY(cudaSetDevice(c->cfg.device));
  int half = c->cfg.head_dim / 2;
  double *d;
  XK_OK_OR_RETURN(xk_alloc(c, &d, half));
  XK_TRY(cudaMemcpy(d, freq, half * sizeof *d, cudaMemcpyHostToDevice));
  rope_kernel<<<1024, 256>>>(d, scale, half, int64_t(c->cfg.max_positions) * half, c->rope);
  XK_TRY(cudaDeviceSynchronize());
  return XK_OK;
}

int32_t xk_memory(xk_ctx *c, xk_memory_info *out) {
  const xk_config &g = c->cfg;
  XK_TRY(cudaSetDevice(g.device));
  size_t free_bytes, total;
  XK_TRY(cudaMemGetInfo(&free_bytes, &total));
  uint64_t scratch = (c->blocks ? c->before_pool : c->taken) - c->weights;
  uint64_t block = uint64_t(g.layers) * (xk_block_run(g) + uint64_t(g.kv_heads) * 10);
  *out = {total, free_bytes, c->weights, scratch, block * c->blocks, block};
  return XK_OK;
}

int32_t xk_start(xk_ctx *c, int32_t blocks, xk_buffers *out) {
  XK_TRY(cudaSetDevice(c->cfg.device));
  if (c->blocks || blocks < 1) return xk_fail(XK_INVALID, "start with %d blocks", blocks);
  c->blocks = blocks;
  c->before_pool = c->taken;
  XK_OK_OR_RETURN(xk_gemm_tune(c));
  if (!c->alone()) XK_OK_OR_RETURN(xk_gemm_load(c));
  XK_OK_OR_RETURN(xk_pool_open(c));
  XK_TRY(cudaMemset(c->x, 0, c->cfg.max_rows * c->residual_row()));
  XK_TRY(cudaDeviceSynchronize());
  *out = c->buffers;
  return XK_OK;
}
