"""The small operations of the GPU against chapter 15's references, in the emulator where there is no GPU: odd shapes, column ranges, fusions, and the same bits for a row in any company."""
import numpy as np
import pytest
from gpu_arrays import empty, gpu

from literate_engine.core import assert_close
from literate_engine.layers import RopeSpec
from literate_engine.linear_gpu import GPU_FORMATS, act_buffers, quantize_act_gpu, to_gpu
from literate_engine.ops import ACTS, gated_ref, join_heads_ref, layer_norm_ref, rms_norm_ref, rope_ref, rope_table, softcap_ref
from literate_engine.ops_gpu import (
    prepare_activate, prepare_add, prepare_embed, prepare_gated, prepare_heads, prepare_join_heads, prepare_layer_norm, prepare_rms_norm, prepare_rope,
    prepare_softcap, prepare_take_columns, prepare_take_rows, run)
from literate_engine.quants import QUANT_TYPES, dequantize, quantize

pytestmark = pytest.mark.usefixtures("emulated_gpu")
rng = np.random.default_rng(0)
def normal(*shape): return rng.standard_normal(shape).astype(np.float32)
def ranges(*parts):
    "The arrays as column ranges of a wider one."
    whole = gpu(np.concatenate([normal(len(parts[0]), 4), *parts, normal(len(parts[0]), 12)], 1))
    starts = 4 + np.cumsum([0, *(p.shape[1] for p in parts)])
    return [whole[:, a:b] for a, b in zip(starts, starts[1:])]
def acts_for(rows, width, kinds):
    out = [act_buffers(rows, width, k) for k in kinds if width % {"Q8_1": 32, "Q8_K": 256}[k] == 0]
    for a in out:
        for p in a.planes: p[...] = 0x7FC00000 if p.dtype == np.uint32 else np.nan
    return out
def same_planes(acts, x):
    "What was quantised on the way is what quantising the float32 result gives, in every bit, the rows that fill up included."
    for a in acts:
        for got, want, name in zip(a.planes, quantize_act_gpu(x, a.act).planes, "qdsm"):
            assert np.array_equal(got.get().view(np.uint32), want.get().view(np.uint32)), (a.act, name, a.m, a.k)
def same_bits(a, b): assert np.array_equal(np.ascontiguousarray(a).view(np.uint32), np.ascontiguousarray(b).view(np.uint32))


NORMS = [(1, 7), (3, 40), (2, 96), (1, 160), (9, 256), (5, 576), (33, 512), (1, 1024), (2, 2304), (1, 4096), (2, 8448), (1, 16640)]

@pytest.mark.parametrize("rows,width", NORMS)
def test_norm(rows, width):
    "RMS and layer norm, alone and with everything around them."
    x, y, w, b, post, post_b = normal(rows, width), normal(rows, width), *(normal(4, width) + 1)
    acts = acts_for(rows, width, ("Q8_1", "Q8_K"))
    for layer in (False, True):
        ref = lambda x, w, b: layer_norm_ref(x, w, b, 1e-5) if layer else rms_norm_ref(x, w, 1e-5)
        def prepare(out, x, **kw):
            if layer: return prepare_layer_norm(out, x, gpu(w), gpu(b), 1e-5, **kw)
            return prepare_rms_norm(out, x, gpu(w), 1e-5, **kw)
        bias = b if layer else None
        out = empty(rows, width)
        run(prepare(out, gpu(x)))
        assert_close(out.get(), ref(x, w, bias), 1e-6)
        stream, other = ranges(x, y)
        out2 = empty(rows, width)
        run(prepare(out2, stream, y=other, scale=.7, post=gpu(post), acts=acts, **({"post_bias": gpu(post_b)} if layer else {})))
        total = x + np.float32(.7)*ref(y, post, post_b if layer else None)
        assert_close(stream.get(), total, 1e-6)
        assert_close(out2.get(), ref(total, w, bias), 2e-6)
        same_planes(acts, out2)
        taken = np.array([rows - 1, 0, rows - 1, 0, 0], np.int32)
        out3 = empty(5, width)
        run(prepare(out3, gpu(x), rows=gpu(taken)))
        same_bits(out3.get(), out.get()[taken])

def test_norm_into_planes_only():
    x, w = normal(3, 512), normal(512)
    out, acts = empty(3, 512), acts_for(3, 512, ("Q8_K",))
    run(prepare_rms_norm(None, gpu(x), gpu(w), 1e-6, acts=acts))
    run(prepare_rms_norm(out, gpu(x), gpu(w), 1e-6))
    same_planes(acts, out)

def test_layer_norm_without_bias():
    x, w, out = normal(4, 72) + 3, normal(72), empty(4, 72)
    run(prepare_layer_norm(out, gpu(x), gpu(w), None, 1e-5))
    assert_close(out.get(), layer_norm_ref(x, w, None, 1e-5), 1e-6)

