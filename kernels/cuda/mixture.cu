// Mixtures of experts: each row's feed-forward is the sum of those of a few experts,
// whom a router chooses. Rows go to experts in groups, so that an expert's weights
// are read once for all of its rows: a row's place in its group is its slot.
//
//   choose    the experts of each row and their parts; slots, and tiles of slots of one expert
//             (mixture_choose.cu)
//   gate, up  act[slot] = silu(gate) * up of the slot's row, by the expert's weights
//   down      out[slot]
//   combine   the residual stream += the sum of part * out[slot] of a row's experts
//
// Tiles of few rows are bound by the weights' bytes: as skinny.cu does them. Else by
// mixture_hopper.cu, or on later GPUs as gemm_any.cu does; with batch_invariant always by
// one of the two, since there a value of a row depends on nothing but the row. Which slot
// a row gets changes no bit.
// Oracle: kernels/cpu.
#include <algorithm>

#include "eight.cuh"
#include "mixture.cuh"

// Tiles of at most 8 * NT slots.
template <typename T, Epilogue E, int NT>
static __global__ __launch_bounds__(FEW_WARPS * 32, NT == 1 ? 4 : NT == 2 ? 3 : 2) void few_kernel(Grouped p) {
  __shared__ Sums<NT> sums;
  const int n0 = blockIdx.x * 16, g = threadIdx.x % 32 / 4;
  pdl_wait();
  pdl_next();
  if (int(blockIdx.y) >= *p.n_tiles) return;
  const GroupTile tile = p.tiles[blockIdx.y];
  const element *from[NT];
#pragma unroll
  for (int j = 0; j < NT; j++) {
    const int at = g + 8 * j;
    from[j] = at >= tile.n ? nullptr : p.x + int64_t(p.index ? p.index[tile.first + at] : tile.first + at) * p.k;
  }
  few_rows<T, NT>(p.w + (int64_t(tile.expert) * p.n + n0) * p.k, p.n - n0, p.k, from, sums, [] {});
  constexpr int MADE = E == SILU ? 8 : 16; // columns of out
  for (int i = threadIdx.x; i < MADE * tile.n; i += FEW_WARPS * 32) {
    const int row = i % MADE, col = i / MADE;
    if (n0 + row >= p.n) continue;
    if constexpr (E == SILU) p.out[int64_t(tile.first + col) * (p.n / 2) + n0 / 2 + row] = narrow<T>(silu(total<NT>(sums, row, col)) * total<NT>(sums, row + 8, col));
    else p.out[int64_t(tile.first + col) * p.n + n0 + row] = narrow<T>(total<NT>(sums, row, col));
  }
}

// Tiles of at most MANY slots by 128 columns, of eight warps each 64 by 32; a value is one thread's sum
// over K in ascending order, as gemm_any.cu's.
static constexpr int MANY = 128, COLUMNS = 128, STEP = 64, STAGES = 4;
struct Stage {
  element x[MANY * STEP], w[COLUMNS * STEP];
};
static constexpr int SMEM_BYTES = STAGES * int(sizeof(Stage));
static __device__ __forceinline__ int part_at(int row, int part) { return row * STEP + (part ^ row % 8) * 8; }

