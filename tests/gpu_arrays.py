"""The GPU of a test, or the emulator, and arrays on it."""
import os

import numpy as np

from literate_engine.cuda import cupy
from literate_engine.emulator import emulated_arch


def emulated() -> bool:
    "Whether the tests' GPU is the emulator: as LITERATE_GPU says (`real`, or empty: a real one), and where it says nothing."
    return "LITERATE_GPU" not in os.environ or emulated_arch() is not None


def gpu(a): return cupy().asarray(np.ascontiguousarray(a))


def empty(*shape):
    "Poisoned, so that a gap shows."
    y = cupy().empty(shape, np.float32)
    y[...] = np.nan
    return y
