// FP8 pools: decode attention, widening and prefill over what was widened, against
// the same double-precision sum over exactly the values that the FP8 rows stand
// for; and their speed beside bf16's.
#pragma once

#include "../rows.cuh"

// Quantises a bf16 pool: each row by a power of two, times what makes rows differ
// by up to 2^16, so that both pools hold the same values exactly. Poison stays NaN.
static __global__ void quantise_kernel(Rows p, element *wide, int blocks) {
  const int64_t rows = int64_t(blocks) * 2 * p.kv_heads * p.bt.d;
  const int lane = threadIdx.x % 32;
  for (int64_t r = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / 32; r < rows; r += int64_t(gridDim.x) * blockDim.x / 32) {
    const int64_t in_block = int64_t(2) * p.kv_heads * p.bt.d, block = r / in_block, at = r % in_block;
    element *from = wide + r * p.row_bytes;
    uint8_t *to = p.data + block * p.run + at * p.row_bytes;
    const int by = -int(mix64(r) % 17);
    const bool value = at >= in_block / 2;
    const float scale = exp2f(value ? by - 6 : -7), factor = value ? exp2f(by) : 1; // |elements| stay below 448
    if (lane == 0) reinterpret_cast<float *>(p.data + block * p.run + p.rows_run())[at] = widen<bf16>(from[0]) == widen<bf16>(from[0]) ? scale : __int_as_float(0x7fffffff);
    for (int i = lane; i < p.row_bytes; i += 32) {
      float v = widen<bf16>(from[i]) * factor;
      uint8_t q = uint8_t(e4m3x2(v, v, scale));
      to[i] = q;
      from[i] = narrow<bf16>(widen2(q).x * scale);
    }
  }
}

static int64_t p_elements(const Rig &r) { return int64_t(2) * r.kv_heads * r.bt * r.dim; } // of a block

struct Rig8 {
  Rig &r;
  Rows p = {};
  uint8_t *data;
  Rig8(Rig &r) : r(r) {
    p.kv_heads = r.kv_heads, p.row_bytes = r.dim, p.scaled = true, p.bt = FastDiv(r.bt);
    p.run = p.rows_run() + int64_t(2) * r.kv_heads * r.bt * 4;
    data = device<uint8_t>(p.run * r.blocks * r.layers);
    for (int l = 0; l < r.layers; l++) {
      at(l);
      quantise_kernel<<<2048, 256>>>(p, r.pool + l * r.layer_elements, r.blocks);
    }
    MUST(cudaDeviceSynchronize());
  }
  void at(int layer) { r.at(layer), p.data = data + p.run * r.blocks * layer; }
  ~Rig8() { cudaFree(data); }
};

static void check8(bool quick) {
  Launch l = {stream, false, type};
  int n = 0;
  std::vector<std::vector<Rig::Seq>> cases = {{{0, 1}}, {{15, 1}, {16, 1}, {17, 1}, {0, 1}}, {{2047, 1}, {130, 1}, {64, 1}}, {{0, 129}, {5, 3}, {300, 2}}};
  if (!quick) cases.push_back({{5000, 1}, {1, 1}}), cases.push_back({{1000, 300}, {127, 130}, {0, 700}});
  for (auto &seqs : cases)
    for (int dim : {64, 128, 80, 256})
      for (auto [heads, kv] : {std::pair{4, 4}, {8, 2}, {7, 1}, {32, 2}})
        for (int bt : {16, 48, 256}) {
          const bool fast = xk_attn_decode8_takes(dim, heads / kv);
          if (!fast && (bt != 48 || seqs[0].n + seqs[0].pos > 500)) continue;
          if (!mine()) continue;
          Rig r(heads, kv, dim, bt, 2, seqs, true);
          Rig8 r8(r);
          r8.at(1);
          std::vector<float> want = reference(r);
          compare("any8", r, want, [&] { MUST(xk_attn_any8(l, r.a, r8.p, nullptr, r.rows)); });
          if (fast && int(r.decode.size()) == r.rows)
            for (int length : {0, 192, 1 << 20}) {
              const Rig::Spans s = r.cut(length);
              compare("decode8", r, want, [&] { MUST(xk_attn_decode8(l, r.a, r8.p, s.at, s.n, r.rows, sms)); });
            }
          if (fast && r.seqs[0].n > 1) { // prefill over widened blocks
            Widen w = {};
            for (auto &s : r.seqs) {
              int table = 0; // of the sequence, as Rig lays them
              for (int i = 0; i < w.n; i++) table += div_up(r.seqs[i].pos + r.seqs[i].n, bt);
              w.seq[w.n++] = {table, w.blocks};
              w.blocks += div_up(s.pos + s.n, bt);
            }
            element *wide = device<element>(w.blocks * p_elements(r));
            int32_t *tail = device<int32_t>(r.tail.size());
            MUST(cudaMemset(wide, 0xff, w.blocks * p_elements(r) * 2));
            Pool p = r.p;
            p.data = wide;
            Attention a = r.a;
            a.tail = tail;
            Prefill f = r.f;
            CUtensorMap map;
            f.total_rows = int(w.blocks * p_elements(r) / dim), f.first_row = 0;
            MUST(xk_kv_map(&map, wide, f.total_rows, dim));
            f.kv_map = &map;
            compare("prefill over widened blocks", r, want, [&] {
              MUST(xk_widen(l, r8.p, w, r.a.tail, wide, tail));
              MUST(xk_attn_prefill(l, a, p, f));
            });
            MUST(cudaFree(wide));
            MUST(cudaFree(tail));
          }
          n++;
        }
  printf("%s: %d attention cases of FP8\n", failed ? "FAILED" : "PASS", n);
}

