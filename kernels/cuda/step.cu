// One step: the forward pass over a batch and its draws, launched on one
// stream. Padded decode steps run as a graph, captured at the first use of
// their bucket; everything that varies lies in the arena.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <cuda_profiler_api.h>
#include <sched.h>

#include "context.cuh"

template <typename T> static T *on_device(xk_ctx *c, int64_t offset) { return reinterpret_cast<T *>(c->arena + offset); }
static uint8_t *half_of(xk_ctx *c, const xk_step_args &a) { return static_cast<uint8_t *>(c->buffers.arena) + a.half * c->buffers.arena_bytes; }
template <typename T> static const T *on_host(xk_ctx *c, const xk_step_args &a, int64_t offset) { return reinterpret_cast<const T *>(half_of(c, a) + offset); }

static void use_plan(xk_ctx *c, Prefill *f) {
  f->parts = on_device<xk_part>(c, c->parts), f->merges = on_device<xk_merge>(c, c->merges);
  f->n_parts = int(c->plan.parts.size()), f->n_merges = int(c->plan.merges.size());
}

// Whether the last layer's rows are wanted for their logits alone: then those rows
// attend like decoding ones, and are all that is left behind attention. K and V
// are made of every row. A sequence has about one such row, but where prompts' log
// probabilities are asked for; those many stay with their tiles.
static bool narrows(const xk_step_args &a) { return !a.bucket && a.n_finals < a.n_rows && a.n_finals <= a.n_decode + a.n_tiles; }

static int32_t attend(xk_ctx *c, const Launch &l, const xk_step_args &a, int i) {
  const xk_config &g = c->cfg;
  Pool p = c->pool_of(i);
  Attention t = {c->qkv, c->att, on_device<int32_t>(c, a.positions), on_device<int32_t>(c, a.tables), on_device<int32_t>(c, a.tail),
                 g.heads, 1.0f / sqrtf(float(g.head_dim)), c->partial, c->tickets};
  const xk_span *spans = on_device<xk_span>(c, a.spans);
  if (g.kv_fp8) {
    Prefill f = {on_device<xk_tile>(c, a.tiles), a.n_tiles, 0, &c->q_map, nullptr, &c->heads_map, c->work, c->sms};
    use_plan(c, &f);
    return xk_attend8(c, l, t, f, on_host<xk_tile>(c, a, a.tiles), a, i, on_device<int32_t>(c, a.decode), spans);
  }
  if (!xk_attn_fast(g.head_dim, g.heads / g.kv_heads) || (g.batch_invariant && !c->hopper)) return xk_attn_any(l, t, p, a.n_rows);
  int rows = int(c->layer_bytes() / c->rows_of(0).row_bytes);
  Prefill f = {on_device<xk_tile>(c, a.tiles), a.n_tiles, 0, &c->q_map, c->hopper ? &c->kv_map : nullptr, &c->heads_map, c->work, c->sms, i * rows, g.layers * rows};
  use_plan(c, &f);
  if (a.n_tiles) {
    const xk_tile &longest = on_host<xk_tile>(c, a, a.tiles)[0];
    f.longest = longest.pos + longest.n;
    XK_OK_OR_RETURN(xk_attn_prefill(l, t, p, f));
    t.beside = !f.n_merges; // one is bound by the tensor cores, the other by memory. Both have partial rows
  }
  if (!a.n_decode) return XK_OK;
  if (g.batch_invariant) return xk_attn_decode_hopper(l, t, p, f, on_device<int32_t>(c, a.decode), a.n_decode);
  return xk_attn_decode(l, t, p, spans, a.n_spans);
}

// The norm of the residual stream that QKV or GATE_UP reads.
static int32_t norm(xk_ctx *c, const Launch &l, const float *w, int rows) { return xk_rmsnorm(l, c->x, nullptr, w, c->xn, rows, c->cfg.hidden, c->cfg.norm_eps); }

// Of several ranks the sums of OUT or DOWN are added up here, with the norm behind it, if any.
static int32_t add_up(xk_ctx *c, const Launch &l, bool down, const float *w, int rows) {
  if (!c->alone()) return xk_reduce(c, l, down, w, rows);
  return w ? norm(c, l, w, rows) : XK_OK;
}

