"""Selection on the GPU against sorting, in the emulator where there is no GPU: unkind rows, masks, odd vocabularies; samplers that go on from candidates write what they write from whole rows."""

import numpy as np
import pytest
from chapters import helpers
from gpu_arrays import emulated

from literate_engine import topk_gpu as module
from literate_engine.cuda import Graph, cupy
from literate_engine.sampling import Sampler, SamplingParams
from literate_engine.topk_gpu import Ask, Selection, mask_words, topk_gpu, topk_ref

unkind, random_asks, same = helpers("27_topk_gpu", "unkind", "random_asks", "check")
EMULATED = emulated()
pytestmark = pytest.mark.usefixtures("emulated_gpu")


@pytest.mark.parametrize("n", [1, 2, 31, 33, 1000, 4095, 4096, 4097, 9001, 20000])
def test_against_sorting(n):
    rng = np.random.default_rng(n)
    for k in {1, int(rng.integers(2, 64)), min(n, 64), 256}:
        x = unkind(n, rng)
        if n > 5000: x = x[rng.permutation(len(x))[:5]]
        asks = random_asks(len(x), n, 12, rng)
        same(topk_gpu(cupy().asarray(x), k, asks), topk_ref(x, k, asks))


@pytest.mark.parametrize("n, k", [(151_936, 1), (151_936, 64), (262_144, 256)])
def test_real_vocabularies(n, k):
    rng = np.random.default_rng(n)
    x = (2.5*rng.standard_normal((2, n))).astype(np.float32)
    x[1, rng.integers(0, n, 500)] += 9
    asks = [Ask(np.float32(1), True), Ask(np.float32(1.4), False, mask=mask_words(rng.permutation(n)[:n//3], n))]
    same(topk_gpu(cupy().asarray(x), k, asks), topk_ref(x, k, asks))


def test_larger_groups(monkeypatch):
    "The instances for more than 262,144 tokens, on smaller ones."
    monkeypatch.setattr(module, "group_size", lambda n, k: 32)
    rng = np.random.default_rng(1)
    for n, k in ((33, 7), (8193, 256), (20_001, 64)):
        x = unkind(n, rng)[:8]
        asks = random_asks(len(x), n, 3, rng)
        same(topk_gpu(cupy().asarray(x), k, asks), topk_ref(x, k, asks))


def test_the_limit():
    assert module.group_size(1 << 18, 64) == 16 and module.group_size((1 << 18) + 64, 64) == 32 and module.group_size(10**6, 1) == 16
    with pytest.raises(ValueError, match="600000 tokens: the GPU selects 64 from at most 524288"): module.group_size(600_000, 64)


@pytest.mark.skipif(not EMULATED, reason="asks for other chips")
@pytest.mark.parametrize("arch", [75, 120])
def test_other_chips(arch, monkeypatch):
    monkeypatch.setenv("LITERATE_GPU", f"emulated:{arch}")
    rng = np.random.default_rng(arch)
    x = unkind(3000, rng)
    asks = random_asks(len(x), 3000, 5, rng)
    same(topk_gpu(cupy().asarray(x), 100, asks), topk_ref(x, 100, asks))


@pytest.mark.parametrize("n_vocab, n_token", [(512, 500), (513, 511), (5001, 4097), (128, 1)])
def test_padding_is_never_chosen(n_vocab, n_token):
    rng = np.random.default_rng(n_vocab)
    x = rng.standard_normal((5, n_vocab)).astype(np.float32)
    x[:, n_token:] = (99, np.inf, np.nan, 0, 5)[n_vocab % 5]
    asks = random_asks(5, n_token, 4, rng)
    same(topk_gpu(cupy().asarray(x), 50, asks, n_token), topk_ref(x, 50, asks, n_token))


def test_a_graph_is_replayed():
    "New logits, new questions, fewer rows asked about: nothing of the step before is left."
    cp, rng = cupy(), np.random.default_rng(2)
    x = cp.zeros((4, 5000), np.float32)
    s, first = Selection(x, 64, extra=8, masked=True), Selection(x, 1)
    graph = Graph(lambda: [launch() for launch in s.launches + first.launches])
    for step in range(6):
        values = np.roll(unkind(5000, rng), -4*step, 0)[:4]                  # every kind, in turns
        asks = random_asks(4 - step % 3, 5000, 8, rng)
        x.set(values, stream=graph.stream); s.ask(asks, graph.stream); first.ask([Ask()]*4, graph.stream)
        graph(); graph.synchronize()
        same(s.read(graph.stream), topk_ref(values, 64, asks))
        best = topk_ref(values, 1, [Ask()]*4)
        same(first.read(), best)
        assert first.next.get().tolist() == [c.ids[0] for c in best]


def test_company_changes_nothing():
    rng = np.random.default_rng(3)
    x, ask = unkind(6001, rng), Ask(np.float32(0.7), True)
    together = topk_gpu(cupy().asarray(x), 40, [ask]*len(x))
    for row, c in zip(x, together):
        alone, = topk_gpu(cupy().asarray(row[None]), 40, [ask])
        assert all(np.array_equal(a, b) for a, b in zip(c, alone))


class Random:
    "Stands in for a matcher: other tokens each time, the same for the same seed."
    def __init__(self, n, seed): self.n, self.rng = n, np.random.default_rng(seed); self.accept(0)
    def accept(self, token_id): self.ids = np.sort(self.rng.permutation(self.n)[:int(self.rng.choice([1, 5, 300, self.n - 3]))])


def requests(n, rng):
    "Parameters of all kinds, and whether a grammar holds."
    pick = lambda *choices: choices[rng.integers(len(choices))]
    for seed in range(24):
        kw = {"temperature": float(pick(0, 0.3, 1, 1, 2)), "top_k": int(pick(0, 0, 1, 20, 64, 100)), "top_p": float(pick(1, 0.9, 0.5, 0)), "min_p": float(pick(0, 0, 0.05, 0.5)), "seed": seed, "logprobs": pick(None, None, 0, 3)}
        if rng.random() < 0.5: kw |= {"frequency_penalty": 0.6, "presence_penalty": 0.2, "repetition_penalty": 1.2, "repetition_window": 12, "logit_bias": {int(rng.integers(n)): -100, 3: 2.5, n - 1: 1}}
        yield SamplingParams(**kw | ({"grammar": "x"} if rng.random() < 0.4 else {}))


def outcome(fn, *args):
    try: return fn(*args)
    except ValueError as e: return str(e), None, []


def test_samplers_go_on_from_candidates():
    "Two samplers of each request, one with whole rows and one with what the GPU tells of them."
    n, head, rng = 3000, 64, np.random.default_rng(4)
    params = list(requests(n, rng))
    make = lambda: [Sampler(p, n, [1, 2, 3], matcher=Random(n, i) if p.grammar else None, head=head) for i, p in enumerate(params)]
    whole, part, fetched, decided = make(), make(), 0, 0
    x = cupy().zeros((len(params), n), np.float32)
    s = Selection(x, head, extra=64, masked=True)
    for step in range(12):
        rows = (rng.choice([1.5, 3, 5], (len(params), 1))*rng.standard_normal((len(params), n))).astype(np.float32)
        if step % 3 == 0: rows = np.round(rows)
        if step % 4 == 1: rows[:, ::3] = (np.nan, -np.inf)[step//4 % 2]
        if step == 7: rows[::2, 5] = np.inf
        x.set(rows)
        asks = [a.ask(room=64) for a in part]
        s.ask([ask or Ask() for ask in asks])
        for launch in s.launches: launch()
        for row, a, b, ask, c in zip(rows, whole, part, asks, s.read(), strict=True):
            want, got = outcome(a.sample, row), None if ask is None else outcome(b.sample_from_candidates, c)
            decided, fetched = decided + (got is not None), fetched + (got is None)
            if got is None: got = outcome(b.sample, row)
            assert got[0] == want[0] and [i for i, _ in got[2]] == [i for i, _ in want[2]], (a.params, got, want)
            if want[1] is not None: assert np.allclose([got[1], *(v for _, v in got[2])], [want[1], *(v for _, v in want[2])], rtol=0, atol=1e-4)
    assert decided > 2*fetched, (decided, fetched)
