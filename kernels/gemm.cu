// y = x W^T for many rows of x, and for few rows where W has 16 bits: float16 or bfloat16 tensor cores, sums in float32.
#include "gemm.cuh"

// ---------------------------------------------------------------- activations
// x [m][k] float32, rows `pitch` apart -> xh (see gemm.cuh) and xs; a block has 8 rows. float16: a row is first multiplied by the power of two that brings its largest number to 2^14..2^15, so that nothing
// overflows and the small keep their bits. SPLIT: what rounding left over goes to as many octets more. Rows from m on are zeros.
template <bool BF, bool SPLIT>
__global__ __launch_bounds__(512) void half_act(const float* x, char* xh, float* xs, int m, int k, int pitch, int blocks, int octets) {
  __shared__ float tops[16][8];
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5, row = blockIdx.x * 8 + (lane >> 2), four = lane & 3;
  const float* mine = x + (size_t)row * pitch;
  float up = 1, down = 1;
  pdl_trigger();
  pdl_wait();
  if (!BF) {
    float top = 0;
    for (int at = (warp * 4 + four) * 8; at < k; at += warps * 32)             // k is a multiple of 8
      if (row < m) top = largest(top, mine + at);
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1)); top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    if (four == 0) tops[warp][lane >> 2] = top;
    __syncthreads();
    for (int i = 0; i < warps; i++) top = fmaxf(top, tops[i][lane >> 2]);
    float2 both = row_scale(top);
    up = both.x; down = both.y;
  }
  if (warp == 0 && four == 0) xs[row] = down;
  for (int block = warp; block < blocks; block += warps) {                    // lane: matrix lane / 8, row lane % 8 of the four matrices
    int matrix = lane >> 3, r = blockIdx.x * 8 + (lane & 7);
    float scale = __shfl_sync(~0u, up, (lane & 7) * 4);
    u32 word[4], rest[4];
#pragma unroll
    for (int t = 0; t < 4; t++) {
      int at = block * 32 + column_of(matrix, 2 * t);
      uint2 v = r < m && at < k ? load8(x + (size_t)r * pitch + at) : make_uint2(0, 0);
      float a = __uint_as_float(v.x) * scale, b = __uint_as_float(v.y) * scale;
      word[t] = half_pair<BF>(a, b);
      if (SPLIT) rest[t] = rest_pair<BF>(a, b, word[t]);
    }
    char* to = xh + ((size_t)block * octets + blockIdx.x) * 512 + lane * 16;             // octets: with those of the second part
    *(uint4*)to = make_uint4(word[0], word[1], word[2], word[3]);
    if (SPLIT) *(uint4*)(to + octets / 2 * 512) = make_uint4(rest[0], rest[1], rest[2], rest[3]);
  }
}

