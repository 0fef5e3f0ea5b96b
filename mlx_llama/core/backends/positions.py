"""Host-side state of a cache: positions filled, positions allocated, columns visible.

Positions are Python ints, so that reading them never waits for the device. `Cache` and `View` of each backend derive from
these classes.
"""

from __future__ import annotations

from typing import Any, Mapping

import numpy as np

from mlx_llama.core.errors import ContextError
from mlx_llama.core.models.config import LlamaConfig

GROWTH = 256  # minimum positions to allocate at a time: one copy per 256 tokens instead of one per token


def position_nbytes(config: LlamaConfig, itemsize: int) -> int:
    """Bytes of one position's keys and values in all layers. itemsize: bytes of one number."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * itemsize


class Positions:
    """Lengths of a cache.

    length: positions filled. capacity: maximum positions. allocated: positions that the storage has room for.
    """

    def __init__(self, config: LlamaConfig, capacity: int, itemsize: int):
        if capacity < 1:
            raise ContextError(f"a cache cannot have {capacity} positions: ask for at least 1")
        self.config = config
        self.capacity = capacity
        self.itemsize = itemsize  # bytes of one number of the keys and values
        self.length = 0

    def room_for(self, index_pos: int, count: int) -> int:
        """Check that `count` new positions from `index_pos` fit; returns the positions to allocate.

        Raises ContextError if index_pos is not the cache's length, or the capacity is exceeded.
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
        """Positions to allocate for `end`: rounded up to GROWTH, or to up to an eighth of `end` if that is more.

        A long sequence is thus copied, and its decode step traced, only a few times.
        """
        step = max(GROWTH, 1 << max(0, end.bit_length() - 4))
        return min(-(-end // step) * step, self.capacity)

    def reserve(self, batch: int, index_pos: int, count: int) -> None:
        """Allocate storage for `count` new positions from `index_pos` of `batch` sequences. Raises ContextError."""
        allocated = self.room_for(index_pos, count)
        if self.tokens is not None:
            self.check_batch(batch, self.tokens.shape[0])
        if allocated > self.allocated:
            self.check_memory(batch, index_pos + count)
            self._grow(batch, allocated)

    def check_memory(self, batch: int, end: int) -> None:
        """Raise ContextError if storage for `end` positions of `batch` sequences exceeds free memory."""
        allocated = self.storage_for(end)
        needed = batch * allocated * position_nbytes(self.config, self.itemsize)
        if allocated <= self.allocated or needed < 1 << 20:
            return
        free = self.free_memory()
        if free is not None and needed > free:
            raise ContextError(f"keys and values of {allocated} positions take {needed / 1e9:.2f} GB, and {free / 1e9:.2f} GB "
                               f"of memory are free: shorten the prompt, lower --ctx-size, or close other programs")

    def check_batch(self, batch: int, cached: int) -> None:
        """Raise ContextError unless a call has the batch size of the cache."""
        if batch != cached:
            raise ContextError(f"a batch of {batch} sequences cannot continue a cache of {cached}: reset it first")

    def check_trim(self, length: int) -> None:
        """Raise ContextError unless 0 <= length <= self.length."""
        if not 0 <= length <= self.length:
            raise ContextError(f"cannot trim to {length} positions: the cache holds {self.length}")

    def check_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Raise ContextError unless `state` (see Cache.state) has this model's shapes and fits the capacity."""
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
    """Host-side state of one call on a cache: `count` new positions from `index_pos` on, of `batch` sequences.

    A context manager. The cache's length includes the new positions once the block succeeds, and is unchanged if it raises.
    """

    def __init__(self, cache: Positions, batch: int, count: int, index_pos: int):
        """Allocate storage in the cache. Raises ContextError."""
        cache.reserve(batch, index_pos, count)
        self.cache, self.config = cache, cache.config
        self.batch, self.count, self.index_pos, self.end = batch, count, index_pos, index_pos + count

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.cache.length = self.end

    def first_visible(self, window: int | None) -> int:
        """First column that any new query sees: 0 without a sliding window."""
        return max(0, self.index_pos + 1 - window) if window else 0

    def visible(self, window: int | None) -> np.ndarray | None:
        """Columns that each new query sees: bool [count, end - first_visible], True where visible.

        None if every query sees every column (a single token). A query at position p sees the columns c <= p,
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
    """Check token ids on the host (list or NumPy) and convert them to int32 [B, T]; device arrays are returned unchanged.

    Raises ContextError for an empty or ragged batch and for ids outside the vocabulary.
    """
    if not isinstance(tokens, (list, tuple, np.ndarray)):
        return tokens
    try:
        array = np.asarray(tokens)
    except ValueError:
        raise ContextError("all rows of a batch of tokens must have the same length") from None
    if array.ndim != 2 or array.size == 0 or array.dtype.kind not in "iu":
        raise ContextError(f"tokens must be integers of shape [batch, length], not {array.dtype} {list(array.shape)}")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= vocab_size:
        raise ContextError(f"token id {low if low < 0 else high} is outside the vocabulary of {vocab_size}")
    return array.astype(np.int32, copy=False)
