// Paged prefill attention on Hopper (causal, GQA, any prefix in the pool), in
// the manner of FlashAttention-3: one producer warp and two consumer
// warpgroups a CTA. A work item is an xk_tile (128 query rows) of one head; a
// warpgroup has 64 of its rows, S and O in registers.
//
// The producer finds K and V through the block table: a tile of 128 positions
// is eight runs of 16, and each lane asks the bulk copy engine for one run of
// one 64-column half. K and V have rings of their own, Q two buffers, so the
// next item's loads run under this one's end.
// The consumers take turns at the tensor cores (named barriers 1 and 2): one
// multiplies while the other is in its softmax, and each also has its own
// S = Q K(i+1) and O += P(i) V(i) in flight during the softmax of i+1.
// Items are taken from a counter, the longest first; which CTA has one does
// not change its result.
//
// Needs blocks of a multiple of 16 positions; attn_prefill.cu has the others.
// Oracle: probe/probe.cu against a double-precision sum, and kernels/cpu.
#include <type_traits>

#include "hopper.cuh"

static constexpr int M = 128, N = 128, STAGES = 2, RUN = 16;
static constexpr int CONSUMERS = 256, THREADS = CONSUMERS + 128;

template <int D> struct Smem {
  bf16 q[2][M * D], k[STAGES][N * D], v[STAGES][N * D]; // [64-column half][row][64], swizzled
  uint64_t q_full[2], q_empty[2], k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
  int item[2];
};

struct Item {
  xk_tile tile;
  int head, last; // last: the K tile of the last query
};

