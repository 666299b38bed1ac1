// What draw.cu's kernel is made of: masses, cuts, a CTA's part of a sample, and
// what is rare and slow. Semantics: kernels/DESIGN.md, section 5.
#pragma once

#include <cfloat>
#include <climits>
#include <cooperative_groups.h>

#include "hopper.cuh"

namespace cg = cooperative_groups;
using u64 = unsigned long long;

static constexpr int THREADS = 1024, WARPS = THREADS / 32;
static constexpr int ROW = 128;                       // ids of a row: four a lane
static constexpr int SMEM_ROWS = 12, HELD = 4, ROWS = SMEM_ROWS + HELD; // of a warp: in shared memory, in registers
static constexpr int CHUNK = 4, CHUNKS = SMEM_ROWS / CHUNK; // rows of a bulk copy
#ifndef DRAW_AHEAD
#define DRAW_AHEAD 3
#endif
static constexpr int AHEAD = DRAW_AHEAD;              // of a warp on their way
static constexpr int SPAN = WARPS * ROWS * ROW;       // ids of a CTA at most
static constexpr int PER_OCTAVE = 128, BINS = 32 * PER_OCTAVE, EACH = BINS / THREADS; // bins; a thread's
static constexpr int HEADROOM = 3 * PER_OCTAVE;       // bins above the sample's greatest
static constexpr int LIST = 32;                       // tokens of a bracket that a warp can list
static constexpr int PARTS = 64, FEW = 32;            // of a bracket; tokens that a warp orders
static constexpr int MAX_CLUSTER = 8;
static constexpr uint32_t ONE = 1u << 31;             // mass of the most likely token
static constexpr float NOWHERE = -FLT_MAX;            // stands beyond the span, and for -inf and NaN

#ifdef DRAW_TIMES
__device__ long long draw_times[256][16];
#define STAMP(i) do { if (threadIdx.x == 0 && blockIdx.x < 256) draw_times[blockIdx.x][i] = clock64(); } while (0)
#else
#define STAMP(i)
#endif

// Waits for the cluster; what it wrote to shared memory is then seen by all of it.
// The fence of cluster.sync() takes in global memory, which costs a microsecond.
static __device__ __forceinline__ void cluster_arrive() { asm volatile("fence.release.sync_restrict::shared::cta.cluster;\nbarrier.cluster.arrive.relaxed;" ::: "memory"); }
static __device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait;\nfence.acquire.sync_restrict::shared::cluster.cluster;" ::: "memory"); }
static __device__ __forceinline__ void cluster_sync() { cluster_arrive(), cluster_wait(); }

static __device__ __forceinline__ float weight_of(float z) { // 2^z
  float w;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(w) : "f"(z));
  return w;
}
// Weight (0 to 1) to mass, rounded down.
#ifdef DRAW_SHIFT
static __device__ __forceinline__ uint32_t mass_of(float w) {
  uint32_t bits = __float_as_uint(w), m;
  asm("shr.u32 %0, %1, %2;" : "=r"(m) : "r"((bits << 8) | 0x80000000u), "r"(127 - (bits >> 23))); // a shift over 31 gives 0
  return m;
}
#else
static __device__ __forceinline__ uint32_t mass_of(float w) { return __float2uint_rz(w * 2147483648.0f); }
#endif

struct Cut { // keeps greater masses, and equal ones with ids up to id
  uint32_t mass;
  int id;
  __device__ __forceinline__ bool keeps(uint32_t m, int i) const { return m > mass || (m == mass && i <= id); }
};
struct Bracket { // masses in [lo, hi)
  uint32_t lo, hi;
};

// The sum whose low half is known, and which is less than 2^31 from about.
static __device__ __forceinline__ u64 sum_near(u64 about, uint32_t low) {
  return (((about - low + (1u << 31)) >> 32) << 32) + low; // wraps where about < low: the high half is then 0
}
// The mass that reaches a part of all.
static __device__ __forceinline__ u64 need_of(float part, u64 all) { return max(u64(ceil(double(part) * double(all))), 1ull); }
template <typename T> static __device__ __forceinline__ T warp_scan(T v) { // inclusive
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) {
    T other = __shfl_up_sync(~0u, v, o);
    if (int(threadIdx.x % 32) >= o) v += other;
  }
  return v;
}

static __device__ __forceinline__ float warp_max(float v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, o));
  return v;
}

