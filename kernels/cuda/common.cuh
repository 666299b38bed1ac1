// What every kernel file shares: the context, error plumbing, launches, and the
// few PTX instructions that CUDA C++ has no name for.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <type_traits>
#include <vector>

#include "xk.h"

using bf16 = __nv_bfloat16;
using bf162 = __nv_bfloat162;
using fp16 = __half;

// An element of weights, activations and KV rows: the bits of a bf16 or an fp16.
// Kernels know which by their parameter T, those of FP8 that it is a bf16. A type of
// its own, so that nothing converts it unasked.
struct element {
  uint16_t bits;
};

// An element of the residual stream: sums over all layers, which bf16 has room
// for, and fp16, with its 65504, not.
template <typename T> using residual = std::conditional_t<std::is_same_v<T, fp16>, float, element>;

int32_t xk_fail(int32_t status, const char *format, ...);

#define XK_TRY(call)                                                                            \
  do {                                                                                          \
    cudaError_t e_ = (call);                                                                    \
    if (e_ != cudaSuccess)                                                                      \
      return xk_fail(e_ == cudaErrorMemoryAllocation ? XK_NOMEM : XK_CUDA, "%s: %s (%s:%d)",    \
                     #call, cudaGetErrorString(e_), __FILE__, __LINE__);                        \
  } while (0)
#define XK_OK_OR_RETURN(call)   \
  do {                          \
    int32_t s_ = (call);        \
    if (s_ != XK_OK) return s_; \
  } while (0)

// The driver's function of this name, as CUDA 12 (or another version) has it: nothing links to the driver.
template <typename F> int32_t xk_driver(const char *name, F *function, unsigned version = 12000) {
  cudaDriverEntryPointQueryResult found;
  XK_TRY(cudaGetDriverEntryPointByVersion(name, reinterpret_cast<void **>(function), version, cudaEnableDefault, &found));
  return found == cudaDriverEntryPointSuccess ? XK_OK : xk_fail(XK_CUDA, "no %s in this driver", name);
}

__host__ __device__ inline int div_up(int64_t a, int64_t b) { return int((a + b - 1) / b); }
__host__ __device__ inline int64_t round_up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }

// Division of a non-negative int below 2^24 by a block size of 1..256.
struct FastDiv {
  uint32_t magic;
  int d;
  FastDiv(int d = 1) : magic(d == 1 ? 0 : uint32_t((uint64_t(1) << 32) / d + 1)), d(d) {}
  __device__ int div(int n) const { return d == 1 ? n : int(__umulhi(uint32_t(n), magic)); }
};

// Where the rows of one layer lie: [block][2][kv_heads][block_tokens][head_dim].
struct Pool {
  element *data;    // of this layer
  uint64_t *digest; // [block][kv_heads], of this layer
  uint16_t *filled; // as digest: rows 0..filled-1 are in it
  int kv_heads, head_dim;
  int first_head; // the model's number of head 0, for digests
  FastDiv bt;
  __device__ int64_t row(int block, int kv, int head, int at) const {
    return ((int64_t(block) * 2 + kv) * kv_heads + head) * (int64_t(bt.d) * head_dim) + int64_t(at) * head_dim;
  }
  // Offset of an absolute position through a block table.
  __device__ int64_t at(const int32_t *table, int kv, int head, int pos) const {
    int b = bt.div(pos);
    return row(__ldg(table + b), kv, head, pos - b * bt.d);
  }
};

struct Launch { // how kernels of one step are launched
  cudaStream_t stream;
  bool pdl;
  xk_dtype type; // of elements: XK_BF16 or XK_F16
};
// A call of f with what elements are: f's argument is a bf16 or an fp16.
template <typename F> int32_t xk_each_type(xk_dtype type, F f) {
  if (type == XK_BF16) return f(bf16{});
  if (type == XK_F16) return f(fp16{});
  return xk_fail(XK_INVALID, "elements of type %d", int(type));
}

