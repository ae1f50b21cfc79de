"""Every kernel compiles for every chip, without a GPU; the cache of compiled kernels survives damage; the module needs neither CuPy nor a GPU."""
import importlib
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from literate_engine import cuda, emulator
from literate_engine.cuda import ARCHS, MODULES, CudaError, CudaModule, Source, compile_kernel, kernels_dir

pytest.importorskip("cuda.bindings", reason="the compiler is in the development requirements")
for _path in Path(cuda.__file__).parent.glob("*.py"):
    if "CudaModule(" in _path.read_text("utf-8"): importlib.import_module(f"literate_engine.{_path.stem}")
SPILLS = {("gemm_mma<Q5_1, 4, 2>", 100): 16, ("gemm_mma<Q5_1, 4, 2>", 120): 16, ("gemm_mma<Q6_K, 4, 2>", 120): 300,               # bytes, at most; the plan with one tile of rows has none, and `tune` chooses
          ("attention_tile<128, true>", 80): 8, ("attention_tile<128, true>", 86): 8, ("attention_tile<128, true>", 89): 8, ("attention_tile<128, true>", 90): 16,      # once for 64 positions
          ("attention_tile<256, true>", 100): 16}                                                                                   # once for 32 positions


def compiled(job: tuple[str, str, int]) -> tuple[str, int, int, int]:
    file, name, arch = job
    c = compile_kernel(MODULES[file].source, name, arch, MODULES[file].options)
    return name, arch, c.spills, c.registers


@pytest.fixture(scope="module")
def pool():
    with ProcessPoolExecutor(min(8, os.cpu_count() or 1)) as p: yield p


def test_every_file_has_a_module():
    assert sorted(MODULES) == sorted(p.name for p in kernels_dir().glob("*.cu")), "a kernel file that no chapter uses"


@pytest.mark.parametrize("arch", ARCHS)
def test_every_kernel_compiles(arch, pool):
    "All that the engine may launch on this architecture, without spills but for those that are known, and no more of these"
    jobs = [(file, name, arch) for file in sorted(MODULES) for name in MODULES[file].names(arch)]
    assert jobs
    results = list(pool.map(compiled, jobs, chunksize=4))
    assert not (spill := [(name, spills) for name, _, spills, _ in results if spills > SPILLS.get((name, arch), 0)]), f"sm_{arch}: registers spill in {spill}"
    assert all(0 < registers <= 255 for *_, registers in results)


def test_an_error_names_file_and_line(tmp_path, monkeypatch):
    (tmp_path / "head.cuh").write_text("#pragma once\ninline __device__ int two() { return too; }\n")
    (tmp_path / "broken.cu").write_text('#include "head.cuh"\n__global__ void f(int* y) { *y = two(); }\n')
    monkeypatch.setattr(emulator, "kernels_dir", lambda: tmp_path)
    with pytest.raises(CudaError, match=r'kernels/head.cuh, line 2: identifier "too" is undefined[\s\S]*return too;[\s\S]*while compiling f for sm_90'):
        compile_kernel(Source.of("broken.cu"), "f", 90)
    with pytest.raises(CudaError, match="has no kernel g"): compile_kernel(Source.of("__global__ void f() {}\n"), "g", 90)


