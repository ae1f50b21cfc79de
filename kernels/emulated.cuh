// CUDA's language for a C++ compiler: what the emulator (chapter 10) puts in front of a kernel file. A kernel becomes a function that one thread of a block
// runs on a stack of its own; what threads do together is a call into emulator.cpp.
#pragma once
typedef __SIZE_TYPE__ size_t;
namespace emu { typedef unsigned char u8; typedef unsigned short u16; typedef unsigned int u32; typedef unsigned long long u64; }

// ---------------------------------------------------------------- types
#define VECTORS(T, N1, N2, N3, N4, A2, A4) struct N1 { T x; }; struct alignas(A2) N2 { T x, y; }; struct N3 { T x, y, z; }; struct alignas(A4) N4 { T x, y, z, w; }; \
  inline N2 make_##N2(T x, T y) { return {x, y}; } inline N3 make_##N3(T x, T y, T z) { return {x, y, z}; } inline N4 make_##N4(T x, T y, T z, T w) { return {x, y, z, w}; }
VECTORS(signed char, char1, char2, char3, char4, 2, 4)
VECTORS(unsigned char, uchar1, uchar2, uchar3, uchar4, 2, 4)
VECTORS(short, short1, short2, short3, short4, 4, 8)
VECTORS(unsigned short, ushort1, ushort2, ushort3, ushort4, 4, 8)
VECTORS(int, int1, int2, int3, int4, 8, 16)
VECTORS(unsigned int, uint1, uint2, uint3, uint4, 8, 16)
VECTORS(float, float1, float2, float3, float4, 8, 16)
VECTORS(long long, longlong1, longlong2, longlong3, longlong4, 16, 16)
VECTORS(unsigned long long, ulonglong1, ulonglong2, ulonglong3, ulonglong4, 16, 16)
VECTORS(double, double1, double2, double3, double4, 16, 16)
struct dim3 { unsigned x, y, z; };

// ---------------------------------------------------------------- what emulator.cpp does
namespace emu {
enum Op { SYNCWARP, SHFL, SHFL_UP, SHFL_DOWN, SHFL_XOR, BALLOT, MATCH, REDUCE, MMA, LDMATRIX, GROUP };
enum Kind { S8_16, S8_32, F16_8, F16_16, BF16_16 };
struct MmaArgs { int kind; void* c; const u32 *a, *b; };
struct LdmatrixArgs { u32 *r, p; bool trans; };
#define SHOWN __attribute__((visibility("default")))
#define LINE int line = __builtin_LINE()
extern SHOWN const char *arena, *arena_end;     // the memory of the GPU
extern SHOWN bool early;                        // this thread has not called pdl_wait yet, and should
extern SHOWN float half_table[1 << 16];
SHOWN void check_global(const void* p, u32 size);           // returns if all is well
SHOWN void* shared_pointer(u32 p, u32 size);
SHOWN u32 shared_name(const void* p);
SHOWN const u64* meet(Op op, u64 value, int line);          // all lanes of the warp come here, then each has the 32 values
SHOWN int block_barrier(int add, int line);                 // all threads of the block; the sum of `add`
SHOWN void* dynamic_shared();                // what `extern __shared__ float name[];` names
SHOWN void thread_waited();
SHOWN void thread_triggered();
SHOWN void copy(u32 to, const void* from, u32 n, u32 bytes);
SHOWN void copy_commit();
SHOWN void copy_wait(int n);
SHOWN void barrier_init(u32 barrier, u32 count);
SHOWN void barrier_arrive(u32 barrier, u32 bytes);
SHOWN bool barrier_try(u32 barrier, u32 parity);
SHOWN void bulk_copy(u32 to, const void* from, u32 bytes, u32 barrier);
SHOWN void atomic(const void* p, u32 size);
SHOWN void trap(const char* what, int line);
SHOWN u16 float_half(float f);
SHOWN u16 half_fma(u16 a, u16 b, u16 c);

template <class T> inline T* global(const void* p) {
  if (__builtin_expect((const char*)p < arena | (const char*)p >= arena_end | ((size_t)p & (sizeof(T) - 1)) != 0, 0)) check_global(p, sizeof(T));
  return (T*)p;
}
template <class T> inline T* shared(u32 p) { return (T*)shared_pointer(p, sizeof(T)); }
inline float half_float(u16 h) { return half_table[h]; }
template <class T, class F> inline T as(F f) { static_assert(sizeof(T) == sizeof(F), ""); T t; __builtin_memcpy(&t, &f, sizeof t); return t; }
template <class T> inline u64 bits(T v) { static_assert(sizeof(T) <= 8, ""); u64 b = 0; __builtin_memcpy(&b, &v, sizeof v); return b; }
template <class T> inline T from(u64 b) { T v; __builtin_memcpy(&v, &b, sizeof v); return v; }
template <int C> inline void mma(Kind kind, float (&c)[C], const u32* a, const u32* b) { MmaArgs m = {kind, c, a, b}; meet(MMA, (u64)&m, kind); }
template <int C> inline void mma(Kind kind, int (&c)[C], const u32* a, const u32* b) { MmaArgs m = {kind, c, a, b}; meet(MMA, (u64)&m, kind); }
inline void ldmatrix(u32* r, bool trans, u32 p) { LdmatrixArgs m = {r, p, trans}; meet(LDMATRIX, (u64)&m, trans); }
}