static int32_t layer(xk_ctx *c, const Launch &l, const xk_step_args &a, int i) {
  const xk_config &g = c->cfg;
  const Layer &w = c->layers[i];
  if (i == 0) XK_OK_OR_RETURN(norm(c, l, w.attn_norm, a.n_rows));
  XK_OK_OR_RETURN(xk_project(c, l, QKV, i, a.n_rows));
  Rope r = {c->qkv, w.bias, w.q_norm, w.k_norm, c->rope, on_device<xk_seg>(c, a.segs), a.n_segs, g.heads, i, g.norm_eps};
  Pool p = c->pool_of(i);
  XK_OK_OR_RETURN(g.kv_fp8 ? xk_append8(l, r, c->rows_of(i)) : xk_append(l, r, p));
  // What arrives is read by attention first. Once a group: what follows on the
  // stream is behind it too.
  bool waits = false;
  for (xk_arrival *v : c->after) {
    if (v->gate) xk_gate_await(v, i + 1);
    for (size_t k = 0; k < v->until.size(); k++)
      if ((k ? v->until[k - 1] : v->first) == i) {
        XK_TRY(cudaStreamWaitEvent(l.stream, v->good[k], 0));
        waits = true;
      }
  }
  const Launch behind = c->on_stream(false); // begins nothing early
  // Recorded where no kernel begins early behind another's end (PDL): before a
  // projection. Only of the last layer it counts when a push can begin.
  const bool last = i == g.layers - 1;
  auto tell = [&]() -> int32_t {
    XK_TRY(cudaEventRecord(c->layer_done[c->launched % 2][i], l.stream));
    return XK_OK;
  };
  if (a.on_layer && last) XK_OK_OR_RETURN(tell());
  int rows = a.n_rows;
  if (last && narrows(a)) {
    if (!a.n_finals) return XK_OK;
    xk_step_args few = a;
    few.n_tiles = 0, few.n_decode = rows = a.n_finals, few.decode = a.finals;
    few.spans = a.final_spans, few.n_spans = a.n_final_spans;
    XK_OK_OR_RETURN(attend(c, behind, few, i)); // else decode attention would read positions that are being appended
    const int32_t *finals = on_device<int32_t>(c, a.finals);
    XK_OK_OR_RETURN(xk_keep_rows(l, c->x, finals, rows, c->residual_row()));
    XK_OK_OR_RETURN(xk_keep_rows(l, c->att, finals, rows, int64_t(g.heads) * g.head_dim * sizeof(element)));
  } else {
    XK_OK_OR_RETURN(attend(c, waits ? behind : l, a, i));
  }
  if (a.on_layer && !last) XK_OK_OR_RETURN(tell());
  XK_OK_OR_RETURN(xk_project(c, l, OUT, i, rows));
  XK_OK_OR_RETURN(add_up(c, l, false, w.mlp_norm, rows));
  const float *next = last ? nullptr : c->layers[i + 1].attn_norm;
  if (g.experts) {
    XK_OK_OR_RETURN(xk_mix(c, l, i, rows, a.bucket ? on_device<int32_t>(c, a.positions) : nullptr, next));
    return c->alone() ? XK_OK : add_up(c, l, true, next, rows);
  }
  XK_OK_OR_RETURN(xk_project(c, l, GATE_UP, i, rows));
  XK_OK_OR_RETURN(xk_project(c, l, DOWN, i, rows));
  return add_up(c, l, true, next, rows);
}

// Hidden states of finals first .. first+n-1: behind the final norm.
static int32_t last_norm(xk_ctx *c, const Launch &l, const xk_step_args &a, int first, int n) {
  const xk_config &g = c->cfg;
  if (narrows(a)) return xk_rmsnorm(l, c->residual_at(first), nullptr, c->norm, c->last, n, g.hidden, g.norm_eps);
  return xk_rmsnorm(l, c->x, on_device<int32_t>(c, a.finals) + first, c->norm, c->last, n, g.hidden, g.norm_eps);
}

