"""Fixtures from independent implementations: every position of every prompt, on every device, however the tokens are cut.

The repository holds a selection. With LITERATE_FIXTURES=DIR, a folder with the whole set unpacked (models/, extra/, quant/), the rest runs too."""
import json
import os
from pathlib import Path

import numpy as np
import pytest

from literate_engine.core import data_dir, rel_err
from literate_engine.gguf import GGUFFile
from literate_engine.linear_lowbit import LINEAR_FORMATS
from literate_engine.model import Model, prompt_logits
from literate_engine.tokenizer import Tokenizer

FIXTURES = data_dir()/"fixtures"
FLOAT = ["llama", "llama3rope", "gemma3", "mistral", "qwen2", "qwen3", "qwen3_yarn", "smollm3", "olmo2", "granite", "ernie4_5", "seed_oss", "gemma2", "cohere2", "starcoder2",
         "glm4_moe_nextn", "llama4"]
QUANT = ["llama.Q4_1", "llama.Q5_0", "llama.Q8_0", "llama.Q4_K_M", "qwen3moe.Q4_K_M", "gpt_oss.MXFP4_MOE"]
MORE = ["qwen3moe", "mixtral", "qwen2moe", "olmoe", "glm4_moe", "gpt_oss", "gpt_oss_notrunc", "minimax_m2"] if "LITERATE_FIXTURES" in os.environ else []
OPTIONS = {"gpt_oss": dict(yarn_truncate=True), "gpt_oss.MXFP4_MOE": dict(yarn_truncate=True)}      # these logits are with the ramp rounded, as llama.cpp does it
APART = {"olmoe": 2e-5}                                # the two implementations part by 1.3e-5: one took the norms' epsilon as 1e-6, the file says 1e-5
REAL = {"smollm2": "smollm2_generation.json", "gemma3": "gemma3_270m_generation.json"}
GAP = {"smollm2": .3, "gemma3": .5}                    # int8: ids must agree until the reference's two best logits are this close

def find(name, kind):
    "Path of a fixture's model or of its logits"
    if kind == "gguf": name = name.removesuffix("_notrunc")
    folders = [FIXTURES/"models", FIXTURES/"quant"] + [Path(os.environ["LITERATE_FIXTURES"])/f for f in ("models", "extra", "quant") if MORE]
    return next((p for f in folders if (p := f/f"{name}.{kind}").exists()), folders[0]/f"{name}.{kind}")

def load(name, **options): return Model(find(name, "gguf"), max_model_len=160, max_num_seqs=128, **OPTIONS.get(name, {}), **options)

def prompts(npz):
    for k in range(9):
        if f"p{k}_ids" in npz: yield npz[f"p{k}_ids"].tolist(), npz[f"p{k}_logits_torch" if f"p{k}_logits_torch" in npz else f"p{k}_logits"], k

