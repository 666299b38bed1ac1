// Links between devices of two processes, by NCCL: a communicator of two ranks that
// never blocks, and a ring of device memory. NCCL is opened at run time; without it
// there are no links. Only its plain send and receive are used.
//
// A communicator that does not block answers "in progress" to every call; what it
// was asked for is on the stream when it says so no more. That costs some 50 us a
// transfer and no hang, whatever the peer does: an abort ends the kernels.
#include <dlfcn.h>
#include <limits.h>
#include <time.h>

#include <cstdlib>
#include <cstring>
#include <mutex>

#include "move.cuh"

namespace {

// NCCL's ABI as of 2.18, which later ones read by its size and version.
struct Id {
  char b[XK_LINK_ID_BYTES];
};
struct Options {
  size_t size;
  unsigned magic, version;
  int blocking, cga, min_ctas, max_ctas;
  const char *net;
  int split, traffic;
};
constexpr int IN_PROGRESS = 7;

struct Nccl {
  void *handle = nullptr;
  int (*GetUniqueId)(Id *);
  int (*CommInitRankConfig)(void **, int, Id, int, Options *);
  int (*CommGetAsyncError)(void *, int *);
  int (*Send)(const void *, size_t, int, int, void *, cudaStream_t);
  int (*Recv)(void *, size_t, int, int, void *, cudaStream_t);
  int (*CommAbort)(void *);
  const char *(*GetErrorString)(int);
};

// One library a process: it is never closed.
int32_t library(const Nccl **out) {
  static std::mutex mu;
  static Nccl n;
  std::lock_guard<std::mutex> hold(mu);
  *out = &n;
  if (n.handle) return XK_OK;
  setenv("NCCL_NVLS_ENABLE", "0", 0); // multicast memory, of no use to two ranks
  const char *name = getenv("XPYD_CUDA_NCCL");
  void *h = dlopen(name && *name ? name : "libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
  if (!h) return xk_fail(XK_NO_PEER, "no NCCL: %s", dlerror());
  auto get = [&](auto &f, const char *symbol) { return (f = reinterpret_cast<std::decay_t<decltype(f)>>(dlsym(h, symbol))) != nullptr; };
  if (!get(n.GetUniqueId, "ncclGetUniqueId") || !get(n.CommInitRankConfig, "ncclCommInitRankConfig") || !get(n.CommGetAsyncError, "ncclCommGetAsyncError") ||
      !get(n.Send, "ncclSend") || !get(n.Recv, "ncclRecv") || !get(n.CommAbort, "ncclCommAbort") || !get(n.GetErrorString, "ncclGetErrorString")) {
    dlclose(h);
    return xk_fail(XK_NO_PEER, "this NCCL is older than 2.18");
  }
  n.handle = h;
  return XK_OK;
}

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
}

} // namespace

struct xk_link {
  xk_ctx *c;
  const Nccl *n;
  std::mutex mu;
  void *comm = nullptr;
  int rank;
  bool warm = false; // something has been moved
  xk_mark *warming = nullptr;
  cudaStream_t stream = nullptr;
  xk_region region = {};
  int64_t before = 0, taken = 0; // free device bytes before, and what is missing since
};

namespace {

int32_t nccl_failed(xk_link *l, const char *what, int r) { return xk_fail(XK_CUDA, "%s: %s", what, l->n->GetErrorString(r)); }

// Waits until the communicator has done what it was asked for; needs mu.
int32_t settle(xk_link *l, const char *what, int64_t until) {
  for (int spins = 0;; spins++) {
    int state = 0, r = l->n->CommGetAsyncError(l->comm, &state);
    if (r || (state && state != IN_PROGRESS)) return nccl_failed(l, what, r ? r : state);
    if (!state) return XK_OK;
    if (now_ns() >= until) return xk_fail(XK_LATE, "%s: NCCL is not ready", what);
    if (spins > 2000) {
      timespec nap = {0, 50000};
      nanosleep(&nap, nullptr);
    }
  }
}

int32_t transfer(xk_link *l, int64_t at, int64_t bytes, int64_t until, xk_mark **out) {
  uint8_t *p = l->region.seen + at;
  int r = l->rank ? l->n->Send(p, bytes, 0, 0, l->comm, l->stream) : l->n->Recv(p, bytes, 0, 1, l->comm, l->stream);
  if (r && r != IN_PROGRESS) return nccl_failed(l, l->rank ? "ncclSend" : "ncclRecv", r);
  XK_OK_OR_RETURN(settle(l, l->rank ? "ncclSend" : "ncclRecv", until));
  return xk_mark_make(l->c, l->stream, out);
}

int64_t free_bytes() {
  size_t free = 0, total = 0;
  cudaMemGetInfo(&free, &total);
  return int64_t(free);
}

} // namespace

int32_t xk_link_id(void *id) {
  const Nccl *n;
  XK_OK_OR_RETURN(library(&n));
  Id made;
  int r = n->GetUniqueId(&made);
  if (r) return xk_fail(XK_NO_PEER, "ncclGetUniqueId: %s", n->GetErrorString(r));
  memcpy(id, &made, sizeof made);
  return XK_OK;
}

