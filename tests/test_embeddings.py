"""Embeddings: against hidden states recovered from foreign logits, in company, cut, preempted, and over the route."""
import base64

import numpy as np
import openai
import pytest
from conftest import hold
from test_server import GO, ids, post, send, served

from literate_engine.core import assert_close, fixture, rel_err
from literate_engine.engine import scripted_engine
from literate_engine.gguf import GGUFFile
from literate_engine.llm import LLM, Pool, default_pooling
from literate_engine.quants import QuantTensor
from literate_engine.sampling import SamplingParams

FIXTURES = ["llama", "qwen3", "gemma3", "glm4_moe", "qwen3next", "mamba2"]


def foreign_hidden(name, prompt):
    "Ids, and the hidden states that give the fixture's logits, by solving for them; None if the output matrix does not determine them."
    file, want = GGUFFile(fixture(f"{name}.gguf")), np.load(fixture(f"{name}.npz"))
    w = QuantTensor.from_gguf(file, "output.weight" if "output.weight" in file.tensors else "token_embd.weight").dequantize().astype(np.float64)
    file.close()
    logits = want[f"p{prompt}_logits" if f"p{prompt}_logits" in want else f"p{prompt}_logits_torch"].astype(np.float64)
    h, *_ = np.linalg.lstsq(w, logits.T, rcond=None)
    assert rel_err(h.T @ w.T, logits) < 1e-4 and len(w) > w.shape[1]
    return want[f"p{prompt}_ids"].tolist(), h.T


@pytest.mark.parametrize("name", FIXTURES)
@pytest.mark.parametrize("options", [{"device": "ref"}, {"activations": "float32", "num_threads": 2, "max_num_batched_tokens": 13}], ids=["ref", "cpu"])
def test_the_hidden_states_behind_the_logits_of_others(name, options):
    cases = [foreign_hidden(name, k) for k in (0, 1)]
    with LLM(fixture(f"{name}.gguf"), max_model_len=128, **options) as llm:
        for pooling, pooled in (("mean", lambda h: h.mean(0)), ("last", lambda h: h[-1]), ("cls", lambda h: h[0])):
            want = np.array([pooled(h) for _, h in cases])
            got = llm.embed([i for i, _ in cases], pooling, normalize=False)
            assert got.dtype == np.float32 and got.shape == want.shape and rel_err(got, want) < 1e-3
            unit = llm.embed([i for i, _ in cases], pooling)
            assert_close(unit, want / np.linalg.norm(want, axis=1, keepdims=True), 1e-3)


@pytest.mark.parametrize("name", FIXTURES)
def test_in_company_and_cut_the_same_bits(name):
    rng = np.random.default_rng(1)
    texts = [rng.integers(3, 60, n).tolist() for n in (1, 2, 33, 16, 50, 7, 64)]
    bits = []
    for options in ({"num_threads": 1}, {"num_threads": 2, "max_num_batched_tokens": 9, "max_num_seqs": 3}):
        with LLM(fixture(f"{name}.gguf"), max_model_len=128, activations="float32", **options) as llm:
            bits += [llm.embed(texts, p).tobytes() for p in ("mean", "last")] + [b"".join(llm.embed(t, p).tobytes() for t in texts) for p in ("mean", "last")]
    assert len(set(bits)) == 2


def test_beside_generation_and_after_preemption():
    with LLM(scripted_engine(lambda t: 65 + len(t) % 7, num_blocks=8, max_num_batched_tokens=13, max_num_seqs=4)) as llm:
        alone, text = llm.embed([[i] * (5 + i) for i in range(12)]), llm.generate("q", SamplingParams(max_tokens=40))[0].text
        done = []
        hold(llm.engine)                                                       # together they need more blocks than there are
        for _ in range(3): llm.engine.submit([113], SamplingParams(max_tokens=40), done.append)
        assert (llm.embed([[i] * (5 + i) for i in range(12)]) == alone).all()
        assert llm.generate("q", SamplingParams(max_tokens=40))[0].text == text
        while sum(o.finish_reason is not None for o in done) < 3: pass
        assert llm.engine.stats()["num_preemptions"] > 0 and llm.engine.stats()["num_free_kv_blocks"] == 7
        assert llm.embed([]).shape == (0, 257)


def test_preempted_in_the_middle_it_begins_anew():
    p = Pool("mean", 2, normalize=False)
    p.add(0, np.array([[1, 2], [3, 4]], np.float32))
    p.add(0, np.array([[1, 2]], np.float32))
    p.add(1, np.array([[3, 4], [5, 6]], np.float32))
    assert p.vector().tolist() == [3, 4]


def test_what_the_file_says(caplog):
    with LLM(scripted_engine(lambda t: 65)) as llm:
        for value, want in ((0, "mean"), (1, "mean"), (2, "cls"), (3, "last"), (None, "mean")):
            llm.engine.metadata = {} if value is None else {"scripted.pooling_type": value}
            assert default_pooling(llm.engine) == want
        llm.engine.metadata = {"scripted.pooling_type": 4}
        for wrong, word in ((lambda: llm.embed("a"), "pooling_type is 4"), (lambda: llm.embed("a", "max"), "'max'"), (lambda: llm.embed("a" * 65, "mean"), "max_model_len = 64"), (lambda: llm.embed([[999]], "mean"), "999"), (lambda: llm.embed(5, "mean"), "int")):
            with pytest.raises(ValueError, match=word): wrong()


