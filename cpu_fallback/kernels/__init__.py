"""The CPU's compiled path: LLVM vector code written from Python, weights in panels, a forward pass as one program.

layouts: weights and activations in memory; panels: weights into their layout; emit: writing LLVM code; arithmetic: the
kernels; program: operations as data; target: instruction sets and the cache of machine code; lowering: the model's
forward into programs; workspace: their memory; team: threads; runner: running them. Nothing here is imported before a
model is loaded, and NumPy does the work where llvmlite is not installed.
"""

from __future__ import annotations

import importlib.util
import os
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlx_llama.core.errors import BackendError

if TYPE_CHECKING:
    from .target import Target

VARIABLE = "MLX_LLAMA_CPU_TARGET"


def find_target() -> tuple[Target | None, str]:
    """The best instruction set of this machine, or the one that MLX_LLAMA_CPU_TARGET names; or None and the reason.

    Raises BackendError when the variable names one that this machine does not have.
    """
    wanted = os.environ.get(VARIABLE, "")
    if wanted == "numpy":
        return None, f"{VARIABLE} asks for it"
    if importlib.util.find_spec("llvmlite") is None:
        if wanted:
            raise BackendError(f"{VARIABLE}={wanted} needs the package 'llvmlite', which is not installed: "
                               "pip install llvmlite")
        return None, "the package 'llvmlite' is not installed (pip install llvmlite)"
    from . import target

    names = target.available()
    if wanted and wanted not in names:
        raise BackendError(f"{VARIABLE}={wanted} is not what this machine can run: choose "
                           f"{', '.join([*names, 'numpy'])}, or leave it unset")
    if not names:
        return None, f"there are no kernels for this processor ({platform.machine() or 'unknown'})"
    return target.target(wanted or names[0]), ""


@dataclass(frozen=True)
class Compilation:
    """How a model is compiled. threads: that walk its programs; activation_bits: 8, 16 or 32, against low-bit weights."""

    target: Target
    threads: int
    activation_bits: int
