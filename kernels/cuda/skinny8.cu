// Projections of up to 16 rows with FP8 weights: skinny.cu with half the bytes,
// 16 elements of W a lane's load. Activations stay bf16; E4M3 becomes bf16, which
// holds every value of it, in registers; the channel's scale comes in at the end.
// Bound by bandwidth. Oracle: kernels/cpu on the widened weights.
#include "rows.cuh"

static constexpr int WARPS = 8;
static constexpr int UNROLL = 4; // 64-wide k chunks in flight a warp

template <Epilogue E, int NT>
static __global__ __launch_bounds__(WARPS * 32, 2) void skinny8_kernel(const uint8_t *w, const float *scales, const element *x, int x_stride, void *out, int out_stride, int m, int n, int k) {
  __shared__ float part[WARPS][16][NT * 8 + 1];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  int n0 = blockIdx.x * 16;
  int chunks = div_up(k, 64), per = div_up(chunks, WARPS);
  int begin = warp * per, end = min(begin + per, chunks);
  const uint4 zero = make_uint4(0, 0, 0, 0);
  bool low = n0 + g < n, high = n0 + g + 8 < n;
  const uint8_t *w0 = w + int64_t(n0 + g) * k + 16 * t, *w1 = w0 + int64_t(8) * k;
  const element *xr = x + int64_t(g) * x_stride + 16 * t;

  float acc[NT][4] = {};
  uint4 a[UNROLL][2];
  auto load = [&](int c0) {
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      int c = c0 + u;
      bool in = c < end && c * 64 + 16 * t < k;
      a[u][0] = in && low ? __ldcs(reinterpret_cast<const uint4 *>(w0 + c * 64)) : zero;
      a[u][1] = in && high ? __ldcs(reinterpret_cast<const uint4 *>(w1 + c * 64)) : zero;
    }
  };
  load(begin);
  pdl_wait();
  pdl_next();
  for (int c0 = begin; c0 < end; c0 += UNROLL) {
    uint4 v[UNROLL][2];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) v[u][0] = a[u][0], v[u][1] = a[u][1];
    if (c0 + UNROLL < end) load(c0 + UNROLL);
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      int c = c0 + u;
      bool in = c < end && c * 64 + 16 * t < k;
      uint4 b[NT][2];
#pragma unroll
      for (int j = 0; j < NT; j++)
#pragma unroll
        for (int h = 0; h < 2; h++) b[j][h] = in && g + 8 * j < m ? reinterpret_cast<const uint4 *>(xr + int64_t(8 * j) * x_stride + c * 64)[h] : zero;
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
    return s * scales[n0 + row];
  };
  if constexpr (E == SILU) {
    for (int i = threadIdx.x; i < 8 * m; i += WARPS * 32) {
      int row = i % 8, col = i / 8;
      if (n0 + row + 8 >= n) continue;
      float gate = total(row, col), up = total(row + 8, col);
      static_cast<element *>(out)[int64_t(col) * out_stride + n0 / 2 + row] = narrow<bf16>(gate / (1.0f + __expf(-gate)) * up);
    }
  } else {
    for (int i = threadIdx.x; i < 16 * m; i += WARPS * 32) {
      int row = i % 16, col = i / 16;
      if (n0 + row >= n) continue;
      float s = total(row, col);
      element *o = static_cast<element *>(out) + int64_t(col) * out_stride + n0 + row;
      *o = narrow<bf16>(E == ADD ? widen<bf16>(*o) + s : s);
    }
  }
}

// ---------------------------------------------------------------- launchers

template <Epilogue E>
static int32_t skinny8(const Launch &l, const Matrix8 &w, const element *x, int xs, void *out, int os, int m, int n, int k) {
  int grid = div_up(n, 16);
  if (m <= 8) return launch(l, skinny8_kernel<E, 1>, grid, WARPS * 32, 0, w.data, w.scale, x, xs, out, os, m, n, k);
  return launch(l, skinny8_kernel<E, 2>, grid, WARPS * 32, 0, w.data, w.scale, x, xs, out, os, m, n, k);
}

int32_t xk_skinny8(const Launch &l, Epilogue e, const Matrix8 &w, const element *x, int xs, void *out, int os, int m, int n, int k) {
  if (m < 1 || m > 16 || k % 16) return xk_fail(XK_INVALID, "skinny with FP8 weights: %d rows of %d", m, k);
  switch (e) {
  case STORE: return skinny8<STORE>(l, w, x, xs, out, os, m, n, k);
  case ADD: return skinny8<ADD>(l, w, x, xs, out, os, m, n, k);
  case SILU: return skinny8<SILU>(l, w, x, xs, out, os, m, n, k);
  default: return xk_fail(XK_INVALID, "skinny with FP8 weights: epilogue %d", e);
  }
}
