"""The shell command, as a process: quick to start, one line for a mistake, JSON for a program."""
import importlib.util
import json
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from literate_engine.cli import main
from literate_engine.core import fixture

ROOT = Path(__file__).resolve().parent.parent


def cli(*argv: str, stdin: str = "", timeout: int = 300, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "literate_engine.cli", *argv], cwd=ROOT, input=stdin, capture_output=True, text=True, timeout=timeout, env=os.environ | env)


def test_help_is_quick():
    times = []
    for _ in range(5):
        start = time.perf_counter()
        done = cli("--help")
        times.append(time.perf_counter() - start)
        assert done.returncode == 0 and all(c in done.stdout for c in ("serve", "generate", "chat", "inspect", "bench", "perplexity", "pull", "probe"))
    assert min(times) < 1.0, f"{min(times):.2f} s: something heavy is imported"


@pytest.mark.parametrize("command", ["serve", "generate", "chat", "inspect", "bench", "perplexity", "pull", "probe"])
def test_every_command_explains_itself(command):
    done = cli(command, "--help")
    assert done.returncode == 0 and "Usage: literate-engine " + command in done.stdout


@pytest.mark.parametrize("argv", [
    ["generate", "no-such-model", "hello"], ["serve", "no-such-model"], ["serve", "--port", "70000"], ["serve", "--port", "0", "--api-key", " "], ["serve", "--port", "0", "--api-key", "k", "--no-api-key"], ["inspect", "no-such-file.gguf"], ["pull", "no-such-model"],
    ["pull", "hf:only/two"], ["bench", "speed"], ["bench", "turn", "--peer", "llama.cpp"], ["bench", "decode", "--threads", "0"], ["bench", "decode", "--peer", "nobody"], ["perplexity", "smollm2", "no-such-file.txt"],
    ["nonsense"], ["serve", "--no-such-option"], ["generate"],
], ids=" ".join)
def test_a_mistake_is_one_line(argv):
    done = cli(*argv)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1 and done.stderr.startswith("literate-engine: ") and "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_damaged_file_is_one_line(tmp_path):
    for name, data in {"empty": b"", "text": b"hello, world", "cut": b"GGUF\x03\x00\x00\x00\xff\xff\xff\xff\xff\xff\xff\xff"}.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(data)
        done = cli("inspect", str(path))
        assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1 and "Traceback" not in done.stderr, done.stderr


def test_probe():
    facts = json.loads(cli("probe", "--quick", "--json").stdout)
    assert facts["cores"] >= 1 and facts["auto"]["device"] == "cpu" and facts["auto"]["why"]
    assert all(g["name"] and g["sms"] and g["memory_gib"] for g in facts["gpus"])


def test_probe_says_that_a_gpu_is_emulated():
    gpu, = json.loads(cli("probe", "--quick", "--json", LITERATE_GPU="emulated:80").stdout)["gpus"]
    assert gpu["gemm_backend"] == "own" and gpu["gemm_notes"] == [] and "done by cuBLAS (emulated)" in cli("probe", "--quick", LITERATE_GPU="emulated:75").stdout
    assert gpu["emulated"] and gpu["compute"] == "8.0"
    told = cli("probe", "--quick", LITERATE_GPU="emulated").stdout
    assert "emulated, as sm_90: kernels run on the processor, for tests; nothing is measured" in told and "auto         device cpu" in told
    wrong = cli("probe", "--quick", LITERATE_GPU="h200")
    assert wrong.returncode == 0 and "none: LITERATE_GPU=h200: expected real, emulated" in wrong.stdout
    for value in ("h200", "emulated:", "emulated:60"):
        refused = cli("generate", str(fixture("llama.gguf")), "a", LITERATE_GPU=value)
        assert refused.returncode == 2 and f"LITERATE_GPU={value}: expected real, emulated" in refused.stderr


def test_inspect(smollm2):
    report = json.loads(cli("inspect", str(smollm2), "--json").stdout)
    assert report["architecture"] == "llama" and report["version"] == 3 and len(report["tensors"]) == 272
    assert "llama" in cli("inspect", "smollm2").stdout


