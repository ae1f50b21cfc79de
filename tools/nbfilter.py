"""Show a notebook to readers: drop hidden cells and nbdev directives, fold exported code, never run anything.

As a Quarto `ipynb-filters` entry it reads a notebook on stdin and writes it to stdout;
`python tools/nbfilter.py SRC DST` writes a filtered copy of the project for smalldocs."""
import json, re, shutil, sys
from pathlib import Path

DIRECTIVE = re.compile(r"^#\s*\|\s*([\w-]+)(:?)(.*)$")
NBDEV = {"default_exp", "export", "exports", "exporti", "hide", "eval", "gpu", "emulated", "slow", "notest", "exec_doc"}

def show(nb):
    cells = []
    for c in nb["cells"]:
        src = c["source"]; src = src if isinstance(src, str) else "".join(src)
        if c["cell_type"] == "markdown":  # ```mermaid is what JupyterLab and GitHub draw, ```{mermaid} what Quarto draws
            c = {**c, "source": re.sub(r"^```mermaid\s*$", "```{mermaid}", src, flags=re.M).splitlines(True)}
        if c["cell_type"] != "code": cells.append(c); continue
        lines = src.split("\n")
        names, opts, body = {}, [], []
        while lines and (m := DIRECTIVE.match(lines[0])):
            lines.pop(0); names[m[1]] = m[3].strip()
            if m[2] and m[1] not in NBDEV: opts.append(f"#| {m[1]}:{m[3]}")
        body = "\n".join(lines).strip("\n")
        if not body.strip(): continue
        if "hide" in names and "include" not in names: opts.append("#| include: false")
        if names.keys() & {"export", "exports", "exporti"} and "code-fold" not in names:
            fold = "true" if names.keys() & {"export", "exporti"} else "show"
            opts += [f"#| code-fold: {fold}", '#| code-summary: "Exported source"']
        c = {**c, "source": "\n".join(opts + [body]).splitlines(True)}
        cells.append(c)
    return {**nb, "cells": cells}

def stage(src, dst):
    src, dst = Path(src), Path(dst); shutil.rmtree(dst, ignore_errors=True); (dst / "nbs").mkdir(parents=True)
    for f in ("_quarto.yml", "index.qmd", "README.md", "site.css"): shutil.copy(src / f, dst / f)
    q = dst / "_quarto.yml"; q.write_text("".join(l for l in q.read_text("utf-8").splitlines(True) if not re.match(r"\s+(ipynb-filters|grid):", l)), "utf-8")  # the filter has run; site.css has the grid
    for d in ("tools", "data"): shutil.copytree(src / d, dst / d, ignore=shutil.ignore_patterns("models", "*.gguf"))
    for p in (src / "nbs").glob("*.ipynb"):
        (dst / "nbs" / p.name).write_text(json.dumps(show(json.loads(p.read_text("utf-8"))), indent=1, ensure_ascii=False), "utf-8")

if __name__ == "__main__":
    if len(sys.argv) == 3: stage(*sys.argv[1:])
    else: json.dump(show(json.load(sys.stdin)), sys.stdout, ensure_ascii=False)
