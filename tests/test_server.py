"""The server over a real socket: a scripted engine behind it, the official client and raw sockets in front."""

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import openai
import pytest

from prometheus_client.parser import text_string_to_metric_families

from literate_engine import connections, server
from literate_engine.access import access_for
from literate_engine.chat import ChatTemplate
from literate_engine.engine import Engine, EngineConfig, Loaded
from literate_engine.scripted import ScriptedModel
from literate_engine.server import Limits, background, create_app
from literate_engine.tokenizer import Tokenizer, byte_alphabet

WORDS = [
    "slow",
    " f",
    "ox",
    " ran",
    "the",
    " end",
    " cat",
    " sat",
    ". ",
    "Hi",
    "there",
    "x",
    "</think>",
    "y",
    '\x01\b\f"\\',
    '{"a":1}',
    "\u2028",
    "<",
    "|im_end|>",
]
CONTROL = ["<|end|>", "<|im_start|>", "<|im_end|>", "<|go|>"]
TO_CHAR = dict(enumerate(byte_alphabet()))
TOKENS = byte_alphabet() + ["".join(TO_CHAR[b] for b in w.encode()) for w in WORDS] + CONTROL
ID = {**{w: 256 + i for i, w in enumerate(WORDS)}, **{c: 256 + len(WORDS) + i for i, c in enumerate(CONTROL)}}
END, GO, N_VOCAB = ID["<|end|>"], ID["<|go|>"], len(TOKENS)
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|go|>{% endif %}"
ROUTES = ["/v1/chat/completions", "/v1/completions"]


def make_tokenizer():
    return Tokenizer(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": TOKENS,
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.token_type": np.array([1] * (256 + len(WORDS)) + [3] * len(CONTROL), np.int32),
            "tokenizer.ggml.eos_token_id": END,
        }
    )


def ids(*pieces):
    return [i for p in pieces for i in ([ID[p]] if p in ID else [p] if isinstance(p, int) else list(p.encode()))]


def scripted(reply, seconds=0.0, template=TEMPLATE, tokenizer=None, max_model_len=256, **config):
    "An engine that answers every prompt that ends in <|go|> with `reply` (ids, or functions to call instead) and then the end token."
    seen = set()

    def script(tokens):
        seen.add(len(tokens))
        if seconds:
            time.sleep(seconds)
        n = len(tokens) - 1 - max(i for i, t in enumerate(tokens) if t == GO)
        what = reply[n] if n < len(reply) else END
        return what() if callable(what) else what

    config = EngineConfig(max_model_len=max_model_len, **config)
    model = ScriptedModel(
        script, N_VOCAB, N_VOCAB, max_model_len, 1 + config.max_num_seqs * max_model_len // 16, config.max_num_seqs, (config.max_num_batched_tokens or 512)
    )
    return Engine(Loaded(model, tokenizer or make_tokenizer(), ChatTemplate(template) if template else None, {}, "scripted"), config)


@contextmanager
def served(reply=(), limits=None, **options):
    "(url, engine) of a running server; afterwards it must be healthy and idle."
    engine = scripted(list(reply), **options).start()
    try:
        app = create_app(engine, limits=limits)
        app.add_api_route("/tasks", num_tasks)
        with background(app) as url:
            yield url, engine
            assert get(url, "/health")[0] == 200
            assert wait_for(lambda: idle(engine)), engine.stats()
    finally:
        engine.stop()


async def num_tasks():
    return len(asyncio.all_tasks())


def idle(engine):
    s = engine.stats()
    return s["num_running"] == s["num_waiting"] == 0 and s["num_free_kv_blocks"] == s["num_kv_blocks"]


