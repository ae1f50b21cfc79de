"""Scheduler and engine under random load, failures, threads and limits, with a scripted model; then the real one."""
import json
import queue
import random
import re
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import hold

from literate_engine.chat import ChatTemplate
from literate_engine.core import data_dir, fixture
from literate_engine.engine import Engine, EngineConfig, EngineFull, Generation, scripted_engine
from literate_engine.blocks import BLOCK_SIZE, CachePool, block_keys
from literate_engine.llm import LLM, choices
from literate_engine.protocol import ChatCompletionRequest, RequestError, parse_request, template_messages
from literate_engine.sampling import SamplingParams
from literate_engine.scheduler import Request, Scheduler
from literate_engine.scripted import byte_tokenizer

END = 256
TOKENIZER = byte_tokenizer()


def hashed(tokens): return sum((i + 3) * (t + 1) * (t + 11) for i, t in enumerate(tokens)) % 251


def alone(prompt, n):
    tokens = list(prompt)
    for _ in range(n): tokens.append(hashed(tokens))
    return tokens[len(prompt):]


def make(script=hashed, **options): return scripted_engine(script, **options)


def free(engine):
    engine.core.scheduler.check_integrity()
    return all(g.num_free == g.num_blocks - 1 for g in engine.model.pool.groups)


def shrink(pool, left):
    "Take blocks away until so many are free in the first group, and few in the others; what was taken."
    return [(g, g.allocate(g.num_free - (left if g is pool else 20))) for g in pool.groups]


def give_back(taken):
    for g, ids in taken: g.free(ids)


# ---- scheduler ----

@pytest.fixture(scope="module")
def chapter():
    "What chapter 41 defines beside the module: its stand-in model and its random schedules."
    import literate_engine.scheduler as module
    names = dict(vars(module))
    for c in json.loads((Path(__file__).parent.parent / "nbs" / "41_scheduler.ipynb").read_text("utf-8"))["cells"]:
        source = "".join(c["source"])
        if c["cell_type"] == "code" and not re.match(r"#\s*\|\s*(export|default_exp)", source): exec(source, names)
    return names


def test_a_thousand_random_schedules(chapter):
    preemptions, cached, hits = map(sum, zip(*map(chapter["random_schedule"], range(1000))))
    assert preemptions > 200 and cached > 5000 and hits > 500


def test_first_tokens_come_when_they_were_promised(chapter):
    assert max(map(chapter["first_tokens"], range(40, 200))) <= 1


def test_a_long_prompt_leaves_room_for_a_short_one():
    "Three steps of a long prompt; the short one that comes with it has its first token after one, and nobody who writes waits"
    s = Scheduler(CachePool(60), 4, 32, 128, long_prefill_token_threshold=16)
    writer, long, short = Request("writer", [1]), Request("long", [2]*48), Request("short", [3]*5)
    for r in (writer, long, short): s.add(r)
    steps = []
    while long.num_tokens == 48:
        step = s.schedule()
        steps.append({r.request_id: n for r, n in step.scheduled})
        s.update(step, {r.request_id: 9 for r, n in step.scheduled if r.rows(n)})
    assert steps == [{"writer": 1, "long": 16, "short": 5}] + [{"writer": 1, "long": 16, "short": 1}]*2


def test_priorities_order_admission_and_preemption():
    s = Scheduler(CachePool(8), 2, 64, 100, aging_steps=10)
    requests = {k: Request(k, [ord(k)]*8, priority=p) for k, p in {"a": 1, "b": 0, "c": -1, "d": 0}.items()}
    for r in requests.values(): s.add(r)
    assert [r.request_id for r in s.waiting] == ["c", "b", "d", "a"]
    assert [r.request_id for r, _ in s.schedule().scheduled] == ["c", "b"]
    s.finish(requests["b"])
    s.num_steps += 11                                                                  # "a" has waited long enough to stand before newcomers of priority 0
    s.add(Request("e", [5]*8))
    assert [r.request_id for r in s.waiting] == ["d", "a", "e"]
    s, first, last = Scheduler(CachePool(6), 4, 64, 80), Request("first", [1]*30, priority=2), Request("last", [2]*30)
    s.add(first)
    s.schedule()
    s.add(last)
    s.num_steps -= 1
    assert [r.request_id for r, _ in s.schedule().scheduled] == ["first", "last"]
    assert s.running == [last, first] and s.grow(last, 60) == [first] and first.status == "waiting"           # the worse priority goes, though it came first


def test_a_preempted_request_returns_as_if_nothing_happened():                       # BC-090
    engine, outs, got = make(num_blocks=8, max_model_len=48, max_num_seqs=4, max_num_batched_tokens=16), queue.SimpleQueue(), {k: [] for k in "abcd"}
    for k in got: engine.submit([ord(k)] * 12, SamplingParams(max_tokens=20, ignore_eos=True), outs.put, request_id=k)
    engine.start()
    for _ in range(80):
        o = outs.get()
        got[o.request_id] += o.token_ids
    assert got == {k: alone([ord(k)] * 12, 20) for k in got}
    assert engine.stats()["num_preemptions"] > 0 and free(engine)
    engine.stop()


