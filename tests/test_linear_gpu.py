"""Packed matrices and products of up to 32 rows: what is packed, every plan of an old card, plans that serve other numbers of rows than they were tuned for, and what may lie where. In the emulator where there is no GPU."""
import numpy as np
import pytest
from gpu_arrays import empty, gpu

from literate_engine import linear_gpu
from literate_engine.cuda import device
from literate_engine.linear import ACT_OF, linear_int8_ref, linear_ref
from literate_engine.linear_gpu import GPU_FORMATS, HALVES, Acts, GpuMatrix, OwnRow, linear_gpu as product, overlap, own_plans, pack_gpu, part_rows, plans, prepare, quantize_act_gpu, to_gpu, tune, unpack_ref
from literate_engine.ops_gpu import run
from literate_engine.quants import QUANT_TYPES, dequantize, quantize
from literate_engine.upload import plane_shapes

pytestmark = pytest.mark.usefixtures("emulated_gpu")
rng = np.random.default_rng(0)
def normal(*shape): return rng.standard_normal(shape).astype(np.float32)
def matrix(n, k, t): return quantize(normal(n, k)*np.exp(normal(n, 1)), t)
def is_right(y, x, raw, t, act):
    "Every output is there, and but for the order of a sum what the rounded activations give."
    want, terms = (linear_ref if act == "F32" else linear_int8_ref)(x, raw, t), np.abs(x) @ np.abs(dequantize(raw, t)).T
    error = np.max(np.abs(y.get() - want)/terms)
    assert error < 2e-6, (t, x.shape, act, error)


