// y = x W^T for few rows of x: one warp a row of W (dp4a), 16 rows of W a tile (int8 tensor cores), one row that every block prepares (gemv_own); linear_f32 and linear_16 from float32 activations.
#include "formats.cuh"
#include "acts.cuh"

// ---------------------------------------------------------------- activations
// x [m][k] float32 -> what the kernels read (acts.cuh), T rows (1, 8, 16 or 32) at a time. Rows m and beyond are zeros. A warp has one group of a row, or two.
template <bool SUPER>
__global__ void quantize_act(const float* x, u32* xq, float* xd, float* xs, u32* xm, int m, int k, int groups, int rows) {
  constexpr int H = SUPER ? 2 : 1;
  int lane = threadIdx.x & 31, unit = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), row = blockIdx.y;
  pdl_trigger();
  pdl_wait();
  if (unit >= groups / H) return;
  float v[H][4];
#pragma unroll
  for (int i = 0; i < H; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      int at = (unit * H + i) * 128 + lane * 4 + j;
      v[i][j] = row < m && at < k ? loadf(x + (size_t)row * k + at) : 0.f;
    }
  store_acts<SUPER>(v, {xq, xd, xs, xm}, unit, row, groups, rows);
}

// ---------------------------------------------------------------- one warp, one row
// What a lane needs of one row of activations for one group: codes, scales, and the sum of block t
struct Codes {
  uint4 c[2]; float4 d;
  __device__ int lo(int b) const { return word(c[b >> 1], (b & 1) * 2); }
  __device__ int hi(int b) const { return word(c[b >> 1], (b & 1) * 2 + 1); }
};
template <class F> struct Col : Codes {
  float sum;
  __device__ __forceinline__ float below(const F& f, int odd, int t) const {           // what the minimums add, this lane's share
    if constexpr (F::SUPER) return -f.dmin() * ((float)ubyte(f.mins(odd), t) * sum); else return f.min(t) * sum;
  }
};
template <class F> __device__ __forceinline__ Col<F> load_col(const uint4* xq, const float* xd, const float* xs, int g, int row, int rows, int t, bool on) {
  Col<F> c; u32 i = code_at(g, row, 0, t, rows), e = g * rows + row;
  c.c[0] = load16(at(xq, i, 16)); c.c[1] = load16(at(xq, i, 16) + (rows == 1 ? 64 : 512));
  if constexpr (F::SUPER) c.d.x = loadf((const float*)at(xd, (g >> 1) * rows + row, 4)); else c.d = loadf4(at(xd, e, 16));
  if constexpr (F::MIN) c.sum = loadf((const float*)at(xs, e, 16) + t);
  if (!on) { c.d = make_float4(0, 0, 0, 0); c.sum = 0; }
  return c;
}
// What this lane's weights of one group add to the sum, 1/UNIT times too much
template <class F, class X> __device__ __forceinline__ float dot_group(const F& f, const X& x, int odd, int t) {
  float sum = 0;
  if constexpr (F::SUPER) {
    int total = 0; u32 sc = 0;
    if constexpr (F::MIN) sc = f.scales(odd);
#pragma unroll
    for (int b = 0; b < 4; b++) {
      int lo, hi; f.codes(b, lo, hi);
      if constexpr (F::MIN) total += ubyte(sc, b) * __dp4a(lo, x.lo(b), __dp4a(hi, x.hi(b), 0));
      else total += f.scale_lo(b) * __dp4a(lo, x.lo(b), 0) + f.scale_hi(b) * __dp4a(hi, x.hi(b), 0);
    }
    sum = f.d() * (float)total;
    if constexpr (F::MIN) sum += x.below(f, odd, t);
    return sum * x.d.x;
  } else {
#pragma unroll
    for (int b = 0; b < 4; b++) {
      int lo, hi; f.codes(b, lo, hi);
      sum += f.scale(b) * word(x.d, b) * from_magic(__dp4a(lo, x.lo(b), __dp4a(hi, x.hi(b), MAGIC)));
    }
    if constexpr (F::MIN) sum += x.below(f, odd, t);
    return sum;
  }
}
// Lane c * R + r of a row's first warp stores row `row` + r, column `col` + c of the product. What is added there is asked for before the sums over the warps, and is there after them
struct Place { bool on; size_t at; float bias, x; };
template <int C, int R> __device__ __forceinline__ Place place_of(const Sum& sum, int n, int m, int row, int col, int part) {
  int lane = threadIdx.x & 31, r = row + lane % R, c = col + lane / R;
  Place p{!part && lane < C * R && r < n && c < m, (size_t)c * n + r, 0.f, 0.f};
  if (p.on && sum.bias) p.bias = loadf(sum.bias + r);
  if (p.on && sum.x) p.x = loadf(sum.x + p.at);
  return p;
}
// Sums over the warps of a row and stores. part of split, R rows and C columns in acc; red has room for warps * R * C floats
template <int C, int R>
__device__ __forceinline__ void finish_rows(float (&acc)[C][R], float* red, float* y, const Sum& sum, const Place& place, int part, int split, float unit) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  float v = 0;
#pragma unroll
  for (int c = 0; c < C; c++)
