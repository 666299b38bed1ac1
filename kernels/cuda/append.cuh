// Bias, QK-norm, RoPE, KV append and row digests in one pass, for bf16 and FP8
// pools (append.cu, append8.cu). A unit is a (segment, KV head): its group's query
// heads are rotated in place. A segment is the only writer of its (block, head),
// so the digest needs no lock.
//
// Persistent CTAs take units in turn, and the tokens of a unit in pieces. Bulk
// copies bring the rows of a piece, and its cosines, to a stage of shared memory;
// rows are worked on there, and bulk copies take them away. So no load waits for
// what is done with the pieces before.
//
// A row of one head is one vector a lane: four elements of each half, so that
// rotation partners meet in a thread. The lanes of a row are a team.
#pragma once

#include <algorithm>

#include "hopper.cuh"
#include "rows.cuh"

#ifndef RING_STAGES
#define RING_STAGES 3
#endif
#ifndef RING_KIB
#define RING_KIB 32
#endif
#ifndef RING_CTAS
#define RING_CTAS 2
#endif

static constexpr int WARPS = 8, CTAS = RING_CTAS; // a multiprocessor has so many CTAs
static constexpr int STAGES = RING_STAGES, STAGE_BYTES = RING_KIB << 10, MOST = 16; // tokens of a piece at most

static __device__ __forceinline__ void bulk_load(void *dst, const void *src, int bytes, uint64_t *bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem_addr(dst)), "l"(src), "r"(bytes), "r"(smem_addr(bar)) : "memory");
}
static __device__ __forceinline__ void bulk_store(void *dst, const void *src, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(smem_addr(src)), "r"(bytes) : "memory");
}

template <int TEAM, typename T> static __device__ __forceinline__ T team_sum(T v) {
  const unsigned mask = TEAM == 32 ? ~0u : 0xffffu << (threadIdx.x & 16);
#pragma unroll
  for (int o = TEAM / 2; o; o >>= 1) v += __shfl_xor_sync(mask, v, o);
  return v;
}

// Rows of a bf16 pool: their bytes are what was rotated.
struct Bf16Store {
  Pool p;
  __host__ __device__ int kv_heads() const { return p.kv_heads; }
  __host__ __device__ int dim() const { return p.head_dim; }
  __device__ __forceinline__ int bytes() const { return 2 * p.head_dim; }
  __device__ __forceinline__ uint8_t *row(int block, int kv, int head, int at) const { return reinterpret_cast<uint8_t *>(p.data + p.row(block, kv, head, at)); }

  // What lane j of a team hashes by.
  struct Keys {
    uint64_t lo, hi;
  };
  __device__ __forceinline__ Keys keys(int j, int half) const { return {lane_key(j), lane_key(half / 4 + j)}; }
  // Puts a row where it is copied from and returns its hash.
  template <int TEAM> __device__ __forceinline__ uint64_t put(uint8_t *to, uint2 lo, uint2 hi, int j, bool on, Keys k, int, int, int, int) const {
    if (on) reinterpret_cast<uint2 *>(to)[j] = lo, reinterpret_cast<uint2 *>(to + p.head_dim)[j] = hi;
    return team_sum<TEAM>(on ? lane_hash(lo.x, lo.y, k.lo) + lane_hash(hi.x, hi.y, k.hi) : uint64_t(0));
  }
  // Hash of a row that lies in the pool, by one warp.
  __device__ __forceinline__ uint64_t stored(int block, int kv, int head, int at) const {
    const uint2 *from = reinterpret_cast<const uint2 *>(row(block, kv, head, at));
    uint64_t hash = 0;
    for (int k = threadIdx.x % 32; k < bytes() / 8; k += 32) hash += lane_hash(from[k].x, from[k].y, lane_key(k));
    return warp_sum(hash);
  }
};

