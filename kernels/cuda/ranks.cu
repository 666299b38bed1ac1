// Ranks of a model in one process: the all-reduce over the partial sums of OUT and
// DOWN, with the residual's addition and the norm behind it, and the waits of ranks for
// each other. Bound by the link between the devices; few rows by the way there and back.
// Oracle: sums in order of the ranks on the host (ranks_test.go), and one rank's logits.
//
// A kernel that waits for other ranks holds a multiprocessor meanwhile. Where ranks share a
// device, those that they wait for must still find room, or nobody ever goes on:
//   - such kernels have few CTAs, of all ranks together at most half of the multiprocessors;
//   - they let the next kernel of their stream begin (PDL) only when they wait no more: its
//     CTAs would fill the device, waiting for this one;
//   - all other kernels need nothing but a place, and end by themselves.
// With a device for each rank, too, nothing that a launch needs may wait for a device: the
// driver loads code for one rank at a time, when that rank's device is idle, which then waits
// for a rank whose launch waits for the driver. So code is loaded before (xk_join asks for
// CUDA_MODULE_LOADING=EAGER, xk_gemm_load has cuBLASLt load its own), graphs are made before, by
// ranks that run one after the other (xk_ranks_abort), and steps allocate nothing.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "context.cuh"
#include "ranks_sum.cuh"

