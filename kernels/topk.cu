// Selection from rows of logits: the best k in canonical order (larger logit first, lower id among equals; NaN counts as -inf) and the sums that probabilities need.
#include "common.cuh"
constexpr u32 MASKED = 1, TOTAL = 2, RAW = 4;       // flags of a row: it has a mask; the sum at its temperature is wanted; the sum of the raw row is
constexpr int MAX_K = 256, PER_THREAD = 16;         // groups that a thread of the second kernel holds

__device__ __forceinline__ float minus_inf() { return __uint_as_float(0xff800000u); }

// A larger logit has a larger key, as an integer; -0 and 0 have the same, NaN that of -inf. No key is 0: that is a token that may not be drawn.
__device__ __forceinline__ u32 key_of(float x) {
  u32 b = __float_as_uint(x);
  if ((b & 0x7fffffff) > 0x7f800000) b = 0xff800000;
  if (b == 0x80000000) b = 0;
  return b & 0x80000000 ? ~b : b | 0x80000000;
}
__device__ __forceinline__ float logit_of(u32 key) { return __uint_as_float(key & 0x80000000 ? key & 0x7fffffff : ~key); }

// Key and id in one number without equals: the canonical order is the order of these numbers, largest first.
__device__ __forceinline__ u64 rank_of(u32 key, u32 id) { return key ? (u64)key << 32 | (u32)~id : 0; }
__device__ __forceinline__ u32 id_of(u64 c) { return ~(u32)c; }
__device__ __forceinline__ u64 load_rank(const u64* p) { uint2 v = load8(p); return (u64)v.y << 32 | v.x; }

__device__ __forceinline__ u64 warp_max_rank(u64 c) {
#pragma unroll
  for (int o = 16; o; o >>= 1) { u64 other = __shfl_xor_sync(~0u, c, o); c = other > c ? other : c; }
  return c;
}

// e^((x - top) scale); an infinite top leaves only its equals
__device__ __forceinline__ float weight(float x, float top, float scale) {
  if (x == top) return 1.f;
  return x == minus_inf() || top == -minus_inf() ? 0.f : expf((x - top) * scale);
}

// Logits id .. id + 3 of a row, id a multiple of 4; -inf for NaN and past n_token
__device__ __forceinline__ void load_four(const float* x, int id, int n_token, bool aligned, float* v) {
  if (aligned && id < n_token) { float4 f = loadf4(x + id); v[0] = f.x; v[1] = f.y; v[2] = f.z; v[3] = f.w; }
#pragma unroll
  for (int j = 0; j < 4; j++) {
    if (id + j >= n_token) v[j] = minus_inf();
    else if (!aligned) v[j] = loadf(x + id + j);
    if (v[j] != v[j]) v[j] = minus_inf();
  }
}
// Which of the four may be drawn, a bit each
__device__ __forceinline__ u32 allowed_four(const u32* mask, int id, int n_token) {
  if (id >= n_token) return 0;
  u32 bits = mask ? load4(mask + (id >> 5)) >> (id & 31) & 15 : 15;
  return id + 4 > n_token ? bits & 15 >> (id + 4 - n_token) : bits;
}

// logits [rows, n_vocab], of which n_token may be drawn; mask [rows, words] bits; params [rows, width]: flags, 1 / temperature, ids.
// A block takes 256 * ITEMS logits of one row, a thread a group of ITEMS of them: ids first + 4 (256 i + t) + 0..3.
// groups [rows, chunks, 256] the best of each group (null: not wanted), best [rows, chunks] of the block; sums [rows, chunks]: at the temperature, the largest of the raw row, the raw sum, how many may be drawn.
template <int ITEMS>
__global__ __launch_bounds__(256) void topk_scan(const float* logits, const u32* mask, const int* params, u64* groups, u64* best, float4* sums, int n_vocab, int n_token, int words, int width) {
  __shared__ u64 tops[8];
  __shared__ float raws[8], parts[3][8];
  pdl_trigger();
  pdl_wait();
  int row = blockIdx.y, t = threadIdx.x, lane = t & 31, warp = t >> 5;
  const float* x = logits + (long long)row * n_vocab;
  const int* p = params + (long long)row * width;
  u32 flags = load4(p), ok = 0;
  float scale = loadf((const float*)p + 1), raw = minus_inf(), v[ITEMS];
  const u32* bits = flags & MASKED ? mask + (long long)row * words : nullptr;
  int first = blockIdx.x * 256 * ITEMS + 4 * t;
#pragma unroll
  for (int i = 0; i < ITEMS / 4; i++) load_four(x, first + 1024 * i, n_token, n_vocab % 4 == 0, v + 4 * i);
  u32 key = 0;
  int id = 0;
#pragma unroll
  for (int i = 0; i < ITEMS / 4; i++) {
    u32 four = allowed_four(bits, first + 1024 * i, n_token);
    ok |= four << (4 * i);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      u32 k = four >> j & 1 ? key_of(v[4 * i + j]) : 0;
      if (k > key) { key = k; id = first + 1024 * i + j; }                       // ids ascend: the first of equals stays
      raw = fmaxf(raw, v[4 * i + j]);
    }
  }
  u64 mine = rank_of(key, id);
  long long chunk = (long long)row * gridDim.x + blockIdx.x;
  if (groups) groups[chunk * 256 + t] = mine;
  mine = warp_max_rank(mine), raw = warp_max(raw);
  if (lane == 0) tops[warp] = mine, raws[warp] = raw;
  __syncthreads();
  u64 top = tops[0];
  raw = raws[0];
