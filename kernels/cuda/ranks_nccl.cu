// The exchange of ranks through NCCL, where a device cannot reach another's memory: each rank
// gathers the partial rows of all and adds them up as ranks.cu does, to the same bits. NCCL moves
// bytes and adds nothing. Small things go through the host's memory: barriers, drawn tokens, logits.
// Bound by what NCCL reaches without peer access. Oracle: ranks.cu's (ranks_test.go).
//
// NCCL's kernels are part of the graph, but neither end by xk_ranks_abort nor tell what they wait
// for. So all ranks meet before each (Ranks::SUMS), by kernels of ours which do both; and from then
// until it has ended a rank's word for the host says XK_IN_NCCL. Ranks that run one after the other
// make graphs and leave NCCL's kernels out (xk_exchange_serial). xk_ranks_end ends those that hang.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>

#include "context.cuh"
#include "nccl.cuh"
#include "ranks_sum.cuh"

struct Exchange {
  const Nccl *n = nullptr;
  void *comm = nullptr;   // null: ended
  int chunk = 0;          // rows that are gathered at a time
  uint8_t *all = nullptr; // [ranks][rows of a chunk], of the residual stream's type
  uint32_t *tokens = nullptr; // in the host's memory, as are all ranks' logits
  float *logits = nullptr;
};

namespace {

constexpr int64_t CHUNK = 16 << 20; // bytes of a rank's rows

template <typename T, int RANKS, int KEEP> __global__ __launch_bounds__(THREADS, 1) void gathered_kernel(const __grid_constant__ Reduce g) {
  __shared__ float sums[2][THREADS / 32];
  const Ranks &k = g.ranks;
  const int n = g.hidden / 8;
  pdl_wait();
  if (blockIdx.x == 0 && threadIdx.x == 0) store_relaxed(&k.host->waits[k.rank], 0);
  residual<T> *x = static_cast<residual<T> *>(g.x);
  Row<T, KEEP> row;
  int turn = 0;
  for (int64_t r = blockIdx.x; r < g.rows; r += gridDim.x) {
    row.fill(n, [&](int, int at) {
      Partials<T, RANKS> p;
      p.load(k, g.which, x, r * n + at);
      return p.sum(k);
    }, [&](int at, const Eight<T> &v) { reinterpret_cast<Eight<T> *>(x)[r * n + at] = v; });
    if (g.w) row.norm(g.w, reinterpret_cast<uint4 *>(g.xn + r * g.hidden), g.hidden, g.eps, sums[turn++ % 2]);
  }
}

// Rows of 32-bit values, between device and host.
__global__ void copy_kernel(uint32_t *to, const uint32_t *from, int cols, int64_t stride) {
  pdl_wait();
  const int64_t row = blockIdx.y * stride;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < cols; i += gridDim.x * blockDim.x) to[row + i] = from[row + i];
}

int32_t copy(const Launch &l, void *to, const void *from, int rows, int cols, int64_t stride) {
  const Launch behind = {l.stream, false, l.type};
  return launch(behind, copy_kernel, dim3(std::min(div_up(cols, 1024), 64), rows), 256, 0, static_cast<uint32_t *>(to), static_cast<const uint32_t *>(from), cols, stride);
}

template <typename T, int RANKS> int32_t by_width(const Launch &l, const Reduce &g, int sms) {
  const int n = div_up(g.hidden / 8, THREADS), ctas = std::min(g.rows, 2 * sms);
  if (n <= 1) return launch(l, gathered_kernel<T, RANKS, 1>, ctas, THREADS, 0, g);
  if (n <= 2) return launch(l, gathered_kernel<T, RANKS, 2>, ctas, THREADS, 0, g);
  if (n <= 4) return launch(l, gathered_kernel<T, RANKS, 4>, ctas, THREADS, 0, g);
  return xk_fail(XK_INVALID, "ranks: hidden %d, at most %d", g.hidden, 4 * THREADS * 8);
}

int32_t add_up(const Launch &l, const Reduce &g, int sms) {
  return xk_each_type(l.type, [&](auto t) {
    using T = decltype(t);
    const int n = g.ranks.ranks;
    if (n == 2) return by_width<T, 2>(l, g, sms);
    if (n <= 4) return by_width<T, 4>(l, g, sms);
    return by_width<T, 8>(l, g, sms);
  });
}

