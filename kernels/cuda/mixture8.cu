// Projections by experts with FP8 weights, a scale a row of them: half the bytes. Activations stay
// bf16, also of many rows: E4M3 becomes bf16, which holds every value of it, and the scale comes in
// at the end.
//
// Few rows: skinny8.cu's way, with tiles as few_kernel's. Many: mixture_hopper.cu's, but W comes
// through registers, where it becomes bf16, into three buffers in turn.
// Oracle: kernels/cpu on the widened weights.
#include "cluster.cuh"
#include "mixture.cuh"

// Tiles of at most 8 * NT slots.
template <Epilogue E, int NT> static __global__ __launch_bounds__(FEW_WARPS * 32, NT == 1 ? 3 : 2) void few8_kernel(Grouped p) {
  constexpr int UNROLL = 2; // 64-wide chunks of K in flight a warp
  __shared__ Sums<NT> sums;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int n0 = blockIdx.x * 16, k = p.k;
  pdl_wait();
  pdl_next();
  if (int(blockIdx.y) >= *p.n_tiles) return;
  const GroupTile tile = p.tiles[blockIdx.y];
  const int chunks = div_up(k, 64), per = div_up(chunks, FEW_WARPS), begin = warp * per, end = min(begin + per, chunks);
  const uint4 zero = make_uint4(0, 0, 0, 0);
  const bool low = n0 + g < p.n, high = n0 + g + 8 < p.n;
  const int64_t row0 = int64_t(tile.expert) * p.n + n0;
  const uint8_t *w0 = p.w8.data + (row0 + g) * k + 16 * t, *w1 = w0 + int64_t(8) * k;
  const element *x[NT];
#pragma unroll
  for (int j = 0; j < NT; j++) {
    const int at = g + 8 * j;
    x[j] = at >= tile.n ? nullptr : p.x + int64_t(p.index ? p.index[tile.first + at] : tile.first + at) * k + 16 * t;
  }
  float acc[NT][4] = {};
  uint4 a[UNROLL][2];
  auto load = [&](int c0) {
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const int c = c0 + u;
      const bool in = c < end && c * 64 + 16 * t < k;
      a[u][0] = in && low ? __ldcs(reinterpret_cast<const uint4 *>(w0 + c * 64)) : zero;
      a[u][1] = in && high ? __ldcs(reinterpret_cast<const uint4 *>(w1 + c * 64)) : zero;
    }
  };
  load(begin);
  for (int c0 = begin; c0 < end; c0 += UNROLL) {
    uint4 v[UNROLL][2];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) v[u][0] = a[u][0], v[u][1] = a[u][1];
    if (c0 + UNROLL < end) load(c0 + UNROLL);
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const int c = c0 + u;
      const bool in = c < end && c * 64 + 16 * t < k;
      uint4 b[NT][2];
#pragma unroll
      for (int j = 0; j < NT; j++)
#pragma unroll
        for (int h = 0; h < 2; h++) b[j][h] = in && x[j] ? reinterpret_cast<const uint4 *>(x[j] + c * 64)[h] : zero;
      const uint32_t lo[4] = {v[u][0].x, v[u][0].y, v[u][0].z, v[u][0].w}, hi[4] = {v[u][1].x, v[u][1].y, v[u][1].z, v[u][1].w};
#pragma unroll
      for (int s = 0; s < 4; s++) { // four k of a lane: k, k+1 of both halves of an mma step
        const uint32_t a0 = bf162_of(lo[s], 0), a1 = bf162_of(hi[s], 0), a2 = bf162_of(lo[s], 1), a3 = bf162_of(hi[s], 1);
#pragma unroll
        for (int j = 0; j < NT; j++) {
          const uint4 &q = b[j][s / 2];
          mma<bf16>(acc[j], a0, a1, a2, a3, s % 2 ? q.z : q.x, s % 2 ? q.w : q.y);
        }
      }
    }
  }
#pragma unroll
  for (int j = 0; j < NT; j++)
