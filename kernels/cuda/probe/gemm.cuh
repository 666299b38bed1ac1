// Checks and times projections of many rows; included by probe.cu.
#pragma once

#include <cublasLt.h>

// One CTA a row of out, in double precision. SILU: n columns of gate and up make n/2.
template <typename T> static __global__ void gemm_reference_kernel(const element *x, const element *w, float *out, int n, int k) {
  for (int c = threadIdx.x; c < n; c += blockDim.x) {
    double s = 0;
    for (int i = 0; i < k; i++) s += double(widen<T>(x[int64_t(blockIdx.x) * k + i])) * double(widen<T>(w[int64_t(c) * k + i]));
    out[int64_t(blockIdx.x) * n + c] = float(s);
  }
}

static std::vector<uint16_t> read_bits(const element *p, size_t n) {
  std::vector<uint16_t> v(n);
  MUST(cudaDeviceSynchronize());
  MUST(cudaMemcpy(v.data(), p, n * 2, cudaMemcpyDeviceToHost));
  return v;
}

struct GemmRig {
  int ctas;
  unsigned *work;
  GemmRig() {
    MUST(xk_gemm_hopper_init(type, &ctas));
    work = upload(std::vector<unsigned>(2));
  }
  ~GemmRig() { cudaFree(work); }
};

// Rows of x after the last are NaN; out lies between canaries of a row, and has
// eight columns more than are written.
static bool check_gemm(GemmRig &rig, int rows, int spare, int n, int k, Epilogue e, bool beside) {
  int wide = e == SILU ? n / 2 : n, stride = wide + 8, all = rows + spare;
  element *x = random_device<element>(size_t(all) * k), *w = random_device<element>(size_t(n) * k, 1 / std::sqrt(float(k)));
  MUST(cudaMemset(x + size_t(rows) * k, 0xff, size_t(spare) * k * 2));
  element *base = device<element>(size_t(all + 2) * stride), *out = base + stride, *old = random_device<element>(size_t(all) * stride);
  float *d = device<float>(size_t(rows) * n);
  MUST(xk_each_type(type, [&](auto t) { return gemm_reference_kernel<decltype(t)><<<rows, 256>>>(x, w, d, n, k), 0; }));
  std::vector<float> sums(size_t(rows) * n);
  MUST(cudaDeviceSynchronize());
  MUST(cudaMemcpy(sums.data(), d, sums.size() * 4, cudaMemcpyDeviceToHost));
  std::vector<uint16_t> before = read_bits(old, size_t(all) * stride), got[3];
  CUtensorMap x_map, w_map, out_map;
  MUST(xk_matrix_map(&w_map, w, n, k, k, false));
  for (int run = 0; run < 3; run++) { // the third: the last rows alone
    int from = run == 2 ? rows / 3 : 0;
    MUST(cudaMemset(base, 0xff, size_t(all + 2) * stride * 2));
    if (e == ADD) MUST(cudaMemcpy(out, old, size_t(all) * stride * 2, cudaMemcpyDeviceToDevice));
    MUST(xk_matrix_map(&x_map, x + size_t(from) * k, all - from, k, k, false));
    MUST(xk_matrix_map(&out_map, out + size_t(from) * stride, all - from, wide, stride, true));
    MUST(xk_gemm_hopper({stream, run == 1, type}, e, {&x_map, &w_map, &out_map, rows - from, n, k, rig.ctas, rig.work, beside}));
    got[run] = read_bits(base, size_t(all + 2) * stride);
  }
  double error = 0, norm = 0, worst = 0;
  bool whole = true, same = true;
  for (int c = 0; c < stride; c++) whole &= got[0][c] == 0xffff && got[0][size_t(all + 1) * stride + c] == 0xffff;
  for (int r = 0; r < rows; r++) {
    for (int c = 0; c < wide; c++) {
      double want;
      if (e == SILU) {
        double gate = sums[size_t(r) * n + c / 8 * 16 + c % 8], up = sums[size_t(r) * n + c / 8 * 16 + 8 + c % 8];
        want = gate / (1 + std::exp(-gate)) * up;
      } else {
        want = sums[size_t(r) * n + c] + (e == ADD ? as_float(before[size_t(r) * stride + c]) : 0);
      }
      size_t at = size_t(r + 1) * stride + c;
      double diff = as_float(got[0][at]) - want;
      error += diff * diff, norm += want * want, worst = std::isnan(diff) ? 1e9 : std::max(worst, std::fabs(diff) / (std::fabs(want) + 1));
      same &= got[0][at] == got[1][at] && (r < rows / 3 || got[0][at] == got[2][at]);
    }
    for (int c = wide; c < stride; c++) whole &= got[0][size_t(r + 1) * stride + c] == (e == ADD ? before[size_t(r) * stride + c] : 0xffff);
  }
  double relative = std::sqrt(error / norm);
  bool ok = relative < (e == SILU ? 0.005 : 0.0025) * finer() && worst < 0.02 * finer() && whole && same;
  failed |= !ok;
  if (!ok || getenv("VERBOSE"))
    printf("%s gemm: rows %d + %d, n %d, k %d, epilogue %d, beside %d: relative %.6f, worst %.6f, canaries %s, runs and batches %s\n", ok ? "ok" : "FAILED", rows, spare, n, k, int(e), beside, relative, worst,
           whole ? "whole" : "broken", same ? "equal" : "differ");
  for (void *p : {(void *)x, (void *)w, (void *)base, (void *)old, (void *)d}) MUST(cudaFree(p));
  return ok;
}

