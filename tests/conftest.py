"""Fixtures shared by the tests: the repository's root and the real models, fetched when they can be."""
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))               # the tests read the checkout, whether or not the package is installed
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN: signal.signal(signal.SIGINT, signal.default_int_handler)       # a job in the background ignores it, and so would what the tests interrupt


def hold(engine, seconds: float = 0.4) -> None:
    "Have the engine wait before its next step: what is submitted within this time begins together, however busy the machine is."
    from literate_engine.sampling import SamplingParams
    gate, held = threading.Event(), threading.Event()
    engine.submit([1], SamplingParams(max_tokens=1, ignore_eos=True), lambda output: (held.set(), gate.wait(30)))          # on the engine's thread
    assert held.wait(30)
    threading.Timer(seconds, gate.set).start()


def fetched(name: str) -> Path:
    from literate_engine.core import model_path
    try:
        return model_path(name, fetch=True)
    except (OSError, ValueError) as e:
        pytest.skip(f"{name} is not here and cannot be fetched: {e}")


@pytest.fixture
def emulated_gpu(monkeypatch):
    "The emulator as the GPU of this test, unless LITERATE_GPU asks for a real one or says which to emulate."
    from gpu_arrays import emulated
    from literate_engine.emulator import CudaError, host_compiler
    from literate_engine.emulated_streams import synchronize
    if emulated() and "LITERATE_GPU" not in os.environ: monkeypatch.setenv("LITERATE_GPU", "emulated")
    if emulated():
        try: host_compiler()
        except CudaError as e: pytest.skip(str(e))
        synchronize()                       # what another test has left running is over


@pytest.fixture
def real_gpu():
    "A GPU that is not emulated, for what would take the emulator hours."
    from literate_engine.cuda import CudaError, device
    from literate_engine.emulator import emulated_arch
    if emulated_arch(): pytest.skip("the GPU is emulated")
    try: return device()
    except CudaError as e: pytest.skip(str(e))


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def smollm2() -> Path:
    "SmolLM2-135M-Instruct, Q4_1: the default model."
    return fetched("smollm2")


@pytest.fixture(scope="session")
def gemma3() -> Path:
    "Gemma 3 270M, Q4_K_M: sliding windows, another tokenizer, k-quants."
    return fetched("gemma3-270m")
