// Times what kernels/move.go promises, beside its peers and limits in the same
// run; scripts/bench-push builds it. One line "RESULT {json}" or "PEER {json}" a
// figure.
//
//   moves push [LIBNCCL.so [KV_HEADS]]  GPU 0 pushes to GPU 1, from one process
//                   to another; a piece has 8 KiB a KV head, of which there are 4
//   moves host               one GPU and pinned host memory
//
// A push is timed from the call on P until D's device has seen the flag: a kernel
// of one thread that waits there notes the device's clock, which D's host reads
// against its own right before and after, to half a round trip over PCIe; both
// processes share the host's clock. NCCL is timed in the same way, by a kernel
// that follows the receive, and in turn with ours. Blocks are drawn anew for
// each push, and at the end of each size every byte that landed is verified.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <cuda_runtime.h>

#include "../xk.h"

#define MUST(call)                                                                                                                                \
  do {                                                                                                                                            \
    int s_ = int(call);                                                                                                                           \
    if (s_ != 0) {                                                                                                                                \
      fprintf(stderr, "%s:%d: %s: %d %s %s\n", __FILE__, __LINE__, #call, s_, xk_last_error(), cudaGetErrorString(cudaGetLastError()));           \
      exit(1);                                                                                                                                    \
    }                                                                                                                                             \
  } while (0)

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

// ---------------------------------------------------------------- digests, on the host (kernels/DESIGN.md, section 2)

static uint64_t mix(uint64_t z) {
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ z >> 27) * 0x94d049bb133111ebull;
  return z ^ z >> 31;
}
static uint64_t row_hash(const uint64_t *row, int kv, int head, int pos) {
  static const auto keys = [] {
    std::vector<uint64_t> k(32);
    for (int i = 0; i < 32; i++) k[i] = mix(0x9e3779b97f4a7c15ull * uint64_t(i + 1));
    return k;
  }();
  uint64_t sum = 0;
  for (int i = 0; i < 32; i++) {
    uint32_t lo = uint32_t(row[i]), hi = uint32_t(row[i] >> 32);
    sum += (uint64_t(lo + hi) << 32) + uint64_t(lo ^ uint32_t(keys[i])) * uint64_t(hi ^ uint32_t(keys[i] >> 32));
  }
  return mix(sum ^ mix(0xd1b54a32d192ed03ull + (uint64_t(pos) | uint64_t(head) << 32 | uint64_t(kv) << 47)));
}

static constexpr int BT = 16; // tokens a block of the push benchmark; one layer, heads of 128

// Random rows with right digests in every block; the blocks' positions are 0 ….
static void fill(xk_ctx *c, int kv_heads, int blocks) {
  std::vector<uint64_t> rows(size_t(2) * kv_heads * BT * 32), sums(kv_heads);
  for (int b = 0; b < blocks; b++) {
    uint64_t z = rng();
    for (uint64_t &v : rows) v = z = z * 6364136223846793005ull + 1442695040888963407ull;
    for (int h = 0; h < kv_heads; h++) {
      sums[h] = 0;
      for (int kv = 0; kv < 2; kv++)
        for (int r = 0; r < BT; r++) sums[h] += row_hash(&rows[((size_t(kv) * kv_heads + h) * BT + r) * 32], kv, h, r);
    }
    MUST(xk_scatter(c, 0, b, 0, BT, rows.data()));
    MUST(xk_set_digest(c, 0, b, BT, sums.data()));
  }
}

// ---------------------------------------------------------------- what D's device has seen

