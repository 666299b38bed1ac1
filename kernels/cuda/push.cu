// Pushes blocks into a peer's pool: rows, digests and row counts, then a flag.
//
// A unit is a chunk of a block of a layer: of the whole block or, where the two pools
// have not the same KV heads, of a segment that both have in one run: the K rows of
// those heads, their V rows, and either's scales. Each CTA has a run of units and copies
// them with 16-byte loads and stores, 64 bytes in flight a thread. Where the next
// units lie is looked up while these are copied, and digests are loaded before a
// batch's rows and stored behind them, so that nobody waits for either. What ends
// a push: each CTA's stores, a barrier, one thread's fence for the whole system, a
// ticket; the last CTA sets the flag, in the peer's device memory and in host
// memory (PTX ISA, "Memory Consistency Model": the barrier and the ticket make the
// fence cumulative).
//
// A short list of blocks travels as a parameter, a long one lies in a ring of
// pinned memory: 32 KB of parameters delay a launch by some 8 us, the first read
// over PCIe by one. A push that waits for an event has its list copied to the
// device meanwhile.
//
// Long runs of consecutive blocks go by the copy engine instead, in one batch,
// while the kernel takes their digests.
// Bound by the link: 369 GB/s for stores, 397 for the copy engine over NVLink 4.
// Oracle: host copies of both pools (move_test.go).
#include <algorithm>
#include <cstring>
#include <vector>

#include "move.cuh"

