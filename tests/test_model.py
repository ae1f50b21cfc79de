"""Tiny models with logits from independent implementations: every architecture, every position of every prompt, on every device, however the tokens are cut.

The repository holds a selection (tools/fixtures.py). With LITERATE_FIXTURES=DIR, a folder with the whole set unpacked (models/, extra/, quant/), all of it runs.
With LITERATE_RECORD=1 the errors are written to data/bench/architectures.json."""
import json
import os

import numpy as np
import pytest

from literate_engine.core import data_dir, fixture, rel_err, save_bench
from literate_engine.gguf import GGUFFile, write_gguf
from literate_engine.blocks import CacheHandle
from literate_engine.config import ModelConfig
from literate_engine.model import Model, load_weights, prompt_logits
from literate_engine.quants import QUANT_TYPES, QuantTensor, quantize
from literate_engine.recorder import CpuWeights, cpu_weight_bytes
from literate_engine.scheduler import Request, Scheduler
from literate_engine.tokenizer import Tokenizer

SHARED = fixture("llama.gguf").parent.parent
LOGITS = {"glm4_moe_nextn": "glm4_moe"}                # a file with a block for the token after the next: the same logits
FILES = {"gpt_oss_notrunc": "gpt_oss"}
OPTIONS = {"gpt_oss": dict(yarn_truncate=True), "gpt_oss.MXFP4_MOE": dict(yarn_truncate=True)}      # these logits are with the ramp rounded, as llama.cpp does it
APART = {"olmoe": 2e-5, "gemma4": 1e-4, "gemma4moe": 1e-4, "gemma4ple": 1e-4}       # implementations part: olmoe's epsilon was 1e-6 in one, 1e-5 in the file; gemma4: float32 rounding
ATTEMPTS = [dict(device="ref"), dict(activations="float32"), dict(activations="float32", num_threads=2)]

def stems(*folders): return sorted({p.name.removesuffix(".npz") for f in folders for p in (SHARED/f).glob("*.npz")} - {"quant_blocks"})
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
    apart = max(APART.get(name, 1e-5), 1e-5 if model.states is None else 1e-4)          # NumPy sums in another order for another number of rows; a state carries that on
    equal = (lambda a, b: rel_err(a, b) < apart) if ref else (lambda a, b: (a == b).all())
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

@pytest.mark.parametrize("name", ["mamba", "mamba2", "nemotron_h_moe", "falcon_h1", "lfm2"])
@pytest.mark.parametrize("options", ATTEMPTS, ids=["ref", "cpu1", "cpu2"])
def test_states_go_on_where_they_were(name, options):                               # BC-084, BC-086
    "A chunk after position 0 continues from the state; a checkpoint put back is the state; what another sequence left in a slot or has next to it is not seen"
    model, ids = load(name, num_kv_blocks=60, **options), expected(name)["p1_ids"].tolist()
    equal = (lambda a, b: rel_err(a, b) < 1e-4) if options.get("device") == "ref" else (lambda a, b: (a == b).all())
    for a in [*model.states.conv, *model.states.ssm]:
        if a is not None: a[:] = np.nan                                               # a slot's last owner
    whole, first, again, other = prompt_logits(model, ids), CacheHandle(), CacheHandle(), CacheHandle()
    def step(*seqs):
        model.batch.fill([(part, done, h.block_ids, "all", h.slot) for h, part, done in seqs])
        return model.forward(model.batch).copy()
    for h in (first, again, other): assert model.pool.grow(h, len(ids))
    head = step((first, ids[:20], 0))
    kept = model.states.checkpoint(first.slot, 20)
    tail = step((other, ids[::-1][:9], 0), (first, ids[20:], 20))[9:]
    assert equal(np.concatenate([head, tail]), whole)
    assert model.states.rewind(first.slot, 30) == 20 and equal(step((first, ids[20:], 20)), whole[20:])
    step((again, ids[:20], 0))                                                        # another sequence with the same beginning
    model.states.restore(again.slot, kept)
    assert equal(step((again, ids[20:], 20), (other, ids[:3], 9))[:-3], whole[20:])
    for h in (first, again, other): model.pool.release(h)
    assert model.states.num_free == model.states.num_slots and model.pool.num_free == model.pool.num_blocks - 1
    model.states.check_integrity()
    model.close()