static void check_gemms(const std::string &how) {
  GemmRig rig;
  struct { int rows, spare, n, k; } list[] = {{1, 0, 128, 8},     {2, 300, 256, 64},    {127, 1, 384, 72},   {128, 0, 512, 256},  {129, 130, 640, 264}, {255, 0, 1152, 200}, {257, 3, 128, 520}, {509, 0, 896, 1048},
                                              {300, 0, 6144, 328}, {1023, 64, 1536, 136}, {2049, 0, 768, 392}, {2600, 0, 2048, 64}, {4097, 5, 1280, 96},  {700, 0, 28672, 40}};
  int n = 0;
  for (auto &c : list) {
    if ((how == "few" && c.rows > 300) || !mine()) continue;
    for (Epilogue e : {STORE, ADD, SILU}) {
      if (!xk_gemm_hopper_has(type, e)) continue;
      for (bool beside : {false, true}) {
        check_gemm(rig, c.rows, c.spare, c.n, c.k, e, beside), n++;
        if (e != SILU) check_gemm(rig, c.rows, c.spare, c.n - 40, c.k, e, beside), n++;
      }
    }
  }
  printf("%s: %d projection cases\n", failed ? "FAILED" : "PASS", n);
}

// The four projections of Llama-3-8B's layers beside cuBLASLt's first heuristic
// (and SiLU-mul after it), each for so long that the power limit shows.
struct Blas {
  cublasLtHandle_t lt;
  cublasLtMatmulDesc_t desc;
  void *space;
  static constexpr size_t SPACE = size_t(64) << 20;
  Blas() {
    MUST(cublasLtCreate(&lt));
    MUST(cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    cublasOperation_t transposed = CUBLAS_OP_T;
    MUST(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed));
    space = device<char>(SPACE);
  }
  ~Blas() { cudaFree(space), cublasLtMatmulDescDestroy(desc), cublasLtDestroy(lt); }
  struct Layouts {
    cublasLtMatrixLayoutOpaque_t a, b, d;
    Layouts(int rows, int n, int k, float beta) {
      const cudaDataType_t of = type == XK_F16 ? CUDA_R_16F : CUDA_R_16BF;
      MUST(cublasLtMatrixLayoutInit(&a, of, k, n, k));
      MUST(cublasLtMatrixLayoutInit(&b, of, k, rows, k));
      MUST(cublasLtMatrixLayoutInit(&d, beta != 0 && type == XK_F16 ? CUDA_R_32F : of, n, rows, n)); // beta: to the residual stream
    }
  };
  // What cuBLASLt would take, best first.
  std::vector<cublasLtMatmulHeuristicResult_t> heuristics(int rows, int n, int k, float beta) {
    Layouts t(rows, n, k, beta);
    cublasLtMatmulPreference_t want;
    MUST(cublasLtMatmulPreferenceCreate(&want));
    size_t bytes = SPACE;
    int count = 0;
    MUST(cublasLtMatmulPreferenceSetAttribute(want, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes));
    std::vector<cublasLtMatmulHeuristicResult_t> found(8);
    MUST(cublasLtMatmulAlgoGetHeuristic(lt, desc, &t.a, &t.b, &t.d, &t.d, want, int(found.size()), found.data(), &count));
    MUST(cublasLtMatmulPreferenceDestroy(want));
    found.resize(count);
    return found;
  }
  void run(const element *w, const element *x, element *out, int rows, int n, int k, float beta, const cublasLtMatmulAlgo_t *algo = nullptr) { // nullptr: its default
    Layouts t(rows, n, k, beta);
    float one = 1;
    MUST(cublasLtMatmul(lt, desc, &one, w, &t.a, x, &t.b, &beta, out, &t.d, out, &t.d, algo, space, SPACE, stream));
  }
};

