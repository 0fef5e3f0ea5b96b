"""Stored tensors as the layers' matrices: mapped as they lie in the file for NumPy, in panels for compiled programs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from mlx_llama.core.errors import OutOfMemoryError
from mlx_llama.core.files.checkpoint import Checkpoint
from mlx_llama.core.files.quantized import AffineWeight
from mlx_llama.core.system import progress

from . import ops
from .kernels import Compilation
from .layers import Embedding, Linear, RMSNorm
from .quantized import QuantizedMatrix


class Weights:
    """A checkpoint's tensors by name, each as the layer that holds it.

    compilation: how matrices are compiled, None for NumPy. code: the machine code for them, None for NumPy. Everything is
    read when the object is made. Raises OutOfMemoryError where memory does not hold the panels.
    """

    def __init__(self, checkpoint: Checkpoint, compilation: Compilation | None = None):
        self.config, self.tensors = checkpoint.config, checkpoint.tensors
        self.code, self._panels = None, {}
        if compilation:
            self._compile(compilation)

    def linear(self, *names: str) -> Linear:
        """The modules' matrices as one, rows on rows, and their biases where they have any."""
        parts = tuple(self._panels[name] if self.code else self._mapped(name) for name in names)
        biases = [self._vector(f"{name}.bias") for name in names if f"{name}.bias" in self.tensors]
        return Linear(parts[0] if len(parts) == 1 else parts, np.concatenate(biases) if biases else None)

    def norm(self, name: str | None) -> RMSNorm | None:
        """The norm of that name; None for None."""
        return name and RMSNorm(self._vector(f"{name}.weight"), self.config.rms_norm_eps)

    def embedding(self, name: str) -> Embedding:
        """The embedding, from which rows are taken as they lie in the file."""
        return Embedding(self._mapped(name))

    def _vector(self, name: str) -> np.ndarray:
        return self.tensors[name].float32()

    def _mapped(self, name: str) -> ops.Matrix:
        """As it lies in the file; copied only from an unaligned one."""
        stored = self.tensors[f"{name}.weight"]
        return QuantizedMatrix(stored) if isinstance(stored, AffineWeight) else np.require(stored.bits, requirements="A")

    def _compile(self, how: Compilation) -> None:
        """Plan the panels of all matrices, compile the code for them, then fill them slab by slab."""
        from .kernels import panels
        from .kernels.program import Code, Recipe

        names = [name.removesuffix(".weight") for name, tensor in self.tensors.items() if len(tensor.shape) == 2]
        embedding = "model.embed_tokens"
        stored = {name: self.tensors[f"{name}.weight"] for name in names if name != embedding or name == self.config.head_name}
        plans = {name: panels.Plan(tensor, panels.layout_of(tensor)) for name, tensor in stored.items()}
        sources = sorted({(plan.layout, plan.source) for plan in plans.values()}, key=lambda one: (one[0].name, one[1]))
        self.code = Code(Recipe(how.target, tuple(sources), how.activation_bits, self.config.head_dim))
        self.nbytes = sum(plan.nbytes for plan in plans.values())
        size = sum(-(-plan.nbytes // panels.Arena.ALIGN) * panels.Arena.ALIGN for plan in plans.values())
        try:
            arena = panels.Arena(size)
        except (OSError, MemoryError, OverflowError, ValueError):
            raise OutOfMemoryError.of(size) from None
        self._panels = {name: panels.Panels(plan, arena, arena.take(plan.nbytes)) for name, plan in plans.items()}
        advance = progress.meter(sum(plan.tensor.nbytes for plan in plans.values()))
        with ThreadPoolExecutor(how.threads) as pool:
            waiting: list[tuple[panels.Plan, list]] = []

            def collect(keep: int) -> None:
                while len(waiting) > keep:
                    plan, jobs = waiting.pop(0)
                    for job in jobs:
                        job.result()
                    plan.tensor.release()  # evict the file's pages; the panels are made
                    advance(plan.tensor.nbytes)

            for matrix in self._panels.values():
                fill = self.code.fill[matrix.plan.layout, matrix.plan.source]
                waiting.append((matrix.plan, panels.fill(matrix, fill, pool.submit)))
                collect(2)
            collect(0)
