"""Features and parameters of sampling by row, shared by the samplers of all backends."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mlx_llama.core.ops import Array
from mlx_llama.core.options import GenerationOptions

from . import rng

# Computes the tokens that grammars allow, int32 [B, ceil(V / 32)] on the host; bit i % 32 of word i
# // 32 is token i's. A row without a grammar has all bits set. Call it once, after the forward is
# on its way: the host works while the device does.
Masks = Callable[[], np.ndarray]


class Kind(NamedTuple):
    """Features that any row of a batch uses, without a row's values: the key of a step's trace.
    Sizes are of the largest row, rounded up to powers of two; 0: not used.
    """

    is_random: bool = False  # any row has a temperature
    top_k: int = 0
    has_top_p: bool = False
    has_min_p: bool = False
    window: int = 0  # recent tokens that penalties consider
    biases: int = 0
    # likeliest tokens to report, not rounded; None: no log-probabilities
    logprobs: int | None = None
    has_masks: bool = False  # of grammars, and penalties of DRY
    has_dry: bool = False
    has_xtc: bool = False
    rates_sampled: bool = False  # log-probabilities of a row are those after its filters

    @classmethod
    def of(cls, options: Sequence[GenerationOptions]) -> Kind:
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
        return self == Kind(self.is_random)


class RowNumbers(NamedTuple):
    """A row's options as numbers, neutral where a feature is off."""

    seed: tuple[int, int]  # words, low and high
    is_random: bool
    temperature: float
    top_k: int  # below 2**31; 0 for all
    top_p: float  # inf for all
    min_p: float  # logarithm of the share; -inf for none
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    window: int
    xtc_chance: int  # of 2**24; 0 for never
    xtc_threshold: float
    rates_sampled: bool

    @classmethod
    def of(cls, o: GenerationOptions) -> RowNumbers:
        """The numbers of a row. A greedy row neither divides nor filters."""
        seed, rates = rng.split_seed(o.seed or 0), (o.xtc_threshold, rates_sampled(o))
        factors = o.repetition_penalty, o.presence_penalty, o.frequency_penalty, penalty_window(o)
        if o.temperature == 0:
            neutral = False, 1.0, 0, math.inf, -math.inf
            return cls(seed, *neutral, *factors, 0, *rates)
        top_p = o.top_p if o.top_p < 1 else math.inf
        min_p = math.log(o.min_p) if o.min_p > 0 else -math.inf
        drawn = True, o.temperature, min(o.top_k, 2**31 - 1), top_p, min_p
        chance = round(o.xtc_probability * 2**24)
        return cls(seed, *drawn, *factors, chance, *rates)


class BatchOptions:
    """Logits to tokens, each row by its own options, as it would be alone; base of SamplingBatch.

    The order is transformers': bias and penalties, temperature, top-k, top-p, min-p; then argmax of
    the logits plus noise (rng.py), which draws from their softmax. All in float32.
    """

    def __init__(self, options: Sequence[GenerationOptions], device: Any = None):
        self.options, self.device = tuple(options), device
        self.windows = [penalty_window(o) for o in self.options]  # recent tokens, by row
        self.window = max(self.windows, default=0)
        self.kind = Kind.of(self.options)
        # likeliest tokens to report with each token (core.backends.logprobs); None: none
        self.logprobs = self.kind.logprobs
        self._repeated: Any = None  # a batch for several rows

    def repeat(self, count: int) -> Any:
        """A batch of `count` rows with the options of the only row. Caches the last result."""
        if self._repeated is None or len(self._repeated.options) != count:
            self._repeated = type(self)(self.options * count, self.device)
        return self._repeated

    def __call__(
        self,
        logits: Array,
        positions: Sequence[int],
        recent: Array | None = None,
        masks: Masks | None = None,
    ) -> Array:
        """The next tokens, int32 [B, 1]; with log-probabilities int32 [B, 2 + 2 logprobs]. -1 is in
        place of a token whose score is NaN or infinite.

        logits: [B, V]; positions: of the new tokens; recent: int32 [B, window or more], padded with
        -1 in front; masks: gives the tokens that grammars allow.
        """
        raise NotImplementedError

    def rate(self, logits: Array, tokens: np.ndarray, count: int) -> Array:
        """Log-probabilities of `tokens` int32 [T, 1] by logits [T, V], and of the `count`
        likeliest: int32 [T, 2 + 2 count], as core.backends.logprobs packs them.
        """
        raise NotImplementedError


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