struct Watch { // in pinned memory of D's host
  volatile uint64_t seen, at; // sequence number, device clock
  volatile uint64_t ask, answer, answer_at;
};
static __device__ uint64_t device_clock() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}
static __device__ uint64_t load_acquire(const uint64_t *p) {
  uint64_t v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
static constexpr int ASKS = 3;
static constexpr uint64_t PATIENCE = 2000000000; // ns

// Waits for the flag (none: what ran before on the stream is it), notes the
// time, and answers ASKS questions for it.
static __global__ void watch_kernel(const uint64_t *flag, Watch *w, uint64_t seq, uint64_t first_ask) {
  uint64_t began = device_clock(), t = began;
  while (flag && load_acquire(flag) < seq && t - began < PATIENCE) t = device_clock();
  t = device_clock();
  w->at = t;
  __threadfence_system();
  w->seen = seq;
  for (int i = 0; i < ASKS; i++) {
    while (w->ask != first_ask + i && device_clock() - t < PATIENCE) {}
    w->answer_at = device_clock();
    __threadfence_system();
    w->answer = first_ask + i;
  }
}

// ---------------------------------------------------------------- NCCL, by its public ABI

struct Nccl {
  struct Id {
    char b[128];
  };
  void *comm = nullptr;
  int (*unique)(Id *);
  int (*init)(void **, int, Id, int);
  int (*send)(const void *, size_t, int, int, void *, cudaStream_t);
  int (*recv)(void *, size_t, int, int, void *, cudaStream_t);
  int (*destroy)(void *);
  bool open(const char *path) {
    void *h = dlopen(path, RTLD_NOW);
    if (!h) {
      fprintf(stderr, "%s\n", dlerror());
      return false;
    }
    auto get = [&](auto &f, const char *name) { f = reinterpret_cast<std::decay_t<decltype(f)>>(dlsym(h, name)); };
    get(unique, "ncclGetUniqueId"), get(init, "ncclCommInitRank"), get(send, "ncclSend"), get(recv, "ncclRecv"), get(destroy, "ncclCommDestroy");
    return unique && init && send && recv && destroy;
  }
};

// ---------------------------------------------------------------- push

struct Shared { // between the two processes
  std::atomic<int> stage[2];
  std::atomic<uint64_t> armed, taken; // by D: waits for this transfer; has its time
  std::atomic<int64_t> seen_at;       // host's clock when D's device saw it
  std::atomic<int64_t> slack;         // how well that is known, ns
  std::atomic<int64_t> acked_at;      // when D's host saw that D's device had seen it
  std::atomic<uint64_t> want;         // what P asks D to do next: see Ask
  std::atomic<int64_t> bytes, good, bad;
  char handle[XK_HANDLE_BYTES];
  cudaIpcMemHandle_t buffer;
  Nccl::Id id;
  int32_t dst[65536];
  std::atomic<int> n_dst;
};
enum Ask : uint64_t { WATCH_FLAG = 1, RECEIVE, VERIFY, DONE };

static Shared *sh;
static uint8_t *flags;

static void spin(const std::function<bool()> &done, const char *what) {
  for (Clock began = now(); !done();)
    if (now() - began > 30000000000) {
      fprintf(stderr, "gave up: %s\n", what);
      exit(1);
    }
}
static void meet(int me) {
  int s = ++sh->stage[me];
  spin([&] { return sh->stage[1 - me] >= s; }, "the other process");
}

static constexpr int BLOCKS = 1 << 15; // 1 GiB of 32 KiB

static void receiver(int kv_heads, const char *nccl_path) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  Nccl nccl;
  bool with_nccl = nccl_path && nccl.open(nccl_path);
  xk_ctx *c = pool(1, 1, kv_heads, BT, BLOCKS * 4 / kv_heads);
  MUST(xk_export(c, sh->handle));
  void *buffer, *seen;
  MUST(cudaMalloc(&buffer, 1024 * MIB));
  MUST(cudaIpcGetMemHandle(&sh->buffer, buffer));
  Watch *w;
  MUST(cudaHostAlloc(&w, sizeof *w, cudaHostAllocMapped));
  memset((void *)w, 0, sizeof *w);
  MUST(cudaHostGetDevicePointer(&seen, w, 0));
  void *flag;
  MUST(xk_flag(c, 3, &flag));
  cudaStream_t s;
  MUST(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  meet(1);
  if (with_nccl) {
    MUST(nccl.init(&nccl.comm, 2, sh->id, 1));
    MUST(nccl.recv(buffer, MIB, 0, 0, nccl.comm, s)); // connects, and waits for the other side to
    MUST(cudaStreamSynchronize(s));
  }
  meet(1);
  uint64_t asks = 0;
  for (uint64_t seq = 1;; seq++) {
    spin([&] { return sh->armed == seq; }, "a question");
    uint64_t want = sh->want;
    if (want == DONE) break;
    if (want == VERIFY) {
      std::vector<xk_landed> list(sh->n_dst);
      for (int i = 0; i < sh->n_dst; i++) list[i] = {0, sh->dst[i], 0, BT};
      std::vector<uint8_t> good(list.size());
      Clock t = now();
      MUST(xk_verify(c, list.data(), int(list.size()), good.data(), 5000000000));
      sh->seen_at = now() - t;
      sh->good = std::count(good.begin(), good.end(), 1), sh->bad = std::count(good.begin(), good.end(), 0);
      sh->taken = seq;
      continue;
    }
    if (want == RECEIVE) MUST(nccl.recv(buffer, sh->bytes, 0, 0, nccl.comm, s));
    watch_kernel<<<1, 1, 0, s>>>(want == RECEIVE ? nullptr : static_cast<uint64_t *>(flag), static_cast<Watch *>(seen), seq, asks + 1);
    MUST(cudaGetLastError());
    Clock settle = now() + 30000; // the kernel has begun
    while (now() < settle) {}
    sh->taken = seq; // P may go
    spin([&] { return w->seen == seq; }, "the flag");
    sh->acked_at = now();
    Clock best = INT64_MAX, offset = 0;
    for (int i = 0; i < ASKS; i++) {
      asks++;
      Clock a = now();
      w->ask = asks;
      spin([&] { return w->answer == asks; }, "the device's clock");
      Clock b = now();
      if (b - a < best) best = b - a, offset = (a + b) / 2 - Clock(w->answer_at);
    }
    MUST(cudaStreamSynchronize(s));
    sh->seen_at = Clock(w->at) + offset, sh->slack = best / 2;
    sh->armed = 0;
  }
  meet(1);
  if (with_nccl) nccl.destroy(nccl.comm);
  MUST(xk_close(c));
}

struct Sender {
  int kv_heads, blocks;
  int64_t piece;
  xk_ctx *c;
  xk_peer *peer;
  Nccl nccl;
  bool with_nccl;
  uint8_t *buffer, *theirs; // contiguous: ours, and D's mapped
  cudaStream_t s;
  uint64_t seq = 0;
  std::vector<double> slack, acks;

  uint64_t ask(Ask what) {
    sh->want = what, sh->armed = ++seq;
    spin([&] { return sh->taken == seq; }, "D to be ready");
    return seq;
  }
  // GB/s of one transfer of so many bytes.
  double timed(Ask what, int64_t bytes, const std::function<void()> &go) {
    sh->bytes = bytes;
    ask(what);
    Clock t = now();
    go();
    spin([&] { return sh->armed == 0; }, "D's time");
    slack.push_back(double(sh->slack)), acks.push_back(double(bytes) / double(sh->acked_at - t));
    return double(bytes) / double(sh->seen_at - t);
  }
  // run: consecutive blocks a piece.
  std::vector<xk_pair> draw(int n, int run) {
    std::vector<int> a(blocks / run), b(blocks / run);
    std::iota(a.begin(), a.end(), 0), std::iota(b.begin(), b.end(), 0);
    std::shuffle(a.begin(), a.end(), rng), std::shuffle(b.begin(), b.end(), rng);
    std::vector<xk_pair> p;
    for (int i = 0; i < n / run; i++)
      for (int k = 0; k < run; k++) p.push_back({a[i] * run + k, b[i] * run + k});
    return p;
  }
  double push(const std::vector<xk_pair> &p, int engine = XK_KERNEL, int ctas = 0, bool rows_only = false) {
    xk_push_args a = {};
    a.n_layers = 1, a.n_pairs = int(p.size()), a.engine = engine, a.ctas = ctas, a.line = 3, a.value = seq + 1, a.rows_only = rows_only;
    return timed(WATCH_FLAG, p.size() * piece, [&] { MUST(xk_push(peer, &a, p.data())); });
  }
  double send(int64_t bytes) {
    return timed(RECEIVE, bytes, [&] { MUST(nccl.send(buffer, bytes, 0, 1, nccl.comm, s)); });
  }
  // GB/s of the verifying.
  double verify(const std::vector<xk_pair> &p) {
    for (size_t i = 0; i < p.size(); i++) sh->dst[i] = p[i].dst;
    sh->n_dst = int(p.size());
    ask(VERIFY);
    if (sh->bad || sh->good != int64_t(p.size())) {
      fprintf(stderr, "%lld of %zu blocks are bad\n", (long long)sh->bad, p.size());
      exit(1);
    }
    return double(p.size() * piece) / double(sh->seen_at);
  }
  double events(int rounds, const std::function<void()> &go, double bytes) { // device time, one after another
    cudaEvent_t a, b;
    MUST(cudaEventCreate(&a));
    MUST(cudaEventCreate(&b));
    go();
    MUST(cudaEventRecord(a, s));
    for (int i = 0; i < rounds; i++) go();
    MUST(cudaEventRecord(b, s));
    MUST(cudaStreamSynchronize(s));
    float ms;
    MUST(cudaEventElapsedTime(&ms, a, b));
    return bytes * rounds / (ms * 1e6);
  }

  Sender(int kv_heads, const char *nccl_path) : kv_heads(kv_heads), blocks(BLOCKS * 4 / kv_heads), piece(int64_t(8192) * kv_heads) {
    with_nccl = nccl_path && nccl.open(nccl_path);
    if (with_nccl) MUST(nccl.unique(&sh->id));
    c = pool(0, 1, kv_heads, BT, blocks);
    fill(c, kv_heads, blocks);
    meet(0);
    MUST(cudaSetDevice(0));
    MUST(xk_peer_open(c, sh->handle, XK_HANDLE_BYTES, flags, XK_FLAG_LINES * XK_FLAG_STRIDE, &peer));
    MUST(cudaIpcOpenMemHandle(reinterpret_cast<void **>(&theirs), sh->buffer, cudaIpcMemLazyEnablePeerAccess));
    MUST(cudaMalloc(&buffer, 1024 * MIB));
    MUST(cudaMemset(buffer, 7, 1024 * MIB));
    MUST(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    if (with_nccl) {
      MUST(nccl.init(&nccl.comm, 2, sh->id, 0));
      MUST(nccl.send(buffer, MIB, 0, 1, nccl.comm, s));
      MUST(cudaStreamSynchronize(s));
    }
    meet(0);
  }
  void finish() {
    sh->want = DONE, sh->armed = ++seq;
    meet(0);
    MUST(xk_peer_close(peer));
    MUST(cudaIpcCloseMemHandle(theirs));
    if (with_nccl) nccl.destroy(nccl.comm);
    MUST(xk_close(c));
  }
};

static std::string us(double v) {
  char b[32];
  snprintf(b, sizeof b, "%.2f", v);
  return b;
}

// Sizes in turn with NCCL's, then the copy engine and the digests' cost.
static void push_bench(int kv_heads, const char *nccl_path) {
  for (auto &v : sh->stage) v = 0;
  sh->armed = 0, sh->taken = 0;
  pid_t child = fork();
  if (child == 0) {
    receiver(kv_heads, nccl_path);
    exit(0);
  }
  Sender x(kv_heads, nccl_path);
  const std::string kib = kv_heads == 4 ? "" : ".p" + std::to_string(x.piece >> 10) + "k";
  int device = 0;
  cudaDeviceProp p;
  MUST(cudaGetDeviceProperties(&p, device));
  if (kv_heads == 4) printf("DEVICE 2 x %s\n", p.name);
  struct Size {
    const char *name;
    int64_t bytes;
    int runs;
  };
  auto note = [&] { // and forgets
    std::string s = "seen by D's host " + us(stats(x.acks).median) + "; clocks within " + us(stats(x.slack).median / 1000) + " us";
    x.acks.clear(), x.slack.clear();
    return s;
  };
  for (Size z : {Size{"1m", MIB, 300}, {"4m", 4 * MIB, 300}, {"16m", 16 * MIB, 200}, {"64m", 64 * MIB, 150}, {"512m", 512 * MIB, 100}, {"1g", 1024 * MIB, 100}}) {
    std::vector<double> ours, theirs, checked;
    std::vector<xk_pair> pairs;
    for (int i = -3; i < z.runs; i++) {
      pairs = x.draw(int(z.bytes / x.piece), 1);
      double g = x.push(pairs);
      if (i >= 0) ours.push_back(g);
      if (i == z.runs - 1 || i % 20 == 0) checked.push_back(x.verify(pairs));
      if (x.with_nccl) {
        auto keep = x.acks;
        g = x.send(z.bytes);
        x.acks = keep;
        if (i >= 0) theirs.push_back(g);
      }
    }
    print("RESULT", "push.ipc_gbs." + std::string(z.name) + kib, "GB/s", stats(ours), note());
    if (!theirs.empty()) print("PEER", "nccl." + std::string(z.name) + kib, "GB/s", stats(theirs));
    print("RESULT", "verify." + std::string(z.name) + kib, "GB/s", stats(checked));
  }
  auto measure = [&](const std::string &name, int runs, const std::function<double()> &one) {
    std::vector<double> v;
    for (int i = -3; i < runs; i++) {
      double g = one();
      if (i >= 0) v.push_back(g);
    }
    print("RESULT", name + kib, "GB/s", stats(v), note());
  };
  for (int ctas : {4, 8, 16, 32}) {
    measure("push.ipc_gbs." + std::to_string(ctas) + "sm", ctas == 16 ? 100 : 20, [&] { return x.push(x.draw(int(512 * MIB / x.piece), 1), XK_KERNEL, ctas); });
  }
  measure("push.ipc_gbs.run256k", 20, [&] { return x.push(x.draw(int(512 * MIB / x.piece), int(MIB / 4 / x.piece)), XK_COPY); });
  measure("push.ipc_gbs.run1m", 100, [&] { return x.push(x.draw(int(512 * MIB / x.piece), int(MIB / x.piece)), XK_COPY); });
  measure("push.ipc_gbs.run16m", 100, [&] { return x.push(x.draw(int(512 * MIB / x.piece), int(16 * MIB / x.piece)), XK_COPY); });
  if (kv_heads == 4) print("PEER", "copy_engine", "GB/s", {x.events(20, [&] { MUST(cudaMemcpyAsync(x.theirs, x.buffer, 1024 * MIB, cudaMemcpyDeviceToDevice, x.s)); }, double(1024 * MIB)), 0, 0, 20});
  for (Size z : {Size{"1m", MIB, 200}, {"64m", 64 * MIB, 100}, {"1g", 1024 * MIB, 60}}) { // with and without digests, in turn
    std::vector<double> cost;
    for (int i = -3; i < z.runs; i++) {
      auto pairs = x.draw(int(z.bytes / x.piece), 1);
      double a = x.push(pairs, XK_KERNEL, 0, false), b = x.push(pairs, XK_KERNEL, 0, true);
      if (i >= 0) cost.push_back(100 * (b / a - 1));
    }
    print("RESULT", "push.digest_cost_pct." + std::string(z.name) + kib, "%", stats(cost));
  }
  note();
  x.finish();
  int status;
  waitpid(child, &status, 0);
  if (status) exit(1);
}

// Cuts of a push side by side, for a library built with XK_TUNE.
static void push_tune() {
  pid_t child = fork();
  if (child == 0) {
    receiver(4, nullptr);
    exit(0);
  }
  Sender x(4, nullptr);
  {
    std::vector<double> v;
    for (int i = -5; i < 50; i++) {
      xk_push_args a = {};
      a.n_layers = 1, a.line = 3, a.value = x.seq + 1;
      double g = x.timed(WATCH_FLAG, 1000, [&] { MUST(xk_push(x.peer, &a, nullptr)); });
      if (i >= 0) v.push_back(1000 / g / 1000);
    }
    Stats a = stats(v), b = stats(x.slack);
    printf("nothing but a flag: %.2f us (%.2f to %.2f), clocks within %.2f us\n", a.median, a.p1, a.p99, b.median / 1000);
  }
  for (const char *cut : {"256,1,264", "256,2", "256,2,264", "512,1", "512,1,264", "512,2", "512,4", "1024,1", "1024,2", "1024,4", "512,4,264", "512,8", "512,2,396", "256,4,528", "256,8,264"}) {
    setenv("XK_CUT", cut, 1);
    printf("%-12s", cut);
    for (int64_t mib : {1, 2, 4, 8, 16, 32, 64, 1024}) {
      std::vector<double> v;
      for (int i = -3; i < (mib > 64 ? 12 : 40); i++) {
        double g = x.push(x.draw(int(mib * MIB / x.piece), 1));
        if (i >= 0) v.push_back(g);
      }
      printf(" %4lldm %6.1f", (long long)mib, stats(v).median);
    }
    for (int ctas : {8, 16}) {
      std::vector<double> v;
      for (int i = -2; i < 10; i++) v.push_back(x.push(x.draw(int(512 * MIB / x.piece), 1), XK_KERNEL, ctas));
      printf(" %2dsm %6.1f", ctas, stats(v).median);
    }
    printf("\n");
    fflush(stdout);
  }
  for (const char *lanes : {"1", "2", "3", "4"}) {
    setenv("XK_LANES", lanes, 1);
    printf("lanes %s", lanes);
    for (int kib : {256, 1024, 4096, 16384}) {
      std::vector<double> v;
      for (int i = -2; i < 10; i++) v.push_back(x.push(x.draw(int(512 * MIB / x.piece), int(kib * 1024 / x.piece)), XK_COPY));
      printf(" %5dk %6.1f", kib, stats(v).median);
    }
    printf("\n");
    fflush(stdout);
  }
  x.finish();
  waitpid(child, nullptr, 0);
}

// ---------------------------------------------------------------- host

struct HostRig {
  static constexpr int LAYERS = 32, HEADS = 8;
  int bt, blocks;
  int64_t run, bytes;
  xk_ctx *c;
  xk_region *region;
  uint8_t *mem;
  int64_t unit, digest_at;
  cudaStream_t s[2];

  HostRig(int bt, uint8_t *mem, int64_t size, int tokens) : bt(bt), blocks(tokens / bt), run(int64_t(4096) * bt), mem(mem) {
    c = pool(0, LAYERS, HEADS, bt, 2 * blocks); // one half goes out while the other comes in
    bytes = run * LAYERS * blocks;
    digest_at = run * LAYERS, unit = digest_at + LAYERS * HEADS * 8;
    MUST(xk_host_register(c, mem, size, &region));
    for (cudaStream_t &t : s) MUST(cudaStreamCreateWithFlags(&t, cudaStreamNonBlocking));
  }
  ~HostRig() {
    MUST(xk_host_release(region));
    MUST(xk_close(c));
  }
  // Places of one half in block-first memory, shuffled at both ends.
  std::vector<xk_place> places(int half) {
    std::vector<int> a(blocks), b(blocks);
    std::iota(a.begin(), a.end(), 0), std::iota(b.begin(), b.end(), 0);
    std::shuffle(a.begin(), a.end(), rng), std::shuffle(b.begin(), b.end(), rng);
    std::vector<xk_place> p(blocks);
    for (int i = 0; i < blocks; i++) p[i] = {half * blocks + a[i], bt, (half * int64_t(blocks) + b[i]) * unit, (half * int64_t(blocks) + b[i]) * unit + digest_at};
    return p;
  }
  xk_mark *begin(bool to_host, const std::vector<xk_place> &p, int engine, int ctas) {
    xk_move_args a = {};
    a.n_layers = LAYERS, a.n_places = int(p.size()), a.engine = engine, a.ctas = ctas, a.to_host = to_host;
    a.layer_stride = run, a.digest_stride = HEADS * 8;
    xk_mark *m;
    MUST(xk_move(c, region, &a, p.data(), &m));
    return m;
  }
  void end(xk_mark *m) {
    MUST(xk_wait(m, 10000000000));
    MUST(xk_mark_free(m));
  }
};

static Stats repeat(int n, const std::function<double()> &one) {
  std::vector<double> v;
  one();
  for (int i = 0; i < n; i++) v.push_back(one());
  return stats(v);
}

static void host_bench() {
  const int tokens = 4096; // 512 MiB of 8 KV heads of 128 in 32 layers
  int64_t size = (int64_t(2) * (tokens * int64_t(131072) + tokens * int64_t(2048)) + 2 * MIB) & ~(2 * MIB - 1);
  uint8_t *mem = static_cast<uint8_t *>(mmap(nullptr, size + 2 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  mem = reinterpret_cast<uint8_t *>((reinterpret_cast<uintptr_t>(mem) + 2 * MIB - 1) & ~uintptr_t(2 * MIB - 1));
  madvise(mem, size, MADV_HUGEPAGE);
  memset(mem, 3, size);
  cudaDeviceProp prop;
  MUST(cudaGetDeviceProperties(&prop, 0));
  printf("DEVICE %s\n", prop.name);
  void *device[2];
  for (void *&d : device) MUST(cudaMalloc(&d, 256 * MIB));
  for (int bt : {16, 1, 64}) {
    HostRig r(bt, mem, size, tokens);
    std::string t = ".t" + std::to_string(bt);
    auto gather = [&](int engine, int ctas) {
      auto p = r.places(0);
      Clock t = now();
      r.end(r.begin(true, p, engine, ctas));
      return double(r.bytes) / double(now() - t);
    };
    auto scatter = [&](int engine, int ctas) {
      auto p = r.places(1);
      Clock t = now();
      r.end(r.begin(false, p, engine, ctas));
      return double(r.bytes) / double(now() - t);
    };
    const int few = bt == 1 ? 8 : 4;
    for (int ctas : {1, 2, 4, 8}) {
      std::string name = ctas == few ? "" : ".ctas" + std::to_string(ctas);
      int n = ctas == few ? 50 : 10;
      print("RESULT", "kvio.d2h_gbs" + t + name, "GB/s", repeat(n, [&] { return gather(XK_KERNEL, ctas); }));
      print("RESULT", "kvio.h2d_gbs" + t + name, "GB/s", repeat(n, [&] { return scatter(XK_KERNEL, ctas); }));
    }
    // Peers: one run, one call a piece, and one batch call.
    auto timed = [&](double bytes, const std::function<void()> &go) {
      return [&, bytes, go] {
        Clock t = now();
        go();
        MUST(cudaStreamSynchronize(r.s[0]));
        return bytes / double(now() - t);
      };
    };
    const int64_t part = 256 * MIB;
    auto pieces = [&](bool to_host, std::vector<void *> &dst, std::vector<const void *> &src, std::vector<size_t> &sizes, int64_t total) {
      int n = int(total / r.run);
      std::vector<int> a(n), b(n);
      std::iota(a.begin(), a.end(), 0), std::iota(b.begin(), b.end(), 0);
      std::shuffle(a.begin(), a.end(), rng), std::shuffle(b.begin(), b.end(), rng);
      for (int i = 0; i < n; i++) {
        uint8_t *h = mem + a[i] * r.run, *d = static_cast<uint8_t *>(device[0]) + b[i] * r.run;
        dst.push_back(to_host ? h : d), src.push_back(to_host ? d : h), sizes.push_back(r.run);
      }
    };
    for (bool out : {true, false}) {
      std::string way = out ? "d2h" : "h2d";
      if (bt == 16) print("PEER", "engine." + way, "GB/s", repeat(20, timed(part, [&] { MUST(cudaMemcpyAsync(out ? mem : device[0], out ? device[0] : mem, part, cudaMemcpyDefault, r.s[0])); })));
      int64_t total = bt == 1 ? 16 * MIB : part;
      std::vector<void *> dst;
      std::vector<const void *> src;
      std::vector<size_t> sizes;
      pieces(out, dst, src, sizes, total);
      print("PEER", "calls." + way + t, "GB/s", repeat(5, timed(total, [&] {
        for (size_t i = 0; i < dst.size(); i++) MUST(cudaMemcpyAsync(dst[i], src[i], sizes[i], cudaMemcpyDefault, r.s[0]));
      })));
      cudaMemcpyAttributes attr = {};
      attr.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
      size_t at = 0;
      print("PEER", "batch." + way + t, "GB/s", repeat(5, timed(total, [&] { MUST(cudaMemcpyBatchAsync(dst.data(), src.data(), sizes.data(), dst.size(), &attr, &at, 1, r.s[0])); })));
    }
    // Both ways at once.
    if (bt == 1) continue;
    auto duplex = [&](int out_engine, int out_ctas, int in_engine, int in_ctas) {
      auto p = r.places(0), q = r.places(1);
      Clock t = now();
      xk_mark *a = r.begin(true, p, out_engine, out_ctas), *b = r.begin(false, q, in_engine, in_ctas);
      r.end(a), r.end(b);
      return 2 * double(r.bytes) / double(now() - t);
    };
    for (int k : {2, 4}) print("RESULT", "duplex.kernel" + std::to_string(k) + "_kernel" + std::to_string(k) + t, "GB/s", repeat(20, [&] { return duplex(XK_KERNEL, k, XK_KERNEL, k); }));
    print("RESULT", "duplex.engine_kernel4" + t, "GB/s", repeat(20, [&] { return duplex(XK_COPY, 0, XK_KERNEL, 4); }));
    print("RESULT", "duplex.kernel4_engine" + t, "GB/s", repeat(20, [&] { return duplex(XK_KERNEL, 4, XK_COPY, 0); }));
    if (bt == 16) {
      auto both = [&] {
        Clock t = now();
        MUST(cudaMemcpyAsync(mem, device[0], part, cudaMemcpyDefault, r.s[0]));
        MUST(cudaMemcpyAsync(device[1], mem + part, part, cudaMemcpyDefault, r.s[1]));
        MUST(cudaStreamSynchronize(r.s[0]));
        MUST(cudaStreamSynchronize(r.s[1]));
        return 2 * double(part) / double(now() - t);
      };
      print("PEER", "engine.duplex", "GB/s", repeat(20, both));
    }
  }
}

int main(int argc, char **argv) {
  std::string what = argc > 1 ? argv[1] : "";
  if (what == "host") {
    host_bench();
    return 0;
  }
  if (what != "push" && what != "tune") {
    fprintf(stderr, "usage: moves push [LIBNCCL.so] | moves host\n");
    return 2;
  }
  sh = static_cast<Shared *>(mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  int fd = memfd_create("flags", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, XK_FLAG_LINES * XK_FLAG_STRIDE)) return 1;
  flags = static_cast<uint8_t *>(mmap(nullptr, XK_FLAG_LINES * XK_FLAG_STRIDE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
  if (what == "tune") push_tune();
  else push_bench(argc > 3 ? atoi(argv[3]) : 4, argc > 2 && *argv[2] ? argv[2] : nullptr);
  return 0;
}
