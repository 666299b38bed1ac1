// Checks and times single kernels on this GPU, without Go and without a model:
// scripts/cuda-bench builds it from the library's own object files.
//
//   probe check [quick|few|kv8|gemm]   attention and projections against sums in double precision
//   probe bench [NAME]        figures, one "RESULT {json}" line each
//
// Inputs are random, rows of the pool that nothing may read are NaN, block
// tables are shuffled, and outputs lie between canaries.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "../common.cuh"

#define MUST(call)                                                                    \
  do {                                                                                \
    int s_ = int(call);                                                               \
    if (s_ != 0) {                                                                    \
      fprintf(stderr, "%s:%d: %s: %d %s %s\n", __FILE__, __LINE__, #call, s_, xk_last_error(), cudaGetErrorString(cudaGetLastError())); \
      exit(1);                                                                        \
    }                                                                                 \
  } while (0)

static std::mt19937_64 rng(1);
static cudaStream_t stream;
static int sms;
static bool failed = false;

template <typename T> static T *device(size_t n) {
  T *p;
  MUST(cudaMalloc(&p, n * sizeof(T)));
  return p;
}
template <typename T> static T *upload(const std::vector<T> &v) {
  T *p = device<T>(std::max<size_t>(v.size(), 1));
  MUST(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
  return p;
}

// Roughly normal numbers of standard deviation sd.
static __device__ float noise(uint64_t i, float sd) {
  uint64_t z = mix64(i * 0x9e3779b97f4a7c15ull + 77);
  float s = 0;
  for (int k = 0; k < 4; k++) s += float(uint16_t(z >> 16 * k)) * (1 / 65536.0f) - 0.5f;
  return s * 1.7320508f * sd;
}
static __global__ void fill_kernel(bf16 *p, size_t n, float sd, uint64_t seed) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x) p[i] = __float2bfloat16(noise(i + seed, sd));
}
static __global__ void fill_kernel(float *p, size_t n, float sd, uint64_t seed) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x) p[i] = noise(i + seed, sd);
}
template <typename T> static T *random_device(size_t n, float sd = 1) {
  T *p = device<T>(n);
  fill_kernel<<<2048, 256>>>(p, n, sd, rng());
  MUST(cudaDeviceSynchronize());
  return p;
}

// Attention over a pool of some layers with sequences of given lengths.
struct Rig {
  int heads, kv_heads, dim, bt, layers;
  struct Seq {
    int pos, n;
  };
  std::vector<Seq> seqs;
  std::vector<void *> owned;
  int rows = 0, blocks = 0;
  std::vector<xk_tile> tiles;
  std::vector<int32_t> tail, positions, tables, decode;
  bf16 *pool, *qkv, *out;
  Attention a = {};
  Pool p = {};
  Prefill f = {};
  CUtensorMap kv_map, q_map;
  int64_t layer_elements;

