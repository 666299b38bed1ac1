// The probe's part for decode attention over latents: rig, check against double precision, figures.
#pragma once

#include "../latent.cuh"

// One layer's blocks of sequences of given lengths, one absorbed query row each.
struct LatentRig {
  int heads, bt, blocks = 3, longest = 0;
  std::vector<int32_t> lengths, tables, tail;
  std::vector<void *> owned;
  element *layer, *q, *out;
  LatentAttention a = {};
  CUtensorMap queries, latents, ropes;
  LatentPlan plan;
  const xk_latent_span *spans;
  const xk_latent_merge *merges;

  LatentRig(int heads, int bt, const std::vector<int32_t> &list, bool poison) : heads(heads), bt(bt), lengths(list) {
    const int rows = int(lengths.size()), wide = XK_LATENT_KEY;
    for (int n : lengths) blocks += div_up(n, bt), longest = std::max(longest, n);
    std::vector<int32_t> order(blocks);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), rng);
    layer = random_device<element>(int64_t(blocks) * bt * wide);
    int next = 0;
    for (int n : lengths) {
      tables.push_back(int(tail.size()));
      for (int i = 0; i < div_up(n, bt); i++) tail.push_back(order[next++]);
      if (const int from = n % bt; poison && from) { // rows of the last block after the end
        element *block = layer + int64_t(tail.back()) * bt * wide;
        MUST(cudaMemset(block + from * XK_LATENT, 0xff, (bt - from) * XK_LATENT * 2));
        MUST(cudaMemset(block + bt * XK_LATENT + from * XK_LATENT_ROPE, 0xff, (bt - from) * XK_LATENT_ROPE * 2));
      }
    }
    for (int i = next; poison && i < blocks; i++) MUST(cudaMemset(layer + int64_t(order[i]) * bt * wide, 0xff, int64_t(bt) * wide * 2));
    q = random_device<element>(int64_t(rows) * heads * wide);
    out = device<element>(int64_t(rows + 2) * heads * XK_LATENT);
    owned = {layer, q, out};
    a.out = out + int64_t(heads) * XK_LATENT, a.tail = keep(upload(tail)), a.heads = heads, a.blocks = blocks, a.scale = 1 / std::sqrt(float(wide)), a.bt = FastDiv(bt);
    MUST(xk_latent_maps(&queries, &latents, &ropes, q, rows, heads, layer, blocks, bt));
    a.queries = &queries, a.latents = &latents, a.ropes = &ropes;
    cut(sms);
  }
  // Plans for so many multiprocessors.
  void cut(int on) {
    xk_latent_plan(&plan, lengths.data(), tables.data(), int(lengths.size()), heads, on);
    spans = keep(upload(plan.spans)), merges = keep(upload(plan.merges));
    a.partial = keep(device<float>(int64_t(std::max(plan.slots, 1)) * heads * (XK_LATENT + XK_STATS)));
  }
  void run(const Launch &l) { MUST(xk_latent_decode(l, a, spans, int(plan.spans.size()), merges, int(plan.merges.size()))); }
  template <typename T> T *keep(T *p) {
    owned.push_back(const_cast<std::remove_const_t<T> *>(p));
    return p;
  }
  ~LatentRig() {
    for (void *p : owned) cudaFree(p);
  }
};

// One CTA a (row, head), in double precision.
template <typename T>
static __global__ void latent_reference_kernel(const element *q, const element *layer, const int32_t *tail, const int32_t *tables, const int32_t *lengths, int heads, int bt, float scale, float *out) {
  extern __shared__ double score[];
  __shared__ double sums[128];
  const int row = blockIdx.x, head = blockIdx.y, length = lengths[row];
  const element *query = q + (int64_t(row) * heads + head) * XK_LATENT_KEY;
  auto block = [&](int t) { return layer + int64_t(tail[tables[row] + t / bt]) * bt * XK_LATENT_KEY; };
  double most = -1e300;
  for (int t = threadIdx.x; t < length; t += 128) {
    const element *latent = block(t) + t % bt * XK_LATENT, *rope = block(t) + bt * XK_LATENT + t % bt * XK_LATENT_ROPE;
    double s = 0;
    for (int d = 0; d < XK_LATENT; d++) s += double(widen<T>(query[d])) * double(widen<T>(latent[d]));
    for (int d = 0; d < XK_LATENT_ROPE; d++) s += double(widen<T>(query[XK_LATENT + d])) * double(widen<T>(rope[d]));
    score[t] = s * scale;
    most = fmax(most, score[t]);
  }
  sums[threadIdx.x] = most;
  __syncthreads();
  for (int i = 0; i < 128; i++) most = fmax(most, sums[i]);
  __syncthreads();
  double sum = 0;
  for (int t = threadIdx.x; t < length; t += 128) sum += score[t] = exp(score[t] - most);
  sums[threadIdx.x] = sum;
  __syncthreads();
  sum = 0;
  for (int i = 0; i < 128; i++) sum += sums[i];
  for (int d = threadIdx.x; d < XK_LATENT; d += 128) {
    double v = 0;
    for (int t = 0; t < length; t++) v += score[t] * double(widen<T>(block(t)[t % bt * XK_LATENT + d]));
    out[(int64_t(row) * heads + head) * XK_LATENT + d] = float(v / sum);
  }
}