def test_shared_blocks_are_never_written():                                            # BC-092
    engine, common, outs = make(num_blocks=33, max_model_len=96, max_num_seqs=4), list(range(33)), queue.SimpleQueue()
    engine.start()
    def ask(*prompts):
        got = {}
        for i, p in enumerate(prompts): engine.submit(p, SamplingParams(max_tokens=20, ignore_eos=True), outs.put, request_id=str(i))
        for _ in range(20*len(prompts)):
            o = outs.get()
            got.setdefault(o.request_id, []).extend(o.token_ids)
            cached[o.request_id] = o.num_cached_tokens
        return [got[str(i)] for i in range(len(prompts))]
    cached = {}
    ask(common)
    blocks = engine.model.pool.find(block_keys(common[:32]))
    before = engine.model.slots.reshape(-1, BLOCK_SIZE)[blocks].copy()
    hits = [common[:32] + [200]*3, common[:32] + [201]*20]
    assert ask(*hits) == [alone(p, 20) for p in hits] and list(cached.values()) == [32, 32]
    mixed = [common[:32] + [202]*5, [203]*40, common[:32] + [204]*7]
    assert ask(*mixed) == [alone(p, 20) for p in mixed] and list(cached.values()) == [32, 0, 32]
    assert engine.model.pool.find(block_keys(common[:32])) == blocks
    assert (engine.model.slots.reshape(-1, BLOCK_SIZE)[blocks] == before).all() and free(engine)
    engine.stop()


@pytest.mark.parametrize("num_state_slots", [0, 20])
def test_an_insertion_in_the_middle_keeps_what_is_before_it(num_state_slots):          # BC-098
    a, b, c = [65]*16, [66]*16, [67]*16
    with LLM(make(max_model_len=160, num_blocks=40, num_state_slots=num_state_slots)) as llm:
        params = SamplingParams(max_tokens=1)
        first, again, edited = (llm.generate(p, params)[0] for p in (a*4 + b*4, a*4 + b*4, a*4 + c + b*4))
        assert (first.num_cached_tokens, again.num_cached_tokens, edited.num_cached_tokens) == (0, 112, 64)
        assert again.token_ids == first.token_ids == alone(a*4 + b*4, 1) and edited.token_ids == alone(a*4 + c + b*4, 1)


def test_tenants_share_nothing():                                                       # BC-094
    engine, outs = make(max_model_len=96), queue.SimpleQueue()
    engine.start()
    def cached(salt):
        engine.submit([7]*40, SamplingParams(max_tokens=1), outs.put, cache_salt=salt)
        return outs.get().num_cached_tokens
    assert [cached(s) for s in ("", "a", "a", "b", "", "a")] == [0, 0, 32, 0, 32, 32]
    assert not set(block_keys([7]*32, salt="x")) & set(block_keys([7]*32)) and block_keys([1]*16 + [2]*16)[1] != block_keys([3]*16 + [2]*16)[1]
    engine.stop()


@pytest.mark.parametrize("name", ["llama", "qwen3moe"])
@pytest.mark.parametrize("activations", ["float32", "int8"])
def test_a_cached_prefix_gives_the_same_bits(name, activations):
    ids, params = np.load(fixture(f"{name}.npz"))["p1_ids"].tolist(), SamplingParams(max_tokens=12, logprobs=3, ignore_eos=True)
    prompts = [ids, ids[:33] + ids[:9], ids[:40], ids + ids[:5]]
    def answers(caching):
        with LLM(fixture(f"{name}.gguf"), activations=activations, max_model_len=128, max_num_batched_tokens=21, enable_prefix_caching=caching) as llm:
            outputs = [llm.generate(p, params)[0] for p in prompts] + llm.generate(prompts, params)
        return [(o.token_ids, o.logprobs) for o in outputs], [o.num_cached_tokens for o in outputs]
    (cold, none), (warm, cached) = answers(False), answers(True)
    assert warm == cold and not any(none) and cached[1:4] == [32, 32, 48] and min(cached[4:]) >= 32


def test_caching_can_be_turned_off():
    with LLM(make(max_model_len=96, enable_prefix_caching=False)) as llm:
        assert [llm.generate([7]*40, SamplingParams(max_tokens=1))[0].num_cached_tokens for _ in range(2)] == [0, 0]


# ---- engine ----

def test_the_context_limit_ends_a_text_that_never_ends():                             # BC-100
    with LLM(make(lambda tokens: 65)) as llm:
        [o] = llm.generate([1] * 10, SamplingParams(max_tokens=None))
        assert (o.finish_reason, len(o.token_ids)) == ("length", 54) and free(llm.engine)
        [o] = llm.generate([1] * 63, SamplingParams(max_tokens=None))
        assert (o.finish_reason, len(o.token_ids)) == ("length", 1)
        with pytest.raises(ValueError, match="64 tokens.*max_model_len is 64"): llm.generate([1] * 64)
        with pytest.raises(ValueError, match="token id 257 at position 1"): llm.generate([1, 257])


def test_padding_ids_are_never_sampled():                                             # BC-120, rows > tokens
    with LLM(make(lambda tokens: 258 if len(tokens) < 12 else 66, n_vocab=260)) as llm:
        [o] = llm.generate([1] * 10, SamplingParams(max_tokens=4))
        assert max(o.token_ids) < 257 and llm.logits([1] * 10).shape == (10, 260)


def test_abort_frees_within_one_step():
    engine, outs = make(lambda tokens: 65, max_model_len=512, num_blocks=40), queue.SimpleQueue()
    engine.start()
    ids = [engine.submit([i], SamplingParams(max_tokens=None), outs.put) for i in range(4)]
    outs.get()
    before = engine.core.num_steps
    for i in ids[:3]: engine.abort(i)
    engine.abort("unknown")
    ends = {}
    while len(ends) < 4:
        o = outs.get()
        if o.finish_reason: ends[o.request_id] = (o.finish_reason, engine.core.num_steps)
    assert [ends[i][0] for i in ids] == ["abort"] * 3 + ["length"]
    assert free(engine)
    assert engine.core.num_steps > before
    engine.stop()


