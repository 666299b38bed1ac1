// Projections: skinny.cu, gemm_hopper.cu, or one of cuBLASLt's algorithms, by shape and
// number of rows. With cfg.tune each choice is measured at start, over different layers'
// weights, so that none finds them in L2; xk_choices_get and _set let processes share what
// one has measured. Without it the choice follows rules, and is the same in every process.
// With cfg.batch_invariant all algorithms of a shape give a row the same bits; where
// cuBLASLt has none that do, gemm_any.cu serves.
// Weights are [N][K], activations [rows][K], results [rows][N], all row-major:
// for cuBLASLt's columns that is N x rows = W^T x X.
#include <algorithm>

#include "context.cuh"

// Row counts up to which a choice serves. Tiles of 128 rows make steps of the same time a
// row, if each multiple of 128 has its own choice: what suits 1,024 rows computes 640 in
// the time of 830. Fewer rows have finer ones.
static const int BUCKETS[] = {1,   8,   16,  32,  64,   96,   128,  192,  256,  320,  384,  448,  512,  640,  768,  896,
                              1024, 1152, 1280, 1408, 1536, 1664, 1792, 1920, 2048, 2560, 3072, 4096, 6144, 8192, 16384};
static constexpr int CANDIDATES = 8;

#define LT_TRY(call)                                                                                          \
  do {                                                                                                        \
    cublasStatus_t s_ = (call);                                                                               \
    if (s_ != CUBLAS_STATUS_SUCCESS) return xk_fail(XK_CUBLAS, "%s: status %d (%s:%d)", #call, int(s_), __FILE__, __LINE__); \
  } while (0)

struct Operands {
  const element *w, *x;
  void *out;
  int n, k, out_stride;
  float beta;
  Epilogue epilogue; // of the own kernels
  cudaDataType_t type, out_type;
};

static Operands operands(xk_ctx *c, Shape s, int layer) {
  const xk_config &g = c->cfg;
  const Layer *l = s == HEAD ? nullptr : &c->layers[layer];
  const cudaDataType_t type = g.fp16 ? CUDA_R_16F : CUDA_R_16BF, stream = g.fp16 ? CUDA_R_32F : type; // of elements, of the residual stream
  const float beta = c->alone() ? 1 : 0;
  const Epilogue adds = c->alone() ? ADD : g.fp16 ? STORE_F32 : STORE;
  switch (s) {
  case QKV: return {l->qkv, c->xn, c->qkv, c->width, g.hidden, c->width, 0, STORE, type, type};
  case OUT: return {l->o, c->att, c->sums(false), g.hidden, g.heads * g.head_dim, g.hidden, beta, adds, type, stream};
  case GATE_UP: return {l->gate_up, c->xn, c->gu, 2 * c->ff, g.hidden, 2 * c->ff, 0, SILU, type, type};
  case DOWN: return {l->down, c->act, c->sums(true), g.hidden, c->ff, g.hidden, beta, adds, type, stream};
  default: return {c->head, c->last, c->head_out, g.ids, g.hidden, c->stride, 0, STORE_F32, type, CUDA_R_32F};
  }
}

struct Layouts {
  cublasLtMatrixLayoutOpaque_t a, b, d;
  int32_t init(const Operands &o, int rows) {
    LT_TRY(cublasLtMatrixLayoutInit(&a, o.type, o.k, o.n, o.k));
    LT_TRY(cublasLtMatrixLayoutInit(&b, o.type, o.k, rows, o.k));
    LT_TRY(cublasLtMatrixLayoutInit(&d, o.out_type, o.n, rows, o.out_stride));
    return XK_OK;
  }
};

static int32_t matmul(xk_ctx *c, const Launch &l, const Operands &o, int rows, const cublasLtMatmulAlgo_t *algo) {
  Layouts t;
  XK_OK_OR_RETURN(t.init(o, rows));
  float one = 1;
  cublasStatus_t s = cublasLtMatmul(c->lt, c->matmul, &one, o.w, &t.a, o.x, &t.b, &o.beta, o.out, &t.d, o.out, &t.d, algo, c->workspace, xk_ctx::WORKSPACE, l.stream);
  if (s != CUBLAS_STATUS_SUCCESS && algo && !c->cfg.batch_invariant) return matmul(c, l, o, rows, nullptr); // not for this row count
  if (s != CUBLAS_STATUS_SUCCESS) return xk_fail(XK_CUBLAS, "cublasLtMatmul of %d x %d x %d: status %d", o.n, rows, o.k, int(s));
  return XK_OK;
}

static bool has_own(xk_ctx *c, Shape s) {
  return c->hopper && xk_gemm_hopper_has(c->type(), operands(c, s, 0).epilogue);
}

// Whether gemm_hopper.cu is to do it. By the probe's timing on an H100 of
// Llama-3-8B's shapes: with fewer rows its last wave of tiles is too empty, and
// DOWN's rows are so long that tiles which drift apart do not meet in L2.
static bool takes_own(xk_ctx *c, Shape s, int rows) {
  static const int from[SHAPES] = {1025, 1025, 1025, INT32_MAX, INT32_MAX};
  return has_own(c, s) && rows >= from[s];
}

static int32_t run_own(xk_ctx *c, const Launch &l, Shape s, int layer, int rows, bool beside) {
  Operands o = operands(c, s, layer);
  return xk_gemm_hopper(l, o.epilogue, {&c->reads[s], &c->layers[layer].maps[s], &c->writes[s], rows, o.n, o.k, c->gemm_ctas, c->gemm_work, beside});
}

// By cuBLASLt or gemm_any.cu, neither of which does SiLU.
static int32_t multiply(xk_ctx *c, const Launch &l, const Operands &o, int rows, const Choice &h) {
  if (h.any) return xk_gemm_any(l, o.epilogue == SILU ? STORE : o.epilogue, o.w, o.x, o.out, o.out_stride, rows, o.n, o.k);
  return matmul(c, l, o, rows, h.algo_known ? &h.algo : nullptr);
}

static int32_t run(xk_ctx *c, const Launch &l, Shape s, int layer, int rows, const Choice &h) {
  if (h.own) return run_own(c, l, s, layer, rows, h.beside);
  Operands o = operands(c, s, layer);
  if (h.skinny) {
    void *out = s == GATE_UP ? c->act : o.out;
    return xk_skinny(l, o.epilogue, o.w, o.x, o.k, out, s == GATE_UP ? c->ff : o.out_stride, rows, o.n, o.k);
  }
  int most = s == GATE_UP ? c->gu_rows : rows;
  for (int from = 0; from < rows; from += most) {
    int n = std::min(most, rows - from);
    XK_OK_OR_RETURN(multiply(c, l, o, n, h));
    if (s == GATE_UP) XK_OK_OR_RETURN(xk_silu(l, c->gu, c->act + int64_t(from) * c->ff, n, c->ff));
    o.x += int64_t(n) * o.k;
  }
  return XK_OK;
}

int32_t xk_project(xk_ctx *c, const Launch &l, Shape s, int layer, int rows) {
  if (c->cfg.weights_fp8 && s != HEAD) return xk_project8(c, l, s, layer, rows);
  static const Choice none{};
  auto it = c->choices[s].lower_bound(rows);
  return run(c, l, s, layer, rows, it == c->choices[s].end() ? none : it->second);
}

// Milliseconds of one run: the least of a few, each on another layer.
static int32_t measure(xk_ctx *c, Shape s, int rows, const Choice &h, float *ms) {
  Launch l = c->on_stream(false);
  *ms = 1e30f;
  for (int i = 0; i < 4; i++) {
    XK_TRY(cudaEventRecord(c->began[0], c->stream));
    XK_OK_OR_RETURN(run(c, l, s, i * 7 % c->cfg.layers, rows, h));
    XK_TRY(cudaEventRecord(c->ended[0], c->stream));
    XK_TRY(cudaEventSynchronize(c->ended[0]));
    float t;
    XK_TRY(cudaEventElapsedTime(&t, c->began[0], c->ended[0]));
    if (i > 0) *ms = std::min(*ms, t);
  }
  return XK_OK;
}

// What cuBLASLt would take for so many rows, best first; n is 0 if it has none.
static int32_t heuristics(xk_ctx *c, const Operands &o, int rows, cublasLtMatmulHeuristicResult_t (&found)[CANDIDATES], int *n) {
  Layouts t;
  XK_OK_OR_RETURN(t.init(o, rows));
  cublasLtMatmulPreference_t want;
  LT_TRY(cublasLtMatmulPreferenceCreate(&want));
  size_t workspace = xk_ctx::WORKSPACE;
  *n = 0;
  cublasLtMatmulPreferenceSetAttribute(want, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace);
  cublasStatus_t st = cublasLtMatmulAlgoGetHeuristic(c->lt, c->matmul, &t.a, &t.b, &t.d, &t.d, want, CANDIDATES, found, n);
  cublasLtMatmulPreferenceDestroy(want);
  if (st != CUBLAS_STATUS_SUCCESS) *n = 0;
  return XK_OK;
}

static int32_t choose(xk_ctx *c, Shape s, int rows, Choice *best) {
  Operands o = operands(c, s, 0);
  cublasLtMatmulHeuristicResult_t found[CANDIDATES];
  int n;
  XK_OK_OR_RETURN(heuristics(c, o, rows, found, &n)); // without any, cublasLtMatmul's own default is taken
  if (!c->cfg.tune) {
    best->own = takes_own(c, s, rows);
    best->skinny = rows <= 16, best->algo_known = n > 0;
    if (n > 0) best->algo = found[0].algo;
    return XK_OK;
  }
  if (rows <= 8 && o.k % 8 == 0) { // timed alone it gains least, in a step the most
    best->skinny = true;
    return XK_OK;
  }
  float least = 1e30f;
  auto consider = [&](const Choice &h) {
    float ms;
    XK_OK_OR_RETURN(measure(c, s, rows, h, &ms));
    if (ms < least) least = ms, *best = h;
    return int32_t(XK_OK);
  };
  for (int i = 0; i < n; i++) {
    Choice h;
    h.algo_known = true, h.algo = found[i].algo;
    XK_OK_OR_RETURN(consider(h));
  }
  Choice h;
  h.skinny = true;
  if (rows <= 32 && o.k % 8 == 0) XK_OK_OR_RETURN(consider(h));
  h.skinny = false, h.own = true;
  for (bool beside : {false, true}) {
    h.beside = beside;
    if (rows > 32 && has_own(c, s)) XK_OK_OR_RETURN(consider(h));
  }
  return XK_OK;
}

// Calls f with each number of rows that has a choice.
template <typename F> static int32_t each_bucket(xk_ctx *c, int s, F f) {
  const int most = s == HEAD ? c->cfg.max_seqs : c->cfg.max_rows;
  int done = 0;
  for (int b : BUCKETS) {
    if (done >= most) break;
    done = std::min(b, most);
    XK_OK_OR_RETURN(f(done));
  }
  return XK_OK;
}

// Whether the shape's projections are chosen here: not those of FP8 weights, nor a mixture's.
static bool chosen_here(xk_ctx *c, int s) {
  if (c->cfg.weights_fp8) return s == HEAD;
  return !c->cfg.experts || (s != GATE_UP && s != DOWN);
}

// ---------------------------------------------------------------- choices of other processes

// A choice as bytes: what one process measured serves others with the same key. cuBLASLt
// allows its algorithms to be kept for the same version.
struct Kept {
  int32_t shape, rows;
  uint32_t skinny : 1, own : 1, beside : 1, algo_known : 1;
  uint32_t zero;
  cublasLtMatmulAlgo_t algo;
};
struct KeptHead {
  uint64_t key, digest;
};
static uint64_t digest_of(const Kept *k, int64_t n) {
  uint64_t d = n;
  auto *words = reinterpret_cast<const uint64_t *>(k);
  for (int64_t i = 0; i < n * int64_t(sizeof *k / 8); i++) d = mix64(d ^ words[i]);
  return d;
}

int32_t xk_choices_key(xk_ctx *c, uint64_t *key) {
  cudaDeviceProp p;
  XK_TRY(cudaGetDeviceProperties(&p, c->cfg.device));
  int driver = 0;
  XK_TRY(cudaDriverGetVersion(&driver));
  uint64_t d = XK_ABI;
  auto add = [&](uint64_t v) { d = mix64(d ^ v); };
  for (const char *s = p.name; *s; s++) add(*s);
  for (uint64_t v : {uint64_t(c->cfg.experts), uint64_t(p.multiProcessorCount), uint64_t(driver), uint64_t(cublasLtGetVersion()), uint64_t(c->cfg.fp16), uint64_t(c->cfg.weights_fp8), uint64_t(sizeof(Kept)), uint64_t(c->gu_rows)}) add(v);
  for (int s = 0; s < SHAPES; s++) {
    if (!chosen_here(c, s)) continue;
    Operands o = operands(c, Shape(s), 0);
    add(o.n), add(o.k), add(o.out_stride);
    XK_OK_OR_RETURN(each_bucket(c, s, [&](int rows) { return add(rows), int32_t(XK_OK); }));
  }
  *key = d;
  return XK_OK;
}

int32_t xk_choices_get(xk_ctx *c, void *out, int64_t room, int64_t *bytes) {
  std::vector<Kept> list;
  for (int s = 0; s < SHAPES; s++)
    for (auto &[rows, h] : c->choices[s]) {
      Kept k = {};
      k.shape = s, k.rows = rows, k.skinny = h.skinny, k.own = h.own, k.beside = h.beside, k.algo_known = h.algo_known;
      if (h.algo_known) k.algo = h.algo;
      list.push_back(k);
    }
  KeptHead head = {0, digest_of(list.data(), list.size())};
  XK_OK_OR_RETURN(xk_choices_key(c, &head.key));
  *bytes = sizeof head + list.size() * sizeof(Kept);
  if (*bytes > room) return xk_fail(XK_INVALID, "choices of %lld bytes", (long long)*bytes);
  memcpy(out, &head, sizeof head);
  memcpy(static_cast<uint8_t *>(out) + sizeof head, list.data(), list.size() * sizeof(Kept));
  return XK_OK;
}

// Whether a choice can serve so many rows here.
static bool serves(xk_ctx *c, const Kept &k) {
  Operands o = operands(c, Shape(k.shape), 0);
  if (k.skinny) return !k.own && k.rows <= 32 && o.k % 8 == 0;
  if (k.own) return has_own(c, Shape(k.shape));
  if (!k.algo_known) return true;
  Layouts t;
  cublasLtMatmulHeuristicResult_t r;
  const int rows = k.shape == GATE_UP ? std::min(k.rows, c->gu_rows) : k.rows;
  return t.init(o, rows) == XK_OK && cublasLtMatmulAlgoCheck(c->lt, c->matmul, &t.a, &t.b, &t.d, &t.d, &k.algo, &r) == CUBLAS_STATUS_SUCCESS && r.workspaceSize <= xk_ctx::WORKSPACE;
}

int32_t xk_choices_set(xk_ctx *c, const void *from, int64_t bytes) {
  XK_TRY(cudaSetDevice(c->cfg.device));
  KeptHead head;
  uint64_t key;
  XK_OK_OR_RETURN(xk_choices_key(c, &key));
  if (bytes < int64_t(sizeof head) || (bytes - sizeof head) % sizeof(Kept)) return xk_fail(XK_INVALID, "choices of %lld bytes", (long long)bytes);
  memcpy(&head, from, sizeof head);
  std::vector<Kept> list((bytes - sizeof head) / sizeof(Kept));
  memcpy(list.data(), static_cast<const uint8_t *>(from) + sizeof head, list.size() * sizeof(Kept));
  if (head.key != key || head.digest != digest_of(list.data(), list.size())) return xk_fail(XK_INVALID, "choices of another device, library or model, or damaged ones");
  std::map<int, Choice> got[SHAPES];
  size_t at = 0;
  for (int s = 0; s < SHAPES; s++) {
    if (!chosen_here(c, s)) continue;
    XK_OK_OR_RETURN(each_bucket(c, s, [&](int rows) {
      if (at >= list.size() || list[at].shape != s || list[at].rows != rows || !serves(c, list[at])) return xk_fail(XK_INVALID, "choices: number %d cannot serve", int(at));
      const Kept &k = list[at++];
      Choice &h = got[s][rows];
      h.skinny = k.skinny, h.own = k.own, h.beside = k.beside, h.algo_known = k.algo_known, h.algo = k.algo;
      return int32_t(XK_OK);
    }));
  }
  if (at != list.size()) return xk_fail(XK_INVALID, "choices: %d too many", int(list.size() - at));
  for (int s = 0; s < SHAPES; s++)
    if (chosen_here(c, s)) c->choices[s] = std::move(got[s]);
  return XK_OK;
}

// ---------------------------------------------------------------- batch_invariant
//
// Algorithms that add up K in one go, in order, differ in tiles and speed but
// hardly in bits. So the first that gives a row the same bits in every batch is
// the reference of its shape, and each bucket takes its own first choice of those
// that agree with it, the kernel of gemm_hopper.cu before all: seen on the real
// weights, at start, on this device. Where the heuristics list none, as for few
// columns, whose K they all split, the reference is gemm_any.cu.

static constexpr int MOST_CHECKED = 2048; // rows; larger buckets take the last one's choice
static constexpr int DIGESTED = 256;      // rows
static const int REFERENCES[] = {128, 64, 256, 2048, 16}; // row counts whose first choices may be the reference

// V is element, or float.
template <typename T, typename V> static __global__ void noise_kernel(V *x, int64_t n, int64_t first) {
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x) {
    float v = float(int32_t(mix64(first + i))) * (1.0f / 2147483648.0f);
    if constexpr (std::is_same_v<V, float>) x[i] = v;
    else x[i] = narrow<T>(v);
  }
}
template <typename V> static void noise(xk_ctx *c, V *x, int64_t n, int64_t first) {
  xk_each_type(c->type(), [&](auto t) { return noise_kernel<decltype(t)><<<512, 256, 0, c->stream>>>(x, n, first), int32_t(XK_OK); });
}
static __global__ void unequal_kernel(const uint16_t *a, const uint16_t *b, int64_t n, unsigned long long *count) {
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x)
    if (a[i] != b[i]) atomicAdd(count, 1);
}
static __global__ void digest_kernel(const uint16_t *a, int64_t n, int64_t first, unsigned long long *digest) {
  uint64_t sum = 0;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x) sum += mix64(uint64_t(first + i) << 16 | a[i]);
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) atomicAdd(digest, sum);
}