// Logits of the same.
static int32_t logits(xk_ctx *c, const Launch &l, const xk_step_args &a, int first, int n) {
  XK_OK_OR_RETURN(last_norm(c, l, a, first, n));
  XK_OK_OR_RETURN(xk_project(c, l, HEAD, 0, n));
  if (c->alone()) return XK_OK;
  const uint32_t others = ~1u; // into rank 0's logits, which draws
  if (c->exchange && c->cfg.rank) XK_OK_OR_RETURN(xk_exchange_logits(c, l, n));
  XK_OK_OR_RETURN(xk_meet(c, l, Ranks::LOGITS, others, 1));
  return c->exchange && !c->cfg.rank ? xk_exchange_all_logits(c, l, n) : XK_OK;
}

// Draws and log probabilities of finals from first on, whose logits are there. Samples and
// items of that range follow each other.
static int32_t draws(xk_ctx *c, const Launch &l, const xk_step_args &a, int first, int s0, int s1, int i0, int i1) {
  const xk_config &g = c->cfg;
  if (g.rank) return XK_OK;
  Sampling s = {c->logits, c->scratch, c->sms, g.vocab, c->stride, first, nullptr, on_device<xk_adjust>(c, a.adjust), 0, nullptr, nullptr, nullptr,
                a.n_masks ? c->masks : nullptr, c->buffers.mask_words};
  for (int at = s0; at < s1; at += g.max_seqs) { // scratch has max_seqs rows
    s.samples = on_device<xk_sample>(c, a.samples) + at;
    s.n_samples = std::min(s1 - at, g.max_seqs);
    s.tokens = c->buffers.tokens, s.device_tokens = c->device_tokens + at;
    if (a.n_masks) s.mask_of = on_device<int32_t>(c, a.masks) + at;
    XK_OK_OR_RETURN(xk_draw(l, s));
  }
  if (i1 > i0) XK_OK_OR_RETURN(xk_logprobs(l, s, on_device<xk_item>(c, a.items) + i0, i1 - i0, c->device_tokens, c->buffers.logprobs));
  return XK_OK;
}

static int32_t answer(xk_ctx *c, const Launch &l, const xk_step_args &a, int first, int n, int s0, int s1, int i0, int i1) {
  XK_OK_OR_RETURN(logits(c, l, a, first, n));
  return draws(c, l, a, first, s0, s1, i0, i1);
}

static int32_t copy_wants(xk_ctx *c, const xk_step_args &a, int first, int n, int *next) {
  if (c->cfg.rank) return XK_OK;
  const int32_t *wants = on_host<int32_t>(c, a, a.wants);
  for (; *next < a.n_wants && wants[*next] < first + n; ++*next)
    XK_TRY(cudaMemcpyAsync(c->buffers.logits + int64_t(*next) * c->cfg.vocab, c->logits + int64_t(wants[*next] - first) * c->stride,
                           c->cfg.vocab * sizeof(float), cudaMemcpyDeviceToHost, c->stream));
  return XK_OK;
}

// Copies out the hidden states of finals first .. first+n-1 that are wanted, which lie in c->last; those
// that follow each other in one piece.
static int32_t copy_states(xk_ctx *c, const xk_step_args &a, int first, int n, int *next) {
  if (c->cfg.rank) return XK_OK;
  const int64_t row = c->cfg.hidden;
  const int32_t *states = on_host<int32_t>(c, a, a.states);
  uint16_t *to = c->buffers.states + a.half * c->buffers.max_states * row;
  while (*next < a.n_states && states[*next] < first + n) {
    int run = 1;
    while (*next + run < a.n_states && states[*next + run] == states[*next] + run && states[*next + run] < first + n) run++;
    XK_TRY(cudaMemcpyAsync(to + *next * row, c->last + (states[*next] - first) * row, run * row * sizeof(element), cudaMemcpyDeviceToHost, c->stream));
    *next += run;
  }
  return XK_OK;
}

// Whether the logits of finals first .. first+n-1 are wanted. Where hidden states alone are, none are made.
static bool wants_logits(xk_ctx *c, const xk_step_args &a, int first, int n) {
  if (!a.n_states) return true;
  const int32_t *states = on_host<int32_t>(c, a, a.states), *end = states + a.n_states;
  return std::lower_bound(states, end, first + n) - std::lower_bound(states, end, first) < n;
}

