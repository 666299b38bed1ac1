// What the kernels of mixtures of experts share (mixture.cu).
#pragma once

#include "context.cuh"

struct GroupTile { // slots first .. first + n - 1, of one expert
  int expert, first, n;
};

// A projection by experts: out[slot] = x[index ? index[slot] : slot] times its expert's w [n][k].
struct Grouped {
  const element *w, *x;
  element *out; // rows of n elements; SILU: n / 2
  const int32_t *index;
  const GroupTile *tiles;
  const int *n_tiles;
  int n, k;
};

// Tiles of at most 64 or 128 slots by wgmma (mixture_hopper.cu). E: SILU or STORE.
int32_t xk_grouped_hopper(const Launch &l, Epilogue e, const Grouped &p, int tile_rows, int64_t tiles);
int32_t xk_grouped_hopper_init(xk_dtype type);
