"""Products by the vendor's library: the kernels around it against the reference, to the last bit where nothing is summed; its arguments, as a library of Fortran's reads them; programs, settings, notes and the memory plan."""
import ctypes
import weakref

import numpy as np
import pytest
from gpu_arrays import first_prompt, gpu, load

from literate_engine import LLM, EngineConfig, cublas, settings
from literate_engine.config import ModelConfig
from literate_engine.core import fixture, rel_err
from literate_engine.cublas import CUBLAS, SCRATCH, CublasGemm, CublasProduct, Handle, OwnGemm, choose_gemm, gemm_room, prepare_row_acts, row_buffers, slices, workspace_bytes
from literate_engine.cuda import CudaError, Graph, Launch, cupy, device
from literate_engine.gemm_gpu import MANY, RAISE, gemm_ref, half_act_ref, half_weights_ref
from literate_engine.gguf import GGUFFile
from literate_engine.linear import linear_ref
from literate_engine.linear_gpu import GPU_FORMATS, HALVES, pack_gpu, to_gpu
from literate_engine.model import Model, prompt_logits
from literate_engine.quants import QUANT_TYPES, QuantTensor, dequantize, quantize
from literate_engine.settings import gpu_room, resolve

pytestmark = pytest.mark.usefixtures("emulated_gpu")
rng = np.random.default_rng(0)
def matrix(n, k, t): return quantize((rng.standard_normal((n, k))*np.exp(rng.standard_normal((n, 1)))*0.1).astype(np.float32), t)
def rows(m, k): return (rng.standard_normal((m, k))*np.exp(2*rng.standard_normal((m, 1)))).astype(np.float32)
def kind(t): return "BF16" if t == "BF16" else "F16"
def block(t): return max(32, QUANT_TYPES[t].block_size)
def wide(u, t): return (u.astype(np.uint32) << 16).view(np.float32) if t == "BF16" else u.view(np.float16).astype(np.float32)


@pytest.fixture
def library():
    "Opened, and given back."
    if device().name != "emulated":
        try: cublas.load_cublas()
        except CudaError as e: pytest.skip(str(e))
    opened = []
    def make(room=SCRATCH):
        opened.append(CublasGemm(room)); opened[-1].open()
        opened[-1].scratch[...] = 0xff
        return opened[-1]
    yield make
    for g in opened: g.close()


def product(gemm, x, w, y=None, **more):
    "Into a poisoned output."
    a = gemm.buffers(*x.shape, kind(w.type))
    if y is None: y = cupy().full((len(x), w.n), np.nan, np.float32)
    for launch in gemm.prepare_acts(a, gpu(x) if isinstance(x, np.ndarray) else x) + gemm.prepare(a, w, y, **more): launch()
    return y.get()


