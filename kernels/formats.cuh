// The weight formats of linear.cu. A row is padded to groups of 128 weights: 4 blocks b of 32. Four neighbouring lanes t share a group, and lane t holds
// weights 4t..4t+3 (lo) and 16+4t..16+4t+3 (hi) of each of the four blocks: what one lane of a tensor-core instruction wants, and as good as any order for a dot product.
// Planes of a matrix, each [rows, a multiple of 32][groups] of:
//   q   codes: [t][b] words of 4 bits (low nibbles lo, high nibbles hi); for 8-bit codes two such, lo then hi
//   h   fifth bits: [t] words, byte j holds bit b of lo and bit 4+b of hi; fifth and sixth bits: [t] pairs of words (lo, hi), byte j holds bits 2b and 2b+1
//   s   scales, for the kinds below
//   d   float16 scale of a super-block, Q6_K only
// codes() gives signed bytes, 1/UNIT times too large: a code at the top of its byte needs no sign extension.
// A format says: SUPER, are scales for 256 weights (of two groups); MIN, is there a minimum to add; D, has d a plane of its own. Bytes of a lane: Q, H, S, SH of `Lane` below.
#pragma once
#include "common.cuh"

// The planes, seen from lane t: q and h begin with what is its own
struct Matrix { const char *q, *h, *s, *d; };

