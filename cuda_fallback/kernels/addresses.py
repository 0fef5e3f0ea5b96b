"""Fields of the state of decoded tokens (state.py) in Triton's kernels, and pointers from them."""

from __future__ import annotations

import triton
import triton.language as tl

from . import state as fields

STRIDE = tl.constexpr(fields.MAX_ROWS)
POSITION, NEXT, TOKEN = map(tl.constexpr, (fields.POSITION, fields.NEXT, fields.TOKEN))
ALLOCATED, TOKENS, ADAPTER = map(tl.constexpr, (fields.ALLOCATED, fields.TOKENS, fields.ADAPTER))
NUMBERS, SCALES = map(tl.constexpr, (fields.NUMBERS, fields.SCALES))
STATES, SLOT = map(tl.constexpr, (fields.STATES, fields.SLOT))
BEFORE, AFTER = map(tl.constexpr, (fields.BEFORE, fields.AFTER))
COSINES, SINES = map(tl.constexpr, (fields.COSINES, fields.SINES))


@triton.jit
def field(state, index, row):
    """Load a row's field of the state."""
    return tl.load(state + index * STRIDE + row)


@triton.jit
def address(state, index, row, like):
    """The pointer in a row's field, to elements of `like`'s type; torch aligns it to 16 bytes."""
    return tl.multiple_of(field(state, index, row).to(tl.pointer_type(like.dtype.element_ty)), 16)


@triton.jit
def head_address(
    state,
    base,
    part,
    head,
    position,
    row,
    like,
    G,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    FIELD: tl.constexpr,
):
    """The pointer to WIDTH elements of a key head (part 0) or value head (1) at a position. base,
    UNIT: as in storage.Place.
    """
    allocated = field(state, ALLOCATED, row)
    line = (part * G + head) * allocated + position
    return address(state, FIELD, row, like) + (base * allocated * UNIT + line * WIDTH)
