"""Logits to tokens, written once over the words of a backend's arrays.py.

A row draws what it would draw alone, by its own options. The order is transformers': biases and
penalties, temperature, top-k, top-p, min-p, XTC; then argmax of the scores plus Gumbel noise
(core/rng.py), which draws from their softmax. All in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from . import ops, rng
from .ops import Array
from .options import GenerationOptions

# Computes the tokens that grammars allow, int32 [B, ceil(V / 32)] on the host; bit i % 32 of word i
# // 32 is token i's. A row without a grammar has all bits set. DRY's penalties, float32 [B, V], may
# follow as bits. Call it once, after the forward is on its way: the host works while the device
# does.
Masks = Callable[[], np.ndarray]
Values = Mapping[str, Array]  # from SamplingBatch.arrange


class Words(ops.Words, Protocol):
    """The words of sampling, one function each, as in a module. B rows, V tokens; a column is
    [B, 1]. Scores are float32 [B, V]. Arrays have operators and slices. Kernels may replace words.
    """

    scope: Callable[[Any], AbstractContextManager[object]]  # in which a device computes
    launch: Callable[[Sequence[Array]], None]  # starts to compute arrays without waiting
    send: Callable[[np.ndarray, Any], Array]  # a copy on a device
    send_all: Callable[[dict[str, np.ndarray], Any], Values]  # copies of a batch's options
    int32: Callable[[Array], Array]
    to_bits: Callable[[Array], Array]  # int32 of the bits of float32
    from_bits: Callable[[Array], Array]  # float32 of the bits of int32
    zeros_like: Callable[[Array], Array]
    concatenate: Callable[[Sequence[Array]], Array]  # arrays [B, n] with any n, along n
    largest: Callable[[Array], Array]  # each row's, a column; NaN if any is
    smallest: Callable[[Array], Array]  # each row's, a column
    # each row's largest and its first place, columns; a NaN is the largest
    best: Callable[[Array], tuple[Array, Array]]
    # the place of each row's largest, int32, a column; -1 if any is NaN or it is infinite
    choose: Callable[[Array], Array]
    sort: Callable[[Array], Array]  # each row, in descending order
    log_softmax: Callable[[Array], Array]  # over each row
    gather: Callable[[Array, Array], Array]  # x[i, ids[i, j]]; ids: [B, n], -1 for any

    def arange(self, count: int, like: Array) -> Array:
        """0 .. count - 1, integers [count] on the device of `like`."""

    def kth_largest(self, x: Array, k: Array, most: int) -> Array:
        """Each row's k-th largest, a column; -inf where k, a column of up to `most`, is 0."""

    def cumulative_share(self, ordered: Array, share: Array) -> Array:
        """True where all before it have less than `share`, a column, of the softmax's sum.

        ordered: sorted by `sort`. The first has none before it, unless a score is not finite.
        """

    def has_share(self, scores: Array, temperature: Array, least: Array) -> Array:
        """True where softmax(scores * temperature) is at least `least`. The others: columns."""

    def scatter_add(self, x: Array, ids: Array, values: Array) -> Array:
        """A copy of x with values [B, n] added at ids [B, n]; an id may occur twice."""

    def unpack_bits(self, masks: Array, count: int) -> Array:
        """bool [B, count] of masks int32 [B, ceil(count / 32)], as in `Masks`."""

    def likeliest(self, x: Array, count: int) -> Array:
        """Places of each row's largest in order, the first of equals first: int32 [B, count]."""

    def random24(self, values: Values, positions: Array, first: int, count: int) -> Array:
        """The upper 24 bits of rng.threefry, int32 [B, count], of the tokens from `first` on, by
        the rows' seeds. positions: a column.
        """

    def add_noise(self, scores: Array, positions: Array, values: Values, first: int = 0) -> Array:
        """Scores, which may change, with rng's Gumbel noise in rows with a temperature, bit for
        bit; of the tokens from `first` on. positions: a column. A score of -inf needs none.
        """


