// Whom a mixture's router chooses: the experts of each row and their parts, the rows' slots in
// groups by expert, and tiles of slots of one expert. Which slot a row gets depends on the order
// in which CTAs come, and changes no bit.
// Oracle: kernels/cpu.
#include <algorithm>

#include "mixture.cuh"

static constexpr int CHOOSERS = 32; // warps of a CTA of choose_kernel, at most: a row each


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

// The experts of the row whose logits a warp holds, at most EACH a lane: the greatest k, the lower
// first among equals. Lane j < k returns the j-th and its part.
template <int EACH> static __device__ int choose_row(const float *logits, int experts, int k, bool norm, float *part) {
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

// Where each expert's slots begin, and the tiles: by all threads of a CTA. next has the experts' picks, and then
// their first slots.
static __device__ void lay_out(int *next, int *sums, const Chosen &o, int experts, int tile_rows) {
  int before = 0, tile = 0; // slots and tiles of the experts that are done
  for (int at = 0; at < experts; at += blockDim.x) {
    const int e = at + threadIdx.x, n = e < experts ? next[e] : 0;
    int slots, tiles;
    const int first = before + scan(n, &slots, sums);
    int mine = tile + scan(div_up(n, tile_rows), &tiles, sums);
    if (e < experts) next[e] = first;
    for (int i = 0; i < n; i += tile_rows) o.tiles[mine++] = {e, first + i, min(tile_rows, n - i)};
    before += slots, tile += tiles;
  }
  if (threadIdx.x == 0) *o.n_tiles = tile;
  __syncthreads();
}

// positions: a negative one is padding's; null: there is none.
//
// One CTA takes up to ALONE rows and does all. Of more, each leaves a pick's expert in slot and its place among the
// expert's in place, the last one to end where experts begin; place_kernel does the rest.
static constexpr int ALONE = 128; // rows
template <int EACH> static __global__ __launch_bounds__(CHOOSERS * 32) void choose_kernel(const float *logits, int stride, const int32_t *positions, Chosen o, int rows, int experts, int k,
                                                                      bool norm, int tile_rows) {
  __shared__ int next[XK_EXPERTS], sums[CHOOSERS], picked[ALONE * 32];
  __shared__ bool last;
  pdl_wait();
  pdl_next();
  const bool alone = gridDim.x == 1;
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32, first = blockIdx.x * CHOOSERS, end = alone ? rows : min(rows, first + CHOOSERS);
  for (int i = threadIdx.x; i < XK_EXPERTS; i += blockDim.x) next[i] = 0;
  for (int row = first + threadIdx.x / 32; row < end; row += warps) {
    float part;
    int e = choose_row<EACH>(logits + int64_t(row) * stride, experts, k, norm, &part);
    if (positions && positions[row] < 0) e = -1;
    if (lane < k) {
      picked[(row - first) * k + lane] = e;
      o.part[int64_t(row) * k + lane] = part;
    }
  }
  __syncthreads();
  const int picks = (end - first) * k;
  if (!alone) { // a pick's place among those of this CTA, behind those of the CTAs before it
    __shared__ int base[XK_EXPERTS];
    const int e = threadIdx.x < picks ? picked[threadIdx.x] : -1, own = e < 0 ? 0 : atomicAdd(next + e, 1); // a row has at most 32
    __syncthreads();
    for (int i = threadIdx.x; i < experts; i += blockDim.x)
      if (next[i]) base[i] = atomicAdd(o.counts->of + i, next[i]);
    __syncthreads();
    if (threadIdx.x < picks) {
      const int64_t at = int64_t(first) * k + threadIdx.x;
      o.slot[at] = e, o.place[at] = e < 0 ? 0 : base[e] + own;
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(&o.counts->done, 1) == gridDim.x - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    for (int i = threadIdx.x; i < experts; i += blockDim.x) next[i] = __ldcg(o.counts->of + i);
    __syncthreads();
    lay_out(next, sums, o, experts, tile_rows);
    for (int i = threadIdx.x; i < experts; i += blockDim.x) o.begins[i] = next[i], o.counts->of[i] = 0;
    if (threadIdx.x == 0) o.counts->done = 0;
    return;
  }
  for (int i = threadIdx.x; i < picks; i += blockDim.x)
    if (picked[i] >= 0) atomicAdd(next + picked[i], 1);
  __syncthreads();
  lay_out(next, sums, o, experts, tile_rows);
  for (int i = threadIdx.x; i < picks; i += blockDim.x) {
    const int e = picked[i], slot = e < 0 ? -1 : atomicAdd(next + e, 1);
    o.slot[i] = slot;
    if (e >= 0) o.row[slot] = i / k;
  }
}

static __global__ void place_kernel(Chosen o, int picks, int k) {
  pdl_wait();
  pdl_next();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= picks) return;
  const int e = o.slot[i];
  if (e < 0) return;
  const int slot = o.begins[e] + o.place[i];
  o.slot[i] = slot, o.row[slot] = i / k;
}

// logits[row][expert], for 8 * NT rows and 16 experts a CTA. A row's bits depend on nothing else.
template <typename T, int NT>
static __global__ __launch_bounds__(FEW_WARPS * 32) void router_kernel(const element *w, const element *x, float *logits, int stride, int rows, int experts, int k) {
  __shared__ Sums<NT> sums;
  const int e0 = blockIdx.x * 16, row0 = blockIdx.y * 8 * NT, g = threadIdx.x % 32 / 4;
  const element *from[NT];
#pragma unroll
  for (int j = 0; j < NT; j++) from[j] = row0 + g + 8 * j < rows ? x + int64_t(row0 + g + 8 * j) * k : nullptr;
  few_rows<T, NT>(w + int64_t(e0) * k, experts - e0, k, from, sums, [] { pdl_wait(), pdl_next(); });
  for (int i = threadIdx.x; i < 16 * min(8 * NT, rows - row0); i += FEW_WARPS * 32)
    if (e0 + i % 16 < experts) logits[int64_t(row0 + i / 16) * stride + e0 + i % 16] = total<NT>(sums, i % 16, i / 16);
}

// ---------------------------------------------------------------- launchers

Chosen xk_chosen(xk_ctx *c) {
  const int64_t slots = int64_t(c->cfg.max_rows) * c->cfg.experts_per_token;
  int32_t *at = c->mix.chosen;
  auto take = [&](int64_t words) {
    int32_t *p = at;
    at += words;
    return p;
  };
  Chosen o;
  o.slot = take(slots), o.part = reinterpret_cast<float *>(take(slots)), o.row = take(slots), o.place = take(slots);
  o.begins = take(XK_EXPERTS), o.counts = reinterpret_cast<Counts *>(take(sizeof(Counts) / sizeof *at));
  o.n_tiles = take(1), o.tiles = reinterpret_cast<GroupTile *>(at);
  return o;
}
int64_t xk_chosen_words(xk_ctx *c) {
  const int64_t slots = int64_t(c->cfg.max_rows) * c->cfg.experts_per_token, word = sizeof(int32_t);
  return 4 * slots + XK_EXPERTS + int64_t(sizeof(Counts)) / word + 1 + xk_most_tiles(slots, c->cfg.experts, 8) * int64_t(sizeof(GroupTile)) / word;
}

static int32_t route(const Launch &l, const element *w, const element *x, float *logits, int stride, int rows, int experts, int k) {
  return xk_each_type(l.type, [&](auto t) {
    using T = decltype(t);
    const int tile = rows <= 8 ? 8 : rows <= 16 ? 16 : 32;
    auto *kernel = tile == 8 ? router_kernel<T, 1> : tile == 16 ? router_kernel<T, 2> : router_kernel<T, 4>;
    return launch(l, kernel, dim3(div_up(experts, 16), div_up(rows, tile)), FEW_WARPS * 32, 0, w, x, logits, stride, rows, experts, k);
  });
}

int32_t xk_choose(xk_ctx *c, const Launch &l, int layer, int rows, const int32_t *positions, int tile_rows) {
  const xk_config &g = c->cfg;
  const int stride = int(round_up(g.experts, 8)), k = g.experts_per_token, picks = rows * k;
  const Chosen o = xk_chosen(c);
  XK_OK_OR_RETURN(route(l, c->layers[layer].router, c->xn, c->mix.logits, stride, rows, g.experts, g.hidden));
  const bool alone = rows <= ALONE;
  auto *choose = g.experts <= 128 ? choose_kernel<4> : g.experts <= 256 ? choose_kernel<8> : choose_kernel<XK_EXPERTS / 32>;
  XK_OK_OR_RETURN(launch(l, choose, alone ? 1 : div_up(rows, CHOOSERS), 32 * std::max(std::min(rows, CHOOSERS), 4), 0, c->mix.logits, stride, positions, o, rows, g.experts, k,
                         bool(g.norm_experts), tile_rows));
  return alone ? XK_OK : launch(l, place_kernel, div_up(picks, 256), 256, 0, o, picks, k);
}
