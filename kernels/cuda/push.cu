// Pushes blocks into a peer's pool: rows, digests and row counts, then a flag.
//
// A unit is a chunk of a block of a layer. CTAs take units in turn and copy them
// with 16-byte loads and stores, several in flight a thread; the CTA with a
// block's first chunk also takes its digests. What ends a push: each CTA's stores,
// a barrier, one thread's fence for the whole system, a ticket; the last CTA sets
// the flag, in the peer's device memory and in host memory (PTX ISA, "Memory
// Consistency Model": the barrier and the ticket make the fence cumulative).
//
// Long runs of consecutive blocks go by the copy engines instead, on several
// streams since one copy's start hides behind another's bytes, and the same
// kernel, without rows, ends them.
// Bound by the link: 369 GB/s for stores, 397 for copy engines over NVLink 4.
// Oracle: host copies of both pools (move_test.go).
#include <algorithm>

#include "move.cuh"

namespace {

struct Job {
  Side from, to;
  int64_t run;        // bytes of a block of a layer; 0: digests only
  int heads, layer, n_layers, n_pairs;
  int chunk, chunks;  // bytes, of a block
  unsigned *ticket;
  uint64_t *device_flag, *host_flag; // null: none is set
  uint64_t value;
};

__device__ __forceinline__ uint4 load_once(const uint4 *p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
__device__ __forceinline__ void store_release(uint64_t *p, uint64_t v) { asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }

template <int THREADS, int DEPTH, int N>
__global__ __launch_bounds__(THREADS) void push_kernel(const __grid_constant__ Job j, const __grid_constant__ List<xk_pair, N> pairs) {
  const int units = j.n_layers * j.n_pairs * j.chunks;
  for (int u = blockIdx.x; u < units; u += gridDim.x) {
    int block = u / j.chunks, chunk = u - block * j.chunks;
    int l = block / j.n_pairs, layer = j.layer + l;
    xk_pair p = pairs.at[block - l * j.n_pairs];
    if (chunk == 0 && threadIdx.x < j.heads) { // head_dim is at least 8, so there may be many
      for (int h = threadIdx.x; h < j.heads; h += THREADS) {
        int64_t s = layer * j.from.layer_slots + int64_t(p.src) * j.heads + h, d = layer * j.to.layer_slots + int64_t(p.dst) * j.heads + h;
        j.to.digest[d] = j.from.digest[s], j.to.filled[d] = j.from.filled[s];
      }
    }
    int64_t at = int64_t(chunk) * j.chunk;
    const uint4 *src = reinterpret_cast<const uint4 *>(j.from.rows + layer * j.from.layer_bytes + p.src * j.run + at);
    uint4 *dst = reinterpret_cast<uint4 *>(j.to.rows + layer * j.to.layer_bytes + p.dst * j.run + at);
    int n = int(min(int64_t(j.chunk), j.run - at)) / 16;
    for (int i = threadIdx.x; i < n; i += THREADS * DEPTH) {
      uint4 v[DEPTH];
#pragma unroll
      for (int k = 0; k < DEPTH; k++)
        if (i + k * THREADS < n) v[k] = load_once(src + i + k * THREADS);
#pragma unroll
      for (int k = 0; k < DEPTH; k++)
        if (i + k * THREADS < n) dst[i + k * THREADS] = v[k];
    }
  }
  if (!j.value) return;
  __syncthreads();
  if (threadIdx.x) return;
  __threadfence_system();
  if (atomicAdd(j.ticket, 1) != gridDim.x - 1) return;
  *j.ticket = 0;
  __threadfence_system();
  store_release(j.device_flag, j.value);
  store_release(j.host_flag, j.value);
}

// How a push of so many bytes is cut.
struct Cut {
  int threads, depth, ctas;
};

Cut cut(int64_t bytes, int sms, int most) {
  Cut c = {1024, 4, sms};
  if (bytes <= int64_t(4) << 20) c = {512, 1, sms};      // a chunk of 8 KiB: all multiprocessors share 1 MiB
  else if (bytes <= int64_t(32) << 20) c = {1024, 2, sms};
  if (most > 0) c.ctas = std::min(c.ctas, most);
  return c;
}

template <int N> int32_t start(const Cut &c, cudaStream_t s, const Job &j, const List<xk_pair, N> &pairs) {
  int64_t units = int64_t(j.n_layers) * j.n_pairs * j.chunks;
  int grid = int(std::max<int64_t>(1, std::min<int64_t>(c.ctas, units)));
  if (c.depth == 1) push_kernel<512, 1, N><<<grid, 512, 0, s>>>(j, pairs);
  else if (c.depth == 2) push_kernel<1024, 2, N><<<grid, 1024, 0, s>>>(j, pairs);
  else push_kernel<1024, 4, N><<<grid, 1024, 0, s>>>(j, pairs);
  XK_TRY(cudaGetLastError());
  return XK_OK;
}

// The flag goes with the last piece: the kernels before it are complete then.
int32_t by_kernel(xk_peer *p, const Job &whole, const Cut &c, const xk_pair *pairs) {
  return in_pieces(pairs, whole.n_pairs, [&](const auto &list, int first, int n) {
    Job j = whole;
    j.n_pairs = n;
    if (first + n < whole.n_pairs) j.value = 0;
    return start(c, p->stream, j, list);
  });
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
  for (int i = 0; i < xk_peer::LANES; i++) {
    XK_TRY(cudaEventRecord(p->join[i], p->lanes[i]));
    XK_TRY(cudaStreamWaitEvent(p->stream, p->join[i], 0));
  }
  Job seal = j;
  seal.run = 0, seal.chunks = 1;
  return by_kernel(p, seal, {512, 1, 8}, pairs);
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
  if (int64_t(a.n_layers) * a.n_pairs * div_up(xk_block_run(g), 8192) > INT32_MAX) return xk_fail(XK_INVALID, "push of %d blocks of %d layers: too many at once", a.n_pairs, a.n_layers);
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
  j.run = xk_block_run(g), j.heads = g.kv_heads, j.layer = a.layer, j.n_layers = a.n_layers, j.n_pairs = a.n_pairs;
  j.chunks = 1;
  j.ticket = p->ticket, j.value = a.value;
  int64_t line = int64_t(a.line) * XK_FLAG_STRIDE;
  j.device_flag = reinterpret_cast<uint64_t *>(p->region + Parts(g, p->blocks).flags + line);
  j.host_flag = reinterpret_cast<uint64_t *>(p->host_flags + line);
  if (a.n_pairs == 0) {
    List<xk_pair, 1> none = {};
    return a.value ? start(Cut{512, 1, 1}, p->stream, j, none) : XK_OK;
  }
  bool copy = a.engine == XK_COPY;
  if (a.engine == XK_AUTO) {
    int runs = 0;
    for (int i = 0; i < a.n_pairs; i += run_length(pairs + i, a.n_pairs - i)) runs++;
    copy = a.n_pairs * j.run / runs >= LONG_RUN;
  }
  if (copy) return by_engine(p, j, pairs);
  Cut how = cut(j.run * a.n_pairs * a.n_layers, c->sms, a.ctas);
  j.chunk = std::min<int64_t>(how.threads * how.depth * 16, j.run);
  j.chunks = div_up(j.run, j.chunk);
  return by_kernel(p, j, how, pairs);
}
