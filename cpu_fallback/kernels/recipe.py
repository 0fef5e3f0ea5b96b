"""The choices that machine code depends on, and the tiles of tokens that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from . import layouts, products
from .layouts import ActivationLayout, FloatLayout, Layout, LowBitLayout
from .target import Target


class Head(NamedTuple):
    """Numbers of a head, and how many of them are rotated."""

    size: int
    rotated: int


@dataclass(frozen=True)
class Recipe:
    """All that the machine code depends on."""

    target: Target
    # layouts of weights, and the file formats that fill them (filling.fill)
    sources: tuple[tuple[Layout, str], ...]
    # bits in products with low-bit weights; 8: bfloat16 with bfloat16 weights, if the target has it
    activation_bits: int
    heads: tuple[Head, ...]  # of attention
    activation: str = "silu"  # the gate's, as in LayerSpec
    cache_bits: int | None = None  # 8 for int8 keys and values, 16 for float16, None for float32
    softcap: float | None = None  # cap of attention's scores
    has_experts: bool = False  # a router chooses MLPs
    has_sinks: bool = False  # in attention's softmax
    has_gates: bool = False  # of attention's output
    has_short_conv: bool = False
    has_gated_delta: bool = False
    others: tuple[str, ...] = ()  # kinds of operations that few families have
    # of embeddings, like a source; NumPy looks up the rows of others
    embeddings: tuple[tuple[LowBitLayout, str], ...] = ()

    def activation_layout(self, layout: Layout) -> ActivationLayout:
        """The activations' layout for weights. Those without an offset share another's."""
        rounds = self.activation_bits == 8 and self.target.bf16
        if rounds and layout == FloatLayout("bfloat16"):
            return layouts.BFLOAT16
        if not _has_integers(layout) or self.activation_bits == 32:
            return layouts.FLOAT
        low_bit = [layout, *filter(_has_integers, self.layouts)]
        offsets = [products.dot_offset(self.target, other) for other in low_bit]
        offset = next(filter(None, offsets), 0)
        return layouts.activation_layout(self.activation_bits, self.target.dot, offset)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        return tuple(dict.fromkeys(layout for layout, _ in self.sources))

    @property
    def activations(self) -> tuple[ActivationLayout, ...]:
        return tuple(dict.fromkeys(self.activation_layout(layout) for layout in self.layouts))

    @property
    def gates(self) -> list[str]:
        """Sources of packing (packing.pack) of gated outputs of mixers."""
        has_silu = self.has_gated_delta and self.activation != "silu"
        return ["silu"] * has_silu + ["sigmoid"] * self.has_gates

    @property
    def rounds_to_bfloat16(self) -> bool:
        """Some products take activations in bfloat16."""
        return layouts.BFLOAT16 in self.activations


def _has_integers(layout: Layout) -> bool:
    """True for weights that integer activations are multiplied with."""
    return isinstance(layout, LowBitLayout) and not layout.is_e4m3


def tiles(target: Target, x_layout: ActivationLayout) -> tuple[int, ...]:
    """Sizes of tiles of activations in tokens, smallest first; the last is the full tile."""
    return target.tiles(low_bit=x_layout.is_integer)


def expert_tiles(target: Target) -> tuple[int, ...]:
    """Sizes of an expert's tiles in rows, smallest first: powers of two of all weights."""
    others = {1, 2, 4, 8}.intersection(target.tiles(low_bit=False))
    return tuple(size for size in target.tiles(low_bit=True) if size in others)


def split_tokens(
    target: Target, x_layout: ActivationLayout, tokens: int
) -> list[tuple[int, int, int]]:
    """By tile of activations, as the machine code packs them: first token, tokens, size."""
    sizes = tiles(target, x_layout)
    starts = range(0, tokens, sizes[-1])
    counts = [min(sizes[-1], tokens - first) for first in starts]
    return [
        (first, count, next(size for size in sizes if size >= count))
        for first, count in zip(starts, counts)
    ]
