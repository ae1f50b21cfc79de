// Attention over the paged cache, and what writes the cache.
// A layer keeps keys and values apart, [block][head][16 positions][numbers]; with scales, a head of a block is [16][codes] and then float16 [groups of 32][16].
// Rows: the query heads of a KV head, of one or more tokens: row r is token r / G, head r % G of the G that share the KV head.
//   attention_split  tensor cores; few rows, a warp has 16 positions at a time and the next ones on their way; the pieces of a long context go to different blocks
//   rope_attention   the same for steps of one token a sequence, from rows as the products left them: rope_store and attention_split in one
//   attention_tile   tensor cores; 64 or 128 rows that share keys and values in shared memory
//   exact_split, exact_tile   float32, any type of cache, any width, any architecture: attention_split and attention_tile, slower
// Scores are kept as powers of two. The order of a row's sum: a tile takes positions in blocks that begin at multiples of their length, so its rows' orders depend on their positions alone.
// Few rows have pieces, whose length follows from the layer, its plan, the GPU and the last position of the row's sequence in this step, which is the row's own where a sequence has one token.
// No order depends on other sequences, on where in the cache blocks lie, or on which block of threads is done first; the kernels' orders differ from each other.
#include "heads.cuh"

#define INFINITY_F __int_as_float(0x7f800000)
constexpr float NEVER = -1e30f, LOG2E = 1.4426950408889634f;
constexpr int F32 = 0, F16 = 1, Q8 = 2, Q4 = 3;              // types of numbers in the cache
constexpr int ROWS8 = 8;

__device__ __forceinline__ u32 row_bytes(int type, int width) {
  int whole = (width + 31) & ~31;
  return type == F32 ? 4 * width : type == F16 ? 2 * width : type == Q8 ? whole : whole / 2;
}
__device__ __forceinline__ u32 head_bytes(int type, int width) { return 16 * row_bytes(type, width) + (type >= Q8 ? (width + 31) / 32 * 32 : 0); }
__device__ __forceinline__ int first_seen(int position, int window) { return window && position >= window ? position + 1 - window : 0; }
__device__ __forceinline__ float capped(float score, float cap) { return cap * (1 - 2 / (1 + exp2f(score / cap * (2 * LOG2E)))); }   // cap * tanh(score / cap)

__device__ __forceinline__ float capped_approx(float score, float cap) { return cap - __fdividef(2 * cap, 1 + exp2_approx(score * __fdividef(2 * LOG2E, cap))); }

// ---------------------------------------------------------------- the cache
// k, v [T] rows of n_head numbers each, `pitch` floats apart -> slots. A warp takes 32 numbers of a head; grid (T, keys or values, shares of these)
__device__ __forceinline__ float away(float x) {              // to the nearest integer, halves away from zero
  float whole = truncf(x);
  return whole + (fabsf(x - whole) >= 0.5f ? copysignf(1.f, x) : 0.f);
}
// Numbers 32g + lane of a head's row, to a position of a head of a block
__device__ __forceinline__ void store_numbers(char* to, int type, int width, int position, int g, float x) {
  int lane = threadIdx.x & 31, i = g * 32 + lane; u32 stride = row_bytes(type, width); char* numbers = to + position * stride;
  if (type == F32) { if (i < width) ((float*)numbers)[i] = x; }
  else if (type == F16) { if (i < width) ((u16*)numbers)[i] = float_half(x); }
  else {
    float top = warp_max_nan(fabsf(x)), d;
    if (type == Q8) d = __fdiv_rn(top, 127.f);
    else {                                        // the first of the largest, with its sign; NaN is equal to none
      u32 tops = __ballot_sync(~0u, fabsf(x) == top);
      d = tops ? __fdiv_rn(__shfl_sync(~0u, x, __ffs(tops) - 1), -8.f) : top;
    }
    float y = __fmul_rn(x, fabsf(d) < 1.17549435e-38f ? 0.f : __fdiv_rn(1.f, d));
    int code = type == Q8 ? (int)away(y) : min(15, max(0, (int)(y + 8.5f)));
    int other = __shfl_down_sync(~0u, code, 16);
    if (type == Q8) numbers[i] = (char)code;
    else if (lane < 16) numbers[g * 16 + lane] = (char)(code | other << 4);
    if (lane == 0) ((u16*)(to + 16 * stride))[g * 16 + position] = float_half(d);
  }
}
__device__ __forceinline__ int slot_of(const int* slot_mapping) { Unwritten numbers; return load4(slot_mapping); }
template <int THREADS>
__global__ __launch_bounds__(THREADS) void kv_store(char* k, char* v, const float* k_rows, const float* v_rows, const int* slot_mapping,
                                                int n_head, int dk, int dv, int k_type, int v_type, int k_pitch, int v_pitch) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, side = blockIdx.y, width = side ? dv : dk, type = side ? v_type : k_type, groups = (width + 31) / 32;
  pdl_trigger();
  int slot = slot_of(slot_mapping + blockIdx.x);
  pdl_wait();
  const float* row = side ? v_rows + (size_t)blockIdx.x * v_pitch : k_rows + (size_t)blockIdx.x * k_pitch;
  u32 head = head_bytes(type, width);
  char* block = (side ? v : k) + (size_t)(slot >> 4) * n_head * head;
  for (int u = blockIdx.z * (THREADS / 32) + warp; u < n_head * groups; u += gridDim.z * (THREADS / 32)) {
    int h = u / groups, g = u % groups, i = g * 32 + lane;
    store_numbers(block + (size_t)h * head, type, width, slot & 15, g, i < width ? loadf(row + h * width + i) : 0.f);
  }
}
// The heads of a row of q, normalised and turned, to q_out; those of k, the same, and of v, normalised where there are weights, to the row's slot. A warp has a head; grid (T, shares of these)
template <int THREADS>
__global__ __launch_bounds__(THREADS) void rope_store(float* q_out, char* k, char* v, const float* q, const float* k_rows, const float* v_rows, const int* positions, const int* slot_mapping,
    const float* table, const float* q_norm, const float* k_norm, const float* v_norm, float eps, float v_eps, int n_head, int n_head_kv, int dk, int dv, int dim,
    int k_type, int v_type, int q_out_pitch, int q_pitch, int k_pitch, int v_pitch) {
  extern __shared__ __align__(16) float red[];                        // a head of each warp
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, head = blockIdx.y * (THREADS / 32) + warp, row = blockIdx.x;
  int side = head < n_head ? 0 : head < n_head + n_head_kv ? 1 : head < n_head + 2 * n_head_kv ? 2 : 3, width = side == 2 ? dv : dk, type = side == 2 ? v_type : k_type, slot = 0;
  pdl_trigger();
  Head<0> one;
  if (side < 3) { one.begin(side == 0 ? q_norm : side == 1 ? k_norm : v_norm, positions, table, row, width, side == 2 ? 0 : dim); slot = slot_of(slot_mapping + row); }
  pdl_wait();
  if (side == 3) return;
  if (side == 0) { float* to = q_out + (size_t)row * q_out_pitch + head * dk; one.turn(q + (size_t)row * q_pitch + head * dk, eps, [&](int d, float x) { to[d] = x; }); return; }
  int h = side == 1 ? head - n_head : head - n_head - n_head_kv; float* numbers = red + warp * max(dk, dv);
  one.turn(side == 1 ? k_rows + (size_t)row * k_pitch + h * dk : v_rows + (size_t)row * v_pitch + h * dv, side == 1 ? eps : v_eps, [&](int d, float x) { numbers[d] = x; });
  __syncwarp();
  char* to = (side == 1 ? k : v) + ((size_t)(slot >> 4) * n_head_kv + h) * head_bytes(type, width);
  for (int g = 0; g < (width + 31) / 32; g++) store_numbers(to, type, width, slot & 15, g, g * 32 + lane < width ? numbers[g * 32 + lane] : 0.f);
}
// What a block id stands for: a row of each array, one after the other. places [arrays][3]: address, bytes of a row (a multiple of 16), where it begins in the buffer.
// source and target are block ids; -1 is the buffer. Grid (arrays)
template <int THREADS>
__global__ __launch_bounds__(THREADS) void copy_block(const u64* places, char* buffer, int source, int target) {
  pdl_trigger();
  pdl_wait();
  const u64* place = places + 3 * blockIdx.x;
  char *base = (char*)*(const u64*)place, *part = buffer + place[2]; u64 bytes = place[1];
  const char* from = source < 0 ? part : base + source * bytes;
  char* to = target < 0 ? part : base + target * bytes;
  for (u64 i = 16 * threadIdx.x; i < bytes; i += 16 * THREADS) *(uint4*)(to + i) = load16(from + i);
}