#pragma unroll
    for (int e = 0; e < 4; e++) sums[warp][g + e / 2 * 8][8 * j + 2 * t + e % 2] = acc[j][e];
  __syncthreads();
  auto value = [&](int row, int col) { return total<NT>(sums, row, col) * p.w8.scale[row0 + row]; };
  constexpr int MADE = E == SILU ? 8 : 16; // columns of out
  for (int i = threadIdx.x; i < MADE * tile.n; i += FEW_WARPS * 32) {
    const int row = i % MADE, col = i / MADE;
    if (n0 + row >= p.n) continue;
    if constexpr (E == SILU) p.out[int64_t(tile.first + col) * (p.n / 2) + n0 / 2 + row] = narrow<bf16>(silu(value(row, col)) * value(row + 8, col));
    else p.out[int64_t(tile.first + col) * p.n + n0 + row] = narrow<bf16>(value(row, col));
  }
}

static constexpr int BN = 256, BK = 64, STAGES = 4, AHEAD = STAGES - 2, BUFFERS = 3;
static __device__ __forceinline__ int part_at(int row, int part) { return row * BK + (part ^ row % 8) * 8; }

// Tiles of at most ROWS slots by 256 columns, as grouped_kernel.
template <Epilogue E, int ROWS> static __global__ __launch_bounds__(256, 1) void many8_kernel(Grouped p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int WIDTH = ROWS == 128 ? BN : BN / 2, COPIES = BN / 64; // columns of a warpgroup; W's 16 bytes of a thread in a step
  extern __shared__ uint8_t raw[];
  element *ring = reinterpret_cast<element *>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t(1023)), *wide = ring + STAGES * ROWS * BK;
  pdl_wait();
  pdl_next();
  if (int(blockIdx.y) >= *p.n_tiles) return;
  const GroupTile tile = p.tiles[blockIdx.y];
  const int k = p.k, steps = div_up(k, BK), n0 = blockIdx.x * BN;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, wg = warp / 4, g = lane / 4, t = lane % 4;
  const int down = ROWS == 128 ? wg * 64 : 0, across = ROWS == 128 ? 0 : wg * WIDTH;
  // Of X a thread copies the same part of every 32nd row, of W of every 64th.
  const int part = threadIdx.x % 8, row0 = threadIdx.x / 8, w_part = threadIdx.x % 4, w_row = threadIdx.x / 4;
  const element *from[ROWS / 32];
#pragma unroll
  for (int i = 0; i < ROWS / 32; i++) {
    const int at = row0 + 32 * i;
    from[i] = at >= tile.n ? nullptr : p.x + int64_t(p.index ? p.index[tile.first + at] : tile.first + at) * k + part * 8;
  }
  const int64_t first = int64_t(tile.expert) * p.n + n0;
  const uint8_t *w = p.w8.data + (first + w_row) * k + w_part * 16;
  auto load = [&](int step) {
    if (step < steps) {
      element *x = ring + step % STAGES * (ROWS * BK);
      const bool in = step * BK + part * 8 < k; // k is a multiple of 16
#pragma unroll
      for (int i = 0; i < ROWS / 32; i++) cp_async16(x + part_at(row0 + 32 * i, part), in && from[i] ? from[i] + step * BK : p.x, in && from[i]);
    }
    cp_async_commit(); // also of nothing: what is waited for is counted
  };
  uint4 held[AHEAD][COPIES];
  auto fetch = [&](int step, uint4 (&to)[COPIES]) {
    const bool in = step < steps && step * BK + w_part * 16 < k;
#pragma unroll
    for (int i = 0; i < COPIES; i++)
      to[i] = in && n0 + w_row + 64 * i < p.n ? *reinterpret_cast<const uint4 *>(w + int64_t(64 * i) * k + step * BK) : make_uint4(0, 0, 0, 0);
  };
  float d[WIDTH / 2];
#pragma unroll
  for (int i = 0; i < AHEAD; i++) load(i), fetch(i, held[i]);