// launch starts a kernel that calls pdl_wait before it touches anything an
// earlier kernel writes.
template <typename... P, typename... A>
int32_t launch(const Launch &l, void (*kernel)(P...), dim3 grid, dim3 block, size_t smem, A... args) {
  cudaLaunchConfig_t cfg = {};
  cfg.gridDim = grid;
  cfg.blockDim = block;
  cfg.dynamicSmemBytes = smem;
  cfg.stream = l.stream;
  cudaLaunchAttribute attr = {};
  attr.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attr.val.programmaticStreamSerializationAllowed = 1;
  cfg.attrs = &attr;
  cfg.numAttrs = l.pdl ? 1 : 0;
  XK_TRY(cudaLaunchKernelEx(&cfg, kernel, P(args)...));
  return XK_OK;
}
// The same, with clusters of so many CTAs.
template <typename... P, typename... A>
int32_t launch_clusters(const Launch &l, void (*kernel)(P...), dim3 grid, dim3 block, size_t smem, int cluster, A... args) {
  cudaLaunchConfig_t cfg = {};
  cfg.gridDim = grid;
  cfg.blockDim = block;
  cfg.dynamicSmemBytes = smem;
  cfg.stream = l.stream;
  cudaLaunchAttribute attrs[2] = {};
  attrs[0].id = cudaLaunchAttributeClusterDimension;
  attrs[0].val.clusterDim.x = cluster, attrs[0].val.clusterDim.y = 1, attrs[0].val.clusterDim.z = 1;
  attrs[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attrs[1].val.programmaticStreamSerializationAllowed = 1;
  cfg.attrs = attrs;
  cfg.numAttrs = l.pdl ? 2 : 1;
  XK_TRY(cudaLaunchKernelEx(&cfg, kernel, P(args)...));
  return XK_OK;
}

// PDL: a kernel may start while the one before it drains. Weights may be read at
// once; what another kernel wrote, only after pdl_wait, or if that kernel has ended
// when this one starts. Kernels wait before they let the next one in, so all but the
// one before have ended then; all but two, where the one before lets the next in
// first (gemm_hopper, decode attention beside prefill's; cuBLASLt's are not known).
__device__ __forceinline__ void pdl_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void pdl_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

__device__ __forceinline__ uint32_t smem_addr(const void *p) { return uint32_t(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void cp_async16(void *dst, const void *src, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem_addr(dst)), "l"(src), "r"(valid ? 16 : 0));
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;"); }
template <int N> __device__ __forceinline__ void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

__device__ __forceinline__ void ldmatrix4(uint32_t r[4], uint32_t addr) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(addr) : "memory");
}
__device__ __forceinline__ void ldmatrix4_trans(uint32_t r[4], uint32_t addr) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(addr) : "memory");
}
// An instruction, ASM("bf16") or ASM("f16"), of T's type.
#define XK_OF_TYPE(T, ASM)                                  \
  do {                                                      \
    if constexpr (std::is_same_v<T, bf16>) ASM("bf16");     \
    else ASM("f16");                                        \
  } while (0)

// c[16][8] += a[16][16] b[16][8]
template <typename T> __device__ __forceinline__ void mma(float c[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
#define MMA(type)                                                                                                                 \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                                   \
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1))
  XK_OF_TYPE(T, MMA);
#undef MMA
}

// Elements from fp32, rounded to nearest even. What is too great for fp16 becomes
// its greatest, 65504, and not infinity; NaN stays NaN. pack has lo in the lower half.
template <typename T> __device__ __forceinline__ uint32_t pack(float lo, float hi) {
  if constexpr (std::is_same_v<T, bf16>) {
    bf162 v = __floats2bfloat162_rn(lo, hi);
    return *reinterpret_cast<uint32_t *>(&v);
  } else {
    uint32_t v;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(hi), "f"(lo));
    return v;
  }
}
template <typename T> __device__ __forceinline__ element narrow(float f) {
  if constexpr (std::is_same_v<T, bf16>) return {__bfloat16_as_ushort(__float2bfloat16(f))};
  else return {uint16_t(pack<T>(f, 0))};
}
template <typename T> __device__ __forceinline__ float2 unpack(uint32_t v) {
  if constexpr (std::is_same_v<T, bf16>) return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000));
  else return __half22float2(*reinterpret_cast<__half2 *>(&v));
}
template <typename T> __device__ __forceinline__ float widen(element e) {
  if constexpr (std::is_same_v<T, bf16>) return __bfloat162float(__ushort_as_bfloat16(e.bits));
  else return __half2float(__ushort_as_half(e.bits));
}