// The check of one shape: noise in, results of most rows in kept.
struct Check {
  xk_ctx *c;
  Shape shape;
  Operands o;
  int most;
  uint8_t *kept;
  unsigned long long *count; // on the device
  int64_t row() const { return int64_t(o.out_stride) * (o.out_type == CUDA_R_32F ? 4 : 2); }
  void fill(int rows, int64_t number) const { noise(c, const_cast<element *>(o.x), rows * int64_t(o.k), number * o.k); } // rows `number` on
  // Rows from .. of x, whose numbers are so much greater. gate_up is looked at before
  // SiLU, which is the same function in every kernel.
  int32_t run(int from, int rows, const Choice &h, int64_t number = 0) const {
    Operands part = o;
    part.x += int64_t(from) * o.k;
    const int64_t n = int64_t(rows) * o.out_stride, first = (number + from) * o.out_stride;
    if (o.beta && o.out_type == CUDA_R_32F) noise(c, static_cast<float *>(o.out), n, first); // what is added to
    else if (o.beta) noise(c, static_cast<element *>(o.out), n, first);
    else XK_TRY(cudaMemsetAsync(o.out, 0, rows * row(), c->stream));
    Launch l = c->on_stream(false);
    if (!h.own) return multiply(c, l, part, rows, h);
    CUtensorMap x, w, out;
    XK_OK_OR_RETURN(xk_matrix_map(&x, part.x, rows, o.k, o.k, false));
    XK_OK_OR_RETURN(xk_matrix_map(&w, o.w, o.n, o.k, o.k, false));
    XK_OK_OR_RETURN(xk_matrix_map(&out, static_cast<element *>(o.out), rows, o.n, o.out_stride, true));
    return xk_gemm_hopper(l, o.epilogue == SILU ? STORE : o.epilogue, {&x, &w, &out, rows, o.n, o.k, c->gemm_ctas, c->gemm_work, false});
  }
  // Whether so many rows, from some place, come out as they are in kept.
  bool agrees(int rows, const Choice &h) const {
    int from = most - rows - (most - rows) / 3;
    unsigned long long unequal = 1;
    if (cudaMemsetAsync(count, 0, sizeof *count, c->stream) != cudaSuccess || run(from, rows, h) != XK_OK) return false;
    unequal_kernel<<<512, 256, 0, c->stream>>>(reinterpret_cast<uint16_t *>(kept + from * row()), static_cast<uint16_t *>(o.out), rows * row() / 2, count);
    return cudaMemcpyAsync(&unequal, count, sizeof unequal, cudaMemcpyDeviceToHost, c->stream) == cudaSuccess &&
           cudaStreamSynchronize(c->stream) == cudaSuccess && unequal == 0;
  }
};