def test_abort_while_waiting_is_never_computed():
    engine, outs, computed = make(lambda tokens: computed.add(tokens[0]) or 65, max_num_seqs=1), queue.SimpleQueue(), set()
    engine.submit([1], SamplingParams(max_tokens=30), outs.put)
    waiting = engine.submit([2], SamplingParams(max_tokens=30), outs.put)
    engine.abort(waiting)
    engine.start()
    ends = {}
    while len(ends) < 2:
        o = outs.get()
        if o.finish_reason: ends[o.request_id] = o.finish_reason
    assert ends[waiting] == "abort" and computed == {1} and free(engine)
    engine.stop()


def test_one_failure_harms_no_other(caplog):
    def script(tokens):
        if tokens[0] == 13 and len(tokens) == 8: raise RuntimeError("boom")
        return hashed(tokens)
    with LLM(make(script)) as llm:
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        outputs = llm.generate([[12] * 5, [13] * 5, [14] * 5], params)
        assert [o.finish_reason for o in outputs] == ["length", "error", "length"] and "boom" in outputs[1].error
        assert len(outputs[1].token_ids) == 3 and free(llm.engine)
        for o, c in ((outputs[0], 12), (outputs[2], 14)): assert o.token_ids == alone([c] * 5, 12)
        with pytest.raises(RuntimeError, match="boom"): llm.logits([13] * 9)
        assert llm.generate([12] * 5, params)[0].token_ids == alone([12] * 5, 12)


def test_a_failing_callback_ends_only_its_request(caplog):
    engine, outs = make().start(), queue.SimpleQueue()
    def bad(o): raise KeyError("client")
    engine.submit([1, 2], SamplingParams(max_tokens=9, ignore_eos=True), bad)
    engine.submit([1, 2], SamplingParams(max_tokens=9, ignore_eos=True), outs.put)
    ids = []
    while True:
        o = outs.get()
        ids += o.token_ids
        if o.finish_reason: break
    assert ids == alone([1, 2], 9) and free(engine) and engine.ready
    engine.stop()


def test_many_threads():
    engine, results, lock = make(num_blocks=20, max_num_seqs=6, max_num_waiting=1000).start(), {}, threading.Lock()
    def client(k):
        rng = random.Random(k)
        for _ in range(8):
            prompt, n, outs, got = [rng.randrange(250) for _ in range(rng.randint(1, 30))], rng.randint(1, 30), queue.SimpleQueue(), []
            quit_after = rng.choice([None, None, 1])
            request_id = engine.submit(prompt, SamplingParams(max_tokens=n, ignore_eos=True), outs.put)
            while True:
                o = outs.get()
                got += o.token_ids
                if o.finish_reason: break
                if quit_after: engine.abort(request_id)
            want = alone(prompt, n)
            with lock: results[k, _] = got == want if o.finish_reason == "length" else o.finish_reason == "abort" and got == want[:len(got)]
    threads = [threading.Thread(target=client, args=(k,)) for k in range(8)]
    for t in threads: t.start()
    for t in threads: t.join(60)
    assert len(results) == 64 and all(results.values()) and free(engine)
    engine.stop()


def test_full_queue_and_ids():
    engine = make(max_num_seqs=1, max_num_waiting=1)
    engine.submit([1], None, print, request_id="a")
    with pytest.raises(ValueError, match="'a' is in use"): engine.submit([1], None, print, request_id="a")
    engine.submit([1], None, print)
    with pytest.raises(EngineFull): engine.submit([1], None, print)
    engine.stop()
    with pytest.raises(RuntimeError, match="stopped"): engine.submit([1], None, print)


def test_llm_waits_where_the_queue_is_full():
    with LLM(make(max_num_seqs=2, max_num_waiting=1)) as llm:
        outputs = llm.generate([[i] for i in range(20)], SamplingParams(max_tokens=5, ignore_eos=True))
    assert [o.token_ids for o in outputs] == [alone([i], 5) for i in range(20)]


TEMPLATE = "{% for m in messages %}{{ m.role }}{{ m.content }}{{ m.reasoning_content }}{% endfor %}{% if enable_thinking %}think{% endif %}"


@pytest.fixture
def talk():
    engine = make(lambda tokens: 65, max_model_len=4096, num_blocks=300)
    engine.chat_template = ChatTemplate(TEMPLATE)
    with LLM(engine) as llm: yield lambda messages, **more: llm.tokenizer.decode(llm.chat(messages, SamplingParams(max_tokens=1), **more)[0].prompt_token_ids)


@pytest.mark.parametrize("more,accepted", [
    ({}, True), ({"reasoning_content": "hm"}, True), ({"refusal": None, "annotations": [], "audio": None, "tool_calls": None, "name": "me"}, True), ({"role": "developer"}, True), ({"tool_calls": []}, True),
    ({"foo": 1}, False), ({"foo": None}, False), ({"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}, False), ({"tool_calls": 5}, False), ({"refusal": "no"}, False), ({"role": "wizard"}, False),
    ({"role": None}, False), ({"content": None}, False), ({"content": [{"type": "image_url"}]}, False), ({"content": 5}, False)], ids=repr)
def test_python_and_the_route_take_the_same_messages(talk, more, accepted):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "x", **more}]
    def route(): return template_messages(parse_request(ChatCompletionRequest, {"messages": messages}).messages, TEMPLATE)
    if accepted:
        assert talk(messages) == ChatTemplate(TEMPLATE).render(route(), None)
        return
    with pytest.raises(ValueError, match=re.escape("messages[1]")): talk(messages)
    with pytest.raises((RequestError, ValueError), match=re.escape("messages[1]")): route()


