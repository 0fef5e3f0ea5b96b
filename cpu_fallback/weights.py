"""Stored tensors as the layers' matrices: memory-mapped, or packed in panels."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from mlx_llama.core.backends.weights import BaseWeights, refuse_formats
from mlx_llama.core.errors import OutOfMemoryError
from mlx_llama.core.files.checkpoint import Checkpoint, Tensor
from mlx_llama.core.files.quantized import AffineWeight
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.models.parts import GatedDelta, ShortConv
from mlx_llama.core.system import progress

from . import facts, ops, runtime

if TYPE_CHECKING:
    from .kernels.panels import Panels, Slab
    from .kernels.target import Target

READ_AHEAD = 16  # slabs of a few megabytes that the system reads from the disk in advance


class Weights(BaseWeights):
    """Layers of NumPy arrays or panels."""

    ops, runtime = ops, runtime

    def __init__(
        self,
        checkpoint: Checkpoint,
        target: Target | None = None,
        threads: int = 1,
        bits: int = 16,
        cache_bits: int | None = None,
    ):
        """Pack all panels. target: None for NumPy; the others are those of `_compile`. Raises
        OutOfMemoryError.
        """
        super().__init__(checkpoint)
        self.code, self._panels = None, {}  # machine code of the compiled path
        self.rank = 0  # maximum rows of an adapter's first matrix in panels
        if target:
            self._compile(target, threads, bits, cache_bits)

    def _matrix(self, names: Sequence[str]) -> ops.Matrices:
        parts = self._parts(names)
        return parts[0] if len(parts) == 1 else parts

    def _parts(self, names: Sequence[str]) -> tuple[ops.Matrix, ...]:
        return tuple(self._panels[name] if self.code else self._table(name) for name in names)

    def _adapt(self, names: Sequence[str]) -> ops.Adapters | None:
        """Additions of the adapters to the modules' product, by number; None: nothing."""
        rows = [self.tensors[f"{name}.weight"].shape[0] for name in names]
        pairs = {
            number: pair
            for number, adapter in enumerate(self.adapters, 1)
            if (pair := adapter.fuse(names, rows))
        }
        if not pairs:
            return None
        if self.code is None:
            return pairs
        return {number: self._pack_pair(a, b, rows) for number, (a, b) in pairs.items()}

    def _pack_pair(
        self, a: np.ndarray, b: np.ndarray, rows: Sequence[int]
    ) -> tuple[Panels, tuple[Panels, ...]]:
        """Panels of a [R, K], R padded to whole blocks, and of each module's rows of b [N, R]."""
        from .kernels.panels import ADAPTER, pack_array

        rank = -(-len(a) // ADAPTER.block) * ADAPTER.block
        self.rank = max(self.rank, rank)
        a, b = np.pad(a, ((0, rank - len(a)), (0, 0))), np.pad(b, ((0, 0), (0, rank - len(a))))
        fill, parts = self.code.fill[ADAPTER, ""], np.split(b, np.cumsum(rows)[:-1])
        return pack_array(a, fill), tuple(pack_array(part, fill) for part in parts)

    def _stack(self, names: Sequence[str]) -> ops.Stack:
        stack = self._parts(names)
        if self.code and len({panels.plan.layout for panels in stack}) > 1:
            keys = [f"{name}.weight" for name in names]
            raise refuse_formats(keys, [panels.plan.layout for panels in stack], operator.eq)
        return stack

    def _shift(self, vector: np.ndarray, offset: float) -> np.ndarray:
        return vector + np.float32(offset)

    def _ones(self, width: int) -> np.ndarray:
        return np.ones(width, np.float32)

    _float32 = staticmethod(np.ascontiguousarray)

    def _vector(self, keys: Sequence[str]) -> np.ndarray:
        return np.concatenate([self._read(self.tensors[key]) for key in keys])

    def _read(self, stored: Tensor) -> np.ndarray:
        stored.check_file()
        values = stored.float32()
        stored.release()  # the huge page that holds it
        return values

    def _table(self, name: str) -> ops.Matrix:
        """The stored matrix, memory-mapped; copied if unaligned. The compiled path maps nothing
        else, so it also copies a small one: then no truncation of the file can end the process.
        """
        stored = self.tensors[f"{name}.weight"]
        stored.check_file()
        copies = self.code is not None and stored.nbytes <= facts.SMALL_TABLE
        if isinstance(stored, AffineWeight):
            return stored.copy() if copies else stored
        bits = np.require(stored.bits, requirements="A")
        if copies:
            bits = bits.copy()
            bits.flags.writeable = False
        return bits

    def _compile(self, target: Target, threads: int, bits: int, cache_bits: int | None) -> None:
        """Plan all panels, compile their code, and map them from the cache or fill an arena. bits:
        of activations in products with low-bit weights, 8, 16 or 32; cache_bits: as in LoadOptions.
        """
        from .kernels import panel_files, panels
        from .kernels.program import Code
        from .kernels.recipe import Head, Recipe

        tensors, c = self.tensors, self.config
        tables = ["model.embed_tokens", *([c.inputs.embedding] if c.inputs else [])]
        filters = {f"{mixer.conv}.weight" for mixer in c.recurrent}
        matrices = [
            key for key, tensor in tensors.items() if len(tensor.shape) == 2 and key not in filters
        ]
        plans = {
            name: panels.Plan(tensors[key], panels.weight_layout(tensors[key]))
            for key in matrices
            if (name := key.removesuffix(".weight")) not in tables or name == c.head_name
        }
        kinds = {(plan.layout, plan.source) for plan in plans.values()}
        if self.adapters:
            kinds.add((panels.ADAPTER, ""))
        looked_up = [tensors[f"{table}.weight"] for table in tables]
        lookups = [panels.Plan(tensor, panels.weight_layout(tensor)) for tensor in looked_up]
        embeddings = dict.fromkeys((plan.layout, plan.source) for plan in lookups if plan.source)
        sources = tuple(sorted(kinds, key=lambda kind: (kind[0].name, kind[1])))
        attentions = [layer.attention for layer in c.layers if layer.attention]
        heads = (Head(m.head_dim, 2 * (m.angles.stop - m.angles.start)) for m in attentions)
        recipe = Recipe(
            target,
            sources,
            bits,
            tuple(dict.fromkeys(heads)),
            c.activation,
            cache_bits,
            next((mixer.softcap for mixer in c.attentions), None),
            has_experts=c.num_experts > 0,
            has_sinks=any(mixer.sinks for mixer in c.attentions),
            has_gates=any(mixer.gate for mixer in c.attentions),
            has_short_conv=any(isinstance(mixer, ShortConv) for mixer in c.recurrent),
            has_gated_delta=any(isinstance(mixer, GatedDelta) for mixer in c.recurrent),
            others=_find_others(c),
            embeddings=tuple(embeddings),
        )
        self.code = Code(recipe)
        align = panels.Arena.ALIGN
        size = sum(-(-plan.nbytes // align) * align for plan in plans.values())
        file = panel_files.find(plans.values(), size, self.code.checksum)
        pool = ThreadPoolExecutor(threads)
        try:
            arena = file.open(pool) if file else None
            if is_packed := arena is None:
                try:
                    arena = panels.allocate_arena(size)
                except (OSError, MemoryError, OverflowError, ValueError):
                    raise OutOfMemoryError.of(size) from None
            self._panels = {
                name: panels.Panels(plan, arena, arena.take(plan.nbytes))
                for name, plan in plans.items()
            }
            if is_packed:
                self._fill(pool)
        finally:
            pool.shutdown(cancel_futures=True)
        if file and is_packed:
            file.save(arena)

    def _fill(self, pool: Executor) -> None:
        slabs = [slab for matrix in self._panels.values() for slab in matrix.slabs()]
        advance = progress.meter(sum(slab.nbytes for slab in slabs))

        def fill(slab: Slab, later: Slab | None) -> int:
            if later:
                later.read_ahead()
            plan = slab.matrix.plan
            slab.fill(self.code.fill[plan.layout, plan.source])
            return slab.nbytes

        for nbytes in pool.map(fill, slabs, [*slabs[READ_AHEAD:], *[None] * READ_AHEAD]):
            advance(nbytes)


def _find_others(config: LlamaConfig) -> tuple[str, ...]:
    """Kinds of operations that few families have, as of Recipe."""
    layers, kinds = config.layers, dict[str, None]()
    if any(layer.scalar for layer in layers):
        kinds["adjust scaled"] = None
    if any(mixer.norms_values for mixer in config.attentions):
        kinds["norm_values"] = None
    mixers = (layer.attention for layer in layers if layer.attention)
    kinds |= {f"rotate_queries {m.head_dim}": None for m in mixers if not m.new_heads}
    if config.inputs:
        kinds["layer_inputs"] = None
    if any(layer.experts and layer.experts.router.expert_scale for layer in layers):
        kinds["route scaled"] = None
    return tuple(kinds)
