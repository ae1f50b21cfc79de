"""Texts of a given form: every way to ask for one, what is refused, and what a hostile form may cost."""
import itertools
import json
import re
import subprocess
import sys
import threading
import time

import numpy as np
import openai
import pytest
from conftest import hold
from hypothesis import given, settings
from hypothesis import strategies as st
from test_server import GO, ROUTES, asked, ids, post, receive, send, served, streamed

from literate_engine.engine import byte_tokenizer, scripted_engine
from literate_engine.grammar import Grammars
from literate_engine.llm import LLM
from literate_engine.sampling import MAX_LOGPROBS, ParamError, Sampler, SamplingParams, candidates, greedy, largest, logprobs, truncate_ref

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 120}, "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 3}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def is_person(text):
    x = json.loads(text)
    return (
        {"name", "age"} <= set(x) <= {"name", "age", "pets"}
        and type(x["name"]) is str
        and len(x["name"]) <= 12
        and type(x["age"]) is int
        and 0 <= x["age"] <= 120
        and len(x.get("pets", [])) <= 3
        and set(x.get("pets", [])) <= {"cat", "dog"}
    )


def noise(tokens): return (sum((i + 3) * (t + 1) for i, t in enumerate(tokens)) * 7919) % 256


# ---- the engine


def test_forms_by_a_model_that_knows_nothing():
    with LLM(scripted_engine(noise, max_model_len=512, num_blocks=600)) as llm:
        p = dict(temperature=2.0, max_tokens=400)
        outs = llm.generate(["q"], SamplingParams(n=8, seed=1, json_schema=PERSON, **p)) + llm.generate("q", SamplingParams(n=8, json_schema=json.dumps(PERSON), **p))
        assert all(is_person(o.text) for o in outs if o.finish_reason == "stop") and sum(o.finish_reason == "stop" for o in outs) > 8 and len({o.text for o in outs}) > 8
        assert all(o.finish_reason in ("stop", "length") for o in outs)
        for pattern in (r"\([0-9]{3}\) [0-9]{4}", r"(ja|nein)( (ja|nein)){2}", "ö+x"):
            outs = llm.generate("q", SamplingParams(n=8, seed=3, regex=pattern, **p))
            assert all(re.fullmatch(pattern, o.text) for o in outs if o.finish_reason == "stop") and any(o.finish_reason == "stop" for o in outs)
        for grammar in ('start: "a" start "b" | "c"', 'root ::= "a" root "b" | "c"'):
            for o in llm.generate("q", SamplingParams(n=4, seed=3, grammar=grammar, **p)):
                assert o.finish_reason == "stop" and re.fullmatch("(a*)c(b*)", o.text) and o.text.count("a") == o.text.count("b")
        assert llm.engine.stats()["num_free_kv_blocks"] == 599


def test_forced_text_counts_and_draws_nothing():
    with LLM(scripted_engine(noise)) as llm:
        [o] = llm.generate("q", SamplingParams(regex="exactly this", temperature=1, seed=1, logprobs=1))
        assert (o.text, o.finish_reason, len(o.token_ids), o.stop_reason) == ("exactly this", "stop", 12, None)
        assert len(o.logprobs) == 12 and all(t.logprob <= t.top[0][2] for t in o.logprobs)            # of the raw logits: the script's choice is best
        [a], [b] = (llm.generate("q", SamplingParams(regex=r, temperature=1, seed=5)) for r in ("[a-z]{4}", "forced text:[a-z]{4}"))
        assert b.text == "forced text:" + a.text or a.token_ids != b.token_ids[12:]                   # the logits of the steps differ, the numbers drawn do not
    params = SamplingParams(temperature=1, seed=5, regex="[a-z]{4}")
    flat, g, texts = np.zeros(257, np.float32), Grammars(byte_tokenizer(), 257), []
    for p in (params, SamplingParams(temperature=1, seed=5, regex="forced:[a-z]{4}")):
        s = Sampler(p, 257, [], matcher=g.matcher(p))
        while not s.matcher.finished: s.sample(flat)
        texts.append(bytes(s.written.elements()))
    assert sorted(texts[1]) == sorted(b"forced:" + texts[0])