#pragma unroll
    for (int r = 0; r < R; r++) acc[c][r] = warp_sum(acc[c][r]);
  if (split > 1) {
    if (lane == 0)
#pragma unroll
      for (int e = 0; e < C * R; e++) red[warp * C * R + e] = acc[e / R][e % R];
    __syncthreads();
    if (part || lane >= C * R) return;
    for (int p = 0; p < split; p++) v += red[(warp + p) * C * R + lane];
  } else {
#pragma unroll
    for (int e = 0; e < C * R; e++) if (lane == e) v = acc[e / R][e % R];
  }
  if (place.on) y[place.at] = sum(unit * v, place.bias, place.x);
}
// y [m][n]; `split` warps share R rows, C columns at a time (grid y); U groups of each row are in flight before anything is used.
// Past the end of a row a lane reads group 0 again, with activations of scale 0: cheaper than a branch. B blocks of 256 threads share a multiprocessor's registers.
template <class F, int C, int R, int U, int B>
__global__ __launch_bounds__(256, B) void gemv(const void* q, const void* h, const void* s, const void* d, const uint4* xq, const float* xd, const float* xs,
                                            float* y, const float* bias, const float* add, float scale, int n, int m, int groups, int rows, int split) {
  extern __shared__ float red[];
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, part = warp % split, t = lane & 3, col = blockIdx.y * C;
  Matrix w = matrix<F>(q, h, s, d, t);
  int row = (blockIdx.x * ((blockDim.x >> 5) / split) + warp / split) * R, step = 8 * split;
  u32 first = min(row, (n + 31) / 32 * 32 - R) * groups;
  float acc[C][R] = {};
  pdl_trigger();
  for (int base = part * 8 + (lane >> 2); base - (lane >> 2) < groups; base += U * step) {
    F f[U][R];
#pragma unroll
    for (int u = 0; u < U; u++)
#pragma unroll
      for (int r = 0; r < R; r++) f[u][r] = load<F>(w, first + r * groups + (base + u * step < groups ? base + u * step : 0));
    pdl_wait();
#pragma unroll
    for (int u = 0; u < U; u++)
#pragma unroll
      for (int c = 0; c < C; c++) {
        int g = base + u * step, on = g < groups;
        Col<F> x = load_col<F>(xq, xd, xs, on ? g : 0, C == 1 ? 0 : min(col + c, m - 1), C == 1 ? 1 : rows, t, on);
#pragma unroll
        for (int r = 0; r < R; r++) acc[c][r] += dot_group<F>(f[u][r], x, on ? g & 1 : 0, t);
      }
  }
  pdl_wait();
  Sum sum{bias, add, scale};
  finish_rows<C, R>(acc, red, y, sum, place_of<C, R>(sum, n, m, row, col, part), part, split, F::UNIT);
}

