"""Products that add to a stream, bit for bit what separate launches give, and products whose blocks prepare the row. In the emulator where there is no GPU."""
import numpy as np
import pytest
from gpu_arrays import empty, gpu

from literate_engine.cuda import device
from literate_engine.gemm_gpu import act_for, gemm_plans, new_half_acts, prepare_gemm
from literate_engine.linear import ACT_OF, linear_int8_ref
from literate_engine.linear_gpu import GPU_FORMATS, HALVES, OwnRow, Plan, new_acts, own_plans, plans, prepare, quantize_act_gpu, to_gpu
from literate_engine.ops import ACTS, gated_ref, rms_norm_ref
from literate_engine.ops_gpu import prepare_activate, prepare_add, prepare_gated, prepare_rms_norm, run
from literate_engine.quants import QUANT_TYPES, dequantize, quantize

pytestmark = pytest.mark.usefixtures("emulated_gpu")
rng = np.random.default_rng(0)
def normal(*shape): return rng.standard_normal(shape).astype(np.float32)
def matrix(n, k, t): return to_gpu(quantize(normal(n, k), t), t)
def columns(t): return 768 if QUANT_TYPES[t].block_size == 256 else 672 if t not in HALVES else 520
def same_bits(a, b): assert np.array_equal(a.get().view(np.uint32), b.get().view(np.uint32))

def check_sums(start, m, n):
    "start(y, **kw) prepares a product: with sums in its end it gives what separate launches give."
    plain, bias, x = empty(m, n), gpu(normal(n)), gpu(normal(m, n))
    run(start(plain))
    biases = gpu(np.broadcast_to(bias.get(), (m, n)).copy())
    for scale, b in ((1.0, None), (.22, bias), (1.0, bias)):
        want, got, here = empty(m, n), empty(m, n), gpu(x.get())
        run(prepare_add(want, plain, biases, float(b is not None)) + prepare_add(want, x, want, scale))
        run(start(got, add=(x, scale), bias=b))
        same_bits(got, want)
        run(start(here, add=(here, scale), bias=b))                        # over the stream itself
        same_bits(here, want)
    want, got = empty(m, n), empty(m, n)
    run(prepare_add(want, plain, biases)); run(start(got, bias=bias))
    same_bits(got, want)

@pytest.mark.parametrize("t,m", [("Q4_1", 1), ("Q6_K", 1), ("Q8_0", 3), ("Q4_K", 8), ("Q5_1", 33)])
def test_sums_of_quantised_products(t, m):
    n, w = 37, matrix(37, columns(t), t)
    x = gpu(normal(m, w.k))
    for act in (ACT_OF[t], "F32"):
        choices = [None] if m > 32 else plans(w, m, act, device())
        seen = {p and p.kernel.split("<")[0] + f"{p.split > 1}": p for p in reversed(choices)}              # each kernel, with and without sums over warps
        a = quantize_act_gpu(x, act)
        for p in seen.values(): check_sums(lambda y, p=p, **kw: prepare(a, w, y, p, **kw), m, n)

@pytest.mark.parametrize("t,m", [("F16", 1), ("BF16", 3), ("F16", 5), ("BF16", 20), ("Q4_0", 40), ("Q4_K", 70), ("F16", 70)])
def test_sums_of_products_of_halves(t, m):
    n, w, d = 41, matrix(41, columns(t), t), device()
    act, x = act_for(t, m, d.arch), gpu(normal(m, columns(t)))
    if act == "F32":
        a = quantize_act_gpu(x, act)
        for p in {p.split > 1: p for p in plans(w, m, act, d)}.values(): check_sums(lambda y, p=p, **kw: prepare(a, w, y, p, **kw), m, n)
        return
    a, launches = new_half_acts(x, act)
    run(launches)
    seen = {(p.kernel, p.splits > 1): p for p in reversed(gemm_plans(w, m, d)) if 8*a.xh.shape[2] % p.tokens == 0}
    for p in seen.values(): check_sums(lambda y, p=p, **kw: prepare_gemm(a, w, y, p, **kw), m, n)


ROWS = [(t, n, k) for t in GPU_FORMATS for n, k in (((37, 256), (9, 1280)) if QUANT_TYPES[t].block_size == 256 else ((37, 576), (9, 1536)))]
ROWS += [("Q4_1", 1, 32), ("Q8_0", 130, 96), ("Q5_0", 5, 2176), ("Q4_0", 3, 8192), ("Q4_K", 33, 4096), ("Q6_K", 6, 8192), ("Q5_K", 2, 2304)]