# Options of a row as numbers: name, dtype, and the feature that reads it. Triton's kernels read the
# first three.
_FIELDS: tuple[tuple[str, type, str], ...] = (
    ("seed_low", np.uint32, "is_random"),
    ("seed_high", np.uint32, "is_random"),
    ("is_random", np.int32, "is_random"),
    ("temperature", np.float32, "is_random"),
    ("top_k", np.int32, "top_k"),
    ("top_p", np.float64, "has_top_p"),
    ("min_p", np.float32, "has_min_p"),
    ("xtc_chance", np.int32, "has_xtc"),
    ("xtc_threshold", np.float32, "has_xtc"),
    ("window", np.int32, "window"),
    ("repetition_penalty", np.float32, "window"),
    ("presence_penalty", np.float32, "window"),
    ("frequency_penalty", np.float32, "window"),
    ("rates_sampled", np.int32, "rates_sampled"),
    ("bias_ids", np.int32, "biases"),
    ("bias", np.float32, "biases"),
)


class SamplingFeatures(NamedTuple):
    """Features that any row of a batch uses, without a row's values: the key of a step's trace.
    Sizes are of the largest row, rounded up to powers of two; 0: not used.
    """

    is_random: bool = False  # any row has a temperature
    top_k: int = 0
    has_top_p: bool = False
    has_min_p: bool = False
    window: int = 0  # recent tokens that penalties consider
    biases: int = 0
    # most likely tokens to report, not rounded; None: no log-probabilities
    logprobs: int | None = None
    has_masks: bool = False  # masks of grammars, or penalties of DRY
    has_dry: bool = False
    has_xtc: bool = False
    rates_sampled: bool = False  # log-probabilities of a row are those after its filters

    @classmethod
    def of(cls, options: Sequence[GenerationOptions]) -> SamplingFeatures:
        """The features of rows with these options."""
        drawn = [o for o in options if o.temperature > 0]
        return cls(
            bool(drawn),
            round_up(max((o.top_k for o in drawn), default=0)),
            any(o.top_p < 1 for o in drawn),
            any(o.min_p > 0 for o in drawn),
            round_up(max(map(penalty_window, options), default=0)),
            round_up(max((len(o.logit_bias) for o in options), default=0)),
            max((o.logprobs for o in options if o.logprobs is not None), default=None),
            has_dry=any(map(uses_dry, options)),
            has_xtc=any(o.xtc_probability > 0 for o in drawn),
            rates_sampled=any(map(rates_sampled, options)),
        )

    @property
    def needs_best(self) -> bool:
        """True if each share's best score decides: all rows are greedy or plainly sampled."""
        return self == SamplingFeatures(self.is_random)


def arrange(
    features: SamplingFeatures, options: Sequence[GenerationOptions]
) -> dict[str, np.ndarray]:
    """Options of rows as arrays [B, 1], biases [B, n]: those that the features read, in order."""
    rows = [_numbers(o, features.biases) for o in options]
    return {
        name: np.array([row[name] for row in rows], dtype).reshape(
            len(rows), features.biases if feature == "biases" else 1
        )
        for name, dtype, feature in _FIELDS
        if getattr(features, feature)
    }


def _numbers(o: GenerationOptions, biases: int) -> dict[str, Any]:
    """A row's options, neutral where a feature is off. A greedy row neither divides nor filters."""
    low, high = rng.split_seed(o.seed or 0)
    is_random, padding = o.temperature > 0, biases - len(o.logit_bias)
    return dict(
        seed_low=low,
        seed_high=high,
        is_random=is_random,
        temperature=o.temperature or 1.0,
        top_k=min(o.top_k, 2**31 - 1) if is_random else 0,
        top_p=o.top_p if is_random and o.top_p < 1 else math.inf,
        min_p=math.log(o.min_p) if is_random and o.min_p > 0 else -math.inf,
        xtc_chance=round(o.xtc_probability * 2**24) if is_random else 0,
        xtc_threshold=o.xtc_threshold,
        window=penalty_window(o),
        repetition_penalty=o.repetition_penalty,
        presence_penalty=o.presence_penalty,
        frequency_penalty=o.frequency_penalty,
        rates_sampled=rates_sampled(o),
        bias_ids=[*o.logit_bias, *[0] * padding],
        bias=[*o.logit_bias.values(), *[-0.0] * padding],  # adding -0 changes no number
    )


