"""Stored tensors as the layers' matrices: memory-mapped for NumPy, packed in panels for compiled programs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from mlx_llama.core.errors import OutOfMemoryError
from mlx_llama.core.files.checkpoint import Checkpoint
from mlx_llama.core.files.quantized import AffineWeight
from mlx_llama.core.system import progress

from . import ops
from .kernels.compilation import Compilation
from .layers import Embedding, Linear, RMSNorm
from .quantized import QuantizedMatrix


class Weights:
    """Layers made from a checkpoint's tensors, by name.

    compilation: options of the compiled path, None for NumPy. code: its machine code, None for NumPy. The constructor packs
    all panels. Raises OutOfMemoryError if they do not fit in memory.
    """

    def __init__(self, checkpoint: Checkpoint, compilation: Compilation | None = None):
        self.config, self.tensors = checkpoint.config, checkpoint.tensors
        self.code, self._panels = None, {}
        if compilation:
            self._compile(compilation)

    def linear(self, *names: str) -> Linear:
        """Concatenate the rows of the modules' matrices, and their biases if there are any."""
        parts = tuple(self._panels[name] if self.code else self._map(name) for name in names)
        biases = [self._vector(f"{name}.bias") for name in names if f"{name}.bias" in self.tensors]
        return Linear(parts[0] if len(parts) == 1 else parts, np.concatenate(biases) if biases else None)

    def norm(self, name: str | None) -> RMSNorm | None:
        """The norm `name`; None for None."""
        return name and RMSNorm(self._vector(f"{name}.weight"), self.config.rms_norm_eps)

    def embedding(self, name: str) -> Embedding:
        """The embedding, memory-mapped: rows are widened when they are looked up."""
        return Embedding(self._map(name))

    def _vector(self, name: str) -> np.ndarray:
        return self.tensors[name].float32()

    def _map(self, name: str) -> ops.Matrix:
        """The stored matrix, memory-mapped; copied if unaligned."""
        stored = self.tensors[f"{name}.weight"]
        return QuantizedMatrix(stored) if isinstance(stored, AffineWeight) else np.require(stored.bits, requirements="A")

    def _compile(self, compilation: Compilation) -> None:
        """Plan all panels, compile their code, allocate one arena, and fill it on several threads."""
        from .kernels import panels
        from .kernels.program import Code, Recipe

        names = [name.removesuffix(".weight") for name, tensor in self.tensors.items() if len(tensor.shape) == 2]
        embedding = "model.embed_tokens"
        stored = {name: self.tensors[f"{name}.weight"] for name in names
                  if name != embedding or name == self.config.head_name}
        plans = {name: panels.Plan(tensor, panels.weight_layout(tensor)) for name, tensor in stored.items()}
        sources = sorted({(plan.layout, plan.source) for plan in plans.values()}, key=lambda one: (one[0].name, one[1]))
        self.code = Code(Recipe(compilation.target, tuple(sources), compilation.activation_bits, self.config.head_dim,
                                self.config.activation, compilation.cache_bits))
        size = sum(-(-plan.nbytes // panels.Arena.ALIGN) * panels.Arena.ALIGN for plan in plans.values())
        try:
            arena = panels.Arena(size)
        except (OSError, MemoryError, OverflowError, ValueError):
            raise OutOfMemoryError.of(size) from None
        self._panels = {name: panels.Panels(plan, arena, arena.take(plan.nbytes)) for name, plan in plans.items()}
        advance = progress.meter(sum(plan.tensor.nbytes for plan in plans.values()))
        with ThreadPoolExecutor(compilation.threads) as pool:
            waiting: list[tuple[panels.Plan, list]] = []

            def collect(keep: int) -> None:
                while len(waiting) > keep:
                    plan, jobs = waiting.pop(0)
                    for job in jobs:
                        job.result()
                    plan.tensor.release()  # evict the file's pages
                    advance(plan.tensor.nbytes)

            for matrix in self._panels.values():
                fill = self.code.fill[matrix.plan.layout, matrix.plan.source]
                waiting.append((matrix.plan, panels.fill(matrix, fill, pool.submit)))
                collect(2)
            collect(0)