#pragma unroll 1
  for (int step0 = 0; step0 < steps; step0 += AHEAD) {
#pragma unroll
    for (int u = 0; u < AHEAD; u++) {
      const int step = step0 + u;
      if (step >= steps) break;
      // Where the wgmmas of step - 3 have read, which all had waited for before they met in step - 1.
      element *buffer = wide + step % BUFFERS * (BN * BK);
#pragma unroll
      for (int i = 0; i < COPIES; i++) {
        const uint32_t four[4] = {held[u][i].x, held[u][i].y, held[u][i].z, held[u][i].w};
#pragma unroll
        for (int h = 0; h < 2; h++)
          *reinterpret_cast<uint4 *>(buffer + part_at(w_row + 64 * i, 2 * w_part + h)) =
              make_uint4(bf162_of(four[2 * h], 0), bf162_of(four[2 * h], 1), bf162_of(four[2 * h + 1], 0), bf162_of(four[2 * h + 1], 1));
      }
      fetch(step + AHEAD, held[u]);
      cp_async_wait<AHEAD - 1>();
      fence_async_shared(); // own copies and stores, before wgmma of both warpgroups
      __syncthreads();
      load(step + AHEAD);
      const uint32_t x = smem_addr(ring + step % STAGES * (ROWS * BK)), y = smem_addr(buffer);
      const uint64_t a = wgmma_desc(x + down * BK * 2, 1024, 0), b = wgmma_desc(y + across * BK * 2, 1024, 0);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < BK / 16; i++) wgmma_ss<bf16>(d, a + 2 * i, b + 2 * i, step | i);
      wgmma_commit();
      wgmma_wait<1>();
    }
  }
  wgmma_wait<0>();
  pin(d);
  const float *scale = p.w8.scale + first + across;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int row = down + warp % 4 * 16 + g + 8 * h;
    if (row >= tile.n) continue;
    const int64_t slot = tile.first + row;
#pragma unroll
    for (int c = 0; c < WIDTH / 8; c += E == SILU ? 2 : 1) {
      const int column = n0 + across + 8 * c;
      if (column >= p.n) continue;
      const float *v = d + 4 * c + 2 * h;
      const float2 s = *reinterpret_cast<const float2 *>(scale + 8 * c + 2 * t);
      const uint32_t made = pack<bf16>(v[0] * s.x, v[1] * s.y);
      if constexpr (E == SILU) {
        const float2 u = *reinterpret_cast<const float2 *>(scale + 8 * c + 8 + 2 * t);
        *reinterpret_cast<uint32_t *>(p.out + slot * (p.n / 2) + column / 2 + 2 * t) = silu_mul<bf16>(made, pack<bf16>(v[4] * u.x, v[5] * u.y));
      } else {
        *reinterpret_cast<uint32_t *>(p.out + slot * p.n + column + 2 * t) = made;
      }
    }
  }
#endif
}

// ---------------------------------------------------------------- launchers

static constexpr int smem_bytes(int rows) { return (STAGES * rows + BUFFERS * BN) * BK * 2 + 1024; }

template <Epilogue E> static int32_t grouped(const Launch &l, const Grouped &p, int tile_rows, int64_t tiles) {
  if (tile_rows == 64) return launch(l, many8_kernel<E, 64>, dim3(div_up(p.n, BN), unsigned(tiles)), 256, smem_bytes(64), p);
  if (tile_rows == 128) return launch(l, many8_kernel<E, 128>, dim3(div_up(p.n, BN), unsigned(tiles)), 256, smem_bytes(128), p);
  auto *kernel = tile_rows == 8 ? few8_kernel<E, 1> : tile_rows == 16 ? few8_kernel<E, 2> : few8_kernel<E, 4>;
  return launch(l, kernel, dim3(div_up(p.n, 16), unsigned(tiles)), FEW_WARPS * 32, 0, p);
}

int32_t xk_grouped8(const Launch &l, Epilogue e, const Grouped &p, int tile_rows, int64_t tiles) {
  return e == SILU ? grouped<SILU>(l, p, tile_rows, tiles) : grouped<STORE>(l, p, tile_rows, tiles);
}

template <Epilogue E, int ROWS> static int32_t init() {
  XK_TRY(cudaFuncSetAttribute(many8_kernel<E, ROWS>, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes(ROWS)));
  return XK_OK;
}
int32_t xk_grouped8_init() {
  XK_OK_OR_RETURN((init<SILU, 64>()));
  XK_OK_OR_RETURN((init<STORE, 64>()));
  XK_OK_OR_RETURN((init<SILU, 128>()));
  return init<STORE, 128>();
}
