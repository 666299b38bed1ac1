// Paged prefill attention on Hopper (causal, GQA, any prefix in the pool), in
// the manner of FlashAttention-3: producer warps and two consumer warpgroups a
// CTA. A work item is an xk_tile (128 query rows) of one head; a
// warpgroup has 64 of its rows, with Q, S and O in registers.
//
// The producers find K and V through the block table: a tile of 128 positions
// is eight runs of 16, each one bulk copy of all its columns. (Copies of one
// 64-column half each, from a loop over lanes, held the kernel at 545 TFLOP/s.)
// K and V have a warp and a ring each, Q two buffers, so the next item's loads
// run under this one's end.
// The consumers take turns at the tensor cores (named barriers 1 and 2): one
// multiplies while the other is in its softmax, and each also has its own
// S = Q K(i+1) and O += P(i) V(i) in flight during the softmax of i+1.
// Items are taken from a counter, the longest first; which CTA has one does
// not change its result.
//
// PACKED, the rows of a tile are the query heads of a KV head, token by token, and
// an item is what an xk_part says: short chunks read K and V once for the whole
// group, and several CTAs share a long prefix (attn_split.cu plans and merges).
//
// A row's result is a function of its position and of the rows at and before it:
// tiles of positions are aligned and taken from its own downwards, and what a
// tile has after it, or a tile has beside it, adds nothing. So PACKED without
// splits gives the bits that the other form gives, and also decodes where that
// is promised (batch_invariant).
//
// head_dim 64, 128 and 256 fill the 64-column halves of shared memory; of 80 and
// 96 the second half is copied for itself and ends in zeros. 256 has tiles of 64
// positions, one buffer for Q, and Q in shared memory: registers are O's.
//
// Needs blocks of a multiple of 16 positions; attn_prefill.cu has the others.
// Oracle: probe/probe.cu against a double-precision sum, and kernels/cpu.
#include <algorithm>
#include <type_traits>

#include "hopper.cuh"

static constexpr int M = XK_TILE, STAGES = 2, RUN = XK_RUN;
static constexpr int CONSUMERS = 256, THREADS = CONSUMERS + 128;
static constexpr float SLACK = 8; // see softmax

// How tiles lie in shared memory: 64-column halves, swizzled. WHOLE: those of a
// group of eight positions follow each other, so that a run is one copy.
template <int D> struct Shape {
  static constexpr bool WHOLE = D % 64 == 0, Q_REGS = D <= 128;
  static constexpr int N = xk_attn_step(D), HALVES = (D + 63) / 64, WIDTH = 64 * HALVES, Q_BUFFERS = D <= 128 ? 2 : 1;
  static constexpr int DOWN = WHOLE ? HALVES * 1024 : 1024; // bytes between groups of eight positions
  static constexpr int ACROSS = WHOLE ? 1024 : N * 128;     // and between halves
};

template <int D> struct Smem {
  element q[Shape<D>::Q_BUFFERS][M * Shape<D>::WIDTH]; // [half][row][64]
  element k[STAGES][Shape<D>::N * Shape<D>::WIDTH], v[STAGES][Shape<D>::N * Shape<D>::WIDTH];
  uint64_t q_full[2], q_empty[2], k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
  int item[2];
};

// What there is to do: tiles, or (PACKED) parts, or rows to decode.
struct Items {
  const xk_tile *tiles;
  const xk_part *parts;
  const int32_t *rows;
  int n, heads, total; // heads of a section; PACKED: of K and V
};

struct Item {
  int row, n, pos, table;
  int head;        // of the queries, PACKED: of K and V
  int first, last; // tiles of K
  int partial;     // its first row in Attention::partial, or -1
};

