// The probe's part for attention: rig, checks against double precision, figures.
#pragma once

// Attention over a pool of some layers with sequences of given lengths.
struct Rig {
  int heads, kv_heads, dim, bt, layers;
  struct Seq {
    int pos, n;
  };
  std::vector<Seq> seqs;
  std::vector<void *> owned;
  int rows = 0, blocks = 0;
  std::vector<xk_tile> tiles;
  std::vector<int32_t> tail, positions, tables, decode;
  element *pool, *qkv, *out;
  Attention a = {};
  Pool p = {};
  Prefill f = {};
  CUtensorMap kv_map, q_map, heads_map;
  Plan plan;
  int64_t layer_elements;

  Rig(int heads, int kv_heads, int dim, int bt, int layers, std::vector<Seq> list, bool poison) : heads(heads), kv_heads(kv_heads), dim(dim), bt(bt), layers(layers), seqs(list) {
    for (Seq s : seqs) blocks += div_up(s.pos + s.n, bt);
    blocks += 3;
    std::vector<int32_t> order(blocks);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), rng);
    layer_elements = int64_t(blocks) * 2 * kv_heads * bt * dim;
    pool = random_device<element>(layer_elements * layers);
    int next = 0;
    for (Seq s : seqs) {
      int table = int(tail.size()), length = s.pos + s.n, n = div_up(length, bt);
      for (int i = 0; i < n; i++) tail.push_back(order[next++]);
      for (int i = 0; i < s.n; i++) positions.push_back(s.pos + i), tables.push_back(table);
      if (s.n == 1) decode.push_back(rows);
      for (int i = 0; i < s.n; i += 128) tiles.push_back({rows + i, std::min(128, s.n - i), s.pos + i, table});
      if (poison && length % bt) // rows of the last block after the end
        for (int kv = 0; kv < 2 * kv_heads; kv++)
          for (int l = 0; l < layers; l++)
            MUST(cudaMemset(pool + l * layer_elements + (int64_t(tail.back()) * 2 * kv_heads + kv) * bt * dim + length % bt * dim, 0xff, (bt - length % bt) * dim * 2));
      rows += s.n;
    }
    if (poison)
      for (int i = next; i < blocks; i++)
        for (int l = 0; l < layers; l++) MUST(cudaMemset(pool + l * layer_elements + int64_t(order[i]) * 2 * kv_heads * bt * dim, 0xff, int64_t(2) * kv_heads * bt * dim * 2));
    std::stable_sort(tiles.begin(), tiles.end(), [](const xk_tile &x, const xk_tile &y) { return x.pos + x.n > y.pos + y.n; });
    int width = (heads + 2 * kv_heads) * dim;
    qkv = random_device<element>(int64_t(rows) * width);
    out = device<element>(int64_t(rows + 2) * heads * dim);
    MUST(cudaMemset(out, 0xff, int64_t(rows + 2) * heads * dim * 2));
    a.qkv = qkv, a.out = out + heads * dim, a.heads = heads, a.scale = 1 / std::sqrt(float(dim));
    a.positions = keep(upload(positions)), a.tables = keep(upload(tables)), a.tail = keep(upload(tail));
    a.partial = keep(device<float>(std::max(int64_t(2) * xk_more_spans(sms, kv_heads) * heads, xk_attn_partial_rows(sms, kv_heads)) * (dim + XK_STATS)));
    a.tickets = keep(upload(std::vector<unsigned>(rows * kv_heads)));
    p.kv_heads = kv_heads, p.head_dim = dim, p.bt = FastDiv(bt);
    f.tiles = keep(upload(tiles)), f.n_tiles = int(tiles.size()), f.longest = tiles[0].pos + tiles[0].n;
    f.work = keep(upload(std::vector<unsigned>(2))), f.sms = sms;
    f.total_rows = int(layer_elements * layers / dim);
    if (bt % 16 == 0) {
      MUST(xk_kv_map(&kv_map, pool, f.total_rows, dim));
      MUST(xk_q_map(&q_map, qkv, rows, width));
      MUST(xk_heads_map(&heads_map, qkv, rows, heads, kv_heads, dim));
      f.kv_map = &kv_map, f.q_map = &q_map, f.heads_map = &heads_map;
    }
    owned.insert(owned.end(), {pool, qkv, out});
    at(0);
  }
  // Spans of the rows that decode, of so many positions or, if 0, as a step has them, and padding.
  struct Spans {
    xk_span *at;
    int n;
  };
  Spans cut(int length = 0) {
    if (!length) length = xk_span_length(positions.data(), decode.data(), int(decode.size()), sms, kv_heads);
    std::vector<xk_span> spans;
    int most = 3; // padding
    for (int row : decode) most += div_up(positions[row] + 1, 64);
    spans.resize(most);
    for (xk_span &s : spans) s.row = -1;
    const int used = xk_attn_spans(spans.data(), positions.data(), tables.data(), decode.data(), int(decode.size()), length);
    int64_t partial = 0;
    for (int i = 0; i < used; i++) partial = std::max(partial, int64_t(spans[i].partial) + spans[i].splits);
    a.partial = keep(device<float>(std::max(partial * a.heads, xk_attn_partial_rows(sms, kv_heads)) * (dim + XK_STATS)));
    return {keep(upload(spans)), used + 3};
  }
  template <typename T> T *keep(T *p) {
    owned.push_back(const_cast<std::remove_const_t<T> *>(p));
    return p;
  }
  // Has prefill attention done in the plan's parts.
  void use() {
    f.parts = keep(upload(plan.parts)), f.merges = keep(upload(plan.merges));
    f.n_parts = int(plan.parts.size()), f.n_merges = int(plan.merges.size());
  }
  bool planned(bool split) {
    bool better = xk_attn_plan(&plan, tiles.data(), int(tiles.size()), heads, kv_heads, dim, sms, split);
    if (better) use();
    return better;
  }
  // All in parts of at most per tiles of K, shuffled, while there are slots.
  void parts_of(int per) {
    const int most = int(xk_attn_partial_rows(sms, kv_heads) / kv_heads / XK_TILE), take = XK_TILE / (heads / kv_heads);
    int slot = 0;
    plan = {};
    for (const xk_tile &t : tiles)
      for (int i = 0; i < t.n; i += take) {
        int n = std::min(take, t.n - i), k = div_up(t.pos + i + n, xk_attn_step(dim)), count = std::min(32, div_up(k, per));
        if (count > 1 && slot + count > most) count = 1;
        for (int j = 0; j < count; j++) plan.parts.push_back({t.row + i, n, t.pos + i, t.table, k * j / count, k * (j + 1) / count - 1, count > 1 ? slot + j : -1, 0});
        if (count > 1) plan.merges.push_back({t.row + i, n, slot, count}), slot += count;
      }
    std::shuffle(plan.parts.begin(), plan.parts.end(), rng);
    use();
  }
  void at(int layer) { p.data = pool + layer * layer_elements, f.first_row = int(layer * layer_elements / dim); }
  ~Rig() {
    for (void *p : owned) cudaFree(p);
  }
};

