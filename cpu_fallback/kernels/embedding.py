"""Rows of a low-bit embedding, from the file's blocks to float32."""

from __future__ import annotations

from . import filling
from .codes import dequantise, unpack_subs
from .emit import LANES, Function, f32, kernel
from .layouts import GROUP, LowBitLayout
from .target import Target


@kernel
def embed(
    f: Function,
    rows,  # int64 [16], addresses of rows, all of them valid
    count,  # of rows to dequantise, 1 to 16
    blocks,  # of the layout, of a row
    out,  # float32, row t at t * out_bytes
    out_bytes,
    *,
    target: Target,
    layout: LowBitLayout,
    format: str,
) -> None:
    """Dequantise rows of a GGUF format: fill a block of a panel, then read it by column."""
    block, columns = f.allocate_stack(layout.block_bytes), f.allocate_stack(4 * LANES * GROUP)
    with f.loop(blocks) as b:
        filling.fill_block(f, layout, format, rows, b, block)
        subs = unpack_subs(f, layout, block)
        with f.loop(layout.groups) as g:
            for column, weight in dequantise(f, target, layout, block, subs, g, 1):
                f.store(weight, columns, 4 * LANES * column)
            first = (b * layout.groups + g) * (4 * GROUP)
            with f.loop(count) as t, f.loop(GROUP) as column:
                value = f.load(f32, columns + column * (4 * LANES) + t * 4)
                f.store(value, out + t * out_bytes + first + column * 4)
