// Drawing on the device: bias, ban, penalties, temperature, top-k, top-p, min-p,
// draw. Semantics: kernels/DESIGN.md, section 5.
//
// A cluster of CTAs has one sample, each CTA a span of the ids, whose logits
// are read once and stay in registers and shared memory. They become masses:
// exp((x - max) / T) in units of 2^-31, integers, so that no order of sums
// matters and a draw is the same on every run and for every cluster size.
//
// A cut (the k-th token, or the one at which mass p is reached) is found in
// rounds over the resident masses. The first counts tokens in bins of 1/64
// octave; bounds of the bins' masses leave a few bins in question. The next
// rounds sum the masses of 2048 equal parts of what is in question, exactly,
// until the part that has the cut has so few tokens that a warp can order them.
// What a sample's mask forbids becomes NaN as it is read, which is never drawn.
// The CTAs read each other's histograms and lists through distributed shared
// memory.
// Oracle: the sorting sampler of sampler_test.go, kernels/cpu, and chi-square.
#include <climits>
#include <cooperative_groups.h>

#include "common.cuh"

namespace cg = cooperative_groups;
using u64 = unsigned long long;

static constexpr int THREADS = 1024, WARPS = THREADS / 32;
static constexpr int ROW = 4 * THREADS;              // ids that a row of slots has, four a thread
static constexpr int REG_ROWS = 6, SMEM_ROWS = 10, ROWS = REG_ROWS + SMEM_ROWS;
static constexpr int SPAN = ROWS * ROW;              // ids of a CTA at most
static constexpr int BINS = 2048;                    // two a thread
static constexpr int OCTAVES = 24, PARTS_LOG2 = 7;   // that bins of 1/128 octave cover; bin 0 is what lies below
static constexpr int LOG_BINS = (OCTAVES << PARTS_LOG2) + 2, LOG_EACH = 4; // a thread's
static_assert(LOG_BINS <= LOG_EACH * THREADS && 31 - OCTAVES >= PARTS_LOG2, "edges of bins are integers");
static constexpr int LIST = 32;                      // tokens that one warp can order
static constexpr uint32_t ONE = 1u << 31;            // mass of the most likely token

static __device__ __forceinline__ float weight_of(float z) { // 2^z
  float w;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(w) : "f"(z));
  return w;
}
// Weight (0 to 1) to mass, rounded down, without the slow conversion.
static __device__ __forceinline__ uint32_t mass_of(float w) {
  uint32_t bits = __float_as_uint(w), m;
  asm("shr.u32 %0, %1, %2;" : "=r"(m) : "r"((bits << 8) | 0x80000000u), "r"(127 - (bits >> 23))); // a shift over 31 gives 0
  return m;
}
static __device__ __forceinline__ int log_bin(float w) { return max(int(__float_as_uint(w) >> (23 - PARTS_LOG2)) - ((127 - OCTAVES) << PARTS_LOG2) + 1, 0); }
static __device__ __forceinline__ uint32_t bin_edge(int bin) { // least mass of a bin
  return bin == 0 ? 0 : bin >= LOG_BINS ? ONE + 1 : mass_of(__uint_as_float(uint32_t(bin - 1 + ((127 - OCTAVES) << PARTS_LOG2)) << (23 - PARTS_LOG2)));
}

static __device__ __forceinline__ bool shapes(const xk_sample &s) { return s.n_adjust > 0; }

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
  for (int i = 0; i < 10; i++) {
    uint32_t h0 = __umulhi(0xd2511f53u, c0), l0 = 0xd2511f53u * c0;
    uint32_t h1 = __umulhi(0xcd9e8d57u, c2), l1 = 0xcd9e8d57u * c2;
    c0 = h1 ^ c1 ^ k0, c1 = l1, c2 = h0 ^ c3 ^ k1, c3 = l0;
    k0 += 0x9e3779b9u, k1 += 0xbb67ae85u;
  }
  return double((uint64_t(c1) << 32 | c0) >> 11) * (1.0 / 9007199254740992.0);
}

struct Cut { // keeps greater masses, and equal ones with ids up to id
  uint32_t mass;
  int id;
  __device__ __forceinline__ bool keeps(uint32_t m, int i) const { return m > mass || (m == mass && i <= id); }
};

