"""The cpu backend as the doctor describes it."""

from __future__ import annotations

from collections.abc import Iterable

from mlx_llama.core.backends.interface import BackendFacts, WeightsPlan
from mlx_llama.core.errors import BackendError
from mlx_llama.core.files.checkpoint import Tensor
from mlx_llama.core.files.quantized import AffineWeight
from mlx_llama.core.system import machine
from mlx_llama.core.system.gpus import Gpus

from .kernels import compilation

DISTRIBUTIONS = ("numpy", "llvmlite")
LOADING_PEAK = 1.25  # memory over file size while loading: 1.1 to 1.25 measured (README, Figures)


def describe(packages: dict[str, str], gpus: Gpus) -> BackendFacts:
    """This backend here. packages: versions of those `DISTRIBUTIONS` that are installed."""
    memory = machine.free_memory()
    try:
        target, reason = compilation.find_target()
    except BackendError as error:
        return BackendFacts("cpu", False, str(error), packages)
    if target is None:
        reason = f"no compiled kernels, which are several times faster: {reason}"
        return BackendFacts("cpu", True, reason, packages, False, "NumPy", (), memory, "free")
    return BackendFacts("cpu", True, "", packages, False, f"compiled kernels for {target.name}", (), memory, "free",
                        kernels=target.name)


def plan_weights(tensors: Iterable[Tensor | AffineWeight], stored: str, facts: BackendFacts) -> WeightsPlan:
    """The weights on this machine's device. stored: the checkpoint's dtype."""
    tensors = list(tensors)
    low_bit = any(isinstance(weight, AffineWeight) for weight in tensors)
    operand = "" if not low_bit else "16-bit integers" if facts.kernels else "float32"
    return WeightsPlan("float32", operand, weights_nbytes(tensors, "float32", False))


def weights_nbytes(tensors: Iterable[Tensor | AffineWeight], dtype: str, on_gpu: bool) -> int:
    """Most bytes that the weights take while loading. They keep their stored width, whatever the activations' dtype."""
    return int(sum(weight.nbytes for weight in tensors) * LOADING_PEAK)
