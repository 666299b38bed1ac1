// Where draw.cu's kernel cuts the tokens of a sample: bracket, sweep, resolve.
//
// Each phase is a function of its own, so that none takes the registers that the
// loops of another need. They leave what they find in shared memory.
#pragma once

#include "draw.cuh"

// Bins of log weight: four steps of the last place of a float from 2^23 up are one.
struct Scale {
  static constexpr float FIRST = 8388608.0f;
  float origin, scale; // scale * x + origin is FIRST + 4 bin
  // log2 of the weight at the lower edge of a bin.
  __device__ __forceinline__ float edge(const Part &p, float bin) const { return ((4 * bin - 0.5f) + (FIRST - origin)) / (4 * PER_OCTAVE) - p.top * p.inverse; }
};
// Where the sum from above reaches need, of tokens, of weight, or (part) of all
// weight: by the bins of arrive, or (shift >= 0) parts of 2^shift masses from lo up.
struct Wanted {
  float need;
  bool by_count, part;
  int shift;
  uint32_t lo;
};
static __device__ __noinline__ Bracket bracket(Part p, Scale s, Wanted w) {
  DrawSmem &m = p.m;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = BINS - EACH * (int(threadIdx.x) + 1); // and those above it
  static_assert(EACH == 4, "a vector a thread");
  uint4 n = {};
#pragma unroll 2
  for (int r = 0; r < p.ranks; r++) {
    uint4 theirs = *reinterpret_cast<const uint4 *>(&p.of(r).bins[first]);
    n.x += theirs.x, n.y += theirs.y, n.z += theirs.z, n.w += theirs.w;
  }
  STAMP(11);
  if (threadIdx.x == 0) m.edge_lo = m.edge_hi = 0;
  // A token's weight is not known to some part of its bin's width, evenly spread.
  const bool linear = w.shift >= 0;
  const float width = ldexpf(1.0f, max(w.shift, 0) - 31), spread = 0.2887f * (linear ? width : 0.693147f / PER_OCTAVE);
  const uint32_t counts[EACH] = {n.w, n.z, n.y, n.x};
  float here[EACH], sum = 0, error = 0;
#pragma unroll
  for (int j = 0; j < EACH; j++) {
    const int bin = first + EACH - 1 - j;
    float each = linear ? float(w.lo) * (1.0f / ONE) + (bin + 0.5f) * width : bin == 0 ? 0.0f : weight_of(fminf(s.edge(p, bin + 0.5f), 0));
    float off = spread * (linear ? 1.0f : each);
    sum += here[j] = float(counts[j]) * (w.by_count ? 1.0f : each);
    error += float(counts[j]) * off * off;
  }
  const float upto = warp_scan(sum);
#pragma unroll
  for (int o = 16; o; o >>= 1) error += __shfl_xor_sync(~0u, error, o);
  if (lane == 31) m.weights[warp] = upto, m.errors[warp] = error;
  __syncthreads();
  const float warps = warp_scan(m.weights[lane]), all = __shfl_sync(~0u, warps, 31);
  float before = __shfl_sync(~0u, warps, max(warp - 1, 0));
  before = (warp ? before : 0) + upto - sum;
  error = m.errors[lane];
#pragma unroll
  for (int o = 16; o; o >>= 1) error += __shfl_xor_sync(~0u, error, o);
  if (w.part) w.need *= all;
  const float slack = w.by_count ? 0 : 4 * sqrtf(error) + 0.0005f * fmaxf(fminf(w.need, all - w.need), 0) + 2e-6f * all;
  const float from = fmaxf(w.need - slack, FLT_MIN), to = w.need + slack;
#pragma unroll
  for (int j = 0; j < EACH; j++) {
    float after = before + here[j];
    if (before < from && after >= from) m.edge_hi = first + EACH - 1 - j;
    if (before < to && after >= to) m.edge_lo = first + EACH - 1 - j;
    before = after;
  }
  __syncthreads();
  const int below = m.edge_lo, above = m.edge_hi;
  Bracket b = {1, ONE + 1};
  if (linear) {
    b.lo = w.lo + (uint32_t(below) << w.shift);
    b.hi = uint32_t(min(u64(w.lo) + (u64(above + 1) << w.shift), u64(ONE) + 1));
  } else {
    const float margin = 1.0f / (16 * PER_OCTAVE);
    if (below > 0) b.lo = max(mass_of(weight_of(fminf(s.edge(p, below) - margin, 0))), 1u);
    if (above < BINS - 1) b.hi = max(mass_of(weight_of(fminf(s.edge(p, above + 1) + margin, 0))), b.lo) + 1;
  }
  return b;
}