@pytest.mark.parametrize("t,n,k", ROWS)
def test_rows_that_blocks_prepare(t, n, k):
    """x, norm(x), act(x) * up and act(x): what separate launches give, but for the order of sums; sums at the end change no bit of that.
    x and norm(x) by every plan, act(x) * up by every kernel, act(x), which is the same kernel without `up`, by the best guess; of the larger shapes the three likeliest kernels."""
    raw, x, up, norm = quantize(normal(n, k), t), gpu(normal(1, k)), gpu(normal(1, k)), gpu(normal(k) + 1)
    w, weights, h = to_gpu(raw, t), np.abs(dequantize(raw, t)), {name: empty(1, k) for name in ("norm", "gated", "act")}
    run(prepare_rms_norm(h["norm"], x, norm, 1e-5) + prepare_gated(h["gated"], "silu", x, up) + prepare_activate(h["act"], "relu2", x))
    rows = {"x": (OwnRow(x), x), "norm": (OwnRow(x, norm, 1e-5), h["norm"]), "gated": (OwnRow(x, act=ACTS["silu"], up=up), h["gated"]), "act": (OwnRow(x, act=ACTS["relu2"]), h["act"])}
    choices = own_plans(w, device())
    assert choices
    kernels = list({p.kernel: p for p in choices}.values())
    if n*k > 20_000: choices = kernels = kernels[:3]
    by = {"x": choices, "norm": choices, "gated": kernels, "act": choices[:1]}
    stream, bias = gpu(normal(1, n)), gpu(normal(n))
    for name, (own, value) in rows.items():
        a, launches = new_acts(value, ACT_OF[t])
        want = empty(1, n)
        run(launches + prepare(a, w, want, Plan(f"gemv<{t}, 1, 4, 1, 4>", -(-n//32), 256, 128, 1)))
        for p in by[name]:
            got, here = empty(1, n), gpu(stream.get())
            run(prepare(own, w, got, p))
            error = np.abs(got.get() - want.get())/(np.abs(value.get()) @ weights.T)
            assert np.median(error) < 1e-6 and error.max() < (1e-3 if name == "norm" else 2e-6), (p, error)  # the factor of a norm may move a value to the next code
            run(prepare(own, w, here, p, (here, .5), bias))
            assert np.array_equal(here.get(), stream.get() + np.float32(.5)*(got.get() + bias.get()))           # half of a number is exact: one rounding is left

def test_rows_against_the_reference():
    for t, k in (("Q4_1", 576), ("Q6_K", 512)):
        raw, x, up, norm = quantize(normal(21, k), t), normal(1, k), normal(1, k), normal(k) + 1
        w, y = to_gpu(raw, t), empty(1, 21)
        for own, value in ((OwnRow(gpu(x), gpu(norm), 1e-6), rms_norm_ref(x, norm, 1e-6)), (OwnRow(gpu(x), act=ACTS["gelu"], up=gpu(up)), gated_ref("gelu", x, up))):
            run(prepare(own, w, y))
            error = np.abs(y.get() - linear_int8_ref(value, raw, t))/(np.abs(value) @ np.abs(dequantize(raw, t)).T)
            assert error.max() < 1e-3                                       # a value on the edge of two codes may fall to the other side

def test_columns_of_wider_rows():
    "gate and up lie side by side."
    w, wide, norm = matrix(12, 160, "Q8_0"), gpu(normal(1, 4 + 2*160)), gpu(normal(164))
    gate, up, y, want = wide[:, 4:164], wide[:, 164:], empty(1, 12), empty(1, 12)
    for own, same in ((OwnRow(gate, act=0, up=up), OwnRow(gpu(gate.get()), act=0, up=gpu(up.get()))), (OwnRow(gate, norm[4:], 1e-5), OwnRow(gpu(gate.get()), gpu(norm[4:].get()), 1e-5))):
        run(prepare(own, w, y)); run(prepare(same, w, want))
        same_bits(y, want)

def test_what_is_refused():
    w, y = matrix(8, 64, "Q4_0"), empty(1, 8)
    x, a = gpu(normal(1, 64)), quantize_act_gpu(gpu(normal(1, 64)), "Q8_1")
    for wrong, says in ((lambda: prepare(a, w, y, add=(empty(2, 8), 1.0)), r"what is added: expected contiguous float32 \[1, 8\]"), (lambda: prepare(a, w, y, bias=empty(9)), r"bias: expected float32 \[8\]"),
                        (lambda: prepare(OwnRow(gpu(normal(2, 64))), w, y), r"x: expected float32 \[1, 64\]"), (lambda: prepare(OwnRow(x, up=x), w, y), "a row is x"), (lambda: prepare(OwnRow(gpu(normal(1, 65))[:, 1:]), w, y), "multiple of 16 bytes"),
                        (lambda: prepare(OwnRow(x), matrix(8, 64, "F16"), y), "only quantised weights"), (lambda: prepare(OwnRow(x), w, empty(1, 9)), r"output: expected contiguous float32 \[1, 8\]")):
        with pytest.raises(ValueError, match=says): wrong()
    assert own_plans(matrix(8, 64, "F16"), device()) == []

def test_long_rows_are_prepared_once(monkeypatch):
    monkeypatch.setattr("literate_engine.linear_gpu.OWN_BYTES", 100)
    w = matrix(40, 64, "Q4_0")
    assert own_plans(w, device()) == []
    with pytest.raises(ValueError, match=r"Q4_0 \[40, 64\]: too large"): prepare(OwnRow(gpu(normal(1, 64))), w, empty(1, 40))


def test_plans_are_kept(tmp_path, monkeypatch):
    "Read again as they were; a damaged file, one of other fields, none, and a folder that cannot be written cost a tuning and nothing else"
    from literate_engine import linear_gpu
    from literate_engine.linear_gpu import PLANS, Plan, load_plans, save_plans
    monkeypatch.setenv("LITERATE_CACHE", str(tmp_path/"cache"))
    plans = {("some GPU", "Q4_K", 64, 256, 1, "F32"): Plan("gemv<Q4_K, 1, 1, 1, 1>", 3, 128, 64, 1)}
    monkeypatch.setattr(linear_gpu, "PLANS", dict(plans))
    save_plans()
    linear_gpu.PLANS.clear()
    assert load_plans() == 1 and linear_gpu.PLANS == plans and PLANS is not linear_gpu.PLANS
    path = linear_gpu._plans_path()
    for damage in (b"", b"[[1", b'[["a"]]', b'[[["a"], {"grid": 1, "other": 2}]]', b'{"a": 1}', b"\xff\xfe", b"[[[1], {}]]"):
        path.write_bytes(damage)
        assert load_plans() == 0, damage
    path.unlink()
    assert load_plans() == 0
    monkeypatch.setenv("LITERATE_CACHE", str(tmp_path/"file"/"cache"))
    (tmp_path/"file").write_text("not a folder")
    save_plans()
    assert load_plans() == 0
