// Projections of many rows on Hopper: out[m][n] = sum_k x[m][k] w[n][k] by TMA
// and wgmma, persistent, with the residual's addition or SiLU-mul in the
// epilogue. K is added up in one go, so a row's bits depend on nothing else.
//
// A CTA makes tiles of 128 rows by 256 columns, each of two consumer warpgroups
// 64 rows. The two CTAs of a cluster make tiles of the same columns: each loads
// half of W's part for both. Such items come from a counter, so that a cluster
// which starts late takes less; a group of GROUP of them covers 2048 rows, whose
// X stays in L2 while W streams by.
// Oracle: sums in double precision (probe/gemm.cuh).
#include <algorithm>

#include "cluster.cuh"

static constexpr int BM = 128, BN = 256, BK = 64, STAGES = 4;
static constexpr int CTAS = 2; // of a cluster
static constexpr int GROUP = 2048; // rows
static constexpr int WARPS = 8; // consumers
static constexpr int THREADS = 128 + WARPS * 32;
static constexpr int BOX = 64;   // rows of a copy
static constexpr int STORE_ROWS = 16; // of a store, and of a residual's copy

struct Smem {
  static constexpr int BYTES = (BM + BN) * BK * 2;
  uint8_t ring[STAGES][BYTES];    // X, then W: atoms of eight rows of 128 bytes, swizzled. Or 128 columns of the residual
  element out[WARPS][2][STORE_ROWS * 64]; // a warp's 16 rows of 128 columns
  uint64_t full[STAGES], empty[STAGES];
  uint64_t item_full[2], item_empty[2]; // the latter counts in the first CTA alone
  int item[2];
};

struct Slot { // of the ring
  int at = 0, phase = 0;
  __device__ __forceinline__ void next() {
    if (++at == STAGES) at = 0, phase ^= 1;
  }
};

struct Order {
  int down, across, items; // pairs of tiles
  int group;               // pairs, down
  bool beside;             // a pair's tiles are of the same rows; else of the same columns
  // First row and column of an item, in tiles, for the CTA of this rank.
  __device__ __forceinline__ void tile(int item, int rank, int *m, int *n) const {
    int per = group * across, g = item / per, rest = item - g * per, size = min(group, down - g * group);
    *n = rest / size;
    *m = g * group + rest - *n * size;
    (beside ? *n : *m) *= CTAS;
    (beside ? *n : *m) += rank;
  }
};

// The items of one cluster: the first is its own, further ones are drawn by one
// lane of the first CTA and sent to all. Here one lane waits for one and takes it.
static __device__ __forceinline__ int take_item(Smem &m, int n) {
  mbar_wait_cluster(&m.item_full[n % 2], (n - 1) / 2 & 1);
  const int item = atomicOr(&m.item[n % 2], 0);
  peer_arrive(&m.item_empty[n % 2], 0);
  return item;
}

static __device__ __forceinline__ void draw_items(Smem &m, const Order &o, unsigned *work) {
  int clusters = gridDim.x / CTAS, item;
  pdl_wait(); // the counter was the kernel's before
  for (int n = 1;; n++) {
    mbar_wait(&m.item_empty[n % 2], ((n - 1) / 2 & 1) ^ 1);
    item = clusters + int(atomicAdd(work, 1));
    for (int r = 0; r < CTAS; r++) peer_send(&m.item[n % 2], &m.item_full[n % 2], r, item);
    if (item >= o.items) break;
  }
  if (atomicAdd(work + 1, 1) == unsigned(clusters) - 1) work[0] = 0, work[1] = 0; // the last one out
}

