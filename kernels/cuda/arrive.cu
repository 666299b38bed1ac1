// Blocks that come from pinned memory layer by layer, for steps to compute behind
// (xk_arrive). One launch moves all layers of an arrival: nothing begins or ends
// between them. A ring takes pieces of 64 KiB for itself, so that what a new page
// of host memory costs is one ring's to wait for while the others' bytes flow. Of
// each layer every ring and every warp of digests counts up when its part has been
// written; another stream waits for the count of a group's last layer, and behind it
// the group is verified.
// Bound by PCIe. Oracle: steps, Gather and Verify (hostmove_test.go, arrive_test.go).
#include <algorithm>
#include <thread>

#include "bulk.cuh"

namespace {

constexpr int PIECE = 64 << 10;
constexpr int PARTS = 2 * RINGS; // of a layer, that a CTA counts
// That take from the host. 2 fill PCIe as 4 do (42.8 and 42.9 GB/s), and a projection
// loses two of its clusters to them, not four.
constexpr int CTAS = 2;

struct Load {
  Side pool;
  const uint8_t *host;
  ComingList places;
  int64_t run, layer_stride, digest_stride;
  int heads, first, layer, n_layers, n_places; // first: of the heads that the host has
  Cut cut;
  unsigned long long *landed; // by layer of the pool
};

// The chunks that are one ring's, in their order: those of all places in a layer are
// cut into pieces and dealt out to the rings, and the deal goes on in the next layer.
struct Walk {
  int layers, rings, chunks, items, piece, pieces; // items: chunks of a layer; piece: chunks of one; pieces: of a layer
  int layer, turn;                                 // from the first; which piece
  int place, part, left;                           // which chunk, and how many of the piece are left
  __host__ __device__ Walk(int layers, int n_places, const Cut &cut, int ring, int rings)
      : layers(layers), rings(rings), chunks(cut.chunks), items(n_places * cut.chunks), piece(PIECE / cut.chunk), pieces((items - 1) / piece + 1), layer(0), turn(ring) {
    begin();
  }
  __host__ __device__ bool more() const { return layer < layers; }
  __host__ __device__ void begin() {
    layer += turn / pieces, turn %= pieces;
    const int at = turn * piece;
    place = at / chunks, part = at - place * chunks, left = items - at < piece ? items - at : piece;
  }
  __host__ __device__ void next() {
    if (--left == 0) turn += rings, begin();
    else if (++part == chunks) part = 0, place++;
  }
};

// What this thread has seen written of a layer is there for who sees the count.
__device__ __forceinline__ void count_up(unsigned long long *landed) { asm volatile("red.release.gpu.global.add.u64 [%0], 1;" ::"l"(landed) : "memory"); }

// BACK: slots whose copies out may still be reading them.
template <int BACK> __device__ __forceinline__ void ring(const Load &j, uint8_t *slots, uint64_t *full, int number, int rings) {
  Walk in(j.n_layers, j.n_places, j.cut, number, rings), out = in;
  struct Item {
    const uint8_t *host;
    uint8_t *pool;
    int bytes;
  };
  auto item = [&](const Walk &w) {
    const Coming &e = j.places[w.place];
    const Bit bit = j.cut.bit(w.part);
    return Item{j.host + e.rows + w.layer * j.layer_stride + bit.host, j.pool.rows + (j.layer + w.layer) * j.pool.layer_bytes + e.block * j.run + bit.pool, bit.bytes};
  };
  int next = 0;
  auto begin = [&] {
    Item t = item(in);
    mbar_expect(full + next, t.bytes);
    bulk_in(slots + next * j.cut.chunk, t.host, t.bytes, full + next);
    if (++next == j.cut.slots) next = 0;
    in.next();
  };
  for (int k = 0; k < j.cut.slots - BACK && in.more(); k++) begin();
  int counted = 0; // layers
  for (int slot = 0, parity = 0; out.more();) {
    for (; counted < out.layer; counted++) count_up(j.landed + j.layer + counted); // those that have no more of this ring's
    mbar_wait(full + slot, parity);
    Item t = item(out);
    bulk_out(t.pool, slots + slot * j.cut.chunk, t.bytes);
    out.next();
    if (in.more()) {
      bulk_read_wait<BACK>();
      begin();
    }
    if (++slot == j.cut.slots) slot = 0, parity ^= 1;
    if (out.layer != counted) { // the writes end a microsecond later, and reads are under way meanwhile
      bulk_wait();
      fence_async_global();
    }
  }
  for (; counted < j.n_layers; counted++) count_up(j.landed + j.layer + counted);
}

// Some layers of a place at a time, since their digests are often one run, and PCIe
// wants long reads; but the first layer by itself.
__device__ __forceinline__ void digests(const Load &j, int worker, int workers) {
  constexpr int DEPTH = 4, TOGETHER = 8; // reads of host memory in flight a thread; layers
  for (int first = 0, layers; first < j.n_layers; first += layers) {
    layers = first ? min(TOGETHER, j.n_layers - first) : 1;
    const int n = layers * j.n_places * j.heads;
    for (int base = worker; base < n; base += DEPTH * workers) {
      uint64_t v[DEPTH];
      int64_t slot[DEPTH];
#pragma unroll
      for (int d = 0; d < DEPTH; d++) {
        int i = base + d * workers;
        if (i >= n) break;
        int block = i / j.heads, head = i - block * j.heads, at = block / layers, l = first + block - at * layers;
        const Coming &e = j.places[at];
        slot[d] = (j.layer + l) * j.pool.layer_slots + int64_t(e.block) * j.heads + head;
        v[d] = *(reinterpret_cast<const uint64_t *>(j.host + e.digests + l * j.digest_stride) + j.first + head);
        j.pool.filled[slot[d]] = uint16_t(e.filled);
      }
#pragma unroll
      for (int d = 0; d < DEPTH; d++)
        if (base + d * workers < n) j.pool.digest[slot[d]] = v[d];
    }
    __threadfence();
    __syncwarp();
    if (threadIdx.x % 32 == 0)
      for (int l = first; l < first + layers; l++) count_up(j.landed + j.layer + l);
  }
}

__global__ __launch_bounds__(RING_THREADS) void arrive_kernel(const __grid_constant__ Load j) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ uint64_t full[RINGS][RING_SLOTS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp >= RINGS) {
    digests(j, blockIdx.x * RINGS * 32 + threadIdx.x - RINGS * 32, gridDim.x * RINGS * 32);
  } else if (lane == 0) {
    for (int i = 0; i < j.cut.slots; i++) mbar_init(&full[warp][i], 1);
    fence_async_shared();
    fence_async_global();
    int number = blockIdx.x * RINGS + warp, rings = gridDim.x * RINGS;
    if (j.cut.slots >= 8) ring<4>(j, shared + warp * RING_BYTES, full[warp], number, rings);
    else ring<1>(j, shared + warp * RING_BYTES, full[warp], number, rings);
  }
}