// Of items: sections of heads whose K and V fit in L2 together, in it the longest
// first; PACKED: as they come.
template <int D, bool PACKED> struct Order {
  const Attention &a;
  const Items &list;
  __device__ __forceinline__ Item item(int i) const {
    constexpr int N = Shape<D>::N;
    if constexpr (!PACKED) {
      int size = list.n * list.heads, section = i / size, r = i - section * size;
      xk_tile t = list.tiles[r / list.heads];
      return {t.row, t.n, t.pos, t.table, section * list.heads + r % list.heads, 0, (t.pos + t.n - 1) / N, -1};
    }
    int head = i % list.heads, at = i / list.heads;
    if (list.parts) {
      xk_part p = list.parts[at];
      return {p.row, p.n, p.pos, p.table, head, p.first, p.last, p.partial < 0 ? -1 : (p.partial * list.heads + head) * M};
    }
    int row = list.rows[at], pos = a.positions[row]; // padding: no rows, no positions
    return {row, pos >= 0, max(pos, 0), a.tables[row], head, 0, max(pos, 0) / N, -1};
  }
};

// The slot that hands an item to the other warps, between phases of mbarriers.
// Atomic, since racecheck does not follow those and calls the plain form a race.
__device__ __forceinline__ void put_item(int *slot, int item) { atomicExch(slot, item); }
__device__ __forceinline__ int get_item(int *slot, int lane) {
  int item = 0;
  if (lane == 0) item = atomicOr(slot, 0);
  return __shfl_sync(~0u, item, 0);
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ptxas would move the wait for a multiplication up, ahead of arithmetic that
// is meant to run beside it. It does not move it across this, which needs the
// result of that arithmetic; sums of weights are never negative.
__device__ __forceinline__ void stay(float sum) {
  if (sum < 0) named_sync(7, 32);
}

// What the producer warps share: one copies Q and K, the other V.
template <int D, bool PACKED> struct Source {
  const Attention &a;
  const Pool &p;
  Order<D, PACKED> order;
  const CUtensorMap *kv_map;
  int row0, rows; // of the layer, and of the whole pool

  // Copies tile n of K (value 0) or V: runs of 16 positions, each found by a
  // lane, copied by one.
  __device__ __forceinline__ int find(const Item &item, int n, int value, int lane) const {
    constexpr int N = Shape<D>::N;
    int pos = n * N + lane % (N / RUN) * RUN;
    if (n < item.first || pos >= item.pos + item.n) return rows / 8; // past the pool: zeros
    int b = p.bt.div(pos), kv_head = PACKED ? item.head : item.head / (a.heads / p.kv_heads);
    int block = __ldg(a.tail + item.table + b);
    return (row0 + ((block * 2 + value) * p.kv_heads + kv_head) * p.bt.d + pos - b * p.bt.d) / 8;
  }
  __device__ __forceinline__ void load(element *to, uint64_t *full, uint64_t *empty, int round, int found, int lane) const {
    using S = Shape<D>;
    mbar_wait(empty, (round & 1) ^ 1);
    if (lane == 0) mbar_expect(full, S::N * S::WIDTH * 2);
#pragma unroll
    for (int r = 0; r < S::N / RUN; r++) {
      int at = __shfl_sync(~0u, found, r);
      if constexpr (S::WHOLE) {
        if (lane == 0) tma_load(to + r * RUN * D, kv_map, full, 0, 0, 0, at);
      } else {
        if (lane < S::HALVES) tma_load(to + lane * S::N * 64 + r * RUN * 64, kv_map, full, lane * 64, at * 8);
      }
    }
  }
};

template <int D, bool PACKED> static __device__ __forceinline__ void produce_qk(Smem<D> &m, const Source<D, PACKED> &s, unsigned *work, const CUtensorMap *q_map) {
  using S = Shape<D>;
  const int lane = threadIdx.x % 32, group = s.a.heads / s.p.kv_heads, q_rows = PACKED ? M / group * group : M;
  int it = 0; // K tiles so far
  for (int w = 0;; w++) {
    int index = 0, buffer = w % S::Q_BUFFERS;
    if (lane == 0) index = atomicAdd(work, 1);
    index = __shfl_sync(~0u, index, 0);
    mbar_wait(&m.q_empty[buffer], (w / S::Q_BUFFERS & 1) ^ 1);
    if (index >= s.order.list.total) {
      if (lane == 0) {
        put_item(&m.item[buffer], -1);
        mbar_arrive(&m.q_full[buffer]);
        if (atomicAdd(work + 1, 1) == gridDim.x - 1) work[0] = 0, work[1] = 0; // the last one out
      }
      return;
    }
    Item item = s.order.item(index);
    if (lane == 0) {
      put_item(&m.item[buffer], index);
      mbar_expect(&m.q_full[buffer], q_rows * S::WIDTH * 2);
      for (int h = 0; h < S::HALVES; h++) {
        element *to = m.q[buffer] + h * M * 64;
        if constexpr (PACKED) tma_load(to, q_map, &m.q_full[buffer], h * 64, item.head * group, item.row);
        else tma_load(to, q_map, &m.q_full[buffer], item.head * D + h * 64, item.row);
      }
    }
    int found = s.find(item, item.last, 0, lane);
    for (int n = item.last; n >= item.first; n--, it++) {
      int next = s.find(item, n - 1, 0, lane); // asked for before the wait
      s.load(m.k[it % STAGES], &m.k_full[it % STAGES], &m.k_empty[it % STAGES], it / STAGES, found, lane);
      found = next;
    }
  }
}

template <int D, bool PACKED> static __device__ __forceinline__ void produce_v(Smem<D> &m, const Source<D, PACKED> &s) {
  using S = Shape<D>;
  int lane = threadIdx.x % 32, it = 0;
  for (int w = 0;; w++) {
    int buffer = w % S::Q_BUFFERS;
    mbar_wait(&m.q_full[buffer], w / S::Q_BUFFERS & 1);
    int index = get_item(&m.item[buffer], lane);
    if (index < 0) return;
    if (lane == 0) mbar_arrive(&m.q_empty[buffer]);
    Item item = s.order.item(index);
    int found = s.find(item, item.last, 1, lane);
    for (int n = item.last; n >= item.first; n--, it++) {
      int next = s.find(item, n - 1, 1, lane);
      s.load(m.v[it % STAGES], &m.v_full[it % STAGES], &m.v_empty[it % STAGES], it / STAGES, found, lane);
      found = next;
    }
  }
}

template <typename T, int D, bool PACKED>
static __device__ __forceinline__ void consume(Smem<D> &m, const Attention &a, int group, Order<D, PACKED> order) {
  using S = Shape<D>;
  constexpr int N = S::N;
  int wg = __shfl_sync(~0u, int(threadIdx.x) / 128, 0) - 1, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const float scale = a.scale * 1.4426950408889634f, slack = SLACK / scale;
  const int turn = 1 + wg, other = 2 - wg, mine = 3 + wg; // named barriers
  const int row = wg * 64 + warp * 16 + g; // and row + 8
  if (wg == 1) named_arrive(other, CONSUMERS);
  int it = 0;
  for (int w = 0;; w++) {
    int buffer = w % S::Q_BUFFERS;
    mbar_wait(&m.q_full[buffer], (w / S::Q_BUFFERS) & 1);
    int index = get_item(&m.item[buffer], lane);
    if (index < 0) {
      if (wg == 0) named_sync(turn, CONSUMERS); // the other's last turn: no barrier stays half full
      return;
    }
    Item item = order.item(index);
    int length = item.pos + item.n;
    int diagonal = item.pos + (PACKED ? wg * 64 / group : wg * 64); // of the first row
    uint32_t q[S::Q_REGS ? D / 4 : 1];
    if constexpr (S::Q_REGS) {
#pragma unroll
      for (int i = 0; i < D / 16; i++) {
        int r = wg * 64 + warp * 16 + lane % 16;
        ldmatrix4(*reinterpret_cast<uint32_t(*)[4]>(q + 4 * i), smem_addr(m.q[buffer]) + (i / 4) * M * 128 + r * 128 + ((2 * i % 8 + lane / 16) ^ (r & 7)) * 16);
      }
    }
    float s[N / 2], o[D / 2] = {}, top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
    uint32_t probs[N / 4];
    auto scores = [&](int stage) {
      uint64_t k = wgmma_desc(smem_addr(m.k[stage]), S::DOWN, 0);
#pragma unroll
      for (int i = 0; i < D / 16; i++) {
        uint64_t step = k + ((i / 4) * S::ACROSS + i % 4 * 32) / 16;
        if constexpr (S::Q_REGS) wgmma_rs<T, 0>(s, q + 4 * i, step, i > 0);
        else wgmma_ss<T>(s, wgmma_desc(smem_addr(m.q[buffer]) + wg * 64 * 128, 1024, 0) + ((i / 4) * M * 128 + i % 4 * 32) / 16, step, i > 0);
      }
    };
    auto values = [&](int stage) {
      uint64_t v = wgmma_desc(smem_addr(m.v[stage]), S::DOWN, S::ACROSS);
#pragma unroll
      for (int i = 0; i < N / 16; i++) wgmma_rs<T, 1>(o, probs + 4 * i, v + i * 2 * S::DOWN / 16, 1);
    };
    auto mask = [&](int n) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        int most = item.pos + (PACKED ? (row + 8 * h) / group : row + 8 * h) - n * N - 2 * t;
#pragma unroll
        for (int i = 0; i < N / 8; i++)
#pragma unroll
          for (int e = 0; e < 2; e++)
            if (8 * i + e > most) s[4 * i + 2 * h + e] = -INFINITY;
      }
    };
    // Turns s into weights; returns by what O must be scaled. A row's top rises
    // only when it must: while weights stay below 2^SLACK, O is left alone.
    auto softmax = [&](float (&old)[2]) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float most = -INFINITY;
#pragma unroll
        for (int i = 0; i < N / 8; i++) most = fmaxf(most, fmaxf(s[4 * i + 2 * h], s[4 * i + 2 * h + 1]));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        bool rises = most > top[h] + slack;
        old[h] = rises ? exp2_fast((top[h] - most) * scale) : 1.0f;
        if (rises) top[h] = most;
        float base = (top[h] == -INFINITY ? 0.0f : top[h]) * scale; // a row may have had nothing yet
        float part = 0;
#pragma unroll
        for (int i = 0; i < N / 8; i++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            float &x = s[4 * i + 2 * h + e];
            x = exp2_fast(fmaf(x, scale, -base));
            part += x;
          }
        sum[h] = sum[h] * old[h] + part;
      }
    };
    auto convert = [&] {
#pragma unroll
      for (int i = 0; i < N / 4; i++) probs[i] = pack<T>(s[2 * i], s[2 * i + 1]);
    };
    // Rows of V after the last position may hold anything: 0 x NaN is not 0.
    auto clear_tail = [&] {
      int from = length - item.last * N, to = int(round_up(from, RUN));
      uint4 *v = reinterpret_cast<uint4 *>(m.v[it % STAGES]);
      mbar_wait(&m.v_full[it % STAGES], (it / STAGES) & 1);
      constexpr int PARTS = S::WIDTH / 8; // of 16 bytes
      for (int i = threadIdx.x % 128; i < (to - from) * PARTS; i += 128) {
        int r = from + i / PARTS, part = i % PARTS;
        v[((r / 8) * S::DOWN + (part / 8) * S::ACROSS) / 16 + r % 8 * 8 + part % 8] = make_uint4(0, 0, 0, 0);
      }
      fence_async_shared();
      named_sync(mine, 128);
    };
    auto release = [&](uint64_t *empty) {
      if (lane == 0) mbar_arrive(empty);
    };

    float old[2];
    mbar_wait(&m.k_full[it % STAGES], (it / STAGES) & 1);
    wgmma_fence();
    scores(it % STAGES);
    wgmma_commit();
    wgmma_wait<0>();
    pin(s);
    release(&m.k_empty[it % STAGES]);
    mask(item.last);
    softmax(old);
    convert();
    if (length % RUN && length - item.last * N < N) clear_tail();
    int n = item.last - 1;
    auto step = [&](auto masked) {
      int now = it % STAGES, next = (it + 1) % STAGES;
      mbar_wait(&m.k_full[next], ((it + 1) / STAGES) & 1);
      named_sync(turn, CONSUMERS);
      wgmma_fence();
      scores(next);
      wgmma_commit();
      mbar_wait(&m.v_full[now], (it / STAGES) & 1);
      wgmma_fence();
      values(now);
      wgmma_commit();
      named_arrive(other, CONSUMERS);
      wgmma_wait<1>();
      pin(s);
      release(&m.k_empty[next]);
      if constexpr (decltype(masked)::value) mask(n);
      softmax(old);
      bool rescale = __any_sync(~0u, old[0] != 1 || old[1] != 1);
      stay(sum[0] + sum[1]);
      wgmma_wait<0>();
      pin(o);
      release(&m.v_empty[now]);
      convert();
      if (rescale) {
#pragma unroll
        for (int i = 0; i < D / 2; i++) o[i] *= old[i / 2 % 2];
      }
      it++, n--;
    };
    while (n >= item.first && (n + 1) * N - 1 > diagonal) step(std::true_type{}); // the diagonal crosses
    while (n >= item.first) step(std::false_type{});
    mbar_wait(&m.v_full[it % STAGES], (it / STAGES) & 1);
    wgmma_fence();
    values(it % STAGES);
    wgmma_commit();
    wgmma_wait<0>();
    pin(o);
    release(&m.v_empty[it % STAGES]);
    it++;