def test_generate(smollm2):
    argv = ["generate", str(smollm2), "-", "--max-tokens", "8", "--json"]
    first, again = (json.loads(cli(*argv, stdin="The capital of France is").stdout) for _ in range(2))
    assert first["text"] == again["text"] and "Paris" in first["text"]
    assert len(first["token_ids"]) <= 8 and first["finish_reason"] in ("length", "stop")


def test_perplexity(smollm2, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 4, encoding="utf-8")
    report = json.loads(cli("perplexity", str(smollm2), str(text), "--json").stdout)
    assert 1 < report["perplexity"] < 50


def test_chat(smollm2):
    done = cli("chat", str(smollm2), "--temperature", "0", "--max-tokens", "16", stdin="Say hello.\n/new\nSay hello.\n")
    assert done.returncode == 0 and done.stdout.strip()


@pytest.mark.parametrize("what", ["decode", "batch", "prefill", "load"])
def test_bench_beside_its_peer(smollm2, what):
    pytest.importorskip("xllamacpp")
    n_gen, *more = ["64", "--batch", "3"] if what == "batch" else ["4"]      # batches are measured by the difference of two runs: on a busy machine it has to be long
    done = cli("bench", what, "smollm2", "--peer", "llama.cpp", "--threads", "1", "--runs", "2", "--n-prompt", "8", "--no-save", "--json", "--n-gen", n_gen, *more)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    (row,) = report["rows"]
    assert row["ours"] > 0 and row["peer"] > 0 and row["ratio_min"] <= row["ratio"] <= row["ratio_max"] and row["runs"] == 2
    assert row["batch"] == (3 if what == "batch" else 1) and all(1.2 < n <= 3 for s in report["settings"].get("shared_steps", []) for n in s["seqs_per_step"])
    assert set(row) == {"what", "model", "device", "threads", "n_prompt", "n_gen", "depth", "batch", "ours", "peer", "unit", "ratio", "ratio_min", "ratio_max",
                        "runs", "ceiling", "share_of_ceiling"} and report["machine"]["cpu"]


def test_bench_of_a_second_turn(smollm2):
    done = cli("bench", "turn", str(smollm2), "--threads", "1", "--runs", "1", "--n-prompt", "300", "--n-gen", "8", "--json")
    (row,) = json.loads(done.stdout)["rows"]
    assert row["unit"] == "s" and row["ratio"] == row["peer"] / row["ours"] > 2, row               # the cached turn reads 20 tokens, the other 330


def test_a_gpu_that_is_not_there_is_one_line(smollm2):
    if importlib.util.find_spec("cupy"): pytest.skip("CuPy is here")
    done = cli("generate", str(smollm2), "hello", "--device", "cuda", LITERATE_GPU="")
    assert done.returncode == 2 and done.stderr.strip().splitlines() == ["literate-engine: --device is 'cuda': CuPy is not here: running on a GPU needs `pip install literate-engine[gpu]`"]


SLOW = """
import sys, time
from literate_engine import cli, model
run_jobs, seconds = model.run_jobs, float(sys.argv.pop(1))
def slow(job): time.sleep(seconds); job()
model.run_jobs = lambda jobs, *args: run_jobs([lambda j=j: slow(j) for j in jobs], *args)
sys.exit(cli.main())
"""                                                                       # the command, with matrices that take their time


def interrupted(command: list[str], *seconds: float, **env: str) -> tuple[int, float, str, str]:
    "Exit code, seconds from the last Ctrl-C to the end, outputs of a server that is interrupted so long after it begins to load, and again so long after that."
    with subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)} | env) as p:
        first = p.stdout.readline()
        assert first.startswith("loading; "), first + p.stderr.read()
        for s in seconds:
            time.sleep(s)
            p.send_signal(signal.SIGINT)
        start = time.perf_counter()
        out, err = p.communicate(timeout=60)
        return p.returncode, time.perf_counter() - start, out, err


