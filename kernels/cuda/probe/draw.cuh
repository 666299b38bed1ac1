// The sampler, to the bit: masses as the device makes them, and all else in
// integers on the host, by sorting.
#pragma once

// exp((x - max) / T) in units of 2^-31, rounded down; 0 where x is no number.
static __global__ void mass_kernel(const float *x, uint32_t *mass, int n, float top, float inverse) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    float w;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(w) : "f"((x[i] - top) * inverse));
    mass[i] = x[i] == top ? 1u << 31 : !(x[i] <= top) || isinf(x[i]) ? 0 : uint32_t(double(w) * 2147483648.0);
  }
}

static double philox(const xk_sample &s) {
  uint32_t c[4] = {s.pos_lo, s.pos_hi, s.choice, 0}, k[2] = {s.seed_lo, s.seed_hi};
  for (int i = 0; i < 10; i++) {
    uint64_t a = uint64_t(c[0]) * 0xd2511f53u, b = uint64_t(c[2]) * 0xcd9e8d57u;
    uint32_t next[4] = {uint32_t(b >> 32) ^ c[1] ^ k[0], uint32_t(b), uint32_t(a >> 32) ^ c[3] ^ k[1], uint32_t(a)};
    memcpy(c, next, sizeof c);
    k[0] += 0x9e3779b9, k[1] += 0xbb67ae85;
  }
  return double((uint64_t(c[1]) << 32 | c[0]) >> 11) / 9007199254740992.0;
}

// Of one row: masses, and the ids that have one, by mass and then id.
struct Masses {
  std::vector<uint32_t> of;
  std::vector<int> order;
  explicit Masses(std::vector<uint32_t> masses) : of(std::move(masses)) {
    for (int i = 0; i < int(of.size()); i++)
      if (of[i]) order.push_back(i);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return of[a] > of[b]; });
  }
};
static int oracle_draw(const std::vector<float> &x, const Masses &m, const xk_sample &s) {
  const int n = int(x.size());
  int best = -1;
  for (int i = 0; i < n; i++)
    if (x[i] == x[i] && (best < 0 || x[i] > x[best])) best = i;
  if (best < 0) return 0;
  if (s.temperature == 0 || s.top_k == 1 || x[best] == -INFINITY) return best;
  size_t kept = m.order.size();
  if (s.top_k > 0 && s.top_k < n) kept = std::min<size_t>(kept, s.top_k);
  auto sum = [&] {
    uint64_t t = 0;
    for (size_t i = 0; i < kept; i++) t += m.of[m.order[i]];
    return t;
  };
  if (s.top_p < 1) {
    uint64_t need = std::max<uint64_t>(1, uint64_t(ceil(double(s.top_p) * double(sum())))), have = 0;
    size_t i = 0;
    while (i < kept && have < need) have += m.of[m.order[i++]];
    kept = i;
  }
  const uint32_t least = uint32_t(double(std::min(std::max(s.min_p, 0.0f), 1.0f)) * 2147483648.0);
  while (m.of[m.order[kept - 1]] < least) kept--;
  const uint64_t total = sum();
  uint64_t target = std::min(uint64_t(philox(s) * double(total)), total - 1);
  const int last = m.order[kept - 1];
  for (int i = 0; i < n; i++) {
    if (m.of[i] < m.of[last] || (m.of[i] == m.of[last] && i > last)) continue;
    if (target < m.of[i]) return i;
    target -= m.of[i];
  }
  return -1;
}

// Logits of several shapes, by name; "far" has its greatest ones where no sample looks.
static std::vector<float> draw_logits(const std::string &shape, int n) {
  std::normal_distribution<float> normal;
  std::vector<float> x(n);
  const float sd = shape == "peaked" ? 4 : shape == "narrow" ? 0.01f : 1;
  for (float &v : x) v = normal(rng) * sd;
  if (shape == "equal") std::fill(x.begin(), x.end(), 0.25f);
  if (shape == "steps")
    for (float &v : x) v = roundf(v * 2) / 2;
  if (shape == "bf16")
    for (float &v : x) v = __bfloat162float(__float2bfloat16(v * 4));
  if (shape == "lone") x[rng() % n] = 40;
  if (shape == "far") {
    std::vector<bool> sampled(n);
    for (int i = 0; i < 1024; i++) sampled[int64_t(i) * n / 1024] = true;
    for (int i = 0; i < n; i++)
      if (!sampled[i] && rng() % 2) x[i] += 30;
  }
  if (shape == "holes")
    for (float &v : x)
      if (rng() % 3 == 0) v = rng() % 2 ? NAN : -INFINITY;
  if (shape == "nan") std::fill(x.begin(), x.end(), NAN);
  if (shape == "never") std::fill(x.begin(), x.end(), -INFINITY);
  if (shape == "infinite")
    for (int i = 0; i < 5; i++) x[rng() % n] = INFINITY;
  if (shape == "large")
    for (float &v : x) v = v * 30 + 5000;
  return x;
}

