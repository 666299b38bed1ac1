// The KV pool: rows in and out, digests, block copies. Calls come from any
// thread, each through a Mover of its own, and are done when they return; the
// caller keeps them off blocks that a running step writes.
// Oracle: kernels.DigestRows and kernels/cpu's pool.
#include <cstring>

#include "move.cuh"

// One CTA a (KV head, layer): rows 0..n-1 of K and V, then the digest, hashed
// anew when the source's covers another number of rows.
static __global__ void copy_block_kernel(Pool p, int64_t layer_elements, int64_t layer_slots, int dst, int src, int first_pos, int n) {
  __shared__ unsigned long long sum;
  int head = blockIdx.x, layer = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  p.data += layer * layer_elements;
  int64_t d = layer * layer_slots + int64_t(dst) * p.kv_heads + head, s = layer * layer_slots + int64_t(src) * p.kv_heads + head;
  bool whole = p.filled[s] == n;
  if (threadIdx.x == 0) sum = 0;
  __syncthreads();
  for (int w = warp; w < 2 * n; w += blockDim.x / 32) {
    int kv = w % 2, at = w / 2;
    const uint2 *from = reinterpret_cast<const uint2 *>(p.data + p.row(src, kv, head, at));
    uint2 *to = reinterpret_cast<uint2 *>(p.data + p.row(dst, kv, head, at));
    uint64_t hash = 0;
    for (int i = lane; i < p.head_dim / 4; i += 32) {
      uint2 v = from[i];
      to[i] = v;
      hash += lane_hash(v.x, v.y, lane_key(i));
    }
    hash = warp_sum(hash);
    if (lane == 0 && !whole) atomicAdd(&sum, (unsigned long long)row_hash(hash, layer, kv, head, first_pos + at));
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    p.digest[d] = whole ? p.digest[s] : uint64_t(sum);
    p.filled[d] = uint16_t(n);
  }
}

// ---------------------------------------------------------------- launchers

int64_t xk_ctx::layer_elements() const { return int64_t(blocks) * 2 * cfg.kv_heads * cfg.block_tokens * cfg.head_dim; }

Pool xk_ctx::pool_of(int layer) const {
  Pool p;
  int64_t slots = int64_t(layer) * blocks * cfg.kv_heads;
  p.data = pool + layer * layer_elements();
  p.digest = digest + slots, p.filled = filled + slots;
  p.kv_heads = cfg.kv_heads, p.head_dim = cfg.head_dim, p.bt = FastDiv(cfg.block_tokens);
  return p;
}

int32_t xk_pool_open(xk_ctx *c) {
  const xk_config &g = c->cfg;
  Parts at(g, c->blocks);
  XK_OK_OR_RETURN(xk_alloc(c, &c->region, at.bytes, true));
  c->pool = reinterpret_cast<bf16 *>(c->region);
  c->digest = reinterpret_cast<uint64_t *>(c->region + at.digest);
  c->filled = reinterpret_cast<uint16_t *>(c->region + at.filled);
  int64_t rows = g.layers * c->layer_elements() / g.head_dim;
  c->hopper = c->hopper && xk_attn_fast(g.head_dim, g.heads / g.kv_heads) && g.block_tokens % 16 == 0 && rows < INT32_MAX;
  if (c->hopper) {
    XK_OK_OR_RETURN(xk_kv_map(&c->kv_map, c->pool, rows, g.head_dim));
    XK_OK_OR_RETURN(xk_q_map(&c->q_map, c->qkv, g.max_rows, c->width));
    XK_OK_OR_RETURN(xk_heads_map(&c->heads_map, c->qkv, g.max_rows, g.heads, g.kv_heads, g.head_dim));
  }
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

int32_t xk_gather(xk_ctx *c, int32_t layer, int32_t block, int32_t row, int32_t n, void *dst) {
  XK_OK_OR_RETURN(check(c, layer, block, row, n));
  if (n == 0) return XK_OK;
  const xk_config &g = c->cfg;
  Lane lane(c);
  size_t run = size_t(n) * g.head_dim * 2, pitch = size_t(g.block_tokens) * g.head_dim * 2;
  Pool p = c->pool_of(layer);
  const bf16 *src = p.data + (int64_t(block) * 2 * g.kv_heads * g.block_tokens + row) * g.head_dim;
  XK_TRY(cudaMemcpy2DAsync(lane.m->host, run, src, pitch, run, 2 * g.kv_heads, cudaMemcpyDeviceToHost, lane.m->stream));
  XK_TRY(cudaStreamSynchronize(lane.m->stream));
  memcpy(dst, lane.m->host, run * 2 * g.kv_heads);
  return XK_OK;
}

int32_t xk_scatter(xk_ctx *c, int32_t layer, int32_t block, int32_t row, int32_t n, const void *src) {
  XK_OK_OR_RETURN(check(c, layer, block, row, n));
  if (n == 0) return XK_OK;
  const xk_config &g = c->cfg;
  Lane lane(c);
  size_t run = size_t(n) * g.head_dim * 2, pitch = size_t(g.block_tokens) * g.head_dim * 2;
  memcpy(lane.m->host, src, run * 2 * g.kv_heads);
  Pool p = c->pool_of(layer);
  bf16 *dst = p.data + (int64_t(block) * 2 * g.kv_heads * g.block_tokens + row) * g.head_dim;
  XK_TRY(cudaMemcpy2DAsync(dst, pitch, lane.m->host, run, run, 2 * g.kv_heads, cudaMemcpyHostToDevice, lane.m->stream));
  XK_TRY(cudaStreamSynchronize(lane.m->stream));
  return XK_OK;
}

int32_t xk_digest(xk_ctx *c, int32_t layer, int32_t block, uint64_t *dst) {
  XK_OK_OR_RETURN(check(c, layer, block, 0, 0));
  Lane lane(c);
  size_t bytes = size_t(c->cfg.kv_heads) * 8;
  XK_TRY(cudaMemcpyAsync(lane.m->host, c->pool_of(layer).digest + int64_t(block) * c->cfg.kv_heads, bytes, cudaMemcpyDeviceToHost, lane.m->stream));
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
  Pool p = c->pool_of(layer);
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
  copy_block_kernel<<<dim3(g.kv_heads, g.layers), 256, 0, lane.m->stream>>>(c->pool_of(0), c->layer_elements(), int64_t(c->blocks) * g.kv_heads, dst, src, first_pos, n);
  XK_TRY(cudaGetLastError());
  XK_TRY(cudaStreamSynchronize(lane.m->stream));
  return XK_OK;
}