// Layers of the group that begins with layer i of n and is verified together: few
// at the begin, where a step waits for the first, and at the end, where it has only
// the last to compute.
int group(int i, int n) { return std::min({4, std::max(i, 1), std::max((n - i) / 2, 1)}); }

// Puts the list where the device reads it, behind those that are in use; until leave.
int32_t enter(xk_ctx *c, const xk_place *places, const int32_t *first_pos, uint64_t n, xk_arrival *arrival, ComingList *out) {
  Arrivals &v = c->moves->arrivals;
  const uint64_t size = v.mask + 1, at = v.head & v.mask;
  if (v.head + n - v.freed > size) return xk_fail(XK_NOMEM, "%llu blocks are on their way: no room for %llu more", (unsigned long long)(v.head - v.freed), (unsigned long long)n);
  for (uint64_t i = 0; i < n; i++) {
    const xk_place &p = places[i];
    v.list[(at + i) & v.mask] = {p.rows, p.digests, p.block, p.filled, first_pos[i], 0};
  }
  const uint64_t before = std::min(n, size - at); // the corner
  cudaStream_t s = c->moves->ways[0].stream;
  XK_TRY(cudaMemcpyAsync(v.device + at, v.list + at, before * sizeof(Coming), cudaMemcpyHostToDevice, s));
  if (before < n) XK_TRY(cudaMemcpyAsync(v.device, v.list, (n - before) * sizeof(Coming), cudaMemcpyHostToDevice, s));
  *out = {v.device, v.head, v.mask};
  v.head += n, v.open.push_back(arrival), v.ends.push_back(v.head);
  return XK_OK;
}