  Rig(int heads, int kv_heads, int dim, int bt, int layers, std::vector<Seq> list, bool poison) : heads(heads), kv_heads(kv_heads), dim(dim), bt(bt), layers(layers), seqs(list) {
    for (Seq s : seqs) blocks += div_up(s.pos + s.n, bt);
    blocks += 3;
    std::vector<int32_t> order(blocks);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), rng);
    layer_elements = int64_t(blocks) * 2 * kv_heads * bt * dim;
    pool = random_device<bf16>(layer_elements * layers);
    int next = 0;
    for (Seq s : seqs) {
      int table = int(tail.size()), length = s.pos + s.n, n = div_up(length, bt);
      for (int i = 0; i < n; i++) tail.push_back(order[next++]);
      for (int i = 0; i < s.n; i++) positions.push_back(s.pos + i), tables.push_back(table);
      if (s.n == 1) decode.push_back(rows);
      for (int i = 0; i < s.n; i += 128) tiles.push_back({rows + i, std::min(128, s.n - i), s.pos + i, table});
      if (poison && length % bt) // rows of the last block after the end
        for (int kv = 0; kv < 2 * kv_heads; kv++)
          for (int l = 0; l < layers; l++)
            MUST(cudaMemset(pool + l * layer_elements + (int64_t(tail.back()) * 2 * kv_heads + kv) * bt * dim + length % bt * dim, 0xff, (bt - length % bt) * dim * 2));
      rows += s.n;
    }
    if (poison)
      for (int i = next; i < blocks; i++)
        for (int l = 0; l < layers; l++) MUST(cudaMemset(pool + l * layer_elements + int64_t(order[i]) * 2 * kv_heads * bt * dim, 0xff, int64_t(2) * kv_heads * bt * dim * 2));
    std::stable_sort(tiles.begin(), tiles.end(), [](const xk_tile &x, const xk_tile &y) { return x.pos + x.n > y.pos + y.n; });
    int width = (heads + 2 * kv_heads) * dim;
    qkv = random_device<bf16>(int64_t(rows) * width);
    out = device<bf16>(int64_t(rows + 2) * heads * dim);
    MUST(cudaMemset(out, 0xff, int64_t(rows + 2) * heads * dim * 2));
    a.qkv = qkv, a.out = out + heads * dim, a.heads = heads, a.scale = 1 / std::sqrt(float(dim));
    a.positions = keep(upload(positions)), a.tables = keep(upload(tables)), a.tail = keep(upload(tail));
    a.splits = xk_attn_splits(sms, std::max(1, int(decode.size())), kv_heads);
    a.min_split = 128;
    a.partial = keep(device<float>(int64_t(std::max<size_t>(decode.size(), 1)) * heads * a.splits * (dim + 4)));
    a.tickets = keep(upload(std::vector<unsigned>(rows * kv_heads)));
    p.kv_heads = kv_heads, p.head_dim = dim, p.bt = FastDiv(bt);
    f.tiles = keep(upload(tiles)), f.n_tiles = int(tiles.size()), f.longest = tiles[0].pos + tiles[0].n;
    f.work = keep(upload(std::vector<unsigned>(2))), f.sms = sms;
    f.total_rows = int(layer_elements * layers / dim);
    if (bt % 16 == 0) {
      MUST(xk_kv_map(&kv_map, pool, f.total_rows, dim));
      MUST(xk_q_map(&q_map, qkv, rows, width));
      f.kv_map = &kv_map, f.q_map = &q_map;
    }
    owned.insert(owned.end(), {pool, qkv, out});
    at(0);
  }
  template <typename T> T *keep(T *p) {
    owned.push_back(const_cast<std::remove_const_t<T> *>(p));
    return p;
  }
  void at(int layer) { p.data = pool + layer * layer_elements, f.first_row = int(layer * layer_elements / dim); }
  ~Rig() {
    for (void *p : owned) cudaFree(p);
  }
};

