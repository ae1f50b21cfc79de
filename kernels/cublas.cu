// Products of a library (cuBLAS): W and x as 16-bit numbers in memory, row by row, for it to multiply, and what becomes of its sums. For every architecture.
#include "gemm.cuh"

// W's planes, `rows` rows from group `first` of all groups on -> to [rows][k] float16, RAISE times too large: the numbers that half_weights_ref names. k is a multiple of 32.
// Four lanes have a group of 128 columns; of each block of 32 lane t has columns 4t..4t+3 and 16+4t..: neighbours exchange halves, so that each stores 16 bytes in a row.
template <class F> __global__ __launch_bounds__(256) void unpack(const void* q, const void* h, const void* s, const void* d, u16* to, int first, int rows, int groups, int k) {
  int i = blockIdx.x * 64 + (threadIdx.x >> 2), t = threadIdx.x & 3, last = rows * groups - 1, mine = min(i, last), row = mine / groups, group = mine - row * groups;
  HalfRow<F> w(load<F>(matrix<F>(q, h, s, d, t), first + mine), group & 1);
  pdl_trigger();
  pdl_wait();
  u16* out = to + (size_t)row * k + group * 128 + 16 * (t & 1) + 8 * (t >> 1);
#pragma unroll
  for (int b = 0; b < 4; b++) {
    u32 lo[2], hi[2];
    w.block(b, 0, lo[0], lo[1]); w.block(b, 1, hi[0], hi[1]);
    u32 v0 = __shfl_xor_sync(~0u, t & 1 ? lo[0] : hi[0], 1), v1 = __shfl_xor_sync(~0u, t & 1 ? lo[1] : hi[1], 1);
    if (i <= last && group * 128 + b * 32 < k) *(uint4*)(out + 32 * b) = t & 1 ? make_uint4(v0, v1, hi[0], hi[1]) : make_uint4(lo[0], lo[1], v0, v1);
  }
}

// x [m][k] float32, rows `pitch` apart -> xh [m][k] 16 bits and xs [m], as half_act rounds them; SPLIT: what rounding left over goes to m rows more. A block has a row; k is a multiple of 8.
template <bool BF, bool SPLIT> __global__ __launch_bounds__(256) void half_rows(const float* x, u16* xh, float* xs, int m, int k, int pitch) {
  __shared__ float tops[8];
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  const float* mine = x + (size_t)blockIdx.x * pitch;
  float up = 1, down = 1;
  pdl_trigger();
  pdl_wait();
  if (!BF) {
    float top = 0;
    for (int at = threadIdx.x * 8; at < k; at += blockDim.x * 8) top = largest(top, mine + at);
    top = warp_max(top);
    if (lane == 0) tops[warp] = top;
    __syncthreads();
    for (int i = 0; i < warps; i++) top = fmaxf(top, tops[i]);
    float2 both = row_scale(top);
    up = both.x; down = both.y;
  }
  if (threadIdx.x == 0) xs[blockIdx.x] = down;
  for (int at = threadIdx.x * 8; at < k; at += blockDim.x * 8) {
    float4 a = loadf4(mine + at), b = loadf4(mine + at + 4);
    float v[8] = {a.x * up, a.y * up, a.z * up, a.w * up, b.x * up, b.y * up, b.z * up, b.w * up};
    u32 word[4], rest[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      word[i] = half_pair<BF>(v[2 * i], v[2 * i + 1]);
      if (SPLIT) rest[i] = rest_pair<BF>(v[2 * i], v[2 * i + 1], word[i]);
    }
    u16* to = xh + (size_t)blockIdx.x * k + at;
    *(uint4*)to = make_uint4(word[0], word[1], word[2], word[3]);
    if (SPLIT) *(uint4*)(to + (size_t)m * k) = make_uint4(rest[0], rest[1], rest[2], rest[3]);
  }
}

// sums [m][pitch], of which `rows` count: the columns first, first + 1, ... of a product -> y [m][n], with the scale of a row of x and what `Sum` adds; V columns a thread
template <int V> __global__ __launch_bounds__(256) void finish(const float* sums, const float* xs, float back, float* y, const float* bias, const float* add, float scale, int first, int rows, int pitch, int n, int m) {
  int i = blockIdx.x * 256 + threadIdx.x, wide = rows / V;
  pdl_trigger();
  pdl_wait();
  if (i >= m * wide) return;
  int row = i / wide, column = (i - row * wide) * V;
  Sum sum = {bias, add, scale};
  float factor = loadf(xs + row) * back;
  size_t at = (size_t)row * n + first + column;
  const float* from = sums + (size_t)row * pitch + column;
  if constexpr (V == 4) {
    float4 v = loadf4(from), b = bias ? loadf4(bias + first + column) : make_float4(0, 0, 0, 0), x = add ? loadf4(add + at) : make_float4(0, 0, 0, 0);
    *(float4*)(y + at) = make_float4(sum(__fmul_rn(v.x, factor), b.x, x.x), sum(__fmul_rn(v.y, factor), b.y, x.y), sum(__fmul_rn(v.z, factor), b.z, x.z), sum(__fmul_rn(v.w, factor), b.w, x.w));
  } else y[at] = sum(__fmul_rn(loadf(from), factor), at, first + column);
}
