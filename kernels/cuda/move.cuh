// What the files that move many blocks share: peer.cu (who may write where),
// push.cu, verify.cu, hostmove.cu.
#pragma once

#include <deque>
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

// What KV rows are, as handles say it.
enum RowType { ROWS_BF16, ROWS_F8, ROWS_F16 };
inline RowType xk_row_type(const xk_config &g) { return g.kv_fp8 ? ROWS_F8 : g.fp16 ? ROWS_F16 : ROWS_BF16; }
inline const char *xk_row_name(const xk_config &g) { return g.kv_fp8 ? "f8e4m3" : g.fp16 ? "f16" : "bf16"; }
inline int xk_row_bytes(const xk_config &g) { return g.kv_fp8 ? g.head_dim : 2 * g.head_dim; }
// Whether a pool with rows of g's shape looks as one of o's does, block by block.
inline bool xk_same_blocks(const xk_config &g, const xk_config &o) { return g.kv_heads == o.kv_heads && g.block_tokens == o.block_tokens && xk_row_type(g) == xk_row_type(o); }

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
  xk_config shape = {};      // ours, with their block_tokens, kv_heads and type of rows
  Side to;
  unsigned long long *sums = nullptr; // of refills; null: this peer needs none
  unsigned *ticket = nullptr; // zero between launches
  PairRing ring;
  cudaStream_t stream = nullptr, engine = nullptr;
  cudaEvent_t fork = nullptr, join = nullptr;
};

// What ends a push: each CTA's stores, one thread's fence for the whole system, a
// ticket; the last CTA sets the flag, and frees the list.
struct Finish {
  unsigned *ticket;
  uint64_t *device_flag, *host_flag;
  uint64_t value;  // 0: no flag
  uint64_t *freed; // null: nothing of the ring
  uint64_t head;   // what is free once this is done
};
Finish finish_of(xk_peer *p, int line, uint64_t value);

__device__ __forceinline__ uint4 load_once(const uint4 *p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
__device__ __forceinline__ uint2 load_once(const uint2 *p) {
  uint2 v;
  asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}
__device__ __forceinline__ void store_system(uint64_t *p, uint64_t v) { asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }

// By all threads, behind a barrier that is behind their stores.
__device__ __forceinline__ void finish_push(const Finish &f) {
  if (!f.value && !f.freed) return;
  if (threadIdx.x) return;
  __threadfence_system();
  if (atomicAdd(f.ticket, 1) != gridDim.x - 1) return;
  *f.ticket = 0;
  __threadfence_system();
  if (f.value) store_system(f.device_flag, f.value), store_system(f.host_flag, f.value);
  if (f.freed) store_system(f.freed, f.head);
}

// Room for n pairs in a row, if the ring has it: [head, head + n) of an endless
// tape, of which a launch frees all before its own end.
xk_pair *ring_room(PairRing &r, int n, uint64_t *head);
// Waits for the room, until what was launched has freed it.
int32_t xk_ring_take(PairRing &r, int n, uint64_t *head, xk_pair **at);

constexpr int REFILL_LIST = 1 << 14;      // sources, and refills, of one call: half of the ring
constexpr int64_t REFILL_SUMS = 1 << 17;  // (refill, head) of one launch: at least 64 refills

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

// A block that arrives by layers (arrive.cu): where it lies in host memory and goes.
struct __align__(16) Coming {
  int64_t rows, digests;
  int32_t block, filled, first_pos, _pad;
};
// Those of one arrival, in the device's ring of them.
struct ComingList {
  const Coming *ring;
  uint64_t first, mask;
  __device__ const Coming &operator[](int i) const { return ring[(first + i) & mask]; }
};

// What arrivals share. Its ring has an entry for each block of the pool, which is
// as many as can be on their way.
struct Arrivals {
  Coming *list = nullptr, *device = nullptr; // pinned, and its copy
  uint64_t mask = 0, head = 0, freed = 0;    // entries [freed, head) of an endless tape are in use
  std::deque<xk_arrival *> open;             // oldest first; null: ended before older ones
  std::deque<uint64_t> ends;                 // of each of them, its last entry and 1
  unsigned long long *landed = nullptr;      // device, by layer: parts of arrivals that have landed, ever
  std::vector<unsigned long long> told;      // by layer: so many were launched
  cudaStream_t check = nullptr;              // verifies them
  decltype(&cuStreamWaitValue64) until = nullptr; // has a stream wait for a count
  uint8_t *wrong = nullptr;                  // pinned, by block
};

// Launches the verifying of so many of them in n_layers layers; wrong[block] becomes 1.
int32_t xk_verify_coming(xk_ctx *c, const ComingList &list, int n, int layer, int n_layers);

struct Moves {
  std::mutex mu; // of peers
  std::vector<xk_peer *> peers;
  static constexpr int VERIFIERS = 2;
  Verifier verifiers[VERIFIERS];
  struct Way { // to the device, to the host
    std::mutex mu;
    static constexpr int SIDES = 2; // so that one copy's start hides behind others' bytes
    cudaStream_t stream = nullptr, side[SIDES] = {};
    cudaEvent_t join[SIDES] = {};
  } ways[2];
  Arrivals arrivals; // under ways[0].mu
};

int32_t xk_mark_make(xk_ctx *c, cudaStream_t s, xk_mark **out);
// Polls: short spins, then naps.
int32_t xk_wait_event(cudaEvent_t e, int64_t timeout_ns);
// Whether layers and blocks lie in a pool.
inline bool xk_layers_ok(const xk_config &g, int layer, int n) { return layer >= 0 && n >= 1 && layer < g.layers && n <= g.layers - layer; }
int32_t xk_move_check(xk_ctx *c, const xk_region *r, const xk_move_args &a, const xk_place *places);
int32_t xk_hostmove_init();
int32_t xk_verify_init();
int32_t xk_arrivals_open(xk_ctx *c);
void xk_arrivals_close(xk_ctx *c);
