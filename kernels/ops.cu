// The small operations of a step. Values are float32 [rows][width]; an input may be a column range of a wider array: p* is the distance of its rows.
// A thread has quads, 4 columns in a row. `whole`: widths and distances are multiples of 4 and addresses of 16 bytes, so that a quad is one load.
// A row's result depends on nothing but the row: sums over it run in an order that its width fixes.
#include "acts.cuh"
#include "formats.cuh"
#include "heads.cuh"

__device__ __forceinline__ void store_quad(float* p, const float (&v)[4], int left, bool whole) {
  if (whole && left > 0) { *(float4*)p = make_float4(v[0], v[1], v[2], v[3]); return; }
#pragma unroll
  for (int e = 0; e < 4; e++) if (e < left) p[e] = v[e];
}

// ---------------------------------------------------------------- embedding
__device__ __forceinline__ void put4(float* y, float a, float b, float c, float d) { *(float4*)y = make_float4(a, b, c, d); }
// y [rows][k] = scale * rows `ids` of a matrix as chapter 14 packs it. Four neighbouring lanes have a group of 128
template <class F>
__global__ void embed(float* y, const void* q, const void* h, const void* s, const void* d, const u32* ids, float scale, int k, int groups) {
  int i = blockIdx.x * blockDim.x + threadIdx.x, t = i & 3, g = i >> 2;
  pdl_trigger();
  pdl_wait();
  if (g >= groups) return;
  u32 id = load4(ids + blockIdx.y);
  float* to = y + (size_t)blockIdx.y * k + g * 128 + t * 4;
  F f = load<F>(matrix<F>(q, h, s, d, t), id * groups + g);
#pragma unroll
  for (int b = 0; b < 4; b++) {
    if (g * 128 + b * 32 >= k) break;
    int lo, hi; f.codes(b, lo, hi);
    float s0, s1, low, v[8];
    scales_of(f, g & 1, b, s0, s1, low);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      v[j] = __fmul_rn(__fadd_rn(__fmul_rn(sbyte(lo, j) * F::UNIT, s0), low), scale);
      v[4 + j] = __fmul_rn(__fadd_rn(__fmul_rn(sbyte(hi, j) * F::UNIT, s1), low), scale);
    }
    put4(to + b * 32, v[0], v[1], v[2], v[3]);
    put4(to + b * 32 + 16, v[4], v[5], v[6], v[7]);
  }
}
// The same of rows of 16 bits as in the file, `pitch` bytes apart, one value a thread
struct F16 { static __device__ float at(const char* row, int i) { return half_float(load2(row + 2 * i)); } };
struct BF16 { static __device__ float at(const char* row, int i) { return __uint_as_float((u32)load2(row + 2 * i) << 16); } };
template <class T> __global__ void embed_rows(float* y, const char* w, const u32* ids, float scale, int k, int pitch) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  pdl_trigger();
  pdl_wait();
  if (i < k) y[(size_t)blockIdx.y * k + i] = __fmul_rn(T::at(w + (size_t)load4(ids + blockIdx.y) * pitch, i), scale);
}

// ---------------------------------------------------------------- norms
// The sum over a block, the same in every thread; red has room for a float of each warp and was not used before: then one barrier is enough
__device__ __forceinline__ float block_sum(float v, float* red) {
  int lane = threadIdx.x & 31, warps = blockDim.x >> 5;
  v = warp_sum(v);
  if (warps == 1) return v;
  if (lane == 0) red[threadIdx.x >> 5] = v;
  __syncthreads();
  return warp_sum(lane < warps ? red[lane] : 0.f);
}
// Column of quad j: quads 2i and 2i + 1 of a warp are 256 columns side by side
__device__ __forceinline__ int quad_column(int j) { return (((j >> 1) * (blockDim.x >> 5) + (threadIdx.x >> 5)) * 2 + (j & 1)) * 128 + (threadIdx.x & 31) * 4; }
template <int V> __device__ __forceinline__ void load_row(float (&v)[V][4], const float* p, int width, bool whole) {
#pragma unroll
  for (int j = 0; j < V; j++) load_quad(v[j], p + quad_column(j), width - quad_column(j), whole);
}
// v, a row in registers with zeros behind its end -> the norm of it; w is in registers where there is room for it. red: two sums
template <int V>
__device__ __forceinline__ void normalise(float (&v)[V][4], const float (*early)[4], const float* w, const float* bias, float* red, float eps, int width, bool layer, bool whole) {
  if (layer) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < V; j++) sum += (v[j][0] + v[j][1]) + (v[j][2] + v[j][3]);
    float mean = block_sum(sum, red) / (float)width;