static int attribute(const cublasLtMatmulAlgo_t *algo, cublasLtMatmulAlgoConfigAttributes_t which) {
  uint32_t v = 0; // some are 16 bits
  size_t n;
  return cublasLtMatmulAlgoConfigGetAttribute(algo, which, &v, sizeof v, &n) == CUBLAS_STATUS_SUCCESS ? int(v) : 0;
}
static bool in_one_go(const cublasLtMatmulAlgo_t *algo) {
  return attribute(algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM) <= 1 && attribute(algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME) == 0;
}

static int32_t reference(const Check &k, Choice *out) {
  auto keep = [&] { return cudaMemcpyAsync(k.kept, k.o.out, k.most * k.row(), cudaMemcpyDeviceToDevice, k.c->stream); };
  for (int at : REFERENCES) {
    if (k.c->cfg.batch_invariant == 2) break;
    cublasLtMatmulHeuristicResult_t found[CANDIDATES];
    int n;
    XK_OK_OR_RETURN(heuristics(k.c, k.o, std::min(at, k.most), found, &n));
    for (int i = 0; i < n; i++) {
      Choice h;
      h.algo_known = true, h.algo = found[i].algo;
      if (!in_one_go(&h.algo) || k.run(0, k.most, h) != XK_OK) continue;
      XK_TRY(keep());
      bool all = true;
      for (int rows : {1, 2, 7, 16, 33, 64, 96, 129, 300, 511, 1024}) all = all && (rows >= k.most || k.agrees(rows, h));
      if (!all) continue;
      *out = h;
      return XK_OK;
    }
  }
  out->any = true;
  XK_OK_OR_RETURN(k.run(0, k.most, *out));
  XK_TRY(keep());
  k.c->buffers.slow |= 1u << k.shape;
  return XK_OK;
}