// ---------------------------------------------------------------- numbers of a type
// A unit is what holds 8 numbers: those of a row from 8u on; of 4-bit codes, 4 bytes of a group of 16 bytes, whose numbers are 16 apart. halves() gives number dim(u, 2i)
// and dim(u, 2i + 1) as a pair, without the scale; pairs() gives the same of float32 numbers, four from dim(u, 0) on and four from HALF further on
__device__ __forceinline__ uint4 halves_of(float4 a, float4 b) { return make_uint4(float2_half2(a.x, a.y), float2_half2(a.z, a.w), float2_half2(b.x, b.y), float2_half2(b.z, b.w)); }
struct InOrder {                // whose units hold their numbers one after the other
  static constexpr int HALF = 4;
  static __device__ __forceinline__ int dim(int u, int e) { return 8 * u + e; }
  static __device__ __forceinline__ uint4 pairs(float4 a, float4 b) { return halves_of(a, b); }
};
struct NumF16 : InOrder {
  typedef uint4 Unit;
  static constexpr int TYPE = F16, BYTES = 16; static constexpr bool SCALED = false;
  static __device__ __forceinline__ Unit shared(u32 p) { return shared16(p); }
  static __device__ __forceinline__ void halves(const Unit& v, u32 (&h)[4]) { h[0] = v.x; h[1] = v.y; h[2] = v.z; h[3] = v.w; }
};
__device__ __forceinline__ void halves_of_bytes(u32 lo, u32 hi, u32 (&h)[4]) {       // signed bytes: 1024 + 128 + c is a float16 with c + 128 in its low bits
  lo ^= 0x80808080; hi ^= 0x80808080;
  h[0] = half2_add(__byte_perm(lo, 0x64646464, 0x4140), 0xe480e480); h[1] = half2_add(__byte_perm(lo, 0x64646464, 0x4342), 0xe480e480);
  h[2] = half2_add(__byte_perm(hi, 0x64646464, 0x4140), 0xe480e480); h[3] = half2_add(__byte_perm(hi, 0x64646464, 0x4342), 0xe480e480);
}
struct NumQ8 : InOrder {
  typedef uint2 Unit;
  static constexpr int TYPE = Q8, BYTES = 8; static constexpr bool SCALED = true;
  static __device__ __forceinline__ Unit shared(u32 p) { return shared8(p); }
  static __device__ __forceinline__ void halves(const Unit& v, u32 (&h)[4]) { halves_of_bytes(v.x, v.y, h); }
};
struct NumQ4 {
  typedef u32 Unit;
  static constexpr int TYPE = Q4, BYTES = 4, HALF = 16; static constexpr bool SCALED = true;
  static __device__ __forceinline__ int dim(int u, int e) { return 32 * (u >> 2) + 4 * (u & 3) + ((e >> 2) + 2 * (e & 1)) + 16 * (e >> 1 & 1); }
  static __device__ __forceinline__ uint4 pairs(float4 a, float4 b) { return halves_of(make_float4(a.x, a.z, b.x, b.z), make_float4(a.y, a.w, b.y, b.w)); }
  static __device__ __forceinline__ Unit shared(u32 p) { return shared4(p); }
  static __device__ __forceinline__ void halves(const Unit& v, u32 (&h)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) h[i] = half2_add((v >> 4 * i & 0x000f000f) | 0x64006400, 0xe408e408);     // 1024 + 8 + c
  }
};

