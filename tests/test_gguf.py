"""The GGUF container under attack: broken fixtures, a byte-level builder, round trips against the gguf package, 20,000 mutations."""
import gc
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import threading
import time
import tracemalloc

import numpy as np
import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from literate_engine.core import fixture
from literate_engine.gguf import GGML_TYPES, MAX_DEPTH, GGUFError, GGUFFile, write_gguf
from literate_engine.inspect import format_report, inspect_gguf

FIXTURES = ROOT / "data/fixtures"
MALFORMED = [c["file"] for c in json.loads((FIXTURES / "malformed/index.json").read_text())]


# A builder that shares no code with the module: each part is bytes, so that any of them can be wrong.
def text(s): b = s if isinstance(s, bytes) else s.encode(); return struct.pack("<Q", len(b)) + b
def kv(key, kind, payload): return text(key) + struct.pack("<I", kind) + payload
def u32(key, v): return kv(key, 4, struct.pack("<I", v))
def array(kind, count, payload=b""): return struct.pack("<IQ", kind, count) + payload
def info(name, dims, kind, offset, n_dims=None): return text(name) + struct.pack("<I", len(dims) if n_dims is None else n_dims) + struct.pack(f"<{len(dims)}QIQ", *dims, kind, offset)


def build(kvs=(), infos=(), data=b"", n_kv=None, n_tensors=None, version=3, magic=b"GGUF", alignment=32):
    head = magic + struct.pack("<IQQ", version, len(infos) if n_tensors is None else n_tensors, len(kvs) if n_kv is None else n_kv) + b"".join(kvs) + b"".join(infos)
    return head + bytes(-len(head) % alignment) + data


ARCH = kv("general.architecture", 8, text("llama"))
ONE = info("w", [8, 4], 0, 0)                                   # 4 rows of 8 F32: 128 bytes
STRINGS = b"".join(text(f"token {i}") for i in range(100))


def depth_bomb(depth): return array(9, 1) * (depth - 1) + array(0, 1, b"\1")


def touch(g):
    "Read everything a file offers."
    for k in g.metadata: g.metadata[k], g.metadata.type_name(k), g.metadata.count(k)
    for name, t in g.tensors.items():
        r = g.raw(name)
        assert r.nbytes == t.nbytes and not r.flags.writeable
        r.max()
    return g


