"""Programs of compare_peers.py for checkpoint folders: mlx-lm and transformers through their public
code, and mlx_llama on the same framework. compare_peers.py runs each in a process of its own:

    python examples/benchmarks/compare_peers.py FOLDER
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

CHUNK = 512  # prompt tokens per evaluation, llama.cpp's n_batch and n_ubatch
WARM = 4  # first tokens without host figures, as in mlx_llama.bench.profile

# {backend: (titles of both programs, the peer's package, how to install it)}
PAIRS = {
    "mlx": ({"ours": "mlx_llama/mlx", "peer": "mlx-lm"}, "mlx_lm", "pip install mlx-lm"),
    "mlx-rows": ({"ours": "mlx_llama/mlx", "peer": "mlx-lm"}, "mlx_lm", "pip install mlx-lm"),
    "cuda": (
        {"ours": "mlx_llama/cuda", "peer": "transformers"},
        "transformers",
        "pip install transformers",
    ),
}


def prompt_tokens(count: int, vocabulary: int) -> list[int]:
    """Token ids, the same for every program; a shorter list is a prefix of a longer one."""
    return np.random.default_rng(0).integers(3, vocabulary, count).tolist()


class Decoding:
    """Base of programs whose `_decoded` returns the seconds and the tokens of the same run."""

    _decoded: Callable[[int, int], tuple[float, list[Any]]]

    def decode(self, depth: int, count: int) -> float:
        """Seconds for `count` tokens decoded after `depth` + 1 others, of each row if there are
        several.
        """
        return self._decoded(depth, count)[0]

    def tokens(self, depth: int, count: int) -> list[Any]:
        """The tokens that `decode` decodes, and the one before them, by row if there are
        several.
        """
        return self._decoded(depth, count)[1]


def measure_host(
    step: Callable[[], Any],
    launch: Callable[[Any], Any],
    read: Callable[[], Any],
    skipped: int,
    count: int,
) -> dict[str, float]:
    """build and host (processor time of the calling thread, without waiting) in microseconds per
    step, and MLX's primitives: medians of `count` steps after `skipped`. step: builds and returns
    arrays, launch: launches them, read: waits."""
    from mlx_llama.mlx_native.runtime import primitives

    builds, processor, graph = [], [], 0
    for n in range(skipped + count):
        started, thread = time.perf_counter(), time.thread_time()
        arrays = step()
        builds.append(time.perf_counter() - started)
        spent = time.thread_time() - thread
        if n == WARM:
            graph = primitives(arrays)
        thread = time.thread_time()
        launch(arrays)
        processor.append(spent + time.thread_time() - thread)
        read()
    build, host = (statistics.median(values[skipped:]) * 1e6 for values in (builds, processor))
    return {"build": build, "host": host, "primitives": graph}


class Engined(Decoding):
    """A model of mlx_llama behind the scheduler of all commands."""

    def __init__(self, backend: Any, model: Any, capacity: int):
        from mlx_llama.core.engine.loop import Loop

        self.model, self.vocabulary = model, model.config.vocab_size
        # No end tokens: every run is full. Prompts start cold, decoding from a prefix that a row of
        # the other one holds.
        self.cold, self.warm = (
            Loop(backend, model, None, frozenset(), capacity, max_rows=1, kept_rows=kept)
            for kept in (0, 2)
        )

    def _run(self, loop: Any, tokens: list[int], count: int, ahead: int = 0) -> Any:
        """The completion after `count` tokens of an answer limited to `count` + `ahead`."""
        from mlx_llama.core import options
        from mlx_llama.core.engine.request import Request

        resolved = options.resolve(
            {"max_tokens": count + ahead, "temperature": 0.0, "prefill_step_size": CHUNK}
        )
        handle = loop.submit(Request(tokens, resolved, wants_text=False))
        for number, _ in enumerate(handle.tokens(), 1):
            if number == count:
                break
        handle.cancel()
        return handle.completion

    def prompt(self, count: int) -> float:
        """Seconds for a prompt of `count` tokens and the first token after it."""
        return self._run(self.cold, prompt_tokens(count, self.vocabulary), 1).prefill_seconds

    def _decoded(self, depth: int, count: int) -> tuple[float, list[int]]:
        # Peers launch one token more than they return; launch as many here.
        completion = self._run(
            self.warm, prompt_tokens(depth + 1, self.vocabulary), count + 1, ahead=1
        )
        return completion.decode_seconds, completion.tokens


class Ours(Engined):
    """mlx_llama on the peer's framework and device. setting: [device or None, compile or None]."""

    backend = ""

    def __init__(self, path: str, capacity: int, threads: int, setting: list[Any]):
        from mlx_llama.bench.measure import load
        from mlx_llama.core.backends.selection import select
        from mlx_llama.core.files.checkpoint import open_checkpoint
        from mlx_llama.core.options import LoadOptions

        self._set_threads(threads)
        device, compile = setting
        backend = select(
            self.backend,
            device or ("gpu" if select(self.backend, "cpu").runtime.has_gpu() else "cpu"),
        )
        self.loaded = load(open_checkpoint(path), backend, LoadOptions(compile=compile))
        super().__init__(backend, self.loaded.model, capacity)

    def _set_threads(self, threads: int) -> None:
        """MLX and its BLAS choose their own threads, the same in both programs."""

    def about(self) -> str:
        """Device and dtype, for the report."""
        return f"{self.loaded.backend.device_name}, {self.loaded.model.dtype_name}"