// Rows of an FP8 pool: each row, rounded to bf16 as a bf16 pool would keep it, gets
// a scale of its own and E4M3 elements; the hash covers both.
struct Fp8Store {
  Rows p;
  __host__ __device__ int kv_heads() const { return p.kv_heads; }
  __host__ __device__ int dim() const { return p.row_bytes; }
  __device__ __forceinline__ int bytes() const { return p.row_bytes; }
  __device__ __forceinline__ uint8_t *row(int block, int kv, int head, int at) const { return p.row(block, kv, head, at); }

  using Keys = uint64_t;
  __device__ __forceinline__ Keys keys(int j, int half) const { return lane_key(j % 2 ? half / 8 + j / 2 : j / 2); } // odd lanes hash the second half
  // Two neighbours share a lane of the hash: they swap four bytes.
  template <int TEAM> __device__ __forceinline__ uint64_t put(uint8_t *to, uint2 lo, uint2 hi, int j, bool on, Keys key, int block, int kv, int head, int at) const {
    const unsigned mask = TEAM == 32 ? ~0u : 0xffffu << (threadIdx.x & 16);
    float x[2][4], most = 0;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float2 a = unpack(h ? hi.x : lo.x), b = unpack(h ? hi.y : lo.y);
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
    if (on) reinterpret_cast<uint32_t *>(to)[j] = q[0], reinterpret_cast<uint32_t *>(to + p.row_bytes / 2)[j] = q[1];
    if (j == 0) *p.scale(block, kv, head, at) = scale;
    return team_sum<TEAM>(!on ? uint64_t(0) : j % 2 ? lane_hash(theirs, q[1], key) : lane_hash(q[0], theirs, key)) + scale_hash(scale, p.row_bytes);
  }
  __device__ __forceinline__ uint64_t stored(int block, int kv, int head, int at) const {
    const uint2 *from = reinterpret_cast<const uint2 *>(row(block, kv, head, at));
    uint64_t hash = 0;
    for (int k = threadIdx.x % 32; k < p.row_bytes / 8; k += 32) hash += lane_hash(from[k].x, from[k].y, lane_key(k));
    return warp_sum(hash) + scale_hash(*p.scale(block, kv, head, at), p.row_bytes);
  }
};

struct Piece { // tokens first .. first+n-1 of a unit; the last of all has none
  xk_seg s;
  int head, first, n, filled;
  unsigned long long digest; // as stored
};

