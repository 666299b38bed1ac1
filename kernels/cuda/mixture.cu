// Mixtures of experts: each row's feed-forward is the sum of those of a few experts,
// whom a router chooses. Rows go to experts in groups, so that an expert's weights
// are read once for all of its rows: a row's place in its group is its slot.
//
//   router    logits[row][expert], fp32
//   choose    the experts of each row and their parts; slots, and tiles of slots of one expert
//   gate, up  act[slot] = silu(gate) * up of the slot's row, by the expert's weights
//   down      out[slot]
//   combine   the residual stream += the sum of part * out[slot] of a row's experts
//
// Tiles of few rows are bound by the weights' bytes: as skinny.cu does them. Else as
// gemm_any.cu does, in larger tiles; with batch_invariant always, since there a value
// of a row depends on nothing but the row. Which slot a row gets changes no bit.
// Oracle: kernels/cpu.
#include <algorithm>

#include "context.cuh"

static constexpr int CHOOSERS = 32; // warps of a CTA of choose_kernel: a row each

struct Tile { // slots first .. first + n - 1, of one expert
  int expert, first, n;
};

// What is chosen of a batch, on the device.
struct Chosen {
  int32_t *slot; // [rows][k]; -1: the row is padding
  float *part;   // [rows][k]
  int32_t *row;  // [slots]
  Tile *tiles;
  int *n_tiles;
  unsigned *ticket; // zero between launches
};

static Chosen chosen(xk_ctx *c) {
  const xk_config &g = c->cfg;
  const int64_t slots = int64_t(g.max_rows) * g.experts_per_token;
  auto *at = reinterpret_cast<int32_t *>(c->mix.chosen);
  Chosen o;
  o.slot = at, o.part = reinterpret_cast<float *>(at + slots), o.row = at + 2 * slots;
  o.n_tiles = at + 3 * slots, o.ticket = reinterpret_cast<unsigned *>(at + 3 * slots + 1);
  o.tiles = reinterpret_cast<Tile *>(at + 3 * slots + 2);
  return o;
}
static int64_t most_tiles(int64_t slots, int experts, int rows) { return std::min<int64_t>(slots, experts) + slots / rows; }

// Ascending sums over n <= blockDim.x values, by all threads of a CTA of whole warps.
static __device__ int scan(int v, int *total, int *sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int s = v;
#pragma unroll
  for (int o = 1; o < 32; o *= 2) {
    int left = __shfl_up_sync(~0u, s, o);
    if (lane >= o) s += left;
  }
  __syncthreads(); // sums may be read still
  if (lane == 31) sums[warp] = s;
  __syncthreads();
  int before = 0, all = 0;
  for (int i = 0; i < int(blockDim.x) / 32; i++) {
    if (i < warp) before += sums[i];
    all += sums[i];
  }
  *total = all;
  return before + s - v; // of those before
}

// The experts of the row whose logits a warp holds, lane by lane: the greatest k, the lower first
// among equals. Lane j < k returns the j-th and its part.
static __device__ int choose_row(const float *logits, int experts, int k, bool norm, float *part) {
  constexpr int EACH = XK_EXPERTS / 32;
  const int lane = threadIdx.x % 32;
  float v[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int e = lane + 32 * i;
    v[i] = e < experts ? fmaxf(logits[e], -3.4e38f) : -INFINITY; // what is no number counts least
  }
  uint32_t taken = 0;
  int mine = -1;
  float own = 0, top = 0;
  for (int j = 0; j < k; j++) {
    float best = -INFINITY;
    int at = 1 << 30;
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (!(taken >> i & 1) && v[i] > best) best = v[i], at = lane + 32 * i;
#pragma unroll
    for (int o = 16; o; o >>= 1) {
      const float other = __shfl_xor_sync(~0u, best, o);
      const int its = __shfl_xor_sync(~0u, at, o);
      if (other > best || (other == best && its < at)) best = other, at = its;
    }
    if (at % 32 == lane) taken |= 1u << at / 32;
    if (lane == j) mine = at, own = best;
    if (j == 0) top = best;
  }
  float sum = 0;
  if (norm) {
    sum = lane < k ? expf(own - top) : 0;
  } else {
#pragma unroll
    for (int i = 0; i < EACH; i++) sum += expf(v[i] - top);
  }
  *part = expf(own - top) / warp_sum(sum);
  return mine;
}