def wait_for(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


def address(url):
    return url.split("//")[1].split(":")[0], int(url.rsplit(":", 1)[1])


def send(url, path, body, method="POST", headers=""):
    "Send one request and return the socket."
    s = socket.create_connection(address(url), timeout=20)
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    s.sendall(
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n{headers}"
        f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    return s


def receive(s):
    "(status, headers, body) read to the end of the connection."
    data = b""
    while chunk := s.recv(65536):
        data += chunk
    s.close()
    head, _, body = data.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" in head.lower():
        out = b""
        while body:
            size, _, rest = body.partition(b"\r\n")
            out, body = out + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
        body = out
    return int(head.split()[1]), head.decode(), body


def strict(text):
    def constant(name):
        raise ValueError(name)

    return json.loads(text, parse_constant=constant)


def post(url, path, body):
    status, _, raw = receive(send(url, path, body))
    return status, strict(raw)


def get(url, path, method="GET"):
    status, _, raw = receive(send(url, path, b"", method))
    return status, strict(raw)


def events(url, path, body):
    "The chunks of a stream, checked against the rules of the format: (chunks, comments)."
    status, head, raw = receive(send(url, path, {**body, "stream": True}))
    assert status == 200 and "text/event-stream" in head, raw
    assert raw.endswith(b"\n\n")
    blocks = raw.decode("ascii")[:-2].split("\n\n")
    comments = [b for b in blocks if b.startswith(":")]
    lines = [b for b in blocks if not b.startswith(":")]
    assert all(b.startswith("data: ") and "\n" not in b for b in lines)
    assert [b for b in lines if b == "data: [DONE]"] == [lines[-1]]
    return [strict(b[6:]) for b in lines[:-1]], comments


def asked(path, **more):
    return ({"messages": [{"role": "user", "content": "q"}]} if "chat" in path else {"prompt": "q<|go|>", "max_tokens": 100}) | more


def said(choice):
    return choice["message"]["content"] if "message" in choice else choice["text"]


def streamed(chunks, index=0):
    "Text and finish reasons of one choice of a stream."
    mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    text = "".join((c["delta"].get("content") or "") if "delta" in c else c["text"] for c in mine)
    return text, [c["finish_reason"] for c in mine if c["finish_reason"]]


def both(url, path, body):
    "(text, finish_reason) of the plain and the streamed reply, which must agree."
    status, reply = post(url, path, body)
    assert status == 200, reply
    chunks, _ = events(url, path, body)
    for i, c in enumerate(reply["choices"]):
        if body.get("temperature"):
            break
        assert streamed(chunks, i) == (said(c), [c["finish_reason"]])
    return said(reply["choices"][0]), reply["choices"][0]["finish_reason"]


# ---- text and stops


@pytest.mark.parametrize("path", ROUTES)
def test_every_payload_is_strict_json(path):  # BC-018
    text = '\x01\b\f"\\\u2028'
    with served(ids('\x01\b\f"\\', "\u2028")) as (url, _):
        assert both(url, path, asked(path)) == (text, "stop")
        status, error = post(url, path, asked(path, **{'tem"p\\\n': 1}))
        assert status == 400 and 'tem"p' in error["error"]["message"]


@pytest.mark.parametrize("path", ROUTES)
def test_stop_strings_span_tokens(path):  # BC-020, BC-024
    with served(ids("slow", " f", "ox", " ran")) as (url, _):
        assert both(url, path, asked(path, stop="ow fo")) == ("sl", "stop")
        assert both(url, path, asked(path, stop=["zzz", "x r"])) == ("slow fo", "stop")
        assert both(url, path, asked(path, stop="never")) == ("slow fox ran", "stop")
    with served(ids("the", " cat", " sat", ". ", "the", " end", "!")) as (url, _):
        assert both(url, path, asked(path, stop=["the end"])) == ("the cat sat. ", "stop")
        assert both(url, path, asked(path, stop_token_ids=[ID[" sat"]])) == ("the cat", "stop")


@pytest.mark.parametrize("path", ROUTES)
def test_only_a_possible_stop_is_held_back(path):  # BC-022
    with served(ids("x", "</think>", "y")) as (url, _):
        chunks, _ = events(url, path, asked(path, stop=["b,c"]))
        texts = [c["choices"][0]["delta"].get("content") if "delta" in c["choices"][0] else c["choices"][0]["text"] for c in chunks]
        assert [t for t in texts if t] == ["x", "</think>", "y"]


@pytest.mark.parametrize("path", ROUTES)
def test_special_tokens_are_hidden_unless_asked_for(path):  # BC-012
    with served(ids("Hi", "<|im_start|>", "there")) as (url, _):
        assert both(url, path, asked(path))[0] == "Hithere"
        assert both(url, path, asked(path, skip_special_tokens=False))[0].startswith("Hi<|im_start|>there")


@pytest.mark.parametrize("path", ROUTES)
def test_cut_inside_a_character(path):  # BC-014
    with served(ids("🦊")) as (url, _):
        assert both(url, path, asked(path, max_tokens=2)) in [("\ufffd", "length"), ("", "length")]
        assert both(url, path, asked(path)) == ("🦊", "stop")


def test_logprobs_have_the_bytes_of_each_token():  # BC-016
    with served(ids(0xE2, 0x80)) as (url, _):
        _, reply = post(url, ROUTES[0], asked(ROUTES[0], logprobs=True, top_logprobs=3, max_tokens=2))
        content = reply["choices"][0]["logprobs"]["content"]
        assert [t["bytes"] for t in content] == [[0xE2], [0x80]] and content[0]["token"] == "\ufffd"
        assert len(content[0]["top_logprobs"]) == 3 and content[0]["top_logprobs"][0]["bytes"] == [0xE2] and content[0]["logprob"] <= 0
        chunks, _ = events(url, ROUTES[0], asked(ROUTES[0], logprobs=True, top_logprobs=3, max_tokens=2))
        assert [t for c in chunks if c["choices"][0]["logprobs"] for t in c["choices"][0]["logprobs"]["content"]] == content
        _, reply = post(url, ROUTES[1], asked(ROUTES[1], logprobs=2, max_tokens=2))
        old = reply["choices"][0]["logprobs"]
        assert (
            old["tokens"] == ["bytes:\\xe2", "bytes:\\x80"]
            and len(old["token_logprobs"]) == len(old["text_offset"]) == 2
            and len(old["top_logprobs"][0]) in (2, 3)
        )
        assert old["top_logprobs"][0]["bytes:\\xe2"] == old["token_logprobs"][0]


# ---- the shape of streams


def test_usage_of_a_stream_equals_the_plain_reply():  # BC-028
    for path in ROUTES:
        with served(ids("slow", " f", "ox")) as (url, _):
            _, reply = post(url, path, asked(path))
            chunks, _ = events(url, path, asked(path, stream_options={"include_usage": True}))
            assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == reply["usage"] and all(c["usage"] is None for c in chunks[:-1])
            assert reply["usage"]["completion_tokens"] in (3, 4) and reply["usage"]["prompt_tokens"] > 0
            chunks, _ = events(url, path, asked(path))
            assert all(c["choices"] and "usage" not in c for c in chunks)


def test_a_cache_report_is_told_to_whoever_asks():
    with served(ids("ok")) as (url, _):
        body = {"prompt": [7] * 40 + [8, GO], "max_tokens": 1}
        details = lambda **more: post(url, "/v1/completions", {**body, **more})[1]["usage"]["prompt_tokens_details"]
        first, again, plain = details(return_cache_report=True)["cache_report"], details(return_cache_report=True)["cache_report"], details()
        assert first["reason"] == "nothing similar seen" and again["reason"] == "only whole blocks are reused" and plain == {"cached_tokens": 32}
        one, two = details(return_cache_report=True, prompt=[[7] * 40 + [9, GO], [6, GO]], n=2)["cache_report"]
        assert (one["position"], one["token_id"], one["earlier_token_id"]) == (40, 9, 8) and len(one["texts"]) == 2 and "at position 40" in one["summary"]
        assert one["num_cached_tokens"] == 32 and two["reason"] == "nothing similar seen"
        chunks, _ = events(url, "/v1/completions", {**body, "return_cache_report": True, "stream_options": {"include_usage": True}})
        assert chunks[-1]["usage"]["prompt_tokens_details"]["cache_report"]["num_cached_tokens"] == 32
        status, error = post(url, "/v1/completions", {**body, "return_cache_report": True, "stream": True})
        assert status == 400 and "include_usage" in error["error"]["message"]
    with served(ids("ok"), enable_prefix_caching=False) as (url, _):
        assert post(url, "/v1/completions", {**body, "return_cache_report": True})[1]["usage"]["prompt_tokens_details"]["cache_report"] is None


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("more", [{}, {"max_tokens": 2}, {"stop": "x"}, {"n": 2}, {"n": 3, "temperature": 1, "seed": 7}], ids=str)
def test_keys_and_order_of_chunks(path, more):  # BC-030, BC-036
    with served(ids("slow", " f", "ox", " ran")) as (url, _):
        chunks, _ = events(url, path, asked(path, **more))
    content = "delta" if "chat" in path else "text"
    for c in chunks:
        assert {"id", "object", "created", "model", "choices"} <= c.keys()
        for choice in c["choices"]:
            assert {"index", "finish_reason", content} <= choice.keys()
    for i in range(more.get("n", 1)):
        reasons = [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["index"] == i]
        assert reasons[-1] is not None and all(r is None for r in reasons[:-1])
    assert len({c["id"] for c in chunks}) == 1
    if "chat" in path:
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"


def test_pings_fill_a_silence():  # BC-034
    pause = lambda: (time.sleep(0.6), ID["Hi"])[1]
    for seconds, expected in ((0.1, True), (-1, False)):
        with served([pause], limits=Limits(ping_seconds=seconds)) as (url, _):
            chunks, comments = events(url, ROUTES[0], asked(ROUTES[0]))
            assert streamed(chunks)[0] == "Hi" and bool(comments) == expected


# ---- what is refused

BAD = [
    ({"temperature": 999999}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "0.7"}, "temperature"),
    ({"top_p": -1}, "top_p"),
    ({"top_p": 2}, "top_p"),
    ({"min_p": 2}, "min_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"repeat_penalty": 0}, "repeat_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"n": 0}, "n"),
    ({"n": True}, "n"),
    ({"n": 1000}, "n"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"seed": "a"}, "seed"),
    ({"seed": 2**70}, "seed"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {str(N_VOCAB): 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop_token_ids": [N_VOCAB]}, "stop_token_ids"),
    ({"stop_token_ids": [True]}, "stop_token_ids"),
    ({"samplers": ["min_p"]}, "samplers"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"regex": "("}, "regex"),
    ({"grammar": "start: x"}, "grammar"),
    ({"json_schema": {"type": "wizard"}}, "json_schema"),
    ({"tools": [{}]}, "tools"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"best_of": 2}, "best_of"),
    ({"model": 5}, "model"),
    ({"temperature": 10**400}, "temperature"),
    ({"max_tokens": 10**400}, "max_tokens"),
    ({"user": 5}, "user"),
    ({"metadata": "x"}, "metadata"),
]


