"""Weights on the GPU, in the emulator where there is none: the planes of chapter 14 byte for byte, from maps and from arrays; what cannot be pinned."""
import itertools
import os
import threading
import time

import numpy as np
import pytest
from gpu_arrays import emulated, tensor

from literate_engine import upload as module
from literate_engine.cpu_ops import run_op
from literate_engine.cuda import Calls, cupy, device
from literate_engine.gguf import GGUFFile, write_gguf
from literate_engine.linear_gpu import GPU_FORMATS, HALVES, pack_gpu
from literate_engine.quants import QUANT_TYPES, QuantTensor, dequantize
from literate_engine.upload import Uploader, gpu_bytes, held_blocks_gpu, held_on_gpu, plane_shapes, slab_bytes, upload

EMULATED = emulated()
pytestmark = pytest.mark.usefixtures("emulated_gpu")


class Rows:
    def __init__(self, tensor, rows): self.tensor, self.rows, self.type, self.shape = tensor, np.asarray(rows), tensor.type, (len(rows), tensor.shape[-1])
    @property
    def raw(self): return self.tensor.raw[self.rows]


def same(parts, done):
    for part, w in zip(parts, done, strict=True):
        raw, to = held_blocks_gpu(part.raw, part.type.name)
        assert (w.type, w.n, w.k) == (to, *part.shape) and w.nbytes == gpu_bytes(part.type.name, *part.shape)
        for plane, want in zip(w.planes, pack_gpu(raw, to).values(), strict=True):
            assert (plane is None) == (want is None) and (plane is None or np.array_equal(plane.get(), want)), (part.type.name, part.shape)


def check(parts, **kw):
    done, notes = upload(parts, **kw)
    same(parts, done)
    return notes


