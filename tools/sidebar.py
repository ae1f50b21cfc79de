"""Write the list of chapters into _quarto.yml from the notebooks that exist: `python tools/sidebar.py [--check]`."""
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "      # chapters: written by tools/sidebar.py\n", "      # end of chapters\n"
PARTS = [(0, "The file and its text"), (8, "Linear algebra"), (19, "Memory and mixing"), (30, "The model"), (40, "The engine"),
         (49, "The server"), (60, "Using it"), (70, "Results"), (80, "Laboratories"), (90, "The package")]      # first chapter of each part

def title(path):
    "The notebook's first heading, up to a colon."
    cells = json.loads(path.read_text("utf-8"))["cells"]
    text = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    return re.search(r"^# (.+)$", text, re.M)[1].split(":")[0].strip().replace("`", "")

def chapters(nbs):
    "The sidebar's lines: a section for each part of the book that has a chapter."
    lines, part = [], None
    for path in sorted(nbs.glob("[0-9][0-9]_*.ipynb")):
        name = [text for first, text in PARTS if first <= int(path.name[:2])][-1]
        if name != part:
            part = name
            lines += [f"      - section: {name}\n", "        contents:\n"]
        lines.append(f"          - {{href: nbs/{path.name}, text: {json.dumps(path.name[:2] + '  ' + title(path), ensure_ascii=False)}}}\n")
    return "".join(lines)

def main():
    config = ROOT / "_quarto.yml"
    old = config.read_text("utf-8")
    head, rest = old.split(BEGIN)
    new = head + BEGIN + chapters(ROOT / "nbs") + END + rest.split(END)[1]
    if "--check" not in sys.argv: config.write_text(new, "utf-8")
    elif new != old: return "_quarto.yml does not list the chapters in nbs/: run python tools/sidebar.py"

if __name__ == "__main__": sys.exit(main())
