"""Decode steps as one unit of work: traced once by mx.compile for each size of a room and kind of sampling, replayed for
every token. With grammars it is two units: the forward, then the sampling behind masks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

import mlx.core as mx
import numpy as np

from mlx_llama.core.backends.interface import Masks
from mlx_llama.core.backends.positions import CallView
from mlx_llama.core.generation.sampling import Kind

from .draw import OptionArrays, sample
from .rooms import Group, Packing, Room, Rooms

CLEAR_EVERY = 256  # steps after which MLX gives back the buffers that it keeps: those of outgrown rows are gigabytes
KEPT = 24  # compiled functions per model; the one used longest ago is evicted


class Runner:
    """Runs decode steps, by slots and kind of sampling.

    advance: (window, packing, token, position, tokens, keys, values, tables, adapters) -> (logits, recent, tokens, keys, values),
    arrays alone after the first two. compile: False runs it as it is, every time. sample: as draw.sample.
    """

    def __init__(self, advance: Callable, compile: bool, sample: Callable = sample):
        self.advance, self.compile, self.sample = advance, compile, sample
        self._functions: OrderedDict[tuple, Callable] = OrderedDict()
        self._steps = 0

    def step(self, tokens: mx.array | np.ndarray, index_pos: int | Sequence[int], cache: Rooms, sampling: OptionArrays,
             rows: Sequence[int] | None, masks: Masks | None = None) -> mx.array:
        """The next tokens, int32 [B, 1] or with log-probabilities [B, C]; the cache takes over the step's arrays. Raises
        ContextError."""
        self._steps += 1
        if self._steps % CLEAR_EVERY == 0:
            mx.clear_cache()
        with CallView(cache, len(tokens), 1, index_pos, rows) as call:
            if call.batch == 1:
                (span,) = call.spans
                layout, groups = None, [Group(cache.room_of(span.row, span.end), (0,))]
                given = [tokens if isinstance(tokens, mx.array) else mx.array(tokens)]
            else:
                layout = cache.layout([span.row for span in call.spans])
                groups = layout.groups
                given = layout.following if tokens is layout.returned else [_pick(tokens, order) for _, order in groups]
            following = (self._run(cache, groups, given, sampling) if masks is None
                         else self._run_masked(cache, groups, given, sampling, masks))
            if layout is None:
                return following[0]
            layout.following, layout.returned = following, layout.collect(following)
        return layout.returned

    def _run(self, cache: Rooms, groups: list[Group], tokens: list[mx.array], sampling: OptionArrays) -> list[mx.array]:
        """The next token in each slot, int32 [S, 1] or [S, C], by group. tokens: int32 [S, 1] of each group."""
        following = []
        for (room, order), token in zip(groups, tokens):
            adapters = _adapters(cache, room)
            step = self._find(("step", len(order), cache.packing.bits, sampling.kind, adapters is None),
                              lambda: partial(self._step, sampling.kind, cache.packing))
            drawn, room.tokens, room.keys, room.values = step(
                sampling.arrange(order), token, _positions(cache, room), room.tokens, room.keys, room.values,
                cache.tables(room.length), adapters)
            following.append(drawn)
        return following

    def _run_masked(self, cache: Rooms, groups: list[Group], tokens: list[mx.array], sampling: OptionArrays,
                    masks: Masks) -> list[mx.array]:
        """As `_run`, in two units: the device works on the forward while the host computes the masks."""
        found = []
        for (room, order), token in zip(groups, tokens):
            adapters = _adapters(cache, room)
            advance = self._find(("advance", len(order), cache.packing.bits, sampling.kind.window, adapters is None),
                                 lambda: partial(self.advance, sampling.kind.window, cache.packing))
            position = _positions(cache, room)
            logits, recent, room.tokens, room.keys, room.values = advance(
                token, position, room.tokens, room.keys, room.values, cache.tables(room.length), adapters)
            found.append((logits, position, recent))
        mx.async_eval([logits for logits, *_ in found])
        words, drawn = masks(), []
        for (_, order), arrays in zip(groups, found):
            draw_next = self._find(("draw", len(order), sampling.kind),
                                   lambda: partial(self._draw_next, sampling.kind))
            drawn.append(draw_next(*arrays, sampling.arrange(order), mx.array(words[np.maximum(order, 0)])))
        return drawn

    def _step(self, kind: Kind, packing: Packing, values: dict[str, mx.array], token: mx.array, position: mx.array,
              *state) -> tuple:
        """Forward and sampling as one unit, of arrays alone after the first two."""
        logits, recent, *state = self.advance(kind.window, packing, token, position, *state)
        return self._draw_next(kind, logits, position, recent, values), *state

    def _draw_next(self, kind: Kind, logits: mx.array, position: mx.array, recent: mx.array | None,
                   values: dict[str, mx.array], words: mx.array | None = None) -> mx.array:
        """Sample the tokens after `position`, int32 [S], or [] with one slot."""
        following = (position + 1).astype(mx.uint32) if kind.is_random else position
        return self.sample(kind, logits, following, recent, values, words)

    def _find(self, key: tuple, make: Callable[[], Callable]) -> Callable:
        """The function of that key: made and compiled at its first use. The rest of `packing` is the model's."""
        step = self._functions.get(key)
        if step is None:
            step = self._functions[key] = mx.compile(make()) if self.compile else make()
            if len(self._functions) > KEPT:
                self._functions.popitem(last=False)
        self._functions.move_to_end(key)
        return step


def _positions(cache: Rooms, room: Room) -> mx.array:
    """The next position in each slot of a room, int32 [S]; [] with one slot."""
    if len(room.members) == 1:
        return mx.array(cache.lengths[room.members[0]], mx.int32)
    # A row outside of the step has its next position overwritten, which it does not hold yet.
    return mx.array([0 if row is None else cache.lengths[row] for row in room.members], mx.int32)


def _adapters(cache: Rooms, room: Room) -> mx.array | None:
    """The number of the adapter in each slot of a room, int32 [S]; None where no slot has one."""
    numbers = [0 if row is None else cache.adapters[row] for row in room.members]
    return mx.array(numbers, mx.int32) if any(numbers) else None


def _pick(tokens: mx.array | np.ndarray, order: tuple[int, ...]) -> mx.array:
    """The token of each slot, int32 [S, 1]; any one for a slot that is not in the step. tokens: int32 [B, 1]."""
    index = np.maximum(np.array(order, np.int32), 0)
    return mx.take(tokens, mx.array(index), axis=0) if isinstance(tokens, mx.array) else mx.array(tokens[index])
