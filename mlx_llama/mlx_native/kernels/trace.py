"""Decode steps as one unit of work: traced once by mx.compile for each size of a buffer and kind of
sampling, replayed for every token. With grammars there are two units: the forward, then sampling
behind masks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import mlx.core as mx
import numpy as np

from mlx_llama.core.backends.interface import Masks
from mlx_llama.core.backends.positions import CallView, States
from mlx_llama.core.backends.shards import Vocabulary
from mlx_llama.core.sample import SamplingFeatures, Values, sample

from .. import arrays as words
from ..arrays import SamplingBatch
from .buffers import Buffer, Buffers, Packing, RowStates

# steps after which MLX frees the memory that it keeps for reuse; outgrown rows leave gigabytes
CLEAR_EVERY = 256
KEPT = 24  # compiled functions per model; the least recently used is evicted

# buffers of a step, the sequence in each slot, tokens int32 [S, 1]
Work = list[tuple[Buffer, tuple[int, ...], mx.array]]


class Step(CallView):
    """A step's rows, whose new recurrent states lie in their buffers."""

    def states_after(self, i: int) -> States:
        buffer, number = self.cache.slots[self.spans[i].row]
        return RowStates(buffer.states, number)


class Runner:
    """Runs decode steps, by slots and kind of sampling."""

    def __init__(self, advance: Callable, compile: bool, vocabulary: Vocabulary | None = None):
        """advance: (window, packing, token, position, tokens, keys, values, states, tables,
        adapters) -> (logits, recent, tokens, keys, values, states), of arrays alone after the first
        two. compile: False runs it untraced. vocabulary: see core.sample.sample.
        """
        self.advance, self.compile, self.vocabulary = advance, compile, vocabulary
        self.functions: OrderedDict[tuple, Callable] = OrderedDict()
        self._steps = 0

    def step(
        self, tokens, index_pos, cache: Buffers, sampling: SamplingBatch, rows, masks=None
    ) -> mx.array:
        """As Model.step over one token of each row. The cache takes over the step's arrays."""
        self._steps += 1
        if self._steps % CLEAR_EVERY == 0:
            mx.clear_cache()
        with Step(cache, len(tokens), 1, index_pos, rows) as call:
            if call.batch == 1:
                (span,) = call.spans
                token = tokens if isinstance(tokens, mx.array) else mx.array(tokens)
                work = [(cache.buffer_of(span.row, span.end), (0,), token)]
            else:
                buffers = cache.step_buffers([span.row for span in call.spans])
                inputs = buffers.drawn
                if tokens is not buffers.result:
                    inputs = [_pick(tokens, order) for order in buffers.orders]
                work = list(zip(buffers.buffers, buffers.orders, inputs))
            for buffer, order, _ in work if cache.state_nbytes else ():
                active = [row if i >= 0 else None for row, i in zip(buffer.rows, order)]
                buffer.states = cache.gather_states(active)
            if masks is None:
                drawn = self._run(cache, work, sampling)
            else:
                drawn = self._run_masked(cache, work, sampling, masks)
            if call.batch == 1:
                return drawn[0]
            buffers.drawn, buffers.result = drawn, buffers.collect(drawn)
        return buffers.result

    def _run(self, cache: Buffers, work: Work, sampling: SamplingBatch) -> list[mx.array]:
        """The next token in each slot, int32 [S, 1] or [S, C], by buffer."""
        features, packing, following = sampling.features, cache.packing, []
        for buffer, order, token in work:
            adapters = _adapters(cache, buffer)
            key = ("step", len(order), packing.bits, features, adapters is None)
            step = self._find(key, lambda: partial(self._step, features, packing))
            arguments = sampling.arrange(order), token, _positions(cache, buffer)
            (drawn,) = _advance(step, cache, buffer, adapters, arguments)
            following.append(drawn)
        return following

    def _run_masked(
        self, cache: Buffers, work: Work, sampling: SamplingBatch, masks: Masks
    ) -> list[mx.array]:
        """As `_run`, in two units: the host computes the masks during the forward."""
        features, packing, forwards = sampling.features, cache.packing, []
        for buffer, order, token in work:
            adapters, position = _adapters(cache, buffer), _positions(cache, buffer)
            key = ("advance", len(order), packing.bits, features.window, adapters is None)
            advance = self._find(key, lambda: partial(self.advance, features.window, packing))
            logits, recent = _advance(advance, cache, buffer, adapters, (token, position))
            forwards.append((logits, position, recent))
        mx.async_eval([logits for logits, *_ in forwards])
        masked, drawn = masks(), []
        for (_, order, _), (logits, position, recent) in zip(work, forwards):
            key = "draw", len(order), features
            draw = self._find(key, lambda: partial(self._draw_next, features))
            allowed = mx.array(masked[np.maximum(order, 0)])
            drawn.append(draw(logits, position, recent, sampling.arrange(order), allowed))
        return drawn

    def _step(
        self, features: SamplingFeatures, packing: Packing, values: Values, token, position, *state
    ) -> tuple:
        """Forward and sampling as one unit, of arrays alone after the first two."""
        logits, recent, *state = self.advance(features.window, packing, token, position, *state)
        return self._draw_next(features, logits, position, recent, values), *state

    def _draw_next(
        self,
        features: SamplingFeatures,
        logits: mx.array,
        position: mx.array,
        recent: mx.array | None,
        values: Values,
        masks: mx.array | None = None,
    ) -> mx.array:
        """Sample the tokens after `position`, int32 [S], or [] with one slot."""
        at = (position + 1).astype(mx.uint32).reshape(-1, 1) if features.is_random else None
        return sample(words, features, logits, at, recent, values, masks, self.vocabulary)

    def _find(self, key: tuple, make: Callable[[], Callable]) -> Callable:
        """The function of a key, made and compiled at its first use."""
        step = self.functions.get(key)
        if step is None:
            step = self.functions[key] = mx.compile(make()) if self.compile else make()
            if len(self.functions) > KEPT:
                self.functions.popitem(last=False)
        self.functions.move_to_end(key)
        return step


def _advance(
    step: Callable, cache: Buffers, buffer: Buffer, adapters: mx.array | None, arguments: tuple
) -> list:
    """Call a unit on a buffer's arrays, which it updates; returns its other results."""
    tables = cache.tables(buffer.length)
    stored = buffer.tokens, buffer.keys, buffer.values, buffer.states
    *results, buffer.tokens, buffer.keys, buffer.values, buffer.states = step(
        *arguments, *stored, tables, adapters
    )
    return results


def _positions(cache: Buffers, buffer: Buffer) -> mx.array:
    """The next position in each slot, int32 [S]; [] with one slot."""
    if buffer.slots == 1:
        return mx.array(cache.lengths[buffer.rows[0]], mx.int32)
    # In a row outside the step, the position after its last is overwritten.
    return mx.array([0 if row is None else cache.lengths[row] for row in buffer.rows], mx.int32)


def _adapters(cache: Buffers, buffer: Buffer) -> mx.array | None:
    """The number of the adapter in each slot, int32 [S]; None if there are none."""
    numbers = [0 if row is None else cache.adapters[row] for row in buffer.rows]
    return mx.array(numbers, mx.int32) if any(numbers) else None


def _pick(tokens: mx.array | np.ndarray, order: tuple[int, ...]) -> mx.array:
    """The token of each slot, int32 [S, 1]; any token for -1. tokens: int32 [B, 1]."""
    index = np.maximum(np.array(order, np.int32), 0)
    if isinstance(tokens, mx.array):
        return mx.take(tokens, mx.array(index), axis=0)
    return mx.array(tokens[index])
