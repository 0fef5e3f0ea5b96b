"""Measurements of the bench: a prompt and its answer, or rows of lengths and depths."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlx_llama import cli
from mlx_llama.cli.running import spell_flags
from mlx_llama.core import options
from mlx_llama.core.answers.completion import Completion
from mlx_llama.core.backends.decoding import decode, prefill
from mlx_llama.core.backends.interface import Cache, Model
from mlx_llama.core.backends.selection import Backend
from mlx_llama.core.dtypes import ITEMSIZE
from mlx_llama.core.engine.loop import Loop
from mlx_llama.core.engine.request import Request
from mlx_llama.core.files.checkpoint import Checkpoint, Tensor
from mlx_llama.core.options import LoadOptions

Advance = Callable[[str], None]  # called with the name of what begins


class HostMemory:
    """Memory bandwidth of all cores together, by passes over more bytes than the caches hold."""

    def __init__(self, nbytes: int = 256 << 20):
        cores = os.cpu_count() or 1
        if hasattr(os, "sched_getaffinity"):
            cores = len(os.sched_getaffinity(0))
        self.whole = np.ones(nbytes // 4, np.float32)
        self.parts = np.array_split(self.whole, cores)
        self.pool = ThreadPoolExecutor(cores)
        # A multithreaded BLAS reads faster alone; a single-threaded one needs our threads.
        ways = (
            lambda: np.dot(self.whole, self.whole),
            lambda: list(self.pool.map(lambda part: np.dot(part, part), self.parts)),
        )
        self.read = max(ways, key=lambda way: max(self._rate(way) for _ in range(4)))

    def bandwidth(self) -> float:
        """Bytes per second: the best pass, since the first one misses cached page tables."""
        return max(self._rate(self.read) for _ in range(4))

    def _rate(self, read: Callable[[], object]) -> float:
        started = time.perf_counter()
        read()
        return self.whole.nbytes / (time.perf_counter() - started)


def bytes_per_token(
    checkpoint: Checkpoint, model: Model, position: int, width: int | None = None
) -> int:
    """Bytes that decoding the token at `position` reads: every matrix (only the experts that a
    token uses), one row of the embedding, keys and values, recurrent states.

    Low-bit weights count with their bytes in the file. width: bytes per value of the other tensors
    on a backend that converts them while loading; None: as in the file.
    """
    c, needed = checkpoint.config, 0
    for name, tensor in checkpoint.tensors.items():
        plain = isinstance(tensor, Tensor) and width is not None
        nbytes = math.prod(tensor.shape) * width if plain else tensor.nbytes
        looked_up = name == "model.embed_tokens.weight" and not c.tie_word_embeddings
        if ".experts." in name:
            nbytes = nbytes * c.num_experts_per_tok / c.num_experts
        needed += nbytes // c.vocab_size if looked_up else nbytes
    cache = model.make_cache(1)
    seen = sum(min(position, window.size) * each for window, each in cache.window_nbytes.items())
    return round(needed) + position * cache.lasting_nbytes + seen + cache.state_nbytes


def random_tokens(count: int, vocabulary: int) -> list[int]:
    """`count` token ids, the same in every call."""
    return np.random.default_rng(0).integers(0, vocabulary, count).tolist()


@dataclass(frozen=True)
class Loaded:
    checkpoint: Checkpoint
    backend: Backend
    model: Model
    seconds: float  # spent loading

    def facts(self, repetitions: int) -> dict[str, Any]:
        """Model, backend, device, memory so far and notices, by name."""
        checkpoint, backend, model = self.checkpoint, self.backend, self.model
        return {
            "model": checkpoint.name,
            "backend": backend.name,
            "device": backend.device_name,
            "dtype": model.dtype_name,
            "cache_bits": model.cache_bits,
            "stored": checkpoint.formats,
            "weights_bytes": checkpoint.nbytes,
            "load_seconds": self.seconds,
            "notices": list(map(spell_flags, model.notices)),
            "repetitions": repetitions,
            "peak_memory_bytes": backend.runtime.peak_memory(backend.device),
        }

    def bandwidth_probe(self) -> Callable[[], float]:
        """A function that measures the memory's bandwidth, in bytes per second."""
        runtime, device = self.backend.runtime, self.backend.device
        if runtime.bandwidth(device) is None:
            return HostMemory().bandwidth
        return lambda: runtime.bandwidth(device)


def load(checkpoint: Checkpoint, backend: Backend, options: LoadOptions = LoadOptions()) -> Loaded:
    """Load the model, with a progress bar on a terminal. options: checked."""
    started = time.perf_counter()
    with cli.Bar("loading"):
        model = backend.build(checkpoint, options)
    return Loaded(checkpoint, backend, model, time.perf_counter() - started)


