"""Products for many rows: every plan of every kernel against the product of the rounded factors, in the emulator where there is no GPU; what is rounded, and how far that is from the exact product."""
import itertools

import numpy as np
import pytest

from literate_engine.cuda import call, cupy, device
from literate_engine.gemm_gpu import GEMM_PLANS, WGMMA, PartSums, act_for, gemm_gpu, gemm_plans, gemm_ref, half_act_ref, half_act_values, half_weights_ref, new_half_acts, part_bytes, prepare_gemm, tune_gemm
from literate_engine.linear import linear_ref
from literate_engine.linear_gpu import GPU_FORMATS, HALVES, GpuMatrix, pack_gpu, to_gpu
from literate_engine.quants import QUANT_TYPES, dequantize, quantize
from literate_engine.upload import plane_shapes

pytestmark = pytest.mark.usefixtures("emulated_gpu")
rng = np.random.default_rng(0)
def matrix(n, k, t): return quantize((rng.standard_normal((n, k))*np.exp(rng.standard_normal((n, 1)))*0.1).astype(np.float32), t)
def rows(m, k): return (rng.standard_normal((m, k))*np.exp(2*rng.standard_normal((m, 1)))).astype(np.float32)
def kind(t): return "BF16" if t == "BF16" else "F16"
def product(w, a, launches, plan=None):
    "Into a poisoned output."
    y = cupy().empty((a.m, w.n), np.float32); y[...] = np.nan
    for launch in launches + prepare_gemm(a, w, y, plan): launch()
    return y.get()
def check(t, n, k, m, kinds=lambda p: (p.kernel, p.splits > 1)):
    "One plan of each kind, the best guess of it; returns those that ran."
    raw, x = matrix(n, k, t), rows(m, k)
    w, want = to_gpu(raw, t), gemm_ref(x, pack_gpu(raw, t), t, n, kind(t))
    exact = dequantize(raw, t).astype(np.float64)
    terms = np.abs(x.astype(np.float64)) @ np.abs(exact).T + 1e-30
    plans = list({kinds(p): p for p in reversed(gemm_plans(w, m, device()))}.values())
    for p in plans:
        y = product(w, *new_half_acts(cupy().asarray(x), kind(t)), p)
        assert np.max(np.abs(y - want)/terms) < 2e-6, (t, n, k, m, p)
        assert np.max(np.abs(y - x @ exact.T)/terms) < 2.0**(-8 if kind(t) == "BF16" else -9), (t, n, k, m, p)
    return plans


@pytest.mark.parametrize("t", [*GPU_FORMATS, *HALVES])
def test_odd_shapes(t):
    "Rows of W and of x that fill no tile, columns that fill no group."
    block = max(32, QUANT_TYPES[t].block_size)
    for n, k, m in ((1, block, 33), (31, 3*block, 65), (97, 512, 129)): check(t, n, k, m)


@pytest.mark.parametrize("t", ["Q4_K", "F16"])
def test_every_plan(t):
    "All sizes of tiles; then all rings and numbers of blocks that share the columns, with enough groups to go around the ring, and more columns than a tile has. All of these have run."
    whole = check(t, 270, 768 if t == "Q4_K" else 520, 131, lambda p: p)
    parts = check(t, 33, 1280, 130, lambda p: (p.kernel, p.stages, p.splits)) + check(t, 70, 2304, 20, lambda p: (p.kernel, p.stages, p.splits))
    assert {p.kernel.split("<")[0] for p in whole} == {"gemm", "gemm_wgmma"} and {p.blocks for p in whole} >= {1, 2} and {p.stages for p in whole} == {2, 3, 4}
    for name, splits in (("gemm<", {1, 2, 3, 4}), ("gemm_wgmma<", {1, 2})):
        ran = [p for p in parts if p.kernel.startswith(name)]
        assert {p.splits for p in ran} == splits and len({p.stages for p in ran if p.splits > 1}) > 1