struct DrawSmem {
  uint4 slots[SMEM_ROWS][THREADS];
  uint32_t logs[LOG_BINS];
  uint32_t count[2][BINS], low[2][BINS], high[2][BINS]; // of two rounds: tokens, sums of the masses' halves
  u64 cells[ROWS * WARPS]; // kept mass of 128 ids
  u64 sums[WARPS];
  u64 shared[6];           // what others of the cluster read: above of two rounds, the total, the kept mass, two counts of equals
  float tops[WARPS], top;
  uint2 list[LIST]; // mass, id
  uint32_t lo, hi, found_count;
  u64 found_above;
  int found, token, listed;
};

// Exclusive sum over the CTA; the total in *all.
static __device__ u64 block_scan(DrawSmem &m, u64 v, u64 *all) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  auto inclusive = [&](u64 x) {
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
      u64 other = __shfl_up_sync(~0u, x, o);
      if (lane >= o) x += other;
    }
    return x;
  };
  u64 sum = inclusive(v);
  __syncthreads();
  if (lane == 31) m.sums[warp] = sum;
  __syncthreads();
  u64 warps = inclusive(m.sums[lane]);
  *all = __shfl_sync(~0u, warps, 31);
  u64 before = __shfl_sync(~0u, warps, max(warp - 1, 0));
  return (warp ? before : 0) + sum - v;
}

// One sample in one CTA of its cluster. Everything is inlined: the masses stay in
// registers.
struct Draw {
  DrawSmem &m;
  cg::cluster_group cluster;
  int base, end; // ids of this CTA
  int round = 0, equals = 0; // of cuts, and of their search among equals
  uint32_t kept[4 * REG_ROWS]; // logits, later masses; the other rows are in m.slots

  __device__ Draw(DrawSmem &m) : m(m), cluster(cg::this_cluster()) {}

  // f(mass, id) of every slot; beyond the span mass is 0.
  template <typename F> __device__ __forceinline__ void each(F f) {
    int id = base + 4 * int(threadIdx.x);
#pragma unroll
    for (int i = 0; i < 4 * REG_ROWS; i++) f(kept[i], id + i / 4 * ROW + i % 4);
#pragma unroll 2
    for (int j = 0; j < SMEM_ROWS; j++) {
      uint4 v = m.slots[j][threadIdx.x];
      int at = id + (REG_ROWS + j) * ROW;
      f(v.x, at), f(v.y, at + 1), f(v.z, at + 2), f(v.w, at + 3);
    }
  }

  __device__ __forceinline__ u64 scan(u64 v, u64 *all) { return block_scan(m, v, all); }
  __device__ __forceinline__ u64 sum(u64 v) {
    u64 all;
    block_scan(m, v, &all);
    return all;
  }
  // f(mass, id) of the slots whose mass is in [lo, lo + width), which are few.
  template <typename F> __device__ __forceinline__ void each_in(uint32_t lo, uint32_t width, F f) {
    auto four = [&](uint4 v, int id) {
      if (min(min(v.x - lo, v.y - lo), min(v.z - lo, v.w - lo)) >= width) return;
#pragma unroll 1
      for (int e = 0; e < 4; e++, v.x = v.y, v.y = v.z, v.z = v.w)
        if (v.x - lo < width) f(v.x, id + e);
    };
    int id = base + 4 * int(threadIdx.x);
#pragma unroll
    for (int j = 0; j < REG_ROWS; j++) four(in_regs(j), id + j * ROW);
#pragma unroll 2
    for (int j = 0; j < SMEM_ROWS; j++) four(m.slots[j][threadIdx.x], id + (REG_ROWS + j) * ROW);
  }
  __device__ __forceinline__ uint4 in_regs(int j) const { return make_uint4(kept[4 * j], kept[4 * j + 1], kept[4 * j + 2], kept[4 * j + 3]); }

  // Sum over the cluster of what each CTA put in shared[i].
  __device__ __forceinline__ u64 over_cluster(int i) {
    u64 all = 0;
    for (unsigned r = 0; r < cluster.num_blocks(); r++) all += cluster.map_shared_rank(m.shared, r)[i];
    return all;
  }

