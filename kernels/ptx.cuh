// Every instruction that C++ has no name for, once for the chip and once, in plain C++, for the emulator (chapter 10). No other file has `asm`.
// Shared memory is named by 32-bit addresses: shared_address(pointer). What an architecture lacks is not there, so that a kernel that needs it does not compile.
#pragma once
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
#define INLINE __device__ __forceinline__

#ifndef EMULATED
// ---------------------------------------------------------------- for the chip
// The next kernel may start now; this one may read what the previous wrote only after the wait. Without the launch attribute (and before sm_90) both do nothing.
INLINE void pdl_trigger() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
INLINE void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// A block that has nothing to do ends without waiting; at least one block of its grid has to wait, so that the kernel does not end before those in front of it
INLINE void pdl_leave() {}

// Weights: read once, so they need no place in L1. The "memory" clobber keeps the load where it is written, before the wait.
INLINE uint4 stream16(const void* p) {
  uint4 v; asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory"); return v;
}
// Everything else, and above all what the previous kernel wrote: a plain load, which the compiler may not move over the wait as it may an __ldg.
INLINE uint4 load16(const void* p) {
  uint4 v; asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory"); return v;
}
INLINE uint2 load8(const void* p) { uint2 v; asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory"); return v; }
INLINE u32 load4(const void* p) { u32 v; asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
INLINE u16 load2(const void* p) { u16 v; asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory"); return v; }
INLINE u8 load1(const void* p) { u32 v; asm volatile("ld.global.u8 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return (u8)v; }

// What this thread knows to be written, others see before what it writes next; what they wrote before what it has read, it sees. Weaker, and faster, than __threadfence
INLINE void fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
// The line of p, if it is one, to the cache that all multiprocessors share; nothing is read, so it may stand before the wait
INLINE void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p) : "memory"); }

INLINE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
INLINE uint4 shared16(u32 p) { uint4 v; asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(p) : "memory"); return v; }
INLINE uint2 shared8(u32 p) { uint2 v; asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(p) : "memory"); return v; }
INLINE u32 shared4(u32 p) { u32 v; asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(p) : "memory"); return v; }
INLINE u16 shared2(u32 p) { u16 v; asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(p) : "memory"); return v; }
INLINE void store_shared16(u32 p, uint4 v) { asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory"); }
INLINE void store_shared4(u32 p, u32 v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(p), "r"(v) : "memory"); }

INLINE u32 lane_id() { u32 v; asm("mov.u32 %0, %%laneid;" : "=r"(v)); return v; }