// ---------------------------------------------------------------- one row, prepared by every block
// What a lane needs of the row for one group, from shared memory: codes [groups][pair of blocks][t] of 16 bytes, scales [groups][4 blocks] or [groups / 2]. The sums are those of the lane's own codes
template <class F> struct OwnCol : Codes {
  int s[4];
  __device__ __forceinline__ OwnCol(u32 codes, u32 scales, int g, int t) {
    u32 q = codes + g * 128 + t * 16;
    c[0] = shared16(q); c[1] = shared16(q + 64);
    if constexpr (F::SUPER) d.x = __uint_as_float(shared4(scales + (g >> 1) * 4));
    else { uint4 v = shared16(scales + g * 16); d = make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)); }
    if constexpr (F::MIN)
#pragma unroll
      for (int b = 0; b < 4; b++) s[b] = __dp4a(lo(b), ONES, __dp4a(hi(b), ONES, F::SUPER ? 0 : MAGIC));
  }
  __device__ __forceinline__ float below(const F& f, int odd, int) const {
    float sum = 0; int total = 0;
#pragma unroll
    for (int b = 0; b < 4; b++)
      if constexpr (F::SUPER) total += ubyte(f.mins(odd), b) * s[b]; else sum += f.min(b) * (word(d, b) * from_magic(s[b]));
    if constexpr (F::SUPER) return -f.dmin() * (float)total; else return sum;
  }
};
// The row is x, or the RMS norm of x with weights w, or act(x) * w (act(x) where w is null)
enum { ROW_X, ROW_NORM, ROW_ACT };
// The columns of a lane in V units of its warp (128 columns, or SUPER 256), the first of them `unit`, the others `step` units apart
template <bool SUPER, int V, int KIND> struct Own {
  static constexpr int H = SUPER ? 2 : 1, N = V * H;
  const float *x[N], *w[N]; bool on[N], gated;
  float f[N][4];
  // Before the wait: the weights of a norm, which no kernel writes, and the addresses of the rest
  __device__ __forceinline__ Own(const float* row, const float* with, int unit, int step, int k) : gated(with) {
#pragma unroll
    for (int i = 0; i < N; i++) {
      int c = ((unit + i / H * step) * H + i % H) * 128 + (threadIdx.x & 31) * 4;
      on[i] = c < k; x[i] = row + c; w[i] = with + c;
      if (KIND == ROW_NORM) load_quad(f[i], w[i], on[i], true);
      if (on[i]) prefetch(x[i]);
      if (KIND == ROW_ACT && gated && on[i]) prefetch(w[i]);
    }
  }
  // Codes and scales to shared memory. A norm is taken without its factor, which the product may as well get at its end; the sum of the squares of this lane's columns is returned
  __device__ __forceinline__ float prepare(int act, u32 codes, u32 scales, int unit, int step, int units) {
    int lane = threadIdx.x & 31, b = lane >> 3, at = (b >> 1) * 64 + (lane & 3) * 16 + (b & 1) * 8 + (lane & 4);
    float v[N][4], squares = 0;
#pragma unroll
    for (int i = 0; i < N; i++) load_quad(v[i], x[i], on[i], true);
    if (KIND == ROW_ACT && gated)
#pragma unroll
      for (int i = 0; i < N; i++) load_quad(f[i], w[i], on[i], true);
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        if (KIND == ROW_NORM) { squares = fmaf(v[i][e], v[i][e], squares); v[i][e] *= f[i][e]; }
        if (KIND == ROW_ACT) v[i][e] = act_of(v[i][e], act) * (gated ? f[i][e] : (float)on[i]);
      }
    if (KIND == ROW_NORM) squares = warp_sum(squares);
#pragma unroll
    for (int i = 0; i < V; i++) {
      int own = unit + i * step;
      u32 packed[H];
      float s = quantise<SUPER>(v + i * H, packed);
      if (i == 0 || own < units) {
#pragma unroll
        for (int h = 0; h < H; h++) store_shared4(codes + (own * H + h) * 128 + at, packed[h]);
        if (SUPER ? lane == 0 : (lane & 7) == 0) store_shared4(scales + (SUPER ? own * 4 : own * 16 + b * 4), __float_as_uint(s));
      }
    }
    return squares;
  }
};
// The sums of R rows over the warp; lane r * (32 / R) has that of row r
template <int R> __device__ __forceinline__ float fold_rows(float (&v)[R]) {
  int lane = threadIdx.x & 31, o = 16;
#pragma unroll
  for (int n = R / 2; n; n >>= 1, o >>= 1)
#pragma unroll
    for (int r = 0; r < n; r++) { float keep = lane & o ? v[r + n] : v[r], give = lane & o ? v[r] : v[r + n]; v[r] = keep + __shfl_xor_sync(~0u, give, o); }
  return warp_sum<32 / R>(v[0]);
}
// y [n] = W x for one row that every block prepares for itself, while its weights are on their way. A lane has U groups of each of R rows; `split`, a power of two, warps share a row, 8 U split groups
// at least as many as it has, and the warps have V units each, at least as many as the row has. What happens after the wait is what the next kernel waits for: all else comes before it
template <class F, int R, int U, int V, int KIND>
__global__ __launch_bounds__(512, 1) void gemv_own(const void* q, const void* h, const void* s, const void* d, const float* x, const float* w, float eps, int act,
                                                   float* y, const float* bias, const float* add, float scale, int n, int k, int groups, int split) {
  extern __shared__ __align__(16) float red[];    // the row: codes, scales; then a float of each warp and row of W, and one of each warp for the norm
  pdl_trigger();
  // Both are the same in all lanes: that the compiler does not know, or would compute again
  int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, (int)threadIdx.x >> 5, 0); u32 codes = __shfl_sync(~0u, shared_address(red), 0);
  int warps = blockDim.x >> 5, shift = 31 - __clz(split), part = warp & (split - 1), t = lane & 3, g = part * 8 + (lane >> 2), units = F::SUPER ? groups / 2 : groups;
  int row = (blockIdx.x * (warps >> shift) + (warp >> shift)) * R, own = row + lane / (32 / R);
  u32 scales = codes + groups * 128, sums = scales + groups * 16, squares = sums + warps * R * 4, first = min(row, (n + 31) / 32 * 32 - R) * groups;
  Matrix m = matrix<F>(q, h, s, d, t);
  F f[U][R];