  // Reads the logits and returns the greatest; -inf if there is none. What lies
  // beyond the span is -inf; NaN stays, maxima pass it over.
  // MASKED: ids without their bit in mask, which may be nullptr, are NaN.
  template <bool MASKED> __device__ __forceinline__ float read(const float *row, const uint32_t *mask) {
    int first = base + 4 * int(threadIdx.x);
    float top = -INFINITY;
    auto four = [&](int j) {
      int id = first + j * ROW;
      float4 v = make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
      if (id + 4 <= end) {
        v = __ldcg(reinterpret_cast<const float4 *>(row + id));
      } else if (id < end) {
        v.x = row[id];
        if (id + 1 < end) v.y = row[id + 1];
        if (id + 2 < end) v.z = row[id + 2];
      }
      if (MASKED && mask && id < end) { // four ids are in one word: base and rows are multiples of four
        const uint32_t may = __ldg(mask + id / 32) >> (id % 32);
        const float never = __uint_as_float(0x7fc00000);
        if (!(may & 1)) v.x = never;
        if (!(may & 2)) v.y = never;
        if (!(may & 4)) v.z = never;
        if (!(may & 8)) v.w = never;
      }
      return v;
    };
    auto see = [&](float4 v) {
      top = fmaxf(fmaxf(fmaxf(top, v.x), fmaxf(v.y, v.z)), v.w);
      return make_uint4(__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w));
    };
    float4 ahead[REG_ROWS];
#pragma unroll
    for (int j = 0; j < REG_ROWS; j++) ahead[j] = four(j);
#pragma unroll
    for (int j = 0; j < REG_ROWS; j++) {
      uint4 v = see(ahead[j]);
      kept[4 * j] = v.x, kept[4 * j + 1] = v.y, kept[4 * j + 2] = v.z, kept[4 * j + 3] = v.w;
    }
#pragma unroll 5
    for (int j = 0; j < SMEM_ROWS; j++) m.slots[j][threadIdx.x] = see(four(REG_ROWS + j));
#pragma unroll
    for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
    if (threadIdx.x % 32 == 0) m.tops[threadIdx.x / 32] = top;
    __syncthreads();
    top = m.tops[threadIdx.x % 32];
#pragma unroll
    for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
    if (threadIdx.x == 0) m.top = top, m.token = INT_MAX;
    cluster.sync();
    for (unsigned r = 0; r < cluster.num_blocks(); r++) top = fmaxf(top, *cluster.map_shared_rank(&m.top, r));
    return top;
  }

  // The lowest id of the greatest logit; INT_MAX if all are NaN. Before weigh.
  __device__ __forceinline__ int lowest(float top) {
    int mine = INT_MAX;
    each([&](uint32_t bits, int id) {
      if (__uint_as_float(bits) == top && id < end) mine = min(mine, id);
    });
    mine = __reduce_min_sync(~0u, mine);
    if (threadIdx.x % 32 == 0) atomicMin(&m.token, mine);
    cluster.sync();
    for (unsigned r = 0; r < cluster.num_blocks(); r++) mine = min(mine, *cluster.map_shared_rank(&m.token, r));
    return mine;
  }

  // Turns logits into masses and, if a cut is wanted, counts them; returns the
  // mass of all.
  __device__ __forceinline__ u64 weigh(float top, float inverse, bool counts) {
    u64 mine = 0;
    auto mass = [&](uint32_t bits) {
      float x = __uint_as_float(bits), w = x == top ? 1.0f : weight_of(fmaxf((x - top) * inverse, -200.0f)); // NaN and x - inf: 0
      if (counts) {
        int bin = log_bin(w);
        if (bin) atomicAdd(&m.logs[bin], 1u);
      }
      uint32_t v = mass_of(w);
      mine += v;
      return v;
    };
#pragma unroll
    for (int i = 0; i < 4 * REG_ROWS; i++) kept[i] = mass(kept[i]);
#pragma unroll 2
    for (int j = 0; j < SMEM_ROWS; j++) {
      uint4 v = m.slots[j][threadIdx.x];
      m.slots[j][threadIdx.x] = make_uint4(mass(v.x), mass(v.y), mass(v.z), mass(v.w));
    }
    mine = sum(mine);
    if (threadIdx.x == 0) m.shared[2] = mine;
    cluster.sync();
    return over_cluster(2);
  }

  // Which masses may be the cut's, by the first histogram: [lo, hi).
  __device__ __forceinline__ void bracket(u64 need, bool by_count, uint32_t *lo, uint32_t *hi) {
    u64 least[LOG_EACH] = {}, most[LOG_EACH] = {}, below = 0, above = 0;
    int first = LOG_BINS - 1 - LOG_EACH * int(threadIdx.x); // and those below it
#pragma unroll
    for (int j = 0; j < LOG_EACH; j++) {
      int bin = first - j;
      if (bin < 0) break;
      u64 n = 0;
      for (unsigned r = 0; r < cluster.num_blocks(); r++) n += cluster.map_shared_rank(m.logs, r)[bin];
      least[j] = by_count ? n : n * bin_edge(bin), most[j] = by_count ? n : n * min(bin_edge(bin + 1), ONE);
      below += least[j], above += most[j];
    }
    u64 all;
    below = scan(below, &all), above = scan(above, &all);
    if (threadIdx.x == 0) m.lo = 0, m.hi = bin_edge(1);
    __syncthreads();
    // The first bins from above at which a bound reaches need.
#pragma unroll
    for (int j = 0; j < LOG_EACH; j++) {
      if (above < need && above + most[j] >= need) m.hi = bin_edge(first - j + 1);
      if (below < need && below + least[j] >= need) m.lo = bin_edge(first - j);
      above += most[j], below += least[j];
    }
    __syncthreads();
    *lo = max(m.lo, 1u), *hi = m.hi; // tokens without mass are never drawn
  }

  struct Found {
    uint32_t lo, count; // the part that has the cut begins at lo and has count tokens
    u64 above;          // sum of greater masses
  };
  static __device__ __forceinline__ int shift_of(uint32_t lo, uint32_t hi) { return max(0, 32 - __clz(hi - 1 - lo) - 11); }
  // Narrows [lo, hi) of masses to the part at which the sum from above reaches
  // need, among what c keeps. above is the sum of greater masses; the FIRST
  // round makes it.
  template <bool FIRST> __device__ __forceinline__ Found narrow(uint32_t lo, uint32_t hi, u64 need, bool by_count, Cut c, u64 above) {
    int b = round++ % 2, shift = shift_of(lo, hi);
    uint32_t width = hi - lo;
    auto count_in = [&](uint32_t v, int id) {
      if (!c.keeps(v, id)) return;
      int bin = (v - lo) >> shift;
      atomicAdd(&m.count[b][bin], 1u);
      if (by_count) return;
      atomicAdd(&m.low[b][bin], v & 0xffff);
      atomicAdd(&m.high[b][bin], v >> 16);
    };
    if (FIRST) { // a few of a hundred are in question
      each([&](uint32_t v, int id) {
        if (v >= hi) above += by_count ? 1 : v;
        else if (v >= lo) count_in(v, id);
      });
    } else {
      each_in(lo, width, count_in);
    }
    if (FIRST) {
      above = sum(above);
      if (threadIdx.x == 0) m.shared[b] = above;
    }
    cluster.sync();
    if (FIRST) above = over_cluster(b);
    uint32_t count[2] = {};
    u64 here[2] = {};
    int first = BINS - 1 - 2 * int(threadIdx.x);
    for (unsigned r = 0; r < cluster.num_blocks(); r++) {
      const DrawSmem *o = cluster.map_shared_rank(&m, r);
#pragma unroll
      for (int j = 0; j < 2; j++) {
        uint32_t n = o->count[b][first - j];
        count[j] += n;
        here[j] += by_count ? n : o->low[b][first - j] + (u64(o->high[b][first - j]) << 16);
      }
    }
    // The others are done with the buffer of the round before this.
#pragma unroll
    for (int j = 0; j < 2; j++) m.count[b ^ 1][first - j] = m.low[b ^ 1][first - j] = m.high[b ^ 1][first - j] = 0;
    u64 all, before = scan(here[0] + here[1], &all);
    if (threadIdx.x == 0) m.found = -1, m.listed = 0;
    __syncthreads();
    u64 want = min(need > above ? need - above : 1, all);
    if (before < want && before + here[0] + here[1] >= want) {
      int j = before + here[0] >= want ? 0 : 1;
      m.found = first - j, m.found_count = count[j], m.found_above = above + before + (j ? here[0] : 0);
    }
    __syncthreads();
    if (m.found < 0) return {hi, 0, above}; // nothing in question has mass
    return {lo + (uint32_t(m.found) << shift), m.found_count, m.found_above};
  }

  // The cut among at most LIST tokens of masses [lo, hi), which every CTA
  // gathers from all. The order of the list does not matter.
  __device__ __forceinline__ Cut choose(uint32_t lo, uint32_t hi, u64 need, bool by_count, Cut c, u64 above) {
    each_in(lo, hi - lo, [&](uint32_t v, int id) {
      if (!c.keeps(v, id)) return;
      int at = atomicAdd(&m.listed, 1);
      m.list[at] = make_uint2(v, id);
    });
    cluster.sync();
    if (threadIdx.x < 32) {
      uint2 mine = make_uint2(0, INT_MAX); // no token
      int at = threadIdx.x;
      for (unsigned r = 0; r < cluster.num_blocks(); r++) {
        const DrawSmem *o = cluster.map_shared_rank(&m, r);
        int n = o->listed;
        if (at >= 0 && at < n) mine = o->list[at];
        at -= n;
      }
      u64 before = above;
      for (int i = 0; i < 32; i++) {
        uint2 other = make_uint2(__shfl_sync(~0u, mine.x, i), __shfl_sync(~0u, mine.y, i));
        if (other.x > mine.x || (other.x == mine.x && other.y < mine.y)) before += by_count ? other.x > 0 : other.x;
      }
      // The first from above that reaches need, or the last there is.
      bool reaches = mine.x && before + (by_count ? 1 : mine.x) >= need;
      bool chosen = reaches && before < need;
      if (!__any_sync(~0u, chosen)) {
        uint32_t least = __reduce_min_sync(~0u, mine.x ? mine.x : ~0u);
        int last = __reduce_max_sync(~0u, mine.x == least ? int(mine.y) : -1);
        chosen = mine.x == least && int(mine.y) == last;
      }
      if (chosen) m.lo = mine.x, m.found = mine.y;
    }
    __syncthreads();
    return {m.lo, m.found};
  }

  // The same where many have the one mass tie: ids up to the keep-th, by halving.
  __device__ __forceinline__ Cut among_equals(uint32_t tie, u64 keep, Cut c) {
    int lo = 0, hi = (1 << 19) - 1;
    while (lo < hi) {
      int middle = (lo + hi) / 2, b = 4 + equals++ % 2;
      u64 mine = 0;
      each_in(tie, 1, [&](uint32_t v, int id) { mine += id <= middle && c.keeps(v, id); });
      mine = sum(mine);
      if (threadIdx.x == 0) m.shared[b] = mine;
      cluster.sync();
      if (over_cluster(b) >= keep) hi = middle;
      else lo = middle + 1;
    }
    return {tie, lo};
  }

  // The fewest of those that c keeps, in order, whose sum reaches need.
  __device__ __forceinline__ Cut cut(Cut c, u64 need, bool by_count) {
    uint32_t lo, hi;
    bracket(need, by_count, &lo, &hi);
    lo = max(lo, c.mass), hi = max(hi, lo + 1);
    Found f = narrow<true>(lo, hi, need, by_count, c, 0);
    for (;;) {
      int shift = shift_of(lo, hi);
      hi = min(hi, f.lo + (1u << shift)), lo = f.lo;
      if (f.count <= 1) return {lo, lo == c.mass ? c.id : INT_MAX};
      if (f.count <= LIST) return choose(lo, hi, need, by_count, c, f.above);
      if (!shift) break;
      f = narrow<false>(lo, hi, need, by_count, c, f.above);
    }
    u64 each_mass = by_count ? 1 : lo, keep = need > f.above ? (need - f.above + each_mass - 1) / each_mass : 1;
    if (keep >= f.count) return {lo, lo == c.mass ? c.id : INT_MAX};
    return among_equals(lo, keep, c);
  }

  // Inverts the cumulative mass of the kept tokens, in order of id; -1 in the
  // CTAs that do not have it.
  __device__ __forceinline__ int pick(Cut c, double u) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = base + 4 * int(threadIdx.x);
    if (c.id != INT_MAX) { // ties with the cut that are not kept
      auto drop = [&](uint32_t &v, int id) { v = v == c.mass && id > c.id ? 0 : v; };
#pragma unroll
      for (int i = 0; i < 4 * REG_ROWS; i++) drop(kept[i], first + i / 4 * ROW + i % 4);
      for (int j = 0; j < SMEM_ROWS; j++) {
        uint4 &v = m.slots[j][threadIdx.x];
        int id = first + (REG_ROWS + j) * ROW;
        drop(v.x, id), drop(v.y, id + 1), drop(v.z, id + 2), drop(v.w, id + 3);
      }
    }
    auto kept_mass = [&](uint32_t v) { return v < c.mass ? 0 : v; };
    auto row_mass = [&](uint4 v) { return u64(kept_mass(v.x)) + kept_mass(v.y) + kept_mass(v.z) + kept_mass(v.w); }; // of this thread's four
    auto cell = [&](u64 v, int j) { // v is below 2^34
      u64 all = __reduce_add_sync(~0u, uint32_t(v) & 0xffff) + (u64(__reduce_add_sync(~0u, uint32_t(v >> 16))) << 16);
      if (lane == 0) m.cells[j * WARPS + warp] = all;
    };
    __syncthreads();
