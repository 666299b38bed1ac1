// The pool as bytes, whatever an element is: what moves and hashes rows uses it,
// and the kernels of FP8 pools (kernels/DESIGN.md, section 1). And the one place
// where E4M3 is made and widened.
#pragma once

#include "common.cuh"

// Where the rows of one layer lie: a block is [2][kv_heads][block_tokens] rows of
// row_bytes, and where they are FP8 as many f32 scales behind them.
struct Rows {
  uint8_t *data;    // of this layer
  uint64_t *digest; // [block][kv_heads], of this layer
  uint16_t *filled; // as digest: rows 0..filled-1 are in it
  int64_t run;      // bytes of a block
  int kv_heads, row_bytes;
  int first_head; // the model's number of head 0
  bool scaled; // FP8: row_bytes is head_dim
  FastDiv bt;

  __host__ __device__ int64_t rows_run() const { return int64_t(2) * kv_heads * bt.d * row_bytes; } // the scales begin there
  __host__ __device__ int64_t number(int kv, int head, int at) const { return int64_t(kv * kv_heads + head) * bt.d + at; }
  __host__ __device__ uint8_t *row(int block, int kv, int head, int at) const { return data + block * run + number(kv, head, at) * row_bytes; }
  __host__ __device__ float *scale(int block, int kv, int head, int at) const { return reinterpret_cast<float *>(data + block * run + rows_run()) + number(kv, head, at); }
};

// Bytes of one block of one layer, of so many heads. Blocks of FP8 pools have a multiple of
// 16 positions, so that the scales end on 16 bytes by themselves.
inline int64_t xk_block_bytes(const xk_config &g, int heads) {
  int64_t rows = int64_t(2) * heads * g.block_tokens;
  return g.kv_fp8 ? rows * (g.head_dim + 4) : rows * g.head_dim * 2;
}
inline int64_t xk_block_run(const xk_config &g) { return xk_block_bytes(g, g.kv_heads); }

// A row's hash has its scale behind the row's bytes: lane `lane` of the row, and
// the padding to 16 bytes after it. row_bytes is a multiple of 16.
__device__ __forceinline__ uint64_t scale_hash(float scale, int row_bytes) {
  int lane = row_bytes / 8;
  return lane_hash(__float_as_uint(scale), 0, lane_key(lane)) + lane_hash(0, 0, lane_key(lane + 1));
}

// What a row is divided by so that its greatest finite magnitude is E4M3's, 448.
__device__ __forceinline__ float e4m3_scale(float most) { return most == 0 ? 1.0f : fmaxf(__fdiv_rn(most, 448.0f), 1.17549435e-38f); }
__device__ __forceinline__ float finite_magnitude(float v) { return fabsf(v) <= 3.402823466e38f ? fabsf(v) : 0.0f; }
// Two elements over their scale, rounded to nearest even; what is not finite
// becomes NaN.
__device__ __forceinline__ uint32_t e4m3x2(float lo, float hi, float scale) {
  auto part = [&](float v) { return fabsf(v) <= 3.402823466e38f ? __fdiv_rn(v, scale) : __int_as_float(0x7fffffff | (__float_as_int(v) & 0x80000000)); };
  uint16_t r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(part(hi)), "f"(part(lo)));
  return r;
}
// Exactly, as two halves.
__device__ __forceinline__ uint32_t half2_of(uint16_t e4m3) {
  uint32_t r;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(e4m3));
  return r;
}
__device__ __forceinline__ float2 widen2(uint16_t e4m3) {
  uint32_t h = half2_of(e4m3);
  return __half22float2(*reinterpret_cast<__half2 *>(&h));
}

// Bytes 0 and 1 (half 0) or 2 and 3 of a word as bf16, exactly: sign, exponent and
// mantissa in their places, and then what the exponents' biases differ by. (NaN
// becomes 480: weights have none.)
__device__ __forceinline__ uint32_t bf162_of(uint32_t e4m3, int half) {
  uint32_t high = __byte_perm(e4m3, 0, half ? 0x3424 : 0x1404); // in the upper byte of each
  uint32_t v = (high & 0x80008000) | ((high & 0x7f007f00) >> 4);
  const uint32_t two_to_120 = 0x7b807b80;
  bf162 r = __hmul2(*reinterpret_cast<bf162 *>(&v), *reinterpret_cast<const bf162 *>(&two_to_120));
  return *reinterpret_cast<uint32_t *>(&r);
}

// A projection's weights in FP8: [N][K], and a scale a row.
struct Matrix8 {
  uint8_t *data;
  float *scale;
};
// Skinny projection, rows <= 16: out[m][n] = scale[n] sum_k w[n][k] x[m][k].
int32_t xk_skinny8(const Launch &l, Epilogue e, const Matrix8 &w, const element *x, int x_stride, void *out, int out_stride, int m, int n, int k);
// Rows of x become E4M3 with a scale each.
int32_t xk_quantise(const Launch &l, const element *x, uint8_t *out, float *scale, int rows, int k);

struct xk_ctx;

// FP8 pools: append.cu's, attn_decode.cu's and attn_prefill.cu's counterparts.
int32_t xk_append8(const Launch &l, const Rope &r, const Rows &p);
int32_t xk_attn_decode8(const Launch &l, const Attention &a, const Rows &p, const xk_span *spans, int n, int n_rows, int sms);
bool xk_attn_decode8_takes(int head_dim, int group);
// Rows rows[0..n_rows), or the first n_rows where rows is null; slow, any shape.
int32_t xk_attn_any8(const Launch &l, const Attention &a, const Rows &p, const int32_t *rows, int n_rows);
int32_t xk_attn8_init();

// Sequences whose blocks are widened to bf16 in one launch, one behind the other
// in the blocks of another pool; their new tables lie where the old ones do in
// `tail`.
struct Widen {
  static constexpr int MOST = 64;
  struct Seq {
    int32_t table, first; // offset of the table; block of the other pool
  } seq[MOST];
  int n, blocks; // of all together
};
int32_t xk_widen(const Launch &l, const Rows &p, const Widen &w, const int32_t *tail, element *to, int32_t *to_tail);
// Attention of one layer over an FP8 pool: tiles are the host's, f as for bf16.
int32_t xk_attend8(xk_ctx *c, const Launch &l, Attention a, Prefill f, const xk_tile *tiles, const xk_step_args &step, int layer, const int32_t *decode, const xk_span *spans);