def notes(err: str) -> list[str]: return [line for line in err.splitlines() if not line.startswith("compiling kernels")]


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT between processes")
@pytest.mark.parametrize("seconds", [0.0, 0.3, 0.8, 1.5, 2.5, 3.5])
def test_a_load_on_a_gpu_is_stopped_by_an_interrupt(smollm2, emulated_gpu, seconds):
    "A thread that still copies while the interpreter takes memory back would end in a segmentation fault: -11."
    if not os.environ.get("LITERATE_GPU", "").startswith("emulated"): pytest.skip("the GPU is real")
    code, _, out, err = interrupted(["-m", "literate_engine.cli", "serve", str(smollm2), "--device", "cuda", "--port", "0"], seconds)
    assert code == 0 and notes(err) in ([], ["stopped while loading"]) and "Traceback" not in out, (code, out, err)


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT between processes")
@pytest.mark.parametrize("seconds", [0.0, 1.0, 2.0])
def test_a_long_load_is_stopped_by_an_interrupt(smollm2, seconds):
    cli("generate", str(smollm2), "hi", "--max-tokens", "1", "--threads", "2")                # what has to be compiled is
    code, waited, out, err = interrupted(["-c", SLOW, "0.4", "serve", str(smollm2), "--device", "cpu", "--threads", "2", "--port", "0"], seconds)
    assert code == 0 and waited < 5 and notes(err) == ["stopped while loading"] and out == "", (code, waited, out, err)


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT between processes")
def test_a_second_interrupt_does_not_wait(smollm2):
    code, waited, out, err = interrupted(["-c", SLOW, "30", "serve", str(smollm2), "--device", "cpu", "--threads", "2", "--port", "0"], 1.5, 2.0)
    assert code == 130 and waited < 5 and notes(err) == ["stopped while loading"] and out == "", (code, waited, out, err)


def one_line(done: subprocess.CompletedProcess) -> str:
    "What a command says that refuses something."
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1 and done.stderr.startswith("literate-engine: "), (done.returncode, done.stdout, done.stderr)
    return done.stderr.removeprefix("literate-engine: ").strip()


GPU_COMMANDS = {"generate": ["generate", "F", "hi", "--device", "cuda"], "trace-diff": ["trace-diff", "F", "--devices", "ref,cuda"], "bench": ["bench", "decode", "F", "--device", "cuda"],
                "perplexity": ["perplexity", "F", "-", "--device", "cuda"], "serve": ["serve", "F", "--device", "cuda", "--port", "0"]}

def on_a_gpu(command: str, model: str = "llama.gguf", **env: str) -> subprocess.CompletedProcess:
    done = cli(*[str(fixture(model)) if a == "F" else a for a in GPU_COMMANDS[command]], stdin="some text", **env)
    if command == "serve": done.stdout = done.stdout.partition("loading; ")[0]
    return done


@pytest.mark.parametrize("command", GPU_COMMANDS)
@pytest.mark.parametrize("gpu", ["foo", "emulated:70"])
def test_a_gpu_that_nobody_knows_is_one_line(command, gpu):
    assert f"LITERATE_GPU={gpu}: expected real, emulated or emulated:ARCH" in one_line(on_a_gpu(command, LITERATE_GPU=gpu))


@pytest.mark.parametrize("command", GPU_COMMANDS)
def test_no_cupy_is_one_line(command):
    if importlib.util.find_spec("cupy"): pytest.skip("CuPy is here")
    assert "CuPy is not here" in one_line(on_a_gpu(command, LITERATE_GPU="real"))


@pytest.mark.parametrize("command", ["generate", "trace-diff", "bench"])
def test_no_compiler_is_one_line(command, tmp_path):
    done = on_a_gpu(command, LITERATE_GPU="emulated", PATH=str(tmp_path), LITERATE_CACHE=str(tmp_path), CXX="")
    assert "the emulator needs a C++ compiler" in one_line(done)


@pytest.mark.parametrize("command", ["generate", "trace-diff", "bench"])
def test_a_limit_on_memory_is_one_line(command, emulated_gpu):
    "An emulated GPU reserves addresses; a fault of the package would be a traceback."
    resource = pytest.importorskip("resource")
    argv = [str(fixture("llama.gguf")) if a == "F" else a for a in GPU_COMMANDS[command]]
    done = subprocess.run([sys.executable, "-m", "literate_engine.cli", *argv], cwd=ROOT, capture_output=True, text=True, timeout=300, env=os.environ | {"LITERATE_GPU": "emulated"},
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (64 << 30, 64 << 30)))
    assert "is there a limit on virtual memory" in one_line(done)


