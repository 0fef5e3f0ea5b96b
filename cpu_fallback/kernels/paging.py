"""Keys and values in pages of the cache (pages.py): stored from float32, and widened again."""

from __future__ import annotations

from ..pages import CACHE_GROUP, PageLayout
from .emit import LANES, Function, Module, Value, f16, f32, f32s, i8, i32s, i64, kernel, vector


def page_layout(head_dim: int, cache_bits: int | None) -> PageLayout:
    """The layout of a head's rows in a page, which does not depend on the numbers of layers and
    heads.
    """
    return PageLayout(1, 1, head_dim, cache_bits)


@kernel
def store(module: Module, head_dim: int, cache_bits: int | None, public: bool = False) -> Function:
    """Store one head's row of a key or value in a page. x: float32 [D]; out: float32 [D], with
    cache_bits 16 float16.

    cache_bits 8: out: int8 codes [D]; scales: float16, one per CACHE_GROUP, the largest magnitude /
    127, as pages.quantise.
    """
    f = Function(
        module,
        f"store_{head_dim}_{cache_bits}",
        {"x": i64, "out": i64, "scales": i64},
        public=public,
    )
    if not cache_bits:
        vectorised = head_dim // LANES * LANES
        for d in range(0, vectorised, LANES):
            f.store(f.load(f32s, f.x, 4 * d, 4), f.out, 4 * d, 4)
        with f.loop(head_dim, vectorised) as d:
            f.store(f.load(f32, f.x, d * 4, 4), f.out, d * 4, 4)
        return f.finish()
    if cache_bits == 16:
        for d in range(0, head_dim, LANES):  # a page has room for whole vectors
            f.store(load_part(f, f.x, d, head_dim).narrow_half(), f.out, 2 * d, 2)
        return f.finish()
    for group, first in enumerate(range(0, head_dim, CACHE_GROUP)):
        x = [
            load_part(f, f.x, d, head_dim)
            for d in range(first, min(first + CACHE_GROUP, head_dim), LANES)
        ]
        # Compare magnitudes as integers, so that NaN reaches the scale.
        largest = f.zero(i32s)
        for value in x:
            size = value.bitcast(i32s) & 0x7FFFFFFF
            largest = size.compare(">", largest).select(size, largest)
        scale = (f.reduce_max(largest).bitcast(f32) / 127.0).narrow_half()
        wide = scale.widen_half()
        divisor = wide.compare("==", 0.0).select(f.constant(f32, float("inf")), wide).splat()
        for c, value in enumerate(x):
            rounded = f.math("rint", value / divisor)
            code = f.smaller(f.larger(rounded, -127.0), 127.0).to_int()
            # a page has room for whole vectors
            f.store(code.truncate(vector(i8)), f.out, first + LANES * c, 1)
        f.store(scale, f.scales, 2 * group, 2)
    return f.finish()


def load_part(f: Function, address: Value, d: int, head_dim: int) -> Value:
    """Load float32 d .. d + 15 of a head, zeros from D on, where the next head may hold NaN."""
    if d + LANES <= head_dim:
        return f.load(f32s, address, 4 * d, 4)
    part = f.zero(f32s)
    for e in range(head_dim - d):
        part = part.insert_lane(e, f.load(f32, address, 4 * (d + e), 4))
    return part


@kernel
def widen_rows(module: Module, layout: PageLayout) -> Function:
    """`count` rows of a page as float32 [count][width], exactly: float16 numbers, or codes times
    scales.
    """
    f = Function(
        module,
        f"widen_rows_{layout.head_dim}_{layout.bits}",
        {"codes": i64, "scales": i64, "count": i64, "out": i64},
    )
    per_group = CACHE_GROUP // LANES
    with f.loop(f.count) as i:
        codes, scales = f.codes + i * layout.row_bytes, f.scales + i * (2 * layout.groups)
        out = f.out + i * (4 * layout.width)
        if layout.bits == 16:
            for d in range(0, layout.width, LANES):
                f.store(f.load_as_float32("float16", codes, 2 * d), out, 4 * d, 4)
        for group in range(layout.groups):
            scale = f.load(f16, scales, 2 * group, 2).widen_half().splat()
            for c in range(per_group * group, min(per_group * (group + 1), layout.width // LANES)):
                wide = f.load(vector(i8), codes, LANES * c, 1).sign_extend(i32s).to_float()
                f.store(wide * scale, out, 4 * LANES * c, 4)
    return f.finish()
