// attn_decode.cu for FP8 pools: half the bytes, and so twice the positions a byte
// of bandwidth. What differs from there:
//
// K and V are widened to fp16, which holds every E4M3 value, one instruction for
// two; so the products are fp16 ones, of queries that have the softmax's scale in
// them already. The order of k in a fragment is free: a lane's four bytes of a
// row are k, k+1 of both halves of an mma step. V comes transposed by pairs of
// bytes, so that a lane ends with four neighbouring columns of O.
// A K row's scale multiplies its score. A V row's would multiply its weight, but
// fp16 has not the range: weights are divided by the greatest scale so far of
// the warp, and O is kept in units of that.
// Needs blocks of a multiple of 16 positions: a chunk is then one run of a block.
// Oracle: probe/kv8.cuh against a double-precision sum.
#include <algorithm>

#include "rows.cuh"

static constexpr int WARPS = 4, STAGES = 3, CHUNK = 16;
static constexpr int AT_ONCE = 16; // splits whose loads are in flight together when they are merged

template <int D> static constexpr int stage_bytes = 2 * CHUNK * D + 2 * CHUNK * 4; // K, V, their scales
template <int D> static constexpr int smem_bytes = std::max(WARPS *STAGES *stage_bytes<D>, WARPS * 16 * D * 4);