// ---------------------------------------------------------------- what the kernels for few rows share
// A sequence's part of a step, and the rows of it that this block computes: blockIdx.x is the KV head and the group of 8 rows, blockIdx.z the sequence.
// `piece`: positions of a piece, `least` (the plan's) or in long contexts a larger multiple of 32, so that there are at most `most` (of the GPU and the layer); it is the same for all rows of
// the sequence and follows from its last position, not from each row's
// The step's arrays come from the host: no kernel writes them, and they are read before the wait
struct Few {
  int first, tokens, len, head, G, row0, rows, piece, first_split, num_splits; float one_of_G;
  __device__ __forceinline__ Few(const int* query_start_loc, const int* seq_lens, int few, int n_head, int n_head_kv, int window, int least, int most) {
    Unwritten numbers;
    int groups = gridDim.x / n_head_kv, s = blockIdx.z;
    len = load4(seq_lens + s);
    first = query_start_loc ? (int)load4(query_start_loc + s) : s;
    tokens = query_start_loc ? (int)load4(query_start_loc + s + 1) - first : 1;
    G = n_head / n_head_kv; head = blockIdx.x / groups; row0 = blockIdx.x % groups * ROWS8; one_of_G = __fdividef(1.f, (float)G);
    rows = tokens > few || len <= 0 ? 0 : min(ROWS8, tokens * G - row0);
    int lo = first_seen(len - tokens, window), span = window ? min(len, window) : len;
    piece = max(least, (span + 32 * most - 1) / (32 * most) * 32); first_split = lo / piece;
    num_splits = rows > 0 ? (len - 1) / piece - first_split + 1 : 0;
  }
  __device__ __forceinline__ int token(int r) const { return (int)((row0 + r + 0.5f) * one_of_G); }            // (row0 + r) / G without a division
  __device__ __forceinline__ int position(int r) const { return len - tokens + min(token(r), tokens - 1); }
  __device__ __forceinline__ int query_head(int r) const { return head * G + row0 + r - token(r) * G; }
  __device__ __forceinline__ size_t out_row(int r, int n_head) const { return (size_t)(first + token(r)) * n_head + query_head(r); }
};
// x / sum, with a sink in the sum
__device__ __forceinline__ float share(float x, float top, float sum, const float* sinks, int head) {
  if (sinks) {
    float z = loadf(sinks + head) * LOG2E, t = fmaxf(top, z), fix = exp2f(top - t);
    x *= fix; sum = sum * fix + exp2f(z - t);
  }
  return sum > 0 ? __fdividef(x, sum) : 0.f;
}
// What a warp has of a row: its maximum, the sum of its weights, and of the weighted sum two numbers a lane, 64c + lane and 32 further on
struct RowPart { float top, sum, x[2]; };
// Where pieces leave parts of rows for whoever puts them together: [.., split][8][c] of (maximum, sum), and [.., split][8][c][32 lanes][2]
struct Partials {
  float2 *maxima, *numbers; int units;                                 // of this lane
  __device__ __forceinline__ Partials(float* ml, float* sums, int max_splits, int dv) : units((dv + 63) >> 6) {
    size_t at = ((size_t)blockIdx.z * gridDim.x + blockIdx.x) * max_splits * ROWS8 * units;
    maxima = (float2*)ml + at; numbers = (float2*)sums + at * 32 + (threadIdx.x & 31);
  }
  __device__ __forceinline__ void put(int split, int unit, const RowPart& part) const {       // unit: r units + c
    int at = split * ROWS8 * units + unit;
    numbers[at * 32] = make_float2(part.x[0], part.x[1]);
    if ((threadIdx.x & 31) == 0) maxima[at] = make_float2(part.top, part.sum);
  }
  // All pieces (at most 32), added up in their order. Lane p has the maximum and the sum of piece p
  __device__ __forceinline__ RowPart all(int unit, int num_splits) const {
    int lane = threadIdx.x & 31, step = ROWS8 * units; uint2 v = make_uint2(__float_as_uint(NEVER), 0); float weights = 0; RowPart whole{NEVER, 0, {0, 0}};
    const float2* from = numbers + unit * 32;
    if (lane < num_splits) v = load8(maxima + lane * step + unit);
#pragma unroll 1
    for (int p0 = 0; p0 < num_splits; p0 += 16, from += 16 * step * 32) {
      uint2 part[16];
#pragma unroll
      for (int j = 0; j < 16; j++) if (p0 + (j & ~3) < num_splits) part[j] = load8(from + min(j, num_splits - 1 - p0) * step * 32);      // all on their way at once, while the weights are computed
      if (p0 == 0) {
        whole.top = warp_max(__uint_as_float(v.x)); weights = exp2_approx(__uint_as_float(v.x) - whole.top); whole.sum = warp_sum(weights * __uint_as_float(v.y));
      }
#pragma unroll
      for (int j = 0; j < 16; j++) if (p0 + (j & ~3) < num_splits) {
        float weight = __shfl_sync(~0u, weights, p0 + j);             // of pieces that are none it is 0
        whole.x[0] = fmaf(weight, __uint_as_float(part[j].x), whole.x[0]); whole.x[1] = fmaf(weight, __uint_as_float(part[j].y), whole.x[1]);
      }
    }
    return whole;
  }
};
// x times what a row is shared out by, to where it belongs
__device__ __forceinline__ void give(const Few& w, int r, int d0, const RowPart& part, float* out, int dv, const float* sinks, int n_head) {
  float one = share(1.f, part.top, part.sum, sinks, w.query_head(r)), *row = out + w.out_row(r, n_head) * dv;
#pragma unroll
  for (int i = 0; i < 2; i++) if (d0 + 32 * i < dv) row[d0 + 32 * i] = part.x[i] * one;
}
__device__ __forceinline__ int row_of(int unit, int units) { return units == 1 ? unit : units == 2 ? unit >> 1 : unit / units; }
// P parts of each row in shared memory, [part][8][pitch] with their maxima and sums, perhaps one more, the newest token alone, become the row's piece, and that goes where it has to.
// A warp has 64 numbers of a row
template <int P>
__device__ __forceinline__ void settle(const Few& w, const Partials& to, const float* parts, int pitch, const float (*tops)[ROWS8], const float (*totals)[ROWS8], const u16* newest,
                                       int split, float* out, int dv, const float* sinks, int n_head) {
  for (int unit = threadIdx.x >> 5; unit < w.rows * to.units; unit += blockDim.x >> 5) {
    int r = row_of(unit, to.units), d0 = (unit - r * to.units) * 64 + (threadIdx.x & 31);
    RowPart part{newest ? tops[P][r] : NEVER, 0, {0, 0}}; float fix[P + 1];
#pragma unroll
    for (int p = 0; p < P; p++) part.top = fmaxf(part.top, tops[p][r]);
#pragma unroll
    for (int p = 0; p < P; p++) { fix[p] = exp2_approx(tops[p][r] - part.top); part.sum += totals[p][r] * fix[p]; }
    if (newest) { fix[P] = exp2_approx(tops[P][r] - part.top); part.sum += fix[P]; }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      int d = d0 + 32 * i;
      if (d < dv) {
#pragma unroll
        for (int p = 0; p < P; p++) part.x[i] += fix[p] * parts[(p * ROWS8 + r) * pitch + d];
        if (newest) part.x[i] += fix[P] * half_float(newest[d]);
      }
    }
    if (w.num_splits > 1) to.put(split, unit, part);
    else give(w, r, d0, part, out, dv, sinks, n_head);
  }
}
// Whoever comes last of the blocks that share a sequence's pieces puts them together
__device__ __forceinline__ void together(const Few& w, const Partials& from, int* counters, float* out, int dv, const float* sinks, int n_head) {
  __shared__ int last;
  __syncthreads();
  int* counter = counters + blockIdx.z * gridDim.x + blockIdx.x;
  if (threadIdx.x == 0) { fence(); last = atomicAdd(counter, 1) == min((int)gridDim.y, w.num_splits) - 1; fence(); }      // for the whole block: it has just met, and meets again
  __syncthreads();
  if (!last) return;
  for (int unit = threadIdx.x >> 5; unit < w.rows * from.units; unit += blockDim.x >> 5) {
    int r = row_of(unit, from.units);
    give(w, r, (unit - r * from.units) * 64 + (threadIdx.x & 31), from.all(unit, w.num_splits), out, dv, sinks, n_head);
  }
  if (threadIdx.x == 0) *counter = 0;
}
// Rows of a sequence of no positions (the step's last rows may stand for nothing) are zeros
__device__ __forceinline__ void no_rows(const Few& w, float* out, int n_head, int dv) {
  if (w.len <= 0 && w.tokens == 1 && blockIdx.y == 0)
#pragma unroll 1
    for (int r = threadIdx.x >> 5; r < min(ROWS8, w.G - w.row0); r += blockDim.x >> 5)
#pragma unroll 1
      for (int d = threadIdx.x & 31; d < dv; d += 32) out[w.out_row(r, n_head) * dv + d] = 0.f;
}

// ---------------------------------------------------------------- few rows, tensor cores
#if __CUDA_ARCH__ >= 800
// 16 positions of keys on their way to a place in shared memory, where each lane finds what it asked for: lane 4g + t units 4c + t of positions g and g + 8, as [c][2][lane].
// Then the scales, as in the cache; these every lane reads
template <class T, int D> struct Keys {
  static __device__ __forceinline__ u32 numbers(int width) { return (width + 31) / 32 * 64 * T::BYTES; }
  static __device__ __forceinline__ u32 bytes(int width) { return numbers(width) + (T::SCALED ? (width + 31) / 32 * 32 : 0); }
  static __device__ __forceinline__ void fetch(u32 to, const char* head, int width, int g, int t, int hi) {
    u32 stride = row_bytes(T::TYPE, width), lane = 4 * g + t, own = to + lane * T::BYTES, in[2] = {g < hi ? T::BYTES : 0u, g + 8 < hi ? T::BYTES : 0u};
    const char* row[2] = {head + g * stride + t * T::BYTES, head + (g + 8) * stride + t * T::BYTES};
#pragma unroll
    for (int c = 0; c < D / 32; c++)
      if (32 * c < width)
#pragma unroll
        for (int h = 0; h < 2; h++) copy_zero<T::BYTES>(own + (c * 2 + h) * 32 * T::BYTES, row[h] + 4 * c * T::BYTES, T::SCALED || 32 * c + 8 * t < width ? in[h] : 0);
    if constexpr (T::SCALED)
#pragma unroll
      for (int i = 0; i < D / 128; i++)
        if (128 * i + 4 * lane < (width + 31) / 32 * 32) copy<4>(to + numbers(width) + 128 * i + 4 * lane, head + 16 * stride + 128 * i + 4 * lane);
  }
  static __device__ __forceinline__ typename T::Unit unit(u32 from, int c, int h, int lane) { return T::shared(from + ((c * 2 + h) * 32 + lane) * T::BYTES); }
};
// The same of values: lane 4g + t has units 8c + g of positions 2t, 2t + 1, 2t + 8, 2t + 9, [c][4][lane]; zeros where nobody looks (stale bytes may be anything)
template <class T, int D> struct Values {
  static __device__ __forceinline__ u32 numbers(int width) { return (width + 63) / 64 * 128 * T::BYTES; }
  static __device__ __forceinline__ u32 bytes(int width) { return numbers(width) + (T::SCALED ? (width + 31) / 32 * 32 : 0); }
  static __device__ __forceinline__ void fetch(u32 to, const char* head, int width, int g, int t, int lo, int hi) {
    u32 stride = row_bytes(T::TYPE, width), lane = 4 * g + t, own = to + lane * T::BYTES, in[4]; const char *row0 = head + 2 * t * stride + g * T::BYTES, *row8 = row0 + 8 * stride;
#pragma unroll
    for (int j = 0; j < 4; j++) { int p = 2 * t + (j & 1) + 8 * (j >> 1); in[j] = p >= lo && p < hi ? T::BYTES : 0; }
#pragma unroll
    for (int c = 0; c < D / 64; c++)
      if (64 * c < width)
#pragma unroll
        for (int j = 0; j < 4; j++)
          copy_zero<T::BYTES>(own + (c * 4 + j) * 32 * T::BYTES, (j < 2 ? row0 : row8) + (j & 1) * stride + 8 * c * T::BYTES,
                              (T::SCALED ? 64 * c + 32 * (g >> 2) : 64 * c + 8 * g) < width ? in[j] : 0);
    if constexpr (T::SCALED)
#pragma unroll
      for (int i = 0; i < D / 128; i++)
        if (128 * i + 4 * lane < (width + 31) / 32 * 32) copy<4>(to + numbers(width) + 128 * i + 4 * lane, head + 16 * stride + 128 * i + 4 * lane);
  }
  static __device__ __forceinline__ typename T::Unit unit(u32 from, int c, int j, int lane) { return T::shared(from + ((c * 4 + j) * 32 + lane) * T::BYTES); }
  // the scales of positions 2t and 2t + 1 (+ 8 h) of group 2c + (g >> 2)
  static __device__ __forceinline__ u32 scales(u32 from, int width, int c, int h, int g, int t, int lo, int hi) {
    int group = 2 * c + (g >> 2), p = 2 * t + 8 * h;
    u32 v = 32 * group < width ? shared4(from + numbers(width) + (group * 16 + p) * 2) : 0;
    return (p >= lo && p < hi ? v & 0xffff : 0) | (p + 1 >= lo && p + 1 < hi ? v & 0xffff0000 : 0);
  }
};
// What both kernels for few rows are told
struct Paged {
  float* out; const char *k, *v; int* counters; float *ml, *sums; const int *seq_lens, *block_table; const float* sinks; int max_blocks, max_splits, least, most, n_head, n_head_kv, dk, dv, window; float scale, softcap;
};
// Queries that have been turned
struct Turned { static constexpr bool RAW = false; const float* q; const int* query_start_loc; int pitch, few; };
// Queries, keys and values of one new token of each sequence as the products left them: normalised, turned and stored here
struct Raw { static constexpr bool RAW = true; const float *q, *k, *v; const int *positions, *slot_mapping; const float *table, *q_norm, *k_norm, *v_norm; float eps, v_eps; int dim, q_pitch, k_pitch, v_pitch; };