void leave(Arrivals &v, xk_arrival *a) {
  std::replace(v.open.begin(), v.open.end(), a, static_cast<xk_arrival *>(nullptr));
  for (; !v.open.empty() && !v.open.front(); v.open.pop_front(), v.ends.pop_front()) v.freed = v.ends.front();
}

int32_t launch_all(xk_ctx *c, xk_region *r, const xk_move_args &a, const xk_place *places, const int32_t *first_pos, xk_arrival *arrival) {
  const xk_config &g = c->cfg;
  Arrivals &v = c->moves->arrivals;
  cudaStream_t s = c->moves->ways[0].stream;
  Load j = {Side(g, c->blocks, c->region), r->seen, {}, xk_block_run(g), a.layer_stride, a.digest_stride, g.kv_heads, g.first_kv_head, a.layer, a.n_layers, a.n_places, Cut(g), v.landed};
  XK_OK_OR_RETURN(enter(c, places, first_pos, uint64_t(a.n_places), arrival, &j.places));
  const int ctas = a.ctas ? a.ctas : CTAS;
  arrive_kernel<<<ctas, RING_THREADS, RINGS * RING_BYTES, s>>>(j);
  XK_TRY(cudaGetLastError());
  // From here on it will land, and who waits for the counts waits for it.
  for (int l = a.layer; l < a.layer + a.n_layers; l++) v.told[l] += uint64_t(ctas) * PARTS;
  for (int first = 0, n; first < a.n_layers; first += n) {
    n = group(first, a.n_layers);
    const int from = a.layer + first, last = from + n - 1;
    cudaEvent_t e;
    XK_TRY(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
    arrival->good.push_back(e), arrival->until.push_back(last + 1);
    // Every part of it comes behind that of the layers before. A kernel that waits would hold a multiprocessor.
    if (CUresult f = v.until(v.check, CUdeviceptr(v.landed + last), v.told[last], CU_STREAM_WAIT_VALUE_GEQ)) return xk_fail(XK_CUDA, "cuStreamWaitValue64: %d", int(f));
    XK_OK_OR_RETURN(xk_verify_coming(c, j.places, a.n_places, from, n));
    XK_TRY(cudaEventRecord(e, v.check));
  }
  return XK_OK;
}

void forget(xk_arrival *a) {
  Moves &m = *a->c->moves;
  if (!a->gate) {
    std::lock_guard<std::mutex> hold(m.ways[0].mu);
    leave(m.arrivals, a);
  }
  for (cudaEvent_t e : a->good) cudaEventDestroy(e);
  delete a;
}

} // namespace

