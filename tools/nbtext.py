"""Edit a chapter as plain text.

`python tools/nbtext.py out nbs/01_gguf.ipynb gguf.nb.py`   writes the notebook's cells as text
`python tools/nbtext.py in  gguf.nb.py nbs/01_gguf.ipynb`   writes them back; outputs of unchanged code cells are kept

In the text a cell starts with a line `# %%` (code) or `# %% [markdown]` (prose, written plainly, without comment signs)."""
import hashlib
import re
import sys
from pathlib import Path

import nbformat

MARK = re.compile(r"^# %%( \[markdown\])?[ \t]*$", re.M)

def to_text(nb):
    return "\n\n".join("# %%" + (" [markdown]" if c.cell_type == "markdown" else "") + "\n" + c.source for c in nb.cells) + "\n"

def from_text(text, old=None):
    kept = {}
    for c in old.cells if old else []: kept.setdefault((c.cell_type, c.source), []).append(c)
    nb = nbformat.v4.new_notebook(metadata={"kernelspec": {"display_name": "python3", "language": "python", "name": "python3"}})
    parts, seen = MARK.split(text), {}
    for kind, src in zip(parts[1::2], parts[2::2]):
        src = src.strip("\n")
        make = nbformat.v4.new_markdown_cell if kind else nbformat.v4.new_code_cell
        c = make(src)
        digest = hashlib.sha256(src.encode()).hexdigest()[:8]        # ids follow the text, so that two people's edits merge
        seen[digest] = n = seen.get(digest, 0) + 1
        c["id"] = digest if n == 1 else f"{digest}-{n}"
        if same := kept.get((c.cell_type, src)):
            o = same.pop(0)
            if c.cell_type == "code": c["outputs"] = o.outputs
            c["metadata"] = o.metadata
        nb.cells.append(c)
    return nb

if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] not in ("in", "out"): sys.exit(__doc__)
    src, dst = map(Path, sys.argv[2:])
    if not src.is_file(): sys.exit(f"{src}: no such file")
    if sys.argv[1] == "in" and not MARK.search(src.read_text("utf-8")): sys.exit(f"{src}: no line `# %%` starts a cell, nothing written")
    if sys.argv[1] == "out": dst.write_text(to_text(nbformat.read(src, 4)), "utf-8")
    else:
        nb = from_text(src.read_text("utf-8"), nbformat.read(dst, 4) if dst.exists() else None)
        dst.write_text(nbformat.writes(nb).rstrip("\n") + "\n", "utf-8")
