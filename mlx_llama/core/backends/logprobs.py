"""Log-probabilities of tokens: their definition, and their way from the device.

They are taken from the model's own logits: log softmax in float32, before logit biases, penalties,
temperature, filters and grammar masks, as OpenAI's API and vLLM's default have them. Rows with the
option `post_sampling_probs` take them after all of these, as llama-server does; tokens without a
chance are not listed then.

A step whose rows ask for them returns int32 [B, 2 + 2 k] instead of [B, 1], k being the largest
number that a row asks for: the token, the bits of its log-probability, the k most likely ids and
the bits of theirs, most likely first, the lower id first among equals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms; top: (id, log-probability) of the most likely tokens, in order."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def unpack(columns: Sequence[int], count: int | None) -> TokenLogprobs | None:
    """Unpack a row. count: most likely tokens that its request asked for; None: none."""
    if count is None:
        return None
    k = (len(columns) - 2) // 2
    bits = np.array([columns[1], *columns[2 + k : 2 + k + count]], np.int32)
    values = bits.view(np.float32).tolist()
    top = zip(columns[2 : 2 + count], values[1:])
    return TokenLogprobs(values[0], tuple(pair for pair in top if pair[1] > -math.inf))