// Two elements that cuBLASLt may have made: what it left infinite becomes 65504, as
// if pack had rounded it.
template <typename T> __device__ __forceinline__ uint32_t finite(uint32_t v) {
  if constexpr (std::is_same_v<T, fp16>) {
    asm("min.NaN.f16x2 %0, %0, %1;" : "+r"(v) : "r"(0x7bff7bff));
    asm("max.NaN.f16x2 %0, %0, %1;" : "+r"(v) : "r"(0xfbfffbff));
  }
  return v;
}

// Adds to a value of the residual stream.
template <typename T> __device__ __forceinline__ void add(residual<T> *to, float f) {
  if constexpr (std::is_same_v<residual<T>, float>) *to += f;
  else *to = narrow<T>(widen<T>(*to) + f);
}

// silu(gate) * up of two elements each; the same in every kernel that does it.
__device__ __forceinline__ float silu(float g) {
  float e, r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(-1.4426950408889634f * g));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.0f + e));
  return g * r;
}
template <typename T> __device__ __forceinline__ uint32_t silu_mul(uint32_t gate, uint32_t up) {
  float2 g = unpack<T>(finite<T>(gate)), u = unpack<T>(finite<T>(up));
  return pack<T>(silu(g.x) * u.x, silu(g.y) * u.y);
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  return v;
}
__device__ __forceinline__ uint64_t warp_sum(uint64_t v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  return v;
}

// Digests: kernels/DESIGN.md, section 2.
__host__ __device__ __forceinline__ uint64_t mix64(uint64_t z) {
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ z >> 27) * 0x94d049bb133111ebull;
  return z ^ z >> 31;
}
__device__ __forceinline__ uint64_t lane_key(int i) { return mix64(0x9e3779b97f4a7c15ull * (uint64_t(i) + 1)); }
__device__ __forceinline__ uint64_t lane_hash(uint32_t lo, uint32_t hi, uint64_t key) {
  return (uint64_t(lo + hi) << 32) + uint64_t(lo ^ uint32_t(key)) * uint64_t(hi ^ uint32_t(key >> 32));
}
__device__ __forceinline__ uint64_t row_hash(uint64_t sum, int layer, int kv, int head, int pos) {
  uint64_t coord = uint64_t(uint32_t(pos)) | uint64_t(head) << 32 | uint64_t(kv) << 47 | uint64_t(layer) << 48;
  return mix64(sum ^ mix64(0xd1b54a32d192ed03ull + coord));
}

// Launchers, one family a file. Shapes: R rows of the step, H hidden, D head_dim.

// x is the residual stream, [R][H] of residual<T>.

// x[r] = embed[tokens[r]]; embed [vocab][H].
int32_t xk_embed(const Launch &l, const element *embed, const int32_t *tokens, const int32_t *drawn, void *x, int rows, int hidden);
// out[r] = rmsnorm(x[index ? index[r] : r]) * w; w fp32 [H].
int32_t xk_rmsnorm(const Launch &l, const void *x, const int32_t *index, const float *w, element *out, int rows, int hidden, float eps);
// Rows index[i] become rows i < n, in place; index [n] ascends, each at least i. Any
// values, of a multiple of 16 bytes a row.
int32_t xk_keep_rows(const Launch &l, void *x, const int32_t *index, int n, int64_t row_bytes);
// out[r][i] = silu(gate) * up; in [R][2*width], 8 gates and 8 ups in turn.
int32_t xk_silu(const Launch &l, const element *in, element *out, int rows, int width);

struct Rope {
  element *qkv; // [R][(heads + 2 kv_heads) * D]; q is rotated in place
  const float *bias;             // over qkv's columns, or null
  const float *q_norm, *k_norm;  // [D], or null
  const float2 *table;           // [position][D/2] cos, sin
  const xk_seg *segs;
  int n_segs, heads, layer;
  float eps;
};
// Bias, norm and rotation of q and k, K and V rows into the pool, digests.
int32_t xk_append(const Launch &l, const Rope &r, const Pool &p);

