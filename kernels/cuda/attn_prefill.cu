// Paged prefill attention (causal, GQA, any prefix in the pool) for blocks that
// attn_hopper.cu does not take and GPUs after Hopper, in the manner of
// FlashAttention-2 with mma.sync: 128 query rows of one head a CTA, eight
// warps of 16 rows, K and V in tiles of 64 positions through a double-buffered
// cp.async ring, found through the block table. Tiles after the diagonal are
// never read.
//
// attn_any takes any head_dim and group, one warp a (row, head): slow, and the
// oracle of the fast ones on the device.
// Oracle: kernels/cpu.
#include <algorithm>
#include <iterator>

#include "rows.cuh"

static constexpr int WARPS = 8; // of 16 rows: as many as an xk_tile has

// Tiles of K and V: N positions, in parts of 16 bytes, swizzled, or, where rows do
// not fill the banks, at a distance of an odd number of parts.
template <int D> struct Tiles {
  static constexpr bool SWIZZLED = D % 64 == 0;
  static constexpr int N = D > 128 ? 32 : 64, PARTS = D / 8, PITCH = SWIZZLED ? PARTS : PARTS + 1, BYTES = N * PITCH * 16;
  static __device__ __forceinline__ int at(int r, int part) { return (r * PITCH + (SWIZZLED ? part ^ (r & 7) : part)) * 16; }
};

template <int D> static constexpr int smem_bytes = 2 * 2 * Tiles<D>::BYTES;

template <typename T, int D>
static __global__ __launch_bounds__(WARPS * 32, 1) void prefill_kernel(Attention a, Pool p, const xk_tile *tiles) {
  using R = Tiles<D>;
  constexpr int N = R::N, PARTS = R::PARTS;
  extern __shared__ __align__(128) uint8_t smem[]; // [stage][K, V][N][D]
  pdl_wait();
  pdl_next();
  xk_tile tile = tiles[blockIdx.x]; // the longest first
  int head = blockIdx.y, kv_head = head / (a.heads / p.kv_heads);
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int32_t *table = a.tail + tile.table;
  int length = tile.pos + tile.n;
  int steps = div_up(length, N);
  const int64_t value = int64_t(p.kv_heads) * p.bt.d * D;
  const int64_t q_stride = int64_t(a.heads + 2 * p.kv_heads) * D;

  auto fetch = [&](int step, int stage) {
    if (step < steps) {
      uint8_t *to = smem + stage * (2 * R::BYTES);
#pragma unroll
      for (int i = 0; i < div_up(N * PARTS, WARPS * 32); i++) {
        int piece = i * WARPS * 32 + threadIdx.x, r = piece / PARTS, part = piece % PARTS;
        if (N * PARTS % (WARPS * 32) && r >= N) break;
        int pos = step * N + r;
        bool in = pos < length;
        const element *k = p.data + (in ? p.at(table, 0, kv_head, pos) : 0) + part * 8;
        uint8_t *dst = to + R::at(r, part);
        cp_async16(dst, k, in);
        cp_async16(dst + R::BYTES, k + value, in);
      }
    }
    cp_async_commit();
  };
  fetch(0, 0);

  int first = warp * 16; // of the tile
  uint32_t q[D / 16][4];
  {
    int r0 = min(first + g, tile.n - 1), r1 = min(first + g + 8, tile.n - 1);
    const uint32_t *s0 = reinterpret_cast<const uint32_t *>(a.qkv + (tile.row + r0) * q_stride + head * D);
    const uint32_t *s1 = reinterpret_cast<const uint32_t *>(a.qkv + (tile.row + r1) * q_stride + head * D);
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
      q[i][0] = s0[i * 8 + t], q[i][1] = s1[i * 8 + t];
      q[i][2] = s0[i * 8 + 4 + t], q[i][3] = s1[i * 8 + 4 + t];
    }
  }
  float o[D / 8][4] = {};
  float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
  const float scale = a.scale * 1.4426950408889634f;
  int pos0 = tile.pos + first + g; // of row g; row g+8 is eight later
  bool active = first < tile.n;
  int last = tile.pos + min(first + 15, tile.n - 1); // the warp's last query

  for (int step = 0; step < steps; step++) {
    cp_async_wait<0>();
    __syncthreads();
    fetch(step + 1, (step + 1) % 2);
    if (!active || step * N > last) continue;
    uint32_t k0 = smem_addr(smem + step % 2 * (2 * R::BYTES)), v0 = k0 + R::BYTES;
    float s[N / 8][4] = {};
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
#pragma unroll
      for (int n = 0; n < N / 16; n++) {
        int r = n * 16 + (lane / 16) * 8 + lane % 8, part = 2 * i + (lane / 8) % 2;
        uint32_t b[4];
        ldmatrix4(b, k0 + R::at(r, part));
        mma<T>(s[2 * n], q[i][0], q[i][1], q[i][2], q[i][3], b[0], b[1]);
        mma<T>(s[2 * n + 1], q[i][0], q[i][1], q[i][2], q[i][3], b[2], b[3]);
      }
    }
    if (step * N + N - 1 > tile.pos + first) { // the diagonal crosses
#pragma unroll
      for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
          if (step * N + n * 8 + 2 * t + (e & 1) > pos0 + (e / 2) * 8) s[n][e] = -INFINITY;
    }
    float most[2] = {top[0], top[1]};