struct Order { // of items: sections of heads whose K and V fit in L2 together, in it the longest first
  int n_tiles, heads; // heads of a section
  __device__ Item item(int i, const xk_tile *tiles) const {
    int size = n_tiles * heads, section = i / size, r = i - section * size;
    Item it;
    it.tile = tiles[r / heads];
    it.head = section * heads + r % heads;
    it.last = (it.tile.pos + it.tile.n - 1) / N;
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
static __device__ __forceinline__ void stay(float sum) {
  if (sum < 0) named_sync(7, 32);
}

template <int D>
static __device__ __forceinline__ void produce(Smem<D> &m, const Attention &a, const Pool &p, const xk_tile *tiles, Order order, int items, unsigned *work, int row0,
                                               const CUtensorMap *q_map, const CUtensorMap *kv_map, int out_of_range) {
  constexpr int HALVES = D / 64;
  int lane = threadIdx.x % 32, run = lane % 8, half = lane / 8;
  bool copies = half < HALVES;
  int group = a.heads / p.kv_heads, value = p.kv_heads * p.bt.d; // rows from K to V
  int it = 0; // K tiles so far
  for (int w = 0;; w++) {
    int index = 0, buffer = w & 1;
    if (lane == 0) index = atomicAdd(work, 1);
    index = __shfl_sync(~0u, index, 0);
    mbar_wait(&m.q_empty[buffer], ((w >> 1) & 1) ^ 1);
    if (index >= items) {
      if (lane == 0) {
        m.item[buffer] = -1;
        mbar_arrive(&m.q_full[buffer]);
        if (atomicAdd(work + 1, 1) == gridDim.x - 1) work[0] = 0, work[1] = 0; // the last one out
      }
      return;
    }
    Item item = order.item(index, tiles);
    if (lane == 0) {
      m.item[buffer] = index;
      mbar_expect(&m.q_full[buffer], M * D * 2);
      for (int h = 0; h < HALVES; h++) tma_load(m.q[buffer] + h * M * 64, q_map, &m.q_full[buffer], item.head * D + h * 64, item.tile.row);
    }
    int length = item.tile.pos + item.tile.n, kv_head = item.head / group;
    const int32_t *table = a.tail + item.tile.table;
    auto row_of = [&](int n) { // of this lane's run in K tile n
      int pos = n * N + run * RUN;
      if (n < 0 || pos >= length) return out_of_range;
      int b = p.bt.div(pos);
      return row0 + (__ldg(table + b) * 2 * p.kv_heads + kv_head) * p.bt.d + pos - b * p.bt.d;
    };
    auto load = [&](bf16 *to, uint64_t *full, uint64_t *empty, int t, int row) {
      mbar_wait(empty, ((t / STAGES) & 1) ^ 1);
      if (lane == 0) mbar_expect(full, N * D * 2);
      __syncwarp();
      if (copies) tma_load(to + half * N * 64 + run * RUN * 64, kv_map, full, half * 64, row);
    };
    int before = out_of_range, here = row_of(item.last);
    for (int n = item.last; n >= -1; n--, it++) { // K of n, V of n + 1
      int next = row_of(n - 1);
      if (n >= 0) load(m.k[it % STAGES], &m.k_full[it % STAGES], &m.k_empty[it % STAGES], it, here);
      if (n < item.last) {
        int t = it - 1;
        load(m.v[t % STAGES], &m.v_full[t % STAGES], &m.v_empty[t % STAGES], t, before == out_of_range ? before : before + value);
      }
      before = here, here = next;
    }
    it--; // the last round had no K
  }
}

template <int D>
static __device__ __forceinline__ void consume(Smem<D> &m, const Attention &a, const xk_tile *tiles, Order order) {
  int wg = __shfl_sync(~0u, int(threadIdx.x) / 128, 0) - 1, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const float scale = a.scale * 1.4426950408889634f;
  const int turn = 1 + wg, other = 2 - wg, mine = 3 + wg; // named barriers
  if (wg == 1) named_arrive(other, CONSUMERS);
  int it = 0;
  for (int w = 0;; w++) {
    int buffer = w & 1;
    mbar_wait(&m.q_full[buffer], (w >> 1) & 1);
    int index = m.item[buffer];
    if (index < 0) return;
    Item item = order.item(index, tiles);
    int length = item.tile.pos + item.tile.n;
    int row = wg * 64 + warp * 16 + g; // and row + 8
    int first = item.tile.pos + wg * 64;
    const uint64_t q = wgmma_desc(smem_addr(m.q[buffer]) + wg * 64 * 128, 16);

    float s[64], o[D / 2] = {}, top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
    uint32_t probs[32];
    auto scores = [&](int stage) {
      uint64_t k = wgmma_desc(smem_addr(m.k[stage]), 16);
#pragma unroll
      for (int i = 0; i < D / 16; i++) wgmma_ss(s, q + ((i / 4) * M * 128 + i % 4 * 32) / 16, k + ((i / 4) * N * 128 + i % 4 * 32) / 16, i > 0);
    };
    auto values = [&](int stage) {
      uint64_t v = wgmma_desc(smem_addr(m.v[stage]), N * 128);
#pragma unroll
      for (int i = 0; i < N / 16; i++) wgmma_rs(o, probs + 4 * i, v + i * 2048 / 16, 1);
    };
    auto mask = [&](int n) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        int most = item.tile.pos + row + 8 * h - n * N - 2 * t;
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
      for (int i = threadIdx.x % 128; i < (to - from) * 8 * (D / 64); i += 128)
        v[(i / 8 % (D / 64)) * N * 8 + (from + i / (8 * (D / 64))) * 8 + i % 8] = make_uint4(0, 0, 0, 0);
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
#pragma unroll
    for (int h = 0; h < 2; h++) {
      sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
      sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
      sum[h] = 1.0f / sum[h];
    }
    named_sync(mine, 128); // all have read Q
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
      if (r < item.tile.n) *reinterpret_cast<uint4 *>(a.out + (int64_t(item.tile.row + r) * a.heads + item.head) * D + part * 8) = v;
    }
    fence_async_shared();
    __syncwarp();
    release(&m.q_empty[buffer]);
  }
}

template <int D>
static __global__ __launch_bounds__(THREADS, 1) void hopper_kernel(Attention a, Pool p, const xk_tile *tiles, Order order, int items, unsigned *work, int row0, int out_of_range,
                                                                   const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap kv_map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ uint8_t raw[];
  Smem<D> &m = *reinterpret_cast<Smem<D> *>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t(1023));
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; i++) mbar_init(&m.q_full[i], 1), mbar_init(&m.q_empty[i], CONSUMERS / 32);
    for (int i = 0; i < STAGES; i++) {
      mbar_init(&m.k_full[i], 1), mbar_init(&m.k_empty[i], CONSUMERS / 32);
      mbar_init(&m.v_full[i], 1), mbar_init(&m.v_empty[i], CONSUMERS / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  pdl_wait();
  pdl_next();
  if (threadIdx.x < 128) {
    regs_give<40>();
    if (threadIdx.x < 32) {
      fence_async_global();
      produce<D>(m, a, p, tiles, order, items, work, row0, &q_map, &kv_map, out_of_range);
    }
  } else {
    regs_take<232>();
    consume<D>(m, a, tiles, order);
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
  Order order = {f.n_tiles, per * (a.heads / p.kv_heads)};
  int items = f.n_tiles * a.heads;
  return launch(l, hopper_kernel<D>, items < f.sms ? items : f.sms, THREADS, smem_bytes<D>, a, p, f.tiles, order, items, f.work, f.first_row, f.total_rows, *f.q_map, *f.kv_map);
}

int32_t xk_attn_prefill_hopper(const Launch &l, const Attention &a, const Pool &p, const Prefill &f) {
  return p.head_dim == 64 ? prefill<64>(l, a, p, f) : prefill<128>(l, a, p, f);
}

static int32_t encode(CUtensorMap *map, const void *base, uint64_t columns, uint64_t rows, uint64_t row_bytes, uint32_t box_rows) {
  void *f = nullptr;
  cudaDriverEntryPointQueryResult found;
  XK_TRY(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess) return xk_fail(XK_CUDA, "no cuTensorMapEncodeTiled in this driver");
  cuuint64_t dims[2] = {columns, rows}, strides[1] = {row_bytes};
  cuuint32_t box[2] = {64, box_rows}, steps[2] = {1, 1};
  CUresult r = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(f)(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void *>(base), dims, strides, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return r == CUDA_SUCCESS ? XK_OK : xk_fail(XK_CUDA, "cuTensorMapEncodeTiled: %d", int(r));
}

// The pool as [rows][head_dim], read in runs of 16 rows.
int32_t xk_kv_map(CUtensorMap *map, const bf16 *pool, int64_t rows, int head_dim) { return encode(map, pool, head_dim, rows, head_dim * 2, RUN); }
// qkv as [rows][width], read 128 rows at once.
int32_t xk_q_map(CUtensorMap *map, const bf16 *qkv, int64_t rows, int width) { return encode(map, qkv, width, rows, int64_t(width) * 2, M); }

int32_t xk_attn_hopper_init() {
  XK_TRY(cudaFuncSetAttribute(hopper_kernel<64>, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes<64>));
  XK_TRY(cudaFuncSetAttribute(hopper_kernel<128>, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes<128>));
  return XK_OK;
}