def penalty_window(o: GenerationOptions) -> int:
    """Number of recent tokens that a row's penalties consider."""
    penalises = o.repetition_penalty != 1 or o.presence_penalty or o.frequency_penalty
    return o.repetition_context_size if penalises else 0


def uses_dry(o: GenerationOptions) -> bool:
    """True if a row needs penalties of DRY."""
    return o.dry_multiplier > 0 and o.dry_penalty_last_n != 0


def rates_sampled(o: GenerationOptions) -> bool:
    """True if a row reports log-probabilities as its tokens were drawn; a greedy one's is 0."""
    return o.post_sampling_probs and o.logprobs is not None


def round_up(count: int) -> int:
    """The next power of two; 0 for 0."""
    return 1 << (count - 1).bit_length() if count else 0


class SamplingBatch:
    """Sampling of rows by the options of each; base of the backends' classes."""

    words: ClassVar[ModuleType]  # a backend's

    def __init__(self, options: Sequence[GenerationOptions], device: Any = None):
        self.options, self.device = tuple(options), device
        self.features = SamplingFeatures.of(self.options)
        self.window = max(map(penalty_window, self.options), default=0)  # recent tokens to pass
        # most likely tokens to report with each token (core.backends.logprobs); None: none
        self.logprobs = self.features.logprobs
        self.is_greedy = self.features == SamplingFeatures()  # the largest logit
        self._arranged: dict[tuple[int, ...] | None, Values] = {}
        self._repeated: Any = None  # a batch for several rows

    def repeat(self, count: int) -> Any:
        """A batch of `count` rows with the options of the only row. Caches the last result."""
        if self._repeated is None or len(self._repeated.options) != count:
            self._repeated = type(self)(self.options * count, self.device)
        return self._repeated

    def arrange(self, order: Sequence[int] | None = None) -> Values:
        """Options on the device, [S, *] each. order: the row of each sequence; -1 for any. None:
        all rows.
        """
        key = None if order is None else tuple(order)
        if key not in self._arranged:
            # buffers of a step; orders are forgotten when rows join or leave
            if len(self._arranged) == 8:
                self._arranged.clear()
            rows = self.options if key is None else [self.options[max(i, 0)] for i in key]
            self._arranged[key] = self.words.send_all(arrange(self.features, rows), self.device)
        return self._arranged[key]

    def __call__(
        self,
        logits: Array,
        positions: Sequence[int],
        recent: Array | None = None,
        masks: Masks | None = None,
        vocabulary: Any = None,
    ) -> Array:
        """The next tokens, int32 [B, 1]; with log-probabilities int32 [B, 2 + 2 logprobs]. -1 is in
        place of a token whose score is NaN or infinite.

        logits: [B, V]; positions: of the new tokens; recent: int32 [B, window or more], padded with
        -1 in front; masks: gives the tokens that grammars allow; vocabulary: see `sample`.
        """
        words, at, allowed = self.words, None, None
        with words.scope(self.device):
            if masks is not None:
                words.launch([logits])
                allowed = words.send(masks(), self.device)
            if self.features.is_random:
                column = np.array(positions, np.int64).astype(np.uint32)[:, None]
                at = words.send(column, self.device)
            values = self.arrange()
            return sample(words, self.features, logits, at, recent, values, allowed, vocabulary)

    def rate(self, logits: Array, tokens: np.ndarray, count: int) -> Array:
        """Log-probabilities of `tokens` int32 [T, 1] by logits [T, V], and of the `count`
        likeliest: int32 [T, 2 + 2 count], see core.backends.logprobs.
        """
        with self.words.scope(self.device):
            sent = self.words.send(tokens, self.device)
            return pack_logprobs(self.words, sent, logits, count)