#ifndef EMULATOR
extern SHOWN uint3 threadIdx, blockIdx;
extern SHOWN dim3 blockDim, gridDim;
constexpr int warpSize = 32;

// ---------------------------------------------------------------- the words of the language
#define __global__ inline
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __restrict__
#define __shared__ static
#define __CUDACC__ 1

// ---------------------------------------------------------------- a warp together
#define ALL(mask) if ((mask) != ~0u) emu::trap("a warp intrinsic with a mask of some lanes only", line)
inline void __syncwarp(unsigned mask = ~0u, LINE) { ALL(mask); emu::meet(emu::SYNCWARP, 0, line); }
template <class T> inline T __shfl_sync(unsigned mask, T v, int from, int width = 32, LINE) {
  ALL(mask); int i = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z) & 31;
  return emu::from<T>(emu::meet(emu::SHFL, emu::bits(v), line)[(i & ~(width - 1)) | (from & (width - 1))]);
}
template <class T> inline T __shfl_xor_sync(unsigned mask, T v, int by, int width = 32, LINE) {
  ALL(mask); int i = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z) & 31, j = i ^ by;
  return emu::from<T>(emu::meet(emu::SHFL_XOR, emu::bits(v), line)[j / width <= i / width ? j : i]);
}
template <class T> inline T __shfl_down_sync(unsigned mask, T v, unsigned by, int width = 32, LINE) {
  ALL(mask); int i = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z) & 31, j = i + (int)by;
  return emu::from<T>(emu::meet(emu::SHFL_DOWN, emu::bits(v), line)[j / width == i / width ? j : i]);
}
template <class T> inline T __shfl_up_sync(unsigned mask, T v, unsigned by, int width = 32, LINE) {
  ALL(mask); int i = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z) & 31, j = i - (int)by;
  return emu::from<T>(emu::meet(emu::SHFL_UP, emu::bits(v), line)[j >= (i & ~(width - 1)) ? j : i]);
}
inline unsigned __ballot_sync(unsigned mask, int p, LINE) {
  ALL(mask); const emu::u64* v = emu::meet(emu::BALLOT, p != 0, line); unsigned out = 0;
  for (int i = 0; i < 32; i++) out |= (unsigned)v[i] << i;
  return out;
}
inline int __any_sync(unsigned mask, int p, LINE) { return __ballot_sync(mask, p, line) != 0; }
inline int __all_sync(unsigned mask, int p, LINE) { return __ballot_sync(mask, !p, line) == 0; }
template <class T> inline unsigned __match_any_sync(unsigned mask, T value, LINE) {
  ALL(mask); const emu::u64* v = emu::meet(emu::MATCH, emu::bits(value), line); unsigned out = 0;
  for (int i = 0; i < 32; i++) out |= (unsigned)(v[i] == emu::bits(value)) << i;
  return out;
}
#define REDUCE(NAME, STEP) template <class T> inline T __reduce_##NAME##_sync(unsigned mask, T value, LINE) { \
  ALL(mask); const emu::u64* v = emu::meet(emu::REDUCE, emu::bits(value), line); T a = emu::from<T>(v[0]); \
  for (int i = 1; i < 32; i++) { T b = emu::from<T>(v[i]); a = STEP; } return a; }
REDUCE(add, a + b)
REDUCE(min, a < b ? a : b)
REDUCE(max, a > b ? a : b)
REDUCE(and, a & b)
REDUCE(or, a | b)
REDUCE(xor, a ^ b)

// ---------------------------------------------------------------- a block together
inline void __syncthreads(LINE) { emu::block_barrier(0, line); }
inline int __syncthreads_count(int p, LINE) { return emu::block_barrier(p != 0, line); }
inline int __syncthreads_or(int p, LINE) { return emu::block_barrier(p != 0, line) != 0; }
inline int __syncthreads_and(int p, LINE) { return emu::block_barrier(p == 0, line) == 0; }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __nanosleep(unsigned) {}
inline void __trap(LINE) { emu::trap("__trap", line); }
inline size_t __cvta_generic_to_shared(const void* p) { return emu::shared_name(p); }

