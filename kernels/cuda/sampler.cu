// Sampling on the device: bias, ban, penalties, temperature, top-k, top-p,
// min-p, draw. Semantics: kernels/DESIGN.md, section 5.
//
// prepare: grid (chunk, sample). Copies a row that is adjusted to scratch, and
// finds the best (logit, lowest id) of each chunk.
// draw: one CTA a sample. Weights are exp((x-max)/T), computed anew each pass.
// Their mass is summed as integers of 2^-32, so that order never matters and a
// draw is the same on every run. A cut (k-th token, or the token at which mass
// p is reached) is found by radix: a histogram over the leading 12 bits of the
// weights, then the bin's candidates over 10 and 10 more; ties fall to the
// lower id. A bin's mass follows from its count and the sum of the bits below
// its own, which 32-bit shared atomics add (64-bit ones are loops).
// Oracle: the sampler of kernels/cpu, and chi-square over draws.
#include <climits>

#include "common.cuh"

static constexpr int THREADS = 1024;
static constexpr int BINS = 2048;         // weight bits >> 20, sign is 0
static constexpr int LIST = 6144;         // candidates of one bin kept in shared memory
static constexpr int MAX_CELLS = 4096;    // cells of 128 ids: vocabularies to 512k
using u64 = unsigned long long;

struct Best {
  float v;
  int id; // INT_MAX: none
};
static __device__ __forceinline__ Best better(Best a, Best b) {
  bool second = b.id != INT_MAX && (a.id == INT_MAX || b.v > a.v || (b.v == a.v && b.id < a.id));
  return second ? b : a;
}
static __device__ __forceinline__ Best warp_best(Best b) {
#pragma unroll
  for (int o = 16; o; o >>= 1) {
    Best other = {__shfl_xor_sync(~0u, b.v, o), __shfl_xor_sync(~0u, b.id, o)};
    b = better(b, other);
  }
  return b;
}
// The best of a CTA, in every thread. scratch has room for one a warp.
static __device__ Best block_best(Best b, Best *scratch) {
  b = warp_best(b);
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = b;
  __syncthreads();
  Best all = {0, INT_MAX};
  for (int i = 0; i < int(blockDim.x) / 32; i++) all = better(all, scratch[i]);
  return all;
}

static __device__ __forceinline__ bool shapes(const xk_sample &s) { return s.n_adjust > 0; }

static __device__ __forceinline__ float adjusted(float x, const xk_adjust &a, const xk_sample &s) {
  x += a.bias;
  if (a.flags & XK_BAN) x = -INFINITY;
  if ((a.flags & XK_SEEN) && s.repetition != 1 && s.repetition != 0) x = x > 0 ? x / s.repetition : x * s.repetition;
  if (a.count > 0) x = __fsub_rn(__fsub_rn(x, __fmul_rn(s.frequency, a.count)), s.presence);
  return x;
}

static __global__ __launch_bounds__(256) void prepare_kernel(Sampling p) {
  __shared__ Best scratch[8];
  pdl_wait();
  pdl_next();
  const xk_sample &s = p.samples[blockIdx.y];
  if (s.final < 0) return;
  int per = int(round_up(div_up(p.vocab, XK_SAMPLE_CHUNKS), 4));
  int begin = blockIdx.x * per, end = min(begin + per, p.vocab);
  const float *row = p.logits + int64_t(s.final - p.first_final) * p.stride;
  if (shapes(s)) {
    float *to = p.scratch + int64_t(blockIdx.y) * p.stride;
    for (int i = begin + threadIdx.x; i < end; i += 256) to[i] = row[i];
    __syncthreads();
    for (int i = threadIdx.x; i < s.n_adjust; i += 256) {
      const xk_adjust &a = p.adjust[s.adjust + i];
      if (a.id >= begin && a.id < end) to[a.id] = adjusted(to[a.id], a, s);
    }
    __syncthreads();
    row = to;
  }
  Best b = {0, INT_MAX};
  auto see = [&](float v, int id) {
    if (v == v && (b.id == INT_MAX || v > b.v)) b = {v, id}; // ids ascend
  };
  for (int i = begin + 4 * int(threadIdx.x); i < end; i += 1024) {
    if (i + 4 <= end) {
      float4 v = *reinterpret_cast<const float4 *>(row + i);
      see(v.x, i), see(v.y, i + 1), see(v.z, i + 2), see(v.w, i + 3);
    } else {
      for (int j = i; j < end; j++) see(row[j], j);
    }
  }
  b = block_best(b, scratch);
  if (threadIdx.x == 0) static_cast<Best *>(p.partial)[blockIdx.y * XK_SAMPLE_CHUNKS + blockIdx.x] = b;
}

