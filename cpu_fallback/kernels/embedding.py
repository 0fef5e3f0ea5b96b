"""Rows of a low-bit embedding, from the file's blocks to float32, as an LLVM function of addresses."""

from __future__ import annotations

from . import filling
from .codes import Scales, codes_of, dequantise, scale_group_of, unpack_subs
from .emit import LANES, Function, Module, f32, i64
from .layouts import GROUP, LowBitLayout
from .target import Target

EMBED = {"rows": i64, "count": i64, "blocks": i64, "out": i64, "out_bytes": i64}


def embed_name(layout: LowBitLayout, format: str) -> str:
    return f"embed_{layout.name}_{format}"


def embed(module: Module, target: Target, layout: LowBitLayout, format: str) -> Function:
    """Write the function that dequantises `count` rows, 1 to 16, of `blocks` blocks of the layout each, as the format defines.

    rows: int64 [16], addresses of rows of the GGUF format, all of them valid; out: float32, row t at t * out_bytes. A block
    of 16 rows is filled as a panel's, then read column by column.
    """
    f = Function(module, embed_name(layout, format), EMBED, public=True)
    block, columns = f.allocate_stack(layout.block_bytes), f.allocate_stack(4 * LANES * GROUP)
    with f.loop(f.blocks) as b:
        filling.fill_block(f, layout, format, f.rows, b, block)
        scales = Scales(f, layout, block, subs=unpack_subs(f, layout, block))
        with f.loop(layout.groups) as g:
            codes = codes_of(f, target, layout, block, g, 1)
            for half in range(2):
                group = scale_group_of(layout, g, half)
                scale, bias = scales("scales", group), scales("biases", group) if layout.has_biases else None
                for k in range(4 * half, 4 * half + 4):
                    for e, weight in enumerate(dequantise(codes.chunk(k), layout, scale, bias)):
                        f.store(weight, columns, 4 * LANES * (4 * k + e), 4)
            first = (b * layout.groups + g) * (4 * GROUP)
            with f.loop(f.count) as t, f.loop(GROUP) as column:
                one = f.load(f32, columns + column * (4 * LANES) + t * 4, 0, 4)
                f.store(one, f.out + t * f.out_bytes + first + column * 4, 0, 4)
    return f.finish()