// One CTA a (row, head), in double precision.
static __global__ void reference_kernel(Attention a, Pool p, float *out) {
  extern __shared__ double score[];
  __shared__ double sums[128];
  int row = blockIdx.x, head = blockIdx.y, dim = p.head_dim, length = a.positions[row] + 1, kv_head = head / (a.heads / p.kv_heads);
  const int32_t *table = a.tail + a.tables[row];
  const bf16 *q = a.qkv + int64_t(row) * (a.heads + 2 * p.kv_heads) * dim + head * dim;
  double most = -1e300;
  for (int t = threadIdx.x; t < length; t += 128) {
    const bf16 *k = p.data + p.at(table, 0, kv_head, t);
    double s = 0;
    for (int d = 0; d < dim; d++) s += double(__bfloat162float(q[d])) * double(__bfloat162float(k[d]));
    score[t] = s * a.scale;
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
  for (int d = threadIdx.x; d < dim; d += 128) {
    double v = 0;
    for (int t = 0; t < length; t++) v += score[t] * double(__bfloat162float(p.data[p.at(table, 1, kv_head, t) + d]));
    out[(int64_t(row) * a.heads + head) * dim + d] = float(v / sum);
  }
}

static std::vector<float> reference(Rig &r) {
  int64_t n = int64_t(r.rows) * r.heads * r.dim;
  float *d = device<float>(n);
  reference_kernel<<<dim3(r.rows, r.heads), 128, 8 * (r.f.longest + 1)>>>(r.a, r.p, d);
  MUST(cudaDeviceSynchronize());
  std::vector<float> v(n);
  MUST(cudaMemcpy(v.data(), d, n * 4, cudaMemcpyDeviceToHost));
  MUST(cudaFree(d));
  return v;
}

static std::vector<uint16_t> read_out(Rig &r) {
  std::vector<uint16_t> v(int64_t(r.rows + 2) * r.heads * r.dim);
  MUST(cudaDeviceSynchronize());
  MUST(cudaMemcpy(v.data(), r.out, v.size() * 2, cudaMemcpyDeviceToHost));
  return v;
}

// want is rounded to bf16 once at best: relative 2-norm 0.17 %. P in bf16 adds
// about as much.
static void compare(const char *name, Rig &r, const std::vector<float> &want, const std::function<void()> &run) {
  int64_t row = int64_t(r.heads) * r.dim;
  MUST(cudaMemset(r.out, 0xff, (r.rows + 2) * row * 2));
  run();
  std::vector<uint16_t> got = read_out(r), again;
  run();
  again = read_out(r);
  double error = 0, norm = 0, worst = 0;
  for (size_t i = 0; i < want.size(); i++) {
    uint32_t bits = uint32_t(got[i + row]) << 16;
    float g;
    memcpy(&g, &bits, 4);
    double d = g - want[i];
    error += d * d, norm += double(want[i]) * want[i], worst = std::isnan(d) ? 1e9 : std::max(worst, std::fabs(d));
  }
  double relative = std::sqrt(error / norm);
  bool canary = true;
  for (int64_t i = 0; i < row; i++) canary &= got[i] == 0xffff && got[got.size() - 1 - i] == 0xffff;
  bool ok = relative < 0.006 && worst < 0.05 && canary && got == again;
  failed |= !ok;
  if (!ok || getenv("VERBOSE"))
    printf("%s %s: heads %d/%d dim %d block %d, %zu sequences, longest %d: relative %.5f, worst %.5f, canaries %s, runs %s\n", ok ? "ok" : "FAILED", name, r.heads, r.kv_heads, r.dim, r.bt,
           r.seqs.size(), r.f.longest, relative, worst, canary ? "whole" : "broken", got == again ? "equal" : "differ");
}

static void check(const std::string &how) {
  bool quick = how != "", few = how == "few";
  Launch l = {stream, false};
  int n = 0;
  std::vector<std::vector<Rig::Seq>> prefills = {{{0, 2}}, {{0, 128}}, {{0, 129}}, {{0, 127}, {5, 3}, {300, 2}}, {{37, 255}, {0, 16}, {1, 15}, {112, 17}}, {{1000, 300}, {0, 700}, {127, 130}, {128, 128}}};
  if (!quick) prefills.push_back({{0, 2500}}), prefills.push_back({{3001, 257}, {2, 2}, {0, 131}});
  for (auto &seqs : prefills)
    for (int dim : {64, 128})
      for (auto [heads, kv] : {std::pair{4, 4}, {8, 2}, {7, 1}})
        for (int bt : {16, 48, 256, 7, 1}) {
          if (few && (bt > 16 || heads != 8 || seqs.back().n > 200)) continue;
          Rig r(heads, kv, dim, bt, 2, seqs, true);
          r.at(1);
          std::vector<float> want = reference(r);
          if (xk_attn_hopper_takes(r.p, r.f)) compare("prefill", r, want, [&] { MUST(xk_attn_prefill(l, r.a, r.p, r.f)); });
          r.f.kv_map = nullptr;
          compare("prefill mma", r, want, [&] { MUST(xk_attn_prefill(l, r.a, r.p, r.f)); });
          if (bt == 16) compare("any", r, want, [&] { MUST(xk_attn_any(l, r.a, r.p, r.rows)); });
          n++;
        }
  std::vector<std::vector<Rig::Seq>> decodes = {{{0, 1}}, {{15, 1}, {16, 1}, {17, 1}, {0, 1}}, {{2047, 1}, {130, 1}, {64, 1}}, {{3000, 1}}};
  for (auto &seqs : decodes)
    for (int dim : {64, 128})
      for (auto [heads, kv] : {std::pair{4, 4}, {8, 2}, {7, 1}, {32, 2}})
        for (int bt : {16, 256, 7, 1}) {
          if (few && (bt > 16 || heads != 8)) continue;
          Rig r(heads, kv, dim, bt, 2, seqs, true);
          r.at(1);
          std::vector<float> want = reference(r);
          int32_t *list = upload(r.decode);
          for (int splits : {r.a.splits, 1}) {
            r.a.splits = splits;
            compare("decode", r, want, [&] { MUST(xk_attn_decode(l, r.a, r.p, list, int(r.decode.size()))); });
          }
          MUST(cudaFree(list));
          n++;
        }
  printf("%s: %d attention cases\n", failed ? "FAILED" : "PASS", n);
}

// Microseconds of one call: `inner` calls (given their number) in a graph, the
// graph replayed; median, least and most of the replays.
struct Time {
  double median, least, most;
  int runs;
};
static Time timed(int inner, int runs, const std::function<void(int)> &call) {
  call(0);
  MUST(cudaStreamSynchronize(stream));
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < inner; i++) call(i);
  MUST(cudaStreamEndCapture(stream, &graph));
  MUST(cudaGraphInstantiate(&exec, graph, 0));
  cudaEvent_t a, b;
  MUST(cudaEventCreate(&a));
  MUST(cudaEventCreate(&b));
  std::vector<double> us;
  for (int i = 0; i < runs + 2; i++) {
    MUST(cudaEventRecord(a, stream));
    MUST(cudaGraphLaunch(exec, stream));
    MUST(cudaEventRecord(b, stream));
    MUST(cudaEventSynchronize(b));
    float ms;
    MUST(cudaEventElapsedTime(&ms, a, b));
    if (i >= 2) us.push_back(ms * 1000 / inner);
  }
  MUST(cudaGraphExecDestroy(exec));
  MUST(cudaGraphDestroy(graph));
  std::sort(us.begin(), us.end());
  return {us[us.size() / 2], us[0], us.back(), runs};
}

