"""Common prefixes of token sequences: the part of a prompt that is in the cache already."""

from __future__ import annotations

from collections.abc import Sequence

BLOCK = 64  # tokens compared at a time


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    shorter, length = min(len(first), len(second)), 0
    while length < shorter and first[length : length + BLOCK] == second[length : length + BLOCK]:
        length += BLOCK
    while length < shorter and first[length] == second[length]:
        length += 1
    return min(length, shorter)
