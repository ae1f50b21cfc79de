"""Tiny models with logits from independent implementations: every architecture, every position of every prompt, on every device, however the tokens are cut.

The repository holds a selection (tools/fixtures.py). With LITERATE_FIXTURES=DIR, a folder with the whole set unpacked (models/, extra/, quant/), all of it runs.
With LITERATE_RECORD=1 the errors are written to data/bench/architectures.json, which the chapter on architectures shows."""
import json
import os

import numpy as np
import pytest

from literate_engine.core import data_dir, fixture, rel_err, save_bench
from literate_engine.gguf import GGUFFile
from literate_engine.kvcache import CacheHandle
from literate_engine.model import Model, prompt_logits
from literate_engine.tokenizer import Tokenizer

SHARED = fixture("llama.gguf").parent.parent
LOGITS = {"glm4_moe_nextn": "glm4_moe"}                # a file with a block for the token after the next: the same logits
FILES = {"gpt_oss_notrunc": "gpt_oss"}
OPTIONS = {"gpt_oss": dict(yarn_truncate=True), "gpt_oss.MXFP4_MOE": dict(yarn_truncate=True)}      # these logits are with the ramp rounded, as llama.cpp does it
APART = {"olmoe": 2e-5, "gemma4": 1e-4, "gemma4moe": 1e-4, "gemma4ple": 1e-4}       # implementations part: olmoe's epsilon was 1e-6 in one, 1e-5 in the file; gemma4: float32 rounding
ATTEMPTS = [dict(device="ref"), dict(activations="float32"), dict(activations="float32", num_threads=2)]
SOON = {"deepseek_v2", "deepseek_v3", "deepseek_v3_yarn", "gemma4", "gemma4moe", "gemma4ple", "qwen3next", "qwen35", "qwen35moe", "mamba", "mamba2", "nemotron_h", "nemotron_h_moe",
        "jamba", "falcon_h1", "granitehybrid", "lfm2", "qwen3next.Q4_K_M"}

def stems(*folders): return sorted({p.name.removesuffix(".npz") for f in folders for p in (SHARED/f).glob("*.npz")} - SOON - {"quant_blocks"})
FLOAT, QUANT = stems("models", "extra") + list(LOGITS), stems("quant")
REAL = {"smollm2": "smollm2_generation.json", "gemma3": "gemma3_270m_generation.json"}
GAP = {"smollm2": .3, "gemma3": .5}                    # int8: ids must agree until the reference's two best logits are this close

def load(name, **options): return Model(fixture(f"{FILES.get(name, name)}.gguf"), max_model_len=160, max_num_seqs=128, **OPTIONS.get(name, {}), **options)

def expected(name): return np.load(fixture(f"{LOGITS.get(name, name)}.npz"))

@pytest.fixture(scope="module")
def record():
    "Errors found, by fixture; kept if that is asked for"
    rows = {}
    yield rows
    if os.environ.get("LITERATE_RECORD"): save_bench("architectures", [rows[k] for k in sorted(rows)])

def prompts(npz):
    for k in range(9):
        if f"p{k}_ids" in npz: yield npz[f"p{k}_ids"].tolist(), npz[f"p{k}_logits_torch" if f"p{k}_logits_torch" in npz else f"p{k}_logits"], k

def greedy(model, ids, steps):
    "Greedy ids of one sequence, and the logits that chose the first of them"
    handle, out, first = CacheHandle(), [], None
    assert model.pool.grow(handle, len(ids) + steps)
    limit = len(model.batch.token_ids)
    done, todo = 0, list(ids)
    for _ in range(steps):
        while todo:
            part, todo = todo[:limit], todo[limit:]
            model.batch.fill([(part, done, handle.block_ids, "last", handle.slot)])
            logits, done = model.forward(model.batch)[0], done + len(part)
        if first is None: first = logits.copy()
        out.append(int(logits.argmax()))
        todo = [out[-1]]
    model.pool.release(handle)
    return out, first