struct Attention {
  const element *qkv; // as Rope's
  element *out;       // [R][heads * D]
  const int32_t *positions, *tables; // by row
  const int32_t *tail;
  int heads;
  float scale; // of scores
  float *partial;     // [R'][heads][D + XK_STATS] of xk_span; parts: see xk_part
  unsigned *tickets;  // decode: [R][kv_heads], zero between launches
  bool beside = false; // decode: beside the prefill attention launched before it, which has waited for the append
};

static constexpr int XK_TILE = 128;  // rows of a tile of queries
static constexpr int XK_RUN = 16;    // positions of K or V that prefill attention copies at once
static constexpr int XK_STATS = 4;   // behind a partial row's values: its maximum (of scores times log2 e), its sum of weights
// Positions of a tile of K and V in prefill attention.
__host__ __device__ constexpr int xk_attn_step(int head_dim) { return head_dim > 128 ? 64 : 128; }

// Packed prefill attention: up to XK_TILE / group rows of a sequence against the
// tiles first .. last of its K and V. What has other parts leaves partial rows
// [slot][kv_head][row][head of the group][D + XK_STATS].
struct xk_part {
  int row, n, pos, table; // as xk_tile
  int first, last;
  int partial; // slot, or -1: it is the only one
  int pad;
};
struct xk_merge { // rows whose parts have the slots partial .. partial + parts - 1
  int row, n, partial, parts;
};
struct Plan {
  std::vector<xk_part> parts;
  std::vector<xk_merge> merges;
};

struct Prefill {
  const xk_tile *tiles; // the longest first
  int n_tiles, longest; // positions of the first tile
  // For the Hopper kernel; kv_map is null where there is none.
  const CUtensorMap *q_map, *kv_map; // of qkv, and of the pool of all layers
  const CUtensorMap *heads_map;      // of qkv, by heads: for parts and to decode
  unsigned *work;       // two counters, zero between launches
  int sms;
  int first_row, total_rows; // of the layer, and of the pool, in the map
  const xk_part *parts;      // instead of tiles, if n_parts
  const xk_merge *merges;
  int n_parts, n_merges;
};
int32_t xk_attn_prefill(const Launch &l, const Attention &a, const Pool &p, const Prefill &f);
bool xk_attn_hopper_takes(const Pool &p, const Prefill &f);
int32_t xk_attn_prefill_hopper(const Launch &l, const Attention &a, const Pool &p, const Prefill &f);
// One row a sequence, with the bits that prefill gives it; tiles are not used.
int32_t xk_attn_decode_hopper(const Launch &l, const Attention &a, const Pool &p, const Prefill &f, const int32_t *rows, int n_rows);
int32_t xk_tensor_map(CUtensorMap *map, const void *base, uint32_t rank, const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box);
int32_t xk_kv_map(CUtensorMap *map, const element *pool, int64_t rows, int head_dim);
int32_t xk_q_map(CUtensorMap *map, const element *qkv, int64_t rows, int width);
int32_t xk_heads_map(CUtensorMap *map, const element *qkv, int64_t rows, int heads, int kv_heads, int head_dim);
// Whether tiles are better done in parts, and in which: a function of what is
// given alone. split: long ones may be shared by CTAs.
bool xk_attn_plan(Plan *plan, const xk_tile *tiles, int n, int heads, int kv_heads, int head_dim, int sms, bool split);
int64_t xk_attn_partial_rows(int sms, int kv_heads); // that a plan's slots have at most
int32_t xk_attn_merge(const Launch &l, const Attention &a, const Pool &p, const xk_merge *merges, int n);
// Lays out spans of rows, each of at most that many positions (a multiple of 64), the longest
// first, and returns how many. Everything in the host's memory. A step's: xk_span_length.
int xk_attn_spans(xk_span *to, const int32_t *positions, const int32_t *tables, const int32_t *rows, int n, int length);
int xk_span_length(const int32_t *positions, const int32_t *rows, int n, int sms, int kv_heads);
int xk_more_spans(int sms, int kv_heads); // than rows, at most, of a step; twice as many lie in partial
int32_t xk_attn_decode(const Launch &l, const Attention &a, const Pool &p, const xk_span *spans, int n);
int32_t xk_attn_any(const Launch &l, const Attention &a, const Pool &p, int n_rows);
bool xk_attn_fast(int head_dim, int group); // prefill and decode kernels take it
// The head_dims that it takes, and a call of f with one as a constant.
static constexpr int XK_DIMS[] = {64, 80, 96, 128, 256};
template <typename F> int32_t xk_each_dim(int head_dim, F f) {
  switch (head_dim) {
  case 64: return f(std::integral_constant<int, 64>{});
  case 80: return f(std::integral_constant<int, 80>{});
  case 96: return f(std::integral_constant<int, 96>{});
  case 128: return f(std::integral_constant<int, 128>{});
  case 256: return f(std::integral_constant<int, 256>{});
  }
  return xk_fail(XK_INVALID, "attention: head_dim %d", head_dim);
}
// Both: f(bf16 or fp16, head_dim).
template <typename F> int32_t xk_each_form(xk_dtype type, int head_dim, F f) {
  return xk_each_type(type, [&](auto t) { return xk_each_dim(head_dim, [&](auto dim) { return f(t, dim); }); });
}
// f of every head_dim, until one fails.
template <typename F> int32_t xk_all_forms(xk_dtype type, F f) {
  for (int dim : XK_DIMS) XK_OK_OR_RETURN(xk_each_form(type, dim, f));
  return XK_OK;
}
int32_t xk_attn_init(xk_dtype type); // and those of the other files
int32_t xk_attn_decode_init(xk_dtype type);
int32_t xk_attn_hopper_init(xk_dtype type);

