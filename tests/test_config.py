"""Configs of files that are wrong, through real GGUF files: each is refused with the keys and values in one line."""
import numpy as np
import pytest

from literate_engine.config import ModelConfig, from_metadata
from literate_engine.core import fixture
from literate_engine.gguf import GGUFError, GGUFFile, write_gguf
from literate_engine.kvcache import kv_bytes_per_block

BASE = {"general.architecture": "llama", "llama.block_count": 2, "llama.context_length": 128, "llama.embedding_length": 32,
        "llama.feed_forward_length": 48, "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2, "llama.rope.freq_base": 1e6,
        "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.dimension_count": 8, "tokenizer.ggml.tokens": [f"t{i}" for i in range(40)]}
GEMMA = {k.replace("llama.", "gemma3."): v for k, v in BASE.items()} | {"general.architecture": "gemma3", "gemma3.attention.sliding_window": 16}


def zeros(*shape): return np.zeros(shape, np.float32)


def layer(i, n_embd=32, kv=16):
    names = {"attn_norm": (n_embd,), "attn_q": (n_embd, n_embd), "attn_k": (kv, n_embd), "attn_v": (kv, n_embd), "attn_output": (n_embd, n_embd),
             "ffn_norm": (n_embd,), "ffn_gate": (48, n_embd), "ffn_up": (48, n_embd), "ffn_down": (n_embd, 48)}
    return {f"blk.{i}.{k}.weight": zeros(*s) for k, s in names.items()}


def tensors(rows=40, n_embd=32):
    return {"token_embd.weight": zeros(rows, n_embd), **layer(0, n_embd), **layer(1, n_embd), "output_norm.weight": zeros(n_embd)}


@pytest.fixture
def load(tmp_path):
    def load(changes=(), tensors_=None, drop=(), base=BASE, **options):
        metadata = {k: v for k, v in (base | dict(changes)).items() if k not in drop}
        write_gguf(tmp_path / "m.gguf", metadata, tensors() if tensors_ is None else tensors_)
        with GGUFFile(tmp_path / "m.gguf") as f:
            return ModelConfig.from_gguf(f, **options)
    return load


def refused(load, *words, **how):
    with pytest.raises(GGUFError) as e: load(**how)
    text = str(e.value)
    assert "\n" not in text
    for w in words: assert w in text, (w, text)


def test_a_sound_file_loads(load):
    c = load()
    assert (c.n_layer, c.n_vocab, c.n_token, c.tied, c.layers[0].rope.base, c.layers[0].attn_scale) == (2, 40, 40, True, 1e6, 8 ** -0.5)
    assert not load(tensors_=tensors() | {"output.weight": zeros(40, 32)}).tied


def test_rope_base_of_the_file_wins_over_defaults(load):                        # BC-088
    assert load().layers[0].rope.base == 1e6
    assert load(rope_freq_base=0).layers[0].rope.base == 1e6
    assert load(rope_freq_base=10000).layers[0].rope.base == 1e4
    c = load(drop=["llama.rope.freq_base"])
    assert c.layers[0].rope.base == 1e4 and any("llama.rope.freq_base" in n for n in c.notes)
    refused(load, "llama.rope.freq_base", "-5", changes={"llama.rope.freq_base": -5.0})


