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
// A row's result is a function of its position and of the rows at and before it:
// tiles of positions are aligned and taken from its own downwards, and what a
// tile has after it, or a tile has beside it, adds nothing. So the same code also
// decodes where that is promised (DECODE, batch_invariant): an item is then one
// row of a sequence and the query heads of one KV head, as the rows of a tile.
//
// Needs blocks of a multiple of 16 positions; attn_prefill.cu has the others.
// Oracle: probe/probe.cu against a double-precision sum, and kernels/cpu.
#include <type_traits>

#include "hopper.cuh"

static constexpr int M = 128, N = 128, STAGES = 2, RUN = 16;
static constexpr int CONSUMERS = 256, THREADS = CONSUMERS + 128;

template <int D> struct Smem {
  bf16 q[2][M * D];                         // [64-column half][row][64], swizzled
  bf16 k[STAGES][N * D], v[STAGES][N * D];  // [row / 8][64-column half][row % 8][64], swizzled
  uint64_t q_full[2], q_empty[2], k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
  int item[2];
};

struct Item {
  xk_tile tile;
  int head, last; // of the queries, DECODE: of K and V; last: the K tile of the last query
};

// Of items: sections of heads whose K and V fit in L2 together, in it the longest
// first; DECODE: as they come.
template <bool DECODE> struct Order {
  const Attention &a;
  const xk_tile *tiles;
  const int32_t *rows; // DECODE, instead of tiles
  int n_tiles, heads;  // heads of a section
  __device__ Item item(int i) const {
    int size = n_tiles * heads, section = i / size, r = i - section * size;
    Item it;
    if constexpr (DECODE) {
      int row = rows[r / heads], pos = a.positions[row];
      it.tile = {row, pos >= 0, max(pos, 0), a.tables[row]}; // padding: no rows, no positions
    } else {
      it.tile = tiles[r / heads];
    }
    it.head = section * heads + r % heads;
    it.last = max(it.tile.pos + it.tile.n - 1, 0) / N;
    return it;
  }
};

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
template <int D, bool DECODE> struct Source {
  const Attention &a;
  const Pool &p;
  Order<DECODE> order;
  const CUtensorMap *kv_map;
  int row0, rows; // of the layer, and of the whole pool

  // Copies tile n of K (value 0) or V: eight runs of 16 positions, each found
  // by a lane, copied by one.
  __device__ __forceinline__ int find(const Item &item, int n, int value, int lane) const {
    int pos = n * N + lane % 8 * RUN;
    if (n < 0 || pos >= item.tile.pos + item.tile.n) return rows / 8; // past the pool: zeros
    int b = p.bt.div(pos), kv_head = DECODE ? item.head : item.head / (a.heads / p.kv_heads);
    int block = __ldg(a.tail + item.tile.table + b);
    return (row0 + ((block * 2 + value) * p.kv_heads + kv_head) * p.bt.d + pos - b * p.bt.d) / 8;
  }
  __device__ __forceinline__ void load(bf16 *to, uint64_t *full, uint64_t *empty, int round, int found, int lane) const {
    mbar_wait(empty, (round & 1) ^ 1);
    if (lane == 0) mbar_expect(full, N * D * 2);
#pragma unroll
    for (int r = 0; r < N / RUN; r++) {
      int at = __shfl_sync(~0u, found, r);
      if (lane == 0) tma_load(to + r * RUN * D, kv_map, full, 0, 0, 0, at);
    }
  }
};

template <int D, bool DECODE> static __device__ __forceinline__ void produce_qk(Smem<D> &m, const Source<D, DECODE> &s, int items, unsigned *work, const CUtensorMap *q_map) {
  int lane = threadIdx.x % 32, it = 0; // it: K tiles so far
  for (int w = 0;; w++) {
    int index = 0, buffer = w % 2;
    if (lane == 0) index = atomicAdd(work, 1);
    index = __shfl_sync(~0u, index, 0);
    mbar_wait(&m.q_empty[buffer], (w / 2 & 1) ^ 1);
    if (index >= items) {
      if (lane == 0) {
        m.item[buffer] = -1;
        mbar_arrive(&m.q_full[buffer]);
        if (atomicAdd(work + 1, 1) == gridDim.x - 1) work[0] = 0, work[1] = 0; // the last one out
      }
      return;
    }
    Item item = s.order.item(index);
    if (lane == 0) {
      m.item[buffer] = index;
      mbar_expect(&m.q_full[buffer], M * D * 2);
      int column = DECODE ? 0 : item.head * D, row = item.tile.row;
      if constexpr (DECODE) row = row * (s.a.heads + 2 * s.p.kv_heads) + item.head * (s.a.heads / s.p.kv_heads); // a row of the map is a head's
      for (int h = 0; h < D / 64; h++) tma_load(m.q[buffer] + h * M * 64, q_map, &m.q_full[buffer], column + h * 64, row);
    }
    int found = s.find(item, item.last, 0, lane);
    for (int n = item.last; n >= 0; n--, it++) {
      int next = s.find(item, n - 1, 0, lane); // asked for before the wait
      s.load(m.k[it % STAGES], &m.k_full[it % STAGES], &m.k_empty[it % STAGES], it / STAGES, found, lane);
      found = next;
    }
  }
}