class OursMlx(Ours):
    backend = "mlx"

    def host(self) -> dict[str, float]:
        """build and host (processor time) in microseconds per token, and primitives, by
        mlx_llama.bench.profile.
        """
        from mlx_llama.bench import profile

        figures = profile.measure_host(self.loaded, self.warm.engine.context)
        return {
            "build": figures["step_us"],
            "host": figures["thread_us"],
            "primitives": figures["primitives"],
        }


class OursTorch(Ours):
    backend = "cuda"

    def _set_threads(self, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)


class MlxLm(Decoding):
    """mlx-lm through mlx_lm.generate.generate_step, by default greedy."""

    def __init__(self, path: str, capacity: int, threads: int, setting: list[Any]):
        import mlx.core as mx

        gpu = mx.is_available(mx.gpu) and setting[0] != "cpu"
        # importing mlx_lm makes a stream on this device
        mx.set_default_device(mx.gpu if gpu else mx.cpu)
        from mlx_lm.generate import generate_step
        from mlx_lm.models import cache
        from mlx_lm.utils import load_model

        self.mx, self.caches, self.generate_step = mx, cache, generate_step
        self.model, config = load_model(Path(path))
        self.vocabulary = config.get("text_config", config)["vocab_size"]
        self.cache = cache.make_prompt_cache(self.model)

    def _generate(self, tokens: list[int], count: int) -> Any:
        return self.generate_step(
            self.mx.array(tokens),
            self.model,
            max_tokens=count,
            prompt_cache=self.cache,
            prefill_step_size=CHUNK,
        )

    def prompt(self, count: int) -> float:
        """Seconds for a prompt of `count` tokens and the first token after it."""
        self.cache = self.caches.make_prompt_cache(self.model)
        tokens = prompt_tokens(count, self.vocabulary)
        started = time.perf_counter()
        for _ in self._generate(tokens, 0):  # computes the first token, yields none
            pass
        return time.perf_counter() - started

    def _decoded(self, depth: int, count: int) -> tuple[float, list[int]]:
        tokens = prompt_tokens(depth + 1, self.vocabulary)
        held = self.cache[0].offset
        if held > depth:
            self.caches.trim_prompt_cache(self.cache, held - depth)
        elif held < depth:
            for _ in self._generate(tokens[held:depth], 0):
                pass
        tokens_read, started = [], 0.0
        for token, _ in self._generate(tokens[depth:], count + 1):
            tokens_read.append(token)
            started = started or time.perf_counter()
            ended = time.perf_counter()
        return ended - started, tokens_read

    def host(self) -> dict[str, float]:
        """As OursMlx.host: generate_step's own lines with clocks between, no step launched
        ahead.
        """
        from mlx_llama.bench.profile import PROMPT, TOKENS

        mx, cache = self.mx, self.caches.make_prompt_cache(self.model)
        y = mx.array(prompt_tokens(PROMPT, self.vocabulary))

        def step() -> tuple[Any, Any]:
            nonlocal y
            logits = self.model(y[None], cache=cache)[:, -1, :]
            logprobs = logits - mx.logsumexp(logits, keepdims=True)
            y = mx.argmax(logprobs, axis=-1)
            return y, logprobs.squeeze(0)

        return measure_host(step, mx.async_eval, lambda: y.item(), 1 + WARM, TOKENS)


