// Drawing on the device: bias, ban, penalties, temperature, top-k, top-p, min-p,
// draw. Semantics: kernels/DESIGN.md, section 5.
//
// A cluster of CTAs has one sample, each CTA a span of the ids and each warp a
// part of that, whose logits are read once and stay in shared memory and
// registers. Their masses are exp((x - max) / T) in units of 2^-31, integers, so
// that no order of sums matters and a draw is the same on every run and for every
// cluster size.
//
//   arrive   bulk copies bring the span; what has arrived is counted in bins of
//            1/128 octave, whose place a sample of the row fixes
//   bracket  a cut (the k-th token, or the one at which mass p is reached) is
//            estimated from the counts: a bin, or two
//   sweep    the one pass over all masses: exact sums, above the bracket and in
//            it, and a list of the tokens in it
//   resolve  the exact cut, in the list. Where the sums say that it is elsewhere,
//            or tokens are too many to list, what is left of the masses is counted
//            in equal parts, for a narrower bracket
//   pick     a warp by its sum, a row of that warp, a token of that row
//
// Oracle: the sorting sampler of sampler_test.go, kernels/cpu, chi-square, and
// `probe check draw` to the bit.
#include "draw.cuh"

#ifdef DRAW_TIMES
__device__ long long draw_times[256][16];
#define STAMP(i) do { if (threadIdx.x == 0 && blockIdx.x < 256) draw_times[blockIdx.x][i] = clock64(); } while (0)
#else
#define STAMP(i)
#endif

static __device__ __forceinline__ float adjusted(float x, const xk_adjust &a, const xk_sample &s) {
  x += a.bias;
  if (a.flags & XK_BAN) x = -INFINITY;
  if ((a.flags & XK_SEEN) && s.repetition != 1 && s.repetition != 0) x = x > 0 ? x / s.repetition : x * s.repetition;
  if (a.count > 0) x = __fsub_rn(__fsub_rn(x, __fmul_rn(s.frequency, a.count)), s.presence);
  return x;
}

// Philox4x32-10, the first 53 bits as kernels/DESIGN.md wants them.
static __device__ double uniform(const xk_sample &s) {
  uint32_t c0 = s.pos_lo, c1 = s.pos_hi, c2 = s.choice, c3 = 0, k0 = s.seed_lo, k1 = s.seed_hi;
#pragma unroll 1
  for (int i = 0; i < 10; i++) {
    uint32_t h0 = __umulhi(0xd2511f53u, c0), l0 = 0xd2511f53u * c0;
    uint32_t h1 = __umulhi(0xcd9e8d57u, c2), l1 = 0xcd9e8d57u * c2;
    c0 = h1 ^ c1 ^ k0, c1 = l1, c2 = h0 ^ c3 ^ k1, c3 = l0;
    k0 += 0x9e3779b9u, k1 += 0xbb67ae85u;
  }
  return double((uint64_t(c1) << 32 | c0) >> 11) * (1.0 / 9007199254740992.0);
}

static __device__ __forceinline__ float warp_max(float v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, o));
  return v;
}

// The phases are functions of their own, so that none takes the registers that
// the loops of another need. They leave what they find in shared memory.

// f(two rows, number of the first) of all of this warp's. One copy of f's code
// serves all; what is not in shared memory is asked for two rows ahead.
template <typename F> static __device__ __forceinline__ void each_two(const Part &p, F f) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float4 a, b, c, d;
#pragma unroll 1
  for (int j = 0; j < p.rows; j += 2) {
    if (j < SMEM_ROWS) {
      a = p.m.slots[warp][j][lane], b = p.m.slots[warp][j + 1][lane];
    } else {
      a = c, b = d;
      if (p.unclean) a = p.cleaned(a), b = p.cleaned(b);
    }
    if (j + 2 >= SMEM_ROWS && j + 2 < p.rows) c = p.load(p.first_id(warp, j + 2)), d = p.load(p.first_id(warp, j + 3));
    f(a, b, j);
  }
}

