// Paged decode attention: one query row a sequence, split-KV.
//
// A CTA has a KV head of a span: a sequence, or a part of it. The query heads of the group are
// the 16 rows of an mma tile, so K and V are read once a group. Its four warps
// take chunks of 16 positions in turn, each with its own cp.async ring and
// softmax state: no barrier until the end, where they merge in warp order.
// With several splits the last CTA to arrive adds them up in split order, so
// the result does not depend on timing.
// The host cuts sequences into spans, the longest first. A graph's grid has room for as many
// as there can be.
// Oracle: xk_attn_any and kernels/cpu.
#include <algorithm>

#include "common.cuh"

static constexpr int WARPS = 4, CHUNK = 16, SPAN = WARPS * CHUNK; // spans are multiples of that
// Chunks of a warp in flight: two CTAs fit on a multiprocessor, of 64 four, of 256 one.
template <int D> constexpr int stages = D == 80 || D == 96 ? 4 : 3;

static constexpr int AT_ONCE = 16; // splits whose loads are in flight together when they are merged

// Rows in shared memory: parts of 16 bytes, swizzled, or, where they do not fill
// the banks, at a distance of an odd number of parts.
template <int D> struct Ring {
  static constexpr bool SWIZZLED = D % 64 == 0;
  static constexpr int PARTS = D / 8, PITCH = SWIZZLED ? PARTS : PARTS + 1, BYTES = CHUNK * PITCH * 16; // of a chunk of K or V
  static __device__ __forceinline__ int at(int r, int part) { return (r * PITCH + (SWIZZLED ? part ^ (r & 7) : part)) * 16; }
};

template <int D> static constexpr int smem_bytes = WARPS * stages<D> * 2 * Ring<D>::BYTES;

// atomicInc that releases what the CTA has written, between its barriers, and
// acquires what those before it did: by one thread, where fences of all cost more.
static __device__ __forceinline__ unsigned ticket(unsigned *p, unsigned wrap) {
  unsigned old;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(wrap) : "memory");
  return old;
}