def test_chat_refuses_what_its_template_does_not_read(talk):
    ask = [{"role": "user", "content": "Hi"}]
    assert talk(ask) == "userHi" == talk(ask, tools=[]) and talk(ask, enable_thinking=True) == "userHithink"
    for name in ("bogus", "enable_thinkin", "bos_token", "m", "role"):                   # a loop's variable and a field are none of the caller's
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"): talk(ask, **{name: 3})
    with pytest.raises(TypeError, match=r"params=SamplingParams\(top_p=...\)"): talk(ask, top_p=0.5)
    with pytest.raises(ValueError, match="tools: this model's chat template does not read them"): talk(ask, tools=[{"type": "function"}])
    with pytest.raises(ValueError, match="tools: expected a list, got str"): talk(ask, tools="f")
    with pytest.raises(ValueError, match=r"messages\[0\] must be an object"): talk(["Hi"])


def test_tools_and_calls_reach_a_template_that_reads_them():
    engine = make(lambda tokens: 65, max_model_len=4096, num_blocks=300)
    engine.chat_template = ChatTemplate("{{ tools | tojson }}{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments.a }}{% endfor %}{% endfor %}")
    with LLM(engine) as llm:
        call = {"function": {"name": "f", "arguments": '{"a": 7}'}}
        [o] = llm.chat([{"role": "assistant", "content": None, "tool_calls": [call]}], SamplingParams(max_tokens=1), tools=[{"name": "f"}])
        assert llm.tokenizer.decode(o.prompt_token_ids) == '[{"name": "f"}]7'


def test_a_closed_llm_is_not_entered():
    llm = LLM(make())
    with llm: pass
    with pytest.raises(RuntimeError, match="stopped"):
        with llm: raise AssertionError("entered")


def test_stop_ends_everyone_and_gives_back():
    engine, outs = make(lambda tokens: 65, max_model_len=4096, num_blocks=300), queue.SimpleQueue()
    engine.start()
    for i in range(3): engine.submit([i], SamplingParams(max_tokens=None), outs.put)
    outs.get()
    engine.stop()
    engine.stop()
    reasons = []
    while not outs.empty():
        if (o := outs.get()).finish_reason: reasons.append(o.finish_reason)
    assert reasons == ["abort"] * 3 and engine.model.closed and not engine.ready and free(engine)


def test_seeds():
    draw = SamplingParams(max_tokens=12, temperature=5.0, ignore_eos=True, n=3, seed=5)
    assert [c.seed for c in choices(draw)] == [5, 6, 7] and choices(replace(draw, seed=None))[1].seed is None
    with LLM(make(lambda tokens: 65)) as llm:
        three = [o.token_ids for o in llm.generate([1], draw)]
        assert llm.generate([1], replace(draw, n=1, seed=6))[0].token_ids == three[1] and len(set(map(tuple, three))) == 3
    runs = []
    for _ in range(2):
        with LLM(make(lambda tokens: 65, seed=1)) as llm: runs.append([o.token_ids for o in llm.generate([[1], [1]], replace(draw, n=1, seed=None))])
    assert runs[0] == runs[1] and runs[0][0] != runs[0][1]


def test_prompt_logprobs_and_rows():
    with LLM(make(lambda tokens: (tokens[-1] + 1) % 256, max_num_seqs=3, max_num_batched_tokens=11)) as llm:
        prompts = [list(range(20, 50)), list(range(60, 75)), list(range(5))]
        for o, p in zip(llm.generate(prompts, SamplingParams(max_tokens=3, prompt_logprobs=2, logprobs=1)), prompts):
            assert o.prompt_logprobs[0] is None and len(o.prompt_logprobs) == len(p) and len(o.logprobs) == 3
            assert all(t.token_id == i and t.top[0][0] == i and t.logprob > -0.1 for t, i in zip(o.prompt_logprobs[1:], p[1:]))
            assert [t.token_id for t in o.logprobs] == o.token_ids == [p[-1] + 1, p[-1] + 2, p[-1] + 3]
        assert llm.logits(prompts[0]).argmax(-1).tolist() == list(range(21, 51))


@pytest.mark.parametrize("options, field", [
    ({"device": "tpu"}, "device"), ({"activations": "int4"}, "activations"), ({"kv_type": "q5_0"}, "kv_type"), ({"num_threads": 0}, "num_threads"),
    ({"max_model_len": "8"}, "max_model_len"), ({"max_num_seqs": True}, "max_num_seqs"), ({"kv_memory": -1}, "kv_memory"), ({"seed": -1}, "seed"),
    ({"enable_prefix_caching": "yes"}, "enable_prefix_caching"), ({"yarn_truncate": "no"}, "yarn_truncate"),
    ({"activations": "float32", "kv_type_v": "q8_0"}, "kv_type_v"), ({"rope_freq_base": float("nan")}, "rope_freq_base")])
def test_options_are_refused_by_name(options, field):
    with pytest.raises(ValueError, match=field): EngineConfig(**options)


def test_an_idle_engine_sleeps():
    engine = make().start()
    time.sleep(0.05)
    used = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - used < 0.1 and engine.core.num_steps == 0
    engine.stop()


# ---- models with recurrent layers ----