// Scores S^T = K Q^T and sums O^T = V^T P^T of 8 rows: positions, and then numbers of a value, are the 16 rows of the instruction, the 8 query rows its columns.
// Warp w takes blocks w, w + WARPS, ... of a piece, STAGES of them on their way, over the ends of pieces. Blocks of the cache that no kernel of this step writes are asked for before the wait.
// WHOLE: heads are D wide. Raw queries: the newest position is not read from the cache, it is a part of its own (settle), so that a block is asked for after the wait only for want of places.
template <class KT, class VT, int D, bool WHOLE, int WARPS, int STAGES, class Queries>
__device__ __forceinline__ void few_rows(const Paged& a, const Queries& in) {
  constexpr int C = D / 32; constexpr bool OWN = Queries::RAW;
  extern __shared__ __align__(16) float red[];                        // [WARPS][8 rows][dv + 1]; then the warps' rings; then, if they are made here, 8 queries, a key and a value in float16
  __shared__ float tops[WARPS + 1][ROWS8], totals[WARPS + 1][ROWS8];
  pdl_trigger();
  const int dk = WHOLE ? D : a.dk, dv = WHOLE ? D : a.dv, n_head = a.n_head, n_head_kv = a.n_head_kv, window = a.window;
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int* starts = nullptr; int few = 1;
  if constexpr (!OWN) { starts = in.query_start_loc; few = in.few; }
  Few w(starts, a.seq_lens, few, n_head, n_head_kv, window, a.least, a.most);
  int split = blockIdx.y; bool here = split < w.num_splits;
  if (!here && blockIdx.y) { pdl_leave(); return; }                   // blocks y = 0 wait for all
  const int* table = a.block_table + (size_t)blockIdx.z * a.max_blocks;
  // -- the ring: a warp's blocks are asked for in the order in which it will multiply them, over the ends of pieces
  u32 k_head = head_bytes(KT::TYPE, dk), v_head = head_bytes(VT::TYPE, dv), k_bytes = Keys<KT, D>::bytes(dk), stage_bytes = k_bytes + Values<VT, D>::bytes(dv);
  u32 rings = shared_address(red) + WARPS * ROWS8 * (dv + 1) * 4, ring = rings + warp * STAGES * stage_bytes, slot = ring, used = ring, end = ring + STAGES * stage_bytes;
  const char *k_at = a.k + (size_t)w.head * k_head, *v_at = a.v + (size_t)w.head * v_head;
  int window_lo = first_seen(w.len - w.tokens, window);
  struct Part { int lo, hi, base, i, end; } part, next;               // positions of a piece; the warp's blocks of it are base + WARPS i
  auto part_of = [&](int s) {
    int start = (w.first_split + s) * w.piece, base = start / 16 + warp; Part p;
    p.lo = max(start, window_lo); p.hi = min(start + w.piece, w.len - OWN); p.base = base;
    p.i = (p.lo / 16 - base + WARPS - 1) / WARPS; p.end = max(p.i, ((p.hi + 15) / 16 - base + WARPS - 1) / WARPS);
    return p;
  };
  int from, id, later, coming = split;                                // the ids of 32 of the warp's blocks from `from` on; of the first of the piece after
  auto ids = [&](const Part& p, int i) { Unwritten numbers; return i + lane < p.end ? (int)load4(table + p.base + WARPS * (i + lane)) : 0; };
  auto ids_after = [&]() { int s = coming + gridDim.y; if (s < w.num_splits) { Part p = part_of(s); later = ids(p, p.i); } };
  auto skip = [&]() {                                                 // to the next piece that has blocks for this warp
    while (next.i == next.end && (coming += gridDim.y) < w.num_splits) { next = part_of(coming); from = next.i; id = later; ids_after(); }
  };
  auto fetch = [&]() {
    if (next.i < next.end) {
      if (next.i - from == 32) { from = next.i; id = ids(next, from); }
      size_t block = (size_t)__shfl_sync(~0u, id, next.i - from) * n_head_kv; int p = (next.base + WARPS * next.i) * 16;
      {
        Unwritten bytes;                                              // blocks that the step does not write; those that it does are asked for after the wait
        Keys<KT, D>::fetch(slot, k_at + block * k_head, dk, g, t, OWN ? next.hi - p : 16);
        Values<VT, D>::fetch(slot + k_bytes, v_at + block * v_head, dv, g, t, next.lo - p, next.hi - p);
      }
      next.i++; skip();
    }
    copy_commit();
    slot += stage_bytes; if (slot == end) slot = ring;
  };
  int ahead = 0;
  if (here) {
    part = next = part_of(split); from = next.i; id = ids(next, from); ids_after(); skip();
#pragma unroll 1
    for (; ahead < STAGES && next.i < next.end && (OWN || (next.base + WARPS * next.i) * 16 + 16 <= w.len - w.tokens); ahead++) fetch();
  }
  // -- the wait, and the rows that it is for
  float4 raw[C][2]; uint4 query[C];                                   // the queries of lane 4g + t: row g, numbers of unit 4c + t, as halves() orders those of keys
  int r = min(g, w.rows - 1);                                         // this lane's row of queries; rows that are none do not count
  int last_seen[2] = {w.position(2 * t), w.position(2 * t + 1)};      // of rows 2t and 2t + 1
  u32 queries_at = 0;                                                  // or where they are
  u16* newest = nullptr;                                              // the newest key and value, where this block has the last piece
  if constexpr (!OWN) {
    const float* row = in.q + (size_t)(w.first + (w.row0 + r) / w.G) * in.pitch + w.query_head(r) * dk;
    if (here) prefetch(row);                                          // so that the address is known before the wait
    pdl_wait();
    if (!here) { no_rows(w, a.out, n_head, dv); return; }
#pragma unroll
    for (int c = 0; c < C; c++)
#pragma unroll
      for (int h = 0; h < 2; h++) { int d = KT::dim(4 * c + t, 0) + KT::HALF * h; raw[c][h] = d < dk ? loadf4(row + d) : make_float4(0, 0, 0, 0); }
#pragma unroll 1
    for (; ahead < STAGES; ahead++) fetch();
#pragma unroll
    for (int c = 0; c < C; c++) query[c] = KT::pairs(raw[c][0], raw[c][1]);
  }
  // -- raw rows: queries, turned, go to shared memory; so do the newest key and value, and to the cache
  else {
    u16 *queries = (u16*)red + (rings - shared_address(red) + WARPS * STAGES * stage_bytes) / 2, *fresh = queries + ROWS8 * (D + 32);
    bool holds = here && (w.num_splits - 1) % (int)gridDim.y == split; int tasks = here ? w.rows + 2 * holds : 0, task = warp, side; Head<D> one; const float* from; u16* place;
    auto begin = [&]() {
      side = task < w.rows ? 0 : 1 + task - w.rows;
      one.begin(side == 0 ? in.q_norm : side == 1 ? in.k_norm : in.v_norm, in.positions, in.table, w.first, D, side == 2 ? 0 : in.dim);
      from = side == 0 ? in.q + (size_t)w.first * in.q_pitch + w.query_head(task) * D : side == 1 ? in.k + (size_t)w.first * in.k_pitch + w.head * D : in.v + (size_t)w.first * in.v_pitch + w.head * D;
      int to = slot_of(in.slot_mapping + w.first);
      place = (u16*)((side == 1 ? a.k : a.v) + ((size_t)(to >> 4) * n_head_kv + w.head) * k_head) + (to & 15) * D;
    };
    if (task < tasks) { begin(); prefetch(from); }
    pdl_wait();
    if (!here) { no_rows(w, a.out, n_head, dv); return; }
#pragma unroll 1
    while (task < tasks) {
      u16* to = side ? fresh + (side - 1) * D : queries + task * (D + 32);
      bool stored = side && w.row0 == 0;
      one.turn(from, side == 2 ? in.v_eps : in.eps, [&](int d, float x) { u16 h = float_half(x); to[d] = h; if (stored) place[d] = h; });
      if ((task += WARPS) < tasks) begin();
    }
#pragma unroll 1
    for (; ahead < STAGES; ahead++) copy_commit();
    __syncthreads();
    queries_at = shared_address(queries) + r * (2 * D + 64) + t * 16;
    if (holds) {                                                      // a warp has a row
      for (int row = warp; row < w.rows; row += WARPS) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < D / 64; i++) {
          float2 x = half2_float2(((u32*)(queries + row * (D + 32)))[lane + 32 * i]), y = half2_float2(((u32*)fresh)[lane + 32 * i]);
          sum = fmaf(x.x, y.x, fmaf(x.y, y.y, sum));
        }
        float z = warp_sum(sum) * a.scale;
        if (a.softcap != 0) z = capped_approx(z, a.softcap);
        if (lane == 0) tops[WARPS][row] = z * LOG2E;
      }
      newest = fresh + D;
    }
  }
  // -- a block after the other: scores, weights, sums; at the end of a piece the warps' sums meet
  const float scale = a.scale, softcap = a.softcap;
  for (bool again = false; split < w.num_splits; split += gridDim.y, again = true) {
    if (again) part = part_of(split);
    float o[D / 16][4] = {}, m[2] = {NEVER, NEVER}, l[2] = {0, 0};
    for (; part.i < part.end; part.i++) {
      int at0 = (part.base + WARPS * part.i) * 16; u32 values = used + k_bytes;
      copy_wait<STAGES - 1>();
      __syncwarp();
      float s[2][4] = {};
#pragma unroll
      for (int c = 0; c < C; c++)
        if (32 * c < dk) {
          u32 x[4], y[4]; uint4 qv; float sum[4] = {};
          if constexpr (OWN) qv = shared16(queries_at + c * 64); else qv = query[c];
          KT::halves(Keys<KT, D>::unit(used, c, 0, lane), x); KT::halves(Keys<KT, D>::unit(used, c, 1, lane), y);
          float (&to)[4] = KT::SCALED ? sum : s[c & 1];
          mma_16816_f16(to, x[0], y[0], x[1], y[1], qv.x, qv.y);
          mma_16816_f16(to, x[2], y[2], x[3], y[3], qv.z, qv.w);
          if constexpr (KT::SCALED) {
            u32 scales = used + Keys<KT, D>::numbers(dk) + (c * 16 + g) * 2; float d0 = half_float(shared2(scales)), d1 = half_float(shared2(scales + 16));
            s[0][0] += d0 * sum[0]; s[0][1] += d0 * sum[1]; s[0][2] += d1 * sum[2]; s[0][3] += d1 * sum[3];
          }
        }
      float p[4], high[2] = {NEVER, NEVER}, fix[2];
#pragma unroll
      for (int e = 0; e < 4; e++) {
        int at = at0 + g + 8 * (e >> 1), end = last_seen[e & 1]; float z = (s[0][e] + s[1][e]) * scale;
        if (softcap != 0) z = capped_approx(z, softcap);
        p[e] = at <= end - OWN && at >= first_seen(end, window) ? z * LOG2E : -INFINITY_F;
        high[e & 1] = fmaxf(high[e & 1], p[e]);
      }
#pragma unroll
      for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int x = 4; x < 32; x *= 2) high[h] = fmaxf(high[h], __shfl_xor_sync(~0u, high[h], x));
        high[h] = fmaxf(high[h], m[h]); fix[h] = exp2_approx(m[h] - high[h]); m[h] = high[h];
        p[h] = exp2_approx(p[h] - m[h]); p[h + 2] = exp2_approx(p[h + 2] - m[h]);
        l[h] = l[h] * fix[h] + (p[h] + p[h + 2]);
      }
