"""The project as a whole: chapters and modules agree, the order of the book holds, the package carries what it needs."""
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "nbs").glob("*.ipynb"))
MODULES = sorted(p for p in (ROOT / "literate_engine").glob("*.py") if p.name not in ("_modidx.py", "__init__.py"))
DEV_ONLY = {"nbdev", "fastcore", "execnb", "gguf", "matplotlib", "ipywidgets", "IPython", "pytest", "hypothesis", "openai", "httpx", "xllamacpp", "nbformat", "nbclient"}
MAX_LINES = 520


def cells(path: Path, kind: str = "code") -> list[dict]:
    return [c for c in json.loads(path.read_text("utf-8"))["cells"] if c["cell_type"] == kind]


def source(cell: dict) -> str:
    return "".join(cell["source"])


def module_of(path: Path) -> str:
    "The module that a notebook exports, '' for none."
    for c in cells(path):
        if m := re.search(r"^#\s*\|\s*default_exp\s+(\S+)", source(c), re.M): return m[1]
    return ""


def python(text: str) -> str:
    "The cell without what only IPython reads."
    return "\n".join(line for line in text.splitlines() if not re.match(r"\s*[%!]", line))


def imports(tree: ast.AST):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import): yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0: yield node.module or ""
        elif isinstance(node, ast.ImportFrom): yield "literate_engine" + (f".{node.module}" if node.module else "")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_chapter(path):
    "The number is the order of reading and of import; the module is named like the chapter; the page has its results."
    assert re.fullmatch(r"\d\d_[a-z0-9_]+", path.stem), "a chapter is called NN_name.ipynb"
    name, number = module_of(path), path.stem[:2]
    assert name in ("", path.stem[3:], "__init__"), f"exports {name}, expected {path.stem[3:]}"
    numbers = {module_of(p): p.stem[:2] for p in NOTEBOOKS}
    for c in cells(path):
        for module in imports(ast.parse(python(source(c)))):
            top, _, sub = module.partition(".")
            if top == "literate_engine" and sub and sub != name:
                assert numbers.get(sub, "??") < number, f"chapter {number} imports literate_engine.{sub}, which is chapter {numbers.get(sub, 'not there')}"
    heads = [source(c) for c in cells(path, "markdown")]
    assert heads and re.match(r"# \w", heads[0]), "a chapter opens with `# Title`"
    assert len(re.findall(r"^# ", "\n".join(re.sub(r"```.*?```", "", h, flags=re.S) for h in heads), re.M)) == 1, "one title a chapter"
    for c in cells(path):
        prints = re.search(r"^print\(", source(c), re.M) and not re.search(r"^#\s*\|\s*(gpu|slow|bench|include: *false|hide)", source(c), re.M)
        assert c.get("outputs") or not prints, f"no stored output, run tools/nbexec.py: {source(c)[:60]}"
    for c in cells(path):
        assert not any(o["output_type"] == "error" for o in c.get("outputs", [])), f"a stored error under: {source(c)[:60]}"
        assert c["execution_count"] is None, "execution counts are stored: run tools/nbexec.py or nbdev_clean"


def test_modules_are_what_the_notebooks_export(tmp_path):
    "A module is never edited by hand, and none is left over from a chapter that is gone."
    pytest.importorskip("nbdev")
    for name in ("settings.ini", "pyproject.toml", "setup.py", "README.md"): shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "nbs", tmp_path / "nbs", ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    (tmp_path / "literate_engine").mkdir()
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([str(Path(sys.executable).parent / "nbdev_export")], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    fresh = {p.name: p.read_text("utf-8") for p in (tmp_path / "literate_engine").glob("*.py")}
    here = {p.name: p.read_text("utf-8") for p in (ROOT / "literate_engine").glob("*.py")}
    for d in (fresh, here): d.pop("_modidx.py", None)
    assert sorted(here) == sorted(fresh), "modules without a notebook, or notebooks without their module: run nbdev_export"
    assert not (differ := [n for n in fresh if fresh[n] != here[n]]), f"not what the notebooks export: {differ}; run nbdev_export (or nbdev_update)"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.stem)
def test_module(path):
    "Short enough to be one chapter, and importable without what only development needs."
    text = path.read_text("utf-8")
    lines = [line for line in re.sub(r"__all__ = \[.*?\]", "", text, flags=re.S).splitlines() if line.strip() and not line.startswith("# %% ")]
    assert len(lines) <= MAX_LINES, f"{len(lines)} lines: that is two chapters"
    bad = {m.split(".")[0] for m in imports(ast.parse(text))} & DEV_ONLY
    if path.stem == "bench": bad -= {"xllamacpp"}                     # the peer, imported when it is asked for
    assert not bad, f"imports {sorted(bad)}, which a user does not have"


@pytest.mark.skipif(not (ROOT / "literate_engine/cli.py").exists(), reason="no command line yet")
def test_the_command_line_starts_light():
    "`--help` and `inspect` must not wait for compilers and servers."
    code = "import sys, literate_engine.cli; print(sorted({'numba', 'cupy', 'fastapi', 'jinja2', 'tokenizers', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip() == "[]"


@pytest.mark.slow
def test_the_wheel_holds_package_and_kernels(tmp_path):
    "Built the way a user's pip builds it, from a copy of the tree."
    src = tmp_path / "src"
    shutil.copytree(ROOT, src, ignore=shutil.ignore_patterns(".*", "_proc", "_site", "data", "build", "*.egg-info", "__pycache__"))
    done = subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", str(tmp_path), str(src)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    for path in [*ROOT.glob("literate_engine/*.py"), *ROOT.glob("kernels/*.cu*")]:
        assert f"literate_engine/{'kernels/' if path.parent.name == 'kernels' else ''}{path.name}" in names
    assert any(n.startswith("literate_engine/kernels/") for n in names) and not any(n.startswith(("nbs/", "tests/", "tools/")) for n in names)


def test_facts_agree():
    "One version, one licence, and a sidebar that lists the chapters that exist."
    c = ConfigParser(delimiters=["="])
    c.read(ROOT / "settings.ini")
    init = ROOT / "literate_engine/__init__.py"
    assert f'__version__ = "{c["DEFAULT"]["version"]}"' in init.read_text("utf-8")
    assert "Apache License" in (ROOT / "LICENSE").read_text("utf-8")
    done = subprocess.run([sys.executable, "tools/sidebar.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def tracked() -> list[Path]:
    "The text files of the tree that git keeps, or would keep."
    try: out = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError): return [p for d in ("nbs", "literate_engine", "tests", "tools") for p in (ROOT / d).glob("*.*")]
    return [ROOT / line for line in out.splitlines() if Path(line).suffix in (".py", ".ipynb", ".md", ".ini", ".toml", ".yml", ".json", ".qmd", ".css", "")]


def test_nothing_of_one_machine_is_in_the_tree():
    "No absolute path of a machine, no private host."
    here = re.escape(str(ROOT))
    pattern = re.compile(here + r"\b|/(?:home|Users)/(?!someone\b)\w+/|/root/|/tmp/ipykernel_\w+|\b(?:10|192\.168)(?:\.\d{1,3}){2,3}\b")
    bad = [f"{path.relative_to(ROOT)}: {m[0]!r}" for path in tracked() if path != Path(__file__).resolve() and path.is_file()
           if (m := pattern.search(path.read_text("utf-8", errors="replace")))]
    assert not bad, bad