static int32_t forward(xk_ctx *c, const Launch &l, const xk_step_args &a) {
  if (c->exchange && !c->cfg.rank) XK_OK_OR_RETURN(xk_exchange_tokens(c, l));
  if (!c->alone()) XK_OK_OR_RETURN(xk_meet(c, l, Ranks::BEGIN, 1, ~1u)); // rank 0 has drawn what the step before did
  XK_OK_OR_RETURN(xk_embed(l, c->embed, on_device<int32_t>(c, a.tokens), c->alone() ? c->device_tokens : c->drawn, c->x, a.n_rows, c->cfg.hidden));
  for (int i = 0; i < c->cfg.layers; i++) XK_OK_OR_RETURN(layer(c, l, a, i));
  return XK_OK;
}

static int32_t eager(xk_ctx *c, const Launch &l, const xk_step_args &a) {
  XK_OK_OR_RETURN(forward(c, l, a));
  const xk_sample *samples = on_host<xk_sample>(c, a, a.samples);
  const xk_item *items = on_host<xk_item>(c, a, a.items);
  int s = 0, i = 0, want = 0, state = 0;
  for (int first = 0; first < a.n_finals; first += c->cfg.max_seqs) {
    int n = std::min(a.n_finals - first, c->cfg.max_seqs), s0 = s, i0 = i;
    while (s < a.n_samples && samples[s].final < first + n) s++;
    while (i < a.n_items && items[i].final < first + n) i++;
    if (first && !c->alone()) XK_OK_OR_RETURN(xk_meet(c, l, Ranks::TILE, 1, ~1u)); // rank 0 has done with the logits before
    if (wants_logits(c, a, first, n)) XK_OK_OR_RETURN(answer(c, l, a, first, n, s0, s, i0, i));
    else XK_OK_OR_RETURN(last_norm(c, l, a, first, n));
    XK_OK_OR_RETURN(copy_wants(c, a, first, n, &want));
    XK_OK_OR_RETURN(copy_states(c, a, first, n, &state));
  }
  return XK_OK;
}

static bool same_sections(const xk_step_args &a, const xk_step_args &b) {
  return a.tokens == b.tokens && a.positions == b.positions && a.tables == b.tables && a.segs == b.segs && a.decode == b.decode && a.spans == b.spans &&
         a.finals == b.finals && a.samples == b.samples && a.items == b.items && a.tail == b.tail && a.adjust == b.adjust;
}

static int32_t capture(xk_ctx *c, const Launch &l, const xk_step_args &a, bool hold, Graph *g) {
  XK_TRY(cudaStreamBeginCapture(l.stream, cudaStreamCaptureModeThreadLocal));
  int32_t s = forward(c, l, a);
  if (s == XK_OK) s = hold ? logits(c, l, a, 0, a.bucket) : answer(c, l, a, 0, a.bucket, 0, a.bucket, 0, a.bucket);
  cudaGraph_t graph = nullptr;
  cudaError_t e = cudaStreamEndCapture(l.stream, &graph);
  if (s == XK_OK && e == cudaSuccess) e = cudaGraphInstantiate(&g->exec, graph, 0);
  if (graph) cudaGraphDestroy(graph);
  if (s != XK_OK) return s;
  XK_TRY(e);
  g->args = a;
  return XK_OK;
}

