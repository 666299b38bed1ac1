// Moves blocks between the pool and pinned host memory, by the rings of bulk.cuh,
// and long runs by the copy engine.
// Bound by PCIe. Oracle: Gather and Digest, block by block (move_test.go).
#include "bulk.cuh"

namespace {

struct Job {
  Side pool;
  uint8_t *host;
  int64_t run, layer_stride, digest_stride;
  int heads, first, layer, n_layers, n_places; // first: of the heads that the host has
  Cut cut;
  int chunks; // of a block; 0: digests only
  bool to_host;
};

// BACK: slots whose copies out may still be reading them.
template <int BACK, int N>
__device__ __forceinline__ void ring(const Job &j, const List<xk_place, N> &places, uint8_t *slots, uint64_t *full, int worker, int workers) {
  struct Item {
    uint8_t *pool, *host;
    int bytes;
  };
  const int items = j.n_layers * j.n_places * j.chunks;
  auto item = [&](int i) {
    // A place's layers follow each other: in host memory they are often one run,
    // and each new page of it costs the way there a look at more page tables.
    int block = i / j.chunks, chunk = i - block * j.chunks, at_place = block / j.n_layers, l = block - at_place * j.n_layers;
    const xk_place &p = places.at[at_place];
    const Bit bit = j.cut.bit(chunk);
    Item t;
    t.pool = j.pool.rows + (j.layer + l) * j.pool.layer_bytes + p.block * j.run + bit.pool;
    t.host = j.host + p.rows + l * j.layer_stride + bit.host;
    t.bytes = bit.bytes;
    return t;
  };
  const int n = worker < items ? (items - 1 - worker) / workers + 1 : 0, ahead = j.cut.slots - BACK;
  auto begin = [&](int k, int slot) {
    Item t = item(worker + k * workers);
    mbar_expect(full + slot, t.bytes);
    bulk_in(slots + slot * j.cut.chunk, j.to_host ? t.pool : t.host, t.bytes, full + slot);
  };
  for (int k = 0; k < ahead && k < n; k++) begin(k, k);
  int slot = 0, next = ahead, parity = 0;
  for (int k = 0; k < n; k++) {
    mbar_wait(full + slot, parity);
    Item t = item(worker + k * workers);
    bulk_out(j.to_host ? t.host : t.pool, slots + slot * j.cut.chunk, t.bytes);
    if (k + ahead < n) {
      bulk_read_wait<BACK>();
      begin(k + ahead, next);
    }
    if (++slot == j.cut.slots) slot = 0, parity ^= 1;
    if (++next == j.cut.slots) next = 0;
  }
  bulk_wait();
}

template <int N>
__device__ __forceinline__ void digests(const Job &j, const List<xk_place, N> &places, int worker, int workers) {
  // A place's layers follow each other: in host memory they are often one run,
  // and PCIe wants long writes.
  const int n = j.n_layers * j.n_places * j.heads;
  constexpr int DEPTH = 4; // reads of host memory in flight a thread
  for (int base = worker; base < n; base += DEPTH * workers) {
    uint64_t v[DEPTH];
    uint64_t *to[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
      int i = base + d * workers;
      if (i >= n) break;
      int block = i / j.heads, head = i - block * j.heads, at = block / j.n_layers, l = block - at * j.n_layers;
      const xk_place &p = places.at[at];
      int64_t slot = (j.layer + l) * j.pool.layer_slots + int64_t(p.block) * j.heads + head;
      uint64_t *host = reinterpret_cast<uint64_t *>(j.host + p.digests + l * j.digest_stride) + j.first + head;
      v[d] = j.to_host ? j.pool.digest[slot] : *host;
      to[d] = j.to_host ? host : j.pool.digest + slot;
      if (!j.to_host) j.pool.filled[slot] = uint16_t(p.filled);
    }
#pragma unroll
    for (int d = 0; d < DEPTH; d++)
      if (base + d * workers < n) *to[d] = v[d];
  }
}

template <int N> __global__ __launch_bounds__(RING_THREADS) void move_kernel(const __grid_constant__ Job j, const __grid_constant__ List<xk_place, N> places) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ uint64_t full[RINGS][RING_SLOTS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp >= RINGS) {
    digests(j, places, blockIdx.x * RINGS * 32 + threadIdx.x - RINGS * 32, gridDim.x * RINGS * 32);
  } else if (lane == 0 && j.chunks) {
    for (int i = 0; i < j.cut.slots; i++) mbar_init(&full[warp][i], 1);
    fence_async_shared();
    fence_async_global();
    int worker = blockIdx.x * RINGS + warp, workers = gridDim.x * RINGS;
    if (j.cut.slots >= 8) ring<4>(j, places, shared + warp * RING_BYTES, full[warp], worker, workers);
    else ring<1>(j, places, shared + warp * RING_BYTES, full[warp], worker, workers);
  }
}