#pragma unroll
  for (int u = 0; u < U; u++)
#pragma unroll
    for (int r = 0; r < R; r++) f[u][r] = load<F>(m, first + r * groups + (g + u * 8 * split < groups ? g + u * 8 * split : 0));
  Own<F::SUPER, V, KIND> mine(x, w, warp, warps, k);
  bool on = !part && lane % (32 / R) == 0 && own < n, adds = on && add;
  Sum sum{bias, add, scale};
  float b = on && bias ? loadf(bias + own) : 0.f, a = 0, factor = F::UNIT, acc[R] = {}, inverse = rcp_approx((float)k);
  if (adds) prefetch(add + own);
  pdl_wait();
  float total = 0;
  if (adds) a = loadf(add + own);
  if (warp < units) total = mine.prepare(act, codes, scales, warp, warps, units);
  if (KIND == ROW_NORM && lane == 0) store_shared4(squares + warp * 4, __float_as_uint(total));
  __syncthreads();
  if (KIND == ROW_NORM) factor *= rsqrt_approx(fmaf(warp_sum<16>((lane & 15) < warps ? __uint_as_float(shared4(squares + (lane & 15) * 4)) : 0.f), inverse, eps));
#pragma unroll
  for (int u = 0; u < U; u++) {
    int i = g + u * 8 * split;
    OwnCol<F> c(codes, scales, i < groups ? i : 0, t);
#pragma unroll
    for (int r = 0; r < R; r++) { float v = dot_group(f[u][r], c, i & 1, t); acc[r] += i < groups ? v : 0.f; }
  }
  float v = fold_rows<R>(acc);
  if (split > 1) {
    if (lane % (32 / R) == 0) store_shared4(sums + (warp * R + lane / (32 / R)) * 4, __float_as_uint(v));
    __syncthreads();
    if (!on) return;
    v = 0;
#pragma unroll 1
    for (int p = 0; p < split; p += 2) {
      u32 from = sums + ((warp + p) * R + lane / (32 / R)) * 4;
      v += __uint_as_float(shared4(from)) + __uint_as_float(shared4(from + R * 4));
    }
  }
  if (on) y[own] = sum(factor * v, b, a);
}