static void check_latents(bool few) {
  MUST(xk_latent_init(type));
  Launch l = {stream, false, type};
  int n = 0;
  const std::vector<std::vector<int32_t>> lists = {{1}, {16, 17, 63, 64, 65}, {300, 1, 129, 2047}, {3001, 5}};
  for (auto &list : lists)
    for (int heads : {16, 128, 8, 96})
      for (int bt : {16, 64, 48}) {
        if (few && (bt == 48 || heads == 96 || list[0] > 1000)) continue;
        if (!mine()) continue;
        LatentRig r(heads, bt, list, true);
        const int64_t row = int64_t(heads) * XK_LATENT, rows = int64_t(list.size());
        float *d = device<float>(rows * row);
        const int32_t *tables = r.keep(upload(r.tables)), *lengths = r.keep(upload(r.lengths));
        MUST(xk_each_type(type, [&](auto t) {
          return latent_reference_kernel<decltype(t)><<<dim3(rows, heads), 128, 8 * (r.longest + 1)>>>(r.q, r.layer, r.a.tail, tables, lengths, heads, bt, r.a.scale, d), 0;
        }));
        MUST(cudaDeviceSynchronize());
        std::vector<float> want(rows * row);
        MUST(cudaMemcpy(want.data(), d, want.size() * 4, cudaMemcpyDeviceToHost));
        MUST(cudaFree(d));
        for (int on : {1, sms, 4096}) { // whole, as a step has them, and in many parts
          r.cut(on);
          auto run = [&] {
            MUST(cudaMemset(r.out, 0xff, (rows + 2) * row * 2));
            r.run(l);
            MUST(cudaDeviceSynchronize());
            std::vector<uint16_t> got((rows + 2) * row);
            MUST(cudaMemcpy(got.data(), r.out, got.size() * 2, cudaMemcpyDeviceToHost));
            return got;
          };
          const std::vector<uint16_t> got = run(), again = run();
          double error = 0, norm = 0, worst = 0;
          for (size_t i = 0; i < want.size(); i++) {
            const double e = as_float(got[i + row]) - want[i];
            error += e * e, norm += double(want[i]) * want[i], worst = std::isnan(e) ? 1e9 : std::max(worst, std::fabs(e));
          }
          const double relative = std::sqrt(error / norm);
          bool canary = true;
          for (int64_t i = 0; i < row; i++) canary &= got[i] == 0xffff && got[got.size() - 1 - i] == 0xffff;
          const bool ok = relative < 0.006 * finer() && worst < 0.05 * finer() && canary && got == again;
          failed |= !ok;
          if (!ok || getenv("VERBOSE"))
            printf("%s latents: %d heads, block %d, %zu sequences, longest %d, %zu spans: relative %.5f, worst %.5f, canaries %s, runs %s\n", ok ? "ok" : "FAILED", heads, bt, list.size(), r.longest,
                   r.plan.spans.size(), relative, worst, canary ? "whole" : "broken", got == again ? "equal" : "differ");
        }
        n++;
      }
  printf("%s: %d cases of latents\n", failed ? "FAILED" : "PASS", n);
}

static __global__ void read_kernel(const uint4 *src, size_t n, uint32_t *out) {
  const size_t step = size_t(gridDim.x) * blockDim.x;
  uint32_t sum = 0;
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int k = 0; k < 8; k++) v[k] = i + k * step < n ? __ldcs(src + i + k * step) : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int k = 0; k < 8; k++) sum ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
  }
  if (sum == 0x12345678) *out = sum; // so that nothing is left out
}

// 64 sequences of 4,096 positions: at 16 heads beside what the device reads, at 128 in FLOP.
static void bench_latents() {
  MUST(xk_latent_init(type));
  Launch l = {stream, true, type};
  const double positions = 64.0 * 4096, bytes = positions * XK_LATENT_KEY * 2;
  double reads; // bytes a microsecond
  {
    const size_t n = size_t(1) << 31;
    char *src = device<char>(n);
    uint32_t *to = device<uint32_t>(1);
    MUST(cudaMemset(src, 7, n));
    Time t = timed(1, 20, [&](int) { read_kernel<<<sms * 16, 512, 0, stream>>>(reinterpret_cast<uint4 *>(src), n / 16, to); });
    reads = n / t.median;
    printf("LATENT reads %.2f TB/s\n", reads / 1e6);
    MUST(cudaFree(src)); MUST(cudaFree(to));
  }
  for (int heads : {16, 128}) {
    LatentRig r(heads, 64, std::vector<int32_t>(64, 4096), false);
    Time t = timed(4, 20, [&](int) { r.run(l); });
    const double flops = positions * heads * 2 * (XK_LATENT_KEY + XK_LATENT);
    printf("LATENT %d heads: %zu spans, %.1f us, %.2f TB/s of latents, %.0f TFLOP/s\n", heads, r.plan.spans.size(), t.median, bytes / 1e6 / t.median, flops / 1e6 / t.median);
    if (heads == 16) result("mla.decode_pct", "% of read bandwidth", 100 * bytes / reads / t.median, 100 * bytes / reads / t.most, 100 * bytes / reads / t.least, t.runs);
    else rate("mla.decode_tflops.h128", "TFLOP/s", flops / 1e6, t);
  }
}
