"""Many clients at once: mlx_llama's server, the same scheduler without HTTP, and other servers over
the same weights.

    python examples/benchmarks/make_random_gguf.py tinyllama /tmp/models Q4_0
    python examples/benchmarks/load.py /tmp/models/tinyllama-Q4_0.gguf --clients 1 4 8 16
    python examples/benchmarks/load.py FOLDER --servers mlx mlx-lm            # a checkpoint folder, both on MLX
    python examples/benchmarks/load.py --url http://127.0.0.1:8080            # a server that runs already

Prompts are read at the speed of products of matrices and tokens are written at the speed of memory.
Rows of one step share the read of the weights, so together they are faster than one after the other
until arithmetic is the limit. A client feels two times: until its first token, which waits for its
own prompt and the rows before it, and between tokens, which other clients' prompts interrupt.

All servers stay loaded and answer in turn, one asleep while the other works, since memory bandwidth
varies between minutes on a shared machine. Every round has new prompts, the same for each server,
so that no prefix is known. Streams are read by one thread of asyncio with its own parser: it takes
some 20 microseconds a token.
"""  # noqa: E501

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

WORDS = [
    first + second
    for first in "ba ce di fo gu la me ni po ru sa te vi zo".split()
    for second in "n r s l m t".split()
]
GREEDY = {"temperature": 0, "stream": True}


@dataclass
class Answer:
    """Times of one streamed answer, in seconds since it was asked for; `tokens` as the server
    counts them.
    """

    times: list[float] = field(default_factory=list)  # of each piece
    tokens: int = 0
    end: float = 0.0


class Http:
    """A server at a URL."""

    def __init__(
        self,
        name: str,
        url: str,
        process: subprocess.Popen | None = None,
        limits: dict[str, Any] | None = None,
        model: str | None = None,
    ):
        self.name, self.url, self.process = name, url, process
        self.limits = limits or {}
        self.model = model

    def run(self, prompts: Sequence[str], tokens: int) -> list[Answer]:
        async def together() -> list[Answer]:
            return list(await asyncio.gather(*(self._ask(prompt, tokens) for prompt in prompts)))

        return asyncio.run(together())

    async def _ask(self, prompt: str, tokens: int) -> Answer:
        place = urlsplit(self.url)
        body = {
            "prompt": prompt,
            "max_tokens": tokens,
            **GREEDY,
            **self.limits,
            **({"model": self.model} if self.model else {}),
        }
        raw = json.dumps(body).encode()
        answer, began = Answer(), time.perf_counter()
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nConnection: close\r\n"  # noqa: E501
            b"Content-Length: %d\r\n\r\n" % (place.netloc.encode(), len(raw)) + raw
        )
        status = await reader.readline()
        if b" 200 " not in status:
            raise SystemExit(
                f"error: {self.name}: {status.decode()}{(await reader.read(2000)).decode()}"
            )
        pieces = 0
        while line := await reader.readline():
            if not line.startswith(b"data: "):
                continue
            now = time.perf_counter() - began
            if line.startswith(b"data: [DONE]"):
                break
            event = json.loads(line[6:])
            if event.get("choices") and not event["choices"][0].get("finish_reason"):
                answer.times.append(now)
                pieces += 1
            answer.tokens = (event.get("usage") or {}).get("completion_tokens") or answer.tokens
        answer.end = time.perf_counter() - began
        answer.tokens = answer.tokens or pieces
        writer.close()
        return answer

    def wait(self, seconds: float) -> None:
        """Wait until it answers a request."""
        end = time.monotonic() + seconds
        while True:
            try:
                ask = {
                    "prompt": "a",
                    "max_tokens": 1,
                    **({"model": self.model} if self.model else {}),
                }
                request = urllib.request.Request(
                    f"{self.url}/v1/completions",
                    json.dumps(ask).encode(),
                    {"Content-Type": "application/json"},
                )
                urllib.request.urlopen(request, timeout=60).read()
                return
            except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
                if time.monotonic() > end or (self.process and self.process.poll() is not None):
                    raise SystemExit(f"error: {self.name} does not answer: {error}") from None
                time.sleep(0.2)

    def close(self) -> None:
        if self.process:
            self.process.terminate()
            self.process.wait(30)