int32_t failed(const Nccl *n, const char *what, int r) { return xk_fail(XK_CUDA, "%s: %s", what, n->GetErrorString(r)); }

// What the host's memory has for all ranks, and each rank's buffers.
int32_t buffers(xk_ctx **ranks, int n, const Nccl *lib) {
  const xk_config &g = ranks[0]->cfg;
  Channel *channels;
  uint32_t *tokens;
  float *logits;
  XK_TRY(cudaSetDevice(g.device));
  XK_OK_OR_RETURN(xk_alloc_pinned(ranks[0], &channels, int64_t(n) * Ranks::CHANNELS));
  XK_OK_OR_RETURN(xk_alloc_pinned(ranks[0], &tokens, ranks[0]->buffers.max_samples));
  XK_OK_OR_RETURN(xk_alloc_pinned(ranks[0], &logits, int64_t(g.max_seqs) * ranks[0]->stride));
  memset(channels, 0, n * Ranks::CHANNELS * sizeof *channels);
  memset(tokens, 0, ranks[0]->buffers.max_samples * sizeof *tokens);
  for (int i = 0; i < n; i++) {
    xk_ctx *c = ranks[i];
    XK_TRY(cudaSetDevice(c->cfg.device));
    Exchange *e = c->exchange = new Exchange; // xk_close deletes it
    e->n = lib, e->tokens = tokens, e->logits = logits;
    e->chunk = int(std::clamp<int64_t>(CHUNK / c->residual_row(), 1, g.max_rows));
    XK_OK_OR_RETURN(xk_alloc(c, &e->all, n * e->chunk * c->residual_row()));
    for (int j = 0; j < n; j++) c->ranks.channels[j] = channels + j * Ranks::CHANNELS;
    if (!i) continue;
    XK_OK_OR_RETURN(xk_alloc(c, &c->head_out, int64_t(g.max_seqs + 1) * c->stride, true)); // as rank 0's logits
    c->drawn = reinterpret_cast<int32_t *>(tokens);
  }
  return XK_OK;
}

// All ranks at once, as one thread has to.
template <typename F> int32_t together(xk_ctx **ranks, int n, const char *what, F f) {
  const Nccl *lib = ranks[0]->exchange->n;
  int r = lib->GroupStart();
  for (int i = 0; i < n && !r; i++) {
    XK_TRY(cudaSetDevice(ranks[i]->cfg.device));
    r = f(ranks[i]);
  }
  const int end = lib->GroupEnd();
  return r || end ? failed(lib, what, r ? r : end) : XK_OK;
}

constexpr std::chrono::seconds FIRST(20); // for the first gathering, which connects the ranks

// Gathers once, so that later calls, each by a rank alone, find all connections made.
int32_t warm(xk_ctx **ranks, int n) {
  for (int rows : {1, ranks[0]->exchange->chunk})
    XK_OK_OR_RETURN(together(ranks, n, "ncclAllGather", [&](xk_ctx *c) {
      return c->exchange->n->AllGather(c->ranks.sums[0][c->cfg.rank], c->exchange->all, rows * c->residual_row(), NCCL_BYTES, c->exchange->comm, c->stream);
    }));
  const auto until = std::chrono::steady_clock::now() + FIRST;
  for (int i = 0; i < n; i++) {
    XK_TRY(cudaSetDevice(ranks[i]->cfg.device));
    for (cudaError_t e; (e = cudaStreamQuery(ranks[i]->stream)) != cudaSuccess; std::this_thread::sleep_for(std::chrono::milliseconds(1))) {
      if (e != cudaErrorNotReady) return xk_fail(XK_CUDA, "ncclAllGather of rank %d: %s", i, cudaGetErrorString(e));
      if (std::chrono::steady_clock::now() > until) return xk_fail(XK_CUDA, "ncclAllGather: rank %d has not done after %d s", i, int(FIRST.count()));
    }
  }
  return XK_OK;
}

// All ranks' partial rows [first, first + n), to this one.
int32_t gather(xk_ctx *c, cudaStream_t s, int which, int first, int n) {
  const Exchange &e = *c->exchange;
  const int64_t row = c->residual_row();
  const int r = e.n->AllGather(static_cast<uint8_t *>(c->ranks.sums[which][c->cfg.rank]) + first * row, e.all, n * row, NCCL_BYTES, e.comm, s);
  return r ? failed(e.n, "ncclAllGather", r) : XK_OK;
}