template <int D, bool DECODE> static __device__ __forceinline__ void produce_v(Smem<D> &m, const Source<D, DECODE> &s) {
  int lane = threadIdx.x % 32, it = 0;
  for (int w = 0;; w++) {
    int buffer = w % 2;
    mbar_wait(&m.q_full[buffer], w / 2 & 1);
    int index = m.item[buffer];
    if (index < 0) return;
    __syncwarp();
    if (lane == 0) mbar_arrive(&m.q_empty[buffer]);
    Item item = s.order.item(index);
    int found = s.find(item, item.last, 1, lane);
    for (int n = item.last; n >= 0; n--, it++) {
      int next = s.find(item, n - 1, 1, lane);
      s.load(m.v[it % STAGES], &m.v_full[it % STAGES], &m.v_empty[it % STAGES], it / STAGES, found, lane);
      found = next;
    }
  }
}

template <int D, bool DECODE>
static __device__ __forceinline__ void consume(Smem<D> &m, const Attention &a, int group, Order<DECODE> order) {
  int wg = __shfl_sync(~0u, int(threadIdx.x) / 128, 0) - 1, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const float scale = a.scale * 1.4426950408889634f;
  const int turn = 1 + wg, other = 2 - wg, mine = 3 + wg; // named barriers
  if (wg == 1) named_arrive(other, CONSUMERS);
  int it = 0;
  for (int w = 0;; w++) {
    int buffer = w % 2;
    mbar_wait(&m.q_full[buffer], (w / 2) & 1);
    int index = m.item[buffer];
    if (index < 0) return;
    Item item = order.item(index);
    int length = item.tile.pos + item.tile.n;
    int row = wg * 64 + warp * 16 + g; // and row + 8
    int first = item.tile.pos + (DECODE ? 0 : wg * 64);
    uint32_t q[D / 4];
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
      int r = wg * 64 + warp * 16 + lane % 16;
      ldmatrix4(*reinterpret_cast<uint32_t(*)[4]>(q + 4 * i), smem_addr(m.q[buffer]) + (i / 4) * M * 128 + r * 128 + ((2 * i % 8 + lane / 16) ^ (r & 7)) * 16);
    }
    float s[64], o[D / 2] = {}, top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
    uint32_t probs[32];
    constexpr int DOWN = D / 64 * 1024; // between groups of eight positions
    auto scores = [&](int stage) {
      uint64_t k = wgmma_desc(smem_addr(m.k[stage]), DOWN, 0);
#pragma unroll
      for (int i = 0; i < D / 16; i++) wgmma_rs<0>(s, q + 4 * i, k + ((i / 4) * 1024 + i % 4 * 32) / 16, i > 0);
    };
    auto values = [&](int stage) {
      uint64_t v = wgmma_desc(smem_addr(m.v[stage]), DOWN, 1024);
#pragma unroll
      for (int i = 0; i < N / 16; i++) wgmma_rs<1>(o, probs + 4 * i, v + i * 2 * DOWN / 16, 1);
    };
    auto mask = [&](int n) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        int most = item.tile.pos + (DECODE ? 0 : row + 8 * h) - n * N - 2 * t;
#pragma unroll
        for (int i = 0; i < 16; i++)
#pragma unroll
          for (int e = 0; e < 2; e++)
            if (8 * i + e > most) s[4 * i + 2 * h + e] = -INFINITY;
      }
    };
    // Turns s into weights; returns by what O must be scaled.
    auto softmax = [&](float (&old)[2]) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float most = top[h];