// Bins of log weight: four steps of the last place of a float from 2^23 up are one.
struct Scale {
  static constexpr float FIRST = 8388608.0f;
  float origin, scale; // scale * x + origin is FIRST + 4 bin
  // log2 of the weight at the lower edge of a bin.
  __device__ __forceinline__ float edge(const Part &p, float bin) const { return ((4 * bin - 0.5f) + (FIRST - origin)) / (4 * PER_OCTAVE) - p.top * p.inverse; }
};
// mine: one of a thousand logits of the row, the same in all CTAs; the greatest is
// not far below the greatest of all.
static __device__ __forceinline__ Scale place(const Part &p, float mine) {
  mine = warp_max(mine);
  if (threadIdx.x % 32 == 0) p.m.errors[threadIdx.x / 32] = mine;
  __syncthreads();
  float reference = warp_max(p.m.errors[threadIdx.x % 32]);
  if (!(fabsf(reference) < 1e30f)) reference = 0;
  const float scale = 4 * PER_OCTAVE * p.inverse;
  return {(Scale::FIRST + 4 * (BINS - 1 - HEADROOM)) - reference * scale, scale};
}

// Asks for the warp's logits; `held` has those that do not go to shared memory.
static __device__ __forceinline__ void ask(const Part &p, float4 (&held)[HELD]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int begin = warp * p.rows * ROW, limit = min(p.rows, SMEM_ROWS) * ROW, valid = max(0, min(p.end - p.base - begin, limit)), whole = valid / 4 * 4;
  float *slots = &p.m.slots[warp][0][0].x;
  if (lane == 0) {
#pragma unroll 1
    for (int c = 0; c < CHUNKS; c++) {
      int bytes = 4 * max(0, min(whole - c * CHUNK * ROW, CHUNK * ROW));
      mbar_expect(&p.m.arrived[warp][c], bytes);
      if (bytes)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem_addr(slots + c * CHUNK * ROW)),
                     "l"(p.row + p.base + begin + c * CHUNK * ROW), "r"(bytes), "r"(smem_addr(&p.m.arrived[warp][c])) : "memory");
    }
  }
#pragma unroll 1
  for (int i = whole + lane; i < limit; i += 32) slots[i] = i < valid ? p.row[p.base + begin + i] : NOWHERE;
#pragma unroll
  for (int k = 0; k < HELD; k++)
    if (p.rows > SMEM_ROWS) held[k] = p.load(p.first_id(warp, SMEM_ROWS + k));
  __syncwarp();
}

// Counts what arrives, and finds the greatest.
struct Arrival {
  float top;
  bool unclean, infinite;
  Scale scale;
};
static __device__ __noinline__ Arrival arrive(Part p, bool counts, float sample) {
  DrawSmem &m = p.m;
  float4 held[HELD];
  ask(p, held);
  const Scale s = counts ? place(p, sample) : Scale{};
  STAMP(12);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float most = -INFINITY, bad = 0; // NaN if there is an infinite one, or a NaN
  const uint32_t bins = smem_addr(m.bins);
#pragma unroll 1
  for (int j = 0; j < p.rows; j += 2) {
    float4 q[2];
    if (j < SMEM_ROWS) {
      mbar_wait(&m.arrived[warp][j / CHUNK], 0);
      q[0] = m.slots[warp][j][lane], q[1] = m.slots[warp][j + 1][lane];
    } else {
      q[0] = j == SMEM_ROWS ? held[0] : held[2], q[1] = j == SMEM_ROWS ? held[1] : held[3];
    }
#pragma unroll
    for (int k = 0; k < 2; k++) {
      most = fmaxf(fmaxf(fmaxf(most, q[k].x), fmaxf(q[k].y, q[k].z)), q[k].w);
      bad = fmaf(q[k].x, 0, fmaf(q[k].y, 0, fmaf(q[k].z, 0, fmaf(q[k].w, 0, bad))));
    }
    if (counts) {
#pragma unroll
      for (int i = 0; i < 8; i++) {
        float f = fminf(fmaxf(fmaf(p.component(q[i / 4], i % 4), s.scale, s.origin), Scale::FIRST), Scale::FIRST + (4 * BINS - 1));
        asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(bins + (__float_as_uint(f) & (4 * BINS - 4))) : "memory");
      }
    }
  }
  STAMP(2);
  most = warp_max(most);
  const bool warp_bad = __any_sync(~0u, !(bad == 0));
  if (lane == 0) {
    m.weights[warp] = most;
    if (warp_bad) m.unclean = 1;
  }
  __syncthreads();
  if (warp == 0) {
    most = warp_max(m.weights[lane]);
    if (lane == 0) m.top = most;
  }
  cluster_sync();
  p.top = -INFINITY;
  p.unclean = p.infinite = false;
