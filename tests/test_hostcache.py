"""An engine with host memory below its cache, and with states in files: the same bits as if everything had been computed, nothing lost, nothing pinned, and a reason for what was not found."""
import gc
import queue
import threading
import time
import weakref

import numpy as np
import pytest

from literate_engine.core import fixture
from literate_engine.engine import scripted_engine
from literate_engine.hosttier import REASONS
from literate_engine.blocks import block_keys
from literate_engine.llm import LLM
from literate_engine.sampling import SamplingParams

KINDS = ["llama", "qwen3moe", "qwen3next", "lfm2", "nemotron_h", "mamba2",            # dense, mixture, hybrids, no attention at all
         "gemma3", "gemma4ple", "gpt_oss", "cohere2"]                                  # windows
PARAMS = SamplingParams(max_tokens=20, temperature=0.7, seed=1, logprobs=2, ignore_eos=True)
OPTIONS = dict(activations="float32", num_threads=2, max_model_len=160, max_num_seqs=2, max_num_batched_tokens=64, num_state_checkpoints=1)


def hashed(tokens): return sum((i + 3) * (t + 1) * (t + 11) for i, t in enumerate(tokens)) % 251


def fixture_llm(name, **options): return LLM(fixture(f"{name}.gguf"), **OPTIONS | options)


def scripted(script=hashed, **options): return scripted_engine(script, **dict(max_model_len=96, num_blocks=8) | options)


def shrink(pool, left=11):
    "Take blocks away until so many are free in the first group, and few in the others; what was taken."
    return [(g, g.allocate(g.num_free - (left if g is pool else g.most(10**6) + 2))) for g in pool.groups]


def give_back(taken):
    for g, ids in taken: g.free(ids)


def bits(outputs): return [(o.token_ids, o.logprobs) for o in outputs]


def sound(engine):
    "Nothing is lost, pinned or held"
    s, pool = engine.core.scheduler, engine.model.pool
    s.check_integrity()
    return all(g.num_free == g.num_blocks - 1 for g in pool.groups) and (pool.states is None or pool.states.num_free == pool.states.num_slots)


@pytest.fixture(scope="module", params=KINDS)
def cold(request):
    "A model, prompts with and without a common beginning, and what it answers to each with nothing cached"
    ids = (np.load(fixture(f"{request.param}.npz"))["p1_ids"].tolist()*4)[:90]
    prompts = [ids, ids[:50] + ids[:9], ids[::-1][:85], ids[:50], ids[5:80]]
    with fixture_llm(request.param, enable_prefix_caching=False) as llm: return request.param, prompts, bits([llm.generate(p, PARAMS)[0] for p in prompts])


def test_contents_from_host_memory_have_the_same_bits(cold):
    "A cache in which one conversation at a time fits; all of them come back from host memory, alone and two at a time"
    name, prompts, want = cold
    with fixture_llm(name, host_cache_memory=2**24) as llm:
        pool = llm.engine.model.pool
        taken = shrink(pool)                                                             # as if the cache were this small
        first = [llm.generate(p, PARAMS)[0] for p in prompts]
        again = [llm.generate(p, PARAMS)[0] for p in prompts]
        assert bits(first) == bits(again) == want and [o.num_cached_tokens for o in again] == [80, 48, 80, 48, 64]
        assert bits(llm.generate(prompts, PARAMS)) == want
        stats = llm.engine.stats()
        assert stats["host_cache_hits"] > 20 and 0 < stats["host_cache_bytes"] <= stats["host_cache_capacity"] == 2**24 and not stats["host_cache_misses"]
        give_back(taken)
        assert sound(llm.engine)


def test_a_small_tier_under_pressure(cold):
    "Host memory for about six blocks and a state, so that what is saved pushes out what was saved before"
    name, prompts, want = cold
    with fixture_llm(name) as llm: contents = {k: c.nbytes for k, c in llm.engine.core.contents.items()}
    with fixture_llm(name, host_cache_memory=6*max(256, contents["block"]) + contents.get("state", 0)) as llm:
        taken = shrink(llm.engine.model.pool)
        for _ in range(2): assert bits(llm.generate(prompts, PARAMS)) == want and bits([llm.generate(p, PARAMS)[0] for p in prompts]) == want
        assert llm.engine.stats()["host_cache_evictions"] + llm.engine.stats()["host_cache_refused"] > 5
        give_back(taken)
        assert sound(llm.engine)


