"""Every type of file: in memory as itself or as a format that holds the same values, in dense models, mixtures and embeddings; reported before and after loading."""
import numpy as np
import pytest

from literate_engine.cli import _engine_notes
from literate_engine.core import data_dir, rel_err
from literate_engine.formats import random_model
from literate_engine.gguf import GGUFFile
from literate_engine.linear import ACT_OF, held_as, linear_int8_ref, linear_ref
from literate_engine.linear_cpu import linear_cpu, pack
from literate_engine.linear_lowbit import held_blocks
from literate_engine.model import Model, prompt_logits
from literate_engine.quants import QUANT_TYPES

BLOCKS = np.load(data_dir()/"fixtures/quant_blocks.npz")
TYPES = sorted({k.rsplit("_", 1)[0] for k in BLOCKS.files})
HELD = [t for t in TYPES if held_as(t) != t]


def stored(name): return BLOCKS[f"{name}_raw"], BLOCKS[f"{name}_f32"]


def test_every_type_has_a_home():
    assert {held_as(t) for t in QUANT_TYPES} <= set(ACT_OF)
    assert [t for t in TYPES if held_as(t) == "F32"] == [], "no quantised type grows to float32"


@pytest.mark.parametrize("name", HELD)
def test_held_values_are_the_files(name):
    "Columns out of the packed matrix, with one activation of 1: ggml's own values; and whole products, float32 and int8."
    raw, want = stored(name)
    (n, k), fmt = want.shape, held_as(name)
    W = pack(held_blocks(raw, name), fmt, n, k)
    x = np.zeros((k, k), np.float32)
    x[np.arange(k), np.arange(k)] = 1
    assert (linear_cpu(x, W, fmt, n, exact=True).T == want).all()
    x = np.random.default_rng(0).standard_normal((7, k)).astype(np.float32)
    assert rel_err(linear_cpu(x, W, fmt, n, exact=True), linear_ref(x, raw, name)) < 2e-6
    assert rel_err(linear_cpu(x, W, fmt, n), linear_int8_ref(x, raw, name)) < 2e-6


def sane_blocks(name):
    "Stored blocks whose values are not all zero: the half with the smaller ones, lest attention become a step function."
    raw, values = stored(name)
    t = QUANT_TYPES[name]
    top = np.abs(values.reshape(-1, t.block_size)).max(1)
    order = [i for i in np.argsort(top) if top[i] > 1e-3]
    return raw.reshape(-1, t.type_size)[order[:max(2, len(order)//2)]]


SIZES = dict(n_layer=1, n_embd=256, n_ff=256, n_head=4, n_head_kv=2, n_vocab=320)


@pytest.mark.parametrize("name", [*HELD, "IQ4_NL", "IQ4_XS", "MXFP4", "Q2_K", "Q3_K"])
def test_models_of_one_type(name, tmp_path):
    "Embeddings, matrices and experts of a type: float32 on the CPU equals the reference, int8 is near, and both reports name what is held otherwise."
    ids = [3, 300, 41, 41, 7, 256, 9, 100, 2]
    for n_expert in (0, 4):
        path = tmp_path/f"{n_expert}.gguf"
        random_model(path, name, n_expert=n_expert, pool=sane_blocks(name), **SIZES)
        logits = {}
        for mode, options in dict(ref=dict(device="ref"), float32=dict(activations="float32"), int8={}).items():
            model = Model(path, max_model_len=32, max_num_seqs=16, **options)
            logits[mode] = prompt_logits(model, ids)
            if mode != "ref":
                assert (prompt_logits(model, ids, 4) == logits[mode]).all()
                assert model.notes == ([f"{name} has no kernel of its own: its values are held as {held_as(name)}"] if held_as(name) != name else [])
            model.close()
        assert np.isfinite(logits["ref"]).all() and rel_err(logits["float32"], logits["ref"]) < 1e-4
        if not n_expert: assert rel_err(logits["int8"], logits["ref"]) < 0.2           # scales over decades make sharp attention; in mixtures a rounding may choose another expert
        with GGUFFile(path) as g: notes = "\n".join(_engine_notes(g))
        assert (f"{name} has no kernel of its own: held as {held_as(name)}" in notes) == (held_as(name) != name)
