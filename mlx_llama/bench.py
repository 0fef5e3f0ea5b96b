"""python -m mlx_llama.bench: speed and memory of one model on one backend.

Decoding one token reads every weight once and computes little, so its bound is the memory: the bytes a token must read
(weight matrices, one row of the embedding, the cache so far) over the bandwidth. The bench measures that bandwidth in
the same run, between tokens where it can, because it drifts on shared machines, and prints which share of it decoding
reached. A prompt reuses each weight for all its tokens and is bound by arithmetic instead.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from . import cli
from .core import options
from .core.backend import Backend, Model, select
from .core.checkpoint import Checkpoint, Tensor, open_checkpoint
from .core.engine import Completion, Engine
from .core.errors import OptionsError
from .core.quantize import weight_format


class HostMemory:
    """Measures how fast all cores together read from memory: passes over `nbytes`, far more than the caches hold."""

    def __init__(self, nbytes: int = 256 << 20):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.whole = np.ones(nbytes // 4, np.float32)
        self.parts = np.array_split(self.whole, cores)
        self.pool = ThreadPoolExecutor(cores)
        # A BLAS with threads of its own reads faster alone than beside ours, one without them needs ours.
        ways = (lambda: np.dot(self.whole, self.whole),
                lambda: list(self.pool.map(lambda part: np.dot(part, part), self.parts)))
        self.read = max(ways, key=lambda way: max(self._rate(way) for _ in range(4)))

    def bandwidth(self) -> float:
        """Bytes per second: the best of a few passes, since the first after other work finds no page tables cached."""
        return max(self._rate(self.read) for _ in range(4))

    def _rate(self, read: Callable[[], object]) -> float:
        started = time.perf_counter()
        read()
        return self.whole.nbytes / (time.perf_counter() - started)


def bytes_per_token(checkpoint: Checkpoint, model: Model, position: int, width: int | None = None) -> int:
    """What decoding the token at `position` must read: every matrix, one row of the embedding, keys and values.

    Low-bit weights count what they take in the file. width: bytes per value of the other tensors on a backend that
    changes them while loading; None as in the file.
    """
    c, needed = checkpoint.config, 0
    for name, tensor in checkpoint.tensors.items():
        plain = isinstance(tensor, Tensor) and width is not None
        nbytes = math.prod(tensor.shape) * width if plain else tensor.nbytes
        looked_up = name == "model.embed_tokens.weight" and not c.tie_word_embeddings
        needed += nbytes // c.vocab_size if looked_up else nbytes
    cache = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * position
    return needed + cache * itemsize(model)


def itemsize(model: Model) -> int:
    """Bytes of one activation."""
    return model.dtype.itemsize if hasattr(model.dtype, "itemsize") else model.dtype.size


def stored(checkpoint: Checkpoint) -> str:
    """The formats of the matrices, the one with most weights first: "Q4_K, Q6_K"."""
    sizes: dict[str, int] = {}
    for tensor in checkpoint.tensors.values():
        if len(tensor.shape) == 2:
            kind = tensor.dtype if isinstance(tensor, Tensor) else weight_format(tensor)
            sizes[kind] = sizes.get(kind, 0) + math.prod(tensor.shape)
    return ", ".join(sorted(sizes, key=sizes.get, reverse=True))


def measure(checkpoint: Checkpoint, backend: Backend, dtype: str, prompt: int, generate: int, repetitions: int,
            **load_options: Any) -> dict[str, Any]:
    """Load the model and time it. Returns the figures by name: seconds, tokens per second, bytes, shares.

    load_options: threads, activation_bits and compile of Backend.load.
    """
    started = time.perf_counter()
    with cli.Bar("loading"):
        model = backend.load(checkpoint, dtype, **load_options)
    load_seconds = time.perf_counter() - started
    engine = Engine(backend, model, None, frozenset(), checkpoint.config.max_position_embeddings)
    tokens = np.random.default_rng(0).integers(0, checkpoint.config.vocab_size, prompt).tolist()
    resolved = options.resolve({"max_tokens": generate, "temperature": 0.0})
    engine.check_prompt(tokens + [0] * generate)
    width = None if backend.name == "cpu" else itemsize(model)
    needed = bytes_per_token(checkpoint, model, prompt + generate // 2, width)

    def once(probe: Callable[[], float] | None = None) -> tuple[Completion, list[float]]:
        completion, bandwidths = Completion(prompt_tokens=prompt), []
        for count, _ in enumerate(engine.tokens(tokens, model.make_cache(prompt + generate), resolved, completion)):
            # Where nothing runs ahead, memory is probed between tokens: its speed drifts within a run. The engine does
            # not count the time its consumer takes.
            if probe and not backend.runs_ahead and count % 8 == 0:
                bandwidths.append(probe())
        return completion, bandwidths

    once()  # first use of every shape: page faults, kernels to compile
    peak = backend.runtime.peak_memory(backend.device)  # before the bandwidth probe takes memory of its own
    device_bandwidth = backend.runtime.bandwidth(backend.device)
    probe = HostMemory().bandwidth if device_bandwidth is None else lambda: backend.runtime.bandwidth(backend.device)
    runs = []
    for _ in range(repetitions):
        before = probe()
        completion, between = once(probe)
        runs.append((completion, statistics.harmonic_mean([before, *between, probe()])))
    median = lambda values: statistics.median(list(values))  # noqa: E731
    return {
        "model": checkpoint.name, "backend": backend.name, "device": backend.device_name,
        "dtype": str(model.dtype).split(".")[-1], "stored": stored(checkpoint),
        "weights_bytes": checkpoint.nbytes, "prompt": prompt, "generate": generate, "repetitions": repetitions,
        "load_seconds": load_seconds,
        "prompt_tps": median(run.prompt_tps for run, _ in runs),
        "first_token_seconds": median(run.prefill_seconds for run, _ in runs),
        "decode_tps": median(run.decode_tps for run, _ in runs),
        "decode_tps_range": [min(run.decode_tps for run, _ in runs), max(run.decode_tps for run, _ in runs)],
        "evaluations_per_token": median(run.evaluations_per_token for run, _ in runs),
        "bytes_per_token": needed,
        "bandwidth": median(bandwidth for _, bandwidth in runs),
        "bandwidth_share": median(run.decode_tps * needed / bandwidth for run, bandwidth in runs),
        "peak_memory_bytes": peak, "notices": list(model.notices),
    }


def report(figures: dict[str, Any]) -> str:
    """The figures for people."""
    f = figures
    low, high = f["decode_tps_range"]
    return "\n".join([
        f"{f['model']}: {f['weights_bytes'] / 1e9:.2f} GB of {f['stored']} weights on {f['backend']} "
        f"({f['device']}, {f['dtype']})",
        f"load                 {f['load_seconds']:8.2f} s",
        f"prompt, {f['prompt']:5} tokens {f['prompt_tps']:8.1f} tokens/s, first token after "
        f"{f['first_token_seconds']:.2f} s",
        f"decode, {f['generate']:5} tokens {f['decode_tps']:8.1f} tokens/s ({low:.1f} to {high:.1f} over "
        f"{f['repetitions']} runs), {f['evaluations_per_token']:g} evaluation per token",
        f"bandwidth            {f['bandwidth'] / 1e9:8.1f} GB/s measured; decoding reads "
        f"{f['bytes_per_token'] / 1e9:.2f} GB per token, {f['bandwidth_share']:.0%} of the bound",
        f"peak memory          {f['peak_memory_bytes'] / 1e9:8.2f} GB, "
        f"{f['peak_memory_bytes'] / f['weights_bytes']:.2f} times the weights" if f["peak_memory_bytes"]
        else "peak memory           unknown on this system",
        *(f"note: {notice}" for notice in f["notices"]),
    ])


def parser() -> options.Parser:
    """The command line; -p, -n and -r as in llama-bench."""
    result = options.Parser(prog="python -m mlx_llama.bench", description=__doc__.splitlines()[0], allow_abbrev=False)
    result.add_argument("--prompt-tokens", "-p", type=int, default=128, help="length of the prompt (default: 128)")
    result.add_argument("--generate-tokens", "-n", type=int, default=64, help="tokens to decode (default: 64)")
    result.add_argument("--repetitions", "-r", type=int, default=3, help="runs; the medians are printed (default: 3)")
    result.add_argument("--json", action="store_true", help="print the figures as JSON")
    result.add_argument("--debug", action="store_true", help="show tracebacks")
    options.add_model_flags(result)
    return result


def main(arguments: list[str]) -> int:
    """Run the door; returns the exit code. Raises LlamaError."""
    given = parser().parse_args(arguments)
    for name in ("prompt_tokens", "generate_tokens", "repetitions"):
        least = 2 if name == "generate_tokens" else 1
        if getattr(given, name) < least:
            raise OptionsError(f"--{name.replace('_', '-')} {getattr(given, name)}: must be at least {least}")
    backend = select(given.backend, given.device)
    load_options = backend.load_options(given.dtype, given.threads, given.activation_bits, given.compile)
    figures = measure(open_checkpoint(given.model, given.revision), backend, given.dtype, given.prompt_tokens,
                      given.generate_tokens, given.repetitions, **load_options)
    print(json.dumps(figures, indent=1) if given.json else report(figures))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