#pragma unroll
        for (int i = 0; i < 16; i++) most = fmaxf(most, fmaxf(s[4 * i + 2 * h], s[4 * i + 2 * h + 1]));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        float base = (most == -INFINITY ? 0.0f : most) * scale; // a row may have nothing in this tile
        old[h] = exp2_fast(top[h] * scale - base);
        top[h] = most;
        float part = 0;
#pragma unroll
        for (int i = 0; i < 16; i++)
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
      for (int i = 0; i < 32; i++) probs[i] = pack(s[2 * i], s[2 * i + 1]);
    };
    // Rows of V after the last position may hold anything: 0 x NaN is not 0.
    auto clear_tail = [&] {
      int from = length - item.last * N, to = int(round_up(from, RUN));
      uint4 *v = reinterpret_cast<uint4 *>(m.v[it % STAGES]);
      mbar_wait(&m.v_full[it % STAGES], (it / STAGES) & 1);
      constexpr int PARTS = D / 8; // of 16 bytes
      for (int i = threadIdx.x % 128; i < (to - from) * PARTS; i += 128) {
        int r = from + i / PARTS, part = i % PARTS;
        v[(r / 8) * 8 * PARTS + (part / 8) * 64 + r % 8 * 8 + part % 8] = make_uint4(0, 0, 0, 0);
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
    if (length % RUN) clear_tail();
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
      stay(sum[0] + sum[1]);
      wgmma_wait<0>();
      pin(o);
      release(&m.v_empty[now]);
      convert();
#pragma unroll
      for (int i = 0; i < D / 2; i++) o[i] *= old[i / 2 % 2];
      it++, n--;
    };
    while (n >= 0 && (n + 1) * N - 1 > first) step(std::true_type{}); // the diagonal crosses
    while (n >= 0) step(std::false_type{});
    mbar_wait(&m.v_full[it % STAGES], (it / STAGES) & 1);
    wgmma_fence();
    values(it % STAGES);
    wgmma_commit();
    wgmma_wait<0>();
    pin(o);
    release(&m.v_empty[it % STAGES]);
    it++;

    // O leaves through the rows of Q that this warp had.
    __syncwarp();
#pragma unroll
    for (int h = 0; h < 2; h++) {
      sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
      sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
      sum[h] = 1.0f / sum[h];
    }
    uint8_t *rows = reinterpret_cast<uint8_t *>(m.q[buffer]);
#pragma unroll
    for (int i = 0; i < D / 8; i++)
#pragma unroll
      for (int h = 0; h < 2; h++)
        *reinterpret_cast<uint32_t *>(rows + (i / 8) * M * 128 + (row + 8 * h) * 128 + ((i % 8) ^ g) * 16 + t * 4) =
            pack(o[4 * i + 2 * h] * sum[h], o[4 * i + 2 * h + 1] * sum[h]);
    __syncwarp();
    constexpr int PARTS = D / 8; // 16-byte parts of a row
#pragma unroll
    for (int i = 0; i < 16 * PARTS / 32; i++) {
      int r = wg * 64 + warp * 16 + (i * 32 + lane) / PARTS, part = lane % PARTS;
      uint4 v = *reinterpret_cast<uint4 *>(rows + (part / 8) * M * 128 + r * 128 + ((part % 8) ^ (r & 7)) * 16);
      int64_t to = DECODE ? int64_t(item.tile.row) * a.heads + item.head * group + r : int64_t(item.tile.row + r) * a.heads + item.head;
      if (r < (DECODE ? item.tile.n * group : item.tile.n)) *reinterpret_cast<uint4 *>(a.out + to * D + part * 8) = v;
    }
    fence_async_shared();
    __syncwarp();
    release(&m.q_empty[buffer]);
  }
}

template <int D, bool DECODE>
static __global__ __launch_bounds__(THREADS, 1) void hopper_kernel(Attention a, Pool p, const xk_tile *tiles, const int32_t *decode, int n_tiles, int heads, int items, unsigned *work, int row0, int rows,
                                                                   const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap kv_map) {
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
  Order<DECODE> order = {a, tiles, decode, n_tiles, heads};
  if (threadIdx.x < 128) {
    regs_give<40>();
    Source<D, DECODE> source = {a, p, order, &kv_map, row0, rows};
    fence_async_global();
    if (threadIdx.x < 32) produce_qk<D, DECODE>(m, source, items, work, &q_map);
    else if (threadIdx.x < 64) produce_v<D, DECODE>(m, source);
  } else {
    regs_take<232>();
    consume<D, DECODE>(m, a, a.heads / p.kv_heads, order);
  }
#endif
}