int32_t xk_arrivals_open(xk_ctx *c) {
  Arrivals &v = c->moves->arrivals;
  XK_OK_OR_RETURN(xk_driver("cuStreamWaitValue64", &v.until));
  int least, greatest;
  XK_TRY(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  // Before the step, and behind the moves: they need few multiprocessors, but
  // whole ones, which thousands of CTAs that verify would leave them last.
  XK_TRY(cudaStreamCreateWithPriority(&v.check, cudaStreamNonBlocking, std::min(greatest + 1, least)));
  XK_OK_OR_RETURN(xk_alloc_pinned(c, &v.wrong, c->blocks));
  int64_t size = 1;
  while (size < 2 * c->blocks) size *= 2; // entries of blocks that have come again behind an arrival that is still open
  v.mask = uint64_t(size - 1);
  XK_OK_OR_RETURN(xk_alloc_pinned(c, &v.list, size));
  XK_OK_OR_RETURN(xk_alloc(c, &v.device, size));
  v.told.resize(c->cfg.layers);
  XK_OK_OR_RETURN(xk_alloc(c, &v.landed, c->cfg.layers, true));
  XK_TRY(cudaFuncSetAttribute(arrive_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, RINGS * RING_BYTES));
  return XK_OK;
}

void xk_arrivals_close(xk_ctx *c) {
  if (c->moves->arrivals.check) cudaStreamDestroy(c->moves->arrivals.check);
}

int32_t xk_arrive(xk_ctx *c, xk_region *r, const xk_move_args *args, const xk_place *places, const int32_t *first_pos, xk_arrival **out) {
  const xk_move_args &a = *args;
  *out = nullptr;
  XK_OK_OR_RETURN(xk_move_check(c, r, a, places));
  if (a.to_host) return xk_fail(XK_INVALID, "blocks arrive in the pool, not in host memory");
  XK_TRY(cudaSetDevice(c->cfg.device));
  for (int i = 0; i < a.n_places; i++)
    if (first_pos[i] < 0 || first_pos[i] > INT32_MAX - 256 || places[i].filled < 1) return xk_fail(XK_INVALID, "block %d: %d rows from position %d", places[i].block, places[i].filled, first_pos[i]);
  Moves &m = *c->moves;
  xk_arrival *v = new xk_arrival{c, a.layer};
  for (int i = 0; i < a.n_places; i++) {
    v->blocks.push_back(places[i].block);
    m.arrivals.wrong[places[i].block] = 0; // nobody else's: a block has one writer
  }
  int32_t s;
  {
    std::lock_guard<std::mutex> hold(m.ways[0].mu);
    s = launch_all(c, r, a, places, first_pos, v);
  }
  if (s != XK_OK) { // what has begun must end before anybody reuses the memory
    cudaStreamSynchronize(m.ways[0].stream);
    cudaStreamSynchronize(m.arrivals.check);
    forget(v);
    return s;
  }
  *out = v;
  return XK_OK;
}

int32_t xk_gate(xk_ctx *c, xk_arrival **out) {
  xk_arrival *v = new xk_arrival{c, 0};
  v->gate = true;
  *out = v;
  return XK_OK;
}

int32_t xk_gate_open(xk_arrival *v, int32_t layers) {
  v->open.store(layers, std::memory_order_release);
  return XK_OK;
}

// A layer comes in some 100 us: too short to sleep.
void xk_gate_await(const xk_arrival *v, int layers) {
  while (v->open.load(std::memory_order_acquire) < layers) std::this_thread::yield();
}

int32_t xk_arrived(xk_arrival *v, int32_t *layers) {
  XK_TRY(cudaSetDevice(v->c->cfg.device));
  *layers = v->first;
  for (size_t k = 0; k < v->good.size(); k++) {
    cudaError_t e = cudaEventQuery(v->good[k]);
    if (e == cudaErrorNotReady) break;
    if (e != cudaSuccess) return xk_fail(XK_CUDA, "cudaEventQuery: %s", cudaGetErrorString(e));
    *layers = v->until[k];
  }
  return XK_OK;
}

int32_t xk_arrival_bad(xk_arrival *v, uint8_t *bad) {
  int32_t layers;
  XK_OK_OR_RETURN(xk_arrived(v, &layers));
  if (layers != v->until.back()) return xk_fail(XK_LATE, "%d of %d layers have arrived", layers, v->until.back());
  for (size_t i = 0; i < v->blocks.size(); i++) bad[i] = v->c->moves->arrivals.wrong[v->blocks[i]];
  return XK_OK;
}

int32_t xk_arrival_free(xk_arrival *v) {
  if (!v) return XK_OK;
  cudaSetDevice(v->c->cfg.device);
  forget(v);
  return XK_OK;
}