bool captured(cudaStream_t s) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(s, &status) == cudaSuccess && status != cudaStreamCaptureStatusNone;
}

} // namespace

int32_t xk_exchange_open(xk_ctx **ranks, int n) {
  const Nccl *lib;
  NcclId id;
  if (xk_nccl(&lib) != XK_OK) {
    const std::string why = xk_last_error();
    return xk_fail(XK_NO_PEER, "the ranks' devices do not reach each other's memory, and not through NCCL either: %s", why.c_str());
  }
  XK_OK_OR_RETURN(buffers(ranks, n, lib));
  if (int r = lib->GetUniqueId(&id)) return failed(lib, "ncclGetUniqueId", r);
  NcclOptions options(true, INT_MIN);
  XK_OK_OR_RETURN(together(ranks, n, "ncclCommInitRankConfig", [&](xk_ctx *c) { return lib->CommInitRankConfig(&c->exchange->comm, n, id, c->cfg.rank, &options); }));
  return warm(ranks, n);
}

bool xk_exchange_serial(xk_ctx *c) { return __atomic_load_n(&c->ranks.host->abort, __ATOMIC_RELAXED) == XK_SERIAL; }

int32_t xk_exchange_reduce(xk_ctx *c, const Launch &l, int which, const float *w, int rows) {
  const Exchange &e = *c->exchange;
  const Launch behind = {l.stream, false, l.type}; // NCCL's kernels let none begin early
  const bool gathers = captured(l.stream) || !xk_exchange_serial(c);
  const int64_t row = c->residual_row();
  if (!e.comm) return xk_fail(XK_INVALID, "the ranks' exchange has ended");
  for (int first = 0; first < rows; first += e.chunk) {
    const int n = std::min(rows - first, e.chunk);
    XK_OK_OR_RETURN(xk_meet(c, l, Ranks::SUMS, ~0u, ~0u));
    if (gathers) XK_OK_OR_RETURN(gather(c, l.stream, which, first, n));
    Reduce g = {c->ranks, which, c->residual_at(first), w, c->xn + int64_t(first) * c->cfg.hidden, n, c->cfg.hidden, c->cfg.norm_eps};
    for (int i = 0; i < c->cfg.ranks; i++) g.ranks.sums[which][i] = e.all + i * n * row;
    XK_OK_OR_RETURN(add_up(behind, g, c->sms));
  }
  return XK_OK;
}

int32_t xk_exchange_rows(xk_ctx *c, const Launch &l, int rows) {
  for (int first = 0; first < rows; first += c->exchange->chunk) XK_OK_OR_RETURN(gather(c, l.stream, 0, first, std::min(rows - first, c->exchange->chunk)));
  return XK_OK;
}

int32_t xk_exchange_tokens(xk_ctx *c, const Launch &l) { return copy(l, c->exchange->tokens, c->device_tokens, 1, c->buffers.max_samples, 0); }

int32_t xk_exchange_logits(xk_ctx *c, const Launch &l, int rows) { return copy(l, c->exchange->logits + c->cfg.first_id, c->head_out, rows, c->cfg.ids, c->stride); }

int32_t xk_exchange_all_logits(xk_ctx *c, const Launch &l, int rows) {
  const int own = c->cfg.ids;
  return copy(l, c->logits + own, c->exchange->logits + own, rows, c->cfg.vocab - own, c->stride);
}

// Graphs go first: NCCL keeps what they refer to until the last one is gone.
int32_t xk_ranks_end(xk_ctx **ranks, int32_t n) {
  if (!ranks[0]->exchange) return XK_OK;
  for (int i = 0; i < n; i++) {
    XK_TRY(cudaSetDevice(ranks[i]->cfg.device));
    for (auto *graphs : {&ranks[i]->graphs, &ranks[i]->held_graphs}) {
      for (auto &g : *graphs)
        if (g.second.exec) cudaGraphExecDestroy(g.second.exec);
      graphs->clear();
    }
  }
  return together(ranks, n, "ncclCommAbort", [](xk_ctx *c) {
    Exchange *e = c->exchange; // null: it was not opened to its end
    void *comm = e ? e->comm : nullptr;
    if (comm) e->comm = nullptr;
    return comm ? e->n->CommAbort(comm) : 0;
  });
}

void xk_exchange_close(xk_ctx *c) {
  delete c->exchange;
  c->exchange = nullptr;
}