def sample(
    words: Any,
    features: SamplingFeatures,
    logits: Array,
    positions: Array | None,
    recent: Array | None,
    values: Values,
    masks: Array | None = None,
    vocabulary: Any = None,
) -> Array:
    """SamplingBatch's tokens over arrays alone, traced or not.

    words: see `Words`; positions: a column, None if no row has a temperature; masks: what `Masks`
    returns; vocabulary: of which the logits are this process's share (core.backends.shards).
    """
    is_share = vocabulary is not None and masks is None and features.needs_best
    if vocabulary is not None and not is_share:
        logits = vocabulary.gather(logits)
    logits = allowed = words.float32(logits)
    if masks is not None:
        width = -(-logits.shape[1] // 32)
        is_allowed = words.unpack_bits(masks[:, :width], logits.shape[1])
        allowed = words.where(is_allowed, logits, -math.inf)
        if masks.shape[1] > width:
            values = {**values, "dry": words.from_bits(masks[:, width:])}
    scores = noisy = process(words, features, allowed, recent, values)
    if features.has_xtc:
        scores = noisy = _exclude_top(words, scores, positions, values)
    if features.is_random:
        scores = scores * 1.0 if features.rates_sampled else scores  # a copy to rate them by
        noisy = words.add_noise(noisy, positions, values, vocabulary.first if is_share else 0)
    tokens = vocabulary.choose(words, noisy) if is_share else words.choose(noisy)
    if features.logprobs is None:
        return tokens
    if features.rates_sampled:
        is_drawn = words.arange(scores.shape[1], scores) == tokens
        final = words.where(
            is_drawn, words.zeros_like(scores), -math.inf
        )  # greedy rows' log-probabilities
        if features.is_random:
            final = words.where(values["is_random"] > 0, scores, final)
        logits = words.where(values["rates_sampled"] > 0, final, logits)
    return pack_logprobs(words, tokens, logits, features.logprobs)


def process(
    words: Any, features: SamplingFeatures, logits: Array, recent: Array | None, values: Values
) -> Array:
    """Scores float32 [B, V] after biases, penalties, temperature and filters, which give -inf."""
    scores = words.float32(logits)
    if features.biases:
        scores = words.scatter_add(scores, values["bias_ids"], values["bias"])
    if features.window:
        scores = _penalise(words, scores, recent, values)
    if "dry" in values:
        scores = scores - values["dry"]
    if features.is_random:
        scores = scores / values["temperature"]
    if features.top_k:
        most = min(features.top_k, scores.shape[1])
        least = words.kth_largest(scores, values["top_k"], most)
        scores = words.where(scores < least, -math.inf, scores)
    if features.has_top_p:
        ordered = words.sort(scores)
        is_kept = words.cumulative_share(ordered, values["top_p"])
        least = words.smallest(words.where(is_kept, ordered, math.inf))
        scores = words.where(scores < least, -math.inf, scores)
    if features.has_min_p:
        least = words.largest(scores) + values["min_p"]
        scores = words.where(scores < least, -math.inf, scores)
    return scores


def _penalise(words: Any, scores: Array, recent: Array, values: Values) -> Array:
    width = recent.shape[1]
    # each row's own window, without its padding
    is_seen = (words.arange(width, scores) >= width - values["window"]) & (recent >= 0)
    ids = words.where(is_seen, recent, 0)
    counts = words.scatter_add(words.zeros_like(scores), ids, words.float32(is_seen))
    penalty = values["repetition_penalty"]
    repeated = words.where(scores > 0, scores / penalty, scores * penalty)
    scores = words.where(counts > 0, repeated - values["presence_penalty"], scores)
    return scores - counts * values["frequency_penalty"]


def _exclude_top(words: Any, scores: Array, positions: Array, values: Values) -> Array:
    """XTC: -inf for all likely tokens but the least likely of them, by the draw of a position."""
    shares = words.has_share(scores, values["temperature"], values["xtc_threshold"])
    likely = shares & (scores > -math.inf)
    least = words.smallest(words.where(likely, scores, math.inf))
    is_on = words.random24(values, positions, rng.CHANCE, 1) < values["xtc_chance"]
    return words.where(likely & (scores > least) & is_on, -math.inf, scores)


def pack_logprobs(words: Any, tokens: Array, logits: Array, count: int) -> Array:
    """Tokens int32 [B, 1] with log-probabilities by logits [B, V]: int32 [B, 2 + 2 count]."""
    values = words.log_softmax(words.float32(logits))
    ids = words.likeliest(values, count)
    chosen, top = (words.to_bits(words.gather(values, at)) for at in (tokens, ids))
    return words.concatenate([tokens, chosen, ids, top])
