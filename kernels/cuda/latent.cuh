// Decode attention over a paged latent (MLA): kernels/DESIGN.md, section 8. Nothing of the backend calls it yet.
#pragma once

#include "common.cuh"

// The widths of DeepSeek's latent and rotated key. A block of a layer has [block_tokens][latent], then [block_tokens][rope].
static constexpr int XK_LATENT = 512, XK_LATENT_ROPE = 64, XK_LATENT_KEY = XK_LATENT + XK_LATENT_ROPE;
static constexpr int XK_LATENT_STEP = 64; // positions of a tile; spans begin at multiples of that
static constexpr int XK_LATENT_ROWS = 64; // query heads of a tile

// Positions begin .. end-1 of a row's sequence of length positions.
struct xk_latent_span {
  int row, table; // its first entry in LatentAttention::tail
  int begin, end, length;
  int partial; // slot, or -1: it is the only one of its row
};
struct xk_latent_merge { // a row whose spans have the slots partial .. partial + parts - 1
  int row, partial, parts;
};
struct LatentPlan {
  std::vector<xk_latent_span> spans; // the longest first
  std::vector<xk_latent_merge> merges;
  int slots = 0;
};

struct LatentAttention {
  element *out;    // [row][heads][XK_LATENT]: sums of latents
  float *partial;  // [slot][heads][XK_LATENT + XK_STATS]
  const int32_t *tail; // block tables
  int heads, blocks;   // blocks of the pool
  float scale;         // of scores
  FastDiv bt;          // a multiple of XK_RUN
  const CUtensorMap *queries, *latents, *ropes;
};

// Maps of absorbed queries, [row][heads][latent, rotated], and of a layer's blocks.
int32_t xk_latent_maps(CUtensorMap *queries, CUtensorMap *latents, CUtensorMap *ropes, const element *q, int64_t rows, int heads, const element *layer, int blocks, int block_tokens);
// Cuts sequences of these lengths so that all multiprocessors are busy for about as long.
void xk_latent_plan(LatentPlan *plan, const int32_t *lengths, const int32_t *tables, int n, int heads, int sms);
int32_t xk_latent_decode(const Launch &l, const LatentAttention &a, const xk_latent_span *spans, int n, const xk_latent_merge *merges, int n_merges);
int32_t xk_latent_init(xk_dtype type);