static void result(const char *name, const char *unit, double value, double least, double most, int runs) {
  printf("RESULT {\"name\": \"%s\", \"unit\": \"%s\", \"value\": %.4f, \"p1\": %.4f, \"p99\": %.4f, \"runs\": %d}\n", name, unit, value, std::min(least, most), std::max(least, most), runs);
  fflush(stdout);
}
// work is what one microsecond is to be divided into.
static void rate(const char *name, const char *unit, double work, const Time &t) { result(name, unit, work / t.median, work / t.most, work / t.least, t.runs); }

static double copy_rate; // bytes a microsecond, read and written

static __global__ void copy_kernel(const uint4 *src, uint4 *dst, size_t n) {
  size_t step = size_t(gridDim.x) * blockDim.x;
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += 4 * step) {
    uint4 v[4];
#pragma unroll
    for (int k = 0; k < 4; k++)
      if (i + k * step < n) v[k] = src[i + k * step];
#pragma unroll
    for (int k = 0; k < 4; k++)
      if (i + k * step < n) dst[i + k * step] = v[k];
  }
}

static void bench_copy() {
  size_t n = size_t(1) << 31;
  char *a = device<char>(n), *b = device<char>(n);
  MUST(cudaMemset(a, 7, n));
  Time t = timed(1, 20, [&](int) { copy_kernel<<<sms * 16, 512, 0, stream>>>(reinterpret_cast<uint4 *>(a), reinterpret_cast<uint4 *>(b), n / 16); });
  copy_rate = 2.0 * n / t.median;
  rate("copy", "GB/s", 2.0 * n / 1000, t);
  MUST(cudaFree(a));
  MUST(cudaFree(b));
}

