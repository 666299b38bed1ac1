// Pools of other processes: handles, mapping, marks, and their end. Nothing that
// a handle says is believed: shape and sizes follow from our own configuration,
// and the driver says how large the mapped allocation really is.
#include <time.h>
#include <unistd.h>
#include <sys/random.h>

#include <algorithm>
#include <cstring>

#include "move.cuh"

namespace {

constexpr char MAGIC[8] = {'x', 'p', 'y', 'd', 'k', 'v', '5', '\n'};

struct Handle {
  char magic[8];
  uint8_t process[16]; // random: CUDA does not open a handle in the process that made it
  cudaIpcMemHandle_t memory;
  int32_t layers, blocks, kv_heads, head_dim, block_tokens, lines, rows;
  int64_t bytes;
};
static_assert(sizeof(Handle) <= XK_HANDLE_BYTES, "");

const uint8_t *process_id() {
  static const struct Id {
    uint8_t b[16];
    Id() {
      if (getrandom(b, sizeof b, 0) != sizeof b) { // pid and time will do
        int64_t t[2] = {getpid(), time(nullptr)};
        memcpy(b, t, sizeof b);
      }
    }
  } id;
  return id.b;
}

// The size of the allocation at p, which begins there.
int32_t allocation(void *p, int64_t *bytes) {
  decltype(&cuMemGetAddressRange) range;
  XK_OK_OR_RETURN(xk_driver("cuMemGetAddressRange", &range));
  CUdeviceptr base = 0;
  size_t size = 0;
  CUresult r = range(&base, &size, CUdeviceptr(p));
  if (r != CUDA_SUCCESS) return xk_fail(XK_CUDA, "cuMemGetAddressRange: %d", int(r));
  *bytes = base == CUdeviceptr(p) ? int64_t(size) : 0;
  return XK_OK;
}

int32_t no_peer(const char *what, cudaError_t e) {
  cudaGetLastError(); // not of later calls
  return xk_fail(XK_NO_PEER, "%s: %s", what, cudaGetErrorString(e));
}

// shape is ours, g, with rows of another type.
int32_t set_rows(const xk_config &g, int32_t type, xk_config *shape) {
  if (type < ROWS_BF16 || type > ROWS_F16) return xk_fail(XK_INVALID, "the peer's KV rows are of a later version, ours %s", xk_row_name(g));
  *shape = g;
  shape->kv_fp8 = type == ROWS_F8, shape->fp16 = type == ROWS_F16;
  return XK_OK;
}

int32_t fill(xk_peer *p, void *flags) {
  xk_ctx *c = p->c;
  cudaError_t e = cudaHostRegister(flags, int64_t(XK_FLAG_LINES) * XK_FLAG_STRIDE, cudaHostRegisterMapped | cudaHostRegisterPortable);
  if (e != cudaSuccess) return no_peer("register the peer's flags", e);
  p->pinned = flags;
  void *seen;
  XK_TRY(cudaHostGetDevicePointer(&seen, flags, 0));
  p->host_flags = static_cast<uint8_t *>(seen);
  p->to = Side(p->shape, p->blocks, p->region);
  XK_TRY(cudaMalloc(&p->ticket, sizeof *p->ticket));
  XK_TRY(cudaMemset(p->ticket, 0, sizeof *p->ticket));
  if (!xk_same_blocks(p->shape, c->cfg)) {
    XK_TRY(cudaMalloc(&p->sums, REFILL_SUMS * sizeof *p->sums));
    XK_TRY(cudaMemset(p->sums, 0, REFILL_SUMS * sizeof *p->sums));
  }
  XK_TRY(cudaHostAlloc(reinterpret_cast<void **>(&p->ring.pairs), PairRing::PAIRS * sizeof(xk_pair) + 64, cudaHostAllocMapped));
  p->ring.freed = reinterpret_cast<uint64_t *>(p->ring.pairs + PairRing::PAIRS);
  *p->ring.freed = 0;
  XK_TRY(cudaMalloc(&p->ring.device, PairRing::PAIRS * sizeof(xk_pair)));
  int least, greatest;
  XK_TRY(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  XK_TRY(cudaStreamCreateWithPriority(&p->stream, cudaStreamNonBlocking, greatest));
  XK_TRY(cudaStreamCreateWithPriority(&p->engine, cudaStreamNonBlocking, greatest));
  XK_TRY(cudaEventCreateWithFlags(&p->fork, cudaEventDisableTiming));
  XK_TRY(cudaEventCreateWithFlags(&p->join, cudaEventDisableTiming));
  XK_TRY(cudaDeviceSynchronize());
  std::lock_guard<std::mutex> hold(c->moves->mu);
  c->moves->peers.push_back(p);
  return XK_OK;
}

void destroy(xk_peer *p) {
  cudaSetDevice(p->c->cfg.device);
  for (cudaStream_t s : {p->stream, p->engine})
    if (s) cudaStreamDestroy(s);
  for (cudaEvent_t e : {p->fork, p->join})
    if (e) cudaEventDestroy(e);
  if (p->ticket) cudaFree(p->ticket);
  if (p->sums) cudaFree(p->sums);
  if (p->ring.device) cudaFree(p->ring.device);
  if (p->ring.pairs) cudaFreeHost(p->ring.pairs);
  if (p->pinned) cudaHostUnregister(p->pinned);
  if (p->mapped) cudaIpcCloseMemHandle(p->region);
  cudaGetLastError();
  delete p;
}

int32_t finish(xk_peer *p, void *flags, xk_peer **out) {
  int32_t s = fill(p, flags);
  if (s == XK_OK) *out = p;
  else destroy(p);
  return s;
}

int32_t flags_ok(const void *flags, int64_t bytes) {
  if (flags && reinterpret_cast<uintptr_t>(flags) % 4096 == 0 && bytes >= int64_t(XK_FLAG_LINES) * XK_FLAG_STRIDE) return XK_OK;
  return xk_fail(XK_INVALID, "flags of %lld bytes: want whole pages, %d bytes", (long long)bytes, XK_FLAG_LINES * XK_FLAG_STRIDE);
}

} // namespace

int32_t xk_export(xk_ctx *c, void *handle) {
  if (!c->blocks) return xk_fail(XK_INVALID, "export before start");
  const xk_config &g = c->cfg;
  XK_TRY(cudaSetDevice(g.device));
  Handle h = {};
  memcpy(h.magic, MAGIC, sizeof MAGIC);
  memcpy(h.process, process_id(), sizeof h.process);
  cudaError_t e = cudaIpcGetMemHandle(&h.memory, c->region);
  if (e != cudaSuccess) return no_peer("cudaIpcGetMemHandle", e);
  h.layers = g.layers, h.blocks = c->blocks, h.kv_heads = g.kv_heads, h.head_dim = g.head_dim, h.block_tokens = g.block_tokens, h.lines = XK_FLAG_LINES, h.rows = xk_row_type(g);
  h.bytes = Parts(g, c->blocks).bytes;
  memset(handle, 0, XK_HANDLE_BYTES);
  memcpy(handle, &h, sizeof h);
  return XK_OK;
}

int32_t xk_flag(xk_ctx *c, int32_t line, void **device) {
  if (line < 0 || line >= XK_FLAG_LINES || !c->blocks) return xk_fail(XK_INVALID, "flag line %d of %d", line, XK_FLAG_LINES);
  *device = c->region + Parts(c->cfg, c->blocks).flags + int64_t(line) * XK_FLAG_STRIDE;
  return XK_OK;
}

int32_t xk_flag_clear(xk_ctx *c, int32_t line) {
  void *at;
  XK_OK_OR_RETURN(xk_flag(c, line, &at));
  XK_TRY(cudaSetDevice(c->cfg.device));
  XK_TRY(cudaMemset(at, 0, 8));
  return XK_OK;
}

int32_t xk_peer_open(xk_ctx *c, const void *handle, int64_t handle_bytes, void *flags, int64_t flag_bytes, xk_peer **out) {
  *out = nullptr;
  const xk_config &g = c->cfg;
  Handle h;
  if (!c->blocks || handle_bytes != XK_HANDLE_BYTES) return xk_fail(XK_INVALID, "handle of %lld bytes, want %d", (long long)handle_bytes, XK_HANDLE_BYTES);
  memcpy(&h, handle, sizeof h);
  if (memcmp(h.magic, MAGIC, sizeof MAGIC)) return xk_fail(XK_INVALID, "this is no handle of this version");
  if (h.layers != g.layers || h.head_dim != g.head_dim || h.lines != XK_FLAG_LINES)
    return xk_fail(XK_INVALID, "the peer's pool has %d layers, KV heads of %d; this one %d, %d", h.layers, h.head_dim, g.layers, g.head_dim);
  xk_config shape; // blocks, heads and rows may differ: refill.cu
  XK_OK_OR_RETURN(set_rows(g, h.rows, &shape));
  shape.kv_heads = h.kv_heads, shape.block_tokens = h.block_tokens;
  if (shape.kv_fp8 && (h.block_tokens % 16 || g.head_dim % 16)) return xk_fail(XK_INVALID, "the peer's FP8 pool has blocks of %d, KV heads of %d", h.block_tokens, g.head_dim);
  if (h.kv_heads < 1 || h.kv_heads > 1024 || h.block_tokens < 1 || h.block_tokens > 256) return xk_fail(XK_INVALID, "the peer's pool has %d KV heads, blocks of %d", h.kv_heads, h.block_tokens);
  if (h.blocks < 1 || h.blocks > (int64_t(1) << 46) / (h.layers * xk_block_run(shape)) || h.bytes != Parts(shape, h.blocks).bytes) return xk_fail(XK_INVALID, "the peer's pool has %d blocks in %lld bytes", h.blocks, (long long)h.bytes);
  if (!memcmp(h.process, process_id(), sizeof h.process)) return xk_fail(XK_INVALID, "the handle is this process's own");
  XK_OK_OR_RETURN(flags_ok(flags, flag_bytes));
  XK_TRY(cudaSetDevice(g.device));
  xk_peer *p = new xk_peer;
  p->c = c, p->blocks = h.blocks, p->shape = shape;
  void *at = nullptr;
  cudaError_t e = cudaIpcOpenMemHandle(&at, h.memory, cudaIpcMemLazyEnablePeerAccess);
  if (e != cudaSuccess) {
    delete p;
    return no_peer("cudaIpcOpenMemHandle", e);
  }
  p->region = static_cast<uint8_t *>(at), p->mapped = true;
  int64_t real = 0;
  int32_t s = allocation(at, &real);
  if (s == XK_OK && real < h.bytes) s = xk_fail(XK_INVALID, "the peer's memory has %lld bytes, it says %lld", (long long)real, (long long)h.bytes);
  if (s != XK_OK) {
    destroy(p);
    return s;
  }
  return finish(p, flags, out);
}

int32_t xk_peer_local(xk_ctx *c, xk_ctx *to, void *flags, int64_t flag_bytes, xk_peer **out) {
  *out = nullptr;
  const xk_config &g = c->cfg, &t = to->cfg;
  if (!c->blocks || !to->blocks || t.layers != g.layers || t.head_dim != g.head_dim) return xk_fail(XK_INVALID, "the two pools are not of one shape");
  xk_config shape;
  XK_OK_OR_RETURN(set_rows(g, xk_row_type(t), &shape));
  XK_OK_OR_RETURN(flags_ok(flags, flag_bytes));
  XK_TRY(cudaSetDevice(g.device));
  if (g.device != t.device) {
    cudaError_t e = cudaDeviceEnablePeerAccess(t.device, 0);
    if (e != cudaSuccess && e != cudaErrorPeerAccessAlreadyEnabled) return no_peer("cudaDeviceEnablePeerAccess", e);
    cudaGetLastError();
  }
  xk_peer *p = new xk_peer;
  p->c = c, p->blocks = to->blocks, p->region = to->region, p->shape = shape;
  p->shape.kv_heads = t.kv_heads, p->shape.block_tokens = t.block_tokens;
  return finish(p, flags, out);
}

Finish finish_of(xk_peer *p, int line, uint64_t value) {
  Finish f = {p->ticket};
  int64_t at = int64_t(line) * XK_FLAG_STRIDE;
  f.device_flag = reinterpret_cast<uint64_t *>(p->region + Parts(p->shape, p->blocks).flags + at);
  f.host_flag = reinterpret_cast<uint64_t *>(p->host_flags + at), f.value = value;
  return f;
}

xk_pair *ring_room(PairRing &r, int n, uint64_t *head) {
  uint64_t at = r.head, left = PairRing::PAIRS - at % PairRing::PAIRS;
  if (uint64_t(n) > left) at += left; // not around the corner
  uint64_t freed = __atomic_load_n(r.freed, __ATOMIC_ACQUIRE);
  if (n > PairRing::PAIRS || at + n - freed > PairRing::PAIRS) return nullptr;
  *head = at + n;
  return r.pairs + at % PairRing::PAIRS;
}

int32_t xk_peer_mark(xk_peer *p, xk_mark **out) {
  std::lock_guard<std::mutex> hold(p->mu);
  return xk_mark_make(p->c, p->stream, out);
}

int32_t xk_peer_close(xk_peer *p) {
  XK_TRY(cudaSetDevice(p->c->cfg.device));
  cudaError_t e = cudaStreamQuery(p->stream);
  if (e == cudaErrorNotReady) return xk_fail(XK_LATE, "pushes are under way");
  XK_TRY(e);
  {
    std::lock_guard<std::mutex> hold(p->c->moves->mu);
    auto &all = p->c->moves->peers;
    all.erase(std::remove(all.begin(), all.end(), p), all.end());
  }
  destroy(p);
  return XK_OK;
}

// ---------------------------------------------------------------- marks

int32_t xk_mark_make(xk_ctx *c, cudaStream_t s, xk_mark **out) {
  *out = nullptr;
  XK_TRY(cudaSetDevice(c->cfg.device));
  cudaEvent_t e;
  XK_TRY(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
  cudaError_t err = cudaEventRecord(e, s);
  if (err != cudaSuccess) {
    cudaEventDestroy(e);
    return xk_fail(XK_CUDA, "cudaEventRecord: %s", cudaGetErrorString(err));
  }
  *out = new xk_mark{c->cfg.device, e};
  return XK_OK;
}

static int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
}

int32_t xk_ring_take(PairRing &r, int n, uint64_t *head, xk_pair **at) {
  for (int64_t began = now_ns(); !(*at = ring_room(r, n, head));) {
    if (now_ns() - began > 10000000000) return xk_fail(XK_CUDA, "the device has not read its lists for 10 s: no room for %d pairs", n);
    timespec nap = {0, 20000};
    nanosleep(&nap, nullptr);
  }
  return XK_OK;
}

int32_t xk_wait_event(cudaEvent_t e, int64_t timeout_ns) {
  int64_t began = now_ns();
  for (;;) {
    cudaError_t r = cudaEventQuery(e);
    if (r == cudaSuccess) return XK_OK;
    if (r != cudaErrorNotReady) return xk_fail(XK_CUDA, "cudaEventQuery: %s", cudaGetErrorString(r));
    int64_t passed = now_ns() - began;
    if (passed >= timeout_ns) return xk_fail(XK_LATE, "not done after %lld us", (long long)passed / 1000);
    if (passed > 50000) {
      timespec nap = {0, 20000};
      nanosleep(&nap, nullptr);
    }
  }
}

int32_t xk_wait(xk_mark *m, int64_t timeout_ns) {
  XK_TRY(cudaSetDevice(m->device));
  return xk_wait_event(m->event, timeout_ns);
}

int32_t xk_mark_free(xk_mark *m) {
  if (!m) return XK_OK;
  cudaSetDevice(m->device);
  cudaEventDestroy(m->event);
  delete m;
  return XK_OK;
}

// ---------------------------------------------------------------- the context's part

int32_t xk_moves_open(xk_ctx *c) {
  c->moves = new Moves;
  int least, greatest;
  XK_TRY(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  for (Verifier &v : c->moves->verifiers) {
    XK_TRY(cudaStreamCreateWithPriority(&v.stream, cudaStreamNonBlocking, greatest));
    XK_TRY(cudaEventCreateWithFlags(&v.done, cudaEventDisableTiming));
    XK_OK_OR_RETURN(xk_alloc_pinned(c, &v.bad, Verifier::MOST));
  }
  for (Moves::Way &w : c->moves->ways) {
    XK_TRY(cudaStreamCreateWithPriority(&w.stream, cudaStreamNonBlocking, greatest));
    for (cudaStream_t &s : w.side) XK_TRY(cudaStreamCreateWithPriority(&s, cudaStreamNonBlocking, greatest));
    for (cudaEvent_t &e : w.join) XK_TRY(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
  }
  XK_OK_OR_RETURN(xk_arrivals_open(c));
  XK_OK_OR_RETURN(xk_verify_init());
  return xk_hostmove_init();
}

// The device is idle here.
void xk_moves_close(xk_ctx *c) {
  if (!c->moves) return;
  for (xk_peer *p : c->moves->peers) destroy(p);
  for (Verifier &v : c->moves->verifiers) {
    if (v.stream) cudaStreamDestroy(v.stream);
    if (v.done) cudaEventDestroy(v.done);
  }
  xk_arrivals_close(c);
  for (Moves::Way &w : c->moves->ways) {
    for (cudaStream_t s : {w.stream, w.side[0], w.side[1]})
      if (s) cudaStreamDestroy(s);
    for (cudaEvent_t e : w.join)
      if (e) cudaEventDestroy(e);
  }
  delete c->moves;
  c->moves = nullptr;
}