def test_bad_parameters_are_named():  # BC-050, BC-068, BC-078
    with served(ids("Hi")) as (url, _):
        for path in ROUTES:
            for more, name in BAD + (
                [({"top_logprobs": 21, "logprobs": True}, "top_logprobs"), ({"top_logprobs": 1}, "top_logprobs"), ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens")]
                if "chat" in path
                else [({"logprobs": 100000}, "logprobs"), ({"suffix": "x"}, "suffix")]
            ):
                status, reply = post(url, path, asked(path, **more))
                error = reply.get("error", {})
                assert (
                    status == 400
                    and name in error["message"]
                    and (error["param"] or "").startswith(name)
                    and error["type"] == "invalid_request_error"
                    and "code" in error
                ), (path, more, reply)
        assert post(url, ROUTES[1], {})[1]["error"]["message"] == "prompt: missing"
        assert both(url, ROUTES[0], asked(ROUTES[0], user="me", metadata={"a": "b"}, tools=[], response_format={"type": "text"}, temperature=None, store=False))[0] == "Hi"


def test_bad_bodies():  # BC-054, BC-056, BC-068
    with served(ids("Hi"), limits=Limits(body_bytes=100_000)) as (url, _):
        for path in ROUTES + ["/tokenize"]:
            for body in (
                b"",
                b"{",
                b"[]",
                b"null",
                b'"x"',
                b"\xff\xfe{}",
                b'{"temperature": NaN}',
                b'{"temperature": Infinity}',
                b'{"temperature": -Infinity}',
                b'{"temperature": 1e999}',
                b'{"a": ' + b"[" * 90_000,
                b'{"a": ' + b"[" * 70 + b"]" * 70 + b"}",
                b'{"\\ud83d": 1}',
                b'{"seed": ' + b"9" * 5000 + b"}",
            ):
                assert post(url, path, body)[0] == 400, (path, body[:50])
            assert post(url, path, b" " * 100_001)[0] == 413
        for text, status in (("hi \\ud83d", 400), ("x \\ude00 y", 400), ("\\ud83e\\udd8a", 200)):
            raw = {
                ROUTES[0]: f'{{"messages": [{{"role": "user", "content": "{text}"}}]}}',
                ROUTES[1]: f'{{"prompt": "{text}<|go|>"}}',
                "/tokenize": f'{{"content": "{text}"}}',
            }
            for path, body in raw.items():
                assert post(url, path, body.encode())[0] == status, (path, text)


def test_token_ids_are_checked_before_any_cast():  # BC-048
    with served(ids("Hi")) as (url, engine):
        for bad in ([N_VOCAB], [4294967295], [2**63 - 1], [-1], [1.5], [True], [None], [[1], ["a"]], [[]], [], {}, [1, "a"]):
            status, reply = post(url, ROUTES[1], {"prompt": bad})
            assert status == 400 and reply["error"]["param"] == "prompt", (bad, reply)
        assert engine.stats()["num_submitted"] == 0
        assert said(post(url, ROUTES[1], {"prompt": [GO]})[1]["choices"][0]) == "Hi"
        assert [said(c) for c in post(url, ROUTES[1], {"prompt": [[GO], [1, GO]], "n": 2})[1]["choices"]] == ["Hi"] * 4


def test_values_are_shown_as_json():
    with served(ids("Hi")) as (url, _):
        for path, more, message in (
            (ROUTES[0], {"messages": [None]}, "messages[0]: expected an object with role and content, got null"),
            (ROUTES[0], {"messages": [{"role": "user", "content": [None]}]}, "messages[0].content[0]: expected text, or an object with a type"),
            (ROUTES[0], {"messages": [{"role": "user", "content": [{"type": None}]}]}, "messages[0].content[0]: expected text, or an object with a type"),
            (ROUTES[1], {"prompt": [True]}, f"prompt: expected token ids from 0 to {N_VOCAB - 1}, got true"),
            (ROUTES[1], {"prompt": "a", "temperature": "0.7"}, 'temperature: expected a number from 0 to 2, got "0.7"'),
            (ROUTES[1], {"prompt": "a", "max_tokens": 0}, "max_tokens: expected an integer from 1 to 2147483647, got 0"),
            (ROUTES[1], {"prompt": "a", "max_tokens": -1}, "max_tokens: expected an integer from 1 to 2147483647, got -1"),
            (ROUTES[1], {"prompt": ["a"] * 129}, "prompt: 129 prompts, at most 128 at a time"),
            (ROUTES[1], {"prompt": ["a"] * 100, "n": 2}, "n: 100 prompts with 2 choices each, at most 128 choices at a time"),
        ):
            status, reply = post(url, path, more)
            assert status == 400 and reply["error"]["message"] == message, reply


def test_what_is_around_the_json():
    with served(ids("Hi")) as (url, _):
        body = json.dumps(asked(ROUTES[1])).encode()
        assert post(url, ROUTES[1], b"\xef\xbb\xbf" + body)[0] == 200
        status, _, raw = receive(send(url, ROUTES[1], body, headers="Content-Encoding: gzip\r\n"))
        assert status == 415 and "gzip" in strict(raw)["error"]["message"]
        assert receive(send(url, ROUTES[1], body, headers="Content-Encoding: identity\r\n"))[0] == 200
        for path in ("/health", "/v1/models", "/v1/models/scripted", "/props", "/metrics", "/slots"):
            status, head, raw = receive(send(url, path, b"", "HEAD"))
            assert status == 200 and raw == b"", path


def test_max_completion_tokens():  # BC-052
    with served(ids(*["x"] * 20)) as (url, _):
        for more, n in (({"max_completion_tokens": 3}, 3), ({"max_completion_tokens": 3, "max_tokens": 3}, 3), ({"max_tokens": 5}, 5)):
            assert both(url, ROUTES[0], asked(ROUTES[0], **more)) == ("x" * n, "length")
        assert both(url, ROUTES[1], {"prompt": "<|go|>"}) == ("x" * 16, "length")


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 42}'}}


def test_messages():  # BC-042, BC-044
    refuse = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}<|go|>"
    )
    with served(ids("Hi"), template=refuse) as (url, _):
        status, reply = post(url, ROUTES[0], {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]})
        assert status == 400 and reply["error"]["message"] == "roles must alternate"
        assert both(url, ROUTES[0], asked(ROUTES[0]))[0] == "Hi"
    with served(ids("Hi")) as (url, _):
        parts = [{"type": "text", "text": "Sure, "}, {"type": "text", "text": "the"}]
        usage = [post(url, ROUTES[0], {"messages": [{"role": "assistant", "content": c}]})[1]["usage"]["prompt_tokens"] for c in (parts, "Sure, the")]
        assert usage[0] == usage[1]
        for messages, word in (
            ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "image_url"),
            ([{"role": "user"}], "content"),
            ([{"role": "wizard", "content": ""}], "role"),
            ([], "messages"),
            ([{"role": "user", "content": 5}], "content"),
            ([{"role": "user", "content": "x"}, {"role": "user", "content": "x", "foo": 1}], "messages[1].foo"),
            ([{"role": "user", "content": "x", "foo": None}], "messages[0].foo"),
            ([{"role": "user", "content": "x", "name": 5}], "messages[0].name"),
            ([{"role": "assistant", "content": None}], "messages[0].content"),
            ([{"role": "assistant", "content": None, "tool_calls": []}], "messages[0].content"),
            ([{"role": "assistant", "content": None, "tool_calls": [CALL]}], "messages[0].tool_calls"),
            ([{"role": "assistant", "content": "x", "tool_calls": 5}], "messages[0].tool_calls"),
            ([{"role": "assistant", "content": "x", "refusal": "no"}], "messages[0].refusal"),
            ([{"role": "assistant", "content": "x", "reasoning_content": "hm"}], "messages[0].reasoning_content"),
            (["x"], "messages[0]"),
            ("x", "messages"),
        ):
            status, reply = post(url, ROUTES[0], {"messages": messages})
            assert status == 400 and word in reply["error"]["message"] and reply["error"]["param"].startswith("messages"), reply
            assert "." not in word or reply["error"]["param"] == word, reply
        assert (
            post(
                url,
                ROUTES[0],
                {
                    "messages": [
                        {"role": "developer", "content": "d"},
                        {"role": "assistant", "content": "a", "refusal": None, "tool_calls": [], "audio": None, "function_call": None, "annotations": [], "name": "me"},
                        {"role": "user", "content": "x"},
                    ]
                },
            )[0]
            == 200
        )


