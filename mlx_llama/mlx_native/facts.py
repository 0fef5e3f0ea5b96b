"""The MLX backend as the doctor describes it. Imports no MLX."""

from __future__ import annotations

import importlib.util
import math
import platform
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from mlx_llama.core.backends.interface import BackendFacts, WeightsPlan
from mlx_llama.core.dtypes import ITEMSIZE
from mlx_llama.core.files.checkpoint import Checkpoint, Tensor
from mlx_llama.core.files.quantized import AffineWeight
from mlx_llama.core.system import machine
from mlx_llama.core.system.machine import Gpus

DISTRIBUTIONS = ("mlx", "mlx-metal", "mlx-cpu", "mlx-cuda", "mlx-cuda-12", "mlx-cuda-13")
DROPS_POSITIONS = False  # layers with a window keep what it sees
# bits for a sub scale, and for the sub bias beside it; other formats have none
SUB_BITS = {"Q2_K": 4, "Q4_K": 8, "Q5_K": 8}
INDEX_BITS = {"IQ4_XS": 4}  # bits of an index into the table of codes; other formats have none


def describe(packages: dict[str, str], gpus: Gpus) -> BackendFacts:
    facts = partial(BackendFacts, "mlx", True, packages=packages)
    on_cpu = partial(facts, device="the CPU", memory_bytes=machine.free_memory(), memory_is="free")
    if platform.system() == "Darwin":
        if platform.machine() != "arm64":
            return on_cpu(reason="Metal needs Apple silicon")
        metal = partial(facts, gpu=True, device="the GPU, through Metal", kernels="metal")
        return metal(reason="", memory_bytes=_metal_memory(), memory_is="an estimate")
    if not any(name.startswith("mlx-") for name in packages) and not _has_library():
        reason = (
            "backend 'mlx' lacks its library, which the package 'mlx' alone does not "
            "bring here: pip install 'mlx[cpu]' (or 'mlx[cuda13]' for NVIDIA GPUs)"
        )
        return BackendFacts("mlx", False, reason, packages)
    if not any(name.startswith("mlx-cuda") for name in packages):
        return on_cpu(reason="no GPU: Metal needs Apple silicon, CUDA the package mlx[cuda13]")
    if gpus.seen is False:
        return on_cpu(reason=gpus.absence)
    name, memory = gpus.first[:2] if gpus.first else ("a GPU", None)
    state = "free" if memory else ""
    return facts(reason="", gpu=gpus.seen, device=name, memory_bytes=memory, memory_is=state)


def plan_weights(checkpoint: Checkpoint, facts: BackendFacts) -> WeightsPlan:
    tensors, stored = list(checkpoint.tensors.values()), checkpoint.dtype
    on_gpu = facts.gpu is not False
    low_bit = [tensor for tensor in tensors if isinstance(tensor, AffineWeight)]
    operands = [product_dtype(weight, stored, on_gpu) for weight in low_bit]
    has_kernel = facts.kernels is not None
    nbytes = sum(tensor_nbytes(tensor, stored, on_gpu, has_kernel) for tensor in tensors)
    return WeightsPlan(stored, " or ".join(dict.fromkeys(operands)), nbytes)


def weights_nbytes(tensors: Iterable[Tensor | AffineWeight], dtype: str, on_gpu: bool) -> int:
    return sum(tensor_nbytes(tensor, dtype, on_gpu) for tensor in tensors)


def tensor_nbytes(
    weight: Tensor | AffineWeight, dtype: str, on_gpu: bool, has_kernel: bool = True
) -> int:
    """Bytes of a packed tensor. dtype: of activations. has_kernel: as in `keeps_levels`."""
    count = math.prod(weight.shape)
    if not isinstance(weight, AffineWeight):
        return count * ITEMSIZE[dtype]
    if weight.mode != "affine":
        return weight.nbytes
    groups, bits = count // weight.group_size, weight.bits
    if keeps_levels(weight, on_gpu, has_kernel):
        bits = INDEX_BITS.get(weight.format, bits)
        # a number for a group's sub scale and sub bias, a float16 for super scale and super bias
        scalings = groups * (2 if SUB_BITS.get(weight.format) == 8 else 1)
        scalings += count // 256 * 2 * (1 + weight.has_biases)
    else:
        scalings = 2 * groups * ITEMSIZE[product_dtype(weight, dtype, on_gpu)]
    return count * bits // 8 + scalings


def keeps_levels(weight: AffineWeight, on_gpu: bool, has_kernel: bool = True) -> bool:
    """True if a matrix keeps its two levels of scales, for the kernels of two_level.py.

    MLX's own kernels want one scale and one bias for each group of 32, which would cost 0.4 to 1.4
    bits per weight more. has_kernel: the kernels run on that GPU. Experts are multiplied by MLX's
    own kernels, which choose matrices by number.
    """
    return on_gpu and has_kernel and weight.two_level and ".experts." not in weight.name


def product_dtype(weight: AffineWeight, dtype: str, on_gpu: bool) -> str:
    """The dtype that a low-bit matrix is multiplied in, that of its scales. dtype: of activations.

    On a GPU it is the activations', if that is the dtype of the stored scales: the kernels sum
    16-bit operands in float32. Else float32: on the CPU MLX sums 16-bit operands in 16 bits, 1e-2
    off and 8 to 40 times slower.
    """
    return dtype if on_gpu and weight.scale_dtype == dtype else "float32"


def _has_library() -> bool:
    spec = importlib.util.find_spec("mlx")
    return any(
        any(Path(folder).glob("lib/libmlx*")) for folder in spec.submodule_search_locations or ()
    )


def _metal_memory() -> int | None:
    """Bytes that Metal recommends a process to take at most.

    The user's setting, else about 2/3 of a small Mac's memory, 3/4 of a large one's.
    """
    total = machine.free_memory()
    if megabytes := machine.read_sysctl("iogpu.wired_limit_mb"):
        return megabytes << 20
    return None if total is None else total * 3 // 4 if total >= 36 << 30 else total * 2 // 3