@pytest.mark.parametrize("changes, words", [                                    # BC-116
    ({"llama.block_count": 0}, ["llama.block_count is 0"]),
    ({"llama.attention.head_count": 0}, ["llama.attention.head_count is 0"]),
    ({"llama.attention.head_count_kv": 0}, ["llama.attention.head_count_kv is 0"]),
    ({"llama.attention.head_count_kv": [2, 0]}, ["llama.attention.head_count_kv is [2, 0]"]),
    ({"llama.attention.head_count_kv": [2, 2, 2]}, ["llama.attention.head_count_kv", "2 values", "got 3"]),
    ({"llama.embedding_length": 33}, ["llama.embedding_length is 33", "llama.attention.head_count, which is 4"]),
    ({"llama.attention.head_count": 6, "llama.attention.head_count_kv": 4, "llama.attention.key_length": 8}, ["head_count is 6", "head_count_kv is 4"]),
    ({"llama.block_count": 2**32 - 1}, ["llama.block_count is 4294967295"]),
    ({"llama.block_count": "2"}, ["llama.block_count is '2'"]),
    ({"llama.context_length": -1}, ["llama.context_length is -1"]),
    ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, ["llama.attention.layer_norm_rms_epsilon is nan"]),
    ({"llama.rope.scaling.type": "su"}, ["llama.rope.scaling.type is 'su'"]),
    ({"general.architecture": "gemma5"}, ["'gemma5'", "near names: gemma", "supported: cohere2, deepseek2"]),
    ({"general.architecture": 7}, ["general.architecture is 7"]),
])
def test_numbers_that_cannot_be(load, changes, words): refused(load, *words, changes=changes)


def test_a_file_without_tensors(load): refused(load, "token_embd.weight is missing", tensors_={})                # BC-116


def test_missing_keys(load):
    for key in ("block_count", "embedding_length", "context_length", "feed_forward_length", "attention.head_count", "attention.layer_norm_rms_epsilon"):
        refused(load, f"llama.{key} is missing", drop=[f"llama.{key}"])
    refused(load, "general.architecture is missing", drop=["general.architecture"])


def test_rows_and_tokens(load):                                                 # BC-120
    c = load(tensors_=tensors(rows=44))
    assert (c.n_vocab, c.n_token) == (44, 40)
    refused(load, "tokenizer.ggml.tokens has 40 entries", "36 rows", tensors_=tensors(rows=36))
    refused(load, "output.weight", "(40, 32)", "(44, 32)", tensors_=tensors(rows=44) | {"output.weight": zeros(40, 32)})


@pytest.mark.parametrize("base, changes, words", [                              # BC-124
    (BASE, {"llama.expert_count": 0, "llama.expert_used_count": 2}, ["llama.expert_count is 0", "llama.expert_used_count is 2"]),
    (BASE, {"llama.expert_count": 2, "llama.expert_used_count": 4}, ["llama.expert_count is 2", "llama.expert_used_count is 4"]),
    (BASE, {"llama.expert_count": 2, "llama.expert_used_count": 0}, ["llama.expert_count is 2", "llama.expert_used_count is 0"]),
    (BASE, {"llama.rope.dimension_count": 7}, ["llama.rope.dimension_count is 7", "which is 8"]),
    (BASE, {"llama.rope.dimension_count": 16, "llama.attention.key_length": 8}, ["llama.rope.dimension_count is 16", "llama.attention.key_length, which is 8"]),
    (BASE, {"llama.attention.sliding_window": 0}, ["llama.attention.sliding_window is 0", "llama.block_count = 2"]),
    (GEMMA, {"gemma3.attention.sliding_window": 0}, ["gemma3.attention.sliding_window is 0", "gemma3.block_count = 2"]),
])
def test_keys_that_contradict_each_other(load, base, changes, words): refused(load, *words, base=base, changes=changes)


MOE = {"llama.expert_count": 4, "llama.expert_used_count": 2, "llama.expert_feed_forward_length": 16}


def mixture(i, n_expert=4, n_ff=16, n_embd=32):
    t = {k: v for k, v in layer(i).items() if "ffn_" not in k or "norm" in k} | {f"blk.{i}.ffn_gate_inp.weight": zeros(n_expert, n_embd)}
    return t | {f"blk.{i}.ffn_{k}_exps.weight": zeros(n_expert, *((n_embd, n_ff) if k == "down" else (n_ff, n_embd))) for k in ("gate", "up", "down")}