template <typename T, int D>
static __global__ __launch_bounds__(WARPS * 32) void decode_kernel(Attention a, Pool p, const xk_span *spans) {
  using R = Ring<D>;
  constexpr int PARTS = R::PARTS, STAGES = stages<D>;
  extern __shared__ __align__(128) uint8_t smem[];
  __shared__ float stat[WARPS][2][16]; // max and sum of each warp
  __shared__ unsigned arrived;
  // What describes the step is there before its first kernel.
  const xk_span span = spans[blockIdx.y];
  const int row = span.row, length = span.length, begin = span.begin, end = span.end, splits = span.splits;
  if (row < 0) return; // the others wait, and who waits for this grid waits for them
  const int kv_head = blockIdx.x;

  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  int kv_heads = p.kv_heads, group = a.heads / kv_heads;
  const int32_t *table = a.tail + span.table;
  uint8_t *ring = smem + warp * (STAGES * 2 * R::BYTES);
  const int64_t value = int64_t(kv_heads) * p.bt.d * D; // from a K row to its V row

  // Lanes hold the next 64 entries of the block table: a lookup on the way to a
  // copy was a third of a short step.
  const int entries = p.bt.div(length - 1) + 1;
  int window = p.bt.div(min(begin + warp * CHUNK, end - 1)), now, later;
  auto entry = [&](int i) { return i < entries ? __ldg(table + i) : 0; };
  now = entry(window + lane), later = entry(window + 32 + lane);
  // The block of lane % 16's position; chunks ascend.
  auto look = [&](int chunk) {
    int first = begin + chunk * CHUNK, b = p.bt.div(min(first + lane % CHUNK, end - 1));
    int lowest = __shfl_sync(~0u, b, 0), highest = __shfl_sync(~0u, b, CHUNK - 1);
    if (highest >= window + 32) {
      bool next = lowest == window + 32;
      window = lowest;
      now = next ? later : entry(window + lane);
      later = entry(window + 32 + lane);
    }
    int block = __shfl_sync(~0u, now, b - window);
    return first + lane % CHUNK < end ? block : -1;
  };
  // All copy 16-byte parts.
  auto fetch = [&](int chunk, int stage) {
    int first = begin + chunk * CHUNK;
    if (first < end) {
      int mine = first + lane % CHUNK, block = look(chunk);
      int64_t base = block < 0 ? -1 : p.row(block, 0, kv_head, mine - p.bt.div(mine) * p.bt.d);
      uint8_t *to = ring + stage * (2 * R::BYTES);
#pragma unroll
      for (int i = 0; i < CHUNK * PARTS / 32; i++) {
        int r = (i * 32 + lane) / PARTS, part = (i * 32 + lane) % PARTS;
        int64_t from = __shfl_sync(~0u, base, r);
        const element *k = p.data + (from < 0 ? 0 : from) + part * 8;
        uint8_t *dst = to + R::at(r, part);
        cp_async16(dst, k, from >= 0);
        cp_async16(dst + R::BYTES, k + value, from >= 0);
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
    if (phase && !a.beside) pdl_wait();
#pragma unroll 1
    for (int i = 0; early == !phase && i < STAGES - 1; i++) fetch(warp + i * WARPS, ahead++);
  }
  uint32_t q[D / 16][4];
  { // from L2: beside, nothing was waited for
    const uint32_t *src = reinterpret_cast<const uint32_t *>(a.qkv + int64_t(row) * (a.heads + 2 * kv_heads) * D + int64_t(kv_head) * group * D);
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
      q[i][0] = g < group ? __ldcg(src + (g * D + i * 16) / 2 + t) : 0;
      q[i][1] = g + 8 < group ? __ldcg(src + ((g + 8) * D + i * 16) / 2 + t) : 0;
      q[i][2] = g < group ? __ldcg(src + (g * D + i * 16) / 2 + 4 + t) : 0;
      q[i][3] = g + 8 < group ? __ldcg(src + ((g + 8) * D + i * 16) / 2 + 4 + t) : 0;
    }
  }
  float o[D / 8][4] = {};
  float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
  const float scale = a.scale * 1.4426950408889634f;

#pragma unroll 1
  for (int c = warp; c < chunks; c += WARPS) {
    fetch(c + (STAGES - 1) * WARPS, ahead);
    if (c + STAGES * WARPS >= chunks) pdl_next(); // all are asked for: the next kernel's loads would compete with them
    ahead = ahead + 1 == STAGES ? 0 : ahead + 1;
    cp_async_wait<STAGES - 1>();
    __syncwarp();
    uint32_t k0 = smem_addr(ring + stage * (2 * R::BYTES)), v0 = k0 + R::BYTES;
    float s[2][4] = {};
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
      int r = (lane / 16) * 8 + lane % 8, part = 2 * i + (lane / 8) % 2;
      uint32_t b[4];
      ldmatrix4(b, k0 + R::at(r, part));
      mma<T>(s[0], q[i][0], q[i][1], q[i][2], q[i][3], b[0], b[1]);
      mma<T>(s[1], q[i][0], q[i][1], q[i][2], q[i][3], b[2], b[3]);
    }
    float most[2] = {top[0], top[1]};
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        bool in = begin + c * CHUNK + n * 8 + 2 * t + (e & 1) < end;
        s[n][e] = in ? s[n][e] * scale : -INFINITY;
        most[e / 2] = fmaxf(most[e / 2], s[n][e]);
      }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      most[h] = fmaxf(most[h], __shfl_xor_sync(~0u, most[h], 1));
      most[h] = fmaxf(most[h], __shfl_xor_sync(~0u, most[h], 2));
      float old = exp2f(top[h] - most[h]); // every chunk has a position: most is finite
      top[h] = most[h];
      sum[h] *= old;
#pragma unroll
      for (int i = 0; i < D / 8; i++) o[i][2 * h] *= old, o[i][2 * h + 1] *= old;
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int e = 2 * h; e < 2 * h + 2; e++) {
          s[n][e] = exp2f(s[n][e] - most[h]);
          sum[h] += s[n][e];
        }
    }
    uint32_t p0 = pack<T>(s[0][0], s[0][1]), p1 = pack<T>(s[0][2], s[0][3]), p2 = pack<T>(s[1][0], s[1][1]), p3 = pack<T>(s[1][2], s[1][3]);
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
      int r = (lane / 8) % 2 * 8 + lane % 8, part = 2 * i + lane / 16;
      uint32_t b[4];
      ldmatrix4_trans(b, v0 + R::at(r, part));
      mma<T>(o[2 * i], p0, p1, p2, p3, b[0], b[1]);
      mma<T>(o[2 * i + 1], p0, p1, p2, p3, b[2], b[3]);
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
  for (int i = 0; i < D / 8; i++) {
    float *at = mine + (warp * 16 + g) * D + i * 8 + 2 * t;
    at[0] = o[i][0], at[1] = o[i][1];
    at[8 * D] = o[i][2], at[8 * D + 1] = o[i][3];
  }
  __syncthreads();

  // Merge the warps, and then the splits, four elements a thread.
  constexpr int stride = D + XK_STATS; // of a partial
  auto partial = [&](int h, int s) {
    return a.partial + (int64_t(span.partial + s) * a.heads + kv_head * group + h) * stride;
  };
  auto put = [&](int h, int d, float4 v, float l) {
    uint2 packed = make_uint2(pack<T>(v.x / l, v.y / l), pack<T>(v.z / l, v.w / l));
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
  if (a.beside) pdl_wait(); // what follows us waits for us alone
  if (splits == 1) return;
  __syncthreads();
  if (threadIdx.x == 0) arrived = ticket(a.tickets + int64_t(row) * kv_heads + kv_head, splits - 1);
  __syncthreads();
  if (arrived != unsigned(splits - 1)) return;
  for (int i = threadIdx.x; i < group * D / 4; i += WARPS * 32) {
    int h = i / (D / 4), d = i % (D / 4) * 4;
    float m = -INFINITY, l = 0;
    float4 v = make_float4(0, 0, 0, 0);
    const float *from = partial(h, 0);
    for (int s0 = 0; s0 < splits; s0 += AT_ONCE) {
      float4 value[AT_ONCE];
      float2 ml[AT_ONCE];
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++) {
        const float *at = from + int64_t(min(s0 + j, splits - 1)) * a.heads * stride;
        value[j] = __ldcg(reinterpret_cast<const float4 *>(at + d));
        ml[j] = __ldcg(reinterpret_cast<const float2 *>(at + D));
      }
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++) {
        if (s0 + j >= splits) break;
        float most = fmaxf(m, ml[j].x), old = exp2f(m - most), now = exp2f(ml[j].x - most);
        m = most, l = l * old + ml[j].y * now;
        v.x *= old, v.y *= old, v.z *= old, v.w *= old;
        add(v, value[j], now);
      }
    }
    put(h, d, v, l);
  }
}

