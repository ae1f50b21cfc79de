// What the products for many rows share: activations as 16-bit numbers in the order of the tensor cores, weights that become 16-bit numbers in a lane's registers.
//
// xh   activations [groups * 4 blocks of 32][octets of rows] of 512 bytes: four matrices of 8 rows x 8 columns, 16 bytes a row, as ldmatrix and wgmma read them. Matrices 0 and 1 are
//      the first k16 of a block, 2 and 3 the second. Place 2t + e of the k16 of half h is column 16h + 4t + e in matrix 0 (or 2), 16h + 4t + 2 + e in matrix 1 (or 3): then the four
//      neighbouring weights that a lane has in one word are what the instruction wants of it.
// xs   what a row of the result is multiplied by: a power of two
#pragma once
#include "formats.cuh"

__device__ __forceinline__ int column_of(int matrix, int place) { return (matrix >> 1) * 16 + (place >> 1) * 4 + (matrix & 1) * 2 + (place & 1); }

// A row of activations is multiplied by the power of two that brings its largest number to 2^14..2^15: that, and its inverse. Zeros and the tiniest rows as 2^-112
__device__ __forceinline__ float2 row_scale(float top) {
  int e = max((int)(__float_as_uint(top) >> 23), 15);                         // biased exponent
  return make_float2(__uint_as_float((u32)(268 - e) << 23), __uint_as_float((u32)(e - 14) << 23));
}

// The largest of 8 columns and `top`, without signs
__device__ __forceinline__ float largest(float top, const float* p) {
  float4 a = loadf4(p), b = loadf4(p + 4);
  return fmaxf(top, fmaxf(fmaxf(fmaxf(fabsf(a.x), fabsf(a.y)), fmaxf(fabsf(a.z), fabsf(a.w))), fmaxf(fmaxf(fabsf(b.x), fabsf(b.y)), fmaxf(fabsf(b.z), fabsf(b.w)))));
}
// A pair of activations as 16-bit numbers, and what that left over of them, rounded likewise
template <bool BF> __device__ __forceinline__ u32 half_pair(float a, float b) { return BF ? float2_bf162(a, b) : float2_half2(a, b); }
template <bool BF> __device__ __forceinline__ u32 rest_pair(float a, float b, u32 pair) {
  float2 h = BF ? make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000)) : half2_float2(pair);
  return half_pair<BF>(a - h.x, b - h.y);
}

// ---------------------------------------------------------------- quantised weights
// Weights, scales and minimums of blocks are kept RAISE times too large, so that small ones stay clear of float16's subnormals. What is 65504 / RAISE or less in all of them is finite
constexpr float RAISE = 16;
constexpr u32 power_pair(float v) { return v < 1.5f ? 0x3c003c00 : v < 3.f ? 0x40004000 : v < 6.f ? 0x44004400 : 0x4c004c00; }   // 1, 2, 4 or 16, twice
// Bytes i and j of v -> a pair of float16, exactly: a byte under 1024's exponent is 1024 + byte. Signed bytes are first moved up by 128.
template <bool SIGNED> __device__ __forceinline__ u32 byte_pair(u32 v, int i, int j) {
  return half2_add(__byte_perm(SIGNED ? v ^ 0x80808080 : v, 0x64646464, 0x4040 | i | j << 8), SIGNED ? 0xe480e480 : 0xe400e400);
}
__device__ __forceinline__ u32 low_twice(u32 v) { return __byte_perm(v, 0, 0x1010); }
__device__ __forceinline__ u32 high_twice(u32 v) { return __byte_perm(v, 0, 0x3232); }
// A lane's part of one row: its codes, and the scales and minimums of the four blocks as pairs of float16, rounded once
template <class F> struct HalfRow : F {
  u32 scale[F::D ? 4 : 2], low[2];                // blocks 0, 1 and 2, 3; Q6_K: lo and hi of each block
  __device__ HalfRow(const F& f, int odd) : F(f) {
    if constexpr (!F::SUPER) {
      constexpr u32 up = power_pair(F::UNIT * RAISE);
      scale[0] = half2_mul(f.s.x, up); scale[1] = half2_mul(f.s.y, up);
      if constexpr (F::MIN) { low[0] = half2_mul(f.s.z, up); low[1] = half2_mul(f.s.w, up); }
    } else if constexpr (F::MIN) {
      u32 both = half2_mul(f.s.x, 0xcc004c00), d = low_twice(both), m = high_twice(both), sc = f.scales(odd), mn = f.mins(odd);       // times 16, times -16
      scale[0] = half2_mul(byte_pair<false>(sc, 0, 1), d); scale[1] = half2_mul(byte_pair<false>(sc, 2, 3), d);
      low[0] = half2_mul(byte_pair<false>(mn, 0, 1), m); low[1] = half2_mul(byte_pair<false>(mn, 2, 3), m);
    } else {
      u32 d = half2_mul(low_twice(f.f), power_pair(F::UNIT * RAISE));
#pragma unroll
      for (int b = 0; b < 4; b++) scale[b] = half2_mul(byte_pair<true>(b < 2 ? f.s.x : f.s.y, 2 * (b & 1), 2 * (b & 1) + 1), d);
    }
  }
  // Block b: columns 4t..4t+3 (half 0) or 16 higher. The codes are exact; one rounding for the weight
  __device__ void block(int b, int half, u32& first, u32& second) const {
    int c0, c1; this->codes(b, c0, c1);
    u32 c = half ? c1 : c0, s, p = byte_pair<!F::MIN>(c, 0, 1), r = byte_pair<!F::MIN>(c, 2, 3);
    if constexpr (F::D) { u32 v = b < 2 ? b ? scale[1] : scale[0] : b == 2 ? scale[2] : scale[3]; s = half ? high_twice(v) : low_twice(v); }
    else { u32 v = b < 2 ? scale[0] : scale[1]; s = b & 1 ? high_twice(v) : low_twice(v); }
    if constexpr (F::MIN) {
      u32 v = b < 2 ? low[0] : low[1], m = b & 1 ? high_twice(v) : low_twice(v);
      first = half2_fma(p, s, m); second = half2_fma(r, s, m);
    } else { first = half2_mul(p, s); second = half2_mul(r, s); }
  }
};