// One CTA a (row, head), in double precision.
template <typename T> static __global__ void reference_kernel(Attention a, Pool p, float *out) {
  extern __shared__ double score[];
  __shared__ double sums[128];
  int row = blockIdx.x, head = blockIdx.y, dim = p.head_dim, length = a.positions[row] + 1, kv_head = head / (a.heads / p.kv_heads);
  const int32_t *table = a.tail + a.tables[row];
  const element *q = a.qkv + int64_t(row) * (a.heads + 2 * p.kv_heads) * dim + head * dim;
  double most = -1e300;
  for (int t = threadIdx.x; t < length; t += 128) {
    const element *k = p.data + p.at(table, 0, kv_head, t);
    double s = 0;
    for (int d = 0; d < dim; d++) s += double(widen<T>(q[d])) * double(widen<T>(k[d]));
    score[t] = s * a.scale;
    most = fmax(most, score[t]);
  }
  sums[threadIdx.x] = most;
  __syncthreads();
  for (int i = 0; i < 128; i++) most = fmax(most, sums[i]);
  __syncthreads();
  double sum = 0;
  for (int t = threadIdx.x; t < length; t += 128) sum += score[t] = exp(score[t] - most);
  sums[threadIdx.x] = sum;
  __syncthreads();
  sum = 0;
  for (int i = 0; i < 128; i++) sum += sums[i];
  for (int d = threadIdx.x; d < dim; d += 128) {
    double v = 0;
    for (int t = 0; t < length; t++) v += score[t] * double(widen<T>(p.data[p.at(table, 1, kv_head, t) + d]));
    out[(int64_t(row) * a.heads + head) * dim + d] = float(v / sum);
  }
}

static std::vector<float> reference(Rig &r) {
  int64_t n = int64_t(r.rows) * r.heads * r.dim;
  float *d = device<float>(n);
  MUST(xk_each_type(type, [&](auto t) { return reference_kernel<decltype(t)><<<dim3(r.rows, r.heads), 128, 8 * (r.f.longest + 1)>>>(r.a, r.p, d), 0; }));
  MUST(cudaDeviceSynchronize());
  std::vector<float> v(n);
  MUST(cudaMemcpy(v.data(), d, n * 4, cudaMemcpyDeviceToHost));
  MUST(cudaFree(d));
  return v;
}