struct Projection {
  const char *name;
  int n, k;
  Epilogue e;
};
static const Projection PROJECTIONS[] = {{"qkv", 6144, 4096, STORE}, {"out", 4096, 4096, ADD}, {"gate_up", 28672, 4096, SILU}, {"down", 4096, 14336, ADD}};

static void bench_gemm(const std::string &only) {
  constexpr int LAYERS = 6;
  GemmRig rig;
  Blas blas;
  int most = 8192;
  element *x = random_device<element>(size_t(most) * 14336), *out = random_device<element>(size_t(most) * 28672), *act = device<element>(size_t(most) * 14336), *w[4];
  for (int p = 0; p < 4; p++) w[p] = random_device<element>(size_t(LAYERS) * PROJECTIONS[p].n * PROJECTIONS[p].k, 1 / std::sqrt(float(PROJECTIONS[p].k)));
  for (int rows : {512, 1024, 2048, 4096, 8192}) {
    if (!only.empty() && std::to_string(rows) != only) continue;
    auto one = [&](int p, bool own, int layer) {
      const Projection &j = PROJECTIONS[p];
      own = own && xk_gemm_hopper_has(type, j.e);
      const element *weights = w[p] + size_t(layer) * j.n * j.k;
      bool silu = j.e == SILU;
      if (!own) {
        blas.run(weights, x, out, rows, j.n, j.k, j.e == ADD);
        if (silu) MUST(xk_silu({stream, false, type}, out, act, rows, j.n / 2));
        return;
      }
      CUtensorMap x_map, w_map, out_map;
      MUST(xk_matrix_map(&x_map, x, rows, j.k, j.k, false));
      MUST(xk_matrix_map(&w_map, weights, j.n, j.k, j.k, false));
      MUST(xk_matrix_map(&out_map, silu ? act : out, rows, silu ? j.n / 2 : j.n, silu ? j.n / 2 : j.n, true));
      MUST(xk_gemm_hopper({stream, true, type}, j.e, {&x_map, &w_map, &out_map, rows, j.n, j.k, rig.ctas, rig.work, false}));
    };
    for (int p = 0; p < 4; p++) {
      const Projection &j = PROJECTIONS[p];
      double flops = 2.0 * rows * j.n * j.k;
      int inner = std::max(LAYERS, int(8e12 / flops)); // about 10 ms
      for (int run = 0; run < 4; run++) {              // cuBLASLt, own, twice
        Time t = timed(inner, 7, [&](int i) { one(p, run % 2, i % LAYERS); });
        printf("GEMM rows %d %s %s: %.2f us, %.0f TFLOP/s\n", rows, j.name, run % 2 ? "own" : "cuBLASLt", t.median, flops / t.median / 1e6);
      }
    }
    for (int run = 0; run < 8; run++) { // a layer's four in turn, by these
      static const char *const ways[] = {"by cuBLASLt", "own", "own but down", "own gate_up"};
      static const bool own[4][4] = {{0, 0, 0, 0}, {1, 1, 1, 1}, {1, 1, 1, 0}, {0, 0, 1, 0}};
      Time t = timed(32, std::max(3, 8 * 2048 / rows), [&](int i) {
        for (int p = 0; p < 4; p++) one(p, own[run % 4][p], i % LAYERS);
      });
      printf("GEMM rows %d, 32 layers %s: %.3f ms, %.0f tok/s\n", rows, ways[run % 4], t.median * 32 / 1000, rows / t.median / 32 * 1e6);
    }
    fflush(stdout);
  }
  for (element *p : {x, out, act, w[0], w[1], w[2], w[3]}) MUST(cudaFree(p));
}