struct DrawSmem {
  float4 slots[WARPS][SMEM_ROWS][32]; // logits
  // Others of the cluster read these.
  uint32_t bins[BINS];
  uint2 list[WARPS][LIST];            // mass, id
  uint32_t listed[WARPS], tally[WARPS]; // how many were to be listed; tokens above the bracket
  u64 total[WARPS], above[WARPS], inside[WARPS]; // mass: of all, above the bracket, in it
  float top;
  int unclean, lowest;
  // The CTA's own.
  uint64_t arrived[WARPS][CHUNKS];
  u64 kept[MAX_CLUSTER][WARPS];       // mass that the cut keeps
  u64 rows[WARPS], all, above_all, inside_all, found_above;
  float weights[WARPS], errors[WARPS];
  uint32_t parts[PARTS][3];           // of the bracket: tokens, sums of the masses' low and high halves
  uint2 few[FEW];
  uint32_t longest, found_count;
  int edge_lo, edge_hi, found, n_few;
  Cut cut;
  double u;
};
static_assert(sizeof(DrawSmem) <= 227 << 10, "a CTA's shared memory");

// What a CTA has of its sample: ids base .. end-1, of which each warp has as many
// rows, one behind the other.
struct Part {
  DrawSmem &m;
  const float *row;
  int rank, ranks, base, end, rows;
  float top, inverse;     // the greatest logit; log2(e) / T
  bool unclean, infinite; // there are NaN or infinite logits; the greatest are infinite

  __device__ Part(DrawSmem &m) : m(m), rank(cg::this_cluster().block_rank()), ranks(cg::this_cluster().num_blocks()) {}

  __device__ __forceinline__ DrawSmem &of(int r) const { return *cg::this_cluster().map_shared_rank(&m, r); }
  __device__ __forceinline__ int first_id(int warp, int j) const { return base + (warp * rows + j) * ROW + 4 * int(threadIdx.x % 32); }
  __device__ __forceinline__ uint32_t mass(float x) const { return mass_of(weight_of((x - top) * inverse)); }
  static __device__ __forceinline__ float component(const float4 &v, int e) { return e == 0 ? v.x : e == 1 ? v.y : e == 2 ? v.z : v.w; }

  // Without NaN and infinities, so that x - top is none.
  __device__ __forceinline__ float4 cleaned(float4 v) const {
    auto one = [&](float x) { return infinite ? (x == INFINITY ? 0.0f : NOWHERE) : x >= NOWHERE ? x : NOWHERE; };
    return make_float4(one(v.x), one(v.y), one(v.z), one(v.w));
  }
  // Four logits from global memory, as they are.
  __device__ __forceinline__ float4 load(int id) const {
    float4 v = make_float4(NOWHERE, NOWHERE, NOWHERE, NOWHERE);
    if (id + 4 <= end) {
      v = __ldcg(reinterpret_cast<const float4 *>(row + id));
    } else if (id < end) {
      v.x = row[id];
      if (id + 1 < end) v.y = row[id + 1];
      if (id + 2 < end) v.z = row[id + 2];
    }
    return v;
  }
  // This lane's four of a warp's row.
  __device__ __forceinline__ float4 at(int warp, int j) const {
    if (j < SMEM_ROWS) return m.slots[warp][j][threadIdx.x % 32];
    float4 v = load(first_id(warp, j));
    return unclean ? cleaned(v) : v;
  }
};

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

// The mass, or number, of what both cuts keep, over the cluster, and by warps.
static __device__ __noinline__ u64 sums(Part p, Cut a, Cut c, bool by_count) {
  DrawSmem &m = p.m;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u64 mine = 0, all = 0;
#pragma unroll 1
  for (int j = 0; j < p.rows; j++) {
    float4 v = p.at(warp, j);
    int id = p.first_id(warp, j);
#pragma unroll
    for (int e = 0; e < 4; e++) {
      uint32_t x = p.mass(p.component(v, e));
      if (x && a.keeps(x, id + e) && c.keeps(x, id + e)) mine += by_count ? 1 : x;
    }
  }
  mine = warp_sum(uint64_t(mine));
  cluster_sync(); // the others are done with what was there
  if (lane == 0) m.above[warp] = mine;
  cluster_sync();
#pragma unroll 1
  for (int r = 0; r < p.ranks; r++) {
    u64 theirs = p.of(r).above[lane];
    if (warp == 0) m.kept[r][lane] = theirs;
    all += warp_sum(uint64_t(theirs));
  }
  __syncthreads();
  return all;
}

// The fewest of those that c keeps, in order, whose sum reaches need; the last has
// a mass in b. By halving: slow, and right for any masses.
static __device__ __noinline__ Cut exact(Part p, u64 need, bool by_count, Cut c, Bracket b) {
  auto reaches = [&](uint32_t mass, int id) { return sums(p, {mass, id}, c, by_count) >= need; };
  uint32_t lo = b.lo, hi = b.hi - 1; // the greatest mass down to which need is reached
#pragma unroll 1
  while (lo < hi) {
    uint32_t middle = lo + (hi - lo + 1) / 2;
    if (reaches(middle, INT_MAX)) lo = middle;
    else hi = middle - 1;
  }
  int first = 0, last = MAX_CLUSTER * SPAN - 1;
#pragma unroll 1
  while (first < last) {
    int middle = (first + last) / 2;
    if (reaches(lo, middle)) last = middle;
    else first = middle + 1;
  }
  return {lo, first};
}
