// Prefill attention over FP8 pools: the blocks of a step's prompts are widened to
// bf16 into a pool of scratch, layer by layer, and the bf16 kernels read that. So
// the multiplications run as fast as ever and have no second form; it costs a
// read of the FP8 rows and a write of twice as many bytes a layer, of all that
// comes before a chunk. Widening rounds once to bf16.
//
// attn_any8 reads FP8 itself, slowly, for what no fast kernel takes: any head_dim
// and group.
// Oracle: probe/kv8.cuh, and the logits of a bf16 pool.
#include <algorithm>

#include "context.cuh"
#include "rows.cuh"

static constexpr int THREADS = 256;

// One CTA a block: 16 elements a thread. to has the blocks of a bf16 pool of the
// same shape.
static __global__ __launch_bounds__(THREADS) void widen_kernel(Rows p, const __grid_constant__ Widen w, const int32_t *tail, element *to, int32_t *to_tail) {
  pdl_wait();
  pdl_next();
  int i = 0;
  while (i + 1 < w.n && w.seq[i + 1].first <= int(blockIdx.x)) i++;
  const int entry = w.seq[i].table + int(blockIdx.x) - w.seq[i].first;
  const int block = tail[entry];
  if (threadIdx.x == 0) to_tail[entry] = blockIdx.x;
  const uint4 *from = reinterpret_cast<const uint4 *>(p.data + block * p.run);
  const float *scales = reinterpret_cast<const float *>(p.data + block * p.run + p.rows_run());
  uint4 *out = reinterpret_cast<uint4 *>(to + blockIdx.x * p.rows_run());
  const int parts = p.row_bytes / 16, n = int(p.rows_run() / 16);
#pragma unroll 4
  for (int k = threadIdx.x; k < n; k += THREADS) {
    const uint4 v = from[k];
    const float s = scales[k / parts];
    auto two = [&](uint32_t e4m3) {
      float2 f = widen2(uint16_t(e4m3));
      return pack<bf16>(f.x * s, f.y * s);
    };
    out[2 * k] = make_uint4(two(v.x), two(v.x >> 16), two(v.y), two(v.y >> 16));
    out[2 * k + 1] = make_uint4(two(v.z), two(v.z >> 16), two(v.w), two(v.w >> 16));
  }
}

// One CTA of four warps a (row, head): each warp takes every fourth position.
static __global__ __launch_bounds__(128) void any8_kernel(Attention a, Rows p, const int32_t *rows) {
  __shared__ float stat[4][2], merged[4][256];
  pdl_wait();
  pdl_next();
  const int row = rows ? rows[blockIdx.x] : int(blockIdx.x), head = blockIdx.y, dim = p.row_bytes;
  const int length = a.positions[row] + 1;
  if (length <= 0) return;
  const int kv_head = head / (a.heads / p.kv_heads), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int32_t *table = a.tail + a.tables[row];
  const element *q = a.qkv + int64_t(row) * (a.heads + 2 * p.kv_heads) * dim + head * dim;
  float x[8] = {}, o[8] = {}, top = -INFINITY, sum = 0;
  auto of8 = [](uint8_t e4m3) { return widen2(e4m3).x; };
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (lane + 32 * i < dim) x[i] = widen<bf16>(q[lane + 32 * i]);
  for (int pos = warp; pos < length; pos += 4) {
    const int b = p.bt.div(pos), block = __ldg(table + b), at = pos - b * p.bt.d;
    const uint8_t *k = p.row(block, 0, kv_head, at), *v = p.row(block, 1, kv_head, at);
    float s = 0;
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (lane + 32 * i < dim) s += x[i] * of8(k[lane + 32 * i]);
    s = warp_sum(s) * *p.scale(block, 0, kv_head, at) * a.scale;
    float most = fmaxf(top, s), old = expf(top - most), now = expf(s - most);
    top = most;
    sum = sum * old + now;
    now *= *p.scale(block, 1, kv_head, at);
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (lane + 32 * i < dim) o[i] = o[i] * old + now * of8(v[lane + 32 * i]);
  }
  if (lane == 0) stat[warp][0] = top, stat[warp][1] = sum;
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (lane + 32 * i < dim) merged[warp][lane + 32 * i] = o[i];
  __syncthreads();
  for (int d = threadIdx.x; d < dim; d += 128) {
    float m = fmaxf(fmaxf(stat[0][0], stat[1][0]), fmaxf(stat[2][0], stat[3][0])), l = 0, v = 0;
    for (int w = 0; w < 4; w++) {
      float f = expf(stat[w][0] - m);
      l += f * stat[w][1];
      v += f * merged[w][d];
    }
    a.out[int64_t(row) * a.heads * dim + head * dim + d] = narrow<bf16>(v / l);
  }
}

