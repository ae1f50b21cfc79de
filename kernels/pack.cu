// A matrix as it lies in the file -> the planes that linear.cu reads: one thread moves 8 codes of a group of 128 columns, and what it owes of the scales.
#include "common.cuh"

// The code (2 to 8 bits) of weight i of block b of 32 in the bytes of a row
struct Packed4 {
  template <int HEAD, int TYPE_SIZE> static __device__ u32 at(const u8* row, int b, int i) { return row[b * TYPE_SIZE + HEAD + i % 16] >> (i / 16 * 4) & 15; }
};
struct Q4_0 { static constexpr int BITS = 4, ZERO = 8, PARTS = 1, SIZE = 18; static __device__ u32 code(const u8* r, int b, int i) { return Packed4::at<2, 18>(r, b, i); } };
struct Q4_1 { static constexpr int BITS = 4, ZERO = 0, PARTS = 2, SIZE = 20; static __device__ u32 code(const u8* r, int b, int i) { return Packed4::at<4, 20>(r, b, i); } };
struct Q5_0 {
  static constexpr int BITS = 5, ZERO = 16, PARTS = 1, SIZE = 22;
  static __device__ u32 code(const u8* r, int b, int i) { return Packed4::at<6, 22>(r, b, i) | (r[b * 22 + 2 + i / 8] >> (i % 8) & 1) << 4; }
};
struct Q5_1 {
  static constexpr int BITS = 5, ZERO = 0, PARTS = 2, SIZE = 24;
  static __device__ u32 code(const u8* r, int b, int i) { return Packed4::at<8, 24>(r, b, i) | (r[b * 24 + 4 + i / 8] >> (i % 8) & 1) << 4; }
};
struct Q8_0 { static constexpr int BITS = 8, ZERO = 0, PARTS = 1, SIZE = 34; static __device__ u32 code(const u8* r, int b, int i) { return r[b * 34 + 2 + i]; } };
struct Q4_K {
  static constexpr int BITS = 4, ZERO = 0, PARTS = 0, SIZE = 144;
  static __device__ u32 code(const u8* r, int b, int i) { return r[b / 8 * 144 + 16 + b % 8 / 2 * 32 + i] >> (b % 2 * 4) & 15; }
};
struct Q5_K {
  static constexpr int BITS = 5, ZERO = 0, PARTS = 0, SIZE = 176;
  static __device__ u32 code(const u8* r, int b, int i) {
    r += b / 8 * 176;
    return (r[48 + b % 8 / 2 * 32 + i] >> (b % 2 * 4) & 15) | (r[16 + i] >> (b % 8) & 1) << 4;
  }
};
struct Q6_K {
  static constexpr int BITS = 6, ZERO = 32, PARTS = 0, SIZE = 210;
  static __device__ u32 code(const u8* r, int b, int i) {
    r += b / 8 * 210;
    int half = b % 8 / 4, e = b % 4 * 32 + i;
    return (r[64 * half + e % 64] >> (e / 64 * 4) & 15) | (r[128 + 32 * half + i] >> (b % 4 * 2) & 3) << 4;
  }
};

// Byte e of the 16 that a super-block of Q4_K or Q5_K has for its scales: d, dmin, 8 of scale & 15 | minimum << 4, 4 with the upper two bits of four of each
__device__ __forceinline__ u32 scale_of(const u8* p, int i) { return i < 4 ? p[4 + i] & 63 : (p[8 + i] & 15) | p[i] >> 6 << 4; }
__device__ __forceinline__ u32 minimum_of(const u8* p, int i) { return i < 4 ? p[8 + i] & 63 : p[8 + i] >> 4 | p[4 + i] >> 6 << 4; }
__device__ __forceinline__ u32 upper_of(const u8* p, int i) { return scale_of(p, i) >> 4 | minimum_of(p, i) >> 4 << 2; }
__device__ __forceinline__ u32 super_byte(const u8* p, int e) {
  if (e < 4) return p[e];
  if (e < 12) return (scale_of(p, e - 4) & 15) | (minimum_of(p, e - 4) & 15) << 4;
  return upper_of(p, e - 12) | upper_of(p, e - 8) << 4;
}