int32_t xk_link_open(xk_ctx *c, const void *id, int64_t id_bytes, int32_t sender, int64_t bytes, int32_t ctas, xk_link **out) {
  *out = nullptr;
  if (id_bytes != XK_LINK_ID_BYTES || bytes < 1 || bytes > int64_t(1) << 36 || ctas < 1 || ctas > 64 || !c->blocks)
    return xk_fail(XK_INVALID, "a link of %lld bytes by %d CTAs, named by %lld bytes", (long long)bytes, ctas, (long long)id_bytes);
  const Nccl *n;
  XK_OK_OR_RETURN(library(&n));
  XK_TRY(cudaSetDevice(c->cfg.device));
  xk_link *l = new xk_link;
  l->c = c, l->n = n, l->rank = sender ? 1 : 0, l->before = free_bytes();
  uint8_t *ring = nullptr;
  int least, greatest;
  cudaError_t e = cudaMalloc(&ring, size_t(bytes));
  if (e == cudaSuccess) e = cudaDeviceGetStreamPriorityRange(&least, &greatest);
  if (e == cudaSuccess) e = cudaStreamCreateWithPriority(&l->stream, cudaStreamNonBlocking, greatest);
  l->region = {c->cfg.device, nullptr, ring, bytes};
  int r = 0;
  if (e == cudaSuccess) {
    Id name;
    memcpy(&name, id, sizeof name);
    Options o = {sizeof(Options), 0xcafebeef, 21800, 0, INT_MIN, INT_MIN, ctas, nullptr, INT_MIN, INT_MIN};
    r = n->CommInitRankConfig(&l->comm, 2, name, l->rank, &o);
  }
  if (e == cudaSuccess && (!r || r == IN_PROGRESS)) {
    *out = l;
    return XK_OK;
  }
  int32_t s = e != cudaSuccess ? xk_fail(XK_CUDA, "a link of %lld bytes: %s", (long long)bytes, cudaGetErrorString(e)) : nccl_failed(l, "ncclCommInitRankConfig", r);
  if (l->stream) cudaStreamDestroy(l->stream);
  if (ring) cudaFree(ring);
  cudaGetLastError();
  delete l;
  return s;
}

int32_t xk_link_ready(xk_link *l, int64_t timeout_ns) {
  int64_t until = now_ns() + timeout_ns;
  std::lock_guard<std::mutex> hold(l->mu);
  XK_TRY(cudaSetDevice(l->c->cfg.device));
  if (l->warm) return settle(l, "the link", until); // whether it still is
  XK_OK_OR_RETURN(settle(l, "join", until));
  if (!l->warming) XK_OK_OR_RETURN(transfer(l, 0, l->region.bytes < (1 << 20) ? l->region.bytes : 1 << 20, until, &l->warming));
  XK_OK_OR_RETURN(xk_wait(l->warming, until - now_ns()));
  xk_mark_free(l->warming);
  l->warming = nullptr, l->warm = true;
  l->taken = l->before - free_bytes() - l->region.bytes;
  return XK_OK;
}

int32_t xk_link_region(xk_link *l, xk_region **out) {
  *out = &l->region;
  return XK_OK;
}

int32_t xk_link_taken(xk_link *l, int64_t *bytes) {
  *bytes = l->taken;
  return XK_OK;
}

int32_t xk_link_transfer(xk_link *l, int64_t at, int64_t bytes, xk_mark *after, int64_t timeout_ns, xk_mark **out) {
  *out = nullptr;
  std::lock_guard<std::mutex> hold(l->mu);
  if (at < 0 || bytes < 1 || bytes > l->region.bytes || at > l->region.bytes - bytes || !l->warm)
    return xk_fail(XK_INVALID, "transfer of %lld bytes at %lld of %lld", (long long)bytes, (long long)at, (long long)l->region.bytes);
  XK_TRY(cudaSetDevice(l->c->cfg.device));
  if (after) XK_TRY(cudaStreamWaitEvent(l->stream, after->event, 0));
  return transfer(l, at, bytes, now_ns() + timeout_ns, out);
}

// The abort ends the kernels of both directions; then the stream is drained.
int32_t xk_link_close(xk_link *l) {
  std::lock_guard<std::mutex> *hold = new std::lock_guard<std::mutex>(l->mu);
  cudaSetDevice(l->c->cfg.device);
  int r = l->comm ? l->n->CommAbort(l->comm) : 0;
  cudaError_t e = cudaStreamSynchronize(l->stream);
  if (l->warming) xk_mark_free(l->warming);
  cudaStreamDestroy(l->stream);
  cudaFree(l->region.seen);
  cudaGetLastError();
  delete hold;
  const Nccl *n = l->n;
  delete l;
  if (r && r != IN_PROGRESS) return xk_fail(XK_CUDA, "ncclCommAbort: %s", n->GetErrorString(r));
  if (e != cudaSuccess) return xk_fail(XK_CUDA, "after ncclCommAbort: %s", cudaGetErrorString(e));
  return XK_OK;
}