static std::vector<uint16_t> read_out(Rig &r) {
  std::vector<uint16_t> v(int64_t(r.rows + 2) * r.heads * r.dim);
  MUST(cudaDeviceSynchronize());
  MUST(cudaMemcpy(v.data(), r.out, v.size() * 2, cudaMemcpyDeviceToHost));
  return v;
}

// want is rounded to bf16 once at best: relative 2-norm 0.17 %. P in bf16 adds
// about as much. fp16 rounds three bits later.
static void compare(const char *name, Rig &r, const std::vector<float> &want, const std::function<void()> &run) {
  int64_t row = int64_t(r.heads) * r.dim;
  MUST(cudaMemset(r.out, 0xff, (r.rows + 2) * row * 2));
  run();
  std::vector<uint16_t> got = read_out(r), again;
  run();
  again = read_out(r);
  double error = 0, norm = 0, worst = 0;
  for (size_t i = 0; i < want.size(); i++) {
    double d = as_float(got[i + row]) - want[i];
    error += d * d, norm += double(want[i]) * want[i], worst = std::isnan(d) ? 1e9 : std::max(worst, std::fabs(d));
  }
  double relative = std::sqrt(error / norm);
  bool canary = true;
  for (int64_t i = 0; i < row; i++) canary &= got[i] == 0xffff && got[got.size() - 1 - i] == 0xffff;
  bool ok = relative < 0.006 * finer() && worst < 0.05 * finer() && canary && got == again;
  failed |= !ok;
  if (!ok || getenv("VERBOSE"))
    printf("%s %s: heads %d/%d dim %d block %d, %zu sequences, longest %d: relative %.5f, worst %.5f, canaries %s, runs %s\n", ok ? "ok" : "FAILED", name, r.heads, r.kv_heads, r.dim, r.bt,
           r.seqs.size(), r.f.longest, relative, worst, canary ? "whole" : "broken", got == again ? "equal" : "differ");
}

// The bits of one run of each; false where they differ.
static bool same_bits(Rig &r, const std::function<void()> &run, const std::vector<uint16_t> &want) {
  MUST(cudaMemset(r.out, 0xff, (r.rows + 2) * int64_t(r.heads) * r.dim * 2));
  run();
  return read_out(r) == want;
}

static void check_prefill(const std::vector<Rig::Seq> &seqs, int heads, int kv, int dim, int bt) {
  Launch l = {stream, false, type};
  Rig r(heads, kv, dim, bt, 2, seqs, true);
  r.at(1);
  std::vector<float> want = reference(r);
  auto prefill = [&] { MUST(xk_attn_prefill(l, r.a, r.p, r.f)); };
  if (xk_attn_hopper_takes(r.p, r.f)) {
    compare("prefill", r, want, prefill);
    std::vector<uint16_t> bits = read_out(r);
    r.parts_of(1 << 20);
    if (!same_bits(r, prefill, bits)) failed = true, printf("FAILED: heads %d/%d dim %d block %d: packed tiles have other bits\n", heads, kv, dim, bt);
    for (int per : {1, 3}) {
      r.parts_of(per);
      compare("prefill in parts", r, want, prefill);
    }
    if (r.planned(true)) compare("prefill as planned", r, want, prefill);
    if (r.decode.size() == r.seqs.size()) {
      int32_t *list = r.keep(upload(r.decode));
      auto decode = [&] { MUST(xk_attn_decode_hopper(l, r.a, r.p, r.f, list, r.rows)); };
      if (!same_bits(r, decode, bits)) failed = true, printf("FAILED: heads %d/%d dim %d block %d: decoding has other bits\n", heads, kv, dim, bt);
    }
    r.f.n_parts = r.f.n_merges = 0;
  }
  r.f.kv_map = nullptr;
  compare("prefill mma", r, want, prefill);
  if (bt == 16) compare("any", r, want, [&] { MUST(xk_attn_any(l, r.a, r.p, r.rows)); });
}