#pragma unroll
    for (int j = 0; j < V; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) if (quad_column(j) + e < width) v[j][e] -= mean;
  }
  float sum = 0;
#pragma unroll
  for (int j = 0; j < V; j++)
#pragma unroll
    for (int e = 0; e < 4; e++) sum = fmaf(v[j][e], v[j][e], sum);
  float r = rsqrt_approx(fmaf(block_sum(sum, red + 32), rcp_approx((float)width), eps));
#pragma unroll
  for (int j = 0; j < V; j++) {
    float f[4], b[4] = {};
    if (early) { f[0] = early[j][0]; f[1] = early[j][1]; f[2] = early[j][2]; f[3] = early[j][3]; } else load_quad(f, w + quad_column(j), width - quad_column(j), whole);
    if (bias) load_quad(b, bias + quad_column(j), width - quad_column(j), whole);
#pragma unroll
    for (int e = 0; e < 4; e++) v[j][e] = fmaf(__fmul_rn(v[j][e], r), f[e], b[e]);
  }
}
// A block has a row, V quads a thread: x += scale * y (or scale * norm of y with weights `post`) where there is a y, then the norm of x, as float32, quantised, or both.
// ids: the row of x for each output row. Rows m and beyond are zeros of the last part of quantised rows. PLAIN: an RMS norm of whole quads without `post` and biases, and nothing else in the code
template <int V, bool PLAIN>
__global__ __launch_bounds__(V > 4 ? 768 : 1024) void norm(float* out, float* x, const float* y, const u32* ids, const float* w, const float* bias, const float* post, const float* post_bias,
                                             u32* q0, float* d0, float* s0, u32* q1, float* d1, float* s1, u32* m1,
                                             float eps, float scale, int m, int width, int px, int py, int part, int layer, int whole) {
  __shared__ float red[4][32];
  constexpr bool EARLY = V <= (PLAIN ? 4 : 2);
  constexpr int AT_ONCE = EARLY && PLAIN ? V : 2;
  if (PLAIN) { bias = post = post_bias = nullptr; layer = 0; whole = 1; }
  int row = blockIdx.x;
  float f[EARLY ? V : 1][4], v[V][4] = {};
  pdl_trigger();
  int warp = __shfl_sync(~0u, (int)threadIdx.x >> 5, 0);
  if constexpr (EARLY) load_row<V>(f, w, width, whole);             // weights change for no kernel: they may be read before the wait
  const float* add = y + (size_t)row * py;
  if (PLAIN && row < m)
#pragma unroll
    for (int j = 0; j < V; j++) if (quad_column(j) < width) { if (!ids) prefetch(x + (size_t)row * px + quad_column(j)); if (y) prefetch(add + quad_column(j)); }
  pdl_wait();
  if (row < m) {
    float* from = x + (size_t)(ids ? load4(ids + row) : row) * px;
    load_row<V>(v, y ? add : from, width, whole);
    if (post) normalise<V>(v, nullptr, post, post_bias, red[0], eps, width, layer, whole);
    if (y)
#pragma unroll
      for (int j = 0; j < V; j += AT_ONCE) {      // all loads first: what is stored waits for what was loaded
        float a[AT_ONCE][4];
#pragma unroll
        for (int h = 0; h < AT_ONCE; h++) load_quad(a[h], from + quad_column(j + h), width - quad_column(j + h), whole);
#pragma unroll
        for (int h = 0; h < AT_ONCE; h++) {
#pragma unroll
          for (int e = 0; e < 4; e++) v[j + h][e] = fmaf(v[j + h][e], scale, a[h][e]);
          store_quad(from + quad_column(j + h), v[j + h], width - quad_column(j + h), whole);
        }
      }
    normalise<V>(v, EARLY ? f : nullptr, w, bias, red[2], eps, width, layer, whole);
    if (out)
#pragma unroll
      for (int j = 0; j < V; j++) store_quad(out + (size_t)row * width + quad_column(j), v[j], width - quad_column(j), whole);
  }
#pragma unroll
  for (int i = 0; i < V / 2; i++) store_quantized(v + 2 * i, {q0, d0, s0, nullptr}, {q1, d1, s1, m1}, i * (blockDim.x >> 5) + warp, row, width, part);
}