@pytest.mark.parametrize("model,kind", [("mamba2.gguf", "mamba2"), ("deepseek_v2.gguf", "moe"), ("gpt_oss.gguf", "moe"), ("nemotron_h.gguf", "mamba2")])
def test_a_trace_refuses_what_the_engine_refuses(model, kind):
    lines = [one_line(on_a_gpu(command, model, LITERATE_GPU="emulated")) for command in ("generate", "trace-diff")]
    assert "layers of kind" in lines[0] and kind in lines[0] and lines[0] == "--" + lines[1]


def test_the_tolerance_of_a_trace():
    path = str(fixture("llama.gguf"))
    for wrong in ("-1", "nan", "inf"): assert one_line(cli("trace-diff", path, "--tolerance", wrong)) == f"--tolerance is {wrong}: expected a number from 0 (exactly equal) on"
    same, other = cli("trace-diff", path, "--devices", "ref,ref", "--tolerance", "0"), cli("trace-diff", path, "--tolerance", "0")
    assert same.returncode == 0 and "tolerance 0" in same.stdout
    assert other.returncode == 1 and "first divergence: call" in other.stdout
    assert cli("trace-diff", path).returncode == 0
    assert one_line(cli("trace-diff", path, "--devices", "ref,gpu")) == "--devices is 'ref,gpu': expected two of ref, cpu, cuda, as in ref,cuda"


def test_bench_on_an_emulated_gpu_has_no_ceiling(emulated_gpu):
    done = cli("bench", "decode", str(fixture("llama.gguf")), "--device", "cuda", "--runs", "1", "--n-gen", "4", "--json", LITERATE_GPU="emulated")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert row["device"] == "cuda (emulated)" and row["ours"] > 0 and row["ceiling"] is None and row["share_of_ceiling"] is None


def test_probe_says_that_a_compiler_is_missing(tmp_path):
    done = cli("probe", "--quick", LITERATE_GPU="emulated", PATH=str(tmp_path), CXX="")
    assert done.returncode == 0 and "GPU          emulated, as sm_90: the emulator needs a C++ compiler" in done.stdout and "kernels run on the processor" not in done.stdout


def test_inspect_says_where_a_model_runs():
    told = {name: cli("inspect", str(fixture(name))).stdout for name in ("llama.gguf", "mamba2.gguf", "qwen3moe.gguf")}
    assert "runs on the CPU or a GPU; kernels for" in told["llama.gguf"] and "not on a GPU" not in told["llama.gguf"]
    assert "runs on the CPU; kernels for" in told["mamba2.gguf"] and "not on a GPU: layers of kind mamba2 have no GPU kernels yet" in told["mamba2.gguf"]
    assert "not on a GPU: layers of kind moe have no GPU kernels yet" in told["qwen3moe.gguf"]


def test_a_refusal_names_the_option_that_was_given(tmp_path):
    path, empty = str(fixture("llama.gguf")), tmp_path / "empty.txt"
    empty.touch()
    assert one_line(cli("generate", path, "hi", "--threads", "0")).startswith("--threads is 0: expected an integer from 1 to ")
    assert f"this machine has {os.cpu_count()} cores" in one_line(cli("generate", path, "hi", "--threads=0"))
    assert one_line(cli("generate", path, "hi", "--max-model-len", "-3")).startswith("--max-model-len is -3")
    assert one_line(cli("generate", path, "hi", "--max-tokens", "-3")).startswith("--max-tokens must be")
    assert one_line(cli("perplexity", path, str(empty))) == f"{empty} is empty: a perplexity needs at least 2 tokens"
    assert one_line(cli("perplexity", path, "-")) == "standard input is empty: a perplexity needs at least 2 tokens"


def test_a_setting_that_is_none_names_its_neighbours():
    from literate_engine import LLM
    with pytest.raises(TypeError, match="there is no setting 'max_seq_len': did you mean .*max_model_len"): LLM("nowhere.gguf", max_seq_len=100)
    with pytest.raises(TypeError, match="there is no setting 'foo': known are device, activations"): LLM("nowhere.gguf", foo=1)


@pytest.mark.parametrize("command", [["trace-diff"], ["generate", "a", "--device", "cpu"]])
def test_what_has_no_room_in_memory_is_refused_before_the_load(command, monkeypatch, capsys):
    monkeypatch.setattr("literate_engine.settings.physical_memory", lambda: 1000)
    assert main([command[0], str(fixture("llama.gguf")), *command[1:]]) == 2
    assert "not enough memory: the weights take" in capsys.readouterr().err


