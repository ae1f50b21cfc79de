"""Attention on the GPU against chapter 21's reference, in the emulator where there is no GPU: every type, width and variation; steps of all kinds; blocks that travel; the kernels for a Turing card."""
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from chapters import helpers
from gpu_arrays import empty

from literate_engine import attention_gpu
from literate_engine.attention import attention_ref
from literate_engine.attention_gpu import (PAIRS, SPLITS, AttentionScratch, KVCacheGpu, SplitPlan, attention_bodies, attention_tiles, num_attention_tiles, prepare_attention, prepare_kv_store,
    prepare_rope_attention, prepare_rope_store, split_plans, tune_attention)
from literate_engine.core import rel_err
from literate_engine.cuda import Launch, cupy, device
from literate_engine.kvcache import Batch, KVCache, KVGroup, blocks_needed
from literate_engine.ops_gpu import prepare_heads


Layer, int32, make_case, step_of, attention, check, same_bits = helpers("26_attention_gpu", "Layer", "int32", "make_case", "step_of", "attention", "check", "same_bits")
STEPS = [[(1, 0)], [(40, 0)], [(130, 7)], [(1, 16), (5, 127), (1, 300), (17, 0), (1, 128)], [(1, 900), (4, 510)]]
SPECS = [Layer(9, 3, 64, 64), Layer(4, 1, 256, 256, window=20), Layer(4, 4, 16, 16), Layer(7, 1, 32, 32, window=5), Layer(10, 2, 80, 96), Layer(8, 1, 128, 128, window=100),
         Layer(6, 3, 72, 40, window=33), Layer(5, 5, 12, 20, window=1), Layer(16, 1, 64, 64), Layer(71, 1, 64, 64), Layer(4, 2, 40, 40, softcap=3.), Layer(4, 2, 112, 112), Layer(2, 1, 192, 128)]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_shape(spec):
    "All steps; the types in turns, so that each meets each kind of step."
    types = [("f32", "f32"), *PAIRS, ("q4_0", "f16")]
    for i, seqs in enumerate(STEPS):
        for t in range(2): check(spec, seqs, types[(2*i + t + SPECS.index(spec)) % len(types)], np.linspace(-2, 3, spec.n_head).astype(np.float32) if len(seqs) > 1 else None)


@pytest.mark.parametrize("types", [("f32", "f32"), *PAIRS, ("f16", "q4_0"), ("f32", "q8_0")], ids=str)
def test_variations(types):
    "Sinks, soft-caps and windows together; a long sequence in many pieces; sequences of no positions; tokens of a draft."
    sinks = np.linspace(-3, 4, 8).astype(np.float32)
    check(Layer(8, 2, 32, 32, softcap=2., window=40), [(1, 70), (30, 20), (2, 0)], types, sinks)
    check(Layer(2, 1, 64, 64), [(1, 2100), (1, 3)], types, max_len=16384)
    check(Layer(2, 1, 64, 64, window=300), [(1, 2100), (1, 3)], types)
    check(Layer(8, 2, 64, 64), [(1, 33), (1, 0)], types, sinks, decode=False, pad=3)
    check(Layer(8, 2, 64, 64), [(3, 33), (1, 300), (4, 0), (9, 12)], types, sinks, few=4)
    cache, batch, q = make_case(Layer(8, 2, 64, 64), [(1, 33), (1, 0)], *types)
    out = attention(q, cache, batch, Layer(8, 2, 64, 64), decode=True, pad=3)
    assert not out[2:].any() and rel_err(out[:2], attention_ref(q, cache, batch, 0, Layer(8, 2, 64, 64))) < 2e-3


def test_very_long_contexts_have_bounded_pieces():
    "In long contexts pieces grow. Most of the context is one block over and over."
    spec, n = Layer(1, 1, 16, 16), 40001
    cache, rng = KVCacheGpu([spec], 40), np.random.default_rng(0)
    k, v = (rng.standard_normal((640, 16)).astype(np.float32) for _ in "kv")
    cache.store(0, k, v, np.arange(640))
    batch = Batch(1, 1, blocks_needed(n)).fill([([0], n - 1, [*rng.integers(1, 39, blocks_needed(n) - 1), 39], None)])
    q = rng.standard_normal((1, 16)).astype(np.float32)
    for max_len in (n, 100000): assert rel_err(attention(q, cache, batch, spec, max_len=max_len), attention_ref(q, cache, batch, 0, spec)) < 2e-3


@pytest.mark.parametrize("types", [("f16", "f16"), ("q8_0", "q4_0"), ("f32", "f32")], ids=str)
def test_a_token_in_any_company(types):
    "The same bits: alone, in a batch, beside a prompt, whatever the graph was captured for; a prompt in any chunks."
    same_bits(Layer(8, 2, 64, 64, window=500), types)