// ---------------------------------------------------------------- float32 activations
// x [m][k] float32: the exact mode of the same weights
template <class F, int C>
__global__ __launch_bounds__(256, 1) void linear_f32(const void* q, const void* h, const void* s, const void* d, const float* x, float* y, const float* bias, const float* add, float scale,
                                                  int n, int m, int k, int groups) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, t = lane & 3, col = blockIdx.y * C, row = blockIdx.x * (blockDim.x >> 5) + warp;
  Matrix w = matrix<F>(q, h, s, d, t);
  float acc[C][1] = {};
  pdl_trigger();
  pdl_wait();
  for (int g = lane >> 2; g < groups; g += 8) {
    F f = load<F>(w, min(row, n - 1) * groups + g);
#pragma unroll
    for (int b = 0; b < 4; b++) {
      if (g * 128 + b * 32 >= k) break;
      int lo, hi; f.codes(b, lo, hi);
      float s0, s1, mn;
      scales_of(f, g & 1, b, s0, s1, mn);
      s0 *= F::UNIT; s1 *= F::UNIT;
#pragma unroll
      for (int c = 0; c < C; c++) {
        const float* p = x + (size_t)min(col + c, m - 1) * k + g * 128 + b * 32 + t * 4;
        float4 a = loadf4(p), e = loadf4(p + 16);
        acc[c][0] += s0 * (a.x * sbyte(lo, 0) + a.y * sbyte(lo, 1) + a.z * sbyte(lo, 2) + a.w * sbyte(lo, 3));
        acc[c][0] += s1 * (e.x * sbyte(hi, 0) + e.y * sbyte(hi, 1) + e.z * sbyte(hi, 2) + e.w * sbyte(hi, 3));
        if constexpr (F::MIN) acc[c][0] += mn * (a.x + a.y + a.z + a.w + e.x + e.y + e.z + e.w);
      }
    }
  }
  Sum sum{bias, add, scale};
  finish_rows<C, 1>(acc, nullptr, y, sum, place_of<C, 1>(sum, n, m, row, col, 0), 0, 1, 1.f);
}
struct F16 { static __device__ float lo(u32 v) { return half_float(v & 0xffff); } static __device__ float hi(u32 v) { return half_float(v >> 16); } };
struct BF16 { static __device__ float lo(u32 v) { return __uint_as_float(v << 16); } static __device__ float hi(u32 v) { return __uint_as_float(v & 0xffff0000); } };
// W [n][8 * units] of 16 bits, x [m][k] float32; `split` warps share R rows, C columns at a time (grid y), U loads of each row in flight
template <class T, int C, int R, int U>
__global__ __launch_bounds__(256, 1) void linear_16(const uint4* w, const float* x, float* y, const float* bias, const float* add, float scale, int n, int m, int k, int units, int split) {
  extern __shared__ float red[];
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, part = warp % split, col = blockIdx.y * C;
  int row = (blockIdx.x * ((blockDim.x >> 5) / split) + warp / split) * R, step = 32 * split;
  float acc[C][R] = {};
  pdl_trigger();
  for (int base = part * 32 + lane; base - lane < units; base += U * step) {
    uint4 v[U][R];
#pragma unroll
    for (int u = 0; u < U; u++)
#pragma unroll
      for (int r = 0; r < R; r++)
        v[u][r] = base + u * step < units ? stream16(w + (size_t)min(row + r, n - 1) * units + base + u * step) : make_uint4(0, 0, 0, 0);
    pdl_wait();
#pragma unroll
    for (int u = 0; u < U; u++) {
      int at = (base + u * step) * 8;
      auto multiply = [&](int c, const float (&a)[4], const float (&e)[4]) {
#pragma unroll
        for (int r = 0; r < R; r++) {
          uint4 q = v[u][r];
          acc[c][r] += T::lo(q.x) * a[0] + T::hi(q.x) * a[1] + T::lo(q.y) * a[2] + T::hi(q.y) * a[3];
          acc[c][r] += T::lo(q.z) * e[0] + T::hi(q.z) * e[1] + T::lo(q.w) * e[2] + T::hi(q.w) * e[3];
        }
      };
      if (k % 4 == 0 && at + 8 <= k) {                                                   // one question for all rows of x: their loads are under way together
#pragma unroll
        for (int c = 0; c < C; c++) {
          float a[4], e[4]; const float* p = x + (size_t)min(col + c, m - 1) * k + at;
          load_quad(a, p, 4, true); load_quad(e, p + 4, 4, true);
          multiply(c, a, e);
        }
      } else if (base + u * step < units)
#pragma unroll
        for (int c = 0; c < C; c++) {
          float a[4], e[4]; const float* p = x + (size_t)min(col + c, m - 1) * k + at;
          load_quad(a, p, k - at, k % 4 == 0); load_quad(e, p + 4, k - at - 4, k % 4 == 0);
          multiply(c, a, e);
        }
    }
  }
  pdl_wait();
  Sum sum{bias, add, scale};
  finish_rows<C, R>(acc, red, y, sum, place_of<C, R>(sum, n, m, row, col, part), part, split, 1.f);
}