BAD = {  # name -> (bytes, what the message must say)
    "BC-110 n_kv": (build([ARCH], n_kv=2**62), "metadata pairs"),
    "BC-110 n_tensors": (build([ARCH], n_tensors=2**62), "tensors"),
    "BC-110 key length": (build([struct.pack("<Q", 2**40) + b"x" * 40]), "key of metadata pair 0"),
    "BC-110 array count": (build([kv("a", 9, array(0, 2**40))]), "counts 1099511627776"),
    "BC-110 array count 2^63": (build([kv("a", 9, array(10, 2**63))]), "'a' counts"),
    "BC-110 strings count": (build([kv("a", 9, array(8, 2**40, STRINGS))]), "'a' counts"),
    "BC-110 depth 1000": (build([kv("a", 9, depth_bomb(1000))]), "deep"),
    "BC-110 depth limit": (build([kv("a", 9, depth_bomb(MAX_DEPTH + 1))]), "deep"),
    "nested count": (build([kv("a", 9, array(9, 2**30, bytes(1000)))]), "'a' counts"),
    "nested many": (build([kv("a", 9, array(9, 70000, array(0, 0) * 70000))]), "nests more than"),
    "BC-112 n_dims 0xFFFFFFFF": (build([ARCH], [info("w", [8, 4], 0, 0, 0xFFFFFFFF)], bytes(128)), "4294967295 dimensions"),
    **{f"BC-112 n_dims {n}": (build([ARCH], [info("w", [1] * min(n, 9), 0, 0, n)], bytes(128)), f"{n} dimensions") for n in (5, 9, 1_000_000)},
    "n_dims 0 of a block type": (build([ARCH], [info("w", [], 2, 0)], bytes(128)), "multiple of the 32"),
    **{f"BC-114 alignment {a}": (build([u32("general.alignment", a)], [ONE], bytes(128)), f"'general.alignment' is {a}") for a in (0, 3, 24, 2**31, 2**32 - 1)},
    "BC-114 alignment int32": (build([kv("general.alignment", 5, struct.pack("<i", 32))], [ONE], bytes(128)), "of type INT32"),
    "BC-114 alignment string": (build([kv("general.alignment", 8, text("32"))], [ONE], bytes(128)), "of type STRING"),
    "BC-114 alignment array": (build([kv("general.alignment", 9, array(4, 1, struct.pack("<I", 32)))], [ONE], bytes(128)), "of type ARRAY[UINT32]"),
    "string past end": (build([kv("a", 8, struct.pack("<Q", 2**64 - 1) + b"abc")]), "18446744073709551615 bytes"),
    "value missing": (build([text("a") + struct.pack("<I", 4)])[:37], "truncated"),
    "value type 13": (build([kv("a", 13, bytes(8))]), "unknown value type 13"),
    "array type 13": (build([kv("a", 9, array(13, 1, bytes(8)))]), "unknown type 13"),
    "bool 2": (build([kv("a", 7, b"\2")]), "neither 0 nor 1"),
    "bool array 255": (build([kv("a", 9, array(7, 3, b"\0\1\xff"))]), "neither 0 nor 1"),
    "key not UTF-8": (build([kv(b"a\xff", 4, bytes(4))]), "not UTF-8"),
    "key empty": (build([kv("", 4, bytes(4))]), "empty"),
    "key too long": (build([kv("k" * 70000, 4, bytes(4))]), "more than 65535"),
    "key twice": (build([u32("a", 1), u32("a", 1)]), "'a' occurs twice"),
    "string not UTF-8": (build([kv("a", 8, text(b"\xc3("))]), "'a' is not UTF-8"),
    "half a surrogate": (build([kv("a", 8, text(b"\xed\xa0\x80"))]), "not UTF-8"),
    "array string not UTF-8": (build([kv("a", 9, array(8, 2, text("x") + text(b"\x80")))]), "string 1 of 'a' is not UTF-8"),
    "array string past end": (build([kv("a", 9, array(8, 100, STRINGS[:-4]))], alignment=1), "in 'a' takes 8 bytes"),
    "array string length": (build([kv("a", 9, array(8, 101, STRINGS + struct.pack("<Q", 2**50)))]), "1125899906842624 bytes"),
    "tensor name empty": (build([ARCH], [info("", [8, 4], 0, 0)], bytes(128)), "empty"),
    "tensor name too long": (build([ARCH], [info("n" * 256, [8, 4], 0, 0)], bytes(128)), "more than 255"),
    "tensor name not UTF-8": (build([ARCH], [info(b"\xff", [8, 4], 0, 0)], bytes(128)), "not UTF-8"),
    "tensor twice": (build([ARCH], [ONE, info("w", [8, 4], 0, 128)], bytes(256)), "'w' occurs twice"),
    "dimension 0": (build([ARCH], [info("w", [8, 0], 0, 0)], bytes(128)), "dimension of zero"),
    "dims wrap to 0": (build([ARCH], [info("w", [2**32, 2**32], 0, 0)], bytes(128)), "whole file has"),
    "dims wrap to 32": (build([ARCH], [info("w", [2**63, 2, 2**62, 4], 0, 0)], bytes(128)), "whole file has"),
    "part of a block": (build([ARCH], [info("w", [33], 2, 0)], bytes(128)), "multiple of the 32"),
    "tensor type 43": (build([ARCH], [info("w", [8], 43, 0)], bytes(128)), "unknown tensor type 43"),
    "tensor type removed": (build([ARCH], [info("w", [32], 31, 0)], bytes(128)), "Q4_0_4_4"),
    "offset unaligned": (build([ARCH], [info("w", [8], 0, 4)], bytes(128)), "alignment 32"),
    "offset 2^64-32": (build([ARCH], [info("w", [8], 0, 2**64 - 32)], bytes(128)), "file ends at"),
    "data short": (build([ARCH], [ONE], bytes(127)), "file ends at"),
    "overlap": (build([ARCH], [ONE, info("v", [8], 0, 96)], bytes(128)), "inside 'w'"),
    "same offset": (build([ARCH], [ONE, info("v", [8, 4], 0, 0)], bytes(128)), "inside"),
    "version 0": (build([ARCH], version=0), "version 0"), "version 1": (build([ARCH], version=1), "32-bit counts"), "version 4": (build([ARCH], version=4), "version 4"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"), "byte-swapped magic": (b"FUGG" + bytes(20), "swapped"),
    "empty": (b"", "empty"), "one byte": (b"G", "not a GGUF"), "magic only": (b"GGUF", "truncated"),
    "git-LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 98362432\n", "git lfs pull"),
    "zip": (b"PK\3\4" + bytes(30), "zip"), "pickle": (b"\x80\x02}q\0.", "pickle"), "html": (b"<!DOCTYPE html>", "web page"), "json": (b'{"a": 1}', "JSON"),
    "safetensors": (struct.pack("<Q", 60) + b'{"w":{"dtype":"F32"', "safetensors"), "ggjt": (b"tjgg\3\0\0\0", "before GGUF"), "zeros": (bytes(4096), "unfinished download"),
    "text": (b"hello world", "not a GGUF"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad(name, tmp_path):
    "Refused from memory and from disk, quickly, by one line that names file, byte and reason."
    data, says = BAD[name]
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    for source in (data, path):
        times = []
        for _ in range(3):
            t = time.perf_counter()
            with pytest.raises(GGUFError) as e: touch(GGUFFile(source))
            times.append(time.perf_counter() - t)
        message = str(e.value)
        assert says in message and "byte " in message and "\n" not in message and len(message) < 400
        assert message.startswith(str(path) if source is path else "<bytes>")
        assert min(times) < 0.1


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed(name):
    path = FIXTURES / "malformed" / name
    if name.startswith("control"): assert len(touch(GGUFFile(path)).tensors) == 12; return
    GGUFError("warm")
    times = []
    tracemalloc.start()
    try:
        for _ in range(3):
            t = time.perf_counter()
            with pytest.raises(GGUFError, match="byte ") as e: GGUFFile(path)
            times.append(time.perf_counter() - t)
        assert tracemalloc.get_traced_memory()[1] < 10e6
    finally: tracemalloc.stop()
    assert name in str(e.value) and min(times) < 0.1


CHILD = """
import resource, sys, time
from pathlib import Path
from literate_engine.gguf import GGUFFile, GGUFError
resource.setrlimit(resource.RLIMIT_AS, (512 << 20, 512 << 20))
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for p in sorted(Path(sys.argv[1]).glob('*.gguf')):
    before, t = peak(), time.perf_counter()
    try: g = GGUFFile(p); dict(g.metadata); print(p.name, 'LOADED')
    except GGUFError as e: pass
    if peak() - before > 10_000: print(p.name, 'MEMORY', peak() - before)
    if time.perf_counter() - t > 1: print(p.name, 'TIME', time.perf_counter() - t)
"""


def child(folder, *args):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", CHILD, str(folder), *args], capture_output=True, text=True, timeout=30, env=env)


@pytest.mark.skipif(sys.platform == "win32", reason="no RLIMIT_AS")
def test_memory_bombs(tmp_path):
    "All bad files in one process with 512 MB of address space: no file takes 10 MB more than what was there before."
    for i, (data, _) in enumerate(BAD.values()): (tmp_path / f"{i:03}.gguf").write_bytes(data)
    for name in MALFORMED: shutil.copy(FIXTURES / "malformed" / name, tmp_path)
    huge = tmp_path / "huge.gguf"
    huge.write_bytes(build([ARCH], [ONE], bytes(128)))
    os.truncate(huge, 1 << 40)                                     # a sparse file larger than the address space: refused, not a crash
    r = child(tmp_path)
    assert r.returncode == 0, r.stderr
    assert r.stdout == "control_valid.gguf LOADED\n"


def test_import_is_light():
    "The module needs NumPy and the standard library only."
    code = "import sys; from literate_engine.inspect import inspect_gguf; print([m for m in ('numba', 'fastcore', 'nbdev', 'gguf', 'matplotlib', 'jinja2') if m in sys.modules])"
    r = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert r.stdout == "[]\n", r.stdout + r.stderr


def test_documented_choices():
    "What is accepted: zero tensors (BC-116), n_dims 0 as a scalar (BC-112), no alignment key, gaps, no padding behind the last tensor, nesting up to the limit."
    g = touch(GGUFFile(build([ARCH])))
    assert g.tensors == {} and g.arch == "llama" and g.n_params == 0
    format_report(inspect_gguf(g))
    g = touch(GGUFFile(build([ARCH], [info("s", [], 0, 0)], struct.pack("<f", 7))))
    assert g.tensors["s"].shape == () and g.raw("s").view("<f4").item() == 7
    g = touch(GGUFFile(build([], [info("v", [8], 0, 256), info("w", [8, 4], 0, 0)], bytes(288))))
    assert list(g.tensors) == ["v", "w"] and g.tensors["w"].shape == (4, 8)
    with pytest.raises(GGUFError, match="architecture"): g.arch
    g = touch(GGUFFile(build([kv("a", 9, depth_bomb(MAX_DEPTH)), kv("b", 9, array(9, 2, array(8, 1, text("x")) + array(4, 0))), u32("c", 5)])))
    assert g.metadata["b"][0] == ["x"] and len(g.metadata["b"][1]) == 0 and g.metadata["c"] == 5
    g = touch(GGUFFile(build([u32("general.alignment", 1)], [info("w", [3], 24, 0), info("v", [5], 24, 3)], bytes(8), alignment=1)))
    assert g.raw("v").shape == (1, 5)


@pytest.mark.parametrize("arch", ["", None, 7])
def test_arch_of_a_wrong_kind(arch):
    kvs = [] if arch is None else [u32("general.architecture", 7) if arch == 7 else kv("general.architecture", 8, text(arch))]
    g = GGUFFile(build(kvs))
    with pytest.raises(GGUFError, match="general.architecture"): g.arch
    format_report(inspect_gguf(g))


def test_limits():
    "Our own limits bite before time is spent, also where the file really has the bytes."
    with pytest.raises(GGUFError, match="more than 16777216"): GGUFFile(build([kv("a", 9, array(0, 2**24 + 1, bytes(2**24 + 1)))]))
    with pytest.raises(GGUFError, match="metadata pairs"): GGUFFile(build([u32(f"k{i}", 0) for i in range(2**16 + 1)]))
    with pytest.raises(GGUFError, match="no tensor 'x'"): GGUFFile(build([ARCH])).raw("x")


# Split files (BC-122)
def shards(folder, n=3, change=None):
    folder.mkdir(exist_ok=True)
    for i in range(n):
        md = {"split.no": np.uint16(i), "split.count": np.uint16(n), "split.tensors.count": n}
        if i == 0: md = {"general.architecture": "llama", **md}
        tensors = {f"t{i}": np.full((2, 3), i, np.float32)}
        if change and i == change[0]: change[1](md, tensors)
        write_gguf(folder / f"m-{i + 1:05d}-of-{n:05d}.gguf", md, tensors)
    return folder


def test_split(tmp_path):
    d = shards(tmp_path / "a")
    for p in (d, *sorted(d.iterdir()), str(d)):
        with GGUFFile(p) as g:
            assert g.arch == "llama" and list(g.tensors) == ["t0", "t1", "t2"] and len(g.paths) == 3
            assert [g.raw(f"t{i}").view(np.float32)[1, 2] for i in range(3)] == [0, 1, 2]
            assert "shard 3" in format_report(inspect_gguf(p))


def test_split_fixture():
    whole = GGUFFile(fixture("llama.gguf"))
    for i in (1, 2, 3):
        g = GGUFFile(fixture(f"llama_split-0000{i}-of-00003.gguf"))
        assert g.arch == "llama" and set(g.tensors) == set(whole.tensors)
        assert all(np.array_equal(g.raw(n), whole.raw(n)) and g.tensors[n].shape == whole.tensors[n].shape for n in g.tensors)
        assert list(g.metadata["tokenizer.ggml.tokens"]) == list(whole.metadata["tokenizer.ggml.tokens"])


def _set(key, value):
    def f(md, tensors): md[key] = value
    return f


@pytest.mark.parametrize("change, says", [
    ((0, _set("split.count", np.uint16(4))), "'split.count' is 4, the file name says 3"), ((1, _set("split.count", np.uint16(4))), "m-00002-of-00003.gguf: 'split.count' is 4"),
    ((1, _set("split.no", np.uint16(2))), "m-00002-of-00003.gguf: 'split.no' is 2"), ((2, lambda md, t: md.pop("split.count")), "m-00003-of-00003.gguf: has no 'split.count'"),
    ((0, _set("split.tensors.count", 5)), "'split.tensors.count' is 5"), ((2, lambda md, t: t.update(t1=t["t2"])), "m-00003-of-00003.gguf: the tensor 't1' is also in m-00002-of-00003.gguf"),
    ((0, _set("split.count", "3")), "'split.count' is '3', not a count"), ((0, _set("split.count", 2**31)), "more than 99999"), ((0, _set("split.count", [3])), "not a count")])
def test_split_wrong(change, says, tmp_path):
    d = shards(tmp_path / "a", change=change)
    with pytest.raises(GGUFError) as e: GGUFFile(d / "m-00001-of-00003.gguf")
    assert says in str(e.value)


def test_split_missing(tmp_path):
    d = shards(tmp_path / "a")
    (d / "m-00002-of-00003.gguf").unlink()
    for p in (d, d / "m-00001-of-00003.gguf", d / "m-00003-of-00003.gguf"):
        with pytest.raises(GGUFError, match="1 of 3 shards missing: m-00002-of-00003.gguf"): GGUFFile(p)
    (d / "m-00001-of-00003.gguf").rename(d / "renamed.gguf")
    with pytest.raises(GGUFError, match="rename it"): GGUFFile(d / "renamed.gguf")
    with pytest.raises(GGUFError, match="open it by its path"): GGUFFile((d / "renamed.gguf").read_bytes())


def test_paths(tmp_path):
    with pytest.raises(GGUFError, match="without a .gguf"): GGUFFile(tmp_path)
    (tmp_path / "m.safetensors").write_bytes(b"")
    with pytest.raises(GGUFError, match="safetensors"): GGUFFile(tmp_path)
    with pytest.raises(GGUFError, match="no such file"): GGUFFile(tmp_path / "none.gguf")
    with pytest.raises(GGUFError, match="cannot be opened"): GGUFFile("a\0b")
    (tmp_path / "a.gguf").write_bytes(build([ARCH]))
    (tmp_path / "._a.gguf").write_bytes(b"resource fork")
    assert GGUFFile(tmp_path).arch == "llama"
    (tmp_path / "b.GGUF").write_bytes(build([ARCH]))
    with pytest.raises(GGUFError, match="2 models"): GGUFFile(tmp_path)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(GGUFError, match="neither a file nor a folder"): GGUFFile(tmp_path / "pipe")


# Life of the map
def test_close(tmp_path):
    p = tmp_path / "x.gguf"
    write_gguf(p, {"general.architecture": "llama", "a": ["x"], "b": ["y"]}, {"w": np.arange(6, dtype=np.float32)})
    g = GGUFFile(p)
    g.metadata["a"]
    w = g.raw("w").view(np.float32)
    assert g.close() is False                                   # a view is alive: it stays readable
    assert w.tolist() == [[0, 1, 2, 3, 4, 5]]
    with pytest.raises(GGUFError, match="closed"): g.raw("w")
    with pytest.raises(GGUFError, match="closed"): g.metadata["b"]
    with pytest.raises(GGUFError, match="closed"): g.metadata.item("b", 0)
    assert g.metadata["a"] == ["x"] and g.arch == "llama" and g.close() is True
    if sys.platform == "linux":
        maps = lambda: str(p) in open("/proc/self/maps").read()
        assert maps()
        del w
        assert not maps()                                       # the last view took the map with it
        g = GGUFFile(p); g.raw("w"); assert g.close() is True and not maps()
        gc.collect()                                            # other tests have had this file, and kept their errors
        for _ in range(3):
            with pytest.raises(GGUFError): GGUFFile(FIXTURES / "malformed/data_truncated.gguf")
        del _
        assert "data_truncated" not in open("/proc/self/maps").read()


def test_raw_is_a_read_only_view():
    buf = bytearray(build([ARCH], [ONE], bytes(128)))
    r = GGUFFile(buf).raw("w")
    buf[-1] = 9
    assert r.shape == (4, 32) and r[-1, -1] == 9
    with pytest.raises(ValueError, match="read-only"): r[0, 0] = 1


def test_threads():
    g = GGUFFile(build([kv("a", 9, array(8, 100, STRINGS))]))
    out = []
    ts = [threading.Thread(target=lambda: out.append(g.metadata["a"][99])) for _ in range(8)]
    for t in ts: t.start()
    for t in ts: t.join()
    assert out == ["token 99"] * 8


# Strings: the fast walk against the plain one
@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.text(max_size=20), st.sampled_from(["", "\0", "\0" * 7, "\0" * 9, "x" * 255, "y" * 256, "é" * 200, "z" * 65536])), max_size=300), st.integers(1, 6))
def test_strings(words, times):
    words = words * times
    payload = b"".join(text(s) for s in words)
    g = GGUFFile(build([kv("a", 9, array(8, len(words), payload)), u32("b", 77)]))
    assert g.metadata["a"] == words and g.metadata["b"] == 77
    g = GGUFFile(build([kv("a", 9, array(8, len(words), payload))]))
    for i in {0, len(words) // 2, len(words) - 1} if words else (): assert g.metadata.item("a", i) == words[i]
    with pytest.raises(IndexError): g.metadata.item("a", len(words))
    if words:
        with pytest.raises(GGUFError): GGUFFile(build([kv("a", 9, array(8, len(words), payload))])[:-(8 + len(words[-1].encode())) or None][:24 + 21 + len(payload) - 1])


# Round trips
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
scalars = st.one_of(st.text(max_size=30), st.booleans(), st.integers(-2**63, 2**64 - 1), st.floats(width=32),
                    *[st.integers(np.iinfo(d).min, np.iinfo(d).max).map(np.dtype(d).type) for d in ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8")], st.floats().map(np.float64), st.floats(width=32).map(np.float32))
arrays = st.one_of(st.lists(st.text(max_size=8), max_size=50), st.lists(st.booleans(), max_size=9), st.lists(st.integers(-2**63, 2**63 - 1), max_size=9), st.lists(st.floats(width=32), max_size=9),
                   st.lists(st.lists(st.text(max_size=4), min_size=1, max_size=3), min_size=1, max_size=3),
                   *[st.lists(st.integers(0, 127), max_size=9).map(lambda v, d=d: np.array(v, d)) for d in ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8", ">u4")])
tensors = st.dictionaries(names.filter(lambda s: len(s.encode()) <= 255), st.tuples(st.sampled_from(sorted(GGML_TYPES)), st.lists(st.integers(1, 4), max_size=4), st.integers(0, 255)), max_size=5)


def same(a, b):
    if isinstance(a, np.ndarray): return a.tobytes() == np.asarray(b).astype(a.dtype).tobytes() or np.array_equal(a, np.asarray(b, a.dtype), equal_nan=True)
    if isinstance(a, list): return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    return a == b or (a != a and b != b)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(names.filter(lambda k: k != "general.alignment" and k != "split.count"), st.one_of(scalars, arrays), max_size=8), tensors, st.sampled_from([1, 8, 32, 4096]), st.sampled_from([2, 3]))
def test_round_trip(metadata, specs, alignment, version):
    import io
    given_tensors = {}
    for name, (type_name, shape, fill) in specs.items():
        t = GGML_TYPES[type_name]
        shape = tuple(shape[:-1] + [shape[-1] * t.block_size]) if shape else (t.block_size,)
        given_tensors[name] = (np.full(int(np.prod(shape)) // t.block_size * t.type_size, fill, np.uint8), type_name, shape)
    f = io.BytesIO()
    write_gguf(f, metadata, given_tensors, alignment, version)
    g = touch(GGUFFile(f.getvalue()))
    assert g.version == version and g.alignment == alignment and [k for k in g.metadata if k != "general.alignment"] == list(metadata)
    for k, v in metadata.items(): assert same(g.metadata[k], v), k
    assert list(g.tensors) == list(given_tensors)
    for name, (raw, type_name, shape) in given_tensors.items():
        t = g.tensors[name]
        assert t.type.name == type_name and t.shape == shape and t.offset % alignment == 0 and np.array_equal(g.raw(name).ravel(), raw)
    json.dumps(inspect_gguf(g)), format_report(inspect_gguf(g), tensors=True)


def test_against_gguf_package(tmp_path):
    gguf = pytest.importorskip("gguf")
    p, q = tmp_path / "theirs.gguf", tmp_path / "ours.gguf"
    w = gguf.GGUFWriter(p, "llama")
    for i, (kind, v) in enumerate({"uint8": 200, "int8": -3, "uint16": 60000, "int16": -7, "uint32": 2**32 - 1, "int32": -9, "uint64": 2**63, "int64": -2**62, "float32": 0.5, "float64": 0.1, "bool": True, "string": "é"}.items()):
        getattr(w, f"add_{kind}")(f"k.{kind}", v)
    w.add_array("k.strings", ["a", "", "日本"]); w.add_array("k.ints", [1, -2]); w.add_array("k.floats", [0.5, 2.0]); w.add_array("k.bools", [True, False])
    x, y = np.arange(12, dtype=np.float32).reshape(3, 4), np.arange(68, dtype=np.uint8).reshape(1, 68)
    w.add_tensor("x", x); w.add_tensor("h", x.astype(np.float16)); w.add_tensor("q", y, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    w.write_header_to_file(); w.write_kv_data_to_file(); w.write_tensors_to_file(); w.close()
    g = touch(GGUFFile(p))
    md = g.metadata
    assert [md[f"k.{k}"] for k in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")] == [200, -3, 60000, -7, 2**32 - 1, -9, 2**63, -2**62]
    assert md["k.float64"] == 0.1 and md["k.bool"] is True and md["k.string"] == "é" and md["k.strings"] == ["a", "", "日本"]
    assert md["k.ints"].tolist() == [1, -2] and md["k.bools"].tolist() == [True, False] and md.type_name("k.bools") == "ARRAY[BOOL]" and md.count("k.ints") == 2
    assert np.array_equal(g.raw("x").view(np.float32), x) and g.tensors["q"].shape == (1, 64) and np.array_equal(g.raw("q"), y)
    write_gguf(q, dict(md), {n: (g.raw(n), t.type.name, t.shape) for n, t in g.tensors.items()})
    r = gguf.GGUFReader(q)
    assert {f: r.fields[f].contents() for f in md if f != "k.bools"} == {f: md[f].tolist() if isinstance(md[f], np.ndarray) else md[f] for f in md if f != "k.bools"} | {"k.float64": np.float32(0.1)}
    assert all(np.array_equal(t.data.view(np.uint8).ravel(), g.raw(t.name).ravel()) for t in r.tensors) and len(r.tensors) == 3


def test_write_refuses(tmp_path):
    p = tmp_path / "x.gguf"
    p.write_bytes(b"old")
    f = np.zeros((2, 32), np.float32)
    for md, tensors, kw in [({"a": None}, {}, {}), ({"a": 2**64}, {}, {}), ({"a": [1, "x"]}, {}, {}), ({"a": {}}, {}, {}), ({"": 1}, {}, {}), ({"a": np.zeros((2, 2))}, {}, {}), ({"a": [[None]]}, {}, {}),
                            ({}, {"w": (f, "Q4_0", f.shape)}, {}), ({}, {"w": (f, "Q9", f.shape)}, {}), ({}, {"w": (f.view(np.uint8), "F32", (2, 31))}, {}), ({}, {"w": np.zeros((0, 3), np.float32)}, {}),
                            ({}, {"w": np.zeros((1,) * 5, np.float32)}, {}), ({}, {"n" * 256: f}, {}), ({}, {"w": np.zeros(3, complex)}, {}), ({}, {}, {"version": 1}), ({}, {}, {"alignment": 24}), ({"a": "\udc80"}, {}, {})]:
        with pytest.raises(ValueError): write_gguf(p, md, tensors, **kw)
        assert p.read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 1       # the old file stays, nothing is left behind
    write_gguf(p, {}, {"w": f})
    assert GGUFFile(p).tensors["w"].shape == (2, 32) and len(list(tmp_path.iterdir())) == 1


def test_write_over_an_open_file(tmp_path):
    p = tmp_path / "x.gguf"
    write_gguf(p, {"a": 1}, {"w": np.full(8, 3, np.float32)})
    g = GGUFFile(p)
    if sys.platform != "win32":
        write_gguf(p, dict(g.metadata), {"w": (g.raw("w"), "F32", (8,)), "v": np.zeros(4, np.float32)})
        assert g.raw("w").view(np.float32).max() == 3 and list(GGUFFile(p).tensors) == ["w", "v"]


def test_bf16(tmp_path):
    x = np.array([0, 1, -1, 1.00390625, 1.01171875, np.nan, np.inf, -np.inf, 3.4e38, 1e-40], np.float32)
    write_gguf(tmp_path / "x.gguf", {}, {"w": (x, "BF16", x.shape)})
    back = (GGUFFile(tmp_path / "x.gguf").raw("w").view(np.uint16).astype(np.uint32) << 16).view(np.float32)[0]
    assert np.isnan(back[5]) and back[[0, 1, 2, 6, 7]].tolist() == [0, 1, -1, np.inf, -np.inf] and back[3] == 1.0 and back[4] == 1.015625 and back[8] == np.inf


def test_report_is_safe_for_a_terminal():
    evil = "\x1b[2J\rmodel\n"
    md = [kv("general.architecture", 8, text(evil)), kv("general.name", 8, text(evil * 100)), kv("tokenizer.chat_template", 8, text(evil)), kv(evil, 4, bytes(4)),
          kv("tokenizer.ggml.tokens", 9, array(8, 1, text(evil))), u32("tokenizer.ggml.bos_token_id", 0), u32("tokenizer.ggml.eos_token_id", 9), kv("general.license", 9, array(8, 2, text(evil) + text("x")))]
    out = format_report(inspect_gguf(build(md, [info(evil, [8], 0, 0)], bytes(32)), [evil.strip()]) | {"engine": []}, tensors=True)
    assert "\x1b" not in out and "\r" not in out
    with pytest.raises(GGUFError) as e: GGUFFile(build([kv(evil, 7, b"\7")]))
    assert "\x1b" not in str(e.value) and "\n" not in str(e.value)


# Mutations
def seed_file():
    kvs = [ARCH, u32("general.alignment", 32), kv("b", 7, b"\1"), kv("f", 12, struct.pack("<d", 0.1)), kv("s", 8, text("héllo")), kv("n", 9, array(9, 2, array(0, 2, b"\1\2") + array(8, 1, text("x")))),
           kv("i", 9, array(5, 4, bytes(16))), kv("bb", 9, array(7, 3, b"\0\1\1")), kv("tokens", 9, array(8, 40, b"".join(text(f"t{i}" * (i % 4)) for i in range(40))))]
    return build(kvs, [info("w", [8, 4], 0, 0), info("q", [32, 2], 2, 128), info("s", [], 0, 192), info("h", [4, 3, 2], 1, 224)], bytes(range(224)) + bytes(48))


EXTREME = [0, 1, 2, 7, 8, 31, 32, 2**16, 2**31, 2**32 - 1, 2**33, 2**61, 2**63 - 1, 2**63, 2**64 - 1, 2**64 - 32]


def mutate(r, data):
    b = bytearray(data)
    for _ in range(r.choice((1, 1, 1, 2, 5))):
        kind, at = r.randrange(7), r.randrange(4 if r.random() < 0.98 else 0, len(b))
        if kind <= 1: b[at] = r.randrange(256)
        elif kind == 2: b[at] ^= 1 << r.randrange(8)
        elif kind == 3: b[at:at + 8] = struct.pack("<Q", r.choice(EXTREME))
        elif kind == 4: b[at:at + 4] = struct.pack("<I", r.choice(EXTREME) & 0xFFFFFFFF)
        elif kind == 5: del b[at:at + r.choice((1, 4, 8, 24))]
        else: b[at:at] = b[r.randrange(len(b)):][:r.choice((1, 4, 8, 24))]
        if len(b) < 5: break
    return bytes(b[:r.randrange(len(b))] if r.random() < 0.05 else b)


def test_20000_mutations():
    "Each ends in GGUFError or in a file that can be read in full; nothing else, none slow."
    seed, r, good, slowest = seed_file(), random.Random(11), 0, 0.0
    touch(GGUFFile(seed))
    for i in range(20_000):
        data = mutate(r, seed)
        t = time.perf_counter()
        try:
            g = touch(GGUFFile(data))
            if i % 20 == 0: format_report(inspect_gguf(g), tensors=True)
            good += 1
        except GGUFError as e: assert "\n" not in str(e)
        slowest = max(slowest, time.perf_counter() - t)
    assert 500 < good < 19_000 and slowest < 1


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400))
def test_noise(data):
    for b in (data, b"GGUF\3\0\0\0" + data, build(n_kv=1)[:24] + data, build(n_tensors=1)[:24] + data):
        try: touch(GGUFFile(b))
        except GGUFError: pass


def test_real_model(smollm2):
    with GGUFFile(smollm2) as g:
        assert g.arch == "llama" and len(g.tensors) == 272 and g.n_params == 134_515_008
        assert g.metadata.count("tokenizer.ggml.tokens") == 49152 and g.metadata.item("tokenizer.ggml.tokens", 1) == "<|im_start|>"
    report = inspect_gguf(smollm2, ["runs on the CPU"])
    assert "134.5M" in format_report(report) and "49152 tokens" in format_report(report)