// Adds to the context's digest what h makes of DIGESTED rows, the same ones whatever
// a step's largest number of rows is: other sums differ in few of the values that
// bf16 leaves of them, so that one row would not tell.
static int32_t digest(const Check &k, const Choice &h) {
  XK_TRY(cudaMemsetAsync(k.count, 0, sizeof *k.count, k.c->stream));
  for (int number = 0, n; number < DIGESTED; number += n) {
    n = std::min(k.most, DIGESTED - number);
    k.fill(n, number);
    XK_OK_OR_RETURN(k.run(0, n, h, number));
    digest_kernel<<<512, 256, 0, k.c->stream>>>(static_cast<uint16_t *>(k.o.out), n * k.row() / 2, number * k.row() / 2, k.count);
  }
  unsigned long long sum;
  XK_TRY(cudaMemcpyAsync(&sum, k.count, sizeof sum, cudaMemcpyDeviceToHost, k.c->stream));
  XK_TRY(cudaStreamSynchronize(k.c->stream));
  k.c->buffers.bits = mix64(k.c->buffers.bits ^ sum);
  return XK_OK;
}

static int32_t choose_invariant(const Check &k, std::map<int, Choice> *out) {
  k.fill(k.most, 0);
  Choice first;
  XK_OK_OR_RETURN(reference(k, &first));
  int least = 1;
  for (int b : BUCKETS) {
    cublasLtMatmulHeuristicResult_t found[CANDIDATES];
    int n, most = std::min(b, k.most);
    XK_OK_OR_RETURN(heuristics(k.c, k.o, most, found, &n));
    Choice best = first, h;
    auto fits = [&] { return k.agrees(most, h) && k.agrees((least + most) / 2, h) && k.agrees(least, h); };
    h.own = takes_own(k.c, k.shape, most) && k.c->cfg.batch_invariant != 2;
    bool taken = h.own && fits();
    if (taken) best = h;
    h = first;
    for (int i = 0; i < n && !taken && !first.any; i++) { // none of a shape for which none is known to agree with itself
      h.algo = found[i].algo;
      taken = in_one_go(&h.algo) && fits();
      if (taken) best = h;
    }
    if (most == k.most) b = INT32_MAX;
    (*out)[b] = best;
    if (b == INT32_MAX) break;
    least = b + 1;
  }
  return digest(k, first);
}

