"""Rows of the cache: free, in use, or kept as prefixes; their tokens and their bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlx_llama.core.backends.interface import Cache
from mlx_llama.core.errors import ContextError
from mlx_llama.core.models import rope
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.system import machine

MIN_RESERVE = 256 << 20  # bytes left for activations, growing storage and other programs
MOST = 8 * 10**9  # bytes of a default budget
IDLE_SECONDS = 15 * 60  # until prefixes within a default budget are dropped
TRIM_BYTES = 1 << 20  # freed bytes worth returning to the system
TRIM_SECONDS = 1.0  # between two returns
MIN_COPY = 8  # tokens of a prefix that are worth a copy
BLOCK = 64  # tokens compared at a time


def default_budget(free: int, promised: int = 0) -> int:
    """Bytes of a KV cache, of `free` bytes beside the weights: at most half of them and 8 GB, or
    `promised` before, as long as a tenth stays free.
    """
    room = free - max(free // 10, MIN_RESERVE)
    return max(0, min(room, max(promised, min(free // 2, MOST))))


@dataclass(eq=False)
class Rows:
    """The owners of a cache's rows, within a budget of bytes."""

    config: LlamaConfig
    cache: Cache  # the model's
    drafts: Cache | None  # the draft model's, with the same rows
    budget: int | None  # bytes of keys and values; None: unlimited
    max_kept: int  # rows that stay as prefixes after their sequence ended
    is_out_of_memory: Callable[[Exception], bool]  # from the backend's runtime
    # returns the free bytes for a default budget; None: the user chose the budget
    measure: Callable[[], int | None] | None = None

    def __post_init__(self) -> None:
        self.has_dynamic_rope = rope.length_dependent(self.config)
        self.free = list(range(self.cache.rows))[::-1]
        # Each row's tokens are its request's list, which may be longer than the row.
        self.used: dict[int, Sequence[int]] = {}
        self.kept: dict[int, Sequence[int]] = {}  # least recently used first
        self._freed = 0  # bytes, until they are returned to the system
        self.has_freed = False  # enough for `settle`
        self._promised = 0
        self._used = self._trimmed = time.monotonic()
        self.look()
        self._promised = self.budget or 0

    # Bytes

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes + (self.drafts.nbytes if self.drafts else 0)

    def nbytes_for(self, length: int) -> int:
        nbytes, drafts = self.cache.nbytes_for(length), self.drafts
        return nbytes + drafts.nbytes_for(min(length, drafts.capacity)) if drafts else nbytes

    def look(self) -> None:
        """Measure a default budget again, and drop the prefixes beyond it."""
        self.budget = self._find_budget()
        while self.budget is not None and self.nbytes > self.budget and self._drop_oldest():
            pass

    def _find_budget(self) -> int | None:
        """The chosen budget, or the default one now."""
        if self.measure and (free := self.measure()) is not None:
            return default_budget(free + self.nbytes, self._promised)
        return self.budget

    def settle(self) -> None:
        """Return much freed memory to the system, at most once in TRIM_SECONDS."""
        if time.monotonic() - self._trimmed > TRIM_SECONDS:
            self._trim()

    def rest(self) -> None:
        """Free memory between requests: prefixes go if the system is short, or after minutes."""
        self.look()
        if self.measure and time.monotonic() - self._used > IDLE_SECONDS:
            self.drop_all()
        if self.has_freed:
            self._trim()

    def _trim(self) -> None:
        self._freed, self.has_freed, self._trimmed = 0, False, time.monotonic()
        machine.trim_memory()

    def check_fits(self, length: int) -> None:
        """Raise ContextError for a prompt of `length` tokens that never fits."""
        needed, budget = self.nbytes_for(length + 1), self.budget
        if budget is not None and needed > budget:
            budget = self._find_budget()
        if budget is not None and needed > budget:
            raise ContextError(
                f"the KV cache of the prompt's {length} tokens takes {needed / 1e6:.1f} MB, and "
                f"the cache may take {budget / 1e6:.1f} MB: shorten the prompt, raise "
                "`cache_memory`, or close other programs"
            )

    def growth(self, ends: Mapping[int, int]) -> int:
        """Bytes to allocate so that each row has room up to its end."""
        return sum(max(0, self.nbytes_for(end) - self._taken(row)) for row, end in ends.items())

    def _taken(self, row: int) -> int:
        caches = (self.cache, self.drafts) if self.drafts else (self.cache,)
        return sum(cache.taken(row) for cache in caches)

    def make_room(self, ends: Mapping[int, int], spared: int = -1) -> bool:
        """Drop kept prefixes, except `spared`, until rows may grow; False if there are too few."""
        while self.budget is not None and (grown := self.growth(ends)):
            if self.nbytes + grown <= self.budget:
                break
            if not self._drop_oldest(spared):
                return False
        return True

    def reserve(self, ends: Mapping[int, int]) -> bool:
        """Allocate room up to these ends; drops kept prefixes. False if memory is short."""
        allocated = self.cache.allocated
        if all(end <= allocated[row] for row, end in ends.items()):
            return True
        while self.make_room(ends):
            try:
                self.cache.reserve(ends)
                return True
            except Exception as error:
                if not self._is_short(error):
                    raise
            if not self._drop_oldest():
                break
        return False

    def _is_short(self, error: Exception) -> bool:
        """True for an error that means that memory is short."""
        return isinstance(error, ContextError) or self.is_out_of_memory(error)

    # Prefixes

    def find_prefix(self, tokens: Sequence[int], adapter: int) -> tuple[int, int]:
        """(row, length) of the longest common prefix by an adapter, which is not all `tokens`."""
        best, longest = -1, 0
        for row, known in [*self.kept.items(), *self.used.items()]:
            if self.cache.adapters[row] != adapter:
                continue
            length = min(common_prefix(known, tokens), self.cache.lengths[row], len(tokens) - 1)
            length = self.cache.find_cut(length, row)
            if length > longest:
                best, longest = row, length
        if longest and self.has_one_length(max(len(tokens), self.cache.lengths[best])):
            return -1, 0
        return best, longest

    def has_one_length(self, length: int) -> bool:
        """True if `length` decides how keys are rotated, so that no other text can use them."""
        return self.has_dynamic_rope and length > self.config.max_position_embeddings

    # Rows

    def claim(
        self, tokens: Sequence[int], end: int, reuses: bool = True, adapter: int = 0
    ) -> tuple[int, int] | None:
        """Claim a row for `tokens` that may grow to `end`: (row, reused positions), or None. Takes
        over a kept row that is used entirely, else copies the longest common prefix to a free row.
        The row has storage for the tokens. reuses: prefixes are reused. adapter: of the row.
        """
        in_use = sum(map(self._taken, self.used))
        if self.budget is not None and in_use + self.nbytes_for(end) > self.budget:
            return None
        source, reused = self.find_prefix(tokens, adapter) if reuses else (-1, 0)
        is_kept = source in self.kept
        if is_kept:
            self.kept[source] = self.kept.pop(source)  # most recently used
        takes_over = is_kept and reused >= self.cache.lengths[source] - 1
        if not takes_over and reused < MIN_COPY:
            source, reused, is_kept = -1, 0, False
        if not takes_over and not self._make_free(end, source):
            takes_over = is_kept  # memory has no room for both
            if not takes_over:
                return None
        row = source if takes_over else self.free.pop()
        self.kept.pop(row, None)
        self.used[row] = tokens
        try:
            if takes_over:
                reused = self.cache.trim(reused, row)
            else:
                self.cache.adapters[row] = adapter
                reused = self._copy(source, row, reused) if reused else 0
            if self.make_room({row: end}) and self.reserve({row: len(tokens)}):
                return row, reused
        except BaseException:
            self.release(row)
            raise
        self.release(row)
        return None

    def _make_free(self, end: int, spared: int = -1) -> bool:
        """Drop kept prefixes until there is a free row with room for `end` positions."""
        while not self.free and self._drop_oldest(spared):
            pass
        return bool(self.free) and self.make_room({self.free[-1]: end}, spared)

    def _copy(self, source: int, target: int, length: int) -> int:
        """Copy a prefix; returns its length, 0 if memory is short."""
        try:
            return self.cache.copy_prefix(source, target, length)
        except Exception as error:
            if not self._is_short(error):
                raise
            self.cache.reset(target)
            return 0

    def keep(self, row: int) -> None:
        """Keep the row of a request that ended as a prefix."""
        tokens, self._used = self.used.pop(row), time.monotonic()
        length = min(self.cache.lengths[row], len(tokens))
        if length == 0 or self.max_kept == 0 or self.has_one_length(length):
            self._free(row)
            return
        try:
            length = self.cache.trim(length, row)
        except Exception:  # do without the prefix
            length = 0
        if length == 0:
            self._free(row)
            return
        self.kept[row] = tokens
        if len(self.kept) > self.max_kept:
            self._drop_oldest()

    def export(self, tokens: Sequence[int] | None, adapter: int) -> dict[str, Any]:
        """Cache.state of an adapter's longest prefix of `tokens`; None: of the row kept last."""
        if tokens is None:
            adapters = self.cache.adapters
            row = next((row for row in reversed(self.kept) if adapters[row] == adapter), -1)
            length = 0 if row < 0 else self.cache.lengths[row]
        else:
            row, length = self.find_prefix([*tokens, -1], adapter)
        return self.cache.state(row, length) if length else {}

    def install(self, state: Mapping[str, Any], adapter: int = 0) -> None:
        """Restore a state to a free row, and keep it. Raises ContextError without room."""
        tokens = np.asarray(state["tokens"]).tolist()
        if not self._make_free(len(tokens)):
            raise ContextError(
                f"the saved cache of {len(tokens)} tokens takes "
                f"{self.nbytes_for(len(tokens)) / 1e6:.1f} MB, and running requests use the "
                "cache's memory: load it before them, or raise `cache_memory`"
            )
        row = self.free.pop()
        self.kept[row] = tokens
        self.cache.adapters[row] = adapter
        try:
            self.cache.restore(state, row)
        except BaseException:
            self.drop(row)
            raise

    def release(self, row: int) -> None:
        """Free a row in use, with its storage."""
        self._used = time.monotonic()
        self.used.pop(row, None)
        self._free(row)

    def _drop_oldest(self, spared: int = -1) -> bool:
        """Drop the least recently used prefix, except `spared`; False if there is none."""
        row = next((row for row in self.kept if row != spared), None)
        if row is not None:
            self.drop(row)
        return row is not None

    def drop_prefixes(self, tokens: Sequence[int]) -> int:
        """Drop kept rows that hold only a prefix of `tokens`; returns the longest one's length."""
        longest = 0
        for row, known in list(self.kept.items()):
            length = self.cache.lengths[row]
            if common_prefix(known, tokens) >= length:
                self.drop(row)
                longest = max(longest, length)
        return longest

    def drop_all(self) -> None:
        for row in list(self.kept):
            self.drop(row)

    def drop(self, row: int) -> None:
        """Drop a kept prefix."""
        del self.kept[row]
        self._free(row)

    def _free(self, row: int) -> None:
        self._freed += self._taken(row)
        self.has_freed = self._freed > TRIM_BYTES
        for cache in (self.cache, self.drafts) if self.drafts else (self.cache,):
            try:
                cache.reset(row)
            except Exception:  # try once more: otherwise the row is lost
                cache.reset(row)
        self.free.append(row)


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    shorter, length = min(len(first), len(second)), 0
    while length < shorter and first[length : length + BLOCK] == second[length : length + BLOCK]:
        length += BLOCK
    while length < shorter and first[length] == second[length]:
        length += 1
    return min(length, shorter)