#pragma unroll
  for (int w = 1; w < 8; w++) { top = tops[w] > top ? tops[w] : top; raw = fmaxf(raw, raws[w]); }
  float a = 0, b = 0, num = __popc(ok), best_logit = logit_of(top >> 32);
  if (flags & TOTAL && top) {
#pragma unroll
    for (int i = 0; i < ITEMS; i++) if (ok >> i & 1) a += weight(v[i], best_logit, scale);
  }
  if (flags & RAW) {
#pragma unroll
    for (int i = 0; i < ITEMS; i++) b += first + 1024 * (i / 4) + i % 4 < n_token ? weight(v[i], raw, 1.f) : 0.f;
  }
  a = warp_sum(a), b = warp_sum(b), num = warp_sum(num);
  if (lane == 0) parts[0][warp] = a, parts[1][warp] = b, parts[2][warp] = num;
  __syncthreads();
  if (t == 0) {
    a = b = num = 0;
#pragma unroll
    for (int w = 0; w < 8; w++) a += parts[0][w], b += parts[1][w], num += parts[2][w];
    best[chunk] = top, sums[chunk] = make_float4(a, raw, b, num);
  }
}

struct Search { u32 bins[256], need, in_bin; int bin; };

// The smallest of the k largest numbers that a block of 1024 holds, 1 if there are fewer than k; 0 is no number. From the top, 8 bits at a time: count them, find the bin of the k-th, go on inside it.
template <int N> __device__ __forceinline__ u64 kth_largest(const u64 (&c)[N], u32 k, Search& s) {
  u64 prefix = 0;
  int t = threadIdx.x, lane = t & 31;
  for (int shift = 56; shift >= 0; shift -= 8) {
    if (shift == 24) { prefix = prefix << 8 | 255; continue; }                   // ids are below 2^24: this byte is the same for all
    if (t < 256) s.bins[t] = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; i++) {
      bool in = c[i] && c[i] >> shift >> 8 == prefix;
      u32 d = c[i] >> shift & 255, pending = __ballot_sync(~0u, in);
      if (!pending) continue;
      int leader = __ffs(pending) - 1;                                           // logits are alike: most lanes of a warp meet in one bin, so that one is counted first
      u32 first = __shfl_sync(~0u, d, leader), same = __ballot_sync(~0u, in && d == first);
      if (lane == leader) atomicAdd(&s.bins[d], __popc(same));
      if (in && d != first) atomicAdd(&s.bins[d], 1u);
    }
    __syncthreads();
    if (t < 32) {
      const u32* h = s.bins + 8 * lane;
      u32 sum = 0;
#pragma unroll
      for (int j = 0; j < 8; j++) sum += h[j];
      u32 reach = sum;                                                           // in this lane's bins and all above
#pragma unroll
      for (int o = 1; o < 32; o <<= 1) { u32 v = __shfl_down_sync(~0u, reach, o); if (lane + o < 32) reach += v; }
      u32 above = reach - sum;
      bool hit = above < k && k <= reach;
      if (!__ballot_sync(~0u, hit) && lane == 0) s.bin = -1;
      if (hit) {
        int j = 7;
        while (above + h[j] < k) above += h[j--];
        s.bin = 8 * lane + j, s.need = k - above, s.in_bin = h[j];
      }
    }
    __syncthreads();
    if (s.bin < 0) return 1;
    prefix = prefix << 8 | s.bin, k = s.need;
    if (s.in_bin == k) return prefix << shift;
  }
  return prefix;
}

