// Times what kernels/move.go promises, beside its peers and limits in the same
// run (scripts/cuda-test push, kvio). One line "RESULT {json}" or "PEER {json}" a
// figure.
//
//   moves push [LIBNCCL.so [KV_HEADS]]  GPU 0 pushes to GPU 1, from one process
//                   to another; a piece has 8 KiB a KV head, of which there are 4
//   moves host               one GPU and pinned host memory
//   moves arrive             blocks that arrive by layers, by pages and CTAs
//
// A push is timed from its launch on P until D's device has seen the flag, by one
// clock, P's: a kernel there notes the time and ends, which releases the push as a
// layer's event does; a kernel of one thread on D waits for the flag and answers
// into P's memory, where another waits; half of such a round trip is taken off.
// NCCL is timed in the same way, its send behind the first kernel and D's answer
// behind its receive, and in turn with ours. Beside it stands the time from the
// call on P's host until D's host knows. Blocks are drawn anew for each push, and
// verified after every twentieth.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>

#include "moves_arrive.cuh"
#include "moves_host.cuh"

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
static __device__ void store_release(uint64_t *p, uint64_t v) { asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
static constexpr uint64_t PATIENCE = 2000000000; // ns
static __device__ void wait_for(const uint64_t *p, uint64_t v) {
  for (uint64_t began = device_clock(), i = 0; load_acquire(p) < v; i++)
    if (i % 1024 == 0 && device_clock() - began > PATIENCE) return;
}

// D: waits for the flag (none: what ran before on the stream is it) and answers,
// to P's device and to the hosts.
static __global__ void watch_kernel(const uint64_t *flag, uint64_t *answer, uint64_t *host, uint64_t seq) {
  if (flag) wait_for(flag, seq);
  store_release(answer, seq);
  store_release(host, seq);
}
// P: the moment of the launch.
static __global__ void gate_kernel(const uint64_t *go, uint64_t seq, uint64_t *at) {
  wait_for(go, seq);
  *at = device_clock();
}
// P: the moment of D's answer.
static __global__ void answer_kernel(const uint64_t *answer, uint64_t seq, uint64_t *at) {
  wait_for(answer, seq);
  *at = device_clock();
}
// P: a round trip, without anything between.
static __global__ void ping_kernel(uint64_t *flag, const uint64_t *answer, uint64_t seq, uint64_t *took) {
  uint64_t began = device_clock();
  store_release(flag, seq);
  wait_for(answer, seq);
  *took = device_clock() - began;
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
  std::atomic<uint64_t> armed, taken; // by P: transfer or question; by D: it is waited for
  std::atomic<int64_t> known_at;      // host's clock when D's host knew
  std::atomic<uint64_t> want;         // see Ask
  std::atomic<int64_t> bytes, took, good, bad;
  char handle[XK_HANDLE_BYTES];
  cudaIpcMemHandle_t buffer, words;   // D's, P's
  Nccl::Id id;
  int32_t dst[65536];
  std::atomic<int> n_dst;
};
enum Ask : uint64_t { WATCH_FLAG = 1, WATCH_WORD, RECEIVE, VERIFY, DONE };

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
  MUST(cudaMalloc(&buffer, 1024 * MIB + 4096)); // and a word
  MUST(cudaMemset(buffer, 0, 1024 * MIB + 4096));
  MUST(cudaIpcGetMemHandle(&sh->buffer, buffer));
  volatile uint64_t *known; // by the host
  MUST(cudaHostAlloc((void **)&known, 64, cudaHostAllocMapped));
  *known = 0;
  MUST(cudaHostGetDevicePointer(&seen, (void *)known, 0));
  void *flag;
  MUST(xk_flag(c, 3, &flag));
  cudaStream_t s;
  MUST(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  meet(1);
  uint64_t *answer; // in P's memory
  MUST(cudaIpcOpenMemHandle(reinterpret_cast<void **>(&answer), sh->words, cudaIpcMemLazyEnablePeerAccess));
  if (with_nccl) {
    MUST(nccl.init(&nccl.comm, 2, sh->id, 1));
    MUST(nccl.recv(buffer, MIB, 0, 0, nccl.comm, s)); // connects, and waits for the other side to
    MUST(cudaStreamSynchronize(s));
  }
  meet(1);
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
      sh->took = now() - t;
      sh->good = std::count(good.begin(), good.end(), 1), sh->bad = std::count(good.begin(), good.end(), 0);
      sh->taken = seq;
      continue;
    }
    if (want == RECEIVE) MUST(nccl.recv(buffer, sh->bytes, 0, 0, nccl.comm, s));
    const uint64_t *wait = want == RECEIVE ? nullptr : want == WATCH_WORD ? static_cast<uint64_t *>(buffer) + 128 * MIB : static_cast<uint64_t *>(flag);
    watch_kernel<<<1, 1, 0, s>>>(wait, answer, static_cast<uint64_t *>(seen), seq);
    MUST(cudaGetLastError());
    Clock settle = now() + 30000; // the kernel has begun
    while (now() < settle) {}
    sh->taken = seq; // P may go
    spin([&] { return *known == seq; }, "the flag");
    sh->known_at = now();
    MUST(cudaStreamSynchronize(s));
    sh->armed = 0;
  }
  MUST(cudaIpcCloseMemHandle(answer));
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
  cudaStream_t s, clocks;
  cudaEvent_t gate;
  uint64_t *words; // device: D answers in the first; [16] launched at, [17] answered at
  volatile uint64_t *host; // pinned: go
  uint64_t *seen;  // the same, as the device sees it
  double one_way = 0; // ns
  uint64_t seq = 0;
  std::vector<double> calls; // GB/s from the host's call until D's host knew

  uint64_t ask(Ask what) {
    sh->want = what, sh->armed = ++seq;
    spin([&] { return sh->taken == seq; }, "D to be ready");
    return seq;
  }
  // GB/s of one transfer of so many bytes, which go(event) launches on a stream
  // behind that event. 
  double timed(Ask what, int64_t bytes, const std::function<void(cudaEvent_t)> &go) {
    sh->bytes = bytes;
    ask(what);
    answer_kernel<<<1, 1, 0, clocks>>>(words, seq, words + 17);
    gate_kernel<<<1, 1, 0, s>>>(seen, seq, words + 16);
    MUST(cudaEventRecord(gate, s));
    go(gate);
    Clock settle = now() + 30000;
    while (now() < settle) {}
    host[0] = seq;
    spin([&] { return sh->armed == 0; }, "D's time");
    MUST(cudaStreamSynchronize(s));
    MUST(cudaStreamSynchronize(clocks));
    uint64_t at[2]; // launched, answered
    MUST(cudaMemcpy(at, words + 16, sizeof at, cudaMemcpyDeviceToHost));
    return double(bytes) / (double(at[1] - at[0]) - one_way);
  }
  double called(Ask what, int64_t bytes, const std::function<void(cudaEvent_t)> &go) {
    sh->bytes = bytes;
    ask(what);
    Clock t = now();
    go(nullptr);
    spin([&] { return sh->armed == 0; }, "D's time");
    return double(bytes) / double(sh->known_at - t);
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
  double push(const std::vector<xk_pair> &p, int engine = XK_KERNEL, int ctas = 0, bool rows_only = false, bool call = false) {
    xk_push_args a = {};
    a.n_layers = 1, a.n_pairs = int(p.size()), a.engine = engine, a.ctas = ctas, a.line = 3, a.value = seq + 1, a.rows_only = rows_only;
    auto go = [&](cudaEvent_t after) {
      a.after = after;
      MUST(xk_push(peer, &a, p.data()));
    };
    return call ? called(WATCH_FLAG, p.size() * piece, go) : timed(WATCH_FLAG, p.size() * piece, go);
  }
  double send(int64_t bytes, bool call = false) {
    auto go = [&](cudaEvent_t) { MUST(nccl.send(buffer, bytes, 0, 1, nccl.comm, s)); };
    return call ? called(RECEIVE, bytes, go) : timed(RECEIVE, bytes, go);
  }
  // Half of a word's way to D and back.
  void find_one_way() {
    std::vector<double> v;
    for (int i = 0; i < 100; i++) {
      ask(WATCH_WORD);
      ping_kernel<<<1, 1, 0, s>>>(reinterpret_cast<uint64_t *>(theirs + 1024 * MIB), words, seq, words + 16);
      spin([&] { return sh->armed == 0; }, "D's answer");
      MUST(cudaStreamSynchronize(s));
      uint64_t took;
      MUST(cudaMemcpy(&took, words + 16, sizeof took, cudaMemcpyDeviceToHost));
      v.push_back(double(took) / 2);
    }
    one_way = stats(v).median;
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
    return double(p.size() * piece) / double(sh->took);
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
    MUST(cudaMalloc(&words, 4096));
    MUST(cudaMemset(words, 0, 4096));
    MUST(cudaIpcGetMemHandle(&sh->words, words));
    MUST(cudaHostAlloc((void **)&host, 64, cudaHostAllocMapped));
    memset((void *)host, 0, 64);
    MUST(cudaHostGetDevicePointer(reinterpret_cast<void **>(&seen), (void *)host, 0));
    MUST(cudaStreamCreateWithFlags(&clocks, cudaStreamNonBlocking));
    MUST(cudaEventCreateWithFlags(&gate, cudaEventDisableTiming));
    MUST(cudaDeviceSynchronize());
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
    find_one_way();
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
  printf("PEER {\"name\": \"one_way_us\", \"value\": %.3f}\n", x.one_way / 1000);
  for (Size z : {Size{"1m", MIB, 300}, {"4m", 4 * MIB, 300}, {"16m", 16 * MIB, 200}, {"64m", 64 * MIB, 150}, {"512m", 512 * MIB, 100}, {"1g", 1024 * MIB, 100}}) {
    std::vector<double> ours, theirs, checked, called, nccl_called;
    std::vector<xk_pair> pairs;
    for (int i = -3; i < z.runs; i++) {
      pairs = x.draw(int(z.bytes / x.piece), 1);
      double g = x.push(pairs);
      if (i >= 0) ours.push_back(g);
      if (i == z.runs - 1 || i % 20 == 0) checked.push_back(x.verify(pairs));
      if (i >= 0 && i % 4 == 0) called.push_back(x.push(pairs, XK_KERNEL, 0, false, true));
      if (!x.with_nccl) continue;
      g = x.send(z.bytes);
      if (i >= 0) theirs.push_back(g);
      if (i >= 0 && i % 4 == 0) nccl_called.push_back(x.send(z.bytes, true));
    }
    print("RESULT", "push.ipc_gbs." + std::string(z.name) + kib, "GB/s", stats(ours), "from the host's call until D's host knows " + us(stats(called).median));
    if (!theirs.empty()) print("PEER", "nccl." + std::string(z.name) + kib, "GB/s", stats(theirs), "from the host's call " + us(stats(nccl_called).median));
    print("RESULT", "verify." + std::string(z.name) + kib, "GB/s", stats(checked));
  }
  auto measure = [&](const std::string &name, int runs, const std::function<double()> &one) {
    std::vector<double> v;
    for (int i = -3; i < runs; i++) {
      double g = one();
      if (i >= 0) v.push_back(g);
    }
    print("RESULT", name + kib, "GB/s", stats(v));
  };
  for (int ctas : {4, 8, 16, 32}) {
    measure("push.ipc_gbs." + std::to_string(ctas) + "sm", ctas == 16 ? 100 : 20, [&] { return x.push(x.draw(int(512 * MIB / x.piece), 1), XK_KERNEL, ctas); });
  }
  for (int k : {64, 128, 256}) {
    const std::string name = "push.ipc_gbs.run" + std::to_string(k) + "k";
    const int run = int(k * 1024 / x.piece);
    measure(name, 20, [&] { return x.push(x.draw(int(512 * MIB / x.piece), run), XK_COPY); });
    measure(name + ".called", 20, [&] { return x.push(x.draw(int(512 * MIB / x.piece), run), XK_COPY, 0, false, true); });
    measure(name + ".called32m", 50, [&] { return x.push(x.draw(int(32 * MIB / x.piece), run), XK_COPY, 0, false, true); });
  }
  measure("push.ipc_gbs.kernel.called32m", 50, [&] { return x.push(x.draw(int(32 * MIB / x.piece), 1), XK_KERNEL, 0, false, true); });
  measure("push.ipc_gbs.run1m", 100, [&] { return x.push(x.draw(int(1024 * MIB / x.piece), int(MIB / x.piece)), XK_COPY); });
  measure("push.ipc_gbs.run16m", 100, [&] { return x.push(x.draw(int(1024 * MIB / x.piece), int(16 * MIB / x.piece)), XK_COPY); });
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
  x.finish();
  int status;
  waitpid(child, &status, 0);
  if (status) exit(1);
}

int main(int argc, char **argv) {
  std::string what = argc > 1 ? argv[1] : "";
  if (what == "host") {
    host_bench();
    return 0;
  }
  if (what == "arrive") {
    arrive_bench();
    return 0;
  }
  if (what != "push") {
    fprintf(stderr, "usage: moves push [LIBNCCL.so] | moves host | moves arrive\n");
    return 2;
  }
  sh = static_cast<Shared *>(mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  int fd = memfd_create("flags", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, XK_FLAG_LINES * XK_FLAG_STRIDE)) return 1;
  flags = static_cast<uint8_t *>(mmap(nullptr, XK_FLAG_LINES * XK_FLAG_STRIDE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
  push_bench(argc > 3 ? atoi(argv[3]) : 4, argc > 2 && *argv[2] ? argv[2] : nullptr);
  return 0;
}
