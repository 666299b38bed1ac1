// Projections of up to 32 rows: memory-bound, so the weights are streamed once,
// 16 bytes a lane straight into mma fragments. A CTA has 16 rows of W; its
// eight warps split K and add up in shared memory, in warp order.
//
// The order of k inside a fragment is free as long as both operands agree: a
// lane's 16 bytes are k, k+1 of two mma steps. Weights of the first round are
// requested before the kernel waits for its predecessor (PDL).
// SILU: W's rows are 8 of gate, 8 of up in turn, so a thread has both.
// Oracle: cuBLASLt through the same model, and kernels/cpu.
#include "common.cuh"

static constexpr int WARPS = 8;
static constexpr int UNROLL = 4; // 32-wide k chunks in flight a warp

template <typename T, Epilogue E, int NT>
static __global__ __launch_bounds__(WARPS * 32, NT == 1 ? 2 : 1) void skinny_kernel(const element *w, const element *x, int x_stride, void *out, int out_stride, int m, int n, int k) {
  __shared__ float part[WARPS][16][NT * 8 + 1];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  int n0 = blockIdx.x * 16;
  int chunks = div_up(k, 32), per = div_up(chunks, WARPS);
  int begin = warp * per, end = min(begin + per, chunks);
  const uint4 zero = make_uint4(0, 0, 0, 0);
  bool low = n0 + g < n, high = n0 + g + 8 < n;
  const element *w0 = w + int64_t(n0 + g) * k + 8 * t, *w1 = w0 + int64_t(8) * k;
  const element *xr = x + int64_t(g) * x_stride + 8 * t;

  float acc[NT][4] = {};
  uint4 a[UNROLL][2];
  auto load = [&](int c0) {
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      int c = c0 + u;
      bool in = c < end && c * 32 + 8 * t < k;
      a[u][0] = in && low ? __ldcs(reinterpret_cast<const uint4 *>(w0 + c * 32)) : zero;
      a[u][1] = in && high ? __ldcs(reinterpret_cast<const uint4 *>(w1 + c * 32)) : zero;
    }
  };
  load(begin);
  pdl_wait();
  pdl_next();
  for (int c0 = begin; c0 < end; c0 += UNROLL) {
    uint4 b[UNROLL][NT];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      int c = c0 + u;
      bool in = c < end && c * 32 + 8 * t < k;
#pragma unroll
      for (int j = 0; j < NT; j++)
        b[u][j] = in && g + 8 * j < m ? *reinterpret_cast<const uint4 *>(xr + int64_t(8 * j) * x_stride + c * 32) : zero;
    }
    uint4 v[UNROLL][2];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) v[u][0] = a[u][0], v[u][1] = a[u][1];
    if (c0 + UNROLL < end) load(c0 + UNROLL);
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
#pragma unroll
      for (int j = 0; j < NT; j++) {
        mma<T>(acc[j], v[u][0].x, v[u][1].x, v[u][0].y, v[u][1].y, b[u][j].x, b[u][j].y);
        mma<T>(acc[j], v[u][0].z, v[u][1].z, v[u][0].w, v[u][1].w, b[u][j].z, b[u][j].w);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < NT; j++) {
    part[warp][g][8 * j + 2 * t] = acc[j][0];
    part[warp][g][8 * j + 2 * t + 1] = acc[j][1];
    part[warp][g + 8][8 * j + 2 * t] = acc[j][2];
    part[warp][g + 8][8 * j + 2 * t + 1] = acc[j][3];
  }
  __syncthreads();
  auto total = [&](int row, int col) {
    float s = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) s += part[i][row][col];
    return s;
  };
  if constexpr (E == SILU) {
    for (int i = threadIdx.x; i < 8 * m; i += WARPS * 32) {
      int row = i % 8, col = i / 8;
      if (n0 + row + 8 >= n) continue;
      float gate = total(row, col), up = total(row + 8, col);
      static_cast<element *>(out)[int64_t(col) * out_stride + n0 / 2 + row] = narrow<T>(silu(gate) * up);
    }
  } else {
    for (int i = threadIdx.x; i < 16 * m; i += WARPS * 32) {
      int row = i % 16, col = i / 16;
      if (n0 + row >= n) continue;
      float s = total(row, col);
      int64_t at = int64_t(col) * out_stride + n0 + row;
      if constexpr (E == STORE_F32) static_cast<float *>(out)[at] = s;
      else if constexpr (E == ADD) add<T>(static_cast<residual<T> *>(out) + at, s);
      else static_cast<element *>(out)[at] = narrow<T>(s);
    }
  }
}

// ---------------------------------------------------------------- launchers

template <Epilogue E>
static int32_t skinny(const Launch &l, const element *w, const element *x, int xs, void *out, int os, int m, int n, int k) {
  return xk_each_type(l.type, [&](auto t) {
    using T = decltype(t);
    auto *kernel = m <= 8 ? skinny_kernel<T, E, 1> : m <= 16 ? skinny_kernel<T, E, 2> : skinny_kernel<T, E, 4>;
    return launch(l, kernel, div_up(n, 16), WARPS * 32, 0, w, x, xs, out, os, m, n, k);
  });
}

int32_t xk_skinny(const Launch &l, Epilogue e, const element *w, const element *x, int xs, void *out, int os, int m, int n, int k) {
  if (m < 1 || m > 32 || k % 8) return xk_fail(XK_INVALID, "skinny: %d rows of %d", m, k);
  switch (e) {
  case STORE: return skinny<STORE>(l, w, x, xs, out, os, m, n, k);
  case ADD: return skinny<ADD>(l, w, x, xs, out, os, m, n, k);
  case SILU: return skinny<SILU>(l, w, x, xs, out, os, m, n, k);
  default: return skinny<STORE_F32>(l, w, x, xs, out, os, m, n, k);
  }
}