// Half floats: the bits in the low 16 of a u32; a pair has its first in the low half
INLINE float half_float(u32 h) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"((u16)h)); return f; }
INLINE u16 float_half(float f) { u16 h; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f)); return h; }
INLINE u32 half2_add(u32 a, u32 b) { u32 d; asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
INLINE u32 half2_mul(u32 a, u32 b) { u32 d; asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
INLINE u32 half2_fma(u32 a, u32 b, u32 c) { u32 d; asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c)); return d; }
#if __CUDA_ARCH__ >= 800
INLINE u32 float2_half2(float lo, float hi) { u32 d; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo)); return d; }
INLINE u32 float2_bf162(float lo, float hi) { u32 d; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo)); return d; }
INLINE u16 float_bf16(float f) { return (u16)float2_bf162(f, 0.f); }
#else
INLINE u32 float2_half2(float lo, float hi) { return float_half(lo) | (u32)float_half(hi) << 16; }
INLINE u16 float_bf16(float f) {                // to nearest, halves to even
  u32 u = __float_as_uint(f);
  return f != f ? 0x7fff : (u16)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
INLINE u32 float2_bf162(float lo, float hi) { return float_bf16(lo) | (u32)float_bf16(hi) << 16; }
#endif

// 2^x, 1/x and 1/sqrt(x) to about 2 ulp, one instruction each; subnormals are zero
INLINE float exp2_approx(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
INLINE float rcp_approx(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
INLINE float rsqrt_approx(float x) { float y; asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
#if __CUDA_ARCH__ >= 800
// The larger one; not a number, if one of them is, where fmaxf would take the other
INLINE float max_nan(float a, float b) { float d; asm("max.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b)); return d; }
#else
INLINE float max_nan(float a, float b) { return a > b || a != a ? a : b; }
#endif

// Tensor cores, a warp at a time, lane 4g + t. A [16][k] row by row: a0 row g, a1 row g + 8, columns 4t.. of words (8-bit), 2t, 2t+1 (16-bit); a2, a3 the same in the right half of k.
// B [k][8]: column g, rows as A's columns. C [16][8]: c0, c1 row g, columns 2t, 2t + 1; c2, c3 row g + 8.
INLINE void mma_half(float (&c)[4], u32 a0, u32 a1, u32 b0) {                       // c = A B, f16, k = 8
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%7,%7,%7};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3]) : "r"(a0), "r"(a1), "r"(b0), "f"(0.f));
}
INLINE void mma_1688_f16(float (&c)[4], u32 a0, u32 a1, u32 b0) {                   // c += A B, f16, k = 8: what sm_75 has
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(b0));
}
#if __CUDA_ARCH__ >= 800
INLINE void mma_32(int (&c)[4], int a0, int a1, int a2, int a3, int b0, int b1, int zero) {          // c = A B + zero, signed bytes, k = 32
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(zero));
}
INLINE void mma_16(int (&c)[4], int a0, int a1, int b0) {                           // c = A B, signed bytes, k = 16
  asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%7,%7,%7};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3]) : "r"(a0), "r"(a1), "r"(b0), "r"(0));
}
INLINE void mma_16816_f16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {           // c += A B, f16, k = 16
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
INLINE void mma_16816_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {          // c += A B, bf16, k = 16
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
#endif
// 8x8 matrices of 16 bits from shared memory into the registers that mma wants: lane i of 8m..8m+7 gives the address of row i - 8m (16 bytes, aligned) of matrix m;
// r[m] is row g, columns 2t, 2t + 1 of matrix m; with trans, of its transpose. All 32 lanes take part.
INLINE void ldmatrix_x4(u32 (&r)[4], u32 p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(p) : "memory");
}
INLINE void ldmatrix_x4_trans(u32 (&r)[4], u32 p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(p) : "memory");
}

#if __CUDA_ARCH__ >= 800
// Copies that go on while the thread does: N bytes (4, 8, 16) global -> shared; a thread's copies up to a commit are a group, copy_wait<N> waits until at most N groups are on their way
template <int N> INLINE void copy(u32 to, const void* from) {
  if constexpr (N == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  else asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(N) : "memory");
}
// 16 bytes, of which only the first `bytes` (0 to 16) are read and the rest are zeros
INLINE void copy16_zero(u32 to, const void* from, u32 bytes) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory"); }
// The same of N bytes, all or nothing: bytes is N or 0
template <int N> INLINE void copy_zero(u32 to, const void* from, u32 bytes) {
  if constexpr (N == 16) copy16_zero(to, from, bytes);
  else asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(N), "r"(bytes) : "memory");
}
INLINE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> INLINE void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
#endif

#if __CUDA_ARCH__ >= 900
// A barrier in shared memory (8 bytes, aligned) that counts arrivals and bytes. It starts in phase 0; a phase ends when `count` threads have arrived and all bytes announced are there.
INLINE void barrier_init(u32 barrier, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory"); }
INLINE void barrier_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }        // after barrier_init, before __syncthreads
INLINE void barrier_expect(u32 barrier, u32 bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory"); }   // arrives, too
INLINE void barrier_arrive(u32 barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }
INLINE bool barrier_try(u32 barrier, u32 parity) {
  u32 done;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  return done;
}
INLINE void barrier_wait(u32 barrier, u32 parity) { while (!barrier_try(barrier, parity)) {} }           // until the phase of this parity has ended
// `bytes` (a multiple of 16, both ends aligned to 16) global -> shared, by the copy engine, asked for by one thread; counted by the barrier
INLINE void bulk_copy(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
INLINE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }               // what threads stored is seen by the copy engine and wgmma
#endif

#else
// ---------------------------------------------------------------- for the emulator
// What a thread can do alone is done here; where a warp or block meets, and wherever memory is checked, emulated.cuh has the body (namespace emu)
INLINE void pdl_trigger() { emu::thread_triggered(); }
INLINE void pdl_wait() { emu::thread_waited(); }
INLINE void pdl_leave() { emu::thread_waited(); }
INLINE uint4 stream16(const void* p) { return *emu::global<uint4>(p); }
INLINE uint4 load16(const void* p) { return *emu::global<uint4>(p); }
INLINE uint2 load8(const void* p) { return *emu::global<uint2>(p); }
INLINE u32 load4(const void* p) { return *emu::global<u32>(p); }
INLINE u16 load2(const void* p) { return *emu::global<u16>(p); }
INLINE u8 load1(const void* p) { return *emu::global<u8>(p); }

INLINE void prefetch(const void*) {}
INLINE void fence() {}
INLINE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
INLINE uint4 shared16(u32 p) { return *emu::shared<uint4>(p); }
INLINE uint2 shared8(u32 p) { return *emu::shared<uint2>(p); }
INLINE u32 shared4(u32 p) { return *emu::shared<u32>(p); }
INLINE u16 shared2(u32 p) { return *emu::shared<u16>(p); }
INLINE void store_shared16(u32 p, uint4 v) { *emu::shared<uint4>(p) = v; }
INLINE void store_shared4(u32 p, u32 v) { *emu::shared<u32>(p) = v; }

INLINE u32 lane_id() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z) & 31; }

