// Bias, QK-norm, RoPE, KV append and row digests in one pass: one CTA a
// (segment, KV head), one warp a row of one head. A segment is the only writer
// of its (block, head), so the digest needs no lock. Query heads of the group
// are rotated in place by the same CTA.
// Oracle: kernels/cpu for values, kernels.DigestRows for digests, to the bit.
#include "common.cuh"

static constexpr int WARPS = 8;

// Hash of a row that lies in the pool, by one warp; the sum is in every lane.
static __device__ uint64_t hash_stored(const bf16 *row, int dim, int lane) {
  uint64_t sum = 0;
  const uint2 *p = reinterpret_cast<const uint2 *>(row);
  for (int i = lane; i < dim / 4; i += 32) sum += lane_hash(p[i].x, p[i].y, lane_key(i));
  return warp_sum(sum);
}

// PASSES: 32 lanes take 4 elements each a pass, so 1 up to head_dim 128, else 2.
template <int PASSES>
static __global__ __launch_bounds__(WARPS * 32) void append_kernel(Rope r, Pool p) {
  __shared__ unsigned long long digest;
  pdl_wait();
  pdl_next();
  xk_seg s = r.segs[blockIdx.x];
  if (s.n == 0) return;
  int kv_head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int dim = p.head_dim, half = dim / 2, group = r.heads / p.kv_heads;
  int width = (r.heads + 2 * p.kv_heads) * dim;
  int64_t slot = int64_t(s.block) * p.kv_heads + kv_head;
  if (threadIdx.x == 0) digest = 0;
  int filled = p.filled[slot];
  __syncthreads();

  // A lane hashes one 8-byte lane a pass: even ones of the first half, odd of
  // the second.
  uint64_t keys[PASSES];
#pragma unroll
  for (int k = 0; k < PASSES; k++) {
    int j = lane + 32 * k;
    keys[k] = lane_key(lane % 2 == 0 ? j / 2 : (half / 2 + j) / 2);
  }
  const int tasks = 2 + group;
  const FastDiv &by_tasks = r.by_tasks;

  // Task 0 is K, 1 is V, the others are the group's query heads.
  for (int w = warp; w < s.n * tasks; w += WARPS) {
    int i = by_tasks.div(w), task = w - i * tasks;
    int pos = s.pos + s.at + i;
    int column = (task == 0 ? r.heads + kv_head : task == 1 ? r.heads + p.kv_heads + kv_head : kv_head * group + task - 2) * dim;
    uint32_t *src = reinterpret_cast<uint32_t *>(r.qkv + int64_t(s.row + i) * width + column);
    const float *norm = task == 0 ? r.k_norm : task == 1 ? nullptr : r.q_norm;
    const float2 *bias = r.bias ? reinterpret_cast<const float2 *>(r.bias + column) : nullptr;
    // Pairs (2j, 2j+1) of each half.
    float2 lo[PASSES], hi[PASSES];
    float sum = 0;
#pragma unroll
    for (int k = 0; k < PASSES; k++) {
      int j = lane + 32 * k;
      if (j >= half / 2) break;
      lo[k] = unpack(src[j]);
      hi[k] = unpack(src[half / 2 + j]);
      if (bias) {
        float2 a = bias[j], b = bias[half / 2 + j];
        lo[k].x += a.x, lo[k].y += a.y, hi[k].x += b.x, hi[k].y += b.y;
      }
      sum += lo[k].x * lo[k].x + lo[k].y * lo[k].y + hi[k].x * hi[k].x + hi[k].y * hi[k].y;
    }
    float scale = norm ? rsqrtf(warp_sum(sum) / float(dim) + r.eps) : 1.0f;
    uint32_t *dst = task < 2 ? reinterpret_cast<uint32_t *>(p.data + p.row(s.block, task, kv_head, s.at + i)) : src;
    uint64_t hash = 0;
#pragma unroll
    for (int k = 0; k < PASSES; k++) {
      int j = lane + 32 * k;
      bool on = j < half / 2;
      uint32_t first = 0, second = 0;
      if (on) {
        float2 a = lo[k], b = hi[k];
        if (norm) {
          float2 wa = reinterpret_cast<const float2 *>(norm)[j], wb = reinterpret_cast<const float2 *>(norm)[half / 2 + j];
          a.x *= scale * wa.x, a.y *= scale * wa.y, b.x *= scale * wb.x, b.y *= scale * wb.y;
        }
        if (task != 1) {
          float4 cs = reinterpret_cast<const float4 *>(r.table + int64_t(pos) * half)[j]; // cos, sin, cos, sin
          float2 x = a;
          a.x = x.x * cs.x - b.x * cs.y, b.x = b.x * cs.x + x.x * cs.y;
          a.y = x.y * cs.z - b.y * cs.w, b.y = b.y * cs.z + x.y * cs.w;
        }
        first = pack(a.x, a.y), second = pack(b.x, b.y);
        dst[j] = first;
        dst[half / 2 + j] = second;
      }
      if (task < 2) { // an 8-byte lane of the hash is two neighbours' words
        uint32_t other = __shfl_xor_sync(~0u, lane % 2 == 0 ? second : first, 1);
        if (on) hash += lane % 2 == 0 ? lane_hash(first, other, keys[k]) : lane_hash(other, second, keys[k]);
      }
    }
    if (task < 2) {
      hash = warp_sum(hash);
      if (lane == 0) atomicAdd(&digest, (unsigned long long)row_hash(hash, r.layer, task, kv_head, pos));
    }
  }
  if (filled != s.at) { // the stored digest is of other rows: hash those below again
    for (int w = warp; w < 2 * s.at; w += WARPS) {
      int at = w / 2, kv = w % 2;
      uint64_t hash = hash_stored(p.data + p.row(s.block, kv, kv_head, at), dim, lane);
      if (lane == 0) atomicAdd(&digest, (unsigned long long)row_hash(hash, r.layer, kv, kv_head, s.pos + at));
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    p.digest[slot] = digest + (filled == s.at ? p.digest[slot] : 0);
    p.filled[slot] = uint16_t(s.at + s.n);
  }
}

// ---------------------------------------------------------------- launchers

int32_t xk_append(const Launch &l, const Rope &r, const Pool &p) {
  Rope t = r;
  t.by_tasks = FastDiv(2 + r.heads / p.kv_heads);
  dim3 grid(r.n_segs, p.kv_heads);
  if (p.head_dim <= 128) return launch(l, append_kernel<1>, grid, WARPS * 32, 0, t, p);
  return launch(l, append_kernel<2>, grid, WARPS * 32, 0, t, p);
}
