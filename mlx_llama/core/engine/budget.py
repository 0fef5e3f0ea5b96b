"""The memory that keys and values may take by default."""

from __future__ import annotations

LEAST_RESERVE = 256 << 20  # bytes left to activations, growing storage and other programs


def default_budget(free: int) -> int:
    """Bytes for all keys and values. free: bytes of memory beside the weights, of which a tenth stays free."""
    return max(0, free - max(free // 10, LEAST_RESERVE))