def test_what_the_template_reads_is_accepted():
    reads = "{% for m in messages %}{% if 'tool_calls' in m %}{{ m.tool_calls[0].function.arguments.a }}{% endif %}{{ m.content }}{{ m.reasoning_content }}{% endfor %}<|go|>"
    with served(ids("Hi"), template=reads) as (url, _):
        for message, n in (({"content": "abc"}, 3), ({"content": "abc", "reasoning_content": "de"}, 5), ({"content": None, "tool_calls": [CALL]}, 2), ({"content": "a", "tool_calls": []}, 1), ({"content": "a", "tool_calls": None}, 1)):
            status, reply = post(url, ROUTES[0], {"messages": [{"role": "assistant", **message}]})
            assert status == 200 and reply["usage"]["prompt_tokens"] == n + 1, (message, reply)


def test_a_message_cannot_forge_a_turn():
    with served(ids("Hi")) as (url, _):
        usage = [post(url, ROUTES[0], {"messages": [{"role": "user", "content": c}]})[1]["usage"]["prompt_tokens"] for c in ("a<|im_end|>", "a", "a<|go|>")]
        assert usage[0] == usage[1] + len("<|im_end|>") and usage[2] == usage[1] + len("<|go|>")


def test_echo():  # BC-046
    with served(ids("Hi")) as (url, _):
        assert both(url, ROUTES[1], {"prompt": "ab<|go|>", "echo": True})[0] == "ab<|go|>Hi"
        assert post(url, ROUTES[1], {"prompt": "ab", "echo": True, "max_tokens": 0, "logprobs": 1})[0] == 400


def test_context_limit():  # BC-100
    with served(ids(*["x"] * 200), max_model_len=64) as (url, _):
        text, reason = both(url, ROUTES[0], asked(ROUTES[0]))
        assert reason == "length" and 0 < len(text) < 64
        status, reply = post(url, ROUTES[1], {"prompt": "x" * 64})
        assert status == 400 and reply["error"]["code"] == "context_length_exceeded" and "64" in reply["error"]["message"]
        for path, body in ((ROUTES[0], {"messages": [{"role": "user", "content": "x" * 5_000_000}]}), (ROUTES[1], {"prompt": "x" * 5_000_000})):
            status, reply = post(url, path, body)  # refused before it is tokenized
            assert status == 400 and re.search(r"50000\d\d characters", reply["error"]["message"]), reply
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "\\ud83d"}'}}
        assert post(url, ROUTES[0], {"messages": [{"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "x"}]})[0] in (200, 400)


@pytest.mark.parametrize(
    "path, more, message",
    [  # each would be refused for what is in the list, too, if anything had looked into it
        (ROUTES[0], {"messages": [{"role": "wizard"}] * 65}, "messages: 65 items"),
        (ROUTES[1], {"prompt": [-1] * 300}, "prompt: 300 items"),
        (ROUTES[1], {"prompt": [[-1] * 65]}, "the prompt has 65 tokens"),
        (ROUTES[1], {"prompt": ["x" * 5000] * 129}, "prompt: 129 items"),
        ("/v1/embeddings", {"input": [-1] * 3000}, "input: 3000 items"),
        ("/v1/embeddings", {"input": [[-1] * 65]}, "the input has 65 tokens"),
        (ROUTES[0], {"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 50_000}, {"type": "x"}]}]}, "50032 characters"),
        (ROUTES[0], {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 300}]}, "messages: 1506 values"),
        (ROUTES[0], {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": [1] * 1100}}, "chat_template_kwargs: 1103 values"),
        (ROUTES[0], {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 50_000}}]}]}, "characters"),
    ],
)
def test_a_list_that_no_context_holds_is_refused_unread(path, more, message):
    with served(ids("Hi"), max_model_len=64) as (url, _):
        status, reply = post(url, path, more)
        assert status == 400 and message in reply["error"]["message"] and reply["error"]["code"] == "context_length_exceeded", reply
        assert reply["error"]["param"] in more


def test_other_lists_are_bounded_too():
    with served(ids("Hi")) as (url, _):
        for name in ("stop", "stop_token_ids", "logit_bias"):
            many = [-1] * (N_VOCAB + 1) if "stop" in name else {f"x{i}": -1 for i in range(N_VOCAB + 1)}
            assert post(url, ROUTES[1], {"prompt": "a", name: many})[1]["error"]["message"] == f"{name}: {N_VOCAB + 1} items, at most {N_VOCAB}"
        assert post(url, ROUTES[0], asked(ROUTES[0], metadata={"a": "x" * 100_000}))[0] == 200  # large, parsed beside the loop
        status, reply = post(url, ROUTES[0], asked(ROUTES[0], metadata={"a": "x" * 100_000}, foo=1))
        assert status == 400 and reply["error"]["param"] == "foo"


def test_models_without_template_or_tokenizer():
    with served(ids("Hi"), template=None) as (url, _):
        assert post(url, ROUTES[0], asked(ROUTES[0]))[1]["error"]["code"] == "no_chat_template"
    with served(ids("Hi"), tokenizer=Tokenizer({"tokenizer.ggml.model": "none"}, N_VOCAB)) as (url, _):
        for path, body in ((ROUTES[0], asked(ROUTES[0])), (ROUTES[1], {"prompt": "a"}), ("/tokenize", {"content": "a"})):
            assert post(url, path, body)[1]["error"]["code"] == "no_tokenizer"
        status, reply = post(url, ROUTES[1], {"prompt": [GO], "max_tokens": 3})
        assert status == 200 and reply["usage"]["completion_tokens"] == 3


VALUES = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    1.5,
    1e308,
    2**63,
    -(2**70),
    "",
    "x",
    "\x00",
    "<|end|>",
    "9" * 400,
    [],
    [[]],
    [None],
    ["a", ""],
    [1, "a"],
    {},
    {"a": {}},
    {"type": "text"},
    {"1": 2},
    [{}],
]
FIELDS = """model stream stream_options n max_tokens max_completion_tokens temperature top_p top_k min_p seed presence_penalty
    frequency_penalty repetition_penalty repetition_window logit_bias stop stop_token_ids ignore_eos skip_special_tokens logprobs
    top_logprobs chat_template_kwargs messages prompt echo user tools response_format best_of grammar json_schema regex x""".split()


def test_any_value_in_any_field_is_answered_or_refused():
    rng, seen = np.random.default_rng(1), set()
    with served(ids("Hi"), max_num_waiting=0) as (url, engine):
        for i in range(400):
            path = ROUTES[i % 2]
            body = asked(path, **{str(f): VALUES[rng.integers(len(VALUES))] for f in rng.choice(FIELDS, rng.integers(1, 3))})
            if rng.integers(3) == 0:
                body["messages"] = [{"role": "user", "content": VALUES[rng.integers(len(VALUES))], "name": VALUES[rng.integers(len(VALUES))]}]
            status, _, raw = receive(send(url, path, body))
            assert status in (200, 400, 429), (path, body, raw)
            if status != 200:
                assert strict(raw)["error"]["message"], (path, body)
            seen.add(status)
        assert {200, 400} <= seen


# ---- routes


