// moves arrive: blocks that arrive layer by layer from records as engine/tier lays
// them out, verified where they land, beside the same blocks moved all layers of one
// after another, and the copy engine. Rows are zeros with right digests.
#pragma once

#include <fstream>
#include <thread>

#include "moves.cuh"

struct ArriveRig {
  static constexpr int LAYERS = 32, HEADS = 8, BT = 16;
  static constexpr int64_t RUN = int64_t(4096) * BT, DIGESTS = LAYERS * RUN, UNIT = DIGESTS + 4096;
  xk_ctx *c;
  uint8_t *mem;
  xk_region *region;
  int64_t first; // of the rows, in a record

  static uint64_t mix(uint64_t z) {
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
  }
  // Memory with huge pages, or expressly without.
  ArriveRig(xk_ctx *c, int units, bool huge, int64_t first) : c(c), first(first) {
    const int64_t size = (units * UNIT + 2 * MIB - 1) & ~(2 * MIB - 1);
    mem = static_cast<uint8_t *>(mmap(nullptr, size + 2 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    mem = reinterpret_cast<uint8_t *>((reinterpret_cast<uintptr_t>(mem) + 2 * MIB - 1) & ~uintptr_t(2 * MIB - 1));
    madvise(mem, size, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    std::vector<uint64_t> sums(LAYERS * HEADS); // all units are the first of their prompts
    uint64_t zeros = 0;
    for (int i = 0; i < 32; i++) {
      uint64_t k = mix(0x9e3779b97f4a7c15ull * uint64_t(i + 1));
      zeros += uint64_t(uint32_t(k)) * uint64_t(uint32_t(k >> 32));
    }
    for (uint64_t l = 0; l < LAYERS; l++)
      for (uint64_t h = 0; h < HEADS; h++)
        for (uint64_t kv = 0; kv < 2; kv++)
          for (uint64_t pos = 0; pos < BT; pos++) sums[l * HEADS + h] += mix(zeros ^ mix(0xd1b54a32d192ed03ull + (pos | h << 32 | kv << 47 | l << 48)));
    std::vector<std::thread> all;
    for (int k = 0; k < 8; k++)
      all.emplace_back([&, k] {
        for (int64_t u = k; u < units; u += 8) {
          memset(mem + u * UNIT, 0, UNIT);
          memcpy(mem + u * UNIT + first + DIGESTS, sums.data(), sums.size() * 8);
        }
      });
    for (std::thread &t : all) t.join();
    MUST(xk_host_register(c, mem, size, &region));
  }
  ~ArriveRig() { MUST(xk_host_release(region)); }

  std::vector<xk_place> places(int units, int blocks, int n) {
    std::vector<int> a(blocks), b(units);
    std::iota(a.begin(), a.end(), 0), std::iota(b.begin(), b.end(), 0);
    std::shuffle(a.begin(), a.end(), rng), std::shuffle(b.begin(), b.end(), rng);
    std::vector<xk_place> p(n);
    for (int i = 0; i < n; i++) p[i] = {a[i], BT, b[i] * UNIT + first, b[i] * UNIT + first + DIGESTS};
    return p;
  }
  xk_move_args args(int n, int ctas) {
    xk_move_args a = {};
    a.n_layers = LAYERS, a.n_places = n, a.engine = XK_KERNEL, a.ctas = ctas, a.layer_stride = RUN, a.digest_stride = HEADS * 8;
    return a;
  }
  double move(const std::vector<xk_place> &p, int ctas) {
    xk_move_args a = args(int(p.size()), ctas);
    xk_mark *m;
    Clock t = now();
    MUST(xk_move(c, region, &a, p.data(), &m));
    MUST(xk_wait(m, 10000000000));
    double took = double(now() - t);
    MUST(xk_mark_free(m));
    return double(p.size() * DIGESTS) / took;
  }
  // called, first: us until the call returned, and until the first layer was verified.
  double arrive(const std::vector<xk_place> &p, int ctas, double *called, double *first) {
    xk_move_args a = args(int(p.size()), ctas);
    std::vector<int32_t> pos(p.size());
    std::vector<uint8_t> bad(p.size());
    xk_arrival *v;
    Clock t = now();
    MUST(xk_arrive(c, region, &a, p.data(), pos.data(), &v));
    *called = double(now() - t) / 1000, *first = 0;
    for (int32_t layers = 0; layers < LAYERS;) {
      MUST(xk_arrived(v, &layers));
      if (layers && !*first) *first = double(now() - t) / 1000;
      if (now() - t > 10000000000) {
        fprintf(stderr, "%d layers after 10 s\n", layers);
        exit(1);
      }
    }
    double took = double(now() - t);
    MUST(xk_arrival_bad(v, bad.data()));
    MUST(xk_arrival_free(v));
    if (std::count(bad.begin(), bad.end(), 0) != int64_t(p.size())) {
      fprintf(stderr, "%zu blocks arrived, not all are right\n", p.size());
      exit(1);
    }
    return double(p.size() * DIGESTS) / took;
  }
};

static void say(const char *what, const std::string &path, const char *key) {
  std::ifstream f(path);
  for (std::string line; std::getline(f, line);)
    if (line.find(key) != std::string::npos) printf("%s %s\n", what, line.c_str());
}

static void arrive_bench() {
  cudaDeviceProp prop;
  MUST(cudaGetDeviceProperties(&prop, 0));
  char bus[32];
  MUST(cudaDeviceGetPCIBusId(bus, sizeof bus, 0));
  for (char *b = bus; *b; b++) *b = char(tolower(*b));
  printf("DEVICE %s\n", prop.name);
  say("NUMA node of the device", std::string("/sys/bus/pci/devices/") + bus + "/numa_node", "");
  say("NUMA nodes online", "/sys/devices/system/node/online", "");
  say("huge pages", "/sys/kernel/mm/transparent_hugepage/enabled", "");
  say("huge pages, effort", "/sys/kernel/mm/transparent_hugepage/defrag", "");
  say("this process", "/proc/self/status", "Cpus_allowed_list");
  say("this process", "/proc/self/status", "Mems_allowed_list");
  constexpr int FEW = 512, MANY = 2048; // 8k and 32k tokens
  xk_ctx *c = pool(0, ArriveRig::LAYERS, ArriveRig::HEADS, ArriveRig::BT, MANY);
  void *device;
  MUST(cudaMalloc(&device, 512 * MIB));
  auto all = [&](const std::string &name, ArriveRig &r, int units, int n, int ctas, int rounds) {
    std::vector<double> rate, called, first;
    for (int i = -1; i < rounds; i++) {
      double a, b, g = r.arrive(r.places(units, MANY, n), ctas, &a, &b);
      if (i >= 0) rate.push_back(g), called.push_back(a), first.push_back(b);
    }
    char note[96];
    snprintf(note, sizeof note, "called %.0f us, first layer %.0f us", stats(called).median, stats(first).median);
    print("RESULT", "kvio.arrive_gbs." + name, "GB/s", stats(rate), note);
  };
  auto moved = [&](const std::string &name, ArriveRig &r, int units, int n, int ctas) {
    std::vector<double> rate;
    for (int i = -1; i < 8; i++) {
      double g = r.move(r.places(units, MANY, n), ctas);
      if (i >= 0) rate.push_back(g);
    }
    print("PEER", "kvio.move_gbs." + name, "GB/s", stats(rate));
  };
  {
    ArriveRig r(c, MANY, true, 64);
    say("huge pages of this process", "/proc/self/smaps_rollup", "AnonHuge");
    std::vector<double> engine;
    for (int i = 0; i < 8; i++) {
      Clock t = now();
      MUST(cudaMemcpy(device, r.mem + i * 512 * MIB, 512 * MIB, cudaMemcpyHostToDevice));
      engine.push_back(double(512 * MIB) / double(now() - t));
    }
    print("PEER", "kvio.engine_gbs", "GB/s", stats(engine));
    for (int ctas : {1, 2, 4, 8}) all("8k.ctas" + std::to_string(ctas), r, MANY, FEW, ctas, 8);
    for (int ctas : {2, 4}) all("32k.ctas" + std::to_string(ctas), r, MANY, MANY, ctas, 4);
    moved("8k", r, MANY, FEW, 4), moved("32k", r, MANY, MANY, 4);
  }
  {
    ArriveRig r(c, FEW, true, 0); // rows at whole lines
    all("8k.aligned", r, FEW, FEW, 4, 8), moved("8k.aligned", r, FEW, FEW, 4);
  }
  {
    ArriveRig r(c, FEW, false, 64);
    all("8k.small_pages", r, FEW, FEW, 4, 8), moved("8k.small_pages", r, FEW, FEW, 4);
  }
  MUST(cudaFree(device));
  MUST(xk_close(c));
}
