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
  uint32_t abort;            // ends all waits
  uint64_t waits[XK_RANKS];  // see xk_ranks_watch
  uint32_t held;             // bit i: rank i's stream stands still, for tests
};

// What a kernel knows of the ranks, by value.
struct Ranks {
  static constexpr int CTAS = 64; // of a kernel that meets, at most
  static constexpr int BEGIN = CTAS, LOGITS = CTAS + 1, TILE = CTAS + 2, CHANNELS = CTAS + 3;
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
// for those in `tell`: masks of ranks. Channels BEGIN, LOGITS, TILE.
int32_t xk_meet(xk_ctx *c, const Launch &l, int channel, uint32_t tell, uint32_t wait);
int32_t xk_ranks_open(xk_ctx *c);