// c[16][8] += a[16][16] b[16][8], fp16.
static __device__ __forceinline__ void mma_half(float c[4], const uint32_t *a, uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
static __device__ __forceinline__ uint32_t pack_half(float lo, float hi) {
  __half2 v = __floats2half2_rn(lo, hi);
  return *reinterpret_cast<uint32_t *>(&v);
}
static __device__ __forceinline__ uint32_t low_half2(uint32_t v) { return half2_of(uint16_t(v)); }
static __device__ __forceinline__ uint32_t high_half2(uint32_t v) { return half2_of(uint16_t(v >> 16)); }

// CTAS: at least so many are to fit on a multiprocessor. Four are right where all
// of a grid then run at once, three, with all registers, where they do not or
// need not.
template <int D, int CTAS>
static __global__ __launch_bounds__(WARPS * 32, CTAS) void decode8_kernel(Attention a, Rows p, const xk_span *spans) {
  constexpr int PARTS = D / 16; // 16-byte parts of a row
  extern __shared__ __align__(128) uint8_t smem[];
  __shared__ float stat[WARPS][2][16]; // max and sum of each warp
  __shared__ unsigned arrived;
  // What describes the step is there before its first kernel.
  const xk_span span = spans[blockIdx.y];
  const int row = span.row, length = span.length, begin = span.begin, end = span.end, splits = span.splits;
  if (row < 0) return; // see attn_decode.cu
  const int kv_head = blockIdx.x;

  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  int kv_heads = p.kv_heads, group = a.heads / kv_heads;
  const int32_t *table = a.tail + span.table;
  uint8_t *ring = smem + warp * (STAGES * stage_bytes<D>);
  const int64_t value = int64_t(kv_heads) * p.bt.d; // rows from a K row to its V row

  // Lanes hold the next 64 entries of the block table; chunks ascend by less than
  // 32 of them.
  const int entries = p.bt.div(length - 1) + 1;
  auto entry = [&](int i) { return i < entries ? __ldg(table + i) : 0; };
  int window = p.bt.div(begin + warp * CHUNK < end ? begin + warp * CHUNK : end - 1), now = entry(window + lane), later = entry(window + 32 + lane);
  auto swizzled = [](int r, int part) { return r * D + (part ^ (D == 64 ? r / 2 % 4 : r & (PARTS - 1) & 7)) * 16; };
  auto fetch = [&](int chunk, int stage) {
    int first = begin + chunk * CHUNK;
    if (first < end) {
      int b = p.bt.div(first);
      if (b >= window + 32) {
        window += 32, now = later;
        later = entry(window + 32 + lane);
      }
      const uint8_t *block = p.data + __shfl_sync(~0u, now, b - window) * p.run;
      int64_t number = p.number(0, kv_head, first - b * p.bt.d);
      const uint8_t *k = block + number * D;
      uint8_t *to = ring + stage * stage_bytes<D>;
#pragma unroll
      for (int i = 0; i < CHUNK * PARTS / 32; i++) {
        int r = (i * 32 + lane) / PARTS, part = (i * 32 + lane) % PARTS;
        const uint8_t *from = k + r * D + part * 16;
        bool in = first + r < end;
        cp_async16(to + swizzled(r, part), from, in);
        cp_async16(to + CHUNK * D + swizzled(r, part), from + value * D, in);
      }
      if (lane < 8) { // scales of 16 K rows and of 16 V rows
        const float *from = reinterpret_cast<const float *>(block + p.rows_run()) + number + lane / 4 * value + lane % 4 * 4;
        cp_async16(to + 2 * CHUNK * D + lane * 16, from, true);
      }
    }
    cp_async_commit();
  };

  int chunks = div_up(end - begin, CHUNK);
  // The kernel before this writes the last position: chunks ahead of it are
  // copied while that one still runs.
  bool early = begin + (warp + (STAGES - 2) * WARPS + 1) * CHUNK < length;
  int stage = 0, ahead = 0; // of this round's chunk, and of the one it fetches
#pragma unroll 1
  for (int phase = 0; phase < 2; phase++) {
    if (phase) pdl_wait();
#pragma unroll 1
    for (int i = 0; early == !phase && i < STAGES - 1; i++) fetch(warp + i * WARPS, ahead++);
  }
  pdl_next();
  uint32_t q[D / 16][4];
  {
    const float scale = a.scale * 1.4426950408889634f;
    const element *src = a.qkv + int64_t(row) * (a.heads + 2 * kv_heads) * D + int64_t(kv_head) * group * D;
#pragma unroll
    for (int i = 0; i < D / 16; i++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        uint2 raw = g + 8 * h < group ? *reinterpret_cast<const uint2 *>(src + (g + 8 * h) * D + i * 16 + 4 * t) : make_uint2(0, 0);
        float2 x = unpack<bf16>(raw.x), y = unpack<bf16>(raw.y);
        q[i][h] = pack_half(x.x * scale, x.y * scale), q[i][2 + h] = pack_half(y.x * scale, y.y * scale);
      }
  }
  float o[D / 8][4] = {}; // [2 part + e]: columns 16 part + 4t + e, + 2 of row g, and of row g+8
  float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
  float unit = 0, inverse = 0; // of o, and 1/unit

#pragma unroll 1
  for (int c = warp; c < chunks; c += WARPS) {
    fetch(c + (STAGES - 1) * WARPS, ahead);
    ahead = ahead + 1 == STAGES ? 0 : ahead + 1;
    cp_async_wait<STAGES - 1>();
    __syncwarp();
    const uint8_t *at = ring + stage * stage_bytes<D>;
    uint32_t k0 = smem_addr(at), v0 = k0 + CHUNK * D;
    const float *scales = reinterpret_cast<const float *>(at + 2 * CHUNK * D);
    const int left = end - begin - c * CHUNK; // positions in this chunk, or more
    float s[2][4] = {};
#pragma unroll
    for (int i = 0; i < PARTS / 2; i++) {
      uint32_t b[4]; // part 2i and 2i+1 of positions 0..7, then of 8..15
      ldmatrix4(b, k0 + swizzled((lane / 16) * 8 + lane % 8, 2 * i + (lane / 8) % 2));
#pragma unroll
      for (int n = 0; n < 2; n++) {
        mma_half(s[n], q[2 * i], low_half2(b[2 * n]), high_half2(b[2 * n]));
        mma_half(s[n], q[2 * i + 1], low_half2(b[2 * n + 1]), high_half2(b[2 * n + 1]));
      }
    }
    // Scales of positions that are not there may be anything.
    unsigned greatest = __reduce_max_sync(~0u, lane % CHUNK < left ? __float_as_uint(scales[CHUNK + lane % CHUNK]) : 0);
    float grown = 1;
    if (__uint_as_float(greatest) > unit) grown = unit / __uint_as_float(greatest), unit = __uint_as_float(greatest), inverse = 1.0f / unit;
    float ks[2][2], vs[2][2];
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        int pos = n * 8 + 2 * t + e;
        ks[n][e] = scales[pos], vs[n][e] = pos < left ? scales[CHUNK + pos] * inverse : 0;
      }
    float most[2] = {top[0], top[1]};
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        s[n][e] = n * 8 + 2 * t + (e & 1) < left ? s[n][e] * ks[n][e & 1] : -INFINITY;
        most[e / 2] = fmaxf(most[e / 2], s[n][e]);
      }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      most[h] = fmaxf(most[h], __shfl_xor_sync(~0u, most[h], 1));
      most[h] = fmaxf(most[h], __shfl_xor_sync(~0u, most[h], 2));
      float old = exp2f(top[h] - most[h]); // every chunk has a position: most is finite
      top[h] = most[h];
      sum[h] *= old;
      old *= grown;
#pragma unroll
      for (int i = 0; i < D / 8; i++) o[i][2 * h] *= old, o[i][2 * h + 1] *= old;
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int e = 2 * h; e < 2 * h + 2; e++) {
          float w = exp2f(s[n][e] - most[h]);
          sum[h] += w;
          s[n][e] = w * vs[n][e & 1];
        }
    }
    const uint32_t w[4] = {pack_half(s[0][0], s[0][1]), pack_half(s[0][2], s[0][3]), pack_half(s[1][0], s[1][1]), pack_half(s[1][2], s[1][3])};
