"""Programs of compare_peers.py that decode several sequences in each step: mlx_llama on MLX and
mlx-lm's batched generator.

    python examples/benchmarks/compare_peers.py FOLDER --pairs mlx-rows --rows 8

Each row has a prompt of its own length. Both programs decode greedily, one step ahead of the token
that is read.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
from peers_checkpoint import CHUNK, WARM, Decoding, measure_host, prompt_tokens

TOKENS = 48  # measured steps of `host`


def prompts(depth: int, rows: int, vocabulary: int) -> list[list[int]]:
    """A prompt per row: the first of `depth` + 1 tokens, others shorter."""
    return [[row + 3, *prompt_tokens(max(1, depth - 5 * row), vocabulary)] for row in range(rows)]


class OursRows(Decoding):
    """mlx_llama's model and cache, without the loop. setting: [device or None, compile or None,
    rows].
    """

    def __init__(self, path: str, capacity: int, threads: int, setting: list[Any]):
        from mlx_llama.core.backends.selection import select
        from mlx_llama.core.files.checkpoint import open_checkpoint
        from mlx_llama.core.options import resolve

        device, compile, self.rows = setting
        self.backend = select("mlx", device)
        self.model = self.backend.load(
            open_checkpoint(path), **({} if compile is None else {"compile": compile})
        )
        self.vocabulary = self.model.config.vocab_size
        self.cache = self.model.make_cache(capacity, self.rows)
        self.sampling = self.backend.sampling_batch(
            [resolve({"temperature": 0.0}).options] * self.rows
        )

    def about(self) -> str:
        """Device and dtype, for the report."""
        return f"{self.backend.device_name}, {self.model.dtype_name}, {self.rows} rows"

    def _prefill(self, depth: int) -> np.ndarray:
        """Store the prompts but for their last tokens, which are returned, int32 [B, 1]."""
        lasts = []
        for row, prompt in enumerate(prompts(depth, self.rows, self.vocabulary)):
            self.cache.trim(0, row)
            for start in range(0, len(prompt) - 1, CHUNK):
                part = prompt[start : min(start + CHUNK, len(prompt) - 1)]
                self.model.forward([part], start, self.cache, rows=[row])
            lasts.append(prompt[-1:])
        self.backend.runtime.launch(self.cache.arrays())
        return np.array(lasts, np.int32)

    def _step(self, tokens: Any) -> Any:
        return self.model.step(tokens, self.cache.lengths[:], self.cache, self.sampling)

    def _decoded(self, depth: int, count: int) -> tuple[float, list[list[int]]]:
        tokens = self._step(self._prefill(depth))
        self.backend.runtime.launch([tokens])
        steps, started = [], 0.0
        for _ in range(count + 1):
            following = self._step(tokens)
            self.backend.runtime.launch([following])
            steps.append(self.backend.runtime.read([tokens]))
            started = started or time.perf_counter()
            tokens = following
        ended = time.perf_counter()
        return ended - started, [list(row) for row in zip(*steps)]

    def host(self) -> dict[str, float]:
        """build, host and primitives of a step of all rows."""
        tokens = self._prefill(2)

        def step() -> tuple[Any]:
            nonlocal tokens
            tokens = self._step(tokens)
            return (tokens,)

        return measure_host(
            step,
            self.backend.runtime.launch,
            lambda: self.backend.runtime.read([tokens]),
            WARM,
            TOKENS,
        )


class MlxLmRows(Decoding):
    """mlx-lm's BatchGenerator, by default greedy. setting: as of OursRows."""

    def __init__(self, path: str, capacity: int, threads: int, setting: list[Any]):
        import mlx.core as mx

        mx.set_default_device(mx.gpu if mx.is_available(mx.gpu) and setting[0] != "cpu" else mx.cpu)
        from mlx_lm.utils import load_model

        self.mx, self.rows = mx, setting[2]
        self.model, config = load_model(Path(path))
        self.vocabulary = config["vocab_size"]

    def _decoded(self, depth: int, count: int) -> tuple[float, list[list[int]]]:
        from mlx_lm.generate import BatchGenerator

        generator = BatchGenerator(
            self.model,
            max_tokens=count + 3,
            completion_batch_size=self.rows,
            prefill_batch_size=self.rows,
            prefill_step_size=CHUNK,
        )
        names = generator.insert(prompts(depth, self.rows, self.vocabulary))
        answers: dict[int, list[int]] = {name: [] for name in names}
        started = 0.0
        while min(map(len, answers.values())) < count + 1:
            for response in generator.next_generated():
                answers[response.uid].append(response.token)
            if min(map(len, answers.values())) == 1:
                started = started or time.perf_counter()
        ended = time.perf_counter()
        generator.close()
        return ended - started, [answers[name][: count + 1] for name in names]

    def host(self) -> dict[str, float]:
        """As OursRows.host: the lines of mlx-lm's GenerationBatch._step with clocks between, no
        step launched ahead.
        """
        from mlx_lm.models.cache import BatchKVCache

        mx = self.mx
        cache = [BatchKVCache([0] * self.rows) for _ in self.model.layers]
        mx.eval(
            self.model(
                mx.array([prompt[:2] for prompt in prompts(2, self.rows, self.vocabulary)]),
                cache=cache,
            )
        )
        inputs = mx.array([5] * self.rows)

        def step() -> tuple[Any, ...]:
            nonlocal inputs
            logits = self.model(inputs[:, None], cache=cache)[:, -1, :]
            logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            inputs = mx.argmax(logprobs, axis=-1)
            return inputs, *logprobs

        return measure_host(step, mx.async_eval, lambda: inputs.tolist(), WARM, TOKENS)