#pragma unroll
      for (int d = 0; d < D / 16; d++) { o[d][0] *= fix[0]; o[d][1] *= fix[1]; o[d][2] *= fix[0]; o[d][3] *= fix[1]; }
      u32 weight[2], both[2] = {float2_half2(p[0], p[1]), float2_half2(p[2], p[3])};                 // P, transposed: row g, positions 2t, 2t + 1 (+ 8)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        u32 x = __shfl_sync(~0u, both[h], 8 * t + (g >> 1)), y = __shfl_sync(~0u, both[h], 8 * t + 4 + (g >> 1));
        weight[h] = __byte_perm(x, y, g & 1 ? 0x7632 : 0x5410);
      }
#pragma unroll
      for (int c = 0; c < D / 64; c++)
        if (64 * c < dv) {
          u32 x[4][4], d[2] = {};
#pragma unroll
          for (int j = 0; j < 4; j++) VT::halves(Values<VT, D>::unit(values, c, j, lane), x[j]);
          if constexpr (VT::SCALED)
#pragma unroll
            for (int h = 0; h < 2; h++) d[h] = Values<VT, D>::scales(values, dv, c, h, g, t, part.lo - at0, part.hi - at0);
#pragma unroll
          for (int e = 0; e < 4; e++) {
            u32 a0 = __byte_perm(x[0][e], x[1][e], 0x5410), a1 = __byte_perm(x[0][e], x[1][e], 0x7632), a2 = __byte_perm(x[2][e], x[3][e], 0x5410), a3 = __byte_perm(x[2][e], x[3][e], 0x7632);
            if constexpr (VT::SCALED) { a0 = half2_mul(a0, d[0]); a1 = half2_mul(a1, d[0]); a2 = half2_mul(a2, d[1]); a3 = half2_mul(a3, d[1]); }
            mma_16816_f16(o[4 * c + e], a0, a1, a2, a3, weight[0], weight[1]);
          }
        }
      __syncwarp();                                                   // all lanes have read the scales
      used += stage_bytes; if (used == end) used = ring;
      fetch();
    }
    if (again) __syncthreads();                                       // the sums of the piece before are read
    float* sums_at = red + warp * ROWS8 * (dv + 1);
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
      for (int x = 4; x < 32; x *= 2) l[h] += __shfl_xor_sync(~0u, l[h], x);
      if (g == 0) { tops[warp][2 * t + h] = m[h]; totals[warp][2 * t + h] = l[h]; }
      if (2 * t + h < w.rows)