template <typename T, Epilogue E> static __global__ __launch_bounds__(256, 1) void many_kernel(Grouped p) {
  extern __shared__ __align__(128) uint8_t raw[];
  Stage *ring = reinterpret_cast<Stage *>(raw);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int n0 = blockIdx.x * COLUMNS, down = warp / 4 * 64, across = warp % 4 * 32, k = p.k, steps = div_up(k, STEP);
  pdl_wait();
  pdl_next();
  if (int(blockIdx.y) >= *p.n_tiles) return;
  const GroupTile tile = p.tiles[blockIdx.y];
  const element *w = p.w + int64_t(tile.expert) * p.n * k;
  // A thread copies the same part of every eighth of the tile's rows.
  constexpr int ROWS = 256 / 8, COPIES = MANY / ROWS;
  const int part = threadIdx.x % 8, row0 = threadIdx.x / 8;
  const element *from[COPIES], *weights[COPIES];
#pragma unroll
  for (int i = 0; i < COPIES; i++) {
    const int at = row0 + ROWS * i;
    from[i] = at >= tile.n ? nullptr : p.x + int64_t(p.index ? p.index[tile.first + at] : tile.first + at) * k + part * 8;
    weights[i] = n0 + at >= p.n ? nullptr : w + int64_t(n0 + at) * k + part * 8;
  }
  auto load = [&](int step) {
    if (step < steps) {
      Stage &s = ring[step % STAGES];
      const bool in = step * STEP + part * 8 < k; // k is a multiple of 8
#pragma unroll
      for (int i = 0; i < COPIES; i++) {
        const int to = part_at(row0 + ROWS * i, part);
        cp_async16(s.x + to, in && from[i] ? from[i] + step * STEP : p.x, in && from[i]);
        cp_async16(s.w + to, in && weights[i] ? weights[i] + step * STEP : w, in && weights[i]);
      }
    }
    cp_async_commit(); // also of nothing: what is waited for is counted
  };
  float acc[4][4][4] = {}; // 16 rows, 8 columns
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) load(i);
#pragma unroll 1
  for (int step = 0; step < steps; step++) {
    cp_async_wait<STAGES - 2>();
    __syncthreads(); // this step is there, and all have done with the one before
    load(step + STAGES - 1);
    const Stage &s = ring[step % STAGES];
#pragma unroll
    for (int i = 0; i < STEP / 16; i++) {
      uint32_t b[2][4];
#pragma unroll
      for (int j = 0; j < 2; j++) ldmatrix4(b[j], smem_addr(s.w + part_at(across + 16 * j + lane / 16 * 8 + lane % 8, 2 * i + lane / 8 % 2)));
#pragma unroll
      for (int r = 0; r < 4; r++) {
        if (down + 16 * r >= tile.n) continue; // for the whole warp
        uint32_t a[4];
        ldmatrix4(a, smem_addr(s.x + part_at(down + 16 * r + lane % 16, 2 * i + lane / 16)));
#pragma unroll
        for (int j = 0; j < 4; j++) mma<T>(acc[r][j], a[0], a[1], a[2], a[3], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 4; r++)
#pragma unroll
    for (int h = 0; h < 2; h++) { // the row's half of acc
      const int row = down + 16 * r + g + 8 * h;
      if (row >= tile.n) continue;
      const int64_t slot = tile.first + row;
      if constexpr (E == SILU) {
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
          const int column = n0 + across + 8 * j + 2 * t;
          if (column >= p.n) continue;
          const float *gate = acc[r][j] + 2 * h, *up = acc[r][j + 1] + 2 * h;
          *reinterpret_cast<uint32_t *>(p.out + slot * (p.n / 2) + (n0 + across + 8 * j) / 2 + 2 * t) = silu_mul<T>(pack<T>(gate[0], gate[1]), pack<T>(up[0], up[1]));
        }
      } else {
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const int column = n0 + across + 8 * j + 2 * t;
          if (column < p.n) *reinterpret_cast<uint32_t *>(p.out + slot * p.n + column) = pack<T>(acc[r][j][2 * h], acc[r][j][2 * h + 1]);
        }
      }
    }
}

// A CTA a row, a thread at most KEPT vectors of eight. adds: to the residual stream, with the norm by w of what
// is then there, if w is not null; else the sum alone is written, for xk_reduce.
static constexpr int KEPT = 4, COMBINERS = 512;
template <typename T> static __global__ __launch_bounds__(COMBINERS) void combine_kernel(const element *out, Chosen o, residual<T> *to, int hidden, int k, bool adds, const float *w, element *xn, float eps) {
  constexpr int AT_ONCE = 8;
  __shared__ int slots[32];
  __shared__ float parts[32], sums[COMBINERS / 32];
  pdl_wait();
  pdl_next();
  const int n = hidden / 8; // vectors
  if (threadIdx.x < k) slots[threadIdx.x] = o.slot[int64_t(blockIdx.x) * k + threadIdx.x], parts[threadIdx.x] = o.part[int64_t(blockIdx.x) * k + threadIdx.x];
  __syncthreads();
  const bool any = slots[0] >= 0; // else the row is padding
  Eight<T> *x = reinterpret_cast<Eight<T> *>(to + int64_t(blockIdx.x) * hidden);
  Eight<T> kept[KEPT];
  float squares = 0;
#pragma unroll
  for (int i = 0; i < KEPT; i++) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at >= n) continue;
    float2 sum[4] = {};
    for (int j0 = 0; any && j0 < k; j0 += AT_ONCE) {
      uint4 v[AT_ONCE];
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++) v[j] = j0 + j < k ? reinterpret_cast<const uint4 *>(out + int64_t(slots[j0 + j]) * hidden)[at] : make_uint4(0, 0, 0, 0);
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++) {
        if (j0 + j >= k) continue;
        const float part = parts[j0 + j];
        const uint32_t four[4] = {v[j].x, v[j].y, v[j].z, v[j].w};
#pragma unroll
        for (int c = 0; c < 4; c++) {
          const float2 y = unpack<T>(four[c]);
          sum[c].x += part * y.x, sum[c].y += part * y.y;
        }
      }
    }
    if (adds) {
      float2 old[4];
      x[at].pairs(old);
#pragma unroll
      for (int c = 0; c < 4; c++) sum[c].x += old[c].x, sum[c].y += old[c].y;
    }
    kept[i] = rounded<T>(sum);
    x[at] = kept[i];
    squares += sum_squares(kept[i]);
  }
  if (!w) return;
  squares = warp_sum(squares);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = squares;
  __syncthreads();
  squares = 0;
  for (int i = 0; i < int(blockDim.x) / 32; i++) squares += sums[i];
  const float r = rsqrtf(squares / float(hidden) + eps);
