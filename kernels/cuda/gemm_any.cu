// Projections of any shape, for batch_invariant where cuBLASLt has no algorithm that
// gives a row the same bits in every batch: out[m][n] = sum_k x[m][k] w[n][k] by
// mma.sync. Tiles have one shape, and a value of out is one thread's sum over K in
// ascending order, sixteen products at a time: nothing of it depends on the number of
// rows or on where the row lies. Edges are read as zeros and not written.
//
// A CTA makes 64 rows by 64 columns, each of its warps 32 by 32, through a ring of
// steps of 64 in K. Simple rather than fast: few columns are few CTAs, and each
// reads the whole of K by itself.
// Oracle: sums in double precision (probe/any.cuh).
#include "common.cuh"

static constexpr int TILE = 64;   // rows, and columns
static constexpr int STEP = 64;   // of K: rows of 128 bytes
static constexpr int STAGES = 6;
static constexpr int WARPS = 4;

struct Stage {
  element x[TILE * STEP], w[TILE * STEP];
};
static constexpr int SMEM_BYTES = STAGES * int(sizeof(Stage));

// Eight elements of a row: swizzled, so that ldmatrix meets every bank once.
static __device__ __forceinline__ int part_at(int row, int part) { return row * STEP + (part ^ row % 8) * 8; }

// E: STORE, ADD or STORE_F32.
template <typename T, Epilogue E>
static __global__ __launch_bounds__(WARPS * 32) void any_kernel(const element *x, const element *w, void *out, int out_stride, int m, int n, int k) {
  extern __shared__ __align__(128) uint8_t raw[];
  Stage *ring = reinterpret_cast<Stage *>(raw);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int m0 = blockIdx.x * TILE, n0 = blockIdx.y * TILE, down = warp / 2 * 32, across = warp % 2 * 32;
  const int steps = div_up(k, STEP);
  auto load = [&](int step) {
    if (step < steps) {
      Stage &s = ring[step % STAGES];
#pragma unroll
      for (int i = 0; i < TILE * 8 / (WARPS * 32); i++) {
        const int at = i * WARPS * 32 + int(threadIdx.x), row = at / 8, part = at % 8, column = step * STEP + part * 8; // k is a multiple of 8
        const bool in_x = column < k && m0 + row < m, in_w = column < k && n0 + row < n;
        cp_async16(s.x + part_at(row, part), in_x ? x + int64_t(m0 + row) * k + column : x, in_x);
        cp_async16(s.w + part_at(row, part), in_w ? w + int64_t(n0 + row) * k + column : w, in_w);
      }
    }
    cp_async_commit(); // also of nothing: what is waited for is counted
  };
  pdl_wait();
  pdl_next();
  float acc[2][4][4] = {}; // 16 rows, 8 columns
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) load(i);
#pragma unroll 1
  for (int step = 0; step < steps; step++) {
    cp_async_wait<STAGES - 2>();
    __syncthreads(); // this step is there, and all have done with the one before
    load(step + STAGES - 1);
    const Stage &s = ring[step % STAGES];
#pragma unroll
    for (int i = 0; i < STEP / 16; i++) {
      uint32_t b[2][4];
#pragma unroll
      for (int j = 0; j < 2; j++) ldmatrix4(b[j], smem_addr(s.w + part_at(across + 16 * j + lane / 16 * 8 + lane % 8, 2 * i + lane / 8 % 2)));
#pragma unroll
      for (int r = 0; r < 2; r++) {
        if (m0 + down + 16 * r >= m) continue; // for the whole warp
        uint32_t a[4];
        ldmatrix4(a, smem_addr(s.x + part_at(down + 16 * r + lane % 16, 2 * i + lane / 16)));
#pragma unroll
        for (int j = 0; j < 4; j++) mma<T>(acc[r][j], a[0], a[1], a[2], a[3], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 2; r++)
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int row = m0 + down + 16 * r + g + e / 2 * 8, column = n0 + across + 8 * j + 2 * t + e % 2;
        if (row >= m || column >= n) continue;
        const int64_t at = int64_t(row) * out_stride + column;
        if constexpr (E == STORE_F32) static_cast<float *>(out)[at] = acc[r][j][e];
        else if constexpr (E == ADD) add<T>(static_cast<residual<T> *>(out) + at, acc[r][j][e]);
        else static_cast<element *>(out)[at] = narrow<T>(acc[r][j][e]);
      }
}

// ---------------------------------------------------------------- launchers

template <typename F> static int32_t each_kernel(xk_dtype type, Epilogue e, F f) {
  return xk_each_type(type, [&](auto t) {
    using T = decltype(t);
    switch (e) {
    case STORE: return f(any_kernel<T, STORE>);
    case ADD: return f(any_kernel<T, ADD>);
    case STORE_F32: return f(any_kernel<T, STORE_F32>);
    default: return xk_fail(XK_INVALID, "gemm_any: epilogue %d", int(e));
    }
  });
}

int32_t xk_gemm_any(const Launch &l, Epilogue e, const element *w, const element *x, void *out, int out_stride, int m, int n, int k) {
  if (m < 1 || n < 1 || k < 8 || k % 8) return xk_fail(XK_INVALID, "gemm_any: %d x %d x %d", n, m, k);
  return each_kernel(l.type, e, [&](auto *kernel) { return launch(l, kernel, dim3(div_up(m, TILE), div_up(n, TILE)), WARPS * 32, SMEM_BYTES, x, w, out, out_stride, m, n, k); });
}

int32_t xk_gemm_any_init(xk_dtype type) {
  for (Epilogue e : {STORE, ADD, STORE_F32})
    XK_OK_OR_RETURN(each_kernel(type, e, [&](auto *kernel) {
      XK_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM_BYTES));
      return int32_t(XK_OK);
    }));
  return XK_OK;
}