static int32_t check(xk_ctx *c, const xk_step_args &a) {
  const xk_config &g = c->cfg;
  const xk_buffers &b = c->buffers;
  if (a.n_rows < 1 || a.n_rows > g.max_rows || a.n_samples > b.max_samples || a.n_wants > b.max_wants || a.n_states < 0 || a.n_states > b.max_states || a.used_bytes > b.arena_bytes)
    return xk_fail(XK_INVALID, "step of %d rows, %d samples, %d wanted logits, %d hidden states, %lld bytes: limits are %d, %d, %d, %d, %lld", a.n_rows, a.n_samples, a.n_wants,
                   a.n_states, (long long)a.used_bytes, g.max_rows, b.max_samples, b.max_wants, b.max_states, (long long)b.arena_bytes);
  if (a.n_states && a.bucket) return xk_fail(XK_INVALID, "a graph of bucket %d with hidden states", a.bucket);
  if (a.half != int(c->launched % 2) || c->launched - c->waited >= 2)
    return xk_fail(XK_INVALID, "step in half %d with %d under way after %llu", a.half, int(c->launched - c->waited), (unsigned long long)c->launched);
  if (a.bucket && (a.bucket > g.max_seqs || a.n_rows != a.bucket || a.n_segs != a.bucket || a.n_decode != a.bucket || a.n_finals != a.bucket ||
                   a.n_samples != a.bucket || a.n_items != a.bucket || a.n_tiles || a.on_layer || !c->after.empty()))
    return xk_fail(XK_INVALID, "decode step of bucket %d is not padded", a.bucket);
  if (c->holds) return xk_fail(XK_INVALID, "step behind one whose draws wait");
  if (a.n_masks < 0 || (!g.rank && a.n_masks > b.max_masks) || (a.hold && a.n_finals > g.max_seqs) || (a.n_masks && a.bucket && !a.hold))
    return xk_fail(XK_INVALID, "step of %d masks and %d finals in bucket %d, hold %d: limits are %d and %d", a.n_masks, a.n_finals, a.bucket, a.hold, b.max_masks, g.max_seqs);
  return XK_OK;
}

// Up to FETCH bytes of a descriptor are read from the host's memory by a kernel:
// the copy engine takes longer to start, and the device is idle meanwhile.
static constexpr int64_t FETCH = 128 << 10;

static __global__ void fetch_kernel(uint4 *to, const uint4 *from, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) to[i] = from[i];
}

// Plans prefill attention in parts, behind what the host has described. Returns
// where all of it ends.
static int64_t plan(xk_ctx *c, const xk_step_args &a) {
  const xk_config &g = c->cfg;
  c->plan.parts.clear(), c->plan.merges.clear();
  if (!a.n_tiles || !c->hopper) return a.used_bytes;
  if (!xk_attn_plan(&c->plan, on_host<xk_tile>(c, a, a.tiles), a.n_tiles, g.heads, g.kv_heads, g.head_dim, c->sms, !g.batch_invariant)) return a.used_bytes;
  c->parts = round_up(std::max({a.used_bytes, a.wants + 4 * a.n_wants, a.states + 4 * a.n_states}), 32);
  c->merges = c->parts + c->plan.parts.size() * sizeof(xk_part);
  int64_t end = c->merges + c->plan.merges.size() * sizeof(xk_merge);
  if (end > c->buffers.arena_bytes) { // tiles do
    c->plan.parts.clear(), c->plan.merges.clear();
    return a.used_bytes;
  }
  uint8_t *half = half_of(c, a);
  memcpy(half + c->parts, c->plan.parts.data(), c->merges - c->parts);
  memcpy(half + c->merges, c->plan.merges.data(), end - c->merges);
  return end;
}

// Cuts these rows for decode attention; returns how many spans they are. A graph's are always as many.
static int cut(xk_ctx *c, const xk_step_args &a, int64_t rows_at, int n, int64_t at) {
  if (!n) return 0;
  const int32_t *positions = on_host<int32_t>(c, a, a.positions), *rows = on_host<int32_t>(c, a, rows_at);
  xk_span *to = reinterpret_cast<xk_span *>(half_of(c, a) + at);
  const int spans = xk_attn_spans(to, positions, on_host<int32_t>(c, a, a.tables), rows, n, xk_span_length(positions, rows, n, c->sms, c->cfg.kv_heads));
  if (!a.bucket) return spans;
  const int all = n + c->buffers.more_spans;
  for (int i = spans; i < all; i++) to[i].row = -1;
  return all;
}

static int32_t fetch(xk_ctx *c, void *to, const void *from, int64_t bytes) {
  if (bytes > FETCH) {
    XK_TRY(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, c->stream));
    return XK_OK;
  }
  int n = int(div_up(bytes, 16));
  Launch l = c->on_stream(false);
  return launch(l, fetch_kernel, int(div_up(n, 128)), 128, 0, static_cast<uint4 *>(to), static_cast<const uint4 *>(from), n);
}

static int32_t upload(xk_ctx *c, const xk_step_args &a) { return fetch(c, c->arena, half_of(c, a), plan(c, a)); }

