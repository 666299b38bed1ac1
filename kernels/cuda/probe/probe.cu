// Checks and times single kernels on this GPU, without Go and without a model:
// scripts/build-cuda builds it from the library's own object files.
//
//   probe check [quick|few|kv8|gemm|any|latent]   attention and projections against sums in double precision;
//                             PART=2/5 in the environment: every fifth case from the second on
//   probe check draw [quick|few]  draws against sorting, to the bit
//   probe bench any           projections by gemm_any.cu beside cuBLASLt
//   probe bench latent        decode attention over latents, at 16 and at 128 heads
//   probe bench lengths       decode attention over sequences of unequal length, by spans
//   probe bench [NAME]        figures, one "RESULT {json}" line each
//
// TYPE=fp16 in the environment: elements are fp16; bf16 is left out, and FP8 with it.
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
#include "must.cuh"

static std::mt19937_64 rng(1);
static cudaStream_t stream;
static int sms;
static xk_dtype type = XK_BF16; // of elements
static bool failed = false;

// Whether the next case belongs to this run's part.
static bool mine() {
  static int next = 0, part = 1, of = 1;
  if (const char *p = next ? nullptr : getenv("PART"))
    if (sscanf(p, "%d/%d", &part, &of) != 2 || part < 1 || part > of) fprintf(stderr, "PART=%s is no part\n", p), exit(2);
  return next++ % of == part - 1;
}

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
// V is T's element, or float.
template <typename T, typename V> static __global__ void fill_kernel(V *p, size_t n, float sd, uint64_t seed) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x) {
    float v = noise(i + seed, sd);
    if constexpr (std::is_same_v<V, float>) p[i] = v;
    else p[i] = narrow<T>(v);
  }
}
template <typename V> static V *random_device(size_t n, float sd = 1) {
  V *p = device<V>(n);
  uint64_t seed = rng();
  MUST(xk_each_type(type, [&](auto t) { return fill_kernel<decltype(t)><<<2048, 256>>>(p, n, sd, seed), 0; }));
  MUST(cudaDeviceSynchronize());
  return p;
}

// What one bit in the last place is, beside bf16's: tolerances are in bf16's.
static double finer() { return type == XK_F16 ? 1 / 8.0 : 1; }
static float as_float(uint16_t bits) {
  if (type == XK_F16) return __half2float(__ushort_as_half(bits));
  uint32_t v = uint32_t(bits) << 16;
  float f;
  memcpy(&f, &v, 4);
  return f;
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

#include "attention.cuh"

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

static void bench_small() {
  const int rows = 8192, hidden = 4096, ff = 14336, heads = 32, kv = 8, dim = 128, sets = 4;
  Launch l = {stream, false, type};
  auto percent = [&](const char *name, double bytes, const Time &t) {
    double f = 100 * bytes / copy_rate;
    result(name, "% of copy bandwidth", f / t.median, f / t.most, f / t.least, t.runs);
  };
  {
    const int size = type == XK_F16 ? 4 : 2; // bytes of a value of the residual stream
    int64_t n = int64_t(rows) * hidden;
    element *x = random_device<element>(sets * n * size / 2), *y = device<element>(sets * n);
    float *w = random_device<float>(hidden);
    Time t = timed(sets * 2, 20, [&](int i) { MUST(xk_rmsnorm(l, x + i % sets * n * size / 2, nullptr, w, y + i % sets * n, rows, hidden, 1e-5f)); });
    percent("gpu.small_kernel_pct.norm", (2.0 + size) * n, t);
    MUST(cudaFree(x)); MUST(cudaFree(y)); MUST(cudaFree(w));
  }
  {
    int64_t n = int64_t(rows) * ff;
    element *x = random_device<element>(2 * n), *y = device<element>(n);
    Time t = timed(4, 20, [&](int) { MUST(xk_silu(l, x, y, rows, ff)); });
    percent("gpu.small_kernel_pct.silu", 6.0 * n, t);
    MUST(cudaFree(x)); MUST(cudaFree(y));
  }
  {
    int64_t n = int64_t(rows) * (heads + 2 * kv) * dim, pool_n = int64_t(rows) * 2 * kv * dim;
    element *x = random_device<element>(2 * n), *pool = device<element>(2 * pool_n);
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
  Launch l = {stream, false, type};
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
#include "any.cuh"
#include "kv8.cuh"
#include "draw.cuh"
#include "latent.cuh"

int main(int argc, char **argv) {
  std::string what = argc > 1 ? argv[1] : "", name = argc > 2 ? argv[2] : "";
  MUST(cudaStreamCreate(&stream));
  cudaDeviceProp prop;
  MUST(cudaGetDeviceProperties(&prop, 0));
  sms = prop.multiProcessorCount;
  if (const char *t = getenv("TYPE")) {
    if (strcmp(t, "fp16")) fprintf(stderr, "TYPE=%s is none\n", t), exit(2);
    type = XK_F16;
  }
  MUST(xk_attn_init(type));
  MUST(xk_sampler_init());
  printf("DEVICE %s\n", prop.name);
  if (what == "check") {
    if (name == "draw") {
      check_draws(argc > 3 ? argv[3] : "");
      return failed;
    }
    const bool all = name != "kv8" && name != "gemm" && name != "any" && name != "latent";
    if (all) check(name);
    if ((all || name == "kv8") && type == XK_BF16) check8(name == "few" || name == "quick");
    if (all || name == "gemm") check_gemms(name);
    if (all || name == "any") check_anys(name == "few" || name == "quick");
    if (all || name == "latent") check_latents(name == "few" || name == "quick");
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
  if (name == "rows") { // FIRST LAST BY
    auto number = [&](int i, int otherwise) { return argc > i ? atoi(argv[i]) : otherwise; };
    bench_rows(number(3, 128), number(4, 2304), number(5, 128));
    return 0;
  }
  if (name == "any") {
    bench_any();
    return 0;
  }
  if (name == "latent") {
    bench_latents();
    return 0;
  }
  bench_copy();
  const bool all = name.empty(), attention = all || name == "attention";
  if (attention || name == "prefill") bench_prefill("");
  if (name == "prefill2k") bench_prefill("2k");
  if (name == "prefill8k") bench_prefill("8k");
  if (attention || name == "hit") bench_hit();
  if (attention || name == "dims") bench_dims();
  if (name == "lengths") bench_lengths();
  if (attention || name == "decode" || name == "b1") bench_decode(name == "b1" ? name : "");
  if (all || name == "small") bench_small();
  if (all || name == "sampler") bench_sampler();
  if (all) bench_latents();
  if ((all || name == "kv8") && type == XK_BF16) bench8();
  return 0;
}