// Every way to compute each projection, by rows, and what a model's layers take by the best of them.
static void bench_rows(int first, int last, int by) {
  constexpr int LAYERS = 6;
  GemmRig rig;
  Blas blas;
  element *x = random_device<element>(size_t(last) * 14336), *out = random_device<element>(size_t(last) * 28672), *act = device<element>(size_t(last) * 14336), *w[4];
  for (int p = 0; p < 4; p++) w[p] = random_device<element>(size_t(LAYERS) * PROJECTIONS[p].n * PROJECTIONS[p].k, 1 / std::sqrt(float(PROJECTIONS[p].k)));
  for (int rows = first; rows <= last; rows += by) {
    double sum = 0, sum_first = 0;
    for (int p = 0; p < 4; p++) {
      const Projection &j = PROJECTIONS[p];
      const bool silu = j.e == SILU;
      auto found = blas.heuristics(rows, j.n, j.k, j.e == ADD);
      const double flops = 2.0 * rows * j.n * j.k;
      const int inner = std::max(LAYERS, int(1.5e12 / flops));
      double least = 1e30, head = 0;
      printf("ROWS %d %s:", rows, j.name);
      for (size_t i = 0; i < found.size(); i++) {
        Time t = timed(inner, 3, [&](int l) {
          blas.run(w[p] + size_t(l % LAYERS) * j.n * j.k, x, out, rows, j.n, j.k, j.e == ADD, &found[i].algo);
          if (silu) MUST(xk_silu({stream, false, type}, out, act, rows, j.n / 2));
        });
        printf(" %.1f", t.median);
        if (i == 0) head = t.median;
        least = std::min(least, t.median);
      }
      printf(" |");
      CUtensorMap x_map, w_map[LAYERS], out_map;
      MUST(xk_matrix_map(&x_map, x, rows, j.k, j.k, false));
      for (int l = 0; l < LAYERS; l++) MUST(xk_matrix_map(&w_map[l], w[p] + size_t(l) * j.n * j.k, j.n, j.k, j.k, false));
      MUST(xk_matrix_map(&out_map, silu ? act : out, rows, silu ? j.n / 2 : j.n, silu ? j.n / 2 : j.n, true));
      for (bool beside : {false, true}) {
        Time t = timed(inner, 3, [&](int l) { MUST(xk_gemm_hopper({stream, true, type}, j.e, {&x_map, &w_map[l % LAYERS], &out_map, rows, j.n, j.k, rig.ctas, rig.work, beside})); });
        printf(" %.1f", t.median);
        least = std::min(least, t.median);
      }
      printf(" | %.0f TFLOP/s\n", flops / least / 1e6);
      sum += least, sum_first += head;
    }
    printf("ROWS %d: 32 layers %.2f ms, %.2f us a row (first heuristics %.2f ms)\n", rows, sum * 32 / 1000, sum * 32 / rows, sum_first * 32 / 1000);
    fflush(stdout);
  }
  for (element *p : {x, out, act, w[0], w[1], w[2], w[3]}) MUST(cudaFree(p));
}

// One launch of each for a profiler.
static void profile_gemm(int rows) {
  GemmRig rig;
  element *x = random_device<element>(size_t(rows) * 14336), *out = random_device<element>(size_t(rows) * 28672);
  for (const Projection &j : PROJECTIONS) {
    if (!xk_gemm_hopper_has(type, j.e)) continue;
    element *w = random_device<element>(size_t(j.n) * j.k, 1 / std::sqrt(float(j.k)));
    bool silu = j.e == SILU;
    CUtensorMap x_map, w_map, out_map;
    MUST(xk_matrix_map(&x_map, x, rows, j.k, j.k, false));
    MUST(xk_matrix_map(&w_map, w, j.n, j.k, j.k, false));
    MUST(xk_matrix_map(&out_map, out, rows, silu ? j.n / 2 : j.n, silu ? j.n / 2 : j.n, true));
    MUST(xk_gemm_hopper({stream, false, type}, j.e, {&x_map, &w_map, &out_map, rows, j.n, j.k, rig.ctas, rig.work, false}));
    MUST(cudaDeviceSynchronize());
    MUST(cudaFree(w));
  }
}