#pragma unroll
    for (int j = 0; j < REG_ROWS; j++) cell(row_mass(in_regs(j)), j);
#pragma unroll 2
    for (int j = 0; j < SMEM_ROWS; j++) cell(row_mass(m.slots[j][threadIdx.x]), REG_ROWS + j);
    __syncthreads();
    u64 mine = threadIdx.x < ROWS * WARPS ? m.cells[threadIdx.x] : 0, here, before = scan(mine, &here);
    if (threadIdx.x == 0) m.shared[3] = here, m.found = -1;
    cluster.sync();
    u64 total = over_cluster(3), below = 0;
    for (unsigned r = 0; r < cluster.block_rank(); r++) below += cluster.map_shared_rank(m.shared, r)[3];
    u64 target = u64(u * double(total));
    if (target >= total && total > 0) target = total - 1;
    if (target < below || target >= below + here) return -1;
    target -= below;
    if (before <= target && target < before + mine) m.found = threadIdx.x, m.found_above = before;
    __syncthreads();
    if (warp == m.found % WARPS) {
      int j = m.found / WARPS;
      uint4 v = m.slots[max(j - REG_ROWS, 0)][threadIdx.x];
#pragma unroll
      for (int i = 0; i < REG_ROWS; i++)
        if (i == j) v = in_regs(i);
      uint32_t masses[4] = {v.x, v.y, v.z, v.w};
      u64 sum = row_mass(v), upto = sum;
      for (int o = 1; o < 32; o <<= 1) {
        u64 other = __shfl_up_sync(~0u, upto, o);
        if (lane >= o) upto += other;
      }
      u64 at = m.found_above + upto - sum;
      if (at <= target && target < at + sum) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
          int id = first + j * ROW + e;
          u64 v = kept_mass(masses[e]);
          if (at <= target && target < at + v) m.token = id;
          at += v;
        }
      }
    }
    __syncthreads();
    return m.token;
  }
};