@pytest.mark.parametrize("types", [("f32", "f16"), ("q8_0", "q4_0"), ("q4_0", "q8_0")], ids=str)
def test_the_cache(types):
    "Stored bit for bit as on the CPU, from columns of a wider array; blocks of a group go out, come back and are copied; nothing else changes."
    cp, specs, rng = cupy(), [Layer(2, 2, 40, 96), Layer(4, 1, 64, 64)], np.random.default_rng(2)
    groups = [KVGroup(0, 0, (0,), 7), KVGroup(64, 32, (1,), 5)]
    host, gpu = (make(specs, 7, kv_type=types[0], kv_type_v=types[1], groups=groups) for make in (KVCache, KVCacheGpu))
    assert host.nbytes == gpu.nbytes and [len(a) for a in gpu.k] == [7, 5]
    rows = (rng.standard_normal((34, 300), np.float32)*10**rng.uniform(-6, 3, (34, 1))).astype(np.float32)
    rows[3], rows[5, 90:97] = 0, -0.5
    k, v, slots = rows[:, 4:84], rows[:, 88:280], np.r_[32:65, 70]
    host.store(0, k, v, slots)
    wide = cp.asarray(rows)
    for launch in prepare_kv_store(wide[:, 4:84], wide[:, 88:280], SimpleNamespace(cache=gpu, index=0), SimpleNamespace(slot_mapping=int32(slots))): launch()
    for a, b in zip(host.gather(0, [2, 3, 4], 39), gpu.gather(0, [2, 3, 4], 39)): assert np.array_equal(a, b)
    assert not any(a.get().any() for a in (gpu.k[1], gpu.v[1])) and not gpu.k[0].get()[[0, 1, 5, 6]].any()
    one, two = gpu.read_block(3), gpu.read_block(3, 1)
    assert len(one) + len(two) == gpu.bytes_per_block and one.any() and not two.any()
    gpu.write_block(5, one); gpu.copy_block(5, 1)
    assert all(np.array_equal(x, y) for x, y in zip(gpu.gather(0, [1], 16), host.gather(0, [3], 16)))
    before = gpu.k[0].get(), gpu.v[0].get()
    gpu.write_block(4, np.full(len(two), 7, np.uint8), 1)
    assert (gpu.k[1].get()[4].view(np.uint8) == 7).all() and not gpu.k[1].get()[:4].any() and not gpu.v[1].get()[:4].any()
    assert np.array_equal(before[0].view(np.uint8), gpu.k[0].get().view(np.uint8)) and np.array_equal(before[1].view(np.uint8), gpu.v[0].get().view(np.uint8))


@pytest.mark.parametrize("types", [("f16", "f16"), ("q8_0", "q4_0")], ids=str)
def test_every_plan(types):
    "Rings and pieces of other sizes; what an engine was told is used for all of its steps."
    spec = Layer(6, 2, 96, 80, window=700)
    plans = split_plans(spec, *types, device().arch)
    assert len(plans) == len(set(plans)) >= 4 and SplitPlan() == plans[0]
    try:
        for plan in [*plans, SplitPlan(4, 1, 7)]:
            SPLITS[(device().arch, *types, 6, 2, 96, 80)] = plan
            check(spec, [(1, 900), (1, 50), (2, 130)], types, np.linspace(-2, 3, 6).astype(np.float32), few=2)
            check(spec, [(1, 900), (1, 50), (1, 0)], types, max_len=9000)
    finally: SPLITS.clear()


def test_tuning_without_a_clock():
    if device().name != "emulated": pytest.skip("a real GPU has times")
    with pytest.raises(ValueError, match="no times"): tune_attention(Layer(8, 2, 64, 64), "f16", "f16")


