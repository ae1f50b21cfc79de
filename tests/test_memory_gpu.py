"""What a GPU's memory is planned to hold, what does not fit, and which device `auto` means."""
import contextlib
import importlib.util
from types import SimpleNamespace

import numpy as np
import pytest
from gpu_arrays import tensor

from literate_engine import memory_gpu as module
from literate_engine import settings
from literate_engine.cuda import Device, cupy
from literate_engine.memory_gpu import choose_device, gpu_facts, memory_plan, too_old, weight_bytes
from literate_engine.quants import QUANT_TYPES, QuantTensor
from literate_engine.upload import held_on_gpu, upload

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


@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply")
def test_weight_bytes():
    "What is planned is what is taken, of types with kernels and of all others, however small or large the values."
    rng = np.random.default_rng(7)
    for d in (0, 6e-8, 1e-6, 1e-3, 1, 1000):
        scale = np.frombuffer(np.float16(d).tobytes(), np.uint8)
        parts = [tensor(name, 33, 2, rng) for name in QUANT_TYPES if name not in ("I8", "I16", "I32", "I64", "F64", "MXFP4")]
        for t in parts:
            at = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208, "TQ1_0": 52, "TQ2_0": 64}.get(t.type.name, 0)
            if t.type.block_size > 1: t.raw.reshape(-1, t.type.type_size)[:, at:at + 2] = scale
        parts.append(tensor("MXFP4", 33, 2, rng))
        parts[-1].raw[:, ::17] = 128 + round(np.log2(d or 2**-128))
        matrices, _ = upload(parts)
        assert [weight_bytes([t]) for t in parts] == [w.nbytes for w in matrices] and {w.type for w, t in zip(matrices, parts) if held_on_gpu(t.type.name) == "Q8_0"} == {"Q8_0"}
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


class Cards:
    "Several GPUs, one of which is the current one."
    def __init__(self, monkeypatch, *archs):
        self.current, self.asked = 0, []
        cards = [Device(i, f"card {i}", arch, 100, 40 << 20, 163 << 10) for i, arch in enumerate(archs)]
        monkeypatch.setattr(module, "device", lambda: cards[self.current])
        monkeypatch.setattr(type(cupy().cuda.runtime), "getDeviceCount", lambda _: len(cards))
        monkeypatch.setattr(cupy().cuda, "Device", self.use)
        monkeypatch.setattr(module, "choose_gemm", lambda: self.asked.append(self.current) or ("own", []))
        monkeypatch.setattr(module, "gpu_ceilings", lambda: self.asked.append(self.current) or {"read_gb_s": self.current})

    @contextlib.contextmanager
    def use(self, i):
        before, self.current = self.current, i
        yield
        self.current = before


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="there is CuPy")
@pytest.mark.parametrize("archs, listed", [((90, 86), ["card 0", "card 1"]), ((70, 90, 61, 75), ["card 1", "card 3"]), ((70, 61), [])])
@pytest.mark.parametrize("current", [0, 1])
def test_several_gpus(archs, listed, current, monkeypatch):
    "Those that are too old are not listed, and the first that is listed is the one that is measured, whichever is the current one."
    cards = Cards(monkeypatch, *archs)
    cards.current = current
    found, why = gpu_facts()
    assert [g["name"] for g in found] == listed and cards.current == current
    first = int(listed[0][-1]) if listed else None
    assert cards.asked == [first]*2*bool(listed) and (not listed or found[0]["read_gb_s"] == first and found[0]["gemm_backend"] == "own") and not any("read_gb_s" in g for g in found[1:])
    assert why == ("" if listed else "card 0 is sm_70, the kernels need sm_75, card 1 is sm_61, the kernels need sm_75")
    old = archs[current] < 75
    assert too_old(module.device()) == f"card {current} is sm_{archs[current]}, the kernels need sm_75"*old and module.why_no_gpu() == ""
    assert choose_device()[0] == ("cpu" if old else "cuda") and (not old or choose_device()[1] == too_old(module.device()))


def test_a_gpu_that_is_too_old_is_not_asked_for(monkeypatch):
    monkeypatch.setattr(settings, "device", lambda: Device(0, "some card", 70, 80, 6 << 20, 96 << 10))
    with pytest.raises(ValueError, match="^device is 'cuda': some card is sm_70, the kernels need sm_75$"): settings.which_device(settings.EngineConfig(device="cuda"), SimpleNamespace(layers=[]), [])
