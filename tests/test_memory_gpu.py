"""What a GPU's memory is planned to hold, what does not fit, and which device `auto` means."""
import importlib.util

import numpy as np
import pytest
from gpu_arrays import tensor

from literate_engine import memory_gpu as module
from literate_engine.memory_gpu import choose_device, gpu_facts, memory_plan, weight_bytes
from literate_engine.quants import QuantTensor
from literate_engine.upload import upload

pytestmark = pytest.mark.usefixtures("emulated_gpu")


def kv(n, kv_type): return {"f16": 64, "q8_0": 34, "q4_0": 18}[kv_type]*1024*n


@pytest.mark.parametrize("free, says", [(4 << 30, None), (int(1.7*2**30), "what would fit: max_model_len "), (int(1.31*2**30), "kv_type q4_0 with max_model_len"), (1 << 30, "a smaller quantisation")])
def test_the_plan(free, says):
    fixed = {"weights": 1 << 30, "activations": 30 << 20, "logits": 1 << 20}
    if says is None:
        plan = memory_plan(fixed, kv, 16384, "f16", free, kv_wanted=2 << 30)
        assert plan.needed <= free and plan.parts["KV cache"] == 2 << 30 and plan.parts["weights"] == 1 << 30
        assert memory_plan(fixed, kv, 16384, "f16", free).needed == free
        return
    with pytest.raises(ValueError, match="not enough memory on the GPU: needs .*weights 1.00 GiB.*KV cache for 16384 tokens in f16 1.00 GiB; free") as e: memory_plan(fixed, kv, 16384, "f16", free)
    assert says in str(e.value) and "\n" not in str(e.value)
    for advice in str(e.value).partition("what would fit: ")[2].split(", or "):
        words = advice.split()
        if not words: continue
        kv_type, n = words[1] if words[0] == "kv_type" else "f16", int(words[-1]) if "max_model_len" in words else 16384
        memory_plan(fixed, kv, n, kv_type, free)


def test_weight_bytes():
    rng = np.random.default_rng(7)
    parts = [tensor("Q4_K", 33, 2, rng), tensor("IQ2_XS", 4, 1, rng), tensor("F16", 5, 20, rng), QuantTensor(np.zeros((1, 40), np.uint8), "F32", (10,))]
    assert weight_bytes(parts) == sum(w.nbytes for w in upload(parts[:3])[0]) + 40


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="there is CuPy")
def test_which_device(monkeypatch):
    assert choose_device() == ("cpu", "the GPU is emulated, which is for tests: it has to be asked for by name")
    gpu, = gpu_facts()[0]
    assert gpu["emulated"] and gpu["compute"] == "9.0" and "read_gb_s" not in gpu
    card = module.device().__class__(0, "Some GPU", 80, 108, 40 << 20, 163 << 10)
    monkeypatch.setattr(module, "device", lambda: card)
    assert choose_device(1 << 30) == ("cuda", "Some GPU has 8.00 GiB free, the model needs 1.00 GiB")
    device, why = choose_device(90 << 30)
    assert device == "cpu" and why.startswith("the model needs 90.00 GiB, of the 8.00 GiB of Some GPU there are ")
    monkeypatch.undo()
    monkeypatch.delenv("LITERATE_GPU", raising=False)
    device, why = choose_device()
    assert device == "cpu" and "pip install" in why and gpu_facts() == ([], why)
