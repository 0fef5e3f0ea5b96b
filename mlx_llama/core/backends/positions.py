"""The host's side of a cache: how many positions are filled, where the next rows go, what they may see.

Positions are plain ints, known without asking the device; every backend's `Cache` is built on this bookkeeping.
"""

from __future__ import annotations

from typing import Any, Mapping

import numpy as np

from mlx_llama.core.errors import ContextError
from mlx_llama.core.models.config import LlamaConfig

GROWTH = 256  # positions that storage grows by at least: one copy per 256 tokens instead of one per token


def position_nbytes(config: LlamaConfig, itemsize: int) -> int:
    """Bytes of the keys and values of one position, all layers together; itemsize: of one number."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * itemsize


class Positions:
    """length: positions filled. capacity: positions allowed at most. allocated: positions that storage has room for."""

    def __init__(self, config: LlamaConfig, capacity: int, itemsize: int):
        if capacity < 1:
            raise ContextError(f"a cache of {capacity} positions holds nothing: ask for at least 1")
        self.config = config
        self.capacity = capacity
        self.itemsize = itemsize  # bytes of one number of the keys and values
        self.length = 0

    def room_for(self, index_pos: int, count: int) -> int:
        """Check that `count` new positions from `index_pos` fit; returns the positions that storage must have.

        Raises ContextError when index_pos is not where the cache ends, or the capacity is exceeded.
        """
        if index_pos != self.length:
            raise ContextError(f"index_pos is {index_pos} but the cache holds {self.length} positions: "
                               f"trim({index_pos}) or continue at {self.length}")
        if count < 1:
            raise ContextError("forward needs at least one token")
        end = index_pos + count
        if end > self.capacity:
            raise ContextError(f"{end} positions do not fit the cache's capacity of {self.capacity}")
        return self.storage_for(end)

    def storage_for(self, end: int) -> int:
        """Positions that storage has room for once it holds `end`: whole steps, of an eighth of it where that is more, so
        that a long sequence is copied (and a step traced) a few times only."""
        step = max(GROWTH, 1 << max(0, end.bit_length() - 4))
        return min(-(-end // step) * step, self.capacity)

    def reserve(self, batch: int, index_pos: int, count: int) -> None:
        """Make room in storage for `count` new positions from `index_pos` of `batch` sequences. Raises ContextError."""
        allocated = self.room_for(index_pos, count)
        if self.tokens is not None:
            self.check_batch(batch, self.tokens.shape[0])
        if allocated > self.allocated:
            self.check_memory(batch, index_pos + count)
            self._grow(batch, allocated)

    def check_memory(self, batch: int, end: int) -> None:
        """Raises ContextError when storage for `end` positions of `batch` sequences takes more memory than is free."""
        allocated = self.storage_for(end)
        needed = batch * allocated * position_nbytes(self.config, self.itemsize)
        if allocated <= self.allocated or needed < 1 << 20:
            return
        free = self.free_memory()
        if free is not None and needed > free:
            raise ContextError(f"keys and values of {allocated} positions take {needed / 1e9:.2f} GB, and {free / 1e9:.2f} GB "
                               f"of memory are free: shorten the prompt, lower --ctx-size, or close other programs")

    def check_batch(self, batch: int, held: int) -> None:
        """Raises ContextError unless a call's batch size is the one the cache was begun with."""
        if batch != held:
            raise ContextError(f"a batch of {batch} sequences cannot continue a cache of {held}: reset it first")

    def check_trim(self, length: int) -> None:
        """Raises ContextError unless 0 <= length <= self.length."""
        if not 0 <= length <= self.length:
            raise ContextError(f"cannot trim to {length} positions: the cache holds {self.length}")

    def check_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Raises ContextError unless `state` (see Cache.state) has this model's shapes and fits the capacity."""
        if not state:
            return
        c = self.config
        B, length = np.shape(state["tokens"])
        expected = (c.num_hidden_layers, B, c.num_key_value_heads, length, c.head_dim)
        for name in ("keys", "values"):
            if np.shape(state[name]) != expected:
                raise ContextError(f"the saved cache's {name} have the shape {list(np.shape(state[name]))}, "
                                   f"this model needs {list(expected)}: it was saved by another model")
        if length > self.capacity:
            raise ContextError(f"the saved cache holds {length} positions, this one at most {self.capacity}")


class CallView:
    """The host's side of one call on a cache: `count` new positions from `index_pos` on, of `batch` sequences.

    A context manager: the cache counts the new positions when the block ends without an exception, and is as it was
    otherwise. Every backend's `View` is built on it.
    """

    def __init__(self, cache: Positions, batch: int, count: int, index_pos: int):
        """Makes room in the cache's storage. Raises ContextError."""
        cache.reserve(batch, index_pos, count)
        self.cache, self.config = cache, cache.config
        self.batch, self.count, self.index_pos, self.end = batch, count, index_pos, index_pos + count

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.cache.length = self.end

    def first_visible(self, window: int | None) -> int:
        """The first column that any of the new queries sees: 0 without a sliding window."""
        return max(0, self.index_pos + 1 - window) if window else 0

    def visible(self, window: int | None) -> np.ndarray | None:
        """Columns that each new query sees: bool [count, end - first_visible], True where visible.

        None where every query sees every column (a single token). A query at position p sees the columns c <= p,
        with a sliding window those with c > p - window (Mistral 7B, arXiv 2310.06825).
        """
        if self.count == 1:
            return None
        rows = np.arange(self.index_pos, self.end)[:, None]
        columns = np.arange(self.first_visible(window), self.end)[None, :]
        mask = columns <= rows
        if window:
            mask &= columns > rows - window
        return mask


def checked_tokens(tokens: Any, vocab_size: int) -> Any:
    """Token ids given on the host (list or NumPy) as int32 [B, T]; a device array passes as it is.

    Raises ContextError for an empty or ragged batch and for ids outside the vocabulary.
    """
    if not isinstance(tokens, (list, tuple, np.ndarray)):
        return tokens
    try:
        array = np.asarray(tokens)
    except ValueError:
        raise ContextError("the rows of a batch of tokens must have one length") from None
    if array.ndim != 2 or array.size == 0 or array.dtype.kind not in "iu":
        raise ContextError(f"tokens must be integers of shape [batch, length], not {array.dtype} {list(array.shape)}")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= vocab_size:
        raise ContextError(f"token id {low if low < 0 else high} is outside the vocabulary of {vocab_size}")
    return array.astype(np.int32, copy=False)
