"""Keys and values in pages of the cache (pages.py): stored from float32, and widened again."""

from __future__ import annotations

from ..pages import CACHE_GROUP, HeadLayout
from .emit import LANES, Function, Value, f16, f32, f32s, i8, i32s, kernel, vector


def page_layout(head_dim: int, cache_bits: int | None) -> HeadLayout:
    """The layout of a head's rows in a page, the same for any layers and heads."""
    return HeadLayout(head_dim, cache_bits)


@kernel
def store(f: Function, x, out, scales, *, head_dim: int, cache_bits: int | None) -> None:
    """Store one head's row of a key or value in a page. x: float32 [D]; out: float32 [D], with
    cache_bits 16 float16.

    cache_bits 8: out: int8 codes [D]; scales: float16, one per CACHE_GROUP, as of pages.quantise.
    """
    if not cache_bits:
        vectorised = head_dim // LANES * LANES
        for d in range(0, vectorised, LANES):
            f.store(f.load(f32s, x, 4 * d), out, 4 * d)
        with f.loop(head_dim, vectorised) as d:
            f.store(f.load(f32, x, d * 4), out, d * 4)
    elif cache_bits == 16:
        for d in range(0, head_dim, LANES):  # a page has room for whole vectors
            f.store(load_part(f, x, d, head_dim).narrow_half(), out, 2 * d)
    else:
        _quantise(f, x, out, scales, head_dim)


def _quantise(f: Function, x: Value, out: Value, scales: Value, head_dim: int) -> None:
    for group, first in enumerate(range(0, head_dim, CACHE_GROUP)):
        last = min(first + CACHE_GROUP, head_dim)
        values = [load_part(f, x, d, head_dim) for d in range(first, last, LANES)]
        # Compare magnitudes as integers, so that NaN reaches the scale.
        largest = f.zero(i32s)
        for value in values:
            size = value.bitcast(i32s) & 0x7FFFFFFF
            largest = size.compare(">", largest).select(size, largest)
        scale = (f.reduce_max(largest).bitcast(f32) / 127.0).narrow_half()
        wide = scale.widen_half()
        divisor = wide.compare("==", 0.0).select(f.constant(f32, float("inf")), wide).splat()
        for c, value in enumerate(values):
            rounded = f.math("rint", value / divisor)
            code = f.smaller(f.larger(rounded, -127.0), 127.0).to_int()
            # a page has room for whole vectors
            f.store(code.truncate(vector(i8)), out, first + LANES * c)
        f.store(scale, scales, 2 * group)


def load_part(f: Function, address: Value, d: int, head_dim: int) -> Value:
    """Load float32 d .. d + 15 of a head, zeros from D on, where the next head may hold NaN."""
    if d + LANES <= head_dim:
        return f.load(f32s, address, 4 * d)
    part = f.zero(f32s)
    for e in range(head_dim - d):
        part = part.insert_lane(e, f.load(f32, address, 4 * (d + e)))
    return part


@kernel
def widen_rows(f: Function, codes, scales, count, out, *, layout: HeadLayout) -> None:
    """`count` rows of a page as float32 [count][width]: numbers, or codes times scales."""
    per_group = CACHE_GROUP // LANES
    with f.loop(count) as i:
        row, row_scales = codes + i * layout.row_bytes, scales + i * (2 * layout.groups)
        wide = out + i * (4 * layout.width)
        if layout.bits == 16:
            for d in range(0, layout.width, LANES):
                f.store(f.load_as_float32("float16", row, 2 * d), wide, 4 * d)
        for group in range(layout.groups):
            scale = f.load(f16, row_scales, 2 * group).widen_half().splat()
            for c in range(per_group * group, min(per_group * (group + 1), layout.width // LANES)):
                numbers = f.load(vector(i8), row, LANES * c).sign_extend(i32s).to_float()
                f.store(numbers * scale, wide, 4 * LANES * c)