// ---------------------------------------------------------------- tensor cores
#if __CUDA_ARCH__ >= 800
// Minimums 2(t&1) and 2(t&1)+1 of four, as a float16 pair: 1024 + m has m in its low bits
__device__ __forceinline__ u32 min_pair(u32 mins, int t) {
  return half2_add(__byte_perm(t & 1 ? mins >> 16 : mins, 0x64646464, 0x4140), 0xe400e400u);
}

// What a lane needs of 8 NT rows of activations for one group: codes of row 8n + g; scales and sums of rows 8n + 2t and 8n + 2t + 1
template <class F, int NT> struct Cols {
  uint4 c[NT][2]; float4 d0[NT], d1[NT], s0[NT], s1[NT]; u32 m[NT];
  __device__ int lo(int n, int b) const { return word(c[n][b >> 1], (b & 1) * 2); }
  __device__ int hi(int n, int b) const { return word(c[n][b >> 1], (b & 1) * 2 + 1); }
};
template <class F, int NT>
__device__ __forceinline__ Cols<F, NT> load_cols(const uint4* xq, const float* xd, const float* xs, const u32* xm, int gi, int lane) {
  constexpr int T = NT * 8;
  Cols<F, NT> c; int t = lane & 3;
  const char *q = at(xq, gi, T * 128) + lane * 16, *d = F::SUPER ? at(xd, gi >> 1, T * 4) + t * 8 : at(xd, gi, T * 16) + t * 32, *e = at(xm, gi, T * 16) + lane * 4, *s = at(xs, gi, T * 16) + t * 32;
#pragma unroll
  for (int n = 0; n < NT; n++) {
    c.c[n][0] = load16(q + n * 1024); c.c[n][1] = load16(q + n * 1024 + 512);
    if constexpr (F::SUPER) { uint2 v = load8(d + n * 32); c.d0[n].x = __uint_as_float(v.x); c.d1[n].x = __uint_as_float(v.y); }
    else { c.d0[n] = loadf4(d + n * 128); c.d1[n] = loadf4(d + n * 128 + 16); }
    if constexpr (F::MIN && F::SUPER) c.m[n] = load4(e + n * 128);
    if constexpr (F::MIN && !F::SUPER) { c.s0[n] = loadf4(s + n * 128); c.s1[n] = loadf4(s + n * 128 + 16); }
  }
  return c;
}
// acc [NT][4] += the product of one group of rows a (g) and b (g + 8) with 8 NT rows of activations
template <class F, int NT>
__device__ __forceinline__ void mma_group(float (&acc)[NT][4], const F& a, const F& b, const Cols<F, NT>& x, int odd, int t) {
  if constexpr (F::SUPER) {
    int total[NT][4] = {}; u32 sa = 0, sb = 0, ma = 0, mb = 0;
    if constexpr (F::MIN) { sa = a.scales(odd); sb = b.scales(odd); ma = min_pair(a.mins(odd), t); mb = min_pair(b.mins(odd), t); }
#pragma unroll
    for (int k = 0; k < 4; k++) {
      int a0, a1, a2, a3; a.codes(k, a0, a2); b.codes(k, a1, a3);
#pragma unroll
      for (int n = 0; n < NT; n++) {
        int c[4];
        if constexpr (F::MIN) {
          mma_32(c, a0, a1, a2, a3, x.lo(n, k), x.hi(n, k), 0);
          int s0 = ubyte(sa, k), s1 = ubyte(sb, k);
          total[n][0] += s0 * c[0]; total[n][1] += s0 * c[1]; total[n][2] += s1 * c[2]; total[n][3] += s1 * c[3];
        } else {
          int e[4];
          mma_16(c, a0, a1, x.lo(n, k)); mma_16(e, a2, a3, x.hi(n, k));
          total[n][0] += a.scale_lo(k) * c[0] + a.scale_hi(k) * e[0]; total[n][1] += a.scale_lo(k) * c[1] + a.scale_hi(k) * e[1];
          total[n][2] += b.scale_lo(k) * c[2] + b.scale_hi(k) * e[2]; total[n][3] += b.scale_lo(k) * c[3] + b.scale_hi(k) * e[3];
        }
      }
    }
    float da = a.d(), db = b.d(), na = 0, nb = 0;
    if constexpr (F::MIN) { na = a.dmin(); nb = b.dmin(); }
#pragma unroll
    for (int n = 0; n < NT; n++) {
      float c[4] = {}, d0 = x.d0[n].x, d1 = x.d1[n].x;
      if constexpr (F::MIN) mma_half(c, ma, mb, x.m[n]);
      acc[n][0] += d0 * (da * (float)total[n][0] - na * c[0]); acc[n][1] += d1 * (da * (float)total[n][1] - na * c[1]);
      acc[n][2] += d0 * (db * (float)total[n][2] - nb * c[2]); acc[n][3] += d1 * (db * (float)total[n][3] - nb * c[3]);
    }
  } else {
#pragma unroll
    for (int k = 0; k < 4; k++) {
      int a0, a1, a2, a3; a.codes(k, a0, a2); b.codes(k, a1, a3);
      float sa = a.scale(k), sb = b.scale(k);
#pragma unroll
      for (int n = 0; n < NT; n++) {
        int c[4]; mma_32(c, a0, a1, a2, a3, x.lo(n, k), x.hi(n, k), MAGIC);
        float d0 = word(x.d0[n], k), d1 = word(x.d1[n], k);
        acc[n][0] += sa * d0 * from_magic(c[0]); acc[n][1] += sa * d1 * from_magic(c[1]);
        acc[n][2] += sb * d0 * from_magic(c[2]); acc[n][3] += sb * d1 * from_magic(c[3]);
        if constexpr (F::MIN) {
          float s0 = word(x.s0[n], k), s1 = word(x.s1[n], k);
          acc[n][0] += a.min(k) * s0; acc[n][1] += a.min(k) * s1; acc[n][2] += b.min(k) * s0; acc[n][3] += b.min(k) * s1;
        }
      }
    }
  }
}
#endif
// y [m][n], m <= 8 NT. A block takes tiles of 16 MT rows in turn; its warps share the groups of a row. Each warp has a ring of DEPTH steps in shared memory (a step is
// one group of a tile) and keeps all but one of them on their way, across the tiles.
template <class F, int NT, int MT>
__global__ __launch_bounds__(NT == 1 ? 512 : 256, F::SUPER && F::MIN && NT > 1 && NT * MT <= 4 ? 2 : 1) void gemm_mma(const void* q, const void* h, const void* s, const void* d, const uint4* xq, const float* xd, const float* xs,
                                                                   const u32* xm, float* y, const float* bias, const float* add, float scale, int n, int m, int groups) {
#if __CUDA_ARCH__ >= 800
  constexpr int C = NT * 8, R = 16 * MT, PITCH = R + 4, STEP = MT * SLOT<F>, DEPTH = 4;           // PITCH: a warp's writes of a pair of columns fall into different banks
  extern __shared__ __align__(16) float red[];    // [2][warps][C][PITCH], then the rings [warps][DEPTH][MT] slots
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5, g = lane >> 2, t = lane & 3;
  Matrix w = matrix<F>(q, h, s, d, t);
  int tiles = (n + R - 1) / R, side = 0, slot = 0, ahead = 0;
  u32 ring = shared_address(red + 2 * warps * C * PITCH) + warp * DEPTH * STEP;
  int sixteen = 16 * groups, to_tile = blockIdx.x, to = warp;           // what is fetched next: a tile, and a group of it
  auto fetch_next = [&]() {
    if (to >= groups) { to = warp; to_tile += gridDim.x; }
    int row = to_tile * R + g;
    if (to_tile < tiles && to < groups)
#pragma unroll
      for (int k = 0; k < MT; k++) fetch<F>(ring + ahead * STEP + k * SLOT<F>, w, row * groups + to + k * sixteen, sixteen / 2, lane);
    to += warps;
    copy_commit();
    ahead = ahead + 1 == DEPTH ? 0 : ahead + 1;
  };
  pdl_trigger();
  for (int i = 0; i < DEPTH - 1; i++) fetch_next();
  pdl_wait();
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    float acc[MT][NT][4] = {};
    for (int gi = warp; gi < groups; gi += warps) {
      Cols<F, NT> x = load_cols<F, NT>(xq, xd, xs, xm, gi, lane);
      copy_wait<DEPTH - 2>();
      __syncwarp();                               // all lanes are done with the step before, whose place is filled now
      fetch_next();
#pragma unroll
      for (int k = 0; k < MT; k++) {
        u32 from = ring + slot * STEP + k * SLOT<F>, i = (tile * R + g) * groups + gi + k * sixteen;
        F a = take<F>(from, i, 0, lane), b = take<F>(from, i, 1, lane);
        mma_group<F, NT>(acc[k], a, b, x, gi & 1, t);
      }
      slot = slot + 1 == DEPTH ? 0 : slot + 1;
    }
    float* mine = red + (side * warps + warp) * C * PITCH;
#pragma unroll
    for (int k = 0; k < MT; k++)
#pragma unroll
      for (int e = 0; e < NT * 4; e++) mine[((e >> 2) * 8 + 2 * t + (e & 1)) * PITCH + k * 16 + g + 8 * (e >> 1 & 1)] = acc[k][e >> 2][e & 3];
    __syncthreads();
    for (int e = threadIdx.x; e < R * C; e += blockDim.x) {
      int r = e % R, c = e / R; float v = 0;
      for (int p = 0; p < warps; p++) v += red[((side * warps + p) * C + c) * PITCH + r];
      size_t at = (size_t)c * n + tile * R + r;
      if (tile * R + r < n && c < m) y[at] = Sum{bias, add, scale}(F::UNIT * v, at, tile * R + r);
    }
    side ^= 1;
  }
#endif
}

// ---------------------------------------------------------------- the plain way
// One thread a row of Q8_0 blocks as they lie in the file: 34 bytes, a float16 scale and 32 codes
__global__ void gemv_v0(const u8* raw, const float* x, float* y, int n, int k) {
  int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= n) return;
  float sum = 0;
  for (int b = 0; b < k / 32; b++) {
    const u8* block = raw + ((size_t)row * (k / 32) + b) * 34;
    float d = half_float(block[0] | block[1] << 8);
    for (int i = 0; i < 32; i++) sum += d * (float)(signed char)block[2 + i] * x[b * 32 + i];
  }
  y[row] = sum;
}
