"""The cuda backend as the doctor describes it. Imports no torch."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from mlx_llama.core.backends.interface import BackendFacts, WeightsPlan
from mlx_llama.core.dtypes import ITEMSIZE
from mlx_llama.core.files.checkpoint import Checkpoint, Tensor
from mlx_llama.core.files.quantized import AffineWeight, GGUFWeight
from mlx_llama.core.system import machine
from mlx_llama.core.system.machine import Gpus

DISTRIBUTIONS = ("torch", "triton")
DROPS_POSITIONS = False  # layers with a window keep what it sees
KERNELS_CAPABILITY = 8.0  # least compute capability for the Triton kernels
BFLOAT16_CAPABILITY = 8.0  # compute capability of the first NVIDIA GPUs with bfloat16 instructions


def describe(packages: dict[str, str], gpus: Gpus) -> BackendFacts:
    facts = partial(BackendFacts, "cuda", True, packages=packages)
    if gpus.seen is False or not _torch_has_gpus():
        absence = "torch is built without CUDA: install the build for GPUs "
        absence += "(https://pytorch.org/get-started)"
        if gpus.seen is False:
            absence = gpus.absence
        device = {"device": "torch's CPU device", "options": (("device", "cpu"),)}
        memory = {"memory_bytes": machine.free_memory(), "memory_is": "free"}
        return facts(reason=f"no GPU: {absence}", **device, **memory)
    if gpus.first is None:
        reason = "nvidia-smi does not name the GPU"
        return facts(reason=reason, gpu=None, device="a GPU, if torch sees one")
    name, memory, capability = gpus.first
    reason = ""
    if capability < KERNELS_CAPABILITY:
        reason = (
            f"decoding is slow: the kernels need compute capability {KERNELS_CAPABILITY}, and this "
            f"GPU has {capability}"
        )
    elif "triton" not in packages:
        reason = "without the package triton decoding is slow: pip install triton"
    facts = partial(facts, gpu=True, device=name, memory_bytes=memory, memory_is="free")
    return facts(reason=reason, has_bfloat16=capability >= BFLOAT16_CAPABILITY)


def plan_weights(checkpoint: Checkpoint, facts: BackendFacts) -> WeightsPlan:
    tensors = list(checkpoint.tensors.values())
    dtype = preferred_dtype(tensors, checkpoint.dtype)
    if dtype == "bfloat16" and not facts.has_bfloat16:
        dtype = "float32" if checkpoint.config.exceeds_float16 else "float16"
    low_bit = any(isinstance(weight, AffineWeight) for weight in tensors)
    return WeightsPlan(
        dtype, dtype if low_bit else "", weights_nbytes(tensors, dtype, facts.gpu is not False)
    )


def preferred_dtype(tensors: Iterable[Tensor | AffineWeight], stored: str) -> str:
    """The activations' dtype, if the device has it. stored: the checkpoint's dtype.

    GGUF's low-bit weights take bfloat16, in which the families were trained, for its range.
    """
    return "bfloat16" if any(isinstance(weight, GGUFWeight) for weight in tensors) else stored


def weights_nbytes(tensors: Iterable[Tensor | AffineWeight], dtype: str, on_gpu: bool) -> int:
    """Bytes of all packed weights: low-bit ones as in the file, others in `dtype`."""
    total = 0
    for weight in tensors:
        count = math.prod(weight.shape)
        if not isinstance(weight, AffineWeight):
            total += count * ITEMSIZE[dtype]
        elif weight.table == "fp4" or weight.mode == "mxfp8":  # whose scales are widened
            bits = 4 if weight.table else 8
            total += count * bits // 8 + count // weight.group_size * ITEMSIZE[weight.scale_dtype]
        else:
            total += weight.nbytes
    return total


def _torch_has_gpus() -> bool:
    """True if torch was built for GPUs, by its version.py, or if that does not tell."""
    spec = importlib.util.find_spec("torch")
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except (OSError, TypeError, UnicodeDecodeError):
        return True
    values = re.findall(r"^(?:cuda|hip)\b[^=\n]*=\s*(.+)$", text, re.M)
    return not values or any(value.strip() != "None" for value in values)
