"""The GPU of a test, or the emulator, and arrays on it."""
import os

import numpy as np

from literate_engine.cuda import cupy
from literate_engine.emulator import emulated_arch
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
