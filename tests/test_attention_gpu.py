"""Attention on the GPU against chapter 21's reference, in the emulator where there is no GPU: every type, width and variation; steps of all kinds; blocks that travel; the kernels for a Turing card."""
import os
import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace


import numpy as np
import pytest
from gpu_arrays import empty

from literate_engine.attention import attention_ref
from literate_engine.attention_gpu import (PAIRS, SPLITS, AttentionScratch, KVCacheGpu, SplitPlan, attention_tiles, num_attention_tiles, prepare_attention, prepare_kv_store,
    prepare_rope_attention, prepare_rope_store, split_plans, tile_tokens, tune_attention)
from literate_engine.core import rel_err
from literate_engine.cuda import cupy, device
from literate_engine.kvcache import Batch, KVCache, KVGroup, blocks_needed
from literate_engine.ops_gpu import prepare_heads


@dataclass(frozen=True)
class Layer:
    n_head: int
    n_head_kv: int
    head_dim_k: int
    head_dim_v: int
    window: int = 0
    softcap: float = 0.0
    @property
    def attn_scale(self): return self.head_dim_k**-0.5


def int32(a): return cupy().asarray(np.ascontiguousarray(a, np.int32))


def make_case(spec, seqs, kv_type="f16", kv_type_v=None, seed=0):
    "A step of (new tokens, tokens already there), block tables in random order, not-a-number wherever nobody may look."
    rng = np.random.default_rng(seed)
    blocks, steps = [blocks_needed(new + old) for new, old in seqs], []
    cache = KVCacheGpu([spec], sum(blocks) + 3, kv_type=kv_type, kv_type_v=kv_type_v)
    for a in cache.k + cache.v: a.view(np.uint8)[:] = 255
    ids = [int(b) for b in rng.permutation(np.arange(1, cache.num_blocks))]
    for (new, old), need in zip(seqs, blocks):
        table, p = [ids.pop() for _ in range(need)], np.arange(new + old)
        k, v = (rng.standard_normal((len(p), spec.n_head_kv*d), np.float32) for d in (spec.head_dim_k, spec.head_dim_v))
        cache.store(0, k, v, np.array(table)[p//16]*16 + p % 16)
        steps.append(([0]*new, old, table, None))
    batch = Batch(sum(n for n, _ in seqs), len(seqs), max(blocks)).fill(steps)
    return cache, batch, rng.standard_normal((batch.num_tokens, spec.n_head*spec.head_dim_k), np.float32)*1.5


def step_of(batch, spec, cache, few=1, pad=0):
    "The step's arrays; with `pad` further sequences of no positions."
    T, S, tokens = batch.num_tokens, batch.num_seqs, tile_tokens(spec, cache.kv_type, cache.kv_type_v, device().arch)
    starts, lens = batch.query_start_loc[:S + 1], batch.seq_lens[:S]
    tiles = attention_tiles(starts, lens, tokens, num_attention_tiles(T, S, tokens, few) + pad, few)
    wider = lambda a: np.pad(a, ((0, pad),) + ((0, 0),)*(a.ndim - 1))
    return SimpleNamespace(seq_lens=int32(wider(lens)), block_table=int32(wider(batch.block_table[:S])), slot_mapping=int32(wider(batch.slot_mapping[:T])),
                           query_start_loc=int32(np.r_[starts, [T]*pad]), tiles={tokens: int32(tiles)})


def attention(q, cache, batch, spec, sinks=None, decode=None, few=1, max_len=None, pad=0):
    cp, T = cupy(), batch.num_tokens
    step, max_len = step_of(batch, spec, cache, few, pad), max_len or batch.max_blocks_per_seq*16
    decode = few == 1 and T == batch.num_seqs if decode is None else decode
    rows = T + pad*decode
    scratch, out = AttentionScratch([spec], batch.num_seqs + pad, max_len, few), cp.empty((rows, spec.n_head*spec.head_dim_v), np.float32)
    for a in (out, scratch.ml, scratch.sums): a[...] = np.nan
    x = cp.asarray(np.pad(q, ((0, rows - T), (0, 0))))
    for launch in prepare_attention(out, x, SimpleNamespace(cache=cache, index=0), spec, step, scratch, max_len, None if sinks is None else cp.asarray(sinks), decode, few): launch()
    assert not scratch.counters.get().any(), "counters are not at 0 again"
    return out.get()


def check(spec, seqs, types=("f16", "f16"), sinks=None, **kw):
    cache, batch, q = make_case(spec, seqs, *types)
    error = rel_err(attention(q, cache, batch, spec, sinks, **kw), attention_ref(q, cache, batch, 0, spec, sinks))
    limit = 4e-6 if "f32" in types or spec.head_dim_k % 8 else 2e-3
    assert error < limit, f"{spec} {seqs} {types}: {error}"


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
    spec, lengths = Layer(8, 2, 64, 64, window=500), (40, 600, 300)
    cache, batch, q = make_case(spec, [(n, 0) for n in lengths], *types)
    tables, start = [batch.block_table[s, :blocks_needed(n)].tolist() for s, n in enumerate(lengths)], np.r_[0, np.cumsum(lengths)]
    def step(*parts, **kw):
        batch.fill([([0]*(end - first), first, tables[s], None) for s, first, end in parts])
        return np.split(attention(np.concatenate([q[start[s] + first:start[s] + end] for s, first, end in parts]), cache, batch, spec, **kw), np.cumsum([end - first for _, first, end in parts])[:-1])
    last = [(s, n - 1, n) for s, n in enumerate(lengths)]
    alone = [step(one)[0] for one in last]
    for got in (step(*last), step(*last[::-1])[::-1], step(*last, max_len=9000), step(*last, decode=False)): assert all(map(np.array_equal, got, alone))
    assert np.array_equal(step((2, 210, 300), last[1])[1], alone[1])
    whole, = step((2, 200, 300))
    assert np.array_equal(np.concatenate([step((2, a, min(a + 37, 300)))[0] for a in range(200, 300, 37)]), whole)


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
