// The C ABI of libxpyd_cuda.so. Go opens the library at run time (library.go),
// so that building xpyd needs no CUDA.
//
// Every function returns an xk_status; xk_last_error says more, for the calling
// thread. A context belongs to one device. One thread at a time calls xk_step
// and the waits; the pool functions may run beside it from any thread, on
// blocks that no running step writes. Nothing here throws or exits.
//
// Layouts and digests: kernels/DESIGN.md. Weights and KV are bf16 or fp16, or KV is
// FP8 (E4M3); sums are fp32.
#ifndef XPYD_XK_H
#define XPYD_XK_H

#include <stdint.h>

#define XK_ABI 21 // raised by any change of this file

#ifdef __cplusplus
extern "C" {
#pragma GCC visibility push(default)
#endif

enum xk_status { XK_OK = 0, XK_INVALID = 1, XK_CUDA = 2, XK_CUBLAS = 3, XK_NOMEM = 4, XK_NO_DEVICE = 5,
  XK_LATE = 6, XK_NO_PEER = 7 };

typedef struct xk_ctx xk_ctx;

typedef struct {
  char name[128];
  uint64_t total_bytes, free_bytes;
  int32_t major, minor, sms, driver; // compute capability, multiprocessors, CUDA driver version
  char pci[16];                      // bus id, "0000:17:00.0"
} xk_device;

// The model's shape and the limits of a step. Widths are elements.
typedef struct {
  int32_t device;
  int32_t layers, hidden, intermediate, heads, kv_heads, head_dim, vocab, max_positions;
  int32_t qkv_bias, qk_norm, tied_head;
  float norm_eps;
  int32_t block_tokens; // positions a KV block
  int32_t max_rows;     // tokens a step
  int32_t max_seqs;     // rows of logits that exist at once, and the largest graph
  int32_t no_graphs;    // launch kernels one by one (debugging)
  int32_t no_pdl;       // no programmatic dependent launch
  int32_t tune;         // choose projections by timing: faster; the same bits where choices are the same
  int32_t batch_invariant; // a row's bits depend on its sequence alone; not with tune. 2, for tests: all projections by gemm_any.cu
  int32_t kv_fp8; // KV rows are E4M3 with a scale each; not with batch_invariant
  int32_t weights_fp8; // projections of the layers are E4M3 with a scale a row; not with batch_invariant
  int32_t fp16; // weights, activations and KV rows are fp16, the residual stream fp32; not with kv_fp8, weights_fp8
  // Of tensor parallelism: this context is rank `rank` of `ranks` (0 and 1: it is all of the
  // model), and has these of the model's intermediate, heads and kv_heads, which count its own.
  int32_t rank, ranks;
  int32_t first_kv_head, all_kv_heads; // the model's number of its first; and of how many: blocks in host memory have all
  int32_t first_id, ids; // the rows of the head, of vocab, that it computes
  // Of a mixture: experts (at most XK_EXPERTS, 0: none), those of a row (at most 32), whether their parts
  // sum to 1. intermediate is an expert's.
  int32_t experts, experts_per_token, norm_experts;
  // Steps run on these multiprocessors alone (a green context): 0 all, n the first n, -n those behind the
  // first n. n is rounded up to what the device can part, a multiple of 8.
  int32_t part;
} xk_config;

enum xk_weight {
  XK_EMBED, XK_NORM, XK_HEAD, // layer is ignored
  XK_ATTN_NORM, XK_Q, XK_K, XK_V, XK_O, XK_MLP_NORM, XK_GATE, XK_UP, XK_DOWN,
  XK_Q_BIAS, XK_K_BIAS, XK_V_BIAS, XK_Q_NORM, XK_K_NORM, XK_ROUTER, XK_WEIGHTS
};
enum { XK_EXPERTS = 512 };
enum xk_dtype { XK_F32, XK_F16, XK_BF16 }; // as kernels.DType

// A run of rows of one sequence inside one KV block: what one CTA a KV head
// appends.
typedef struct {
  int32_t row, n; // rows of the step; n 0 is padding
  int32_t block;
  int32_t at;  // first row inside the block
  int32_t pos; // absolute position of the block's row 0
} xk_seg;

// Up to 128 query rows of one sequence, for prefill attention. Those with most
// positions before their end come first.
typedef struct {
  int32_t row, n;
  int32_t pos;   // absolute position of the first
  int32_t table; // int32 offset of the block table in the tail
} xk_tile;

// One draw: kernels.Sample. adjust lists each token at most once.
typedef struct {
  int32_t final;              // index into finals; -1 is padding
  int32_t top_k;              // <= 0 off
  float temperature, top_p, min_p;
  float repetition, presence, frequency;
  int32_t adjust, n_adjust;   // index of the first xk_adjust after args.adjust, count
  uint32_t seed_lo, seed_hi, pos_lo, pos_hi, choice;
  int32_t out;                // index into xk_buffers.tokens
} xk_sample;

enum { XK_BAN = 1, XK_SEEN = 2 };
typedef struct {
  int32_t id;
  float bias;
  float count;    // occurrences in the output
  uint32_t flags; // XK_BAN, XK_SEEN (in prompt or output)
} xk_adjust;

// A request for log probabilities under the raw logits of a final row.
typedef struct {
  int32_t final; // -1 is padding
  int32_t id;    // token, or -1-i for what sample i drew
  int32_t top;   // most likely tokens to list
  int32_t out;   // index into xk_buffers.logprobs of the first result: self, then the listed
} xk_item;

typedef struct {
  int32_t id;
  float logprob; // natural
  int32_t rank;  // 1 is the most likely
} xk_logprob;

// Positions begin .. end-1 of a row, which one CTA of decode attention takes for a KV head.
typedef struct {
  int32_t row; // -1 is padding
  int32_t table, length; // of the row: its block table in the tail, its positions
  int32_t begin, end;
  int32_t split, splits; // which of the row's spans it is, and of how many
  int32_t partial;       // of the row's first, if there are several
} xk_span;

// One step. Sections lie in its half of the arena at byte offsets (multiples of
// 16); all below used_bytes travels to the device in one copy.
typedef struct {
  int32_t n_rows, n_segs, n_decode, n_tiles, n_finals, n_samples, n_items, n_wants;
  int32_t bucket;    // > 0: a padded decode step of that many rows, run as a graph
  int32_t on_layer;  // record an event a layer, for xk_wait_layer
  int32_t half;      // of xk_buffers: 0 and 1 in turn
  int32_t n_spans, n_final_spans; // xk_step knows them
  int32_t hold;      // draws wait for xk_step_draw; finals are at most max_seqs
  int32_t n_masks;   // of xk_buffers.masks that draws have
  int32_t n_states;
  int64_t tokens;    // int32 [n_rows] token ids; -1-i is what sample i of the step before drew
  int64_t positions; // int32 [n_rows] absolute; -1 is padding
  int64_t tables;    // int32 [n_rows] offset of the row's block table in the tail
  int64_t segs;      // xk_seg [n_segs]
  int64_t decode;    // int32 [n_decode] rows that are a sequence's only one
  int64_t spans;     // xk_span [n_decode + more_spans], which xk_step fills in
  int64_t tiles;     // xk_tile [n_tiles]
  int64_t finals;    // int32 [n_finals] rows whose logits are wanted, ascending
  int64_t final_spans; // xk_span [n_finals + more_spans], too; not of a bucket
  int64_t samples;   // xk_sample [n_samples], ascending by final
  int64_t items;     // xk_item [n_items], ascending by final
  int64_t wants;     // int32 [n_wants] finals whose logits are copied out, ascending (host only)
  int64_t states;    // int32 [n_states] finals whose hidden states are copied out, ascending (host only), behind wants
  int64_t tail;      // block tables (int32)
  int64_t adjust;    // xk_adjust
  int64_t masks;     // int32 [n_samples], if there are masks: the one that each has; -1 is none
  int64_t used_bytes;
} xk_step_args;

// Host memory that the device sees; lives as long as the context. Arena, tokens,
// logprobs, masks and states have two halves of the given size, for two steps under way; of
// the logits there is one, so that only one of the two may want any.
typedef struct {
  void *arena;       // what xk_step_args describes
  int64_t arena_bytes;
  int32_t *tokens;   // drawn ids, where each sample says
  int32_t max_samples;
  int32_t more_spans; // than rows
  xk_logprob *logprobs;
  int32_t max_logprobs;
  float *logits;     // [n_wants][vocab]
  int32_t max_wants;
  int32_t max_states;
  uint16_t *states;  // [n_states][hidden] bf16 or fp16, behind the final norm; rank 0's only
  int32_t max_masks, mask_words;
  uint32_t *masks;   // [max_masks][mask_words] a bit for each id that may be drawn; rank 0's only
  uint64_t bits;     // batch_invariant: digest of what the projections make of given rows
  uint32_t slow;     // batch_invariant: projections that gemm_any.cu does: 1 qkv, 2 out, 4 gate_up, 8 down, 16 head
} xk_buffers;

// Device memory in bytes. Open allocates all but the pool.
typedef struct {
  uint64_t total, free;      // of the device, whoever has it
  uint64_t weights, scratch; // of this context; scratch is what steps need
  uint64_t pool;             // 0 before start
  uint64_t block;            // one block of all layers, digests included
} xk_memory_info;

int32_t xk_abi(void);
const char *xk_last_error(void);
int32_t xk_device_info(int32_t device, xk_device *out);

// Life of a context: open, join (ranks), load every weight, rope, start, steps, close.
int32_t xk_open(const xk_config *cfg, xk_ctx **out);
// Expert e's tensors of layer l are layer e * layers + l.
// stride: elements from one row to the next in data, of which a rank reads its columns; 0: no more than a row has.
int32_t xk_load(xk_ctx *c, int32_t weight, int32_t layer, int32_t dtype, const void *data, int64_t elements, int64_t stride);
// The same of E4M3 with a scale a row, or one for all (weights_fp8); xk_load rounds.
int32_t xk_load8(xk_ctx *c, int32_t weight, int32_t layer, const void *data, int64_t elements, int64_t stride, const float *scales, int32_t n_scales);
int32_t xk_rope(xk_ctx *c, const double *freq, double scale); // [head_dim/2] radians a position
int32_t xk_memory(xk_ctx *c, xk_memory_info *out);
int32_t xk_start(xk_ctx *c, int32_t blocks, xk_buffers *out); // allocates the pool, picks GEMMs
// How projections are computed (tune), for other processes: get after start; set before it, and
// start measures nothing. The key names what the choices depend on: device, library, model.
int32_t xk_choices_key(xk_ctx *c, uint64_t *key);
int32_t xk_choices_get(xk_ctx *c, void *out, int64_t room, int64_t *bytes);
int32_t xk_choices_set(xk_ctx *c, const void *from, int64_t bytes); // XK_INVALID: they are others'
int32_t xk_close(xk_ctx *c);

// Two steps may be under way. The waits are for the older; after xk_wait_step it
// is under way no more.
int32_t xk_step(xk_ctx *c, const xk_step_args *args); // returns when all is launched
// Launches the draws of the step launched last, which has hold; its masks are in xk_buffers now. Of ranks, rank 0's alone.
int32_t xk_step_draw(xk_ctx *c);
int32_t xk_wait_layer(xk_ctx *c, int32_t layer);      // K, V and digests of this layer are in the pool
int32_t xk_wait_step(xk_ctx *c);                      // results are in xk_buffers

// Ranks (ranks.cu): contexts of one process that compute a model together, rank i at [i]. Each gets
// every step with the same description; the arena's bytes are copied by the caller. Rank 0 alone has
// results. A step of fewer ranks than all never ends, until xk_ranks_abort.
enum { XK_RANKS = 8 };
enum { XK_BY_PEERS, XK_BY_NCCL };
// XK_NO_PEER: one cannot reach another's memory, nor is there NCCL for that. exchange: which way the ranks' sums take.
int32_t xk_join(xk_ctx **ranks, int32_t n, int32_t *exchange);
// By rank: 0, or a wait of 100 ms and more: which one, << 8, and 1 + the rank that has not come. Or at
// once: which one, << 8, and XK_IN_NCCL, while the rank computes what NCCL's kernel brings.
enum { XK_IN_NCCL = 255 };
int32_t xk_ranks_watch(xk_ctx *c, uint64_t *waits);
// on: all waits of ranks end, now and until it is off; results are worthless. With XK_SERIAL ranks can run
// one after the other, which loads their code and makes their graphs: both can need an idle device.
// NCCL's kernels end by xk_ranks_end.
enum { XK_TOGETHER, XK_ABORT, XK_SERIAL };
int32_t xk_ranks_abort(xk_ctx *c, int32_t on);
// Ends the exchange through NCCL, if that is the ranks' way, in the midst of steps or behind them: no step
// may follow. It may wait for a device.
int32_t xk_ranks_end(xk_ctx **ranks, int32_t n);
int32_t xk_ranks_drain(xk_ctx **ranks, int32_t n); // waits until no rank computes; before xk_close of the first
int32_t xk_ranks_hold(xk_ctx *c, int32_t on); // for tests: what is launched next on this rank begins when it is off
int32_t xk_layer_over(xk_ctx *c, int32_t layer, int64_t timeout_ns); // xk_wait_layer, or XK_LATE
int32_t xk_step_over(xk_ctx *c, int64_t timeout_ns); // XK_LATE: the older step is not over; else xk_wait_step returns at once

// The pool: kernels.Pool. Each returns when it is done.
int32_t xk_gather(xk_ctx *c, int32_t layer, int32_t block, int32_t row, int32_t n, void *dst);
int32_t xk_scatter(xk_ctx *c, int32_t layer, int32_t block, int32_t row, int32_t n, const void *src);
int32_t xk_digest(xk_ctx *c, int32_t layer, int32_t block, uint64_t *dst);
int32_t xk_set_digest(xk_ctx *c, int32_t layer, int32_t block, int32_t filled, const uint64_t *digest);
int32_t xk_copy_block(xk_ctx *c, int32_t dst, int32_t src, int32_t first_pos, int32_t n);

// Moves of many blocks (kernels/move.go says what they promise): to pools of
// other processes on this host, and to and from host memory. Calls come from any
// thread and return when all is launched; a mark is waited for.
typedef struct xk_peer xk_peer;   // another pool, open for writing
typedef struct xk_mark xk_mark;   // a point in a stream
typedef struct xk_region xk_region; // host memory that the device reaches
typedef struct xk_arrival xk_arrival; // blocks on their way from there, layer by layer

enum { XK_HANDLE_BYTES = 192, XK_FLAG_LINES = 4096, XK_FLAG_STRIDE = 128 }; // flags: a uint64 at the begin of each line
enum xk_engine { XK_AUTO, XK_KERNEL, XK_COPY }; // as kernels.Engine

typedef struct {
  int32_t src, dst;
} xk_pair;
typedef struct {
  int32_t layer, n_layers, n_pairs;
  int32_t engine, ctas;  // ctas: at most, 0 chooses
  int32_t after_step;    // wait for the last of the layers in the step launched last
  int32_t line;
  int32_t rows_only;     // for measuring: no digests, no row counts
  int32_t from_head, to_head, heads; // those that go, of either pool's; 0 heads: all of both, which have as many
  uint64_t value;        // 0: no flag
  void *after;           // a cudaEvent_t to wait for, or NULL
} xk_push_args;
typedef struct {
  int32_t block, first_pos, rows;
} xk_held;               // a block of ours, and the positions that its digest covers
typedef struct {
  int32_t block, first_pos, rows;
  int32_t first, count;  // of the list of xk_held
} xk_refill;             // a block of the peer's, and the positions it gets
typedef struct {
  int32_t layer, n_sources, n_refills;
  int32_t from_head, to_head, heads; // those that go
  int32_t ctas, line;    // as xk_push_args
  uint64_t value;
} xk_refill_args;
typedef struct {
  int32_t layer, block, first_pos, rows;
} xk_landed;
typedef struct {
  int32_t block, filled;
  int64_t rows, digests; // byte offsets in the region
} xk_place;
typedef struct {
  int32_t layer, n_layers, n_places;
  int32_t engine, ctas;
  int32_t to_host;       // gather, else scatter
  int64_t layer_stride, digest_stride; // bytes
} xk_move_args;

int32_t xk_export(xk_ctx *c, void *handle); // XK_HANDLE_BYTES
int32_t xk_flag_clear(xk_ctx *c, int32_t line); // the device's half
// flags: the host's half of the exporter's flags, mapped; whole pages of at
// least XK_FLAG_LINES lines. XK_NO_PEER: this device cannot write there.
int32_t xk_peer_open(xk_ctx *c, const void *handle, int64_t handle_bytes, void *flags, int64_t flag_bytes, xk_peer **out);
int32_t xk_peer_local(xk_ctx *c, xk_ctx *to, void *flags, int64_t flag_bytes, xk_peer **out); // of this process
int32_t xk_push(xk_peer *p, const xk_push_args *a, const xk_pair *pairs);
// For peers of other block sizes or heads; at most 16,384 of each: kernels.Refill.
int32_t xk_refill_push(xk_peer *p, const xk_refill_args *a, const xk_held *sources, const xk_refill *refills);
int32_t xk_peer_mark(xk_peer *p, xk_mark **out);
int32_t xk_peer_close(xk_peer *p); // nothing may be under way
// good[i] = 1: the rows of list[i] agree with the digests that lie beside them.
int32_t xk_verify(xk_ctx *c, const xk_landed *list, int32_t n, uint8_t *good, int64_t timeout_ns);

int32_t xk_host_register(xk_ctx *c, void *at, int64_t bytes, xk_region **out);
int32_t xk_host_release(xk_region *r);
int32_t xk_move(xk_ctx *c, xk_region *r, const xk_move_args *a, const xk_place *places, xk_mark **out);
int32_t xk_wait(xk_mark *m, int64_t timeout_ns); // XK_LATE, or all before the mark is done
int32_t xk_mark_free(xk_mark *m);
// A scatter of places, verified where they land: by layers, in order. first_pos[i]
// is the position of place i's row 0.
int32_t xk_arrive(xk_ctx *c, xk_region *r, const xk_move_args *a, const xk_place *places, const int32_t *first_pos, xk_arrival **out);
int32_t xk_arrived(xk_arrival *v, int32_t *layers);     // how many are there and verified
int32_t xk_arrival_bad(xk_arrival *v, uint8_t *bad);    // one a place, once all have arrived; else XK_LATE
int32_t xk_arrival_free(xk_arrival *v);                 // once all have arrived
int32_t xk_step_after(xk_ctx *c, xk_arrival *v);        // the next xk_step computes each layer when it is there and verified
// An arrival of what others bring: xk_step itself waits until xk_gate_open, from
// another thread, has said that a layer is there. For xk_step_after and xk_arrival_free only.
int32_t xk_gate(xk_ctx *c, xk_arrival **out);
int32_t xk_gate_open(xk_arrival *v, int32_t layers);    // rises, up to all layers

// Links by NCCL (link.cu; kernels/link.go says what they promise). A link's region
// is memory of the device, for xk_move. XK_NO_PEER: there is no NCCL.
typedef struct xk_link xk_link;
enum { XK_LINK_ID_BYTES = 128 };
int32_t xk_link_id(void *id); // XK_LINK_ID_BYTES
int32_t xk_link_open(xk_ctx *c, const void *id, int64_t id_bytes, int32_t sender, int64_t bytes, int32_t ctas, xk_link **out);
int32_t xk_link_settle(xk_link *l, int64_t timeout_ns); // XK_LATE: what was asked for is in progress
int32_t xk_link_region(xk_link *l, xk_region **out);   // the link's own: not to be released
int32_t xk_link_taken(xk_link *l, int64_t *bytes);     // of device memory, besides the region
// XK_LATE: asked for, and not yet on the stream; xk_link_resume goes on.
int32_t xk_link_transfer(xk_link *l, int64_t at, int64_t bytes, xk_mark **after, int32_t n_after, int64_t timeout_ns, xk_mark **out);
int32_t xk_link_resume(xk_link *l, int64_t timeout_ns, xk_mark **out);
int32_t xk_link_end(xk_link **abort, int32_t n_abort, xk_link **free, int32_t n_free); // aborts some, then frees others or the same

// For tests and benchmarks.
// The all-reduce alone: each rank's x += the sum of all ranks' partial rows (0: OUT's, 1: DOWN's buffer), and
// xn = its norm by layer 0's weights. [ranks][rows][hidden] of the residual stream's type; xn of elements.
// signalled: one rank after the other, as if the others had come to each meeting before; not through NCCL.
int32_t xk_reduce_test(xk_ctx **ranks, int32_t n, int32_t which, int32_t rows, int32_t signalled, const void *partial, void *x, void *xn);
// Microseconds of one call for so many rows, from graphs of `calls` of them on every rank, run `runs` times: us[run]. Of
// the all-reduce without its norm, an empty kernel, or a copy of another rank's rows.
enum xk_reduce_what { XK_REDUCE, XK_EMPTY, XK_COPY_ROWS };
int32_t xk_reduce_bench(xk_ctx **ranks, int32_t n, int32_t rows, int32_t calls, int32_t runs, int32_t what, double *us);
int32_t xk_fill_random(xk_ctx *c, uint64_t seed); // every weight, as a plausible model's
// Device time of the last waited step, and how long the device was idle before it.
int32_t xk_last_step_us(xk_ctx *c, double *step, double *idle);
int32_t xk_flag(xk_ctx *c, int32_t line, void **device); // the device's half of a flag
int32_t xk_profile(int32_t on);                   // a CUDA profiler range begins or ends

#ifdef __cplusplus
#pragma GCC visibility pop
}
#endif
#endif