@pytest.mark.parametrize("t", [*GPU_FORMATS, *HALVES])
def test_packing(t):
    "Nothing is lost, the GPU packs as NumPy does, the shapes are those that the memory plan counts, and rows that fill up the last 32 stand for zeros"
    for n, k in ((1, 256), (31, 512), (70, 1280)) if QUANT_TYPES[t].block_size == 256 else ((1, 32), (31, 160), (70, 672)):
        raw = matrix(n, k, t)
        w, planes = to_gpu(raw, t), pack_gpu(raw, t)
        for got, want, shape in zip(w.planes, (planes[p] for p in "qhsd"), plane_shapes(t, n, k)):
            assert (got is None) == (want is None) == (shape is None) and (got is None or np.array_equal(got.get(), want) and want.shape == shape)
        if t in HALVES: continue
        back = unpack_ref(planes, t, k)
        assert np.array_equal(back[:n], dequantize(raw, t)) and len(back) == -(-n//32)*32 and not back[n:].any()


@pytest.mark.parametrize("t", GPU_FORMATS)
def test_an_older_card(t, monkeypatch):
    "Four columns at a time, by every plan; more rows than a part has, of which the last part has few"
    if device().name != "emulated": pytest.skip("a real GPU")
    monkeypatch.setenv("LITERATE_GPU", "emulated:75")
    k = 2304 if QUANT_TYPES[t].block_size == 256 else 2080
    raw = matrix(37, k, t)
    w = to_gpu(raw, t)
    for m in (1, 2, 4, 5, 9, 16, 19, 32):
        x = normal(m, k)
        a, choices = quantize_act_gpu(gpu(x), ACT_OF[t]), plans(w, m, ACT_OF[t], device())
        assert all(p.kernel.startswith(f"gemv<{t}, {1 if m == 1 else 4},") for p in choices) and max(p.split for p in choices) > 1
        for p in choices if m in (2, 19) else choices[:2]:
            y = empty(m, 37)
            run(prepare(a, w, y, p))
            is_right(y, x, raw, t, ACT_OF[t])
    x, y = normal(67, k), empty(67, 37)
    a = quantize_act_gpu(gpu(x), ACT_OF[t])
    launches = prepare(a, w, y)
    assert [one.config.gridDimY for one in launches] == [8, 8, 1]            # no block for rows that are not there
    run(launches)
    is_right(y, x, raw, t, ACT_OF[t])
    is_right(product(gpu(x[:5]), w, exact=True), x[:5], raw, t, "F32")


@pytest.mark.parametrize("arch", ["75", "80", "90"])
@pytest.mark.parametrize("t", ["Q8_0", "Q4_K"])
def test_a_plan_serves_all_rows_of_its_key(t, arch, monkeypatch):
    "What was chosen for 5, 9 or 17 rows is used for up to 8, 16 and 32, and the other way around"
    if device().name != "emulated": pytest.skip("a real GPU")
    monkeypatch.setenv("LITERATE_GPU", f"emulated:{arch}")
    raw = matrix(20, 512, t)
    w, kept = to_gpu(raw, t), {}
    monkeypatch.setattr(linear_gpu, "PLANS", kept)
    key = lambda m: linear_gpu._key(w, m, ACT_OF[t], device().name)
    for few, many in ((5, 8), (9, 16), (17, 32)):
        assert key(few) == key(many) and part_rows(few) == part_rows(many)
        for tuned, used in ((few, many), (many, few)):
            x = normal(used, 512)
            for p in plans(w, tuned, ACT_OF[t], device()):
                kept[key(tuned)] = p
                y = empty(used, 20)
                product(quantize_act_gpu(gpu(x), ACT_OF[t]), w, y)
                is_right(y, x, raw, t, ACT_OF[t])
    kept.clear()
    best, times = tune([w, w], 9, runs=1)
    assert kept == {key(16): best} and best in times
    x, y = normal(16, 512), empty(16, 20)
    product(quantize_act_gpu(gpu(x), ACT_OF[t]), w, y)
    is_right(y, x, raw, t, ACT_OF[t])


@pytest.mark.parametrize("sms, arch, shared", [(132, 90, 227), (108, 80, 163), (128, 89, 99)])
def test_blocks_fit_on_a_multiprocessor(sms, arch, shared):
    "As many as the grid has for each, with the kilobyte that every block takes beside what it asks for"
    d = device()._replace(num_sms=sms, arch=arch, shared_bytes=shared << 10)
    for t in GPU_FORMATS:
        w = GpuMatrix(t, 1 << 17, 4096, tuple(s and np.broadcast_to(np.uint8(0), s) for s in plane_shapes(t, 1 << 17, 4096)))
        for m in (5, 16, 32):
            choices = [p for p in plans(w, m, ACT_OF[t], d) if p.kernel.startswith("gemm_mma")]
            assert choices and all(-(-p.grid//sms)*(p.shared + 1024) <= (shared + 1) << 10 and m <= p.tokens for p in choices)


def test_nothing_is_written_over_activations():
    "Other blocks have still to read them. A stream is read where it is written; quantised activations are in buffers of their own"
    raw = matrix(256, 256, "Q4_0")
    w, half, x = to_gpu(raw, "Q4_0"), to_gpu(matrix(256, 256, "F16"), "F16"), gpu(normal(1, 256))
    wide, other = gpu(normal(1, 1024)), gpu(normal(1, 256))
    for wrong, what in ((lambda: prepare(OwnRow(x), w, x), "where x does"), (lambda: prepare(OwnRow(other, act=0, up=x), w, x), "where up does"), (lambda: prepare(OwnRow(wide[:, :256]), w, wide[:, 252:508]), "where x does"),
                        (lambda: prepare(quantize_act_gpu(x, "F32"), w, x), "where x does"), (lambda: prepare(quantize_act_gpu(x, "F32"), half, x), "where x does"),
                        (lambda: prepare(OwnRow(x), w, wide[:, :256], add=(wide[:, 4:260], 1.0)), "what is added: expected the place of the output, or one apart"),
                        (lambda: prepare(OwnRow(x), w, wide[:, 0:512:2]), "expected contiguous")):
        with pytest.raises(ValueError, match=what): wrong()
    assert not overlap(wide[:, :256], wide[:, 256:512]) and overlap(wide[:, :257], wide[:, 256:512]) and overlap(wide, wide[:, 1023:])
    rows = gpu(normal(4, 8))
    assert overlap(rows[:, :4], rows[2:3, 4:]) and not overlap(rows[:2], rows[2:])                  # from the first to the last byte, gaps included
    plain, over, beside = empty(1, 256), gpu(other.get()), empty(1, 256)
    run(prepare(OwnRow(x), w, plain)); run(prepare(OwnRow(x), w, over, add=(over, 1.0))); run(prepare(OwnRow(wide[:, :256]), w, wide[:, 256:512]))
    run(prepare(OwnRow(x), w, beside, add=(other, 1.0)))
    assert np.array_equal(over.get(), beside.get()) and np.isfinite(wide.get()).all()
    first, a = x.get(), quantize_act_gpu(x, "Q8_1")
    run(prepare(a, w, x))                                                                          # x itself is done with
    is_right(x, first, raw, "Q4_0", "Q8_1")


def test_what_is_refused():
    w, half = to_gpu(matrix(8, 64, "Q4_0"), "Q4_0"), to_gpu(matrix(8, 64, "F16"), "F16")
    a, x = quantize_act_gpu(gpu(normal(2, 64)), "Q8_1"), gpu(normal(2, 64))
    for wrong, what in ((lambda: prepare(a, half, empty(2, 8)), "F16 takes F32 activations, got Q8_1"), (lambda: prepare(a, to_gpu(matrix(8, 256, "Q4_K"), "Q4_K"), empty(2, 8)), "Q4_K takes Q8_K or F32 activations, got Q8_1"),
                        (lambda: prepare(a, to_gpu(matrix(8, 96, "Q4_0"), "Q4_0"), empty(2, 8)), "activations have 64 columns, the Q4_0 matrix 96"), (lambda: prepare(a, w, empty(2, 9)), r"output: expected contiguous float32 \[2, 8\], got float32 \[2, 9\]"),
                        (lambda: prepare(a, w, empty(2, 16)[:, :8]), "expected contiguous"), (lambda: quantize_act_gpu(x, "Q8_K"), "blocks of 256; 64 columns do not divide"), (lambda: quantize_act_gpu(x[:, :32], "Q8_1"), "expected contiguous float32"),
                        (lambda: to_gpu(np.zeros((4, 64), np.uint8), "IQ2_XS"), "no GPU kernel for IQ2_XS"), (lambda: to_gpu(np.zeros((4, 33), np.uint8), "Q8_0"), r"expected uint8 \[rows, multiple of 34\]"),
                        (lambda: prepare(Acts("F32", 1, 64, gpu(normal(1, 65))[:, 1:]), w, empty(1, 8)), "multiple of 16 bytes")):
        with pytest.raises(ValueError, match=what): wrong()
    assert own_plans(half, device()) == []
