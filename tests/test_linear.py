"""Matrix kernels: every format, both kinds of activations, odd shapes, extreme codes, shares of threads, the other instruction sets."""
import os
import subprocess
import sys

import numpy as np
import pytest

from literate_engine.linear import ACT_OF, linear_int8_ref, linear_ref, quantize_act_ref
from literate_engine.linear_cpu import act_bytes, aligned_zeros, linear_cpu, pack, packed_bytes, pad16, share_op
from literate_engine.linear_lowbit import LINEAR_FORMATS
from literate_engine.quants import QUANT_TYPES, dequantize
from literate_engine.cpu_ops import run_op
from literate_engine.simd import FEATURES

FORMATS = [f for f in LINEAR_FORMATS if f in QUANT_TYPES]            # CODED is not a type of file: test_formats.py
SCALES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,), "MXFP4": ()}   # where float16 scales stand; default: 0


def random_raw(fmt, n, k, rng, extreme=False):
    "Random blocks, not made by a quantiser: every code and every integer scale occurs. extreme: codes are all smallest or all largest in long runs."
    t = QUANT_TYPES[fmt]
    if fmt in ("F32", "F16", "BF16"):
        w = rng.standard_normal((n, k)).astype(np.float32)
        return (w if fmt == "F32" else w.astype(np.float16) if fmt == "F16" else (w.view(np.uint32) >> 16).astype(np.uint16)).view(np.uint8)
    raw = rng.integers(0, 256, (n, k//t.block_size, t.type_size), dtype=np.uint8)
    if extreme: raw[:] = rng.choice([0, 255, 128, 127], (n, k//t.block_size, 1)).astype(np.uint8)
    for o in SCALES.get(fmt, (0,)):
        raw[..., o:o+2] = rng.uniform(-.01, .01, (n, k//t.block_size, 1)).astype(np.float16).view(np.uint8)
    if fmt == "MXFP4": raw[..., 0] = rng.integers(110, 130, raw.shape[:2])               # an exponent is its scale
    return raw.reshape(n, -1)


def close(got, want, tol=2e-6): assert np.abs(got - want).max() <= tol*max(np.abs(want).max(), 1e-30)


def check(fmt, n, k, m, exact, extreme=False, seed=0):
    rng = np.random.default_rng(seed)
    raw = random_raw(fmt, n, k, rng, extreme)
    raw.flags.writeable = False
    W = pack(raw, fmt, n, k)
    assert W.size == packed_bytes(fmt, n, k)
    x = rng.standard_normal((m, k)).astype(np.float32)
    if extreme: x = rng.choice([-1., 1.], (m, k)).astype(np.float32); x[0] = 1; x[-1] = -1
    y = linear_cpu(x, W, fmt, n, exact=exact)
    # The sums run over terms much larger than their total: what a float32 sum may lose is measured by the sum of their sizes
    w = dequantize(raw, fmt)
    size = (np.abs(x).astype(np.float64) @ np.abs(w).astype(np.float64).T).max()
    want = linear_ref(x, raw, fmt) if exact else linear_int8_ref(x, raw, fmt)
    # weights are code * scale - minimum, and a kernel sums the two parts apart
    parts = 4 if fmt in ("Q4_1", "Q5_1", "Q4_K", "Q5_K", "Q2_K") else 1
    assert np.abs(y - want).max() <= parts*1e-6*max(size, np.abs(want).max())
    for t in range(m): assert (linear_cpu(x[t:t+1], W, fmt, n, exact=exact) == y[t]).all()


@pytest.mark.parametrize("exact", [False, True], ids=["int8", "exact"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_formats(fmt, exact):
    k = QUANT_TYPES[fmt].block_size if QUANT_TYPES[fmt].block_size > 1 else 37
    check(fmt, 16, k, 1, exact)
    check(fmt, 33, 3*k, 7, exact, seed=1)
    check(fmt, 1, k, 4, exact, seed=2)
    check(fmt, 48, 2*k, 13, exact, seed=3)


@pytest.mark.parametrize("fmt", [f for f in FORMATS if ACT_OF[f] != "F32"])
def test_largest_codes_do_not_overflow(fmt): check(fmt, 64, 512, 6, False, extreme=True)


@pytest.mark.parametrize("fmt", FORMATS)
def test_embedding_row(fmt):
    n, k = 35, 3*max(QUANT_TYPES[fmt].block_size, 13)
    raw = random_raw(fmt, n, k, np.random.default_rng(4))
    ids, y = np.array([34, 0, 17, 16, 34]), np.full((5, pad16(k)), 7, np.float32)
    share_op(f"embed_{fmt}", y, ids, pack(raw, fmt, n, k), k, 0.5, rows=5, n=2)
    close(y[:, :k], dequantize(raw, fmt)[ids]*np.float32(0.5), 1e-6)
    assert (y[:, k:] == 0).all()


@pytest.mark.parametrize("fmt", [f for f in FORMATS if ACT_OF[f] != "F32"])
def test_weights_bit_for_bit(fmt):
    "One activation of 1 among zeros: the exact kernel returns a column, which is `dequantize`'s where no minimum is subtracted. Scales of zero, subnormal and huge ones too."
    n, k = 32, 512
    raw = random_raw(fmt, n, k, np.random.default_rng(8)).reshape(n, -1, QUANT_TYPES[fmt].type_size)
    for r, d in enumerate((0., 6e-8, -6e-8, 6e-5, 1000., -65504.)):
        for o in SCALES.get(fmt, (0,)): raw[r, :, o:o+2] = np.array([d], np.float16).view(np.uint8)
    if fmt == "MXFP4": raw[:6, :, 0] = np.array([0, 1, 2, 127, 200, 250])[:, None]
    raw = raw.reshape(n, -1)
    columns = np.arange(0, k, 37)
    x = np.zeros((len(columns), k), np.float32)
    x[np.arange(len(columns)), columns] = 1
    y, w = linear_cpu(x, pack(raw, fmt, n, k), fmt, n, exact=True).T, dequantize(raw, fmt)[:, columns]
    assert np.isfinite(y).all()
    if fmt in ("Q4_1", "Q5_1"): close(y, w, 1e-6)
    else: assert (y == w).all()


@pytest.mark.parametrize("fmt", ["Q4_1", "Q6_K", "F16", "IQ4_XS", "Q2_K"])
def test_threads_share_without_a_trace(fmt):
    rng = np.random.default_rng(5)
    n, k, m, act = 100, 512, 9, ACT_OF[fmt]
    W, x = pack(random_raw(fmt, n, k, rng), fmt, n, k), rng.standard_normal((m, k)).astype(np.float32)
    want = linear_cpu(x, W, fmt, n)
    for threads in (2, 3, 8):
        rows = x
        if act != "F32": rows = aligned_zeros(m*act_bytes(act, k)); share_op(f"quantize_{act}", rows, x, k, rows=m, n=threads)
        y = np.empty((m, pad16(n)), np.float32)
        share_op(f"linear_{fmt}", y, rows, W, k, n, rows=m, n=threads)
        assert (y[:, :n] == want).all() and (y[:, n:] == 0).all()


@pytest.mark.parametrize("act, block", [("Q8_1", 32), ("Q8_K", 256)])
def test_activations(act, block):
    x = np.random.default_rng(6).standard_normal((6, 512)).astype(np.float32)
    x[1] = 0; x[2] *= 1e-38; x[3] *= 1e30; x[4, ::7] = 100
    rec = aligned_zeros(6*act_bytes(act, 512))
    run_op(f"quantize_{act}", rec, x, 512, rows=6)
    q, s = quantize_act_ref(x, act)
    rec = rec.reshape(6, -1)
    assert (rec[:, :512].view(np.int8) == q).all()
    assert (rec[:, 512:512 + 4*512//block].view(np.float32) == s)[[0, 1, 3, 4, 5]].all()


def test_pack_refuses():
    for bad in (lambda: pack(np.zeros((4, 20), np.uint8), "Q4_1", 4, 48), lambda: pack(np.zeros((4, 20), np.uint8), "Q4_1", 5, 32)):
        with pytest.raises(ValueError): bad()


SCRIPT = """
import test_linear as t
for f in {formats!r}: t.check(f, 48, 512, 9, False); t.check(f, 32, 512, 5, False, extreme=True)
from literate_engine.simd import ISA; assert ISA == {isa!r}; print("ok")
"""


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["generic", "avxvnni", "avx512"])
def test_other_instruction_sets(isa, root):
    needs = {"generic": set(), "avxvnni": {"avx512vnni", "avx512vl"}, "avx512": {"avx512vnni", "avx512bw", "avx512vl"}}[isa]
    if not needs <= FEATURES and not (isa == "avxvnni" and "avxvnni" in FEATURES): pytest.skip(f"this CPU has no {isa}")
    env = {**os.environ, "LITERATE_ISA": isa, "PYTHONPATH": os.pathsep.join([str(root), str(root/"tests")])}
    r = subprocess.run([sys.executable, "-c", SCRIPT.format(isa=isa, formats=[f for f in FORMATS if ACT_OF[f] != "F32"])],
                       env=env, capture_output=True, text=True, timeout=900)
    assert r.returncode == 0 and r.stdout.startswith("ok"), r.stderr[-2000:]


@pytest.mark.model
def test_real_matrices(smollm2):
    from literate_engine.gguf import GGUFFile
    rng = np.random.default_rng(7)
    with GGUFFile(smollm2) as g:
        for name in ("blk.0.attn_q.weight", "blk.11.ffn_down.weight"):
            info, raw = g.tensors[name], g.raw(name)
            (n, k), fmt = info.shape, info.type.name
            x, W = rng.standard_normal((3, k)).astype(np.float32), pack(raw, fmt, n, k)
            close(linear_cpu(x, W, fmt, n), linear_int8_ref(x, np.array(raw), fmt))
            close(linear_cpu(x, W, fmt, n, exact=True), linear_ref(x, np.array(raw), fmt))


COMPILE = """
from numba import cfunc, types
from literate_engine import linear_cpu as L, linear_lowbit
from literate_engine.native import ISA
from literate_engine.simd import f32_at, u8_at
assert ISA == {isa!r}
for fmt in {formats!r}:
    f = L.LAYOUTS[fmt]; tile, rows = L._kernels(fmt)(f, L.TILE), L._rows_of(L.ACT_OF[fmt])[0]
    def kernel(W, p, K, a, R, t, y, o, ldy): tile(u8_at(W), p, K, rows(a, K), R, t, f32_at(y), o, ldy)
    code = cfunc(types.void(*[types.int64]*9), nopython=True)(kernel)._library.get_asm_str()
    assert "vpdpbusd" in code and ("vpshufb" in code or fmt in ("Q2_K", "Q3_K")) and "vpmaddubsw" not in code and ("zmm" in code) == (ISA == "avx512"), fmt
print("ok")
"""


@pytest.mark.slow
@pytest.mark.parametrize("isa, cpu", [("avx512", "icelake-server"), ("avxvnni", "alderlake")])
def test_bodies_for_other_cpus_compile(isa, cpu, root, tmp_path):
    "What cannot run here can be compiled here: each lookup is a byte shuffle, each product the instruction made for it."
    import platform
    if platform.machine() not in ("x86_64", "AMD64"): pytest.skip("not an x86 machine")
    env = {**os.environ, "LITERATE_ISA": isa, "NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(root)}
    r = subprocess.run([sys.executable, "-c", COMPILE.format(isa=isa, formats=["IQ4_NL", "IQ4_XS", "MXFP4", "Q2_K", "Q3_K", "CODED"])], env=env, capture_output=True, text=True, timeout=900)
    assert r.returncode == 0 and r.stdout.startswith("ok"), r.stderr[-2000:]


@pytest.mark.parametrize("damage", ["empty", "short", "garbage", "index"])
def test_a_damaged_cache_is_compiled_anew(damage, tmp_path, root):
    "One op, compiled into a cache of its own, whose files are then damaged"
    code = "from literate_engine import ops; from literate_engine.cpu_ops import compile_ops, op_address; compile_ops(['add']); assert op_address('add'); print('ok')"
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(root)}
    run = lambda: subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert run().stdout == "ok\n"
    for p in tmp_path.rglob("*.nbi" if damage == "index" else "*.nbc"): p.write_bytes({"empty": b"", "short": p.read_bytes()[:100]}.get(damage, b"garbage"))
    again = run()
    assert again.stdout == "ok\n" and "is of no use" in again.stderr and "Traceback" not in again.stderr, again.stderr
    healed = run()
    assert healed.stdout == "ok\n" and not healed.stderr