// The row of raw that block blockIdx.x packs, -1 for a row of zeros as a file would have it, and the row of the planes where it goes: what `moves` [rows, 2] lists,
// or without a list rows 0 ... num - 1 of raw, and zeros after them, to rows first, first + 1, ...
__device__ __forceinline__ int row_from(const int* moves, int num) { return moves ? moves[2 * blockIdx.x] : (int)blockIdx.x < num ? (int)blockIdx.x : -1; }
__device__ __forceinline__ long long row_to(const int* moves, int first) { return moves ? moves[2 * blockIdx.x + 1] : first + (int)blockIdx.x; }

// raw [., row_bytes] has `blocks` blocks of 32 a row
template <class F> __global__ __launch_bounds__(128) void pack(const u8* raw, const int* moves, int first, int num, u8* q, u8* h, u16* s, u8* d, int row_bytes, int blocks, int groups) {
  constexpr bool SUPER = F::PARTS == 0;
  int from = row_from(moves, num);
  long long to = row_to(moves, first);
  const u8* row = raw + (long long)from * row_bytes;
  for (int at = threadIdx.x; at < groups * 16; at += 128) {
    int g = at / 16, e = at % 16, t = e / 4, j = e % 4;
    u32 c[4][2];
#pragma unroll
    for (int b = 0; b < 4; b++)
#pragma unroll
      for (int half = 0; half < 2; half++) c[b][half] = 4 * g + b < blocks ? (from < 0 ? 0 : F::code(row, 4 * g + b, 16 * half + e)) ^ F::ZERO : 0;
    if constexpr (F::BITS == 8) {
#pragma unroll
      for (int b = 0; b < 4; b++)
#pragma unroll
        for (int half = 0; half < 2; half++) q[(to * groups + g) * 128 + ((half * 4 + t) * 4 + b) * 4 + j] = c[b][half];
    } else {
#pragma unroll
      for (int b = 0; b < 4; b++) q[(to * groups + g) * 64 + (t * 4 + b) * 4 + j] = (c[b][0] & 15) | (c[b][1] & 15) << 4;
    }
    if constexpr (F::BITS == 5) {
      u32 v = 0;
#pragma unroll
      for (int b = 0; b < 4; b++) v |= c[b][0] >> 4 << b | c[b][1] >> 4 << (4 + b);
      h[(to * groups + g) * 16 + e] = v;
    }
    if constexpr (F::BITS == 6) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        u32 v = 0;
#pragma unroll
        for (int b = 0; b < 4; b++) v |= (c[b][half] >> 4 & 3) << (2 * b);
        h[(to * groups + g) * 32 + (t * 2 + half) * 4 + j] = v;
      }
    }
    if constexpr (!SUPER) {                          // [scale, minimum][4 blocks] of float16
      if (e < 4 * F::PARTS) {
        const u8* p = row + (4 * g + e % 4) * F::SIZE + 2 * (e / 4);
        s[(to * groups + g) * 4 * F::PARTS + e] = from >= 0 && 4 * g + e % 4 < blocks ? p[0] | p[1] << 8 : 0;
      }
    } else if (g % 2 == 0) {                         // 16 bytes for two groups
      const u8* p = row + g / 2 * F::SIZE;
      ((u8*)s)[(to * groups + g) * 8 + e] = from < 0 ? 0 : F::BITS == 6 ? p[192 + e] : super_byte(p, e);
      if (F::BITS == 6 && e < 2) d[to * groups + g + e] = from < 0 ? 0 : p[208 + e];
    }
  }
}

// Rows of 16-bit weights, padded to `units` of 16 bytes
__global__ __launch_bounds__(128) void pack_16(const u16* raw, const int* moves, int first, int num, u16* q, int k, int units) {
  int from = row_from(moves, num);
  long long to = row_to(moves, first);
  for (int i = threadIdx.x; i < 8 * units; i += 128) q[to * 8 * units + i] = from >= 0 && i < k ? raw[(long long)from * k + i] : 0;
}