@pytest.mark.parametrize("width,group", [(96, 32), (72, 24), (14, 7), (1280, 256), (1200, 600)])
def test_norm_of_groups(width, group):
    x, w, out = normal(3, width), normal(group), empty(3, width)
    run(prepare_rms_norm(out, gpu(x), gpu(w), 1e-5))
    assert_close(out.get(), rms_norm_ref(x, w, 1e-5), 1e-6)


HEADS = [(9, 3, 64, 64), (4, 1, 128, 128), (2, 2, 80, 80), (3, 1, 96, 32), (2, 1, 40, 20), (1, 1, 256, 256), (2, 1, 7, 4), (2, 1, 640, 512), (5, 2, 16, 16)]

@pytest.mark.parametrize("n_head,n_head_kv,head_dim,dim", HEADS)
def test_rope(n_head, n_head_kv, head_dim, dim):
    "q and k in place in the product of a merged matrix, v untouched; with and without norms; one array alone."
    table, positions = rope_table(RopeSpec(dim, 1e4, "half"), 600), np.array([0, 599, 17, 17], np.int32)
    q, k, v = (normal(4, n*head_dim) for n in (n_head, n_head_kv, n_head_kv))
    wq, wk = normal(2, head_dim)
    for norms in (False, True):
        gq, gk, gv = ranges(q, k, v)
        run(prepare_heads(gq, gk, gpu(positions), gpu(table), head_dim, *((gpu(wq), gpu(wk), 1e-6) if norms else ())))
        for got, x, w in ((gq, q, wq), (gk, k, wk)): assert_close(got.get(), rope_ref(rms_norm_ref(x, w, 1e-6) if norms else x, positions, table, head_dim), 1e-6)
        same_bits(gv.get(), v)
    out = empty(4, n_head*head_dim)
    run(prepare_rope(out, gpu(q), gpu(positions), gpu(table), head_dim))
    assert_close(out.get(), rope_ref(q, positions, table, head_dim), 1e-6)

def test_heads_need_no_rotation():
    q, k, wq, wk = normal(3, 128), normal(3, 64), normal(32), normal(32)
    gq, gk = gpu(q), gpu(k)
    run(prepare_heads(gq, gk, None, None, 32, gpu(wq), gpu(wk), 1e-5))
    for got, x, w in ((gq, q, wq), (gk, k, wk)): assert_close(got.get(), rms_norm_ref(x, w, 1e-5), 1e-6)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("rows,width", [(1, 7), (3, 40), (1, 1536), (17, 256), (34, 288), (2, 1280)])
def test_gated(act, rows, width):
    gate, up = 4*normal(rows, width), normal(rows, width)
    gate[0, :4] = [0, 90, -90, -300]
    acts, out, out2 = acts_for(rows, width, ("Q8_1", "Q8_K")), empty(rows, width), empty(rows, width)
    run(prepare_gated(out, act, *ranges(gate, up), acts=acts))
    assert_close(out.get(), gated_ref(act, gate, up), 1e-6)
    same_planes(acts, out)
    run(prepare_activate(out2, act, gpu(gate), acts=acts))
    assert_close(out2.get(), gated_ref(act, gate, np.float32(1)), 1e-6)
    same_planes(acts, out2)


@pytest.mark.parametrize("rows,width", [(1, 7), (3, 40), (2, 1030), (5, 2048)])
def test_elements(rows, width):
    x, y = normal(rows, width), normal(rows, width)
    def check(want, prepare, *args, tol=1e-6):
        out = empty(*want.shape)
        run(prepare(out, *args))
        assert_close(out.get(), want, tol)
        return out.get()
    check(x + np.float32(.3)*y, prepare_add, *ranges(x, y), .3)
    check(softcap_ref(x, 30., 2.), prepare_softcap, gpu(10*x), 30., .2)
    check(softcap_ref(x, 0., .3), prepare_softcap, gpu(x), 0., .3, tol=0)
    rows_of = np.array([rows - 1, 0, 0], np.int32)
    check(x[rows_of], prepare_take_rows, gpu(x), gpu(rows_of), tol=0)
    for first in (0, 3, 4): check(x[:, first:first + 3], prepare_take_columns, gpu(x), first, tol=0)
    stream = gpu(x)
    run(prepare_add(stream, stream, gpu(y), .3))
    same_bits(stream.get(), check(x + np.float32(.3)*y, prepare_add, gpu(x), gpu(y), .3))

@pytest.mark.parametrize("heads,a,b", [(1, 512, 64), (3, 5, 2), (4, 128, 64)])
def test_join_heads(heads, a, b):
    x, y, out = normal(2, heads*a), normal(2, heads*b), empty(2, heads*(a + b))
    run(prepare_join_heads(out, *ranges(x, y), heads))
    same_bits(out.get(), join_heads_ref(x, y, heads))


