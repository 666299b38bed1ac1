// Projections: the skinny kernel up to 16 rows, cuBLASLt with its first
// heuristic above: a choice that is the same in every process. With cfg.tune,
// each (shape, rows) is chosen at start by timing more heuristics and the
// skinny kernel over different layers' weights, so that none finds them in L2.
// Weights are [N][K], activations [rows][K], results [rows][N], all row-major:
// for cuBLASLt's columns that is N x rows = W^T x X.
#include <algorithm>

#include "context.cuh"

static const int BUCKETS[] = {1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384};
static constexpr int CANDIDATES = 8;

#define LT_TRY(call)                                                                                          \
  do {                                                                                                        \
    cublasStatus_t s_ = (call);                                                                               \
    if (s_ != CUBLAS_STATUS_SUCCESS) return xk_fail(XK_CUBLAS, "%s: status %d (%s:%d)", #call, int(s_), __FILE__, __LINE__); \
  } while (0)

struct Operands {
  const bf16 *w, *x;
  void *out;
  int n, k, out_stride;
  float beta;
  Epilogue epilogue; // of the skinny kernel
  cudaDataType_t type;
};

static Operands operands(xk_ctx *c, Shape s, int layer) {
  const xk_config &g = c->cfg;
  const Layer *l = s == HEAD ? nullptr : &c->layers[layer];
  switch (s) {
  case QKV: return {l->qkv, c->xn, c->qkv, c->width, g.hidden, c->width, 0, STORE_BF16, CUDA_R_16BF};
  case OUT: return {l->o, c->att, c->x, g.hidden, g.heads * g.head_dim, g.hidden, 1, ADD_BF16, CUDA_R_16BF};
  case GATE_UP: return {l->gate_up, c->xn, c->gu, 2 * c->ff, g.hidden, 2 * c->ff, 0, SILU_BF16, CUDA_R_16BF};
  case DOWN: return {l->down, c->act, c->x, g.hidden, c->ff, g.hidden, 1, ADD_BF16, CUDA_R_16BF};
  default: return {c->head, c->last, c->logits, g.vocab, g.hidden, c->stride, 0, STORE_F32, CUDA_R_32F};
  }
}

struct Layouts {
  cublasLtMatrixLayoutOpaque_t a, b, d;
  int32_t init(const Operands &o, int rows) {
    LT_TRY(cublasLtMatrixLayoutInit(&a, CUDA_R_16BF, o.k, o.n, o.k));
    LT_TRY(cublasLtMatrixLayoutInit(&b, CUDA_R_16BF, o.k, rows, o.k));
    LT_TRY(cublasLtMatrixLayoutInit(&d, o.type, o.n, rows, o.out_stride));
    return XK_OK;
  }
};

static int32_t matmul(xk_ctx *c, const Launch &l, const Operands &o, int rows, const cublasLtMatmulAlgo_t *algo) {
  Layouts t;
  XK_OK_OR_RETURN(t.init(o, rows));
  float one = 1;
  cublasStatus_t s = cublasLtMatmul(c->lt, c->matmul, &one, o.w, &t.a, o.x, &t.b, &o.beta, o.out, &t.d, o.out, &t.d, algo, c->workspace, xk_ctx::WORKSPACE, l.stream);
  if (s != CUBLAS_STATUS_SUCCESS && algo) return matmul(c, l, o, rows, nullptr); // not for this row count
  if (s != CUBLAS_STATUS_SUCCESS) return xk_fail(XK_CUBLAS, "cublasLtMatmul of %d x %d x %d: status %d", o.n, rows, o.k, int(s));
  return XK_OK;
}

static int32_t run(xk_ctx *c, const Launch &l, Shape s, int layer, int rows, const Choice &h) {
  Operands o = operands(c, s, layer);
  if (h.skinny) {
    void *out = s == GATE_UP ? c->act : o.out;
    return xk_skinny(l, o.epilogue, o.w, o.x, o.k, out, s == GATE_UP ? c->ff : o.out_stride, rows, o.n, o.k);
  }
  XK_OK_OR_RETURN(matmul(c, l, o, rows, h.algo_known ? &h.algo : nullptr));
  return s == GATE_UP ? xk_silu(l, c->gu, c->act, rows, c->ff) : XK_OK;
}

int32_t xk_project(xk_ctx *c, const Launch &l, Shape s, int layer, int rows) {
  static const Choice none{};
  auto it = c->choices[s].lower_bound(rows);
  return run(c, l, s, layer, rows, it == c->choices[s].end() ? none : it->second);
}

// Milliseconds of one run: the least of a few, each on another layer.
static int32_t measure(xk_ctx *c, Shape s, int rows, const Choice &h, float *ms) {
  Launch l = {c->stream, false};
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

static int32_t choose(xk_ctx *c, Shape s, int rows, Choice *best) {
  Operands o = operands(c, s, 0);
  Layouts t;
  XK_OK_OR_RETURN(t.init(o, rows));
  cublasLtMatmulPreference_t want;
  LT_TRY(cublasLtMatmulPreferenceCreate(&want));
  size_t workspace = xk_ctx::WORKSPACE;
  cublasLtMatmulHeuristicResult_t found[CANDIDATES];
  int n = 0;
  cublasLtMatmulPreferenceSetAttribute(want, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace);
  cublasStatus_t st = cublasLtMatmulAlgoGetHeuristic(c->lt, c->matmul, &t.a, &t.b, &t.d, &t.d, want, CANDIDATES, found, &n);
  cublasLtMatmulPreferenceDestroy(want);
  if (st != CUBLAS_STATUS_SUCCESS) n = 0; // cublasLtMatmul's own default then
  if (!c->cfg.tune) {
    best->skinny = rows <= 16, best->algo_known = n > 0;
    if (n > 0) best->algo = found[0].algo;
    return XK_OK;
  }
  float least = 1e30f, ms;
  for (int i = 0; i < n; i++) {
    Choice h;
    h.algo_known = true;
    h.algo = found[i].algo;
    XK_OK_OR_RETURN(measure(c, s, rows, h, &ms));
    if (ms < least) least = ms, *best = h;
  }
  if (rows <= 32 && o.k % 8 == 0) {
    Choice h;
    h.skinny = true;
    XK_OK_OR_RETURN(measure(c, s, rows, h, &ms));
    if (ms < least || rows <= 8) *best = h;
  }
  return XK_OK;
}

int32_t xk_gemm_tune(xk_ctx *c) {
  for (int s = 0; s < SHAPES; s++) {
    int most = s == HEAD ? c->cfg.max_seqs : c->cfg.max_rows, done = 0;
    for (int b : BUCKETS) {
      if (done >= most) break;
      done = std::min(b, most);
      Choice best;
      XK_OK_OR_RETURN(choose(c, Shape(s), done, &best));
      c->choices[s][done] = best;
    }
  }
  return XK_OK;
}

int32_t xk_gemm_open(xk_ctx *c) {
  LT_TRY(cublasLtCreate(&c->lt));
  LT_TRY(cublasLtMatmulDescCreate(&c->matmul, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  cublasOperation_t transposed = CUBLAS_OP_T;
  LT_TRY(cublasLtMatmulDescSetAttribute(c->matmul, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed));
  uint8_t *w;
  XK_OK_OR_RETURN(xk_alloc(c, &w, int64_t(xk_ctx::WORKSPACE)));
  c->workspace = w;
  return XK_OK;
}

void xk_gemm_close(xk_ctx *c) {
  if (c->matmul) cublasLtMatmulDescDestroy(c->matmul);
  if (c->lt) cublasLtDestroy(c->lt);
}