#pragma unroll 2
  for (int r = 0; r < p.ranks; r++) p.top = fmaxf(p.top, p.of(r).top), p.unclean |= p.of(r).unclean != 0;
  if (p.unclean) { // rare
    p.infinite = p.top == INFINITY;
#pragma unroll 1
    for (int j = 0; j < min(p.rows, SMEM_ROWS); j++) m.slots[warp][j][lane] = p.cleaned(m.slots[warp][j][lane]);
    if (p.infinite) p.top = 0;
  }
  return {p.top, p.unclean, p.infinite, s};
}

// The lowest id of the greatest logit. All are -inf or NaN: then of any that is
// not NaN, which is read again.
static __device__ __noinline__ int lowest(Part p) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int mine = INT_MAX;
  if (p.top > NOWHERE) {
    each_two(p, [&](float4 a, float4 b, int j) {
      int id = p.first_id(warp, j);
#pragma unroll
      for (int i = 7; i >= 0; i--)
        if (p.component(i < 4 ? a : b, i % 4) == p.top) mine = min(mine, id + i / 4 * ROW + i % 4);
    });
  } else {
#pragma unroll 1
    for (int id = p.base + int(threadIdx.x); id < p.end; id += THREADS)
      if (p.row[id] == p.row[id]) mine = min(mine, id);
  }
  mine = __reduce_min_sync(~0u, mine);
  if (lane == 0) atomicMin(&p.m.lowest, mine);
  cluster_sync();
#pragma unroll 2
  for (int r = 0; r < p.ranks; r++) mine = min(mine, p.of(r).lowest);
  return mine == INT_MAX ? 0 : mine;
}

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

// The mass that is kept, of m.kept.
static __device__ __forceinline__ u64 kept_mass(const Part &p) {
  u64 all = 0;
#pragma unroll 2
  for (int r = 0; r < p.ranks; r++) all += p.m.kept[r][threadIdx.x % 32];
  return warp_sum(uint64_t(all));
}

// Inverts the cumulative mass of what c keeps, in order of id; the thread that has
// the token says so.
static __device__ __noinline__ void pick(Part p, Cut c, u64 total, int32_t *token, int32_t *device_token) {
  DrawSmem &m = p.m;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  u64 target = u64(m.u * double(total)), from = 0;
  if (target >= total && total > 0) target = total - 1;
  int owner = -1; // the warp of this CTA whose rows have it
#pragma unroll 1
  for (int r = 0; r <= p.rank && owner < 0; r++) {
    u64 mine = m.kept[r][lane], upto = from + warp_scan(mine);
    unsigned has = __ballot_sync(~0u, upto - mine <= target && target < upto);
    if (has && r < p.rank) return;
    if (has) owner = __ffs(has) - 1;
    from = __shfl_sync(~0u, has ? upto - mine : upto, has ? owner : 31);
  }
  if (owner < 0) return;
  uint32_t v[4] = {};
  u64 sum = 0;
  if (warp < p.rows) {
    float4 q = p.at(owner, warp);
    int id = p.first_id(owner, warp);
#pragma unroll
    for (int e = 0; e < 4; e++) {
      v[e] = p.mass(p.component(q, e));
      if (!v[e] || !c.keeps(v[e], id + e)) v[e] = 0;
      sum += v[e];
    }
  }
  const u64 upto = warp_scan(sum);
  if (lane == 31) m.rows[warp] = upto;
  __syncthreads();
  const u64 here = m.rows[lane], before = from + warp_scan(here) - here;
  u64 at = __shfl_sync(~0u, before, warp) + upto - sum;
#pragma unroll
  for (int e = 0; e < 4; e++) {
    if (at <= target && target < at + v[e]) *token = *device_token = p.first_id(owner, warp) + e;
    at += v[e];
  }
}