def test_experts(load):
    c = load(changes=MOE, tensors_={k: v for k, v in tensors().items() if "blk." not in k} | mixture(0) | mixture(1))
    assert [(s.ffn, s.n_ff, s.router.n_expert, s.router.renormalise) for s in c.layers] == [("moe", 16, 4, True)]*2
    some = {k: v for k, v in tensors().items() if "blk.1" not in k} | mixture(1)
    assert [s.ffn for s in load(changes=MOE | {"llama.leading_dense_block_count": 1}, tensors_=some).layers] == ["dense", "moe"]
    assert [s.ffn for s in load(changes=MOE | {"llama.interleave_moe_layer_step": 2}, tensors_=some).layers] == ["dense", "moe"]
    refused(load, "blk.0.ffn_gate_exps.weight is missing", "(4, 16, 32)", changes=MOE)
    refused(load, "llama.expert_gating_func is 9", changes=MOE | {"llama.expert_gating_func": 9})
    refused(load, "n_group is 3", changes=MOE | {"llama.expert_group_count": 3})


def test_blocks_that_predict_further_tokens_are_not_used(load):
    c = load(changes={"llama.nextn_predict_layers": 1})
    assert c.n_layer == 1 and c.n_extra == 1 and "blk.1.attn_q.weight" not in c.tensors() and "not used" in c.notes[-1]
    load(changes={"llama.nextn_predict_layers": 1}, tensors_=tensors() | {"blk.1.nextn.eh_proj.weight": zeros(32, 64)})
    refused(load, "blk.0.nextn", changes={"llama.nextn_predict_layers": 1}, tensors_=tensors() | {"blk.0.nextn.eh_proj.weight": zeros(32, 64)})
    refused(load, "llama.nextn_predict_layers is 2", changes={"llama.nextn_predict_layers": 2})


def test_the_ramp_of_yarn_is_rounded_as_the_architecture_says_or_as_one_wishes(load):
    yarn = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    assert load(changes=yarn).layers[0].rope.truncate and not load(changes=yarn, yarn_truncate=False).layers[0].rope.truncate


def test_tensors_missing_cut_or_unknown(load):
    lost = tensors(); del lost["blk.1.ffn_up.weight"]
    refused(load, "blk.1.ffn_up.weight is missing", "(48, 32)", tensors_=lost)
    refused(load, "blk.1.ffn_up.weight", "(48, 16)", "(48, 32)", tensors_=tensors() | {"blk.1.ffn_up.weight": zeros(48, 16)})
    refused(load, "blk.0.attn_q.bias", tensors_=tensors() | {"blk.0.attn_q.bias": zeros(32)})
    refused(load, "blk.2.attn_norm.weight", tensors_=tensors() | layer(2))


def test_an_unknown_architecture_is_told_what_is_missing():
    with GGUFFile(fixture("qwen3.gguf")) as f:
        metadata = {k.replace("qwen3.", "qwen4."): f.metadata[k] for k in f.metadata} | {"general.architecture": "qwen4"}
        shapes = {name: tuple(t.shape) for name, t in f.tensors.items()}
    for change, said in (({}, "keys and tensors are those of qwen3"), ({"blk.1.new.weight": (3, 4)}, "read as qwen3: tensor blk.1.new.weight (3, 4) is unknown")):
        with pytest.raises(GGUFError, match="'qwen4', which is not supported; near names: qwen3") as e: from_metadata(metadata, shapes | change)
        assert said in str(e.value) and "\n" not in str(e.value)
    with pytest.raises(GGUFError, match="read as qwen3: qwen3.block_count is missing"): from_metadata({k: v for k, v in metadata.items() if "block_count" not in k}, shapes)


def test_fixtures_of_other_engines():
    for name, n_layer, tied in (("llama", 3, False), ("llama3rope", 3, True), ("gemma3", 7, True)):
        with GGUFFile(fixture(f"{name}.gguf")) as f: c = ModelConfig.from_gguf(f)
        assert (c.n_layer, c.n_vocab, c.tied) == (n_layer, 512, tied)
        if name == "llama3rope": assert c.layers[0].rope.freq_factors == "rope_freqs.weight"
        if name == "gemma3":
            assert [s.window for s in c.layers] == [16] * 5 + [0, 16]
            assert [s.rope.base for s in c.layers] == [1e4] * 5 + [1e6, 1e4] and c.embed_scale == 8.0


