"Post-render: serve KaTeX and mermaid from the site itself, when their npm folders are given; no page needs a CDN then."
import os, re, shutil
from pathlib import Path
out = Path(os.environ.get("QUARTO_PROJECT_OUTPUT_DIR", "_site")); npm = Path(os.environ.get("DOCS_VENDOR", "node_modules"))
K, M = npm / "katex/dist", npm / "mermaid/dist/mermaid.min.js"
if K.is_dir() and M.is_file():
    lib = out / "site_libs/vendor"; (lib / "contrib").mkdir(parents=True, exist_ok=True)
    for f in ("katex.min.css", "katex.min.js", "contrib/auto-render.min.js"): shutil.copy(K / f, lib / f)
    shutil.copytree(K / "fonts", lib / "fonts", dirs_exist_ok=True); shutil.copy(M, lib)
    for p in out.rglob("*.html"):
        s = t = p.read_text(encoding="utf-8"); rel = os.path.relpath(lib, p.parent).replace(os.sep, "/")
        t = re.sub(r"https://cdn\.jsdelivr\.net/npm/katex@[\d.]+/dist", rel, t)
        t = re.sub(r"<script type=\"module\">import mermaid from '[^']+';(.*?)</script>", rf'<script src="{rel}/mermaid.min.js"></script><script>\1</script>', t, flags=re.S)
        if t != s: p.write_text(t, encoding="utf-8")
