"""Rows of a low-bit embedding, from the file's blocks to float32, as an LLVM function of
addresses.
"""

from __future__ import annotations

from . import filling
from .codes import dequantise, unpack_subs
from .emit import LANES, Function, Module, f32, i64
from .layouts import GROUP, LowBitLayout
from .target import Target

EMBED = {
    "rows": i64,  # int64 [16], addresses of rows, all of them valid
    "count": i64,  # of rows to dequantise, 1 to 16
    "blocks": i64,  # of the layout, of a row
    "out": i64,  # float32, row t at t * out_bytes
    "out_bytes": i64,
}


def embed_name(layout: LowBitLayout, format: str) -> str:
    return f"embed_{layout.name}_{format}"


def embed(module: Module, target: Target, layout: LowBitLayout, format: str) -> Function:
    """Write the function that dequantises rows of a GGUF format: it fills a block of a panel, then
    reads it by column.
    """
    f = Function(module, embed_name(layout, format), EMBED, public=True)
    block, columns = f.allocate_stack(layout.block_bytes), f.allocate_stack(4 * LANES * GROUP)
    with f.loop(f.blocks) as b:
        filling.fill_block(f, layout, format, f.rows, b, block)
        subs = unpack_subs(f, layout, block)
        with f.loop(layout.groups) as g:
            for column, weight in dequantise(f, target, layout, block, subs, g, 1):
                f.store(weight, columns, 4 * LANES * column, 4)
            first = (b * layout.groups + g) * (4 * GROUP)
            with f.loop(f.count) as t, f.loop(GROUP) as column:
                value = f.load(f32, columns + column * (4 * LANES) + t * 4, 0, 4)
                f.store(value, f.out + t * f.out_bytes + first + column * 4, 0, 4)
    return f.finish()