namespace {

constexpr int SMALL = 128; // pairs of a list that travels as a parameter

// Bytes that lie in one run in blocks of both sides.
struct Segment {
  int64_t from, to, bytes; // offsets in a block
  int chunk;               // its first
};
constexpr int SEGMENTS = 4;

// Of a side: bytes of a block of a layer, its KV heads, and which is the first that goes.
struct Blocks {
  int64_t run;
  int heads, first;
};

struct Job {
  Side from, to;
  Blocks src, dst;
  int n_segments;
  Segment segment[SEGMENTS];
  int heads, layer, n_layers, n_pairs; // heads: of digests, 0 for none
  bool rows;          // else digests only
  int chunk, chunks;  // bytes; chunks of a block, of all segments
  FastDiv each;       // vectors of a chunk
  const xk_pair *list; // null: the parameter
  Finish finish;
};

constexpr int THREADS = 512, DEPTH = 4, BATCH = 16; // DEPTH: vectors in flight a thread; BATCH: units

struct Unit {
  const uint4 *src;
  uint4 *dst;
  int64_t from, to; // digests of its block, -1 for chunks but the first
  int vectors;
};

__global__ __launch_bounds__(THREADS) void push_kernel(const __grid_constant__ Job j, const __grid_constant__ List<xk_pair, SMALL> small) {
  __shared__ Unit batch[BATCH];
  const int units = j.n_layers * j.n_pairs * j.chunks;
  const int first = int(int64_t(units) * blockIdx.x / gridDim.x), end = int(int64_t(units) * (blockIdx.x + 1) / gridDim.x);
  int block = 0;
  xk_pair next = {};
  auto look = [&](int u) { // the pair of unit u, which a thread waits for when it uses it
    block = u / j.chunks;
    int i = block - block / j.n_pairs * j.n_pairs;
    next = j.list ? j.list[i] : small.at[i];
  };
  if (first + int(threadIdx.x) < end && threadIdx.x < BATCH) look(first + threadIdx.x);
  for (int base = first; base < end; base += BATCH) {
    const int n = min(BATCH, end - base);
    if (threadIdx.x < n) {
      const int u = base + threadIdx.x, chunk = u - block * j.chunks, layer = j.layer + block / j.n_pairs;
      int g = 0;
      while (g + 1 < j.n_segments && chunk >= j.segment[g + 1].chunk) g++;
      const Segment &s = j.segment[g];
      const int64_t at = int64_t(chunk - s.chunk) * j.chunk;
      Unit t;
      t.src = reinterpret_cast<const uint4 *>(j.from.rows + layer * j.from.layer_bytes + next.src * j.src.run + s.from + at);
      t.dst = reinterpret_cast<uint4 *>(j.to.rows + layer * j.to.layer_bytes + next.dst * j.dst.run + s.to + at);
      t.vectors = j.chunk ? int(min(int64_t(j.chunk), s.bytes - at)) / 16 : 0;
      t.from = chunk ? -1 : layer * j.from.layer_slots + int64_t(next.src) * j.src.heads + j.src.first;
      t.to = layer * j.to.layer_slots + int64_t(next.dst) * j.dst.heads + j.dst.first;
      batch[threadIdx.x] = t;
      if (u + BATCH < end) look(u + BATCH);
    }
    __syncthreads();

    uint64_t digest = 0;
    uint16_t filled = 0;
    int64_t to = -1;
    auto load_digest = [&](int i) {
      const int u = i / j.heads, head = i - u * j.heads;
      to = -1;
      if (batch[u].from < 0) return;
      digest = j.from.digest[batch[u].from + head], filled = j.from.filled[batch[u].from + head];
      to = batch[u].to + head;
    };
    auto store_digest = [&] {
      if (to >= 0) j.to.digest[to] = digest, j.to.filled[to] = filled;
    };
    if (threadIdx.x < n * j.heads) load_digest(threadIdx.x);
    if (j.each.d < THREADS * DEPTH) { // of several units at once, so that as much is in flight
      const int all = j.chunk ? n * j.each.d : 0;
      for (int i = threadIdx.x; i < all; i += THREADS * DEPTH) {
        uint4 v[DEPTH];
        uint4 *dst[DEPTH];
#pragma unroll
        for (int k = 0; k < DEPTH; k++) {
          const int at = i + k * THREADS, u = j.each.div(at), o = at - u * j.each.d;
          dst[k] = at < all && o < batch[u].vectors ? batch[u].dst + o : nullptr;
          if (dst[k]) v[k] = load_once(batch[u].src + o);
        }
#pragma unroll
        for (int k = 0; k < DEPTH; k++)
          if (dst[k]) *dst[k] = v[k];
      }
    } else for (int u = 0; u < n; u++) {
      const uint4 *src = batch[u].src;
      uint4 *dst = batch[u].dst;
      const int vectors = batch[u].vectors;
      for (int i = threadIdx.x; i < vectors; i += THREADS * DEPTH) {
        uint4 v[DEPTH];
#pragma unroll
        for (int k = 0; k < DEPTH; k++)
          if (i + k * THREADS < vectors) v[k] = load_once(src + i + k * THREADS);
#pragma unroll
        for (int k = 0; k < DEPTH; k++)
          if (i + k * THREADS < vectors) dst[i + k * THREADS] = v[k];
      }
    }
    store_digest();
    for (int i = threadIdx.x + THREADS; i < n * j.heads; i += THREADS) {
      load_digest(i);
      store_digest();
    }
    __syncthreads();
  }
  finish_push(j.finish);
}

// A chunk is 32 KiB, which a CTA has in flight at once; less where there would
// be too few for all of them.
int32_t start(xk_peer *p, int ctas, Job j, const List<xk_pair, SMALL> &list) {
  const int64_t blocks = int64_t(j.n_layers) * j.n_pairs;
  const auto chunks = [&] {
    int n = 0;
    for (int g = 0; g < j.n_segments; g++) j.segment[g].chunk = n, n += div_up(j.segment[g].bytes, j.chunk);
    return n;
  };
  j.chunk = int(std::min<int64_t>(j.rows ? j.segment[0].bytes : 0, THREADS * DEPTH * 16)); // no segment is longer
  while (j.chunk > THREADS * 16 && blocks * chunks() < ctas) j.chunk = int(round_up(j.chunk / 2, 16));
  j.chunks = j.chunk ? chunks() : 1, j.each = FastDiv(std::max(j.chunk / 16, 1));
  int grid = int(std::max<int64_t>(1, std::min<int64_t>(ctas, blocks * j.chunks)));
  push_kernel<<<grid, THREADS, 0, p->stream>>>(j, list);
  XK_TRY(cudaGetLastError());
  return XK_OK;
}

// What a push waits for.
struct When {
  cudaEvent_t events[2] = {};
  bool any() const { return events[0] || events[1]; }
  int32_t wait(cudaStream_t s) const {
    for (cudaEvent_t e : events)
      if (e) XK_TRY(cudaStreamWaitEvent(s, e, 0));
    return XK_OK;
  }
};

int32_t by_kernel(xk_peer *p, const When &when, const Job &whole, int ctas, const xk_pair *pairs) {
  List<xk_pair, SMALL> list;
  Job j = whole;
  uint64_t head;
  if (whole.n_pairs <= SMALL) {
    XK_OK_OR_RETURN(when.wait(p->stream));
    memcpy(list.at, pairs, whole.n_pairs * sizeof *pairs);
    return start(p, ctas, j, list);
  }
  if (xk_pair *at = ring_room(p->ring, whole.n_pairs, &head)) {
    memcpy(at, pairs, whole.n_pairs * sizeof *pairs);
    j.list = at, j.finish.freed = p->ring.freed, j.finish.head = head;
    if (when.any()) {
      xk_pair *there = p->ring.device + (at - p->ring.pairs);
      XK_TRY(cudaMemcpyAsync(there, at, whole.n_pairs * sizeof *pairs, cudaMemcpyHostToDevice, p->stream));
      j.list = there;
    }
    XK_OK_OR_RETURN(when.wait(p->stream));
    XK_OK_OR_RETURN(start(p, ctas, j, list));
    p->ring.head = head;
    return XK_OK;
  }
  XK_OK_OR_RETURN(when.wait(p->stream));
  for (int first = 0; first < whole.n_pairs; first += SMALL) { // in pieces, the flag with the last
    j.n_pairs = std::min(SMALL, whole.n_pairs - first);
    memcpy(list.at, pairs + first, j.n_pairs * sizeof *pairs);
    j.finish.value = first + j.n_pairs < whole.n_pairs ? 0 : whole.finish.value;
    XK_OK_OR_RETURN(start(p, ctas, j, list));
  }
  return XK_OK;
}

int run_length(const xk_pair *pairs, int n) {
  int k = 1;
  while (k < n && pairs[k].src == pairs[0].src + k && pairs[k].dst == pairs[0].dst + k) k++;
  return k;
}

// So many digests take some microseconds, less than a launch of their own.
constexpr int64_t FEW_DIGESTS = 8192;

int32_t by_engine(xk_peer *p, const When &when, const Job &j, const xk_pair *pairs) {
  std::vector<void *> to;
  std::vector<const void *> from;
  std::vector<size_t> sizes;
  const bool whole = j.segment[0].bytes == j.src.run && j.src.run == j.dst.run;
  for (int layer = j.layer; layer < j.layer + j.n_layers; layer++) {
    for (int i = 0, k; i < j.n_pairs; i += k) {
      k = whole ? run_length(pairs + i, j.n_pairs - i) : 1;
      for (int g = 0; g < j.n_segments; g++) {
        from.push_back(j.from.rows + layer * j.from.layer_bytes + pairs[i].src * j.src.run + j.segment[g].from);
        to.push_back(j.to.rows + layer * j.to.layer_bytes + pairs[i].dst * j.dst.run + j.segment[g].to);
        sizes.push_back(k * j.segment[g].bytes);
      }
    }
  }
  Job rest = j; // digests: of a few blocks behind the copies, with the flag, else beside them
  rest.rows = false;
  const bool behind = int64_t(j.n_layers) * j.n_pairs * j.heads <= FEW_DIGESTS;
  XK_OK_OR_RETURN(when.wait(p->stream));
  XK_TRY(cudaEventRecord(p->fork, p->stream));
  XK_TRY(cudaStreamWaitEvent(p->engine, p->fork, 0));
  cudaMemcpyAttributes how = {};
  how.srcAccessOrder = cudaMemcpySrcAccessOrderStream, how.flags = cudaMemcpyFlagPreferOverlapWithCompute;
  size_t all = 0;
  XK_TRY(cudaMemcpyBatchAsync(to.data(), from.data(), sizes.data(), to.size(), &how, &all, 1, p->engine));
  if (j.heads && !behind) {
    rest.finish.value = 0;
    XK_OK_OR_RETURN(by_kernel(p, {}, rest, 4, pairs));
  }
  XK_TRY(cudaEventRecord(p->join, p->engine));
  XK_TRY(cudaStreamWaitEvent(p->stream, p->join, 0));
  rest.finish.value = j.finish.value;
  if (j.heads && behind) return by_kernel(p, {}, rest, 2, pairs);
  rest.n_pairs = 0;
  return j.finish.value ? by_kernel(p, {}, rest, 1, pairs) : XK_OK;
}

// Bytes on average from which AUTO takes the copy engine. It is as fast for runs of
// 64 KiB, but each costs the calling thread some 0.7 us: a call that is to return
// soon wants fewer.
constexpr int64_t LONG_RUN = 256 << 10;

// The heads that go: their segments of either block.
void cut(Job &j, const xk_config &from, const xk_config &to, int from_head, int to_head, int heads) {
  j.src = {xk_block_run(from), from.kv_heads, from_head}, j.dst = {xk_block_run(to), to.kv_heads, to_head};
  j.n_segments = 0;
  if (heads == from.kv_heads && heads == to.kv_heads) {
    j.segment[j.n_segments++] = {0, 0, j.src.run, 0};
    return;
  }
  const auto add = [&](int64_t from_at, int64_t to_at, int64_t head_bytes) { // of K's rows or scales, and V's behind them
    for (int kv = 0; kv < 2; kv++)
      j.segment[j.n_segments++] = {from_at + (int64_t(kv) * from.kv_heads + from_head) * head_bytes, to_at + (int64_t(kv) * to.kv_heads + to_head) * head_bytes, heads * head_bytes, 0};
  };
  const int64_t head_bytes = int64_t(from.block_tokens) * xk_row_bytes(from);
  add(0, 0, head_bytes);
  if (from.kv_fp8) add(2 * from.kv_heads * head_bytes, 2 * to.kv_heads * head_bytes, int64_t(from.block_tokens) * 4);
}

int32_t check(const xk_peer *p, const xk_push_args &a, const xk_pair *pairs) {
  const xk_config &g = p->c->cfg;
  if (a.heads) {
    if (a.heads < 0 || a.from_head < 0 || a.to_head < 0 || a.from_head > g.kv_heads - a.heads || a.to_head > p->shape.kv_heads - a.heads || g.block_tokens != p->shape.block_tokens || xk_row_type(g) != xk_row_type(p->shape))
      return xk_fail(XK_INVALID, "push of %d KV heads from %d on to %d: blocks of %d tokens, %d heads and %s rows, the peer's have %d, %d and %s", a.heads, a.from_head, a.to_head, g.block_tokens, g.kv_heads, xk_row_name(g), p->shape.block_tokens, p->shape.kv_heads, xk_row_name(p->shape));
  } else if (!xk_same_blocks(p->shape, g))
    return xk_fail(XK_INVALID, "push of whole blocks of %d tokens, %d heads and %s rows, the peer's have %d, %d and %s", g.block_tokens, g.kv_heads, xk_row_name(g), p->shape.block_tokens, p->shape.kv_heads, xk_row_name(p->shape));
  if (!xk_layers_ok(g, a.layer, a.n_layers) || a.n_pairs < 0 || a.n_pairs > p->blocks || a.ctas < 0 || a.engine < XK_AUTO || a.engine > XK_COPY ||
      a.line < 0 || a.line >= XK_FLAG_LINES)
    return xk_fail(XK_INVALID, "push of %d blocks into %d, layers %d+%d of %d, by engine %d, %d CTAs, flag line %d", a.n_pairs, p->blocks, a.layer, a.n_layers, g.layers, a.engine, a.ctas, a.line);
  for (int i = 0; i < a.n_pairs; i++)
    if (pairs[i].src < 0 || pairs[i].src >= p->c->blocks || pairs[i].dst < 0 || pairs[i].dst >= p->blocks)
      return xk_fail(XK_INVALID, "push of block %d to %d: pools have %d and %d", pairs[i].src, pairs[i].dst, p->c->blocks, p->blocks);
  if (int64_t(a.n_layers) * a.n_pairs * std::max(div_up(xk_block_run(g), 8192) + SEGMENTS, g.kv_heads) > INT32_MAX) return xk_fail(XK_INVALID, "push of %d blocks of %d layers: too many at once", a.n_pairs, a.n_layers);
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
  When when;
  when.events[0] = static_cast<cudaEvent_t>(a.after);
  if (a.after_step) {
    int half = int((c->launched + 1) % 2); // of the step launched last
    if (!c->launched || !c->layer_events[half]) return xk_fail(XK_INVALID, "the step launched last records no layers");
    when.events[1] = c->layer_done[half][a.layer + a.n_layers - 1];
  }
  Job j = {};
  j.from = Side(g, c->blocks, c->region), j.to = p->to;
  const int heads = a.heads ? a.heads : g.kv_heads;
  cut(j, g, p->shape, a.heads ? a.from_head : 0, a.heads ? a.to_head : 0, heads);
  j.heads = a.rows_only ? 0 : heads, j.layer = a.layer, j.n_layers = a.n_layers, j.n_pairs = a.n_pairs;
  j.rows = true, j.finish = finish_of(p, a.line, a.value);
  if (a.n_pairs == 0) return a.value ? by_kernel(p, when, j, 1, pairs) : XK_OK;
  bool copy = a.engine == XK_COPY;
  if (a.engine == XK_AUTO && j.n_segments == 1) {
    int runs = 0;
    for (int i = 0; i < a.n_pairs; i += run_length(pairs + i, a.n_pairs - i)) runs++;
    copy = a.n_pairs * j.src.run / runs >= LONG_RUN;
  }
  if (copy) return by_engine(p, when, j, pairs);
  return by_kernel(p, when, j, a.ctas ? a.ctas : c->sms, pairs);
}