@pytest.mark.parametrize("t", GPU_FORMATS)
def test_unpacked_weights(t):
    "The numbers of the reference, to the last bit, wherever a slice begins; nothing beside them is written"
    for n, k in ((1, block(t)), (33, 3*block(t)), (70, 1280), (97, 256*7)):
        raw, want = (r := matrix(n, k, t)), half_weights_ref(pack_gpu(r, t), t, k)[:n]
        w = to_gpu(raw, t)
        for first in range(0, n, 32):
            num = min(n - first, 64)
            out = cupy().full((num + 1, k), 0x7e01, np.uint16)
            Launch(CUBLAS[f"unpack<{t}>"], -(-num*w.groups//64), 256, [*w.planes, out, first*w.groups, num, w.groups, k], pdl=True)()
            got = out.get()
            assert np.array_equal(got[:num].view(np.float16).astype(np.float32)/RAISE, want[first:first + num]) and (got[num] == 0x7e01).all(), (n, k, first)


@pytest.mark.parametrize("arch", ["75", "120"])
def test_other_cards(arch, library, monkeypatch):
    "The same numbers from the kernels of the oldest and of the newest"
    if device().name != "emulated": pytest.skip("a real GPU")
    monkeypatch.setenv("LITERATE_GPU", f"emulated:{arch}")
    gemm = library(60_000)
    for t in (*GPU_FORMATS, "F16"):
        n, k, m = 70, 512, 40
        raw, x = matrix(n, k, t), rows(m, k)
        want = gemm_ref(x, pack_gpu(raw, t), t, n, "F16")
        assert np.max(np.abs(product(gemm, x, to_gpu(raw, t)) - want)/(np.abs(x) @ np.abs(dequantize(raw, t)).T)) < 2e-6, t


@pytest.mark.parametrize("t", HALVES)
def test_activations(t):
    "The numbers of the reference, what is left over, and the scale; rows of zeros, of very large and very small numbers, rows that lie apart"
    for m, k in ((1, 8), (5, 40), (32, 2056), (33, 264), (70, 256)):
        x = rows(m, k)*10.0**rng.integers(-30, 30, (m, 1)).astype(np.float32)
        x[m//2] = 0; x[-1] = 1e-40; x[0, 0] = 3e38
        apart = np.full((m, k + 12), np.nan, np.float32)
        apart[:, 4:4 + k] = x
        for given in (gpu(x), gpu(apart)[:, 4:4 + k]):
            a = row_buffers(m, k, t)
            a.xh[...] = 0x7c01
            for launch in prepare_row_acts(a, given): launch()
            want = half_act_ref(x, t)
            assert np.array_equal(a.xs.get(), want[2]) and len(a.xh) == 1 + (m <= 32)
            for got, ref in zip(wide(a.xh.get(), t), want): assert np.array_equal(got, ref), (m, k)
    with pytest.raises(ValueError, match="aligned to 16 bytes"): prepare_row_acts(row_buffers(70, 256, t), gpu(apart)[:, 2:258])


@pytest.mark.parametrize("t", [*GPU_FORMATS, *HALVES])
def test_products(t, library):
    "Odd shapes, one slice and several, with and without what is added, which may be the result's own memory"
    for n, k, m, room in ((1, block(t), 33, SCRATCH), (97, 512, 40, 100_000), (260, 768, 129, 330_000), (132, 1280, 300, SCRATCH)):
        raw, x, bias, stream = matrix(n, k, t), rows(m, k), rng.standard_normal(n).astype(np.float32), rows(m, n)
        gemm, w, plain = library(room), to_gpu(raw, t), gemm_ref(x, pack_gpu(raw, t), t, n, kind(t))
        terms = np.abs(x.astype(np.float64)) @ np.abs(dequantize(raw, t).astype(np.float64)).T + 1e-30
        assert room == SCRATCH or len(slices(n, k, m, t not in HALVES, room)) > 1 or t in HALVES
        assert np.max(np.abs(product(gemm, x, w) - plain)/terms) < 2e-6, (n, k, m)
        assert np.max(np.abs(product(gemm, x, w) - x @ dequantize(raw, t).T)/terms) < 2.0**(-7 if t == "BF16" else -9)
        y = gpu(stream)
        got = product(gemm, x, w, y, add=(y, 0.75), bias=gpu(bias))
        assert np.max(np.abs(got - (stream + 0.75*(plain + bias)))/(terms + np.abs(bias) + np.abs(stream))) < 2e-6, (n, k, m)
        assert np.max(np.abs(product(gemm, x, w, bias=gpu(bias)) - (plain + bias))/(terms + np.abs(bias))) < 2e-6


@pytest.mark.parametrize("t", HALVES)
def test_few_rows_of_16_bit_weights(t, library):
    "As good as float32 activations: what rounding leaves over is multiplied as well"
    gemm = library(100_000)
    for n, k, m in ((1, 8, 5), (330, 520, 9), (33, 2056, 16), (700, 1024, 32)):
        raw, x = matrix(n, k, t), rows(m, k)
        error = np.abs(product(gemm, x, to_gpu(raw, t)) - linear_ref(x, raw, t))/(np.abs(x) @ np.abs(dequantize(raw, t)).T)
        assert np.max(error) < (2.0**-15 if t == "BF16" else 1e-6), (n, k, m)


def test_sums_are_float32_and_a_nan_stays_in_its_row(library):
    gemm, k = library(), 4352
    for t in HALVES: assert (product(gemm, np.ones((66, k), np.float32), to_gpu(quantize(np.ones((16, k), np.float32), t), t)) == k).all()
    x = rows(40, 256)
    x[7, 9] = np.nan
    y = product(gemm, x, to_gpu(matrix(40, 256, "Q4_K"), "Q4_K"))
    assert np.isnan(y[7]).all() and np.isfinite(np.delete(y, 7, 0)).all()


def test_slices():
    "Every row once, in order, in multiples of what a kernel and the library like, within the room"
    for n, k, m, unpacked in ((1, 32, 33, True), (97, 256, 40, True), (24576, 4096, 4096, True), (128256, 4096, 512, True), (4096, 28672, 65536, True), (151936, 8192, 5, False), (333, 1 << 19, 33, True)):
        parts = slices(n, k, m, unpacked)
        assert [f for f, _ in parts] == [0, *np.cumsum([r for _, r in parts])][:-1] and sum(r for _, r in parts) == n and all(f % 32 == 0 for f, _ in parts)
        assert max(4*m*(-(-r//8)*8) + 2*k*r*unpacked + 256*unpacked for _, r in parts) <= SCRATCH
        if n > 128 and k < 10000 and m < 10000: assert all(f % 128 == 0 for f, _ in parts)
    with pytest.raises(ValueError, match="cuBLAS: a product of 1048576 rows with 4096 columns does not fit"): slices(4096, 4096, 1 << 20)


def test_in_a_graph(library):
    "Captured once, replayed with other numbers; in the order of its stream, and of no other"
    gemm, t, m = library(200_000), "Q4_K", 50
    raw, x, y = matrix(160, 512, t), gpu(rows(m, 512)), cupy().full((m, 160), np.nan, np.float32)
    w, a = to_gpu(raw, t), gemm.buffers(m, 512, "F16")
    launches = gemm.prepare_acts(a, x) + gemm.prepare(a, w, y)
    assert sum(one.kernel.name == "cublasGemmEx" for one in launches) > 1
    graph = Graph(lambda: [one() for one in launches])
    assert device().name != "emulated" or np.isnan(y.get(stream=graph.stream)).all()
    for _ in range(3):
        new = rows(m, 512)
        x.set(new, stream=graph.stream); graph()
        assert rel_err(y.get(stream=graph.stream), gemm_ref(new, pack_gpu(raw, t), t, 160, "F16")) < 1e-5
    if device().name == "emulated":
        graph()
        with cupy().cuda.Stream(non_blocking=True), pytest.raises(CudaError, match="no stream, event or synchronisation orders the two"): launches[-2]()
        graph.synchronize()


class Fortran:
    "The library, by its documentation, on the memory of the host: matrices of columns, a leading dimension from one to the next."
    def __init__(self): self.told = []
    def cublasCreate_v2(self, handle): self.told.append("create"); return 0
    def cublasDestroy_v2(self, handle): self.told.append("destroy"); return 0
    def cublasSetStream_v2(self, handle, stream): self.told.append(("stream", stream)); return 0
    def cublasSetWorkspace_v2(self, handle, at, size): self.told.append(("workspace", at % 256, size)); return 0
    def cublasGemmEx(self, handle, ta, tb, m, n, k, alpha, a, a_type, lda, b, b_type, ldb, beta, c, c_type, ldc, compute, algo):
        def columns(at, num_rows, num, lead, dtype):
            size = (lead*(num - 1) + num_rows)*np.dtype(dtype).itemsize
            flat = np.frombuffer((ctypes.c_ubyte*size).from_address(at), dtype)
            return np.lib.stride_tricks.as_strided(flat, (num_rows, num), (flat.itemsize, lead*flat.itemsize))
        assert (ta, tb, c_type, compute, algo) == (1, 0, 0, 68, -1) and a_type == b_type and lda >= k and ldb >= k and ldc >= m
        t = {2: "F16", 14: "BF16"}[a_type]
        first, second = (wide(np.ascontiguousarray(columns(at, k, num, lead, np.uint16)), t) for at, num, lead in ((a, m, lda), (b, n, ldb)))
        sums = columns(c, m, n, ldc, np.float32)
        value = lambda p: ctypes.c_float.from_address(p).value
        sums[...] = value(alpha)*(first.T @ second) + (value(beta)*sums if value(beta) else 0)
        return 0


@pytest.mark.parametrize("t", ["Q4_K", "Q5_0", "F16", "BF16"])
def test_its_arguments(t, monkeypatch):
    "What is passed to the library means the product that is wanted; the stream is told before the workspace, and only when it is another one"
    if device().name != "emulated": pytest.skip("the library itself is tested there")
    monkeypatch.setattr(cublas, "load_cublas", lambda: fake)
    fake, k = Fortran(), 416 if QUANT_TYPES[t].block_size < 256 else 512
    gemm = CublasGemm(100_000); gemm.open()
    for m, n in ((33, 97), (70, 130), (9, 40)):
        if m < MANY[t]: continue
        raw, x = matrix(n, k, t), rows(m, k)
        got, want = product(gemm, x, to_gpu(raw, t)), gemm_ref(x, pack_gpu(raw, t), t, n, kind(t))
        assert np.max(np.abs(got - want)/(np.abs(x) @ np.abs(dequantize(raw, t)).T)) < 2e-6
    assert fake.told == ["create", ("stream", 0), ("workspace", 0, workspace_bytes(device()))]
    with cupy().cuda.Stream(non_blocking=True) as other: gemm.handle.to(other.ptr); gemm.handle.to(other.ptr)
    assert fake.told[3:] == [("stream", other.ptr), ("workspace", 0, workspace_bytes(device()))]
    gemm.close()
    assert fake.told[5:] == ["destroy"]
    gemm.close()
    assert len(fake.told) == 6


def test_what_the_library_refuses(monkeypatch):
    "The name of its status, and the shape; a handle that nobody closed goes with its owner"
    if device().name != "emulated": pytest.skip("the library itself is tested there")
    fake = Fortran()
    monkeypatch.setattr(cublas, "load_cublas", lambda: fake)
    gemm = CublasGemm(); gemm.open()
    x, w, sums = cupy().zeros((40, 64), np.uint16), cupy().zeros((24, 64), np.uint16), cupy().zeros((40, 24), np.float32)
    for status, name in ((15, "NOT_SUPPORTED"), (14, "INTERNAL_ERROR"), (99, "99")):
        fake.cublasGemmEx = lambda *args: status
        with pytest.raises(CudaError, match=f"cublasGemmEx: CUBLAS_STATUS_{name} for 40 rows of x and 24 of W, 64 columns"): CublasProduct(gemm.handle, x, w, sums, 64, False)()
    gone = weakref.ref(gemm.handle)
    del gemm
    assert gone() is None and fake.told[-1] == "destroy"
    fake.cublasCreate_v2 = lambda handle: 3
    with pytest.raises(CudaError, match="cublasCreate: CUBLAS_STATUS_ALLOC_FAILED"): Handle()


NAMES = ["llama", "gemma3", "gemma4", "qwen3", "olmo2", "starcoder2", "cohere2"]


@pytest.mark.parametrize("name", NAMES)
def test_a_program(name):
    "The logits of other implementations, as with kernels of our own; and products of the library, where there are many rows"
    ids, logits = first_prompt(name)
    model = load(name, gemm_backend="cublas")
    got = prompt_logits(model, ids)
    assert rel_err(got, logits) < (8e-2 if "gemma4" in name else 5e-3)
    for v, w in zip(got, logits): assert v.argmax() == w.argmax() or np.diff(np.sort(w)[-2:])[0] < .3
    launches, = [s.launches for s in model.program.steps.values()]
    assert len(ids) > 32 and sum(one.kernel.name == "cublasGemmEx" for _, one in launches) > 10 and not any(one.kernel.name.startswith("gemm") for _, one in launches)
    assert "cuBLAS" in model.notes[0] and isinstance(model.program.gemm, CublasGemm)
    assert rel_err(prompt_logits(model, ids, 1), logits) < (8e-2 if "gemma4" in name else 5e-3) and not any(one.kernel.name == "cublasGemmEx" for _, one in model.program.step().launches)
    model.close()


@pytest.mark.parametrize("t", ["Q4_0", "Q5_1", "Q8_0"])
def test_a_program_with_quantised_weights(t, tmp_path, monkeypatch):
    "In slices of a few rows, against our own kernels on the same weights"
    from literate_engine.gguf import write_gguf
    monkeypatch.setattr(CublasGemm.__init__, "__defaults__", (30_000,))
    with GGUFFile(fixture("qwen2.gguf")) as f:
        tensors = {n: QuantTensor.from_gguf(f, n).dequantize() for n in f.tensors}
        held = {n: (quantize(v, t), t, v.shape) if v.ndim == 2 and v.shape[1] % 32 == 0 else v for n, v in tensors.items()}
        write_gguf(tmp_path/"m.gguf", {k: f.metadata[k] for k in f.metadata}, held)
    ids, logits = np.random.default_rng(2).integers(0, 512, 70).tolist(), []
    for backend in ("own", "cublas"):
        m = Model(tmp_path/"m.gguf", device="cuda", max_model_len=80, max_num_seqs=80, max_num_batched_tokens=80, gemm_backend=backend)
        logits.append(prompt_logits(m, ids))
        names = [one.kernel.name for _, one in m.program.step().launches]
        m.close()
    assert rel_err(logits[1], logits[0]) < (3e-3 if device().arch >= 80 else 6e-2) and names.count(f"unpack<{t}>") == names.count("cublasGemmEx") > 20


def test_long_prompts_alone(monkeypatch):
    "Fewer rows than LONG are done by kernels of ours, more by the library, in one program"
    monkeypatch.setattr(cublas, "LONG", 64)
    ids, logits = first_prompt("llama")
    with LLM(fixture("llama.gguf"), device="cuda", max_model_len=320, max_num_batched_tokens=160, long_prefill_token_threshold=160, gemm_backend="mixed") as llm:
        assert rel_err(llm.logits(ids), logits) < 5e-3
        long = (ids*20)[:160]
        rows = llm.logits(long)
        by = {s.shape.tokens: {one.kernel.name.split("<")[0] for _, one in s.launches} & {"gemm", "gemm_wgmma", "cublasGemmEx"} for s in llm.engine.model.program.steps.values()}
        assert any(n >= 64 for n in by) and all(names == {"cublasGemmEx"} if n >= 64 else "cublasGemmEx" not in names for n, names in by.items()), by
    with LLM(fixture("llama.gguf"), device="cuda", max_model_len=320, max_num_batched_tokens=160, long_prefill_token_threshold=160, gemm_backend="own") as llm: assert rel_err(llm.logits(long), rows) < 5e-3


def test_an_older_card(monkeypatch):
    "Without a wish the library does it, and says so; without the library 32 rows at a time, and says so, with what would help"
    if device().name != "emulated": pytest.skip("a real GPU")
    monkeypatch.setenv("LITERATE_GPU", "emulated:75")
    (ids, logits), kernels = first_prompt("llama"), []
    def run():
        with LLM(fixture("llama.gguf"), device="cuda", max_model_len=160) as llm:
            assert rel_err(llm.logits(ids), logits) < 5e-3
            kernels.append({one.kernel.name.split("<")[0] for s in llm.engine.model.program.steps.values() for _, one in s.launches})
            return llm.engine.props()
    props = run()
    assert props["gemm_backend"] == "cublas" and any("done by cuBLAS (emulated), except those of BF16 weights: the kernels for them need sm_80, this GPU is sm_75" in n for n in props["notes"])
    def nowhere(): raise CudaError("cuBLAS is not here: `pip install nvidia-cublas`")
    monkeypatch.setattr(cublas, "load_cublas", nowhere)
    props = run()
    assert props["gemm_backend"] == "own" and any("32 rows at a time: the kernels for them need sm_80, and cuBLAS is not here: `pip install nvidia-cublas`" in n for n in props["notes"])
    assert "cublasGemmEx" in kernels[0] and "cublasGemmEx" not in kernels[1]
    assert OwnGemm().act("F16", 64) not in HALVES and CublasGemm().act("F16", 64) == CublasGemm().act("Q4_K", 64) == "F16" and CublasGemm().act("BF16", 64) == "F32" and CublasGemm().act("Q4_K", 32) == "Q8_K"


def test_who_is_chosen(monkeypatch):
    if device().name != "emulated": pytest.skip("a real GPU")
    for arch in (80, 90, 120):
        monkeypatch.setenv("LITERATE_GPU", f"emulated:{arch}")
        assert choose_gemm() == choose_gemm("own") == ("own", []) and choose_gemm("cublas")[0] == "cublas" and "as gemm_backend says" in choose_gemm("cublas")[1][0]
        assert choose_gemm("auto", True) == ("own", []) and choose_gemm("mixed") == ("mixed", ["products of 256 rows and more are done by cuBLAS (emulated)"])
        with monkeypatch.context() as m:                 # as on a card: what is installed is used, and told; what is not is not missed
            m.setattr(cublas, "emulated_arch", lambda: None)
            m.setattr(cublas, "cublas_version", lambda: "13.1.0")
            assert choose_gemm() == ("mixed", ["products of 256 rows and more are done by cuBLAS (13.1.0)"]) and choose_gemm("own") == ("own", [])
            m.setattr(cublas, "cublas_version", lambda: (_ for _ in ()).throw(CudaError("not here")))
            assert choose_gemm() == ("own", ["products of 256 rows and more would be faster with the library: not here"]) and choose_gemm("own") == ("own", [])
            with pytest.raises(CudaError, match="not here"): choose_gemm("mixed")
        assert workspace_bytes(device()) == ((32 if arch >= 90 else 4) << 20)
    monkeypatch.setenv("LITERATE_GPU", "emulated:75")
    assert choose_gemm("own")[0] == "own" and "need sm_80, and gemm_backend is 'own' and not 'cublas' (emulated)" in choose_gemm("own")[1][0] and choose_gemm("auto", True) == ("own", [])
    def nowhere(): raise CudaError("cuBLAS is not here")
    monkeypatch.setattr(cublas, "load_cublas", nowhere)
    with pytest.raises(CudaError, match="not here"): choose_gemm("cublas")
    with pytest.raises(ValueError, match="gemm_backend is 'mkl': expected one of 'auto', 'own', 'cublas'"): choose_gemm("mkl")


def test_the_library_is_looked_for(monkeypatch, tmp_path):
    "Where a path is known, then by name; what is no library counts as none"
    (tmp_path/"libcublas.so.13").write_bytes(b"\x7fELF and no more")
    with pytest.raises(CudaError, match="cuBLAS is not here .*libcublas.so.13: .*: `pip install nvidia-cublas`"): cublas.open_library(["", str(tmp_path/"libcublas.so.13"), "libcublas.so.0"])
    import cuda.pathfinder
    def missing(name): raise cuda.pathfinder.DynamicLibNotFoundError(name)
    monkeypatch.setattr(cuda.pathfinder, "load_nvidia_dynamic_lib", missing)
    assert cublas._find() == list(cublas.NAMES)


def test_settings(monkeypatch):
    "Refused by name where it cannot be; passed through; told"
    for options, what in (({"device": "cpu"}, "device is 'cpu'"), ({"device": "ref"}, "device is 'ref'"), ({"activations": "float32"}, "activations is 'float32'")):
        for backend in ("cublas", "mixed"):
            with pytest.raises(ValueError, match=f"gemm_backend is '{backend}': {what}"): EngineConfig(gemm_backend=backend, **options)
    with pytest.raises(ValueError, match="gemm_backend is 'mkl': expected one of 'auto', 'own', 'cublas'"): EngineConfig(gemm_backend="mkl")
    with GGUFFile(fixture("llama.gguf")) as f: config = ModelConfig.from_gguf(f)
    assert resolve(EngineConfig(device="cpu"), config).gemm_backend == resolve(EngineConfig(device="cpu", gemm_backend="own"), config).gemm_backend == "own"
    if device().name != "emulated": return
    monkeypatch.setenv("LITERATE_GPU", "emulated")
    with pytest.raises(ValueError, match="gemm_backend is 'cublas': device is 'cpu', it needs 'cuda'"): resolve(EngineConfig(gemm_backend="cublas"), config)           # auto never means the emulator
    assert resolve(EngineConfig(device="cuda", gemm_backend="cublas"), config).gemm_backend == "cublas" and resolve(EngineConfig(device="cuda"), config).gemm_backend == "own"
    def nowhere(): raise CudaError("cuBLAS is not here: `pip install nvidia-cublas`")
    monkeypatch.setattr(cublas, "load_cublas", nowhere)
    with pytest.raises(ValueError, match="gemm_backend is 'cublas': cuBLAS is not here: `pip install nvidia-cublas`"): LLM(fixture("llama.gguf"), device="cuda", gemm_backend="cublas")
    with LLM(fixture("llama.gguf"), device="cuda", max_model_len=64) as llm: assert llm.engine.props()["gemm_backend"] == "own"


def test_the_command_line(capsys, monkeypatch):
    from literate_engine.cli import main
    assert main(["generate", str(fixture("llama.gguf")), "a", "--device", "cpu", "--gemm-backend", "cublas"]) == 2
    assert "--gemm-backend is 'cublas': device is 'cpu', it needs 'cuda'" in capsys.readouterr().err
    seen = []
    monkeypatch.setattr("literate_engine.llm.LLM.__init__", lambda self, path, **options: seen.append(options) or (_ for _ in ()).throw(ValueError("enough")))
    for command in (["generate", "a"], ["chat"], ["perplexity", __file__]): main([command[0], str(fixture("llama.gguf")), *command[1:], "--gemm-backend", "own"])
    main(["bench", "prefill", str(fixture("llama.gguf")), "--gemm-backend", "own", "--runs", "1"])
    assert [o["gemm_backend"] for o in seen] == ["own"]*4


def test_the_plan_counts_the_scratch_memory(monkeypatch):
    "And not what only the other way needs; what is taken is what was planned, and is given back"
    rooms, used = [], cupy().get_default_memory_pool().used_bytes
    monkeypatch.setattr(settings, "gpu_room", lambda *args: rooms.append(gpu_room(*args)) or rooms[-1])
    before = used()
    with LLM(fixture("qwen3.gguf"), device="cuda", max_model_len=512, max_num_seqs=8, max_num_batched_tokens=200, kv_memory=1 << 22, gemm_backend="cublas") as llm:
        llm.logits(list(range(120)))
        gemm, fixed = llm.engine.model.program.gemm, rooms[-1].fixed
        assert fixed["cuBLAS"] == gemm.scratch.nbytes + gemm.handle.workspace.nbytes + cublas.LIBRARY == gemm_room("cublas")["cuBLAS"] and "parts of sums" not in fixed
        assert used() - before <= sum(fixed.values()) + llm.engine.config.kv_memory
        assert any("done by cuBLAS" in n for n in llm.engine.props()["notes"]) and llm.engine.props()["gemm_backend"] == "cublas"
    assert gemm.scratch is None and gemm.handle is None and used() - before < 1 << 20
    assert set(gemm_room("own")) == {"parts of sums"} and gemm_room("mixed") == gemm_room("own") | gemm_room("cublas")