def test_end_of_text_exactly_where_the_form_allows_it():
    def script(tokens): return 256 if len(tokens) > 1 else ord("a")
    with LLM(scripted_engine(script)) as llm:
        for pattern, text, reason, n in (("a+", "a", "stop", 2), ("a{3,}", "aaa", "stop", 4), ("a{3}", "aaa", "stop", 3)):
            [o] = llm.generate("q", SamplingParams(regex=pattern))
            assert (o.text, o.finish_reason, len(o.token_ids)) == (text, reason, n), pattern
        [o] = llm.generate("q", SamplingParams(regex="a{3,5}", ignore_eos=True))
        assert (o.text, o.finish_reason, len(o.token_ids)) == ("aaaaa", "stop", 5)
        [o] = llm.generate("q", SamplingParams(regex="a{3,9}", max_tokens=2))
        assert (o.text, o.finish_reason) == ("aa", "length")
        [o] = llm.generate("q", SamplingParams(regex="a{3}", max_tokens=3))
        assert o.finish_reason == "stop"                                                                  # complete with the last token
        [o] = llm.generate("q", SamplingParams(regex="abcdef", stop="cd"))
        assert (o.text, o.finish_reason, o.stop_reason) == ("ab", "stop", "cd")


def test_a_form_changes_nothing_for_others_and_survives_preemption():
    free, formed = SamplingParams(max_tokens=30, ignore_eos=True, temperature=1, seed=1), SamplingParams(max_tokens=30, temperature=1, seed=2, regex="[a-z ]{30}")
    prompts = [[i] * n for i, n in enumerate((3, 20, 9, 14), 65)]
    with LLM(scripted_engine(noise)) as llm: alone = [[o.token_ids for o in llm.generate(p, q)] for p in prompts for q in (free, formed)]
    with LLM(scripted_engine(noise, num_blocks=8, max_num_batched_tokens=13, max_num_seqs=4)) as llm:
        got, done = {}, threading.Semaphore(0)
        def heard(o):
            got.setdefault(o.request_id, []).extend(o.token_ids)
            if o.finish_reason: done.release()
        hold(llm.engine)
        for i, p in enumerate(prompts):
            for j, q in enumerate((free, formed)): llm.engine.submit(p, q, heard, f"{2 * i + j}")
        for _ in range(8): assert done.acquire(timeout=20)
        assert llm.engine.stats()["num_preemptions"] > 0
        assert [[got[str(i)]] for i in range(8)] == alone


def test_nothing_left_ends_that_request_with_a_reason(caplog):
    with LLM(scripted_engine(noise)) as llm:
        [o] = llm.generate("q", SamplingParams(regex="x[45]", logit_bias={52: -100, 53: -100}))
        assert o.finish_reason == "error" and o.text == "x" and "no token can be drawn: of the 2 that regex allows" in o.error
        assert llm.generate("q", SamplingParams(regex="[45]"))[0].finish_reason == "stop" and llm.engine.stats()["num_free_kv_blocks"] == 32


