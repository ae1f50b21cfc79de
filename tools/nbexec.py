"""Execute notebooks and save their outputs, reproducibly.

`python tools/nbexec.py [--check] [-j N] [--timeout SECONDS] [notebooks...]`

Without --check the outputs are written back. With it, nothing is written: the run fails if a cell fails, or if what it prints is not what is
stored. Digits of a float may differ by rounding there (another processor sums in another order); pictures are looked for, not compared.
Cells marked `gpu`, `slow` or `bench` keep their stored outputs, unless NB_FLAGS names the mark. Chapters about the GPU (their name ends in _gpu, or a cell is marked `emulated`)
run on it if NB_FLAGS names `gpu`, else in the emulator, else (no C++ compiler) not at all. A notebook that hangs is stopped, and tried once more."""
import argparse
import difflib
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WIDGET = "application/vnd.jupyter.widget-view+json"
ENV = {"PYTHONHASHSEED": "0", "TZ": "UTC", "NO_COLOR": "1", "TERM": "dumb", "JUPYTER_PLATFORM_DIRS": "1", "MPLBACKEND": "module://matplotlib_inline.backend_inline",
       "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}", "PYTHONPATH": str(ROOT)}
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
FLOAT = re.compile(r"(?<![\w.])-?\d+(?:\.\d+(?:e[-+]?\d+)?|e[-+]?\d+)(?![\w.])")

def marks(cell):
    return {m.strip() for m in re.findall(r"^#\s*\|\s*(.*)$", cell.source, re.M)}

def skip(cell, flags):
    "Cells that need what this machine lacks keep their stored outputs."
    return cell.cell_type != "code" or bool(marks(cell) & flags) or "eval: false" in marks(cell) or "nbdev_export(" in cell.source

def static(cell, state):
    "Replace a widget view (its ids are random) by what its Output widgets show."
    def inner(mid, seen):
        if mid in seen or mid not in state: return []
        seen.add(mid)
        st = state[mid]["state"]
        kids = [k.removeprefix("IPY_MODEL_") for k in st.get("children", [])]
        return [nbformat.from_dict(o) for o in st.get("outputs", [])] + [o for k in kids for o in inner(k, seen)]
    outs = []
    for o in cell.get("outputs", []):
        data = o.get("data", {})
        if o.output_type == "stream" and o.name == "stderr": continue        # what concerns the run, not the page: progress, notices
        elif WIDGET in data: outs += inner(data[WIDGET]["model_id"], set())
        elif o.output_type == "stream" and outs and outs[-1].output_type == "stream" and outs[-1].name == o.name: outs[-1].text += o.text
        else: outs.append(o)
    cell["outputs"] = outs

def placeless(value):
    "Outputs without the folder of this checkout."
    if isinstance(value, str): return value.replace(f"{ROOT}{os.sep}", "")
    if isinstance(value, list): return [placeless(v) for v in value]
    if isinstance(value, dict): return nbformat.from_dict({k: placeless(v) for k, v in value.items()})
    return value

def execute(path, flags, timeout):
    "The notebook with fresh outputs."
    class Client(NotebookClient):
        async def async_execute_cell(self, cell, cell_index, *a, **k):
            if skip(cell, flags): return cell
            return await super().async_execute_cell(cell, cell_index, *a, **k)
    nb = nbformat.read(path, 4)
    Client(nb, timeout=timeout, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}, record_timing=False,
           extra_arguments=["--log-level=40"]).execute()
    state = nb.metadata.get("widgets", {}).get("application/vnd.jupyter.widget-state+json", {}).get("state", {})
    for cell in nb.cells:
        if cell.cell_type != "code": continue
        static(cell, state)
        cell["outputs"] = placeless(cell["outputs"])
    nb.metadata.pop("widgets", None)
    clean_nb(nb, allowed_cell_metadata_keys=["tags"])
    return nb

