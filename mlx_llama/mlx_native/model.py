"""The Llama in MLX (Touvron et al. 2023, arXiv 2302.13971; Llama 2, arXiv 2307.09288)."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial

import mlx.core as mx

from mlx_llama.core.backends.interface import Masks
from mlx_llama.core.backends.positions import checked_tokens
from mlx_llama.core.backends.profile import Profile, clock_ops
from mlx_llama.core.errors import BackendError, ContextError
from mlx_llama.core.files.checkpoint import Checkpoint
from mlx_llama.core.files.quantized import AffineWeight
from mlx_llama.core.llama import Decoder
from mlx_llama.core.models import rope
from mlx_llama.core.models.config import LlamaConfig

from . import ops, runtime
from .cache import Cache
from .kernels.draw import draw, sample
from .kernels.pace import Pace
from .kernels.packing import Packing, Parts
from .kernels.trace import Runner
from .kernels.view import StepView
from .kernels.wired import wire
from .ranks import Ranks, Vocabulary
from .sampling import SamplingBatch
from .weights import Weights

CHUNK = 64  # tokens of a call from which MLX's buffer cache is cleared, since the next chunk has other shapes


class Llama:
    """Embedding, blocks, final norm and projection to the vocabulary. Immutable once loaded."""

    def __init__(self, config: LlamaConfig, weights: Weights, dtype: mx.Dtype, device: mx.Device = mx.Device(mx.cpu),
                 notices: tuple[str, ...] = (), cache_bits: int | None = None):
        """Take all weights from `weights`."""
        self.config, self.dtype, self.device, self.notices = config, dtype, device, notices
        self.cache_bits = cache_bits
        self._vocabulary = weights.vocabulary  # None: the head computes all logits
        self.adapters = tuple(adapter.name for adapter in weights.adapters)
        self.decoder = Decoder.build(ops, weights)
        self._runner: Runner | None = None  # None: a decode step is a forward over one token
        self._pace = Pace(config, device)

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: str = "auto", device: mx.Device = mx.Device(mx.cpu),
             compile: bool | None = None, cache_bits: int | None = None, ranks: Ranks | None = None) -> Llama:
        """Build the model; weights keep their stored width.

        compile: trace decode steps (None: on a GPU only). cache_bits: of keys and values, 8, 16 or None for the activations'
        width. ranks: processes that each load a share of the weights and make the same calls; None: only this process.
        Raises BackendError if `compile` is not possible here, OutOfMemoryError.
        """
        config = checkpoint.config
        activations = runtime.pick_dtype(dtype, checkpoint.dtype, device)
        compile, reason = _decide_compile(config, device, compile)
        weights = Weights(checkpoint, activations, device, ranks)
        notices = (f"decoding is not compiled: {reason}",) if reason else ()
        model = cls(weights.config, weights, activations, device, (*notices, *weights.notices), cache_bits)
        low_bit = any(isinstance(tensor, AffineWeight) for tensor in checkpoint.tensors.values())
        model._pace = Pace(config, device, low_bit)
        if not rope.length_dependent(config):
            model._runner = Runner(model._advance, compile, model._vocabulary.sample if ranks else sample)
        wire(model, device)
        return model

    @property
    def is_batch_invariant(self) -> bool:
        """True if a row is bit-identical whatever else is in the batch. False: MLX's products depend on their shapes."""
        return False

    @property
    def verify_width(self) -> int:
        """Number of positions that `verify` computes for little more than the cost of a step."""
        return 16  # an estimate, not measured on Metal

    @property
    def prefill_width(self) -> int:
        """Maximum number of prompt tokens in a call, so that Ctrl-C takes effect soon."""
        return self._pace.width

    def profile(self) -> AbstractContextManager[Profile]:
        """Clock the operations of all calls until the context ends. Evaluates after each, which breaks the lazy graph.

        Raises BackendError for traced steps, whose operations cannot be clocked separately.
        """
        if self._runner and self._runner.compile:
            raise BackendError("a traced step cannot be profiled by operation: load the model with --no-compile")
        return clock_ops(self, ops, mx.eval, "an evaluation after each operation, which breaks the lazy graph: shares count, "
                         "not sums. Keys and values are stored when attention reads them")

    def make_cache(self, capacity: int, rows: int = 1) -> Cache:
        """An empty cache for `rows` sequences of at most `capacity` positions each. Raises ContextError below 1."""
        cache = Cache(self.config, capacity, self.dtype, self.device, rows, self.cache_bits)
        cache.pace = self._pace
        cache.adapters = [min(1, len(self.adapters))] * rows
        return cache

    def forward(self, tokens: mx.array, index_pos: int | Sequence[int], cache: Cache, *, rows: Sequence[int] | None = None,
                all_positions: bool = False, probe=None) -> mx.array:
        """Logits after `tokens`, whose keys and values are appended to the cache.

        tokens: ids [B, T] (list, NumPy or this backend's array); rows: of the cache, one per sequence (None: the first B);
        index_pos: position of the first token, equal to the row's length; one for all or one per row. Returns logits [B, V]
        of the last position, with `all_positions` [B, T, V]. Calls probe(name, array) at every checkpoint of the model, with
        all positions. Raises ContextError if the tokens do not continue the rows or do not fit. A failed call leaves the
        cache unchanged.
        """
        logits = self._forward(tokens, index_pos, cache, rows, all_positions, probe)
        if self._vocabulary:
            with mx.stream(self.device):
                return self._vocabulary.gather(logits)
        return logits

    def _forward(self, tokens: mx.array, index_pos: int | Sequence[int], cache: Cache, rows: Sequence[int] | None,
                 all_positions: bool, probe) -> mx.array:
        """As `forward`; each of several processes gets the logits of its share of the vocabulary."""
        if probe and self._vocabulary:
            probe = self._vocabulary.gather_probes(probe)
        with mx.stream(self.device):
            tokens = mx.array(checked_tokens(tokens, self.config.vocab_size))
            if tokens.shape[1] >= CHUNK:
                mx.clear_cache()
            with cache.view(tokens, index_pos, rows) as view:
                view.listener = probe
                logits = self.decoder(tokens, view, all_positions or probe is not None)
                # Evaluate the stored tokens with the logits; a pending update could not be evaluated in another thread.
                (logits,) = mx.depends([logits], [buffer.tokens for buffer in view.buffers])
            return logits if all_positions else logits[:, -1]

    def _advance(self, window: int, packing: Packing, token: mx.array, position: mx.array, tokens: mx.array,
                 keys: list[Parts], values: list[Parts], tables: tuple, adapters: mx.array | None) -> tuple:
        """Forward over `token` [S, 1], as a function of arrays, which mx.compile traces. Arguments as in StepView.

        Returns the logits [S, V], the recent tokens int32 [S, window], None for window 0, and the buffer's tokens, keys and
        values, updated.
        """
        view = StepView(token, position, tokens, keys, values, tables, packing, adapters)
        logits = self.decoder(token.squeeze(1), view, all_positions=False)
        # Launching the logits launches the stored tokens too; unevaluated updates would grow the graph.
        (logits,) = mx.depends([logits], [view.tokens])
        return logits, view.recent(window) if window else None, view.tokens, view.keys, view.values

    def step(self, tokens: mx.array, index_pos: int | Sequence[int], cache: Cache, sampling: SamplingBatch, *,
             rows: Sequence[int] | None = None, masks: Masks | None = None) -> mx.array:
        """The next token of each row, int32 [B, 1], on the device: forward over `tokens` [B, T] and sampling as one unit.

        tokens: on the host, or the array that the last step over these rows returned. Rows of a step over one token each are
        computed together. masks: returns the tokens that grammars allow. Log-probabilities are returned beside the tokens,
        int32 [B, C], if `sampling` asks for them. Raises ContextError as `forward`.
        """
        with mx.stream(self.device):
            tokens = checked_tokens(tokens, self.config.vocab_size)
            if self._runner and tokens.shape[1] == 1:
                return self._runner.step(tokens, index_pos, cache, sampling, rows, masks)
        return self._draw(self._forward(tokens, index_pos, cache, rows, False, None), cache, sampling, rows, masks,
                          self._vocabulary)

    def sample(self, logits: mx.array, cache: Cache, sampling: SamplingBatch, *, rows: Sequence[int] | None = None,
               masks: Masks | None = None) -> mx.array:
        """The next token of each row as `step` returns it. logits: [B, V] after the rows' last positions, MLX or NumPy."""
        return self._draw(logits, cache, sampling, rows, masks, None)

    def _draw(self, logits: mx.array, cache: Cache, sampling: SamplingBatch, rows: Sequence[int] | None, masks: Masks | None,
              vocabulary: Vocabulary | None) -> mx.array:
        """As `sample`. vocabulary: None if the logits are complete; else they are this process's share of it."""
        chosen = cache.select_rows(len(logits), rows)
        with mx.stream(self.device):
            logits = logits if isinstance(logits, mx.array) else mx.array(logits)
            recent = cache.recent(sampling.window, chosen) if sampling.window else None
            draw_rows = partial(vocabulary.draw_rows, sampling) if vocabulary else sampling
            return draw_rows(logits, [cache.lengths[row] for row in chosen], recent, masks)

    def verify(self, tokens: mx.array, index_pos: int, cache: Cache, sampling: SamplingBatch, *,
               rows: Sequence[int] | None = None) -> mx.array:
        """The token after each of `tokens` [1, T], int32 [1, T], on the device: forward and T samplings as one unit.

        Each equals the sample of a `step` at its position, with the same noise and recent tokens. Products round as in a
        prompt, which may differ from a step. Raises ContextError as `step`, and for several sequences.
        """
        if len(tokens) != 1:
            raise ContextError(f"verify continues one sequence, not a batch of {len(tokens)}")
        logits = self.forward(tokens, index_pos, cache, rows=rows, all_positions=True)
        (row,) = cache.select_rows(1, rows)
        count, length = logits.shape[1], cache.lengths[row]
        lengths = list(range(length - count + 1, length + 1))
        with mx.stream(self.device):
            recent = cache.recent(sampling.window, [row] * count, lengths) if sampling.window else None
            drawn = draw(sampling.kind, logits[0], mx.array(lengths, mx.uint32), recent, sampling.arrange((0,) * count))
            return drawn.reshape(1, count)


def _decide_compile(config: LlamaConfig, device: mx.Device, requested: bool | None) -> tuple[bool, str]:
    """Whether to trace steps, and the reason if not. Raises BackendError if `requested` is not possible."""
    if rope.length_dependent(config):
        reason = "the angles of dynamic rope depend on the length"
        if requested:
            raise BackendError(f"--compile: {reason}, leave it out")
        return False, reason
    if requested is False:
        return False, "--no-compile asks for it"
    if device.type == mx.cpu and requested and shutil.which("g++") is None:
        raise BackendError("--compile: MLX compiles for its CPU device with g++, which is not installed: install it, or leave "
                           "--compile out")
    if device.type == mx.cpu and not requested:
        return False, "on its CPU device MLX would call a C++ compiler at the first token; --compile asks for it"
    return True, ""