// Counts the masses of b in parts of 2^shift.
static __device__ __noinline__ void count_parts(Part p, Bracket b, int shift) {
  const uint32_t bins = smem_addr(p.m.bins);
  reinterpret_cast<uint4 *>(p.m.bins)[threadIdx.x] = make_uint4(0, 0, 0, 0);
  __syncthreads();
  each_two(p, [&](float4 x, float4 y, int) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      uint32_t v = p.mass(p.component(i < 4 ? x : y, i % 4)) - b.lo;
      if (v < b.hi - b.lo) asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(bins + (v >> shift << 2)) : "memory");
    }
  });
  cluster_sync();
}

// Sums the masses above the bracket by warps, and all; lists those in it.
template <bool COUNT> static __device__ __noinline__ void sweep(Part p, Bracket b) {
  DrawSmem &m = p.m;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t low = 0, above_low = 0, tally = 0;
  float about = 0, above_about = 0;
  u64 inside = 0;
  const uint32_t listed = smem_addr(&m.listed[warp]), list = smem_addr(m.list[warp]);
  if (lane == 0) m.listed[warp] = 0;
  __syncwarp();
  each_two(p, [&](float4 x, float4 y, int j) {
    uint32_t v[8];
    bool any = false;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      float w = weight_of((p.component(i < 4 ? x : y, i % 4) - p.top) * p.inverse);
      v[i] = mass_of(w);
      low += v[i], about += w;
      bool over = v[i] >= b.hi;
      if (over) above_low += v[i], above_about += w;
      if (COUNT) tally += over;
      any |= !over && v[i] >= b.lo;
    }
    if (any) { // few
      int id = p.first_id(warp, j);
#pragma unroll
      for (int i = 0; i < 8; i++)
        if (v[i] - b.lo < b.hi - b.lo) {
          uint32_t at;
          asm volatile("atom.shared.add.u32 %0, [%1], 1;" : "=r"(at) : "r"(listed) : "memory");
          if (at < LIST) asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(list + at * 8), "r"(v[i]), "r"(id + i / 4 * ROW + i % 4) : "memory");
          inside += v[i];
        }
    }
  });
  STAMP(9);
  u64 total = warp_sum(uint64_t(sum_near(u64(about * 2147483648.0f), low)));
  u64 above = warp_sum(uint64_t(sum_near(u64(above_about * 2147483648.0f), above_low)));
  if (__any_sync(~0u, inside != 0)) inside = warp_sum(uint64_t(inside));
  if (COUNT) tally = __reduce_add_sync(~0u, tally);
  if (lane == 0) m.total[warp] = total, m.above[warp] = above, m.inside[warp] = inside, m.tally[warp] = tally;
  cluster_sync();
}

// Tokens that the cluster's warps of this number listed, one a lane and rank; no
// mass: none.
struct Listed {
  uint2 of[MAX_CLUSTER];
  template <typename F> __device__ __forceinline__ void each(int ranks, F f) const {
#pragma unroll
    for (int r = 0; r < MAX_CLUSTER; r++) {
      if (r >= ranks) break;
      f(of[r], r);
    }
  }
};

