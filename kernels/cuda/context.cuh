// The context behind xk.h.
#pragma once

#include <cublasLt.h>
#include <cuda.h>

#include <atomic>
#include <map>
#include <mutex>
#include <vector>

#include "ranks.cuh"
#include "rows.cuh"

struct Layer {
  element *qkv, *o, *gate_up, *down; // [N][K] row-major; gate_up: 8 gate rows, 8 up rows in turn
  element *router; // of a mixture [experts][K]; gate_up and down are then all experts', one after the other
  float *attn_norm, *mlp_norm, *bias, *q_norm, *k_norm;
  Matrix8 qkv8, o8, gate_up8, down8; // instead, with weights_fp8
  CUtensorMap maps[4]; // of qkv, o, gate_up, down: by Shape
};

enum Shape { QKV, OUT, GATE_UP, DOWN, HEAD, SHAPES };

// How one projection is done for row counts up to a bucket.
struct Choice {
  bool skinny = false, own = false, any = false, algo_known = false; // skinny.cu, gemm_hopper.cu, gemm_any.cu, or cuBLASLt
  bool beside = false;                                               // own: see Gemm
  cublasLtMatmulAlgo_t algo;
};

struct Graph {
  cudaGraphExec_t exec = nullptr;
  xk_step_args args; // section offsets it was captured with
};

// A lane for pool calls from any thread: its own stream and pinned memory.
struct Mover {
  std::mutex busy;
  cudaStream_t stream = nullptr;
  uint8_t *host = nullptr;
};

struct Moves; // move.cuh

// Blocks on their way into the pool, layer by layer (arrive.cu). Of a gate others
// bring them, and say how many layers are there.
struct xk_arrival {
  xk_ctx *c;
  int first;                     // layer
  std::vector<int32_t> blocks;   // by place
  std::vector<int> until;        // by group: its last layer and 1
  std::vector<cudaEvent_t> good; // by group: it has landed and was verified
  bool gate = false;
  std::atomic<int32_t> open{0};  // layers, of a gate
};
void xk_gate_await(const xk_arrival *v, int layers);

struct xk_ctx {
  xk_config cfg;
  int sms = 0;
  int width = 0;  // columns of qkv
  int ff = 0;     // intermediate, padded to 64 with zero weights
  int stride = 0; // of a row of logits
  int blocks = 0;
  cudaStream_t stream = nullptr;
  CUgreenCtx part = nullptr; // of some of the multiprocessors, which stream has
  // Of step n: began and ended [n % TIMES], layer_done [n % 2]. One that has been
  // waited for is looked at once more, beside the one before it.
  static constexpr int TIMES = 3;
  cudaEvent_t began[TIMES] = {}, ended[TIMES] = {};
  std::vector<cudaEvent_t> layer_done[2];
  uint64_t launched = 0, waited = 0; // steps
  std::vector<void *> owned, pinned;
  uint64_t taken = 0, weights = 0, before_pool = 0; // device bytes: all, and at two points of the start

  std::vector<Layer> layers;
  element *embed = nullptr, *head = nullptr;
  float *norm = nullptr;
  float2 *rope = nullptr; // [max_positions][head_dim/2] cos, sin

  void *x = nullptr; // the residual stream: [max_rows][hidden] of residual<T>
  element *xn = nullptr, *qkv = nullptr, *att = nullptr, *gu = nullptr, *act = nullptr, *last = nullptr;
  float *logits = nullptr, *scratch = nullptr, *partial = nullptr;
  unsigned *tickets = nullptr;
  int32_t *device_tokens = nullptr;
  uint32_t *masks = nullptr; // device copy of one half of buffers.masks
  uint8_t *arena = nullptr; // device copy of one half of buffers.arena
  xk_buffers buffers = {};

  uint8_t *region = nullptr; // one allocation with all of the pool, so that one handle exports it
  uint64_t *digest = nullptr;
  uint16_t *filled = nullptr;
  static constexpr int MOVERS = 4;
  Mover movers[MOVERS];
  std::atomic<unsigned> next_mover{0};
  Moves *moves = nullptr;
  std::vector<xk_arrival *> after; // what the next step waits for
  bool layer_events[2] = {}; // whether the steps in those halves record them
  bool hopper = false; // compute capability 9.0: wgmma
  CUtensorMap q_map, heads_map, kv_map;
  unsigned *work = nullptr; // of prefill attention
  Plan plan;                // of this step's tiles; where it lies in the arena:
  int64_t parts = 0, merges = 0;

  cublasLtHandle_t lt = nullptr;
  cublasLtMatmulDesc_t matmul = nullptr;
  void *workspace = nullptr;
  static constexpr size_t WORKSPACE = size_t(64) << 20;
  CUtensorMap reads[4], writes[4]; // of gemm_hopper.cu: activations and results, by Shape
  int gemm_ctas = 0;
  unsigned *gemm_work = nullptr;
  int gu_rows = 0; // of gu: where gate_up is not fused with SiLU, it goes in slices of so many rows
  std::map<int, Choice> choices[SHAPES]; // by row bucket
  std::map<int, Graph> graphs;           // by decode bucket
  std::map<int, Graph> held_graphs;      // the same up to the logits
  xk_step_args held = {};                // the step launched last, if
  bool holds = false;                    // its draws wait for xk_step_draw

  struct { // of a mixture: router's logits, what is chosen (mixture.cu), results by slot
    float *logits;
    int32_t *chosen;
    element *out;
  } mix = {};

