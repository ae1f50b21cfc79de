"""The engine on a GPU, in the emulator where there is none: tiny models of every architecture with dense attention against logits from independent implementations, the gates of equality, and
what a launched step may not do."""
import gc
import logging
import queue
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import hold
from gpu_arrays import emulated, first_prompt, load

from literate_engine import LLM, EngineConfig, SamplingParams, linear_gpu, settings
from literate_engine.blocks import CacheHandle
from literate_engine.config import ModelConfig
from literate_engine.core import fixture, rel_err
from literate_engine.cublas import choose_gemm
from literate_engine.cuda import CudaError, cupy
from literate_engine.gguf import GGUFFile
from literate_engine.model import Model, prompt_logits
from literate_engine.program import allocate
from literate_engine.program_gpu import Bucket, GpuProgram, bucket, fuse_attention, fuse_store
from literate_engine.recorder import Instruction, Value
from literate_engine.quants import QUANT_TYPES
from literate_engine.sampling import Sampler
from literate_engine.settings import ON_A_GPU, gpu_room, resolve

pytestmark = pytest.mark.usefixtures("emulated_gpu")
NAMES = ["cohere2", "ernie4_5", "gemma2", "gemma3", "gemma4", "gemma4ple", "granite", "llama", "llama3rope", "mistral", "olmo2", "qwen2", "qwen3", "qwen3_yarn", "seed_oss", "smollm3", "starcoder2"]
ROUNDED_KEYS = {"gemma4": 8e-2, "gemma4ple": 8e-2}     # keys and values in float16 move these logits so far, on a CPU as well: scores are not scaled down


@pytest.mark.parametrize("name", NAMES)
def test_fixture(name):
    "float32 mode: whole, in pieces, in company; the mode that is fast: near it"
    ids, logits = first_prompt(name)
    apart = 1e-4 if "gemma4" in name else 1e-5
    exact = load(name, activations="float32")
    whole = prompt_logits(exact, ids)
    assert rel_err(whole, logits) < (3e-4 if "gemma4" in name else 1e-4)
    assert rel_err(prompt_logits(exact, ids, 7), whole) < apart
    exact.close()
    fast = load(name)
    got = prompt_logits(fast, ids)
    assert rel_err(got, logits) < ROUNDED_KEYS.get(name, 5e-3)
    for v, w in zip(got, logits): assert v.argmax() == w.argmax() or np.diff(np.sort(w)[-2:])[0] < .3
    fast.close()


FEW, PIECES = [([1], []), ([1], [1]), ([1, 1], [1])], [([], []), ([1], [1]), ([3], [2, 1]), ([9], [12]), ([1]*3, [1]*22)]          # tokens of the sequences before and behind, step after step
KINDS = {"int8, single tokens": (("Q8_0", "Q4_K"), 1, [*FEW, ([1]*3, [1]*4), ([1]*6, [1]*9), ([1]*20, [1]*11)]), "int8, pieces of a prompt": (("Q8_0", "Q4_K"), 5, PIECES),
         "float16": (("Q8_0", "Q4_K"), 40, [([], []), ([9], [30]), ([1]*40, [1]*30)]),
         "16-bit weights, up to 4 rows": (("F16",), 1, FEW), "16-bit weights, up to 32 rows": (("F16",), 5, PIECES), "16-bit weights, up to 64 rows": (("F16",), 40, [([], []), ([1], [2]), ([9], [14])])}          # past 64 by wgmma on sm_90


def rows_in_company(model, ids, chunk, before, after):
    "Logits of all of ids, computed so many at a time, beside sequences that have so many tokens each in every step; and the shapes of the steps"
    handles, out, shapes = [CacheHandle() for _ in range(len(before) + 1 + len(after))], [], set()
    for h, n in zip(handles, (*before, len(ids), *after)): assert model.pool.grow(h, n)
    others = [([7 + k]*n, 0, h.block_ids, None) for k, (n, h) in enumerate(zip((*before, 0, *after), handles))]
    for i in range(0, len(ids), chunk):
        model.batch.fill([*others[:len(before)], (ids[i:i + chunk], i, handles[len(before)].block_ids, "all"), *others[len(before) + 1:]])
        out.append(model.forward(model.batch).copy())
        shapes.add(model.program.step().shape)
    for h in handles: model.pool.release(h)
    return np.concatenate(out), shapes


