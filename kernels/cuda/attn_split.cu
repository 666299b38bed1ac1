// Short chunks after long prefixes, which is what every hit of the prefix cache
// computes: as tiles of one head each they would keep a quarter of the device
// busy, reading K and V once a query head. The plan packs the heads of a group
// into one tile and shares a long prefix among CTAs; xk_attn_merge adds up what
// they found, in the order of positions. Both depend on the step's tiles alone,
// so that a step has the same bits on every run.
// Oracle: probe/probe.cu.
#include <algorithm>

#include "common.cuh"

static constexpr int MOST = 32; // parts of a tile
static constexpr int START = 2; // what an item costs beside its tiles of K, in tiles
static constexpr int MERGE = 2; // and what the merge costs, likewise

static constexpr int WARPS = 8; // of a CTA: a row each
static constexpr int AT_ONCE = 8;         // parts whose loads are in flight together

// A row of the merge's tile a warp, four elements a lane.
template <typename T, int D> static __global__ __launch_bounds__(WARPS * 32, 2) void merge_kernel(Attention a, int kv_heads, const xk_merge *merges) {
  constexpr int STRIDE = D + XK_STATS;
  pdl_wait();
  pdl_next();
  xk_merge m = merges[blockIdx.x];
  const int group = a.heads / kv_heads, kv_head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t next = int64_t(kv_heads) * XK_TILE * STRIDE; // the same row of the next part
  const int r = blockIdx.z * WARPS + warp;
  if (r >= m.n * group) return;
  const float *from = a.partial + ((int64_t(m.partial) * kv_heads + kv_head) * XK_TILE + r) * STRIDE;
  float2 stat = make_float2(-INFINITY, 0); // a lane has a part's
  if (lane < m.parts) stat = __ldcg(reinterpret_cast<const float2 *>(from + lane * next + D));
  float most = stat.x;
#pragma unroll
  for (int o = 16; o; o >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
  float weight = exp2f(stat.x - most), sum = 0; // of no part: 0
  for (int p = 0; p < m.parts; p++) sum += __shfl_sync(~0u, weight * stat.y, p);
  const float inverse = 1 / sum;
  element *to = a.out + (int64_t(m.row + r / group) * a.heads + kv_head * group + r % group) * D;
#pragma unroll
  for (int d0 = 0; d0 < D; d0 += 128) {
    int d = d0 + 4 * lane;
    float4 v = make_float4(0, 0, 0, 0);
    for (int p0 = 0; p0 < m.parts; p0 += AT_ONCE) {
      float4 x[AT_ONCE];
      float f[AT_ONCE];
      const float *at = from + min(d, D - 4);
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++) {
        f[j] = __shfl_sync(~0u, weight, p0 + j); // of none: 0
        x[j] = __ldcg(reinterpret_cast<const float4 *>(at + min(p0 + j, m.parts - 1) * next));
      }
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++) v.x += f[j] * x[j].x, v.y += f[j] * x[j].y, v.z += f[j] * x[j].z, v.w += f[j] * x[j].w;
    }
    if (d < D) *reinterpret_cast<uint2 *>(to + d) = make_uint2(pack<T>(v.x * inverse, v.y * inverse), pack<T>(v.z * inverse, v.w * inverse));
  }
}

int32_t xk_attn_merge(const Launch &l, const Attention &a, const Pool &p, const xk_merge *merges, int n) {
  dim3 grid(n, p.kv_heads, XK_TILE / WARPS);
  return xk_each_form(l.type, p.head_dim, [&](auto t, auto dim) { return launch(l, merge_kernel<decltype(t), dim>, grid, WARPS * 32, 0, a, p.kv_heads, merges); });
}

// ---------------------------------------------------------------- the plan

// Items of at most a multiprocessor's share are more than that for each tile
// that is longer: as many again.
static int slots(int sms, int kv_heads) { return 2 * div_up(sms, kv_heads) + 2; }
int64_t xk_attn_partial_rows(int sms, int kv_heads) { return int64_t(slots(sms, kv_heads)) * kv_heads * XK_TILE; }

// What so many items of so many tiles of K in all take on sms multiprocessors,
// in tiles: rounds of the average, or the longest.
static double cost(int64_t items, int64_t total, int64_t longest, int sms) {
  double average = double(total) / items + START;
  return std::max(double(longest + START), div_up(items, sms) * average);
}

bool xk_attn_plan(Plan *plan, const xk_tile *tiles, int n, int heads, int kv_heads, int head_dim, int sms, bool split) {
  const int group = heads / kv_heads, rows = XK_TILE / group, step = xk_attn_step(head_dim);
  plan->parts.clear(), plan->merges.clear();
  if (!rows) return false;
  auto steps = [&](const xk_tile &t) { return int64_t(div_up(t.pos + t.n, step)); };
  int64_t items = 0, total = 0, single = 0, longest = steps(tiles[0]);
  for (int i = 0; i < n; i++) {
    int64_t packed = int64_t(div_up(tiles[i].n, rows)) * kv_heads;
    items += packed, total += packed * steps(tiles[i]), single += heads * steps(tiles[i]);
  }
  const double unpacked = cost(int64_t(n) * heads, single, longest, sms);
  double best = cost(items, total, longest, sms);
  int64_t per = longest; // tiles of K of a part, at most
  auto consider = [&](int64_t p) {
    p = std::max(p, int64_t(div_up(longest, MOST)));
    if (p >= longest) return;
    int64_t count = 0, used = 0;
    for (int i = 0; i < n; i++) {
      int64_t packed = div_up(tiles[i].n, rows), parts = div_up(steps(tiles[i]), p);
      count += packed * parts * kv_heads;
      if (parts > 1) used += packed * parts;
    }
    double c = cost(count, total, p, sms) + MERGE;
    if (used <= slots(sms, kv_heads) && c < best) best = c, per = p;
  };
  if (split && best > 1.2 * double(total) / sms) {
    for (int rounds = 1; rounds <= 3; rounds++)
      if (int64_t parts = rounds * sms / items; parts > 1) consider(div_up(longest, parts));
    consider(div_up(total, sms));
  }
  if (best > 0.95 * unpacked) return false;
  int slot = 0;
  for (int i = 0; i < n; i++) {
    const xk_tile &t = tiles[i];
    for (int j = 0; j < t.n; j += rows) {
      int m = std::min(rows, t.n - j), k = div_up(t.pos + j + m, step), parts = div_up(k, per), first = 0;
      for (int s = 0; s < parts; s++) {
        int size = k / parts + (s < k % parts);
        plan->parts.push_back({t.row + j, m, t.pos + j, t.table, first, first + size - 1, parts > 1 ? slot + s : -1, 0});
        first += size;
      }
      if (parts > 1) plan->merges.push_back({t.row + j, m, slot, parts}), slot += parts;
    }
  }
  std::stable_sort(plan->parts.begin(), plan->parts.end(), [](const xk_part &x, const xk_part &y) { return x.last - x.first > y.last - y.first; });
  return true;
}