#if __CUDA_ARCH__ >= 800
struct F16 { static __device__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_16816_f16(c, a[0], a[1], a[2], a[3], b0, b1); } };
struct BF16 { static __device__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_16816_bf16(c, a[0], a[1], a[2], a[3], b0, b1); } };
template <class F> struct Is16 { static constexpr bool value = false; };
template <> struct Is16<F16> { static constexpr bool value = true; };
template <> struct Is16<BF16> { static constexpr bool value = true; };
template <class F> struct Kind { static constexpr bool BF = false; using type = F16; };                 // what the weights become
template <> struct Kind<BF16> { static constexpr bool BF = true; using type = BF16; };

// ---------------------------------------------------------------- a tile: 16 rows of W, one group
// fetch_tile starts the copies of this warp into a place in shared memory; a Tile then gives A for the two halves of each block
template <class F> struct Tile {
  static constexpr int BYTES = SLOT<F>;
  static constexpr float BACK = 1 / RAISE;
  HalfRow<F> a, b;
  __device__ Tile(u32 from, u32 group, int odd, int lane) : a(take<F>(from, group, 0, lane), odd), b(take<F>(from, group, 1, lane), odd) {}
  __device__ void block(int i, int half, u32 (&v)[4]) const { a.block(i, half, v[0], v[2]); b.block(i, half, v[1], v[3]); }
};
// 16-bit weights: 16 rows of 256 bytes; 16 bytes at a time change places so that rows that are read together lie in different banks
struct Tile16 {
  static constexpr int BYTES = 4096;
  static constexpr float BACK = 1;
  u32 from; int turn, mid;
  __device__ Tile16(u32 from, u32, int, int lane) : from(from + (lane >> 2) * 256 + (lane & 1) * 8), turn(2 * (lane >> 2 & 3)), mid(lane >> 1 & 1) {}
  __device__ void block(int i, int half, u32 (&v)[4]) const {
    u32 p = from + ((4 * i + 2 * half + mid) ^ turn) * 16;
    uint2 a = shared8(p), b = shared8(p + 2048);
    v[0] = a.x; v[1] = b.x; v[2] = a.y; v[3] = b.y;
  }
};
template <> struct Tile<F16> : Tile16 { using Tile16::Tile16; };
template <> struct Tile<BF16> : Tile16 { using Tile16::Tile16; };

// 16 rows of W from `row` on (past the last, some that are there), for one lane: its first group among all groups of the matrix, or 16 bytes among its row's `units`
struct Rows { Matrix w; u32 first; int n, units; };
template <class F> __device__ __forceinline__ Rows rows_of(const void* q, const void* h, const void* s, const void* d, int row, int n, int groups, int units, int lane) {
  if constexpr (Is16<F>::value) return {{(const char*)q, nullptr, nullptr, nullptr}, (u32)row, n, units};
  else return {matrix<F>(q, h, s, d, lane & 3), (u32)((min(row, (n - 1) / 32 * 32 + 16) + (lane >> 2)) * groups), n, 8 * groups};
}
template <class F> __device__ __forceinline__ void fetch_tile(u32 to, const Rows& w, int group, int lane) {
  if constexpr (Is16<F>::value) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      int r = 2 * i + (lane >> 4), c = lane & 15, unit = group * 16 + c, there = unit < w.units;
      copy16_zero(to + r * 256 + (c ^ 2 * (r & 3)) * 16, w.w.q + ((size_t)min((int)w.first + r, w.n - 1) * w.units + (there ? unit : 0)) * 16, there ? 16 : 0);
    }
  } else fetch<F>(to, w.w, w.first + group, w.units, lane);
}
template <class F> __device__ __forceinline__ Tile<F> take_tile(u32 from, const Rows& w, int group, int lane) { return Tile<F>(from, w.first + group, group & 1, lane); }

// One group of `wide` octets of activations, copied by the whole block: 4 pieces of consecutive bytes
__device__ __forceinline__ void fetch_acts(u32 to, const char* x, int group, int octet, int octets, int wide) {
  for (int i = threadIdx.x; i < wide * 128; i += blockDim.x) {
    int b = i / (wide * 32), rest = i - b * wide * 32;
    copy<16>(to + i * 16, x + ((size_t)(group * 4 + b) * octets + octet) * 512 + rest * 16);
  }
}
// At most `stages` - 2 groups of copies may still be on their way
__device__ __forceinline__ void wait_stage(int stages) {
  if (stages == 2) copy_wait<0>(); else if (stages == 3) copy_wait<1>(); else copy_wait<2>();
}
// C of 16 rows of W and 8 OCTETS rows of activations -> y [m][n], with what `sum` adds
template <int OCTETS> __device__ __forceinline__ void store_tile(const float (&acc)[OCTETS][4], const float* xs, float back, float* y, const Sum& sum, int row, int first, int n, int m, int lane) {
  int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int i = 0; i < OCTETS; i++)
#pragma unroll
    for (int e = 0; e < 4; e++) {
      int r = row + g + 8 * (e >> 1), c = first + i * 8 + 2 * t + (e & 1);
      if (r < n && c < m) y[(size_t)c * n + r] = sum(__fmul_rn(acc[i][e], loadf(xs + c) * back), (size_t)c * n + r, r);
    }
}
#endif