// ---------------------------------------------------------------- products
// y [m][n]. A block makes a tile of 32 rows of W a warp by 8 OCTETS rows of x, one group (128 columns) after the other, from a ring of `stages` groups in shared memory:
// [block][octet] of activations for all, and two tiles of 16 rows of W for each warp, which alone unpacks them, in registers. Blocks of grid z share the columns: each then has a y of its
// own, and sum_parts adds them. Few rows of 16-bit weights have x in two parts (half_act with SPLIT), octets of the second behind those of the first.
template <class F, int OCTETS>
__global__ __launch_bounds__(256, 1) void gemm(const void* q, const void* h, const void* s, const void* d, const char* xh, const float* xs, float* y, const float* bias, const float* add, float scale,
                                        int n, int m, int groups, int units, int octets, int stages) {
#if __CUDA_ARCH__ >= 800
  constexpr int PARTS = Is16<F>::value && OCTETS <= 4 ? 2 : 1, X = OCTETS * PARTS * 2048, MINE = 2 * Tile<F>::BYTES;
  extern __shared__ __align__(16) float room[];
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5, octet = blockIdx.x * OCTETS, row = (blockIdx.y * warps + warp) * 32;
  int group = (int)(groups * blockIdx.z / gridDim.z), end = (int)(groups * (blockIdx.z + 1) / gridDim.z);
  u32 ring = shared_address(room), stage = X + warps * MINE, own = X + warp * MINE;
  Rows r0 = rows_of<F>(q, h, s, d, row, n, groups, units, lane), r1 = rows_of<F>(q, h, s, d, row + 16, n, groups, units, lane);
  auto fetch_rows = [&](int place, int group) {
    u32 to = ring + place * stage + own;
    fetch_tile<F>(to, r0, group, lane); fetch_tile<F>(to + Tile<F>::BYTES, r1, group, lane);
  };
  auto fetch_x = [&](int place, int group) { fetch_acts(ring + place * stage, xh, group, octet, octets, OCTETS * PARTS); };
  float acc[2][OCTETS][4] = {};
  pdl_trigger();
  for (int i = 0; i < stages - 1; i++) if (group + i < end) fetch_rows(i, group + i);
  pdl_wait();
  for (int i = 0; i < stages - 1; i++) { if (group + i < end) fetch_x(i, group + i); copy_commit(); }
  for (int at = 0, to = stages - 1; group < end; group++) {
    wait_stage(stages);
    __syncthreads();                                // this stage is there for all, and all are done with the one before, whose place is filled now
    if (group + stages - 1 < end) { fetch_rows(to, group + stages - 1); fetch_x(to, group + stages - 1); }
    copy_commit();
    u32 from = ring + at * stage;
    Tile<F> a = take_tile<F>(from + own, r0, group, lane), b = take_tile<F>(from + own + Tile<F>::BYTES, r1, group, lane);
#pragma unroll 2                                    // unrolled whole, the compiler unpacks more ahead than its 255 registers hold
    for (int k = 0; k < 4; k++) {
      u32 x = from + k * OCTETS * PARTS * 512 + (lane >> 4) * 512 + (lane & 15) * 16;         // of two octets the two matrices of a half
#pragma unroll
      for (int half = 0; half < 2; half++) {
        u32 a0[4], a1[4];
        a.block(k, half, a0); b.block(k, half, a1);
#pragma unroll
        for (int i = 0; i < OCTETS * PARTS; i += 2) {
          u32 v[4]; ldmatrix_x4(v, x + half * 256 + i * 512);
          int c = i % OCTETS;
          Kind<F>::type::mma(acc[0][c], a0, v[0], v[1]); Kind<F>::type::mma(acc[1][c], a1, v[0], v[1]);
          Kind<F>::type::mma(acc[0][c + 1], a0, v[2], v[3]); Kind<F>::type::mma(acc[1][c + 1], a1, v[2], v[3]);
        }
      }
    }
    at = at + 1 == stages ? 0 : at + 1; to = to + 1 == stages ? 0 : to + 1;
  }
  y += (size_t)blockIdx.z * m * n;
#pragma unroll
  for (int i = 0; i < 2; i++) store_tile<OCTETS>(acc[i], xs, Tile<F>::BACK, y, {bias, add, scale}, row + 16 * i, octet * 8, n, m, lane);
#endif
}

// y [size] = the sum of parts [splits][size], first to last, in rows of n, and what is added to that
__global__ __launch_bounds__(256) void sum_parts(const float* parts, float* y, const float* bias, const float* add, float scale, int n, int size, int splits) {
  pdl_trigger();
  pdl_wait();
#pragma unroll
  for (int j = 0; j < 4; j++) {
    int i = (blockIdx.x * 4 + j) * 256 + threadIdx.x;
    if (i >= size) break;
    float sum = loadf(parts + i);
    for (int p = 1; p < splits; p++) sum += loadf(parts + (size_t)p * size + i);
    y[i] = Sum{bias, add, scale}(sum, i, i % n);
  }
}
