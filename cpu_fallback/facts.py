"""The cpu backend as the doctor describes it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from mlx_llama.core.backends.interface import BackendFacts, WeightsPlan
from mlx_llama.core.errors import BackendError
from mlx_llama.core.files.checkpoint import Checkpoint, Tensor
from mlx_llama.core.files.quantized import AffineWeight
from mlx_llama.core.system import machine
from mlx_llama.core.system.machine import Gpus

from .kernels import find_target

if TYPE_CHECKING:
    from .kernels.target import Target

DISTRIBUTIONS = ("numpy", "llvmlite")
INPUTS = "model.embed_tokens_per_layer.weight"  # Gemma 4's inputs of layers
DROPS_POSITIONS = True  # layers with a window keep what it sees
SMALL_TABLE = 64 << 20  # bytes of an embedding up to which the compiled path copies it


def describe(packages: dict[str, str], gpus: Gpus) -> BackendFacts:
    memory = {"memory_bytes": machine.free_memory(), "memory_is": "free"}
    facts = partial(BackendFacts, "cpu", True, packages=packages, **memory)
    try:
        target, reason = find_target()
    except BackendError as error:
        return BackendFacts("cpu", False, str(error), packages)
    if target is None:
        reason = f"no compiled kernels, which are several times faster: {reason}"
        return facts(reason=reason, device="NumPy")
    device = f"compiled kernels for {target.name}, {_describe_prefetch(target)}"
    return facts(reason="", device=device, kernels=target.name)


def _describe_prefetch(target: Target) -> str:
    """The choice of prefetches and its origin."""
    from .kernels.target import find_host, find_prefetches

    processor = find_host().cpu
    is_measured = find_prefetches(processor, target.name)[1]
    distances = " and ".join(str(distance) for _, distance in target.prefetch("any"))
    choice = f"prefetching {distances} bytes ahead" if distances else "without prefetching"
    if others := len(target.prefetches) - 1:
        choice += f", but for {others} kind{'s' * (others > 1)} of weights"
    return f"{choice} ({'' if is_measured else 'not '}measured on {processor})"


def plan_weights(checkpoint: Checkpoint, facts: BackendFacts) -> WeightsPlan:
    tensors = list(checkpoint.tensors.values())
    low_bit = any(isinstance(weight, AffineWeight) for weight in tensors)
    in_integers = facts.kernels and any(has_integers(weight) for weight in tensors)
    operand = "" if not low_bit else "16-bit integers" if in_integers else "float32"
    # NumPy reads a mapped file, whose pages count as taken while they are used.
    nbytes = sum(tensor.nbytes for tensor in tensors)
    if facts.kernels:
        names = "model.embed_tokens.weight", INPUTS
        tables = [tensor for tensor in tensors if tensor.name in names]
        copied = sum(table.nbytes for table in tables if table.nbytes <= SMALL_TABLE)
        nbytes = weights_nbytes(tensors, "float32", False) + copied
    return WeightsPlan("float32", operand, nbytes)


def has_integers(weight: Tensor | AffineWeight) -> bool:
    """True for low-bit weights that kernels multiply with integer activations: all but mxfp8."""
    return isinstance(weight, AffineWeight) and weight.mode != "mxfp8"


def weights_nbytes(tensors: Iterable[Tensor | AffineWeight], dtype: str, on_gpu: bool) -> int:
    """Bytes of all weights in panels, at their stored width, whatever the activations' dtype.

    An embedding that is not the head too stays in the mapped file, as does that of layers' inputs.
    """
    from .kernels import panels

    tensors = list(tensors)
    mapped = {INPUTS}
    if any(tensor.name == "lm_head.weight" for tensor in tensors):
        mapped.add("model.embed_tokens.weight")
    total = 0
    for tensor in tensors:
        if len(tensor.shape) < 2:
            total += 4 * math.prod(tensor.shape)
        elif tensor.name not in mapped:
            total += panels.Plan(tensor, panels.weight_layout(tensor)).nbytes
    return total
