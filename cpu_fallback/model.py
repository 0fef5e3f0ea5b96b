"""The Llama in NumPy (Touvron et al. 2023, arXiv 2302.13971; Llama 2, arXiv 2307.09288)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np

from mlx_llama.core.backends.interface import Masks
from mlx_llama.core.backends.load_options import default_threads
from mlx_llama.core.backends.positions import checked_tokens
from mlx_llama.core.backends.profile import Profile, clock_ops, name_matrices
from mlx_llama.core.errors import BackendError, ContextError
from mlx_llama.core.files.checkpoint import Checkpoint
from mlx_llama.core.files.quantized import AffineWeight
from mlx_llama.core.llama import Decoder
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.system import machine

from . import ops, runtime
from .cache import Cache
from .kernels import compilation
from .sampling import SamplingBatch
from .weights import Weights


class Llama:
    """Embedding, blocks, final norm and projection to the vocabulary. Immutable after loading."""

    def __init__(self, config: LlamaConfig, weights: Weights, dtype: np.dtype, device: str = "cpu",
                 notices: tuple[str, ...] = (), cache_bits: int | None = None):
        """Take all weights from `weights`."""
        self.config, self.dtype, self.device, self.notices = config, dtype, device, notices
        self.cache_bits = cache_bits  # of keys and values; None: float32
        self.adapters = tuple(adapter.name for adapter in weights.adapters)
        self.decoder = Decoder.build(ops, weights)
        self._runner = None  # kernels.runner.Runner of the compiled programs; None: NumPy
        self._tile: int | None = None  # tokens that share a pass over the weights

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: str = "auto", device: str = "cpu", threads: int | None = None,
             activation_bits: int | None = None, compile: bool | None = None, cache_bits: int | None = None,
             batch_invariant: bool | None = None) -> Llama:
        """Build the model; weights keep their stored width.

        compile: False for plain NumPy, True to require compiled kernels, None to use them if available. threads: of the
        compiled path (None: one per physical core, fewer for a small model). activation_bits: 8, 16 or 32, for products
        with low-bit weights (None: 16, or 32 with dtype "float32"). cache_bits: 8 to store keys and values as int8 codes,
        16 as float16 (None: float32). batch_invariant: True to require compiled kernels, whose rows do not depend on each
        other. Raises BackendError for an option that is not available here, OutOfMemoryError.
        """
        config = checkpoint.config
        activations = runtime.pick_dtype(dtype, checkpoint.dtype, device)
        target, reason = (None, "--no-compile asks for it") if compile is False else compilation.find_target()
        if target is None and compile:
            raise BackendError(f"--compile: compiled kernels are unavailable here ({reason}): leave it out")
        if target is None and (threads is not None or activation_bits is not None):
            flag = "--threads" if threads is not None else "--activation-bits"
            raise BackendError(f"{flag} is for the compiled path, which is unavailable here ({reason}): leave it out")
        if target is None and batch_invariant:
            raise BackendError("--batch-invariant: plain NumPy's products depend on their shapes, and there are no compiled "
                               f"kernels ({reason}): leave it out")
        if target is None:
            return cls(config, Weights(checkpoint), activations, device, (f"plain NumPy: {reason}",), cache_bits)
        cores = machine.physical_cores()
        reason = ""
        if threads is None:
            threads = default_threads(checkpoint.nbytes, cores)
            reason = f" on {cores} cores, for a small model" if threads < cores else ""
        bits = activation_bits or (32 if dtype == "float32" else 16)
        parts = [f"{threads} thread{'s' if threads > 1 else ''}{reason}"]
        low_bit = any(isinstance(tensor, AffineWeight) for tensor in checkpoint.tensors.values())
        if low_bit:
            parts.append(f"low-bit weights times {bits}-bit activations")
        weights = Weights(checkpoint, compilation.Compilation(target, threads, bits, cache_bits))
        if weights.code.recipe.rounds_to_bfloat16:
            parts.append("bfloat16 weights times bfloat16 activations")
        notices = (", ".join(parts),)
        if threads > cores:
            notices += (f"{threads} threads wait for each other on {cores} cores: --threads {cores} is faster",)
        model = cls(config, weights, activations, device, notices, cache_bits)
        model._tile = target.tile if low_bit else target.float_tile
        from .kernels import ops as words
        from .kernels.runner import Runner

        model._runner = Runner(model.decoder.over(words), config, weights.code, threads, weights.rank)
        return model

    @property
    def is_batch_invariant(self) -> bool:
        """True if a row is bit-identical whatever else is in the batch or in its chunk: with compiled kernels."""
        return self._runner is not None

    @property
    def verify_width(self) -> int:
        """Number of positions that `verify` computes for little more than the cost of a step."""
        return self._tile or 16

    @property
    def prefill_width(self) -> int:
        """Maximum number of prompt tokens in a call, so that Ctrl-C takes effect soon and progress is seen.

        Any number would do for Ctrl-C, since a call is computed in parts; compiled programs run for this many tokens at a
        time.
        """
        return self._runner.width if self._runner else 1 << 16

    def profile(self) -> AbstractContextManager[Profile]:
        """Clock the operations of all calls until the context ends, which completes the profile. Results do not change."""
        if self._runner:
            from .kernels.profile import clock_programs

            return clock_programs(self._runner, name_matrices(self))
        return clock_ops(self, ops, lambda results: None, "plain NumPy, with a clock around each operation")

    def make_cache(self, capacity: int, rows: int = 1) -> Cache:
        """An empty cache for `rows` sequences of at most `capacity` positions each. Raises ContextError below 1."""
        cache = Cache(self.config, capacity, self.dtype, self.device, rows, self.cache_bits)
        cache.adapters = [min(1, len(self.adapters))] * rows
        return cache

    def forward(self, tokens: np.ndarray, index_pos: int | Sequence[int], cache: Cache, *,
                rows: Sequence[int] | None = None, all_positions: bool = False, probe=None) -> np.ndarray:
        """Logits after `tokens`, whose keys and values are appended to the cache.

        tokens: ids [B, T] (list, NumPy or this backend's array); rows: of the cache, one per sequence (None: the first B);
        index_pos: position of the first token, equal to the row's length; one for all or one per row. Returns float32
        logits [B, V] of the last position, with `all_positions` [B, T, V]. Calls probe(name, array) at every checkpoint of
        the model, with all positions. Raises ContextError if the tokens do not continue the rows or do not fit. A failed
        call leaves the cache unchanged.
        """
        tokens = checked_tokens(tokens, self.config.vocab_size)
        with cache.view(tokens, index_pos, rows) as view:
            if self._runner:
                return self._runner.forward(tokens, view, all_positions, probe)
            view.listener = probe
            logits = self.decoder(tokens, view, all_positions or probe is not None)
        return logits if all_positions else logits[:, -1]

    def step(self, tokens: np.ndarray, index_pos: int | Sequence[int], cache: Cache, sampling: SamplingBatch, *,
             rows: Sequence[int] | None = None, masks: Masks | None = None) -> np.ndarray:
        """The next token of each row, int32 [B, 1], on the device: forward over `tokens` [B, T] and sampling as one unit.

        masks: returns the tokens that grammars allow. Log-probabilities are returned beside the tokens if `sampling` asks
        for them. Raises ContextError as `forward`.
        """
        return self.sample(self.forward(tokens, index_pos, cache, rows=rows), cache, sampling, rows=rows, masks=masks)

    def sample(self, logits: np.ndarray, cache: Cache, sampling: SamplingBatch, *, rows: Sequence[int] | None = None,
               masks: Masks | None = None) -> np.ndarray:
        """The next token of each row as `step` returns it. logits: [B, V] after the rows' last positions."""
        chosen = cache.select_rows(len(logits), rows)
        recent = cache.recent(sampling.window, chosen) if sampling.window else None
        return sampling(logits, [cache.lengths[row] for row in chosen], recent, masks)

    def verify(self, tokens: np.ndarray, index_pos: int, cache: Cache, sampling: SamplingBatch, *,
               rows: Sequence[int] | None = None) -> np.ndarray:
        """The token after each of `tokens` [1, T], int32 [1, T], on the device: forward and T samplings as one unit.

        Each equals the sample of a `step` at its position, with the same noise and recent tokens. NumPy's products
        round as in a prompt, which may differ from a step; compiled kernels give the same bits. Raises ContextError as
        `step`, and for several sequences.
        """
        if len(tokens) != 1:
            raise ContextError(f"verify continues one sequence, not a batch of {len(tokens)}")
        logits = self.forward(tokens, index_pos, cache, rows=rows, all_positions=True)
        chosen, drawn = cache.select_rows(1, rows), []
        first = cache.lengths[chosen[0]] - logits.shape[1] + 1
        for i in range(logits.shape[1]):
            recent = cache.recent(sampling.window, chosen, [first + i]) if sampling.window else None
            drawn.append(sampling(logits[:, i], [first + i], recent))
        return np.concatenate(drawn, axis=1)