def measure(loaded: Loaded, prompt: int, generate: int, repetitions: int) -> dict[str, Any]:
    """Time a prompt and its answer; returns seconds, tokens/s, bytes and shares by name."""
    checkpoint, backend, model = loaded.checkpoint, loaded.backend, loaded.model
    tokens = random_tokens(prompt, checkpoint.config.vocab_size)
    resolved = options.resolve({"max_tokens": generate, "temperature": 0.0})
    request = Request(tokens, resolved, eos=frozenset(), wants_text=False)
    width = None if backend.name == "cpu" else ITEMSIZE[model.dtype_name]
    needed = bytes_per_token(checkpoint, model, prompt + generate // 2, width)

    def run_once(probe: Callable[[], float] | None = None) -> tuple[Completion, list[float]]:
        # A new scheduler each time: an older one has the prompt in its cache.
        loop = Loop(backend, model, None, frozenset(), prompt + generate, max_rows=1)
        handle, bandwidths = loop.submit(request), []
        for count, _ in enumerate(handle.tokens()):
            # Probe memory between tokens where nothing runs ahead: its speed drifts within a run.
            # The scheduler's clock excludes the time of its consumer.
            if probe and not backend.runs_ahead and count % 8 == 0:
                bandwidths.append(probe())
        return handle.completion, bandwidths

    run_once()  # first use of every shape: page faults, kernels to compile
    facts = loaded.facts(repetitions)  # before the bandwidth probe allocates memory
    probe, runs = loaded.bandwidth_probe(), []
    for _ in range(repetitions):
        before = probe()
        completion, between = run_once(probe)
        runs.append((completion, statistics.harmonic_mean([before, *between, probe()])))
    speeds = [run.decode_tps for run, _ in runs]

    def median(figure: Callable[[Completion], float]) -> float:
        return statistics.median(figure(run) for run, _ in runs)

    return facts | {
        "prompt": prompt,
        "generate": generate,
        "prompt_tps": median(lambda run: run.prompt_tps),
        "first_token_seconds": median(lambda run: run.prefill_seconds),
        "decode_tps": statistics.median(speeds),
        "decode_tps_range": [min(speeds), max(speeds)],
        "evaluations_per_token": median(lambda run: run.evaluations_per_token),
        "launches_per_token": median(lambda run: run.launches / len(run.tokens)),
        "read_bytes_per_token": median(lambda run: run.bytes_per_token),
        "bytes_per_token": needed,
        "bandwidth": statistics.median(bandwidth for _, bandwidth in runs),
        "bandwidth_share": statistics.median(run.decode_tps * needed / b for run, b in runs),
    }


@dataclass(frozen=True)
class Case:
    """A test of llama-bench: a prompt, or decoded tokens, at a depth of the context."""

    kind: str  # "pp", a prompt, or "tg", decoded tokens
    length: int  # tokens
    depth: int = 0  # tokens in the cache before

    @property
    def name(self) -> str:
        """llama-bench's spelling: "tg32 @ d1024"."""
        return f"{self.kind}{self.length}" + (f" @ d{self.depth}" if self.depth else "")

    @property
    def positions(self) -> int:
        return self.depth + self.length

    def facts(self) -> dict[str, Any]:
        """llama-bench's columns."""
        n_prompt, n_gen = (self.length, 0) if self.kind == "pp" else (0, self.length)
        return {"test": self.name, "n_prompt": n_prompt, "n_gen": n_gen, "n_depth": self.depth}


@dataclass(frozen=True)
class Row:
    case: Case
    per_token: list[list[float]]  # seconds of each token, or of the whole prompt, per repetition

    def figures(self) -> dict[str, Any]:
        """Figures by name; rates in tokens per second: median, slowest and fastest repetition."""
        seconds = [sum(run) for run in self.per_token]
        rates = [self.case.length / taken for taken in seconds]
        spread = {"tps": statistics.median(rates), "tps_min": min(rates), "tps_max": max(rates)}
        samples = {"seconds": statistics.median(seconds), "samples_tps": rates}
        return self.case.facts() | spread | samples


def measure_rows(
    loaded: Loaded, cases: list[Case], repetitions: int, advance: Advance = lambda name: None
) -> list[Row]:
    """Measure a row per case, in their order; calls advance(name) before each.

    Each case runs once untimed, which allocates no more storage than it needs: attention over a
    fixed shape, as in MLX's traced step, pays for all of it.
    """
    longest = max(case.positions for case in cases)
    tokens = random_tokens(longest, loaded.checkpoint.config.vocab_size)
    rows: dict[Case, Row] = {}
    cache, reached = None, 0
    for case in sorted(set(cases), key=lambda case: (case.depth, case.length)):
        advance(case.name)
        if cache is None or case.positions < reached:
            cache = loaded.model.make_cache(longest)
        _fill(loaded, tokens, cache, case.depth)
        reached = case.positions
        runs = [_run(loaded, tokens, cache, case) for _ in range(1 + repetitions)]
        rows[case] = Row(case, runs[1:])
    return [rows[case] for case in cases]


def _fill(loaded: Loaded, tokens: list[int], cache: Cache, depth: int) -> None:
    """Extend the cache, which holds a prefix of `tokens`, to the first `depth` tokens."""
    cache.trim(min(depth, cache.length))
    if cache.length < depth:
        # Reads a token, so that the device is idle when the clock starts.
        prefill(loaded.backend, loaded.model, cache, {0: tokens[cache.length : depth]})


def _run(loaded: Loaded, tokens: list[int], cache: Cache, case: Case) -> list[float]:
    """Run a case; returns seconds by token, or of the prompt. Trims the cache again."""
    backend, model, ends = loaded.backend, loaded.model, [time.perf_counter()]
    if case.kind == "pp":
        prefill(backend, model, cache, {0: tokens[case.depth : case.positions]})
        ends.append(time.perf_counter())
    else:
        for _ in decode(backend, model, cache, [tokens[case.depth]], case.length):
            ends.append(time.perf_counter())
    _fill(loaded, tokens, cache, case.depth)
    return np.diff(ends).tolist()


# Rows decoded together, as in llama-batched-bench: a step reads every weight once for all of them,
# so their tokens per second grow until arithmetic bounds them.


@dataclass(frozen=True)
class Batch:
    """Prompts that are decoded together."""

    prompt: int  # tokens of each prompt
    generate: int  # tokens decoded after each prompt
    rows: int

    @property
    def name(self) -> str:
        return f"{self.rows} rows of {self.prompt} + {self.generate}"

    @property
    def positions(self) -> int:
        """Positions of one row at the end."""
        return self.prompt + self.generate


@dataclass(frozen=True)
class BatchRow:
    case: Batch
    seconds: list[tuple[float, float]]  # for all prompts and for all decoded tokens, by repetition

    def figures(self) -> dict[str, Any]:
        """Medians under llama-batched-bench's names; speeds in tokens/s of all rows."""
        case, n_kv = self.case, self.case.rows * self.case.positions
        t_pp, t_tg = map(statistics.median, zip(*self.seconds))
        t = statistics.median(map(sum, self.seconds))
        speeds = [case.rows * case.generate / seconds for _, seconds in self.seconds]
        sizes = {"pp": case.prompt, "tg": case.generate, "pl": case.rows, "n_kv": n_kv}
        prompts = {"t_pp": t_pp, "speed_pp": case.rows * case.prompt / t_pp}
        answers = {"t_tg": t_tg, "speed_tg": case.rows * case.generate / t_tg}
        spread = {"speed_tg_min": min(speeds), "speed_tg_max": max(speeds)}
        return sizes | prompts | answers | {"t": t, "speed": n_kv / t} | spread


def measure_batches(
    loaded: Loaded, cases: list[Batch], repetitions: int, advance: Advance = lambda name: None
) -> list[BatchRow]:
    """Measure each case, in order; calls advance(name) before each. The first run is untimed.

    Raises ContextError where memory has no room for all rows.
    """
    measured, vocabulary = [], loaded.checkpoint.config.vocab_size
    for case in cases:
        advance(case.name)
        cache = loaded.model.make_cache(case.positions, rows=case.rows)
        # fail before minutes of prompts
        cache.check_memory(dict.fromkeys(range(case.rows), case.positions))
        tokens = random_tokens(case.rows * case.prompt, vocabulary)
        starts = enumerate(range(0, len(tokens), case.prompt))
        prompts = {row: tokens[start : start + case.prompt] for row, start in starts}
        runs = []
        for _ in range(1 + repetitions):
            for row in range(case.rows):
                cache.trim(0, row)
            runs.append(_run_batch(loaded, cache, case, prompts))
        measured.append(BatchRow(case, runs[1:]))
    return measured


def _run_batch(
    loaded: Loaded, cache: Cache, case: Batch, prompts: dict[int, list[int]]
) -> tuple[float, float]:
    """Run a batch; returns the seconds of the prompts and of the decoded tokens."""
    started = time.perf_counter()
    tokens = prefill(loaded.backend, loaded.model, cache, prompts)
    between = time.perf_counter()
    for _ in decode(loaded.backend, loaded.model, cache, tokens, case.generate):
        pass
    return between - started, time.perf_counter() - between