class InProcess:
    """The scheduler without HTTP: what the server adds is the difference."""

    name = "in process"

    def __init__(self, model: str, threads: int | None, rows: int, backend: str):
        from mlx_llama import load

        self.llm = load(model, backend=backend, threads=threads, max_rows=rows)
        self.llm.loop.start()

    def run(self, prompts: Sequence[str], tokens: int) -> list[Answer]:
        from mlx_llama.core.engine.request import Request
        from mlx_llama.core.options import resolve

        options = resolve(
            {
                "max_tokens": tokens,
                "temperature": 0,
                "logit_bias": dict.fromkeys(self.llm.engine.eos, -1e6),
            }
        )
        began = time.perf_counter()
        handles = [
            self.llm.loop.submit(Request(self.llm.encode(prompt), options)) for prompt in prompts
        ]
        answers = [handle.finish() for handle in handles]
        end = time.perf_counter() - began
        return [
            Answer(
                [token.seconds for token in answer.tokens],
                len(answer.tokens),
                min(end, answer.tokens[-1].seconds),
            )
            for answer in answers
        ]

    def wait(self, seconds: float) -> None:
        self.run(["a"], 2)

    def close(self) -> None:
        self.llm.loop.close()


# Servers that this machine has


def start(
    name: str,
    command: list[str],
    port: int,
    model: str | None = None,
    limits: dict[str, Any] | None = None,
) -> Http:
    log = tempfile.NamedTemporaryFile(
        "w", prefix=f"{name.replace(' ', '-')}-", suffix=".log", delete=False
    )
    process = subprocess.Popen(
        command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | {"HF_HUB_OFFLINE": "1"}
    )
    return Http(name, f"http://127.0.0.1:{port}", process, limits, model)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def open_server(kind: str, model: str, threads: int | None, rows: int) -> Any:
    """A contestant by its name; None where it is not installed."""
    port = free_port()
    if kind in ("ours", "mlx"):
        more = ["--threads", str(threads)] if threads and kind == "ours" else []
        device = ["--device", "cpu"] if kind == "mlx" else []
        # End tokens of random weights would make answers of different lengths.
        bias = {"logit_bias": end_tokens(model), "stream_options": {"include_usage": True}}
        return start(
            f"mlx_llama ({'cpu' if kind == 'ours' else 'mlx'})",
            [
                sys.executable,
                "-m",
                "mlx_llama.server",
                "--model",
                model,
                "--backend",
                "cpu" if kind == "ours" else "mlx",
                "--port",
                str(port),
                "--parallel",
                str(rows),
                "--quiet",
                *more,
                *device,
            ],
            port,
            None,
            bias,
        )
    if kind == "in-process":
        return InProcess(model, threads, rows, "cpu")
    if kind == "llama-server" and shutil.which("llama-server"):
        more = ["-t", str(threads), "-tb", str(threads)] if threads else []
        return start(
            "llama-server",
            [
                "llama-server",
                "-m",
                model,
                "--port",
                str(port),
                "-np",
                str(rows),
                "-c",
                str(rows * 1024),
                *more,
            ],
            port,
            None,
            {"ignore_eos": True, "stream_options": {"include_usage": True}},
        )
    if kind == "llama-cpp-python" and all(
        map(importlib.util.find_spec, ("llama_cpp", "starlette_context"))
    ):
        more = ["--n_threads", str(threads), "--n_threads_batch", str(threads)] if threads else []
        return start(
            "llama-cpp-python",
            [
                sys.executable,
                "-m",
                "llama_cpp.server",
                "--model",
                model,
                "--port",
                str(port),
                "--n_ctx",
                "1024",
                *more,
            ],
            port,
        )
    if kind == "mlx-lm" and importlib.util.find_spec("mlx_lm") and Path(model).is_dir():
        code = (
            "import mlx.core as mx; mx.set_default_device(mx.cpu); from mlx_lm.server import main; "
            "main()"
        )
        return start(
            "mlx_lm.server",
            [sys.executable, "-c", code, "--model", model, "--port", str(port)],
            port,
            model,
            {"logit_bias": end_tokens(model), "stream_options": {"include_usage": True}},
        )
    return None