@pytest.mark.parametrize("name", FLOAT)
@pytest.mark.parametrize("options", ATTEMPTS, ids=["ref", "cpu1", "cpu2"])
def test_float_fixture(name, options, record):
    want, model, ref = expected(name), load(name, num_kv_blocks=60, **options), options.get("device") == "ref"
    bound, by_position, alone = 3e-4 if "gemma4" in name else 1e-4, [], []
    equal = (lambda a, b: rel_err(a, b) < 1e-5) if ref else (lambda a, b: (a == b).all())
    for ids, logits, k in prompts(want):
        got = prompt_logits(model, ids)
        assert rel_err(got, logits) < bound
        by_position += [rel_err(g, w) for g, w in zip(got, logits)]
        alone.append((ids, got))
        for chunk in (7, 1): assert equal(prompt_logits(model, ids, chunk), got), f"steps of {chunk}"
        ids_got, _ = greedy(model, ids, 32)
        for got_id, want_id, gap in zip(ids_got, want[f"p{k}_greedy_torch"], want[f"p{k}_greedy_gap"]):
            if got_id != want_id:
                assert gap < 1e-3
                break
    assert np.median(by_position) < APART.get(name, 1e-5)
    (a, got_a), (b, got_b) = alone[:2]
    together = beside(model, a, b)
    assert equal(together[:len(b)], got_b) and equal(together[len(b):], got_a)
    row = record.setdefault(name, {"fixture": name, "architecture": model.config.arch, "positions": len(by_position)})
    row["ref" if ref else f"cpu, {options.get('num_threads', 1)} thread"] = max(by_position)
    model.close()

def beside(model, a, b):
    "Logits of b and then of a, computed in one step with a third sequence between them"
    held, seqs = [CacheHandle() for _ in range(3)], ((b, "all"), ([5]*9, None), (a, "all"))
    for h, (ids, _) in zip(held, seqs): assert model.pool.grow(h, len(ids))
    model.batch.fill([(ids, 0, h.block_ids, want, h.slot) for h, (ids, want) in zip(held, seqs)])
    logits = model.forward(model.batch).copy()
    for h in held: model.pool.release(h)
    return logits

@pytest.mark.parametrize("name", QUANT)
def test_quantised_fixture(name):
    want = expected(name)
    foreign = [p["rel_err_llamacpp_native_int8_activations"] for p in json.loads(fixture(f"{name}.json").read_text())["prompts"]]
    for options, bound in ((dict(device="ref"), 1e-5), (dict(activations="float32"), 1e-4), (dict(activations="int8"), 1.25*max(foreign))):
        model, errors, by_position = load(name, num_kv_blocks=60, **options), [], []
        for ids, logits, _ in prompts(want):
            got = prompt_logits(model, ids)
            errors.append(rel_err(got, logits))
            by_position += [rel_err(g, w) for g, w in zip(got, logits)]
            if options.get("device") == "ref": continue
            assert (prompt_logits(model, ids, 7) == got).all() and (prompt_logits(model, ids, 1) == got).all()
            assert (beside(model, ids[:4], ids)[:len(ids)] == got).all()
        mixture = any(layer.router for layer in model.config.layers)
        if mixture and options.get("activations") == "int8": assert np.median(by_position) < 4e-2       # a rounding that flips an expert moves a position far
        else: assert max(errors) < bound, (options, errors)
        model.close()

def test_types_without_a_kernel_are_reported():
    for name, notes in (("gpt_oss.MXFP4_MOE", []), ("llama.IQ3_S", ["IQ3_S has no kernel of its own: its values are held as CODED"])):
        model = load(name)
        assert model.notes == notes
        model.close()

@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("mode", ["ref", "float32", "int8"])
def test_real_model(name, mode, request):
    path = request.getfixturevalue(name)
    options = dict(device="ref") if mode == "ref" else dict(activations=mode, num_threads=2)
    model = Model(path, max_model_len=1024, max_num_seqs=4, max_num_batched_tokens=512, **options)
    cases = json.loads((data_dir()/"fixtures/real"/REAL[name]).read_text())["prompts"]
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
