"""Detect an answer that repeats itself for ever, as small models do at any sampling."""

from __future__ import annotations

from collections.abc import Sequence

REPETITION_LIMIT = 200  # tokens, of a chat; lists and tables repeat less
MAX_PERIOD = 64  # tokens of the passage that repeats
MIN_TIMES = 4


def find_period(tokens: Sequence[int], token: int, limit: int) -> int:
    """Number of tokens of the passage that the end of `tokens` and `token` after them repeat, at
    least `limit` tokens long and MIN_TIMES times; 0 if there is none.
    """
    recent, period = tokens[: -MAX_PERIOD - 1 : -1], 0
    while token in recent[period:]:
        period = recent.index(token, period) + 1
        # the end repeats if it equals the text one period before it
        count = max(limit, MIN_TIMES * period) - 1
        if count > len(tokens):
            return 0
        if tokens[period - count :] == tokens[-count:-period]:
            return period
    return 0