def idle(engine):
    engine.core.scheduler.check_integrity()
    engine.model.states.check_integrity()
    return free(engine) and engine.model.states.num_free == engine.model.states.num_slots


@pytest.mark.parametrize("name", ["nemotron_h", "jamba", "lfm2", "mamba2"])
def test_a_preempted_state_is_computed_again(name):
    "Too few blocks for four requests: the youngest lose blocks and state, come back, and write what they write alone"
    params, prompts = SamplingParams(max_tokens=24, temperature=0.8, seed=3, ignore_eos=True, logprobs=1), [[7*i + j for j in range(12)] for i in range(1, 5)]
    with LLM(fixture(f"{name}.gguf"), max_model_len=48, max_num_seqs=4, max_num_batched_tokens=20, activations="float32", num_threads=2) as llm:
        alone = [llm.generate(p, params)[0] for p in prompts]
        pool, spare = llm.engine.model.pool, llm.engine.model.pool.num_free - 7
        taken = pool.allocate(spare)                                                # as if the cache were this small
        hold(llm.engine)
        together = llm.generate(prompts, params)
        assert llm.engine.stats()["num_preemptions"] > 0
        pool.free(taken)
        assert [(o.token_ids, o.logprobs) for o in together] == [(o.token_ids, o.logprobs) for o in alone] and idle(llm.engine)
        props = llm.engine.props()
        assert props["state_bytes_per_seq"] == llm.engine.model.states.bytes_per_slot > 0
        assert props["enable_prefix_caching"] and props["num_state_checkpoints"] == 64 and props["state_memory"] == 69*props["state_bytes_per_seq"]


def test_an_aborted_request_gives_its_slot_back():
    with LLM(fixture("nemotron_h.gguf"), max_model_len=512, max_num_seqs=2, activations="float32") as llm:
        outs = queue.SimpleQueue()
        ids = [llm.engine.submit([i, 1], SamplingParams(max_tokens=None, ignore_eos=True), outs.put) for i in range(3)]       # two places, so one waits
        outs.get()
        for i in ids: llm.engine.abort(i)
        ends = 0
        while ends < 3: ends += outs.get().finish_reason is not None
        assert idle(llm.engine)


def test_a_failed_step_leaves_no_state_behind(caplog):
    "The states of a step that failed are computed anew, the request that is to blame goes, and nothing of it can be found"
    def script(tokens):
        if tokens[0] == 13 and len(tokens) == 32: raise RuntimeError("boom")
        return hashed(tokens)
    with LLM(make(script, num_state_slots=12, max_model_len=96, num_blocks=40, max_num_batched_tokens=64)) as llm:
        params = SamplingParams(max_tokens=25, ignore_eos=True)
        outputs = llm.generate([[12]*20, [13]*20, [14]*20], params)
        assert [o.finish_reason for o in outputs] == ["length", "error", "length"] and "boom" in outputs[1].error
        for o, c in ((outputs[0], 12), (outputs[2], 14)): assert o.token_ids == alone([c]*20, 25)
        assert idle(llm.engine)
        keys = block_keys([13]*20 + outputs[1].token_ids + [hashed([13]*20 + outputs[1].token_ids)])
        assert len(llm.engine.model.pool.find(keys)) == 1 and llm.engine.model.states.pool.find(keys[1:2]) == []
        again = llm.generate([12]*20, params)[0]
        assert again.num_cached_tokens == 16 and again.token_ids == outputs[0].token_ids


def test_a_fault_of_the_engine_gives_all_slots_back(caplog):
    engine, outs = make(num_state_slots=6, max_num_seqs=2, max_model_len=96, num_blocks=20), queue.SimpleQueue()
    transfer, engine.model.transfer = engine.model.transfer, lambda moves: 1/0 if moves else None
    engine.submit([5]*40, SamplingParams(max_tokens=4), outs.put)
    engine.start()
    assert outs.get().finish_reason == "error" and idle(engine)
    engine.model.transfer = transfer
    engine.submit([5]*40, SamplingParams(max_tokens=1), outs.put)
    o = outs.get()
    assert o.token_ids == alone([5]*40, 1) and o.num_cached_tokens == 0
    engine.stop()


# ---- the same bits, however it is computed ----

KINDS = ["llama", "qwen3moe", "qwen3next", "lfm2", "mamba2",                             # dense, mixture, hybrids, no attention at all
         "gemma3", "gemma4ple", "gpt_oss", "cohere2"]                                    # windows: keys shared by layers, a mixture, layers without positions


OPTIONS = dict(activations="float32", num_threads=2, max_model_len=160, max_num_seqs=4, max_num_batched_tokens=64)


def fixture_llm(name, **options): return LLM(fixture(f"{name}.gguf"), **OPTIONS | options)


def bits(outputs): return [(o.token_ids, o.logprobs) for o in outputs]


@pytest.fixture(scope="module", params=KINDS)
def undisturbed(request):
    "A model, three prompts with a common beginning and one without, and what it answers to each alone, in one piece, with nothing cached"
    ids = (np.load(fixture(f"{request.param}.npz"))["p1_ids"].tolist()*4)[:90]
    prompts, params = [ids, ids[:50] + ids[:9], ids[:50], ids[::-1][:33]], SamplingParams(max_tokens=20, temperature=0.7, seed=1, logprobs=2, ignore_eos=True)
    with fixture_llm(request.param, max_num_batched_tokens=128, long_prefill_token_threshold=128, enable_prefix_caching=False) as llm:
        return request.param, prompts, params, bits([llm.generate(p, params)[0] for p in prompts])