def shown(cell):
    "What a reader sees under a cell: text, and the kinds of picture."
    parts = []
    for o in cell.get("outputs", []):
        data = o.get("data", {})
        pictures = sorted(k for k in data if k.startswith("image/"))
        parts.append(o.get("text") or (f"<{', '.join(pictures)}>" if pictures else data.get("text/plain", "")))
    return "".join(parts)

def same(a, b):
    "Equal text; floats may differ by rounding (or both be rounding errors)."
    if FLOAT.sub("#", a) != FLOAT.sub("#", b): return False
    pairs = zip(map(float, FLOAT.findall(a)), map(float, FLOAT.findall(b)))
    return all(math.isclose(x, y, rel_tol=1e-2) or max(abs(x), abs(y)) < 1e-3 for x, y in pairs)

def differences(old, new):
    "One readable entry for each cell whose output is not the stored one."
    for i, (a, b) in enumerate(zip(old.cells, new.cells)):
        if a.cell_type == "code" and not same(x := shown(a), y := shown(b)):
            yield f"  cell {i}: {a.source.splitlines()[0]}\n" + "\n".join(
                f"    {line}" for line in difflib.unified_diff(x.splitlines(), y.splitlines(), "stored", "now", lineterm="", n=0))

def emulate(path, flags):
    "Set the GPU that the chapter is for; False if there is none."
    if not (path.stem.endswith("_gpu") or re.search(r'^\s*"#\s*\|\s*emulated', path.read_text("utf-8"), re.M)): return True
    if "gpu" not in flags: os.environ.pop("LITERATE_GPU", None); return True
    os.environ.setdefault("LITERATE_GPU", "emulated")
    return any(map(shutil.which, filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++"))))

def one(path, check, flags, timeout):
    "Run one notebook in this process; the exit status."
    start = time.time()
    if not emulate(path, flags):
        print(f"{path.name}: not run, it needs a GPU or a C++ compiler for the emulator")
        return 0
    try: new = execute(path, flags, timeout)
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as e:
        print(f"{path.name}: FAILED\n{COLOUR.sub('', str(e))}")
        return 1
    old, text = nbformat.read(path, 4), nbformat.writes(new).rstrip("\n") + "\n"
    changed = list(differences(old, new)) if check else text != path.read_text("utf-8")
    if not check and changed: path.write_text(text, "utf-8")
    print(f"{path.name}: {time.time() - start:.1f}s {'CHANGED' if changed else 'same'}")
    if check and changed: print("\n".join(changed))
    return int(check and bool(changed))

def guarded(path, args):
    "Run one notebook in a process of its own, stopped when it takes too long."
    command = [sys.executable, __file__, "--one", f"--timeout={args.timeout}", *(["--check"] if args.check else []), str(path)]
    for attempt in (1, 2):
        p = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
        try: out = p.communicate(timeout=args.timeout + 30)[0]
        except subprocess.TimeoutExpired:
            os.killpg(p.pid, signal.SIGKILL)
            p.communicate()
            print(f"{path.name}: stopped after {args.timeout + 30} s" + (", trying once more" if attempt == 1 else ""), flush=True)
            continue
        print(out, end="", flush=True)
        return p.returncode
    return 1

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("-j", "--jobs", type=int, default=1)
    parser.add_argument("--timeout", type=int, default=240, help="seconds a notebook may take")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ.update(ENV)
    if args.one:
        flags = {"gpu", "slow", "bench"} - set(os.environ.get("NB_FLAGS", "").split())
        return one(args.notebooks[0], args.check, flags, args.timeout)
    start = time.time()
    with ThreadPoolExecutor(args.jobs) as pool: codes = list(pool.map(lambda p: guarded(p, args), args.notebooks or sorted((ROOT / "nbs").glob("*.ipynb"))))
    print(f"{len(codes)} notebooks, {sum(map(bool, codes))} failed, {time.time() - start:.0f} s")
    return int(any(codes))

if __name__ == "__main__":
    if "--one" in sys.argv:
        import nbformat
        from nbclient import NotebookClient
        from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
        from nbdev.clean import clean_nb
    sys.exit(main())