template <Epilogue E>
static __device__ __forceinline__ void produce(Smem &m, const Order &o, int rank, int steps, const CUtensorMap *x, const CUtensorMap *w, const CUtensorMap *out) {
  int item = blockIdx.x / CTAS, tm, tn;
  Slot s;
  o.tile(item, rank, &tm, &tn);
  auto load_x = [&](int at, int k) {
    for (int r = o.beside ? rank * (BM / CTAS) : 0, end = o.beside ? r + BM / CTAS : BM; r < end; r += BOX) {
      if (o.beside) tma_share(m.ring[at] + r * BK * 2, x, &m.full[at], k * BK, tm * BM + r, (1 << CTAS) - 1);
      else tma_load(m.ring[at] + r * BK * 2, x, &m.full[at], k * BK, tm * BM + r);
    }
  };
  auto load_w = [&](int at, int k) {
    for (int r = o.beside ? 0 : rank * (BN / CTAS), end = o.beside ? BN : r + BN / CTAS; r < end; r += BOX) {
      if (o.beside) tma_load(m.ring[at] + (BM + r) * BK * 2, w, &m.full[at], k * BK, tn * BN + r);
      else tma_share(m.ring[at] + (BM + r) * BK * 2, w, &m.full[at], k * BK, tn * BN + r, (1 << CTAS) - 1);
    }
  };
  int ahead = min(STAGES, steps); // weights depend on no kernel
  for (int k = 0; k < ahead; k++) mbar_expect(&m.full[k], Smem::BYTES), load_w(k, k);
  pdl_wait();
  fence_async_global(); // X was stored by ordinary means
  for (int k = 0; k < ahead; k++) load_x(k, k), s.next();
  for (int n = 1;; n++) {
    for (int k = ahead; k < steps; k++, s.next()) {
      mbar_wait(&m.empty[s.at], s.phase ^ 1);
      mbar_expect(&m.full[s.at], Smem::BYTES);
      load_w(s.at, k);
      load_x(s.at, k);
    }
    if constexpr (E == ADD) {
      for (int c = 0; c < BN; c += 128, s.next()) {
        mbar_wait(&m.empty[s.at], s.phase ^ 1);
        mbar_expect(&m.full[s.at], BM * 128 * 2);
        for (int h = 0; h < 2; h++)
          for (int r = 0; r < BM; r += STORE_ROWS) tma_load(m.ring[s.at] + h * BM * 128 + r * 128, out, &m.full[s.at], tn * BN + c + h * 64, tm * BM + r);
      }
    }
    item = take_item(m, n);
    if (item >= o.items) return;
    o.tile(item, rank, &tm, &tn);
    ahead = 0;
  }
}

template <typename T, Epilogue E>
static __device__ __forceinline__ void consume(Smem &m, const Order &o, int rank, int steps, const CUtensorMap *out) {
  const int warp = __shfl_sync(~0u, int(threadIdx.x) / 32 - 4, 0), lane = threadIdx.x % 32, wg = warp / 4, g = lane / 4, t = lane % 4;
  auto release = [&](int at) { // both fill this one's ring
    if (lane < CTAS) peer_arrive(&m.empty[at], lane);
  };
  int item = blockIdx.x / CTAS, tm, tn;
  Slot s;
  for (int n = 1; item < o.items; n++) {
    o.tile(item, rank, &tm, &tn);
    float d[BN / 2];
    int last = 0;
    for (int k = 0; k < steps; k++, s.next()) {
      mbar_wait(&m.full[s.at], s.phase);
      uint32_t at = smem_addr(m.ring[s.at]);
      uint64_t a = wgmma_desc(at + wg * 64 * BK * 2, 1024, 0), b = wgmma_desc(at + BM * BK * 2, 1024, 0);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < BK / 16; i++) wgmma_ss<T>(d, a + 2 * i, b + 2 * i, k | i);
      wgmma_commit();
      wgmma_wait<1>();
      if (k > 0) release(last);
      last = s.at;
    }
    wgmma_wait<0>();
    pin(d);
    release(last);

    // Where lane l puts row l % 8 of matrix l / 8: rows 8 (l / 8 % 2) on, columns 8 (l / 16) on.
    uint32_t to = smem_addr(m.out[warp]) + lane / 8 % 2 * 1024 + lane % 8 * 128;
    auto put = [&](int chunk, const uint32_t (&v)[4]) { // 16 columns from 8 * chunk
      int c = chunk + lane / 16;
      stmatrix4(to + c / 8 * (STORE_ROWS * 128) + ((c % 8) ^ (lane % 8)) * 16, v);
    };
    auto free_out = [&] {
      if (lane == 0) bulk_wait_read();
      __syncwarp();
    };
    auto store = [&](int column, int halves) {
      fence_async_shared();
      __syncwarp();
      if (lane == 0) {
        for (int h = 0; h < halves; h++) tma_store(out, m.out[warp][h], column + h * 64, tm * BM + warp * STORE_ROWS);
        bulk_commit();
      }
    };
    if constexpr (E == SILU) {
      free_out();
#pragma unroll
      for (int c = 0; c < BN / 16; c += 2) {
        uint32_t v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) { // columns 8 (i / 2) on, rows 8 (i % 2) on
          const float *gate = d + 8 * (c + i / 2) + 2 * (i % 2), *up = gate + 4;
          v[i] = silu_mul<T>(pack<T>(gate[0], gate[1]), pack<T>(up[0], up[1]));
        }
        put(c, v);
      }
      store(tn * (BN / 2), BN / 128);
    } else {
#pragma unroll
      for (int half = 0; half < BN / 128; half++) {
        const uint8_t *old = m.ring[s.at] + (warp * STORE_ROWS + g) * 128 + t * 4;
        if constexpr (E == ADD) mbar_wait(&m.full[s.at], s.phase);
        free_out();
#pragma unroll
        for (int c = 0; c < 16; c += 2) {
          uint32_t v[4];
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const float *from = d + 64 * half + 4 * (c + i / 2) + 2 * (i % 2);
            float2 r = {0, 0};
            int chunk = c + i / 2;
            if constexpr (E == ADD) r = unpack<T>(*reinterpret_cast<const uint32_t *>(old + chunk / 8 * BM * 128 + i % 2 * 1024 + ((chunk % 8) ^ g) * 16));
            v[i] = pack<T>(r.x + from[0], r.y + from[1]);
          }
          put(c, v);
        }
        if constexpr (E == ADD) {
          __syncwarp();
          release(s.at);
          s.next();
        }
        store(tn * BN + half * 128, 2);
      }
    }
    if (lane == 0) item = take_item(m, n);
    item = __shfl_sync(~0u, item, 0);
  }
  if (lane == 0) bulk_wait();
}