// ---------------------------------------------------------------- launchers

int32_t xk_widen(const Launch &l, const Rows &p, const Widen &w, const int32_t *tail, element *to, int32_t *to_tail) {
  return launch(l, widen_kernel, w.blocks, THREADS, 0, p, w, tail, to, to_tail);
}

int32_t xk_attn_any8(const Launch &l, const Attention &a, const Rows &p, const int32_t *rows, int n_rows) {
  return launch(l, any8_kernel, dim3(n_rows, a.heads), 128, 0, a, p, rows);
}

// Tiles first.. whose sequences' blocks fit in the scratch together; returns how
// many.
static int gather(const xk_ctx *c, const xk_tile *tiles, int first, int n, Widen *w) {
  w->n = w->blocks = 0;
  for (int i = first; i < n; i++) {
    const xk_tile &t = tiles[i]; // the longest of a sequence comes first
    bool known = false;
    for (int k = 0; k < w->n && !known; k++) known = w->seq[k].table == t.table;
    if (known) continue;
    int blocks = div_up(t.pos + t.n, c->cfg.block_tokens);
    if (w->n == Widen::MOST || w->blocks + blocks > c->wide_blocks) return i - first;
    w->seq[w->n++] = {t.table, w->blocks};
    w->blocks += blocks;
  }
  return n - first;
}

int32_t xk_attend8(xk_ctx *c, const Launch &l, Attention a, Prefill f, const xk_tile *tiles, const xk_step_args &step, int layer, const int32_t *decode, const xk_span *spans) {
  const xk_config &g = c->cfg;
  const int group = g.heads / g.kv_heads, n = f.n_tiles;
  Rows p = c->rows_of(layer);
  if (!xk_attn_fast(g.head_dim, group)) return xk_attn_any8(l, a, p, nullptr, step.n_rows);
  Pool wide;
  wide.data = c->wide, wide.digest = nullptr, wide.filled = nullptr;
  wide.kv_heads = g.kv_heads, wide.head_dim = g.head_dim, wide.bt = FastDiv(g.block_tokens);
  const xk_tile *device = f.tiles;
  f.kv_map = c->hopper ? &c->kv_map : nullptr, f.first_row = 0;
  f.total_rows = int(c->wide_blocks * p.rows_run() / p.row_bytes);
  Attention b = a;
  b.tail = c->wide_tail;
  for (int first = 0; first < n; first += f.n_tiles) {
    Widen w;
    f.n_tiles = gather(c, tiles, first, n, &w);
    if (!f.n_tiles) return xk_fail(XK_INVALID, "a sequence of %d positions: scratch holds %d", tiles[first].pos + tiles[first].n, c->wide_blocks * g.block_tokens);
    f.tiles = device + first, f.longest = tiles[first].pos + tiles[first].n;
    if (f.n_tiles < n) f.n_parts = f.n_merges = 0; // the plan is for all of them at once
    XK_OK_OR_RETURN(xk_widen(l, p, w, a.tail, c->wide, c->wide_tail));
    XK_OK_OR_RETURN(xk_attn_prefill(l, b, wide, f));
  }
  if (!step.n_decode) return XK_OK;
  if (!xk_attn_decode8_takes(g.head_dim, group)) return xk_attn_any8(l, a, p, decode, step.n_decode);
  return xk_attn_decode8(l, a, p, spans, step.n_spans, step.n_decode, c->sms);
}
