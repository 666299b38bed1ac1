// append.cu for FP8 pools: bias, QK-norm and RoPE as there, then each K and V row,
// rounded to bf16 as a bf16 pool would keep it, gets a scale of its own and E4M3
// elements; the digest covers both, from registers.
//
// One CTA a (segment, KV head); TEAM lanes a row, a lane has four elements of each
// half, so two neighbours share a hash lane: they swap four bytes.
// Oracle: kvconn/convert over a bf16 pool's rows, to the bit.
#include "rows.cuh"

static constexpr int WARPS = 8;

template <int TEAM>
static __global__ __launch_bounds__(WARPS * 32, 2) void append8_kernel(Rope r, Rows p) {
  __shared__ unsigned long long digest;
  pdl_wait();
  pdl_next();
  xk_seg s = r.segs[blockIdx.x];
  if (s.n == 0) return;
  constexpr int TEAMS = WARPS * 32 / TEAM;
  const int kv_head = blockIdx.y, lane = threadIdx.x % 32, team = threadIdx.x / TEAM, j = threadIdx.x % TEAM;
  const unsigned mask = TEAM == 32 ? ~0u : 0xffffu << (lane & 16);
  const int dim = p.row_bytes, half = dim / 2, group = r.heads / p.kv_heads, width = (r.heads + 2 * p.kv_heads) * dim;
  const int64_t slot = int64_t(s.block) * p.kv_heads + kv_head;
  if (threadIdx.x == 0) digest = 0;
  const bool on = 4 * j < half;
  const uint64_t key = lane_key(j % 2 ? half / 8 + j / 2 : j / 2); // odd lanes hash the second half
  auto sum = [&](auto v) {
#pragma unroll
    for (int o = TEAM / 2; o; o >>= 1) v += __shfl_xor_sync(mask, v, o);
    return v;
  };

  // A task is a row of a token: 0 is K, 1 is V, the others are the group's queries.
  const int tasks = 2 + group;
  uint64_t mine = 0; // of the digest
  for (int i = team; i < s.n * tasks; i += TEAMS) {
    const int token = i / tasks, task = i - token * tasks, pos = s.pos + s.at + token;
    const int column = (task == 0 ? r.heads + kv_head : task == 1 ? r.heads + p.kv_heads + kv_head : kv_head * group + task - 2) * dim + 4 * j;
    element *row = r.qkv + int64_t(s.row + token) * width + column;
    float x[2][4] = {}; // the halves
    if (on) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        uint2 raw = *reinterpret_cast<const uint2 *>(row + h * half);
        float2 a = unpack<bf16>(raw.x), b = unpack<bf16>(raw.y);
        x[h][0] = a.x, x[h][1] = a.y, x[h][2] = b.x, x[h][3] = b.y;
        if (r.bias)
#pragma unroll
          for (int k = 0; k < 4; k++) x[h][k] += r.bias[column + h * half + k];
      }
    }
    const float *norm = task == 0 ? r.k_norm : task == 1 ? nullptr : r.q_norm;
    if (norm) {
      float squares = 0;
#pragma unroll
      for (int k = 0; k < 4; k++) squares += x[0][k] * x[0][k] + x[1][k] * x[1][k];
      float by = rsqrtf(sum(squares) / float(dim) + r.eps);
      if (on)
#pragma unroll
        for (int k = 0; k < 4; k++) x[0][k] *= by * norm[4 * j + k], x[1][k] *= by * norm[half + 4 * j + k];
    }
    if (task != 1 && on) {
      const float4 *from = reinterpret_cast<const float4 *>(r.table + int64_t(pos) * half + 4 * j);
      float4 cs[2] = {from[0], from[1]}; // cos, sin of four pairs
      const float *c = reinterpret_cast<const float *>(cs);
#pragma unroll
      for (int k = 0; k < 4; k++) {
        float a = x[0][k];
        x[0][k] = a * c[2 * k] - x[1][k] * c[2 * k + 1], x[1][k] = x[1][k] * c[2 * k] + a * c[2 * k + 1];
      }
    }
    uint2 packed[2];
#pragma unroll
    for (int h = 0; h < 2; h++) packed[h] = make_uint2(pack<bf16>(x[h][0], x[h][1]), pack<bf16>(x[h][2], x[h][3]));
    if (task >= 2) {
      if (on) *reinterpret_cast<uint2 *>(row) = packed[0], *reinterpret_cast<uint2 *>(row + half) = packed[1];
      continue;
    }
    float most = 0;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float2 a = unpack<bf16>(packed[h].x), b = unpack<bf16>(packed[h].y);
      x[h][0] = a.x, x[h][1] = a.y, x[h][2] = b.x, x[h][3] = b.y;
#pragma unroll
      for (int k = 0; k < 4; k++) most = fmaxf(most, finite_magnitude(x[h][k]));
    }
#pragma unroll
    for (int o = TEAM / 2; o; o >>= 1) most = fmaxf(most, __shfl_xor_sync(mask, most, o));
    const float scale = e4m3_scale(most);
    uint32_t q[2];
#pragma unroll
    for (int h = 0; h < 2; h++) q[h] = e4m3x2(x[h][0], x[h][1], scale) | e4m3x2(x[h][2], x[h][3], scale) << 16;
    uint32_t theirs = __shfl_xor_sync(mask, j % 2 ? q[0] : q[1], 1);
    uint64_t hash = !on ? 0 : j % 2 ? lane_hash(theirs, q[1], key) : lane_hash(q[0], theirs, key);
    hash = sum(hash);
    const int at = s.at + token;
    uint8_t *to = p.row(s.block, task, kv_head, at) + 4 * j;
    if (on) *reinterpret_cast<uint32_t *>(to) = q[0], *reinterpret_cast<uint32_t *>(to + half) = q[1];
    if (j == 0) {
      *p.scale(s.block, task, kv_head, at) = scale;
      mine += row_hash(hash + scale_hash(scale, dim), r.layer, task, p.first_head + kv_head, pos);
    }
  }
  int filled = p.filled[slot];
  __syncthreads();
  if (mine) atomicAdd(&digest, (unsigned long long)mine);
  if (filled != s.at) { // the stored digest is of other rows: hash those below again
    for (int w = threadIdx.x / 32; w < 2 * s.at; w += WARPS) {
      int at = w / 2, kv = w % 2;
      const uint2 *from = reinterpret_cast<const uint2 *>(p.row(s.block, kv, kv_head, at));
      uint64_t hash = 0;
      for (int k = lane; k < dim / 8; k += 32) hash += lane_hash(from[k].x, from[k].y, lane_key(k));
      hash = warp_sum(hash) + scale_hash(*p.scale(s.block, kv, kv_head, at), dim);
      if (lane == 0) atomicAdd(&digest, (unsigned long long)row_hash(hash, r.layer, kv, p.first_head + kv_head, s.pos + at));
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    p.digest[slot] = digest + (filled == s.at ? p.digest[slot] : 0);
    p.filled[slot] = uint16_t(s.at + s.n);
  }
}

// ---------------------------------------------------------------- launchers

int32_t xk_append8(const Launch &l, const Rope &r, const Rows &p) {
  dim3 grid(r.n_segs, p.kv_heads);
  if (p.row_bytes <= 128) return launch(l, append8_kernel<16>, grid, WARPS * 32, 0, r, p);
  return launch(l, append8_kernel<32>, grid, WARPS * 32, 0, r, p);
}