def test_experts_in_a_latent_space(tmp_path):
    "A mixture whose experts work between two projections: here these permute the stream and widen it, the experts are permuted alike, so the logits are those of the original"
    with GGUFFile(fixture("nemotron_h_moe.gguf")) as f:
        tensors = {name: QuantTensor.from_gguf(f, name).dequantize() for name in f.tensors}
        metadata = {k: f.metadata[k] for k in f.metadata} | {"nemotron_h_moe.moe_latent_size": 80}
    rng, want = np.random.default_rng(0), expected("nemotron_h_moe")
    place = np.eye(80, dtype=np.float32)[rng.permutation(80)[:64]]                                     # [64, 80]: where each value of the stream goes
    for i in (1, 4):
        up, down = (tensors[f"blk.{i}.ffn_{part}_exps.weight"] for part in ("up", "down"))             # [12, 48, 64], [12, 64, 48]
        tensors[f"blk.{i}.ffn_up_exps.weight"] = up @ place + rng.standard_normal((12, 48, 80)).astype(np.float32)*(place.sum(0) == 0)
        tensors[f"blk.{i}.ffn_down_exps.weight"] = place.T @ down
        tensors |= {f"blk.{i}.ffn_latent_down.weight": np.ascontiguousarray(place.T), f"blk.{i}.ffn_latent_up.weight": place}
    write_gguf(tmp_path/"latent.gguf", metadata, tensors)
    for options in ATTEMPTS:
        model = Model(tmp_path/"latent.gguf", max_model_len=160, max_num_seqs=64, **options)
        assert rel_err(prompt_logits(model, want["p1_ids"].tolist(), 20), want["p1_logits_torch"]) < 1e-5
        model.close()

def test_norms_without_weights_in_mamba(tmp_path):
    "Falcon-Mamba's norms of dt, B and C are Jamba's with weights of one"
    with GGUFFile(fixture("jamba.gguf")) as f:
        tensors, metadata = {name: QuantTensor.from_gguf(f, name).dequantize() for name in f.tensors}, {k: f.metadata[k] for k in f.metadata}
    norm = lambda name: name.endswith(("ssm_dt_norm.weight", "ssm_b_norm.weight", "ssm_c_norm.weight"))
    write_gguf(tmp_path/"ones.gguf", metadata, {k: np.ones_like(v) if norm(k) else v for k, v in tensors.items()})
    write_gguf(tmp_path/"unit.gguf", metadata | {"jamba.ssm.dt_b_c_rms": True}, {k: v for k, v in tensors.items() if not norm(k)})
    models = [Model(tmp_path/f"{name}.gguf", device="ref", max_model_len=64, max_num_seqs=16) for name in ("ones", "unit")]
    a, b = (prompt_logits(m, list(range(16))) for m in models)
    assert (a == b).all()
    for m in models: m.close()

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

def test_latent_attention_without_a_compressed_query(tmp_path):
    "DeepSeek's smallest models make queries in one step; the tensors tell, not the number of layers. Quantised matrices for each head."
    rng = np.random.default_rng(0)
    with GGUFFile(fixture("deepseek_v2.gguf")) as f:
        tensors = {n: QuantTensor.from_gguf(f, n).dequantize() for n in f.tensors if "attn_q" not in n}
        tensors |= {f"blk.{i}.attn_q.weight": (rng.standard_normal((192, 64))/8).astype(np.float32) for i in range(3)}
        quantised = {n: (quantize(t.reshape(-1, t.shape[-1]), "Q8_0"), "Q8_0", t.shape) if n.endswith(("_b.weight", "attn_q.weight")) else t for n, t in tensors.items()}
        write_gguf(tmp_path/"lite.gguf", {k: f.metadata[k] for k in f.metadata if "q_lora" not in k}, quantised)
    ids, logits = list(range(40, 90)), {}
    for name, options in {"ref": dict(device="ref"), "float32": dict(activations="float32"), "int8": dict()}.items():
        model = Model(tmp_path/"lite.gguf", max_model_len=64, max_num_seqs=64, **options)
        logits[name] = prompt_logits(model, ids)
        if name == "int8": assert model.cache.nbytes == 3*model.cache.num_blocks*16*80*2           # compressed and rotated part of a key, in float16: nothing else
        if name != "ref": assert (prompt_logits(model, ids, 9) == logits[name]).all()
        model.close()
    assert rel_err(logits["float32"], logits["ref"]) < 1e-5 and rel_err(logits["int8"], logits["ref"]) < 5e-2