// The draw under the sample's filters.
static __device__ __forceinline__ void draw(Part &p, Scale scale, const xk_sample &s, int vocab, int32_t *token, int32_t *device_token) {
  DrawSmem &m = p.m;
  Cut cut = {0, INT_MAX};
  bool summed = false; // m.kept and total are those of cut
  u64 total = 0;
  int sweeps = 0;
#pragma unroll 1
  for (int filter = 0; filter < 3; filter++) { // top-k, then top-p of what it left; then all that is kept, if it is not summed
    if (filter == 0 && (s.top_k <= 0 || s.top_k >= vocab)) continue;
    if (filter == 1 && s.top_p >= 1) continue;
    Filter f = {filter == 0, filter == 2, s.top_p, filter == 0 ? s.top_k : cut.mass ? need_of(s.top_p, total) : 0, cut};
    if (f.last) {
      const uint32_t least = mass_of(fminf(fmaxf(s.min_p, 0.0f), 1.0f));
      if (least > cut.mass) cut = {least, INT_MAX}, summed = false;
      if (summed) break;
      if (cut.id != INT_MAX) {
        total = sums(p, cut, cut, false);
        break;
      }
    }
    Bracket known = {max(cut.mass, 1u), ONE + 1}; // where the cut is, or (last) ends
    u64 over = 0;                                 // the sum above
#pragma unroll 1
    for (int round = 0;; round++) {
      int shift = -1;
      if (round) { // parts of what is left
        shift = max(0, 32 - __clz(known.hi - 1 - known.lo) - 12);
        count_parts(p, known, shift);
      }
      Bracket b = {known.lo, known.lo};
      if (!f.last) {
        const bool part = f.need == 0;
        b = bracket(p, scale, {part ? s.top_p : float(f.need - over) * (f.by_count ? 1.0f : 1.0f / ONE), f.by_count, part, shift, known.lo});
        b.lo = min(max(b.lo, known.lo), known.hi - 1), b.hi = max(min(b.hi, known.hi), b.lo + 1);
      }
      STAMP(4);
      if (sweeps++) cluster_sync(); // the others are done with the lists
      if (f.by_count) sweep<true>(p, b);
      else sweep<false>(p, b);
      STAMP(5);
      const Settled found = settle(p, b, f);
      STAMP(6);
      if (found == FOUND) {
        if (!f.last) cut = m.cut;
        total = kept_mass(p), summed = true;
        break;
      }
      if (!f.need) f.need = need_of(s.top_p, m.all);
      if (found == EQUAL || round > 8) {
        cut = exact(p, f.need, f.by_count, cut, found == EQUAL ? b : known);
        total = sums(p, cut, cut, false), summed = true;
        break;
      }
      if (found == BELOW && b.lo == known.lo) { // all that there is
        if (!cut.mass) total = m.all;
        break;
      }
      if (found == ABOVE) known.lo = b.hi;
      if (found == BELOW) known.hi = b.lo, over = m.above_all + m.inside_all;
      if (found == MANY) known = b, over = m.above_all;
    }
  }
  STAMP(7);
  pick(p, cut, total, token, device_token);
}

