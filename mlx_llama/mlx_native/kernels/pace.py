"""Limit of the work queued on the device by long prompts.

MLX queues any amount of work and waits for it inside a single call, which Ctrl-C cannot end. So a
prompt is submitted in groups of layers, and the next group waits until most of the earlier work is
done. Results do not change.
"""

from __future__ import annotations

import math
import platform
import threading
from collections import deque

import mlx.core as mx

from mlx_llama.core.models.config import LlamaConfig

QUEUED_SECONDS = 0.25  # work that the device may have queued
UNLIMITED = 1 << 16  # tokens
# Multiplications per second of slow devices: MLX's CPU device on Linux measured, Apple's guessed.
SPEEDS = {"gpu": 2e12, "accelerate": 2e11, "cpu": 2e9, "cpu, low-bit": 1e8}


class Pace:
    """Limits the queue of a model. Thread-safe."""

    def __init__(self, config: LlamaConfig, device: mx.Device, is_low_bit: bool = False):
        matrices = [
            math.prod(shape) for name, shape in config.tensor_shapes().items() if ".layers." in name
        ]
        kind = "cpu, low-bit" if is_low_bit else "cpu"
        if is_fast := device.type == mx.gpu or platform.system() == "Darwin":
            kind = "gpu" if device.type == mx.gpu else "accelerate"
        self.limit = QUEUED_SECONDS * SPEEDS[kind]
        # If a single product takes long, only fewer tokens help. Gate and up are a single product.
        tokens = UNLIMITED if is_fast else int(self.limit / (4 * max(matrices)))
        self.width = max(1, min(UNLIMITED, tokens))
        self._layer_work = 2 * sum(matrices) / config.num_hidden_layers  # for a token
        self._collected = 0.0  # work that was not submitted yet
        self._queue: deque[tuple[float, mx.array]] = deque()
        self._lock = threading.Lock()

    def __call__(self, x: mx.array, tokens: int) -> None:
        """Count a layer over `tokens` tokens from `x` on. Waits while too much is queued."""
        with self._lock:
            self._collected += tokens * self._layer_work
            if self._collected < self.limit / 2:
                return
            mx.async_eval(x)
            self._queue.append((self._collected, x))
            self._collected = 0.0
            while len(self._queue) > 1 and sum(work for work, _ in self._queue) > self.limit:
                mx.eval(self._queue[0][1])
                self._queue.popleft()