#pragma unroll
        for (int d = 0; d < D / 16; d++) {
          int d0 = VT::dim(8 * (d >> 2) + g, 2 * (d & 3)), d1 = VT::dim(8 * (d >> 2) + g, 2 * (d & 3) + 1); float* to = sums_at + (2 * t + h) * (dv + 1);
          if (d0 < dv) to[d0] = o[d][h];
          if (d1 < dv) to[d1] = o[d][h + 2];
        }
    }
    __syncthreads();
    settle<WARPS>(w, Partials(a.ml, a.sums, a.max_splits, dv), red, dv + 1, tops, totals, split == w.num_splits - 1 ? newest : nullptr, split, a.out, dv, a.sinks, n_head);
  }
  copy_wait<0>();
  if (w.num_splits > 1) together(w, Partials(a.ml, a.sums, a.max_splits, dv), a.counters, a.out, dv, a.sinks, n_head);
}
#endif
template <class KT, class VT, int D, bool WHOLE, int WARPS, int STAGES>
__global__ __launch_bounds__(WARPS * 32, (D > 128 || WHOLE && D == 128 ? 8 : 12) / WARPS) void attention_split(float* out, const float* q, const char* k, const char* v, int* counters, float* ml, float* sums,
    const int* query_start_loc, const int* seq_lens, const int* block_table, const float* sinks, int max_blocks, int max_splits, int few, int least, int most, int q_pitch,
    int n_head, int n_head_kv, int dk, int dv, int window, float scale, float softcap) {
#if __CUDA_ARCH__ >= 800
  Paged a{out, k, v, counters, ml, sums, seq_lens, block_table, sinks, max_blocks, max_splits, least, most, n_head, n_head_kv, dk, dv, window, scale, softcap};
  few_rows<KT, VT, D, WHOLE, WARPS, STAGES>(a, Turned{q, query_start_loc, q_pitch, few});
#endif
}
// The same for a step in which every sequence has one token, with rope_store in front of it: one launch for two. Heads of D, a float16 cache
template <int D, int WARPS, int STAGES>
__global__ __launch_bounds__(WARPS * 32, 1) void rope_attention(float* out, char* k, char* v, const float* q, const float* k_rows, const float* v_rows, const int* positions,
    const int* slot_mapping, const float* table, const float* q_norm, const float* k_norm, const float* v_norm, float eps, float v_eps, int dim, int q_pitch, int k_pitch, int v_pitch,
    int* counters, float* ml, float* sums, const int* seq_lens, const int* block_table, const float* sinks, int max_blocks, int max_splits, int least, int most,
    int n_head, int n_head_kv, int window, float scale, float softcap) {
#if __CUDA_ARCH__ >= 800
  Paged a{out, k, v, counters, ml, sums, seq_lens, block_table, sinks, max_blocks, max_splits, least, most, n_head, n_head_kv, D, D, window, scale, softcap};
  few_rows<NumF16, NumF16, D, true, WARPS, STAGES>(a, Raw{q, k_rows, v_rows, positions, slot_mapping, table, q_norm, k_norm, v_norm, eps, v_eps, dim, q_pitch, k_pitch, v_pitch});
#endif
}