struct Cut { // keeps greater weights, and equal ones with ids up to id
  uint32_t bits;
  int id;
  __device__ bool keeps(uint32_t w, int i) const { return w > bits || (w == bits && i <= id); }
};

struct DrawSmem {
  uint32_t count[BINS], low[BINS], high[BINS]; // sums of bits 0..9 and 10..19 below the bin's
  uint32_t list_bits[LIST];
  int list_id[LIST];
  u64 cells[MAX_CELLS];
  u64 warp_sums[32];
  u64 found_mass; // of the bins above the found one
  uint32_t found_count;
  int found, listed;
  Best best[32];
};

struct Weights {
  const float *x;
  float top, inverse; // log2(e) / temperature
  int n;
  bool all_inf;
  __device__ float of(float v) const {
    if (v == top) return 1.0f;
    if (!(v < top) || all_inf) return 0.0f;
    float z = (v - top) * inverse;
    return z < -125.0f ? 0.0f : exp2f(z);
  }
};
static __device__ __forceinline__ u64 fixed(float w) { return __float2uint_rn(w * 4294967296.0f); }
static constexpr uint32_t LEAST = 0x2f000000; // 2^-33: what rounds to a mass of 1

// Visits every (weight bits, id) of the row; ids of a warp's 128 are together.
template <typename F> static __device__ __forceinline__ void each(const Weights &w, F f) {
  int aligned = w.n & ~3;
  for (int i = 4 * int(threadIdx.x); i < aligned; i += 4 * THREADS) {
    float4 v = *reinterpret_cast<const float4 *>(w.x + i);
    f(w.of(v.x), i), f(w.of(v.y), i + 1), f(w.of(v.z), i + 2), f(w.of(v.w), i + 3);
  }
  for (int i = aligned + int(threadIdx.x); i < w.n; i += THREADS) f(w.of(w.x[i]), i);
}

// Exclusive sum over the CTA of a value a thread; total in *all.
static __device__ u64 block_scan(u64 v, DrawSmem &m, u64 *all) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u64 sum = v;
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) {
    u64 other = __shfl_up_sync(~0u, sum, o);
    if (lane >= o) sum += other;
  }
  __syncthreads();
  if (lane == 31) m.warp_sums[warp] = sum;
  __syncthreads();
  u64 before = 0, total = 0;
  for (int i = 0; i < THREADS / 32; i++) {
    if (i < warp) before += m.warp_sums[i];
    total += m.warp_sums[i];
  }
  *all = total;
  return before + sum - v;
}

// Mass of the weights in a bin that begins at bits.
static __device__ u64 bin_mass(const DrawSmem &m, int bin, uint32_t bits) {
  double begin = __uint_as_float(bits);
  double step = __uint_as_float(bits & 0x7f800000u) * 1.1920928955078125e-7; // of the last mantissa bit
  return u64((begin * m.count[bin] + step * (double(m.low[bin]) + 1024.0 * m.high[bin])) * 4294967296.0);
}

// Finds the highest bin at which the sum from above reaches need: m.found, and
// what lies above it. Bins are taken in descending order; two a thread. Bin b
// holds weights from (prefix | b) << shift.
static __device__ void find_bin(DrawSmem &m, int bins, uint32_t prefix, int shift, u64 need, bool by_count) {
  __syncthreads();
  u64 here[2] = {}, mine = 0;
  for (int j = 0; j < 2; j++) {
    int bin = bins - 1 - (2 * int(threadIdx.x) + j);
    if (bin < 0) break;
    here[j] = by_count ? m.count[bin] : bin_mass(m, bin, (prefix | bin) << shift);
    mine += here[j];
  }
  u64 all, above = block_scan(mine, m, &all);
  if (threadIdx.x == 0) m.found = -1;
  __syncthreads();
  if (need > all) need = all;
  if (above < need && above + mine >= need) {
    for (int j = 0; j < 2; j++) {
      if (above + here[j] >= need) {
        m.found = bins - 1 - (2 * int(threadIdx.x) + j), m.found_mass = above;
        break;
      }
      above += here[j];
    }
  }
  __syncthreads();
}

