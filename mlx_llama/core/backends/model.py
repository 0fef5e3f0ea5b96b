"""BaseLlama: what the backends' models share, all that needs no array operation of its own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, ClassVar

from mlx_llama.core.dtypes import dtype_name
from mlx_llama.core.errors import ContextError
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.ops import Array, Probe
from mlx_llama.core.options import CHECKPOINTS
from mlx_llama.core.sample import Masks, SamplingBatch

from .build import build_decoder
from .positions import Positions, checked_tokens
from .profile import Profile


class BaseLlama:
    """A Llama over a backend's ops, immutable once loaded. A backend replaces `scope`, `_send`,
    `_logits` and `step` where its arrays need it.
    """

    ops: ClassVar[ModuleType]
    cache_type: ClassVar[type]
    # positions that `verify` takes for little more than a step costs; an estimate
    verify_width = 16
    # most prompt tokens of a call that Ctrl-C does not wait long for; parts are computed one by one
    prefill_width = 1 << 16
    prefill_chunk = 512  # tokens of a prompt's chunk where the request asks for no other size

    def __init__(
        self,
        config: LlamaConfig,
        weights: Any,
        dtype: Any,
        device: Any = "cpu",
        notices: tuple[str, ...] = (),
        cache_bits: int | None = None,
        checkpoints: int | None = None,
        swa_full: bool | None = False,
    ):
        """Take all weights from `weights`, a backend's. checkpoints: of a row, None for 8.
        swa_full: layers with a window keep all positions.
        """
        self.checkpoints, self.swa_full = checkpoints, swa_full
        self.config, self.dtype, self.device, self.cache_bits = config, dtype, device, cache_bits
        self.dtype_name = dtype_name(dtype)
        # rows of a new cache have number 1, the first, or 0 where there is none
        self.adapters = tuple(adapter.name for adapter in weights.adapters)
        self.decoder = build_decoder(self.ops, weights)
        self._notices = (*config.notices, *notices)
        self.vocabulary = weights.vocabulary  # None: the head computes all logits
        self.runner: Any = None  # runs decoded tokens; None: a step is a forward

    @property
    def notices(self) -> tuple[str, ...]:
        """Lines about the config, precision and compilation."""
        return self._notices

    @property
    def is_batch_invariant(self) -> bool:
        """True if a row has the same bits whatever else is in the batch, and with any chunks."""
        return False

    def profile(self) -> AbstractContextManager[Profile]:
        """Clock the model's operations while the context lasts."""
        raise NotImplementedError

    def make_cache(self, capacity: int, rows: int = 1) -> Positions:
        """An empty cache for `rows` sequences of `capacity` positions. Raises ContextError."""
        cache = self.cache_type(
            self.config, capacity, self.dtype, self.device, rows, self.cache_bits
        )
        cache.max_checkpoints = self.checkpoints or CHECKPOINTS
        cache.window_nbytes = {} if self.swa_full else cache.window_nbytes
        cache.adapters = [min(1, len(self.adapters))] * rows
        return cache

    def forward(
        self,
        tokens: Array,
        index_pos: int | Sequence[int],
        cache: Positions,
        *,
        rows: Sequence[int] | None = None,
        all_positions: bool = False,
        probe: Probe | None = None,
    ) -> Array:
        """Logits after `tokens`, whose keys and values are appended to rows of the cache.

        tokens: ids [B, T] (list, NumPy or this backend's array); index_pos: position of the first,
        equal to the row's length, one for all or one per row; rows: of the cache, one per sequence
        (None: the first B). Returns logits [B, V] of the last position, with `all_positions` [B, T,
        V]. Calls probe(name, array) at every checkpoint of the model, with all positions. Raises
        ContextError if the tokens do not continue the rows or do not fit. A failed call leaves the
        cache as it was.
        """
        with self.scope():
            logits = self._logits(tokens, index_pos, cache, rows, all_positions, probe)
            return self.vocabulary.gather(logits) if self.vocabulary else logits

    def step(
        self,
        tokens: Array,
        index_pos: int | Sequence[int],
        cache: Positions,
        sampling: SamplingBatch,
        *,
        rows: Sequence[int] | None = None,
        masks: Masks | None = None,
    ) -> Array:
        """Each row's next token, int32 [B, 1] on the device: forward over [B, T] and sampling.

        tokens: on the host, or the array that the last step over these rows returned; the others as
        in `forward`. masks: gives the tokens that grammars allow. Log-probabilities stand beside
        the tokens if `sampling` has them, int32 [B, C]. Raises ContextError as `forward`.
        """
        with self.scope():
            logits = self._logits(tokens, index_pos, cache, rows)
            return self._sample(logits, cache, sampling, rows, masks, self.vocabulary)

    def sample(
        self,
        logits: Array,
        cache: Positions,
        sampling: SamplingBatch,
        *,
        rows: Sequence[int] | None = None,
        masks: Masks | None = None,
    ) -> Array:
        """The next tokens as `step` returns them. logits: [B, V] after the rows, also NumPy's."""
        rows = cache.select_rows(len(logits), rows)
        with self.scope():
            return self._sample(self._send(logits), cache, sampling, rows, masks)

    def verify(
        self,
        tokens: Array,
        index_pos: int,
        cache: Positions,
        sampling: SamplingBatch,
        *,
        rows: Sequence[int] | None = None,
    ) -> Array:
        """The token after each of `tokens` [1, T], int32 [1, T] on the device.

        Each is drawn as `step` would draw it there, with its position's noise and the recent tokens
        up to it. Unless the model is batch-invariant, products round as a prompt's. Raises
        ContextError as `step`, and for several sequences.
        """
        if len(tokens) != 1:
            raise ContextError(f"verify continues one sequence, not a batch of {len(tokens)}")
        (row,) = cache.select_rows(1, rows)
        with self.scope():
            logits = self._logits(tokens, index_pos, cache, [row], all_positions=True)
            logits = self.vocabulary.gather(logits)[0] if self.vocabulary else logits[0]
            count, end = len(logits), cache.lengths[row] + 1
            lengths, batch = range(end - count, end), sampling.repeat(count)
            recent = cache.recent(batch.window, [row] * count, lengths) if batch.window else None
            return batch(logits, lengths, recent).reshape(1, count)

    def scope(self) -> AbstractContextManager[object]:
        """The context of a call on the model's device."""
        return nullcontext()

    def _send(self, array: Array) -> Array:
        """An array on the model's device. array: ids or logits, also NumPy's."""
        return array

    def _logits(
        self,
        tokens: Array,
        index_pos: int | Sequence[int],
        cache: Positions,
        rows: Sequence[int] | None,
        all_positions: bool = False,
        probe: Probe | None = None,
    ) -> Array:
        """As `forward`, with this process's share of the vocabulary."""
        if probe and self.vocabulary:
            probe = self.vocabulary.gather_probes(probe)
        tokens = self._send(checked_tokens(tokens, self.config.vocab_size))
        with cache.view(tokens, index_pos, rows) as view:
            view.listener = probe
            logits = self.decoder(tokens, view, all_positions or probe is not None)
        return logits if all_positions else logits[:, -1]

    def _sample(
        self,
        logits: Array,
        cache: Positions,
        sampling: SamplingBatch,
        rows: Sequence[int] | None,
        masks: Masks | None,
        vocabulary: Any = None,
    ) -> Array:
        """As `sample`, of rows that are checked. vocabulary: of which the logits are this process's
        share; None for all.
        """
        rows = range(len(logits)) if rows is None else rows
        recent = cache.recent(sampling.window, rows) if sampling.window else None
        positions = [cache.lengths[row] for row in rows]
        return sampling(logits, positions, recent, masks, vocabulary)