// ---------------------------------------------------------------- heads
// A warp has a head of a row of q or k. Output and input may be the same memory
__global__ __launch_bounds__(128) void heads(float* q_out, const float* q, float* k_out, const float* k, const int* positions, const float* table, const float* q_norm, const float* k_norm,
                                             float eps, int n_head, int n_head_k, int head_dim, int dim, int pqo, int pq, int pko, int pk) {
  int head = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), row = blockIdx.y;
  bool is_k = head >= n_head, on = head < n_head + n_head_k;
  pdl_trigger();
  Head<0> one;
  if (on) one.begin(is_k ? k_norm : q_norm, positions, table, row, head_dim, dim);
  pdl_wait();
  if (!on) return;
  float* to = is_k ? k_out + (size_t)row * pko + (head - n_head) * head_dim : q_out + (size_t)row * pqo + head * head_dim;
  one.turn(is_k ? k + (size_t)row * pk + (head - n_head) * head_dim : q + (size_t)row * pq + head * head_dim, eps, [&](int d, float x) { to[d] = x; });
}

// ---------------------------------------------------------------- activations
// act(gate) * up, or act(gate) where up is null, as float32, quantised, or both. A warp has 256 columns
__global__ __launch_bounds__(128) void gated(float* out, const float* gate, const float* up, u32* q0, float* d0, float* s0, u32* q1, float* d1, float* s1, u32* m1,
                                             int act, int m, int width, int pg, int pu, int part, int whole) {
  int pair = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), row = blockIdx.y;
  pdl_trigger();
  pdl_wait();
  if (pair * 256 >= width) return;
  float v[2][4] = {};
  if (row < m)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      int c = pair * 256 + h * 128 + (threadIdx.x & 31) * 4; float u[4] = {1, 1, 1, 1};
      load_quad(v[h], gate + (size_t)row * pg + c, width - c, whole);
      if (up) load_quad(u, up + (size_t)row * pu + c, width - c, whole);
#pragma unroll
      for (int e = 0; e < 4; e++) v[h][e] = c + e < width ? act_of(v[h][e], act) * u[e] : 0.f;
      if (out) store_quad(out + (size_t)row * width + c, v[h], width - c, whole);
    }
  store_quantized(v, {q0, d0, s0, nullptr}, {q1, d1, s1, m1}, pair, row, width, part);
}

// ---------------------------------------------------------------- element by element
// out = x + scale * y; a bias is a y whose rows are 0 apart
__global__ void add(float* out, const float* x, const float* y, float scale, int width, int px, int py, int whole) {
  int c = (blockIdx.x * blockDim.x + threadIdx.x) * 4, row = blockIdx.y;
  float a[4], b[4];
  pdl_trigger();
  pdl_wait();
  load_quad(a, x + (size_t)row * px + c, width - c, whole);
  load_quad(b, y + (size_t)row * py + c, width - c, whole);
#pragma unroll
  for (int e = 0; e < 4; e++) a[e] = fmaf(b[e], scale, a[e]);
  store_quad(out + (size_t)row * width + c, a, width - c, whole);
}
// cap * tanh(scale * x / cap), or scale * x where cap is 0; ids: the row of x for each output row
__global__ void scaled_rows(float* out, const float* x, const u32* ids, float cap, float scale, int width, int px, int whole) {
  int c = (blockIdx.x * blockDim.x + threadIdx.x) * 4, row = blockIdx.y;
  float a[4];
  pdl_trigger();
  pdl_wait();
  load_quad(a, x + (size_t)(ids ? load4(ids + row) : row) * px + c, width - c, whole);
#pragma unroll
  for (int e = 0; e < 4; e++) { a[e] *= scale; if (cap != 0) a[e] = cap * tanhf(a[e] / cap); }
  store_quad(out + (size_t)row * width + c, a, width - c, whole);
}
// Each head of a (A values) followed by the same head of b (B values)
__global__ void join_heads(float* out, const float* a, const float* b, int n_head, int A, int B, int pa, int pb) {
  int i = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y, h = i / (A + B), e = i % (A + B);
  pdl_trigger();
  pdl_wait();
  if (h < n_head) out[(size_t)row * n_head * (A + B) + i] = loadf(e < A ? a + (size_t)row * pa + h * A + e : b + (size_t)row * pb + h * B + e - A);
}