static void check(const std::string &how) {
  bool quick = how != "", few = how == "few";
  Launch l = {stream, false, type};
  int n = 0;
  const std::vector<std::pair<int, int>> groups = {{4, 4}, {8, 2}, {7, 1}};
  std::vector<std::vector<Rig::Seq>> prefills = {{{0, 2}}, {{0, 128}}, {{0, 129}}, {{5, 1}, {300, 1}, {127, 1}}, {{0, 127}, {5, 3}, {300, 2}}, {{37, 255}, {0, 16}, {1, 15}, {112, 17}}, {{1000, 300}, {0, 700}, {127, 130}, {128, 128}}};
  if (!quick) prefills.push_back({{0, 2500}}), prefills.push_back({{3001, 257}, {2, 2}, {0, 131}}), prefills.push_back({{4087, 16}}), prefills.push_back({{3000, 97}, {17, 3}});
  for (auto &seqs : prefills)
    for (int dim : XK_DIMS)
      for (auto [heads, kv] : groups)
        for (int bt : {16, 48, 256, 7, 1}) {
          if (few && (bt > 16 || heads != 8 || seqs.back().n > 200)) continue;
          if ((dim % 64 || seqs[0].pos + seqs[0].n > 2000) && bt != 16 && bt != 7) continue;
          if (!mine()) continue;
          check_prefill(seqs, heads, kv, dim, bt);
          n++;
        }
  if (!few) check_prefill({{777, 31}, {3, 5}}, 32, 2, 128, 16), check_prefill({{777, 31}, {3, 5}}, 13, 1, 80, 32), n += 2;
  std::vector<std::vector<Rig::Seq>> decodes = {{{0, 1}}, {{15, 1}, {16, 1}, {17, 1}, {0, 1}}, {{2047, 1}, {130, 1}, {64, 1}}, {{3000, 1}}};
  for (auto &seqs : decodes)
    for (int dim : XK_DIMS)
      for (auto [heads, kv] : {std::pair{4, 4}, {8, 2}, {7, 1}, {32, 2}})
        for (int bt : {16, 256, 7, 1}) {
          if (few && (bt > 16 || heads != 8)) continue;
          if (dim % 64 && bt > 16) continue;
          if (!mine()) continue;
          Rig r(heads, kv, dim, bt, 2, seqs, true);
          r.at(1);
          std::vector<float> want = reference(r);
          for (int length : {0, 192, 1 << 20}) {
            const Rig::Spans s = r.cut(length);
            compare("decode", r, want, [&] { MUST(xk_attn_decode(l, r.a, r.p, s.at, s.n)); });
          }
          n++;
        }
  printf("%s: %d attention cases\n", failed ? "FAILED" : "PASS", n);
}

static void bench_prefill(const char *which) {
  struct { const char *name; int length; } list[] = {{"2k", 2048}, {"8k", 8192}, {"32k", 32768}};
  for (auto &c : list) {
    if (*which && strcmp(which, c.name)) continue;
    Rig r(32, 8, 128, 16, 1, {{0, c.length}}, false);
    Launch l = {stream, false, type};
    double flops = 2.0 * c.length * c.length * 128 * 32;
    Time t = timed(c.length > 8192 ? 1 : 10, 15, [&](int) { MUST(xk_attn_prefill(l, r.a, r.p, r.f)); });
    rate((std::string("gpu.attn_prefill_tflops.") + c.name).c_str(), "TFLOP/s", flops / 1e6, t);
  }
  if (!*which) { // the last 2k chunk of a long prompt
    Rig r(32, 8, 128, 16, 1, {{30720, 2048}}, false);
    Launch l = {stream, false, type};
    Time t = timed(4, 15, [&](int) { MUST(xk_attn_prefill(l, r.a, r.p, r.f)); });
    rate("attn_prefill_tflops.chunk_at_30k", "TFLOP/s", 4.0 * (30720 + 1024.5) * 2048 * 128 * 32 / 1e6, t);
  }
}

static void bench_decode(const std::string &only) {
  struct { const char *name; int batch, length; } list[] = {{"b64_l4k", 64, 4096}, {"b64_l1k", 64, 1024}, {"b256_l1k", 256, 1024}, {"b1_l8k", 1, 8192}};
  for (auto &c : list) {
    if (only == "b1" && c.batch != 1) continue;
    double bytes = double(c.batch) * c.length * 2 * 8 * 128 * 2;
    int layers = std::max(1, int(600e6 / bytes)); // rotate out of L2
    Rig r(32, 8, 128, 16, layers, std::vector<Rig::Seq>(c.batch, Rig::Seq{c.length - 1, 1}), false);
    const Rig::Spans s = r.cut();
    Launch l = {stream, true, type}; // as in a step
    Time t = timed(std::max(4, layers), 20, [&](int i) {
      r.at(i % layers);
      MUST(xk_attn_decode(l, r.a, r.p, s.at, s.n));
    });
    if (c.batch == 1) result("gpu.attn_decode_us.b1_l8k", "us", t.median, t.least, t.most, t.runs);
    else rate((std::string("gpu.attn_decode_gbs.") + c.name).c_str(), "TB/s", bytes / 1e6, t);
  }
}