@pytest.mark.parametrize("name", [*GPU_FORMATS, *HALVES])
def test_planes(name, monkeypatch):
    rng = np.random.default_rng(len(name))
    parts = [tensor(name, n, b, rng) for n, b in ((1, 1), (3, 7), (31, 2), (32, 4), (33, 5), (70, 1), (65, 8))]
    parts += [Rows(parts[-1], rng.permutation(65)), Rows(parts[-1], [7]), Rows(parts[-2], np.repeat([5, 60], 20))]
    wide = tensor(name, 40, 6, rng)
    parts.append(QuantTensor(wide.raw[::2, :wide.raw.shape[1]//2], name, (20, wide.shape[1]//2)))              # not in one piece
    assert check(parts) == []
    for piece in (1, 500, 5000):
        monkeypatch.setattr(module, "PIECE", piece)
        check(parts)


def mapped(folder, rng):
    "A file whose matrices begin and end anywhere, and the parts that a model might want of it."
    names = [("Q4_K", 70, 4), ("F16", 24, 64), ("Q8_0", 33, 9), ("F16", 11, 13), ("Q6_K", 40, 1), ("IQ4_NL", 8, 8), ("BF16", 5, 24)]
    tensors = [tensor(*name, rng) for name in names]
    tensors[5].raw.reshape(-1, 18)[:, :2] = np.frombuffer(np.float16(0.5).tobytes(), np.uint8)
    write_gguf(folder / "some.gguf", {"general.architecture": "toy"}, {f"w{i}": (t.raw, t.type.name, t.shape) for i, t in enumerate(tensors)})
    file = GGUFFile(folder / "some.gguf")
    parts = [QuantTensor.from_gguf(file, name) for name in file.tensors]
    return file, parts + [Rows(parts[0], rng.permutation(70)), Rows(parts[0], np.arange(3, 50)), Rows(parts[1], np.arange(24)[::-1])]


@pytest.mark.parametrize("piece", [100, 3000, 5000, 20000, 1 << 20])
@pytest.mark.parametrize("readers", [1, 3])
def test_from_a_map(piece, readers, tmp_path, monkeypatch):
    for name, value in (("PIECE", piece), ("READERS", readers)): monkeypatch.setattr(module, name, value)
    file, parts = mapped(tmp_path, np.random.default_rng(1))
    assert check(parts, files=file.shards) == ["IQ4_NL has no kernel on the GPU: its values are held as Q8_0"] and threads() == []
    del parts
    assert file.close()


def descriptors(): return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
def tasks(): return set(os.listdir("/proc/self/task"))
def threads(): return [t for t in threading.enumerate() if t.name.startswith("upload")] + [r for r in READERS if r.running[0]]


READERS = []                                            # of machine code, which Python does not count


@pytest.fixture(autouse=True)
def readers(monkeypatch):
    READERS.clear()
    init = module.Readers.__init__
    monkeypatch.setattr(module.Readers, "__init__", lambda self, *args: READERS.append(self) or init(self, *args))


class Pages:
    "What the driver keeps of pinned pages; a second claim to one of them is an error, as is giving back what is not pinned."
    def __init__(self, monkeypatch):
        self.held, self.most, self.error = {}, 0, None
        runtime = type(cupy().cuda.runtime)
        monkeypatch.setattr(runtime, "hostRegister", staticmethod(self.register))
        monkeypatch.setattr(runtime, "hostUnregister", staticmethod(self.unregister))

    def register(self, at, size, flags):
        if self.error: raise self.error
        assert at % 4096 == 0 and size > 0 and flags == 0 and not any(a//4096 <= (at + size - 1)//4096 and at//4096 <= (a + n - 1)//4096 for a, n in list(self.held.items()))
        self.held[at] = size
        self.most = max(self.most, len(self.held))

    def unregister(self, at): del self.held[at]


def big(folder, rng, n=200):
    "A file of two matrices of many pages."
    tensors = [tensor("Q4_K", n, 20, rng), tensor("Q6_K", n, 13, rng)]
    write_gguf(folder / "big.gguf", {"general.architecture": "toy"}, {f"w{i}": (t.raw, t.type.name, t.shape) for i, t in enumerate(tensors)})
    file = GGUFFile(folder / "big.gguf")
    return file, [QuantTensor.from_gguf(file, name) for name in file.tensors]


def small(monkeypatch, **kw):
    for name, value in {"PIECE": 10_000, "READERS": 3, **kw}.items(): monkeypatch.setattr(module, name, value)


@pytest.mark.skipif(not EMULATED, reason="the driver keeps its own books")
def test_buffers_are_pinned_once_and_given_back(tmp_path, monkeypatch):
    small(monkeypatch)
    pages = Pages(monkeypatch)
    file, (a, b) = big(tmp_path, np.random.default_rng(2))
    check([a, b, a, Rows(b, np.arange(20, 90)), a], files=file.shards)
    assert 0 < pages.most <= module.SLOTS and not pages.held and threads() == []
    small(monkeypatch, PIECE=1)                          # rows that are larger than the buffers were meant to be
    check([a, tensor("Q4_K", 3, 70, np.random.default_rng(3)), b])
    assert not pages.held


@pytest.mark.skipif(not EMULATED, reason="a real driver does not refuse")
def test_buffers_that_cannot_be_pinned_are_said(tmp_path, monkeypatch):
    small(monkeypatch)
    pages = Pages(monkeypatch)
    pages.error = cupy().cuda.runtime.CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")
    file, parts = big(tmp_path, np.random.default_rng(3))
    assert check(parts, files=file.shards) == ["the buffers of the upload cannot be pinned (cudaErrorMemoryAllocation: out of memory): it takes longer"]


@pytest.mark.skipif(not EMULATED, reason="the driver is told to fail")
@pytest.mark.parametrize("fails", ["hostRegister", "memory", "room", "readers", "memcpyAsync", "launch", "synchronize", "held"])
def test_nothing_is_left_of_an_upload_that_fails(fails, tmp_path, monkeypatch):
    "Pinning, memory for the buffers or on the GPU, threads, a copy, a kernel, waiting, and a matrix that cannot be: the first error comes out, and no page, thread or buffer stays."
    small(monkeypatch)
    pages, (file, parts), open_files = Pages(monkeypatch), big(tmp_path, np.random.default_rng(4), 400), descriptors()
    count, first, last = itertools.count(), *{"hostRegister": (2, 3), "memory": (0, 1), "room": (1, 2), "synchronize": (4, 5)}.get(fails, (8, 9))
    def failing(real):
        def call(*args):
            if fails and first <= next(count) < last: raise MemoryError("no more of it")
            return real(*args)
        return call
    runtime = type(cupy().cuda.runtime)
    if fails == "room": monkeypatch.setattr(module.Ring, "_room", failing(module.Ring._room))
    elif fails == "memory": monkeypatch.setattr(module, "_memory", failing(module._memory))
    elif fails == "readers": monkeypatch.setattr(module, "run_op", lambda name, *args: name != "start_threads" and run_op(name, *args))
    elif fails == "launch": monkeypatch.setattr(module.Ring, "_pack", failing(module.Ring._pack))
    elif fails == "synchronize": monkeypatch.setattr(module.cupy().cuda.Stream, "synchronize", failing(module.cupy().cuda.Stream.synchronize))
    elif fails == "memcpyAsync": monkeypatch.setattr(runtime, "memcpyAsync", staticmethod(failing(cupy().cuda.runtime.memcpyAsync)))
    elif fails == "hostRegister": monkeypatch.setattr(runtime, "hostRegister", staticmethod(failing(pages.register)))
    else: parts.append(QuantTensor(np.zeros((4, 34), np.uint8), "Q8_0", (2, 2, 32)))
    error, what = {"held": (ValueError, "expected a matrix"), "readers": (OSError, "starts no thread")}.get(fails, (MemoryError, "no more of it"))
    with pytest.raises(error, match=what): upload(parts, files=file.shards)
    assert not pages.held and threads() == []
    fails = None
    monkeypatch.setattr(module, "run_op", run_op)
    u = Uploader(file.shards)
    with pytest.raises(RuntimeError, match="of the caller"), u:
        u.matrix(parts[0])
        raise RuntimeError("of the caller")
    u.close()
    assert not pages.held and threads() == [] and descriptors() <= open_files and u.keep == u.ring.slots == u.ring.files == [] and not u.ring.waiting and u.last is None


@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("pthreads, at", [(True, 0), (True, 1), (True, 2), (True, 5), (True, "join_threads"), (False, 0), (False, 2)])
def test_an_interrupt_around_readers(pthreads, at, after, tmp_path, monkeypatch):
    "Before or after a call that starts or joins them: none is left."
    small(monkeypatch, PTHREADS=pthreads)
    file, parts = big(tmp_path, np.random.default_rng(4), 400)
    calls, raised = [], []
    def interrupted(real):
        def call(*args):
            if isinstance(args[0], threading.Thread) and "memory" in args[0].name: return real(*args)          # of the standard library's pool
            now = not raised and (at == len(calls) or at == args[0] and len(calls) > 1)
            calls.append(args)
            if not now or after: real(*args)
            if now: raised.append(1); raise KeyboardInterrupt
        return call
    if pthreads: monkeypatch.setattr(module, "run_op", interrupted(run_op))
    else: monkeypatch.setattr(threading.Thread, "start", interrupted(threading.Thread.start))
    with pytest.raises(KeyboardInterrupt): upload(parts, files=file.shards)
    assert threads() == []



def test_files_closed_meanwhile(tmp_path, monkeypatch):
    "The uploader has descriptors of its own, and its matrices are whole."
    small(monkeypatch)
    file, parts = big(tmp_path, np.random.default_rng(4), 400)
    with Uploader(file.shards) as u:
        done = [u.matrix(parts[0])]
        assert not file.close()                          # the parts are views of the map
        other = [os.open(__file__, os.O_RDONLY) for _ in range(3)]
        done.append(u.matrix(parts[1]))
        u.finish()
    for fd in other: os.close(fd)
    same(parts, done)


def test_an_upload_that_failed_holds_nothing(tmp_path, monkeypatch):
    import gc
    small(monkeypatch)
    file, parts = big(tmp_path, np.random.default_rng(4), 400)
    monkeypatch.setattr(module.Ring, "_send", lambda self, slot, piece: 1/0)
    gc.collect(); gc.disable()
    try:
        before = cupy().get_default_memory_pool().used_bytes()
        try: upload(parts, files=file.shards)
        except ZeroDivisionError: pass
        else: raise AssertionError("no error")
        del parts
        assert cupy().get_default_memory_pool().used_bytes() == before and file.close()
    finally: gc.enable()


def test_memory_is_bounded(tmp_path, monkeypatch):
    "Buffers, and pieces that have been asked for and not been sent."
    small(monkeypatch, READERS=2)
    file, parts = big(tmp_path, np.random.default_rng(6))
    with Uploader(file.shards) as u:
        for part in parts:
            u.matrix(part)
            assert len(u.ring.waiting) <= module.SLOTS and u.ring.readers.running[0] == 2 and u.ring.copied <= u.ring.started <= u.ring.asked <= u.ring.copied + module.SLOTS
        ring = u.ring
        slots = list(ring.slots)
        u.finish()
    assert len(slots) == module.SLOTS and not any(s.pinned or s.piece for s in slots) and ring.slots == [] and ring.copied > 20


def test_a_file_that_became_shorter(tmp_path, monkeypatch):
    "Its bytes are asked for, not touched: an error that names file and byte, and not the end of the process."
    small(monkeypatch)
    file, parts = big(tmp_path, np.random.default_rng(9))
    os.truncate(tmp_path/"big.gguf", 200_000)
    with pytest.raises(OSError, match=r"big.gguf: byte \d+ cannot be read: the file is shorter") as e: upload(parts, files=file.shards)
    assert 200_000 - 64 < int(str(e.value).partition("byte ")[2].split()[0]) < file.nbytes and threads() == []          # of the piece that was first to be missed


@pytest.mark.parametrize("pthreads", [True, False])
@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 70_001, 1_000_003, 5_000_000])
def test_readers(nbytes, pthreads, tmp_path, monkeypatch):
    "From memory and from a file, from any byte on, more pieces than buffers; what the file does not have does not come; bringing the pages changes nothing."
    memory = np.zeros(3*(nbytes + 10_000), np.uint8)
    rng, slots, counts = np.random.default_rng(nbytes), memory.reshape(3, -1), np.zeros(module.FILLED + 8*3, np.int64)
    table, data = np.zeros((3, module.PARTS, 8), np.int64), rng.integers(0, 256, nbytes + 7, dtype=np.uint8)
    data.tofile(tmp_path/"bytes")
    monkeypatch.setattr(module, "PTHREADS", pthreads)
    before, readers = tasks(), module.Readers(3, table, 3, counts, memory, memory.nbytes//8*8)
    readers.start()
    assert len(tasks() - before) == 3 and len(threads()) == (1 if pthreads else 3)
    with open(tmp_path/"bytes", "rb") as f:
        for piece, (fd, first, ask) in enumerate([(f.fileno(), 7, nbytes), (f.fileno(), 7, nbytes + 9000), (-1, data[7:].ctypes.data, nbytes)]*3):
            to = slots[piece % 3]
            to[:] = 0
            run_op("ask_for", table, 3, counts, piece, fd, first, to, ask)
            while counts[module.FILLED + 8*(piece % 3)] != module.PARTS*(piece//3 + 1): time.sleep(1e-4)
            assert table[piece % 3, :, module.CAME].sum() == nbytes and (to[:nbytes] == data[7:]).all() and not to[nbytes:].any()
    assert len(tasks() - before) == 3
    readers.stop()
    readers.stop()
    assert threads() == []
    for _ in range(1000):                                # the system takes a moment to forget a thread that has been joined
        if not tasks() - before: return
        time.sleep(1e-3)
    raise AssertionError(tasks() - before)


@pytest.mark.parametrize("slab", [1, 4000, 1 << 28])
def test_planes_out_of_few_arrays(slab, monkeypatch):
    "Each plane from a multiple of 512 on; what does not fit, and what was not announced, takes memory for itself."
    monkeypatch.setattr(module, "SLAB", slab)
    rng = np.random.default_rng(8)
    parts = [tensor(name, n, b, rng) for name in (*GPU_FORMATS, "F16") for n, b in ((33, 8), (70, 4))]
    sizes = [slab_bytes(plane_shapes(p.type.name, *p.shape)) for p in parts]
    parts.append(tensor("Q8_0", 40, 3, rng))
    parts.insert(4, tensor("Q4_0", 3000, 40, rng))
    with Uploader(sizes=sizes) as u:
        done = [u.matrix(part) for part in parts]
        u.finish()
    same(parts, done)
    taken = sorted((p.data.ptr, p.nbytes) for w in done for p in w.planes if p is not None)
    assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(taken)) and not u.slabs
    if slab == 1 << 28: assert all((p.data.ptr - done[0].planes[0].data.ptr) % 512 == 0 for w in done[:4] for p in w.planes if p is not None)


def test_one_tensor_is_sent_once(tmp_path):
    file, parts = mapped(tmp_path, np.random.default_rng(4))
    with Uploader(file.shards) as u:
        some = [parts[i] for i in (0, 7, 8, 2)]
        for part in some: u.matrix(part)
        u.finish()
    assert u.sent == 2 and u.nbytes == sum(gpu_bytes(p.type.name, *p.shape) for p in some)


def test_progress_and_a_wrong_shape():
    told, rng = [], np.random.default_rng(5)
    upload([tensor("Q4_0", 2, 1, rng), tensor("Q4_0", 3, 1, rng)], lambda done, num: told.append((done, num)))
    assert told == [(1, 2), (2, 2)]
    with pytest.raises(ValueError, match=r"a tensor of shape \(2, 2, 32\) on the GPU: expected a matrix"): upload([QuantTensor(np.zeros((4, 34), np.uint8), "Q8_0", (2, 2, 32))])


@pytest.mark.parametrize("name", ["IQ4_NL", "MXFP4", "Q3_K", "TQ1_0", "TQ2_0", "Q1_0", "Q2_0"])
def test_exact_conversions(name):
    "All bytes at random, but the scale: one that is small, large, zero."
    rng, t = np.random.default_rng(6), QUANT_TYPES[name]
    at = {"Q3_K": 108, "TQ1_0": 52, "TQ2_0": 64}.get(name, 0)
    for scale in (0, 6e-5, 1, -0.3, 500):
        raw = rng.integers(0, 256, (6, t.type_size), dtype=np.uint8)
        if name == "MXFP4": raw[:, 0] = 128 + np.log2(scale).astype(int) if scale > 0 else 120
        else: raw[:, at:at + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
        held, to = held_blocks_gpu(raw, name)
        assert to == held_on_gpu(name) and np.array_equal(dequantize(held, to), dequantize(raw, name))


SCALE_AT = {"TQ1_0": 52, "TQ2_0": 64, "Q3_K": 108, "Q2_K": 80}
TURNED = [name for name in QUANT_TYPES if held_on_gpu(name) != name and name not in ("I8", "I16", "I32", "I64", "F64")]


def sized(name, n, blocks, scales, rng):
    "Blocks of random bytes with these scales, one after the other."
    t = tensor(name, n, blocks, rng)
    raw, d = t.raw.reshape(n*blocks, -1), np.resize(np.float64(scales), n*blocks)
    if name == "F32": raw[:] = (d*rng.standard_normal(n*blocks)).astype(np.float32)[:, None].view(np.uint8)
    elif name == "MXFP4": raw[:, 0] = np.where(d > 0, 128 + np.log2(np.where(d > 0, d, 1)).round(), 0)
    elif name == "NVFP4": raw[:, :4] &= 0x37
    elif name == "IQ1_M": raw[:, 48:56].view("<u2")[:] = raw[:, 48:56].view("<u2") & 0x0fff | d.astype(np.float16).view(np.uint16)[:, None] >> np.arange(0, 16, 4).astype(np.uint16) << 12
    else:
        raw[:, SCALE_AT.get(name, 0):][:, :2] = d.astype("<f2")[:, None].view(np.uint8)
        if name == "Q2_K": raw[:, 82:84] = 0
    return t


@pytest.mark.parametrize("name", TURNED)
def test_a_type_says_what_it_is_held_as(name):
    "Whatever the values, the same bytes on the GPU; and the error, by the largest value, is float16's, or no more than what a scale in the file may be off by."
    rng = np.random.default_rng(7)
    for scales in ([1], [1e-2, 1e-4], [3e-5, 1e-6], [1e-2, 6e-8], [0, 2e-7], [0], [900]):
        t = sized(name, 5, 8, scales, rng)
        w = upload([t])[0][0]
        held, to = held_blocks_gpu(t.raw, name)
        x, y = t.dequantize(), dequantize(held, to)
        top = np.abs(x).max()
        assert w.nbytes == gpu_bytes(name, *t.shape) and w.type == to and (to == held_on_gpu(name) or to == "BF16" and held_on_gpu(name) == "F16" and not 2**-17 <= top <= 65504)
        part = 2**-8 if to == "BF16" else 2**-11
        assert np.abs(x - y).max() <= part*top + 2**-25*(127 if to == "Q8_0" else 1), (scales, to)
        if max(scales) >= 1e-2: assert np.abs(x - y).max() <= 1.01*part*top, (scales, to)


@pytest.mark.parametrize("name", [name for name in TURNED if held_on_gpu(name) == "Q8_0"])
@pytest.mark.parametrize("d", [2**-27, 2**-24, 3*2**-24, 100*2**-24, 2**-15, 2**-14, 1, 1000])
def test_integers_are_the_nearest(name, d):
    "No value is further from what is held than half a step of its scale, and none where the scale is exact."
    t = sized(name, 4, 3, [d], np.random.default_rng(8))
    held, to = held_blocks_gpu(t.raw, name)
    x, y, step = t.dequantize(), dequantize(held, to), np.abs(np.ascontiguousarray(held.reshape(-1, 34)[:, :2]).view(np.float16).astype(np.float32))
    error = np.abs(x - y).reshape(-1, 32)
    assert to == "Q8_0" and (error <= step/2).all() and (d < 2**-14 or (error <= 2**-11*np.abs(x).reshape(-1, 32)).all())


@pytest.mark.filterwarnings("ignore:overflow encountered in multiply")
def test_scales_past_float16():
    "An error with the number, of a block that has weights; zeros have no scale."
    for name, d in (("IQ4_XS", 5000), ("IQ3_XXS", 30000), ("IQ3_S", 5000), ("IQ2_XXS", 60000), ("IQ1_S", 60000), ("MXFP4", 2**16), ("MXFP4", 2**127)):
        t = sized(name, 3, 2, [1, d], np.random.default_rng(9))
        with pytest.raises(ValueError, match=r"weights with a scale of [\d.e+]+: a GPU holds them as Q8_0, whose scales end at 65504; device 'cpu' can run this model"): upload([t])
        assert threads() == []
    zeros = sized("MXFP4", 3, 2, [1, 2**100], np.random.default_rng(9))
    zeros.raw.reshape(-1, 17)[1::2, 1:] = 0x80
    held, to = held_blocks_gpu(zeros.raw, "MXFP4")
    assert to == "Q8_0" and np.array_equal(dequantize(held, to), zeros.dequantize())


@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply")
@pytest.mark.parametrize("name", [*(name for name in TURNED if name not in ("F32", "MXFP4", "NVFP4", "IQ1_M")), "F32"])
def test_what_is_no_number_stays_none(name):
    rng = np.random.default_rng(10)
    for bad in (np.nan, np.inf, -np.inf):
        t = sized(name, 3, 8, [1, 1, bad, 1], rng)
        if name == "F32": t.raw.view(np.uint32)[0, :2] = 0x7fffffff, 0xffffffff          # of all bits, which rounding would carry into the sign
        held, to = held_blocks_gpu(t.raw, name)
        x, y = t.dequantize(), dequantize(held, to)
        assert plane_bytes(to, t) == gpu_bytes(name, *t.shape) and not np.isfinite(y[~np.isfinite(x)]).any() and np.isfinite(y[np.isfinite(x)]).mean() > 0.9
        assert np.allclose(x[np.isfinite(y)], y[np.isfinite(y)], atol=2**-8*np.abs(x[np.isfinite(x)]).max())


def plane_bytes(to, t): return sum(int(np.prod(s)) for s in plane_shapes(to, *t.shape) if s)


@pytest.mark.parametrize("largest, to", [(0, "BF16"), (1e-30, "BF16"), (2**-18, "BF16"), (2**-17, "F16"), (1e-5, "F16"), (0.05, "F16"), (65504, "F16"), (65520, "BF16"), (1e6, "BF16"), (2e30, "BF16")])
def test_numbers_of_16_bits(largest, to):
    "The kind that loses less, by the largest value of the matrix, which may be in any of its parts; and the same bytes."
    rng = np.random.default_rng(11)
    for at in (0, 69):
        x = (rng.uniform(-0.9, 0.9, (70, 40))*largest).astype(np.float32)
        x[at, 7] = -largest
        t = QuantTensor(x.view(np.uint8), "F32", x.shape)
        same([t], upload([t])[0])
        held, kind = held_blocks_gpu(t.raw, "F32")
        assert kind == to and np.abs(dequantize(held, kind) - x).max() <= (2**-11 if to == "F16" and largest >= 2**-14 else 2**-8)*largest


def test_a_large_matrix_is_one_type(monkeypatch):
    "It is turned some rows at a time; the largest value counts wherever it is."
    x = np.full((600, 8192), 1e-7, np.float32)
    for value, to in ((0, "BF16"), (0.1, "F16"), (1e5, "BF16")):
        x[-1, 3] = value
        held, kind = held_blocks_gpu(x.view(np.uint8), "F32")
        assert kind == to and np.abs(dequantize(held, kind) - x).max() <= 2**-8*x.max()


def test_ring_closes_what_it_has_opened(tmp_path, monkeypatch):
    "If one of several files cannot be opened again, the descriptors of those before are closed."
    file, _ = big(tmp_path, np.random.default_rng(12), 3)
    before, real, count = descriptors(), os.dup, itertools.count()
    monkeypatch.setattr(os, "dup", lambda fd: real(fd) if next(count) < 2 else 1/0)
    with pytest.raises(ZeroDivisionError): Uploader([*file.shards]*3)
    assert next(count) == 3 and descriptors() == before and threads() == []


@pytest.mark.skipif(not EMULATED, reason="what a driver has free is not only of this process")
@pytest.mark.parametrize("fails", [False, True])
def test_ceilings_give_back_what_they_took(fails, monkeypatch):
    "No array is left when CuPy's two pools are told to give back what is unused."
    pool, held, before = cupy().get_default_memory_pool(), [], cupy().get_default_memory_pool().used_bytes()
    monkeypatch.setattr(pool, "free_all_blocks", lambda: held.append(pool.used_bytes()))
    monkeypatch.setattr(module, "device", lambda: module.cupy() and real._replace(name="a card"))
    real = device()
    monkeypatch.setattr(module, "_HostCopy", lambda to, host: Calls(lambda: 1/0 if fails else to.fill(0)))
    if fails:
        with pytest.raises(ZeroDivisionError): module.gpu_ceilings(1 << 16)
    else: assert module.gpu_ceilings(1 << 16).keys() == {"read_gb_s", "h2d_gb_s"} and held == [before]*2
    assert len(held) == 2
