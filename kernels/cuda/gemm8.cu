// Projections with FP8 weights: the skinny kernel with bf16 activations up to 16
// rows; above, activations are rounded to FP8 as well, a scale a row, and cuBLASLt
// multiplies E4M3 by E4M3 with a scale a row and a scale a channel ("outer vector").
// The head stays bf16: gemm.cu has it.
#include <algorithm>

#include "context.cuh"

static const int BUCKETS[] = {32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384};
static constexpr int SKINNY = 16;      // rows
static constexpr int GATE_ROWS = 2048; // of gate_up at a time, before SiLU

#define LT_TRY(call)                                                                                          \
  do {                                                                                                        \
    cublasStatus_t s_ = (call);                                                                               \
    if (s_ != CUBLAS_STATUS_SUCCESS) return xk_fail(XK_CUBLAS, "%s: status %d (%s:%d)", #call, int(s_), __FILE__, __LINE__); \
  } while (0)

namespace {

struct Operands8 {
  Matrix8 w;
  const element *x;
  void *out;
  int n, k;
  float beta;
  Epilogue epilogue; // of the skinny kernel
};

Operands8 operands(xk_ctx *c, Shape s, int layer) {
  const xk_config &g = c->cfg;
  const Layer &l = c->layers[layer];
  const float beta = c->alone() ? 1 : 0;
  const Epilogue adds = c->alone() ? ADD : STORE;
  switch (s) {
  case QKV: return {l.qkv8, c->xn, c->qkv, c->width, g.hidden, 0, STORE};
  case OUT: return {l.o8, c->att, c->sums(false), g.hidden, g.heads * g.head_dim, beta, adds};
  case GATE_UP: return {l.gate_up8, c->xn, c->gu, 2 * c->ff, g.hidden, 0, SILU};
  default: return {l.down8, c->act, c->sums(true), g.hidden, c->ff, beta, adds};
  }
}

struct Layouts {
  cublasLtMatrixLayoutOpaque_t a, b, d;
  int32_t init(const Operands8 &o, int rows) {
    LT_TRY(cublasLtMatrixLayoutInit(&a, CUDA_R_8F_E4M3, o.k, o.n, o.k));
    LT_TRY(cublasLtMatrixLayoutInit(&b, CUDA_R_8F_E4M3, o.k, rows, o.k));
    LT_TRY(cublasLtMatrixLayoutInit(&d, CUDA_R_16BF, o.n, rows, o.n));
    return XK_OK;
  }
};

int32_t set_scales(xk_ctx *c, const Operands8 &o, const float *x) {
  const float *w = o.w.scale;
  LT_TRY(cublasLtMatmulDescSetAttribute(c->matmul8, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &w, sizeof w));
  LT_TRY(cublasLtMatmulDescSetAttribute(c->matmul8, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &x, sizeof x));
  return XK_OK;
}

// cuBLASLt's first choice for so many rows.
int32_t choose(xk_ctx *c, const Operands8 &o, int rows, Choice *out) {
  Layouts t;
  XK_OK_OR_RETURN(t.init(o, rows));
  XK_OK_OR_RETURN(set_scales(c, o, c->x8_scale)); // the scales' pointers are part of what is asked for
  cublasLtMatmulPreference_t want;
  LT_TRY(cublasLtMatmulPreferenceCreate(&want));
  size_t limit = xk_ctx::WORKSPACE;
  cublasLtMatmulPreferenceSetAttribute(want, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &limit, sizeof limit);
  cublasLtMatmulHeuristicResult_t found;
  int n = 0;
  cublasStatus_t s = cublasLtMatmulAlgoGetHeuristic(c->lt, c->matmul8, &t.a, &t.b, &t.d, &t.d, want, 1, &found, &n);
  cublasLtMatmulPreferenceDestroy(want);
  if (s != CUBLAS_STATUS_SUCCESS || n == 0)
    return xk_fail(XK_CUBLAS, "FP8 weights: this cuBLASLt has no multiplication of %d x %d x %d with a scale a row (status %d)", o.n, rows, o.k, int(s));
  out->algo_known = true, out->algo = found.algo;
  return XK_OK;
}

// Rows from .. from+rows-1 of x8 times the weights, to the beginning of out.
int32_t multiply(xk_ctx *c, const Launch &l, Shape s, const Operands8 &o, int from, int rows) {
  Layouts t;
  XK_OK_OR_RETURN(t.init(o, rows));
  XK_OK_OR_RETURN(set_scales(c, o, c->x8_scale + from));
  auto it = c->choices8[s].lower_bound(rows);
  const cublasLtMatmulAlgo_t *algo = it == c->choices8[s].end() ? nullptr : &it->second.algo;
  const uint8_t *x = c->x8 + int64_t(from) * o.k;
  float one = 1;
  auto run = [&](const cublasLtMatmulAlgo_t *a) {
    return cublasLtMatmul(c->lt, c->matmul8, &one, o.w.data, &t.a, x, &t.b, &o.beta, o.out, &t.d, o.out, &t.d, a, c->workspace, xk_ctx::WORKSPACE, l.stream);
  };
  cublasStatus_t e = run(algo);
  if (e != CUBLAS_STATUS_SUCCESS && algo) e = run(nullptr); // not for this row count
  return e == CUBLAS_STATUS_SUCCESS ? XK_OK : xk_fail(XK_CUBLAS, "cublasLtMatmul in FP8 of %d x %d x %d: status %d", o.n, rows, o.k, int(e));
}

} // namespace

int32_t xk_project8(xk_ctx *c, const Launch &l, Shape s, int layer, int rows) {
  Operands8 o = operands(c, s, layer);
  if (rows <= SKINNY) {
    bool gated = s == GATE_UP;
    return xk_skinny8(l, o.epilogue, o.w, o.x, o.k, gated ? c->act : o.out, gated ? c->ff : o.n, rows, o.n, o.k);
  }
  XK_OK_OR_RETURN(xk_quantise(l, o.x, c->x8, c->x8_scale, rows, o.k));
  if (s != GATE_UP) return multiply(c, l, s, o, 0, rows);
  for (int from = 0; from < rows; from += GATE_ROWS) {
    const int n = std::min(GATE_ROWS, rows - from);
    XK_OK_OR_RETURN(multiply(c, l, s, o, from, n));
    XK_OK_OR_RETURN(xk_silu(l, c->gu, c->act + int64_t(from) * c->ff, n, c->ff));
  }
  return XK_OK;
}

int32_t xk_gemm8_tune(xk_ctx *c) {
  LT_TRY(cublasLtMatmulDescCreate(&c->matmul8, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  cublasOperation_t transposed = CUBLAS_OP_T;
  int32_t vector = CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
  int8_t fast = 1; // sums of 128 products lose some bits, which FP8's own rounding hides: 8 % faster
  LT_TRY(cublasLtMatmulDescSetAttribute(c->matmul8, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed));
  LT_TRY(cublasLtMatmulDescSetAttribute(c->matmul8, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &vector, sizeof vector));
  LT_TRY(cublasLtMatmulDescSetAttribute(c->matmul8, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &vector, sizeof vector));
  LT_TRY(cublasLtMatmulDescSetAttribute(c->matmul8, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, sizeof fast));
  if (c->cfg.max_rows <= SKINNY) return XK_OK;
  for (int s = 0; s < HEAD; s++) {
    if (c->cfg.experts && (s == GATE_UP || s == DOWN)) continue; // mixture8.cu
    int done = 0;
    for (int b : BUCKETS) {
      if (done >= c->cfg.max_rows) break;
      done = std::min(b, c->cfg.max_rows);
      XK_OK_OR_RETURN(choose(c, operands(c, Shape(s), 0), done, &c->choices8[s][done]));
    }
  }
  return XK_OK;
}
