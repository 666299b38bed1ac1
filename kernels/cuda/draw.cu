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
#include "draw_cut.cuh"

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

// Asks for a chunk of the warp's logits.
static __device__ __forceinline__ void ask(const Part &p, int chunk) {
  const int warp = threadIdx.x / 32, begin = warp * p.rows * ROW, start = chunk * CHUNK * ROW;
  const int whole = max(0, min(p.end - p.base - begin, min(p.rows, SMEM_ROWS) * ROW)) / 4 * 4, bytes = 4 * max(0, min(whole - start, CHUNK * ROW));
  mbar_expect(&p.m.arrived[warp][chunk], bytes);
  if (bytes)
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem_addr(p.m.slots[warp][chunk * CHUNK])),
                 "l"(p.row + p.base + begin + start), "r"(bytes), "r"(smem_addr(&p.m.arrived[warp][chunk])) : "memory");
}

// Counts what arrives, and finds the greatest.
struct Arrival {
  float top;
  bool unclean, infinite;
  Scale scale;
};
static __device__ __noinline__ Arrival arrive(Part p, bool counts, float sample) {
  DrawSmem &m = p.m;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int begin = warp * p.rows * ROW, limit = min(p.rows, SMEM_ROWS) * ROW, valid = max(0, min(p.end - p.base - begin, limit));
  if (lane == 0)
    for (int c = 0; c < AHEAD; c++) ask(p, c);
  float *slots = &m.slots[warp][0][0].x; // what is no whole vector, and what lies beyond the span
#pragma unroll 1
  for (int i = valid / 4 * 4 + lane; i < limit; i += 32) slots[i] = i < valid ? p.row[p.base + begin + i] : NOWHERE;
  float4 held[HELD];
#pragma unroll
  for (int k = 0; k < HELD; k++)
    if (p.rows > SMEM_ROWS) held[k] = p.load(p.first_id(warp, SMEM_ROWS + k));
  __syncwarp();
  const Scale s = counts ? place(p, sample) : Scale{};
  STAMP(12);
  float most = -INFINITY, bad = 0; // NaN if there is an infinite one, or a NaN
  const uint32_t bins = smem_addr(m.bins);
#pragma unroll 1
  for (int j = 0; j < p.rows; j += 2) {
    float4 q[2];
    if (j < SMEM_ROWS) {
      mbar_wait(&m.arrived[warp][j / CHUNK], 0);
      if (lane == 0 && j % CHUNK == 0 && j / CHUNK + AHEAD < CHUNKS) ask(p, j / CHUNK + AHEAD);
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
    if (warp_bad) atomicOr(&m.unclean, 1);
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