  // FP8 pools: blocks widened to bf16 for prefill, and their tables.
  element *wide = nullptr;
  int32_t *wide_tail = nullptr;
  int wide_blocks = 0;

  Ranks ranks = {};          // of several
  xk_ctx *lead = nullptr;    // rank 0, once joined
  float *head_out = nullptr; // where this rank's logits go: in rank 0's
  const int32_t *drawn = nullptr; // rank 0's device_tokens, or what is sent of them
  Exchange *exchange = nullptr;   // through NCCL; null: over peer memory

  // FP8 weights: activations of a projection in FP8, and how cuBLASLt multiplies.
  uint8_t *x8 = nullptr;
  float *x8_scale = nullptr;
  cublasLtMatmulDesc_t matmul8 = nullptr;
  std::map<int, Choice> choices8[SHAPES];

  xk_dtype type() const { return cfg.fp16 ? XK_F16 : XK_BF16; } // of elements
  int64_t residual_row() const { return int64_t(cfg.hidden) * (cfg.fp16 ? sizeof(residual<fp16>) : sizeof(residual<bf16>)); } // bytes
  bool alone() const { return cfg.ranks == 1; } // all of the model is here
  // What OUT and DOWN write: they add to the residual stream, or leave partial sums for xk_reduce.
  void *sums(bool down) const { return alone() ? x : ranks.sums[down][cfg.rank]; }
  void *residual_at(int64_t row) const { return static_cast<uint8_t *>(x) + row * residual_row(); }
  Launch on_stream(bool pdl) const { return {stream, pdl, type()}; }
  Pool pool_of(int layer) const; // not of FP8 pools
  Rows rows_of(int layer) const; // of any
  int64_t layer_bytes() const;   // of the pool's rows
};

template <typename T> int32_t xk_alloc(xk_ctx *c, T **p, int64_t n, bool zero = false) {
  XK_TRY(cudaMalloc(reinterpret_cast<void **>(p), n * sizeof(T)));
  c->owned.push_back(*p);
  c->taken += n * sizeof(T);
  if (zero) XK_TRY(cudaMemset(*p, 0, n * sizeof(T)));
  return XK_OK;
}
template <typename T> int32_t xk_alloc_pinned(xk_ctx *c, T **p, int64_t n) {
  XK_TRY(cudaHostAlloc(reinterpret_cast<void **>(p), n * sizeof(T), cudaHostAllocMapped | cudaHostAllocPortable));
  c->pinned.push_back(*p);
  return XK_OK;
}

int32_t xk_gemm_open(xk_ctx *c);
int32_t xk_gemm_load(xk_ctx *c); // runs every choice once, so that no step is the first
int32_t xk_gemm_tune(xk_ctx *c);
void xk_gemm_close(xk_ctx *c);
// The projection of layer l (ignored for HEAD): OUT and DOWN add to x, or of several ranks write
// to sums. GATE_UP
// leaves silu(gate)*up in c->act.
int32_t xk_project(xk_ctx *c, const Launch &l, Shape s, int layer, int rows);
// The feed-forward of a layer that is a mixture, from xn, as GATE_UP and DOWN together, and if all of the
// model is here xn = the norm behind it, unless norm is null (mixture.cu). Rows of negative positions are
// padding; positions may be null.
int32_t xk_mix(xk_ctx *c, const Launch &l, int layer, int rows, const int32_t *positions, const float *norm);
int32_t xk_mix_open(xk_ctx *c); // its buffers, and act
int32_t xk_pool_open(xk_ctx *c);
void xk_pool_close(xk_ctx *c);
int32_t xk_moves_open(xk_ctx *c);
void xk_moves_close(xk_ctx *c);

// FP8 weights (weights8.cu, gemm8.cu).
int32_t xk_weights8_open(xk_ctx *c);
bool xk_is8(xk_ctx *c, int weight, int layer);
int32_t xk_load_rounded(xk_ctx *c, int32_t weight, int32_t layer, int32_t dtype, const void *data, int64_t elements, int64_t stride);
// Rows first .. of a tensor on the host, of so many elements each of which are taken, to the device, packed.
cudaError_t xk_stage(void *staging, const void *data, int64_t first, int64_t rows, int64_t cols, int64_t stride, int64_t size);
void xk_random8(xk_ctx *c, int32_t weight, int32_t layer, uint64_t seed);
int32_t xk_gemm8_tune(xk_ctx *c);
int32_t xk_project8(xk_ctx *c, const Launch &l, Shape s, int layer, int rows);

// Element i of a tensor that is being loaded.
__device__ __forceinline__ float xk_widen_weight(const void *src, int dtype, int64_t i) {
  if (dtype == XK_F32) return static_cast<const float *>(src)[i];
  if (dtype == XK_F16) return __half2float(static_cast<const __half *>(src)[i]);
  return __bfloat162float(static_cast<const bf16 *>(src)[i]);
}
// Element i of a random one.
__device__ __forceinline__ float xk_random_weight(uint64_t seed, int64_t i, float mean, float scale) {
  uint64_t z = mix64(seed + i * 0x9e3779b97f4a7c15ull);
  float u = (float(uint32_t(z)) + float(uint32_t(z >> 32))) * (1.0f / 4294967296.0f) - 1.0f; // triangular, sd 0.41
  return mean + scale * 2.45f * u;
}
