"""The GPU of a test, or the emulator, and arrays and models on it."""
import os

import numpy as np

from literate_engine.core import fixture
from literate_engine.cuda import cupy
from literate_engine.emulator import emulated_arch
from literate_engine.model import Model
from literate_engine.quants import QUANT_TYPES, QuantTensor


def emulated() -> bool:
    "Whether the tests' GPU is the emulator: as LITERATE_GPU says (`real`, or empty: a real one), and where it says nothing."
    return "LITERATE_GPU" not in os.environ or emulated_arch() is not None


def gpu(a): return cupy().asarray(np.ascontiguousarray(a))


def empty(*shape):
    "Poisoned, so that a gap shows."
    y = cupy().empty(shape, np.float32)
    y[...] = np.nan
    return y


def tensor(name, n, blocks, rng):
    "Blocks of random bytes."
    t = QUANT_TYPES[name]
    return QuantTensor(rng.integers(0, 256, (n, blocks*t.type_size), dtype=np.uint8), name, (n, blocks*t.block_size))


def load(name, **options):
    "A tiny model on the GPU."
    return Model(fixture(f"{name}.gguf"), max_model_len=160, max_num_seqs=64, max_num_batched_tokens=128, **{"device": "cuda", "num_kv_blocks": 60} | options)


def first_prompt(name):
    "Its ids, and the logits of another implementation for all of them."
    want = np.load(fixture(f"{name}.npz"))
    return want["p1_ids"].tolist(), want["p1_logits_torch" if "p1_logits_torch" in want else "p1_logits"]