@pytest.fixture(scope="module")
def random_models(tmp_path_factory):
    "Types -> a file of two layers; Q4_K with some Q6_K"
    from literate_engine.gpu_report import random_dense
    folder = tmp_path_factory.mktemp("company")
    for fmt in ("Q8_0", "Q4_K"): random_dense(folder/f"{fmt}.gguf", arch="qwen3", fmt=fmt, more={"Q4_K": "Q6_K"}.get(fmt, fmt), n_layer=2, n_embd=256, n_ff=512, n_head=4, n_head_kv=2, head_dim=64, n_vocab=512)
    return {fmt: folder/f"{fmt}.gguf" for fmt in ("Q8_0", "Q4_K")} | {"F16": fixture("qwen3.gguf")}


@pytest.mark.parametrize("fmt, kind", [(fmt, kind) for kind, (fmts, *_) in KINDS.items() for fmt in fmts])
def test_a_row_does_not_know_its_company(fmt, kind, random_models, monkeypatch):
    "Steps of one kind give a row the same bits, whatever else is in them and however they are padded. Plans are those that nobody tuned: another plan may take a sum in another order"
    monkeypatch.setattr(GpuProgram, "tune", lambda *args: None); monkeypatch.setattr(linear_gpu, "PLANS", {})
    _, chunk, companies = KINDS[kind]
    model = Model(random_models[fmt], device="cuda", max_model_len=64, max_num_seqs=96, max_num_batched_tokens=128, num_kv_blocks=110, gemm_backend="own")
    ids = np.random.default_rng(0).integers(0, 500, 40 if chunk > 5 else 6*chunk).tolist()
    (first, shapes), *more = [rows_in_company(model, ids, chunk, *company) for company in companies]
    for company, (rows, s) in zip(companies[1:], more):
        assert (rows == first).all(), (company, np.abs(rows - first).max())
        shapes |= s
    assert len({s.tokens for s in shapes}) > 1 and {s.decode for s in shapes} == {chunk == 1} and all((s.tokens > 32) == (chunk > 5) for s in shapes)
    model.close()


@pytest.mark.parametrize("fmt", ["Q8_0", "Q4_K", "F16"])
def test_kinds_of_steps_differ_by_rounding(fmt, random_models):
    "The same rows one by one, in pieces and all at once"
    model, ids = Model(random_models[fmt], device="cuda", max_model_len=64, max_num_seqs=64, max_num_batched_tokens=64), np.random.default_rng(0).integers(0, 500, 40).tolist()
    rows = [prompt_logits(model, ids, chunk) for chunk in (1, 5, 40)]
    assert len({(s.decode, s.tokens > 32) for s in model.program.steps}) == 3
    for r in rows[1:]: assert rel_err(r, rows[0]) < (5e-3 if fmt == "F16" else 4e-2)           # quantised: a code of 8 bits more or less here and there, or none at all
    model.close()


@pytest.mark.parametrize("types", [("f32", None), ("q8_0", None), ("q8_0", "q4_0")], ids=str)
def test_kinds_of_cache(types):
    model, ref = load("llama", kv_type=types[0], kv_type_v=types[1]), Model(fixture("llama.gguf"), device="cpu", max_model_len=160, max_num_seqs=64, kv_type=types[0], kv_type_v=types[1])
    ids = np.random.default_rng(1).integers(0, 512, 50).tolist()
    assert rel_err(prompt_logits(model, ids, 17), prompt_logits(ref, ids, 17)) < (2e-3 if types[0] == "f32" else 5e-2)
    model.close(); ref.close()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q8_0"])