def end_tokens(model: str) -> dict[str, float]:
    """Biases against the end tokens of a model."""
    from mlx_llama.core.files.checkpoint import open_checkpoint

    return {str(token): -1e6 for token in open_checkpoint(model).eos_token_ids}


# Measuring


def make_prompts(count: int, words: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=words)) for _ in range(count)]


def summarize(answers: Sequence[Answer]) -> dict[str, float]:
    """Figures of one round. Seconds; rates in tokens per second of all clients together."""
    tokens = sum(answer.tokens for answer in answers)
    seconds = max(answer.end for answer in answers)
    firsts = [answer.times[0] for answer in answers if answer.times]
    gaps = [
        after - before
        for answer in answers
        for before, after in zip(answer.times, answer.times[1:])
    ]
    return {
        "rate": tokens / seconds,
        "first": statistics.median(firsts),
        "first_95": quantile(firsts, 0.95),
        "between": statistics.median(gaps or [0]),
        "between_95": quantile(gaps, 0.95),
        "decode_rate": len(answers) / statistics.median(gaps or [1e-9]),  # while all decode
        "tokens": tokens,
    }


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values) or [0.0]
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def measure(
    servers: Sequence[Any], clients: int, rounds: int, words: int, tokens: int
) -> dict[str, list[dict[str, float]]]:
    results: dict[str, list[dict[str, float]]] = {server.name: [] for server in servers}
    for number in range(rounds):
        for i, server in enumerate(servers if number % 2 == 0 else list(servers)[::-1]):
            prompts = make_prompts(clients, words, 1000 * clients + number)
            results[server.name].append(summarize(server.run(prompts, tokens)))
    return results


def show(clients: int, results: dict[str, list[dict[str, float]]]) -> None:
    for name, rounds in results.items():
        middle = {key: statistics.median(figures[key] for figures in rounds) for key in rounds[0]}
        print(
            f"{clients:>3} clients  {name:<18} {middle['rate']:7.1f} tokens/s, first token "
            f"{middle['first'] * 1e3:7.1f} ms "
            f"(95 %: {middle['first_95'] * 1e3:.1f}), between tokens "
            f"{middle['between'] * 1e3:6.1f} ms "
            f"(95 %: {middle['between_95'] * 1e3:.1f}), decoding {middle['decode_rate']:.1f} "
            "tokens/s",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "model", nargs="?", default=None, help="a .gguf file, or a checkpoint folder"
    )
    parser.add_argument(
        "--servers",
        nargs="+",
        default=["ours", "in-process", "llama-server", "llama-cpp-python"],
        choices=["ours", "in-process", "llama-server", "llama-cpp-python", "mlx", "mlx-lm"],
    )
    parser.add_argument("--url", action="append", default=[], help="a server that runs already")
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--words", type=int, default=60, help="of a prompt")
    parser.add_argument("--tokens", type=int, default=48, help="of an answer")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument(
        "--rows", type=int, default=None, help="rows, or slots (default: the most clients)"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not args.model and not args.url:
        parser.error("a model or --url is needed")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # close the servers
    rows = args.rows or max(args.clients)
    opened = [
        Http(url, url, limits={"stream_options": {"include_usage": True}}) for url in args.url
    ]
    if args.model:
        for kind in args.servers:
            server = open_server(kind, args.model, args.threads, rows)
            if server is None:
                print(
                    f"{kind}: not installed here, or not for this model: left out", file=sys.stderr
                )
            else:
                opened.append(server)
    figures: dict[str, Any] = {"model": args.model, "clients": {}}
    try:
        for server in opened:
            server.wait(120)
        measure(opened, 1, 1, 8, 4)  # warm-up
        for clients in args.clients:
            results = measure(opened, clients, args.rounds, args.words, args.tokens)
            figures["clients"][str(clients)] = results
            if not args.json:
                show(clients, results)
    finally:
        for server in opened:
            server.close()
    if args.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
