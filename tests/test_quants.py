"What the chapter on quantised blocks cannot show: every stored block, from odd memory, and whole tensors against the gguf package."
from pathlib import Path

import numpy as np
import pytest

from literate_engine.quants import QUANT_TYPES, QuantTensor, dequantize, quantize

BLOCKS = np.load(Path(__file__).parents[1] / "data" / "fixtures" / "quant_blocks.npz")
NAMES = sorted({k.rsplit("_", 1)[0] for k in BLOCKS.files})

@pytest.mark.parametrize("name", NAMES)
def test_stored_blocks(name):
    "Bit-equal to ggml's C decoder, also from unaligned, read-only and strided memory."
    raw, want = BLOCKS[f"{name}_raw"], BLOCKS[f"{name}_f32"].view(np.uint32)
    unaligned = np.zeros(raw.size + 1, np.uint8)
    unaligned[1:] = raw.ravel()
    unaligned.setflags(write=False)
    assert np.array_equal(dequantize(raw, name).view(np.uint32), want)
    assert np.array_equal(dequantize(unaligned[1:].reshape(raw.shape), name).view(np.uint32), want)
    assert np.array_equal(dequantize(np.repeat(raw, 2, 0)[::2], name).view(np.uint32), want)
    t = QuantTensor(raw, name, want.shape)
    assert np.array_equal(t.rows(2, 4).view(np.uint32), want[2:4])

def test_every_format_is_covered():
    assert set(NAMES) == set(QUANT_TYPES) - {"F32", "F64", "I8", "I16", "I32", "I64"}

@pytest.mark.parametrize("name", [n for n, t in QUANT_TYPES.items() if t.quantize_blocks])
def test_round_trip_shapes_and_zeros(name):
    t = QUANT_TYPES[name]
    for rows in (0, 1, 3):
        x = np.zeros((rows, 3 * t.block_size), np.float32)
        raw = quantize(x, t)
        assert raw.shape == (rows, 3 * t.type_size) and raw.dtype == np.uint8
        assert np.array_equal(dequantize(raw, t), x)

@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_real_file_against_gguf(model, request):
    "Every tensor type of the real models: a few rows of each, bit-equal to the gguf package."
    gguf = pytest.importorskip("gguf")
    from literate_engine.gguf import GGUFFile
    with GGUFFile(request.getfixturevalue(model)) as f:
        seen = set()
        for name, info in f.tensors.items():
            if info.type.name in seen: continue
            seen.add(info.type.name)
            t = QuantTensor.from_gguf(f, name)
            want = gguf.quants.dequantize(np.array(t.raw[:8]), gguf.GGMLQuantizationType(info.type.id))
            assert np.array_equal(t.rows(0, 8).view(np.uint32), np.asarray(want, np.float32).view(np.uint32)), name
            del t
        assert len(seen) > 1