static void bench_prefill(const char *which) {
  struct { const char *name; int length; } list[] = {{"2k", 2048}, {"8k", 8192}, {"32k", 32768}};
  for (auto &c : list) {
    if (*which && strcmp(which, c.name)) continue;
    Rig r(32, 8, 128, 16, 1, {{0, c.length}}, false);
    Launch l = {stream, false};
    double flops = 2.0 * c.length * c.length * 128 * 32;
    Time t = timed(c.length > 8192 ? 1 : 10, 15, [&](int) { MUST(xk_attn_prefill(l, r.a, r.p, r.f)); });
    rate((std::string("gpu.attn_prefill_tflops.") + c.name).c_str(), "TFLOP/s", flops / 1e6, t);
  }
  if (!*which) { // the last 2k chunk of a long prompt
    Rig r(32, 8, 128, 16, 1, {{30720, 2048}}, false);
    Launch l = {stream, false};
    Time t = timed(4, 15, [&](int) { MUST(xk_attn_prefill(l, r.a, r.p, r.f)); });
    rate("attn_prefill_tflops.chunk_at_30k", "TFLOP/s", 4.0 * (30720 + 1024.5) * 2048 * 128 * 32 / 1e6, t);
  }
}

static void bench_decode(const std::string &only) {
  struct { const char *name; int batch, length; } list[] = {{"b64_l4k", 64, 4096}, {"b64_l1k", 64, 1024}, {"b256_l1k", 256, 1024}, {"b1_l8k", 1, 8192}};
  for (auto &c : list) {
    if (only == "b1" && c.batch != 1) continue;
    double bytes = double(c.batch) * c.length * 2 * 8 * 128 * 2;
    int layers = std::max(1, int(600e6 / bytes)); // rotate out of L2
    Rig r(32, 8, 128, 16, layers, std::vector<Rig::Seq>(c.batch, Rig::Seq{c.length - 1, 1}), false);
    int32_t *rows = upload(r.decode);
    Launch l = {stream, true}; // as in a step
    Time t = timed(std::max(4, layers), 20, [&](int i) {
      r.at(i % layers);
      MUST(xk_attn_decode(l, r.a, r.p, rows, c.batch));
    });
    if (c.batch == 1) result("gpu.attn_decode_us.b1_l8k", "us", t.median, t.least, t.most, t.runs);
    else rate((std::string("gpu.attn_decode_gbs.") + c.name).c_str(), "TB/s", bytes / 1e6, t);
    MUST(cudaFree(rows));
  }
}

static void bench_small() {
  const int rows = 8192, hidden = 4096, ff = 14336, heads = 32, kv = 8, dim = 128, sets = 4;
  Launch l = {stream, false};
  auto percent = [&](const char *name, double bytes, const Time &t) {
    double f = 100 * bytes / copy_rate;
    result(name, "% of copy bandwidth", f / t.median, f / t.most, f / t.least, t.runs);
  };
  {
    bf16 *x = random_device<bf16>(size_t(sets) * rows * hidden), *y = device<bf16>(size_t(sets) * rows * hidden);
    float *w = random_device<float>(hidden);
    int64_t n = int64_t(rows) * hidden;
    Time t = timed(sets * 2, 20, [&](int i) { MUST(xk_rmsnorm(l, x + i % sets * n, nullptr, w, y + i % sets * n, rows, hidden, 1e-5f)); });
    percent("gpu.small_kernel_pct.norm", 4.0 * n, t);
    MUST(cudaFree(x)); MUST(cudaFree(y)); MUST(cudaFree(w));
  }
  {
    int64_t n = int64_t(rows) * ff;
    bf16 *x = random_device<bf16>(2 * n), *y = device<bf16>(n);
    Time t = timed(4, 20, [&](int) { MUST(xk_silu(l, x, y, rows, ff)); });
    percent("gpu.small_kernel_pct.silu", 6.0 * n, t);
    MUST(cudaFree(x)); MUST(cudaFree(y));
  }
  {
    int64_t n = int64_t(rows) * (heads + 2 * kv) * dim, pool_n = int64_t(rows) * 2 * kv * dim;
    bf16 *x = random_device<bf16>(2 * n), *pool = device<bf16>(2 * pool_n);
    std::vector<xk_seg> segs;
    for (int i = 0; i < rows / 16; i++) segs.push_back({i * 16, 16, i * 397 % (rows / 16), 0, i * 16});
    xk_seg *d = upload(segs);
    float2 *table = reinterpret_cast<float2 *>(random_device<float>(size_t(rows) * dim));
    uint64_t *digest = device<uint64_t>(size_t(rows) / 16 * kv);
    uint16_t *filled = device<uint16_t>(size_t(rows) / 16 * kv);
    MUST(cudaMemset(filled, 0, size_t(rows) / 16 * kv * 2));
    Pool p;
    p.digest = digest, p.filled = filled, p.kv_heads = kv, p.head_dim = dim, p.bt = FastDiv(16);
    Time t = timed(4, 20, [&](int i) {
      p.data = pool + i % 2 * pool_n;
      Rope r = {x + i % 2 * n, nullptr, nullptr, nullptr, table, d, int(segs.size()), heads, 0, 1e-5f};
      MUST(xk_append(l, r, p));
    });
    percent("gpu.small_kernel_pct.rope", 2.0 * n + 2.0 * int64_t(rows) * heads * dim + 2.0 * pool_n, t); // read qkv, write q and the pool
    MUST(cudaFree(x)); MUST(cudaFree(pool)); MUST(cudaFree(table)); MUST(cudaFree(d)); MUST(cudaFree(digest)); MUST(cudaFree(filled));
  }
}