#pragma unroll
    for (int h = 0; h < 2; h++) {
      sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
      sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
    }
    const int valid = PACKED ? item.n * group : item.n;
    if (PACKED && item.partial >= 0) { // to be merged with other parts
#pragma unroll
      for (int h = 0; h < 2; h++) {
        if (row + 8 * h >= valid) continue;
        float *to = a.partial + int64_t(item.partial + row + 8 * h) * (D + XK_STATS);
#pragma unroll
        for (int i = 0; i < D / 8; i++) __stcg(reinterpret_cast<float2 *>(to + 8 * i + 2 * t), make_float2(o[4 * i + 2 * h], o[4 * i + 2 * h + 1]));
        if (t == 0) __stcg(reinterpret_cast<float2 *>(to + D), make_float2(top[h] * scale, sum[h]));
      }
      release(&m.q_empty[buffer]);
      continue;
    }
    // O leaves through the rows of Q that this warp had.
    if constexpr (S::Q_REGS) __syncwarp();
    else named_sync(mine, 128); // the warpgroup has read them
    sum[0] = 1.0f / sum[0], sum[1] = 1.0f / sum[1];
    uint8_t *rows = reinterpret_cast<uint8_t *>(m.q[buffer]);
#pragma unroll
    for (int i = 0; i < D / 8; i++)