def test_quantised_weights(kind, tmp_path):
    "Matrices of all kinds that the fixtures hold, merged and alone, against float32 arithmetic on the same weights"
    from literate_engine.gguf import write_gguf
    from literate_engine.quants import QuantTensor, quantize
    with GGUFFile(fixture("qwen2.gguf")) as f:
        tensors = {n: QuantTensor.from_gguf(f, n).dequantize() for n in f.tensors}
        held = {n: (quantize(t, kind), kind, t.shape) if t.ndim == 2 and t.shape[1] % QUANT_TYPES[kind].block_size == 0 and "attn_v" not in n else t for n, t in tensors.items()}
        held |= {n: t.astype(np.float16) for n, t in tensors.items() if "attn_v" in n}
        write_gguf(tmp_path/"m.gguf", {k: f.metadata[k] for k in f.metadata}, held)
    ids, logits = np.random.default_rng(2).integers(0, 512, 45).tolist(), {}
    for device in ("ref", "cuda"):
        m = Model(tmp_path/"m.gguf", device=device, max_model_len=64, max_num_seqs=64)
        logits[device] = [prompt_logits(m, ids, chunk) for chunk in (1, 9, 45)]
        m.close()
    for want, got in zip(logits["ref"], logits["cuda"]): assert rel_err(got, want) < 6e-2


def ahead_and_not(prompts, **options):
    "Texts of an engine on the emulated GPU, and of the reference"
    out = {}
    for device in ("ref", "cuda"):
        with LLM(fixture("llama.gguf"), device=device, activations="float32", max_model_len=96, max_num_seqs=4, max_num_batched_tokens=48, **options) as llm:
            greedy, drawn = SamplingParams(max_tokens=14, ignore_eos=True), SamplingParams(max_tokens=9, temperature=1, top_k=40, seed=4, logprobs=2)
            texts = [[o.token_ids for o in llm.generate(prompts, p, progress=False)] for p in (greedy, drawn)]
            again = llm.generate(prompts, greedy, progress=False)
            assert [o.token_ids for o in again] == texts[0]
            out[device] = texts, [o.num_cached_tokens for o in again]
            llm.engine.core.scheduler.check_integrity()
            assert llm.engine.model.pool.num_free == llm.engine.model.pool.num_blocks - 1
    return out


def test_the_engine(caplog):
    "Many requests, few places, a step ahead: the texts of the reference; nothing was tried twice"
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 512, n).tolist() for n in (5, 40, 17, 33, 2, 60)]
    with caplog.at_level(logging.WARNING): out = ahead_and_not(prompts)
    assert out["ref"] == out["cuda"] and not caplog.records, caplog.text


def test_prompts_in_many_pieces_and_few_shapes(monkeypatch):
    "Steps that nobody reads anything of, one after the other, with a seed (greedy ones are waited for); and more shapes of steps than are kept"
    from literate_engine import program_gpu
    monkeypatch.setattr(program_gpu, "MAX_SHAPES", 3)
    rng, out = np.random.default_rng(7), {}
    prompts = [rng.integers(0, 512, n).tolist() for n in (230, 5, 120, 17)]
    for device in ("ref", "cuda"):
        with LLM(fixture("llama.gguf"), device=device, activations="float32", max_model_len=256, max_num_seqs=4, max_num_batched_tokens=32) as llm:
            out[device] = [[o.token_ids for o in llm.generate(p, SamplingParams(max_tokens=6, ignore_eos=True, temperature=t, top_k=20, seed=3), progress=False)] for p in (prompts[:1], prompts) for t in (0, 1)]
            if device == "cuda": assert len(llm.engine.model.program.steps) == 3
    assert out["ref"] == out["cuda"]


DRAWN = [dict(temperature=1, seed=3, top_k=20), dict(temperature=.7, seed=4, top_p=.8), dict(temperature=1, seed=5, min_p=.1, repetition_penalty=1.3, repetition_window=20), dict(logprobs=3),
         dict(presence_penalty=.5, frequency_penalty=.2, logit_bias={5: 2.0}), dict(regex="[a-z ]+"), dict(temperature=1, seed=6, top_k=30, prompt_logprobs=1)]


def test_tokens_drawn_from_candidates(monkeypatch):
    "Where the GPU names the best tokens, the texts are those of whole rows; mostly the row is not needed"
    rng, out, seen = np.random.default_rng(6), {}, []
    prompts, draw = [rng.integers(0, 512, n).tolist() for n in (5, 17, 33, 3, 21)], Sampler.sample_from_candidates
    monkeypatch.setattr(Sampler, "sample_from_candidates", lambda self, c: (seen.append(r := draw(self, c)), r)[1])
    for device in ("cpu", "cuda"):
        with LLM(fixture("llama.gguf"), device=device, activations="float32", max_model_len=64, max_num_seqs=4, max_num_batched_tokens=32) as llm:
            out[device] = [[o.token_ids for o in llm.generate(prompts, SamplingParams(max_tokens=12, **p), progress=False)] for p in DRAWN]
    assert out["cpu"] == out["cuda"] and len(seen) > 300 and sum(r is None for r in seen) < len(seen)//10