def test_small_routes():
    with served(ids("Hi")) as (url, _):
        assert get(url, "/health") == (200, {"status": "ok"})
        assert get(url, "/v1/models")[1]["data"][0]["id"] == "scripted" and get(url, "/v1/models/scripted")[0] == 200 and get(url, "/v1/models/other")[0] == 404
        assert get(url, "/props")[1]["engine"]["max_model_len"] == 256
        assert post(url, "/tokenize", {"content": "<|go|>a"})[1] == {"tokens": [GO, 97]}
        assert post(url, "/tokenize", {"content": "<|go|>a", "parse_special": False})[1] == {"tokens": [*b"<|go|>a"]}  # BC-008
        assert post(url, "/detokenize", {"tokens": [ID["slow"], ID[" f"]]})[1] == {"content": "slow f"}
        assert post(url, "/detokenize", {"tokens": [N_VOCAB]})[0] == 400
        for path, method, status in (
            ("/nope", "GET", 404),
            ("/v1/completions/", "POST", 404),
            ("/v1/completions", "GET", 405),
            ("/health", "POST", 405),
            ("/docs", "GET", 404),
        ):
            got, reply = get(url, path, method)
            assert got == status and reply["error"]["message"], (path, got)
        assert (
            said(post(url, ROUTES[0], asked(ROUTES[0], model="another"))[1]["choices"][0]) == "Hi"
            and post(url, ROUTES[0], asked(ROUTES[0], model="another"))[1]["model"] == "scripted"
        )


def metrics(url):
    "The values of /metrics by name (and reason), read by Prometheus' own parser."
    page = receive(send(url, "/metrics", b"", "GET"))[2].decode()
    return {
        "/".join([s.name.removeprefix("literate_engine_"), *(v for k, v in s.labels.items() if k != "model_name")]): s.value
        for f in text_string_to_metric_families(page)
        for s in f.samples
    }


def test_metrics():
    with served(ids(*["x"] * 200), seconds=0.01, max_num_seqs=2, max_num_waiting=1) as (url, engine):
        for m in (metrics(url),):
            assert m["num_requests_running"] == m["request_success_total/stop"] == m["generation_tokens_total"] == 0 and m["kv_blocks"] == 32
            assert m["process_resident_memory_bytes"] > 1e6 or sys.platform != "linux"
        assert both(url, ROUTES[1], {"prompt": "<|go|>", "max_tokens": 5}) == ("xxxxx", "length")  # twice: whole and streamed
        m = metrics(url)
        assert m["generation_tokens_total"] == 10 and m["prompt_tokens_total"] == 2 and m["request_success_total/length"] == 2
        assert m["time_to_first_token_seconds_count"] == m["e2e_request_latency_seconds_count"] == 2 and m["inter_token_latency_seconds_count"] == 8
        assert m["inter_token_latency_seconds_sum"] >= 8 * 0.01 and m["iteration_tokens_total_sum"] == 2 + 8 and m["iteration_requests_sum"] == 10
        assert abs(m["request_decode_time_seconds_sum"] - m["inter_token_latency_seconds_sum"]) < 1e-6
        busy = [send(url, ROUTES[1], {"prompt": "<|go|>", "max_tokens": 200, "stream": bool(i % 2)}) for i in range(3)]
        assert wait_for(lambda: engine.stats()["num_running"] == 2 and engine.stats()["num_waiting"] == 1)
        assert post(url, ROUTES[1], {"prompt": "<|go|>"})[0] == 429
        m = metrics(url)
        assert m["num_requests_running"] == 2 and m["num_requests_waiting"] == 1 and m["requests_refused_total"] == 1 and m["kv_blocks_used"] >= 2
        assert m["kv_cache_usage_perc"] == m["kv_blocks_used"] / 32 and m["requests_submitted_total"] == 5
        for s in busy:
            s.close()
        assert wait_for(lambda: metrics(url)["request_success_total/abort"] == 3) and metrics(url)["client_disconnects_total"] == 3
        assert metrics(url)["e2e_request_latency_seconds_count"] == 2  # times of those that came to their end


def test_cached_tokens_and_salts():
    prompt = [*b"a" * 40, GO]
    with served(ids("Hi")) as (url, engine):
        hits = []
        for salt in (None, None, "mine", "mine", "yours"):
            before = metrics(url)
            body = {"prompt": prompt, "max_tokens": 1} | ({"cache_salt": salt} if salt else {})
            cached = post(url, ROUTES[1], body)[1]["usage"]["prompt_tokens_details"]["cached_tokens"]
            after = metrics(url)
            assert after["prefix_cache_hits_total"] - before["prefix_cache_hits_total"] == cached
            assert after["prefix_cache_queries_total"] - before["prefix_cache_queries_total"] == after["prompt_tokens_total"] - before["prompt_tokens_total"] == 41
            hits.append(cached)
        assert post(url, ROUTES[1], {"prompt": prompt, "priority": -3})[0] == 200
        for priority in (2**31, 0.5, True, "high"):
            assert post(url, ROUTES[1], {"prompt": prompt, "priority": priority})[1]["error"]["param"] == "priority"
        assert hits == [0, 32, 0, 32, 0]
        for salt in ("", 5, "x" * 257, ["a"]):
            for path in ROUTES:
                status, reply = post(url, path, asked(path, cache_salt=salt))
                assert status == 400 and reply["error"]["message"].startswith("cache_salt: expected a string of 1 to 256 characters"), reply


def test_slots():
    with served(ids(*["x"] * 200), seconds=0.01, max_num_seqs=2) as (url, engine):
        assert get(url, "/slots")[1] == {"running": [], "num_waiting": 0, "num_kv_blocks": 32, "num_free_kv_blocks": 32, "num_state_slots": 0, "num_free_state_slots": 0}
        busy = [send(url, ROUTES[1], {"prompt": "secret<|go|>", "max_tokens": 200, "priority": 7}) for _ in range(3)]
        assert wait_for(lambda: len(get(url, "/slots")[1]["running"]) == 2 and get(url, "/slots")[1]["num_waiting"] == 1)
        for _ in range(20):
            picture = get(url, "/slots")[1]
            for r in picture["running"]:
                assert r["num_prompt_tokens"] == 7 and r["num_computed_tokens"] == 7 + r["num_output_tokens"] - 1 and r["priority"] == 7 and 0 < r["age"] < 60
                assert (r["num_kv_blocks"] - 1) * 16 < r["num_computed_tokens"] <= r["num_kv_blocks"] * 16
            assert picture["num_free_kv_blocks"] == 32 - sum(r["num_kv_blocks"] for r in picture["running"]) and "secret" not in json.dumps(picture)
        for s in busy:
            s.close()
    with served([lambda: (time.sleep(1), ID["Hi"])[1]], limits=Limits(slots_seconds=0.1)) as (url, engine):
        s = send(url, ROUTES[1], {"prompt": "<|go|>"})
        assert wait_for(lambda: engine.stats()["num_running"] == 1)
        assert get(url, "/slots")[0] == 503 and receive(s)[0] == 200  # nobody waits for the picture any more: no matter


# ---- who may ask


def bare(url, method, path, body=b"", **headers):
    "(status, headers, JSON) of a request with these headers alone; a list is sent several times."
    s = socket.create_connection(address(url), timeout=20)
    lines = [f"{k.replace('_', '-')}: {x}" for k, v in headers.items() for x in (v if isinstance(v, list) else [v])]
    s.sendall("\r\n".join([f"{method} {path} HTTP/1.1", "Connection: close", f"Content-Length: {len(body)}", *lines, "", ""]).encode() + body)
    status, head, raw = receive(s)
    return status, head, strict(raw) if raw else None