def test_a_space_at_the_start_is_text_under_a_form():
    from literate_engine.tokenizer import StreamDecoder, Tokenizer
    t = Tokenizer({"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "▁a", "a", "▁"], "tokenizer.ggml.scores": [0.0, 0, 0, -1, -2, -3], "tokenizer.ggml.token_type": np.array([2, 3, 3, 1, 1, 1], np.int32),
                   "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2})
    assert StreamDecoder(t, after=1).add(3) == "a" and StreamDecoder(t, after=1, keep_space=True).add(3) == " a"
    m = Grammars(t, t.n_tokens).matcher(SamplingParams(regex=" a"))
    assert set(m.ids) <= {3, 5}
    m.accept(int(m.ids[0]))
    if not m.finished: m.accept(int(m.ids[0]))
    assert m.finished


def test_models_without_an_end_token_or_a_tokenizer():
    from literate_engine.tokenizer import Tokenizer, byte_alphabet
    t = Tokenizer({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": byte_alphabet(), "tokenizer.ggml.merges": []})
    assert not t.eog_ids
    m = Grammars(t, 256).matcher(SamplingParams(regex="ab?"))
    m.accept(97)
    assert m.ids.tolist() == [98] and not m.finished
    m.accept(98)
    assert m.finished and not len(m.ids)
    with pytest.raises(ParamError, match="no tokenizer"): Grammars(Tokenizer({"tokenizer.ggml.model": "none"}, 10), 10).matcher(SamplingParams(regex="a"))


def test_nothing_is_loaded_unless_asked_for():
    code = "import sys; from literate_engine.llm import LLM; from literate_engine.engine import scripted_engine\nwith LLM(scripted_engine(lambda t: 65)) as m: m.generate('a')\nprint('llguidance' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"


def test_white_space_between_the_parts_of_json_is_bounded():
    "Whatever blanks a model likes best, a new line and 20 of them follow each other at most; usual layouts are accepted whole"
    g = Grammars(byte_tokenizer(), 257)
    for schema in (PERSON, {"type": "object"}, {"type": "array", "items": {"type": "integer"}}, {}):
        value = [1, 2] if schema.get("type") == "array" else {"name": "Al", "age": 3}
        for layout in ({}, {"separators": (",", ":")}, {"indent": 2}, {"indent": 4}, {"indent": "\t"}):
            m = g.matcher(SamplingParams(json_schema=schema))
            for b in json.dumps(value, **layout).encode(): m.accept(b)
            assert m.finished or 256 in m.ids, (schema, layout)
        for liked in itertools.permutations(b"\t\n "):
            m, quoted, runs = g.matcher(SamplingParams(json_schema=schema)), False, []
            for b in json.dumps(value, separators=(",", ":")).encode():
                n = 0
                while not quoted and n < 100 and (blanks := [w for w in liked if w in m.ids]): m.accept(blanks[0]); n += 1
                runs.append(n)
                quoted ^= b == ord('"')
                m.accept(b)
            assert 0 < max(runs) <= 21, (schema, liked, runs)


# ---- what is refused

NESTED = "".join(f"r{i}: r{i + 1}\n" for i in range(900)) + 'r900: "a"'
HOSTILE = [
    {"regex": "(" * 5000 + "a" + ")" * 5000},
    {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    {"regex": ".*" * 8000},
    {"regex": r"\w{1,500}\p{L}{1,500}"},
    {"regex": "[a&&" * 240 + "b" + "]" * 240},
    {"grammar": "start: " + "(" * 8000 + '"a"' + ")" * 8000},
    {"grammar": "start: r0\n" + NESTED},
    {"grammar": "start: r0\n" + NESTED.replace("r", "R").replace("staRt", "start")},
    {"grammar": "start: R0\n" + "".join(f"R{i}: R{i + 1} R{i + 1}\n" for i in range(60)) + 'R60: "a"'},
    {"grammar": 'start: ((x{1,1000}){1,1000}){1,1000}\nx: "a" | "b" x'},
    {"grammar": 'start: e\ne: e e | "a" | e e e | '},
    {"grammar": "start: start"},
    {"grammar": "root ::= " + "(" * 490 + '"a"' + ")" * 490},
    {"grammar": "root ::= r0\n" + "\n".join(f'r{i} ::= "x" r{i + 1} | "y{i}"' for i in range(450)) + '\nr450 ::= "a"'},
    {"json_schema": '{"items":' * 6000 + "{}" + "}" * 6000},
    {"json_schema": {"$defs": {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(1400)} | {"1400": {}}, "$ref": "#/$defs/0"}},
    {"json_schema": {"$defs": {str(i): json.loads('{"items":' * 100 + json.dumps({"$ref": f"#/$defs/{i + 1}"}) + "}" * 100) for i in range(54)} | {"54": {}}, "$ref": "#/$defs/0"}},
    {"json_schema": {"$defs": {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(40)} | {"a40": {"type": "object"}}, "$ref": "#/$defs/a0"}},
    {"json_schema": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}}},
    {"json_schema": {"allOf": [{"anyOf": [{"type": "object", "properties": {f"p{i}_{j}": {"type": "integer"}}} for j in range(6)]} for i in range(12)]}},
    {"json_schema": {"type": "array", "minItems": 10**6, "items": {"type": "string", "maxLength": 10**6}}},
    {"json_schema": {"type": "integer", "minimum": 1, "maximum": 10**30, "multipleOf": 999983}},
    {"json_schema": {"$ref": "#"}},
    {"json_schema": {"$ref": "file:///etc/passwd"}},
    {"json_schema": {"type": "string", "pattern": "^(a|b)*a(a|b){20}$"}},
]


@pytest.mark.parametrize("form", HOSTILE, ids=lambda f: next(iter(f)))
def test_a_hostile_form_is_refused_or_bounded(form):
    g, started, longest = Grammars(byte_tokenizer(), 257), time.perf_counter(), 0.0
    try:
        m = g.matcher(SamplingParams(**form))
        for _ in range(40):
            if m.finished: break
            start = time.perf_counter()
            m.accept(int(m.ids[len(m.ids) // 2]))
            longest = max(longest, time.perf_counter() - start)
    except ParamError as e: assert e.field == next(iter(form)) and "\n" not in str(e) and len(str(e)) < 600
    except ValueError as e: assert str(e) and "\n" not in str(e)
    assert time.perf_counter() - started < 20 and longest < 1, (time.perf_counter() - started, longest)


@pytest.mark.parametrize("more", [{"regex": "("}, {"grammar": "start: x"}, {"json_schema": {"type": "wizard"}}, {"json_schema": {"type": "string", "not": {}}}, {"regex": "a", "grammar": "b"}, {"regex": "[^\\s\\S]"}, {"regex": ""}, {"regex": "(a{1000}){1000}"}, {"grammar": 5},
                                  {"json_schema": "nothing"}, {"json_schema": [1]}])
def test_refused_at_submit(more):
    with LLM(scripted_engine(noise)) as llm, pytest.raises(ParamError) as e: llm.generate("q", SamplingParams(**more))
    assert e.value.field in more and "\n" not in str(e.value)


@pytest.mark.parametrize("more", [{"json_schema": {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1000)}}}, {"grammar": 'root ::= "a" root'}, {"grammar": 'root ::= "a"{100000}'}])
def test_what_is_too_much_for_a_step_from_the_beginning_is_refused_at_submit(more):
    with pytest.raises(ParamError, match="too many optional properties, alternatives or repetitions"): Grammars(byte_tokenizer(), 257).matcher(SamplingParams(**more))


def test_places_in_the_translation_of_a_grammar_are_not_told():
    for grammar, place in (('root ::= "a"{3,1}', False), ('start: "a"{3,1}', True)):
        with pytest.raises(ParamError, match="range end must be >= start") as e: Grammars(byte_tokenizer(), 257).matcher(SamplingParams(grammar=grammar))
        assert bool(re.search(r"\d\(\d+\)", str(e.value))) == place, e.value


def test_many_threads_compile():
    g, failed = Grammars(byte_tokenizer(), 257), []
    def work(k):
        try:
            for i in range(60):
                n = (i * 7 + k) % 90
                m = g.matcher(SamplingParams(regex=f"a{{{n + 1}}}"))
                for _ in range(n + 1): assert not m.finished; m.accept(97)
                assert m.finished
        except Exception as e: failed.append(e)
    threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert not failed and len(g._compiled) <= 64


# ---- the routes


def test_response_format_and_extensions():
    with served(ids("no idea"), max_num_seqs=4) as (url, _):
        formats = [({"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}}, is_person), ({"json_schema": PERSON}, is_person), ({"regex": "[0-9]{3}"}, lambda t: re.fullmatch("[0-9]{3}", t)),
                   ({"grammar": 'root ::= "yes" | "no"'}, lambda t: t in ("yes", "no")), ({"response_format": {"type": "json_object"}, "stop": "}", "max_tokens": 60}, lambda t: t.startswith("{"))]
        for path in ROUTES:
            for more, valid in formats:
                if "response_format" in more and "chat" not in path: continue
                body = asked(path, temperature=1, seed=4, **{"max_tokens": 200} | more)
                status, reply = post(url, path, body)
                assert status == 200, reply
                c = reply["choices"][0]
                text = c["message"]["content"] if "chat" in path else c["text"]
                assert valid(text) if c["finish_reason"] == "stop" else c["finish_reason"] == "length", (more, text)
                status, _, raw = receive(send(url, path, {**body, "stream": True}))
                assert status == 200 and streamed([json.loads(line[6:]) for line in raw.decode().split("\n\n") if line.startswith("data: {")])[0] == text
        for more, name in (({"regex": "("}, "regex"), ({"grammar": "start: x"}, "grammar"), ({"json_schema": {"type": "wizard"}}, "json_schema"), ({"json_schema": 5}, "json_schema"), ({"regex": "a", "grammar": "b"}, "regex"),
                           ({"guided_json": {}}, "guided_json"), ({"structured_outputs": {}}, "structured_outputs")):
            for path in ROUTES:
                status, reply = post(url, path, asked(path, **more))
                assert status == 400 and reply["error"]["param"] == name and name in reply["error"]["message"] and "\n" not in reply["error"]["message"], reply
        for value in ("json", {}, {"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"name": "x"}}, {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}},
                      {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "wizard"}}}, {"type": "json_object", "more": 1}):
            status, reply = post(url, ROUTES[0], asked(ROUTES[0], response_format=value))
            assert status == 400 and reply["error"]["param"].startswith("response_format"), reply
        assert post(url, ROUTES[0], asked(ROUTES[0], response_format={"type": "json_object"}, regex="a"))[1]["error"]["param"] == "response_format"
        assert post(url, ROUTES[1], asked(ROUTES[1], response_format={"type": "text"}))[0] == 200
        ban = {str(i): -100 for i in (52, 53)}
        status, reply = post(url, ROUTES[1], asked(ROUTES[1], regex="[45]", logit_bias=ban))
        assert status == 400 and reply["error"]["code"] == "constraint_failed" and reply["error"]["param"] == "regex" and reply["error"]["message"].startswith("regex: no token"), reply


def test_a_form_that_is_too_much_work_is_the_clients_fault(caplog):
    "It is named, and the log is not filled with it"
    deep = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string", "pattern": "^4$"}}}
    with served(ids("no idea")) as (url, _), caplog.at_level("WARNING"):
        for more, name in (({"grammar": 'start: ("x" | "y"){10} "a"{1000000}'}, "grammar"), ({"response_format": deep, "logit_bias": {str(ord("4")): -100}}, "response_format")):
            for path in ROUTES:
                if name == "response_format" and "chat" not in path: continue
                status, reply = post(url, path, asked(path, **more))
                assert status == 400 and reply["error"]["param"] == name and reply["error"]["message"].startswith(f"{name}: "), reply
                events = receive(send(url, path, asked(path, stream=True, **more)))[2].decode()
                assert f'"param":"{name}"' in events, events
    assert not caplog.records, caplog.text


def test_openai_client_parses_a_typed_answer():
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str
        age: int

    with served(ids('{"name":"Al","age":', "3", "0}"), max_num_seqs=2) as (url, _):
        client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=20)
        messages = [{"role": "user", "content": "q"}]
        reply = client.chat.completions.parse(model="m", messages=messages, response_format=Person)
        assert reply.choices[0].message.parsed == Person(name="Al", age=30) and reply.choices[0].finish_reason == "stop"
        client.chat.completions.create(model="m", messages=[*messages, reply.choices[0].message, *messages])
        with client.chat.completions.stream(model="m", messages=messages, response_format=Person) as stream:
            assert stream.get_final_completion().choices[0].message.parsed == Person(name="Al", age=30)
        reply = client.completions.create(model="m", prompt=[GO], temperature=1, extra_body={"regex": "(red|green) (cat|dog)"})
        assert re.fullmatch("(red|green) (cat|dog)", reply.choices[0].text)
        with pytest.raises(openai.BadRequestError, match="wizard"):
            client.chat.completions.create(model="m", messages=messages, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "wizard"}}})


def test_a_slow_form_stalls_no_stream():
    slow = {"grammar": "start: R0\n" + "".join(f"R{i}: R{i + 1} R{i + 1}\n" for i in range(60)) + 'R60: "a"'}
    with served([ord("a")] * 200, seconds=0.002, max_num_seqs=4, max_model_len=512) as (url, engine):
        engine.grammars.prepare()
        gaps, started = [], threading.Event()
        def follow():
            s, last = send(url, ROUTES[1], asked(ROUTES[1], max_tokens=200, stream=True)), time.perf_counter()
            while s.recv(65536):
                started.set()
                gaps.append(time.perf_counter() - last)
                last = time.perf_counter()
            s.close()
        t = threading.Thread(target=follow)
        t.start()
        assert started.wait(5)
        for _ in range(3): assert post(url, ROUTES[1], asked(ROUTES[1], **slow))[0] == 400
        t.join()
        assert len(gaps) > 50 and max(gaps[1:]) < 0.5, max(gaps)


# ---- the real model

PROMPTS = ["Describe a person.", "Who are you?", "Name a scientist.", "My neighbour is", "A famous painter:", "The king of", "Give me JSON.", "Once upon a time", "Invent a character", "A sailor called",
           "My friend is", "Write about Anna.", "1, 2, 3", "Zürich", "def main():", "Hello", "The doctor said", "What is your name?", "Tell me a joke", "Wer bist du?"]


def test_twenty_prompts_at_temperature_one(smollm2):
    with LLM(smollm2, max_model_len=512, num_threads=2) as llm:
        outs = llm.generate(PROMPTS, SamplingParams(temperature=1, seed=1, json_schema=PERSON, max_tokens=160))
        assert len(outs) == 20 and all(o.finish_reason == "stop" and is_person(o.text) for o in outs), [o.text for o in outs if o.finish_reason != "stop"]
        assert [o.text for o in llm.generate(PROMPTS[3], SamplingParams(temperature=1, seed=1, json_schema=PERSON, max_tokens=160))] == [outs[3].text]
        outs = llm.generate(PROMPTS[:6], SamplingParams(temperature=1, seed=2, regex=r"[A-Z][a-z]{1,14} (was|is) [0-9]{1,3} years old\.", max_tokens=60))
        assert all(re.fullmatch(r"[A-Z][a-z]{1,14} (was|is) [0-9]{1,3} years old\.", o.text) for o in outs)
        [o] = llm.chat([{"role": "user", "content": "Is Paris in France?"}], SamplingParams(grammar='root ::= ("Yes" | "No") "."'))
        assert o.text in ("Yes.", "No.") and o.finish_reason == "stop"


# ---- the canonical order: larger logit first, lower id among equals, a NaN never

ODD = st.sampled_from([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, 1.5, -3.0, 3e38, -3e38, 1e-40])
LOGITS = st.lists(ODD | st.floats(-8, 8, width=16), min_size=1, max_size=70).map(lambda v: np.array(v, np.float32))


def order(x): return sorted(range(len(x)), key=lambda i: (-x[i], i))


@settings(max_examples=400, deadline=None)
@given(LOGITS, st.integers(1, 80))
def test_one_order_everywhere(x, k):
    clean = np.where(np.isnan(x), np.float32(-np.inf), x)
    want = order(clean.tolist())
    assert largest(clean, min(k, len(x))).tolist() == want[:k]
    if clean.max() == -np.inf:
        for fn in (greedy, lambda x: candidates(x, SamplingParams(temperature=1))):
            with pytest.raises(ValueError, match="no token can be drawn"): fn(x)
        return
    assert greedy(x) == want[0]
    assert candidates(x, SamplingParams(temperature=1, top_k=1))[0].tolist() == [want[0]]
    assert [i for i, _ in logprobs(x, 0, min(k, MAX_LOGPROBS))[1]] == want[:min(k, MAX_LOGPROBS)]
    for kw in ({"top_k": k}, {"top_k": k, "top_p": 0.9}, {"top_p": 0.5}, {"min_p": 0.1}):
        got, w = candidates(x, SamplingParams(temperature=1, **kw))
        if kw.get("top_k", 0) >= len(x) and len(kw) == 1: continue             # nothing is cut: all of them, in order of id
        assert got.tolist() == want[:len(got)] and len(got) and (w >= 0).all() and w[0] > 0, kw


@settings(max_examples=400, deadline=None)
@given(st.lists(st.integers(-40, 40), min_size=1, max_size=90), st.sampled_from([0, 1, 2, 3, 7, 64]), st.sampled_from([0.0, 0.3, 0.9, 0.99, 1.0]), st.sampled_from([0.0, 0.05, 0.5, 1.0]), st.sampled_from([0.5, 1.0, 2.0]))
def test_cuts_agree_with_the_reference(steps, top_k, top_p, min_p, temperature):
    x, params = np.array(steps, np.float32) / 8, SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    want, p = truncate_ref(x, params)
    got, w = candidates(x, params)
    got = got[np.lexsort((got, -x[got]))]
    n = min(len(got), len(want))
    assert got[:n].tolist() == want[:n].tolist()
    if len(got) != len(want):                                                  # float32 weights: only a token on the very edge may differ
        full, q = truncate_ref(x, SamplingParams(temperature=temperature, top_k=top_k))
        edge = [abs(np.cumsum(q)[m - 1] - top_p) < 1e-6 or abs(q[m] / q[0] - min_p) < 1e-6 for m in range(n, max(len(got), len(want)))]
        assert all(edge), (len(got), len(want))


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.integers(0, 299), st.sampled_from([-100, -99.5, -1, 0, 2.5, 100]) | st.floats(-100, 100), max_size=300), st.sampled_from([0.0, 1.0]))
def test_a_bias_of_many_ids(bias, temperature):
    x = np.random.default_rng(len(bias)).standard_normal(300).astype(np.float32)
    want = x.copy()
    for i, b in bias.items(): want[i] = -np.inf if b == -100 else np.float32(want[i] + np.float32(b))
    params = SamplingParams(temperature=temperature, seed=1, logit_bias=bias)
    if (want == -np.inf).all():
        with pytest.raises(ParamError, match="a token is left"): Sampler(params, 300, [])
        return
    s = Sampler(params, 300, [])
    assert np.array_equal(s.adjust(x), want)
    drawn = {s.sample(x)[0] for _ in range(20)}
    assert not drawn & {i for i, b in bias.items() if b == -100} and (temperature or drawn == {order(want.tolist())[0]})
