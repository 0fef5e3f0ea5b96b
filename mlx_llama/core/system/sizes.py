"""Sizes in bytes, as users write them."""

from __future__ import annotations

import re

_SIZE = re.compile(
    r"\s*([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*(?:([KMGT]?)B?|([KMGT])iB)\s*", re.ASCII | re.IGNORECASE
)


def parse_size(text: str) -> int | None:
    """Bytes of a size such as "2GB", "512M", "1.5GiB" or "1000000"; None if it is malformed."""
    match = _SIZE.fullmatch(text)
    if match is None:
        return None
    number, decimal, binary = match.groups()
    return int(
        float(number)
        * (1024 if binary else 1000) ** " KMGT".index((binary or decimal or " ").upper())
    )


def format_bytes(nbytes: int | None) -> str:
    """A size in kB, MB or GB."""
    if nbytes is None:
        return "an unknown amount"
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes / 1e3:.1f} kB"
