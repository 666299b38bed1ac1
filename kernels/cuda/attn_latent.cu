// Paged decode attention over a latent, on Hopper: queries are absorbed, so the latent is key and value
// alike, and what a tile of 64 query heads reads of a position are its 1,152 bytes.
//
// A CTA has a span of a sequence's positions and a tile of heads. One warp copies
// tiles of 64 positions, each run of 16 found through the block table, into two
// stages. Both warpgroups have all 64 heads, and of the output 256 columns each, in
// registers. The first also computes the scores and the softmax; the weights go to
// the second through shared memory. While those of a tile are made, both still
// multiply the tile before: the tensor cores rest only for its end.
// Tiles are taken from the span's last downwards, so that only the first is masked.
// At few heads rows of the tile are empty, and reading is what takes the time; at 128
// the two tiles of a span are neighbours, and the second reads it from L2.
//
// Spans of one row leave partial rows, merged in their order by another kernel: a step
// has the same bits on every run.
// Oracle: probe/latent.cuh against a double-precision sum.
#include <algorithm>

#include "hopper.cuh"
#include "latent.cuh"

static constexpr int N = XK_LATENT_STEP, ROWS = XK_LATENT_ROWS, STAGES = 2, THREADS = 384;
static constexpr int HALVES = XK_LATENT / 64, DOWN = HALVES * 1024, ACROSS = 1024; // of a tile of latents: [group of 8 positions][half][8][64]
static constexpr int STRIDE = XK_LATENT + XK_STATS;
static constexpr float SLACK = 8;             // as in attn_hopper.cu
static constexpr int READY = 1, FREE = 2, MINE = 3; // named barriers: weights are there, have been taken; the first warpgroup

struct LatentSmem {
  element q[(HALVES + 1) * ROWS * 64]; // [half][row][64], the rotated part last
  element latent[STAGES][N * XK_LATENT], rope[STAGES][N * XK_LATENT_ROPE];
  uint4 weights[4][128]; // of a thread of the first warpgroup, for the same of the second
  float2 factors[128];   // by which its two rows' output is multiplied first
  uint64_t q_full, full[STAGES], empty[STAGES];
};
static constexpr int LATENT_SMEM = int(sizeof(LatentSmem)) + 1024;

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

static __device__ __forceinline__ void produce(LatentSmem &m, const LatentAttention &a, const xk_latent_span &s, int first_head, const CUtensorMap *queries, const CUtensorMap *latents,
                                               const CUtensorMap *ropes) {
  const int lane = threadIdx.x % 32, rows = min(a.heads, ROWS);
  if (lane == 0) {
    mbar_expect(&m.q_full, (HALVES + 1) * rows * 128);
    for (int h = 0; h <= HALVES; h++) tma_load(m.q + h * ROWS * 64, queries, &m.q_full, h * 64, s.row * a.heads + first_head);
  }
  const int first = s.begin / N, last = (s.end - 1) / N;
#pragma unroll 1
  for (int n = last, it = 0; n >= first; n--, it++) {
    const int pos = n * N + lane % (N / XK_RUN) * XK_RUN, b = a.bt.div(pos), stage = it % STAGES;
    const int block = pos < s.length ? __ldg(a.tail + s.table + b) : a.blocks; // past the pool: zeros
    const int at = pos - b * a.bt.d;
    mbar_wait(&m.empty[stage], (it / STAGES & 1) ^ 1);
    if (lane == 0) mbar_expect(&m.full[stage], N * XK_LATENT_KEY * 2);
    __syncwarp();
    if (lane < N / XK_RUN) {
      tma_load(m.latent[stage] + lane * XK_RUN * XK_LATENT, latents, &m.full[stage], 0, 0, 0, at / 8, block);
      tma_load(m.rope[stage] + lane * XK_RUN * XK_LATENT_ROPE, ropes, &m.full[stage], 0, at, block);
    }
  }
}