__device__ __forceinline__ u32 word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
__device__ __forceinline__ float word(const float4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
__device__ __forceinline__ int sbyte(u32 v, int i) { return (int)(v << (24 - 8 * i)) >> 24; }
__device__ __forceinline__ int ubyte(u32 v, int i) { return __byte_perm(v, 0, 0x4440 | i); }
__device__ __forceinline__ u32 half_at(u32 a, u32 b, int i) { u32 v = i < 2 ? a : b; return i & 1 ? v >> 16 : v & 0xffff; }

// What a lane holds of one group of one row. A format uses what it needs: Q times 16 bytes of codes, H bytes of further bits, S bytes of scales for a
// group (SH = 0) or for the two groups of a super-block (SH = 1), and the float16 of d
struct Lane { uint4 q, r, s; uint2 h; u32 f; };

// A float16 scale for each block (8 bytes a group); with a minimum, a second one (16 bytes)
struct Blocks : Lane {
  static constexpr bool SUPER = false, MIN = false, D = false;
  static constexpr int S = 8, SH = 0;
  __device__ float scale(int b) const { return half_float(half_at(s.x, s.y, b)); }
  __device__ float min(int) const { return 0; }
};
struct BlocksMin : Lane {
  static constexpr bool SUPER = false, MIN = true, D = false;
  static constexpr int S = 16, SH = 0;
  __device__ float scale(int b) const { return half_float(half_at(s.x, s.y, b)); }
  __device__ float min(int b) const { return half_float(half_at(s.z, s.w, b)); }
};
// A super-block of 256 with 6-bit scales and minimums: 4 bytes hold d and dmin, 8 bytes (scale & 15 | min << 4), and 4 bytes the upper two bits of both
struct SuperMin : Lane {
  static constexpr bool SUPER = true, MIN = true, D = false;
  static constexpr int S = 16, SH = 1;
  __device__ float d() const { return half_float(s.x & 0xffff); }
  __device__ float dmin() const { return half_float(s.x >> 16); }
  __device__ u32 scales(int odd) const { u32 v = odd ? s.z : s.y, w = odd ? s.w >> 4 : s.w; return (v & 0x0f0f0f0f) | ((w << 4) & 0x30303030); }
  __device__ u32 mins(int odd) const { u32 v = odd ? s.z : s.y, w = odd ? s.w >> 4 : s.w; return ((v >> 4) & 0x0f0f0f0f) | ((w << 2) & 0x30303030); }
};

template <class Scales> struct Four : Scales {
  static constexpr int Q = 1, H = 0;
  static constexpr float UNIT = 1;
  __device__ void codes(int b, int& lo, int& hi) const { u32 v = word(this->q, b); lo = v & 0x0f0f0f0f; hi = (v >> 4) & 0x0f0f0f0f; }
};
template <class Scales> struct Five : Scales {
  static constexpr int Q = 1, H = 4;
  static constexpr float UNIT = 1;
  __device__ void codes(int b, int& lo, int& hi) const {
    u32 v = word(this->q, b), e = this->h.x;
    lo = (v & 0x0f0f0f0f) | ((e << (4 - b)) & 0x10101010); hi = ((v >> 4) & 0x0f0f0f0f) | ((e >> b) & 0x10101010);
  }
};
struct Q4_1 : Four<BlocksMin> {};
struct Q5_1 : Five<BlocksMin> {};
struct Q4_K : Four<SuperMin> {};
struct Q5_K : Five<SuperMin> {};
struct Q4_0 : Blocks {
  static constexpr int Q = 1, H = 0;
  static constexpr float UNIT = 1 / 16.f;
  __device__ void codes(int b, int& lo, int& hi) const { u32 v = word(q, b); lo = (v << 4) & 0xf0f0f0f0; hi = v & 0xf0f0f0f0; }
};
struct Q5_0 : Blocks {
  static constexpr int Q = 1, H = 4;
  static constexpr float UNIT = 1 / 8.f;
  __device__ void codes(int b, int& lo, int& hi) const {
    u32 v = word(q, b);
    lo = ((v << 3) & 0x78787878) | ((h.x << (7 - b)) & 0x80808080); hi = ((v >> 1) & 0x78787878) | ((h.x << (3 - b)) & 0x80808080);
  }
};
struct Q8_0 : Blocks {
  static constexpr int Q = 2, H = 0;
  static constexpr float UNIT = 1;
  __device__ void codes(int b, int& lo, int& hi) const { lo = word(q, b); hi = word(r, b); }
};
// 6-bit codes, a signed 8-bit scale for 16 weights (the scales of lo and hi differ), a float16 for 256
struct Q6_K : Lane {
  static constexpr bool SUPER = true, MIN = false, D = true;
  static constexpr int Q = 1, H = 8, S = 8, SH = 0;
  static constexpr float UNIT = 1 / 4.f;
  __device__ void codes(int b, int& lo, int& hi) const {
    u32 v = word(q, b);
    lo = ((v << 2) & 0x3c3c3c3c) | ((h.x << (6 - 2 * b)) & 0xc0c0c0c0); hi = ((v >> 2) & 0x3c3c3c3c) | ((h.y << (6 - 2 * b)) & 0xc0c0c0c0);
  }
  __device__ float d() const { return half_float(f); }
  __device__ int scale_lo(int b) const { return sbyte(b < 2 ? s.x : s.y, 2 * (b & 1)); }
  __device__ int scale_hi(int b) const { return sbyte(b < 2 ? s.x : s.y, 2 * (b & 1) + 1); }
};

__device__ __forceinline__ const char* at(const void* base, u32 i, u32 size) { return (const char*)base + (size_t)i * size; }
template <class F> __device__ __forceinline__ Matrix matrix(const void* q, const void* h, const void* s, const void* d, int t) {
  return {(const char*)q + 16 * t, (const char*)h + F::H * t, (const char*)s, (const char*)d};
}
// Group i of the matrix (row * groups + group of the row) into registers
template <class F> __device__ __forceinline__ F load(const Matrix& w, u32 i) {
  F f;
  f.q = stream16(at(w.q, i, 64 * F::Q));
  if constexpr (F::Q == 2) f.r = stream16(at(w.q, i, 128) + 64);
  if constexpr (F::H == 4) f.h.x = load4(at(w.h, i, 16));
  if constexpr (F::H == 8) f.h = load8(at(w.h, i, 32));
  if constexpr (F::S == 8) { uint2 s = load8(at(w.s, i >> F::SH, 8)); f.s.x = s.x; f.s.y = s.y; }
  if constexpr (F::S == 16) f.s = load16(at(w.s, i >> F::SH, 16));
  if constexpr (F::D) f.f = load2(at(w.d, i >> 1, 2));
  return f;
}
// Block b of a group: what the codes of lo and hi, times UNIT, are multiplied by, and what is then added. Each product is rounded, as the reference rounds it
template <class F> __device__ __forceinline__ void scales_of(const F& f, int odd, int b, float& lo, float& hi, float& low) {
  low = 0;
  if constexpr (!F::SUPER) { lo = hi = f.scale(b); low = f.min(b); }
  else if constexpr (F::MIN) { lo = hi = __fmul_rn(f.d(), (float)ubyte(f.scales(odd), b)); low = -__fmul_rn(f.dmin(), (float)ubyte(f.mins(odd), b)); }
  else { lo = __fmul_rn(f.d(), (float)f.scale_lo(b)); hi = __fmul_rn(f.d(), (float)f.scale_hi(b)); }
}
#if __CUDA_ARCH__ >= 800
// The same for 16 rows, through shared memory: rows g (half 0) and g + 8 (half 1) of lane 4g + t. fetch starts the copies, take reads them once they are there.
// A slot is [half][lane] codes, then [half][lane] further bits, then scales and d of 16 rows
template <class F> constexpr int SLOT = 1024 * F::Q + 64 * F::H + 16 * F::S + (F::D ? 64 : 0);
template <class F> __device__ __forceinline__ void fetch(u32 slot, const Matrix& w, u32 i, u32 eight_rows, int lane) {
  int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    u32 j = i + half * eight_rows;
#pragma unroll
    for (int k = 0; k < F::Q; k++) copy<16>(slot + (k * 2 + half) * 512 + lane * 16, at(w.q, j, 64 * F::Q) + 64 * k);
    if constexpr (F::H > 0) copy<F::H>(slot + 1024 * F::Q + (half * 32 + lane) * F::H, at(w.h, j, 4 * F::H));
  }
  u32 j = i + (t & 1) * eight_rows, scales = slot + 1024 * F::Q + 64 * F::H;
  if (t < 2) copy<F::S>(scales + ((t & 1) * 8 + g) * F::S, at(w.s, j >> F::SH, F::S));
  if constexpr (F::D) if (t >= 2) copy<4>(scales + 16 * F::S + ((t & 1) * 8 + g) * 4, at(w.d, j >> 2, 4));     // two super-blocks
}
template <class F> __device__ __forceinline__ F take(u32 slot, u32 i, int half, int lane) {
  F f; int row = half * 8 + (lane >> 2); u32 scales = slot + 1024 * F::Q + 64 * F::H;
  f.q = shared16(slot + half * 512 + lane * 16);
  if constexpr (F::Q == 2) f.r = shared16(slot + 1024 + half * 512 + lane * 16);
  if constexpr (F::H == 4) f.h.x = shared4(slot + 1024 * F::Q + (half * 32 + lane) * 4);
  if constexpr (F::H == 8) f.h = shared8(slot + 1024 * F::Q + (half * 32 + lane) * 8);
  if constexpr (F::S == 8) { uint2 s = shared8(scales + row * 8); f.s.x = s.x; f.s.y = s.y; }
  if constexpr (F::S == 16) f.s = shared16(scales + row * 16);
  if constexpr (F::D) { u32 v = shared4(scales + 16 * F::S + row * 4); f.f = i & 2 ? v >> 16 : v & 0xffff; }
  return f;
}
#endif
