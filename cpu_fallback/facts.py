"""The cpu backend as the doctor describes it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from mlx_llama.core.backends.interface import BackendFacts, WeightsPlan
from mlx_llama.core.errors import BackendError
from mlx_llama.core.files.checkpoint import Tensor
from mlx_llama.core.files.quantized import AffineWeight
from mlx_llama.core.system import machine
from mlx_llama.core.system.gpus import Gpus

from .kernels import compilation

if TYPE_CHECKING:
    from .kernels.target import Target

DISTRIBUTIONS = ("numpy", "llvmlite")


def describe(packages: dict[str, str], gpus: Gpus) -> BackendFacts:
    memory = machine.free_memory()
    try:
        target, reason = compilation.find_target()
    except BackendError as error:
        return BackendFacts("cpu", False, str(error), packages)
    if target is None:
        reason = f"no compiled kernels, which are several times faster: {reason}"
        return BackendFacts("cpu", True, reason, packages, False, "NumPy", (), memory, "free")
    return BackendFacts(
        "cpu",
        True,
        "",
        packages,
        False,
        f"compiled kernels for {target.name}, {_describe_prefetch(target)}",
        (),
        memory,
        "free",
        kernels=target.name,
    )


def _describe_prefetch(target: Target) -> str:
    """The choice of prefetches and its origin."""
    from .kernels.target import find_host, find_prefetches

    processor = find_host().cpu
    origin = (
        f"measured on {processor}"
        if find_prefetches(processor, target.name)[1]
        else f"not measured on {processor}"
    )
    distances = " and ".join(str(distance) for _, distance in target.prefetch("any"))
    choice = f"prefetching {distances} bytes ahead" if distances else "without prefetching"
    own = len(target.prefetches) - 1
    return (
        choice
        + (f", but for {own} kind{'s' * (own > 1)} of weights" if own else "")
        + f" ({origin})"
    )


def plan_weights(
    tensors: Iterable[Tensor | AffineWeight],
    stored: str,
    facts: BackendFacts,
    exceeds_float16: bool = False,
) -> WeightsPlan:
    tensors = list(tensors)
    low_bit = any(isinstance(weight, AffineWeight) for weight in tensors)
    operand = "" if not low_bit else "16-bit integers" if facts.kernels else "float32"
    # NumPy reads a mapped file, whose pages count as taken while they are used.
    nbytes = (
        weights_nbytes(tensors, "float32", False)
        if facts.kernels
        else sum(tensor.nbytes for tensor in tensors)
    )
    return WeightsPlan("float32", operand, nbytes)


def weights_nbytes(tensors: Iterable[Tensor | AffineWeight], dtype: str, on_gpu: bool) -> int:
    """Bytes of all weights once packed in panels, at their stored width, whatever the activations'
    dtype.

    An embedding that is not the head too stays in the mapped file.
    """
    from .kernels import panels

    tensors = list(tensors)
    names = {tensor.name for tensor in tensors}
    mapped = {"model.embed_tokens.weight"} if "lm_head.weight" in names else set()
    matrices = [
        tensor for tensor in tensors if len(tensor.shape) == 2 and tensor.name not in mapped
    ]
    vectors = sum(tensor.shape[0] * 4 for tensor in tensors if len(tensor.shape) == 1)
    return (
        sum(panels.Plan(tensor, panels.weight_layout(tensor)).nbytes for tensor in matrices)
        + vectors
    )