// ---------------------------------------------------------------- many rows, tensor cores
// A tile: tokens [from, from + tokens) of a sequence; blockIdx.x is the KV head and the group of BM rows, blockIdx.y the tile. tiles [..][2]: sequence (-1: none), from
struct Tile {
  int first, tokens, len, head, G, row0, rows, position0, lo, hi, sequence;
  __device__ __forceinline__ Tile(const int* tiles, const int* query_start_loc, const int* seq_lens, int most, int bm, int n_head, int n_head_kv, int window) {
    int groups = gridDim.x / n_head_kv;
    sequence = load4(tiles + 2 * blockIdx.y); rows = 0;
    if (sequence < 0) return;
    int from = load4(tiles + 2 * blockIdx.y + 1), begin = load4(query_start_loc + sequence), n = (int)load4(query_start_loc + sequence + 1) - begin;
    len = load4(seq_lens + sequence); first = begin + from; tokens = min(most, n - from); position0 = len - n + from;
    G = n_head / n_head_kv; head = blockIdx.x / groups; row0 = blockIdx.x % groups * bm; rows = min(bm, tokens * G - row0);
    if (rows > 0) { lo = first_seen(position0 + row0 / G, window); hi = position0 + (row0 + rows - 1) / G + 1; }
  }
  __device__ __forceinline__ int position(int r) const { return position0 + (row0 + min(r, rows - 1)) / G; }
  __device__ __forceinline__ size_t out_row(int r, int n_head) const { return (size_t)(first + (row0 + r) / G) * n_head + head * G + (row0 + r) % G; }
  __device__ __forceinline__ int query_head(int r) const { return head * G + (row0 + r) % G; }
};
#if __CUDA_ARCH__ >= 800
// Unit u of row `row` in shared memory, rows of D float16: 8 neighbouring rows of a unit lie in different banks
template <int D> __device__ __forceinline__ u32 swizzled(int row, int u) { return row * (2 * D) + ((u ^ (row & 7)) << 4); }
// BN positions from j0 on, a multiple of 16, into shared memory as float16; zeros outside lo..hi-1 and past the width. ids: their blocks. A thread has a unit of every STEPth position
template <int D, int BN> struct Fill {
  static constexpr int U = D / 8, STEP = 128 / U, N = BN / STEP, SOME = 4;
  u32 to, stride; const char* base; u32 bytes; int n_head_kv, head, j0, lo, hi, u, row0; bool wide;
  __device__ __forceinline__ const char* head_of(const int (&ids)[BN / 16], int i) const { return base + ((size_t)ids[i * STEP / 16] * n_head_kv + head) * bytes; }
  __device__ __forceinline__ bool in(int i) const { int p = j0 + row0 + i * STEP; return wide && p >= lo && p < hi; }
  __device__ __forceinline__ void numbers(const int (&ids)[BN / 16]) const {
#pragma unroll
    for (int i = 0; i < N; i++) { int row = row0 + i * STEP; copy16_zero(to + swizzled<D>(row, u), head_of(ids, i) + (row & 15) * stride + 16 * u, in(i) ? 16 : 0); }
  }
  template <int TYPE> __device__ __forceinline__ void codes(const int (&ids)[BN / 16]) const {
#pragma unroll
    for (int first = 0; first < N; first += SOME) {
      uint2 c[SOME]; u32 d[SOME];
#pragma unroll
      for (int j = 0; j < SOME; j++) {                                // some loads at once
        int row = row0 + (first + j) * STEP; const char* h = head_of(ids, first + j); bool is = in(first + j);
        c[j] = load8(h + (is ? (row & 15) * stride + (TYPE == Q8 ? 8 * u : (u >> 2) * 16 + 8 * (u & 1)) : 0));
        d[j] = load2(h + 16 * stride + (is ? ((u >> 2) * 16 + (row & 15)) * 2 : 0)); d[j] = is ? d[j] | d[j] << 16 : 0;
      }
#pragma unroll
      for (int j = 0; j < SOME; j++) {
        u32 x[4];
        if (TYPE == Q8) halves_of_bytes(c[j].x, c[j].y, x);
        else {
          int up = 2 * (u & 2); u32 lo4 = c[j].x >> up & 0x0f0f0f0f, hi4 = c[j].y >> up & 0x0f0f0f0f;
          x[0] = half2_add(__byte_perm(lo4, 0x64646464, 0x4140), 0xe408e408); x[1] = half2_add(__byte_perm(lo4, 0x64646464, 0x4342), 0xe408e408);
          x[2] = half2_add(__byte_perm(hi4, 0x64646464, 0x4140), 0xe408e408); x[3] = half2_add(__byte_perm(hi4, 0x64646464, 0x4342), 0xe408e408);
        }
        store_shared16(to + swizzled<D>(row0 + (first + j) * STEP, u), make_uint4(half2_mul(x[0], d[j]), half2_mul(x[1], d[j]), half2_mul(x[2], d[j]), half2_mul(x[3], d[j])));
      }
    }
  }
};
template <int D, int BN, bool CODES>
__device__ __forceinline__ void fill(u32 to, const char* base, int type, int width, int n_head_kv, int head, const int (&ids)[BN / 16], int j0, int lo, int hi) {
  Fill<D, BN> f; f.u = threadIdx.x % f.U; f.row0 = threadIdx.x / f.U;
  f.to = to; f.base = base; f.n_head_kv = n_head_kv; f.head = head; f.j0 = j0; f.lo = lo; f.hi = hi; f.wide = 8 * f.u < width;
  if constexpr (!CODES) type = F16;
  f.stride = row_bytes(type, width); f.bytes = head_bytes(type, width);
  if (type == F16) f.numbers(ids);
  else if constexpr (CODES) { if (type == Q8) f.template codes<Q8>(ids); else f.template codes<Q4>(ids); }
}
#endif
// 4 warps of 16 MT rows; keys and values of BN positions in shared memory. While keys are multiplied the values are on their way, and while values are, the next keys
template <int D, bool CODES>                                          // CODES: keys or values may be quantised
__global__ __launch_bounds__(128, D <= 128 ? 2 : 1) void attention_tile(float* out, const float* q, const char* k, const char* v, const int* tiles, const int* query_start_loc,
    const int* seq_lens, const int* block_table, const float* sinks, int max_blocks, int most, int q_pitch, int n_head, int n_head_kv, int dk, int dv, int k_type, int v_type,
    int window, float scale, float softcap) {
#if __CUDA_ARCH__ >= 800
  constexpr int MT = D <= 128 ? 2 : 1, BM = 64 * MT, BN = D <= (__CUDA_ARCH__ >= 1000 ? 64 : 128) ? 64 : 32, U = D / 8;        // from sm_100 on registers would spill
  extern __shared__ __align__(16) float red[];                        // queries [BM][D], keys [BN][D], values [BN][D] as float16
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  u32 queries = shared_address(red), keys = queries + BM * D * 2, values = keys + BN * D * 2;
  pdl_trigger();
  Tile w(tiles, query_start_loc, seq_lens, most, BM, n_head, n_head_kv, window);
  pdl_wait();
  if (w.rows <= 0) return;
  const int* table = block_table + (size_t)w.sequence * max_blocks; int ids[BN / 16], last = (w.hi - 1) / 16;
  auto blocks_of = [&](int j0) {
#pragma unroll
    for (int i = 0; i < BN / 16; i++) ids[i] = load4(table + min(j0 / 16 + i, last));
  };
  int j0 = w.lo / BN * BN;
  blocks_of(j0);
  fill<D, BN, CODES>(keys, k, k_type, dk, n_head_kv, w.head, ids, j0, w.lo, w.hi);
  copy_commit();
  for (int i = threadIdx.x; i < BM * U; i += 128) {
    int row = i / U, u = i % U; u32 x[4] = {};
    if (row < w.rows && 8 * u < dk) {
      const float* p = q + (size_t)(w.first + (w.row0 + row) / w.G) * q_pitch + w.query_head(row) * dk + 8 * u;
      float4 a = loadf4(p), b = loadf4(p + 4);
      x[0] = float2_half2(a.x, a.y); x[1] = float2_half2(a.z, a.w); x[2] = float2_half2(b.x, b.y); x[3] = float2_half2(b.z, b.w);
    }
    store_shared16(queries + swizzled<D>(row, u), make_uint4(x[0], x[1], x[2], x[3]));
  }
  float o[MT][D / 8][4] = {}, m[MT][2], l[MT][2];
  int row0 = warp * 16 * MT, least = w.position(0), start = first_seen(w.position(BM - 1), window); float unit = softcap != 0 ? LOG2E : scale * LOG2E;
#pragma unroll
  for (int i = 0; i < MT; i++)
#pragma unroll
    for (int h = 0; h < 2; h++) { m[i][h] = NEVER; l[i][h] = 0; }
  for (; j0 < w.hi; j0 += BN) {
    copy_wait<0>();
    __syncthreads();                                                  // keys are there, and the values before them are used
    if (j0 > w.lo) blocks_of(j0);                                     // again, rather than in registers for so long
    fill<D, BN, CODES>(values, v, v_type, dv, n_head_kv, w.head, ids, j0, w.lo, w.hi);
    copy_commit();
    float s[MT][BN / 8][4] = {};
#pragma unroll
    for (int c = 0; c < D / 16; c++) {                                // past the width are zeros: no branches, so that the next fragments are on their way while these are multiplied
      u32 a[MT][4];
#pragma unroll
      for (int i = 0; i < MT; i++) ldmatrix_x4(a[i], queries + swizzled<D>(row0 + 16 * i + (lane & 15), 2 * c + (lane >> 4)));
#pragma unroll
      for (int n = 0; n < BN / 16; n++) {
        u32 b[4]; ldmatrix_x4(b, keys + swizzled<D>(16 * n + (lane & 7) + (lane >> 4) * 8, 2 * c + (lane >> 3 & 1)));
#pragma unroll
        for (int i = 0; i < MT; i++) {
          mma_16816_f16(s[i][2 * n], a[i][0], a[i][1], a[i][2], a[i][3], b[0], b[1]);
          mma_16816_f16(s[i][2 * n + 1], a[i][0], a[i][1], a[i][2], a[i][3], b[2], b[3]);
        }
      }
    }
    __syncthreads();                                                  // keys are used
    if (j0 + BN < w.hi) { blocks_of(j0 + BN); fill<D, BN, CODES>(keys, k, k_type, dk, n_head_kv, w.head, ids, j0 + BN, w.lo, w.hi); }
    copy_commit();
    if (softcap != 0)
#pragma unroll
      for (int x = 0; x < MT * BN / 2; x++) { float& z = s[x / (BN / 2)][x / 4 % (BN / 8)][x % 4]; z = capped_approx(z * scale, softcap); }
    if (j0 + BN - 1 > least || j0 < start)                            // some row does not see all of this
#pragma unroll
      for (int i = 0; i < MT; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          int end = w.position(row0 + 16 * i + g + 8 * h), seen = first_seen(end, window);
#pragma unroll
          for (int x = 0; x < BN / 4; x++) {
            int at = j0 + 8 * (x >> 1) + 2 * t + (x & 1);
            if (at > end || at < seen) s[i][x >> 1][2 * h + (x & 1)] = -INFINITY_F;
          }
        }
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float high = -INFINITY_F, sum = 0;
#pragma unroll
        for (int n = 0; n < BN / 8; n++) high = fmaxf(high, fmaxf(s[i][n][2 * h], s[i][n][2 * h + 1]));
        high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
        high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
        high = fmaxf(m[i][h], high * unit);
        float fix = exp2_approx(m[i][h] - high); m[i][h] = high;
#pragma unroll
        for (int n = 0; n < BN / 8; n++)
#pragma unroll
          for (int e = 2 * h; e < 2 * h + 2; e++) { s[i][n][e] = exp2_approx(fmaf(s[i][n][e], unit, -high)); sum += s[i][n][e]; }
        l[i][h] = l[i][h] * fix + sum;
#pragma unroll
        for (int n = 0; n < D / 8; n++) { o[i][n][2 * h] *= fix; o[i][n][2 * h + 1] *= fix; }
      }
    copy_wait<1>();
    __syncthreads();                                                  // values are there
#pragma unroll
    for (int c = 0; c < BN / 16; c++) {
      u32 a[MT][4];
#pragma unroll
      for (int i = 0; i < MT; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) a[i][e] = float2_half2(s[i][2 * c + (e >> 1)][2 * (e & 1)], s[i][2 * c + (e >> 1)][2 * (e & 1) + 1]);
#pragma unroll
      for (int n0 = 0; n0 < D / 16; n0 += 4)                          // a choice for four at a time: more loads in between, and no registers spill
        if (16 * n0 < dv)
#pragma unroll
          for (int n = n0; n < n0 + 4; n++) {
            u32 b[4]; ldmatrix_x4_trans(b, values + swizzled<D>(16 * c + (lane & 15), 2 * n + (lane >> 4)));
#pragma unroll
            for (int i = 0; i < MT; i++) {
              mma_16816_f16(o[i][2 * n], a[i][0], a[i][1], a[i][2], a[i][3], b[0], b[1]);
              mma_16816_f16(o[i][2 * n + 1], a[i][0], a[i][1], a[i][2], a[i][3], b[2], b[3]);
            }
          }
    }
  }