#pragma unroll
    for (int n = 0; n < N / 8; n++) {
      most[0] = fmaxf(most[0], fmaxf(s[n][0], s[n][1]));
      most[1] = fmaxf(most[1], fmaxf(s[n][2], s[n][3]));
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      most[h] = fmaxf(most[h], __shfl_xor_sync(~0u, most[h], 1));
      most[h] = fmaxf(most[h], __shfl_xor_sync(~0u, most[h], 2));
      float old = exp2f((top[h] - most[h]) * scale);
      top[h] = most[h];
      sum[h] *= old;
      float base = most[h] * scale;
#pragma unroll
      for (int i = 0; i < D / 8; i++) o[i][2 * h] *= old, o[i][2 * h + 1] *= old;
#pragma unroll
      for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int e = 2 * h; e < 2 * h + 2; e++) {
          s[n][e] = exp2f(s[n][e] * scale - base);
          sum[h] += s[n][e];
        }
    }
#pragma unroll
    for (int n = 0; n < N / 16; n++) {
      uint32_t p0 = pack<T>(s[2 * n][0], s[2 * n][1]), p1 = pack<T>(s[2 * n][2], s[2 * n][3]);
      uint32_t p2 = pack<T>(s[2 * n + 1][0], s[2 * n + 1][1]), p3 = pack<T>(s[2 * n + 1][2], s[2 * n + 1][3]);
#pragma unroll
      for (int i = 0; i < D / 16; i++) {
        int r = n * 16 + (lane / 8) % 2 * 8 + lane % 8, part = 2 * i + lane / 16;
        uint32_t b[4];
        ldmatrix4_trans(b, v0 + R::at(r, part));
        mma<T>(o[2 * i], p0, p1, p2, p3, b[0], b[1]);
        mma<T>(o[2 * i + 1], p0, p1, p2, p3, b[2], b[3]);
      }
    }
  }
#pragma unroll
  for (int h = 0; h < 2; h++) {
    sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
    sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
    int r = first + g + 8 * h;
    if (r >= tile.n) continue;
    float inverse = 1.0f / sum[h];
    uint32_t *dst = reinterpret_cast<uint32_t *>(a.out + int64_t(tile.row + r) * a.heads * D + head * D);
#pragma unroll
    for (int i = 0; i < D / 8; i++) dst[i * 4 + t] = pack<T>(o[i][2 * h] * inverse, o[i][2 * h + 1] * inverse);
  }
}

