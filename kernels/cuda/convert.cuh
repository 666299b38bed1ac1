// Eight elements of a KV row in each form that pools have, widened to fp32 and
// rounded back. To the bit, NaNs too, what kvconn/convert makes of them on a host:
// so nothing here is left to instructions that make every NaN the same one, or that
// stop at a greatest value where there is infinity.
#pragma once

#include "rows.cuh"

__device__ __forceinline__ bool is_nan(float v) { return (__float_as_uint(v) & 0x7fffffff) > 0x7f800000; }

// Rows of bf16 and of fp16.
template <typename T> struct Half {
  using Eight = uint4;
  static constexpr bool SCALED = false;

  static __device__ float wide(uint32_t h) {
    if constexpr (std::is_same_v<T, bf16>) return __uint_as_float(h << 16);
    if ((h & 0x7fff) > 0x7c00) return __uint_as_float((h & 0x8000) << 16 | 0x7f800000 | (h & 0x3ff) << 13);
    return __half2float(__ushort_as_half(uint16_t(h)));
  }
  // To nearest even; beyond the greatest value lies infinity.
  static __device__ uint32_t narrow(float v) {
    const uint32_t b = __float_as_uint(v);
    if constexpr (std::is_same_v<T, bf16>) return is_nan(v) ? b >> 16 | 0x40 : (b + 0x7fff + (b >> 16 & 1)) >> 16;
    if (is_nan(v)) return (b >> 16 & 0x8000) | 0x7e00 | (b >> 13 & 0x3ff);
    return __half_as_ushort(__float2half_rn(v));
  }

  static __device__ void widen(const Eight &e, float, float v[8]) {
    const uint32_t w[4] = {e.x, e.y, e.z, e.w};
#pragma unroll
    for (int i = 0; i < 4; i++) v[2 * i] = wide(w[i] & 0xffff), v[2 * i + 1] = wide(w[i] >> 16);
  }
  static __device__ Eight round(const float v[8], float) {
    auto two = [&](int i) { return narrow(v[i]) | narrow(v[i + 1]) << 16; };
    return make_uint4(two(0), two(2), two(4), two(6));
  }
  // The part of the row's hash that is of a lane's elements.
  struct Keys {
    uint64_t k[2];
    __device__ explicit Keys(int lane) : k{lane_key(2 * lane), lane_key(2 * lane + 1)} {}
    __device__ uint64_t hash(const Eight &e) const { return lane_hash(e.x, e.y, k[0]) + lane_hash(e.z, e.w, k[1]); }
  };
};

// Rows of E4M3 with a scale each.
struct Scaled {
  using Eight = uint2;
  static constexpr bool SCALED = true;

  static __device__ void widen(const Eight &e, float scale, float v[8]) {
    const uint32_t w[2] = {e.x, e.y};
    auto times = [&](float f, uint32_t q) { return (q & 0x7f) == 0x7f ? __uint_as_float((q & 0x80) << 24 | 0x7fc00000) : __fmul_rn(f, scale); };
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t two = w[i / 2] >> 16 * (i % 2) & 0xffff;
      const float2 f = widen2(uint16_t(two));
      v[2 * i] = times(f.x, two & 0xff), v[2 * i + 1] = times(f.y, two >> 8);
    }
  }
  static __device__ Eight round(const float v[8], float scale) {
    auto two = [&](int i) {
      const auto infinite = [&](float f) { return finite_magnitude(f) != fabsf(f); }; // or NaN
      const auto sign = [&](float f) { return __float_as_uint(f) >> 24 & 0x80; };
      uint32_t q = e4m3x2(v[i], v[i + 1], scale);
      if (infinite(v[i])) q = (q & 0xff00) | 0x7f | sign(v[i]);
      if (infinite(v[i + 1])) q = (q & 0xff) | (0x7f | sign(v[i + 1])) << 8;
      return q;
    };
    return make_uint2(two(0) | two(2) << 16, two(4) | two(6) << 16);
  }
  struct Keys {
    uint64_t k;
    __device__ explicit Keys(int lane) : k(lane_key(lane)) {}
    __device__ uint64_t hash(const Eight &e) const { return lane_hash(e.x, e.y, k); }
  };
};