// One block for a row. out [rows, 4 + 2 k + width - 2]: raw top, raw sum, sum at the temperature, how many may be drawn; k ids (-1: none); k logits; the logits of the ids in params.
// next [rows] the first id (0 if there is none), for the step that follows. blockDim 1024, or any number of warps for k = 1.
template <int ITEMS>
__global__ __launch_bounds__(1024) void topk_merge(const float* logits, const u32* mask, const int* params, const u64* groups, const u64* best, const float4* sums, int* out, int* next,
                                                   int n_vocab, int n_token, int words, int width, int chunks, int k) {
  __shared__ Search s;
  __shared__ int chosen[MAX_K];
  __shared__ u64 found[MAX_K];
  __shared__ int num[2];
  pdl_trigger();
  pdl_wait();
  int row = blockIdx.x, t = threadIdx.x, lane = t & 31, extra = width - 2;
  const float* x = logits + (long long)row * n_vocab;
  const int* p = params + (long long)row * width;
  float* more = (float*)out + (long long)row * (4 + 2 * k + extra) + 4 + 2 * k;
  for (int e = t; e < extra; e += blockDim.x) {
    int id = (int)load4(p + 2 + e);
    more[e] = id >= 0 && id < n_token ? logit_of(key_of(loadf(x + id))) : minus_inf();
  }
  out += (long long)row * (4 + 2 * k + extra);
  u32 flags = load4(p);
  const u32* bits = flags & MASKED ? mask + (long long)row * words : nullptr;
  if (t < 32) {
    float scale = loadf((const float*)p + 1), raw = minus_inf(), a = 0, b = 0, all = 0;
    u64 top = 0;
    best += (long long)row * chunks, sums += (long long)row * chunks;
    for (int c = lane; c < chunks; c += 32) { u64 v = load_rank(best + c); top = v > top ? v : top; raw = fmaxf(raw, loadf4(sums + c).y); }
    top = warp_max_rank(top), raw = warp_max(raw);
    for (int c = lane; c < chunks; c += 32) {
      float4 v = loadf4(sums + c);
      u64 mine = load_rank(best + c);
      if (mine) a += v.x * weight(logit_of(mine >> 32), logit_of(top >> 32), scale);
      b += v.z * weight(v.y, raw, 1.f), all += v.w;
    }
    a = warp_sum(a), b = warp_sum(b), all = warp_sum(all);
    if (lane == 0) {
      out[0] = __float_as_int(raw), out[1] = __float_as_int(b), out[2] = __float_as_int(a), out[3] = (int)all;
      next[row] = top ? id_of(top) : 0;
      if (k == 1) out[4] = top ? id_of(top) : -1, out[5] = __float_as_int(top ? logit_of(top >> 32) : minus_inf());
    }
  }
  if (k == 1) return;
  if (t < 2) num[t] = 0;
  // The k largest lie in the k groups whose best are the largest: of any other group, k numbers stand above its best.
  u64 c[PER_THREAD];
  int n_groups = chunks * 256;
  groups += (long long)row * n_groups;
#pragma unroll
  for (int i = 0; i < PER_THREAD; i++) c[i] = i * 1024 + t < n_groups ? load_rank(groups + i * 1024 + t) : 0;
  u64 cut = kth_largest(c, k, s);
#pragma unroll
  for (int i = 0; i < PER_THREAD; i++) if (c[i] && c[i] >= cut) chosen[atomicAdd(&num[0], 1)] = i * 1024 + t;
  __syncthreads();
  int n = num[0];
  u64 d[ITEMS / 4];
#pragma unroll
  for (int q = 0; q < ITEMS / 16; q++) {
    int e = q * 1024 + t, g = e < n * (ITEMS / 4) ? chosen[e / (ITEMS / 4)] : 0;
    int id = e < n * (ITEMS / 4) ? (g >> 8) * 256 * ITEMS + 4 * (e % (ITEMS / 4) * 256 + (g & 255)) : n_token;
    float v[4];
    load_four(x, id, n_token, n_vocab % 4 == 0, v);
    u32 four = allowed_four(bits, id, n_token);
#pragma unroll
    for (int j = 0; j < 4; j++) d[4 * q + j] = rank_of(four >> j & 1 ? key_of(v[j]) : 0, id + j);
  }
  cut = kth_largest(d, k, s);
#pragma unroll
  for (int i = 0; i < ITEMS / 4; i++) if (d[i] && d[i] >= cut) found[atomicAdd(&num[1], 1)] = d[i];
  __syncthreads();
  n = num[1];
  // The place of each among at most 256: how many are larger, counted by four threads.
  u64 mine = t / 4 < n ? found[t / 4] : 0;
  int place = 0;
  for (int i = t & 3; i < n; i += 4) place += found[i] > mine;
  place += __shfl_xor_sync(~0u, place, 1);
  place += __shfl_xor_sync(~0u, place, 2);
  if ((t & 3) == 0 && t / 4 < k) {
    if (mine) out[4 + place] = id_of(mine), out[4 + k + place] = __float_as_int(logit_of(mine >> 32));
    else out[4 + t / 4] = -1, out[4 + k + t / 4] = __float_as_int(minus_inf());
  }
}
