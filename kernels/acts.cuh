// Quantised activations as linear.cu reads them, `rows` (1, 8, 16 or 32) rows at a time; whoever has a row in registers writes it so.
//   q  codes [groups][rows/8][pair of blocks][8 rows][t] of 16 bytes, lo and hi of the one block, then of the other: a lane of the tensor cores finds its own
//      at 16 times its number, and in the registers side by side that the instruction wants (one row: [groups][pair of blocks][t])
//   d  scales [groups][rows][4 blocks]; SUPER, one scale for 256: [groups/2][rows]
//   s  sums of each block of 32 [groups][rows][4 blocks], times the scale unless SUPER
//   m  SUPER, where anybody wants them: the sums as float16 pairs [groups][rows][4]: of each sum a multiple of 32, twice two, then the rest, twice two; each exact
// Parts of `rows` rows follow each other.
#pragma once
#include "common.cuh"
struct Planes { u32* q; float *d, *s; u32* m; };

__device__ __forceinline__ u32 code_at(int g, int row, int pair, int t, int rows) {         // in 16 bytes
  return rows == 1 ? (g * 2 + pair) * 4 + t : ((g * (rows >> 3) + (row >> 3)) * 2 + pair) * 32 + (row & 7) * 4 + t;
}
// A warp has a unit of a row: 128 values, 4 of each lane, or SUPER twice that. Their codes, those of a lane side by side, and the scale of the lane's block.
// A NaN has no code: it becomes the scale, and with it every product
template <bool SUPER> __device__ __forceinline__ float quantise(const float (*v)[4], u32 (&codes)[SUPER ? 2 : 1]) {
  constexpr int H = SUPER ? 2 : 1;
  float top = 0;
#pragma unroll
  for (int i = 0; i < H; i++) top = max_nan(top, max_nan(max_nan(fabsf(v[i][0]), fabsf(v[i][1])), max_nan(fabsf(v[i][2]), fabsf(v[i][3]))));
  top = warp_max_nan<SUPER ? 32 : 8>(top);
  float inverse = top > 1e-30f ? divide(127.f, top) : 0.f;
#pragma unroll
  for (int i = 0; i < H; i++) {
    u32 c[4];
#pragma unroll
    for (int j = 0; j < 4; j++) c[j] = to_magic(__fmul_rn(v[i][j], inverse));
    codes[i] = __byte_perm(__byte_perm(c[0], c[1], 0x0040), __byte_perm(c[2], c[3], 0x0040), 0x5410);
  }
  return quotient(top, 127.f, 1 / 127.f);
}
constexpr int ONES = 0x01010101;                  // four codes times these: their sum
// A warp stores unit `unit` of a row
template <bool SUPER> __device__ __forceinline__ void store_acts(const float (*v)[4], const Planes& to, int unit, int row, int groups, int rows) {
  constexpr int H = SUPER ? 2 : 1;
  int lane = threadIdx.x & 31, r = row & (rows - 1), b = lane >> 3, t = lane & 3, half = (lane >> 2) & 1;
  size_t before = (size_t)(row - r) * groups;     // groups of rows of the parts before
  u32 codes[H];
  float s = quantise<SUPER>(v, codes);
#pragma unroll
  for (int i = 0; i < H; i++) {
    int g = unit * H + i;
    to.q[before * 32 + code_at(g, r, b >> 1, t, rows) * 4 + (b & 1) * 2 + half] = codes[i];
    float total = (float)warp_sum<8>(__dp4a((int)codes[i], ONES, 0));
    size_t e = (before + (size_t)g * rows + r) * 4;
    if ((lane & 7) == 0) to.s[e + b] = SUPER ? total : s * total;
    if (SUPER && to.m) {
      float next = __shfl_down_sync(~0u, total, 8), p = floorf(total / 32) * 32, q = floorf(next / 32) * 32;
      if (lane == 0 || lane == 16) { to.m[e + (lane >> 4)] = float2_half2(p, q); to.m[e + 2 + (lane >> 4)] = float2_half2(total - p, next - q); }
    } else if (!SUPER && (lane & 7) == 0) to.d[e + b] = s;
  }
  if (SUPER && lane == 0) to.d[before / 2 + (size_t)unit * rows + r] = s;
}

// Four columns in a row. `whole`: widths and distances are multiples of 4 and addresses of 16 bytes, so that they are one load
__device__ __forceinline__ void load_quad(float (&v)[4], const float* p, int left, bool whole) {
  if (whole && left > 0) { float4 f = loadf4(p); v[0] = f.x; v[1] = f.y; v[2] = f.z; v[3] = f.w; return; }
#pragma unroll
  for (int e = 0; e < 4; e++) v[e] = !whole && e < left ? loadf(p + e) : 0.f;
}
// 256 columns in a warp: two quads of a lane, 128 apart. Stored as one block of Q8_K, as eight of Q8_1, both or neither
__device__ __forceinline__ void store_quantized(const float (*v)[4], const Planes& a, const Planes& b, int pair, int row, int width, int part) {
  int groups = (width + 127) / 128;
  if (a.q)
#pragma unroll
    for (int h = 0; h < 2; h++) if (2 * pair + h < groups) store_acts<false>(v + h, a, 2 * pair + h, row, groups, part);
  if (b.q && 2 * pair + 1 < groups) store_acts<true>(v, b, pair, row, groups, part);
}

__device__ __forceinline__ float act_of(float g, int act) {         // the index in ops.ACTS
  float r = max_nan(g, 0.f), z = act == 1 ? g * fmaf(g * g, 0.0713548163f, 1.5957691216f) : g;
  float v = (act == 3 ? 1.f : g) * rcp_approx(1.f + exp2_approx(z * -1.4426950409f));
  return act == 2 ? r * r : v;
}