// TEAM: lanes of a row; 4 TEAM elements are at least half of one. A piece has at
// most `most` tokens. In a stage a token has its K, V and query rows, its cosines.
template <int TEAM, typename Store>
static __global__ __launch_bounds__(WARPS * 32, CTAS) void append_kernel(Rope r, Store p, int most) {
  extern __shared__ __align__(128) uint8_t stages[];
  __shared__ uint64_t full[STAGES];
  __shared__ Piece pieces[STAGES];
  __shared__ unsigned long long sums[2][WARPS], redone;
  constexpr int TEAMS = WARPS * 32 / TEAM;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, team = threadIdx.x / TEAM, j = threadIdx.x % TEAM;
  const int kv_heads = p.kv_heads(), dim = p.dim(), half = dim / 2, group = r.heads / kv_heads, tasks = 2 + group;
  const int width = (r.heads + 2 * kv_heads) * dim, row_bytes = 2 * dim, token_bytes = tasks * row_bytes + 8 * half, units = r.n_segs * kv_heads;
  const bool on = 4 * j < half;
  const typename Store::Keys keys = p.keys(j, half);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) mbar_init(&full[i], 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  // Warp 0 asks for the pieces, a lane for a token. It looks a unit ahead: segments
  // are older than the kernel before this.
#ifdef RING_SEG
  auto seg_index = [&](int u) { return u % r.n_segs; };
  auto head_of = [&](int u) { return u / r.n_segs; };
#else
  auto seg_index = [&](int u) { return u / kv_heads; };
  auto head_of = [&](int u) { return u % kv_heads; };
#endif
  auto seg_of = [&](int u) { return u < units ? r.segs[seg_index(u)] : xk_seg{}; };
  int unit = blockIdx.x, first = 0, filled[2] = {};
  unsigned long long digest[2] = {};
  xk_seg s[2] = {}; // this unit's, and the next one's
  if (warp == 0) s[0] = seg_of(unit), s[1] = seg_of(unit + gridDim.x);
  __syncthreads();
  pdl_wait();
  pdl_next();
  auto look = [&](int i) {
    if (lane || !s[i].n) return;
    int64_t slot = int64_t(s[i].block) * kv_heads + head_of(unit + i * gridDim.x);
    filled[i] = p.p.filled[slot], digest[i] = p.p.digest[slot];
  };
  auto load = [&](int stage) { // the next piece
    while (unit < units && first >= s[0].n) {
      unit += gridDim.x, first = 0;
      s[0] = s[1], filled[0] = filled[1], digest[0] = digest[1];
      s[1] = seg_of(unit + gridDim.x);
      look(1);
    }
    const int n = unit < units ? min(s[0].n - first, most) : 0, head = head_of(unit);
    if (lane < n) {
      const bf16 *row = r.qkv + int64_t(s[0].row + first + lane) * width;
      uint8_t *to = stages + (stage * most + lane) * token_bytes;
      bulk_load(to + 2 * row_bytes, row + head * group * dim, group * row_bytes, &full[stage]);
      bulk_load(to, row + (r.heads + head) * dim, row_bytes, &full[stage]);
      bulk_load(to + row_bytes, row + (r.heads + kv_heads + head) * dim, row_bytes, &full[stage]);
      bulk_load(to + tasks * row_bytes, r.table + int64_t(s[0].pos + s[0].at + first + lane) * half, 8 * half, &full[stage]);
    }
    if (lane == 0) { // the phase cannot end before this, whatever has landed
      pieces[stage] = {s[0], head, first, n, filled[0], digest[0]};
      mbar_expect(&full[stage], n * token_bytes);
    }
    first += n;
  };
  if (warp == 0) {
    look(0), look(1);
    for (int i = 0; i < STAGES - 1; i++) load(i);
  }

  uint64_t mine = 0; // of the digest
  int parity = 0;
  for (int it = 0;; it++) {
    const int stage = it % STAGES;
    mbar_wait(&full[stage], it / STAGES % 2);
    const Piece c = pieces[stage];
    if (c.n == 0) break;
    uint8_t *base = stages + stage * most * token_bytes;
    // Teams are dealt to tokens; what is left over shares a token's rows, or
    // "tasks": 0 is K, 1 is V, the others are the group's query heads.
    int tokens = 1;
    while (tokens < TEAMS && tokens < c.n) tokens *= 2;
    const int slices = TEAMS / tokens;
    for (int i = team % tokens; i < c.n; i += tokens) {
      const int at = c.s.at + c.first + i, pos = c.s.pos + at;
      uint8_t *token = base + i * token_bytes;
      float4 cs[2] = {}; // cos, sin of four pairs
      if (on) {
        const float4 *from = reinterpret_cast<const float4 *>(token + tasks * row_bytes) + 2 * j;
        cs[0] = from[0], cs[1] = from[1];
      }
#pragma unroll 2
      for (int task = team / tokens; task < tasks; task += slices) {
        uint2 *row = reinterpret_cast<uint2 *>(token + task * row_bytes) + j;
        float2 a[2] = {}, z[2] = {}; // the halves
        if (on) {
          uint2 lo = row[0], hi = row[half / 4];
          a[0] = unpack(lo.x), a[1] = unpack(lo.y), z[0] = unpack(hi.x), z[1] = unpack(hi.y);
        }
        if (r.bias && on) {
          const int column = (task == 0 ? r.heads + c.head : task == 1 ? r.heads + kv_heads + c.head : c.head * group + task - 2) * dim + 4 * j;
          const float2 *lo = reinterpret_cast<const float2 *>(r.bias + column), *hi = reinterpret_cast<const float2 *>(r.bias + column + half);
#pragma unroll
          for (int k = 0; k < 2; k++) a[k].x += lo[k].x, a[k].y += lo[k].y, z[k].x += hi[k].x, z[k].y += hi[k].y;
        }
        const float *norm = task == 0 ? r.k_norm : task == 1 ? nullptr : r.q_norm;
        if (norm) {
          float sum = 0;
#pragma unroll
          for (int k = 0; k < 2; k++) sum += a[k].x * a[k].x + a[k].y * a[k].y + z[k].x * z[k].x + z[k].y * z[k].y;
          float scale = rsqrtf(team_sum<TEAM>(sum) / float(dim) + r.eps);
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
        uint2 lo = make_uint2(pack(a[0].x, a[0].y), pack(a[1].x, a[1].y)), hi = make_uint2(pack(z[0].x, z[0].y), pack(z[1].x, z[1].y));
        if (task >= 2) {
          if (on) row[0] = lo, row[half / 4] = hi;
        } else {
          uint64_t hash = p.template put<TEAM>(token + task * row_bytes, lo, hi, j, on, keys, c.s.block, task, c.head, at);
          if (j == 0) mine += row_hash(hash, r.layer, task, c.head, pos);
        }
      }
    }
    fence_async_shared(); // bulk copies read it
    const bool last = c.first + c.n == c.s.n; // piece of the unit
    if (last) {
      mine = warp_sum(mine);
      if (lane == 0) sums[parity][warp] = mine;
      mine = 0;
    }
    __syncthreads();
    if (warp == 0) {
      if (lane < c.n) {
        const int at = c.s.at + c.first + lane;
        uint8_t *from = base + lane * token_bytes;
        bulk_store(r.qkv + int64_t(c.s.row + c.first + lane) * width + c.head * group * dim, from + 2 * row_bytes, group * row_bytes);
        for (int kv = 0; kv < 2; kv++) bulk_store(p.row(c.s.block, kv, c.head, at), from + kv * row_bytes, p.bytes());
      }
      asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 1;" ::: "memory"); // the stage before this is free
      load((it + STAGES - 1) % STAGES);
    }
    if (!last) continue;
    unsigned long long sum = c.digest;
    if (c.filled != c.s.at) { // the stored digest is of other rows: hash those below again
      if (threadIdx.x == 0) redone = 0;
      __syncthreads();
      for (int w = warp; w < 2 * c.s.at; w += WARPS) {
        uint64_t hash = p.stored(c.s.block, w % 2, c.head, w / 2);
        if (lane == 0) atomicAdd(&redone, (unsigned long long)row_hash(hash, r.layer, w % 2, c.head, c.s.pos + w / 2));
      }
      __syncthreads();
      sum = redone;
    }
    if (threadIdx.x == WARPS * 32 - 1) {
      for (int w = 0; w < WARPS; w++) sum += sums[parity][w];
      const int64_t slot = int64_t(c.s.block) * kv_heads + c.head;
      p.p.digest[slot] = sum;
      p.p.filled[slot] = uint16_t(c.s.at + c.s.n);
    }
    parity ^= 1;
  }
  if (warp == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

template <int TEAM, typename Store> int32_t append_with(const Launch &l, const Rope &r, const Store &p) {
  const int token_bytes = (2 + r.heads / p.kv_heads()) * 2 * p.dim() + 4 * p.dim(), units = r.n_segs * p.kv_heads();
  // A step that decodes has one token a segment: what it does not need of shared
  // memory lets the next kernel in.
  const int longest = r.rows ? div_up(r.rows, r.n_segs) : MOST;
  const int most = std::max(1, std::min({MOST, longest, STAGE_BYTES / token_bytes}));
  const int smem = STAGES * most * token_bytes;
  int device, sms;
  XK_TRY(cudaGetDevice(&device));
  XK_TRY(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  XK_TRY(cudaFuncSetAttribute(append_kernel<TEAM, Store>, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
  return launch(l, append_kernel<TEAM, Store>, units < CTAS * sms ? units : CTAS * sms, WARPS * 32, smem, r, p, most);
}
template <typename Store> int32_t append_to(const Launch &l, const Rope &r, const Store &p) {
  return p.dim() <= 128 ? append_with<16>(l, r, p) : append_with<32>(l, r, p);
}
