"""The emulator: it computes what the references compute, with every plan of every kernel of chapter 14, and tells what a kernel does wrong instead of hanging or crashing."""
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from gpu_arrays import emulated

from literate_engine import emulator
from literate_engine.cuda import PROBE, CudaError, CudaModule, Graph, Launch, bench_gpu, cupy, device
from literate_engine.linear import ACT_OF, linear_int8_ref, linear_ref
from literate_engine.linear_gpu import GPU_FORMATS, HALVES, LINEAR, plans, prepare, quantize_act_gpu, to_gpu
from literate_engine.quants import QUANT_TYPES, dequantize, quantize

pytestmark = [pytest.mark.usefixtures("emulated_gpu"), pytest.mark.skipif(not emulated(), reason="a real GPU, which such mistakes would harm")]
rng = np.random.default_rng(0)


def run(body: str, args=None, grid=1, block=64, signature="float* y, const float* x", **kw) -> np.ndarray:
    "The kernel with this body, from x = 0..32 to y [64] of zeros."
    y, x = cupy().zeros(64, np.float32), cupy().arange(33, dtype=np.float32)
    CudaModule(f'#include "common.cuh"\n__global__ void f({signature}) {{\n{body}\n}}\n')["f"](grid, block, [y, x] if args is None else args(y, x), **kw)
    return y.get()


# ---------------------------------------------------------------- right results
@pytest.mark.parametrize("type_name", [*GPU_FORMATS, *HALVES])
def test_products(type_name):
    "Every plan, int8 and float32 activations, rows that fill no tile."
    n, k = 37, 768 if QUANT_TYPES[type_name].block_size == 256 else 672
    raw = quantize(rng.standard_normal((n, k)).astype(np.float32), type_name)
    w, cp, d = to_gpu(raw, type_name), cupy(), device()
    for m in (1, 3, 8, 17, 33):
        x = (rng.standard_normal((m, k))*np.exp(rng.standard_normal((m, 1)))).astype(np.float32)
        for act in ("F32",) if type_name in HALVES else ("F32", ACT_OF[type_name]):
            a, want = quantize_act_gpu(cp.asarray(x), act), linear_ref(x, raw, type_name) if act == "F32" else linear_int8_ref(x, raw, type_name)
            terms = np.abs(x) @ np.abs(dequantize(raw, type_name)).T
            choices = plans(w, m, act, d) if m <= 32 else [None]
            LINEAR.compile(d.arch, {p.kernel for p in choices if p})
            for p in choices:
                y = cp.full((m, n), np.nan, np.float32)
                for launch in prepare(a, w, y, p): launch()
                assert np.max(np.abs(y.get() - want)/terms) < 2e-6, (m, act, p)


def test_turing(monkeypatch):
    "An architecture without int8 tensor cores of this kind takes the other plans."
    monkeypatch.setenv("LITERATE_GPU", "emulated:75")
    raw, x = quantize(rng.standard_normal((20, 512)).astype(np.float32), "Q4_K"), rng.standard_normal((3, 512)).astype(np.float32)
    w, a = to_gpu(raw, "Q4_K"), quantize_act_gpu(cupy().asarray(x), "Q8_K")
    assert device().arch == 75 and not any(p.kernel.startswith("gemm") for p in plans(w, 3, "Q8_K", device()))
    y = cupy().empty((3, 20), np.float32)
    for launch in prepare(a, w, y): launch()
    assert np.abs(y.get() - linear_int8_ref(x, raw, "Q4_K")).max() < 1e-3