#pragma unroll
  for (int i = 0; i < MT; i++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float sum = l[i][h]; int r = row0 + 16 * i + g + 8 * h;
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (r >= w.rows) continue;
      float one = share(1.f, m[i][h], sum, sinks, w.query_head(r)), *to = out + w.out_row(r, n_head) * dv + 2 * t;
#pragma unroll
      for (int n = 0; n < D / 8; n++) if (8 * n < dv) *(float2*)(to + 8 * n) = make_float2(o[i][n][2 * h] * one, o[i][n][2 * h + 1] * one);
    }
#endif
}

// ---------------------------------------------------------------- float32
// Number d of position p of a head of a block
__device__ __forceinline__ float number(const char* head, int type, u32 stride, int p, int d) {
  const char* row = head + p * stride;
  if (type == F32) return loadf((const float*)row + d);
  if (type == F16) return half_float(load2(row + 2 * d));
  float scale = half_float(load2(head + 16 * stride + ((d >> 5) * 16 + p) * 2));
  if (type == Q8) return scale * (float)(signed char)load1(row + d);
  u32 b = load1(row + (d >> 5) * 16 + (d & 15));
  return scale * (float)((int)(d & 16 ? b >> 4 : b & 15) - 8);
}
// Shared memory of the float32 kernels: queries [8 R][dk], 32 keys [32][dk + 1] and then in the same place 32 values [32][dv], weights [8 R][32], results [8][dv] of a piece
template <int R, class W>
__device__ __forceinline__ void exact_rows(const W& w, float* red, const float* q, const char* k, const char* v, const int* table, int lo, int hi, int q_pitch, int n_head_kv,
    int dk, int dv, int k_type, int v_type, int window, float scale, float softcap, float (&o)[R][16], float (&m)[R], float (&l)[R]) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, wide = max(dk + 1, dv), end[R];
  float *queries = red, *numbers = red + 8 * R * dk, *weights = numbers + 32 * wide;
  u32 k_stride = row_bytes(k_type, dk), v_stride = row_bytes(v_type, dv); size_t k_head = head_bytes(k_type, dk), v_head = head_bytes(v_type, dv);
  for (int i = threadIdx.x; i < 8 * R * dk; i += 256) {
    int r = i / dk, d = i % dk;
    queries[i] = r < w.rows ? loadf(q + (size_t)(w.first + (w.row0 + r) / w.G) * q_pitch + w.query_head(r) * dk + d) : 0.f;
  }
#pragma unroll
  for (int r = 0; r < R; r++) {
    end[r] = w.position(warp * R + r); m[r] = NEVER; l[r] = 0;
#pragma unroll
    for (int d = 0; d < 16; d++) o[r][d] = 0;
  }
  for (int j0 = lo & ~31; j0 < hi; j0 += 32) {
    __syncthreads();
    for (int i = threadIdx.x; i < 32 * dk; i += 256) {
      int p = j0 + i / dk, d = i % dk;
      numbers[i / dk * (dk + 1) + d] = p >= lo && p < hi ? number(k + ((size_t)load4(table + p / 16) * n_head_kv + w.head) * k_head, k_type, k_stride, p & 15, d) : 0.f;
    }
    __syncthreads();
    float s[R] = {};
    for (int d = 0; d < dk; d++) {
      float x = numbers[lane * (dk + 1) + d];
#pragma unroll
      for (int r = 0; r < R; r++) s[r] += queries[(warp * R + r) * dk + d] * x;
    }
#pragma unroll
    for (int r = 0; r < R; r++) {
      float z = s[r] * scale; int at = j0 + lane;
      if (softcap != 0) z = capped(z, softcap);
      z = at <= end[r] && at >= first_seen(end[r], window) && at < hi ? z * LOG2E : -INFINITY_F;
      float high = fmaxf(m[r], warp_max(z)), fix = exp2f(m[r] - high), e = exp2f(z - high);
      m[r] = high; l[r] = l[r] * fix + warp_sum(e);
      weights[(warp * R + r) * 32 + lane] = e;
#pragma unroll
      for (int d = 0; d < 16; d++) o[r][d] *= fix;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 32 * dv; i += 256) {
      int p = j0 + i / dv, d = i % dv;
      numbers[i] = p >= lo && p < hi ? number(v + ((size_t)load4(table + p / 16) * n_head_kv + w.head) * v_head, v_type, v_stride, p & 15, d) : 0.f;
    }
    __syncthreads();
#pragma unroll
    for (int d = 0; d < 16; d++)
      if (32 * d + lane < dv)
        for (int p = 0; p < 32; p++) {
          float x = numbers[p * dv + 32 * d + lane];
#pragma unroll
          for (int r = 0; r < R; r++) o[r][d] += weights[(warp * R + r) * 32 + p] * x;
        }
  }
}
template <int R>                                                      // rows of a warp: 1, since a piece has 8
__global__ __launch_bounds__(256, 1) void exact_split(float* out, const float* q, const char* k, const char* v, int* counters, float* ml, float* sums,
    const int* query_start_loc, const int* seq_lens, const int* block_table, const float* sinks, int max_blocks, int max_splits, int few, int least, int most, int q_pitch,
    int n_head, int n_head_kv, int dk, int dv, int k_type, int v_type, int window, float scale, float softcap) {
  extern __shared__ __align__(16) float red[];
  __shared__ float top[2][ROWS8], total[2][ROWS8];
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  pdl_trigger();
  Few w(query_start_loc, seq_lens, few, n_head, n_head_kv, window, least, most);
  if ((int)blockIdx.y >= w.num_splits && blockIdx.y) { pdl_leave(); return; }
  pdl_wait();
  if ((int)blockIdx.y >= w.num_splits) { no_rows(w, out, n_head, dv); return; }
  for (int split = blockIdx.y; split < w.num_splits; split += gridDim.y) {
    float o[R][16], m[R], l[R], *results = red + 8 * dk + 32 * max(dk + 1, dv) + 8 * 32;
    int start = (w.first_split + split) * w.piece;
    exact_rows<R>(w, red, q, k, v, block_table + (size_t)blockIdx.z * max_blocks, max(start, first_seen(w.len - w.tokens, window)), min(start + w.piece, w.len),
                  q_pitch, n_head_kv, dk, dv, k_type, v_type, window, scale, softcap, o, m, l);
#pragma unroll
    for (int d = 0; d < 16; d++) if (32 * d + lane < dv) results[warp * dv + 32 * d + lane] = o[0][d];
    if (lane == 0) { top[0][warp] = m[0]; total[0][warp] = l[0]; }
    __syncthreads();
    settle<1>(w, Partials(ml, sums, max_splits, dv), results, dv, top, total, nullptr, split, out, dv, sinks, n_head);
    __syncthreads();
  }
  if (w.num_splits > 1) together(w, Partials(ml, sums, max_splits, dv), counters, out, dv, sinks, n_head);
}
template <int R>                                                      // rows of a warp: 3, so that heads of 256 fit into the 64 KB of a Turing card
__global__ __launch_bounds__(256, 1) void exact_tile(float* out, const float* q, const char* k, const char* v, const int* tiles, const int* query_start_loc,
    const int* seq_lens, const int* block_table, const float* sinks, int max_blocks, int most, int q_pitch, int n_head, int n_head_kv, int dk, int dv, int k_type, int v_type,
    int window, float scale, float softcap) {
  extern __shared__ __align__(16) float red[];
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  pdl_trigger();
  Tile w(tiles, query_start_loc, seq_lens, most, 8 * R, n_head, n_head_kv, window);
  pdl_wait();
  if (w.rows <= 0) return;
  float o[R][16], m[R], l[R];
  exact_rows<R>(w, red, q, k, v, block_table + (size_t)w.sequence * max_blocks, w.lo, w.hi, q_pitch, n_head_kv, dk, dv, k_type, v_type, window, scale, softcap, o, m, l);
#pragma unroll
  for (int r = 0; r < R; r++) {
    int row = warp * R + r;
    if (row >= w.rows) continue;
    float one = share(1.f, m[r], l[r], sinks, w.query_head(row));
#pragma unroll
    for (int d = 0; d < 16; d++) if (32 * d + lane < dv) out[w.out_row(row, n_head) * dv + 32 * d + lane] = o[r][d] * one;
  }
}