def edited(name, changes=(), drop=()):
    "The config of a tiny model whose metadata was changed"
    with GGUFFile(fixture(f"{name}.gguf")) as f:
        metadata = {k: v for k, v in f.metadata.items() if k not in drop and not k.startswith("general.") or k == "general.architecture"} | dict(changes)
        return from_metadata(metadata, {k: tuple(t.shape) for k, t in f.tensors.items()})


@pytest.mark.parametrize("name, changes, drop, words", [
    ("mamba2", {"mamba2.ssm.time_step_rank": 3}, (), ["ssm.inner_size is 128", "ssm.time_step_rank (heads), which is 3"]),
    ("mamba2", {"mamba2.ssm.group_count": 3}, (), ["ssm.time_step_rank (heads) is 4", "ssm.group_count, which is 3"]),
    ("mamba2", {"mamba2.ssm.state_size": 0}, (), ["mamba2.ssm.state_size is 0"]),
    ("mamba", (), ["mamba.ssm.inner_size"], ["mamba.ssm.inner_size is missing"]),
    ("nemotron_h", {"nemotron_h.attention.head_count_kv": [0, 0]}, (), ["nemotron_h.attention.head_count_kv", "6 values", "got 2"]),
    ("nemotron_h", {"nemotron_h.attention.head_count": 5, "nemotron_h.attention.key_length": 32}, (), ["head_count is 5", "head_count_kv is 2"]),
    ("nemotron_h", (), ["nemotron_h.attention.layer_norm_epsilon"], ["nemotron_h.attention.layer_norm_rms_epsilon is missing"]),
    ("lfm2", {"lfm2.shortconv.l_cache": 1}, (), ["lfm2.shortconv.l_cache is 1"]),
    ("jamba", {"jamba.ssm.conv_kernel": -4}, (), ["jamba.ssm.conv_kernel is -4"]),
])
def test_states_that_cannot_be(name, changes, drop, words):
    with pytest.raises(GGUFError) as e: edited(name, changes, drop)
    for w in words: assert w in str(e.value), (w, str(e.value))


def test_kinds_of_layers():
    kinds = lambda c: [(s.mixer, s.ffn) for s in c.layers]
    c = edited("nemotron_h_moe")
    assert kinds(c)[:4] == [("mamba2", None), (None, "moe"), ("mamba2", None), ("full_attention", None)] and not c.layers[1].gated_experts
    assert c.layers[0].n_head_kv == 0 and kv_bytes_per_block(c.layers, "f16") == 2*(32 + 32)*16*2       # one layer of six attends
    latent = edited("nemotron_h_moe", {"nemotron_h_moe.moe_latent_size": 16})
    needs = latent.tensors()
    assert needs["blk.1.ffn_up_exps.weight"].shape == (12, 48, 16) and needs["blk.1.ffn_latent_down.weight"].shape == (16, 64)
    assert kinds(edited("jamba")) == [("mamba1", "dense"), ("mamba1", "moe"), ("full_attention", "dense"), ("mamba1", "moe")]
    assert {s.mixer for s in edited("falcon_h1").layers} == {"attention_and_mamba2"}
    turned = edited("granitehybrid", {"granitehybrid.rope.scaling.finetuned": True}).layers[2].rope
    assert edited("granitehybrid").layers[2].rope is None and turned.base == 10000


def test_an_array_where_one_number_belongs(load):
    refused(load, "llama.embedding_length is [32, 32]: expected an integer", changes={"llama.embedding_length": np.array([32, 32])})
    refused(load, "llama.rope.freq_base is [1.0, 2.0]: expected a positive number", changes={"llama.rope.freq_base": np.array([1., 2.])})