// One CTA of four warps a (row, head): each warp takes every fourth position.
template <typename T> static __global__ __launch_bounds__(128) void any_kernel(Attention a, Pool p) {
  __shared__ float stat[4][2], merged[4][256];
  pdl_wait();
  pdl_next();
  int row = blockIdx.x, head = blockIdx.y, dim = p.head_dim;
  int length = a.positions[row] + 1;
  if (length <= 0) return;
  int kv_head = head / (a.heads / p.kv_heads);
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int32_t *table = a.tail + a.tables[row];
  const element *q = a.qkv + int64_t(row) * (a.heads + 2 * p.kv_heads) * dim + head * dim;
  float x[8] = {}, o[8] = {}, top = -INFINITY, sum = 0;
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (lane + 32 * i < dim) x[i] = widen<T>(q[lane + 32 * i]);
  for (int pos = warp; pos < length; pos += 4) {
    const element *k = p.data + p.at(table, 0, kv_head, pos), *v = p.data + p.at(table, 1, kv_head, pos);
    float s = 0;
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (lane + 32 * i < dim) s += x[i] * widen<T>(k[lane + 32 * i]);
    s = warp_sum(s) * a.scale;
    float most = fmaxf(top, s), old = expf(top - most), now = expf(s - most);
    top = most;
    sum = sum * old + now;
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (lane + 32 * i < dim) o[i] = o[i] * old + now * widen<T>(v[lane + 32 * i]);
  }
  if (lane == 0) stat[warp][0] = top, stat[warp][1] = sum;
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (lane + 32 * i < dim) merged[warp][lane + 32 * i] = o[i];
  __syncthreads();
  for (int d = threadIdx.x; d < dim; d += 128) {
    float m = fmaxf(fmaxf(stat[0][0], stat[1][0]), fmaxf(stat[2][0], stat[3][0])), l = 0, v = 0;
    for (int w = 0; w < 4; w++) {
      float f = expf(stat[w][0] - m);
      l += f * stat[w][1];
      v += f * merged[w][d];
    }
    a.out[int64_t(row) * a.heads * dim + head * dim + d] = narrow<T>(v / l);
  }
}

// ---------------------------------------------------------------- launchers

bool xk_attn_fast(int head_dim, int group) { return std::find(std::begin(XK_DIMS), std::end(XK_DIMS), head_dim) != std::end(XK_DIMS) && group <= 16; }

int32_t xk_attn_prefill(const Launch &l, const Attention &a, const Pool &p, const Prefill &f) {
  if (!xk_attn_hopper_takes(p, f))
    return xk_each_form(l.type, p.head_dim, [&](auto t, auto dim) { return launch(l, prefill_kernel<decltype(t), dim>, dim3(f.n_tiles, a.heads), WARPS * 32, smem_bytes<dim>, a, p, f.tiles); });
  XK_OK_OR_RETURN(xk_attn_prefill_hopper(l, a, p, f));
  return f.n_merges ? xk_attn_merge(l, a, p, f.merges, f.n_merges) : XK_OK;
}

int32_t xk_attn_any(const Launch &l, const Attention &a, const Pool &p, int n_rows) {
  return xk_each_type(l.type, [&](auto t) { return launch(l, any_kernel<decltype(t)>, dim3(n_rows, a.heads), 128, 0, a, p); });
}

int32_t xk_attn_init(xk_dtype type) {
  XK_OK_OR_RETURN(xk_all_forms(type, [](auto t, auto d) {
    XK_TRY(cudaFuncSetAttribute(prefill_kernel<decltype(t), d>, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes<d>));
    return int32_t(XK_OK);
  }));
  XK_OK_OR_RETURN(xk_attn_hopper_init(type));
  XK_OK_OR_RETURN(xk_attn8_init());
  return xk_attn_decode_init(type);
}