@pytest.mark.parametrize("kind", [*GPU_FORMATS, "F16", "BF16"])
def test_embed(kind):
    "Rows of the packed table are the dequantised rows, in every bit, scaled with one rounding."
    for k in (256, 1280) if QUANT_TYPES[kind].block_size == 256 else (32, 160, 1024):
        raw = quantize(normal(37, k)*np.exp(normal(37, 1)), kind)
        w, ids = to_gpu(raw, kind), np.array([36, 0, 5, 5, 12], np.int32)
        for scale in (1.0, 7.3):
            out = empty(5, k)
            run(prepare_embed(out, w, gpu(ids), scale))
            assert np.array_equal(out.get(), dequantize(raw, kind)[ids]*np.float32(scale)), (k, scale)


@pytest.mark.parametrize("width", [160, 1024])
def test_a_row_alone_and_in_company(width):
    "The batch changes no bit: of the float32 rows, nor of codes and scales."
    x, y, w, heads = normal(40, width), normal(40, width), normal(width), normal(32)
    table, positions = gpu(rope_table(RopeSpec(32, 1e4, "half"), 64)), np.arange(40, dtype=np.int32)
    def results(rows):
        stream, part = gpu(x[rows]), gpu(y[rows])
        norm, act, turned = (empty(*stream.shape) for _ in range(3))
        run(prepare_rms_norm(norm, stream, gpu(w), 1e-5, y=part) + prepare_gated(act, "silu", stream, part) + prepare_heads(part, None, gpu(positions[rows]), table, 32, gpu(heads), q_out=turned))
        return [v.get() for v in (stream, norm, act, turned)]
    together = results(slice(0, 40))
    for r in (0, 7, 39):
        for one, all_rows in zip(results(slice(r, r + 1)), together): same_bits(one[0], all_rows[r])


def test_errors():
    x, w, ids = gpu(normal(3, 64)), gpu(normal(64)), gpu(np.zeros(3, np.int32))
    out, narrow, tall = empty(3, 64), empty(3, 32), empty(4, 64)
    q8k, double, before = act_buffers(3, 256, "Q8_K"), gpu(normal(1, 64)), x.get()
    for what, call in [("expected float32 \\[3, 64\\]", lambda: prepare_rms_norm(narrow, x, w, 1e-5)), ("y: expected float32 \\[3, 64\\]", lambda: prepare_rms_norm(out, x, w, 1e-5, y=tall)),
                       ("needs an output", lambda: prepare_rms_norm(None, x, w, 1e-5)), ("cannot go with `rows`", lambda: prepare_rms_norm(out, x, w, 1e-5, y=x, rows=ids)),
                       ("there is no y", lambda: prepare_rms_norm(out, x, w, 1e-5, post=w)), ("norm of groups", lambda: prepare_rms_norm(out, x, w[:32], 1e-5, y=x)),
                       ("bias: expected float32 \\[64\\]", lambda: prepare_layer_norm(out, x, w, w[:32], 1e-5)), ("\\[3, 64\\] in Q8_1, Q8_K", lambda: prepare_rms_norm(out, x, w, 1e-5, acts=[q8k])),
                       ("at most 24576", lambda: prepare_rms_norm(empty(1, 24580), empty(1, 24580), empty(1, 24580)[0], 1e-5)), ("int32 \\[3\\]", lambda: prepare_rope(x, x, w, gpu(normal(9, 32)), 64)),
                       ("not a multiple of head_dim 48", lambda: prepare_rope(x, x, ids, gpu(normal(9, 32)), 48)), ("at most head_dim 16", lambda: prepare_rope(x, x, ids, gpu(normal(9, 32)), 16)),
                       ("needs positions", lambda: prepare_rope(x, x, None, gpu(normal(9, 32)), 32)), ("expected one of silu", lambda: prepare_gated(out, "tanh", x, x)),
                       ("without gaps", lambda: prepare_add(tall[:3, :32], narrow, narrow)), ("columns 40 to 72 of 64", lambda: prepare_take_columns(narrow, x, 40)),
                       ("of groups needs an output", lambda: prepare_rms_norm(None, x, w[:32], 1e-5)), ("lies where x does", lambda: prepare_take_rows(x, x, ids)), ("lies where x does", lambda: prepare_rms_norm(x, x, w, 1e-5, rows=ids)),
                       ("lies where x does", lambda: prepare_take_columns(x[:1, 3:35], x, 0)), ("lies where b does", lambda: prepare_join_heads(double[:, 8:16], narrow[:1, :4], double[:, 8:12], 1)),
                       ("multiples of 3 heads", lambda: prepare_join_heads(out, narrow, narrow, 3)), ("k_out: expected float32 \\[3, 64\\]", lambda: prepare_heads(x, tall, ids, gpu(normal(9, 32)), 32))]:
        with pytest.raises(ValueError, match=what): call()
    same_bits(x.get(), before)