NUMBERS = {"top_k": [-1, 1, 3, 63, 64, 65, 511, 512, 513, 10**9], "top_p": [0, .2, .9, .9999], "min_p": [1e-6, .1, 1], "repetition_penalty": [.5, 1.3], "repetition_window": [0, 1, 6], "presence_penalty": [-2, 1.5],
           "frequency_penalty": [-.5, 2], "temperature": [1e-9, .4, 2, 100], "logprobs": [0, 2, 20], "prompt_logprobs": [0, 2],
           "logit_bias": [{5: 3.0, 511: -100}, dict.fromkeys(range(505), -100), dict.fromkeys(range(0, 512, 2), 1.5), dict.fromkeys(range(512), 1.0) | {7: 2.0}],
           "regex": ["[a-z ]+", "(yes|no)", "[^a]+"], "grammar": ['start: "a" start | "b"'], "json_schema": [{"type": "integer"}]}
FORMS = ("regex", "grammar", "json_schema")


def settings_of_all_kinds(rng):
    "Every value of every number alone, greedy and seeded; then mixtures."
    singles = [{name: v} | how for name, values in NUMBERS.items() for v in values for how in ({"temperature": 0}, {"temperature": 1}) if name != "temperature" or how["temperature"]]
    mixtures = []
    for _ in range(80):
        form = FORMS[rng.integers(3)]                                      # one at most
        chosen = {name: values[rng.integers(len(values))] for name, values in NUMBERS.items() if rng.random() < .3 and (name == form or name not in FORMS)}
        mixtures.append({"temperature": float(rng.integers(2))} | chosen)
    return [kw | {"temperature": NUMBERS["temperature"][i % 4]} if kw.get("temperature") == 1 and i % 5 == 4 else kw for i, kw in enumerate(singles + mixtures)]


def test_every_setting_chooses_what_it_chooses_on_a_cpu(monkeypatch):
    "Alone and mixed, at the first token and later ones, with whole rows and with candidates"
    monkeypatch.setattr(Model, "head", 64)                                 # uncut draws go through the row with the best first, as on a GPU, and not in the order of ids
    kinds, heard, prompt = settings_of_all_kinds(np.random.default_rng(8)), {}, [9, 300, 9, 44]
    for device in ("cpu", "cuda"):
        with LLM(fixture("llama.gguf"), device=device, activations="float32", max_model_len=32, max_num_seqs=32, max_num_batched_tokens=64) as llm:
            done = queue.SimpleQueue()
            for i, kw in enumerate(kinds): llm.engine.submit(prompt[:1 + i % 4], SamplingParams(max_tokens=6, seed=i, **kw), done.put, request_id=f"{i}")
            got = {f"{i}": ([], [], []) for i in range(len(kinds))}
            while not all(ends for _, ends, _ in got.values()):
                o = done.get(timeout=120)
                got[o.request_id][0].extend(o.token_ids)
                if o.finish_reason: got[o.request_id][1].append((o.finish_reason, o.error))
                for lp, top in [*(o.logprobs or ()), *(t for t in o.prompt_logprobs or () if t)]: got[o.request_id][2].append((lp, [i for i, _ in top]))
            heard[device] = got
    for i, kw in enumerate(kinds):
        (a, ends_a, told_a), (b, ends_b, told_b) = (heard[d][f"{i}"] for d in ("cpu", "cuda"))
        assert a == b and ends_a == ends_b and [top for _, top in told_a] == [top for _, top in told_b], (kw, a, b, ends_a, ends_b)
        assert np.allclose([lp for lp, _ in told_a], [lp for lp, _ in told_b], atol=1e-3), kw
        assert ends_a[0][0] != "error" or ends_a[0][1].startswith("ConstraintError"), (kw, ends_a)
    assert sum(ends[0][0] == "error" for _, ends, _ in heard["cuda"].values()) < len(kinds)//10


