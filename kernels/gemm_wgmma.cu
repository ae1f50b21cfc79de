// y = x W^T for many rows of x with the tensor cores of sm_90a: they read the activations from shared memory themselves, and work while the threads unpack the next weights.
#include "gemm.cuh"

// y [m][n]. A block makes a tile of 16 rows of W a warp (4, 8, 12 or 16 of them) by 128 rows of x, one group after the other, from a ring of `stages` groups: [block][octet] of activations
// for all, and 16 rows of W for each warp. With two stages the tensor cores stop before a place is filled again; with more, the place is one whose product is long done.
// Blocks of grid z share the columns, as in gemm.
template <class F>
__global__ __launch_bounds__(512, 1) void gemm_wgmma(const void* q, const void* h, const void* s, const void* d, const char* xh, const float* xs, float* y, const float* bias, const float* add, float scale,
                                              int n, int m, int groups, int units, int octets, int stages) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(EMULATED)
  constexpr int OCTETS = 16, X = OCTETS * 2048, MINE = Tile<F>::BYTES;
  extern __shared__ __align__(128) float room[];
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5, octet = blockIdx.x * OCTETS, row = (blockIdx.y * warps + warp) * 16, ahead = max(1, stages - 2);
  int group = (int)(groups * blockIdx.z / gridDim.z), end = (int)(groups * (blockIdx.z + 1) / gridDim.z);
  u32 ring = shared_address(room), stage = X + warps * MINE, own = X + warp * MINE;
  Rows rows = rows_of<F>(q, h, s, d, row, n, groups, units, lane);
  float acc[OCTETS][4] = {};
  pdl_trigger();
  for (int i = 0; i < ahead; i++) if (group + i < end) fetch_tile<F>(ring + i * stage + own, rows, group + i, lane);
  pdl_wait();
  for (int i = 0; i < ahead; i++) { if (group + i < end) fetch_acts(ring + i * stage, xh, group + i, octet, octets, OCTETS); copy_commit(); }
  int at = 0, to = ahead;
#pragma unroll 1
  for (; group < end; group++) {
    if (ahead == 1) copy_wait<0>(); else copy_wait<1>();
    fence_async();                                  // what this thread copied is seen by the tensor cores
    __syncthreads();
    if (group + ahead < end) { fetch_tile<F>(ring + to * stage + own, rows, group + ahead, lane); fetch_acts(ring + to * stage, xh, group + ahead, octet, octets, OCTETS); }
    copy_commit();
    u32 from = ring + at * stage;
    Tile<F> a = take_tile<F>(from + own, rows, group, lane);
#pragma unroll
    for (int k = 0; k < 4; k++) {
      u32 lo[4], hi[4];
      a.block(k, 0, lo); a.block(k, 1, hi);
      wgmma_fence();
      wgmma<Kind<F>::BF>(acc, lo, wgmma_matrix(from + k * OCTETS * 512, 128, 512));
      wgmma<Kind<F>::BF>(acc, hi, wgmma_matrix(from + k * OCTETS * 512 + 256, 128, 512));
      wgmma_commit();
      wgmma_wait<1>();                              // those of the block before are done, and their registers free
    }
    if (stages == 2 || Is16<F>::value) wgmma_wait<0>();      // ptxas keeps the products of 16-bit weights apart if they run on into the next group
    at = at + 1 == stages ? 0 : at + 1; to = to + 1 == stages ? 0 : to + 1;
  }
  wgmma_wait<0>();
  store_tile<OCTETS>(acc, xs, Tile<F>::BACK, y + (size_t)blockIdx.z * m * n, {bias, add, scale}, row, octet * 8, n, m, lane);
#endif
}