static int32_t choose_all_invariant(xk_ctx *c, uint8_t *kept, int64_t bytes) {
  auto *count = reinterpret_cast<unsigned long long *>(kept + bytes);
  for (int s = 0; s < SHAPES; s++) {
    if (!chosen_here(c, s)) continue;
    Check k = {c, Shape(s), operands(c, Shape(s), 0), std::min(s == HEAD ? c->cfg.max_seqs : c->cfg.max_rows, MOST_CHECKED), kept, count};
    XK_OK_OR_RETURN(choose_invariant(k, &c->choices[s]));
  }
  return XK_OK;
}

static int32_t gemm_invariant(xk_ctx *c) {
  const xk_config &g = c->cfg;
  XK_OK_OR_RETURN(xk_gemm_any_init(c->type()));
  int64_t widest = std::max(int64_t(std::max(c->width, 2 * c->ff)) * int64_t(sizeof(element)), c->residual_row());
  int64_t bytes = round_up(std::max(std::min(g.max_rows, MOST_CHECKED) * widest, int64_t(g.max_seqs) * c->stride * int64_t(sizeof(float))), 256);
  uint8_t *kept; // only now: the pool is not there yet
  XK_TRY(cudaMalloc(&kept, bytes + 256));
  int32_t s = choose_all_invariant(c, kept, bytes);
  XK_TRY(cudaFree(kept));
  return s;
}

