// The ceilings of a GPU: how fast memory can be read, and what one kernel after another costs.
#include "common.cuh"

// x [n] of 16 bytes, out [threads of the grid]: the xor of what each thread read. U loads are in flight at a time.
template <int U>
__global__ __launch_bounds__(256) void read(const uint4* x, u32* out, long long n) {
  long long stride = (long long)gridDim.x * blockDim.x, i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  u32 sum = 0;
  for (long long at = i; at < n; at += U * stride) {
    uint4 v[U];
#pragma unroll
    for (int u = 0; u < U; u++) v[u] = at + u * stride < n ? stream16(x + at + u * stride) : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int u = 0; u < U; u++) sum ^= v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
  }
  out[i] = sum;
}

// y [threads of the grid] += 1, after the kernel before has done the same
__global__ void relay(float* y) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  pdl_trigger();
  pdl_wait();
  y[i] = loadf(y + i) + 1.f;
}