// Sequences of unequal lengths, as conversations have them (700 to 7,000 positions, for
// 3,850), beside as many positions in equal ones: as a step cuts them, by spans of parts of a
// multiprocessor's share, and whole.
static void bench_lengths() {
  struct { int n, mean; } list[] = {{1, 8192}, {8, 1024}, {4, 3850}, {8, 3850}, {16, 3850}, {24, 3850}, {48, 3850}, {96, 3850}, {192, 3850}};
  for (auto &c : list) {
    std::vector<Rig::Seq> unequal, equal(c.n, Rig::Seq{c.mean - 1, 1});
    for (int i = 0; i < c.n; i++) unequal.push_back({int(c.mean * (0.18 + (i * 37 % c.n + 0.5) * 1.64 / c.n)) - 1, 1});
    const double bytes = double(c.n) * c.mean * 2 * 8 * 128 * 2;
    const int layers = std::max(1, int(600e6 / bytes));
    for (auto &[what, seqs] : {std::pair("unequal", unequal), std::pair("equal", equal)}) {
      Rig r(32, 8, 128, 16, layers, seqs, false);
      Launch l = {stream, true, type};
      printf("LENGTHS %3d x %4d positions, %-7s", c.n, c.mean, what);
      for (double share : {0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.4, 1e6}) {
        const Rig::Spans s = r.cut(int(round_up(int64_t(share * c.n * c.mean * 8 / sms), 64)));
        Time t = timed(std::max(4, layers), 9, [&](int i) {
          r.at(i % layers);
          MUST(xk_attn_decode(l, r.a, r.p, s.at, s.n));
        });
        printf(" %s%.1f: %d spans %.1f us, %.2f TB/s;", share ? "" : "rule ", share, s.n - 3, t.median, bytes / 1e6 / t.median);
      }
      printf("\n");
    }
  }
}

// Of other head_dims: 8k of prefill, and decoding 64 sequences of 4k.
static void bench_dims() {
  for (int dim : XK_DIMS) {
    if (dim == 128) continue; // measured above
    Launch l = {stream, true, type};
    char name[64];
    {
      Rig r(32, 8, dim, 16, 1, {{0, 8192}}, false);
      Time t = timed(4, 9, [&](int) { MUST(xk_attn_prefill(l, r.a, r.p, r.f)); });
      snprintf(name, sizeof name, "gpu.attn_prefill_tflops.8k_d%d", dim);
      rate(name, "TFLOP/s", 2.0 * 8192 * 8192 * dim * 32 / 1e6, t);
    }
    Rig r(32, 8, dim, 16, 1, std::vector<Rig::Seq>(64, Rig::Seq{4095, 1}), false);
    const Rig::Spans s = r.cut();
    Time t = timed(4, 9, [&](int) { MUST(xk_attn_decode(l, r.a, r.p, s.at, s.n)); });
    snprintf(name, sizeof name, "gpu.attn_decode_gbs.b64_l4k_d%d", dim);
    rate(name, "TB/s", 64.0 * 4096 * 2 * 8 * dim * 2 / 1e6, t);
  }
}

// Chunks after long prefixes, KV rotated out of L2; beside them without parts.
static void bench_hit() {
  for (auto &c : {std::pair{16, 8192}, {16, 32768}, {2, 8192}, {64, 8192}, {128, 8192}, {128, 32768}, {384, 8192}}) {
    const int tokens = c.first, length = c.second;
    int layers = std::max(2, int(600e6 / (double(length) * 4096)));
    Rig r(32, 8, 128, 16, layers, {{length - tokens, tokens}}, false);
    Launch l = {stream, true, type};
    auto measure = [&](const char *how) {
      char name[64];
      Time t = timed(layers, 15, [&](int i) {
        r.at(i % layers);
        MUST(xk_attn_prefill(l, r.a, r.p, r.f));
      });
      snprintf(name, sizeof name, "gpu.attn_hit_us.%d_at_%dk%s", tokens, length / 1024, how);
      result(name, "us", t.median, t.least, t.most, t.runs);
    };
    if (tokens <= 128) measure("_whole");
    if (!r.planned(true)) continue;
    printf("%d at %d: %d parts, %d merges, bytes alone %.1f us\n", tokens, length, r.f.n_parts, r.f.n_merges, length * 4096.0 / copy_rate);
    measure("");
  }
}
