// What every kernel here uses: the instructions of ptx.cuh, loads of floats, sums over a warp.
// No CUDA header is included: NVRTC then needs no toolkit, and a kernel compiles in a tenth of a second.
#pragma once
#include "ptx.cuh"

__device__ __forceinline__ float loadf(const float* p) { return __uint_as_float(load4(p)); }
__device__ __forceinline__ float4 loadf4(const void* p) {
  uint4 v = load16(p); return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}
__device__ __forceinline__ float2 half2_float2(u32 h) { return make_float2(half_float(h & 0xffff), half_float(h >> 16)); }

template <int WIDTH = 32, class T> __device__ __forceinline__ T warp_sum(T v) {
#pragma unroll
  for (int o = WIDTH / 2; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  return v;
}
template <int WIDTH = 32> __device__ __forceinline__ float warp_max(float v) {
#pragma unroll
  for (int o = WIDTH / 2; o; o >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, o));
  return v;
}

template <int WIDTH = 32> __device__ __forceinline__ float warp_max_nan(float v) {      // not a number, if one of them is
#pragma unroll
  for (int o = WIDTH / 2; o; o >>= 1) v = max_nan(v, __shfl_xor_sync(~0u, v, o));
  return v;
}

// a / b as `/` rounds it, without the branch for results and divisors at the ends of the range of floats; inverse is 1 / b, rounded
__device__ __forceinline__ float quotient(float a, float b, float inverse) { float q = __fmul_rn(a, inverse); return fmaf(fmaf(-b, q, a), inverse, q); }
__device__ __forceinline__ float divide(float a, float b) { float r = rcp_approx(b); return quotient(a, b, fmaf(r, fmaf(-b, r, 1.f), r)); }
// An integer under 2^22 added to this bit pattern is a float, 1.5 * 2^23 too large, and a float under 2^22 added to that float has its nearest integer in the low bits (halves to even): cheaper than a conversion
constexpr int MAGIC = 0x4b400000;
__device__ __forceinline__ float from_magic(int v) { return __int_as_float(v) - 12582912.f; }
__device__ __forceinline__ u32 to_magic(float f) { return __float_as_uint(__fadd_rn(f, 12582912.f)); }

// What becomes of a value of a product before it is stored at y[at], in column `column`: the bias is added, then scale times that to x[at]. x and y may be the same memory
struct Sum {
  const float *bias, *x; float scale;
  __device__ __forceinline__ float operator()(float v, float bias_there, float x_there) const { if (bias) v = __fadd_rn(v, bias_there); return x ? fmaf(v, scale, x_there) : v; }
  __device__ __forceinline__ float operator()(float v, size_t at, int column) const { return (*this)(v, bias ? loadf(bias + column) : 0.f, x ? loadf(x + at) : 0.f); }
};
