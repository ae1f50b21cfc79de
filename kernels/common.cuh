// What every kernel here uses: loads that say what they are for, the two halves of a dependent launch, half floats, sums over a warp.
// No CUDA header is included: NVRTC then needs no toolkit, and a kernel compiles in a tenth of a second.
#pragma once
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;

// The next kernel may start now; this one may read what the previous wrote only after the wait. Without the launch attribute (and before sm_90) both do nothing.
__device__ __forceinline__ void pdl_trigger() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Weights: read once, so they need no place in L1. The "memory" clobber keeps the load where it is written, before the wait.
__device__ __forceinline__ uint4 stream16(const void* p) {
  uint4 v; asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory"); return v;
}
// Everything else, and above all what the previous kernel wrote: a plain load, which the compiler may not move over the wait as it may an __ldg.
__device__ __forceinline__ uint4 load16(const void* p) {
  uint4 v; asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory"); return v;
}
__device__ __forceinline__ uint2 load8(const void* p) {
  uint2 v; asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory"); return v;
}
__device__ __forceinline__ u32 load4(const void* p) { u32 v; asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
__device__ __forceinline__ u16 load2(const void* p) { u16 v; asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory"); return v; }
__device__ __forceinline__ float loadf(const float* p) { return __uint_as_float(load4(p)); }
__device__ __forceinline__ float4 loadf4(const void* p) {
  uint4 v = load16(p); return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}

__device__ __forceinline__ float half_float(u32 h) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"((u16)h)); return f; }
__device__ __forceinline__ float2 half2_float2(u32 h) { return make_float2(half_float(h & 0xffff), half_float(h >> 16)); }
__device__ __forceinline__ u16 float_half(float f) { u16 h; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f)); return h; }
__device__ __forceinline__ u32 float2_half2(float lo, float hi) { return float_half(lo) | (u32)float_half(hi) << 16; }

template <int WIDTH = 32> __device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int o = WIDTH / 2; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  return v;
}
template <int WIDTH = 32> __device__ __forceinline__ float warp_max(float v) {
#pragma unroll
  for (int o = WIDTH / 2; o; o >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, o));
  return v;
}
