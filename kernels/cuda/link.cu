// Links between devices of two processes, by NCCL: a communicator of two ranks that
// never blocks, and a ring of device memory. NCCL is opened at run time; without it
// there are no links. Only its plain send and receive are used.
//
// A communicator that does not block answers "in progress" to every call; what it
// was asked for is on the stream when it says so no more. That costs some 50 us a
// transfer and no hang, whatever the peer does: an abort ends the kernels.
//
// All calls come from one thread (kernels/links), but for xk_link_end's, which may run
// beside those for other links: so nothing here is locked.
#include <dlfcn.h>
#include <limits.h>
#include <time.h>

#include <cstdlib>
#include <cstring>
#include <mutex>

#include "move.cuh"
#include "nccl.cuh"

namespace {

// What NCCL shall not do: multicast memory is of no use to two ranks, its RAS
// threads would hold on to peers that are dead, and the buffers of a graph would be
// registered with ranks that make theirs later. Set when this library is loaded: the
// environment is not for changing beside CUDA's threads, which read it.
struct Environment {
  Environment() {
    setenv("NCCL_NVLS_ENABLE", "0", 0);
    setenv("NCCL_RAS_ENABLE", "0", 0);
    setenv("NCCL_GRAPH_REGISTER", "0", 0);
  }
} environment;

} // namespace

// One library a process: it is never closed.
int32_t xk_nccl(const Nccl **out) {
  static std::mutex mu;
  static Nccl n;
  std::lock_guard<std::mutex> hold(mu);
  *out = &n;
  if (n.handle) return XK_OK;
  const char *name = getenv("XPYD_CUDA_NCCL");
  void *h = dlopen(name && *name ? name : "libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
  if (!h) return xk_fail(XK_NO_PEER, "no NCCL: %s", dlerror());
  auto get = [&](auto &f, const char *symbol) { return (f = reinterpret_cast<std::decay_t<decltype(f)>>(dlsym(h, symbol))) != nullptr; };
  if (!get(n.GetUniqueId, "ncclGetUniqueId") || !get(n.CommInitRankConfig, "ncclCommInitRankConfig") || !get(n.CommGetAsyncError, "ncclCommGetAsyncError") ||
      !get(n.Send, "ncclSend") || !get(n.Recv, "ncclRecv") || !get(n.AllGather, "ncclAllGather") || !get(n.CommAbort, "ncclCommAbort") || !get(n.GroupStart, "ncclGroupStart") || !get(n.GroupEnd, "ncclGroupEnd") || !get(n.GetErrorString, "ncclGetErrorString")) {
    dlclose(h);
    return xk_fail(XK_NO_PEER, "this NCCL is older than 2.18");
  }
  n.handle = h;
  return XK_OK;
}

namespace {

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
}

} // namespace

struct xk_link {
  xk_ctx *c;
  const Nccl *n;
  void *comm = nullptr; // null: aborted
  int rank;
  cudaStream_t stream = nullptr;
  xk_region region = {};
  int64_t before = 0; // free device bytes
};