def test_a_saved_state_has_the_same_bits(cold, tmp_path):
    "What one engine wrote, another one finds; a file can also come from host memory, and go where part of it is already"
    name, prompts, want = cold
    with fixture_llm(name, host_cache_memory=2**24) as llm:
        pool = llm.engine.model.pool
        taken = shrink(pool)
        for i, p in enumerate(prompts): llm.generate(p, PARAMS); llm.save_state(tmp_path/f"{i}", p)
        llm.save_state(tmp_path/"0 late", prompts[0])                                    # by now it is host memory that holds it
        give_back(taken)
        assert sound(llm.engine)
    for i, cached in zip(("0", "1", "2", "3", "4", "0 late"), (80, 48, 80, 48, 64, 80)):
        with fixture_llm(name) as llm:
            p = prompts[int(i[0])]
            assert llm.load_state(tmp_path/i) == p
            [o] = llm.generate(p, PARAMS)
            assert o.num_cached_tokens == cached and bits([o]) == want[int(i[0]):int(i[0]) + 1] and sound(llm.engine)
    with fixture_llm(name, num_state_checkpoints=8) as llm:
        for i in (1, 0, 0): llm.load_state(tmp_path/f"{i}")
        outputs = llm.generate(prompts[:2], PARAMS)
        assert bits(outputs) == want[:2] and [o.num_cached_tokens for o in outputs] == [80, 48] and sound(llm.engine)


@pytest.mark.parametrize("num_state_slots", [0, 3])
def test_a_copy_that_cannot_be_made_is_computed_instead(num_state_slots):
    "Entries vanish between the decision and the copy: the request begins anew, is told so, and writes what it would have written"
    with LLM(scripted(num_state_slots=num_state_slots, max_num_seqs=2, host_cache_memory=10**6)) as llm:
        params, texts = SamplingParams(max_tokens=5, ignore_eos=True), [[i]*60 for i in range(3)]
        want = [llm.generate(t, params)[0].token_ids for t in texts]
        tier, transfer, lost = llm.engine.model.pool.host, llm.engine.model.transfer, []
        def forgetful(moves):
            for move in moves:
                if move.kind.startswith("load") and len(lost) < 2:
                    entry = move.kind[5:], move.source
                    if entry in tier._held: lost.append(entry); del tier._held[entry]; tier.nbytes -= tier.cost(entry[0])
            return transfer(moves)
        llm.engine.model.transfer = forgetful
        outputs = llm.generate([texts[0], texts[1]], params)
        assert [o.token_ids for o in outputs] == want[:2] and len(lost) == 2 and tier.misses == 2
        assert [o.num_cached_tokens for o in outputs] != [48, 48] and all(o.cache_report.num_cached_tokens == o.num_cached_tokens for o in outputs)
        assert llm.engine.stats()["num_preemptions"] == 0 and sound(llm.engine)


def test_a_step_that_fails_unpins(caplog):
    with LLM(scripted(host_cache_memory=10**6)) as llm:
        params = SamplingParams(max_tokens=5, ignore_eos=True)
        want = [llm.generate([i]*60, params)[0].token_ids for i in range(3)]
        transfer, llm.engine.model.transfer = llm.engine.model.transfer, lambda moves: 1/0 if any(m.kind == "load_block" for m in moves) else transfer(moves)
        assert llm.generate([0]*60, params)[0].finish_reason == "error" and sound(llm.engine)
        llm.engine.model.transfer = transfer
        [o] = llm.generate([0]*60, params)
        assert o.token_ids == want[0] and sound(llm.engine)


def test_closing_gives_all_memory_back():
    with fixture_llm("lfm2", host_cache_memory=2**24) as llm:
        engine, model = llm.engine, llm.engine.model
        taken = shrink(model.pool)
        for i in range(4): llm.generate([i]*90, PARAMS)
        tier = model.pool.host
        arrays = [a for a in (*model.cache.k, *model.cache.v, *model.states.conv, *model.states.ssm) if a is not None and a.size] + list(tier._held.values())
        refs = [weakref.ref(a) for a in arrays] + [weakref.ref(tier), weakref.ref(engine.core.history)]
        assert len(tier) > 5 and len(taken)
        del arrays, tier, model
    gc.collect()
    assert not [r() for r in refs if r() is not None] and engine.stats()["num_running"] == 0 and "host_cache_hits" not in engine.stats()


# ---- reports ----