template <typename T> static __device__ __forceinline__ void consume(LatentSmem &m, const LatentAttention &a, const xk_latent_span &s, int first_head) {
  const int wg = __shfl_sync(~0u, int(threadIdx.x) / 128, 0) - 1, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
  const float scale = a.scale * 1.4426950408889634f, slack = SLACK / scale;
  const int row = warp * 16 + g; // and row + 8
  const int first = s.begin / N, last = (s.end - 1) / N, tiles = last - first + 1;
  float o[128] = {}, sum[2] = {0, 0}, top[2] = {-INFINITY, -INFINITY}, old[2] = {1, 1};
  uint32_t probs[16];

  auto values = [&](int stage) {
    uint64_t v = wgmma_desc(smem_addr(m.latent[stage]) + wg * (HALVES / 2) * ACROSS, DOWN, ACROSS);
#pragma unroll
    for (int i = 0; i < N / 16; i++) wgmma_rs<T, 1>(o, probs + 4 * i, v + i * 2 * DOWN / 16, 1);
  };
  auto release = [&](int stage) {
    if (lane == 0) mbar_arrive(&m.empty[stage]);
  };
  auto rescale = [&] {
    if (!__any_sync(~0u, old[0] != 1 || old[1] != 1)) return;
#pragma unroll
    for (int i = 0; i < 128; i++) o[i] *= old[i / 2 % 2];
  };

  if (wg == 0) {
    float x[32]; // scores, then weights
    int given = 0;
    auto give = [&](float f0, float f1) {
      if (given++) named_sync(FREE, 256);
#pragma unroll
      for (int j = 0; j < 4; j++) m.weights[j][thread] = make_uint4(probs[4 * j], probs[4 * j + 1], probs[4 * j + 2], probs[4 * j + 3]);
      m.factors[thread] = make_float2(f0, f1);
      named_arrive(READY, 256);
    };
    auto scores = [&](int stage) {
      uint64_t q = wgmma_desc(smem_addr(m.q), 1024, 0);
      asm volatile("" : "+l"(q)); // or all of its steps would be kept in registers
      const uint64_t k = wgmma_desc(smem_addr(m.latent[stage]), DOWN, 0), r = wgmma_desc(smem_addr(m.rope[stage]), 1024, 0);
#pragma unroll
      for (int i = 0; i < XK_LATENT_KEY / 16; i++) {
        const uint64_t key = i < HALVES * 4 ? k + (i / 4 * ACROSS + i % 4 * 32) / 16 : r + i % 4 * 2;
        wgmma_ss<T>(x, q + (i / 4 * ROWS * 128 + i % 4 * 32) / 16, key, i > 0);
      }
    };
    auto mask = [&] {
      const int most = s.length - 1 - last * N - 2 * t;
#pragma unroll
      for (int i = 0; i < N / 8; i++)
#pragma unroll
        for (int e = 0; e < 4; e++)
          if (8 * i + e % 2 > most) x[4 * i + e] = -INFINITY;
    };
    auto softmax = [&] {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float most = -INFINITY;
#pragma unroll
        for (int i = 0; i < N / 8; i++) most = fmaxf(most, fmaxf(x[4 * i + 2 * h], x[4 * i + 2 * h + 1]));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        const bool rises = most > top[h] + slack;
        old[h] = rises ? exp2_fast((top[h] - most) * scale) : 1.0f;
        if (rises) top[h] = most;
        const float base = (top[h] == -INFINITY ? 0.0f : top[h]) * scale; // of a row that is no head's
        float part = 0;
#pragma unroll
        for (int i = 0; i < N / 8; i++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            float &v = x[4 * i + 2 * h + e];
            v = exp2_fast(fmaf(v, scale, -base));
            part += v;
          }
        sum[h] = sum[h] * old[h] + part;
      }
    };
    auto convert = [&] {
#pragma unroll
      for (int i = 0; i < 16; i++) probs[i] = pack<T>(x[2 * i], x[2 * i + 1]);
    };
    mbar_wait(&m.q_full, 0);
    mbar_wait(&m.full[0], 0);
    wgmma_fence();
    scores(0);
    wgmma_commit();
    wgmma_wait<0>();
    pin(x);
    mask();
    softmax();
    convert();
    if (const int from = s.length - last * N; from < N && from % XK_RUN) { // 0 x NaN is not 0
      uint4 *v = reinterpret_cast<uint4 *>(m.latent[0]);
      constexpr int PARTS = XK_LATENT / 8;
      for (int i = thread; i < (int(round_up(from, XK_RUN)) - from) * PARTS; i += 128) {
        const int r = from + i / PARTS, part = i % PARTS;
        v[(r / 8 * DOWN + part / 8 * ACROSS) / 16 + r % 8 * 8 + part % 8] = make_uint4(0, 0, 0, 0);
      }
      fence_async_shared();
      named_sync(MINE, 128);
    }
#pragma unroll 1
    for (int it = 0; it + 1 < tiles; it++) {
      const int now = it % STAGES, next = (it + 1) % STAGES;
      give(old[0], old[1]);
      mbar_wait(&m.full[next], (it + 1) / STAGES & 1);
      wgmma_fence();
      scores(next);
      wgmma_commit();
      wgmma_fence();
      values(now);
      wgmma_commit();
      wgmma_wait<1>();
      pin(x);
      softmax();
      if (sum[0] + sum[1] < 0) named_sync(7, 32); // never: ptxas does not move the wait below across it (attn_hopper.cu)
      wgmma_wait<0>();
      pin(o);
      release(now);
      convert();
      rescale();
    }
    give(old[0], old[1]);
    wgmma_fence();
    values((tiles - 1) % STAGES);
    wgmma_commit();
    wgmma_wait<0>();
    pin(o);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
      sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
      old[h] = s.partial < 0 ? 1.0f / sum[h] : 1.0f;
    }
    give(old[0], old[1]);
    named_sync(FREE, 256); // no barrier stays half full
  } else {
    auto take = [&] {
      named_sync(READY, 256);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const uint4 v = m.weights[j][thread];
        probs[4 * j] = v.x, probs[4 * j + 1] = v.y, probs[4 * j + 2] = v.z, probs[4 * j + 3] = v.w;
      }
      const float2 f = m.factors[thread];
      old[0] = f.x, old[1] = f.y;
      named_arrive(FREE, 256);
    };
