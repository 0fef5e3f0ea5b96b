"""Storage of a row of a cache: tokens, keys and values, as numbers or as 8-bit codes; recurrent
states where kernels change them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from mlx_llama.core.backends.positions import CACHE_GROUP
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.system.forks import cached_property

# largest scale of 8-bit codes: 127 times that is finite in float16, in which they are multiplied
LARGEST_SCALE = 515.0
ALIGNED = 16  # numbers between the parts of recurrent states, so that kernels load 16 bytes at once


@dataclass(frozen=True)
class Storage:
    """A row's tokens, keys and values."""

    # int32 [allocated + 1]: the step at the last position stores the next token there
    tokens: Tensor
    numbers: Tensor  # of stored_dtype: keys and values [2, G, allocated, D] of each layer in turn
    scales: Tensor | None  # for 8-bit codes, float16: [2, G, allocated, groups] of each layer
    shapes: tuple[tuple[int, int], ...] = ()  # (G, D) of each layer that stores any

    @classmethod
    def allocate(
        cls,
        config: LlamaConfig,
        allocated: int,
        dtype: torch.dtype,
        bits: int | None,
        device: torch.device,
    ) -> Storage:
        """Zeros. dtype: of the activations; bits: as in stored_dtype."""
        shapes = key_shapes(config)
        scales, zeros = None, partial(torch.zeros, device=device)
        count = 2 * allocated * sum(heads * size for heads, size in shapes)
        numbers = zeros(count, dtype=stored_dtype(dtype, bits))
        if bits == 8:
            groups = sum(heads * count_groups(size) for heads, size in shapes)
            scales = zeros(2 * allocated * groups, dtype=torch.float16)
        return cls(zeros(allocated + 1, dtype=torch.int32), numbers, scales, shapes)

    @cached_property
    def layers(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values by slot: views [1, G, allocated, D] of the numbers, made once."""
        return [(layer[:1], layer[1:]) for layer in self._split(self.numbers)]

    @cached_property
    def layer_scales(self) -> list[Tensor]:
        """Scales by slot: views [2, G, allocated, groups]."""
        return self._split(self.scales, count_groups)

    def _split(
        self, memory: Tensor, width: Callable[[int], int] = lambda size: size
    ) -> list[Tensor]:
        """Views [2, G, allocated, width(D)] of memory, by slot."""
        shapes = [(2, heads, len(self.tokens) - 1, width(size)) for heads, size in self.shapes]
        parts = memory.view(-1).split([*map(math.prod, shapes)])
        return [part.view(shape) for part, shape in zip(parts, shapes)]

    def arrays(self) -> list[Tensor]:
        """All arrays."""
        return [self.numbers, *([] if self.scales is None else [self.scales]), self.tokens[:-1]]

    def copy_from(self, source: Storage, length: int) -> None:
        """Copy the first `length` positions."""
        self.tokens[:length] = source.tokens[:length]
        pairs = [(to, of) for both in zip(self.layers, source.layers) for to, of in zip(*both)]
        if self.scales is not None:
            pairs += zip(self.layer_scales, source.layer_scales)
        for target, stored in pairs:
            target[:, :, :length] = stored[:, :, :length]

    def write(self, layer: int, part: int, start: int, new: Tensor) -> None:
        """Store a layer's keys (part 0) or values (1) from `start` on. new: [1, G, T, D]."""
        end = start + new.shape[2]
        target = self.layers[layer][part][:, :, start:end]
        if self.scales is None:
            target[:] = new
        else:
            target[0], self.layer_scales[layer][part, :, start:end] = quantize(new[0])

    def read(self, layer: int, part: int, start: int, end: int, dtype: torch.dtype) -> Tensor:
        """A layer's keys (part 0) or values (1) of positions `start` .. `end` - 1: [G, end - start,
        D]; a view of numbers of `dtype`.
        """
        numbers = self.layers[layer][part][0, :, start:end]
        if self.scales is None:
            return numbers.to(dtype)
        return dequantize(numbers, self.layer_scales[layer][part, :, start:end], dtype)


class Place(NamedTuple):
    """The offset of a layer's keys and values in a row's storage: `base` times `unit` numbers, and
    `scale_base` times `scale_unit` scales, for each allocated position. The units divide the widths
    of all layers, so that kernels know how addresses are aligned.
    """

    base: int
    unit: int
    scale_base: int
    scale_unit: int


def key_shapes(config: LlamaConfig) -> tuple[tuple[int, int], ...]:
    """(G, D) by slot."""
    return tuple((mixer.key_value_heads, mixer.head_dim) for mixer in config.attentions)


def key_places(shapes: Sequence[tuple[int, int]]) -> list[Place]:
    """By slot. shapes: (G, D) of each."""
    sides = []
    for widths in zip(*((size, count_groups(size)) for _, size in shapes)):
        unit = math.gcd(*widths)
        counts = (2 * heads * width // unit for (heads, _), width in zip(shapes, widths))
        sides.append([(start, unit) for start in accumulate(counts, initial=0)])
    return [Place(*numbers, *scales) for _, numbers, scales in zip(shapes, *sides)]


def count_groups(head_dim: int) -> int:
    """Scales of a head's codes at one position."""
    return -(-head_dim // CACHE_GROUP)


def state_places(config: LlamaConfig) -> list[tuple[int, ...]]:
    """Offsets of each recurrent state's parts in a row's numbers, by slot, then the count of all
    numbers. Multiples of ALIGNED.
    """
    places, end = [], 0
    for mixer in config.recurrent:
        starts = []
        for shape in mixer.states:
            starts.append(end)
            end += -(-math.prod(shape) // ALIGNED) * ALIGNED
        places.append(starts)
    return [(*starts, end) for starts in places]


class LiveSlot(tuple):
    """States, as of Positions, that a later call overwrites; their numbers in one array."""

    numbers: Tensor

    @classmethod
    def split(cls, config: LlamaConfig, numbers: Tensor) -> LiveSlot:
        """Views of numbers, float32 [n]."""
        slot = cls(
            tuple(
                numbers[start : start + math.prod(shape)].view(shape)
                for start, shape in zip(place, mixer.states)
            )
            for place, mixer in zip(state_places(config), config.recurrent)
        )
        slot.numbers = numbers
        return slot


class LiveStates:
    """A row's recurrent states at a fixed address. A call reads `slot` and writes the other one, so
    that what a call that fails has written is never read.
    """

    def __init__(self, config: LlamaConfig, device: torch.device):
        self.numbers = torch.zeros((2, state_places(config)[0][-1]), device=device)
        self.slots = [LiveSlot.split(config, numbers) for numbers in self.numbers]
        self.slot = 0

    def load(self, states: tuple) -> None:
        """Set the slot to be read; it is not, where there are no states yet."""
        if states and states is not (slot := self.slots[self.slot]):
            torch._foreach_copy_(
                *([part for parts in each for part in parts] for each in (slot, states))
            )


def stored_dtype(dtype: torch.dtype, bits: int | None) -> torch.dtype:
    """The dtype of a cache's numbers. dtype: of the activations. bits: 8 for codes, 16 for float16
    in place of float32, None for `dtype`."""
    if bits == 8:
        return torch.int8
    return torch.float16 if bits == 16 and dtype == torch.float32 else dtype


def split_rows(x: Tensor) -> tuple[Tensor, ...]:
    """Rows of a batch, [1, ...] each."""
    return (x,) if x.shape[0] == 1 else x.split(1)


def quantize(values: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 [..., D] and scales float16 [..., groups] of values [..., D], by CACHE_GROUP."""
    size = values.shape[-1]
    padded = torch.nn.functional.pad(values.float(), (0, -size % CACHE_GROUP))
    padded = padded.unflatten(-1, (-1, CACHE_GROUP))
    scales = (padded.abs().amax(-1) / 127).clamp(max=LARGEST_SCALE).half()
    wide = scales.float()[..., None]
    codes = torch.where(wide > 0, padded / wide, 0).round().clamp(-127, 127).to(torch.int8)
    return codes.flatten(-2)[..., :size], scales


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `quantize`: values [..., D] in `dtype`."""
    wide = scales.float().repeat_interleave(CACHE_GROUP, dim=-1)[..., : codes.shape[-1]]
    return (codes.float() * wide).to(dtype)