def test_a_forgotten_model_stops():
    llm = LLM(scripted())
    thread = llm.engine._thread
    del llm
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_reports_say_why():
    with LLM(scripted(num_blocks=12, num_state_slots=9)) as llm:
        one = SamplingParams(max_tokens=1)
        def why(ids, **more): return llm.generate(ids, one, **more)[0].cache_report
        a, b = list(range(60)), list(range(40)) + [99]*10
        reports = [why(a), why(a), why(b), why(a + [7]*5), why(a, cache_salt="x")]
        assert [r.reason for r in reports] == [REASONS[i] for i in (0, 4, 6, 2, 0)]
        assert (reports[2].position, reports[2].token_id, reports[2].earlier_token_id, reports[2].texts) == (40, 99, 40, ("c", "("))
        assert [r.num_cached_tokens for r in reports] == [0, 48, 0, 48, 0] and reports[1].checkpoint == 48 and reports[0].checkpoint is None
        for i in range(5): why([200 + i]*80)
        assert why(a).reason == "evicted"
        assert llm.generate(a, SamplingParams(max_tokens=1, prompt_logprobs=0))[0].cache_report is None
    with LLM(scripted(enable_prefix_caching=False)) as llm: assert llm.generate(a, one)[0].cache_report is None


def test_a_report_comes_once_and_survives_preemption():
    engine, outs, seen = scripted(num_blocks=8, max_model_len=48, max_num_seqs=4, max_num_batched_tokens=16), queue.SimpleQueue(), {}
    for k in "abcd": engine.submit([ord(k)]*12, SamplingParams(max_tokens=20, ignore_eos=True), outs.put, request_id=k)
    engine.start()
    for _ in range(80):
        o = outs.get()
        seen.setdefault(o.request_id, []).append(o.cache_report)
    assert engine.stats()["num_preemptions"] > 0
    assert all(r[0].reason == "nothing similar seen" and not any(r[1:]) for r in seen.values())
    engine.stop()


def test_an_aborted_request_is_remembered_as_far_as_it_was_computed():
    engine, outs = scripted(max_num_batched_tokens=16, max_num_seqs=1).start(), queue.SimpleQueue()
    def first(o):
        engine.abort("x")
        outs.put(o)
    engine.submit([5]*40, SamplingParams(max_tokens=50, ignore_eos=True), first, request_id="x")
    while not outs.get().finish_reason: pass
    engine.submit([5]*40 + [6], SamplingParams(max_tokens=1), outs.put)
    o = outs.get()
    assert o.cache_report.num_common_tokens == 40 and o.num_cached_tokens == 32
    engine.stop()


# ---- files ----

def test_what_cannot_be_saved_or_loaded(tmp_path):
    "One line each, and nothing has changed"
    with LLM(scripted(num_blocks=8, num_state_slots=9)) as llm:
        llm.generate([5]*90, SamplingParams(max_tokens=3, ignore_eos=True))
        llm.save_state(tmp_path/"s", [5]*90, cache_salt="")
        for text, salt in (([6]*90, ""), ([5]*15, ""), ([5]*90, "x")):
            with pytest.raises(ValueError, match="nothing of these .* tokens is cached"): llm.save_state(tmp_path/"no", text, salt)
        with pytest.raises(ValueError, match="token id 999 at position 1"): llm.save_state(tmp_path/"no", [1, 999])
        with pytest.raises(FileNotFoundError, match="there is no folder"): llm.save_state(tmp_path/"no"/"folder", [5]*90)
        with pytest.raises(OSError, match="not a file"): llm.save_state(tmp_path, [5]*90)
        for ask in (llm.save_state, llm.load_state):
            with pytest.raises(ValueError, match="cache_salt is 5: expected a string"): ask(tmp_path/"s", *([[5]*90] if ask == llm.save_state else []), cache_salt=5)
        with pytest.raises(ValueError, match="cache_salt is None: expected a string"): llm.generate([5]*90, cache_salt=None)
        with pytest.raises(ValueError, match="another cache_salt"): llm.load_state(tmp_path/"s", "x")
        with pytest.raises(ValueError, match="no such file"): llm.load_state(tmp_path/"none")
        assert sorted(p.name for p in tmp_path.iterdir()) == ["s"] and sound(llm.engine)
    with pytest.raises(RuntimeError, match="not running"): llm.load_state(tmp_path/"s")
    with pytest.raises(RuntimeError, match="not running"): llm.save_state(tmp_path/"s", [5]*90)
    with LLM(scripted(num_blocks=5, max_model_len=64, num_state_slots=9)) as llm:
        with pytest.raises(ValueError, match="state.slot|too few"): llm.load_state(tmp_path/"s")
    with LLM(scripted(num_blocks=7, num_state_slots=9)) as llm:
        taken = llm.engine.model.pool.allocate(3)
        with pytest.raises(ValueError, match="5 blocks and a state to be loaded: too few are free"): llm.load_state(tmp_path/"s")
        llm.engine.model.pool.free(taken)
        assert sound(llm.engine) and llm.engine.model.pool.find(block_keys([5]*90)) == []
        assert llm.load_state(tmp_path/"s") == [5]*90 and sound(llm.engine) and len(llm.engine.model.pool.find(block_keys([5]*90))) == 5
    with LLM(scripted(enable_prefix_caching=False)) as llm:
        with pytest.raises(ValueError, match="enable_prefix_caching"): llm.load_state(tmp_path/"s")