static void bench8() {
  struct { const char *name; int batch, length; } list[] = {{"b64_l4k", 64, 4096}, {"b64_l1k", 64, 1024}, {"b256_l1k", 256, 1024}, {"b1_l8k", 1, 8192}};
  for (auto &c : list) {
    double bytes = double(c.batch) * c.length * 2 * 8 * (128 + 4);
    int layers = std::max(1, int(600e6 / bytes)); // rotate out of L2
    Rig r(32, 8, 128, 16, layers, std::vector<Rig::Seq>(c.batch, Rig::Seq{c.length - 1, 1}), false);
    Rig8 r8(r);
    const Rig::Spans s = r.cut();
    Launch l = {stream, true, type}; // as in a step
    Time t = timed(std::max(4, layers), 20, [&](int i) {
      r8.at(i % layers);
      MUST(xk_attn_decode8(l, r.a, r8.p, s.at, s.n, c.batch, sms));
    });
    rate((std::string("gpu.kv8_attn_decode_gbs.") + c.name).c_str(), "TB/s", bytes / 1e6, t);
    result((std::string("gpu.kv8_attn_decode_us.") + c.name).c_str(), "us", t.median, t.least, t.most, t.runs);
    Time b = timed(std::max(4, layers), 20, [&](int i) {
      r.at(i % layers);
      MUST(xk_attn_decode(l, r.a, r.p, s.at, s.n));
    });
    result((std::string("attn_decode_us.") + c.name).c_str(), "us", b.median, b.least, b.most, b.runs);
  }
  for (int length : {2048, 8192, 32768}) { // widening of all that a chunk attends to
    Rig r(32, 8, 128, 16, 2, {{length - 2048, 2048}}, false);
    Rig8 r8(r);
    Widen w = {};
    w.n = 1, w.blocks = length / 16;
    element *wide = device<element>(w.blocks * p_elements(r));
    int32_t *tail = device<int32_t>(r.tail.size());
    Launch l = {stream, true, type};
    Time t = timed(8, 20, [&](int i) {
      r8.at(i % 2);
      MUST(xk_widen(l, r8.p, w, r.a.tail, wide, tail));
    });
    Time b = timed(4, 10, [&](int) { MUST(xk_attn_prefill(l, r.a, r.p, r.f)); });
    result(("kv8_widen_us." + std::to_string(length)).c_str(), "us", t.median, t.least, t.most, t.runs);
    result(("attn_prefill_chunk_us." + std::to_string(length)).c_str(), "us", b.median, b.least, b.most, b.runs);
    MUST(cudaFree(wide));
    MUST(cudaFree(tail));
  }
  { // append, as the probe's own measure of the bf16 one
    const int rows = 8192, heads = 32, kv = 8, dim = 128;
    int64_t n = int64_t(rows) * (heads + 2 * kv) * dim;
    element *x = random_device<element>(2 * n);
    std::vector<xk_seg> segs;
    for (int i = 0; i < rows / 16; i++) segs.push_back({i * 16, 16, i * 397 % (rows / 16), 0, i * 16});
    xk_seg *d = upload(segs);
    float2 *table = reinterpret_cast<float2 *>(random_device<float>(size_t(rows) * dim));
    Rows p = {};
    p.kv_heads = kv, p.row_bytes = dim, p.scaled = true, p.bt = FastDiv(16);
    p.run = p.rows_run() + 2 * kv * 16 * 4;
    p.data = device<uint8_t>(p.run * (rows / 16)), p.digest = device<uint64_t>(rows / 16 * kv), p.filled = device<uint16_t>(rows / 16 * kv);
    MUST(cudaMemset(p.filled, 0, rows / 16 * kv * 2));
    Launch l = {stream, false, type};
    Time t = timed(4, 20, [&](int i) {
      Rope r = {x + i % 2 * n, nullptr, nullptr, nullptr, table, d, int(segs.size()), heads, 0, 1e-5f};
      MUST(xk_append8(l, r, p));
    });
    double bytes = 2.0 * n + 2.0 * int64_t(rows) * heads * dim + double(p.run) * rows / 16;
    result("gpu.kv8_append_pct", "% of copy bandwidth", 100 * bytes / copy_rate / t.median, 100 * bytes / copy_rate / t.most, 100 * bytes / copy_rate / t.least, t.runs);
    MUST(cudaFree(x)); MUST(cudaFree(p.data)); MUST(cudaFree(table)); MUST(cudaFree(d)); MUST(cudaFree(p.digest)); MUST(cudaFree(p.filled));
  }
}