def test_the_route():
    with served(max_num_seqs=2, max_num_waiting=2) as (url, engine):
        status, reply = post(url, "/v1/embeddings", {"input": "ab", "model": "any", "user": "me"})
        v = reply["data"][0]["embedding"]
        assert status == 200 and reply["object"] == "list" and reply["usage"] == {"prompt_tokens": 2, "total_tokens": 2} and reply["model"] == "scripted"
        assert reply["data"][0]["object"] == "embedding" and reply["data"][0]["index"] == 0 and abs(v[97] - 0.5**0.5) < 1e-6 and sum(x != 0 for x in v) == 2
        coded = post(url, "/v1/embeddings", {"input": "ab", "encoding_format": "base64"})[1]["data"][0]["embedding"]
        assert np.frombuffer(base64.b64decode(coded), "<f4").tolist() == v
        for given, n in ((["a", "b"], 2), ([97, 98], 1), ([[97], [98], [GO]], 3), (["x"], 1)):
            status, reply = post(url, "/v1/embeddings", {"input": given})
            assert status == 200 and [d["index"] for d in reply["data"]] == list(range(n))
        assert reply["data"][0]["embedding"][ord("x")] == 1
        for body, param in (({}, "input"), ({"input": ""}, "input"), ({"input": []}, "input"), ({"input": ["a", ""]}, "input"), ({"input": [9**9]}, "input"), ({"input": [1.5]}, "input"), ({"input": ["a", 1]}, "input"), ({"input": "a" * 300}, "input"),
                            ({"input": "a", "dimensions": 4}, "dimensions"), ({"input": "a", "encoding_format": "int8"}, "encoding_format"), ({"input": "a", "temperature": 1}, "temperature"), ({"input": ["a"] * 2049}, "input"),
                            ({"input": "a", "model": 5}, "model"), ({"input": None}, "input"), ({"input": {"a": 1}}, "input")):
            status, reply = post(url, "/v1/embeddings", body)
            assert status == 400 and (reply["error"]["param"] or "").startswith(param) and param in reply["error"]["message"] + param, (body, reply)
        assert post(url, "/v1/embeddings", {"input": ["a"] * 9})[0] == 429
        engine.metadata = {"scripted.pooling_type": 4}
        assert post(url, "/v1/embeddings", {"input": "a"})[1]["error"]["code"] == "no_embeddings"


def test_more_texts_than_the_queue_and_a_client_that_leaves():
    from literate_engine.server import Limits
    with served(limits=Limits(choices=3), max_num_seqs=2, max_num_waiting=4) as (url, engine):
        status, reply = post(url, "/v1/embeddings", {"input": [[i] for i in range(50)]})
        assert status == 200 and [np.argmax(d["embedding"]) for d in reply["data"]] == list(range(50))
        send(url, "/v1/embeddings", {"input": [[1] * 200] * 500}).close()


def test_the_official_client():
    with served(ids("Hi"), max_num_seqs=4) as (url, _):
        client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=20)
        for more in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
            reply = client.embeddings.create(model="m", input=["ab", "ba", "c"], **more)
            v = [np.frombuffer(base64.b64decode(d.embedding), "<f4") if isinstance(d.embedding, str) else np.array(d.embedding) for d in reply.data]
            assert reply.usage.prompt_tokens == 5 and np.allclose(v[0], v[1]) and v[0] @ v[2] == 0 and abs(v[0] @ v[1] - 1) < 1e-6
        with pytest.raises(openai.BadRequestError, match="dimensions"): client.embeddings.create(model="m", input="a", dimensions=3)


def test_the_real_model(smollm2):
    texts = ["The cat sat on the mat.", "A cat is sitting on a rug.", "Interest rates rose by half a percent."]
    with LLM(smollm2, max_model_len=256, num_threads=2) as llm: fast = llm.embed(texts)
    with LLM(smollm2, max_model_len=256, device="ref") as llm: slow = llm.embed(texts)
    assert (fast * slow).sum(1).min() > 0.99 and fast.shape == (3, 576)
    assert fast[0] @ fast[1] > fast[0] @ fast[2]


@pytest.mark.parametrize("device", ["ref", "cpu"])
def test_a_step_that_wants_no_logits(device):
    options = {"device": device, "activations": "float32", "max_model_len": 128}
    with LLM(fixture("llama.gguf"), **options) as llm: want = llm.generate(list(range(3, 40)), SamplingParams(max_tokens=4))[0].token_ids
    with LLM(fixture("llama.gguf"), max_num_batched_tokens=8, **options) as llm: assert llm.generate(list(range(3, 40)), SamplingParams(max_tokens=4))[0].token_ids == want
