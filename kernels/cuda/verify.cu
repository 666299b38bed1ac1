// Makes the digests of blocks anew and compares them with the stored ones: one
// CTA a (block, KV head, layer), a team of lanes a row of 16 bytes a lane.
// Bound by bandwidth. Oracle: kernels.DigestRows.
#include <algorithm>
#include <cstring>

#include "move.cuh"

namespace {

constexpr int THREADS = 256;

// The rows may have come from a peer: plain loads, which see what was there when
// this kernel began.
template <int TEAM, int N>
__global__ __launch_bounds__(THREADS) void verify_kernel(Rows first, int64_t layer_bytes, int64_t layer_slots, const __grid_constant__ List<xk_landed, N> list, uint8_t *bad, bool by_block) {
  __shared__ unsigned long long sum;
  if (threadIdx.x == 0) sum = 0;
  __syncthreads();
  xk_landed e = list.at[blockIdx.x];
  e.layer += blockIdx.z;
  const int head = blockIdx.y, team = threadIdx.x / TEAM, j = threadIdx.x % TEAM;
  Rows p = first;
  p.data += e.layer * layer_bytes;
  const bool on = 16 * j < p.row_bytes;
  const uint64_t key0 = lane_key(2 * j), key1 = lane_key(2 * j + 1);
  uint64_t mine = 0;
  for (int base = 0; base < 2 * e.rows; base += 2 * (THREADS / TEAM)) {
    uint4 v[2] = {};
    float scale[2];
#pragma unroll
    for (int k = 0; k < 2; k++) {
      int w = base + k * (THREADS / TEAM) + team;
      if (on && w < 2 * e.rows) v[k] = reinterpret_cast<const uint4 *>(p.row(e.block, w & 1, head, w >> 1))[j];
      if (p.scaled && j == 0 && w < 2 * e.rows) scale[k] = *p.scale(e.block, w & 1, head, w >> 1);
    }
#pragma unroll
    for (int k = 0; k < 2; k++) {
      int w = base + k * (THREADS / TEAM) + team;
      uint64_t hash = on ? lane_hash(v[k].x, v[k].y, key0) + lane_hash(v[k].z, v[k].w, key1) : 0;
#pragma unroll
      for (int o = TEAM / 2; o; o >>= 1) hash += __shfl_xor_sync(~0u, hash, o);
      if (p.scaled && j == 0) hash += scale_hash(scale[k], p.row_bytes);
      if (j == 0 && w < 2 * e.rows) mine += row_hash(hash, e.layer, w & 1, head, e.first_pos + (w >> 1));
    }
  }
  if (mine) atomicAdd(&sum, (unsigned long long)mine);
  __syncthreads();
  if (threadIdx.x) return;
  int64_t slot = e.layer * layer_slots + int64_t(e.block) * p.kv_heads + head;
  if (p.digest[slot] != uint64_t(sum) || p.filled[slot] != e.rows) bad[by_block ? e.block : blockIdx.x] = 1;
}

int32_t check(xk_ctx *c, const xk_landed *list, int n) {
  const xk_config &g = c->cfg;
  if (!c->blocks || n < 0) return xk_fail(XK_INVALID, "%d blocks to verify", n);
  for (int i = 0; i < n; i++) {
    const xk_landed &e = list[i];
    if (e.layer < 0 || e.layer >= g.layers || e.block < 0 || e.block >= c->blocks || e.rows < 1 || e.rows > g.block_tokens || e.first_pos < 0 || e.first_pos > INT32_MAX - 256)
      return xk_fail(XK_INVALID, "layer %d block %d, %d rows from %d: pool has %d layers, %d blocks of %d", e.layer, e.block, e.rows, e.first_pos, g.layers, c->blocks, g.block_tokens);
  }
  return XK_OK;
}

} // namespace

int32_t xk_verify_launch(xk_ctx *c, cudaStream_t s, const xk_landed *list, int n, int n_layers, uint8_t *bad, bool by_block) {
  const xk_config &g = c->cfg;
  Rows p = c->rows_of(0);
  int64_t slots = int64_t(c->blocks) * g.kv_heads;
  return in_pieces(list, n, [&](const auto &l, int first, int k) -> int32_t {
    auto run = [&](auto kernel) { kernel<<<dim3(k, g.kv_heads, n_layers), THREADS, 0, s>>>(p, c->layer_bytes(), slots, l, by_block ? bad : bad + first, by_block); };
    constexpr int N = sizeof(l.at) / sizeof(l.at[0]);
    if (p.row_bytes <= 256) run(verify_kernel<16, N>);
    else run(verify_kernel<32, N>);
    XK_TRY(cudaGetLastError());
    return XK_OK;
  });
}

// One that was late leaves its launches behind: the next of its lane waits for
// them first, since they write to the results.
int32_t xk_verify(xk_ctx *c, const xk_landed *list, int32_t n, uint8_t *good, int64_t timeout_ns) {
  XK_OK_OR_RETURN(check(c, list, n));
  XK_TRY(cudaSetDevice(c->cfg.device));
  Verifier *v = nullptr;
  for (Verifier &t : c->moves->verifiers)
    if (!v && t.busy.try_lock()) v = &t;
  if (!v) {
    v = &c->moves->verifiers[0];
    v->busy.lock();
  }
  std::lock_guard<std::mutex> hold(v->busy, std::adopt_lock);
  for (int first = 0; first < n; first += Verifier::MOST) {
    int k = std::min(n - first, Verifier::MOST);
    if (v->launched) XK_OK_OR_RETURN(xk_wait_event(v->done, timeout_ns));
    memset(v->bad, 0, k);
    v->launched = true;
    XK_OK_OR_RETURN(xk_verify_launch(c, v->stream, list + first, k, 1, v->bad, false));
    XK_TRY(cudaEventRecord(v->done, v->stream));
    XK_OK_OR_RETURN(xk_wait_event(v->done, timeout_ns));
    v->launched = false;
    for (int i = 0; i < k; i++) good[first + i] = !v->bad[i];
  }
  return XK_OK;
}