template <typename T, Epilogue E>
static __global__ __launch_bounds__(THREADS, 1) void gemm_kernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap w, const __grid_constant__ CUtensorMap out,
                                                                 Order order, int steps, unsigned *work) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ uint8_t raw[];
  Smem &m = *reinterpret_cast<Smem *>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t(1023));
  int rank = cluster_rank(), warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) mbar_init(&m.full[i], 1), mbar_init(&m.empty[i], WARPS * CTAS);
    for (int i = 0; i < 2; i++) mbar_init(&m.item_full[i], 1), mbar_init(&m.item_empty[i], CTAS * (WARPS + 1));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  cluster_meet();
  pdl_next();
  if (warp < 4) {
    regs_give<40>();
    if (threadIdx.x == 0) produce<E>(m, order, rank, steps, &x, &w, &out);
    else if (threadIdx.x == 32 && rank == 0) draw_items(m, order, work);
  } else {
    regs_take<232>();
    consume<T, E>(m, order, rank, steps, &out);
  }
  __syncwarp();
  cluster_meet(); // others may still write to this CTA's barriers
#endif
}

// ---------------------------------------------------------------- launchers

static constexpr int SMEM_BYTES = int(sizeof(Smem)) + 1024;

template <typename T, Epilogue E> static int32_t gemm(const Launch &l, const Gemm &g) {
  Order o;
  o.beside = g.beside;
  o.down = div_up(g.rows, g.beside ? BM : BM * CTAS), o.across = div_up(g.n, g.beside ? BN * CTAS : BN), o.items = o.down * o.across;
  o.group = GROUP / (g.beside ? BM : BM * CTAS);
  return launch_clusters(l, gemm_kernel<T, E>, std::min(o.items * CTAS, g.ctas), THREADS, SMEM_BYTES, CTAS, *g.x, *g.w, *g.out, o, div_up(g.k, BK), g.work);
}

int32_t xk_gemm_hopper(const Launch &l, Epilogue e, const Gemm &g) {
  if (!xk_gemm_hopper_has(l.type, e)) return xk_fail(XK_INVALID, "gemm: epilogue %d for elements of type %d", e, l.type);
  if (e == ADD) return gemm<bf16, ADD>(l, g);
  return xk_each_type(l.type, [&](auto t) { return e == SILU ? gemm<decltype(t), SILU>(l, g) : gemm<decltype(t), STORE>(l, g); });
}

int32_t xk_matrix_map(CUtensorMap *map, const element *base, int64_t rows, int columns, int stride, bool stored) {
  cuuint64_t dims[2] = {cuuint64_t(columns), cuuint64_t(rows)}, strides[1] = {cuuint64_t(stride) * 2};
  cuuint32_t box[2] = {64, cuuint32_t(stored ? STORE_ROWS : BOX)};
  return xk_tensor_map(map, base, 2, dims, strides, box);
}

template <typename T, Epilogue E> static int32_t init(int *ctas) {
  auto *kernel = gemm_kernel<T, E>;
  XK_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM_BYTES));
  cudaLaunchConfig_t cfg = {};
  cudaLaunchAttribute attr = {};
  attr.id = cudaLaunchAttributeClusterDimension;
  attr.val.clusterDim.x = CTAS, attr.val.clusterDim.y = 1, attr.val.clusterDim.z = 1;
  cfg.gridDim = CTAS, cfg.blockDim = THREADS, cfg.dynamicSmemBytes = SMEM_BYTES, cfg.attrs = &attr, cfg.numAttrs = 1;
  int clusters = 0;
  XK_TRY(cudaOccupancyMaxActiveClusters(&clusters, kernel, &cfg));
  if (clusters < 1) return xk_fail(XK_CUDA, "gemm_hopper: no cluster fits this device");
  *ctas = clusters * CTAS;
  return XK_OK;
}

int32_t xk_gemm_hopper_init(xk_dtype type, int *ctas) {
  XK_OK_OR_RETURN((init<bf16, ADD>(ctas)));
  return xk_each_type(type, [&](auto t) {
    using T = decltype(t);
    XK_OK_OR_RETURN((init<T, STORE>(ctas)));
    return init<T, SILU>(ctas);
  });
}
