// A head of a row in a warp: the norm of it where there are weights, then its first `dim` values turned by the angles of the row's position, half layout.
// Pair p is columns p and p + dim/2, or two neighbours behind dim; a lane has four pairs at a time, 32 apart.
#pragma once
#include "common.cuh"

struct Head {
  const float *w, *cosines; int head_dim, half, pairs; float c[4], s[4], wa[4], wb[4];
  __device__ __forceinline__ int first(int p) const { return p < half ? p : 2 * p; }
  __device__ __forceinline__ int second(int p) const { return p < half ? p + half : 2 * p + 1; }
  __device__ __forceinline__ void two(float (&x)[4], float (&y)[4], const float* v, int base) const {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      int p = base + 32 * j;
      x[j] = first(p) < head_dim ? loadf(v + first(p)) : 0.f; y[j] = second(p) < head_dim ? loadf(v + second(p)) : 0.f;
    }
  }
  __device__ __forceinline__ void angles(int base) {
#pragma unroll
    for (int j = 0; j < 4; j++) { int p = base + 32 * j; c[j] = p < half ? loadf(cosines + p) : 1.f; s[j] = p < half ? loadf(cosines + half + p) : 0.f; }
  }
  // What no kernel writes, before the wait: weights, angles, and the row's position, which comes from the host
  __device__ __forceinline__ void begin(const float* w_, const int* positions, const float* table, int row, int head_dim_, int dim) {
    Unwritten numbers;
    w = w_; head_dim = head_dim_; half = dim / 2; pairs = (head_dim + 1) / 2; cosines = dim ? table + (size_t)load4(positions + row) * dim : nullptr;
    if (w) two(wa, wb, w, threadIdx.x & 31);
    angles(threadIdx.x & 31);
  }
  // put(column, value) takes the result
  template <class Put> __device__ __forceinline__ void turn(const float* from, float eps, Put put) {
    int lane = threadIdx.x & 31; float a[4], b[4], r = 1;
    two(a, b, from, lane);
    if (w) {
      float sum = 0;
      for (int base = lane; base < pairs; base += 128) {
        if (base > lane) two(a, b, from, base);
#pragma unroll
        for (int j = 0; j < 4; j++) sum = fmaf(a[j], a[j], fmaf(b[j], b[j], sum));
      }
      r = 1.f / sqrtf(warp_sum(sum) / (float)head_dim + eps);
      if (pairs > 128) two(a, b, from, lane);
    }
    for (int base = lane; base < pairs; base += 128) {
      if (base > lane) { two(a, b, from, base); angles(base); if (w) two(wa, wb, w, base); }
#pragma unroll
      for (int j = 0; j < 4; j++) {
        int p = base + 32 * j;
        float x = w ? __fmul_rn(a[j] * r, wa[j]) : a[j], y = w ? __fmul_rn(b[j] * r, wb[j]) : b[j];
        if (first(p) < head_dim) put(first(p), p < half ? __fmul_rn(x, c[j]) - __fmul_rn(y, s[j]) : x);
        if (second(p) < head_dim) put(second(p), p < half ? fmaf(x, s[j], __fmul_rn(y, c[j])) : y);
      }
    }
  }
};