def tiny_glm4(path):
    "A random GLM 4 (dense): a gate and an up projection in one tensor, norms around both blocks, biases, half of each head rotated in adjacent pairs"
    r, n_embd, n_ff, n_layer = np.random.RandomState(5), 64, 96, 3
    matrix = lambda n, k: (r.standard_normal((n, k))*1.3/k**.5).astype(np.float16)
    vector = lambda n, mean: (mean + .25*r.standard_normal(n)).astype(np.float32)
    tensors = {"token_embd.weight": matrix(512, n_embd), "output.weight": matrix(512, n_embd), "output_norm.weight": vector(n_embd, 1)}
    for i in range(n_layer):
        for name, n, k in (("attn_q", 64, n_embd), ("attn_k", 32, n_embd), ("attn_v", 32, n_embd), ("attn_output", n_embd, 64), ("ffn_up", 2*n_ff, n_embd), ("ffn_down", n_embd, n_ff)):
            tensors[f"blk.{i}.{name}.weight"] = matrix(n, k)
            if name in ("attn_q", "attn_k", "attn_v"): tensors[f"blk.{i}.{name}.bias"] = vector(n, 0)
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"): tensors[f"blk.{i}.{name}.weight"] = vector(n_embd, 1)
    with GGUFFile(fixture("llama.gguf")) as f: tokenizer = {k: f.metadata[k] for k in f.metadata if k.startswith("tokenizer")}
    facts = {"block_count": n_layer, "context_length": 512, "embedding_length": n_embd, "feed_forward_length": n_ff, "attention.head_count": 4, "attention.head_count_kv": 2,
             "rope.dimension_count": 8, "rope.freq_base": 10000.0, "attention.layer_norm_rms_epsilon": 1e-5}
    write_gguf(path, {"general.architecture": "glm4", **{f"glm4.{k}": v for k, v in facts.items()}, **tokenizer}, tensors)

def test_glm4(tmp_path):
    "Against log-probabilities that llama.cpp gave for this very file (there is no fixture of the architecture): float32 weights, float32 cache"
    tiny_glm4(tmp_path/"glm4.gguf")
    with np.load(data_dir()/"fixtures/glm4_llamacpp.npz") as z: ids, lengths, want = z["ids"].tolist(), z["lengths"], z["logprobs"]
    for options in (dict(device="ref"), dict(activations="float32"), dict(activations="float32", num_threads=2)):
        model = Model(tmp_path/"glm4.gguf", max_model_len=64, max_num_seqs=64, **options)
        logits = prompt_logits(model, ids)
        assert np.abs(log_softmax(logits)[lengths - 1] - want).max() < 1e-4
        if options.get("device") != "ref": assert all((prompt_logits(model, ids, chunk) == logits).all() for chunk in (7, 1))
        model.close()

MODES = {"ref": dict(device="ref"), "float32": dict(device="cpu", activations="float32", num_threads=2), "int8": dict(device="cpu", num_threads=2), "cuda float32": dict(device="cuda", activations="float32"),
         "cuda int8": dict(device="cuda")}

@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("mode", MODES)
def test_real_model(name, mode, request):
    if "cuda" in mode: request.getfixturevalue("real_gpu")
    path, int8 = request.getfixturevalue(name), "int8" in mode
    model = Model(path, max_model_len=1024, max_num_seqs=4, max_num_batched_tokens=512, **MODES[mode])
    cases = json.loads((data_dir()/"fixtures/real"/REAL[name]).read_text())["prompts"]
    for case in cases:
        top = case["f32"]["top20"]
        steps = 48 if mode != "ref" else 8 if len(case["ids"]) < 100 else 1         # NumPy takes a while
        chosen, logits = greedy(model, case["ids"], steps)
        assert rel_err(logits[top["ids"]], np.array(top["logits"])) < (5e-2 if int8 else 1e-4), case["name"]
        for n, (g, w) in enumerate(zip(chosen, case["f32"]["greedy"])):
            if g != w:
                gap = case["f32"]["gap"][n]
                assert gap < (GAP[name] if int8 else 1e-3), (case["name"], n, gap)
                break
    model.close()

def log_softmax(x): return x - np.logaddexp.reduce(x.astype(np.float64), axis=-1, keepdims=True)

