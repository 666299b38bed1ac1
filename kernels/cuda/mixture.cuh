// What the kernels of mixtures of experts share (mixture.cu).
#pragma once

#include "context.cuh"

struct GroupTile { // slots first .. first + n - 1, of one expert
  int expert, first, n;
};

// Picks of a batch of more rows than one CTA takes, so far. Zero between launches.
struct Counts {
  int of[XK_EXPERTS];
  unsigned done; // CTAs
};

// What is chosen of a batch, on the device.
struct Chosen {
  int32_t *slot;   // [rows][k]; -1: the row is padding
  float *part;     // [rows][k]
  int32_t *row;    // [slots]
  int32_t *place;  // [rows][k] among the expert's, and
  int32_t *begins; // [experts] its first slot: on the way to slot
  Counts *counts;
  GroupTile *tiles;
  int *n_tiles;
};

Chosen xk_chosen(xk_ctx *c); // of the step that is launched
int64_t xk_chosen_words(xk_ctx *c); // int32s of c->mix.chosen
// Tiles of so many slots, at most.
inline int64_t xk_most_tiles(int64_t slots, int experts, int tile_rows) { return (slots < experts ? slots : experts) + slots / tile_rows; }
// Chooses by layer's router, from xn. Rows of negative positions are padding; positions may be null.
int32_t xk_choose(xk_ctx *c, const Launch &l, int layer, int rows, const int32_t *positions, int tile_rows);

// A projection by experts: out[slot] = x[index ? index[slot] : slot] times its expert's w [n][k].
struct Grouped {
  const element *w;
  Matrix8 w8; // instead, with FP8 weights
  const element *x;
  element *out; // rows of n elements; SILU: n / 2
  const int32_t *index;
  const GroupTile *tiles;
  const int *n_tiles;
  int n, k;
};

// Tiles of at most 64 or 128 slots by wgmma (mixture_hopper.cu). E: SILU or STORE.
int32_t xk_grouped_hopper(const Launch &l, Epilogue e, const Grouped &p, int tile_rows, int64_t tiles);
int32_t xk_grouped_hopper_init(xk_dtype type);
// Tiles of any size with FP8 weights, bf16 (mixture8.cu).
int32_t xk_grouped8(const Launch &l, Epilogue e, const Grouped &p, int tile_rows, int64_t tiles);
int32_t xk_grouped8_init();

// 16 rows of w [..][k], of which left are there, times up to 8 * NT rows x, null where there is none: as
// skinny.cu's kernel, by a CTA of eight warps that share out K. The value of w's row r and x's row c is the sum of
// sums[..][r][c]. wait comes before x is read.
static constexpr int FEW_WARPS = 8;
template <int NT> using Sums = float[FEW_WARPS][16][NT * 8 + 1];
template <typename T, int NT, typename F>
static __device__ __forceinline__ void few_rows(const element *w, int left, int k, const element *const (&x)[NT], Sums<NT> &sums, F wait) {
  constexpr int UNROLL = 2; // 32-wide chunks of K in flight a warp
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int chunks = div_up(k, 32), per = div_up(chunks, FEW_WARPS), begin = warp * per, end = min(begin + per, chunks);
  const uint4 zero = make_uint4(0, 0, 0, 0);
  const bool low = g < left, high = g + 8 < left;
  const element *w0 = w + int64_t(g) * k + 8 * t, *w1 = w0 + int64_t(8) * k;
  float acc[NT][4] = {};
  uint4 a[UNROLL][2];
  auto load = [&](int c0) {
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const int c = c0 + u;
      const bool in = c < end && c * 32 + 8 * t < k;
      a[u][0] = in && low ? __ldcs(reinterpret_cast<const uint4 *>(w0 + c * 32)) : zero;
      a[u][1] = in && high ? __ldcs(reinterpret_cast<const uint4 *>(w1 + c * 32)) : zero;
    }
  };
  load(begin);
  wait();
  for (int c0 = begin; c0 < end; c0 += UNROLL) {
    uint4 b[UNROLL][NT], v[UNROLL][2];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const int c = c0 + u;
      const bool in = c < end && c * 32 + 8 * t < k;
#pragma unroll
      for (int j = 0; j < NT; j++) b[u][j] = in && x[j] ? *reinterpret_cast<const uint4 *>(x[j] + 8 * t + c * 32) : zero;
      v[u][0] = a[u][0], v[u][1] = a[u][1];
    }
    if (c0 + UNROLL < end) load(c0 + UNROLL);
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
#pragma unroll
      for (int j = 0; j < NT; j++) {
        mma<T>(acc[j], v[u][0].x, v[u][1].x, v[u][0].y, v[u][1].y, b[u][j].x, b[u][j].y);
        mma<T>(acc[j], v[u][0].z, v[u][1].z, v[u][0].w, v[u][1].w, b[u][j].z, b[u][j].w);
      }
  }
#pragma unroll
  for (int j = 0; j < NT; j++)
#pragma unroll
    for (int e = 0; e < 4; e++) sums[warp][g + e / 2 * 8][8 * j + 2 * t + e % 2] = acc[j][e];
  __syncthreads();
}
template <int NT> static __device__ __forceinline__ float total(const Sums<NT> &sums, int row, int col) {
  float s = 0;
#pragma unroll
  for (int i = 0; i < FEW_WARPS; i++) s += sums[i][row][col];
  return s;
}
