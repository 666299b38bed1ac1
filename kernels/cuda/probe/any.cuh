// Checks and times gemm_any.cu; included by probe.cu behind gemm.cuh.
#pragma once

// What batch_invariant promises: a row's bits are the same among 1 to 2048 rows and
// wherever it lies. And its first rows against double precision. Rows of x and w after
// the last are NaN; out lies between canaries of a row, and has eight columns more.
static void check_any(int n, int k, Epilogue e) {
  const int most = 2048, spare = 64, summed = 131, stride = int(round_up(n, 8)) + 8;
  const bool wide = e == STORE_F32 || (e == ADD && type == XK_F16); // out is fp32
  const size_t row = size_t(stride) * (wide ? 4 : 2);
  element *x = random_device<element>(size_t(most + spare) * k), *w = random_device<element>(size_t(n + spare) * k, 1 / std::sqrt(float(k)));
  MUST(cudaMemset(x + size_t(most) * k, 0xff, size_t(spare) * k * 2));
  MUST(cudaMemset(w + size_t(n) * k, 0xff, size_t(spare) * k * 2));
  float *d = device<float>(size_t(summed) * n);
  MUST(xk_each_type(type, [&](auto t) { return gemm_reference_kernel<decltype(t)><<<summed, 256>>>(x, w, d, n, k), 0; }));
  std::vector<float> sums(size_t(summed) * n);
  MUST(cudaDeviceSynchronize());
  MUST(cudaMemcpy(sums.data(), d, sums.size() * 4, cudaMemcpyDeviceToHost));
  uint8_t *old = wide ? reinterpret_cast<uint8_t *>(random_device<float>(size_t(most) * stride)) : reinterpret_cast<uint8_t *>(random_device<element>(size_t(most) * stride));
  uint8_t *base = device<uint8_t>((most + 2) * row), *out = base + row;
  // Rows from .. of x, written from out's first row on: what lies in all of base.
  auto run = [&](int from, int rows, bool pdl) {
    MUST(cudaMemset(base, 0xff, (most + 2) * row));
    MUST(cudaMemcpy(out, old + from * row, rows * row, cudaMemcpyDeviceToDevice));
    MUST(xk_gemm_any({stream, pdl, type}, e, w, x + size_t(from) * k, out, stride, rows, n, k));
    std::vector<uint8_t> v((rows + 2) * row);
    MUST(cudaDeviceSynchronize());
    MUST(cudaMemcpy(v.data(), base, v.size(), cudaMemcpyDeviceToHost));
    return v;
  };
  auto value = [&](const std::vector<uint8_t> &v, size_t at) {
    float f;
    uint16_t bits;
    if (wide) return memcpy(&f, &v[at * 4], 4), f;
    return memcpy(&bits, &v[at * 2], 2), as_float(bits);
  };
  const std::vector<uint8_t> all = run(0, most, false);
  std::vector<uint8_t> before(most * row);
  MUST(cudaMemcpy(before.data(), old, before.size(), cudaMemcpyDeviceToHost));
  double error = 0, norm = 0;
  bool whole = true, same = true;
  for (int r = 0; r < most; r++)
    for (int c = 0; c < stride; c++) {
      const size_t at = size_t(r + 1) * stride + c, was = size_t(r) * stride + c;
      if (c >= n) whole &= !memcmp(&all[at * (row / stride)], &before[was * (row / stride)], row / stride);
      else if (r < summed) {
        double want = sums[size_t(r) * n + c] + (e == ADD ? value(before, was) : 0), diff = value(all, at) - want;
        error += diff * diff, norm += want * want;
      }
    }
  for (int rows : {1, 2, 7, 16, 64, 65, 300, most})
    for (int from : {0, (most - rows) / 3 | 1, most - rows}) {
      if (from + rows > most) continue;
      const std::vector<uint8_t> got = run(from, rows, true);
      same &= !memcmp(&got[row], &all[(from + 1) * row], rows * row);
      for (size_t i = 0; i < row; i++) whole &= got[i] == 0xff && got[(rows + 1) * row + i] == 0xff;
    }
  double relative = std::sqrt(error / norm);
  const bool ok = relative < (wide ? 2e-4 : 0.0025 * finer()) && whole && same;
  failed |= !ok;
  if (!ok || getenv("VERBOSE"))
    printf("%s gemm_any: n %d, k %d, epilogue %d: relative %.7f, canaries %s, batches %s\n", ok ? "ok" : "FAILED", n, k, int(e), relative, whole ? "whole" : "broken", same ? "equal" : "differ");
  for (void *p : {(void *)x, (void *)w, (void *)d, (void *)old, (void *)base}) MUST(cudaFree(p));
}

static void check_anys(bool quick) {
  struct { int n, k; } list[] = {{1, 8}, {7, 72}, {64, 64}, {65, 328}, {777, 512}, {512, 4096}, {128, 1048}, {200, 14336}};
  MUST(xk_gemm_any_init(type));
  int cases = 0;
  for (auto &c : list)
    for (Epilogue e : {STORE, ADD, STORE_F32})
      if ((!quick || c.k <= 512) && mine()) check_any(c.n, c.k, e), cases++;
  printf("%s: %d cases of gemm_any\n", failed ? "FAILED" : "PASS", cases);
}

// Beside cuBLASLt's first heuristic, which for few rows and columns splits K.
static void bench_any() {
  struct { int n, k; } list[] = {{512, 4096}, {6144, 4096}, {4096, 14336}, {28672, 4096}};
  const int most = 2048, sets = 4;
  MUST(xk_gemm_any_init(type));
  Blas blas;
  element *x = random_device<element>(size_t(most) * 14336), *out = device<element>(size_t(most) * 28672);
  for (auto &c : list) {
    const size_t size = size_t(c.n) * c.k;
    element *w = random_device<element>(sets * size, 1 / std::sqrt(float(c.k)));
    for (int rows : {1, 64, most}) {
      Time own = timed(sets, 10, [&](int i) { MUST(xk_gemm_any({stream, false, type}, STORE, w + i % sets * size, x, out, c.n, rows, c.n, c.k)); });
      Time theirs = timed(sets, 10, [&](int i) { blas.run(w + i % sets * size, x, out, rows, c.n, c.k, 0); });
      printf("GEMM any rows %d, %d x %d: %.1f us, %.0f TFLOP/s; cuBLASLt %.1f us\n", rows, c.n, c.k, own.median, 2.0 * rows * size / own.median / 1e6, theirs.median);
    }
    MUST(cudaFree(w));
  }
  MUST(cudaFree(x));
  MUST(cudaFree(out));
}