@pytest.mark.parametrize("options", [{"max_num_batched_tokens": 128, "enable_prefix_caching": False}, {"max_num_batched_tokens": 7}, {"state_checkpoint_interval": 16}])
def test_batched_chunked_and_cached(undisturbed, options):
    name, prompts, params, want = undisturbed
    with fixture_llm(name, **options) as llm:
        assert bits(llm.generate(prompts, params)) == want
        again = llm.generate(prompts, params)
        assert bits(again) == want and bits([llm.generate(p, params)[0] for p in prompts]) == want
        if options.get("enable_prefix_caching", True): assert [o.num_cached_tokens for o in again] == [80, 48, 48, 32]


def test_preempted_beside_aborted_ones(undisturbed):
    "Too few blocks, and neighbours of which two are aborted after nine tokens"
    name, prompts, params, want = undisturbed
    engine, got, ends = Engine(fixture(f"{name}.gguf"), EngineConfig(**OPTIONS)), {}, queue.SimpleQueue()
    def heard(o):
        got[o.request_id] = got.get(o.request_id, []) + o.token_ids
        if o.request_id in ("noise 1", "noise 3") and len(got[o.request_id]) == 9: engine.abort(o.request_id)
        if o.finish_reason: ends.put((o.request_id, o.finish_reason))
    taken = shrink(engine.model.pool, 11)                                              # as if the cache were this small
    for i, p in enumerate(prompts):
        engine.submit(p[i:20] + [i], SamplingParams(max_tokens=70, ignore_eos=True), heard, request_id=f"noise {i}", priority=i % 2)
        engine.submit(p, params, heard, request_id=str(i))
    engine.start()
    assert Counter(ends.get()[1] for _ in range(8)) == {"length": 6, "abort": 2}
    assert [got[str(i)] for i in range(4)] == [w[0] for w in want] and engine.stats()["num_preemptions"] > 0
    give_back(taken)
    assert idle(engine) if engine.model.states else free(engine)
    engine.stop()


@pytest.mark.parametrize("activations", ["float32", "int8"])
@pytest.mark.parametrize("name", ["qwen3next", "lfm2", "mamba2"])
def test_states_are_found_again(name, activations):                                                  # BC-084, BC-096, BC-098
    "A short prompt twice, a conversation of three turns, an edit in the middle: each is a hit, and has the bits of a cold run"
    ids = (np.load(fixture(f"{name}.npz"))["p1_ids"].tolist()*4)[:140]
    params = SamplingParams(max_tokens=18, logprobs=2, ignore_eos=True)
    def answers(caching):
        with fixture_llm(name, activations=activations, enable_prefix_caching=caching, max_model_len=256) as llm:
            out = [llm.generate(ids[:60], params)[0] for _ in range(2)]
            text = ids[:60]
            for turn in range(3):
                out.append(llm.generate(text, params)[0])
                text = text + out[-1].token_ids + ids[turn:turn + 5]
            out += [llm.generate(p, params)[0] for p in (ids[::-1][:128], ids[::-1][:64] + ids[:16] + ids[::-1][64:128])]
            assert idle(llm.engine)
        return bits(out), [o.num_cached_tokens for o in out]
    (cold, none), (warm, cached) = answers(False), answers(True)
    assert warm == cold and not any(none) and cached == [0, 48, 48, 64, 96, 0, 64]


def test_copies_of_states_never_take_a_place():
    with fixture_llm("mamba2", num_state_checkpoints=0, max_num_seqs=2) as llm:
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        outputs = llm.generate([[i]*40 for i in range(8)], params)
        assert [o.finish_reason for o in outputs] == ["length"]*8 and idle(llm.engine) and llm.engine.model.states.num_slots == 2
        assert [llm.generate([9]*40, SamplingParams(max_tokens=5))[0].num_cached_tokens for _ in range(2)] == [0, 32]        # a place that nobody needs keeps one


def test_a_long_answer_keeps_one_copy_of_its_state():
    with fixture_llm("lfm2") as llm:
        [o] = llm.generate([5]*40, SamplingParams(max_tokens=100, ignore_eos=True))
        pool = llm.engine.model.pool
        assert [(i + 1)*BLOCK_SIZE for i, key in enumerate(block_keys([5]*40 + o.token_ids)) if pool.states.pool.find([key])] == [32, 128]


def test_an_urgent_request_goes_first():
    engine, outs = make(max_num_seqs=1), queue.SimpleQueue()
    for name, priority in (("a", 0), ("b", 1), ("c", -1)): engine.submit([1, 2], SamplingParams(max_tokens=2, ignore_eos=True), outs.put, request_id=name, priority=priority)
    for bad in (1.5, True, None, 2**31):
        with pytest.raises(ValueError, match="priority is"): engine.submit([1], None, outs.put, priority=bad)
    engine.start()
    ends = []
    while len(ends) < 3: ends += [o.request_id] if (o := outs.get()).finish_reason else []
    assert ends == ["c", "a", "b"]
    engine.stop()


# ---- the real model ----

@pytest.fixture(scope="module")
def golden():
    return json.loads((data_dir() / "fixtures" / "real" / "smollm2_generation.json").read_text())["prompts"]


def agree(got, want, gaps, limit):
    "Greedy ids are equal up to the first step where the two best logits are closer than the limit."
    n = next((i for i, g in enumerate(gaps) if g < limit), len(want))
    return got[:n] == want[:n]