def test_the_cache(tmp_path, monkeypatch):
    "Keyed by all that goes in; damage in any place means compiling again; a full disk, or a folder that cannot be written, costs time only, and nothing is left of it"
    monkeypatch.setenv("LITERATE_CACHE", str(tmp_path))
    source = Source.of("template <int N> __global__ void f(int* y) { *y = N; }\n")
    first = compile_kernel(source, "f<1>", 80)
    path, = (p for p in (tmp_path / "cuda").rglob("*") if p.is_file())
    assert compile_kernel(source, "f<1>", 80) == first
    others = [compile_kernel(source, "f<2>", 80), compile_kernel(source, "f<1>", 90), compile_kernel(source, "f<1>", 80, ("-lineinfo",)),
              compile_kernel(Source(source.name, source.text + "\n// other\n"), "f<1>", 80)]
    assert len([p for p in (tmp_path / "cuda").rglob("*") if p.is_file()]) == 5 and len({c.cubin for c in [first, *others[:3]]}) == 4
    whole = path.read_bytes()
    for damaged in (b"", b"\n\n", whole[:20], whole[:-1], whole[:100] + bytes([whole[100] ^ 1]) + whole[101:], whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:]):
        path.write_bytes(damaged)
        again = compile_kernel(source, "f<1>", 80)
        assert again.cubin == first.cubin and path.read_bytes().split(b"\n", 2)[2] == first.cubin
    try: import resource                                              # not on every system
    except ImportError: resource = None
    if resource:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))           # a full disk: the write stops in the middle
        try: assert compile_kernel(source, "f<9>", 80).cubin and compile_kernel(source, "f<9>", 80).cubin
        finally: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert len([p for p in (tmp_path / "cuda").glob("*/*")]) == 5, "half a file was left"
    monkeypatch.setenv("LITERATE_CACHE", str(path))                   # a file where a folder should be
    assert compile_kernel(source, "f<1>", 80).cubin == first.cubin


def test_a_module_compiles_what_is_asked():
    m = CudaModule("template <int N> __global__ void f(int* y) { *y = N; }\n", lambda arch: ("f<3>", "f<4>"))
    done = m.compile(86)
    assert sorted(done) == ["f<3>", "f<4>"] and all(c.symbol.startswith("_Z") and c.cubin[:4] == b"\x7fELF" for c in done.values())
    assert m["f<3>"] is m["f<3>"] and m.source.headers == {}


def test_arguments():
    values, addresses = cuda.pack_args([np.float16(2), True, None, 7, 1.5, np.uint64(2**63)])
    raw = values.tobytes()
    assert raw[:2] == np.float16(2).tobytes() and raw[8] == 1 and raw[16:24] == bytes(8) and raw[24:28] == np.int32(7).tobytes() and raw[32:36] == np.float32(1.5).tobytes()
    assert values[5] == 2**63 and list(np.diff(addresses)) == [8]*5 and addresses[0] == values.ctypes.data
    values, _ = cuda.pack_args([False, np.bool_(True), -2**31, np.float64(0.1), np.int64(-5), np.uint8(200)])
    assert values.tobytes() == b"".join(x.tobytes().ljust(8, b"\0") for x in (np.uint8(0), np.uint8(1), np.int32(-2**31), np.float32(0.1), np.int64(-5), np.uint8(200)))
    assert [len(x) for x in cuda.pack_args([])] == [0, 0]
    with np.errstate(over="ignore"): assert cuda.pack_args([1e300])[0].view(np.float32)[0] == np.inf
    for wrong in (np.zeros(3), np.longdouble(1), "x", object()):
        with pytest.raises(TypeError, match="expected a CuPy array"): cuda.pack_args([wrong])
    for wrong in (2**31, -2**31 - 1):
        with pytest.raises(ValueError, match="does not fit 32 bits"): cuda.pack_args([wrong])


def test_imports_need_no_gpu():
    "The module is light, and says what to install when it is asked to run."
    code = ("import sys; sys.modules['cupy'] = None; sys.modules['cuda.bindings'] = None; sys.modules['cuda.bindings.nvrtc'] = None\n"
            "import literate_engine.cuda as c\nassert 'cuda.bindings.driver' not in sys.modules\n"
            "for f in (c.device, lambda: c.compile_kernel(c.Source.of('probe.cu'), 'relay', 90)):\n"
            "    try: f()\n    except c.CudaError as e: assert 'pip install literate-engine[gpu]' in str(e), e\n    else: raise AssertionError\n")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_shared_memory_once_allowed_stays_allowed(monkeypatch):
    "A later launch that needs less must not take it from an earlier one."
    asked = []
    driver = SimpleNamespace(cuFuncSetAttribute=lambda f, a, n: asked.append(n) or (0,), CUfunction_attribute=SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8))
    monkeypatch.setattr(cuda, "_bindings", lambda name: driver)
    kernel = cuda.Kernel(None, "f")
    for n in (1000, 131072, 65536, 131072, 200000): kernel.allow(1234, n)
    assert asked == [131072, 200000]