def test_a_web_page_cannot_use_a_local_server():
    body = json.dumps({"prompt": "<|go|>"}).encode()
    with served(ids("Hi")) as (url, engine):
        port = address(url)[1]
        for host in ("localhost", f"localhost:{port}", f"127.0.0.1:{port}", "LocalHost.", f"[::1]:{port}"):
            assert bare(url, "POST", ROUTES[1], body, Host=host, Content_Type="application/json; charset=utf-8")[0] == 200
        assert engine.stats()["num_submitted"] == 5
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "localhost.evil.example", "", "[::1", "0.0.0.0", "192.0.2.1"):
            for method, path in (("POST", ROUTES[1]), ("GET", "/metrics"), ("GET", "/v1/models"), ("GET", "/nope")):
                status, _, reply = bare(url, method, path, body if method == "POST" else b"", Host=host, Content_Type="application/json")
                assert status == 403 and reply["error"]["code"] == "host_not_allowed" and reply["error"]["type"] == "permission_error", (host, path, reply)
        assert bare(url, "GET", "/health", Host="evil.example")[0] == 200
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/jsonx", ""):
            for path in (*ROUTES, "/tokenize", "/detokenize"):
                status, _, reply = bare(url, "POST", path, body, Host="localhost", **({"Content_Type": kind} if kind else {}))
                assert status == 415 and "application/json" in reply["error"]["message"], (kind, path, reply)
        status, head, _ = bare(url, "OPTIONS", ROUTES[1], Host="localhost", Origin="https://evil.example", Access_Control_Request_Method="POST")
        assert status == 405 and "access-control" not in head.lower()  # no preflight is granted
        assert engine.stats()["num_submitted"] == 5


def test_keys():
    body = json.dumps({"prompt": "<|go|>"}).encode()
    engine = scripted(ids("Hi")).start()
    access, made = access_for("0.0.0.0", "sesame")
    with background(create_app(engine, access=access)) as url:
        for given in ({}, {"Authorization": "sesame"}, {"Authorization": "Bearer sesam"}, {"Authorization": "Bearer "}, {"Authorization": "Basic c2VzYW1l"}, {"x-api-key": "no"}):
            for method, path in (("POST", ROUTES[1]), ("GET", "/metrics"), ("GET", "/slots"), ("GET", "/props"), ("GET", "/v1/models"), ("GET", "/nope")):
                status, head, reply = bare(url, method, path, body if method == "POST" else b"", Host="box.example", Content_Type="application/json", **given)
                assert status == 401 and reply["error"]["type"] == "authentication_error" and "www-authenticate: bearer" in head.lower(), (given, path)
        for given in ({"Authorization": "Bearer sesame"}, {"authorization": "bearer  sesame"}, {"x-api-key": "sesame"}):
            assert bare(url, "POST", ROUTES[1], body, Host="box.example", Content_Type="application/json", **given)[0] == 200
        assert bare(url, "GET", "/health", Host="box.example")[0] == 200 and made is None
        client = openai.OpenAI(base_url=url + "/v1", api_key="sesame", max_retries=0, timeout=20)
        assert client.completions.create(model="m", prompt="<|go|>").choices[0].text == "Hi"
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()
    engine.stop()


@pytest.mark.parametrize(
    "options,env,expected",
    [
        ({}, None, "made"),
        ({}, "from the environment", "from the environment"),
        ({"api_key": "given"}, "from the environment", "given"),
        ({"no_api_key": True}, "from the environment", None),
        ({"host": "127.0.0.1"}, None, None),
    ],
)
def test_beyond_loopback_a_key_is_needed(monkeypatch, capsys, options, env, expected):
    "serve() itself, with a scripted engine in the place of a model."
    servers, make = [], server._uvicorn
    monkeypatch.setattr(server, "_uvicorn", lambda app: servers.append(make(app)) or servers[0])
    monkeypatch.setattr(server, "Engine", lambda *_: scripted(ids("Hi")))
    monkeypatch.setattr(server, "check_settings", lambda *_: None)
    monkeypatch.setenv("LITERATE_API_KEY", env or "")
    thread = threading.Thread(target=server.serve, args=("model.gguf",), kwargs={"host": "0.0.0.0", "port": 0} | options)
    thread.start()
    assert wait_for(lambda: servers and servers[0].started and servers[0].config.app.state.serving.status == "ok")
    out = capsys.readouterr().out
    try:
        url = "http://127.0.0.1:" + re.search(r"http://[\d.]+:(\d+)", out)[1]
        printed = re.search(r"API key, made for this run: (\S+)", out)
        assert bool(printed) == (expected == "made")
        key = printed[1] if printed else expected
        assert re.findall(r"Bearer ([^\"]+)", out) == ([] if expected is None else [printed[1] if printed else "YOUR_API_KEY" if "api_key" in options else "$LITERATE_API_KEY"])
        status = bare(url, "GET", "/v1/models", Host="localhost")[0]
        assert status == (401 if key else 200)
        if key:
            assert len(key) >= 5 and bare(url, "GET", "/v1/models", Host="localhost", Authorization=f"Bearer {key}")[0] == 200 and (env or "none") not in out
    finally:
        servers[0].should_exit = True
        thread.join(20)
    assert not thread.is_alive()


def test_large_headers():  # BC-062
    with served(ids("Hi")) as (url, _):
        s = socket.create_connection(address(url), timeout=20)
        try:
            s.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: " + b"a" * (1 << 20))
            assert s.recv(1000).split()[1] in (b"400", b"431")
        except ConnectionError:
            pass  # hung up on: as good
        finally:
            s.close()


def rest(s):
    "All that still comes, to the end of the connection."
    out = b""
    while piece := s.recv(65536):
        out += piece
    return out


def test_silent_clients_do_not_keep_others_out():
    with served(ids("Hi"), limits=Limits(connections=4, head_seconds=0.3)) as (url, _):
        silent = [socket.create_connection(address(url), timeout=20) for _ in range(20)]
        assert get(url, "/health") == (200, {"status": "ok"})
        assert rest(silent[-1]) == b""  # closed by the server
        with socket.create_connection(address(url), timeout=20) as s:
            s.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
            assert rest(s).startswith(b"HTTP/1.1 408 ")
        with socket.create_connection(address(url), timeout=20) as s:
            s.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert rest(s).startswith(b"HTTP/1.1 200 ")  # and closed after it
        for s in silent:
            s.close()


def test_one_connection_too_many_is_told_so():
    with served([ID["slow"]] * 200, limits=Limits(connections=4), seconds=0.02, max_num_seqs=2) as (url, engine):
        busy = [send(url, ROUTES[1], asked(ROUTES[1], max_tokens=200)) for _ in range(4)]
        assert wait_for(lambda: engine.stats()["num_running"] + engine.stats()["num_waiting"] == 4)
        with socket.create_connection(address(url), timeout=20) as s:
            raw = rest(s)
        assert raw.startswith(b"HTTP/1.1 503 ") and strict(raw.split(b"\r\n\r\n")[1])["error"]["code"] == "too_many_connections"
        for s in busy:
            s.close()
        assert wait_for(lambda: idle(engine))


@contextlib.contextmanager
def serving_megabytes(n, limits):
    "A server of answers of n MiB; its address, and the server."

    async def large(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(n << 20)})

    sock = server.listen("127.0.0.1", 0)
    running = connections.Server(connections.http_config(large, limits))
    thread = threading.Thread(target=running.run, kwargs={"sockets": [sock]})
    thread.start()
    try:
        yield sock.getsockname(), running
    finally:
        running.should_exit = True
        thread.join()
        sock.close()


def test_a_reader_that_stalls_is_dropped():
    with serving_megabytes(64, connections.ConnectionLimits(stall_seconds=0.3)) as (place, running):
        with socket.create_connection(place, timeout=20) as s:
            s.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert s.recv(1, socket.MSG_PEEK) == b"H"
            assert wait_for(lambda: not running.server_state.connections)


