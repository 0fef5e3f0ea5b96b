"""Log-probabilities of tokens: their definition, and their way from the device.

They are taken from the model's own logits: log softmax in float32, before logit biases, penalties,
temperature, filters and grammar masks, as OpenAI's API and vLLM's default have them. Rows with the
option `post_sampling_probs` take them after all of these, as llama-server does; tokens without a
chance are not listed then.

A step whose rows ask for them returns int32 [B, 2 + 2 k] instead of [B, 1], k being the largest
number that a row asks for: the token, the bits of its log-probability, the k likeliest ids and the
bits of theirs, likeliest first, the lower id first among equals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms; top: (id, log-probability) of the likeliest tokens, in order."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def pack(
    tokens: npt.NDArray[np.int32], logits: npt.NDArray[np.float32], count: int
) -> npt.NDArray[np.int32]:
    """Tokens int32 [B, 1] with log-probabilities of float32 [B, V]: int32 [B, 2 + 2 count]."""
    columns = [_pack_row(int(token), row, count) for token, row in zip(tokens[:, 0], logits)]
    return np.concatenate([tokens, np.stack(columns)], axis=1)


def _pack_row(token: int, logits: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.int32]:
    if token < 0:  # no token: the logits are not finite
        return np.zeros(1 + 2 * count, np.int32)
    shifted = logits.astype(np.float32) - logits.max()
    values = shifted - np.float32(np.log(np.exp(shifted).sum(dtype=np.float64)))
    ids = np.empty(0, np.int64)
    if count:
        # ties of the last one included
        ids = np.flatnonzero(values >= np.partition(values, -count)[-count])
        ids = ids[np.argsort(-values[ids], kind="stable")][:count]
    bits = values[[token, *ids]].astype(np.float32).view(np.int32)
    return np.concatenate([bits[:1], ids.astype(np.int32), bits[1:]])


def unpack(columns: Sequence[int], count: int | None) -> TokenLogprobs | None:
    """Unpack a row of `pack`. count: likeliest tokens that its request asked for; None: none."""
    if count is None:
        return None
    k = (len(columns) - 2) // 2
    bits = np.array([columns[1], *columns[2 + k : 2 + k + count]], np.int32)
    values = bits.view(np.float32).tolist()
    top = zip(columns[2 : 2 + count], values[1:])
    return TokenLogprobs(values[0], tuple(pair for pair in top if pair[1] > -math.inf))
