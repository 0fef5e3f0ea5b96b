"""Prefixes that two token sequences share: the part of a prompt that a cache need not compute again."""

from __future__ import annotations

from collections.abc import Sequence


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    length = 0
    for left, right in zip(one, other):
        if left != right:
            break
        length += 1
    return length