def test_a_text_that_never_ends_is_refused():
    path = str(fixture("llama.gguf"))
    if os.path.exists("/dev/zero"):
        assert "/dev/zero has more than 64 MiB" in one_line(cli("perplexity", path, "/dev/zero"))
        for argv in (["perplexity", path, "-"], ["generate", path, "-"], ["chat", path]):
            with open("/dev/zero", "rb") as endless:
                done = subprocess.run([sys.executable, "-m", "literate_engine.cli", *argv], cwd=ROOT, stdin=endless, capture_output=True, text=True, timeout=300)
            done.stderr = "".join(line for line in done.stderr.splitlines(True) if not line.startswith("compiling kernels"))          # chat reads after the load
            assert "standard input has more than 64 MiB" in one_line(done)


@pytest.mark.parametrize("command", ["generate", "perplexity"])
def test_a_wrong_name_does_not_wait_for_standard_input(command):
    process = subprocess.Popen([sys.executable, "-m", "literate_engine.cli", command, "nowhere", "-"], cwd=ROOT, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try: assert process.wait(60) == 2 and "no model 'nowhere'" in process.stderr.read()
    finally: process.kill(); process.communicate()


def test_standard_input_may_be_text_alone(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("ab\u00e9 cd"))
    assert main(["perplexity", str(fixture("llama.gguf")), "-"]) == 0
    assert capsys.readouterr().out.startswith("perplexity ")


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
@pytest.mark.parametrize("command", ["perplexity F -", "generate F -", "chat F"])
def test_standard_input_that_is_no_text_is_one_line(command, locale):
    argv = command.replace("F", str(fixture("llama.gguf"))).split()
    done = subprocess.run([sys.executable, "-m", "literate_engine.cli", *argv], cwd=ROOT, input=b"ab\x93c\n", capture_output=True, timeout=300, env=os.environ | {"LC_ALL": locale})
    assert done.returncode == 2 and notes(done.stderr.decode()) == ["literate-engine: standard input is not UTF-8 text, byte 2"]


@pytest.mark.parametrize("options", [["--kv-memory", "1000"], ["--kv-memory", "999999999999999"], ["--max-model-len", "1000000"], ["--device", "cuda", "--kv-type", "f32", "--activations", "foo"]], ids=" ".join)
def test_a_server_refuses_before_it_says_that_it_loads(options):
    assert one_line(cli("serve", str(fixture("llama.gguf")), "--port", "0", *options)).startswith("--")


def test_options_that_exclude_each_other_are_named_as_given():
    assert one_line(cli("serve", str(fixture("llama.gguf")), "--port", "0", "--no-api-key", "--api-key", "x")) == "--api-key and --no-api-key exclude each other"


@pytest.mark.skipif(sys.platform == "win32", reason="no pipe that breaks")
def test_a_reader_that_has_enough_is_no_mistake():
    with subprocess.Popen([sys.executable, "-m", "literate_engine.cli", "generate", str(fixture("llama.gguf")), "hi", "--max-tokens", "100", "--device", "cpu"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as p:
        p.stdout.close()
        assert p.wait(300) == 0 and b"Traceback" not in p.stderr.read()


@pytest.mark.parametrize("error", [MemoryError(), OSError(12, "Cannot allocate memory"), MemoryError("Unable to allocate 2.00 GiB")], ids=repr)
def test_memory_that_runs_out_says_what_would_take_less(error, monkeypatch, capsys):
    def fails(*args, **options): raise error
    monkeypatch.setattr("literate_engine.cli._llm", fails)
    assert main(["generate", "smollm2", "hi"]) == 2
    said = capsys.readouterr().err
    assert (str(error) or "no memory is left") in said and "a shorter --max-model-len" in said and len(said.splitlines()) == 1


def test_bench_says_which_device_auto_is():
    done = cli("bench", "load", str(fixture("llama.gguf")), "--device", "auto", "--runs", "1", "--no-save", "--json", LITERATE_GPU="")
    (row,) = json.loads(done.stdout)["rows"]
    assert row["device"] in ("cpu", "cuda")
    assert "auto, cpu, cuda or ref" in " ".join(cli("bench", "--help").stdout.split())