int32_t xk_gemm_tune(xk_ctx *c) {
  if (c->cfg.batch_invariant) return gemm_invariant(c);
  if (c->cfg.weights_fp8) XK_OK_OR_RETURN(xk_gemm8_tune(c));
  for (int s = 0; s < SHAPES; s++) {
    if (!chosen_here(c, s) || !c->choices[s].empty()) continue; // xk_choices_set
    XK_OK_OR_RETURN(each_bucket(c, s, [&](int rows) { return choose(c, Shape(s), rows, &c->choices[s][rows]); }));
  }
  return XK_OK;
}

int32_t xk_gemm_load(xk_ctx *c) {
  const Launch l = c->on_stream(false);
  for (int s = 0; s < SHAPES; s++) {
    if (c->cfg.experts && (s == GATE_UP || s == DOWN)) continue;
    int before = 0;
    XK_OK_OR_RETURN(each_bucket(c, s, [&](int rows) { // the least and the greatest number of rows that a choice serves
      for (int n : {before + 1, rows}) XK_OK_OR_RETURN(xk_project(c, l, Shape(s), 0, n));
      before = rows;
      return int32_t(XK_OK);
    }));
  }
  XK_TRY(cudaStreamSynchronize(c->stream));
  return XK_OK;
}

// The maps of what gemm_hopper.cu reads and writes.
static int32_t open_own(xk_ctx *c) {
  XK_OK_OR_RETURN(xk_gemm_hopper_init(c->type(), &c->gemm_ctas));
  c->gemm_ctas = std::min(c->gemm_ctas, c->sms / 2 * 2); // clusters of two
  XK_OK_OR_RETURN(xk_alloc(c, &c->gemm_work, 2, true));
  for (Shape s : {QKV, OUT, GATE_UP, DOWN}) {
    if (!chosen_here(c, s) || !has_own(c, s)) continue;
    Operands o = operands(c, s, 0);
    bool silu = o.epilogue == SILU;
    int wide = silu ? c->ff : o.n;
    XK_OK_OR_RETURN(xk_matrix_map(&c->reads[s], o.x, c->cfg.max_rows, o.k, o.k, false));
    XK_OK_OR_RETURN(xk_matrix_map(&c->writes[s], silu ? c->act : static_cast<element *>(o.out), c->cfg.max_rows, wide, wide, true));
    for (int i = 0; i < c->cfg.layers; i++) XK_OK_OR_RETURN(xk_matrix_map(&c->layers[i].maps[s], operands(c, s, i).w, o.n, o.k, o.k, false));
  }
  return XK_OK;
}

int32_t xk_gemm_open(xk_ctx *c) {
  LT_TRY(cublasLtCreate(&c->lt));
  LT_TRY(cublasLtMatmulDescCreate(&c->matmul, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  cublasOperation_t transposed = CUBLAS_OP_T;
  LT_TRY(cublasLtMatmulDescSetAttribute(c->matmul, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed));
  if (c->part) {
    const int32_t sms = c->sms;
    LT_TRY(cublasLtMatmulDescSetAttribute(c->matmul, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, &sms, sizeof sms));
  }
  uint8_t *w;
  XK_OK_OR_RETURN(xk_alloc(c, &w, int64_t(xk_ctx::WORKSPACE)));
  c->workspace = w;
  return c->hopper && !c->cfg.weights_fp8 ? open_own(c) : XK_OK;
}

void xk_gemm_close(xk_ctx *c) {
  for (cublasLtMatmulDesc_t d : {c->matmul, c->matmul8})
    if (d) cublasLtMatmulDescDestroy(d);
  if (c->lt) cublasLtDestroy(c->lt);
}