// Skinny projection, rows <= 32: out[m][n] = sum_k w[n][k] x[m][k].
// ADD: out, of the residual stream, += ; SILU: pairs of 8 rows; STORE_F32: fp32 beside any T.
enum Epilogue { STORE, ADD, SILU, STORE_F32 };
int32_t xk_skinny(const Launch &l, Epilogue e, const element *w, const element *x, int x_stride, void *out, int out_stride, int m, int n, int k);

// Projection of many rows by gemm_hopper.cu; out = x w^T, out += or SILU, as above.
// It does not add to an fp32 residual stream: cuBLASLt is as fast there.
constexpr bool xk_gemm_hopper_has(xk_dtype type, Epilogue e) { return e == STORE || e == SILU || (e == ADD && type == XK_BF16); }
struct Gemm {
  const CUtensorMap *x, *w, *out; // xk_matrix_map: [rows][k], [n][k], and stored [rows][n] (SILU: n/2)
  int rows, n, k;
  int ctas;       // how many run at once: xk_gemm_hopper_init says it
  unsigned *work; // two counters, zero between launches
  bool beside;    // the two tiles of a cluster are of the same rows: less is computed in vain if rows make an odd number of tiles
};
int32_t xk_gemm_hopper(const Launch &l, Epilogue e, const Gemm &g);
int32_t xk_gemm_hopper_init(xk_dtype type, int *ctas);
// Of a matrix that the kernel reads, or (stored) its result; stride in elements, a multiple of 8.
int32_t xk_matrix_map(CUtensorMap *map, const element *base, int64_t rows, int columns, int stride, bool stored);

// Projection of any number of rows and columns, k a multiple of 8, by gemm_any.cu: as
// xk_skinny, but x is [m][k], no SILU, and no value's bits depend on m. For
// batch_invariant, and slow.
int32_t xk_gemm_any(const Launch &l, Epilogue e, const element *w, const element *x, void *out, int out_stride, int m, int n, int k);
int32_t xk_gemm_any_init(xk_dtype type);

struct Sampling {
  const float *logits; // [finals of the tile][stride], raw
  float *scratch;      // [samples of the tile][stride]
  int sms;
  int vocab, stride, first_final;
  const xk_sample *samples;
  const xk_adjust *adjust;
  int n_samples;
  int32_t *tokens;        // host; a sample says where its own goes
  int32_t *device_tokens; // of samples[0]
  const int32_t *mask_of; // [n_samples] which of the masks; -1 is none
  const uint32_t *masks;  // [][mask_words]; nullptr: no sample has one
  int mask_words;
};
int32_t xk_draw(const Launch &l, const Sampling &s);
int32_t xk_logprobs(const Launch &l, const Sampling &s, const xk_item *items, int n_items, const int32_t *all_tokens, xk_logprob *out);
int32_t xk_sampler_init();