def test_a_reader_that_is_slow_gets_all_of_its_answer():
    with serving_megabytes(64, connections.ConnectionLimits(stall_seconds=1.0, head_seconds=1.0)) as (place, _):
        with socket.create_connection(place, timeout=20) as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            s.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            size = 0
            while piece := s.recv(1 << 20):
                size += len(piece)
                time.sleep(len(piece) / (16 << 20))  # four seconds in all
        assert size > 64 << 20


SHORT = """
import json, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from literate_engine import connections, server
async def hello(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"hello"})
sock = server.listen("127.0.0.1", 0)
print(sock.getsockname()[1], flush=True)
connections.Server(connections.http_config(hello, connections.ConnectionLimits())).run(sockets=[sock])
"""


def test_descriptors_do_not_run_out():
    with subprocess.Popen([sys.executable, "-c", SHORT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            url = f"http://127.0.0.1:{int(process.stdout.readline())}"
            silent = [socket.create_connection(address(url), timeout=20) for _ in range(200)]
            for _ in range(3):
                assert receive(send(url, "/", b"", "GET"))[2] == b"hello"
            for s in silent:
                s.close()
        finally:
            process.terminate()
            said = process.communicate()[1]
    assert said == ""


def test_that_descriptors_ran_out_is_one_line(caplog):
    class Loop:
        def default_exception_handler(self, context):
            self.told = context

        def time(self):
            return 5.0

    loop, complain = Loop(), connections.Complaints()
    for _ in range(3):
        complain(loop, {"message": "socket.accept() out of system resource", "exception": OSError(24, "Too many open files")})
    assert [r.getMessage()[:52] for r in caplog.records] == ["a connection could not be accepted: too many open fi"] and not hasattr(loop, "told")
    complain(loop, {"message": "other"})
    assert loop.told == {"message": "other"}


def test_an_answer_before_the_end_of_the_request_ends_the_connection():
    head = "POST {} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {}\r\nContent-Length: 99999999999\r\n\r\n"
    with served(ids("Hi"), limits=Limits(linger_seconds=0.3, linger_bytes=1 << 20)) as (url, _):
        for path, kind, status in ((ROUTES[1], "application/json", b"413"), (ROUTES[1], "text/plain", b"415"), ("/nope", "text/plain", b"404")):
            with socket.create_connection(address(url), timeout=20) as s:
                s.sendall(head.format(path, kind).encode() + b"{")
                raw = rest(s)
                assert raw.split()[1] == status and b"\r\nconnection: close\r\n" in raw and strict(raw.split(b"\r\n\r\n")[1])["error"]
        with socket.create_connection(address(url), timeout=20) as s:
            s.sendall(head.format(ROUTES[1], "application/json").encode())
            with pytest.raises(ConnectionError):
                for _ in range(1 << 14):
                    s.send(bytes(1 << 16))
        with socket.create_connection(address(url), timeout=20) as s:  # asks whether to send, and does not wait
            s.sendall(b"POST /nope HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 500000\r\n\r\n" + bytes(500000))
            assert rest(s).startswith(b"HTTP/1.1 404 ")
        c = http.client.HTTPConnection(*address(url), timeout=20)  # a whole body: the connection stays
        for path, status in (("/nope", 404), (ROUTES[1], 200), ("/nope", 404), (ROUTES[1], 200)):
            c.request("POST", path, json.dumps(asked(ROUTES[1])), {"Content-Type": "application/json", "Host": "localhost"})
            kept, r = c.sock, c.getresponse()
            r.read()
            assert r.status == status and (path == "/nope" or c.sock is kept)
        c.close()


def test_what_is_no_http_is_answered_in_json_and_not_logged(capfd):
    with served(ids("Hi")) as (url, _):
        with socket.create_connection(address(url), timeout=20) as s:
            s.sendall(b"nonsense\r\n\r\n")
            raw = rest(s)
        assert raw.startswith(b"HTTP/1.1 400 ") and strict(raw.split(b"\r\n\r\n")[1])["error"]["message"] == "the request is not valid HTTP"
        s = socket.create_connection(address(url), timeout=20)
        s.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==\r\n\r\n")
        assert s.recv(1000).startswith(b"HTTP/1.1 200 ")
        s.close()
    assert capfd.readouterr().err == ""


def test_loading_and_failed():
    future = Future()
    with background(create_app(future)) as url:
        assert get(url, "/health") == (503, {"status": "loading"})
        for path in ROUTES:
            assert post(url, path, asked(path))[0] == 503
        future.set_exception(ValueError("/home/someone/secret.gguf: no such file"))
        for status, reply in (get(url, "/health"), post(url, ROUTES[0], asked(ROUTES[0])), get(url, "/v1/models")):
            assert status in (500, 503) and "secret" not in json.dumps(reply)  # BC-132


def test_engine_failure_is_a_500_and_harms_no_other():
    def boom():
        raise RuntimeError("in /some/where/secret.py")

    with served([ID["Hi"], boom]) as (url, engine):
        for path in ROUTES:
            status, reply = post(url, path, asked(path))
            assert status == 500 and "secret" not in json.dumps(reply) and reply["error"]["type"] == "server_error"
            _, _, raw = receive(send(url, path, asked(path, stream=True)))
            assert b"error" in raw and b"secret" not in raw and raw.endswith(b"data: [DONE]\n\n")
            assert both(url, path, asked(path, max_tokens=1)) == ("Hi", "length")


def test_a_fault_of_the_server_is_a_500_without_traceback(monkeypatch):
    with served(ids("Hi")) as (url, engine):
        monkeypatch.setattr(engine, "props", lambda: 1 / 0)
        status, reply = get(url, "/props")
        assert status == 500 and "Traceback" not in json.dumps(reply) and "ZeroDivision" not in json.dumps(reply)


# ---- load and leaving


def test_a_full_engine_answers_429():
    with served(ids(*["x"] * 200), seconds=0.02, max_num_seqs=1, max_num_waiting=1) as (url, engine):
        busy = [send(url, ROUTES[0], asked(ROUTES[0])) for _ in range(2)]
        assert wait_for(lambda: engine.stats()["num_submitted"] == 2)
        for path in ROUTES:
            status, head, raw = receive(send(url, path, asked(path, stream=True)))
            assert status == 429 and strict(raw)["error"]["code"] == "engine_full" and "retry-after" in head.lower()
        assert post(url, ROUTES[0], asked(ROUTES[0], n=4))[0] == 429
        for s in busy:
            s.close()


@pytest.mark.parametrize("stream", [False, True])
def test_queued_requests_of_clients_that_left_never_run(stream):  # BC-104
    with served(ids(*["x"] * 60), seconds=0.02, max_num_seqs=1) as (url, engine):
        ran, step = [], engine.core.model.script

        def watch(tokens):
            ran.append(tokens[0])
            return step(tokens)

        engine.core.model.script = watch
        first = send(url, ROUTES[1], {"prompt": [1, GO], "max_tokens": 60})
        assert wait_for(lambda: engine.stats()["num_running"] == 1)
        queued = [send(url, ROUTES[1], {"prompt": [n, GO], "max_tokens": 2, "stream": stream}) for n in (2, 3, 4)]
        assert wait_for(lambda: engine.stats()["num_waiting"] == 3)
        queued[0].close()
        queued[1].close()
        assert receive(first)[0] == 200 and receive(queued[2])[0] == 200
        assert set(ran) == {1, 4}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
def test_leaving_ends_a_running_request_within_a_step(path, stream):
    with served(ids(*["x"] * 200), seconds=0.05) as (url, engine):
        s = send(url, path, asked(path, stream=stream, n=2))
        assert wait_for(lambda: engine.stats()["num_running"] == 2)
        s.close()
        at = engine.stats()["num_steps"]
        assert wait_for(lambda: idle(engine))
        assert engine.stats()["num_steps"] - at <= 4


def test_fifty_dropped_requests_leave_nothing_behind():  # BC-106
    with served(ids(*["x"] * 200), seconds=0.002, max_num_seqs=4) as (url, engine):
        post(url, ROUTES[0], asked(ROUTES[0], max_tokens=2))
        base, tasks, rng = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else None, get(url, "/tasks")[1], np.random.default_rng(0)
        for i in range(50):
            s = send(url, ROUTES[i % 2], asked(ROUTES[i % 2], stream=bool(rng.integers(2)), n=int(rng.integers(1, 3))))
            time.sleep(float(rng.uniform(0, 0.03)))
            if rng.integers(2):
                s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset instead of a goodbye
            s.close()
        assert wait_for(lambda: idle(engine))
        if base:
            assert wait_for(lambda: len(os.listdir("/proc/self/fd")) <= base)
        assert wait_for(lambda: get(url, "/tasks")[1] <= tasks)
        assert threading.active_count() < 64  # the workers of asyncio.to_thread stay
        assert both(url, ROUTES[0], asked(ROUTES[0], max_tokens=2)) == ("xx", "length")


def test_requests_at_once_each_get_their_own_answer():
    with served(ids("slow", " f", "ox"), seconds=0.002, max_num_seqs=8) as (url, _):
        got = [None] * 24

        def one(i):
            got[i] = both(url, ROUTES[i % 2], asked(ROUTES[i % 2]))

        threads = [threading.Thread(target=one, args=(i,)) for i in range(24)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert got == [("slow fox", "stop")] * 24


def test_a_server_that_stops_ends_its_streams():
    engine = scripted(ids(*["x"] * 200), seconds=0.02).start()
    try:
        with background(create_app(engine)) as url:
            sockets = [send(url, path, asked(path, stream=stream)) for path in ROUTES for stream in (True, False)]
            assert wait_for(lambda: engine.stats()["num_running"] == 4)
            start = time.monotonic()
        assert time.monotonic() - start < 1.5
        for s, stream in zip(sockets, (True, False) * 2):
            status, _, raw = receive(s)
            assert status == (200 if stream else 503) and b"the server is stopping" in raw and (not stream or raw.endswith(b"data: [DONE]\n\n"))
        assert wait_for(lambda: idle(engine))
    finally:
        engine.stop()


# ---- the official client


def test_openai_client():
    with served(ids("slow", " f", "ox")) as (url, _):
        client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=20)
        assert client.models.list().data[0].id == "scripted"
        messages = [{"role": "user", "content": "q"}]
        reply = client.chat.completions.create(model="scripted", messages=messages, n=2, logprobs=True, top_logprobs=2)
        assert [c.message.content for c in reply.choices] == ["slow fox"] * 2 and reply.choices[0].finish_reason == "stop" and reply.usage.total_tokens > 3
        assert reply.choices[0].logprobs.content[0].token == "slow" and len(reply.choices[0].logprobs.content[0].top_logprobs) == 2
        chunks = list(client.chat.completions.create(model="scripted", messages=messages, stream=True, stream_options={"include_usage": True}))
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "slow fox" and chunks[-1].usage == reply.usage.model_copy(
            update={"completion_tokens": chunks[-1].usage.completion_tokens, "total_tokens": chunks[-1].usage.total_tokens}
        )
        with client.chat.completions.stream(model="scripted", messages=messages) as stream:
            final = stream.get_final_completion().choices[0].message
            assert final.content == "slow fox"
        for answer in (reply.choices[0].message, final, reply.choices[0].message.model_dump(), reply.choices[0].message.to_dict(), final.model_dump()):
            again = client.chat.completions.create(model="scripted", messages=[*messages, answer, {"role": "user", "content": "and?", "name": "me"}])
            assert again.choices[0].message.content == "slow fox"
            assert again.usage.prompt_tokens == client.chat.completions.create(model="scripted", messages=[*messages, {"role": "assistant", "content": "slow fox"}, {"role": "user", "content": "and?"}]).usage.prompt_tokens
        old = client.completions.create(model="scripted", prompt=["<|go|>", "a<|go|>"], logprobs=1)
        assert [c.text for c in old.choices] == ["slow fox"] * 2 and [c.index for c in old.choices] == [0, 1] and old.choices[0].logprobs.tokens[0] == "slow"
        assert "".join(c.choices[0].text for c in client.completions.create(model="scripted", prompt="<|go|>", stream=True)) == "slow fox"
        for kind, more in (
            (openai.BadRequestError, {"temperature": 5}),
            (openai.BadRequestError, {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        ):
            with pytest.raises(kind):
                client.chat.completions.create(model="scripted", messages=messages, **more)
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("nope")


def test_openai_client_sees_a_failure_in_a_stream():
    def boom():
        raise RuntimeError

    with served([ID["Hi"], boom]) as (url, _):
        client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=20)
        with pytest.raises(openai.APIError, match="failed"):
            list(client.chat.completions.create(model="m", messages=[{"role": "user", "content": "q"}], stream=True))


# ---- as a program


def run(*args, **more):
    return subprocess.Popen([sys.executable, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1], **more)


def test_a_wrong_model_is_one_line_and_exit_code_2(tmp_path):
    (tmp_path / "bad.gguf").write_bytes(b"not a model at all, not at all")
    for model in (str(tmp_path / "bad.gguf"), "no-such-model"):
        p = run("-m", "literate_engine.server", model, "--port", "0")
        _, err = p.communicate(timeout=120)
        assert p.returncode == 2 and err.strip().count("\n") == 0 and "Traceback" not in err, err


@pytest.mark.slow
@pytest.mark.model
def test_serve_the_real_model(smollm2):
    p = run("-m", "literate_engine.server", str(smollm2), "--port", "0")
    try:
        url = re.search(r"http://[\d.:]+", p.stdout.readline())[0]
        assert get(url, "/health")[0] in (200, 503)
        assert wait_for(lambda: get(url, "/health")[0] == 200 or p.poll() is not None, 300) and p.poll() is None
        assert "curl" in p.stdout.readline() + p.stdout.readline()
        body = json.dumps({"messages": [{"role": "user", "content": "What is the capital of France? One word."}], "max_tokens": 20}).encode()
        with urllib.request.urlopen(urllib.request.Request(url + ROUTES[0], body, {"Content-Type": "application/json"}), timeout=120) as r:
            reply = json.load(r)
        assert "Paris" in reply["choices"][0]["message"]["content"]
        assert both(url, ROUTES[1], {"prompt": "The capital of France is", "max_tokens": 5})[0].strip().startswith("Paris")
        p.send_signal(signal.SIGINT)
        assert p.wait(30) == 0 and "Traceback" not in p.stderr.read()
    finally:
        p.kill()


@pytest.mark.slow
@pytest.mark.model
def test_many_clients_for_a_while(smollm2):
    "tests/soak.py, shortened: equal answers alone and in company, nothing left over."
    p = run("tests/soak.py", "--model", str(smollm2), "--seconds", "10", "--num-cases", "16")
    out, err = p.communicate(timeout=300)
    summary = json.loads(out)
    assert p.returncode == 0 and not summary["faults"], (summary, err)
    assert summary["whole"] > 16 and summary["mean_batch"] > 8 and summary["aborted"] <= summary["disconnects"] <= summary["left"]


def test_short_answers_do_not_wait_for_an_acknowledgement():
    with server.listen("127.0.0.1", 0) as listening:
        assert listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