def test_a_sampler_that_fails_harms_nobody_else(monkeypatch):
    "Asking the GPU about a row is part of drawing its token: who fails there fails alone"
    ask, draw = Sampler.ask, Sampler.draw
    def broken(f): return lambda self, *args: 1/0 if self.params.top_k == 7 else f(self, *args)
    monkeypatch.setattr(Sampler, "ask", broken(ask)); monkeypatch.setattr(Sampler, "draw", broken(draw))
    with LLM(fixture("llama.gguf"), device="cuda", max_model_len=64, max_num_seqs=4) as llm:
        heard = queue.SimpleQueue()
        for top_k in (5, 7, 9): llm.engine.submit([1, 2, 3], SamplingParams(max_tokens=5, temperature=1, top_k=top_k, seed=1, ignore_eos=True), heard.put, request_id=str(top_k))
        ends = {}
        while len(ends) < 3:
            if (o := heard.get(timeout=60)).finish_reason: ends[o.request_id] = o.finish_reason, o.num_output_tokens
    assert ends == {"5": ("length", 5), "7": ("error", 0), "9": ("length", 5)}


def test_preemption_and_the_host_tier():
    rng = np.random.default_rng(4)
    prompts = [rng.integers(0, 512, 40).tolist() for _ in range(4)]
    with GGUFFile(fixture("llama.gguf")) as f: config = ModelConfig.from_gguf(f)
    memory = resolve(EngineConfig(device="cpu", activations="float32", max_model_len=96, max_num_seqs=1), config).kv_memory
    out = ahead_and_not(prompts, kv_memory=2*memory, host_cache_memory=1 << 22)
    assert out["ref"][0] == out["cuda"][0] and sum(out["cuda"][1]) > 0


def test_a_saved_state(tmp_path):
    ids = np.random.default_rng(5).integers(0, 512, 50).tolist()
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    with LLM(fixture("llama.gguf"), device="cuda", max_model_len=96) as llm:
        want = llm.generate([ids], params, progress=False)[0].token_ids
        llm.save_state(tmp_path/"state.gguf", ids)
    with LLM(fixture("llama.gguf"), device="cuda", max_model_len=96) as llm:
        assert llm.load_state(tmp_path/"state.gguf") == ids
        o = llm.generate([ids], params, progress=False)[0]
        assert o.token_ids == want and o.num_cached_tokens == 48
    with LLM(fixture("llama.gguf"), device="cpu", max_model_len=96) as llm, pytest.raises(ValueError, match="device"): llm.load_state(tmp_path/"state.gguf")


def test_hidden_states():
    texts = [[3, 4, 5], list(range(70))]
    out = {}
    for device in ("ref", "cuda"):
        with LLM(fixture("llama.gguf"), device=device, activations="float32", max_model_len=96) as llm: out[device] = llm.embed(texts)
    assert rel_err(out["cuda"], out["ref"]) < 1e-5


def test_what_does_not_run_is_refused():
    for name, kind in (("mixtral", "moe"), ("qwen3next", "gated_delta"), ("deepseek_v2", "latent_attention"), ("mamba2", "mamba2")):
        with GGUFFile(fixture(f"{name}.gguf")) as f: config = ModelConfig.from_gguf(f)
        with pytest.raises(ValueError, match=f"device is 'cuda': layers of kind .*{kind}.* have no GPU kernels yet"): resolve(EngineConfig(device="cuda"), config)
        assert resolve(EngineConfig(), config).device == "cpu"
    assert "full_attention" in ON_A_GPU["mixer"]
    with pytest.raises(CudaError, match="no GPU kernel yet for causal_conv, mamba1_scan, ssm_gate: device='cpu' runs this model"): Model(fixture("mamba.gguf"), device="cuda")          # by whoever does not ask before


def test_too_little_memory_is_told_before_the_load(monkeypatch):
    monkeypatch.setattr(cupy().cuda.runtime, "memGetInfo", lambda: (300 << 20, 1 << 33))
    with pytest.raises(ValueError, match=r"not enough memory on the GPU: needs .*weights .*; free .*; fewer max_num_batched_tokens would be needed"):
        LLM(fixture("llama.gguf"), device="cuda", max_model_len=2048, max_num_batched_tokens=65536, gemm_backend="own")
    if choose_gemm("mixed" if emulated() else "auto")[0] == "own": return          # the library is not here
    with pytest.raises(ValueError, match=r"not enough memory on the GPU: needs .*cuBLAS .*; free .*; gemm_backend 'own' would be needed"):
        LLM(fixture("llama.gguf"), device="cuda", max_model_len=2048, max_num_batched_tokens=256, gemm_backend="mixed")