// ---------------------------------------------------------------- atomics: one thread runs at a time
#define UNSEEN template <class T, class V> __attribute__((no_sanitize("thread"), noinline)) T      // its load and its store are told as one access
#define ATOMIC(NAME, STEP) namespace emu { UNSEEN NAME(T* p, V v) { T a = *p, b = (T)v; *p = STEP; return a; } } \
  template <class T, class V> __forceinline__ T atomic##NAME(T* p, V v) { emu::atomic(p, sizeof(T)); return emu::NAME(p, v); }
ATOMIC(Add, a + b)
ATOMIC(Sub, a - b)
ATOMIC(Min, a < b ? a : b)
ATOMIC(Max, a > b ? a : b)
ATOMIC(And, a & b)
ATOMIC(Or, a | b)
ATOMIC(Xor, a ^ b)
ATOMIC(Exch, ((void)a, b))
ATOMIC(Inc, a >= b ? 0 : a + 1)
namespace emu { UNSEEN CAS(T* p, T compare, V v) { T a = *p; if (a == compare) *p = (T)v; return a; } }
template <class T> __forceinline__ T atomicCAS(T* p, T compare, T v) { emu::atomic(p, sizeof(T)); return emu::CAS(p, compare, v); }

// ---------------------------------------------------------------- numbers
inline int __float_as_int(float f) { return emu::as<int>(f); }
inline unsigned __float_as_uint(float f) { return emu::as<unsigned>(f); }
inline float __int_as_float(int i) { return emu::as<float>(i); }
inline float __uint_as_float(unsigned i) { return emu::as<float>(i); }
inline long long __double_as_longlong(double f) { return emu::as<long long>(f); }
inline double __longlong_as_double(long long i) { return emu::as<double>(i); }
template <class T> inline T __ldg(const T* p) { return *emu::global<T>(p); }
template <class T> inline T __ldcs(const T* p) { return *emu::global<T>(p); }
template <class T> inline T __ldcg(const T* p) { return *emu::global<T>(p); }
template <class T> inline void __stcs(T* p, T v) { *emu::global<T>(p) = v; }
template <class T> inline void __stcg(T* p, T v) { *emu::global<T>(p) = v; }
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 32; i += 8) c += (int)(signed char)(a >> i) * (signed char)(b >> i);
  return c;
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
  for (int i = 0; i < 32; i += 8) c += (a >> i & 255) * (b >> i & 255);
  return c;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
  emu::u64 v = (emu::u64)b << 32 | a; unsigned out = 0;
  for (int i = 0; i < 4; i++) {
    unsigned n = s >> 4 * i & 15, byte = v >> 8 * (n & 7) & 255;
    out |= (n & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
  }
  return out;
}
inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned n) { return (unsigned)(((emu::u64)hi << 32 | lo) << (n & 31) >> 32); }
inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned n) { return (unsigned)(((emu::u64)hi << 32 | lo) >> (n & 31)); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __clz(int v) { return v ? __builtin_clz(v) : 32; }
inline int __clzll(long long v) { return v ? __builtin_clzll(v) : 64; }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __ffsll(long long v) { return __builtin_ffsll(v); }
inline unsigned __brev(unsigned v) { unsigned o = 0; for (int i = 0; i < 32; i++) o |= (v >> i & 1) << (31 - i); return o; }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((emu::u64)a * b >> 32); }
inline int __mulhi(int a, int b) { return (int)((long long)a * b >> 32); }

