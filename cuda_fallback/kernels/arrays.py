"""The words of sampling (core/sample.py) for captured steps: torch's, and noise by Triton's kernel.
Importing it needs the package triton.
"""

from __future__ import annotations

from ..arrays import (  # noqa: F401, the same words
    arange,
    best,
    choose,
    concatenate,
    cumulative_share,
    float32,
    from_bits,
    gather,
    has_share,
    int32,
    kth_largest,
    largest,
    likeliest,
    log_softmax,
    random24,
    scatter_add,
    smallest,
    sort,
    to_bits,
    unpack_bits,
    where,
    zeros_like,
)
from .tokens import add_noise  # noqa: F401, a word