#pragma unroll
    for (int i = 0; i < PARTS / 2; i++) {
      uint32_t b[4]; // part 2i of positions 0..7, of 8..15, then part 2i+1
      ldmatrix4_trans(b, v0 + swizzled((lane / 8) % 2 * 8 + lane % 8, 2 * i + lane / 16));
#pragma unroll
      for (int j = 0; j < 4; j++) b[j] = __byte_perm(b[j], 0, 0x3120); // two positions of a column together
#pragma unroll
      for (int j = 0; j < 2; j++) {
        mma_half(o[2 * (2 * i + j)], w, low_half2(b[2 * j]), low_half2(b[2 * j + 1]));
        mma_half(o[2 * (2 * i + j) + 1], w, high_half2(b[2 * j]), high_half2(b[2 * j + 1]));
      }
    }
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    __syncwarp();
  }
#pragma unroll
  for (int h = 0; h < 2; h++) {
    sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
    sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
    if (t == 0) stat[warp][0][g + 8 * h] = top[h], stat[warp][1][g + 8 * h] = sum[h];
  }
  cp_async_wait<0>();
  __syncthreads(); // the rings are free
  float *mine = reinterpret_cast<float *>(smem); // [warp][16][D]
#pragma unroll
  for (int i = 0; i < PARTS; i++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float4 v = make_float4(o[2 * i][2 * h] * unit, o[2 * i + 1][2 * h] * unit, o[2 * i][2 * h + 1] * unit, o[2 * i + 1][2 * h + 1] * unit);
      *reinterpret_cast<float4 *>(mine + (warp * 16 + g + 8 * h) * D + i * 16 + 4 * t) = v;
    }
  __syncthreads();

  // Merge the warps, and then the splits, four elements a thread.
  constexpr int stride = D + 4; // of a partial: values, max, sum
  auto partial = [&](int h, int s) {
    return a.partial + (int64_t(span.partial + s) * a.heads + kv_head * group + h) * stride;
  };
  auto put = [&](int h, int d, float4 v, float l) {
    uint2 packed = make_uint2(pack<bf16>(v.x / l, v.y / l), pack<bf16>(v.z / l, v.w / l));
    *reinterpret_cast<uint2 *>(a.out + int64_t(row) * a.heads * D + (kv_head * group + h) * D + d) = packed;
  };
  auto add = [](float4 &v, float4 x, float f) { v.x += f * x.x, v.y += f * x.y, v.z += f * x.z, v.w += f * x.w; };
  for (int i = threadIdx.x; i < group * D / 4; i += WARPS * 32) {
    int h = i / (D / 4), d = i % (D / 4) * 4;
    float m = -INFINITY, l = 0;
    float4 v = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int w = 0; w < WARPS; w++) m = fmaxf(m, stat[w][0][h]);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      float f = exp2f(stat[w][0][h] - m);
      l += f * stat[w][1][h];
      add(v, *reinterpret_cast<float4 *>(mine + (w * 16 + h) * D + d), f);
    }
    if (splits == 1) {
      put(h, d, v, l);
      continue;
    }
    float *to = partial(h, span.split);
    __stcg(reinterpret_cast<float4 *>(to + d), v);
    if (d == 0) __stcg(reinterpret_cast<float4 *>(to + D), make_float4(m, l, 0, 0));
  }
  if (splits == 1) return;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) arrived = atomicInc(a.tickets + int64_t(row) * kv_heads + kv_head, splits - 1);
  __syncthreads();
  if (arrived != unsigned(splits - 1)) return;
  __threadfence();
  for (int i = threadIdx.x; i < group * D / 4; i += WARPS * 32) {
    int h = i / (D / 4), d = i % (D / 4) * 4;
    float m = -INFINITY, l = 0;
    float4 v = make_float4(0, 0, 0, 0);
    const float *from = partial(h, 0);
    for (int s0 = 0; s0 < splits; s0 += AT_ONCE) {
      float4 part[AT_ONCE];
      float2 ml[AT_ONCE];
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++) {
        const float *at = from + int64_t(min(s0 + j, splits - 1)) * a.heads * stride;
        part[j] = __ldcg(reinterpret_cast<const float4 *>(at + d));
        ml[j] = __ldcg(reinterpret_cast<const float2 *>(at + D));
      }
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++) {
        if (s0 + j >= splits) break;
        float most = fmaxf(m, ml[j].x), old = exp2f(m - most), now = exp2f(ml[j].x - most);
        m = most, l = l * old + ml[j].y * now;
        v.x *= old, v.y *= old, v.z *= old, v.w *= old;
        add(v, part[j], now);
      }
    }
    put(h, d, v, l);
  }
}

