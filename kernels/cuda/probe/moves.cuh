// What both halves of moves.cu share.
#pragma once

#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "must.cuh"

using Clock = int64_t; // ns
static Clock now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return Clock(t.tv_sec) * 1000000000 + t.tv_nsec;
}

static constexpr int64_t MIB = 1 << 20;
static std::mt19937_64 rng(1);

struct Stats {
  double median, p1, p99;
  int n;
};
static Stats stats(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  size_t n = v.size();
  return {v[n / 2], v[n / 100], v[n - 1 - n / 100], int(n)};
}
static void print(const char *kind, const std::string &name, const char *unit, const Stats &s, const std::string &note = "") {
  printf("%s {\"name\": \"%s\", \"value\": %.3f, \"unit\": \"%s\", \"p1\": %.3f, \"p99\": %.3f, \"runs\": %d, \"note\": \"%s\"}\n", kind, name.c_str(), s.median, unit, s.p1, s.p99, s.n, note.c_str());
  fflush(stdout);
}

// A pool without much of a model around it.
static xk_ctx *pool(int device, int layers, int kv_heads, int block_tokens, int blocks) {
  xk_config g = {};
  g.device = device, g.layers = layers, g.hidden = 64, g.intermediate = 64, g.heads = kv_heads, g.kv_heads = kv_heads, g.head_dim = 128, g.vocab = 64, g.max_positions = 64;
  g.tied_head = 1, g.norm_eps = 1e-5f, g.block_tokens = block_tokens, g.max_rows = 16, g.max_seqs = 4, g.no_graphs = 1;
  xk_ctx *c;
  xk_buffers b;
  MUST(xk_open(&g, &c));
  MUST(xk_start(c, blocks, &b));
  return c;
}
