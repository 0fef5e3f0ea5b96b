"""The CPU's compiled path: LLVM vector code written from Python, weights in panels, a forward pass
as one program.

Without llvmlite the model runs in NumPy. The files are imported with a model; `find_target`, here,
chooses an instruction set.

    target, image             instruction sets, the cache of machine code, and loading it
    emit                      LLVM code from Python
    layouts, panels, panel_files, filling     weights and activations in memory; packing weights
    codes, products, unpacked, packing, norms, paging, attention, routing     kernels
    recipe, records, operations, interpreter, program     a forward as data, and the code that executes it
    lowering, ops, workspace  core's forward as programs, and their buffers
    team, runner              threads, and the calls of a model
    bus_errors                a handler that survives truncated weights
    profile                   times of operations
"""  # noqa: E501

from __future__ import annotations

import importlib.util
import os
import platform
from typing import TYPE_CHECKING

from mlx_llama.core.errors import BackendError

if TYPE_CHECKING:
    from .target import Target

VARIABLE = "MLX_LLAMA_CPU_TARGET"


def find_target() -> tuple[Target | None, str]:
    """The best target of this machine, or the target named by MLX_LLAMA_CPU_TARGET; or None and the
    reason.

    Raises BackendError if the variable names a target that this machine lacks.
    """
    requested = os.environ.get(VARIABLE, "")
    if requested == "numpy":
        return None, f"{VARIABLE} asks for it"
    if importlib.util.find_spec("llvmlite") is None:
        if requested:
            raise BackendError(
                f"{VARIABLE}={requested} needs the package 'llvmlite', which is not installed: "
                "pip install llvmlite"
            )
        return None, "the package 'llvmlite' is not installed (pip install llvmlite)"
    from . import target

    names = target.available()
    if requested and requested not in names:
        raise BackendError(
            f"{VARIABLE}={requested} is unavailable on this machine: choose "
            f"{', '.join([*names, 'numpy'])}, or leave it unset"
        )
    if not names:
        return None, f"there are no kernels for this processor ({platform.machine() or 'unknown'})"
    return target.build_target(requested or names[0]), ""