def test_settings_must_agree(tmp_path):
    with fixture_llm("llama") as llm:
        llm.generate([7]*40, PARAMS)
        llm.save_state(tmp_path/"s", [7]*40)
    for options, message in (({"activations": "int8", "kv_type": "f32"}, "activations = int8"), ({"rope_freq_base": 12345.0}, "rope_freq_base = 12345"), ({"activations": "int8"}, "kv_type = f16")):
        with fixture_llm("llama", **options) as llm, pytest.raises(ValueError, match=f"computed with .*{message}"): llm.load_state(tmp_path/"s")
    with fixture_llm("qwen3moe") as llm, pytest.raises(ValueError, match="of another model"): llm.load_state(tmp_path/"s")


def test_what_is_loaded_pushes_others_into_host_memory(tmp_path):
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    with LLM(scripted(host_cache_memory=10**6)) as llm:
        for i in (1, 2): llm.generate([i]*90, params); llm.save_state(tmp_path/f"{i}", [i]*90)
        llm.load_state(tmp_path/"1")
        assert [llm.generate([i]*90, params)[0].num_cached_tokens for i in (1, 2, 1)] == [80]*3 and sound(llm.engine)


def test_saving_and_loading_beside_running_requests(tmp_path):
    "Four threads ask, save and load for two seconds; every answer is that of a quiet engine"
    with LLM(scripted(num_blocks=20, num_state_slots=6, max_num_seqs=4, host_cache_memory=50000, max_num_waiting=1000)) as llm:
        params, wrong, stop = SamplingParams(max_tokens=8, ignore_eos=True), [], time.monotonic() + 2
        def alone(ids):
            tokens = list(ids)
            for _ in range(8): tokens.append(hashed(tokens))
            return tokens[len(ids):]
        def work(k):
            rng, done = np.random.default_rng(k), 0
            while time.monotonic() < stop or done < 5:
                ids = [int(rng.integers(3))]*int(rng.integers(20, 80))
                if llm.generate(ids, params)[0].token_ids != alone(ids): wrong.append(ids)
                done += 1
                try:
                    if rng.random() < .5: llm.save_state(tmp_path/f"{k}", ids)
                    elif (tmp_path/f"{k}").exists(): llm.load_state(tmp_path/f"{k}")
                except ValueError as e: assert "cached" in str(e) or "too few" in str(e)
        threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
        for t in threads: t.start()
        for t in threads: t.join(60)
        assert not wrong and not any(t.is_alive() for t in threads) and sound(llm.engine)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_quantised_contents(name, tmp_path):
    "Codes and scales travel like any other bytes: from host memory and from a file an answer goes on as it would have"
    options = dict(activations="int8", kv_type="q8_0", kv_type_v="q4_0")
    ids = (np.load(fixture(f"{name}.npz"))["p1_ids"].tolist()*4)[:90]
    with fixture_llm(name, enable_prefix_caching=False, **options) as llm: want = bits(llm.generate(ids, PARAMS))
    with fixture_llm(name, host_cache_memory=2**22, **options) as llm:
        shrink(llm.engine.model.pool)
        for p in (ids, ids[::-1], ids): outputs = llm.generate(p, PARAMS)
        assert bits(outputs) == want and outputs[0].num_cached_tokens == 80 and llm.engine.stats()["host_cache_hits"]
        llm.save_state(tmp_path/"s", ids)
    with fixture_llm(name, **options) as llm:
        llm.load_state(tmp_path/"s")
        outputs = llm.generate(ids, PARAMS)
        assert bits(outputs) == want and outputs[0].num_cached_tokens == 80