#define ONE(NAME) inline float NAME##f(float x) { return __builtin_##NAME##f(x); } inline double NAME(double x) { return __builtin_##NAME(x); }
ONE(sqrt) ONE(exp) ONE(exp2) ONE(exp10) ONE(log) ONE(log2) ONE(log10) ONE(log1p) ONE(expm1) ONE(sin) ONE(cos) ONE(tan) ONE(tanh) ONE(erf) ONE(erfc) ONE(floor) ONE(ceil) ONE(trunc) ONE(round) ONE(rint) ONE(fabs)
#undef ONE
inline float powf(float x, float y) { return __builtin_powf(x, y); }
inline double pow(double x, double y) { return __builtin_pow(x, y); }
inline float fmodf(float x, float y) { return __builtin_fmodf(x, y); }
inline float ldexpf(float x, int e) { return __builtin_ldexpf(x, e); }
inline float copysignf(float x, float y) { return __builtin_copysignf(x, y); }
inline float rsqrtf(float x) { return (float)(1 / __builtin_sqrt((double)x)); }
inline double rsqrt(double x) { return 1 / __builtin_sqrt(x); }
inline float nearbyintf(float x) { return __builtin_rintf(x); }
inline void sincosf(float x, float* s, float* c) { *s = __builtin_sinf(x); *c = __builtin_cosf(x); }
inline float fmaxf(float a, float b) { return a >= b || b != b ? a : b; }
inline float fminf(float a, float b) { return a <= b || b != b ? a : b; }
inline double fmax(double a, double b) { return a >= b || b != b ? a : b; }
inline double fmin(double a, double b) { return a <= b || b != b ? a : b; }
inline float fmaf(float a, float b, float c) { return (float)((double)a * b + c); }
inline double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
inline bool isnan(float x) { return x != x; }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline bool isfinite(float x) { return __builtin_isfinite(x); }
inline bool signbit(float x) { return __builtin_signbit(x); }
inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return exp10f(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1 / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return rsqrtf(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __saturatef(float x) { return x > 0 ? x < 1 ? x : 1 : 0; }
namespace emu { template <class I> inline I saturate(double x, double lo, double hi, I top) { return x != x ? 0 : x <= lo ? (I)lo : x >= hi ? top : (I)x; } }
inline int __float2int_rn(float x) { return emu::saturate<int>(__builtin_rint((double)x), -2147483648., 2147483647., 2147483647); }
inline int __float2int_rz(float x) { return emu::saturate<int>(__builtin_trunc((double)x), -2147483648., 2147483647., 2147483647); }
inline int __float2int_rd(float x) { return emu::saturate<int>(__builtin_floor((double)x), -2147483648., 2147483647., 2147483647); }
inline int __float2int_ru(float x) { return emu::saturate<int>(__builtin_ceil((double)x), -2147483648., 2147483647., 2147483647); }
inline unsigned __float2uint_rn(float x) { return emu::saturate<unsigned>(__builtin_rint((double)x), 0., 4294967295., 4294967295u); }
inline unsigned __float2uint_rz(float x) { return emu::saturate<unsigned>(__builtin_trunc((double)x), 0., 4294967295., 4294967295u); }
inline float __int2float_rn(int x) { return (float)x; }
inline float __uint2float_rn(unsigned x) { return (float)x; }
inline int lrintf(float x) { return __float2int_rn(x); }
inline int abs(int x) { return x < 0 ? -x : x; }
inline float abs(float x) { return __builtin_fabsf(x); }
template <class A, class B> inline auto min(A a, B b) -> decltype(a + b) { typedef decltype(a + b) T; return (T)a < (T)b ? (T)a : (T)b; }
template <class A, class B> inline auto max(A a, B b) -> decltype(a + b) { typedef decltype(a + b) T; return (T)a > (T)b ? (T)a : (T)b; }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }

// ---------------------------------------------------------------- calling a kernel: its parameters from addresses, their kinds as letters
namespace emu {
template <int... I> struct Numbers {};
template <int N, int... I> struct UpTo { typedef typename UpTo<N - 1, N - 1, I...>::type type; };
template <int... I> struct UpTo<0, I...> { typedef Numbers<I...> type; };
template <class T> struct Letter { static constexpr char value = sizeof(T) == 8 ? 'q' : sizeof(T) == 4 ? 'i' : sizeof(T) == 2 ? 'h' : sizeof(T) == 1 ? 'b' : '?'; };
template <class T> struct Letter<T*> { static constexpr char value = 'p'; };
template <class T> struct Letter<const T*> { static constexpr char value = 'c'; };
template <> struct Letter<float> { static constexpr char value = 'f'; };
template <> struct Letter<double> { static constexpr char value = 'd'; };
template <class... A, int... I> inline void call(void (*kernel)(A...), void** p, Numbers<I...>) { kernel(*(A*)p[I]...); }
template <class... A> inline void call(void (*kernel)(A...), void** p) { call(kernel, p, typename UpTo<sizeof...(A)>::type()); }
template <class... A> inline const char* letters(void (*)(A...)) { static const char s[] = {Letter<A>::value..., 0}; return s; }
}
#define EMULATED_KERNEL(...) \
  extern "C" __attribute__((visibility("default"))) void emulated_call(void** p) { emu::call(&__VA_ARGS__, p); } \
  extern "C" __attribute__((visibility("default"))) const char* emulated_letters() { return emu::letters(&__VA_ARGS__); }
// The names of this file's own macros belong to the kernels again
#undef VECTORS
#undef SHOWN
#undef LINE
#undef ALL
#undef REDUCE
#undef UNSEEN
#undef ATOMIC
#endif