def test_probe_graph_and_events():
    cp, d = cupy(), device()
    x, out = cp.arange(1 << 12, dtype=cp.uint32), cp.full(4*256, 7, cp.uint32)
    PROBE["read<4>"](4, 256, [x, out, np.int64(x.nbytes//16)])
    assert np.bitwise_xor.reduce(out.get()) == np.bitwise_xor.reduce(x.get())
    y = cp.zeros(d.num_sms*64, cp.float32)
    one = Launch(PROBE["relay"], d.num_sms, 64, [y], pdl=True)
    g = Graph(lambda: [one() for _ in range(5)])
    assert float(y.max()) == 0                                    # recorded, not run
    g(); g(); g.synchronize()
    assert float(y.min()) == float(y.max()) == 10
    assert all(t > 0 for t in bench_gpu({"g": g}, runs=2)["g"])
    assert PROBE["relay"].resources()["shared"] == 0


def test_intrinsics():
    "Shuffles, votes, permutes, rounding: against what they are defined as."
    lane = np.arange(32)
    cases = {"__shfl_xor_sync(~0u, t, 5)": lane ^ 5, "__shfl_down_sync(~0u, t, 3)": np.where(lane < 29, lane + 3, lane), "__shfl_up_sync(~0u, t, 3, 8)": np.where(lane % 8 >= 3, lane - 3, lane),
             "__shfl_sync(~0u, t, 9, 8)": lane//8*8 + 1, "__popc(__ballot_sync(~0u, t % 3 == 0))": np.full(32, 11), "__any_sync(~0u, t == 31)": np.full(32, 1), "__all_sync(~0u, t < 31)": np.full(32, 0),
             "(int)__reduce_max_sync(~0u, (unsigned)(t * 7 % 32))": np.full(32, 31), "__popc(__match_any_sync(~0u, t / 4))": np.full(32, 4), "__syncthreads_count(t < 5)": np.full(32, 5),
             "(int)__byte_perm(0x03020100u, 0x07060504u, 0x7501u) >> 24": np.full(32, 7), "__dp4a((int)0xff02fe01, 0x01010101, t)": lane + 1 - 2 + 2 - 1, "__float2int_rn(t + .5f)": np.rint(lane + .5),
             "__clz(t)": np.array([32 - int(v).bit_length() for v in lane]), "__ffs(t)": np.array([(int(v) & -int(v)).bit_length() for v in lane]), "(int)__brev(1u << t) == (int)(1u << 31 - t)": np.full(32, 1),
             "min(t, 7u)": np.minimum(lane, 7), "fmaxf(t, __int_as_float(0x7fc00000))": lane, "half_float(float_half(t + 2049.f))": (lane + 2049).astype(np.float16)}
    for expression, want in cases.items():
        got = run(f"int t = threadIdx.x; y[t] = {expression};", block=32)[:32]
        assert np.array_equal(got, np.asarray(want, np.float32)), (expression, got)


def test_halves():
    "All 65536 of them, and floats to the nearest: normal, subnormal, ties, overflow."
    cp = cupy()
    f = np.concatenate([np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32), rng.standard_normal(3000).astype(np.float32)*np.exp(rng.uniform(-20, 13, 3000)).astype(np.float32)])
    mid = (np.arange(0x7bff, dtype=np.uint16).view(np.float16).astype(np.float32) + np.arange(1, 0x7c00, dtype=np.uint16).view(np.float16).astype(np.float32))/2
    f = np.concatenate([f, mid, np.array([65519.996, 65520, -7e4], np.float32)])
    y, x = cp.zeros((2, len(f)), np.float32), cp.asarray(f)
    m = CudaModule('#include "common.cuh"\n__global__ void f(float* y, const float* x, int n) {\n  int i = blockIdx.x * 256 + threadIdx.x; pdl_wait();\n'
                   "  if (i < n) { y[i] = half_float(float_half(x[i])); y[n + i] = __uint_as_float((u32)float_bf16(x[i]) << 16); }\n}\n")
    m["f"](-(-len(f)//256), 256, [y, x, len(f)])
    with np.errstate(over="ignore"): assert np.array_equal(y.get()[0], f.astype(np.float16).astype(np.float32), equal_nan=True)
    u = f.view(np.uint32).astype(np.uint64)
    bf = ((u + 0x7fff + (u >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)
    assert np.array_equal(y.get()[1], np.where(np.isnan(f), np.nan, bf), equal_nan=True)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_tensor_cores_and_ldmatrix(kind):
    "A [16, 16] from shared memory by ldmatrix, B [16, 8] by its transpose: C = A B + C."
    cp = cupy()
    to16 = (lambda v: v.astype(np.float16).view(np.uint16)) if kind == "f16" else (lambda v: (v.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16))
    to32 = (lambda v: v.view(np.float16).astype(np.float32)) if kind == "f16" else (lambda v: (v.astype(np.uint32) << 16).view(np.float32))
    a, b, c = to16(rng.standard_normal((16, 16))), to16(rng.standard_normal((16, 8))), rng.standard_normal((16, 8)).astype(np.float32)
    text = f"""#include "common.cuh"
__global__ void f(float* c, const u16* a, const u16* b) {{
  __shared__ __align__(16) u16 sa[16 * 16], sb[16 * 8];
  int i = threadIdx.x, g = i >> 2, t = i & 3;
  for (int j = i; j < 256; j += 32) sa[j] = a[j];
  for (int j = i; j < 128; j += 32) sb[j] = b[j];
  __syncwarp();
  u32 ra[4], rb[4]; float acc[4];
  for (int e = 0; e < 4; e++) acc[e] = c[(g + 8 * (e >> 1)) * 8 + 2 * t + (e & 1)];
  ldmatrix_x4(ra, shared_address(sa + (i & 15) * 16 + (i >> 4) * 8));
  ldmatrix_x4_trans(rb, shared_address(sb + (i & 15) * 8));
  mma_16816_{kind}(acc, ra[0], ra[1], ra[2], ra[3], rb[0], rb[1]);
  for (int e = 0; e < 4; e++) c[(g + 8 * (e >> 1)) * 8 + 2 * t + (e & 1)] = acc[e];
}}
"""
    gc = cp.asarray(c)
    CudaModule(text)["f"](1, 32, [gc, cp.asarray(a), cp.asarray(b)])
    assert np.abs(gc.get() - (to32(a) @ to32(b) + c)).max() < 1e-5


def test_order_of_blocks_and_warps(monkeypatch):
    "Any seed gives the same result, if the kernel does not depend on the order; one that does is told by it."
    for seed in range(4):
        monkeypatch.setattr(emulator.EmulatedKernel, "seed", seed)
        assert np.array_equal(run("int i = blockIdx.x * 8 + threadIdx.x; y[i] = i;", grid=8, block=8), np.arange(64))
    last = set()
    for seed in range(8):
        monkeypatch.setattr(emulator.EmulatedKernel, "seed", seed)
        last.add(float(run("if (threadIdx.x == 0) y[0] = blockIdx.x;", grid=8)[0]))
    assert len(last) > 2


def test_asynchronous_copies():
    "What was copied is there after the wait and garbage before it; the rest of a short copy is zeros; barriers count bytes."
    body = """__shared__ __align__(16) float s[128]; u32 a = shared_address(s) + threadIdx.x * 16;
  if (threadIdx.x < 8) copy<16>(a, x + 4 * threadIdx.x); else copy16_zero(a, x, 4);
  copy_commit(); float early = s[threadIdx.x * 4]; copy_wait<0>();
  y[threadIdx.x] = s[threadIdx.x * 4 + 1]; y[32 + threadIdx.x] = early;"""
    y = run(body, block=32)
    assert np.array_equal(y[:32], [4*i + 1 if i < 8 else 0 for i in range(32)]) and np.isnan(y[32:]).all()
    body = """__shared__ __align__(16) float s[32]; __shared__ u64 b; u32 a = shared_address(&b);
  if (threadIdx.x == 0) barrier_init(a, 1);
  __syncthreads();
  if (threadIdx.x == 0) { barrier_expect(a, 128); bulk_copy(shared_address(s), x, 128, a); }
  barrier_wait(a, 0); y[threadIdx.x] = s[threadIdx.x & 31];"""
    assert np.array_equal(run(body), np.arange(64) % 32)


def test_static_arrays_are_aligned():
    "Where the compiler puts them: an address in shared memory is a multiple of what the pointer is a multiple of."
    for before in ("", "__shared__ char c[5]; if (threadIdx.x == 0) c[0] = 0;"):
        body = before + """__shared__ __align__(128) float s[128]; u32 a = shared_address(s);
  for (int i = threadIdx.x; i < 128; i += 32) s[i] = i;
  __syncwarp(); uint4 v = shared16(a + 16 * threadIdx.x); y[threadIdx.x] = __uint_as_float(v.y); y[32 + threadIdx.x] = a % 128;"""
        y = run(body, block=32)
        assert np.array_equal(y[:32], 4*np.arange(32) + 1) and not y[32:].any()


# ---------------------------------------------------------------- mistakes
SHARED = "__shared__ float s[64];\n"
MISTAKES = {
    "half a warp shuffles": ("if (threadIdx.x < 16) y[threadIdx.x] = __shfl_xor_sync(~0u, x[0], 1);", r"not all lanes of a warp come: lanes 0-15: __shfl_xor_sync source, line 3; lanes 16-31: has ended"),
    "two different shuffles": ("if (threadIdx.x & 1)\n y[0] = __shfl_xor_sync(~0u, x[0], 1);\nelse\n y[0] = __shfl_down_sync(~0u, x[0], 1);", r"different instructions: .*__shfl_down_sync source, line 6; .*__shfl_xor_sync source, line 4"),
    "a mask of some lanes": ("y[threadIdx.x] = __shfl_xor_sync(0xffff, x[0], 1);", "mask of some lanes only"),
    "half a warp at a barrier": ("if (threadIdx.x < 16)\n __syncthreads();\ny[threadIdx.x] = warp_sum(1.f);", "lanes 0-15: waits at __syncthreads source, line 4; lanes 16-31: __shfl_xor_sync kernels/common.cuh, line 14, in source, line 5"),
    "a barrier that some never reach": ("if (threadIdx.x < 32) __syncthreads();", "waits at __syncthreads for ever: of 64 threads 32 have ended"),
    "two barriers": ("if (threadIdx.x < 32)\n __syncthreads();\nelse\n __syncthreads();", r"thread \(32, 0, 0\): waits at another __syncthreads than thread \(0, 0, 0\)"),
    "a race of two warps": (SHARED + "s[threadIdx.x] = 1;\ny[threadIdx.x] = s[threadIdx.x ^ 63];", "shared memory that thread .* and they have not met in between\n    source, line [45]"),
    "a race in a warp": (SHARED + "s[threadIdx.x] = 1;\ny[threadIdx.x] = s[threadIdx.x ^ 1];", "they have not met in between"),
    "a write after a read": (SHARED + "s[threadIdx.x] = 1; __syncthreads();\ny[threadIdx.x] = s[threadIdx.x ^ 63];\ns[threadIdx.x] = 2;", "(writes|reads) shared memory that .* (read|wrote), and they have not met"),
    "a write after the second of two reads": (SHARED + "float v = 0; if (threadIdx.x == 1) v = s[0]; __syncwarp();\nif (threadIdx.x == 1) v += *(volatile float*)s;\nif (threadIdx.x == 2) s[0] = 1; y[threadIdx.x] = v;", "(writes|reads) shared memory that .* (read|wrote), and they have not met"),
    "a write after the second of two reads of a block": (SHARED + "float v = s[0]; __syncthreads(); v += *(volatile float*)s; __syncwarp();\nif (threadIdx.x == 2) s[0] = 1; y[threadIdx.x] = v;", "(writes|reads) shared memory that .* (read|wrote), and they have not met"),
    "an atomic operation and a read": (SHARED + "if (threadIdx.x == 0) s[0] = 0; __syncthreads();\natomicAdd(s, 1.f);\ny[threadIdx.x] = s[0];", "(reads shared memory that .* atomically changed|atomically changes shared memory that .* read), and they have not met in between\n    source, line [56]"),
    "an atomic operation before the zeros": (SHARED + "if (threadIdx.x == 40) s[0] = 0;\natomicAdd(s, 1.f);", "(writes shared memory that .* atomically changed|atomically changes shared memory that .* wrote), and they have not met"),
    "a write past the end": ("y[threadIdx.x + 1] = 1;", r"thread \(63, 0, 0\): writes just past the end of argument 0 \(float32 \[64\]\)\n    source, line 3"),
    "a write just past an odd end": ("((float*)x)[33] = threadIdx.x;", r"writes just past the end of argument 1 \(float32 \[33\]\)\n    source, line 3"),
    "a copy that begins inside": ("__shared__ __align__(16) float s[4];\ncopy<16>(shared_address(s), x + 32); copy_commit(); copy_wait<0>();", r"reads just past the end of argument 1 \(float32 \[33\]\)"),
    "a read just past an odd end": ("y[threadIdx.x] = x[threadIdx.x];", r"thread \(33, 0, 0\): reads just past the end of argument 1"),
    "a read before the start": ("y[0] = x[-1];", r"reads 4 bytes before argument 1"),
    "a write before the start": ("y[(int)threadIdx.x - 5] = 1;", r"thread \(0, 0, 0\): writes 20 bytes before argument 0 \(float32 \[64\]\)\n    source, line 3"),
    "a read a page before the start": ("y[0] = x[-4096];", r"reads 16384 bytes before argument 1"),
    "an atomic operation past the end": ("atomicAdd(y + threadIdx.x + 1, 1.f);", r"thread \(63, 0, 0\): writes just past the end of argument 0 \(float32 \[64\]\)\n    source, line 3"),
    "a copy from before the start": ("__shared__ __align__(16) float s[4];\ncopy<16>(shared_address(s), x - 4); copy_commit(); copy_wait<0>();", r"reads 16 bytes before argument 1 \(float32 \[33\]\)\n    kernels/ptx.cuh, line \d+, in source, line 4"),
    "a null pointer": ("y[0] = loadf((const float*)0 + 1);", "at the null pointer"),
    "a misaligned load": ("y[threadIdx.x] = loadf4(x + threadIdx.x).x;", r"misaligned: 16 bytes at once \(in argument 1 \(float32 \[33\]\), byte 4\)\n    kernels/ptx.cuh.*, in source, line 3"),
    "a misaligned pointer": ("y[threadIdx.x] = ((const float4*)(x + threadIdx.x))->x;", "not a multiple of the type's size"),
    "an index past a shared array": (SHARED + "s[threadIdx.x * 2] = 1;", "an index past the end of an array\n    source, line 4"),
    "a barrier nobody completes": (SHARED + "u32 a = shared_address(s); if (threadIdx.x == 0) barrier_init(a, 2);\n__syncthreads();\nbarrier_wait(a, 0);", "waits at a barrier in shared memory for ever"),
    "no memory for local variables": ("float big[65536]; for (int i = 0; i < 65536; i++) big[i] = x[i % 33]; y[0] = big[(int)x[3]];", "too much memory in local variables"),
    "a division by zero": ("y[0] = 7 / (int)x[0];", "divided by zero\n    source, line 3"),
    "a trap": ("__trap();", "__trap")}


ARRIVALS = SHARED + """__shared__ u64 full, empty; u32 f = shared_address(&full), e = shared_address(&empty); int t = threadIdx.x, lane = t & 31, warp = t >> 5; float v = 0; (void)e, (void)lane;
if (t == 0) { barrier_init(f, FULL); barrier_init(e, EMPTY); }
__syncthreads();
"""
ROUNDS = ("if (warp == 0) for (int i = 0; i < 4; i++) { if (i) barrier_wait(e, (i - 1) & 1); __syncwarp(); s[lane] = s[32 + lane] = i; __syncwarp(); if (lane == 0) barrier_arrive(f); }\n"
          "else for (int i = 0; i < 4; i++) { barrier_wait(f, i & 1); v += s[lane ^ 5] + s[lane * 2]; LAST barrier_arrive(e); }\ny[t & 63] = v;")
ORDERED = {
    "a pipe, each lane arrives": (1, 64, 96, ROUNDS.replace("LAST", "")),
    "a pipe, one lane of a warp arrives": (1, 2, 96, ROUNDS.replace("LAST", "__syncwarp(); if (lane == 7)")),
    "a chain of two": (1, 1, 96, "if (t == 5) { s[0] = 3; barrier_arrive(f); }\nif (t == 40) { barrier_wait(f, 0); s[1] = 1; barrier_arrive(e); }\nif (warp == 2) { barrier_wait(e, 0); v = s[0] + s[1]; }\ny[t & 63] = v;"),
    "one waits for its warp": (32, 1, 64, "if (warp == 0) { s[lane] = t; barrier_arrive(f); }\nelse { if (lane == 9) barrier_wait(f, 0); __syncwarp(); v = s[31 - lane]; }\ny[t] = v;"),
    "a lane for another of its warp": (1, 1, 32, "if (t == 9) { s[0] = 1; barrier_arrive(f); }\nif (t == 3) { barrier_wait(f, 0); v = s[0]; }\ny[t] = v;"),
    "copies": (1, 64, 96, "if (t == 0) for (int i = 0; i < 3; i++) { if (i) barrier_wait(e, (i - 1) & 1); barrier_expect(f, 128); bulk_copy(shared_address(s), x, 128, f); }\n"
                          "if (warp) for (int i = 0; i < 3; i++) { barrier_wait(f, i & 1); v += s[lane]; barrier_arrive(e); }\ny[t & 63] = v;")}
UNMET = "and they have not met in between"
UNORDERED_WAYS = {
    "nobody waits": (1, 1, 64, "if (t == 40) { s[0] = 1; barrier_arrive(f); }\nif (t == 0) v = s[0];\ny[t] = v;"),
    "another arrives": (1, 1, 96, "if (t == 40) s[0] = 1;\nif (t == 70) barrier_arrive(f);\nif (t == 0) { barrier_wait(f, 0); v = s[0]; }\ny[t & 63] = v;"),
    "written after the arrival": (1, 1, 64, "if (t == 40) { barrier_arrive(f); s[0] = 1; }\nif (t == 0) { barrier_wait(f, 0); v = s[0]; }\ny[t] = v;"),
    "one arrives for its warp before it": (1, 1, 64, "if (warp == 1) { s[lane] = 1; if (lane == 31) barrier_arrive(f); }\nelse { barrier_wait(f, 0); v = s[lane]; }\ny[t] = v;"),
    "one waits, its warp reads": (1, 1, 64, "if (warp == 1) { s[lane] = 1; __syncwarp(); if (lane == 31) barrier_arrive(f); }\nelse { if (lane == 0) barrier_wait(f, 0); v = s[lane]; }\ny[t] = v;"),
    "a full place is written": (1, 1, 64, "if (warp == 0) { s[lane] = 1; __syncwarp(); if (lane == 0) barrier_arrive(f); __syncwarp(); s[lane] = 2; }\nelse { barrier_wait(f, 0); v = s[lane]; }\ny[t] = v;"),
    "a copy to where others read": (1, 1, 96, "if (t == 0) { barrier_expect(f, 128); bulk_copy(shared_address(s), x, 128, f); barrier_wait(f, 0); barrier_expect(e, 128); bulk_copy(shared_address(s), x, 128, e); }\n"
                                          "if (warp) { barrier_wait(f, 0); v = s[lane]; }\ny[t & 63] = v;"),
    "the wrong one is waited for": (1, 1, 96, "if (t == 40) { s[0] = 1; barrier_arrive(f); }\nif (t == 70) { s[1] = 1; barrier_arrive(e); }\nif (t == 0) { barrier_wait(e, 0); v = s[0]; }\ny[t & 63] = v;"),
    "a barrier not yet initialised by its block": (1, 1, 64, "__shared__ u64 late; u32 l = shared_address(&late); if (t == 40) barrier_init(l, 1);\nif (t == 0) { barrier_arrive(l); barrier_wait(l, 0); }\ny[t] = v;")}


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_barriers_in_shared_memory(seed, monkeypatch):
    "They order what was done before an arrival and what is done after a wait, and nothing else."
    monkeypatch.setattr(emulator.EmulatedKernel, "seed", seed)
    ways = lambda full, empty, threads, body: (ARRIVALS.replace("FULL", str(full)).replace("EMPTY", str(empty)) + body, None, 2, threads)
    for way in ORDERED.values(): run(*ways(*way))
    for what, way in UNORDERED_WAYS.items():
        with pytest.raises(CudaError, match=UNMET if "not yet" not in what else f"{UNMET}|expects nobody"):
            run(*ways(*way))
            pytest.fail(what)


def test_threads_of_the_host_share_the_memory():
    "Memory is taken and given back in several threads at once, and no address belongs to two."
    lib, held, twice = emulator._emulator(), set(), []
    def work():
        for _ in range(2000):
            at = lib.emulator_alloc(256)
            if at in held: twice.append(at)
            held.add(at)
            held.discard(at)
            lib.emulator_free(at, 256)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert not twice


@pytest.mark.parametrize("what", MISTAKES)
def test_mistakes_are_told(what):
    body, message = MISTAKES[what]
    with pytest.raises(CudaError, match=message): run(body)
    assert np.array_equal(run("y[threadIdx.x] = threadIdx.x;"), np.arange(64))               # and the next kernel runs


def test_launches_that_cannot_be():
    for kw, message in ((dict(block=2048), "expected 1 to 1024"), (dict(grid=(1, 70000)), "a grid of"), (dict(shared=1 << 20), "bytes of shared memory"), (dict(args=lambda y, x: [y]), "takes 2 arguments, got 1"),
                        (dict(args=lambda y, x: [y, 3]), "argument 1 is an int of 32 bits, the kernel takes an array"), (dict(args=lambda y, x: [y, x, 1], signature="float* y, const float* x, float s"), "takes a float"),
                        (dict(args=lambda y, x: [y, x, 1], signature="float* y, const float* x, long long s"), "takes an int of 64 bits")):
        with pytest.raises(CudaError, match=message): run("y[0] = 1;", **kw)
    with pytest.raises(CudaError, match="shared memory past the end of the block's 128 bytes"): run("extern __shared__ __align__(16) float s[];\ns[threadIdx.x * 32] = 1;", shared=128)
    with pytest.raises(CudaError, match="kernels/probe.cu has no kernel nothing"): PROBE["nothing"].function
    with pytest.raises(CudaError, match="source, line 3: .*(was not declared|undeclared)"): run("y[0] = z;")


def test_a_kernel_that_does_not_end(monkeypatch):
    monkeypatch.setattr(emulator.EmulatedKernel, "limit_s", 0.3)
    with pytest.raises(CudaError, match="does not come to an end\n    source, line 3"): run("while (threadIdx.x == 5) { }")
    m = CudaModule("__global__ __launch_bounds__(128, 2) void f(float* y) { y[0] = 1; }\n")
    with pytest.raises(CudaError, match="a block of 160x1x1 threads: expected 1 to 128"): m["f"](1, 160, [cupy().zeros(1, np.float32)])


def test_dependent_launches():
    "Before pdl_wait nothing may be written, and nothing read that the kernels before may still write; whoever is launched so must wait."
    cp, x = cupy(), cupy().zeros(64, np.float32)
    text = '#include "common.cuh"\n__global__ void f(float* y, const float* x) {\n  pdl_trigger();\n%s\n}\n'
    good, writes, reads, never = (CudaModule(text % b)["f"] for b in ("pdl_wait(); y[threadIdx.x] = x[threadIdx.x];", "y[0] = 1; pdl_wait();", "float v = x[0]; pdl_wait(); y[0] = v;", "if (threadIdx.x < 3) pdl_wait();"))
    a, b = cp.zeros(64, np.float32), cp.zeros(64, np.float32)
    good(1, 64, [a, x], pdl=True); good(1, 64, [b, a], pdl=True)
    with pytest.raises(CudaError, match=r"written before pdl_wait \(in argument 0"): writes(1, 64, [a, x], pdl=True)
    reads(1, 64, [b, x], pdl=True)                                # weights: nobody writes them
    good(1, 64, [a, x], pdl=True)
    with pytest.raises(CudaError, match=r"read before pdl_wait, though the kernel before may still be writing it \(in argument 1"): reads(1, 64, [b, a], pdl=True)
    good(1, 64, [a, x], pdl=True); cp.cuda.get_current_stream().synchronize()
    reads(1, 64, [b, a], pdl=True)
    atomic = CudaModule(text % "atomicAdd(y, 1.f); pdl_wait();")["f"]
    with pytest.raises(CudaError, match=r"written before pdl_wait \(in argument 0.*\n    source, line 4"): atomic(1, 64, [a, x], pdl=True)
    with pytest.raises(CudaError, match="ends without pdl_wait"): never(1, 64, [a, x], pdl=True)
    never(1, 64, [a, x])                                          # launched plainly, it need not


# ---------------------------------------------------------------- the arrays
def test_arrays_are_kept_apart():
    "As with CuPy, an array of the GPU never meets one of NumPy unasked."
    cp, v = cupy(), np.arange(6, dtype=np.float32)
    x = cp.asarray(v)
    assert isinstance(x.reshape(2, 3).T.copy() + 1, cp.ndarray) and np.array_equal((x*2 + x).get(), 3*v) and float(x.sum()) == 15 and int(cp.argmax(x)) == 5
    for wrong in (lambda: x + v, lambda: np.asarray(x), lambda: cp.concatenate([x, v]), lambda: x.__setitem__(slice(None), v)):
        with pytest.raises(TypeError): wrong()
    with pytest.raises(ValueError, match="expected float32"): x.set(v.astype(np.float64))
    x.set(v + 1); x[:2] = cp.zeros(2, np.float32)
    assert np.array_equal(x.get(), [0, 0, 3, 4, 5, 6]) and x[2:].data.ptr == x.data.ptr + 8 and x.view(cp.uint32).dtype == np.uint32
    assert np.isnan(cp.empty(100, np.float32).get()).all()
    before = len(emulator.ALLOCATED)
    y = cp.zeros(1000); assert len(emulator.ALLOCATED) == before + 1
    del y; assert len(emulator.ALLOCATED) == before


def test_only_the_variable_chooses_it(monkeypatch):
    for value, arch in (("emulated", 90), ("emulated:80", 80)):
        monkeypatch.setenv("LITERATE_GPU", value)
        assert device().name == "emulated" and device().arch == arch
    for value in ("cuda", "emulated:12", "emulated:x"):
        monkeypatch.setenv("LITERATE_GPU", value)
        with pytest.raises(CudaError, match="expected real, emulated or emulated:ARCH"): device()
    monkeypatch.delenv("LITERATE_GPU")
    assert emulator.emulated_arch() is None


def test_no_compiler():
    code = ("import literate_engine.cuda as c\ntry: c.PROBE['relay'](1, 32, [c.cupy().zeros(32)])\n"
            "except c.CudaError as e: assert 'needs a C++ compiler' in str(e), e\nelse: raise AssertionError\n")
    env = {k: v for k, v in os.environ.items() if k != "CXX"} | {"LITERATE_GPU": "emulated", "PATH": ""}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)


# ---------------------------------------------------------------- the order of streams
def two_streams():
    cp = cupy()
    return cp, *(cp.cuda.Stream(non_blocking=True) for _ in range(2))


def on(stream, f, *args, **kw):
    with stream: return f(*args, **kw)


def relay(*arrays):
    "A kernel that reads and writes them, one after the other, on the current stream."
    for y in arrays: PROBE["relay"](1, 64, [y])


UNORDERED = "no stream, event or synchronisation orders the two"


def test_a_kernel_on_another_stream_than_the_fill():
    "The failure that a server had: zeros on the null stream, the kernel on one that does not wait for it."
    cp, s, t = two_streams()
    y = cp.zeros(64, np.float32)
    with pytest.raises(CudaError, match=rf"kernels/probe.cu: relay on stream \d+ writes argument 0 \(float32 \[64\]\), which zeros on the null stream wrote: {UNORDERED}"): on(s, relay, y)
    cp.cuda.Stream.null.synchronize()
    on(s, relay, y)
    with pytest.raises(CudaError, match=r"get on the null stream reads float32 \[64\], which kernels/probe.cu: relay on stream \d+ wrote"): y.get()
    assert y.get(stream=s)[0] == 2 and y.get()[0] == 2            # the first has waited
    for wait in (s.synchronize, cp.cuda.runtime.deviceSynchronize, cp.cuda.Device().__enter__().synchronize, lambda: y.get(stream=s), lambda: on(s, lambda: y.sum().item()), lambda: on(s, y.tolist)):
        on(s, relay, y)
        with pytest.raises(CudaError, match=UNORDERED): on(t, relay, y)
        with pytest.raises(CudaError, match=UNORDERED): y.get(stream=t, blocking=False)
        wait()
        on(t, relay, y)
        t.synchronize()


def test_events():
    cp, s, t = two_streams()
    y, done, u = on(s, cp.zeros, 64, np.float32), cp.cuda.Event(), cp.cuda.Stream(non_blocking=True)
    t.wait_event(done)                                            # not recorded: nothing to wait for
    with pytest.raises(CudaError, match="zeros on stream"): on(t, relay, y)
    done.record(s); t.wait_event(done); on(t, relay, y)
    u.wait_event(t.record()); on(u, relay, y)                     # and through t after what s did
    on(u, relay, y)                                               # after the event
    done.record(t); s.wait_event(done)
    with pytest.raises(CudaError, match=UNORDERED): on(s, relay, y)
    done.record(u); done.synchronize(); on(s, relay, y)           # waited for by the host: any stream comes after that
    on(s, relay, y); done.record(s)
    on(s, relay, y); done.synchronize()
    with pytest.raises(CudaError, match=UNORDERED): on(t, relay, y)
    with s: done.record()                                         # on the current stream
    assert done.done                                              # told that it is, one may rely on it
    on(t, relay, y)


def test_reads_and_writes():
    "Reads of two streams do not disturb each other; a write comes after all of them. A const pointer is a read."
    cp, s, t = two_streams()
    x, y, z = cp.arange(1 << 12, dtype=cp.uint32), cp.zeros(1024, np.uint32), cp.zeros(1024, np.uint32)
    cp.cuda.Stream.null.synchronize()
    read = lambda out: PROBE["read<4>"](4, 256, [x, out, np.int64(x.nbytes//16)])
    on(s, read, y); on(t, read, z)
    with pytest.raises(CudaError, match=rf"fill on stream \d+ writes uint32 \[4096\], which kernels/probe.cu: read<4> on stream \d+ read: {UNORDERED}"): on(s, x.fill, 0)
    t.synchronize()
    on(s, x.fill, 0)
    with pytest.raises(CudaError, match="argument 0"): on(t, read, z)


ARRAYS = {"zeros": lambda cp, y: cp.zeros(64, np.float32), "full": lambda cp, y: cp.full(64, 1, np.float32), "asarray": lambda cp, y: cp.asarray(np.ones(64, np.float32)), "array": lambda cp, y: cp.array(y),
          "multiply": lambda cp, y: y*2, "sum": lambda cp, y: y.sum(keepdims=True), "an index": lambda cp, y: y[cp.asarray(np.arange(5))], "astype": lambda cp, y: y.astype(np.float16), "concatenate": lambda cp, y: cp.concatenate([y, y])}
WRITES = {"an assignment": lambda cp, y: y.__setitem__(slice(3), 1), "fill": lambda cp, y: y.fill(1), "add": lambda cp, y: y.__iadd__(1), "copyto": lambda cp, y: cp.copyto(y, y), "set": lambda cp, y: y.set(np.ones(64, np.float32)),
          "negative": lambda cp, y: cp.negative(y, out=y)}


@pytest.mark.parametrize("what", [*ARRAYS, *WRITES])
def test_what_arrays_do(what):
    "Each runs on the current stream, and an error says which it was; a view is nothing that runs."
    cp, s, t = two_streams()
    y = cp.zeros(64, np.float32)
    cp.cuda.Stream.null.synchronize()
    out = on(s, ARRAYS.get(what) or WRITES[what], cp, y)
    out = y if what in WRITES else out.reshape(-1)[-1:]
    with pytest.raises(CudaError, match=rf"get on stream {t.number} reads \w+ \[\d+\], which {what} on stream {s.number} wrote: {UNORDERED}"): out.get(stream=t)
    out.get(stream=s); out.get(stream=t)


def test_parts_of_an_array():
    "Streams may share an array as long as they stay apart in it; what a kernel wrote is what it did, not what it could have."
    cp, s, t = two_streams()
    y = cp.zeros(256, np.float32)
    cp.cuda.Stream.null.synchronize()
    on(s, y[:128].fill, 1); on(t, y[128:].fill, 2)
    with pytest.raises(CudaError, match=UNORDERED): y[120:130].get(stream=s)
    on(s, relay, y[:64])                                          # and what a stream wrote before it still counts
    y[:128].get(stream=s)
    t.synchronize()
    m = CudaModule("__global__ void f(float* y) { y[threadIdx.x] = 3; }\n")["f"]
    on(s, m, 1, 64, [y]); on(t, y[64:].fill, 4)
    with pytest.raises(CudaError, match=UNORDERED): on(t, y[60:].fill, 4)
    s.synchronize(); t.synchronize()
    rows = CudaModule("__global__ void f(float* y, int first) { y[(2 * blockIdx.x + first) * 32 + threadIdx.x] = 5; }\n")["f"]
    on(s, rows, 4, 32, [y, 0]); on(t, rows, 4, 32, [y, 1])        # every other row
    with pytest.raises(CudaError, match=UNORDERED): on(t, rows, 1, 32, [y, 6])
    s.synchronize(); t.synchronize()
    one = CudaModule("__global__ void f(int* y, int i) { atomicAdd(y + i, 1); }\n")["f"]
    on(s, one, 1, 32, [y.view(np.int32), 7]); on(t, one, 1, 32, [y.view(np.int32), 8])                 # what atomic operations changed, too
    with pytest.raises(CudaError, match=UNORDERED): on(t, one, 1, 32, [y.view(np.int32), 7])
    s.synchronize(); t.synchronize(); y[:3] = 3; y[64] = 4
    assert y[0] == 3 and y[64] == 4


def test_the_null_stream():
    "It waits for streams that are made to be waited for, and they for it."
    cp, s, _ = two_streams()
    blocking, other, y = cp.cuda.Stream(), cp.cuda.Stream(), cp.zeros(64, np.float32)
    on(blocking, relay, y)
    with pytest.raises(CudaError, match=UNORDERED): on(other, relay, y)
    relay(y)
    on(other, relay, y)
    with pytest.raises(CudaError, match=UNORDERED): on(s, relay, y)
    cp.cuda.Stream.null.synchronize(); on(s, relay, y)            # it had to come after the others


def test_the_current_stream_is_a_threads():
    cp, s, t = two_streams()
    seen = []
    with s:
        with t: assert cp.cuda.get_current_stream() is t
        assert cp.cuda.get_current_stream() is s
        thread = threading.Thread(target=lambda: seen.extend([cp.cuda.get_current_stream(), t.use(), cp.cuda.get_current_stream()]))
        thread.start(); thread.join()
        assert cp.cuda.get_current_stream() is s
    assert seen == [cp.cuda.Stream.null, t, t] and cp.cuda.get_current_stream() is cp.cuda.Stream.null and len({s.ptr, t.ptr, 0}) == 3


def test_graphs_run_on_the_stream_of_their_launch():
    cp, s, t = two_streams()
    y = cp.zeros(64, np.float32)
    g = Graph(lambda: relay(y), s)                                # waits for the current stream, so for zeros
    g(); g()
    with pytest.raises(CudaError, match=rf"relay on stream {t.number} writes .* relay on stream {s.number} wrote"): g.graph.launch(t)
    g.synchronize(); g.graph.launch(t)
    with pytest.raises(CudaError, match=f"zeros on stream {s.number}, which captures"): Graph(lambda: cp.zeros(3), s)
    assert y.get(stream=t)[0] == 4


def test_copies_by_address():
    cp, s, t = two_streams()
    y, h = cp.zeros(64, np.float32), np.arange(64, dtype=np.float32)
    runtime = cp.cuda.runtime
    with pytest.raises(CudaError, match=rf"memcpyAsync on stream {s.number} writes 128 bytes at 0x[0-9a-f]+, which zeros on the null stream wrote"): runtime.memcpyAsync(y.data.ptr, h.ctypes.data, 128, 1, s.ptr)
    runtime.memcpy(y.data.ptr, h.ctypes.data, 128, 1)             # on the null stream, and waited for
    runtime.memcpyAsync(y.data.ptr, h.ctypes.data, 256, 1, s.ptr)
    with pytest.raises(CudaError, match="memsetAsync"): runtime.memsetAsync(y.data.ptr, 0, 4, t.ptr)
    with pytest.raises(CudaError, match="memcpy on the null stream reads"): runtime.memcpy(h.ctypes.data, y.data.ptr, 4, 2)
    assert np.array_equal(y.get(stream=s), h)
    runtime.memset(y.data.ptr, 0, 256)
    with pytest.raises(CudaError, match="which memset on the null stream wrote"): on(s, relay, y)


def test_memory_of_the_host():
    "It must not be sent again before the host has waited."
    cp, s, t = two_streams()
    y, h = on(s, cp.zeros, 64, np.float32), np.frombuffer(cp.cuda.alloc_pinned_memory(512), np.float32, 128)
    y.set(h[:64], stream=s); y.set(h[64:], stream=s)
    with pytest.raises(CudaError, match=rf"set on stream {s.number} reads 256 bytes of the host, which set on stream {s.number} read: the host memory of a copy that may still run"): y.set(h[63:127], stream=s)
    done = s.record()
    t.wait_event(done)
    with pytest.raises(CudaError, match="the host memory of a copy"): y.set(h[:64], stream=t)         # a stream that waits is not the host
    done.synchronize(); y.set(h[:64], stream=t)
    plain = np.zeros(64, np.float32)
    y.set(plain, stream=t); y.set(plain, stream=t); y.set(np.zeros(64, np.float32), stream=t); y.set(np.zeros(64, np.float32), stream=t)
    plain[5] = 1
    with pytest.raises(CudaError, match="the host memory of a copy"): y.set(plain[None][0], stream=t)
    t.synchronize()
    cp.cuda.runtime.hostRegister(plain.ctypes.data, plain.nbytes, 0)
    y.set(plain, stream=t)
    with pytest.raises(CudaError, match="the host memory of a copy"): cp.cuda.runtime.memcpyAsync(y.data.ptr, plain.ctypes.data + 4, 8, 1, t.ptr)
    cp.cuda.runtime.hostUnregister(plain.ctypes.data)
    t.synchronize(); y.set(plain, stream=t)


@pytest.mark.parametrize("value, is_emulated", [("real", False), ("", False), (None, True), ("emulated", True), ("emulated:80", True)])
def test_which_gpu_the_tests_take(value, is_emulated, monkeypatch):
    monkeypatch.delenv("LITERATE_GPU", raising=False)
    if value is not None: monkeypatch.setenv("LITERATE_GPU", value)
    assert emulated() is is_emulated and (emulator.emulated_arch() is not None) is (is_emulated and value is not None)


def test_memory_that_is_freed():
    "It comes back on the stream that it was allocated on, whoever still uses it on another."
    cp, s, t = two_streams()
    y = cp.zeros(64, np.float32)
    cp.cuda.Stream.null.synchronize()
    on(t, relay, y)
    del y
    with pytest.raises(CudaError, match=rf"zeros on the null stream writes float32 \[100\], which kernels/probe.cu: relay \(of an array freed since, whose memory this may be\) on stream {t.number} wrote: {UNORDERED}"):
        cp.zeros(100, np.float32)
    cp.zeros(1000, np.float32)                                    # does not fit there
    on(s, cp.zeros, 64, np.float32)                               # memory of another stream
    on(t, relay, cp.empty(64, np.float32))                        # the stream that used it last
    t.synchronize()
    cp.zeros(64, np.float32)