#pragma unroll 1
    for (int it = 0; it < tiles; it++) {
      const int now = it % STAGES;
      take();
      rescale();
      mbar_wait(&m.full[now], it / STAGES & 1);
      wgmma_fence();
      values(now);
      wgmma_commit();
      wgmma_wait<0>();
      pin(o);
      release(now);
    }
    take();
  }

  const int column = wg * (XK_LATENT / 2) + 2 * t;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int head = first_head + row + 8 * h;
    if (head >= a.heads) continue;
    if (s.partial >= 0) {
      float *to = a.partial + (int64_t(s.partial) * a.heads + head) * STRIDE;
#pragma unroll
      for (int i = 0; i < 32; i++) __stcg(reinterpret_cast<float2 *>(to + column + 8 * i), make_float2(o[4 * i + 2 * h], o[4 * i + 2 * h + 1]));
      if (wg == 0 && t == 0) __stcg(reinterpret_cast<float2 *>(to + XK_LATENT), make_float2(top[h] * scale, sum[h]));
      continue;
    }
    element *to = a.out + (int64_t(s.row) * a.heads + head) * XK_LATENT;
#pragma unroll
    for (int i = 0; i < 32; i++) *reinterpret_cast<uint32_t *>(to + column + 8 * i) = pack<T>(o[4 * i + 2 * h] * old[h], o[4 * i + 2 * h + 1] * old[h]);
  }
}

template <typename T>
static __global__ __launch_bounds__(THREADS, 1) void latent_kernel(LatentAttention a, const xk_latent_span *spans, const __grid_constant__ CUtensorMap queries,
                                                                   const __grid_constant__ CUtensorMap latents, const __grid_constant__ CUtensorMap ropes) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ uint8_t raw[];
  LatentSmem &m = *reinterpret_cast<LatentSmem *>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t(1023));
  if (threadIdx.x == 0) {
    mbar_init(&m.q_full, 1);
    for (int i = 0; i < STAGES; i++) mbar_init(&m.full[i], 1), mbar_init(&m.empty[i], 8);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const xk_latent_span span = spans[blockIdx.y];
  const int first_head = blockIdx.x * ROWS;
  pdl_wait();
  pdl_next();
  if (threadIdx.x < 128) {
    regs_give<24>();
    if (threadIdx.x < 32) {
      fence_async_global();
      produce(m, a, span, first_head, &queries, &latents, &ropes);
    }
  } else {
    regs_take<240>();
    consume<T>(m, a, span, first_head);
  }
#endif
}

// A row and head a CTA, four columns a thread.
template <typename T> static __global__ __launch_bounds__(128) void latent_merge_kernel(LatentAttention a, const xk_latent_merge *merges) {
  pdl_wait();
  pdl_next();
  const xk_latent_merge m = merges[blockIdx.y];
  const int head = blockIdx.x, d = threadIdx.x * 4;
  const float *from = a.partial + (int64_t(m.partial) * a.heads + head) * STRIDE;
  const int64_t next = int64_t(a.heads) * STRIDE;
  float most = -INFINITY, sum = 0;
  for (int p = 0; p < m.parts; p++) most = fmaxf(most, __ldcg(from + p * next + XK_LATENT));
  float4 v = make_float4(0, 0, 0, 0);
  for (int p = 0; p < m.parts; p++) {
    const float2 stat = __ldcg(reinterpret_cast<const float2 *>(from + p * next + XK_LATENT));
    const float4 x = __ldcg(reinterpret_cast<const float4 *>(from + p * next + d));
    const float f = exp2f(stat.x - most);
    sum += f * stat.y;
    v.x += f * x.x, v.y += f * x.y, v.z += f * x.z, v.w += f * x.w;
  }
  const float inverse = 1 / sum;
  *reinterpret_cast<uint2 *>(a.out + (int64_t(m.row) * a.heads + head) * XK_LATENT + d) = make_uint2(pack<T>(v.x * inverse, v.y * inverse), pack<T>(v.z * inverse, v.w * inverse));
}

