"""What the GPU's program joins changes the launches of a step: sums in the epilogue of products, no bit of whose result changes, and rows that products prepare. In the emulator where there is no GPU."""
from collections import Counter

import numpy as np
import pytest

from literate_engine import program_gpu
from literate_engine.core import fixture, rel_err
from literate_engine.gguf import GGUFFile, write_gguf
from literate_engine.model import Model, prompt_logits
from literate_engine.quants import QuantTensor, quantize

pytestmark = pytest.mark.usefixtures("emulated_gpu")
IDS = np.random.default_rng(2).integers(0, 500, 9).tolist()
NAMES = ["llama", "qwen2", "qwen3", "cohere2", "olmo2", "starcoder2", "gemma3", "granite"]


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    "A fixture with its matrices in Q4_0"
    def make(name):
        path = tmp_path_factory.mktemp("models")/f"{name}.gguf"
        with GGUFFile(fixture(f"{name}.gguf")) as f:
            tensors = {n: QuantTensor.from_gguf(f, n).dequantize() for n in f.tensors}
            held = {n: (quantize(t, "Q4_0"), "Q4_0", t.shape) if t.ndim == 2 and t.shape[1] % 32 == 0 else t for n, t in tensors.items()}
            write_gguf(path, {k: f.metadata[k] for k in f.metadata}, held)
        return path
    return make


def run(path, chunk, activations="int8", device="cuda"):
    "Logits of a text in steps of `chunk` tokens, and how often each kernel is launched in a step"
    m = Model(path, device=device, max_model_len=64, max_num_seqs=64, activations=activations)
    logits = prompt_logits(m, IDS, chunk)
    kernels = Counter(one.kernel.name.split("<")[0] for _, one in next(iter(m.program.steps.values())).launches) if device == "cuda" else None
    m.close()
    return logits, kernels


@pytest.mark.parametrize("name", NAMES)
def test_joined_or_not(name, quantised, monkeypatch):
    path = quantised(name)
    joined = {chunk: run(path, chunk) for chunk in (1, 9)}
    monkeypatch.setattr("literate_engine.linear_gpu.OWN_BYTES", 0)
    prepared = {chunk: run(path, chunk) for chunk in (1, 9)}
    monkeypatch.setattr(program_gpu, "fuse_sums", lambda code, keep=(): code)
    plain = {chunk: run(path, chunk) for chunk in (1, 9)}
    for chunk in (1, 9):
        assert np.array_equal(prepared[chunk][0].view(np.uint32), plain[chunk][0].view(np.uint32)), chunk
        assert rel_err(joined[chunk][0], plain[chunk][0]) < 2e-2                                    # a value at the edge of a code may fall to the other side
        assert prepared[chunk][1].total() <= plain[chunk][1].total()
    assert joined[9][1] == prepared[9][1] and "gemv_own" not in prepared[1][1]
    assert joined[1][1]["gemv_own"] and joined[1][1].total() < prepared[1][1].total() + (name == "starcoder2")


def test_a_layer_is_few_launches(quantised):
    "llama, three layers, one row: four products a layer, with what surrounds them; besides attention and what it needs there is nothing"
    kernels = run(quantised("llama"), 1)[1]
    assert kernels["gemv_own"] == 12 and kernels["norm"] == 1 and not {"gated", "add", "quantize_act"} & set(kernels)


@pytest.mark.parametrize("name", ["llama", "cohere2"])
def test_float32_rows_of_any_width(name, quantised):
    "Rows that are no multiple of a group of 128, read where they lie"
    path = quantised(name)
    want = run(path, 9, "float32", "ref")[0]
    for chunk in (1, 9): assert rel_err(run(path, chunk, "float32")[0], want) < 1e-5
