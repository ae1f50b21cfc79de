"""A server under load for a while: many clients at once, some of which hang up. `python tests/soak.py --seconds 180 --clients 16`

Every answer must be the one that the same request got alone, before (on a GPU it may be another, as a step of many rows rounds otherwise: `--exact 0`); at the end nothing may be left over: no request, no block, no
memory, on a GPU neither.
Prints a summary as JSON; the exit code is 1 if something was wrong."""
import argparse
import json
import random
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import openai
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parent.parent
WORDS = "the river a stone was old and every child in town knew why it had been there so long one two three green how far is it to Paris or Rome".split()


def start(model: str, *options: str) -> tuple[subprocess.Popen, str]:
    "A server as a process, and its URL once it answers."
    argv = [sys.executable, "-m", "literate_engine.cli", "serve", model, "--port", "0", *options]
    server = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    url = re.search(r"http://[\d.]+:\d+", server.stdout.readline())[0]
    while server.poll() is None:
        try:
            with urllib.request.urlopen(url + "/health", timeout=5): return server, url
        except OSError: time.sleep(0.05)
    raise SystemExit("the server did not start")


def metrics(url: str) -> dict[str, float]:
    "The values of /metrics, by name and finished_reason."
    with urllib.request.urlopen(url + "/metrics", timeout=60) as page: text = page.read().decode()
    return {"/".join([s.name.removeprefix("literate_engine_"), *(v for k, v in s.labels.items() if k != "model_name")]): s.value
            for f in text_string_to_metric_families(text) for s in f.samples}


def case(i: int, rng: random.Random) -> dict:
    "A request: short and long prompts and answers, some with a common beginning; greedy, or sampled with a seed."
    words = WORDS * 8 if rng.random() < 0.3 else []
    words = words + rng.choices(WORDS, k=rng.choice([1, 5, 20, 60, 150]))
    body = {"model": "m", "prompt": " ".join(words), "max_tokens": rng.choice([4, 16, 48, 96, 160])}
    if rng.random() < 0.6: body |= {"temperature": rng.choice([0.7, 1.0]), "top_p": 0.95, "seed": i}
    if rng.random() < 0.3: body["stop"] = [" the", "."]
    if rng.random() < 0.3: body["extra_body"] = {"cache_salt": f"salt {i % 3}", "top_k": 50}
    return body


def stream(client: openai.OpenAI, body: dict, leave_after: int | None = None) -> tuple[str, str | None]:
    "(text, finish_reason) of a streamed answer; the client hangs up after so many chunks."
    text, reason = "", None
    with client.completions.create(stream=True, **body) as chunks:
        if leave_after == 0: return text, None
        for n, chunk in enumerate(chunks, 1):
            text, reason = text + chunk.choices[0].text, chunk.choices[0].finish_reason or reason
            if n == leave_after: return text, None
    return text, reason


class Load:
    "Clients that ask at random until the time is up."
    def __init__(self, url: str, num_cases: int, leaving: float, seed: int, exact: bool):
        self.url, self.leaving, self.seed, self.exact = url, leaving, seed, exact
        self.client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=300)
        self.cases = [case(i, random.Random(seed * 1000 + i)) for i in range(num_cases)]
        self.alone = [stream(self.client, body) for body in self.cases]
        self.whole, self.left, self.wrong, self.lock = 0, 0, [], threading.Lock()

    def run(self, number: int, until: float) -> None:
        rng = random.Random(self.seed + number)
        while time.monotonic() < until:
            i = rng.randrange(len(self.cases))
            leave = rng.randrange(0, 40) if rng.random() < self.leaving else None
            try: text, reason = stream(self.client, self.cases[i], leave)
            except Exception as e: text, reason = f"{type(e).__name__}: {e}", "error"
            expected, why = self.alone[i]
            right = reason != "error" and (not self.exact or (expected.startswith(text) if reason is None else (text, reason) == (expected, why)))
            with self.lock:
                self.whole, self.left = self.whole + (reason is not None), self.left + (reason is None)
                if not right: self.wrong.append({"request": self.cases[i], "alone": [expected, why], "in_company": [text, reason]})