// ---------------------------------------------------------------- the host's part

int32_t xk_latent_maps(CUtensorMap *queries, CUtensorMap *latents, CUtensorMap *ropes, const element *q, int64_t rows, int heads, const element *layer, int blocks, int block_tokens) {
  if (block_tokens % XK_RUN) return xk_fail(XK_INVALID, "blocks of %d tokens: latents want a multiple of %d", block_tokens, XK_RUN);
  const cuuint64_t tokens = cuuint64_t(block_tokens), block = tokens * XK_LATENT_KEY * 2, row = XK_LATENT * 2;
  {
    cuuint64_t dims[2] = {XK_LATENT_KEY, cuuint64_t(rows) * cuuint64_t(heads)}, strides[1] = {XK_LATENT_KEY * 2};
    cuuint32_t box[2] = {64, cuuint32_t(std::min(heads, ROWS))};
    XK_OK_OR_RETURN(xk_tensor_map(queries, q, 2, dims, strides, box));
  }
  {
    cuuint64_t dims[5] = {64, 8, HALVES, tokens / 8, cuuint64_t(blocks)}, strides[4] = {row, 128, 8 * row, block};
    cuuint32_t box[5] = {64, 8, HALVES, XK_RUN / 8, 1};
    XK_OK_OR_RETURN(xk_tensor_map(latents, layer, 5, dims, strides, box));
  }
  cuuint64_t dims[3] = {XK_LATENT_ROPE, tokens, cuuint64_t(blocks)}, strides[2] = {XK_LATENT_ROPE * 2, block};
  cuuint32_t box[3] = {XK_LATENT_ROPE, XK_RUN, 1};
  return xk_tensor_map(ropes, layer + tokens * XK_LATENT, 3, dims, strides, box);
}

void xk_latent_plan(LatentPlan *plan, const int32_t *lengths, const int32_t *tables, int n, int heads, int sms) {
  *plan = {};
  int64_t total = 0;
  for (int i = 0; i < n; i++) total += lengths[i];
  // A share of the positions for each multiprocessor, and a bit: a part that is just too long is not worth a merge.
  const int64_t share = std::max<int64_t>(4 * N, round_up(total * div_up(heads, ROWS) * 23 / 20 / sms, N));
  for (int i = 0; i < n; i++) {
    const int steps = div_up(lengths[i], N), parts = int(std::min<int64_t>(div_up(int64_t(lengths[i]), share), steps));
    for (int p = 0; p < parts; p++) {
      const int begin = int(int64_t(steps) * p / parts) * N, end = std::min(int(int64_t(steps) * (p + 1) / parts) * N, lengths[i]);
      plan->spans.push_back({i, tables[i], begin, end, lengths[i], parts > 1 ? plan->slots + p : -1});
    }
    if (parts > 1) plan->merges.push_back({i, plan->slots, parts}), plan->slots += parts;
  }
  std::stable_sort(plan->spans.begin(), plan->spans.end(), [](const xk_latent_span &x, const xk_latent_span &y) { return x.end - x.begin > y.end - y.begin; });
}

int32_t xk_latent_decode(const Launch &l, const LatentAttention &a, const xk_latent_span *spans, int n, const xk_latent_merge *merges, int n_merges) {
  return xk_each_type(l.type, [&](auto t) {
    XK_OK_OR_RETURN(launch(l, latent_kernel<decltype(t)>, dim3(div_up(a.heads, ROWS), n), THREADS, LATENT_SMEM, a, spans, *a.queries, *a.latents, *a.ropes));
    return n_merges ? launch(l, latent_merge_kernel<decltype(t)>, dim3(a.heads, n_merges), XK_LATENT / 4, 0, a, merges) : int32_t(XK_OK);
  });
}

int32_t xk_latent_init(xk_dtype type) {
  return xk_each_type(type, [](auto t) {
    XK_TRY(cudaFuncSetAttribute(latent_kernel<decltype(t)>, cudaFuncAttributeMaxDynamicSharedMemorySize, LATENT_SMEM));
    return int32_t(XK_OK);
  });
}