// The cut at which the tokens within c reach need: a count, or a mass. Weights
// below least are known to lie under the cut.
static __device__ Cut cut_at(const Weights &w, Cut c, u64 need, bool by_count, uint32_t least, DrawSmem &m) {
  auto clear = [&] {
    __syncthreads();
    for (int i = threadIdx.x; i < BINS; i += THREADS) m.count[i] = 0, m.low[i] = 0, m.high[i] = 0;
    __syncthreads();
  };
  auto add = [&](uint32_t bin, uint32_t below) { // below: the bits under the bin's
    atomicAdd(&m.count[bin], 1u);
    if (by_count) return;
    if (below & 1023) atomicAdd(&m.low[bin], below & 1023);
    if (below >> 10) atomicAdd(&m.high[bin], below >> 10);
  };
  clear();
  each(w, [&](float v, int id) {
    uint32_t bits = __float_as_uint(v);
    if (bits >= least && c.keeps(bits, id)) add(bits >> 20, bits & 0xfffff);
  });
  find_bin(m, BINS, 0, 20, need, by_count);
  if (m.found < 0) return c; // nothing to keep less of
  uint32_t high = m.found, in_bin = m.count[m.found];
  need -= m.found_mass;
  bool listed = in_bin <= LIST;
  if (listed) {
    __syncthreads();
    if (threadIdx.x == 0) m.listed = 0;
    __syncthreads();
    each(w, [&](float v, int id) {
      uint32_t bits = __float_as_uint(v);
      if (bits >> 20 == high && bits >= least && c.keeps(bits, id)) {
        int at = atomicAdd(&m.listed, 1);
        m.list_bits[at] = bits, m.list_id[at] = id;
      }
    });
    __syncthreads();
  }
  auto candidates = [&](auto f) { // f(bits, id)
    if (listed) {
      for (int i = threadIdx.x; i < m.listed; i += THREADS) f(m.list_bits[i], m.list_id[i]);
    } else {
      each(w, [&](float v, int id) {
        uint32_t bits = __float_as_uint(v);
        if (bits >= least && c.keeps(bits, id)) f(bits, id);
      });
    }
  };
  uint32_t prefix = high; // of bits >> shift + 10
  for (int shift = 10; shift >= 0; shift -= 10) {
    clear();
    candidates([&](uint32_t bits, int) {
      if (bits >> (shift + 10) == prefix) add((bits >> shift) & 1023, bits & ((1u << shift) - 1));
    });
    find_bin(m, 1024, prefix << 10, shift, need, by_count);
    if (m.found < 0) return {prefix << (shift + 10), INT_MAX}; // rounding ate the rest: the whole bin
    need -= m.found_mass;
    prefix = prefix << 10 | uint32_t(m.found);
  }
  uint32_t equal = m.count[prefix & 1023];
  u64 each_mass = by_count ? 1 : max(fixed(__uint_as_float(prefix)), u64(1));
  u64 keep = (need + each_mass - 1) / each_mass; // of the equal ones, lowest ids first
  if (keep >= equal) return {prefix, c.bits == prefix ? c.id : INT_MAX};
  // The keep-th of the equal ids, by halving the range of ids.
  int lo = 0, hi = w.n - 1;
  while (lo < hi) {
    int mid = (lo + hi) / 2;
    __syncthreads();
    if (threadIdx.x == 0) m.found_count = 0;
    __syncthreads();
    uint32_t mine = 0;
    candidates([&](uint32_t bits, int id) { mine += bits == prefix && id <= mid; });
    if (mine) atomicAdd(&m.found_count, mine);
    __syncthreads();
    if (m.found_count >= keep) hi = mid;
    else lo = mid + 1;
  }
  __syncthreads();
  return {prefix, lo};
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

// Inverts the cumulative mass of the kept tokens, in order of id.
static __device__ int pick(const Weights &w, Cut c, double u, int top, DrawSmem &m) {
  int cells = div_up(w.n, 128), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  auto mass = [&](int id) -> u64 {
    if (id >= w.n) return 0;
    float v = w.of(w.x[id]);
    return c.keeps(__float_as_uint(v), id) ? fixed(v) : 0;
  };
  __syncthreads();
  for (int cell = warp; cell < cells; cell += THREADS / 32) {
    int i = cell * 128 + 4 * lane;
    u64 sum = 0;
    if (i + 4 <= w.n) {
      float4 x = *reinterpret_cast<const float4 *>(w.x + i);
      float v[4] = {w.of(x.x), w.of(x.y), w.of(x.z), w.of(x.w)};
#pragma unroll
      for (int j = 0; j < 4; j++) sum += c.keeps(__float_as_uint(v[j]), i + j) ? fixed(v[j]) : 0;
    } else {
      for (int j = 0; j < 4; j++) sum += mass(i + j);
    }
    sum = warp_sum(uint64_t(sum));
    if (lane == 0) m.cells[cell] = sum;
  }
  __syncthreads();
  int per = div_up(cells, THREADS);
  u64 mine = 0;
  for (int j = 0; j < per; j++) {
    int cell = int(threadIdx.x) * per + j;
    if (cell < cells) mine += m.cells[cell];
  }
  u64 total, before = block_scan(mine, m, &total);
  u64 target = u64(u * double(total));
  if (target >= total && total > 0) target = total - 1;
  if (threadIdx.x == 0) m.found = -1;
  __syncthreads();
  if (before <= target && target < before + mine) {
    for (int j = 0; j < per; j++) {
      int cell = int(threadIdx.x) * per + j;
      if (target < before + m.cells[cell]) {
        m.found = cell, m.found_mass = before;
        break;
      }
      before += m.cells[cell];
    }
  }
  __syncthreads();
  if (m.found < 0) return top;
  if (warp == 0) {
    int i = m.found * 128 + 4 * lane;
    u64 v[4], sum = 0;
    for (int j = 0; j < 4; j++) sum += v[j] = mass(i + j);
    u64 upto = sum;
    for (int o = 1; o < 32; o <<= 1) {
      u64 other = __shfl_up_sync(~0u, upto, o);
      if (lane >= o) upto += other;
    }
    u64 at = m.found_mass + upto - sum;
    if (at <= target && target < at + sum)
      for (int j = 0; j < 4; j++) {
        if (target < at + v[j]) {
          m.listed = i + j;
          break;
        }
        at += v[j];
      }
  }
  __syncthreads();
  return m.listed;
}

static __global__ __launch_bounds__(THREADS, 1) void draw_kernel(Sampling p) {
  extern __shared__ __align__(16) uint8_t raw[];
  DrawSmem &m = *reinterpret_cast<DrawSmem *>(raw);
  pdl_wait();
  pdl_next();
  const xk_sample s = p.samples[blockIdx.x];
  if (s.final < 0) return;
  Best best = {0, INT_MAX};
  for (int i = 0; i < XK_SAMPLE_CHUNKS; i++) best = better(best, static_cast<const Best *>(p.partial)[blockIdx.x * XK_SAMPLE_CHUNKS + i]);
  int token = best.id == INT_MAX ? 0 : best.id;
  if (best.id != INT_MAX && s.temperature != 0 && s.top_k != 1) {
    Weights w;
    w.x = shapes(s) ? p.scratch + int64_t(blockIdx.x) * p.stride : p.logits + int64_t(s.final - p.first_final) * p.stride;
    w.top = best.v, w.inverse = 1.4426950408889634f / s.temperature, w.n = p.vocab, w.all_inf = isinf(best.v);
    Cut keep = {0, INT_MAX};
    if (s.top_k > 0 && s.top_k < p.vocab) keep = cut_at(w, keep, s.top_k, true, 0, m);
    if (s.top_p < 1) {
      u64 mine = 0, total;
      each(w, [&](float v, int id) { mine += keep.keeps(__float_as_uint(v), id) ? fixed(v) : 0; });
      block_scan(mine, m, &total);
      u64 need = u64(ceil(double(s.top_p) * double(total)));
      // All weights below this add up to less than half of 1-p of the total.
      float floor = 0.5f * (1 - s.top_p) * float(double(total) / 4294967296.0) / float(p.vocab);
      keep = cut_at(w, keep, need ? need : 1, false, max(LEAST, __float_as_uint(fminf(floor, 1.0f))), m);
    }
    if (s.min_p > __uint_as_float(keep.bits)) keep = {__float_as_uint(s.min_p), INT_MAX};
    token = pick(w, keep, uniform(s), token, m);
  }
  if (threadIdx.x == 0) p.tokens[blockIdx.x] = p.device_tokens[blockIdx.x] = token;
}

// One CTA an item: log-sum-exp, rank, and the most likely by repeated maxima.
static __global__ __launch_bounds__(THREADS, 1) void logprob_kernel(Sampling p, const xk_item *items, const int32_t *drawn, xk_logprob *out) {
  __shared__ Best scratch[32];
  __shared__ double sums[32];
  __shared__ int counts[32];
  pdl_wait();
  pdl_next();
  const xk_item it = items[blockIdx.x];
  if (it.final < 0) return;
  const float *x = p.logits + int64_t(it.final - p.first_final) * p.stride;
  int n = p.vocab, id = it.id >= 0 ? it.id : drawn[-1 - it.id];
  auto after = [&](float floor, int floor_id) { // the best that comes after (floor, floor_id)
    Best b = {0, INT_MAX};
    for (int i = threadIdx.x; i < n; i += THREADS) {
      float v = x[i];
      if (v != v || (floor_id >= 0 && !(v < floor || (v == floor && i > floor_id)))) continue;
      if (b.id == INT_MAX || v > b.v) b = {v, i};
    }
    return block_best(b, scratch);
  };
  Best first = after(0, -1);
  float m = first.id == INT_MAX ? -INFINITY : first.v, mine = x[id];
  double sum = 0;
  int rank = 0;
  for (int i = threadIdx.x; i < n; i += THREADS) {
    float v = x[i];
    if (v == v && !isinf(m)) sum += double(expf(v - m));
    rank += v >= mine;
  }
#pragma unroll
  for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o), rank += __shfl_xor_sync(~0u, rank, o);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum, counts[threadIdx.x / 32] = rank;
  __syncthreads();
  sum = 0, rank = 0;
  for (int i = 0; i < THREADS / 32; i++) sum += sums[i], rank += counts[i];
  double lse = isinf(m) ? double(m) : double(m) + log(sum);
  if (threadIdx.x == 0) out[it.out] = {id, float(double(mine) - lse), rank};
  Best b = first;
  for (int i = 0; i < it.top; i++) {
    if (threadIdx.x == 0) {
      xk_logprob e = {0, 0, 0};
      if (b.id != INT_MAX) e = {b.id, float(double(b.v) - lse), i + 1};
      out[it.out + 1 + i] = e;
    }
    if (i + 1 < it.top && b.id != INT_MAX) b = after(b.v, b.id);
  }
}

// ---------------------------------------------------------------- launchers

int32_t xk_draw(const Launch &l, const Sampling &s) {
  if (div_up(s.vocab, 128) > MAX_CELLS) return xk_fail(XK_INVALID, "sampler: vocabulary of %d", s.vocab);
  XK_OK_OR_RETURN(launch(l, prepare_kernel, dim3(XK_SAMPLE_CHUNKS, s.n_samples), 256, 0, s));
  return launch(l, draw_kernel, s.n_samples, THREADS, sizeof(DrawSmem), s);
}

int32_t xk_logprobs(const Launch &l, const Sampling &s, const xk_item *items, int n, const int32_t *all_tokens, xk_logprob *out) {
  return launch(l, logprob_kernel, n, THREADS, 0, s, items, all_tokens, out);
}

int32_t xk_sampler_init() {
  XK_TRY(cudaFuncSetAttribute(draw_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(sizeof(DrawSmem))));
  return XK_OK;
}