def greedy(model, ids, steps):
    "Greedy ids of one sequence, and the logits that chose the first of them"
    blocks, out, first = model.pool.allocate(-(-(len(ids) + steps)//16)), [], None
    limit = len(model.batch.token_ids)
    done, todo = 0, list(ids)
    for _ in range(steps):
        while todo:
            part, todo = todo[:limit], todo[limit:]
            model.batch.fill([(part, done, blocks, "last")])
            logits, done = model.forward(model.batch)[0], done + len(part)
        if first is None: first = logits.copy()
        out.append(int(logits.argmax()))
        todo = [out[-1]]
    model.pool.free(blocks)
    return out, first

@pytest.mark.parametrize("name", FLOAT + MORE)
@pytest.mark.parametrize("options", [dict(device="ref"), dict(activations="float32"), dict(activations="float32", num_threads=2)], ids=["ref", "cpu1", "cpu2"])
def test_float_fixture(name, options):
    want, model = np.load(find(name, "npz")), load(name, **options)
    bound = APART.get(name, 1e-5) if options.get("device") == "ref" else 1e-4
    errors = []
    for ids, logits, k in prompts(want):
        got = prompt_logits(model, ids)
        assert rel_err(got, logits) < bound
        errors += [rel_err(g, w) for g, w in zip(got, logits)]
        for chunk in (7, 1):
            again = prompt_logits(model, ids, chunk)
            assert rel_err(again, got) < 1e-5 if options.get("device") == "ref" else (again == got).all()
        gaps = want[f"p{k}_greedy_gap"]
        ids_got, _ = greedy(model, ids, 32)
        for got_id, want_id, gap in zip(ids_got, want[f"p{k}_greedy_torch"], gaps):
            if got_id != want_id:
                assert gap < 1e-3
                break
    assert np.median(errors) < 1e-5
    model.close()

@pytest.mark.parametrize("name", QUANT)
def test_quantised_fixture(name):
    want = np.load(find(name, "npz"))
    foreign = [p["rel_err_llamacpp_native_int8_activations"] for p in json.loads(find(name, "json").read_text())["prompts"]]
    for options, bound in ((dict(device="ref"), 1e-5), (dict(activations="float32"), 1e-4), (dict(activations="int8"), 1.25*max(foreign))):
        model, errors, by_position = load(name, **options), [], []
        for ids, logits, _ in prompts(want):
            got = prompt_logits(model, ids)
            errors.append(rel_err(got, logits))
            by_position += [rel_err(g, w) for g, w in zip(got, logits)]
            if options.get("device") != "ref": assert (prompt_logits(model, ids, 7) == got).all() and (prompt_logits(model, ids, 1) == got).all()
        mixture = any(layer.router for layer in model.config.layers)
        if mixture and options.get("activations") == "int8": assert np.median(by_position) < 4e-2       # a rounding that flips an expert moves a position far
        else: assert max(errors) < bound, (options, errors)
        model.close()

def test_types_without_a_kernel_are_reported():
    model = load("gpt_oss.MXFP4_MOE")
    assert model.notes == ([] if "MXFP4" in LINEAR_FORMATS else ["MXFP4 has no CPU kernel: its matrices are held as F32"])
    model.close()

@pytest.mark.parametrize("name", ["llama", "glm4_moe_nextn", "llama4", "qwen3moe.Q4_K_M", "gpt_oss.MXFP4_MOE"])
def test_batched_equals_alone(name):
    want = np.load(find(name, "npz"))
    for options in (dict(activations="float32"), dict(activations="int8"), dict(activations="int8", num_threads=2)):
        model = load(name, num_kv_blocks=40, **options)
        a, b = want["p0_ids"].tolist(), want["p1_ids"].tolist()
        alone = [prompt_logits(model, ids) for ids in (a, b)]
        blocks = [model.pool.allocate(10) for _ in range(3)]
        model.batch.fill([(b, 0, blocks[0], "all"), ([5]*9, 0, blocks[1], None), (a, 0, blocks[2], "all")])
        got = model.forward(model.batch)
        assert (got[:len(b)] == alone[1]).all() and (got[len(b):] == alone[0]).all()
        model.close()

@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("mode", ["ref", "float32", "int8"])
def test_real_model(name, mode, request):
    path: Path = request.getfixturevalue(name)
    options = dict(device="ref") if mode == "ref" else dict(activations=mode, num_threads=2)
    model = Model(path, max_model_len=1024, max_num_seqs=4, max_num_batched_tokens=512, **options)
    cases = json.loads((FIXTURES/"real"/REAL[name]).read_text())["prompts"]
    for case in cases:
        top = case["f32"]["top20"]
        steps = 48 if mode != "ref" else 8 if len(case["ids"]) < 100 else 1         # NumPy takes a while
        chosen, logits = greedy(model, case["ids"], steps)
        assert rel_err(logits[top["ids"]], np.array(top["logits"])) < (5e-2 if mode == "int8" else 1e-4), case["name"]
        for n, (g, w) in enumerate(zip(chosen, case["f32"]["greedy"])):
            if g != w:
                gap = case["f32"]["gap"][n]
                assert gap < (GAP[name] if mode == "int8" else 1e-3), (case["name"], n, gap)
                break
    model.close()

def log_softmax(x): return x - np.logaddexp.reduce(x.astype(np.float64), axis=-1, keepdims=True)

@pytest.mark.parametrize("name, known", [("smollm2", "smollm2"), ("gemma3", "gemma3-270m")])
def test_int8_quality(name, known, request):
    "What rounding activations to 8 bits costs, in KL to our float32 mode, against what it costs llama.cpp on the same file and text"
    path, peer = request.getfixturevalue(name), json.loads((data_dir()/"quality/llama_cpp.json").read_text())
    with GGUFFile(path) as file: ids = Tokenizer.from_gguf(file).encode((data_dir()/"quality/text.txt").read_text())[:peer["positions"]]
    logits = {}
    for activations in ("float32", "int8"):
        model = Model(path, activations=activations, max_model_len=512, max_num_seqs=16, num_threads=2)
        logits[activations] = log_softmax(prompt_logits(model, ids))
        model.close()
    kl = (np.exp(logits["float32"])*(logits["float32"] - logits["int8"])).sum(-1).mean()
    assert len(ids) == peer["positions"] >= 320
    assert kl < 1.1*peer["models"][known]["peer_mean_kl"], kl