#pragma unroll
      for (int h = 0; h < 2; h++)
        *reinterpret_cast<uint32_t *>(rows + (i / 8) * M * 128 + (row + 8 * h) * 128 + ((i % 8) ^ g) * 16 + t * 4) =
            pack<T>(o[4 * i + 2 * h] * sum[h], o[4 * i + 2 * h + 1] * sum[h]);
    __syncwarp();
    constexpr int PARTS = D / 8; // 16-byte parts of a row
#pragma unroll
    for (int i = 0; i < 16 * PARTS / 32; i++) {
      int r = wg * 64 + warp * 16 + (i * 32 + lane) / PARTS, part = (i * 32 + lane) % PARTS;
      uint4 v = *reinterpret_cast<uint4 *>(rows + (part / 8) * M * 128 + r * 128 + ((part % 8) ^ (r & 7)) * 16);
      int64_t to = PACKED ? int64_t(item.row + r / group) * a.heads + item.head * group + r % group : int64_t(item.row + r) * a.heads + item.head;
      if (r < valid) *reinterpret_cast<uint4 *>(a.out + to * D + part * 8) = v;
    }
    fence_async_shared();
    __syncwarp();
    release(&m.q_empty[buffer]);
  }
}

template <typename T, int D, bool PACKED>
static __global__ __launch_bounds__(THREADS, 1) void hopper_kernel(Attention a, Pool p, Items items, unsigned *work, int row0, int rows, const __grid_constant__ CUtensorMap q_map,
                                                                   const __grid_constant__ CUtensorMap kv_map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ uint8_t raw[];
  Smem<D> &m = *reinterpret_cast<Smem<D> *>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t(1023));
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; i++) mbar_init(&m.q_full[i], 1), mbar_init(&m.q_empty[i], CONSUMERS / 32 + 1);
    for (int i = 0; i < STAGES; i++) {
      mbar_init(&m.k_full[i], 1), mbar_init(&m.k_empty[i], CONSUMERS / 32);
      mbar_init(&m.v_full[i], 1), mbar_init(&m.v_empty[i], CONSUMERS / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  pdl_wait();
  pdl_next();
  Order<D, PACKED> order = {a, items};
  if (threadIdx.x < 128) {
    regs_give<40>();
    Source<D, PACKED> source = {a, p, order, &kv_map, row0, rows};
    fence_async_global();
    if (threadIdx.x < 32) produce_qk<D, PACKED>(m, source, work, &q_map);
    else if (threadIdx.x < 64) produce_v<D, PACKED>(m, source);
  } else {
    regs_take<232>();
    consume<T, D, PACKED>(m, a, a.heads / p.kv_heads, order);
  }
#endif
}

// ---------------------------------------------------------------- launchers

template <int D> static constexpr int smem_bytes = int(sizeof(Smem<D>)) + 1024;

bool xk_attn_hopper_takes(const Pool &p, const Prefill &f) { return f.kv_map && p.bt.d % RUN == 0; }

template <bool PACKED> static int32_t start(const Launch &l, const Attention &a, const Pool &p, const Prefill &f, const Items &items) {
  return xk_each_form(l.type, p.head_dim, [&](auto t, auto dim) {
    return launch(l, hopper_kernel<decltype(t), dim, PACKED>, std::min(items.total, f.sms), THREADS, smem_bytes<dim>, a, p, items, f.work, f.first_row, f.total_rows,
                  PACKED ? *f.heads_map : *f.q_map, *f.kv_map);
  });
}

int32_t xk_attn_decode_hopper(const Launch &l, const Attention &a, const Pool &p, const Prefill &f, const int32_t *rows, int n) {
  Items items = {nullptr, nullptr, rows, n, p.kv_heads, n * p.kv_heads};
  return start<true>(l, a, p, f, items);
}

int32_t xk_attn_prefill_hopper(const Launch &l, const Attention &a, const Pool &p, const Prefill &f) {
  if (f.n_parts) {
    Items items = {nullptr, f.parts, nullptr, f.n_parts, p.kv_heads, f.n_parts * p.kv_heads};
    return start<true>(l, a, p, f, items);
  }
  auto fit = [&](int heads) { return int64_t(f.longest) * p.head_dim * 4 * heads <= (int64_t(24) << 20); };
  int per = 1; // KV heads of a section
  while (per < p.kv_heads && p.kv_heads % (2 * per) == 0 && fit(2 * per)) per *= 2;
  if (fit(p.kv_heads)) per = p.kv_heads;
  Items items = {f.tiles, nullptr, nullptr, f.n_tiles, per * (a.heads / p.kv_heads), f.n_tiles * a.heads};
  return start<false>(l, a, p, f, items);
}

int32_t xk_attn_hopper_init(xk_dtype type) {
  return xk_all_forms(type, [](auto t, auto d) {
    XK_TRY(cudaFuncSetAttribute(hopper_kernel<decltype(t), d, false>, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes<d>));
    XK_TRY(cudaFuncSetAttribute(hopper_kernel<decltype(t), d, true>, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes<d>));
    return int32_t(XK_OK);
  });
}
