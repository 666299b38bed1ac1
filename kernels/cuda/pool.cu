// The KV pool: rows in and out, digests, block copies. Calls come from any
// thread, each through a Mover of its own, and are done when they return; the
// caller keeps them off blocks that a running step writes.
// Oracle: kernels.DigestRows and kernels/cpu's pool.
#include <cstring>

#include "move.cuh"

// One CTA a (KV head, layer): rows 0..n-1 of K and V, then the digest, hashed
// anew when the source's covers another number of rows.
static __global__ void copy_block_kernel(Rows p, int64_t layer_bytes, int64_t layer_slots, int dst, int src, int first_pos, int n) {
  __shared__ unsigned long long sum;
  int head = blockIdx.x, layer = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  p.data += layer * layer_bytes;
  int64_t d = layer * layer_slots + int64_t(dst) * p.kv_heads + head, s = layer * layer_slots + int64_t(src) * p.kv_heads + head;
  bool whole = p.filled[s] == n;
  if (threadIdx.x == 0) sum = 0;
  __syncthreads();
  for (int w = warp; w < 2 * n; w += blockDim.x / 32) {
    int kv = w % 2, at = w / 2;
    const uint2 *from = reinterpret_cast<const uint2 *>(p.row(src, kv, head, at));
    uint2 *to = reinterpret_cast<uint2 *>(p.row(dst, kv, head, at));
    uint64_t hash = 0;
    for (int i = lane; i < p.row_bytes / 8; i += 32) {
      uint2 v = from[i];
      to[i] = v;
      hash += lane_hash(v.x, v.y, lane_key(i));
    }
    hash = warp_sum(hash);
    if (p.scaled) {
      float scale = *p.scale(src, kv, head, at);
      if (lane == 0) *p.scale(dst, kv, head, at) = scale;
      hash += scale_hash(scale, p.row_bytes);
    }
    if (lane == 0 && !whole) atomicAdd(&sum, (unsigned long long)row_hash(hash, layer, kv, p.first_head + head, first_pos + at));
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    p.digest[d] = whole ? p.digest[s] : uint64_t(sum);
    p.filled[d] = uint16_t(n);
  }
}

// ---------------------------------------------------------------- launchers

int64_t xk_ctx::layer_bytes() const { return blocks * xk_block_run(cfg); }

Pool xk_ctx::pool_of(int layer) const {
  Pool p;
  Rows r = rows_of(layer);
  p.data = reinterpret_cast<element *>(r.data);
  p.digest = r.digest, p.filled = r.filled;
  p.kv_heads = cfg.kv_heads, p.head_dim = cfg.head_dim, p.first_head = r.first_head, p.bt = r.bt;
  return p;
}

Rows xk_ctx::rows_of(int layer) const {
  Rows r;
  int64_t slots = int64_t(layer) * blocks * cfg.kv_heads;
  r.data = region + layer * layer_bytes();
  r.digest = digest + slots, r.filled = filled + slots;
  r.run = xk_block_run(cfg), r.kv_heads = cfg.kv_heads, r.first_head = cfg.first_kv_head;
  r.scaled = cfg.kv_fp8, r.row_bytes = cfg.head_dim * (cfg.kv_fp8 ? 1 : 2), r.bt = FastDiv(cfg.block_tokens);
  return r;
}

// What prefill attention reads by bulk copies: the pool, or the scratch to which
// FP8 blocks are widened.
static int32_t maps(xk_ctx *c) {
  const xk_config &g = c->cfg;
  int64_t rows = int64_t(2) * g.kv_heads * g.block_tokens * (g.kv_fp8 ? c->wide_blocks : int64_t(g.layers) * c->blocks);
  c->hopper = c->hopper && xk_attn_fast(g.head_dim, g.heads / g.kv_heads) && g.block_tokens % 16 == 0 && rows < INT32_MAX;
  if (!c->hopper) return XK_OK;
  XK_OK_OR_RETURN(xk_kv_map(&c->kv_map, g.kv_fp8 ? c->wide : reinterpret_cast<element *>(c->region), rows, g.head_dim));
  XK_OK_OR_RETURN(xk_q_map(&c->q_map, c->qkv, g.max_rows, c->width));
  return xk_heads_map(&c->heads_map, c->qkv, g.max_rows, g.heads, g.kv_heads, g.head_dim);
}

