// A head of a row in a warp: the norm of it where there are weights, then its first `dim` values turned by the angles of the row's position, half layout.
// Pair p is columns p and p + dim/2, or two neighbours behind dim; a lane has some pairs at a time, 32 apart.
#pragma once
#include "common.cuh"

// WIDTH: the head's, a multiple of 64 of at most 256, so that no lane has to ask what is inside; 0: any.
template <int WIDTH> struct Head {
  static constexpr int J = WIDTH ? WIDTH / 64 : 4;                     // pairs of a lane at a time
  const float *w, *cosines; int head_dim, half, pairs; float c[J], s[J], wa[J], wb[J];
  __device__ __forceinline__ int first(int p) const { return p < half ? p : 2 * p; }
  __device__ __forceinline__ int second(int p) const { return p < half ? p + half : 2 * p + 1; }
  __device__ __forceinline__ bool inside(int d) const { return WIDTH || d < head_dim; }
  __device__ __forceinline__ void two(float (&x)[J], float (&y)[J], const float* v, int base) const {
#pragma unroll
    for (int j = 0; j < J; j++) {
      int p = base + 32 * j;
      x[j] = inside(first(p)) ? loadf(v + first(p)) : 0.f; y[j] = inside(second(p)) ? loadf(v + second(p)) : 0.f;
    }
  }
  __device__ __forceinline__ void angles(int base) {
#pragma unroll
    for (int j = 0; j < J; j++) { int p = base + 32 * j; c[j] = p < half ? loadf(cosines + p) : 1.f; s[j] = p < half ? loadf(cosines + half + p) : 0.f; }
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
    const int lane = threadIdx.x & 31, pairs = WIDTH ? WIDTH / 2 : this->pairs; float a[J], b[J], r = 1;
    two(a, b, from, lane);
    if (w) {
      float sum = 0;
      for (int base = lane; base < pairs; base += 32 * J) {
        if (base > lane) two(a, b, from, base);
#pragma unroll
        for (int j = 0; j < J; j++) sum = fmaf(a[j], a[j], fmaf(b[j], b[j], sum));
      }
      r = 1.f / sqrtf(warp_sum(sum) / (float)head_dim + eps);
      if (pairs > 128) two(a, b, from, lane);
    }
    for (int base = lane; base < pairs; base += 32 * J) {
      if (base > lane) { two(a, b, from, base); angles(base); if (w) two(wa, wb, w, base); }
#pragma unroll
      for (int j = 0; j < J; j++) {
        int p = base + 32 * j;
        float x = w ? __fmul_rn(a[j] * r, wa[j]) : a[j], y = w ? __fmul_rn(b[j] * r, wb[j]) : b[j];
        if (inside(first(p))) put(first(p), p < half ? __fmul_rn(x, c[j]) - __fmul_rn(y, s[j]) : x);
        if (inside(second(p))) put(second(p), p < half ? fmaf(x, s[j], __fmul_rn(y, c[j])) : y);
      }
    }
  }
};