class Transformers(Decoding):
    """transformers' eager forward with its DynamicCache, a token at a time, as `generate` does by
    default.
    """

    def __init__(self, path: str, capacity: int, threads: int, setting: list[Any]):
        import torch
        from transformers import AutoModelForCausalLM, DynamicCache
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        torch.set_num_threads(threads)
        self.torch, self.make_cache = torch, DynamicCache
        self.device = "cuda" if setting[0] != "cpu" and torch.cuda.is_available() else "cpu"
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype="auto").to(self.device).eval()
        self.vocabulary = self.model.config.vocab_size
        self.cache = self._fresh()

    def _fresh(self) -> Any:
        return self.make_cache(config=self.model.config)

    def _next(self, tokens: list[int]) -> int:
        """The token after `tokens`, which are appended to the cache."""
        ids = self.torch.tensor([tokens], device=self.device)
        output = self.model(
            input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1
        )
        return output.logits[:, -1].float().argmax(dim=-1).item()

    def prompt(self, count: int) -> float:
        """Seconds for a prompt of `count` tokens and the first token after it."""
        self.cache = self._fresh()
        tokens = prompt_tokens(count, self.vocabulary)
        with self.torch.inference_mode():
            started = time.perf_counter()
            self._next(tokens)
            return time.perf_counter() - started

    def _decoded(self, depth: int, count: int) -> tuple[float, list[int]]:
        tokens = prompt_tokens(depth + 1, self.vocabulary)
        with self.torch.inference_mode():
            held = self.cache.get_seq_length()
            if held > depth:
                self.cache.crop(depth - held)  # negative: tokens to drop
            elif held < depth:
                self._next(tokens[held:depth])
            decoded = [self._next(tokens[depth:])]
            started = time.perf_counter()
            while len(decoded) <= count:
                decoded.append(self._next(decoded[-1:]))
            return time.perf_counter() - started, decoded


PROGRAMS = {
    "mlx ours": OursMlx,
    "mlx peer": MlxLm,
    "cuda ours": OursTorch,
    "cuda peer": Transformers,
}


def pairs_here(wanted: list[str]) -> tuple[list[str], list[str]]:
    """(frameworks of `wanted` whose two programs are installed, a line with the reason for each
    other)
    """
    from mlx_llama.core.backends import selection as backend

    here, reasons = [], []
    for name in wanted:
        titles, package, remedy = PAIRS[name]
        reason = backend.missing(name.partition("-")[0])
        if importlib.util.find_spec(package) is None:
            reason = f"{package} is not installed: {remedy}"
        if reason:
            reasons.append(f"left out: {titles['ours']} against {titles['peer']} ({reason})")
        else:
            here.append(name)
    return here, reasons


def agreement(first: list[int], other: list[int]) -> int:
    """Length of the common prefix of two answers, in tokens."""
    return next(
        (i for i, (a, b) in enumerate(zip(first, other)) if a != b), min(len(first), len(other))
    )