// Rows of each shape and vocabulary under many parameters; of "quick" fewer. "few" is for
// racecheck, under which a draw takes tens of seconds: one of each kind, by one CTA and by two.
static void check_draws(const std::string &how) {
  const bool quick = how != "", few = how == "few";
  int cases = 0, wrong = 0;
  for (int vocab : {1, 5, 97, 512, 1023, 4099, 16385, 32003, 50000, 65540, 128256, 131072, 262147}) {
    if (quick && (vocab == 512 || vocab == 16385 || vocab == 50000 || vocab == 131072)) continue;
    if (few && vocab != 97 && vocab != 4099) continue;
    const int stride = int(round_up(vocab, 8));
    for (const char *shape : {"flat", "peaked", "narrow", "equal", "steps", "bf16", "lone", "far", "holes", "nan", "never", "infinite", "large"}) {
      if (few && !strchr("fes", *shape)) continue;
      if (!mine()) continue;
      const std::vector<float> x = draw_logits(shape, vocab);
      std::vector<float> rows(2 * stride, NAN);
      std::copy(x.begin(), x.end(), rows.begin());
      std::copy(x.begin(), x.end(), rows.begin() + stride);
      float *logits = upload(rows), top = -INFINITY;
      for (float v : x) top = v > top ? v : top;
      uint32_t *masses = device<uint32_t>(vocab);
      for (float temperature : {0.0f, 0.8f, 2.5f}) {
        std::vector<xk_sample> samples;
        for (int k : {0, 1, 7, 50, 3000})
          for (float p : {1.0f, 0.95f, 0.5f, 0.999f, 1e-6f})
            for (float least : {0.0f, 0.05f}) {
              if (few ? temperature > 1 || k != 50 || p != 0.95f || least == 0 : (temperature == 0 || quick) && rng() % 8) continue;
              xk_sample s = {};
              s.final = int(samples.size()) % 2, s.out = int(samples.size()), s.temperature = temperature, s.top_k = k, s.top_p = p, s.min_p = least, s.repetition = 1;
              s.seed_lo = uint32_t(rng()), s.pos_lo = uint32_t(rng() % 1000), s.choice = 3;
              samples.push_back(s);
            }
        const int n = int(samples.size());
        if (n == 0) continue;
        std::vector<uint32_t> mass(vocab);
        if (temperature > 0) {
          mass_kernel<<<256, 256>>>(logits, masses, vocab, top, 1.4426950408889634f / temperature);
          MUST(cudaMemcpy(mass.data(), masses, vocab * 4, cudaMemcpyDeviceToHost));
        }
        const Masses m(std::move(mass));
        std::vector<int> wants;
        for (auto &s : samples) wants.push_back(oracle_draw(x, m, s));
        xk_sample *d = upload(samples);
        int32_t *tokens = device<int32_t>(2 * n);
        float *scratch = device<float>(size_t(n) * stride);
        for (int batch : {n, 3, 1}) { // other clusters
          if (batch < n && (few || (batch == 1 && (quick || vocab < 5000)))) continue;
          MUST(cudaMemset(tokens, 0xff, 8 * n));
          for (int at = 0; at < n; at += batch) {
            Sampling s = {logits, scratch, sms, vocab, stride, 0, d + at, nullptr, std::min(batch, n - at), tokens, tokens + n + at};
            MUST(xk_draw({stream, at % 2 == 1, type}, s));
          }
          MUST(cudaStreamSynchronize(stream));
          std::vector<int32_t> got(2 * n);
          MUST(cudaMemcpy(got.data(), tokens, 8 * n, cudaMemcpyDeviceToHost));
          for (int i = 0; i < n; i++, cases++) {
            const bool none = !strcmp(shape, "nan"); // the host is told, the next step gets a token that there is
            if (got[i] == (none ? -1 : wants[i]) && got[n + i] == (none ? 0 : wants[i])) continue;
            failed = true;
            if (wrong++ < 20)
              printf("FAILED draw: vocabulary %d, %s, temperature %g, top_k %d, top_p %g, min_p %g, %d at once: %d (%d), want %d\n", vocab, shape, temperature, samples[i].top_k, samples[i].top_p,
                     samples[i].min_p, batch, got[i], got[n + i], wants[i]);
          }
        }
        MUST(cudaFree(d)); MUST(cudaFree(tokens)); MUST(cudaFree(scratch));
      }
      MUST(cudaFree(logits)); MUST(cudaFree(masses));
      if (getenv("VERBOSE")) printf("draw: vocabulary %d, %s\n", vocab, shape), fflush(stdout);
    }
  }
  printf("%s: %d draws\n", wrong ? "FAILED" : "PASS", cases);
}