@pytest.mark.parametrize("types", [("f32", "f16"), ("f16", "f16"), ("q8_0", "q4_0"), ("q4_0", "q8_0")], ids=str)
def test_rope_and_store_in_one_launch(types):
    "The same bits as the launches that it stands for; queries, keys and values are columns of one array, and rows behind the step's go to the null block."
    cp, rng = cupy(), np.random.default_rng(3)
    for spec, dim in ((Layer(4, 2, 64, 64), 64), (Layer(3, 1, 128, 128), 128), (Layer(2, 2, 40, 24), 20), (Layer(5, 1, 320, 36), 256), (Layer(2, 1, 12, 20), 12)):
        dk, dv, n_q, n_k, n_v = spec.head_dim_k, spec.head_dim_v, spec.n_head*spec.head_dim_k, spec.n_head_kv*spec.head_dim_k, spec.n_head_kv*spec.head_dim_v
        for norms in (False, True):
            wide = cp.asarray(rng.standard_normal((5, n_q + n_k + n_v)).astype(np.float32))
            q, k, v = wide[:, :n_q], wide[:, n_q:n_q + n_k], wide[:, n_q + n_k:]
            table, positions = cp.asarray(rng.standard_normal((90, dim)).astype(np.float32)), int32([3, 89, 0, 7, 0])
            wq, wk, wv = ([cp.asarray(rng.standard_normal(n).astype(np.float32)) for n in (dk, dk, dv)] if norms else [None]*3)
            one, two = (KVCacheGpu([spec]*2, 6, kv_type=types[0], kv_type_v=types[1]) for _ in range(2))
            step = SimpleNamespace(slot_mapping=int32([19, 64, 35, 80, 0]))
            out, want, k_out, v_out = (cp.empty((5, n), np.float32) for n in (n_q, n_q, n_k, n_v))
            for launch in prepare_heads(q, k, positions, table, dk, wq, wk, 1e-6, want, k_out) + (prepare_heads(v, None, None, None, dv, wv, None, 1e-5, v_out) if norms else []): launch()
            for launch in prepare_kv_store(k_out, v_out if norms else v, SimpleNamespace(cache=one, index=1), step): launch()
            for launch in prepare_rope_store(q, k, v, positions, table, dk, wq, wk, 1e-6, out, SimpleNamespace(cache=two, index=1), step, wv, 1e-5): launch()
            assert np.array_equal(out.get(), want.get())
            for a, b in zip(one.k + one.v, two.k + two.v): assert np.array_equal(a.get().view(np.uint8), b.get().view(np.uint8)), (spec, norms)
            assert one.k[1].get().any() and not one.k[0].get().any()
    with pytest.raises(ValueError, match="heads of 16"): prepare_rope_store(q, k, v, positions, table, 16, None, None, 0., out, SimpleNamespace(cache=one, index=1), step)


def test_rope_and_store_of_more_rows_than_a_grid_is_high():
    "65,537 rows: the last ones are turned and in their slots, the others go to the null block."
    cp, spec, T, rng = cupy(), Layer(1, 1, 4, 4), 2**16 + 1, np.random.default_rng(5)
    rows, table, slots = rng.standard_normal((T, 12)).astype(np.float32), rng.standard_normal((9, 4)).astype(np.float32), np.zeros(T, np.int32)
    slots[-3:] = 17, 18, 33
    x, positions, step, cache, out = cp.asarray(rows), np.arange(T) % 9, SimpleNamespace(slot_mapping=int32(slots)), KVCacheGpu([spec], 3, kv_type="f32"), empty(T, 4)
    for launch in prepare_rope_store(x[:, :4], x[:, 4:8], x[:, 8:], int32(positions), cp.asarray(table), 4, None, None, 0., out, SimpleNamespace(cache=cache, index=0), step): launch()
    c, s = table[positions, :2], table[positions, 2:]
    turned = lambda a: np.concatenate([a[:, :2]*c - a[:, 2:]*s, a[:, :2]*s + a[:, 2:]*c], 1)
    assert np.allclose(out.get(), turned(rows[:, :4]), rtol=0, atol=1e-5)
    k, v = (a.get()[:, 0][[1, 1, 2], [1, 2, 1]] for a in (cache.k[0], cache.v[0]))
    assert np.allclose(k, turned(rows[:, 4:8])[-3:], rtol=0, atol=1e-5) and np.array_equal(v, rows[-3:, 8:])