@pytest.mark.parametrize("name, known", [("smollm2", "smollm2"), ("gemma3", "gemma3-270m")])
@pytest.mark.parametrize("device, chunk", [("cpu", 64), ("cuda", 1), ("cuda", 16), ("cuda", 64)])
def test_int8_quality(device, chunk, name, known, request):
    "What rounding activations to 8 bits costs, in KL to our float32 mode, against what it costs llama.cpp on the same file and text; on a GPU in the steps that do round, and in those of float16"
    if device == "cuda": request.getfixturevalue("real_gpu")
    path, peer = request.getfixturevalue(name), json.loads((data_dir()/"quality/llama_cpp.json").read_text())
    with GGUFFile(path) as file: ids = Tokenizer.from_gguf(file).encode((data_dir()/"quality/text.txt").read_text())[:peer["positions"]]
    logits = {}
    for activations in ("float32", "int8"):
        model = Model(path, device=device, activations=activations, max_model_len=512, max_num_seqs=16, num_threads=2)
        logits[activations] = log_softmax(prompt_logits(model, ids, chunk))
        model.close()
    kl = (np.exp(logits["float32"])*(logits["float32"] - logits["int8"])).sum(-1).mean()
    assert len(ids) == peer["positions"] >= 320
    print(f"{name} on {device}, steps of {chunk}: mean KL {kl:.6f}, llama.cpp's {peer['models'][known]['peer_mean_kl']}")
    assert kl < 1.1*peer["models"][known]["peer_mean_kl"], kl

@pytest.mark.parametrize("kv_type, kv_type_v, limit", [("f16", "f16", 1e-5), ("q8_0", "q8_0", 2e-3), ("q8_0", "q4_0", 3e-2)])
def test_quality_of_a_smaller_cache(kv_type, kv_type_v, limit, smollm2):
    "What rounding keys and values costs, in KL to a float32 cache, everything else being exact"
    with GGUFFile(smollm2) as file: ids = Tokenizer.from_gguf(file).encode((data_dir()/"quality/text.txt").read_text())[:256]
    logits = []
    for types in (("f32", "f32"), (kv_type, kv_type_v)):
        model = Model(smollm2, activations="float32", kv_type=types[0], kv_type_v=types[1], max_model_len=512, max_num_seqs=64, num_threads=2)
        logits.append(log_softmax(prompt_logits(model, ids)))
        model.close()
    kl = (np.exp(logits[0])*(logits[0] - logits[1])).sum(-1).mean()
    assert 0 < kl < limit

def in_steps(model, handle, ids, cuts, done=0):
    "Logits of every position of ids, a sequence's tokens from `done` on, computed in steps of the given sizes"
    out = []
    for n in cuts:
        model.batch.fill([(ids[:n], done, handle.block_ids, "all", handle.slot)])
        out.append(model.forward(model.batch).copy())
        ids, done = ids[n:], done + n
    assert not ids
    return np.concatenate(out)

@pytest.mark.parametrize("options", [dict(device="ref"), dict(activations="float32"), dict(activations="int8", num_threads=2)], ids=["ref", "float32", "int8"])
@pytest.mark.parametrize("name", ["qwen3next", "qwen35"])
def test_a_sequence_goes_back(name, options):
    "Copies of the state, kept and put back, another sequence in a slot that was given up; keys and values stay"
    ids, model = (expected(name)["p1_ids"].tolist()*3)[:100], load(name, num_kv_blocks=24, num_state_slots=4, **options)
    same = (lambda a, b: rel_err(a, b) < 5e-5) if options.get("device") == "ref" else (lambda a, b: (a == b).all())
    pool, one, two = model.pool, CacheHandle(), CacheHandle()
    want = prompt_logits(model, ids)
    assert pool.grow(one, 100)
    first = in_steps(model, one, ids[:40], [1, 16, 23])
    assert pool.checkpoint(one, 40) and same(first, want[:40])
    in_steps(model, one, ids[40:55], [15], 40)
    assert pool.checkpoint(one, 55)
    in_steps(model, one, [7]*10, [10], 55)                                # a wrong turn
    assert pool.rewind(one, 60) == 55 and len(one.block_ids) == 4 and pool.grow(one, 100)
    assert same(in_steps(model, one, ids[55:], [45], 55), want[55:])
    assert pool.rewind(one, 54) == 40 and len(one.block_ids) == 3 and pool.grow(one, 100)
    assert pool.grow(two, 30)
    in_steps(model, two, [5]*30, [30])                                    # somebody else in between
    assert same(in_steps(model, one, ids[40:], [7, 1, 52], 40), want[40:])
    pool.release(two)
    assert pool.rewind(one, 39) == 0 and pool.grow(one, 100) and same(in_steps(model, one, ids, [100]), want)       # no copy so early: from the start
    pool.release(one)
    model.states.check_integrity()
    assert model.states.num_free == model.states.num_slots and pool.num_free == pool.num_blocks - 1
    model.close()