@pytest.mark.parametrize("t", HALVES)
def test_few_rows(t):
    "5 to 32 rows of 16-bit weights, by every plan: as good as float32 activations with float16, 16 bits of them with bfloat16; more tiles than blocks."
    for n, k, m in ((1, 8, 5), (16, 136, 8), (330, 520, 9), (33, 2056, 16), (100, 1024, 17), (33, 1536, 32)):
        raw, x = matrix(n, k, t), rows(m, k)
        w, want, terms = to_gpu(raw, t), linear_ref(x, raw, t), np.abs(x) @ np.abs(dequantize(raw, t)).T
        for p in gemm_plans(w, m, device()):
            assert np.max(np.abs(product(w, *new_half_acts(cupy().asarray(x), t), p) - want)/terms) < (2.0**-15 if t == "BF16" else 1e-6), (n, k, m, p)


def test_activations():
    "The order, the power of two, the rest, the rows that fill up; rows of zeros, of very large and of very small numbers."
    for m, k in ((1, 8), (5, 40), (9, 128), (31, 264), (33, 96), (70, 256)):
        x = rows(m, k)*10.0**rng.integers(-30, 30, (m, 1)).astype(np.float32)
        x[m//2] = 0; x[-1] = 1e-40; x[0, 0] = 3e38
        for t in HALVES:
            a, launches = new_half_acts(cupy().asarray(x), t)
            a.xh[...] = 0x7c01
            for launch in launches: launch()
            values, want = half_act_values(a), half_act_ref(x, t)
            assert np.array_equal(a.xs.get()[:m], want[2]) and len(values) == 1 + (m <= 32)
            for got, ref in zip(values, want): assert np.array_equal(got, ref), (m, k, t)
            assert np.isfinite(values).all() and not a.xh.get()[k//32 + 1:].any()
            assert not a.xh.get().transpose(0, 1, 3, 2, 4, 5).reshape(-1, a.xs.size, 8)[:, m:].any()


def test_columns_of_a_wider_array():
    wide = rows(37, 400)
    x = cupy().asarray(wide)[:, 8:264]
    w = to_gpu(matrix(20, 256, "Q4_K"), "Q4_K")
    assert np.array_equal(gemm_gpu(x, w).get(), gemm_gpu(cupy().asarray(np.ascontiguousarray(wide[:, 8:264])), w).get())
    with pytest.raises(ValueError, match="aligned to 16 bytes"): new_half_acts(cupy().asarray(wide)[:, 2:258])


def test_range():
    "Activations beyond float16, and rows with a NaN or an infinity, which spoil no other, wherever in a tile they are."
    raw, x = matrix(40, 256, "Q4_K"), rows(40, 256)
    want = linear_ref(x, raw, "Q4_K")
    x[3] *= 1e20; x[4] *= 1e-20; x[7, 9] = np.nan
    y = gemm_gpu(cupy().asarray(x), to_gpu(raw, "Q4_K")).get()
    assert np.isnan(y[7]).all() and np.isfinite(np.delete(y, 7, 0)).all()
    for i, scale in ((3, 1e20), (4, 1e-20), (0, 1)): assert np.max(np.abs(y[i]/np.float32(scale) - want[i])) < 2e-3*np.abs(want[i]).max()
    for t, m in (("Q8_0", 130), ("F16", 9), ("BF16", 70)):
        w, x, bad = to_gpu(matrix(40, 256, t), t), rows(m, 256), [0, 7, m//2 + 3, m - 1]
        x[bad, [0, 255, 31, 128]] = [np.nan, np.nan, np.inf, -np.inf]
        for p in {p.kernel: p for p in gemm_plans(w, m, device())}.values():
            y = product(w, *new_half_acts(cupy().asarray(x), kind(t)), p)
            assert not np.isfinite(y[bad]).any() and np.isfinite(np.delete(y, bad, 0)).all(), p


@pytest.mark.parametrize("t", GPU_FORMATS)
def test_small_and_large_weights(t):
    "Among float16's subnormals, and up to the limit that chapter 16 names: what the reference says, by every kernel."
    for top in (1e-5, 1e-4, 3800):
        values = rng.uniform(-top, top, (33, 512)).astype(np.float32)
        raw, x = quantize(values, t), rows(40, 512)
        w, planes = to_gpu(raw, t), pack_gpu(raw, t)
        half = half_weights_ref(planes, t, 512)[:33].astype(np.float64)
        assert np.isfinite(half).all() and np.max(np.abs(half - dequantize(raw, t))) < 2.0**-9*top + 2.0**-28, (t, top)         # 2^-28: half of the smallest float16, through RAISE
        for p in {p.kernel: p for p in gemm_plans(w, 40, device())}.values():
            y = product(w, *new_half_acts(cupy().asarray(x)), p)
            assert np.max(np.abs(y - gemm_ref(x, planes, t, 33, "F16"))/(np.abs(x) @ np.abs(half).T + 1e-30)) < 2e-6, (t, top, p)


def test_the_limit_of_weights():
    "It is where chapter 16 says, and chapter 14 has none."
    raw, x = quantize(np.full((32, 256), 5000, np.float32), "Q8_0"), rows(33, 256)
    w, want = to_gpu(raw, "Q8_0"), linear_ref(x, raw, "Q8_0")
    assert np.max(np.abs(gemm_gpu(cupy().asarray(x[:32]), w).get() - want[:32])/(np.abs(x[:32]) @ np.abs(dequantize(raw, "Q8_0")).T)) < 1e-2
    assert not np.isfinite(gemm_gpu(cupy().asarray(x), w).get()).any()
    with np.errstate(over="ignore"): assert np.isinf(half_weights_ref(pack_gpu(raw, "Q8_0"), "Q8_0", 256)).all()


@pytest.mark.parametrize("t", HALVES)
def test_sums_are_float32(t):
    "A float16 sum of ones ends at 2048, a bfloat16 one at 256."
    k = 4352
    raw, x = quantize(np.ones((16, k), np.float32), t), np.ones((66, k), np.float32)
    w = to_gpu(raw, t)
    for p in {p.kernel: p for p in gemm_plans(w, 66, device())}.values():
        assert (product(w, *new_half_acts(cupy().asarray(x), t), p) == k).all(), p
    assert (gemm_gpu(cupy().asarray(x[:6]), w).get() == k).all()


def test_a_row_does_not_depend_on_the_others():
    "To the last bit, with the same plan."
    for t in ("Q4_K", "BF16"):
        raw, x = matrix(70, 512, t), rows(150, 512)
        w = to_gpu(raw, t)
        for p in {p.kernel: p for p in gemm_plans(w, 150, device()) if p.splits == 1}.values():
            whole = product(w, *new_half_acts(cupy().asarray(x), kind(t)), p)
            for first, m in ((0, 70), (80, 70), (37, 100)): assert np.array_equal(product(w, *new_half_acts(cupy().asarray(x[first:first + m]), kind(t)), p), whole[first:first + m])


def test_wgmma_runs_beside_the_rest():
    "ptxas makes these instructions wait for each other where it cannot see which registers are free, and only says so in its log."
    bindings = pytest.importorskip("cuda.bindings.nvrtc", reason="the compiler is in the development requirements")
    source = WGMMA.source
    for name in WGMMA.names(90):
        p = call(bindings.nvrtcCreateProgram, source.text.encode(), b"gemm_wgmma.cu", len(source.headers), [t.encode() for t in source.headers.values()], [h.encode() for h in source.headers])
        call(bindings.nvrtcAddNameExpression, p, name.encode())
        call(bindings.nvrtcCompileProgram, p, 4, [b"-arch=sm_90a", b"--std=c++17", b"-default-device", b"--ptxas-options=-v"])
        log = bytes(call(bindings.nvrtcGetProgramLogSize, p))
        call(bindings.nvrtcGetProgramLog, p, log)
        assert b"Used" in log and b"serialized" not in log, (name, log[:500])


def test_what_is_chosen():
    "act_for and gemm_gpu leave to chapter 14 what is its own; a tuned plan is used."
    for t in ("Q4_K", "Q8_0", "F16"):
        raw, w = (r := matrix(48, 256, t)), to_gpu(r, t)
        for m in (1, 4, 5, 32, 33):
            x = rows(m, 256)
            assert np.max(np.abs(gemm_gpu(cupy().asarray(x), w).get() - linear_ref(x, raw, t))/(np.abs(x) @ np.abs(dequantize(raw, t)).T)) < 1e-2           # 8-bit activations, at worst
    assert [act_for("Q6_K", m, 90) for m in (32, 33)] == ["Q8_K", "F16"] and [act_for("BF16", m, 80) for m in (4, 5, 33)] == ["F32", "BF16", "BF16"] and act_for("F16", 512, 75) == "F32"
    a, launches = new_half_acts(cupy().asarray(rows(20, 256)))
    with pytest.raises(ValueError, match="laid out for tiles of 32, the plan wants 128"): product(w, a, launches, next(p for p in gemm_plans(w, 70, device()) if p.tokens == 128))
    best, times = tune_gemm([w, w], 33, runs=1, most=2)
    assert best in times and len(times) == 2 and best in GEMM_PLANS.values()
    few = to_gpu(matrix(48, 256, "Q8_0"), "Q8_0")
    for v, m, kernel in ((few, 32, "gemm<"), (few, 33, "gemm_wgmma<"), (few, 200, "gemm_wgmma<"), (w, 64, "gemm<"), (w, 65, "gemm_wgmma<")): assert gemm_plans(v, m, device()._replace(arch=90))[0].kernel.startswith(kernel)
    assert all(p.kernel.startswith("gemm<") for p in gemm_plans(w, 64, device()._replace(arch=89)))


def test_parts_of_sums_have_an_owner():
    "Products that follow each other share the memory; those of another owner, which may run at the same time, do not."
    w, m = to_gpu(matrix(70, 2304, "Q4_K"), "Q4_K"), 40
    a, _ = new_half_acts(cupy().asarray(rows(m, 2304)))
    plan, one, other = max(gemm_plans(w, m, device()), key=lambda p: p.splits), PartSums(), PartSums()
    places = [prepare_gemm(a, w, cupy().empty((m, 70), np.float32), plan, parts=parts)[1].args[0].data.ptr for parts in (one, one, other)]
    assert plan.splits > 1 and 4*one.array.size == part_bytes(device()) >= 4*plan.splits*m*70 and places[0] == places[1] == one.array.data.ptr != places[2]


@pytest.mark.parametrize("sms, arch", [(132, 90), (108, 80), (20, 89)])
def test_no_plan_needs_more_than_part_bytes(sms, arch):
    "Real shapes on other sizes of GPUs; plans are kept for all numbers of rows up to a whole tile."
    d, shared = device()._replace(num_sms=sms, arch=arch), 0
    for t, n, k in itertools.product(("Q4_K", "F16"), (256, 1024, 2560, 4096, 28672, 128256), (512, 4096, 14336)):
        w = GpuMatrix(t, n, k, tuple(s and np.broadcast_to(np.uint8(0), s) for s in plane_shapes(t, n, k)))
        for m in (17, 32, 33, 64, 65, 128, 192, 512, 4096):
            for p in gemm_plans(w, m, d):
                most = m if m <= 32 else -(-m//64)*64
                if p.splits > 1: shared = max(shared, 4*p.splits*most*n)
    assert part_bytes(d)/2 < shared <= part_bytes(d)


@pytest.mark.parametrize("arch", ["80", "89", "120"])
def test_other_chips(arch, monkeypatch):
    "Without wgmma, and with less shared memory."
    if device().name != "emulated": pytest.skip("a real GPU")
    monkeypatch.setenv("LITERATE_GPU", f"emulated:{arch}")
    for t in ("Q4_K", "BF16"):
        plans = check(t, 70, 512, 70)
        assert not any(p.kernel.startswith("gemm_wgmma") for p in plans) and all(p.shared <= device().shared_bytes for p in plans)


def test_an_older_chip(monkeypatch):
    "Chapter 14 does the work there, 32 rows at a time."
    if device().name != "emulated": pytest.skip("a real GPU")
    monkeypatch.setenv("LITERATE_GPU", "emulated:75")
    raw, x = matrix(20, 256, "Q4_K"), rows(40, 256)
    w = to_gpu(raw, "Q4_K")
    assert np.max(np.abs(gemm_gpu(cupy().asarray(x), w).get() - linear_ref(x, raw, "Q4_K"))/(np.abs(x) @ np.abs(dequantize(raw, "Q4_K")).T)) < 1e-2
    with pytest.raises(ValueError, match="need compute capability 8.0"): gemm_plans(w, 40, device())
