"""The Llama in MLX (Touvron et al. 2023, arXiv 2302.13971; Llama 2, arXiv 2307.09288)."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_llama.core.backends.interface import Masks, Probe
from mlx_llama.core.backends.model import BaseLlama
from mlx_llama.core.backends.positions import checked_tokens
from mlx_llama.core.backends.profile import Profile, clock_ops
from mlx_llama.core.errors import BackendError
from mlx_llama.core.files.checkpoint import Checkpoint
from mlx_llama.core.files.quantized import AffineWeight
from mlx_llama.core.models import rope
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.options import LoadOptions

from . import ops, runtime
from .arrays import SamplingBatch
from .cache import Cache
from .kernels.buffers import Packing
from .kernels.pace import Pace
from .kernels.trace import Runner
from .kernels.view import StepView
from .ranks import Ranks
from .weights import Weights

# tokens of a call from which MLX's buffer cache is cleared, since the next chunk has other shapes
CHUNK = 64


class Llama(BaseLlama):
    """The model over MLX's lazy arrays. Decode steps are traced (kernels/trace.py)."""

    ops, cache_type = ops, Cache
    pace: Pace  # measures long prompts

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        options: LoadOptions = LoadOptions(),
        device: mx.Device = mx.Device(mx.cpu),
        ranks: Ranks | None = None,
    ) -> Llama:
        """Build the model. ranks: as of BaseWeights. Raises OutOfMemoryError, and BackendError if
        `compile` (None: on a GPU only) is not possible here.
        """
        config = checkpoint.config
        activations = runtime.pick_dtype(options.dtype, checkpoint.dtype, device)
        compile, reason = _decide_compile(config, device, options.compile)
        weights = Weights(checkpoint, activations, device, ranks)
        notices = (f"decoding is not compiled: {reason}",) if reason else ()
        notices = (*notices, *weights.notices)
        states = options.cache_bits, options.checkpoints, options.swa_full
        model = cls(weights.config, weights, activations, device, notices, *states)
        low_bit = any(isinstance(tensor, AffineWeight) for tensor in checkpoint.tensors.values())
        model.pace = Pace(config, device, low_bit)
        if not rope.length_dependent(config):
            model.runner = Runner(model._advance, compile, model.vocabulary)
        runtime.wire(model, device)
        return model

    @property
    def prefill_width(self) -> int:
        return self.pace.width

    def profile(self) -> AbstractContextManager[Profile]:
        """Clock the operations of all calls, which breaks the lazy graph. Raises BackendError for
        traced steps, whose operations cannot be clocked separately.
        """
        if self.runner and self.runner.compile:
            raise BackendError(
                "a traced step cannot be profiled by operation: load the model with `compile=False`"
            )
        note = (
            "an evaluation after each operation, which breaks the lazy graph: shares count, "
            "not sums. Keys and values are stored when attention reads them"
        )
        return clock_ops(self, (ops,), mx.eval, note)

    def make_cache(self, capacity: int, rows: int = 1) -> Cache:
        cache = super().make_cache(capacity, rows)
        cache.pace = self.pace
        return cache

    def scope(self) -> AbstractContextManager[object]:
        return mx.stream(self.device)

    def _send(self, array: mx.array | np.ndarray) -> mx.array:
        return array if isinstance(array, mx.array) else mx.array(array)

    def step(
        self,
        tokens: mx.array | np.ndarray,
        index_pos: int | Sequence[int],
        cache: Cache,
        sampling: SamplingBatch,
        *,
        rows: Sequence[int] | None = None,
        masks: Masks | None = None,
    ) -> mx.array:
        """As BaseLlama.step. Rows of a step over one token each are computed together."""
        tokens = checked_tokens(tokens, self.config.vocab_size)
        if self.runner is None or tokens.shape[1] > 1:
            return super().step(tokens, index_pos, cache, sampling, rows=rows, masks=masks)
        with self.scope():
            return self.runner.step(tokens, index_pos, cache, sampling, rows, masks)

    def _logits(
        self,
        tokens: mx.array | np.ndarray,
        index_pos: int | Sequence[int],
        cache: Cache,
        rows: Sequence[int] | None,
        all_positions: bool = False,
        probe: Probe | None = None,
    ) -> mx.array:
        if probe and self.vocabulary:
            probe = self.vocabulary.gather_probes(probe)
        tokens = self._send(checked_tokens(tokens, self.config.vocab_size))
        if tokens.shape[1] >= CHUNK:
            mx.clear_cache()
        with cache.view(tokens, index_pos, rows) as view:
            view.listener = probe
            logits = self.decoder(tokens, view, all_positions or probe is not None)
            # Launch what is stored with the logits; unevaluated updates would grow the graph.
            stored = [buffer.tokens for buffer in view.buffers]
            stored += [array for states in view.states for array in states]
            (logits,) = mx.depends([logits], stored)
        return logits if all_positions else logits[:, -1]

    def _advance(self, window: int, packing: Packing, token: mx.array, *state: Any) -> tuple:
        """Forward over `token` [S, 1] for mx.compile; arguments as of StepView. Returns the logits
        [S, V], the recent tokens int32 [S, window] or None, and the buffer's tokens, keys, values
        and recurrent states.
        """
        view = StepView(packing, token, *state)
        logits = self.decoder(token.squeeze(1), view, all_positions=False)
        # Launch what is stored with the logits; unevaluated updates would grow the graph.
        stored = [view.tokens, *(array for states in view.states for array in states)]
        (logits,) = mx.depends([logits], stored)
        recent = view.recent(window) if window else None
        return logits, recent, view.tokens, view.keys, view.values, view.states


def _decide_compile(
    config: LlamaConfig, device: mx.Device, requested: bool | None
) -> tuple[bool, str]:
    """Decide whether to trace steps, with the reason if not. Raises BackendError."""
    if rope.length_dependent(config):
        reason = "the angles of dynamic rope depend on the length"
        if requested:
            raise BackendError(f"`compile`: {reason}, leave it out")
        return False, reason
    if requested is False:
        return False, "`compile=False` asks for it"
    if device.type == mx.cpu and requested and shutil.which("g++") is None:
        raise BackendError(
            "`compile`: MLX compiles for its CPU device with g++, which is not installed: install "
            "it, or leave `compile` out"
        )
    if device.type == mx.cpu and not requested:
        reason = "on its CPU device MLX would call a C++ compiler at the first token"
        return False, f"{reason}; `compile` asks for it"
    return True, ""
