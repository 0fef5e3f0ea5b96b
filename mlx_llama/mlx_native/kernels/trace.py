"""A decoded token as one graph: traced once by mx.compile, replayed for every token.

Whatever changes from token to token is an array, since a Python number would be a key of the trace: each token would be
traced again, and every trace kept. Keys and values have a fixed room, which attention reads as a whole behind a mask; a
larger room is another trace.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_llama.core.generation import rng
from mlx_llama.core.generation.options import sampling_key
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.mlx_native.cache import Cache
from mlx_llama.mlx_native.sampling import Sampler

if TYPE_CHECKING:
    from mlx_llama.mlx_native.model import Llama

KEPT = 8  # traces' functions per model, one for each kind of sampling


class Slot:
    """The cache as the layers see it while a step is traced: the same names as Cache's, the position an array.

    position: int32 [], of the token; keys, values: [1, G, allocated, D] per layer; tables: Cache.tables.
    """

    def __init__(self, config: LlamaConfig, position: mx.array, keys: list[mx.array], values: list[mx.array], tables: list):
        self.position, self.keys, self.values = position, list(keys), list(values)
        allocated = keys[0].shape[2]
        columns = mx.arange(allocated)
        visible = columns <= position
        if config.sliding_window and config.sliding_window < allocated:
            visible = visible & (columns > position - config.sliding_window)
        self.mask = visible.reshape(1, 1, 1, allocated)
        if len(tables[0].shape) == 2:  # cosines and sines, not periods
            self.rope = tuple(mx.slice(table, position, (0,), (1, table.shape[1])) for table in tables)
        else:
            self.rope = (*tables, position)

    def append(self, layer: int, key: mx.array, value: mx.array) -> tuple[mx.array, mx.array]:
        """Store a row [1, G, 1, D] of a layer; returns all its keys and values [1, G, allocated, D], see mask."""
        self.keys[layer] = mx.slice_update(self.keys[layer], key, self.position, (2,))
        self.values[layer] = mx.slice_update(self.values[layer], value, self.position, (2,))
        return self.keys[layer], self.values[layer]


class Steps:
    """A model's decode steps, compiled or not, by kind of sampling."""

    def __init__(self, model: Llama, compile: bool):
        self.model, self.compile = model, compile
        self._known: OrderedDict[tuple, Callable] = OrderedDict()

    def __call__(self, token: mx.array, index_pos: int, cache: Cache, sampler: Sampler) -> mx.array:
        """The next token, int32 [1, 1]; the cache's arrays become what the step makes of them."""
        cache.reserve(1, index_pos, 1)
        step = self._step(sampler)
        seed = mx.array(rng.split_seed(sampler.options.seed), mx.uint32)
        following, cache.tokens, cache.keys, cache.values = step(
            token, mx.array(index_pos, mx.int32), seed, cache.tokens, cache.keys, cache.values, cache.tables)
        cache.length = index_pos + 1
        return following

    def _step(self, sampler: Sampler) -> Callable:
        kind = sampling_key(sampler.options)
        step = self._known.pop(kind, None)
        if step is None:
            step = self._written(sampler)
            if self.compile:
                step = mx.compile(step)
        self._known[kind] = step
        while len(self._known) > KEPT:
            self._known.popitem(last=False)
        return step

    def _written(self, sampler: Sampler) -> Callable:
        model = self.model

        def step(token, position, seed, tokens, keys, values, tables):
            tokens = mx.slice_update(tokens, token, position, (1,))
            slot = Slot(model.config, position, keys, values, tables)
            x = model.embedding(token)[0]
            for block in model.blocks:
                x = block(x, slot)
            logits = model.head(model.norm(x))
            recent = None
            if sampler.window:
                last = mx.arange(1 - sampler.window, 1) + position
                recent = mx.where(last < 0, -1, mx.take(tokens, mx.maximum(last, 0), axis=1))
            following = sampler.draw(logits, (position + 1).astype(mx.uint32), recent, seed)
            return following, tokens, slot.keys, slot.values

        return step
