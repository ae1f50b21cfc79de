"""Cache contents outside of the cache: files that are damaged, crafted or half written, random lives of the tier, and a real model that goes on after a restore."""
import hashlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from literate_engine import hosttier
from literate_engine.core import fixture
from literate_engine.gguf import GGUFError, GGUFFile, write_gguf
from literate_engine.hosttier import (CacheIdentity, Contents, HostTier, Layout, PrefixHistory, SavedState, cache_report, fingerprint, load_state, restore, save_state,
                                      snapshot)
from literate_engine.blocks import CacheHandle
from literate_engine.model import Model

IDENTITY = CacheIdentity("f"*64, "toy", 100, {"activations": "int8", "device": "cpu"}, Layout(("|u1 24",), 24), Layout(("<f4 5",), 20))
RNG = np.random.default_rng(0)


def saved(n=37, blocks=2, block_bytes=24, state_bytes=20) -> SavedState:
    random = lambda *shape: RNG.integers(0, 256, shape, np.uint8)
    return SavedState(RNG.integers(0, 100, n, np.int32), random(blocks, block_bytes), random(state_bytes) if state_bytes else None)


def same(a: SavedState, b: SavedState) -> bool:
    return np.array_equal(a.token_ids, b.token_ids) and np.array_equal(a.blocks, b.blocks) and (a.state is b.state is None or np.array_equal(a.state, b.state))


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    "(the path of a good file, what is in it)"
    path, talk = tmp_path_factory.mktemp("state")/"good", saved()
    save_state(path, talk, IDENTITY, "tenant")
    return path, talk


def refused(path, identity=IDENTITY, salt="tenant") -> str:
    with pytest.raises(GGUFError) as e: load_state(path, identity, salt)
    text = str(e.value)
    assert str(path) in text and "\n" not in text and len(text) < 900, text
    return text


