// Bias, QK-norm, RoPE, KV append and row digests in one pass: one CTA a
// (segment, KV head). A segment is the only writer of its (block, head), so the
// digest needs no lock. Query heads of the group are rotated in place by the
// same CTA.
//
// A row of one head is one vector a lane: four elements of each half, so an
// 8-byte lane of the hash is one register pair, and rotation partners meet in a
// thread. The lanes of a row (a team) keep its token's cosines for all heads.
// Oracle: kernels/cpu for values, kernels.DigestRows for digests, to the bit.
#include "common.cuh"

static constexpr int WARPS = 8;
static constexpr int BATCH = 3; // rows of a team in flight

// Hash of a row that lies in the pool, by one warp; the sum is in every lane.
static __device__ uint64_t hash_stored(const element *row, int dim, int lane) {
  uint64_t sum = 0;
  const uint2 *p = reinterpret_cast<const uint2 *>(row);
  for (int i = lane; i < dim / 4; i += 32) sum += lane_hash(p[i].x, p[i].y, lane_key(i));
  return warp_sum(sum);
}

// TEAM: lanes of a row; 4 TEAM elements are at least half of one.
template <typename T, int TEAM>
static __global__ __launch_bounds__(WARPS * 32, TEAM == 16 ? 4 : 2) void append_kernel(Rope r, Pool p) {
  __shared__ unsigned long long digest;
  const xk_seg s = r.segs[blockIdx.x]; // copied before the norm let the projection in: it has ended (common.cuh, PDL)
  pdl_wait();
  pdl_next();
  if (s.n == 0) return;
  constexpr int TEAMS = WARPS * 32 / TEAM;
  int kv_head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32, team = threadIdx.x / TEAM, j = threadIdx.x % TEAM;
  const unsigned mask = TEAM == 32 ? ~0u : 0xffffu << (lane & 16);
  int dim = p.head_dim, half = dim / 2, group = r.heads / p.kv_heads;
  int width = (r.heads + 2 * p.kv_heads) * dim;
  const int64_t slot = int64_t(s.block) * p.kv_heads + kv_head;
  const int filled = p.filled[slot]; // asked for with the rows, not after them
  unsigned long long stored = 0;
  if (threadIdx.x == 0) digest = 0, stored = p.digest[slot];
  bool on = 4 * j < half;
  const uint64_t key_lo = lane_key(j), key_hi = lane_key(half / 4 + j);

  // Teams are dealt to tokens; what is left over shares a token's rows, or
  // "tasks": 0 is K, 1 is V, the others are the group's query heads.
  int tokens = 1;
  while (tokens < TEAMS && tokens < s.n) tokens *= 2;
  const int slices = TEAMS / tokens, tasks = 2 + group;
  uint64_t mine = 0; // of the digest
  for (int i = team % tokens; i < s.n; i += tokens) {
    int pos = s.pos + s.at + i;
    element *row = r.qkv + int64_t(s.row + i) * width + 4 * j;
    float4 cs[2] = {}; // cos, sin of four pairs
    if (on) {
      const float4 *from = reinterpret_cast<const float4 *>(r.table + int64_t(pos) * half + 4 * j);
      cs[0] = from[0], cs[1] = from[1];
    }
    auto column = [&](int task) { return (task == 0 ? r.heads + kv_head : task == 1 ? r.heads + p.kv_heads + kv_head : kv_head * group + task - 2) * dim; };
    for (int first = team / tokens; first < tasks; first += BATCH * slices) {
      uint2 raw[BATCH][2];
#pragma unroll
      for (int b = 0; b < BATCH; b++) {
        int task = first + b * slices;
        if (task < tasks && on) {
          const uint2 *src = reinterpret_cast<const uint2 *>(row + column(task));
          raw[b][0] = src[0], raw[b][1] = *reinterpret_cast<const uint2 *>(row + column(task) + half);
        }
      }
#pragma unroll
      for (int b = 0; b < BATCH; b++) {
        int task = first + b * slices;
        if (task >= tasks) break;
        float2 a[2] = {}, z[2] = {}; // the halves
        auto two = [](uint32_t v) { return unpack<T>(finite<T>(v)); };
        if (on) a[0] = two(raw[b][0].x), a[1] = two(raw[b][0].y), z[0] = two(raw[b][1].x), z[1] = two(raw[b][1].y);
        if (r.bias && on) {
          const float2 *lo = reinterpret_cast<const float2 *>(r.bias + column(task) + 4 * j), *hi = reinterpret_cast<const float2 *>(r.bias + column(task) + half + 4 * j);
#pragma unroll
          for (int k = 0; k < 2; k++) a[k].x += lo[k].x, a[k].y += lo[k].y, z[k].x += hi[k].x, z[k].y += hi[k].y;
        }
        const float *norm = task == 0 ? r.k_norm : task == 1 ? nullptr : r.q_norm;
        if (norm) {
          float sum = 0;
#pragma unroll
          for (int k = 0; k < 2; k++) sum += a[k].x * a[k].x + a[k].y * a[k].y + z[k].x * z[k].x + z[k].y * z[k].y;
#pragma unroll
          for (int o = TEAM / 2; o; o >>= 1) sum += __shfl_xor_sync(mask, sum, o);
          float scale = rsqrtf(sum / float(dim) + r.eps);
          if (on) {
            const float2 *lo = reinterpret_cast<const float2 *>(norm + 4 * j), *hi = reinterpret_cast<const float2 *>(norm + half + 4 * j);
#pragma unroll
            for (int k = 0; k < 2; k++) a[k].x *= scale * lo[k].x, a[k].y *= scale * lo[k].y, z[k].x *= scale * hi[k].x, z[k].y *= scale * hi[k].y;
          }
        }
        if (task != 1) {
#pragma unroll
          for (int k = 0; k < 2; k++) {
            float2 x = a[k];
            a[k].x = x.x * cs[k].x - z[k].x * cs[k].y, z[k].x = z[k].x * cs[k].x + x.x * cs[k].y;
            a[k].y = x.y * cs[k].z - z[k].y * cs[k].w, z[k].y = z[k].y * cs[k].z + x.y * cs[k].w;
          }
        }
        uint2 lo = make_uint2(pack<T>(a[0].x, a[0].y), pack<T>(a[1].x, a[1].y)), hi = make_uint2(pack<T>(z[0].x, z[0].y), pack<T>(z[1].x, z[1].y));
        element *to = task < 2 ? p.data + p.row(s.block, task, kv_head, s.at + i) + 4 * j : row + column(task);
        if (on) *reinterpret_cast<uint2 *>(to) = lo, *reinterpret_cast<uint2 *>(to + half) = hi;
        if (task < 2) {
          uint64_t hash = on ? lane_hash(lo.x, lo.y, key_lo) + lane_hash(hi.x, hi.y, key_hi) : 0;
#pragma unroll
          for (int o = TEAM / 2; o; o >>= 1) hash += __shfl_xor_sync(mask, hash, o);
          if (j == 0) mine += row_hash(hash, r.layer, task, p.first_head + kv_head, pos);
        }
      }
    }
  }
  __syncthreads();
  if (mine) atomicAdd(&digest, (unsigned long long)mine);
  if (filled != s.at) { // the stored digest is of other rows: hash those below again
    for (int w = warp; w < 2 * s.at; w += WARPS) {
      int at = w / 2, kv = w % 2;
      uint64_t hash = hash_stored(p.data + p.row(s.block, kv, kv_head, at), dim, lane);
      if (lane == 0) atomicAdd(&digest, (unsigned long long)row_hash(hash, r.layer, kv, p.first_head + kv_head, s.pos + at));
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    p.digest[slot] = digest + (filled == s.at ? stored : 0);
    p.filled[slot] = uint16_t(s.at + s.n);
  }
}

// ---------------------------------------------------------------- launchers

int32_t xk_append(const Launch &l, const Rope &r, const Pool &p) {
  dim3 grid(r.n_segs, p.kv_heads);
  return xk_each_type(l.type, [&](auto t) {
    using T = decltype(t);
    return launch(l, p.head_dim <= 128 ? append_kernel<T, 16> : append_kernel<T, 32>, grid, WARPS * 32, 0, r, p);
  });
}