def serve(model, prompts, steps, **limits):
    "Greedy ids of several prompts through the scheduler; how often one was preempted"
    scheduler = Scheduler(model.pool, max_model_len=160, max_num_rows=model.max_num_out, **limits)
    requests = [Request(str(i), list(ids)) for i, ids in enumerate(prompts)]
    for r in requests: scheduler.add(r)
    while scheduler.num_unfinished:
        step = scheduler.schedule()
        model.batch.fill([(r.next_tokens(n), r.num_computed_tokens, r.block_ids, r.rows(n), r.cache.slot) for r, n in step.scheduled])
        logits = iter(model.forward(model.batch).argmax(-1).tolist())
        scheduler.update(step, {r.request_id: next(logits) for r, n in step.scheduled if r.rows(n)})
        scheduler.check_integrity()
        for r in requests:
            if r.status == "running" and r.num_tokens - r.num_prompt_tokens == steps: scheduler.finish(r)
    assert model.pool.num_free == model.pool.num_blocks - 1 and (model.states is None or model.states.num_free == model.states.num_slots)
    return [r.token_ids[r.num_prompt_tokens:] for r in requests], scheduler.num_preemptions

@pytest.mark.parametrize("name", ["qwen3next", "qwen35moe"])
def test_many_requests_few_blocks(name):
    "States are carried from step to step, taken away by a preemption, computed anew, and given back"
    want = expected(name)
    prompts = [want[f"p{k}_ids"].tolist() for k in (0, 1, 0)] + [[7*i % 500 for i in range(100)], [3, 1, 4, 1, 5, 9, 2, 6]]
    for options in (dict(activations="float32"), dict(activations="int8", num_threads=2)):
        model = load(name, num_kv_blocks=12, **options)
        alone = [serve(model, [p], 32)[0][0] for p in prompts]
        together, preempted = serve(model, prompts, 32, max_num_seqs=4, max_num_batched_tokens=29)
        assert together == alone and preempted > 0
        if options["activations"] == "float32": assert alone[1] == want["p1_greedy_torch"].tolist()
        model.close()

def test_the_oldest_files_of_a_hybrid(tmp_path):
    "q, k, v and z in one matrix, for each key head: rewritten, a file gives the same bits"
    path, tensors = fixture("qwen3next.gguf"), {}
    with GGUFFile(path) as file:
        metadata = {k: v for k, v in file.metadata.items() if not k.endswith("recurrent_layers")}
        for name, t in file.tensors.items(): tensors[name] = QuantTensor.from_gguf(file, name)
    for i in range(3):
        qkv, z = (tensors.pop(f"blk.{i}.attn_{n}.weight").raw for n in ("qkv", "gate"))
        q, k, v, z = (x.reshape(2, -1, x.shape[1]) for x in (*np.split(qkv, [64, 128]), z))             # two key heads
        raw = np.concatenate([q, k, v, z], 1).reshape(-1, z.shape[2])
        tensors[f"blk.{i}.ssm_in.weight"] = QuantTensor(raw, QUANT_TYPES["F16"], (len(raw), 64))
    write_gguf(tmp_path/"old.gguf", metadata, {n: (np.ascontiguousarray(t.raw).view(np.uint8), t.type.name, t.shape) for n, t in tensors.items()})
    ids, got = expected("qwen3next")["p1_ids"].tolist(), []
    for p in (path, tmp_path/"old.gguf"):
        model = Model(p, activations="float32", max_model_len=64, max_num_seqs=64)
        got.append(prompt_logits(model, ids))
        model.close()
    assert (got[0] == got[1]).all()


@pytest.mark.parametrize("name", ["llama", "mamba2", "nemotron_h_moe", "qwen3next"])
def test_what_weights_take_is_known_before(name):
    "Of the CPU: what is packed, and vectors, which are small."
    with GGUFFile(fixture(f"{name}.gguf")) as file:
        config, packed = ModelConfig.from_gguf(file), CpuWeights()
        load_weights(file, config, packed)
        assert packed.nbytes <= cpu_weight_bytes([t for name, t in file.tensors.items() if name in config.tensors()]) < 1.1*packed.nbytes + 20_000
