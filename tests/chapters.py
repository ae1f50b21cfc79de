"""What a chapter defines for its own checks, so that tests that go further have no copy of it."""
import ast
import json
from importlib import import_module
from pathlib import Path
from types import ModuleType

NBS = Path(__file__).resolve().parent.parent / "nbs"


def helpers(chapter: str, *names: str) -> list:
    "The functions and classes of these names, from the cells of nbs/`chapter`.ipynb, with what the chapter imports and exports around them."
    module = ModuleType(chapter)
    cells = [ast.parse("".join(c["source"])) for c in json.loads((NBS / f"{chapter}.ipynb").read_text("utf-8"))["cells"] if c["cell_type"] == "code"]
    for node in (node for cell in cells for node in cell.body):
        if isinstance(node, (ast.Import, ast.ImportFrom)) or isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name in names:
            exec(compile(ast.Module([node], []), f"nbs/{chapter}.ipynb", "exec"), vars(module))
    for name, value in vars(import_module(f"literate_engine.{chapter[3:]}")).items(): vars(module).setdefault(name, value)
    return [getattr(module, name) for name in names]