// ---------------------------------------------------------------- launchers

bool xk_attn_decode8_takes(int head_dim, int group) { return (head_dim == 64 || head_dim == 128) && group <= 16; }

template <int D> static int32_t decode8(const Launch &l, const Attention &a, const Rows &p, const xk_span *spans, int n, int rows, int sms) {
  const int ctas = p.kv_heads * rows;
  auto kernel = ctas > 3 * sms && ctas <= 4 * sms ? decode8_kernel<D, 4> : decode8_kernel<D, 3>;
  return launch(l, kernel, dim3(p.kv_heads, n), WARPS * 32, smem_bytes<D>, a, p, spans);
}

int32_t xk_attn_decode8(const Launch &l, const Attention &a, const Rows &p, const xk_span *spans, int n, int rows, int sms) {
  if (!xk_attn_decode8_takes(p.row_bytes, a.heads / p.kv_heads) || p.bt.d % CHUNK) return xk_fail(XK_INVALID, "FP8 decode attention: head_dim %d, blocks of %d", p.row_bytes, p.bt.d);
  return p.row_bytes == 64 ? decode8<64>(l, a, p, spans, n, rows, sms) : decode8<128>(l, a, p, spans, n, rows, sms);
}

int32_t xk_attn8_init() {
  auto init = [](auto kernel, int bytes) { return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes); };
  XK_TRY(init(decode8_kernel<64, 3>, smem_bytes<64>));
  XK_TRY(init(decode8_kernel<64, 4>, smem_bytes<64>));
  XK_TRY(init(decode8_kernel<128, 3>, smem_bytes<128>));
  XK_TRY(init(decode8_kernel<128, 4>, smem_bytes<128>));
  return XK_OK;
}
