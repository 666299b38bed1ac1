// Eight values of the residual stream at a time: what the norm, the embedding and the
// all-reduce share.
#pragma once

#include "common.cuh"

// Eight values of the residual stream: elements, or (beside fp16) fp32.
template <typename T> struct Eight {
  uint4 v;
  __device__ __forceinline__ void pairs(float2 (&f)[4]) const { f[0] = unpack<T>(v.x), f[1] = unpack<T>(v.y), f[2] = unpack<T>(v.z), f[3] = unpack<T>(v.w); }
};
template <> struct Eight<fp16> {
  float4 lo, hi;
  __device__ __forceinline__ void pairs(float2 (&f)[4]) const {
    f[0] = make_float2(lo.x, lo.y), f[1] = make_float2(lo.z, lo.w), f[2] = make_float2(hi.x, hi.y), f[3] = make_float2(hi.z, hi.w);
  }
};
// Of eight elements.
template <typename T> __device__ __forceinline__ Eight<T> eight(uint4 v) {
  if constexpr (std::is_same_v<residual<T>, element>) {
    return {v};
  } else {
    float2 a = unpack<T>(v.x), b = unpack<T>(v.y), c = unpack<T>(v.z), d = unpack<T>(v.w);
    return {make_float4(a.x, a.y, b.x, b.y), make_float4(c.x, c.y, d.x, d.y)};
  }
}

template <typename T> __device__ __forceinline__ float sum_squares(const Eight<T> &v) {
  float2 f[4];
  v.pairs(f);
  return f[0].x * f[0].x + f[0].y * f[0].y + f[1].x * f[1].x + f[1].y * f[1].y + f[2].x * f[2].x + f[2].y * f[2].y + f[3].x * f[3].x + f[3].y * f[3].y;
}
template <typename T> __device__ __forceinline__ Eight<T> rounded(const float2 (&f)[4]) {
  if constexpr (std::is_same_v<residual<T>, element>) return {make_uint4(pack<T>(f[0].x, f[0].y), pack<T>(f[1].x, f[1].y), pack<T>(f[2].x, f[2].y), pack<T>(f[3].x, f[3].y))};
  else return {make_float4(f[0].x, f[0].y, f[1].x, f[1].y), make_float4(f[2].x, f[2].y, f[3].x, f[3].y)};
}