namespace {

__device__ __forceinline__ uint32_t load_acquire(const uint32_t *p) {
  uint32_t v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ uint32_t load_relaxed(const uint32_t *p) {
  uint32_t v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void store_release(uint32_t *p, uint32_t v) { asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
__device__ __forceinline__ uint64_t now_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

constexpr uint64_t TELL_NS = 100'000'000; // a wait of so long is told to the host
constexpr int POLLS = 64;                 // between two looks at the clock and the host's memory

// One thread waits for one rank. The host watches long waits, and ends them.
__device__ __forceinline__ void await(const Ranks &k, const Channel *own, int from, uint32_t met) {
  uint64_t began = 0;
  bool told = false;
  for (int polls = 0; int32_t(load_acquire(&own->arrived[from]) - met) < 0; polls++) {
    if (polls % POLLS != POLLS - 1) continue;
    if (load_relaxed(&k.host->abort)) break;
    const uint64_t now = now_ns();
    if (!began) began = now;
    if (blockIdx.x || now - began < TELL_NS) continue;
    store_relaxed(&k.host->waits[k.rank], uint64_t(met) << 8 | uint64_t(from + 1));
    told = true, began = now;
  }
  if (told) store_relaxed(&k.host->waits[k.rank], 0);
}

// How often a CTA has met; behind pdl_wait, as its last meeting may be close.
__device__ __forceinline__ uint32_t met_before(const Ranks &k, int channel) { return threadIdx.x < XK_RANKS ? load_relaxed(&k.channels[k.rank][channel].met) : 0; }

// This CTA and its counterparts of all ranks: what each, or a kernel before it, has written
// is seen behind it. met: of the threads below XK_RANKS.
__device__ __forceinline__ void meet(const Ranks &k, int channel, uint32_t &met) {
  __syncthreads();
  met++;
  const int other = threadIdx.x;
  if (other < k.ranks && other != k.rank) {
    store_release(&k.channels[other][channel].arrived[k.rank], met);
    await(k, &k.channels[k.rank][channel], other, met);
  }
  __syncthreads();
}
__device__ __forceinline__ void meet_end(const Ranks &k, int channel, uint32_t met) {
  if (threadIdx.x == 0) k.channels[k.rank][channel].met = met;
}

// RANKS: at least as many as there are. TWICE: each rank adds up its own rows, of groups of
// `ranks`, and the others read what it has made: the same bits, fewer bytes of more than two.
template <typename T, int RANKS, int KEEP, bool TWICE> __global__ __launch_bounds__(THREADS, 1) void reduce_kernel(const __grid_constant__ Reduce g) {
  __shared__ float sums[2][THREADS / 32];
  const Ranks &k = g.ranks;
  const int channel = blockIdx.x, n = g.hidden / 8;
  pdl_wait();
  uint32_t met = met_before(k, channel);
  if (k.apart) pdl_next();
  meet(k, channel, met);
  if (!k.apart && !TWICE) pdl_next();
  residual<T> *x = static_cast<residual<T> *>(g.x);
  Row<T, KEEP> row;
  int turn = 0;
  auto finish = [&](int64_t r) {
    if (g.w) row.norm(g.w, reinterpret_cast<uint4 *>(g.xn + r * g.hidden), g.hidden, g.eps, sums[turn++ % 2]);
  };
  auto put = [&](int64_t r) { return [=](int at, const Eight<T> &v) { reinterpret_cast<Eight<T> *>(x)[r * n + at] = v; }; };
  if constexpr (!TWICE) {
    Partials<T, RANKS> next[KEEP];
    auto load = [&](int r) {
#pragma unroll
      for (int i = 0; i < KEEP; i++) {
        const int at = threadIdx.x + i * THREADS;
        if (at < n) next[i].load(k, g.which, x, int64_t(r) * n + at);
      }
    };
    if (int(blockIdx.x) < g.rows) load(blockIdx.x);
    for (int r = blockIdx.x; r < g.rows; r += gridDim.x) {
      row.fill(n, [&](int i, int) { return next[i].sum(k); }, put(r));
      if (r + int(gridDim.x) < g.rows) load(r + gridDim.x); // while the norm's sums meet
      finish(r);
    }
  } else {
    for (int r = blockIdx.x * k.ranks + k.rank; r < g.rows; r += gridDim.x * k.ranks) {
      row.fill(n, [&](int, int at) {
        Partials<T, RANKS> p;
        p.load(k, g.which, x, int64_t(r) * n + at);
        return p.sum(k);
      }, [&](int at, const Eight<T> &v) {
        reinterpret_cast<Eight<T> *>(k.sent[k.rank])[int64_t(r) * n + at] = v;
        put(r)(at, v);
      });
      finish(r);
    }
    __threadfence_system();
    meet(k, channel, met);
    if (!k.apart) pdl_next();
    for (int group = blockIdx.x; group * k.ranks < g.rows; group += gridDim.x)
      for (int o = 1; o < k.ranks; o++) {
        const int owner = (k.rank + o) % k.ranks, r = group * k.ranks + owner;
        if (r >= g.rows) continue;
        row.fill(n, [&](int, int at) { return shared_eight<T>(k.sent[owner], int64_t(r) * n + at); }, put(r));
        finish(r);
      }
  }
  meet_end(k, channel, met);
}

// SUMS: what follows is NCCL's kernel, which ends only when all ranks have come to it, and tells nobody.
__global__ void meet_kernel(const __grid_constant__ Ranks k, int channel, uint32_t tell, uint32_t wait) {
  pdl_wait();
  uint32_t met = met_before(k, channel);
  if (k.apart) pdl_next();
  met++;
  const int other = threadIdx.x;
  __threadfence_system();
  if (other < k.ranks && other != k.rank) {
    if (tell >> k.rank & 1) store_release(&k.channels[other][channel].arrived[k.rank], met);
    if ((wait >> k.rank & 1) && (tell >> other & 1)) await(k, &k.channels[k.rank][channel], other, met);
  }
  __syncthreads();
  if (!k.apart) pdl_next();
  meet_end(k, channel, met);
  if (channel == Ranks::SUMS && threadIdx.x == 0) store_relaxed(&k.host->waits[k.rank], uint64_t(met) << 8 | XK_IN_NCCL);
}

__global__ void empty_kernel() {}

template <typename T, int RANKS, int KEEP, bool TWICE> int32_t start(const Launch &l, const Reduce &g) {
  const int items = TWICE ? div_up(g.rows, g.ranks.ranks) : g.rows;
  return launch(l, reduce_kernel<T, RANKS, KEEP, TWICE>, std::min(items, g.ranks.ctas), THREADS, 0, g);
}

// From so many bytes on rows are added up by one rank each, of more than two ranks: two move
// as much either way. And where a thread's registers would not hold what comes from all.
constexpr int64_t TWICE_FROM = 256 << 10;

template <typename T, int RANKS> int32_t by_width(const Launch &l, const Reduce &g) {
  const int n = div_up(g.hidden / 8, THREADS);
  const bool twice = RANKS > 2 && int64_t(g.rows) * g.hidden * int64_t(sizeof(residual<T>)) >= TWICE_FROM;
  constexpr bool wide = RANKS * int(sizeof(residual<T>)) > 16; // of 8 ranks, fp32
  if (n <= 1) return twice ? start<T, RANKS, 1, RANKS != 2>(l, g) : start<T, RANKS, 1, false>(l, g);
  if (n <= 2) return twice || wide ? start<T, RANKS, 2, RANKS != 2>(l, g) : start<T, RANKS, 2, wide>(l, g);
  if (n <= 4) return start<T, RANKS, 4, RANKS != 2>(l, g);
  return xk_fail(XK_INVALID, "ranks: hidden %d, at most %d", g.hidden, 4 * THREADS * 8);
}

int32_t reduce(const Launch &l, const Reduce &g) {
  return xk_each_type(l.type, [&](auto t) {
    using T = decltype(t);
    const int n = g.ranks.ranks;
    if (n == 2) return by_width<T, 2>(l, g);
    if (n <= 4) return by_width<T, 4>(l, g);
    return by_width<T, 8>(l, g);
  });
}

Reduce describe(xk_ctx *c, int which, const float *w, int rows) { return {c->ranks, which, c->x, w, c->xn, rows, c->cfg.hidden, c->cfg.norm_eps}; }

int32_t set(xk_ctx *c) {
  XK_TRY(cudaSetDevice(c->cfg.device));
  return XK_OK;
}

// Whether rank a's device can reach the memory of b's.
int32_t reaches(xk_ctx *a, xk_ctx *b, bool *can) {
  int yes = 1;
  if (a->cfg.device != b->cfg.device) XK_TRY(cudaDeviceCanAccessPeer(&yes, a->cfg.device, b->cfg.device));
  *can = yes;
  return XK_OK;
}

// Has rank a's device reach the memory of b's.
int32_t connect(xk_ctx *a, xk_ctx *b) {
  if (a->cfg.device == b->cfg.device) return XK_OK;
  XK_OK_OR_RETURN(set(a));
  cudaError_t e = cudaDeviceEnablePeerAccess(b->cfg.device, 0);
  if (e == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();
    return XK_OK;
  }
  XK_TRY(e);
  return XK_OK;
}

// How the ranks exchange what they compute: by their own kernels, or through NCCL where one device
// cannot reach another's memory, or if XPYD_CUDA_EXCHANGE says so. NCCL takes each device once.
int32_t choose(xk_ctx **ranks, int n, bool apart, bool *nccl) {
  const char *asked = getenv("XPYD_CUDA_EXCHANGE");
  *nccl = false;
  if (asked && *asked && strcmp(asked, "nccl")) return xk_fail(XK_INVALID, "XPYD_CUDA_EXCHANGE is %s: nccl, or nothing", asked);
  *nccl = apart && asked && *asked;
  for (int i = 0; i < n; i++)
    for (int j = 0; j < n; j++) {
      bool can;
      XK_OK_OR_RETURN(reaches(ranks[i], ranks[j], &can));
      if (!can && !apart)
        return xk_fail(XK_NO_PEER, "ranks %d and %d: device %d cannot reach the memory of device %d, and NCCL does not take ranks that share a device", i, j, ranks[i]->cfg.device, ranks[j]->cfg.device);
      if (!can) *nccl = true;
    }
  return XK_OK;
}

// Code that is loaded at its first launch would wait for kernels that wait for that launch.
int32_t check_loading() {
  CUresult (*mode)(CUmoduleLoadingMode *) = nullptr;
  XK_OK_OR_RETURN(xk_driver("cuModuleGetLoadingMode", &mode));
  CUmoduleLoadingMode m;
  if (mode(&m) != CUDA_SUCCESS || m != CU_MODULE_EAGER_LOADING)
    return xk_fail(XK_INVALID, "several ranks need CUDA_MODULE_LOADING=EAGER in the environment before the process first uses CUDA");
  return XK_OK;
}

} // namespace

int32_t xk_ranks_open(xk_ctx *c) {
  const xk_config &g = c->cfg;
  if (g.ranks == 1) return XK_OK;
  Channel *channels;
  XK_OK_OR_RETURN(xk_alloc(c, &channels, Ranks::CHANNELS, true));
  c->ranks.rank = g.rank, c->ranks.ranks = g.ranks;
  c->ranks.channels[g.rank] = channels;
  for (auto &sums : c->ranks.sums) {
    uint8_t *rows;
    XK_OK_OR_RETURN(xk_alloc(c, &rows, g.max_rows * c->residual_row(), true));
    sums[g.rank] = rows;
  }
  if (g.ranks == 2) return XK_OK;
  uint8_t *rows;
  XK_OK_OR_RETURN(xk_alloc(c, &rows, g.max_rows * c->residual_row(), true));
  c->ranks.sent[g.rank] = rows;
  return XK_OK;
}

int32_t xk_join(xk_ctx **ranks, int32_t n, int32_t *exchange) {
  *exchange = XK_BY_PEERS;
  if (n < 2 || n > XK_RANKS) return xk_fail(XK_INVALID, "%d ranks: 2 to %d", n, XK_RANKS);
  int most = 1; // ranks of one device
  for (int i = 0; i < n; i++) {
    const xk_config &g = ranks[i]->cfg, &o = ranks[0]->cfg;
    if (g.rank != i || g.ranks != n || g.hidden != o.hidden || g.max_rows != o.max_rows || g.max_seqs != o.max_seqs || g.fp16 != o.fp16 || g.kv_heads != o.kv_heads)
      return xk_fail(XK_INVALID, "rank %d of %d cannot join as rank %d of %d", g.rank, g.ranks, i, n);
    int same = 0;
    for (int j = 0; j < n; j++) same += ranks[j]->cfg.device == g.device;
    most = std::max(most, same);
  }
  XK_OK_OR_RETURN(check_loading());
  bool nccl;
  XK_OK_OR_RETURN(choose(ranks, n, most == 1, &nccl));
  for (int i = 0; i < n && !nccl; i++)
    for (int j = 0; j < n; j++) XK_OK_OR_RETURN(connect(ranks[i], ranks[j]));
  XK_OK_OR_RETURN(set(ranks[0]));
  RanksHost *host;
  XK_OK_OR_RETURN(xk_alloc_pinned(ranks[0], &host, 1));
  memset(host, 0, sizeof *host);
  int sms = ranks[0]->sms;
  for (int i = 1; i < n; i++) sms = std::min(sms, ranks[i]->sms);
  const int ctas = most == 1 ? Ranks::CTAS : std::max(1, std::min(Ranks::CTAS / 2, sms / (2 * most)));
  for (int i = 0; i < n; i++) {
    Ranks &k = ranks[i]->ranks;
    k.apart = most == 1, k.ctas = ctas, k.host = host;
    for (int j = 0; j < n; j++) {
      const Ranks &o = ranks[j]->ranks;
      k.channels[j] = o.channels[j], k.sums[0][j] = o.sums[0][j], k.sums[1][j] = o.sums[1][j], k.sent[j] = o.sent[j];
    }
    ranks[i]->lead = ranks[0];
    ranks[i]->drawn = ranks[0]->device_tokens;
    ranks[i]->head_out = ranks[0]->logits + ranks[i]->cfg.first_id;
  }
  if (!nccl) return XK_OK;
  *exchange = XK_BY_NCCL;
  return xk_exchange_open(ranks, n);
}

int32_t xk_ranks_watch(xk_ctx *c, uint64_t *waits) {
  if (!c->ranks.host) return xk_fail(XK_INVALID, "ranks that have not joined");
  for (int i = 0; i < XK_RANKS; i++) waits[i] = __atomic_load_n(&c->ranks.host->waits[i], __ATOMIC_RELAXED);
  return XK_OK;
}

int32_t xk_ranks_abort(xk_ctx *c, int32_t on) {
  if (c->ranks.host) __atomic_store_n(&c->ranks.host->abort, uint32_t(on), __ATOMIC_RELEASE);
  return XK_OK;
}

int32_t xk_ranks_drain(xk_ctx **ranks, int32_t n) {
  for (int i = 0; i < n; i++) {
    XK_OK_OR_RETURN(set(ranks[i]));
    XK_TRY(cudaDeviceSynchronize());
  }
  return XK_OK;
}

static void CUDART_CB stand(void *rank) {
  xk_ctx *c = static_cast<xk_ctx *>(rank);
  while (__atomic_load_n(&c->ranks.host->held, __ATOMIC_ACQUIRE) >> c->cfg.rank & 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

int32_t xk_ranks_hold(xk_ctx *c, int32_t on) {
  if (!c->ranks.host) return xk_fail(XK_INVALID, "a rank that has not joined");
  const uint32_t bit = 1u << c->cfg.rank;
  if (!on) {
    __atomic_and_fetch(&c->ranks.host->held, ~bit, __ATOMIC_RELEASE);
    return XK_OK;
  }
  __atomic_or_fetch(&c->ranks.host->held, bit, __ATOMIC_RELEASE);
  XK_OK_OR_RETURN(set(c));
  XK_TRY(cudaLaunchHostFunc(c->stream, stand, c));
  return XK_OK;
}

int32_t xk_reduce(xk_ctx *c, const Launch &l, int which, const float *w, int rows) {
  if (c->exchange) return xk_exchange_reduce(c, l, which, w, rows);
  return reduce(l, describe(c, which, w, rows));
}

int32_t xk_meet(xk_ctx *c, const Launch &l, int channel, uint32_t tell, uint32_t wait) { return launch(l, meet_kernel, 1, 32, 0, c->ranks, channel, tell, wait); }

// Has every rank find that the others have come to so many meetings more than itself, until they do.
static int32_t signal_all(xk_ctx **ranks, int n, uint32_t ahead) {
  std::vector<Channel> c(Ranks::CHANNELS);
  const size_t bytes = c.size() * sizeof(Channel);
  for (int i = 0; i < n; i++) {
    Channel *at = ranks[i]->ranks.channels[i];
    XK_OK_OR_RETURN(set(ranks[i]));
    XK_TRY(cudaMemcpy(c.data(), at, bytes, cudaMemcpyDefault));
    for (Channel &k : c)
      for (uint32_t &arrived : k.arrived) arrived = k.met + ahead;
    XK_TRY(cudaMemcpy(at, c.data(), bytes, cudaMemcpyDefault));
  }
  return XK_OK;
}

int32_t xk_reduce_test(xk_ctx **ranks, int32_t n, int32_t which, int32_t rows, int32_t signalled, const void *partial, void *x, void *xn) {
  if (!ranks[0]->ranks.host || n != ranks[0]->cfg.ranks || rows < 1 || rows > ranks[0]->cfg.max_rows || which < 0 || which > 1) return xk_fail(XK_INVALID, "reduce of %d rows by %d ranks", rows, n);
  const int64_t bytes = rows * ranks[0]->residual_row(), elements = int64_t(rows) * ranks[0]->cfg.hidden * int64_t(sizeof(element));
  XK_OK_OR_RETURN(xk_ranks_drain(ranks, n));
  uint32_t *abort = &ranks[0]->ranks.host->abort, was = __atomic_load_n(abort, __ATOMIC_RELAXED);
  if (signalled) __atomic_store_n(abort, uint32_t(XK_TOGETHER), __ATOMIC_RELEASE);
  auto run = [&]() -> int32_t {
    if (signalled) XK_OK_OR_RETURN(signal_all(ranks, n, 1 << 20));
    for (int i = 0; i < n; i++) {
      xk_ctx *c = ranks[i];
      XK_OK_OR_RETURN(set(c));
      XK_TRY(cudaMemcpy(c->ranks.sums[which][i], static_cast<const uint8_t *>(partial) + i * bytes, bytes, cudaMemcpyHostToDevice));
      XK_TRY(cudaMemcpy(c->x, static_cast<uint8_t *>(x) + i * bytes, bytes, cudaMemcpyHostToDevice));
    }
    for (int i = 0; i < n; i++) {
      XK_OK_OR_RETURN(set(ranks[i]));
      XK_OK_OR_RETURN(xk_reduce(ranks[i], ranks[i]->on_stream(false), which, ranks[i]->layers[0].mlp_norm, rows));
      if (signalled) XK_OK_OR_RETURN(xk_ranks_drain(ranks, n));
    }
    return xk_ranks_drain(ranks, n);
  };
  int32_t s = run();
  if (s == XK_OK && signalled) s = run(); // what the first ranks have read of the last ones' sums was not there yet
  if (s == XK_OK && signalled) s = signal_all(ranks, n, 0);
  __atomic_store_n(abort, was, __ATOMIC_RELEASE);
  XK_OK_OR_RETURN(s);
  for (int i = 0; i < n; i++) {
    XK_OK_OR_RETURN(set(ranks[i]));
    XK_TRY(cudaMemcpy(static_cast<uint8_t *>(x) + i * bytes, ranks[i]->x, bytes, cudaMemcpyDeviceToHost));
    XK_TRY(cudaMemcpy(static_cast<uint8_t *>(xn) + i * elements, ranks[i]->xn, elements, cudaMemcpyDeviceToHost));
  }
  return XK_OK;
}

// The graphs of a benchmark, and the events around them.
struct Bench {
  std::vector<cudaGraphExec_t> graphs;
  cudaEvent_t began = nullptr, ended = nullptr;
  ~Bench() {
    for (cudaGraphExec_t g : graphs)
      if (g) cudaGraphExecDestroy(g);
    if (began) cudaEventDestroy(began);
    if (ended) cudaEventDestroy(ended);
  }
};

static int32_t bench(Bench &b, xk_ctx **ranks, int n, int rows, int calls, int runs, int what, double *us) {
  for (int i = 0; i < n; i++) {
    xk_ctx *c = ranks[i];
    XK_OK_OR_RETURN(set(c));
    XK_TRY(cudaStreamBeginCapture(c->stream, cudaStreamCaptureModeThreadLocal));
    const Launch l = c->on_stream(false);
    int32_t s = XK_OK;
    for (int k = 0; k < calls && s == XK_OK; k++) {
      if (what == XK_REDUCE) s = xk_reduce(c, l, k % 2, nullptr, rows);
      else if (what == XK_EMPTY) s = launch(l, empty_kernel, 1, 32, 0);
      else if (c->exchange) s = xk_exchange_rows(c, l, rows);
      else if (cudaMemcpyAsync(c->ranks.sums[1][i], c->ranks.sums[0][(i + 1) % n], rows * c->residual_row(), cudaMemcpyDefault, c->stream) != cudaSuccess) s = xk_fail(XK_CUDA, "copy of another rank's rows");
    }
    cudaGraph_t graph = nullptr;
    cudaError_t e = cudaStreamEndCapture(c->stream, &graph);
    cudaGraphExec_t exec = nullptr;
    if (s == XK_OK && e == cudaSuccess) e = cudaGraphInstantiate(&exec, graph, 0);
    if (graph) cudaGraphDestroy(graph);
    b.graphs.push_back(exec);
    XK_OK_OR_RETURN(s);
    XK_TRY(e);
    XK_TRY(cudaGraphUpload(exec, c->stream));
  }
  XK_OK_OR_RETURN(xk_ranks_drain(ranks, n));
  XK_OK_OR_RETURN(set(ranks[0]));
  XK_TRY(cudaEventCreate(&b.began));
  XK_TRY(cudaEventCreate(&b.ended));
  for (int run = 0; run < runs; run++) {
    for (int i = n - 1; i >= 0; i--) { // rank 0, whose time it is, comes last
      XK_OK_OR_RETURN(set(ranks[i]));
      if (i == 0) XK_TRY(cudaEventRecord(b.began, ranks[0]->stream));
      XK_TRY(cudaGraphLaunch(b.graphs[i], ranks[i]->stream));
    }
    XK_TRY(cudaEventRecord(b.ended, ranks[0]->stream));
    XK_OK_OR_RETURN(xk_ranks_drain(ranks, n));
    float ms;
    XK_TRY(cudaEventElapsedTime(&ms, b.began, b.ended));
    us[run] = double(ms) * 1000 / calls;
  }
  return XK_OK;
}

int32_t xk_reduce_bench(xk_ctx **ranks, int32_t n, int32_t rows, int32_t calls, int32_t runs, int32_t what, double *us) {
  if (!ranks[0]->ranks.host || n != ranks[0]->cfg.ranks || rows < 1 || rows > ranks[0]->cfg.max_rows || calls < 2 || calls % 2 || runs < 1 || what < XK_REDUCE || what > XK_COPY_ROWS) return xk_fail(XK_INVALID, "reduce of %d rows, %d times", rows, calls);
  Bench b;
  return bench(b, ranks, n, rows, calls, runs, what, us);
}