@pytest.mark.parametrize("state_bytes", (0, 20))
@pytest.mark.parametrize("block_bytes", (0, 24))
@pytest.mark.parametrize("n", (16, 17, 31, 50))
def test_round_trip(tmp_path, n, block_bytes, state_bytes):
    "Models with keys, with states, with both, with neither; whole blocks and a rest."
    identity = replace(IDENTITY, block=Layout(("x",), block_bytes), state=Layout(("y",), state_bytes))
    talk = saved(n, n//16, block_bytes, state_bytes)
    save_state(tmp_path/"s", talk, identity, "sält\ud800")
    back = load_state(tmp_path/"s", identity, "sält\ud800")
    assert same(talk, back) and back.num_cached_tokens == n//16*16
    assert "sält".encode() not in (tmp_path/"s").read_bytes()


def test_every_truncation_is_refused(good, tmp_path):
    data = good[0].read_bytes()
    for n in range(len(data)):
        (tmp_path/"s").write_bytes(data[:n])
        refused(tmp_path/"s")


@pytest.mark.parametrize("more", (1, 31, 32, 5000))
def test_a_longer_file_is_refused(good, tmp_path, more):
    (tmp_path/"s").write_bytes(good[0].read_bytes() + bytes(more))
    assert "the last part ends here" in refused(tmp_path/"s")


def test_every_flipped_byte_is_refused_or_means_nothing(good, tmp_path):
    "Bytes that mean nothing: padding, the version of the container, the width in which a number is stored."
    data, silent = bytearray(good[0].read_bytes()), 0
    for i in range(len(data)):
        for bits in (1, 0x80, 0xff):
            data[i] ^= bits
            (tmp_path/"s").write_bytes(data)
            try: back = load_state(tmp_path/"s", IDENTITY, "tenant")
            except GGUFError as e: assert "\n" not in str(e) and "s: byte" in str(e)
            else: assert same(back, good[1]), i; silent += 1
            data[i] ^= bits
    assert silent < 3*120, f"{silent} changes went unnoticed"


def test_random_damage(good, tmp_path):
    "Pieces cut out, doubled, overwritten; only GGUFError comes out."
    rng, data = np.random.default_rng(1), good[0].read_bytes()
    for _ in range(500):
        a, b = sorted(rng.integers(0, len(data), 2))
        bad = [data[:a] + data[b:], data[:b] + data[a:], data[:a] + rng.bytes(b - a) + data[b:], data[:a] + b"\xff"*8 + data[a + 8:]][rng.integers(4)]
        (tmp_path/"s").write_bytes(bad)
        try: assert same(load_state(tmp_path/"s", IDENTITY, "tenant"), good[1])
        except GGUFError: pass


def crafted(path, good, facts=(), parts=(), drop=(), sign=True):
    "A file with changed keys or parts, and matching sums: what an attacker would write."
    with GGUFFile(good[0]) as f:
        tensors = {name: (f.raw(name).copy(), t.type.name, t.shape) for name, t in f.tensors.items()} | dict(parts)
        keys = {k: f.metadata[k] for k in f.metadata} | {f"state.sha256.{k}": hashlib.sha256(v[0]).hexdigest() for k, v in tensors.items()} | dict(facts)
    keys, tensors = ({k: v for k, v in d.items() if k not in drop} for d in (keys, tensors))
    if sign: keys["state.checksum"] = hosttier._checksum(keys, [(k, t, s) for k, (_, t, s) in tensors.items()])
    write_gguf(path, keys, tensors)
    return path


@pytest.mark.parametrize("facts, contains", [
    ({"state.num_blocks": 2**62}, "blocks"), ({"state.num_blocks": 0}, "parts"), ({"state.num_blocks": 1}, "blocks"), ({"state.num_blocks": -1}, "blocks"),
    ({"state.num_blocks": 2.0}, "state.num_blocks is of type"), ({"state.num_blocks": True}, "state.num_blocks is of type"), ({"state.version": 2}, "version 2"),
    ({"state.version": [1, 1]}, "version None"), ({"general.architecture": "llama"}, "'llama'"), ({"general.architecture": ["saved_state"]}, "None"),
    ({"state.model": "0"*64}, "another model"), ({"state.settings": "activations = \nfloat32"}, "computed with"), ({"state.block": "24 bytes: \n<f4 6"}, "state.block"),
    ({"state.slot": "20 bytes: <f8 5"}, "state.slot"), ({"state.salt": "x"*100000}, "cache_salt"), ({"state.salt": ""}, "cache_salt"), ({"more": 1}, "'more'"), ({"more\n"*20: 1}, "more"),
    ({"state.model_name": "n"*100000 + "\n", "state.model": ""}, "another model"), ({"general.alignment": np.uint32(1 << 20)}, "general.alignment")])
def test_crafted_headers(good, tmp_path, facts, contains):
    assert contains in refused(crafted(tmp_path/"s", good, facts))


@pytest.mark.parametrize("parts, contains", [
    ({"token_ids": (np.full(37, 100, np.int32), "I32", (37,))}, "token ids 100 to 100"), ({"token_ids": (np.full(37, -1, np.int32), "I32", (37,))}, "token ids -1"),
    ({"token_ids": (np.zeros(31, np.int32), "I32", (31,))}, "31 tokens for 2 whole blocks"), ({"token_ids": (np.zeros((1, 37), np.int32), "I32", (1, 37))}, "token_ids"),
    ({"token_ids": (np.zeros(37, np.float32), "F32", (37,))}, "F32"), ({"blocks": (np.zeros((2, 25), np.uint8), "I8", (2, 25))}, "blocks"),
    ({"blocks": (np.zeros((24, 2), np.uint8), "I8", (24, 2))}, "blocks"), ({"state": (np.zeros(21, np.uint8), "I8", (21,))}, "state"),
    ({"state": (np.zeros(20, np.float32), "F32", (20,))}, "F32"), ({"extra": (np.zeros(20, np.uint8), "I8", (20,))}, "extra")])
def test_crafted_parts(good, tmp_path, parts, contains):
    assert contains in refused(crafted(tmp_path/"s", good, parts=parts))


@pytest.mark.parametrize("drop", ("state", "blocks", "token_ids", "state.model", "state.salt", "state.sha256.blocks"))
def test_missing_pieces(good, tmp_path, drop): refused(crafted(tmp_path/"s", good, drop=(drop, f"state.sha256.{drop}")))


def test_a_swapped_checksum_is_noticed(good, tmp_path):
    assert "header is damaged" in refused(crafted(tmp_path/"s", good, {"state.num_blocks": 1}, sign=False))
    assert "not those that were written" in refused(crafted(tmp_path/"s", good, {"state.sha256.state": "0"*64}))


def test_other_paths(good, tmp_path):
    "A folder (even one with a good file in it), nothing, a pipe, a shard of a set."
    assert "folder" in refused(good[0].parent) and "no such file" in refused(tmp_path/"none")
    os.mkfifo(tmp_path/"pipe")
    assert "neither" in refused(tmp_path/"pipe")
    assert "split" in refused(crafted(tmp_path/"s", good, {"split.count": 2, "split.no": 0}))
    assert "split" in refused(crafted(tmp_path/"s", good, {"split.count": 1}))


def test_a_failed_save_leaves_the_old_file(good, tmp_path, monkeypatch):
    path, before = tmp_path/"s", good[0].read_bytes()
    path.write_bytes(before)
    real, calls = os.fsync, []
    def full(fd): calls.append(fd); raise OSError(28, "No space left on device")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"): save_state(path, saved(), IDENTITY)
    monkeypatch.setattr(os, "fsync", real)
    assert calls and path.read_bytes() == before and os.listdir(tmp_path) == ["s"]
    with pytest.raises(FileNotFoundError): save_state(tmp_path/"no such folder"/"s", saved(), IDENTITY)


def test_a_killed_save_leaves_the_old_file(tmp_path):
    "A process that saves again and again is killed in the middle; what is there is whole, and either the old or a newer one."
    code = f"""
import sys; sys.path[:0] = {[*sys.path]!r}
import numpy as np
from tests.test_hosttier import IDENTITY, SavedState, Layout, replace, save_state
identity = replace(IDENTITY, block=Layout(('x',), 1 << 20))
for i in range(10**6): save_state({str(tmp_path/'s')!r}, SavedState(np.full(48, i % 100, np.int32), np.full((3, 1 << 20), i % 100, np.uint8), np.full(20, i % 100, np.uint8)), identity)
"""
    identity = replace(IDENTITY, block=Layout(("x",), 1 << 20))
    for wait in (.02, .05, .11):
        child = subprocess.Popen([sys.executable, "-c", code], cwd=os.path.dirname(os.path.dirname(__file__)))
        while not (tmp_path/"s").exists(): assert child.poll() is None; time.sleep(.01)
        time.sleep(wait)
        child.send_signal(signal.SIGKILL); child.wait()
        back = load_state(tmp_path/"s", identity)
        assert len({*back.token_ids.tolist(), *np.unique(back.blocks).tolist(), *back.state.tolist()}) == 1
        (tmp_path/"s").unlink()


def test_random_lives_of_the_tier():
    "Puts, gets and pins of two kinds against a plain dictionary: what is found has the bytes that were put; the budget holds; pinned entries stay."
    for seed in range(20):
        rng = np.random.default_rng(seed)
        arrays = {"block": rng.integers(0, 256, (9, 40), np.uint8), "state": rng.integers(0, 256, (5, 3, 70), np.uint8)}
        contents = {k: Contents([a]) for k, a in arrays.items()}
        tier, put, pins = HostTier(int(rng.integers(0, 1500)), contents), {}, []
        for _ in range(600):
            kind = str(rng.choice(["block", "state"]))
            key, a, i = b"%d" % rng.integers(12), arrays[kind], int(rng.integers(1, len(arrays[kind])))
            what, before = rng.random(), len(tier)
            if what < .4:
                fresh = (kind, key) not in tier
                if tier.put(kind, key, i):
                    if fresh: put[kind, key] = a[i].copy()
                else: assert len(tier) == before and fresh
            elif what < .7:
                old, there = a.copy(), (kind, key) in tier
                assert tier.get(kind, key, i) == there and np.array_equal(a[i], put[kind, key] if there else old[i])
                old[i] = a[i]
                assert np.array_equal(a, old)
            elif what < .8: a[i] = rng.integers(0, 256, a[i].shape)
            elif what < .9 and (kind, key) in tier and len(pins) < 4: tier.pin(kind, [key]); pins.append((kind, key))
            elif pins: kind, key = pins.pop(int(rng.integers(len(pins)))); tier.unpin(kind, [key])
            assert all(p in tier for p in pins)
            tier.check_integrity()


@pytest.mark.parametrize("name", ("llama", "qwen35", "mamba2", "gemma3"))
def test_a_model_goes_on_from_a_file(name, tmp_path):
    "Another process's cache, restored into other blocks: the same logits to the last bit, with keys, states, both, sliding windows."
    rng = np.random.default_rng(2)
    def load(): return Model(fixture(f"{name}.gguf"), activations="float32", max_model_len=96, num_kv_blocks=20, num_state_slots=4)
    def step(model, handle, ids, start): return model.forward(model.batch.fill([(ids, start, handle.block_ids, "last", handle.slot)])).copy()
    def parts(model): return Contents(model.cache.k + model.cache.v), Contents(model.states.conv + model.states.ssm) if model.states else None
    one, two = load(), load()
    ids = rng.integers(0, one.config.n_vocab, 60).tolist()
    kv, states = parts(one)
    with GGUFFile(fixture(f"{name}.gguf")) as f: model = fingerprint(f)
    identity = CacheIdentity(model, name, one.config.n_vocab, {}, kv.layout, states.layout if states else Layout((), 0))
    a, b = CacheHandle(), CacheHandle()
    assert one.pool.grow(a, 60) and two.pool.grow(CacheHandle(), 33) and two.pool.grow(b, 60)
    step(one, a, ids[:48], 0)
    save_state(tmp_path/"s", snapshot(ids[:48], a.block_ids[:3], kv, states, a.slot), identity)
    restore(load_state(tmp_path/"s", identity), b.block_ids[:3], *parts(two), b.slot)
    assert a.block_ids != b.block_ids and np.array_equal(step(one, a, ids[48:], 48), step(two, b, ids[48:], 48))
    one.close(); two.close()


def test_fingerprints_of_all_fixtures_differ():
    names = [p for p in fixture("llama.gguf").parent.glob("*.gguf") if "-of-" not in p.name]
    prints = {}
    for path in names:
        with GGUFFile(path) as f: prints.setdefault(fingerprint(f), []).append(path.name)
    assert all(len({hashlib.sha256((names[0].parent/n).read_bytes()).digest() for n in same}) == 1 for same in prints.values()), prints


def test_nothing_of_another_salt_is_told():
    "Whatever was asked under other salts, the report is that of an empty history."
    rng = np.random.default_rng(3)
    full, empty = PrefixHistory(), PrefixHistory()
    for _ in range(300):
        ids = rng.integers(0, 2, rng.integers(1, 60)).tolist()
        assert cache_report(full, ids, "mine", 0) == cache_report(empty, ids, "mine", 0)
        full.add(ids, str(rng.integers(5)))
