"""Decode steps as one unit of work: traced once by mx.compile for each size of a room and kind of sampling, replayed for
every token."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

import mlx.core as mx
import numpy as np

from mlx_llama.core.backends.positions import CallView

from .draw import Kind, OptionArrays
from .rooms import Packing, Room, Rooms

KEPT = 24  # compiled functions per model; the one used longest ago is evicted


class Runner:
    """Runs decode steps, by slots and kind of sampling.

    decode: (kind, packing, token, position, sampling's values, tokens, keys, values, tables) -> (next token, tokens, keys,
    values), arrays alone after the first two. compile: False runs it as it is, every time.
    """

    def __init__(self, decode: Callable, compile: bool):
        self.decode, self.compile = decode, compile
        self._functions: OrderedDict[tuple, Callable] = OrderedDict()

    def step(self, tokens: mx.array | np.ndarray, index_pos: int | Sequence[int], cache: Rooms, sampling: OptionArrays,
             rows: Sequence[int] | None) -> mx.array:
        """The next tokens, int32 [B, 1]; the cache takes over the step's arrays. Raises ContextError."""
        with CallView(cache, len(tokens), 1, index_pos, rows) as call:
            if call.batch == 1:
                (span,) = call.spans
                token = tokens if isinstance(tokens, mx.array) else mx.array(tokens)
                return self._run(cache, cache.room_of(span.row, span.end), token, (0,), sampling)
            layout = cache.layout([span.row for span in call.spans])
            goes_on = tokens is layout.returned
            following = [
                self._run(cache, room, layout.following[i] if goes_on else _pick(tokens, order), order, sampling)
                for i, (room, order) in enumerate(layout.groups)]
            layout.following, layout.returned = following, _collect(following, [group.order for group in layout.groups])
        return layout.returned

    def _run(self, cache: Rooms, room: Room, token: mx.array, order: tuple[int, ...], sampling: OptionArrays) -> mx.array:
        """The next token in each slot of a room, int32 [S, 1]. token: int32 [S, 1]."""
        if len(order) == 1:
            position = mx.array(cache.lengths[room.members[0]], mx.int32)
        else:
            # A row outside of the step has its next position overwritten, which it does not hold yet.
            position = mx.array([0 if row is None else cache.lengths[row] for row in room.members], mx.int32)
        step = self._find(sampling.kind, len(order), cache.packing)
        following, room.tokens, room.keys, room.values = step(
            token, position, sampling.arrange(order), room.tokens, room.keys, room.values, cache.tables(room.length))
        return following

    def _find(self, kind: Kind, slots: int, packing: Packing) -> Callable:
        key = kind, slots, packing.bits  # the rest of `packing` is the model's
        step = self._functions.pop(key, None)
        if step is None:
            step = partial(self.decode, kind, packing)
            if self.compile:
                step = mx.compile(step)
        self._functions[key] = step
        while len(self._functions) > KEPT:
            self._functions.popitem(last=False)
        return step


def _pick(tokens: mx.array | np.ndarray, order: tuple[int, ...]) -> mx.array:
    """The token of each slot, int32 [S, 1]; any one for a slot that is not in the step. tokens: int32 [B, 1]."""
    index = np.maximum(np.array(order, np.int32), 0)
    return mx.take(tokens, mx.array(index), axis=0) if isinstance(tokens, mx.array) else mx.array(tokens[index])


def _collect(following: list[mx.array], orders: list[tuple[int, ...]]) -> mx.array:
    """Tokens of all slots as int32 [B, 1], in the order of the batch."""
    slots = np.concatenate([np.array(order, np.int32) for order in orders])
    joined = following[0] if len(following) == 1 else mx.concatenate(following)
    count = int(slots.max()) + 1
    if slots[:count].tolist() == list(range(count)):
        return joined if count == len(slots) else joined[:count]
    taken = np.empty(count, np.int32)
    taken[slots[slots >= 0]] = np.flatnonzero(slots >= 0)
    return mx.take(joined, mx.array(taken), axis=0)
