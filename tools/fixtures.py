"""Pack a selection of the fixtures for the repository: python tools/fixtures.py FOLDER, where FOLDER holds models/, extra/ and quant/.

One solid archive, since the models share their random numbers. Every architecture is there with its two shorter prompts; of quantised files, a set in
which each type that has a kernel of its own occurs, with the shortest prompt (mixtures: two). Logits keep 20 bits of their mantissa: an error of 1e-6."""
import io
import lzma
import sys
import tarfile
from pathlib import Path

import numpy as np

TWICE = {"llama.f32", "deepseek_v3"}                         # another file shows the same
QUANT = ["llama.Q2_K", "llama.Q3_K_M", "llama.Q4_0", "llama.Q4_1", "llama.Q4_K_M", "llama.Q5_0", "llama.Q5_1", "llama.IQ3_S", "llama.IQ4_NL", "llama.IQ4_XS", "llama.TQ2_0",
         "gpt_oss.MXFP4_MOE"]
PACKED = Path(__file__).resolve().parent.parent/"data/fixtures/models.tar.xz"


def trimmed(path: Path, prompts: tuple[str, ...]) -> bytes:
    "The arrays that the tests read, of the prompts wanted."
    def short(a): return ((a.view(np.uint32) + 8) & ~np.uint32(15)).view(np.float32) if a.dtype == np.float32 and a.ndim == 2 else a
    b, z = io.BytesIO(), np.load(path)
    np.savez(b, **{k: short(z[k]) for k in z if k.startswith(prompts) and not k.endswith(("llamacpp", "last_logits_torch"))})
    return b.getvalue()


def main(folder: Path):
    files = {}
    for sub, wanted in (("models", None), ("extra", None), ("quant", QUANT)):
        for p in sorted((folder/sub).glob("*")):
            name = p.name.rsplit(".", 1)[0]
            if name in TWICE or (wanted is not None and name not in wanted): continue
            if p.suffix == ".npz": files["models" if sub == "extra" else sub, p.name] = trimmed(p, ("p0",) if sub == "quant" and name.startswith("llama.") else ("p0", "p1"))
            elif p.suffix == ".gguf" or (p.suffix == ".json" and sub == "quant"): files["models" if sub == "extra" else sub, p.name] = p.read_bytes()
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as t:
        for (sub, name), data in sorted(files.items(), key=lambda kv: (kv[0][1].rsplit(".")[-1], kv[0])):
            info = tarfile.TarInfo(f"{sub}/{name}")
            info.size = len(data)
            t.addfile(info, io.BytesIO(data))
    how = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 26, "lc": 0, "lp": 2, "pb": 2}
    PACKED.write_bytes(lzma.compress(tar.getvalue(), filters=[how]))
    print(f"{PACKED}: {len(files)} files, {len(tar.getvalue())/1e6:.1f} MB, packed {PACKED.stat().st_size/1e6:.2f} MB")


if __name__ == "__main__": main(Path(sys.argv[1]))