template <int N> int32_t start(const Job &j, int ctas, cudaStream_t s, const List<xk_place, N> &l) {
  size_t smem = j.chunks ? RINGS * RING_BYTES : 0;
  move_kernel<N><<<ctas, RING_THREADS, smem, s>>>(j, l);
  XK_TRY(cudaGetLastError());
  return XK_OK;
}

int32_t by_kernel(const Job &whole, int ctas, cudaStream_t s, const xk_place *places) {
  return in_pieces(places, whole.n_places, [&](const auto &list, int, int n) {
    Job j = whole;
    j.n_places = n;
    return start(j, ctas, s, list);
  });
}

int run_length(const Job &j, const xk_place *p, int n) {
  int k = 1;
  while (k < n && p[k].block == p[0].block + k && p[k].rows == p[0].rows + k * j.run) k++;
  return k;
}

// All layers of a run are one copy: rows of a matrix whose pitch is a layer. Three
// streams take turns, so that one copy's start hides behind others' bytes, and the
// digests behind all of them. Nothing orders a move behind the one before it: its
// caller has waited for that if they share memory.
int32_t by_engine(const Job &j, Moves::Way &w, const xk_place *places) {
  Job rest = j;
  rest.chunks = 0;
  XK_OK_OR_RETURN(by_kernel(rest, 1, w.side[0], places));
  constexpr int64_t MOST = INT32_MAX; // pitch
  int turn = 0;
  for (int i = 0, k; i < j.n_places; i += k) {
    k = run_length(j, places + i, j.n_places - i);
    const int at = turn++ % (1 + Moves::Way::SIDES);
    cudaStream_t s = at ? w.side[at - 1] : w.stream;
    size_t width = k * j.run;
    const bool matrix = j.n_layers > 1 && j.pool.layer_bytes <= MOST && j.layer_stride <= MOST && int64_t(width) <= j.layer_stride;
    for (int l = 0; l < j.n_layers; l += matrix ? j.n_layers : 1) {
      uint8_t *pool = j.pool.rows + (j.layer + l) * j.pool.layer_bytes + places[i].block * j.run, *host = j.host + places[i].rows + l * j.layer_stride;
      uint8_t *dst = j.to_host ? host : pool, *src = j.to_host ? pool : host;
      cudaMemcpyKind kind = j.to_host ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice;
      if (!matrix) XK_TRY(cudaMemcpyAsync(dst, src, width, kind, s));
      else if (j.to_host) XK_TRY(cudaMemcpy2DAsync(dst, j.layer_stride, src, j.pool.layer_bytes, width, j.n_layers, kind, s));
      else XK_TRY(cudaMemcpy2DAsync(dst, j.pool.layer_bytes, src, j.layer_stride, width, j.n_layers, kind, s));
    }
  }
  for (int i = 0; i < Moves::Way::SIDES; i++) {
    XK_TRY(cudaEventRecord(w.join[i], w.side[i]));
    XK_TRY(cudaStreamWaitEvent(w.stream, w.join[i], 0));
  }
  return XK_OK;
}

// Bytes of a run in a layer from which the engine is chosen. At 64 KiB the kernel
// is 5 % faster one way, and 25 % slower when the other way is in use as well; and
// the engine leaves the multiprocessors to the model.
constexpr int64_t LONG_RUN = 64 << 10;

// [at, at + size) in every layer of a region of so many bytes.
bool inside(int64_t bytes, int64_t at, int64_t size, int64_t stride, int layers) {
  if (at < 0 || stride < 0 || size > bytes || at > bytes - size) return false;
  return layers == 1 || stride <= (bytes - size - at) / (layers - 1);
}

Job job(xk_ctx *c, const xk_region *r, const xk_move_args &a) {
  const xk_config &g = c->cfg;
  Job j = {.cut = Cut(g)};
  j.pool = Side(g, c->blocks, c->region), j.host = r->seen;
  j.run = xk_block_run(g), j.layer_stride = a.layer_stride, j.digest_stride = a.digest_stride;
  j.heads = g.kv_heads, j.first = g.first_kv_head, j.layer = a.layer, j.n_layers = a.n_layers, j.n_places = a.n_places, j.to_host = a.to_host;
  j.chunks = j.cut.chunks;
  return j;
}

template <int N> int32_t allow() {
  XK_TRY(cudaFuncSetAttribute(move_kernel<N>, cudaFuncAttributeMaxDynamicSharedMemorySize, RINGS * RING_BYTES));
  return XK_OK;
}

} // namespace

