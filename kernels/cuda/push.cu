// Pushes blocks into a peer's pool: rows, digests and row counts, then a flag.
//
// A unit is a chunk of a block of a layer. Each CTA has a run of units, looks up
// where they lie once, and copies them with 16-byte loads and stores, several in
// flight a thread. Digests are loaded before the rows and stored behind them, so
// that nobody waits for them. What ends a push: each CTA's stores, a barrier, one
// thread's fence for the whole system, a ticket; the last CTA sets the flag, in
// the peer's device memory and in host memory (PTX ISA, "Memory Consistency
// Model": the barrier and the ticket make the fence cumulative).
//
// A short list of blocks travels as a parameter, a long one lies in a ring of
// pinned memory: 32 KB of parameters delay a launch by some 8 us, the first read
// over PCIe by one.
//
// Long runs of consecutive blocks go by the copy engines instead, on several
// streams since one copy's start hides behind another's bytes, while the kernel
// takes their digests.
// Bound by the link: 369 GB/s for stores, 397 for copy engines over NVLink 4.
// Oracle: host copies of both pools (move_test.go).
#include <algorithm>
#include <cstring>

#include "move.cuh"

namespace {

constexpr int SMALL = 128; // pairs of a list that travels as a parameter

struct Job {
  Side from, to;
  int64_t run;        // bytes of a block of a layer
  int heads, layer, n_layers, n_pairs;
  int chunk, chunks;  // bytes; chunks of a block, 0: no rows
  const xk_pair *list; // null: the parameter
  unsigned *ticket;
  uint64_t *device_flag, *host_flag;
  uint64_t value;     // 0: no flag
  uint64_t *freed;    // null: nothing of the ring
  uint64_t head;      // what is free once this is done
};

struct Unit {
  const uint4 *src;
  uint4 *dst;
};

__device__ __forceinline__ uint4 load_once(const uint4 *p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
__device__ __forceinline__ void store_system(uint64_t *p, uint64_t v) { asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }

template <int THREADS, int DEPTH>
__global__ __launch_bounds__(THREADS) void push_kernel(const __grid_constant__ Job j, const __grid_constant__ List<xk_pair, SMALL> small) {
  constexpr int BATCH = 512;
  __shared__ Unit batch[BATCH];
  auto pair = [&](int i) { return j.list ? j.list[i] : small.at[i]; };

  // Digests: one a thread and (layer, pair, head), more where the grid is small.
  const int stride = gridDim.x * THREADS, slots = j.n_layers * j.n_pairs * j.heads;
  int slot = blockIdx.x * THREADS + threadIdx.x;
  uint64_t digest = 0;
  uint16_t filled = 0;
  int64_t to = -1;
  auto look_up = [&](int i) {
    int block = i / j.heads, head = i - block * j.heads, l = block / j.n_pairs;
    xk_pair p = pair(block - l * j.n_pairs);
    int64_t from = (j.layer + l) * j.from.layer_slots + int64_t(p.src) * j.heads + head;
    to = (j.layer + l) * j.to.layer_slots + int64_t(p.dst) * j.heads + head;
    digest = j.from.digest[from], filled = j.from.filled[from];
  };
  if (slot < slots) look_up(slot);

  const int units = j.n_layers * j.n_pairs * j.chunks;
  const int first = int(int64_t(units) * blockIdx.x / gridDim.x), end = int(int64_t(units) * (blockIdx.x + 1) / gridDim.x);
  for (int base = first; base < end; base += BATCH) {
    int n = min(BATCH, end - base);
    if (base != first) __syncthreads();
    for (int i = threadIdx.x; i < n; i += THREADS) {
      int block = (base + i) / j.chunks, chunk = base + i - block * j.chunks, l = block / j.n_pairs;
      xk_pair p = pair(block - l * j.n_pairs);
      int64_t at = int64_t(chunk) * j.chunk;
      batch[i].src = reinterpret_cast<const uint4 *>(j.from.rows + (j.layer + l) * j.from.layer_bytes + p.src * j.run + at);
      batch[i].dst = reinterpret_cast<uint4 *>(j.to.rows + (j.layer + l) * j.to.layer_bytes + p.dst * j.run + at);
    }
    __syncthreads();
    int chunk = (base % j.chunks);
    for (int u = 0; u < n; u++) {
      Unit t = batch[u];
      int vectors = int(min(int64_t(j.chunk), j.run - int64_t(chunk) * j.chunk)) / 16;
      if (++chunk == j.chunks) chunk = 0;
      for (int i = threadIdx.x; i < vectors; i += THREADS * DEPTH) {
        uint4 v[DEPTH];
#pragma unroll
        for (int k = 0; k < DEPTH; k++)
          if (i + k * THREADS < vectors) v[k] = load_once(t.src + i + k * THREADS);
#pragma unroll
        for (int k = 0; k < DEPTH; k++)
          if (i + k * THREADS < vectors) t.dst[i + k * THREADS] = v[k];
      }
    }
  }

  if (to >= 0) j.to.digest[to] = digest, j.to.filled[to] = filled;
  for (slot += stride; slot < slots; slot += stride) {
    look_up(slot);
    j.to.digest[to] = digest, j.to.filled[to] = filled;
  }
  if (!j.value && !j.freed) return;
  __syncthreads();
  if (threadIdx.x) return;
  __threadfence_system();
  if (atomicAdd(j.ticket, 1) != gridDim.x - 1) return;
  *j.ticket = 0;
  __threadfence_system();
  if (j.value) store_system(j.device_flag, j.value), store_system(j.host_flag, j.value);
  if (j.freed) store_system(j.freed, j.head);
}

// How a push of so many bytes is cut. The smaller it is, the more CTAs have to
// share it, and the more their number costs at its end.
struct Cut {
  int threads, depth, ctas;
};

Cut cut(int64_t bytes, int sms, int most) {
  Cut c = {512, 4, 2 * sms};
  if (bytes <= int64_t(4) << 20) c = {512, 1, sms};
  else if (bytes <= int64_t(32) << 20) c = {1024, 2, sms};
  if (most > 0 && most < c.ctas) c = {1024, 4, most};
  return c;
}

int32_t start(xk_peer *p, const Cut &c, Job j, const List<xk_pair, SMALL> &list) {
  j.chunk = int(std::min<int64_t>(c.threads * c.depth * 16, j.run));
  if (j.chunks) j.chunks = div_up(j.run, j.chunk);
  int64_t units = int64_t(j.n_layers) * j.n_pairs * std::max(j.chunks, 1);
  int grid = int(std::max<int64_t>(1, std::min<int64_t>(c.ctas, units)));
  if (c.depth == 1) push_kernel<512, 1><<<grid, 512, 0, p->stream>>>(j, list);
  else if (c.depth == 2) push_kernel<1024, 2><<<grid, 1024, 0, p->stream>>>(j, list);
  else if (c.threads == 512) push_kernel<512, 4><<<grid, 512, 0, p->stream>>>(j, list);
  else push_kernel<1024, 4><<<grid, 1024, 0, p->stream>>>(j, list);
  XK_TRY(cudaGetLastError());
  return XK_OK;
}

// Room for n pairs in a row, if the ring has it: [head, head + n) of an endless
// tape, of which a launch frees all before its own end.
xk_pair *take(PairRing &r, int n, uint64_t *head) {
  uint64_t at = r.head, left = PairRing::PAIRS - at % PairRing::PAIRS;
  if (uint64_t(n) > left) at += left; // not around the corner
  uint64_t freed = __atomic_load_n(r.freed, __ATOMIC_ACQUIRE);
  if (n > PairRing::PAIRS || at + n - freed > PairRing::PAIRS) return nullptr;
  *head = at + n;
  return r.pairs + at % PairRing::PAIRS;
}

int32_t by_kernel(xk_peer *p, const Job &whole, const Cut &c, const xk_pair *pairs) {
  List<xk_pair, SMALL> list;
  Job j = whole;
  uint64_t head;
  if (whole.n_pairs <= SMALL) {
    memcpy(list.at, pairs, whole.n_pairs * sizeof *pairs);
    return start(p, c, j, list);
  }
  if (xk_pair *at = take(p->ring, whole.n_pairs, &head)) {
    memcpy(at, pairs, whole.n_pairs * sizeof *pairs);
    j.list = at, j.freed = p->ring.freed, j.head = head;
    XK_OK_OR_RETURN(start(p, c, j, list));
    p->ring.head = head;
    return XK_OK;
  }
  for (int first = 0; first < whole.n_pairs; first += SMALL) { // in pieces, the flag with the last
    j.n_pairs = std::min(SMALL, whole.n_pairs - first);
    memcpy(list.at, pairs + first, j.n_pairs * sizeof *pairs);
    j.value = first + j.n_pairs < whole.n_pairs ? 0 : whole.value;
    XK_OK_OR_RETURN(start(p, c, j, list));
  }
  return XK_OK;
}

int run_length(const xk_pair *pairs, int n) {
  int k = 1;
  while (k < n && pairs[k].src == pairs[0].src + k && pairs[k].dst == pairs[0].dst + k) k++;
  return k;
}

int32_t by_engine(xk_peer *p, const Job &j, const xk_pair *pairs) {
  XK_TRY(cudaEventRecord(p->fork, p->stream));
  for (cudaStream_t s : p->lanes) XK_TRY(cudaStreamWaitEvent(s, p->fork, 0));
  int lane = 0;
  for (int layer = j.layer; layer < j.layer + j.n_layers; layer++) {
    for (int i = 0, k; i < j.n_pairs; i += k) {
      k = run_length(pairs + i, j.n_pairs - i);
      const uint8_t *src = j.from.rows + layer * j.from.layer_bytes + pairs[i].src * j.run;
      uint8_t *dst = j.to.rows + layer * j.to.layer_bytes + pairs[i].dst * j.run;
      XK_TRY(cudaMemcpyAsync(dst, src, k * j.run, cudaMemcpyDeviceToDevice, p->lanes[lane++ % xk_peer::LANES]));
    }
  }
  Job rest = j; // digests, beside the copies
  rest.chunks = 0, rest.value = 0;
  if (j.heads) XK_OK_OR_RETURN(by_kernel(p, rest, {512, 1, 4}, pairs));
  for (int i = 0; i < xk_peer::LANES; i++) {
    XK_TRY(cudaEventRecord(p->join[i], p->lanes[i]));
    XK_TRY(cudaStreamWaitEvent(p->stream, p->join[i], 0));
  }
  rest.n_pairs = 0, rest.value = j.value;
  return j.value ? by_kernel(p, rest, {512, 1, 1}, pairs) : XK_OK;
}

constexpr int64_t LONG_RUN = int64_t(1) << 20; // bytes on average, from which engines are as fast

int32_t check(const xk_peer *p, const xk_push_args &a, const xk_pair *pairs) {
  const xk_config &g = p->c->cfg;
  if (!xk_layers_ok(g, a.layer, a.n_layers) || a.n_pairs < 0 || a.n_pairs > 1 << 24 || a.ctas < 0 || a.engine < XK_AUTO || a.engine > XK_COPY ||
      a.line < 0 || a.line >= XK_FLAG_LINES)
    return xk_fail(XK_INVALID, "push of %d blocks, layers %d+%d of %d, by engine %d, %d CTAs, flag line %d", a.n_pairs, a.layer, a.n_layers, g.layers, a.engine, a.ctas, a.line);
  for (int i = 0; i < a.n_pairs; i++)
    if (pairs[i].src < 0 || pairs[i].src >= p->c->blocks || pairs[i].dst < 0 || pairs[i].dst >= p->blocks)
      return xk_fail(XK_INVALID, "push of block %d to %d: pools have %d and %d", pairs[i].src, pairs[i].dst, p->c->blocks, p->blocks);
  if (int64_t(a.n_layers) * a.n_pairs * std::max(div_up(xk_block_run(g), 8192), g.kv_heads) > INT32_MAX) return xk_fail(XK_INVALID, "push of %d blocks of %d layers: too many at once", a.n_pairs, a.n_layers);
  return XK_OK;
}

} // namespace

int32_t xk_push(xk_peer *p, const xk_push_args *args, const xk_pair *pairs) {
  const xk_push_args &a = *args;
  XK_OK_OR_RETURN(check(p, a, pairs));
  xk_ctx *c = p->c;
  const xk_config &g = c->cfg;
  XK_TRY(cudaSetDevice(g.device));
  std::lock_guard<std::mutex> hold(p->mu);
  if (a.after_step) {
    int half = int((c->launched + 1) % 2); // of the step launched last
    if (!c->launched || !c->layer_events[half]) return xk_fail(XK_INVALID, "the step launched last records no layers");
    XK_TRY(cudaStreamWaitEvent(p->stream, c->layer_done[half][a.layer + a.n_layers - 1], 0));
  }
  Job j = {};
  j.from = Side(g, c->blocks, c->region), j.to = p->to;
  j.run = xk_block_run(g), j.heads = a.rows_only ? 0 : g.kv_heads, j.layer = a.layer, j.n_layers = a.n_layers, j.n_pairs = a.n_pairs;
  j.chunks = a.n_pairs ? 1 : 0; // start says how many
  j.ticket = p->ticket, j.value = a.value;
  int64_t line = int64_t(a.line) * XK_FLAG_STRIDE;
  j.device_flag = reinterpret_cast<uint64_t *>(p->region + Parts(g, p->blocks).flags + line);
  j.host_flag = reinterpret_cast<uint64_t *>(p->host_flags + line);
  if (a.n_pairs == 0) return a.value ? by_kernel(p, j, {512, 1, 1}, pairs) : XK_OK;
  bool copy = a.engine == XK_COPY;
  if (a.engine == XK_AUTO) {
    int runs = 0;
    for (int i = 0; i < a.n_pairs; i += run_length(pairs + i, a.n_pairs - i)) runs++;
    copy = a.n_pairs * j.run / runs >= LONG_RUN;
  }
  if (copy) return by_engine(p, j, pairs);
  return by_kernel(p, j, cut(j.run * a.n_pairs * a.n_layers, c->sms, a.ctas), pairs);
}