namespace {

int32_t nccl_failed(xk_link *l, const char *what, int r) { return xk_fail(XK_CUDA, "%s: %s", what, l->n->GetErrorString(r)); }

// Waits until the communicator has done what it was asked for.
int32_t settle(xk_link *l, const char *what, int64_t timeout_ns) {
  const int64_t began = now_ns();
  for (;;) {
    int state = 0, r = l->n->CommGetAsyncError(l->comm, &state);
    if (r || (state && state != NCCL_IN_PROGRESS)) return nccl_failed(l, what, r ? r : state);
    if (!state) return XK_OK;
    const int64_t passed = now_ns() - began;
    if (passed >= timeout_ns) return xk_fail(XK_LATE, "%s: in progress", what);
    if (passed > 1000000) { // a launch takes 50 us
      timespec nap = {0, 50000};
      nanosleep(&nap, nullptr);
    }
  }
}

// The transfer that was asked for, once it is on the stream.
int32_t launched(xk_link *l, int64_t timeout_ns, xk_mark **out) {
  XK_OK_OR_RETURN(settle(l, l->rank ? "ncclSend" : "ncclRecv", timeout_ns));
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
  XK_OK_OR_RETURN(xk_nccl(&n));
  NcclId made;
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
  XK_OK_OR_RETURN(xk_nccl(&n));
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
    NcclId name;
    memcpy(&name, id, sizeof name);
    NcclOptions o(false, ctas);
    r = n->CommInitRankConfig(&l->comm, 2, name, l->rank, &o);
  }
  if (e == cudaSuccess && (!r || r == NCCL_IN_PROGRESS)) {
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

int32_t xk_link_settle(xk_link *l, int64_t timeout_ns) { return settle(l, "the communicator", timeout_ns); }

int32_t xk_link_region(xk_link *l, xk_region **out) {
  *out = &l->region;
  return XK_OK;
}

int32_t xk_link_taken(xk_link *l, int64_t *bytes) {
  XK_TRY(cudaSetDevice(l->c->cfg.device));
  *bytes = l->before - free_bytes() - l->region.bytes;
  return XK_OK;
}

int32_t xk_link_transfer(xk_link *l, int64_t at, int64_t bytes, xk_mark **after, int32_t n_after, int64_t timeout_ns, xk_mark **out) {
  *out = nullptr;
  if (at < 0 || bytes < 1 || bytes > l->region.bytes || at > l->region.bytes - bytes)
    return xk_fail(XK_INVALID, "transfer of %lld bytes at %lld of %lld", (long long)bytes, (long long)at, (long long)l->region.bytes);
  XK_TRY(cudaSetDevice(l->c->cfg.device));
  for (int i = 0; i < n_after; i++) XK_TRY(cudaStreamWaitEvent(l->stream, after[i]->event, 0)); // also of other devices
  uint8_t *p = l->region.seen + at;
  int r = l->rank ? l->n->Send(p, bytes, 0, 0, l->comm, l->stream) : l->n->Recv(p, bytes, 0, 1, l->comm, l->stream);
  if (r && r != NCCL_IN_PROGRESS) return nccl_failed(l, l->rank ? "ncclSend" : "ncclRecv", r);
  return launched(l, timeout_ns, out);
}

int32_t xk_link_resume(xk_link *l, int64_t timeout_ns, xk_mark **out) {
  *out = nullptr;
  XK_TRY(cudaSetDevice(l->c->cfg.device));
  return launched(l, timeout_ns, out);
}

// An abort ends the kernels of both directions and frees memory, which waits for every
// kernel of the device: so of several, in a group, all are told before any is freed.
// Nothing of CUDA's comes before that: another thread's call may wait for these kernels,
// and hold up all that follow it.
int32_t xk_link_end(xk_link **abort, int32_t n_abort, xk_link **free, int32_t n_free) {
  int r = 0;
  auto note = [&](int got) { r = r || got == NCCL_IN_PROGRESS ? r : got; };
  const Nccl *n = n_abort ? abort[0]->n : nullptr;
  if (n_abort > 1) note(n->GroupStart());
  for (int i = 0; i < n_abort; i++) {
    if (abort[i]->comm) note(n->CommAbort(abort[i]->comm));
    abort[i]->comm = nullptr;
  }
  if (n_abort > 1) note(n->GroupEnd());
  int32_t s = r ? xk_fail(XK_CUDA, "ncclCommAbort: %s", n->GetErrorString(r)) : XK_OK;
  for (int i = 0; i < n_abort; i++) {
    cudaSetDevice(abort[i]->c->cfg.device);
    cudaError_t e = cudaStreamSynchronize(abort[i]->stream);
    if (e != cudaSuccess && s == XK_OK) s = xk_fail(XK_CUDA, "after ncclCommAbort: %s", cudaGetErrorString(e));
  }
  for (int i = 0; i < n_free; i++) {
    cudaSetDevice(free[i]->c->cfg.device);
    cudaStreamDestroy(free[i]->stream);
    cudaFree(free[i]->region.seen);
    delete free[i];
  }
  cudaGetLastError();
  return s;
}