// ---------------------------------------------------------------- launchers

template <int D> static constexpr int smem_bytes = int(sizeof(Smem<D>)) + 1024;

bool xk_attn_hopper_takes(const Pool &p, const Prefill &f) { return f.kv_map && p.bt.d % RUN == 0; }

template <int D> static int32_t prefill(const Launch &l, const Attention &a, const Pool &p, const Prefill &f) {
  int per = 1; // KV heads of a section
  while (per < p.kv_heads && p.kv_heads % (2 * per) == 0 && int64_t(f.longest) * D * 4 * 2 * per <= (int64_t(24) << 20)) per *= 2;
  if (int64_t(f.longest) * D * 4 * p.kv_heads <= (int64_t(24) << 20)) per = p.kv_heads;
  int items = f.n_tiles * a.heads;
  return launch(l, hopper_kernel<D, false>, items < f.sms ? items : f.sms, THREADS, smem_bytes<D>, a, p, f.tiles, nullptr, f.n_tiles, per * (a.heads / p.kv_heads), items, f.work, f.first_row, f.total_rows, *f.q_map, *f.kv_map);
}

template <int D> static int32_t decode(const Launch &l, const Attention &a, const Pool &p, const Prefill &f, const int32_t *rows, int n) {
  int items = n * p.kv_heads;
  return launch(l, hopper_kernel<D, true>, items < f.sms ? items : f.sms, THREADS, smem_bytes<D>, a, p, nullptr, rows, n, p.kv_heads, items, f.work, f.first_row, f.total_rows, *f.heads_map, *f.kv_map);
}

int32_t xk_attn_decode_hopper(const Launch &l, const Attention &a, const Pool &p, const Prefill &f, const int32_t *rows, int n) {
  return p.head_dim == 64 ? decode<64>(l, a, p, f, rows, n) : decode<128>(l, a, p, f, rows, n);
}

int32_t xk_attn_prefill_hopper(const Launch &l, const Attention &a, const Pool &p, const Prefill &f) {
  return p.head_dim == 64 ? prefill<64>(l, a, p, f) : prefill<128>(l, a, p, f);
}

static int32_t encode(CUtensorMap *map, const void *base, uint32_t rank, const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box) {
  void *f = nullptr;
  cudaDriverEntryPointQueryResult found;
  XK_TRY(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess) return xk_fail(XK_CUDA, "no cuTensorMapEncodeTiled in this driver");
  cuuint32_t steps[4] = {1, 1, 1, 1};
  CUresult r = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(f)(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank, const_cast<void *>(base), dims, strides, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return r == CUDA_SUCCESS ? XK_OK : xk_fail(XK_CUDA, "cuTensorMapEncodeTiled: %d", int(r));
}

// The pool as [rows / 8][64-column half][row % 8][64]: a box is a run.
int32_t xk_kv_map(CUtensorMap *map, const bf16 *pool, int64_t rows, int head_dim) {
  cuuint64_t dims[4] = {64, 8, cuuint64_t(head_dim) / 64, cuuint64_t(rows) / 8}, row = cuuint64_t(head_dim) * 2, strides[3] = {row, 128, 8 * row};
  cuuint32_t box[4] = {64, 8, cuuint32_t(head_dim) / 64, RUN / 8};
  return encode(map, pool, 4, dims, strides, box);
}
// qkv as [rows][width]: a box is 64 columns of 128 rows.
int32_t xk_q_map(CUtensorMap *map, const bf16 *qkv, int64_t rows, int width) {
  cuuint64_t dims[2] = {cuuint64_t(width), cuuint64_t(rows)}, strides[1] = {cuuint64_t(width) * 2};
  cuuint32_t box[2] = {64, M};
  return encode(map, qkv, 2, dims, strides, box);
}

int32_t xk_attn_hopper_init() {
  auto init = [](auto kernel, int bytes) { return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes); };
  XK_TRY(init(hopper_kernel<64, false>, smem_bytes<64>));
  XK_TRY(init(hopper_kernel<128, false>, smem_bytes<128>));
  XK_TRY(init(hopper_kernel<64, true>, smem_bytes<64>));
  XK_TRY(init(hopper_kernel<128, true>, smem_bytes<128>));
  return XK_OK;
}