// ---------------------------------------------------------------- launchers

int32_t xk_attn_decode(const Launch &l, const Attention &a, const Pool &p, const xk_span *spans, int n) {
  return xk_each_form(l.type, p.head_dim, [&](auto t, auto dim) { return launch(l, decode_kernel<decltype(t), dim>, dim3(p.kv_heads, n), WARPS * 32, smem_bytes<dim>, a, p, spans); });
}

static constexpr int SHORTEST = 128; // positions; fewer are not worth a merge

// As many spans as run at once, if they are then about as long as each other: one on a
// multiprocessor where its share is short, else two. Otherwise 2/5 of a share, or 3/5 where
// rows are few: of longer ones the last end by themselves, of shorter ones there is more to
// merge than gained. The numbers are `probe bench lengths`'s.
int xk_span_length(const int32_t *positions, const int32_t *rows, int n, int sms, int kv_heads) {
  int64_t total = 0;
  for (int i = 0; i < n; i++) total += positions[rows[i]] + 1;
  const int64_t at_once = (total * kv_heads < int64_t(768) * sms ? 1 : 2) * sms / kv_heads;
  auto length = [](int64_t least) { return int(round_up(std::max<int64_t>(SHORTEST, least), SPAN)); };
  const int even = at_once ? length(div_up(total, at_once)) : 0;
  for (int most = even; most && most <= even + even / 8; most += SPAN) {
    int64_t spans = 0;
    for (int i = 0; i < n; i++) spans += div_up(positions[rows[i]] + 1, most);
    if (spans <= at_once) return most;
  }
  return length(div_up(total * kv_heads * (int64_t(n) * kv_heads < sms ? 3 : 2), int64_t(5) * sms));
}

int xk_more_spans(int sms, int kv_heads) { return div_up(5 * sms, 2 * kv_heads); }

int xk_attn_spans(xk_span *to, const int32_t *positions, const int32_t *tables, const int32_t *rows, int n, int length) {
  int spans = 0, partial = 0;
  for (int i = 0; i < n; i++) {
    const int row = rows[i], all = positions[row] + 1, per = int(round_up(div_up(all, std::max(1, div_up(all, length))), SPAN));
    if (all <= 0) continue; // padding
    const int splits = div_up(all, per);
    for (int s = 0; s < splits; s++) to[spans++] = {row, tables[row], all, s * per, std::min(s * per + per, all), s, splits, partial};
    if (splits > 1) partial += splits;
  }
  std::sort(to, to + spans, [](const xk_span &x, const xk_span &y) { return x.end - x.begin > y.end - y.begin; });
  return spans;
}

int32_t xk_attn_decode_init(xk_dtype type) {
  return xk_all_forms(type, [](auto t, auto d) {
    XK_TRY(cudaFuncSetAttribute(decode_kernel<decltype(t), d>, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes<d>));
    return int32_t(XK_OK);
  });
}
