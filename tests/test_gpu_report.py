"""What a step on a GPU cannot do without, counted a second time from the file and token by token; the report's rows and the table of the README that shows them."""
import gc
from pathlib import Path

import pytest

from literate_engine import gpu_report
from literate_engine.config import ModelConfig
from literate_engine.core import fixture
from literate_engine.cuda import CudaError, cupy
from literate_engine.gguf import GGUFFile
from literate_engine.gpu_report import measure_model, random_dense, speeds, work_gpu
from literate_engine.model import Model

SMALL = dict(arch="qwen3", fmt="Q4_K", more="Q6_K", n_layer=3, n_embd=256, n_ff=512, n_head=4, n_head_kv=2, head_dim=64, n_vocab=1024)
PRODUCTS = ("linear", "linear_add")


def counted(path, seqs: list[tuple[int, int]], kv_bytes: int):
    "(bytes of matrices, bytes of a row of the embedding, bytes of keys and values, operations of products, of attention) of a step; seqs: new tokens and those before them"
    with GGUFFile(path) as f:
        config, sizes = ModelConfig.from_gguf(f), {n: (t.nbytes, t.shape) for n, t in f.tensors.items() if len(t.shape) == 2}
    embedding = sizes["token_embd.weight"] if "output.weight" in sizes else None
    if embedding: del sizes["token_embd.weight"]
    tokens, heads = sum(n for n, _ in seqs), {"output.weight", "token_embd.weight"}
    products = sum(2*n*k*(len(seqs) if name in heads else tokens) for name, (_, (n, k)) in sizes.items())
    read = flops = 0
    for l in config.layers:
        for new, past in seqs:
            seen = [range(max(0, p + 1 - l.window) if l.window else 0, p + 1) for p in range(past, past + new)]
            read += len({j for r in seen for j in r})*l.n_head_kv*(l.head_dim_k + l.head_dim_v)*kv_bytes
            flops += sum(len(r) for r in seen)*l.n_head*2*(l.head_dim_k + l.head_dim_v)
    row = embedding or sizes["token_embd.weight"]
    return sum(b for b, _ in sizes.values()), row[0]//row[1][0]*tokens, read, products, flops


def fields(work, i): return sum(work.get(op, (0, 0))[i] for op in PRODUCTS), work["rope_attention"][i]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("report")/"small.gguf"
    random_dense(path, **SMALL)
    return path


@pytest.mark.usefixtures("emulated_gpu")
@pytest.mark.parametrize("name", ["small", "gemma3"])
def test_work_of_a_step(name, small):
    "Prompts in company, one that goes on, and single tokens in a bucket that is not full; gemma3: windows of 16, one matrix for the embedding and the output"
    path = small if name == "small" else fixture("gemma3.gguf")
    model, past = Model(path, device="cuda", max_model_len=160, max_num_seqs=8, max_num_batched_tokens=64, num_kv_blocks=60), [0, 0, 0]
    blocks = [[1 + 5*i + j for j in range(5)] for i in range(3)]
    for news in ([30, 5, 7], [20, 1, 9], [1, 1, 1]):
        model.batch.fill([([9]*new, p, b, "last") for new, p, b in zip(news, past, blocks)])
        model.forward(model.batch)
        work, (matrices, rows, cache, products, attention) = work_gpu(model.program.step()), counted(path, list(zip(news, past)), 2)
        assert (*fields(work, 0), *fields(work, 1)) == (matrices, cache, products, attention) and work["embed"] == (rows, 0)
        assert all(work[op] == (0, 0) for op in work if op not in (*PRODUCTS, "rope_attention", "embed"))
        past = [p + n for p, n in zip(past, news)]
    model.close()


@pytest.mark.usefixtures("emulated_gpu")
def test_rows_of_the_report(small):
    rows = measure_model(small, "small", batches=(1, 3), prefills=(40,), runs=1, n_gen=6, max_model_len=128, say=lambda *_: None)
    load, *rows = rows
    assert [(r["what"], r["batch"], r["depth"]) for r in rows] == [("decode", 1, 0), ("decode", 3, 0), ("prefill", 1, 40)]
    for r in rows:
        assert set(r["us"]) == {"step", *r["bytes"]} and set(r["bytes"]) == set(r["flops"]) and sum(r["bytes"][op] for op in PRODUCTS if op in r["bytes"]) == r["weight_bytes"] - norms(small)
        assert r["value"] > 0 and r["bytes"]["rope_attention"] > 0
    assert rows[2]["flops"]["rope_attention"] == 3*4*2*128*40*41//2


@pytest.mark.usefixtures("emulated_gpu")
def test_a_measurement_that_fails_leaves_no_model(small, monkeypatch):
    "The GPU is free for the next one, and the error is told"
    used = cupy().get_default_memory_pool().used_bytes
    gc.collect()
    before, seen = used(), []
    def broken(step, runs): seen.append(used()); raise CudaError("a fault")
    monkeypatch.setattr(gpu_report, "profile_gpu", broken)
    with pytest.raises(CudaError, match="a fault"): measure_model(small, "small", runs=1, n_gen=3, max_model_len=128, say=lambda *_: None)
    assert seen[0] > before == used()


def norms(path) -> int:
    with GGUFFile(path) as f: return sum(t.nbytes for t in f.tensors.values() if len(t.shape) == 1)


def test_readme_shows_the_report():
    "After a new measurement: paste what `speeds()` of chapter 72 returns"
    assert speeds() in (Path(__file__).parent.parent/"README.md").read_text("utf-8")