def soak(model: str = "smollm2", seconds: float = 180, clients: int = 16, num_cases: int = 40, leaving: float = 0.2, seed: int = 0, kv_mib: int = 48, exact: int = 1,
         options: tuple = ()) -> dict:
    "Start a server, load it, and look at what is left. Its cache is too small for all: requests lose their blocks and come back."
    server, url = start(model, "--max-num-seqs", str(clients), "--max-model-len", "1024", "--kv-memory", str(kv_mib << 20), *options)
    try:
        load = Load(url, num_cases, leaving, seed, bool(exact))
        before, until = metrics(url), time.monotonic() + seconds
        threads = [threading.Thread(target=load.run, args=(i, until)) for i in range(clients)]
        for t in threads: t.start()
        memory, gpu, busy = [], [], [before]
        while time.monotonic() < until:
            time.sleep(min(1.0, seconds / 20))
            busy.append(metrics(url))
            memory.append(busy[-1]["process_resident_memory_bytes"] / 2**20)
            gpu.append(busy[-1]["gpu_memory_bytes"] / 2**20)
        for t in threads: t.join()
        end = time.monotonic() + 10
        while (after := metrics(url))["num_requests_running"] + after["num_requests_waiting"] and time.monotonic() < end: time.sleep(0.1)
        after = metrics(url)
    finally:
        server.send_signal(signal.SIGINT)
        code = server.wait(60)
    steps, seqs = ((busy[-1] if len(busy) > 1 else after)[f"iteration_requests_{x}"] - before[f"iteration_requests_{x}"] for x in ("count", "sum"))
    change = lambda name: after[name] - before[name]
    quarter, gpu_quarter = memory[len(memory) // 4], gpu[len(gpu) // 4]
    summary = {"seconds": seconds, "clients": clients, "whole": load.whole, "left": load.left, "wrong": len(load.wrong), "mean_batch": round(seqs / max(steps, 1), 2),
               "tok_per_s": round(change("generation_tokens_total") / seconds, 1), "prefix_hit_rate": round(change("prefix_cache_hits_total") / change("prefix_cache_queries_total"), 3),
               "preemptions": change("num_preemptions_total"), "aborted": change("request_success_total/abort"), "errors": change("request_success_total/error"),
               "disconnects": change("client_disconnects_total"), "running": after["num_requests_running"], "waiting": after["num_requests_waiting"], "kv_blocks_used": after["kv_blocks_used"],
               "memory_mib": {"after_a_quarter": round(quarter, 1), "end": round(memory[-1], 1)}, "gpu_memory_mib": {"after_a_quarter": round(gpu_quarter, 1), "end": round(gpu[-1], 1)}, "exit_code": code, "examples": load.wrong[:3]}
    faults = {"answers differ": load.wrong, "errors": summary["errors"], "requests are left": after["num_requests_running"] + after["num_requests_waiting"], "blocks are left": after["kv_blocks_used"],
              "memory grows": memory[-1] > quarter + 24 + 0.02 * quarter, "memory of the GPU grows": gpu[-1] > gpu_quarter + 24 + 0.02 * gpu_quarter, "hardly batched": summary["mean_batch"] <= clients / 2, "nobody left": leaving and not load.left, "exit code": code}
    return summary | {"faults": [name for name, bad in faults.items() if bad]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    for name, value in (("seconds", 180.0), ("clients", 16), ("num-cases", 40), ("leaving", 0.2), ("seed", 0), ("kv-mib", 48), ("exact", 1)): parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("options", nargs="*", help="of `serve`, after --")
    given = vars(parser.parse_args())
    summary = soak(**given | {"options": tuple(given["options"])})
    print(json.dumps(summary, indent=1, ensure_ascii=False))
    return 1 if summary["faults"] else 0


if __name__ == "__main__": sys.exit(main())
