"""The Llama in NumPy (Touvron et al. 2023, arXiv 2302.13971; Llama 2, arXiv 2307.09288)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np

from mlx_llama.core.backends.interface import Probe
from mlx_llama.core.backends.model import BaseLlama
from mlx_llama.core.backends.positions import CHECKPOINT, checked_tokens
from mlx_llama.core.backends.profile import Profile, clock_ops, name_matrices
from mlx_llama.core.errors import BackendError
from mlx_llama.core.files.checkpoint import Checkpoint
from mlx_llama.core.options import LoadOptions, default_threads
from mlx_llama.core.system import machine

from . import facts, ops, runtime
from .cache import Cache, View
from .kernels import find_target
from .weights import Weights


class Llama(BaseLlama):
    """The model over NumPy arrays, or as compiled programs (kernels/runner.py)."""

    ops, cache_type = ops, Cache
    _tile: int | None = None  # tokens that share a pass over the weights

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, options: LoadOptions = LoadOptions(), device: str = "cpu"
    ) -> Llama:
        """Build the model: `compile` False means plain NumPy; True and `batch_invariant` require
        compiled kernels. Raises BackendError for an option that is not available here,
        OutOfMemoryError.
        """
        config, threads, cache_bits = checkpoint.config, options.threads, options.cache_bits
        states = cache_bits, options.checkpoints, options.swa_full
        activations = runtime.pick_dtype(options.dtype, checkpoint.dtype, device)
        target, reason = None, "`compile=False` asks for it"
        if options.compile is not False:
            target, reason = find_target()
        if target is None and options.compile:
            raise BackendError(
                f"`compile`: compiled kernels are unavailable here ({reason}): leave it out"
            )
        if target is None and not (threads is options.activation_bits is None):
            flag = "`threads`" if threads is not None else "`activation_bits`"
            raise BackendError(
                f"{flag} is for the compiled path, which is unavailable here ({reason}): leave "
                "it out"
            )
        if target is None and options.batch_invariant:
            raise BackendError(
                "`batch_invariant`: plain NumPy's products depend on their shapes, and there are "
                f"no compiled kernels ({reason}): leave it out"
            )
        if target is None:
            notices = (f"plain NumPy: {reason}",)
            return cls(config, Weights(checkpoint), activations, device, notices, *states)
        cores = machine.physical_cores()
        reason = ""
        if threads is None:
            threads = default_threads(checkpoint.nbytes, cores)
            reason = f" on {cores} cores, for a small model" if threads < cores else ""
        bits = options.activation_bits or (32 if options.dtype == "float32" else 16)
        parts = [f"{threads} thread{'s' if threads > 1 else ''}{reason}"]
        low_bit = any(facts.has_integers(tensor) for tensor in checkpoint.tensors.values())
        if low_bit:
            parts.append(f"low-bit weights times {bits}-bit activations")
        weights = Weights(checkpoint, target, threads, bits, cache_bits)
        if weights.code.recipe.rounds_to_bfloat16:
            parts.append("bfloat16 weights times bfloat16 activations")
        notices = (", ".join(parts),)
        if threads > cores:
            notices += (
                f"{threads} threads wait for each other on {cores} cores: `threads` {cores} is "
                "faster",
            )
        model = cls(config, weights, activations, device, notices, *states)
        model._tile = target.tile if low_bit else target.float_tile
        from .kernels import ops as words
        from .kernels.runner import Runner

        model.runner = Runner(
            model.decoder.over(words), config, weights.code, threads, weights.rank
        )
        return model

    @property
    def is_batch_invariant(self) -> bool:
        return self.runner is not None  # compiled kernels

    @property
    def verify_width(self) -> int:
        return self._tile or super().verify_width

    @property
    def prefill_width(self) -> int:
        # Programs run for this many tokens at a time anyway, and so their progress is seen.
        if self.runner and self.config.recurrent:
            return CHECKPOINT  # where their states are kept
        return self.runner.width if self.runner else super().prefill_width

    def profile(self) -> AbstractContextManager[Profile]:
        """Clock the operations of all calls until the context ends. Results do not change."""
        if self.runner:
            from .kernels.profile import clock_programs

            return clock_programs(self.runner, name_matrices(self))
        note = "plain NumPy, with a clock around each operation"
        return clock_ops(self, (ops,), lambda results: None, note)

    def _logits(
        self,
        tokens: np.ndarray,
        index_pos: int | Sequence[int],
        cache: Cache,
        rows: Sequence[int] | None,
        all_positions: bool = False,
        probe: Probe | None = None,
    ) -> np.ndarray:
        if self.runner is None:
            return super()._logits(tokens, index_pos, cache, rows, all_positions, probe)
        tokens = checked_tokens(tokens, self.config.vocab_size)
        with View(cache, tokens, index_pos, rows) as view:
            view.listener = probe
            return self.runner.forward(tokens, view, all_positions, probe)