@pytest.mark.parametrize("options, limit", [({"activations": "float32"}, 1e-3), ({}, 0.3)])
def test_greedy_text_of_the_real_model_all_prompts_in_one_batch(smollm2, golden, options, limit):
    with LLM(smollm2, max_model_len=640, max_num_batched_tokens=100, **options) as llm:
        outputs = llm.generate([p["ids"] for p in golden], SamplingParams(max_tokens=48, ignore_eos=True))
        for o, p in zip(outputs, golden): assert agree(o.token_ids, p["f32"]["greedy"], p["f32"]["gap"], limit), p["name"]
        assert free(llm.engine)


def test_alone_and_in_company_the_same(smollm2, golden):
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=3, ignore_eos=True, logprobs=2)
    prompts = [p["ids"][:60] for p in golden]
    with LLM(smollm2, max_model_len=256, activations="float32", max_num_batched_tokens=64) as llm:
        together = llm.generate(prompts, params)
        for o, p in zip(together, prompts):
            [one] = llm.generate(p, params)
            assert (one.token_ids, one.text, one.logprobs) == (o.token_ids, o.text, o.logprobs)
        logits = llm.logits(prompts[0])
        want = perplexity_of(logits, prompts[0])
        assert logits.shape == (len(prompts[0]), 49152) and abs(llm.perplexity(prompts[0]) - want) < 1e-6 * want


def perplexity_of(logits, ids):
    x = logits[:-1].astype(np.float64)
    log_p = x[np.arange(len(ids) - 1), ids[1:]] - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1)) - x.max(-1)
    return float(np.exp(-log_p.mean()))


def test_chat_ends_at_the_end_token(smollm2):
    with LLM(smollm2, max_model_len=256) as llm:
        [o] = llm.chat([{"role": "user", "content": "Say hello in one word."}], SamplingParams(max_tokens=60))
        assert o.text and "<|im_end|>" not in o.text and o.finish_reason in ("stop", "length")
        assert o.finish_reason == "length" or o.token_ids[-1] in llm.tokenizer.eog_ids


def test_wishes_that_this_model_cannot_fulfil(smollm2):
    with pytest.raises(ValueError, match="max_model_len is 9000.*8192"): LLM(smollm2, max_model_len=9000)
    with pytest.raises(ValueError, match="kv_memory"): LLM(smollm2, max_model_len=4096, kv_memory=2**20)
    with pytest.raises(ValueError, match="no model"): LLM("not-here.gguf")