#pragma unroll
  for (int i = 0; i < KEPT; i++) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at >= n) continue;
    const float4 a = reinterpret_cast<const float4 *>(w)[2 * at], b = reinterpret_cast<const float4 *>(w)[2 * at + 1];
    float2 f[4];
    kept[i].pairs(f);
    reinterpret_cast<uint4 *>(xn + int64_t(blockIdx.x) * hidden)[at] =
        make_uint4(pack<T>(f[0].x * r * a.x, f[0].y * r * a.y), pack<T>(f[1].x * r * a.z, f[1].y * r * a.w), pack<T>(f[2].x * r * b.x, f[2].y * r * b.y), pack<T>(f[3].x * r * b.z, f[3].y * r * b.w));
  }
}

// ---------------------------------------------------------------- launchers

template <Epilogue E> static int32_t grouped(const Launch &l, bool hopper, const Grouped &p, int tile_rows, int64_t tiles) {
  if (p.w8.data) return xk_grouped8(l, E, p, tile_rows, tiles);
  return xk_each_type(l.type, [&](auto t) {
    using T = decltype(t);
    if (tile_rows >= 64 && hopper) return xk_grouped_hopper(l, E, p, tile_rows, tiles);
    if (tile_rows == MANY) return launch(l, many_kernel<T, E>, dim3(div_up(p.n, COLUMNS), unsigned(tiles)), 256, SMEM_BYTES, p);
    auto *kernel = tile_rows == 8 ? few_kernel<T, E, 1> : tile_rows == 16 ? few_kernel<T, E, 2> : few_kernel<T, E, 4>;
    return launch(l, kernel, dim3(div_up(p.n, 16), unsigned(tiles)), 256, 0, p);
  });
}

// Slots of a tile: as few as most experts have rows, so that little is computed in vain, and the
// weights of few experts are read twice.
static int tile_rows(const xk_ctx *c, int rows) {
  const xk_config &g = c->cfg;
  if (g.batch_invariant) return MANY;
  const double each = double(rows) * g.experts_per_token / g.experts;
  if (rows <= 8 || each <= 4) return 8;
  if (rows <= 16 || each <= 8) return 16;
  if (rows <= 32 || each <= 24) return 32;
  return c->hopper && each < 96 ? 64 : MANY;
}

int32_t xk_mix(xk_ctx *c, const Launch &l, int layer, int rows, const int32_t *positions, const float *norm) {
  const xk_config &g = c->cfg;
  const Layer &w = c->layers[layer];
  const int size = tile_rows(c, rows);
  const Chosen o = xk_chosen(c);
  XK_OK_OR_RETURN(xk_choose(c, l, layer, rows, positions, size));
  const int64_t tiles = xk_most_tiles(int64_t(rows) * g.experts_per_token, g.experts, size);
  XK_OK_OR_RETURN(grouped<SILU>(l, c->hopper, {w.gate_up, w.gate_up8, c->xn, c->act, o.row, o.tiles, o.n_tiles, 2 * c->ff, g.hidden}, size, tiles));
  XK_OK_OR_RETURN(grouped<STORE>(l, c->hopper, {w.down, w.down8, c->act, c->mix.out, nullptr, o.tiles, o.n_tiles, g.hidden, c->ff}, size, tiles));
  return xk_each_type(l.type, [&](auto t) {
    using T = decltype(t);
    const int threads = int(std::min<int64_t>(round_up(g.hidden / 8, 32), COMBINERS));
    return launch(l, combine_kernel<T>, rows, threads, 0, c->mix.out, o, static_cast<residual<T> *>(c->sums(true)), g.hidden, g.experts_per_token, c->alone(),
                  c->alone() ? norm : nullptr, c->xn, g.norm_eps);
  });
}

int32_t xk_mix_open(xk_ctx *c) {
  const xk_config &g = c->cfg;
  const int64_t slots = int64_t(g.max_rows) * g.experts_per_token;
  if (c->hopper) XK_OK_OR_RETURN(xk_grouped_hopper_init(c->type()));
  if (g.weights_fp8) {
    if (!c->hopper || g.hidden % 16) return xk_fail(XK_INVALID, "experts in FP8 need compute capability 9.0, and a width of a multiple of 16");
    XK_OK_OR_RETURN(xk_grouped8_init());
  }
  XK_OK_OR_RETURN(xk_each_type(c->type(), [&](auto t) {
    using T = decltype(t);
    XK_TRY(cudaFuncSetAttribute(many_kernel<T, SILU>, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM_BYTES));
    XK_TRY(cudaFuncSetAttribute(many_kernel<T, STORE>, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM_BYTES));
    return int32_t(XK_OK);
  }));
  XK_OK_OR_RETURN(xk_alloc(c, &c->mix.logits, int64_t(g.max_rows) * round_up(g.experts, 8), true));
  XK_OK_OR_RETURN(xk_alloc(c, &c->mix.out, slots * g.hidden, true));
  XK_OK_OR_RETURN(xk_alloc(c, &c->mix.chosen, xk_chosen_words(c), true));
  return xk_alloc(c, &c->act, slots * c->ff, true);
}
