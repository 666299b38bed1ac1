// Projections by experts on Hopper, for groups of many rows: out[slot] by wgmma, with SiLU-mul
// in the epilogue. Rows come from wherever they lie, by ordinary copies: a bulk copy reads no
// list of rows. K is added up in one go.
//
// A CTA of two warpgroups makes tiles of 128 slots by 256 columns, each warpgroup 64 of the
// slots, or of 64 slots, each warpgroup 128 of the columns: groups end somewhere, and what is
// computed behind their end is in vain. All threads copy, two steps of K ahead.
// Oracle: kernels/cpu.
#include "cluster.cuh"
#include "mixture.cuh"

static constexpr int BN = 256, BK = 64, STAGES = 4, AHEAD = STAGES - 2;

// 16 bytes of a row of BK: swizzled by 128 bytes, as wgmma_desc has it.
static __device__ __forceinline__ int part_at(int row, int part) { return row * BK + (part ^ row % 8) * 8; }

template <typename T, Epilogue E, int ROWS> static __global__ __launch_bounds__(256, 1) void grouped_kernel(Grouped p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int STAGE = (ROWS + BN) * BK, WIDTH = ROWS == 128 ? BN : BN / 2; // elements; columns of a warpgroup
  extern __shared__ uint8_t raw[];
  element *ring = reinterpret_cast<element *>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t(1023));
  pdl_wait();
  pdl_next();
  if (int(blockIdx.y) >= *p.n_tiles) return;
  const GroupTile tile = p.tiles[blockIdx.y];
  const int k = p.k, steps = div_up(k, BK), n0 = blockIdx.x * BN;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, wg = warp / 4, g = lane / 4, t = lane % 4;
  const int down = ROWS == 128 ? wg * 64 : 0, across = ROWS == 128 ? 0 : wg * WIDTH;
  // A thread copies the same part of every 32nd row.
  const int part = threadIdx.x % 8, row0 = threadIdx.x / 8;
  const element *from[ROWS / 32];
#pragma unroll
  for (int i = 0; i < ROWS / 32; i++) {
    const int at = row0 + 32 * i;
    from[i] = at >= tile.n ? nullptr : p.x + int64_t(p.index ? p.index[tile.first + at] : tile.first + at) * k + part * 8;
  }
  const element *w = p.w + (int64_t(tile.expert) * p.n + n0 + row0) * k + part * 8;
  auto load = [&](int step) {
    if (step < steps) {
      element *x = ring + step % STAGES * STAGE;
      const bool in = step * BK + part * 8 < k; // k is a multiple of 8
#pragma unroll
      for (int i = 0; i < ROWS / 32; i++) cp_async16(x + part_at(row0 + 32 * i, part), in && from[i] ? from[i] + step * BK : p.x, in && from[i]);
#pragma unroll
      for (int i = 0; i < BN / 32; i++) {
        const bool there = in && n0 + row0 + 32 * i < p.n;
        cp_async16(x + ROWS * BK + part_at(row0 + 32 * i, part), there ? w + int64_t(32 * i) * k + step * BK : p.w, there);
      }
    }
    cp_async_commit(); // also of nothing: what is waited for is counted
  };
  float d[WIDTH / 2];
#pragma unroll
  for (int i = 0; i < AHEAD; i++) load(i);
#pragma unroll 1
  for (int step = 0; step < steps; step++) {
    cp_async_wait<AHEAD - 1>();
    fence_async_shared(); // own copies, before wgmma of both warpgroups
    __syncthreads();
    load(step + AHEAD); // where the wgmmas of step - 2 have read, which all had waited for
    const uint32_t at = smem_addr(ring + step % STAGES * STAGE);
    const uint64_t a = wgmma_desc(at + down * BK * 2, 1024, 0), b = wgmma_desc(at + (ROWS + across) * BK * 2, 1024, 0);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < BK / 16; i++) wgmma_ss<T>(d, a + 2 * i, b + 2 * i, step | i);
    wgmma_commit();
    wgmma_wait<1>();
  }
  wgmma_wait<0>();
  pin(d);
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int row = down + warp % 4 * 16 + g + 8 * h;
    if (row >= tile.n) continue;
    const int64_t slot = tile.first + row;
    if constexpr (E == SILU) {
#pragma unroll
      for (int c = 0; c < WIDTH / 8; c += 2) {
        const int column = n0 + across + 8 * c;
        if (column >= p.n) continue;
        const float *gate = d + 4 * c + 2 * h, *up = gate + 4;
        *reinterpret_cast<uint32_t *>(p.out + slot * (p.n / 2) + column / 2 + 2 * t) = silu_mul<T>(pack<T>(gate[0], gate[1]), pack<T>(up[0], up[1]));
      }
    } else {
#pragma unroll
      for (int c = 0; c < WIDTH / 8; c++) {
        const int column = n0 + across + 8 * c;
        if (column < p.n) *reinterpret_cast<uint32_t *>(p.out + slot * p.n + column + 2 * t) = pack<T>(d[4 * c + 2 * h], d[4 * c + 2 * h + 1]);
      }
    }
  }
#endif
}

// ---------------------------------------------------------------- launchers

static constexpr int smem_bytes(int rows) { return STAGES * (rows + BN) * BK * 2 + 1024; }

template <typename F> static int32_t each_kernel(xk_dtype type, Epilogue e, int rows, F f) {
  return xk_each_type(type, [&](auto t) {
    using T = decltype(t);
    if (rows == 64) return e == SILU ? f(grouped_kernel<T, SILU, 64>) : f(grouped_kernel<T, STORE, 64>);
    return e == SILU ? f(grouped_kernel<T, SILU, 128>) : f(grouped_kernel<T, STORE, 128>);
  });
}

int32_t xk_grouped_hopper(const Launch &l, Epilogue e, const Grouped &p, int tile_rows, int64_t tiles) {
  return each_kernel(l.type, e, tile_rows, [&](auto *kernel) { return launch(l, kernel, dim3(div_up(p.n, BN), unsigned(tiles)), 256, smem_bytes(tile_rows), p); });
}

int32_t xk_grouped_hopper_init(xk_dtype type) {
  for (Epilogue e : {SILU, STORE})
    for (int rows : {64, 128})
      XK_OK_OR_RETURN(each_kernel(type, e, rows, [&](auto *kernel) {
        XK_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes(rows)));
        return int32_t(XK_OK);
      }));
  return XK_OK;
}
