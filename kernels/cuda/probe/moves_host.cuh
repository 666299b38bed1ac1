// moves host: blocks between one GPU and pinned host memory, beside the copy
// engine, one copy call a block, and batches of them.
#pragma once

#include <thread>

#include "moves.cuh"

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
    print("RESULT", "kvio.engine_d2h" + t, "GB/s", repeat(10, [&] { return gather(XK_COPY, 0); }));
    print("RESULT", "kvio.engine_h2d" + t, "GB/s", repeat(10, [&] { return scatter(XK_COPY, 0); }));
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
      std::thread other([&] { r.end(r.begin(true, p, out_engine, out_ctas)); }); // as who saves and who loads
      r.end(r.begin(false, q, in_engine, in_ctas));
      other.join();
      return 2 * double(r.bytes) / double(now() - t);
    };
    for (int k : {2, 4}) print("RESULT", "duplex.kernel" + std::to_string(k) + "_kernel" + std::to_string(k) + t, "GB/s", repeat(20, [&] { return duplex(XK_KERNEL, k, XK_KERNEL, k); }));
    print("RESULT", "duplex.engine_kernel4" + t, "GB/s", repeat(20, [&] { return duplex(XK_COPY, 0, XK_KERNEL, 4); }));
    print("RESULT", "duplex.kernel4_engine" + t, "GB/s", repeat(20, [&] { return duplex(XK_KERNEL, 4, XK_COPY, 0); }));
    print("RESULT", "duplex.engine_engine" + t, "GB/s", repeat(50, [&] { return duplex(XK_COPY, 0, XK_COPY, 0); }));
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