int32_t xk_pool_open(xk_ctx *c) {
  const xk_config &g = c->cfg;
  Parts at(g, c->blocks);
  XK_OK_OR_RETURN(xk_alloc(c, &c->region, at.bytes, true));
  c->digest = reinterpret_cast<uint64_t *>(c->region + at.digest);
  c->filled = reinterpret_cast<uint16_t *>(c->region + at.filled);
  XK_OK_OR_RETURN(maps(c));
  int least, greatest;
  XK_TRY(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  for (Mover &m : c->movers) {
    XK_TRY(cudaStreamCreateWithPriority(&m.stream, cudaStreamNonBlocking, greatest));
    XK_OK_OR_RETURN(xk_alloc_pinned(c, &m.host, xk_block_run(g) + 64 * g.kv_heads));
  }
  return xk_moves_open(c);
}

void xk_pool_close(xk_ctx *c) {
  xk_moves_close(c);
  for (Mover &m : c->movers)
    if (m.stream) cudaStreamDestroy(m.stream);
}

namespace {
// Holds a mover for one call.
struct Lane {
  Mover *m = nullptr;
  explicit Lane(xk_ctx *c) {
    unsigned first = c->next_mover++;
    for (unsigned i = 0; i < xk_ctx::MOVERS && !m; i++) {
      Mover &t = c->movers[(first + i) % xk_ctx::MOVERS];
      if (t.busy.try_lock()) m = &t;
    }
    if (!m) {
      m = &c->movers[first % xk_ctx::MOVERS];
      m->busy.lock();
    }
  }
  ~Lane() { m->busy.unlock(); }
};
} // namespace

static int32_t check(xk_ctx *c, int layer, int block, int row, int n) {
  const xk_config &g = c->cfg;
  if (layer < 0 || layer >= g.layers || block < 0 || block >= c->blocks || row < 0 || n < 0 || row + n > g.block_tokens)
    return xk_fail(XK_INVALID, "layer %d block %d rows %d+%d: pool has %d layers, %d blocks of %d", layer, block, row, n, g.layers, c->blocks, g.block_tokens);
  XK_TRY(cudaSetDevice(g.device));
  return XK_OK;
}

// Rows row .. row+n-1 of a block between the pool and packed host memory: those
// of each half-head are one run at either end, and so are their scales.
static int32_t copy_rows(const Rows &p, int block, int row, int n, uint8_t *host, bool to_host, cudaStream_t s) {
  auto copy = [&](uint8_t *pool, int64_t bytes) {
    size_t run = n * bytes, pitch = p.bt.d * bytes, halves = 2 * size_t(p.kv_heads);
    pool += row * bytes;
    cudaError_t e = to_host ? cudaMemcpy2DAsync(host, run, pool, pitch, run, halves, cudaMemcpyDeviceToHost, s) : cudaMemcpy2DAsync(pool, pitch, host, run, run, halves, cudaMemcpyHostToDevice, s);
    host += run * halves;
    return e;
  };
  XK_TRY(copy(p.row(block, 0, 0, 0), p.row_bytes));
  if (p.scaled) XK_TRY(copy(reinterpret_cast<uint8_t *>(p.scale(block, 0, 0, 0)), 4));
  return XK_OK;
}

static size_t packed_bytes(const Rows &p, int n) { return size_t(2) * p.kv_heads * n * (p.row_bytes + (p.scaled ? 4 : 0)); }

int32_t xk_gather(xk_ctx *c, int32_t layer, int32_t block, int32_t row, int32_t n, void *dst) {
  XK_OK_OR_RETURN(check(c, layer, block, row, n));
  if (n == 0) return XK_OK;
  Lane lane(c);
  Rows p = c->rows_of(layer);
  XK_OK_OR_RETURN(copy_rows(p, block, row, n, lane.m->host, true, lane.m->stream));
  XK_TRY(cudaStreamSynchronize(lane.m->stream));
  memcpy(dst, lane.m->host, packed_bytes(p, n));
  return XK_OK;
}

int32_t xk_scatter(xk_ctx *c, int32_t layer, int32_t block, int32_t row, int32_t n, const void *src) {
  XK_OK_OR_RETURN(check(c, layer, block, row, n));
  if (n == 0) return XK_OK;
  Lane lane(c);
  Rows p = c->rows_of(layer);
  memcpy(lane.m->host, src, packed_bytes(p, n));
  XK_OK_OR_RETURN(copy_rows(p, block, row, n, lane.m->host, false, lane.m->stream));
  XK_TRY(cudaStreamSynchronize(lane.m->stream));
  return XK_OK;
}

int32_t xk_digest(xk_ctx *c, int32_t layer, int32_t block, uint64_t *dst) {
  XK_OK_OR_RETURN(check(c, layer, block, 0, 0));
  Lane lane(c);
  size_t bytes = size_t(c->cfg.kv_heads) * 8;
  XK_TRY(cudaMemcpyAsync(lane.m->host, c->rows_of(layer).digest + int64_t(block) * c->cfg.kv_heads, bytes, cudaMemcpyDeviceToHost, lane.m->stream));
  XK_TRY(cudaStreamSynchronize(lane.m->stream));
  memcpy(dst, lane.m->host, bytes);
  return XK_OK;
}

int32_t xk_set_digest(xk_ctx *c, int32_t layer, int32_t block, int32_t filled, const uint64_t *digest) {
  XK_OK_OR_RETURN(check(c, layer, block, 0, filled));
  Lane lane(c);
  int heads = c->cfg.kv_heads;
  uint16_t *rows = reinterpret_cast<uint16_t *>(lane.m->host + size_t(heads) * 8);
  memcpy(lane.m->host, digest, size_t(heads) * 8);
  for (int i = 0; i < heads; i++) rows[i] = uint16_t(filled);
  Rows p = c->rows_of(layer);
  XK_TRY(cudaMemcpyAsync(p.digest + int64_t(block) * heads, lane.m->host, size_t(heads) * 8, cudaMemcpyHostToDevice, lane.m->stream));
  XK_TRY(cudaMemcpyAsync(p.filled + int64_t(block) * heads, rows, size_t(heads) * 2, cudaMemcpyHostToDevice, lane.m->stream));
  XK_TRY(cudaStreamSynchronize(lane.m->stream));
  return XK_OK;
}

int32_t xk_copy_block(xk_ctx *c, int32_t dst, int32_t src, int32_t first_pos, int32_t n) {
  XK_OK_OR_RETURN(check(c, 0, dst, 0, n));
  XK_OK_OR_RETURN(check(c, 0, src, 0, n));
  const xk_config &g = c->cfg;
  Lane lane(c);
  copy_block_kernel<<<dim3(g.kv_heads, g.layers), 256, 0, lane.m->stream>>>(c->rows_of(0), c->layer_bytes(), int64_t(c->blocks) * g.kv_heads, dst, src, first_pos, n);
  XK_TRY(cudaGetLastError());
  XK_TRY(cudaStreamSynchronize(lane.m->stream));
  return XK_OK;
}
