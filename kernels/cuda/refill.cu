// Fills blocks of a peer whose pool has another block size, keeps another part of
// the KV heads, or has rows of another dtype: rows, digests and row counts, then a
// flag (kernels.Refill).
//
// A warp takes one KV head of a source block and walks its positions: pieces that
// go to one destination block each, and gaps that go nowhere. Of a source that is
// cut every row is hashed in the registers it passes through, gaps too; its pieces'
// digests are added up in a table of (refill, head), and to each of them what the
// source's stored digest is off by: nothing, or what makes them all wrong. A source
// that goes whole adds its stored digest. Where rows change their dtype, all are
// hashed twice in the registers: as they lie here, for that comparison, and as they
// are sent, for the pieces. A second kernel then writes the table out to the peer,
// clears it, and sets the flag.
// Bound by the link. Oracle: kerneltest.FakeGPU, kvconn/convert to the bit, and
// Verify of the peer.
#include <algorithm>
#include <cstring>

#include "convert.cuh"
#include "move.cuh"

namespace {

constexpr int THREADS = 512;

struct Source {
  int block, first, rows; // of positions
  int refill, end;        // those that it has rows for
};
struct Target {
  int block, first, rows;
};

struct End {
  Side side; // of the layer
  int64_t run;  // bytes of a block
  int heads, bt, head; // head: the first that goes
  int row_bytes;
};

struct Job {
  End from, to;
  int layer, heads, first_head; // first_head: the model's number of our head 0
  int n_sources, n_refills;
  const Source *sources;
  const Target *refills;
  unsigned long long *sums; // [refill][head], zero between launches
  Finish finish;
};

__device__ __forceinline__ uint8_t *row(const End &e, int block, int kv, int head, int at) {
  return e.side.rows + block * e.run + ((int64_t(kv) * e.heads + head) * e.bt + at) * e.row_bytes;
}

__device__ __forceinline__ float *scale(const End &e, int block, int kv, int head, int at) {
  const int64_t number = (int64_t(kv) * e.heads + head) * e.bt + at;
  return reinterpret_cast<float *>(e.side.rows + block * e.run + int64_t(2) * e.heads * e.bt * e.row_bytes) + number;
}

constexpr uint64_t WRONG = 0x9e3779b97f4a7c15ull; // added to digests of what is none

// Digests, of lane 0: of rows as they lie here, and as they went.
struct Sums {
  uint64_t here, sent;
};

template <int TEAM> __device__ __forceinline__ uint64_t team_sum(uint64_t h) {
#pragma unroll
  for (int o = TEAM / 2; o; o >>= 1) h += __shfl_xor_sync(~0u, h, o);
  return h;
}

// How a warp moves n positions from pos on of a source's head, whose row at holds
// pos: to row `there` of the target, or nowhere. TEAM lanes have a row.

// As they are. Hashed if `hash`.
template <int TEAM, bool SCALED> struct Copy {
  static constexpr bool CONVERTS = false;
  const int lane = threadIdx.x % TEAM;
  const uint64_t key0 = lane_key(2 * lane), key1 = lane_key(2 * lane + 1);

  __device__ Sums move(const Job &j, int src, int head, int at, int dst, int there, int n, int pos, bool hash) const {
    constexpr int ROWS = 32 / TEAM, DEPTH = 8; // at a time; vectors in flight a thread
    const int team = threadIdx.x % 32 / TEAM;
    const bool on = 16 * lane < j.from.row_bytes;
    const int own = j.from.head + head, theirs = j.to.head + head;
    const uint4 *from[2];
    uint4 *to[2];
#pragma unroll
    for (int kv = 0; kv < 2; kv++) {
      from[kv] = reinterpret_cast<const uint4 *>(row(j.from, src, kv, own, at)) + lane;
      to[kv] = reinterpret_cast<uint4 *>(row(j.to, max(dst, 0), kv, theirs, there)) + lane;
    }
    const int step = j.from.row_bytes / 16;
    uint64_t sum = 0;
    for (int base = 0; base < 2 * n; base += ROWS * DEPTH) {
      uint4 v[DEPTH] = {};
      float f[DEPTH];
#pragma unroll
      for (int k = 0; k < DEPTH; k++) {
        const int w = base + k * ROWS + team, kv = w >= n, r = w - (kv ? n : 0);
        if (on && w < 2 * n) v[k] = load_once((kv ? from[1] : from[0]) + r * step);
        if (SCALED && lane == 0 && w < 2 * n) f[k] = *scale(j.from, src, kv, own, at + r);
      }
      if (dst >= 0) {
#pragma unroll
        for (int k = 0; k < DEPTH; k++) {
          const int w = base + k * ROWS + team, kv = w >= n, r = w - (kv ? n : 0);
          if (on && w < 2 * n) (kv ? to[1] : to[0])[r * step] = v[k];
          if (SCALED && lane == 0 && w < 2 * n) *scale(j.to, dst, kv, theirs, there + r) = f[k];
        }
      }
      if (!hash) continue;
#pragma unroll
      for (int k = 0; k < DEPTH; k++) {
        const int w = base + k * ROWS + team, kv = w >= n, r = w - (kv ? n : 0);
        uint64_t h = team_sum<TEAM>(on ? lane_hash(v[k].x, v[k].y, key0) + lane_hash(v[k].z, v[k].w, key1) : 0);
        if (SCALED && lane == 0) h += scale_hash(f[k], j.from.row_bytes);
        if (lane == 0 && w < 2 * n) sum += row_hash(h, j.layer, kv, j.first_head + own, pos + r);
      }
    }
    sum = hash ? warp_sum(sum) : 0;
    return {sum, sum};
  }
};

// In another form: always hashed, so that a bad row is found.
template <int TEAM, typename FROM, typename TO> struct Convert {
  static constexpr bool CONVERTS = true;
  const int lane = threadIdx.x % TEAM;
  const typename FROM::Keys from{lane};
  const typename TO::Keys to{lane};

  __device__ Sums move(const Job &j, int src, int head, int at, int dst, int there, int n, int pos, bool) const {
    constexpr int ROWS = 32 / TEAM, DEPTH = 4;
    const int team = threadIdx.x % 32 / TEAM;
    const bool on = int(sizeof(typename FROM::Eight)) * lane < j.from.row_bytes;
    const int own = j.from.head + head, theirs = j.to.head + head;
    Sums sum = {};
    for (int base = 0; base < 2 * n; base += ROWS * DEPTH) {
      typename FROM::Eight v[DEPTH] = {};
      float f[DEPTH] = {};
#pragma unroll
      for (int k = 0; k < DEPTH; k++) {
        const int w = base + k * ROWS + team, kv = w >= n, r = w - (kv ? n : 0);
        if (on && w < 2 * n) v[k] = load_once(reinterpret_cast<const typename FROM::Eight *>(row(j.from, src, kv, own, at + r)) + lane);
        if (FROM::SCALED && w < 2 * n) f[k] = *scale(j.from, src, kv, own, at + r);
      }
#pragma unroll
      for (int k = 0; k < DEPTH; k++) {
        const int w = base + k * ROWS + team, kv = w >= n, r = w - (kv ? n : 0);
        uint64_t h = team_sum<TEAM>(on ? from.hash(v[k]) : 0);
        if (FROM::SCALED) h += scale_hash(f[k], j.from.row_bytes);
        if (lane == 0 && w < 2 * n) sum.here += row_hash(h, j.layer, kv, j.first_head + own, pos + r);
        if (dst < 0) continue; // of the whole warp
        float x[8], by = 0;
        FROM::widen(v[k], f[k], x); // of lanes without elements: zeros
        if (TO::SCALED) {
          float most = 0;
#pragma unroll
          for (int i = 0; i < 8; i++) most = fmaxf(most, finite_magnitude(x[i]));
#pragma unroll
          for (int o = TEAM / 2; o; o >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
          by = e4m3_scale(most);
        }
        const typename TO::Eight y = TO::round(x, by);
        h = team_sum<TEAM>(on ? to.hash(y) : 0);
        if (TO::SCALED) h += scale_hash(by, j.to.row_bytes);
        if (on && w < 2 * n) reinterpret_cast<typename TO::Eight *>(row(j.to, dst, kv, theirs, there + r))[lane] = y;
        if (TO::SCALED && lane == 0 && w < 2 * n) *scale(j.to, dst, kv, theirs, there + r) = by;
        if (lane == 0 && w < 2 * n) sum.sent += row_hash(h, j.layer, kv, j.first_head + own, pos + r);
      }
    }
    return {warp_sum(sum.here), warp_sum(sum.sent)};
  }
};

template <typename Mover> __global__ __launch_bounds__(THREADS, 1) void refill_kernel(const __grid_constant__ Job j) {
  const Mover mover;
  const int warps = gridDim.x * (THREADS / 32), units = j.n_sources * j.heads;
  for (int u = blockIdx.x * (THREADS / 32) + threadIdx.x / 32; u < units; u += warps) {
    const Source s = j.sources[u / j.heads];
    const int head = u % j.heads, end = s.first + s.rows;
    const int64_t slot = int64_t(s.block) * j.from.heads + j.from.head + head;
    const uint64_t stored = j.from.side.digest[slot];
    const bool covers = j.from.side.filled[slot] == s.rows;
    Target t = j.refills[s.refill];
    const bool cut = Mover::CONVERTS || s.end - s.refill > 1 || t.first > s.first || t.first + t.rows < end;
    uint64_t total = 0;
    for (int pos = s.first, i = s.refill; pos < end;) {
      const bool gap = i == s.end || pos < t.first;
      const int stop = min(end, i == s.end ? end : gap ? t.first : t.first + t.rows);
      const Sums sum = mover.move(j, s.block, head, pos - s.first, gap ? -1 : t.block, gap ? 0 : pos - t.first, stop - pos, pos, cut);
      total += sum.here;
      if (!gap) {
        if (cut && threadIdx.x % 32 == 0) atomicAdd(&j.sums[int64_t(i) * j.heads + head], (unsigned long long)sum.sent);
        if (++i < s.end) t = j.refills[i];
      }
      pos = stop;
    }
    if (threadIdx.x % 32) continue;
    const uint64_t off = (cut ? stored - total : stored) + (covers ? 0 : WRONG);
    for (int i = s.refill; off && i < s.end; i++) atomicAdd(&j.sums[int64_t(i) * j.heads + head], (unsigned long long)off);
  }
  __threadfence_system(); // what the flag of the kernel behind this one says is there
}

__global__ __launch_bounds__(THREADS) void seal_kernel(const __grid_constant__ Job j) {
  for (int u = blockIdx.x * THREADS + threadIdx.x; u < j.n_refills * j.heads; u += gridDim.x * THREADS) {
    const Target t = j.refills[u / j.heads];
    const int64_t slot = int64_t(t.block) * j.to.heads + j.to.head + u % j.heads;
    j.to.side.digest[slot] = j.sums[u], j.to.side.filled[slot] = t.rows;
    j.sums[u] = 0;
  }
  __syncthreads();
  finish_push(j.finish);
}

End end_of(const xk_config &g, const Side &side, int layer, int head) {
  End e = {side, xk_block_run(g), g.kv_heads, g.block_tokens, head, xk_row_bytes(g)};
  e.side.rows += layer * side.layer_bytes, e.side.digest += layer * side.layer_slots, e.side.filled += layer * side.layer_slots;
  return e;
}

// A call of f with what rows of a type are.
template <typename F> void of_type(RowType t, F f) {
  switch (t) {
  case ROWS_BF16: return f(Half<bf16>{});
  case ROWS_F16: return f(Half<fp16>{});
  case ROWS_F8: return f(Scaled{});
  }
}

// As kernels.Push.CheckRefills, which says what is wrong.
int32_t check(const xk_peer *p, const xk_refill_args &a, const xk_held *held, const xk_refill *refills) {
  const xk_config &g = p->c->cfg, &t = p->shape;
  const auto bad = [&](const char *what, int i) { return xk_fail(XK_INVALID, "refill of %d blocks from %d of layer %d: %s %d", a.n_refills, a.n_sources, a.layer, what, i); };
  if (a.layer < 0 || a.layer >= g.layers || a.n_refills < 1 || a.n_sources < 1 || a.n_sources > REFILL_LIST || a.n_refills > REFILL_LIST || a.ctas < 0 || a.line < 0 || a.line >= XK_FLAG_LINES) return bad("line", a.line);
  if (a.heads < 1 || a.from_head < 0 || a.to_head < 0 || a.from_head > g.kv_heads - a.heads || a.to_head > t.kv_heads - a.heads) return bad("heads", a.heads);
  for (int i = 0; i < a.n_sources; i++)
    if (held[i].block < 0 || held[i].block >= p->c->blocks || held[i].rows < 1 || held[i].rows > g.block_tokens || held[i].first_pos < 0 || held[i].first_pos > INT32_MAX - 1024) return bad("source", i);
  int pos = 0, used = 0;
  for (int i = 0; i < a.n_refills; i++) {
    const xk_refill &r = refills[i];
    if (r.block < 0 || r.block >= p->blocks || r.rows < 1 || r.rows > t.block_tokens || r.first_pos < pos || r.first_pos > INT32_MAX - 1024) return bad("refill", i);
    if (r.count < 1 || r.count > r.rows || r.first < 0 || r.first > a.n_sources - r.count || (r.first != used && r.first != used - 1)) return bad("sources of refill", i);
    pos = r.first_pos + r.rows, used = r.first + r.count;
    int at = r.first_pos;
    for (int k = r.first; k < used; k++) {
      const xk_held &s = held[k];
      if (at < s.first_pos || at >= s.first_pos + s.rows || (k > r.first && at != s.first_pos)) return bad("positions of refill", i);
      at = std::min(pos, s.first_pos + s.rows);
    }
    if (at != pos) return bad("end of refill", i);
  }
  return used == a.n_sources ? int32_t(XK_OK) : bad("sources used", used);
}

} // namespace

int32_t xk_refill_push(xk_peer *p, const xk_refill_args *args, const xk_held *held, const xk_refill *refills) {
  const xk_refill_args &a = *args;
  XK_OK_OR_RETURN(check(p, a, held, refills));
  xk_ctx *c = p->c;
  XK_TRY(cudaSetDevice(c->cfg.device));
  std::lock_guard<std::mutex> hold(p->mu);
  if (!p->sums) return xk_fail(XK_INVALID, "refill of a peer of our own shape");
  const int most = int(REFILL_SUMS / a.heads); // refills a launch
  for (int first = 0; first < a.n_refills; first += most) {
    const int n = std::min(most, a.n_refills - first), end = first + n;
    const int from = refills[first].first, sources = refills[end - 1].first + refills[end - 1].count - from;
    const int64_t bytes = sources * int64_t(sizeof(Source)) + n * int64_t(sizeof(Target));
    uint64_t head;
    xk_pair *at;
    XK_OK_OR_RETURN(xk_ring_take(p->ring, div_up(bytes, sizeof(xk_pair)), &head, &at));
    auto *list = reinterpret_cast<Source *>(at);
    auto *targets = reinterpret_cast<Target *>(list + sources);
    for (int i = 0; i < sources; i++) list[i] = {held[from + i].block, held[from + i].first_pos, held[from + i].rows, n, 0};
    for (int i = 0; i < n; i++) {
      const xk_refill &r = refills[first + i];
      targets[i] = {r.block, r.first_pos, r.rows};
      for (int k = r.first - from; k < r.first - from + r.count; k++) list[k].refill = std::min(list[k].refill, i), list[k].end = i + 1;
    }
    Job j = {};
    j.from = end_of(c->cfg, Side(c->cfg, c->blocks, c->region), a.layer, a.from_head), j.to = end_of(p->shape, p->to, a.layer, a.to_head);
    j.layer = a.layer, j.heads = a.heads, j.first_head = c->cfg.first_kv_head;
    j.n_sources = sources, j.n_refills = n, j.sources = list, j.refills = targets, j.sums = p->sums;
    j.finish = finish_of(p, a.line, end < a.n_refills ? 0 : a.value);
    j.finish.freed = p->ring.freed, j.finish.head = head;
    const int ctas = a.ctas ? a.ctas : c->sms;
    const int grid = std::min(ctas, div_up(int64_t(sources) * a.heads, THREADS / 32));
    const auto run = [&](auto kernel) { kernel<<<grid, THREADS, 0, p->stream>>>(j); };
    const bool narrow = c->cfg.head_dim <= 128; // a row is 16 lanes'
    of_type(xk_row_type(c->cfg), [&](auto from) {
      of_type(xk_row_type(p->shape), [&](auto to) {
        using From = decltype(from);
        using To = decltype(to);
        if constexpr (!std::is_same_v<From, To>) narrow ? run(refill_kernel<Convert<16, From, To>>) : run(refill_kernel<Convert<32, From, To>>);
        else if constexpr (From::SCALED) run(refill_kernel<Copy<16, true>>); // rows are head_dim bytes, at most 256, and a scale
        else narrow ? run(refill_kernel<Copy<16, false>>) : run(refill_kernel<Copy<32, false>>);
      });
    });
    XK_TRY(cudaGetLastError());
    seal_kernel<<<std::min(ctas, div_up(int64_t(n) * a.heads, THREADS)), THREADS, 0, p->stream>>>(j);
    XK_TRY(cudaGetLastError());
    p->ring.head = head;
  }
  return XK_OK;
}
