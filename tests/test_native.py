"""Where compiled code is kept: never where another user could have put it first."""
import os
import tempfile
from pathlib import Path

import pytest

from literate_engine import native


@pytest.fixture
def shared(tmp_path, monkeypatch):
    "The folder among the temporary files that is the last resort: neither the package nor the user's home can be written to."
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    monkeypatch.setattr(native, "__file__", os.path.join(os.devnull, "native.py"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"literate_engine-{os.getuid() if hasattr(os, 'getuid') else 0}-own"


def test_a_new_folder_is_this_users_alone(shared):
    assert native.cache_folder().is_relative_to(shared) and native.cache_folder().is_relative_to(shared)
    assert os.name == "nt" or shared.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.name == "nt", reason="no owners and modes")
@pytest.mark.parametrize("kind", ["open", "link", "file", "another's"])
def test_a_folder_that_others_may_have_filled_is_not_taken(shared, tmp_path, kind):
    if kind == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        shared.symlink_to(tmp_path / "elsewhere")
    elif kind == "file": shared.touch()
    else:
        shared.mkdir(mode=0o700)
        if kind == "open": shared.chmod(0o777)
        elif os.getuid() == 0: os.chown(shared, 12345, 12345)
        else: pytest.skip("only root can give a folder away")
    folder = native.cache_folder()
    assert folder.is_dir() and not Path(os.path.realpath(folder)).is_relative_to(shared) and "elsewhere" not in os.path.realpath(folder)
    assert list(tmp_path.glob(f"{shared.name}/*")) == []