template <bool MASKED> static __global__ __launch_bounds__(THREADS, 1) void draw_kernel(Sampling p, int span) {
  extern __shared__ __align__(16) uint8_t raw[];
  Draw d(*reinterpret_cast<DrawSmem *>(raw));
  DrawSmem &m = d.m;
  int rank = d.cluster.block_rank(), index = blockIdx.x / d.cluster.num_blocks();
  for (int i = threadIdx.x; i < LOG_BINS; i += THREADS) m.logs[i] = 0;
  for (int i = threadIdx.x; i < BINS; i += THREADS)
    for (int b = 0; b < 2; b++) m.count[b][i] = m.low[b][i] = m.high[b][i] = 0;
  pdl_wait();
  pdl_next();
  const xk_sample s = p.samples[index];
  if (s.final < 0) return; // all CTAs of the cluster
  d.base = rank * span, d.end = min(d.base + span, p.vocab);
  const float *row = p.logits + int64_t(s.final - p.first_final) * p.stride;
  const int which = MASKED ? p.mask_of[index] : -1;
  const uint32_t *mask = which < 0 ? nullptr : p.masks + int64_t(which) * p.mask_words;
  if (shapes(s)) {
    float *to = p.scratch + int64_t(index) * p.stride;
    for (int i = d.base + threadIdx.x; i < d.end; i += THREADS) to[i] = row[i];
    __syncthreads();
    for (int i = threadIdx.x; i < s.n_adjust; i += THREADS) {
      const xk_adjust &a = p.adjust[s.adjust + i];
      if (a.id >= d.base && a.id < d.end) to[a.id] = adjusted(to[a.id], a, s);
    }
    __syncthreads();
    row = to;
  }
  float top = d.read<MASKED>(row, mask);
  if (s.temperature == 0 || s.top_k == 1 || top == -INFINITY) {
    int token = d.lowest(top);
    bool none = token == INT_MAX;
    if (top == -INFINITY && shapes(s) && !mask) { // what is -inf may be so by a ban
      d.cluster.sync(); // all have read m.token
      top = d.read<false>(p.logits + int64_t(s.final - p.first_final) * p.stride, nullptr);
      none = top == -INFINITY && d.lowest(top) == INT_MAX;
    }
    // The step that was launched behind this one reads a token that there is.
    if (rank == 0 && threadIdx.x == 0) p.tokens[s.out] = none ? -1 : token, p.device_tokens[index] = none ? 0 : token;
  } else {
    bool by_k = s.top_k > 0 && s.top_k < p.vocab, by_p = s.top_p < 1;
    u64 total = d.weigh(top, 1.4426950408889634f / s.temperature, by_k || by_p);
    Cut keep = {0, INT_MAX};
    for (int filter = 0; filter < 2; filter++) { // top-k, then top-p of what it left
      bool by_count = filter == 0;
      if (!(by_count ? by_k : by_p)) continue;
      if (!by_count && keep.mass) {
        u64 mine = 0;
        d.each([&](uint32_t v, int id) { mine += keep.keeps(v, id) ? v : 0; });
        mine = d.sum(mine);
        d.cluster.sync(); // all have read shared[2]
        if (threadIdx.x == 0) m.shared[2] = mine;
        d.cluster.sync();
        total = d.over_cluster(2);
      }
      u64 need = by_count ? s.top_k : u64(ceil(double(s.top_p) * double(total)));
      keep = d.cut(keep, need ? need : 1, by_count);
    }
    uint32_t least = mass_of(fminf(fmaxf(s.min_p, 0.0f), 1.0f));
    if (least > keep.mass) keep = {least, INT_MAX};
    int picked = d.pick(keep, uniform(s));
    if (picked >= 0 && threadIdx.x == 0) p.tokens[s.out] = p.device_tokens[index] = picked;
  }
  d.cluster.sync(); // nobody reads an exited CTA's memory
}

// ---------------------------------------------------------------- launchers

int32_t xk_draw(const Launch &l, const Sampling &s) {
  int cluster = 1; // more CTAs a sample while multiprocessors are free
  while (cluster < 8 && (s.vocab > cluster * SPAN || (2 * cluster * s.n_samples <= s.sms && s.vocab > cluster * ROW))) cluster *= 2;
  int span = int(round_up(div_up(s.vocab, cluster), 4));
  if (span > SPAN) return xk_fail(XK_INVALID, "sampler: vocabulary of %d, at most %d", s.vocab, 8 * SPAN);
  return launch_clusters(l, s.masks ? draw_kernel<true> : draw_kernel<false>, s.n_samples * cluster, THREADS, sizeof(DrawSmem), cluster, s, span);
}

int32_t xk_sampler_init() {
  XK_TRY(cudaFuncSetAttribute(draw_kernel<false>, cudaFuncAttributeMaxDynamicSharedMemorySize, int(sizeof(DrawSmem))));
  XK_TRY(cudaFuncSetAttribute(draw_kernel<true>, cudaFuncAttributeMaxDynamicSharedMemorySize, int(sizeof(DrawSmem))));
  return XK_OK;
}