INLINE float half_float(u32 h) { return emu::half_float((u16)h); }
INLINE u16 float_half(float f) { return emu::float_half(f); }
INLINE u32 half2_add(u32 a, u32 b) { return float_half(half_float(a) + half_float(b)) | (u32)float_half(half_float(a >> 16) + half_float(b >> 16)) << 16; }
INLINE u32 half2_mul(u32 a, u32 b) { return float_half(half_float(a) * half_float(b)) | (u32)float_half(half_float(a >> 16) * half_float(b >> 16)) << 16; }
INLINE u32 half2_fma(u32 a, u32 b, u32 c) {     // rounded once, as the chip does: emu::half_fma takes care
  return emu::half_fma(a, b, c) | (u32)emu::half_fma(a >> 16, b >> 16, c >> 16) << 16;
}
INLINE u32 float2_half2(float lo, float hi) { return float_half(lo) | (u32)float_half(hi) << 16; }
INLINE u16 float_bf16(float f) { u32 u = __float_as_uint(f); return f != f ? 0x7fff : (u16)((u + 0x7fff + (u >> 16 & 1)) >> 16); }
INLINE u32 float2_bf162(float lo, float hi) { return float_bf16(lo) | (u32)float_bf16(hi) << 16; }
INLINE float exp2_approx(float x) { return exp2f(x); }
INLINE float rcp_approx(float x) { return 1 / x; }
INLINE float rsqrt_approx(float x) { return rsqrtf(x); }
INLINE float max_nan(float a, float b) { return a > b || a != a ? a : b; }

INLINE void mma_half(float (&c)[4], u32 a0, u32 a1, u32 b0) { u32 a[] = {a0, a1}, b[] = {b0}; c[0] = c[1] = c[2] = c[3] = 0; emu::mma(emu::F16_8, c, a, b); }
INLINE void mma_1688_f16(float (&c)[4], u32 a0, u32 a1, u32 b0) { u32 a[] = {a0, a1}, b[] = {b0}; emu::mma(emu::F16_8, c, a, b); }
#if __CUDA_ARCH__ >= 800
INLINE void mma_32(int (&c)[4], int a0, int a1, int a2, int a3, int b0, int b1, int zero) {
  u32 a[] = {(u32)a0, (u32)a1, (u32)a2, (u32)a3}, b[] = {(u32)b0, (u32)b1}; c[0] = c[1] = c[2] = c[3] = zero; emu::mma(emu::S8_32, c, a, b);
}
INLINE void mma_16(int (&c)[4], int a0, int a1, int b0) { u32 a[] = {(u32)a0, (u32)a1}, b[] = {(u32)b0}; c[0] = c[1] = c[2] = c[3] = 0; emu::mma(emu::S8_16, c, a, b); }
INLINE void mma_16816_f16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { u32 a[] = {a0, a1, a2, a3}, b[] = {b0, b1}; emu::mma(emu::F16_16, c, a, b); }
INLINE void mma_16816_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { u32 a[] = {a0, a1, a2, a3}, b[] = {b0, b1}; emu::mma(emu::BF16_16, c, a, b); }
#endif
INLINE void ldmatrix_x4(u32 (&r)[4], u32 p) { emu::ldmatrix(r, false, p); }
INLINE void ldmatrix_x4_trans(u32 (&r)[4], u32 p) { emu::ldmatrix(r, true, p); }