@pytest.mark.parametrize("types", [("f16", "f16"), ("f32", "f32")], ids=str)
def test_more_tiles_than_a_grid_is_high(types, monkeypatch):
    "Lists of tiles are launched in parts, here of two, and give the same bits."
    spec = Layer(8, 1, 64, 64)
    cache, batch, q = make_case(spec, [(70, 3), (1, 30), (33, 0)], *types)
    whole, grids, (tiles,) = attention(q, cache, batch, spec), [], step_of(batch, spec, cache).tiles.values()
    monkeypatch.setattr(attention_gpu, "GRID_Y", 2)
    monkeypatch.setattr(attention_gpu, "Launch", lambda kernel, grid, *args, **kw: grids.append(grid) or Launch(kernel, grid, *args, **kw))
    assert np.array_equal(attention(q, cache, batch, spec), whole)
    assert len(tiles) > 4 and [y for _, y, *z in grids if not z] == [2]*(len(tiles)//2) + [1]*(len(tiles) % 2)


@pytest.mark.parametrize("spec", [Layer(9, 3, 64, 64), Layer(8, 2, 128, 128, window=300), Layer(4, 4, 64, 64, softcap=3.), Layer(16, 1, 128, 128), Layer(4, 2, 256, 256, window=70), Layer(7, 1, 64, 64)], ids=str)
def test_rope_store_and_attention_in_one_launch(spec):
    "What the two launches give, but for the rounding of the newest position's weight; the same cache in every bit; windows, sinks, soft-caps, norms, partial rotation, rows that stand for nothing."
    cp, rng, D, olds = cupy(), np.random.default_rng(4), spec.head_dim_k, (0, 1, 15, 16, 130, 255, 256, 700)
    n_q, n_kv, S = spec.n_head*D, spec.n_head_kv*D, len(olds) + 2
    for dim, norms, sinks, max_len in ((D, True, None, 1024), (D//2, False, np.linspace(-2, 3, spec.n_head).astype(np.float32), 9000)):
        (one, batch, _), (two, *_) = (make_case(spec, [(1, n) for n in olds]) for _ in range(2))
        wide = cp.asarray(rng.standard_normal((S, n_q + 2*n_kv)).astype(np.float32))
        q, k, v = wide[:, :n_q], wide[:, n_q:n_q + n_kv], wide[:, n_q + n_kv:]
        table, positions = cp.asarray(rng.standard_normal((800, dim)).astype(np.float32)), int32([*olds, 0, 0])
        wq, wk, wv = ([cp.asarray(rng.standard_normal(D).astype(np.float32)) for _ in range(3)] if norms else [None]*3)
        step, sinks = step_of(batch, spec, one, pad=2), None if sinks is None else cp.asarray(sinks)
        step.slot_mapping = int32([*batch.slot_mapping[:len(olds)], 0, 0])
        want, got, scratch = empty(S, n_q), empty(S, n_q), AttentionScratch([spec], S, max_len)
        kv, turned = SimpleNamespace(cache=one, index=0), empty(S, n_q)
        for launch in prepare_rope_store(q, k, v, positions, table, D, wq, wk, 1e-6, turned, kv, step, wv, 1e-5) + prepare_attention(want, turned, kv, spec, step, scratch, max_len, sinks, True): launch()
        for _ in range(2):
            for launch in prepare_rope_attention(got, q, k, v, positions, table, wq, wk, 1e-6, SimpleNamespace(cache=two, index=0), spec, step, scratch, max_len, sinks, wv, 1e-5): launch()
            assert not scratch.counters.get().any() and rel_err(got.get(), want.get()) < 1e-3
            for a, b in zip(one.k + one.v, two.k + two.v): assert np.array_equal(a.get()[1:].view(np.uint16), b.get()[1:].view(np.uint16))     # but for the null block
    with pytest.raises(ValueError, match="rope_attention takes float16"):
        prepare_rope_attention(got, q, k, v, positions, table, wq, wk, 0., SimpleNamespace(cache=KVCacheGpu([spec], 2, kv_type="q8_0"), index=0), spec, step, scratch, 64)


def test_a_step_in_a_chain():
    "Store and attention as launches that follow each other, queries, keys and values columns of one array: what was written is seen, and what is read before the wait is what no one writes."
    cp, spec = cupy(), Layer(8, 2, 64, 64)
    cache, batch, _ = make_case(spec, [(1, 40), (1, 700), (1, 16)])
    wide = np.random.default_rng(1).standard_normal((3, 768)).astype(np.float32)
    x, kv, out, scratch = cp.asarray(wide), SimpleNamespace(cache=cache, index=0), cp.zeros((3, 512), np.float32), AttentionScratch([spec], 3, 1024)
    step = step_of(batch, spec, cache)
    chain = prepare_kv_store(x[:, 512:640], x[:, 640:], kv, step) + prepare_attention(out, x[:, :512], kv, spec, step, scratch, 1024, decode=True)
    for launch in chain: launch()
    assert rel_err(out.get(), attention_ref(wide[:, :512].copy(), cache, batch, 0, spec)) < 2e-3
    assert np.array_equal(cache.gather(0, batch.block_table[0], 41)[0][40].ravel(), wide[0, 512:640].astype(np.float16).astype(np.float32))


def test_lists_of_tiles():
    rng = np.random.default_rng(0)
    for _ in range(200):
        S, tokens, few = int(rng.integers(1, 9)), int(rng.integers(1, 65)), int(rng.integers(1, 5))
        n = rng.integers(0, 90, S)
        lens, starts = n + rng.integers(0, 50, S), np.r_[0, np.cumsum(n)]
        tiles = attention_tiles(starts, lens, tokens, num_attention_tiles(int(starts[-1]), S, tokens, few), few)
        seen = np.zeros(starts[-1], int)
        for s, first in tiles[tiles[:, 0] >= 0]: seen[starts[s] + first:min(starts[s] + first + tokens, starts[s + 1])] += 1
        assert np.array_equal(seen, np.repeat((n > few).astype(int), n))


def test_rows_at_any_address():
    "Tensor cores load 16 bytes of a query at once: rows that are not aligned are refused if any kernel of the step uses them, and the kernels in float32 take them."
    spec, wide = Layer(4, 2, 64, 64), np.random.default_rng(6).standard_normal((5, 259)).astype(np.float32)
    for types in (("f16", "f16"), ("f16", "q8_0"), ("f32", "f32")):
        for seqs in ([(1, 20), (4, 9)], [(1, 20)]*5):
            cache, batch, _ = make_case(spec, seqs, *types)
            step, out, scratch, kv, decode = step_of(batch, spec, cache), empty(5, 256), AttentionScratch([spec], len(seqs), 64), SimpleNamespace(cache=cache, index=0), len(seqs) == 5
            prepare = lambda: prepare_attention(out, cupy().asarray(wide)[:, 3:], kv, spec, step, scratch, 64, decode=decode)
            if any("exact" not in body for body in attention_bodies(spec, *types, device().arch)[:2 - decode]):
                with pytest.raises(ValueError, match="queries: expected rows at multiples of 16 bytes, got a pitch of 259 floats"): prepare()
            else:
                for launch in prepare(): launch()
                assert rel_err(out.get(), attention_ref(wide[:, 3:].copy(), cache, batch, 0, spec)) < 4e-6


def test_what_is_refused():
    cp, spec = cupy(), Layer(4, 2, 64, 64)
    cache, batch, q = make_case(spec, [(1, 20)])
    kv, x, step, scratch = SimpleNamespace(cache=cache, index=0), cp.asarray(q), step_of(batch, spec, cache), AttentionScratch([spec], 1, 64)
    out = cp.empty((1, 256), np.float32)
    with pytest.raises(ValueError, match="output: expected"): prepare_attention(cp.empty((1, 255), np.float32), x, kv, spec, step, scratch, 64)
    with pytest.raises(ValueError, match=r"queries: expected float32 \[any, 256\]"): prepare_attention(out, x[:, :128], kv, spec, step, scratch, 64)
    with pytest.raises(ValueError, match="2 rows for 1 sequences"): prepare_attention(cp.empty((2, 256), np.float32), cp.empty((2, 256), np.float32), kv, spec, step, scratch, 64, decode=True)
    with pytest.raises(ValueError, match="slot_mapping: expected contiguous int32"): prepare_kv_store(x[:, :128], x[:, :128], kv, SimpleNamespace(slot_mapping=step.slot_mapping.astype(np.int64)))
    with pytest.raises(ValueError, match="list has room for 1"): attention_tiles(np.array([0, 90]), np.array([90]), 32, 1)
    latent = KVCacheGpu([Layer(4, 1, 64, 0)], 3)
    with pytest.raises(ValueError, match="latent"): prepare_attention(out, x, SimpleNamespace(cache=latent, index=0), spec, step, scratch, 64)
    wide = KVCacheGpu([Layer(4, 1, 640, 640)], 3)
    with pytest.raises(ValueError, match="head_dim_v is 640"):
        prepare_attention(cp.empty((1, 2560), np.float32), cp.empty((1, 2560), np.float32), SimpleNamespace(cache=wide, index=0), Layer(4, 1, 640, 640), step, scratch, 64, decode=True)


TURING = """
import test_attention_gpu as t
from literate_engine.attention_gpu import attention_bodies
for types in (("f32", "f32"), ("f16", "f16"), ("q8_0", "q4_0")):
    assert attention_bodies(t.Layer(8, 2, 64, 64), *types, t.device().arch) == ("exact_split<1>", "exact_tile<3>") and t.device().arch == 75
    t.check(t.Layer(8, 2, 64, 64, window=90), [(1, 300), (20, 5)], types)
    t.check(t.Layer(2, 1, 256, 256), [(1, 30), (3, 0)], types)
"""

pytestmark = pytest.mark.usefixtures("emulated_gpu")

def test_cards_without_the_instructions():
    if device().name != "emulated": pytest.skip("a real GPU")
    env = os.environ | {"LITERATE_GPU": "emulated:75", "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    done = subprocess.run([sys.executable, "-c", TURING], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