@pytest.mark.parametrize("name, seqs, tokens, length", [("qwen3", 1, 64, 48), ("qwen3", 64, 200, 512), ("gemma3", 4, 96, 128), ("gemma4ple", 2, 64, 96)])
def test_the_plan_counts_what_is_taken(name, seqs, tokens, length, monkeypatch):
    "Without the reserve it covers what a load and the largest steps take; what is planned beside the cache is at most half as much again as what is taken"
    rooms, used = [], cupy().get_default_memory_pool().used_bytes
    monkeypatch.setattr(settings, "gpu_room", lambda *args: rooms.append(gpu_room(*args)) or rooms[-1])
    before = used()
    with LLM(fixture(f"{name}.gguf"), device="cuda", max_model_len=length, max_num_seqs=seqs, max_num_batched_tokens=tokens, kv_memory=1 << 22, gemm_backend="own") as llm:
        llm.generate([[3 + i % 7]*(length//(2 if seqs == 1 else 4)) for i in range(min(seqs, 16))], SamplingParams(max_tokens=2), progress=False)
        program, plan = llm.engine.model.program, sum(rooms[-1].fixed.values()) + llm.engine.config.kv_memory
        assert program.scratch.nbytes == rooms[-1].fixed["attention"] and (program.gemm.parts.array is None or program.gemm.parts.array.nbytes == rooms[-1].fixed["parts of sums"])
        fixed, taken = rooms[-1].fixed, used() - before - llm.engine.model.cache.nbytes
        planned = sum(fixed.values()) - (fixed["parts of sums"] if program.gemm.parts.array is None else 0)          # no step here had so many rows
        assert used() - before <= plan and planned <= 1.5*taken


def test_what_nobody_reads_has_no_slot_of_its_own_for_ever():
    x, unread = Value(64, "tokens", "rows"), [Value(64, "tokens", "rows") for _ in range(5)]
    code = [Instruction("embed", "tokens", [], [(x, "rows", True)], x)] + [Instruction("rope", "tokens", [], [(x, "rows", False), (v, "rows", True)], v) for v in unread]
    assert allocate(code, {"tokens": 4}, ()) == [1024]*2 and x.slot not in {v.slot for v in unread}
    for v in unread: v.slot = -1
    x.slot = -1
    assert allocate(code, {"tokens": 4}, (unread[0],)) == [1024]*3 and unread[0].slot not in {v.slot for v in unread[1:]}


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma4ple"])
def test_a_closed_model_gives_its_memory_back(name):
    "At once, whoever still holds the closed model: nothing waits for the garbage collector"
    ids, used = list(range(3, 40)), cupy().get_default_memory_pool().used_bytes
    gc.collect()
    before = used()
    gc.disable()
    try:
        model = load(name)
        for chunk in (1, 9, 37): prompt_logits(model, ids, chunk)
        assert used() > before + sum(w.matrix.nbytes for w in model.program.weights()) and len(model.program.steps) > 2
        model.close()
        assert used() == before
        with LLM(fixture(f"{name}.gguf"), device="cuda", max_model_len=96, max_num_seqs=4) as llm:
            for p in (SamplingParams(max_tokens=5), SamplingParams(max_tokens=5, temperature=1, top_k=20, seed=1)): llm.generate([ids, ids[:5]], p, progress=False)
            assert used() > before
        assert used() == before
    finally: gc.enable()


def test_a_store_is_joined_with_the_rotation_before_it():
    "Where the turned keys have no other reader. With one, and with keys that nobody turns, the launches stay apart"
    for name, joined, apart in (("qwen3", 3, 0), ("gemma4", 6, 0), ("gemma4ple", 3, 0), ("starcoder2", 3, 0)):
        ops = [i.op for i in load(name).program.code]
        assert (ops.count("rope_attention"), ops.count("rope_store"), ops.count("kv_store"), ops.count("rope_qk")) == (joined, 0, apart, apart), name
    q, k, v, q_out, k_out, other = (Value(8, "tokens", "rows") for _ in range(6))
    turn = Instruction("rope_qk", "tokens", [q_out, k_out, q, k, None, 8, None, None, 0.], [(q, "rows", False), (k, "rows", False), (q_out, "rows", True), (k_out, "rows", True)], q_out)
    store = Instruction("kv_store", "tokens", ["cache", k_out, v], [(k_out, "all", False), (v, "all", False), ("cache", "items", True)])
    reader = lambda x: Instruction("add", "tokens", [other, x, x, 8, 1.], [(x, "rows", False), (other, "rows", True)], other)
    assert [i.op for i in fuse_store([turn, store, reader(q_out)])] == ["rope_store", "add"]
    for code, keep in (([turn, store, reader(k_out)], ()), ([turn, reader(q_out), store], ()), ([turn, store], (k_out,)), ([store], ())): assert fuse_store(code, keep) == code


def test_attention_is_joined_with_the_store_before_it():
    "Where it reads what was just turned, and nobody else does; one launch in a step of single tokens, two otherwise"
    q, k, v, turned, result, other = (Value(8, "tokens", "rows") for _ in range(6))
    store = Instruction("rope_store", "tokens", [turned, q, k, v, None, 8, None, None, 0., "cache", None, 0.], [(q, "rows", False), (k, "rows", False), (v, "rows", False), (turned, "rows", True), ("cache", "items", True)], turned)
    attend = lambda x, kv: Instruction("attention", "tokens", [result, x, kv, "layer", None], [(x, "all", False), (kv, "all", False), (result, "items", True)], result)
    reader = Instruction("add", "tokens", [other, turned, turned, 8, 1.], [(turned, "rows", False), (other, "rows", True)], other)
    assert [i.op for i in fuse_attention([store, attend(turned, "cache")])] == ["rope_attention"]
    for code, keep in (([store, attend(turned, "cache"), reader], ()), ([store, attend(turned, "cache")], (turned,)), ([store, attend(q, "cache")], ()), ([store, attend(turned, "another")], ())): assert fuse_attention(code, keep) == code


@pytest.mark.parametrize("head_dim", [64, 128])
def test_single_tokens_in_one_launch_for_attention(head_dim, tmp_path):
    "Heads that rope_attention serves: token by token, in company, after a prompt in pieces, over the border of a block: as the reference, and as steps that turn, store and attend one after the other"
    from literate_engine.gguf import write_gguf
    from literate_engine.gpu_report import random_dense
    from literate_engine.quants import QuantTensor
    random_dense(tmp_path/"q.gguf", arch="qwen3", fmt="Q8_0", more="Q8_0", n_layer=2, n_embd=128, n_ff=256, n_head=4, n_head_kv=2, head_dim=head_dim, n_vocab=320)
    with GGUFFile(tmp_path/"q.gguf") as f:
        tensors = {n: QuantTensor.from_gguf(f, n).dequantize() for n in f.tensors}
        write_gguf(tmp_path/"m.gguf", {k: f.metadata[k] for k in f.metadata}, {n: t.astype(np.float16) if t.ndim == 2 else t for n, t in tensors.items()})
    options = dict(max_model_len=160, max_num_seqs=8, max_num_batched_tokens=64)
    ref, model = (Model(tmp_path/"m.gguf", device=device, num_kv_blocks=60, **options) for device in ("ref", "cuda"))
    ids = [np.random.default_rng(i).integers(0, 300, n).tolist() for i, n in enumerate((70, 21, 40))]
    want = [prompt_logits(ref, x) for x in ids]
    assert rel_err(prompt_logits(model, ids[0], 1), want[0]) < 2e-3
    handles, past = [CacheHandle() for _ in ids], [50, 3, 31]
    for h, x, n in zip(handles, ids, past):
        assert model.pool.grow(h, len(x))
        model.batch.fill([(x[:n], 0, h.tables, None, h.slot)])
        model.forward(model.batch)
    for step in range(9):
        model.batch.fill([(x[n + step:n + step + 1], n + step, h.tables, "last", h.slot) for h, x, n in zip(handles, ids, past)])
        got = model.forward(model.batch).copy()
        assert model.program.step().shape.decode
        for row, w, n in zip(got, want, past): assert rel_err(row, w[n + step]) < 2e-3, (step, n)
    ref.close(); model.close()


def test_buckets():
    assert [bucket(n, 64) for n in (1, 2, 3, 8, 9, 17, 33, 63, 64)] == [1, 2, 4, 8, 16, 24, 40, 64, 64]
    for n in range(1, 5000): assert n <= bucket(n, 8192) <= max(8 if n > 4 else 4, n*1.25 + 8)
    assert Bucket(4, 4, 4, True).decode


def test_no_bucket_is_larger_than_a_batch_can_become():
    for seqs, tokens in ((1, 1), (3, 128), (64, 64), (65, 128), (70, 100), (100, 8192), (100, 40), (1000, 60000)):
        for n in range(1, min(seqs, tokens) + 1):
            for more in {0, tokens - n, min(7, tokens - n)}:
                shape = Bucket.of(SimpleNamespace(num_tokens=n + more, num_seqs=n, num_out=n, max_num_tokens=tokens, max_num_seqs=seqs), seqs)
                assert n <= shape.seqs <= seqs and n + more <= shape.tokens <= tokens and n <= shape.outs <= seqs and shape.decode == (not more) and (more or shape.tokens == shape.seqs)


@pytest.mark.parametrize("n", [3, 65, 70, 100])
def test_a_limit_that_is_no_bucket(n, caplog):
    "As many sequences as there may be, and fewer; single tokens, and with a longer one among them. The engine: everybody at once, nothing is tried twice"
    options = dict(activations="float32", max_model_len=32, max_num_seqs=n, max_num_batched_tokens=128)
    ref, model = (Model(fixture("llama.gguf"), device=device, num_kv_blocks=n + 1, **options) for device in ("ref", "cuda"))
    for seqs, longest in ((n, 1), (n - 1, 1), (n//2 + 1, 1), (n, 5), (2, 1)):
        parts, logits = [([5*i]*(longest if i == seqs//2 else 1), 0, [i + 1], "last") for i in range(seqs)], []
        for m in (ref, model):
            m.batch.fill(parts)
            logits.append(m.forward(m.batch).copy())
        assert rel_err(logits[1], logits[0]) < 1e-5, (seqs, longest)
    ref.close(); model.close()
    texts = []
    with caplog.at_level(logging.WARNING):
        for device in ("ref", "cuda"):
            with LLM(fixture("llama.gguf"), device=device, **options) as llm:
                hold(llm.engine)
                texts.append([o.token_ids for o in llm.generate([[3 + i] for i in range(n)], SamplingParams(max_tokens=3, ignore_eos=True), progress=False)])
                if device == "cuda" and n > 64: assert max(s.seqs for s in llm.engine.model.program.steps) == n
    assert texts[0] == texts[1] and not caplog.records, caplog.text


@pytest.mark.parametrize("name", ["cohere2", "gemma2", "gemma4ple", "olmo2", "qwen2", "starcoder2"])
def test_rows_that_products_prepare(name, tmp_path, monkeypatch):
    "A step of one row, whose products quantise and normalise it themselves, and one with launches for that: the same logits"
    from literate_engine.gguf import write_gguf
    from literate_engine.quants import QuantTensor, quantize
    with GGUFFile(fixture(f"{name}.gguf")) as f:
        tensors = {n: QuantTensor.from_gguf(f, n).dequantize() for n in f.tensors}
        held = {n: (quantize(t, "Q8_0"), "Q8_0", t.shape) if t.ndim == 2 and t.shape[1] % 32 == 0 else t for n, t in tensors.items()}
        write_gguf(tmp_path/"m.gguf", {k: f.metadata[k] for k in f.metadata}, held)
    logits, launches = [], []
    for most in (linear_gpu.OWN_BYTES, 0):
        monkeypatch.setattr(linear_gpu, "OWN_BYTES", most)
        model = Model(tmp_path/"m.gguf", device="cuda", max_model_len=64, max_num_seqs=64)
        logits.append(prompt_logits(model, list(range(3, 15)), 1))
        launches.append(len(model.program.step().launches))
        model.close()
    assert launches[0] < launches[1] and rel_err(*logits) < (3e-2 if "gemma4" in name else 1e-2), rel_err(*logits)           # a code of 8 bits more or less here and there