static __global__ __launch_bounds__(THREADS, 1) void draw_kernel(Sampling p, int span) {
  extern __shared__ __align__(128) uint8_t raw[];
  STAMP(0);
  Part d(*reinterpret_cast<DrawSmem *>(raw));
  DrawSmem &m = d.m;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int index = blockIdx.x / d.ranks;
  reinterpret_cast<uint4 *>(m.bins)[threadIdx.x] = make_uint4(0, 0, 0, 0);
  if (lane == 0) {
    for (int c = 0; c < CHUNKS; c++) mbar_init(&m.arrived[warp][c], 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (threadIdx.x == 0) m.unclean = 0, m.lowest = INT_MAX;
  __syncthreads();
  pdl_wait();
  pdl_next();
  const xk_sample s = p.samples[index];
  if (s.final < 0) return; // all CTAs of the cluster
  d.base = d.rank * span, d.end = max(d.base, min(d.base + span, p.vocab));
  d.rows = 2 * div_up(d.end - d.base, 2 * WARPS * ROW);
  const float *logits = p.logits + int64_t(s.final - p.first_final) * p.stride;
  d.row = logits;
  const bool greedy = s.temperature == 0 || s.top_k == 1;
  const bool cuts = !greedy && ((s.top_k > 0 && s.top_k < p.vocab) || s.top_p < 1);
  d.inverse = greedy ? 0 : fminf(1.4426950408889634f / s.temperature, 1e30f);
  const float sample = cuts ? __ldcg(logits + int64_t(threadIdx.x) * p.vocab / THREADS) : 0; // before all else: the copies are long
  if (s.n_adjust > 0) {
    float *to = p.scratch + int64_t(index) * p.stride;
#pragma unroll 1
    for (int i = d.base + threadIdx.x; i < d.end; i += THREADS) to[i] = logits[i];
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < s.n_adjust; i += THREADS) {
      const xk_adjust &a = p.adjust[s.adjust + i];
      if (a.id >= d.base && a.id < d.end) to[a.id] = adjusted(to[a.id], a, s);
    }
    fence_async_global(); // bulk copies read it
    __syncthreads();
    d.row = to;
  }
  STAMP(1);
  if (!greedy && warp == WARPS - 1) {
    double u = uniform(s);
    if (lane == 0) m.u = u;
  }
  const Arrival a = arrive(d, cuts, sample);
  d.top = a.top, d.unclean = a.unclean, d.infinite = a.infinite;
  STAMP(3);
  if (greedy || d.top <= NOWHERE) {
    int token = lowest(d);
    if (d.rank == 0 && threadIdx.x == 0) p.tokens[s.out] = p.device_tokens[index] = token;
  } else {
    draw(d, a.scale, s, p.vocab, p.tokens + s.out, p.device_tokens + index);
  }
  STAMP(8);
  cluster_sync(); // nobody reads an exited CTA's memory
}

// ---------------------------------------------------------------- launchers

int32_t xk_draw(const Launch &l, const Sampling &s) {
  int cluster = 1; // more CTAs a sample while multiprocessors are free
  while (cluster < MAX_CLUSTER && (s.vocab > cluster * SPAN || (2 * cluster * s.n_samples <= s.sms && s.vocab > cluster * WARPS * ROW))) cluster *= 2;
  int span = int(round_up(div_up(s.vocab, cluster), 4));
  if (span > SPAN) return xk_fail(XK_INVALID, "sampler: vocabulary of %d, at most %d", s.vocab, MAX_CLUSTER * SPAN);
  return launch_clusters(l, draw_kernel, s.n_samples * cluster, THREADS, sizeof(DrawSmem), cluster, s, span);
}

int32_t xk_sampler_init() {
  XK_TRY(cudaFuncSetAttribute(draw_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(sizeof(DrawSmem))));
  return XK_OK;
}