// positions: a negative one is padding's; null: there is none. The last CTA to end lays out slots and
// tiles of at most tile_rows.
static __global__ __launch_bounds__(CHOOSERS * 32) void choose_kernel(const float *logits, int stride, const int32_t *positions, Chosen o, int rows, int experts, int k,
                                                                      bool norm, int tile_rows) {
  __shared__ int next[XK_EXPERTS], sums[CHOOSERS];
  __shared__ bool last;
  pdl_wait();
  pdl_next();
  const int row = blockIdx.x * CHOOSERS + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row < rows) {
    float part;
    const int e = choose_row(logits + int64_t(row) * stride, experts, k, norm, &part);
    if (lane < k) {
      o.slot[int64_t(row) * k + lane] = positions && positions[row] < 0 ? -1 : e; // which expert, for now
      o.part[int64_t(row) * k + lane] = part;
    }
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(o.ticket, 1) == gridDim.x - 1;
  if (threadIdx.x < XK_EXPERTS) next[threadIdx.x] = 0;
  __syncthreads();
  if (!last) return;
  __threadfence();
  const int picks = rows * k;
  for (int i = threadIdx.x; i < picks; i += CHOOSERS * 32) {
    const int e = __ldcg(o.slot + i);
    if (e >= 0) atomicAdd(next + e, 1);
  }
  __syncthreads();
  static_assert(XK_EXPERTS <= CHOOSERS * 32, "a thread an expert");
  const int n = threadIdx.x < experts ? next[threadIdx.x] : 0;
  int all, tiles;
  const int first = scan(n, &all, sums);
  int tile = scan(div_up(n, tile_rows), &tiles, sums);
  __syncthreads();
  if (threadIdx.x < experts) next[threadIdx.x] = first;
  for (int at = 0; at < n; at += tile_rows) o.tiles[tile++] = {int(threadIdx.x), first + at, min(tile_rows, n - at)};
  if (threadIdx.x == 0) *o.n_tiles = tiles, *o.ticket = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < picks; i += CHOOSERS * 32) {
    const int e = __ldcg(o.slot + i);
    if (e < 0) continue;
    const int slot = atomicAdd(next + e, 1);
    o.slot[i] = slot, o.row[slot] = i / k;
  }
}

// A projection by experts: out[slot] = x[index ? index[slot] : slot] times its expert's w [n][k].
struct Grouped {
  const element *w, *x;
  element *out; // rows of n elements; SILU: n / 2
  const int32_t *index;
  const Tile *tiles;
  const int *n_tiles;
  int n, k;
};

