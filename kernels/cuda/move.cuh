// What the files that move many blocks share: peer.cu (who may write where),
// push.cu, verify.cu, hostmove.cu.
#pragma once

#include <vector>

#include "context.cuh"

// The pool's one allocation: rows, digests, row counts, the device's half of the
// flags; byte offsets. Two pools of one shape and as many blocks look alike.
struct Parts {
  int64_t digest, filled, flags, bytes;
  Parts(const xk_config &g, int blocks) {
    int64_t slots = int64_t(g.layers) * blocks * g.kv_heads;
    digest = round_up(int64_t(g.layers) * blocks * xk_block_run(g), 256);
    filled = round_up(digest + slots * 8, 256);
    flags = round_up(filled + slots * 2, 256);
    bytes = round_up(flags + int64_t(XK_FLAG_LINES) * XK_FLAG_STRIDE, int64_t(2) << 20); // what CUDA shares is whole 2 MiB pages
  }
};

// One pool as a move sees it.
struct Side {
  uint8_t *rows;
  uint64_t *digest;
  uint16_t *filled;
  int64_t layer_bytes, layer_slots; // from one layer to the next
  Side() = default;
  Side(const xk_config &g, int blocks, uint8_t *region) {
    Parts at(g, blocks);
    rows = region, digest = reinterpret_cast<uint64_t *>(region + at.digest), filled = reinterpret_cast<uint16_t *>(region + at.filled);
    layer_bytes = blocks * xk_block_run(g), layer_slots = int64_t(blocks) * g.kv_heads;
  }
};

// Up to N list entries that travel with a launch, so that their memory is
// nobody's business. A kernel has 32,764 bytes of parameters.
template <typename T, int N> struct List {
  T at[N];
};

// Launches f(List of that many entries at first, count) for a whole list, in
// pieces. SMALL keeps short launches quick.
template <typename T, typename F> int32_t in_pieces(const T *list, int n, F f) {
  constexpr int SMALL = 1024 / sizeof(T), LARGE = 32000 / sizeof(T);
  if (n <= SMALL) {
    List<T, SMALL> l;
    for (int i = 0; i < n; i++) l.at[i] = list[i];
    return f(l, 0, n);
  }
  for (int first = 0; first < n; first += LARGE) {
    List<T, LARGE> l;
    int k = n - first < LARGE ? n - first : LARGE;
    for (int i = 0; i < k; i++) l.at[i] = list[first + i];
    XK_OK_OR_RETURN(f(l, first, k));
  }
  return XK_OK;
}

struct xk_mark {
  int device;
  cudaEvent_t event;
};

// Lists of pairs that kernels read; freed is theirs to write.
struct PairRing {
  static constexpr int PAIRS = 1 << 17;
  xk_pair *pairs = nullptr, *device = nullptr; // pinned, as is freed; and their copy
  uint64_t *freed = nullptr;
  uint64_t head = 0;
};

struct xk_peer {
  xk_ctx *c;
  std::mutex mu;
  uint8_t *region = nullptr; // theirs, in our address space
  bool mapped = false;       // by CUDA IPC
  void *pinned = nullptr;    // their flags, registered by us
  uint8_t *host_flags = nullptr; // as the device sees them
  int blocks = 0;
  Side to;
  unsigned *ticket = nullptr; // zero between launches
  PairRing ring;
  cudaStream_t stream = nullptr, engine = nullptr;
  cudaEvent_t fork = nullptr, join = nullptr;
};

struct xk_region {
  int device;
  uint8_t *host, *seen; // seen: by the device
  int64_t bytes;
};

// A stream for verifying, with pinned results.
struct Verifier {
  static constexpr int MOST = 8192; // entries at a time
  std::mutex busy;
  cudaStream_t stream = nullptr;
  cudaEvent_t done = nullptr;
  uint8_t *bad = nullptr;
  bool launched = false; // and perhaps not finished
};

struct Moves {
  std::mutex mu; // of peers
  std::vector<xk_peer *> peers;
  static constexpr int VERIFIERS = 2;
  Verifier verifiers[VERIFIERS];
  struct Way { // to the device, to the host
    std::mutex mu;
    cudaStream_t stream = nullptr, side = nullptr; // side: for a second copy engine
    cudaEvent_t fork = nullptr, join = nullptr;
  } ways[2];
};

int32_t xk_mark_make(xk_ctx *c, cudaStream_t s, xk_mark **out);
// Polls: short spins, then naps.
int32_t xk_wait_event(cudaEvent_t e, int64_t timeout_ns);
// Whether layers and blocks lie in a pool.
inline bool xk_layers_ok(const xk_config &g, int layer, int n) { return layer >= 0 && n >= 1 && layer < g.layers && n <= g.layers - layer; }
int32_t xk_hostmove_init();