def test_memory_that_is_not_there_and_models_without_keys():
    with pytest.raises(ValueError, match="kv_memory is 1125899906842624: this machine has"): LLM(fixture("llama.gguf"), kv_memory=2**50)
    with LLM(fixture("mamba.gguf"), kv_memory=2**26, max_model_len=256, max_num_seqs=2) as llm:
        assert llm.engine.model.pool.num_blocks == 33 and len(llm.generate([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids) == 4
    for bad in (None, 1, [], b"x", ""):
        with pytest.raises(ValueError, match="model is"): LLM(bad)
    with pytest.raises(ValueError, match="rope_freq_base"): EngineConfig(rope_freq_base="x")


# ---- layers with windows ----

def held(engine): return [g.num_blocks - 1 - g.num_free for g in engine.model.pool.groups]


def test_a_window_gives_its_blocks_back():
    "A long text holds ever more blocks for the layers that see everything and no more than `most` for those with a window"
    engine, outs, most = make(window=20, num_windowed_blocks=8, max_model_len=400, num_blocks=30, max_num_batched_tokens=32), queue.SimpleQueue(), []
    pool = engine.model.pool
    with LLM(engine) as llm:
        engine.submit([5]*100, SamplingParams(max_tokens=250, ignore_eos=True), lambda o: (most.append(held(engine)), outs.put(o)))
        ids = []
        while True:
            o = outs.get()
            ids += o.token_ids
            if o.finish_reason: break
        assert ids == alone([5]*100, 250) and most[-2][0] == 22 and max(w for _, w in most) <= pool.groups[1].most(350) == 5 and free(engine)
        assert engine.stats()["num_windowed_kv_blocks"] == engine.stats()["num_free_windowed_kv_blocks"] == 7
        assert [llm.generate(p, SamplingParams(max_tokens=1))[0].num_cached_tokens for p in ([5]*100 + ids, [5]*100 + ids[:100], [5]*100)] == [336, 0, 0]


def test_windows_under_pressure():
    "Prompts with common beginnings, a small windowed pool, host memory, states: the scripted model compares what the groups hold, and every text is right"
    for slots, memory in ((0, 0), (9, 0), (0, 20000), (9, 20000)):
        with LLM(make(window=33, num_windowed_blocks=14, num_state_slots=slots, host_cache_memory=memory, max_model_len=200, num_blocks=24, max_num_seqs=4, max_num_batched_tokens=40)) as llm:
            rng = random.Random(slots + memory)
            common = [rng.randrange(250) for _ in range(150)]
            prompts = [common[:rng.choice([0, 40, 100, 150])] + [rng.randrange(250) for _ in range(rng.randint(1, 30))] for _ in range(40)]
            outputs = llm.generate(prompts, SamplingParams(max_tokens=15, ignore_eos=True))
            assert [o.token_ids for o in outputs] == [alone(p, 15) for p in prompts] and free(llm.engine)
            assert sum(o.num_cached_tokens for o in outputs) > 300


def test_the_memory_of_windows():
    "What is given is not exceeded, one text of full length fits, and a model whose windows never end keeps one group"
    for options in ({}, {"max_model_len": 2048}, {"max_model_len": 100}, {"kv_memory": 2**20}, {"kv_memory": 2**19, "max_num_batched_tokens": 32}, {"kv_memory": 2**22, "max_model_len": 1000}):
        with LLM(fixture("gemma3.gguf"), **options) as llm:
            props, cache = llm.engine.props(), llm.engine.model.cache
            assert cache.nbytes == props["kv_memory"] <= options.get("kv_memory", 2**30), options
            for g in llm.engine.model.pool.groups: assert g.num_blocks > g.most(props["max_model_len"])
            assert [g["window"] for g in props["kv_groups"]] == ([0, 16] if props["max_model_len"] > 300 or "max_num_batched_tokens" in options else [0])
            [o] = llm.generate([[7]*(props["max_model_len"] - 3)], SamplingParams(max_tokens=None, ignore_eos=True))
            assert len(o.token_ids) == 3 and free(llm.engine)
    with pytest.raises(ValueError, match="kv_memory is 100000: one request of max_model_len = 2048 needs"): LLM(fixture("gemma3.gguf"), kv_memory=100000, max_model_len=2048)


@pytest.mark.parametrize("name", ["deepseek_v2", "mamba2"])
def test_a_type_for_values_that_are_not_kept(name):
    with pytest.raises(ValueError, match="kv_type_v is 'q4_0': this model keeps no values"): LLM(fixture(f"{name}.gguf"), kv_type="q8_0", kv_type_v="q4_0")


def ahead_schedule(seed: int) -> tuple[int, int, int]:
    "Random requests on an engine that starts a step before the last one is read, and on one that does not: the same texts. How many steps flew, how many preemptions, how many aborts."
    rng = np.random.default_rng(seed)
    num_blocks, max_len = int(rng.integers(7, 14)), 96
    script = lambda tokens: 256 if len(tokens) % 37 == 0 and seed % 3 else (sum(tokens)*31 + len(tokens)*7) % 256
    common, plan = rng.integers(0, 256, 40).tolist(), []
    for i in range(int(rng.integers(2, 9))):
        prompt = (common[:int(rng.integers(1, 40))] if rng.random() < .5 else []) + rng.integers(0, 256, int(rng.integers(1, 20))).tolist()
        kind = rng.random()
        params = SamplingParams(max_tokens=int(rng.integers(1, 50)), ignore_eos=bool(rng.random() < .3), stop=["a"] if rng.random() < .2 else None,
                                temperature=0.0 if kind < .7 else 1.0, seed=1, logprobs=2 if kind > .9 else None)
        plan.append((int(rng.integers(0, 12)), f"r{i}", prompt, params, int(rng.integers(1, 12)) if rng.random() < .2 else None))
    answers, facts = [], []
    for draws in (False, True):
        engine = scripted_engine(script, max_model_len=max_len, num_blocks=num_blocks, max_num_seqs=4, max_num_batched_tokens=int(16 + seed % 17), draws=draws)
        core, outs, gone, flew = engine.core, {}, {}, 0
        for step in range(2000):
            for when, name, prompt, params, leaves in plan:
                if when == step: core.add(Generation(name, prompt, params, engine.tokenizer, 257, max_len, lambda o: outs.setdefault(o.request_id, []).append(o)))
                if leaves and name in core.live and sum(len(o.token_ids) for o in outs.get(name, ())) >= leaves: core.abort(name); gone[name] = True
            if core.live: core.step(); flew += core.flying is not None
            if core.flying is None: core.scheduler.check_integrity()
            if not core.live and step > 12: break
        core.land()
        core.scheduler.check_integrity()
        assert not core.live and engine.model.pool.num_free == num_blocks - 1, "a request or a block is left"
        answers.append({k: ([i for o in os for i in o.token_ids], "".join(o.text for o in os), os[-1].finish_reason) for k, os in outs.items()})
        facts = [flew, core.scheduler.num_preemptions, len(gone)]
        engine.stop()
    for name, (ids, text, reason) in answers[0].items():
        if any(name == r and leaves for _, r, *_, leaves in plan): n = min(len(ids), len(answers[1][name][0])); assert ids[:n] == answers[1][name][0][:n]
        else: assert answers[1][name] == (ids, text, reason), (name, answers[0][name], answers[1][name])
    return tuple(facts)


def test_a_step_ahead_changes_no_text():
    flew, preemptions, aborts = map(sum, zip(*map(ahead_schedule, range(300))))
    assert flew > 2000 and preemptions > 50 and aborts > 30, (flew, preemptions, aborts)


@pytest.mark.parametrize("device,threads", [("cpu", 1), ("cpu", 2), ("cuda", 1)])
@pytest.mark.parametrize("at", [0, 1, 5])
def test_progress_that_raises_ends_the_load(emulated_gpu, device, threads, at):
    "Whoever loads in the background stops it that way; nothing works on afterwards, and the file can be loaded again."
    class Enough(Exception): pass
    def progress(done, total):
        calls.append((done, total))
        if len(calls) > at: raise Enough
    calls, path, before = [], fixture("llama.gguf"), set(threading.enumerate())
    with pytest.raises(Enough): Engine(path, EngineConfig(device=device, num_threads=threads, max_model_len=64, max_num_seqs=2), progress)
    assert at < len(calls) and (threads > 1 or len(calls) == at + 1) and all(done <= total for done, total in calls)        # others go on until the first is heard
    assert not [t for t in threading.enumerate() if t not in before and t.is_alive()]
    Engine(path, EngineConfig(device=device, num_threads=threads, max_model_len=64, max_num_seqs=2)).close()