static int32_t upload_masks(xk_ctx *c, const xk_step_args &a) {
  if (!a.n_masks || c->cfg.rank) return XK_OK;
  const xk_buffers &b = c->buffers;
  return fetch(c, c->masks, b.masks + int64_t(a.half) * b.max_masks * b.mask_words, int64_t(a.n_masks) * b.mask_words * 4);
}

int32_t xk_step_after(xk_ctx *c, xk_arrival *v) {
  if (v->c != c) return xk_fail(XK_INVALID, "step after blocks that arrive in another pool");
  c->after.push_back(v);
  return XK_OK;
}

// A step that is no graph, up to its logits where its draws wait.
static int32_t run(xk_ctx *c, const Launch &l, const xk_step_args &a, bool hold) {
  if (!hold) return eager(c, l, a);
  XK_OK_OR_RETURN(forward(c, l, a));
  int state = 0;
  if (a.n_finals) XK_OK_OR_RETURN(logits(c, l, a, 0, a.n_finals));
  return copy_states(c, a, 0, a.n_finals, &state);
}

// Puts a step that is described on the stream.
static int32_t enqueue(xk_ctx *c, const xk_step_args &a) {
  Launch l = c->on_stream(!c->cfg.no_pdl);
  cudaEvent_t began = c->began[c->launched % xk_ctx::TIMES];
  const bool hold = a.hold && !c->cfg.rank; // others draw nothing
  XK_OK_OR_RETURN(upload(c, a));
  if (!hold) XK_OK_OR_RETURN(upload_masks(c, a));
  if (!a.bucket || c->cfg.no_graphs) {
    XK_TRY(cudaEventRecord(began, c->stream));
    XK_OK_OR_RETURN(run(c, l, a, hold));
  } else {
    Graph &g = (hold ? c->held_graphs : c->graphs)[a.bucket];
    if (!g.exec) XK_OK_OR_RETURN(capture(c, l, a, hold, &g));
    if (!same_sections(g.args, a)) return xk_fail(XK_INVALID, "sections of bucket %d have moved", a.bucket);
    XK_TRY(cudaEventRecord(began, c->stream));
    if (c->exchange && xk_exchange_serial(c)) { // the graph has NCCL's kernels, which would wait for ranks that come later
      XK_TRY(cudaGraphUpload(g.exec, c->stream));
      XK_OK_OR_RETURN(run(c, l, a, hold));
    } else {
      XK_TRY(cudaGraphLaunch(g.exec, c->stream));
      int want = 0;
      if (!hold) XK_OK_OR_RETURN(copy_wants(c, a, 0, a.bucket, &want));
    }
  }
  if (hold) {
    c->held = a, c->holds = true;
    return XK_OK;
  }
  XK_TRY(cudaEventRecord(c->ended[c->launched % xk_ctx::TIMES], c->stream));
  return XK_OK;
}

static int32_t step(xk_ctx *c, xk_step_args a) {
  if (!c->blocks) return xk_fail(XK_INVALID, "step before start");
  if (!c->alone() && !c->ranks.host) return xk_fail(XK_INVALID, "step of a rank that has not joined");
  XK_OK_OR_RETURN(check(c, a));
  XK_TRY(cudaSetDevice(c->cfg.device));
  c->layer_events[c->launched % 2] = a.on_layer;
  a.n_spans = cut(c, a, a.decode, a.n_decode, a.spans);
  if (narrows(a)) a.n_final_spans = cut(c, a, a.finals, a.n_finals, a.final_spans);
  int32_t s = enqueue(c, a);
  if (s == XK_OK) {
    c->launched++;
  } else { // what is queued reads this half of the arena, which the next step gets, and writes to blocks, which the caller frees
    xk_ranks_abort(c, 1); // others wait for what did not come
    if (!c->exchange) cudaStreamSynchronize(c->stream); // NCCL's kernels end when xk_ranks_end has them end
    cudaGetLastError(); // told, and no later launch's
  }
  return s;
}

int32_t xk_step(xk_ctx *c, const xk_step_args *args) {
  int32_t s = step(c, *args);
  c->after.clear();
  return s;
}