int32_t xk_move_check(xk_ctx *c, const xk_region *r, const xk_move_args &a, const xk_place *places) {
  const xk_config &g = c->cfg;
  if (!c->blocks || !xk_layers_ok(g, a.layer, a.n_layers) || a.n_places < 1 || a.n_places > 1 << 24 || a.ctas < 0 || a.ctas > 8 || a.engine < XK_AUTO || a.engine > XK_COPY ||
      a.layer_stride % 16 || a.digest_stride % 8)
    return xk_fail(XK_INVALID, "move of %d blocks, layers %d+%d of %d, by engine %d, %d CTAs, strides %lld and %lld", a.n_places, a.layer, a.n_layers, g.layers, a.engine, a.ctas,
                   (long long)a.layer_stride, (long long)a.digest_stride);
  for (int i = 0; i < a.n_places; i++) {
    const xk_place &p = places[i];
    if (p.block < 0 || p.block >= c->blocks || p.filled < 0 || p.filled > g.block_tokens || p.rows % 16 || p.digests % 8 ||
        !inside(r->bytes, p.rows, xk_block_bytes(g, g.all_kv_heads), a.layer_stride, a.n_layers) || !inside(r->bytes, p.digests, int64_t(g.all_kv_heads) * 8, a.digest_stride, a.n_layers))
      return xk_fail(XK_INVALID, "move of block %d of %d: rows at %lld, digests at %lld, %lld bytes", p.block, c->blocks, (long long)p.rows, (long long)p.digests, (long long)r->bytes);
  }
  if (int64_t(a.n_layers) * a.n_places * std::max<int64_t>(div_up(xk_block_run(g), 1024), g.kv_heads) > INT32_MAX) return xk_fail(XK_INVALID, "move of %d blocks: too many at once", a.n_places);
  return XK_OK;
}

int32_t xk_hostmove_init() {
  XK_OK_OR_RETURN(allow<1024 / sizeof(xk_place)>());
  return allow<32000 / sizeof(xk_place)>();
}

int32_t xk_host_register(xk_ctx *c, void *at, int64_t bytes, xk_region **out) {
  *out = nullptr;
  if (!at || bytes < 1 || reinterpret_cast<uintptr_t>(at) % 4096) return xk_fail(XK_INVALID, "register %lld bytes: want whole pages", (long long)bytes);
  XK_TRY(cudaSetDevice(c->cfg.device));
  cudaError_t e = cudaHostRegister(at, size_t(bytes), cudaHostRegisterMapped | cudaHostRegisterPortable);
  if (e != cudaSuccess) {
    cudaGetLastError();
    return xk_fail(e == cudaErrorMemoryAllocation ? XK_NOMEM : XK_CUDA, "cudaHostRegister of %lld bytes: %s", (long long)bytes, cudaGetErrorString(e));
  }
  void *seen;
  e = cudaHostGetDevicePointer(&seen, at, 0);
  if (e != cudaSuccess) { // the caller is about to unmap it
    cudaHostUnregister(at);
    cudaGetLastError();
    return xk_fail(XK_CUDA, "cudaHostGetDevicePointer: %s", cudaGetErrorString(e));
  }
  *out = new xk_region{c->cfg.device, static_cast<uint8_t *>(at), static_cast<uint8_t *>(seen), bytes};
  return XK_OK;
}

int32_t xk_host_release(xk_region *r) {
  XK_TRY(cudaSetDevice(r->device));
  XK_TRY(cudaHostUnregister(r->host));
  delete r;
  return XK_OK;
}

int32_t xk_move(xk_ctx *c, xk_region *r, const xk_move_args *args, const xk_place *places, xk_mark **out) {
  const xk_move_args &a = *args;
  *out = nullptr;
  XK_OK_OR_RETURN(xk_move_check(c, r, a, places));
  XK_TRY(cudaSetDevice(c->cfg.device));
  Job j = job(c, r, a);
  const bool whole = c->cfg.kv_heads == c->cfg.all_kv_heads; // else its heads are short runs
  bool copy = a.engine == XK_COPY && whole;
  if (a.engine == XK_AUTO && whole) {
    int runs = 0;
    for (int i = 0; i < a.n_places; i += run_length(j, places + i, a.n_places - i)) runs++;
    copy = a.n_places * j.run / runs >= LONG_RUN && (a.n_layers == 1 || j.pool.layer_bytes <= INT32_MAX); // else a call a layer
  }
  Moves::Way &w = c->moves->ways[a.to_host ? 1 : 0];
  std::lock_guard<std::mutex> hold(w.mu);
  int32_t s = copy ? by_engine(j, w, places) : by_kernel(j, a.ctas ? a.ctas : 4, w.stream, places);
  if (s == XK_OK) s = xk_mark_make(c, w.stream, out);
  if (s != XK_OK) { // what has begun must end before anybody reuses the memory
    cudaStreamSynchronize(w.stream);
    for (cudaStream_t side : w.side) cudaStreamSynchronize(side);
    cudaGetLastError(); // told, and no later move's
  }
  return s;
}