// Tiles of at most 8 * NT slots: as skinny.cu's kernel.
template <typename T, Epilogue E, int NT>
static __global__ __launch_bounds__(256, NT == 1 ? 2 : 1) void few_kernel(Grouped p) {
  constexpr int WARPS = 8, UNROLL = 4;
  __shared__ float sums[WARPS][16][NT * 8 + 1];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int n0 = blockIdx.x * 16, k = p.k;
  pdl_wait();
  pdl_next();
  if (int(blockIdx.y) >= *p.n_tiles) return;
  const Tile tile = p.tiles[blockIdx.y];
  const int chunks = div_up(k, 32), per = div_up(chunks, WARPS), begin = warp * per, end = min(begin + per, chunks);
  const uint4 zero = make_uint4(0, 0, 0, 0);
  const bool low = n0 + g < p.n, high = n0 + g + 8 < p.n;
  const element *w0 = p.w + (int64_t(tile.expert) * p.n + n0 + g) * k + 8 * t, *w1 = w0 + int64_t(8) * k;
  const element *x[NT];
#pragma unroll
  for (int j = 0; j < NT; j++) {
    const int at = g + 8 * j;
    x[j] = at >= tile.n ? nullptr : p.x + int64_t(p.index ? p.index[tile.first + at] : tile.first + at) * k + 8 * t;
  }
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
  for (int c0 = begin; c0 < end; c0 += UNROLL) {
    uint4 b[UNROLL][NT], v[UNROLL][2];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const int c = c0 + u;
      const bool in = c < end && c * 32 + 8 * t < k;
#pragma unroll
      for (int j = 0; j < NT; j++) b[u][j] = in && x[j] ? *reinterpret_cast<const uint4 *>(x[j] + c * 32) : zero;
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
  auto total = [&](int row, int col) {
    float s = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) s += sums[i][row][col];
    return s;
  };
  constexpr int MADE = E == SILU ? 8 : 16; // columns of out
  for (int i = threadIdx.x; i < MADE * tile.n; i += WARPS * 32) {
    const int row = i % MADE, col = i / MADE;
    if (n0 + row >= p.n) continue;
    if constexpr (E == SILU) p.out[int64_t(tile.first + col) * (p.n / 2) + n0 / 2 + row] = narrow<T>(silu(total(row, col)) * total(row + 8, col));
    else p.out[int64_t(tile.first + col) * p.n + n0 + row] = narrow<T>(total(row, col));
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
  const Tile tile = p.tiles[blockIdx.y];
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

// A CTA a row. adds: to the residual stream; else the sum alone is written, for xk_reduce.
template <typename T> static __global__ void combine_kernel(const element *out, Chosen o, residual<T> *to, int hidden, int k, bool adds) {
  pdl_wait();
  pdl_next();
  const int64_t first = int64_t(blockIdx.x) * k;
  const bool any = o.slot[first] >= 0;
  if (!any && adds) return;
  for (int at = 2 * threadIdx.x; at < hidden; at += 2 * blockDim.x) { // hidden is a multiple of 8
    float2 sum = {0, 0};
    for (int j = 0; any && j < k; j++) {
      const float part = o.part[first + j];
      const float2 v = unpack<T>(*reinterpret_cast<const uint32_t *>(out + int64_t(o.slot[first + j]) * hidden + at));
      sum.x += part * v.x, sum.y += part * v.y;
    }
    residual<T> *x = to + int64_t(blockIdx.x) * hidden + at;
    if (!adds) {
      if constexpr (std::is_same_v<residual<T>, float>) x[0] = x[1] = 0;
      else x[0] = x[1] = narrow<T>(0);
    }
    add<T>(x, sum.x), add<T>(x + 1, sum.y);
  }
}

// ---------------------------------------------------------------- launchers

template <Epilogue E> static int32_t grouped(const Launch &l, const Grouped &p, int tile_rows, int64_t tiles) {
  return xk_each_type(l.type, [&](auto t) {
    using T = decltype(t);
    if (tile_rows == MANY) return launch(l, many_kernel<T, E>, dim3(div_up(p.n, COLUMNS), unsigned(tiles)), 256, SMEM_BYTES, p);
    auto *kernel = tile_rows == 8 ? few_kernel<T, E, 1> : tile_rows == 16 ? few_kernel<T, E, 2> : few_kernel<T, E, 4>;
    return launch(l, kernel, dim3(div_up(p.n, 16), unsigned(tiles)), 256, 0, p);
  });
}

// Slots of a tile: as few as most experts have rows, so that little is computed in vain, and the
// weights of few experts are read twice.
static int tile_rows(const xk_config &g, int rows) {
  if (g.batch_invariant) return MANY;
  const double each = double(rows) * g.experts_per_token / g.experts;
  if (rows <= 8 || each <= 4) return 8;
  if (rows <= 16 || each <= 8) return 16;
  return rows <= 32 || each <= 24 ? 32 : MANY;
}

int32_t xk_mix(xk_ctx *c, const Launch &l, int layer, int rows, const int32_t *positions) {
  const xk_config &g = c->cfg;
  const Layer &w = c->layers[layer];
  const int stride = int(round_up(g.experts, 8)), size = tile_rows(g, rows);
  const Chosen o = chosen(c);
  if (g.batch_invariant || rows > 32) XK_OK_OR_RETURN(xk_gemm_any(l, STORE_F32, w.router, c->xn, c->mix.logits, stride, rows, g.experts, g.hidden));
  else XK_OK_OR_RETURN(xk_skinny(l, STORE_F32, w.router, c->xn, g.hidden, c->mix.logits, stride, rows, g.experts, g.hidden));
  XK_OK_OR_RETURN(launch(l, choose_kernel, div_up(rows, CHOOSERS), CHOOSERS * 32, 0, c->mix.logits, stride, positions, o, rows, g.experts, g.experts_per_token,
                         bool(g.norm_experts), size));
  const int64_t tiles = most_tiles(int64_t(rows) * g.experts_per_token, g.experts, size);
  XK_OK_OR_RETURN(grouped<SILU>(l, {w.gate_up, c->xn, c->act, o.row, o.tiles, o.n_tiles, 2 * c->ff, g.hidden}, size, tiles));
  XK_OK_OR_RETURN(grouped<STORE>(l, {w.down, c->act, c->mix.out, nullptr, o.tiles, o.n_tiles, g.hidden, c->ff}, size, tiles));
  return xk_each_type(l.type, [&](auto t) {
    using T = decltype(t);
    const int threads = int(std::min<int64_t>(round_up(g.hidden / 2, 32), 512));
    return launch(l, combine_kernel<T>, rows, threads, 0, c->mix.out, o, static_cast<residual<T> *>(c->sums(true)), g.hidden, g.experts_per_token, c->alone());
  });
}

int32_t xk_mix_open(xk_ctx *c) {
  const xk_config &g = c->cfg;
  const int64_t slots = int64_t(g.max_rows) * g.experts_per_token;
  XK_OK_OR_RETURN(xk_gemm_any_init(c->type()));
  XK_OK_OR_RETURN(xk_each_type(c->type(), [&](auto t) {
    using T = decltype(t);
    XK_TRY(cudaFuncSetAttribute(many_kernel<T, SILU>, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM_BYTES));
    XK_TRY(cudaFuncSetAttribute(many_kernel<T, STORE>, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM_BYTES));
    return int32_t(XK_OK);
  }));
  XK_OK_OR_RETURN(xk_alloc(c, &c->mix.logits, int64_t(g.max_rows) * round_up(g.experts, 8), true));
  XK_OK_OR_RETURN(xk_alloc(c, &c->mix.out, slots * g.hidden, true));
  const int64_t words = 3 * slots + 2 + most_tiles(slots, g.experts, 8) * int64_t(sizeof(Tile) / sizeof(int32_t));
  XK_OK_OR_RETURN(xk_alloc(c, &c->mix.chosen, words, true));
  return xk_alloc(c, &c->act, slots * c->ff, true);
}