static int32_t draw_held(xk_ctx *c, const xk_step_args &a) {
  XK_OK_OR_RETURN(upload_masks(c, a));
  int want = 0;
  XK_OK_OR_RETURN(draws(c, c->on_stream(!c->cfg.no_pdl), a, 0, 0, a.n_samples, 0, a.n_items));
  return copy_wants(c, a, 0, a.n_finals, &want);
}

int32_t xk_step_draw(xk_ctx *c) {
  if (!c->holds) return xk_fail(XK_INVALID, "no step's draws wait");
  c->holds = false;
  XK_TRY(cudaSetDevice(c->cfg.device));
  const int32_t s = draw_held(c, c->held);
  if (s != XK_OK) xk_ranks_abort(c, 1);
  XK_TRY(cudaEventRecord(c->ended[(c->launched - 1) % xk_ctx::TIMES], c->stream));
  return s;
}

static int32_t under_way(xk_ctx *c) { return c->waited < c->launched ? XK_OK : xk_fail(XK_INVALID, "no step is under way"); }

int32_t xk_wait_layer(xk_ctx *c, int32_t layer) {
  if (layer < 0 || layer >= c->cfg.layers) return xk_fail(XK_INVALID, "layer %d of %d", layer, c->cfg.layers);
  XK_OK_OR_RETURN(under_way(c));
  XK_TRY(cudaEventSynchronize(c->layer_done[c->waited % 2][layer]));
  return XK_OK;
}

static int32_t over(xk_ctx *c, cudaEvent_t event, const char *what, int64_t timeout_ns) {
  XK_TRY(cudaSetDevice(c->cfg.device));
  const auto began = std::chrono::steady_clock::now();
  for (;;) { // as cudaEventSynchronize does: steps are short
    cudaError_t e = cudaEventQuery(event);
    if (e == cudaSuccess) return XK_OK;
    if (e != cudaErrorNotReady) return xk_fail(XK_CUDA, "cudaEventQuery: %s", cudaGetErrorString(e));
    if (std::chrono::steady_clock::now() - began > std::chrono::nanoseconds(timeout_ns)) return xk_fail(XK_LATE, "the %s is not over", what);
    sched_yield();
  }
}

int32_t xk_step_over(xk_ctx *c, int64_t timeout_ns) {
  XK_OK_OR_RETURN(under_way(c));
  return over(c, c->ended[c->waited % xk_ctx::TIMES], "step", timeout_ns);
}

int32_t xk_layer_over(xk_ctx *c, int32_t layer, int64_t timeout_ns) {
  if (layer < 0 || layer >= c->cfg.layers) return xk_fail(XK_INVALID, "layer %d of %d", layer, c->cfg.layers);
  XK_OK_OR_RETURN(under_way(c));
  return over(c, c->layer_done[c->waited % 2][layer], "layer", timeout_ns);
}

int32_t xk_wait_step(xk_ctx *c) {
  XK_OK_OR_RETURN(under_way(c));
  if (c->holds && c->waited + 1 == c->launched) return xk_fail(XK_INVALID, "the step's draws wait");
  XK_TRY(cudaSetDevice(c->cfg.device));
  uint64_t n = c->waited++; // also when it failed
  XK_TRY(cudaEventSynchronize(c->ended[n % xk_ctx::TIMES]));
  return XK_OK;
}

int32_t xk_last_step_us(xk_ctx *c, double *step, double *idle) {
  if (!c->waited) return xk_fail(XK_INVALID, "no step has been waited for");
  uint64_t n = c->waited - 1;
  cudaEvent_t began = c->began[n % xk_ctx::TIMES];
  float ms;
  XK_TRY(cudaEventElapsedTime(&ms, began, c->ended[n % xk_ctx::TIMES]));
  *step = double(ms) * 1000, *idle = 0; // the first step has none before it
  if (n) {
    XK_TRY(cudaEventElapsedTime(&ms, c->ended[(n - 1) % xk_ctx::TIMES], began));
    *idle = double(ms) * 1000;
  }
  return XK_OK;
}

int32_t xk_profile(int32_t on) {
  XK_TRY(on ? cudaProfilerStart() : cudaProfilerStop());
  return XK_OK;
}