static void bench_sampler() {
  const int batch = 64, vocab = 128256, sets = 3;
  struct { const char *name; float sd; xk_sample s; } list[] = {
      {"gpu.sampler_us.b64", 1.0f, {}}, {"sampler_us.b64_peaked", 3.0f, {}}, {"sampler_us.b64_top_k50", 1.0f, {}}, {"sampler_us.b64_greedy", 1.0f, {}}};
  Launch l = {stream, false};
  float *scratch = device<float>(size_t(batch) * vocab);
  int32_t *tokens = device<int32_t>(2 * batch);
  for (auto &c : list) {
    float *logits = random_device<float>(size_t(sets) * batch * vocab, c.sd);
    std::vector<xk_sample> samples(batch);
    for (int i = 0; i < batch; i++) {
      xk_sample s = {};
      s.final = s.out = i, s.temperature = 0.8f, s.top_p = 0.95f, s.repetition = 1, s.seed_lo = i * 77;
      if (strstr(c.name, "greedy")) s.temperature = 0;
      if (strstr(c.name, "top_k")) s.top_k = 50;
      samples[i] = s;
    }
    xk_sample *d = upload(samples);
    Time t = timed(3 * sets, 20, [&](int i) {
      Sampling s = {logits + size_t(i % sets) * batch * vocab, scratch, sms, vocab, vocab, 0, d, nullptr, batch, tokens, tokens + batch};
      MUST(xk_draw(l, s));
    });
    result(c.name, "us", t.median, t.least, t.most, t.runs);
    MUST(cudaFree(logits)); MUST(cudaFree(d));
  }
}

#include "gemm.cuh"
#include "kv8.cuh"

int main(int argc, char **argv) {
  std::string what = argc > 1 ? argv[1] : "", name = argc > 2 ? argv[2] : "";
  MUST(cudaStreamCreate(&stream));
  cudaDeviceProp prop;
  MUST(cudaGetDeviceProperties(&prop, 0));
  sms = prop.multiProcessorCount;
  MUST(xk_attn_init());
  MUST(xk_sampler_init());
  printf("DEVICE %s\n", prop.name);
  if (what == "check") {
    if (name != "kv8" && name != "gemm") check(name);
    if (name != "gemm") check8(name == "few" || name == "quick");
    if (name != "kv8") check_gemms(name);
    return failed;
  }
  if (what == "profile") {
    profile_gemm(2048);
    return 0;
  }
  if (what != "bench") return 2;
  if (name == "gemm") {
    bench_gemm(argc > 3 ? argv[3] : "");
    return 0;
  }
  bench_copy();
  if (name.empty() || name == "prefill") bench_prefill("");
  if (name == "prefill2k") bench_prefill("2k");
  if (name == "prefill8k") bench_prefill("8k");
  if (name.empty() || name == "decode" || name == "b1") bench_decode(name);
  if (name.empty() || name == "small") bench_small();
  if (name.empty() || name == "sampler") bench_sampler();
  if (name.empty() || name == "kv8") bench8();
  return 0;
}
