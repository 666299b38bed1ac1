// Makes the digests of blocks anew and compares them with the stored ones: one
// CTA a (block, KV head, layer), a team of lanes a row of 16 bytes a lane. Of what
// arrives by layers, beside a step that computes, a warp has as much: fewer
// instructions a row, and longer until the last.
// Bound by bandwidth. Oracle: kernels.DigestRows.
#include <algorithm>
#include <cstring>

#include "move.cuh"

namespace {

constexpr int THREADS = 256;

// The rows may have come from a peer: plain loads, which see what was there when
// this kernel began.
template <int TEAM, int N>
__global__ __launch_bounds__(THREADS) void verify_kernel(Rows first, int64_t layer_bytes, int64_t layer_slots, const __grid_constant__ List<xk_landed, N> list, uint8_t *bad) {
  __shared__ unsigned long long sum;
  if (threadIdx.x == 0) sum = 0;
  __syncthreads();
  const xk_landed e = list.at[blockIdx.x];
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
      if (j == 0 && w < 2 * e.rows) mine += row_hash(hash, e.layer, w & 1, p.first_head + head, e.first_pos + (w >> 1));
    }
  }
  if (mine) atomicAdd(&sum, (unsigned long long)mine);
  __syncthreads();
  if (threadIdx.x) return;
  int64_t slot = e.layer * layer_slots + int64_t(e.block) * p.kv_heads + head;
  if (p.digest[slot] != uint64_t(sum) || p.filled[slot] != e.rows) bad[blockIdx.x] = 1;
}

// A warp's teams take 16 rows each at a time. Lane j of 16 has a part of each; what
// they pass to each other leaves it with all of row j.
constexpr int WARPS = 4, ROWS = 16;
template <int O> __device__ __forceinline__ void fold(uint64_t (&h)[ROWS], int j) {
  const bool up = j & O;
#pragma unroll
  for (int k = 0; k < O; k++) h[k] = (up ? h[k + O] : h[k]) + __shfl_xor_sync(~0u, up ? h[k] : h[k + O], O);
}
template <int TEAM>
__global__ __launch_bounds__(WARPS * 32) void verify_coming_kernel(Rows first, int64_t layer_bytes, int64_t layer_slots, ComingList list, int first_layer, uint8_t *wrong) {
  const int head = blockIdx.y * WARPS + threadIdx.x / 32, layer = first_layer + blockIdx.z;
  if (head >= first.kv_heads) return; // a whole warp
  const Coming e = list[blockIdx.x];
  const int team = threadIdx.x % 32 / TEAM, j = threadIdx.x % TEAM;
  Rows p = first;
  p.data += layer * layer_bytes;
  const bool on = 16 * j < p.row_bytes;
  const uint64_t key0 = lane_key(2 * j), key1 = lane_key(2 * j + 1);
  const uint8_t *half[2] = {p.row(e.block, 0, head, 0) + 16 * j, p.row(e.block, 1, head, 0) + 16 * j};
  uint64_t mine = 0;
  for (int base = team * ROWS; base - team * ROWS < 2 * e.filled; base += 32 / TEAM * ROWS) { // the whole warp
    uint64_t h[ROWS];
#pragma unroll
    for (int k = 0; k < ROWS; k++) {
      uint4 v = {};
      const bool in = on && base + k < 2 * e.filled;
      if (in) v = *reinterpret_cast<const uint4 *>(half[k & 1] + int64_t((base + k) >> 1) * p.row_bytes);
      h[k] = in ? lane_hash(v.x, v.y, key0) + lane_hash(v.z, v.w, key1) : 0;
    }
    if (TEAM == 32) {
#pragma unroll
      for (int k = 0; k < ROWS; k++) h[k] += __shfl_xor_sync(~0u, h[k], 16);
    }
    fold<8>(h, j), fold<4>(h, j), fold<2>(h, j), fold<1>(h, j);
    const int w = base + j;
    if (j < ROWS && w < 2 * e.filled) {
      if (p.scaled) h[0] += scale_hash(*p.scale(e.block, w & 1, head, w >> 1), p.row_bytes);
      mine += row_hash(h[0], layer, w & 1, p.first_head + head, e.first_pos + (w >> 1));
    }
  }
#pragma unroll
  for (int o = 16; o; o >>= 1) mine += __shfl_xor_sync(~0u, mine, o);
  if (threadIdx.x % 32) return;
  int64_t slot = layer * layer_slots + int64_t(e.block) * p.kv_heads + head;
  if (p.digest[slot] != mine || p.filled[slot] != e.filled) wrong[e.block] = 1;
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

// So that the first push is not what loads them.
template <int N> int32_t load() {
  cudaFuncAttributes a;
  XK_TRY(cudaFuncGetAttributes(&a, verify_kernel<16, N>));
  XK_TRY(cudaFuncGetAttributes(&a, verify_kernel<32, N>));
  return XK_OK;
}

int32_t start(xk_ctx *c, cudaStream_t s, const xk_landed *list, int n, uint8_t *bad) {
  Rows p = c->rows_of(0);
  return in_pieces(list, n, [&](const auto &l, int first, int k) -> int32_t {
    auto run = [&](auto kernel) { kernel<<<dim3(k, p.kv_heads), THREADS, 0, s>>>(p, c->layer_bytes(), int64_t(c->blocks) * p.kv_heads, l, bad + first); };
    constexpr int N = sizeof(l.at) / sizeof(l.at[0]);
    if (p.row_bytes <= 256) run(verify_kernel<16, N>);
    else run(verify_kernel<32, N>);
    XK_TRY(cudaGetLastError());
    return XK_OK;
  });
}

} // namespace

int32_t xk_verify_init() {
  XK_OK_OR_RETURN(load<1024 / sizeof(xk_landed)>());
  return load<32000 / sizeof(xk_landed)>();
}

int32_t xk_verify_coming(xk_ctx *c, const ComingList &list, int n, int layer, int n_layers) {
  const Rows p = c->rows_of(0);
  auto run = [&](auto kernel) {
    kernel<<<dim3(n, div_up(p.kv_heads, WARPS), n_layers), WARPS * 32, 0, c->moves->arrivals.check>>>(p, c->layer_bytes(), int64_t(c->blocks) * p.kv_heads, list, layer, c->moves->arrivals.wrong);
  };
  if (p.row_bytes <= 256) run(verify_coming_kernel<16>);
  else run(verify_coming_kernel<32>);
  XK_TRY(cudaGetLastError());
  return XK_OK;
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
    XK_OK_OR_RETURN(start(c, v->stream, list + first, k, v->bad));
    XK_TRY(cudaEventRecord(v->done, v->stream));
    XK_OK_OR_RETURN(xk_wait_event(v->done, timeout_ns));
    v->launched = false;
    for (int i = 0; i < k; i++) good[first + i] = !v->bad[i];
  }
  return XK_OK;
}
