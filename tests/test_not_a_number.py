"""A NaN in a row of activations is in all its products and in none of another row's: on both devices, in every format, for every number of rows. An infinity likewise: its row has no scale."""
import numpy as np
import pytest

from gpu_arrays import empty, gpu

from literate_engine.cuda import device
from literate_engine.gemm_gpu import gemm_gpu
from literate_engine.linear import ACT_OF, linear_int8_ref, quantize_act_ref
from literate_engine.linear_cpu import linear_cpu, pack
from literate_engine.linear_gpu import GPU_FORMATS, OwnRow, own_plans, plans, prepare, quantize_act_gpu, to_gpu
from literate_engine.linear_lowbit import LINEAR_FORMATS
from literate_engine.ops import ACTS
from literate_engine.ops_gpu import prepare_activate
from literate_engine.quants import QUANT_TYPES
from test_linear import random_raw

INT8 = [f for f in LINEAR_FORMATS if f in QUANT_TYPES and ACT_OF[f] != "F32"]
BAD = [np.nan, -np.nan, np.inf, -np.inf]


def rows(m, k, bad, rng):
    "[m, k]; row m // 2 has one bad number"
    x = rng.standard_normal((m, k)).astype(np.float32)
    x[m//2, rng.integers(k)] = bad
    return x


def only_the_middle(y): return np.isnan(y[len(y)//2]).all() and np.isfinite(np.delete(y, len(y)//2, 0)).all()


@pytest.mark.parametrize("fmt", INT8)
@pytest.mark.parametrize("bad", BAD, ids=str)
def test_cpu(fmt, bad):
    rng = np.random.default_rng(1)
    raw = random_raw(fmt, 16, 512, rng)
    for m in (1, 5, 9):
        x = rows(m, 512, bad, rng)
        with np.errstate(invalid="ignore"):
            assert np.isnan(quantize_act_ref(x, ACT_OF[fmt])[1][m//2]).sum() == np.isnan(bad)
            assert only_the_middle(linear_int8_ref(x, raw, fmt))
        assert only_the_middle(linear_cpu(x, pack(raw, fmt, 16, 512), fmt, 16))


@pytest.mark.usefixtures("emulated_gpu")
@pytest.mark.parametrize("fmt", GPU_FORMATS)
def test_gpu(fmt):
    rng = np.random.default_rng(2)
    w, d = to_gpu(random_raw(fmt, 40, 512, rng), fmt), device()
    for bad in BAD:
        for m in (1, 3, 8, 32):
            a = quantize_act_gpu(gpu(rows(m, 512, bad, rng)), ACT_OF[fmt])
            for p in {p.kernel: p for p in plans(w, m, a.act, d)}.values():
                y = empty(m, 40)
                y[...] = 0
                for launch in prepare(a, w, y, p): launch()
                assert only_the_middle(y.get()), (m, p)
        for p in {p.kernel: p for p in own_plans(w, d)}.values():
            for own in (OwnRow, lambda x: OwnRow(x, act=ACTS["relu2"])):
                if own is not OwnRow and bad == -np.inf: continue                  # relu2: 0
                y = empty(1, 40)
                y[...] = 0
                for launch in prepare(own(gpu(rows(1, 512, bad, rng))), w, y, p): launch()
                assert only_the_middle(y.get()), p
        y = gemm_gpu(gpu(rows(33, 512, bad, rng)), w).get()                          # float16: an infinity stays one, with a sign
        assert only_the_middle(np.where(np.isinf(y), np.nan, y) if np.isinf(bad) else y)


@pytest.mark.usefixtures("emulated_gpu")
def test_relu2():
    x, y = gpu(np.float32([[np.nan, -1, 2, -np.nan]])), empty(1, 4)
    for launch in prepare_activate(y, "relu2", x): launch()
    assert np.array_equal(y.get(), np.float32([[np.nan, 0, 4, np.nan]]), equal_nan=True)
