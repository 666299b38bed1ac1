// Ranks of one model: what their kernels tell each other (ranks.cu).
#pragma once

#include "common.cuh"

// A line of one CTA of the kernels that meet: what its counterparts of the other ranks
// have written there, and how often it has met. Only counts up, so that graphs repeat.
struct __align__(128) Channel {
  uint32_t arrived[XK_RANKS]; // by rank, theirs to write
  uint32_t met;
};

// In mapped memory of the host.
struct RanksHost {
  uint32_t abort;            // ends all waits: see xk_ranks_abort
  uint64_t waits[XK_RANKS];  // see xk_ranks_watch
  uint32_t held;             // bit i: rank i's stream stands still, for tests
};

// What a kernel knows of the ranks, by value.
struct Ranks {
  static constexpr int CTAS = 64; // of a kernel that meets, at most
  static constexpr int BEGIN = CTAS, LOGITS = CTAS + 1, TILE = CTAS + 2, SUMS = CTAS + 3, CHANNELS = CTAS + 4;
  int rank, ranks;
  int ctas;   // at most
  int apart;  // 1: each has a device of its own
  Channel *channels[XK_RANKS]; // [CHANNELS] of each rank
  void *sums[2][XK_RANKS];     // partial rows, of the residual stream's type: OUT's, DOWN's
  void *sent[XK_RANKS];        // rows that their owner has added up
  RanksHost *host;
};

struct xk_ctx;

// x[i] += the partial rows of all ranks, in their order; then, with w, xn[i] = its norm.
// which: 0 OUT's, 1 DOWN's, in turn.
int32_t xk_reduce(xk_ctx *c, const Launch &l, int which, const float *w, int rows);
// A rank that is in `tell` tells all others that it has come so far, and one in `wait` waits
// for those in `tell`: masks of ranks. Channels BEGIN, LOGITS, TILE, and SUMS before NCCL's kernels.
int32_t xk_meet(xk_ctx *c, const Launch &l, int channel, uint32_t tell, uint32_t wait);
int32_t xk_ranks_open(xk_ctx *c);

// The exchange through NCCL (ranks_nccl.cu), for ranks of which one cannot reach another's memory.
struct Exchange;
int32_t xk_exchange_open(xk_ctx **ranks, int n);
int32_t xk_exchange_reduce(xk_ctx *c, const Launch &l, int which, const float *w, int rows);
int32_t xk_exchange_rows(xk_ctx *c, const Launch &l, int rows); // moves them, for a benchmark
int32_t xk_exchange_tokens(xk_ctx *c, const Launch &l);                // rank 0, before BEGIN: what it has drawn
int32_t xk_exchange_logits(xk_ctx *c, const Launch &l, int rows);      // others, before LOGITS: theirs
int32_t xk_exchange_all_logits(xk_ctx *c, const Launch &l, int rows);  // rank 0, behind it: the others'
// Whether this rank runs by itself, so that what waits for others without an end is left out.
bool xk_exchange_serial(xk_ctx *c);
void xk_exchange_close(xk_ctx *c);