#if __CUDA_ARCH__ >= 800
// The bytes land at the wait, not before: a kernel that reads too early reads garbage here too
template <int N> INLINE void copy(u32 to, const void* from) { emu::copy(to, from, N, N); }
INLINE void copy16_zero(u32 to, const void* from, u32 bytes) { emu::copy(to, from, 16, bytes); }
template <int N> INLINE void copy_zero(u32 to, const void* from, u32 bytes) { emu::copy(to, from, N, bytes); }
INLINE void copy_commit() { emu::copy_commit(); }
template <int N> INLINE void copy_wait() { emu::copy_wait(N); }
#endif

#if __CUDA_ARCH__ >= 900
INLINE void barrier_init(u32 barrier, u32 count) { emu::barrier_init(barrier, count); }
INLINE void barrier_fence() {}
INLINE void barrier_expect(u32 barrier, u32 bytes) { emu::barrier_arrive(barrier, bytes); }
INLINE void barrier_arrive(u32 barrier) { emu::barrier_arrive(barrier, 0); }
INLINE bool barrier_try(u32 barrier, u32 parity) { return emu::barrier_try(barrier, parity); }
INLINE void barrier_wait(u32 barrier, u32 parity) { while (!barrier_try(barrier, parity)) {} }
INLINE void bulk_copy(u32 to, const void* from, u32 bytes, u32 barrier) { emu::bulk_copy(to, from, bytes, barrier); }
INLINE void fence_async() {}
#endif
#endif

// While one of these lives, loads before pdl_wait are of bytes that no kernel of the step writes, though they lie in an array that one does write to
struct Unwritten {
#ifndef EMULATED
  INLINE Unwritten() {}
#else
  bool was;
  INLINE Unwritten() : was(emu::early) { emu::early = false; }
  INLINE ~Unwritten() { emu::early = was; }
#endif
};

// Tensor cores of sm_90a, a warpgroup (4 warps, the first a multiple of 4) at a time, while the threads go on: c += A B with A [64][16] in registers (warp w has rows 16w.., as A of
// mma_16816), B [16][128] in shared memory, C [64][128] as 16 tiles of 8 columns, each as C of mma_16816. B is named by wgmma_matrix: matrices of 8 columns x 8 rows of k, 16 bytes a column,
// the second eight of k `next_k` bytes further, the next 8 columns `next_columns` bytes further. Until wgmma_wait says so, nobody may touch c, change a's registers or overwrite B.
#if defined(EMULATED) && __CUDA_ARCH__ == 900
INLINE u64 wgmma_matrix(u32 address, u32 next_k, u32 next_columns) { return address | (u64)(next_k >> 4) << 32 | (u64)(next_columns >> 4) << 48; }
INLINE void wgmma_fence() {}
INLINE void wgmma_commit() {}
template <int N> INLINE void wgmma_wait() {}
template <bool BF> INLINE void wgmma(float (&c)[16][4], const u32 (&a)[4], u64 matrix) {
  u32 own = (u32)matrix + lane_id() * 4, next_k = (matrix >> 32 & 0xffff) << 4, next_columns = (u32)(matrix >> 48) << 4;
  for (int i = 0; i < 16; i++) {
    u32 b0 = shared4(own + i * next_columns), b1 = shared4(own + i * next_columns + next_k);
    if (BF) mma_16816_bf16(c[i], a[0], a[1], a[2], a[3], b0, b1); else mma_16816_f16(c[i], a[0], a[1], a[2], a[3], b0, b1);
  }
}
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
INLINE u64 wgmma_matrix(u32 address, u32 next_k, u32 next_columns) { return (u64)(address >> 4 & 0x3fff) | (u64)(next_k >> 4) << 16 | (u64)(next_columns >> 4) << 32; }
INLINE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }             // before the first, and after c or a's registers were changed
INLINE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }     // those so far are a group
template <int N> INLINE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
#define C4(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define WGMMA(T) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32." T "." T " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23," \
    "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, " \
    "{%64,%65,%66,%67}, %68, p, 1, 1, 0;\n}" \
    : C4(0), C4(1), C4(2), C4(3), C4(4), C4(5), C4(6), C4(7), C4(8), C4(9), C4(10), C4(11), C4(12), C4(13), C4(14), C4(15) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(matrix))
template <bool BF> INLINE void wgmma(float (&c)[16][4], const u32 (&a)[4], u64 matrix) { if constexpr (BF) WGMMA("bf16"); else WGMMA("f16"); }
#undef WGMMA
#undef C4
#endif