// The cut among what is listed, of those that c keeps; above: of greater ones.
// False: it is not there, or more are equal than a warp orders.
static __device__ __forceinline__ bool resolve(const Part &p, const Listed &l, Bracket b, u64 need, u64 above, bool by_count, Cut c) {
  DrawSmem &m = p.m;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
  for (;;) {
    const int shift = max(0, 32 - __clz(b.hi - 1 - b.lo) - 6);
    if (threadIdx.x < PARTS) m.parts[threadIdx.x][0] = m.parts[threadIdx.x][1] = m.parts[threadIdx.x][2] = 0;
    if (threadIdx.x == 0) m.found = -1, m.n_few = 0;
    __syncthreads();
    l.each(p.ranks, [&](uint2 t, int) {
      if (t.x - b.lo >= b.hi - b.lo || !c.keeps(t.x, t.y)) return;
      uint32_t *part = m.parts[(t.x - b.lo) >> shift];
      atomicAdd(&part[0], 1u), atomicAdd(&part[1], t.x & 0xffff), atomicAdd(&part[2], t.x >> 16);
    });
    __syncthreads();
    if (warp == 0) {
      auto of_part = [&](int i) { return by_count ? m.parts[i][0] : m.parts[i][1] + (u64(m.parts[i][2]) << 16); };
      const int i = PARTS - 1 - 2 * lane;
      const u64 upper = of_part(i), lower = of_part(i - 1), upto = above + warp_scan(upper + lower), before = upto - upper - lower;
      if (before < need && upto >= need) {
        bool second = before + upper < need;
        m.found = i - second, m.found_above = before + (second ? upper : 0), m.found_count = m.parts[i - second][0];
      }
    }
    __syncthreads();
    if (m.found < 0) return false;
    b.lo += uint32_t(m.found) << shift, b.hi = min(b.hi, b.lo + (1u << shift)), above = m.found_above;
    const uint32_t count = m.found_count;
    if (count <= FEW) break;
    if (!shift) return false;
    __syncthreads();
  }
  l.each(p.ranks, [&](uint2 t, int) {
    if (t.x - b.lo < b.hi - b.lo && c.keeps(t.x, t.y)) m.few[atomicAdd(&m.n_few, 1)] = t;
  });
  __syncthreads();
  if (warp == 0) {
    const int n = m.n_few;
    const uint2 mine = lane < n ? m.few[lane] : make_uint2(0, INT_MAX);
    u64 before = above;
#pragma unroll 1
    for (int i = 0; i < n; i++) {
      uint2 other = m.few[i];
      if (other.x > mine.x || (other.x == mine.x && other.y < mine.y)) before += by_count ? 1 : other.x;
    }
    if (lane < n && before < need && before + (by_count ? 1 : mine.x) >= need) m.cut = {mine.x, int(mine.y)};
  }
  __syncthreads();
  return true;
}

// What a filter wants of the tokens that c keeps: so many, or so much mass, which
// is 0 until the mass of all is known, and then that part of it.
struct Filter {
  bool by_count, last;
  float part;
  u64 need;
  Cut c;
};
enum Settled { FOUND, ABOVE, BELOW, MANY, EQUAL };
// Brings the cluster's sums together and looks for the cut in the bracket. Leaves
// the sums in m, and the mass that the cut (last: the bracket) keeps by warps.
static __device__ __noinline__ Settled settle(Part p, Bracket b, Filter f) {
  DrawSmem &m = p.m;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Listed l;
#pragma unroll
  for (int r = 0; r < MAX_CLUSTER; r++) {
    if (r >= p.ranks) break;
    const DrawSmem &o = p.of(r);
    l.of[r] = o.list[warp][lane];
    if (lane >= o.listed[warp]) l.of[r] = make_uint2(0, 0);
    if (lane == 0) m.kept[r][warp] = o.above[warp];
  }
  if (warp < 4) {
    u64 sum = 0;
    uint32_t longest = 0;
#pragma unroll 2
    for (int r = 0; r < p.ranks; r++) {
      const DrawSmem &o = p.of(r);
      sum += warp == 0 ? o.total[lane] : warp == 1 ? (f.by_count ? o.tally[lane] : o.above[lane]) : f.by_count ? o.listed[lane] : o.inside[lane];
      longest = max(longest, o.listed[lane]);
    }
    sum = warp_sum(uint64_t(sum)), longest = __reduce_max_sync(~0u, longest);
    if (lane == 0) {
      if (warp == 0) m.all = sum;
      if (warp == 1) m.above_all = sum;
      if (warp == 2) m.inside_all = sum;
      if (warp == 3) m.longest = longest;
    }
  }
  __syncthreads();
  STAMP(10);
  if (!f.last) {
    const u64 need = f.need ? f.need : need_of(f.part, m.all), above = m.above_all, inside = m.inside_all;
    if (need <= above) return ABOVE;
    if (need > above + inside) return BELOW;
    if (m.longest > LIST) return b.hi - b.lo > 1 ? MANY : EQUAL;
    if (!resolve(p, l, b, need, above, f.by_count, f.c)) return EQUAL;
    const Cut cut = m.cut;
    l.each(p.ranks, [&](uint2 t, int r) {
      uint32_t v = t.x && cut.keeps(t.x, t.y) ? t.x : 0;
      u64 sum = __reduce_add_sync(~0u, v & 0xffff) + (u64(__reduce_add_sync(~0u, v >> 16)) << 16);
      if (lane == 0) m.kept[r][warp] += sum;
    });
    __syncthreads();
  }
  return FOUND;
}
