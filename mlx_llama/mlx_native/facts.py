"""The MLX backend as the doctor describes it. Imports no MLX."""

from __future__ import annotations

import importlib.util
import math
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path

from mlx_llama.core.backends.interface import ITEMSIZE, BackendFacts, WeightsPlan
from mlx_llama.core.files.checkpoint import Tensor
from mlx_llama.core.files.quantized import AffineWeight
from mlx_llama.core.system import machine
from mlx_llama.core.system.gpus import Gpus

DISTRIBUTIONS = ("mlx", "mlx-metal", "mlx-cpu", "mlx-cuda", "mlx-cuda-12", "mlx-cuda-13")
SUB_BITS = {"Q2_K": 4, "Q4_K": 8, "Q5_K": 8}  # bits for a sub scale, and for the sub bias beside it; other formats have none
INDEX_BITS = {"IQ4_XS": 4}  # bits of an index into the table of codes; other formats have none


def describe(packages: dict[str, str], gpus: Gpus) -> BackendFacts:
    """This backend here. packages: versions of those `DISTRIBUTIONS` that are installed."""
    free = machine.free_memory()
    if platform.system() == "Darwin":
        if platform.machine() == "arm64":
            memory = _metal_memory()
            return BackendFacts("mlx", True, "", packages, True, "the GPU, through Metal", (), memory, "an estimate",
                                kernels="metal")
        return BackendFacts("mlx", True, "Metal needs Apple silicon", packages, False, "the CPU", (), free, "free")
    if not any(name.startswith("mlx-") for name in packages) and not _has_library():
        return BackendFacts("mlx", False, "backend 'mlx' lacks its library, which the package 'mlx' alone does not "
                            "bring here: pip install 'mlx[cpu]' (or 'mlx[cuda13]' for NVIDIA GPUs)", packages)
    if any(name.startswith("mlx-cuda") for name in packages):
        if gpus.seen is False:
            return BackendFacts("mlx", True, gpus.absence, packages, False, "the CPU", (), free, "free")
        name, memory = gpus.first[:2] if gpus.first else ("a GPU", None)
        return BackendFacts("mlx", True, "", packages, gpus.seen, name, (), memory, "free" if memory else "")
    return BackendFacts("mlx", True, "no GPU: Metal needs Apple silicon, CUDA the package mlx[cuda13]", packages, False,
                        "the CPU", (), free, "free")


def plan_weights(tensors: Iterable[Tensor | AffineWeight], stored: str, facts: BackendFacts,
                 exceeds_float16: bool = False) -> WeightsPlan:
    """Plan the weights for this machine's device. stored: the checkpoint's dtype."""
    tensors, on_gpu = list(tensors), facts.gpu is not False
    operands = [product_dtype(weight, stored, on_gpu) for weight in tensors if isinstance(weight, AffineWeight)]
    nbytes = sum(tensor_nbytes(tensor, stored, on_gpu, facts.kernels is not None) for tensor in tensors)
    return WeightsPlan(stored, " or ".join(dict.fromkeys(operands)), nbytes)


def weights_nbytes(tensors: Iterable[Tensor | AffineWeight], dtype: str, on_gpu: bool) -> int:
    """Bytes of all packed weights. dtype: of the activations."""
    return sum(tensor_nbytes(tensor, dtype, on_gpu) for tensor in tensors)


def tensor_nbytes(weight: Tensor | AffineWeight, dtype: str, on_gpu: bool, has_kernel: bool = True) -> int:
    """Bytes of a packed tensor. dtype: of the activations. has_kernel: as in `keeps_levels`."""
    count = math.prod(weight.shape)
    if not isinstance(weight, AffineWeight):
        return count * ITEMSIZE[dtype]
    groups, bits = count // weight.group_size, weight.bits
    if keeps_levels(weight, on_gpu, has_kernel):
        bits = INDEX_BITS.get(weight.format, bits)
        # A number for each group's sub scale and sub bias, float16 for super scales and super biases.
        scalings = groups * (2 if SUB_BITS.get(weight.format) == 8 else 1) + count // 256 * 2 * (1 + weight.has_biases)
    else:
        scalings = 2 * groups * ITEMSIZE[product_dtype(weight, dtype, on_gpu)]
    return count * bits // 8 + scalings


def keeps_levels(weight: AffineWeight, on_gpu: bool, has_kernel: bool = True) -> bool:
    """True if a matrix keeps its two levels of scales, for the kernels of two_level.py.

    MLX's own kernels need a scale and a bias for each group of 32, which would take 0.4 to 1.4 bits more per weight. They do
    multiply experts, since they choose matrices by number. has_kernel: two_level's kernels run on this GPU.
    """
    return on_gpu and has_kernel and weight.two_level and ".experts." not in weight.name


def product_dtype(weight: AffineWeight, dtype: str, on_gpu: bool) -> str:
    """The dtype of a low-bit matrix's products, and of its scales and biases. dtype: of the activations.

    A GPU keeps the activations' dtype if stored scales have it too; its kernels sum 16-bit operands in float32. Otherwise it
    is float32: on the CPU MLX sums 16-bit operands in 16 bits, 1e-2 off and 8 to 40 times slower.
    """
    return dtype if on_gpu and weight.scale_dtype == dtype else "float32"


def _has_library() -> bool:
    spec = importlib.util.find_spec("mlx")
    return any(any(Path(folder).glob("lib/libmlx*")) for folder in spec.submodule_search_locations or ())


def _metal_memory() -> int | None:
    """The maximum that Metal recommends for a process, in bytes.

    It is the user's setting, else about two thirds of a small Mac's memory and three quarters of a large Mac's.
    """
    total = machine.free_memory()
    answer = subprocess.run(["sysctl", "-n", "iogpu.wired_limit_mb"], capture_output=True, text=True).stdout.strip()
    if answer.isdigit() and int(answer) > 0:
        return int(answer) << 20
    return None if total is None else total * 3 // 4 if total >= 36 << 30 else total * 2 // 3
