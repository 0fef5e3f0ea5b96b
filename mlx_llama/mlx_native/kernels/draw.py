"""Sampling over arrays alone, traced or not: options by row, and the words that read them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_llama.core.generation import rng
from mlx_llama.core.generation.sampling import BatchOptions, Kind, Masks, RowNumbers
from mlx_llama.core.options import GenerationOptions

Values = dict[str, mx.array]  # of SamplingBatch.arrange


class SamplingBatch(BatchOptions):
    """Samples in the lazy graph. Options of the rows of a batch are arrays."""

    def __init__(self, options: Sequence[GenerationOptions], device: mx.Device = mx.Device(mx.cpu)):
        super().__init__(options, device)
        self._arranged: dict[tuple[int, ...], Values] = {}

    def __call__(
        self, logits: mx.array, positions: Sequence[int], recent=None, masks: Masks | None = None
    ) -> mx.array:
        with mx.stream(self.device):
            if masks is not None:
                mx.async_eval(logits)  # the device works while the host computes the masks
            words = None if masks is None else mx.array(masks())
            places = mx.array([p & 0xFFFFFFFF for p in positions], mx.uint32)
            return sample(self.kind, logits, places, recent, self.arrange(), words)

    def rate(self, logits: mx.array, tokens: np.ndarray, count: int) -> mx.array:
        with mx.stream(self.device):
            return pack(mx.array(tokens), logits, count)

    def processed(self, scores: mx.array, recent: mx.array | None = None) -> mx.array:
        """Scores float32 [B, V] after bias, penalties, temperature and filters, which give -inf."""
        return process(self.kind, scores, recent, self.arrange())

    def arrange(self, order: Sequence[int] | None = None) -> Values:
        """Options as arrays [S, *]. order: the row of each sequence; -1 for any. None: all rows."""
        order = tuple(range(len(self.options)) if order is None else order)
        if order not in self._arranged:
            # buffers of a step; orders are forgotten when rows join or leave
            if len(self._arranged) == 8:
                self._arranged.clear()
            self._arranged[order] = self._make_values([self.options[max(i, 0)] for i in order])
        return self._arranged[order]

    def _make_values(self, options: Sequence[GenerationOptions]) -> Values:
        kind, rows = self.kind, [RowNumbers.of(o) for o in options]
        groups = (
            (kind.window, "window repetition_penalty presence_penalty frequency_penalty"),
            (kind.is_random, "temperature"),
            (kind.top_k, "top_k"),
            (kind.has_top_p, "top_p"),
            (kind.has_min_p, "min_p"),
            (kind.has_xtc, "xtc_chance xtc_threshold"),
            (kind.rates_sampled, "rates_sampled"),
        )
        integers, values = ("top_k", "window", "xtc_chance", "rates_sampled"), {}
        for name in " ".join(names for is_used, names in groups if is_used).split():
            dtype = np.int32 if name in integers else np.float32
            numbers = np.array([getattr(row, name) for row in rows], dtype)
            values[name] = mx.array(numbers[:, None])
        if kind.is_random:
            values |= {
                "seed": mx.array(np.array([row.seed for row in rows], np.uint32)),
                "table": _noise_table(),
                "noise": mx.array(np.array([row.is_random for row in rows], np.float32)[:, None]),
            }
        if kind.biases:
            ids = np.zeros((len(rows), kind.biases), np.int32)
            biases = np.full(ids.shape, -0.0, np.float32)  # adding -0 changes no number
            for row, o in enumerate(options):
                ids[row, : len(o.logit_bias)] = list(o.logit_bias)
                biases[row, : len(o.logit_bias)] = list(o.logit_bias.values())
            values |= {"bias_ids": mx.array(ids), "bias": mx.array(biases)}
        return values


def gumbel(
    seed: int | mx.array, position: int | mx.array, table: mx.array, indices: mx.array
) -> mx.array:
    """core.rng.gumbel, bit for bit. table: its gumbel_table on the device; indices: uint32 [V].

    seed and position: numbers, or uint32 [S, 2] (the words of core.rng.split_seed) and uint32 [S]
    on the device, for float32 [S, V].
    """
    if isinstance(seed, int):
        seed = mx.array(rng.split_seed(seed), mx.uint32)
    if isinstance(position, int):
        position = mx.array(position & 0xFFFFFFFF, mx.uint32)
    k = (_threefry(seed, position, indices) >> 8).astype(mx.float32) + 1
    return table[(k.view(mx.int32) >> rng.TABLE_SHIFT) - rng.TABLE_OFFSET]


def _threefry(seed: mx.array, position: mx.array, indices: mx.array) -> mx.array:
    """core.rng.threefry2x32. Arguments as of `gumbel`."""
    low, high = mx.split(seed, 2, axis=-1)
    keys = (low, high, low ^ high ^ mx.array(rng.PARITY, mx.uint32))
    x0 = indices + low
    x1 = mx.broadcast_to(position[..., None] + high, x0.shape)
    for group in range(5):
        for rotation in rng.ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = (x1 << rotation) | (x1 >> (32 - rotation))
            x1 = x1 ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + (keys[(group + 2) % 3] + (group + 1))
    return x0


def draw(
    kind: Kind, logits: mx.array, positions: mx.array, recent: mx.array | None, values: Values
) -> mx.array:
    """Draw on every path, traced or not. logits: [S, V]; positions: uint32 [S], or [] with one row;
    values: of SamplingBatch.arrange; recent and the result: as of SamplingBatch. -1 is in
    place of a token whose score is not finite."""
    scores = _score(kind, logits, positions, recent, values)
    best = mx.max(scores, axis=-1, keepdims=True)  # NaN if any is
    tokens = mx.argmax(scores, axis=-1, keepdims=True).astype(mx.int32)
    return mx.where(mx.abs(best) < math.inf, tokens, -1)


def draw_share(
    kind: Kind, logits: mx.array, first: int, positions: mx.array, values: Values
) -> mx.array:
    """The winner of a share of the vocabulary, of `draw` without filters, penalties and biases:
    int32 [S, 2], the bits of its score and its id. logits: [S, V'], of the tokens from `first` on.
    """
    scores = _score(kind, logits, positions, None, values, first)
    best = mx.argmax(scores, axis=-1, keepdims=True).astype(mx.int32)
    bits = mx.take_along_axis(scores, best, axis=1).view(mx.int32)
    return mx.concatenate([bits, best + first], axis=1)


def _score(
    kind: Kind, logits: mx.array, positions: mx.array, recent, values: Values, first: int = 0
) -> mx.array:
    """Scores of the tokens from `first` on, with noise where a row has a temperature."""
    scores = _filter(kind, logits, positions, recent, values)
    if kind.is_random:
        indices = mx.arange(first, first + scores.shape[1], dtype=mx.uint32)
        noise = gumbel(values["seed"], positions.reshape(-1), values["table"], indices)
        scores = scores + noise * values["noise"]
    return scores


def _filter(
    kind: Kind, logits: mx.array, positions: mx.array, recent: mx.array | None, values: Values
) -> mx.array:
    """Scores [S, V] from whose softmax a row with a temperature draws."""
    scores = process(kind, logits, recent, values)
    return _exclude_top(scores, positions.reshape(-1), values) if kind.has_xtc else scores


def choose_winner(pairs: mx.array) -> mx.array:
    """The token of the largest score, int32 [S, 1]. pairs: `draw_share` of all, [n, S, 2]."""
    winner = mx.argmax(pairs[..., :1].view(mx.float32), axis=0, keepdims=True)
    return mx.take_along_axis(pairs[..., 1:], winner, axis=0)[0]


def sample(
    kind: Kind,
    logits: mx.array,
    positions: mx.array,
    recent: mx.array | None,
    values: Values,
    words: mx.array | None = None,
) -> mx.array:
    """`draw` behind a `mask` of `words` (see Masks), None for no grammar and no DRY; with the
    kind's log-probabilities as of `pack`.
    """
    allowed = logits
    if words is not None:
        width = -(-logits.shape[1] // 32)
        if words.shape[1] > width:
            words, dry = mx.split(words, [width], axis=1)
            values = {**values, "dry": dry.view(mx.float32)}
        allowed = mask(logits, words)
    tokens = draw(kind, allowed, positions, recent, values)
    if kind.logprobs is None:
        return tokens
    if kind.rates_sampled:
        is_drawn = mx.arange(logits.shape[1]) == tokens
        final = mx.where(is_drawn, 0.0, -math.inf)  # of greedy rows
        if kind.is_random:
            scores = _filter(kind, allowed, positions, recent, values)
            final = mx.where(values["noise"] > 0, scores, final)
        logits = mx.where(values["rates_sampled"] > 0, final, logits.astype(mx.float32))
    return pack(tokens, logits, kind.logprobs)


def mask(logits: mx.array, words: mx.array) -> mx.array:
    """Logits [B, V], -inf where a grammar forbids a token. words: int32 [B, ceil(V / 32)]."""
    ids = mx.arange(logits.shape[1])
    bits = (mx.take(words, ids >> 5, axis=1) >> (ids & 31)) & 1
    return mx.where(bits == 1, logits.astype(mx.float32), -math.inf)


def pack(tokens: mx.array, logits: mx.array, count: int) -> mx.array:
    """As core.backends.logprobs.pack: tokens int32 [B, 1]; returns int32 [B, 2 + 2 count]."""
    values = logits.astype(mx.float32)
    values = values - mx.logsumexp(values, axis=-1, keepdims=True)
    ids = mx.argsort(-values, axis=-1)[:, :count].astype(mx.int32)
    chosen, top = (mx.take_along_axis(values, at, axis=1).view(mx.int32) for at in (tokens, ids))
    return mx.concatenate([tokens, chosen, ids, top], axis=1)


def process(kind: Kind, logits: mx.array, recent: mx.array | None, values: Values) -> mx.array:
    """SamplingBatch.processed of arrays alone."""
    scores = logits.astype(mx.float32)
    if kind.biases:
        scores = scores.at[mx.arange(len(scores))[:, None], values["bias_ids"]].add(values["bias"])
    if kind.window:
        scores = _penalise(scores, recent, values)
    if "dry" in values:
        scores = scores - values["dry"]
    if kind.is_random:
        scores = scores / values["temperature"]
    if kind.top_k:
        scores = _keep_likeliest(scores, min(kind.top_k, scores.shape[1]), values["top_k"])
    if kind.has_top_p:
        scores = _keep_nucleus(scores, values["top_p"])
    if kind.has_min_p:
        least = scores.max(axis=-1, keepdims=True) + values["min_p"]
        scores = mx.where(scores < least, -math.inf, scores)
    return scores


def _keep_likeliest(scores: mx.array, most: int, top_k: mx.array) -> mx.array:
    """-inf for all but the top_k likeliest, [S, 1], 0 for all, and ties. most: the largest."""
    ordered = mx.sort(mx.topk(scores, most, axis=-1), axis=-1)
    last = mx.take_along_axis(ordered, most - mx.clip(top_k, 1, most), axis=-1)
    return mx.where((scores < last) & (top_k > 0), -math.inf, scores)


def _keep_nucleus(scores: mx.array, top_p: mx.array) -> mx.array:
    """-inf for all but the smallest set with probability top_p, [S, 1], inf for all."""
    ordered = mx.sort(scores, axis=-1)[:, ::-1]
    shares = mx.softmax(ordered, axis=-1)
    # probability of all likelier tokens: 0 for the first, which stays
    before = mx.cumsum(shares, axis=-1) - shares
    smallest = mx.where(before < top_p, ordered, math.inf).min(axis=-1, keepdims=True)
    return mx.where(scores < smallest, -math.inf, scores)


def _exclude_top(scores: mx.array, positions: mx.array, values: Values) -> mx.array:
    """XTC: -inf for all likely tokens but the least likely of them, by the draw of a position."""
    shares = mx.softmax(scores * values["temperature"], axis=-1)
    likely = (shares >= values["xtc_threshold"]) & (scores > -math.inf)
    least = mx.where(likely, scores, math.inf).min(axis=-1, keepdims=True)
    draws = _threefry(values["seed"], positions, mx.array([rng.CHANCE], mx.uint32)) >> 8
    is_on = draws.astype(mx.int32) < values["xtc_chance"]
    return mx.where(likely & (scores > least) & is_on, -math.inf, scores)


def _penalise(scores: mx.array, recent: mx.array, values: Values) -> mx.array:
    rows, count = scores.shape
    width = recent.shape[1]
    # each row's own window
    recent = mx.where(mx.arange(width) >= width - values["window"], recent, -1)
    # -1 falls out
    counts = mx.zeros((rows, count + 1)).at[mx.arange(rows)[:, None], recent + 1].add(1.0)[:, 1:]
    penalty = values["repetition_penalty"]
    repeated = mx.where(scores > 0, scores / penalty, scores * penalty)
    scores = mx.where(counts > 0, repeated - values["presence_penalty"], scores)
    return scores - counts * values["frequency_penalty"]


@functools.lru_cache(maxsize=1)
def _noise_table() -> mx.array:
    return mx.array(rng.gumbel_table())
